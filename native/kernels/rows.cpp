// Operations on one row of a step: norm, quantisation, embedding, rope, KV write, activation.

#include "activation.h"
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

PENSTOCK_INLINE vf load_some(const float* p, int count) {
    if (count == kLanes) return load(p);
    alignas(64) float t[kLanes] = {};
    for (int i = 0; i < count; ++i) t[i] = p[i];
    return load(t);
}

PENSTOCK_INLINE void store_some(float* p, vf a, int count) {
    if (count == kLanes) return store(p, a);
    alignas(64) float t[kLanes];
    store(t, a);
    for (int i = 0; i < count; ++i) p[i] = t[i];
}

PENSTOCK_INLINE float bf16_to_float(uint16_t b) {
    const uint32_t bits = static_cast<uint32_t>(b) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

}  // namespace

void rms_norm(float* out, const float* x, const float* weight, int cols, int group, float eps) {
    for (int base = 0; base < cols; base += group) {
        const float* xg = x + base;
        vf squares = set1(0.0f);
        for_lanes(group, [&](int i, int count) {
            const vf v = load_some(xg + i, count);
            squares = fma(v, v, squares);
        });
        const vf inverse = set1(1.0f / sqrtf(reduce_add(squares) / static_cast<float>(group) + eps));
        for_lanes(group, [&](int i, int count) {
            store_some(out + base + i, mul(mul(load_some(xg + i, count), inverse), load_some(weight + i, count)), count);
        });
    }
}

namespace {

PENSTOCK_INLINE float sum_of_squares(const float* x, int n) {
    vf squares = set1(0.0f);
    for_lanes(n, [&](int i, int count) {
        const vf v = load_some(x + i, count);
        squares = fma(v, v, squares);
    });
    return reduce_add(squares);
}

}  // namespace

namespace {

// An int8 can't be NaN, but its scale can: what is broken must not become a plausible number.
void quantize_nan(const Activation& a, int64_t row) {
    const int groups = a.cols / kGroup;
    memset(a.q + row * a.cols, 0, static_cast<size_t>(a.cols));
    for (int64_t i = row * groups; i < (row + 1) * groups; ++i) a.scale[i] = a.sum[i] = NAN;
    a.num_outliers[row] = 0;
}

}  // namespace

void quantize_row(const Activation& a, int64_t row, const float* x) {
    const int groups = a.cols / kGroup;
    const float limit = kOutlierRatio * sqrtf(sum_of_squares(x, a.cols) / static_cast<float>(a.cols));
    if (limit != limit) return quantize_nan(a, row);
    int8_t *q = a.q + row * a.cols, *fine = a.fine + row * a.cols;
    int32_t num_outliers = 0;
    for (int g = 0; g < groups; ++g, x += kGroup, q += kGroup, fine += kGroup) {
        const vf x0 = load(x), x1 = load(x + kLanes);
        const float largest = reduce_max(max(abs(x0), abs(x1)));
        const float scale = largest / 127.0f;
        const vf inverse = set1(largest >= kSmallestActivation ? 127.0f / largest : 0.0f);
        const vf s0 = mul(x0, inverse), s1 = mul(x1, inverse);
        const vf q0 = round(s0), q1 = round(s1);
        store_i8(q, q0);
        store_i8(q + kLanes, q1);
        float total = reduce_add(add(q0, q1));  // integers below 2^24: exact in any order
        if (largest > limit) {
            const vf f0 = round(mul(sub(s0, q0), set1(kFineSteps))), f1 = round(mul(sub(s1, q1), set1(kFineSteps)));
            store_i8(fine, f0);
            store_i8(fine + kLanes, f1);
            total += reduce_add(add(f0, f1)) / kFineSteps;
            a.outliers[row * groups + num_outliers++] = g;
        }
        a.scale[row * groups + g] = scale;
        a.sum[row * groups + g] = scale * total;
    }
    a.num_outliers[row] = num_outliers;
}

