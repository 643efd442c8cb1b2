// Attention by tiles (tiles.h), with keys and values of 8 bits. Sums of integers are exact in any order and all else is as it is by
// vectors, so both give the same bits: where tiles take over is a question of speed.
//
// The rows of a tile are kPairs pairs. A product takes 32 columns of 16 keys as they are stored; its sums leave the tile, because each
// group of columns has scales of its own. It takes 64 positions of the values, which a block may not have: values are copied beside each
// other, once for all pairs of a task. Their sums stay in tiles for a whole segment.

#include "attention_task.h"
#include "tiles.h"

namespace penstock::PENSTOCK_ISA {

namespace {

// Of a task: a tile takes as long whatever its rows hold, and by vectors time grows with the pairs (docs/kernels.md counts both).
constexpr int kFewestPairs = 8;

constexpr int kMostGroups = (kLargestHeadDim + kGroup - 1) / kGroup;
constexpr int kKeyGroupBytes = kGroup * kKvTile;  // of a tile of keys

class TileProducts {
  public:
    using Kv = Int8Kv;
    static constexpr int kPositions = kTileRowBytes;
    static_assert(kStep % kPositions == 0 && kPairs <= kMostTileRows);

    // Four sums, then weights and values, then queries and keys.
    PENSTOCK_MEMBER TileProducts() : tiles_({{kPairs}, {kPairs}, {kPairs}, {kPairs}, {kPairs}, {}, {kPairs, kGroup}, {kGroup / 4}}) {}

    // As rows of 32 columns, the last ones of a head with zeros behind.
    static PENSTOCK_MEMBER void lay_out(const Scratch& scratch, int, int item, int, vb first, vb second) {
        store64(scratch.q + item * kGroup, first);
        store64(scratch.q + (item + 2) * kGroup, second);
    }

    PENSTOCK_MEMBER void begin_segment() { copied_ = 0; }

    // While a tile of keys is multiplied the sums before it become scores. Values are copied here, so that memory is read evenly.
    PENSTOCK_TILE_READER() void score(const Segment& segment, int at, int, int from, int end, int head_dim, const Scratch& scratch) {
        alignas(64) int32_t starts[kMostGroups * kPairs][kLanes], sums[2][kMostGroups * kPairs][kLanes];
        const int groups = (head_dim + kGroup - 1) / kGroup;
        for (int i = 0; i < groups * kPairs; ++i) store(starts[i], set1_i(scratch.q_starts[at * groups + i]));
        const uint8_t* const q = scratch.q + at * groups * kGroup;
        for (int i = from; i <= end; ++i) {
            if (i < end) {
                multiply_keys(segment.tiles.keys[i], q, groups, starts, sums[i % 2]);
                if (at == 0) fetch_keys(segment.ahead.keys[i], head_dim);
                if (i >= copied_) copy_values(segment, i, head_dim, scratch.values);
            }
            if (i > from) {
                const uint8_t* const scales = segment.tiles.keys[i - 1] + kKvTile * head_dim;
                add_groups(sums[(i - 1) % 2], scales, scratch.q_scales + at * groups, groups, scratch.scores + (i - 1) * kKvTile);
            }
        }
    }

    void weigh(const Segment&, int count, int from, int end, int head_dim, const Scratch& scratch, float* o) {
        int d = 0;
        for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) weigh_columns<4>(count, from, end, head_dim, d, scratch, o);
        for (; d < head_dim; d += kLanes) weigh_columns<1>(count, from, end, head_dim, d, scratch, o);
    }

  private:
    // sums[group][pair] of 16 positions. Of a last group of 16 columns the tile holds what follows the keys, too, scales and values: zeros of
    // the queries multiply these.
    PENSTOCK_MEMBER void multiply_keys(const uint8_t* keys, const uint8_t* q, int groups, const int32_t (*starts)[kLanes],
                                       int32_t (*sums)[kLanes]) {
        for (int g = 0; g < groups; ++g) {
            tiles_.load<0>(starts + g * kPairs, kTileRowBytes);
            tiles_.load<6>(q + g * kPairs * kGroup, kGroup);
            tiles_.load<7>(keys + g * kKeyGroupBytes, kTileRowBytes);
            tiles_.add_signed_unsigned<0, 6, 7>();
            tiles_.store<0>(sums + g * kPairs, kTileRowBytes);
        }
    }

