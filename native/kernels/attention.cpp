// Paged attention of one query tile over one KV head, in segments of 256 absolute positions.
//
// For every (query, head) pair the segments are computed alone and merged in ascending order:
//   segment: scores -> maximum m, weights p = 2^(s - m), l = sum p, o = sum p v
//   merge:   (m, l, o) of the segments so far with the next one, rescaled to the larger maximum
// A query's own position is the only bound it sees, so chunked and whole prefill, decode and a
// later split of segments over threads all give the same bits. Online softmax: arXiv 2112.05682.
//
// Scores are dot products of integers (integers.h), of as many columns as share a scale exact in any order, and count in
// units of log2: the softmax's factor log2(e) is part of their scale. What is particular to a format of the KV cache is in
// Int8Kv and Int16Kv, the softmax in softmax.h.

#include "integers.h"
#include "parts.h"
#include "simd.h"
#include "softmax.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kPairs = kAttentionPairs;          // whose sums fit the registers
constexpr int kTaskPairs = kAttentionTaskPairs;  // that share the keys and values of a segment while these are in the cache
constexpr int kSegmentTiles = kSegment / kKvTile;
constexpr int kStateFloats = kTaskPairs + kLanes;  // of the numbers of each pair, which are read sixteen at a time

// (query, head) pairs of a task, ordered query-major.
struct Pairs {
    int64_t offset[kTaskPairs];    // floats from the task's q and out
    int32_t last[kTaskPairs];      // position that a pair sees
    int32_t first[kTaskPairs];     // likewise
    float factor[kTaskPairs];      // of its scores
    int count;
};

// What is known of pairs: after one segment, or merged over several. Of pair p max[p], sum[p] and o[p * head_dim] on.
struct State {
    float* max;
    float* sum;
    float* o;
};

// Where a task keeps its intermediate results; all of it stays in the first- and second-level cache.
struct Scratch {
    float* scores;        // [kPairs][kSegment]
    uint16_t* weights;    // [kPairs][kSegment] int16 or bf16
    float* value_scales;  // [kSegment], of 8-bit values
    float* units;         // [kSegment], the same as shares of the largest, times kLargestInteger
    float* factor;        // [kPairs] by which the sums of 8-bit values are to be multiplied
    int16_t* q;           // [kTaskPairs / kPairs][head_dim / 2][kPairs][2]
    uint8_t* odd;         // [head_dim] pairs: the 16-bit values of a last position that has no neighbour yet
    State merged;         // of kTaskPairs
    State next;           // of kTaskPairs
};

// Where the tiles of 16 positions of one segment are. `ahead` are the keys of the segment that comes next, which are fetched
// while this one's values are read, as its values are while its keys are.
struct Tiles {
    const uint8_t* keys[kSegmentTiles];
    const uint8_t* values[kSegmentTiles];
    const uint8_t* ahead[kSegmentTiles];
};

// Keys and values of 8 bits, KvFormat::kInt8. The weights of a segment, each times its value's scale, are rounded to 16 bits
// with one scale for all, the largest that can be needed: 32767 * 127 * kSegment is below 2^31.
struct Int8Kv {
    static constexpr int kBytes = 32;  // of two columns, or of two positions, of sixteen
    using Sum = vi;

    static PENSTOCK_MEMBER int halves_of_group(int) { return kGroup / 2; }
    static PENSTOCK_MEMBER vb load_pairs(const uint8_t* p) { return widen_i8(p); }
    static PENSTOCK_MEMBER vf key_scale(const uint8_t* scales, int group) { return load_bf16((const uint16_t*)scales + group * kKvTile); }
    static PENSTOCK_MEMBER Sum zero() { return set1_i(0); }
    static PENSTOCK_MEMBER Sum dot2(Sum acc, vb values, vb weights) { return dot2_i16(acc, values, weights); }
    static PENSTOCK_MEMBER vf sum_of(Sum acc, float factor) { return mul(to_float(acc), set1(factor)); }
};

// Keys of 16 bits and values in bf16, KvFormat::kInt16. l sums the weights as they were rounded to bf16, so that their mean
// error cancels.
struct Int16Kv {
    static constexpr int kBytes = 64;
    using Sum = vf;

