// Embedding as an op of ONNX Runtime: the dequantized rows of a packed weight, output [T, K]. It shares
// the weight with the Linear of a tied head, where a row is an output column.
#include <cstring>
#include <string>

#include "linear_format.h"
#include "linear_half.h"
#include "ops.h"

namespace pagelet {
namespace {

// The codes of input 4 * chunk + j of a block lie at byte j of a column's part of that chunk; 4-bit codes of the
// second half of the block are the high nibbles.
float code_at(const LinearFormat& format, const uint8_t* column, size_t input) {
  if (format.type == WeightType::int8) return static_cast<int8_t>(column[64 * (input / 4) + input % 4]);
  const uint8_t pair = column[64 * (input % 16 / 4) + input % 4];
  const int code = input < 16 ? pair & 15 : pair >> 4;
  return static_cast<float>(format.asymmetric ? code : code - 8);
}

// out [in_features], of integers: scale * code is exact in FP32, so one rounding is left, that of adding the minimum.
void dequantize_integers(const LinearFormat& format, const uint8_t* tile, size_t column, float* out) {
  const size_t block_bytes = kBlockInputs * format.code_bytes() / format.group_size;
  const uint8_t* group = tile;
  for (size_t k = 0; k < format.in_features; k += format.group_size, group += format.group_bytes()) {
    const uint8_t* values = group + format.code_bytes() + 2 * column;
    const float scale = half_at(values);
    const float minimum = format.asymmetric ? half_at(values + 2 * kTileColumns) : 0.0f;
    for (size_t i = 0; i < format.group_size; ++i) {
      const uint8_t* block = group + i / kBlockInputs * block_bytes;
      const float value = scale * code_at(format, block + 4 * column, i % kBlockInputs);
      out[k + i] = format.asymmetric ? value + minimum : value;
    }
  }
}

template <typename T>
T number_at(const uint8_t* numbers, size_t index) {
  T number;
  std::memcpy(&number, numbers + index * sizeof number, sizeof number);
  return number;
}

float bf16_to_float(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  return number_at<float>(reinterpret_cast<const uint8_t*>(&bits), 0);
}

// E4M3's bits, moved to their places in FP16, are those of a 256th of the value.
float e4m3_to_float(uint8_t code) {
  return 256.0f * half_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7));
}

float float_at(WeightType type, const uint8_t* numbers, size_t index) {
  switch (type) {
    case WeightType::fp8: return e4m3_to_float(numbers[index]);
    case WeightType::bf16: return bf16_to_float(number_at<uint16_t>(numbers, index));
    case WeightType::f16: return half_to_float(number_at<uint16_t>(numbers, index));
    default: return number_at<float>(numbers, index);
  }
}

// out [in_features], of plain floats and FP8.
void dequantize_floats(const LinearFormat& format, const uint8_t* tile, size_t column, float* out) {
  const uint8_t* group = tile;
  for (size_t k = 0; k < format.in_features; k += format.group_size, group += format.group_bytes()) {
    const bool scaled = format.type == WeightType::fp8;
    const float scale = scaled ? number_at<float>(group + format.code_bytes(), column) : 1.0f;
    for (size_t i = 0; i < format.group_size; ++i) {
      out[k + i] = scale * float_at(format.type, group, i * kTileColumns + column);
    }
  }
}

void dequantize_row(const LinearFormat& format, const uint8_t* weight, size_t row, float* out) {
  const uint8_t* tile = weight + row / kTileColumns * format.tile_bytes();
  const size_t column = row % kTileColumns;
  return is_integer(format.type) ? dequantize_integers(format, tile, column, out)
                                 : dequantize_floats(format, tile, column, out);
}

class Embedding {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr ort::Port kInputs[] = {{ort::kInt64}, {ort::kUint8}};
  static constexpr ort::Port kOutputs[] = {{ort::kFloat}};

  Embedding(const ort::Api& api, const ort::KernelInfo* info) : format_(api, info) {}

  void compute(const ort::Context& context) const {
    const ort::Tensor input_ids = context.input(0);
    ort::expect_shape(input_ids, "input_ids", {-1});
    const uint8_t* weight = packed_weight(context.input(1), format_);
    const auto* ids = input_ids.as<const int64_t>();
    const int64_t tokens = input_ids.dims[0], rows = static_cast<int64_t>(format_.out_features);
    for (int64_t t = 0; t < tokens; ++t) {
      if (ids[t] >= 0 && ids[t] < rows) continue;
      throw std::invalid_argument("input_ids[" + std::to_string(t) + "] is " + std::to_string(ids[t]) +
                                  ", expected 0 to " + std::to_string(rows - 1));
    }
    const int64_t dims[] = {tokens, static_cast<int64_t>(format_.in_features)};
    auto* out = static_cast<float*>(context.output(0, dims, 2));
    for_each(context.parallel_for(), static_cast<size_t>(tokens), [&](size_t t) {
      dequantize_row(format_, weight, static_cast<size_t>(ids[t]), out + t * format_.in_features);
    });
  }

 private:
  LinearFormat format_;
};

}  // namespace

const ort::CustomOp* embedding() { return ort::OpTable<Embedding>::get(); }

}  // namespace pagelet
