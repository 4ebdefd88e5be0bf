// Compiled once per instruction set. Sums run in ascending order of the experts.
#include "routing_kernel.h"

#include <math.h>

#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

// e^(logit - largest) [experts], in a buffer that is filled up to whole vectors.
void exponentials(const float* logits, size_t experts, float* out) {
  float largest = -INFINITY;
  for (size_t i = 0; i < experts; ++i) largest = logits[i] > largest ? logits[i] : largest;
  for (size_t i = 0; i < experts; i += kWidth) {
    float lanes[kWidth] = {};
    const size_t count = experts - i < static_cast<size_t>(kWidth) ? experts - i : kWidth;
    memcpy(lanes, logits + i, count * sizeof(float));
    store(out + i, exp(sub(load(lanes), set1(largest))));
  }
}

// One round per choice: top_k is small.
void mark_largest(const float* logits, const Routing& routing, bool* chosen) {
  for (size_t k = 0; k < routing.top_k; ++k) {
    size_t best = routing.experts;
    for (size_t i = 0; i < routing.experts; ++i) {
      if (!chosen[i] && (best == routing.experts || logits[i] > logits[best])) best = i;
    }
    chosen[best] = true;
  }
}

void route(const float* logits, const Routing& routing, Choice* choices) {
  float exps[kMaxExperts];
  bool chosen[kMaxExperts] = {};
  exponentials(logits, routing.experts, exps);
  mark_largest(logits, routing, chosen);
  float all = 0.0f, sum = 0.0f;
  for (size_t i = 0; i < routing.experts; ++i) {
    all += exps[i];
    if (chosen[i]) sum += exps[i];
  }
  if (routing.over_all || all != all) sum = all;  // a NaN counts wherever it is
  size_t count = 0;
  for (size_t i = 0; i < routing.experts; ++i) {
    if (chosen[i]) choices[count++] = {static_cast<uint32_t>(i), exps[i] / sum};
  }
}

}  // namespace

extern const RoutingKernel routing_kernel;
const RoutingKernel routing_kernel{route};

}  // namespace pagelet::PAGELET_ISA
