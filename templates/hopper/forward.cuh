// Forward attention with warpgroup products and bulk tensor copies: sm_90a, 16-bit elements.
//
// One warpgroup produces: a thread copies tiles of K and V into rings and hands out query tiles, another copies Q. The others consume, 64
// query rows each. A consumer walks over its KV tiles from the right edge to the left and has the next scores computed by the tensor cores
// before it asks for the present output, so that one warpgroup's softmax runs beside another's products.
#pragma once
#include "mask.cuh"
#include "tile_scheduler.cuh"
#include "warpgroup_softmax.cuh"

namespace fg {

enum SoftmaxMode : int {
  SOFTMAX_LAZY = 0,    // looks at every score for the maximum
  SOFTMAX_UNSEEN = 1,  // looks at sums only
};

enum Epilogue : int {
  EPILOGUE_DIRECT = 0,  // registers to global memory, 16 bytes per lane
  EPILOGUE_BULK = 1,    // through a tile of shared memory of its own, by a bulk store that overlaps the next tile
};

template <class C>
struct HopperShape {
  static constexpr int CONSUMERS = C::CONSUMER_WARPGROUPS, ROWS = PRODUCT_ROWS;  // query rows per consumer
  static_assert(C::BLOCK_Q == CONSUMERS * ROWS && C::THREADS == (CONSUMERS + 1) * 128, "one warpgroup per 64 query rows, and the producer");
  static_assert(C::BLOCK_KV % 16 == 0, "tiles hold whole products");
  static constexpr int POSITIONS = ROWS / C::GROUP_PACK;  // of one head, in a consumer's rows: head after head
  static_assert(POSITIONS % 8 == 0, "the rows of one head are a multiple of the swizzle");

  static constexpr int Q_BYTES = operand_bytes(ROWS, C::HEAD_DIM), O_BYTES = operand_bytes(ROWS, C::HEAD_DIM_V);
  static constexpr int K_BYTES = operand_bytes(C::BLOCK_KV, C::HEAD_DIM), V_BYTES = operand_bytes(C::BLOCK_KV, C::HEAD_DIM_V);
  static constexpr int Q = 0, O = Q + C::QUERY_SLOTS * CONSUMERS * Q_BYTES;
  static constexpr int K = O + (C::EPILOGUE == EPILOGUE_BULK ? CONSUMERS * O_BYTES : 0), V = K + C::NUM_STAGES * K_BYTES;
  static constexpr int BARRIERS = V + C::NUM_STAGES * V_BYTES;

  // mbarriers, eight bytes each
  static constexpr int K_FULL = 0, K_EMPTY = K_FULL + C::NUM_STAGES, V_FULL = K_EMPTY + C::NUM_STAGES, V_EMPTY = V_FULL + C::NUM_STAGES;
  static constexpr int Q_FULL = V_EMPTY + C::NUM_STAGES, Q_EMPTY = Q_FULL + C::QUERY_SLOTS * CONSUMERS;
  static constexpr int PLACE_FULL = Q_EMPTY + C::QUERY_SLOTS * CONSUMERS, PLACE_EMPTY = PLACE_FULL + 2;
  static constexpr int PLACES = PLACE_EMPTY + 2, END = PLACES + 4;  // places are no mbarriers, but of 16 bytes
  static_assert(PLACES % 2 == 0, "places are read 16 bytes at once");
  static_assert(BARRIERS + 8 * END == C::SHARED_BYTES, "the layout of shared memory is the formula of the search space");

  static constexpr int DEPTH_STEPS = product_steps(C::HEAD_DIM);
  static constexpr int SCORES = C::BLOCK_KV / 2, OUTPUTS = product_columns(C::HEAD_DIM_V) / 2, WEIGHTS = C::BLOCK_KV / 4;  // registers

  // named barriers; 0 is block_sync
  static constexpr int TURN = 1, STORE = TURN + CONSUMERS;

