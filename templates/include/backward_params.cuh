// Parameters of backward kernels. flashgen/launch.py holds the twin.
#pragma once
#include "params.cuh"

namespace fg {

struct BackwardParams {
  ForwardParams forward;  // as the forward pass had them; o and lse are read, the workspace is the backward pass's own
  const void* dout;       // (batch, heads_q, seqlen_q, head_dim_v)
  const float* dlse;      // (batch, heads_q, seqlen_q), contiguous; null when nothing depends on lse
  void* dq;               // as q
  void* dk;               // as k
  void* dv;               // as v
  Strides dout_strides, dq_strides, dk_strides, dv_strides;
  float scale;  // softmax_scale
};

}  // namespace fg
