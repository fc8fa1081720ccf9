// What both orders of the fused pass share: operands, turns, the exchange of dS between the warpgroups, and where dQ is summed.
#pragma once
#include "backward_keys.cuh"

namespace fg {

template <class C>
struct FusedBase {
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  static constexpr int TURN = 1;                                                    // named barriers, one per warpgroup
  static constexpr int HALF = PRODUCT_ROWS * C::DQ_COLUMNS, WARP_SHARE = HALF / 4;  // floats of dQ of a block
  // A warpgroup's half of dQ: 64 rows or half the columns; transposed, 64 columns or, of narrow heads, half the rows.
  static constexpr bool WIDE = chunks_of(C::HEAD_DIM) == 2, BY_ROWS = C::TURNED ? !WIDE : C::BLOCK_Q == 2 * PRODUCT_ROWS;
  static_assert(chunks_of(C::HEAD_DIM) <= 2 && (C::TURNED || C::BLOCK_Q % PRODUCT_ROWS == 0), "products have 64 rows");
  static_assert(2 * C::DQ_COLUMNS * PRODUCT_ROWS == C::BLOCK_Q * operand_columns(C::HEAD_DIM), "two halves make a whole");
  static_assert(Shape::EXCHANGE_BYTES <= Shape::K_BYTES + (C::KEY_STAGES == 1 ? Shape::V_BYTES : 0),
                "the first dQ reads keys, not what is being loaded");
  static constexpr int DQ_REGISTERS = C::DQ_COLUMNS / 2;
  using QuerySums = RowsByColumns<C::KEY_ROWS, C::BLOCK_Q, C::DQ_COLUMNS>;
  using TurnedQuerySums = ColumnsByRows<C::KEY_ROWS, C::BLOCK_Q, C::DQ_COLUMNS>;
  using SharedKeySums = ColumnsByColumns<C::BLOCK_Q, C::HEAD_DIM>;

  const BackwardParams& params;
  const u32 shared;
  const int index, warp, lane;  // of the warpgroup among the consumers, of the warp in the warpgroup, in the warp
  RingSlot<C::NUM_STAGES> at;   // of Q and dO
  u32 exchanges = 0;            // of dS so far: the buffers take turns
  RingSlot<C::KEY_STAGES> keys;

  FG_DEVICE u32 barrier(int which) const { return Shape::barrier(shared, which); }
  // The present tiles of keys and values, and this warpgroup's rows of them.
  FG_DEVICE u32 k_tile() const { return shared + static_cast<u32>(Shape::K + keys.stage * Shape::K_BYTES); }
  FG_DEVICE u32 v_tile() const { return shared + static_cast<u32>(Shape::V + keys.stage * Shape::V_BYTES); }
  FG_DEVICE u32 own_rows(u32 tile) const { return row_operand(tile + static_cast<u32>(index * PRODUCT_ROWS * LINE_BYTES)); }
  FG_DEVICE u32 q_step(int stage) const { return static_cast<u32>(stage) * descriptor_step(Shape::Q_BYTES); }
  FG_DEVICE u32 dout_step(int stage) const { return static_cast<u32>(stage) * descriptor_step(Shape::DOUT_BYTES); }
  FG_DEVICE u32 q_rows(int stage) const { return row_operand(shared + Shape::Q) + q_step(stage); }
  FG_DEVICE u32 q_columns(int stage) const { return column_operand(shared + Shape::Q, C::BLOCK_Q) + q_step(stage); }
  FG_DEVICE u32 dout_rows(int stage) const { return row_operand(shared + Shape::DOUT) + dout_step(stage); }
  FG_DEVICE u32 dout_columns(int stage) const { return column_operand(shared + Shape::DOUT, C::BLOCK_Q) + dout_step(stage); }
  // This warp's rows of a tile of keys, as the left operand of STEPS steps.
  template <int STEPS>
  FG_DEVICE void load_rows(u32 (&rows)[4 * STEPS], u32 tile) const {
    FG_UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const int row = index * PRODUCT_ROWS + warp * 16 + lane % 16, column = step * PRODUCT_DEPTH + lane / 16 * 8;
      u32 fragment[4];
      load_matrix_x4(fragment, tile + operand_offset(C::KEY_ROWS, row, column));
      FG_UNROLL
      for (int i = 0; i < 4; ++i) rows[4 * step + i] = fragment[i];
    }
  }
  // The operands of this warpgroup's half of dQ.
  FG_DEVICE u32 exchanged_rows(u32 exchange) const {
    const int first = BY_ROWS ? index * C::BLOCK_Q / 2 * LINE_BYTES : 0;
    return row_operand(shared + static_cast<u32>(Shape::EXCHANGE + first)) + buffer_of(exchange) * descriptor_step(Shape::EXCHANGE_BYTES);
  }
  // dS^T of its own keys.
  FG_DEVICE u32 own_exchanged() const {
    const int first = Shape::EXCHANGE + index * chunk_bytes(C::BLOCK_Q);
    return column_operand(shared + static_cast<u32>(first), C::BLOCK_Q) + buffer_of(exchanges) * descriptor_step(Shape::EXCHANGE_BYTES);
  }
  FG_DEVICE u32 key_columns() const {
    const int half = WIDE ? chunk_bytes(C::KEY_ROWS) : 2 * C::DQ_COLUMNS;  // a chunk, or half a line
    return column_operand(k_tile() + static_cast<u32>(BY_ROWS ? 0 : index * half), C::KEY_ROWS);
  }

