// Attention to one segment: scores -> a bound m of them, weights p = 2^(s - m), l = sum p, o = sum p v. Included by attention.cpp
// alone.
//
// Scores are dot products of integers (integers.h), of as many columns as share a scale exact in any order, and count in
// units of log2: the softmax's factor log2(e) is part of their scale. What is particular to a format of the KV cache is in
// Int8Kv and Int16Kv, the softmax in softmax.h.

#pragma once

#include "attention_queries.h"
#include "attention_scratch.h"
#include "integers.h"
#include "softmax.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

// Where the keys and values of tiles of 16 positions are.
struct Tiles {
    const uint8_t* keys[kSegmentTiles];
    const uint8_t* values[kSegmentTiles];
};

// Those of one segment, and for each one that is fetched into the cache meanwhile: keys while keys are read and while weights are
// computed, values while values are.
struct Segment {
    Tiles tiles, ahead;
};

// The integers of kPairs pairs from one of them on, and of every group of columns their scales and what sums start at.
struct Queries {
    const uint8_t* integers;
    const float* scales;
    const int32_t* starts;
};

// Keys and values of 8 bits, KvFormat::kInt8. The weights of a query in a segment, each times its value's scale, are rounded to
// bytes of which the largest is 240 to 255. So no weight has few steps beside one that is large and whose value is small, as that of a
// sequence's first position often is.
struct Int8Kv {
    static constexpr bool kIsInt8 = true;
    // What weighs nothing: a query's scale is in its scores, which may be as large as 1e30, and not in their factor.
    static constexpr float kNothing = -1.0e37f;
    static constexpr int kColumns = 4;    // that are multiplied at once
    static constexpr int kScaleBytes = kKvTile * 2;
    static PENSTOCK_MEMBER int steps_of_group(int) { return kGroup / kColumns; }
    static PENSTOCK_MEMBER vf load_scales(const uint8_t* p) { return load_bf16((const uint16_t*)p); }
    static PENSTOCK_MEMBER vi start(const Queries& q, int at) { return set1_i(q.starts[at]); }
    static PENSTOCK_MEMBER vi dot(vi acc, vb keys, const uint8_t* q) { return dot4_i8(acc, keys, set1_pair(q)); }
    static PENSTOCK_MEMBER vf scale(const Queries& q, int at, vf scales) { return mul(scales, set1(q.scales[at])); }

    using Weight = uint8_t;
    static constexpr float kLogLargest = 7.906890596f;  // to base 2, of 240: 255 less what log2_below may be too low
    static constexpr int kPositions = 4;                // whose values are multiplied at once
    using Sum = vi;
    static PENSTOCK_MEMBER Sum zero() { return set1_i(0); }
    static PENSTOCK_MEMBER Sum add_values(Sum acc, vb values, vb weights) { return dot4_u8(acc, weights, values); }
    static PENSTOCK_MEMBER vf sum_of(Sum acc, float factor) { return mul(to_float(acc), set1(factor)); }
};

// Keys of 16 bits and values in bf16, KvFormat::kInt16. l sums the weights as they were rounded to bf16, so that their mean
// error cancels.
struct Int16Kv {
    static constexpr bool kIsInt8 = false;
    static constexpr float kNothing = -1.0e30f;  // with any factor that a query may have
    static constexpr int kColumns = 2;
    static constexpr int kScaleBytes = kKvTile * 4;
    static PENSTOCK_MEMBER int steps_of_group(int steps) { return steps; }
    static PENSTOCK_MEMBER vf load_scales(const uint8_t* p) { return load((const float*)p); }
    static PENSTOCK_MEMBER vi start(const Queries&, int) { return set1_i(0); }
    static PENSTOCK_MEMBER vi dot(vi acc, vb keys, const uint8_t* q) { return dot2_i16(acc, keys, set1_pair(q)); }
    static PENSTOCK_MEMBER vf scale(const Queries&, int, vf scales) { return scales; }

