// dK, dV and dQ in one loop: a CTA holds 128 keys, 64 per warpgroup, and adds its share of dQ to float32 sums in global memory.
//
// S and dP are computed transposed, keys by rows, so that P and dS already lie in registers as dV and dK need them. dS of both warpgroups
// goes to shared memory, from where each computes one half of dQ, a block later: by then the other's dS has long been there. Each warp adds
// its 16 rows of dQ by one bulk copy.
#pragma once
#include "backward_keys.cuh"

namespace fg {

enum Scheme : int {
  SCHEME_EXACT = 0,   // P stays float32 till dS is computed; dP and dQ take turns in one array of registers
  SCHEME_SERIAL = 2,  // P stays float32; every array is used up before the next product needs its registers
  SCHEME_PACKED = 1,  // P is read again from its rounded form, since dP takes the registers of S
};

template <class C>
struct FusedBase {
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  static constexpr int TURN = 1;                                                    // named barriers, one per warpgroup
  static constexpr int HALF = PRODUCT_ROWS * C::DQ_COLUMNS, WARP_SHARE = HALF / 4;  // floats of dQ of a block
  // A warpgroup's half of dQ: 64 rows, or half the columns, or 64 columns transposed.
  static constexpr bool BY_ROWS = !C::TURNED && C::BLOCK_Q == 2 * PRODUCT_ROWS;
  static_assert(C::TURNED ? C::DQ_COLUMNS == C::BLOCK_Q && chunks_of(C::HEAD_DIM) == 2
                          : C::DQ_COLUMNS * (BY_ROWS ? 1 : 2) == operand_columns(C::HEAD_DIM) && C::BLOCK_Q % PRODUCT_ROWS == 0,
                "halves of dQ");
  static_assert(Shape::EXCHANGE_BYTES <= Shape::K_BYTES + (C::KEY_STAGES == 1 ? Shape::V_BYTES : 0),
                "the first dQ reads keys, not what is being loaded");
  static constexpr int DQ_REGISTERS = C::DQ_COLUMNS / 2;
  using QuerySums = RowsByColumns<C::KEY_ROWS, C::BLOCK_Q, C::DQ_COLUMNS>;
  using TurnedQuerySums = ColumnsByRows<C::KEY_ROWS, C::BLOCK_Q>;
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
  // The operands of this warpgroup's half of dQ.
  FG_DEVICE u32 exchanged_rows(u32 exchange) const {
    const int first = BY_ROWS ? index * PRODUCT_ROWS * LINE_BYTES : 0;
    return row_operand(shared + static_cast<u32>(Shape::EXCHANGE + first)) + buffer_of(exchange) * descriptor_step(Shape::EXCHANGE_BYTES);
  }
  // dS^T of its own keys.
  FG_DEVICE u32 own_exchanged() const {
    const int first = Shape::EXCHANGE + index * chunk_bytes(C::BLOCK_Q);
    return column_operand(shared + static_cast<u32>(first), C::BLOCK_Q) + buffer_of(exchanges) * descriptor_step(Shape::EXCHANGE_BYTES);
  }
  FG_DEVICE u32 key_columns() const {
    const int half = chunks_of(C::HEAD_DIM) == 2 ? chunk_bytes(C::KEY_ROWS) : 2 * C::DQ_COLUMNS;  // a chunk, or half a line
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
    return C::MASKED && blocks > 1 && SeeingRows::of<C>(params.forward, key, PRODUCT_ROWS).first >= row + C::BLOCK_Q;
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

  FG_DEVICE void fence_and_add_staged(int block) const {
    if constexpr (C::DIRECT) return;
    fence_proxy_async();
    warp_sync();
    add_staged(block);
  }

  FG_DEVICE u32 staging() const { return shared + static_cast<u32>(Shape::STAGING + (index * 4 + warp) * WARP_SHARE * 4); }
  // Where this warp's share of dQ of a block, counted over all heads, is summed.
  FG_DEVICE float* share_of(int block) const {
    return RowStatistics(params.forward).sums + (static_cast<i64>(block) * 2 + index) * HALF + warp * WARP_SHARE;
  }
  // This warp's share of dQ of a block, in the order of registers: straight to the sums, or to shared memory as soon as the last one has
  // been read there.
  template <int REGISTERS>
  FG_DEVICE void stage(const float (&sums)[REGISTERS], int block) const {
    if constexpr (C::DIRECT) {
      float* target = share_of(block) + lane * 4;
      FG_UNROLL
      for (int i = 0; i < DQ_REGISTERS; i += 4) add_global(target + i / 4 * 128, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
      return;
    }
    if (lane == 0) bulk_wait_read<0>();
    warp_sync();
    FG_UNROLL
    for (int i = 0; i < DQ_REGISTERS; i += 4) {
      const Vector16 vector = {{float_bits(sums[i]), float_bits(sums[i + 1]), float_bits(sums[i + 2]), float_bits(sums[i + 3])}};
      store_shared(staging() + static_cast<u32>(i / 4 * 512 + lane * 16), vector);
    }
  }
  // And from there on to the sums; after a fence by every lane and a meeting of the warp.
  FG_DEVICE void add_staged(int block) const {
    if (!C::DIRECT && block >= 0 && lane == 0) {
      bulk_add(share_of(block), staging(), WARP_SHARE * 4);
      bulk_commit();
    }
  }
};

// The blocks of a tile, and where their dQ is summed.
template <class C>
struct SummedBlocks {
  BlockWalk<C> walk;
  int blocks, head;  // blocks of a head; of all heads before

  FG_DEVICE SummedBlocks(const ForwardParams& forward, const KeyTile<C>& place)
      : walk(forward, place.key), blocks(ceil_div(forward.seqlen_q, C::BLOCK_Q)) {
    head = (place.batch * forward.heads_q + place.head_kv * (forward.heads_q / forward.heads_kv)) * blocks;
  }
  FG_DEVICE int row() const { return walk.block * C::BLOCK_Q; }
  FG_DEVICE int number() const { return head + walk.block; }
  FG_DEVICE void advance() {
    if (walk.advance()) head += blocks;
  }
};

// At every point at most dK, dV, S or P, dP or dQ, and one packed array are alive.
template <class C>
struct ExactFused : FusedBase<C> {
  using Base = FusedBase<C>;
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  static constexpr int SHARED_REGISTERS = maximum(Shape::SCORES, Base::DQ_REGISTERS);
  static constexpr bool SHARES = C::DQ_COLUMNS == SWIZZLE_COLUMNS;  // dP and dQ; half as many columns of dQ have room of their own
  float dk[Shape::K_SUMS], dv[Shape::V_SUMS], scores[Shape::SCORES], weights[SHARED_REGISTERS];  // S, then P; dP, then dQ of the last block
  float narrow[Base::DQ_REGISTERS];                                                              // dQ, unless it shares
  u32 packed[Shape::WORDS];                                                                      // P for dV, dS for dK
  static constexpr int K_STEPS = product_steps(C::HEAD_DIM), V_STEPS = product_steps(C::HEAD_DIM_V);
  u32 own_k[C::KEYS_IN_REGISTERS ? 4 * K_STEPS : 1], own_v[C::KEYS_IN_REGISTERS ? 4 * V_STEPS : 1];  // this warp's rows of K and V
  typename Base::Statistics statistics;                                                              // lse, then delta

  // dS, packed, to registers and to the exchange; dQ of `staged`, which an older block has left in shared memory, goes behind the same
  // fence.
  FG_DEVICE void differentiate(int staged) {
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) {
      const FourStatistics delta = statistics_of(statistics[i / 4]);
      packed[i] = pack_pair(scores[2 * i] * (weights[2 * i] - delta.of(2 * i)),
                            scores[2 * i + 1] * (weights[2 * i + 1] - delta.of(2 * i + 1)), Element{});
    }
    this->exchange(packed);
    this->add_staged(staged);
    warp_release(this->barrier(Shape::DOUT_EMPTY + this->at.stage));
  }
  FG_DEVICE auto& dq() {
    if constexpr (SHARES) {
      return weights;
    } else {
      return narrow;
    }
  }
  FG_DEVICE void start_query_sums(u32 rows) { start_product<typename Base::QuerySums, Element>(dq(), rows, this->key_columns()); }
  template <int STEPS>
  FG_DEVICE void load_rows(u32 (&rows)[4 * STEPS], u32 tile) const {
    FG_UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const int row = this->index * PRODUCT_ROWS + this->warp * 16 + this->lane % 16, column = step * PRODUCT_DEPTH + this->lane / 16 * 8;
      u32 fragment[4];
      load_matrix_x4(fragment, tile + operand_offset(C::KEY_ROWS, row, column));
      FG_UNROLL
      for (int i = 0; i < 4; ++i) rows[4 * step + i] = fragment[i];
    }
  }
  FG_DEVICE void wait_keys() {
    mbarrier_wait(this->barrier(Shape::K_FULL + this->keys.stage), this->keys.round);
    if constexpr (C::KEYS_IN_REGISTERS) load_rows<K_STEPS>(own_k, this->k_tile());
  }
  FG_DEVICE void wait_values() {
    mbarrier_wait(this->barrier(Shape::V_FULL + this->keys.stage), this->keys.round);
    if constexpr (C::KEYS_IN_REGISTERS) load_rows<V_STEPS>(own_v, this->v_tile());
  }
  FG_DEVICE void start_scores(int stage) {
    if constexpr (C::KEYS_IN_REGISTERS) {
      start_product<RegistersByRows<C::HEAD_DIM, C::BLOCK_Q>, Element>(scores, own_k, this->q_rows(stage));
    } else {
      start_product<typename Shape::Scores, Element>(scores, this->own_rows(this->k_tile()), this->q_rows(stage));
    }
  }
  FG_DEVICE void start_weights() {
    if constexpr (C::KEYS_IN_REGISTERS) {
      using Product = RegistersByRows<C::HEAD_DIM_V, C::BLOCK_Q>;
      if constexpr (SHARES) {
        restart_product<Product, Element>(weights, own_v, this->dout_rows(this->at.stage));
      } else {
        start_product<Product, Element>(weights, own_v, this->dout_rows(this->at.stage));
      }
    } else if constexpr (SHARES) {
      restart_product<typename Shape::Weights, Element>(weights, this->own_rows(this->v_tile()), this->dout_rows(this->at.stage));
    } else {
      start_product<typename Shape::Weights, Element>(weights, this->own_rows(this->v_tile()), this->dout_rows(this->at.stage));
    }
  }
  FG_DEVICE void add_keys() {
    if constexpr (C::KEYS_FROM_SHARED) {
      add_shared_product<typename Base::SharedKeySums, Element>(dk, this->own_exchanged(), this->q_columns(this->at.stage));
    } else {
      add_product<typename Shape::KeySums, Element>(dk, packed, this->q_columns(this->at.stage));
    }
  }
  FG_DEVICE void add_values() { add_product<typename Shape::ValueSums, Element>(dv, packed, this->dout_columns(this->at.stage)); }

