// Named barriers and sums in global memory, for a CPU. The twin for GPUs is ptx/exchange.cuh, which says what each promises.
#pragma once

namespace fg {

FG_DEVICE void barrier_sync(int id, int threads) { emu::meet_named_barrier(id, threads, true); }
FG_DEVICE void barrier_arrive(int id, int threads) { emu::meet_named_barrier(id, threads, false); }

FG_DEVICE void add_to_sums(float* sums, int lane, const float (&value)[4]) {
  const auto add = [](u32 old, u32 operand) { return float_bits(float_from_bits(old) + float_from_bits(operand)); };
  for (int i = 0; i < 4; ++i) emu::exchange_global(reinterpret_cast<u32*>(sums + lane * 4 + i), add, float_bits(value[i]), "add_to_sums");
}
FG_DEVICE void load_sums(float (&value)[4], const float* sums, int lane) {
  for (int i = 0; i < 4; ++i) value[i] = load_global(sums + lane * 4 + i);
}

}  // namespace fg
