// How a step is divided over a team: its tokens into strands, each strand's instructions into stages, each stage into tasks.
//
//     tokens of the step   |......... strand 0 .........|......... strand 1 .........|      all tokens
//     stages               norm > q,k,v > attention > ...  norm > q,k,v > ...             logits > draw
//     tasks of a stage     |t0|t1|t2|..|                   |t0|t1|t2|..|                  |t0|t1|..|
//                          own stages of each strand                                      joint stages
//
// The engine (engine.h) asks once for each step, hands `num_tasks` and `strands_of_run()` to the team, and looks up what a task is.
// Nothing is computed here, and results do not depend on it: the kernels add in the same order however a step is divided.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fetching.h"
#include "instructions.h"
#include "team.h"
#include "weights.h"

namespace penstock {

// Tiles of attention, as a range of those of the step.
struct TileRange {
    int32_t first = 0, end = 0;
    bool has_splits = false;
};

// Tokens of a step, and the samples among them, that go through all instructions without waiting for the others: the threads of one
// strand multiply while those of another wait for keys and values.
struct Strand {
    int32_t first_token, end_token, first_logit, end_logit;
    int32_t first_tiles = 0;    // index in `StepPlan::attention_tiles` of its first range, one for each of the program's tilings
    Fetching::Blocks blocks{};  // that its products fetch for attention
};

// One instruction of a strand, or of all together. The last stage of a step that samples is the draw, which is no instruction.
struct Stage {
    int32_t num_tasks;
    int32_t grain;       // rows, panels, attention tiles, or heads of tiles in texts, of a task
    int32_t row_blocks;  // of a product
    int32_t first, end;  // rows of its domain, or tiles
    int32_t members;     // that share its tasks
    int32_t block = 0;   // rows of a row block

    // The task that a member takes next, if the members of the stage are equally fast.
    int task_after(int task) const { return task + members; }
    // Rows and panels of a task of a product.
    int first_row(int task) const { return first + task % row_blocks * block; }
    int end_row(int task) const { return std::min(first_row(task) + block, end); }
    PanelRange panels(int task, int panels) const {
        const int count = ceil_div(panels, grain), begin = piece_of(task, count) * grain;
        return {begin, std::min(begin + grain, panels), piece_of(task_after(task), count) * grain};
    }
    // Which of `count` pieces of a matrix a task multiplies. If all members are equally fast, the pieces of each one's tasks are neighbours
    // in memory: where a thread begins elsewhere, the processor has to find out anew what to fetch ahead. With several row blocks,
    // consecutive tasks share a piece, and pieces keep their order.
    int piece_of(int task, int count) const {
        const int runs = row_blocks == 1 ? std::min(members, count) : 1, nth = task / row_blocks, run = nth % runs;
        return run * (count / runs) + std::min(run, count % runs) + nth / runs;
    }
};

// Queries of a row that attend together, for query heads that share a KV head: over all positions or, as a piece of a long tile, over
// some segments. `token` is the first query's row in its buffer: if gathered, a sample's. In programs that compute texts
// whole a tile has all heads, and `position` is the first query's in its text.
struct AttentionTile {
    int32_t row, token, position, num_queries, first_head, num_heads;
    int32_t split = -1;  // of which this is a piece
    int32_t first_segment = 0, end_segment = 0;
};

// A tile with so many segments that threads share them. The piece that finishes last merges all of them.
struct AttentionSplit {
    int64_t partials;  // where they begin
    int32_t num_pieces;
};

// Valid until the next step is planned.
struct StepPlan {
    std::vector<Strand> strands;
    std::vector<Stage> stages;  // of the strands, one after the other, then the joint ones
    std::vector<int32_t> num_tasks;  // of the same stages
    std::vector<TileRange> attention_tiles;
    std::vector<AttentionTile> tiles;
    std::vector<AttentionSplit> splits;
    int64_t num_partials = 0;  // floats that the pieces of split tiles leave behind
};

class StepPlanner {
  public:
    // `program` and `weights` must outlive this; call `count_last_instruction` after adding an instruction.
    StepPlanner(const EngineShape& shape, const KernelTable& kernels, const std::vector<Instruction>& program, const Weights& weights,
                const KvCache& kv, int team_size);

    // After the program's next instruction.
    void count_last_instruction();
    // Whether all strands together compute the program's last instruction; otherwise each strand does.
    void join_last_instruction(bool joins) { num_own_ = static_cast<int>(program_.size()) - (joins ? 1 : 0); }

