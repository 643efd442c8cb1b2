// Choosing the next token of one row, as `backends/reference/sampling.py` specifies it. Called by Logits (logits.h), one
// row at a time, on any thread; never knows about batches, blocks or Python.

#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace penstock {

constexpr int kMaxLogprobs = 20;  // types/sampling.py MAX_LOGPROBS

// The sampling that one request asked for; kept per executor slot from admission to release.
struct RowSampling {
    double temperature = 1.0;  // 0 is greedy
    int32_t top_k = 0;         // 0 keeps all
    double top_p = 1.0;
    double min_p = 0.0;
    double top_n_sigma = 0.0;  // > 0: drops logits that far below the largest
    float repetition_penalty = 1.0f;
    float frequency_penalty = 0.0f;
    float presence_penalty = 0.0f;
    int32_t penalty_window = std::numeric_limits<int32_t>::max();  // the penalties count only the last so many tokens
    uint64_t seed = 0;
    int32_t min_tokens = 0;
    int32_t num_logprobs = -1;   // -1: none; k: the sampled token's and those of the k most likely
    int32_t num_prompt_logprobs = 0;  // alternatives to each token of the prompt, where that is scored
    bool restricts_ids = false;  // whether allowed_ids holds
    std::vector<int32_t> allowed_ids;
    std::vector<int32_t> bias_ids;
    std::vector<float> bias_values;      // [bias_ids.size()]
    std::vector<int32_t> banned_tokens;  // sequences, concatenated
    std::vector<int32_t> banned_starts;  // [num_sequences + 1] into banned_tokens; empty if there are none
    std::vector<int32_t> stop_ids;       // what min_tokens forbids

    bool has_penalties() const {
        return repetition_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f;
    }
};

// Calls `visit` with the name, as in types/sampling.py, and the field of each number that a request can set.
template <typename Visit>
void each_number(RowSampling& row, const Visit& visit) {
    visit("repetition_penalty", row.repetition_penalty);
    visit("presence_penalty", row.presence_penalty);
    visit("frequency_penalty", row.frequency_penalty);
    visit("top_n_sigma", row.top_n_sigma);
    visit("temperature", row.temperature);
    visit("top_k", row.top_k);
    visit("top_p", row.top_p);
    visit("min_p", row.min_p);
    visit("min_tokens", row.min_tokens);
    visit("seed", row.seed);
}

struct SampleResult {
    int32_t token = -1;    // -1: no logit was a number above -inf, or one was +inf: the model's output is broken
    // Only if logprobs were asked for. If the model's logits are unusable (none is a number, or one is +inf): -inf, 1 and 0.
    float logprob = 0.0f;
    int32_t rank = 0;      // tokens more likely, plus one
    int32_t num_top = 0;
    std::array<int32_t, kMaxLogprobs> top_ids{};
    std::array<float, kMaxLogprobs> top_logprobs{};
};

// The largest of the logits that were looked at, and of equal ones the first.
struct BestLogit {
    float logit = -std::numeric_limits<float>::infinity();
    int32_t id = -1;
};

struct Candidate {
    float logit;
    int32_t id;
};

// Working memory of one thread. Grows to the vocabulary on first use; allocates nothing after that.
struct SamplerScratch {
    std::vector<float> raw;             // [vocab_size] logits before any change, if logprobs are asked for
    std::vector<double> weights;        // [vocab_size] exp((logit - max) / temperature)
    std::vector<double> block_sums;     // of `weights`
    std::vector<float> block_max;       // of logits
    std::vector<float> order;           // block maxima, partly sorted
    std::vector<Candidate> candidates;  // what top_k and top_p may keep, in order of id
    std::vector<Candidate> ranked;      // the same, partly sorted by likelihood
    std::vector<double> candidate_weights;
    std::vector<int32_t> counts;        // [vocab_size] uses of each token; zero between calls
    std::vector<int32_t> touched;       // ids with a count, so that zeroing is cheap
    std::vector<float> saved;           // logits put aside while others are banned
};

// Draws the token that follows `tokens` [num_tokens] (prompt, then output). Changes `logits` [vocab_size].
// `mask`, unless it is null, has a bit for each token that may be drawn. The result depends on these arguments alone. Ids outside
// the vocabulary are ignored.
void sample_row(float* logits, int vocab_size, const RowSampling& row, const uint32_t* mask, const int32_t* tokens,
                int num_tokens, int num_prompt_tokens, SamplerScratch& scratch, SampleResult& result);

// How likely `token` was, of `logits` [vocab_size] as the model gave them, and which `num_top` were the most likely.
void score_token(const float* logits, int vocab_size, int token, int num_top, SamplerScratch& scratch, SampleResult& result);

// Whether a row is given the token of its largest logit, of those that its mask allows, and nothing else is asked of them:
// `look_at` finds it, piece by piece.
bool wants_best_alone(const RowSampling& row);

// Looks at `logits` [count] of the ids from `first_id` on, which lie behind those that were looked at. NaN counts as -inf.
void look_at(const float* logits, int count, int first_id, BestLogit& best);

// As in `SampleResult`.
int32_t token_of(const BestLogit& best);

}  // namespace penstock
