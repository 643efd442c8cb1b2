// Results of pairs, merged over segments: (m, l, o) of those so far with the next one, rescaled to the larger bound.
// Included by attention_task.h alone.

#pragma once

#include "attention_scratch.h"
#include "int4.h"
#include "softmax.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

PENSTOCK_INLINE bool sees(const Pairs& pairs, int p, int begin) {
    return pairs.last[p] >= begin && pairs.first[p] < begin + kSegment;
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

// Adds each head's sink to its sum: a term without a value. Relative to the bound it may be infinite: the keys then weigh nothing, and
// the output is zero. Not in `write_out`, whose loop is faster without a call.
__attribute__((noinline)) void add_sinks(const AttentionTask& t, const Pairs& pairs, const State& state) {
    for (int p = 0; p < pairs.count; ++p) state.sum[p] += exp2f(t.sinks[pairs.head[p]] * kLog2E - state.max[p]);
}

void write_out(const KvLayer& kv, const AttentionTask& t, const Pairs& pairs, const State& state) {
    const int head_dim = kv.value_dim();
    if (t.sinks) add_sinks(t, pairs, state);
    for (int p = 0; p < pairs.count; ++p) {
        const vf inverse = set1(1.0f / state.sum[p]);
        float* o = state.o + p * head_dim;
        if (kv.format == KvFormat::kInt4) rotate(o, o, head_dim);
        for (int d = 0; d < head_dim; d += kLanes) store(t.out + pairs.offset[p] + d, mul(load(o + d), inverse));
    }
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
