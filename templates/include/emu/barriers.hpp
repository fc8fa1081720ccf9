// Part of runtime.cpp: mbarriers, named barriers, and registers that move between warps.
#pragma once
#include "collectives.hpp"

namespace fg::emu {
namespace {

constexpr u32 MOST_ARRIVALS = (1u << 20) - 1;  // and of bytes still to come

void use_engines(Block& block) {
  if (!machine.launch.races) return;
  block.shadow.use_engines();
}

// Null after a report that ends the run.
Mbarrier* mbarrier_of(u32 address, const char* who) {
  Block& block = this_block();
  if (!shared_bytes(address, 8, who)) {
    stop();
    return nullptr;
  }
  const int slot = block.mbarrier_at.empty() ? 0 : block.mbarrier_at[(address - SHARED_BASE) / 8];
  if (!slot) {
    fault("mbarrier", "%s on 0x%x, which is not initialised", who, address);
    stop();
    return nullptr;
  }
  return &block.mbarriers[slot - 1];
}

// Polling sees a parity only, so whoever has not yet seen the end of one phase must not be overtaken by the end of the next.
void check_waits(const Mbarrier& barrier) {
  const Shadow& shadow = this_block().shadow;
  const bool current_epoch = barrier.arrived.epoch == shadow.epoch();
  for (size_t thread = 0; thread < barrier.last_wait.size(); ++thread) {
    const Mbarrier::Wait& wait = barrier.last_wait[thread];
    if (wait.epoch != shadow.epoch() || (current_epoch && barrier.arrived.threads[thread] >= wait.clock)) continue;
    return fault("race", "phase %llu of mbarrier #%d at 0x%x ends, not ordered after the wait of thread %zu for an earlier phase",
                 barrier.phase, barrier.slot, barrier.address, thread);
  }
}

void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  if (machine.launch.races) {
    check_waits(barrier);
    barrier.over = barrier.arrived;
  }
  ++barrier.phase;
  barrier.pending = barrier.expected;
  wake(barrier.waiters);
}

// A bulk load has landed.
void complete_bytes(Mbarrier& barrier, u32 bytes, u32 clock) {
  Block& block = this_block();
  if (block.fibers[barrier.owner].mbarrier_fences == barrier.owner_fence) {
    fault("mbarrier", "a bulk load completes on #%d at 0x%x, whose init was not followed by fence_mbarrier_init", barrier.slot,
          barrier.address);
  }
  barrier.bytes -= bytes;
  if (barrier.bytes < 0 && barrier.pending == 0) {  // below zero is right only while an arrival that expects them is still to come
    fault("mbarrier", "#%d at 0x%x got %lld bytes more than its phase expects", barrier.slot, barrier.address, -barrier.bytes);
    return stop();
  }
  if (machine.launch.races) {
    const size_t engine = block.shadow.load_engine(barrier.slot);
    if (barrier.arrived.engines.size() <= engine) barrier.arrived.engines.resize(block.shadow.load_engine(Shadow::MOST_MBARRIERS));
    barrier.arrived.engines[engine] = std::max(barrier.arrived.engines[engine], clock);
  }
  end_phase_if_complete(barrier);
}

// Registers of a warp change as soon as the pool allows it.
bool grant_registers(Block& block, Warp& warp) {
  const int needed = (warp.wanted_registers - warp.registers) * LANES;
  if (needed > block.free_registers) return false;
  block.free_registers -= needed;
  warp.registers = warp.wanted_registers;
  if (needed < 0) wake(block.register_waiters);
  return true;
}

}  // namespace

void init_mbarrier(u32 address, u32 arrivals) {
  preempt(SYNC_PREEMPTION_ODDS);
  Block& block = this_block();
  use_engines(block);
  if (!shared_bytes(address, 8, "mbarrier_init")) return;
  if (block.mbarrier_at.empty()) block.mbarrier_at.assign(machine.launch.shared_bytes / 8 + 1, 0);
  i16& slot = block.mbarrier_at[(address - SHARED_BASE) / 8];
  if (slot) return fault("mbarrier", "0x%x is initialised twice", address);
  if (arrivals < 1 || arrivals > MOST_ARRIVALS) return fault("mbarrier", "0x%x is initialised for %u arrivals", address, arrivals);
  if (block.mbarriers.size() >= Shadow::MOST_MBARRIERS) {
    fault("mbarrier", "more than %d mbarriers in a block, which the emulation does not follow", Shadow::MOST_MBARRIERS);
    return stop();
  }
  block.mbarriers.emplace_back();
  Mbarrier& barrier = block.mbarriers.back();
  barrier.address = address;
  barrier.slot = static_cast<int>(block.mbarriers.size()) - 1;
  barrier.owner = machine.running->thread;
  barrier.owner_fence = machine.running->mbarrier_fences;
  barrier.expected = barrier.pending = arrivals;
  barrier.last_wait.resize(machine.launch.threads);
  slot = static_cast<i16>(barrier.slot + 1);
}

