// States of rows (see attention.h): partitions are merged, then the sink, then a state becomes a row of the output.
// Included by attention_kernel.cc only.
#pragma once

#include "attention_rows.h"

namespace pagelet::PAGELET_ISA {
namespace {

// total := total merged with the state of the next partition.
void merge_state(int64_t head_size, const float* part, bool first, float* total) {
  const float old_top = first ? part[head_size] : total[head_size], part_top = part[head_size];
  const float top = old_top > part_top ? old_top : part_top;
  const Vec scale_part = exp(sub(set1(part_top), set1(top)));
  const Vec scale_old = exp(sub(set1(old_top), set1(top)));
  if (first) {
    for (int64_t d = 0; d < head_size + 2; ++d) total[d] = part[d];
    return;
  }
  for (int64_t d = 0; d < head_size; d += kWidth) {
    store(total + d, fmadd(load(part + d), scale_part, mul(load(total + d), scale_old)));
  }
  const Vec sum = fmadd(set1(part[head_size + 1]), scale_part, mul(set1(total[head_size + 1]), scale_old));
  total[head_size] = top;
  total[head_size + 1] = reduce_max(sum);
}

void merge_partition(const Rows& rows, int64_t partition, const float* states, int64_t state_stride,
                     float* totals) {
  const AttentionArgs& args = rows.args;
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.visible(row, partition).empty()) continue;
    const bool first = partition == rows.item.first_partition || rows.visible(row, partition - 1).empty();
    merge_state(args.head_size, states + row * state_stride, first, totals + row * state_floats(args));
  }
}

// total := total merged with a state that has a maximum and a sum of 1, but no values.
void merge_sink(int64_t head_size, float sink, float* total) {
  const float old_top = total[head_size], top = old_top > sink ? old_top : sink;
  const Vec weight = exp(sub(set1(sink), set1(top))), scale_old = exp(sub(set1(old_top), set1(top)));
  for (int64_t d = 0; d < head_size; d += kWidth) store(total + d, mul(load(total + d), scale_old));
  total[head_size] = top;
  total[head_size + 1] = reduce_max(fmadd(set1(total[head_size + 1]), scale_old, weight));
}

void write_output(const Rows& rows, float* totals) {
  const AttentionArgs& args = rows.args;
  for (int64_t row = 0; row < rows.count; ++row) {
    float* total = totals + row * state_floats(args);
    if (args.head_sink) merge_sink(args.head_size, args.head_sink[rows.head[row]], total);
    const Vec sum = set1(total[args.head_size + 1]);
    for (int64_t d = 0; d < args.head_size; d += kWidth)
      store(rows.output[row] + d, div(load(total + d), sum));
  }
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
