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

namespace penstock::PENSTOCK_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

// What keeps its accumulators in registers: a GEMM tile of rows by panels (up to kFewRows rows wait for memory: one panel at a time
// is the one stream that is read fastest), and the (query, head) pairs of an attention tile.
constexpr int kTileRows = 4, kTilePanels = 3, kFewRows = 3, kFewRowPanels = 1;
constexpr int kAttentionPairs = 12, kAttentionTaskPairs = 48;

struct vf { __m512 v; };    // 16 float32
struct vi { __m512i v; };   // 16 int32
struct vb { __m512i v; };   // 64 bytes: four for each lane

PENSTOCK_INLINE vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
PENSTOCK_INLINE void store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
PENSTOCK_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
PENSTOCK_INLINE vf add(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
PENSTOCK_INLINE vf sub(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
PENSTOCK_INLINE vf mul(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
PENSTOCK_INLINE vf div(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
PENSTOCK_INLINE vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
PENSTOCK_INLINE vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
PENSTOCK_INLINE vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PENSTOCK_INLINE vf abs(vf a) { return {_mm512_abs_ps(a.v)}; }
PENSTOCK_INLINE vf round(vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n
PENSTOCK_INLINE vf scale2(vf a, vf n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Lanes below `count` from a, the others from b.
PENSTOCK_INLINE vf first(int count, vf a, vf b) {
    return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>((1u << count) - 1u), a.v)};
}
PENSTOCK_INLINE vf load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PENSTOCK_INLINE vf load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}

// To bfloat16, to nearest even. NaN stays NaN but for payloads that no operation produces.
PENSTOCK_INLINE void store_bf16(uint16_t* p, vf a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
// Over the lanes, as a tree: i with i + 8, then 4, 2, 1.
PENSTOCK_INLINE float reduce_add(vf a) { return _mm512_reduce_add_ps(a.v); }
PENSTOCK_INLINE float reduce_max(vf a) { return _mm512_reduce_max_ps(a.v); }

PENSTOCK_INLINE vi set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
PENSTOCK_INLINE vi times16(vi a) { return {_mm512_slli_epi32(a.v, 4)}; }
PENSTOCK_INLINE vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
PENSTOCK_INLINE void store(int32_t* p, vi a) { _mm512_storeu_si512(p, a.v); }
// Sixteen int8 from sixteen floats: to nearest even, saturating below 2^31.
PENSTOCK_INLINE void store_rounded_i8(int8_t* p, vf a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Lane g: the largest size of the 32 values x[32 g ..], of sixteen such groups side by side.
PENSTOCK_INLINE vf largest_of_groups(const float* x) {
    __m512 v[16];
    for (int g = 0; g < 16; ++g) {
        v[g] = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + 32 * g)), _mm512_abs_ps(_mm512_loadu_ps(x + 32 * g + 16)));
    }
    for (int g = 0; g < 16; g += 2) v[g / 2] = _mm512_max_ps(_mm512_unpacklo_ps(v[g], v[g + 1]), _mm512_unpackhi_ps(v[g], v[g + 1]));
    for (int g = 0; g < 8; g += 2) {
        const __m512d a = _mm512_castps_pd(v[g]), b = _mm512_castps_pd(v[g + 1]);
        v[g / 2] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int count = 4; count > 1; count /= 2) {
        for (int g = 0; g < count; g += 2) {
            v[g / 2] = _mm512_max_ps(_mm512_shuffle_f32x4(v[g], v[g + 1], 0x88), _mm512_shuffle_f32x4(v[g], v[g + 1], 0xDD));
        }
    }
    return {v[0]};
}
// Lane g: the sum of the 32 values q[32 g ..], of sixteen such groups side by side.
PENSTOCK_INLINE vi sum_of_groups(const int8_t* q) {
    __m512i v[8];
    for (int i = 0; i < 8; ++i) v[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(q + 64 * i));
    for (int i = 0; i < 8; i += 2) v[i / 2] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[i], v[i + 1]), _mm512_unpackhi_epi32(v[i], v[i + 1]));
    for (int i = 0; i < 4; i += 2) v[i / 2] = _mm512_add_epi32(_mm512_unpacklo_epi64(v[i], v[i + 1]), _mm512_unpackhi_epi64(v[i], v[i + 1]));
    const __m512i sums = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x88), _mm512_shuffle_i32x4(v[0], v[1], 0xDD));
    return {_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), sums)};
}
PENSTOCK_INLINE vb load64(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PENSTOCK_INLINE void store64(uint8_t* p, vb a) { _mm512_storeu_si512(p, a.v); }
PENSTOCK_INLINE vb low_nibbles(vb a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(0x0F))}; }
PENSTOCK_INLINE vb high_nibbles(vb a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0F))}; }
// table[a] of sixteen bytes
PENSTOCK_INLINE vb look_up(vb a, const uint8_t* table) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), a.v)};
}
// Byte j of each lane, as a number.
PENSTOCK_INLINE vf byte_of_lanes(vb a, int j) {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(8 * j)), _mm512_set1_epi32(0xFF)))};
}
// bf16 number j, 0 or 1, of each lane.
PENSTOCK_INLINE vf bf16_of_lanes(vb a, int j) {
    return {_mm512_castsi512_ps(j == 0 ? _mm512_slli_epi32(a.v, 16) : _mm512_and_si512(a.v, _mm512_set1_epi32(-0x10000)))};
}
// a * 2^n for exponent_bits = n << 23; a and the result must be normal numbers.
PENSTOCK_INLINE vf add_exponent(vf a, int32_t exponent_bits) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_set1_epi32(exponent_bits)))};
}
// acc[lane] += sum over j of unsigned w[lane][j] * signed a4[j], j = 0..3
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    int32_t bits;
    memcpy(&bits, a4, 4);
    return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(bits))};
}
// acc[lane] += w[lane][0] * a2[0] + w[lane][1] * a2[1], bf16 products in float32
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, const uint16_t* a2) {
    int32_t bits;
    memcpy(&bits, a2, 4);
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)w.v)};
}
// Two 16-bit values for every lane.
PENSTOCK_INLINE vb set1_pair(const void* p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return {_mm512_set1_epi32(bits)};
}
// acc[lane] += w[lane][0] * a[lane][0] + w[lane][1] * a[lane][1], int16 products in int32. Written as assembly because the
// compiler copies accumulators that the intrinsic takes.
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(a.v));
    return acc;
}
// The same of bf16 products in float32.
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(a.v));
    return acc;
}
// a * 2^n for n in the low bits of `n`
PENSTOCK_INLINE vf add_exponent(vf a, vf n) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(n.v), 23)))};
}
// Of every two 16-bit values the first; the second becomes 0.
PENSTOCK_INLINE vb even_halves(vb a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xFFFF))}; }
// Sixteen int16 from sixteen floats that are within [-32767, 32767]; rounded to nearest even.
PENSTOCK_INLINE void store_i16(int16_t* p, vf a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
// Stores a and b as 32 bf16 and returns `sum` plus what was stored.
PENSTOCK_INLINE vf store_bf16_sum(uint16_t* p, vf a, vf b, vf sum) {
    const __m512bh both = _mm512_cvtne2ps_pbh(b.v, a.v);
    _mm512_storeu_si512(p, (__m512i)both);
    return {_mm512_dpbf16_ps(sum.v, both, (__m512bh)_mm512_set1_epi32(0x3F803F80))};
}
PENSTOCK_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int kTileRows = 4, kTilePanels = 1, kFewRows = 1, kFewRowPanels = 1;
constexpr int kAttentionPairs = 4, kAttentionTaskPairs = 16;

struct vf { __m256 l, h; };
struct vi { __m256i l, h; };
struct vb { __m256i l, h; };

PENSTOCK_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PENSTOCK_INLINE void store(float* p, vf a) { _mm256_storeu_ps(p, a.l); _mm256_storeu_ps(p + 8, a.h); }
PENSTOCK_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PENSTOCK_INLINE vf add(vf a, vf b) { return {_mm256_add_ps(a.l, b.l), _mm256_add_ps(a.h, b.h)}; }
PENSTOCK_INLINE vf sub(vf a, vf b) { return {_mm256_sub_ps(a.l, b.l), _mm256_sub_ps(a.h, b.h)}; }
PENSTOCK_INLINE vf mul(vf a, vf b) { return {_mm256_mul_ps(a.l, b.l), _mm256_mul_ps(a.h, b.h)}; }
PENSTOCK_INLINE vf div(vf a, vf b) { return {_mm256_div_ps(a.l, b.l), _mm256_div_ps(a.h, b.h)}; }
PENSTOCK_INLINE vf max(vf a, vf b) { return {_mm256_max_ps(a.l, b.l), _mm256_max_ps(a.h, b.h)}; }
PENSTOCK_INLINE vf min(vf a, vf b) { return {_mm256_min_ps(a.l, b.l), _mm256_min_ps(a.h, b.h)}; }
PENSTOCK_INLINE vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.l, b.l, c.l), _mm256_fmadd_ps(a.h, b.h, c.h)}; }
PENSTOCK_INLINE vf abs(vf a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.l), _mm256_andnot_ps(sign, a.h)};
}
PENSTOCK_INLINE vf round(vf a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.l, mode), _mm256_round_ps(a.h, mode)};
}
PENSTOCK_INLINE __m256 pow2_part(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
PENSTOCK_INLINE vf scale2(vf a, vf n) { return {_mm256_mul_ps(a.l, pow2_part(n.l)), _mm256_mul_ps(a.h, pow2_part(n.h))}; }
PENSTOCK_INLINE vf first(int count, vf a, vf b) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i l = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
    const __m256i h = _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane);
    return {_mm256_blendv_ps(b.l, a.l, _mm256_castsi256_ps(l)), _mm256_blendv_ps(b.h, a.h, _mm256_castsi256_ps(h))};
}
PENSTOCK_INLINE vf load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PENSTOCK_INLINE __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
PENSTOCK_INLINE vf load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }

