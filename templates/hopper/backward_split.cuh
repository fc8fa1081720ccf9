// dK and dV of 64 keys by two warpgroups with a role each, for wide heads: either role needs the accumulators of one gradient only.
//
// The first computes S^T, P and dV, the second dP^T, dS and dK. P passes from the first to the second through shared memory, in the order
// of accumulator registers; nothing passes back, so the second may lag behind.
#pragma once
#include "backward_keys.cuh"

namespace fg {

// What a role of the split pass knows and does; Derived has the rest.
template <class C>
struct SplitRole {
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  static constexpr int EXCHANGE_STEP = 128 * 16;  // bytes: sixteen of every thread

  const BackwardParams& params;
  const u32 shared;
  const int warp, lane;  // of the warp in the warpgroup, in the warp
  RingSlot<C::NUM_STAGES> q, dout;
  RingSlot<2> exchange;
  RingSlot<C::KEY_STAGES> keys;

  FG_DEVICE u32 barrier(int which) const { return Shape::barrier(shared, which); }
  FG_DEVICE u32 k_rows() const { return row_operand(shared + Shape::K) + static_cast<u32>(keys.stage) * descriptor_step(Shape::K_BYTES); }
  FG_DEVICE u32 v_rows() const { return row_operand(shared + Shape::V) + static_cast<u32>(keys.stage) * descriptor_step(Shape::V_BYTES); }
  FG_DEVICE u32 q_step() const { return static_cast<u32>(q.stage) * descriptor_step(Shape::Q_BYTES); }
  FG_DEVICE u32 dout_step() const { return static_cast<u32>(dout.stage) * descriptor_step(Shape::DOUT_BYTES); }
  FG_DEVICE u32 q_rows() const { return row_operand(shared + Shape::Q) + q_step(); }
  FG_DEVICE u32 q_columns() const { return column_operand(shared + Shape::Q, C::BLOCK_Q) + q_step(); }
  FG_DEVICE u32 dout_rows() const { return row_operand(shared + Shape::DOUT) + dout_step(); }
  FG_DEVICE u32 dout_columns() const { return column_operand(shared + Shape::DOUT, C::BLOCK_Q) + dout_step(); }

  FG_DEVICE void wait_q() const { mbarrier_wait(barrier(Shape::Q_FULL + q.stage), q.round); }
  FG_DEVICE void wait_dout() const { mbarrier_wait(barrier(Shape::DOUT_FULL + dout.stage), dout.round); }
  FG_DEVICE void release_q(int stage) const { warp_release(barrier(Shape::Q_EMPTY + stage)); }
  FG_DEVICE void release_dout(int stage) const { warp_release(barrier(Shape::DOUT_EMPTY + stage)); }

  FG_DEVICE void release_keys() {
    warp_release(barrier(Shape::KEYS_EMPTY + keys.stage));
    keys = keys.next();
  }

  // This thread's place in the present exchange buffer.
  FG_DEVICE u32 exchanged() const {
    return shared + Shape::EXCHANGE + static_cast<u32>(exchange.stage * Shape::EXCHANGE_BYTES + (warp * WARP_LANES + lane) * 16);
  }
  FG_DEVICE u32 statistics(int base, int stage) const {
    return shared + static_cast<u32>(base + stage * Shape::STATISTIC_BYTES + lane % 4 * 16);
  }
};

template <class C>
struct ValueRole : SplitRole<C> {
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  float sums[Shape::V_SUMS], scores[Shape::SCORES];
  u32 probabilities[Shape::WORDS];

  FG_DEVICE void start_scores() {
    this->wait_q();
    start_product<typename Shape::Scores, Element>(scores, this->k_rows(), this->q_rows());
  }
  // P of the block from `row` on, in place of its scores; a packed copy goes to the other role.
  FG_DEVICE void exponentiate(int key, int row) {
    const ForwardParams& forward = this->params.forward;
    if (block_needs_mask<C>(forward, key, row)) hide_keys<C>(scores, forward, key + this->warp * 16 + this->lane / 4, row, this->lane);
    u32 address = this->statistics(Shape::LSE, this->q.stage);
    pin_address(address);
    u32 copy[Shape::WORDS];
    FG_UNROLL
    for (int first = 0; first < Shape::SCORES; first += 8) {
      const FourStatistics lse = statistics_of(load_shared_freely(address + first * 8));
      FG_UNROLL
      for (int i = 0; i < 8; ++i) scores[first + i] = exp2_approx(fused_multiply_add(scores[first + i], forward.scale_log2, -lse.of(i)));
      FG_UNROLL
      for (int i = 0; i < 4; ++i) copy[first / 2 + i] = pack_pair(scores[first + 2 * i], scores[first + 2 * i + 1], Element{});
    }
    mbarrier_wait(this->barrier(Shape::EXCHANGE_EMPTY + this->exchange.stage), this->exchange.round ^ 1);
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; i += 4)
      store_shared(this->exchanged() + static_cast<u32>(i / 4 * this->EXCHANGE_STEP),
                   Vector16{{copy[i], copy[i + 1], copy[i + 2], copy[i + 3]}});
    warp_release(this->barrier(Shape::EXCHANGE_FULL + this->exchange.stage));
    this->exchange = this->exchange.next();
    this->release_q(this->q.stage);
    this->q = this->q.next();
  }
  FG_DEVICE void pack() {
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) probabilities[i] = pack_pair(scores[2 * i], scores[2 * i + 1], Element{});
  }
  FG_DEVICE void start_sums() {
    this->wait_dout();
    add_product<typename Shape::ValueSums, Element>(sums, probabilities, this->dout_columns());
  }
  FG_DEVICE void finish_sums() {
    product_wait<0>(sums, scores, probabilities);
    this->release_dout(this->dout.stage);
    this->dout = this->dout.next();
  }

  FG_DEVICE void compute(const KeyTile<C>& place) {
    BlockWalk<C> walk(this->params.forward, place.key);
    FG_UNROLL
    for (int i = 0; i < Shape::V_SUMS; ++i) sums[i] = 0.0f;
    if (walk.left > 0) {
      mbarrier_wait(this->barrier(Shape::K_FULL + this->keys.stage), this->keys.round);
      start_scores();
      product_wait<0>(scores);
      exponentiate(place.key, walk.block * C::BLOCK_Q);
      pack();
      walk.advance();
      FG_NO_UNROLL
      while (walk.left > 0) {
        start_scores();
        start_sums();
        product_wait<1>(scores);
        exponentiate(place.key, walk.block * C::BLOCK_Q);
        finish_sums();
        pack();
        walk.advance();
      }
      this->release_keys();
      start_sums();
      finish_sums();
    }
    const BackwardParams& params = this->params;
    const GradientHead<Element> dv(params.dv, params.dv_strides, place.batch, place.head_kv, params.forward.seqlen_kv);
    dv.template store<C::HEAD_DIM_V>(sums, 1.0f, place.key + this->warp * 16 + this->lane / 4, 0, C::HEAD_DIM_V, this->lane);
  }
};

