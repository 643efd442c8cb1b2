// Attention to one segment: scores -> a bound m of them, weights p = 2^(s - m), l = sum p, o = sum p v. Included by
// attention_task.h alone.
//
// Scores are dot products of integers (integers.h), exact in any order over columns that share a scale. They are in units of
// log2: the softmax's factor log2(e) is part of their scale. The parts specific to a format of the KV cache are in
// Int8Kv and Int16Kv, the softmax in softmax.h, the products of integers in attention.cpp.

#pragma once

#include "attention_queries.h"
#include "attention_scratch.h"
#include "int4.h"
#include "integers.h"
#include "softmax.h"
#include "tile_readers.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

// Where the keys and values of tiles of 16 positions are.
struct KvTiles {
    const uint8_t* keys[kSegmentTiles];
    const uint8_t* values[kSegmentTiles];
};

// The tiles of one segment, and for each the one to prefetch meanwhile: keys while keys are read and while weights are
// computed, values while values are read.
struct Segment {
    KvTiles tiles, ahead;
    const KvLayer* narrow = nullptr;  // whose values are yet to be widened, from the tile `first` to `end`
    int first, end;
};

// The integers of kPairs pairs from one of them on, and of every group of columns their scales and what sums start at.
struct Queries {
    const uint8_t* integers;
    const float* scales;
    const int32_t* starts;
};

// Keys and values of 8 bits, KvFormat::kInt8. The weights of a query in a segment, each times its value's scale, are rounded to
// bytes, the largest to 240..255. So a large weight on a small value, as often at a sequence's first position, leaves the others enough
// steps.
struct Int8Kv {
    static constexpr bool kIsInt8 = true;
    // A masked score. A query's scale is in its scores, not in their factor, so they may reach 1e30.
    static constexpr float kNothing = -1.0e37f;
    static constexpr int kColumns = 4;    // that are multiplied at once
    static constexpr int kScaleBytes = kKvTile * 2;
    static PENSTOCK_MEMBER int steps_of_group(int) { return kGroup / kColumns; }
    static PENSTOCK_MEMBER vf load_scales(const uint8_t* p) { return load_bf16((const uint16_t*)p); }
    static PENSTOCK_MEMBER vi start(const Queries& q, int at) { return set1_i(q.starts[at]); }
    static PENSTOCK_MEMBER vi dot(vi acc, vb keys, const uint8_t* q) { return dot4_i8(acc, keys, set1_pair(q)); }
    static PENSTOCK_MEMBER vf scale(const Queries& q, int at, vf scales) { return mul(scales, set1(q.scales[at])); }

    using Weight = uint8_t;
    static constexpr float kLogLargest = 7.906890596f;  // log2(240): that of 255 less the error of log2_below
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

// The weights of a pair, `row` being its place in the scratch.
template <typename Kv>
PENSTOCK_INLINE typename Kv::Weight* weights_of(const Scratch& scratch, int row) {
    return reinterpret_cast<typename Kv::Weight*>(scratch.weights) + row * kSegment;
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
        for (const int stop = least(at + count, end); at < stop; ++at) {
            for (int i = begin_bytes; i < end_bytes; i += 64) prefetch_far(tiles[at] + i);
        }
    }
};

// `end` rounded up to a multiple of `positions`, the number multiplied at once.
PENSTOCK_INLINE int padded_end(int end, int positions) { return (end + positions - 1) / positions * positions; }

// Loads the scales and sizes of a segment's first `end` values. NaN becomes zero: its key is NaN, too, and spoils whatever
// sees it.
PENSTOCK_TILE_READER(PENSTOCK_INLINE) void load_value_scales(const KvLayer& kv, const KvTiles& tiles, int end, const Scratch& scratch) {
    const int64_t offset = kv.scales_offset() + int64_t{2} * kv.key_groups() * kKvTile;
    const vf zero = set1(0.0f);
    for (int i = 0; i < step_above(end); i += kLanes) {
        const vf scales = i < end ? load_bf16((const uint16_t*)(tiles.keys[i / kKvTile] + offset)) : zero;
        const vf some = max(within(i, 0, end, scales, zero), zero);
        store(scratch.value_scales + i, some);
        store(scratch.sizes + i, log2_below(some));
    }
}

// Lays out a segment's latents as values, to which tiles.values then point.
template <typename Kv>
PENSTOCK_TILE_READER(__attribute__((noinline))) void lay_out_latents(const KvLayer& kv, KvTiles& tiles, int count, const Scratch& scratch) {
    const int columns = kv.num_latent, tile_bytes = kKvTile * columns * kv.width();
    for (int i = 0; i < count; ++i) {
        const uint8_t* const keys = tiles.keys[i];
        uint8_t* const values = scratch.latents + i * tile_bytes;
        tiles.values[i] = values;
        if constexpr (Kv::kIsInt8) {
            for (int d = 0; d < columns; d += 4) transpose_quarters(values + 4 * d, 4 * columns, keys + kKvTile * d, kKeyZero);
        } else {
            // A latent that is not a number becomes zeros: NaN times a weight of zero would reach queries that do not see it.
            const vf scales = max(Kv::load_scales(keys + kv.scales_offset()), set1(0.0f)), of_upper = mul(scales, set1(0x1p-16f));
            for (int d = 0; d < columns; d += 2) {  // a pair's first column is the lower half of a lane, the second one the upper half
                const vi pairs = load(reinterpret_cast<const int32_t*>(keys + 2 * kKvTile * d));
                const vf sign = mul(to_float(bit_and(pairs, set1_i(0x8000))), set1(2.0f));
                const vf first = mul(sub(to_float(bit_and(pairs, set1_i(0xFFFF))), sign), scales);
                const vf second = mul(to_float(bit_and(pairs, set1_i(-0x10000))), of_upper);
                alignas(64) uint16_t numbers[2][kLanes];
                store_bf16(numbers[0], first);
                store_bf16(numbers[1], second);
                for (int at = 0; at < kKvTile; at += 2) {
                    uint8_t* const out = values + 2 * (at * columns + 2 * d);
                    memcpy(out, numbers[0] + at, 4);
                    memcpy(out + 4, numbers[1] + at, 4);
                }
            }
        }
    }
}

