// AVX-512 on a CPU without it: SIMDe's functions under the names of the intrinsics (see PAGELET_EMULATE_AVX512 in
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
#define _mm512_cvtph_ps(half) emulated_cvtph_ps(half)
#define _mm512_cvtepi32_ps(n) emulated_cvtepi32_ps(n)