template <class C>
struct KeyRole : SplitRole<C> {
  using Shape = KeyShape<C>;
  using Element = typename C::Element;
  float sums[Shape::K_SUMS], weights[Shape::SCORES];  // dK; dP, then dS
  u32 gradients[Shape::WORDS];                        // dS, packed

  FG_DEVICE void start_weights() {
    this->wait_dout();
    start_product<typename Shape::Weights, Element>(weights, this->v_rows(), this->dout_rows());
  }
  // dS = P * (dP - delta), in place of dP.
  FG_DEVICE void differentiate() {
    const u32 address = this->statistics(Shape::DELTA, this->dout.stage);
    mbarrier_wait(this->barrier(Shape::EXCHANGE_FULL + this->exchange.stage), this->exchange.round);
    FG_UNROLL
    for (int first = 0; first < Shape::SCORES; first += 8) {
      const Vector16 p = load_shared<Vector16>(this->exchanged() + static_cast<u32>(first / 8 * this->EXCHANGE_STEP));
      const FourStatistics delta = statistics_of(load_shared<Vector16>(address + first * 8));
      FG_UNROLL
      for (int i = 0; i < 8; ++i) {
        const float probability = to_float(Element{static_cast<u16>(p.word[i / 2] >> (i % 2 * 16))});
        weights[first + i] = probability * (weights[first + i] - delta.of(i));
      }
    }
    warp_release(this->barrier(Shape::EXCHANGE_EMPTY + this->exchange.stage));
    this->exchange = this->exchange.next();
    this->release_dout(this->dout.stage);
    this->dout = this->dout.next();
  }
  FG_DEVICE void pack() {
    FG_UNROLL
    for (int i = 0; i < Shape::WORDS; ++i) gradients[i] = pack_pair(weights[2 * i], weights[2 * i + 1], Element{});
  }
  FG_DEVICE void start_sums() {
    this->wait_q();
    add_product<typename Shape::KeySums, Element>(sums, gradients, this->q_columns());
  }
  FG_DEVICE void finish_sums() {
    product_wait<0>(sums, weights, gradients);
    this->release_q(this->q.stage);
    this->q = this->q.next();
  }

  FG_DEVICE void compute(const KeyTile<C>& place) {
    int left = BlockWalk<C>(this->params.forward, place.key).left;
    FG_UNROLL
    for (int i = 0; i < Shape::K_SUMS; ++i) sums[i] = 0.0f;
    if (left > 0) {
      mbarrier_wait(this->barrier(Shape::V_FULL + this->keys.stage), this->keys.round);
      start_weights();
      product_wait<0>(weights);
      differentiate();
      pack();
      FG_NO_UNROLL
      while (--left > 0) {
        start_weights();
        start_sums();
        product_wait<1>(weights);
        differentiate();
        finish_sums();
        pack();
      }
      this->release_keys();
      start_sums();
      finish_sums();
    }
    const BackwardParams& params = this->params;
    const GradientHead<Element> dk(params.dk, params.dk_strides, place.batch, place.head_kv, params.forward.seqlen_kv);
    dk.template store<C::HEAD_DIM>(sums, params.scale, place.key + this->warp * 16 + this->lane / 4, 0, C::HEAD_DIM, this->lane);
  }
};

template <class C, class Role>
FG_DEVICE void run_role(Role role) {
  TileQueue queue = KeyShape<C>::queue(role.shared);
  FG_NO_UNROLL
  for (int tile = queue.read(); tile != NO_TILE; tile = queue.read()) role.compute(KeyTile<C>::of(role.params.forward, tile));
}

template <class C>
FG_DEVICE void split_consumers(const BackwardParams& params, u32 shared, int warpgroup, int warp, int lane) {
  if (warpgroup == 0) {
    run_role<C>(ValueRole<C>{{params, shared, warp, lane}});
  } else {
    run_role<C>(KeyRole<C>{{params, shared, warp, lane}});
  }
}

}  // namespace fg
