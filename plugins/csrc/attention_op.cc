// PagedAttention as an op of ONNX Runtime: reads inputs and attributes, checks them, and runs the kernels.
#include <algorithm>
#include <cmath>
#include <string>

#include "attention.h"
#include "attention_attributes.h"
#include "attention_plan.h"
#include "isa.h"
#include "ops.h"
#include "ort_op.h"
#include "scratch.h"

namespace pagelet {

PAGELET_DECLARE_KERNEL(AttentionKernel, attention_f32)
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_f16)
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_int8)
PAGELET_DECLARE_KERNEL(AttentionKernel, attention_fp8)

namespace {

enum Input {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kCumulativeSequenceLength,
  kPastSeqlens,
  kBlockTable,
  kCosCache,
  kSinCache,
  kKeyScaleCache,
  kValueScaleCache,
  kPositionIds,
  kAncestorMask,
  kQNormWeight,
  kKNormWeight,
  kHeadSink,
};
enum Output { kOutput, kKeyCacheOut, kValueCacheOut, kKeyScaleCacheOut, kValueScaleCacheOut };

constexpr int64_t kTokensPerWrite = 16;

// A cache type: what the host calls it, and its kernels.
#define PAGELET_CACHE_TYPE(Type, element, scaled, name, kernel)         \
  struct Type {                                                         \
    static constexpr ort::ElementType kElement = element;               \
    static constexpr bool kScaled = scaled;                             \
    static constexpr const char* kName = name;                          \
    static const AttentionKernel& kernels(Isa isa) {                    \
      return PAGELET_KERNEL(AttentionKernel, kernel, isa);              \
    }                                                                   \
  };
PAGELET_CACHE_TYPE(F32, ort::kFloat, false, "float32", attention_f32)
PAGELET_CACHE_TYPE(F16, ort::kFloat16, false, "float16", attention_f16)
PAGELET_CACHE_TYPE(Int8, ort::kInt8, true, "int8", attention_int8)
PAGELET_CACHE_TYPE(Fp8, ort::kFloat8E4M3FN, true, "float8e4m3fn", attention_fp8)
#undef PAGELET_CACHE_TYPE

// The widest vectors that divide a head: 16 lanes do not divide a head of 40 or 80.
template <typename Cache>
const AttentionKernel& kernel_for(int64_t head_size) {
  int isa = static_cast<int>(selected_isa());
  while (head_size % Cache::kernels(static_cast<Isa>(isa)).vector_width != 0) --isa;
  return Cache::kernels(static_cast<Isa>(isa));
}

template <typename Cache>
class PagedAttention {
 public:
  static constexpr const char* kName = "PagedAttention";
  static constexpr ort::Port kInputs[] = {
      {ort::kFloat},
      {ort::kFloat, ort::kOptional},
      {ort::kFloat, ort::kOptional},
      {Cache::kElement},
      {Cache::kElement},
      {ort::kInt32},
      {ort::kInt32},
      {ort::kInt32},
      {ort::kFloat, ort::kOptional},
      {ort::kFloat, ort::kOptional},
      {ort::kFloat, ort::kOptional},
      {ort::kFloat, ort::kOptional},
      {ort::kInt64, ort::kOptional},
      {ort::kInt32, ort::kOptional},
      {ort::kFloat, ort::kOptional},
      {ort::kFloat, ort::kOptional},
      {ort::kFloat, ort::kOptional},
  };
  // Caches are no outputs of a node that only reads.
  static constexpr ort::Port kOutputs[] = {
      {ort::kFloat},
      {Cache::kElement, ort::kOptional},
      {Cache::kElement, ort::kOptional},
      {ort::kFloat, ort::kOptional},
      {ort::kFloat, ort::kOptional},
  };
  static constexpr ort::Alias kAliases[] = {
      {kKeyCache, kKeyCacheOut},
      {kValueCache, kValueCacheOut},
      {kKeyScaleCache, kKeyScaleCacheOut},
      {kValueScaleCache, kValueScaleCacheOut},
  };

  PagedAttention(const ort::Api& api, const ort::KernelInfo* info)
      : attributes_(api, info),
        cosine_(api, info, kCosCache),
        sine_(api, info, kSinCache),
        q_norm_(api, info, kQNormWeight),
        k_norm_(api, info, kKNormWeight),
        sink_(api, info, kHeadSink) {}

  void compute(const ort::Context& context) const {
    AttentionArgs args{};
    read_caches(context, args);
    read_scales(context, args);
    read_activations(context, args);
    read_lengths(context, args);
    read_rotation(context, args);
    read_trees(context, args);
    read_head_weights(context, args);
    check_indices(args);
    bind_outputs(context, args);
    run(context.parallel_for(), args);
  }