    using Weight = uint16_t;
    static constexpr float kLogLargest = 0.0f;
    static constexpr int kPositions = 2;
    using Sum = vf;
    static PENSTOCK_MEMBER Sum zero() { return set1(0.0f); }
    static PENSTOCK_MEMBER Sum add_values(Sum acc, vb values, vb weights) { return dot2_bf16(acc, values, weights); }
    static PENSTOCK_MEMBER vf sum_of(Sum acc, float) { return acc; }
};

constexpr int kValueBytes = 64;  // of kPositions positions of sixteen columns of the values

// The weights of a pair, `row` being its place in the scratch.
template <typename Kv>
PENSTOCK_INLINE typename Kv::Weight* weights_of(const Scratch& scratch, int row) {
    return reinterpret_cast<typename Kv::Weight*>(scratch.weights) + row * kSegment;
}

// How many tiles of keys, or of sixteen columns of values, go side by side so that few pairs still fill the pipeline.
template <int kCount>
constexpr int side_by_side() {
    return kCount * 2 > kPairs ? (kPairs >= 12 ? 2 : 1) : kCount * 4 > kPairs ? (kPairs >= 12 ? 4 : 2) : 4;
}

template <int kMost, typename F>
PENSTOCK_INLINE void dispatch_count(int count, F f) {
    switch (count) {
        case 1: f.template operator()<1>(); break;
        case 2: if constexpr (kMost >= 2) f.template operator()<2>(); break;
        case 3: if constexpr (kMost >= 3) f.template operator()<3>(); break;
        case 4: if constexpr (kMost >= 4) f.template operator()<4>(); break;
        case 5: if constexpr (kMost >= 5) f.template operator()<5>(); break;
        case 6: if constexpr (kMost >= 6) f.template operator()<6>(); break;
        case 7: if constexpr (kMost >= 7) f.template operator()<7>(); break;
        case 8: if constexpr (kMost >= 8) f.template operator()<8>(); break;
        case 9: if constexpr (kMost >= 9) f.template operator()<9>(); break;
        case 10: if constexpr (kMost >= 10) f.template operator()<10>(); break;
        case 11: if constexpr (kMost >= 11) f.template operator()<11>(); break;
        case 12: if constexpr (kMost >= 12) f.template operator()<12>(); break;
        default: break;
    }
}

// Dot products, times the keys' scales, of kCount pairs and the kTiles * 16 positions from `tile` on. The integer sums of a group
// of columns stay in registers, and with AVX-512 the sums over groups, too.
template <typename Kv, int kCount, int kTiles, bool kFetch>
PENSTOCK_INLINE void score_tiles(const Segment& segment, int tile, const Queries& q, int steps, float* scores) {
    constexpr int kKeyBytes = kLanes * kQueryBytes;
    const uint8_t* const* keys = segment.tiles.keys + tile;
    const uint8_t* const* ahead = segment.ahead.keys + tile;
    const int group_steps = Kv::steps_of_group(steps), fetched = steps / 2;  // the others: KeyFetcher
    int64_t scales = int64_t{steps} * kKeyBytes;
    vf sum[kTiles][kCount];
    PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) {
        PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) sum[u][p] = set1(0.0f);
    }
    int d = 0, group = 0;
    do {  // at least once, or the compiler keeps zeros in memory; so below
        const int end = d + group_steps < steps ? d + group_steps : steps;
        vi acc[kTiles][kCount];
        PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
            const vi start = Kv::start(q, group + p);
            PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) acc[u][p] = start;
        }
        do {
            vb k[kTiles];
            PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) {
                if constexpr (kFetch) {
                    if (d < fetched) prefetch(ahead[u] + d * kKeyBytes);
                }
                k[u] = load64(keys[u] + d * kKeyBytes);
            }
            PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
                const uint8_t* some = q.integers + (d * kPairs + p) * kQueryBytes;
                PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) acc[u][p] = Kv::dot(acc[u][p], k[u], some);
            }
        } while (++d < end);
        PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) {
            const vf scale = Kv::load_scales(keys[u] + scales);
            if constexpr (kFetch) prefetch(ahead[u] + scales);
            PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
                sum[u][p] = fma(to_float(acc[u][p]), Kv::scale(q, group + p, scale), sum[u][p]);
            }
        }
        scales += Kv::kScaleBytes;
        group += kPairs;
    } while (d < steps);
    PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) {
        PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) store(scores + p * kSegment + u * kKvTile, sum[u][p]);
    }
}

