// The elements of narrow caches and weights: from floats and back, per instruction set. Included by kernel
// sources only (see simd.h).
//   load_half, load_bf16, load_int8   kWidth elements as floats
//   load_e4m3                         the same, times 2^-8 (see kE4m3Unit)
//   store_half                        kWidth floats, to the nearest, ties to even; beyond 65504 infinity
//   to_int8, to_e4m3                  one float, to the nearest, ties to even; beyond the largest code the
//                                     largest
#pragma once

#include "simd.h"

namespace pagelet::PAGELET_ISA {

constexpr float kLargestInt8 = 127, kLargestE4m3 = 448;

// An E4M3 code's exponent and mantissa, moved to the places that they have in FP16, make a number with
// another exponent bias (15 for 7), subnormals included.
constexpr float kE4m3Unit = 256;

#if defined(PAGELET_SIMD_AVX512)

PAGELET_INLINE Vec load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PAGELET_INLINE void store_half(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PAGELET_INLINE Vec load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
PAGELET_INLINE Vec load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
PAGELET_INLINE Vec load_e4m3(const uint8_t* p) {
  const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(int16_t(0xbf80))));
}

#elif defined(PAGELET_SIMD_AVX2)

PAGELET_INLINE Vec load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PAGELET_INLINE void store_half(uint16_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PAGELET_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PAGELET_INLINE Vec load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
PAGELET_INLINE Vec load_e4m3(const uint8_t* p) {
  const __m128i code = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16(int16_t(0xbf80))));
}

#elif defined(PAGELET_SIMD_NEON)

PAGELET_INLINE int16x4_t load_bytes_as_int16(const void* p) {
  uint32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  return vget_low_s16(vmovl_s8(vcreate_s8(bytes)));
}

PAGELET_INLINE Vec load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
PAGELET_INLINE void store_half(uint16_t* p, Vec a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
PAGELET_INLINE Vec load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
PAGELET_INLINE Vec load_int8(const int8_t* p) { return vcvtq_f32_s32(vmovl_s16(load_bytes_as_int16(p))); }
PAGELET_INLINE Vec load_e4m3(const uint8_t* p) {
  const uint16x4_t code = vreinterpret_u16_s16(load_bytes_as_int16(p));
  return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(vshl_n_u16(code, 7), vdup_n_u16(0xbf80))));
}

#endif

// 16 codes as halves, times 2^-8.
PAGELET_INLINE void halves_of_e4m3(const uint8_t* codes, uint16_t* out) {
#if defined(PAGELET_SIMD_AVX2)
  // A multiplication by 128, for a shift would wait for the unit that widens.
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i shifted = _mm256_maddubs_epi16(_mm256_set1_epi16(128), wide);
  const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbf80)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), halves);
#else
  for (int i = 0; i < 16; ++i) out[i] = uint16_t((codes[i] & 0x80) << 8 | (codes[i] & 0x7f) << 7);
#endif
}

PAGELET_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

PAGELET_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The code of the nearest float with so many mantissa bits and this exponent bias, ties to even. The sign of
// x is ignored; what is too large has a code above the largest.
template <int kMantissaBits, int kBias>
PAGELET_INLINE uint32_t narrow(float x) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  // Its last place is the smallest code's value: to add it rounds to a whole number of those.
  constexpr uint32_t kRounder = uint32_t(127 + kDropped + 1 - kBias) << 23;
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu, odd = magnitude >> kDropped & 1;
  const uint32_t normal = (magnitude - kRebias + (1u << (kDropped - 1)) - 1 + odd) >> kDropped;
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kRounder)) - kRounder;
  return magnitude < kRebias + (1u << 23) ? subnormal : normal;
}

PAGELET_INLINE uint8_t to_e4m3(float x) {
  const uint32_t code = narrow<3, 7>(x);
  return uint8_t((bits_of(x) >> 24 & 0x80u) | (code < 0x7e ? code : 0x7e));
}

// Adding 1.5 * 2^23 rounds to an integer, kept in the low bits.
PAGELET_INLINE int8_t to_int8(float x) {
  const float bounded = x > kLargestInt8 ? kLargestInt8 : x < -kLargestInt8 ? -kLargestInt8 : x;
  return int8_t(uint8_t(bits_of(bounded + 12582912.0f)));
}

#if !defined(PAGELET_SIMD_AVX512) && !defined(PAGELET_SIMD_AVX2) && !defined(PAGELET_SIMD_NEON)

PAGELET_INLINE uint16_t to_half(float x) {
  const uint32_t code = narrow<10, 15>(x);
  const bool is_nan = x != x;
  return uint16_t((bits_of(x) >> 16 & 0x8000u) | (is_nan ? 0x7e00 : code < 0x7c00 ? code : 0x7c00));
}

PAGELET_INLINE float from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 0) return float_of(bits_of(float(mantissa) * 0x1p-24f) | sign);
  return float_of(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

PAGELET_INLINE Vec load_half(const uint16_t* p) {
  return {{from_half(p[0]), from_half(p[1]), from_half(p[2]), from_half(p[3])}};
}
PAGELET_INLINE void store_half(uint16_t* p, Vec a) {
  for (int i = 0; i < kWidth; ++i) p[i] = to_half(a.lane[i]);
}
PAGELET_INLINE Vec load_bf16(const uint16_t* p) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out.lane[i] = float_of(uint32_t(p[i]) << 16);
  return out;
}
PAGELET_INLINE Vec load_int8(const int8_t* p) {
  return {{float(p[0]), float(p[1]), float(p[2]), float(p[3])}};
}
PAGELET_INLINE Vec load_e4m3(const uint8_t* p) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out.lane[i] = from_half(uint16_t((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
  return out;
}

#endif

}  // namespace pagelet::PAGELET_ISA
