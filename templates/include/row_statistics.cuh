// What the backward pass needs of every query row: lse in log2 units and delta = rowsum(dO * O) - dlse, both in the workspace.
//
// Rows are padded to whole blocks; a row past the last, or one that saw no key, has lse +inf, so that its probabilities are exactly 0.
// Inside sixteen rows the four values that a lane needs of two neighbouring 8-column groups of an accumulator lie side by side.
#pragma once
#include "mapped_backward_params.cuh"
#include "problem.cuh"

namespace fg {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int ROW_PADDING = 128;  // at least a block of query rows

FG_DEVICE constexpr int padded_rows(int rows) { return (ceil_div(rows, ROW_PADDING) + 1) * ROW_PADDING; }

FG_DEVICE constexpr int statistic_place(int row) { return (row & ~15) | (row >> 1 & 3) << 2 | (row >> 3 & 1) << 1 | (row & 1); }

// Columns of dq, padded to whole chunks.
FG_DEVICE constexpr int operand_columns(int columns) { return chunks_of(columns) * SWIZZLE_COLUMNS; }

struct RowStatistics {
  float *lse, *delta, *sums;  // of all heads; the sums of dq come behind

  FG_DEVICE explicit RowStatistics(const ForwardParams& forward) {
    const i64 rows = static_cast<i64>(forward.batch) * forward.heads_q * padded_rows(forward.seqlen_q);
    lse = static_cast<float*>(forward.workspace);
    delta = lse + rows;
    sums = delta + rows;
  }
};
FG_DEVICE i64 first_statistic(const ForwardParams& forward, int batch, int head) {
  return (static_cast<i64>(batch) * forward.heads_q + head) * padded_rows(forward.seqlen_q);
}

FG_DEVICE bool rows_are_aligned(const void* tensor, const Strides& strides, int element_bytes) {
  const i64 units = 16 / element_bytes;
  return (reinterpret_cast<u64>(tensor) & 15) == 0 && (strides.batch | strides.head | strides.row) % units == 0;
}

}  // namespace fg
