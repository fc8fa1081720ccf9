// A producer warp and two consumer warpgroups, as attention on sm_90 has them, without the softmax: O = round(Q K^T) V, where each tile of
// keys halves what came before. The grid is persistent and draws tiles from a counter. FAULT plants one mistake.
#include "sm90.cuh"

using namespace fg;
using Element = ELEMENT;

struct Params {
  TensorMap q, k, v, o;
  u32* counter;
  int tiles, kv_tiles;
};

constexpr int STAGES = 2, CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1), WARPS = 4 * CONSUMERS;
constexpr int Q_BYTES = operand_bytes(64, HEAD_DIM), K_BYTES = operand_bytes(BLOCK_KV, HEAD_DIM);
constexpr int V_BYTES = operand_bytes(BLOCK_KV, HEAD_DIM_V), O_BYTES = operand_bytes(64, HEAD_DIM_V);
constexpr int Q = 0, O = Q + CONSUMERS * Q_BYTES, K = O + CONSUMERS * O_BYTES, V = K + STAGES * K_BYTES;
constexpr int TILE_WORDS = V + STAGES * V_BYTES, BARRIERS = TILE_WORDS + 16;
constexpr int K_FULL = 0, K_EMPTY = K_FULL + STAGES, V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES;
constexpr int Q_FULL = V_EMPTY + STAGES, Q_EMPTY = Q_FULL + CONSUMERS, TILE_FULL = Q_EMPTY + CONSUMERS, TILE_EMPTY = TILE_FULL + 2;
static_assert(BARRIERS + 8 * (TILE_EMPTY + 2) <= SHARED_BYTES, "shared memory is large enough");

enum Fault {
  NO_FAULT,
  EXPECTS_HALF,
  EXPECTS_MORE,
  V_NEVER_RELEASED,
  K_EMPTY_NOT_WAITED,
  K_EMPTY_WRONG_PARITY,
  K_FULL_OLD_PARITY,
  V_FULL_NOT_WAITED,
  EMPTY_COUNT_TOO_SMALL,
  K_RELEASED_EARLY,
  V_RELEASED_EARLY,
  SCORES_READ_EARLY,
  WEIGHTS_REPACKED_EARLY,
  OUTPUT_SCALED_EARLY,
  NO_PROXY_FENCE,
  NO_BARRIER_BEFORE_STORE,
  O_REUSED_EARLY,
  NO_WAIT_BEFORE_EXIT,
  RELEASE_WITHOUT_WARP_SYNC,
  BARRIER_COUNT,
  BARRIER_SHARED,
  TOO_MANY_REGISTERS,
  NO_FENCE_AFTER_INIT,
  NO_BARRIER_AFTER_INIT,
  WRONG_LEADING_DISTANCE,
  Q_RELEASED_EARLY,
  COUNTER_NOT_RESET,
  WRONG_SWIZZLE_PHASE,
  Q_FULL_NOT_WAITED,
  LAST_PRODUCT_NOT_WAITED,
};
constexpr Fault PLANTED = FAULT;
FG_DEVICE constexpr bool is(Fault fault) { return PLANTED == fault; }

struct Shared {
  u32 base = dynamic_shared();
  FG_DEVICE u32 barrier(int index) const { return base + BARRIERS + 8 * index; }
  FG_DEVICE u32 tile_word(int slot) const { return base + TILE_WORDS + 4 * slot; }
};

// A place in a ring, and the parity of its current round.
struct Cursor {
  int stage = 0;
  u32 round = 0;
  FG_DEVICE void advance() {
    if (++stage == STAGES) stage = 0, round ^= 1;
  }
};

template <int COLUMNS>
FG_DEVICE void load_tile(u32 target, const TensorMap* map, u32 barrier, int rows, int row) {
  FG_UNROLL
  for (int chunk = 0; chunk < chunks_of(COLUMNS); ++chunk)
    tma_load(target + chunk * chunk_bytes(rows), map, barrier, chunk * SWIZZLE_COLUMNS, row, 0, 0, 0);
}

FG_DEVICE void initialise(const Shared& shared) {
  const u32 releases = is(EMPTY_COUNT_TOO_SMALL) ? WARPS - 1 : WARPS;
  for (int stage = 0; stage < STAGES; ++stage) {
    mbarrier_init(shared.barrier(K_FULL + stage), 1);
    mbarrier_init(shared.barrier(K_EMPTY + stage), releases);
    mbarrier_init(shared.barrier(V_FULL + stage), 1);
    mbarrier_init(shared.barrier(V_EMPTY + stage), WARPS);
    mbarrier_init(shared.barrier(TILE_FULL + stage), 1);
    mbarrier_init(shared.barrier(TILE_EMPTY + stage), WARPS);
  }
  for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
    mbarrier_init(shared.barrier(Q_FULL + consumer), 1);
    mbarrier_init(shared.barrier(Q_EMPTY + consumer), 4);
  }
  if (!is(NO_FENCE_AFTER_INIT)) fence_mbarrier_init();
}

