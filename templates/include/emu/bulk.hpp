// Part of runtime.cpp: bulk tensor copies between global and shared memory.
#pragma once
#include "barriers.hpp"

namespace fg::emu {
namespace {

u32 box_bytes(const MapImage& map) {
  u32 bytes = map.element_bytes;
  for (u32 extent : map.box) bytes *= extent;
  return bytes;
}

// Where a byte of a copy lies: bits 4..6 of its address are permuted by bits 7..9.
u32 swizzled(u32 address, u32 mode) { return mode ? address ^ ((address >> 7 & ((1u << mode) - 1)) << 4) : address; }

// Calls act(shared offset before swizzling, global address of the first byte of 16, first and end byte inside the tensor), piece by piece.
template <class Act>
void for_each_piece(const MapImage& map, const int (&start)[5], Act act) {
  const int elements = static_cast<int>(16 / map.element_bytes);
  u32 offset = 0, at[5] = {};
  const auto row = [&] {
    bool inside = true;
    i64 address = static_cast<i64>(map.address);
    for (int d = 1; d < 5; ++d) {
      const i64 place = static_cast<i64>(start[d]) + at[d];
      inside = inside && place >= 0 && place < static_cast<i64>(map.dims[d]);
      address += place * static_cast<i64>(map.strides[d - 1]);
    }
    for (int x = 0; x < static_cast<int>(map.box[0]); x += elements, offset += 16) {
      const i64 column = static_cast<i64>(start[0]) + x;
      const i64 first = std::clamp<i64>(-column, 0, elements), end = std::clamp<i64>(static_cast<i64>(map.dims[0]) - column, 0, elements);
      const u32 width = map.element_bytes;
      act(offset, reinterpret_cast<unsigned char*>(address + column * width), static_cast<u32>(first) * width,
          inside && end > first ? static_cast<u32>(end) * width : 0);
    }
  };
  for (at[4] = 0; at[4] < map.box[4]; ++at[4])
    for (at[3] = 0; at[3] < map.box[3]; ++at[3])
      for (at[2] = 0; at[2] < map.box[2]; ++at[2])
        for (at[1] = 0; at[1] < map.box[1]; ++at[1]) row();
}

const MapImage* map_image(const void* map, const char* who) {
  const char* bytes = static_cast<const char*>(map);
  const MapImage* image = static_cast<const MapImage*>(map);
  if (bytes >= machine.stacks && bytes < machine.stacks + machine.stacks_bytes) {
    fault("bulk", "%s with a copy of a tensor map; the engine reads it only where the parameters are", who);
  } else if (image->magic == MAP_MAGIC) {
    return image;
  } else {
    fault("bulk", "%s with a tensor map that was not encoded for the emulation", who);
  }
  stop();
  return nullptr;
}

// Whether all global bytes may be touched; the first that may not is told.
bool box_allowed(const MapImage& map, const int (&coordinates)[5], bool write, const char* who) {
  bool allowed = true;
  for_each_piece(map, coordinates, [&](u32, unsigned char* global, u32 first, u32 end) {
    if (allowed && end > first) allowed = range_allowed(global + first, end - first, write, who);
  });
  return allowed;
}

// The host address of a box in shared memory, or null after a report.
unsigned char* box_in_shared(const MapImage& map, u32 address, const char* who) {
  if (address % 128) {
    fault("alignment", "%s at shared 0x%x, which is not a multiple of 128", who, address);
    return nullptr;
  }
  // A swizzle permutes within a repetition of its pattern, which must belong to the block as well.
  const u32 pattern = map.swizzle ? 128u << map.swizzle : 16u;
  const u32 begin = address / pattern * pattern, end = (address + box_bytes(map) + pattern - 1) / pattern * pattern;
  const bool aligned = address % pattern == 0;
  return shared_range(aligned ? address : begin, aligned ? box_bytes(map) : end - begin, who) ? this_block().shared.get() : nullptr;
}

void land(const BulkLoad& load) {
  unsigned char* shared = load.block->shared.get();
  if (!load.map) {
    std::memcpy(shared + (load.target - SHARED_BASE), load.source, load.bytes);
    return complete_bytes(load.block->mbarriers[load.mbarrier], load.bytes, load.clock);
  }
  for_each_piece(*load.map, load.coordinates, [&](u32 offset, unsigned char* global, u32 first, u32 end) {
    unsigned char* target = shared + (swizzled(load.target + offset, load.map->swizzle) - SHARED_BASE);
    std::memset(target, 0, 16);
    if (end > first) std::memcpy(target + first, global + first, end - first);
  });
  complete_bytes(load.block->mbarriers[load.mbarrier], load.bytes, load.clock);
}

// A sum may be read first and added later; a box is read and written in one go.
void perform(BulkStore& store, bool write) {
  if (store.done) return;
  const unsigned char* shared = this_block().shared.get();
  if (!store.map) {
    const unsigned char* source = shared + (store.source - SHARED_BASE);
    if (store.held.empty()) store.held.assign(source, source + store.bytes);
    if (!write) return;
    store.done = true;
    for (u32 i = 0; i < store.bytes / 4; ++i) {
      float value;
      std::memcpy(&value, store.held.data() + 4 * i, 4);
      store.floats[i] = store.adds ? store.floats[i] + value : value;
    }
    return;
  }
  store.done = true;
  for_each_piece(*store.map, store.coordinates, [&](u32 offset, unsigned char* global, u32 first, u32 end) {
    const unsigned char* source = shared + (swizzled(store.source + offset, store.map->swizzle) - SHARED_BASE);
    if (end > first) std::memcpy(global + first, source + first, end - first);
  });
}

// Late stores happen when nobody can run: everything that must wait for them has had its chance to come too early.
void perform_wanted(Fiber& fiber) {
  BulkQueue& queue = fiber.bulk;
  const size_t end = queue.wanted ? queue.group_ends[queue.wanted - 1] : 0;
  for (size_t store = 0; store < end; ++store) perform(queue.stores[store], queue.wants_writes);
}

bool open_stores(const BulkQueue& queue) {
  const size_t end = queue.wanted ? queue.group_ends[queue.wanted - 1] : 0;
  for (size_t index = 0; index < end; ++index) {
    const BulkStore& store = queue.stores[index];
    if (!store.done && (queue.wants_writes || store.held.empty())) return true;
  }
  return false;
}

// Stores of a thread that may not be in global memory yet.
size_t unwritten_stores(const BulkQueue& queue) { return queue.stores.size() - (queue.written ? queue.group_ends[queue.written - 1] : 0); }

// What was read before the end of the block is written at last.
void write_late_sums(Fiber& fiber) {
  for (BulkStore& store : fiber.bulk.stores) {
    if (!store.held.empty()) perform(store, true);
  }
}

// Whether 16-byte aligned consecutive bytes of shared and of global memory may be touched; reports.
bool linear_allowed(u32 shared, const void* global, u32 bytes, bool write, const char* who) {
  if (shared % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
    fault("alignment", "%s of %u bytes between shared 0x%x and %p; all three must be multiples of 16", who, bytes, shared, global);
    return false;
  }
  return shared_range(shared, bytes, who) && range_allowed(global, bytes, write, who);
}

void begin_load(BulkLoad& load, const char* who) {
  Block& block = *load.block;
  const u32 target = load.target;
  block.load_clocks.resize(Shadow::MOST_MBARRIERS);
  load.clock = ++block.load_clocks[load.mbarrier];
  for (const Mbarrier& each : block.mbarriers) {
    if (each.address + 8 > target && each.address < target + load.bytes)
      fault("mbarrier", "%s overwrites the mbarrier at 0x%x", who, each.address);
  }
  if (machine.launch.races) {
    block.shadow.issue(machine.running->warp->index, 1u << machine.running->thread % LANES);
    check_engine(block.shadow.load_engine(load.mbarrier), load.clock, target, load.bytes, true, who);
  }
  counters.copy_bytes += load.bytes;
  counters.global_bytes_read += load.bytes;
  counters.shared_bytes_written += load.bytes;
  if (!machine.launch.late_copies) return land(load);
  if (machine.launch.poison) std::memset(block.shared.get() + (target - SHARED_BASE), 0xFF, load.bytes);
  machine.loads.push_back(load);
}

void begin_store(BulkQueue& queue, u32 bytes, const char* who) {
  const BulkStore& store = queue.stores.back();
  Block& block = this_block();
  Fiber& fiber = *machine.running;
  if (machine.launch.races) {
    const int warp = fiber.warp->index;
    block.shadow.issue(warp, 1u << fiber.thread % LANES);
    check_engine(block.shadow.store_engine(warp), static_cast<u32>(queue.group_ends.size()) + 1, store.source, bytes, false, who);
  }
  counters.global_bytes_written += bytes;
  counters.shared_bytes_read += bytes;
  if (!machine.launch.late_products) perform(queue.stores.back(), true);
}

}  // namespace

void start_load(u32 target, const void* map, u32 address, const int (&coordinates)[5]) {
  preempt(SYNC_PREEMPTION_ODDS);
  const char* who = "tma_load";
  Block& block = this_block();
  use_engines(block);
  const MapImage& image = *map_image(map, who);
  Mbarrier& barrier = *mbarrier_of(address, who);
  if (!box_in_shared(image, target, who) || !box_allowed(image, coordinates, false, who)) return stop();
  BulkLoad load = {&block, &image, target, box_bytes(image), 0, barrier.slot, {}};
  std::copy_n(coordinates, 5, load.coordinates);
  begin_load(load, who);
}

void start_linear_load(u32 target, const void* source, u32 bytes, u32 address) {
  preempt(SYNC_PREEMPTION_ODDS);
  const char* who = "bulk_load";
  Block& block = this_block();
  use_engines(block);
  Mbarrier& barrier = *mbarrier_of(address, who);
  if (!linear_allowed(target, source, bytes, false, who)) return stop();
  BulkLoad load = {&block, nullptr, target, bytes, 0, barrier.slot, {}};
  load.source = static_cast<const unsigned char*>(source);
  begin_load(load, who);
}

void start_store(const void* map, u32 source, const int (&coordinates)[5]) {
  preempt(SYNC_PREEMPTION_ODDS);
  const char* who = "tma_store";
  Block& block = this_block();
  use_engines(block);
  const MapImage& image = *map_image(map, who);
  if (!box_in_shared(image, source, who) || !box_allowed(image, coordinates, true, who)) return stop();
  Fiber& fiber = *machine.running;
  BulkQueue& queue = fiber.bulk;
  queue.stores.push_back({&image, source, {}, false});
  std::copy_n(coordinates, 5, queue.stores.back().coordinates);
  begin_store(queue, box_bytes(image), who);
}

void start_linear_store(float* target, u32 source, u32 bytes, bool adds) {
  preempt(SYNC_PREEMPTION_ODDS);
  const char* who = adds ? "bulk_add" : "bulk_store";
  use_engines(this_block());
  if (!linear_allowed(source, target, bytes, true, who)) return stop();
  BulkQueue& queue = machine.running->bulk;
  queue.stores.push_back({nullptr, source, {}, false, target, bytes, adds});
  begin_store(queue, bytes, who);
}

void commit_stores() {
  BulkQueue& queue = machine.running->bulk;
  queue.group_ends.push_back(queue.stores.size());
}

void wait_stores(int pending, bool written) {
  preempt(SYNC_PREEMPTION_ODDS);
  Fiber& fiber = *machine.running;
  Block& block = this_block();
  BulkQueue& queue = fiber.bulk;
  const i64 groups = static_cast<i64>(queue.group_ends.size()) - pending;
  if (groups <= static_cast<i64>(written ? queue.written : queue.waited)) return;
  queue.wanted = static_cast<size_t>(groups);
  queue.wants_writes = written;
  if (open_stores(queue)) {
    block.bulk_waiters.push_back(&fiber);
    suspend(IN_BULK_WAIT);
  }
  if (written) queue.written = queue.wanted;
  queue.waited = std::max(queue.waited, queue.wanted);
  queue.wanted = 0;
  if (machine.launch.races) {
    use_engines(block);
    block.shadow.acquire_engine(fiber.thread, block.shadow.store_engine(fiber.warp->index), static_cast<u32>(queue.waited));
  }
}

}  // namespace fg::emu
