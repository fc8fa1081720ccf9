// Zeros where dQ is going to be summed, without a pass over memory of their own: a tile of keys clears what tiles far behind it add to.
//
// Sums lie in the order of the work list, section after section. The tiles of a section, which start long before those of the section
// some places ahead, store a share each of its zeros and count themselves; a tile is only begun when its section is complete. Every tile
// waits for tiles with lower numbers, which have been drawn before it, so the first of all that are under way never waits.
#pragma once
#include "backward_schedule.cuh"
#include "row_statistics.cuh"
#include "words.cuh"

namespace fg {

template <class C>
struct SumSections {
  const ForwardParams& forward;
  const WorkList<C::HEAD_SECTION> list;

  FG_DEVICE explicit SumSections(const ForwardParams& given) : forward(given), list(KeyTile<C>::list(given)) {}

  FG_DEVICE int count() const { return ceil_div(list.heads, C::HEAD_SECTION); }
  FG_DEVICE int tiles() const { return C::HEAD_SECTION * list.steps; }  // of a section, unless it is the last
  // Sections that the first launch clears: those that begin less than CLEAR_AHEAD tiles after the first.
  FG_DEVICE int cleared_first() const {
    if (C::CLEAR_AHEAD == 0 || list.steps == 0) return count();
    return minimum(count(), ceil_div(C::CLEAR_AHEAD, tiles()));
  }
  // Vectors of sums before a section.
  FG_DEVICE u32 vectors(int section) const {
    const int heads = minimum(section * C::HEAD_SECTION, list.heads) * (forward.heads_q / forward.heads_kv);
    const int blocks = ceil_div(forward.seqlen_q, C::BLOCK_Q);
    return static_cast<u32>(heads) * static_cast<u32>(blocks) * (C::BLOCK_Q * operand_columns(C::HEAD_DIM) / 4);
  }
  // How many tiles have cleared their share of it; the words lie behind the sums.
  FG_DEVICE u32* cleared(int section) const {
    return reinterpret_cast<u32*>(RowStatistics(forward).sums + static_cast<i64>(vectors(count())) * 4) + section;
  }

  // By one thread, before a tile begins.
  FG_DEVICE void await(int tile) const {
    const int section = tile / tiles();
    if (section >= cleared_first()) await_word(cleared(section), static_cast<u32>(tiles()));
  }
  // A tile's share of the section that it clears, by all lanes of a warp.
  FG_DEVICE void clear(int tile, int lane) const {
    const int own = tile / tiles(), section = own + cleared_first();
    if (section >= count()) return;
    const u32 begin = vectors(section), share = (vectors(section + 1) - begin) / static_cast<u32>(tiles()) + 1;
    const u32 first = begin + static_cast<u32>(tile - own * tiles()) * share;
    const u32 last = first + share < vectors(section + 1) ? first + share : vectors(section + 1);
    Vector16* sums = reinterpret_cast<Vector16*>(RowStatistics(forward).sums);
    for (u32 index = first + static_cast<u32>(lane); index < last; index += WARP_LANES) store_global(sums + index, Vector16{{0, 0, 0, 0}});
    warp_sync();
    if (lane == 0) count_word(cleared(section));
  }
};

// The warp beside the products that clears.
template <class C>
FG_DEVICE void clear_ahead(const ForwardParams& forward, TileQueue queue, int lane) {
  const SumSections<C> sections(forward);
  FG_NO_UNROLL
  for (int tile = queue.read(); tile != NO_TILE; tile = queue.read()) sections.clear(tile, lane);
}

}  // namespace fg
