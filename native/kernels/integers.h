// Queries and keys as 16-bit integers with a scale per head, shared by the KV write and the attention of one variant.

#pragma once

#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

// Scales below it belong to zeros: the squares of such columns underflow, which leaves their norm unknown.
constexpr float kSmallest = 1e-24f;

struct IntegerScale {
    float scale;    // x = integer * scale
    float inverse;  // integer = x * inverse, rounded
};

// Of one head's columns; not finite if one of them is not.
PENSTOCK_INLINE IntegerScale integer_scale(const float* x, int head_dim) {
    vf squares = set1(0.0f), largest = set1(0.0f);
    for (int d = 0; d < head_dim; d += kLanes) {
        const vf a = load(x + d);
        squares = fma(a, a, squares);
        largest = max(largest, abs(a));
    }
    const float by_norm = sqrtf(reduce_add(squares)) / kLargestNorm, by_largest = reduce_max(largest) / kLargestInteger;
    const float scale = by_largest > by_norm ? by_largest : by_norm;  // NaN, if there is one, is in by_norm
    if (!(scale < INFINITY)) return {NAN, 0.0f};  // whatever the integers become, no score is a number
    return {scale, scale < kSmallest ? 0.0f : 1.0f / scale};
}

PENSTOCK_INLINE void store_integers(int16_t* out, vf x, IntegerScale s) { store_i16(out, mul(x, set1(s.inverse))); }

}  // namespace penstock::PENSTOCK_ISA