  FG_DEVICE void begin(int key, int row) {
    wait_keys();
    this->wait_q(this->at);
    this->take_turn();
    start_scores(this->at.stage);
    this->pass_turn();
    product_wait<0>(scores);
    this->load_statistics(statistics, Shape::LSE, this->at.stage);
    this->exponentiate(scores, statistics, key, row);
    this->pack(packed, scores);
    wait_values();
    this->wait_dout(this->at);
    this->take_turn();
    start_weights();
    add_values();
    this->pass_turn();
    this->load_statistics(statistics, Shape::DELTA, this->at.stage);
    product_wait<0>(weights, scores, packed);
  }

  // From dP of the present block to dP of the next, from `row` on; dQ of the last block, if there is one, is staged on the way.
  FG_DEVICE void advance(int key, int row, int last_block, int staged) {
    const RingSlot<C::NUM_STAGES> next = this->at.next();
    const u32 last = this->exchanges - 1;
    differentiate(staged);
    this->wait_q(next);
    if (last_block >= 0) this->wait_exchanged(last);
    this->meet_and_take_turn();
    this->load_statistics(statistics, Shape::LSE, next.stage);
    start_scores(next.stage);
    add_keys();
    // Without a last block the product reads keys, which are there, and its result is not used: no branch may surround a product.
    start_query_sums(last_block >= 0 ? this->exchanged_rows(last) : row_operand(this->k_tile()));
    this->pass_turn();
    product_wait<2>(scores);
    this->exponentiate(scores, statistics, key, row);
    if constexpr (C::PIN) finish_before(scores);
    if constexpr (C::KEYS_FROM_SHARED) {
      product_wait<1>(scores);
    } else {
      product_wait<1>(scores, packed);
    }
    warp_release(this->barrier(Shape::Q_EMPTY + this->at.stage));
    this->pack(packed, scores);
    this->at = next;
    this->wait_dout(next);
    this->take_turn();
    add_values();
    product_wait<1>(dq());
    if (last_block >= 0) {
      warp_release(this->exchange_empty(last));
      this->stage(dq(), last_block);
    }
    start_weights();
    this->pass_turn();
    this->load_statistics(statistics, Shape::DELTA, next.stage);
    product_wait<0>(weights, scores, packed);
    ++this->exchanges;
  }

