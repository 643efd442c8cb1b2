#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "cpu.h"
#include "short_conv.h"
#include "texts.h"

namespace penstock {

namespace {

constexpr int kGatePanels = 24;  // most panels of up sums kept beside their gates'

// A clock whose unit is only measured after a step: reading the system's in each thread for each stage takes 1 to 3 % of a short step.
int64_t ticks() {
#if defined(__x86_64__)
    return static_cast<int64_t>(__rdtsc());
#elif defined(__aarch64__)
    int64_t count;
    asm volatile("mrs %0, cntvct_el0" : "=r"(count));
    return count;
#else
    return now_ns();
#endif
}

const EngineShape& checked(const EngineShape& s) {
    const int32_t smallest = std::min({s.vocab_size, s.block_size, s.max_rows, s.max_step_tokens});
    if (smallest < 1) throw std::invalid_argument("every size of an engine must be at least 1");
    for (const KvShape& kv : s.kv_shapes) {
        if (kv.num_kv_heads < 1) throw std::invalid_argument("a layer has at least one head of keys and values");
        if (kv.head_dim < 1 || kv.head_dim % kPanel != 0 || kv.head_dim > kLargestHeadDim) {
            throw std::invalid_argument("head_dim must be a multiple of 16 and at most 576");
        }
        if (kv.num_latent != 0 && (kv.num_kv_heads != 1 || kv.num_latent < 0 || kv.num_latent % kGroup != 0 || kv.num_latent > kv.head_dim)) {
            throw std::invalid_argument("latents are whole groups of 32 columns of one head");
        }
        if (s.kv_format == KvFormat::kInt4 && (kv.head_dim % kGroup != 0 || kv.num_latent != 0)) {
            throw std::invalid_argument("keys and values of 4 bits have heads of whole groups of 32 columns and no latents");
        }
    }
    if (!s.kv_shapes.empty() && s.block_size % kKvTile != 0) throw std::invalid_argument("block_size must be a multiple of 16");
    if (s.num_states > 0 && (s.state_columns < 1 || s.state_columns > s.block_size || s.state_width < 1)) {
        throw std::invalid_argument("the state of a layer has 1 to block_size columns of 1 or more numbers");
    }
    if (s.max_scored < 0) throw std::invalid_argument("max_scored is below 0");
    if (s.num_blocks < 2) throw std::invalid_argument("num_blocks must be at least 2");
    return s;
}

// The last block that a row's state is kept in or saved to, or 0.
int64_t last_state_block(const StepInput& input, int num_blocks) {
    int64_t last = 0;
    const auto count = [&](const int32_t* blocks) {
        for (int i = 0; i < num_blocks; ++i) last = std::max<int64_t>(last, blocks[i]);
    };
    for (int i = 0; i < input.num_saves; ++i) count(input.saves[i].blocks.data());
    for (int row = 0; input.row_states && row < input.num_rows; ++row) {
        if (input.row_states[row].blocks) count(input.row_states[row].blocks);
    }
    return last;
}

}  // namespace

Engine::Engine(const EngineShape& shape, std::shared_ptr<Team> team, std::shared_ptr<Account> account, const std::string& variant)
    : shape_(checked(shape)),
      kernels_(choose_variant(variant)),
      team_(std::move(team)),
      account_(account ? std::move(account) : std::make_shared<Account>(1.0)),
      kv_(shape, kernels_),
      weights_(shape.memory_nodes),
      planner_(shape, kernels_, program_, weights_, kv_, team_->size()),
      experts_(kernels_, weights_, team_->size()),
      recurrence_(shape, kv_, team_->size()),
      logits_(shape, kernels_, team_->size()),
      member_times_(team_->size()),
      attention_scratch_(team_->size()),
      gate_scratch_(team_->size()) {
    const KvShape widest = shape.widest();
    for (auto& scratch : attention_scratch_) scratch.resize(kernels_.attention_scratch_floats(shape.kv_format, widest.head_dim, widest.num_latent));
}

int Engine::add_rope(const float* inv_freq, int half, float attention_factor, float growth, int growth_len, bool per_sample) {
    Rope rope{{inv_freq, inv_freq + half}, attention_factor, growth, growth_len, per_sample, {}, {}};
    rope.cos.resize(rows_of(per_sample) * half);
    rope.sin.resize(rows_of(per_sample) * half);
    ropes_.push_back(std::move(rope));
    return static_cast<int>(ropes_.size()) - 1;
}

int Engine::add_buffer(int width, bool per_sample) {
    const int64_t bytes = rows_of(per_sample) * width * static_cast<int64_t>(sizeof(float));
    buffers_.push_back({width, rows_of(per_sample), allocate_aligned(bytes, false)});
    return static_cast<int>(buffers_.size()) - 1;
}

int Engine::add_activation(int cols, bool quantised, bool per_sample, bool by_row) {
    activations_.emplace_back(rows_of(per_sample), cols, quantised, by_row);
    return static_cast<int>(activations_.size()) - 1;
}

// Throws std::invalid_argument unless the activation's form and columns fit the matrix.
void Engine::check_form(int weight, int activation) const {
    const PackedMatrix& w = weights_.packed(weight).matrix;
    const Activation& x = activations_.at(activation).view;
    const bool fits = kernels_.reads_bf16(w) ? x.bf16 != nullptr : w.kind == WeightKind::kU8Row ? x.row_scale != nullptr : x.lift != nullptr;
    if (!fits || x.cols != w.cols) throw std::invalid_argument("an activation is in another form than its matrix multiplies, or has other columns");
}

// std::invalid_argument unless each head's matrix has whole panels, and fits its columns, which are read in pairs.
void Engine::check_heads(const LinearOp& op) const {
    const PackedMatrix& w = weights_.packed(op.weight).matrix;
    const Activation& x = activations_.at(op.activation).view;
    const int64_t channels = op.out_columns;
    const bool fits = x.bf16 && w.kind == WeightKind::kBf16 && w.rows % (op.num_heads * kPanel) == 0 && w.rows / op.num_heads <= channels &&
                      w.cols + w.cols % 2 <= op.x_columns && op.num_heads * op.x_columns == x.cols && op.num_heads * channels == buffers_.at(op.out).width;
    if (!fits) throw std::invalid_argument("the matrices of heads do not fit the columns of what they multiply or make");
}

void Engine::add_instruction(Instruction instruction) {
    for (const LinearOp& op : instruction.linears) op.num_heads > 0 ? check_heads(op) : check_form(op.weight, op.activation);
    if (instruction.kind == InstructionKind::kGated) {
        const GatedOp& op = instruction.gated;
        check_form(op.gate, op.activation);
        check_form(op.up, op.activation);
        if (weights_.matrix(op.gate).kind == WeightKind::kU8Row) throw std::invalid_argument("a product with a gate lacks weights with a scale for each row");
    }
    if (instruction.kind == InstructionKind::kExperts) check_form(instruction.experts.layer.inner, instruction.experts.layer.input);
    if (instruction.kind == InstructionKind::kAttention) {
        const AttentionOp& op = instruction.attention;
        if (op.layer < 0 || op.layer >= shape_.num_layers()) throw std::invalid_argument("there is no such layer of keys and values");
        const KvShape& kv = shape_.kv_shapes[op.layer];
        if (op.num_heads < 1 || op.num_heads % kv.num_kv_heads != 0) throw std::invalid_argument("heads can't share those of keys and values evenly");
    }
    if (instruction.kind == InstructionKind::kCausalConv) {
        const CausalConvOp& op = instruction.conv;
        if (op.taps < 2 || op.taps > kMostTaps) throw std::invalid_argument("a convolution has 2 to 8 taps");
        recurrence_.reserve(op.first_line, 1, op.taps - 1, op.width);
    }
    for (const RowOp& op : instruction.rows) {
        if (op.kind == RowOpKind::kKvWrite && (op.n < 0 || op.n >= shape_.num_layers())) {
            throw std::invalid_argument("there is no such layer of keys and values");
        }
        if (op.kind == RowOpKind::kLookupPosition) num_positions_ = std::min(num_positions_, weights_.table(op.weight).rows - op.n);
    }
    if (const TextAttentionOp& op = instruction.text_attention; op.relative_scales >= 0) {
        const bool sees_all = op.num_heads == op.num_kv_heads && !op.is_causal && op.window == 0;
        if (!sees_all) throw std::invalid_argument("keys of distances are for heads of their own that see the whole text");
        const int64_t count = int64_t{op.num_heads} * ((op.head_dim + 1) / 2 * 2) * op.num_relative;
        const bool has_all = weights_.num_integers(op.relative_keys) == count && weights_.num_integers(op.relative_queries) == count;
        const int behind = (op.same_position + 32) / 32 * 32;  // a text's positions are computed by so many
        if (!has_all || op.num_relative < op.same_position + behind) throw std::invalid_argument("a text has more distances");
        num_positions_ = std::min(num_positions_, op.same_position + 1);
    }
    widest_text_head_ = std::max(widest_text_head_, instruction.text_attention.head_dim);
    program_.push_back(std::move(instruction));
    planner_.count_last_instruction();
    if (program_.back().gated.gate_site >= 0) {
        for (Floats& scratch : gate_scratch_) scratch.resize(kernels_.task_rows(1) * size_t{kGatePanels} * kPanel);
    }
}

int Engine::add_experts(const ExpertsLayer& layer, Domain domain) {
    const int id = experts_.add(layer, rows_of(domain == Domain::kSamples));
    const auto add = [&](ExpertsPart part) {
        add_instruction({.kind = InstructionKind::kExperts, .domain = domain, .experts = {part, id, layer}});
    };
    add(ExpertsPart::kScore);
    const RowOp choose{.kind = RowOpKind::kChooseExperts, .weight = id};
    add_instruction({.kind = InstructionKind::kRows, .domain = domain, .rows = {choose}});
    for (const ExpertsPart part : {ExpertsPart::kGather, ExpertsPart::kInner, ExpertsPart::kActivate, ExpertsPart::kOuter}) add(part);
    return id;
}

int Engine::define_linear_attention(const LinearAttentionOp& op) {
    if (op.num_key_heads < 1 || op.num_heads % op.num_key_heads != 0) throw std::invalid_argument("heads must be a multiple of key heads");
    recurrence_.reserve(op.first_line, op.num_heads, op.key_dim, op.value_dim);
    linear_attentions_.push_back(op);
    return static_cast<int>(linear_attentions_.size()) - 1;
}

void Engine::add_linear_attention(int id) {
    add_instruction({.kind = InstructionKind::kLinearAttention, .linear_attention = linear_attentions_.at(id)});
}

void Engine::set_logits(int buffer, float scale, float cap) {
    logits_buffer_ = buffer;
    const bool has_product = !program_.empty() && program_.back().linears.size() == 1 && program_.back().linears[0].out == buffer &&
                             program_.back().linears[0].residual < 0;
    planner_.join_last_instruction(has_product);
    if (has_product) {
        logits_.expect_product(scale, cap);
    } else if (scale != 1.0f || cap != 0.0f) {
        throw std::invalid_argument("logits that no product makes can't be changed");
    }
}

void Engine::name_logits(std::vector<int32_t> tokens) {
    if (static_cast<int64_t>(tokens.size()) != logits_width()) throw std::invalid_argument("there is not one token for each logit");
    for (const int32_t token : tokens) {
        if (token < 0 || token >= shape_.vocab_size) throw std::invalid_argument("a logit is of a token outside the vocabulary");
    }
    logits_.name_tokens(std::move(tokens));
}

void Engine::set_states(int buffer, bool per_sample) {
    states_buffer_ = buffer;
    states_are_of_samples_ = per_sample;
}

Engine::State Engine::state_of(int sample) const {
    const Buffer& states = buffers_[states_buffer_];
    if (states_are_of_samples_) return {states.row(sample), states.width};
    const int64_t last = input_.logit_tokens[sample], first = input_.query_start_loc[input_.row_of(last)];
    return {states.row(first), (last + 1 - first) * states.width};
}

void Engine::poison_buffers() {
    for (const Buffer& buffer : buffers_) std::fill_n(buffer.data(), buffer.rows * buffer.width, std::nanf(""));
}

// The memory of attention within the step's texts.
void Engine::reserve_for_texts() {
    if (widest_text_head_ == 0) return;
    int32_t longest = 0;
    for (int row = 0; row < input_.num_rows; ++row) {
        longest = std::max(longest, input_.query_start_loc[row + 1] - input_.query_start_loc[row]);
    }
    if (longest <= longest_text_) return;
    for (Floats& scratch : attention_scratch_) scratch.resize(kernels_.text_attention_scratch_floats(longest, widest_text_head_));
    longest_text_ = longest;
}

void Engine::settle() {
    kv_.begin();
    weights_.settle();
}

Engine::~Engine() { abandon_step(); }  // other threads may still use this memory

void Engine::abandon_step() {
    if (has_begun_) {
        admit_masks();
        team_->finish();
    }
    has_begun_ = false;
    owner_.reset();
}

void Engine::run_step(const StepInput& input) {
    prepare(input, false);
    compute();
}

void Engine::begin_step(const StepInput& input, std::shared_ptr<const void> owner) {
    prepare(input, true);
    waited_ns_ = 0;
    has_begun_ = team_->try_begin(*account_, *this, planner_.last().num_tasks, planner_.strands_of_run());
    owner_ = std::move(owner);
}

void Engine::prepare(const StepInput& input, bool awaits_masks) {
    if (is_in_step()) throw std::invalid_argument("the engine is in a step");
    if (input.num_tokens == 0) throw std::invalid_argument("a step computes at least one token");
    input_ = input;
    int64_t last_slot = 0;
    for (int i = 0; i < input.num_tokens; ++i) last_slot = std::max(last_slot, input.slot_mapping[i]);
    kv_.reach(std::max(last_slot, last_state_block(input, recurrence_.num_blocks()) * shape_.block_size));
    recurrence_.begin_step(input_);
    std::fill(member_times_.begin(), member_times_.end(), MemberTimes{});
    reserve_for_texts();
    if (adapters_) adapters_->begin_step(input);
    const StepPlan& plan = planner_.plan(input);
    pieces_done_.assign(plan.splits.size(), 0);
    if (static_cast<int64_t>(partials_.size()) < plan.num_partials) partials_.resize(plan.num_partials);
    const Stage* product = nullptr;
    int panels = 0;
    if (planner_.has_joint_instruction()) {
        product = &plan.stages[num_strands() * planner_.num_own()];
        panels = weights_.matrix(program_.back().linears[0].weight).panels;
    }
    logits_.begin_step(input, logits_buffer_ < 0 ? nullptr : buffers_[logits_buffer_].data(), logits_width(), product, panels, awaits_masks);
    began_ns_ = now_ns(), began_ticks_ = ticks();
}

void Engine::finish_step(const void* owner) {
    if (owner != owner_.get()) throw std::invalid_argument("other rows began the engine's step");
    if (logits_.awaits_masks()) throw std::invalid_argument("the step waits for its masks");
    const std::shared_ptr<const void> kept = std::move(owner_);
    compute();
}

void Engine::compute() {
    if (!has_begun_) waited_ns_ = team_->begin(*account_, *this, planner_.last().num_tasks, planner_.strands_of_run());
    has_begun_ = false;
    team_->finish();
    ns_per_tick_ = static_cast<double>(now_ns() - began_ns_) / static_cast<double>(std::max<int64_t>(1, ticks() - began_ticks_));
    logits_.end_step();
}

void Engine::run_task(int index, int task, int member) {
    const Stage& stage = planner_.last().stages[index];
    const Instruction* const instruction = instruction_of(index);
    if (!instruction) return logits_.draw(stage.first + task, member);
    switch (instruction->kind) {
        case InstructionKind::kRows: return run_rows(instruction->rows, stage, task);
        case InstructionKind::kLinear:
            if (planner_.is_joint(index)) {
                const LinearOp& op = instruction->linears[0];
                return logits_.multiply(weights_.matrix(op.weight), activations_[op.activation].view, epilogue_of(op), stage, task, member,
                                        op.site < 0 ? nullptr : adapters_.get(), op.site);
            }
            return run_linear(*instruction, index, task);
        case InstructionKind::kGated: return run_gated(instruction->gated, index, task, member);
        case InstructionKind::kAttention: return run_attention(instruction->attention, stage, task, member);
        case InstructionKind::kTextAttention: return run_text_attention(instruction->text_attention, stage, task, member);
        case InstructionKind::kCausalConv: return run_causal_conv(instruction->conv, stage, task, member);
        case InstructionKind::kLinearAttention: return run_linear_attention(instruction->linear_attention, stage, task, member);
        case InstructionKind::kExperts: {
            const ExpertsOp& op = instruction->experts;
            return experts_.run(op, buffers_[op.layer.x].data(), activations_[op.layer.input].view, stage, task, member);
        }
    }
}

const Instruction* Engine::instruction_of(int stage) const {
    const size_t i = planner_.instruction_of(stage);
    return i < program_.size() ? &program_[i] : nullptr;
}

void Engine::begun(int member) { member_times_[member].since = ticks(); }

void Engine::ended(int index, int member) {
    MemberTimes& times = member_times_[member];
    const int64_t now = ticks(), elapsed = now - times.since;
    times.since = now;
    const Instruction* const instruction = instruction_of(index);
    if (!instruction) {
        times.sampling += elapsed;
        return;
    }
    switch (instruction->kind) {
        case InstructionKind::kRows: times.rows += elapsed; break;
        case InstructionKind::kLinear:
        case InstructionKind::kGated:
        case InstructionKind::kExperts: times.linear += elapsed; break;
        case InstructionKind::kAttention:
        case InstructionKind::kTextAttention:
        case InstructionKind::kCausalConv:
        case InstructionKind::kLinearAttention: times.attention += elapsed; break;
    }
}

StepTimes Engine::times() const {
    const auto mean_ns = [this](int64_t MemberTimes::*part) {
        int64_t sum = 0;
        for (const MemberTimes& times : member_times_) sum += times.*part;
        return static_cast<int64_t>(static_cast<double>(sum) / planner_.num_members() * ns_per_tick_);
    };
    return {mean_ns(&MemberTimes::rows), mean_ns(&MemberTimes::linear), mean_ns(&MemberTimes::attention), mean_ns(&MemberTimes::sampling)};
}

void Engine::run_rows(const std::vector<RowOp>& ops, const Stage& stage, int task) {
    const int begin = stage.first + task * stage.grain, end = std::min(begin + stage.grain, stage.end);
    for (int row = begin; row < end; row += kRowsOfRowOp) {
        for (const RowOp& op : ops) run_row_op(op, row, std::min(row + kRowsOfRowOp, end));
    }
}

void Engine::compute_angles(Rope& rope, int64_t row) {
    const size_t half = rope.inv_freq.size();
    const int32_t at = input_.positions[rope.per_sample ? input_.logit_tokens[row] : row];
    const float position = static_cast<float>(at);
    const double grown = rope.growth == 0.0f ? 1.0 : 1.0 + rope.growth * std::log1p(at / rope.growth_len);
    const float factor = static_cast<float>(rope.factor * grown);
    for (size_t i = 0; i < half; ++i) {
        const float angle = position * rope.inv_freq[i];  // in float32, as the checkpoints' own implementation has it
        rope.cos[row * half + i] = std::cos(angle) * factor;
        rope.sin[row * half + i] = std::sin(angle) * factor;
    }
}

// Rows [row, end). Some operations are faster on several at once; the others take one after another.
void Engine::run_row_op(const RowOp& op, int64_t row, int64_t end) {
    switch (op.kind) {
        case RowOpKind::kQuantize:
            return kernels_.quantize_rows(activations_[op.out].view, row, end, buffers_[op.x].data(), weights_.vector(op.weight), op.value);
        case RowOpKind::kRound: {
            const int32_t* const apart = op.weight < 0 ? nullptr : weights_.matrix(op.weight).apart;
            return kernels_.round_rows(activations_[op.out].view, row, end, buffers_[op.x].data(), op.n != 0, apart);
        }
        case RowOpKind::kKvWrite:
            return kernels_.kv_write_rows(kv_.layer(op.n), input_.slot_mapping + row, end - row, buffers_[op.x].row(row),
                                          buffers_[op.y].row(row), weights_.vector(op.weight));
        case RowOpKind::kShrink:
            return adapters_->shrink(op.weight, activations_[op.x].view, static_cast<int>(row), static_cast<int>(end));
        case RowOpKind::kAdaptEmbedding:
            return adapters_->embed(op.weight, input_.token_ids, op.value, static_cast<int>(row), static_cast<int>(end), buffers_[op.out].data());
        default:
            for (; row < end; ++row) run_row_op(op, row);
    }
}

void Engine::run_row_op(const RowOp& op, int64_t row) {
    const KernelTable& k = kernels_;
    switch (op.kind) {
        case RowOpKind::kEmbed:
            return k.embed_row(buffers_[op.out].row(row), weights_.matrix(op.weight), input_.token_ids[row], op.value);
        case RowOpKind::kLookup:
        case RowOpKind::kLookupPosition: {
            const Weights::Table& table = weights_.table(op.weight);
            const int64_t index = op.kind == RowOpKind::kLookup ? input_.token_ids[row] : op.n + input_.positions[row];
            const uint8_t* const source = table.source + index * table.row_bytes;
            return decode_row(table.format, source, table.cols, op.value, buffers_[op.out].row(row));
        }
        case RowOpKind::kAngles: return compute_angles(ropes_[op.weight], row);
        case RowOpKind::kRmsNorm: {
            const Buffer& out = buffers_[op.out];
            const int width = static_cast<int>(out.width), part = op.head_dim ? op.n : width;
            for (int at = 0, i = 0; at < width; at += part, ++i) {
                const float* const weight = weights_.vector(op.weight) + int64_t{i} * op.head_dim;
                k.rms_norm(out.row(row) + at, buffers_[op.x].row(row) + at, weight, part, op.n, op.value);
            }
            return;
        }
        case RowOpKind::kLayerNorm: {
            const Buffer& out = buffers_[op.out];
            return k.layer_norm(out.row(row), buffers_[op.x].row(row), weights_.vector(op.weight), weights_.vector(op.y),
                                static_cast<int>(out.width), op.value);
        }
        case RowOpKind::kToBf16: return k.to_bf16_row(activations_[op.out].view, row, buffers_[op.x].row(row));
        case RowOpKind::kRope: {
            const Rope& rope = ropes_[op.weight];
            const int half = static_cast<int>(rope.inv_freq.size());
            return k.rope_row(buffers_[op.x].row(row), &rope.cos[row * half], &rope.sin[row * half], op.n, op.head_dim, half);
        }
        case RowOpKind::kGated:
            return k.gated_row(buffers_[op.out].row(row), buffers_[op.x].row(row), buffers_[op.y].row(row),
                               static_cast<int>(buffers_[op.out].width), static_cast<ActivationKind>(op.n));
        case RowOpKind::kActivate:
            return k.activate_row(buffers_[op.out].row(row), buffers_[op.x].row(row), static_cast<int>(buffers_[op.out].width),
                                  static_cast<ActivationKind>(op.n));
        case RowOpKind::kAdd:
            return k.add_row(buffers_[op.out].row(row), buffers_[op.x].row(row), buffers_[op.y].row(row),
                             static_cast<int>(buffers_[op.out].width), op.value);
        case RowOpKind::kScale: {
            const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
            for (int64_t i = 0; i < out.width; ++i) out.row(row)[i] = x.row(row)[i] * op.value;
            return;
        }
        case RowOpKind::kColumns: {
            const Buffer& out = buffers_[op.out];
            std::memcpy(out.row(row), buffers_[op.x].row(row) + op.n, static_cast<size_t>(out.width) * sizeof(float));
            return;
        }
        case RowOpKind::kAddType: {
            const Buffer& out = buffers_[op.out];
            const int step_row = input_.row_of(row);
            const int32_t second_at = input_.second_at_of_slot ? input_.second_at_of_slot[input_.row_slots[step_row]] : 0;
            const int type = second_at > 0 && input_.positions[row] >= second_at ? std::min(1, op.n - 1) : 0;
            return k.add_row(out.row(row), buffers_[op.x].row(row), weights_.vector(op.weight) + type * out.width,
                             static_cast<int>(out.width), 1.0f);
        }
        case RowOpKind::kGather:
        case RowOpKind::kGatherFirst: {
            const Buffer& out = buffers_[op.out];
            const int64_t last = input_.logit_tokens[row];
            const int64_t token = op.kind == RowOpKind::kGather ? last : input_.query_start_loc[input_.row_of(last)];
            std::memcpy(out.row(row), buffers_[op.x].row(token), static_cast<size_t>(out.width) * sizeof(float));
            return;
        }
        case RowOpKind::kMean:
        case RowOpKind::kSparse: {
            const Buffer& out = buffers_[op.out];
            const int64_t last = input_.logit_tokens[row], first = input_.query_start_loc[input_.row_of(last)];
            const auto pool = op.kind == RowOpKind::kMean ? mean_of_rows : sparse_of_rows;
            return pool(buffers_[op.x].data(), out.width, first, last + 1, out.row(row));
        }
        case RowOpKind::kNormalise: return normalise(k, buffers_[op.x].row(row), buffers_[op.out].width, buffers_[op.out].row(row));
        case RowOpKind::kGatherColumns: {
            const Buffer& out = buffers_[op.out];
            const float* const x = buffers_[op.x].row(row);
            const int32_t* const order = weights_.order(op.weight);
            for (int64_t i = 0; i < out.width; ++i) out.row(row)[i] = x[order[i]];
            return;
        }
        case RowOpKind::kResizeHeads: {  // wider heads end in zeros; narrower ones lose their last columns
            const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
            const int64_t from = x.width / op.n, to = out.width / op.n, kept = std::min(from, to);
            for (int64_t head = 0; head < op.n; ++head) {
                float* const resized = out.row(row) + head * to;
                std::memcpy(resized, x.row(row) + head * from, static_cast<size_t>(kept) * sizeof(float));
                std::fill(resized + kept, resized + to, 0.0f);
            }
            return;
        }
        case RowOpKind::kPlaceHeads: {
            const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
            const int64_t from = x.width / op.n, to = out.width / op.n;
            for (int64_t head = 0; head < op.n; ++head) {
                float* const end = std::copy_n(x.row(row) + head * from, from, out.row(row) + head * to + op.head_dim);
                std::fill(end, out.row(row) + (head + 1) * to, 0.0f);
            }
            return;
        }
        case RowOpKind::kChooseExperts: return experts_.choose(op.weight, row);
        case RowOpKind::kSumExperts: {
            const Buffer& out = buffers_[op.out];
            return experts_.sum(op.weight, row, out.row(row), static_cast<int>(out.width));
        }
        case RowOpKind::kShortConv: {
            const ShortConvLayer layer{op.n, buffers_[op.x].data(), weights_.vector(op.weight), weights_.vector(op.y)};
            return convolve(shape_, kv_, input_, layer, row, buffers_[op.out].row(row));
        }
        case RowOpKind::kKeepState: return keep_state(shape_, kv_, input_, {op.n, buffers_[op.x].data(), nullptr, nullptr}, row);
        case RowOpKind::kPrepareState: return prepare_state(linear_attentions_[op.weight], row);
        case RowOpKind::kQuantize:
        case RowOpKind::kRound:
        case RowOpKind::kShrink:
        case RowOpKind::kAdaptEmbedding:
        case RowOpKind::kKvWrite: return run_row_op(op, row, row + 1);
    }
}

Epilogue Engine::epilogue_of(const LinearOp& op) const {
    const Buffer& out = buffers_[op.out];
    return {out.data(), out.width, weights_.vector(op.bias), op.residual >= 0 ? buffers_[op.residual].data() : nullptr, op.has_gelu};
}

UpcomingKv Engine::upcoming_of(int index, int task) const {
    const Fetching::Share share = planner_.fetched_by(index, task);
    if (share.attention < 0) return {};
    return {kv_.layer(program_[share.attention].attention.layer), share.blocks, share.count};
}

std::vector<int32_t> Engine::fetched_blocks(int strand, int layer) const {
    std::vector<int32_t> blocks;
    for (int i = strand * planner_.num_own(); i < (strand + 1) * planner_.num_own(); ++i) {
        for (int task = 0; task < planner_.last().stages[i].num_tasks; ++task) {
            const Fetching::Share share = planner_.fetched_by(i, task);
            if (share.attention < 0 || program_[share.attention].attention.layer != layer) continue;
            blocks.insert(blocks.end(), share.blocks, share.blocks + share.count);
        }
    }
    return blocks;
}

void Engine::run_linear(const Instruction& instruction, int index, int task) {
    const Stage& stage = planner_.last().stages[index];
    const UpcomingKv upcoming = upcoming_of(index, task);
    for (const LinearOp& op : instruction.linears) {
        const PackedMatrix& w = weights_.matrix(op.weight);
        const int tasks = ceil_div(w.panels, stage.grain) * stage.row_blocks;
        if (task >= tasks) {
            task -= tasks;
            continue;
        }
        const int row0 = stage.first_row(task), row1 = stage.end_row(task);
        const PanelRange range = stage.panels(task, w.panels);
        const Epilogue epilogue = epilogue_of(op);
        if (op.num_heads > 0) return run_heads(op, row0, row1, range, upcoming);
        kernels_.gemm(w, activations_[op.activation].view, row0, row1, range, epilogue, upcoming);
        if (op.site >= 0) adapters_->expand(op.site, row0, row1, range.begin, range.end, epilogue.out, epilogue.ld);
        return;
    }
}

void Engine::run_heads(const LinearOp& op, int row0, int row1, PanelRange range, UpcomingKv upcoming) {
    const PackedMatrix& w = weights_.matrix(op.weight);
    const Buffer& out = buffers_[op.out];
    const int panels = w.panels / op.num_heads;
    for (int panel = range.begin; panel < range.end;) {
        const int head = panel / panels, stop = std::min(range.end, (head + 1) * panels);
        Activation x = activations_[op.activation].view;
        x.bf16 += int64_t{head} * op.x_columns;
        x.cols = w.cols;
        const Epilogue epilogue{out.data() + int64_t{head} * (op.out_columns - panels * kPanel), out.width};
        kernels_.gemm(w, x, row0, row1, {panel, stop, stop < range.end ? stop : range.next}, epilogue, upcoming);
        upcoming = {};
        panel = stop;
    }
}

void Engine::run_gated(const GatedOp& op, int index, int task, int member) {
    const Stage& stage = planner_.last().stages[index];
    const PackedMatrix &gate = weights_.matrix(op.gate), &up = weights_.matrix(op.up);
    const int row0 = stage.first_row(task), row1 = stage.end_row(task);
    const PanelRange range = stage.panels(task, gate.panels);
    const UpcomingKv upcoming = upcoming_of(index, task);
    if (op.gate_site >= 0 && (adapters_->changes(op.gate_site, row0, row1) || adapters_->changes(op.up_site, row0, row1))) {
        return run_changed_gated(op, row0, row1, range, upcoming, gate_scratch_[member].data());
    }
    const Epilogue epilogue{buffers_[op.out].data(), buffers_[op.out].width};
    kernels_.gemm_gated(gate, up, activations_[op.activation].view, row0, row1, range, op.kind, epilogue, upcoming);
}

// Both sums are whole before the activation, some panels at a time. Rows without an adapter get the same bits as from `gemm_gated`.
void Engine::run_changed_gated(const GatedOp& op, int row0, int row1, PanelRange range, const UpcomingKv& upcoming, float* scratch) {
    const PackedMatrix &gate = weights_.matrix(op.gate), &up = weights_.matrix(op.up);
    const Activation& x = activations_[op.activation].view;
    const Buffer& out = buffers_[op.out];
    constexpr int kWidth = kGatePanels * kPanel;
    UpcomingKv fetched = upcoming;
    for (int panel = range.begin; panel < range.end; panel += kGatePanels) {
        const int stop = std::min(panel + kGatePanels, range.end), column = panel * kPanel;
        const PanelRange some{panel, stop, stop < range.end ? stop : range.next};
        float* const ups = scratch - (int64_t{row0} * kWidth + column);  // of row 0 and column 0
        kernels_.gemm(gate, x, row0, row1, some, {out.data(), out.width}, fetched);
        kernels_.gemm(up, x, row0, row1, some, {ups, kWidth}, {});
        fetched = {};
        adapters_->expand(op.gate_site, row0, row1, panel, stop, out.data(), out.width);
        adapters_->expand(op.up_site, row0, row1, panel, stop, ups, kWidth);
        const int count = std::min(stop * kPanel, gate.rows) - column;
        for (int64_t row = row0; row < row1; ++row) {
            float* const gates = out.row(row) + column;
            kernels_.gated_row(gates, gates, ups + row * kWidth + column, count, op.kind);
        }
    }
}

AttentionTask Engine::attention_task(const AttentionOp& op, const AttentionTile& tile) {
    const Buffer &q = buffers_[op.q], &out = buffers_[op.out];
    const KvLayer& kv = kv_.layer(op.layer);
    const int64_t column = int64_t{tile.first_head} * kv.head_dim;
    const float* const sinks = weights_.vector(op.sinks);
    return {q.row(tile.token) + column,
            out.row(tile.token) + column,
            q.width,
            input_.block_tables + input_.row_slots[tile.row] * input_.table_stride,
            tile.first_head / (op.num_heads / kv.num_kv_heads),
            tile.num_queries,
            tile.first_head,
            tile.num_heads,
            tile.position,
            op.window,
            op.scale,
            op.softcap,
            sinks ? sinks + tile.first_head : nullptr,
            nullptr,
            tile.split < 0 ? nullptr : partials_.data() + planner_.last().splits[tile.split].partials,
            tile.first_segment,
            tile.end_segment};
}

void Engine::run_text_attention(const TextAttentionOp& op, const Stage& stage, int task, int member) {
    const Buffer &q = buffers_[op.q], &k = buffers_[op.k], &v = buffers_[op.v], &out = buffers_[op.out];
    const int heads_per_kv = op.num_heads / op.num_kv_heads, heads_of_tile = op.num_kv_heads;
    const int first = stage.first * heads_of_tile, begin = first + task * stage.grain;
    const int end = std::min(begin + stage.grain, stage.end * heads_of_tile);
    for (int i = begin; i < end; ++i) {
        const AttentionTile& tile = planner_.last().tiles[i / heads_of_tile];
        const int kv_head = i % heads_of_tile;
        const int64_t token = tile.token - tile.position;  // the text's first
        const int64_t column = int64_t{kv_head} * heads_per_kv * op.head_dim, kv_column = int64_t{kv_head} * op.head_dim;
        const float* const distances = weights_.vector(op.distances);
        const float* const relative = weights_.vector(op.relative_scales);
        const int64_t at_relative = int64_t{kv_head} * ((op.head_dim + 1) / 2 * 2) * op.num_relative;
        const TextAttentionTask work{q.row(token) + column,
                                     k.row(token) + kv_column,
                                     v.row(token) + kv_column,
                                     out.row(token) + column,
                                     q.width,
                                     k.width,
                                     input_.query_start_loc[tile.row + 1] - input_.query_start_loc[tile.row],
                                     tile.position,
                                     tile.position + tile.num_queries,
                                     heads_per_kv,
                                     op.head_dim,
                                     op.is_causal,
                                     op.window,
                                     op.scale,
                                     distances ? distances + int64_t{kv_head} * heads_per_kv * (2 * op.num_distances + 1) : nullptr,
                                     op.num_distances,
                                     relative ? weights_.integers(op.relative_keys) + at_relative : nullptr,
                                     relative ? weights_.integers(op.relative_queries) + at_relative : nullptr,
                                     relative ? relative[kv_head] : 0.0f,
                                     relative ? relative[op.num_heads + kv_head] : 0.0f,
                                     op.num_relative,
                                     op.same_position,
                                     op.sinks < 0 ? nullptr : weights_.vector(op.sinks) + int64_t{kv_head} * heads_per_kv};
        kernels_.text_attention(work, attention_scratch_[member].data());
    }
}

void Engine::run_attention(const AttentionOp& op, const Stage& stage, int task, int member) {
    const KvLayer& kv = kv_.layer(op.layer);
    const std::vector<AttentionTile>& tiles = planner_.last().tiles;
    const int begin = stage.first + task * stage.grain, end = std::min(begin + stage.grain, stage.end);
    AttentionTask work = attention_task(op, tiles[begin]);
    for (int i = begin; i < end; ++i) {
        // After a task's last tile prefetch the first one of the task that this member will probably take next.
        const int after = i + 1 < end ? i + 1 : stage.first + stage.task_after(task) * stage.grain;
        const AttentionTask next = attention_task(op, tiles[std::min(after, stage.end - 1)]);
        if (after < stage.end) work.next = &next;
        float* scratch = attention_scratch_[member].data();
        kernels_.attention(kv, work, scratch);
        if (tiles[i].split >= 0) {
            const int32_t split = tiles[i].split;
            const std::atomic_ref<int32_t> num_done(pieces_done_[split]);
            if (num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == planner_.last().splits[split].num_pieces) {
                num_done.store(0, std::memory_order_relaxed);  // for the next layer
                kernels_.attention_merge(kv, work, scratch);
            }
        }
        work = next;
    }
}

void Engine::prepare_state(const LinearAttentionOp& op, int64_t row) {
    const int width = op.num_key_heads * op.key_dim;
    const float *const x = buffers_[op.x].row(row), *const queries = x + op.q_at, *const keys = x + op.k_at;
    float *const q = buffers_[op.prepared].row(row), *const k = q + width, *const decays = k + width;
    if (op.q_factor >= 0) {
        const float eps = 1e-6f / static_cast<float>(op.key_dim);  // of the sum of squares it is 1e-6
        kernels_.rms_norm(q, queries, weights_.vector(op.q_factor), width, op.key_dim, eps);
        kernels_.rms_norm(k, keys, weights_.vector(op.k_factor), width, op.key_dim, eps);
    } else {
        for (int i = 0; i < width; ++i) q[i] = op.scale * queries[i];
        std::copy_n(keys, width, k);
    }
    const float *const steps = buffers_[op.steps].row(row), *const gates = op.gates < 0 ? nullptr : buffers_[op.gates].row(row);
    decays_and_rates(op, steps, gates, weights_.vector(op.step_bias), weights_.vector(op.decay), decays);
}

// Pieces of work are (panel, row of the step), ordered by panel: a task has rows of all lengths.
void Engine::run_causal_conv(const CausalConvOp& op, const Stage& stage, int task, int member) {
    const Buffer &x = buffers_[op.x], &out = buffers_[op.out];
    const int rows = stage.end - stage.first, begin = task * stage.grain;
    const int end = std::min(begin + stage.grain, rows * recurrence_.num_panels(op.width));
    for (int i = begin; i < end; ++i) {
        const int row = stage.first + i % rows, token = input_.query_start_loc[row];
        CausalConvTask work{};
        work.x = x.row(token), work.x_ld = x.width;
        work.out = out.row(token), work.out_ld = out.width;
        work.weight = weights_.vector(op.weight), work.weight_ld = op.width;
        work.bias = weights_.vector(op.bias);
        work.taps = op.taps;
        recurrence_.convolve(kernels_, work, op.first_line, op.width, row, i / rows, member);
    }
}

void Engine::run_linear_attention(const LinearAttentionOp& op, const Stage& stage, int task, int member) {
    const Buffer &x = buffers_[op.x], &out = buffers_[op.out], &prepared = buffers_[op.prepared];
    const float* const skip = weights_.vector(op.skip);
    const int panels = recurrence_.num_panels(op.value_dim), rows = stage.end - stage.first, begin = task * stage.grain;
    const int width = op.num_key_heads * op.key_dim, end = std::min(begin + stage.grain, rows * op.num_heads * panels);
    for (int i = begin; i < end; ++i) {
        const int row = stage.first + i % rows, head = i / rows / panels, panel = i / rows % panels;
        const int token = input_.query_start_loc[row];
        LinearAttentionTask work{};
        const int key_head = op.is_tiled ? head % op.num_key_heads : head / (op.num_heads / op.num_key_heads);
        work.q = prepared.row(token) + key_head * op.key_dim;
        work.k = work.q + width;
        work.decays = prepared.row(token) + 2 * width + head;
        work.rates = work.decays + op.num_heads;
        work.ld = prepared.width;
        work.v = x.row(token) + op.v_at + head * op.value_dim, work.v_ld = x.width;
        work.out = out.row(token) + head * op.value_dim, work.out_ld = out.width;
        work.skip = skip ? skip + head : nullptr;
        work.is_delta = op.gates >= 0;
        work.key_dim = op.key_dim;
        const int64_t first_line = op.first_line + int64_t{head} * panels * op.key_dim;
        recurrence_.attend(kernels_, work, first_line, op.value_dim, row, panel, member);
    }
}

}  // namespace penstock