  // This warpgroup's half of dQ of a block, from an exchange.
  template <int REGISTERS>
  FG_DEVICE void sum_queries(float (&sums)[REGISTERS], u32 rows) const {
    if constexpr (C::TURNED) {
      restart_product<TurnedQuerySums, Element>(sums, key_columns(), rows);
    } else {
      restart_product<QuerySums, Element>(sums, rows, key_columns());
    }
  }

  // Turns of the tensor cores go back and forth, so that the exponentials of the two warpgroups do not coincide.
  FG_DEVICE void first_turn() const {
    if (C::PING_PONG && index == 1) barrier_arrive(TURN, 256);
  }
  FG_DEVICE void take_turn() const {
    if constexpr (C::PING_PONG) barrier_sync(TURN + index, 256);
  }
  // As take_turn; afterwards what all warps of the warpgroup have exchanged can be read by its products.
  FG_DEVICE void meet_and_take_turn() const {
    if constexpr (C::KEYS_FROM_SHARED && !C::PING_PONG) barrier_sync(TURN + index, 128);
    take_turn();
  }
  FG_DEVICE void pass_turn() const {
    if constexpr (C::PING_PONG) barrier_arrive(TURN + 1 - index, 256);
  }

  FG_DEVICE void wait_q(RingSlot<C::NUM_STAGES> slot) const { mbarrier_wait(barrier(Shape::Q_FULL + slot.stage), slot.round); }
  FG_DEVICE void wait_dout(RingSlot<C::NUM_STAGES> slot) const { mbarrier_wait(barrier(Shape::DOUT_FULL + slot.stage), slot.round); }
  // By the number of the exchange.
  FG_DEVICE static u32 buffer_of(u32 exchange) { return exchange % 2; }
  FG_DEVICE u32 exchange_full(u32 exchange) const { return barrier(Shape::EXCHANGE_FULL) + 8 * buffer_of(exchange); }
  FG_DEVICE u32 exchange_empty(u32 exchange) const { return barrier(Shape::EXCHANGE_EMPTY) + 8 * buffer_of(exchange); }
  FG_DEVICE void release_keys() {
    warp_release(barrier(Shape::KEYS_EMPTY + keys.stage));
    keys = keys.next();
  }
  FG_DEVICE void wait_exchanged(u32 exchange) const { mbarrier_wait(exchange_full(exchange), exchange / 2 % 2); }

  using Statistics = Vector16[C::BLOCK_Q / 16];
  FG_DEVICE void load_statistics(Statistics& statistics, int base, int stage) const {
    u32 address = shared + static_cast<u32>(base + stage * Shape::STATISTIC_BYTES + lane % 4 * 16);
    pin_address(address);
    FG_UNROLL
    for (int i = 0; i < C::BLOCK_Q / 16; ++i) statistics[i] = load_shared_freely(address + static_cast<u32>(i * 64));
  }

