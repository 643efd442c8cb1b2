// Queries and keys as 16-bit integers with a scale per head, shared by the KV write and the attention of one variant.

#pragma once

#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

// Smaller scales mean zeros: the squares of such columns underflow, so their norm is unknown.
constexpr float kSmallest = 1e-24f;

struct IntegerScale {
    float scale;    // x = integer * scale
    float inverse;  // integer = x * inverse, rounded
};

// The sum of the squares of one head's columns, and their largest size.
struct Extent {
    float squares, largest;
};

PENSTOCK_INLINE Extent extent_of(const float* x, int head_dim) {
    vf squares = set1(0.0f), largest = set1(0.0f);
    for (int d = 0; d < head_dim; d += kLanes) {
        const vf a = load(x + d);
        squares = fma(a, a, squares);
        largest = max(largest, abs(a));
    }
    return {reduce_add(squares), reduce_max(largest)};
}

// For sixteen heads side by side; not finite if a column is not.
PENSTOCK_INLINE void integer_scales(const float* squares, const float* largest, IntegerScale* out) {
    alignas(64) float scale[kLanes], inverse[kLanes];
    const vf by_norm = div(sqrt(load(squares)), set1(kLargestNorm)), by_largest = div(load(largest), set1(kLargestInteger));
    const vf larger = max(by_largest, by_norm);  // in this order NaN, which is in by_norm if there is one, stays
    store(scale, larger);
    store(inverse, div(set1(1.0f), larger));
    for (int i = 0; i < kLanes; ++i) {
        out[i] = {scale[i], scale[i] < kSmallest ? 0.0f : inverse[i]};
        if (!(scale[i] < INFINITY)) out[i] = {NAN, 0.0f};  // all scores become NaN, whatever the integers
    }
}

PENSTOCK_INLINE IntegerScale integer_scale(const float* x, int head_dim) {
    const Extent extent = extent_of(x, head_dim);
    alignas(64) float squares[kLanes] = {extent.squares}, largest[kLanes] = {extent.largest};
    IntegerScale scales[kLanes];
    integer_scales(squares, largest, scales);
    return scales[0];
}

PENSTOCK_INLINE void store_integers(int16_t* out, vf x, IntegerScale s) { store_i16(out, mul(x, set1(s.inverse))); }

}  // namespace penstock::PENSTOCK_ISA