  FG_DEVICE static u32 barrier(u32 shared, int index) { return shared + static_cast<u32>(BARRIERS + 8 * index); }
  FG_DEVICE static PlaceSequence<C> places(u32 shared) {
    return {barrier(shared, PLACES), barrier(shared, PLACE_FULL), barrier(shared, PLACE_EMPTY)};
  }
};

template <class C>
FG_DEVICE void initialise_barriers(u32 shared) {
  using Shape = HopperShape<C>;
  constexpr int CONSUMER_WARPS = 4 * Shape::CONSUMERS;
  for (int stage = 0; stage < C::NUM_STAGES; ++stage) {
    mbarrier_init(Shape::barrier(shared, Shape::K_FULL + stage), 1);
    mbarrier_init(Shape::barrier(shared, Shape::K_EMPTY + stage), CONSUMER_WARPS);
    mbarrier_init(Shape::barrier(shared, Shape::V_FULL + stage), 1);
    mbarrier_init(Shape::barrier(shared, Shape::V_EMPTY + stage), CONSUMER_WARPS);
  }
  for (int slot = 0; slot < C::QUERY_SLOTS * Shape::CONSUMERS; ++slot) {
    mbarrier_init(Shape::barrier(shared, Shape::Q_FULL + slot), 1);
    mbarrier_init(Shape::barrier(shared, Shape::Q_EMPTY + slot), 4);
  }
  PlaceSequence<C>::initialise(Shape::barrier(shared, Shape::PLACE_FULL), Shape::barrier(shared, Shape::PLACE_EMPTY));
  fence_mbarrier_init();
}

// A slot of a ring, and the parity of the round in which it is used.
template <int SLOTS>
struct RingPlace {
  int stage = 0;
  u32 round = 0;

  FG_DEVICE RingPlace next() const { return stage + 1 == SLOTS ? RingPlace{0, round ^ 1} : RingPlace{stage + 1, round}; }
};
template <class C>
using KeyValuePlace = RingPlace<C::NUM_STAGES>;
template <class C>
using QueryPlace = RingPlace<C::QUERY_SLOTS>;

// ---- producer ----

// One box per chunk of columns, into a tile of ROWS rows.
template <int ROWS, int COLUMNS>
FG_DEVICE void load_chunks(u32 target, const TensorMap* map, u32 barrier, int row, int head, int batch) {
  FG_UNROLL
  for (int chunk = 0; chunk < chunks_of(COLUMNS); ++chunk) {
    tma_load(target + static_cast<u32>(chunk * chunk_bytes(ROWS)), map, barrier, chunk * SWIZZLE_COLUMNS, row, head, batch, 0);
  }
}
template <int ROWS, int COLUMNS>
FG_DEVICE void load_tile(u32 target, const TensorMap* map, u32 barrier, int row, int head, int batch) {
  mbarrier_expect(barrier, operand_bytes(ROWS, COLUMNS));
  load_chunks<ROWS, COLUMNS>(target, map, barrier, row, head, batch);
}

template <class C>
struct KeyValueProducer {
  using Shape = HopperShape<C>;
  const MappedForwardParams& params;
  const u32 shared;

  FG_DEVICE void load_keys(KeyValuePlace<C> at, const Place& place, int tile) const {
    mbarrier_wait(Shape::barrier(shared, Shape::K_EMPTY + at.stage), at.round ^ 1);
    load_tile<C::BLOCK_KV, C::HEAD_DIM>(shared + Shape::K + at.stage * Shape::K_BYTES, &params.k,
                                        Shape::barrier(shared, Shape::K_FULL + at.stage), tile * C::BLOCK_KV, place.head_kv, place.batch);
  }
  FG_DEVICE void load_values(KeyValuePlace<C> at, const Place& place, int tile) const {
    mbarrier_wait(Shape::barrier(shared, Shape::V_EMPTY + at.stage), at.round ^ 1);
    load_tile<C::BLOCK_KV, C::HEAD_DIM_V>(shared + Shape::V + at.stage * Shape::V_BYTES, &params.v,
                                          Shape::barrier(shared, Shape::V_FULL + at.stage), tile * C::BLOCK_KV, place.head_kv, place.batch);
  }

