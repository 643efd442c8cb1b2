// The sixteen lanes of simd.h as four registers of 64-bit Arm with dot products, in two variants: with products of matrices of bytes
// (__ARM_FEATURE_MATMUL_INT8) and bf16, or without. Floats have the bits of AVX2. Included by simd.h alone, inside its namespace.

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define PENSTOCK_NEON_I8MM 1
#endif

// Rows above kFewRows go through gemm_widened.cpp; a tile of more would not fit the registers.
constexpr int kTileRows = 6, kTilePanels = 1, kFewRows = 3, kFewRowPanels = 1;
constexpr int kRow8Rows = 4, kRow8Panels = 1;
constexpr int kAttentionPairs = 4, kAttentionScorePairs = 4, kAttentionScoreSums = 4, kAttentionTaskPairs = 16, kSoftmaxVectors = 2;
constexpr int kTextRows = 4, kTextVectors = 1;
constexpr int kStateVectors = 2;  // of columns of a recurrent state that are changed together

constexpr bool kWidensWeights = true;
constexpr bool kFetchesFar = false, kFollowsStreams = false;

struct vf { float32x4_t v[4]; };
struct vi { int32x4_t v[4]; };
struct vb { uint8x16_t v[4]; };

// f(0) to f(3) as the registers of a vector.
template <typename V, typename F>
PENSTOCK_INLINE V four(F f) {
    return V{{f(0), f(1), f(2), f(3)}};
}
#define PENSTOCK_FOUR(V, expression) four<V>([&](int i) PENSTOCK_LAMBDA { return expression; })

