// The attributes of QuantizedLinear and QuantizedEmbedding, and what follows from them about the packed weight
// (layout: plugins/packing.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear_kernel.h"
#include "ort_op.h"

namespace pagelet {

struct LinearFormat {
  // Reads in_features, out_features, bits, group_size and asymmetric; throws std::invalid_argument.
  LinearFormat(const ort::Api& api, const ort::KernelInfo* info);

  size_t in_features, out_features, bits, group_size;
  bool asymmetric;

  size_t tiles() const { return (out_features + kTileColumns - 1) / kTileColumns; }
  size_t code_bytes() const { return kTileColumns * group_size * bits / 8; }  // of one group of one tile
  size_t group_bytes() const { return code_bytes() + 2 * kTileColumns * (asymmetric ? 2 : 1); }
  size_t tile_bytes() const { return in_features / group_size * group_bytes(); }
  size_t packed_bytes() const { return tiles() * tile_bytes(); }
  LinearStorage storage() const;
};

// The packed bytes of an input; throws std::invalid_argument when their number does not fit the attributes.
const uint8_t* packed_weight(const ort::Tensor& tensor, const LinearFormat& format);

}  // namespace pagelet
