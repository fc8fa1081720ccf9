// dQ of 128 query rows, when keys and queries have a launch each: a loop over the keys that the rows see, shaped like the forward pass.
//
// Two warpgroups of 64 rows each. The scores and dP of the next tile are computed by the tensor cores before dQ of the present one, so that
// one warpgroup's exponentials run beside another's products.
#pragma once
#include "backward_schedule.cuh"
#include "gradient_store.cuh"
#include "backward_products.cuh"

namespace fg {

template <class C>
struct QueryShape {
  static constexpr int ROWS = PRODUCT_ROWS, CONSUMERS = C::QUERY_ROWS / ROWS;
  static_assert(CONSUMERS == 2 && C::THREADS == 384, "two consuming warpgroups, and the producer");
  static constexpr int Q_BYTES = operand_bytes(ROWS, C::HEAD_DIM), DOUT_BYTES = operand_bytes(ROWS, C::HEAD_DIM_V);
  static constexpr int K_BYTES = operand_bytes(C::BLOCK_KV, C::HEAD_DIM), V_BYTES = operand_bytes(C::BLOCK_KV, C::HEAD_DIM_V);
  static constexpr int Q = 0, DOUT = Q + CONSUMERS * Q_BYTES, K = DOUT + CONSUMERS * DOUT_BYTES, V = K + C::KV_STAGES * K_BYTES;
  static constexpr int BARRIERS = V + C::KV_STAGES * V_BYTES;

  static constexpr int ROWS_FULL = 0, ROWS_EMPTY = 1, K_FULL = 2, K_EMPTY = K_FULL + C::KV_STAGES, V_FULL = K_EMPTY + C::KV_STAGES;
  static constexpr int V_EMPTY = V_FULL + C::KV_STAGES, TILE_FULL = V_EMPTY + C::KV_STAGES, TILE_EMPTY = TILE_FULL + 2;
  static constexpr int TILE_WORDS = TILE_EMPTY + 2, END = TILE_WORDS + 1;
  static_assert(BARRIERS + 8 * END == C::QUERY_SHARED_BYTES, "the layout of shared memory is the formula of the search space");

  static constexpr int SCORES = C::BLOCK_KV / 2, GRADIENTS = C::BLOCK_KV / 4, SUMS = product_columns(C::HEAD_DIM) / 2;  // registers
  using Scores = RowsByRows<C::HEAD_DIM, ROWS, C::BLOCK_KV>;                                                            // Q K^T
  using Weights = RowsByRows<C::HEAD_DIM_V, ROWS, C::BLOCK_KV>;                                                         // dP = dO V^T
  using Sums = RegistersByColumns<C::BLOCK_KV, C::HEAD_DIM>;                                                            // dS K