    static PENSTOCK_MEMBER int halves_of_group(int halves) { return halves; }
    static PENSTOCK_MEMBER vb load_pairs(const uint8_t* p) { return load64(p); }
    static PENSTOCK_MEMBER vf key_scale(const uint8_t* scales, int) { return load((const float*)scales); }
    static PENSTOCK_MEMBER Sum zero() { return set1(0.0f); }
    static PENSTOCK_MEMBER Sum dot2(Sum acc, vb values, vb weights) { return dot2_bf16(acc, values, weights); }
    static PENSTOCK_MEMBER vf sum_of(Sum acc, float) { return acc; }
};

template <typename Kv>
constexpr bool kIsInt8 = Kv::kBytes == 32;

// The keys, and unless null the values, of the tiles from `begin` on, up to the last one with a position below `end`.
int find_tiles(const KvLayer& kv, const AttentionTask& t, int begin, int end, const uint8_t** keys, const uint8_t** values) {
    int block = begin / kv.block_size, offset = begin % kv.block_size, count = 0;
    for (int at = begin; at < end && count < kSegmentTiles; ++block, offset = 0) {
        const uint8_t* head = kv.data + t.block_table[block] * kv.block_stride() + t.kv_head * kv.head_stride();
        for (; offset < kv.block_size && at < end && count < kSegmentTiles; offset += kKvTile, at += kKvTile, ++count) {
            keys[count] = head + offset / kKvTile * kv.tile_stride();
            if (values) values[count] = head + kv.values_offset() + offset * kv.head_dim * kv.width();
        }
    }
    return count;
}

