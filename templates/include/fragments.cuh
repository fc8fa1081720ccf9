// Accumulator fragments of 16x8 tiles: lane l holds rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and the next.
#pragma once
#include "exchange.cuh"
#include "tile.cuh"

namespace fg {

template <int A, int B>
FG_DEVICE void clear(float (&tiles)[A][B][4]) {
  FG_UNROLL
  for (int a = 0; a < A; ++a) {
    FG_UNROLL
    for (int b = 0; b < B; ++b) {
      FG_UNROLL
      for (int i = 0; i < 4; ++i) tiles[a][b][i] = 0.0f;
    }
  }
}

// Four lanes hold four 8-column tiles of one row, two columns each; afterwards each lane holds the 8 columns of one tile.
FG_DEVICE void transpose_quad(u32 (&word)[4], int quad) {
  FG_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    FG_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = (quad & step) != 0;
      const u32 given = upper ? word[i] : word[i + step];
      const u32 taken = shuffle_xor(given, step);
      if (upper) {
        word[i] = taken;
      } else {
        word[i + step] = taken;
      }
    }
  }
}

// Rows of one tensor that a warp writes.
template <class Element>
struct TargetRows {
  Element* first;
  i64 stride;
  int valid_rows, valid_columns;
  bool vector_access;
};

// Scales, converts and stores tiles that start at `row` and 8 * `chunk`, 16 bytes per lane.
template <class Element, int ROW_TILES, int TILES>
FG_DEVICE void store_tiles(const float (&tiles)[ROW_TILES][TILES][4], const TargetRows<Element>& target, int row, int chunk, float factor,
                           int lane) {
  const int quad = lane % 4;
  FG_UNROLL
  for (int r = 0; r < 2 * ROW_TILES; ++r) {
    const int own_row = row + r * 8 + lane / 4;
    FG_UNROLL
    for (int first = 0; first < TILES; first += 4) {
      u32 word[4];
      FG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* pair = &tiles[r / 2][minimum(first + i, TILES - 1)][r % 2 * 2];
        word[i] = pack_pair(pair[0] * factor, pair[1] * factor, Element{});
      }
      transpose_quad(word, quad);
      const int column = (chunk + first + quad) * CHUNK_ELEMENTS;
      if (first + quad >= TILES || own_row >= target.valid_rows || column >= target.valid_columns) continue;
      Element* to = target.first + own_row * target.stride + column;
      const Vector16 vector = {{word[0], word[1], word[2], word[3]}};
      if (target.vector_access) {
        store_global(reinterpret_cast<Vector16*>(to), vector);
      } else {
        scatter_16(to, vector);
      }
    }
  }
}

// products = left right^T over DEPTH 16-deep steps: rows of both lie along the depth. `left(fragment, m, step)` gives a left operand.
template <class Element, int DEPTH, int ROW_TILES, int TILES, class Left, int CHUNKS>
FG_DEVICE void multiply_rows(float (&products)[ROW_TILES][TILES][4], const Left& left, const FragmentCursor<CHUNKS>& right) {
  FG_UNROLL
  for (int step = 0; step < DEPTH; ++step) {
    u32 a[ROW_TILES][4];
    FG_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) left.load(a[m], m, step);
    FG_UNROLL
    for (int n = 0; n < TILES; n += 2) {
      u32 b[4];
      load_matrix_x4(b, right.at(n * 8, step * 2));
      FG_UNROLL
      for (int m = 0; m < ROW_TILES; ++m) {
        if (step == 0) {
          multiply_first_16x8x16(products[m][n], a[m], b[0], b[1], Element{});
          multiply_first_16x8x16(products[m][n + 1], a[m], b[2], b[3], Element{});
        } else {
          multiply_16x8x16(products[m][n], a[m], b[0], b[1], Element{});
          multiply_16x8x16(products[m][n + 1], a[m], b[2], b[3], Element{});
        }
      }
    }
  }
}

// sums += left right over DEPTH 16-deep steps: the depth runs over rows of the right tile.
template <class Element, int DEPTH, int ROW_TILES, int TILES, class Left, int CHUNKS>
FG_DEVICE void accumulate_rows(float (&sums)[ROW_TILES][TILES][4], const Left& left, const FragmentCursor<CHUNKS>& right) {
  FG_UNROLL
  for (int step = 0; step < DEPTH; ++step) {
    u32 a[ROW_TILES][4];
    FG_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) left.load(a[m], m, step);
    FG_UNROLL
    for (int n = 0; n < TILES; n += 2) {
      u32 b[4];
      load_matrix_x4_transposed(b, right.at(step * 16, n));
      FG_UNROLL
      for (int m = 0; m < ROW_TILES; ++m) {
        multiply_16x8x16(sums[m][n], a[m], b[0], b[1], Element{});
        multiply_16x8x16(sums[m][n + 1], a[m], b[2], b[3], Element{});
      }
    }
  }
}

// Left operands in shared memory, rows along the depth.
template <int CHUNKS>
struct SharedRows {
  FragmentCursor<CHUNKS> cursor;

  FG_DEVICE SharedRows(u32 tile, int row, int lane) : cursor(tile, row + lane % 16, lane / 16) {}
  FG_DEVICE void load(u32 (&fragment)[4], int m, int step) const { load_matrix_x4(fragment, cursor.at(m * 16, step * 2)); }
};

// Left operands in shared memory, the depth over rows: the tile is the left matrix transposed.
template <int CHUNKS>
struct SharedColumns {
  FragmentCursor<CHUNKS> cursor;

  FG_DEVICE explicit SharedColumns(u32 tile, int lane) : cursor(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2) {}
  FG_DEVICE void load(u32 (&fragment)[4], int m, int step) const { load_matrix_x4_transposed(fragment, cursor.at(step * 16, m * 2)); }
};

// Left operands in registers.
template <int ROW_TILES, int STEPS>
struct KeptRows {
  u32 word[ROW_TILES][STEPS][4];

  FG_DEVICE void load(u32 (&fragment)[4], int m, int step) const {
    FG_UNROLL
    for (int i = 0; i < 4; ++i) fragment[i] = word[m][step][i];
  }
  template <class Left>
  FG_DEVICE void keep(const Left& left) {
    FG_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) {
      FG_UNROLL
      for (int step = 0; step < STEPS; ++step) left.load(word[m][step], m, step);
    }
  }
};

}  // namespace fg
