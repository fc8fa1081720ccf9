// The third launch of the ampere backward: dQ, from its sums or in a loop of its own.
#pragma once
#include "backward_rows.cuh"

namespace fg {

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

}  // namespace fg