// How many tiles of keys, or of sixteen columns of values, go side by side so that few pairs still fill the pipeline.
template <int kCount>
constexpr int side_by_side() {
    return kCount * 2 > kPairs ? (kPairs >= 12 ? 2 : 1) : kCount * 4 > kPairs ? (kPairs >= 12 ? 4 : 2) : 4;
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

Pairs make_pairs(const KvLayer& kv, const AttentionTask& t, int first_pair, int count) {
    Pairs pairs;
    pairs.count = count;
    int query = first_pair / t.heads_per_kv, head = first_pair % t.heads_per_kv;
    for (int p = 0; p < count; ++p) {
        const int last = t.first_position + query;
        pairs.offset[p] = query * t.ld + static_cast<int64_t>(head) * kv.head_dim;
        pairs.last[p] = last;
        pairs.first[p] = t.window > 0 && last - t.window + 1 > 0 ? last - t.window + 1 : 0;
        if (++head == t.heads_per_kv) head = 0, ++query;
    }
    return pairs;
}

// The queries as integers, laid out as the keys are: two columns of each of kPairs pairs in turn.
void quantize_queries(const KvLayer& kv, const AttentionTask& t, Pairs& pairs, int16_t* q) {
    for (int p = 0; p < pairs.count; ++p) {
        const float* x = t.q + pairs.offset[p];
        const IntegerScale scale = integer_scale(x, kv.head_dim);
        pairs.factor[p] = scale.scale * t.scale * kLog2E;
        int16_t* out = q + p / kPairs * kPairs * kv.head_dim + p % kPairs * 2;
        for (int d = 0; d < kv.head_dim; d += kLanes) {
            alignas(64) int16_t integers[kLanes];
            store_integers(integers, load(x + d), scale);
            for (int i = 0; i < kLanes; i += 2) memcpy(out + (d + i) * kPairs, integers + i, 2 * sizeof(int16_t));
        }
    }
}

// Dot products, times the keys' scales, of kTiles * 16 positions from `tile` on.
template <typename Kv, int kCount, int kTiles>
PENSTOCK_INLINE void score_tiles(const Tiles& tiles, int tile, const int16_t* q, int halves, float* scores) {
    const uint8_t* const* keys = tiles.keys + tile;
    const uint8_t* const* values = tiles.values + tile;
    const int group_halves = Kv::halves_of_group(halves);
    for (int begin = 0, group = 0; begin < halves; begin += group_halves, ++group) {
        const int end = begin + group_halves < halves ? begin + group_halves : halves;
        vi acc[kTiles][kCount];
        for (int u = 0; u < kTiles; ++u) {
            for (int p = 0; p < kCount; ++p) acc[u][p] = set1_i(0);
        }
        for (int d = begin; d < end; ++d) {
            vb k[kTiles];
            for (int u = 0; u < kTiles; ++u) {
                prefetch(values[u] + d * Kv::kBytes);
                k[u] = Kv::load_pairs(keys[u] + d * Kv::kBytes);
            }
            for (int p = 0; p < kCount; ++p) {
                const vb two = set1_pair(q + (d * kPairs + p) * 2);
                for (int u = 0; u < kTiles; ++u) acc[u][p] = dot2_i16(acc[u][p], k[u], two);
            }
        }
        for (int u = 0; u < kTiles; ++u) {
            const vf scale = Kv::key_scale(keys[u] + halves * Kv::kBytes, group);
            for (int p = 0; p < kCount; ++p) {
                float* out = scores + p * kSegment + u * kKvTile;
                store(out, group == 0 ? mul(to_float(acc[u][p]), scale) : fma(to_float(acc[u][p]), scale, load(out)));
            }
        }
    }
}

// scores[pair][16 * tile ...] of the tiles [from, end) of a segment
template <typename Kv, int kCount>
__attribute__((noinline)) void score_pairs(const Tiles& tiles, int from, int end, const int16_t* q, int head_dim, float* scores) {
    constexpr int kTiles = side_by_side<kCount>();
    const int halves = head_dim / 2;
    int i = from;
    for (; i + kTiles <= end; i += kTiles) score_tiles<Kv, kCount, kTiles>(tiles, i, q, halves, scores + i * kKvTile);
    if constexpr (kTiles > 2) {
        if (i + 2 <= end) {
            score_tiles<Kv, kCount, 2>(tiles, i, q, halves, scores + i * kKvTile);
            i += 2;
        }
    }
    for (; i < end; ++i) score_tiles<Kv, kCount, 1>(tiles, i, q, halves, scores + i * kKvTile);
}

// Fills `units` for the positions [lo, hi), of which alone the largest scale is; returns what sums of integers are to be times.
PENSTOCK_INLINE float scale_weights(const Scratch& scratch, int lo, int hi) {
    const float largest = largest_of(scratch.value_scales, lo, hi);
    const vf factor = set1(kLargestInteger / largest);
    for (int i = lo / kStep * kStep; i < hi; i += kLanes) store(scratch.units + i, mul(load(scratch.value_scales + i), factor));
    return largest * (1.0f / kLargestInteger);
}

// kColumns * 16 columns of o from column d on.
template <typename Kv, int kCount, int kColumns>
PENSTOCK_INLINE void weigh_columns(const Tiles& tiles, int from, int end, const Scratch& scratch, int head_dim, int d, float* out) {
    typename Kv::Sum acc[kColumns][kCount];
    for (int c = 0; c < kColumns; ++c) {
        for (int p = 0; p < kCount; ++p) acc[c][p] = Kv::zero();
    }
    const auto add_two = [&](const uint8_t* values, const uint16_t* weight) __attribute__((always_inline)) {
        vb v[kColumns];
        for (int c = 0; c < kColumns; ++c) v[c] = Kv::load_pairs(values + c * Kv::kBytes);
        for (int p = 0; p < kCount; ++p) {
            const vb two = set1_pair(weight + p * kSegment);
            for (int c = 0; c < kColumns; ++c) acc[c][p] = Kv::dot2(acc[c][p], v[c], two);
        }
    };
    const int64_t stride = int64_t{Kv::kBytes} / kLanes * head_dim;  // bytes of two positions
    const int64_t column = int64_t{Kv::kBytes} / kLanes * d;
    // Integers beyond the end are harmless, as their weights are zero; a bf16 there might be NaN.
    const int paired = kIsInt8<Kv> ? (end + 1) & ~1 : end & ~1;
    for (int at = from; at < paired;) {
        const uint8_t* values = tiles.values[at / kKvTile] + column;
        const uint8_t* ahead = tiles.ahead[at / kKvTile] + column;
        for (const int stop = paired - at > kKvTile ? at + kKvTile : paired; at < stop; at += 2, values += stride, ahead += stride) {
            for (int c = 0; c < kColumns; ++c) prefetch(ahead + c * Kv::kBytes);
            add_two(values, scratch.weights + at);
        }
    }
    if (!kIsInt8<Kv> && end % 2) add_two(scratch.odd + column, scratch.weights + end - 1);
    for (int p = 0; p < kCount; ++p) {
        for (int c = 0; c < kColumns; ++c) store(out + p * head_dim + c * kLanes, Kv::sum_of(acc[c][p], scratch.factor[p]));
    }
}

// o[pair][d] = sum over positions [from, end) of the segment of p[pair] * v[d]
template <typename Kv, int kCount>
__attribute__((noinline)) void weigh_pairs(const Tiles& tiles, int from, int end, const Scratch& scratch, int head_dim, float* out) {
    constexpr int kColumns = side_by_side<kCount>();
    int d = 0;
    for (; d + kColumns * kLanes <= head_dim; d += kColumns * kLanes) {
        weigh_columns<Kv, kCount, kColumns>(tiles, from, end, scratch, head_dim, d, out + d);
    }
    for (; d < head_dim; d += kLanes) weigh_columns<Kv, kCount, 1>(tiles, from, end, scratch, head_dim, d, out + d);
}

// The values of the segment's last position, `end` - 1, with zeros beside them: nothing is written there yet.
PENSTOCK_INLINE void copy_odd_values(const Tiles& tiles, int end, int head_dim, uint8_t* odd) {
    const uint8_t* values = tiles.values[end / kKvTile] + end % kKvTile / 2 * 4 * head_dim;
    for (int i = 0; i < 4 * head_dim; i += 64) store64(odd + i, even_halves(load64(values + i)));
}

// Of the values of a segment's tiles.
PENSTOCK_INLINE void load_value_scales(const KvLayer& kv, const Tiles& tiles, int num_tiles, float* out) {
    const int64_t offset = kv.scales_offset() + int64_t{2} * kv.key_groups() * kKvTile;
    for (int i = 0; i < num_tiles; ++i) store(out + i * kKvTile, load_bf16((const uint16_t*)(tiles.keys[i] + offset)));
}

PENSTOCK_INLINE bool sees(const Pairs& pairs, int p, int begin) {
    return pairs.last[p] >= begin && pairs.first[p] < begin + kSegment;
}

// The segment that begins at `begin`, for the pairs [at, at + count); nothing of it has a meaning for a pair that does not see it.
template <typename Kv>
void attend_segment(const AttentionTask& t, const Pairs& pairs, int at, int count, int begin, const Tiles& tiles, int head_dim,
                    const Scratch& scratch, const State& out) {
    // Positions are relative to the segment from here on. Values are read in pairs of positions.
    const int last = pairs.last[at + count - 1] - begin, end = last < kSegment ? last + 1 : kSegment, padded = (end + 1) & ~1;
    const int from = pairs.first[at] > begin ? (pairs.first[at] - begin) / kStep * kStep : 0;
    const int16_t* q = scratch.q + at * head_dim;
    dispatch_count(count, [&]<int kCount>() {
        score_pairs<Kv, kCount>(tiles, from / kKvTile, (end + kKvTile - 1) / kKvTile, q, head_dim, scratch.scores);
    });
    int lo[kPairs], hi[kPairs];
    float factor[kPairs], top[kPairs];
    for (int p = 0; p < count; ++p) {
        lo[p] = pairs.first[at + p] > begin ? pairs.first[at + p] - begin : 0;
        hi[p] = pairs.last[at + p] - begin < end ? pairs.last[at + p] - begin + 1 : end;
        factor[p] = pairs.factor[at + p];
        float* scores = scratch.scores + p * kSegment;
        if (t.softcap > 0.0f) {
            cap(scores, lo[p], hi[p], factor[p], t.softcap);
            factor[p] = 1.0f;
        }
        if (lo[p] < hi[p]) {
            top[p] = largest_of(scores, lo[p], hi[p]);
            out.max[at + p] = top[p] * factor[p];
        }
    }
    for (int p = 0; p < count; ++p) {
        uint16_t* weights = scratch.weights + p * kSegment;
        if (lo[p] >= hi[p]) {
            memset(weights + from, 0, sizeof(uint16_t) * (padded - from));
            continue;
        }
        const float* scores = scratch.scores + p * kSegment;
        if constexpr (kIsInt8<Kv>) {
            const bool is_seen_alike = p > 0 && lo[p] == lo[p - 1] && hi[p] == hi[p - 1];
            scratch.factor[p] = is_seen_alike ? scratch.factor[p - 1] : scale_weights(scratch, lo[p], hi[p]);
            out.sum[at + p] = soften_scaled(scores, scratch.units, weights, lo[p], hi[p], factor[p], top[p]);
        } else {
            out.sum[at + p] = soften(scores, weights, lo[p], hi[p], factor[p], out.max[at + p]);
        }
        for (int i = from; i < lo[p] / kStep * kStep; ++i) weights[i] = 0;
        for (int i = (hi[p] + kStep - 1) / kStep * kStep; i < padded; ++i) weights[i] = 0;
    }
    if (!kIsInt8<Kv> && end % 2) copy_odd_values(tiles, end, head_dim, scratch.odd);
    dispatch_count(count, [&]<int kCount>() {
        weigh_pairs<Kv, kCount>(tiles, from, end, scratch, head_dim, out.o + at * head_dim);
    });
}

// state := state merged with the segment that begins at `begin`, for the pairs [at, at + count), at most 16
void merge(const Pairs& pairs, int at, int count, int begin, int head_dim, const State& state, const State& next) {
    alignas(64) float top[kLanes], old_factor[kLanes], new_factor[kLanes], sum[kLanes];
    const vf old_max = load(state.max + at), new_max = load(next.max + at), larger = max(old_max, new_max);
    const vf a = exp2(sub(old_max, larger)), b = exp2(sub(new_max, larger));
    store(top, larger);
    store(old_factor, a);
    store(new_factor, b);
    store(sum, fma(load(state.sum + at), a, mul(load(next.sum + at), b)));
    for (int p = 0; p < count; ++p) {
        if (!sees(pairs, at + p, begin)) continue;
        state.max[at + p] = top[p];
        state.sum[at + p] = sum[p];
        float* o = state.o + (at + p) * head_dim;
        const float* next_o = next.o + (at + p) * head_dim;
        for (int d = 0; d < head_dim; d += kLanes) {
            store(o + d, fma(load(next_o + d), set1(new_factor[p]), mul(load(o + d), set1(old_factor[p]))));
        }
    }
}

void clear(const Pairs& pairs, int head_dim, const State& state) {
    for (int p = 0; p < kTaskPairs + kLanes; ++p) {
        state.max[p] = kLowest;
        state.sum[p] = 0.0f;
    }
    memset(state.o, 0, sizeof(float) * pairs.count * head_dim);
}

void write_out(const AttentionTask& t, const Pairs& pairs, int head_dim, const State& state) {
    for (int p = 0; p < pairs.count; ++p) {
        const vf inverse = set1(1.0f / state.sum[p]);
        const float* o = state.o + p * head_dim;
        for (int d = 0; d < head_dim; d += kLanes) store(t.out + pairs.offset[p] + d, mul(load(o + d), inverse));
    }
}

// The keys of what comes after the segment that begins at `begin`: the next one's, or else the next task's first.
void find_ahead(const KvLayer& kv, const AttentionTask& t, int begin, int end, Tiles& tiles, int count) {
    int found = 0;
    if (begin + kSegment < end) {
        found = find_tiles(kv, t, begin + kSegment, end, tiles.ahead, nullptr);
    } else if (t.next) {
        const int first = t.next->partials ? t.next->first_segment * kSegment : 0;
        found = find_tiles(kv, *t.next, first, t.next->first_position + t.next->num_queries, tiles.ahead, nullptr);
    }
    for (; found < count; ++found) tiles.ahead[found] = tiles.keys[found];
}

PENSTOCK_INLINE State partial(const AttentionTask& t, int num_pairs, int head_dim, int begin) {
    float* memory = t.partials + begin / kSegment * attention_partial_floats(num_pairs, head_dim);
    return {memory, memory + kStateFloats, memory + 2 * kStateFloats};
}

// Calls f(at, count) for every kPairs pairs of which one may see the segment that begins at `begin`.
template <typename F>
PENSTOCK_INLINE void for_pairs(const Pairs& pairs, int begin, F f) {
    for (int at = 0; at < pairs.count; at += kPairs) {
        const int count = pairs.count - at < kPairs ? pairs.count - at : kPairs;
        if (pairs.last[at + count - 1] >= begin && pairs.first[at] < begin + kSegment) f(at, count);
    }
}

// Up to kTaskPairs pairs, kPairs at a time within every segment.
template <typename Kv>
void attend(const KvLayer& kv, const AttentionTask& t, int first_pair, int num_pairs, const Scratch& scratch) {
    Pairs pairs = make_pairs(kv, t, first_pair, num_pairs);
    quantize_queries(kv, t, pairs, scratch.q);
    if (!t.partials) clear(pairs, kv.head_dim, scratch.merged);
    Tiles tiles;
    int begin = pairs.first[0] / kSegment * kSegment, end = pairs.last[num_pairs - 1] + 1;
    if (t.partials && t.first_segment * kSegment > begin) begin = t.first_segment * kSegment;
    if (t.partials && t.end_segment * kSegment < end) end = t.end_segment * kSegment;
    for (; begin < end; begin += kSegment) {
        const int num_tiles = find_tiles(kv, t, begin, end, tiles.keys, tiles.values);
        find_ahead(kv, t, begin, end, tiles, num_tiles);
        if constexpr (kIsInt8<Kv>) load_value_scales(kv, tiles, num_tiles, scratch.value_scales);
        const State state = t.partials ? partial(t, num_pairs, kv.head_dim, begin) : scratch.next;
        for_pairs(pairs, begin, [&](int at, int count) {
            attend_segment<Kv>(t, pairs, at, count, begin, tiles, kv.head_dim, scratch, state);
            if (!t.partials) merge(pairs, at, count, begin, kv.head_dim, scratch.merged, state);
        });
    }
    if (!t.partials) write_out(t, pairs, kv.head_dim, scratch.merged);
}

constexpr int kScoreFloats = kPairs * kSegment, kWeightFloats = kPairs * kSegment / 2;

PENSTOCK_INLINE State take_state(float*& memory, int head_dim) {
    const State state{memory, memory + kStateFloats, memory + 2 * kStateFloats};
    memory += 2 * kStateFloats + kTaskPairs * head_dim;
    return state;
}

PENSTOCK_INLINE Scratch make_scratch(float* memory, int head_dim) {
    memory += -(reinterpret_cast<uintptr_t>(memory) / sizeof(float)) % kLanes;  // vectors within one line of the cache
    Scratch scratch;
    scratch.scores = memory;
    memory += kScoreFloats;
    scratch.weights = reinterpret_cast<uint16_t*>(memory);
    memory += kWeightFloats;
    scratch.value_scales = memory;
    memory += kSegment;
    scratch.units = memory;
    memory += kSegment;
    scratch.factor = memory;
    memory += kLanes;
    scratch.q = reinterpret_cast<int16_t*>(memory);
    memory += kTaskPairs * head_dim / 2;
    scratch.odd = reinterpret_cast<uint8_t*>(memory);
    memory += head_dim;
    scratch.merged = take_state(memory, head_dim);
    scratch.next = take_state(memory, head_dim);
    return scratch;
}

}  // namespace

