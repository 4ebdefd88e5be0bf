// QuantizedLinear as an op of ONNX Runtime: output [T, N] = input [T, K] times a packed weight, plus a bias.
#include <algorithm>

#include "isa.h"
#include "linear_format.h"
#include "ops.h"
#include "scratch.h"

namespace pagelet {

PAGELET_DECLARE_KERNEL(LinearKernel, linear_kernel)

namespace {

constexpr size_t kMaxRows = 512;            // quantized at once: bounds the scratch memory of a long prompt
constexpr size_t kMaxWorkItems = 128;       // fine enough for an even split, coarse enough to cost nothing
constexpr size_t kBlocksPerWorkItem = 512;  // of 32 activations, quantized in some microseconds

// Splits 0..total into at most `items` equal ranges and calls body(first, last) for each, on the host's threads.
template <typename Body>
void for_each_range(const ParallelFor& parallel_for, size_t total, size_t items, const Body& body) {
  items = std::max<size_t>(1, std::min(items, total));
  for_each(parallel_for, items, [&](size_t i) { body(i * total / items, (i + 1) * total / items); });
}

class QuantizedLinear {
 public:
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr ort::Port kInputs[] = {{ort::kFloat}, {ort::kUint8}, {ort::kFloat, ort::kOptional}};
  static constexpr ort::Port kOutputs[] = {{ort::kFloat}};

  QuantizedLinear(const ort::Api& api, const ort::KernelInfo* info)
      : format_(api, info), kernel_(PAGELET_KERNEL(LinearKernel, linear_kernel, selected_isa())) {}

  void compute(const ort::Context& context) const {
    const auto in_features = static_cast<int64_t>(format_.in_features);
    const auto out_features = static_cast<int64_t>(format_.out_features);
    const ort::Tensor input = context.input(0), weight = context.input(1), bias = context.input(2);
    ort::expect_shape(input, "input", {-1, in_features});
    if (bias.present) ort::expect_shape(bias, "bias", {out_features});
    LinearTask task{};
    task.weight = packed_weight(weight, format_);
    task.tile_bytes = format_.tile_bytes();
    task.storage = format_.storage();
    task.blocks = format_.in_features / kBlockInputs;
    task.blocks_per_group = format_.group_size / kBlockInputs;
    task.out_features = format_.out_features;
    task.bias = bias.as<const float>();
    const int64_t dims[] = {input.dims[0], out_features};
    float* out = context.output(0, dims, 2).as<float>();
    const auto rows = static_cast<size_t>(input.dims[0]);
    for (size_t row = 0; row < rows; row += kMaxRows) {
      task.rows = std::min(kMaxRows, rows - row);
      task.out = out + row * format_.out_features;
      run(task, input.as<const float>() + row * format_.in_features, context.parallel_for());
    }
  }

 private:
  void run(LinearTask& task, const float* input, const ParallelFor& parallel_for) const {
    static_assert(sizeof(ActivationBlock) % sizeof(float) == 0);
    const size_t blocks = task.rows * task.blocks;
    auto* activations =
        reinterpret_cast<ActivationBlock*>(thread_scratch(blocks * sizeof(ActivationBlock) / sizeof(float)));
    for_each_range(parallel_for, blocks, blocks / kBlocksPerWorkItem, [&](size_t first, size_t last) {
      kernel_.quantize(input + first * kBlockInputs, last - first, activations + first);
    });
    task.activations = activations;
    for_each_range(parallel_for, format_.tiles(), kMaxWorkItems,
                   [&](size_t first, size_t last) { kernel_.multiply(task, first, last); });
  }

  LinearFormat format_;
  const LinearKernel& kernel_;
};

}  // namespace

const ort::CustomOp* quantized_linear() { return ort::OpTable<QuantizedLinear>::get(); }

}  // namespace pagelet
