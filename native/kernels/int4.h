// Keys of 5 bits and values of 4 (KvFormat::kInt4): how they are rotated, rounded and widened again.
//
// A head is multiplied by a Hadamard matrix, which spreads a large column over all of them, so that a few levels are enough. Queries are
// multiplied too, which leaves scores as they were, and so is the sum of the values, which turns it back. A number is an odd integer
// times the scale, so equally many levels lie above and below zero.

#pragma once

#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // inline functions of one instruction set must not be linked into another

// Lane i and the one kApart from it become their sum and their difference.
template <int kApart>
PENSTOCK_INLINE vf add_and_subtract(vf a) {
    alignas(64) float signs[kLanes];
    for (int i = 0; i < kLanes; ++i) signs[i] = i & kApart ? -1.0f : 1.0f;
    return fma(a, load(signs), swap_lanes<kApart>(a));
}

// The head at x times a Hadamard matrix, in groups of as many columns as the largest power of two that divides their number. `out` may
// be `x`.
[[maybe_unused]] __attribute__((noinline)) void rotate(float* out, const float* x, int columns) {
    const int size = columns & -columns;
    const vf factor = set1(1.0f / sqrtf(static_cast<float>(size)));
    for (int d = 0; d < columns; d += kLanes) {
        const vf a = add_and_subtract<2>(add_and_subtract<1>(mul(load(x + d), factor)));
        store(out + d, add_and_subtract<8>(add_and_subtract<4>(a)));
    }
    for (int apart = kLanes; apart < size; apart *= 2) {
        for (int d = 0; d < columns; d = (d + kLanes) & apart ? d + kLanes + apart : d + kLanes) {
            const vf a = load(out + d), b = load(out + d + apart);
            store(out + d, add(a, b));
            store(out + d + apart, sub(a, b));
        }
    }
}

// Scales are floats of 5 bits of exponent and 3 of mantissa, the smallest 2^-21; the last code is NaN.
constexpr int kSmallestExponent = 106, kBrokenScale = 255;  // the exponent as in the bits of a float

// The code of the smallest scale of at least `wanted`, or of the largest.
PENSTOCK_INLINE uint8_t code_of_scale(float wanted) {
    const int32_t code = ((__builtin_bit_cast(int32_t, wanted) + 0xFFFFF) >> 20) - (kSmallestExponent << 3);
    return static_cast<uint8_t>(code < 0 ? 0 : code < kBrokenScale ? code : kBrokenScale - 1);
}

PENSTOCK_INLINE float scale_of_code(uint8_t code) { return __builtin_bit_cast(float, (code << 20) + (kSmallestExponent << 23)); }

PENSTOCK_INLINE vi load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))};
#elif defined(__AVX2__)
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
#else
    alignas(64) int32_t numbers[kLanes];
    for (int i = 0; i < kLanes; ++i) numbers[i] = p[i];
    return load(numbers);
#endif
}

// The scales of sixteen codes, in bf16.
PENSTOCK_INLINE void widen_scales(uint8_t* out, const uint8_t* codes) {
    const vi code = load_bytes(codes), is_broken = max(sub(code, set1_i(kBrokenScale - 1)), set1_i(0));
    const vi bits = add(mul(code, set1_i(1 << 20)), set1_i(kSmallestExponent << 23));
    store_bf16(reinterpret_cast<uint16_t*>(out), float_of(max(bits, mul(is_broken, set1_i(0x7FC00000)))));
}

// Bytes with this bit become 0xE0, others zero.
template <int kBit>
PENSTOCK_INLINE vb upper_bits(vb a) {
#if defined(__AVX512F__) && defined(__GFNI__)
    constexpr uint64_t row = 1ull << kBit;  // of a matrix of bits, whose rows make the upper three
    return {_mm512_gf2p8affine_epi64_epi8(a.v, _mm512_set1_epi64(static_cast<int64_t>(row | row << 8 | row << 16)), 0)};
#else
    static const uint8_t kUpper[16] = {0, 0xE0, 0, 0xE0, 0, 0xE0, 0, 0xE0, 0, 0xE0, 0, 0xE0, 0, 0xE0, 0, 0xE0};
    return look_up(low_nibbles(shift_right(a, kBit)), kUpper);
#endif
}

