// Integer vectors for the linear kernel, one register of kWidth output columns at a time (see simd.h):
//   Bytes       per column, the codes of 4 consecutive inputs
//   NibbleDots  per column, the running dot product of 4-bit codes with the activations of one block of 32
//   ByteDots    the same for 8-bit codes
// add_dot(dots, first, w, a) adds w's 4 inputs times the activations a[0..3], to nothing if they are the first;
// to_floats(dots, sum, offset) is the dot product minus offset * sum, where `sum` is the sum of the block's
// activations.
#pragma once

#include <cstring>

#include "linear_half.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {

PAGELET_INLINE int32_t four_activations(const int8_t* a) {
  int32_t bits;
  std::memcpy(&bits, a, sizeof bits);
  return bits;
}

#if defined(PAGELET_SIMD_AVX512)

constexpr int kRowsAtOnce = 8;
using Bytes = __m512i;

PAGELET_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
PAGELET_INLINE void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
PAGELET_INLINE Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
PAGELET_INLINE Bytes high_nibbles(Bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
PAGELET_INLINE Vec load_halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

struct NibbleDots {
  __m512i sums;
};
PAGELET_INLINE void add_dot(NibbleDots& dots, bool first, Bytes w, const int8_t* a) {
  const __m512i before = first ? _mm512_setzero_si512() : dots.sums;
  dots.sums = _mm512_dpbusd_epi32(before, w, _mm512_set1_epi32(four_activations(a)));
}
PAGELET_INLINE Vec to_floats(const NibbleDots& dots, int32_t sum, int32_t offset) {
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(dots.sums, _mm512_set1_epi32(offset * sum)));
}

// vpdpbusd multiplies unsigned codes: q + 128, which has the bits of q ^ 128.
struct ByteDots : NibbleDots {};
PAGELET_INLINE void add_dot(ByteDots& dots, bool first, Bytes w, const int8_t* a) {
  const __m512i shifted = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
  add_dot(static_cast<NibbleDots&>(dots), first, shifted, a);
}
PAGELET_INLINE Vec to_floats(const ByteDots& dots, int32_t sum, int32_t offset) {
  return to_floats(static_cast<const NibbleDots&>(dots), sum, offset + 128);
}

#elif defined(PAGELET_SIMD_AVX2)

// Keeps a sum where it stands: GCC would compute all products of a block first, and spill them.
#if defined(_MSC_VER)
#define PAGELET_IN_ORDER(x)
#else
#define PAGELET_IN_ORDER(x) __asm__ volatile("" : "+x"(x))
#endif

constexpr int kRowsAtOnce = 4;
using Bytes = __m256i;

PAGELET_INLINE Bytes load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
PAGELET_INLINE void store_bytes(uint8_t* p, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
PAGELET_INLINE Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
PAGELET_INLINE Bytes high_nibbles(Bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
PAGELET_INLINE Vec load_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#if defined(PAGELET_SIMD_AVXVNNI)

struct NibbleDots {
  __m256i sums;
};
PAGELET_INLINE void add_dot(NibbleDots& dots, bool first, Bytes w, const int8_t* a) {
  const __m256i before = first ? _mm256_setzero_si256() : dots.sums;
  dots.sums = _mm256_dpbusd_avx_epi32(before, w, _mm256_set1_epi32(four_activations(a)));
}
PAGELET_INLINE Vec to_floats(const NibbleDots& dots, int32_t sum, int32_t offset) {
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(dots.sums, _mm256_set1_epi32(offset * sum)));
}

// As with AVX-512: q + 128 has the bits of q ^ 128.
struct ByteDots : NibbleDots {};
PAGELET_INLINE void add_dot(ByteDots& dots, bool first, Bytes w, const int8_t* a) {
  add_dot(static_cast<NibbleDots&>(dots), first, _mm256_xor_si256(w, _mm256_set1_epi8(-128)), a);
}
PAGELET_INLINE Vec to_floats(const ByteDots& dots, int32_t sum, int32_t offset) {
  return to_floats(static_cast<const NibbleDots&>(dots), sum, offset + 128);
}

#else

// 16-bit sums, two per column: a block adds at most 8 * 2 * 15 * 127 = 30480 to one.
struct NibbleDots {
  __m256i pairs;
};
PAGELET_INLINE void add_dot(NibbleDots& dots, bool first, Bytes w, const int8_t* a) {
  const __m256i products = _mm256_maddubs_epi16(w, _mm256_set1_epi32(four_activations(a)));
  dots.pairs = first ? products : _mm256_add_epi16(dots.pairs, products);
  PAGELET_IN_ORDER(dots.pairs);
}
PAGELET_INLINE Vec to_floats(const NibbleDots& dots, int32_t sum, int32_t offset) {
  const __m256i sums = _mm256_madd_epi16(dots.pairs, _mm256_set1_epi16(1));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, _mm256_set1_epi32(offset * sum)));
}

