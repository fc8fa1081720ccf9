// What both ways to the gradients of keys and values share: a CTA holds a tile of K and V and walks over the blocks of query rows that see
// it, in every query head of the group. Q and dO come in rings, each with its row statistics.
#pragma once
#include "backward_clearing.cuh"
#include "backward_products.cuh"
#include "backward_schedule.cuh"
#include "gradient_store.cuh"

namespace fg {

template <class C>
struct KeyShape {
  static_assert(C::THREADS == 384, "two consuming warpgroups, and the producer");
  static_assert(C::BLOCK_Q % 16 == 0, "blocks hold whole products");
  static constexpr int K_BYTES = operand_bytes(C::KEY_ROWS, C::HEAD_DIM), V_BYTES = operand_bytes(C::KEY_ROWS, C::HEAD_DIM_V);
  static constexpr int Q_BYTES = operand_bytes(C::BLOCK_Q, C::HEAD_DIM), DOUT_BYTES = operand_bytes(C::BLOCK_Q, C::HEAD_DIM_V);
  static constexpr int STATISTIC_BYTES = 4 * C::BLOCK_Q;
  static constexpr int EXCHANGE_BYTES = 2 * C::KEY_ROWS * C::BLOCK_Q;                            // dS or P, 16-bit
  static constexpr int STAGING_BYTES = C::FUSED && !C::DIRECT ? 2 * 64 * C::DQ_COLUMNS * 4 : 0;  // dQ of both warpgroups

  static constexpr int K = 0, V = K + C::KEY_STAGES * K_BYTES, Q = V + C::KEY_STAGES * V_BYTES, DOUT = Q + C::NUM_STAGES * Q_BYTES;
  static constexpr int EXCHANGE = DOUT + C::NUM_STAGES * DOUT_BYTES, STAGING = EXCHANGE + 2 * EXCHANGE_BYTES;
  static constexpr int LSE = STAGING + STAGING_BYTES, DELTA = LSE + C::NUM_STAGES * STATISTIC_BYTES;
  static constexpr int BARRIERS = DELTA + C::NUM_STAGES * STATISTIC_BYTES;

  static constexpr int K_FULL = 0, V_FULL = K_FULL + C::KEY_STAGES, KEYS_EMPTY = V_FULL + C::KEY_STAGES;
  static constexpr int Q_FULL = KEYS_EMPTY + C::KEY_STAGES, Q_EMPTY = Q_FULL + C::NUM_STAGES;
  static constexpr int DOUT_FULL = Q_EMPTY + C::NUM_STAGES, DOUT_EMPTY = DOUT_FULL + C::NUM_STAGES;
  static constexpr int EXCHANGE_FULL = DOUT_EMPTY + C::NUM_STAGES, EXCHANGE_EMPTY = EXCHANGE_FULL + 2;
  static constexpr int TILE_FULL = EXCHANGE_EMPTY + 2, TILE_EMPTY = TILE_FULL + 2, TILE_WORDS = TILE_EMPTY + 2;
  static constexpr int STAGED_FULL = TILE_WORDS + 1, STAGED_EMPTY = STAGED_FULL + 4, END = STAGED_FULL + (C::ORDERED ? 6 : 0);
  static_assert(BARRIERS + 8 * END == C::KEY_SHARED_BYTES, "the layout of shared memory is the formula of the search space");

  static constexpr int SCORES = C::BLOCK_Q / 2, WORDS = C::BLOCK_Q / 4;  // registers
  static constexpr int K_SUMS = product_columns(C::HEAD_DIM) / 2, V_SUMS = product_columns(C::HEAD_DIM_V) / 2;
  using Scores = RowsByRows<C::HEAD_DIM, C::KEY_ROWS, C::BLOCK_Q>;     // S^T = K Q^T
  using Weights = RowsByRows<C::HEAD_DIM_V, C::KEY_ROWS, C::BLOCK_Q>;  // dP^T = V dO^T
  using KeySums = RegistersByColumns<C::BLOCK_Q, C::HEAD_DIM>;         // dK += dS^T Q
  using ValueSums = RegistersByColumns<C::BLOCK_Q, C::HEAD_DIM_V>;     // dV += P^T dO