// scores[pair][16 * tile ...] of the tiles [from, end) of a segment
template <typename Kv, int kCount, bool kFetch>
__attribute__((noinline)) void score_pairs(const Segment& segment, int from, int end, const Queries& q, int head_dim,
                                           float* scores) {
    constexpr int kTiles = kScoreSums < 4 * kCount ? kScoreSums / kCount : 4;
    const int steps = head_dim / Kv::kColumns;
    int i = from;
    for (; i + kTiles <= end; i += kTiles) score_tiles<Kv, kCount, kTiles, kFetch>(segment, i, q, steps, scores + i * kKvTile);
    if constexpr (kTiles > 2) {
        if (i + 2 <= end) {
            score_tiles<Kv, kCount, 2, kFetch>(segment, i, q, steps, scores + i * kKvTile);
            i += 2;
        }
    }
    for (; i < end; ++i) score_tiles<Kv, kCount, 1, kFetch>(segment, i, q, steps, scores + i * kKvTile);
}

// The positions of a segment that a query sees.
struct Seen {
    int lo, hi;
};

// Fetches the second half of each tile of keys a few at a time, so that memory has something to do while weights are computed.
struct KeyFetcher {
    const uint8_t* const* tiles;
    int at, end;  // tiles
    int begin_bytes, end_bytes;

    PENSTOCK_MEMBER void fetch(int count) {
        for (const int stop = at + count < end ? at + count : end; at < stop; ++at) {
            for (int i = begin_bytes; i < end_bytes; i += 64) prefetch(tiles[at] + i);
        }
    }
};

// The end of those that are multiplied with the last of the first `end` positions.
template <typename Kv>
PENSTOCK_INLINE int padded_end(int end) {
    return (end + Kv::kPositions - 1) / Kv::kPositions * Kv::kPositions;
}

// kColumns * 16 columns of o from column d on.
template <typename Kv, int kCount, int kColumns>
PENSTOCK_INLINE void weigh_columns(const Segment& segment, int from, int end, const Scratch& scratch, int head_dim, int d,
                                   float* out) {
    typename Kv::Sum acc[kColumns][kCount];
    for (int c = 0; c < kColumns; ++c) {
        for (int p = 0; p < kCount; ++p) acc[c][p] = Kv::zero();
    }
    const typename Kv::Weight* const weights = weights_of<Kv>(scratch, 0);
    const auto add_some = [&](const uint8_t* values, int at) __attribute__((always_inline)) {
        vb v[kColumns];
        for (int c = 0; c < kColumns; ++c) v[c] = load64(values + c * kValueBytes);
        for (int p = 0; p < kCount; ++p) {
            const vb some = set1_pair(weights + p * kSegment + at);
            for (int c = 0; c < kColumns; ++c) acc[c][p] = Kv::add_values(acc[c][p], v[c], some);
        }
    };
    const int64_t stride = int64_t{kValueBytes} / kLanes * head_dim;  // bytes of kPositions positions
    const int64_t column = int64_t{kValueBytes} / kLanes * d;
    // Integers beyond the end are harmless, as their weights are zero; a bf16 there might be NaN.
    const int whole = Kv::kIsInt8 ? padded_end<Kv>(end) : end / Kv::kPositions * Kv::kPositions;
    for (int at = from; at < whole;) {
        const uint8_t* values = segment.tiles.values[at / kKvTile] + column;
        const uint8_t* ahead = segment.ahead.values[at / kKvTile] + column;
        for (const int stop = whole - at > kKvTile ? at + kKvTile : whole; at < stop; at += Kv::kPositions) {
            for (int c = 0; c < kColumns; ++c) prefetch(ahead + c * kValueBytes);
            add_some(values, at);
            values += stride;
            ahead += stride;
        }
    }
    if (!Kv::kIsInt8 && end % 2) add_some(scratch.odd + column, end - 1);
    for (int p = 0; p < kCount; ++p) {
        for (int c = 0; c < kColumns; ++c) store(out + p * head_dim + c * kLanes, Kv::sum_of(acc[c][p], scratch.factor[p]));
    }
}

