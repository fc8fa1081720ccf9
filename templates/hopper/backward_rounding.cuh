// From the float32 sums of the fused pass to dQ.
#pragma once
#include "backward_fused_base.cuh"
#include "backward_turns.cuh"

namespace fg {

// The sums of dQ of a block, scaled and rounded, by 256 threads: a half each 128.
template <class C>
struct QueryRounding {
  using Base = FusedBase<C>;
  using Element = typename C::Element;
  // Bytes of a row in shared memory; a chunk more than needed, so that rows begin in different banks.
  static constexpr int PITCH = operand_columns(C::HEAD_DIM) * 2 + CHUNK_BYTES;
  static_assert(!C::TURNED || PITCH * C::BLOCK_Q == C::ROUND_SHARED_BYTES,
                "the layout of shared memory is the formula of the search space");
  static_assert(!C::TURNED || Base::DQ_REGISTERS % 8 == 0, "rows are turned back by sixteens");
  const BackwardParams& params;
  const u32 shared;            // ROUND_SHARED_BYTES, when dQ is transposed
  const int half, warp, lane;  // of the block, of the warp in the half, in the warp

  FG_DEVICE void run(int block) const {  // counted over all heads
    const int blocks = ceil_div(params.forward.seqlen_q, C::BLOCK_Q), batch_head = block / blocks,
              row = (block - batch_head * blocks) * C::BLOCK_Q;
    const int batch = batch_head / params.forward.heads_q, head = batch_head - batch * params.forward.heads_q;
    float sums[Base::DQ_REGISTERS] = {};
    if (!C::ORDERED || is_summed<C>(params.forward, row / C::BLOCK_Q)) load(sums, block);
    const GradientHead<Element> dq(params.dq, params.dq_strides, batch, head, params.forward.seqlen_q);
    if constexpr (C::TURNED) {
      turn(sums);
      block_sync();
      copy_rows(dq, row);
    } else {
      const int first = row + (Base::BY_ROWS ? half * C::BLOCK_Q / 2 : 0) + warp * 16 + lane / 4;
      dq.template store<C::DQ_COLUMNS>(sums, params.scale, first, Base::BY_ROWS ? 0 : half * C::DQ_COLUMNS, C::HEAD_DIM, lane);
    }
  }

 private:
  FG_DEVICE void load(float (&sums)[Base::DQ_REGISTERS], int block) const {
    const float* from =
        RowStatistics(params.forward).sums + (static_cast<i64>(block) * 2 + half) * Base::HALF + warp * Base::WARP_SHARE + lane * 4;
    FG_UNROLL
    for (int i = 0; i < Base::DQ_REGISTERS; i += 4) {
      const Vector16 vector = load_global(reinterpret_cast<const Vector16*>(from + i / 4 * 128));
      FG_UNROLL
      for (int j = 0; j < 4; ++j) sums[i + j] = float_from_bits(vector.word[j]);
    }
  }
  // Columns by rows in registers, rows of columns in shared memory.
  FG_DEVICE void turn(const float (&sums)[Base::DQ_REGISTERS]) const {
    const int first = Base::BY_ROWS ? half * C::BLOCK_Q / 2 : 0;
    const int column = (Base::BY_ROWS ? 0 : half * SWIZZLE_COLUMNS) + warp * 16 + lane / 8 % 2 * 8;
    const u32 target = shared + static_cast<u32>((first + lane / 16 * 8 + lane % 8) * PITCH + column * 2);
    FG_UNROLL
    for (int i = 0; i < Base::DQ_REGISTERS; i += 8) {
      u32 fragment[4];
      FG_UNROLL
      for (int j = 0; j < 4; ++j) fragment[j] = pack_pair(sums[i + 2 * j] * params.scale, sums[i + 2 * j + 1] * params.scale, Element{});
      store_matrix_x4_transposed(target + static_cast<u32>(i / 8 * 16 * PITCH), fragment);
    }
  }
  FG_DEVICE void copy_rows(const GradientHead<Element>& dq, int row) const {
    constexpr int CHUNKS = C::HEAD_DIM / CHUNK_ELEMENTS;
    for (int i = (half * 4 + warp) * WARP_LANES + lane; i < C::BLOCK_Q * CHUNKS; i += 256) {
      const int r = i / CHUNKS, chunk = i % CHUNKS;
      if (row + r >= dq.rows) break;
      dq.store_chunk(row + r, chunk * CHUNK_ELEMENTS, load_shared<Vector16>(shared + static_cast<u32>(r * PITCH + chunk * 16)));
    }
  }
};

// A CTA per block, the last ones first: their sums are still in the L2 cache.
template <class C>
FG_DEVICE void round_query_sums(const BackwardParams& params) {
  const int warp = thread_index() / WARP_LANES;
  const QueryRounding<C> rounding{params, dynamic_shared(), warp / 4, warp % 4, thread_index() % WARP_LANES};
  rounding.run(static_cast<int>(grid_size() - 1 - block_index()));
}

}  // namespace fg
