// Runtime of the emulation: fibers under a scheduler, shared and global memory with checks, collectives of a warp, asynchronous copies.
//
// Every emulated thread is a fiber. A fiber runs until it waits for others (a collective, a barrier) or, under some schedules, until it
// touches memory; then the scheduler picks the next one. "Nothing can run" is the exact moment of a deadlock.
#include "runtime.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <vector>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include "fiber.hpp"
#include "shadow.hpp"

namespace fg::emu {

Counters counters;
Current current;

namespace {

constexpr u32 SHARED_BASE = 0x400;  // the first KiB belongs to the system, as on a device
constexpr int LANES = 32;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;
constexpr size_t STACK_BYTES = 256 << 10;  // mapped lazily
constexpr size_t GUARD_BYTES = 4096;
constexpr size_t STACK_STAGGER = 2048 + 64;  // equal offsets in all stacks would meet in the same few sets of every cache
constexpr size_t STACK_STEPS = 31;
constexpr size_t GUARDED_FIBERS = 8192;  // a guard is a mapping of its own, and a process may have 65530
constexpr int FAULTS_PER_KIND = 3;
constexpr int PREEMPTION_ODDS = 16;  // one memory access in so many lets another thread run first
constexpr int COPY_BYTES = 16;

enum class Collective { NONE, SHUFFLE, VOTE, WARP_SYNC, LOAD_MATRIX, LOAD_MATRIX_TRANSPOSED, MULTIPLY };
const char* const COLLECTIVE_NAMES[] = {
    "nothing", "shuffle_xor", "warp_any", "warp_sync", "load_matrix_x4", "load_matrix_x4_transposed", "multiply_16x8x16"};
const char* const IN_BLOCK_SYNC = "block_sync";
const char* const PREEMPTED = "a memory access";

struct Block;
struct Warp;

struct Copy {
  u32 shared;
  const void* global;
};

// Asynchronous copies of one thread, oldest first, and where each committed group ends.
struct CopyQueue {
  std::vector<Copy> copies;
  std::vector<size_t> group_ends;
  size_t landed = 0, landed_groups = 0;

