// The attention kernels without ONNX Runtime: every instruction set of this build against a plain reference,
// and a prompt whole against token by token. For emulators, where no Python is (see
// test_attention_emulated.py).
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "attention_plan.h"
#include "isa.h"
#include "scratch.h"

namespace pagelet {
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_f32)
}

namespace {

using namespace pagelet;

struct Shape {
  int64_t num_heads, kv_num_heads, head_size, block_size, length, window;
  float softcap;
};

constexpr Shape kShapes[] = {
    {9, 3, 64, 32, 290, 0, 0},
    {4, 4, 40, 16, 33, 20, 5},
    {8, 1, 128, 3, 270, 100, 0},
    {2, 1, 256, 16, 20, 0, 0},
};

// One sequence of random tokens, with its blocks in reverse order.
struct Prompt {
  explicit Prompt(const Shape& s) : shape(s), width((s.num_heads + 2 * s.kv_num_heads) * s.head_size) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    qkv.resize(size_t(shape.length * width));
    for (float& x : qkv) x = normal(random);
    for (int64_t i = (shape.length - 1) / shape.block_size; i >= 0; --i) table.push_back(int32_t(i));
    caches[0].assign(table.size() * size_t(shape.block_size * shape.kv_num_heads * shape.head_size), NAN);
    caches[1] = caches[0];
    output.resize(size_t(shape.length * shape.num_heads * shape.head_size));
  }

  void step(const AttentionKernel& kernel, int64_t begin, int64_t end) {
    const int32_t cumulative[] = {0, int32_t(end - begin)}, past = int32_t(begin);
    AttentionArgs args{};
    args.query = qkv.data() + begin * width;
    args.key = args.query + shape.num_heads * shape.head_size;
    args.value = args.key + shape.kv_num_heads * shape.head_size;
    args.query_stride = args.key_value_stride = size_t(width);
    args.key_cache = caches[0].data();
    args.value_cache = caches[1].data();
    args.cumulative_sequence_length = cumulative;
    args.past_seqlens = &past;
    args.block_table = table.data();
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
    for (const AttentionItem& item : plan.items) kernel.attend(args, item, scratch);
    for (const AttentionItem& item : plan.merges) kernel.merge(args, item, scratch);
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
    double total = 0, largest = 0;
    for (int64_t j = shape.window ? std::max<int64_t>(0, token + 1 - shape.window) : 0; j <= token; ++j) {
      const float* q = &qkv[size_t(token * width + head * d)];
      const float* k = &qkv[size_t(j * width + (shape.num_heads + kv) * d)];
      double score = 0;
      for (int64_t i = 0; i < d; ++i) score += double(q[i]) * k[i];
      score /= std::sqrt(double(d));
      if (shape.softcap > 0) score = shape.softcap * std::tanh(score / shape.softcap);
      const double weight = std::exp(score);
      total += weight;
      for (int64_t i = 0; i < d; ++i) sum[size_t(i)] += weight * k[shape.kv_num_heads * d + i];
    }
    for (int64_t i = 0; i < d; ++i) {
      const float found = output[size_t((token * shape.num_heads + head) * d + i)];
      largest = std::fmax(largest, std::isnan(found) ? INFINITY : std::fabs(sum[size_t(i)] / total - found));
    }
    return largest;
  }

  Shape shape;
  int64_t width;
  std::vector<float> qkv, caches[2], output;
  std::vector<int32_t> table;
};

bool check(Isa isa, const Shape& shape) {
  const AttentionKernel& kernel = PAGELET_KERNEL(AttentionKernel, attention_f32, isa);
  if (shape.head_size % kernel.vector_width != 0) return true;
  Prompt whole(shape), single(shape);
  whole.step(kernel, 0, shape.length);
  for (int64_t t = 0; t < shape.length; ++t) single.step(kernel, t, t + 1);
  const bool same = std::memcmp(whole.output.data(), single.output.data(), whole.output.size() * 4) == 0;
  const double error = whole.error();
  std::printf("%-8s head size %3d: error %.1e, %s\n", isa_name(isa), int(shape.head_size), error,
              same ? "token by token alike" : "TOKEN BY TOKEN DIFFERS");
  return same && error < 1e-5;  // float32
}

}  // namespace

int main() {
  bool good = true;
  for (int i = 0; i < static_cast<int>(Isa::count); ++i) {
    if (!isa_available(static_cast<Isa>(i))) continue;
    for (const Shape& shape : kShapes) good = check(static_cast<Isa>(i), shape) && good;
  }
  return good ? 0 : 1;
}
