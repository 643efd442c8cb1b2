// One model on a team of threads: its weights, buffers, KV cache and instructions; runs a whole step in one call.
//
// Built once by the lowering (backends/native/lowering.py), then `run_step` is called by one thread at a time. It asks the planner
// (step_planner.h) how the step is divided, has the team (team.h) run the tasks, and computes each with the kernels (kernels/kernels.h).
// Knows nothing of requests: rows are slots in tables that the caller owns. Buffers are allocated by the largest step; after that a step
// allocates only a few small objects.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "adapters.h"
#include "experts.h"
#include "floats.h"
#include "instructions.h"
#include "kv_cache.h"
#include "logits.h"
#include "owned_activation.h"
#include "recurrence.h"
#include "step_planner.h"
#include "team.h"
#include "weights.h"

namespace penstock {

// Times by the kind of task: the mean over the threads that took part. For the rest of the step the threads waited for each other.
struct StepTimes {
    int64_t rows_ns = 0, linear_ns = 0, attention_ns = 0, sampling_ns = 0;
};

class Engine final : private Work {
  public:
    // Throws std::invalid_argument for a shape that the kernels can't compute, std::bad_alloc without memory.
    // It takes turns on the team as `account`; null: as one of its own.
    Engine(const EngineShape& shape, std::shared_ptr<Team> team, std::shared_ptr<Account> account, const std::string& variant);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    Weights& weights() { return weights_; }
    const KernelTable& kernels() const { return kernels_; }
    const Weights& weights() const { return weights_; }
    KvCache& kv() { return kv_; }
    const KvCache& kv() const { return kv_; }
    const Experts& experts() const { return experts_; }
    const Recurrence& recurrence() const { return recurrence_; }
    void pack_rows(int matrix, int first_row, int num_rows, const uint8_t* source) {
        weights_.pack_rows(*team_, *account_, matrix, first_row, num_rows, source);
    }

    // Each returns the id of what it adds.
    // cos and sin are multiplied by attention_factor and by 1 + growth * ln(1 + floor(position / growth_len)).
    // `per_sample`: angles are computed for the samples, else for all tokens.
    int add_rope(const float* inv_freq, int half, float attention_factor, float growth, int growth_len, bool per_sample);
    int add_buffer(int width, bool per_sample);
    int add_activation(int cols, bool quantised, bool per_sample, bool by_row);
    void add_instruction(Instruction instruction);
    // All instructions of a layer of experts except the last, kSumExperts, which takes the id.
    int add_experts(const ExpertsLayer& layer, Domain domain);
    // Linear attention. The id is for kPrepareState and then for the instruction itself.
    int define_linear_attention(const LinearAttentionOp& op);
    void add_linear_attention(int id);
    // After the last instruction. Logits are multiplied by `scale` and then, if cap > 0, become cap * tanh(logit / cap).
    // std::invalid_argument if that changes them and they are not the last instruction's product.
    void set_logits(int buffer, float scale, float cap);
    // After `set_logits`: the token of each logit, for logits of a part of the vocabulary. std::invalid_argument unless there is one each.
    void name_logits(std::vector<int32_t> tokens);
    // After the last instruction, of a program that computes texts whole: the buffer with their answers. `per_sample`: it has a row for each
    // sample, and else one for each token.
    void set_states(int buffer, bool per_sample);
    // The weights are complete: low-priority threads start making their pages huge and touching the KV cache's.
    void settle();

    // Rows may have adapters of a rank up to this one; before anything is added. std::invalid_argument for a rank that can't be.
    void enable_adapters(int max_rank) { adapters_ = std::make_unique<Adapters>(shape_, kernels_, kv_, max_rank); }
    // Null unless they were enabled.
    Adapters* adapters() { return adapters_.get(); }

    void set_sampling(int slot, RowSampling sampling) { logits_.set_sampling(slot, std::move(sampling)); }
    // Throws std::bad_alloc if the sampler finds no memory; the samples then have no meaning.
    void run_step(const StepInput& input);
    // Begins a step whose masks are still to come: the other threads of the team compute its layers meanwhile. If another engine has the
    // team, this only plans the step, and `finish_step` waits. Once `input` points to the masks, call `admit_masks` and then
    // `finish_step`, both on the thread that began it, before any other step. `owner` has the arrays of `input`, and is kept until the step
    // ends. std::invalid_argument if the step that ends is another owner's, or waits for its masks.
    void begin_step(const StepInput& input, std::shared_ptr<const void> owner);
    void admit_masks() { logits_.admit_masks(); }
    void finish_step(const void* owner);
    bool is_in_step() const { return owner_ != nullptr; }
    bool is_computing() const { return has_begun_; }
    // Ends a step that was begun, if there is one; its tokens have no meaning.
    void abandon_step();
    const std::vector<SampleResult>& samples() const { return logits_.samples(); }
    const float* logits() const { return buffers_[logits_buffer_].data(); }
    // The answer to the text of a sample of the last step; points into a buffer.
    struct State {
        const float* data;
        int64_t count;
    };
    State state_of(int sample) const;
    bool has_states() const { return states_buffer_ >= 0; }
    // Fills all buffers with NaN, so that a test sees any use of what no step has written.
    void poison_buffers();
    // A step's positions must be below this.
    int32_t num_positions() const { return num_positions_; }
    // Whether there are logits, each of a known token.
    bool has_named_logits() const { return logits_width() == logits_.num_named(); }
    struct View {
        float* data;
        int64_t rows, width;
    };
    View buffer(int id) const { return {buffers_.at(id).data(), buffers_[id].rows, buffers_[id].width}; }
    int64_t logits_width() const { return logits_buffer_ < 0 ? 0 : buffers_[logits_buffer_].width; }
    StepTimes times() const;  // of the last step
    int64_t waited_ns() const { return waited_ns_; }  // for how long the last step waited for its turn on the team

