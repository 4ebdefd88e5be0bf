// Paged attention over a ragged batch: what the kernels are given, and what they offer. Nothing here knows
// the host. The order of the arithmetic, which makes a row's bits independent of everything beside it, is
// described in attention_kernel.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagelet {

constexpr int kPartitionKeys = 256;  // keys are reduced in partitions of this many, at absolute positions
constexpr int kMaxHeadSize = 512;
constexpr int kRowBlock = 144;  // most rows (a row = a token and a query head) in one item

struct AttentionArgs {
  // Row t is at pointer + t * stride. `key` and `value` hold the new tokens only; where `reads_only`, they are
  // null, and another layer has written these tokens into the caches.
  const float* query;
  const float* key;
  const float* value;
  size_t query_stride, key_value_stride;

  void* key_cache;  // [blocks, block_size, kv_heads, head_size]
  void* value_cache;
  float* key_scale_cache;  // [blocks, block_size, kv_heads]: of scaled caches, else null
  float* value_scale_cache;
  const int32_t* cumulative_sequence_length;  // [sequences + 1]
  const int32_t* past_seqlens;                // [sequences]
  const int32_t* block_table;                 // [sequences, max_blocks]

  const float* cos_cache;  // [max_positions, rotary_dim / 2], or null: no rotation
  const float* sin_cache;
  const int64_t* position_ids;  // [tokens]

  const int32_t* ancestor_mask;  // [tokens, mask_words], or null: no trees (see attention_tree.h)

  const float* q_norm_weight;  // [head_size], of every query head's RMSNorm, or null: no norm
  const float* k_norm_weight;  // the same of key heads
  const float* head_sink;      // [num_heads]: a logit that takes part in the softmax and has no value; or null

  float* output;  // [tokens, num_heads * head_size]

  int64_t tokens, sequences, blocks, block_size, max_blocks, max_positions, mask_words;
  int64_t num_heads, kv_num_heads, head_size, rotary_dim;
  int64_t window;  // keys that a row sees, itself included; 0: all
  float scale;
  float softcap;  // 0: none
  float norm_epsilon;
  bool rotary_interleaved;
  bool norm_after_rotation;  // else before it
  bool norm_values;          // RMSNorm without a weight
  bool reads_only;
};

// Rows [row_begin, row_end) of one sequence and one KV head, where row = token * (query heads per KV head) +
// head, over some of the partitions that these rows see. In a tree the rows are of one branch.
struct AttentionItem {
  int64_t sequence, kv_head;
  int64_t row_begin, row_end;
  int64_t partition_begin, partition_end;
  // Null: the item covers all partitions and writes the output. Else one state per row and partition,
  // [row_end - row_begin, partition_count, state_floats], for `merge`.
  float* partials;
  int64_t first_partition, partition_count;
  int64_t merge;  // the merge that waits for this item, or -1
  int64_t unseen;  // earlier tokens of the step and sequence that these rows do not see
  uint64_t path;   // where there are such: bit i says that token i is on the branch's path
};

// A state: accumulator [head_size], maximum, sum; padded to whole cache lines.
constexpr size_t kStateTail = 16;

struct AttentionKernel {
  int vector_width;  // floats; must divide the head size
  size_t (*scratch_floats)(const AttentionArgs&);
  // Norms and rotates the keys of tokens [begin, end) and writes keys and values to their slots (block *
  // block_size + offset) in the caches, with their scales.
  void (*write_cache)(const AttentionArgs&, const int64_t* slots, int64_t begin, int64_t end);
  void (*attend)(const AttentionArgs&, const AttentionItem&, float* scratch);
  void (*merge)(const AttentionArgs&, const AttentionItem&, float* scratch);
};

}  // namespace pagelet
