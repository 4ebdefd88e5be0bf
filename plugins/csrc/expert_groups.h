// The rows of a batch, grouped by the experts that they go to. Knows nothing of ONNX Runtime.
#pragma once

#include <vector>

#include "parallel.h"
#include "routing_kernel.h"

namespace pagelet {

// An assignment is one row at one of its experts; they stand in ascending order of expert, then of row.
struct ExpertGroups {
  std::vector<Choice> choices;       // [rows, top_k], a row's ascending by expert
  std::vector<uint32_t> assignment;  // [rows, top_k]: of that choice
  std::vector<uint32_t> row;         // [assignments]
  std::vector<uint32_t> begin;       // [experts + 1]: an expert's first assignment

  // From logits [rows, experts]. Keeps its memory from call to call.
  void group(const float* logits, size_t rows, const Routing& routing, const ParallelFor& parallel_for);
};

}  // namespace pagelet
