// Where the text runs: on a GPU (ptx/) or on a CPU against the emulation headers (emu/). Below this file, the text is the same for both.
#pragma once
#if defined(FG_EMULATE)
#include "emu/common.hpp"
#else
#include "ptx/common.cuh"
#endif

namespace fg {

FG_DEVICE constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }
FG_DEVICE constexpr int minimum(int a, int b) { return a < b ? a : b; }
FG_DEVICE constexpr int maximum(int a, int b) { return a > b ? a : b; }

constexpr int WARP_LANES = 32;
constexpr float LN_2 = 0.693147180559945309f;
FG_DEVICE float infinity() { return float_from_bits(0x7F800000u); }

}  // namespace fg
