// Gradients of attention with warp-wide tensor-core products (mma.sync) and asynchronous copies: sm_80 and later, 16-bit elements.
//
// P = exp(S - lse) is computed again, tile by tile, transposed: S^T = K Q^T, so that keys are rows. With dP^T = V dO^T and
// delta = rowsum(dO * O) - dlse, dS^T = P^T * (dP^T - delta), and
//
//   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K
//
// A CTA owns BLOCK_KV keys and walks over the query rows that see them, head by head of the group. Its warps may be split in two sides. The
// probability side computes S^T, P^T and sums dV; the gradient side computes dP^T, takes P^T over from its twin on the other side, and sums
// dK. So no thread holds more than one of the two sums, each warp owns twice the keys, and every fragment of Q and dO that is loaded from
// shared memory serves twice the products. While one side is busy with exponentials, the other keeps the tensor cores busy. With one side,
// every warp does both, for JOINT_ROWS query rows at a time: P^T never leaves its registers, which suits small head dims.
//
// dQ: all warps multiply a tile of dS, with DELAYED_DQ that of the step before, and add it to float32 sums in global memory, whose order is
// not defined; a last launch converts them. With TWO_PASS, that launch computes dQ in a loop of its own instead, and equal inputs give
// equal bits.
#pragma once
#include "backward_params.cuh"
#include "fragments.cuh"
#include "mask.cuh"

namespace fg {

constexpr float LOG2_E = 1.44269504088896341f;

template <class C>
struct BackwardShape {
  static constexpr int CHUNKS = ceil_div(C::HEAD_DIM, 16) * 2, CHUNKS_V = ceil_div(C::HEAD_DIM_V, 16) * 2, CHUNKS_Q = C::BLOCK_Q / 8;
  static constexpr int Q_BYTES = C::BLOCK_Q * RowLayout<CHUNKS>::ROW_BYTES, DOUT_BYTES = C::BLOCK_Q * RowLayout<CHUNKS_V>::ROW_BYTES;
  static constexpr int K_BYTES = C::BLOCK_KV * RowLayout<CHUNKS>::ROW_BYTES, V_BYTES = C::BLOCK_KV * RowLayout<CHUNKS_V>::ROW_BYTES;
  static constexpr int STATISTIC_BYTES = C::BLOCK_Q * 8;  // lse and delta
  static constexpr int STAGE_BYTES = Q_BYTES + DOUT_BYTES + STATISTIC_BYTES;
  static constexpr int SCORE_BYTES = C::BLOCK_KV * RowLayout<CHUNKS_Q>::ROW_BYTES;  // a tile of P^T or dS^T
  // Multiplied one step later, dS needs two tiles; with a second pass for dQ, only warps that share keys read it.
  static constexpr int GRADIENT_TILES = C::TWO_PASS ? C::WARPS_ACROSS - 1 : C::DELAYED_DQ ? 2 : 1;
  static constexpr int V_AT = K_BYTES, STAGES_AT = V_AT + V_BYTES, P_AT = STAGES_AT + C::NUM_STAGES * STAGE_BYTES;
  static constexpr bool SPLIT = C::NUM_SIDES == 2;
  static constexpr bool SHARED_P = SPLIT && (C::ROUNDED_HANDOVER || C::WARPS_ACROSS > 1);  // P^T in the element type
  static constexpr bool HANDED_P = SPLIT && !C::ROUNDED_HANDOVER;                          // P^T in float32
  static constexpr int HANDED_AT = P_AT + (SHARED_P ? SCORE_BYTES : 0);
  static constexpr int GRADIENTS_AT = HANDED_AT + (HANDED_P ? C::BLOCK_KV * C::BLOCK_Q * 4 : 0);
  static_assert(GRADIENTS_AT + GRADIENT_TILES * SCORE_BYTES == C::SHARED_BYTES, "the layout of shared memory is the formula of the space");

  static constexpr int SIDE_WARPS = C::NUM_WARPS / C::NUM_SIDES;
  static constexpr int WARPS_DOWN = SIDE_WARPS / C::WARPS_ACROSS;  // keys down, rows or columns across
  static constexpr int KEYS_PER_WARP = C::BLOCK_KV / WARPS_DOWN;
  static constexpr int ROWS_PER_WARP = SPLIT ? C::BLOCK_Q / C::WARPS_ACROSS : C::JOINT_ROWS;  // whose scores it holds at a time
  static constexpr int KEY_TILES = KEYS_PER_WARP / 16, SCORE_TILES = ROWS_PER_WARP / 8;
  static_assert(KEYS_PER_WARP % 16 == 0 && ROWS_PER_WARP % 16 == 0, "warps hold whole products");
};

// Where float32 values of a query tile lie in global memory: lse and delta, and the sums of dQ.
template <class C>
struct Workspace {
  static constexpr int TILE_SUMS = C::BLOCK_Q * BackwardShape<C>::CHUNKS * 8;
  float *statistics, *sums;
  int row_tiles;

