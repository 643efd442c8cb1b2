#include "logits.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "logit_changes.h"

namespace penstock {

namespace {

constexpr int kPanelsTogether = 48;  // whose logits of a block of rows stay in the second-level cache; a multiple of every tile's panels
constexpr int kLogitsTogether = kPanelsTogether * kPanel;

}  // namespace

Logits::Logits(const EngineShape& shape, const KernelTable& kernels, int num_members)
    : shape_(shape), kernels_(kernels), sampling_(shape.max_rows), draw_scratch_(num_members), scratch_(num_members) {
    samples_.reserve(shape.max_logits());
}

void Logits::expect_product(float scale, float cap) {
    scale_ = scale;
    cap_ = cap;
    for (Floats& scratch : scratch_) scratch.resize(kernels_.task_rows(1) * size_t{kLogitsTogether});
}

void Logits::begin_step(const StepInput& input, float* logits, int64_t width, const Stage* product, int panels, bool awaits_masks) {
    awaits_masks_.store(awaits_masks, std::memory_order_relaxed);
    input_ = input;
    logits_ = logits;
    width_ = width;
    samples_.resize(input.tokens ? input.num_logits : 0);
    lacks_memory_.store(false, std::memory_order_relaxed);
    wants_best_.assign(input.num_logits, 0);
    if (!input.tokens || product == nullptr) return;
    for (int row = 0; row < input.num_logits; ++row) {
        wants_best_[row] = input.target_of(row) < 0 && wants_best_alone(sampling_[input.logit_slots[row]]);
    }
    best_stride_ = ceil_div(panels, product->grain) * ceil_div(product->grain, kPanelsTogether);
    best_.assign(int64_t{input.num_logits} * best_stride_, BestLogit{});
}

void Logits::admit_masks() {
    awaits_masks_.store(false, std::memory_order_release);
    awaits_masks_.notify_all();
}

// The mask of a row, once it is there.
const uint32_t* Logits::mask_of(int row) const {
    awaits_masks_.wait(true, std::memory_order_acquire);
    return input_.mask_of(row);
}

void Logits::end_step() const {
    if (lacks_memory_.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

void Logits::change(float* logits, int64_t ld, int num_rows, int count) const {
    if (scale_ == 1.0f && cap_ == 0.0f) return;
    for (int row = 0; row < num_rows; ++row) kernels_.cap_row(logits + row * ld, count, scale_, cap_);
}

void Logits::multiply(const PackedMatrix& w, const Activation& x, Epilogue epilogue, const Stage& stage, int task, int member,
                      const Adapters* adapters, int site) {
    const int first = stage.first_row(task), last = stage.end_row(task);
    const PanelRange range = stage.panels(task, w.panels);
    const auto begin = wants_best_.begin() + first, end = wants_best_.begin() + last;
    if (std::find(begin, end, 1) == end) {
        kernels_.gemm(w, x, first, last, range, epilogue, {});
        if (adapters) adapters->expand(site, first, last, range.begin, range.end, epilogue.out, epilogue.ld);
        const int id = range.begin * kPanel;
        return change(epilogue.out + first * epilogue.ld + id, epilogue.ld, last - first, std::min(range.end * kPanel, w.rows) - id);
    }
    float* const scratch = scratch_[member].data();
    epilogue.ld = kLogitsTogether;
    int piece = range.begin / stage.grain * ceil_div(stage.grain, kPanelsTogether);
    for (int panel = range.begin; panel < range.end; panel += kPanelsTogether, ++piece) {
        const int stop = std::min(panel + kPanelsTogether, range.end), id = panel * kPanel, count = std::min(stop * kPanel, w.rows) - id;
        epilogue.out = scratch - (int64_t{first} * kLogitsTogether + id);
        kernels_.gemm(w, x, first, last, {panel, stop, stop < range.end ? stop : range.next}, epilogue, {});
        if (adapters) adapters->expand(site, first, last, panel, stop, epilogue.out, epilogue.ld);
        change(scratch, kLogitsTogether, last - first, count);
        for (int row = first; row < last; ++row) {
            float* const logits = scratch + (row - first) * kLogitsTogether;
            if (wants_best_[row]) {
                if (const uint32_t* mask = mask_of(row)) apply_mask(logits, count, id, mask);
                look_at(logits, count, id, best_[int64_t{row} * best_stride_ + piece]);
            } else {
                std::memcpy(logits_ + row * width_ + id, logits, count * sizeof(float));
            }
        }
    }
}

// The best of the pieces that were looked at, which lie in the order of their ids.
int32_t Logits::best_of_row(int row) const {
    BestLogit best;
    for (int i = 0; i < best_stride_; ++i) {
        const BestLogit& piece = best_[int64_t{row} * best_stride_ + i];
        if (piece.logit > best.logit) best = piece;
    }
    return token_of(best);
}

void Logits::draw(int row, int member) {
    draw_among(row, member);
    if (tokens_.empty()) return;
    SampleResult& sample = samples_[row];
    if (sample.token >= 0) sample.token = tokens_[sample.token];
    for (int i = 0; i < sample.num_top; ++i) sample.top_ids[i] = tokens_[sample.top_ids[i]];
}

void Logits::draw_among(int row, int member) {
    if (wants_best_[row]) {
        samples_[row].token = best_of_row(row);
        return;
    }
    const int slot = input_.logit_slots[row];
    SamplerScratch& scratch = draw_scratch_[member];
    try {
        if (const int32_t target = input_.target_of(row); target >= 0) {
            return score_token(logits_ + row * width_, num_named(), target, sampling_[slot].num_prompt_logprobs, scratch, samples_[row]);
        }
        sample_row(logits_ + row * width_, num_named(), sampling_[slot], mask_of(row),
                   input_.tokens + slot * input_.tokens_stride, input_.num_tokens_before(row), input_.num_prompt_of_slot[slot], scratch,
                   samples_[row]);
    } catch (const std::bad_alloc&) {  // must not leave the task; `end_step` tells it
        scratch = SamplerScratch{};
        lacks_memory_.store(true, std::memory_order_relaxed);
    }
}

}  // namespace penstock
