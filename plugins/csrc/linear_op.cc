// Linear as an op of ONNX Runtime: output [T, N] = input [T, K] times a packed weight, plus a bias. Optional, to
// save passes over memory: RMSNorm of the input (norm_weight [K], epsilon), an activation function, gating, where
// the weight's columns are pairs of tiles and the output is activation(gate) * gated, a factor output_scale, and a
// residual [T, N] that is added last.
#include <algorithm>

#include "activation_attributes.h"
#include "linear_layer.h"
#include "ops.h"
#include "scratch.h"

namespace pagelet {
namespace {

constexpr size_t kMaxWorkItems = 64;  // fine enough for an even split, coarse enough for long reads

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
      : layer_(read_layer(api, info)),
        weight_(api, info, 1),
        bias_(api, info, 2),
        norm_(api, info, 3),
        epsilon_(bounded_float_attribute(api, info, "epsilon", 0.0f, 1.0f, 1e-5f)) {
    if (layer_.gated && layer_.format.out_features % (2 * kTileColumns) != 0) {
      throw std::invalid_argument("out_features is " + std::to_string(layer_.format.out_features) +
                                  " of a gated layer: expected a multiple of 32, pairs of whole tiles");
    }
  }

  void compute(const ort::Context& context) const {
    const ort::Tensor input = context.input(0), weight = weight_.get(context), bias = bias_.get(context);
    const ort::Tensor norm = norm_.get(context), residual = context.input(4);
    const size_t size = layer_.format.in_features;
    const auto columns = static_cast<int64_t>(layer_.columns());
    ort::expect_shape(input, "input", {-1, static_cast<int64_t>(size)});
    if (bias.present) ort::expect_shape(bias, "bias", {static_cast<int64_t>(layer_.format.out_features)});
    if (norm.present) ort::expect_shape(norm, "norm_weight", {static_cast<int64_t>(size)});
    if (residual.present) ort::expect_shape(residual, "residual", {input.dims[0], columns});
    LinearTask task = layer_.task(packed_weight(weight, layer_.format), bias.as<const float>());
    const Norm norms{norm.as<const float>(), epsilon_};
    const int64_t dims[] = {input.dims[0], columns};
    auto* out = static_cast<float*>(context.output(0, dims, 2));
    const auto total = static_cast<size_t>(input.dims[0]);
    for (size_t row = 0; row < total; row += kMaxRows) {
      const size_t rows = std::min(kMaxRows, total - row);
      const float* first = input.as<const float>() + row * size;
      float* memory = thread_scratch(bytes_to_make_ready(layer_, rows, norms) / sizeof(float));
      set_rows(task, make_ready(layer_, first, rows, norms, memory, context.parallel_for()), rows);
      task.out = out + row * task.columns;
      task.residual = residual.present ? residual.as<const float>() + row * task.columns : nullptr;
      multiply(&task, 1, kMaxWorkItems, context.parallel_for());
    }
  }

 private:
  static LinearLayer read_layer(const ort::Api& api, const ort::KernelInfo* info) {
    const bool gated = bounded_attribute(api, info, "gated", 0, 1, 0) != 0;
    return {LinearFormat(api, info), gated, activation_attributes(api, info, gated),
            output_scale_attribute(api, info)};
  }

  LinearLayer layer_;
  ort::ConstantInput weight_, bias_, norm_;
  float epsilon_;
};

}  // namespace

const ort::CustomOp* linear() { return ort::OpTable<Linear>::get(); }

}  // namespace pagelet
