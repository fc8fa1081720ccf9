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

constexpr int NO_ROW = -1;  // first row of the place after the last

// A query tile holds rows of GROUP_PACK heads, which share their keys and values: few positions of many heads, where there are few rows.
template <class C>
constexpr int POSITIONS_PER_TILE = C::BLOCK_Q / C::GROUP_PACK;

// Packs of heads are taken in sections whose keys and values fit the L2 cache together; within a section, masked kernels start the last
// query tile of every pack first, since it is the longest.
template <class C>
struct WorkOrder {
  int q_tiles, packs, tiles;  // query tiles of one pack; packs of all batches

  FG_DEVICE explicit WorkOrder(const ForwardParams& params)
      : q_tiles(ceil_div(params.seqlen_q, POSITIONS_PER_TILE<C>)),
        packs(params.batch * params.heads_q / C::GROUP_PACK),
        tiles(q_tiles * packs) {}

  FG_DEVICE Place place(const ForwardParams& params, int tile) const {
    const int per_section = C::HEAD_SECTION * q_tiles;
    const int section = tile / per_section, within = tile - section * per_section;
    const int mixed = minimum(C::HEAD_SECTION, packs - section * C::HEAD_SECTION);
    const int step = within / mixed;
    const int first_head = (section * C::HEAD_SECTION + (within - step * mixed)) * C::GROUP_PACK;
    const int batch = first_head / params.heads_q, head_q = first_head - batch * params.heads_q;
    const int q_tile = C::MASKED ? q_tiles - 1 - step : step;
    return {batch, head_q, head_q / (params.heads_q / params.heads_kv), q_tile * POSITIONS_PER_TILE<C>};
  }
};

// The numbers of the tiles of one CTA, as its producer draws them.
template <class C>
struct TileDraw {
  int next_tile = static_cast<int>(block_index());
  bool drawn = false;

  // The next tile, or `tiles`. With a counter, exactly `tiles` draws happen in a launch, so it wraps to where it was.
  FG_DEVICE int draw(const MappedForwardParams& params, int tiles) {
    const int tile = C::SCHEDULER == SCHEDULER_GRID && drawn ? tiles : minimum(next_tile, tiles);
    drawn = true;
    next_tile = static_cast<int>(grid_size()) + next_tile;
    if constexpr (C::SCHEDULER == SCHEDULER_DYNAMIC) {
      if (tile < tiles) next_tile = static_cast<int>(grid_size()) + static_cast<int>(atomic_increment_wrap(params.counters, tiles - 1));
    }
    return tile;
  }
};

// The places of the tiles of one CTA, handed on in shared memory: the producer publishes, everybody else reads.
template <class C>
struct PlaceSequence {
  static constexpr int SLOTS = 2, BYTES = 16;                     // of a place
  static constexpr int READERS = 4 * C::CONSUMER_WARPGROUPS + 1;  // the consumers' warps and the query producer

  u32 places, full, empty;  // shared memory: the slots, mbarriers
  int turn = 0;

  FG_DEVICE PlaceSequence(u32 places_at, u32 full_at, u32 empty_at) : places(places_at), full(full_at), empty(empty_at) {}

  FG_DEVICE static void initialise(u32 full_at, u32 empty_at) {
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(full_at + 8 * slot, 1);
      mbarrier_init(empty_at + 8 * slot, READERS);
    }
  }

  FG_DEVICE void publish(const Place& place) {
    const int slot = turn % SLOTS;
    mbarrier_wait(empty + 8 * slot, turn / SLOTS % 2 ^ 1);
    store_shared(places + BYTES * slot, Vector16{{static_cast<u32>(place.batch), static_cast<u32>(place.head_q),
                                                  static_cast<u32>(place.head_kv), static_cast<u32>(place.first_row)}});
    mbarrier_arrive(full + 8 * slot);
    ++turn;
  }
  // A single reading thread.
  FG_DEVICE Place read_alone() {
    const Place place = wait_and_load();
    mbarrier_arrive(empty + 8 * (turn % SLOTS));
    ++turn;
    return place;
  }
  // All lanes of a warp.
  FG_DEVICE Place read() {
    const Place place = wait_and_load();
    warp_release(empty + 8 * (turn % SLOTS));
    ++turn;
    // The compiler keeps what it knows to be uniform, ring slots and descriptors first of all, out of the lanes' registers.
    return {warp_uniform(place.batch), warp_uniform(place.head_q), warp_uniform(place.head_kv), warp_uniform(place.first_row)};
  }

 private:
  FG_DEVICE Place wait_and_load() const {
    const int slot = turn % SLOTS;
    mbarrier_wait(full + 8 * slot, turn / SLOTS % 2);
    const Vector16 words = load_shared<Vector16>(places + BYTES * slot);
    return {static_cast<int>(words.word[0]), static_cast<int>(words.word[1]), static_cast<int>(words.word[2]),
            static_cast<int>(words.word[3])};
  }
};

}  // namespace fg