  int groups() const { return static_cast<int>(group_ends.size() - landed_groups); }
  void clear() {
    copies.clear();
    group_ends.clear();
    landed = landed_groups = 0;
  }
};

struct Fiber {
  Context context;
  int thread = 0;
  Warp* warp = nullptr;
  const char* waits_in = nullptr;
  bool returned = false;
  CopyQueue copies;
  u32 accesses = 0;  // ordinary shared accesses since the last collective
};

// What the lanes of a warp hand in for a collective; the last lane to arrive acts for all.
struct Rendezvous {
  Collective kind = Collective::NONE;
  u32 arrived = 0;
  u32 value[LANES];
  int lane_mask[LANES];
  u32 a[4][LANES];
  u32 b[2][LANES];
  float* d[LANES];
  u32* out[LANES];
  bool is_half;
};

// The n-th shared access of every lane since the last collective: what a device would do as one instruction.
struct AccessRow {
  u32 lanes, bytes;
  u32 address[LANES];
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  u32 ready = 0;           // lanes that can run
  int ready_position = 0;  // in Machine::ready while any lane is
  Rendezvous rendezvous;
  std::vector<AccessRow> rows;
  u32 used_rows = 0;
};

struct Block {
  i64 index = 0;
  int alive = 0;       // threads that have not returned
  int in_barrier = 0;  // threads waiting in block_sync
  std::unique_ptr<unsigned char[]> shared;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Shadow shadow;
};

// State of the launch that runs now; blocks, stacks and shadows are kept from launch to launch.
struct Machine {
  Launch launch;
  Result* result = nullptr;
  Context main;
  Fiber* running = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Warp*> ready;
  Warp* favourite = nullptr;  // the greedy schedule stays with it
  int starved_warp = 0;
  size_t turn = 0;
  u64 random = 1;
  i64 next_block = 0;
  int alive_blocks = 0;
  bool stopped = false;
  bool tidy = false;  // the last launch ran to its end, so that its blocks can be used again
  std::map<std::string, int> faults_of_kind;
  const Range* last_range = nullptr;
  char* stacks = nullptr;
  size_t stacks_bytes = 0;
};
Machine machine;

u32 random_below(size_t limit) {
  u64& x = machine.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return static_cast<u32>(((x >> 32) * limit) >> 32);
}

// ---- reports ----

void append_fault(const std::string& text) {
  Result& result = *machine.result;
  ++result.num_faults;
  const size_t room = REPORT_BYTES - 1 - result.text_bytes;
  if (text.size() + 1 > room) return;
  if (result.text_bytes) result.text[result.text_bytes++] = REPORT_SEPARATOR;
  std::memcpy(result.text + result.text_bytes, text.data(), text.size());
  result.text_bytes += static_cast<int>(text.size());
}

std::string place() {
  const Fiber* fiber = machine.running;
  if (!fiber) return "";
  return " [CTA " + std::to_string(fiber->warp->block->index) + ", thread " + std::to_string(fiber->thread) + "]";
}

// The first faults of a kind are told, the rest only counted.
__attribute__((format(printf, 2, 3))) void fault(const char* kind, const char* format, ...) {
  if (machine.faults_of_kind[kind]++ >= FAULTS_PER_KIND) {
    ++machine.result->num_faults;
    return;
  }
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  append_fault(std::string(kind) + ": " + text + place());
}

// ---- scheduler ----

void make_ready(Fiber& fiber) {
  Warp& warp = *fiber.warp;
  if (!warp.ready) {
    warp.ready_position = static_cast<int>(machine.ready.size());
    machine.ready.push_back(&warp);
  }
  warp.ready |= 1u << (fiber.thread % LANES);
}

void remove_ready(Warp& warp, int lane) {
  warp.ready &= ~(1u << lane);
  if (warp.ready) return;
  Warp* last = machine.ready.back();
  machine.ready[warp.ready_position] = last;
  last->ready_position = warp.ready_position;
  machine.ready.pop_back();
}

Warp* pick_unstarved() {
  Warp* warp = nullptr;
  int seen = 0;
  for (Warp* candidate : machine.ready) {
    if (candidate->index != machine.starved_warp && random_below(++seen) == 0) warp = candidate;
  }
  return warp ? warp : machine.ready[0];
}

Warp* pick_warp() {
  switch (machine.launch.schedule) {
    case LOCKSTEP:
      if (++machine.turn >= machine.ready.size()) machine.turn = 0;
      return machine.ready[machine.turn];
    case STARVE:
      return pick_unstarved();
    case GREEDY:
      if (!machine.favourite || !machine.favourite->ready) machine.favourite = machine.ready[random_below(machine.ready.size())];
      return machine.favourite;
    default:
      return machine.ready[random_below(machine.ready.size())];
  }
}

int pick_lane(u32 ready) {
  if (machine.launch.schedule == LOCKSTEP || machine.launch.schedule == GREEDY) return __builtin_ctz(ready);
  for (u32 skip = random_below(__builtin_popcount(ready)); skip; --skip) ready &= ready - 1;
  return __builtin_ctz(ready);
}

// The next thread, no longer ready; null when nobody can run.
Fiber* take_next() {
  if (machine.ready.empty()) return nullptr;
  Warp* warp = pick_warp();
  const int lane = pick_lane(warp->ready);
  remove_ready(*warp, lane);
  return &warp->block->fibers[warp->index * LANES + lane];
}

void enter(Fiber& fiber) {
  machine.running = &fiber;
  current = {fiber.warp->block->index, fiber.thread};
  ++counters.switches;
}

// Runs others until somebody has made this fiber ready and it is picked.
void suspend(const char* why) {
  Fiber& fiber = *machine.running;
  fiber.waits_in = why;
  Fiber* next = take_next();
  if (next == &fiber) {
    fiber.waits_in = nullptr;
    return;
  }
  if (next) enter(*next);
  switch_context(fiber.context, next ? next->context : machine.main);
  fiber.waits_in = nullptr;
}

// Gives up the launch: the faults so far are the result.
[[noreturn]] void stop() {
  machine.stopped = true;
  switch_context(machine.running->context, machine.main);
  std::abort();
}

void preempt() {
  if (machine.launch.schedule == LOCKSTEP || machine.launch.schedule == GREEDY) return;
  if (random_below(PREEMPTION_ODDS)) return;
  make_ready(*machine.running);
  suspend(PREEMPTED);
}

void run_fiber() {
  machine.launch.kernel(machine.launch.params);
  Fiber& fiber = *machine.running;
  fiber.returned = true;
  Block& block = *fiber.warp->block;
  Fiber* next = --block.alive ? take_next() : nullptr;  // the main context starts the next block
  if (next) enter(*next);
  switch_context(fiber.context, next ? next->context : machine.main);
  std::abort();
}

// ---- shared memory ----

Block& this_block() { return *machine.running->warp->block; }

// Host address of shared bytes, or null after a report.
unsigned char* shared_bytes(u32 address, u32 bytes, const char* who) {
  const u32 offset = address - SHARED_BASE, size = static_cast<u32>(machine.launch.shared_bytes);
  if (address < SHARED_BASE || offset > size || bytes > size - offset) {
    fault("bounds", "%s touches shared 0x%x..0x%x; valid is 0x%x..0x%x", who, address, address + bytes, SHARED_BASE, SHARED_BASE + size);
    return nullptr;
  }
  if (address & (bytes - 1)) {
    fault("alignment", "%s touches shared 0x%x, which is not a multiple of %u", who, address, bytes);
    return nullptr;
  }
  return this_block().shared.get() + offset;
}

void report_race(const Conflict& conflict, const char* who, u32 address) {
  switch (conflict.kind) {
    case Conflict::NONE:
      return;
    case Conflict::IN_FLIGHT:
      return fault("race", "%s of shared 0x%x, the target of a copy by thread %d that no wait has covered yet", who, address,
                   conflict.thread);
    case Conflict::AFTER_WRITE:
      return fault("race", "%s of shared 0x%x is not ordered after a write by thread %d", who, address, conflict.thread);
    case Conflict::AFTER_READ:
      return fault("race", "%s of shared 0x%x is not ordered after a read by thread %d", who, address, conflict.thread);
  }
}

void check_read(u32 address, u32 bytes, int warp, u32 lanes, const char* who) {
  if (!machine.launch.races) return;
  report_race(this_block().shadow.read(address - SHARED_BASE, bytes, warp, lanes), who, address);
}

void check_write(u32 address, u32 bytes, bool in_flight, bool unchanged, const char* who) {
  if (!machine.launch.races) return;
  report_race(this_block().shadow.write(address - SHARED_BASE, bytes, machine.running->thread, in_flight, unchanged), who, address);
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

bool global_allowed(const void* address, u32 bytes, bool write, const char* who) {
  if (reinterpret_cast<uintptr_t>(address) & (bytes - 1)) {
    fault("alignment", "%s touches global %p, which is not a multiple of %u", who, address, bytes);
    return false;
  }
  const Range* range = find_range(static_cast<const unsigned char*>(address), bytes);
  if (!range) fault("bounds", "%s touches global memory outside every tensor: %u bytes at %p", who, bytes, address);
  if (range && write && !range->writable) fault("bounds", "%s writes to an input tensor: %u bytes at %p", who, bytes, address);
  return range && (!write || range->writable);
}

// ---- collectives of a warp ----

// Deposits with `give`; the last lane runs `act` for the warp, then all go on.
template <class Give, class Act>
void meet(Collective kind, Give give, Act act) {
  Fiber& fiber = *machine.running;
  Warp& warp = *fiber.warp;
  Rendezvous& meeting = warp.rendezvous;
  const int lane = fiber.thread % LANES;
  if (meeting.arrived && meeting.kind != kind) {
    fault("collective", "lanes of warp %d meet in different collectives: lane %d in %s, lanes 0x%x in %s", warp.index, lane,
          COLLECTIVE_NAMES[static_cast<int>(kind)], meeting.arrived, COLLECTIVE_NAMES[static_cast<int>(meeting.kind)]);
    stop();
  }
  meeting.kind = kind;
  meeting.arrived |= 1u << lane;
  give(meeting, lane);
  if (meeting.arrived != ALL_LANES) return suspend(COLLECTIVE_NAMES[static_cast<int>(kind)]);
  meeting.arrived = 0;
  ++counters.collectives;
  if (warp.used_rows) count_conflicts(warp);
  act(warp);
  for (int other = 0; other < LANES; ++other) {
    if (other != lane) make_ready(warp.block->fibers[warp.index * LANES + other]);
  }
}

void load_phase(Warp& warp, int matrix, bool transposed) {
  Rendezvous& meeting = warp.rendezvous;
  const char* who = transposed ? "load_matrix_x4_transposed" : "load_matrix_x4";
  u16 elements[8][8];
  u32 used[8] = {}, rows[8][8], most = 1;
  for (int row = 0; row < 8; ++row) {
    const u32 address = meeting.value[matrix * 8 + row];
    std::memset(elements[row], 0xFF, 16);
    if (const unsigned char* bytes = shared_bytes(address, 16, who)) {
      check_read(address, 16, warp.index, ALL_LANES, who);
      std::memcpy(elements[row], bytes, 16);
    }
    const u32 bank = address / 16 % 8;  // a row fills four banks
    u32 known = 0;
    while (known < used[bank] && rows[bank][known] != address) ++known;
    if (known == used[bank]) rows[bank][used[bank]++] = address;
    most = most < used[bank] ? used[bank] : most;
  }
  counters.matrix_conflicts += most - 1;
  for (int lane = 0; lane < LANES; ++lane) {
    const int line = lane / 4, pair = lane % 4 * 2;
    const u32 low = transposed ? elements[pair][line] : elements[line][pair];
    const u32 high = transposed ? elements[pair + 1][line] : elements[line][pair + 1];
    meeting.out[lane][matrix] = low | high << 16;
  }
}

// ---- tensor-core products ----

float bits_to_float(u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Branch-free, so that a loop over it can be vectorised.
inline float decode_half(u32 bits) {
  const u32 size = bits & 0x7FFFu;
  u32 scaled;
  const float value = bits_to_float(size << 13) * 0x1p112f;
  std::memcpy(&scaled, &value, 4);
  scaled |= size >= 0x7C00u ? 0x7F800000u : 0u;
  return bits_to_float(scaled | (bits & 0x8000u) << 16);
}
inline float decode_bfloat16(u32 bits) { return bits_to_float(bits << 16); }

using FragmentA =
    float[4][2][LANES];  // [register][half][lane]: element (lane / 4 + 8 * (register % 2), column_of(lane, half) + 8 * (register / 2))
using Row = float __attribute__((vector_size(32)));

// Fragments stay in the order of lanes here, so that decoding is one long loop.
template <float (*DECODE)(u32)>
void decode_lanes(const u32 (&words)[LANES], float (&low)[LANES], float (&high)[LANES]) {
  for (int lane = 0; lane < LANES; ++lane) {
    low[lane] = DECODE(words[lane] & 0xFFFFu);
    high[lane] = DECODE(words[lane] >> 16);
  }
}

template <float (*DECODE)(u32)>
void decode_fragments(const Rendezvous& meeting, FragmentA& a, float (&b)[16][8]) {
  for (int part = 0; part < 4; ++part) decode_lanes<DECODE>(meeting.a[part], a[part][0], a[part][1]);
  for (int part = 0; part < 2; ++part) {
    float low[LANES], high[LANES];
    decode_lanes<DECODE>(meeting.b[part], low, high);
    for (int lane = 0; lane < LANES; ++lane) {
      b[part * 8 + lane % 4 * 2][lane / 4] = low[lane];
      b[part * 8 + lane % 4 * 2 + 1][lane / 4] = high[lane];
    }
  }
}

// Sixteen products summed in the order of k, then added to the accumulator.
void multiply_all(Rendezvous& meeting) {
  FragmentA a;
  alignas(32) float b[16][8];
  alignas(32) float sum[16][8];
  meeting.is_half ? decode_fragments<decode_half>(meeting, a, b) : decode_fragments<decode_bfloat16>(meeting, a, b);
  for (int row = 0; row < 16; ++row) {
    Row line;
    for (int k = 0; k < 16; ++k) {
      const float factor = a[row / 8 + k / 8 * 2][k % 2][row % 8 * 4 + k % 8 / 2];
      const Row product = factor * *reinterpret_cast<const Row*>(b[k]);
      line = k ? line + product : product;
    }
    *reinterpret_cast<Row*>(sum[row]) = line;
  }
  for (int lane = 0; lane < LANES; ++lane) {
    for (int part = 0; part < 4; ++part) meeting.d[lane][part] += sum[lane / 4 + part / 2 * 8][lane % 4 * 2 + part % 2];
  }
}

// ---- asynchronous copies ----

void land(const Copy& copy) {
  unsigned char* target = this_block().shared.get() + (copy.shared - SHARED_BASE);
  if (copy.global) {
    std::memcpy(target, copy.global, COPY_BYTES);
  } else {
    std::memset(target, 0, COPY_BYTES);
  }
}

void finish_copy(const Copy& copy) {
  if (machine.launch.late_copies) land(copy);
  if (machine.launch.races) this_block().shadow.settle(copy.shared - SHARED_BASE, COPY_BYTES, machine.running->thread);
}

// ---- blocks ----

// A copy nobody waited for lands in memory that no one reads any more; only its marks must go.
void retire(Block& block) {
  for (Fiber& fiber : block.fibers) {
    for (size_t copy = fiber.copies.landed; copy < fiber.copies.copies.size(); ++copy) {
      if (machine.launch.races) block.shadow.settle(fiber.copies.copies[copy].shared - SHARED_BASE, COPY_BYTES, fiber.thread);
    }
    fiber.copies.clear();
  }
}

void reserve_stacks(size_t fibers) {
  const size_t bytes = fibers * STACK_BYTES;
  if (bytes <= machine.stacks_bytes) return;
  if (machine.stacks) munmap(machine.stacks, machine.stacks_bytes);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  machine.stacks = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
  machine.stacks_bytes = machine.stacks ? bytes : 0;
  if (!machine.stacks || fibers > GUARDED_FIBERS) return;
  for (size_t fiber = 0; fiber < fibers; ++fiber) mprotect(machine.stacks + fiber * STACK_BYTES, GUARD_BYTES, PROT_NONE);
}

void shape(Block& block) {
  const int threads = machine.launch.threads;
  block.shared.reset(new unsigned char[machine.launch.shared_bytes + 1]);
  block.fibers = std::vector<Fiber>(threads);
  block.warps = std::vector<Warp>(threads / LANES);
  for (int thread = 0; thread < threads; ++thread) {
    block.fibers[thread].thread = thread;
    block.fibers[thread].warp = &block.warps[thread / LANES];
  }
  for (int warp = 0; warp < threads / LANES; ++warp) {
    block.warps[warp].block = &block;
    block.warps[warp].index = warp;
  }
}

void start(Block& block, int slot) {
  block.index = machine.next_block++;
  block.alive = machine.launch.threads;
  block.in_barrier = 0;
  std::memset(block.shared.get(), 0xFF, machine.launch.shared_bytes);  // NaN in every format: a read before any write shows
  if (machine.launch.races) block.shadow.start_block(machine.launch.shared_bytes, machine.launch.threads);
  char* stack = machine.stacks + static_cast<size_t>(slot) * machine.launch.threads * STACK_BYTES;
  for (Fiber& fiber : block.fibers) {
    fiber.returned = false;
    fiber.waits_in = nullptr;
    fiber.accesses = 0;
    prepare(fiber.context, stack, STACK_BYTES - fiber.thread % STACK_STEPS * STACK_STAGGER, run_fiber);
    stack += STACK_BYTES;
    make_ready(fiber);
  }
  for (Warp& warp : block.warps) warp.used_rows = 0;
  ++machine.alive_blocks;
}

std::string lane_list(u32 lanes) {
  if (lanes == ALL_LANES) return "all lanes";
  std::string text = __builtin_popcount(lanes) == 1 ? "lane " : "lanes ";
  for (int lane = 0; lane < LANES; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    int last = lane;
    while (last + 1 < LANES && lanes >> (last + 1) & 1) ++last;
    if (text.back() != ' ') text += ",";
    text += std::to_string(lane) + (last > lane ? "-" + std::to_string(last) : "");
    lane = last;
  }
  return text;
}

std::string describe(const Block& block, const Warp& warp) {
  std::map<std::string, u32> lanes;
  for (int lane = 0; lane < LANES; ++lane) {
    const Fiber& fiber = block.fibers[warp.index * LANES + lane];
    lanes[fiber.returned ? "returned" : fiber.waits_in ? std::string("wait in ") + fiber.waits_in : "run"] |= 1u << lane;
  }
  std::string text = "\n  CTA " + std::to_string(block.index) + " warp " + std::to_string(warp.index) + ":";
  for (const auto& [state, which] : lanes) text += (text.back() == ':' ? " " : "; ") + lane_list(which) + " " + state;
  return text;
}

void report_deadlock() {
  machine.running = nullptr;
  std::string text = "deadlock: no thread can run";
  for (const auto& block : machine.blocks) {
    if (!block->alive) continue;
    if (block->in_barrier) {
      fault("divergence", "block_sync of CTA %lld was reached by %d of %d threads, the others returned or wait elsewhere", block->index,
            block->in_barrier, machine.launch.threads);
    }
    for (const Warp& warp : block->warps) text += describe(*block, warp);
  }
  append_fault(text);
}

void start_waiting_blocks() {
  for (size_t slot = 0; slot < machine.blocks.size() && machine.next_block < machine.launch.grid; ++slot) {
    if (!machine.blocks[slot]->alive) start(*machine.blocks[slot], static_cast<int>(slot));
  }
}

void retire_finished_blocks() {
  for (const auto& block : machine.blocks) {
    if (block->alive || block->index < 0) continue;
    retire(*block);
    block->index = -1;
    --machine.alive_blocks;
  }
}

bool valid(const Launch& launch) {
  machine.running = nullptr;
  if (launch.threads < LANES || launch.threads > 1024 || launch.threads % LANES) {
    fault("launch", "%d threads per block; it takes a multiple of 32 up to 1024", launch.threads);
  } else if (launch.shared_bytes < 0 || launch.grid < 0) {
    fault("launch", "grid %lld with %d bytes of shared memory", launch.grid, launch.shared_bytes);
  } else {
    return true;
  }
  return false;
}

// Keeps blocks and stacks of the last launch when the new one has the same shape.
void reset(const Launch& launch) {
  const bool same = machine.launch.threads == launch.threads && machine.launch.shared_bytes == launch.shared_bytes && machine.tidy;
  const i64 live = std::max<i64>(1, std::min<i64>(launch.live_ctas, launch.grid));
  machine.launch = launch;
  if (!same) machine.blocks.clear();
  machine.ready.clear();
  while (static_cast<i64>(machine.blocks.size()) > live) machine.blocks.pop_back();
  while (static_cast<i64>(machine.blocks.size()) < live) {
    machine.blocks.push_back(std::make_unique<Block>());
    shape(*machine.blocks.back());
  }
  for (auto& block : machine.blocks) block->alive = 0, block->index = -1;
  reserve_stacks(static_cast<size_t>(live) * launch.threads);
  machine.favourite = nullptr;
  machine.starved_warp = static_cast<int>(launch.seed % (launch.threads / LANES));
  machine.turn = 0;
  machine.random = launch.seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull;
  machine.next_block = 0;
  machine.alive_blocks = 0;
  machine.stopped = machine.tidy = false;
  machine.last_range = nullptr;
}

void run_blocks() {
  while (!machine.stopped) {
    retire_finished_blocks();
    start_waiting_blocks();
    Fiber* next = take_next();
    if (!next) {
      if (machine.alive_blocks) {
        report_deadlock();
        machine.stopped = true;
      }
      return;
    }
    enter(*next);
    switch_context(machine.main, next->context);
  }
}

// ---- crashes of a child ----

void on_crash(int signal, siginfo_t* info, void*) {
  char text[160];
  std::snprintf(text, sizeof text, "crash: signal %d (%s) at address %p%s", signal, strsignal(signal), info->si_addr,
                signal == SIGSEGV ? "; a wild pointer, or more than 192 KiB of stack" : "");
  append_fault(text + place());
  machine.result->state = CRASHED;
  _exit(1);
}

// On a stack of its own, because the fault may be that a fiber's stack is full.
void catch_crashes() {
  static char stack[64 << 10];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(signal, &action, nullptr);
}

}  // namespace

// ---- the functions that kernel texts call ----

u32 shared_base() { return SHARED_BASE; }

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

u32 exchange(u32 value, int lane_mask) {
  u32 result = 0;
  if (lane_mask < 0 || lane_mask >= LANES) fault("collective", "shuffle_xor with lane mask %d", lane_mask);
  meet(
      Collective::SHUFFLE,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = value;
        meeting.lane_mask[lane] = lane_mask;
        meeting.out[lane] = &result;
      },
      [](Warp& warp) {
        Rendezvous& meeting = warp.rendezvous;
        for (int lane = 0; lane < LANES; ++lane) *meeting.out[lane] = meeting.value[(lane ^ meeting.lane_mask[lane]) % LANES];
      });
  return result;
}

bool vote_any(bool predicate) {
  u32 result = 0;
  meet(
      Collective::VOTE,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = predicate;
        meeting.out[lane] = &result;
      },
      [](Warp& warp) {
        Rendezvous& meeting = warp.rendezvous;
        u32 any = 0;
        for (u32 value : meeting.value) any |= value;
        for (u32* out : meeting.out) *out = any;
      });
  return result != 0;
}

void join_warp() {
  meet(
      Collective::WARP_SYNC, [](Rendezvous&, int) {},
      [](Warp& warp) {
        if (machine.launch.races) warp.block->shadow.warp_barrier(warp.index);
      });
}

void join_block() {
  Fiber& fiber = *machine.running;
  Block& block = this_block();
  if (++block.in_barrier < machine.launch.threads) return suspend(IN_BLOCK_SYNC);
  block.in_barrier = 0;
  ++counters.block_barriers;
  if (machine.launch.races) block.shadow.block_barrier();
  for (Warp& warp : block.warps) {
    if (warp.used_rows) count_conflicts(warp);
  }
  for (Fiber& other : block.fibers) {
    if (&other != &fiber) make_ready(other);
  }
}

void start_copy(u32 shared, const void* global) {
  preempt();
  unsigned char* target = shared_bytes(shared, COPY_BYTES, "copy_async_16");
  if (!target) return;
  if (global && !global_allowed(global, COPY_BYTES, false, "copy_async_16")) return;
  check_write(shared, COPY_BYTES, true, false, "copy_async_16");
  if (global) {
    counters.copy_bytes += COPY_BYTES;
    counters.global_bytes_read += COPY_BYTES;
  }
  counters.shared_bytes_written += COPY_BYTES;
  const Copy copy = {shared, global};
  machine.running->copies.copies.push_back(copy);
  if (!machine.launch.late_copies) {
    land(copy);
  } else if (machine.launch.poison) {
    std::memset(target, 0xFF, COPY_BYTES);
  }
}

void commit_copies() {
  CopyQueue& queue = machine.running->copies;
  queue.group_ends.push_back(queue.copies.size());
}

void wait_copies(int pending) {
  CopyQueue& queue = machine.running->copies;
  while (queue.groups() > pending) {
    const size_t end = queue.group_ends[queue.landed_groups++];
    for (; queue.landed < end; ++queue.landed) finish_copy(queue.copies[queue.landed]);
  }
  if (queue.landed == queue.copies.size() && queue.groups() == 0) queue.clear();
}

void load_matrices(u32* fragment, u32 row_address, bool transposed) {
  meet(
      transposed ? Collective::LOAD_MATRIX_TRANSPOSED : Collective::LOAD_MATRIX,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = row_address;
        meeting.out[lane] = fragment;
      },
      [transposed](Warp& warp) {
        for (int matrix = 0; matrix < 4; ++matrix) load_phase(warp, matrix, transposed);
        counters.matrix_phases += 4;
        counters.shared_bytes_read += 4 * 8 * 16;
      });
}

