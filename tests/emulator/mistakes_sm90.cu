// Kernels that each break one rule of sm_90a, and the correct form of some.
#include "sm90.cuh"

struct Params {
  fg::TensorMap map, narrow;  // of the input, of the output
  float* out;
  int box_bytes;
};

using namespace fg;

FG_DEVICE u32 barrier_at(int index) { return dynamic_shared() + 8 * index; }
FG_DEVICE u32 tile() { return dynamic_shared() + 1024; }
FG_DEVICE void prepare(u32 arrivals) {
  if (thread_index() == 0) {
    mbarrier_init(barrier_at(0), arrivals);
    fence_mbarrier_init();
  }
  block_sync();
}

FG_KERNEL(initialised_twice, Params, 256, 1) {
  prepare(1);
  prepare(1);
}
FG_KERNEL(initialised_for_nobody, Params, 256, 1) { prepare(0); }
FG_KERNEL(never_initialised, Params, 256, 1) {
  prepare(1);
  if (thread_index() == 0) mbarrier_arrive(barrier_at(1));
}
FG_KERNEL(mbarrier_overwritten, Params, 256, 1) {
  prepare(1);
  if (thread_index() == 0) store_shared(barrier_at(0) + 4, 1u);
}
// The last arrival ends the phase, so one too many needs a phase that still lacks bytes.
FG_KERNEL(too_many_arrivals, Params, 256, 1) {
  prepare(2);
  if (thread_index() != 0) return;
  mbarrier_expect(barrier_at(0), 128);
  mbarrier_arrive(barrier_at(0));
  mbarrier_arrive(barrier_at(0));
}
// Two phases end while a thread waits for the first.
FG_KERNEL(waiter_overtaken, Params, 256, 1) {
  if (thread_index() == 0) mbarrier_init(barrier_at(1), 1);
  prepare(1);
  if (thread_index() == 32) {
    mbarrier_arrive(barrier_at(1));
    mbarrier_wait(barrier_at(0), 0);
  }
  if (thread_index() == 0) {
    mbarrier_wait(barrier_at(1), 0);
    mbarrier_arrive(barrier_at(0));
    mbarrier_arrive(barrier_at(0));
  }
}

FG_DEVICE void load(const TensorMap* map, u32 target) {
  prepare(1);
  if (thread_index() == 0) {
    mbarrier_expect(barrier_at(0), 1024);
    tma_load(target, map, barrier_at(0), 0, 0, 0, 0, 0);
  }
  mbarrier_wait(barrier_at(0), 0);
}
FG_KERNEL(load_misaligned, Params, 256, 1) { load(&params.map, tile() + 16); }
FG_KERNEL(load_out_of_bounds, Params, 256, 1) { load(&params.map, dynamic_shared() + 16384); }
FG_KERNEL(load_onto_mbarrier, Params, 256, 1) { load(&params.map, dynamic_shared()); }
FG_KERNEL(load_never_expected, Params, 256, 1) {
  prepare(1);
  if (thread_index() == 0) {
    tma_load(tile(), &params.map, barrier_at(0), 0, 0, 0, 0, 0);
    mbarrier_arrive(barrier_at(0));
  }
  mbarrier_wait(barrier_at(0), 0);
}
FG_KERNEL(map_copied, Params, 256, 1) {
  const TensorMap copy = params.map;
  load(&copy, tile());
}
FG_KERNEL(map_not_encoded, Params, 256, 1) { load(reinterpret_cast<const TensorMap*>(&params.out), tile()); }

