// Operations on one row of a step: norm, quantisation, embedding, rope, KV write, activation.

#include "activation.h"
#include "integers.h"
#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

// Calls f(i, count) for every sixteen of [0, n); count is below 16 in the last call only.
template <typename F>
PENSTOCK_INLINE void for_lanes(int n, F f) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, n - i);
}

// Four sums side by side: one alone would wait for each multiply-add before the next.
PENSTOCK_INLINE float sum_of_squares(const float* x, int n) {
    vf part[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int p = 0; p < 4; ++p) {
            const vf v = load(x + i + p * kLanes);
            part[p] = fma(v, v, part[p]);
        }
    }
    for_lanes(n - i, [&](int at, int count) PENSTOCK_LAMBDA {
        const vf v = load_some(x + i + at, count);
        part[0] = fma(v, v, part[0]);
    });
    return reduce_add(add(add(part[0], part[1]), add(part[2], part[3])));
}

}  // namespace

void rms_norm(float* out, const float* x, const float* weight, int cols, int group, float eps) {
    for (int base = 0; base < cols; base += group) {
        const float* xg = x + base;
        const vf inverse = set1(1.0f / sqrtf(sum_of_squares(xg, group) / static_cast<float>(group) + eps));
        for_lanes(group, [&](int i, int count) PENSTOCK_LAMBDA {
            store_some(out + base + i, mul(mul(load_some(xg + i, count), inverse), load_some(weight + i, count)), count);
        });
    }
}

