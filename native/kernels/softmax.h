// The weights of a segment's positions from their scores, for the attention of one variant.
//
// Positions [lo, hi) are those that a query sees. Scores and weights are computed in whole steps of kStep positions: those of a
// step that the query does not see are masked first, and then weigh nothing.

#pragma once

#include "simd.h"

namespace penstock::PENSTOCK_ISA {

constexpr int kSide = kSoftmaxVectors, kStep = kSide * kLanes;  // a step's vectors go side by side
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLowest = -3.0e38f;

PENSTOCK_INLINE int step_below(int i) { return i / kStep * kStep; }
PENSTOCK_INLINE int step_above(int i) { return (i + kStep - 1) / kStep * kStep; }

// Scores [lo, hi) to capped ones in units of log2.
PENSTOCK_INLINE void cap(float* scores, int lo, int hi, float factor, float softcap) {
    for (int i = lo; i < hi; ++i) scores[i] = softcap * kLog2E * tanhf(scores[i] * (factor / kLog2E) / softcap);
}

// Lanes of [i, i + 16) that are in [lo, hi) from x, the others from `other`.
PENSTOCK_INLINE vf within(int i, int lo, int hi, vf x, vf other) {
    if (i + kLanes > hi) x = first(hi > i ? hi - i : 0, x, other);
    if (i < lo) x = first(least(lo - i, kLanes), other, x);
    return x;
}

// Masks the positions outside [lo, hi) in the steps that it touches.
PENSTOCK_INLINE void mask(float* scores, int lo, int hi, float nothing) {
    const vf masked = set1(nothing);
    for (int i = step_below(lo); i < lo; i += kLanes) store(scores + i, within(i, lo, hi, load(scores + i), masked));
    for (int i = hi / kLanes * kLanes; i < step_above(hi); i += kLanes) {
        store(scores + i, within(i, lo, hi, load(scores + i), masked));
    }
}

// The largest masked score in steps [from, end).
PENSTOCK_INLINE float largest_of(const float* scores, int from, int end) {
    vf largest[kSide];
    for (int j = 0; j < kSide; ++j) largest[j] = set1(kLowest);
    for (int i = from; i < end; i += kStep) {
        for (int j = 0; j < kSide; ++j) largest[j] = max(largest[j], load(scores + i + j * kLanes));
    }
    for (int j = 1; j < kSide; ++j) largest[0] = max(largest[0], largest[j]);
    return reduce_max(largest[0]);
}

// log2 of numbers that are normal or zero, up to 0.0861 too low: -127 for zero.
PENSTOCK_INLINE vf log2_below(vf a) { return fma(to_float(bits_of(a)), set1(0x1p-23f), set1(-127.0f)); }

// An upper bound of score * factor, however rounded, given the largest such product: no weight then exceeds one. Weights relative to it
// are as good as relative to the largest, since their sum is, too, unless scores are so large that the bound is far from the largest.
PENSTOCK_INLINE float bound_of(float largest) { return largest + fabsf(largest) * 0x1p-22f; }

// The largest score times `factor` plus the position's size in the steps of masked scores [from, end).
PENSTOCK_INLINE float largest_weight(const float* scores, const float* sizes, int from, int end, float factor) {
    const vf scale = set1(factor);
    vf largest[kSide];
    for (int j = 0; j < kSide; ++j) largest[j] = set1(kLowest);
    for (int i = from; i < end; i += kStep) {
        for (int j = 0; j < kSide; ++j) {
            const int at = i + j * kLanes;
            largest[j] = max(largest[j], fma(load(scores + at), scale, load(sizes + at)));
        }
    }
    for (int j = 1; j < kSide; ++j) largest[0] = max(largest[0], largest[j]);
    return reduce_max(largest[0]);
}

// Two to the power of each, for numbers of at most 126; 0 or below 1e-37 from -126 down. As exp2, or coarse: to 1.1e-4. kSide vectors go
// side by side: the operations of one wait for each other.
template <bool kCoarse>
PENSTOCK_INLINE void exp2_each(vf (&a)[kSide]) {
    vf n[kSide], p[kSide];
    for (int j = 0; j < kSide; ++j) {
        if constexpr (kScaleSaturates) {
            n[j] = round(a[j]);
            a[j] = sub(a[j], n[j]);
        } else {
            a[j] = max(set1(-127.0f), a[j]);
            n[j] = add(a[j], set1(kRoundingMagic));
            a[j] = sub(a[j], sub(n[j], set1(kRoundingMagic)));
        }
    }
    if constexpr (kCoarse) {
        for (int j = 0; j < kSide; ++j) p[j] = fma(set1(0.05500893f), a[j], set1(0.24221097f));
        for (int j = 0; j < kSide; ++j) p[j] = fma(p[j], a[j], set1(0.69328293f));
    } else {
        for (int j = 0; j < kSide; ++j) p[j] = fma(set1(0.00958285294f), a[j], set1(0.0559064262f));
        for (int j = 0; j < kSide; ++j) p[j] = fma(p[j], a[j], set1(0.240240991f));
        for (int j = 0; j < kSide; ++j) p[j] = fma(p[j], a[j], set1(0.693124175f));
    }
    for (int j = 0; j < kSide; ++j) p[j] = fma(p[j], a[j], set1(1.0f));
    for (int j = 0; j < kSide; ++j) a[j] = kScaleSaturates ? scale2(p[j], n[j]) : add_exponent(p[j], n[j]);
}

// Calls f(i, weights) for every step of masked scores [from, end), with their weights 2^(score * factor - top), kSide vectors.
template <bool kCoarse, typename F>
PENSTOCK_INLINE void for_weights(const float* scores, int from, int end, float factor, float top, F f) {
    const vf scale = set1(factor), shift = set1(-top);
    for (int i = from; i < end; i += kStep) {
        vf a[kSide];
        for (int j = 0; j < kSide; ++j) a[j] = fma(load(scores + i + j * kLanes), scale, shift);
        exp2_each<kCoarse>(a);
        f(i, a);
    }
}

// Weights of masked scores in bf16, and their sum as they were rounded.
PENSTOCK_INLINE float soften(const float* scores, uint16_t* weights, int from, int end, float factor, float top) {
    vf sum = set1(0.0f);
    for_weights<false>(scores, from, end, factor, top, [&](int i, const vf(&a)[kSide]) PENSTOCK_LAMBDA {
        for (int j = 0; j < kSide; j += 2) sum = store_bf16_sum(weights + i + j * kLanes, a[j], a[j + 1], sum);
    });
    return reduce_add(sum);
}

// The numbers added to weights before they are rounded to bytes, by position modulo 64, between -1/2 and 1/2. Otherwise weights much
// smaller than the largest would all become zero, however large their sum; so about the right share of neighbours becomes one. They are
// the fractional parts of multiples of the golden ratio: any run of them is evenly spread. Queries and heads begin at different places,
// or all would leave out the same positions.
struct Dither {
    static constexpr int kPeriod = 64;
    alignas(64) float values[2 * kPeriod];
    constexpr Dither() : values{} {
        double multiple = 0.3090169943749474;
        for (float& value : values) {
            value = static_cast<float>(multiple - 0.5);
            multiple += multiple < 0.3819660112501051 ? 0.6180339887498949 : -0.3819660112501051;
        }
        for (int i = 0; i < kPeriod; ++i) values[kPeriod + i] = values[i];
    }
    static PENSTOCK_MEMBER int begin(int query_position, int head) { return (37 * query_position + 23 * head) % kPeriod; }
};
constexpr Dither kDither;
static_assert(Dither::kPeriod % kStep == 0);

// Weights of masked scores, each times its position's scale, as bytes; returns the sum without these scales. `dither`: where it begins.
PENSTOCK_INLINE float soften_scaled(const float* scores, const float* scales, uint8_t* weights, int from, int end, float factor,
                                    float top, int dither) {
    vf sum[2] = {set1(0.0f), set1(0.0f)};
    for_weights<true>(scores, from, end, factor, top, [&](int i, vf(&a)[kSide]) PENSTOCK_LAMBDA {
        for (int j = 0; j < kSide; ++j) sum[j % 2] = add(sum[j % 2], a[j]);
        const float* const added = kDither.values + dither + i % Dither::kPeriod;
        for (int j = 0; j < kSide; ++j) a[j] = fma(a[j], load(scales + i + j * kLanes), load(added + j * kLanes));
        store_rounded_u8(weights + i, a);
    });
    return reduce_add(add(sum[0], sum[1]));
}

}  // namespace penstock::PENSTOCK_ISA
