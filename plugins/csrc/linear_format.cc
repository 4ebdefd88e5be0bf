#include "linear_format.h"

#include <string>

namespace pagelet {
namespace {

constexpr int64_t kMaxFeatures = int64_t{1} << 24;  // products of two and the bytes per group fit 64 bits

int64_t bounded(const ort::Api& api, const ort::KernelInfo* info, const char* name, int64_t low, int64_t high) {
  const int64_t value = ort::attribute(api, info, name, int64_t{-1});
  if (value >= low && value <= high) return value;
  throw std::invalid_argument(std::string("attribute ") + name + " is " + std::to_string(value) + ", expected " +
                              std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace

LinearFormat::LinearFormat(const ort::Api& api, const ort::KernelInfo* info)
    : in_features(bounded(api, info, "in_features", 1, kMaxFeatures)),
      out_features(bounded(api, info, "out_features", 1, kMaxFeatures)),
      bits(bounded(api, info, "bits", 4, 8)),
      group_size(bounded(api, info, "group_size", 32, 128)),
      asymmetric(bounded(api, info, "asymmetric", 0, 1) != 0) {
  const std::string text = "bits " + std::to_string(bits) + ", group_size " + std::to_string(group_size) +
                           ", asymmetric " + std::to_string(asymmetric) + ", in_features " +
                           std::to_string(in_features);
  if ((bits != 4 && bits != 8) || (bits == 8 && asymmetric)) {
    throw std::invalid_argument(text + ": expected 4 bits, or 8 bits and symmetric");
  }
  if ((group_size != 32 && group_size != 64 && group_size != 128) || in_features % group_size != 0) {
    throw std::invalid_argument(text + ": expected groups of 32, 64 or 128 that divide in_features");
  }
}

LinearStorage LinearFormat::storage() const {
  if (bits == 8) return LinearStorage::int8_symmetric;
  return asymmetric ? LinearStorage::int4_asymmetric : LinearStorage::int4_symmetric;
}

const uint8_t* packed_weight(const ort::Tensor& tensor, const LinearFormat& format) {
  ort::expect_shape(tensor, "weight", {static_cast<int64_t>(format.packed_bytes())});
  return tensor.as<const uint8_t>();
}

}  // namespace pagelet