  FG_DEVICE void end(int block, int last_block, int staged) {
    const u32 last = this->exchanges - 1;
    differentiate(staged);
    if (last_block >= 0) this->wait_exchanged(last);
    this->meet_and_take_turn();
    add_keys();
    start_query_sums(last_block >= 0 ? this->exchanged_rows(last) : row_operand(this->k_tile()));
    this->pass_turn();
    product_wait<0>(dq(), dk, dv);
    warp_release(this->barrier(Shape::Q_EMPTY + this->at.stage));
    this->at = this->at.next();
    if (last_block >= 0) {
      warp_release(this->exchange_empty(last));
      this->stage(dq(), last_block);
      this->fence_and_add_staged(last_block);
    }
    this->wait_exchanged(this->exchanges);
    this->take_turn();
    start_query_sums(this->exchanged_rows(this->exchanges));
    this->pass_turn();
    product_wait<0>(dq(), scores, packed);
    warp_release(this->exchange_empty(this->exchanges));
    this->release_keys();
    ++this->exchanges;
    this->stage(dq(), block);
    this->fence_and_add_staged(block);
  }

  FG_DEVICE void compute(const KeyTile<C>& place) {
    SummedBlocks<C> blocks(this->params.forward, place);
    const int key = place.key + this->index * PRODUCT_ROWS;
    FG_UNROLL
    for (int i = 0; i < Shape::K_SUMS; ++i) dk[i] = 0.0f;
    FG_UNROLL
    for (int i = 0; i < Shape::V_SUMS; ++i) dv[i] = 0.0f;
    if (blocks.walk.left == 0) return;
    int last_block = -1, staged = -1;
    if (this->passes_by(key, blocks.row(), blocks.walk.left)) {
      warp_release(this->barrier(Shape::Q_EMPTY + this->at.stage));
      this->pass_by();
      last_block = blocks.number();
      blocks.advance();
    }
    begin(key, blocks.row());
    FG_NO_UNROLL
    while (blocks.walk.left > 1) {
      const int block = blocks.number();
      blocks.advance();
      advance(key, blocks.row(), last_block, staged);
      staged = last_block;
      last_block = block;
    }
    end(blocks.number(), last_block, staged);
  }
};

// P is rounded before dS is computed, and dP takes the registers of S: that leaves room for blocks of 128 rows. Sums of dK and dQ are under
// way from one block to the next.
template <class C>
struct PackedFused : FusedBase<C> {
  using Base = FusedBase<C>;
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  float dk[Shape::K_SUMS], dv[Shape::V_SUMS], scores[Shape::SCORES], dq[Base::DQ_REGISTERS];  // S, then P, then dP
  u32 packed[Shape::WORDS], gradients[Shape::WORDS];                                          // P and dS
  typename Base::Statistics statistics;

