// The attributes of Linear, Experts and Embedding that say how a weight is stored, and what follows from them about its
// packed bytes (layouts: plugins/packing.py, plugins/float_packing.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "linear_kernel.h"
#include "ort_op.h"

namespace pagelet {

struct LinearFormat {
  // Reads in_features, out_features, weight_type, group_size and asymmetric; throws std::invalid_argument.
  LinearFormat(const ort::Api& api, const ort::KernelInfo* info);
  // The last three, whose names begin with `prefix`.
  LinearFormat(const ort::Api& api, const ort::KernelInfo* info, int64_t in_features, int64_t out_features,
               const std::string& prefix);

  size_t in_features, out_features;
  WeightType type;
  size_t group_size;  // inputs that share a scale; in_features where a channel has one, or none
  bool asymmetric;

  size_t tiles() const { return (out_features + kTileColumns - 1) / kTileColumns; }
  size_t code_bytes() const { return kTileColumns * group_size * bits(type) / 8; }  // of one group of one tile
  size_t group_bytes() const { return code_bytes() + scale_bytes() * (asymmetric ? 2 : 1); }
  size_t tile_bytes() const { return in_features / group_size * group_bytes(); }
  size_t packed_bytes() const { return tiles() * tile_bytes(); }

 private:
  static size_t bits(WeightType type);
  size_t scale_bytes() const;  // of one group of one tile
};

constexpr int64_t kMaxFeatures = int64_t{1} << 24;  // products of two and the bytes per group fit 64 bits

// An integer attribute; throws std::invalid_argument when it is outside [low, high].
int64_t bounded_attribute(const ort::Api& api, const ort::KernelInfo* info, const char* name, int64_t low, int64_t high,
                          int64_t fallback = -1);

// The same of a float, which NaN is outside of.
float bounded_float_attribute(const ort::Api& api, const ort::KernelInfo* info, const char* name, float low,
                              float high, float fallback);

// The packed bytes of an input; throws std::invalid_argument when their number does not fit `count` weights.
const uint8_t* packed_weight(const ort::Tensor& tensor, const LinearFormat& format, const char* name = "weight",
                             size_t count = 1);

}  // namespace pagelet
