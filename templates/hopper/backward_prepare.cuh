// First launch of the backward pass: statistics of the rows, and zeros where dq is going to be summed.
#pragma once
#include "backward_clearing.cuh"
#include "backward_turns.cuh"
#include "gradient_store.cuh"

namespace fg {

// A warp takes a strip of STRIP_ROWS rows of a head, the warps of a CTA neighbouring heads: with rows of heads side by side in memory,
// which is common, a CTA reads long runs of bytes, and its statistics are runs, too.
template <class C>
struct Preparation {
  using Element = typename C::Element;
  static constexpr int CHUNKS = C::HEAD_DIM_V / CHUNK_ELEMENTS, LANES = C::PREPARE_LANES;  // LANES: the least power of two that holds a row
  static constexpr int ROWS_AT_ONCE = WARP_LANES / LANES, PASSES = C::STRIP_ROWS / ROWS_AT_ONCE, WARPS = C::PREPARE_THREADS / WARP_LANES;
  static_assert(LANES >= CHUNKS && ROWS_AT_ONCE * PASSES == C::STRIP_ROWS, "rows of a warp as in the search space");

  const BackwardParams& params;
  const ForwardParams& forward;
  const RowStatistics to;
  const int chunk;            // of the row, by lane
  int batch, head, row, end;  // of the strip; rows from `end` on are not its own

  FG_DEVICE explicit Preparation(const BackwardParams& given)
      : params(given), forward(given.forward), to(given.forward), chunk(thread_index() % LANES) {
    const u32 heads = static_cast<u32>(forward.heads_q), strips = static_cast<u32>(ceil_div(forward.seqlen_q, C::STRIP_ROWS));
    const u32 count = static_cast<u32>(forward.batch) * heads * strips;
    const u32 mine = cta() * WARPS + static_cast<u32>(thread_index() / WARP_LANES);
    const u32 index = mine < count ? mine : count - 1, outer = index / heads;
    head = static_cast<int>(index - outer * heads);
    batch = static_cast<int>(outer / strips);
    row = static_cast<int>(outer % strips) * C::STRIP_ROWS + thread_index() % WARP_LANES / LANES;
    end = mine < count ? forward.seqlen_q : 0;
  }

