// Gradients of attention with warp-wide tensor-core products (mma.sync) and asynchronous copies: sm_80 and later, 16-bit elements.
//
// P = exp(S - lse) is computed again, tile by tile, transposed: S^T = K Q^T, so that keys are rows. With dP^T = V dO^T and
// delta = rowsum(dO * O) - dlse, dS^T = P^T * (dP^T - delta), and
//
//   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K
//
// A CTA owns BLOCK_KV keys and walks over the query rows that see them, head by head of the group. Its warps may be split in two sides. The
// probability side computes S^T, P^T and sums dV; the gradient side computes dP^T, takes P^T over from its twin on the other side, and sums
// dK. So no thread holds more than one of the two sums, each warp owns twice the keys, and every fragment of Q and dO that is loaded from
// shared memory serves twice the products. While one side is busy with exponentials, the other keeps the tensor cores busy. The gradient
// side, which waits for P^T anyway, also starts the copies of the next query tiles. With one side,
// every warp does both, for 32 query rows at a time: P^T never leaves its registers, which suits small head dims.
//
// dQ: all warps multiply the tiles of dS of DQ_STEPS steps, with DELAYED_DQ one step later, and add them to float32 sums in global memory,
// whose order is not defined; a last launch converts them. With TWO_PASS, that launch computes dQ in a loop of its own instead, and equal
// inputs give equal bits.
#pragma once
#include "backward_pass.cuh"
#include "backward_scores.cuh"

namespace fg {

// How the warps share the product dS K of DQ_STEPS query tiles: groups of rows by groups of columns, as square as they come.
template <class C>
struct QuerySplit {
  static constexpr int TILE_UNITS = C::BLOCK_Q / 16, ROW_UNITS = C::DQ_STEPS * TILE_UNITS, COLUMN_UNITS = BackwardShape<C>::CHUNKS / 2;
  static constexpr int row_groups(int column_groups) { return minimum(ROW_UNITS, C::NUM_WARPS / column_groups); }
  // Steps over chunks from a start inside a swizzled line must not leave it, unless the start is that of a line.
  static constexpr bool steps_stay(int tiles) {
    return !RowLayout<BackwardShape<C>::CHUNKS>::SWIZZLED || tiles % 8 == 0 || (tiles & (tiles - 1)) == 0;
  }
  static constexpr int best_column_groups() {
    int best = 1, least = 1 << 20;
    for (int groups = 1; groups <= C::NUM_WARPS; ++groups) {
      if (COLUMN_UNITS % groups != 0 || TILE_UNITS % (ROW_UNITS / row_groups(groups)) != 0 || !steps_stay(COLUMN_UNITS / groups * 2))
        continue;
      const int rows = ROW_UNITS / row_groups(groups), columns = COLUMN_UNITS / groups, effort = 16 * rows * columns + rows + columns;
      if (effort < least) best = groups, least = effort;
    }
    return best;
  }
  static constexpr int COLUMN_GROUPS = best_column_groups(), ROW_GROUPS = row_groups(COLUMN_GROUPS);
  static constexpr bool SOME_IDLE = COLUMN_GROUPS * ROW_GROUPS < C::NUM_WARPS;
  static constexpr int ROW_TILES = ROW_UNITS / ROW_GROUPS, COLUMN_TILES = COLUMN_UNITS / COLUMN_GROUPS * 2;
};

// Query tiles whose dS lies side by side in shared memory; `numbers` as in Workspace.
struct DoneTiles {
  u32 gradients;
  int count, numbers[2];
};

// The sums of dQ of these tiles += dS K. A warp's rows are all of one tile.
template <class C>
FG_DEVICE void add_query_gradients(const Workspace<C>& workspace, const DoneTiles& tiles, u32 keys) {
  using Shape = BackwardShape<C>;
  using Split = QuerySplit<C>;
  const int lane = thread_index() % WARP_LANES, warp = thread_index() / WARP_LANES;
  const int row_unit = warp / Split::COLUMN_GROUPS * Split::ROW_TILES, column_tile = warp % Split::COLUMN_GROUPS * Split::COLUMN_TILES;
  const int tile = row_unit / Split::TILE_UNITS, unit = row_unit % Split::TILE_UNITS;
  if ((C::DQ_STEPS > 1 || Split::SOME_IDLE) && tile >= tiles.count) return;
  SharedColumns<Shape::CHUNKS_Q> left(tiles.gradients + static_cast<u32>(tile * Shape::SCORE_BYTES), lane);
  left.cursor.start = left.cursor.at(0, unit * 2);
  FragmentCursor<Shape::CHUNKS> right(keys, lane % 16, lane / 16);
  right.start = right.at(0, column_tile);
  float products[Split::ROW_TILES][Split::COLUMN_TILES][4];
  clear(products);
  accumulate_rows<typename C::Element, C::BLOCK_KV / 16>(products, left, right);
  float* sums = workspace.sums_of(tile == 0 ? tiles.numbers[0] : tiles.numbers[1]);
  FG_UNROLL
  for (int m = 0; m < Split::ROW_TILES; ++m) {
    FG_UNROLL
    for (int n = 0; n < Split::COLUMN_TILES; ++n)
      add_to_sums(sums + ((unit + m) * Shape::CHUNKS + column_tile + n) * 128, lane, products[m][n]);
  }
}

// What a CTA knows throughout its loop.
template <class C>
struct KeyBlock {
  using Shape = BackwardShape<C>;
  const BackwardParams& params;
  const u32 shared;
  const SidePlace<C> place;

