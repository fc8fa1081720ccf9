// The rows of the ampere backward: shared memory and workspace, the first launch, and query tiles on their way to the second.
#pragma once
#include "backward_params.cuh"
#include "fragments.cuh"
#include "mask.cuh"

namespace fg {

constexpr float LOG2_E = 1.44269504088896341f;

template <class C>
struct BackwardShape {
  static constexpr int CHUNKS = ceil_div(C::HEAD_DIM, 16) * 2, CHUNKS_V = ceil_div(C::HEAD_DIM_V, 16) * 2, CHUNKS_Q = C::BLOCK_Q / 8;
  static constexpr int Q_BYTES = C::BLOCK_Q * RowLayout<CHUNKS>::ROW_BYTES, DOUT_BYTES = C::BLOCK_Q * RowLayout<CHUNKS_V>::ROW_BYTES;
  static constexpr int K_BYTES = C::BLOCK_KV * RowLayout<CHUNKS>::ROW_BYTES, V_BYTES = C::BLOCK_KV * RowLayout<CHUNKS_V>::ROW_BYTES;
  static constexpr int STATISTIC_BYTES = C::BLOCK_Q * 8;  // lse and delta
  static constexpr int STAGE_BYTES = Q_BYTES + DOUT_BYTES + STATISTIC_BYTES;
  static constexpr int SCORE_BYTES = C::BLOCK_KV * RowLayout<CHUNKS_Q>::ROW_BYTES;  // a tile of P^T or dS^T
  // Tiles of dS: of all steps that are multiplied at a time, and of those before; with a second pass for dQ, only warps that share keys
  // read it.
  static constexpr int GRADIENT_TILES = C::TWO_PASS ? C::WARPS_ACROSS - 1 : C::DQ_STEPS * (C::DELAYED_DQ ? 2 : 1);
  static constexpr int V_AT = K_BYTES, STAGES_AT = V_AT + V_BYTES, P_AT = STAGES_AT + C::NUM_STAGES * STAGE_BYTES;
  static constexpr bool SPLIT = C::NUM_SIDES == 2;
  static constexpr int HANDED_AT = P_AT + (C::WARPS_ACROSS > 1 ? SCORE_BYTES : 0);  // behind P^T in the element type: P^T in float32
  static constexpr int GRADIENTS_AT = HANDED_AT + (SPLIT ? C::BLOCK_KV * C::BLOCK_Q * 4 : 0);
  static_assert(GRADIENTS_AT + GRADIENT_TILES * SCORE_BYTES == C::SHARED_BYTES, "the layout of shared memory is the formula of the space");

  static constexpr int SIDE_WARPS = C::NUM_WARPS / C::NUM_SIDES;
  static constexpr int WARPS_DOWN = SIDE_WARPS / C::WARPS_ACROSS;  // keys down, rows or columns across
  static constexpr int KEYS_PER_WARP = C::BLOCK_KV / WARPS_DOWN;
  static constexpr int ROWS_PER_WARP = SPLIT ? C::BLOCK_Q / C::WARPS_ACROSS : 32;  // whose scores it holds at a time
  static constexpr int KEY_TILES = KEYS_PER_WARP / 16, SCORE_TILES = ROWS_PER_WARP / 8;
  static_assert(KEYS_PER_WARP % 16 == 0 && ROWS_PER_WARP % 16 == 0, "warps hold whole products");
  static_assert(C::BLOCK_Q % ROWS_PER_WARP == 0, "a warp takes whole parts of a query tile, and at least one");
};

// Where float32 values of a query tile lie in global memory: lse and delta, and the sums of dQ.
template <class C>
struct Workspace {
  static constexpr int TILE_SUMS = C::BLOCK_Q * BackwardShape<C>::CHUNKS * 8;
  float *statistics, *sums;
  int row_tiles;

