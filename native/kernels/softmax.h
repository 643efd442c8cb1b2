// The weights of a segment's positions from their scores, for the attention of one variant.
//
// Positions [lo, hi) are those that a query sees; scores and weights of a whole segment are in memory, whatever the others hold.

#pragma once

#include "simd.h"

namespace penstock::PENSTOCK_ISA {

constexpr int kStep = 2 * kLanes;  // positions whose weights are stored together
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLowest = -3.0e38f;

// Scores [lo, hi) to capped ones in units of log2.
PENSTOCK_INLINE void cap(float* scores, int lo, int hi, float factor, float softcap) {
    for (int i = lo; i < hi; ++i) scores[i] = softcap * kLog2E * tanhf(scores[i] * (factor / kLog2E) / softcap);
}

// Lanes of [i, i + 16) that are in [lo, hi) from x, the others from `other`.
PENSTOCK_INLINE vf within(int i, int lo, int hi, vf x, vf other) {
    if (i + kLanes > hi) x = first(hi > i ? hi - i : 0, x, other);
    if (i < lo) x = first(lo - i < kLanes ? lo - i : kLanes, other, x);
    return x;
}

// Calls inner(i) for every kStep positions from i on that are all in [lo, hi), and edge(i) where only some are, which is at
// either end. In ascending order; i is a multiple of kStep.
template <typename Inner, typename Edge>
PENSTOCK_INLINE void for_steps(int lo, int hi, Inner inner, Edge edge) {
    int i = lo / kStep * kStep;
    if (i < lo) {
        edge(i);
        i += kStep;
    }
    for (; i + kStep <= hi; i += kStep) inner(i);
    if (i < hi) edge(i);
}

// Of scores [lo, hi).
PENSTOCK_INLINE float largest_of(const float* scores, int lo, int hi) {
    const vf lowest = set1(kLowest);
    vf even = lowest, odd = lowest;
    for_steps(
        lo, hi,
        [&](int i) __attribute__((always_inline)) {
            even = max(even, load(scores + i));
            odd = max(odd, load(scores + i + kLanes));
        },
        [&](int i) __attribute__((always_inline)) {
            even = max(even, within(i, lo, hi, load(scores + i), lowest));
            odd = max(odd, within(i + kLanes, lo, hi, load(scores + i + kLanes), lowest));
        });
    return reduce_max(max(even, odd));
}

// Weights 2^(score * factor - top) of scores [lo, hi) in bf16, and their sum; those around up to a multiple of 32 become 0.
PENSTOCK_INLINE float soften(const float* scores, uint16_t* weights, int lo, int hi, float factor, float top) {
    const vf scale = set1(factor), shift = set1(-top), zero = set1(0.0f);
    vf sum = zero;
    const auto weight = [&](int i) __attribute__((always_inline)) { return exp2(fma(load(scores + i), scale, shift)); };
    for_steps(
        lo, hi,
        [&](int i) __attribute__((always_inline)) { sum = store_bf16_sum(weights + i, weight(i), weight(i + kLanes), sum); },
        [&](int i) __attribute__((always_inline)) {
            const vf a = within(i, lo, hi, weight(i), zero), b = within(i + kLanes, lo, hi, weight(i + kLanes), zero);
            sum = store_bf16_sum(weights + i, a, b, sum);
        });
    return reduce_add(sum);
}

// Weights 2^((score - top) * factor), at most one, times `units` as 16-bit integers; their sum is of the weights alone.
PENSTOCK_INLINE float soften_scaled(const float* scores, const float* units, uint16_t* weights, int lo, int hi, float factor,
                                    float top) {
    const vf scale = set1(factor), largest = set1(top), zero = set1(0.0f), rounder = set1(kRoundingMagic);
    vf even = zero, odd = zero;
    // No fused multiply-add: with the rounding of top * factor left in, a large score's own weight could be above one.
    const auto weight = [&](int i) __attribute__((always_inline)) { return exp2(mul(sub(load(scores + i), largest), scale)); };
    const auto rounded = [&](int i, vf w) __attribute__((always_inline)) { return fma(w, load(units + i), rounder); };
    for_steps(
        lo, hi,
        [&](int i) __attribute__((always_inline)) {
            const vf a = weight(i), b = weight(i + kLanes);
            even = add(even, a);
            odd = add(odd, b);
            store_low_halves(weights + i, rounded(i, a), rounded(i + kLanes, b));
        },
        [&](int i) __attribute__((always_inline)) {
            const vf a = weight(i), b = weight(i + kLanes);
            even = add(even, within(i, lo, hi, a, zero));
            odd = add(odd, within(i + kLanes, lo, hi, b, zero));
            store_low_halves(weights + i, within(i, lo, hi, rounded(i, a), zero),
                             within(i + kLanes, lo, hi, rounded(i + kLanes, b), zero));
        });
    return reduce_add(add(even, odd));
}

}  // namespace penstock::PENSTOCK_ISA
