// What the emulation headers and the launcher see of the runtime. The runtime itself (runtime.cpp) is compiled once per process image;
// kernel texts reach it only through these functions, so that all of them share one scheduler and one set of checks.
#pragma once

namespace fg {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace emu {
#pragma GCC visibility push(default)

// Work done by one launch. flashgen/emulate.py holds the twin of this struct.
struct Counters {
  u64 global_bytes_read;  // asynchronous copies included
  u64 global_bytes_written;
  u64 shared_bytes_read;     // matrix loads included
  u64 shared_bytes_written;  // asynchronous copies included
  u64 copy_bytes;            // bytes of asynchronous copies that came from global memory
  u64 matrix_phases;         // eight 16-byte rows each
  u64 matrix_conflicts;      // extra passes over the banks, beyond one per phase
  u64 shared_conflicts;      // the same for ordinary shared accesses, lanes matched by their order since the last collective
  u64 multiplies;            // 16x8x16 tensor-core products
  u64 exponentials;
  u64 collectives;  // of a warp
  u64 block_barriers;
  u64 switches;
};

// The thread that runs now.
struct Current {
  i64 block;
  int thread;
};

extern Counters counters;
extern Current current;

u32 shared_base();
void read_shared(u32 address, void* value, u32 bytes);
void write_shared(u32 address, const void* value, u32 bytes);
void read_global(const void* address, void* value, u32 bytes);
void write_global(void* address, const void* value, u32 bytes);

u32 exchange(u32 value, int lane_mask);
bool vote_any(bool predicate);
void join_warp();
void join_block();

void start_copy(u32 shared, const void* global);  // 16 bytes; a null source writes zeros
void commit_copies();
void wait_copies(int pending);
void load_matrices(u32* fragment, u32 row_address, bool transposed);
void multiply_tile(float* d, const u32* a, u32 b0, u32 b1, bool is_half);

// ---- launching; called through ctypes, every struct has its twin in flashgen/emulate.py ----

enum Schedule : int { LOCKSTEP, SHUFFLED, GREEDY, STARVE };

struct Range {
  const unsigned char* begin;
  const unsigned char* end;
  i64 writable;
};

struct Launch {
  void (*kernel)(const void*);
  const void* params;
  const Range* ranges;
  i64 num_ranges;
  i64 grid;
  int threads;
  int shared_bytes;
  int live_ctas;  // how many blocks may be alive at a time
  int schedule;
  int late_copies;  // copies land at the wait that covers them, else when they are issued
  int poison;       // a late copy fills its target with NaN bytes when it is issued
  int races;
  u64 seed;
};

constexpr int REPORT_BYTES = 16384;
constexpr char REPORT_SEPARATOR = '\x1e';

enum ResultState : int { RUNNING = 0, FINISHED = 1, CRASHED = 2 };

struct Result {
  Counters counters;
  int state;
  int num_faults;
  int text_bytes;
  char text[REPORT_BYTES];  // one fault after the other, separated by REPORT_SEPARATOR
};

extern "C" {
void fg_emulate_run(const Launch* launch, Result* result);   // in this process
int fg_emulate_start(const Launch* launch, Result* result);  // in a child that shares *result; returns its process id, or -errno
int fg_emulate_wait(int process, int milliseconds);          // 1 when the child is over, 0 when the time is
void fg_emulate_kill(int process);
}

#pragma GCC visibility pop
}  // namespace emu
}  // namespace fg
