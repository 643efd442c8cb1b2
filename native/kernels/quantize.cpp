// Rows of a step as int8 activations (`Activation` in kernels.h), of values as they are or of their norm.
//
// A few rows go through each pass together, which hides latency: sums over lanes, roots and data just stored in smaller pieces
// are ready when the next pass comes to a row. Rows don't affect each other.

#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kQuantizeRows = 4;
constexpr int kColsTogether = 2048;  // rows of more columns would leave the first-level cache between two passes

constexpr int32_t kOneBits = 0x3F800000;  // of 1.0f

// Rounded to nearest, and to even between two. Of a finite number.
PENSTOCK_INLINE uint16_t bf16_of(float x) {
    const auto bits = __builtin_bit_cast(uint32_t, x);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// One row on its way through the passes. Normed: what becomes integers is x * inverse * norm; else x, and the inverse is 1.
template <bool kNormed>
struct Row {
    const float* x;
    const float* norm;
    int groups;
    // Arrays of the activation. Before its final value, `lift` has each group's largest magnitude, without `inverse`, then e << 23, and
    // `start` the sum of its integers.
    int8_t* q;
    int32_t *lift, *start;
    uint16_t* sum;
    int32_t *outlier, *end;
    float* rest;
    float limit, inverse;

    PENSTOCK_MEMBER void begin(const Activation& a, int64_t row, const float* rows, const float* weights) {
        x = rows + row * a.cols;
        norm = weights;
        groups = a.cols / kGroup;
        q = a.q + row * a.cols;
        lift = a.lift + row * groups;
        start = a.start + row * groups;
        sum = a.sum + row * ((groups + 1) & ~1);
        outlier = end = a.outlier + row * a.outliers_per_row;
        rest = a.outlier_rest + row * a.outliers_per_row;
    }

    // Sixteen values without `inverse`.
    PENSTOCK_MEMBER vf at(int column) const {
        if constexpr (kNormed) return mul(load(x + column), load(norm + column));
        return load(x + column);
    }

    PENSTOCK_MEMBER float value(int column) const {
        if constexpr (kNormed) return x[column] * inverse * norm[column];
        return x[column];
    }

    // Finds each group's largest magnitude, the outlier limit and the norm. One of the last two is not finite (`is_broken`) if a value is
    // NaN or too large: the squares of x times the norm's weights must stay finite.
    PENSTOCK_MEMBER void measure(float eps) {
        vf squares[4], of_x[4];
        for (int p = 0; p < 4; ++p) squares[p] = of_x[p] = set1(0.0f);
        for_fours(0, groups, [&]<int kCount>(int g) PENSTOCK_LAMBDA {
            vi largest[4];
            for (int i = 0; i < 4; ++i) {
                largest[i] = set1_i(0);
                if (i >= kCount) continue;
                const int column = (g + i) * kGroup;
                const vf a = at(column), b = at(column + kLanes);
                vf& first = squares[2 * (i % 2)], &second = squares[2 * (i % 2) + 1];
                first = fma(a, a, first);
                second = fma(b, b, second);
                if constexpr (kNormed) {
                    const vf xa = load(x + column), xb = load(x + column + kLanes);
                    vf& x_first = of_x[2 * (i % 2)], &x_second = of_x[2 * (i % 2) + 1];
                    x_first = fma(xa, xa, x_first);
                    x_second = fma(xb, xb, x_second);
                }
                largest[i] = max(bits_of(abs(a)), bits_of(abs(b)));
            }
            alignas(16) int32_t some[4];
            store_largest_of_four(kCount == 4 ? lift + g : some, largest);
            if (kCount < 4) memcpy(lift + g, some, kCount * sizeof(int32_t));
        });
        const float cols = static_cast<float>(groups * kGroup);
        const auto sum_of = [](const vf (&part)[4]) PENSTOCK_LAMBDA {
            return reduce_add(add(add(part[0], part[1]), add(part[2], part[3])));
        };
        limit = kOutlierRatio * sqrtf(sum_of(squares) / cols);
        if (limit < kSmallestLimit) limit = kSmallestLimit;  // NaN stays, and no value is above it
        inverse = kNormed ? 1.0f / sqrtf(sum_of(of_x) / cols + eps) : 1.0f;
    }

    // Beyond 2^100 the lift of a group could be too large for a float.
    PENSTOCK_MEMBER bool is_broken() const { return !(limit < INFINITY && inverse < INFINITY && limit * inverse < 0x1p100f); }

    // Outliers are listed, and no longer count for the largest of their group.
    PENSTOCK_MEMBER void list_outliers() {
        const vf bound = set1(limit);
        for (int begin = 0; begin < groups; begin += 4 * kLanes) {
            const int count = least(groups - begin, 4 * kLanes);
            uint64_t above = 0;
            for_lanes(count, [&](int g, int some) PENSTOCK_LAMBDA {
                const vf largest = float_of(load_some(lift + begin + g, some));
                above |= static_cast<uint64_t>(lanes_above(largest, bound)) << g;
            });
            for (; above != 0; above &= above - 1) list_outliers_of(begin + __builtin_ctzll(above), bound);
        }
        *end = kNoColumn;
    }

    PENSTOCK_MEMBER void list_outliers_of(int group, vf bound) {
        const int column = group * kGroup;
        const vf a = abs(at(column)), b = abs(at(column + kLanes));
        const float largest = reduce_max(max(up_to(a, bound), up_to(b, bound)));
        memcpy(lift + group, &largest, sizeof(float));
        uint32_t above = lanes_above(a, bound) | lanes_above(b, bound) << kLanes;
        do {
            *end++ = column + __builtin_ctz(above);
            above &= above - 1;
        } while (above != 0);
    }

    // The next power of two above the largest value / 127 of each group.
    PENSTOCK_MEMBER void choose_scales() {
        for_lanes(groups, [&](int g, int count) PENSTOCK_LAMBDA {
            const vf largest = mul(float_of(load_some(lift + g, count)), set1(inverse));
            const vf wanted = max(mul(largest, set1(1.0f / 127.0f)), set1(kSmallestScale));
            const vi scale = bit_and(add(bits_of(wanted), set1_i(0x7FFFFF)), set1_i(0x7F800000));
            store_some(lift + g, sub(scale, set1_i(kOneBits)), count);
        });
    }

    // The integers and their sums. The norm's inverse and that of a group's scale are multiplied first, which rounds nothing:
    // a scale is a power of two.
    PENSTOCK_MEMBER void round_all() {
        for_fours(0, groups, [&]<int kCount>(int g) PENSTOCK_LAMBDA {
            vf values[8];
            for (int i = 0; i < 4; ++i) {
                values[2 * i] = values[2 * i + 1] = set1(0.0f);
                if (i >= kCount) continue;
                vf factor = float_of(sub(set1_i(kOneBits), set1_i(lift[g + i])));
                if constexpr (kNormed) factor = mul(factor, set1(inverse));
                for (int half = 0; half < 2; ++half) {
                    const int column = (g + i) * kGroup + half * kLanes;
                    values[2 * i + half] = mul(load(x + column), factor);
                    if constexpr (kNormed) values[2 * i + half] = mul(values[2 * i + half], load(norm + column));
                    // Never -128, which AVX2's dot4 can't take, and which numbers beyond 2^31 become on some processors.
                    values[2 * i + half] = min(set1(127.0f), max(set1(-127.0f), values[2 * i + half]));
                }
            }
            const vb first = rounded_i8(values[0], values[1], values[2], values[3]);
            const vb second = rounded_i8(values[4], values[5], values[6], values[7]);
            alignas(64) uint8_t some_q[4 * kGroup];
            uint8_t* const to = kCount == 4 ? reinterpret_cast<uint8_t*>(q + g * kGroup) : some_q;
            store64(to, first);
            store64(to + 2 * kGroup, second);
            alignas(16) int32_t some[4];
            store_sums_of_four(kCount == 4 ? start + g : some, first, second);
            if (kCount < 4) {
                memcpy(q + g * kGroup, some_q, kCount * kGroup);
                memcpy(start + g, some, kCount * sizeof(int32_t));
            }
        });
    }

    PENSTOCK_MEMBER void scale_sums() {
        for_lanes(groups, [&](int g, int count) PENSTOCK_LAMBDA {
            const vi of_q = load_some(start + g, count), twice = add(of_q, of_q), four = add(twice, twice);
            const vi exponent = load_some(lift + g, count), scale = add(set1_i(kOneBits), exponent), lifted = add(set1_i(kLiftBits), exponent);
            alignas(32) uint16_t some[kLanes];
            store_bf16(count == kLanes ? sum + g : some, mul(float_of(scale), to_float(of_q)));
            if (count < kLanes) memcpy(sum + g, some, static_cast<size_t>(count) * sizeof(uint16_t));
            store_some(lift + g, lifted, count);
            store_some(start + g, sub(lifted, add(four, four)), count);
        });
        if (groups % 2) sum[groups] = 0;
    }

    // The part of outliers that the integers can't hold. It belongs to its group's sum.
    PENSTOCK_MEMBER void keep_rests() {
        float total = 0.0f;
        for (int i = 0; outlier + i < end; ++i) {
            const int column = outlier[i], group = column / kGroup;
            const float scale = __builtin_bit_cast(float, kOneBits + (lift[group] - kLiftBits));
            rest[i] = value(column) - scale * static_cast<float>(q[column]);
            total += rest[i];
            if (outlier[i + 1] / kGroup == group) continue;
            sum[group] = bf16_of(scale * static_cast<float>((lift[group] - start[group]) / 8) + total);
            total = 0.0f;
        }
    }

    // An int8 can't be NaN, but the rest of an outlier can: what is broken must not become a plausible number.
    PENSTOCK_MEMBER void spoil() {
        memset(q, 0, static_cast<size_t>(groups) * kGroup);
        for (int g = 0; g < groups; ++g) lift[g] = start[g] = kLiftBits;
        memset(sum, 0, static_cast<size_t>((groups + 1) & ~1) * sizeof(uint16_t));
        outlier[0] = 0;
        rest[0] = NAN;
        outlier[1] = kNoColumn;
    }
};

template <bool kNormed, int kCount>
void quantize_together(const Activation& a, int64_t row, const float* x, const float* norm, float eps) {
    Row<kNormed> rows[kCount];
    for (int i = 0; i < kCount; ++i) rows[i].begin(a, row + i, x, norm);
    for (int i = 0; i < kCount; ++i) rows[i].measure(eps);
    for (int i = 0; i < kCount; ++i) rows[i].list_outliers();
    for (int i = 0; i < kCount; ++i) rows[i].choose_scales();
    for (int i = 0; i < kCount; ++i) rows[i].round_all();
    for (int i = 0; i < kCount; ++i) {
        if (rows[i].is_broken()) {
            rows[i].spoil();
            continue;
        }
        rows[i].scale_sums();
        rows[i].keep_rests();
    }
}

template <bool kNormed>
void quantize_all(const Activation& a, int64_t row, int64_t end, const float* x, const float* norm, float eps) {
    if (a.cols <= kColsTogether) {
        for (; row + kQuantizeRows <= end; row += kQuantizeRows) quantize_together<kNormed, kQuantizeRows>(a, row, x, norm, eps);
    }
    for (; row < end; ++row) quantize_together<kNormed, 1>(a, row, x, norm, eps);
}

}  // namespace

void quantize_rows(const Activation& a, int64_t row0, int64_t row1, const float* x, const float* norm, float eps) {
    if (norm) return quantize_all<true>(a, row0, row1, x, norm, eps);
    quantize_all<false>(a, row0, row1, x, norm, eps);
}

}  // namespace penstock::PENSTOCK_ISA
