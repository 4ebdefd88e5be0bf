// What the ops over linear layers share: a layer's task, its rows made ready, and its work on the host's threads.
#pragma once

#include "linear_format.h"
#include "linear_kernel.h"
#include "parallel.h"

namespace pagelet {

constexpr size_t kMaxRows = 512;  // made ready at once: bounds the scratch memory of a long prompt

const LinearKernel& selected_linear_kernel();

struct LinearLayer {
  LinearFormat format;
  bool gated;
  Activation activation;
  float output_scale;

  size_t columns() const { return format.out_features / (gated ? 2 : 1); }

  // Bytes of a ready row: of an integer weight the quantized row, of any other its floats.
  size_t ready_row_bytes() const;

  // Over packed weights and a bias (or null); the rows, where they go and the residual are still to be set.
  LinearTask task(const uint8_t* weight, const float* bias) const;
};

// Points a task at `rows` ready rows.
void set_rows(LinearTask& task, const void* ready, size_t rows);

// What make_ready needs: nothing for floats without a norm, which are ready as they stand.
size_t bytes_to_make_ready(const LinearLayer& layer, size_t rows, const Norm& norm);

// Rows [rows, in_features] as the layer's weight wants them, normed if there is a norm; returns where they are.
const void* make_ready(const LinearLayer& layer, const float* input, size_t rows, const Norm& norm, void* memory,
                       const ParallelFor& parallel_for);

// All columns of tasks over one layer's weights, in up to `parts` work items each.
void multiply(const LinearTask* tasks, size_t count, size_t parts, const ParallelFor& parallel_for);

// Splits 0..total into at most `items` equal ranges and calls body(first, last) for each, on the host's threads.
template <typename Body>
void for_each_range(const ParallelFor& parallel_for, size_t total, size_t items, const Body& body) {
  items = items > total ? total : items;
  items = items > 1 ? items : 1;
  for_each(parallel_for, items, [&](size_t i) { body(i * total / items, (i + 1) * total / items); });
}

}  // namespace pagelet