  FG_DEVICE explicit Workspace(const ForwardParams& forward) {
    row_tiles = ceil_div(forward.seqlen_q, C::BLOCK_Q);
    statistics = static_cast<float*>(forward.workspace);
    sums = statistics + static_cast<i64>(forward.batch) * forward.heads_q * row_tiles * (2 * C::BLOCK_Q);
  }
  FG_DEVICE int number(int batch_head, int tile) const { return batch_head * row_tiles + tile; }  // of a tile, over all heads
  FG_DEVICE float* statistics_of(int number) const { return statistics + static_cast<i64>(number) * (2 * C::BLOCK_Q); }
  FG_DEVICE float* sums_of(int number) const { return sums + static_cast<i64>(number) * TILE_SUMS; }
};

// lse of all rows of a tile, then delta. Among 16 rows, the four that one lane needs of two 8-column tiles lie side by side.
FG_DEVICE constexpr int statistic_slot(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// ---- first launch: delta, lse in log2 units, zeros ----

template <class C>
struct DeltaConfig : C {
  static constexpr int THREADS = C::BLOCK_Q * 2;  // a warp per 16 rows
};

// delta is summed as dP is, by the same products in the same order: where a row sees one key only, dP - delta is exactly 0.
template <class C>
FG_DEVICE void row_products(float (&products)[1][2][4], u32 o_tile, u32 dout_tile, int row, int lane) {
  constexpr int CHUNKS = BackwardShape<C>::CHUNKS_V;
  const SharedRows<CHUNKS> left(o_tile, row, lane);
  const FragmentCursor<CHUNKS> right(dout_tile, row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  multiply_rows<typename C::Element, CHUNKS / 2>(products, left, right);
}

template <class C>
FG_DEVICE void deltas(const BackwardParams& params) {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  using Copy = RowCopy<DeltaConfig<C>, C::BLOCK_Q, C::HEAD_DIM_V, Shape::CHUNKS_V>;
  const ForwardParams& forward = params.forward;
  const Workspace<C> workspace(forward);
  const int tile = static_cast<int>(block_index() % workspace.row_tiles),
            batch_head = static_cast<int>(block_index() / workspace.row_tiles);
  const int batch = batch_head / forward.heads_q, head = batch_head % forward.heads_q;
  const int first_row = tile * C::BLOCK_Q, valid_rows = forward.seqlen_q - first_row;
  const u32 o_tile = dynamic_shared(), dout_tile = o_tile + Shape::DOUT_BYTES;

  const Element* o = head_of<Element>(static_cast<const void*>(forward.o), forward.o_strides, batch, head);
  const Element* dout = head_of<Element>(params.dout, params.dout_strides, batch, head);
  const bool vectors = forward.vector_access != 0;
  Copy::start(o_tile, o + first_row * forward.o_strides.row, forward.o_strides.row, valid_rows, vectors);
  Copy::start(dout_tile, dout + first_row * params.dout_strides.row, params.dout_strides.row, valid_rows, vectors);
  copy_async_commit();
  if constexpr (!C::TWO_PASS) {
    float* sums = workspace.sums_of(workspace.number(batch_head, tile));
    for (int i = thread_index() * 4; i < Workspace<C>::TILE_SUMS; i += DeltaConfig<C>::THREADS * 4)
      store_global(reinterpret_cast<Vector16*>(sums + i), Vector16{{0, 0, 0, 0}});
  }
  copy_async_wait<0>();
  block_sync();

  const int lane = thread_index() % WARP_LANES, warp_row = thread_index() / WARP_LANES * 16;
  float products[1][2][4];
  row_products<C>(products, o_tile, dout_tile, warp_row, lane);
  if (lane / 8 != lane % 4) return;  // the diagonal lies in eight lanes, two rows each
  float* statistics = workspace.statistics_of(workspace.number(batch_head, tile));
  FG_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + lane / 4;
    const i64 index = static_cast<i64>(batch_head) * forward.seqlen_q + first_row + row;
    const bool is_row = row < valid_rows;
    const float lse = is_row ? load_global(forward.lse + index) : -infinity();
    float delta = lane / 4 % 2 ? products[0][half][half * 2 + 1] : products[0][half][half * 2];
    if (is_row && params.dlse) delta -= load_global(params.dlse + index);
    // A row that sees nothing, or is none, subtracts infinity: its probabilities are 0 without a mask.
    store_global(statistics + statistic_slot(row), lse == -infinity() ? infinity() : lse * LOG2_E);
    store_global(statistics + C::BLOCK_Q + statistic_slot(row), delta);
  }
}

// ---- second launch: dK and dV, and dQ unless it has a loop of its own ----

// Query tiles [first, last) that hold rows which may see one of the keys [key, key + BLOCK_KV).
template <class C>
struct RowTileRange {
  int first, last;

  FG_DEVICE RowTileRange(const ForwardParams& forward, int key) {
    const int row = key - forward.diagonal;  // the row whose diagonal meets the first key
    int first_row = 0, end_row = forward.seqlen_q;
    if constexpr (C::MASK == MASK_CAUSAL) first_row = maximum(first_row, row);
    if constexpr (C::MASK == MASK_WINDOW) {
      first_row = maximum(first_row, row - forward.window_right);
      end_row = minimum(end_row, row + C::BLOCK_KV + forward.window_left);
    }
    first = first_row / C::BLOCK_Q;
    last = first_row < end_row ? ceil_div(end_row, C::BLOCK_Q) : first;
  }
  FG_DEVICE int count() const { return last - first; }
  // Where a CTA begins. CTAs that walk side by side over the rows of one head would all add to the same sums at a time.
  FG_DEVICE int start(int key) const { return C::STAGGERED && count() > 0 ? first + key / C::BLOCK_KV % count() : first; }
};

// Query tiles with dO, lse and delta on their way through shared memory, head by head. A step past the end closes an empty group, which
// keeps the count of groups in step with the count of tiles.
template <class C>
struct RowRing {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  const BackwardParams& params;
  const Workspace<C> workspace;
  const RowTileRange<C> range;
  const int batch;
  const u32 slots;
  const int start;
  int steps, head, tile;  // of the next copy

  FG_DEVICE RowRing(const BackwardParams& all, int own_batch, int head_kv, int key, u32 shared)
      : params(all),
        workspace(all.forward),
        range(all.forward, key),
        batch(own_batch),
        slots(shared + Shape::STAGES_AT),
        start(range.start(key)) {
    const int group = params.forward.heads_q / params.forward.heads_kv;
    head = head_kv * group;
    tile = start;
    steps = group * range.count();
  }

  FG_DEVICE u32 slot(int step) const { return slots + static_cast<u32>(step % C::NUM_STAGES * Shape::STAGE_BYTES); }

  FG_DEVICE void prefetch(int step) {
    if (step < steps) {
      copy_rows(slot(step), tile * C::BLOCK_Q);
      if (++tile == range.last) tile = range.first;
      if (tile == start) ++head;
    }
    copy_async_commit();
  }
  FG_DEVICE void copy_rows(u32 to, int row) const {
    const Element* q = head_of<Element>(params.forward.q, params.forward.q_strides, batch, head);
    const Element* dout = head_of<Element>(params.dout, params.dout_strides, batch, head);
    const i64 stride = params.forward.q_strides.row, dout_stride = params.dout_strides.row;
    const int rows = params.forward.seqlen_q - row;
    const bool vectors = params.forward.vector_access != 0;
    RowCopy<C, C::BLOCK_Q, C::HEAD_DIM, Shape::CHUNKS>::start(to, q + row * stride, stride, rows, vectors);
    RowCopy<C, C::BLOCK_Q, C::HEAD_DIM_V, Shape::CHUNKS_V>::start(to + Shape::Q_BYTES, dout + row * dout_stride, dout_stride, rows,
                                                                  vectors);
    const float* statistics = workspace.statistics_of(workspace.number(batch * params.forward.heads_q + head, tile));
    const int i = thread_index();
    if (i < Shape::STATISTIC_BYTES / CHUNK_BYTES)
      copy_async_16(to + static_cast<u32>(Shape::Q_BYTES + Shape::DOUT_BYTES + i * CHUNK_BYTES), statistics + i * 4, true);
  }
};

// The tile of one step: where it came from and where it lies.
struct RowTile {
  int tile, number;         // within its head, over all heads
  u32 q, dout, lse, delta;  // shared
};
template <class C>
struct RowSteps {
  using Shape = BackwardShape<C>;
  const int first, last, start, row_tiles;
  int tile, number;

  FG_DEVICE explicit RowSteps(const RowRing<C>& ring)
      : first(ring.range.first), last(ring.range.last), start(ring.start), row_tiles(ring.workspace.row_tiles), tile(ring.start) {
    number = ring.workspace.number(ring.batch * ring.params.forward.heads_q + ring.head, tile);
  }
  FG_DEVICE RowTile at(u32 slot) const {
    const u32 statistics = slot + Shape::Q_BYTES + Shape::DOUT_BYTES;
    return {tile, number, slot, slot + Shape::Q_BYTES, statistics, statistics + C::BLOCK_Q * 4};
  }
  FG_DEVICE void advance() {
    ++tile, ++number;
    if (tile == last) tile = first, number += first - last;
    if (tile == start) number += row_tiles;
  }
};

// Where a warp stands among those of its side.
template <class C>
struct SidePlace {
  using Shape = BackwardShape<C>;
  int lane, number;  // `number` within the side: its twin on the other side has the same
  int down, across;
  int first_key;  // of the warp, within the sequence

  FG_DEVICE SidePlace(int cta_key) {
    lane = thread_index() % WARP_LANES;
    number = thread_index() / WARP_LANES % Shape::SIDE_WARPS;
    down = number / C::WARPS_ACROSS;
    across = number % C::WARPS_ACROSS;
    first_key = cta_key + down * Shape::KEYS_PER_WARP;
  }
  FG_DEVICE int own_key() const { return down * Shape::KEYS_PER_WARP; }  // within the tile
  FG_DEVICE int own_row() const { return across * Shape::ROWS_PER_WARP; }
  // With one side: the same keys, the part-th rows of the tile.
  FG_DEVICE SidePlace part(int number_of_part) const {
    SidePlace place = *this;
    place.across = number_of_part;
    return place;
  }
};

template <class C>
using Scores = float[BackwardShape<C>::KEY_TILES][BackwardShape<C>::SCORE_TILES][4];
// P^T or dS^T in the element type, as left operands of products over query rows.
template <class C>
using PackedScores = KeptRows<BackwardShape<C>::KEY_TILES, BackwardShape<C>::SCORE_TILES / 2>;

// Whether the warp's keys and rows hold a pair that is hidden, and whether they hold one that is seen. `row` is the first of the warp.
template <class C>
struct PairMask {
  bool any_hidden, any_seen;

  FG_DEVICE PairMask(const ForwardParams& forward, int row, int key) {
    using Shape = BackwardShape<C>;
    const VisibleKeys top = visible_keys<C>(forward, row), bottom = visible_keys<C>(forward, row + Shape::ROWS_PER_WARP - 1);
    const int last_key = key + Shape::KEYS_PER_WARP - 1;
    any_hidden = last_key > top.last || (C::MASK == MASK_WINDOW && key < bottom.first);
    any_seen = !C::MASKED || (key <= bottom.last && (C::MASK != MASK_WINDOW || last_key >= top.first));
  }
};

// Gives the hidden elements of a transposed tile a value. `key` and `row` are the lane's first ones.
template <class C>
FG_DEVICE void hide(Scores<C>& scores, const ForwardParams& forward, int key, int row, float value) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int n = 0; n < Shape::SCORE_TILES; ++n) {
    FG_UNROLL
    for (int j = 0; j < 2; ++j) {
      const VisibleKeys keys = visible_keys<C>(forward, row + n * 8 + j);
      FG_UNROLL
      for (int m = 0; m < Shape::KEY_TILES; ++m) {
        FG_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int own = key + m * 16 + half * 8;
          if (own > keys.last || (C::MASK == MASK_WINDOW && own < keys.first)) scores[m][n][half * 2 + j] = value;
        }
      }
    }
  }
}

