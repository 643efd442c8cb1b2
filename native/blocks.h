// The meaning of a weight file's blocks: every format of GGML, taken apart into groups of 32 columns.
// Called by packing.cpp, once per block at load, and for tables of which a step reads single rows; knows no layout but the file's.
//
// Source: https://github.com/ggml-org/ggml, ggml-common.h and ggml-quants.c; models/formats.py says the same in NumPy.

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "f16.h"
#include "kernels/kernels.h"

namespace penstock {

enum class SourceFormat : int32_t {
    kQ4_0 = 0,
    kQ4_1 = 1,
    kQ8_0 = 2,
    kBf16 = 3,
    kQ5_0 = 4,
    kQ5_1 = 5,
    kQ4_K = 6,
    kQ5_K = 7,
    kQ6_K = 8,
    kIq4Nl = 9,
    kIq4Xs = 10,
    kF16 = 11,
    kF32 = 12,
    kQ2_K = 13,
    kQ3_K = 14,
    kQ1_0 = 15,
    kQ2_0 = 16,
    kTq1_0 = 17,
    kTq2_0 = 18,
    kIq1S = 19,
    kIq1M = 20,
    kIq2Xxs = 21,
    kIq2Xs = 22,
    kIq2S = 23,
    kIq3Xxs = 24,
    kIq3S = 25,
    kMxfp4 = 26,
    kNvfp4 = 27,
};

constexpr int kMaxBlockGroups = 8;

// 32 columns of one row: w = d * (q - zero) + m, as in PackedMatrix.
struct Group {
    float d;
    float m = 0.0f;                // of the affine kinds
    alignas(8) uint8_t q[kGroup];  // 8 bits: one per column; 4 bits: 16 bytes, columns 0-15 in the low halves
};

struct BlockFormat {
    WeightKind kind;   // that holds it
    int32_t groups;    // of a block
    int32_t bytes;     // of a block
    void (*decode)(const uint8_t* block, Group* groups);
    const uint8_t* table = nullptr;  // of kU4Table, as in PackedMatrix
};

// Bytes of a number of a format that is not quantised; 0 for the others.
constexpr int float_bytes(SourceFormat format) {
    return format == SourceFormat::kF32 ? 4 : format == SourceFormat::kF16 || format == SourceFormat::kBf16 ? 2 : 0;
}

inline uint32_t read_u32(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

inline uint16_t read_u16(const uint8_t* p) {
    uint16_t x;
    std::memcpy(&x, p, 2);
    return x;
}

// A number of a format that is not quantised.
inline float read_float(SourceFormat format, const uint8_t* p) {
    if (format == SourceFormat::kF32) return std::bit_cast<float>(read_u32(p));
    return format == SourceFormat::kF16 ? from_f16(read_u16(p)) : from_bf16(read_u16(p));
}

// The blocks of a quantised format.
const BlockFormat& block_format(SourceFormat format);

// Bytes of a matrix of whole blocks.
int64_t source_bytes(SourceFormat format, int rows, int cols);

// One row as in the file, times `scale`. `cols` are whole blocks. Every NaN has the bits of `NAN`: some others would be rounded to
// a number.
void decode_row(SourceFormat format, const uint8_t* row, int cols, float scale, float* out);

}  // namespace penstock
