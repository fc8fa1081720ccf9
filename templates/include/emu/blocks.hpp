// Part of runtime.cpp: life of a block, and the main loop.
#pragma once
#include <sys/mman.h>

#include "copies.hpp"
#include "products.hpp"
#include "published.hpp"

namespace fg::emu {
namespace {

// What engines still do when a block ends would touch memory that belongs to the next one.
void report_unfinished(Block& block) {
  size_t stores = 0;
  u32 products = 0;
  for (const Fiber& fiber : block.fibers) {
    const BulkQueue& queue = fiber.bulk;
    stores += queue.stores.size() - (queue.waited ? queue.group_ends[queue.waited - 1] : 0);
    products = std::max(products, fiber.products - fiber.products_waited);
  }
  if (stores) fault("exit", "the block ends with %zu bulk stores that nobody has waited for", stores);
  if (products) fault("exit", "the block ends with %u products that nobody has waited for", products);
  const auto own = [&block](const BulkLoad& load) { return load.block == &block; };
  const auto loads = std::count_if(machine.loads.begin(), machine.loads.end(), own);
  if (loads) fault("exit", "the block ends with %zu bulk loads that nobody has waited for", static_cast<size_t>(loads));
  machine.loads.erase(std::remove_if(machine.loads.begin(), machine.loads.end(), own), machine.loads.end());
  for (const Mbarrier& barrier : block.mbarriers) {
    if (barrier.bytes && !loads)
      fault("exit", "mbarrier #%d at 0x%x ends with %lld bytes still to come", barrier.slot, barrier.address, barrier.bytes);
  }
  for (size_t warp = 0; warp < block.warps.size(); ++warp) {
    if (block.warps[warp].registers == block.warps[warp / 4 * 4].registers) continue;
    fault("registers", "the warps of warpgroup %zu end with different numbers of registers", warp / 4);
  }
}

// A copy nobody waited for lands in memory that no one reads any more; only its marks must go.
void retire(Block& block) {
  for (Fiber& fiber : block.fibers) {
    for (size_t copy = fiber.copies.landed; copy < fiber.copies.copies.size(); ++copy) {
      if (machine.launch.races) block.shadow.settle(fiber.copies.copies[copy].shared - SHARED_BASE, COPY_BYTES, fiber.thread);
    }
    fiber.copies.clear();
  }
  machine.landing = &block;
  for (Fiber& fiber : block.fibers) write_late_sums(fiber);
  report_unfinished(block);
  machine.landing = nullptr;
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

// What a compiler allots when as many blocks as promised fill the registers of an SM.
int launch_registers() { return std::min(255, 65536 / (machine.launch.threads * machine.launch.ctas_per_sm)) / 8 * 8; }

void reset_engines(Block& block) {
  block.mbarriers.clear();
  block.mbarrier_at.clear();
  for (NamedBarrier& barrier : block.named) barrier = NamedBarrier{};
  block.groups.assign(machine.launch.threads / GROUP_LANES, Warpgroup{});
  for (size_t group = 0; group < block.groups.size(); ++group) {
    block.groups[group].block = &block;
    block.groups[group].index = static_cast<int>(group);
  }
  block.bulk_waiters.clear();
  block.register_waiters.clear();
  block.load_clocks.clear();
  block.free_registers = 0;
  for (Fiber& fiber : block.fibers) {
    fiber.mbarrier_fences = fiber.products = fiber.products_waited = 0;
    fiber.bulk = BulkQueue{};
  }
  for (Warp& warp : block.warps) warp.registers = warp.wanted_registers = launch_registers();
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
  reset_engines(block);
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

std::string waits_in(const Block& block, const Fiber& fiber) {
  const std::string name = fiber.waits_in, first = std::to_string(fiber.wait_for), second = std::to_string(fiber.wait_value);
  if (name == IN_MBARRIER) {
    const Mbarrier& barrier = block.mbarriers[fiber.wait_for];
    return name + " for parity " + second + " of #" + first + ", which is in phase " + std::to_string(barrier.phase) + " and lacks " +
           std::to_string(barrier.pending) + " of " + std::to_string(barrier.expected) + " arrivals and " + std::to_string(barrier.bytes) +
           " bytes";
  }
  if (name == IN_NAMED_BARRIER) {
    const int arrived = block.named[fiber.wait_for].arrived;
    return name + " " + first + ", where " + std::to_string(arrived) + " of " + second + " threads have arrived";
  }
  if (name == IN_WORD) return name + " for " + second + " where " + first + " stands";
  if (name == IN_PRODUCT_WAIT) return name + " for product " + std::to_string(fiber.wait_for - 1);
  if (name == IN_REGISTERS) return name + " to " + first + " per thread; the pool has " + second + " per thread of a warp";
  return name;
}

std::string describe(const Block& block, const Warp& warp) {
  std::map<std::string, u32> lanes;
  for (int lane = 0; lane < LANES; ++lane) {
    const Fiber& fiber = block.fibers[warp.index * LANES + lane];
    lanes[fiber.returned ? "returned" : fiber.waits_in ? "wait in " + waits_in(block, fiber) : "run"] |= 1u << lane;
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

// Nobody can run, so an operation that somebody waits for takes effect, any of them. False when there is none.
bool land_awaited() {
  std::vector<std::function<void()>> awaited;
  std::vector<Block*> owners;
  for (size_t index = 0; index < machine.loads.size(); ++index) {
    const BulkLoad& load = machine.loads[index];
    if (load.block->mbarriers[load.mbarrier].waiters.empty()) continue;
    owners.push_back(load.block);
    awaited.push_back([index] {
      const BulkLoad landed = machine.loads[index];
      machine.loads.erase(machine.loads.begin() + static_cast<std::ptrdiff_t>(index));
      land(landed);
    });
  }
  for (const auto& block : machine.blocks) {
    if (!block->alive) continue;
    for (Warpgroup& group : block->groups) {
      if (group.wanted <= group.executed || !first_is_issued(group)) continue;
      owners.push_back(block.get());
      awaited.push_back([&group] { execute_first(group); });
    }
    for (size_t index = 0; index < block->bulk_waiters.size(); ++index) {
      owners.push_back(block.get());
      awaited.push_back([&block, index] {
        Fiber& fiber = *block->bulk_waiters[index];
        block->bulk_waiters.erase(block->bulk_waiters.begin() + static_cast<std::ptrdiff_t>(index));
        perform_wanted(fiber);
        make_ready(fiber);
      });
    }
  }
  if (awaited.empty()) return false;
  const u32 chosen = random_below(awaited.size());
  machine.running = nullptr;
  machine.landing = owners[chosen];
  awaited[chosen]();
  machine.landing = nullptr;
  return true;
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
  machine.loads.clear();
  machine.word_waiters.clear();
}

void run_blocks() {
  while (!machine.stopped) {
    retire_finished_blocks();
    start_waiting_blocks();
    Fiber* next = take_next();
    if (!next) {
      if (machine.alive_blocks && land_awaited()) continue;
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

}  // namespace
}  // namespace fg::emu
