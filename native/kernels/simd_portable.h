// The sixteen lanes of simd.h as plain loops, for the compiler to vectorise as it can. Included by simd.h alone, inside its namespace.

constexpr int kTileRows = 2, kTilePanels = 1, kFewRows = 1, kFewRowPanels = 1;
constexpr int kRow8Rows = 2, kRow8Panels = 1;
constexpr int kAttentionPairs = 4, kAttentionScorePairs = 2, kAttentionScoreSums = 2, kAttentionTaskPairs = 16, kSoftmaxVectors = 2;
constexpr int kTextRows = 2, kTextVectors = 1;
constexpr bool kWidensWeights = false;
constexpr bool kFetchesFar = false, kFollowsStreams = false;
constexpr int32_t kUnsignedLess = 0, kDot4Subtracts = 0;
constexpr int kStateVectors = 1;  // of columns of a recurrent state that are changed together

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
PENSTOCK_INLINE vf sqrt(vf a) { PENSTOCK_LANES a.v[i] = sqrtf(a.v[i]); return a; }
PENSTOCK_INLINE vf abs(vf a) { PENSTOCK_LANES a.v[i] = fabsf(a.v[i]); return a; }
// Round to nearest even by the magic-number method; exact for |a| < 2^22, and larger values never come here.
PENSTOCK_INLINE vf round(vf a) { PENSTOCK_LANES a.v[i] = (a.v[i] + kRoundingMagic) - kRoundingMagic; return a; }
constexpr bool kScaleSaturates = false;
PENSTOCK_INLINE vf scale2(vf a, vf n) {
    PENSTOCK_LANES a.v[i] *= __builtin_bit_cast(float, (static_cast<int32_t>(n.v[i]) + 127) << 23);
    return a;
}
PENSTOCK_INLINE vf first(int count, vf a, vf b) { PENSTOCK_LANES a.v[i] = i < count ? a.v[i] : b.v[i]; return a; }
PENSTOCK_INLINE float widen_f16(uint16_t h) {
    // IEEE half to single: shift the mantissa, then let a float multiplication fix the exponent (subnormals too).
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    auto bits = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) * 0x1p112f);
    if ((h & 0x7C00u) == 0x7C00u) bits = magnitude | 0x7F800000u;
    return __builtin_bit_cast(float, bits | sign);
}
PENSTOCK_INLINE float widen_bf16(uint16_t b) { return __builtin_bit_cast(float, static_cast<uint32_t>(b) << 16); }
PENSTOCK_INLINE vf load_f16(const uint16_t* p) { vf r; PENSTOCK_LANES r.v[i] = widen_f16(p[i]); return r; }
PENSTOCK_INLINE vf load_bf16(const uint16_t* p) { vf r; PENSTOCK_LANES r.v[i] = widen_bf16(p[i]); return r; }

