// Experts as an op of ONNX Runtime: the feed-forward layers of a mixture of experts. Of each row of input [T, K] it
// is output_scale * sum of weight * expert(row) over the row's top_k experts, plus a residual [T, K]; an expert is a
// gated Linear (packed weight gate_up, [2, intermediate] columns) and a Linear back to K (down), one expert's weight
// after another's. Experts and weights come from router_logits [T, num_experts]:
//   routing  softmax_topk  weights are a softmax over all experts; normalize=1 divides them by the sum of the chosen
//            topk_softmax  weights are a softmax over the chosen experts (the same as the former with normalize=1)
// Weights' formats are attributes as of Linear, with the prefixes gate_up_ and down_.
#include <algorithm>
#include <cstring>

#include "expert_groups.h"
#include "activation_attributes.h"
#include "linear_layer.h"
#include "ops.h"
#include "scratch.h"

namespace pagelet {
namespace {

constexpr size_t kMaxAssignments = 4096;  // of rows to experts, at once: bounds the scratch memory
constexpr size_t kPartsPerExpert = 16;    // work items: four experts of a single row still keep all threads busy
constexpr size_t kRowsPerWorkItem = 8;    // copied or summed in some microseconds

bool weights_over_all(const ort::Api& api, const ort::KernelInfo* info) {
  const std::string routing = ort::attribute(api, info, "routing", "");
  const bool normalize = bounded_attribute(api, info, "normalize", 0, 1, 0) != 0;
  if (routing == "softmax_topk") return !normalize;
  if (routing == "topk_softmax") return false;
  throw std::invalid_argument("attribute routing is '" + routing + "', expected softmax_topk or topk_softmax");
}

// The tensors of a node, checked.
struct ExpertsTensors {
  const float *input, *logits, *gate_up_bias, *down_bias, *norm_weight, *residual;
  const uint8_t *gate_up, *down;
};

class Experts {
 public:
  static constexpr const char* kName = "Experts";
  static constexpr ort::Port kInputs[] = {{ort::kFloat},
                                          {ort::kFloat},
                                          {ort::kUint8},
                                          {ort::kUint8},
                                          {ort::kFloat, ort::kOptional},
                                          {ort::kFloat, ort::kOptional},
                                          {ort::kFloat, ort::kOptional},
                                          {ort::kFloat, ort::kOptional}};
  static constexpr ort::Port kOutputs[] = {{ort::kFloat}};

  Experts(const ort::Api& api, const ort::KernelInfo* info)
      : features_(bounded_attribute(api, info, "in_features", 1, kMaxFeatures)),
        intermediate_(bounded_attribute(api, info, "intermediate", 1, kMaxFeatures / 2)),
        gate_up_{LinearFormat(api, info, features_, 2 * intermediate_, "gate_up_"), true,
                 activation_attributes(api, info, true), 1.0f},
        down_{LinearFormat(api, info, intermediate_, features_, "down_"), false, {}, 1.0f},
        gate_up_weight_(api, info, 2),
        down_weight_(api, info, 3),
        gate_up_bias_(api, info, 4),
        down_bias_(api, info, 5),
        norm_(api, info, 6),
        epsilon_(bounded_float_attribute(api, info, "epsilon", 0.0f, 1.0f, 1e-5f)),
        output_scale_(output_scale_attribute(api, info)) {
    routing_.experts = bounded_attribute(api, info, "num_experts", 1, kMaxExperts);
    routing_.top_k = bounded_attribute(api, info, "top_k", 1, static_cast<int64_t>(routing_.experts));
    routing_.over_all = weights_over_all(api, info);
    if (intermediate_ % kTileColumns != 0) {
      throw std::invalid_argument("intermediate is " + std::to_string(intermediate_) +
                                  ", expected a multiple of 16, whole tiles");
    }
  }

  void compute(const ort::Context& context) const {
    ExpertsTensors tensors = checked_tensors(context);
    const ort::Tensor input = context.input(0);
    auto* out = static_cast<float*>(context.output(0, input.dims, 2));
    const auto total = static_cast<size_t>(input.dims[0]), size = static_cast<size_t>(features_);
    const size_t most = std::clamp<size_t>(kMaxAssignments / routing_.top_k, 1, kMaxRows);
    for (size_t row = 0; row < total; row += most) {
      const size_t rows = std::min(most, total - row);
      run(tensors, rows, out + row * size, context.parallel_for());
      tensors.input += rows * size;
      tensors.logits += rows * routing_.experts;
      if (tensors.residual) tensors.residual += rows * size;
    }
  }

 private:
  struct Weights {  // of all experts, one after another
    const uint8_t* packed;
    const float* bias;  // or null
  };

