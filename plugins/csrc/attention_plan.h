// Checks every index of a call, and divides it into items for the threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"

namespace pagelet {

struct AttentionPlan {
  std::vector<int64_t> slots;         // [tokens]: where each new token goes, block * block_size + offset
  std::vector<AttentionItem> items;   // independent of each other
  std::vector<AttentionItem> merges;  // one per row block whose partitions are spread over items: after the last
  std::vector<float> partials;        // the states between the two
  std::unique_ptr<std::atomic<int>[]> unfinished;  // [merges]: items that are still to come
  size_t unfinished_size = 0;
};

// Throws std::invalid_argument that names the input, the place, what was found and what was expected. Reads
// O(tokens + blocks in use).
void check_indices(const AttentionArgs& args);

// Refills `plan` in place. The division changes speed, never a bit of the result. Needs checked indices.
void make_plan(const AttentionArgs& args, AttentionPlan& plan);

}  // namespace pagelet
