// Products of widened weights (gemm_widened.cpp) by Arm's products of matrices of bytes: SMMLA multiplies two rows of eight columns by two
// channels of as many.
//
// So a register has two channels, or two rows, side by side, and a sum's register has both channels of one row, then those of the other.

#pragma once

#include "gemm_tile.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

constexpr int kTilePairs = 3;                      // of rows, whose sums with eight channels fit the registers
constexpr int kWidenedRows = 2 * kTilePairs;
constexpr int kSteps = kGroup / 8, kHalves = 2;    // of a group's columns; of a panel's channels, which are multiplied one after the other
constexpr int kChannelPairs = kPanel / 2, kPairsOfHalf = kChannelPairs / kHalves;

// A group of a panel's weights as signed bytes, and its scales, each twice.
struct WidenedGroup {
    alignas(64) int8_t q[kChannelPairs][kSteps][16];
    float d[kChannelPairs][4];
};

// A group of two rows.
struct PairOfRows {
    alignas(32) int8_t q[kSteps][16];
    int32_t start[4], lift[4];  // of the sums: each twice
};

template <typename T>
PENSTOCK_INLINE T front_halves(T a, T b) {
    return (T)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b);
}
template <typename T>
PENSTOCK_INLINE T back_halves(T a, T b) {
    return (T)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b);
}

template <WeightKind kKind>
PENSTOCK_INLINE void widen_group(const Panel& panel, int64_t group, WidenedGroup& to) {
    using L = Layout<kKind>;
    const uint8_t* const quants = quants_of<kKind>(panel, group);
    const auto keep = [&](int pair, int step, uint8x16_t bytes) PENSTOCK_LAMBDA {
        if constexpr (!L::kSmall) bytes = veorq_u8(bytes, vdupq_n_u8(128));
        vst1q_u8((uint8_t*)to.q[pair][step], bytes);
    };
    const auto split = [&](int pair, int step, uint8x16_t bytes) PENSTOCK_LAMBDA {
        if constexpr (!L::kNibbles) return keep(pair, step, bytes);
        uint8x16_t low = vandq_u8(bytes, vdupq_n_u8(0x0F)), high = vshrq_n_u8(bytes, 4);
        if constexpr (L::kTable) {
            const uint8x16_t table = vld1q_u8(panel.table);
            low = vqtbl1q_u8(table, low), high = vqtbl1q_u8(table, high);
        }
        keep(pair, step, low);
        keep(pair, step + kSteps / 2, high);
    };
    PENSTOCK_UNROLL for (int step = 0; step < (L::kNibbles ? kSteps / 2 : kSteps); ++step) {
        PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) {  // four channels, of two chunks of four columns
            const uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(quants + 128 * step + 16 * i));
            const uint32x4_t second = vreinterpretq_u32_u8(vld1q_u8(quants + 128 * step + 64 + 16 * i));
            split(2 * i, step, vreinterpretq_u8_u32(vzip1q_u32(first, second)));
            split(2 * i + 1, step, vreinterpretq_u8_u32(vzip2q_u32(first, second)));
        }
    }
    const vf d = load_f16(scales_of<kKind>(panel, group));
    PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) {
        vst1q_f32(to.d[2 * i], front_halves(d.v[i], d.v[i]));
        vst1q_f32(to.d[2 * i + 1], back_halves(d.v[i], d.v[i]));
    }
}

// Some columns of up to kMost rows, for all panels that multiply them.
template <int kMost, int kMostGroups>
struct WidenedInput {
    PairOfRows pairs[(kMost + 1) / 2][kMostGroups];