  FG_DEVICE void start_scores(int stage) {
    start_product<typename Shape::Scores, Element>(scores, this->own_rows(this->k_tile()), this->q_rows(stage));
  }
  FG_DEVICE void start_query_sums(u32 rows) { start_product<typename Base::QuerySums, Element>(dq, rows, this->key_columns()); }
  FG_DEVICE void add_keys() {
    if constexpr (C::KEYS_FROM_SHARED) {
      add_shared_product<typename Base::SharedKeySums, Element>(dk, this->own_exchanged(), this->q_columns(this->at.stage));
    } else {
      add_product<typename Shape::KeySums, Element>(dk, gradients, this->q_columns(this->at.stage));
    }
  }
  FG_DEVICE void differentiate() {
    this->load_statistics(statistics, Shape::DELTA, this->at.stage);
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) {
      const FourStatistics delta = statistics_of(statistics[i / 4]);
      const float low = to_float(Element{static_cast<u16>(packed[i])}), high = to_float(Element{static_cast<u16>(packed[i] >> 16)});
      gradients[i] = pack_pair(low * (scores[2 * i] - delta.of(2 * i)), high * (scores[2 * i + 1] - delta.of(2 * i + 1)), Element{});
    }
    this->exchange(gradients);
  }
  FG_DEVICE void exponentiate_block(int key, int row, int stage) {
    this->load_statistics(statistics, Shape::LSE, stage);
    this->exponentiate(scores, statistics, key, row);
  }

