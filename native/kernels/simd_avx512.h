// The sixteen lanes of simd.h as one AVX-512 register. Included by simd.h alone, inside its namespace.

// Tiles small enough to keep their accumulators in registers: a GEMM's rows by panels (up to kFewRows rows are bound by memory: a
// single panel is one stream, which is read fastest), and the (query, head) pairs of an attention tile.
// Six rows by two panels and four by three multiply alike on Zen 5; weights are unpacked, and read, less often for six.
constexpr int kTileRows = 6, kTilePanels = 2;
constexpr int kFewRows = 3, kFewRowPanels = 1;
constexpr int kRow8Rows = 6, kRow8Panels = 4;  // likewise, of a product in integers alone
constexpr int kAttentionPairs = 12, kAttentionScorePairs = 6, kAttentionScoreSums = 12, kAttentionTaskPairs = 48, kSoftmaxVectors = 4;
constexpr int kTextRows = 6, kTextVectors = 2;  // likewise, of a tile of queries by keys in a text
constexpr int kStateVectors = 4;  // of columns of a recurrent state that are changed together
constexpr bool kWidensWeights = false;  // for many rows, by gemm_widened.cpp
#if defined(__AVX512BF16__)
constexpr bool kFetchesFar = true, kFollowsStreams = true;  // measured on Zen 4; Zen 5, and Intel's with bf16, have them unmeasured
#else
constexpr bool kFetchesFar = false, kFollowsStreams = false;  // Cascade Lake gains nothing from the first
#endif
constexpr int32_t kUnsignedLess = 0;   // dot4_u8 takes unsigned numbers as that much smaller
constexpr int32_t kDot4Subtracts = 0;  // dot4 subtracts it from each weight of 8 bits

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
PENSTOCK_INLINE vf sqrt(vf a) { return {_mm512_sqrt_ps(a.v)}; }
PENSTOCK_INLINE vf abs(vf a) { return {_mm512_abs_ps(a.v)}; }
PENSTOCK_INLINE vf round(vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n; saturates to infinity or zero.
constexpr bool kScaleSaturates = true;
PENSTOCK_INLINE vf scale2(vf a, vf n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Lanes below `count` from a, the others from b.
PENSTOCK_INLINE vf first(int count, vf a, vf b) {
    return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>((1u << count) - 1u), a.v)};
}
PENSTOCK_INLINE vf load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PENSTOCK_INLINE vf load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}

