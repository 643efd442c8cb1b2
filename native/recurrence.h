// Layers whose state lies in blocks of its own: a convolution over a row's last positions, and linear attention. models/program.py has
// their formulas.
//
// A row's state is a list of matrices: for each operation in order its heads' [key_dim, value_dim], or a convolution's [taps - 1, width].
// Each is cut into panels of `state_line` columns, and a panel's rows are lines that follow each other:
//
//     matrix           panel 0      panel 1     panel 2          lines of a row's blocks
//     row 0           |--- 0 ---|  |--- 3 ---|  |- 6 -    |      block 0   0 1 2 3
//     row 1           |--- 1 ---|  |--- 4 ---|  |- 7 -    |      block 1   4 5 6 7
//     row 2           |--- 2 ---|  |--- 5 ---|  |- 8 -    |      block 2   8 ...
//
// A block has as many lines as fit, so no line is in two blocks. footprint.py computes with the same rule how many blocks that takes.
//
// The engine (engine.h) calls this for one panel of one row of the step at a time. Panels are independent, and a row's tokens come one
// after the other: its bits do not depend on other rows, or on how its tokens are divided into steps.

#pragma once

#include <cstdint>
#include <vector>

#include "floats.h"
#include "instructions.h"
#include "kv_cache.h"

namespace penstock {

// Of the heads of a token: by what its state decays, then how much of the token's value is added. [num_heads] each
void decays_and_rates(const LinearAttentionOp& op, const float* steps, const float* gates, const float* step_bias, const float* decay, float* out);

class Recurrence {
  public:
    // std::invalid_argument if the shape's line does not fit into a block.
    Recurrence(const EngineShape& shape, KvCache& kv, int num_members);

    // Blocks that a row's state takes; 0 without any.
    int num_blocks() const { return num_blocks_; }
    // Makes room for matrices of so many rows. std::invalid_argument if the operation's lines are not all among those of the shape.
    void reserve(int64_t first_line, int64_t num_matrices, int rows, int columns);
    int num_panels(int columns) const { return ceil_div(columns, line_); }

    // The arrays of a step outlive it.
    void begin_step(const StepInput& input) { input_ = &input; }
    // Row `row` of the step, columns of one panel. `task` has the buffers of the row's first token at column 0.
    void convolve(const KernelTable& kernels, CausalConvTask task, int64_t first_line, int width, int row, int panel, int member);
    // The same for a panel of one head: `task` at the head's first column of v and out.
    void attend(const KernelTable& kernels, LinearAttentionTask task, int64_t first_line, int value_dim, int row, int panel, int member);

  private:
    // Pointers to lines of a panel, while it is computed.
    struct Scratch {
        std::vector<const float*> from;
        std::vector<float*> to, saved;
        Floats lines;  // of a row whose state is not kept
    };

    void locate(const int32_t* blocks, int64_t line, int count, float** lines) const;
    template <typename Task, typename Compute>
    void run(Task& task, int row, int64_t line, int count, int member, Compute compute);

    KvCache& kv_;
    int line_, lines_of_block_ = 0, num_blocks_ = 0;
    int64_t num_lines_;
    std::vector<Scratch> scratch_;  // per member
    const StepInput* input_ = nullptr;
};

}  // namespace penstock
