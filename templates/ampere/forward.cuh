// Forward attention with warp-wide tensor-core products (mma.sync) and asynchronous copies: sm_80 and later, 16-bit elements.
//
// A CTA owns BLOCK_Q query rows, each warp ROWS_PER_WARP of them, and walks over KV tiles from the right edge to the left, so that masked
// tiles come first. K and V tiles pass through rings of NUM_STAGES slots. Copies are issued in the order K0 V0 K1 V1 …, one group each;
// whenever a tile is needed, exactly 2 * NUM_STAGES - 2 younger groups may still be in flight.
#pragma once
#include "mask.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace fg {

template <class C>
struct AmpereShape {
  static constexpr int CHUNKS = ceil_div(C::HEAD_DIM, 16) * 2, CHUNKS_V = ceil_div(C::HEAD_DIM_V, 16) * 2;
  static constexpr int Q_BYTES = C::BLOCK_Q * RowLayout<CHUNKS>::ROW_BYTES;
  static constexpr int K_BYTES = C::BLOCK_KV * RowLayout<CHUNKS>::ROW_BYTES, V_BYTES = C::BLOCK_KV * RowLayout<CHUNKS_V>::ROW_BYTES;
  static constexpr int RING_BYTES = C::NUM_STAGES * (K_BYTES + V_BYTES);
  // Queries kept in registers pass through the space of the rings before the first copy of K.
  static constexpr int TOTAL_BYTES = C::Q_IN_REGISTERS ? maximum(Q_BYTES, RING_BYTES) : Q_BYTES + RING_BYTES;
  static_assert(TOTAL_BYTES == C::SHARED_BYTES, "the layout of shared memory is the formula of the search space");

  static constexpr int ROWS_PER_WARP = C::BLOCK_Q / C::NUM_WARPS;
  static constexpr int ROW_TILES = ROWS_PER_WARP / 16;  // 16-row products per warp
  static constexpr int DEPTH = CHUNKS / 2;              // 16-deep products of Q K^T
  static constexpr int SCORE_TILES = C::BLOCK_KV / 8;   // 8-column products
  static constexpr int OUTPUT_TILES = CHUNKS_V;
  static_assert(ROWS_PER_WARP % 16 == 0 && C::BLOCK_KV % 16 == 0, "warps and tiles hold whole products");
};

// The K and V tiles of one query tile on their way through shared memory; `step` counts tiles from the right edge.
template <class C>
struct KeyValueRing {
  using Shape = AmpereShape<C>;
  using Element = typename C::Element;
  const Element *k, *v;
  i64 k_stride, v_stride;
  int seqlen, newest_tile, steps;
  bool vector_access;
  u32 k_slots, v_slots;

  FG_DEVICE KeyValueRing(const ForwardParams& params, const Place& place, const TileRange<C>& range, u32 shared)
      : k(head_of<Element>(params.k, params.k_strides, place.batch, place.head_kv)),
        v(head_of<Element>(params.v, params.v_strides, place.batch, place.head_kv)),
        k_stride(params.k_strides.row),
        v_stride(params.v_strides.row),
        seqlen(params.seqlen_kv),
        newest_tile(range.last - 1),
        steps(range.count()),
        vector_access(params.vector_access != 0),
        k_slots(shared),
        v_slots(shared + C::NUM_STAGES * Shape::K_BYTES) {}

  FG_DEVICE u32 keys(int step) const { return k_slots + static_cast<u32>(step % C::NUM_STAGES * Shape::K_BYTES); }
  FG_DEVICE u32 values(int step) const { return v_slots + static_cast<u32>(step % C::NUM_STAGES * Shape::V_BYTES); }

