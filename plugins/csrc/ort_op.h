// From ONNX Runtime's C ABI to plain C++: tensors, attributes, exceptions, and the table that describes an
// op.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>

#include "ort_api.h"
#include "parallel.h"

namespace pagelet::ort {

// Throws std::runtime_error with the host's message.
inline void check(const Api& api, Status* status) {
  if (!status) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw std::runtime_error(message);
}

// Runs `body`; whatever it throws becomes a status: nothing is thrown across the ABI.
template <typename Body>
Status* guarded(const Api& api, Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::invalid_argument& error) {
    return api.CreateStatus(kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return api.CreateStatus(kFail, error.what());
  } catch (...) {
    return api.CreateStatus(kFail, "pagelet: unknown error");
  }
}

constexpr size_t kMaxRank = 8;

struct Tensor {
  void* data = nullptr;  // null when the optional input is absent (or the tensor is empty)
  bool present = false;
  size_t rank = 0;
  int64_t dims[kMaxRank] = {};

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// What was found and what was expected, with every dimension that is not -1 checked. The error ends with `remark`.
void expect_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected,
                  const char* remark = "");

class Context {
 public:
  Context(const Api& api, KernelContext* context);

  Tensor input(size_t index) const;
  void* output(size_t index, const int64_t* dims, size_t rank) const;  // null when absent (or empty)
  ParallelFor parallel_for() const;

 private:
  const Api& api_;
  KernelContext* context_;
  size_t inputs_ = 0, outputs_ = 0;
};

// An initializer among a node's inputs, which stays where it is: to look it up once saves a microsecond per call
// (code and data of the host are cold between two layers of a model).
class ConstantInput {
 public:
  ConstantInput(const Api& api, const KernelInfo* info, size_t index);
  Tensor get(const Context& context) const { return tensor_.present ? tensor_ : context.input(index_); }

 private:
  size_t index_;
  Tensor tensor_;  // not present: no initializer
};

// Attributes of a node, with a default for an absent one.
int64_t attribute(const Api& api, const KernelInfo* info, const char* name, int64_t fallback);
float attribute(const Api& api, const KernelInfo* info, const char* name, float fallback);
std::string attribute(const Api& api, const KernelInfo* info, const char* name, const char* fallback);

struct Port {
  ElementType type;
  Characteristic characteristic = kRequired;
};

struct Alias {
  int input, output;
};

// The table of an op. `Op` has: static constexpr kName, kInputs[], kOutputs[] (Port), a constructor
// (const Api&, const KernelInfo*), compute(const Context&) and, where it writes in place, kAliases[] (Alias).
template <typename Op>
class OpTable {
 public:
  static const CustomOp* get() {
    static const CustomOp table = make();
    return &table;
  }

 private:
  struct Kernel {
    Kernel(const Api& host, const KernelInfo* info) : api(host), op(host, info) {}
    const Api& api;
    Op op;
  };

  static CustomOp make() {
    CustomOp table{};
    table.version = kApiVersion;
    table.GetName = [](const CustomOp*) { return Op::kName; };
    table.GetExecutionProviderType = [](const CustomOp*) -> const char* { return "CPUExecutionProvider"; };
    table.GetInputTypeCount = [](const CustomOp*) { return std::size(Op::kInputs); };
    table.GetInputType = [](const CustomOp*, size_t i) { return Op::kInputs[i].type; };
    table.GetInputCharacteristic = [](const CustomOp*, size_t i) { return Op::kInputs[i].characteristic; };
    table.GetOutputTypeCount = [](const CustomOp*) { return std::size(Op::kOutputs); };
    table.GetOutputType = [](const CustomOp*, size_t i) { return Op::kOutputs[i].type; };
    table.GetOutputCharacteristic = [](const CustomOp*, size_t i) { return Op::kOutputs[i].characteristic; };
    table.GetInputMemoryType = [](const CustomOp*, size_t) { return 0; };
    table.CreateKernelV2 = create;
    table.KernelComputeV2 = compute;
    table.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    if constexpr (has_aliases<Op>(0)) {
      table.GetAliasMap = alias_map;
      table.ReleaseAliasMap = [](int* inputs, int* outputs) {
        delete[] inputs;
        delete[] outputs;
      };
    }
    return table;
  }

  template <typename T>
  static constexpr auto has_aliases(int) -> decltype(T::kAliases, true) {
    return true;
  }
  template <typename T>
  static constexpr bool has_aliases(...) {
    return false;
  }

  static Status* create(const CustomOp*, const Api* api, const KernelInfo* info, void** kernel) {
    return guarded(*api, [&] { *kernel = new Kernel(*api, info); });
  }

  static Status* compute(void* kernel, KernelContext* context) {
    auto* self = static_cast<Kernel*>(kernel);
    return guarded(self->api, [&] { self->op.compute(Context(self->api, context)); });
  }

  static size_t alias_map(int** inputs, int** outputs) {
    constexpr size_t count = std::size(Op::kAliases);
    *inputs = new int[count];
    *outputs = new int[count];
    for (size_t i = 0; i < count; ++i) {
      (*inputs)[i] = Op::kAliases[i].input;
      (*outputs)[i] = Op::kAliases[i].output;
    }
    return count;
  }
};

}  // namespace pagelet::ort
