// Paged attention of one query tile over one KV head, in segments of 256 absolute positions.
//
// For every (query, head) pair the segments are computed alone and merged in ascending order:
//   segment: scores -> maximum m, weights p = exp(s - m), l = sum p, o = sum p v
//   merge:   (m, l, o) of the segments so far with the next one, rescaled to the larger maximum
// A query's own position is the only bound it sees, so chunked and whole prefill, decode and a
// later split of segments over threads all give the same bits. Online softmax: arXiv 2112.05682.

#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kPairs = kAttentionPairs;
constexpr int kMaxHeadDim = 512;

// What one (query, head) pair knows of the segments so far.
struct State {
    float max;
    float sum;
};

PENSTOCK_INLINE float exp_scalar(float x) {
    alignas(64) float t[kLanes];
    store(t, exp(set1(x)));
    return t[0];
}

PENSTOCK_INLINE const uint16_t* head_of_block(const KvLayer& kv, const AttentionTask& t, int position) {
    return kv.data + t.block_table[position / kv.block_size] * kv.block_stride() + t.kv_head * kv.head_stride();
}

// How many tiles of keys, or of columns of values, go side by side so that few pairs still fill the pipeline.
template <int kCount>
constexpr int side_by_side() {
    return kCount <= 3 ? 4 : kCount <= 6 ? 2 : 1;
}

// Scores of kTiles * 16 positions from `position` on.
template <int kCount, int kTiles>
PENSTOCK_INLINE void score_tiles(const KvLayer& kv, const AttentionTask& t, const float* const* q, int position,
                                 float* scores) {
    const uint16_t* keys[kTiles];
    for (int u = 0; u < kTiles; ++u) {
        const int at = position + u * kKvTile;
        keys[u] = head_of_block(kv, t, at) + at % kv.block_size * kv.head_dim;
    }
    vf acc[kTiles][kCount];
    for (int u = 0; u < kTiles; ++u) {
        for (int p = 0; p < kCount; ++p) acc[u][p] = set1(0.0f);
    }
    for (int d = 0; d < kv.head_dim; ++d) {
        for (int u = 0; u < kTiles; ++u) {
            const vf k = load_bf16(keys[u] + d * kKvTile);
            for (int p = 0; p < kCount; ++p) acc[u][p] = fma(set1(q[p][d]), k, acc[u][p]);
        }
    }
    for (int u = 0; u < kTiles; ++u) {
        for (int p = 0; p < kCount; ++p) store(scores + p * kSegment + u * kKvTile, mul(acc[u][p], set1(t.scale)));
    }
}

// scores[pair][position - begin] = scale * q . k for the positions [begin, end) of a segment
template <int kCount>
PENSTOCK_INLINE void score_pairs(const KvLayer& kv, const AttentionTask& t, const float* const* q, int begin, int end,
                                 float* scores) {
    constexpr int kTiles = side_by_side<kCount>();
    int position = begin;
    for (; position + kTiles * kKvTile <= end; position += kTiles * kKvTile) {
        score_tiles<kCount, kTiles>(kv, t, q, position, scores + position - begin);
    }
    for (; position < end; position += kKvTile) score_tiles<kCount, 1>(kv, t, q, position, scores + position - begin);
}

template <typename F>
PENSTOCK_INLINE void dispatch_count(int count, F f) {
    switch (count) {
        case 1: f.template operator()<1>(); break;
        case 2: f.template operator()<2>(); break;
        case 3: if constexpr (kPairs >= 3) f.template operator()<3>(); break;
        case 4: if constexpr (kPairs >= 4) f.template operator()<4>(); break;
        case 5: if constexpr (kPairs >= 5) f.template operator()<5>(); break;
        case 6: if constexpr (kPairs >= 6) f.template operator()<6>(); break;
        case 7: if constexpr (kPairs >= 7) f.template operator()<7>(); break;
        case 8: if constexpr (kPairs >= 8) f.template operator()<8>(); break;
        case 9: if constexpr (kPairs >= 9) f.template operator()<9>(); break;
        case 10: if constexpr (kPairs >= 10) f.template operator()<10>(); break;
        case 11: if constexpr (kPairs >= 11) f.template operator()<11>(); break;
        case 12: if constexpr (kPairs >= 12) f.template operator()<12>(); break;
        default: break;
    }
}