  // K runs one tile ahead of V, as the consumers use them.
  FG_DEVICE void run() const {
    const WorkOrder<C> order(params.problem);
    PlaceSequence<C> places = Shape::places(shared);
    TileDraw<C> draw;
    KeyValuePlace<C> at;
    FG_NO_UNROLL
    for (int tile = draw.draw(params, order.tiles); tile < order.tiles; tile = draw.draw(params, order.tiles)) {
      const Place place = order.place(params.problem, tile);
      places.publish(place);
      const TileRange<C> range(params.problem, place.first_row, POSITIONS_PER_TILE<C>);
      if (range.count() > 0) load_keys(at, place, range.last - 1);
      FG_NO_UNROLL
      for (int n = range.last - 1; n >= range.first; --n) {
        if (n > range.first) load_keys(at.next(), place, n - 1);
        load_values(at, place, n);
        at = at.next();
      }
    }
    places.publish({0, 0, 0, NO_ROW});
  }
};

template <class C>
FG_DEVICE void produce_queries(const MappedForwardParams& params, u32 shared) {
  using Shape = HopperShape<C>;
  PlaceSequence<C> places = Shape::places(shared);
  QueryPlace<C> at;
  FG_NO_UNROLL
  for (Place place = places.read_alone(); place.first_row != NO_ROW; place = places.read_alone()) {
    FG_NO_UNROLL
    for (int consumer = 0; consumer < Shape::CONSUMERS; ++consumer) {
      const int slot = at.stage * Shape::CONSUMERS + consumer;
      const u32 target = shared + static_cast<u32>(Shape::Q + slot * Shape::Q_BYTES), full = Shape::barrier(shared, Shape::Q_FULL + slot);
      mbarrier_wait(Shape::barrier(shared, Shape::Q_EMPTY + slot), at.round ^ 1);
      mbarrier_expect(full, Shape::Q_BYTES);
      FG_NO_UNROLL
      for (int head = 0; head < C::GROUP_PACK; ++head) {
        load_chunks<Shape::ROWS, C::HEAD_DIM>(target + static_cast<u32>(head * chunk_bytes(Shape::POSITIONS)), &params.q, full,
                                              place.first_row + consumer * Shape::POSITIONS, place.head_q + head, place.batch);
      }
    }
    at = at.next();
  }
}

// ---- consumers ----

// A query tile as one consumer sees it: it computes 64 rows, and passes by those KV tiles of its CTA that none of them sees.
template <class C>
struct QueryTile {
  static constexpr int POSITIONS = HopperShape<C>::POSITIONS;
  Place place;
  int first_row;                                // of the consumer, the same in every head of the pack
  TileRange<C> range;                           // of the consumer
  int newest, passed_first, seen, passed_last;  // the CTA's last KV tile; how many are passed by, computed, passed by

  FG_DEVICE QueryTile(const ForwardParams& params, const Place& at, int index)
      : place(at), first_row(at.first_row + index * POSITIONS), range(params, first_row, POSITIONS) {
    const TileRange<C> cta(params, at.first_row, POSITIONS_PER_TILE<C>);
    const bool has_rows = first_row < params.seqlen_q;
    const int last = has_rows ? minimum(maximum(range.last, cta.first), cta.last) : cta.first;
    const int first = has_rows ? minimum(maximum(range.first, cta.first), last) : cta.first;
    newest = cta.last - 1;
    passed_first = cta.last - last;
    seen = last - first;
    passed_last = first - cta.first;
  }
  FG_DEVICE int first_seen() const { return newest - passed_first; }

  // Where row r of the consumer's 64 belongs.
  FG_DEVICE int row(int r) const { return first_row + r % POSITIONS; }
  FG_DEVICE int head(int r) const { return place.head_q + r / POSITIONS; }
};

template <class C>
struct Consumer {
  using Shape = HopperShape<C>;
  using Element = typename C::Element;
  const MappedForwardParams& params;
  const u32 shared;
  const int index, warp, lane;  // of the warpgroup among the consumers, of the warp in the warpgroup, in the warp
  KeyValuePlace<C> at;
  QueryPlace<C> query;
  WarpgroupSoftmax<C> softmax;
  float scores[Shape::SCORES], output[Shape::OUTPUTS];
  u32 weights[Shape::WEIGHTS];

