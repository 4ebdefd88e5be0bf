// The attributes of Linear and Experts that say what happens to a product: activation, its parameters
// activation_a, activation_b, …, and output_scale.
#pragma once

#include "linear_kernel.h"
#include "ort_op.h"

namespace pagelet {

// Without the attribute: silu of a gate, and nothing of a layer without one. Throws std::invalid_argument.
Activation activation_attributes(const ort::Api& api, const ort::KernelInfo* info, bool gated);

float output_scale_attribute(const ort::Api& api, const ort::KernelInfo* info);

}  // namespace pagelet
