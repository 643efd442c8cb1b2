// Activations, shared by the row kernels and the GEMM epilogue of one variant.

#pragma once

#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

// x / (1 + e^-u)
PENSTOCK_INLINE vf times_sigmoid(vf x, vf u) {
    return div(x, add(set1(1.0f), exp2_saturating(mul(u, set1(-1.44269504088896341f)))));
}

PENSTOCK_INLINE vf silu(vf x) { return times_sigmoid(x, x); }

// NaN stays NaN: of two numbers without an order `max` gives the second.
PENSTOCK_INLINE vf relu(vf x) { return max(set1(0.0f), x); }

PENSTOCK_INLINE vf gelu_tanh(vf x) {
    // 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    return times_sigmoid(x, mul(set1(1.5957691216057308f), fma(mul(set1(0.044715f), mul(x, x)), x, x)));
}

// x Phi(x), Phi being the normal distribution's function: 2 Phi(-|x|) = erfc(|x| / sqrt(2)) by formula 7.1.26 of Abramowitz and Stegun's
// Handbook of Mathematical Functions, which errs by 1.5e-7.
PENSTOCK_INLINE vf gelu(vf x) {
    const vf size = abs(x), t = div(set1(1.0f), fma(size, set1(0.3275911f * 0.70710678118654752f), set1(1.0f)));
    vf p = fma(set1(1.061405429f), t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    const vf tails = mul(mul(p, t), exp2(mul(mul(size, size), set1(-0.5f * 1.44269504088896341f))));
    return sub(relu(x), mul(mul(size, set1(0.5f)), tails));
}

// 1 - 2 / (1 + e^2x), which is 1 to the last bit from 10 on; NaN stays NaN.
PENSTOCK_INLINE vf tanh(vf x) {
    const vf u = min(set1(10.0f), max(set1(-10.0f), x));
    return sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), exp2(mul(u, set1(2.0f * 1.44269504088896341f))))));
}

// x, or e^x - 1 below 0: 2^n (2^r - 1) + 2^n - 1, by the series of 2^r, so that small numbers keep their digits. NaN stays NaN.
PENSTOCK_INLINE vf elu(vf x) {
    const vf a = max(set1(-126.0f), mul(min(set1(0.0f), x), set1(1.44269504088896341f)));
    const vf n = sub(add(a, set1(kRoundingMagic)), set1(kRoundingMagic)), r = sub(a, n), power = exp2(n);
    vf p = fma(set1(1.5403530e-4f), r, set1(1.3333558e-3f));
    p = fma(fma(p, r, set1(9.6181291e-3f)), r, set1(5.5504109e-2f));
    p = fma(fma(p, r, set1(2.4022651e-1f)), r, set1(6.9314718e-1f));
    return add(relu(x), fma(power, mul(p, r), sub(power, set1(1.0f))));
}

// The epilogue of a product with a gate.
PENSTOCK_INLINE vf gated(vf gate, vf up, ActivationKind kind) {
    return mul(kind == ActivationKind::kSilu ? silu(gate) : gelu_tanh(gate), up);
}

// Calls f with the activation.
template <typename F>
PENSTOCK_INLINE void for_activation(ActivationKind kind, F f) {
    switch (kind) {
        case ActivationKind::kSilu: return f([](vf x) PENSTOCK_LAMBDA { return silu(x); });
        case ActivationKind::kGeluTanh: return f([](vf x) PENSTOCK_LAMBDA { return gelu_tanh(x); });
        case ActivationKind::kGelu: return f([](vf x) PENSTOCK_LAMBDA { return gelu(x); });
        case ActivationKind::kGeluQuick: return f([](vf x) PENSTOCK_LAMBDA { return times_sigmoid(x, mul(x, set1(1.702f))); });
        case ActivationKind::kRelu: return f([](vf x) PENSTOCK_LAMBDA { return relu(x); });
        case ActivationKind::kRelu2: return f([](vf x) PENSTOCK_LAMBDA { return mul(relu(x), relu(x)); });
        case ActivationKind::kTanh: return f([](vf x) PENSTOCK_LAMBDA { return tanh(x); });
        case ActivationKind::kSigmoid: return f([](vf x) PENSTOCK_LAMBDA { return times_sigmoid(set1(1.0f), x); });
        case ActivationKind::kElu: return f([](vf x) PENSTOCK_LAMBDA { return elu(x); });
        case ActivationKind::kSwigluClamped: return;  // handled by for_gate
    }
}

// (u + 1) * g * sigmoid(1.702 g), with g the gate cut at 7 and u its partner cut to [-7, 7]; NaN stays NaN
PENSTOCK_INLINE vf swiglu_clamped(vf gate, vf up) {
    const vf limit = set1(7.0f), g = min(limit, gate), u = max(set1(-7.0f), min(limit, up));
    return mul(add(u, set1(1.0f)), times_sigmoid(g, mul(g, set1(1.702f))));
}

// Calls f with what the activation makes of a gate and its partner.
template <typename F>
PENSTOCK_INLINE void for_gate(ActivationKind kind, F f) {
    if (kind == ActivationKind::kSwigluClamped) return f([](vf gate, vf up) PENSTOCK_LAMBDA { return swiglu_clamped(gate, up); });
    for_activation(kind, [&](auto activate) PENSTOCK_LAMBDA { f([&](vf gate, vf up) PENSTOCK_LAMBDA { return mul(activate(gate), up); }); });
}

}  // namespace penstock::PENSTOCK_ISA
