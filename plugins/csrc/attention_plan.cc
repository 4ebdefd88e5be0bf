#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>

#include "attention_tree.h"

namespace pagelet {
namespace {

constexpr int64_t kSmallestBlock = 12;  // rows, where a step is too small to keep every thread busy

constexpr size_t kMostPartials = 4 << 20;  // floats: 16 MiB

// A few per thread. The host does not say how many threads it has: this is an upper bound.
int64_t enough_items() {
  static const int64_t items = 4 * std::clamp<int64_t>(std::thread::hardware_concurrency(), 2, 16);
  return items;
}

[[noreturn]] void refuse(const char* input, int64_t index, int64_t found, const std::string& expected) {
  throw std::invalid_argument("PagedAttention: " + std::string(input) + "[" + std::to_string(index) +
                              "] is " + std::to_string(found) + ", expected " + expected);
}

std::string between(int64_t low, int64_t high) {
  return "at least " + std::to_string(low) + " and less than " + std::to_string(high);
}

int64_t length(const AttentionArgs& args, int64_t sequence) {
  return int64_t{args.cumulative_sequence_length[sequence + 1]} - args.cumulative_sequence_length[sequence];
}

// The first key that the row at `position` sees.
int64_t first_visible(const AttentionArgs& args, int64_t position) {
  return args.window > 0 ? std::max<int64_t>(0, position - args.window + 1) : 0;
}

void check_lengths(const AttentionArgs& args) {
  const int32_t* cumulative = args.cumulative_sequence_length;
  if (cumulative[0] != 0) refuse("cumulative_sequence_length", 0, cumulative[0], "0");
  for (int64_t s = 0; s < args.sequences; ++s) {
    if (cumulative[s + 1] < cumulative[s]) {
      refuse("cumulative_sequence_length", s + 1, cumulative[s + 1],
             "at least its predecessor " + std::to_string(cumulative[s]));
    }
  }
  if (cumulative[args.sequences] != args.tokens) {
    refuse("cumulative_sequence_length", args.sequences, cumulative[args.sequences],
           "the number of tokens, " + std::to_string(args.tokens));
  }
}

void check_blocks(const AttentionArgs& args, int64_t sequence) {
  const int64_t past = args.past_seqlens[sequence], total = past + length(args, sequence);
  const int64_t capacity = args.max_blocks * args.block_size;
  if (past < 0) refuse("past_seqlens", sequence, past, "at least 0");
  if (total > capacity) {
    refuse("past_seqlens", sequence, past,
           "with its " + std::to_string(total - past) + " new tokens at most " + std::to_string(capacity) +
               " (max_blocks * block_size)");
  }
  if (total == past) return;
  const int64_t end = (total + args.block_size - 1) / args.block_size;
  for (int64_t i = first_visible(args, past) / args.block_size; i < end; ++i) {
    const int64_t at = sequence * args.max_blocks + i, block = args.block_table[at];
    if (block < 0 || block >= args.blocks) {
      refuse("block_table", at, block,
             between(0, args.blocks) + " (sequence " + std::to_string(sequence) + " needs its block " +
                 std::to_string(i) + ")");
    }
  }
}

void fill_slots(const AttentionArgs& args, std::vector<int64_t>& slots) {
  slots.clear();
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int32_t* table = args.block_table + s * args.max_blocks;
    const int64_t past = args.past_seqlens[s], total = past + length(args, s);
    for (int64_t position = past; position < total; ++position) {
      slots.push_back(table[position / args.block_size] * args.block_size + position % args.block_size);
    }
  }
}

// Rows per item: large blocks share each key more often, small ones keep the threads busy in a small step.
int64_t block_rows(const AttentionArgs& args) {
  const int64_t rows = args.tokens * args.num_heads;
  const int64_t wanted = (rows / enough_items() + 5) / 6 * 6;  // whole groups of the kernel's six rows
  return std::clamp<int64_t>(wanted, kSmallestBlock, kRowBlock);
}

// One item per block of a branch's rows. Later rows see more keys, so they come first.
void add_items(const AttentionArgs& args, int64_t sequence, const Branch& branch, int64_t block,
               std::vector<AttentionItem>& items) {
  const int64_t group = args.num_heads / args.kv_num_heads;
  const int64_t front = branch.begin * group, rows = branch.end * group - front;
  const int64_t past = args.past_seqlens[sequence] - branch.unseen;  // of what these rows see
  for (int64_t begin = front + (rows - 1) / block * block; begin >= front; begin -= block) {
    const int64_t end = std::min(front + rows, begin + block);
    const int64_t first = first_visible(args, past + begin / group) / kPartitionKeys;
    const int64_t last = (past + (end - 1) / group) / kPartitionKeys, count = last + 1 - first;
    for (int64_t head = 0; head < args.kv_num_heads; ++head) {
      items.push_back({sequence, head, begin, end, first, last + 1, nullptr, first, count, -1, branch.unseen,
                       branch.path});
    }
  }
}

// Spreads each item's partitions over several items, so that a few long sequences still use every thread.
void split_items(const AttentionArgs& args, AttentionPlan& plan) {
  const int64_t pieces = (enough_items() + int64_t(plan.items.size()) - 1) / int64_t(plan.items.size());
  size_t floats = 0;
  const size_t state = size_t(args.head_size) + kStateTail;
  for (const AttentionItem& item : plan.items) {
    floats += size_t((item.row_end - item.row_begin) * item.partition_count) * state;
  }
  if (floats > kMostPartials) return;
  plan.merges.swap(plan.items);
  plan.items.clear();
  if (plan.partials.size() < floats) plan.partials.resize(floats);
  if (plan.unfinished_size < plan.merges.size()) {
    plan.unfinished = std::make_unique<std::atomic<int>[]>(plan.merges.size());
    plan.unfinished_size = plan.merges.size();
  }
  float* partials = plan.partials.data();
  for (size_t merge = 0; merge < plan.merges.size(); ++merge) {
    AttentionItem& item = plan.merges[merge];
    item.partials = partials;
    partials += size_t((item.row_end - item.row_begin) * item.partition_count) * state;
    const int64_t step = (item.partition_count + pieces - 1) / pieces;
    item.merge = int64_t(merge);
    plan.unfinished[merge] = int((item.partition_count + step - 1) / step);
    for (int64_t begin = item.partition_begin; begin < item.partition_end; begin += step) {
      plan.items.push_back(item);
      plan.items.back().partition_begin = begin;
      plan.items.back().partition_end = std::min(item.partition_end, begin + step);
    }
  }
}

}  // namespace

