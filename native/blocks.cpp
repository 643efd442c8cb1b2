#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace penstock {

namespace {

constexpr float kZero4 = 8.0f;
constexpr int kZero8 = 128;
constexpr int kHalf = kGroup / 2;

// Unsigned q of 5 bits are moved to the middle of the range, where m is small and rounds well.
constexpr int kShift5 = kZero8 - 16;

float read_f16(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    float size;
    std::memcpy(&size, &magnitude, 4);
    size *= 0x1p112f;  // mends the exponent, of subnormals too
    if ((h & 0x7C00u) == 0x7C00u) size = NAN;
    return h & 0x8000u ? -size : size;
}

uint64_t read_u64(const uint8_t* p) {
    uint64_t x;
    std::memcpy(&x, p, 8);
    return x;
}

uint32_t read_u32(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
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
    g->d = read_f16(block);
    g->m = 0.0f;
    std::memcpy(g->q, block + 2, kHalf);
}

void decode_q4_1(const uint8_t* block, Group* g) {
    g->d = read_f16(block);
    g->m = read_f16(block + 2) + kZero4 * g->d;
    std::memcpy(g->q, block + 4, kHalf);
}

void decode_q5_0(const uint8_t* block, Group* g) {
    g->d = read_f16(block);
    g->m = 0.0f;
    widen_5(block + 6, read_u32(block + 2), g->q);
}

void decode_q5_1(const uint8_t* block, Group* g) {
    g->d = read_f16(block);
    g->m = read_f16(block + 2) + 16.0f * g->d;
    widen_5(block + 8, read_u32(block + 4), g->q);
}

void decode_q8_0(const uint8_t* block, Group* g) {
    g->d = read_f16(block);
    g->m = 0.0f;
    for (int i = 0; i < kGroup; ++i) g->q[i] = block[2 + i] ^ 0x80;
}

// The 8 six-bit scales and offsets of Q4_K and Q5_K; `zero` is what the group's q will have in the middle.
void decode_scales_k(const uint8_t* block, float zero, Group* g) {
    const float d = read_f16(block), e = read_f16(block + 2);
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
    const float d = read_f16(block + 208);
    for (int i = 0; i < 8; ++i) {
        const uint8_t *lower = block + i / 4 * 64 + i % 2 * kGroup, *upper = block + 128 + i / 4 * kGroup;
        const int lower_shift = i % 4 / 2 * 4, upper_shift = i % 4 * 2;
        int8_t s[2];
        std::memcpy(s, block + 192 + 2 * i, 2);
        const int largest = std::abs(s[0]) >= std::abs(s[1]) ? s[0] : s[1];
        Group& g = groups[i];
        g.d = 0.25f * d * static_cast<float>(largest);
        g.m = 0.0f;
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

void values_of(const Group& g, WeightKind kind, float scale, float* out) {
    const float d = scale * g.d, m = scale * g.m;
    if (kind == WeightKind::kU8Symmetric || kind == WeightKind::kU8Affine) {
        for (int i = 0; i < kGroup; ++i) out[i] = d * static_cast<float>(g.q[i] - kZero8) + m;
        return;
    }
    for (int i = 0; i < kGroup; ++i) {
        const int q = i < kHalf ? g.q[i] & 15 : g.q[i - kHalf] >> 4;
        out[i] = d * static_cast<float>(kind == WeightKind::kU4Table ? kTableOfNibbles[q] - kZero8 : q - static_cast<int>(kZero4)) + m;
    }
}

// 32 values as 8 bits of one scale, as Q8_0 has them; none is NaN.
void round_to_8_bits(const float* values, Group& g) {
    float largest = 0.0f;
    for (int k = 0; k < kGroup; ++k) largest = std::max(largest, std::fabs(values[k]));
    g.d = largest / 127.0f;
    g.m = 0.0f;
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int k = 0; k < kGroup; ++k) g.q[k] = static_cast<uint8_t>(static_cast<int>(values[k] * inverse + (kZero8 + 0.5f)));
}

// A block whose scale is no finite number: of every group, neither.
void refuse_block(Group* groups) {
    for (int i = 0; i < kMaxBlockGroups; ++i) groups[i] = {NAN, 0.0f, {}};
}

// Scales and offsets are of 16 columns: there is no group of 32 that has them exactly, so they are rounded, far below the error of 2 bits.
void decode_q2_k(const uint8_t* block, Group* groups) {
    const float d = read_f16(block + 80), e = read_f16(block + 82);
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
    const float d = read_f16(block + 108);
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

void decode_iq4_nl(const uint8_t* block, Group* g) { decode_q4_0(block, g); }

void decode_iq4_xs(const uint8_t* block, Group* g) {
    const float d = read_f16(block);
    const int upper = block[2] | block[3] << 8;
    for (int i = 0; i < 8; ++i) {
        const int s = (block[4 + i / 2] >> (i % 2 * 4) & 15) | (upper >> (2 * i) & 3) << 4;
        g[i].d = d * static_cast<float>(s - 32);
        g[i].m = 0.0f;
        std::memcpy(g[i].q, block + 8 + i * kHalf, kHalf);
    }
}

}  // namespace

const BlockFormat& block_format(SourceFormat format) {
    static constexpr BlockFormat kQ4_0{WeightKind::kU4Symmetric, 1, 18, decode_q4_0};
    static constexpr BlockFormat kQ4_1{WeightKind::kU4Affine, 1, 20, decode_q4_1};
    static constexpr BlockFormat kQ5_0{WeightKind::kU8Symmetric, 1, 22, decode_q5_0};
    static constexpr BlockFormat kQ5_1{WeightKind::kU8Affine, 1, 24, decode_q5_1};
    static constexpr BlockFormat kQ8_0{WeightKind::kU8Symmetric, 1, 34, decode_q8_0};
    static constexpr BlockFormat kQ4_K{WeightKind::kU4Affine, 8, 144, decode_q4_k};
    static constexpr BlockFormat kQ5_K{WeightKind::kU8Affine, 8, 176, decode_q5_k};
    static constexpr BlockFormat kQ6_K{WeightKind::kU8Symmetric, 8, 210, decode_q6_k};
    static constexpr BlockFormat kIq4Nl{WeightKind::kU4Table, 1, 18, decode_iq4_nl};
    static constexpr BlockFormat kIq4Xs{WeightKind::kU4Table, 8, 136, decode_iq4_xs};
    static constexpr BlockFormat kQ2_K{WeightKind::kU8Symmetric, 8, 84, decode_q2_k};
    static constexpr BlockFormat kQ3_K{WeightKind::kU8Symmetric, 8, 110, decode_q3_k};
    switch (format) {
        case SourceFormat::kQ4_0: return kQ4_0;
        case SourceFormat::kQ4_1: return kQ4_1;
        case SourceFormat::kQ5_0: return kQ5_0;
        case SourceFormat::kQ5_1: return kQ5_1;
        case SourceFormat::kQ8_0: return kQ8_0;
        case SourceFormat::kQ4_K: return kQ4_K;
        case SourceFormat::kQ5_K: return kQ5_K;
        case SourceFormat::kQ6_K: return kQ6_K;
        case SourceFormat::kIq4Nl: return kIq4Nl;
        case SourceFormat::kIq4Xs: return kIq4Xs;
        case SourceFormat::kQ2_K: return kQ2_K;
        case SourceFormat::kQ3_K: return kQ3_K;
        case SourceFormat::kBf16:
        case SourceFormat::kF16:
        case SourceFormat::kF32: break;
    }
    throw std::invalid_argument("not a quantised format");
}

int64_t source_bytes(SourceFormat format, int rows, int cols) {
    if (float_bytes(format) > 0) return int64_t{float_bytes(format)} * rows * cols;
    const BlockFormat& blocks = block_format(format);
    return int64_t{rows} * (cols / (blocks.groups * kGroup)) * blocks.bytes;
}

void decode_row(SourceFormat format, const uint8_t* row, int cols, float scale, float* out) {
    if (const int bytes = float_bytes(format); bytes > 0) {
        for (int i = 0; i < cols; ++i, row += bytes) {
            const uint32_t bits = format == SourceFormat::kF32 ? read_u32(row) : static_cast<uint32_t>(row[0] | row[1] << 8) << 16;
            float value;
            std::memcpy(&value, &bits, 4);
            if (std::isnan(value)) value = NAN;
            out[i] = scale * (format == SourceFormat::kF16 ? read_f16(row) : value);
        }
        return;
    }
    const BlockFormat& blocks = block_format(format);
    Group groups[kMaxBlockGroups];
    for (int col = 0; col < cols; row += blocks.bytes) {
        blocks.decode(row, groups);
        for (int i = 0; i < blocks.groups; ++i, col += kGroup) values_of(groups[i], blocks.kind, scale, out + col);
    }
}

}  // namespace penstock
