// The inner loops of attention: blocks of query rows against tiles of keys and values, in registers. Included
// by attention_kernel.cc only, which describes the order of the arithmetic.
#pragma once

#include "attention.h"
#include "cache_traits.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

constexpr int kGroupRows = 6;                      // rows that share each loaded key or value vector
constexpr int kKeysAhead = 16;                     // of the cache, fetched before they are needed
constexpr int kDirectRows = 24;                   // up to so many read the caches as they are
constexpr int kPanelKeys = 2 * kWidth;             // keys whose scores are computed together
constexpr int kScoreStride = kPartitionKeys + 16;  // a power of two would crowd a few sets of the L1 cache
constexpr float kInfinity = __builtin_inff();

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

PAGELET_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
PAGELET_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
PAGELET_INLINE int64_t round_up(int64_t a, int64_t step) { return (a + step - 1) / step * step; }
PAGELET_INLINE Range intersect(Range a, Range b) { return {max_of(a.begin, b.begin), min_of(a.end, b.end)}; }

// The place of lane l in the order that the tree consumes lanes: its bits reversed.
PAGELET_INLINE constexpr int lane_rank(int lane) {
  int rank = 0;
  for (int bit = 1; bit < kWidth; bit *= 2) rank = rank * 2 + ((lane & bit) != 0);
  return rank;
}

// Transposes kWidth keys into their half of a panel, [head_size in lane order][kPanelKeys].
void pack_keys(const float* const* keys, int64_t head_size, float* panel) {
  const int64_t chain = head_size / kWidth;
  const float* rows[kWidth];
  for (int r = 0; r < kWidth; ++r) rows[r] = keys[r];
  for (int64_t i = 0; i < chain; ++i, panel += kPanelKeys) {
    for (int lane = 0; lane < kWidth; lane += 4) {
      Vec columns[4];
      load_transposed4(rows, size_t(i * kWidth + lane), columns);
      for (int k = 0; k < 4; ++k) store(panel + lane_rank(lane + k) * chain * kPanelKeys, columns[k]);
    }
  }
}

// Scores of R rows against a panel of keys.
template <int R>
void score_panel(const float* query, const float* keys, int64_t chain, float* scores) {
  Vec level[8][R][2];  // level[n]: a sum of 2^n lanes that waits for its partner
  for (int rank = 0; rank < kWidth; ++rank) {
    Vec sum[R][2];
    const Vec k0 = load(keys), k1 = load(keys + kWidth);
    PAGELET_UNROLL for (int r = 0; r < R; ++r) {
      const Vec q = set1(query[r]);
      sum[r][0] = mul(q, k0);
      sum[r][1] = mul(q, k1);
    }
    query += R;
    keys += kPanelKeys;
    for (int64_t i = 1; i < chain; ++i, query += R, keys += kPanelKeys) {
      const Vec x0 = load(keys), x1 = load(keys + kWidth);
      PAGELET_UNROLL for (int r = 0; r < R; ++r) {
        const Vec q = set1(query[r]);
        sum[r][0] = fmadd(q, x0, sum[r][0]);
        sum[r][1] = fmadd(q, x1, sum[r][1]);
      }
    }
    int n = 0;
    for (; (rank >> n) & 1; ++n) {
      PAGELET_UNROLL for (int r = 0; r < R; ++r) {
        sum[r][0] = add(level[n][r][0], sum[r][0]);
        sum[r][1] = add(level[n][r][1], sum[r][1]);
      }
    }
    PAGELET_UNROLL for (int r = 0; r < R; ++r) {
      level[n][r][0] = sum[r][0];
      level[n][r][1] = sum[r][1];
    }
  }
  constexpr int kTop = kWidth == 16 ? 4 : kWidth == 8 ? 3 : 2;
  PAGELET_UNROLL for (int r = 0; r < R; ++r) {
    store(scores + r * kScoreStride, level[kTop][r][0]);
    store(scores + r * kScoreStride + kWidth, level[kTop][r][1]);
  }
}

