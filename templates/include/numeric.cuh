// Element types and their conversions. Arithmetic is always float32; a conversion rounds to nearest even.
#pragma once
#include "platform.cuh"

namespace fg {

struct Half {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};
using Float = float;

template <class Element>
FG_DEVICE Element from_float(float x);
template <>
FG_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
FG_DEVICE Half from_float<Half>(float x) {
  return {half_from_float(x)};
}
// Integer arithmetic, because architectures before sm_80 have no instruction for it.
template <>
FG_DEVICE BFloat16 from_float<BFloat16>(float x) {
  const u32 bits = float_bits(x);
  const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<u16>(x == x ? rounded : 0x7FFFu)};
}

FG_DEVICE float to_float(float x) { return x; }
FG_DEVICE float to_float(Half x) { return half_to_float(x.bits); }
FG_DEVICE float to_float(BFloat16 x) { return float_from_bits(static_cast<u32>(x.bits) << 16); }

}  // namespace fg
