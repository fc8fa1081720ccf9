// Online softmax over accumulator fragments of 16x8 tiles: lane l holds rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and the next.
#pragma once
#include "numeric.cuh"

namespace fg {

// Above this many log2 units, half an ulp of the base would show in a 16-bit result: fused score * scale - base keeps the base's rounding,
// so that the largest probability is not 1.
constexpr float HUGE_LOG2 = 4096.0f;

// ROW_TILES tiles of 16 rows per warp. A row lies in four lanes; each keeps a partial sum until the end.
template <class C, int ROW_TILES>
struct OnlineSoftmax {
  static constexpr int ROWS = 2 * ROW_TILES;  // per lane
  float reference[ROWS];                      // the maximum, or a value at most RESCALE_THRESHOLD log2 units below it
  float row_sum[ROWS];

  FG_DEVICE OnlineSoftmax() {
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      reference[r] = -infinity();
      row_sum[r] = 0.0f;
    }
  }

  // Turns scores into probabilities relative to the reference, which grows, and with it the output is rescaled, only when it must.
  template <int SCORE_TILES, int OUTPUT_TILES>
  FG_DEVICE void update(float (&scores)[ROW_TILES][SCORE_TILES][4], float (&output)[ROW_TILES][OUTPUT_TILES][4], float scale_log2) {
    float tile_max[ROWS];
    bool grows = false;
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      tile_max[r] = row_maximum(scores[r / 2], r % 2);
      grows |= (tile_max[r] - reference[r]) * scale_log2 > static_cast<float>(C::RESCALE_THRESHOLD);
    }
    if (warp_any(grows)) raise_reference(tile_max, output, scale_log2);
    float base[ROWS];  // the reference in log2 units, subtracted from the scaled scores
    bool is_huge = false;
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      base[r] = reference[r] == -infinity() ? 0.0f : reference[r] * scale_log2;
      is_huge |= magnitude(base[r]) >= HUGE_LOG2;
    }
    if (warp_any(is_huge)) subtract_reference(scores, base);
    FG_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) {
      FG_UNROLL
      for (int n = 0; n < SCORE_TILES; ++n) {
        FG_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int r = 2 * m + i / 2;
          scores[m][n][i] = exp2_approx(fused_multiply_add(scores[m][n][i], scale_log2, -base[r]));
          row_sum[r] += scores[m][n][i];
        }
      }
    }
  }

  // Sums over whole rows; afterwards every lane of a row holds the same value.
  FG_DEVICE void finish() {
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      row_sum[r] += shuffle_xor(row_sum[r], 1);
      row_sum[r] += shuffle_xor(row_sum[r], 2);
    }
  }
  FG_DEVICE bool empty(int r) const { return !(row_sum[r] > 0.0f); }
  FG_DEVICE float lse(int r, float scale_log2) const {
    return empty(r) ? -infinity() : (reference[r] * scale_log2 + log2_exact(row_sum[r])) * LN_2;
  }

 private:
  template <int SCORE_TILES>
  FG_DEVICE static float row_maximum(const float (&scores)[SCORE_TILES][4], int half) {
    float result = larger(scores[0][2 * half], scores[0][2 * half + 1]);
    FG_UNROLL
    for (int n = 1; n < SCORE_TILES; ++n) result = larger(result, larger(scores[n][2 * half], scores[n][2 * half + 1]));
    result = larger(result, shuffle_xor(result, 1));
    return larger(result, shuffle_xor(result, 2));
  }

  template <int OUTPUT_TILES>
  FG_DEVICE void raise_reference(const float (&tile_max)[ROWS], float (&output)[ROW_TILES][OUTPUT_TILES][4], float scale_log2) {
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const float raised = larger(reference[r], tile_max[r]);
      // A row with no visible key has maximum -inf; (-inf) - (-inf) is NaN, so such rows use 0 as their base and end with sum 0.
      const float rescale = exp2_approx((reference[r] - (raised == -infinity() ? 0.0f : raised)) * scale_log2);
      reference[r] = raised;
      row_sum[r] *= rescale;
      FG_UNROLL
      for (int n = 0; n < OUTPUT_TILES; ++n) {
        output[r / 2][n][r % 2 * 2] *= rescale;
        output[r / 2][n][r % 2 * 2 + 1] *= rescale;
      }
    }
  }

  // Subtracting before scaling is exact where it matters; it costs an instruction per score, so only huge scores pay for it.
  template <int SCORE_TILES>
  FG_DEVICE void subtract_reference(float (&scores)[ROW_TILES][SCORE_TILES][4], float (&base)[ROWS]) const {
    FG_UNROLL
    for (int m = 0; m < ROW_TILES; ++m) {
      FG_UNROLL
      for (int n = 0; n < SCORE_TILES; ++n) {
        FG_UNROLL
        for (int i = 0; i < 4; ++i) scores[m][n][i] -= reference[2 * m + i / 2] == -infinity() ? 0.0f : reference[2 * m + i / 2];
      }
    }
    FG_UNROLL
    for (int r = 0; r < ROWS; ++r) base[r] = 0.0f;
  }
};

}  // namespace fg
