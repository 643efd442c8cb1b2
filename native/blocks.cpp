#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "codebooks.h"

namespace penstock {

namespace {

constexpr float kZero4 = 8.0f;
constexpr int kZero8 = 128;
constexpr int kHalf = kGroup / 2;

// The numbers of kU4Table by code, plus 128. Code 8 is the one nearest to zero.
constexpr uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// Bit 2 is the sign: 8, 25, 43.
constexpr uint8_t kIq2[16] = {136, 153, 171, 128, 120, 103, 85, 128, 128, 128, 128, 128, 128, 128, 128, 128};
// Bit 3 is the sign: halves of 4, 12, 20, 28, 36, 44, 52, 62.
constexpr uint8_t kIq3Halves[16] = {130, 134, 138, 142, 146, 150, 154, 159, 126, 122, 118, 114, 110, 106, 102, 97};
// Likewise: 1, 3 and so on, up to 15.
constexpr uint8_t kIq3Odd[16] = {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113};
// Eighths: -1, 0, 1, less an eighth if bit 2 is set and an eighth more if it is not.
constexpr uint8_t kIq1Eighths[16] = {121, 129, 137, 128, 119, 127, 135, 128, 128, 128, 128, 128, 128, 128, 128, 128};
// Twice what e2m1 has: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
constexpr uint8_t kE2m1Twice[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

// Unsigned q of 5 bits are moved to the middle of the range, where m is small and rounds well.
constexpr int kShift5 = kZero8 - 16;

uint64_t read_u64(const uint8_t* p) {
    uint64_t x;
    std::memcpy(&x, p, 8);
    return x;
}

// A scale in f16; NaN unless it is finite.
float read_scale(const uint8_t* p) {
    const float scale = from_f16(read_u16(p));
    return std::isfinite(scale) ? scale : NAN;
}

constexpr uint64_t kLow = 0x0F0F0F0F0F0F0F0Full;

// 32 nibbles of one half of 32 bytes, laid out as a group.
void take_nibbles(const uint8_t* source, bool high, uint8_t* q) {
    for (int i = 0; i < kHalf; i += 8) {
        const uint64_t first = read_u64(source + i), second = read_u64(source + kHalf + i);
        const uint64_t pair = high ? ((first >> 4) & kLow) | (second & ~kLow) : (first & kLow) | ((second & kLow) << 4);
        std::memcpy(q + i, &pair, 8);
    }
}

// 16 bytes, columns 0-15 in the low halves, and a fifth bit of each column: bytes in the middle of the range.
void widen_5(const uint8_t* nibbles, uint32_t fifth, uint8_t* q) {
    for (int i = 0; i < kHalf; ++i) {
        q[i] = static_cast<uint8_t>(((nibbles[i] & 15) | (fifth >> i & 1) << 4) + kShift5);
        q[kHalf + i] = static_cast<uint8_t>((nibbles[i] >> 4 | (fifth >> (kHalf + i) & 1) << 4) + kShift5);
    }
}

void decode_q4_0(const uint8_t* block, Group* g) {
    g->d = read_scale(block);
    std::memcpy(g->q, block + 2, kHalf);
}

void decode_q4_1(const uint8_t* block, Group* g) {
    g->d = read_scale(block);
    g->m = read_scale(block + 2) + kZero4 * g->d;
    std::memcpy(g->q, block + 4, kHalf);
}

void decode_q5_0(const uint8_t* block, Group* g) {
    g->d = read_scale(block);
    widen_5(block + 6, read_u32(block + 2), g->q);
}

void decode_q5_1(const uint8_t* block, Group* g) {
    g->d = read_scale(block);
    g->m = read_scale(block + 2) + 16.0f * g->d;
    widen_5(block + 8, read_u32(block + 4), g->q);
}

void decode_q8_0(const uint8_t* block, Group* g) {
    g->d = read_scale(block);
    for (int i = 0; i < kGroup; ++i) g->q[i] = block[2 + i] ^ 0x80;
}

// The 8 six-bit scales and offsets of Q4_K and Q5_K; `zero` is what the group's q will have in the middle.
void decode_scales_k(const uint8_t* block, float zero, Group* g) {
    const float d = read_scale(block), e = read_scale(block + 2);
    const uint8_t* p = block + 4;
    for (int i = 0; i < 4; ++i) {
        const int s[2] = {p[i] & 63, (p[8 + i] & 15) | p[i] >> 6 << 4};
        const int t[2] = {p[4 + i] & 63, p[8 + i] >> 4 | p[4 + i] >> 6 << 4};
        for (int half = 0; half < 2; ++half) {
            Group& group = g[4 * half + i];
            group.d = d * static_cast<float>(s[half]);
            group.m = zero * group.d - e * static_cast<float>(t[half]);
        }
    }
}

void decode_q4_k(const uint8_t* block, Group* g) {
    decode_scales_k(block, kZero4, g);
    for (int i = 0; i < 8; ++i) take_nibbles(block + 16 + i / 2 * kGroup, i % 2 != 0, g[i].q);
}

void decode_q5_k(const uint8_t* block, Group* g) {
    decode_scales_k(block, 16.0f, g);
    const uint8_t *fifth = block + 16, *nibbles = block + 48;
    for (int i = 0; i < 8; ++i, nibbles += i % 2 == 0 ? kGroup : 0) {
        const int shift = i % 2 * 4;
        for (int k = 0; k < kGroup; ++k) {
            g[i].q[k] = static_cast<uint8_t>(((nibbles[k] >> shift & 15) | (fifth[k] >> i & 1) << 4) + kShift5);
        }
    }
}

// Two scales of 16 columns become one of 32: a quarter of the larger one. Columns of the larger one stay exact, as
// 4 (q - 32) fits a byte; the others are rounded to an eighth of its step at most, or a quarter where both scales
// are about as large, of different signs, and q is the lowest. docs/kernels.md has the error.
void decode_q6_k(const uint8_t* block, Group* groups) {
    const float d = read_scale(block + 208);
    for (int i = 0; i < 8; ++i) {
        const uint8_t *lower = block + i / 4 * 64 + i % 2 * kGroup, *upper = block + 128 + i / 4 * kGroup;
        const int lower_shift = i % 4 / 2 * 4, upper_shift = i % 4 * 2;
        int8_t s[2];
        std::memcpy(s, block + 192 + 2 * i, 2);
        const int largest = std::abs(s[0]) >= std::abs(s[1]) ? s[0] : s[1];
        Group& g = groups[i];
        g.d = 0.25f * d * static_cast<float>(largest);
        int16_t ratio[2];  // 4 s / largest, times 2^12
        for (int half = 0; half < 2; ++half) {
            ratio[half] = largest == 0 ? 0 : static_cast<int16_t>(std::lrint(16384.0f * static_cast<float>(s[half]) / static_cast<float>(largest)));
        }
        int16_t q[kGroup];  // of 16 bits throughout, so that eight or more are computed at once
        for (int k = 0; k < kGroup; ++k) {
            q[k] = static_cast<int16_t>(((lower[k] >> lower_shift & 15) | (upper[k] >> upper_shift & 3) << 4) * 512 - 32 * 512);
        }
        for (int half = 0; half < 2; ++half) {
            for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
                const auto scaled = static_cast<int16_t>(static_cast<int32_t>(q[k]) * ratio[half] >> 16);  // 5 bits are a fraction
                const auto rounded = static_cast<int16_t>(((scaled + 16) >> 5) + kZero8);
                g.q[k] = static_cast<uint8_t>(rounded > 255 ? 255 : rounded);
            }
        }
    }
}

void values_of(const Group& g, const BlockFormat& format, float scale, float* out) {
    const WeightKind kind = format.kind;
    const float d = scale * g.d, m = scale * g.m;
    if (kind == WeightKind::kU8Symmetric || kind == WeightKind::kU8Affine) {
        for (int i = 0; i < kGroup; ++i) out[i] = d * static_cast<float>(g.q[i] - kZero8) + m;
        return;
    }
    for (int i = 0; i < kGroup; ++i) {
        const int q = i < kHalf ? g.q[i] & 15 : g.q[i - kHalf] >> 4;
        out[i] = d * static_cast<float>(format.table ? format.table[q] - kZero8 : q - static_cast<int>(kZero4)) + m;
    }
}

// 32 values as 8 bits of one scale, as Q8_0 has them; none is NaN.
void round_to_8_bits(const float* values, Group& g) {
    float largest = 0.0f;
    for (int k = 0; k < kGroup; ++k) largest = std::max(largest, std::fabs(values[k]));
    g.d = largest / 127.0f;
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int k = 0; k < kGroup; ++k) g.q[k] = static_cast<uint8_t>(static_cast<int>(values[k] * inverse + (kZero8 + 0.5f)));
}

// A block whose scale is no finite number: of every group, neither.
void refuse_block(Group* groups) {
    for (int i = 0; i < kMaxBlockGroups; ++i) groups[i] = {NAN, 0.0f, {}};
}

// Scales and offsets are of 16 columns: there is no group of 32 that has them exactly, so they are rounded, far below the error of 2 bits.
void decode_q2_k(const uint8_t* block, Group* groups) {
    const float d = read_scale(block + 80), e = read_scale(block + 82);
    if (std::isnan(d + e)) return refuse_block(groups);
    for (int i = 0; i < 8; ++i) {
        const uint8_t* q = block + 16 + i / 4 * kGroup;
        float values[kGroup];
        for (int half = 0; half < 2; ++half) {
            const uint8_t s = block[2 * i + half];
            const float scale = d * static_cast<float>(s & 15), offset = e * static_cast<float>(s >> 4);
            for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
                values[k] = scale * static_cast<float>(q[k] >> (i % 4 * 2) & 3) - offset;
            }
        }
        round_to_8_bits(values, groups[i]);
    }
}

