// Parameters of backward kernels that copy whole tiles through tensor maps. tests/hopper_backward_kernels.py holds the twin.
#pragma once
#include "backward_params.cuh"
#include "sm90_backward.cuh"

namespace fg {

struct MappedBackwardParams {
  TensorMap q, k, v, dout;  // for the gradients of keys and values: boxes of block_q, key_rows, key_rows, block_q rows
  TensorMap query_q, query_k, query_v, query_dout;  // for the gradients of queries: boxes of 64, block_kv, block_kv, 64 rows
  BackwardParams problem;
  u32* counters;  // zero between launches: a word for each launch that draws tiles
};

}  // namespace fg
