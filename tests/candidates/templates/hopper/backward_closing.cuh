// dQ of a block rounded as soon as it is complete, by two warps beside the products instead of a launch of its own.
//
// A thread counts the tiles of keys that have added to each block; the words for that lie behind the sums. The tile that comes last has its
// CTA round the block, while its sums are still in the L2 cache. Nobody waits for another CTA.
#pragma once
#include "backward_fused_base.cuh"
#include "backward_turns.cuh"
#include "words.cuh"

namespace fg {

template <class C>
FG_DEVICE void count_sums(const BackwardParams& params, u32 shared) {
  using Base = FusedBase<C>;
  using Shape = KeyShape<C>;
  TileQueue queue = Shape::queue(shared);
  auto closed = Shape::closed_blocks(shared);
  u32 exchange = 0;
  FG_NO_UNROLL
  for (int tile = queue.read_alone(); tile != NO_TILE; tile = queue.read_alone()) {
    SummedBlocks<C> blocks(params.forward, KeyTile<C>::of(params.forward, tile));
    FG_NO_UNROLL
    for (; blocks.walk.left > 0; blocks.advance()) {
      mbarrier_wait(Base::added_full(shared, exchange), exchange / 2 % 2);
      mbarrier_arrive(Base::exchange_empty(shared, exchange));  // so that nothing more is added than this thread has seen
      ++exchange;
      const u32 last = static_cast<u32>(tiles_of_block<C>(params.forward, blocks.walk.block) - 1);
      if (count_word(turns_of<C>(params.forward) + blocks.number(), last) == last) closed.publish(blocks.number());
    }
  }
  closed.publish(NO_TILE);
}

// Scales and rounds complete blocks: 16 rows by 16 columns at a time, which are eight registers of a transposed product.
template <class C>
struct ClosedBlocks {
  using Base = FusedBase<C>;
  using Element = typename C::Element;
  static_assert(C::TURNED && C::DIRECT && Base::DQ_REGISTERS % 8 == 0, "rows are turned back by sixteens");
  static constexpr int PIECES_OF_WARP = Base::DQ_REGISTERS / 8, PIECES = 8 * PIECES_OF_WARP, AT_ONCE = 2;

  const BackwardParams& params;
  const u32 shared;  // of what is rounded at a time; 16-byte chunks trade places every four rows, so that no access meets a conflict
  const int lane;

  FG_DEVICE u32 place(int row, int chunk) const { return shared + static_cast<u32>(row * 32 + (chunk ^ row / 4 % 2) * 16); }
  // Row and column of a piece in its block.
  FG_DEVICE static int row_of_piece(int piece) {
    return (Base::BY_ROWS ? piece / (4 * PIECES_OF_WARP) * (C::BLOCK_Q / 2) : 0) + piece % PIECES_OF_WARP * 16;
  }
  FG_DEVICE static int column_of_piece(int piece) {
    return (Base::BY_ROWS ? 0 : piece / (4 * PIECES_OF_WARP) * SWIZZLE_COLUMNS) + piece / PIECES_OF_WARP % 4 * 16;
  }

  FG_DEVICE void round_piece(const Vector16 (&sums)[2], const GradientHead<Element>& dq, int row, int column) const {
    u32 fragment[4];
    FG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const u32* pair = sums[i / 2].word + i % 2 * 2;
      fragment[i] = pack_pair(float_from_bits(pair[0]) * params.scale, float_from_bits(pair[1]) * params.scale, Element{});
    }
    // All lanes have read the piece before.
    warp_sync();
    store_matrix_x4_transposed(place(lane / 16 * 8 + lane % 8, lane / 8 % 2), fragment);
    warp_sync();
    const int own_row = row + lane / 2, own_column = column + lane % 2 * CHUNK_ELEMENTS;
    if (own_row < dq.rows && own_column < C::HEAD_DIM)
      dq.store_chunk(own_row, own_column, load_shared<Vector16>(place(lane / 2, lane % 2)));
  }
  FG_DEVICE void round_block(int block) const {  // counted over all heads
    const int blocks = ceil_div(params.forward.seqlen_q, C::BLOCK_Q), batch_head = block / blocks;
    const int batch = batch_head / params.forward.heads_q, head = batch_head - batch * params.forward.heads_q;
    const GradientHead<Element> dq(params.dq, params.dq_strides, batch, head, params.forward.seqlen_q);
    const int row = (block - batch_head * blocks) * C::BLOCK_Q;
    const Vector16* sums =
        reinterpret_cast<const Vector16*>(RowStatistics(params.forward).sums + static_cast<i64>(block) * (2 * Base::HALF)) + lane;
    FG_NO_UNROLL
    for (int piece = 0; piece < PIECES; piece += AT_ONCE) {
      Vector16 loaded[AT_ONCE][2];
      FG_UNROLL
      for (int i = 0; i < 2 * AT_ONCE; ++i) loaded[i / 2][i % 2] = load_global(sums + (piece * 2 + i) * WARP_LANES);
      FG_UNROLL
      for (int i = 0; i < AT_ONCE; ++i) round_piece(loaded[i], dq, row + row_of_piece(piece + i), column_of_piece(piece + i));
    }
  }
  FG_DEVICE void run(NumberQueue<KeyShape<C>::CLOSED_SLOTS> queue) const {
    FG_NO_UNROLL
    for (int block = queue.read(); block != NO_TILE; block = queue.read()) round_block(block);
  }
};

template <class C>
FG_DEVICE void round_closed_blocks(const BackwardParams& params, u32 shared, int lane) {
  using Shape = KeyShape<C>;
  ClosedBlocks<C>{params, shared + static_cast<u32>(Shape::STAGING), lane}.run(Shape::closed_blocks(shared));
}

}  // namespace fg