void decode_q3_k(const uint8_t* block, Group* groups) {
    const float d = read_scale(block + 108);
    if (std::isnan(d)) return refuse_block(groups);
    const uint8_t* const s = block + 96;
    for (int i = 0; i < 8; ++i) {
        const uint8_t* q = block + 32 + i / 4 * kGroup;
        float values[kGroup];
        for (int half = 0; half < 2; ++half) {
            const int j = 2 * i + half, lower = j < 8 ? s[j] & 15 : s[j - 8] >> 4, upper = s[8 + j % 4] >> (j / 4 * 2) & 3;
            const float scale = d * static_cast<float>((lower | upper << 4) - 32);
            for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
                values[k] = scale * static_cast<float>((q[k] >> (i % 4 * 2) & 3) - ((block[k] >> i & 1) != 0 ? 0 : 4));
            }
        }
        round_to_8_bits(values, groups[i]);
    }
}

void decode_iq4_xs(const uint8_t* block, Group* g) {
    const float d = read_scale(block);
    const int upper = block[2] | block[3] << 8;
    for (int i = 0; i < 8; ++i) {
        const int s = (block[4 + i / 2] >> (i % 2 * 4) & 15) | (upper >> (2 * i) & 3) << 4;
        g[i].d = d * static_cast<float>(s - 32);
        std::memcpy(g[i].q, block + 8 + i * kHalf, kHalf);
    }
}

