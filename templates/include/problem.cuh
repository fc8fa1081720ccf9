// Where one CTA stands in the problem: its batch, heads and query rows, and the first elements of its operands.
#pragma once
#include "numeric.cuh"
#include "params.cuh"

namespace fg {

// In which order consecutive CTAs walk over query tiles and heads.
enum TileOrder : int {
  TILES_FIRST = 0,  // all query tiles of one head, then the next head: K and V of few heads are in flight, which suits the L2 cache
  HEADS_FIRST = 1,  // one query tile of every head, then the next tile: with a mask, the longest tiles of all heads start first
};

struct Place {
  int batch, head_q, head_kv;
  int first_row;  // of the query tile
};

// Masked kernels start at the last query tile: under a causal mask it is the longest, and short tiles fill the gaps at the end.
template <class C>
FG_DEVICE Place place_of_block(const ForwardParams& params, i64 block) {
  const int tiles = ceil_div(params.seqlen_q, C::BLOCK_Q);
  const int heads = params.batch * params.heads_q;
  const bool tiles_first = C::TILE_ORDER == TILES_FIRST;
  const int batch_head = static_cast<int>(tiles_first ? block / tiles : block % heads);
  const int step = static_cast<int>(tiles_first ? block % tiles : block / heads);
  const int tile = C::MASKED ? tiles - 1 - step : step;
  const int head_q = batch_head % params.heads_q;
  return {batch_head / params.heads_q, head_q, head_q / (params.heads_q / params.heads_kv), tile * C::BLOCK_Q};
}

template <class Element>
FG_DEVICE const Element* head_of(const void* tensor, const Strides& strides, int batch, int head) {
  return static_cast<const Element*>(tensor) + batch * strides.batch + head * strides.head;
}
template <class Element>
FG_DEVICE Element* head_of(void* tensor, const Strides& strides, int batch, int head) {
  return static_cast<Element*>(tensor) + batch * strides.batch + head * strides.head;
}
FG_DEVICE float* lse_of(const ForwardParams& params, const Place& place) {
  return params.lse + (static_cast<i64>(place.batch) * params.heads_q + place.head_q) * params.seqlen_q;
}

}  // namespace fg