 private:
  void read_caches(const ort::Context& context, AttentionArgs& args) const {
    const ort::Tensor key = context.input(kKeyCache), value = context.input(kValueCache);
    ort::expect_shape(key, "key_cache", {-1, -1, attributes_.kv_num_heads, -1});
    ort::expect_shape(value, "value_cache", {key.dims[0], key.dims[1], key.dims[2], key.dims[3]});
    args.key_cache = key.data;
    args.value_cache = value.data;
    args.blocks = key.dims[0];
    args.block_size = key.dims[1];
    args.head_size = key.dims[3];
    args.num_heads = attributes_.num_heads;
    args.kv_num_heads = attributes_.kv_num_heads;
    args.window = std::max<int64_t>(0, attributes_.local_window_size);
    args.softcap = attributes_.softcap;
    args.norm_epsilon = attributes_.norm_epsilon;
    args.norm_after_rotation = attributes_.norm_after_rotation != 0;
    args.norm_values = attributes_.norm_values != 0;
    require(args.block_size > 0, "key_cache has blocks of 0 tokens");
    require(args.head_size % 8 == 0 && args.head_size > 0 && args.head_size <= kMaxHeadSize, [&] {
      return "the head size (last dimension of key_cache) is " + std::to_string(args.head_size) +
             ", expected a multiple of 8 up to " + std::to_string(kMaxHeadSize);
    });
    args.scale = attributes_.scale > 0 ? attributes_.scale : 1.0f / std::sqrt(float(args.head_size));
  }

  static void read_scales(const ort::Context& context, AttentionArgs& args) {
    const ort::Tensor key = context.input(kKeyScaleCache), value = context.input(kValueScaleCache);
    if constexpr (Cache::kScaled) {
      require(key.present && value.present, [] {
        return std::string(Cache::kName) + " caches need key_scale_cache and value_scale_cache";
      });
      ort::expect_shape(key, "key_scale_cache", {args.blocks, args.block_size, args.kv_num_heads});
      ort::expect_shape(value, "value_scale_cache", {args.blocks, args.block_size, args.kv_num_heads});
      args.key_scale_cache = key.as<float>();
      args.value_scale_cache = value.as<float>();
    } else {
      require(!key.present && !value.present, [] {
        return "key_scale_cache and value_scale_cache belong to int8 and float8e4m3fn caches, this cache is " +
               std::string(Cache::kName);
      });
    }
  }

  void read_activations(const ort::Context& context, AttentionArgs& args) const {
    const ort::Tensor query = context.input(kQuery), key = context.input(kKey), value = context.input(kValue);
    require(key.present == value.present, "key and value must be given together");
    const int64_t query_size = args.num_heads * args.head_size, key_size = args.kv_num_heads * args.head_size;
    args.reads_only = !key.present && query.rank == 2 && query.dims[1] == query_size;
    const int64_t packed = key.present || args.reads_only ? 0 : 2 * key_size;
    ort::expect_shape(query, "query", {-1, query_size + packed},
                      packed ? " (or queries alone, to read what another layer writes)" : "");
    args.tokens = query.dims[0];
    args.query = query.as<float>();
    args.query_stride = size_t(query_size + packed);
    if (key.present) {
      ort::expect_shape(key, "key", {args.tokens, key_size});
      ort::expect_shape(value, "value", {args.tokens, key_size});
      args.key = key.as<float>();
      args.value = value.as<float>();
      args.key_value_stride = size_t(key_size);
    } else if (!args.reads_only && args.tokens > 0) {
      args.key = args.query + query_size;
      args.value = args.key + key_size;
      args.key_value_stride = args.query_stride;
    }
  }

  static void read_lengths(const ort::Context& context, AttentionArgs& args) {
    const ort::Tensor cumulative = context.input(kCumulativeSequenceLength);
    const ort::Tensor past = context.input(kPastSeqlens), table = context.input(kBlockTable);
    ort::expect_shape(past, "past_seqlens", {-1});
    args.sequences = past.dims[0];
    ort::expect_shape(cumulative, "cumulative_sequence_length", {args.sequences + 1});
    ort::expect_shape(table, "block_table", {args.sequences, -1});
    args.max_blocks = table.dims[1];
    args.cumulative_sequence_length = cumulative.as<int32_t>();
    args.past_seqlens = past.as<int32_t>();
    args.block_table = table.as<int32_t>();
  }

  void read_rotation(const ort::Context& context, AttentionArgs& args) const {
    const ort::Tensor cosine = cosine_.get(context), sine = sine_.get(context);
    const ort::Tensor positions = context.input(kPositionIds);
    require(cosine.present == sine.present, "cos_cache and sin_cache must be given together");
    if (!cosine.present) return;
    require(positions.present, "cos_cache and sin_cache need position_ids");
    args.rotary_dim = attributes_.rotary_dim > 0 ? attributes_.rotary_dim : args.head_size;
    require(args.rotary_dim <= args.head_size, [&] {
      return "rotary_dim is " + std::to_string(args.rotary_dim) + ", expected at most the head size " +
             std::to_string(args.head_size);
    });
    ort::expect_shape(cosine, "cos_cache", {-1, args.rotary_dim / 2});
    ort::expect_shape(sine, "sin_cache", {cosine.dims[0], args.rotary_dim / 2});
    ort::expect_shape(positions, "position_ids", {args.tokens});
    args.max_positions = cosine.dims[0];
    args.cos_cache = cosine.as<float>();
    args.sin_cache = sine.as<float>();
    args.position_ids = positions.as<int64_t>();
    args.rotary_interleaved = attributes_.rotary_interleaved != 0;
  }

