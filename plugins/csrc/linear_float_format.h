// Weights that are floats, plain or FP8, in tiles of 16 output columns (layout: plugins/float_packing.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagelet {

enum class FloatStorage : int { fp8, bf16, f16, f32 };

// At most so many neighbouring tiles are summed at once.
constexpr size_t kMaxFloatTiles = 4;

// Neighbouring tiles, each [inputs][16]; FP8: [inputs / group_size] times [group_size][16] codes and 16 float
// scales.
struct FloatTiles {
  const uint8_t* data;
  size_t tile_bytes, count;
  size_t inputs, group_size;  // group_size: of FP8 only, and a divisor of inputs
};

}  // namespace pagelet
