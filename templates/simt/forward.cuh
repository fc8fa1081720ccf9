// Forward attention with plain multiply-adds: the readable specification of every other family.
//
// A CTA owns BLOCK_Q query rows and walks over the keys in tiles of BLOCK_KV rows. A team of LANES lanes serves ROWS query rows: its lanes
// share the score columns, then the output columns. Shared memory holds Q, K and V as float32, and the probabilities of the present tile.
#pragma once
#include "mask.cuh"
#include "problem.cuh"

namespace fg {

// A row-major float32 matrix in shared memory. The pitch is odd, so that lanes reading one column of consecutive rows use different banks.
struct SharedMatrix {
  u32 base;
  int pitch;

  FG_DEVICE u32 address(int row, int column) const { return base + static_cast<u32>(row * pitch + column) * 4; }
  FG_DEVICE float load(int row, int column) const { return load_shared<float>(address(row, column)); }
  FG_DEVICE void store(int row, int column, float value) const { store_shared(address(row, column), value); }
};

template <class C>
struct SimtTiles {
  static constexpr int PITCH = C::HEAD_DIM + 1, PITCH_V = C::HEAD_DIM_V + 1, PITCH_P = C::BLOCK_KV + 1;
  static constexpr int FLOATS = (C::BLOCK_Q + C::BLOCK_KV) * PITCH + C::BLOCK_KV * PITCH_V + C::BLOCK_Q * PITCH_P;
  static_assert(FLOATS * 4 == C::SHARED_BYTES, "the layout of shared memory is the formula of the search space");

  SharedMatrix q, k, v, p;

  FG_DEVICE explicit SimtTiles(u32 base)
      : q{base, PITCH}, k{q.address(C::BLOCK_Q, 0), PITCH}, v{k.address(C::BLOCK_KV, 0), PITCH_V}, p{v.address(C::BLOCK_KV, 0), PITCH_P} {}
};

// Rows past `valid_rows` become zeros: a score or product with them is finite, and the mask hides it.
template <class C, int ROWS, int COLUMNS, class Element>
FG_DEVICE void load_rows(const SharedMatrix& tile, const Element* source, i64 row_stride, int valid_rows) {
  for (int i = thread_index(); i < ROWS * COLUMNS; i += C::THREADS) {
    const int row = i / COLUMNS, column = i % COLUMNS;
    tile.store(row, column, row < valid_rows ? to_float(load_global(source + row * row_stride + column)) : 0.0f);
  }
}

// Combines one value of every lane of a team; all lanes get the result.
template <int LANES>
FG_DEVICE float team_maximum(float value) {
  FG_UNROLL
  for (int step = LANES / 2; step > 0; step /= 2) value = larger(value, shuffle_xor(value, step));
  return value;
}
template <int LANES>
FG_DEVICE float team_sum(float value) {
  FG_UNROLL
  for (int step = LANES / 2; step > 0; step /= 2) value += shuffle_xor(value, step);
  return value;
}

template <class C>
struct SimtTeam {
  static constexpr int ROWS = C::ROWS_PER_TEAM, LANES = C::LANES_PER_TEAM;
  static constexpr int SCORES = C::BLOCK_KV / LANES, OUTPUTS = ceil_div(C::HEAD_DIM_V, LANES);
  static_assert(C::BLOCK_Q / ROWS * LANES == C::THREADS, "every thread belongs to one team");
  static_assert(LANES <= WARP_LANES && C::BLOCK_KV % LANES == 0, "a team lies within a warp and shares the columns evenly");

  int lane, row0;  // first row of the team, within the query tile
  float row_max[ROWS], row_sum[ROWS], output[ROWS][OUTPUTS];

  FG_DEVICE SimtTeam() : lane(thread_index() % LANES), row0(thread_index() / LANES * ROWS) {
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.0f;
      FG_UNROLL
      for (int i = 0; i < OUTPUTS; ++i) output[r][i] = 0.0f;
    }
  }