// Lane j is the sum of sums[j][…], by the tree.
PAGELET_INLINE Vec reduce_each(const float* sums) {
  const float* rows[kWidth];
  Vec column[kWidth];
  for (int r = 0; r < kWidth; ++r) rows[r] = sums + r * kWidth;
  for (int lane = 0; lane < kWidth; lane += 4) load_transposed4(rows, size_t(lane), column + lane);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) column[i] = add(column[i], column[i + half]);
  }
  return column[0];
}

// Keys whose scores are summed together, so that a loaded query vector serves them all: as the registers allow.
#if defined(PAGELET_SIMD_AVX512) || defined(PAGELET_SIMD_NEON)
PAGELET_INLINE constexpr int keys_at_once(int) { return 4; }
#else
PAGELET_INLINE constexpr int keys_at_once(int rows) { return rows <= 2 ? 4 : 2; }
#endif

// Scores of R rows, [R][head_size], against kWidth keys: where few rows need a key, to transpose it is not
// worth it. The sums are those of score_panel.
template <typename Cache, int R>
void score_keys(const float* query, const typename Cache::Element* const* keys, int64_t head_size,
                float* scores) {
  constexpr int K = keys_at_once(R);
  float sums[R][kWidth * kWidth];
  for (int j = 0; j < kWidth; j += K) {
    Vec sum[K][R], x[K];
    PAGELET_UNROLL for (int k = 0; k < K; ++k) x[k] = Cache::load(keys[j + k]);
    PAGELET_UNROLL for (int r = 0; r < R; ++r) {
      const Vec q = load(query + r * head_size);
      PAGELET_UNROLL for (int k = 0; k < K; ++k) sum[k][r] = mul(q, x[k]);
    }
    for (int64_t i = kWidth; i < head_size; i += kWidth) {
      PAGELET_UNROLL for (int k = 0; k < K; ++k) x[k] = Cache::load(keys[j + k] + i);
      PAGELET_UNROLL for (int r = 0; r < R; ++r) {
        const Vec q = load(query + r * head_size + i);
        PAGELET_UNROLL for (int k = 0; k < K; ++k) sum[k][r] = fmadd(q, x[k], sum[k][r]);
      }
    }
    PAGELET_UNROLL for (int k = 0; k < K; ++k) {
      PAGELET_UNROLL for (int r = 0; r < R; ++r) store(sums[r] + (j + k) * kWidth, sum[k][r]);
    }
  }
  for (int r = 0; r < R; ++r) store(scores + r * kScoreStride, reduce_each(sums[r]));
}

// Adds weights[r][j] * values[j][…] for j in `range`, ascending, to N vectors of R states.
template <typename Cache, int R, int N>
void add_values(const float* weights, const typename Cache::Element* const* values, Range range,
                int64_t element, float* states, int64_t state_stride) {
  Vec sum[R][N];
  PAGELET_UNROLL for (int r = 0; r < R; ++r) {
    PAGELET_UNROLL for (int n = 0; n < N; ++n) sum[r][n] =
        load(states + r * state_stride + element + n * kWidth);
  }
  for (int64_t j = range.begin; j < range.end; ++j) {
    const typename Cache::Element* value = values[j] + element;
    if constexpr (R <= N) {  // what is fewer stays in registers: with the sums it is 16 at most
      Vec weight[R];
      PAGELET_UNROLL for (int r = 0; r < R; ++r) weight[r] = set1(weights[r * kScoreStride + j]);
      PAGELET_UNROLL for (int n = 0; n < N; ++n) {
        const Vec x = Cache::load(value + n * kWidth);
        PAGELET_UNROLL for (int r = 0; r < R; ++r) sum[r][n] = fmadd(weight[r], x, sum[r][n]);
      }
    } else {
      Vec x[N];
      PAGELET_UNROLL for (int n = 0; n < N; ++n) x[n] = Cache::load(value + n * kWidth);
      PAGELET_UNROLL for (int r = 0; r < R; ++r) {
        const Vec weight = set1(weights[r * kScoreStride + j]);
        PAGELET_UNROLL for (int n = 0; n < N; ++n) sum[r][n] = fmadd(weight, x[n], sum[r][n]);
      }
    }
  }
  PAGELET_UNROLL for (int r = 0; r < R; ++r) {
    PAGELET_UNROLL for (int n = 0; n < N; ++n)
        store(states + r * state_stride + element + n * kWidth, sum[r][n]);
  }
}