FG_DEVICE void produce_pair(const Params& params, const Shared& shared, const Cursor& at, int n) {
  const u32 k_full = shared.barrier(K_FULL + at.stage), v_full = shared.barrier(V_FULL + at.stage);
  const u32 parity = is(K_EMPTY_WRONG_PARITY) ? at.round : at.round ^ 1;
  if (!is(K_EMPTY_NOT_WAITED)) mbarrier_wait(shared.barrier(K_EMPTY + at.stage), parity);
  mbarrier_expect(k_full, is(EXPECTS_HALF) ? K_BYTES / 2 : is(EXPECTS_MORE) ? K_BYTES + 128 : K_BYTES);
  load_tile<HEAD_DIM>(shared.base + K + at.stage * K_BYTES, &params.k, k_full, BLOCK_KV, n * BLOCK_KV);
  mbarrier_wait(shared.barrier(V_EMPTY + at.stage), at.round ^ 1);
  mbarrier_expect(v_full, V_BYTES);
  load_tile<HEAD_DIM_V>(shared.base + V + at.stage * V_BYTES, &params.v, v_full, BLOCK_KV, n * BLOCK_KV);
}

FG_DEVICE void produce(const Params& params, const Shared& shared) {
  Cursor at;
  int tile = static_cast<int>(block_index());
  FG_NO_UNROLL
  for (int turn = 0;; ++turn) {
    const int slot = turn & 1;
    const u32 round = turn >> 1 & 1;
    mbarrier_wait(shared.barrier(TILE_EMPTY + slot), round ^ 1);
    store_shared(shared.tile_word(slot), static_cast<u32>(tile));
    mbarrier_arrive(shared.barrier(TILE_FULL + slot));
    if (tile >= params.tiles) return;
    FG_NO_UNROLL
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
      mbarrier_wait(shared.barrier(Q_EMPTY + consumer), (turn & 1) ^ 1);
      mbarrier_expect(shared.barrier(Q_FULL + consumer), Q_BYTES);
      load_tile<HEAD_DIM>(shared.base + Q + consumer * Q_BYTES, &params.q, shared.barrier(Q_FULL + consumer), 64,
                          (tile * CONSUMERS + consumer) * 64);
    }
    FG_NO_UNROLL
    for (int n = 0; n < params.kv_tiles; ++n) {
      produce_pair(params, shared, at, n);
      at.advance();
    }
    const u32 limit = static_cast<u32>(params.tiles) - (is(COUNTER_NOT_RESET) ? 0 : 1);
    tile = static_cast<int>(grid_size()) + static_cast<int>(atomic_increment_wrap(params.counter, limit));
  }
}

constexpr int SCORES = BLOCK_KV / 2, OUTPUTS = product_columns(HEAD_DIM_V) / 2, WEIGHTS = BLOCK_KV / 4;

struct Consumer {
  const Params& params;
  Shared shared;
  int index, lane, warp;  // of the warpgroup, in the warp, in the warpgroup
  int current = 0;        // tile
  Cursor at;
  float scores[SCORES], output[OUTPUTS];
  u32 weights[WEIGHTS];

  FG_DEVICE void release(int barrier) const {
    if (is(RELEASE_WITHOUT_WARP_SYNC)) {
      if (lane == 0) mbarrier_arrive(shared.barrier(barrier));
    } else {
      warp_release(shared.barrier(barrier));
    }
  }
  FG_DEVICE void round_scores() {
    FG_UNROLL
    for (int i = 0; i < WEIGHTS; ++i) weights[i] = pack_pair(scores[2 * i], scores[2 * i + 1], Element{});
  }
  FG_DEVICE void halve_output() {
    FG_UNROLL
    for (int i = 0; i < OUTPUTS; ++i) output[i] *= 0.5f;
  }
  FG_DEVICE void issue_scores(const Cursor& place) {
    mbarrier_wait(shared.barrier(K_FULL + place.stage), is(K_FULL_OLD_PARITY) ? place.round ^ 1 : place.round);
    score_product<product_steps(HEAD_DIM), Element>(scores, row_operand(shared.base + Q + index * Q_BYTES),
                                                    row_operand(shared.base + K + place.stage * K_BYTES));
  }
  FG_DEVICE void issue_output() {
    if (!is(V_FULL_NOT_WAITED)) mbarrier_wait(shared.barrier(V_FULL + at.stage), at.round);
    const int rows = is(WRONG_LEADING_DISTANCE) ? BLOCK_KV / 2 : BLOCK_KV;
    output_product<Element>(output, weights, column_operand(shared.base + V + at.stage * V_BYTES, rows));
  }

