// How a cache's elements become floats and back: the one seam for a new cache type. Included by kernel
// sources only (see simd.h).
#pragma once

#include "simd.h"

namespace pagelet::PAGELET_ISA {

struct F32Cache {
  using Element = float;

  // The row as floats: in place, or in `converted`.
  PAGELET_INLINE const float* read(const Element* row, int64_t size, float* converted) {
    (void)size, (void)converted;
    return row;
  }

  PAGELET_INLINE void write(Element* to, int64_t size, const float* row) {
    memcpy(to, row, size_t(size) * sizeof(float));
  }
};

}  // namespace pagelet::PAGELET_ISA
