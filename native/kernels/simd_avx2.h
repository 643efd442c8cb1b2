// The sixteen lanes of simd.h as two AVX2 registers. Included by simd.h alone, inside its namespace.

constexpr int kTileRows = 4, kTilePanels = 1, kFewRows = 1, kFewRowPanels = 1;
constexpr int kRow8Rows = 3, kRow8Panels = 1;
constexpr int kAttentionPairs = 4, kAttentionScorePairs = 4, kAttentionScoreSums = 4, kAttentionTaskPairs = 16, kSoftmaxVectors = 2;
constexpr int kTextRows = 4, kTextVectors = 1;
constexpr bool kWidensWeights = false;
constexpr bool kFetchesFar = false, kFollowsStreams = false;
constexpr int32_t kUnsignedLess = 0;
constexpr int kStateVectors = 2;  // of columns of a recurrent state that are changed together

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
PENSTOCK_INLINE vf sqrt(vf a) { return {_mm256_sqrt_ps(a.l), _mm256_sqrt_ps(a.h)}; }
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
constexpr bool kScaleSaturates = false;
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
PENSTOCK_INLINE vi add(vi a, vi b) { return {_mm256_add_epi32(a.l, b.l), _mm256_add_epi32(a.h, b.h)}; }
PENSTOCK_INLINE vi sub(vi a, vi b) { return {_mm256_sub_epi32(a.l, b.l), _mm256_sub_epi32(a.h, b.h)}; }
PENSTOCK_INLINE vi bit_and(vi a, vi b) { return {_mm256_and_si256(a.l, b.l), _mm256_and_si256(a.h, b.h)}; }
PENSTOCK_INLINE vi bits_of(vf a) { return {_mm256_castps_si256(a.l), _mm256_castps_si256(a.h)}; }
PENSTOCK_INLINE vf float_of(vi bits) { return {_mm256_castsi256_ps(bits.l), _mm256_castsi256_ps(bits.h)}; }
PENSTOCK_INLINE vi mul(vi a, vi b) { return {_mm256_mullo_epi32(a.l, b.l), _mm256_mullo_epi32(a.h, b.h)}; }
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
PENSTOCK_INLINE uint32_t lanes_above(vf a, vf b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.l, b.l, _CMP_GT_OQ));
    return static_cast<uint32_t>(low | _mm256_movemask_ps(_mm256_cmp_ps(a.h, b.h, _CMP_GT_OQ)) << 8);
}
PENSTOCK_INLINE vi max(vi a, vi b) { return {_mm256_max_epi32(a.l, b.l), _mm256_max_epi32(a.h, b.h)}; }
PENSTOCK_INLINE vi load(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
PENSTOCK_INLINE vf up_to(vf a, vf bound) {
    return {_mm256_and_ps(a.l, _mm256_cmp_ps(a.l, bound.l, _CMP_LE_OQ)), _mm256_and_ps(a.h, _mm256_cmp_ps(a.h, bound.h, _CMP_LE_OQ))};
}
PENSTOCK_INLINE void store_largest_of_four(int32_t* p, const vi (&a)[4]) {
    __m256i v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_max_epi32(a[i].l, a[i].h);
    const __m256i first = _mm256_max_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const __m256i second = _mm256_max_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    const __m256i all = _mm256_max_epi32(_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
    _mm_storeu_si128((__m128i*)p, _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
PENSTOCK_INLINE __m256i packed_i16(vf a) { return _mm256_packs_epi32(_mm256_cvtps_epi32(a.l), _mm256_cvtps_epi32(a.h)); }
PENSTOCK_INLINE __m256i in_order(__m256i halves) {
    return _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
PENSTOCK_INLINE __m256i rounded_i8_part(vf a, vf b) { return in_order(_mm256_packs_epi16(packed_i16(a), packed_i16(b))); }
PENSTOCK_INLINE vb rounded_i8(vf a, vf b, vf c, vf d) { return {rounded_i8_part(a, b), rounded_i8_part(c, d)}; }
PENSTOCK_INLINE void store_rounded_u8(uint8_t* p, const vf (&a)[kSoftmaxVectors]) {
    _mm256_storeu_si256((__m256i*)p, in_order(_mm256_packus_epi16(packed_i16(a[0]), packed_i16(a[1]))));
}
// Products of integers, four bytes or two 16-bit numbers to a lane: with AVX-VNNI as in simd_avx512.h.
#if defined(__AVXVNNI__)
constexpr int32_t kDot4Subtracts = 0;
PENSTOCK_INLINE __m256i sums_of_bytes(__m256i a) { return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), a); }
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    int32_t bits;
    memcpy(&bits, a4, 4);
    const __m256i a = _mm256_set1_epi32(bits);
    return {_mm256_dpbusd_avx_epi32(acc.l, w.l, a), _mm256_dpbusd_avx_epi32(acc.h, w.h, a)};
}
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    return {_mm256_dpwssd_avx_epi32(acc.l, w.l, a.l), _mm256_dpwssd_avx_epi32(acc.h, w.h, a.h)};
}
constexpr int32_t kDotZero = 128;
PENSTOCK_INLINE vi dot4_i8(vi acc, vb w, vb a) {
    return {_mm256_dpbusd_avx_epi32(acc.l, w.l, a.l), _mm256_dpbusd_avx_epi32(acc.h, w.h, a.h)};
}
PENSTOCK_INLINE vi dot4_u8(vi acc, vb w, vb a) { return dot4_i8(acc, w, a); }
#else
PENSTOCK_INLINE __m256i sums_of_bytes(__m256i a) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), a), _mm256_set1_epi16(1));
}
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    return {_mm256_add_epi32(acc.l, _mm256_madd_epi16(w.l, a.l)), _mm256_add_epi32(acc.h, _mm256_madd_epi16(w.h, a.h))};
}
// Signed bytes: |w| times a with the sign of w. The sum of two such products fits into 16 bits, and a is never -128.
constexpr int32_t kDotZero = 0;
PENSTOCK_INLINE __m256i dot4_i8_part(__m256i acc, __m256i w, __m256i a) {
    const __m256i number = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    const __m256i words = _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(a, number));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
