// The one symbol that ONNX Runtime looks for, and the list of ops.
#include "isa.h"
#include "ops.h"
#include "ort_op.h"

namespace pagelet {
namespace {

using OpGetter = const ort::CustomOp* (*)();

// One entry per op and set of types.
constexpr OpGetter kOps[] = {
    paged_attention_f32,
    paged_attention_f16,
    paged_attention_int8,
    paged_attention_fp8,
    linear,
    experts,
    embedding,
};

// The host does not own a domain: it must outlive every session, and is shared by all of them.
struct Domain {
  explicit Domain(const ort::Api& host) : api(host) {
    ort::check(api, api.CreateCustomOpDomain("pagelet", &domain));
    for (const OpGetter op : kOps) ort::check(api, api.CustomOpDomain_Add(domain, op()));
  }
  ~Domain() { api.ReleaseCustomOpDomain(domain); }

  const ort::Api& api;
  ort::CustomOpDomain* domain = nullptr;
};

}  // namespace
}  // namespace pagelet

#ifdef _WIN32
extern "C" __declspec(dllexport)
#else
extern "C" __attribute__((visibility("default")))
#endif
pagelet::ort::Status* RegisterCustomOps(pagelet::ort::SessionOptions* options,
                                        const pagelet::ort::ApiBase* base) {
  namespace ort = pagelet::ort;
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  if (!api) {
    const std::string found = base->GetVersionString();
    const std::string message = "pagelet's ops need ONNX Runtime 1.21 or later, this is " + found;
    return base->GetApi(1)->CreateStatus(ort::kFail, message.c_str());
  }
  return ort::guarded(*api, [&] {
    pagelet::selected_isa();  // a wrong PAGELET_ISA is an error here, not in the first run
    static const pagelet::Domain domain(*api);
    ort::check(*api, api->AddCustomOpDomain(options, domain.domain));
  });
}