// o[pair][d] = sum over positions [from, end) of the segment of p[pair] * v[d]
template <typename Kv, int kCount>
__attribute__((noinline)) void weigh_pairs(const Segment& segment, int from, int end, const Scratch& scratch, int head_dim,
                                           float* out) {
    constexpr int kColumns = side_by_side<kCount>();
    int d = 0;
    for (; d + kColumns * kLanes <= head_dim; d += kColumns * kLanes) {
        weigh_columns<Kv, kCount, kColumns>(segment, from, end, scratch, head_dim, d, out + d);
    }
    for (; d < head_dim; d += kLanes) weigh_columns<Kv, kCount, 1>(segment, from, end, scratch, head_dim, d, out + d);
}

// The values of the segment's last position, `end` - 1, with zeros beside them: nothing is written there yet.
PENSTOCK_INLINE void copy_odd_values(const Tiles& tiles, int end, int head_dim, uint8_t* odd) {
    const uint8_t* values = tiles.values[end / kKvTile] + end % kKvTile / 2 * 4 * head_dim;
    for (int i = 0; i < 4 * head_dim; i += 64) store64(odd + i, even_halves(load64(values + i)));
}

// Of the values of a segment's first `end` positions, and their sizes. No number becomes zero: its key is none either, and breaks what
// sees it.
PENSTOCK_INLINE void load_value_scales(const KvLayer& kv, const Tiles& tiles, int end, const Scratch& scratch) {
    const int64_t offset = kv.scales_offset() + int64_t{2} * kv.key_groups() * kKvTile;
    const vf zero = set1(0.0f);
    for (int i = 0; i < step_above(end); i += kLanes) {
        const vf scales = i < end ? load_bf16((const uint16_t*)(tiles.keys[i / kKvTile] + offset)) : zero;
        const vf some = max(within(i, 0, end, scales, zero), zero);
        store(scratch.value_scales + i, some);
        store(scratch.sizes + i, log2_below(some));
    }
}

// Weights of the pairs [at, at + count), all of one query and the first of them in row `row` of the scratch, from their scores;
// and the bounds of their scores and their sums of weights. Weights are needed for the positions [from, end).
template <typename Kv>
PENSTOCK_INLINE void weigh_query(const AttentionTask& t, const Pairs& pairs, int at, int count, int row, Seen seen, int from, int end,
                                 const Scratch& scratch, KeyFetcher& keys, const State& out) {
    float* scores = scratch.scores + row * kSegment;
    const int first = step_below(seen.lo), stop = step_above(seen.hi);
    const bool is_capped = t.softcap > 0.0f;
    float shift[kPairs];
    for (int p = 0; p < count; ++p) {
        float* own = scores + p * kSegment;
        keys.fetch(2);
        if (is_capped) cap(own, seen.lo, seen.hi, pairs.factor[at + p], t.softcap);
        mask(own, seen.lo, seen.hi, Kv::kNothing);
        const float factor = is_capped ? 1.0f : pairs.factor[at + p];
        const float largest =
            Kv::kIsInt8 ? largest_weight(own, scratch.sizes, first, stop, factor) : largest_of(own, first, stop) * factor;
        out.max[at + p] = shift[p] = bound_of(largest) - Kv::kLogLargest;
        scratch.factor[row + p] = 1.0f;
        if (fabsf(largest) > 0x1p16f) {  // where the bound is too far from it
            const float top = largest_of(own, first, stop);
            for (int i = first; i < stop; i += kLanes) store(own + i, sub(load(own + i), set1(top)));
            out.max[at + p] = top * factor;  // to which a size can't be added: it would be lost
            shift[p] = 0.0f;
            if constexpr (Kv::kIsInt8) {
                shift[p] = bound_of(largest_weight(own, scratch.sizes, first, stop, factor)) - Kv::kLogLargest;
                scratch.factor[row + p] = exp2f(shift[p]);
            }
        }
    }
    for (int p = 0; p < count; ++p) {
        const float *own = scores + p * kSegment, factor = is_capped ? 1.0f : pairs.factor[at + p];
        typename Kv::Weight* own_weights = weights_of<Kv>(scratch, row + p);
        keys.fetch(4);
        if constexpr (Kv::kIsInt8) {
            const float sum = soften_scaled(own, scratch.value_scales, own_weights, first, stop, factor, shift[p], pairs.dither[at + p]);
            out.sum[at + p] = scratch.factor[row + p] * sum;
        } else {
            out.sum[at + p] = soften(own, own_weights, first, stop, factor, shift[p]);
        }
        for (int i = from; i < first; ++i) own_weights[i] = 0;
        for (int i = stop; i < end; ++i) own_weights[i] = 0;
    }
}

