// What the host hands to a kernel, by value. flashgen/launch.py holds the twin of each struct; a test compares their offsets.
#pragma once
#include "platform.cuh"

namespace fg {

// Distances in elements between neighbours of a (batch, heads, rows, columns) tensor; the last one is always 1.
struct Strides {
  i64 batch, head, row;
};

struct ForwardParams {
  const void* q;    // (batch, heads_q, seqlen_q, head_dim)
  const void* k;    // (batch, heads_kv, seqlen_kv, head_dim)
  const void* v;    // (batch, heads_kv, seqlen_kv, head_dim_v)
  void* o;          // (batch, heads_q, seqlen_q, head_dim_v)
  float* lse;       // (batch, heads_q, seqlen_q), contiguous: natural log of the sum of exp of the scaled scores
  void* workspace;  // family specific; null when the family asks for none
  Strides q_strides, k_strides, v_strides, o_strides;
  int batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  int diagonal;       // key column on the diagonal of query row 0: seqlen_kv - seqlen_q (bottom right) or 0 (top left)
  int window_left;    // keys visible left of the diagonal; only read by windowed kernels
  int window_right;   // keys visible right of the diagonal; only read by windowed kernels
  float scale_log2;   // softmax_scale * log2(e)
  int vector_access;  // 1 when every row of every tensor starts on a 16-byte boundary
};

}  // namespace fg
