// Operations on one row of a step: norms, rope, activations, sums, bf16, and what is done to logits.

#include "activation.h"
#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

// The sum over [0, n) of what `add_to(sum, i, count)` adds of `count` numbers from i on. Four sums side by side: one alone would wait for
// each addition before the next. In the order of quantize.cpp.
template <typename F>
PENSTOCK_INLINE float sum_up(int n, F add_to) {
    vf part[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int p = 0; p < 4; ++p) part[p] = add_to(part[p], i + p * kLanes, kLanes);
    }
    for (int p = 0; p < 4; ++p, i += kLanes) {
        if (i >= n) break;
        part[p] = add_to(part[p], i, least(n - i, kLanes));
    }
    return reduce_add(add(add(part[0], part[1]), add(part[2], part[3])));
}

PENSTOCK_INLINE float dot(const float* x, const float* y, int n) {
    return sum_up(n, [&](vf sum, int i, int count) PENSTOCK_LAMBDA { return fma(load_some(x + i, count), load_some(y + i, count), sum); });
}

}  // namespace

void rms_norm(float* out, const float* x, const float* weight, int cols, int group, float eps) {
    for (int base = 0; base < cols; base += group) {
        const float* xg = x + base;
        const vf inverse = set1(1.0f / sqrtf(dot(xg, xg, group) / static_cast<float>(group) + eps));
        for_lanes(group, [&](int i, int count) PENSTOCK_LAMBDA {
            store_some(out + base + i, mul(mul(load_some(xg + i, count), inverse), load_some(weight + i, count)), count);
        });
    }
}

void layer_norm(float* out, const float* x, const float* weight, const float* bias, int cols, float eps) {
    const float n = static_cast<float>(cols);
    const vf mean = set1(sum_up(cols, [&](vf sum, int i, int count) PENSTOCK_LAMBDA { return add(sum, load_some(x + i, count)); }) / n);
    const float squares = sum_up(cols, [&](vf sum, int i, int count) PENSTOCK_LAMBDA {
        const vf v = sub(load_some(x + i, count), mean), centred = count == kLanes ? v : first(count, v, set1(0.0f));
        return fma(centred, centred, sum);
    });
    const vf inverse = set1(1.0f / sqrtf(squares / n + eps));
    for_lanes(cols, [&](int i, int count) PENSTOCK_LAMBDA {
        const vf normed = mul(mul(sub(load_some(x + i, count), mean), inverse), load_some(weight + i, count));
        store_some(out + i, bias ? add(normed, load_some(bias + i, count)) : normed, count);
    });
}

void to_bf16_row(const Activation& a, int64_t row, const float* x) {
    uint16_t* out = a.bf16 + row * a.bf16_stride;
    for_lanes(a.cols, [&](int i, int count) PENSTOCK_LAMBDA {
        alignas(64) uint16_t t[kLanes];
        store_bf16(t, load_some(x + i, count));
        memcpy(out + i, t, static_cast<size_t>(count) * sizeof(uint16_t));
    });
    if (a.cols % 2) out[a.cols] = 0;
}

// All heads of some columns before the next: their angles stay in registers.
void rope_row(float* x, const float* cos, const float* sin, int num_heads, int head_dim, int half) {
    for_lanes(half, [&](int i, int count) PENSTOCK_LAMBDA {
        const vf c = load_some(cos + i, count), s = load_some(sin + i, count);
        float *first = x + i, *second = first + half;
        for (int h = 0; h < num_heads; ++h, first += head_dim, second += head_dim) {
            const vf a = load_some(first, count), b = load_some(second, count);
            store_some(first, sub(mul(a, c), mul(b, s)), count);
            store_some(second, add(mul(b, c), mul(a, s)), count);
        }
    });
}

void gated_row(float* out, const float* gate, const float* up, int cols, ActivationKind kind) {
    for_gate(kind, [&](auto activate) PENSTOCK_LAMBDA {
        for_lanes(cols, [&](int i, int count) PENSTOCK_LAMBDA {
            store_some(out + i, activate(load_some(gate + i, count), load_some(up + i, count)), count);
        });
    });
}

void activate_row(float* out, const float* x, int cols, ActivationKind kind) {
    for_activation(kind, [&](auto activate) PENSTOCK_LAMBDA {
        for_lanes(cols, [&](int i, int count) PENSTOCK_LAMBDA { store_some(out + i, activate(load_some(x + i, count)), count); });
    });
}

void add_row(float* out, const float* a, const float* b, int cols, float factor) {
    for_lanes(cols, [&](int i, int count) PENSTOCK_LAMBDA {
        store_some(out + i, fma(load_some(b + i, count), set1(factor), load_some(a + i, count)), count);
    });
}

void cap_row(float* x, int cols, float scale, float cap) {
    const float inverse = cap > 0.0f ? scale / cap : 0.0f;
    for_lanes(cols, [&](int i, int count) PENSTOCK_LAMBDA {
        const vf v = load_some(x + i, count);
        if (cap > 0.0f) {
            store_some(x + i, mul(set1(cap), tanh(mul(v, set1(inverse)))), count);
        } else {
            store_some(x + i, mul(v, set1(scale)), count);
        }
    });
}

void dot_rows(float* out, const float* x, const float* w, int rows, int cols) {
    for (int i = 0; i < rows; ++i, w += cols) out[i] = dot(x, w, cols);
}

void weighted_sum(float* out, const float* x, int64_t ld, const int32_t* places, const float* shares, int count, int cols) {
    for_lanes(cols, [&](int i, int some) PENSTOCK_LAMBDA {
        vf sum = mul(load_some(x + places[0] * ld + i, some), set1(shares[0]));
        for (int j = 1; j < count; ++j) sum = fma(load_some(x + places[j] * ld + i, some), set1(shares[j]), sum);
        store_some(out + i, sum, some);
    });
}

}  // namespace penstock::PENSTOCK_ISA
