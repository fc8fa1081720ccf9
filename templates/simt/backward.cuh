// Gradients of attention with plain multiply-adds: the readable specification of every other backward family.
//
// No matrix of queries by keys is stored: P = exp(S - lse) is computed again, tile by tile. With dP = dO V^T and
// delta = rowsum(dO * O) - dlse, the gradient of the scaled scores is dS = P * (dP - delta), elementwise, and
//
//   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K
//
// Three launches: delta of every row; a CTA per tile of keys, which walks over the query rows that see it, head by head of its group; a CTA
// per tile of query rows, which walks over the keys that they see. Every sum has one owner and one order, so its bits never change.
#pragma once
#include "backward_params.cuh"
#include "mask.cuh"
#include "problem.cuh"

namespace fg {

constexpr float LOG2_E = 1.44269504088896341f;

// A row-major float32 matrix in shared memory. The pitch is odd, so that lanes reading one column of consecutive rows use different banks.
struct GradientMatrix {
  u32 base;
  int pitch;

  FG_DEVICE u32 address(int row, int column) const { return base + static_cast<u32>(row * pitch + column) * 4; }
  FG_DEVICE float load(int row, int column) const { return load_shared<float>(address(row, column)); }
  FG_DEVICE void store(int row, int column, float value) const { store_shared(address(row, column), value); }
};

template <class C>
struct BackwardTiles {
  static constexpr int PITCH = C::HEAD_DIM + 1, PITCH_V = C::HEAD_DIM_V + 1, PITCH_P = C::BLOCK_KV + 1;
  static constexpr int FLOATS = (C::BLOCK_Q + C::BLOCK_KV) * (PITCH + PITCH_V) + 2 * C::BLOCK_Q * PITCH_P;
  static_assert(FLOATS * 4 == C::SHARED_BYTES, "the layout of shared memory is the formula of the search space");

  GradientMatrix q, dout, k, v, p, ds;

  FG_DEVICE explicit BackwardTiles(u32 base)
      : q{base, PITCH},
        dout{q.address(C::BLOCK_Q, 0), PITCH_V},
        k{dout.address(C::BLOCK_Q, 0), PITCH},
        v{k.address(C::BLOCK_KV, 0), PITCH_V},
        p{v.address(C::BLOCK_KV, 0), PITCH_P},
        ds{p.address(C::BLOCK_Q, 0), PITCH_P} {}
};

// Rows past `valid_rows` become zeros: products with them are finite, and what they would add is hidden.
template <class C, int ROWS, int COLUMNS, class Element>
FG_DEVICE void load_tile(const GradientMatrix& tile, const Element* source, i64 row_stride, int valid_rows) {
  for (int i = thread_index(); i < ROWS * COLUMNS; i += C::THREADS) {
    const int row = i / COLUMNS, column = i % COLUMNS;
    tile.store(row, column, row < valid_rows ? to_float(load_global(source + row * row_stride + column)) : 0.0f);
  }
}

// One query head of the problem: what its rows read.
template <class C>
struct QueryHead {
  using Element = typename C::Element;
  const Element *q, *dout;
  const float *lse, *delta;