template <typename Cache, int R>
void add_all_values(const float* weights, const typename Cache::Element* const* values, Range range,
                    int64_t head_size, float* states, int64_t state_stride) {
  if (range.empty()) return;
  constexpr int kVectors = R == 1 ? 8 : R <= 3 ? 4 : 2;  // enough independent sums to hide the latency of fma
  int64_t d = 0;
  for (; d + kVectors * kWidth <= head_size; d += kVectors * kWidth) {
    add_values<Cache, R, kVectors>(weights, values, range, d, states, state_stride);
  }
  for (; d < head_size; d += kWidth) add_values<Cache, R, 1>(weights, values, range, d, states, state_stride);
}

using ScorePanel = void (*)(const float*, const float*, int64_t, float*);
constexpr ScorePanel kScorePanel[] = {nullptr,        score_panel<1>, score_panel<2>, score_panel<3>,
                                      score_panel<4>, score_panel<5>, score_panel<6>};
template <typename Cache>
using ScoreKeys = void (*)(const float*, const typename Cache::Element* const*, int64_t, float*);
template <typename Cache>
constexpr ScoreKeys<Cache> kScoreKeys[] = {
    nullptr,
    score_keys<Cache, 1>,
    score_keys<Cache, 2>,
    score_keys<Cache, 3>,
    score_keys<Cache, 4>,
    score_keys<Cache, 5>,
    score_keys<Cache, 6>,
};
template <typename Cache>
using AddValues = void (*)(const float*, const typename Cache::Element* const*, Range, int64_t, float*,
                           int64_t);
template <typename Cache>
constexpr AddValues<Cache> kAddValues[] = {
    nullptr,
    add_all_values<Cache, 1>,
    add_all_values<Cache, 2>,
    add_all_values<Cache, 3>,
    add_all_values<Cache, 4>,
    add_all_values<Cache, 5>,
    add_all_values<Cache, 6>,
};

// softcap * tanh(x / softcap), with tanh(y) = 1 - 2 / (e^2y + 1).
PAGELET_INLINE Vec cap(Vec x, float softcap) {
  const Vec e = exp(mul(x, set1(2.0f / softcap)));
  return mul(set1(softcap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
}

// Of the keys and values of a partition, in a scaled cache.
struct Scales {
  alignas(64) float key[kPartitionKeys];
  alignas(64) float value[kPartitionKeys];
};

// Turns the visible scores of a row into weights e^(score - maximum), and stores maximum and sum in its
// state. With a scaled cache the scores and the weights take their scales here.
template <bool kScaled>
void softmax(const AttentionArgs& args, Range range, const Scales& scales, float* scores, float* state) {
  const int64_t begin = range.begin / kWidth * kWidth, end = round_up(range.end, kWidth);
  if constexpr (kScaled) {
    for (int64_t j = begin; j < end; j += kWidth) {
      store(scores + j, mul(load(scores + j), load(scales.key + j)));
    }
  }
  if (args.softcap > 0) {
    for (int64_t j = begin; j < end; j += kWidth) store(scores + j, cap(load(scores + j), args.softcap));
  }
  for (int64_t j = begin; j < range.begin; ++j) scores[j] = -kInfinity;
  for (int64_t j = range.end; j < end; ++j) scores[j] = -kInfinity;
  Vec maximum = load(scores + begin);
  for (int64_t j = begin + kWidth; j < end; j += kWidth) maximum = max(maximum, load(scores + j));
  const float top = reduce_max(maximum);
  Vec sum = set1(0.0f);
  for (int64_t j = begin; j < end; j += kWidth) {
    const Vec weight = exp(sub(load(scores + j), set1(top)));
    store(scores + j, kScaled ? mul(weight, load(scales.value + j)) : weight);
    sum = add(sum, weight);
  }
  state[args.head_size] = top;
  state[args.head_size + 1] = reduce_add(sum);
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