// The types below work on eight columns at a time, a byte each of a 64-bit number.

constexpr uint64_t in_every_byte(uint8_t byte) { return 0x0101010101010101ull * byte; }

// Eight numbers of two bits, the first in the lowest.
uint64_t spread_pairs(uint16_t pairs) {
    uint64_t x = pairs;
    x = (x | x << 24) & 0x000000FF000000FFull;
    x = (x | x << 12) & 0x000F000F000F000Full;
    return (x | x << 6) & in_every_byte(3);
}

// Eight numbers of three bits: four of each argument.
uint64_t spread_triples(uint16_t first, uint16_t second) {
    uint64_t x = first | static_cast<uint64_t>(second) << 32;
    x = (x | x << 10) & 0x003F003F003F003Full;
    return (x | x << 5) & in_every_byte(7);
}

uint64_t spread_bits(uint8_t bits) {
    uint64_t x = bits;
    x = (x | x << 28) & 0x0000000F0000000Full;
    x = (x | x << 14) & 0x0003000300030003ull;
    return (x | x << 7) & in_every_byte(1);
}

// The signs of eight columns: seven bits, and an eighth that makes the number of minus signs even.
uint64_t spread_even_signs(uint32_t seven) {
    seven &= 127;
    return spread_bits(static_cast<uint8_t>(seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7));
}

