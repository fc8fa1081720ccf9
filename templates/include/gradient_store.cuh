// Accumulators of 64-row products to global memory: scaled, rounded, 16 bytes per lane.
#pragma once
#include "accumulator.cuh"
#include "row_statistics.cuh"
#include "tile.cuh"

namespace fg {

// One head of a gradient tensor.
template <class Element>
struct GradientHead {
  Element* first;
  i64 row_stride;
  int rows;
  bool aligned;

  FG_DEVICE GradientHead(void* tensor, const Strides& strides, int batch, int head, int row_count)
      : first(head_of<Element>(tensor, strides, batch, head)),
        row_stride(strides.row),
        rows(row_count),
        aligned(rows_are_aligned(tensor, strides, 2)) {}

  FG_DEVICE void store_chunk(int row, int column, const Vector16& vector) const {
    Element* target = first + row * row_stride + column;
    if (aligned) {
      store_global(reinterpret_cast<Vector16*>(target), vector);
    } else {
      scatter_16(target, vector);
    }
  }
  // COLUMNS columns from `column` on, but none from `end` on, of the rows `row` and `row` + 8 that this lane takes part in.
  template <int COLUMNS, int REGISTERS>
  FG_DEVICE void store(const float (&sums)[REGISTERS], float factor, int row, int column, int end, int lane) const {
    constexpr int TILES = COLUMNS / 8;
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      FG_UNROLL
      for (int start = 0; start < TILES; start += 4) {
        u32 word[4];
        FG_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int from = minimum(start + i, TILES - 1) * 4 + 2 * r;
          word[i] = pack_pair(sums[from] * factor, sums[from + 1] * factor, Element{});
        }
        gather_row(word, lane);
        const int tile = start + lane % 4;
        if (row + 8 * r >= rows || tile >= TILES || column + tile * 8 >= end) continue;
        store_chunk(row + 8 * r, column + tile * 8, Vector16{{word[0], word[1], word[2], word[3]}});
      }
    }
  }
};

}  // namespace fg