  // A step past the end closes an empty group, which keeps the count of groups in step with the count of tiles.
  FG_DEVICE void prefetch_keys(int step) const {
    if (step < steps) {
      const int row = (newest_tile - step) * C::BLOCK_KV;
      RowCopy<C, C::BLOCK_KV, C::HEAD_DIM, Shape::CHUNKS>::start(keys(step), k + row * k_stride, k_stride, seqlen - row, vector_access);
    }
    copy_async_commit();
  }
  FG_DEVICE void prefetch_values(int step) const {
    if (step < steps) {
      const int row = (newest_tile - step) * C::BLOCK_KV;
      RowCopy<C, C::BLOCK_KV, C::HEAD_DIM_V, Shape::CHUNKS_V>::start(values(step), v + row * v_stride, v_stride, seqlen - row,
                                                                     vector_access);
    }
    copy_async_commit();
  }
  // The first copies, so that the loop starts with as many groups in flight as it keeps.
  FG_DEVICE void fill() const {
    prefetch_keys(0);
    FG_UNROLL
    for (int step = 1; step < C::NUM_STAGES; ++step) {
      prefetch_values(step - 1);
      prefetch_keys(step);
    }
  }
  // The next K or V tile has landed for every thread, and every warp is done with the slot that the next prefetch overwrites.
  FG_DEVICE void wait() const {
    copy_async_wait<2 * C::NUM_STAGES - 2>();
    block_sync();
  }
};

// The query rows of one warp as left operands: from registers, or from shared memory at every use.
template <class C>
struct QueryFragments {
  using Shape = AmpereShape<C>;
  static constexpr int KEPT = C::Q_IN_REGISTERS ? Shape::DEPTH : 1;
  FragmentCursor<Shape::CHUNKS> cursor;
  u32 kept[KEPT][Shape::ROW_TILES][4];

  FG_DEVICE QueryFragments(u32 tile, int warp, int lane) : cursor(tile, warp * Shape::ROWS_PER_WARP + lane % 16, lane / 16) {}

  FG_DEVICE void load(u32 (&fragment)[4], int m, int depth) const { load_matrix_x4(fragment, cursor.at(m * 16, depth * 2)); }
  FG_DEVICE void keep() {
    FG_UNROLL
    for (int depth = 0; depth < KEPT; ++depth) {
      FG_UNROLL
      for (int m = 0; m < Shape::ROW_TILES; ++m) load(kept[depth][m], m, depth);
    }
  }
};

template <class C>
using Scores = float[AmpereShape<C>::ROW_TILES][AmpereShape<C>::SCORE_TILES][4];
template <class C>
using Output = float[AmpereShape<C>::ROW_TILES][AmpereShape<C>::OUTPUT_TILES][4];

template <int A, int B>
FG_DEVICE void clear(float (&tiles)[A][B][4]) {
  FG_UNROLL
  for (int a = 0; a < A; ++a) {
    FG_UNROLL
    for (int b = 0; b < B; ++b) {
      FG_UNROLL
      for (int i = 0; i < 4; ++i) tiles[a][b][i] = 0.0f;
    }
  }
}

// S = Q K^T for the rows of one warp.
template <class C>
FG_DEVICE void multiply_keys(Scores<C>& scores, const QueryFragments<C>& queries, u32 keys, int lane) {
  using Shape = AmpereShape<C>;
  using Element = typename C::Element;
  const FragmentCursor<Shape::CHUNKS> cursor(keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
  FG_UNROLL
  for (int depth = 0; depth < Shape::DEPTH; ++depth) {
    u32 a[Shape::ROW_TILES][4];
    FG_UNROLL
    for (int m = 0; m < Shape::ROW_TILES; ++m) {
      if constexpr (C::Q_IN_REGISTERS) {
        FG_UNROLL
        for (int i = 0; i < 4; ++i) a[m][i] = queries.kept[depth][m][i];
      } else {
        queries.load(a[m], m, depth);
      }
    }
    FG_UNROLL
    for (int n = 0; n < Shape::SCORE_TILES; n += 2) {
      u32 b[4];
      load_matrix_x4(b, cursor.at(n * 8, depth * 2));
      FG_UNROLL
      for (int m = 0; m < Shape::ROW_TILES; ++m) {
        if (depth == 0) {
          multiply_first_16x8x16(scores[m][n], a[m], b[0], b[1], Element{});
          multiply_first_16x8x16(scores[m][n + 1], a[m], b[2], b[3], Element{});
        } else {
          multiply_16x8x16(scores[m][n], a[m], b[0], b[1], Element{});
          multiply_16x8x16(scores[m][n + 1], a[m], b[2], b[3], Element{});
        }
      }
    }
  }
}

// O += P V. The accumulator layout of two 8-column score tiles is the operand layout of one 16-deep product: no data moves between lanes.
template <class C>
FG_DEVICE void multiply_values(Output<C>& output, const Scores<C>& probabilities, u32 values, int lane) {
  using Shape = AmpereShape<C>;
  using Element = typename C::Element;
  const FragmentCursor<Shape::CHUNKS_V> cursor(values, lane % 16, lane / 16);
  FG_UNROLL
  for (int n = 0; n < Shape::SCORE_TILES; n += 2) {
    u32 a[Shape::ROW_TILES][4];
    FG_UNROLL
    for (int m = 0; m < Shape::ROW_TILES; ++m) {
      FG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* pair = &probabilities[m][n + i / 2][i % 2 * 2];
        a[m][i] = pack_pair(pair[0], pair[1], Element{});
      }
    }
    FG_UNROLL
    for (int d = 0; d < Shape::OUTPUT_TILES; d += 2) {
      u32 b[4];
      load_matrix_x4_transposed(b, cursor.at(n * 8, d));
      FG_UNROLL
      for (int m = 0; m < Shape::ROW_TILES; ++m) {
        multiply_16x8x16(output[m][d], a[m], b[0], b[1], Element{});
        multiply_16x8x16(output[m][d + 1], a[m], b[2], b[3], Element{});
      }
    }
  }
}

