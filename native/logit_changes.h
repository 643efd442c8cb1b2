// The changes that a request makes to its logits before a token is chosen: steps 2 to 4 of `backends/reference/sampling.py`. Called by the
// sampler, one row at a time, on any thread; chooses nothing.

#pragma once

#include <cstdint>
#include <limits>

#include "sampler.h"

namespace penstock {

constexpr float kNever = -std::numeric_limits<float>::infinity();  // of a token that can't be chosen

// Leaves alone the logits [count] of the ids from `first_id` on whose bit in `mask` is set, and forbids the others.
void apply_mask(float* logits, int count, int first_id, const uint32_t* mask);

// Whether `change_logits` does anything at all to this row, apart from a mask.
bool changes_logits(const RowSampling& row);

// The mask, if there is one, bans, biases and penalties, in this order, on `logits` [vocab_size] of the token that follows
// `tokens` [num_tokens].
void change_logits(float* logits, int vocab_size, const RowSampling& row, const uint32_t* mask, const int32_t* tokens,
                   int num_tokens, int num_prompt_tokens, SamplerScratch& scratch);

}  // namespace penstock