void attention(const KvLayer& kv, const AttentionTask& t, float* memory) {
    const Scratch scratch = make_scratch(memory, kv.head_dim);
    const int pairs = t.num_queries * t.heads_per_kv;
    for (int first_pair = 0; first_pair < pairs; first_pair += kTaskPairs) {
        const int count = pairs - first_pair < kTaskPairs ? pairs - first_pair : kTaskPairs;
        kv.format == KvFormat::kInt8 ? attend<Int8Kv>(kv, t, first_pair, count, scratch)
                                     : attend<Int16Kv>(kv, t, first_pair, count, scratch);
    }
}

void attention_merge(const KvLayer& kv, const AttentionTask& t, float* memory) {
    const Scratch scratch = make_scratch(memory, kv.head_dim);
    const Pairs pairs = make_pairs(kv, t, 0, t.num_queries * t.heads_per_kv);
    clear(pairs, kv.head_dim, scratch.merged);
    for (int begin = pairs.first[0] / kSegment * kSegment; begin <= pairs.last[pairs.count - 1]; begin += kSegment) {
        const State next = partial(t, pairs.count, kv.head_dim, begin);
        for_pairs(pairs, begin, [&](int at, int count) { merge(pairs, at, count, begin, kv.head_dim, scratch.merged, next); });
    }
    write_out(t, pairs, kv.head_dim, scratch.merged);
}

int64_t attention_partial_floats(int num_pairs, int head_dim) { return 2 * kStateFloats + num_pairs * head_dim; }

int64_t attention_scratch_floats(int head_dim) {
    return kLanes + kScoreFloats + kWeightFloats + 2 * kSegment + kLanes + 4 * kStateFloats +
           (kTaskPairs / 2 + 1 + 2 * kTaskPairs) * head_dim;
}

}  // namespace penstock::PENSTOCK_ISA