// Hides the scores that a row must not see. `row` and `column` are the lane's first ones.
template <class C>
FG_DEVICE void apply_mask(Scores<C>& scores, const ForwardParams& params, int row, int column) {
  using Shape = AmpereShape<C>;
  FG_UNROLL
  for (int m = 0; m < Shape::ROW_TILES; ++m) {
    FG_UNROLL
    for (int half = 0; half < 2; ++half) {
      const VisibleKeys keys = visible_keys<C>(params, row + m * 16 + half * 8);
      FG_UNROLL
      for (int n = 0; n < Shape::SCORE_TILES; ++n) {
        FG_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int key = column + n * 8 + j;
          if (key > keys.last || (C::MASK == MASK_WINDOW && key < keys.first)) scores[m][n][half * 2 + j] = -infinity();
        }
      }
    }
  }
}

// Four lanes hold four 8-column tiles of one row, two columns each; afterwards each lane holds the 8 columns of one tile.
FG_DEVICE void transpose_quad(u32 (&word)[4], int quad) {
  FG_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    FG_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = (quad & step) != 0;
      const u32 given = upper ? word[i] : word[i + step];
      const u32 taken = shuffle_xor(given, step);
      if (upper) {
        word[i] = taken;
      } else {
        word[i + step] = taken;
      }
    }
  }
}

// Normalises, converts and stores the rows of one warp, 16 bytes per lane.
template <class C>
FG_DEVICE void store_output(const Output<C>& output, const OnlineSoftmax<C, AmpereShape<C>::ROW_TILES>& softmax,
                            const ForwardParams& params, const Place& place, int row, int lane) {
  using Shape = AmpereShape<C>;
  using Element = typename C::Element;
  Element* o = head_of<Element>(params.o, params.o_strides, place.batch, place.head_q);
  const int quad = lane % 4;
  FG_UNROLL
  for (int r = 0; r < 2 * Shape::ROW_TILES; ++r) {
    const int target_row = row + r * 8;
    const float inverse = softmax.empty(r) ? 0.0f : 1.0f / softmax.row_sum[r];
    FG_UNROLL
    for (int first = 0; first < Shape::OUTPUT_TILES; first += 4) {
      u32 word[4];
      FG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int n = minimum(first + i, Shape::OUTPUT_TILES - 1);
        const float* pair = &output[r / 2][n][r % 2 * 2];
        word[i] = pack_pair(pair[0] * inverse, pair[1] * inverse, Element{});
      }
      transpose_quad(word, quad);
      const int chunk = first + quad;
      if (target_row >= params.seqlen_q || chunk * CHUNK_ELEMENTS >= C::HEAD_DIM_V) continue;
      Element* target = o + target_row * params.o_strides.row + chunk * CHUNK_ELEMENTS;
      const Vector16 vector = {{word[0], word[1], word[2], word[3]}};
      if (params.vector_access) {
        store_global(reinterpret_cast<Vector16*>(target), vector);
      } else {
        scatter_16(target, vector);
      }
    }
  }
}