// The values of lse or delta that a lane needs for two 8-column tiles: two for each.
template <class C>
FG_DEVICE Vector16 statistics_of(const SidePlace<C>& place, u32 statistics, int pair) {
  return load_shared<Vector16>(statistics + static_cast<u32>((place.own_row() / 16 + pair) * 64 + place.lane % 4 * 16));
}

// Rounded to the element type, as left operands.
template <class C>
FG_DEVICE void pack(PackedScores<C>& packed, const Scores<C>& scores) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int m = 0; m < Shape::KEY_TILES; ++m) {
    FG_UNROLL
    for (int n = 0; n < Shape::SCORE_TILES; ++n) {
      FG_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float* two = &scores[m][n][half * 2];
        packed.word[m][n / 2][n % 2 * 2 + half] = pack_pair(two[0], two[1], typename C::Element{});
      }
    }
  }
}

FG_DEVICE float low_of(u32 word, Half) { return half_to_float(static_cast<u16>(word)); }
FG_DEVICE float high_of(u32 word, Half) { return half_to_float(static_cast<u16>(word >> 16)); }
FG_DEVICE float low_of(u32 word, BFloat16) { return float_from_bits(word << 16); }
FG_DEVICE float high_of(u32 word, BFloat16) { return float_from_bits(word & 0xFFFF0000u); }

// A tile of P^T or dS^T in shared memory, keys by rows. A lane writes and reads words of two rows side by side; eight keys of four words
// meet no bank conflict.
template <class C>
struct ScoreTile {
  using Shape = BackwardShape<C>;
  u32 base;
  FragmentCursor<Shape::CHUNKS_Q> words;

  FG_DEVICE ScoreTile(u32 tile, const SidePlace<C>& place)
      : base(tile), words(tile + static_cast<u32>(place.lane % 4 * 4), place.own_key() + place.lane / 4, 0) {
    words.start = words.at(0, place.own_row() / 8);
  }
  FG_DEVICE u32 word_at(int m, int pair, int i) const { return words.at(m * 16 + i % 2 * 8, pair * 2 + i / 2); }
  FG_DEVICE void store(const PackedScores<C>& packed) const {
    for_each([&](int m, int pair, int i) { store_shared(word_at(m, pair, i), packed.word[m][pair][i]); });
  }
  FG_DEVICE Vector16 load(int m, int pair) const {
    Vector16 vector;
    FG_UNROLL
    for (int i = 0; i < 4; ++i) vector.word[i] = load_shared<u32>(word_at(m, pair, i));
    return vector;
  }
  FG_DEVICE SharedRows<Shape::CHUNKS_Q> rows(const SidePlace<C>& place) const { return {base, place.own_key(), place.lane}; }

 private:
  template <class Act>
  FG_DEVICE static void for_each(Act act) {
    FG_UNROLL
    for (int pair = 0; pair < Shape::SCORE_TILES / 2; ++pair) {
      FG_UNROLL
      for (int m = 0; m < Shape::KEY_TILES; ++m) {
        FG_UNROLL
        for (int i = 0; i < 4; ++i) act(m, pair, i);
      }
    }
  }
};

// P^T on its way from a warp to its twin, as it lies in registers, 16 bytes per lane: in float32, or rounded to the element type. Where
// warps share keys, the rounded tile lies in shared memory anyway.
template <class C>
struct Handover {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  static constexpr int TILES = C::ROUNDED_HANDOVER ? Shape::SCORE_TILES / 2 : Shape::SCORE_TILES;
  const ScoreTile<C> tile;
  const u32 start;

