// One step of a warpgroup's product on operands that already lie in shared memory as the device wants them. Emulated only: it calls the
// runtime below the primitives, to reach layouts that no primitive uses.
#include "sm90.cuh"

struct Params {
  const fg::Vector16 *a, *b;
  float* d;
};

using namespace fg;

constexpr u64 descriptor(u32 address, u32 leading, u32 stride) {
  return static_cast<u64>(LAYOUT) << 62 | static_cast<u64>(stride / 16) << 32 | static_cast<u64>(leading / 16) << 16 |
         (address & 0x3FFFF) / 16;
}

FG_KERNEL(layouts, Params, 128, 1) {
  const u32 base = dynamic_shared();
  const int thread = thread_index();
  float d[COLUMNS / 2];
  u32 a[4];
  for (int i = 0; i < COLUMNS / 2; ++i) d[i] = load_global(params.d + thread * (COLUMNS / 2) + i);
  if (IN_REGISTERS) {
    const Vector16 registers = load_global(params.a + thread);
    for (int i = 0; i < 4; ++i) a[i] = registers.word[i];
  } else {
    for (int i = thread; i < A_BYTES / 16; i += 128) store_shared(base + 16 * i, load_global(params.a + i));
  }
  for (int i = thread; i < B_BYTES / 16; i += 128) store_shared(base + A_BYTES + 16 * i, load_global(params.b + i));
  fence_proxy_async();
  block_sync();
  const u64 of_a = descriptor(base, A_LEADING, A_STRIDE), of_b = descriptor(base + A_BYTES, B_LEADING, B_STRIDE);
  emu::start_products({d, IN_REGISTERS ? a : nullptr, &of_a, &of_b, COLUMNS, 1, true, A_BY_COLUMNS, B_BY_COLUMNS, IS_HALF});
  wgmma_wait<0>(d, a);
  for (int i = 0; i < COLUMNS / 2; ++i) store_global(params.d + thread * (COLUMNS / 2) + i, d[i]);
}
