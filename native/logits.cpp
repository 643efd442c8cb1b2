// The last product of a step, and the draw. Of a row that is given its likeliest token only the largest logit is kept: 32 rows of 49,152
// logits are 6 MB, more than cores have of caches of their own, and would go to memory and back, or to another core, for one number each.

#include <algorithm>
#include <cstring>
#include <new>

#include "engine.h"
#include "logit_changes.h"

namespace penstock {

namespace {

constexpr int kPanelsTogether = 48;  // whose logits of a block of rows stay in the second-level cache; a multiple of every tile's panels
constexpr int kTogether = kPanelsTogether * kPanel;

}  // namespace

void Engine::set_logits(int buffer) {
    logits_ = buffer;
    num_own_ = static_cast<int>(program_.size());
    if (program_.empty() || program_.back().linears.size() != 1) return;
    const LinearOp& last = program_.back().linears[0];
    if (last.out != buffer || last.residual >= 0) return;
    --num_own_;
    for (Floats& scratch : logits_scratch_) scratch.resize(size_t{kRowBlock} * kTogether);
}

bool Engine::is_logits(const Instruction& instruction) const { return &instruction - program_.data() == num_own_; }

void Engine::plan_logits() {
    wants_best_.assign(input_.num_logits, 0);
    if (!input_.tokens || num_own_ == static_cast<int>(program_.size())) return;
    for (int row = 0; row < input_.num_logits; ++row) wants_best_[row] = wants_best_alone(sampling_[input_.logit_slots[row]]);
    const PackedMatrix& w = matrices_[program_[num_own_].linears[0].weight].matrix;
    const int grain = stages_[num_strands() * num_own_].grain;
    best_stride_ = ceil_div(w.panels, grain) * ceil_div(grain, kPanelsTogether);
    best_.assign(int64_t{input_.num_logits} * best_stride_, BestLogit{});
}

void Engine::run_logits(const LinearOp& op, const Stage& stage, int task, int member) {
    const PackedMatrix& w = matrices_[op.weight].matrix;
    const Activation& x = activations_[op.activation].view;
    const Rows rows = rows_of(stage, task);
    const PanelRange range = panels_of(stage, task, w.panels);
    Epilogue epilogue = epilogue_of(op);
    const auto begin = wants_best_.begin() + rows.begin, end = wants_best_.begin() + rows.end;
    if (std::find(begin, end, 1) == end) return kernels_.gemm(w, x, rows.begin, rows.end, range, epilogue, {});
    float* const scratch = logits_scratch_[member].data();
    epilogue.ld = kTogether;
    int piece = task / stage.row_blocks * ceil_div(stage.grain, kPanelsTogether);
    for (int panel = range.begin; panel < range.end; panel += kPanelsTogether, ++piece) {
        const int stop = std::min(panel + kPanelsTogether, range.end), id = panel * kPanel, count = std::min(stop * kPanel, w.rows) - id;
        epilogue.out = scratch - (int64_t{rows.begin} * kTogether + id);
        kernels_.gemm(w, x, rows.begin, rows.end, {panel, stop, stop < range.end ? stop : range.next}, epilogue, {});
        for (int row = rows.begin; row < rows.end; ++row) {
            const float* const logits = scratch + (row - rows.begin) * kTogether;
            if (wants_best_[row]) {
                if (const uint32_t* mask = input_.mask_of(row)) apply_mask(scratch + (row - rows.begin) * kTogether, count, id, mask);
                look_at(logits, count, id, best_[int64_t{row} * best_stride_ + piece]);
            } else {
                std::memcpy(buffers_[logits_].row(row) + id, logits, count * sizeof(float));
            }
        }
    }
}

// Of the pieces that were looked at, which lie in the order of their ids.
int32_t Engine::best_of_row(int row) const {
    BestLogit best;
    for (int i = 0; i < best_stride_; ++i) {
        const BestLogit& piece = best_[int64_t{row} * best_stride_ + i];
        if (piece.logit > best.logit) best = piece;
    }
    return token_of(best);
}

void Engine::run_sampling(int row, int member) {
    if (wants_best_[row]) {
        samples_[row].token = best_of_row(row);
        return;
    }
    const int slot = input_.logit_slots[row];
    SamplerScratch& scratch = sampler_scratch_[member];
    try {
        sample_row(buffers_[logits_].row(row), shape_.vocab_size, sampling_[slot], input_.mask_of(row),
                   input_.tokens + slot * input_.tokens_stride,
                   input_.num_tokens_of_slot[slot], input_.num_prompt_of_slot[slot], scratch, samples_[row]);
    } catch (const std::bad_alloc&) {  // must not leave the task; run_step tells it
        scratch = SamplerScratch{};
        sampler_lacks_memory_.store(true, std::memory_order_relaxed);
    }
}

}  // namespace penstock
