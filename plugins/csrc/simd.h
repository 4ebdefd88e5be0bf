// One vector of floats per instruction set, and nothing else: a kernel source is written once with these and
// compiled once per instruction set, with -DPAGELET_ISA=<isa> naming the namespace that everything lives in.
//
// A kernel source must not use std:: templates or inline functions (nor inline member functions of shared
// structs): the linker keeps one copy of each, and it could keep the one that was compiled for AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(PAGELET_SIMD_DOTPROD)  // NEON with 8-bit dot products
#define PAGELET_SIMD_NEON
#elif defined(PAGELET_SIMD_AVXVNNI)  // AVX2 with 8-bit dot products
#define PAGELET_SIMD_AVX2
#endif

#if defined(PAGELET_SIMD_AVX512) || defined(PAGELET_SIMD_AVX2)
#include <immintrin.h>
#elif defined(PAGELET_SIMD_NEON)
#include <arm_neon.h>
#endif

#if defined(_MSC_VER)
#define PAGELET_INLINE static __forceinline
#else
#define PAGELET_INLINE static inline __attribute__((always_inline))
#endif

// Before a loop over registers: unrolled, so that an array of vectors stays in registers.
#if defined(__clang__)
#define PAGELET_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define PAGELET_UNROLL _Pragma("GCC unroll 16")
#else
#define PAGELET_UNROLL
#endif

namespace pagelet::PAGELET_ISA {

PAGELET_INLINE void prefetch(const void* address) {
#if defined(_MSC_VER) && !defined(__clang__)
  (void)address;
#else
  __builtin_prefetch(address);
#endif
}

// For every Vec: load, store (unaligned), set1, add, sub, mul, div, max, min (b where one is NaN),
// fmadd(a, b, c) = a*b + c, exp_bits, zero_below and load_transposed4; below them what builds on these.
#if defined(PAGELET_SIMD_AVX512)

using Vec = __m512;
constexpr int kWidth = 16;

PAGELET_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PAGELET_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
PAGELET_INLINE Vec set1(float a) { return _mm512_set1_ps(a); }
PAGELET_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
PAGELET_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
PAGELET_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
PAGELET_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
PAGELET_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PAGELET_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PAGELET_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// a times 2^n, where n is the integer in the low bits of `biased` (see exp).
PAGELET_INLINE Vec exp_bits(Vec a, Vec biased) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(biased), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), n));
}

// a where !(x < limit), else 0.
PAGELET_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}

// out[i] lane r = rows[r][i], i < 4.
PAGELET_INLINE void load_transposed4(const float* const* rows, size_t offset, Vec out[4]) {
  Vec a[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + offset));
    a[i] = _mm512_insertf32x4(a[i], _mm_loadu_ps(rows[i + 4] + offset), 1);
    a[i] = _mm512_insertf32x4(a[i], _mm_loadu_ps(rows[i + 8] + offset), 2);
    a[i] = _mm512_insertf32x4(a[i], _mm_loadu_ps(rows[i + 12] + offset), 3);
  }
  const Vec low01 = _mm512_unpacklo_ps(a[0], a[1]), high01 = _mm512_unpackhi_ps(a[0], a[1]);
  const Vec low23 = _mm512_unpacklo_ps(a[2], a[3]), high23 = _mm512_unpackhi_ps(a[2], a[3]);
  out[0] = _mm512_shuffle_ps(low01, low23, 0x44);
  out[1] = _mm512_shuffle_ps(low01, low23, 0xee);
  out[2] = _mm512_shuffle_ps(high01, high23, 0x44);
  out[3] = _mm512_shuffle_ps(high01, high23, 0xee);
}

#elif defined(PAGELET_SIMD_AVX2)

using Vec = __m256;
constexpr int kWidth = 8;

PAGELET_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
PAGELET_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
PAGELET_INLINE Vec set1(float a) { return _mm256_set1_ps(a); }
PAGELET_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
PAGELET_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
PAGELET_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
PAGELET_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
PAGELET_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PAGELET_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PAGELET_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

PAGELET_INLINE Vec exp_bits(Vec a, Vec biased) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n));
}

PAGELET_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), a);
}

PAGELET_INLINE void load_transposed4(const float* const* rows, size_t offset, Vec out[4]) {
  Vec a[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_castps128_ps256(_mm_loadu_ps(rows[i] + offset));
    a[i] = _mm256_insertf128_ps(a[i], _mm_loadu_ps(rows[i + 4] + offset), 1);
  }
  const Vec low01 = _mm256_unpacklo_ps(a[0], a[1]), high01 = _mm256_unpackhi_ps(a[0], a[1]);
  const Vec low23 = _mm256_unpacklo_ps(a[2], a[3]), high23 = _mm256_unpackhi_ps(a[2], a[3]);
  out[0] = _mm256_shuffle_ps(low01, low23, 0x44);
  out[1] = _mm256_shuffle_ps(low01, low23, 0xee);
  out[2] = _mm256_shuffle_ps(high01, high23, 0x44);
  out[3] = _mm256_shuffle_ps(high01, high23, 0xee);
}

#elif defined(PAGELET_SIMD_NEON)

using Vec = float32x4_t;
constexpr int kWidth = 4;

