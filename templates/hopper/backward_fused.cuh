// dK, dV and dQ in one loop: a CTA holds 128 keys, 64 per warpgroup, and adds its share of dQ to float32 sums in global memory.
//
// S and dP are computed transposed, keys by rows, so that P and dS already lie in registers as dV and dK need them. dS of both warpgroups
// goes to shared memory, from where each computes one half of dQ, a block later: by then the other's dS has long been there. Each warp adds
// its share of dQ by one bulk copy.
#pragma once
#include "backward_ordered.cuh"
#include "backward_overlapped.cuh"
#include "backward_rounding.cuh"
#include "backward_serial.cuh"

namespace fg {

enum Order : int { ORDER_OVERLAPPED = 0, ORDER_SERIAL = 1 };

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
  if (!C::DIRECT && !C::ORDERED && consumer.lane == 0) bulk_wait<0>();
}

template <class C>
FG_DEVICE void fused_consumers(const BackwardParams& params, u32 shared, int warpgroup, int warp, int lane) {
  if constexpr (C::ORDER == ORDER_OVERLAPPED) {
    run_fused<C>(OverlappedFused<C>{{params, shared, warpgroup, warp, lane}});
  } else {
    run_fused<C>(SerialFused<C>{{params, shared, warpgroup, warp, lane}});
  }
}

}  // namespace fg
