// Attention of one text's queries over the text's own keys and values, which are rows of float32 buffers; nothing is rounded.
//
// The keys that a task sees are copied transposed, sixteen side by side, and the values to rows of whole vectors, so that a tile of
// queries reads both one after the other. For a tile all scores are computed, then the weights, then their sums of values: texts are
// short enough for their scores to stay in the cache.

#include "parts.h"
#include "simd.h"
#include "softmax.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kRows = kTextRows, kVectors = kTextVectors;  // of a tile, whose sums fit the registers
constexpr int kKeys = kVectors * kLanes;                   // whose scores are computed together

PENSTOCK_INLINE int up_to_keys(int n) { return (n + kKeys - 1) / kKeys * kKeys; }
PENSTOCK_INLINE int up_to_lanes(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Where a task keeps its copies and results. `keys` are those of the positions from `begin` on, a multiple of kKeys.
struct TextScratch {
    float* keys;    // [count / 16][head_dim][16]
    float* values;  // [count][value_cols]
    float* scores;  // [kRows][count]
    float* biases;  // of a head by distance: of the key's position less the query's, from -(num_tokens + kKeys) on
    int begin, count, value_cols;
};

// The positions [first, end) that a query sees.
PENSTOCK_INLINE int first_seen(const TextAttentionTask& t, int query) {
    return t.window > 0 && query >= t.window ? query - t.window + 1 : 0;
}
PENSTOCK_INLINE int end_seen(const TextAttentionTask& t, int query) {
    if (t.is_causal) return query + 1;
    return t.window > 0 && query + t.window < t.num_tokens ? query + t.window : t.num_tokens;
}

void copy_keys(const TextAttentionTask& t, const TextScratch& s, int end) {
    for (int at = 0; at < s.count; at += kLanes) {
        const int first = s.begin + at, count = first >= end ? 0 : end - first < kLanes ? end - first : kLanes;
        float* const out = s.keys + int64_t{at} * t.head_dim;
        const float* const in = t.k + first * t.kv_ld;
        int col = 0;
        if (count == kLanes) {
            for (; col + kLanes <= t.head_dim; col += kLanes) transpose(out + col * kLanes, in + col, t.kv_ld);
        }
        for (; col < t.head_dim; ++col) {
            for (int i = 0; i < kLanes; ++i) out[col * kLanes + i] = i < count ? in[i * t.kv_ld + col] : 0.0f;
        }
    }
}

void copy_values(const TextAttentionTask& t, const TextScratch& s, int end) {
    for (int at = 0; s.begin + at < end; ++at) {
        const float* const in = t.v + (s.begin + at) * t.kv_ld;
        for (int col = 0; col < t.head_dim; col += kLanes) {
            const int count = t.head_dim - col < kLanes ? t.head_dim - col : kLanes;
            store(s.values + int64_t{at} * s.value_cols + col, load_some(in + col, count));
        }
    }
}

// The row of a head's biases, widened to all distances of the text, in units of log2.
void spread_biases(const TextAttentionTask& t, int head, float* biases) {
    const float* const row = t.distances + int64_t{head} * (2 * t.num_distances + 1) + t.num_distances;
    const int most = t.num_tokens + kKeys;
    for (int i = -most; i < most; ++i) {
        const int distance = i < -t.num_distances ? -t.num_distances : i > t.num_distances ? t.num_distances : i;
        biases[i + most] = row[distance] * kLog2E;
    }
}

// Scores of kRows queries and the keys [from, to), whole tiles of keys.
PENSTOCK_INLINE void score(const TextScratch& s, const float* const (&q)[kRows], int head_dim, int from, int to) {
    for (int at = from; at < to; at += kKeys) {
        vf sums[kRows][kVectors];
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) sums[r][v] = set1(0.0f);
        }
        const float* const keys = s.keys + int64_t{at} * head_dim;
        for (int col = 0; col < head_dim; ++col) {
            vf key[kVectors];
            for (int v = 0; v < kVectors; ++v) key[v] = load(keys + (v * head_dim + col) * kLanes);
            PENSTOCK_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const vf value = set1(q[r][col]);
                for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(key[v], value, sums[r][v]);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) store(s.scores + int64_t{r} * s.count + at + v * kLanes, sums[r][v]);
        }
    }
}