PENSTOCK_INLINE __m256i bf16_bits(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
}
PENSTOCK_INLINE void store_bf16(uint16_t* p, vf a) {
    const __m256i packed = _mm256_packus_epi32(bf16_bits(a.l), bf16_bits(a.h));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
PENSTOCK_INLINE float reduce_add(vf a) {
    const __m256 eight = _mm256_add_ps(a.l, a.h);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
PENSTOCK_INLINE float reduce_max(vf a) {
    const __m256 eight = _mm256_max_ps(a.l, a.h);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

PENSTOCK_INLINE vi set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PENSTOCK_INLINE vi times16(vi a) { return {_mm256_slli_epi32(a.l, 4), _mm256_slli_epi32(a.h, 4)}; }
PENSTOCK_INLINE vf to_float(vi a) { return {_mm256_cvtepi32_ps(a.l), _mm256_cvtepi32_ps(a.h)}; }
PENSTOCK_INLINE void store(int32_t* p, vi a) {
    _mm256_storeu_si256((__m256i*)p, a.l);
    _mm256_storeu_si256((__m256i*)(p + 8), a.h);
}
PENSTOCK_INLINE void store_rounded_i8(int8_t* p, vf a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.l), _mm256_cvtps_epi32(a.h));
    const __m256i bytes = _mm256_packs_epi16(words, words);  // of each half: lanes 0 to 3, 8 to 11
    const __m256i order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0));
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(order));
}
PENSTOCK_INLINE vf largest_of_groups(const float* x) {
    alignas(32) float t[16];
    for (int g = 0; g < 16; ++g) t[g] = reduce_max(max(abs(load(x + 32 * g)), abs(load(x + 32 * g + 16))));
    return load(t);
}
PENSTOCK_INLINE vi sum_of_groups(const int8_t* q) {
    const __m256i one = _mm256_set1_epi8(1);
    __m256i v[16];
    for (int g = 0; g < 16; ++g) {
        const __m256i pairs = _mm256_maddubs_epi16(one, _mm256_loadu_si256((const __m256i*)(q + 32 * g)));
        v[g] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    for (int count = 16; count > 4; count /= 2) {
        for (int g = 0; g < count; g += 2) v[g / 2] = _mm256_hadd_epi32(v[g], v[g + 1]);
    }
    // Now v[k] has the groups 4k.. twice, in its two halves.
    __m128i s[4];
    for (int k = 0; k < 4; ++k) s[k] = _mm_add_epi32(_mm256_castsi256_si128(v[k]), _mm256_extracti128_si256(v[k], 1));
    return {_mm256_set_m128i(s[1], s[0]), _mm256_set_m128i(s[3], s[2])};
}
PENSTOCK_INLINE vb load64(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
PENSTOCK_INLINE void store64(uint8_t* p, vb a) {
    _mm256_storeu_si256((__m256i*)p, a.l);
    _mm256_storeu_si256((__m256i*)(p + 32), a.h);
}
PENSTOCK_INLINE vb low_nibbles(vb a) {
    const __m256i m = _mm256_set1_epi8(0x0F);
    return {_mm256_and_si256(a.l, m), _mm256_and_si256(a.h, m)};
}
PENSTOCK_INLINE vb high_nibbles(vb a) {
    const __m256i m = _mm256_set1_epi8(0x0F);
    return {_mm256_and_si256(_mm256_srli_epi16(a.l, 4), m), _mm256_and_si256(_mm256_srli_epi16(a.h, 4), m)};
}
PENSTOCK_INLINE vb look_up(vb a, const uint8_t* table) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(t, a.l), _mm256_shuffle_epi8(t, a.h)};
}
PENSTOCK_INLINE vf byte_of_lanes(vb a, int j) {
    const __m128i count = _mm_cvtsi32_si128(8 * j);
    const __m256i m = _mm256_set1_epi32(0xFF);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(a.l, count), m)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(a.h, count), m))};
}
PENSTOCK_INLINE vf bf16_of_lanes(vb a, int j) {
    const __m256i m = _mm256_set1_epi32(-0x10000);
    return {_mm256_castsi256_ps(j == 0 ? _mm256_slli_epi32(a.l, 16) : _mm256_and_si256(a.l, m)),
            _mm256_castsi256_ps(j == 0 ? _mm256_slli_epi32(a.h, 16) : _mm256_and_si256(a.h, m))};
}
PENSTOCK_INLINE vf add_exponent(vf a, int32_t exponent_bits) {
    const __m256i e = _mm256_set1_epi32(exponent_bits);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.l), e)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.h), e))};
}
template <bool kNibbles>
PENSTOCK_INLINE __m256i dot4_part(__m256i acc, __m256i w, __m256i a) {
    const __m256i one = _mm256_set1_epi16(1);
    if constexpr (kNibbles) {
        return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), one));
    }
    // maddubs saturates at 16 bits: 255 * 127 * 2 would not fit, so the byte goes in as two nibbles.
    const __m256i m = _mm256_set1_epi8(0x0F);
    const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(w, m), a);
    const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 4), m), a);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(low, one));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
}
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    int32_t bits;
    memcpy(&bits, a4, 4);
    const __m256i a = _mm256_set1_epi32(bits);
    return {dot4_part<kNibbles>(acc.l, w.l, a), dot4_part<kNibbles>(acc.h, w.h, a)};
}
PENSTOCK_INLINE __m256 dot2_part(__m256 acc, __m256i w, float a0, float a1) {
    const __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    const __m256 w1 = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
    return _mm256_fmadd_ps(_mm256_set1_ps(a1), w1, _mm256_fmadd_ps(_mm256_set1_ps(a0), w0, acc));
}
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, const uint16_t* a2) {
    const uint32_t b0 = static_cast<uint32_t>(a2[0]) << 16, b1 = static_cast<uint32_t>(a2[1]) << 16;
    float a0, a1;
    memcpy(&a0, &b0, 4);
    memcpy(&a1, &b1, 4);
    return {dot2_part(acc.l, w.l, a0, a1), dot2_part(acc.h, w.h, a0, a1)};
}
PENSTOCK_INLINE vb set1_pair(const void* p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    return {_mm256_add_epi32(acc.l, _mm256_madd_epi16(w.l, a.l)), _mm256_add_epi32(acc.h, _mm256_madd_epi16(w.h, a.h))};
}
PENSTOCK_INLINE __m256 even_bf16(__m256i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
PENSTOCK_INLINE __m256 odd_bf16(__m256i a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) {
    return {_mm256_fmadd_ps(odd_bf16(a.l), odd_bf16(w.l), _mm256_fmadd_ps(even_bf16(a.l), even_bf16(w.l), acc.l)),
            _mm256_fmadd_ps(odd_bf16(a.h), odd_bf16(w.h), _mm256_fmadd_ps(even_bf16(a.h), even_bf16(w.h), acc.h))};
}
PENSTOCK_INLINE __m256 add_exponent_part(__m256 a, __m256 n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
PENSTOCK_INLINE vf add_exponent(vf a, vf n) { return {add_exponent_part(a.l, n.l), add_exponent_part(a.h, n.h)}; }
PENSTOCK_INLINE vb even_halves(vb a) {
    const __m256i m = _mm256_set1_epi32(0xFFFF);
    return {_mm256_and_si256(a.l, m), _mm256_and_si256(a.h, m)};
}
PENSTOCK_INLINE void store_i16(int16_t* p, vf a) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.l), _mm256_cvtps_epi32(a.h));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
PENSTOCK_INLINE vf store_bf16_sum(uint16_t* p, vf a, vf b, vf sum) {
    store_bf16(p, a);
    store_bf16(p + kLanes, b);
    return add(add(sum, load_bf16(p)), load_bf16(p + kLanes));
}
PENSTOCK_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#else  // portable: plain loops over sixteen, for the compiler to vectorise as it can