// A group's scale, and the codes of its 32 columns.
void take_codes(const uint64_t (&codes)[4], float d, Group& group) {
    group.d = d;
    for (int i = 0; i < 2; ++i) {
        const uint64_t pair = codes[i] | codes[2 + i] << 4;
        std::memcpy(group.q + 8 * i, &pair, 8);
    }
}

void decode_q1_0(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    for (int i = 0; i < 4; ++i) {
        uint64_t codes[4];
        for (int j = 0; j < 4; ++j) codes[j] = in_every_byte(7) + 2 * spread_bits(block[2 + 4 * i + j]);
        take_codes(codes, d, groups[i]);
    }
}

void decode_q2_0(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    for (int i = 0; i < 2; ++i) {
        uint64_t codes[4];
        for (int j = 0; j < 4; ++j) codes[j] = in_every_byte(7) + spread_pairs(read_u16(block + 2 + 8 * i + 2 * j));
        take_codes(codes, d, groups[i]);
    }
}

// A byte has five digits of base 3, as a fraction of 256: the first one is the whole part of 3 byte / 256. Its columns are 32 apart, in
// the block's middle 16, and at its end, where they are four, 4.
void decode_tq1_0(const uint8_t* block, Group* groups) {
    const float d = read_scale(block + 52);
    uint8_t codes[kMaxBlockGroups * kGroup];
    const auto digits = [&](const uint8_t* bytes, int count, int num_digits, uint8_t* out) {
        for (int i = 0; i < count; ++i) {
            uint8_t rest = bytes[i];
            for (int n = 0; n < num_digits; ++n, rest = static_cast<uint8_t>(3 * rest)) {
                out[n * count + i] = static_cast<uint8_t>(7 + (3 * rest >> 8));
            }
        }
    };
    digits(block, 32, 5, codes);
    digits(block + 32, 16, 5, codes + 160);
    digits(block + 48, 4, 4, codes + 240);
    for (int i = 0; i < 8; ++i) {
        const uint8_t* const own = codes + i * kGroup;
        take_codes({read_u64(own), read_u64(own + 8), read_u64(own + 16), read_u64(own + 24)}, d, groups[i]);
    }
}

void decode_tq2_0(const uint8_t* block, Group* groups) {
    const float d = read_scale(block + 64);
    for (int i = 0; i < 8; ++i) {
        uint64_t codes[4];
        for (int j = 0; j < 4; ++j) {
            codes[j] = in_every_byte(7) + (read_u64(block + i / 4 * kGroup + 8 * j) >> (i % 4 * 2) & in_every_byte(3));
        }
        take_codes(codes, d, groups[i]);
    }
}

void decode_iq1_s(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    for (int i = 0; i < 8; ++i) {
        const uint16_t rest = read_u16(block + 34 + 2 * i);
        uint64_t codes[4];
        for (int j = 0; j < 4; ++j) {
            codes[j] = spread_pairs(kIq1[block[2 + 4 * i + j] | (rest >> (3 * j) & 7) << 8]) | in_every_byte(rest >> 15 << 2);
        }
        take_codes(codes, d * static_cast<float>(2 * (rest >> 12 & 7) + 1) * 0.125f, groups[i]);
    }
}

