// The kinds of products that the backward pass is made of, as sm90_backward.cuh describes them.
#pragma once
#include "sm90_backward.cuh"

namespace fg {

// Left and right tiles of which the depth runs along the rows: S = Q K^T, dP = dO V^T and their transposes. The left operand is 64 rows of
// a tile of LEFT_ROWS.
template <int DEPTH, int LEFT_ROWS, int RIGHT_ROWS>
struct RowsByRows {
  static constexpr int COLUMNS = RIGHT_ROWS, STEPS = product_steps(DEPTH);
  static constexpr bool LEFT_BY_COLUMNS = false, RIGHT_BY_COLUMNS = false;
  FG_DEVICE static constexpr u32 left_step(int i) { return row_operand_step(i, LEFT_ROWS); }
  FG_DEVICE static constexpr u32 right_step(int i) { return row_operand_step(i, RIGHT_ROWS); }
};

// The left operand in registers, the depth runs along the rows of the right tile: S^T and dP^T with K and V in registers.
template <int DEPTH, int RIGHT_ROWS>
struct RegistersByRows {
  static constexpr int COLUMNS = RIGHT_ROWS, STEPS = product_steps(DEPTH);
  static constexpr bool LEFT_BY_COLUMNS = false, RIGHT_BY_COLUMNS = false;
  FG_DEVICE static constexpr u32 left_step(int) { return 0; }
  FG_DEVICE static constexpr u32 right_step(int i) { return row_operand_step(i, RIGHT_ROWS); }
};

// The left operand in registers; the depth runs over the rows of the right tile: dV = P^T dO, dK = dS^T Q, dQ = dS K.
template <int DEPTH, int WIDTH>
struct RegistersByColumns {
  static constexpr int COLUMNS = product_columns(WIDTH), STEPS = DEPTH / PRODUCT_DEPTH;
  static constexpr bool LEFT_BY_COLUMNS = false, RIGHT_BY_COLUMNS = true;
  FG_DEVICE static constexpr u32 left_step(int) { return 0; }
  FG_DEVICE static constexpr u32 right_step(int i) { return column_operand_step(i); }
};

// Both from shared memory, the depth runs over the rows of both: dK = dS^T Q of 64 keys, a chunk of dS.
template <int DEPTH, int WIDTH>
struct ColumnsByColumns {
  static constexpr int COLUMNS = product_columns(WIDTH), STEPS = DEPTH / PRODUCT_DEPTH;
  static constexpr bool LEFT_BY_COLUMNS = true, RIGHT_BY_COLUMNS = true;
  FG_DEVICE static constexpr u32 left_step(int i) { return column_operand_step(i); }
  FG_DEVICE static constexpr u32 right_step(int i) { return column_operand_step(i); }
};

// Both from shared memory, the depth runs over the rows of the left tile and along those of the right one: dQ^T = K^T dS^T of 64 columns
// and WIDTH rows of a tile of RIGHT_ROWS.
template <int DEPTH, int RIGHT_ROWS, int WIDTH>
struct ColumnsByRows {
  static constexpr int COLUMNS = WIDTH, STEPS = DEPTH / PRODUCT_DEPTH;
  static constexpr bool LEFT_BY_COLUMNS = true, RIGHT_BY_COLUMNS = false;
  FG_DEVICE static constexpr u32 left_step(int i) { return column_operand_step(i); }
  FG_DEVICE static constexpr u32 right_step(int i) { return row_operand_step(i, RIGHT_ROWS); }
};

// Both from shared memory: dQ = dS K, where rows of dS lie along DEPTH keys in chunks of 64, LEFT_ROWS rows each.
template <int DEPTH, int LEFT_ROWS, int WIDTH>
struct RowsByColumns {
  static constexpr int COLUMNS = WIDTH, STEPS = DEPTH / PRODUCT_DEPTH;
  static constexpr bool LEFT_BY_COLUMNS = false, RIGHT_BY_COLUMNS = true;
  FG_DEVICE static constexpr u32 left_step(int i) { return row_operand_step(i, LEFT_ROWS); }
  FG_DEVICE static constexpr u32 right_step(int i) { return column_operand_step(i); }
};

}  // namespace fg
