#include "expert_groups.h"

#include "isa.h"
#include "linear_layer.h"

namespace pagelet {

PAGELET_DECLARE_KERNEL(RoutingKernel, routing_kernel)

namespace {

constexpr size_t kRowsPerWorkItem = 16;  // routed in some microseconds

}  // namespace

void ExpertGroups::group(const float* logits, size_t rows, const Routing& routing, const ParallelFor& parallel_for) {
  static const RoutingKernel& kernel = PAGELET_KERNEL(RoutingKernel, routing_kernel, selected_isa());
  const size_t count = rows * routing.top_k;
  choices.resize(count);
  assignment.resize(count);
  row.resize(count);
  for_each_range(parallel_for, rows, rows / kRowsPerWorkItem, [&](size_t first, size_t last) {
    for (size_t r = first; r < last; ++r) {
      kernel.route(logits + r * routing.experts, routing, choices.data() + r * routing.top_k);
    }
  });
  begin.assign(routing.experts + 1, 0);
  for (const Choice& choice : choices) ++begin[choice.expert + 1];
  for (size_t e = 0; e < routing.experts; ++e) begin[e + 1] += begin[e];
  // Filling the groups moves each begin to its end, which is the next one's begin.
  for (size_t i = 0; i < count; ++i) {
    assignment[i] = begin[choices[i].expert]++;
    row[assignment[i]] = static_cast<uint32_t>(i / routing.top_k);
  }
  begin.insert(begin.begin(), 0);
  begin.pop_back();
}

}  // namespace pagelet
