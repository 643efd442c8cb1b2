#include "row_table.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

namespace penstock {

namespace {

void require(bool is_kept, const char* breach) {
    if (!is_kept) throw std::invalid_argument(breach);
}

}  // namespace

void RowTable::Release::operator()(int32_t* memory) const { std::free(memory); }

// calloc maps large memory lazily: rows and positions that are never used cost nothing.
RowTable::Table RowTable::zeroed(int64_t count) {
    auto* memory = static_cast<int32_t*>(std::calloc(static_cast<size_t>(count), sizeof(int32_t)));
    if (memory == nullptr) throw std::bad_alloc();
    return Table(memory);
}

RowTable::RowTable(const RowTableShape& shape)
    : shape_(shape), token_stride_(int64_t{shape.max_model_len} + 1) {
    for (const int32_t size : {shape.num_blocks, shape.block_size, shape.max_rows, shape.max_step_tokens, shape.max_model_len,
                               shape.vocab_size}) {
        require(size > 0, "every size of a row table must be at least 1");
    }
    require(shape.window >= 0, "a window is below 0");
    require(shape.num_state_blocks >= 0, "the number of blocks of a state is negative");
    block_stride_ = (token_stride_ + shape.block_size - 1) / shape.block_size;
    tokens_ = zeroed(shape.max_rows * token_stride_);
    blocks_ = zeroed(shape.max_rows * block_stride_);
    if (shape.num_state_blocks > 0) states_ = zeroed(2 * int64_t{shape.max_rows} * shape.num_state_blocks);
    rows_.resize(static_cast<size_t>(shape.max_rows));
    num_prompt_.resize(rows_.size());
    second_at_.resize(rows_.size());
    adapters_.resize(rows_.size());
    for (int32_t slot = shape.max_rows - 1; slot >= 0; --slot) free_slots_.push_back(slot);
    begin_step();
}

RowTable::Row& RowTable::row_in(int slot) {
    require(slot >= 0 && slot < shape_.max_rows && !rows_[static_cast<size_t>(slot)].is_free, "is in no slot");
    return rows_[static_cast<size_t>(slot)];
}

int RowTable::admit(const std::vector<int32_t>& tokens, int64_t num_prompt, const std::vector<int32_t>& blocks,
                    int64_t num_computed, bool is_padding, int64_t second_at, int64_t adapter, int64_t num_scored,
                    const std::vector<int32_t>& state, const std::vector<int32_t>& source) {
    const auto num_tokens = static_cast<int64_t>(tokens.size());
    require(!free_slots_.empty(), "is one more than max_rows");
    require(num_prompt >= 1 && num_prompt <= num_tokens, "has no prompt, or more prompt than tokens");
    require(num_tokens <= shape_.max_model_len, "is longer than max_model_len");
    require(num_computed >= 0 && num_computed < num_tokens, "has no token left to compute");
    require(num_computed <= static_cast<int64_t>(blocks.size()) * shape_.block_size, "has more KV than its blocks hold");
    require(second_at >= 0 && second_at < num_tokens, "has a second text that begins after its last token");
    const bool has_state = shape_.num_state_blocks > 0 && !is_padding;
    require(static_cast<int>(state.size()) == (has_state ? shape_.num_state_blocks : 0), "has too few or too many blocks for its state");
    require(source.empty() || (has_state && source.size() == state.size()), "reads a state from too few or too many blocks");
    require(!has_state || num_computed == 0 || !source.empty(), "goes on without a state");
    check_state_blocks(state);
    check_state_blocks(source);
    for (const int32_t token : tokens) require(token >= 0 && token < shape_.vocab_size, "has a token outside the vocabulary");
    const int slot = free_slots_.back();
    free_slots_.pop_back();
    Row& row = rows_[static_cast<size_t>(slot)];
    row = {static_cast<int32_t>(num_tokens), static_cast<int32_t>(num_prompt), 0, static_cast<int32_t>(num_computed), -1, static_cast<int32_t>(num_scored),
           static_cast<int32_t>(state.size()), static_cast<int32_t>(source.size()), false, is_padding};
    std::copy(source.begin(), source.end(), std::copy(state.begin(), state.end(), state_of(slot)));
    std::copy(tokens.begin(), tokens.end(), tokens_of(slot));
    num_prompt_[static_cast<size_t>(slot)] = row.num_prompt;
    second_at_[static_cast<size_t>(slot)] = static_cast<int32_t>(second_at);
    adapters_[static_cast<size_t>(slot)] = adapter;
    const int64_t num_unread = shape_.window > 0 ? std::max<int64_t>(0, num_computed + 1 - shape_.window) / shape_.block_size : 0;
    append_blocks(slot, blocks, num_unread);
    return slot;
}

void RowTable::release(int slot) {
    Row& row = row_in(slot);
    // Tokens stay behind, out of reach; block ids go, so that a stale one can't be mistaken for a row's own.
    std::fill_n(blocks_of(slot), row.num_blocks, 0);
    num_prompt_[static_cast<size_t>(slot)] = 0;
    row = {};
    free_slots_.push_back(slot);
}

void RowTable::append_blocks(int slot, const std::vector<int32_t>& blocks, int64_t num_unread) {
    Row& row = rows_[static_cast<size_t>(slot)];
    require(row.num_blocks + static_cast<int64_t>(blocks.size()) <= block_stride_, "has more blocks than max_model_len needs");
    for (const int32_t block : blocks) {
        const bool may_be_null = row.num_blocks < num_unread;
        require(row.is_padding ? block == 0 : block > (may_be_null ? -1 : 0) && block < shape_.num_blocks,
                row.is_padding ? "is padding and has another block than the null block"
                               : "has a block that does not exist, or the null block");
        blocks_of(slot)[row.num_blocks++] = block;
    }
}

void RowTable::check_state_blocks(const std::vector<int32_t>& blocks) const {
    for (const int32_t block : blocks) {
        require(block > 0 && block < shape_.num_blocks, "has a block of a state that does not exist, or the null block");
    }
}

void RowTable::begin_step() {
    ++num_steps_;
    for (auto* array : {&row_slots_, &context_lens_, &token_ids_, &positions_, &logit_tokens_, &logit_slots_, &logit_targets_}) {
        array->clear();
    }
    samples_.clear();
    num_guesses_ = num_scored_ = num_row_scored_ = 0;
    slot_mapping_.clear();
    masks_.clear();
    row_states_.clear();
    saves_.clear();
    query_start_loc_.assign(1, 0);
}

void RowTable::add_row(int slot, int64_t context_len, int64_t query_len, const std::vector<int32_t>& new_blocks, bool samples,
                       const std::vector<int32_t>& guesses) {
    Row& row = row_in(slot);
    const auto num_guesses = static_cast<int32_t>(guesses.size());
    const int64_t num_tokens = row.num_tokens + num_guesses;
    require(row.last_step != num_steps_, "has two rows in one step");
    require(query_len > 0, "computes no token");
    require(context_len == row.num_computed, "has a context_len unlike what was computed");
    require(query_len <= num_tokens - context_len, "computes tokens that are not known");
    const int64_t end = context_len + query_len;
    require(end == num_tokens || !samples, "samples before its last token");
    require(guesses.empty() || samples, "has guesses and samples nothing");
    require(guesses.empty() || (!shape_.is_one_pass && shape_.num_state_blocks == 0), "has guesses, and a state that can't go back");
    require(num_guesses <= shape_.max_scored - num_scored_ - num_guesses_, "has more guesses than max_scored");
    for (const int32_t token : guesses) require(token >= 0 && token < shape_.vocab_size, "has a guess outside the vocabulary");
    if (shape_.is_one_pass) require(row.is_padding || (samples && query_len == row.num_tokens), "does not compute its whole text");
    require(end <= shape_.max_model_len, "is longer than max_model_len");
    require(query_len <= shape_.max_step_tokens - static_cast<int64_t>(token_ids_.size()), "exceeds max_step_tokens");
    append_blocks(slot, new_blocks, 0);
    require(end <= int64_t{row.num_blocks} * shape_.block_size, "writes past its last block");
    if (shape_.num_state_blocks > 0) {
        const int32_t* const own = row.num_state > 0 ? state_of(slot) : nullptr;
        const int32_t* const source = row.num_source > 0 ? own + row.num_state : nullptr;
        const bool reads_own = row.last_step >= 0 || (source && std::equal(own, source, source));
        row_states_.push_back({own, reads_own ? own : source});
    }
    row.last_step = num_steps_;
    row.num_computed = static_cast<int32_t>(end);
    num_guesses_ += num_guesses;
    std::copy(guesses.begin(), guesses.end(), tokens_of(slot) + row.num_tokens);
    row_slots_.push_back(slot);
    context_lens_.push_back(static_cast<int32_t>(context_len));
    const int32_t *tokens = tokens_of(slot), *blocks = blocks_of(slot);
    for (int64_t position = context_len; position < end; ++position) {
        require(tokens[position] >= 0, "goes on after it failed");
        token_ids_.push_back(tokens[position]);
        positions_.push_back(static_cast<int32_t>(position));
        slot_mapping_.push_back(int64_t{blocks[position / shape_.block_size]} * shape_.block_size + position % shape_.block_size);
    }
    query_start_loc_.push_back(static_cast<int32_t>(token_ids_.size()));
    num_row_scored_ = 0;
    if (row.num_scored >= 0) score(slot, context_len, end);
    if (samples) {
        samples_.push_back({slot, static_cast<int32_t>(logit_tokens_.size()), num_guesses});
        for (int32_t left = num_guesses; left >= 0; --left) {
            if (num_scored_ > 0) logit_targets_.push_back(-1);
            logit_tokens_.push_back(static_cast<int32_t>(token_ids_.size()) - 1 - left);
            logit_slots_.push_back(slot);
        }
    }
}

void RowTable::add_save(int slot, int64_t position, const std::vector<int32_t>& blocks) {
    const Row& row = row_in(slot);
    require(row.last_step == num_steps_, "saves a state in a step that does not compute it");
    require(row.num_state > 0 && static_cast<int>(blocks.size()) == row.num_state, "saves a state to too few or too many blocks");
    check_state_blocks(blocks);
    const auto at = static_cast<int32_t>(std::find(row_slots_.begin(), row_slots_.end(), slot) - row_slots_.begin());
    const int64_t begin = context_lens_[static_cast<size_t>(at)];
    require(begin < position && position <= row.num_computed, "saves a state at a position that the step does not compute");
    const auto count = static_cast<int32_t>(position - begin);
    for (const StateSave& save : saves_) require(save.row != at || save.num_tokens <= count, "saves states in another order than that of their positions");
    saves_.push_back({at, count, blocks});
}

// The positions of a row from `context_len` up to `end` whose logits tell of its prompt (types/plan.py, `scored_positions`).
void RowTable::score(int slot, int64_t context_len, int64_t end) {
    const Row& row = rows_[static_cast<size_t>(slot)];
    const int64_t begin = std::max<int64_t>(context_len, row.num_scored);
    const int64_t count = std::min<int64_t>(end, row.num_prompt - 1) - begin;
    if (count <= 0) return;
    require(count <= shape_.max_scored - num_scored_ - num_guesses_, "scores more positions than max_scored");
    if (num_scored_ == 0) logit_targets_.assign(logit_tokens_.size(), -1);
    first_scored_ = static_cast<int32_t>(logit_tokens_.size());
    num_row_scored_ = static_cast<int32_t>(count);
    num_scored_ += num_row_scored_;
    const auto first_token = static_cast<int32_t>(token_ids_.size()) - static_cast<int32_t>(end - begin);
    for (int32_t i = 0; i < count; ++i) {
        logit_tokens_.push_back(first_token + i);
        logit_slots_.push_back(slot);
        logit_targets_.push_back(tokens_of(slot)[begin + i + 1]);
    }
}

void RowTable::expect_masks() {
    masks_.assign(logit_tokens_.size(), nullptr);
    mask_bits_.resize(logit_tokens_.size() * static_cast<size_t>(mask_words()));
}

void RowTable::restrict(int sample, int guess, const uint32_t* mask) {
    require(sample >= 0 && sample < num_samples() && guess >= 0 && guess <= num_guesses(sample), "does not sample");
    require(!masks_.empty(), "has a mask that nobody expects");
    const int logit = logit_of(sample) + guess;
    uint32_t* bits = mask_bits_.data() + int64_t{logit} * mask_words();
    std::copy(mask, mask + mask_words(), bits);
    masks_[static_cast<size_t>(logit)] = bits;
}

StepInput RowTable::input() const {
    StepInput in{};
    in.num_rows = static_cast<int32_t>(row_slots_.size());
    in.num_tokens = static_cast<int32_t>(token_ids_.size());
    in.num_logits = static_cast<int32_t>(logit_tokens_.size());
    in.row_slots = row_slots_.data();
    in.query_start_loc = query_start_loc_.data();
    in.context_lens = context_lens_.data();
    in.token_ids = token_ids_.data();
    in.positions = positions_.data();
    in.slot_mapping = slot_mapping_.data();
    in.block_tables = blocks_.get();
    in.table_stride = block_stride_;
    in.logit_tokens = logit_tokens_.data();
    in.logit_slots = logit_slots_.data();
    in.second_at_of_slot = second_at_.data();
    in.adapter_of_slot = adapters_.data();
    if (!row_states_.empty()) in.row_states = row_states_.data();
    in.saves = saves_.data();
    in.num_saves = static_cast<int32_t>(saves_.size());
    if (shape_.is_one_pass) return in;
    in.tokens = tokens_.get();
    in.tokens_stride = token_stride_;
    in.num_prompt_of_slot = num_prompt_.data();
    in.logit_targets = num_scored_ > 0 ? logit_targets_.data() : nullptr;
    in.masks = masks_.empty() ? nullptr : masks_.data();
    return in;
}

void RowTable::append_sampled(const std::vector<SampleResult>& samples) {
    require(samples.size() == logit_slots_.size(), "the step has another number of samples");
    for (Sample& sample : samples_) {
        Row& row = rows_[static_cast<size_t>(sample.slot)];
        require(sample.num_appended == 0, "has no place for another token: the step was run twice");
        int32_t* const next = tokens_of(sample.slot) + row.num_tokens;
        bool holds = true;
        for (int i = 0; holds && i <= sample.num_guesses; ++i) {
            const int32_t token = samples[static_cast<size_t>(sample.first_logit + i)].token;
            if (i > 0 && token < 0) break;  // the next step meets it again, where it can be told
            holds = i < sample.num_guesses && token == next[i];
            next[i] = token;
            ++sample.num_appended;
        }
        row.num_tokens += sample.num_appended;
        row.num_computed -= sample.num_guesses + 1 - sample.num_appended;
    }
}

bool RowTable::fits(const EngineShape& engine) const {
    return engine.num_blocks >= shape_.num_blocks && engine.block_size == shape_.block_size && engine.max_rows >= shape_.max_rows &&
           engine.max_step_tokens >= shape_.max_step_tokens && engine.max_scored >= shape_.max_scored &&
           engine.vocab_size >= shape_.vocab_size;
}

}  // namespace penstock
