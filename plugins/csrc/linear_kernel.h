// The kernel of the quantized linear layer: integer dot products of packed weights (layout: plugins/packing.py)
// with activations that are quantized per row. Knows nothing of ONNX Runtime.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagelet {

constexpr size_t kTileColumns = 16;  // output columns that lie together in a packed weight
constexpr size_t kBlockInputs = 32;  // inputs that share one activation scale

// 32 activations of one row: x is about scale * codes.
struct ActivationBlock {
  int8_t codes[kBlockInputs];
  float scale;
  float scaled_sum;  // scale * sum: what a group's minimum is multiplied with
  int32_t sum;       // of the codes
};

enum class LinearStorage : int { int4_asymmetric, int4_symmetric, int8_symmetric };

// One call: `rows` rows times all columns.
struct LinearTask {
  const uint8_t* weight;  // tiles of `tile_bytes`
  size_t tile_bytes;
  LinearStorage storage;
  size_t blocks;            // of 32 inputs
  size_t blocks_per_group;  // 1, 2 or 4
  size_t out_features;
  const ActivationBlock* activations;  // [rows, blocks]
  size_t rows;
  const float* bias;  // [out_features] or null
  float* out;         // [rows, out_features]
};

// Each output element is reduced in one fixed order, whatever the rows, tiles and threads. AVX2, AVX-512 and NEON
// give the same bits; portable code rounds a product before it is added.
struct LinearKernel {
  // x [32 * blocks]. A block with a NaN or an infinity gets a NaN scale, one below 2^-100 counts as zero.
  void (*quantize)(const float* x, size_t blocks, ActivationBlock* out);
  // The columns of tiles first_tile..last_tile - 1; threads may work on disjoint tiles of one task.
  void (*multiply)(const LinearTask& task, size_t first_tile, size_t last_tile);
};

}  // namespace pagelet
