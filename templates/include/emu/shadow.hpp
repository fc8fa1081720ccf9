// Happens-before checker for the shared memory of one block.
//
// A mark per two bytes of shared memory holds the last write and the reads since. Two accesses by different threads, one of them a write,
// must be ordered by a block barrier, or by a chain of warp barriers inside one warp. Shuffles, votes, matrix loads and products order
// nothing: CUDA promises memory ordering for __syncwarp and __syncthreads only.
//
// Time is (epoch, clock): a block barrier orders everything before it, so it just starts an epoch and all knowledge of threads about each
// other starts anew; within an epoch every warp has a clock and every thread a vector of the clocks of others that it knows.
//
// From sm_90 on, engines access shared memory on their own: the tensor core for each warp, bulk stores of each warp, and bulk loads of each
// mbarrier. An engine has a clock that counts its operations and outlives epochs. An operation needs that whoever issued it is ordered
// after the accesses before; a thread is ordered after the operation once it has waited for it, or for someone who has. Engines move
// 16-byte chunks, so their marks are per chunk. Ordinary stores are visible to an engine only behind a proxy fence of the storing thread.
#pragma once
#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <vector>

#include "runtime.hpp"

namespace fg::emu {

struct Conflict {
  enum Kind { NONE, AFTER_WRITE, AFTER_READ, IN_FLIGHT, AFTER_ENGINE_WRITE, AFTER_ENGINE_READ, NOT_FENCED } kind = NONE;
  int other = 0;   // thread or engine
  u32 offset = 0;  // of the first byte concerned; set by engines
};

// What somebody knows: for each thread and engine, the latest clock that is ordered before.
struct Clocks {
  u32 epoch = 0;  // of `threads`
  std::vector<u32> threads, engines;
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
    barrier_clock_.assign(threads / 32, 0);
    first_epoch_ = ++epoch_;
    num_engines_ = 0;
    spilled_.clear();
  }

  void block_barrier() {
    ++epoch_;
    spilled_.clear();
    if (!num_engines_) return;
    joined_engines_.assign(num_engines_, 0);
    for (int thread = 0; thread < threads_; ++thread) join(joined_engines_.data(), engines_known_by(thread), num_engines_);
    for (int thread = 0; thread < threads_; ++thread) std::copy(joined_engines_.begin(), joined_engines_.end(), engines_known_by(thread));
  }

