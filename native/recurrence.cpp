#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace penstock {

namespace {

alignas(64) constexpr float kNothing[kStateColumns] = {};  // a line of the state before a first token

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// ln(1 + e^x)
float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }

}  // namespace

void decays_and_rates(const LinearAttentionOp& op, const float* steps, const float* gates, const float* step_bias, const float* decay, float* out) {
    for (int head = 0; head < op.num_heads; ++head) {
        const float step = std::clamp(softplus(steps[head] + step_bias[head]), op.min_step, op.max_step);
        out[head] = std::exp(step * decay[head]);
        out[op.num_heads + head] = gates ? sigmoid(gates[head]) : step;
    }
}

Recurrence::Recurrence(const EngineShape& shape, KvCache& kv, int num_members)
    : kv_(kv), line_(shape.state_line), num_lines_(shape.num_state_lines), scratch_(num_members) {
    if (num_lines_ == 0) return;
    if (line_ < kPanel || line_ > kStateColumns || line_ % kPanel != 0) throw std::invalid_argument("a line of state has 16, 32, 48 or 64 floats");
    lines_of_block_ = static_cast<int>(kv.block_bytes() / (line_ * static_cast<int64_t>(sizeof(float))));
    if (lines_of_block_ == 0) throw std::invalid_argument("a block has no room for a line of state");
    const int64_t num_blocks = (num_lines_ + lines_of_block_ - 1) / lines_of_block_;
    if (num_blocks > std::numeric_limits<int32_t>::max()) throw std::invalid_argument("a row's state needs more blocks than can be counted");
    num_blocks_ = static_cast<int>(num_blocks);
}

void Recurrence::reserve(int64_t first_line, int64_t num_matrices, int rows, int columns) {
    if (first_line < 0 || rows < 1 || columns < 1 || num_lines_ == 0 || first_line + num_matrices * rows * num_panels(columns) > num_lines_) {
        throw std::invalid_argument("the engine was not made for this state");
    }
    for (Scratch& scratch : scratch_) {
        if (static_cast<int>(scratch.to.size()) >= rows) continue;
        scratch.from.resize(rows);
        scratch.to.resize(rows);
        scratch.saved.resize(rows);
        scratch.lines.resize(int64_t{rows} * line_);
    }
}

void Recurrence::locate(const int32_t* blocks, int64_t line, int count, float** lines) const {
    int64_t block = line / lines_of_block_, place = line % lines_of_block_;
    for (int i = 0; i < count; ++i) {
        lines[i] = kv_.numbers(blocks[block]) + place * line_;
        if (++place == lines_of_block_) ++block, place = 0;
    }
}

// Calls compute(first token, number of tokens) for all of the row's tokens, and up to each save by itself.
template <typename Task, typename Compute>
void Recurrence::run(Task& task, int row, int64_t line, int count, int member, Compute compute) {
    Scratch& scratch = scratch_[member];
    const RowState state = input_->row_states ? input_->row_states[row] : RowState{};
    if (state.blocks) {
        locate(state.blocks, line, count, scratch.to.data());
    } else {
        for (int i = 0; i < count; ++i) scratch.to[i] = scratch.lines.data() + int64_t{i} * line_;
    }
    if (!state.source) {
        std::fill_n(scratch.from.begin(), count, kNothing);
    } else if (state.source == state.blocks) {
        std::copy_n(scratch.to.begin(), count, scratch.from.begin());
    } else {
        locate(state.source, line, count, scratch.saved.data());
        std::copy_n(scratch.saved.begin(), count, scratch.from.begin());
    }
    task.from = scratch.from.data();
    task.to = scratch.to.data();
    int done = 0;
    const auto compute_until = [&](int end) {
        if (end == done) return;
        compute(done, end - done);
        done = end;
        task.from = task.to;
    };
    for (int i = 0; i < input_->num_saves; ++i) {
        const StateSave& save = input_->saves[i];
        if (save.row != row) continue;
        compute_until(save.num_tokens);
        locate(save.blocks.data(), line, count, scratch.saved.data());
        for (int j = 0; j < count; ++j) std::memcpy(scratch.saved[j], scratch.to[j], static_cast<size_t>(line_) * sizeof(float));
    }
    compute_until(input_->query_start_loc[row + 1] - input_->query_start_loc[row]);
}

void Recurrence::convolve(const KernelTable& kernels, CausalConvTask task, int64_t first_line, int width, int row, int panel, int member) {
    const int column = panel * line_, rows = task.taps - 1;
    const float *const x = task.x + column, *const bias = task.bias;
    float* const out = task.out + column;
    task.weight += column;
    task.bias = bias ? bias + column : nullptr;
    task.columns = std::min(line_, width - column);
    run(task, row, first_line + int64_t{panel} * rows, rows, member, [&](int first, int count) {
        task.x = x + first * task.x_ld;
        task.out = out + first * task.out_ld;
        task.num_tokens = count;
        kernels.causal_conv(task);
    });
}

void Recurrence::attend(const KernelTable& kernels, LinearAttentionTask task, int64_t first_line, int value_dim, int row, int panel, int member) {
    const int column = panel * line_;
    const LinearAttentionTask whole = task;
    task.columns = std::min(line_, value_dim - column);
    run(task, row, first_line + int64_t{panel} * task.key_dim, task.key_dim, member, [&](int first, int count) {
        task.q = whole.q + first * task.ld;
        task.k = whole.k + first * task.ld;
        task.decays = whole.decays + first * task.ld;
        task.rates = whole.rates + first * task.ld;
        task.v = whole.v + first * task.v_ld + column;
        task.out = whole.out + first * task.out_ld + column;
        task.num_tokens = count;
        kernels.linear_attention(task);
    });
}

}  // namespace penstock
