// Products of widened weights (gemm_widened.cpp) by Arm's dot products: SDOT multiplies four columns of a row by those of four channels. The
// same as widened_i8mm.h for processors without products of matrices.

#pragma once

#include "gemm_tile.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

constexpr int kWidenedRows = 4;                    // whose sums with eight channels fit the registers
constexpr int kSteps = kGroup / 4, kHalves = 2;    // of a group's columns; of a panel's channels, which are multiplied one after the other
constexpr int kFours = kPanel / 4, kFoursOfHalf = kFours / kHalves;

// A group of a panel's weights as signed bytes, and its scales.
struct WidenedGroup {
    alignas(64) int8_t q[kSteps][kFours][16];
    float d[kPanel];
};

template <WeightKind kKind>
PENSTOCK_INLINE void widen_group(const Panel& panel, int64_t group, WidenedGroup& to) {
    using L = Layout<kKind>;
    const uint8_t* const quants = quants_of<kKind>(panel, group);
    const auto keep = [&](int step, vb bytes) PENSTOCK_LAMBDA {
        PENSTOCK_UNROLL for (int i = 0; i < kFours; ++i) {
            vst1q_s8(to.q[step][i], as_signed(L::kSmall ? bytes.v[i] : veorq_u8(bytes.v[i], vdupq_n_u8(128))));
        }
    };
    PENSTOCK_UNROLL for (int c = 0; c < (L::kNibbles ? kSteps / 2 : kSteps); ++c) {
        const vb chunk = load64(quants + 64 * c);
        keep(c, unpack<kKind>(chunk, false, panel.table));
        if constexpr (L::kNibbles) keep(c + kSteps / 2, unpack<kKind>(chunk, true, panel.table));
    }
    store(to.d, load_f16(scales_of<kKind>(panel, group)));
}

// Some columns of some rows, where they are.
template <int kMost, int kMostGroups>
struct WidenedInput {
    const int8_t* q;
    const int32_t *start, *lift;
    int64_t cols;
    int groups;

    PENSTOCK_MEMBER void arrange(const Activation& a, const int32_t* starts, int64_t row0, int, int first, int) {
        cols = a.cols;
        groups = a.cols / kGroup;
        q = a.q + row0 * cols + first * kGroup;
        start = starts + row0 * groups + first;
        lift = a.lift + row0 * groups + first;
    }

    PENSTOCK_MEMBER void multiply(const WidenedGroup* weights, int count, int row, int rows, float (*sums)[kPanel]) const {
        with_count<kWidenedRows>(rows, [&]<int kRows>() PENSTOCK_LAMBDA { multiply_rows<kRows>(weights, count, row, sums); });
    }

  private:
    template <int kRows>
    PENSTOCK_MEMBER void multiply_rows(const WidenedGroup* weights, int count, int row, float (*sums)[kPanel]) const {
        const int8_t* const x = q + row * cols;
        const int32_t *const starts = start + row * groups, *const lifts = lift + row * groups;
        for (int half = 0; half < kHalves; ++half) {
            const int first = half * kFoursOfHalf;
            float32x4_t acc[kRows][kFoursOfHalf];
            PENSTOCK_UNROLL for (int r = 0; r < kRows; ++r) {
                PENSTOCK_UNROLL for (int i = 0; i < kFoursOfHalf; ++i) acc[r][i] = vld1q_f32(sums[r] + 4 * (first + i));
            }
            for (int g = 0; g < count; ++g) {
                int32x4_t dots[kRows][kFoursOfHalf];
                PENSTOCK_UNROLL for (int r = 0; r < kRows; ++r) {
                    PENSTOCK_UNROLL for (int i = 0; i < kFoursOfHalf; ++i) dots[r][i] = vdupq_n_s32(starts[r * groups + g]);
                }
                PENSTOCK_UNROLL for (int part = 0; part < 2; ++part) {
                    int8x16_t columns[kRows];
                    PENSTOCK_UNROLL for (int r = 0; r < kRows; ++r) columns[r] = vld1q_s8(x + r * cols + g * kGroup + 16 * part);
                    const auto multiply_four = [&]<int kLane>() PENSTOCK_LAMBDA {
                        PENSTOCK_UNROLL for (int i = 0; i < kFoursOfHalf; ++i) {
                            const int8x16_t channels = vld1q_s8(weights[g].q[4 * part + kLane][first + i]);
                            PENSTOCK_UNROLL for (int r = 0; r < kRows; ++r) dots[r][i] = vdotq_laneq_s32(dots[r][i], channels, columns[r], kLane);
                        }
                    };
                    multiply_four.template operator()<0>();
                    multiply_four.template operator()<1>();
                    multiply_four.template operator()<2>();
                    multiply_four.template operator()<3>();
                }
                PENSTOCK_UNROLL for (int r = 0; r < kRows; ++r) {
                    const float32x4_t own = vreinterpretq_f32_s32(vdupq_n_s32(lifts[r * groups + g]));
                    PENSTOCK_UNROLL for (int i = 0; i < kFoursOfHalf; ++i) {
                        const float32x4_t d = vld1q_f32(weights[g].d + 4 * (first + i));
                        acc[r][i] = vfmaq_f32(acc[r][i], vsubq_f32(vreinterpretq_f32_s32(dots[r][i]), own), d);
                    }
                }
            }
            PENSTOCK_UNROLL for (int r = 0; r < kRows; ++r) {
                PENSTOCK_UNROLL for (int i = 0; i < kFoursOfHalf; ++i) vst1q_f32(sums[r] + 4 * (first + i), acc[r][i]);
            }
        }
    }
};

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
