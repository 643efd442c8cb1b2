#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")  // nobody reads exception flags; without this no comparison of floats vectorises
#endif

#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>

#include "logit_changes.h"
#include "philox.h"

// Compiled for several instruction sets, chosen when the module is loaded. None of them contracts a product and a sum, so
// all give the same bits. That choice runs before a sanitizer is there for it.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PENSTOCK_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define PENSTOCK_CLONES
#endif

namespace penstock {
namespace {

constexpr int kBlock = 64;  // logits that share a maximum and a sum; divides by both lane counts below
constexpr int kBestBlock = 256;  // logits of which the largest is looked for at once, if only that is wanted
constexpr int kMaxLanes = 4;  // as every instruction set has them: the compiler compares a wider vector than it has number by number
constexpr int kMaxChains = 4;  // vectors of maxima side by side, each waiting for itself alone
constexpr int kSumLanes = 8;
using MaxLanes = float __attribute__((vector_size(kMaxLanes * sizeof(float))));
constexpr size_t kFirstPrefix = 256;    // candidates that top_p looks at before it looks at all
constexpr size_t kFewToSort = 64;
constexpr Candidate kLeastLikely{kNever, std::numeric_limits<int32_t>::max()};
constexpr double kTiny = 1e-300;        // weights below are 0

int num_blocks(int n) { return (n + kBlock - 1) / kBlock; }

bool is_likelier(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// exp(x) for x <= 0, within 1e-14 of it; below kTiny for NaN and for x < -700. No branch, no call: loops over it vectorise,
// and every instruction set gives the same bits. Range reduction to |r| <= ln(2)/2, then the Taylor series.
inline double exp_negative(double x) {
    constexpr double kRound = 0x1.8p52;  // adding it leaves an integer in the low bits
    const double clamped = x > -700.0 ? x : -700.0;
    const double shifted = clamped * 1.4426950408889634 + kRound;
    const double k = shifted - kRound;
    const double r = (clamped - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    double p = 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const double scale = std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) << 52) + (uint64_t{1023} << 52));
    return p * scale;
}

// The largest of one block; NaN counts as -inf. Always inlined, to be compiled for the instruction sets of its callers.
__attribute__((always_inline)) inline float max_of_block(const float* x, int n) {
    MaxLanes largest[kMaxChains];
    for (MaxLanes& lanes : largest) lanes = MaxLanes{} + kNever;
    int i = 0;
    for (; i + kMaxChains * kMaxLanes <= n; i += kMaxChains * kMaxLanes) {
        for (int j = 0; j < kMaxChains; ++j) {
            MaxLanes lanes;
            std::memcpy(&lanes, x + i + j * kMaxLanes, sizeof(lanes));
            largest[j] = lanes > largest[j] ? lanes : largest[j];
        }
    }
    for (int j = 1; j < kMaxChains; ++j) largest[0] = largest[j] > largest[0] ? largest[j] : largest[0];
    float best = kNever;
    for (; i < n; ++i) best = x[i] > best ? x[i] : best;
    for (int j = 0; j < kMaxLanes; ++j) best = largest[0][j] > best ? largest[0][j] : best;
    return best;
}

// Fills `block_max` and returns the largest of all.
PENSTOCK_CLONES
float fill_block_max(const float* logits, int vocab_size, SamplerScratch& scratch) {
    scratch.block_max.resize(num_blocks(vocab_size));
    float best = kNever;
    for (int b = 0, start = 0; start < vocab_size; ++b, start += kBlock) {
        scratch.block_max[b] = max_of_block(logits + start, std::min(kBlock, vocab_size - start));
        best = std::max(best, scratch.block_max[b]);
    }
    return best;
}

// Fills `weights` with exp((logit - max) * inverse_temperature), zero where below `floor` (> 0), and `block_sums`; returns the
// sum of all. Every sum has a fixed order.
PENSTOCK_CLONES
double fill_weights(const float* logits, int vocab_size, double max, double inverse_temperature, double floor,
                    SamplerScratch& scratch) {
    scratch.weights.resize(vocab_size);
    scratch.block_sums.resize(num_blocks(vocab_size));
    double total = 0.0;
    for (int b = 0, start = 0; start < vocab_size; ++b, start += kBlock) {
        const int n = std::min(kBlock, vocab_size - start);
        const float* x = logits + start;
        double* w = scratch.weights.data() + start;
        for (int i = 0; i < n; ++i) {
            const double weight = exp_negative((static_cast<double>(x[i]) - max) * inverse_temperature);
            w[i] = weight >= floor ? weight : 0.0;
        }
        double lanes[kSumLanes] = {};
        int i = 0;
        for (; i + kSumLanes <= n; i += kSumLanes)
            for (int j = 0; j < kSumLanes; ++j) lanes[j] += w[i + j];
        for (; i < n; ++i) lanes[0] += w[i];
        scratch.block_sums[b] =
            ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
        total += scratch.block_sums[b];
    }
    return total;
}

// A draw over the whole vocabulary from `weights` and `block_sums`.
int draw_dense(double u, double total, int vocab_size, const SamplerScratch& scratch) {
    const double target = u * total;
    double cumulative = 0.0;
    int last = -1;
    for (int b = 0, start = 0; start < vocab_size; ++b, start += kBlock) {
        const double after = cumulative + scratch.block_sums[b];
        if (scratch.block_sums[b] > 0.0) {
            // Rounding may put the target beyond the last block: then the last token with a weight is drawn.
            const bool is_last_chance = after > target || start + kBlock >= vocab_size;
            for (int id = start; id < std::min(start + kBlock, vocab_size); ++id) {
                if (scratch.weights[id] <= 0.0) continue;
                last = id;
                if (!is_last_chance) continue;
                cumulative += scratch.weights[id];
                if (cumulative > target) return id;
            }
            if (after > target) return last;
        }
        cumulative = after;
    }
    return last;
}

// Fills `candidates`, in order of id, with a set that holds the `count` likeliest: exactly all logits from some bound up.
// Needs `block_max`. The count-th largest block maximum is such a bound, since as many logits reach it.
void collect_likeliest(const float* logits, int vocab_size, size_t count, SamplerScratch& scratch) {
    float bound = kNever;
    if (count <= scratch.block_max.size()) {
        scratch.order = scratch.block_max;
        std::nth_element(scratch.order.begin(), scratch.order.begin() + (count - 1), scratch.order.end(), std::greater<>());
        bound = scratch.order[count - 1];
    }
    scratch.candidates.clear();
    for (size_t b = 0; b < scratch.block_max.size(); ++b) {
        if (!(scratch.block_max[b] >= bound)) continue;
        const int end = std::min(static_cast<int>(b + 1) * kBlock, vocab_size);
        for (int id = static_cast<int>(b) * kBlock; id < end; ++id)
            if (logits[id] >= bound && logits[id] > kNever) scratch.candidates.push_back({logits[id], id});
    }
}

// Fills `candidates`, in order of id, with those of a weight of at least `bound`. Needs `weights`.
void collect_heaviest(const float* logits, int vocab_size, double bound, SamplerScratch& scratch) {
    scratch.candidates.clear();
    for (int id = 0; id < vocab_size; ++id)
        if (scratch.weights[id] >= bound) scratch.candidates.push_back({logits[id], id});
}

// exp((logit - max) * inverse_temperature), the same bits as in `fill_weights`.
struct WeightOf {
    double max;
    double inverse_temperature;
    double operator()(const Candidate& candidate) const {
        return exp_negative((static_cast<double>(candidate.logit) - max) * inverse_temperature);
    }
};

// Cuts `ranked` to the `count` likeliest, in any order, and returns the last of them.
Candidate cut_to_likeliest(size_t count, std::vector<Candidate>& ranked) {
    if (ranked.size() <= count) return kLeastLikely;
    std::nth_element(ranked.begin(), ranked.begin() + (count - 1), ranked.end(), is_likelier);
    ranked.resize(count);
    return ranked.back();
}

// The last of the shortest likeliest prefix whose weights reach `target`: halves `ranked` until few are left to sort.
// Nothing if all together don't reach it.
std::optional<Candidate> end_of_prefix(double target, const WeightOf& weight_of, std::vector<Candidate>& ranked) {
    const auto at = [&](size_t i) { return ranked.begin() + static_cast<std::ptrdiff_t>(i); };
    size_t low = 0, high = ranked.size();  // the end lies between
    double cumulative = 0.0;               // of the first `low`; below the target
    while (high - low > kFewToSort) {
        const size_t middle = low + (high - low) / 2;
        std::nth_element(at(low), at(middle), at(high), is_likelier);
        double half = 0.0;
        for (size_t i = low; i < middle; ++i) half += weight_of(ranked[i]);
        if (cumulative + half >= target) {
            high = middle;
        } else {
            cumulative += half;
            low = middle;
        }
    }
    std::sort(at(low), at(high), is_likelier);
    while (low < high && cumulative < target) cumulative += weight_of(ranked[low++]);
    if (cumulative < target && high == ranked.size()) return std::nullopt;
    return ranked[low - 1];
}

// top_n_sigma: -inf for logits further below the largest than `num_sigmas` standard deviations of all. Sums in order of id.
void keep_near_largest(float* logits, int vocab_size, double num_sigmas) {
    const auto is_possible = [](float logit) { return logit > kNever; };
    float max = kNever;
    double sum = 0.0, squares = 0.0;
    int count = 0;
    for (int i = 0; i < vocab_size; ++i) {
        if (!is_possible(logits[i])) continue;
        max = std::max(max, logits[i]);
        sum += logits[i];
        ++count;
    }
    const double mean = sum / count;
    for (int i = 0; i < vocab_size; ++i) {
        if (is_possible(logits[i])) squares += (logits[i] - mean) * (logits[i] - mean);
    }
    const double least = max - num_sigmas * std::sqrt(squares / count);
    for (int i = 0; i < vocab_size; ++i) {
        if (logits[i] < least) logits[i] = kNever;
    }
}

// top_k, then top_p: collects candidates and returns the last, in order of likelihood, that is kept.
Candidate narrow(const float* logits, int vocab_size, const RowSampling& row, const WeightOf& weight_of,
                 SamplerScratch& scratch) {
    std::vector<Candidate>& ranked = scratch.ranked;
    if (row.top_k > 0) {
        collect_likeliest(logits, vocab_size, row.top_k, scratch);
        ranked = scratch.candidates;
        const Candidate last = cut_to_likeliest(row.top_k, ranked);
        if (row.top_p >= 1.0) return last;
        double total = 0.0;
        for (const Candidate& candidate : ranked) total += weight_of(candidate);
        return end_of_prefix(row.top_p * total, weight_of, ranked).value_or(last);
    }
    const double total = fill_weights(logits, vocab_size, weight_of.max, weight_of.inverse_temperature, kTiny, scratch);
    collect_likeliest(logits, vocab_size, kFirstPrefix, scratch);
    ranked = scratch.candidates;
    if (const auto last = end_of_prefix(row.top_p * total, weight_of, ranked)) return *last;
    // All tokens below this bound together weigh less than top_p may leave out.
    collect_heaviest(logits, vocab_size, std::max((1.0 - row.top_p) * total / vocab_size, kTiny), scratch);
    ranked = scratch.candidates;
    return end_of_prefix(row.top_p * total, weight_of, ranked).value_or(kLeastLikely);
}

// The draw among the candidates up to `last` that min_p keeps.
int draw_candidate(double u, double min_p, const Candidate& last, const WeightOf& weight_of, SamplerScratch& scratch) {
    const double floor = std::max(min_p, kTiny);  // the largest weight is 1
    std::vector<Candidate>& candidates = scratch.candidates;
    std::vector<double>& weights = scratch.candidate_weights;
    weights.clear();
    double total = 0.0;
    size_t num_kept = 0;
    for (const Candidate& candidate : candidates) {
        const double weight = weight_of(candidate);
        if (weight < floor || is_likelier(last, candidate)) continue;
        candidates[num_kept++] = candidate;
        weights.push_back(weight);
        total += weight;
    }
    double cumulative = 0.0;
    for (size_t i = 0; i < num_kept; ++i) {
        cumulative += weights[i];
        if (cumulative > u * total) return candidates[i].id;
    }
    return num_kept > 0 ? candidates[num_kept - 1].id : -1;
}

// Steps 5 and 6.
int choose(const float* logits, int vocab_size, const RowSampling& row, uint64_t position, SamplerScratch& scratch) {
    if (row.temperature == 0.0) {
        BestLogit best;
        look_at(logits, vocab_size, 0, best);
        return token_of(best);
    }
    const float max = fill_block_max(logits, vocab_size, scratch);
    if (!std::isfinite(max)) return -1;  // relative to +inf no logit would have a weight
    const double inverse_temperature = std::min(1.0 / row.temperature, 1e300);  // times 0 must stay 0
    const double u = uniform(row.seed, position);
    if (row.top_k == 0 && row.top_p >= 1.0) {
        const double total = fill_weights(logits, vocab_size, max, inverse_temperature, std::max(row.min_p, kTiny), scratch);
        return draw_dense(u, total, vocab_size, scratch);
    }
    const WeightOf weight_of{max, inverse_temperature};
    const Candidate last = narrow(logits, vocab_size, row, weight_of, scratch);
    return draw_candidate(u, row.min_p, last, weight_of, scratch);
}

// Step 1, on logits as the model gave them.
void fill_logprobs(const float* raw, int vocab_size, int num_top, SamplerScratch& scratch, SampleResult& result) {
    result.logprob = kNever;
    result.rank = 1;
    result.num_top = 0;
    const float max = fill_block_max(raw, vocab_size, scratch);
    if (!std::isfinite(max)) return;
    const double log_total = std::log(fill_weights(raw, vocab_size, max, 1.0, kTiny, scratch));
    const auto logprob = [&](float x) { return static_cast<float>((static_cast<double>(x) - max) - log_total); };
    const float chosen = std::isnan(raw[result.token]) ? kNever : raw[result.token];
    int num_likelier = 0;
    for (int i = 0; i < vocab_size; ++i) num_likelier += raw[i] > chosen ? 1 : 0;
    result.logprob = logprob(chosen);
    result.rank = num_likelier + 1;
    if (num_top == 0) return;
    collect_likeliest(raw, vocab_size, num_top, scratch);
    cut_to_likeliest(num_top, scratch.candidates);
    std::sort(scratch.candidates.begin(), scratch.candidates.end(), is_likelier);
    for (const Candidate& candidate : scratch.candidates) {
        result.top_ids[result.num_top] = candidate.id;
        result.top_logprobs[result.num_top++] = logprob(candidate.logit);
    }
}

}  // namespace