void multiply_tile(float* d, const u32* a, u32 b0, u32 b1, bool is_half) {
  meet(
      Collective::MULTIPLY,
      [&](Rendezvous& meeting, int lane) {
        meeting.d[lane] = d;
        for (int part = 0; part < 4; ++part) meeting.a[part][lane] = a[part];
        meeting.b[0][lane] = b0;
        meeting.b[1][lane] = b1;
        meeting.is_half = is_half;
      },
      [](Warp& warp) {
        multiply_all(warp.rendezvous);
        ++counters.multiplies;
      });
}

// ---- launching ----

extern "C" void fg_emulate_run(const Launch* launch, Result* result) {
  counters = Counters{};
  machine.result = result;
  machine.faults_of_kind.clear();
  result->num_faults = result->text_bytes = 0;
  result->state = RUNNING;
  if (valid(*launch)) {
    reset(*launch);
    if (machine.stacks) {
      run_blocks();
      machine.tidy = !machine.stopped;
    } else {
      fault("launch", "no memory for the stacks of %d threads in %zu blocks", launch->threads, machine.blocks.size());
    }
  }
  result->counters = counters;
  result->state = FINISHED;
}

extern "C" int fg_emulate_start(const Launch* launch, Result* result) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return -errno;
  if (child > 0) return child;
#if defined(__linux__)
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a child in an endless loop must not outlive its parent
#endif
  if (getppid() != parent) _exit(1);
  machine.result = result;
  catch_crashes();
  fg_emulate_run(launch, result);
  _exit(0);
}

extern "C" int fg_emulate_wait(int process, int milliseconds) {
  const timespec step = {0, 200000};
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const double end = now.tv_sec + now.tv_nsec * 1e-9 + milliseconds * 1e-3;
  while (waitpid(process, nullptr, WNOHANG) == 0) {
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec + now.tv_nsec * 1e-9 > end) return 0;
    nanosleep(&step, nullptr);
  }
  return 1;  // ended now, or collected by someone else
}

extern "C" void fg_emulate_kill(int process) {
  kill(process, SIGKILL);
  waitpid(process, nullptr, 0);
}

}  // namespace fg::emu