  FG_DEVICE u32 gradients(int step) const {
    return shared + static_cast<u32>(Shape::GRADIENTS_AT + step % maximum(Shape::GRADIENT_TILES, 1) * Shape::SCORE_BYTES);
  }
  FG_DEVICE PairMask<C> mask_of(const RowTile& rows, const SidePlace<C>& at) const {
    return PairMask<C>(params.forward, rows.tile * C::BLOCK_Q + at.own_row(), at.first_key);
  }
  FG_DEVICE void hide_in(Scores<C>& scores, const RowTile& rows, const SidePlace<C>& at, float value) const {
    hide<C>(scores, params.forward, at.first_key + at.lane / 4, rows.tile * C::BLOCK_Q + at.own_row() + at.lane % 4 * 2, value);
  }
};

// S^T, P^T, dV.
template <class C>
struct ProbabilitySide : KeyRows<C, BackwardShape<C>::CHUNKS, BackwardShape<C>::CHUNKS_V> {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  static constexpr bool COPIES = false, DQ_FIRST = false;

  FG_DEVICE ProbabilitySide(const KeyBlock<C>& block) : KeyRows<C, Shape::CHUNKS, Shape::CHUNKS_V>(block.shared, block.place) {}

  FG_DEVICE void step(const KeyBlock<C>& block, const RowTile& rows, int) {
    const PairMask<C> mask = block.mask_of(rows, block.place);
    // Warps that share keys wait for each other, so none sits out.
    if (C::WARPS_ACROSS == 1 && !mask.any_seen) return;
    Scores<C> scores;
    this->multiply(scores, rows.q, block.place);
    if (mask.any_hidden) block.hide_in(scores, rows, block.place, -infinity());
    exponentials<C>(scores, block.params.forward.scale_log2, block.place, rows.lse);
    Handover<C>(block.shared, block.place).give(scores);
    PackedScores<C> packed;
    pack<C>(packed, scores);
    const ScoreTile<C> tile(block.shared + Shape::P_AT, block.place);
    if constexpr (C::WARPS_ACROSS > 1) tile.store(packed);
    barrier_arrive(TWINS + block.place.number, 2 * WARP_LANES);
    if constexpr (C::WARPS_ACROSS > 1) {
      barrier_sync(PROBABILITY_SIDE, Shape::SIDE_WARPS * WARP_LANES);
      this->accumulate(tile.rows(block.place), rows.dout, block.place);
    } else {
      this->accumulate(packed, rows.dout, block.place);
    }
  }
};

// dP^T, dS^T, dK.
template <class C>
struct GradientSide : KeyRows<C, BackwardShape<C>::CHUNKS_V, BackwardShape<C>::CHUNKS> {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  static constexpr bool COPIES = true, DQ_FIRST = true;

  FG_DEVICE GradientSide(const KeyBlock<C>& block) : KeyRows<C, Shape::CHUNKS_V, Shape::CHUNKS>(block.shared + Shape::V_AT, block.place) {}

