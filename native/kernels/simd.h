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
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#ifndef PENSTOCK_ISA
#error "PENSTOCK_ISA must name the namespace of this variant"
#endif

#define PENSTOCK_INLINE static inline __attribute__((always_inline))
#define PENSTOCK_MEMBER inline __attribute__((always_inline))
#define PENSTOCK_LAMBDA __attribute__((always_inline))
#define PENSTOCK_UNROLL _Pragma("GCC unroll 16")

namespace penstock::PENSTOCK_ISA {

constexpr int kLanes = 16;

// 1.5 * 2^23: adding it rounds a float to an integer in its low bits.
constexpr float kRoundingMagic = 12582912.0f;

PENSTOCK_INLINE int least(int a, int b) { return a < b ? a : b; }

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

// Prefetches into the second-level cache where `kFetchesFar`, else as `prefetch`. On Zen 4 memory is read faster so.
PENSTOCK_INLINE void prefetch_far(const void* p) {
    if constexpr (kFetchesFar) __builtin_prefetch(p, 0, 2);
    else prefetch(p);
}

// The sum of a group of 32 columns, from `start`: `begin_sum`, eight times `dot4`, `end_sum`.
#ifndef PENSTOCK_SHORT_SUMS
template <bool kNibbles>
PENSTOCK_INLINE vi begin_sum(vi start) { return start; }
#endif
PENSTOCK_INLINE vi end_sum(vi sum, vi) { return sum; }

// acc[lane] += sum over j of (w[lane][j] - kDot4Row8Subtracts) * a4[j], j = 0..3. Each w is at least 1.
#ifndef PENSTOCK_SIGNED_ROW8
constexpr int32_t kDot4Row8Subtracts = kUnsignedLess;
PENSTOCK_INLINE vi dot4_row8(vi acc, vb w, const int8_t* a4) { return dot4_u8(acc, w, set1_pair(a4)); }
#endif

PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, const uint16_t* a2) { return dot2_bf16(acc, w, set1_pair(a2)); }

// Stores a and b as 32 bf16 and returns `sum` plus what was stored.
PENSTOCK_INLINE vf store_bf16_sum(uint16_t* p, vf a, vf b, vf sum) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh(b.v, a.v);
    _mm512_storeu_si512(p, (__m512i)both);
    return {_mm512_dpbf16_ps(sum.v, both, (__m512bh)_mm512_set1_epi32(0x3F803F80))};
#else
    store_bf16(p, a);
    store_bf16(p + kLanes, b);
    return add(add(sum, load_bf16(p)), load_bf16(p + kLanes));
#endif
}

// The first `count` of sixteen numbers at p; the others are zero.
template <typename T>
PENSTOCK_INLINE auto load_some(const T* p, int count) {
    if (count == kLanes) return load(p);
#if defined(__AVX512VNNI__)
    return load_part(p, count);
#else
    alignas(64) T some[kLanes] = {};
    for (int i = 0; i < count; ++i) some[i] = p[i];
    return load(some);
#endif
}

// The first `count` lanes to p.
template <typename T, typename V>
PENSTOCK_INLINE void store_some(T* p, V a, int count) {
    if (count == kLanes) return store(p, a);
#if defined(__AVX512VNNI__)
    store_part(p, a, count);
#else
    alignas(64) T some[kLanes];
    store(some, a);
    for (int i = 0; i < count; ++i) p[i] = some[i];
#endif
}

// Interleaves four rows of sixteen bytes: the first byte of each, then the second; `stride` in bytes.
PENSTOCK_INLINE void interleave_fours(uint8_t* out, const int8_t* in, int64_t stride) {
#if defined(__AVX2__)
    __m128i a[4];
    for (int i = 0; i < 4; ++i) a[i] = _mm_loadu_si128((const __m128i*)(in + i * stride));
    const __m128i low = _mm_unpacklo_epi8(a[0], a[1]), high = _mm_unpackhi_epi8(a[0], a[1]);
    const __m128i next_low = _mm_unpacklo_epi8(a[2], a[3]), next_high = _mm_unpackhi_epi8(a[2], a[3]);
    _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi16(low, next_low));
    _mm_storeu_si128((__m128i*)(out + 16), _mm_unpackhi_epi16(low, next_low));
    _mm_storeu_si128((__m128i*)(out + 32), _mm_unpacklo_epi16(high, next_high));
    _mm_storeu_si128((__m128i*)(out + 48), _mm_unpackhi_epi16(high, next_high));
#elif defined(__ARM_FEATURE_DOTPROD)
    const auto row = [&](int i) PENSTOCK_LAMBDA { return vreinterpretq_u8_s8(vld1q_s8(in + i * stride)); };
    vst4q_u8(out, {{row(0), row(1), row(2), row(3)}});
#else
    for (int i = 0; i < 4 * kLanes; ++i) out[i] = static_cast<uint8_t>(in[i % 4 * stride + i / 4]);
#endif
}

