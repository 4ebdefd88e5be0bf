// Activation functions on vectors: every lane by itself, NaN to NaN. Included by linear_kernel.cc only. Parameters
// and formulas: plugins/activations.py; how exact they are: tests/plugins/test_activations.py.
#pragma once

#include "linear_kernel.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

PAGELET_INLINE Vec negated(Vec x) { return sub(set1(0.0f), x); }

// e^x - 1, also near 0, where e^x would have lost x's last bits. At most e^88.3.
PAGELET_INLINE Vec expm1(Vec x) {
  const ReducedExp e = reduced_exp(max(set1(-87.0f), min(set1(88.3f), x)));
  const Vec scale = exp_bits(set1(1.0f), e.biased);  // 2^n: e^x - 1 = 2^n (e^r - 1) + (2^n - 1)
  return fmadd(e.fraction, scale, sub(scale, set1(1.0f)));
}

PAGELET_INLINE Vec tanh(Vec x) {
  const Vec e = expm1(add(x, x));
  return div(e, add(e, set1(2.0f)));
}

// x / (1 + e^-t)
PAGELET_INLINE Vec times_sigmoid(Vec x, Vec t) { return div(x, add(set1(1.0f), exp(negated(t)))); }

PAGELET_INLINE Vec silu(Vec x) { return times_sigmoid(x, x); }

PAGELET_INLINE Vec relu(Vec x) { return max(set1(0.0f), x); }

// x Phi(x) = max(x, 0) - |x| Phi(-|x|), where the normal distribution's tail Phi(-a) is e^(-a^2 / 2) q(t) / (a + 3),
// q a minimax polynomial of t = (a - 3) / (a + 3) for a up to 14, beyond which nothing is left of the tail. The form
// is that of Shepherd and Laframboise, Mathematics of Computation 36, 1981.
PAGELET_INLINE Vec gelu(Vec x) {
  const Vec a = min(set1(14.0f), max(negated(x), x));
  const Vec inverse = div(set1(1.0f), add(a, set1(3.0f)));
  const Vec t = fmadd(inverse, set1(-6.0f), set1(1.0f));
  Vec q = set1(-0.000266765244f);
  q = fmadd(q, t, set1(-0.000903250708f));
  q = fmadd(q, t, set1(0.00107603648f));
  q = fmadd(q, t, set1(0.00692392094f));
  q = fmadd(q, t, set1(-0.0104799354f));
  q = fmadd(q, t, set1(-0.0472561009f));
  q = fmadd(q, t, set1(0.230019346f));
  q = fmadd(q, t, set1(-0.509332299f));
  q = fmadd(q, t, set1(0.729083657f));
  const Vec tail = mul(mul(q, inverse), exp(mul(mul(a, a), set1(-0.5f))));
  return sub(relu(x), mul(a, tail));
}

// x (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3). Below -10 it is less than 1e-36.
PAGELET_INLINE Vec gelu_tanh(Vec x) {
  const Vec bounded = max(set1(-10.0f), x);
  const Vec square = mul(bounded, bounded);
  const Vec slope = fmadd(square, set1(0.0713548163f), set1(1.59576912f));  // 2u = x slope
  return times_sigmoid(bounded, mul(bounded, slope));
}

PAGELET_INLINE Vec softcap(Vec x, float cap) { return mul(set1(cap), tanh(div(x, set1(cap)))); }

// Below a gate of -50 it is less than 1e-34 times the rest.
PAGELET_INLINE Vec swiglu_oai(Vec gate, Vec up, float limit) {
  const Vec bounded = max(set1(-50.0f), min(set1(limit), gate));
  const Vec glu = times_sigmoid(bounded, mul(bounded, set1(1.702f)));
  return mul(add(max(set1(-limit), min(set1(limit), up)), set1(1.0f)), glu);
}

// Of x <= 0 the terms in beta x are one, so that nothing cancels: (alpha + beta) expm1(min(x, eps)) - alpha x.
PAGELET_INLINE Vec xielu(Vec x, const float parameters[4]) {
  const Vec alpha_p = set1(parameters[0]), alpha_n = set1(parameters[1]), beta = set1(parameters[2]);
  const Vec positive = mul(x, fmadd(alpha_p, x, beta));
  const Vec negative = fmadd(add(alpha_n, beta), expm1(min(set1(parameters[3]), x)), negated(mul(alpha_n, x)));
  return add(zero_below(positive, x, set1(0.0f)), zero_below(negative, negated(x), set1(0.0f)));
}

PAGELET_INLINE Vec activated(const Activation& activation, Vec x) {
  switch (activation.function) {
    case ActivationFunction::silu: return silu(x);
    case ActivationFunction::gelu: return gelu(x);
    case ActivationFunction::gelu_tanh: return gelu_tanh(x);
    case ActivationFunction::relu: return relu(x);
    case ActivationFunction::relu2: return mul(relu(x), relu(x));
    case ActivationFunction::softcap: return softcap(x, activation.parameters[0]);
    case ActivationFunction::xielu: return xielu(x, activation.parameters);
    case ActivationFunction::none:
    case ActivationFunction::swiglu_oai: break;  // of a gate only
  }
  return x;
}

PAGELET_INLINE Vec gated(const Activation& activation, Vec gate, Vec up) {
  if (activation.function == ActivationFunction::swiglu_oai) return swiglu_oai(gate, up, activation.parameters[0]);
  return mul(activated(activation, gate), up);
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
