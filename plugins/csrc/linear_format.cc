#include "linear_format.h"

#include <cstdio>

namespace pagelet {
namespace {

struct NamedType {
  const char* name;
  WeightType type;
};
constexpr NamedType kTypes[] = {{"int4", WeightType::int4}, {"int8", WeightType::int8}, {"fp8", WeightType::fp8},
                                {"bf16", WeightType::bf16}, {"f16", WeightType::f16},   {"f32", WeightType::f32}};

WeightType weight_type(const ort::Api& api, const ort::KernelInfo* info, const std::string& attribute) {
  const std::string name = ort::attribute(api, info, attribute.c_str(), "");
  std::string known;
  for (const NamedType& each : kTypes) {
    if (name == each.name) return each.type;
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  throw std::invalid_argument("attribute " + attribute + " is '" + name + "', expected one of " + known);
}

bool group_fits(WeightType type, size_t group_size, size_t in_features) {
  if (type == WeightType::int4 || type == WeightType::int8 || type == WeightType::fp8) {
    const bool usual = group_size == 32 || group_size == 64 || group_size == 128;
    if (usual) return in_features % group_size == 0;
    return type == WeightType::fp8 && group_size == in_features;
  }
  return group_size == in_features;
}

}  // namespace

int64_t bounded_attribute(const ort::Api& api, const ort::KernelInfo* info, const char* name, int64_t low, int64_t high,
                          int64_t fallback) {
  const int64_t value = ort::attribute(api, info, name, fallback);
  if (value >= low && value <= high) return value;
  throw std::invalid_argument(std::string("attribute ") + name + " is " + std::to_string(value) + ", expected " +
                              std::to_string(low) + " to " + std::to_string(high));
}

float bounded_float_attribute(const ort::Api& api, const ort::KernelInfo* info, const char* name, float low,
                              float high, float fallback) {
  const float value = ort::attribute(api, info, name, fallback);
  if (value >= low && value <= high) return value;
  char text[128];
  std::snprintf(text, sizeof text, " is %g, expected %g to %g", value, low, high);
  throw std::invalid_argument(std::string("attribute ") + name + text);
}

LinearFormat::LinearFormat(const ort::Api& api, const ort::KernelInfo* info)
    : LinearFormat(api, info, bounded_attribute(api, info, "in_features", 1, kMaxFeatures),
                   bounded_attribute(api, info, "out_features", 1, kMaxFeatures), "") {}

LinearFormat::LinearFormat(const ort::Api& api, const ort::KernelInfo* info, int64_t in_features,
                           int64_t out_features, const std::string& prefix)
    : in_features(in_features),
      out_features(out_features),
      type(weight_type(api, info, prefix + "weight_type")),
      group_size(bounded_attribute(api, info, (prefix + "group_size").c_str(), 0, kMaxFeatures, 0)),
      asymmetric(bounded_attribute(api, info, (prefix + "asymmetric").c_str(), 0, 1, 0) != 0) {
  if (group_size == 0) group_size = in_features;
  if (asymmetric && type != WeightType::int4) {
    throw std::invalid_argument("attribute " + prefix + "asymmetric is 1, which only int4 weights can be");
  }
  if (!group_fits(type, group_size, in_features)) {
    throw std::invalid_argument(prefix + "group_size is " + std::to_string(group_size) + " for " +
                                std::to_string(in_features) +
                                " inputs: expected 32, 64 or 128 that divides them; of fp8 also 0, one scale per "
                                "channel; of plain floats 0");
  }
}

size_t LinearFormat::bits(WeightType type) {
  switch (type) {
    case WeightType::int4:
      return 4;
    case WeightType::int8:
    case WeightType::fp8:
      return 8;
    case WeightType::bf16:
    case WeightType::f16:
      return 16;
    case WeightType::f32:
      break;
  }
  return 32;
}

size_t LinearFormat::scale_bytes() const {
  if (type == WeightType::int4 || type == WeightType::int8) return kTileColumns * sizeof(uint16_t);
  return type == WeightType::fp8 ? kTileColumns * sizeof(float) : 0;
}

const uint8_t* packed_weight(const ort::Tensor& tensor, const LinearFormat& format, const char* name, size_t count) {
  ort::expect_shape(tensor, name, {static_cast<int64_t>(count * format.packed_bytes())});
  return tensor.as<const uint8_t>();
}

}  // namespace pagelet