// Weights of a query's scores, of the positions [from, to) of which it sees [lo, hi); the others weigh nothing. Returns their sum.
PENSTOCK_INLINE float soften_text(float* scores, const float* biases, int from, int to, int lo, int hi, float factor) {
    const vf lowest = set1(kLowest), scale = set1(factor);
    vf largest = lowest, sum = set1(0.0f);
    for (int i = from; i < to; i += kLanes) {
        const vf x = load(scores + i), scaled = biases ? fma(x, scale, load(biases + i)) : mul(x, scale);
        const vf seen = within(i, lo, hi, scaled, lowest);
        store(scores + i, seen);
        largest = max(largest, seen);
    }
    const vf top = set1(reduce_max(largest));
    for (int i = from; i < to; i += kLanes) {
        const vf weight = within(i, lo, hi, exp2(sub(load(scores + i), top)), set1(0.0f));
        store(scores + i, weight);
        sum = add(sum, weight);
    }
    return reduce_add(sum);
}

// The sums of values, of the positions [from, to), with the weights of `count` queries.
PENSTOCK_INLINE void sum_values(const TextAttentionTask& t, const TextScratch& s, int from, int to, const float (&factors)[kRows],
                                float* out, int count) {
    for (int col = 0; col < s.value_cols; col += kKeys) {
        const int vectors = s.value_cols - col < kKeys ? (s.value_cols - col) / kLanes : kVectors;
        vf sums[kRows][kVectors];
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) sums[r][v] = set1(0.0f);
        }
        for (int i = from; i < to; ++i) {
            const float* const values = s.values + int64_t{i} * s.value_cols + col;
            vf value[kVectors];
            for (int v = 0; v < kVectors; ++v) value[v] = load(values + (v < vectors ? v : 0) * kLanes);
            PENSTOCK_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const vf weight = set1(s.scores[int64_t{r} * s.count + i]);
                for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(value[v], weight, sums[r][v]);
            }
        }
        for (int r = 0; r < count; ++r) {
            for (int v = 0; v < vectors; ++v) {
                const int at = col + v * kLanes, cols = t.head_dim - at < kLanes ? t.head_dim - at : kLanes;
                store_some(out + r * t.q_ld + at, mul(sums[r][v], set1(factors[r])), cols);
            }
        }
    }
}

// One head of up to kRows queries from `query` on.
void attend_tile(const TextAttentionTask& t, const TextScratch& s, int head, int query, int count) {
    const float* const q = t.q + query * t.q_ld + head * t.head_dim;
    const float* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = q + (r < count ? r : 0) * t.q_ld;
    const int first = first_seen(t, query) - s.begin, end = end_seen(t, query + count - 1) - s.begin;
    const int from = first / kKeys * kKeys, to = up_to_keys(end);
    score(s, rows, t.head_dim, from, to);
    float factors[kRows] = {};
    for (int r = 0; r < count; ++r) {
        const int row = query + r;
        const float* const biases = t.distances ? s.biases + t.num_tokens + kKeys - row + s.begin : nullptr;
        const float sum = soften_text(s.scores + int64_t{r} * s.count, biases, from, to, first_seen(t, row) - s.begin,
                                      end_seen(t, row) - s.begin, t.scale * kLog2E);
        factors[r] = 1.0f / sum;
    }
    sum_values(t, s, first, end, factors, t.out + query * t.q_ld + head * t.head_dim, count);
}

}  // namespace

void text_attention(const TextAttentionTask& t, float* memory) {
    const int first = first_seen(t, t.first_query), end = end_seen(t, t.end_query - 1);
    TextScratch s;
    s.begin = first / kKeys * kKeys;
    s.count = up_to_keys(end - s.begin);
    s.value_cols = up_to_lanes(t.head_dim);
    s.keys = memory;
    s.values = s.keys + int64_t{s.count} * t.head_dim;
    s.scores = s.values + int64_t{s.count} * s.value_cols;
    s.biases = s.scores + int64_t{kRows} * s.count;
    copy_keys(t, s, end);
    copy_values(t, s, end);
    for (int head = 0; head < t.heads_per_kv; ++head) {
        if (t.distances) spread_biases(t, head, s.biases);
        for (int query = t.first_query; query < t.end_query; query += kRows) {
            attend_tile(t, s, head, query, t.end_query - query < kRows ? t.end_query - query : kRows);
        }
    }
}

int64_t text_attention_scratch_floats(int num_tokens, int head_dim) {
    const int64_t count = up_to_keys(num_tokens);
    return count * (head_dim + up_to_lanes(head_dim) + kRows) + 2 * (int64_t{num_tokens} + kKeys);
}

}  // namespace penstock::PENSTOCK_ISA
