// Attention of one text's queries over the text's own keys and values, which are rows of float32 buffers.
//
// All three become 16-bit integers, of which an instruction multiplies and adds pairs: twice the work of a float32 multiply-add. Queries and
// keys have a scale for each token, values one for each column. A tile is a few queries: all their scores are computed, then the weights,
// then their sums of values. Texts are short enough for the scores of a tile to stay in the cache.
//
// A task's keys and values are rounded once, and a column's scale is that of the values which the task sees: tasks must begin at
// positions that the text alone determines.

#include "integers.h"
#include "parts.h"
#include "simd.h"
#include "softmax.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kRows = kTextRows, kVectors = kTextVectors;  // of a tile, whose sums fit the registers
constexpr int kBlock = 32;                                 // positions whose products of weights and values are one sum of integers
constexpr float kLargestWeight = 32767.0f, kLargestValue = 2047.0f;
static_assert(kBlock * 32767LL * 2047LL < (1LL << 31) && kBlock % (kVectors * kLanes) == 0);
constexpr int kPairBytes = kLanes * 4;  // of sixteen pairs of integers

// Where a task keeps its integers and results. Positions are counted from `begin` on, a multiple of kBlock.
struct TextScratch {
    uint8_t* keys;      // [count / 16][pairs of columns][16][2]
    uint8_t* queries;   // likewise, of one head
    uint8_t* values;    // [count / 2][value_cols][2]
    float *key_scales, *query_scales, *value_scales;
    float* columns;     // of sixteen rows
    float* scores;      // [kRows][count]
    int16_t* weights;   // [kRows][count]
    float* biases;      // of a head by distance: of the key's position less the query's, from -(num_tokens + kBlock) on
    int begin, count, pairs, value_cols;
};

// The positions [first, end) that a query sees.
PENSTOCK_INLINE int first_seen(const TextAttentionTask& t, int query) {
    return t.window > 0 && query >= t.window ? query - t.window + 1 : 0;
}
PENSTOCK_INLINE int end_seen(const TextAttentionTask& t, int query) {
    if (t.is_causal) return query + 1;
    return t.window > 0 ? least(query + t.window, t.num_tokens) : t.num_tokens;
}

// `count` rows of a head's columns as integers, sixteen rows side by side; the last sixteen end in copies of the last row. A scale is NaN
// if any column isn't finite.
void round_rows(const float* x, int64_t ld, int count, int head_dim, float* columns, uint8_t* out, float* scales) {
    const int pairs = (head_dim + 1) / 2;
    for (int at = 0; at < count; at += kLanes, out += pairs * kPairBytes) {
        vf squares[4], largest[4];  // of every fourth column: one sum alone would wait for each addition before the next
        for (int p = 0; p < 4; ++p) squares[p] = largest[p] = set1(0.0f);
        for (int col = 0; col < head_dim; col += kLanes) {
            const int cols = least(head_dim - col, kLanes);
            transpose(columns + col * kLanes, x + at * ld + col, ld, least(count - at, kLanes), cols);
            for (int i = col; i < col + kLanes; i += 4) {  // beyond the last column there are zeros
                for (int p = 0; p < 4; ++p) {
                    const vf a = load(columns + (i + p) * kLanes);
                    squares[p] = fma(a, a, squares[p]);
                    largest[p] = max(largest[p], abs(a));
                }
            }
        }
        const vf square = add(add(squares[0], squares[1]), add(squares[2], squares[3]));
        const vf most = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
        const vf by_norm = div(sqrt(square), set1(kLargestNorm)), by_largest = div(most, set1(kLargestInteger));
        const vf scale = max(by_largest, by_norm);  // in this order NaN, which is in by_norm if there is one, stays
        store(scales + at, add(scale, mul(scale, set1(0.0f))));
        const vf inverse = up_to(div(set1(1.0f), scale), set1(1.0f / kSmallest));
        for (int pair = 0; pair < pairs; ++pair) {
            const float* const both = columns + 2 * pair * kLanes;
            store_pairs_i16(out + pair * kPairBytes, mul(load(both), inverse), mul(load(both + kLanes), inverse));
        }
    }
}

