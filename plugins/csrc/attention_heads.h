// What happens to a query, key or value head before attention: RMSNorm and rotation. No product is fused with an
// addition, so every instruction set computes the same bits, and so does plugins/reference.py. Included by
// attention_kernel.cc only.
#pragma once

#include <math.h>

#include "attention.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

constexpr int kNormLanes = 8;  // of a sum of squares: divides every head size

// x := x / sqrt(mean(x^2) + epsilon) * weight, as RMSNorm (https://arxiv.org/abs/1910.07467); a null weight is 1.
// Lane l sums the squares of elements l, l + 8, …; the lanes are added as a tree, l with l + 4, with l + 2, ….
void normalize(const AttentionArgs& args, const float* __restrict weight, float* __restrict x) {
  float lane[kNormLanes] = {};
  for (int64_t i = 0; i < args.head_size; i += kNormLanes) {
    for (int l = 0; l < kNormLanes; ++l) lane[l] += x[i + l] * x[i + l];
  }
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  const float inverse = 1.0f / sqrtf(lane[0] / float(args.head_size) + args.norm_epsilon);
  for (int64_t i = 0; i < args.head_size; ++i) x[i] = x[i] * inverse * (weight ? weight[i] : 1.0f);
}

// Rotates the first rotary_dim elements of x, in place, as RoFormer (https://arxiv.org/abs/2104.09864),
// sec. 3.2.2.
void rotate(const AttentionArgs& args, int64_t token, float* __restrict x) {
  if (!args.cos_cache) return;
  const int64_t half = args.rotary_dim / 2, position = args.position_ids[token];
  const float* __restrict cosine = args.cos_cache + position * half;
  const float* __restrict sine = args.sin_cache + position * half;
  const int64_t step = args.rotary_interleaved ? 2 : 1, partner = args.rotary_interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + partner];
    x[i * step] = a * cosine[i] - b * sine[i];
    x[i * step + partner] = b * cosine[i] + a * sine[i];
  }
}

// A query or key head of a token, in place.
void prepare_head(const AttentionArgs& args, int64_t token, const float* norm_weight, float* x) {
  if (norm_weight && !args.norm_after_rotation) normalize(args, norm_weight, x);
  rotate(args, token, x);
  if (norm_weight && args.norm_after_rotation) normalize(args, norm_weight, x);
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