PENSTOCK_INLINE vi dot4_i8(vi acc, vb w, vb a) { return {dot4_i8_part(acc.l, w.l, a.l), dot4_i8_part(acc.h, w.h, a.h)}; }
// Unsigned w by signed a: two products of bytes may exceed 16 bits, so they are multiplied as 16-bit numbers.
PENSTOCK_INLINE __m256i dot4_u8_part(__m256i acc, __m256i w, __m256i a) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xFF)), _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(a, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
PENSTOCK_INLINE vi dot4_u8(vi acc, vb w, vb a) { return {dot4_u8_part(acc.l, w.l, a.l), dot4_u8_part(acc.h, w.h, a.h)}; }

// Inline assembly, since GCC 12 would move the sums of a tile to memory and back. Activations are at least -127: vpsignb can't
// negate -128. (Sanitizers don't see the reads of such a block.)
constexpr int32_t kDot4Subtracts = 128;
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    static_assert(!kNibbles);
    const int32_t& four = *reinterpret_cast<const int32_t*>(a4);
    const __m256i l = _mm256_xor_si256(w.l, _mm256_set1_epi8(-128)), h = _mm256_xor_si256(w.h, _mm256_set1_epi8(-128));
    __m256i a, words;
    asm("vpbroadcastd %[four], %[a]\n\t"
        "vpsignb %[l], %[a], %[words]\n\tvpmaddubsw %[words], %[size_l], %[words]\n\t"
        "vpmaddwd %[one], %[words], %[words]\n\tvpaddd %[words], %[acc_l], %[acc_l]\n\t"
        "vpsignb %[h], %[a], %[words]\n\tvpmaddubsw %[words], %[size_h], %[words]\n\t"
        "vpmaddwd %[one], %[words], %[words]\n\tvpaddd %[words], %[acc_h], %[acc_h]"
        : [acc_l] "+&x"(acc.l), [acc_h] "+&x"(acc.h), [a] "=&x"(a), [words] "=&x"(words)
        : [l] "x"(l), [h] "x"(h), [size_l] "x"(_mm256_abs_epi8(l)), [size_h] "x"(_mm256_abs_epi8(h)), [one] "x"(_mm256_set1_epi16(1)),
          [four] "m"(four));
    return acc;
}

// Likewise of weights of kU8Row, which are at least 1 (`pack_rows8`): |a| times the signed weight, with the sign of a.
#define PENSTOCK_SIGNED_ROW8
constexpr int32_t kDot4Row8Subtracts = 128;
PENSTOCK_INLINE vi dot4_row8(vi acc, vb w, const int8_t* a4) {
    const int32_t& four = *reinterpret_cast<const int32_t*>(a4);
    const __m256i l = _mm256_xor_si256(w.l, _mm256_set1_epi8(-128)), h = _mm256_xor_si256(w.h, _mm256_set1_epi8(-128));
    __m256i a, size, words;
    asm("vpbroadcastd %[four], %[a]\n\tvpabsb %[a], %[size]\n\t"
        "vpsignb %[a], %[l], %[words]\n\tvpmaddubsw %[words], %[size], %[words]\n\t"
        "vpmaddwd %[one], %[words], %[words]\n\tvpaddd %[words], %[acc_l], %[acc_l]\n\t"
        "vpsignb %[a], %[h], %[words]\n\tvpmaddubsw %[words], %[size], %[words]\n\t"
        "vpmaddwd %[one], %[words], %[words]\n\tvpaddd %[words], %[acc_h], %[acc_h]"
        : [acc_l] "+&x"(acc.l), [acc_h] "+&x"(acc.h), [a] "=&x"(a), [size] "=&x"(size), [words] "=&x"(words)
        : [l] "x"(l), [h] "x"(h), [one] "x"(_mm256_set1_epi16(1)), [four] "m"(four));
    return acc;
}