  ExpertsTensors checked_tensors(const ort::Context& context) const {
    const ort::Tensor input = context.input(0), logits = context.input(1), residual = context.input(7);
    const ort::Tensor gate_up_bias = gate_up_bias_.get(context), down_bias = down_bias_.get(context);
    const ort::Tensor norm = norm_.get(context);
    const auto experts = static_cast<int64_t>(routing_.experts);
    ort::expect_shape(input, "input", {-1, features_});
    ort::expect_shape(logits, "router_logits", {input.dims[0], experts});
    if (gate_up_bias.present) ort::expect_shape(gate_up_bias, "gate_up_bias", {experts, 2 * intermediate_});
    if (down_bias.present) ort::expect_shape(down_bias, "down_bias", {experts, features_});
    if (norm.present) ort::expect_shape(norm, "norm_weight", {features_});
    if (residual.present) ort::expect_shape(residual, "residual", {input.dims[0], features_});
    return {input.as<const float>(),
            logits.as<const float>(),
            gate_up_bias.as<const float>(),
            down_bias.as<const float>(),
            norm.as<const float>(),
            residual.as<const float>(),
            packed_weight(gate_up_weight_.get(context), gate_up_.format, "gate_up", routing_.experts),
            packed_weight(down_weight_.get(context), down_.format, "down", routing_.experts)};
  }

  // Some rows, from the routing to the sum.
  void run(const ExpertsTensors& tensors, size_t rows, float* out, const ParallelFor& parallel_for) const {
    thread_local ExpertGroups thread_groups;
    ExpertGroups& groups = thread_groups;  // the work items run on other threads
    groups.group(tensors.logits, rows, routing_, parallel_for);
    const size_t count = groups.row.size(), row_bytes = gate_up_.ready_row_bytes();
    const Norm norm{tensors.norm_weight, epsilon_}, no_norm{};
    const auto memory = thread_scratch_pieces({bytes_to_make_ready(gate_up_, rows, norm), count * row_bytes,
                                               count * gate_up_.columns() * sizeof(float),
                                               bytes_to_make_ready(down_, count, no_norm),
                                               count * down_.columns() * sizeof(float)});
    const void* ready = make_ready(gate_up_, tensors.input, rows, norm, memory[0], parallel_for);
    gather(groups, static_cast<const uint8_t*>(ready), row_bytes, memory[1], parallel_for);
    auto *hidden = reinterpret_cast<float*>(memory[2]), *results = reinterpret_cast<float*>(memory[4]);
    apply(gate_up_, {tensors.gate_up, tensors.gate_up_bias}, groups, memory[1], hidden, parallel_for);
    ready = make_ready(down_, hidden, count, no_norm, memory[3], parallel_for);
    apply(down_, {tensors.down, tensors.down_bias}, groups, ready, results, parallel_for);
    sum(groups, results, tensors.residual, rows, out, parallel_for);
  }

  // Copies each assignment's row to its place in `out`.
  static void gather(const ExpertGroups& groups, const uint8_t* ready, size_t row_bytes, uint8_t* out,
                     const ParallelFor& parallel_for) {
    const size_t count = groups.row.size();
    for_each_range(parallel_for, count, count / kRowsPerWorkItem, [&](size_t first, size_t last) {
      for (size_t a = first; a < last; ++a) {
        std::memcpy(out + a * row_bytes, ready + groups.row[a] * row_bytes, row_bytes);
      }
    });
  }

  // Every expert's layer over its assignments, to out [assignments, columns].
  void apply(const LinearLayer& layer, const Weights& weights, const ExpertGroups& groups, const void* ready,
             float* out, const ParallelFor& parallel_for) const {
    thread_local std::vector<LinearTask> thread_tasks;
    std::vector<LinearTask>& tasks = thread_tasks;
    tasks.clear();
    for (size_t e = 0; e < routing_.experts; ++e) {
      const size_t first = groups.begin[e], rows = groups.begin[e + 1] - first;
      if (rows == 0) continue;
      const float* bias = weights.bias ? weights.bias + e * layer.format.out_features : nullptr;
      LinearTask task = layer.task(weights.packed + e * layer.format.packed_bytes(), bias);
      set_rows(task, static_cast<const uint8_t*>(ready) + first * layer.ready_row_bytes(), rows);
      task.out = out + first * task.columns;
      tasks.push_back(task);
    }
    multiply(tasks.data(), tasks.size(), kPartsPerExpert, parallel_for);
  }

  // A row's experts are added in ascending order.
  void sum(const ExpertGroups& groups, const float* outputs, const float* residual, size_t rows, float* out,
           const ParallelFor& parallel_for) const {
    const auto size = static_cast<size_t>(features_);
    for_each_range(parallel_for, rows, rows / kRowsPerWorkItem, [&](size_t first, size_t last) {
      for (size_t r = first; r < last; ++r) {
        float* y = out + r * size;
        std::fill_n(y, size, 0.0f);
        for (size_t k = r * routing_.top_k; k < (r + 1) * routing_.top_k; ++k) {
          const float* x = outputs + groups.assignment[k] * size;
          const float weight = groups.choices[k].weight;
          for (size_t i = 0; i < size; ++i) y[i] += weight * x[i];
        }
        for (size_t i = 0; i < size; ++i) y[i] = output_scale_ * y[i] + (residual ? residual[r * size + i] : 0.0f);
      }
    });
  }

  int64_t features_, intermediate_;
  LinearLayer gate_up_, down_;
  ort::ConstantInput gate_up_weight_, down_weight_, gate_up_bias_, down_bias_, norm_;
  float epsilon_, output_scale_;
  Routing routing_;
};

}  // namespace

const ort::CustomOp* experts() { return ort::OpTable<Experts>::get(); }

}  // namespace pagelet