// To bfloat16, to nearest even. NaN stays NaN but for payloads that nothing has: see exp2 in simd.h.
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
PENSTOCK_INLINE vi add(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
PENSTOCK_INLINE vi sub(vi a, vi b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PENSTOCK_INLINE vi bit_and(vi a, vi b) { return {_mm512_and_si512(a.v, b.v)}; }
PENSTOCK_INLINE vi bits_of(vf a) { return {_mm512_castps_si512(a.v)}; }
PENSTOCK_INLINE vf float_of(vi bits) { return {_mm512_castsi512_ps(bits.v)}; }
PENSTOCK_INLINE vi mul(vi a, vi b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
PENSTOCK_INLINE vi times16(vi a) { return {_mm512_slli_epi32(a.v, 4)}; }
PENSTOCK_INLINE vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
PENSTOCK_INLINE void store(int32_t* p, vi a) { _mm512_storeu_si512(p, a.v); }
// Sixteen int8 from sixteen floats: to nearest even, saturating below 2^31.
PENSTOCK_INLINE void store_rounded_i8(int8_t* p, vf a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// 64 of them, in order. packs_epi16 and its kin leave each quarter of `a` to `d` beside the others'.
PENSTOCK_INLINE __m512i packed_i16(vf a, vf b) { return _mm512_packs_epi32(_mm512_cvtps_epi32(a.v), _mm512_cvtps_epi32(b.v)); }
PENSTOCK_INLINE __m512i in_order(__m512i quarters) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), quarters);
}
PENSTOCK_INLINE vb rounded_i8(vf a, vf b, vf c, vf d) { return {in_order(_mm512_packs_epi16(packed_i16(a, b), packed_i16(c, d)))}; }
// From 0 to 255, saturating likewise; of a[0] first.
PENSTOCK_INLINE void store_rounded_u8(uint8_t* p, const vf (&a)[kSoftmaxVectors]) {
    _mm512_storeu_si512(p, in_order(_mm512_packus_epi16(packed_i16(a[0], a[1]), packed_i16(a[2], a[3]))));
}
// Bit i: whether lane i of a exceeds that of b.
PENSTOCK_INLINE uint32_t lanes_above(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
// Lane by lane the larger one. Of sizes of floats, by their bits: NaN is the largest.
PENSTOCK_INLINE vi max(vi a, vi b) { return {_mm512_max_epi32(a.v, b.v)}; }
PENSTOCK_INLINE vi load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
// The first `count` of sixteen numbers, fewer than 16; the others are zero, or left as they are.
PENSTOCK_INLINE __mmask16 lanes_below(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
PENSTOCK_INLINE vf load_part(const float* p, int count) { return {_mm512_maskz_loadu_ps(lanes_below(count), p)}; }
PENSTOCK_INLINE vi load_part(const int32_t* p, int count) { return {_mm512_maskz_loadu_epi32(lanes_below(count), p)}; }
PENSTOCK_INLINE void store_part(float* p, vf a, int count) { _mm512_mask_storeu_ps(p, lanes_below(count), a.v); }
PENSTOCK_INLINE void store_part(int32_t* p, vi a, int count) { _mm512_mask_storeu_epi32(p, lanes_below(count), a.v); }
// a where it is not above the bound, else zero.
PENSTOCK_INLINE vf up_to(vf a, vf bound) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, bound.v, _CMP_LE_OQ), a.v)}; }
// The largest lane of each of four.
PENSTOCK_INLINE void store_largest_of_four(int32_t* p, const vi (&a)[4]) {
    const __m512i first = _mm512_max_epi32(_mm512_unpacklo_epi32(a[0].v, a[1].v), _mm512_unpackhi_epi32(a[0].v, a[1].v));
    const __m512i second = _mm512_max_epi32(_mm512_unpacklo_epi32(a[2].v, a[3].v), _mm512_unpackhi_epi32(a[2].v, a[3].v));
    const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    _mm_storeu_si128((__m128i*)p, _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
// The sums of 32 int8 each: the halves of a, then those of b.
PENSTOCK_INLINE void store_sums_of_four(int32_t* p, vb a, vb b) {
    const __m512i one = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
    const __m512i first = _mm512_dpbusd_epi32(zero, one, a.v), second = _mm512_dpbusd_epi32(zero, one, b.v);
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    all = _mm512_add_epi32(all, _mm512_shuffle_epi32(all, _MM_PERM_CDAB));
    all = _mm512_add_epi32(all, _mm512_shuffle_i64x2(all, all, 0xB1));
    // Now the quarters are (0, 0, 2, 2) twice, then (1, 1, 3, 3) twice.
    _mm_storeu_si128((__m128i*)p, _mm_blend_epi32(_mm512_castsi512_si128(all), _mm512_extracti32x4_epi32(all, 2), 0xA));
}
PENSTOCK_INLINE vb load64(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PENSTOCK_INLINE void store64(uint8_t* p, vb a) { _mm512_storeu_si512(p, a.v); }
PENSTOCK_INLINE vb low_nibbles(vb a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(0x0F))}; }
// Not by GFNI's one operation: on Zen 4 it competes with dot products, so 16 rows and more took 5 to 6 % longer.
PENSTOCK_INLINE vb high_nibbles(vb a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0F))}; }
PENSTOCK_INLINE vb bit_xor(vb a, vb b) { return {_mm512_xor_si512(a.v, b.v)}; }
// Lane i of what was lane i ^ kApart: 1, 2, 4 or 8.
template <int kApart>
PENSTOCK_INLINE vf swap_lanes(vf a) {
    if constexpr (kApart < 4) return {_mm512_permute_ps(a.v, kApart == 1 ? 0xB1 : 0x4E)};
    return {_mm512_shuffle_f32x4(a.v, a.v, kApart == 4 ? 0xB1 : 0x4E)};
}
// table[a] of sixteen bytes
PENSTOCK_INLINE vb look_up(vb a, const uint8_t* table) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), a.v)};
}
// Each lane >> shift.
PENSTOCK_INLINE vb shift_right(vb a, int32_t shift) { return {_mm512_srlv_epi32(a.v, _mm512_set1_epi32(shift))}; }
// The bits `mask` of each lane, as a number.
PENSTOCK_INLINE vf bits_of_lanes(vb a, int32_t mask) {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(mask)))};
}
// The lowest byte of each lane.
PENSTOCK_INLINE vi low_bytes_of_lanes(vb a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xFF))}; }
// acc[lane] += sum over j of unsigned w[lane][j] * signed a4[j], j = 0..3
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    int32_t bits;
    memcpy(&bits, a4, 4);
    return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(bits))};
}
// Two 16-bit values for every lane.
PENSTOCK_INLINE vb set1_pair(const void* p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return {_mm512_set1_epi32(bits)};
}
// Eight bytes for every two lanes.
PENSTOCK_INLINE vb set1_eight(const void* p) {
    int64_t bits;
    memcpy(&bits, p, 8);
    return {_mm512_set1_epi64(bits)};
}
// Two numbers for every two lanes.
PENSTOCK_INLINE vf set1_two(const float* p) { return {_mm512_castsi512_ps(set1_eight(p).v)}; }
// acc[lane] += w[lane][0] * a[lane][0] + w[lane][1] * a[lane][1], int16 products in int32. Written as assembly because the
// compiler copies accumulators that the intrinsic takes.
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(a.v));
    return acc;
}
// acc[lane] += the sum of w[lane][j] * a[lane][j] of four int8 each, those of w stored 128 above their number, and kDotZero times
// the sum of a's.
constexpr int32_t kDotZero = 128;
PENSTOCK_INLINE vi dot4_i8(vi acc, vb w, vb a) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(a.v));
    return acc;
}
// acc[lane] += the sum of unsigned w[lane][j] * signed a[lane][j] of four bytes each.
PENSTOCK_INLINE vi dot4_u8(vi acc, vb w, vb a) { return dot4_i8(acc, w, a); }
// acc[lane] += w[lane][0] * a[lane][0] + w[lane][1] * a[lane][1], bf16 products in float32.
#if defined(__AVX512BF16__)
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(a.v));
    return acc;
}
#else
PENSTOCK_INLINE __m512 even_bf16(vb a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)); }
PENSTOCK_INLINE __m512 odd_bf16(vb a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) {
    return {_mm512_fmadd_ps(even_bf16(a), even_bf16(w), _mm512_fmadd_ps(odd_bf16(a), odd_bf16(w), acc.v))};
}
#endif
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
// Both as integers within 16 bits, lane by lane beside each other.
PENSTOCK_INLINE void store_pairs_i16(uint8_t* p, vf a, vf b) {
    const __m512i second = _mm512_slli_epi32(_mm512_cvtps_epi32(b.v), 16);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_cvtps_epi32(a.v), second));
}
PENSTOCK_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
