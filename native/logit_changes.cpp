#include "logit_changes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>

namespace penstock {
namespace {

constexpr int32_t kInPrompt = 1 << 30;  // flag in SamplerScratch::counts, above any count of output tokens
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr auto kBits = [] {  // those of a word, the lowest first
    std::array<uint32_t, 32> bits{};
    for (int i = 0; i < 32; ++i) bits[i] = uint32_t{1} << i;
    return bits;
}();

using Vocabulary = std::span<float>;  // logits by id

bool has(Vocabulary logits, int32_t id) { return id >= 0 && static_cast<size_t>(id) < logits.size(); }

bool ends_with(const int32_t* tokens, int num_tokens, const int32_t* suffix, int length) {
    return length <= num_tokens && std::equal(suffix, suffix + length, tokens + (num_tokens - length));
}

void ban(Vocabulary logits, int32_t id, std::vector<Candidate>& undo) {
    if (!has(logits, id)) return;
    undo.push_back({logits[id], id});
    logits[id] = kNever;
}

void keep_allowed(Vocabulary logits, const RowSampling& row, SamplerScratch& scratch) {
    scratch.saved.clear();
    for (int32_t id : row.allowed_ids) scratch.saved.push_back(has(logits, id) ? logits[id] : 0.0f);
    std::fill(logits.begin(), logits.end(), kNever);
    for (size_t i = 0; i < row.allowed_ids.size(); ++i)
        if (has(logits, row.allowed_ids[i])) logits[row.allowed_ids[i]] = scratch.saved[i];
}

// Step 2. Bans that would leave nothing are undone.
void restrict(Vocabulary logits, const RowSampling& row, const uint32_t* mask, const int32_t* tokens, int num_tokens,
              int num_prompt_tokens, SamplerScratch& scratch) {
    if (mask) apply_mask(logits.data(), static_cast<int>(logits.size()), 0, mask);
    if (row.restricts_ids) keep_allowed(logits, row, scratch);
    std::vector<Candidate>& undo = scratch.candidates;
    undo.clear();
    for (size_t i = 0; i + 1 < row.banned_starts.size(); ++i) {
        const int32_t* sequence = row.banned_tokens.data() + row.banned_starts[i];
        const int length = row.banned_starts[i + 1] - row.banned_starts[i];
        if (length > 0 && ends_with(tokens, num_tokens, sequence, length - 1)) ban(logits, sequence[length - 1], undo);
    }
    if (num_tokens - num_prompt_tokens < row.min_tokens)
        for (int32_t id : row.stop_ids) ban(logits, id, undo);
    if (undo.empty() || std::any_of(logits.begin(), logits.end(), [](float x) { return x > kNever; })) return;
    for (size_t i = undo.size(); i-- > 0;) logits[undo[i].id] = undo[i].logit;  // backwards: an id may be banned twice
}

void count_tokens(Vocabulary logits, const int32_t* tokens, int start, int end, bool is_prompt, SamplerScratch& scratch) {
    for (int i = start; i < end; ++i) {
        const int32_t id = tokens[i];
        if (!has(logits, id)) continue;
        if (scratch.counts[id] == 0) scratch.touched.push_back(id);
        if (is_prompt)
            scratch.counts[id] |= kInPrompt;
        else
            ++scratch.counts[id];
    }
}

// Step 4.
void penalize(Vocabulary logits, const RowSampling& row, const int32_t* tokens, int num_tokens, int num_prompt_tokens,
              SamplerScratch& scratch) {
    if (scratch.counts.size() < logits.size()) scratch.counts.resize(logits.size(), 0);
    scratch.touched.clear();
    const int start = std::max(0, num_tokens - row.penalty_window);
    if (row.repetition_penalty != 1.0f) count_tokens(logits, tokens, start, num_prompt_tokens, true, scratch);
    count_tokens(logits, tokens, std::max(start, num_prompt_tokens), num_tokens, false, scratch);
    for (int32_t id : scratch.touched) {
        const int32_t count = scratch.counts[id] & ~kInPrompt;
        scratch.counts[id] = 0;
        float& x = logits[id];
        if (row.repetition_penalty != 1.0f && std::isfinite(x)) {
            x = x > 0.0f ? x / row.repetition_penalty : x * row.repetition_penalty;
            x = std::clamp(x, -kLargest, kLargest);  // an extreme penalty saturates: it neither bans nor spoils the logits
        }
        if (count == 0) continue;
        x -= row.frequency_penalty * static_cast<float>(count);
        x -= row.presence_penalty;
    }
}

bool restricts(const RowSampling& row) { return row.restricts_ids || !row.banned_starts.empty() || row.min_tokens > 0; }

}  // namespace

void apply_mask(float* logits, int count, int first_id, const uint32_t* mask) {
    for (int begin = 0; begin < count;) {
        const int bit = (first_id + begin) % 32, size = std::min(32 - bit, count - begin);
        const uint32_t word = mask[(first_id + begin) / 32];
        float* const part = logits + begin;
        if (size < 32) {
            for (int i = 0; i < size; ++i) part[i] = word >> (bit + i) & 1 ? part[i] : kNever;
        } else if (word != ~uint32_t{0}) {  // every logit is written, so that compilers find vectors: branches cost 20 times as much
            for (int i = 0; i < 32; ++i) part[i] = word & kBits[i] ? part[i] : kNever;
        }
        begin += size;
    }
}

bool changes_logits(const RowSampling& row) { return restricts(row) || !row.bias_ids.empty() || row.has_penalties(); }

void change_logits(float* logits, int vocab_size, const RowSampling& row, const uint32_t* mask, const int32_t* tokens,
                   int num_tokens, int num_prompt_tokens, SamplerScratch& scratch) {
    const Vocabulary vocabulary(logits, static_cast<size_t>(vocab_size));
    if (mask || restricts(row)) restrict(vocabulary, row, mask, tokens, num_tokens, num_prompt_tokens, scratch);
    for (size_t i = 0; i < row.bias_ids.size(); ++i)
        if (has(vocabulary, row.bias_ids[i])) vocabulary[row.bias_ids[i]] += row.bias_values[i];
    if (row.has_penalties()) penalize(vocabulary, row, tokens, num_tokens, num_prompt_tokens, scratch);
}

}  // namespace penstock
