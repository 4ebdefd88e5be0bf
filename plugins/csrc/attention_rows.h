// The rows of one item: which keys they see, where their queries and outputs lie, and the thread's memory for
// them. Included by attention_kernel.cc only.
#pragma once

#include "attention.h"
#include "attention_heads.h"
#include "attention_tiles.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

// Where the parts of a thread's scratch memory begin.
struct Scratch {
  float* query;      // groups of rows: [head_size in lane order][rows of the group]; see pack_queries
  float* scores;     // [kRowBlock][kScoreStride]
  float* part;       // [kRowBlock] states of one partition
  float* total;      // [kRowBlock] states of all partitions so far
  float* keys;       // [panels of a tile][head_size in lane order][kPanelKeys]
  float* converted;  // [keys of a tile][head_size], for caches that are not float
};

PAGELET_INLINE int64_t state_floats(const AttentionArgs& args) {
  return args.head_size + int64_t(kStateTail);
}

// A tile of keys fills half of a 32 KiB L1 cache.
PAGELET_INLINE int64_t tile_keys(const AttentionArgs& args) {
  return max_of(kPanelKeys, min_of(kPartitionKeys, 4096 / args.head_size / kPanelKeys * kPanelKeys));
}

PAGELET_INLINE Scratch divide(const AttentionArgs& args, float* memory) {
  Scratch s;
  s.query = memory;
  s.scores = s.query + kRowBlock * args.head_size;
  s.part = s.scores + kRowBlock * kScoreStride;
  s.total = s.part + kRowBlock * state_floats(args);
  s.keys = s.total + kRowBlock * state_floats(args);
  s.converted = s.keys + tile_keys(args) * args.head_size;
  return s;
}

size_t scratch_floats(const AttentionArgs& args) {
  const Scratch s = divide(args, nullptr);
  return size_t(s.converted - s.query) + size_t(tile_keys(args) * args.head_size);
}

// The rows of one item, and which keys they see.
struct Rows {
  const AttentionArgs& args;
  const AttentionItem& item;
  int64_t count;
  int64_t position[kRowBlock];  // of the row's token in its sequence; in a tree, on its path
  const float* query[kRowBlock];
  float* output[kRowBlock];
  int64_t token[kRowBlock];  // in the batch
  int64_t head[kRowBlock];   // of the query

  Rows(const AttentionArgs& the_args, const AttentionItem& the_item)
      : args(the_args), item(the_item), count(item.row_end - item.row_begin) {
    const int64_t group = args.num_heads / args.kv_num_heads;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t index = (item.row_begin + row) / group;
      head[row] = item.kv_head * group + (item.row_begin + row) % group;
      position[row] = args.past_seqlens[item.sequence] + index - item.unseen;
      token[row] = args.cumulative_sequence_length[item.sequence] + index;
      query[row] = args.query + token[row] * int64_t(args.query_stride) + head[row] * args.head_size;
      output[row] = args.output + (token[row] * args.num_heads + head[row]) * args.head_size;
    }
  }

  // Keys of a partition, relative to its first.
  Range visible(int64_t row, int64_t partition) const {
    const int64_t base = partition * kPartitionKeys;
    const int64_t begin = args.window > 0 ? max_of(0, position[row] - args.window + 1) : 0;
    return {max_of(begin - base, 0), min_of(position[row] + 1 - base, kPartitionKeys)};
  }

  // Too few rows to lay out keys for them: the rows read the caches as they are.
  bool direct() const { return count <= kDirectRows; }

  // What the rows [first, last] see together: tokens ascend, so windows do too.
  Range visible_to(int64_t first, int64_t last, int64_t partition) const {
    return {visible(first, partition).begin, visible(last, partition).end};
  }
};

template <typename Element>
PAGELET_INLINE void prefetch_row(const Element* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / int64_t(sizeof(Element))) prefetch(row + i);
}

// Norms, rotates and scales the query rows and lays them out for score_panel, or, if they are few, for score_keys.
void pack_queries(const Rows& rows, float* packed) {
  const AttentionArgs& args = rows.args;
  const int64_t size = args.head_size, chain = size / kWidth;
  for (int64_t row = 0; row < rows.count; ++row) {
    float x[kMaxHeadSize];
    memcpy(x, rows.query[row], size_t(size) * sizeof(float));
    if (row + kGroupRows < rows.count) prefetch_row(rows.query[row + kGroupRows], size);
    prepare_head(args, rows.token[row], args.q_norm_weight, x);
    if (rows.direct()) {
      for (int64_t i = 0; i < size; ++i) packed[row * size + i] = x[i] * args.scale;
      continue;
    }
    const int64_t group_begin = row / kGroupRows * kGroupRows;
    const int64_t group_rows = min_of(kGroupRows, rows.count - group_begin);
    float* out = packed + group_begin * size + row % kGroupRows;
    for (int lane = 0; lane < kWidth; ++lane) {
      float* to = out + lane_rank(lane) * chain * group_rows;
      for (int64_t i = 0; i < chain; ++i) to[i * group_rows] = x[i * kWidth + lane] * args.scale;
    }
  }
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