// Softmax of one pair's scores over the positions [from, to) of a segment that begins at `begin`; the others become 0.
PENSTOCK_INLINE State soften(float* scores, int begin, int from, int to, int end, float softcap) {
    const int lo = from - begin, hi = to - begin, padded = (end - begin + kLanes - 1) / kLanes * kLanes;
    const vf nothing = set1(-INFINITY);
    if (softcap > 0.0f) {
        for (int i = 0; i < hi; ++i) scores[i] = softcap * tanhf(scores[i] / softcap);
    }
    vf largest = nothing;
    for (int i = 0; i < padded; i += kLanes) {
        vf s = load(scores + i);
        if (i + kLanes > hi) s = first(hi > i ? hi - i : 0, s, nothing);
        if (i < lo) s = first(lo - i < kLanes ? lo - i : kLanes, nothing, s);
        store(scores + i, s);
        largest = max(largest, s);
    }
    const float top = reduce_max(largest);
    vf sum = set1(0.0f);
    for (int i = 0; i < padded; i += kLanes) {
        vf p = exp(sub(load(scores + i), set1(top)));
        if (i + kLanes > hi) p = first(hi > i ? hi - i : 0, p, set1(0.0f));
        if (i < lo) p = first(lo - i < kLanes ? lo - i : kLanes, set1(0.0f), p);
        store(scores + i, p);
        sum = add(sum, p);
    }
    return {top, reduce_add(sum)};
}

// kColumns * 16 columns of o from column d on.
template <int kCount, int kColumns>
PENSTOCK_INLINE void weigh_columns(const KvLayer& kv, const AttentionTask& t, const float* scores, int begin, int end, int d,
                                   float* out) {
    vf acc[kColumns][kCount];
    for (int c = 0; c < kColumns; ++c) {
        for (int p = 0; p < kCount; ++p) acc[c][p] = set1(0.0f);
    }
    for (int tile = begin; tile < end; tile += kKvTile) {
        const int offset = tile % kv.block_size;
        const uint16_t* values = head_of_block(kv, t, tile) + static_cast<int64_t>(kv.block_size + offset) * kv.head_dim + d;
        const int count = end - tile < kKvTile ? end - tile : kKvTile;
        for (int j = 0; j < count; ++j) {
            const float* weight = scores + tile - begin + j;
            for (int c = 0; c < kColumns; ++c) {
                const vf v = load_bf16(values + static_cast<int64_t>(j) * kv.head_dim + c * kLanes);
                for (int p = 0; p < kCount; ++p) acc[c][p] = fma(set1(weight[p * kSegment]), v, acc[c][p]);
            }
        }
    }
    for (int c = 0; c < kColumns; ++c) {
        for (int p = 0; p < kCount; ++p) store(out + p * kMaxHeadDim + c * kLanes, acc[c][p]);
    }
}

// o[pair][d] = sum over positions [begin, end) of p[pair] * v[d]
template <int kCount>
PENSTOCK_INLINE void weigh_pairs(const KvLayer& kv, const AttentionTask& t, const float* scores, int begin, int end,
                                 float* out) {
    constexpr int kColumns = side_by_side<kCount>();
    int d = 0;
    for (; d + kColumns * kLanes <= kv.head_dim; d += kColumns * kLanes) {
        weigh_columns<kCount, kColumns>(kv, t, scores, begin, end, d, out + d);
    }
    for (; d < kv.head_dim; d += kLanes) weigh_columns<kCount, 1>(kv, t, scores, begin, end, d, out + d);
}