  // S^T becomes P^T.
  FG_DEVICE void exponentiate(float (&scores)[Shape::SCORES], const Statistics& lse, int key, int row) const {
    const ForwardParams& forward = params.forward;
    if (block_needs_mask<C>(forward, key, row)) hide_keys<C>(scores, forward, key + warp * 16 + lane / 4, row, lane);
    FG_UNROLL
    for (int i = 0; i < Shape::SCORES; ++i)
      scores[i] = exp2_approx(fused_multiply_add(scores[i], forward.scale_log2, -statistics_of(lse[i / 8]).of(i)));
  }
  FG_DEVICE void pack(u32 (&words)[Shape::WORDS], const float (&values)[Shape::SCORES]) const {
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) words[i] = pack_pair(values[2 * i], values[2 * i + 1], Element{});
  }

  // Whether no row of the first block sees this warpgroup's keys, as it is for half of the keys on the diagonal of a causal mask.
  FG_DEVICE bool passes_by(int key, int row, int blocks) const {
    return C::MASKED && !C::ORDERED && blocks > 1 && SeeingRows::of<C>(params.forward, key, PRODUCT_ROWS).first >= row + C::BLOCK_Q;
  }
  // Its part of a block that it passes by: dS is 0.
  FG_DEVICE void pass_by() {
    for (int i = 0; i < 2; ++i) {  // the turns of `advance`
      take_turn();
      pass_turn();
    }
    u32 zeros[Shape::WORDS];
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) zeros[i] = 0;
    exchange(zeros);
    warp_release(barrier(Shape::DOUT_EMPTY + at.stage));
    at = at.next();
    ++exchanges;
  }

  // dS^T of this warpgroup's keys, turned, into the present buffer: rows of queries, chunks of 64 keys.
  FG_DEVICE void exchange(const u32 (&gradients)[Shape::WORDS]) const {
    mbarrier_wait(exchange_empty(exchanges), exchanges / 2 % 2 ^ 1);
    const u32 tile = shared + Shape::EXCHANGE + buffer_of(exchanges) * Shape::EXCHANGE_BYTES;
    const int row = lane / 16 * 8 + lane % 8, column = index * PRODUCT_ROWS + warp * 16 + lane / 8 % 2 * 8;
    const u32 target = tile + operand_offset(C::BLOCK_Q, row, column);
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; i += 4) {
      const u32 fragment[4] = {gradients[i], gradients[i + 1], gradients[i + 2], gradients[i + 3]};
      store_matrix_x4_transposed(target + static_cast<u32>(i / 4 * 16 * LINE_BYTES), fragment);
    }
    fence_proxy_async();
    warp_release(exchange_full(exchanges));
  }

  FG_DEVICE void fence_and_add_staged(int block, u32 exchange) const {
    if constexpr (C::DIRECT) return;
    fence_proxy_async();
    warp_sync();
    add_staged(block, exchange);
  }

  FG_DEVICE u32 staging() const { return shared + static_cast<u32>(Shape::STAGING + (index * 4 + warp) * WARP_SHARE * 4); }
  // Where this warp's share of dQ of a block, counted over all heads, is summed.
  FG_DEVICE float* share_of(int block) const {
    return RowStatistics(params.forward).sums + (static_cast<i64>(block) * 2 + index) * HALF + warp * WARP_SHARE;
  }
  // This warp's share of dQ of a block, by the number of its exchange and in the order of registers: straight to the sums, or to shared
  // memory as soon as the last one has been read there.
  template <int REGISTERS>
  FG_DEVICE void stage(const float (&sums)[REGISTERS], int block, u32 exchange) const {
    if constexpr (C::DIRECT) {
      float* target = share_of(block) + lane * 4;
      FG_UNROLL
      for (int i = 0; i < DQ_REGISTERS; i += 4) add_global(target + i / 4 * 128, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
      return;
    }
    if constexpr (C::ORDERED) {
      mbarrier_wait(barrier(Shape::STAGED_EMPTY + index), exchange % 2 ^ 1);
    } else {
      if (lane == 0) bulk_wait_read<0>();
      warp_sync();
    }
    FG_UNROLL
    for (int i = 0; i < DQ_REGISTERS; i += 4) {
      const Vector16 vector = {{float_bits(sums[i]), float_bits(sums[i + 1]), float_bits(sums[i + 2]), float_bits(sums[i + 3])}};
      store_shared(staging() + static_cast<u32>(i / 4 * 512 + lane * 16), vector);
    }
  }
  // Of a half of dQ and an exchange; the two threads that add in turn have barriers of their own.
  FG_DEVICE static u32 staged_full(u32 shared, int half, u32 exchange) {
    return Shape::barrier(shared, Shape::STAGED_FULL + 2 * half) + 8 * (exchange % 2);
  }
  // And from there on to the sums, by this warp or in turn; after a fence by every lane and a meeting of the warp.
  FG_DEVICE void add_staged(int block, u32 exchange) const {
    if constexpr (C::ORDERED) {
      if (block >= 0) warp_release(staged_full(shared, index, exchange));
      return;
    }
    if (!C::DIRECT && block >= 0 && lane == 0) {
      bulk_add(share_of(block), staging(), WARP_SHARE * 4);
      bulk_commit();
    }
  }
};

// The blocks of a tile, and where their dQ is summed.
template <class C>
struct SummedBlocks {
  const ForwardParams& forward;
  BlockWalk<C> walk;
  int head;  // blocks of all heads before

  FG_DEVICE SummedBlocks(const ForwardParams& params, const KeyTile<C>& place) : forward(params), walk(params, place.key) {
    head = (place.batch * forward.heads_q + place.head_kv * (forward.heads_q / forward.heads_kv)) * blocks();
  }
  FG_DEVICE int blocks() const { return ceil_div(forward.seqlen_q, C::BLOCK_Q); }
  FG_DEVICE int row() const { return walk.block * C::BLOCK_Q; }
  FG_DEVICE int number() const { return head + walk.block; }
  FG_DEVICE void advance() {
    if (walk.advance()) head += blocks();
  }
};

}  // namespace fg
