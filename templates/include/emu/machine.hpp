// Part of runtime.cpp: the state of a launch.
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fiber.hpp"
#include "runtime.hpp"
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
constexpr int PREEMPTION_ODDS = 16;      // one memory access in so many lets another thread run first
constexpr int SYNC_PREEMPTION_ODDS = 4;  // the same for primitives that synchronise
constexpr int COPY_BYTES = 16;

enum class Collective {
  NONE,
  SHUFFLE,
  VOTE,
  WARP_SYNC,
  LOAD_MATRIX,
  LOAD_MATRIX_TRANSPOSED,
  MULTIPLY,
  BROADCAST,
  STORE_MATRIX,
  STORE_MATRIX_TRANSPOSED,
  REGISTERS
};
const char* const COLLECTIVE_NAMES[] = {"nothing",
                                        "shuffle_xor",
                                        "warp_any",
                                        "warp_sync",
                                        "load_matrix_x4",
                                        "load_matrix_x4_transposed",
                                        "multiply_16x8x16",
                                        "warp_uniform",
                                        "store_matrix_x4",
                                        "store_matrix_x4_transposed",
                                        "registers_decrease or registers_increase"};
const char* const IN_BLOCK_SYNC = "block_sync";
const char* const IN_MBARRIER = "mbarrier_wait";
const char* const IN_NAMED_BARRIER = "barrier_sync";
const char* const IN_PRODUCT_WAIT = "wgmma_wait";
const char* const IN_BULK_WAIT = "bulk_wait";
const char* const IN_WORD = "await_word";
const char* const IN_REGISTERS = "registers_increase";
const char* const PREEMPTED = "a memory access";

struct Block;
struct Warp;
struct Fiber;
using i16 = short;

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

// ---- what sm_90 adds ----

// As flashgen/tensor_map.py writes it into the 128 bytes of a TensorMap.
struct MapImage {
  u32 magic, element_bytes;
  u64 address;
  u32 dims[5], box[5];
  u64 strides[4];  // in bytes, of dims 1..4
  u32 swizzle;     // 0 none, 1 for 32 bytes, 2 for 64, 3 for 128
};
constexpr u32 MAP_MAGIC = 0x90A0E4D1u;

struct BulkStore {
  const MapImage* map;  // null for consecutive floats
  u32 source;
  int coordinates[5];
  bool done;
  float* floats = nullptr;
  u32 bytes = 0;                    // of the floats
  bool adds = false;                // to them
  std::vector<unsigned char> held;  // of floats: what was read and is not yet written
};

// Bulk stores of one thread, oldest first, and where each committed group ends.
struct BulkQueue {
  std::vector<BulkStore> stores;
  std::vector<size_t> group_ends;
  size_t waited = 0, wanted = 0;  // groups; `wanted` while the thread waits
  size_t written = 0;             // groups that were waited for till they are in global memory
  bool wants_writes = false;
};

struct Mbarrier {
  u32 address;
  int slot;
  int owner;        // the thread of its init
  u32 owner_fence;  // fences of the owner before the init
  u32 expected, pending;
  i64 bytes = 0;  // still to come
  u64 phase = 0;
  Clocks arrived, over;  // of the running phase; of the last one
  struct Wait {
    u32 epoch = 0, clock = 0;
  };
  std::vector<Wait> last_wait;  // of each thread
  std::vector<Fiber*> waiters;
};

struct NamedBarrier {
  int arrived = 0, wanted = 0;
  Clocks arriving, over;
  std::vector<Fiber*> waiters;
};

struct BulkLoad {
  Block* block;
  const MapImage* map;  // null for consecutive bytes
  u32 target, bytes, clock;
  int mbarrier;
  int coordinates[5];
  const unsigned char* source = nullptr;  // of consecutive bytes
};

constexpr int GROUP_LANES = 128;

// A whole GEMM of one warpgroup, and one group to wait for.
struct Product {
  ProductCall call;  // of the first lane; the others must agree
  std::vector<u64> a_descriptors, b_descriptors;
  int lanes = 0, warp_lanes[4] = {};
  float* d[GROUP_LANES];
  const u32* a[GROUP_LANES];
  std::vector<u32> a_as_issued;
  std::vector<float> d_as_issued;  // while the accumulators are poisoned
};

struct Warpgroup {
  Block* block = nullptr;
  int index = 0;
  std::deque<Product> products;  // not yet executed
  u32 executed = 0, wanted = 0;
  std::vector<Fiber*> waiters;
};

struct Fiber {
  Context context;
  int thread = 0;
  Warp* warp = nullptr;
  const char* waits_in = nullptr;
  bool returned = false;
  CopyQueue copies;
  u32 accesses = 0;  // ordinary shared accesses since the last collective
  u32 mbarrier_fences = 0;
  u32 products = 0, products_waited = 0;
  BulkQueue bulk;
  // Details of `waits_in`: mbarrier slot and parity; id and threads of a named barrier; registers; what a word held, and should hold.
  u32 wait_for = 0, wait_value = 0;
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
  int registers = 0, wanted_registers = 0;  // per thread
};

struct Block {
  i64 index = 0;
  int alive = 0;       // threads that have not returned
  int in_barrier = 0;  // threads waiting in block_sync
  std::unique_ptr<unsigned char[]> shared;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Shadow shadow;
  std::deque<Mbarrier> mbarriers;
  std::vector<i16> mbarrier_at;  // [offset / 8]: slot + 1, or 0
  NamedBarrier named[16];
  std::vector<Warpgroup> groups;
  std::vector<Fiber*> bulk_waiters, register_waiters;
  int free_registers = 0;
  std::vector<u32> load_clocks;  // of each mbarrier's engine
};

// State of the launch that runs now; blocks, stacks and shadows are kept from launch to launch.
struct Machine {
  Launch launch;
  Result* result = nullptr;
  Context main;
  Fiber* running = nullptr;
  Block* landing = nullptr;  // whose asynchronous operation takes effect while no thread runs
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
  std::vector<BulkLoad> loads;  // in flight
  std::vector<Fiber*> word_waiters;
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

}  // namespace
}  // namespace fg::emu