void to_bf16_row(const Activation& a, int64_t row, const float* x) {
    const int padded = (a.cols + 1) & ~1;
    uint16_t* out = a.bf16 + row * padded;
    for_lanes(a.cols, [&](int i, int count) {
        alignas(64) uint16_t t[kLanes];
        store_bf16(t, load_some(x + i, count));
        memcpy(out + i, t, static_cast<size_t>(count) * sizeof(uint16_t));
    });
    if (padded > a.cols) out[a.cols] = 0;
}

void embed_row(float* out, const PackedMatrix& w, int index, float scale) {
    const int64_t panel = index / kPanel, lane = index % kPanel;
    if (w.kind == WeightKind::kBf16) {
        const int pairs = (w.cols + 1) / 2;
        const uint16_t* data = reinterpret_cast<const uint16_t*>(w.quants) + panel * pairs * 2 * kPanel;
        for (int k = 0; k < w.cols; ++k) out[k] = bf16_to_float(data[(k / 2 * kPanel + lane) * 2 + k % 2]) * scale;
        return;
    }
    const bool nibbles = w.kind != WeightKind::kU8Symmetric;
    const bool affine = w.kind == WeightKind::kU4Affine;
    const int groups = w.cols / kGroup;
    const int bytes = kPanel * (nibbles ? kGroup / 2 : kGroup), scales = affine ? 2 * kPanel : kPanel;
    alignas(64) float d[kPanel], m[kPanel];
    for (int g = 0; g < groups; ++g) {
        const uint8_t* q = w.quants + (panel * groups + g) * bytes;
        const uint16_t* s = w.scales + (panel * groups + g) * scales;
        store(d, load_f16(s));
        const float dl = d[lane];
        if (affine) store(m, load_f16(s + kPanel));
        const float ml = affine ? m[lane] : dl * (nibbles ? -8.0f : -128.0f);
        for (int k = 0; k < kGroup; ++k) {
            int value;
            if (nibbles) {
                const uint8_t byte = q[(k % 16) / 4 * 64 + lane * 4 + k % 4];
                value = k < 16 ? byte & 0x0F : byte >> 4;
            } else {
                value = q[k / 4 * 64 + lane * 4 + k % 4];
            }
            out[g * kGroup + k] = (dl * static_cast<float>(value) + ml) * scale;
        }
    }
}

void rope_row(float* x, const float* cos, const float* sin, int num_heads, int head_dim, int half) {
    for (int h = 0; h < num_heads; ++h, x += head_dim) {
        for_lanes(half, [&](int i, int count) {
            const vf a = load_some(x + i, count), b = load_some(x + half + i, count);
            const vf c = load_some(cos + i, count), s = load_some(sin + i, count);
            store_some(x + i, sub(mul(a, c), mul(b, s)), count);
            store_some(x + half + i, add(mul(b, c), mul(a, s)), count);
        });
    }
}

void kv_write_row(const KvLayer& kv, int64_t slot, const float* k, const float* v) {
    const int64_t block = slot / kv.block_size, offset = slot % kv.block_size;
    uint16_t* head = kv.data + block * kv.block_stride();
    for (int h = 0; h < kv.num_kv_heads; ++h, head += kv.head_stride()) {
        uint16_t* keys = head + offset / kKvTile * kKvTile * kv.head_dim + offset % kKvTile;
        uint16_t* values = head + static_cast<int64_t>(kv.block_size) * kv.head_dim + offset * kv.head_dim;
        for (int d = 0; d < kv.head_dim; d += kLanes, k += kLanes, v += kLanes) {
            alignas(64) uint16_t t[kLanes];
            store_bf16(t, load(k));
            for (int i = 0; i < kLanes; ++i) keys[(d + i) * kKvTile] = t[i];
            store_bf16(values + d, load(v));
        }
    }
}

void gated_row(float* out, const float* gate, const float* up, int cols, ActivationKind kind) {
    for_lanes(cols, [&](int i, int count) {
        store_some(out + i, gated(load_some(gate + i, count), load_some(up + i, count), kind), count);
    });
}

void add_row(float* out, const float* a, const float* b, int cols) {
    for_lanes(cols, [&](int i, int count) {
        store_some(out + i, add(load_some(a + i, count), load_some(b + i, count)), count);
    });
}

}  // namespace penstock::PENSTOCK_ISA