  FG_DEVICE void begin(int key, int row) {
    mbarrier_wait(this->barrier(Shape::K_FULL + this->keys.stage), this->keys.round);
    this->wait_q(this->at);
    start_scores(this->at.stage);
    product_wait<0>(scores);
    mbarrier_wait(this->barrier(Shape::V_FULL + this->keys.stage), this->keys.round);
    exponentiate_block(key, row, this->at.stage);
  }

  // dV, dS and dK of the present block, dQ of the last one; P of the next block, unless this is the LAST. `older` is the block before the
  // last one, whose dQ was under way.
  template <bool LAST>
  FG_DEVICE void advance(int key, int row, int last_block, int older_block) {
    const RingSlot<C::NUM_STAGES> next = this->at.next();
    const u32 last = this->exchanges - 1;
    this->wait_dout(this->at);
    product_wait<0>(dq, scores, gradients);
    this->pack(packed, scores);
    if (last_block >= 0) warp_release(this->barrier(Shape::Q_EMPTY + (this->at.stage ? this->at.stage : C::NUM_STAGES) - 1));
    if (older_block >= 0) {
      warp_release(this->exchange_empty(last - 1));
      this->stage(dq, older_block);
    }
    this->take_turn();
    restart_product<typename Shape::Weights, Element>(scores, this->own_rows(this->v_tile()), this->dout_rows(this->at.stage));
    add_product<typename Shape::ValueSums, Element>(dv, packed, this->dout_columns(this->at.stage));
    this->pass_turn();
    product_wait<1>(scores);
    differentiate();
    this->add_staged(older_block);
    if constexpr (!LAST) this->wait_q(next);
    this->meet_and_take_turn();
    if constexpr (!LAST) start_scores(next.stage);
    add_keys();
    product_wait<LAST ? 1 : 2>(packed);
    warp_release(this->barrier(Shape::DOUT_EMPTY + this->at.stage));
    if (last_block >= 0) this->wait_exchanged(last);
    // Without a last block the product reads keys, which are there, and its result is not used: no branch may surround a product.
    start_query_sums(last_block >= 0 ? this->exchanged_rows(last) : row_operand(this->k_tile()));
    this->pass_turn();
    ++this->exchanges;
    if constexpr (!LAST) {
      product_wait<2>(scores);
      exponentiate_block(key, row, next.stage);
      this->at = next;
    }
  }

  FG_DEVICE void end(int block, int last_block) {
    const u32 present = this->exchanges - 1;
    product_wait<0>(dq, dk, dv);
    warp_release(this->barrier(Shape::Q_EMPTY + this->at.stage));
    this->at = this->at.next();
    if (last_block >= 0) {
      warp_release(this->exchange_empty(present - 1));
      this->stage(dq, last_block);
      this->fence_and_add_staged(last_block);
    }
    this->wait_exchanged(present);
    start_query_sums(this->exchanged_rows(present));
    product_wait<0>(dq, scores, packed);
    warp_release(this->exchange_empty(present));
    this->release_keys();
    this->stage(dq, block);
    this->fence_and_add_staged(block);
  }

  FG_DEVICE void compute(const KeyTile<C>& place) {
    SummedBlocks<C> blocks(this->params.forward, place);
    const int key = place.key + this->index * PRODUCT_ROWS;
    FG_UNROLL
    for (int i = 0; i < Shape::K_SUMS; ++i) dk[i] = 0.0f;
    FG_UNROLL
    for (int i = 0; i < Shape::V_SUMS; ++i) dv[i] = 0.0f;
    FG_UNROLL
    for (int i = 0; i < Base::DQ_REGISTERS; ++i) dq[i] = 0.0f;
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) gradients[i] = 0;
    if (blocks.walk.left == 0) return;
    int last_block = -1, older_block = -1;
    if (this->passes_by(key, blocks.row(), blocks.walk.left)) {
      this->pass_by();  // Q is given back by `advance`
      last_block = blocks.number();
      blocks.advance();
    }
    begin(key, blocks.row());
    FG_NO_UNROLL
    while (blocks.walk.left > 1) {
      const int block = blocks.number();
      blocks.advance();
      this->template advance<false>(key, blocks.row(), last_block, older_block);
      older_block = last_block;
      last_block = block;
    }
    this->template advance<true>(key, blocks.row(), last_block, older_block);
    end(blocks.number(), last_block);
  }
};

