// The fused pass in the order that leaves the tensor cores the least to wait for: S of the next block, dK and dQ are under way together.
#pragma once
#include "backward_fused_base.cuh"

namespace fg {

// At every point at most dK, dV, S or P, dP or dQ, and one packed array are alive.
template <class C>
struct OverlappedFused : FusedBase<C> {
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
    this->add_staged(staged, this->exchanges - 2);
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
  FG_DEVICE void wait_keys() {
    mbarrier_wait(this->barrier(Shape::K_FULL + this->keys.stage), this->keys.round);
    if constexpr (C::KEYS_IN_REGISTERS) this->template load_rows<K_STEPS>(own_k, this->k_tile());
  }
  FG_DEVICE void wait_values() {
    mbarrier_wait(this->barrier(Shape::V_FULL + this->keys.stage), this->keys.round);
    if constexpr (C::KEYS_IN_REGISTERS) this->template load_rows<V_STEPS>(own_v, this->v_tile());
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
      this->stage(dq(), last_block, last);
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
      this->stage(dq(), last_block, last);
      this->fence_and_add_staged(last_block, last);
    }
    this->wait_exchanged(this->exchanges);
    this->take_turn();
    start_query_sums(this->exchanged_rows(this->exchanges));
    this->pass_turn();
    product_wait<0>(dq(), scores, packed);
    warp_release(this->exchange_empty(this->exchanges));
    this->release_keys();
    ++this->exchanges;
    this->stage(dq(), block, this->exchanges - 1);
    this->fence_and_add_staged(block, this->exchanges - 1);
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

}  // namespace fg
