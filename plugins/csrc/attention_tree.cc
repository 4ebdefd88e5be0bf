#include "attention_tree.h"

#include <bitset>
#include <stdexcept>
#include <string>

namespace pagelet {
namespace {

constexpr int64_t kWordBits = 32;

// The rows of one sequence, and their words of the mask.
struct Tree {
  Tree(const AttentionArgs& args, int64_t the_sequence)
      : sequence(the_sequence),
        rows(int64_t{args.cumulative_sequence_length[sequence + 1]} - args.cumulative_sequence_length[sequence]),
        words(args.mask_words),
        mask(args.ancestor_mask + args.cumulative_sequence_length[sequence] * words) {}

  static uint32_t bit(int64_t row, int64_t word) {
    return row / kWordBits == word ? uint32_t{1} << row % kWordBits : 0;
  }

  // The row itself is not among them: its own bit says nothing.
  uint32_t ancestors(int64_t row, int64_t word) const {
    return uint32_t(mask[row * words + word]) & ~bit(row, word);
  }

  int64_t last_ancestor(int64_t row) const {  // or -1
    for (int64_t word = words - 1; word >= 0; --word) {
      const uint32_t bits = ancestors(row, word);
      for (int64_t i = kWordBits - 1; bits != 0 && i >= 0; --i) {
        if (bits >> i & 1) return word * kWordBits + i;
      }
    }
    return -1;
  }

  bool descends_from(int64_t row, int64_t parent) const {
    for (int64_t word = 0; word < words; ++word) {
      const uint32_t expected = parent < 0 ? 0 : ancestors(parent, word) | bit(parent, word);
      if (ancestors(row, word) != expected) return false;
    }
    return true;
  }

  // Of at most kMaxTreeRows rows: the ancestors and the row itself.
  uint64_t path(int64_t row) const {
    uint64_t bits = uint64_t{1} << row;
    for (int64_t word = 0; word * kWordBits < rows; ++word) {
      bits |= uint64_t{ancestors(row, word)} << word * kWordBits;
    }
    return bits;
  }

  [[noreturn]] void refuse(int64_t row, int64_t parent, const std::string& expected) const {
    throw std::invalid_argument("PagedAttention: ancestor_mask says that row " + std::to_string(row) +
                                " of sequence " + std::to_string(sequence) + " descends from " +
                                (parent < 0 ? "none" : "row " + std::to_string(parent)) + ", expected " +
                                expected);
  }

  int64_t sequence, rows, words;
  const int32_t* mask;
};

}  // namespace

void check_tree(const AttentionArgs& args, int64_t sequence) {
  const Tree tree(args, sequence);
  if (tree.rows > tree.words * kWordBits) {
    throw std::invalid_argument("PagedAttention: ancestor_mask has " + std::to_string(tree.words) +
                                " words of 32 bits for each row, expected a bit for each of the " +
                                std::to_string(tree.rows) + " rows of sequence " + std::to_string(sequence));
  }
  for (int64_t row = 0; row < tree.rows; ++row) {
    const int64_t parent = tree.last_ancestor(row);
    if (parent > row) tree.refuse(row, parent, "rows before it");
    if (!tree.descends_from(row, parent)) {
      tree.refuse(row, parent, "all ancestors of that row too, and no others");
    }
    if (tree.rows > kMaxTreeRows && parent != row - 1) {
      tree.refuse(row, parent, "the row before it: of the sequence's " + std::to_string(tree.rows) +
                                   " rows a tree may have " + std::to_string(kMaxTreeRows));
    }
  }
}

Branch branch_from(const AttentionArgs& args, int64_t sequence, int64_t begin) {
  const Tree tree(args, sequence);
  if (!args.ancestor_mask || tree.rows > kMaxTreeRows) return {begin, tree.rows, 0, 0};
  Branch branch = {begin, begin + 1, tree.path(begin), 0};
  branch.unseen = begin + 1 - int64_t(std::bitset<64>(branch.path).count());
  while (branch.end < tree.rows && tree.last_ancestor(branch.end) == branch.end - 1) {
    branch.path |= uint64_t{1} << branch.end++;
  }
  return branch;
}

}  // namespace pagelet
