// Paged attention of one query tile over one KV head, in segments of 256 absolute positions. Included by attention.cpp
// alone, which says how integers are multiplied.
//
// For every (query, head) pair the segments are computed alone (attention_segment.h) and merged in ascending order
// (attention_merge.h). A query's own position is the only bound it sees, so chunked and whole prefill, decode and a later split
// of segments over threads all give the same bits. Online softmax: arXiv 2112.05682.

#pragma once

#include "attention_merge.h"
#include "attention_queries.h"
#include "attention_segment.h"
#include "integers.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

// How many tiles ahead at most; a task of fewer fetches as many of the next one.
constexpr int kAhead = 32;

// Appends the tiles from `begin` on, up to the last one with a position below `end`, to the `count` that there are, and returns
// how many there are then; `most` at most.
int find_tiles(const KvLayer& kv, const AttentionTask& t, int begin, int end, KvTiles& tiles, int count, int most) {
    const int64_t block_stride = kv.block_stride, key_stride = kv.tile_stride();
    const int64_t value_stride = kKvTile * kv.value_stride();
    const uint8_t* keys = kv.data + t.kv_head * kv.head_stride();
    const uint8_t* values = keys + kv.values_offset();
    const int tiles_of_block = kv.block_size / kKvTile, wanted = count + (end - begin + kKvTile - 1) / kKvTile;
    const int32_t* block = t.block_table + begin / kv.block_size;
    int tile = begin % kv.block_size / kKvTile;
    for (const int stop = least(wanted, most); count < stop; ++block, tile = 0) {
        for (; tile < tiles_of_block && count < stop; ++tile, ++count) {
            tiles.keys[count] = keys + *block * block_stride + tile * key_stride;
            tiles.values[count] = kv.num_latent > 0 ? tiles.keys[count] : values + *block * block_stride + tile * value_stride;
        }
    }
    return count;
}

// The first position that a query at `position` sees.
PENSTOCK_INLINE int first_seen(const AttentionTask& t, int position) {
    return t.window > 0 && position >= t.window ? position - t.window + 1 : 0;
}

Pairs make_pairs(const KvLayer& kv, const AttentionTask& t, int first_pair, int count) {
    Pairs pairs;
    pairs.count = count;
    int query = first_pair / t.num_heads, head = first_pair % t.num_heads;
    for (int p = 0; p < count; ++p) {
        const int last = t.first_position + query;
        pairs.offset[p] = query * t.ld + static_cast<int64_t>(head) * kv.head_dim;
        pairs.q[p] = t.q + pairs.offset[p];
        pairs.last[p] = last;
        pairs.first[p] = first_seen(t, last);
        pairs.head[p] = head;
        pairs.dither[p] = Dither::begin(last, t.first_head + head);
        if (++head == t.num_heads) head = 0, ++query;
    }
    return pairs;
}

// The positions [begin, end) of which a task reads the keys and values; `begin` is that of a segment.
struct Range {
    int begin, end;
};

PENSTOCK_INLINE Range range_of(const AttentionTask& t, int first, int end) {
    int begin = first / kSegment * kSegment;
    if (t.partials && t.first_segment * kSegment > begin) begin = t.first_segment * kSegment;
    if (t.partials && t.end_segment * kSegment < end) end = t.end_segment * kSegment;
    return {begin, end};
}

// The keys and values to fetch while the `count` tiles from `begin` on are read: tiles of the same task, then of the next one.
void find_ahead(const KvLayer& kv, const AttentionTask& t, const Range& range, int begin, int count, Segment& segment) {
    const int tiles = (range.end - range.begin + kKvTile - 1) / kKvTile, lead = least(tiles, kAhead) * kKvTile;
    int found = find_tiles(kv, t, begin + lead, range.end, segment.ahead, 0, count);
    if (found < count && t.next) {
        const AttentionTask& next = *t.next;
        const Range after = range_of(next, first_seen(next, next.first_position), next.first_position + next.num_queries);
        const int past = begin + lead + found * kKvTile - (range.begin + tiles * kKvTile);
        found = find_tiles(kv, next, after.begin + past, after.end, segment.ahead, found, count);
    }
    for (; found < count; ++found) {
        segment.ahead.keys[found] = segment.tiles.keys[found];
        segment.ahead.values[found] = segment.tiles.values[found];
    }
}