// Rounds each column to one of `levels` levels, numbered from 0: level i stands for the odd integer 2 i + 1 - levels. Returns the
// code of their common scale.
[[maybe_unused]] __attribute__((noinline)) uint8_t round_to_levels(uint8_t* out, const float* x, int columns, int levels) {
    const float top = static_cast<float>(levels - 1);
    vf largest = set1(0.0f), broken = set1(0.0f);
    for (int d = 0; d < columns; d += kLanes) {
        largest = max(largest, abs(load(x + d)));
        broken = fma(load(x + d), set1(0.0f), broken);
    }
    const bool is_sound = isfinite(reduce_add(broken));
    const uint8_t code = is_sound ? code_of_scale(reduce_max(largest) / top) : kBrokenScale;
    const vf inverse = set1(is_sound ? 0.5f / scale_of_code(code) : 0.0f);
    for (int d = 0; d < columns; d += kLanes) {
        const vf level = add(mul(load(x + d), inverse), set1(0.5f * top));
        store_rounded_i8(reinterpret_cast<int8_t*>(out) + d, min(max(level, set1(0.0f)), set1(top)));
    }
    return code;
}

PENSTOCK_INLINE uint32_t four_of(const uint8_t* p) {
    uint32_t bytes;
    memcpy(&bytes, p, 4);
    return bytes;
}

// Four bytes are the columns of one position, and `kKvTile` positions lie beside each other.
PENSTOCK_INLINE void pack_key(uint8_t* tile, const uint8_t* levels, int columns) {
    for (int d = 0; d < columns; d += 8, tile += 4 * kKvTile) {
        const uint32_t both = (four_of(levels + d) & 0x0F0F0F0F) | (four_of(levels + d + 4) & 0x0F0F0F0F) << 4;
        memcpy(tile, &both, 4);
    }
    for (int d = 0; d < columns; d += 32, tile += 4 * kKvTile) {
        uint32_t fifth = 0;
        for (int j = 0; j < 8; ++j) fifth |= (four_of(levels + d + 4 * j) >> 4 & 0x01010101) << j;
        memcpy(tile, &fifth, 4);
    }
}

PENSTOCK_INLINE void pack_value(uint8_t* values, const uint8_t* levels, int columns) {
    for (int d = 0; d < columns; d += 2 * kLanes) {
        alignas(16) int8_t both[kLanes];
        for (int i = 0; i < kLanes; i += 4) {
            const uint32_t some = four_of(levels + d + i) | four_of(levels + d + kLanes + i) << 4;
            memcpy(both + i, &some, 4);
        }
        store_every_fourth(values + 2 * d, both);
    }
}

// The tile's keys and scales as kInt8 has them. Sixteen more are 32 more in a byte from 97 to 127: other upper bits.
PENSTOCK_INLINE void widen_keys(const KvLayer& kv, uint8_t* out, const uint8_t* tile) {
    static const uint8_t kKeys[16] = {97, 99, 101, 103, 105, 107, 109, 111, 113, 115, 117, 119, 121, 123, 125, 127};
    const uint8_t* fifth = tile + kv.head_dim / 8 * 64;
    for (int d = 0; d < kv.head_dim; d += 32, fifth += 64) {
        const vb bits = load64(fifth);
        const auto widen_chunks = [&]<int kFirst>() PENSTOCK_LAMBDA {  // two of them
            const vb both = load64(tile);
            store64(out, bit_xor(look_up(low_nibbles(both), kKeys), upper_bits<kFirst>(bits)));
            store64(out + 64, bit_xor(look_up(high_nibbles(both), kKeys), upper_bits<kFirst + 1>(bits)));
            tile += 64, out += 128;
        };
        widen_chunks.template operator()<0>();
        widen_chunks.template operator()<2>();
        widen_chunks.template operator()<4>();
        widen_chunks.template operator()<6>();
    }
    constexpr int kBytes = 2 * kKvTile;  // of the scales of a group
    for (int g = 0; g < kv.key_groups(); ++g, out += kBytes) widen_scales(out, fifth);
    widen_scales(out, fifth + kKvTile);  // of the values
}

PENSTOCK_INLINE void widen_values(const KvLayer& kv, uint8_t* out, const uint8_t* values) {
    static const int8_t kValues[16] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
    const uint8_t* const table = reinterpret_cast<const uint8_t*>(kValues);
    for (int i = 0; i < kKvTile * kv.value_bytes(); i += 64) {
        const vb both = load64(values + i);
        store64(out + 2 * i, look_up(low_nibbles(both), table));
        store64(out + 2 * i + 64, look_up(high_nibbles(both), table));
    }
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
