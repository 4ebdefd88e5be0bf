// Paged attention, compiled once per instruction set.
//
// The order of every reduction is fixed and depends on nothing but the row itself:
//   score     lane l sums the products of elements l, l + W, l + 2W, … (W: vector width), then lanes are
//   added
//             as a tree: l with l + W/2, with l + W/4, …
//   softmax   the sum of a partition: lane l sums keys l, l + W, … of the partition, then the same tree
//   values    each output element adds its keys in ascending order
//   partitions of 256 keys at absolute positions are merged in ascending order, and the head's sink after them
//   norms     see attention_heads.h
// In a scaled cache the products are those of the stored codes; a finished score is multiplied by its key's
// scale, and a weight, once it is summed, by its value's.
// Masked keys are selected away and never multiplied. Keys are transposed so that lanes are keys: the partial
// sums of a score then sit in W registers one after another, and its tree is W - 1 vertical adds. A few rows
// read the keys untransposed, with the same sums.
#include "attention.h"
#include "attention_rows.h"
#include "attention_states.h"
#include "attention_tiles.h"
#include "cache_traits.h"

namespace pagelet::PAGELET_ISA {
namespace {

int64_t token_at(const Rows& rows, int64_t position) {
  const AttentionArgs& args = rows.args;
  const int64_t at = rows.item.sequence * args.max_blocks + position / args.block_size;
  const int64_t slot = args.block_table[at] * args.block_size + position % args.block_size;
  return slot * args.kv_num_heads + rows.item.kv_head;
}

// Where the tokens of a partition lie: key and value j are at out[j] * head_size, their scales at out[j].
void find_tokens(const Rows& rows, int64_t partition, Range range, int64_t* out) {
  const AttentionArgs& args = rows.args;
  const int32_t* table = args.block_table + rows.item.sequence * args.max_blocks;
  int64_t block = (partition * kPartitionKeys + range.begin) / args.block_size;
  int64_t offset = (partition * kPartitionKeys + range.begin) % args.block_size;
  for (int64_t j = range.begin; j < range.end; ++j) {
    out[j] = (table[block] * args.block_size + offset) * args.kv_num_heads + rows.item.kv_head;
    if (++offset == args.block_size) ++block, offset = 0;
  }
}

// The same for rows of a tree: behind the past come the tokens of their path, as if no others were between.
void find_path(const Rows& rows, int64_t partition, Range range, int64_t* out) {
  const AttentionArgs& args = rows.args;
  const int64_t past = args.past_seqlens[rows.item.sequence];
  find_tokens(rows, partition, {range.begin, min_of(range.end, past - partition * kPartitionKeys)}, out);
  int64_t j = past - partition * kPartitionKeys;
  for (int64_t token = 0; j < range.end; ++token) {
    if (!(rows.item.path >> token & 1)) continue;
    if (j >= range.begin) out[j] = token_at(rows, past + token);
    ++j;
  }
}

template <typename Cache>
void gather_scales(const AttentionArgs& args, const int64_t* tokens, Range range, Scales& out) {
  for (int64_t j = range.begin; j < range.end; ++j) {
    out.key[j] = args.key_scale_cache[tokens[j]] * Cache::kUnit;
    out.value[j] = args.value_scale_cache[tokens[j]] * Cache::kUnit;
  }
}

template <typename Cache>
PAGELET_INLINE const float* copy_row(const typename Cache::Element* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += kWidth) store(to + i, Cache::load(from + i));
  return to;
}

// A row as floats: in place, or in `converted`.
template <typename Cache>
PAGELET_INLINE const float* as_floats(const typename Cache::Element* row, int64_t size, float* converted) {
  if constexpr (sizeof(typename Cache::Element) == sizeof(float)) {
    (void)size, (void)converted;
    return row;
  } else {
    return copy_row<Cache>(row, size, converted);
  }
}

// Calls body(first row, rows) for every group of up to kGroupRows rows.
template <typename Body>
PAGELET_INLINE void for_each_group(const Rows& rows, Body body) {
  for (int64_t row = 0; row < rows.count; row += kGroupRows) body(row, min_of(kGroupRows, rows.count - row));
}

template <typename Cache>
void score_directly(const Rows& rows, int64_t partition, const int64_t* tokens, const Scratch& scratch) {
  const int64_t size = rows.args.head_size;
  const auto* cache = static_cast<const typename Cache::Element*>(rows.args.key_cache);
  const auto* values = static_cast<const typename Cache::Element*>(rows.args.value_cache);
  const Range all = rows.visible_to(0, rows.count - 1, partition);
  for (int64_t j = all.begin / kWidth * kWidth; j < all.end; j += kWidth) {
    const typename Cache::Element* keys[kWidth];
    for (int k = 0; k < kWidth; ++k) {  // an unseen key's score is never looked at: any key stands in for it
      const int64_t at = max_of(all.begin, min_of(j + k, all.end - 1));
      keys[k] = cache + tokens[at] * size;
      // A head's rows lie too far apart for the machine to foresee them. The values are needed next.
      prefetch_row(cache + tokens[min_of(at + kKeysAhead, all.end - 1)] * size, size);
      prefetch_row(values + tokens[at] * size, size);
    }
    for_each_group(rows, [&](int64_t row, int64_t count) {
      kScoreKeys<Cache>[count](scratch.query + row * size, keys, size, scratch.scores + row * kScoreStride + j);
    });
  }
}

template <typename Cache>
void score_partition(const Rows& rows, int64_t partition, const int64_t* tokens, const Scratch& scratch) {
  alignas(64) static constexpr float kZeros[kMaxHeadSize] = {};
  const AttentionArgs& args = rows.args;
  const int64_t size = args.head_size, tile = tile_keys(args);
  const Range all = rows.visible_to(0, rows.count - 1, partition);
  const auto* cache = static_cast<const typename Cache::Element*>(args.key_cache);
  const float* keys[kPartitionKeys];
  for (int64_t base = all.begin / tile * tile; base < all.end; base += tile) {
    const Range here = intersect({all.begin - base, all.end - base}, {0, tile});
    const Range panels = {here.begin / kPanelKeys * kPanelKeys, round_up(here.end, kPanelKeys)};
    for (int64_t j = panels.begin; j < panels.end; ++j) {
      const bool seen = j >= here.begin && j < here.end;
      float* tile_row = scratch.converted + j * size;
      keys[j] = seen ? as_floats<Cache>(cache + tokens[base + j] * size, size, tile_row) : kZeros;
    }
    for (int64_t j = panels.begin; j < panels.end; j += kWidth) {
      pack_keys(keys + j, size, scratch.keys + j / kPanelKeys * kPanelKeys * size + j % kPanelKeys);
    }
    for_each_group(rows, [&](int64_t row, int64_t count) {
      const Range seen = rows.visible_to(row, row + count - 1, partition);
      const Range part = intersect({seen.begin - base, seen.end - base}, {0, tile});
      for (int64_t j = part.begin / kPanelKeys * kPanelKeys; j < part.end; j += kPanelKeys) {
        kScorePanel[count](scratch.query + row * size, scratch.keys + j * size, size / kWidth,
                           scratch.scores + row * kScoreStride + base + j);
      }
    });
  }
}

// The keys that all rows of a group see are added together; those that only some see, row by row.
template <typename Cache>
void add_group_values(const Rows& rows, int64_t row, int64_t count, int64_t partition, Range tile,
                      const typename Cache::Element* const* values, const float* weights, float* states,
                      int64_t state_stride) {
  const int64_t size = rows.args.head_size;
  Range seen[kGroupRows], common = tile;
  for (int64_t r = 0; r < count; ++r) {
    const Range visible = rows.visible(row + r, partition);
    seen[r] = intersect(visible, tile);
    common = intersect(common, visible);
  }
  if (common.empty()) common = {tile.end, tile.end};
  const auto add_each = [&](Range part) {
    for (int64_t r = 0; r < count; ++r) {
      kAddValues<Cache>[1](weights + r * kScoreStride, values, intersect(seen[r], part), size,
                    states + r * state_stride, state_stride);
    }
  };
  add_each({tile.begin, common.begin});
  kAddValues<Cache>[count](weights, values, common, size, states, state_stride);
  add_each({common.end, tile.end});
}

template <typename Cache>
void weigh_directly(const Rows& rows, int64_t partition, const int64_t* tokens, const Scratch& scratch,
                    float* states, int64_t state_stride) {
  const auto* cache = static_cast<const typename Cache::Element*>(rows.args.value_cache);
  const Range all = rows.visible_to(0, rows.count - 1, partition);
  const typename Cache::Element* values[kPartitionKeys];
  for (int64_t j = all.begin; j < all.end; ++j) values[j] = cache + tokens[j] * rows.args.head_size;
  for_each_group(rows, [&](int64_t row, int64_t count) {
    add_group_values<Cache>(rows, row, count, partition, all, values, scratch.scores + row * kScoreStride,
                            states + row * state_stride, state_stride);
  });
}

template <typename Cache>
void weigh_partition(const Rows& rows, int64_t partition, const int64_t* tokens, const Scratch& scratch,
                     float* states, int64_t state_stride) {
  const AttentionArgs& args = rows.args;
  const int64_t size = args.head_size, tile = tile_keys(args);
  const Range all = rows.visible_to(0, rows.count - 1, partition);
  const auto* cache = static_cast<const typename Cache::Element*>(args.value_cache);
  const float* values[kPartitionKeys];
  for (int64_t base = all.begin / tile * tile; base < all.end; base += tile) {
    const Range here = intersect({all.begin - base, all.end - base}, {0, tile});
    for (int64_t j = here.begin; j < here.end; ++j) {
      // Floats too: side by side a tile's rows stay in L1, at a power-of-two distance they would not.
      values[base + j] = copy_row<Cache>(cache + tokens[base + j] * size, size, scratch.converted + j * size);
    }
    for_each_group(rows, [&](int64_t row, int64_t count) {
      add_group_values<F32Cache>(rows, row, count, partition, {base + here.begin, base + here.end}, values,
                                 scratch.scores + row * kScoreStride, states + row * state_stride,
                                 state_stride);
    });
  }
}

// States of all rows for one partition, from empty.
template <typename Cache>
void attend_partition(const Rows& rows, int64_t partition, const Scratch& scratch, float* states,
                      int64_t state_stride) {
  const AttentionArgs& args = rows.args;
  const Range all = rows.visible_to(0, rows.count - 1, partition);
  int64_t tokens[kPartitionKeys];
  Scales scales;
  const auto find = rows.item.unseen > 0 ? find_path : find_tokens;
  find(rows, partition, all, tokens);
  if constexpr (Cache::kScaled) gather_scales<Cache>(args, tokens, all, scales);
  const auto score = rows.direct() ? score_directly<Cache> : score_partition<Cache>;
  score(rows, partition, tokens, scratch);
  for (int64_t row = 0; row < rows.count; ++row) {
    const Range range = rows.visible(row, partition);
    if (range.empty()) continue;
    float* state = states + row * state_stride;
    softmax<Cache::kScaled>(args, range, scales, scratch.scores + row * kScoreStride, state);
    for (int64_t d = 0; d < args.head_size; d += kWidth) store(state + d, set1(0.0f));
  }
  const auto weigh = rows.direct() ? weigh_directly<Cache> : weigh_partition<Cache>;
  weigh(rows, partition, tokens, scratch, states, state_stride);
}

template <typename Cache>
void attend(const AttentionArgs& args, const AttentionItem& item, float* memory) {
  const Scratch scratch = divide(args, memory);
  const Rows rows(args, item);
  pack_queries(rows, scratch.query);
  for (int64_t partition = item.partition_begin; partition < item.partition_end; ++partition) {
    if (item.partials) {
      float* states = item.partials + (partition - item.first_partition) * state_floats(args);
      attend_partition<Cache>(rows, partition, scratch, states, item.partition_count * state_floats(args));
    } else {
      attend_partition<Cache>(rows, partition, scratch, scratch.part, state_floats(args));
      merge_partition(rows, partition, scratch.part, state_floats(args), scratch.total);
    }
  }
  if (!item.partials) write_output(rows, scratch.total);
}

// Second half of an item whose partitions were spread over threads.
void merge(const AttentionArgs& args, const AttentionItem& item, float* memory) {
  const Scratch scratch = divide(args, memory);
  const Rows rows(args, item);
  for (int64_t i = 0; i < item.partition_count; ++i) {
    merge_partition(rows, item.first_partition + i, item.partials + i * state_floats(args),
                    item.partition_count * state_floats(args), scratch.total);
  }
  write_output(rows, scratch.total);
}

template <typename Cache>
void write_cache(const AttentionArgs& args, const int64_t* slots, int64_t begin, int64_t end) {
  const int64_t size = args.head_size;
  auto* key_cache = static_cast<typename Cache::Element*>(args.key_cache);
  auto* value_cache = static_cast<typename Cache::Element*>(args.value_cache);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; head < args.kv_num_heads; ++head) {
      const size_t source = size_t(token) * args.key_value_stride + size_t(head * size);
      const int64_t index = slots[token] * args.kv_num_heads + head;
      float key[kMaxHeadSize], value[kMaxHeadSize];
      memcpy(key, args.key + source, size_t(size) * sizeof(float));
      memcpy(value, args.value + source, size_t(size) * sizeof(float));
      prepare_head(args, token, args.k_norm_weight, key);
      if (args.norm_values) normalize(args, nullptr, value);
      const float key_scale = Cache::write(key_cache + index * size, size, key);
      const float value_scale = Cache::write(value_cache + index * size, size, value);
      if constexpr (Cache::kScaled) {
        args.key_scale_cache[index] = key_scale;
        args.value_scale_cache[index] = value_scale;
      }
    }
  }
}

template <typename Cache>
constexpr AttentionKernel kKernel = {kWidth, scratch_floats, write_cache<Cache>, attend<Cache>, merge};

}  // namespace

extern const AttentionKernel attention_f32, attention_f16, attention_int8, attention_fp8;
const AttentionKernel attention_f32 = kKernel<F32Cache>;
const AttentionKernel attention_f16 = kKernel<F16Cache>;
const AttentionKernel attention_int8 = kKernel<Int8Cache>;
const AttentionKernel attention_fp8 = kKernel<Fp8Cache>;

}  // namespace pagelet::PAGELET_ISA
