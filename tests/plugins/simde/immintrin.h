// AVX-512 and AVX-VNNI on a CPU without them: SIMDe's functions under the names of the intrinsics (see PAGELET_EMULATE_AVX512 in
// plugins/CMakeLists.txt).
#pragma once

#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

// What SIMDe 0.7 does not have.
static inline simde__m512 joined(__m256 low, __m256 high) {
  return simde_mm512_insertf32x8(simde_mm512_castps256_ps512(low), high, 1);
}
static inline simde__m512 emulated_cvtph_ps(__m256i half) {
  return joined(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)));
}
static inline simde__m512 emulated_cvtepi32_ps(simde__m512i n) {
  __m256i half[2];
  simde_mm512_storeu_si512(half, n);
  return joined(_mm256_cvtepi32_ps(half[0]), _mm256_cvtepi32_ps(half[1]));
}
static inline __m256i emulated_cvtps_ph(simde__m512 x) {
  const __m128i low = _mm256_cvtps_ph(simde_mm512_castps512_ps256(x), _MM_FROUND_TO_NEAREST_INT);
  const __m256 upper = _mm256_castpd_ps(simde_mm512_extractf64x4_pd(simde_mm512_castps_pd(x), 1));
  const __m128i high = _mm256_cvtps_ph(upper, _MM_FROUND_TO_NEAREST_INT);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
static inline simde__m512i emulated_cvtepi8_epi32(__m128i bytes) {
  return simde_mm512_inserti64x4(simde_mm512_castsi256_si512(_mm256_cvtepi8_epi32(bytes)),
                                 _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)), 1);
}
static inline simde__m512i emulated_cvtepu16_epi32(__m256i words) {
  return simde_mm512_inserti64x4(
      simde_mm512_castsi256_si512(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words))),
      _mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1)), 1);
}
#define _mm512_cvtepu16_epi32(words) emulated_cvtepu16_epi32(words)
#define _mm512_cvtepi8_epi32(bytes) emulated_cvtepi8_epi32(bytes)
#define _mm512_cvtps_ph(x, rounding) emulated_cvtps_ph(x)
#define _mm512_cvtph_ps(half) emulated_cvtph_ps(half)
#define _mm512_cvtepi32_ps(n) emulated_cvtepi32_ps(n)

static inline __m256i emulated_dpbusd_avx_epi32(__m256i sums, __m256i u8, __m256i s8) {
  const __m256i low_u8 = _mm256_and_si256(u8, _mm256_set1_epi16(255)), high_u8 = _mm256_srli_epi16(u8, 8);
  const __m256i low_s8 = _mm256_srai_epi16(_mm256_slli_epi16(s8, 8), 8), high_s8 = _mm256_srai_epi16(s8, 8);
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(low_u8, low_s8));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(high_u8, high_s8));
}
#define _mm256_dpbusd_avx_epi32(sums, u8, s8) emulated_dpbusd_avx_epi32(sums, u8, s8)
