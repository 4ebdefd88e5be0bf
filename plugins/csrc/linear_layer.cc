#include "linear_layer.h"

#include <algorithm>

#include "isa.h"

namespace pagelet {

PAGELET_DECLARE_KERNEL(LinearKernel, linear_kernel)

namespace {

constexpr size_t kInputsPerWorkItem = 1 << 14;  // normed and quantized in some microseconds

}  // namespace

const LinearKernel& selected_linear_kernel() {
  static const LinearKernel& kernel = PAGELET_KERNEL(LinearKernel, linear_kernel, selected_isa());
  return kernel;
}

size_t LinearLayer::ready_row_bytes() const {
  return is_integer(format.type) ? format.in_features / kBlockInputs * sizeof(ActivationBlock)
                                 : format.in_features * sizeof(float);
}

LinearTask LinearLayer::task(const uint8_t* weight, const float* bias) const {
  LinearTask task{};
  task.weight = weight;
  task.tile_bytes = format.tile_bytes();
  task.type = format.type;
  task.asymmetric = format.asymmetric;
  task.in_features = format.in_features;
  task.group_size = format.group_size;
  task.gated = gated;
  task.activation = activation;
  task.output_scale = output_scale;
  task.columns = columns();
  task.bias = bias;
  return task;
}

void set_rows(LinearTask& task, const void* ready, size_t rows) {
  task.rows = rows;
  if (is_integer(task.type)) {
    task.activations = static_cast<const ActivationBlock*>(ready);
  } else {
    task.input = static_cast<const float*>(ready);
  }
}

size_t bytes_to_make_ready(const LinearLayer& layer, size_t rows, const Norm& norm) {
  return is_integer(layer.format.type) || norm.weight ? rows * layer.ready_row_bytes() : 0;
}

const void* make_ready(const LinearLayer& layer, const float* input, size_t rows, const Norm& norm, void* memory,
                       const ParallelFor& parallel_for) {
  const LinearKernel& kernel = selected_linear_kernel();
  const size_t size = layer.format.in_features, blocks = size / kBlockInputs, items = rows * size / kInputsPerWorkItem;
  if (is_integer(layer.format.type)) {
    auto* activations = static_cast<ActivationBlock*>(memory);
    for_each_range(parallel_for, rows, items, [&](size_t first, size_t last) {
      for (size_t r = first; r < last; ++r) kernel.quantize(input + r * size, blocks, norm, activations + r * blocks);
    });
    return memory;
  }
  if (!norm.weight) return input;
  auto* normed = static_cast<float*>(memory);
  for_each_range(parallel_for, rows, items, [&](size_t first, size_t last) {
    for (size_t r = first; r < last; ++r) kernel.normalize(input + r * size, size, norm, normed + r * size);
  });
  return memory;
}

void multiply(const LinearTask* tasks, size_t count, size_t parts, const ParallelFor& parallel_for) {
  if (count == 0) return;
  const LinearKernel& kernel = selected_linear_kernel();
  const size_t strips = strip_count(tasks[0]);
  parts = std::min(parts, strips);
  for_each(parallel_for, count * parts, [&](size_t i) {
    const size_t part = i % parts;
    kernel.multiply(tasks[i / parts], part * strips / parts, (part + 1) * strips / parts);
  });
}

}  // namespace pagelet
