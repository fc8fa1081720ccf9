// A ring of two slots filled by asynchronous copies: out[i] = sum over tiles of in[tile][neighbour of i]. FAULT plants one mistake.
#include "sm80.cuh"

struct Params {
  const float* in;  // (tiles, 128 threads, 4)
  float* out;       // (128, 4)
  int tiles;
};

constexpr int THREADS = 128;
constexpr fg::u32 SLOT_BYTES = THREADS * 16;

FG_KERNEL(pipeline, Params, THREADS, 1) {
  using namespace fg;
  const int thread = thread_index();
  const u32 base = dynamic_shared();
  auto fetch = [&](int tile) {
    const u32 slot = base + tile % 2 * SLOT_BYTES;
    copy_async_16(slot + thread * 16, params.in + (tile * THREADS + thread) * 4, tile < params.tiles);
    copy_async_commit();
  };
  Vector16 sum = {};
  fetch(0);
  for (int tile = 0; tile < params.tiles; ++tile) {
    fetch(tile + 1);
    copy_async_wait<FAULT == 1 ? 2 : 1>();
    if (FAULT != 2) block_sync();
    const Vector16 part = load_shared<Vector16>(base + tile % 2 * SLOT_BYTES + (thread + 37) % THREADS * 16);
    for (int i = 0; i < 4; ++i) sum.word[i] = float_bits(float_from_bits(sum.word[i]) + float_from_bits(part.word[i]));
    if (FAULT != 3) block_sync();
  }
  for (int i = 0; i < 4; ++i) store_global(params.out + thread * 4 + i, float_from_bits(sum.word[i]));
}
