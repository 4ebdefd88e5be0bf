// Trees of drafted tokens: which rows of its own sequence and step a row sees, as `ancestor_mask` says.
#pragma once

#include "attention.h"

namespace pagelet {

constexpr int64_t kMaxTreeRows = 64;  // the bits of a path

// Rows [begin, end) of a sequence, each the child of the one before: what they see is one path.
struct Branch {
  int64_t begin, end;
  uint64_t path;   // bit i: row i of the sequence is on the path to the last row, which is on it too
  int64_t unseen;  // rows before `begin` that are not on the path; where there are none, `path` says nothing new
};

// Throws std::invalid_argument unless the sequence's rows form a tree: a row descends from its last ancestor
// and from that row's ancestors, and from no other. A chain may have more than kMaxTreeRows rows.
void check_tree(const AttentionArgs& args, int64_t sequence);

// The longest branch from row `begin` on, which is the end of another branch or 0. Without trees: all rows.
Branch branch_from(const AttentionArgs& args, int64_t sequence, int64_t begin);

}  // namespace pagelet
