// May a query row see a key? The one place that knows; tile bounds and the element test follow from the same two limits.
#pragma once
#include "params.cuh"

namespace fg {

enum MaskKind : int { MASK_NONE = 0, MASK_CAUSAL = 1, MASK_WINDOW = 2 };

// Key columns [first, last] that a query row sees; empty when last < first.
struct VisibleKeys {
  int first, last;
};

template <class C>
FG_DEVICE VisibleKeys visible_keys(const ForwardParams& params, int row) {
  const int diagonal = row + params.diagonal;
  VisibleKeys keys = {0, params.seqlen_kv - 1};
  if constexpr (C::MASK == MASK_CAUSAL) keys.last = minimum(keys.last, diagonal);
  if constexpr (C::MASK == MASK_WINDOW) {
    keys.first = maximum(keys.first, diagonal - params.window_left);
    keys.last = minimum(keys.last, diagonal + params.window_right);
  }
  return keys;
}

// The KV tiles [first, last) that query rows [row, row + rows) need, and which of them hold an element that must be hidden.
template <class C>
struct TileRange {
  int first, last;
  int whole_first, whole_last;  // columns [whole_first, whole_last] are seen by every row

  FG_DEVICE TileRange(const ForwardParams& params, int row, int rows) {
    const VisibleKeys top = visible_keys<C>(params, row);
    const VisibleKeys bottom = visible_keys<C>(params, minimum(row + rows, params.seqlen_q) - 1);
    first = top.first / C::BLOCK_KV;
    last = maximum(first, ceil_div(maximum(bottom.last + 1, 0), C::BLOCK_KV));
    whole_first = bottom.first;
    whole_last = top.last;
  }
  FG_DEVICE int count() const { return last - first; }
  FG_DEVICE bool needs_mask(int tile) const {
    return (tile + 1) * C::BLOCK_KV - 1 > whole_last || (C::MASK == MASK_WINDOW && tile * C::BLOCK_KV < whole_first);
  }
};

}  // namespace fg
