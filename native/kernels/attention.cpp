// Attention by vectors (attention_task.h), and what all variants of an instruction set share: partial results and their merge.

#include "attention_task.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kValueBytes = 64;  // of kPositions positions of sixteen columns of the values

// How many tiles of keys, or of sixteen columns of values, go side by side so that few pairs still fill the pipeline.
template <int kCount>
constexpr int side_by_side() {
    return kCount * 2 > kPairs ? (kPairs >= 12 ? 2 : 1) : kCount * 4 > kPairs ? (kPairs >= 12 ? 4 : 2) : 4;
}

// Calls f(pair, i) for all pairs and all i, the smaller range in the inner loop: with the larger one there, GCC 12 loaded keys and values
// again for each pair.
template <int kCount, int kOthers, typename F>
PENSTOCK_INLINE void for_both(F f) {
    if constexpr (kCount < kOthers) {
        PENSTOCK_UNROLL for (int i = 0; i < kOthers; ++i) {
            PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) f(p, i);
        }
    } else {
        PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
            PENSTOCK_UNROLL for (int i = 0; i < kOthers; ++i) f(p, i);
        }
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
        const int end = least(d + group_steps, steps);
        vi acc[kTiles][kCount];
        PENSTOCK_UNROLL for (int p = 0; p < kCount; ++p) {
            const vi start = Kv::start(q, group + p);
            PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) acc[u][p] = start;
        }
        do {
            vb k[kTiles];
            PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) {
                if constexpr (kFetch) {
                    if (d < fetched) prefetch_far(ahead[u] + d * kKeyBytes);
                }
                k[u] = load64(keys[u] + d * kKeyBytes);
            }
            for_both<kCount, kTiles>([&](int p, int u) PENSTOCK_LAMBDA {
                acc[u][p] = Kv::dot(acc[u][p], k[u], q.integers + (d * kPairs + p) * kQueryBytes);
            });
        } while (++d < end);
        PENSTOCK_UNROLL for (int u = 0; u < kTiles; ++u) {
            const vf scale = Kv::load_scales(keys[u] + scales);
            if constexpr (kFetch) prefetch_far(ahead[u] + scales);
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
PENSTOCK_TILE_READER(__attribute__((noinline))) void score_pairs(const Segment& segment, int from, int end, const Queries& q, int head_dim,
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

// kColumns * 16 columns of o from column d on.
template <typename Kv, int kCount, int kColumns>
PENSTOCK_INLINE void weigh_columns(const Segment& segment, int from, int end, const Scratch& scratch, int head_dim, int d,
                                   float* out) {
    typename Kv::Sum acc[kColumns][kCount];
    for (int c = 0; c < kColumns; ++c) {
        for (int p = 0; p < kCount; ++p) acc[c][p] = Kv::zero();
    }
    // dot4_u8 may take 8-bit weights as kUnsignedLess too small: that many sums of the values are added below.
    constexpr bool kLacks = Kv::kIsInt8 && kUnsignedLess != 0;
    [[maybe_unused]] constexpr uint32_t kOnes = 0x01010101u * (1 + kUnsignedLess);
    vi lacking[kColumns];
    if constexpr (kLacks) {
        for (int c = 0; c < kColumns; ++c) lacking[c] = set1_i(0);
    }
    const typename Kv::Weight* const weights = weights_of<Kv>(scratch, 0);
    const auto add_some = [&](const uint8_t* values, int at) __attribute__((always_inline)) {
        vb v[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            v[c] = load64(values + c * kValueBytes);
            if constexpr (kLacks) lacking[c] = dot4_u8(lacking[c], set1_pair(&kOnes), v[c]);
        }
        for_both<kCount, kColumns>([&](int p, int c) PENSTOCK_LAMBDA {
            acc[c][p] = Kv::add_values(acc[c][p], v[c], set1_pair(weights + p * kSegment + at));
        });
    };
    const int64_t stride = int64_t{kValueBytes} / kLanes * head_dim;  // bytes of kPositions positions
    const int64_t column = int64_t{kValueBytes} / kLanes * d;
    // Integers beyond the end are harmless, as their weights are zero; a bf16 there might be NaN.
    const int whole = Kv::kIsInt8 ? padded_end(end, Kv::kPositions) : end / Kv::kPositions * Kv::kPositions;
    for (int at = from; at < whole;) {
        const uint8_t* values = segment.tiles.values[at / kKvTile] + column;
        const uint8_t* ahead = segment.ahead.values[at / kKvTile] + column;
        for (const int stop = least(at + kKvTile, whole); at < stop; at += Kv::kPositions) {
            for (int c = 0; c < kColumns; ++c) prefetch_far(ahead + c * kValueBytes);
            add_some(values, at);
            values += stride;
            ahead += stride;
        }
    }
    if (!Kv::kIsInt8 && end % 2) add_some(scratch.odd + column, end - 1);
    if constexpr (kLacks) {
        for (int c = 0; c < kColumns; ++c) {
            for (int p = 0; p < kCount; ++p) acc[c][p] = add(acc[c][p], mul(lacking[c], set1_i(kUnsignedLess)));
        }
    }
    for (int p = 0; p < kCount; ++p) {
        for (int c = 0; c < kColumns; ++c) store(out + p * head_dim + c * kLanes, Kv::sum_of(acc[c][p], scratch.factor[p]));
    }
}

// o[pair][d] = sum over positions [from, end) of the segment of p[pair] * v[d]
template <typename Kv, int kCount>
PENSTOCK_TILE_READER(__attribute__((noinline))) void weigh_pairs(const Segment& segment, int from, int end, const Scratch& scratch, int head_dim,
                                           float* out) {
    constexpr int kColumns = side_by_side<kCount>();
    int d = 0;
    for (; d + kColumns * kLanes <= head_dim; d += kColumns * kLanes) {
        weigh_columns<Kv, kCount, kColumns>(segment, from, end, scratch, head_dim, d, out + d);
    }
    for (; d < head_dim; d += kLanes) weigh_columns<Kv, kCount, 1>(segment, from, end, scratch, head_dim, d, out + d);
}

// The values of the segment's last position, `end` - 1, with zeros beside them: nothing is written there yet.
PENSTOCK_TILE_READER(PENSTOCK_INLINE) void copy_odd_values(const KvTiles& tiles, int end, int head_dim, uint8_t* odd) {
    const uint8_t* values = tiles.values[end / kKvTile] + end % kKvTile / 2 * 4 * head_dim;
    for (int i = 0; i < 4 * head_dim; i += 64) store64(odd + i, even_halves(load64(values + i)));
}

template <typename Kv>
void score(const Segment& segment, int at, int count, int from, int end, int head_dim, const Scratch& scratch) {
    const int groups = (head_dim + kGroup - 1) / kGroup;
    for (int p = 0; p < count; p += kScorePairs) {
        with_count<kScorePairs>(count - p, [&]<int kCount>() {
            const auto run = at + p == 0 ? score_pairs<Kv, kCount, true> : score_pairs<Kv, kCount, false>;
            const Queries q{integers_of(scratch, at + p, head_dim, kQueryBytes / Kv::kColumns), scratch.q_scales + at * groups + p,
                            scratch.q_starts + at * groups + p};
            run(segment, from, end, q, head_dim, scratch.scores + p * kSegment);
        });
    }
}

template <typename Kv>
void weigh(const Segment& segment, int count, int from, int end, int head_dim, const Scratch& scratch, float* o) {
    if (!Kv::kIsInt8 && end % 2) copy_odd_values(segment.tiles, end, head_dim, scratch.odd);
    with_count<kPairs>(count, [&]<int kCount>() { weigh_pairs<Kv, kCount>(segment, from, end, scratch, head_dim, o); });
}

}  // namespace

void attention(const KvLayer& kv, const AttentionTask& t, float* memory) {
    Parts parts{memory};
    const Scratch scratch = make_scratch(parts, kv.format, kv.head_dim, kv.num_latent);
    kv.format == KvFormat::kInt16 ? attend<Int16Kv>(kv, t, scratch) : attend<Int8Kv>(kv, t, scratch);
}

void attention_merge(const KvLayer& kv, const AttentionTask& t, float* memory) {
    Parts parts{memory};
    const Scratch scratch = make_scratch(parts, kv.format, kv.head_dim, kv.num_latent);
    const Pairs pairs = make_pairs(kv, t, 0, t.num_queries * t.num_heads);
    clear(pairs, kv.value_dim(), scratch.merged);
    for (int begin = pairs.first[0] / kSegment * kSegment; begin <= pairs.last[pairs.count - 1]; begin += kSegment) {
        const State next = partial(t, pairs.count, kv.value_dim(), begin);
        for_pairs(pairs, begin, [&](int at, int count) { merge(pairs, at, count, begin, kv.value_dim(), scratch.merged, next); });
    }
    write_out(kv, t, pairs, scratch.merged);
}

int64_t attention_partial_floats(int num_pairs, int head_dim) { return 2 * kStateFloats + num_pairs * head_dim; }

int64_t attention_scratch_floats(KvFormat format, int head_dim, int num_latent) {
    Parts parts{nullptr};
    static_cast<void>(make_scratch(parts, format, head_dim, num_latent));
    return parts.taken;
}

}  // namespace penstock::PENSTOCK_ISA
