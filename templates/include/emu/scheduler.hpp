// Part of runtime.cpp: which thread runs next.
#pragma once
#include "machine.hpp"

namespace fg::emu {
namespace {

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

void wake(std::vector<Fiber*>& waiters) {
  for (Fiber* waiter : waiters) make_ready(*waiter);
  waiters.clear();
}

// Gives up the launch: the faults so far are the result. Comes back only when no thread runs, and the main loop is about to end.
void stop() {
  machine.stopped = true;
  if (!machine.running) return;
  switch_context(machine.running->context, machine.main);
  std::abort();
}

void preempt(int odds = PREEMPTION_ODDS) {
  if (machine.launch.schedule == LOCKSTEP || machine.launch.schedule == GREEDY) return;
  if (random_below(odds)) return;
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

}  // namespace
}  // namespace fg::emu