  void warp_barrier(int warp) {
    joined_.assign(threads_, 0);
    for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) {
      if (known_epoch_[thread] != epoch_) continue;
      const u32* known = &known_[static_cast<size_t>(thread) * threads_];
      for (int other = 0; other < threads_; ++other) joined_[other] = std::max(joined_[other], known[other]);
    }
    std::fill_n(joined_.begin() + warp * 32, 32, clock_[warp]);
    if (num_engines_) join_engines_of(warp);
    for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) {
      std::copy(joined_.begin(), joined_.end(), known_.begin() + static_cast<size_t>(thread) * threads_);
      known_epoch_[thread] = epoch_;
    }
    barrier_clock_[warp] = clock_[warp]++;
  }

  // ---- order beyond barriers of the block and of a warp ----

  // `into` gets what the thread did and knows. Until `advance`, later accesses of its warp count as published too.
  void release(Clocks& into, int thread) {
    if (into.epoch != epoch_) {
      into.threads.assign(threads_, 0);
      into.epoch = epoch_;
    }
    if (known_epoch_[thread] == epoch_) join(into.threads.data(), &known_[static_cast<size_t>(thread) * threads_], threads_);
    into.threads[thread] = std::max(into.threads[thread], clock_[thread / 32]);
    if (!num_engines_) return;
    into.engines.resize(num_engines_);
    join(into.engines.data(), engines_known_by(thread), num_engines_);
  }
  void advance(int thread) { ++clock_[thread / 32]; }
  void acquire(int thread, const Clocks& from) {
    if (from.epoch == epoch_) join(knowledge_of(thread), from.threads.data(), threads_);
    if (num_engines_ && !from.engines.empty()) join(engines_known_by(thread), from.engines.data(), num_engines_);
  }
  void acquire_engine(int thread, int engine, u32 clock) {
    u32& known = engines_known_by(thread)[engine];
    known = std::max(known, clock);
  }
  u32 clock_of(int thread) const { return clock_[thread / 32]; }
  u32 epoch() const { return epoch_; }

  // ---- engines ----

  static constexpr int MOST_MBARRIERS = 64;
  int product_engine(int warp) const { return warp; }
  int store_engine(int warp) const { return threads_ / 32 + warp; }
  int load_engine(int mbarrier) const { return threads_ / 32 * 2 + mbarrier; }

  // Before the first use of an engine by a block; costs nothing later on.
  void use_engines() {
    if (num_engines_) return;
    num_engines_ = load_engine(MOST_MBARRIERS);
    num_chunks_ = (grains_ + GRAINS_PER_CHUNK - 1) / GRAINS_PER_CHUNK;
    chunks_.assign(num_chunks_, {});
    engine_reads_.assign(static_cast<size_t>(num_chunks_) * load_engine(0), 0);
    engines_known_.assign(static_cast<size_t>(num_engines_) * threads_, 0);
    fences_.assign(threads_, 1);
    // Writes before now count as unfenced ones.
    for (u32 grain = 0; grain < grains_; ++grain) {
      if (writes_[grain].epoch < first_epoch_ && writes_[grain].read_epoch < first_epoch_) continue;
      writes_[grain].fence = 1;
      chunks_[grain / GRAINS_PER_CHUNK].touched = true;
    }
  }
  void fence_proxy(int thread) {
    use_engines();
    ++fences_[thread];
  }

  // The knowledge of an operation's issuer: what every one of `lanes` knows. Call it before `engine_access`.
  void issue(int warp, u32 lanes) {
    view_.assign(threads_, ~0u);
    view_engines_.assign(num_engines_, ~0u);
    for (u32 rest = lanes; rest; rest &= rest - 1) {
      const int thread = warp * 32 + __builtin_ctz(rest);
      u32* known = knowledge_of(thread);
      known[thread] = ~0u;  // itself, always
      for (int other = 0; other < threads_; ++other) view_[other] = std::min(view_[other], known[other]);
      known[thread] = 0;
      const u32* engines = engines_known_by(thread);
      for (int other = 0; other < num_engines_; ++other) view_engines_[other] = std::min(view_engines_[other], engines[other]);
    }
  }
  // Operation `clock` of an engine touches whole chunks.
  Conflict engine_access(int engine, u32 clock, u32 offset, u32 bytes, bool write) {
    Conflict conflict;
    const u32 end = std::min((offset + bytes + CHUNK - 1) / CHUNK, num_chunks_);
    for (u32 chunk = offset / CHUNK; chunk < end; ++chunk) {
      ChunkMark& mark = chunks_[chunk];
      if (mark.clock > view_engines_[mark.writer]) conflict = {Conflict::AFTER_ENGINE_WRITE, mark.writer, chunk * CHUNK};
      if (mark.touched) check_grains(chunk, write, conflict);
      u32* reads = &engine_reads_[static_cast<size_t>(chunk) * load_engine(0)];
      if (!write) {
        reads[engine] = clock;
        continue;
      }
      for (int reader = 0; reader < load_engine(0); ++reader) {
        if (reads[reader] > view_engines_[reader]) conflict = {Conflict::AFTER_ENGINE_READ, reader, chunk * CHUNK};
        reads[reader] = 0;
      }
      if (mark.touched) clear_grains(chunk);
      mark = {clock, engine, false};
    }
    return conflict;
  }

  // A read that hands its data to all of `lanes`, so every one of them must be ordered after the writer.
  Conflict read(u32 offset, u32 bytes, int warp, u32 lanes) {
    Conflict conflict;
    const u32 epoch = epoch_, clock = clock_[warp];
    WriteMark* write = &writes_[offset / GRAIN];
    ReadMark* read = &reads_[static_cast<size_t>(warp) * grains_ + offset / GRAIN];
    for (u32 grain = 0; grain < bytes / GRAIN; ++grain, ++write, ++read) {
      if (write->in_flight) {
        conflict = {Conflict::IN_FLIGHT, write->thread, 0};
      } else if (write->epoch == epoch && !all_know(warp, lanes, *write)) {
        conflict = {Conflict::AFTER_WRITE, write->thread, 0};
      }
      write->read_epoch = epoch;
      if (read->epoch == epoch && read->clock == clock) {
        read->lanes |= lanes;
        continue;
      }
      // A barrier of the warp orders all reads before it; after a release by one lane, the reads of others still count.
      if (read->epoch == epoch && read->clock > barrier_clock_[warp] && (read->lanes & ~lanes)) spill(offset / GRAIN + grain, warp, *read);
      *read = {epoch, clock, lanes};
    }
    if (num_engines_) touch_by_threads(offset, bytes, warp, lanes, false, conflict);
    return conflict;
  }

  // `unchanged`: the bytes in memory are those written, so that several threads storing one value do no harm among themselves.
  Conflict write(u32 offset, u32 bytes, int thread, bool in_flight, bool unchanged) {
    Conflict conflict;
    for (u32 grain = offset / GRAIN; grain < (offset + bytes) / GRAIN; ++grain) {
      WriteMark& mark = writes_[grain];
      if (mark.in_flight) {
        conflict = {Conflict::IN_FLIGHT, mark.thread, 0};
      } else if (mark.epoch == epoch_ && !knows(thread, mark.thread, mark.clock)) {
        if (unchanged) continue;
        conflict = {Conflict::AFTER_WRITE, mark.thread, 0};
      } else if (mark.read_epoch == epoch_) {
        const int reader = unknown_reader(grain, thread);
        if (reader >= 0) conflict = {Conflict::AFTER_READ, reader, 0};
      }
      mark = {epoch_, clock_[thread / 32], 0, num_engines_ ? fences_[thread] : 0, static_cast<u16>(thread), in_flight, false};
    }
    if (num_engines_) touch_by_threads(offset, bytes, thread / 32, 1u << thread % 32, true, conflict);
    return conflict;
  }

  // A copy has landed, and its thread has waited for it: from now on it counts as a write of that thread.
  void settle(u32 offset, u32 bytes, int thread) {
    for (u32 grain = offset / GRAIN; grain < (offset + bytes) / GRAIN; ++grain) {
      WriteMark& mark = writes_[grain];
      if (mark.in_flight && mark.thread == thread)
        mark = {epoch_, clock_[thread / 32], 0, mark.fence, static_cast<u16>(thread), false, false};
    }
  }

 private:
  struct WriteMark {
    u32 epoch = 0, clock = 0;
    u32 read_epoch = 0;  // of the latest read by anyone
    u32 fence = 0;       // proxy fences of the writer before it wrote
    u16 thread = 0;
    bool in_flight = false;
    bool spilled = false;  // there are reads in `spilled_` too
  };
  struct ReadMark {
    u32 epoch = 0, clock = 0, lanes = 0;
  };
  struct SpilledRead {
    int warp;
    ReadMark mark;
  };
  struct ChunkMark {
    u32 clock = 0;  // of the last write by an engine; 0 is known to all
    int writer = 0;
    bool touched = false;  // by threads since then
  };
  static constexpr u32 CHUNK = 16, GRAINS_PER_CHUNK = CHUNK / GRAIN;

  static void join(u32* into, const u32* from, int count) {
    for (int i = 0; i < count; ++i) into[i] = std::max(into[i], from[i]);
  }
  u32* knowledge_of(int thread) {
    u32* known = &known_[static_cast<size_t>(thread) * threads_];
    if (known_epoch_[thread] != epoch_) std::fill_n(known, threads_, 0);
    known_epoch_[thread] = epoch_;
    return known;
  }
  u32* engines_known_by(int thread) { return &engines_known_[static_cast<size_t>(thread) * num_engines_]; }
  void join_engines_of(int warp) {
    joined_engines_.assign(num_engines_, 0);
    for (int lane = 0; lane < 32; ++lane) join(joined_engines_.data(), engines_known_by(warp * 32 + lane), num_engines_);
    for (int lane = 0; lane < 32; ++lane) std::copy(joined_engines_.begin(), joined_engines_.end(), engines_known_by(warp * 32 + lane));
  }
  void spill(u32 grain, int warp, const ReadMark& mark) {
    spilled_[grain].push_back({warp, mark});
    writes_[grain].spilled = true;
  }

  // Threads against engines; threads against threads are checked per grain.
  void touch_by_threads(u32 offset, u32 bytes, int warp, u32 lanes, bool write, Conflict& conflict) {
    for (u32 chunk = offset / CHUNK; chunk <= (offset + bytes - 1) / CHUNK; ++chunk) {
      ChunkMark& mark = chunks_[chunk];
      mark.touched = true;
      for (u32 rest = lanes; rest; rest &= rest - 1) {
        const u32* known = engines_known_by(warp * 32 + __builtin_ctz(rest));
        if (mark.clock > known[mark.writer]) conflict = {Conflict::AFTER_ENGINE_WRITE, mark.writer, offset};
        if (!write) continue;
        const u32* reads = &engine_reads_[static_cast<size_t>(chunk) * load_engine(0)];
        for (int reader = 0; reader < load_engine(0); ++reader) {
          if (reads[reader] > known[reader]) conflict = {Conflict::AFTER_ENGINE_READ, reader, offset};
        }
      }
    }
  }
  // An engine against threads, with the knowledge of `issue`.
  void check_grains(u32 chunk, bool write, Conflict& conflict) {
    for (u32 grain = chunk * GRAINS_PER_CHUNK; grain < std::min((chunk + 1) * GRAINS_PER_CHUNK, grains_); ++grain) {
      const WriteMark& mark = writes_[grain];
      if (mark.epoch >= first_epoch_) {
        if (mark.in_flight) conflict = {Conflict::IN_FLIGHT, mark.thread, grain * GRAIN};
        if (mark.fence == fences_[mark.thread]) conflict = {Conflict::NOT_FENCED, mark.thread, grain * GRAIN};
        if (mark.epoch == epoch_ && mark.clock > view_[mark.thread]) conflict = {Conflict::AFTER_WRITE, mark.thread, grain * GRAIN};
      }
      if (!write || mark.read_epoch != epoch_) continue;
      const int reader = find_reader(grain, [this](int thread, u32 clock) { return view_[thread] >= clock; });
      if (reader >= 0) conflict = {Conflict::AFTER_READ, reader, grain * GRAIN};
    }
  }
  void clear_grains(u32 chunk) {
    for (u32 grain = chunk * GRAINS_PER_CHUNK; grain < std::min((chunk + 1) * GRAINS_PER_CHUNK, grains_); ++grain) writes_[grain] = {};
  }

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
    return find_reader(grain, [&](int reader, u32 clock) { return knows(thread, reader, clock); });
  }
  // A thread whose read of the grain is not `ordered`, or -1.
  template <class Ordered>
  int find_reader(u32 grain, Ordered ordered) const {
    const auto unordered_lane = [&](int warp, const ReadMark& mark) {
      if (mark.epoch != epoch_) return -1;
      for (u32 rest = mark.lanes; rest; rest &= rest - 1) {
        const int reader = warp * 32 + __builtin_ctz(rest);
        if (!ordered(reader, mark.clock)) return reader;
      }
      return -1;
    };
    for (int warp = 0; warp < threads_ / 32; ++warp) {
      const int reader = unordered_lane(warp, reads_[static_cast<size_t>(warp) * grains_ + grain]);
      if (reader >= 0) return reader;
    }
    if (!writes_[grain].spilled) return -1;
    const auto found = spilled_.find(grain);
    if (found == spilled_.end()) return -1;
    for (const SpilledRead& read : found->second) {
      const int reader = unordered_lane(read.warp, read.mark);
      if (reader >= 0) return reader;
    }
    return -1;
  }

  u32 epoch_ = 0, first_epoch_ = 0;  // of the block
  u32 grains_ = 0;
  int threads_ = 0;
  std::vector<WriteMark> writes_;
  std::vector<ReadMark> reads_;  // [warp][grain]
  std::vector<u32> known_;       // [thread][other]: the latest clock of `other` that `thread` is ordered after
  std::vector<u32> known_epoch_;
  std::vector<u32> clock_;          // of each warp
  std::vector<u32> barrier_clock_;  // of each warp at its last warp barrier
  std::vector<u32> joined_;
  std::unordered_map<u32, std::vector<SpilledRead>> spilled_;

  int num_engines_ = 0;  // 0 until the block uses one
  u32 num_chunks_ = 0;
  std::vector<ChunkMark> chunks_;
  std::vector<u32> engine_reads_;   // [chunk][engine]: clock of its last read
  std::vector<u32> engines_known_;  // [thread][engine]
  std::vector<u32> fences_;         // proxy fences of each thread, plus one
  std::vector<u32> view_, view_engines_, joined_engines_;
};

}  // namespace fg::emu