namespace {

PENSTOCK_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

PENSTOCK_INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

PENSTOCK_INLINE uint16_t bf16_of(float x) {
    const uint32_t bits = bits_of(x);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Below it the squares underflow, and without their sum every value would be an outlier.
constexpr float kSmallestLimit = 1e-15f;

constexpr int32_t kOneBits = 0x3F800000;  // of 1.0f

// The largest of a group's values that are no outliers; the outliers' columns are appended to the row's list.
float largest_without_outliers(const float* x, float limit, int32_t column, int32_t*& outlier) {
    float largest = 0.0f;
    for (int i = column; i < column + kGroup; ++i) {
        const float size = fabsf(x[i]);
        if (size > limit) {
            *outlier++ = i;
        } else if (size > largest) {
            largest = size;
        }
    }
    return largest;
}

// An int8 can't be NaN, but the rest of an outlier can: what is broken must not become a plausible number.
void quantize_broken(const Activation& a, int64_t row) {
    const int groups = a.cols / kGroup;
    memset(a.q + row * a.cols, 0, static_cast<size_t>(a.cols));
    for (int64_t i = row * groups; i < (row + 1) * groups; ++i) a.exponent[i] = a.zero_sum[i] = 0;
    memset(a.sum + row * ((groups + 1) & ~1), 0, static_cast<size_t>((groups + 1) & ~1) * sizeof(uint16_t));
    a.outlier[row * a.outliers_per_row] = 0;
    a.outlier_rest[row * a.outliers_per_row] = NAN;
    a.outlier[row * a.outliers_per_row + 1] = kNoColumn;
}

}  // namespace

// The bits of the next power of two above the largest value / 127 of each of sixteen groups. Outliers are not looked at; their
// columns are appended at `outlier`, but those of the first `done` groups, which are there already.
PENSTOCK_INLINE vi choose_scales(const float* x, int group, int done, float limit, int32_t*& outlier) {
    vf largest = largest_of_groups(x + group * kGroup);
    uint32_t above = lanes_above(largest, set1(limit));
    if (above != 0) {
        alignas(64) float sizes[kLanes];
        store(sizes, largest);
        for (; above != 0; above &= above - 1) {
            const int g = __builtin_ctz(above);
            int32_t again[kGroup];
            int32_t* end = g < done ? again : outlier;
            sizes[g] = largest_without_outliers(x, limit, (group + g) * kGroup, end);
            if (g >= done) outlier = end;
        }
        largest = load(sizes);
    }
    const vf wanted = max(mul(largest, set1(1.0f / 127.0f)), set1(kSmallestScale));
    const vi scale = bit_and(add(bits_of(wanted), set1_i(0x7FFFFF)), set1_i(0x7F800000));
    return sub(scale, set1_i(kOneBits));
}

// Sixteen groups of a row side by side, of which the first `done` ones are computed once more.
PENSTOCK_INLINE int32_t* quantize_sixteen(const Activation& a, int64_t row, const float* x, int group, int done, float limit,
                                          int32_t* outlier) {
    const int groups = a.cols / kGroup;
    const vi exponent = choose_scales(x, group, done, limit, outlier), one = set1_i(kOneBits);
    store(a.exponent + row * groups + group, exponent);
    alignas(64) float inverse[kLanes];
    store(inverse, float_of(sub(one, exponent)));
    vb q[kLanes / 2];
    for (int g = 0; g < kLanes; g += 2) {
        const float* from = x + (group + g) * kGroup;
        const vf first = set1(inverse[g]), second = set1(inverse[g + 1]);
        q[g / 2] = rounded_i8(mul(load(from), first), mul(load(from + kLanes), first), mul(load(from + 2 * kLanes), second),
                              mul(load(from + 3 * kLanes), second));
        store64(reinterpret_cast<uint8_t*>(a.q + row * a.cols + (group + g) * kGroup), q[g / 2]);
    }
    const vi sum = sum_of_groups(q), twice = add(sum, sum), four = add(twice, twice);
    store(a.zero_sum + row * groups + group, sub(set1_i(0), add(four, four)));
    store_bf16(a.sum + row * ((groups + 1) & ~1) + group, mul(float_of(add(one, exponent)), to_float(sum)));
    return outlier;
}

// A row of less than sixteen groups, among zeros.
PENSTOCK_INLINE int32_t* quantize_short(const Activation& a, int64_t row, const float* x, float limit, int32_t* outlier) {
    const int groups = a.cols / kGroup;
    alignas(64) float padded[kLanes * kGroup] = {};
    alignas(64) int8_t q[kLanes * kGroup];
    int32_t exponent[kLanes], zero_sum[kLanes];
    uint16_t sum[kLanes];
    memcpy(padded, x, static_cast<size_t>(a.cols) * sizeof(float));
    const Activation one{.q = q, .exponent = exponent, .zero_sum = zero_sum, .sum = sum, .cols = kLanes * kGroup};
    outlier = quantize_sixteen(one, 0, padded, 0, 0, limit, outlier);
    memcpy(a.q + row * a.cols, q, static_cast<size_t>(a.cols));
    memcpy(a.exponent + row * groups, exponent, static_cast<size_t>(groups) * sizeof(int32_t));
    memcpy(a.zero_sum + row * groups, zero_sum, static_cast<size_t>(groups) * sizeof(int32_t));
    memcpy(a.sum + row * ((groups + 1) & ~1), sum, static_cast<size_t>(groups) * sizeof(uint16_t));
    return outlier;
}

void quantize_row(const Activation& a, int64_t row, const float* x) {
    const int groups = a.cols / kGroup;
    float limit = kOutlierRatio * sqrtf(sum_of_squares(x, a.cols) / static_cast<float>(a.cols));
    if (!(limit < INFINITY)) return quantize_broken(a, row);
    limit = limit > kSmallestLimit ? limit : kSmallestLimit;
    int32_t* const outliers = a.outlier + row * a.outliers_per_row;
    int32_t* end = outliers;
    if (groups < kLanes) {
        end = quantize_short(a, row, x, limit, end);
    } else {
        for (int g = 0; g < groups; g += kLanes) {
            const int done = g + kLanes <= groups ? 0 : g + kLanes - groups;
            end = quantize_sixteen(a, row, x, g - done, done, limit, end);
        }
    }
    *end = kNoColumn;
    if (groups % 2) a.sum[row * (groups + 1) + groups] = 0;
    const int8_t* q = a.q + row * a.cols;
    float* const rest = a.outlier_rest + row * a.outliers_per_row;
    for (int i = 0; outliers + i < end; ++i) {
        const int column = outliers[i];
        const float scale = float_of(static_cast<uint32_t>(kOneBits + a.exponent[row * groups + column / kGroup]));
        rest[i] = x[column] - scale * static_cast<float>(q[column]);
    }
}

void to_bf16_row(const Activation& a, int64_t row, const float* x) {
    const int padded = (a.cols + 1) & ~1;
    uint16_t* out = a.bf16 + row * padded;
    for_lanes(a.cols, [&](int i, int count) PENSTOCK_LAMBDA {
        alignas(64) uint16_t t[kLanes];
        store_bf16(t, load_some(x + i, count));
        memcpy(out + i, t, static_cast<size_t>(count) * sizeof(uint16_t));
    });
    if (padded > a.cols) out[a.cols] = 0;
}

void rope_row(float* x, const float* cos, const float* sin, int num_heads, int head_dim, int half) {
    for (int h = 0; h < num_heads; ++h, x += head_dim) {
        for_lanes(half, [&](int i, int count) PENSTOCK_LAMBDA {
            const vf a = load_some(x + i, count), b = load_some(x + half + i, count);
            const vf c = load_some(cos + i, count), s = load_some(sin + i, count);
            store_some(x + i, sub(mul(a, c), mul(b, s)), count);
            store_some(x + half + i, add(mul(b, c), mul(a, s)), count);
        });
    }
}

namespace {

// Two columns of a key next to each other, those of the sixteen positions of its tile side by side.
template <typename T>
PENSTOCK_INLINE void scatter_pairs(T* keys, const T* integers, int column) {
    for (int i = 0; i < kLanes; i += 2) memcpy(keys + (column + i) * kKvTile, integers + i, 2 * sizeof(T));
}

template <typename T>
PENSTOCK_INLINE void scatter(T* values, const T* numbers, int column) {
    for (int i = 0; i < kLanes; ++i) values[(column + i) * 2] = numbers[i];
}

// The next bf16 above largest / 127; NaN if it is no finite number. Never so small that its inverse is infinite.
PENSTOCK_INLINE uint32_t int8_scale_bits(float largest) {
    const float wanted = largest * (1.0f / 127.0f);
    if (!(wanted < INFINITY)) return 0x7FC00000u;
    return (bits_of(wanted > kSmallest ? wanted : kSmallest) + 0xFFFFu) & 0xFFFF0000u;
}

// NaN if one of them is NaN or infinite.
PENSTOCK_INLINE float largest_or_nan(const float* x, int count) {
    vf largest = set1(0.0f), broken = set1(0.0f);
    for (int i = 0; i < count; i += kLanes) {
        const vf a = load(x + i);
        largest = max(largest, abs(a));
        broken = fma(a, set1(0.0f), broken);
    }
    return reduce_max(largest) + reduce_add(broken);
}

// A value that is no finite number breaks its key, and so whatever sees it: integers can't show it, and a NaN in bf16 would
// reach those, too, that give it no weight.
void write_head_int8(const KvLayer& kv, uint8_t* tile, uint8_t* values, int lane, const float* k, const float* v) {
    alignas(64) int8_t integers[kLanes];
    auto* scales = reinterpret_cast<uint16_t*>(tile + kv.scales_offset()) + lane;
    const float largest_value = largest_or_nan(v, kv.head_dim);
    const uint32_t value_scale = int8_scale_bits(largest_value);
    const vf inverse = set1(1.0f / float_of(value_scale));
    for (int d = 0; d < kv.head_dim; d += kLanes) {
        store_rounded_i8(integers, mul(load(v + d), inverse));
        scatter(reinterpret_cast<int8_t*>(values), integers, d);
    }
    for (int group = 0; group < kv.key_groups(); ++group, scales += kKvTile) {
        const int begin = group * kGroup, count = kv.head_dim - begin < kGroup ? kv.head_dim - begin : kGroup;
        const uint32_t scale = int8_scale_bits(largest_or_nan(k + begin, count) + 0.0f * largest_value);
        const vf key_inverse = set1(1.0f / float_of(scale));
        for (int d = begin; d < begin + count; d += kLanes) {
            store_rounded_i8(integers, mul(load(k + d), key_inverse));
            scatter_pairs(reinterpret_cast<int8_t*>(tile + 2 * lane), integers, d);
        }
        *scales = static_cast<uint16_t>(scale >> 16);
    }
    *scales = static_cast<uint16_t>(value_scale >> 16);
}

void write_head_int16(const KvLayer& kv, uint8_t* tile, uint8_t* values, int lane, const float* k, const float* v) {
    IntegerScale scale = integer_scale(k, kv.head_dim);
    const bool is_sound = isfinite(largest_or_nan(v, kv.head_dim));
    if (!is_sound) scale.scale = NAN;
    memcpy(tile + kv.scales_offset() + lane * sizeof(float), &scale.scale, sizeof(float));
    for (int d = 0; d < kv.head_dim; d += kLanes) {
        alignas(64) int16_t integers[kLanes];
        store_integers(integers, load(k + d), scale);
        scatter_pairs(reinterpret_cast<int16_t*>(tile + 4 * lane), integers, d);
        alignas(64) uint16_t numbers[kLanes];
        store_bf16(numbers, is_sound ? load(v + d) : set1(0.0f));
        scatter(reinterpret_cast<uint16_t*>(values), numbers, d);
    }
}

}  // namespace

void kv_write_row(const KvLayer& kv, int64_t slot, const float* k, const float* v, const float* centre) {
    const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
    uint8_t* head = kv.data + block * kv.block_stride();
    const auto write_head = kv.format == KvFormat::kInt8 ? write_head_int8 : write_head_int16;
    for (int h = 0; h < kv.num_kv_heads; ++h, head += kv.head_stride(), k += kv.head_dim, v += kv.head_dim) {
        alignas(64) float centred[kLargestHeadDim];
        const float* key = k;
        if (centre) {
            for (int d = 0; d < kv.head_dim; d += kLanes) store(centred + d, sub(load(k + d), load(centre + h * kv.head_dim + d)));
            key = centred;
        }
        uint8_t* values = head + kv.values_offset() + (offset / 2 * 2 * kv.head_dim + offset % 2) * kv.width();
        write_head(kv, head + offset / kKvTile * kv.tile_stride(), values, static_cast<int>(offset % kKvTile), key, v);
    }
}

void gated_row(float* out, const float* gate, const float* up, int cols, ActivationKind kind) {
    for_lanes(cols, [&](int i, int count) PENSTOCK_LAMBDA {
        store_some(out + i, gated(load_some(gate + i, count), load_some(up + i, count), kind), count);
    });
}

void add_row(float* out, const float* a, const float* b, int cols) {
    for_lanes(cols, [&](int i, int count) PENSTOCK_LAMBDA {
        store_some(out + i, add(load_some(a + i, count), load_some(b + i, count)), count);
    });
}

}  // namespace penstock::PENSTOCK_ISA
