#include "ort_op.h"

namespace pagelet::ort {
namespace {

std::string shape_text(const int64_t* dims, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) {
    text += (i ? ", " : "") + (dims[i] < 0 ? std::string("any") : std::to_string(dims[i]));
  }
  return text + "]";
}

Tensor describe(const Api& api, const Value* value) {
  Tensor tensor;
  if (!value) return tensor;
  tensor.present = true;
  TensorInfo* info = nullptr;
  check(api, api.GetTensorTypeAndShape(value, &info));
  Status* status = api.GetDimensionsCount(info, &tensor.rank);
  const bool fits = tensor.rank <= kMaxRank;
  if (!status && fits) status = api.GetDimensions(info, tensor.dims, tensor.rank);
  api.ReleaseTensorTypeAndShapeInfo(info);
  check(api, status);
  if (!fits)
    throw std::invalid_argument("a tensor has " + std::to_string(tensor.rank) + " dimensions, at most 8 fit");
  check(api, api.GetTensorMutableData(const_cast<Value*>(value), &tensor.data));
  return tensor;
}

// Runs `read` on the attribute; an absent one is not an error.
template <typename T, typename Read>
T attribute_or(const Api& api, T fallback, Read read) {
  T value = fallback;
  Status* status = read(&value);
  if (!status) return value;
  api.ReleaseStatus(status);
  return fallback;
}

void run_parallel(const ParallelFor& self, size_t total, void (*body)(void*, size_t), void* data) {
  const auto& api = *static_cast<const Api*>(self.host);
  const auto* context = static_cast<const KernelContext*>(self.context);
  check(api, api.KernelContext_ParallelFor(context, body, total, size_t{0}, data));
}

}  // namespace

void expect_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected,
                  const char* remark) {
  bool same = tensor.rank == expected.size();
  for (size_t i = 0; same && i < tensor.rank; ++i) {
    const int64_t want = expected.begin()[i];
    same = want < 0 || tensor.dims[i] == want;
  }
  if (same) return;
  throw std::invalid_argument(std::string(name) + " has shape " + shape_text(tensor.dims, tensor.rank) +
                              ", expected " + shape_text(expected.begin(), expected.size()) + remark);
}

Context::Context(const Api& api, KernelContext* context) : api_(api), context_(context) {
  check(api_, api_.KernelContext_GetInputCount(context_, &inputs_));
  check(api_, api_.KernelContext_GetOutputCount(context_, &outputs_));
}

Tensor Context::input(size_t index) const {
  if (index >= inputs_) return {};
  const Value* value = nullptr;
  check(api_, api_.KernelContext_GetInput(context_, index, &value));
  return describe(api_, value);
}

void* Context::output(size_t index, const int64_t* dims, size_t rank) const {
  if (index >= outputs_) return nullptr;
  Value* value = nullptr;
  void* data = nullptr;
  check(api_, api_.KernelContext_GetOutput(context_, index, dims, rank, &value));
  if (value) check(api_, api_.GetTensorMutableData(value, &data));
  return data;
}

ConstantInput::ConstantInput(const Api& api, const KernelInfo* info, size_t index) : index_(index) {
  size_t count = 0;
  check(api, api.KernelInfo_GetInputCount(info, &count));
  if (index >= count) return;
  int constant = 0;
  const Value* value = nullptr;
  Status* status = api.KernelInfoGetConstantInput_tensor(info, index, &constant, &value);
  if (!status && constant) tensor_ = describe(api, value);
  if (status) api.ReleaseStatus(status);  // an input that is left out
}

ParallelFor Context::parallel_for() const { return {&api_, context_, run_parallel}; }

int64_t attribute(const Api& api, const KernelInfo* info, const char* name, int64_t fallback) {
  return attribute_or(api, fallback,
                      [&](int64_t* out) { return api.KernelInfoGetAttribute_int64(info, name, out); });
}

float attribute(const Api& api, const KernelInfo* info, const char* name, float fallback) {
  return attribute_or(api, fallback,
                      [&](float* out) { return api.KernelInfoGetAttribute_float(info, name, out); });
}

std::string attribute(const Api& api, const KernelInfo* info, const char* name, const char* fallback) {
  char text[64];  // a name; what is longer counts as absent
  size_t size = sizeof text;
  const auto read = [&](const char** out) {
    *out = text;
    return api.KernelInfoGetAttribute_string(info, name, text, &size);
  };
  return attribute_or(api, fallback, read);
}

}  // namespace pagelet::ort