void check_indices(const AttentionArgs& args) {
  check_lengths(args);
  for (int64_t s = 0; s < args.sequences; ++s) check_blocks(args, s);
  for (int64_t s = 0; args.ancestor_mask && s < args.sequences; ++s) check_tree(args, s);
  for (int64_t t = 0; args.position_ids && t < args.tokens; ++t) {
    const int64_t position = args.position_ids[t];
    if (position < 0 || position >= args.max_positions) {
      refuse("position_ids", t, position, between(0, args.max_positions) + " (rows of cos_cache)");
    }
  }
}

void make_plan(const AttentionArgs& args, AttentionPlan& plan) {
  fill_slots(args, plan.slots);
  plan.items.clear();
  plan.merges.clear();
  const int64_t block = block_rows(args);
  int64_t partitions = 0;
  for (int64_t s = 0; s < args.sequences; ++s) {
    for (int64_t row = 0; row < length(args, s);) {
      const Branch branch = branch_from(args, s, row);
      add_items(args, s, branch, block, plan.items);
      row = branch.end;
    }
  }
  for (const AttentionItem& item : plan.items) partitions = std::max(partitions, item.partition_count);
  if (partitions > 1 && int64_t(plan.items.size()) < enough_items()) split_items(args, plan);
}

}  // namespace pagelet
