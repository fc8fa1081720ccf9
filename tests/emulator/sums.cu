// Floats that come by a bulk load, doubled by each thread, and are stored and added to global memory by bulk copies, and added by atomics.
#include "sm90_backward.cuh"

using namespace fg;

struct Params {
  const float* from;
  float* bulk_sums;
  float* sums;
  float* stored;
};

FG_KERNEL(sums, Params, 128, 1) {
  const u32 tile = dynamic_shared(), barrier = tile + 2048;
  const int thread = thread_index();
  if (thread == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  block_sync();
  if (thread == 0) {
    mbarrier_expect(barrier, 2048);
    bulk_load(tile, params.from, 2048, barrier);
  }
  mbarrier_wait(barrier, 0);
  const Vector16 loaded = load_shared_freely(tile + static_cast<u32>(thread * 16));
  float value[4];
  for (int i = 0; i < 4; ++i) value[i] = 2.0f * float_from_bits(loaded.word[i]);
  store_shared(tile + static_cast<u32>(thread * 16), Vector16{{float_bits(value[0]), float_bits(value[1]), float_bits(value[2]), float_bits(value[3])}});
  FENCE
  block_sync();
  if (thread == 0) {
    bulk_store(params.stored + 512 * block_index(), tile, 2048);
    bulk_add(params.bulk_sums, tile, 2048);
    bulk_add(params.bulk_sums, tile, 1024);
    bulk_commit();
    WAIT
  }
  add_global(params.sums + thread * 4, value[0], value[1], value[2], value[3]);
}