    static PENSTOCK_MEMBER void add_groups(const int32_t (*sums)[kLanes], const uint8_t* scales, const float* q_scales, int groups,
                                           float* scores) {
        vf sum[kPairs];
        PENSTOCK_UNROLL for (int p = 0; p < kPairs; ++p) sum[p] = set1(0.0f);
        for (int g = 0; g < groups; ++g, sums += kPairs, q_scales += kPairs) {
            const vf scale = Kv::load_scales(scales + g * Kv::kScaleBytes);
            PENSTOCK_UNROLL for (int p = 0; p < kPairs; ++p) {
                sum[p] = fma(to_float(load(sums[p])), mul(scale, set1(q_scales[p])), sum[p]);
            }
        }
        PENSTOCK_UNROLL for (int p = 0; p < kPairs; ++p) store(scores + p * kSegment, sum[p]);
    }

    // The first half of them, and the scales: the others are KeyFetcher's.
    static PENSTOCK_MEMBER void fetch_keys(const uint8_t* keys, int head_dim) {
        const int bytes = kKvTile * head_dim;
        for (int i = 0; i < bytes / 2; i += 64) prefetch(keys + i);
        for (int i = 0; i < head_dim; i += kGroup) prefetch(keys + bytes + i / kGroup * Kv::kScaleBytes);
    }

    // In order: what a pair sees begins and ends no earlier than what those before it see.
    PENSTOCK_MEMBER void copy_values(const Segment& segment, int tile, int head_dim, uint8_t* values) {
        const int bytes = kKvTile * head_dim;
        for (int i = 0; i < bytes; i += 64) {
            prefetch(segment.ahead.values[tile] + i);
            store64(values + tile * bytes + i, load64(segment.tiles.values[tile] + i));
        }
        copied_ = tile + 1;
    }

    // kBlocks * 16 columns of o from column d on.
    template <int kBlocks>
    PENSTOCK_MEMBER void weigh_columns(int count, int from, int end, int head_dim, int d, const Scratch& scratch, float* o) {
        static_assert(kBlocks <= 4);
        const auto for_blocks = [](auto f) PENSTOCK_LAMBDA {
            f.template operator()<0>();
            if constexpr (kBlocks > 1) f.template operator()<1>();
            if constexpr (kBlocks > 2) f.template operator()<2>();
            if constexpr (kBlocks > 3) f.template operator()<3>();
        };
        alignas(64) int32_t sums[kBlocks][kPairs][kLanes];
        for_blocks([&]<int kBlock>() PENSTOCK_LAMBDA { tiles_.zero<kBlock>(); });
        for (int at = from; at < end; at += kPositions) {
            tiles_.load<4>(scratch.weights + at, kSegment);
            for_blocks([&]<int kBlock>() PENSTOCK_LAMBDA {
                tiles_.load<5>(scratch.values + at * head_dim + (d + kBlock * kLanes) * 4, 4 * head_dim);
                tiles_.add_unsigned_signed<kBlock, 4, 5>();
            });
        }
        for_blocks([&]<int kBlock>() PENSTOCK_LAMBDA { tiles_.store<kBlock>(sums[kBlock], kTileRowBytes); });
        for (int p = 0; p < count; ++p) {
            for (int c = 0; c < kBlocks; ++c) store(o + p * head_dim + d + c * kLanes, Kv::sum_of({load(sums[c][p])}, scratch.factor[p]));
        }
    }

    Tiles tiles_;
    int copied_ = 0;  // tiles of the segment's values
};

}  // namespace

void attention(const KvLayer& kv, const AttentionTask& t, float* memory) {
    if (kv.format != KvFormat::kInt8 || t.num_queries * t.heads_per_kv < kFewestPairs) {
        return avx512::kernel_table().attention(kv, t, memory);
    }
    const Scratch scratch = make_scratch(memory, kv.head_dim);
    attend(kv, t, scratch, TileProducts());
}

int64_t attention_scratch_floats(int head_dim) { return scratch_floats(head_dim) + kSegment * head_dim / static_cast<int>(sizeof(float)); }

}  // namespace penstock::PENSTOCK_ISA