  FG_DEVICE Handover(u32 shared, const SidePlace<C>& place)
      : tile(shared + Shape::P_AT, place),
        start(shared + static_cast<u32>((C::ROUNDED_HANDOVER ? Shape::P_AT : Shape::HANDED_AT) +
                                        (place.number * Shape::KEY_TILES * TILES * WARP_LANES + place.lane) * 16)) {}

  FG_DEVICE void give(const Scores<C>& probabilities, const PackedScores<C>& rounded) const {
    if constexpr (C::ROUNDED_HANDOVER && C::WARPS_ACROSS > 1) return;
    FG_UNROLL
    for (int m = 0; m < Shape::KEY_TILES; ++m) {
      FG_UNROLL
      for (int n = 0; n < TILES; ++n) {
        if constexpr (C::ROUNDED_HANDOVER) {
          const u32(&word)[4] = rounded.word[m][n];
          store_shared(at(m, n), Vector16{{word[0], word[1], word[2], word[3]}});
        } else {
          const float (&p)[4] = probabilities[m][n];
          store_shared(at(m, n), Vector16{{float_bits(p[0]), float_bits(p[1]), float_bits(p[2]), float_bits(p[3])}});
        }
      }
    }
  }
  // The probabilities of one lane in two tiles side by side.
  FG_DEVICE void take(float (&p)[2][4], int m, int pair) const {
    FG_UNROLL
    for (int n = 0; n < 2; ++n) {
      if constexpr (C::ROUNDED_HANDOVER) {
        if (n == 0) unpack(p, C::WARPS_ACROSS > 1 ? tile.load(m, pair) : load_shared<Vector16>(at(m, pair)));
      } else {
        const Vector16 vector = load_shared<Vector16>(at(m, pair * 2 + n));
        FG_UNROLL
        for (int i = 0; i < 4; ++i) p[n][i] = float_from_bits(vector.word[i]);
      }
    }
  }

 private:
  FG_DEVICE u32 at(int m, int n) const { return start + static_cast<u32>((m * TILES + n) * WARP_LANES * 16); }
  FG_DEVICE static void unpack(float (&p)[2][4], const Vector16& words) {
    FG_UNROLL
    for (int i = 0; i < 4; ++i) {
      p[i / 2][i % 2 * 2] = low_of(words.word[i], Element{});
      p[i / 2][i % 2 * 2 + 1] = high_of(words.word[i], Element{});
    }
  }
};

// P^T that stays where it is.
template <class C>
struct KeptProbabilities {
  const Scores<C>& scores;

  FG_DEVICE void take(float (&p)[2][4], int m, int pair) const {
    FG_UNROLL
    for (int i = 0; i < 8; ++i) p[i / 4][i % 4] = scores[m][pair * 2 + i / 4][i % 4];
  }
};

// S^T becomes P^T.
template <class C>
FG_DEVICE void exponentials(Scores<C>& scores, float scale_log2, const SidePlace<C>& place, u32 lse) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int pair = 0; pair < Shape::SCORE_TILES / 2; ++pair) {
    const Vector16 own = statistics_of<C>(place, lse, pair);
    FG_UNROLL
    for (int m = 0; m < Shape::KEY_TILES; ++m) {
      FG_UNROLL
      for (int i = 0; i < 8; ++i) {
        float& score = scores[m][pair * 2 + i / 4][i % 4];
        score = exp2_approx(fused_multiply_add(score, scale_log2, -float_from_bits(own.word[i / 4 * 2 + i % 2])));
      }
    }
  }
}

// dP^T becomes dS^T.
template <class C, class Probabilities>
FG_DEVICE void differentiate(Scores<C>& products, const Probabilities& probabilities, const SidePlace<C>& place, u32 delta) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int pair = 0; pair < Shape::SCORE_TILES / 2; ++pair) {
    const Vector16 own = statistics_of<C>(place, delta, pair);
    FG_UNROLL
    for (int m = 0; m < Shape::KEY_TILES; ++m) {
      float p[2][4];
      probabilities.take(p, m, pair);
      FG_UNROLL
      for (int i = 0; i < 8; ++i) {
        float& product = products[m][pair * 2 + i / 4][i % 4];
        product = p[i / 4][i % 4] * (product - float_from_bits(own.word[i / 4 * 2 + i % 2]));
      }
    }
  }
}

enum BarrierId : int { PROBABILITY_SIDE = 1, GRADIENT_SIDE = 2, TWINS = 3 };  // twins: one each, TWINS + number

// The keys of one warp on either side: K or V against Q or dO, and the sums of dV or dK.
template <class C, int DEPTH_CHUNKS, int SUM_CHUNKS>
struct KeyRows {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  static constexpr int SUM_TILES = SUM_CHUNKS / C::WARPS_ACROSS, DEPTH = DEPTH_CHUNKS / 2;
  const SharedRows<DEPTH_CHUNKS> in_shared;
  KeptRows<C::KEYS_IN_REGISTERS ? Shape::KEY_TILES : 1, C::KEYS_IN_REGISTERS ? DEPTH : 1> kept;
  float sums[Shape::KEY_TILES][SUM_TILES][4];

  FG_DEVICE KeyRows(u32 tile, const SidePlace<C>& place) : in_shared(tile, place.own_key(), place.lane) {
    clear(sums);
    if constexpr (C::KEYS_IN_REGISTERS) kept.keep(in_shared);
  }
  // products = own rows times rows of a query tile.
  FG_DEVICE void multiply(Scores<C>& products, u32 tile, const SidePlace<C>& place) const {
    const FragmentCursor<DEPTH_CHUNKS> right(tile, place.own_row() + place.lane / 16 * 8 + place.lane % 8, place.lane / 8 % 2);
    if constexpr (C::KEYS_IN_REGISTERS) {
      multiply_rows<Element, DEPTH>(products, kept, right);
    } else {
      multiply_rows<Element, DEPTH>(products, in_shared, right);
    }
  }
  // sums += left times own columns of a query tile.
  template <class Left>
  FG_DEVICE void accumulate(const Left& left, u32 tile, const SidePlace<C>& place) {
    FragmentCursor<SUM_CHUNKS> right(tile, (Shape::SPLIT ? 0 : place.own_row()) + place.lane % 16, place.lane / 16);
    if constexpr (C::WARPS_ACROSS > 1) right.start = right.at(0, place.across * SUM_TILES);
    accumulate_rows<Element, (Shape::SPLIT ? C::BLOCK_Q : Shape::ROWS_PER_WARP) / 16>(sums, left, right);
  }
  FG_DEVICE void store(const TargetRows<Element>& target, const SidePlace<C>& place, float factor) const {
    store_tiles(sums, target, place.own_key(), place.across * SUM_TILES, factor, place.lane);
  }
};

