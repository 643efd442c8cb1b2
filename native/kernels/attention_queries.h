// The queries of an attention task as integers, laid out as they will be multiplied: by vectors as the keys are, some columns of each
// of kPairs pairs in turn. Included by attention_task.h alone.

#pragma once

#include "attention_scratch.h"
#include "integers.h"
#include "softmax.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

constexpr int kQueryBytes = 4;  // of one pair in a row: as many columns as an instruction multiplies for each lane

// Where the integers of a pair begin, if a column takes `width` bytes.
PENSTOCK_INLINE uint8_t* integers_of(const Scratch& scratch, int pair, int head_dim, int width) {
    return scratch.q + pair / kPairs * kPairs * head_dim * width + pair % kPairs * kQueryBytes;
}

// For keys of 16 bits: one scale, which becomes a part of the factor of the pair's scores.
void round_to_int16(const KvLayer& kv, const AttentionTask& t, Pairs& pairs, const Scratch& scratch) {
    for (int at = 0; at < pairs.count; at += kLanes) {
        const int count = least(pairs.count - at, kLanes);
        alignas(64) float squares[kLanes] = {}, largest[kLanes] = {};
        for (int p = 0; p < count; ++p) {
            const Extent extent = extent_of(pairs.q[at + p], kv.head_dim);
            squares[p] = extent.squares;
            largest[p] = extent.largest;
        }
        IntegerScale scales[kLanes];
        integer_scales(squares, largest, scales);
        for (int p = 0; p < count; ++p) {
            const float* x = pairs.q[at + p];
            // All integers are zero: any factor serves that keeps masked scores masked.
            pairs.factor[at + p] = scales[p].scale < kSmallest ? 1.0f : scales[p].scale * t.scale * kLog2E;
            uint8_t* out = integers_of(scratch, at + p, kv.head_dim, 2);
            for (int d = 0; d < kv.head_dim; d += kLanes) {
                alignas(64) int16_t integers[kLanes];
                store_integers(integers, load(x + d), scales[p]);
                for (int i = 0; i < kLanes; i += 2) memcpy(out + (d + i) / 2 * kPairs * kQueryBytes, integers + i, kQueryBytes);
            }
        }
    }
}

// Keeps the integers of four pairs, 32 columns from `begin` on: of the first two pairs and of the others.
PENSTOCK_INLINE void lay_out(const Scratch& scratch, int head_dim, int item, int begin, vb first, vb second) {
    alignas(64) int8_t integers[4][kGroup];
    store64(reinterpret_cast<uint8_t*>(integers[0]), first);
    store64(reinterpret_cast<uint8_t*>(integers[2]), second);
    const int groups = (head_dim + kGroup - 1) / kGroup, block = item / (groups * kPairs), place = item % kPairs;
    uint8_t* out = scratch.q + block * kPairs * head_dim + begin * kPairs + place * kQueryBytes;
    for (int d = 0; d < (begin + kGroup <= head_dim ? kGroup : kLanes); d += kLanes) {
        transpose_fours(out + d * kPairs, kPairs * kQueryBytes, integers[0] + d, kGroup, 0);
    }
}

// For keys of 8 bits: each group of a query's columns has its own scale, like the keys'. A query with NaN or infinity gets a NaN
// scale and NaN scores. Four pairs go side by side.
void round_to_int8(const KvLayer& kv, const AttentionTask& t, Pairs& pairs, const Scratch& scratch) {
    static_assert(kPairs % 4 == 0);
    const int groups = kv.key_groups(), items = (pairs.count + kPairs - 1) / kPairs * groups * kPairs;
    // Calls f(item, x, columns) for every four pairs and every group of columns, x[i] being that of the i-th pair.
    const auto for_fours = [&](auto f) PENSTOCK_LAMBDA {
        for (int at = 0; at < pairs.count; at += 4) {
            const float* x[4];
            for (int i = 0; i < 4; ++i) x[i] = pairs.q[at + i < pairs.count ? at + i : at];
            for (int g = 0; g < groups; ++g) {
                const int begin = g * kGroup, columns = least(kv.head_dim - begin, kGroup);
                f((at / kPairs * groups + g) * kPairs + at % kPairs, x, begin, columns > kLanes);
            }
        }
    };
    int32_t* largest = reinterpret_cast<int32_t*>(scratch.q_scales);  // at first: bits of floats
    for_fours([&](int item, const float* const(&x)[4], int begin, bool is_whole) PENSTOCK_LAMBDA {
        vi sizes[4];
        for (int i = 0; i < 4; ++i) {
            sizes[i] = bits_of(abs(load(x[i] + begin)));
            if (is_whole) sizes[i] = max(sizes[i], bits_of(abs(load(x[i] + begin + kLanes))));
        }
        store_largest_of_four(largest + item, sizes);
    });
    alignas(64) float inverse[kTaskPairs * kLargestHeadDim / kGroup];
    for (int i = 0; i < items; i += kLanes) {
        const vf top = float_of(load(largest + i)), scale = mul(max(set1(kSmallest), top), set1(1.0f / 127.0f));
        store(scratch.q_scales + i, add(scale, mul(top, set1(0.0f))));
        store(inverse + i, div(set1(1.0f), scale));
    }
    for_fours([&](int item, const float* const(&x)[4], int begin, bool is_whole) PENSTOCK_LAMBDA {
        vf values[8];
        for (int i = 0; i < 4; ++i) {
            const vf factor = set1(inverse[item + i]);
            values[2 * i] = mul(load(x[i] + begin), factor);
            values[2 * i + 1] = is_whole ? mul(load(x[i] + begin + kLanes), factor) : set1(0.0f);
        }
        const vb first = rounded_i8(values[0], values[1], values[2], values[3]);
        const vb second = rounded_i8(values[4], values[5], values[6], values[7]);
        lay_out(scratch, kv.head_dim, item, begin, first, second);
        alignas(16) int32_t sums[4];
        store_sums_of_four(sums, first, second);
        for (int i = 0; i < 4; ++i) scratch.q_starts[item + i] = -kDotZero * sums[i];
    });
    for (int p = 0; p < pairs.count; ++p) pairs.factor[p] = t.scale * kLog2E;
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