    // `input` must live as long as the step.
    const StepPlan& plan(const StepInput& input);
    const StepPlan& last() const { return plan_; }

    Team::Strands strands_of_run() const;
    // Members of the team that take part in the step.
    int num_members() const { return num_members_; }
    // For tests and measurements: all take part from now on, even if synchronising costs more.
    void use_all_members() { uses_all_members_ = true; }
    // Index of a stage's instruction in the program; the program's size for the draw.
    std::size_t instruction_of(int stage) const;
    bool is_joint(int stage) const { return stage >= num_strands() * num_own_; }
    int num_strands() const { return static_cast<int>(plan_.strands.size()); }
    // Instructions that each strand runs by itself; the joint ones follow when all have.
    int num_own() const { return num_own_; }
    bool has_joint_instruction() const { return num_own_ < static_cast<int>(program_.size()); }
    // The blocks that one task of a stage is to fetch.
    Fetching::Share fetched_by(int stage, int task) const;

  private:
    // In multiply-adds of products, of all layers.
    struct Costs {
        int64_t of_token = 0, of_sample = 0;
        int64_t of_position = 0;         // that a token sees
        int64_t of_sample_position = 0;  // that a gathered sample sees
        int64_t weight_bytes = 0;        // that tokens are multiplied with
        int64_t sample_weight_bytes = 0;
    };

    // The queries of an attention: all tokens, the samples among them, or gathered samples.
    enum class Queries { kAll, kSamples, kGathered };

    // All that an attention's tiles depend on: layers with equal tilings share them.
    struct Tiling {
        int32_t heads_per_kv, num_kv_heads, value_dim;
        Queries queries;
        bool operator==(const Tiling&) const = default;
    };

    int members_per_strand() const { return ceil_div(num_members_, num_strands()); }
    // The program's; at least those with keys and values, and 1.
    int num_layers() const { return std::max({1, shape_.num_layers(), num_states_ + num_attentions_}); }
    // Those whose weights multiply all tokens; at least 1.
    int num_token_layers() const {
        return std::max({1, shape_.num_layers(), num_states_ + num_attentions_ - num_gathered_attentions_});
    }
    bool layer_fits_cache() const;

    void plan_strands();
    int members_that_pay() const;
    void add_up_costs();
    void divide_tokens(int wanted);
    int end_of_strand(int64_t token) const;

    void plan_attention(Strand& strand);
    TileRange add_tiles(const Strand& strand, const Tiling& tiling);
    void add_tiles_of_tokens(const Strand& strand, const Tiling& tiling);
    void add_tiles_of_gathered(const Strand& strand, const Tiling& tiling);
    void add_tiles_of_run(AttentionTile run, const Tiling& tiling);
    TileRange add_text_tiles(const Strand& strand);
    void add_tile(AttentionTile tile, bool of_samples);
    void split_long_tiles(TileRange& tiles, const Tiling& tiling);

    void plan_fetching(Strand& strand);

    void plan_stages();
    Stage plan_stage(const Strand& strand, size_t instruction, int members) const;
    bool has_row8(const Instruction& instruction) const;  // a product in integers alone
    Stage plan_product(const Instruction& instruction, int first, int end, int members) const;
    int tiles_of_task(int tiles, int tasks, int members) const;
    Stage plan_recurrence(const Strand& strand, int panels, int members) const;
    Stage plan_experts(const ExpertsOp& op, int first, int end, int members) const;

    EngineShape shape_;
    const KernelTable& kernels_;
    const std::vector<Instruction>& program_;
    const Weights& weights_;
    int team_size_;
    bool uses_all_members_ = false;
    int num_own_ = 0;
    bool has_experts_ = false;
    int num_states_ = 0;  // layers with a recurrent state
    bool has_state_ = false;
    int num_attentions_ = 0, num_gathered_attentions_ = 0;
    bool is_one_pass_ = false;  // it computes texts whole
    std::vector<Tiling> tilings_;
    std::vector<int32_t> tiling_of_;  // of each instruction, of those that are attention
    Costs costs_;
    Fetching fetching_;

    // State of the step.
    StepInput input_{};
    int num_members_;
    StepPlan plan_;
    std::vector<int64_t> cost_until_;         // of the step's tokens up to each one
    std::vector<AttentionTile> whole_tiles_;  // of a strand, before long ones are split
};

}  // namespace penstock