PAGELET_INLINE Vec load(const float* p) { return vld1q_f32(p); }
PAGELET_INLINE void store(float* p, Vec a) { vst1q_f32(p, a); }
PAGELET_INLINE Vec set1(float a) { return vdupq_n_f32(a); }
PAGELET_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
PAGELET_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
PAGELET_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
PAGELET_INLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
PAGELET_INLINE Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
PAGELET_INLINE Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
PAGELET_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }

PAGELET_INLINE Vec exp_bits(Vec a, Vec biased) {
  const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(biased), 23);
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), n));
}

PAGELET_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit)));
}

PAGELET_INLINE void load_transposed4(const float* const* rows, size_t offset, Vec out[4]) {
  const Vec a0 = load(rows[0] + offset), a1 = load(rows[1] + offset);
  const Vec a2 = load(rows[2] + offset), a3 = load(rows[3] + offset);
  const float32x4x2_t p01 = vtrnq_f32(a0, a1), p23 = vtrnq_f32(a2, a3);
  out[0] = vcombine_f32(vget_low_f32(p01.val[0]), vget_low_f32(p23.val[0]));
  out[1] = vcombine_f32(vget_low_f32(p01.val[1]), vget_low_f32(p23.val[1]));
  out[2] = vcombine_f32(vget_high_f32(p01.val[0]), vget_high_f32(p23.val[0]));
  out[3] = vcombine_f32(vget_high_f32(p01.val[1]), vget_high_f32(p23.val[1]));
}

#else  // portable: four lanes in plain C++, which the compiler maps to what the baseline has

struct Vec {
  float lane[4];
};
constexpr int kWidth = 4;

PAGELET_INLINE Vec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
PAGELET_INLINE void store(float* p, Vec a) {
  for (int i = 0; i < 4; ++i) p[i] = a.lane[i];
}
PAGELET_INLINE Vec set1(float a) { return {{a, a, a, a}}; }
#define PAGELET_PORTABLE_BINARY(name, expression) \
  PAGELET_INLINE Vec name(Vec a, Vec b) {         \
    Vec out;                                      \
    for (int i = 0; i < 4; ++i) {                 \
      const float x = a.lane[i], y = b.lane[i];   \
      out.lane[i] = expression;                   \
    }                                             \
    return out;                                   \
  }
PAGELET_PORTABLE_BINARY(add, x + y)
PAGELET_PORTABLE_BINARY(sub, x - y)
PAGELET_PORTABLE_BINARY(mul, x* y)
PAGELET_PORTABLE_BINARY(div, x / y)
PAGELET_PORTABLE_BINARY(max, x > y ? x : y)
PAGELET_PORTABLE_BINARY(min, x < y ? x : y)
#undef PAGELET_PORTABLE_BINARY
// Two roundings: the baseline has no fused multiply-add.
PAGELET_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }

PAGELET_INLINE Vec exp_bits(Vec a, Vec biased) {
  uint32_t value[4], n[4];
  memcpy(value, &a, sizeof a);
  memcpy(n, &biased, sizeof biased);
  for (int i = 0; i < 4; ++i) value[i] += n[i] << 23;
  memcpy(&a, value, sizeof a);
  return a;
}

PAGELET_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
  for (int i = 0; i < 4; ++i) a.lane[i] = x.lane[i] < limit.lane[i] ? 0.0f : a.lane[i];
  return a;
}

PAGELET_INLINE void load_transposed4(const float* const* rows, size_t offset, Vec out[4]) {
  for (int i = 0; i < 4; ++i) {
    for (int r = 0; r < 4; ++r) out[i].lane[r] = rows[r][offset + i];
  }
}

#endif

// x = n ln2 + r with |r| <= ln2 / 2, for x of at most 88.3: e^r - 1, and n in the low bits of `biased`. Range
// reduction by Cody and Waite, then r + r^2 p(r) with a minimax p.
struct ReducedExp {
  Vec fraction, biased;
};
PAGELET_INLINE ReducedExp reduced_exp(Vec x) {
  const Vec shift = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Vec biased = fmadd(x, set1(1.44269504f), shift);
  const Vec n = sub(biased, shift);
  Vec r = fmadd(n, set1(-0.693145752f), x);
  r = fmadd(n, set1(-1.42860677e-6f), r);
  Vec p = set1(0.00138144672f);
  p = fmadd(p, r, set1(0.00836878084f));
  p = fmadd(p, r, set1(0.0416683927f));
  p = fmadd(p, r, set1(0.166665196f));
  p = fmadd(p, r, set1(0.49999994f));
  return {fmadd(mul(p, r), r, r), biased};
}

// e^x to 1 ulp; 0 below -87.33 (so e^-inf = 0, no denormals), e^88.3 above that, NaN stays NaN.
PAGELET_INLINE Vec exp(Vec x) {
  const ReducedExp e = reduced_exp(min(set1(88.3f), x));  // 2^127 is the largest scale
  return zero_below(exp_bits(add(e.fraction, set1(1.0f)), e.biased), x, set1(-87.33f));
}

// Lane i is added to lane i + width/2, and so on down to one: the tree that every reduction here has.
PAGELET_INLINE float reduce_add(Vec a) {
  float lane[kWidth];
  store(lane, a);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

PAGELET_INLINE float reduce_max(Vec a) {
  float lane[kWidth];
  store(lane, a);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  }
  return lane[0];
}

}  // namespace pagelet::PAGELET_ISA
