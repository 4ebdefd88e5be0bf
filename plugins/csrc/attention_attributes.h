// The attributes of a PagedAttention node, and how its errors are raised.
#pragma once

#include <cmath>
#include <string>
#include <type_traits>

#include "attention.h"
#include "ort_op.h"

namespace pagelet {

// The message is a text, or a function that makes one: only an error should cost an allocation.
template <typename Message>
void require(bool condition, const Message& message) {
  if (condition) return;
  if constexpr (std::is_invocable_v<Message>) {
    throw std::invalid_argument("PagedAttention: " + std::string(message()));
  } else {
    throw std::invalid_argument("PagedAttention: " + std::string(message));
  }
}

// Products with sizes of tensors must fit 64 bits, or a wrapped one could pass for the true size.
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxWindow = int64_t{1} << 31;

struct Attributes {
  Attributes(const ort::Api& api, const ort::KernelInfo* info)
      : num_heads(ort::attribute(api, info, "num_heads", int64_t{0})),
        kv_num_heads(ort::attribute(api, info, "kv_num_heads", int64_t{0})),
        local_window_size(ort::attribute(api, info, "local_window_size", int64_t{-1})),
        rotary_interleaved(ort::attribute(api, info, "rotary_interleaved", int64_t{0})),
        rotary_dim(ort::attribute(api, info, "rotary_dim", int64_t{0})),
        norm_after_rotation(ort::attribute(api, info, "norm_after_rotation", int64_t{0})),
        norm_values(ort::attribute(api, info, "norm_values", int64_t{0})),
        scale(ort::attribute(api, info, "scale", 0.0f)),
        softcap(ort::attribute(api, info, "softcap", 0.0f)),
        norm_epsilon(ort::attribute(api, info, "norm_epsilon", 1e-6f)) {
    require(num_heads > 0 && kv_num_heads > 0 && num_heads % kv_num_heads == 0 && num_heads <= kMaxHeads,
            "num_heads is " + std::to_string(num_heads) + " and kv_num_heads is " +
                std::to_string(kv_num_heads) + ", expected two positive numbers up to " +
                std::to_string(kMaxHeads) + " of which the second divides the first");
    require(local_window_size >= -1 && local_window_size <= kMaxWindow,
            "local_window_size is " + std::to_string(local_window_size) +
                ", expected -1 or 0 (no window) or a number of keys");
    require(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= kMaxHeadSize,
            "rotary_dim is " + std::to_string(rotary_dim) + ", expected an even number up to " +
                std::to_string(kMaxHeadSize) + ", or 0 for the whole head");
    require(std::isfinite(scale) && scale >= 0, "scale is not finite and positive");
    require(std::isfinite(softcap) && softcap >= 0, "softcap is not finite and positive");
    require(norm_epsilon >= 0 && norm_epsilon <= 1,
            "norm_epsilon is " + std::to_string(norm_epsilon) + ", expected a number from 0 to 1");
    expect_flag("norm_after_rotation", norm_after_rotation);
    expect_flag("norm_values", norm_values);
  }

  static void expect_flag(const char* name, int64_t value) {
    require(value == 0 || value == 1, std::string(name) + " is " + std::to_string(value) + ", expected 0 or 1");
  }

  int64_t num_heads, kv_num_heads, local_window_size, rotary_interleaved, rotary_dim;
  int64_t norm_after_rotation, norm_values;
  float scale, softcap, norm_epsilon;
};

}  // namespace pagelet
