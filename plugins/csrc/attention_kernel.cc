// Paged attention, compiled once per instruction set.
//
// The order of every reduction is fixed and depends on nothing but the row itself:
//   score     lane l sums the products of elements l, l + W, l + 2W, … (W: vector width), then lanes are added
//             as a tree: l with l + W/2, with l + W/4, …
//   softmax   the sum of a partition: lane l sums keys l, l + W, … of the partition, then the same tree
//   values    each output element adds its keys in ascending order
//   partitions of 256 keys at absolute positions are merged in ascending order
// Masked keys are selected away and never multiplied. Keys are transposed so that lanes are keys: the partial
// sums of a score then sit in W registers one after another, and its tree is W - 1 vertical adds.
#include "attention.h"

#include "cache_traits.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

constexpr int kGroupRows = 6;           // rows that share each loaded key or value vector
constexpr int kPanelKeys = 2 * kWidth;  // keys whose scores are computed together
constexpr int kPrefetchKeys = 32;       // rows lie far apart: no hardware prefetcher finds them
constexpr int kScoreStride = kPartitionKeys + 16;  // a power of two would crowd a few sets of the L1 cache
constexpr float kInfinity = __builtin_inff();

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

PAGELET_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
PAGELET_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
PAGELET_INLINE int64_t round_up(int64_t a, int64_t step) { return (a + step - 1) / step * step; }
PAGELET_INLINE Range intersect(Range a, Range b) { return {max_of(a.begin, b.begin), min_of(a.end, b.end)}; }

// Where the parts of a thread's scratch memory begin.
struct Scratch {
  float* query;       // groups of rows: [head_size in lane order][rows of the group]
  float* scores;      // [kRowBlock][kScoreStride]
  float* part;        // [kRowBlock] states of one partition
  float* total;       // [kRowBlock] states of all partitions so far
  float* keys;        // [panels of a tile][head_size in lane order][kPanelKeys]
  float* converted;   // [keys of a tile][head_size], for caches that are not float
};

PAGELET_INLINE int64_t state_floats(const AttentionArgs& args) { return args.head_size + int64_t(kStateTail); }

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

// The place of lane l in the order that the tree consumes lanes: its bits reversed.
PAGELET_INLINE constexpr int lane_rank(int lane) {
  int rank = 0;
  for (int bit = 1; bit < kWidth; bit *= 2) rank = rank * 2 + ((lane & bit) != 0);
  return rank;
}

// Rotates the first rotary_dim elements of x, in place, as RoFormer (https://arxiv.org/abs/2104.09864), sec. 3.2.2.
void rotate(const AttentionArgs& args, int64_t token, float* __restrict x) {
  if (!args.cos_cache) return;
  const int64_t half = args.rotary_dim / 2, position = args.position_ids[token];
  const float* __restrict cosine = args.cos_cache + position * half;
  const float* __restrict sine = args.sin_cache + position * half;
  const int64_t step = args.rotary_interleaved ? 2 : 1, partner = args.rotary_interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + partner];
    x[i * step] = a * cosine[i] - b * sine[i];
    x[i * step + partner] = b * cosine[i] + a * sine[i];
  }
}

// The rows of one item, and which keys they see.
struct Rows {
  const AttentionArgs& args;
  const AttentionItem& item;
  int64_t count;
  int64_t position[kRowBlock];  // of the row's token in its sequence
  const float* query[kRowBlock];
  float* output[kRowBlock];
  int64_t token[kRowBlock];  // in the batch

  Rows(const AttentionArgs& the_args, const AttentionItem& the_item)
      : args(the_args), item(the_item), count(item.row_end - item.row_begin) {
    const int64_t group = args.num_heads / args.kv_num_heads;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t index = (item.row_begin + row) / group;
      const int64_t head = item.kv_head * group + (item.row_begin + row) % group;
      position[row] = args.past_seqlens[item.sequence] + index;
      token[row] = args.cumulative_sequence_length[item.sequence] + index;
      query[row] = args.query + token[row] * int64_t(args.query_stride) + head * args.head_size;
      output[row] = args.output + (token[row] * args.num_heads + head) * args.head_size;
    }
  }

  // Keys of a partition, relative to its first.
  Range visible(int64_t row, int64_t partition) const {
    const int64_t base = partition * kPartitionKeys;
    const int64_t begin = args.window > 0 ? max_of(0, position[row] - args.window + 1) : 0;
    return {max_of(begin - base, 0), min_of(position[row] + 1 - base, kPartitionKeys)};
  }

  // What the rows [first, last] see together: tokens ascend, so windows do too.
  Range visible_to(int64_t first, int64_t last, int64_t partition) const {
    return {visible(first, partition).begin, visible(last, partition).end};
  }
};