  FG_DEVICE u32 barrier(int which) const { return Shape::barrier(shared, which); }
  FG_DEVICE int query_slot() const { return query.stage * Shape::CONSUMERS + index; }
  FG_DEVICE u32 query_tile() const { return shared + static_cast<u32>(Shape::Q + query_slot() * Shape::Q_BYTES); }
  FG_DEVICE u32 queries() const { return row_operand(query_tile()); }
  FG_DEVICE u32 keys(int stage) const { return row_operand(shared + Shape::K) + static_cast<u32>(stage) * descriptor_step(Shape::K_BYTES); }
  FG_DEVICE u32 values(int stage) const {
    return column_operand(shared + Shape::V, C::BLOCK_KV) + static_cast<u32>(stage) * descriptor_step(Shape::V_BYTES);
  }

  // Turns of the tensor cores go round the consumers, so that their softmax phases do not coincide.
  FG_DEVICE void take_turn() const {
    if constexpr (C::PING_PONG) barrier_sync(Shape::TURN + index, 256);
  }
  FG_DEVICE void pass_turn() const {
    if constexpr (C::PING_PONG) barrier_arrive(Shape::TURN + (index + 1 == Shape::CONSUMERS ? 0 : index + 1), 256);
  }

  FG_DEVICE void wait_keys(KeyValuePlace<C> place) const { mbarrier_wait(barrier(Shape::K_FULL + place.stage), place.round); }
  FG_DEVICE void wait_values(KeyValuePlace<C> place) const { mbarrier_wait(barrier(Shape::V_FULL + place.stage), place.round); }
  FG_DEVICE void release_keys(KeyValuePlace<C> place) const { warp_release(barrier(Shape::K_EMPTY + place.stage)); }
  FG_DEVICE void release_values(KeyValuePlace<C> place) const { warp_release(barrier(Shape::V_EMPTY + place.stage)); }

  // Tiles that this consumer does not see are given back unread, in order. Each takes a turn, as every tile does whose values are used.
  FG_DEVICE void pass_by(int tiles) {
    FG_NO_UNROLL
    for (int i = 0; i < tiles; ++i) {
      take_turn();
      pass_turn();
      wait_keys(at);
      release_keys(at);
      wait_values(at);
      release_values(at);
      at = at.next();
    }
  }

  FG_DEVICE int tile_row(int r) const { return warp * 16 + lane / 4 + 8 * r; }  // of this lane's two rows, among the consumer's 64

  FG_DEVICE void hide(const QueryTile<C>& tile, int number) {
    const int column = number * C::BLOCK_KV + lane % 4 * 2;
    const VisibleKeys seen[2] = {visible_keys<C>(params.problem, tile.row(tile_row(0))),
                                 visible_keys<C>(params.problem, tile.row(tile_row(1)))};
    FG_UNROLL
    for (int i = 0; i < Shape::SCORES; ++i) {
      const int key = column + column_of(i);
      const VisibleKeys& keys = seen[row_of(i)];
      if (key > keys.last || (C::MASK == MASK_WINDOW && key < keys.first)) scores[i] = -infinity();
    }
  }

  FG_DEVICE void pack_weights() {
    FG_UNROLL
    for (int i = 0; i < Shape::WEIGHTS; ++i) weights[i] = pack_pair(scores[2 * i], scores[2 * i + 1], Element{});
  }

  // The first tile that is seen: nothing to overlap with yet.
  FG_DEVICE void begin(const QueryTile<C>& tile) {
    softmax.start();
    FG_UNROLL
    for (int i = 0; i < Shape::OUTPUTS; ++i) output[i] = 0.0f;
    mbarrier_wait(barrier(Shape::Q_FULL + query_slot()), query.round);
    pass_by(tile.passed_first);
    if (tile.seen == 0) return;
    wait_keys(at);
    score_product<Shape::DEPTH_STEPS, Element>(scores, queries(), keys(at.stage));
    wgmma_wait<0>(scores);
    release_keys(at);
    if (tile.range.needs_mask(tile.first_seen())) hide(tile, tile.first_seen());
    softmax.update(scores, params.problem.scale_log2);
    pack_weights();
  }