// state, o := state, o merged with the next segment's
PENSTOCK_INLINE void merge(State& state, float* o, const State& next, const float* next_o, int head_dim) {
    const float top = state.max > next.max ? state.max : next.max;
    const float a = exp_scalar(state.max - top), b = exp_scalar(next.max - top);
    state = {top, state.sum * a + next.sum * b};
    for (int d = 0; d < head_dim; d += kLanes) {
        store(o + d, fma(load(next_o + d), set1(b), mul(load(o + d), set1(a))));
    }
}

// Up to kPairs pairs that share their queries' positions range; pairs are ordered query-major.
void attend(const KvLayer& kv, const AttentionTask& t, int first_pair, int num_pairs, float* scratch) {
    float* scores = scratch;
    float* segment_o = scores + kPairs * kSegment;
    float* o = segment_o + kPairs * kMaxHeadDim;
    const float* q[kPairs];
    int last[kPairs], first_seen[kPairs];
    State state[kPairs];
    for (int p = 0; p < num_pairs; ++p) {
        const int query = (first_pair + p) / t.heads_per_kv, head = (first_pair + p) % t.heads_per_kv;
        q[p] = t.q + query * t.ld + static_cast<int64_t>(head) * kv.head_dim;
        last[p] = t.first_position + query;
        first_seen[p] = t.window > 0 && last[p] - t.window + 1 > 0 ? last[p] - t.window + 1 : 0;
    }
    const int end_all = last[num_pairs - 1] + 1;
    const int begin_all = first_seen[0] / kSegment * kSegment;
    bool started[kPairs] = {};
    for (int begin = begin_all; begin < end_all; begin += kSegment) {
        const int end = begin + kSegment < end_all ? begin + kSegment : end_all;
        dispatch_count(num_pairs, [&]<int kCount>() { score_pairs<kCount>(kv, t, q, begin, end, scores); });
        State next[kPairs];
        for (int p = 0; p < num_pairs; ++p) {
            const int from = first_seen[p] > begin ? first_seen[p] : begin;
            const int to = last[p] + 1 < end ? last[p] + 1 : end;
            next[p] = soften(scores + p * kSegment, begin, from, to > begin ? to : begin, end, t.softcap);
        }
        dispatch_count(num_pairs, [&]<int kCount>() { weigh_pairs<kCount>(kv, t, scores, begin, end, segment_o); });
        for (int p = 0; p < num_pairs; ++p) {
            if (last[p] < begin || first_seen[p] >= end) continue;  // nothing of this segment is seen by this pair
            if (!started[p]) {
                state[p] = next[p];
                memcpy(o + p * kMaxHeadDim, segment_o + p * kMaxHeadDim, sizeof(float) * kv.head_dim);
                started[p] = true;
            } else {
                merge(state[p], o + p * kMaxHeadDim, next[p], segment_o + p * kMaxHeadDim, kv.head_dim);
            }
        }
    }
    for (int p = 0; p < num_pairs; ++p) {
        const int query = (first_pair + p) / t.heads_per_kv, head = (first_pair + p) % t.heads_per_kv;
        float* out = t.out + query * t.ld + static_cast<int64_t>(head) * kv.head_dim;
        const vf inverse = set1(1.0f / state[p].sum);
        for (int d = 0; d < kv.head_dim; d += kLanes) store(out + d, mul(load(o + p * kMaxHeadDim + d), inverse));
    }
}

}  // namespace

void attention(const KvLayer& kv, const AttentionTask& t, float* scratch) {
    const int pairs = t.num_queries * t.heads_per_kv;
    for (int first_pair = 0; first_pair < pairs; first_pair += kPairs) {
        attend(kv, t, first_pair, pairs - first_pair < kPairs ? pairs - first_pair : kPairs, scratch);
    }
}

int64_t attention_scratch_floats(int) { return kPairs * (kSegment + 2 * kMaxHeadDim); }

}  // namespace penstock::PENSTOCK_ISA
