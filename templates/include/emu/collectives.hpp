// Part of runtime.cpp: what the lanes of a warp, or the threads of a block, do together.
#pragma once
#include "memory.hpp"

namespace fg::emu {
namespace {

// Deposits with `give`; the last lane runs `act` for the warp, then all go on.
template <class Give, class Act>
void meet(Collective kind, Give give, Act act) {
  Fiber& fiber = *machine.running;
  Warp& warp = *fiber.warp;
  Rendezvous& meeting = warp.rendezvous;
  const int lane = fiber.thread % LANES;
  if (meeting.arrived && meeting.kind != kind) {
    fault("collective", "lanes of warp %d meet in different collectives: lane %d in %s, lanes 0x%x in %s", warp.index, lane,
          COLLECTIVE_NAMES[static_cast<int>(kind)], meeting.arrived, COLLECTIVE_NAMES[static_cast<int>(meeting.kind)]);
    stop();
  }
  meeting.kind = kind;
  meeting.arrived |= 1u << lane;
  give(meeting, lane);
  if (meeting.arrived != ALL_LANES) return suspend(COLLECTIVE_NAMES[static_cast<int>(kind)]);
  meeting.arrived = 0;
  ++counters.collectives;
  if (warp.used_rows) count_conflicts(warp);
  act(warp);
  for (int other = 0; other < LANES; ++other) {
    if (other != lane) make_ready(warp.block->fibers[warp.index * LANES + other]);
  }
}

// Extra passes over the banks for eight rows of 16 bytes.
u32 row_conflicts(const u32* addresses) {
  u32 used[8] = {}, rows[8][8], most = 1;
  for (int row = 0; row < 8; ++row) {
    const u32 address = addresses[row], bank = address / 16 % 8;  // a row fills four banks
    u32 known = 0;
    while (known < used[bank] && rows[bank][known] != address) ++known;
    if (known == used[bank]) rows[bank][used[bank]++] = address;
    most = most < used[bank] ? used[bank] : most;
  }
  return most - 1;
}

// Each lane's pair of elements counts as its own write.
void store_phase(Warp& warp, int matrix, bool transposed) {
  Rendezvous& meeting = warp.rendezvous;
  const char* who = transposed ? "store_matrix_x4_transposed" : "store_matrix_x4";
  counters.matrix_conflicts += row_conflicts(&meeting.value[matrix * 8]);
  for (int row = 0; row < 8; ++row) shared_bytes(meeting.value[matrix * 8 + row], 16, who);
  for (int element = 0; element < 64; ++element) {
    const int row = element / 8, column = element % 8;
    const int line = transposed ? column : row, place = transposed ? row : column;
    const int lane = line * 4 + place / 2;
    const u32 address = meeting.value[matrix * 8 + row] + static_cast<u32>(column) * 2;
    const u16 value = static_cast<u16>(meeting.a[matrix][lane] >> (place % 2 * 16));
    const u32 offset = address - SHARED_BASE;
    if (offset >= static_cast<u32>(machine.launch.shared_bytes)) continue;  // told above
    unsigned char* target = warp.block->shared.get() + offset;
    check_write_by(warp.index * LANES + lane, address, 2, false, std::memcmp(target, &value, 2) == 0, who);
    std::memcpy(target, &value, 2);
  }
}

void load_phase(Warp& warp, int matrix, bool transposed) {
  Rendezvous& meeting = warp.rendezvous;
  const char* who = transposed ? "load_matrix_x4_transposed" : "load_matrix_x4";
  u16 elements[8][8];
  for (int row = 0; row < 8; ++row) {
    const u32 address = meeting.value[matrix * 8 + row];
    std::memset(elements[row], 0xFF, 16);
    if (const unsigned char* bytes = shared_bytes(address, 16, who)) {
      check_read(address, 16, warp.index, ALL_LANES, who);
      std::memcpy(elements[row], bytes, 16);
    }
  }
  counters.matrix_conflicts += row_conflicts(&meeting.value[matrix * 8]);
  for (int lane = 0; lane < LANES; ++lane) {
    const int line = lane / 4, pair = lane % 4 * 2;
    const u32 low = transposed ? elements[pair][line] : elements[line][pair];
    const u32 high = transposed ? elements[pair + 1][line] : elements[line][pair + 1];
    meeting.out[lane][matrix] = low | high << 16;
  }
}

}  // namespace

u32 exchange(u32 value, int lane_mask) {
  u32 result = 0;
  if (lane_mask < 0 || lane_mask >= LANES) fault("collective", "shuffle_xor with lane mask %d", lane_mask);
  meet(
      Collective::SHUFFLE,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = value;
        meeting.lane_mask[lane] = lane_mask;
        meeting.out[lane] = &result;
      },
      [](Warp& warp) {
        Rendezvous& meeting = warp.rendezvous;
        for (int lane = 0; lane < LANES; ++lane) *meeting.out[lane] = meeting.value[(lane ^ meeting.lane_mask[lane]) % LANES];
      });
  return result;
}