template <typename Element>
PAGELET_INLINE void prefetch_row(const Element* row, int64_t size) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < size * int64_t(sizeof(Element)); i += 64) prefetch(bytes + i);
}

// Rotates and scales the query rows and lays them out for score_panel.
void pack_queries(const Rows& rows, float* packed) {
  const AttentionArgs& args = rows.args;
  const int64_t size = args.head_size, chain = size / kWidth;
  for (int64_t row = 0; row < rows.count; ++row) {
    float x[kMaxHeadSize];
    memcpy(x, rows.query[row], size_t(size) * sizeof(float));
    if (row + kGroupRows < rows.count) prefetch_row(rows.query[row + kGroupRows], size);
    rotate(args, rows.token[row], x);
    const int64_t group_begin = row / kGroupRows * kGroupRows;
    const int64_t group_rows = min_of(kGroupRows, rows.count - group_begin);
    float* out = packed + group_begin * size + row % kGroupRows;
    for (int lane = 0; lane < kWidth; ++lane) {
      float* to = out + lane_rank(lane) * chain * group_rows;
      for (int64_t i = 0; i < chain; ++i) to[i * group_rows] = x[i * kWidth + lane] * args.scale;
    }
  }
}

// Where the keys or values of a partition lie: out[j] for every j in `range`.
template <typename Cache>
void find_rows(const Rows& rows, const void* cache, int64_t partition, Range range,
               const typename Cache::Element** out) {
  const AttentionArgs& args = rows.args;
  const int32_t* table = args.block_table + rows.item.sequence * args.max_blocks;
  const auto* elements = static_cast<const typename Cache::Element*>(cache) + rows.item.kv_head * args.head_size;
  int64_t block = (partition * kPartitionKeys + range.begin) / args.block_size;
  int64_t offset = (partition * kPartitionKeys + range.begin) % args.block_size;
  for (int64_t j = range.begin; j < range.end; ++j) {
    out[j] = elements + (table[block] * args.block_size + offset) * args.kv_num_heads * args.head_size;
    if (++offset == args.block_size) ++block, offset = 0;
  }
}

// Transposes kWidth keys into their half of a panel, [head_size in lane order][kPanelKeys].
void pack_keys(const float* const* keys, int64_t head_size, float* panel) {
  const int64_t chain = head_size / kWidth;
  const float* rows[kWidth];
  for (int r = 0; r < kWidth; ++r) rows[r] = keys[r];
  for (int64_t i = 0; i < chain; ++i, panel += kPanelKeys) {
    for (int lane = 0; lane < kWidth; lane += 4) {
      Vec columns[4];
      load_transposed4(rows, size_t(i * kWidth + lane), columns);
      for (int k = 0; k < 4; ++k) store(panel + lane_rank(lane + k) * chain * kPanelKeys, columns[k]);
    }
  }
}

