// Happens-before checker for the shared memory of one block.
//
// A mark per two bytes of shared memory holds the last write and the reads since. Two accesses by different threads, one of them a write,
// must be ordered by a block barrier, or by a chain of warp barriers inside one warp. Shuffles, votes, matrix loads and products order
// nothing: CUDA promises memory ordering for __syncwarp and __syncthreads only.
//
// Time is (epoch, clock): a block barrier orders everything before it, so it just starts an epoch and all knowledge of threads about each
// other starts anew; within an epoch every warp has a clock and every thread a vector of the clocks of others that it knows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "runtime.hpp"

namespace fg::emu {

struct Conflict {
  enum Kind { NONE, AFTER_WRITE, AFTER_READ, IN_FLIGHT } kind = NONE;
  int thread = 0;  // the other one
};

class Shadow {
 public:
  static constexpr u32 GRAIN = 2;  // bytes per mark: the narrowest access, so that neighbours never look like a race

  // A new block. Old marks are out of date by their epoch, nothing has to be cleared.
  void start_block(u32 shared_bytes, int threads) {
    grains_ = (shared_bytes + GRAIN - 1) / GRAIN;
    threads_ = threads;
    writes_.resize(std::max<size_t>(writes_.size(), grains_));
    reads_.resize(std::max<size_t>(reads_.size(), static_cast<size_t>(grains_) * (threads / 32)));
    known_.resize(std::max<size_t>(known_.size(), static_cast<size_t>(threads) * threads));
    known_epoch_.resize(std::max<size_t>(known_epoch_.size(), threads));
    clock_.assign(threads / 32, 1);
    ++epoch_;
  }

  void block_barrier() { ++epoch_; }

  void warp_barrier(int warp) {
    joined_.assign(threads_, 0);
    for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) {
      if (known_epoch_[thread] != epoch_) continue;
      const u32* known = &known_[static_cast<size_t>(thread) * threads_];
      for (int other = 0; other < threads_; ++other) joined_[other] = std::max(joined_[other], known[other]);
    }
    std::fill_n(joined_.begin() + warp * 32, 32, clock_[warp]);
    for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) {
      std::copy(joined_.begin(), joined_.end(), known_.begin() + static_cast<size_t>(thread) * threads_);
      known_epoch_[thread] = epoch_;
    }
    ++clock_[warp];
  }

  // A read that hands its data to all of `lanes`, so every one of them must be ordered after the writer.
  Conflict read(u32 offset, u32 bytes, int warp, u32 lanes) {
    Conflict conflict;
    const u32 epoch = epoch_, clock = clock_[warp];
    WriteMark* write = &writes_[offset / GRAIN];
    ReadMark* read = &reads_[static_cast<size_t>(warp) * grains_ + offset / GRAIN];
    for (u32 grain = 0; grain < bytes / GRAIN; ++grain, ++write, ++read) {
      if (write->in_flight) {
        conflict = {Conflict::IN_FLIGHT, write->thread};
      } else if (write->epoch == epoch && !all_know(warp, lanes, *write)) {
        conflict = {Conflict::AFTER_WRITE, write->thread};
      }
      write->read_epoch = epoch;
      // The clock of a warp moves only at its barriers, which order all reads before them.
      *read = {epoch, clock, read->epoch == epoch && read->clock == clock ? read->lanes | lanes : lanes};
    }
    return conflict;
  }

  // `unchanged`: the bytes in memory are those written, so that several threads storing one value do no harm among themselves.
  Conflict write(u32 offset, u32 bytes, int thread, bool in_flight, bool unchanged) {
    Conflict conflict;
    for (u32 grain = offset / GRAIN; grain < (offset + bytes) / GRAIN; ++grain) {
      WriteMark& mark = writes_[grain];
      if (mark.in_flight) {
        conflict = {Conflict::IN_FLIGHT, mark.thread};
      } else if (mark.epoch == epoch_ && !knows(thread, mark.thread, mark.clock)) {
        if (unchanged) continue;
        conflict = {Conflict::AFTER_WRITE, mark.thread};
      } else if (mark.read_epoch == epoch_) {
        const int reader = unknown_reader(grain, thread);
        if (reader >= 0) conflict = {Conflict::AFTER_READ, reader};
      }
      mark = {epoch_, clock_[thread / 32], 0, static_cast<u16>(thread), in_flight};
    }
    return conflict;
  }

  // A copy has landed, and its thread has waited for it: from now on it counts as a write of that thread.
  void settle(u32 offset, u32 bytes, int thread) {
    for (u32 grain = offset / GRAIN; grain < (offset + bytes) / GRAIN; ++grain) {
      WriteMark& mark = writes_[grain];
      if (mark.in_flight && mark.thread == thread) mark = {epoch_, clock_[thread / 32], 0, static_cast<u16>(thread), false};
    }
  }

 private:
  struct WriteMark {
    u32 epoch = 0, clock = 0;
    u32 read_epoch = 0;  // of the latest read by anyone
    u16 thread = 0;
    bool in_flight = false;
  };
  struct ReadMark {
    u32 epoch = 0, clock = 0, lanes = 0;
  };

  bool knows(int thread, int other, u32 clock) const {
    return thread == other || (known_epoch_[thread] == epoch_ && known_[static_cast<size_t>(thread) * threads_ + other] >= clock);
  }
  bool all_know(int warp, u32 lanes, const WriteMark& write) const {
    for (u32 rest = lanes; rest; rest &= rest - 1) {
      if (!knows(warp * 32 + __builtin_ctz(rest), write.thread, write.clock)) return false;
    }
    return true;
  }
  int unknown_reader(u32 grain, int thread) const {
    for (int warp = 0; warp < threads_ / 32; ++warp) {
      const ReadMark& mark = reads_[static_cast<size_t>(warp) * grains_ + grain];
      if (mark.epoch != epoch_) continue;
      for (u32 rest = mark.lanes; rest; rest &= rest - 1) {
        const int reader = warp * 32 + __builtin_ctz(rest);
        if (!knows(thread, reader, mark.clock)) return reader;
      }
    }
    return -1;
  }

  u32 epoch_ = 0;
  u32 grains_ = 0;
  int threads_ = 0;
  std::vector<WriteMark> writes_;
  std::vector<ReadMark> reads_;  // [warp][grain]
  std::vector<u32> known_;       // [thread][other]: the latest clock of `other` that `thread` is ordered after
  std::vector<u32> known_epoch_;
  std::vector<u32> clock_;  // of each warp
  std::vector<u32> joined_;
};

}  // namespace fg::emu
