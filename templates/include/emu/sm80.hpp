// Primitives of sm_80 and later, for a CPU. The twin for GPUs is ptx/sm80.cuh, which says what each promises.
#pragma once

namespace fg {

FG_DEVICE void copy_async_16(u32 shared, const void* global, bool in_range) { emu::start_copy(shared, in_range ? global : nullptr); }
FG_DEVICE void copy_async_commit() { emu::commit_copies(); }
template <int PENDING>
FG_DEVICE void copy_async_wait() {
  emu::wait_copies(PENDING);
}

FG_DEVICE void load_matrix_x4(u32 (&fragment)[4], u32 row_address) { emu::load_matrices(fragment, row_address, false); }
FG_DEVICE void load_matrix_x4_transposed(u32 (&fragment)[4], u32 row_address) { emu::load_matrices(fragment, row_address, true); }

FG_DEVICE void multiply_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Half) { emu::multiply_tile(d, a, b0, b1, true); }
FG_DEVICE void multiply_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, BFloat16) { emu::multiply_tile(d, a, b0, b1, false); }
FG_DEVICE void multiply_first_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Half) {
  for (float& value : d) value = 0.0f;
  emu::multiply_tile(d, a, b0, b1, true);
}
FG_DEVICE void multiply_first_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, BFloat16) {
  for (float& value : d) value = 0.0f;
  emu::multiply_tile(d, a, b0, b1, false);
}

FG_DEVICE u32 pack_pair(float low, float high, Half) { return half_from_float(low) | static_cast<u32>(half_from_float(high)) << 16; }
FG_DEVICE u32 pack_pair(float low, float high, BFloat16) {
  return from_float<BFloat16>(low).bits | static_cast<u32>(from_float<BFloat16>(high).bits) << 16;
}

}  // namespace fg
