// Loops that do one thing as fast as this instruction set can: what the speed of the other kernels is compared with.
//
// Called by probe.cpp on every thread at once. Operands stay in registers; there are enough independent sums to hide the
// latency of an instruction. An empty `asm` keeps the compiler from removing or hoisting operations without effect.

#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

// So that the value counts as used.
template <typename T>
PENSTOCK_INLINE void use(const T& value) {
    asm volatile("" : : "m"(value) : "memory");
}

// Likewise of the sums, which stay in registers if nothing takes their address.
template <typename T, int kCount>
PENSTOCK_INLINE void use_all(const T (&sums)[kCount]) {
    T total = sums[0];
    for (int i = 1; i < kCount; ++i) total += sums[i];
    use(total);
}

#if defined(__AVX512VNNI__)

constexpr int kSums = 16;

// Written out, not as an array: GCC 12 moves such a loop's sums to other registers or to memory and back.
int64_t multiply_int8(int64_t rounds) {
    const __m512i w = _mm512_set1_epi8(3), a = _mm512_set1_epi8(-2), zero = _mm512_setzero_si512();
    __m512i s0 = zero, s1 = zero, s2 = zero, s3 = zero, s4 = zero, s5 = zero;
    __m512i s6 = zero, s7 = zero, s8 = zero, s9 = zero, s10 = zero, s11 = zero;
    for (int64_t round = 0; round < rounds; ++round) {
        asm("vpdpbusd %13, %12, %0\n\tvpdpbusd %13, %12, %1\n\tvpdpbusd %13, %12, %2\n\tvpdpbusd %13, %12, %3\n\t"
            "vpdpbusd %13, %12, %4\n\tvpdpbusd %13, %12, %5\n\tvpdpbusd %13, %12, %6\n\tvpdpbusd %13, %12, %7\n\t"
            "vpdpbusd %13, %12, %8\n\tvpdpbusd %13, %12, %9\n\tvpdpbusd %13, %12, %10\n\tvpdpbusd %13, %12, %11"
            : "+v"(s0), "+v"(s1), "+v"(s2), "+v"(s3), "+v"(s4), "+v"(s5), "+v"(s6), "+v"(s7), "+v"(s8), "+v"(s9), "+v"(s10),
              "+v"(s11)
            : "v"(w), "v"(a));
    }
    const __m512i sum[12] = {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11};
    use_all(sum);
    return rounds * 12 * 64 * 2;
}

int64_t multiply_float32(int64_t rounds) {
    const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
    __m512 sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = _mm512_set1_ps(1.0f);
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kSums; ++i) sum[i] = _mm512_fmadd_ps(sum[i], a, b);
    }
    use_all(sum);
    return rounds * kSums * 16 * 2;
}

#if defined(__AVX512BF16__)
int64_t multiply_bf16(int64_t rounds) {
    const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3F803F80), b = (__m512bh)_mm512_set1_epi32(0x3F800000);
    __m512 sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = _mm512_setzero_ps();
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kSums; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
    }
    use_all(sum);
    return rounds * kSums * 32 * 2;
}
#else
// Without such an instruction bf16 is shifted into float32.
int64_t multiply_bf16(int64_t rounds) { return multiply_float32(rounds); }
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int kSums = 10;

#if defined(__AVXVNNI__)
int64_t multiply_int8(int64_t rounds) {
    __m256i w = _mm256_set1_epi8(3);
    const __m256i a = _mm256_set1_epi8(-2);
    __m256i sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = _mm256_setzero_si256();
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kSums; ++i) sum[i] = _mm256_dpbusd_avx_epi32(sum[i], w, a);
    }
    use_all(sum);
    return rounds * kSums * 32 * 2;
}
#else
// Sums of 16 bits, the cheapest there are: a kernel must widen them now and then, and so stays below.
int64_t multiply_int8(int64_t rounds) {
    constexpr int kShortSums = 6;  // an addition takes one cycle
    __m256i w = _mm256_set1_epi8(3);
    const __m256i a = _mm256_set1_epi8(-2);
    __m256i sum[kShortSums];
    for (int i = 0; i < kShortSums; ++i) sum[i] = _mm256_setzero_si256();
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kShortSums; ++i) {
            sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(w, a));
            asm("" : "+x"(w));
        }
    }
    use_all(sum);
    return rounds * kShortSums * 32 * 2;
}
#endif