void decode_iq2_xxs(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    for (int i = 0; i < 8; ++i) {
        const uint8_t* const entries = block + 2 + 8 * i;
        const uint32_t rest = read_u32(entries + 4);
        uint64_t codes[4];
        for (int j = 0; j < 4; ++j) codes[j] = spread_pairs(kIq2Xxs[entries[j]]) | spread_even_signs(rest >> (7 * j)) << 2;
        take_codes(codes, d * (0.5f + static_cast<float>(rest >> 28)) * 0.25f, groups[i]);
    }
}

void decode_iq3_xxs(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    for (int i = 0; i < 8; ++i) {
        const uint8_t* const entries = block + 2 + 8 * i;
        const uint32_t rest = read_u32(block + 66 + 4 * i);
        uint64_t codes[4];
        for (int j = 0; j < 4; ++j) {
            codes[j] = spread_triples(kIq3Xxs[entries[2 * j]], kIq3Xxs[entries[2 * j + 1]]) | spread_even_signs(rest >> (7 * j)) << 3;
        }
        take_codes(codes, d * (0.5f + static_cast<float>(rest >> 28)), groups[i]);  // of halves
    }
}

void decode_iq3_s(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    for (int i = 0; i < 8; ++i) {
        const uint8_t *const entries = block + 2 + 8 * i, *const signs = block + 74 + 4 * i;
        const int ninth = block[66 + i], s = block[106 + i / 2] >> (i % 2 * 4) & 15;
        uint64_t codes[4];
        for (int j = 0; j < 4; ++j) {
            const int first = entries[2 * j] | (ninth >> (2 * j) & 1) << 8, second = entries[2 * j + 1] | (ninth >> (2 * j + 1) & 1) << 8;
            codes[j] = spread_triples(kIq3S[first], kIq3S[second]) | spread_bits(signs[j]) << 3;
        }
        take_codes(codes, d * static_cast<float>(2 * s + 1), groups[i]);
    }
}

// The scale is a power of two, of which a float has all: from 2^-128 on, as the numbers of the table are doubled.
void decode_mxfp4(const uint8_t* block, Group* g) {
    g->d = std::ldexp(1.0f, block[0] - 128);
    std::memcpy(g->q, block + 1, kHalf);
}

// Two scales of 16 columns become one of 32, a `factor`th of the larger one, of which the integers stay exact: times `factor` they fit
// a byte. The others are rounded to half of that scale at most.
void join_halves(const int8_t* integers, const float (&scales)[2], int factor, Group& g) {
    const float largest = std::fabs(scales[0]) >= std::fabs(scales[1]) ? scales[0] : scales[1];
    g.d = largest / static_cast<float>(factor);
    for (int half = 0; half < 2; ++half) {
        const float ratio = largest == 0.0f ? 0.0f : scales[half] / largest * static_cast<float>(factor);
        for (int k = half * kHalf; k < (half + 1) * kHalf; ++k) {
            g.q[k] = static_cast<uint8_t>(static_cast<int>(static_cast<float>(integers[k]) * ratio + (kZero8 + 0.5f)));
        }
    }
}

void decode_iq1_m(const uint8_t* block, Group* groups) {
    const uint8_t* const s = block + 48;
    uint8_t of_block[2];  // four bits of each of four words
    for (int i = 0; i < 2; ++i) of_block[i] = static_cast<uint8_t>(s[4 * i + 1] >> 4 | (s[4 * i + 3] & 0xF0));
    const float d = read_scale(of_block);
    if (std::isnan(d)) return refuse_block(groups);
    for (int i = 0; i < 8; ++i) {
        const int fields = read_u16(s + i / 2 * 2) >> (i % 2 * 6);
        int8_t eighths[kGroup];
        for (int j = 0; j < 4; ++j) {
            const int rest = block[32 + 2 * i + j / 2] >> (j % 2 * 4) & 15;
            const uint64_t sizes = spread_pairs(kIq1[block[4 * i + j] | (rest & 7) << 8]);  // 0, 1, 2: 8 times that and -7 or -9
            const uint64_t columns = (8 * sizes + in_every_byte(rest & 8 ? 128 - 9 : 128 - 7)) ^ in_every_byte(128);
            std::memcpy(eighths + 8 * j, &columns, 8);
        }
        const float scales[2] = {d * static_cast<float>(2 * (fields & 7) + 1) * 0.125f, d * static_cast<float>(2 * (fields >> 3 & 7) + 1) * 0.125f};
        join_halves(eighths, scales, 14, groups[i]);
    }
}

