// The fused pass in the order that needs the fewest registers, for blocks of more than 64 rows.
#pragma once
#include "backward_fused_base.cuh"

namespace fg {

// Products and what is computed from them alternate: S beside the end of dK, exponentials beside dP, the exchange beside dV, staging beside
// dK. At every point at most dK, dV, two arrays of a block and one packed array are alive, so that blocks may be longer than 64 rows.
template <class C>
struct SerialFused : FusedBase<C> {
  using Base = FusedBase<C>;
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  static constexpr bool SHARES = Base::DQ_REGISTERS == Shape::SCORES;  // dP and dQ
  static constexpr int K_STEPS = product_steps(C::HEAD_DIM), V_STEPS = product_steps(C::HEAD_DIM_V);
  // What is under way between two drains, and what is alive beside the exponentials, has to fit the registers.
  static constexpr int KEPT = Shape::K_SUMS + Shape::V_SUMS + (C::KEYS_IN_REGISTERS ? 4 * (K_STEPS + V_STEPS) : 0);
  static constexpr bool OVERLAPS =  // S of the next block is computed beside dK
      KEPT + Base::DQ_REGISTERS + (C::KEYS_FROM_SHARED ? 1 : 2) * Shape::WORDS + Shape::SCORES <= 224;
  static constexpr bool PREFETCHES = KEPT + 2 * Shape::SCORES + C::BLOCK_Q / 4 <= 212;               // lse is loaded while S is computed
  float dk[Shape::K_SUMS], dv[Shape::V_SUMS], scores[Shape::SCORES], weights[Shape::SCORES];         // S, then P; dP, then dQ
  float narrow[Base::DQ_REGISTERS];                                                                  // dQ, unless it shares
  u32 own_k[C::KEYS_IN_REGISTERS ? 4 * K_STEPS : 1], own_v[C::KEYS_IN_REGISTERS ? 4 * V_STEPS : 1];  // this warp's rows of K and V
  u32 packed[Shape::WORDS], gradients[Shape::WORDS];                                                 // P and dS

  FG_DEVICE auto& dq() {
    if constexpr (SHARES) {
      return weights;
    } else {
      return narrow;
    }
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
      start_product<RegistersByRows<C::HEAD_DIM_V, C::BLOCK_Q>, Element>(weights, own_v, this->dout_rows(this->at.stage));
    } else {
      start_product<typename Shape::Weights, Element>(weights, this->own_rows(this->v_tile()), this->dout_rows(this->at.stage));
    }
  }
  FG_DEVICE void add_keys() {
    if constexpr (C::KEYS_FROM_SHARED) {
      add_shared_product<typename Base::SharedKeySums, Element>(dk, this->own_exchanged(), this->q_columns(this->at.stage));
    } else {
      add_product<typename Shape::KeySums, Element>(dk, gradients, this->q_columns(this->at.stage));
    }
  }
  // P and dS = P * (dP - delta), packed.
  FG_DEVICE void differentiate() {
    typename Base::Statistics statistics;
    this->load_statistics(statistics, Shape::DELTA, this->at.stage);
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) {
      const FourStatistics delta = statistics_of(statistics[i / 4]);
      const float low = scores[2 * i] * (weights[2 * i] - delta.of(2 * i)),
                  high = scores[2 * i + 1] * (weights[2 * i + 1] - delta.of(2 * i + 1));
      packed[i] = pack_pair(scores[2 * i], scores[2 * i + 1], Element{});
      gradients[i] = pack_pair(low, high, Element{});
    }
  }
  FG_DEVICE void begin() {
    mbarrier_wait(this->barrier(Shape::K_FULL + this->keys.stage), this->keys.round);
    if constexpr (C::KEYS_IN_REGISTERS) this->template load_rows<K_STEPS>(own_k, this->k_tile());
    this->wait_q(this->at);
    start_scores(this->at.stage);
    mbarrier_wait(this->barrier(Shape::V_FULL + this->keys.stage), this->keys.round);
    if constexpr (C::KEYS_IN_REGISTERS) this->template load_rows<V_STEPS>(own_v, this->v_tile());
  }

  // From S of the present block to S of the next, unless this is the LAST; dQ of the last block, if there is one, is staged on the way.
  template <bool LAST>
  FG_DEVICE void advance(int key, int row, int last_block, int staged) {
    const RingSlot<C::NUM_STAGES> next = this->at.next();
    const u32 last = this->exchanges - 1;
    typename Base::Statistics lse;
    if constexpr (PREFETCHES) this->load_statistics(lse, Shape::LSE, this->at.stage);
    this->wait_dout(this->at);
    product_wait<0>(scores);
    this->take_turn();
    start_weights();
    this->pass_turn();
    if constexpr (!PREFETCHES) this->load_statistics(lse, Shape::LSE, this->at.stage);
    this->exponentiate(scores, lse, key, row);
    if constexpr (C::PIN) finish_before(scores);
    product_wait<0>(scores, weights);
    differentiate();
    add_product<typename Shape::ValueSums, Element>(dv, packed, this->dout_columns(this->at.stage));
    this->exchange(gradients);
    this->add_staged(staged, this->exchanges - 2);
    if (last_block >= 0) this->wait_exchanged(last);
    this->meet_and_take_turn();
    // Without a last block the product reads keys, which are there, and its result is not used: no branch may surround a product.
    this->sum_queries(dq(), last_block >= 0 ? this->exchanged_rows(last) : row_operand(this->k_tile()));
    add_keys();
    this->pass_turn();
    product_wait<2>(packed);
    warp_release(this->barrier(Shape::DOUT_EMPTY + this->at.stage));
    product_wait<1>(dq());
    if (last_block >= 0) {
      warp_release(this->exchange_empty(last));
      this->stage(dq(), last_block, last);
    }
    if constexpr (LAST) {
      product_wait<0>(dq(), dk, dv);
    } else if constexpr (OVERLAPS) {
      this->wait_q(next);
      start_scores(next.stage);
      product_wait<1>(gradients);
    } else {
      product_wait<0>(gradients);
    }
    warp_release(this->barrier(Shape::Q_EMPTY + this->at.stage));
    if constexpr (!LAST && !OVERLAPS) {
      this->wait_q(next);
      start_scores(next.stage);
    }
    this->at = next;
    ++this->exchanges;
  }

  FG_DEVICE void end(int block, int last_block) {
    const u32 present = this->exchanges - 1;
    this->fence_and_add_staged(last_block, present - 1);
    this->wait_exchanged(present);
    this->sum_queries(dq(), this->exchanged_rows(present));
    product_wait<0>(dq(), scores, packed);
    warp_release(this->exchange_empty(present));
    this->release_keys();
    this->stage(dq(), block, present);
    this->fence_and_add_staged(block, present);
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

}  // namespace fg
