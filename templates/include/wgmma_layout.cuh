// Operands of warpgroup products in shared memory, and the numbers that describe them. The device and the emulation read the same ones.
//
// A tile of 16-bit elements is cut into chunks of 64 columns, one chunk after the other. A chunk is one 128-byte line per row, and the
// 16-byte pieces of a line are permuted by its row (128-byte swizzle), as a tensor map with SWIZZLE_128B leaves them. Columns past the
// head dim are zeros. Tiles start on a multiple of 1024 bytes, and hold a multiple of eight rows.
#pragma once
#include "platform.cuh"

namespace fg {

constexpr int SWIZZLE_COLUMNS = 64;
constexpr int LINE_BYTES = 128;
constexpr int SWIZZLE_BYTES = 1024;  // eight lines: the permutation repeats
constexpr int PRODUCT_ROWS = 64;     // of a warpgroup's left operand
constexpr int PRODUCT_DEPTH = 16;    // of one step
constexpr int DESCRIPTOR_UNIT = 16;  // bytes

FG_DEVICE constexpr int chunks_of(int columns) { return ceil_div(columns, SWIZZLE_COLUMNS); }
FG_DEVICE constexpr int product_steps(int depth) { return ceil_div(depth, PRODUCT_DEPTH); }
// Columns of a product whose right operand has `columns` of them: a multiple of 8, at most 256.
FG_DEVICE constexpr int product_columns(int columns) { return ceil_div(columns, 8) * 8; }
FG_DEVICE constexpr int chunk_bytes(int rows) { return rows * LINE_BYTES; }
FG_DEVICE constexpr int operand_bytes(int rows, int columns) { return chunks_of(columns) * chunk_bytes(rows); }

// Byte offset of (row, column) in a tile of `rows` rows; `column` is a multiple of 8 for accesses of 16 bytes.
FG_DEVICE constexpr u32 operand_offset(int rows, int row, int column) {
  return static_cast<u32>(column / SWIZZLE_COLUMNS * chunk_bytes(rows) + row * LINE_BYTES +
                          (column % SWIZZLE_COLUMNS * 2 ^ (row & 7) * DESCRIPTOR_UNIT));
}

// ---- descriptors: 64 bits; a kernel computes with the low word only, the high word is a constant ----

// Eight rows, or eight steps of depth, are SWIZZLE_BYTES apart (bits 32..45); layout 1 means 128-byte swizzle (bits 62..63).
constexpr u32 DESCRIPTOR_HIGH = 1u << 30 | SWIZZLE_BYTES / DESCRIPTOR_UNIT;

FG_DEVICE constexpr u32 descriptor_low(u32 address, u32 leading_bytes) {
  return (address & 0x3FFFFu) / DESCRIPTOR_UNIT | leading_bytes / DESCRIPTOR_UNIT << 16;
}
// The depth of the product runs along a row: Q and K of Q K^T. The leading distance has no meaning here.
FG_DEVICE constexpr u32 row_operand(u32 tile) { return descriptor_low(tile, DESCRIPTOR_UNIT); }
// The depth of the product runs over `rows` rows: V of P V. Chunks of columns are the leading distance apart.
FG_DEVICE constexpr u32 column_operand(u32 tile, int rows) { return descriptor_low(tile, static_cast<u32>(chunk_bytes(rows))); }

// What step `step` of a product adds to the low word of a row operand of `rows` rows, or of a column operand.
FG_DEVICE constexpr u32 row_operand_step(int step, int rows) {
  constexpr int STEPS_PER_CHUNK = SWIZZLE_COLUMNS / PRODUCT_DEPTH;
  return static_cast<u32>(step / STEPS_PER_CHUNK * chunk_bytes(rows) + step % STEPS_PER_CHUNK * PRODUCT_DEPTH * 2) / DESCRIPTOR_UNIT;
}
FG_DEVICE constexpr u32 column_operand_step(int step) { return static_cast<u32>(step * PRODUCT_DEPTH * LINE_BYTES / DESCRIPTOR_UNIT); }

// What moving a whole tile by `bytes` adds to a low word.
FG_DEVICE constexpr u32 descriptor_step(int bytes) { return static_cast<u32>(bytes / DESCRIPTOR_UNIT); }

}  // namespace fg
