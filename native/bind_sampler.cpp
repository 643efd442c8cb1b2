// The sampler in Python: what a request asked for, and one row's draw for the tests. Owns nothing.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "philox.h"
#include "sampler.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using namespace penstock;

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void init_row(RowSampling* self, double temperature, int top_k, double top_p, double min_p, float repetition_penalty,
              float frequency_penalty, float presence_penalty, uint64_t seed, int min_tokens, int num_logprobs,
              std::optional<std::vector<int32_t>> allowed_ids, const std::vector<std::pair<int32_t, float>>& bias,
              const std::vector<std::vector<int32_t>>& banned_sequences, std::vector<int32_t> stop_ids, int num_prompt_logprobs,
              std::optional<int32_t> penalty_window) {
    new (self) RowSampling();
    self->temperature = temperature;
    self->top_k = top_k;
    self->top_p = top_p;
    self->min_p = min_p;
    self->repetition_penalty = repetition_penalty;
    self->frequency_penalty = frequency_penalty;
    self->presence_penalty = presence_penalty;
    if (penalty_window) self->penalty_window = *penalty_window;
    self->seed = seed;
    self->min_tokens = min_tokens;
    self->num_logprobs = num_logprobs;
    self->num_prompt_logprobs = num_prompt_logprobs;
    self->restricts_ids = allowed_ids.has_value();
    if (allowed_ids) self->allowed_ids = std::move(*allowed_ids);
    for (const auto& [id, value] : bias) {
        self->bias_ids.push_back(id);
        self->bias_values.push_back(value);
    }
    if (!banned_sequences.empty()) self->banned_starts.push_back(0);
    for (const auto& sequence : banned_sequences) {
        self->banned_tokens.insert(self->banned_tokens.end(), sequence.begin(), sequence.end());
        self->banned_starts.push_back(static_cast<int32_t>(self->banned_tokens.size()));
    }
    self->stop_ids = std::move(stop_ids);
}

nb::tuple sample(const Vector<float>& logits, const RowSampling& row, const Vector<int32_t>& tokens, int num_prompt_tokens,
                 SamplerScratch* scratch, const std::optional<std::vector<uint32_t>>& mask) {
    const int num_tokens = static_cast<int>(tokens.size());
    if (num_prompt_tokens < 0 || num_prompt_tokens > num_tokens) throw std::invalid_argument("more prompt than tokens");
    if (mask && mask->size() != (logits.size() + 31) / 32) throw std::invalid_argument("the mask is not of the vocabulary");
    std::vector<float> changed(logits.data(), logits.data() + logits.size());
    SamplerScratch own;
    SampleResult result;
    sample_row(changed.data(), static_cast<int>(changed.size()), row, mask ? mask->data() : nullptr, tokens.data(),
               num_tokens, num_prompt_tokens, scratch ? *scratch : own, result);
    std::vector<std::pair<int, float>> top;
    for (int i = 0; i < result.num_top; ++i) top.emplace_back(result.top_ids[i], result.top_logprobs[i]);
    return nb::make_tuple(result.token, result.logprob, result.rank, top);
}

nb::tuple score(const Vector<float>& logits, int token, int num_top) {
    if (token < 0 || static_cast<size_t>(token) >= logits.size()) throw std::invalid_argument("the token is outside the vocabulary");
    SamplerScratch scratch;
    SampleResult result;
    score_token(logits.data(), static_cast<int>(logits.size()), token, num_top, scratch, result);
    std::vector<std::pair<int, float>> top;
    for (int i = 0; i < result.num_top; ++i) top.emplace_back(result.top_ids[i], result.top_logprobs[i]);
    return nb::make_tuple(result.token, result.logprob, result.rank, top);
}

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<RowSampling>(m, "RowSampling", "What one request asked for; made by backends/native/executor.py.")
        .def("__init__", &init_row, nb::kw_only(), "temperature"_a = 1.0, "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0,
             "repetition_penalty"_a = 1.0f, "frequency_penalty"_a = 0.0f, "presence_penalty"_a = 0.0f, "seed"_a = 0,
             "min_tokens"_a = 0, "num_logprobs"_a = -1, "allowed_ids"_a.none() = nb::none(),
             "bias"_a = std::vector<std::pair<int32_t, float>>(),
             "banned_sequences"_a = std::vector<std::vector<int32_t>>(), "stop_ids"_a = std::vector<int32_t>(),
             "num_prompt_logprobs"_a = 0, "penalty_window"_a.none() = nb::none());
    nb::class_<SamplerScratch>(m, "SamplerScratch", "Working memory that calls of `sample` may share, one at a time.")
        .def(nb::init<>());
    m.def("sample", &sample, "logits"_a, "row"_a, "tokens"_a, "num_prompt_tokens"_a, "scratch"_a.none() = nb::none(),
          "mask"_a.none() = nb::none(),
          "(token, logprob, rank, [(id, logprob), ...]) of the token after `tokens`; leaves `logits` [vocab_size] alone.\n"
          "Token -1: no logit was a number above -inf, or one was +inf.");
    m.def("score", &score, "logits"_a, "token"_a, "num_top"_a, "The same of a given token of a prompt; nothing is drawn.");
    m.def("uniform", &uniform, "seed"_a, "position"_a, "The number in (0, 1) that belongs to a seed and a position.");
}