PENSTOCK_INLINE void store_bf16(uint16_t* p, vf a) {
    PENSTOCK_LANES {
        const auto bits = __builtin_bit_cast(uint32_t, a.v[i]);
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
PENSTOCK_INLINE vi add(vi a, vi b) { PENSTOCK_LANES a.v[i] += b.v[i]; return a; }
PENSTOCK_INLINE vi sub(vi a, vi b) { PENSTOCK_LANES a.v[i] -= b.v[i]; return a; }
PENSTOCK_INLINE vi bit_and(vi a, vi b) { PENSTOCK_LANES a.v[i] &= b.v[i]; return a; }
PENSTOCK_INLINE vi bits_of(vf a) { vi r; memcpy(r.v, a.v, sizeof(r.v)); return r; }
PENSTOCK_INLINE vf float_of(vi bits) { vf r; memcpy(r.v, bits.v, sizeof(r.v)); return r; }
PENSTOCK_INLINE vi mul(vi a, vi b) { PENSTOCK_LANES a.v[i] *= b.v[i]; return a; }
PENSTOCK_INLINE vi times16(vi a) { PENSTOCK_LANES a.v[i] *= 16; return a; }
PENSTOCK_INLINE vf to_float(vi a) { vf r; PENSTOCK_LANES r.v[i] = static_cast<float>(a.v[i]); return r; }
PENSTOCK_INLINE void store(int32_t* p, vi a) { PENSTOCK_LANES p[i] = a.v[i]; }
PENSTOCK_INLINE void store_rounded_i8(int8_t* p, vf a) {
    const vf r = round(a);
    PENSTOCK_LANES p[i] = r.v[i] == r.v[i] ? static_cast<int8_t>(r.v[i] > 127.0f ? 127.0f : r.v[i] < -128.0f ? -128.0f : r.v[i]) : 0;
}
PENSTOCK_INLINE vb rounded_i8(vf a, vf b, vf c, vf d) {
    int8_t bytes[64];
    store_rounded_i8(bytes, a);
    store_rounded_i8(bytes + 16, b);
    store_rounded_i8(bytes + 32, c);
    store_rounded_i8(bytes + 48, d);
    vb r;
    memcpy(r.v, bytes, sizeof(bytes));
    return r;
}
PENSTOCK_INLINE uint32_t lanes_above(vf a, vf b) {
    uint32_t above = 0;
    PENSTOCK_LANES above |= static_cast<uint32_t>(a.v[i] > b.v[i]) << i;
    return above;
}
PENSTOCK_INLINE vi max(vi a, vi b) { PENSTOCK_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
PENSTOCK_INLINE vi load(const int32_t* p) { vi r; PENSTOCK_LANES r.v[i] = p[i]; return r; }
PENSTOCK_INLINE vf up_to(vf a, vf bound) { PENSTOCK_LANES a.v[i] = a.v[i] <= bound.v[i] ? a.v[i] : 0.0f; return a; }
PENSTOCK_INLINE void store_largest_of_four(int32_t* p, const vi (&a)[4]) {
    for (int k = 0; k < 4; ++k) {
        int32_t largest = a[k].v[0];
        PENSTOCK_LANES largest = largest > a[k].v[i] ? largest : a[k].v[i];
        p[k] = largest;
    }
}
PENSTOCK_INLINE void store_sums_of_four(int32_t* p, vb a, vb b) {
    for (int k = 0; k < 4; ++k) {
        int32_t sum = 0;
        for (int i = 0; i < 32; ++i) sum += static_cast<int8_t>((k < 2 ? a : b).v[32 * (k % 2) + i]);
        p[k] = sum;
    }
}
PENSTOCK_INLINE vb load64(const uint8_t* p) { vb r; memcpy(r.v, p, 64); return r; }
PENSTOCK_INLINE void store64(uint8_t* p, vb a) { memcpy(p, a.v, 64); }
PENSTOCK_INLINE vb low_nibbles(vb a) { for (int i = 0; i < 64; ++i) a.v[i] &= 0x0F; return a; }
PENSTOCK_INLINE vb high_nibbles(vb a) { for (int i = 0; i < 64; ++i) a.v[i] >>= 4; return a; }
PENSTOCK_INLINE vb bit_xor(vb a, vb b) { for (int i = 0; i < 64; ++i) a.v[i] ^= b.v[i]; return a; }
template <int kApart>
PENSTOCK_INLINE vf swap_lanes(vf a) { vf r; PENSTOCK_LANES r.v[i] = a.v[i ^ kApart]; return r; }
PENSTOCK_INLINE vb look_up(vb a, const uint8_t* table) { for (int i = 0; i < 64; ++i) a.v[i] = table[a.v[i]]; return a; }
PENSTOCK_INLINE vb shift_right(vb a, int32_t shift) {
    PENSTOCK_LANES {
        uint32_t bits;
        memcpy(&bits, a.v + 4 * i, 4);
        bits >>= shift;
        memcpy(a.v + 4 * i, &bits, 4);
    }
    return a;
}
PENSTOCK_INLINE vi low_bytes_of_lanes(vb a) { vi r; PENSTOCK_LANES r.v[i] = a.v[4 * i]; return r; }
PENSTOCK_INLINE vf bits_of_lanes(vb a, int32_t mask) {
    vf r;
    PENSTOCK_LANES {
        int32_t bits;
        memcpy(&bits, a.v + 4 * i, 4);
        r.v[i] = static_cast<float>(bits & mask);
    }
    return r;
}
template <bool kNibbles>
PENSTOCK_INLINE vi dot4(vi acc, vb w, const int8_t* a4) {
    PENSTOCK_LANES {
        for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * a4[j];
    }
    return acc;
}
// Of numbers above -1/2.
PENSTOCK_INLINE void store_rounded_u8(uint8_t* p, const vf (&a)[kSoftmaxVectors]) {
    for (int j = 0; j < kSoftmaxVectors; ++j) {
        PENSTOCK_LANES {
            const uint32_t bits = __builtin_bit_cast(uint32_t, a[j].v[i] + kRoundingMagic) & 0xFFFF;  // the integer
            p[j * kLanes + i] = static_cast<uint8_t>(bits < 255 ? bits : 255);
        }
    }
}
PENSTOCK_INLINE vb set1_pair(const void* p) { vb r; PENSTOCK_LANES memcpy(r.v + 4 * i, p, 4); return r; }
PENSTOCK_INLINE vb set1_eight(const void* p) { vb r; for (int i = 0; i < 64; i += 8) memcpy(r.v + i, p, 8); return r; }
PENSTOCK_INLINE vf set1_two(const float* p) { vf r; PENSTOCK_LANES r.v[i] = p[i % 2]; return r; }
constexpr int32_t kDotZero = 0;
PENSTOCK_INLINE vi dot4_i8(vi acc, vb w, vb a) {
    PENSTOCK_LANES {
        for (int j = 0; j < 4; ++j) acc.v[i] += (w.v[4 * i + j] - 128) * static_cast<int8_t>(a.v[4 * i + j]);
    }
    return acc;
}
PENSTOCK_INLINE vi dot4_u8(vi acc, vb w, vb a) {
    PENSTOCK_LANES {
        for (int j = 0; j < 4; ++j) acc.v[i] += w.v[4 * i + j] * static_cast<int8_t>(a.v[4 * i + j]);
    }
    return acc;
}
// Sums wrap, as those of instructions do: keys behind the end of a text may be anything, and nobody sees their scores.
PENSTOCK_INLINE vi dot2_i16(vi acc, vb w, vb a) {
    int16_t x[32], y[32];
    memcpy(x, w.v, 64);
    memcpy(y, a.v, 64);
    const auto product = [&](int i) { return static_cast<uint32_t>(x[i] * y[i]); };
    PENSTOCK_LANES acc.v[i] = static_cast<int32_t>(static_cast<uint32_t>(acc.v[i]) + product(2 * i) + product(2 * i + 1));
    return acc;
}
// Products of bf16 are exact, and the odd one is added first: the order of vdpbf16ps.
PENSTOCK_INLINE vf dot2_bf16(vf acc, vb w, vb a) {
    uint16_t x[32], y[32];
    memcpy(x, w.v, 64);
    memcpy(y, a.v, 64);
    PENSTOCK_LANES acc.v[i] += widen_bf16(x[2 * i + 1]) * widen_bf16(y[2 * i + 1]);
    PENSTOCK_LANES acc.v[i] += widen_bf16(x[2 * i]) * widen_bf16(y[2 * i]);
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
PENSTOCK_INLINE void store_pairs_i16(uint8_t* p, vf a, vf b) {
    int16_t x[2][kLanes];
    store_i16(x[0], a);
    store_i16(x[1], b);
    PENSTOCK_LANES {
        memcpy(p + 4 * i, &x[0][i], 2);
        memcpy(p + 4 * i + 2, &x[1][i], 2);
    }
}
PENSTOCK_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
#undef PENSTOCK_LANES
