// The attention kernels without ONNX Runtime: every instruction set and cache type of this build against a
// plain reference that reads the same cache, a prompt whole against token by token, and a tree's path against a
// chain; with norms and sinks too. For emulators, where no Python is (see test_emulated.py).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <cstring>
#include <random>
#include <vector>

#include "attention_plan.h"
#include "isa.h"
#include "scratch.h"

namespace pagelet {
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_f32)
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_f16)
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_int8)
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_fp8)
}

namespace {

using namespace pagelet;

// An element of a cache, as IEEE 754 and the OCP 8-bit floating point specification define it.
double from_minifloat(int code, int mantissa_bits, int bias) {
  const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  const int implied = exponent ? 1 << mantissa_bits : 0;
  return std::ldexp(mantissa + implied, (exponent ? exponent : 1) - bias - mantissa_bits);
}
double from_f32(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
double from_f16(const uint8_t* p) {
  const double magnitude = from_minifloat((p[1] & 0x7f) << 8 | p[0], 10, 15);
  return p[1] & 0x80 ? -magnitude : magnitude;
}
double from_int8(const uint8_t* p) { return int8_t(*p); }
double from_fp8(const uint8_t* p) {
  const double magnitude = from_minifloat(*p & 0x7f, 3, 7);
  return *p & 0x80 ? -magnitude : magnitude;
}

// `loss`: how far a stored element may be from the original, over the largest of its row.
struct CacheType {
  const char* name;
  size_t bytes;
  bool scaled;
  double loss;
  double (*read)(const uint8_t*);
  const AttentionKernel& (*kernel)(Isa);
};

#define KERNEL(name) [](Isa isa) -> const AttentionKernel& { return PAGELET_KERNEL(AttentionKernel, name, isa); }
const CacheType kCacheTypes[] = {
    {"f32", 4, false, 0, from_f32, KERNEL(attention_f32)},
    {"f16", 2, false, 0x1p-11, from_f16, KERNEL(attention_f16)},
    {"int8", 1, true, 0.50001 / 127, from_int8, KERNEL(attention_int8)},
    {"fp8", 1, true, 16.0001 / 448, from_fp8, KERNEL(attention_fp8)},
};

struct Shape {
  int64_t num_heads, kv_num_heads, head_size, block_size, length, window;
  float softcap;
  bool norms, sinks;  // norms of queries, keys and values
};

constexpr Shape kShapes[] = {
    {6, 2, 64, 32, 262, 0, 0, false, false},
    {4, 4, 40, 16, 33, 20, 5, true, true},
    {4, 1, 128, 3, 258, 100, 0, false, true},
    {2, 1, 256, 16, 20, 0, 0, false, false},
    {2, 1, 512, 16, 20, 0, 0, true, true},
};
constexpr double kNormEpsilon = 1e-3;

// One sequence of random tokens, with its blocks in reverse order.
struct Prompt {
  Prompt(const Shape& s, const CacheType& t) : shape(s), type(t), width((s.num_heads + 2 * s.kv_num_heads) * s.head_size) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    qkv.resize(size_t(shape.length * width));
    for (float& x : qkv) x = normal(random);
    for (std::vector<float>* weight : {&q_norm, &k_norm, &sinks}) {
      weight->resize(size_t(weight == &sinks ? shape.num_heads : shape.head_size));
      for (float& x : *weight) x = normal(random);
    }
    for (int64_t i = (shape.length - 1) / shape.block_size; i >= 0; --i) table.push_back(int32_t(i));
    const size_t rows = table.size() * size_t(shape.block_size * shape.kv_num_heads);
    for (int i = 0; i < 2; ++i) {
      caches[i].assign(rows * size_t(shape.head_size) * type.bytes, 0xff);  // NaN in every float type
      scales[i].assign(type.scaled ? rows : 0, NAN);
    }
    output.resize(size_t(shape.length * shape.num_heads * shape.head_size));
  }

  void step(const AttentionKernel& kernel, int64_t begin, int64_t end, const int32_t* ancestor_mask = nullptr) {
    const int32_t cumulative[] = {0, int32_t(end - begin)}, past = int32_t(begin);
    AttentionArgs args{};
    args.query = qkv.data() + begin * width;
    args.key = args.query + shape.num_heads * shape.head_size;
    args.value = args.key + shape.kv_num_heads * shape.head_size;
    args.query_stride = args.key_value_stride = size_t(width);
    args.key_cache = caches[0].data();
    args.value_cache = caches[1].data();
    args.key_scale_cache = scales[0].data();
    args.value_scale_cache = scales[1].data();
    args.cumulative_sequence_length = cumulative;
    args.past_seqlens = &past;
    args.block_table = table.data();
    args.ancestor_mask = ancestor_mask;
    args.q_norm_weight = shape.norms ? q_norm.data() : nullptr;
    args.k_norm_weight = shape.norms ? k_norm.data() : nullptr;
    args.head_sink = shape.sinks ? sinks.data() : nullptr;
    args.norm_epsilon = float(kNormEpsilon);
    args.norm_values = shape.norms;
    args.mask_words = 1;
    args.output = output.data() + begin * shape.num_heads * shape.head_size;
    args.tokens = end - begin;
    args.sequences = 1;
    args.blocks = args.max_blocks = int64_t(table.size());
    args.block_size = shape.block_size;
    args.num_heads = shape.num_heads;
    args.kv_num_heads = shape.kv_num_heads;
    args.head_size = shape.head_size;
    args.window = shape.window;
    args.scale = 1 / std::sqrt(float(shape.head_size));
    args.softcap = shape.softcap;
    check_indices(args);
    AttentionPlan plan;
    make_plan(args, plan);
    float* scratch = thread_scratch(kernel.scratch_floats(args));
    kernel.write_cache(args, plan.slots.data(), 0, args.tokens);
    for (const AttentionItem& item : plan.items) {
      kernel.attend(args, item, scratch);
      if (item.merge >= 0 && plan.unfinished[size_t(item.merge)].fetch_sub(1) == 1) {
        kernel.merge(args, plan.merges[size_t(item.merge)], scratch);
      }
    }
    for (size_t merge = 0; merge < plan.merges.size(); ++merge) {
      if (plan.unfinished[merge] != 0) throw std::logic_error("a merge counts other items than wait for it");
    }
  }

  // What the cache holds: keys (0) and values (1), [length, kv_heads, head_size].
  void read_caches() {
    for (int kind = 0; kind < 2; ++kind) {
      for (int64_t i = 0; i < shape.length * shape.kv_num_heads; ++i) {
        const int64_t position = i / shape.kv_num_heads, head = i % shape.kv_num_heads;
        const int64_t block = table[size_t(position / shape.block_size)];
        const int64_t slot = block * shape.block_size + position % shape.block_size;
        const size_t row = size_t(slot * shape.kv_num_heads + head);
        const double scale = type.scaled ? scales[kind][row] : 1;
        for (size_t d = 0; d < size_t(shape.head_size); ++d) {
          const size_t element = row * size_t(shape.head_size) + d;
          cached[kind].push_back(scale * type.read(&caches[kind][element * type.bytes]));
        }
      }
    }
  }

  const double* cached_row(int kind, int64_t position, int64_t kv_head) const {
    return &cached[kind][size_t((position * shape.kv_num_heads + kv_head) * shape.head_size)];
  }

  // A head of a token's row of `qkv`, as attention sees it: queries first, then keys, then values.
  std::vector<double> head(int64_t token, int64_t at) const {
    const float* x = &qkv[size_t(token * width + at * shape.head_size)];
    std::vector<double> out(x, x + shape.head_size);
    if (!shape.norms) return out;
    double squares = 0;
    for (double element : out) squares += element * element;
    const bool query = at < shape.num_heads, value = at >= shape.num_heads + shape.kv_num_heads;
    const std::vector<float>& weight = query ? q_norm : k_norm;
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] *= (value ? 1 : weight[i]) / std::sqrt(squares / double(shape.head_size) + kNormEpsilon);
    }
    return out;
  }

  // The largest difference between what was written and what the cache holds, over the row's largest.
  double loss() const {
    double largest = 0;
    for (int64_t row = 0; row < 2 * shape.length * shape.kv_num_heads; ++row) {
      const int64_t head = row / 2 % shape.kv_num_heads, token = row / 2 / shape.kv_num_heads;
      const int64_t at = shape.num_heads + (row % 2) * shape.kv_num_heads + head;
      const std::vector<double> written = this->head(token, at);
      const double* held = cached_row(int(row % 2), token, head);
      double top = 0;
      for (double element : written) top = std::max(top, std::fabs(element));
      for (size_t i = 0; i < written.size(); ++i) {
        largest = std::fmax(largest, std::isnan(held[i]) ? INFINITY : std::fabs(held[i] - written[i]) / top);
      }
    }
    return largest;
  }

  // The largest difference from the definition, in float64.
  double error() const {
    double largest = 0;
    for (int64_t t = 0; t < shape.length; ++t) {
      for (int64_t h = 0; h < shape.num_heads; ++h) largest = std::fmax(largest, row_error(t, h));
    }
    return largest;
  }

  double row_error(int64_t token, int64_t head) const {
    const int64_t d = shape.head_size, kv = head / (shape.num_heads / shape.kv_num_heads);
    std::vector<double> sum(size_t(d), 0.0);
    const std::vector<double> q = this->head(token, head);
    double total = shape.sinks ? std::exp(double(sinks[size_t(head)])) : 0, largest = 0;
    for (int64_t j = shape.window ? std::max<int64_t>(0, token + 1 - shape.window) : 0; j <= token; ++j) {
      const double *key = cached_row(0, j, kv), *value = cached_row(1, j, kv);
      double score = 0;
      for (int64_t i = 0; i < d; ++i) score += q[size_t(i)] * key[i];
      score /= std::sqrt(double(d));
      if (shape.softcap > 0) score = shape.softcap * std::tanh(score / shape.softcap);
      const double weight = std::exp(score);
      total += weight;
      for (int64_t i = 0; i < d; ++i) sum[size_t(i)] += weight * value[i];
    }
    for (int64_t i = 0; i < d; ++i) {
      const float found = output[size_t((token * shape.num_heads + head) * d + i)];
      largest = std::fmax(largest, std::isnan(found) ? INFINITY : std::fabs(sum[size_t(i)] / total - found));
    }
    return largest;
  }

  Shape shape;
  const CacheType& type;
  int64_t width;
  std::vector<float> qkv, q_norm, k_norm, sinks, scales[2], output;
  std::vector<uint8_t> caches[2];
  std::vector<double> cached[2];
  std::vector<int32_t> table;
};

