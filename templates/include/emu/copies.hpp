// Part of runtime.cpp: asynchronous copies of one thread.
#pragma once
#include "memory.hpp"

namespace fg::emu {
namespace {

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

}  // namespace

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
}  // namespace fg::emu