bool vote_any(bool predicate) {
  u32 result = 0;
  meet(
      Collective::VOTE,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = predicate;
        meeting.out[lane] = &result;
      },
      [](Warp& warp) {
        Rendezvous& meeting = warp.rendezvous;
        u32 any = 0;
        for (u32 value : meeting.value) any |= value;
        for (u32* out : meeting.out) *out = any;
      });
  return result != 0;
}

void join_warp() {
  meet(
      Collective::WARP_SYNC, [](Rendezvous&, int) {},
      [](Warp& warp) {
        if (machine.launch.races) warp.block->shadow.warp_barrier(warp.index);
      });
}

void join_block() {
  Fiber& fiber = *machine.running;
  Block& block = this_block();
  if (++block.in_barrier < machine.launch.threads) return suspend(IN_BLOCK_SYNC);
  block.in_barrier = 0;
  ++counters.block_barriers;
  if (machine.launch.races) block.shadow.block_barrier();
  for (Warp& warp : block.warps) {
    if (warp.used_rows) count_conflicts(warp);
  }
  for (Fiber& other : block.fibers) {
    if (&other != &fiber) make_ready(other);
  }
}

int broadcast(int value) {
  u32 result = 0;
  meet(
      Collective::BROADCAST,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = static_cast<u32>(value);
        meeting.out[lane] = &result;
      },
      [](Warp& warp) {
        Rendezvous& meeting = warp.rendezvous;
        for (int lane = 0; lane < LANES; ++lane) {
          if (meeting.value[lane] != meeting.value[0]) fault("collective", "warp_uniform of a value that differs between lanes");
          *meeting.out[lane] = meeting.value[0];
        }
      });
  return static_cast<int>(result);
}

void store_matrices(const u32* fragment, u32 row_address, bool transposed) {
  meet(
      transposed ? Collective::STORE_MATRIX_TRANSPOSED : Collective::STORE_MATRIX,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = row_address;
        for (int part = 0; part < 4; ++part) meeting.a[part][lane] = fragment[part];
      },
      [transposed](Warp& warp) {
        for (int matrix = 0; matrix < 4; ++matrix) store_phase(warp, matrix, transposed);
        counters.matrix_phases += 4;
        counters.shared_bytes_written += 4 * 8 * 16;
      });
}

void load_matrices(u32* fragment, u32 row_address, bool transposed) {
  meet(
      transposed ? Collective::LOAD_MATRIX_TRANSPOSED : Collective::LOAD_MATRIX,
      [&](Rendezvous& meeting, int lane) {
        meeting.value[lane] = row_address;
        meeting.out[lane] = fragment;
      },
      [transposed](Warp& warp) {
        for (int matrix = 0; matrix < 4; ++matrix) load_phase(warp, matrix, transposed);
        counters.matrix_phases += 4;
        counters.shared_bytes_read += 4 * 8 * 16;
      });
}
}  // namespace fg::emu
