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
i64 grid_size();
void read_shared(u32 address, void* value, u32 bytes);
void write_shared(u32 address, const void* value, u32 bytes);
void read_global(const void* address, void* value, u32 bytes);
void write_global(void* address, const void* value, u32 bytes);
u32 exchange_global(u32* address, u32 (*change)(u32 old, u32 operand), u32 operand, const char* who);
void wait_word(const u32* address, u32 value);
void publish_word(u32* address, u32 value);
void count_word(u32* address);

u32 exchange(u32 value, int lane_mask);
bool vote_any(bool predicate);
int broadcast(int value);  // of lane 0; all lanes must hold the same
void join_warp();
void join_block();

void start_copy(u32 shared, const void* global);  // 16 bytes; a null source writes zeros
void commit_copies();
void wait_copies(int pending);
void load_matrices(u32* fragment, u32 row_address, bool transposed);
void store_matrices(const u32* fragment, u32 row_address, bool transposed);
void multiply_tile(float* d, const u32* a, u32 b0, u32 b1, bool is_half);

// ---- sm_90 ----

void init_mbarrier(u32 barrier, u32 arrivals);
void fence_mbarriers();
void arrive_mbarrier(u32 barrier, u32 bytes, const char* who);
void wait_mbarrier(u32 barrier, u32 parity);
void start_load(u32 target, const void* map, u32 barrier, const int (&coordinates)[5]);
void start_store(const void* map, u32 source, const int (&coordinates)[5]);
void start_linear_load(u32 target, const void* source, u32 bytes, u32 barrier);
void start_linear_store(float* target, u32 source, u32 bytes, bool adds);
void commit_stores();
void wait_stores(int pending, bool written);  // or else only read
void fence_proxy();
void meet_named_barrier(int id, int threads, bool wait);
void set_registers(int count, bool increase);

// D = A B or D += A B for 64 rows, `steps` times 16 deep. The accumulator holds columns / 2 registers per thread.
struct ProductCall {
  float* d;
  const u32* a;              // four registers per step, or null when A comes from shared memory
  const u64* a_descriptors;  // one per step
  const u64* b_descriptors;
  int columns, steps;
  bool accumulate;
  bool a_by_columns, b_by_columns;  // the depth runs over rows of the tile ("MN-major"), not along them
  bool is_half;
};
void start_products(const ProductCall& call);  // fence, all steps, commit
void wait_products(int pending);

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
  int ctas_per_sm;  // promised to the compiler
  int shared_bytes;
  int live_ctas;  // how many blocks may be alive at a time
  int schedule;
  int late_copies;    // copies and bulk loads land at the wait that covers them, else when they are issued
  int late_products;  // the same for products of warpgroups and for bulk stores
  int poison;         // a late copy fills its target, and a late product its accumulators, with NaN bytes when it is issued
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
