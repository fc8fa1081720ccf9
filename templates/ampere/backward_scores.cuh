// The scores of the ampere backward: which of them a warp owns, S^T to P^T to dS^T, their way between warps, and the products around them.
#pragma once
#include "backward_rows.cuh"

namespace fg {

// Where a warp stands among those of its side.
template <class C>
struct SidePlace {
  using Shape = BackwardShape<C>;
  int lane, number;  // `number` within the side: its twin on the other side has the same
  int down, across;
  int first_key;  // of the warp, within the sequence

  FG_DEVICE SidePlace(int cta_key) {
    lane = thread_index() % WARP_LANES;
    number = thread_index() / WARP_LANES % Shape::SIDE_WARPS;
    down = number / C::WARPS_ACROSS;
    across = number % C::WARPS_ACROSS;
    first_key = cta_key + down * Shape::KEYS_PER_WARP;
  }
  FG_DEVICE int own_key() const { return down * Shape::KEYS_PER_WARP; }  // within the tile
  FG_DEVICE int own_row() const { return across * Shape::ROWS_PER_WARP; }
  // With one side: the same keys, the part-th rows of the tile.
  FG_DEVICE SidePlace part(int number_of_part) const {
    SidePlace place = *this;
    place.across = number_of_part;
    return place;
  }
};

template <class C>
using Scores = float[BackwardShape<C>::KEY_TILES][BackwardShape<C>::SCORE_TILES][4];
// P^T or dS^T in the element type, as left operands of products over query rows.
template <class C>
using PackedScores = KeptRows<BackwardShape<C>::KEY_TILES, BackwardShape<C>::SCORE_TILES / 2>;

// Whether the warp's keys and rows hold a pair that is hidden, and whether they hold one that is seen. `row` is the first of the warp.
template <class C>
struct PairMask {
  bool any_hidden, any_seen;

  FG_DEVICE PairMask(const ForwardParams& forward, int row, int key) {
    using Shape = BackwardShape<C>;
    const VisibleKeys top = visible_keys<C>(forward, row), bottom = visible_keys<C>(forward, row + Shape::ROWS_PER_WARP - 1);
    const int last_key = key + Shape::KEYS_PER_WARP - 1;
    any_hidden = last_key > top.last || (C::MASK == MASK_WINDOW && key < bottom.first);
    any_seen = !C::MASKED || (key <= bottom.last && (C::MASK != MASK_WINDOW || last_key >= top.first));
  }
};

// Gives the hidden elements of a transposed tile a value. `key` and `row` are the lane's first ones.
template <class C>
FG_DEVICE void hide(Scores<C>& scores, const ForwardParams& forward, int key, int row, float value) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int n = 0; n < Shape::SCORE_TILES; ++n) {
    FG_UNROLL
    for (int j = 0; j < 2; ++j) {
      const VisibleKeys keys = visible_keys<C>(forward, row + n * 8 + j);
      FG_UNROLL
      for (int m = 0; m < Shape::KEY_TILES; ++m) {
        FG_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int own = key + m * 16 + half * 8;
          if (own > keys.last || (C::MASK == MASK_WINDOW && own < keys.first)) scores[m][n][half * 2 + j] = value;
        }
      }
    }
  }
}

// The values of lse or delta that a lane needs for two 8-column tiles: two for each.
template <class C>
FG_DEVICE Vector16 statistics_of(const SidePlace<C>& place, u32 statistics, int pair) {
  return load_shared<Vector16>(statistics + static_cast<u32>((place.own_row() / 16 + pair) * 64 + place.lane % 4 * 16));
}

// Rounded to the element type, as left operands.
template <class C>
FG_DEVICE void pack(PackedScores<C>& packed, const Scores<C>& scores) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int m = 0; m < Shape::KEY_TILES; ++m) {
    FG_UNROLL
    for (int n = 0; n < Shape::SCORE_TILES; ++n) {
      FG_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float* two = &scores[m][n][half * 2];
        packed.word[m][n / 2][n % 2 * 2 + half] = pack_pair(two[0], two[1], typename C::Element{});
      }
    }
  }
}

// A tile of P^T or dS^T in shared memory, keys by rows. A lane writes words of two rows side by side; eight keys of four words meet no
// bank conflict.
template <class C>
struct ScoreTile {
  using Shape = BackwardShape<C>;
  u32 base;
  FragmentCursor<Shape::CHUNKS_Q> words;

  FG_DEVICE ScoreTile(u32 tile, const SidePlace<C>& place)
      : base(tile), words(tile + static_cast<u32>(place.lane % 4 * 4), place.own_key() + place.lane / 4, 0) {
    words.start = words.at(0, place.own_row() / 8);
  }
  FG_DEVICE void store(const PackedScores<C>& packed) const {
    FG_UNROLL
    for (int pair = 0; pair < Shape::SCORE_TILES / 2; ++pair) {
      FG_UNROLL
      for (int m = 0; m < Shape::KEY_TILES; ++m) {
        FG_UNROLL
        for (int i = 0; i < 4; ++i) store_shared(words.at(m * 16 + i % 2 * 8, pair * 2 + i / 2), packed.word[m][pair][i]);
      }
    }
  }
  FG_DEVICE SharedRows<Shape::CHUNKS_Q> rows(const SidePlace<C>& place) const { return {base, place.own_key(), place.lane}; }
};

// P^T on its way from a warp to its twin, in float32 as it lies in registers, 16 bytes per lane.
template <class C>
struct Handover {
  using Shape = BackwardShape<C>;
  const u32 start;

  FG_DEVICE Handover(u32 shared, const SidePlace<C>& place)
      : start(shared +
              static_cast<u32>(Shape::HANDED_AT + (place.number * Shape::KEY_TILES * Shape::SCORE_TILES * WARP_LANES + place.lane) * 16)) {}