// How the warps share the product dS K of a query tile: groups of rows by groups of columns, as square as they come.
template <class C>
struct QuerySplit {
  static constexpr int ROW_UNITS = C::BLOCK_Q / 16, COLUMN_UNITS = BackwardShape<C>::CHUNKS / 2;
  static constexpr int row_groups(int column_groups) { return minimum(ROW_UNITS, C::NUM_WARPS / column_groups); }
  // Steps over chunks from a start inside a swizzled line must not leave it, unless the start is that of a line.
  static constexpr bool steps_stay(int tiles) {
    return !RowLayout<BackwardShape<C>::CHUNKS>::SWIZZLED || tiles % 8 == 0 || (tiles & (tiles - 1)) == 0;
  }
  static constexpr int best_column_groups() {
    int best = 1, least = 1 << 20;
    for (int groups = 1; groups <= C::NUM_WARPS; ++groups) {
      if (COLUMN_UNITS % groups != 0 || ROW_UNITS % row_groups(groups) != 0 || !steps_stay(COLUMN_UNITS / groups * 2)) continue;
      const int rows = ROW_UNITS / row_groups(groups), columns = COLUMN_UNITS / groups, effort = 16 * rows * columns + rows + columns;
      if (effort < least) best = groups, least = effort;
    }
    return best;
  }
  static constexpr int COLUMN_GROUPS = best_column_groups(), ROW_GROUPS = row_groups(COLUMN_GROUPS);
  static constexpr int ROW_TILES = ROW_UNITS / ROW_GROUPS, COLUMN_TILES = COLUMN_UNITS / COLUMN_GROUPS * 2;
};

// The sums of dQ of one tile += dS K.
template <class C>
FG_DEVICE void add_query_gradients(float* sums, u32 gradients, u32 keys) {
  using Shape = BackwardShape<C>;
  using Split = QuerySplit<C>;
  const int lane = thread_index() % WARP_LANES, warp = thread_index() / WARP_LANES;
  const int row_unit = warp / Split::COLUMN_GROUPS * Split::ROW_TILES, column_tile = warp % Split::COLUMN_GROUPS * Split::COLUMN_TILES;
  if (Split::COLUMN_GROUPS * Split::ROW_GROUPS < C::NUM_WARPS && row_unit >= Split::ROW_UNITS) return;
  SharedColumns<Shape::CHUNKS_Q> left(gradients, lane);
  left.cursor.start = left.cursor.at(0, row_unit * 2);
  FragmentCursor<Shape::CHUNKS> right(keys, lane % 16, lane / 16);
  right.start = right.at(0, column_tile);
  float products[Split::ROW_TILES][Split::COLUMN_TILES][4];
  clear(products);
  accumulate_rows<typename C::Element, C::BLOCK_KV / 16>(products, left, right);
  FG_UNROLL
  for (int m = 0; m < Split::ROW_TILES; ++m) {
    FG_UNROLL
    for (int n = 0; n < Split::COLUMN_TILES; ++n)
      add_to_sums(sums + ((row_unit + m) * Shape::CHUNKS + column_tile + n) * 128, lane, products[m][n]);
  }
}

// What a CTA knows throughout its loop.
template <class C>
struct KeyBlock {
  using Shape = BackwardShape<C>;
  const BackwardParams& params;
  const u32 shared;
  const SidePlace<C> place;

  FG_DEVICE u32 gradients(int step) const {
    return shared + static_cast<u32>(Shape::GRADIENTS_AT + (Shape::GRADIENT_TILES == 2 ? step % 2 * Shape::SCORE_BYTES : 0));
  }
  FG_DEVICE PairMask<C> mask_of(const RowTile& rows, const SidePlace<C>& at) const {
    return PairMask<C>(params.forward, rows.tile * C::BLOCK_Q + at.own_row(), at.first_key);
  }
  FG_DEVICE void hide_in(Scores<C>& scores, const RowTile& rows, const SidePlace<C>& at, float value) const {
    hide<C>(scores, params.forward, at.first_key + at.lane / 4, rows.tile * C::BLOCK_Q + at.own_row() + at.lane % 4 * 2, value);
  }
  FG_DEVICE void add_query_gradients_of(const Workspace<C>& workspace, const RowTile& rows, int step) const {
    add_query_gradients<C>(workspace.sums_of(rows.number), gradients(step), shared);
  }
};

// S^T, P^T, dV.
template <class C>
struct ProbabilitySide : KeyRows<C, BackwardShape<C>::CHUNKS, BackwardShape<C>::CHUNKS_V> {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  static constexpr bool DQ_FIRST = false;

  FG_DEVICE ProbabilitySide(const KeyBlock<C>& block) : KeyRows<C, Shape::CHUNKS, Shape::CHUNKS_V>(block.shared, block.place) {}

  // The next copies are started behind the first products, so that the tensor cores are busy meanwhile.
  FG_DEVICE void step(const KeyBlock<C>& block, const RowTile& rows, int step, RowRing<C>& ring) {
    const PairMask<C> mask = block.mask_of(rows, block.place);
    const Handover<C> handover(block.shared, block.place);
    Scores<C> scores;
    if (mask.any_seen) this->multiply(scores, rows.q, block.place);
    ring.prefetch(step + C::NUM_STAGES - 1);
    PackedScores<C> packed = {};
    if (mask.any_seen) {
      if (mask.any_hidden) block.hide_in(scores, rows, block.place, -infinity());
      exponentials<C>(scores, block.params.forward.scale_log2, block.place, rows.lse);
      if constexpr (C::ROUNDED_HANDOVER) pack<C>(packed, scores);
      handover.give(scores, packed);
      if constexpr (!C::ROUNDED_HANDOVER) pack<C>(packed, scores);
    }
    if constexpr (C::WARPS_ACROSS > 1) handover.tile.store(packed);
    if (mask.any_seen) barrier_arrive(TWINS + block.place.number, 2 * WARP_LANES);
    if constexpr (C::WARPS_ACROSS > 1) {
      barrier_sync(PROBABILITY_SIDE, Shape::SIDE_WARPS * WARP_LANES);
      this->accumulate(handover.tile.rows(block.place), rows.dout, block.place);
    } else {
      if (mask.any_seen) this->accumulate(packed, rows.dout, block.place);
    }
  }
};

// dP^T, dS^T, dK.
template <class C>
struct GradientSide : KeyRows<C, BackwardShape<C>::CHUNKS_V, BackwardShape<C>::CHUNKS> {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  static constexpr bool DQ_FIRST = true;

  FG_DEVICE GradientSide(const KeyBlock<C>& block) : KeyRows<C, Shape::CHUNKS_V, Shape::CHUNKS>(block.shared + Shape::V_AT, block.place) {}