  FG_DEVICE void tile(int turn) {
    FG_UNROLL
    for (int i = 0; i < OUTPUTS; ++i) output[i] = 0.0f;
    if (!is(Q_FULL_NOT_WAITED)) mbarrier_wait(shared.barrier(Q_FULL + index), turn & 1);
    issue_scores(at);
    if (is(SCORES_READ_EARLY)) round_scores();
    if (is(K_RELEASED_EARLY)) release(K_EMPTY + at.stage);
    wgmma_wait<0>(scores);
    if (!is(K_RELEASED_EARLY)) release(K_EMPTY + at.stage);
    if (!is(SCORES_READ_EARLY)) round_scores();
    FG_NO_UNROLL
    for (int n = 1; n < params.kv_tiles; ++n) step(n + 1 == params.kv_tiles);
    if (!is(Q_RELEASED_EARLY)) release(Q_EMPTY + index);
    issue_output();
    if (!is(LAST_PRODUCT_NOT_WAITED)) wgmma_wait<0>(output, weights);
    release(V_EMPTY + at.stage);
    at.advance();
    store();
  }
  // The next scores are computed while the weights of this tile meet V.
  FG_DEVICE void step(bool last) {
    Cursor next = at;
    next.advance();
    if (is(Q_RELEASED_EARLY) && last) release(Q_EMPTY + index);
    issue_scores(next);
    issue_output();
    if (is(OUTPUT_SCALED_EARLY)) halve_output();
    wgmma_wait<1>(scores);
    release(K_EMPTY + next.stage);
    if (is(WEIGHTS_REPACKED_EARLY)) round_scores();
    if (is(V_RELEASED_EARLY)) release(V_EMPTY + at.stage);
    wgmma_wait<0>(output, weights, scores);
    if (!is(V_RELEASED_EARLY) && !is(V_NEVER_RELEASED)) release(V_EMPTY + at.stage);
    if (!is(OUTPUT_SCALED_EARLY)) halve_output();
    if (!is(WEIGHTS_REPACKED_EARLY)) round_scores();
    at = next;
  }
  FG_DEVICE void store() {
    const bool leader = warp == 0 && lane == 0;
    const int id = is(BARRIER_SHARED) ? 1 : 1 + index, threads = is(BARRIER_COUNT) ? 160 : 128;
    const u32 buffer = shared.base + O + index * O_BYTES;
    if (leader && !is(O_REUSED_EARLY)) bulk_wait_read<0>();
    barrier_sync(id, threads);
    FG_UNROLL
    for (int j = 0; j < OUTPUTS / 8; ++j) {
      const u32 fragment[4] = {
          pack_pair(output[8 * j], output[8 * j + 1], Element{}), pack_pair(output[8 * j + 2], output[8 * j + 3], Element{}),
          pack_pair(output[8 * j + 4], output[8 * j + 5], Element{}), pack_pair(output[8 * j + 6], output[8 * j + 7], Element{})};
      const int row = warp * 16 + lane % 16 + (is(WRONG_SWIZZLE_PHASE) ? 1 : 0), column = 16 * j + lane / 16 * 8;
      store_matrix_x4(buffer + operand_offset(64, row % 64, column), fragment);
    }
    if (!is(NO_PROXY_FENCE)) fence_proxy_async();
    if (!is(NO_BARRIER_BEFORE_STORE)) barrier_sync(id, threads);
    if (!leader) return;
    FG_UNROLL
    for (int chunk = 0; chunk < chunks_of(HEAD_DIM_V); ++chunk)
      tma_store(&params.o, buffer + chunk * chunk_bytes(64), chunk * SWIZZLE_COLUMNS, (current * CONSUMERS + index) * 64, 0, 0, 0);
    bulk_commit();
  }

  FG_DEVICE void run() {
    FG_NO_UNROLL
    for (int turn = 0;; ++turn) {
      const int slot = turn & 1;
      mbarrier_wait(shared.barrier(TILE_FULL + slot), turn >> 1 & 1);
      current = static_cast<int>(load_shared<u32>(shared.tile_word(slot)));
      release(TILE_EMPTY + slot);
      if (current >= params.tiles) break;
      tile(turn);
    }
    if (warp == 0 && lane == 0 && !is(NO_WAIT_BEFORE_EXIT)) bulk_wait<0>();
  }
};

FG_KERNEL(specialised, Params, THREADS, 1) {
  const Shared shared;
  const int warp = warp_uniform(thread_index() / 32), lane = thread_index() % 32;
  if (thread_index() == 0) initialise(shared);
  if (!is(NO_BARRIER_AFTER_INIT)) block_sync();
  if (warp < 4) {
    registers_decrease<24>();
    if (warp == 0 && lane == 0) produce(params, shared);
  } else {
    registers_increase<is(TOO_MANY_REGISTERS) ? 248 : 240>();
    Consumer consumer{params, shared, warp / 4 - 1, lane, warp % 4};
    consumer.run();
  }
}