// Scores of R rows against a panel of keys.
template <int R>
void score_panel(const float* query, const float* keys, int64_t chain, float* scores) {
  Vec level[8][R][2];  // level[n]: a sum of 2^n lanes that waits for its partner
  for (int rank = 0; rank < kWidth; ++rank) {
    Vec sum[R][2];
    const Vec k0 = load(keys), k1 = load(keys + kWidth);
    PAGELET_UNROLL for (int r = 0; r < R; ++r) {
      const Vec q = set1(query[r]);
      sum[r][0] = mul(q, k0);
      sum[r][1] = mul(q, k1);
    }
    query += R;
    keys += kPanelKeys;
    for (int64_t i = 1; i < chain; ++i, query += R, keys += kPanelKeys) {
      const Vec x0 = load(keys), x1 = load(keys + kWidth);
      PAGELET_UNROLL for (int r = 0; r < R; ++r) {
        const Vec q = set1(query[r]);
        sum[r][0] = fmadd(q, x0, sum[r][0]);
        sum[r][1] = fmadd(q, x1, sum[r][1]);
      }
    }
    int n = 0;
    for (; (rank >> n) & 1; ++n) {
      PAGELET_UNROLL for (int r = 0; r < R; ++r) {
        sum[r][0] = add(level[n][r][0], sum[r][0]);
        sum[r][1] = add(level[n][r][1], sum[r][1]);
      }
    }
    PAGELET_UNROLL for (int r = 0; r < R; ++r) {
      level[n][r][0] = sum[r][0];
      level[n][r][1] = sum[r][1];
    }
  }
  constexpr int kTop = kWidth == 16 ? 4 : kWidth == 8 ? 3 : 2;
  PAGELET_UNROLL for (int r = 0; r < R; ++r) {
    store(scores + r * kScoreStride, level[kTop][r][0]);
    store(scores + r * kScoreStride + kWidth, level[kTop][r][1]);
  }
}

// Adds weights[r][j] * values[j][…] for j in `range`, ascending, to N vectors of R states.
template <int R, int N>
void add_values(const float* weights, const float* const* values, Range range, int64_t element, float* states,
                int64_t state_stride) {
  Vec sum[R][N];
  PAGELET_UNROLL for (int r = 0; r < R; ++r) {
    PAGELET_UNROLL for (int n = 0; n < N; ++n) sum[r][n] = load(states + r * state_stride + element + n * kWidth);
  }
  for (int64_t j = range.begin; j < range.end; ++j) {
    const float* value = values[j] + element;
    if constexpr (R <= N) {  // what is fewer stays in registers: with the sums it is 16 at most
      Vec weight[R];
      PAGELET_UNROLL for (int r = 0; r < R; ++r) weight[r] = set1(weights[r * kScoreStride + j]);
      PAGELET_UNROLL for (int n = 0; n < N; ++n) {
        const Vec x = load(value + n * kWidth);
        PAGELET_UNROLL for (int r = 0; r < R; ++r) sum[r][n] = fmadd(weight[r], x, sum[r][n]);
      }
    } else {
      Vec x[N];
      PAGELET_UNROLL for (int n = 0; n < N; ++n) x[n] = load(value + n * kWidth);
      PAGELET_UNROLL for (int r = 0; r < R; ++r) {
        const Vec weight = set1(weights[r * kScoreStride + j]);
        PAGELET_UNROLL for (int n = 0; n < N; ++n) sum[r][n] = fmadd(weight, x[n], sum[r][n]);
      }
    }
  }
  PAGELET_UNROLL for (int r = 0; r < R; ++r) {
    PAGELET_UNROLL for (int n = 0; n < N; ++n) store(states + r * state_stride + element + n * kWidth, sum[r][n]);
  }
}

template <int R>
void add_all_values(const float* weights, const float* const* values, Range range, int64_t head_size,
                    float* states, int64_t state_stride) {
  if (range.empty()) return;
  constexpr int kVectors = R == 1 ? 8 : R <= 3 ? 4 : 2;  // enough independent sums to hide the latency of fma
  int64_t d = 0;
  for (; d + kVectors * kWidth <= head_size; d += kVectors * kWidth) {
    add_values<R, kVectors>(weights, values, range, d, states, state_stride);
  }
  for (; d < head_size; d += kWidth) add_values<R, 1>(weights, values, range, d, states, state_stride);
}

using ScorePanel = void (*)(const float*, const float*, int64_t, float*);
constexpr ScorePanel kScorePanel[] = {nullptr,        score_panel<1>, score_panel<2>, score_panel<3>,
                                      score_panel<4>, score_panel<5>, score_panel<6>};