// Products and what is computed from them alternate: S beside the end of dK, exponentials beside dP, the exchange beside dV, staging beside
// dK. At every point at most dK, dV, two arrays of a block and one packed array are alive, so that blocks may be longer than 64 rows.
template <class C>
struct SerialFused : FusedBase<C> {
  using Base = FusedBase<C>;
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  static_assert(Base::DQ_REGISTERS <= Shape::SCORES, "dP and dQ share registers");
  // S of the next block is computed beside dK, if registers suffice: all that is under way between two drains counts.
  static constexpr bool OVERLAPS = C::BLOCK_Q <= 64 || C::KEYS_FROM_SHARED;
  float dk[Shape::K_SUMS], dv[Shape::V_SUMS], scores[Shape::SCORES], weights[Shape::SCORES];  // S, then P; dP, then dS, then dQ
  u32 packed[Shape::WORDS], gradients[Shape::WORDS];                                          // P and dS

  FG_DEVICE void start_scores(int stage) {
    start_product<typename Shape::Scores, Element>(scores, this->own_rows(this->k_tile()), this->q_rows(stage));
  }
  FG_DEVICE void start_weights() {
    start_product<typename Shape::Weights, Element>(weights, this->own_rows(this->v_tile()), this->dout_rows(this->at.stage));
  }
  FG_DEVICE void add_keys() {
    if constexpr (C::KEYS_FROM_SHARED) {
      add_shared_product<typename Base::SharedKeySums, Element>(dk, this->own_exchanged(), this->q_columns(this->at.stage));
    } else {
      add_product<typename Shape::KeySums, Element>(dk, gradients, this->q_columns(this->at.stage));
    }
  }
  FG_DEVICE void differentiate() {
    typename Base::Statistics statistics;
    this->load_statistics(statistics, Shape::DELTA, this->at.stage);
    FG_UNROLL
    for (int i = 0; i < Shape::SCORES; ++i) weights[i] = scores[i] * (weights[i] - statistics_of(statistics[i / 8]).of(i));
  }
  FG_DEVICE void exponentiate_block(int key, int row) {
    typename Base::Statistics statistics;
    this->load_statistics(statistics, Shape::LSE, this->at.stage);
    this->exponentiate(scores, statistics, key, row);
  }

  FG_DEVICE void begin() {
    mbarrier_wait(this->barrier(Shape::K_FULL + this->keys.stage), this->keys.round);
    this->wait_q(this->at);
    start_scores(this->at.stage);
    mbarrier_wait(this->barrier(Shape::V_FULL + this->keys.stage), this->keys.round);
  }

  // From S of the present block to S of the next, unless this is the LAST; dQ of the last block, if there is one, is staged on the way.
  template <bool LAST>
  FG_DEVICE void advance(int key, int row, int last_block, int staged) {
    const RingSlot<C::NUM_STAGES> next = this->at.next();
    const u32 last = this->exchanges - 1;
    this->wait_dout(this->at);
    product_wait<0>(scores);
    this->take_turn();
    start_weights();
    this->pass_turn();
    exponentiate_block(key, row);
    product_wait<0>(scores, weights);
    differentiate();
    this->pack(packed, scores);
    this->pack(gradients, weights);
    add_product<typename Shape::ValueSums, Element>(dv, packed, this->dout_columns(this->at.stage));
    this->exchange(gradients);
    this->add_staged(staged);
    if (last_block >= 0) this->wait_exchanged(last);
    this->meet_and_take_turn();
    // Without a last block the product reads keys, which are there, and its result is not used: no branch may surround a product.
    this->sum_queries(weights, last_block >= 0 ? this->exchanged_rows(last) : row_operand(this->k_tile()));
    add_keys();
    this->pass_turn();
    product_wait<2>(packed);
    warp_release(this->barrier(Shape::DOUT_EMPTY + this->at.stage));
    product_wait<1>(weights);
    if (last_block >= 0) {
      warp_release(this->exchange_empty(last));
      this->stage(weights, last_block);
    }
    if constexpr (LAST) {
      product_wait<0>(weights, dk, dv);
    } else if constexpr (OVERLAPS) {
      this->wait_q(next);
      start_scores(next.stage);
      product_wait<1>(gradients);
    } else {
      product_wait<0>(gradients);
      this->wait_q(next);
      start_scores(next.stage);
    }
    warp_release(this->barrier(Shape::Q_EMPTY + this->at.stage));
    this->at = next;
    ++this->exchanges;
  }

