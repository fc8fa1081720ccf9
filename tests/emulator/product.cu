// One warp: D = A B^T with A (16, 16) and B (8, 16), through shared memory, matrix loads and one tensor-core product. FAULT plants one
// mistake.
#include "sm80.cuh"

struct Params {
  const ELEMENT* a;
  const ELEMENT* b;
  float* d;            // (16, 8); on entry the accumulator
  fg::u32* fragments;  // (32, 4): what a transposed load of A gives to each lane
};

FG_KERNEL(product, Params, 32, 1) {
  using namespace fg;
  const int lane = thread_index();
  const u32 a = dynamic_shared(), b = a + 16 * 32;
  store_shared(a + lane * 16, load_global(reinterpret_cast<const Vector16*>(params.a) + lane));
  if (lane < 16) store_shared(b + lane * 16, load_global(reinterpret_cast<const Vector16*>(params.b) + lane));
  if (FAULT != 2) warp_sync();
  u32 left[4], right[4], columns[4];
  load_matrix_x4(left, a + (lane % 16 + (FAULT == 1 ? 16 : 0)) * 32 + lane / 16 * 16);
  load_matrix_x4(right, b + lane % 8 * 32 + lane / 8 % 2 * 16);
  load_matrix_x4_transposed(columns, a + lane % 16 * 32 + lane / 16 * 16);
  float* corner = params.d + lane / 4 * 8 + lane % 4 * 2;
  float d[4] = {load_global(corner), load_global(corner + 1), load_global(corner + 64), load_global(corner + 65)};
  multiply_16x8x16(d, left, right[0], right[1], ELEMENT{});
  for (int i = 0; i < 4; ++i) store_global(corner + i / 2 * 64 + i % 2, d[i]);
  for (int i = 0; i < 4; ++i) store_global(params.fragments + lane * 4 + i, columns[i]);
}
