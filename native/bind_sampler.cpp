// The sampler in Python: what a request asked for, and one row's draw for the tests. Owns nothing.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "philox.h"
#include "sampler.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using namespace penstock;

nb::tuple tuple_of(const SampleResult& result) {
    std::vector<std::pair<int, float>> top;
    for (int i = 0; i < result.num_top; ++i) top.emplace_back(result.top_ids[i], result.top_logprobs[i]);
    return nb::make_tuple(result.token, result.logprob, result.rank, top);
}

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void init_row(RowSampling* self, const nb::kwargs& given) {
    new (self) RowSampling();
    size_t num_read = 0;
    const auto read = [&](const char* name, auto& field) {
        if (!given.contains(name)) return;
        field = nb::cast<std::decay_t<decltype(field)>>(nb::object(given[name]));
        ++num_read;
    };
    std::optional<int32_t> penalty_window;
    std::optional<std::vector<int32_t>> allowed_ids;
    std::vector<std::pair<int32_t, float>> bias;
    std::vector<std::vector<int32_t>> banned_sequences;
    each_number(*self, read);
    read("num_logprobs", self->num_logprobs);
    read("num_prompt_logprobs", self->num_prompt_logprobs);
    read("stop_ids", self->stop_ids);
    read("penalty_window", penalty_window);
    read("allowed_ids", allowed_ids);
    read("bias", bias);
    read("banned_sequences", banned_sequences);
    if (num_read != given.size()) throw nb::type_error("RowSampling has no field of one of these names");
    if (penalty_window) self->penalty_window = *penalty_window;
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
    return tuple_of(result);
}

nb::tuple score(const Vector<float>& logits, int token, int num_top) {
    if (token < 0 || static_cast<size_t>(token) >= logits.size()) throw std::invalid_argument("the token is outside the vocabulary");
    SamplerScratch scratch;
    SampleResult result;
    score_token(logits.data(), static_cast<int>(logits.size()), token, num_top, scratch, result);
    return tuple_of(result);
}

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<RowSampling>(m, "RowSampling", "What one request asked for; made by backends/native/executor.py.")
        .def("__init__", &init_row);
    nb::class_<SamplerScratch>(m, "SamplerScratch", "Working memory that calls of `sample` may share, one at a time.")
        .def(nb::init<>());
    m.def("sample", &sample, "logits"_a, "row"_a, "tokens"_a, "num_prompt_tokens"_a, "scratch"_a.none() = nb::none(),
          "mask"_a.none() = nb::none(),
          "(token, logprob, rank, [(id, logprob), ...]) of the token after `tokens`; leaves `logits` [vocab_size] alone.\n"
          "Token -1: no logit was a number above -inf, or one was +inf.");
    m.def("score", &score, "logits"_a, "token"_a, "num_top"_a, "The same of a given token of a prompt; nothing is drawn.");
    m.def("uniform", &uniform, "seed"_a, "position"_a, "The number in (0, 1) that belongs to a seed and a position.");
}
