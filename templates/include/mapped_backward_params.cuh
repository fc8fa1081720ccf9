// Parameters of backward kernels that copy whole tiles through tensor maps. flashgen/launch.py holds the twin.
#pragma once
#include "backward_params.cuh"
#include "sm90_backward.cuh"

namespace fg {

// Dims (columns, rows, heads, batch); boxes of 64 columns and as many rows as the search space says. A map that the space does not name is
// zero bytes. The second set describes the same tensors in other boxes, for a loop of its own over the gradients of queries.
struct MappedBackwardParams {
  TensorMap q, k, v, dout;
  TensorMap query_q, query_k, query_v, query_dout;
  BackwardParams problem;
  u32* counters;  // zero between launches, or null
};

}  // namespace fg