// |w| times a with w's sign: a pair is at most 2 * 128 * 127 = 32512, so vpmaddubsw does not saturate.
struct ByteDots {
  __m256i sums;
};
PAGELET_INLINE void add_dot(ByteDots& dots, bool first, Bytes w, const int8_t* a) {
  const __m256i signed_a = _mm256_sign_epi8(_mm256_set1_epi32(four_activations(a)), w);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_a);
  const __m256i products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  dots.sums = first ? products : _mm256_add_epi32(dots.sums, products);
  PAGELET_IN_ORDER(dots.sums);
}
PAGELET_INLINE Vec to_floats(const ByteDots& dots, int32_t sum, int32_t offset) {
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(dots.sums, _mm256_set1_epi32(offset * sum)));
}

#endif

#elif defined(PAGELET_SIMD_NEON)

constexpr int kRowsAtOnce = 4;
using Bytes = uint8x16_t;

PAGELET_INLINE Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
PAGELET_INLINE void store_bytes(uint8_t* p, Bytes x) { vst1q_u8(p, x); }
PAGELET_INLINE Bytes low_nibbles(Bytes x) { return vandq_u8(x, vdupq_n_u8(15)); }
PAGELET_INLINE Bytes high_nibbles(Bytes x) { return vshrq_n_u8(x, 4); }
PAGELET_INLINE Vec load_halves(const uint8_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

struct NibbleDots {
  int32x4_t sums;
};
using ByteDots = NibbleDots;
PAGELET_INLINE void add_dot(NibbleDots& dots, bool first, Bytes codes, const int8_t* a) {
  if (first) dots.sums = vdupq_n_s32(0);
  const int8x16_t w = vreinterpretq_s8_u8(codes);
  const int8x16_t quad = vreinterpretq_s8_s32(vdupq_n_s32(four_activations(a)));
#if defined(__ARM_FEATURE_DOTPROD)
  dots.sums = vdotq_s32(dots.sums, w, quad);
#else
  // A pair of products is at most 2 * 128 * 127 = 32512 and fits 16 bits.
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(quad)), high = vmull_high_s8(w, quad);
  dots.sums = vpadalq_s16(dots.sums, vpaddq_s16(low, high));
#endif
}
PAGELET_INLINE Vec to_floats(const NibbleDots& dots, int32_t sum, int32_t offset) {
  return vcvtq_f32_s32(vsubq_s32(dots.sums, vdupq_n_s32(offset * sum)));
}

#else  // portable

constexpr int kRowsAtOnce = 4;
struct Bytes {
  uint8_t byte[4 * kWidth];
};

PAGELET_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
PAGELET_INLINE void store_bytes(uint8_t* p, const Bytes& x) { std::memcpy(p, &x, sizeof x); }
PAGELET_INLINE Bytes low_nibbles(Bytes x) {
  for (uint8_t& byte : x.byte) byte &= 15;
  return x;
}
PAGELET_INLINE Bytes high_nibbles(Bytes x) {
  for (uint8_t& byte : x.byte) byte >>= 4;
  return x;
}

PAGELET_INLINE Vec load_halves(const uint8_t* p) {
  Vec out;
  for (int c = 0; c < kWidth; ++c) out.lane[c] = half_at(p + 2 * c);
  return out;
}

struct NibbleDots {
  int32_t sums[kWidth];
};
using ByteDots = NibbleDots;
PAGELET_INLINE void add_dot(NibbleDots& dots, bool first, const Bytes& w, const int8_t* a) {
  for (int c = 0; c < kWidth; ++c) {
    if (first) dots.sums[c] = 0;
    for (int j = 0; j < 4; ++j) dots.sums[c] += static_cast<int8_t>(w.byte[4 * c + j]) * a[j];
  }
}
PAGELET_INLINE Vec to_floats(const NibbleDots& dots, int32_t sum, int32_t offset) {
  Vec out;
  for (int c = 0; c < kWidth; ++c) out.lane[c] = static_cast<float>(dots.sums[c] - offset * sum);
  return out;
}

#endif

}  // namespace pagelet::PAGELET_ISA