  // S = Q K^T for the columns lane, lane + LANES, …
  FG_DEVICE void multiply_keys(float (&scores)[ROWS][SCORES], const SimtTiles<C>& tiles) const {
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FG_UNROLL
      for (int j = 0; j < SCORES; ++j) scores[r][j] = 0.0f;
    }
    for (int d = 0; d < C::HEAD_DIM; ++d) {
      float query[ROWS];
      FG_UNROLL
      for (int r = 0; r < ROWS; ++r) query[r] = tiles.q.load(row0 + r, d);
      FG_UNROLL
      for (int j = 0; j < SCORES; ++j) {
        const float key = tiles.k.load(lane + j * LANES, d);
        FG_UNROLL
        for (int r = 0; r < ROWS; ++r) scores[r][j] = fused_multiply_add(query[r], key, scores[r][j]);
      }
    }
  }

  FG_DEVICE void hide(float (&scores)[ROWS][SCORES], const ForwardParams& params, int tile_row, int tile_column) const {
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const VisibleKeys keys = visible_keys<C>(params, tile_row + row0 + r);
      FG_UNROLL
      for (int j = 0; j < SCORES; ++j) {
        const int column = tile_column + lane + j * LANES;
        if (column < keys.first || column > keys.last) scores[r][j] = -infinity();
      }
    }
  }

  // The online-softmax step of one row: the maximum grows, what was summed under the old one is rescaled, scores become probabilities.
  FG_DEVICE void update(int r, float (&scores)[SCORES], float scale_log2) {
    float tile_max = -infinity();
    FG_UNROLL
    for (int j = 0; j < SCORES; ++j) tile_max = larger(tile_max, scores[j]);
    const float new_max = larger(row_max[r], team_maximum<LANES>(tile_max));
    // A row with no visible key so far has maximum -inf; (-inf) - (-inf) is NaN, so such rows use 0 as their base and end with sum 0.
    const float base = new_max == -infinity() ? 0.0f : new_max;
    const float rescale = exp2_approx((row_max[r] - base) * scale_log2);
    row_max[r] = new_max;
    row_sum[r] *= rescale;
    FG_UNROLL
    for (int i = 0; i < OUTPUTS; ++i) output[r][i] *= rescale;
    FG_UNROLL
    for (int j = 0; j < SCORES; ++j) {
      // Subtract before scaling: the fused form s * c - m * c leaves a rounding residue that exp2 blows up when |m| is large.
      scores[j] = exp2_approx((scores[j] - base) * scale_log2);
      row_sum[r] += scores[j];
    }
  }

  // O += P V for the columns lane, lane + LANES, …; the probabilities pass through shared memory, where the whole team can read them.
  FG_DEVICE void multiply_values(const float (&scores)[ROWS][SCORES], const SimtTiles<C>& tiles) {
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FG_UNROLL
      for (int j = 0; j < SCORES; ++j) tiles.p.store(row0 + r, lane + j * LANES, scores[r][j]);
    }
    warp_sync();
    for (int key = 0; key < C::BLOCK_KV; ++key) {
      float probability[ROWS];
      FG_UNROLL
      for (int r = 0; r < ROWS; ++r) probability[r] = tiles.p.load(row0 + r, key);
      FG_UNROLL
      for (int i = 0; i < OUTPUTS; ++i) {
        if (lane + i * LANES >= C::HEAD_DIM_V) continue;
        const float value = tiles.v.load(key, lane + i * LANES);
        FG_UNROLL
        for (int r = 0; r < ROWS; ++r) output[r][i] = fused_multiply_add(probability[r], value, output[r][i]);
      }
    }
  }

  FG_DEVICE void store(const ForwardParams& params, const Place& place) {
    using Element = typename C::Element;
    Element* o = head_of<Element>(params.o, params.o_strides, place.batch, place.head_q);
    float* lse = lse_of(params, place);
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const int row = place.first_row + row0 + r;
      const float sum = team_sum<LANES>(row_sum[r]);
      if (row >= params.seqlen_q) continue;
      const bool empty = !(sum > 0.0f);
      FG_UNROLL
      for (int i = 0; i < OUTPUTS; ++i) {
        const int column = lane + i * LANES;
        if (column < C::HEAD_DIM_V)
          store_global(o + row * params.o_strides.row + column, from_float<Element>(empty ? 0.0f : output[r][i] / sum));
      }
      if (lane == 0) store_global(lse + row, empty ? -infinity() : (row_max[r] * params.scale_log2 + log2_exact(sum)) * LN_2);
    }
  }
};

template <class C>
FG_DEVICE void forward(const ForwardParams& params) {
  using Element = typename C::Element;
  const Place place = place_of_block<C>(params, block_index());
  const Element* q = head_of<Element>(params.q, params.q_strides, place.batch, place.head_q) + place.first_row * params.q_strides.row;
  const Element* k = head_of<Element>(params.k, params.k_strides, place.batch, place.head_kv);
  const Element* v = head_of<Element>(params.v, params.v_strides, place.batch, place.head_kv);
  const SimtTiles<C> tiles(dynamic_shared());
  const TileRange<C> range(params, place.first_row, C::BLOCK_Q);
  SimtTeam<C> team;

  load_rows<C, C::BLOCK_Q, C::HEAD_DIM>(tiles.q, q, params.q_strides.row, params.seqlen_q - place.first_row);
  for (int tile = range.first; tile < range.last; ++tile) {
    const int column = tile * C::BLOCK_KV, keys = params.seqlen_kv - column;
    load_rows<C, C::BLOCK_KV, C::HEAD_DIM>(tiles.k, k + column * params.k_strides.row, params.k_strides.row, keys);
    load_rows<C, C::BLOCK_KV, C::HEAD_DIM_V>(tiles.v, v + column * params.v_strides.row, params.v_strides.row, keys);
    block_sync();
    float scores[SimtTeam<C>::ROWS][SimtTeam<C>::SCORES];
    team.multiply_keys(scores, tiles);
    if (range.needs_mask(tile)) team.hide(scores, params, place.first_row, column);
    FG_UNROLL
    for (int r = 0; r < SimtTeam<C>::ROWS; ++r) team.update(r, scores[r], params.scale_log2);
    team.multiply_values(scores, tiles);
    block_sync();  // the next tile overwrites K and V
  }
  team.store(params, place);
}

}  // namespace fg
