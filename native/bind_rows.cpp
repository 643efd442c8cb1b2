// The row table in Python: plans in, sampled tokens out, by request id. Reads `AdmitRow` and `RowPlan` of types/plan.py by the names
// of their fields.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "engine.h"
#include "row_table.h"
#include "texts.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using namespace penstock;

namespace {

int64_t to_int(nb::handle value) {
    const int64_t number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred()) throw nb::python_error();
    return number;
}

// Numbers beyond 32 bits become -1, which is refused wherever a token or a block is expected.
void to_ints(nb::handle sequence, std::vector<int32_t>& out) {
    out.clear();
    const nb::tuple items(sequence);  // the same one if it is a tuple
    for (nb::handle item : items) {
        const int64_t number = to_int(item);
        out.push_back(number > std::numeric_limits<int32_t>::max() || number < 0 ? -1 : static_cast<int32_t>(number));
    }
}

// The fields of `RowPlan`, made strings once: there is a row per request and step.
struct RowFields {
    nb::object request_id = interned("request_id"), context_len = interned("context_len"), query_len = interned("query_len"),
               new_block_ids = interned("new_block_ids"), samples = interned("samples");

    static nb::object interned(const char* name) {
        PyObject* text = PyUnicode_InternFromString(name);
        if (text == nullptr) throw nb::python_error();
        return nb::steal(text);
    }
};

class NamedRows {
  public:
    explicit NamedRows(const RowTableShape& shape) : table_(std::make_shared<RowTable>(shape)) {}

    int admit(nb::handle row) {
        const nb::object name = row.attr("request_id");
        return naming_request(name, [&] {
            if (slots_.contains(name)) throw std::invalid_argument("is admitted twice");
            std::vector<int32_t> tokens;
            to_ints(row.attr("token_ids"), tokens);
            to_ints(row.attr("block_ids"), scratch_);
            to_ints(row.attr("state_block_ids"), state_);
            to_ints(row.attr("state_source"), source_);
            const int slot = table_->admit(tokens, to_int(row.attr("num_prompt_tokens")), scratch_,
                                           to_int(row.attr("num_computed_tokens")), nb::isinstance(name, padding_id_),
                                           to_int(row.attr("second_at")), to_int(row.attr("adapter")), num_scored_of(row),
                                           state_, source_);
            slots_[name] = slot;
            return slot;
        });
    }

    void release(nb::handle name) {
        naming_request(name, [&] {
            table_->release(slot_of(name));
            nb::del(slots_[name]);
            return 0;
        });
    }

    void plan(const nb::tuple& rows, const nb::tuple& saves, const nb::dict& guesses) {
        if (table_.use_count() > 1) throw std::invalid_argument("the step that was begun has not ended");
        table_->begin_step();
        size_t num_guessed = 0;
        sampled_.clear();
        scored_.clear();
        for (nb::handle row : rows) {
            nb::object name = nb::getattr(row, fields_.request_id);
            const bool samples = nb::cast<int>(nb::getattr(row, fields_.samples)) > 0;
            PyObject* const guessed = guesses.size() == 0 ? nullptr : PyDict_GetItemWithError(guesses.ptr(), name.ptr());
            if (guessed == nullptr && PyErr_Occurred()) throw nb::python_error();
            naming_request(name, [&] {
                guesses_.clear();
                if (guessed != nullptr) to_ints(guessed, guesses_);
                num_guessed += guessed != nullptr;
                to_ints(nb::getattr(row, fields_.new_block_ids), scratch_);
                const int64_t context_len = to_int(nb::getattr(row, fields_.context_len));
                const int64_t query_len = to_int(nb::getattr(row, fields_.query_len));
                table_->add_row(slot_of(name), context_len, query_len, scratch_, samples, guesses_);
                return 0;
            });
            if (const auto [first, count] = table_->scored_of_row(); count > 0) scored_.push_back({name, first, count});
            if (samples) sampled_.push_back(std::move(name));
        }
        if (num_guessed != guesses.size()) throw std::invalid_argument("a guess is of a row that is not in the step");
        for (nb::handle save : saves) {
            const nb::object name = save.attr("request_id");
            naming_request(name, [&] {
                to_ints(save.attr("block_ids"), scratch_);
                table_->add_save(slot_of(name), to_int(save.attr("position")), scratch_);
                return 0;
            });
        }
    }