  // [0, 0] says that no sequence of the step has a tree.
  static void read_trees(const ort::Context& context, AttentionArgs& args) {
    const ort::Tensor mask = context.input(kAncestorMask);
    if (!mask.present || (mask.rank == 2 && mask.dims[0] == 0 && mask.dims[1] == 0)) return;
    ort::expect_shape(mask, "ancestor_mask", {args.tokens, -1});
    require(mask.dims[1] > 0, "ancestor_mask has no words, expected a bit for each row of a sequence");
    args.ancestor_mask = mask.as<int32_t>();
    args.mask_words = mask.dims[1];
  }

  void read_head_weights(const ort::Context& context, AttentionArgs& args) const {
    const auto read = [&](const ort::ConstantInput& input, const char* name, int64_t size) {
      const ort::Tensor tensor = input.get(context);
      if (tensor.present) ort::expect_shape(tensor, name, {size});
      return tensor.as<float>();
    };
    args.q_norm_weight = read(q_norm_, "q_norm_weight", args.head_size);
    args.k_norm_weight = read(k_norm_, "k_norm_weight", args.head_size);
    args.head_sink = read(sink_, "head_sink", args.num_heads);
    require(!args.reads_only || (!args.k_norm_weight && !args.norm_values),
            "k_norm_weight and norm_values belong to a node that writes keys and values, the query of this one "
            "holds queries alone");
  }

  static void bind_outputs(const ort::Context& context, AttentionArgs& args) {
    const int64_t cache[] = {args.blocks, args.block_size, args.kv_num_heads, args.head_size};
    const int64_t rows[] = {args.tokens, args.num_heads * args.head_size};
    const auto in_place = [&](Output output, size_t rank, const void* input) {
      const void* bound = context.output(output, cache, rank);
      if (args.blocks == 0) return;
      if (args.reads_only) {
        return require(bound == nullptr, "the query holds queries alone, so nothing is written: leave the "
                                         "cache outputs out");
      }
      require(bound != nullptr, "a cache that is written must be an output too, its scales as well");
      require(bound == input,
              "the caches are updated in place: bind the same OrtValue as cache input and cache output");
    };
    in_place(kKeyCacheOut, 4, args.key_cache);
    in_place(kValueCacheOut, 4, args.value_cache);
    if constexpr (Cache::kScaled) {
      in_place(kKeyScaleCacheOut, 3, args.key_scale_cache);
      in_place(kValueScaleCacheOut, 3, args.value_scale_cache);
    }
    args.output = static_cast<float*>(context.output(kOutput, rows, 2));
  }

  static void run(const ParallelFor& parallel_for, const AttentionArgs& args) {
    const AttentionKernel& kernel = kernel_for<Cache>(args.head_size);
    thread_local AttentionPlan plan;
    make_plan(args, plan);
    const AttentionPlan& shared = plan;  // the other threads would see their own
    const size_t scratch = kernel.scratch_floats(args);
    const size_t writes = args.reads_only ? 0 : size_t((args.tokens + kTokensPerWrite - 1) / kTokensPerWrite);
    for_each(parallel_for, writes, [&](size_t i) {
      const int64_t begin = int64_t(i) * kTokensPerWrite;
      kernel.write_cache(args, shared.slots.data(), begin, std::min(args.tokens, begin + kTokensPerWrite));
    });
    for_each(parallel_for, shared.items.size(), [&](size_t i) {
      const AttentionItem& item = shared.items[i];
      kernel.attend(args, item, thread_scratch(scratch));
      if (item.merge < 0 || shared.unfinished[size_t(item.merge)].fetch_sub(1) > 1) return;
      kernel.merge(args, shared.merges[size_t(item.merge)], thread_scratch(scratch));  // whoever comes last
    });
  }

  Attributes attributes_;
  ort::ConstantInput cosine_, sine_, q_norm_, k_norm_, sink_;
};

}  // namespace

const ort::CustomOp* paged_attention_f32() { return ort::OpTable<PagedAttention<F32>>::get(); }
const ort::CustomOp* paged_attention_f16() { return ort::OpTable<PagedAttention<F16>>::get(); }
const ort::CustomOp* paged_attention_int8() { return ort::OpTable<PagedAttention<Int8>>::get(); }
const ort::CustomOp* paged_attention_fp8() { return ort::OpTable<PagedAttention<Fp8>>::get(); }

}  // namespace pagelet
