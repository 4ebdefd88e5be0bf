// FP16 to float in plain C++, for the code that has no instruction for it.
#pragma once

#include <cstdint>
#include <cstring>

namespace pagelet {

// Finite values only, which is what a scale or a minimum is.
static inline float half_to_float(uint16_t half) {
  const uint32_t exponent = half & 0x7c00u, mantissa = half & 0x3ffu;
  const uint32_t bits = ((exponent + (112u << 10)) | mantissa) << 13;
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof bits);
  if (exponent == 0) magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return half & 0x8000u ? -magnitude : magnitude;
}

static inline float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half_to_float(half);
}

}  // namespace pagelet
