// Sixteen lanes under one name: the vector vocabulary in which every kernel is written once.
//
// Included by kernel files only, each of which is compiled once per instruction set. PENSTOCK_ISA names
// the namespace; everything is static inline, so no symbol of one variant can be linked into another.
// The order of additions in every function is fixed: equal inputs give equal bits within a variant.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef PENSTOCK_ISA
#error "PENSTOCK_ISA must name the namespace of this variant"
#endif

#define PENSTOCK_INLINE static inline __attribute__((always_inline))
#define PENSTOCK_MEMBER inline __attribute__((always_inline))
#define PENSTOCK_LAMBDA __attribute__((always_inline))

namespace penstock::PENSTOCK_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

// The first `count` of sixteen numbers at p; the others are zero.
PENSTOCK_INLINE vf load_some(const float* p, int count) {
    if (count == kLanes) return load(p);
    alignas(64) float t[kLanes] = {};
    for (int i = 0; i < count; ++i) t[i] = p[i];
    return load(t);
}

// The first `count` lanes to p.
PENSTOCK_INLINE void store_some(float* p, vf a, int count) {
    if (count == kLanes) return store(p, a);
    alignas(64) float t[kLanes];
    store(t, a);
    for (int i = 0; i < count; ++i) p[i] = t[i];
}

// e^a for a <= 88; relative error below 3e-7; 1e-38 below -87. Cody and Waite's reduction, then Cephes' polynomial for expf.
PENSTOCK_INLINE vf exp(vf a) {
    const vf clamped = max(set1(-87.3f), a);  // in this order, NaN stays NaN
    const vf n = round(mul(clamped, set1(1.44269504088896341f)));
    vf r = fma(n, set1(-0.693359375f), clamped);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return scale2(p, n);
}

// A sum with it is rounded to an integer, which is in its low bits: 1.5 * 2^23.
constexpr float kRoundingMagic = 12582912.0f;

// 2^a for a <= 126, 1 for 0, 0 or below 1e-37 from -126 down; relative error below 3e-6 (a minimax polynomial on
// [-1/2, 1/2]). NaN stays NaN but for payloads that no operation produces.
PENSTOCK_INLINE vf exp2(vf a) {
    const vf clamped = max(set1(-127.0f), a);
    const vf n = add(clamped, set1(kRoundingMagic)), r = sub(clamped, sub(n, set1(kRoundingMagic)));
    vf p = fma(set1(0.00958285294f), r, set1(0.0559064262f));
    p = fma(p, r, set1(0.240240991f));
    p = fma(p, r, set1(0.693124175f));
    p = fma(p, r, set1(1.0f));
    return add_exponent(p, n);
}

// The same for any a: huge instead of too large.
PENSTOCK_INLINE vf exp2_saturating(vf a) {
    if constexpr (!kScaleSaturates) return exp2(min(a, set1(126.0f)));
    const vf n = round(a), r = sub(a, n);
    vf p = fma(set1(0.00958285294f), r, set1(0.0559064262f));
    p = fma(p, r, set1(0.240240991f));
    p = fma(p, r, set1(0.693124175f));
    return scale2(fma(p, r, set1(1.0f)), n);
}

}  // namespace penstock::PENSTOCK_ISA