  // The scores of this warp's 16 rows once more, by products of single warps, in the same registers.
  FG_DEVICE void recompute_scores(float (&target)[Shape::SCORES], int stage) const {
    const u32 q = query_tile(), k = shared + static_cast<u32>(Shape::K + stage * Shape::K_BYTES);
    FG_UNROLL
    for (int i = 0; i < Shape::SCORES; ++i) target[i] = 0.0f;
    FG_NO_UNROLL
    for (int step = 0; step < Shape::DEPTH_STEPS; ++step) {
      u32 a[4];
      load_matrix_x4(a, q + operand_offset(Shape::ROWS, warp * 16 + lane % 16, step * 16 + lane / 16 * 8));
      FG_UNROLL
      for (int n = 0; n < C::BLOCK_KV; n += 16) {
        u32 b[4];
        load_matrix_x4(b, k + operand_offset(C::BLOCK_KV, n + lane / 16 * 8 + lane % 8, step * 16 + lane / 8 % 2 * 8));
        FG_UNROLL
        for (int half = 0; half < 2; ++half) {
          float tile[4];
          FG_UNROLL
          for (int i = 0; i < 4; ++i) tile[i] = target[n / 2 + half * 4 + i];
          multiply_16x8x16(tile, a, b[2 * half], b[2 * half + 1], Element{});
          FG_UNROLL
          for (int i = 0; i < 4; ++i) target[n / 2 + half * 4 + i] = tile[i];
        }
      }
    }
  }

  FG_DEVICE void soften(const QueryTile<C>& tile, int number, int stage) {
    const bool masked = tile.range.needs_mask(number);
    if (masked) hide(tile, number);
    if (C::SOFTMAX_MODE == SOFTMAX_UNSEEN && !masked && softmax.settled) {
      if (softmax.update_unseen(scores, params.problem.scale_log2)) return;
      recompute_scores(scores, stage);
    }
    softmax.update(scores, params.problem.scale_log2);
  }

  // Scores of the next tile and output of the present one are under way together; the softmax runs while the output is computed.
  FG_DEVICE void advance(const QueryTile<C>& tile, int number) {
    const KeyValuePlace<C> next = at.next();
    wait_keys(next);
    take_turn();
    score_product<Shape::DEPTH_STEPS, Element>(scores, queries(), keys(next.stage));
    wait_values(at);
    output_product<Element>(output, weights, values(at.stage));
    pass_turn();
    wgmma_wait<1>(scores);
    if (C::SOFTMAX_MODE == SOFTMAX_LAZY) release_keys(next);
    soften(tile, number, next.stage);
    if (C::SOFTMAX_MODE == SOFTMAX_UNSEEN) release_keys(next);  // not before: the scores may be computed again
    wgmma_wait<0>(output, weights, scores);
    release_values(at);
    softmax.rescale_output(output);
    pack_weights();
    at = next;
  }

  // The output of a query tile's last KV tile, with nothing else to compute.
  FG_DEVICE void end(const QueryTile<C>& tile) {
    if (tile.seen > 0) {
      take_turn();
      wait_values(at);
      output_product<Element>(output, weights, values(at.stage));
      pass_turn();
      wgmma_wait<0>(output, weights);
      release_values(at);
      at = at.next();
    }
    pass_by(tile.passed_last);
    store(tile, softmax.finish(params.problem.scale_log2));
  }

  FG_DEVICE void run() {
    PlaceSequence<C> places = Shape::places(shared);
    if (C::PING_PONG && index == 0) barrier_arrive(Shape::TURN, 256);  // the first turn is free
    FG_NO_UNROLL
    for (Place place = places.read(); place.first_row != NO_ROW; place = places.read()) {
      const QueryTile<C> tile(params.problem, place, index);
      begin(tile);
      int number = tile.first_seen();
      FG_NO_UNROLL
      for (int i = 1; i < tile.seen; ++i) advance(tile, --number);
      warp_release(barrier(Shape::Q_EMPTY + query_slot()));
      query = query.next();
      end(tile);
    }
    if (C::EPILOGUE == EPILOGUE_BULK && warp == 0 && lane == 0) bulk_wait<0>();
  }

  // ---- epilogue ----

  FG_DEVICE void store(const QueryTile<C>& tile, const SoftmaxResult& result) const {
    store_lse(tile, result);
    if constexpr (C::EPILOGUE == EPILOGUE_BULK) {
      store_bulk(tile, result);
    } else {
      store_direct(tile, result);
    }
  }

