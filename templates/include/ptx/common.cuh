// Primitives that every architecture has: types, shuffles, barriers, shared and global accesses. The twin for CPUs is emu/common.hpp.
#pragma once

#define FG_DEVICE __device__ __forceinline__
#define FG_UNROLL _Pragma("unroll")
#define FG_NO_UNROLL _Pragma("unroll 1")
// Architectures before sm_70 know no __grid_constant__; there the parameters are copied, which only costs time.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
#define FG_PARAMETER const __grid_constant__
#else
#define FG_PARAMETER const
#endif
// One entry point: a block of THREADS threads, at least CTAS_PER_SM blocks resident on one SM.
#define FG_KERNEL(NAME, PARAMS, THREADS, CTAS_PER_SM) \
  extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) NAME(FG_PARAMETER PARAMS params)

namespace fg {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Sixteen bytes: the widest access of one thread.
struct alignas(16) Vector16 {
  u32 word[4];
};

// ---- dynamic shared memory: byte addresses, 1024-byte aligned base ----

extern __shared__ __align__(1024) unsigned char fg_dynamic_shared[];

FG_DEVICE u32 dynamic_shared() { return static_cast<u32>(__cvta_generic_to_shared(fg_dynamic_shared)); }

FG_DEVICE void store_shared(u32 address, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory"); }
FG_DEVICE void store_shared(u32 address, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory"); }
FG_DEVICE void store_shared(u32 address, u16 value) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory"); }
FG_DEVICE void store_shared(u32 address, const Vector16& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]),
               "r"(value.word[3])
               : "memory");
}

template <class T>
FG_DEVICE T load_shared(u32 address);
template <>
FG_DEVICE float load_shared<float>(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
template <>
FG_DEVICE u32 load_shared<u32>(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
template <>
FG_DEVICE u16 load_shared<u16>(u32 address) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}
template <>
FG_DEVICE Vector16 load_shared<Vector16>(u32 address) {
  Vector16 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(address)
               : "memory");
  return value;
}

// ---- global memory ----

template <class T>
FG_DEVICE T load_global(const T* address) {
  return *address;
}
template <class T>
FG_DEVICE void store_global(T* address, const T& value) {
  *address = value;
}

// ---- threads of a warp and of a block ----

FG_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
FG_DEVICE i64 block_index() { return static_cast<i64>(blockIdx.x); }

// The value of the lane whose index differs by `lane_mask` in binary.
FG_DEVICE float shuffle_xor(float value, int lane_mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, lane_mask); }
FG_DEVICE u32 shuffle_xor(u32 value, int lane_mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, lane_mask); }
FG_DEVICE bool warp_any(bool predicate) { return __any_sync(0xFFFFFFFFu, predicate) != 0; }
FG_DEVICE void warp_sync() { __syncwarp(); }
FG_DEVICE void block_sync() { __syncthreads(); }

// ---- arithmetic ----

// 2^x with about 2 ulp of float32; -inf gives 0.
FG_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FG_DEVICE float log2_exact(float x) { return log2f(x); }
FG_DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
FG_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
FG_DEVICE float magnitude(float a) { return fabsf(a); }
FG_DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
FG_DEVICE float float_from_bits(u32 bits) { return __uint_as_float(bits); }

FG_DEVICE u16 half_from_float(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
FG_DEVICE float half_to_float(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

}  // namespace fg
