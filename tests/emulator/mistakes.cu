// Kernels that each break one rule, and the correct form of some.
#include "sm80.cuh"

struct Params {
  const float* in;
  float* out;
  int count;
};

using namespace fg;

FG_KERNEL(shared_overrun, Params, 64, 1) { store_shared(dynamic_shared() + 16 * thread_index(), Vector16{}); }
FG_KERNEL(shared_underrun, Params, 64, 1) { load_shared<u32>(dynamic_shared() - 4); }
FG_KERNEL(shared_misaligned, Params, 64, 1) { store_shared(dynamic_shared() + 4 * (thread_index() % 2), Vector16{}); }
FG_KERNEL(copy_misaligned, Params, 64, 1) { copy_async_16(dynamic_shared() + thread_index() * 16, params.in + 1, true); }
FG_KERNEL(global_overrun, Params, 64, 1) {
  store_global(params.out + thread_index(), load_global(params.in + thread_index() + params.count - 63));
}
FG_KERNEL(global_overrun_of_copy, Params, 64, 1) { copy_async_16(dynamic_shared(), params.in + params.count, thread_index() == 5); }
FG_KERNEL(global_misaligned, Params, 64, 1) { load_global(reinterpret_cast<const Vector16*>(params.in + 1)); }
FG_KERNEL(writes_input, Params, 64, 1) { store_global(const_cast<float*>(params.in), 1.0f); }

FG_KERNEL(divergent_barrier, Params, 64, 1) {
  if (thread_index() < 40) block_sync();
}
FG_KERNEL(barrier_against_collective, Params, 64, 1) {
  if (thread_index() % 32 < 16) {
    block_sync();
  } else {
    warp_sync();
  }
}
FG_KERNEL(different_collectives, Params, 64, 1) {
  if (thread_index() % 2) {
    warp_sync();
  } else {
    store_global(params.out + thread_index(), shuffle_xor(1.0f, 1));
  }
}
FG_KERNEL(unwritten_shared, Params, 64, 1) {
  store_global(params.out + thread_index(), load_shared<float>(dynamic_shared() + 4 * thread_index()));
}
FG_KERNEL(endless, Params, 64, 1) {
  volatile int forever = 1;
  while (forever) {
  }
}
FG_KERNEL(wild_pointer, Params, 64, 1) {
  if (thread_index() == 33) *reinterpret_cast<volatile int*>(8) = 1;
}
FG_KERNEL(deep_recursion, Params, 64, 1) {
  struct Deep {
    static int sink(int depth) {
      volatile char frame[1024];
      frame[depth % 1024] = static_cast<char>(depth);
      return depth == 1000000 ? 0 : sink(depth + 1) + frame[depth % 1024];
    }
  };
  store_global(params.out, static_cast<float>(Deep::sink(0)));
}

// Lane l reads what its neighbour wrote. Shuffles do not order shared memory.
template <int BARRIER>
FG_DEVICE void neighbours(const Params& params) {
  const u32 base = dynamic_shared();
  const int thread = thread_index();
  store_shared(base + 4 * thread, static_cast<float>(thread));
  if (BARRIER == 1) warp_sync();
  if (BARRIER == 2) shuffle_xor(0u, 1);
  store_global(params.out + thread, load_shared<float>(base + 4 * (thread ^ 1)));
}
FG_KERNEL(neighbours_in_order, Params, 64, 1) { neighbours<1>(params); }
FG_KERNEL(neighbours_unordered, Params, 64, 1) { neighbours<0>(params); }
FG_KERNEL(neighbours_after_shuffle, Params, 64, 1) { neighbours<2>(params); }

// A warp barrier orders nothing between warps.
FG_KERNEL(warps_unordered, Params, 64, 1) {
  store_shared(dynamic_shared() + 4 * thread_index(), 1u);
  warp_sync();
  load_shared<u32>(dynamic_shared() + 4 * (thread_index() ^ 32));
}
FG_KERNEL(write_after_read, Params, 64, 1) {
  const u32 address = dynamic_shared() + 4 * (thread_index() / 2);
  store_shared(dynamic_shared() + 4 * thread_index(), 1u);
  block_sync();
  load_shared<u32>(address);
  if (thread_index() % 2) store_shared(address, 2u);
}
FG_KERNEL(own_copy_overwritten, Params, 64, 1) {
  const u32 address = dynamic_shared() + 16 * thread_index();
  copy_async_16(address, params.in, true);
  store_shared(address, 1.0f);
}
// Harmless: all threads store one value, halves of a word belong to different threads, and a pattern of reads and barriers.
FG_KERNEL(harmless, Params, 64, 1) {
  const u32 base = dynamic_shared();
  const int thread = thread_index();
  store_shared(base + 512, 7u);
  store_shared(base + 2 * thread, static_cast<u16>(thread));
  warp_sync();
  load_shared<u16>(base + 2 * (thread ^ 3));
  warp_sync();
  store_shared(base + 2 * thread, static_cast<u16>(1));
  block_sync();
  store_global(params.out + thread, static_cast<float>(load_shared<u32>(base + 512)));
  block_sync();
  if (thread == 63) store_shared(base + 512, 8u);
}
FG_KERNEL(block_numbers, Params, 64, 1) {
  store_shared(dynamic_shared() + 4 * thread_index(), static_cast<u32>(thread_index()));
  block_sync();
  const u32 other = load_shared<u32>(dynamic_shared() + 4 * (63 - thread_index()));
  if (thread_index() == 0) store_global(params.out + block_index(), static_cast<float>(block_index()) + other);
}
// Thread t reads word 32 t: all of one bank; then 16 bytes at a pitch of 128 bytes.
FG_KERNEL(bank_conflicts, Params, 64, 1) {
  const u32 base = dynamic_shared();
  store_shared(base + 128 * (thread_index() % 32), 1u);
  warp_sync();
  store_shared(base + 4 * (thread_index() % 32), 1u);
  warp_sync();
  load_shared<Vector16>(base + 128 * (thread_index() % 32));
  warp_sync();
}
FG_KERNEL(arithmetic, Params, 64, 1) {
  const i64 index = block_index() * 64 + thread_index();
  if (index >= params.count) return;
  const float x = load_global(params.in + index);
  store_global(params.out + index, exp2_approx(x));
  store_global(params.out + params.count + index, float_from_bits(pack_pair(x, -x, Half{})));
  store_global(params.out + 2 * params.count + index, float_from_bits(pack_pair(x, -x, BFloat16{})));
  store_global(params.out + 3 * params.count + index, half_to_float(static_cast<u16>(float_bits(x) >> 16)));
}
