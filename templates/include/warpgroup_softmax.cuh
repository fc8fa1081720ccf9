// Online softmax on the accumulators of warpgroup products.
//
// The maximum is followed lazily: lanes look at their own scores only, and a vote of the warp decides whether rows talk and rescale. That
// is exact, since the reference need not be the maximum, only near it.
#pragma once
#include "accumulator.cuh"

namespace fg {

// What a softmax leaves to do, for the two rows of a lane.
struct SoftmaxResult {
  float inverse_sum[2];  // the output's factor
  float lse[2];
};

// A reference that is raised by what a lane's scores of a row add up to is above the maximum, by up to the log2 of how many they are, 64 at
// most. float16 would lose low weights there that count together, so it is raised by that much less.
FG_DEVICE constexpr float lowered(float log2_sum, Half) { return log2_sum - 6.0f; }
FG_DEVICE constexpr float lowered(float log2_sum, BFloat16) { return log2_sum; }

template <class C>
struct WarpgroupSoftmax {
  // Above this many log2 units, half an ulp of the base would show in a 16-bit result: fused score * scale - base keeps its rounding.
  static constexpr float HUGE_LOG2 = 4096.0f;

  // A lane's sum over one tile up to which its probabilities are used as they are: none is above 256 then, as in `update`.
  static constexpr float LARGEST_SUM = 256.0f;
  static constexpr float OVERFLOWING_SUM = 1.0e30f;

  float reference[2], row_sum[2];
  float rescale[2];  // what the output has to be multiplied by, once the products under way are done
  bool rescales;     // the same in the whole warp
  bool trusted;      // no probability has been too large since the query tile began: a warp that met one looks at scores from then on,
                     // so that scores which keep growing cost little more than if they had been looked at from the beginning
  bool settled;      // trusted, every row of the warp has a reference, and none is huge: the condition of update_unseen

  FG_DEVICE void start() {
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      reference[r] = -infinity();
      row_sum[r] = 0.0f;
    }
    rescales = false;
    trusted = true;
    settled = false;
  }

  // Turns scores into probabilities relative to the reference.
  template <int SCORES>
  FG_DEVICE void update(float (&scores)[SCORES], float scale_log2) {
    float lane_max[2] = {scores[0], scores[2]};
    FG_UNROLL
    for (int i = 0; i < SCORES; ++i) lane_max[row_of(i)] = larger(lane_max[row_of(i)], scores[i]);
    bool grows = false;
    FG_UNROLL
    for (int r = 0; r < 2; ++r) grows |= (lane_max[r] - reference[r]) * scale_log2 > static_cast<float>(C::RESCALE_THRESHOLD);
    rescales = warp_any(grows);
    if (rescales) raise_reference(lane_max, scale_log2);
    exponentiate(scores, scale_log2);
  }

  // The same without a look at the scores. False, the same in the whole warp, when a probability overflowed: then nothing has changed but
  // the scores, which are lost.
  template <int SCORES>
  FG_DEVICE bool update_unseen(float (&scores)[SCORES], float scale_log2) {
    float sum[2] = {0.0f, 0.0f};
    const float base[2] = {reference[0] * scale_log2, reference[1] * scale_log2};
    FG_UNROLL
    for (int i = 0; i < SCORES; ++i) {
      scores[i] = exp2_approx(fused_multiply_add(scores[i], scale_log2, -base[row_of(i)]));
      sum[row_of(i)] += scores[i];
    }
    const float most = larger(sum[0], sum[1]);
    rescales = warp_any(!(most <= LARGEST_SUM));  // also for a NaN
    if (rescales) {
      trusted = false;
      if (warp_any(!(most < OVERFLOWING_SUM))) return false;
      static_assert(SCORES / 2 <= 64, "lowered");
      const float estimate[2] = {reference[0] + lowered(log2_exact(sum[0]), typename C::Element{}) / scale_log2,
                                 reference[1] + lowered(log2_exact(sum[1]), typename C::Element{}) / scale_log2};
      raise_reference(estimate, scale_log2);
      FG_UNROLL
      for (int i = 0; i < SCORES; ++i) scores[i] *= rescale[row_of(i)];
      sum[0] *= rescale[0];
      sum[1] *= rescale[1];
    }
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
    return true;
  }

  template <int OUTPUTS>
  FG_DEVICE void rescale_output(float (&output)[OUTPUTS]) const {
    if (!rescales) return;
    FG_UNROLL
    for (int i = 0; i < OUTPUTS; ++i) output[i] *= rescale[row_of(i)];
  }

  // A row that saw no key has sum 0: its output is 0 and its log-sum-exp -inf.
  FG_DEVICE SoftmaxResult finish(float scale_log2) const {
    SoftmaxResult result;
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r] + shuffle_xor(row_sum[r], 1);
      sum += shuffle_xor(sum, 2);
      const bool empty = !(sum > 0.0f);
      result.inverse_sum[r] = empty ? 0.0f : 1.0f / sum;
      result.lse[r] = empty ? -infinity() : (reference[r] * scale_log2 + log2_exact(sum)) * LN_2;
    }
    return result;
  }

 private:
  FG_DEVICE void raise_reference(const float (&lane_max)[2], float scale_log2) {
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      float row_max = larger(lane_max[r], shuffle_xor(lane_max[r], 1));
      row_max = larger(row_max, shuffle_xor(row_max, 2));
      const float raised = larger(reference[r], row_max);
      // A row with no visible key has maximum -inf; (-inf) - (-inf) is NaN, so such rows use 0 as their base and end with sum 0.
      rescale[r] = exp2_approx((reference[r] - (raised == -infinity() ? 0.0f : raised)) * scale_log2);
      reference[r] = raised;
      row_sum[r] *= rescale[r];
    }
    settled = trusted && !warp_any(is_unsettled(reference[0], scale_log2) || is_unsettled(reference[1], scale_log2));
  }

  FG_DEVICE static bool is_unsettled(float value, float scale_log2) { return !(magnitude(value * scale_log2) < HUGE_LOG2); }

  template <int SCORES>
  FG_DEVICE void exponentiate(float (&scores)[SCORES], float scale_log2) {
    float base[2];  // in log2 units
    bool is_huge = false;
    FG_UNROLL
    for (int r = 0; r < 2; ++r) {
      base[r] = reference[r] == -infinity() ? 0.0f : reference[r] * scale_log2;
      is_huge |= magnitude(base[r]) >= HUGE_LOG2;
    }
    if (warp_any(is_huge)) {  // subtracting before scaling is exact where it matters; only huge scores pay for it
      FG_UNROLL
      for (int i = 0; i < SCORES; ++i) scores[i] -= reference[row_of(i)] == -infinity() ? 0.0f : reference[row_of(i)];
      base[0] = base[1] = 0.0f;
    }
    FG_UNROLL
    for (int i = 0; i < SCORES; ++i) {
      scores[i] = exp2_approx(fused_multiply_add(scores[i], scale_log2, -base[row_of(i)]));
      row_sum[row_of(i)] += scores[i];
    }
  }
};

}  // namespace fg