// The last 12 tokens as a tree: those at even places are a path, and each has one at an odd place for a leaf.
bool tree_is_like_chain(const AttentionKernel& kernel, const CacheType& type, const Shape& shape) {
  const int64_t rows = 12, past = shape.length - rows;
  Prompt tree(shape, type), chain(shape, type);
  int32_t mask[rows];
  for (int64_t i = 0; i < rows; ++i) {
    mask[i] = 0x555 & ((1 << i) - 1);
    const float* drafted = &tree.qkv[size_t((past + i / 2 * 2) * tree.width)];
    std::copy(drafted, drafted + tree.width, &chain.qkv[size_t((past + i / 2) * tree.width)]);
  }
  tree.step(kernel, 0, past);
  tree.step(kernel, past, shape.length, mask);
  chain.step(kernel, 0, past + rows / 2);
  const size_t row = size_t(shape.num_heads * shape.head_size);
  bool same = true;
  for (size_t i = 0, first = size_t(past); i < size_t(rows / 2); ++i) {
    const float *found = &tree.output[(first + 2 * i) * row], *expected = &chain.output[(first + i) * row];
    same = same && std::memcmp(found, expected, row * sizeof(float)) == 0;
  }
  return same;
}

bool check(Isa isa, const CacheType& type, const Shape& shape) {
  const AttentionKernel& kernel = type.kernel(isa);
  if (shape.head_size % kernel.vector_width != 0) return true;
  Prompt whole(shape, type), single(shape, type);
  whole.step(kernel, 0, shape.length);
  for (int64_t t = 0; t < shape.length; ++t) single.step(kernel, t, t + 1);
  const bool same = std::memcmp(whole.output.data(), single.output.data(), whole.output.size() * 4) == 0 &&
                    whole.caches[0] == single.caches[0] && whole.caches[1] == single.caches[1];
  const bool trees = tree_is_like_chain(kernel, type, shape);
  whole.read_caches();
  const double error = whole.error(), loss = whole.loss();
  std::printf("%-8s %-4s head size %3d: error %.1e, loss %.1e, %s, %s\n", isa_name(isa), type.name,
              int(shape.head_size), error, loss, same ? "token by token alike" : "TOKEN BY TOKEN DIFFERS",
              trees ? "in trees alike" : "IN TREES DIFFERENT");
  return same && trees && error < 1e-5 /* float32 */ && loss <= type.loss + 1e-6 /* norms in float32 */;
}

}  // namespace

int main() {
  bool good = true;
  for (int i = 0; i < static_cast<int>(Isa::count); ++i) {
    if (!isa_available(static_cast<Isa>(i))) continue;
    for (const CacheType& type : kCacheTypes) {
      for (const Shape& shape : kShapes) good = check(static_cast<Isa>(i), type, shape) && good;
    }
  }
  return good ? 0 : 1;
}