  FG_DEVICE static u32 barrier(u32 shared, int index) { return shared + static_cast<u32>(BARRIERS + 8 * index); }
  FG_DEVICE static TileQueue queue(u32 shared) {
    return {barrier(shared, TILE_WORDS), barrier(shared, TILE_FULL), barrier(shared, TILE_EMPTY)};
  }
  FG_DEVICE static void initialise(u32 shared) {
    constexpr int WARPS = 8, EXCHANGING_WARPS = C::FUSED ? 8 : 4;
    for (int stage = 0; stage < C::KEY_STAGES; ++stage) {
      mbarrier_init(barrier(shared, K_FULL + stage), 1);
      mbarrier_init(barrier(shared, V_FULL + stage), 1);
      mbarrier_init(barrier(shared, KEYS_EMPTY + stage), WARPS);
    }
    for (int stage = 0; stage < C::NUM_STAGES; ++stage) {
      mbarrier_init(barrier(shared, Q_FULL + stage), 1);
      mbarrier_init(barrier(shared, Q_EMPTY + stage), WARPS);
      mbarrier_init(barrier(shared, DOUT_FULL + stage), 1);
      mbarrier_init(barrier(shared, DOUT_EMPTY + stage), WARPS);
    }
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(barrier(shared, EXCHANGE_FULL + buffer), EXCHANGING_WARPS);
      mbarrier_init(barrier(shared, EXCHANGE_EMPTY + buffer), EXCHANGING_WARPS);
    }
    if constexpr (C::ORDERED) {
      for (int i = 0; i < 4; ++i) mbarrier_init(barrier(shared, STAGED_FULL + i), WARPS / 2);
      for (int half = 0; half < 2; ++half) mbarrier_init(barrier(shared, STAGED_EMPTY + half), 1);
    }
    TileQueue::initialise(barrier(shared, TILE_FULL), barrier(shared, TILE_EMPTY),
                          TileQueue::READERS + (C::ORDERED           ? 2
                                                : C::CLEAR_AHEAD > 0 ? 1
                                                                     : 0));
    fence_mbarrier_init();
  }
};

// The blocks of a tile of keys in the order of work: head after head of the group, in each the same blocks, from `start` round to it. When
// tiles of keys take turns at a block, they go from the last block to the first: the next tile reaches the last block that both need just
// when this one has left it, whatever the mask.
template <class C>
struct BlockWalk {
  int first, end, start, block, left;

  FG_DEVICE BlockWalk(const ForwardParams& forward, int key) {
    const BlockRange<C> range(forward, key, C::KEY_ROWS);
    first = range.first;
    end = range.first + range.count;
    start = first;
    // CTAs that sum into the same blocks of dq at the same time would wait for each other.
    if constexpr (C::ORDERED) start = end - 1;
    if constexpr (C::ROTATE) start += static_cast<int>(static_cast<i64>(key) * range.count / maximum(1, forward.seqlen_kv));
    block = start;
    left = range.count * (forward.heads_q / forward.heads_kv);
  }
  // True when the next block belongs to the next head.
  FG_DEVICE bool advance() {
    --left;
    if constexpr (C::ORDERED) {
      if (block-- == first) block = end - 1;
    } else {
      ++block;
      if (block == end) block = first;
    }
    return block == start;
  }
};

template <class C>
struct BlockProducer {
  using Shape = KeyShape<C>;
  static constexpr bool WAITS = C::ORDERED || C::CLEAR_AHEAD > 0;  // for tiles with lower numbers
  const MappedBackwardParams& params;
  const u32 shared;

  FG_DEVICE void load_block(RingSlot<C::NUM_STAGES> at, const RowStatistics& statistics, int batch, int head, int block) const {
    const i64 first = first_statistic(params.problem.forward, batch, head) + block * C::BLOCK_Q;
    const u32 q_full = Shape::barrier(shared, Shape::Q_FULL + at.stage), dout_full = Shape::barrier(shared, Shape::DOUT_FULL + at.stage);
    const u32 statistic = static_cast<u32>(at.stage * Shape::STATISTIC_BYTES);
    mbarrier_wait(Shape::barrier(shared, Shape::Q_EMPTY + at.stage), at.round ^ 1);
    mbarrier_expect(q_full, Shape::Q_BYTES + Shape::STATISTIC_BYTES);
    load_tile<C::BLOCK_Q, C::HEAD_DIM>(shared + Shape::Q + at.stage * Shape::Q_BYTES, &params.q, q_full, block * C::BLOCK_Q, head, batch);
    bulk_load(shared + Shape::LSE + statistic, statistics.lse + first, Shape::STATISTIC_BYTES, q_full);
    mbarrier_wait(Shape::barrier(shared, Shape::DOUT_EMPTY + at.stage), at.round ^ 1);
    mbarrier_expect(dout_full, Shape::DOUT_BYTES + Shape::STATISTIC_BYTES);
    load_tile<C::BLOCK_Q, C::HEAD_DIM_V>(shared + Shape::DOUT + at.stage * Shape::DOUT_BYTES, &params.dout, dout_full, block * C::BLOCK_Q,
                                         head, batch);
    bulk_load(shared + Shape::DELTA + statistic, statistics.delta + first, Shape::STATISTIC_BYTES, dout_full);
  }

