// Tiles of 16-bit elements in shared memory, and how tensor-core fragments address them.
#pragma once
#include "problem.cuh"
#include "sm80.cuh"

namespace fg {

constexpr int CHUNK_BYTES = 16;  // the unit of a copy and of a matrix row
constexpr int CHUNK_ELEMENTS = 8;

// Rows of CHUNKS 16-byte chunks. Eight lanes that read one chunk column of eight consecutive rows must touch eight different bank groups:
// rows of whole 128-byte lines permute their chunks by row (swizzle), other rows get an odd pitch.
template <int CHUNKS>
struct RowLayout {
  static constexpr bool SWIZZLED = CHUNKS % 8 == 0;
  static constexpr int PITCH = SWIZZLED ? CHUNKS : CHUNKS | 1;  // in chunks
  static constexpr int ROW_BYTES = PITCH * CHUNK_BYTES;

  FG_DEVICE static u32 offset(int row, int chunk) {
    return static_cast<u32>(row * ROW_BYTES + (SWIZZLED ? chunk ^ (row & 7) : chunk) * CHUNK_BYTES);
  }
};

// One lane's way through a tile by matrix loads: where it starts, and constant steps from there. A step of whole rows must be a multiple of
// eight rows, and the lane's first chunk below 2, so that the swizzle of the start holds for every step.
template <int CHUNKS>
struct FragmentCursor {
  using Layout = RowLayout<CHUNKS>;
  u32 start;

  FG_DEVICE FragmentCursor(u32 tile, int row, int chunk) : start(tile + Layout::offset(row, chunk)) {}
  // Tiles are 128-byte aligned, so the XOR only meets the chunk bits of the start.
  FG_DEVICE u32 at(int rows, int chunks) const {
    if constexpr (Layout::SWIZZLED) {
      return (start ^ static_cast<u32>(chunks % 8 * CHUNK_BYTES)) + static_cast<u32>(rows * Layout::ROW_BYTES + chunks / 8 * 128);
    } else {
      return start + static_cast<u32>(rows * Layout::ROW_BYTES + chunks * CHUNK_BYTES);
    }
  }
};

// Sixteen bytes of elements from an address without 16-byte alignment.
template <class Element>
FG_DEVICE Vector16 gather_16(const Element* source) {
  Vector16 vector;
  FG_UNROLL
  for (int i = 0; i < 4; ++i)
    vector.word[i] = load_global(source + 2 * i).bits | static_cast<u32>(load_global(source + 2 * i + 1).bits) << 16;
  return vector;
}
template <class Element>
FG_DEVICE void scatter_16(Element* target, const Vector16& vector) {
  FG_UNROLL
  for (int i = 0; i < CHUNK_ELEMENTS; ++i) store_global(target + i, Element{static_cast<u16>(vector.word[i / 2] >> (i % 2 * 16))});
}

// All threads of the CTA start copying ROWS rows of HEAD_DIM elements. Rows past `valid_rows` and the padding up to CHUNKS become zeros.
template <class C, int ROWS, int HEAD_DIM, int CHUNKS>
struct RowCopy {
  using Element = typename C::Element;
  // Lanes side by side on one row: the largest power of two that divides the row, so that none idles.
  static constexpr int LANES = CHUNKS & -CHUNKS;
  static constexpr int ROWS_PER_PASS = C::THREADS / LANES;

  FG_DEVICE static bool in_row(int chunk) { return HEAD_DIM % (LANES * CHUNK_ELEMENTS) == 0 || chunk * CHUNK_ELEMENTS < HEAD_DIM; }

  FG_DEVICE static void start(u32 tile, const Element* source, i64 row_stride, int valid_rows, bool vector_access) {
    if (vector_access) {
      start_vectors(tile, source, row_stride, valid_rows);
    } else {
      gather(tile, source, row_stride, valid_rows);
    }
  }

  FG_DEVICE static void start_vectors(u32 tile, const Element* source, i64 row_stride, int valid_rows) {
    const int lane = thread_index() % LANES;
    int row = thread_index() / LANES;
    const Element* from = source + row * row_stride + lane * CHUNK_ELEMENTS;
    FG_UNROLL
    for (int pass = 0; pass < ceil_div(ROWS, ROWS_PER_PASS); ++pass) {
      if (ROWS % ROWS_PER_PASS != 0 && row >= ROWS) break;
      FG_UNROLL
      for (int step = 0; step < CHUNKS; step += LANES) {
        const u32 to = tile + RowLayout<CHUNKS>::offset(row, step + lane);
        copy_async_16(to, from + step * CHUNK_ELEMENTS, row < valid_rows && in_row(step + lane));
      }
      row += ROWS_PER_PASS;
      from += ROWS_PER_PASS * row_stride;
    }
  }

  // For rows without 16-byte alignment; a rare layout, so the code is small rather than fast.
  FG_DEVICE static void gather(u32 tile, const Element* source, i64 row_stride, int valid_rows) {
    FG_NO_UNROLL
    for (int i = thread_index(); i < ROWS * CHUNKS; i += C::THREADS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      const bool in_range = row < valid_rows && chunk * CHUNK_ELEMENTS < HEAD_DIM;
      const Vector16 vector = in_range ? gather_16(source + row * row_stride + chunk * CHUNK_ELEMENTS) : Vector16{{0, 0, 0, 0}};
      store_shared(tile + RowLayout<CHUNKS>::offset(row, chunk), vector);
    }
  }
};

}  // namespace fg