// The values of the positions from s.begin to `end`, two beside each other; the last one's partner may be itself.
void round_values(const TextAttentionTask& t, const TextScratch& s, int end) {
    const int count = end - s.begin;
    const float* const v = t.v + s.begin * t.kv_ld;
    for (int col = 0; col < s.value_cols; col += kLanes) {
        const int cols = least(t.head_dim - col, kLanes);
        vf inverse = set1(0.0f);
        if (cols > 0) {
            vf largest = set1(0.0f), zero = set1(0.0f);  // the latter becomes NaN if any value is not finite
            for (int i = 0; i < count; ++i) {
                const vf x = load_some(v + i * t.kv_ld + col, cols);
                largest = max(largest, abs(x));
                zero = fma(x, zero, zero);
            }
            store(s.value_scales + col, add(mul(largest, set1(1.0f / kLargestValue)), zero));
            inverse = up_to(div(set1(kLargestValue), largest), set1(1.0f / kSmallest));
        }
        for (int i = 0; i < count; i += 2) {
            vf a = set1(0.0f), b = a;
            if (cols > 0) {
                a = load_some(v + i * t.kv_ld + col, cols);
                b = load_some(v + (i + 1 < count ? i + 1 : i) * t.kv_ld + col, cols);
            }
            store_pairs_i16(s.values + (int64_t{i / 2} * s.value_cols + col) * 4, mul(a, inverse), mul(b, inverse));
        }
    }
}

// The row of a head's biases, widened to all distances of the text, in units of log2.
void spread_biases(const TextAttentionTask& t, int head, float* biases) {
    const float* const row = t.distances + int64_t{head} * (2 * t.num_distances + 1) + t.num_distances;
    const int most = t.num_tokens + kBlock;
    for (int i = -most; i < most; ++i) {
        const int distance = i < -t.num_distances ? -t.num_distances : i > t.num_distances ? t.num_distances : i;
        biases[i + most] = row[distance] * kLog2E;
    }
}

// Scores, in units of log2, of kRows queries and the positions [from, to), whole blocks.
PENSTOCK_INLINE void score(const TextScratch& s, const uint8_t* const (&q)[kRows], const float (&factors)[kRows], int from, int to) {
    for (int at = from; at < to; at += kVectors * kLanes) {
        vi sums[kRows][kVectors];
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) sums[r][v] = set1_i(0);
        }
        const uint8_t* const keys = s.keys + int64_t{at / kLanes} * s.pairs * kPairBytes;
        for (int pair = 0; pair < s.pairs; ++pair) {
            vb key[kVectors];
            for (int v = 0; v < kVectors; ++v) key[v] = load64(keys + (v * s.pairs + pair) * kPairBytes);
            PENSTOCK_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const vb columns = set1_pair(q[r] + pair * kPairBytes);
                for (int v = 0; v < kVectors; ++v) sums[r][v] = dot2_i16(sums[r][v], key[v], columns);
            }
        }
        for (int v = 0; v < kVectors; ++v) {
            const vf scale = load(s.key_scales + at + v * kLanes);
            for (int r = 0; r < kRows; ++r) {
                store(s.scores + int64_t{r} * s.count + at + v * kLanes, mul(mul(to_float(sums[r][v]), scale), set1(factors[r])));
            }
        }
    }
}

// Adds to these scores those of the queries with the keys of distances, and those of the keys with the queries of distances.
PENSTOCK_INLINE void score_distances(const TextAttentionTask& t, const TextScratch& s, const uint8_t* const (&q)[kRows],
                                     const float (&factors)[kRows], const int (&at_own)[kRows], int from, int to) {
    const auto* const far_keys = reinterpret_cast<const uint8_t*>(t.relative_keys);
    const auto* const far_queries = reinterpret_cast<const uint8_t*>(t.relative_queries);
    const vf query_factor = set1(t.relative_query_scale * (t.scale * kLog2E));
    for (int at = from; at < to; at += kVectors * kLanes) {
        vi by_query[kRows][kVectors], by_key[kRows][kVectors];
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) by_query[r][v] = by_key[r][v] = set1_i(0);
        }
        const uint8_t* const keys = s.keys + int64_t{at / kLanes} * s.pairs * kPairBytes;
        for (int pair = 0; pair < s.pairs; ++pair) {
            vb key[kVectors];
            for (int v = 0; v < kVectors; ++v) key[v] = load64(keys + (v * s.pairs + pair) * kPairBytes);
            for (int r = 0; r < kRows; ++r) {
                const vb columns = set1_pair(q[r] + pair * kPairBytes);
                for (int v = 0; v < kVectors; ++v) {
                    const int64_t distance = (int64_t{pair} * t.num_relative + at_own[r] + at + v * kLanes) * 4;
                    by_query[r][v] = dot2_i16(by_query[r][v], load64(far_keys + distance), columns);
                    by_key[r][v] = dot2_i16(by_key[r][v], load64(far_queries + distance), key[v]);
                }
            }
        }
        for (int v = 0; v < kVectors; ++v) {
            const vf key_factor = mul(load(s.key_scales + at + v * kLanes), query_factor);
            for (int r = 0; r < kRows; ++r) {
                float* const scores = s.scores + int64_t{r} * s.count + at + v * kLanes;
                const vf both = fma(to_float(by_query[r][v]), set1(factors[r] * t.relative_key_scale), load(scores));
                store(scores, fma(to_float(by_key[r][v]), key_factor, both));
            }
        }
    }
}