// Sixteen bytes, each to every fourth one from p on; those between are left alone, even by other threads.
PENSTOCK_INLINE void store_every_fourth(uint8_t* p, const int8_t* bytes) {
#if defined(__AVX512BW__)
    _mm512_mask_storeu_epi8(p, 0x1111111111111111u, _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes)));
#else
    for (int i = 0; i < kLanes; ++i) p[4 * i] = static_cast<uint8_t>(bytes[i]);
#endif
}

// Four rows of sixteen bytes become four of four times four bytes, with the bits of `flip` the other way in each byte; strides in
// bytes.
PENSTOCK_INLINE void transpose_fours(uint8_t* out, int64_t out_stride, const int8_t* in, int64_t in_stride, uint8_t flip) {
#if defined(__AVX2__)
    const __m128i bits = _mm_set1_epi8(static_cast<char>(flip));
    __m128i a[4];
    for (int i = 0; i < 4; ++i) a[i] = _mm_xor_si128(bits, _mm_loadu_si128((const __m128i*)(in + i * in_stride)));
    const __m128i low = _mm_unpacklo_epi32(a[0], a[1]), high = _mm_unpackhi_epi32(a[0], a[1]);
    const __m128i next_low = _mm_unpacklo_epi32(a[2], a[3]), next_high = _mm_unpackhi_epi32(a[2], a[3]);
    _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi64(low, next_low));
    _mm_storeu_si128((__m128i*)(out + out_stride), _mm_unpackhi_epi64(low, next_low));
    _mm_storeu_si128((__m128i*)(out + 2 * out_stride), _mm_unpacklo_epi64(high, next_high));
    _mm_storeu_si128((__m128i*)(out + 3 * out_stride), _mm_unpackhi_epi64(high, next_high));
#elif defined(__ARM_FEATURE_DOTPROD)
    uint32x4_t a[4];
    for (int i = 0; i < 4; ++i) a[i] = vreinterpretq_u32_u8(veorq_u8(vreinterpretq_u8_s8(vld1q_s8(in + i * in_stride)), vdupq_n_u8(flip)));
    const uint32x4_t low = vzip1q_u32(a[0], a[1]), high = vzip2q_u32(a[0], a[1]);
    const uint32x4_t next_low = vzip1q_u32(a[2], a[3]), next_high = vzip2q_u32(a[2], a[3]);
    const auto keep = [&](int i, uint64x2_t fours) PENSTOCK_LAMBDA { vst1q_u8(out + i * out_stride, vreinterpretq_u8_u64(fours)); };
    keep(0, vzip1q_u64(vreinterpretq_u64_u32(low), vreinterpretq_u64_u32(next_low)));
    keep(1, vzip2q_u64(vreinterpretq_u64_u32(low), vreinterpretq_u64_u32(next_low)));
    keep(2, vzip1q_u64(vreinterpretq_u64_u32(high), vreinterpretq_u64_u32(next_high)));
    keep(3, vzip2q_u64(vreinterpretq_u64_u32(high), vreinterpretq_u64_u32(next_high)));
#else
    for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 16; ++k) out[k / 4 * out_stride + 4 * i + k % 4] = static_cast<uint8_t>(in[i * in_stride + k]) ^ flip;
    }
#endif
}

// Each quarter of 64 bytes, which is four rows of four bytes, becomes four columns of four, with the bits of `flip` the other way; the
// quarters lie `out_stride` bytes apart.
PENSTOCK_INLINE void transpose_quarters(uint8_t* out, int64_t out_stride, const uint8_t* in, uint8_t flip) {
#if defined(__AVX2__)
    const __m128i bits = _mm_set1_epi8(static_cast<char>(flip));
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) {
        const __m128i quarter = _mm_loadu_si128((const __m128i*)(in + 16 * i));
        _mm_storeu_si128((__m128i*)(out + i * out_stride), _mm_xor_si128(bits, _mm_shuffle_epi8(quarter, order)));
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    const uint8x16_t order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) {
        vst1q_u8(out + i * out_stride, veorq_u8(vqtbl1q_u8(vld1q_u8(in + 16 * i), order), vdupq_n_u8(flip)));
    }
#else
    for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 16; ++k) out[i * out_stride + k] = in[16 * i + k % 4 * 4 + k / 4] ^ flip;
    }
#endif
}