PENSTOCK_INLINE State partial(const AttentionTask& t, int num_pairs, int head_dim, int begin) {
    float* memory = t.partials + begin / kSegment * attention_partial_floats(num_pairs, head_dim);
    return {memory, memory + kStateFloats, memory + 2 * kStateFloats};
}

// Calls f(at, count) for every kPairs pairs of which one may see the segment that begins at `begin`.
template <typename F>
PENSTOCK_INLINE void for_pairs(const Pairs& pairs, int begin, F f) {
    for (int at = 0; at < pairs.count; at += kPairs) {
        const int count = least(pairs.count - at, kPairs);
        if (pairs.last[at + count - 1] >= begin && pairs.first[at] < begin + kSegment) f(at, count);
    }
}

// Puts them to `out`.
void rotate_queries(const KvLayer& kv, Pairs& pairs, float* out) {
    for (int p = 0; p < pairs.count; ++p, out += kv.head_dim) {
        rotate(out, pairs.q[p], kv.head_dim);
        pairs.q[p] = out;
    }
}

// Up to kTaskPairs pairs, kPairs at a time within every segment.
template <typename Kv>
void attend_some(const KvLayer& stored, const AttentionTask& t, int first_pair, int num_pairs, const Scratch& scratch) {
    const bool is_rotated = Kv::kIsInt8 && stored.format == KvFormat::kInt4;
    const KvLayer kv = is_rotated ? stored.widened() : stored;  // as it is read
    Pairs pairs = make_pairs(kv, t, first_pair, num_pairs);
    if constexpr (Kv::kIsInt8) {
        if (is_rotated) rotate_queries(kv, pairs, scratch.next.o);
        round_to_int8(kv, t, pairs, scratch);
    } else {
        round_to_int16(kv, t, pairs, scratch);
    }
    if (!t.partials) clear(pairs, kv.value_dim(), scratch.merged);
    Segment segment;
    const Range range = range_of(t, pairs.first[0], pairs.last[num_pairs - 1] + 1);
    for (int begin = range.begin; begin < range.end; begin += kSegment) {
        const int num_tiles = find_tiles(stored, t, begin, range.end, segment.tiles, 0, kSegmentTiles);
        find_ahead(stored, t, range, begin, num_tiles, segment);
        const int end = least(range.end - begin, kSegment);
        tell_seen(stored, segment.tiles.keys, segment.tiles.values, pairs.first[0] > begin ? pairs.first[0] - begin : 0, end);
        if constexpr (Kv::kIsInt8) {
            if (is_rotated) {
                segment.narrow = &stored;
                segment.first = pairs.first[0] > begin ? step_below(pairs.first[0] - begin) / kKvTile : 0;
                segment.end = num_tiles;
                widen_all_keys(stored, segment.tiles, segment.first, num_tiles, scratch);
            }
            load_value_scales(kv, segment.tiles, end, scratch);
        }
        if (kv.num_latent > 0) lay_out_latents<Kv>(kv, segment.tiles, num_tiles, scratch);
        const State state = t.partials ? partial(t, num_pairs, kv.value_dim(), begin) : scratch.next;
        for_pairs(pairs, begin, [&](int at, int count) {
            attend_segment<Kv>(t, pairs, at, count, begin, segment, kv, scratch, state);
            if (!t.partials) merge(pairs, at, count, begin, kv.value_dim(), scratch.merged, state);
        });
    }
    if (!t.partials) write_out(stored, t, pairs, scratch.merged);
}

template <typename Kv>
void attend(const KvLayer& kv, const AttentionTask& t, const Scratch& scratch) {
    const int pairs = t.num_queries * t.num_heads;
    for (int first_pair = 0; first_pair < pairs; first_pair += kTaskPairs) {
        attend_some<Kv>(kv, t, first_pair, least(pairs - first_pair, kTaskPairs), scratch);
    }
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