constexpr int kTileRows = 2, kTilePanels = 1, kFewRows = 1, kFewRowPanels = 1;
constexpr int kAttentionPairs = 2, kAttentionTaskPairs = 16;

struct vf { float v[16]; };
struct vi { int32_t v[16]; };
struct vb { uint8_t v[64]; };

#define PENSTOCK_LANES for (int i = 0; i < 16; ++i)
PENSTOCK_INLINE vf load(const float* p) { vf r; PENSTOCK_LANES r.v[i] = p[i]; return r; }
PENSTOCK_INLINE void store(float* p, vf a) { PENSTOCK_LANES p[i] = a.v[i]; }
PENSTOCK_INLINE vf set1(float x) { vf r; PENSTOCK_LANES r.v[i] = x; return r; }
PENSTOCK_INLINE vf add(vf a, vf b) { PENSTOCK_LANES a.v[i] += b.v[i]; return a; }
PENSTOCK_INLINE vf sub(vf a, vf b) { PENSTOCK_LANES a.v[i] -= b.v[i]; return a; }
PENSTOCK_INLINE vf mul(vf a, vf b) { PENSTOCK_LANES a.v[i] *= b.v[i]; return a; }
PENSTOCK_INLINE vf div(vf a, vf b) { PENSTOCK_LANES a.v[i] /= b.v[i]; return a; }
PENSTOCK_INLINE vf max(vf a, vf b) { PENSTOCK_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
PENSTOCK_INLINE vf min(vf a, vf b) { PENSTOCK_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
PENSTOCK_INLINE vf fma(vf a, vf b, vf c) { PENSTOCK_LANES c.v[i] += a.v[i] * b.v[i]; return c; }
PENSTOCK_INLINE vf abs(vf a) { PENSTOCK_LANES a.v[i] = fabsf(a.v[i]); return a; }
// Round to nearest even by the magic-number method; exact for |a| < 2^22, and larger values never come here.
PENSTOCK_INLINE vf round(vf a) { PENSTOCK_LANES a.v[i] = (a.v[i] + 12582912.0f) - 12582912.0f; return a; }
PENSTOCK_INLINE vf scale2(vf a, vf n) {
    PENSTOCK_LANES {
        const int32_t bits = (static_cast<int32_t>(n.v[i]) + 127) << 23;
        float p;
        memcpy(&p, &bits, 4);
        a.v[i] *= p;
    }
    return a;
}
PENSTOCK_INLINE vf first(int count, vf a, vf b) { PENSTOCK_LANES a.v[i] = i < count ? a.v[i] : b.v[i]; return a; }
PENSTOCK_INLINE float widen_f16(uint16_t h) {
    // IEEE half to single: shift the mantissa, then let a float multiplication fix the exponent (subnormals too).
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((h & 0x7C00u) == 0x7C00u) bits = magnitude | 0x7F800000u;
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
PENSTOCK_INLINE float widen_bf16(uint16_t b) {
    const uint32_t bits = static_cast<uint32_t>(b) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
PENSTOCK_INLINE vf load_f16(const uint16_t* p) { vf r; PENSTOCK_LANES r.v[i] = widen_f16(p[i]); return r; }
PENSTOCK_INLINE vf load_bf16(const uint16_t* p) { vf r; PENSTOCK_LANES r.v[i] = widen_bf16(p[i]); return r; }

PENSTOCK_INLINE void store_bf16(uint16_t* p, vf a) {
    PENSTOCK_LANES {
        uint32_t bits;
        memcpy(&bits, &a.v[i], 4);
        p[i] = static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
}
PENSTOCK_INLINE float reduce_add(vf a) {
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
    }
    return a.v[0];
}
PENSTOCK_INLINE float reduce_max(vf a) {
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) a.v[i] = a.v[i] > a.v[i + step] ? a.v[i] : a.v[i + step];
    }
    return a.v[0];
}

PENSTOCK_INLINE vi set1_i(int32_t x) { vi r; PENSTOCK_LANES r.v[i] = x; return r; }
PENSTOCK_INLINE vi times16(vi a) { PENSTOCK_LANES a.v[i] *= 16; return a; }
PENSTOCK_INLINE vf to_float(vi a) { vf r; PENSTOCK_LANES r.v[i] = static_cast<float>(a.v[i]); return r; }
PENSTOCK_INLINE void store(int32_t* p, vi a) { PENSTOCK_LANES p[i] = a.v[i]; }
PENSTOCK_INLINE void store_rounded_i8(int8_t* p, vf a) {
    PENSTOCK_LANES {
        const float r = (a.v[i] + 12582912.0f) - 12582912.0f;
        p[i] = static_cast<int8_t>(r > 127.0f ? 127.0f : r < -128.0f ? -128.0f : r);
    }
}
PENSTOCK_INLINE vf largest_of_groups(const float* x) {
    vf r;
    for (int g = 0; g < 16; ++g) r.v[g] = reduce_max(max(abs(load(x + 32 * g)), abs(load(x + 32 * g + 16))));
    return r;
}
PENSTOCK_INLINE vi sum_of_groups(const int8_t* q) {
    vi r;
    for (int g = 0; g < 16; ++g) {
        r.v[g] = 0;
        for (int i = 0; i < 32; ++i) r.v[g] += q[32 * g + i];
    }
    return r;
}
PENSTOCK_INLINE vb load64(const uint8_t* p) { vb r; memcpy(r.v, p, 64); return r; }
PENSTOCK_INLINE void store64(uint8_t* p, vb a) { memcpy(p, a.v, 64); }
PENSTOCK_INLINE vb low_nibbles(vb a) { for (int i = 0; i < 64; ++i) a.v[i] &= 0x0F; return a; }
PENSTOCK_INLINE vb high_nibbles(vb a) { for (int i = 0; i < 64; ++i) a.v[i] >>= 4; return a; }
PENSTOCK_INLINE vb look_up(vb a, const uint8_t* table) { for (int i = 0; i < 64; ++i) a.v[i] = table[a.v[i]]; return a; }
PENSTOCK_INLINE vf byte_of_lanes(vb a, int j) { vf r; PENSTOCK_LANES r.v[i] = static_cast<float>(a.v[4 * i + j]); return r; }
PENSTOCK_INLINE vf bf16_of_lanes(vb a, int j) {
    vf r;
    PENSTOCK_LANES {
        uint16_t bits;
        memcpy(&bits, a.v + 4 * i + 2 * j, 2);
        r.v[i] = widen_bf16(bits);
    }
    return r;
}
PENSTOCK_INLINE vf add_exponent(vf a, int32_t exponent_bits) {
    PENSTOCK_LANES {
        uint32_t bits;
        memcpy(&bits, &a.v[i], 4);
        bits += static_cast<uint32_t>(exponent_bits);
        memcpy(&a.v[i], &bits, 4);
    }
    return a;
}
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    PENSTOCK_LANES {
        for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * a4[j];
    }
    return acc;
}
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, const uint16_t* a2) {
    const float a0 = widen_bf16(a2[0]), a1 = widen_bf16(a2[1]);
    PENSTOCK_LANES {
        uint16_t pair[2];
        memcpy(pair, w.v + 4 * i, 4);
        acc.v[i] += widen_bf16(pair[0]) * a0;
        acc.v[i] += widen_bf16(pair[1]) * a1;
    }
    return acc;
}
PENSTOCK_INLINE vb set1_pair(const void* p) { vb r; PENSTOCK_LANES memcpy(r.v + 4 * i, p, 4); return r; }
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    int16_t x[32], y[32];
    memcpy(x, w.v, 64);
    memcpy(y, a.v, 64);
    PENSTOCK_LANES acc.v[i] += x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return acc;
}
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) {
    uint16_t x[32], y[32];
    memcpy(x, w.v, 64);
    memcpy(y, a.v, 64);
    PENSTOCK_LANES acc.v[i] += widen_bf16(x[2 * i]) * widen_bf16(y[2 * i]);
    PENSTOCK_LANES acc.v[i] += widen_bf16(x[2 * i + 1]) * widen_bf16(y[2 * i + 1]);
    return acc;
}
PENSTOCK_INLINE vf add_exponent(vf a, vf n) {
    uint32_t x[16], y[16];
    memcpy(x, a.v, 64);
    memcpy(y, n.v, 64);
    PENSTOCK_LANES x[i] += y[i] << 23;
    memcpy(a.v, x, 64);
    return a;
}
PENSTOCK_INLINE vb even_halves(vb a) { PENSTOCK_LANES memset(a.v + 4 * i + 2, 0, 2); return a; }
PENSTOCK_INLINE void store_i16(int16_t* p, vf a) {
    const vf r = round(a);
    PENSTOCK_LANES p[i] = r.v[i] == r.v[i] ? static_cast<int16_t>(r.v[i]) : 0;
}
PENSTOCK_INLINE vf store_bf16_sum(uint16_t* p, vf a, vf b, vf sum) {
    store_bf16(p, a);
    store_bf16(p + kLanes, b);
    return add(add(sum, load_bf16(p)), load_bf16(p + kLanes));
}
PENSTOCK_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
#undef PENSTOCK_LANES

#endif

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

// 2^a for a <= 126, 1 for 0, 0 or below 1e-37 from -126 down; relative error below 3e-6 (a minimax polynomial on
// [-1/2, 1/2]). NaN stays NaN but for payloads that no operation produces.
PENSTOCK_INLINE vf exp2(vf a) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to an integer, which is in its low bits
    const vf clamped = max(set1(-127.0f), a);
    const vf n = add(clamped, set1(kMagic)), r = sub(clamped, sub(n, set1(kMagic)));
    vf p = fma(set1(0.00958285294f), r, set1(0.0559064262f));
    p = fma(p, r, set1(0.240240991f));
    p = fma(p, r, set1(0.693124175f));
    p = fma(p, r, set1(1.0f));
    return add_exponent(p, n);
}

}  // namespace penstock::PENSTOCK_ISA