template <class C>
FG_DEVICE void store_lse(const OnlineSoftmax<C, AmpereShape<C>::ROW_TILES>& softmax, const ForwardParams& params, const Place& place,
                         int row, int lane) {
  float* lse = lse_of(params, place);
  FG_UNROLL
  for (int r = 0; r < 2 * AmpereShape<C>::ROW_TILES; ++r) {
    const float value = softmax.lse(r, params.scale_log2);
    if (lane % 4 == 0 && row + r * 8 < params.seqlen_q) store_global(lse + row + r * 8, value);
  }
}

// The rows of one warp: its queries, its running softmax, its output.
template <class C>
struct WarpRows {
  using Shape = AmpereShape<C>;
  const ForwardParams& params;
  const int lane, lane_row;  // first row of the lane
  const TileRange<C> range;  // of the rows of this warp
  QueryFragments<C> queries;
  OnlineSoftmax<C, Shape::ROW_TILES> softmax;
  Output<C> output;

  FG_DEVICE WarpRows(const ForwardParams& all, int cta_row, int warp, int own_lane, u32 q_tile)
      : params(all),
        lane(own_lane),
        lane_row(cta_row + warp * Shape::ROWS_PER_WARP + own_lane / 4),
        range(all, cta_row + warp * Shape::ROWS_PER_WARP, Shape::ROWS_PER_WARP),
        queries(q_tile, warp, own_lane) {
    clear(output);
  }

  FG_DEVICE void score(Scores<C>& scores, u32 keys) const { multiply_keys<C>(scores, queries, keys, lane); }
  FG_DEVICE void mask(Scores<C>& scores, int tile) const {
    if (range.needs_mask(tile)) apply_mask<C>(scores, params, lane_row, tile * C::BLOCK_KV + lane % 4 * 2);
  }
  FG_DEVICE void accumulate(const Scores<C>& probabilities, u32 values) { multiply_values<C>(output, probabilities, values, lane); }
};

// Load, score, mask, softmax, accumulate: one tile after the other.
template <class C>
FG_DEVICE void walk(const ForwardParams& params, const KeyValueRing<C>& ring, WarpRows<C>& rows, int first_tile) {
  ring.fill();  // without Q_IN_REGISTERS, the copies of Q belong to the group of the first K tile
  FG_NO_UNROLL
  for (int step = 0; step < ring.steps; ++step) {
    const int tile = first_tile - step;
    const bool sees = !C::MASKED || tile < rows.range.last;  // a warp sits out the tiles right of its own diagonal
    Scores<C> scores;
    ring.wait();
    ring.prefetch_values(step + C::NUM_STAGES - 1);
    if (sees) {
      rows.score(scores, ring.keys(step));
      rows.mask(scores, tile);
      rows.softmax.update(scores, rows.output, params.scale_log2);
    }
    ring.wait();
    ring.prefetch_keys(step + C::NUM_STAGES);
    if (sees) rows.accumulate(scores, ring.values(step));
  }
}

template <class C>
FG_DEVICE void forward(const ForwardParams& params) {
  using Shape = AmpereShape<C>;
  using Element = typename C::Element;
  const int lane = thread_index() % WARP_LANES, warp = thread_index() / WARP_LANES;
  const Place place = place_of_block<C>(params, block_index());
  const TileRange<C> range(params, place.first_row, C::BLOCK_Q);
  const u32 shared = dynamic_shared();
  const KeyValueRing<C> ring(params, place, range, C::Q_IN_REGISTERS ? shared : shared + Shape::Q_BYTES);
  WarpRows<C> rows(params, place.first_row, warp, lane, shared);

  const Element* q = head_of<Element>(params.q, params.q_strides, place.batch, place.head_q) + place.first_row * params.q_strides.row;
  RowCopy<C, C::BLOCK_Q, C::HEAD_DIM, Shape::CHUNKS>::start(shared, q, params.q_strides.row, params.seqlen_q - place.first_row,
                                                            params.vector_access != 0);
  if constexpr (C::Q_IN_REGISTERS) {
    copy_async_commit();
    copy_async_wait<0>();
    block_sync();
    rows.queries.keep();
    block_sync();  // the rings overwrite the queries
  }
  walk<C>(params, ring, rows, range.last - 1);
  rows.softmax.finish();
  store_output<C>(rows.output, rows.softmax, params, place, rows.lane_row, lane);
  store_lse<C>(rows.softmax, params, place, rows.lane_row, lane);
}

}  // namespace fg