  FG_DEVICE void step(const KeyBlock<C>& block, const RowTile& rows, int step, RowRing<C>& ring) {
    const PairMask<C> mask = block.mask_of(rows, block.place);
    Scores<C> products;
    if (mask.any_seen) this->multiply(products, rows.dout, block.place);
    ring.prefetch(step + C::NUM_STAGES - 1);
    PackedScores<C> packed = {};
    if (mask.any_seen) {
      // Products with hidden keys may be anything; with a probability of 0 they must stay finite.
      if (mask.any_hidden) block.hide_in(products, rows, block.place, 0.0f);
      barrier_sync(TWINS + block.place.number, 2 * WARP_LANES);
      differentiate<C>(products, Handover<C>(block.shared, block.place), block.place, rows.delta);
      pack<C>(packed, products);
    }
    if constexpr (Shape::GRADIENT_TILES > 0) {
      const ScoreTile<C> gradients(block.gradients(step), block.place);
      gradients.store(packed);
      if constexpr (C::WARPS_ACROSS > 1) {
        barrier_sync(GRADIENT_SIDE, Shape::SIDE_WARPS * WARP_LANES);
        this->accumulate(gradients.rows(block.place), rows.q, block.place);
      }
    }
    if constexpr (C::WARPS_ACROSS == 1) {
      if (mask.any_seen) this->accumulate(packed, rows.q, block.place);
    }
  }
};

// Both sides in one warp.
template <class C>
struct BothSides {
  using Shape = BackwardShape<C>;
  static constexpr bool DQ_FIRST = true;
  KeyRows<C, Shape::CHUNKS, Shape::CHUNKS_V> of_probabilities;
  KeyRows<C, Shape::CHUNKS_V, Shape::CHUNKS> of_gradients;

  FG_DEVICE BothSides(const KeyBlock<C>& block)
      : of_probabilities(block.shared, block.place), of_gradients(block.shared + Shape::V_AT, block.place) {}

  FG_DEVICE void step(const KeyBlock<C>& block, const RowTile& rows, int step, RowRing<C>& ring) {
    FG_UNROLL
    for (int part = 0; part < C::BLOCK_Q / Shape::ROWS_PER_WARP; ++part) {
      const SidePlace<C> place = block.place.part(part);
      const PairMask<C> mask = block.mask_of(rows, place);
      Scores<C> scores;
      if (mask.any_seen) of_probabilities.multiply(scores, rows.q, place);
      if (part == 0) ring.prefetch(step + C::NUM_STAGES - 1);
      PackedScores<C> packed = {};
      if (mask.any_seen) {
        Scores<C> products;
        of_gradients.multiply(products, rows.dout, place);
        if (mask.any_hidden) {
          block.hide_in(scores, rows, place, -infinity());
          block.hide_in(products, rows, place, 0.0f);
        }
        exponentials<C>(scores, block.params.forward.scale_log2, place, rows.lse);
        pack<C>(packed, scores);
        of_probabilities.accumulate(packed, rows.dout, place);
        differentiate<C>(products, KeptProbabilities<C>{scores}, place, rows.delta);
        pack<C>(packed, products);
      }
      if constexpr (Shape::GRADIENT_TILES > 0) ScoreTile<C>(block.gradients(step), place).store(packed);
      if (mask.any_seen) of_gradients.accumulate(packed, rows.q, place);
    }
  }
};

// One side's way through all query tiles. One barrier per step: the tile has landed for everyone, everyone is done with the slot that the
// next copy overwrites, and with DELAYED_DQ the tile of dS of the step before is complete. Otherwise that takes a second barrier.
template <class C, class Side>
FG_DEVICE void walk(const KeyBlock<C>& block, RowRing<C>& ring, RowSteps<C> steps, Side& side) {
  constexpr bool DELAYED = !C::TWO_PASS && C::DELAYED_DQ;
  RowTile before = {0, 0, 0, 0, 0, 0};
  FG_NO_UNROLL
  for (int step = 0; step < ring.steps; ++step) {
    const RowTile rows = steps.at(ring.slot(step));
    copy_async_wait<C::NUM_STAGES - 2>();
    block_sync();
    if (DELAYED && Side::DQ_FIRST && step > 0) block.add_query_gradients_of(ring.workspace, before, step - 1);
    side.step(block, rows, step, ring);
    if (DELAYED && !Side::DQ_FIRST && step > 0) block.add_query_gradients_of(ring.workspace, before, step - 1);
    if constexpr (!C::TWO_PASS && !DELAYED) {
      block_sync();
      block.add_query_gradients_of(ring.workspace, rows, step);
    }
    before = rows;
    steps.advance();
  }
  if (!DELAYED || ring.steps == 0) return;
  block_sync();
  block.add_query_gradients_of(ring.workspace, before, ring.steps - 1);
}

// Which keys of which head a CTA owns.
struct KeyPlace {
  int batch, head_kv, first_key;
};
template <class C>
FG_DEVICE KeyPlace key_place(const ForwardParams& forward, i64 block) {
  const int tiles = ceil_div(forward.seqlen_kv, C::BLOCK_KV), heads = forward.batch * forward.heads_kv;
  const bool tiles_first = C::TILE_ORDER == TILES_FIRST;
  const int batch_head = static_cast<int>(tiles_first ? block / tiles : block % heads);
  const int tile = static_cast<int>(tiles_first ? block % tiles : block / heads);
  return {batch_head / forward.heads_kv, batch_head % forward.heads_kv, tile * C::BLOCK_KV};
}

template <class C>
FG_DEVICE void copy_keys(const ForwardParams& forward, const KeyPlace& place, u32 shared) {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  const Element* k = head_of<Element>(forward.k, forward.k_strides, place.batch, place.head_kv) + place.first_key * forward.k_strides.row;
  const Element* v = head_of<Element>(forward.v, forward.v_strides, place.batch, place.head_kv) + place.first_key * forward.v_strides.row;
  const int rows = forward.seqlen_kv - place.first_key;
  const bool vectors = forward.vector_access != 0;
  RowCopy<C, C::BLOCK_KV, C::HEAD_DIM, Shape::CHUNKS>::start(shared, k, forward.k_strides.row, rows, vectors);
  RowCopy<C, C::BLOCK_KV, C::HEAD_DIM_V, Shape::CHUNKS_V>::start(shared + Shape::V_AT, v, forward.v_strides.row, rows, vectors);
}

