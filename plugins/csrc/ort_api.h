// The part of ONNX Runtime's C ABI that the ops use. The official header is not needed to build: the
// function table only ever grows, so a slot keeps its number for good. tests/plugins/test_native.py compares
// every number here with the official header where that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagelet::ort {

constexpr uint32_t kApiVersion = 21;  // ONNX Runtime 1.21 and every later one serves it

struct Status;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct CustomOpDomain;
struct CustomOp;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kFloat8E4M3FN = 17,
};

enum Characteristic : int { kRequired = 0, kOptional = 1 };

// name, slot, result, parameters
#define PAGELET_ORT_FUNCTIONS(F)                                                                    \
  F(CreateStatus, 0, Status*, (ErrorCode, const char* message))                                     \
  F(GetErrorMessage, 2, const char*, (const Status*))                                               \
  F(CreateCustomOpDomain, 26, Status*, (const char* domain, CustomOpDomain** out))                  \
  F(CustomOpDomain_Add, 27, Status*, (CustomOpDomain*, const CustomOp*))                            \
  F(AddCustomOpDomain, 28, Status*, (SessionOptions*, CustomOpDomain*))                             \
  F(GetTensorMutableData, 51, Status*, (Value*, void** out))                                        \
  F(GetDimensionsCount, 61, Status*, (const TensorInfo*, size_t* out))                              \
  F(GetDimensions, 62, Status*, (const TensorInfo*, int64_t* dims, size_t count))                   \
  F(GetTensorTypeAndShape, 65, Status*, (const Value*, TensorInfo** out))                           \
  F(KernelInfoGetAttribute_float, 85, Status*, (const KernelInfo*, const char* name, float* out))   \
  F(KernelInfoGetAttribute_int64, 86, Status*, (const KernelInfo*, const char* name, int64_t* out)) \
  F(KernelInfoGetAttribute_string, 87, Status*,                                                     \
    (const KernelInfo*, const char* name, char* out, size_t* size))                                 \
  F(KernelContext_GetInputCount, 88, Status*, (const KernelContext*, size_t* out))                  \
  F(KernelContext_GetOutputCount, 89, Status*, (const KernelContext*, size_t* out))                 \
  F(KernelContext_GetInput, 90, Status*, (const KernelContext*, size_t index, const Value** out))   \
  F(KernelContext_GetOutput, 91, Status*,                                                           \
    (KernelContext*, size_t index, const int64_t* dims, size_t count, Value** out))                 \
  F(ReleaseStatus, 93, void, (Status*))                                                             \
  F(ReleaseTensorTypeAndShapeInfo, 99, void, (TensorInfo*))                                         \
  F(ReleaseCustomOpDomain, 101, void, (CustomOpDomain*))                                            \
  F(KernelInfo_GetInputCount, 230, Status*, (const KernelInfo*, size_t* out))                       \
  F(KernelInfoGetConstantInput_tensor, 249, Status*,                                                \
    (const KernelInfo*, size_t index, int* is_constant, const Value** out))                         \
  F(KernelContext_ParallelFor, 274, Status*,                                                        \
    (const KernelContext*, void (*body)(void*, size_t), size_t total, size_t batches, void* data))

// The host's table of function pointers; each function is one typed look-up of its slot.
struct Api {
  const void* first_slot;

#define PAGELET_ORT_MEMBER(name, slot, result, parameters)                    \
  static constexpr size_t k##name = slot;                                     \
  template <typename... Args>                                                 \
  result name(Args... args) const {                                           \
    return reinterpret_cast<result(*const*) parameters>(this)[slot](args...); \
  }
  PAGELET_ORT_FUNCTIONS(PAGELET_ORT_MEMBER)
#undef PAGELET_ORT_MEMBER
};

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// What the host calls: one static table per registered op and set of types (26 words).
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  ElementType (*GetInputType)(const CustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const CustomOp*);
  ElementType (*GetOutputType)(const CustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void* kernel, KernelContext*);
  void (*KernelDestroy)(void* kernel);
  Characteristic (*GetInputCharacteristic)(const CustomOp*, size_t index);
  Characteristic (*GetOutputCharacteristic)(const CustomOp*, size_t index);
  int (*GetInputMemoryType)(const CustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext*);
  Status* (*InferOutputShape)(const CustomOp*, void* shape_context);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};
static_assert(sizeof(CustomOp) == 26 * sizeof(void*));

}  // namespace pagelet::ort