using AddValues = void (*)(const float*, const float* const*, Range, int64_t, float*, int64_t);
constexpr AddValues kAddValues[] = {nullptr,           add_all_values<1>, add_all_values<2>, add_all_values<3>,
                                    add_all_values<4>, add_all_values<5>, add_all_values<6>};

// softcap * tanh(x / softcap), with tanh(y) = 1 - 2 / (e^2y + 1).
PAGELET_INLINE Vec cap(Vec x, float softcap) {
  const Vec e = exp(mul(x, set1(2.0f / softcap)));
  return mul(set1(softcap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
}

// Turns the visible scores of a row into weights e^(score - maximum), and stores maximum and sum in its state.
void softmax(const AttentionArgs& args, Range range, float* scores, float* state) {
  const int64_t begin = range.begin / kWidth * kWidth, end = round_up(range.end, kWidth);
  if (args.softcap > 0) {
    for (int64_t j = begin; j < end; j += kWidth) store(scores + j, cap(load(scores + j), args.softcap));
  }
  for (int64_t j = begin; j < range.begin; ++j) scores[j] = -kInfinity;
  for (int64_t j = range.end; j < end; ++j) scores[j] = -kInfinity;
  Vec maximum = load(scores + begin);
  for (int64_t j = begin + kWidth; j < end; j += kWidth) maximum = max(maximum, load(scores + j));
  const float top = reduce_max(maximum);
  Vec sum = set1(0.0f);
  for (int64_t j = begin; j < end; j += kWidth) {
    const Vec weight = exp(sub(load(scores + j), set1(top)));
    store(scores + j, weight);
    sum = add(sum, weight);
  }
  state[args.head_size] = top;
  state[args.head_size + 1] = reduce_add(sum);
}

// Calls body(first row, rows) for every group of up to kGroupRows rows.
template <typename Body>
PAGELET_INLINE void for_each_group(const Rows& rows, Body body) {
  for (int64_t row = 0; row < rows.count; row += kGroupRows) body(row, min_of(kGroupRows, rows.count - row));
}

template <typename Cache>
void score_partition(const Rows& rows, int64_t partition, const Scratch& scratch) {
  alignas(64) static constexpr float kZeros[kMaxHeadSize] = {};
  const AttentionArgs& args = rows.args;
  const int64_t size = args.head_size, tile = tile_keys(args);
  const Range all = rows.visible_to(0, rows.count - 1, partition);
  const typename Cache::Element *sources[kPartitionKeys], *values[kPartitionKeys];
  const float* keys[kPartitionKeys];
  find_rows<Cache>(rows, args.key_cache, partition, all, sources);
  find_rows<Cache>(rows, args.value_cache, partition, all, values);
  for (int64_t base = all.begin / tile * tile; base < all.end; base += tile) {
    const Range here = intersect({all.begin - base, all.end - base}, {0, tile});
    const Range panels = {here.begin / kPanelKeys * kPanelKeys, round_up(here.end, kPanelKeys)};
    for (int64_t j = panels.begin; j < panels.end; ++j) {
      const bool seen = j >= here.begin && j < here.end;
      keys[j] = seen ? Cache::read(sources[base + j], size, scratch.converted + j * size) : kZeros;
      if (seen) prefetch_row(values[base + j], size);
      if (base + j + kPrefetchKeys < all.end) prefetch_row(sources[base + j + kPrefetchKeys], size);
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
void add_group_values(const Rows& rows, int64_t row, int64_t count, int64_t partition, Range tile,
                      const float* const* values, const float* weights, float* states, int64_t state_stride) {
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
      kAddValues[1](weights + r * kScoreStride, values, intersect(seen[r], part), size, states + r * state_stride,
                    state_stride);
    }
  };
  add_each({tile.begin, common.begin});
  kAddValues[count](weights, values, common, size, states, state_stride);
  add_each({common.end, tile.end});
}

template <typename Cache>
void weigh_partition(const Rows& rows, int64_t partition, const Scratch& scratch, float* states,
                     int64_t state_stride) {
  const AttentionArgs& args = rows.args;
  const int64_t tile = tile_keys(args);
  const Range all = rows.visible_to(0, rows.count - 1, partition);
  const typename Cache::Element* sources[kPartitionKeys];
  const float* values[kPartitionKeys];
  find_rows<Cache>(rows, args.value_cache, partition, all, sources);
  for (int64_t base = all.begin / tile * tile; base < all.end; base += tile) {
    const Range here = intersect({all.begin - base, all.end - base}, {0, tile});
    for (int64_t j = here.begin; j < here.end; ++j) {
      values[base + j] = Cache::read(sources[base + j], args.head_size, scratch.converted + j * args.head_size);
    }
    for_each_group(rows, [&](int64_t row, int64_t count) {
      add_group_values(rows, row, count, partition, {base + here.begin, base + here.end}, values,
                       scratch.scores + row * kScoreStride, states + row * state_stride, state_stride);
    });
  }
}

// States of all rows for one partition, from empty.
template <typename Cache>
void attend_partition(const Rows& rows, int64_t partition, const Scratch& scratch, float* states,
                      int64_t state_stride) {
  const AttentionArgs& args = rows.args;
  score_partition<Cache>(rows, partition, scratch);
  for (int64_t row = 0; row < rows.count; ++row) {
    const Range range = rows.visible(row, partition);
    if (range.empty()) continue;
    float* state = states + row * state_stride;
    softmax(args, range, scratch.scores + row * kScoreStride, state);
    for (int64_t d = 0; d < args.head_size; d += kWidth) store(state + d, set1(0.0f));
  }
  weigh_partition<Cache>(rows, partition, scratch, states, state_stride);
}

// total := total merged with the state of the next partition.
void merge_state(int64_t head_size, const float* part, bool first, float* total) {
  const float old_top = first ? part[head_size] : total[head_size], part_top = part[head_size];
  const float top = old_top > part_top ? old_top : part_top;
  const Vec scale_part = exp(sub(set1(part_top), set1(top)));
  const Vec scale_old = exp(sub(set1(old_top), set1(top)));
  if (first) {
    for (int64_t d = 0; d < head_size + 2; ++d) total[d] = part[d];
    return;
  }
  for (int64_t d = 0; d < head_size; d += kWidth) {
    store(total + d, fmadd(load(part + d), scale_part, mul(load(total + d), scale_old)));
  }
  const Vec sum = fmadd(set1(part[head_size + 1]), scale_part, mul(set1(total[head_size + 1]), scale_old));
  total[head_size] = top;
  total[head_size + 1] = reduce_max(sum);
}

void merge_partition(const Rows& rows, int64_t partition, const float* states, int64_t state_stride,
                     float* totals) {
  const AttentionArgs& args = rows.args;
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.visible(row, partition).empty()) continue;
    const bool first = partition == rows.item.first_partition || rows.visible(row, partition - 1).empty();
    merge_state(args.head_size, states + row * state_stride, first, totals + row * state_floats(args));
  }
}

void write_output(const Rows& rows, const float* totals) {
  const AttentionArgs& args = rows.args;
  for (int64_t row = 0; row < rows.count; ++row) {
    const float* total = totals + row * state_floats(args);
    const Vec sum = set1(total[args.head_size + 1]);
    for (int64_t d = 0; d < args.head_size; d += kWidth) store(rows.output[row] + d, div(load(total + d), sum));
  }
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
  const int64_t size = args.head_size, row = args.kv_num_heads * size;
  auto* key_cache = static_cast<typename Cache::Element*>(args.key_cache);
  auto* value_cache = static_cast<typename Cache::Element*>(args.value_cache);
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; head < args.kv_num_heads; ++head) {
      const size_t source = size_t(token) * args.key_value_stride + size_t(head * size);
      const int64_t index = slots[token] * row + head * size;
      float key[kMaxHeadSize];
      memcpy(key, args.key + source, size_t(size) * sizeof(float));
      rotate(args, token, key);
      Cache::write(key_cache + index, size, key);
      Cache::write(value_cache + index, size, args.value + source);
    }
  }
}

}  // namespace

extern const AttentionKernel attention_f32;
const AttentionKernel attention_f32 = {kWidth, scratch_floats, write_cache<F32Cache>, attend<F32Cache>, merge};

}  // namespace pagelet::PAGELET_ISA