  FG_DEVICE static u32 barrier(u32 shared, int index) { return shared + static_cast<u32>(BARRIERS + 8 * index); }
  FG_DEVICE static TileQueue queue(u32 shared) {
    return {barrier(shared, TILE_WORDS), barrier(shared, TILE_FULL), barrier(shared, TILE_EMPTY)};
  }
  FG_DEVICE static void initialise(u32 shared) {
    mbarrier_init(barrier(shared, ROWS_FULL), 1);
    mbarrier_init(barrier(shared, ROWS_EMPTY), 4 * CONSUMERS);
    for (int stage = 0; stage < C::KV_STAGES; ++stage) {
      mbarrier_init(barrier(shared, K_FULL + stage), 1);
      mbarrier_init(barrier(shared, K_EMPTY + stage), 4 * CONSUMERS);
      mbarrier_init(barrier(shared, V_FULL + stage), 1);
      mbarrier_init(barrier(shared, V_EMPTY + stage), 4 * CONSUMERS);
    }
    TileQueue::initialise(barrier(shared, TILE_FULL), barrier(shared, TILE_EMPTY));
    fence_mbarrier_init();
  }
};

template <class C>
FG_DEVICE void produce_key_tiles(const MappedBackwardParams& params, u32 shared) {
  using Shape = QueryShape<C>;
  const ForwardParams& forward = params.problem.forward;
  const int tiles = QueryTile<C>::list(forward).tiles, group = forward.heads_q / forward.heads_kv;
  TileQueue queue = Shape::queue(shared);
  RingSlot<C::KV_STAGES> at;
  int tile = static_cast<int>(block_index());
  FG_NO_UNROLL
  while (true) {
    queue.publish(tile);
    if (tile == NO_TILE) break;
    const QueryTile<C> place = QueryTile<C>::of(forward, tile);
    tile = TileQueue::draw(params.counters + 1, tiles);
    const TileRange<C> range(forward, place.row, C::QUERY_ROWS);
    FG_NO_UNROLL
    for (int n = range.first; n < range.last; ++n) {
      mbarrier_wait(Shape::barrier(shared, Shape::K_EMPTY + at.stage), at.round ^ 1);
      const u32 k_full = Shape::barrier(shared, Shape::K_FULL + at.stage), v_full = Shape::barrier(shared, Shape::V_FULL + at.stage);
      mbarrier_expect(k_full, Shape::K_BYTES);
      load_tile<C::BLOCK_KV, C::HEAD_DIM>(shared + Shape::K + at.stage * Shape::K_BYTES, &params.query_k, k_full, n * C::BLOCK_KV,
                                          place.head / group, place.batch);
      mbarrier_wait(Shape::barrier(shared, Shape::V_EMPTY + at.stage), at.round ^ 1);
      mbarrier_expect(v_full, Shape::V_BYTES);
      load_tile<C::BLOCK_KV, C::HEAD_DIM_V>(shared + Shape::V + at.stage * Shape::V_BYTES, &params.query_v, v_full, n * C::BLOCK_KV,
                                            place.head / group, place.batch);
      at = at.next();
    }
  }
}

template <class C>
FG_DEVICE void produce_row_tiles(const MappedBackwardParams& params, u32 shared) {
  using Shape = QueryShape<C>;
  const ForwardParams& forward = params.problem.forward;
  TileQueue queue = Shape::queue(shared);
  u32 round = 0;
  FG_NO_UNROLL
  for (int tile = queue.read_alone(); tile != NO_TILE; tile = queue.read_alone()) {
    const QueryTile<C> place = QueryTile<C>::of(forward, tile);
    const u32 full = Shape::barrier(shared, Shape::ROWS_FULL);
    mbarrier_wait(Shape::barrier(shared, Shape::ROWS_EMPTY), round ^ 1);
    mbarrier_expect(full, Shape::CONSUMERS * (Shape::Q_BYTES + Shape::DOUT_BYTES));
    FG_NO_UNROLL
    for (int consumer = 0; consumer < Shape::CONSUMERS; ++consumer) {
      const int row = place.row + consumer * Shape::ROWS;
      load_tile<Shape::ROWS, C::HEAD_DIM>(shared + Shape::Q + consumer * Shape::Q_BYTES, &params.query_q, full, row, place.head,
                                          place.batch);
      load_tile<Shape::ROWS, C::HEAD_DIM_V>(shared + Shape::DOUT + consumer * Shape::DOUT_BYTES, &params.query_dout, full, row, place.head,
                                            place.batch);
    }
    round ^= 1;
  }
}

template <class C>
struct QueryConsumer {
  using Shape = QueryShape<C>;
  using Element = typename C::Element;
  const BackwardParams& params;
  const u32 shared;
  const int index, warp, lane;  // of the warpgroup among the consumers, of the warp in the warpgroup, in the warp
  RingSlot<C::KV_STAGES> keys, values;
  u32 round = 0;
  float lse[2], delta[2];
  float sums[Shape::SUMS], scores[Shape::SCORES], weights[Shape::SCORES];  // dQ; S, then P, then dS; dP
  u32 gradients[Shape::GRADIENTS];                                         // dS, packed

  FG_DEVICE u32 barrier(int which) const { return Shape::barrier(shared, which); }
  FG_DEVICE u32 q_rows() const { return row_operand(shared + static_cast<u32>(Shape::Q + index * Shape::Q_BYTES)); }
  FG_DEVICE u32 dout_rows() const { return row_operand(shared + static_cast<u32>(Shape::DOUT + index * Shape::DOUT_BYTES)); }
  FG_DEVICE u32 k_rows(int stage) const {
    return row_operand(shared + Shape::K) + static_cast<u32>(stage) * descriptor_step(Shape::K_BYTES);
  }
  FG_DEVICE u32 v_rows(int stage) const {
    return row_operand(shared + Shape::V) + static_cast<u32>(stage) * descriptor_step(Shape::V_BYTES);
  }
  FG_DEVICE u32 k_columns(int stage) const {
    return column_operand(shared + Shape::K, C::BLOCK_KV) + static_cast<u32>(stage) * descriptor_step(Shape::K_BYTES);
  }

  FG_DEVICE void hide(int row, int tile) {
    const int column = tile * C::BLOCK_KV + lane % 4 * 2;
    const VisibleKeys seen[2] = {visible_keys<C>(params.forward, row), visible_keys<C>(params.forward, row + 8)};
    FG_UNROLL
    for (int i = 0; i < Shape::SCORES; ++i) {
      const int key = column + column_of(i);
      const VisibleKeys& visible = seen[row_of(i)];
      if (key > visible.last || (C::MASK == MASK_WINDOW && key < visible.first)) scores[i] = -infinity();
    }
  }
  FG_DEVICE void exponentiate(const TileRange<C>& own, int row, int tile) {
    if (own.needs_mask(tile)) hide(row, tile);
    FG_UNROLL
    for (int i = 0; i < Shape::SCORES; ++i)
      scores[i] = exp2_approx(fused_multiply_add(scores[i], params.forward.scale_log2, -lse[row_of(i)]));
  }
  FG_DEVICE void differentiate() {
    FG_UNROLL
    for (int i = 0; i < Shape::SCORES; ++i) scores[i] *= weights[i] - delta[row_of(i)];
  }
  FG_DEVICE void pack_gradients() {
    FG_UNROLL
    for (int i = 0; i < Shape::GRADIENTS; ++i) gradients[i] = pack_pair(scores[2 * i], scores[2 * i + 1], Element{});
  }

