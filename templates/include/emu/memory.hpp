// Part of runtime.cpp: shared and global memory, with every check of an access.
#pragma once
#include "report.hpp"
#include "scheduler.hpp"

namespace fg::emu {
namespace {

Block& this_block() { return machine.running ? *machine.running->warp->block : *machine.landing; }

// Host address of shared bytes, or null after a report.
unsigned char* shared_range(u32 address, u32 bytes, const char* who) {
  const u32 offset = address - SHARED_BASE, size = static_cast<u32>(machine.launch.shared_bytes);
  if (address < SHARED_BASE || offset > size || bytes > size - offset) {
    fault("bounds", "%s touches shared 0x%x..0x%x; valid is 0x%x..0x%x", who, address, address + bytes, SHARED_BASE, SHARED_BASE + size);
    return nullptr;
  }
  return this_block().shared.get() + offset;
}
unsigned char* shared_bytes(u32 address, u32 bytes, const char* who) {
  unsigned char* host = shared_range(address, bytes, who);
  if (host && (address & (bytes - 1))) {
    fault("alignment", "%s touches shared 0x%x, which is not a multiple of %u", who, address, bytes);
    return nullptr;
  }
  return host;
}

std::string engine_name(int engine) {
  const Shadow& shadow = this_block().shadow;
  const int warps = shadow.store_engine(0);
  if (engine < warps) return "the products of warp " + std::to_string(engine);
  if (engine < 2 * warps) return "the bulk stores of warp " + std::to_string(engine - warps);
  return "the bulk loads of mbarrier #" + std::to_string(engine - 2 * warps);
}

void report_race(const Conflict& conflict, const char* who, u32 address) {
  switch (conflict.kind) {
    case Conflict::NONE:
      return;
    case Conflict::IN_FLIGHT:
      return fault("race", "%s of shared 0x%x, the target of a copy by thread %d that no wait has covered yet", who, address,
                   conflict.other);
    case Conflict::AFTER_WRITE:
      return fault("race", "%s of shared 0x%x is not ordered after a write by thread %d", who, address, conflict.other);
    case Conflict::AFTER_READ:
      return fault("race", "%s of shared 0x%x is not ordered after a read by thread %d", who, address, conflict.other);
    case Conflict::AFTER_ENGINE_WRITE:
      return fault("race", "%s of shared 0x%x is not ordered after a write by %s", who, address, engine_name(conflict.other).c_str());
    case Conflict::AFTER_ENGINE_READ:
      return fault("race", "%s of shared 0x%x is not ordered after a read by %s", who, address, engine_name(conflict.other).c_str());
    case Conflict::NOT_FENCED:
      return fault("proxy", "%s of shared 0x%x, which thread %d wrote without fence_proxy_async since", who, address, conflict.other);
  }
}

// Clock `clock` of an engine, issued by the threads that Shadow::issue was told.
void check_engine(int engine, u32 clock, u32 address, u32 bytes, bool write, const char* who) {
  const Conflict conflict = this_block().shadow.engine_access(engine, clock, address - SHARED_BASE, bytes, write);
  report_race(conflict, who, SHARED_BASE + conflict.offset);
}

void check_read(u32 address, u32 bytes, int warp, u32 lanes, const char* who) {
  if (!machine.launch.races) return;
  report_race(this_block().shadow.read(address - SHARED_BASE, bytes, warp, lanes), who, address);
}

void check_write_by(int thread, u32 address, u32 bytes, bool in_flight, bool unchanged, const char* who) {
  const std::vector<i16>& mbarriers = this_block().mbarrier_at;
  if (!mbarriers.empty() && mbarriers[(address - SHARED_BASE) / 8]) fault("mbarrier", "%s overwrites the mbarrier at 0x%x", who, address);
  if (!machine.launch.races) return;
  report_race(this_block().shadow.write(address - SHARED_BASE, bytes, thread, in_flight, unchanged), who, address);
}
void check_write(u32 address, u32 bytes, bool in_flight, bool unchanged, const char* who) {
  check_write_by(machine.running->thread, address, bytes, in_flight, unchanged, who);
}

constexpr u32 MOST_ROWS = 4096;  // a warp that never meets in a collective stops being counted here

void note_access(u32 address, u32 bytes) {
  Fiber& fiber = *machine.running;
  Warp& warp = *fiber.warp;
  const u32 index = fiber.accesses++;
  if (index >= MOST_ROWS) return;
  if (index >= warp.rows.size()) warp.rows.resize(index + 64);
  while (warp.used_rows <= index) warp.rows[warp.used_rows++].lanes = 0;
  AccessRow& row = warp.rows[index];
  if (!row.lanes) row.bytes = bytes;
  if (row.bytes != bytes) return;
  row.lanes |= 1u << (fiber.thread % LANES);
  row.address[fiber.thread % LANES] = address;
}

// Passes over the 32 banks beyond the first for lanes [first, first + count): the most distinct words that meet in one bank, minus one.
u32 extra_passes(const AccessRow& row, int first, int count) {
  u32 words[32][32], used[32] = {}, most = 1;
  for (int lane = first; lane < first + count; ++lane) {
    if (!(row.lanes >> lane & 1)) continue;
    for (u32 word = row.address[lane] / 4; word < (row.address[lane] + row.bytes + 3) / 4; ++word) {
      const u32 bank = word % 32;
      u32 known = 0;
      while (known < used[bank] && words[bank][known] != word) ++known;
      if (known == used[bank]) words[bank][used[bank]++] = word;
      most = most < used[bank] ? used[bank] : most;
    }
  }
  return most - 1;
}

// At a collective the lanes of a warp are level again.
void count_conflicts(Warp& warp) {
  for (u32 index = 0; index < warp.used_rows; ++index) {
    const AccessRow& row = warp.rows[index];
    const int lanes = row.bytes == 16 ? 8 : LANES;  // 16-byte accesses go quarter by quarter
    for (int first = 0; first < LANES; first += lanes) counters.shared_conflicts += extra_passes(row, first, lanes);
  }
  warp.used_rows = 0;
  for (int lane = 0; lane < LANES; ++lane) warp.block->fibers[warp.index * LANES + lane].accesses = 0;
}

// ---- global memory ----

bool inside(const Range& range, const unsigned char* begin, u32 bytes) { return begin >= range.begin && begin + bytes <= range.end; }

const Range* find_range(const unsigned char* begin, u32 bytes) {
  if (machine.last_range && inside(*machine.last_range, begin, bytes)) return machine.last_range;
  for (i64 index = 0; index < machine.launch.num_ranges; ++index) {
    if (inside(machine.launch.ranges[index], begin, bytes)) return machine.last_range = &machine.launch.ranges[index];
  }
  return nullptr;
}

bool range_allowed(const void* address, u32 bytes, bool write, const char* who) {
  const Range* range = find_range(static_cast<const unsigned char*>(address), bytes);
  if (!range) fault("bounds", "%s touches global memory outside every tensor: %u bytes at %p", who, bytes, address);
  if (range && write && !range->writable) fault("bounds", "%s writes to an input tensor: %u bytes at %p", who, bytes, address);
  return range && (!write || range->writable);
}

bool global_allowed(const void* address, u32 bytes, bool write, const char* who) {
  if (reinterpret_cast<uintptr_t>(address) & (bytes - 1)) {
    fault("alignment", "%s touches global %p, which is not a multiple of %u", who, address, bytes);
    return false;
  }
  return range_allowed(address, bytes, write, who);
}

}  // namespace

u32 shared_base() { return SHARED_BASE; }
i64 grid_size() { return machine.launch.grid; }

void read_shared(u32 address, void* value, u32 bytes) {
  preempt();
  std::memset(value, 0xFF, bytes);
  const unsigned char* source = shared_bytes(address, bytes, "load_shared");
  if (!source) return;
  const int thread = machine.running->thread;
  check_read(address, bytes, thread / LANES, 1u << (thread % LANES), "load_shared");
  note_access(address, bytes);
  counters.shared_bytes_read += bytes;
  std::memcpy(value, source, bytes);
}

void write_shared(u32 address, const void* value, u32 bytes) {
  preempt();
  unsigned char* target = shared_bytes(address, bytes, "store_shared");
  if (!target) return;
  check_write(address, bytes, false, std::memcmp(target, value, bytes) == 0, "store_shared");
  note_access(address, bytes);
  counters.shared_bytes_written += bytes;
  std::memcpy(target, value, bytes);
}

void read_global(const void* address, void* value, u32 bytes) {
  if (!global_allowed(address, bytes, false, "load_global")) {
    std::memset(value, 0xFF, bytes);
    return;
  }
  counters.global_bytes_read += bytes;
  std::memcpy(value, address, bytes);
}

void write_global(void* address, const void* value, u32 bytes) {
  if (!global_allowed(address, bytes, true, "store_global")) return;
  counters.global_bytes_written += bytes;
  std::memcpy(address, value, bytes);
}

// Threads run one at a time, so a preemption before is all the concurrency that an atomic can see.
u32 exchange_global(u32* address, u32 (*change)(u32 old, u32 operand), u32 operand, const char* who) {
  preempt(SYNC_PREEMPTION_ODDS);
  if (!global_allowed(address, 4, true, who)) return 0;
  counters.global_bytes_read += 4;
  counters.global_bytes_written += 4;
  const u32 old = *address;
  *address = change(old, operand);
  return old;
}
}  // namespace fg::emu
