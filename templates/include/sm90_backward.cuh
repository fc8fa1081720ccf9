// What backward kernels need of sm_90a beyond sm90.cuh: products of any shape and layout, bulk copies of consecutive bytes.
//
// A product is described by a type with
//   COLUMNS, STEPS             of the result, and 16-deep steps
//   LEFT_BY_COLUMNS, RIGHT_BY_COLUMNS   whether the depth runs over rows of the tile (a column operand) or along them (a row operand)
//   left_step(i), right_step(i)         what step i adds to the low word of a descriptor; constexpr
#pragma once
#include "sm90.cuh"
#if defined(FG_EMULATE)
#include "emu/sm90_backward.hpp"
#else
#include "ptx/sm90_backward.cuh"
#endif
