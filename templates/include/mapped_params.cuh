// Parameters of kernels that copy whole tiles through tensor maps. flashgen/launch.py holds the twin.
#pragma once
#include "params.cuh"
#include "sm90.cuh"

namespace fg {

struct MappedForwardParams {
  TensorMap q, k, v, o;  // dims (columns, rows, heads, batch); boxes of 64 columns and as many rows as the search space says
  ForwardParams problem;
  u32* counters;  // zero between launches: one word for the tile counter, or null
};

}  // namespace fg
