// Named barriers and sums in global memory, for sm_80 and later. The twin for CPUs is emu/exchange.hpp.
#pragma once

namespace fg {

// ---- named barriers: ids 1..15 (block_sync is 0), `threads` counts those that wait and those that only arrive, in whole warps ----

FG_DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
FG_DEVICE void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- 128 float32 sums in global memory, four of each lane of a warp, in an order that only these two know ----

// Many warps may add at a time; the order of the additions is not defined.
FG_DEVICE void add_to_sums(float* sums, int lane, const float (&value)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + lane * 4), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
#else
  FG_UNROLL
  for (int i = 0; i < 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sums + i * 32 + lane), "f"(value[i]) : "memory");
#endif
}
FG_DEVICE void load_sums(float (&value)[4], const float* sums, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const float4 four = *reinterpret_cast<const float4*>(sums + lane * 4);
  value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
#else
  FG_UNROLL
  for (int i = 0; i < 4; ++i) value[i] = sums[i * 32 + lane];
#endif
}

}  // namespace fg