// Queries of the task that comes next, and where its results go: what stands where the pairs [at, at + count) of this one do.
PENSTOCK_INLINE void fetch_pairs(const AttentionTask& next, const Pairs& pairs, int at, int count, int head_dim) {
    for (int p = at; p < at + count; ++p) {
        for (int d = 0; d < head_dim; d += kLanes) {
            prefetch(next.q + pairs.offset[p] + d);
            prefetch(next.out + pairs.offset[p] + d);
        }
    }
}

// The segment that begins at `begin`, for the pairs [at, at + count); nothing of it has a meaning for a pair that does not see it.
template <typename Kv>
void attend_segment(const AttentionTask& t, const Pairs& pairs, int at, int count, int begin, const Segment& segment,
                    int head_dim, const Scratch& scratch, const State& out) {
    // Positions are relative to the segment from here on.
    const int last = pairs.last[at + count - 1] - begin, end = last < kSegment ? last + 1 : kSegment, padded = padded_end<Kv>(end);
    const int from = pairs.first[at] > begin ? step_below(pairs.first[at] - begin) : 0;
    const int groups = (head_dim + kGroup - 1) / kGroup, num_tiles = (end + kKvTile - 1) / kKvTile;
    for (int p = 0; p < count; p += kScorePairs) {
        dispatch_count<kScorePairs>(count - p < kScorePairs ? count - p : kScorePairs, [&]<int kCount>() {
            const auto score = at + p == 0 ? score_pairs<Kv, kCount, true> : score_pairs<Kv, kCount, false>;
            const Queries q{integers_of(scratch, at + p, head_dim, kQueryBytes / Kv::kColumns), scratch.q_scales + at * groups + p,
                            scratch.q_starts + at * groups + p};
            score(segment, from / kKvTile, num_tiles, q, head_dim, scratch.scores + p * kSegment);
        });
    }
    const int steps = head_dim / Kv::kColumns, key_bytes = kLanes * kQueryBytes;
    KeyFetcher keys{segment.ahead.keys, at == 0 ? from / kKvTile : num_tiles, num_tiles, steps / 2 * key_bytes, steps * key_bytes};
    for (int p = 0, stop = 0; p < count; p = stop) {
        const int first = pairs.first[at + p] - begin, position = pairs.last[at + p] - begin;
        while (++stop < count && pairs.last[at + stop] - begin == position) {
        }
        const Seen seen{first > 0 ? first : 0, position < end ? position + 1 : end};
        if (seen.lo < seen.hi) {
            weigh_query<Kv>(t, pairs, at + p, stop - p, p, seen, from, padded, scratch, keys, out);
            if (t.next && position < kSegment) fetch_pairs(*t.next, pairs, at + p, stop - p, head_dim);
        } else {
            for (int i = p; i < stop; ++i) memset(weights_of<Kv>(scratch, i) + from, 0, sizeof(typename Kv::Weight) * (padded - from));
        }
    }
    keys.fetch(num_tiles);
    if (!Kv::kIsInt8 && end % 2) copy_odd_values(segment.tiles, end, head_dim, scratch.odd);
    dispatch_count<kPairs>(count, [&]<int kCount>() {
        weigh_pairs<Kv, kCount>(segment, from, end, scratch, head_dim, out.o + at * head_dim);
    });
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
