// Primitives of sm_90a, for a CPU. The twin for GPUs is ptx/sm90.cuh.j2, which says what each promises.
#pragma once

namespace fg {

struct alignas(128) TensorMap {
  unsigned char bytes[128];
};

FG_DEVICE int warp_uniform(int value) { return emu::broadcast(value); }
FG_DEVICE i64 grid_size() { return emu::grid_size(); }

// ---- global atomics ----

FG_DEVICE u32 atomic_increment_wrap(u32* address, u32 limit) {
  return emu::exchange_global(address, [](u32 old, u32 most) { return old >= most ? 0 : old + 1; }, limit, "atomic_increment_wrap");
}
FG_DEVICE u32 atomic_add(u32* address, u32 value) {
  return emu::exchange_global(address, [](u32 old, u32 operand) { return old + operand; }, value, "atomic_add");
}
FG_DEVICE float atomic_add(float* address, float value) {
  const auto add = [](u32 old, u32 operand) { return float_bits(float_from_bits(old) + float_from_bits(operand)); };
  return float_from_bits(emu::exchange_global(reinterpret_cast<u32*>(address), add, float_bits(value), "atomic_add"));
}

// ---- mbarriers ----

FG_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) { emu::init_mbarrier(barrier, arrivals); }
FG_DEVICE void fence_mbarrier_init() { emu::fence_mbarriers(); }
FG_DEVICE void mbarrier_expect(u32 barrier, u32 bytes) { emu::arrive_mbarrier(barrier, bytes, "mbarrier_expect"); }
FG_DEVICE void mbarrier_arrive(u32 barrier) { emu::arrive_mbarrier(barrier, 0, "mbarrier_arrive"); }
FG_DEVICE void mbarrier_wait(u32 barrier, u32 parity) { emu::wait_mbarrier(barrier, parity); }
FG_DEVICE void warp_release(u32 barrier) {
  warp_sync();
  if (thread_index() % 32 == 0) mbarrier_arrive(barrier);
}

// ---- bulk tensor copies ----

FG_DEVICE void prefetch_map(const TensorMap* map) { static_cast<void>(map); }
FG_DEVICE void tma_load(u32 target, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  emu::start_load(target, map, barrier, {c0, c1, c2, c3, c4});
}
FG_DEVICE void tma_store(const TensorMap* map, u32 source, int c0, int c1, int c2, int c3, int c4) {
  emu::start_store(map, source, {c0, c1, c2, c3, c4});
}
FG_DEVICE void bulk_commit() { emu::commit_stores(); }
template <int PENDING>
FG_DEVICE void bulk_wait() {
  emu::wait_stores(PENDING, true);
}
template <int PENDING>
FG_DEVICE void bulk_wait_read() {
  emu::wait_stores(PENDING, false);
}
FG_DEVICE void fence_proxy_async() { emu::fence_proxy(); }

// ---- named barriers, registers, matrix stores ----

FG_DEVICE void barrier_sync(int id, int threads) { emu::meet_named_barrier(id, threads, true); }
FG_DEVICE void barrier_arrive(int id, int threads) { emu::meet_named_barrier(id, threads, false); }

template <int REGISTERS>
FG_DEVICE void registers_decrease() {
  emu::set_registers(REGISTERS, false);
}
template <int REGISTERS>
FG_DEVICE void registers_increase() {
  emu::set_registers(REGISTERS, true);
}

FG_DEVICE void store_matrix_x4(u32 row_address, const u32 (&fragment)[4]) { emu::store_matrices(fragment, row_address, false); }
FG_DEVICE void store_matrix_x4_transposed(u32 row_address, const u32 (&fragment)[4]) { emu::store_matrices(fragment, row_address, true); }

// ---- warpgroup products ----

namespace emu {
template <class Element>
constexpr bool is_half = false;
template <>
constexpr bool is_half<Half> = true;

inline u64 descriptor(u32 low, u32 step) { return static_cast<u64>(DESCRIPTOR_HIGH) << 32 | (low + step); }
}  // namespace emu

template <int STEPS, class Element, int REGISTERS>
FG_DEVICE void score_product(float (&scores)[REGISTERS], u32 queries, u32 keys) {
  u64 a[STEPS], b[STEPS];
  for (int step = 0; step < STEPS; ++step) {
    a[step] = emu::descriptor(queries, row_operand_step(step, PRODUCT_ROWS));
    b[step] = emu::descriptor(keys, row_operand_step(step, 2 * REGISTERS));
  }
  emu::start_products({scores, nullptr, a, b, 2 * REGISTERS, STEPS, false, false, false, emu::is_half<Element>});
}
template <class Element, int REGISTERS, int WEIGHTS>
FG_DEVICE void output_product(float (&output)[REGISTERS], u32 (&weights)[WEIGHTS], u32 values) {
  u64 b[WEIGHTS / 4];
  for (int step = 0; step < WEIGHTS / 4; ++step) b[step] = emu::descriptor(values, column_operand_step(step));
  emu::start_products({output, weights, nullptr, b, 2 * REGISTERS, WEIGHTS / 4, true, false, true, emu::is_half<Element>});
}
template <int PENDING, class... Registers>
FG_DEVICE void wgmma_wait(Registers&... pinned) {
  emu::wait_products(PENDING);
}

}  // namespace fg