  FG_DEVICE QueryHead(const BackwardParams& params, int batch, int head) {
    const i64 first = (static_cast<i64>(batch) * params.forward.heads_q + head) * params.forward.seqlen_q;
    q = head_of<Element>(params.forward.q, params.forward.q_strides, batch, head);
    dout = head_of<Element>(params.dout, params.dout_strides, batch, head);
    lse = params.forward.lse + first;
    delta = static_cast<const float*>(params.forward.workspace) + first;
  }
  FG_DEVICE void load_rows(const BackwardTiles<C>& tiles, const BackwardParams& params, int row) const {
    const int rows = params.forward.seqlen_q - row;
    load_tile<C, C::BLOCK_Q, C::HEAD_DIM>(tiles.q, q + row * params.forward.q_strides.row, params.forward.q_strides.row, rows);
    load_tile<C, C::BLOCK_Q, C::HEAD_DIM_V>(tiles.dout, dout + row * params.dout_strides.row, params.dout_strides.row, rows);
  }
};

template <class C>
FG_DEVICE void load_keys(const BackwardTiles<C>& tiles, const ForwardParams& forward, int batch, int head, int key) {
  using Element = typename C::Element;
  const Element* k = head_of<Element>(forward.k, forward.k_strides, batch, head);
  const Element* v = head_of<Element>(forward.v, forward.v_strides, batch, head);
  load_tile<C, C::BLOCK_KV, C::HEAD_DIM>(tiles.k, k + key * forward.k_strides.row, forward.k_strides.row, forward.seqlen_kv - key);
  load_tile<C, C::BLOCK_KV, C::HEAD_DIM_V>(tiles.v, v + key * forward.v_strides.row, forward.v_strides.row, forward.seqlen_kv - key);
}

// Query rows [first, last) that may see one of the keys [key, key + keys).
struct SeeingRows {
  int first, last;
};
template <class C>
FG_DEVICE SeeingRows rows_that_see(const ForwardParams& forward, int key, int keys) {
  const int row = key - forward.diagonal;  // the row whose diagonal meets the first key
  SeeingRows rows = {0, forward.seqlen_q};
  if constexpr (C::MASK == MASK_CAUSAL) rows.first = maximum(rows.first, row);
  if constexpr (C::MASK == MASK_WINDOW) {
    rows.first = maximum(rows.first, row - forward.window_right);
    rows.last = minimum(rows.last, row + keys + forward.window_left);
  }
  return rows;
}

// The product of two rows, in the order of columns. delta is summed in the same order: where a row sees one key, dP - delta is exactly 0.
template <int COLUMNS>
FG_DEVICE float row_product(const GradientMatrix& left, int left_row, const GradientMatrix& right, int right_row) {
  float sum = 0.0f;
  for (int i = 0; i < COLUMNS; ++i) sum = fused_multiply_add(left.load(left_row, i), right.load(right_row, i), sum);
  return sum;
}

// P and dS of one pair of tiles, each thread every THREADS-th element. What is hidden is 0 and was never computed, so it cannot be NaN.
template <class C>
FG_DEVICE void recompute_scores(const BackwardTiles<C>& tiles, const BackwardParams& params, const QueryHead<C>& head, int first_row,
                                int first_key) {
  for (int i = thread_index(); i < C::BLOCK_Q * C::BLOCK_KV; i += C::THREADS) {
    const int r = i / C::BLOCK_KV, c = i % C::BLOCK_KV, row = first_row + r, key = first_key + c;
    const VisibleKeys keys = visible_keys<C>(params.forward, row);
    float probability = 0.0f, gradient = 0.0f;
    if (row < params.forward.seqlen_q && key >= keys.first && key <= keys.last) {
      const float score = row_product<C::HEAD_DIM>(tiles.q, r, tiles.k, c) * params.scale;
      probability = exp2_approx((score - load_global(head.lse + row)) * LOG2_E);
      gradient = probability * (row_product<C::HEAD_DIM_V>(tiles.dout, r, tiles.v, c) - load_global(head.delta + row));
    }
    tiles.p.store(r, c, probability);
    tiles.ds.store(r, c, gradient);
  }
}

// A ROWS x COLUMNS result; each thread sums every THREADS-th element in registers.
template <class C, int ROWS, int COLUMNS>
struct Sums {
  static constexpr int COUNT = ceil_div(ROWS * COLUMNS, C::THREADS);
  float sum[COUNT];

  FG_DEVICE Sums() {
    FG_UNROLL
    for (int i = 0; i < COUNT; ++i) sum[i] = 0.0f;
  }
  FG_DEVICE static int element(int i) { return thread_index() + i * C::THREADS; }

  // += left^T right, over LENGTH rows of both.
  template <int LENGTH>
  FG_DEVICE void add_transposed(const GradientMatrix& left, const GradientMatrix& right) {
    for (int t = 0; t < LENGTH; ++t) {
      FG_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        if (element(i) < ROWS * COLUMNS)
          sum[i] = fused_multiply_add(left.load(t, element(i) / COLUMNS), right.load(t, element(i) % COLUMNS), sum[i]);
      }
    }
  }
  // += left right, over LENGTH columns of left and rows of right.
  template <int LENGTH>
  FG_DEVICE void add(const GradientMatrix& left, const GradientMatrix& right) {
    for (int t = 0; t < LENGTH; ++t) {
      FG_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        if (element(i) < ROWS * COLUMNS)
          sum[i] = fused_multiply_add(left.load(element(i) / COLUMNS, t), right.load(t, element(i) % COLUMNS), sum[i]);
      }
    }
  }
  template <class Element>
  FG_DEVICE void store(Element* target, i64 row_stride, int valid_rows, float factor) const {
    FG_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      const int row = element(i) / COLUMNS, column = element(i) % COLUMNS;
      if (row < ROWS && row < valid_rows) store_global(target + row * row_stride + column, from_float<Element>(sum[i] * factor));
    }
  }
};