    // Rows [row0, row0 + rows) and the groups [first, first + count) of an activation; `starts` is what sums start at. A last row without
    // a partner is its own.
    PENSTOCK_MEMBER void arrange(const Activation& a, const int32_t* starts, int64_t row0, int rows, int first, int count) {
        const int groups = a.cols / kGroup;
        for (int row = 0; row < rows; row += 2) {
            const int64_t at[2] = {row0 + row, row0 + (row + 1 < rows ? row + 1 : row)};
            const int8_t *const x = a.q + at[0] * a.cols + first * kGroup, *const y = a.q + at[1] * a.cols + first * kGroup;
            for (int g = 0; g < count; ++g) {
                PairOfRows& to = pairs[row / 2][g];
                PENSTOCK_UNROLL for (int step = 0; step < kSteps; step += 2) {
                    const int8x16_t a16 = vld1q_s8(x + g * kGroup + 8 * step), b16 = vld1q_s8(y + g * kGroup + 8 * step);
                    vst1q_s8(to.q[step], front_halves(a16, b16));
                    vst1q_s8(to.q[step + 1], back_halves(a16, b16));
                }
                const auto twice = [&](const int32_t* numbers) PENSTOCK_LAMBDA {
                    return vcombine_s32(vdup_n_s32(numbers[at[0] * groups + first + g]), vdup_n_s32(numbers[at[1] * groups + first + g]));
                };
                vst1q_s32(to.start, twice(starts));
                vst1q_s32(to.lift, twice(a.lift));
            }
        }
    }

    // sums[row][channel] += the product of the rows [row, row + rows), at most kWidenedRows, by `count` groups of a panel.
    PENSTOCK_MEMBER void multiply(const WidenedGroup* weights, int count, int row, int rows, float (*sums)[kPanel]) const {
        const PairOfRows(*const x)[kMostGroups] = pairs + row / 2;
        if (rows > 4) return multiply_pairs<3>(weights, count, x, sums);
        if (rows > 2) return multiply_pairs<2>(weights, count, x, sums);
        multiply_pairs<1>(weights, count, x, sums);
    }

  private:
    template <int kCount>
    static PENSTOCK_MEMBER void multiply_pairs(const WidenedGroup* weights, int count, const PairOfRows (*x)[kMostGroups], float (*sums)[kPanel]) {
        for (int half = 0; half < kHalves; ++half) {
            float32x4_t acc[kCount][kPairsOfHalf];
            const auto for_fours = [&](auto f) PENSTOCK_LAMBDA {
                PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
                    PENSTOCK_UNROLL for (int j = 0; j < kPairsOfHalf; j += 2) {
                        const int channel = (half * kPairsOfHalf + j) * 2;
                        f(sums[2 * p] + channel, sums[2 * p + 1] + channel, acc[p][j], acc[p][j + 1]);
                    }
                }
            };
            for_fours([](float* upper, float* lower, float32x4_t& first, float32x4_t& second) PENSTOCK_LAMBDA {
                const float32x4_t above = vld1q_f32(upper), below = vld1q_f32(lower);
                first = front_halves(above, below), second = back_halves(above, below);
            });
            for (int g = 0; g < count; ++g) {
                int32x4_t dots[kCount][kPairsOfHalf];
                PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
                    const int32x4_t start = vld1q_s32(x[p][g].start);
                    PENSTOCK_UNROLL for (int j = 0; j < kPairsOfHalf; ++j) dots[p][j] = start;
                }
                PENSTOCK_UNROLL for (int step = 0; step < kSteps; ++step) {
                    int8x16_t rows[kCount];
                    PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) rows[p] = vld1q_s8(x[p][g].q[step]);
                    PENSTOCK_UNROLL for (int j = 0; j < kPairsOfHalf; ++j) {
                        const int8x16_t channels = vld1q_s8(weights[g].q[half * kPairsOfHalf + j][step]);
                        PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) dots[p][j] = vmmlaq_s32(dots[p][j], rows[p], channels);
                    }
                }
                PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
                    const float32x4_t lift = vreinterpretq_f32_s32(vld1q_s32(x[p][g].lift));
                    PENSTOCK_UNROLL for (int j = 0; j < kPairsOfHalf; ++j) {
                        const float32x4_t d = vld1q_f32(weights[g].d[half * kPairsOfHalf + j]);
                        acc[p][j] = vfmaq_f32(acc[p][j], vsubq_f32(vreinterpretq_f32_s32(dots[p][j]), lift), d);
                    }
                }
            }
            for_fours([](float* upper, float* lower, float32x4_t& first, float32x4_t& second) PENSTOCK_LAMBDA {
                vst1q_f32(upper, front_halves(first, second));
                vst1q_f32(lower, back_halves(first, second));
            });
        }
    }
};

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
