// Primitives of sm_80 and later: asynchronous copies, matrix loads, tensor-core products. The twin for CPUs is emu/sm80.hpp.
#pragma once

namespace fg {

// Start copying 16 bytes to shared memory; writes zeros when !in_range. Visible to this thread after the wait that covers its group,
// to others after a barrier as well. Both addresses 16-byte aligned.
FG_DEVICE void copy_async_16(u32 shared, const void* global, bool in_range) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(in_range ? 16 : 0) : "memory");
}
// Close the group of copies started since the last commit (an empty group counts too).
FG_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most PENDING of this thread's newest groups are in flight.
template <int PENDING>
FG_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the 16-byte row address of row i % 8 of matrix i / 8. Lane l receives, of each matrix,
// row l / 4, columns 2 * (l % 4) and the next; transposed: column l / 4, rows 2 * (l % 4) and the next.
FG_DEVICE void load_matrix_x4(u32 (&fragment)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}
FG_DEVICE void load_matrix_x4_transposed(u32 (&fragment)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}

// D += A B for one 16x8 tile, 16 products deep, accumulated in float32; `first` means D = A B. Fragments as in the PTX ISA, mma.m16n8k16.
FG_DEVICE void multiply_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FG_DEVICE void multiply_first_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
FG_DEVICE void multiply_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FG_DEVICE void multiply_first_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Two float32 values rounded to nearest even and packed, `low` in the lower half of the word.
FG_DEVICE u32 pack_pair(float low, float high, Half) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
FG_DEVICE u32 pack_pair(float low, float high, BFloat16) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

}  // namespace fg
