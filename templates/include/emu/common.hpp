// Primitives that every architecture has, for a CPU. The twin for GPUs is ptx/common.cuh, which says what each promises.
#pragma once
#include "runtime.hpp"

#define FG_DEVICE inline
#define FG_UNROLL
#define FG_NO_UNROLL
// NAME becomes an exported function of the address of the parameters; the runtime calls it once per emulated thread.
#define FG_KERNEL(NAME, PARAMS, THREADS, CTAS_PER_SM)                                                                                   \
  extern "C" __attribute__((visibility("default"))) const int NAME##_max_threads;                                                       \
  const int NAME##_max_threads = THREADS;                                                                                               \
  extern "C" __attribute__((visibility("default"))) const int NAME##_ctas_per_sm;                                                       \
  const int NAME##_ctas_per_sm = CTAS_PER_SM;                                                                                           \
  static void NAME##_body(const PARAMS& params);                                                                                        \
  extern "C" __attribute__((visibility("default"))) void NAME(const void* params) { NAME##_body(*static_cast<const PARAMS*>(params)); } \
  static void NAME##_body([[maybe_unused]] const PARAMS& params)

namespace fg {

// Sixteen bytes: the widest access of one thread.
struct alignas(16) Vector16 {
  u32 word[4];
};

// ---- dynamic shared memory: byte addresses, 1024-byte aligned base ----

FG_DEVICE u32 dynamic_shared() { return emu::shared_base(); }

FG_DEVICE void store_shared(u32 address, float value) { emu::write_shared(address, &value, 4); }
FG_DEVICE void store_shared(u32 address, u32 value) { emu::write_shared(address, &value, 4); }
FG_DEVICE void store_shared(u32 address, u16 value) { emu::write_shared(address, &value, 2); }
FG_DEVICE void store_shared(u32 address, const Vector16& value) { emu::write_shared(address, &value, 16); }

template <class T>
FG_DEVICE T load_shared(u32 address);
template <>
FG_DEVICE float load_shared<float>(u32 address) {
  float value;
  emu::read_shared(address, &value, 4);
  return value;
}
template <>
FG_DEVICE u32 load_shared<u32>(u32 address) {
  u32 value;
  emu::read_shared(address, &value, 4);
  return value;
}
template <>
FG_DEVICE u16 load_shared<u16>(u32 address) {
  u16 value;
  emu::read_shared(address, &value, 2);
  return value;
}
template <>
FG_DEVICE Vector16 load_shared<Vector16>(u32 address) {
  Vector16 value;
  emu::read_shared(address, &value, 16);
  return value;
}

// ---- global memory ----

template <class T>
FG_DEVICE T load_global(const T* address) {
  T value;
  emu::read_global(address, &value, sizeof(T));
  return value;
}
template <class T>
FG_DEVICE void store_global(T* address, const T& value) {
  emu::write_global(address, &value, sizeof(T));
}

// ---- threads of a warp and of a block ----

FG_DEVICE int thread_index() { return emu::current.thread; }
FG_DEVICE i64 block_index() { return emu::current.block; }

FG_DEVICE u32 float_bits(float x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
FG_DEVICE float float_from_bits(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

FG_DEVICE float shuffle_xor(float value, int lane_mask) { return float_from_bits(emu::exchange(float_bits(value), lane_mask)); }
FG_DEVICE u32 shuffle_xor(u32 value, int lane_mask) { return emu::exchange(value, lane_mask); }
FG_DEVICE bool warp_any(bool predicate) { return emu::vote_any(predicate); }
FG_DEVICE void warp_sync() { emu::join_warp(); }
FG_DEVICE void block_sync() { emu::join_block(); }

// ---- arithmetic ----

// Denormal results are flushed to zero, as the device does.
FG_DEVICE float exp2_approx(float x) {
  ++emu::counters.exponentials;
  const float y = __builtin_exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
FG_DEVICE float log2_exact(float x) { return __builtin_log2f(x); }
FG_DEVICE float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FG_DEVICE float larger(float a, float b) { return __builtin_fmaxf(a, b); }
FG_DEVICE float magnitude(float a) { return __builtin_fabsf(a); }

// Adding a power of two whose last place is the last place of the result rounds to nearest even in hardware, denormal halves included.
FG_DEVICE u16 half_from_float(float x) {
  const u32 bits = float_bits(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return 0x7FFFu;
  if (size >= 0x477FF000u) return static_cast<u16>(sign | 0x7C00u);  // rounds to 65536 or more
  if (size < 0x38800000u) return static_cast<u16>(sign | (float_bits(float_from_bits(size) + 0.5f) - 0x3F000000u));
  return static_cast<u16>(sign | ((size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u)) >> 13));
}
FG_DEVICE float half_to_float(u16 bits) {
  const u32 sign = (bits & 0x8000u) << 16, size = bits & 0x7FFFu;
  if (size >= 0x7C00u) return float_from_bits(sign | 0x7F800000u | ((size & 0x3FFu) << 13));
  return float_from_bits(sign | float_bits(float_from_bits(size << 13) * 0x1p112f));
}

}  // namespace fg