    const EngineShape& shape() const { return shape_; }
    const char* variant() const { return kernels_.name; }
    int num_threads() const { return team_->size(); }
    // Number of strands of the last step.
    int num_strands() const { return planner_.num_strands(); }
    // How the last step was divided.
    const StepPlanner& planner() const { return planner_; }
    void use_all_members() { planner_.use_all_members(); }
    // The instruction of a stage; null: the draw.
    const Instruction* instruction_of(int stage) const;
    // Blocks whose keys and values of one layer a strand's products were to fetch in the last step, before its attention read them, in order.
    std::vector<int32_t> fetched_blocks(int strand, int layer) const;

  private:
    struct Buffer {
        int64_t width, rows;
        Memory memory;
        float* data() const { return reinterpret_cast<float*>(memory.get()); }
        float* row(int64_t i) const { return data() + i * width; }
    };
    struct Rope {
        std::vector<float> inv_freq;
        float factor, growth;
        int32_t growth_len;
        bool per_sample;
        Floats cos, sin;  // [rows_of(per_sample), half], of this step
    };

    int64_t rows_of(bool per_sample) const { return per_sample ? shape_.max_logits() : shape_.max_step_tokens; }

    void prepare(const StepInput& input, bool awaits_masks);
    void compute();

    // Called by the team.
    void run_task(int index, int task, int member) override;
    void begun(int member) override;
    void ended(int index, int member) override;

    // The computation of a task.
    void check_form(int weight, int activation) const;
    void check_heads(const LinearOp& op) const;
    void run_rows(const std::vector<RowOp>& ops, const Stage& stage, int task);
    void run_row_op(const RowOp& op, int64_t row, int64_t end);
    void run_row_op(const RowOp& op, int64_t row);
    void compute_angles(Rope& rope, int64_t row);
    Epilogue epilogue_of(const LinearOp& op) const;
    UpcomingKv upcoming_of(int index, int task) const;
    void run_linear(const Instruction& instruction, int index, int task);
    void run_heads(const LinearOp& op, int row0, int row1, PanelRange range, UpcomingKv upcoming);
    void run_gated(const GatedOp& op, int index, int task, int member);
    void run_changed_gated(const GatedOp& op, int row0, int row1, PanelRange range, const UpcomingKv& upcoming, float* scratch);
    AttentionTask attention_task(const AttentionOp& op, const AttentionTile& tile);
    void run_attention(const AttentionOp& op, const Stage& stage, int task, int member);
    void run_text_attention(const TextAttentionOp& op, const Stage& stage, int task, int member);
    void reserve_for_texts();
    void prepare_state(const LinearAttentionOp& op, int64_t row);
    void run_causal_conv(const CausalConvOp& op, const Stage& stage, int task, int member);
    void run_linear_attention(const LinearAttentionOp& op, const Stage& stage, int task, int member);

    EngineShape shape_;
    const KernelTable& kernels_;
    std::shared_ptr<Team> team_;  // other engines may have it, too
    std::shared_ptr<Account> account_;
    KvCache kv_;
    Weights weights_;
    std::deque<Rope> ropes_;
    std::vector<Buffer> buffers_;
    std::vector<OwnedActivation> activations_;
    std::vector<Instruction> program_;
    StepPlanner planner_;
    Experts experts_;
    Recurrence recurrence_;
    std::vector<LinearAttentionOp> linear_attentions_;
    Logits logits_;
    std::unique_ptr<Adapters> adapters_;  // null: no instruction has a site
    int logits_buffer_ = -1;
    int states_buffer_ = -1;
    bool states_are_of_samples_ = false;
    int32_t widest_text_head_ = 0;  // head_dim of attention within texts; 0: the program has none
    int32_t longest_text_ = 0;      // tokens of a row for which the scratch is large enough
    int32_t num_positions_ = INT32_MAX;

    // State of the step.
    StepInput input_{};
    struct alignas(64) MemberTimes {
        int64_t since = 0, rows = 0, linear = 0, attention = 0, sampling = 0;  // in ticks
    };
    std::vector<MemberTimes> member_times_;
    std::shared_ptr<const void> owner_;  // of the step that was begun and has not ended
    bool has_begun_ = false;             // the team computes it
    int64_t began_ns_ = 0, began_ticks_ = 0;
    double ns_per_tick_ = 0.0;
    int64_t waited_ns_ = 0;
    std::vector<int32_t> pieces_done_;  // of each split tile, through std::atomic_ref
    std::vector<float> partials_;
    std::vector<Floats> attention_scratch_;  // per member
    std::vector<Floats> gate_scratch_;       // per member, of products with a gate that adapters change
};

}  // namespace penstock