  FG_DEVICE int draw(int tiles) const {
    return WAITS ? TileQueue::draw_all(params.counters, tiles) : TileQueue::draw(params.counters, tiles);
  }
  FG_DEVICE void run() const {
    const ForwardParams& forward = params.problem.forward;
    const RowStatistics statistics(forward);
    const int tiles = KeyTile<C>::list(forward).tiles, group = forward.heads_q / forward.heads_kv;
    TileQueue queue = Shape::queue(shared);
    RingSlot<C::NUM_STAGES> at;
    int tile = WAITS ? TileQueue::draw_all(params.counters, tiles) : static_cast<int>(block_index());
    FG_NO_UNROLL
    while (true) {
      if (C::CLEAR_AHEAD > 0 && tile != NO_TILE) SumSections<C>(forward).await(tile);
      queue.publish(tile);
      if (tile == NO_TILE) break;
      const KeyTile<C> place = KeyTile<C>::of(forward, tile);
      if constexpr (!C::ORDERED) tile = draw(tiles);
      BlockWalk<C> walk(forward, place.key);
      int head = place.head_kv * group;
      FG_NO_UNROLL
      while (walk.left > 0) {
        load_block(at, statistics, place.batch, head, walk.block);
        at = at.next();
        if (walk.advance()) ++head;
      }
      // Tiles wait for those before them, so the CTA that is done first takes the next.
      if constexpr (C::ORDERED) tile = draw(tiles);
    }
  }
};

template <class C>
FG_DEVICE void produce_keys(const MappedBackwardParams& params, u32 shared) {
  using Shape = KeyShape<C>;
  const ForwardParams& forward = params.problem.forward;
  TileQueue queue = Shape::queue(shared);
  RingSlot<C::KEY_STAGES> at;
  FG_NO_UNROLL
  for (int tile = queue.read_alone(); tile != NO_TILE; tile = queue.read_alone()) {
    const KeyTile<C> place = KeyTile<C>::of(forward, tile);
    if (BlockRange<C>(forward, place.key, C::KEY_ROWS).count == 0) continue;
    const u32 k_full = Shape::barrier(shared, Shape::K_FULL + at.stage), v_full = Shape::barrier(shared, Shape::V_FULL + at.stage);
    mbarrier_wait(Shape::barrier(shared, Shape::KEYS_EMPTY + at.stage), at.round ^ 1);
    mbarrier_expect(k_full, Shape::K_BYTES);
    load_tile<C::KEY_ROWS, C::HEAD_DIM>(shared + Shape::K + at.stage * Shape::K_BYTES, &params.k, k_full, place.key, place.head_kv,
                                        place.batch);
    mbarrier_expect(v_full, Shape::V_BYTES);
    load_tile<C::KEY_ROWS, C::HEAD_DIM_V>(shared + Shape::V + at.stage * Shape::V_BYTES, &params.v, v_full, place.key, place.head_kv,
                                          place.batch);
    at = at.next();
  }
}

// Which of the query rows see the two keys of a lane, eight apart.
template <class C>
struct SeeingLimits {
  int first[2], last[2];

  FG_DEVICE SeeingLimits(const ForwardParams& forward, int key) {
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      const SeeingRows rows = SeeingRows::of<C>(forward, key + 8 * r, 1);
      first[r] = key + 8 * r < forward.seqlen_kv ? rows.first : forward.seqlen_q + C::BLOCK_Q;
      last[r] = rows.last - 1;
    }
  }
};

// Whether some pair of 64 keys from `key` on and a block of query rows from `row` on must be hidden. Rows past the last hide themselves.
template <class C>
FG_DEVICE bool block_needs_mask(const ForwardParams& forward, int key, int row) {
  bool needs = key + PRODUCT_ROWS > forward.seqlen_kv;
  if constexpr (C::MASK == MASK_CAUSAL) needs |= key + PRODUCT_ROWS - 1 > row + forward.diagonal;
  if constexpr (C::MASK == MASK_WINDOW) {
    needs |= key + PRODUCT_ROWS - 1 > row + forward.diagonal + forward.window_right;
    needs |= key < row + C::BLOCK_Q - 1 + forward.diagonal - forward.window_left;
  }
  return needs;
}

// `scores` of keys by rows: hides what no pair may see. `key` is the first of the lane's two keys, `row` the block's first row.
template <class C, int SCORES>
FG_DEVICE void hide_keys(float (&scores)[SCORES], const ForwardParams& forward, int key, int row, int lane) {
  const SeeingLimits<C> seen(forward, key);
  const int column = row + lane % 4 * 2;
  FG_UNROLL
  for (int i = 0; i < SCORES; ++i) {
    const int r = row_of(i), at = column + column_of(i);
    if (at < seen.first[r] || (C::MASK == MASK_WINDOW && at > seen.last[r])) scores[i] = -infinity();
  }
}

// The four values that a lane needs of sixteen query rows: those of columns 0, 1, 8 and 9 from its first one.
struct FourStatistics {
  float value[4];

  FG_DEVICE float of(int i) const { return value[i / 4 % 2 * 2 + i % 2]; }  // for register i of an accumulator
};
FG_DEVICE FourStatistics statistics_of(const Vector16& vector) {
  return {
      {float_from_bits(vector.word[0]), float_from_bits(vector.word[1]), float_from_bits(vector.word[2]), float_from_bits(vector.word[3])}};
}

}  // namespace fg