  FG_DEVICE void step(const KeyBlock<C>& block, const RowTile& rows, int step) {
    const PairMask<C> mask = block.mask_of(rows, block.place);
    const ScoreTile<C> gradients(block.gradients(step), block.place);
    if (C::WARPS_ACROSS == 1 && !mask.any_seen) {
      if constexpr (Shape::GRADIENT_TILES > 0) gradients.store(PackedScores<C>{});
      return;
    }
    Scores<C> products;
    this->multiply(products, rows.dout, block.place);
    // Products with hidden keys may be anything; with a probability of 0 they must stay finite.
    if (mask.any_hidden) block.hide_in(products, rows, block.place, 0.0f);
    barrier_sync(TWINS + block.place.number, 2 * WARP_LANES);
    differentiate<C>(products, Handover<C>(block.shared, block.place), block.place, rows.delta);
    PackedScores<C> packed;
    pack<C>(packed, products);
    if constexpr (Shape::GRADIENT_TILES > 0) gradients.store(packed);
    if constexpr (C::WARPS_ACROSS > 1) {
      barrier_sync(GRADIENT_SIDE, Shape::SIDE_WARPS * WARP_LANES);
      this->accumulate(gradients.rows(block.place), rows.q, block.place);
    } else {
      this->accumulate(packed, rows.q, block.place);
    }
  }
};

// Both sides in one warp.
template <class C>
struct BothSides {
  using Shape = BackwardShape<C>;
  static constexpr bool COPIES = true, DQ_FIRST = true;
  KeyRows<C, Shape::CHUNKS, Shape::CHUNKS_V> of_probabilities;
  KeyRows<C, Shape::CHUNKS_V, Shape::CHUNKS> of_gradients;

  FG_DEVICE BothSides(const KeyBlock<C>& block)
      : of_probabilities(block.shared, block.place), of_gradients(block.shared + Shape::V_AT, block.place) {}

  FG_DEVICE void step(const KeyBlock<C>& block, const RowTile& rows, int step) {
    FG_UNROLL
    for (int part = 0; part < C::BLOCK_Q / Shape::ROWS_PER_WARP; ++part) {
      const SidePlace<C> place = block.place.part(part);
      const PairMask<C> mask = block.mask_of(rows, place);
      const ScoreTile<C> gradients(block.gradients(step), place);
      if (!mask.any_seen) {
        if constexpr (Shape::GRADIENT_TILES > 0) gradients.store(PackedScores<C>{});
        continue;
      }
      Scores<C> scores, products;
      of_probabilities.multiply(scores, rows.q, place);
      of_gradients.multiply(products, rows.dout, place);
      if (mask.any_hidden) {
        block.hide_in(scores, rows, place, -infinity());
        block.hide_in(products, rows, place, 0.0f);
      }
      exponentials<C>(scores, block.params.forward.scale_log2, place, rows.lse);
      PackedScores<C> packed;
      pack<C>(packed, scores);
      of_probabilities.accumulate(packed, rows.dout, place);
      differentiate<C>(products, KeptProbabilities<C>{scores}, place, rows.delta);
      pack<C>(packed, products);
      if constexpr (Shape::GRADIENT_TILES > 0) gradients.store(packed);
      of_gradients.accumulate(packed, rows.q, place);
    }
  }
};

// The tiles of the last DQ_STEPS steps.
template <class C>
struct LastTiles {
  int newest = 0, older = 0;