// delta = rowsum(dO * O) - dlse, one thread per row.
template <class C>
FG_DEVICE void deltas(const BackwardParams& params) {
  using Element = typename C::Element;
  const ForwardParams& forward = params.forward;
  const i64 index = block_index() * C::THREADS + thread_index();  // over batch, head, row
  if (index >= static_cast<i64>(forward.batch) * forward.heads_q * forward.seqlen_q) return;
  const int row = static_cast<int>(index % forward.seqlen_q), batch_head = static_cast<int>(index / forward.seqlen_q);
  const int batch = batch_head / forward.heads_q, head = batch_head % forward.heads_q;
  const Element* o = head_of<Element>(forward.o, forward.o_strides, batch, head) + row * forward.o_strides.row;
  const Element* dout = head_of<Element>(params.dout, params.dout_strides, batch, head) + row * params.dout_strides.row;
  float sum = 0.0f;
  for (int i = 0; i < C::HEAD_DIM_V; ++i) sum = fused_multiply_add(to_float(load_global(dout + i)), to_float(load_global(o + i)), sum);
  if (params.dlse) sum -= load_global(params.dlse + index);
  store_global(static_cast<float*>(forward.workspace) + index, sum);
}

// dK and dV of one tile of keys, summed over the rows that see it in every query head of the group.
template <class C>
FG_DEVICE void key_gradients(const BackwardParams& params) {
  using Element = typename C::Element;
  const ForwardParams& forward = params.forward;
  const int key_tiles = ceil_div(forward.seqlen_kv, C::BLOCK_KV), group = forward.heads_q / forward.heads_kv;
  const int key = static_cast<int>(block_index() % key_tiles) * C::BLOCK_KV, batch_head = static_cast<int>(block_index() / key_tiles);
  const int batch = batch_head / forward.heads_kv, head_kv = batch_head % forward.heads_kv;
  const BackwardTiles<C> tiles(dynamic_shared());
  const SeeingRows rows = rows_that_see<C>(forward, key, C::BLOCK_KV);
  Sums<C, C::BLOCK_KV, C::HEAD_DIM> dk;
  Sums<C, C::BLOCK_KV, C::HEAD_DIM_V> dv;

  load_keys(tiles, forward, batch, head_kv, key);
  for (int head_q = head_kv * group; head_q < (head_kv + 1) * group; ++head_q) {
    const QueryHead<C> head(params, batch, head_q);
    for (int row = rows.first; row < rows.last; row += C::BLOCK_Q) {
      head.load_rows(tiles, params, row);
      block_sync();
      recompute_scores(tiles, params, head, row, key);
      block_sync();
      dv.template add_transposed<C::BLOCK_Q>(tiles.p, tiles.dout);
      dk.template add_transposed<C::BLOCK_Q>(tiles.ds, tiles.q);
      block_sync();  // the next rows overwrite these
    }
  }
  Element* dk_rows = head_of<Element>(params.dk, params.dk_strides, batch, head_kv) + key * params.dk_strides.row;
  Element* dv_rows = head_of<Element>(params.dv, params.dv_strides, batch, head_kv) + key * params.dv_strides.row;
  dk.store(dk_rows, params.dk_strides.row, forward.seqlen_kv - key, params.scale);
  dv.store(dv_rows, params.dv_strides.row, forward.seqlen_kv - key, 1.0f);
}

// dQ of one tile of query rows.
template <class C>
FG_DEVICE void query_gradients(const BackwardParams& params) {
  using Element = typename C::Element;
  const ForwardParams& forward = params.forward;
  const int row_tiles = ceil_div(forward.seqlen_q, C::BLOCK_Q);
  const int row = static_cast<int>(block_index() % row_tiles) * C::BLOCK_Q, batch_head = static_cast<int>(block_index() / row_tiles);
  const int batch = batch_head / forward.heads_q, head_q = batch_head % forward.heads_q;
  const int head_kv = head_q / (forward.heads_q / forward.heads_kv);
  const BackwardTiles<C> tiles(dynamic_shared());
  const QueryHead<C> head(params, batch, head_q);
  const TileRange<C> range(forward, row, C::BLOCK_Q);
  Sums<C, C::BLOCK_Q, C::HEAD_DIM> dq;

  head.load_rows(tiles, params, row);
  for (int tile = range.first; tile < range.last; ++tile) {
    load_keys(tiles, forward, batch, head_kv, tile * C::BLOCK_KV);
    block_sync();
    recompute_scores(tiles, params, head, row, tile * C::BLOCK_KV);
    block_sync();
    dq.template add<C::BLOCK_KV>(tiles.ds, tiles.k);
    block_sync();  // the next keys overwrite these
  }
  Element* dq_rows = head_of<Element>(params.dq, params.dq_strides, batch, head_q) + row * params.dq_strides.row;
  dq.store(dq_rows, params.dq_strides.row, forward.seqlen_q - row, params.scale);
}

}  // namespace fg