  FG_DEVICE void store_lse(const QueryTile<C>& tile, const SoftmaxResult& result) const {
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = tile.row(tile_row(r));
      const Place place = {tile.place.batch, tile.head(tile_row(r)), tile.place.head_kv, row};
      if (lane % 4 == 0 && row < params.problem.seqlen_q) store_global(lse_of(params.problem, place) + row, result.lse[r]);
    }
  }

  FG_DEVICE u32 normalised_pair(int i, const SoftmaxResult& result) const {
    const float inverse = result.inverse_sum[row_of(i)];
    return pack_pair(output[i] * inverse, output[i + 1] * inverse, Element{});
  }

  FG_DEVICE void store_direct(const QueryTile<C>& query_tile, const SoftmaxResult& result) const {
    constexpr int TILES = Shape::OUTPUTS / 4;  // of 8 columns
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = query_tile.row(tile_row(r)), head = query_tile.head(tile_row(r));
      Element* o = head_of<Element>(params.problem.o, params.problem.o_strides, query_tile.place.batch, head);
      FG_UNROLL
      for (int first = 0; first < TILES; first += 4) {
        u32 word[4];
        FG_UNROLL
        for (int i = 0; i < 4; ++i) word[i] = normalised_pair(minimum(first + i, TILES - 1) * 4 + 2 * r, result);
        gather_row(word, lane);
        const int tile = first + lane % 4;
        if (row >= params.problem.seqlen_q || tile >= TILES) continue;
        Element* target = o + row * params.problem.o_strides.row + tile * 8;
        store_global(reinterpret_cast<Vector16*>(target), Vector16{{word[0], word[1], word[2], word[3]}});
      }
    }
  }

  FG_DEVICE void store_bulk(const QueryTile<C>& query_tile, const SoftmaxResult& result) const {
    constexpr int TILES = Shape::OUTPUTS / 4;
    const u32 tile = shared + static_cast<u32>(Shape::O + index * Shape::O_BYTES);
    const bool leads = warp == 0 && lane == 0;
    if (leads) bulk_wait_read<0>();  // the store of the last tile has read the buffer
    barrier_sync(Shape::STORE + index, 128);
    FG_UNROLL
    for (int first = 0; first < TILES; first += 2) {
      u32 fragment[4];
      FG_UNROLL
      for (int i = 0; i < 4; ++i) fragment[i] = normalised_pair(minimum(first + i / 2, TILES - 1) * 4 + i % 2 * 2, result);
      store_matrix_x4(tile + operand_offset(Shape::ROWS, warp * 16 + lane % 16, (first + lane / 16) * 8), fragment);
    }
    fence_proxy_async();
    barrier_sync(Shape::STORE + index, 128);
    if (leads) {
      FG_UNROLL
      for (int head = 0; head < C::GROUP_PACK; ++head) {
        FG_UNROLL
        for (int chunk = 0; chunk < chunks_of(C::HEAD_DIM_V); ++chunk) {
          tma_store(&params.o, tile + static_cast<u32>(chunk * chunk_bytes(Shape::ROWS) + head * chunk_bytes(Shape::POSITIONS)),
                    chunk * SWIZZLE_COLUMNS, query_tile.first_row, query_tile.place.head_q + head, query_tile.place.batch, 0);
        }
      }
      bulk_commit();
    }
  }
};

template <class C>
FG_DEVICE void forward(const MappedForwardParams& params) {
  using Shape = HopperShape<C>;
  const u32 shared = dynamic_shared();
  const int warp = warp_uniform(thread_index() / WARP_LANES), lane = thread_index() % WARP_LANES, warpgroup = warp / 4;
  if (thread_index() == 0) initialise_barriers<C>(shared);
  block_sync();
  if (warpgroup == 0) {
    registers_decrease<C::PRODUCER_REGISTERS>();
    if (warp == 0 && lane == 0) {
      prefetch_map(&params.k);
      prefetch_map(&params.v);
      KeyValueProducer<C>{params, shared}.run();
    } else if (warp == 1 && lane == 0) {
      prefetch_map(&params.q);
      produce_queries<C>(params, shared);
    }
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    Consumer<C>{params, shared, warpgroup - 1, warp % 4, lane}.run();
  }
}

}  // namespace fg