int64_t multiply_float32(int64_t rounds) {
    const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
    __m256 sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = _mm256_set1_ps(1.0f);
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kSums; ++i) sum[i] = _mm256_fmadd_ps(sum[i], a, b);
    }
    use_all(sum);
    return rounds * kSums * 8 * 2;
}

// There is no such instruction: bf16 becomes float32 by a shift, beside the multiply-adds.
int64_t multiply_bf16(int64_t rounds) { return multiply_float32(rounds); }

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr int kSums = 16;  // four pipes by four cycles of a multiply-add; of more GCC unrolls no loop, and they go through memory

#if defined(PENSTOCK_NEON_I8MM)
constexpr int kProducts = 32;
PENSTOCK_INLINE int32x4_t add_products(int32x4_t sum, int8x16_t w, int8x16_t a) { return vmmlaq_s32(sum, w, a); }
#else
constexpr int kProducts = 16;
PENSTOCK_INLINE int32x4_t add_products(int32x4_t sum, int8x16_t w, int8x16_t a) { return vdotq_s32(sum, w, a); }
#endif

int64_t multiply_int8(int64_t rounds) {
    const int8x16_t w = vdupq_n_s8(3), a = vdupq_n_s8(-2);
    int32x4_t sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = vdupq_n_s32(0);
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kSums; ++i) sum[i] = add_products(sum[i], w, a);
    }
    use_all(sum);
    return rounds * kSums * kProducts * 2;
}

int64_t multiply_float32(int64_t rounds) {
    const float32x4_t a = vdupq_n_f32(0.999f), b = vdupq_n_f32(0.001f);
    float32x4_t sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = vdupq_n_f32(1.0f);
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kSums; ++i) sum[i] = vfmaq_f32(sum[i], a, b);
    }
    use_all(sum);
    return rounds * kSums * 4 * 2;
}

// The instruction that the kernels use multiplies every second one of eight, so four at once.
int64_t multiply_bf16(int64_t rounds) { return multiply_float32(rounds); }

#else

constexpr int kSums = 12;
constexpr int kValues = 1024;

// The compiler's version of a plain loop over bytes that were widened before, from the first-level cache: no bound of the machine.
int64_t multiply_int8(int64_t rounds) {
    int16_t w[kValues], a[kValues];
    for (int i = 0; i < kValues; ++i) {
        w[i] = 3;
        a[i] = -2;
    }
    const int64_t passes = rounds / 16 + 1;
    for (int64_t pass = 0; pass < passes; ++pass) {
        use(w);
        use(a);
        int32_t sum = 0;
        for (int i = 0; i < kValues; ++i) sum += w[i] * a[i];
        use(sum);
    }
    return passes * kValues * 2;
}

// Four lanes: what every x86-64 and AArch64 has.
int64_t multiply_float32(int64_t rounds) {
    typedef float Lanes __attribute__((vector_size(16)));
    const Lanes a = {0.999f, 0.999f, 0.999f, 0.999f}, b = {0.001f, 0.001f, 0.001f, 0.001f};
    Lanes sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = a;
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kSums; ++i) sum[i] = sum[i] * a + b;
    }
    use_all(sum);
    return rounds * kSums * 4 * 2;
}

int64_t multiply_bf16(int64_t rounds) { return multiply_float32(rounds); }

#endif

}  // namespace

int64_t probe_arithmetic(ProbeKind kind, int64_t rounds) {
    switch (kind) {
        case ProbeKind::kInt8: return multiply_int8(rounds);
        case ProbeKind::kBf16: return multiply_bf16(rounds);
        case ProbeKind::kFloat32: return multiply_float32(rounds);
        default: return 0;  // of tiles: table_tiles.cpp
    }
}

void probe_read(const uint8_t* data, int64_t bytes) {
    typedef uint64_t Line __attribute__((vector_size(64), aligned(64)));
    constexpr int kLines = 8, kSums = 2;  // two fit into the registers of every variant
    constexpr int kAhead = 16;            // lines; the hardware's own prefetch alone reached a few per cent less
    Line sum[kSums] = {};
    const Line* lines = reinterpret_cast<const Line*>(data);
    for (int64_t at = 0; at + kLines <= bytes / 64; at += kLines) {
        for (int i = 0; i < kLines; ++i) {
            sum[i % kSums] ^= lines[at + i];
            __builtin_prefetch(lines + at + i + kAhead);
        }
    }
    use_all(sum);
}

}  // namespace penstock::PENSTOCK_ISA
