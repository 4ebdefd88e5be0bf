// The kernel of the linear layer: y = W x + b over packed weights (layouts: plugins/packing.py and
// plugins/float_packing.py), with what may stand before it (RMSNorm) and behind it (an activation function, a gate, a
// factor, the residual). Knows nothing of ONNX Runtime.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagelet {

constexpr size_t kTileColumns = 16;  // output columns that lie together in a packed weight
constexpr size_t kBlockInputs = 32;  // inputs that share one activation scale

enum class WeightType : int { int4, int8, fp8, bf16, f16, f32 };

// Integer weights are multiplied with activations quantized to 8 bits, all others with floats.
static constexpr bool is_integer(WeightType type) { return type == WeightType::int4 || type == WeightType::int8; }

// 32 activations of one row: x is about scale * codes.
struct ActivationBlock {
  int8_t codes[kBlockInputs];
  float scale;
  float scaled_sum;  // scale * sum: what a group's minimum is multiplied with
  int32_t sum;       // of the codes
};

// x / sqrt(mean(x^2) + epsilon) * weight; without a weight, x as it is.
struct Norm {
  const float* weight;
  float epsilon;
};

enum class ActivationFunction : int { none, silu, gelu, gelu_tanh, relu, relu2, softcap, swiglu_oai, xielu };

// What plugins/activations.py says of each function and its parameters.
struct Activation {
  ActivationFunction function;
  float parameters[4];
};

// One call: `rows` rows times all columns.
struct LinearTask {
  const uint8_t* weight;  // tiles of `tile_bytes`
  size_t tile_bytes;
  WeightType type;
  bool asymmetric;
  size_t in_features, group_size;
  const ActivationBlock* activations;  // [rows, in_features / 32], of integer weights
  const float* input;                  // [rows, in_features], of all others
  size_t rows;
  // Gated: tiles 2i and 2i + 1 hold 16 columns of a gate and of what it gates, and y is activation(gate) * gated.
  bool gated;
  Activation activation;
  float output_scale;     // a factor of y, before the residual is added
  size_t columns;         // of the output
  const float* bias;      // [columns], gated [2, columns], or null
  const float* residual;  // [rows, columns], added last, or null
  float* out;             // [rows, columns]
};

// A strip is the tiles that are reduced together, and the unit of work that threads share. (Static: see simd.h.)
static inline size_t tile_count(const LinearTask& task) {
  return (task.columns + kTileColumns - 1) / kTileColumns * (task.gated ? 2 : 1);
}
static inline size_t tiles_per_strip(const LinearTask& task) {
  return is_integer(task.type) ? (task.gated ? 2 : 1) : 4;
}
static inline size_t strip_count(const LinearTask& task) {
  return (tile_count(task) + tiles_per_strip(task) - 1) / tiles_per_strip(task);
}

// Each output element is reduced in one fixed order, whatever the rows, strips and threads. AVX2, AVX-512 and NEON
// give the same bits; portable code rounds a product before it is added.
struct LinearKernel {
  // One row x [size] to out [size].
  void (*normalize)(const float* x, size_t size, const Norm& norm, float* out);
  // One row x [32 * blocks]. A block with a NaN or an infinity gets a NaN scale, one below 2^-100 counts as zero.
  void (*quantize)(const float* x, size_t blocks, const Norm& norm, ActivationBlock* out);
  // Strips first..last - 1; threads may work on disjoint strips of one task.
  void (*multiply)(const LinearTask& task, size_t first, size_t last);
};

}  // namespace pagelet