  FG_DEVICE void end(int block, int last_block) {
    const u32 present = this->exchanges - 1;
    this->fence_and_add_staged(last_block);
    this->wait_exchanged(present);
    this->sum_queries(weights, this->exchanged_rows(present));
    product_wait<0>(weights, scores, packed);
    warp_release(this->exchange_empty(present));
    this->release_keys();
    this->stage(weights, block);
    this->fence_and_add_staged(block);
  }

  FG_DEVICE void compute(const KeyTile<C>& place) {
    SummedBlocks<C> blocks(this->params.forward, place);
    const int key = place.key + this->index * PRODUCT_ROWS;
    FG_UNROLL
    for (int i = 0; i < Shape::K_SUMS; ++i) dk[i] = 0.0f;
    FG_UNROLL
    for (int i = 0; i < Shape::V_SUMS; ++i) dv[i] = 0.0f;
    if (blocks.walk.left == 0) return;
    int last_block = -1, staged = -1;
    if (this->passes_by(key, blocks.row(), blocks.walk.left)) {
      warp_release(this->barrier(Shape::Q_EMPTY + this->at.stage));
      this->pass_by();
      last_block = blocks.number();
      blocks.advance();
    }
    begin();
    FG_NO_UNROLL
    while (blocks.walk.left > 1) {
      const int block = blocks.number();
      this->template advance<false>(key, blocks.row(), last_block, staged);
      blocks.advance();
      staged = last_block;
      last_block = block;
    }
    this->template advance<true>(key, blocks.row(), last_block, staged);
    end(blocks.number(), last_block);
  }
};

template <class C>
FG_DEVICE void store_key_gradients(const FusedBase<C>& at, const KeyTile<C>& place, const float (&dk)[KeyShape<C>::K_SUMS],
                                   const float (&dv)[KeyShape<C>::V_SUMS]) {
  using Element = typename C::Element;
  const BackwardParams& params = at.params;
  const int key = place.key + at.index * PRODUCT_ROWS + at.warp * 16 + at.lane / 4, keys = params.forward.seqlen_kv;
  const GradientHead<Element> to_v(params.dv, params.dv_strides, place.batch, place.head_kv, keys);
  to_v.template store<C::HEAD_DIM_V>(dv, 1.0f, key, 0, C::HEAD_DIM_V, at.lane);
  const GradientHead<Element> to_k(params.dk, params.dk_strides, place.batch, place.head_kv, keys);
  to_k.template store<C::HEAD_DIM>(dk, params.scale, key, 0, C::HEAD_DIM, at.lane);
}

template <class C, class Consumer>
FG_DEVICE void run_fused(Consumer consumer) {
  const BackwardParams& params = consumer.params;
  TileQueue queue = KeyShape<C>::queue(consumer.shared);
  consumer.first_turn();
  FG_NO_UNROLL
  for (int tile = queue.read(); tile != NO_TILE; tile = queue.read()) {
    consumer.compute(KeyTile<C>::of(params.forward, tile));
    forget(tile);  // cheaper to find the place again than to keep it in registers
    store_key_gradients<C>(consumer, KeyTile<C>::of(params.forward, tile), consumer.dk, consumer.dv);
  }
  if (!C::DIRECT && consumer.lane == 0) bulk_wait<0>();
}

