// Gated activations, shared by the row kernels and the GEMM epilogue of one variant.

#pragma once

#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

// x / (1 + e^-u)
PENSTOCK_INLINE vf times_sigmoid(vf x, vf u) {
    return div(x, add(set1(1.0f), exp2_saturating(mul(u, set1(-1.44269504088896341f)))));
}

PENSTOCK_INLINE vf silu(vf x) { return times_sigmoid(x, x); }

PENSTOCK_INLINE vf gelu_tanh(vf x) {
    // 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    return times_sigmoid(x, mul(set1(1.5957691216057308f), fma(mul(set1(0.044715f), mul(x, x)), x, x)));
}

PENSTOCK_INLINE vf gated(vf gate, vf up, ActivationKind kind) {
    return mul(kind == ActivationKind::kSilu ? silu(gate) : gelu_tanh(gate), up);
}

}  // namespace penstock::PENSTOCK_ISA