void fence_mbarriers() { ++machine.running->mbarrier_fences; }

void arrive_mbarrier(u32 address, u32 bytes, const char* who) {
  preempt(SYNC_PREEMPTION_ODDS);
  Mbarrier& barrier = *mbarrier_of(address, who);
  const int thread = machine.running->thread;
  Shadow& shadow = this_block().shadow;
  if (machine.launch.races) {
    shadow.release(barrier.arrived, thread);
    shadow.advance(thread);
  }
  barrier.bytes += bytes;
  if (barrier.bytes > static_cast<i64>(MOST_ARRIVALS))
    fault("mbarrier", "#%d at 0x%x expects %lld bytes", barrier.slot, address, barrier.bytes);
  if (barrier.pending == 0) {
    fault("mbarrier", "%s: #%d at 0x%x has had all its %u arrivals", who, barrier.slot, address, barrier.expected);
    stop();
  }
  --barrier.pending;
  end_phase_if_complete(barrier);
}

void wait_mbarrier(u32 address, u32 parity) {
  preempt(SYNC_PREEMPTION_ODDS);
  Mbarrier& barrier = *mbarrier_of(address, "mbarrier_wait");
  Fiber& fiber = *machine.running;
  if (parity > 1) fault("mbarrier", "mbarrier_wait for parity %u", parity);
  for (bool slept = false; (barrier.phase & 1) == (parity & 1); slept = true) {
    if (slept) {
      fault("mbarrier", "#%d at 0x%x went on by two phases while a thread waited for one, so its parity looks unchanged", barrier.slot,
            address);
    }
    barrier.waiters.push_back(&fiber);
    fiber.wait_for = static_cast<u32>(barrier.slot);
    fiber.wait_value = parity;
    suspend(IN_MBARRIER);
  }
  if (!machine.launch.races) return;
  Shadow& shadow = this_block().shadow;
  shadow.acquire(fiber.thread, barrier.over);
  barrier.last_wait[fiber.thread] = {shadow.epoch(), shadow.clock_of(fiber.thread)};
}

void fence_proxy() {
  if (machine.launch.races) this_block().shadow.fence_proxy(machine.running->thread);
}

void meet_named_barrier(int id, int threads, bool wait) {
  const char* who = wait ? "barrier_sync" : "barrier_arrive";
  preempt(SYNC_PREEMPTION_ODDS);
  Block& block = this_block();
  Fiber& fiber = *machine.running;
  if (id < 1 || id > 15 || threads < LANES || threads > machine.launch.threads || threads % LANES) {
    fault("barrier", "%s(%d, %d): ids are 1 to 15, and whole warps of this block take part", who, id, threads);
    stop();
  }
  NamedBarrier& barrier = block.named[id];
  if (barrier.arrived && barrier.wanted != threads) {
    fault("barrier", "%s(%d, %d) meets threads that count on %d", who, id, threads, barrier.wanted);
  }
  if (!barrier.arrived) barrier.wanted = threads;
  if (machine.launch.races) {
    block.shadow.release(barrier.arriving, fiber.thread);
    if (!wait) block.shadow.advance(fiber.thread);  // who waits does nothing before the barrier is over
  }
  if (++barrier.arrived < barrier.wanted) {
    if (!wait) return;
    barrier.waiters.push_back(&fiber);
    fiber.wait_for = static_cast<u32>(id);
    fiber.wait_value = static_cast<u32>(threads);
    suspend(IN_NAMED_BARRIER);
    return;
  }
  barrier.arrived = 0;
  if (machine.launch.races) {
    // All at once, so that no waiter runs with an old clock.
    if (wait) barrier.waiters.push_back(&fiber);
    for (Fiber* waiter : barrier.waiters) {
      block.shadow.acquire(waiter->thread, barrier.arriving);
      block.shadow.advance(waiter->thread);
    }
    if (wait) barrier.waiters.pop_back();
    barrier.arriving = Clocks{};
  }
  wake(barrier.waiters);
}

void set_registers(int count, bool increase) {
  Block& block = this_block();
  Fiber& fiber = *machine.running;
  Warp& warp = *fiber.warp;
  const char* who = increase ? "registers_increase" : "registers_decrease";
  meet(
      Collective::REGISTERS, [](Rendezvous&, int) {},
      [&](Warp& all) {
        if (count < 24 || count > 256 || count % 8) fault("registers", "%s<%d>: a multiple of 8 in 24..256 is allowed", who, count);
        if (increase ? count < all.registers : count > all.registers) fault("registers", "%s from %d to %d", who, all.registers, count);
        all.wanted_registers = count;
      });
  while (warp.registers != warp.wanted_registers && !grant_registers(block, warp)) {
    block.register_waiters.push_back(&fiber);
    fiber.wait_for = static_cast<u32>(count);
    fiber.wait_value = static_cast<u32>(block.free_registers / LANES);
    suspend(IN_REGISTERS);
  }
}

}  // namespace fg::emu