// The first `cols` columns of `rows` rows, `stride` numbers apart, become sixteen columns of sixteen numbers, one after the other. They end in
// copies of the last row, and zeros follow the last column.
PENSTOCK_INLINE void transpose(float* out, const float* in, int64_t stride, int rows, int cols) {
    const auto row = [&](int i) PENSTOCK_LAMBDA { return in + (i < rows ? i : rows - 1) * stride; };
#if defined(__AVX512F__)
    __m512 a[kLanes], b[kLanes];
    PENSTOCK_UNROLL
    for (int i = 0; i < kLanes; i += 2) {
        const __m512 even = load_some(row(i), cols).v, odd = load_some(row(i + 1), cols).v;
        a[i] = _mm512_unpacklo_ps(even, odd);
        a[i + 1] = _mm512_unpackhi_ps(even, odd);
    }
    PENSTOCK_UNROLL
    for (int i = 0; i < kLanes; ++i) {  // quarter L of b[i]: column 4 L + i % 4 of the rows i / 4 * 4 and on
        const __m512d low = _mm512_castps_pd(a[i / 4 * 4 + i % 4 / 2]), high = _mm512_castps_pd(a[i / 4 * 4 + i % 4 / 2 + 2]);
        b[i] = _mm512_castpd_ps(i % 2 ? _mm512_unpackhi_pd(low, high) : _mm512_unpacklo_pd(low, high));
    }
    PENSTOCK_UNROLL
    for (int i = 0; i < 4; ++i) {
        const __m512 front[2] = {_mm512_shuffle_f32x4(b[i], b[4 + i], 0x44), _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x44)};
        const __m512 back[2] = {_mm512_shuffle_f32x4(b[i], b[4 + i], 0xEE), _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xEE)};
        _mm512_storeu_ps(out + i * kLanes, _mm512_shuffle_f32x4(front[0], front[1], 0x88));
        _mm512_storeu_ps(out + (4 + i) * kLanes, _mm512_shuffle_f32x4(front[0], front[1], 0xDD));
        _mm512_storeu_ps(out + (8 + i) * kLanes, _mm512_shuffle_f32x4(back[0], back[1], 0x88));
        _mm512_storeu_ps(out + (12 + i) * kLanes, _mm512_shuffle_f32x4(back[0], back[1], 0xDD));
    }
#else
    for (int i = 0; i < kLanes; ++i) {
        for (int col = 0; col < kLanes; ++col) out[col * kLanes + i] = col < cols ? row(i)[col] : 0.0f;
    }
#endif
}

// 2^a for a <= 126, 1 for 0, 0 or below 1e-37 from -126 down; relative error below 3e-6 (a minimax polynomial on
// [-1/2, 1/2]). NaN stays NaN but for payloads that no operation produces, and no table or vector has (blocks.h, weights.h).
PENSTOCK_INLINE vf exp2(vf a) {
    const vf clamped = max(set1(-127.0f), a);
    const vf n = add(clamped, set1(kRoundingMagic)), r = sub(clamped, sub(n, set1(kRoundingMagic)));
    vf p = fma(set1(0.00958285294f), r, set1(0.0559064262f));
    p = fma(p, r, set1(0.240240991f));
    p = fma(p, r, set1(0.693124175f));
    p = fma(p, r, set1(1.0f));
    return add_exponent(p, n);
}

// The same for any a; too large ones saturate.
PENSTOCK_INLINE vf exp2_saturating(vf a) {
    if constexpr (!kScaleSaturates) return exp2(min(set1(126.0f), a));  // NaN stays NaN
    const vf n = round(a), r = sub(a, n);
    vf p = fma(set1(0.00958285294f), r, set1(0.0559064262f));
    p = fma(p, r, set1(0.240240991f));
    p = fma(p, r, set1(0.693124175f));
    return scale2(fma(p, r, set1(1.0f)), n);
}

// Calls f.template operator()<count>() for a count of at least 1; one above kMost counts as kMost.
template <int kMost, typename F>
PENSTOCK_INLINE void with_count(int count, F f) {
    if constexpr (kMost > 1) {
        if (count < kMost) return with_count<kMost - 1>(count, f);
    }
    f.template operator()<kMost>();
}

// Calls f.template operator()<count>(first) for every four of [begin, end); count is below 4 in the last call only.
template <typename F>
PENSTOCK_INLINE void for_fours(int begin, int end, F f) {
    for (; begin + 4 <= end; begin += 4) f.template operator()<4>(begin);
    if (begin < end) with_count<3>(end - begin, [&]<int kCount>() PENSTOCK_LAMBDA { f.template operator()<kCount>(begin); });
}

// Calls f(i, count) for every sixteen of [0, n); count is below 16 in the last call only.
template <typename F>
PENSTOCK_INLINE void for_lanes(int n, F f) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, n - i);
}

// Calls f(index, row, rows, number of tiles) for the rows [row0, row1), in as few tiles of at most kMost rows as there can be, all of about
// the same size.
template <int kMost, typename F>
PENSTOCK_INLINE void for_row_tiles(int row0, int row1, F f) {
    const int tiles = (row1 - row0 + kMost - 1) / kMost;
    for (int i = 0, row = row0; i < tiles; ++i) {
        const int rows = (row1 - row + tiles - i - 1) / (tiles - i);
        f(i, row, rows, tiles);
        row += rows;
    }
}

PENSTOCK_INLINE int64_t whole(int64_t n, int part) { return (n + part - 1) / part * part; }

// Takes parts of a task's memory, which begins on a cache line, as each part does. Without memory it counts.
struct Parts {
    float* memory;
    int64_t taken = 0;  // floats
    PENSTOCK_MEMBER float* take(int64_t floats) {
        float* const part = memory ? memory + taken : nullptr;
        taken += whole(floats, kLanes);
        return part;
    }
};

}  // namespace penstock::PENSTOCK_ISA
