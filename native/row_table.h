// The rows that the native executor knows: their tokens, block tables and progress, and what a step of them means in arrays.
//
// The same book-keeping as backends/batch.py, here since a step of one row would spend longer in NumPy than in sampling. Used by
// bind_rows.cpp alone, which keeps the names; here a row is a slot. Never computes with the model and never chooses a token.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine.h"

namespace penstock {

struct RowTableShape {
    int32_t num_blocks, block_size, max_rows, max_step_tokens, max_model_len, vocab_size;
    int32_t window;  // 0, or how many last positions a row reads
    bool is_one_pass = false;  // each row is a text, computed whole in one step, and nothing is appended to it
    int32_t max_scored = 0;    // positions of prompts that are scored, and guesses, in one step
    int32_t num_state_blocks = 0;  // of a row's recurrent state; 0: it has none of its own
};

// A call that breaks the contract of plans throws std::invalid_argument; the table must not be used after that.
class RowTable {
  public:
    // Throws std::invalid_argument for a shape without size, std::bad_alloc without memory.
    explicit RowTable(const RowTableShape& shape);

    // A slot for a new row. `tokens` are prompt and output so far, the first `num_computed` of them have KV in `blocks`.
    // Null blocks may stand for the first blocks if the row reads no position of theirs. Padding has null blocks and no others.
    // Several padding rows may write the null block at once. Its content does not matter, because padding has no result.
    // `second_at`: the position of a pair's second text; 0: it is one text.
    // `adapter`: the number of its adapter; 0: none. `num_scored`: of a row whose prompt is scored, the tokens after its first that were
    // told already; -1: it is not scored. `state` and `source`: AdmitRow in types/plan.py; padding has neither.
    int admit(const std::vector<int32_t>& tokens, int64_t num_prompt, const std::vector<int32_t>& blocks, int64_t num_computed,
              bool is_padding, int64_t second_at = 0, int64_t adapter = 0, int64_t num_scored = -1,
              const std::vector<int32_t>& state = {}, const std::vector<int32_t>& source = {});
    void release(int slot);

    // A step is described row by row, and then read. Each call of `add_row` takes the row's next `query_len` tokens. The last of them may be
    // `guesses` of what follows the tokens that are known: the row then samples after each of them, too.
    void begin_step();
    void add_row(int slot, int64_t context_len, int64_t query_len, const std::vector<int32_t>& new_blocks, bool samples,
                 const std::vector<int32_t>& guesses = {});
    // After the rows: a copy of the state of one of them.
    void add_save(int slot, int64_t position, const std::vector<int32_t>& blocks);
    // Makes room for masks, which `input` then points to. `restrict` may follow when others read them no sooner.
    void expect_masks();
    // After that: the tokens that the i-th row that samples may sample, a bit for each token of the vocabulary, [mask_words()].
    // `guess`: after how many of its guesses.
    void restrict(int sample, int guess, const uint32_t* mask);
    bool is_one_pass() const { return shape_.is_one_pass; }
    int num_state_blocks() const { return shape_.num_state_blocks; }
    int mask_words() const { return (shape_.vocab_size + 31) / 32; }
    // Points into this table; valid until it changes. Of texts nothing is to be sampled.
    StepInput input() const;
    // Rows of the step that sample, in its order.
    int num_samples() const { return static_cast<int>(samples_.size()); }
    // Where the logits of the i-th of them are among all of the step: the first, before those after its guesses.
    int logit_of(int sample) const { return samples_[static_cast<size_t>(sample)].first_logit; }
    int num_guesses(int sample) const { return samples_[static_cast<size_t>(sample)].num_guesses; }
    // The logits of the row that was added last which score its prompt: the first, and how many.
    std::pair<int, int> scored_of_row() const { return {first_scored_, num_row_scored_}; }
    // After the step was computed: each of those rows grows by its token, and by those after its guesses as long as these hold.
    // The token is -1 for a row that failed, and must be released.
    void append_sampled(const std::vector<SampleResult>& samples);
    // After that: by how many tokens the i-th row that samples has grown.
    int num_appended(int sample) const { return samples_[static_cast<size_t>(sample)].num_appended; }

    // Whether an engine has room for every step of this table.
    bool fits(const EngineShape& engine) const;

  private:
    struct Row {
        int32_t num_tokens = 0, num_prompt = 0, num_blocks = 0, num_computed = 0;
        int64_t last_step = -1;
        int32_t num_scored = -1;
        int32_t num_state = 0, num_source = 0;  // blocks of its state, and of the one that its first step reads
        bool is_free = true, is_padding = false;
    };
    struct Release {
        void operator()(int32_t* memory) const;
    };
    using Table = std::unique_ptr<int32_t[], Release>;

    struct Sample {
        int slot, first_logit, num_guesses, num_appended = 0;
    };

    static Table zeroed(int64_t count);
    Row& row_in(int slot);
    int32_t* tokens_of(int slot) const { return tokens_.get() + int64_t{slot} * token_stride_; }
    int32_t* state_of(int slot) const { return states_.get() + 2 * int64_t{slot} * shape_.num_state_blocks; }
    int32_t* blocks_of(int slot) const { return blocks_.get() + int64_t{slot} * block_stride_; }
    void check_state_blocks(const std::vector<int32_t>& blocks) const;
    void score(int slot, int64_t context_len, int64_t end);
    // The first `num_unread` may be null blocks.
    void append_blocks(int slot, const std::vector<int32_t>& blocks, int64_t num_unread);

    RowTableShape shape_;
    int64_t token_stride_, block_stride_;
    Table tokens_;  // [max_rows, max_model_len + 1]: one more, for the token after the longest row
    Table blocks_;  // [max_rows, .], 0 (the null block) after a row's last
    Table states_;  // [max_rows, 2, num_state_blocks]: a row's own, and where its first step reads
    std::vector<Row> rows_;
    std::vector<int32_t> free_slots_;
    std::vector<int32_t> num_prompt_;  // [max_rows], for the sampler
    std::vector<int32_t> second_at_;                // [max_rows]
    std::vector<int64_t> adapters_;                 // [max_rows]
    // The step.
    int64_t num_steps_ = 0;
    std::vector<int32_t> row_slots_, query_start_loc_, context_lens_, token_ids_, positions_, logit_tokens_, logit_slots_, logit_targets_;
    std::vector<Sample> samples_;
    int32_t num_guesses_ = 0, num_scored_ = 0, first_scored_ = 0, num_row_scored_ = 0;
    std::vector<int64_t> slot_mapping_;
    std::vector<RowState> row_states_;  // of each row; empty without states
    std::vector<StateSave> saves_;
    std::vector<uint32_t> mask_bits_;     // [num_logits, mask_words()] if any row has one
    std::vector<const uint32_t*> masks_;  // of each logit, into them, or null; empty if no row has one
};

}  // namespace penstock