FG_DEVICE void store(const TensorMap* map, bool ordered) {
  for (int word = thread_index(); word < 256; word += 256) store_shared(tile() + 4 * word, 1u);
  fence_proxy_async();
  if (ordered) block_sync();
  if (thread_index() != 0) return;
  tma_store(map, tile(), 0, 0, 0, 0, 0);
  bulk_commit();
  bulk_wait<0>();
}
FG_KERNEL(store_to_input, Params, 256, 1) { store(&params.map, true); }
FG_KERNEL(store_of_unordered, Params, 256, 1) {
  if (thread_index() == 64) store_shared(tile(), 2u), fence_proxy_async();
  block_sync();
  if (thread_index() == 32) store_shared(tile(), 1u), fence_proxy_async();
  if (thread_index() == 0) {
    for (int i = 0; i < 200; ++i) load_shared<u32>(dynamic_shared());
    tma_store(&params.narrow, tile(), 0, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait<0>();
  }
  warp_sync();
}

FG_KERNEL(barrier_of_block_sync, Params, 256, 1) { barrier_sync(0, 64); }
FG_KERNEL(barrier_of_half_a_warp, Params, 256, 1) { barrier_sync(1, 48); }
FG_KERNEL(barrier_counts_differ, Params, 256, 1) {
  if (thread_index() < 64) barrier_sync(1, thread_index() < 32 ? 96 : 64);
}
FG_KERNEL(registers_in_the_wrong_direction, Params, 256, 1) { registers_decrease<256>(); }
FG_KERNEL(registers_not_by_eights, Params, 256, 1) { registers_decrease<100>(); }
FG_KERNEL(registers_of_one_warp, Params, 256, 1) {
  if (thread_index() < 32) registers_decrease<24>();
}

// A 64 x 16 times 16 x 16 product of two row operands in the first 64 and 16 lines of the tile.
FG_DEVICE void multiply(u32 keys) {
  float scores[8];
  score_product<1, Half>(scores, row_operand(tile()), row_operand(keys));
  wgmma_wait<0>(scores);
}
FG_DEVICE void fill(bool fence) {
  for (int word = thread_index(); word < 2560; word += 256) store_shared(tile() + 4 * word, 0x3C003C00u);
  if (fence) fence_proxy_async();
}
FG_KERNEL(lanes_disagree, Params, 256, 1) {
  fill(true);
  block_sync();
  multiply(tile() + (thread_index() % 128 == 77 ? 1024 : 0));
}
FG_KERNEL(operand_out_of_bounds, Params, 256, 1) {
  fill(true);
  block_sync();
  multiply(dynamic_shared() + 16384 - 1024);
}
FG_KERNEL(operand_not_ordered, Params, 256, 1) {
  fill(true);
  multiply(tile());
}
FG_KERNEL(operand_not_fenced, Params, 256, 1) {
  fill(false);
  block_sync();
  multiply(tile());
}
FG_KERNEL(product_of_three_warps, Params, 256, 1) {
  fill(true);
  block_sync();
  if (thread_index() < 96) multiply(tile());
}
FG_KERNEL(not_uniform, Params, 256, 1) { warp_uniform(thread_index()); }

FG_KERNEL(round_trip, Params, 256, 1) {
  prepare(1);
  if (thread_index() != 0) return;
  mbarrier_expect(barrier_at(0), params.box_bytes);
  tma_load(tile(), &params.map, barrier_at(0), 4, 5, 0, 0, 0);
  mbarrier_wait(barrier_at(0), 0);
  tma_store(&params.narrow, tile(), 4, 5, 0, 0, 0);
  bulk_commit();
  bulk_wait_read<0>();
  bulk_wait<0>();
}

// Each warp writes 32 rows of 16 bytes and reads them back, both ways.
template <bool ORDERED>
FG_DEVICE void store_and_load(const Params& params, bool transposed) {
  const int thread = thread_index();
  const u32 address = tile() + 16 * thread;
  u32 fragment[4], back[4];
  for (int i = 0; i < 4; ++i) fragment[i] = static_cast<u32>(thread) * 16 + i;
  if (transposed) {
    store_matrix_x4_transposed(address, fragment);
  } else {
    store_matrix_x4(address, fragment);
  }
  if (ORDERED) warp_sync();
  if (!ORDERED) load_shared<u32>(address);
  if (transposed) {
    load_matrix_x4_transposed(back, address);
  } else {
    load_matrix_x4(back, address);
  }
  for (int i = 0; i < 4; ++i) store_global(params.out + thread * 8 + transposed * 4 + i, float_from_bits(back[i]));
  warp_sync();
}
FG_KERNEL(matrix_round_trip, Params, 256, 1) {
  store_and_load<true>(params, false);
  store_and_load<true>(params, true);
}
FG_KERNEL(matrix_store_in_order, Params, 256, 1) { store_and_load<true>(params, true); }
FG_KERNEL(matrix_store_unordered, Params, 256, 1) { store_and_load<false>(params, false); }

// Every lane of a warp reads one word, arrives for itself, and the writer of the next round waits for all.
FG_KERNEL(ordered_by_arrive_of_every_lane, Params, 256, 1) {
  if (thread_index() == 0) {
    mbarrier_init(barrier_at(0), 64);
    mbarrier_init(barrier_at(1), 1);
    fence_mbarrier_init();
  }
  block_sync();
  for (u32 round = 0; round < 4; ++round) {
    if (thread_index() == 128) {
      mbarrier_wait(barrier_at(0), (round & 1) ^ 1);
      store_shared(tile(), round);
      mbarrier_arrive(barrier_at(1));
    }
    if (thread_index() < 64) {
      mbarrier_wait(barrier_at(1), round & 1);
      load_shared<u32>(tile());
      mbarrier_arrive(barrier_at(0));
    }
  }
}
// Two warps pass a word back and forth; one side only arrives.
FG_KERNEL(ordered_by_named_barriers, Params, 256, 1) {
  const int warp = thread_index() / 32;
  for (u32 round = 0; round < 4; ++round) {
    if (warp == 0) {
      if (thread_index() == 0) store_shared(tile(), round);
      barrier_arrive(1, 64);
      barrier_sync(2, 64);
    }
    if (warp == 1) {
      barrier_sync(1, 64);
      load_shared<u32>(tile());
      barrier_arrive(2, 64);
    }
  }
}
