// First launch of the backward pass: statistics of the rows, and zeros where dq is going to be summed.
#pragma once
#include "backward_turns.cuh"
#include "gradient_store.cuh"

namespace fg {

template <class C>
struct Preparation {
  using Element = typename C::Element;
  static constexpr int CHUNKS = C::HEAD_DIM_V / CHUNK_ELEMENTS, LANES = C::PREPARE_LANES;  // LANES: the least power of two that holds a row
  static constexpr int ROWS_AT_ONCE = C::PREPARE_THREADS / LANES, PASSES = 4;              // copies of several rows are under way at a time
  static_assert(LANES >= CHUNKS && ROWS_AT_ONCE * PASSES == C::PREPARE_ROWS, "rows of a CTA as in the search space");

  const BackwardParams& params;
  const ForwardParams& forward;
  const RowStatistics to;

  FG_DEVICE explicit Preparation(const BackwardParams& given) : params(given), forward(given.forward), to(given.forward) {}

  // Heads change fastest: with rows of heads side by side in memory, which is common, a CTA reads consecutive bytes.
  struct Row {
    int batch, head, row;

    FG_DEVICE Row next(const ForwardParams& forward) const {
      Row next = {batch, head + ROWS_AT_ONCE % forward.heads_q, row + ROWS_AT_ONCE / forward.heads_q};
      if (next.head >= forward.heads_q) {
        next.head -= forward.heads_q;
        ++next.row;
      }
      next.batch += next.row / forward.seqlen_q;
      next.row %= forward.seqlen_q;
      return next;
    }
  };
  FG_DEVICE Row row_of_index(u32 index) const {
    const u32 heads = static_cast<u32>(forward.heads_q), rows = static_cast<u32>(forward.seqlen_q), outer = index / heads;
    return {static_cast<int>(outer / rows), static_cast<int>(index % heads), static_cast<int>(outer % rows)};
  }

  template <bool ALIGNED>
  FG_DEVICE static Vector16 load(const void* tensor, const Strides& strides, const Row& at, int chunk) {
    const Element* source = head_of<Element>(tensor, strides, at.batch, at.head) + at.row * strides.row + chunk * CHUNK_ELEMENTS;
    if constexpr (ALIGNED) {
      return load_global(reinterpret_cast<const Vector16*>(source));
    } else {
      return gather_16(source);
    }
  }
  FG_DEVICE static float product(const Vector16& left, const Vector16& right) {
    float sum = 0.0f;
    FG_UNROLL
    for (int i = 0; i < CHUNK_ELEMENTS; ++i) {
      const u32 shift = i % 2 * 16;
      sum = fused_multiply_add(to_float(Element{static_cast<u16>(left.word[i / 2] >> shift)}),
                               to_float(Element{static_cast<u16>(right.word[i / 2] >> shift)}), sum);
    }
    return sum;
  }

  FG_DEVICE void store(const Row& at, float sum) const {
    const i64 index = (static_cast<i64>(at.batch) * forward.heads_q + at.head) * forward.seqlen_q + at.row;
    const i64 place = first_statistic(forward, at.batch, at.head) + statistic_place(at.row);
    const float lse = load_global(forward.lse + index);
    if (params.dlse) sum -= load_global(params.dlse + index);
    const bool empty = lse == -infinity();
    store_global(to.lse + place, empty ? infinity() : lse * LOG2_E);
    store_global(to.delta + place, empty ? 0.0f : sum);
  }

  // Rows without 16-byte alignment have a loop of their own, so that nothing stands between the loads of the others.
  FG_DEVICE void rows() const {
    if (rows_are_aligned(forward.o, forward.o_strides, 2) && rows_are_aligned(params.dout, params.dout_strides, 2)) {
      rows<true>();
    } else {
      rows<false>();
    }
  }
  template <bool ALIGNED>
  FG_DEVICE void rows() const {
    const u32 count = static_cast<u32>(forward.batch) * static_cast<u32>(forward.heads_q) * static_cast<u32>(forward.seqlen_q);
    const int chunk = thread_index() % LANES, own_chunk = minimum(chunk, CHUNKS - 1);
    const u32 first = static_cast<u32>(block_index()) * C::PREPARE_ROWS + static_cast<u32>(thread_index() / LANES);
    Row at[PASSES];
    Vector16 o[PASSES], dout[PASSES];
    FG_UNROLL
    for (int pass = 0; pass < PASSES; ++pass) {
      at[pass] = pass == 0 ? row_of_index(first) : at[pass - 1].next(forward);
      // What lies beyond is loaded from the first row and not used: branches would stand between the loads.
      const Row from = first + static_cast<u32>(pass * ROWS_AT_ONCE) < count ? at[pass] : Row{0, 0, 0};
      o[pass] = load<ALIGNED>(forward.o, forward.o_strides, from, own_chunk);
      dout[pass] = load<ALIGNED>(params.dout, params.dout_strides, from, own_chunk);
    }
    FG_UNROLL
    for (int pass = 0; pass < PASSES; ++pass) {
      float sum = chunk < CHUNKS ? product(o[pass], dout[pass]) : 0.0f;
      FG_UNROLL
      for (int mask = LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      if (first + static_cast<u32>(pass * ROWS_AT_ONCE) < count && chunk == 0) store(at[pass], sum);
    }
  }

  // Every CTA takes every grid-th piece.
  FG_DEVICE i64 own_index() const { return block_index() * C::PREPARE_THREADS + thread_index(); }
  FG_DEVICE i64 all_threads() const { return grid_size() * C::PREPARE_THREADS; }

  FG_DEVICE void padding() const {
    const int rows = padded_rows(forward.seqlen_q) - forward.seqlen_q;
    const i64 count = static_cast<i64>(forward.batch) * forward.heads_q * rows;
    for (i64 index = own_index(); index < count; index += all_threads()) {
      const i64 head = index / rows, row = forward.seqlen_q + index % rows;
      const i64 place = head * padded_rows(forward.seqlen_q) + statistic_place(static_cast<int>(row));
      store_global(to.lse + place, infinity());
      store_global(to.delta + place, 0.0f);
    }
  }
  FG_DEVICE void zero_sums() const {
    const i64 heads = static_cast<i64>(forward.batch) * forward.heads_q, blocks = ceil_div(forward.seqlen_q, C::BLOCK_Q);
    const i64 vectors = heads * blocks * C::BLOCK_Q * operand_columns(C::HEAD_DIM) / 4;
    Vector16* sums = reinterpret_cast<Vector16*>(to.sums);
    for (i64 index = own_index(); index < vectors; index += all_threads()) store_global(sums + index, Vector16{{0, 0, 0, 0}});
  }
  FG_DEVICE void first_turns() const {
    const u32 blocks = static_cast<u32>(ceil_div(forward.seqlen_q, C::BLOCK_Q));
    const i64 words = static_cast<i64>(forward.batch) * forward.heads_q * blocks;
    u32* turns = turns_of<C>(forward);
    for (i64 index = own_index(); index < words; index += all_threads()) {
      const int block = static_cast<int>(index % blocks);
      store_global(turns + index, static_cast<u32>(first_tile_of<C>(forward, block)));
    }
  }
};

template <class C>
FG_DEVICE void prepare(const MappedBackwardParams& params) {
  const Preparation<C> preparation(params.problem);
  preparation.rows();
  preparation.padding();
  if constexpr (C::FUSED) preparation.zero_sums();
  if constexpr (C::ORDERED) preparation.first_turns();
}

}  // namespace fg