  FG_DEVICE void start_scores() {
    mbarrier_wait(barrier(Shape::K_FULL + keys.stage), keys.round);
    start_product<typename Shape::Scores, Element>(scores, q_rows(), k_rows(keys.stage));
  }
  FG_DEVICE void start_weights() {
    mbarrier_wait(barrier(Shape::V_FULL + values.stage), values.round);
    start_product<typename Shape::Weights, Element>(weights, dout_rows(), v_rows(values.stage));
  }
  FG_DEVICE void release_values() {
    warp_release(barrier(Shape::V_EMPTY + values.stage));
    values = values.next();
  }

  FG_DEVICE void begin(const TileRange<C>& own, int row, int tile) {
    start_scores();
    start_weights();
    product_wait<0>(scores, weights);
    release_values();
    exponentiate(own, row, tile);
    differentiate();
    pack_gradients();
  }
  FG_DEVICE void advance(const TileRange<C>& own, int row, int tile) {
    const RingSlot<C::KV_STAGES> present = keys;
    keys = keys.next();
    start_scores();
    start_weights();
    add_product<typename Shape::Sums, Element>(sums, gradients, k_columns(present.stage));
    product_wait<2>(scores);
    exponentiate(own, row, tile);
    if constexpr (C::PIN) finish_before(scores);
    product_wait<1>(scores, weights);
    release_values();
    differentiate();
    product_wait<0>(sums, scores, gradients);
    warp_release(barrier(Shape::K_EMPTY + present.stage));
    pack_gradients();
  }
  FG_DEVICE void end() {
    add_product<typename Shape::Sums, Element>(sums, gradients, k_columns(keys.stage));
    product_wait<0>(sums, scores, gradients);
    warp_release(barrier(Shape::K_EMPTY + keys.stage));
    keys = keys.next();
  }

  FG_DEVICE void pass_by(int tiles) {
    FG_NO_UNROLL
    for (int i = 0; i < tiles; ++i) {
      mbarrier_wait(barrier(Shape::K_FULL + keys.stage), keys.round);
      warp_release(barrier(Shape::K_EMPTY + keys.stage));
      keys = keys.next();
      mbarrier_wait(barrier(Shape::V_FULL + values.stage), values.round);
      release_values();
    }
  }

  FG_DEVICE void load_statistics(const QueryTile<C>& place, int row) {
    const RowStatistics from(params.forward);
    const i64 first = first_statistic(params.forward, place.batch, place.head);
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      lse[r] = load_global(from.lse + first + statistic_place(row + 8 * r));
      delta[r] = load_global(from.delta + first + statistic_place(row + 8 * r));
    }
  }

  FG_DEVICE void compute(const QueryTile<C>& place) {
    const int first_row = place.row + index * Shape::ROWS, row = first_row + warp * 16 + lane / 4;
    const TileRange<C> range(params.forward, place.row, C::QUERY_ROWS), own(params.forward, first_row, Shape::ROWS);
    FG_UNROLL
    for (int i = 0; i < Shape::SUMS; ++i) sums[i] = 0.0f;
    load_statistics(place, row);
    mbarrier_wait(barrier(Shape::ROWS_FULL), round);
    round ^= 1;
    // Tiles of the CTA that only the other warpgroup sees are given back unread.
    const bool has_rows = first_row < params.forward.seqlen_q;
    const int first = has_rows ? minimum(maximum(own.first, range.first), range.last) : range.last;
    const int last = maximum(first, minimum(own.last, range.last));
    pass_by(first - range.first);
    if (last > first) {
      begin(own, row, first);
      FG_NO_UNROLL
      for (int tile = first + 1; tile < last; ++tile) advance(own, row, tile);
    }
    warp_release(barrier(Shape::ROWS_EMPTY));
    if (last > first) end();
    pass_by(range.last - last);
    const GradientHead<Element> dq(params.dq, params.dq_strides, place.batch, place.head, params.forward.seqlen_q);
    dq.template store<C::HEAD_DIM>(sums, params.scale, row, 0, C::HEAD_DIM, lane);
  }

  FG_DEVICE void run() {
    TileQueue queue = Shape::queue(shared);
    FG_NO_UNROLL
    for (int tile = queue.read(); tile != NO_TILE; tile = queue.read()) compute(QueryTile<C>::of(params.forward, tile));
  }
};

template <class C>
FG_DEVICE void gradients_of_queries(const MappedBackwardParams& params) {
  const u32 shared = dynamic_shared();
  const int warp = warp_uniform(thread_index() / WARP_LANES), lane = thread_index() % WARP_LANES, warpgroup = warp / 4;
  if (thread_index() == 0) QueryShape<C>::initialise(shared);
  block_sync();
  if (warpgroup == 0) {
    registers_decrease<24>();
    if (warp == 0 && lane == 0) {
      produce_key_tiles<C>(params, shared);
    } else if (warp == 1 && lane == 0) {
      produce_row_tiles<C>(params, shared);
    }
  } else {
    registers_increase<240>();
    QueryConsumer<C>{params.problem, shared, warpgroup - 1, warp % 4, lane}.run();
  }
}

}  // namespace fg