template <class C>
FG_DEVICE void key_gradients(const BackwardParams& params) {
  using Element = typename C::Element;
  const ForwardParams& forward = params.forward;
  const KeyPlace at = key_place<C>(forward, block_index());
  const u32 shared = dynamic_shared();
  const KeyBlock<C> block = {params, shared, SidePlace<C>(at.first_key)};
  RowRing<C> ring(params, at.batch, at.head_kv, at.first_key, shared);
  const RowSteps<C> steps(ring);
  const int rows = forward.seqlen_kv - at.first_key;
  const bool vectors = forward.vector_access != 0;

  copy_keys<C>(forward, at, shared);
  if constexpr (C::KEYS_IN_REGISTERS) copy_async_commit();
  FG_UNROLL
  for (int step = 0; step < C::NUM_STAGES - 1; ++step) ring.prefetch(step);
  if constexpr (C::KEYS_IN_REGISTERS) {
    copy_async_wait<C::NUM_STAGES - 1>();
    block_sync();
  }
  Element* dk = head_of<Element>(params.dk, params.dk_strides, at.batch, at.head_kv) + at.first_key * params.dk_strides.row;
  Element* dv = head_of<Element>(params.dv, params.dv_strides, at.batch, at.head_kv) + at.first_key * params.dv_strides.row;
  const TargetRows<Element> dk_rows = {dk, params.dk_strides.row, rows, C::HEAD_DIM, vectors};
  const TargetRows<Element> dv_rows = {dv, params.dv_strides.row, rows, C::HEAD_DIM_V, vectors};
  if constexpr (C::NUM_SIDES == 1) {
    BothSides<C> sides(block);
    walk<C>(block, ring, steps, sides);
    sides.of_gradients.store(dk_rows, block.place, params.scale);
    sides.of_probabilities.store(dv_rows, block.place, 1.0f);
  } else if (thread_index() < C::THREADS / 2) {
    ProbabilitySide<C> side(block);
    walk<C>(block, ring, steps, side);
    side.store(dv_rows, block.place, 1.0f);
  } else {
    GradientSide<C> side(block);
    walk<C>(block, ring, steps, side);
    side.store(dk_rows, block.place, params.scale);
  }
}

// ---- third launch: dQ, from its sums or in a loop of its own ----

template <class C>
FG_DEVICE void convert_sums(const BackwardParams& params) {
  using Element = typename C::Element;
  constexpr int CHUNKS = BackwardShape<C>::CHUNKS, TILES = CHUNKS % 4 == 0 ? 4 : 2;
  const ForwardParams& forward = params.forward;
  const Workspace<C> workspace(forward);
  const int tile = static_cast<int>(block_index() % workspace.row_tiles),
            batch_head = static_cast<int>(block_index() / workspace.row_tiles);
  const int lane = thread_index() % WARP_LANES, unit = thread_index() / WARP_LANES, row = tile * C::BLOCK_Q;
  Element* dq = head_of<Element>(params.dq, params.dq_strides, batch_head / forward.heads_q, batch_head % forward.heads_q);
  const TargetRows<Element> target = {dq + row * params.dq_strides.row, params.dq_strides.row, forward.seqlen_q - row, C::HEAD_DIM,
                                      forward.vector_access != 0};
  const float* sums = workspace.sums_of(workspace.number(batch_head, tile)) + unit * CHUNKS * 128;
  FG_UNROLL
  for (int first = 0; first < CHUNKS; first += TILES) {
    float tiles[1][TILES][4];
    FG_UNROLL
    for (int n = 0; n < TILES; ++n) load_sums(tiles[0][n], sums + (first + n) * 128, lane);
    store_tiles(tiles, target, unit * 16, first, params.scale, lane);
  }
}

// The second pass has tiles of its own.
template <class C>
struct SecondPass : C {
  static constexpr int BLOCK_Q = C::PASS_BLOCK_Q, BLOCK_KV = C::PASS_BLOCK_KV, NUM_WARPS = C::PASS_WARPS, THREADS = C::PASS_WARPS * 32;
  static constexpr int NUM_STAGES = C::PASS_STAGES;
  static constexpr int CHUNKS = BackwardShape<C>::CHUNKS, CHUNKS_V = BackwardShape<C>::CHUNKS_V;
  static constexpr int Q_BYTES = BLOCK_Q * RowLayout<CHUNKS>::ROW_BYTES, DOUT_BYTES = BLOCK_Q * RowLayout<CHUNKS_V>::ROW_BYTES;
  static constexpr int K_BYTES = BLOCK_KV * RowLayout<CHUNKS>::ROW_BYTES, V_BYTES = BLOCK_KV * RowLayout<CHUNKS_V>::ROW_BYTES;
  static constexpr int SLOTS_AT = Q_BYTES + DOUT_BYTES, SLOT_BYTES = K_BYTES + V_BYTES;
  static_assert(SLOTS_AT + NUM_STAGES * SLOT_BYTES == C::PASS_SHARED_BYTES, "the layout of shared memory is the formula of the space");

  static constexpr int ROWS_PER_WARP = BLOCK_Q / NUM_WARPS, ROW_TILES = ROWS_PER_WARP / 16, SCORE_TILES = BLOCK_KV / 8;
  static_assert(ROWS_PER_WARP % 16 == 0 && BLOCK_KV % 16 == 0, "warps and tiles hold whole products");
};

// The query rows of one warp against all keys that they see.
template <class C, class S>
struct QueryRows {
  using Element = typename C::Element;
  using Tiles = float[S::ROW_TILES][S::SCORE_TILES][4];
  const ForwardParams& forward;
  const int lane, warp_row, lane_row;  // first rows within the sequence
  const TileRange<S> range;
  float lse[2 * S::ROW_TILES], delta[2 * S::ROW_TILES];
  float sums[S::ROW_TILES][S::CHUNKS][4];

