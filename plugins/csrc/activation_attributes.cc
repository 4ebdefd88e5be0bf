#include "activation_attributes.h"

#include <cmath>
#include <string>

#include "linear_format.h"

namespace pagelet {
namespace {

constexpr float kLargest = 1e6f;  // of a parameter and of a factor
constexpr char kLetters[] = "abcd";

struct NamedFunction {
  const char* name;
  ActivationFunction function;
  size_t parameters;
  float lowest;  // of a parameter
};
// One table with plugins/activations.py, which a test compares.
constexpr NamedFunction kFunctions[] = {
    {"none", ActivationFunction::none, 0, 0.0f},
    {"silu", ActivationFunction::silu, 0, 0.0f},
    {"gelu", ActivationFunction::gelu, 0, 0.0f},
    {"gelu_tanh", ActivationFunction::gelu_tanh, 0, 0.0f},
    {"relu", ActivationFunction::relu, 0, 0.0f},
    {"relu2", ActivationFunction::relu2, 0, 0.0f},
    {"softcap", ActivationFunction::softcap, 1, 1e-6f},
    {"swiglu_oai", ActivationFunction::swiglu_oai, 1, 1e-6f},
    {"xielu", ActivationFunction::xielu, 4, -kLargest},
};

const NamedFunction& function_named(const std::string& name) {
  std::string known;
  for (const NamedFunction& each : kFunctions) {
    if (name == each.name) return each;
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  throw std::invalid_argument("attribute activation is '" + name + "', expected one of " + known);
}

}  // namespace

Activation activation_attributes(const ort::Api& api, const ort::KernelInfo* info, bool gated) {
  const NamedFunction& named = function_named(ort::attribute(api, info, "activation", gated ? "silu" : "none"));
  Activation activation{named.function, {}};
  for (size_t i = 0; i < std::size(activation.parameters); ++i) {
    const std::string name = std::string("activation_") + kLetters[i];
    if (i < named.parameters) {
      activation.parameters[i] = bounded_float_attribute(api, info, name.c_str(), named.lowest, kLargest, NAN);
    } else if (!std::isnan(ort::attribute(api, info, name.c_str(), NAN))) {
      throw std::invalid_argument("attribute " + name + " is given, but " + named.name + " has " +
                                  std::to_string(named.parameters) + " parameters");
    }
  }
  if (named.function == ActivationFunction::swiglu_oai && !gated) {
    throw std::invalid_argument("attribute activation is 'swiglu_oai', which needs a gate: set gated=1");
  }
  return activation;
}

float output_scale_attribute(const ort::Api& api, const ort::KernelInfo* info) {
  return bounded_float_attribute(api, info, "output_scale", -kLargest, kLargest, 1.0f);
}

}  // namespace pagelet