  FG_DEVICE explicit Workspace(const ForwardParams& forward) {
    row_tiles = ceil_div(forward.seqlen_q, C::BLOCK_Q);
    statistics = static_cast<float*>(forward.workspace);
    sums = statistics + static_cast<i64>(forward.batch) * forward.heads_q * row_tiles * (2 * C::BLOCK_Q);
  }
  FG_DEVICE int number(int batch_head, int tile) const { return batch_head * row_tiles + tile; }  // of a tile, over all heads
  FG_DEVICE float* statistics_of(int number) const { return statistics + static_cast<i64>(number) * (2 * C::BLOCK_Q); }
  FG_DEVICE float* sums_of(int number) const { return sums + static_cast<i64>(number) * TILE_SUMS; }
};

// lse of all rows of a tile, then delta. Among 16 rows, the four that one lane needs of two 8-column tiles lie side by side.
FG_DEVICE constexpr int statistic_slot(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// ---- first launch: delta, lse in log2 units, zeros ----

template <class C>
struct DeltaConfig : C {
  static constexpr int THREADS = C::BLOCK_Q * 2;  // a warp per 16 rows
};

// delta is summed as dP is, by the same products in the same order: where a row sees one key only, dP - delta is exactly 0.
template <class C>
FG_DEVICE void row_products(float (&products)[1][2][4], u32 o_tile, u32 dout_tile, int row, int lane) {
  constexpr int CHUNKS = BackwardShape<C>::CHUNKS_V;
  const SharedRows<CHUNKS> left(o_tile, row, lane);
  const FragmentCursor<CHUNKS> right(dout_tile, row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  multiply_rows<typename C::Element, CHUNKS / 2>(products, left, right);
}

template <class C>
FG_DEVICE void deltas(const BackwardParams& params) {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  using Copy = RowCopy<DeltaConfig<C>, C::BLOCK_Q, C::HEAD_DIM_V, Shape::CHUNKS_V>;
  const ForwardParams& forward = params.forward;
  const Workspace<C> workspace(forward);
  const int tile = static_cast<int>(block_index() % workspace.row_tiles),
            batch_head = static_cast<int>(block_index() / workspace.row_tiles);
  const int batch = batch_head / forward.heads_q, head = batch_head % forward.heads_q;
  const int first_row = tile * C::BLOCK_Q, valid_rows = forward.seqlen_q - first_row;
  const u32 o_tile = dynamic_shared(), dout_tile = o_tile + Shape::DOUT_BYTES;

  const Element* o = head_of<Element>(static_cast<const void*>(forward.o), forward.o_strides, batch, head);
  const Element* dout = head_of<Element>(params.dout, params.dout_strides, batch, head);
  const bool vectors = forward.vector_access != 0;
  Copy::start(o_tile, o + first_row * forward.o_strides.row, forward.o_strides.row, valid_rows, vectors);
  Copy::start(dout_tile, dout + first_row * params.dout_strides.row, params.dout_strides.row, valid_rows, vectors);
  copy_async_commit();
  if constexpr (!C::TWO_PASS) {
    float* sums = workspace.sums_of(workspace.number(batch_head, tile));
    for (int i = thread_index() * 4; i < Workspace<C>::TILE_SUMS; i += DeltaConfig<C>::THREADS * 4)
      store_global(reinterpret_cast<Vector16*>(sums + i), Vector16{{0, 0, 0, 0}});
  }
  copy_async_wait<0>();
  block_sync();

  const int lane = thread_index() % WARP_LANES, warp_row = thread_index() / WARP_LANES * 16;
  float products[1][2][4];
  row_products<C>(products, o_tile, dout_tile, warp_row, lane);
  if (lane / 8 != lane % 4) return;  // the diagonal lies in eight lanes, two rows each
  float* statistics = workspace.statistics_of(workspace.number(batch_head, tile));
  FG_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + lane / 4;
    const i64 index = static_cast<i64>(batch_head) * forward.seqlen_q + first_row + row;
    const bool is_row = row < valid_rows;
    const float lse = is_row ? load_global(forward.lse + index) : -infinity();
    float delta = lane / 4 % 2 ? products[0][half][half * 2 + 1] : products[0][half][half * 2];
    if (is_row && params.dlse) delta -= load_global(params.dlse + index);
    // A row that sees nothing, or is none, subtracts infinity: its probabilities are 0 without a mask.
    store_global(statistics + statistic_slot(row), lse == -infinity() ? infinity() : lse * LOG2_E);
    store_global(statistics + C::BLOCK_Q + statistic_slot(row), delta);
  }
}

// ---- second launch: dK and dV, and dQ unless it has a loop of its own ----

// Query tiles [first, last) that hold rows which may see one of the keys [key, key + BLOCK_KV).
template <class C>
struct RowTileRange {
  int first, last;

  FG_DEVICE RowTileRange(const ForwardParams& forward, int key) {
    const int row = key - forward.diagonal;  // the row whose diagonal meets the first key
    int first_row = 0, end_row = forward.seqlen_q;
    if constexpr (C::MASK == MASK_CAUSAL) first_row = maximum(first_row, row);
    if constexpr (C::MASK == MASK_WINDOW) {
      first_row = maximum(first_row, row - forward.window_right);
      end_row = minimum(end_row, row + C::BLOCK_KV + forward.window_left);
    }
    first = first_row / C::BLOCK_Q;
    last = first_row < end_row ? ceil_div(end_row, C::BLOCK_Q) : first;
  }
  FG_DEVICE int count() const { return last - first; }
  // Where a CTA begins. CTAs that walk side by side over the rows of one head would all add to the same sums at a time.
  FG_DEVICE int start(int key) const { return C::STAGGERED && count() > 0 ? first + key / C::BLOCK_KV % count() : first; }
};

// Who copies query tiles: the first half of the threads where there are two sides.
template <class C>
struct RowCopyConfig : C {
  static constexpr int THREADS = C::THREADS / C::NUM_SIDES;
};

// Query tiles with dO, lse and delta on their way through shared memory, head by head. A step past the end closes an empty group, which
// keeps the count of groups in step with the count of tiles.
template <class C>
struct RowRing {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  const BackwardParams& params;
  const Workspace<C> workspace;
  const RowTileRange<C> range;
  const int batch;
  const u32 slots;
  const int start;
  int steps, head, tile;  // of the next copy

  FG_DEVICE RowRing(const BackwardParams& all, int own_batch, int head_kv, int key, u32 shared)
      : params(all),
        workspace(all.forward),
        range(all.forward, key),
        batch(own_batch),
        slots(shared + Shape::STAGES_AT),
        start(range.start(key)) {
    const int group = params.forward.heads_q / params.forward.heads_kv;
    head = head_kv * group;
    tile = start;
    steps = group * range.count();
  }

  FG_DEVICE u32 slot(int step) const { return slots + static_cast<u32>(step % C::NUM_STAGES * Shape::STAGE_BYTES); }

  FG_DEVICE void prefetch(int step) {
    if (step < steps) {
      copy_rows(slot(step), tile * C::BLOCK_Q);
      if (++tile == range.last) tile = range.first;
      if (tile == start) ++head;
    }
    copy_async_commit();
  }
  FG_DEVICE void copy_rows(u32 to, int row) const {
    const Element* q = head_of<Element>(params.forward.q, params.forward.q_strides, batch, head);
    const Element* dout = head_of<Element>(params.dout, params.dout_strides, batch, head);
    const i64 stride = params.forward.q_strides.row, dout_stride = params.dout_strides.row;
    const int rows = params.forward.seqlen_q - row;
    const bool vectors = params.forward.vector_access != 0;
    RowCopy<RowCopyConfig<C>, C::BLOCK_Q, C::HEAD_DIM, Shape::CHUNKS>::start(to, q + row * stride, stride, rows, vectors);
    RowCopy<RowCopyConfig<C>, C::BLOCK_Q, C::HEAD_DIM_V, Shape::CHUNKS_V>::start(to + Shape::Q_BYTES, dout + row * dout_stride, dout_stride,
                                                                                 rows, vectors);
    const float* statistics = workspace.statistics_of(workspace.number(batch * params.forward.heads_q + head, tile));
    const int i = thread_index();
    if (i < Shape::STATISTIC_BYTES / CHUNK_BYTES)
      copy_async_16(to + static_cast<u32>(Shape::Q_BYTES + Shape::DOUT_BYTES + i * CHUNK_BYTES), statistics + i * 4, true);
  }
};

// The tile of one step: where it came from and where it lies.
struct RowTile {
  int tile, number;         // within its head, over all heads
  u32 q, dout, lse, delta;  // shared
};
template <class C>
struct RowSteps {
  using Shape = BackwardShape<C>;
  const int first, last, start, row_tiles;
  int tile, number;

  FG_DEVICE explicit RowSteps(const RowRing<C>& ring)
      : first(ring.range.first), last(ring.range.last), start(ring.start), row_tiles(ring.workspace.row_tiles), tile(ring.start) {
    number = ring.workspace.number(ring.batch * ring.params.forward.heads_q + ring.head, tile);
  }
  FG_DEVICE RowTile at(u32 slot) const {
    const u32 statistics = slot + Shape::Q_BYTES + Shape::DOUT_BYTES;
    return {tile, number, slot, slot + Shape::Q_BYTES, statistics, statistics + C::BLOCK_Q * 4};
  }
  FG_DEVICE void advance() {
    ++tile, ++number;
    if (tile == last) tile = first, number += first - last;
    if (tile == start) number += row_tiles;
  }
};

}  // namespace fg