  FG_DEVICE void push(int number) {
    older = newest;
    newest = number;
  }
  // Of steps [first, end).
  FG_DEVICE DoneTiles of(const KeyBlock<C>& block, int first, int end) const {
    return {block.gradients(first), end - first, {C::DQ_STEPS == 2 && end - first == 2 ? older : newest, newest}};
  }
};

// One side's way through all query tiles. One barrier per step: the tile has landed for everyone, everyone is done with the slot that the
// next copy overwrites, and with DELAYED_DQ the tiles of dS before are complete. Otherwise that takes another barrier.
template <class C, class Side>
FG_DEVICE void walk(const KeyBlock<C>& block, RowRing<C>& ring, RowSteps<C> steps, Side& side) {
  constexpr bool DELAYED = !C::TWO_PASS && C::DELAYED_DQ, AT_ONCE = !C::TWO_PASS && !C::DELAYED_DQ;
  LastTiles<C> done;
  FG_NO_UNROLL
  for (int step = 0; step < ring.steps; ++step) {
    const RowTile rows = steps.at(ring.slot(step));
    const bool is_due = DELAYED && step > 0 && step % C::DQ_STEPS == 0;
    if (Side::COPIES || step == 0) copy_async_wait<C::NUM_STAGES - 2>();  // the keys came with the first tile
    block_sync();
    if (Side::DQ_FIRST && is_due) add_query_gradients<C>(ring.workspace, done.of(block, step - C::DQ_STEPS, step), block.shared);
    // Behind the first products where there are any, so that the tensor cores are busy meanwhile.
    if (Side::COPIES) ring.prefetch(step + C::NUM_STAGES - 1);
    side.step(block, rows, step);
    if (!Side::DQ_FIRST && is_due) add_query_gradients<C>(ring.workspace, done.of(block, step - C::DQ_STEPS, step), block.shared);
    done.push(rows.number);
    if (AT_ONCE && (step % C::DQ_STEPS == C::DQ_STEPS - 1 || step == ring.steps - 1)) {
      block_sync();
      add_query_gradients<C>(ring.workspace, done.of(block, step - step % C::DQ_STEPS, step + 1), block.shared);
    }
    steps.advance();
  }
  if (!DELAYED || ring.steps == 0) return;
  block_sync();
  const int first = (ring.steps - 1) / C::DQ_STEPS * C::DQ_STEPS;
  add_query_gradients<C>(ring.workspace, done.of(block, first, ring.steps), block.shared);
}

// Which keys of which head a CTA owns.
struct KeyPlace {
  int batch, head_kv, first_key;
};
template <class C>
FG_DEVICE KeyPlace key_place(const ForwardParams& forward, i64 block) {
  const int tiles = ceil_div(forward.seqlen_kv, C::BLOCK_KV), heads = forward.batch * forward.heads_kv;
  const bool tiles_first = C::TILE_ORDER == TILES_FIRST;
  const int batch_head = static_cast<int>(tiles_first ? block / tiles : block % heads);
  const int tile = static_cast<int>(tiles_first ? block % tiles : block / heads);
  return {batch_head / forward.heads_kv, batch_head % forward.heads_kv, tile * C::BLOCK_KV};
}

template <class C>
FG_DEVICE void copy_keys(const ForwardParams& forward, const KeyPlace& place, u32 shared) {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  const Element* k = head_of<Element>(forward.k, forward.k_strides, place.batch, place.head_kv) + place.first_key * forward.k_strides.row;
  const Element* v = head_of<Element>(forward.v, forward.v_strides, place.batch, place.head_kv) + place.first_key * forward.v_strides.row;
  const int rows = forward.seqlen_kv - place.first_key;
  const bool vectors = forward.vector_access != 0;
  RowCopy<C, C::BLOCK_KV, C::HEAD_DIM, Shape::CHUNKS>::start(shared, k, forward.k_strides.row, rows, vectors);
  RowCopy<C, C::BLOCK_KV, C::HEAD_DIM_V, Shape::CHUNKS_V>::start(shared + Shape::V_AT, v, forward.v_strides.row, rows, vectors);
}

template <class C>
FG_DEVICE void key_gradients(const BackwardParams& params) {
  using Element = typename C::Element;
  const ForwardParams& forward = params.forward;
  const KeyPlace at = key_place<C>(forward, block_index());
  const u32 shared = dynamic_shared();
  const KeyBlock<C> block = {params, shared, SidePlace<C>(at.first_key)};
  RowRing<C> ring(params, at.batch, at.head_kv, at.first_key, shared);
  const RowSteps<C> steps(ring);
  const int rows = forward.seqlen_kv - at.first_key;
  const bool vectors = forward.vector_access != 0;

  copy_keys<C>(forward, at, shared);
  if constexpr (C::KEYS_IN_REGISTERS) copy_async_commit();
  FG_UNROLL
  for (int step = 0; step < C::NUM_STAGES - 1; ++step) {
    if (thread_index() < RowCopyConfig<C>::THREADS) {
      ring.prefetch(step);
    } else {
      copy_async_commit();
    }
  }
  if constexpr (C::KEYS_IN_REGISTERS) {
    copy_async_wait<C::NUM_STAGES - 1>();
    block_sync();
  }
  Element* dk = head_of<Element>(params.dk, params.dk_strides, at.batch, at.head_kv) + at.first_key * params.dk_strides.row;
  Element* dv = head_of<Element>(params.dv, params.dv_strides, at.batch, at.head_kv) + at.first_key * params.dv_strides.row;
  const TargetRows<Element> dk_rows = {dk, params.dk_strides.row, rows, C::HEAD_DIM, vectors};
  const TargetRows<Element> dv_rows = {dv, params.dv_strides.row, rows, C::HEAD_DIM_V, vectors};
  if constexpr (C::NUM_SIDES == 1) {
    BothSides<C> sides(block);
    walk<C>(block, ring, steps, sides);
    sides.of_gradients.store(dk_rows, block.place, params.scale);
    sides.of_probabilities.store(dv_rows, block.place, 1.0f);
  } else if (thread_index() < C::THREADS / 2) {
    GradientSide<C> side(block);
    walk<C>(block, ring, steps, side);
    side.store(dk_rows, block.place, params.scale);
  } else {
    ProbabilitySide<C> side(block);
    walk<C>(block, ring, steps, side);
    side.store(dv_rows, block.place, 1.0f);
  }
}

template <class C>
FG_DEVICE void query_gradients(const BackwardParams& params) {
  if constexpr (C::TWO_PASS) {
    second_pass<C>(params);
  } else {
    convert_sums<C>(params);
  }
}

}  // namespace fg
