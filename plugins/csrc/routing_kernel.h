// Which experts a row goes to, and with what weights. Knows nothing of ONNX Runtime.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagelet {

constexpr size_t kMaxExperts = 1024;

struct Routing {
  size_t experts, top_k;
  bool over_all;  // weights are a softmax over all experts, and sum to less than 1; else over those chosen
};

struct Choice {
  uint32_t expert;
  float weight;
};

struct RoutingKernel {
  // The top_k largest of one row's logits [experts], of equal ones the first, ascending by expert. A row with a NaN
  // or with +infinity, or of -infinity only, has NaN weights.
  void (*route)(const float* logits, const Routing& routing, Choice* choices);
};

}  // namespace pagelet
