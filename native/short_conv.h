// Short convolutions: each column of a layer's input by itself, over the last few positions of its row.
//
//     input of a token   b [width] | c [width] | u [width]
//     v                  b * u, as bf16
//     output             c * (weight[0] * v of kernel - 1 positions before + ... + weight[kernel - 1] * v (+ bias))
//
// v of the tokens before a step's is the layer's state, in the blocks of the KV cache: that of position p in the block of p, at place
// p % block_size % (kernel - 1). A block keeps its last computed positions alone (docs/decisions/recurrent-state.md).
//
// The engine (engine.h) calls both functions for one token at a time. `keep` overwrites what `convolve` of other tokens reads: it runs
// when all tokens of the layer are done. A row's tokens are in one strand, since the input is overwritten by the next layer.

#pragma once

#include <cstdint>

#include "instructions.h"
#include "kv_cache.h"

namespace penstock {

struct ShortConvLayer {
    int32_t index;        // among the layers with a state
    const float* inputs;  // [tokens of the step, 3 * width]
    const float* weight;  // [kernel, width]
    const float* bias;    // [width], or null
};

void convolve(const EngineShape& shape, const KvCache& kv, const StepInput& step, const ShortConvLayer& layer, int64_t token, float* out);
void keep_state(const EngineShape& shape, KvCache& kv, const StepInput& step, const ShortConvLayer& layer, int64_t token);

}  // namespace penstock