// 8, 25 or 43 by their two bits, negative where a sign is set.
uint64_t columns_of_iq2(uint16_t entry, uint64_t signs) {
    const uint64_t sizes = spread_pairs(entry), numbers = in_every_byte(8) + 17 * sizes + (sizes >> 1 & in_every_byte(1));
    return (numbers ^ 255 * signs) + signs;
}

// `scales` are two nibbles, of 16 columns each.
void decode_group_of_iq2(const uint64_t (&columns)[4], float d, uint8_t scales, Group& g) {
    int8_t integers[kGroup];
    std::memcpy(integers, columns, kGroup);
    const float low = d * (0.5f + static_cast<float>(scales & 15)) * 0.25f, high = d * (0.5f + static_cast<float>(scales >> 4)) * 0.25f;
    join_halves(integers, {low, high}, 2, g);
}

void decode_iq2_xs(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    if (std::isnan(d)) return refuse_block(groups);
    for (int i = 0; i < 8; ++i) {
        uint64_t columns[4];
        for (int j = 0; j < 4; ++j) {
            const uint16_t entry = read_u16(block + 2 + 8 * i + 2 * j);
            columns[j] = columns_of_iq2(kIq2Xs[entry & 511], spread_even_signs(entry >> 9));
        }
        decode_group_of_iq2(columns, d, block[66 + i], groups[i]);
    }
}

void decode_iq2_s(const uint8_t* block, Group* groups) {
    const float d = read_scale(block);
    if (std::isnan(d)) return refuse_block(groups);
    for (int i = 0; i < 8; ++i) {
        const uint8_t *const entries = block + 2 + 4 * i, *const signs = block + 34 + 4 * i;
        uint64_t columns[4];
        for (int j = 0; j < 4; ++j) {
            columns[j] = columns_of_iq2(kIq2S[entries[j] | (block[66 + i] >> (2 * j) & 3) << 8], spread_bits(signs[j]));
        }
        decode_group_of_iq2(columns, d, block[74 + i], groups[i]);
    }
}

// Half of a scale in e4m3 without a sign; its NaN is 0, as in GGML.
float read_half_e4m3(uint8_t code) {
    if (code == 0x7F) return 0.0f;
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -10) : std::ldexp(static_cast<float>(8 + mantissa), exponent - 11);
}

void decode_nvfp4(const uint8_t* block, Group* groups) {
    for (int i = 0; i < 2; ++i) {
        int8_t integers[kGroup];
        for (int k = 0; k < kHalf; ++k) {
            const uint8_t pair = block[4 + kHalf * i + k];
            const int column = k / 8 * kHalf + k % 8;  // its low nibble; the high one is 8 columns on
            integers[column] = static_cast<int8_t>(kE2m1Twice[pair & 15] - kZero8);
            integers[column + 8] = static_cast<int8_t>(kE2m1Twice[pair >> 4] - kZero8);
        }
        join_halves(integers, {read_half_e4m3(block[2 * i]), read_half_e4m3(block[2 * i + 1])}, 8, groups[i]);
    }
}

