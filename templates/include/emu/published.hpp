// Part of runtime.cpp: words in global memory by which blocks wait for each other. They order nothing in shared memory.
#pragma once
#include "bulk.hpp"

namespace fg::emu {

void wait_word(const u32* address, u32 value) {
  preempt(SYNC_PREEMPTION_ODDS);
  if (!global_allowed(address, 4, false, IN_WORD)) return stop();
  Fiber& fiber = *machine.running;
  while (*address != value) {
    fiber.wait_for = *address;
    fiber.wait_value = value;
    machine.word_waiters.push_back(&fiber);
    suspend(IN_WORD);
  }
  counters.global_bytes_read += 4;
}

void write_word(u32* address, u32 value, bool adds, const char* who) {
  preempt(SYNC_PREEMPTION_ODDS);
  if (!global_allowed(address, 4, true, who)) return stop();
  const size_t open = unwritten_stores(machine.running->bulk);
  if (open) fault("order", "%s by a thread of which %zu bulk stores may not be in global memory yet", who, open);
  *address = adds ? *address + value : value;
  counters.global_bytes_written += 4;
  wake(machine.word_waiters);
}

void publish_word(u32* address, u32 value) { write_word(address, value, false, "publish_word"); }
void count_word(u32* address) { write_word(address, 1, true, "count_word"); }

}  // namespace fg::emu