  FG_DEVICE void give(const Scores<C>& probabilities) const {
    FG_UNROLL
    for (int m = 0; m < Shape::KEY_TILES; ++m) {
      FG_UNROLL
      for (int n = 0; n < Shape::SCORE_TILES; ++n) {
        const float (&p)[4] = probabilities[m][n];
        store_shared(at(m, n), Vector16{{float_bits(p[0]), float_bits(p[1]), float_bits(p[2]), float_bits(p[3])}});
      }
    }
  }
  // The probabilities of one lane in two tiles side by side.
  FG_DEVICE void take(float (&p)[2][4], int m, int pair) const {
    FG_UNROLL
    for (int n = 0; n < 2; ++n) {
      const Vector16 vector = load_shared<Vector16>(at(m, pair * 2 + n));
      FG_UNROLL
      for (int i = 0; i < 4; ++i) p[n][i] = float_from_bits(vector.word[i]);
    }
  }

 private:
  FG_DEVICE u32 at(int m, int n) const { return start + static_cast<u32>((m * Shape::SCORE_TILES + n) * WARP_LANES * 16); }
};

// P^T that stays where it is.
template <class C>
struct KeptProbabilities {
  const Scores<C>& scores;

  FG_DEVICE void take(float (&p)[2][4], int m, int pair) const {
    FG_UNROLL
    for (int i = 0; i < 8; ++i) p[i / 4][i % 4] = scores[m][pair * 2 + i / 4][i % 4];
  }
};

// S^T becomes P^T.
template <class C>
FG_DEVICE void exponentials(Scores<C>& scores, float scale_log2, const SidePlace<C>& place, u32 lse) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int pair = 0; pair < Shape::SCORE_TILES / 2; ++pair) {
    const Vector16 own = statistics_of<C>(place, lse, pair);
    FG_UNROLL
    for (int m = 0; m < Shape::KEY_TILES; ++m) {
      FG_UNROLL
      for (int i = 0; i < 8; ++i) {
        float& score = scores[m][pair * 2 + i / 4][i % 4];
        score = exp2_approx(fused_multiply_add(score, scale_log2, -float_from_bits(own.word[i / 4 * 2 + i % 2])));
      }
    }
  }
}

// dP^T becomes dS^T.
template <class C, class Probabilities>
FG_DEVICE void differentiate(Scores<C>& products, const Probabilities& probabilities, const SidePlace<C>& place, u32 delta) {
  using Shape = BackwardShape<C>;
  FG_UNROLL
  for (int pair = 0; pair < Shape::SCORE_TILES / 2; ++pair) {
    const Vector16 own = statistics_of<C>(place, delta, pair);
    FG_UNROLL
    for (int m = 0; m < Shape::KEY_TILES; ++m) {
      float p[2][4];
      probabilities.take(p, m, pair);
      FG_UNROLL
      for (int i = 0; i < 8; ++i) {
        float& product = products[m][pair * 2 + i / 4][i % 4];
        product = p[i / 4][i % 4] * (product - float_from_bits(own.word[i / 4 * 2 + i % 2]));
      }
    }
  }
}

enum BarrierId : int { PROBABILITY_SIDE = 1, GRADIENT_SIDE = 2, TWINS = 3 };  // twins: one each, TWINS + number

// The keys of one warp on either side: K or V against Q or dO, and the sums of dV or dK.
template <class C, int DEPTH_CHUNKS, int SUM_CHUNKS>
struct KeyRows {
  using Shape = BackwardShape<C>;
  using Element = typename C::Element;
  static constexpr int SUM_TILES = SUM_CHUNKS / C::WARPS_ACROSS, DEPTH = DEPTH_CHUNKS / 2;
  const SharedRows<DEPTH_CHUNKS> in_shared;
  KeptRows<C::KEYS_IN_REGISTERS ? Shape::KEY_TILES : 1, C::KEYS_IN_REGISTERS ? DEPTH : 1> kept;
  float sums[Shape::KEY_TILES][SUM_TILES][4];

  FG_DEVICE KeyRows(u32 tile, const SidePlace<C>& place) : in_shared(tile, place.own_key(), place.lane) {
    clear(sums);
    if constexpr (C::KEYS_IN_REGISTERS) kept.keep(in_shared);
  }
  // products = own rows times rows of a query tile.
  FG_DEVICE void multiply(Scores<C>& products, u32 tile, const SidePlace<C>& place) const {
    const FragmentCursor<DEPTH_CHUNKS> right(tile, place.own_row() + place.lane / 16 * 8 + place.lane % 8, place.lane / 8 % 2);
    if constexpr (C::KEYS_IN_REGISTERS) {
      multiply_rows<Element, DEPTH>(products, kept, right);
    } else {
      multiply_rows<Element, DEPTH>(products, in_shared, right);
    }
  }
  // sums += left times own columns of a query tile.
  template <class Left>
  FG_DEVICE void accumulate(const Left& left, u32 tile, const SidePlace<C>& place) {
    FragmentCursor<SUM_CHUNKS> right(tile, (Shape::SPLIT ? 0 : place.own_row()) + place.lane % 16, place.lane / 16);
    if constexpr (C::WARPS_ACROSS > 1) right.start = right.at(0, place.across * SUM_TILES);
    accumulate_rows<Element, (Shape::SPLIT ? C::BLOCK_Q : Shape::ROWS_PER_WARP) / 16>(sums, left, right);
  }
  FG_DEVICE void store(const TargetRows<Element>& target, const SidePlace<C>& place, float factor) const {
    store_tiles(sums, target, place.own_key(), place.across * SUM_TILES, factor, place.lane);
  }
};

}  // namespace fg