// By SourceFormat. Formats of floats have no blocks.
constexpr BlockFormat kFormats[] = {
    {WeightKind::kU4Symmetric, 1, 18, decode_q4_0},             // kQ4_0
    {WeightKind::kU4Affine, 1, 20, decode_q4_1},                // kQ4_1
    {WeightKind::kU8Symmetric, 1, 34, decode_q8_0},             // kQ8_0
    {},                                                         // kBf16
    {WeightKind::kU8Symmetric, 1, 22, decode_q5_0},             // kQ5_0
    {WeightKind::kU8Affine, 1, 24, decode_q5_1},                // kQ5_1
    {WeightKind::kU4Affine, 8, 144, decode_q4_k},               // kQ4_K
    {WeightKind::kU8Affine, 8, 176, decode_q5_k},               // kQ5_K
    {WeightKind::kU8Symmetric, 8, 210, decode_q6_k},            // kQ6_K
    {WeightKind::kU4Table, 1, 18, decode_q4_0, kIq4},           // kIq4Nl
    {WeightKind::kU4Table, 8, 136, decode_iq4_xs, kIq4},        // kIq4Xs
    {},                                                         // kF16
    {},                                                         // kF32
    {WeightKind::kU8Symmetric, 8, 84, decode_q2_k},             // kQ2_K
    {WeightKind::kU8Symmetric, 8, 110, decode_q3_k},            // kQ3_K
    {WeightKind::kU4Symmetric, 4, 18, decode_q1_0},             // kQ1_0
    {WeightKind::kU4Symmetric, 2, 18, decode_q2_0},             // kQ2_0
    {WeightKind::kU4Symmetric, 8, 54, decode_tq1_0},            // kTq1_0
    {WeightKind::kU4Symmetric, 8, 66, decode_tq2_0},            // kTq2_0
    {WeightKind::kU4Table, 8, 50, decode_iq1_s, kIq1Eighths},   // kIq1S
    {WeightKind::kU8Symmetric, 8, 56, decode_iq1_m},            // kIq1M
    {WeightKind::kU4Table, 8, 66, decode_iq2_xxs, kIq2},        // kIq2Xxs
    {WeightKind::kU8Symmetric, 8, 74, decode_iq2_xs},           // kIq2Xs
    {WeightKind::kU8Symmetric, 8, 82, decode_iq2_s},            // kIq2S
    {WeightKind::kU4Table, 8, 98, decode_iq3_xxs, kIq3Halves},  // kIq3Xxs
    {WeightKind::kU4Table, 8, 110, decode_iq3_s, kIq3Odd},      // kIq3S
    {WeightKind::kU4Table, 1, 17, decode_mxfp4, kE2m1Twice},    // kMxfp4
    {WeightKind::kU8Symmetric, 2, 36, decode_nvfp4},            // kNvfp4
};
static_assert(std::size(kFormats) == static_cast<size_t>(SourceFormat::kNvfp4) + 1);

}  // namespace

const BlockFormat& block_format(SourceFormat format) {
    const BlockFormat& blocks = kFormats[static_cast<int>(format)];
    if (!blocks.decode) throw std::invalid_argument("not a quantised format");
    return blocks;
}

int64_t source_bytes(SourceFormat format, int rows, int cols) {
    if (float_bytes(format) > 0) return int64_t{float_bytes(format)} * rows * cols;
    const BlockFormat& blocks = block_format(format);
    return int64_t{rows} * (cols / (blocks.groups * kGroup)) * blocks.bytes;
}

void decode_row(SourceFormat format, const uint8_t* row, int cols, float scale, float* out) {
    if (const int bytes = float_bytes(format); bytes > 0) {
        for (int i = 0; i < cols; ++i, row += bytes) {
            float value = read_float(format, row);
            if (std::isnan(value)) value = NAN;
            out[i] = scale * value;
        }
        return;
    }
    const BlockFormat& blocks = block_format(format);
    Group groups[kMaxBlockGroups];
    for (int col = 0; col < cols; row += blocks.bytes) {
        blocks.decode(row, groups);
        for (int i = 0; i < blocks.groups; ++i, col += kGroup) values_of(groups[i], blocks, scale, out + col);
    }
}

}  // namespace penstock
