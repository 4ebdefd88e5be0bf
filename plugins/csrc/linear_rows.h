// What happens to a row before it is multiplied: RMSNorm and quantization. Included by linear_kernel.cc only.
#pragma once

#include <math.h>

#include "linear_kernel.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

constexpr size_t kLanes = 16;  // of a sum of squares, the same for every instruction set

// 1 / sqrt(mean(x^2) + epsilon). Lane l sums the squares of elements l, l + 16, …; the lanes are added as a tree,
// l with l + 8, with l + 4, ….
float inverse_rms(const float* x, size_t size, float epsilon) {
  Vec sums[kLanes / kWidth];
  for (Vec& sum : sums) sum = set1(0.0f);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (size_t v = 0; v < kLanes / kWidth; ++v) {
      const Vec elements = load(x + i + v * kWidth);
      sums[v] = fmadd(elements, elements, sums[v]);
    }
  }
  if (i < size) {
    float rest[kLanes] = {};
    for (size_t lane = 0; lane < size - i; ++lane) rest[lane] = x[i + lane];
    for (size_t v = 0; v < kLanes / kWidth; ++v) {
      const Vec elements = load(rest + v * kWidth);
      sums[v] = fmadd(elements, elements, sums[v]);
    }
  }
  float lane[kLanes];
  for (size_t v = 0; v < kLanes / kWidth; ++v) store(lane + v * kWidth, sums[v]);
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return 1.0f / sqrtf(lane[0] / static_cast<float>(size) + epsilon);
}

void normalize(const float* x, size_t size, const Norm& norm, float* out) {
  const float inverse = inverse_rms(x, size, norm.epsilon);
  for (size_t i = 0; i < size; ++i) out[i] = x[i] * inverse * norm.weight[i];
}

// The largest |x| by its bits, which order like the values; a NaN or an infinity is at least 0x7f800000.
PAGELET_INLINE uint32_t largest_bits(const float* x) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kBlockInputs; ++i) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

void quantize_block(const float* x, ActivationBlock& out) {
  constexpr uint32_t kInfinity = 0x7f800000u, kSmallest = (127u - 100u) << 23;  // 2^-100: 127 / x stays finite
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even, into the low bits
  const uint32_t largest = largest_bits(x);
  if (largest >= kInfinity || largest < kSmallest) {
    memset(&out, 0, sizeof out);
    if (largest >= kInfinity) out.scale = out.scaled_sum = NAN;
    return;
  }
  float maximum;
  memcpy(&maximum, &largest, sizeof maximum);
  const float inverse = 127.0f / maximum;
  int32_t sum = 0;
  for (size_t i = 0; i < kBlockInputs; ++i) {
    const float shifted = x[i] * inverse + kRound;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    const int32_t code = bits - 0x4b400000;
    out.codes[i] = static_cast<int8_t>(code);
    sum += code;
  }
  out.scale = maximum / 127.0f;
  out.sum = sum;
  out.scaled_sum = out.scale * static_cast<float>(sum);
}

void quantize(const float* x, size_t blocks, const Norm& norm, ActivationBlock* out) {
  if (!norm.weight) {
    for (size_t b = 0; b < blocks; ++b) quantize_block(x + b * kBlockInputs, out[b]);
    return;
  }
  const float inverse = inverse_rms(x, blocks * kBlockInputs, norm.epsilon);
  for (size_t b = 0; b < blocks; ++b) {
    float normed[kBlockInputs];
    for (size_t i = 0; i < kBlockInputs; ++i) {
      normed[i] = x[b * kBlockInputs + i] * inverse * norm.weight[b * kBlockInputs + i];
    }
    quantize_block(normed, out[b]);
  }
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
