// Part of runtime.cpp: products of one warp.
#pragma once
#include "collectives.hpp"

namespace fg::emu {
namespace {

float bits_to_float(u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Branch-free, so that a loop over it can be vectorised.
inline float decode_half(u32 bits) {
  const u32 size = bits & 0x7FFFu;
  u32 scaled;
  const float value = bits_to_float(size << 13) * 0x1p112f;
  std::memcpy(&scaled, &value, 4);
  scaled |= size >= 0x7C00u ? 0x7F800000u : 0u;
  return bits_to_float(scaled | (bits & 0x8000u) << 16);
}
inline float decode_bfloat16(u32 bits) { return bits_to_float(bits << 16); }

using FragmentA =
    float[4][2][LANES];  // [register][half][lane]: element (lane / 4 + 8 * (register % 2), column_of(lane, half) + 8 * (register / 2))
using Row = float __attribute__((vector_size(32)));

// Fragments stay in the order of lanes here, so that decoding is one long loop.
template <float (*DECODE)(u32)>
void decode_lanes(const u32 (&words)[LANES], float (&low)[LANES], float (&high)[LANES]) {
  for (int lane = 0; lane < LANES; ++lane) {
    low[lane] = DECODE(words[lane] & 0xFFFFu);
    high[lane] = DECODE(words[lane] >> 16);
  }
}

template <float (*DECODE)(u32)>
void decode_fragments(const Rendezvous& meeting, FragmentA& a, float (&b)[16][8]) {
  for (int part = 0; part < 4; ++part) decode_lanes<DECODE>(meeting.a[part], a[part][0], a[part][1]);
  for (int part = 0; part < 2; ++part) {
    float low[LANES], high[LANES];
    decode_lanes<DECODE>(meeting.b[part], low, high);
    for (int lane = 0; lane < LANES; ++lane) {
      b[part * 8 + lane % 4 * 2][lane / 4] = low[lane];
      b[part * 8 + lane % 4 * 2 + 1][lane / 4] = high[lane];
    }
  }
}

// Sixteen products summed in the order of k, then added to the accumulator.
void multiply_all(Rendezvous& meeting) {
  FragmentA a;
  alignas(32) float b[16][8];
  alignas(32) float sum[16][8];
  meeting.is_half ? decode_fragments<decode_half>(meeting, a, b) : decode_fragments<decode_bfloat16>(meeting, a, b);
  for (int row = 0; row < 16; ++row) {
    Row line;
    for (int k = 0; k < 16; ++k) {
      const float factor = a[row / 8 + k / 8 * 2][k % 2][row % 8 * 4 + k % 8 / 2];
      const Row product = factor * *reinterpret_cast<const Row*>(b[k]);
      line = k ? line + product : product;
    }
    *reinterpret_cast<Row*>(sum[row]) = line;
  }
  for (int lane = 0; lane < LANES; ++lane) {
    for (int part = 0; part < 4; ++part) meeting.d[lane][part] += sum[lane / 4 + part / 2 * 8][lane % 4 * 2 + part % 2];
  }
}

}  // namespace

void multiply_tile(float* d, const u32* a, u32 b0, u32 b1, bool is_half) {
  meet(
      Collective::MULTIPLY,
      [&](Rendezvous& meeting, int lane) {
        meeting.d[lane] = d;
        for (int part = 0; part < 4; ++part) meeting.a[part][lane] = a[part];
        meeting.b[0][lane] = b0;
        meeting.b[1][lane] = b1;
        meeting.is_half = is_half;
      },
      [](Warp& warp) {
        multiply_all(warp.rendezvous);
        ++counters.multiplies;
      });
}
}  // namespace fg::emu