    void restrict(Engine& engine, const nb::dict& masks) {
        size_t num_found = 0;
        for (size_t i = 0; i < sampled_.size(); ++i) {
            PyObject* mask = PyDict_GetItemWithError(masks.ptr(), sampled_[i].ptr());
            if (mask == nullptr) {
                if (PyErr_Occurred()) throw nb::python_error();
                continue;
            }
            ++num_found;
            naming_request(sampled_[i], [&] {
                const int sample = static_cast<int>(i), num_masks = table_->num_guesses(sample) + 1;
                const auto num_bytes = static_cast<size_t>(table_->mask_words()) * sizeof(uint32_t);
                if (!PyBytes_Check(mask) || static_cast<size_t>(PyBytes_Size(mask)) != num_masks * num_bytes)
                    throw std::invalid_argument("has a mask that is not " + std::to_string(num_masks * num_bytes) + " bytes");
                mask_.resize(static_cast<size_t>(table_->mask_words()));
                for (int guess = 0; guess < num_masks; ++guess) {
                    std::memcpy(mask_.data(), PyBytes_AsString(mask) + guess * num_bytes, num_bytes);
                    table_->restrict(sample, guess, mask_.data());
                }
                return 0;
            });
        }
        if (num_found != masks.size()) throw std::invalid_argument("a mask is of a row that does not sample");
        engine.admit_masks();
    }

    // Begins a step, whose masks `restrict` brings before `run` ends it.
    void begin(Engine& engine) {
        require_fit(engine);
        table_->expect_masks();
        nb::gil_scoped_release release;
        engine.begin_step(table_->input(), table_);
    }

    nb::tuple run(Engine& engine) {
        nb::dict tokens;
        nb::list failed;
        if (engine.is_in_step()) {
            nb::gil_scoped_release release;
            engine.finish_step(table_.get());
        } else {
            require_fit(engine);
            const StepInput input = table_->input();
            if (input.num_tokens == 0) return nb::make_tuple(tokens, failed);
            nb::gil_scoped_release release;
            engine.run_step(input);
        }
        table_->append_sampled(engine.samples());
        for (size_t i = 0; i < sampled_.size(); ++i) {
            const SampleResult* const drawn = engine.samples().data() + table_->logit_of(static_cast<int>(i));
            const int num_drawn = table_->num_appended(static_cast<int>(i));
            if (drawn->token < 0) {
                failed.append(sampled_[i]);
            } else if (num_drawn == 1) {
                tokens[sampled_[i]] = nb::make_tuple(drawn->token);
            } else {
                nb::list several;
                for (int j = 0; j < num_drawn; ++j) several.append(drawn[j].token);
                tokens[sampled_[i]] = nb::tuple(several);
            }
        }
        return nb::make_tuple(tokens, failed);
    }

    nb::tuple read(Engine& engine) {
        if (!table_->fits(engine.shape())) throw std::invalid_argument("the engine's sizes do not fit the row table");
        if (!table_->is_one_pass() || !engine.has_states()) {
            throw std::invalid_argument("the rows or the engine's program are not of texts");
        }
        const StepInput input = table_->input();
        nb::dict states;
        nb::list failed;
        if (input.num_tokens == 0) return nb::make_tuple(states, failed);
        {
            nb::gil_scoped_release release;
            engine.run_step(input);
        }
        for (size_t i = 0; i < sampled_.size(); ++i) {
            const Engine::State state = engine.state_of(static_cast<int>(i));
            if (is_finite(state.data, state.count)) {
                states[sampled_[i]] = nb::bytes(state.data, static_cast<size_t>(state.count) * sizeof(float));
            } else {
                failed.append(sampled_[i]);
            }
        }
        return nb::make_tuple(states, failed);
    }

    nb::list sampled() const {
        nb::list names;
        for (const nb::object& name : sampled_) names.append(name);
        return names;
    }

    nb::list sampled_logits() const {
        nb::list ranges;
        for (int i = 0; i < table_->num_samples(); ++i) {
            ranges.append(nb::make_tuple(table_->logit_of(i), table_->num_appended(i)));
        }
        return ranges;
    }

    nb::list scored() const {
        nb::list rows;
        for (const Scored& row : scored_) rows.append(nb::make_tuple(row.name, row.first, row.count));
        return rows;
    }

    nb::tuple arrays() const {
        const StepInput in = table_->input();
        const auto list = [](const auto* values, int count) {
            nb::list out;
            for (int i = 0; i < count; ++i) out.append(values[i]);
            return out;
        };
        return nb::make_tuple(list(in.row_slots, in.num_rows), list(in.query_start_loc, in.num_rows + 1),
                              list(in.context_lens, in.num_rows), list(in.token_ids, in.num_tokens),
                              list(in.positions, in.num_tokens), list(in.slot_mapping, in.num_tokens),
                              list(in.logit_tokens, in.num_logits), list(in.logit_slots, in.num_logits));
    }

