// Recurrent layers, some columns of one row of the step at a time: its tokens in order, from a state to the state after them.

#include "activation.h"
#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kTokensTogether = 16;  // of a convolution: their inputs stay in the first-level cache
constexpr int kTokensAhead = 2;      // of linear attention, whose inputs are fetched: they lie pages apart

// sums = the state's rows, each times its number of k
template <int kVectors>
PENSTOCK_INLINE void sum_rows(const float* const* rows, int count, int column, const float* k, vf (&sums)[kVectors]) {
    PENSTOCK_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[j] = set1(0.0f);
    for (int i = 0; i < count; ++i) {
        const vf factor = set1(k[i]);
        const float* const row = rows[i] + column;
        PENSTOCK_UNROLL
        for (int j = 0; j < kVectors; ++j) sums[j] = fma(factor, load(row + j * kLanes), sums[j]);
    }
}

// Writes the new state decay * from + k^T added to `to`, and out = q times that. With kHasNext also sums = next_k times that, for the next
// token: the state is read once per token.
template <int kVectors, bool kHasNext>
PENSTOCK_INLINE void update(const float* const* from, float* const* to, int count, int column, float decay, const float* q, const float* k,
                            const float* next_k, const vf (&added)[kVectors], vf (&out)[kVectors], vf (&sums)[kVectors]) {
    const vf kept = set1(decay);
    PENSTOCK_UNROLL
    for (int j = 0; j < kVectors; ++j) out[j] = sums[j] = set1(0.0f);
    for (int i = 0; i < count; ++i) {
        const vf key = set1(k[i]), query = set1(q[i]), next = kHasNext ? set1(next_k[i]) : key;
        const float* const before = from[i] + column;  // read once: the compiler must assume that stores change pointers
        float* const after = to[i] + column;
        PENSTOCK_UNROLL
        for (int j = 0; j < kVectors; ++j) {
            const vf state = fma(key, added[j], mul(kept, load(before + j * kLanes)));
            store(after + j * kLanes, state);
            out[j] = fma(query, state, out[j]);
            if constexpr (kHasNext) sums[j] = fma(next, state, sums[j]);
        }
    }
}

template <int kVectors>
void attend(const LinearAttentionTask& task, int column) {
    const float* const* from = task.from;
    const float *q = task.q, *k = task.k;
    vf sums[kVectors];
    if (task.is_delta) sum_rows<kVectors>(from, task.key_dim, column, k, sums);
    for (int t = 0; t < task.num_tokens; ++t, q += task.ld, k += task.ld) {
        const float* const v = task.v + t * task.v_ld + column;
        if (t + kTokensAhead < task.num_tokens) {
            for (int i = 0; i < task.key_dim; i += kLanes) prefetch(q + kTokensAhead * task.ld + i), prefetch(k + kTokensAhead * task.ld + i);
            for (int j = 0; j < kVectors; ++j) prefetch(v + kTokensAhead * task.v_ld + j * kLanes);
        }
        const float decay = task.decays[t * task.ld];
        const vf rate = set1(task.rates[t * task.ld]);
        vf values[kVectors], added[kVectors], out[kVectors];
        PENSTOCK_UNROLL
        for (int j = 0; j < kVectors; ++j) {
            values[j] = load_some(v + j * kLanes, least(kLanes, task.columns - column - j * kLanes));
            added[j] = mul(rate, task.is_delta ? fma(set1(-decay), sums[j], values[j]) : values[j]);
        }
        if (task.is_delta && t + 1 < task.num_tokens) {
            update<kVectors, true>(from, task.to, task.key_dim, column, decay, q, k, k + task.ld, added, out, sums);
        } else {
            update<kVectors, false>(from, task.to, task.key_dim, column, decay, q, k, nullptr, added, out, sums);
        }
        PENSTOCK_UNROLL
        for (int j = 0; j < kVectors; ++j) {
            if (task.skip) out[j] = fma(set1(*task.skip), values[j], out[j]);
            store_some(task.out + t * task.out_ld + column + j * kLanes, out[j], least(kLanes, task.columns - column - j * kLanes));
        }
        from = task.to;
    }
}

}  // namespace

void linear_attention(const LinearAttentionTask& task) {
    for (int column = 0; column < task.columns; column += kStateVectors * kLanes) {
        with_count<kStateVectors>((task.columns - column + kLanes - 1) / kLanes, [&]<int kVectors>() PENSTOCK_LAMBDA {
            attend<kVectors>(task, column);
        });
    }
}

void causal_conv(const CausalConvTask& task) {
    alignas(64) float seen[kMostTaps - 1 + kTokensTogether][kStateColumns];  // inputs, those before the tokens first
    const int before = task.taps - 1;
    for (int i = 0; i < before; ++i) memcpy(seen[i], task.from[i], static_cast<size_t>(task.columns) * sizeof(float));
    for (int first = 0; first < task.num_tokens; first += kTokensTogether) {
        const int count = least(task.num_tokens - first, kTokensTogether);
        const float* const x = task.x + first * task.x_ld;
        for (int t = 0; t < count; ++t) memcpy(seen[before + t], x + t * task.x_ld, static_cast<size_t>(task.columns) * sizeof(float));
        for (int column = 0; column < task.columns; column += kLanes) {
            const int lanes = least(kLanes, task.columns - column);
            vf weight[kMostTaps];
            for (int tap = 0; tap <= before; ++tap) weight[tap] = load_some(task.weight + tap * task.weight_ld + column, lanes);
            for (int t = 0; t < count; ++t) {
                vf sum = mul(weight[0], load_some(&seen[t][column], lanes));
                for (int tap = 1; tap <= before; ++tap) sum = fma(weight[tap], load_some(&seen[t + tap][column], lanes), sum);
                if (task.bias) sum = add(sum, load_some(task.bias + column, lanes));
                store_some(task.out + (first + t) * task.out_ld + column, silu(sum), lanes);
            }
        }
        for (int i = 0; i < before; ++i) memcpy(seen[i], seen[count + i], static_cast<size_t>(task.columns) * sizeof(float));
    }
    for (int i = 0; i < before; ++i) memcpy(task.to[i], seen[i], static_cast<size_t>(task.columns) * sizeof(float));
}

}  // namespace penstock::PENSTOCK_ISA
