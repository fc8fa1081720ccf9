// Which query tile a CTA computes next. Tiles are counted in the order in which they should start.
#pragma once
#include "mapped_params.cuh"
#include "problem.cuh"

namespace fg {

enum Scheduler : int {
  SCHEDULER_GRID = 0,     // one CTA per tile
  SCHEDULER_STATIC = 1,   // as many CTAs as fit the device, each takes every grid-th tile
  SCHEDULER_DYNAMIC = 2,  // the same, but a CTA draws its next tile from a counter that ends where it began
};

constexpr int NO_TILE = -1;

// Heads are taken in sections whose keys and values fit the L2 cache together; within a section, masked kernels start the last query tile
// of every head first, since it is the longest.
template <class C>
struct WorkOrder {
  int q_tiles, batch_heads, tiles;

  FG_DEVICE explicit WorkOrder(const ForwardParams& params)
      : q_tiles(ceil_div(params.seqlen_q, C::BLOCK_Q)), batch_heads(params.batch * params.heads_q), tiles(q_tiles * batch_heads) {}

  FG_DEVICE Place place(const ForwardParams& params, int tile) const {
    const int per_section = C::HEAD_SECTION * q_tiles;
    const int section = tile / per_section, within = tile - section * per_section;
    const int heads = minimum(C::HEAD_SECTION, batch_heads - section * C::HEAD_SECTION);
    const int step = within / heads;
    const int batch_head = section * C::HEAD_SECTION + (within - step * heads);
    const int batch = batch_head / params.heads_q, head_q = batch_head - batch * params.heads_q;
    const int q_tile = C::MASKED ? q_tiles - 1 - step : step;
    return {batch, head_q, head_q / (params.heads_q / params.heads_kv), q_tile * C::BLOCK_Q};
  }
};

// The sequence of tiles of one CTA as one of its roles sees it. The producer draws and publishes; the others read what it published.
template <class C>
struct TileSequence {
  static constexpr int SLOTS = 2;
  static constexpr int READERS = 4 * C::CONSUMER_WARPGROUPS + 1;  // the consumers' warps and the query producer

  u32 words, full, empty;  // shared memory: tile numbers, mbarriers
  int next_tile, turn = 0;

  FG_DEVICE TileSequence(u32 words_at, u32 full_at, u32 empty_at)
      : words(words_at), full(full_at), empty(empty_at), next_tile(static_cast<int>(block_index())) {}

  FG_DEVICE static void initialise(u32 full_at, u32 empty_at) {
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(full_at + 8 * slot, 1);
      mbarrier_init(empty_at + 8 * slot, READERS);
    }
  }

  // Producer: the next tile, or NO_TILE. Exactly `tiles` draws happen in a launch, so the counter wraps to where it was.
  FG_DEVICE int draw(const MappedForwardParams& params, int tiles) {
    const int tile = next_tile < tiles && (C::SCHEDULER != SCHEDULER_GRID || turn == 0) ? next_tile : NO_TILE;
    if constexpr (C::SCHEDULER == SCHEDULER_DYNAMIC) {
      publish(tile);
      if (tile != NO_TILE) next_tile = static_cast<int>(grid_size()) + static_cast<int>(atomic_increment_wrap(params.counters, tiles - 1));
    } else {
      next_tile += static_cast<int>(grid_size());
      ++turn;
    }
    return tile;
  }
  // A single reading thread.
  FG_DEVICE int read_alone(int tiles) {
    if constexpr (C::SCHEDULER == SCHEDULER_DYNAMIC) {
      const int tile = wait_and_load();
      mbarrier_arrive(empty + 8 * (turn % SLOTS));
      ++turn;
      return tile;
    } else {
      return step(tiles);
    }
  }
  // All lanes of a warp.
  FG_DEVICE int read(int tiles) {
    if constexpr (C::SCHEDULER == SCHEDULER_DYNAMIC) {
      const int tile = wait_and_load();
      warp_release(empty + 8 * (turn % SLOTS));
      ++turn;
      return tile;
    } else {
      return step(tiles);
    }
  }

 private:
  FG_DEVICE int step(int tiles) {
    const int tile = next_tile < tiles && (C::SCHEDULER != SCHEDULER_GRID || turn == 0) ? next_tile : NO_TILE;
    next_tile += static_cast<int>(grid_size());
    ++turn;
    return tile;
  }
  FG_DEVICE void publish(int tile) {
    const int slot = turn % SLOTS;
    mbarrier_wait(empty + 8 * slot, turn / SLOTS % 2 ^ 1);
    store_shared(words + 4 * slot, static_cast<u32>(tile));
    mbarrier_arrive(full + 8 * slot);
    ++turn;
  }
  FG_DEVICE int wait_and_load() const {
    const int slot = turn % SLOTS;
    mbarrier_wait(full + 8 * slot, turn / SLOTS % 2);
    return static_cast<int>(load_shared<u32>(words + 4 * slot));
  }
};

}  // namespace fg
