// The sums of dQ in a fixed order: at every block of query rows the tiles of keys that need it take turns, the first keys first.
//
// A thread for each half of dQ does so beside the products: the warps that stage dQ only wait for it when it is late by a whole block. No
// tile waits for one that begins later: tiles are drawn in the order of the turns, the first one of every CTA included, and a tile that
// nobody stands before always goes on. Tiles that do not need a block are not among its turns.
#pragma once
#include "backward_fused_base.cuh"
#include "backward_turns.cuh"
#include "words.cuh"

namespace fg {

template <class C>
struct OrderedSums {
  using Base = FusedBase<C>;
  using Shape = KeyShape<C>;
  static_assert(C::FUSED && !C::DIRECT && !C::ROTATE, "sums pass through shared memory, from the last block to the first");

  const BackwardParams& params;
  const u32 shared;
  const int half;    // of dQ
  u32 staged_parity = 0;

  FG_DEVICE void add(int block, u32 tile) {
    const u32 full = Shape::barrier(shared, Shape::STAGED_FULL + half), empty = Shape::barrier(shared, Shape::STAGED_EMPTY + half);
    const i64 place = static_cast<i64>(block) * 2 + half;
    u32* turn = turns_of<C>(params.forward) + place;
    await_word(turn, tile);
    mbarrier_wait(full, staged_parity);
    bulk_add(RowStatistics(params.forward).sums + place * Base::HALF, shared + static_cast<u32>(Shape::STAGING + half * Base::HALF * 4),
             Base::HALF * 4);
    bulk_commit();
    bulk_wait_read<0>();
    mbarrier_arrive(empty);
    bulk_wait<0>();
    publish_word(turn, tile + 1);
    staged_parity ^= 1;
  }

  FG_DEVICE void run() {
    TileQueue queue = Shape::queue(shared);
    FG_NO_UNROLL
    for (int tile = queue.read_alone(); tile != NO_TILE; tile = queue.read_alone()) {
      const KeyTile<C> place = KeyTile<C>::of(params.forward, tile);
      SummedBlocks<C> blocks(params.forward, place);
      FG_NO_UNROLL
      for (; blocks.walk.left > 0; blocks.advance()) add(blocks.number(), static_cast<u32>(place.key / C::KEY_ROWS));
    }
  }
};

}  // namespace fg
