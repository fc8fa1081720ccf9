// Accumulators of 64-row products: register i of a lane lies in row i / 2 % 2 of the two rows, eight apart, that the lane shares with three
// others, and in columns 8 * (i / 4) + i % 2 from the lane's first one.
#pragma once
#include "numeric.cuh"

namespace fg {

FG_DEVICE constexpr int row_of(int i) { return i / 2 % 2; }
FG_DEVICE constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

// Four lanes hold four 8-column tiles of one row, two columns each; afterwards each lane holds the 8 columns of one tile.
FG_DEVICE void gather_row(u32 (&word)[4], int lane) {
  FG_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & step) != 0;
    FG_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 taken = shuffle_xor(upper ? word[i] : word[i + step], step);
      if (upper) {
        word[i] = taken;
      } else {
        word[i + step] = taken;
      }
    }
  }
}

}  // namespace fg
