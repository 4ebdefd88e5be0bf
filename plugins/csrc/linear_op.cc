// Linear as an op of ONNX Runtime: output [T, N] = input [T, K] times a packed weight, plus a bias. Optional, to
// save passes over memory: RMSNorm of the input (norm_weight [K], epsilon), a residual [T, N] that is added, and
// gating, where the weight's columns are pairs of tiles and the output is silu(gate) * gated.
#include <algorithm>

#include "isa.h"
#include "linear_format.h"
#include "ops.h"
#include "scratch.h"

namespace pagelet {

PAGELET_DECLARE_KERNEL(LinearKernel, linear_kernel)

namespace {

constexpr size_t kMaxRows = 512;            // prepared at once: bounds the scratch memory of a long prompt
constexpr size_t kMaxWorkItems = 64;        // fine enough for an even split, coarse enough for long reads
constexpr size_t kInputsPerWorkItem = 1 << 14;  // normed and quantized in some microseconds

// Splits 0..total into at most `items` equal ranges and calls body(first, last) for each, on the host's threads.
template <typename Body>
void for_each_range(const ParallelFor& parallel_for, size_t total, size_t items, const Body& body) {
  items = std::max<size_t>(1, std::min(items, total));
  for_each(parallel_for, items, [&](size_t i) { body(i * total / items, (i + 1) * total / items); });
}

class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr ort::Port kInputs[] = {{ort::kFloat},
                                          {ort::kUint8},
                                          {ort::kFloat, ort::kOptional},
                                          {ort::kFloat, ort::kOptional},
                                          {ort::kFloat, ort::kOptional}};
  static constexpr ort::Port kOutputs[] = {{ort::kFloat}};

  Linear(const ort::Api& api, const ort::KernelInfo* info)
      : format_(api, info),
        weight_(api, info, 1),
        bias_(api, info, 2),
        norm_(api, info, 3),
        epsilon_(ort::attribute(api, info, "epsilon", 1e-5f)),
        gated_(bounded_attribute(api, info, "gated", 0, 1, 0) != 0),
        kernel_(PAGELET_KERNEL(LinearKernel, linear_kernel, selected_isa())) {
    if (!(epsilon_ >= 0) || epsilon_ > 1) {
      throw std::invalid_argument("attribute epsilon is " + std::to_string(epsilon_) + ", expected 0 to 1");
    }
    if (gated_ && format_.out_features % (2 * kTileColumns) != 0) {
      throw std::invalid_argument("out_features is " + std::to_string(format_.out_features) +
                                  " of a gated layer: expected a multiple of 32, pairs of whole tiles");
    }
  }

  void compute(const ort::Context& context) const {
    const ort::Tensor input = context.input(0), weight = weight_.get(context), bias = bias_.get(context);
    const ort::Tensor norm = norm_.get(context), residual = context.input(4);
    const auto in_features = static_cast<int64_t>(format_.in_features);
    const auto columns = static_cast<int64_t>(format_.out_features / (gated_ ? 2 : 1));
    ort::expect_shape(input, "input", {-1, in_features});
    if (bias.present) ort::expect_shape(bias, "bias", {static_cast<int64_t>(format_.out_features)});
    if (norm.present) ort::expect_shape(norm, "norm_weight", {in_features});
    if (residual.present) ort::expect_shape(residual, "residual", {input.dims[0], columns});
    LinearTask task{};
    task.weight = packed_weight(weight, format_);
    task.tile_bytes = format_.tile_bytes();
    task.type = format_.type;
    task.asymmetric = format_.asymmetric;
    task.in_features = format_.in_features;
    task.group_size = format_.group_size;
    task.gated = gated_;
    task.columns = static_cast<size_t>(columns);
    task.bias = bias.as<const float>();
    const int64_t dims[] = {input.dims[0], columns};
    auto* out = static_cast<float*>(context.output(0, dims, 2));
    const auto rows = static_cast<size_t>(input.dims[0]);
    for (size_t row = 0; row < rows; row += kMaxRows) {
      task.rows = std::min(kMaxRows, rows - row);
      task.out = out + row * task.columns;
      task.residual = residual.present ? residual.as<const float>() + row * task.columns : nullptr;
      const float* rows_in = input.as<const float>() + row * task.in_features;
      prepare(task, rows_in, {norm.as<const float>(), epsilon_}, context.parallel_for());
      for_each_range(context.parallel_for(), strip_count(task), kMaxWorkItems,
                     [&](size_t first, size_t last) { kernel_.multiply(task, first, last); });
    }
  }

 private:
  // The rows as the weights want them: quantized, or as floats; normed, if there is a norm.
  void prepare(LinearTask& task, const float* input, const Norm& norm, const ParallelFor& parallel_for) const {
    const size_t size = task.in_features, items = task.rows * size / kInputsPerWorkItem;
    task.input = input;
    if (is_integer(task.type)) {
      static_assert(sizeof(ActivationBlock) % sizeof(float) == 0);
      const size_t blocks = size / kBlockInputs;
      auto* activations = reinterpret_cast<ActivationBlock*>(
          thread_scratch(task.rows * blocks * sizeof(ActivationBlock) / sizeof(float)));
      for_each_range(parallel_for, task.rows, items, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r) {
          kernel_.quantize(input + r * size, blocks, norm, activations + r * blocks);
        }
      });
      task.activations = activations;
    } else if (norm.weight) {
      float* normed = thread_scratch(task.rows * size);
      for_each_range(parallel_for, task.rows, items, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r) kernel_.normalize(input + r * size, size, norm, normed + r * size);
      });
      task.input = normed;
    }
  }

  LinearFormat format_;
  ort::ConstantInput weight_, bias_, norm_;
  float epsilon_;
  bool gated_;
  const LinearKernel& kernel_;
};

}  // namespace

const ort::CustomOp* linear() { return ort::OpTable<Linear>::get(); }

}  // namespace pagelet
