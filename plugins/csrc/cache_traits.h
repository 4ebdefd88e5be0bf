// How a cache's elements become floats and back: one struct per cache type. Included by kernel sources only
// (see simd.h).
//
// A scaled cache holds codes, and beside them one float per token and KV head: an element is code * scale.
// The kernels multiply a score by its key's scale, and a weight by its value's.
#pragma once

#include "cache_simd.h"

namespace pagelet::PAGELET_ISA {

struct F32Cache {
  using Element = float;
  static constexpr bool kScaled = false;

  // kWidth elements as floats; of a scaled cache, their codes divided by kUnit.
  PAGELET_INLINE Vec load(const Element* p) { return PAGELET_ISA::load(p); }

  // Stores a row; returns its scale, if it is scaled.
  PAGELET_INLINE float write(Element* to, int64_t size, const float* row) {
    memcpy(to, row, size_t(size) * sizeof(float));
    return 1;
  }
};

struct F16Cache {
  using Element = uint16_t;
  static constexpr bool kScaled = false;

  PAGELET_INLINE Vec load(const Element* p) { return load_half(p); }

  PAGELET_INLINE float write(Element* to, int64_t size, const float* row) {
    for (int64_t i = 0; i < size; i += kWidth) store_half(to + i, PAGELET_ISA::load(row + i));
    return 1;
  }
};

// The largest magnitude over the largest code; NaN where an element is NaN or infinite, 0 where all are (or
// all but vanish).
PAGELET_INLINE float scale_of(const float* row, int64_t size, float largest_code) {
  uint32_t top = 0;  // as integers, magnitudes have the same order, and NaN and infinity come last
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t magnitude = bits_of(row[i]) & 0x7fffffffu;
    top = magnitude > top ? magnitude : top;
  }
  return top < 0x7f800000u ? float_of(top) / largest_code : float_of(0x7fc00000u);
}

struct Int8Cache {
  using Element = int8_t;
  static constexpr bool kScaled = true;
  static constexpr float kUnit = 1;

  PAGELET_INLINE Vec load(const Element* p) { return load_int8(p); }

  PAGELET_INLINE float write(Element* to, int64_t size, const float* row) {
    const float scale = scale_of(row, size, kLargestInt8);
    for (int64_t i = 0; i < size; ++i) to[i] = scale > 0 ? to_int8(row[i] / scale) : int8_t(0);
    return scale;
  }
};

struct Fp8Cache {
  using Element = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr float kUnit = kE4m3Unit;

  PAGELET_INLINE Vec load(const Element* p) { return load_e4m3(p); }

  PAGELET_INLINE float write(Element* to, int64_t size, const float* row) {
    const float scale = scale_of(row, size, kLargestE4m3);
    for (int64_t i = 0; i < size; ++i) to[i] = scale > 0 ? to_e4m3(row[i] / scale) : uint8_t(0);
    return scale;
  }
};

}  // namespace pagelet::PAGELET_ISA