  template <int COUNT>
  struct Rows {
    Vector16 o[COUNT], dout[COUNT];
    float lse[COUNT], dlse[COUNT];
  };
  // Rows of several passes. What lies beyond is loaded from the last row and not used: branches would stand between the loads.
  template <bool ALIGNED, int COUNT>
  FG_DEVICE Rows<COUNT> load(int pass) const {
    Rows<COUNT> rows;
    const int column = minimum(chunk, CHUNKS - 1) * CHUNK_ELEMENTS;
    const Element* o = head_of<Element>(forward.o, forward.o_strides, batch, head) + column;
    const Element* dout = head_of<Element>(params.dout, params.dout_strides, batch, head) + column;
    const i64 first = (static_cast<i64>(batch) * forward.heads_q + head) * forward.seqlen_q;
    FG_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      const int at = minimum(row + (pass + i) * ROWS_AT_ONCE, forward.seqlen_q - 1);
      rows.o[i] = load_chunk<ALIGNED>(o + at * forward.o_strides.row);
      rows.dout[i] = load_chunk<ALIGNED>(dout + at * params.dout_strides.row);
      rows.lse[i] = load_global(forward.lse + first + at);
      rows.dlse[i] = params.dlse ? load_global(params.dlse + first + at) : 0.0f;
    }
    return rows;
  }
  template <bool ALIGNED>
  FG_DEVICE static Vector16 load_chunk(const Element* source) {
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
  template <int COUNT>
  FG_DEVICE void store(const Rows<COUNT>& rows, int pass) const {
    FG_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      float sum = chunk < CHUNKS ? product(rows.o[i], rows.dout[i]) : 0.0f;
      FG_UNROLL
      for (int mask = LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      const int at = row + (pass + i) * ROWS_AT_ONCE;
      if (at >= end || chunk > 0) continue;
      const i64 place = first_statistic(forward, batch, head) + statistic_place(at);
      const bool empty = rows.lse[i] == -infinity();
      store_global(to.lse + place, empty ? infinity() : rows.lse[i] * LOG2_E);
      store_global(to.delta + place, empty ? 0.0f : sum - rows.dlse[i]);
    }
  }

  // What does not depend on the rows is stored while they are loaded. Rows without 16-byte alignment are rare and have a short loop of
  // their own, whose registers do not count.
  FG_DEVICE void run() const {
    if (rows_are_aligned(forward.o, forward.o_strides, 2) && rows_are_aligned(params.dout, params.dout_strides, 2)) {
      const Rows<PASSES> rows = load<true, PASSES>(0);
      clear();
      store(rows, 0);
    } else {
      clear();
      FG_NO_UNROLL
      for (int pass = 0; pass < PASSES; ++pass) store(load<false, 1>(pass), pass);
    }
  }
  FG_DEVICE void clear() const {
    padding();
    if constexpr (C::FUSED && !C::ORDERED) zero_sums();
    if constexpr (C::ORDERED) first_turns();
    if constexpr (C::CLEAR_AHEAD > 0) first_counts();
  }

  // The last heads first: those with which the next launch begins are then in the L2 cache.
  FG_DEVICE static u32 cta() { return static_cast<u32>(grid_size()) - 1 - static_cast<u32>(block_index()); }
  FG_DEVICE u32 own_index() const { return cta() * C::PREPARE_THREADS + static_cast<u32>(thread_index()); }
  FG_DEVICE u32 all_threads() const { return static_cast<u32>(grid_size()) * C::PREPARE_THREADS; }
  FG_DEVICE u32 all_heads() const { return static_cast<u32>(forward.batch) * static_cast<u32>(forward.heads_q); }
  FG_DEVICE u32 blocks() const { return static_cast<u32>(ceil_div(forward.seqlen_q, C::BLOCK_Q)); }

  FG_DEVICE void padding() const {
    const u32 rows = static_cast<u32>(padded_rows(forward.seqlen_q) - forward.seqlen_q), count = all_heads() * rows;
    FG_NO_UNROLL
    for (u32 index = own_index(); index < count; index += all_threads()) {
      const u32 of = index / rows, past = index - of * rows;
      const i64 place = static_cast<i64>(of) * padded_rows(forward.seqlen_q) + statistic_place(forward.seqlen_q + static_cast<int>(past));
      store_global(to.lse + place, infinity());
      store_global(to.delta + place, 0.0f);
    }
  }
  // A run of the sums by every CTA; later ones may be left to the next launch.
  FG_DEVICE void zero_sums() const {
    const SumSections<C> sections(forward);
    const u32 vectors = sections.vectors(sections.cleared_first()), ctas = static_cast<u32>(grid_size());
    const u32 run = vectors / ctas + 1, first = run * cta();
    const u32 last = first + run < vectors ? first + run : vectors;
    Vector16* sums = reinterpret_cast<Vector16*>(to.sums);
    for (u32 index = first + static_cast<u32>(thread_index()); index < last; index += C::PREPARE_THREADS)
      store_global(sums + index, Vector16{{0, 0, 0, 0}});
  }
  FG_DEVICE void first_turns() const {
    u32* turns = turns_of<C>(forward);
    FG_NO_UNROLL
    for (u32 index = own_index(); index < all_heads() * blocks(); index += all_threads())
      store_global(turns + index, static_cast<u32>(first_tile_of<C>(forward, static_cast<int>(index % blocks()))));
  }
  FG_DEVICE void first_counts() const {
    const SumSections<C> sections(forward);
    FG_NO_UNROLL
    for (u32 index = own_index(); index < static_cast<u32>(sections.count()); index += all_threads())
      store_global(sections.cleared(static_cast<int>(index)), 0u);
  }
};

template <class C>
FG_DEVICE void prepare(const MappedBackwardParams& params) {
  Preparation<C>(params.problem).run();
}

}  // namespace fg