// Widens the keys of the kInt4 tiles [from, end) to kInt8, to which tiles.keys then point. No query sees earlier tiles.
PENSTOCK_TILE_READER(__attribute__((noinline))) void widen_all_keys(const KvLayer& kv, KvTiles& tiles, int from, int end, const Scratch& scratch) {
    const int64_t bytes = kv.widened().tile_stride();
    for (int i = 0; i < from; ++i) tiles.keys[i] = scratch.wide;
    for (int i = from; i < end; ++i) {
        uint8_t* const keys = scratch.wide + i * bytes;
        widen_keys(kv, keys, tiles.keys[i]);
        tiles.keys[i] = keys;
    }
}

// Likewise for values, once the keys were read: both would not fit the first-level cache. Stored values have half the bytes of the widened
// ones, so those ahead are prefetched here.
PENSTOCK_TILE_READER(__attribute__((noinline))) void widen_all_values(const KvLayer& kv, Segment& segment, int from, int end, const Scratch& scratch) {
    uint8_t* values = scratch.wide + kSegmentTiles * kv.widened().tile_stride();
    for (int i = from; i < end; ++i, values += kKvTile * kv.head_dim) {
        for (int at = 0; at < kKvTile * kv.value_bytes(); at += 64) prefetch_far(segment.ahead.values[i] + at);
        widen_values(kv, values, segment.tiles.values[i]);
        segment.ahead.values[i] = segment.tiles.values[i] = values;
    }
    segment.narrow = nullptr;
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

// Prefetches the next task's queries and outputs at the places of this one's pairs [at, at + count).
PENSTOCK_INLINE void fetch_pairs(const AttentionTask& next, const Pairs& pairs, int at, int count, int head_dim) {
    for (int p = at; p < at + count; ++p) {
        for (int d = 0; d < head_dim; d += kLanes) {
            prefetch(next.q + pairs.offset[p] + d);
            prefetch(next.out + pairs.offset[p] + d);
        }
    }
}

// scores[pair][16 * tile ...] of the pairs [at, at + count) and the tiles [from, end)
template <typename Kv>
void score(const Segment& segment, int at, int count, int from, int end, int head_dim, const Scratch& scratch);

// o[pair] = sum over positions [from, end) of the segment of weight * value, of `count` pairs
template <typename Kv>
void weigh(const Segment& segment, int count, int from, int end, int head_dim, const Scratch& scratch, float* o);

// The segment that begins at `begin`, for the pairs [at, at + count); nothing of it has a meaning for a pair that does not see it.
template <typename Kv>
void attend_segment(const AttentionTask& t, const Pairs& pairs, int at, int count, int begin, Segment& segment,
                    const KvLayer& kv, const Scratch& scratch, const State& out) {
    const int head_dim = kv.head_dim, value_dim = kv.value_dim();
    // Positions are relative to the segment from here on.
    const int last = pairs.last[at + count - 1] - begin, end = least(last + 1, kSegment);
    const int padded = padded_end(end, Kv::kPositions);
    const int from = pairs.first[at] > begin ? step_below(pairs.first[at] - begin) : 0;
    const int num_tiles = (end + kKvTile - 1) / kKvTile;
    score<Kv>(segment, at, count, from / kKvTile, num_tiles, head_dim, scratch);
    const int steps = head_dim / Kv::kColumns, key_bytes = kLanes * kQueryBytes;
    KeyFetcher keys{segment.ahead.keys, at == 0 ? from / kKvTile : num_tiles, num_tiles, steps / 2 * key_bytes, steps * key_bytes};
    for (int p = 0, stop = 0; p < count; p = stop) {
        const int first = pairs.first[at + p] - begin, position = pairs.last[at + p] - begin;
        while (++stop < count && pairs.last[at + stop] - begin == position) {
        }
        const Seen seen{first > 0 ? first : 0, least(position + 1, end)};
        if (seen.lo < seen.hi) {
            weigh_query<Kv>(t, pairs, at + p, stop - p, p, seen, from, padded, scratch, keys, out);
            if (t.next && position < kSegment) fetch_pairs(*t.next, pairs, at + p, stop - p, head_dim);
        } else {
            for (int i = p; i < stop; ++i) memset(weights_of<Kv>(scratch, i) + from, 0, sizeof(typename Kv::Weight) * (padded - from));
        }
    }
    keys.fetch(num_tiles);
    if constexpr (Kv::kIsInt8) {
        if (segment.narrow) widen_all_values(*segment.narrow, segment, segment.first, segment.end, scratch);
    }
    // Not from `from`: blocks before the window were freed, and may have a NaN now, which times a weight of zero is NaN.
    const int first = pairs.first[at] > begin ? (pairs.first[at] - begin) / kKvTile * kKvTile : 0;
    weigh<Kv>(segment, count, first, end, value_dim, scratch, out.o + at * value_dim);
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
