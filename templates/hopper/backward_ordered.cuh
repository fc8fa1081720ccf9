// The sums of dQ in a fixed order: at every block of query rows the tiles of keys that need it take turns, the first keys first.
//
// Two threads do so beside the products, each for every second block, so that one can wait for its turn while the sums of the other find
// their way to global memory. The warps that stage dQ only wait for a block that is late as a whole. No tile waits for one that begins
// later: tiles are drawn in the order of the turns, the first one of every CTA included, and of all that have begun the first never waits.
// Tiles that do not need a block are not among its turns.
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
  const u32 which;  // of the two threads
  u32 staged = 0;   // blocks so far

  // A half as soon as it is staged, and its shared memory back as soon as it is read. The first tile stores, so nothing has to be zero.
  FG_DEVICE void add_half(int half, int block, bool first) const {
    float* sums = RowStatistics(params.forward).sums + (static_cast<i64>(block) * 2 + half) * Base::HALF;
    const u32 source = shared + static_cast<u32>(Shape::STAGING + half * Base::HALF * 4);
    mbarrier_wait(Base::staged_full(shared, half, staged), staged / 2 % 2);
    if (first) {
      bulk_store(sums, source, Base::HALF * 4);
    } else {
      bulk_add(sums, source, Base::HALF * 4);
    }
    bulk_commit();
    bulk_wait_read<0>();
    mbarrier_arrive(Shape::barrier(shared, Shape::STAGED_EMPTY + half));
  }
  FG_DEVICE void add(const SummedBlocks<C>& blocks, int tile) const {
    const int block = blocks.number();
    const bool first = tile == first_tile_of<C>(params.forward, blocks.walk.block);
    u32* turn = turns_of<C>(params.forward) + block;
    await_word(turn, static_cast<u32>(tile));
    add_half(0, block, first);
    add_half(1, block, first);
    bulk_wait<0>();
    publish_word(turn, static_cast<u32>(tile + 1));
  }

  FG_DEVICE void run() {
    TileQueue queue = Shape::queue(shared);
    FG_NO_UNROLL
    for (int tile = queue.read_alone(); tile != NO_TILE; tile = queue.read_alone()) {
      const KeyTile<C> place = KeyTile<C>::of(params.forward, tile);
      SummedBlocks<C> blocks(params.forward, place);
      FG_NO_UNROLL
      for (; blocks.walk.left > 0; blocks.advance()) {
        if (staged % 2 == which) add(blocks, place.key / C::KEY_ROWS);
        ++staged;
      }
    }
  }
};

}  // namespace fg
