// Which tile a CTA works on next, and which tiles of the other side belong to it.
#pragma once
#include "mapped_backward_params.cuh"
#include "mask.cuh"

namespace fg {

constexpr int NO_TILE = -1;

// Tiles of all heads in the order in which they should start: sections of SECTION heads, so that what the heads of a section read stays in
// the L2 cache; inside a section one tile of every head, then the next tile.
template <int SECTION>
struct WorkList {
  int steps, heads, tiles;

  FG_DEVICE WorkList(int steps_per_head, int head_count) : steps(steps_per_head), heads(head_count), tiles(steps_per_head * head_count) {}

  struct Item {
    int head, step;
  };
  FG_DEVICE Item item(int tile) const {
    const int per_section = SECTION * steps;
    const int section = tile / per_section, within = tile - section * per_section;
    const int section_heads = minimum(SECTION, heads - section * SECTION);
    const int step = within / section_heads;
    return {section * SECTION + within - step * section_heads, step};
  }
};

// The sequence of tiles of one CTA. One thread draws and publishes; a second producing thread and the consuming warps read.
struct TileQueue {
  static constexpr int SLOTS = 2, READERS = 9;

  u32 words, full, empty;  // shared memory: tile numbers, mbarriers
  int turn = 0;

  FG_DEVICE TileQueue(u32 words_at, u32 full_at, u32 empty_at) : words(words_at), full(full_at), empty(empty_at) {}

  FG_DEVICE static void initialise(u32 full_at, u32 empty_at, int readers = READERS) {
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(full_at + 8 * slot, 1);
      mbarrier_init(empty_at + 8 * slot, static_cast<u32>(readers));
    }
  }

  FG_DEVICE void publish(int tile) {
    const int slot = turn % SLOTS;
    mbarrier_wait(empty + 8 * slot, turn / SLOTS % 2 ^ 1);
    store_shared(words + 4 * slot, static_cast<u32>(tile));
    mbarrier_arrive(full + 8 * slot);
    ++turn;
  }
  // The tile after `tile`, from a counter that ends where it began: a launch draws exactly `tiles` times.
  FG_DEVICE static int draw(u32* counter, int tiles) {
    const int tile = static_cast<int>(grid_size()) + static_cast<int>(atomic_increment_wrap(counter, static_cast<u32>(tiles - 1)));
    return tile < tiles ? tile : NO_TILE;
  }
  // Likewise, but the first tile is drawn, too: a tile begins after all with lower numbers, whichever CTAs run. `tiles` + CTAs draws.
  FG_DEVICE static int draw_all(u32* counter, int tiles) {
    const int tile = static_cast<int>(atomic_increment_wrap(counter, static_cast<u32>(tiles + static_cast<int>(grid_size()) - 1)));
    return tile < tiles ? tile : NO_TILE;
  }
  FG_DEVICE int read_alone() {
    const int tile = wait_and_load();
    mbarrier_arrive(empty + 8 * (turn % SLOTS));
    ++turn;
    return tile;
  }
  FG_DEVICE int read() {  // all lanes of a warp
    const int tile = wait_and_load();
    warp_release(empty + 8 * (turn % SLOTS));
    ++turn;
    return tile;
  }

 private:
  FG_DEVICE int wait_and_load() const {
    const int slot = turn % SLOTS;
    mbarrier_wait(full + 8 * slot, turn / SLOTS % 2);
    return static_cast<int>(load_shared<u32>(words + 4 * slot));
  }
};

// A slot of a ring, and the parity of the round in which it is used.
template <int STAGES>
struct RingSlot {
  int stage = 0;
  u32 round = 0;

  FG_DEVICE RingSlot next() const { return stage + 1 == STAGES ? RingSlot{0, round ^ 1} : RingSlot{stage + 1, round}; }
};

// Query rows [first, last) that may see one of the keys [key, key + keys).
struct SeeingRows {
  int first, last;

  template <class C>
  FG_DEVICE static SeeingRows of(const ForwardParams& forward, int key, int keys) {
    const int row = key - forward.diagonal;  // the row whose diagonal meets the first key
    SeeingRows rows = {0, forward.seqlen_q};
    if constexpr (C::MASK == MASK_CAUSAL) rows.first = maximum(rows.first, row);
    if constexpr (C::MASK == MASK_WINDOW) {
      rows.first = maximum(rows.first, row - forward.window_right);
      rows.last = minimum(rows.last, row + keys + forward.window_left);
    }
    return rows;
  }
};

// The blocks of query rows that a tile of keys needs: the same ones in every query head of its group.
template <class C>
struct BlockRange {
  int first, count;  // in blocks of BLOCK_Q rows

  FG_DEVICE BlockRange(const ForwardParams& forward, int key, int keys) {
    const SeeingRows rows = SeeingRows::of<C>(forward, key, keys);
    first = rows.first / C::BLOCK_Q;
    count = maximum(0, ceil_div(rows.last, C::BLOCK_Q) - first);
    if (C::MASKED && rows.last <= rows.first) count = 0;
  }
};

// The first tile of keys that needs a block of query rows, if any does. The others that do follow it without a gap.
template <class C>
FG_DEVICE int first_tile_of(const ForwardParams& forward, int block) {
  if constexpr (C::MASK != MASK_WINDOW) return 0;
  return maximum(0, block * C::BLOCK_Q + forward.diagonal - forward.window_left) / C::KEY_ROWS;
}

// A tile of keys: the head of keys that it belongs to, its first key.
template <class C>
struct KeyTile {
  int batch, head_kv, key;

  FG_DEVICE static WorkList<C::HEAD_SECTION> list(const ForwardParams& forward) {
    return {ceil_div(forward.seqlen_kv, C::KEY_ROWS), forward.batch * forward.heads_kv};
  }
  // The first keys are seen by the most rows, so they start first.
  FG_DEVICE static KeyTile of(const ForwardParams& forward, int tile) {
    const auto item = list(forward).item(tile);
    const int batch = item.head / forward.heads_kv;
    return {batch, item.head - batch * forward.heads_kv, item.step * C::KEY_ROWS};
  }
};

// A tile of query rows. With a mask the last rows see the most keys, so they start first.
template <class C>
struct QueryTile {
  int batch, head, row;

  FG_DEVICE static WorkList<C::HEAD_SECTION> list(const ForwardParams& forward) {
    return {ceil_div(forward.seqlen_q, C::QUERY_ROWS), forward.batch * forward.heads_q};
  }
  FG_DEVICE static QueryTile of(const ForwardParams& forward, int tile) {
    const auto work = list(forward);
    const auto item = work.item(tile);
    const int batch = item.head / forward.heads_q, step = C::MASKED ? work.steps - 1 - item.step : item.step;
    return {batch, item.head - batch * forward.heads_q, step * C::QUERY_ROWS};
  }
};

template <int ROWS, int COLUMNS>
FG_DEVICE void load_tile(u32 target, const TensorMap* map, u32 barrier, int row, int head, int batch) {
  FG_UNROLL
  for (int chunk = 0; chunk < chunks_of(COLUMNS); ++chunk) {
    tma_load(target + static_cast<u32>(chunk * chunk_bytes(ROWS)), map, barrier, chunk * SWIZZLE_COLUMNS, row, head, batch, 0);
  }
}

}  // namespace fg
