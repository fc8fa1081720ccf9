// Gradients of attention with warpgroup products and bulk copies: sm_90a, 16-bit elements.
//
// P = exp(S - lse) is computed again from Q, K and the saved lse, tile by tile; with dP = dO V^T and delta = rowsum(dO * O) - dlse, the
// gradient of the scaled scores is dS = P * (dP - delta), and
//
//   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K
//
// Three launches. `prepare` computes lse in log2 units and delta. `key_gradients` gives dK and dV; `query_gradients` gives dQ, in one of
// two ways. Split: dQ has a loop of its own, S and dP are computed twice, and every sum has one owner and one order, so its bits never
// change. Fused: the loop for dK and dV adds dQ of each pair of tiles to float32 sums in global memory, which only have to be rounded;
// in any order, or tile after tile of keys, which takes turns but always gives the same bits.
#pragma once
#include "hopper/backward_prepare.cuh"
#include "hopper/backward_split.cuh"
#include "hopper/backward_fused.cuh"
#include "hopper/backward_queries.cuh"

namespace fg {

template <class C>
FG_DEVICE void key_gradients(const MappedBackwardParams& params) {
  const u32 shared = dynamic_shared();
  const int warp = warp_uniform(thread_index() / WARP_LANES), lane = thread_index() % WARP_LANES, warpgroup = warp / 4;
  if (thread_index() == 0) KeyShape<C>::initialise(shared);
  block_sync();
  if (warpgroup == 0) {
    registers_decrease<24>();
    if (warp == 0 && lane == 0) {
      BlockProducer<C>{params, shared}.run();
    } else if (warp == 1 && lane == 0) {
      produce_keys<C>(params, shared);
    } else if constexpr (C::ORDERED) {
      if (warp >= 2 && lane == 0) OrderedSums<C>{params.problem, shared, static_cast<u32>(warp - 2)}.run();
    } else if constexpr (C::CLEAR_AHEAD > 0) {
      if (warp == 2) clear_ahead<C>(params.problem.forward, KeyShape<C>::queue(shared), lane);
    }
  } else {
    registers_increase<240>();
    if constexpr (C::FUSED) {
      fused_consumers<C>(params.problem, shared, warpgroup - 1, warp % 4, lane);
    } else {
      split_consumers<C>(params.problem, shared, warpgroup - 1, warp % 4, lane);
    }
  }
}

template <class C>
FG_DEVICE void query_gradients(const MappedBackwardParams& params) {
  if constexpr (C::FUSED) {
    round_query_sums<C>(params.problem);
  } else {
    gradients_of_queries<C>(params);
  }
}

}  // namespace fg