// The weights of a query's scores of the positions [from, to), of which it sees [lo, hi), as integers; the others weigh nothing. Returns
// their sum, with the weight of the sink, which is null or a score.
PENSTOCK_INLINE float soften_text(float* scores, const float* biases, const float* sink, int16_t* weights, int from, int to, int lo,
                                  int hi) {
    const vf lowest = set1(kLowest);
    if (biases) {
        for (int i = from; i < to; i += kLanes) store(scores + i, add(load(scores + i), load(biases + i)));
    }
    for (int i = from; i < lo; i += kLanes) store(scores + i, within(i, lo, hi, load(scores + i), lowest));
    for (int i = hi / kLanes * kLanes; i < to; i += kLanes) store(scores + i, within(i, lo, hi, load(scores + i), lowest));
    vf largest[2] = {lowest, lowest}, sum[2] = {set1(0.0f), set1(0.0f)};
    for (int i = from; i < to; i += 2 * kLanes) {
        for (int j = 0; j < 2; ++j) largest[j] = max(largest[j], load(scores + i + j * kLanes));
    }
    const vf top = set1(reduce_max(max(largest[0], largest[1])));
    for (int i = from; i < to; i += 2 * kLanes) {
        for (int j = 0; j < 2; ++j) {
            const vf below = sub(load(scores + i + j * kLanes), top), power = kScaleSaturates ? exp2_saturating(below) : exp2(below);
            const vf weight = round(mul(power, set1(kLargestWeight)));
            sum[j] = add(sum[j], weight);
            store_i16(weights + i + j * kLanes, weight);
        }
    }
    const float total = reduce_add(add(sum[0], sum[1]));
    return sink ? total + reduce_max(mul(exp2_saturating(sub(set1(*sink * kLog2E), top)), set1(kLargestWeight))) : total;
}

// The sums of values, of the positions [from, to), with the weights of `count` queries.
PENSTOCK_INLINE void sum_values(const TextAttentionTask& t, const TextScratch& s, const int16_t* const (&weights)[kRows], int from, int to,
                                const float* factors, float* out, int count) {
    for (int col = 0; col < s.value_cols; col += kVectors * kLanes) {
        vf totals[kRows][kVectors];
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) totals[r][v] = set1(0.0f);
        }
        for (int at = from; at < to; at += kBlock) {
            vi sums[kRows][kVectors];
            for (int r = 0; r < kRows; ++r) {
                for (int v = 0; v < kVectors; ++v) sums[r][v] = set1_i(0);
            }
            for (int i = at; i < at + kBlock; i += 2) {
                const uint8_t* const values = s.values + (int64_t{i / 2} * s.value_cols + col) * 4;
                vb value[kVectors];
                for (int v = 0; v < kVectors; ++v) value[v] = load64(values + v * kPairBytes);
                PENSTOCK_UNROLL
                for (int r = 0; r < kRows; ++r) {
                    const vb both = set1_pair(weights[r] + i);
                    for (int v = 0; v < kVectors; ++v) sums[r][v] = dot2_i16(sums[r][v], value[v], both);
                }
            }
            for (int r = 0; r < kRows; ++r) {
                for (int v = 0; v < kVectors; ++v) totals[r][v] = add(totals[r][v], to_float(sums[r][v]));
            }
        }
        for (int v = 0; v < kVectors; ++v) {
            const int first = col + v * kLanes, cols = least(t.head_dim - first, kLanes);
            if (cols <= 0) break;
            const vf scale = load(s.value_scales + first);
            for (int r = 0; r < count; ++r) store_some(out + r * t.q_ld + first, mul(mul(totals[r][v], scale), set1(factors[r])), cols);
        }
    }
}

