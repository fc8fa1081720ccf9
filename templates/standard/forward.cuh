// Attention the textbook way: scores, softmax, product as three launches, with the matrix of scores in global memory. The baseline that
// tiled attention is measured against; the matrix is in the element type, so its rounding fails the exactness gate for 16-bit elements.
#pragma once
#include "mask.cuh"
#include "problem.cuh"

namespace fg {

// Square tiles of TILE x TILE results per CTA, one result per thread.
template <class C>
struct StandardTile {
  static constexpr int TILE = C::TILE, PITCH = TILE + 1;
  static_assert(2 * TILE * PITCH * 4 == C::TILE_BYTES && TILE * TILE == C::THREADS, "the layout is the formula of the search space");
  int row, column;  // of this thread, within the tile
  u32 left, right;

  FG_DEVICE StandardTile()
      : row(thread_index() / TILE), column(thread_index() % TILE), left(dynamic_shared()), right(dynamic_shared() + TILE * PITCH * 4) {}

  FG_DEVICE static u32 at(u32 matrix, int r, int c) { return matrix + static_cast<u32>(r * PITCH + c) * 4; }

  // Adds the products of TILE columns of the left tile and TILE rows of the right tile.
  FG_DEVICE float multiply(float sum, float left_value, float right_value) const {
    store_shared(at(left, row, column), left_value);
    store_shared(at(right, row, column), right_value);
    block_sync();
    for (int i = 0; i < TILE; ++i)
      sum = fused_multiply_add(load_shared<float>(at(left, row, i)), load_shared<float>(at(right, i, column)), sum);
    block_sync();  // the next tiles overwrite these
    return sum;
  }
};

// The CTA's tile of a (batch, heads, rows, columns) matrix of results.
struct ResultTile {
  int batch, head, row, column;

  FG_DEVICE ResultTile(const ForwardParams& params, i64 block, int columns, int tile) {
    const int column_tiles = ceil_div(columns, tile), row_tiles = ceil_div(params.seqlen_q, tile);
    column = static_cast<int>(block % column_tiles) * tile;
    row = static_cast<int>(block / column_tiles % row_tiles) * tile;
    const int batch_head = static_cast<int>(block / column_tiles / row_tiles);
    batch = batch_head / params.heads_q;
    head = batch_head % params.heads_q;
  }
};

template <class C>
FG_DEVICE typename C::Element* score_row(const ForwardParams& params, int batch, int head, int row) {
  const i64 index = (static_cast<i64>(batch) * params.heads_q + head) * params.seqlen_q + row;
  return static_cast<typename C::Element*>(params.workspace) + index * params.seqlen_kv;
}

template <class Element>
FG_DEVICE float value_or_zero(const Element* address, bool valid) {
  return valid ? to_float(load_global(address)) : 0.0f;
}

// S = Q K^T, in log2 units, hidden scores -inf.
template <class C>
FG_DEVICE void scores(const ForwardParams& params) {
  using Element = typename C::Element;
  const StandardTile<C> tile;
  const ResultTile place(params, block_index(), params.seqlen_kv, C::TILE);
  const Element* q = head_of<Element>(params.q, params.q_strides, place.batch, place.head);
  const Element* k = head_of<Element>(params.k, params.k_strides, place.batch, place.head / (params.heads_q / params.heads_kv));
  const int row = place.row + tile.row, key = place.column + tile.column;
  // The right tile is K transposed: this thread loads dimension tile.row of key tile.column.
  float sum = 0.0f;
  for (int d = 0; d < C::HEAD_DIM; d += C::TILE) {
    const int left_d = d + tile.column, right_d = d + tile.row;
    sum = tile.multiply(sum, value_or_zero(q + row * params.q_strides.row + left_d, row < params.seqlen_q && left_d < C::HEAD_DIM),
                        value_or_zero(k + key * params.k_strides.row + right_d, key < params.seqlen_kv && right_d < C::HEAD_DIM));
  }
  if (row >= params.seqlen_q || key >= params.seqlen_kv) return;
  const VisibleKeys keys = visible_keys<C>(params, row);
  const bool visible = key >= keys.first && key <= keys.last;
  store_global(score_row<C>(params, place.batch, place.head, row) + key,
               from_float<Element>(visible ? sum * params.scale_log2 : -infinity()));
}

// One warp per row: maximum, sum, and the probabilities in place.
template <class C>
FG_DEVICE void softmax(const ForwardParams& params) {
  using Element = typename C::Element;
  constexpr int WARPS = C::THREADS / WARP_LANES;
  const i64 index = block_index() * WARPS + thread_index() / WARP_LANES;  // over batch, head, row
  const int lane = thread_index() % WARP_LANES;
  if (index >= static_cast<i64>(params.batch) * params.heads_q * params.seqlen_q) return;
  Element* row = static_cast<Element*>(params.workspace) + index * params.seqlen_kv;
  float maximum_score = -infinity();
  for (int i = lane; i < params.seqlen_kv; i += WARP_LANES) maximum_score = larger(maximum_score, to_float(load_global(row + i)));
  for (int step = WARP_LANES / 2; step > 0; step /= 2) maximum_score = larger(maximum_score, shuffle_xor(maximum_score, step));
  // A row with no visible key: (-inf) - (-inf) is NaN, so its base is 0 and its sum ends as 0.
  const float base = maximum_score == -infinity() ? 0.0f : maximum_score;
  float sum = 0.0f;
  for (int i = lane; i < params.seqlen_kv; i += WARP_LANES) sum += exp2_approx(to_float(load_global(row + i)) - base);
  for (int step = WARP_LANES / 2; step > 0; step /= 2) sum += shuffle_xor(sum, step);
  const bool empty = !(sum > 0.0f);
  for (int i = lane; i < params.seqlen_kv; i += WARP_LANES) {
    store_global(row + i, from_float<Element>(empty ? 0.0f : exp2_approx(to_float(load_global(row + i)) - base) / sum));
  }
  if (lane == 0) store_global(params.lse + index, empty ? -infinity() : (maximum_score + log2_exact(sum)) * LN_2);
}

// O = P V.
template <class C>
FG_DEVICE void product(const ForwardParams& params) {
  using Element = typename C::Element;
  const StandardTile<C> tile;
  const ResultTile place(params, block_index(), C::HEAD_DIM_V, C::TILE);
  const Element* v = head_of<Element>(params.v, params.v_strides, place.batch, place.head / (params.heads_q / params.heads_kv));
  const int row = place.row + tile.row, column = place.column + tile.column;
  float sum = 0.0f;
  for (int key = 0; key < params.seqlen_kv; key += C::TILE) {
    const int left_key = key + tile.column, right_key = key + tile.row;
    const Element* probability = score_row<C>(params, place.batch, place.head, row) + left_key;
    sum =
        tile.multiply(sum, value_or_zero(probability, row < params.seqlen_q && left_key < params.seqlen_kv),
                      value_or_zero(v + right_key * params.v_strides.row + column, right_key < params.seqlen_kv && column < C::HEAD_DIM_V));
  }
  if (row >= params.seqlen_q || column >= C::HEAD_DIM_V) return;
  Element* o = head_of<Element>(params.o, params.o_strides, place.batch, place.head);
  store_global(o + row * params.o_strides.row + column, from_float<Element>(sum));
}

}  // namespace fg
