// The tables of the ops that register.cc lists: one function per op and set of types.
#pragma once

#include "ort_api.h"

namespace pagelet {

const ort::CustomOp* paged_attention_f32();
const ort::CustomOp* paged_attention_f16();
const ort::CustomOp* paged_attention_int8();
const ort::CustomOp* paged_attention_fp8();
const ort::CustomOp* linear();
const ort::CustomOp* experts();
const ort::CustomOp* embedding();

}  // namespace pagelet