  FG_DEVICE QueryRows(const ForwardParams& all, const Workspace<C>& workspace, int batch_head, int row, int own_lane)
      : forward(all), lane(own_lane), warp_row(row), lane_row(row + own_lane / 4), range(all, row, S::ROWS_PER_WARP) {
    clear(sums);
    FG_UNROLL
    for (int r = 0; r < 2 * S::ROW_TILES; ++r) {
      const int own = lane_row + r * 8;
      const float* statistics = workspace.statistics_of(workspace.number(batch_head, own / C::BLOCK_Q)) + statistic_slot(own % C::BLOCK_Q);
      lse[r] = own < forward.seqlen_q ? load_global(statistics) : infinity();
      delta[r] = own < forward.seqlen_q ? load_global(statistics + C::BLOCK_Q) : 0.0f;
    }
  }
  FG_DEVICE void hide(Tiles& tiles, int tile, float value) const {
    const int first = tile * S::BLOCK_KV + lane % 4 * 2;
    FG_UNROLL
    for (int r = 0; r < 2 * S::ROW_TILES; ++r) {
      const VisibleKeys keys = visible_keys<C>(forward, lane_row + r * 8);
      FG_UNROLL
      for (int n = 0; n < S::SCORE_TILES; ++n) {
        FG_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int key = first + n * 8 + j;
          if (key > keys.last || (C::MASK == MASK_WINDOW && key < keys.first)) tiles[r / 2][n][r % 2 * 2 + j] = value;
        }
      }
    }
  }
  FG_DEVICE void add(u32 q, u32 dout, int row, u32 keys, u32 values, int tile) {
    Tiles scores, products;
    const int right_row = lane / 16 * 8 + lane % 8, right_chunk = lane / 8 % 2;
    const bool any_hidden = range.needs_mask(tile);
    multiply_rows<Element, S::CHUNKS / 2>(scores, SharedRows<S::CHUNKS>(q, row, lane),
                                          FragmentCursor<S::CHUNKS>(keys, right_row, right_chunk));
    if (any_hidden) hide(scores, tile, -infinity());
    exponentials(scores);
    multiply_rows<Element, S::CHUNKS_V / 2>(products, SharedRows<S::CHUNKS_V>(dout, row, lane),
                                            FragmentCursor<S::CHUNKS_V>(values, right_row, right_chunk));
    if (any_hidden) hide(products, tile, 0.0f);
    KeptRows<S::ROW_TILES, S::SCORE_TILES / 2> packed;
    pack_gradients(packed, scores, products);
    accumulate_rows<Element, S::BLOCK_KV / 16>(sums, packed, FragmentCursor<S::CHUNKS>(keys, lane % 16, lane / 16));
  }

 private:
  FG_DEVICE void exponentials(Tiles& scores) const {
    FG_UNROLL
    for (int m = 0; m < S::ROW_TILES; ++m) {
      FG_UNROLL
      for (int n = 0; n < S::SCORE_TILES; ++n) {
        FG_UNROLL
        for (int i = 0; i < 4; ++i)
          scores[m][n][i] = exp2_approx(fused_multiply_add(scores[m][n][i], forward.scale_log2, -lse[2 * m + i / 2]));
      }
    }
  }
  FG_DEVICE void pack_gradients(KeptRows<S::ROW_TILES, S::SCORE_TILES / 2>& packed, const Tiles& probabilities,
                                const Tiles& products) const {
    FG_UNROLL
    for (int m = 0; m < S::ROW_TILES; ++m) {
      FG_UNROLL
      for (int n = 0; n < S::SCORE_TILES; ++n) {
        FG_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float *p = &probabilities[m][n][half * 2], *dp = &products[m][n][half * 2], d = delta[2 * m + half];
          packed.word[m][n / 2][n % 2 * 2 + half] = pack_pair(p[0] * (dp[0] - d), p[1] * (dp[1] - d), Element{});
        }
      }
    }
  }
};

// K and V tiles on their way through shared memory, one group of copies each.
template <class S>
struct KeyRing {
  using Element = typename S::Element;
  const ForwardParams& forward;
  const Element *k, *v;
  const u32 slots;
  const int first_tile, steps;

  FG_DEVICE u32 slot(int step) const { return slots + static_cast<u32>(step % S::NUM_STAGES * S::SLOT_BYTES); }
  FG_DEVICE void prefetch(int step) const {
    if (step < steps) {
      const int row = (first_tile + step) * S::BLOCK_KV, rows = forward.seqlen_kv - row;
      const i64 stride = forward.k_strides.row, v_stride = forward.v_strides.row;
      const bool vectors = forward.vector_access != 0;
      RowCopy<S, S::BLOCK_KV, S::HEAD_DIM, S::CHUNKS>::start(slot(step), k + row * stride, stride, rows, vectors);
      RowCopy<S, S::BLOCK_KV, S::HEAD_DIM_V, S::CHUNKS_V>::start(slot(step) + S::K_BYTES, v + row * v_stride, v_stride, rows, vectors);
    }
    copy_async_commit();
  }
};

template <class C>
FG_DEVICE void second_pass(const BackwardParams& params) {
  using S = SecondPass<C>;
  using Element = typename C::Element;
  const ForwardParams& forward = params.forward;
  const int tiles = ceil_div(forward.seqlen_q, S::BLOCK_Q), step_of_tile = static_cast<int>(block_index() % tiles);
  const int batch_head = static_cast<int>(block_index() / tiles), batch = batch_head / forward.heads_q, head = batch_head % forward.heads_q;
  const int head_kv = head / (forward.heads_q / forward.heads_kv);
  const int row = (C::MASKED ? tiles - 1 - step_of_tile : step_of_tile) * S::BLOCK_Q;  // the longest first
  const int lane = thread_index() % WARP_LANES, own_row = thread_index() / WARP_LANES * S::ROWS_PER_WARP;
  const u32 q_tile = dynamic_shared(), dout_tile = q_tile + S::Q_BYTES;
  const bool vectors = forward.vector_access != 0;

  const Element* q = head_of<Element>(forward.q, forward.q_strides, batch, head) + row * forward.q_strides.row;
  const Element* dout = head_of<Element>(params.dout, params.dout_strides, batch, head) + row * params.dout_strides.row;
  RowCopy<S, S::BLOCK_Q, C::HEAD_DIM, S::CHUNKS>::start(q_tile, q, forward.q_strides.row, forward.seqlen_q - row, vectors);
  RowCopy<S, S::BLOCK_Q, C::HEAD_DIM_V, S::CHUNKS_V>::start(dout_tile, dout, params.dout_strides.row, forward.seqlen_q - row, vectors);

  const TileRange<S> range(forward, row, S::BLOCK_Q);
  const KeyRing<S> ring = {forward,
                           head_of<Element>(forward.k, forward.k_strides, batch, head_kv),
                           head_of<Element>(forward.v, forward.v_strides, batch, head_kv),
                           q_tile + S::SLOTS_AT,
                           range.first,
                           range.count()};
  QueryRows<C, S> rows(forward, Workspace<C>(forward), batch_head, row + own_row, lane);
  FG_UNROLL
  for (int step = 0; step < S::NUM_STAGES - 1; ++step) ring.prefetch(step);  // the copies of Q and dO belong to the first group
  FG_NO_UNROLL
  for (int step = 0; step < ring.steps; ++step) {
    const int tile = range.first + step;
    copy_async_wait<S::NUM_STAGES - 2>();
    block_sync();
    ring.prefetch(step + S::NUM_STAGES - 1);
    if (!C::MASKED || (tile >= rows.range.first && tile < rows.range.last))
      rows.add(q_tile, dout_tile, own_row, ring.slot(step), ring.slot(step) + S::K_BYTES, tile);
  }
  Element* dq = head_of<Element>(params.dq, params.dq_strides, batch, head) + row * params.dq_strides.row;
  const TargetRows<Element> target = {dq, params.dq_strides.row, forward.seqlen_q - row, C::HEAD_DIM, vectors};
  store_tiles(rows.sums, target, own_row, 0, params.scale, lane);
}

template <class C>
FG_DEVICE void query_gradients(const BackwardParams& params) {
  if constexpr (C::TWO_PASS) {
    second_pass<C>(params);
  } else {
    convert_sums<C>(params);
  }
}

}  // namespace fg
