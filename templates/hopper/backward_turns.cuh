// Where tiles of keys find whose turn it is to add to dQ.
#pragma once
#include "backward_schedule.cuh"
#include "row_statistics.cuh"

namespace fg {

// A word per block of query rows, counted over all heads: the number of the tile of keys that adds next. They lie behind the sums.
template <class C>
FG_DEVICE u32* turns_of(const ForwardParams& forward) {
  const i64 blocks = static_cast<i64>(forward.batch) * forward.heads_q * ceil_div(forward.seqlen_q, C::BLOCK_Q);
  return reinterpret_cast<u32*>(RowStatistics(forward).sums + blocks * C::BLOCK_Q * operand_columns(C::HEAD_DIM));
}

// Whether any tile of keys adds to a block of query rows. The first of them stores, so the others find no sums.
template <class C>
FG_DEVICE bool is_summed(const ForwardParams& forward, int block) {
  const int key = first_tile_of<C>(forward, block) * C::KEY_ROWS;
  if (key >= forward.seqlen_kv) return false;
  const BlockRange<C> range(forward, key, C::KEY_ROWS);
  return block >= range.first && block < range.first + range.count;
}

}  // namespace fg