template <class C>
FG_DEVICE void fused_consumers(const BackwardParams& params, u32 shared, int warpgroup, int warp, int lane) {
  if constexpr (C::SCHEME == SCHEME_EXACT) {
    run_fused<C>(ExactFused<C>{{params, shared, warpgroup, warp, lane}});
  } else if constexpr (C::SCHEME == SCHEME_SERIAL) {
    run_fused<C>(SerialFused<C>{{params, shared, warpgroup, warp, lane}});
  } else {
    run_fused<C>(PackedFused<C>{{params, shared, warpgroup, warp, lane}});
  }
}

// The sums of dQ, scaled and rounded: a CTA per block, a warpgroup per half.
template <class C>
struct QueryRounding {
  using Base = FusedBase<C>;
  using Element = typename C::Element;
  static constexpr int PITCH =
      operand_columns(C::HEAD_DIM) * 2 + CHUNK_BYTES;  // bytes; a chunk more, so that rows begin in different banks
  static_assert(!C::TURNED || PITCH * C::BLOCK_Q == C::ROUND_SHARED_BYTES,
                "the layout of shared memory is the formula of the search space");
  const BackwardParams& params;
  const int half, warp, lane;  // of the block, of the warp in the half, in the warp
  int batch, head, row;

  FG_DEVICE explicit QueryRounding(const BackwardParams& given)
      : params(given), half(thread_index() / 128), warp(thread_index() / WARP_LANES % 4), lane(thread_index() % WARP_LANES) {
    const int blocks = ceil_div(params.forward.seqlen_q, C::BLOCK_Q), batch_head = static_cast<int>(block_index() / blocks);
    batch = batch_head / params.forward.heads_q;
    head = batch_head - batch * params.forward.heads_q;
    row = static_cast<int>(block_index() % blocks) * C::BLOCK_Q;
  }

  FG_DEVICE void run() const {
    const float* from = RowStatistics(params.forward).sums + (block_index() * 2 + half) * Base::HALF + warp * Base::WARP_SHARE + lane * 4;
    float sums[Base::DQ_REGISTERS];
    FG_UNROLL
    for (int i = 0; i < Base::DQ_REGISTERS; i += 4) {
      const Vector16 vector = load_global(reinterpret_cast<const Vector16*>(from + i / 4 * 128));
      FG_UNROLL
      for (int j = 0; j < 4; ++j) sums[i + j] = float_from_bits(vector.word[j]);
    }
    const GradientHead<Element> dq(params.dq, params.dq_strides, batch, head, params.forward.seqlen_q);
    if constexpr (C::TURNED) {
      turn(sums);
      block_sync();
      copy_rows(dq);
    } else {
      const int first = row + (Base::BY_ROWS ? half * PRODUCT_ROWS : 0) + warp * 16 + lane / 4;
      dq.template store<C::DQ_COLUMNS>(sums, params.scale, first, Base::BY_ROWS ? 0 : half * C::DQ_COLUMNS, C::HEAD_DIM, lane);
    }
  }

 private:
  // Columns by rows in registers, rows of columns in shared memory.
  FG_DEVICE void turn(const float (&sums)[Base::DQ_REGISTERS]) const {
    const int column = half * SWIZZLE_COLUMNS + warp * 16 + lane / 8 % 2 * 8;
    const u32 target = dynamic_shared() + static_cast<u32>((lane / 16 * 8 + lane % 8) * PITCH + column * 2);
    FG_UNROLL
    for (int i = 0; i < Base::DQ_REGISTERS; i += 8) {
      u32 fragment[4];
      FG_UNROLL
      for (int j = 0; j < 4; ++j) fragment[j] = pack_pair(sums[i + 2 * j] * params.scale, sums[i + 2 * j + 1] * params.scale, Element{});
      store_matrix_x4_transposed(target + static_cast<u32>(i / 8 * 16 * PITCH), fragment);
    }
  }
  FG_DEVICE void copy_rows(const GradientHead<Element>& dq) const {
    constexpr int CHUNKS = C::HEAD_DIM / CHUNK_ELEMENTS;
    for (int i = thread_index(); i < C::BLOCK_Q * CHUNKS; i += 256) {
      const int r = i / CHUNKS, chunk = i % CHUNKS;
      if (row + r >= dq.rows) break;
      dq.store_chunk(row + r, chunk * CHUNK_ELEMENTS, load_shared<Vector16>(dynamic_shared() + static_cast<u32>(r * PITCH + chunk * 16)));
    }
  }
};

}  // namespace fg
