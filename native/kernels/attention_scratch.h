// The memory of an attention task: its pairs of a query and a head, and where its intermediate results are. Included by
// attention_task.h alone.

#pragma once

#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

constexpr int kPairs = kAttentionPairs;          // whose sums fit the registers
constexpr int kScorePairs = kAttentionScorePairs;  // whose scores are computed together, in so many sums side by side
constexpr int kScoreSums = kAttentionScoreSums;
constexpr int kTaskPairs = kAttentionTaskPairs;  // that share the keys and values of a segment while these are in the cache
constexpr int kSegmentTiles = kSegment / kKvTile;
constexpr int kStateFloats = kTaskPairs + kLanes;  // of the numbers of each pair, which are read sixteen at a time

// (query, head) pairs of a task, ordered query-major.
struct Pairs {
    const float* q[kTaskPairs];
    int64_t offset[kTaskPairs];    // floats from the task's q and out
    int32_t last[kTaskPairs];      // position that a pair sees
    int32_t first[kTaskPairs];     // likewise
    int32_t head[kTaskPairs];      // of those that share the KV head
    float factor[kTaskPairs];      // of its scores
    int32_t dither[kTaskPairs];    // where that of its weights begins
    int count;
};

// Results of pairs: after one segment, or merged over several. Of pair p max[p], sum[p] and o[p * head_dim] on.
struct State {
    float* max;
    float* sum;
    float* o;
};

// Where a task keeps its intermediate results; all of it stays in the first- and second-level cache.
struct Scratch {
    float* scores;        // [kPairs][kSegment]
    uint8_t* weights;     // [kPairs][kSegment] uint8 or bf16
    float* value_scales;  // [kSegment], of 8-bit values
    float* sizes;         // [kSegment], of the same: log2_below
    float* factor;        // [kPairs] by which the sums of 8-bit values and of their weights are multiplied: mostly 1
    uint8_t* q;           // [kTaskPairs / kPairs][head_dim / columns][kPairs][columns]: 2 columns of int16, or 4 of int8
    float* q_scales;      // [kTaskPairs / kPairs][key groups][kPairs], of int8 queries
    int32_t* q_starts;    // likewise: what the sums of integers start at
    uint8_t* odd;         // [head_dim] pairs: the 16-bit values of a last position that has no neighbour yet
    uint8_t* latents;     // [kSegment / 4][num_latent] fours: a segment's latents as values, whose keys lie otherwise
    uint8_t* wide;        // likewise in place of latents: a segment's tiles of kInt4 as kInt8, keys and scales, then values
    State merged;         // of kTaskPairs
    State next;           // of kTaskPairs
};

PENSTOCK_INLINE State take_state(Parts& memory, int head_dim) {
    return {memory.take(kStateFloats), memory.take(kStateFloats), memory.take(kTaskPairs * head_dim)};
}

PENSTOCK_INLINE Scratch make_scratch(Parts& memory, KvFormat format, int head_dim, int num_latent) {
    const int groups = (head_dim + kGroup - 1) / kGroup, wide = format == KvFormat::kInt4 ? 2 * (head_dim + groups + 1) : 0;
    Scratch scratch;
    scratch.scores = memory.take(kPairs * kSegment);
    scratch.weights = reinterpret_cast<uint8_t*>(memory.take(kPairs * kSegment / 2));
    scratch.value_scales = memory.take(kSegment);
    scratch.sizes = memory.take(kSegment);
    scratch.factor = memory.take(kLanes);
    scratch.q = reinterpret_cast<uint8_t*>(memory.take(kTaskPairs * head_dim / 2));
    scratch.q_scales = memory.take(kTaskPairs * groups);
    scratch.q_starts = reinterpret_cast<int32_t*>(memory.take(kTaskPairs * groups));
    scratch.odd = reinterpret_cast<uint8_t*>(memory.take(head_dim));
    scratch.merged = take_state(memory, head_dim);
    scratch.next = take_state(memory, head_dim);
    scratch.latents = scratch.wide = reinterpret_cast<uint8_t*>(memory.take(kSegment / 4 * (2 * num_latent + wide)));
    return scratch;
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