PENSTOCK_INLINE vf load(const float* p) { return PENSTOCK_FOUR(vf, vld1q_f32(p + 4 * i)); }
PENSTOCK_INLINE void store(float* p, vf a) { PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]); }
PENSTOCK_INLINE vf set1(float x) { return PENSTOCK_FOUR(vf, (static_cast<void>(i), vdupq_n_f32(x))); }
PENSTOCK_INLINE vf add(vf a, vf b) { return PENSTOCK_FOUR(vf, vaddq_f32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vf sub(vf a, vf b) { return PENSTOCK_FOUR(vf, vsubq_f32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vf mul(vf a, vf b) { return PENSTOCK_FOUR(vf, vmulq_f32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vf div(vf a, vf b) { return PENSTOCK_FOUR(vf, vdivq_f32(a.v[i], b.v[i])); }
// The second operand if either is NaN, as on x86, which the kernels rely on: Arm's own instructions would return NaN.
PENSTOCK_INLINE vf max(vf a, vf b) { return PENSTOCK_FOUR(vf, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
PENSTOCK_INLINE vf min(vf a, vf b) { return PENSTOCK_FOUR(vf, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
PENSTOCK_INLINE vf fma(vf a, vf b, vf c) { return PENSTOCK_FOUR(vf, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
PENSTOCK_INLINE vf sqrt(vf a) { return PENSTOCK_FOUR(vf, vsqrtq_f32(a.v[i])); }
PENSTOCK_INLINE vf abs(vf a) { return PENSTOCK_FOUR(vf, vabsq_f32(a.v[i])); }
PENSTOCK_INLINE vf round(vf a) { return PENSTOCK_FOUR(vf, vrndnq_f32(a.v[i])); }
constexpr bool kScaleSaturates = false;
PENSTOCK_INLINE vf scale2(vf a, vf n) {
    return PENSTOCK_FOUR(vf, vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23))));
}
// All bits of the lanes below `count`, of one register.
PENSTOCK_INLINE uint32x4_t lanes_below(int count, int i) {
    const int32x4_t lane = {0, 1, 2, 3};
    return vcgtq_s32(vdupq_n_s32(count - 4 * i), lane);
}
PENSTOCK_INLINE vf first(int count, vf a, vf b) { return PENSTOCK_FOUR(vf, vbslq_f32(lanes_below(count, i), a.v[i], b.v[i])); }
PENSTOCK_INLINE vf load_f16(const uint16_t* p) {
    return PENSTOCK_FOUR(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
PENSTOCK_INLINE vf load_bf16(const uint16_t* p) { return PENSTOCK_FOUR(vf, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
PENSTOCK_INLINE void store_bf16(uint16_t* p, vf a) {
    PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) {
#if defined(PENSTOCK_NEON_I8MM)
        vst1_u16(p + 4 * i, vreinterpret_u16_bf16(vcvt_bf16_f32(a.v[i])));
#else
        const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        vst1_u16(p + 4 * i, vaddhn_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7FFF)));
#endif
    }
}
PENSTOCK_INLINE float reduce_add(vf a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    return vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
PENSTOCK_INLINE float reduce_max(vf a) {
    const vf halves = max(vf{{a.v[0], a.v[1], a.v[0], a.v[1]}}, vf{{a.v[2], a.v[3], a.v[2], a.v[3]}});
    const float32x4_t four = vbslq_f32(vcgtq_f32(halves.v[0], halves.v[1]), halves.v[0], halves.v[1]);
    const float32x2_t low = vget_low_f32(four), high = vget_high_f32(four), two = vbsl_f32(vcgt_f32(low, high), low, high);
    const float even = vget_lane_f32(two, 0), odd = vget_lane_f32(two, 1);
    return even > odd ? even : odd;
}

PENSTOCK_INLINE vi set1_i(int32_t x) { return PENSTOCK_FOUR(vi, (static_cast<void>(i), vdupq_n_s32(x))); }
PENSTOCK_INLINE vi add(vi a, vi b) { return PENSTOCK_FOUR(vi, vaddq_s32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vi sub(vi a, vi b) { return PENSTOCK_FOUR(vi, vsubq_s32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vi bit_and(vi a, vi b) { return PENSTOCK_FOUR(vi, vandq_s32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vi bits_of(vf a) { return PENSTOCK_FOUR(vi, vreinterpretq_s32_f32(a.v[i])); }
PENSTOCK_INLINE vf float_of(vi bits) { return PENSTOCK_FOUR(vf, vreinterpretq_f32_s32(bits.v[i])); }
PENSTOCK_INLINE vi mul(vi a, vi b) { return PENSTOCK_FOUR(vi, vmulq_s32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vi times16(vi a) { return PENSTOCK_FOUR(vi, vshlq_n_s32(a.v[i], 4)); }
PENSTOCK_INLINE vf to_float(vi a) { return PENSTOCK_FOUR(vf, vcvtq_f32_s32(a.v[i])); }
PENSTOCK_INLINE vi rounded(vf a) { return PENSTOCK_FOUR(vi, vcvtnq_s32_f32(a.v[i])); }  // to nearest even, saturating; NaN is 0
PENSTOCK_INLINE void store(int32_t* p, vi a) { PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]); }
// Each number saturates, here and below.
PENSTOCK_INLINE int16x8_t rounded_i16(vi a, int half) { return vqmovn_high_s32(vqmovn_s32(a.v[2 * half]), a.v[2 * half + 1]); }
PENSTOCK_INLINE int8x16_t rounded_i8_part(vf a) {
    const vi whole = rounded(a);
    return vqmovn_high_s16(vqmovn_s16(rounded_i16(whole, 0)), rounded_i16(whole, 1));
}
PENSTOCK_INLINE void store_rounded_i8(int8_t* p, vf a) { vst1q_s8(p, rounded_i8_part(a)); }
PENSTOCK_INLINE vb rounded_i8(vf a, vf b, vf c, vf d) {
    return {{vreinterpretq_u8_s8(rounded_i8_part(a)), vreinterpretq_u8_s8(rounded_i8_part(b)), vreinterpretq_u8_s8(rounded_i8_part(c)),
             vreinterpretq_u8_s8(rounded_i8_part(d))}};
}
PENSTOCK_INLINE void store_rounded_u8(uint8_t* p, const vf (&a)[kSoftmaxVectors]) {
    PENSTOCK_UNROLL for (int j = 0; j < kSoftmaxVectors; ++j) {
        const vi whole = rounded(a[j]);
        vst1q_u8(p + j * kLanes, vqmovun_high_s16(vqmovun_s16(rounded_i16(whole, 0)), rounded_i16(whole, 1)));
    }
}
PENSTOCK_INLINE uint32_t lanes_above(vf a, vf b) {
    const uint32x4_t bit = {1, 2, 4, 8};
    uint32_t above = 0;
    PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) above |= vaddvq_u32(vandq_u32(vcgtq_f32(a.v[i], b.v[i]), bit)) << 4 * i;
    return above;
}
PENSTOCK_INLINE vi max(vi a, vi b) { return PENSTOCK_FOUR(vi, vmaxq_s32(a.v[i], b.v[i])); }
PENSTOCK_INLINE vi load(const int32_t* p) { return PENSTOCK_FOUR(vi, vld1q_s32(p + 4 * i)); }
PENSTOCK_INLINE vf up_to(vf a, vf bound) {
    return PENSTOCK_FOUR(vf, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), vcleq_f32(a.v[i], bound.v[i]))));
}
PENSTOCK_INLINE void store_largest_of_four(int32_t* p, const vi (&a)[4]) {
    PENSTOCK_UNROLL for (int k = 0; k < 4; ++k) {
        p[k] = vmaxvq_s32(vmaxq_s32(vmaxq_s32(a[k].v[0], a[k].v[1]), vmaxq_s32(a[k].v[2], a[k].v[3])));
    }
}
PENSTOCK_INLINE vb load64(const uint8_t* p) { return PENSTOCK_FOUR(vb, vld1q_u8(p + 16 * i)); }
PENSTOCK_INLINE void store64(uint8_t* p, vb a) { PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]); }
PENSTOCK_INLINE vb low_nibbles(vb a) { return PENSTOCK_FOUR(vb, vandq_u8(a.v[i], vdupq_n_u8(0x0F))); }
PENSTOCK_INLINE vb high_nibbles(vb a) { return PENSTOCK_FOUR(vb, vshrq_n_u8(a.v[i], 4)); }
PENSTOCK_INLINE vb bit_xor(vb a, vb b) { return PENSTOCK_FOUR(vb, veorq_u8(a.v[i], b.v[i])); }
template <int kApart>
PENSTOCK_INLINE vf swap_lanes(vf a) {
    if constexpr (kApart >= 4) return PENSTOCK_FOUR(vf, a.v[i ^ kApart / 4]);
    if constexpr (kApart == 2) return PENSTOCK_FOUR(vf, vextq_f32(a.v[i], a.v[i], 2));
    return PENSTOCK_FOUR(vf, vrev64q_f32(a.v[i]));
}
PENSTOCK_INLINE vb look_up(vb a, const uint8_t* table) {
    const uint8x16_t t = vld1q_u8(table);
    return PENSTOCK_FOUR(vb, vqtbl1q_u8(t, a.v[i]));
}
PENSTOCK_INLINE vb shift_right(vb a, int32_t shift) {
    return PENSTOCK_FOUR(vb, vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(a.v[i]), vdupq_n_s32(-shift))));
}
PENSTOCK_INLINE vi low_bytes_of_lanes(vb a) { return PENSTOCK_FOUR(vi, vandq_s32(vreinterpretq_s32_u8(a.v[i]), vdupq_n_s32(0xFF))); }
PENSTOCK_INLINE vf bits_of_lanes(vb a, int32_t mask) {
    return PENSTOCK_FOUR(vf, vcvtq_f32_s32(vandq_s32(vreinterpretq_s32_u8(a.v[i]), vdupq_n_s32(mask))));
}

PENSTOCK_INLINE int8x16_t as_signed(uint8x16_t a) { return vreinterpretq_s8_u8(a); }
// Products of unsigned by signed bytes, four to a lane. Without such an instruction unsigned ones are taken as kUnsignedLess smaller.
#if defined(PENSTOCK_NEON_I8MM)
constexpr int32_t kUnsignedLess = 0;
PENSTOCK_INLINE int32x4_t dot4_part(int32x4_t acc, uint8x16_t w, int8x16_t a) { return vusdotq_s32(acc, w, a); }
#else
constexpr int32_t kUnsignedLess = 128;
PENSTOCK_INLINE int32x4_t dot4_part(int32x4_t acc, uint8x16_t w, int8x16_t a) {
    return vdotq_s32(acc, as_signed(veorq_u8(w, vdupq_n_u8(kUnsignedLess))), a);
}
#endif
constexpr int32_t kDotZero = 128 - kUnsignedLess, kDot4Subtracts = kUnsignedLess;
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    int32_t bits;
    memcpy(&bits, a4, 4);
    const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(bits));
    if constexpr (kNibbles) return PENSTOCK_FOUR(vi, vdotq_s32(acc.v[i], as_signed(w.v[i]), a));
    return PENSTOCK_FOUR(vi, dot4_part(acc.v[i], w.v[i], a));
}
PENSTOCK_INLINE vi dot4_u8(vi acc, vb w, vb a) { return PENSTOCK_FOUR(vi, dot4_part(acc.v[i], w.v[i], as_signed(a.v[i]))); }
PENSTOCK_INLINE vi dot4_i8(vi acc, vb w, vb a) { return dot4_u8(acc, w, a); }
PENSTOCK_INLINE int32x4_t sums_of_bytes(uint8x16_t first, uint8x16_t second) {
    const int8x16_t one = vdupq_n_s8(1);
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), as_signed(first), one), as_signed(second), one);
}
PENSTOCK_INLINE void store_sums_of_four(int32_t* p, vb a, vb b) {
    const int32x4_t first = vpaddq_s32(sums_of_bytes(a.v[0], a.v[1]), sums_of_bytes(a.v[2], a.v[3]));
    const int32x4_t second = vpaddq_s32(sums_of_bytes(b.v[0], b.v[1]), sums_of_bytes(b.v[2], b.v[3]));
    vst1q_s32(p, vpaddq_s32(first, second));
}
PENSTOCK_INLINE vb set1_pair(const void* p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return PENSTOCK_FOUR(vb, (static_cast<void>(i), vreinterpretq_u8_s32(vdupq_n_s32(bits))));
}
PENSTOCK_INLINE vb set1_eight(const void* p) {
    int64_t bits;
    memcpy(&bits, p, 8);
    return PENSTOCK_FOUR(vb, (static_cast<void>(i), vreinterpretq_u8_s64(vdupq_n_s64(bits))));
}
PENSTOCK_INLINE vf set1_two(const float* p) {
    const vb both = set1_eight(p);
    return PENSTOCK_FOUR(vf, vreinterpretq_f32_u8(both.v[i]));
}
// The first and the second number of each lane of two registers are multiplied apart: there is no instruction that adds pairs of products.
PENSTOCK_INLINE void dot2_i16_part(int32x4_t& low, int32x4_t& high, int16x8_t w0, int16x8_t w1, int16x8_t a0, int16x8_t a1) {
    const int16x8_t w_even = vuzp1q_s16(w0, w1), w_odd = vuzp2q_s16(w0, w1), a_even = vuzp1q_s16(a0, a1), a_odd = vuzp2q_s16(a0, a1);
    low = vmlal_s16(vmlal_s16(low, vget_low_s16(w_even), vget_low_s16(a_even)), vget_low_s16(w_odd), vget_low_s16(a_odd));
    high = vmlal_high_s16(vmlal_high_s16(high, w_even, a_even), w_odd, a_odd);
}
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    const auto words = [](uint8x16_t bytes) PENSTOCK_LAMBDA { return vreinterpretq_s16_u8(bytes); };
    dot2_i16_part(acc.v[0], acc.v[1], words(w.v[0]), words(w.v[1]), words(a.v[0]), words(a.v[1]));
    dot2_i16_part(acc.v[2], acc.v[3], words(w.v[2]), words(w.v[3]), words(a.v[2]), words(a.v[3]));
    return acc;
}
// The odd product is added first, and each is rounded once, in both forms. (BFDOT would round otherwise.)
#if defined(PENSTOCK_NEON_I8MM)
PENSTOCK_INLINE float32x4_t dot2_part(float32x4_t acc, uint8x16_t w, uint8x16_t a) {
    const bfloat16x8_t x = vreinterpretq_bf16_u8(w), y = vreinterpretq_bf16_u8(a);
    return vbfmlalbq_f32(vbfmlaltq_f32(acc, x, y), x, y);
}
#else
PENSTOCK_INLINE float32x4_t even_bf16(uint8x16_t a) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(a), 16)); }
PENSTOCK_INLINE float32x4_t odd_bf16(uint8x16_t a) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(a), vdupq_n_u32(0xFFFF0000u)));
}
PENSTOCK_INLINE float32x4_t dot2_part(float32x4_t acc, uint8x16_t w, uint8x16_t a) {
    return vfmaq_f32(vfmaq_f32(acc, odd_bf16(w), odd_bf16(a)), even_bf16(w), even_bf16(a));
}
#endif
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) { return PENSTOCK_FOUR(vf, dot2_part(acc.v[i], w.v[i], a.v[i])); }
PENSTOCK_INLINE vf add_exponent(vf a, vf n) {
    return PENSTOCK_FOUR(vf, vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[i]), vshlq_n_s32(vreinterpretq_s32_f32(n.v[i]), 23))));
}
PENSTOCK_INLINE vb even_halves(vb a) {
    return PENSTOCK_FOUR(vb, vreinterpretq_u8_u32(vandq_u32(vreinterpretq_u32_u8(a.v[i]), vdupq_n_u32(0xFFFF))));
}
PENSTOCK_INLINE void store_i16(int16_t* p, vf a) {
    const vi whole = rounded(a);
    vst1q_s16(p, rounded_i16(whole, 0));
    vst1q_s16(p + 8, rounded_i16(whole, 1));
}
PENSTOCK_INLINE void store_pairs_i16(uint8_t* p, vf a, vf b) {
    const vi first = rounded(a), second = rounded(b);
    PENSTOCK_UNROLL for (int half = 0; half < 2; ++half) {
        const int16x8_t even = rounded_i16(first, half), odd = rounded_i16(second, half);
        vst1q_u8(p + 32 * half, vreinterpretq_u8_s16(vzip1q_s16(even, odd)));
        vst1q_u8(p + 32 * half + 16, vreinterpretq_u8_s16(vzip2q_s16(even, odd)));
    }
}
PENSTOCK_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
#undef PENSTOCK_FOUR