    // As if a step had sampled these; for tests.
    void append(const std::vector<int>& tokens) {
        std::vector<SampleResult> samples(tokens.size());
        for (size_t i = 0; i < tokens.size(); ++i) samples[i].token = tokens[i];
        table_->append_sampled(samples);
    }

  private:
    struct Scored {
        nb::object name;
        int first, count;  // of its logits
    };

    static int64_t num_scored_of(nb::handle row) {
        nb::object sampling = row.attr("sampling");
        return sampling.is_none() || sampling.attr("prompt_logprobs").is_none() ? -1 : to_int(row.attr("num_scored"));
    }

    void require_fit(const Engine& engine) const {
        if (!table_->fits(engine.shape()) || table_->num_state_blocks() != engine.recurrence().num_blocks()) {
            throw std::invalid_argument("the engine's sizes do not fit the row table");
        }
        if (!engine.has_named_logits()) throw std::invalid_argument("the logits are not of the vocabulary");
    }

    int slot_of(nb::handle name) {
        PyObject* slot = PyDict_GetItemWithError(slots_.ptr(), name.ptr());
        if (slot == nullptr) {
            if (PyErr_Occurred()) throw nb::python_error();
            throw std::invalid_argument("was never admitted, or is released");
        }
        return static_cast<int>(PyLong_AsLong(slot));
    }

    template <typename Function>
    static int naming_request(nb::handle name, Function function) {
        try {
            return function();
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(std::string("request ") + nb::repr(name).c_str() + " " + error.what());
        }
    }

    std::shared_ptr<RowTable> table_;  // a step that was begun has it, too
    RowFields fields_;
    nb::object padding_id_ = nb::module_::import_("penstock.types.plan").attr("PaddingId");
    nb::dict slots_;                   // request id -> slot
    std::vector<nb::object> sampled_;  // request ids of the step's samples, in order
    std::vector<Scored> scored_;       // rows of the step that tell of their prompts
    std::vector<int32_t> scratch_, state_, source_, guesses_;
    std::vector<uint32_t> mask_;  // the bytes of one, where words may lie
};

}  // namespace

void bind_rows(nb::module_& m) {
    nb::class_<NamedRows>(m, "RowTable",
                          "The rows that an executor knows, by request id. ValueError for whatever breaks the contract of plans.")
        .def(
            "__init__",
            [](NamedRows* self, int num_blocks, int block_size, int max_rows, int max_step_tokens, int max_model_len, int vocab_size,
               int window, bool is_one_pass, int max_scored, int num_state_blocks) {
                new (self) NamedRows({num_blocks, block_size, max_rows, max_step_tokens, max_model_len, vocab_size, window, is_one_pass, max_scored,
                                      num_state_blocks});
            },
            nb::kw_only(), "num_blocks"_a, "block_size"_a, "max_rows"_a, "max_step_tokens"_a, "max_model_len"_a, "vocab_size"_a,
            "window"_a, "is_one_pass"_a = false, "max_scored"_a = 0, "num_state_blocks"_a = 0)
        .def("release", &NamedRows::release, "request_id"_a)
        .def("admit", &NamedRows::admit, "row"_a, "Takes in an `AdmitRow`; returns its slot.")
        .def("plan", &NamedRows::plan, "rows"_a, "saves"_a = nb::tuple(), "guesses"_a = nb::dict(),
             "Describes a step of `RowPlan`s, after its releases and admits.")
        .def("begin", &NamedRows::begin, "engine"_a, "Begin a step of those rows, whose masks come later.")
        .def("restrict", &NamedRows::restrict, "engine"_a, "masks"_a,
             "Set the tokens that rows may sample: {request id: one bit per token, then the same for the position after each guess}.")
        .def("run", &NamedRows::run, "engine"_a,
             "Computes the planned step, without the GIL. ({request id: tokens}, [request ids without a usable logit]).")
        .def("read", &NamedRows::read, "engine"_a,
             "The same for texts: ({request id: answer, as the bytes of float32}, [request ids with one that is no finite number]).")
        .def("sampled", &NamedRows::sampled, "Request ids of the rows that sample in the planned step, in its order.")
        .def("sampled_logits", &NamedRows::sampled_logits,
             "For each of them, after the step: the index of its first logits, and the number of tokens that it got.")
        .def("scored", &NamedRows::scored, "Rows of the planned step whose prompts are scored: (request id, index of its first logits, number of logits).")
        .def("arrays", &NamedRows::arrays,
             "Of the planned step: row_slots, query_start_loc, context_lens, token_ids, positions, slot_mapping, logit_tokens,\n"
             "logit_slots; for tests.")
        .def("append", &NamedRows::append, "tokens"_a, "As if the planned step had sampled these; for tests.");
}