// The sum over a group of nibbles fits into 16 bits: 8 times two products of at most 15 * 128.
#define PENSTOCK_SHORT_SUMS
struct short_sum { __m256i l, h; };
template <bool kNibbles>
PENSTOCK_INLINE short_sum dot4(short_sum acc, vb w, const int8_t* a4) {
    static_assert(kNibbles);
    const int32_t& four = *reinterpret_cast<const int32_t*>(a4);
    __m256i a, words;
    asm("vpbroadcastd %[four], %[a]\n\t"
        "vpmaddubsw %[a], %[l], %[words]\n\tvpaddw %[words], %[acc_l], %[acc_l]\n\t"
        "vpmaddubsw %[a], %[h], %[words]\n\tvpaddw %[words], %[acc_h], %[acc_h]"
        : [acc_l] "+&x"(acc.l), [acc_h] "+&x"(acc.h), [a] "=&x"(a), [words] "=&x"(words)
        : [l] "x"(w.l), [h] "x"(w.h), [four] "m"(four));
    return acc;
}
template <bool kNibbles>
PENSTOCK_INLINE auto begin_sum(vi start) {
    if constexpr (kNibbles) {
        return short_sum{_mm256_setzero_si256(), _mm256_setzero_si256()};
    } else {
        return start;
    }
}
PENSTOCK_INLINE vi end_sum(short_sum sum, vi start) {
    const __m256i one = _mm256_set1_epi16(1);
    return add(vi{_mm256_madd_epi16(sum.l, one), _mm256_madd_epi16(sum.h, one)}, start);
}
#endif
PENSTOCK_INLINE void store_sums_of_four(int32_t* p, vb a, vb b) {
    const __m256i first = _mm256_hadd_epi32(sums_of_bytes(a.l), sums_of_bytes(a.h));
    const __m256i all = _mm256_hadd_epi32(first, _mm256_hadd_epi32(sums_of_bytes(b.l), sums_of_bytes(b.h)));
    _mm_storeu_si128((__m128i*)p, _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
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
PENSTOCK_INLINE vb bit_xor(vb a, vb b) { return {_mm256_xor_si256(a.l, b.l), _mm256_xor_si256(a.h, b.h)}; }
template <int kApart>
PENSTOCK_INLINE vf swap_lanes(vf a) {
    constexpr int order = kApart == 1 ? 0xB1 : 0x4E;
    if constexpr (kApart == 8) return {a.h, a.l};
    if constexpr (kApart == 4) return {_mm256_permute2f128_ps(a.l, a.l, 1), _mm256_permute2f128_ps(a.h, a.h, 1)};
    return {_mm256_permute_ps(a.l, order), _mm256_permute_ps(a.h, order)};
}
PENSTOCK_INLINE vb look_up(vb a, const uint8_t* table) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(t, a.l), _mm256_shuffle_epi8(t, a.h)};
}
PENSTOCK_INLINE vb shift_right(vb a, int32_t shift) {
    const __m256i count = _mm256_set1_epi32(shift);
    return {_mm256_srlv_epi32(a.l, count), _mm256_srlv_epi32(a.h, count)};
}
PENSTOCK_INLINE vi low_bytes_of_lanes(vb a) {
    const __m256i mask = _mm256_set1_epi32(0xFF);
    return {_mm256_and_si256(a.l, mask), _mm256_and_si256(a.h, mask)};
}
PENSTOCK_INLINE vf bits_of_lanes(vb a, int32_t mask) {
    const __m256i m = _mm256_set1_epi32(mask);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(a.l, m)), _mm256_cvtepi32_ps(_mm256_and_si256(a.h, m))};
}
PENSTOCK_INLINE vb set1_pair(const void* p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
PENSTOCK_INLINE vb set1_eight(const void* p) {
    int64_t bits;
    memcpy(&bits, p, 8);
    return {_mm256_set1_epi64x(bits), _mm256_set1_epi64x(bits)};
}
PENSTOCK_INLINE vf set1_two(const float* p) {
    const vb both = set1_eight(p);
    return {_mm256_castsi256_ps(both.l), _mm256_castsi256_ps(both.h)};
}
PENSTOCK_INLINE __m256 even_bf16(__m256i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
PENSTOCK_INLINE __m256 odd_bf16(__m256i a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) {
    return {_mm256_fmadd_ps(even_bf16(a.l), even_bf16(w.l), _mm256_fmadd_ps(odd_bf16(a.l), odd_bf16(w.l), acc.l)),
            _mm256_fmadd_ps(even_bf16(a.h), even_bf16(w.h), _mm256_fmadd_ps(odd_bf16(a.h), odd_bf16(w.h), acc.h))};
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
PENSTOCK_INLINE __m256i pairs_i16_part(__m256 a, __m256 b) {
    return _mm256_blend_epi16(_mm256_cvtps_epi32(a), _mm256_slli_epi32(_mm256_cvtps_epi32(b), 16), 0xAA);
}
PENSTOCK_INLINE void store_pairs_i16(uint8_t* p, vf a, vf b) {
    _mm256_storeu_si256((__m256i*)p, pairs_i16_part(a.l, b.l));
    _mm256_storeu_si256((__m256i*)(p + 32), pairs_i16_part(a.h, b.h));
}
PENSTOCK_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