void score_token(const float* logits, int vocab_size, int token, int num_top, SamplerScratch& scratch, SampleResult& result) {
    result.token = token;
    fill_logprobs(logits, vocab_size, std::min(num_top, kMaxLogprobs), scratch, result);
}

bool wants_best_alone(const RowSampling& row) { return row.temperature == 0.0 && row.num_logprobs < 0 && !changes_logits(row); }

// Step 5 for temperature 0. One pass, and a second look at a block that has a larger one.
PENSTOCK_CLONES
void look_at(const float* logits, int count, int first_id, BestLogit& best) {
    for (int start = 0; start < count; start += kBestBlock) {
        const float largest = max_of_block(logits + start, std::min(kBestBlock, count - start));
        if (!(largest > best.logit)) continue;
        int i = start;
        while (logits[i] != largest) ++i;
        best = {largest, first_id + i};
    }
}

int32_t token_of(const BestLogit& best) { return std::isfinite(best.logit) ? best.id : -1; }

void sample_row(float* logits, int vocab_size, const RowSampling& row, const uint32_t* mask, const int32_t* tokens,
                int num_tokens, int num_prompt_tokens, SamplerScratch& scratch, SampleResult& result) {
    const float* raw = logits;
    const bool drops = row.top_n_sigma > 0.0 && row.temperature != 0.0;
    if (row.num_logprobs >= 0 && (mask || drops || changes_logits(row))) {
        scratch.raw.assign(logits, logits + vocab_size);
        raw = scratch.raw.data();
    }
    change_logits(logits, vocab_size, row, mask, tokens, num_tokens, num_prompt_tokens, scratch);
    if (drops) keep_near_largest(logits, vocab_size, row.top_n_sigma);
    result.token = choose(logits, vocab_size, row, num_tokens, scratch);
    if (row.num_logprobs >= 0 && result.token >= 0)
        fill_logprobs(raw, vocab_size, std::min(row.num_logprobs, kMaxLogprobs), scratch, result);
}

}  // namespace penstock