// One head of up to kRows queries from `query` on.
void attend_tile(const TextAttentionTask& t, const TextScratch& s, int head, int query, int count) {
    const uint8_t* queries[kRows];
    const int16_t* weights[kRows];
    float factors[kRows];
    int at_own[kRows];  // the distance of position 0 from a query
    for (int r = 0; r < kRows; ++r) {  // rows beyond the last are the first one again
        const int row = r < count ? r : 0, at = query + row - t.first_query;
        queries[r] = s.queries + int64_t{at / kLanes} * s.pairs * kPairBytes + at % kLanes * 4;
        weights[r] = s.weights + int64_t{row} * s.count;
        factors[r] = s.query_scales[at] * (t.scale * kLog2E);
        at_own[r] = t.same_position - (query + row);
    }
    const int from = (first_seen(t, query) - s.begin) / kBlock * kBlock;
    const int to = static_cast<int>(whole(end_seen(t, query + count - 1) - s.begin, kBlock));
    score(s, queries, factors, from, to);
    if (t.relative_keys) score_distances(t, s, queries, factors, at_own, from, to);
    alignas(64) float sums[kLanes] = {};
    for (int r = 0; r < count; ++r) {
        const int row = query + r;
        const float* const biases = t.distances ? s.biases + t.num_tokens + kBlock - row + s.begin : nullptr;
        sums[r] = soften_text(s.scores + int64_t{r} * s.count, biases, t.sinks ? t.sinks + head : nullptr,
                              s.weights + int64_t{r} * s.count, from, to, first_seen(t, row) - s.begin, end_seen(t, row) - s.begin);
    }
    store(sums, div(set1(1.0f), load(sums)));
    sum_values(t, s, weights, from, to, sums, t.out + query * t.q_ld + head * t.head_dim, count);
}

// For a task that sees `num_seen` positions of a text of `num_tokens`.
PENSTOCK_INLINE TextScratch make_text_scratch(Parts& memory, int num_seen, int num_tokens, int head_dim) {
    TextScratch s;
    s.count = static_cast<int>(whole(num_seen, kBlock));
    s.pairs = (head_dim + 1) / 2;
    s.value_cols = static_cast<int>(whole(head_dim, kVectors * kLanes));
    const int64_t rows = whole(least(num_tokens, kTextQueries), kBlock), count = s.count;
    s.keys = reinterpret_cast<uint8_t*>(memory.take(count * s.pairs));
    s.queries = reinterpret_cast<uint8_t*>(memory.take(rows * s.pairs));
    s.values = reinterpret_cast<uint8_t*>(memory.take(count / 2 * s.value_cols));
    s.key_scales = memory.take(count);
    s.query_scales = memory.take(rows);
    s.value_scales = memory.take(s.value_cols);
    s.columns = memory.take(whole(head_dim, kLanes) * kLanes);
    s.scores = memory.take(kRows * count);
    s.weights = reinterpret_cast<int16_t*>(memory.take(kRows * count / 2));
    s.biases = memory.take(2 * (int64_t{num_tokens} + kBlock));
    return s;
}

}  // namespace

void text_attention(const TextAttentionTask& t, float* memory) {
    const int begin = first_seen(t, t.first_query) / kBlock * kBlock, end = end_seen(t, t.end_query - 1);
    Parts parts{memory};
    TextScratch s = make_text_scratch(parts, end - begin, t.num_tokens, t.head_dim);
    s.begin = begin;
    round_rows(t.k + begin * t.kv_ld, t.kv_ld, end - begin, t.head_dim, s.columns, s.keys, s.key_scales);
    round_values(t, s, end);
    for (int head = 0; head < t.heads_per_kv; ++head) {
        const float* const q = t.q + t.first_query * t.q_ld + head * t.head_dim;
        round_rows(q, t.q_ld, t.end_query - t.first_query, t.head_dim, s.columns, s.queries, s.query_scales);
        if (t.distances) spread_biases(t, head, s.biases);
        for (int query = t.first_query; query < t.end_query; query += kRows) {
            attend_tile(t, s, head, query, least(t.end_query - query, kRows));
        }
    }
}

int64_t text_attention_scratch_floats(int num_tokens, int head_dim) {
    Parts parts{nullptr};
    static_cast<void>(make_text_scratch(parts, num_tokens, num_tokens, head_dim));
    return parts.taken;
}

}  // namespace penstock::PENSTOCK_ISA
