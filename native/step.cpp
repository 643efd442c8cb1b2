// One step: what a task of its stages computes.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>

#include "engine.h"

namespace penstock {

namespace {

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Engine::run_step(const StepInput& input) {
    input_ = input;
    int64_t last_slot = 0;
    for (int i = 0; i < input.num_tokens; ++i) last_slot = std::max(last_slot, input.slot_mapping[i]);
    kv_->reach((last_slot / shape_.block_size + 1) * block_bytes_);
    times_ = {};
    samples_.resize(input.tokens ? input.num_logits : 0);
    sampler_lacks_memory_.store(false, std::memory_order_relaxed);
    plan_step();
    plan_logits();
    team_->run(*this, num_tasks_, strands_of_run());
    if (sampler_lacks_memory_.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

void Engine::run_task(int index, int task, int member) {
    const Stage& stage = stages_[index];
    const Instruction* const instruction = instruction_of(index);
    if (!instruction) return run_sampling(stage.first + task, member);
    switch (instruction->kind) {
        case InstructionKind::kRows: return run_rows(instruction->rows, stage, task);
        case InstructionKind::kLinear:
            if (is_logits(*instruction)) return run_logits(instruction->linears[0], stage, task, member);
            return run_linear(*instruction, index, task);
        case InstructionKind::kGated: return run_gated(instruction->gated, index, task);
        case InstructionKind::kAttention: return run_attention(instruction->attention, stage, task, member);
    }
}

// Null: sampling.
const Instruction* Engine::instruction_of(int index) const {
    const int joint = index - num_strands() * num_own_;
    const size_t i = joint < 0 ? index % num_own_ : num_own_ + joint;
    return i < program_.size() ? &program_[i] : nullptr;
}

void Engine::begun() { stage_began_ns_ = now_ns(); }

void Engine::stage_done(int index) {
    const int64_t now = now_ns(), elapsed = now - stage_began_ns_;
    stage_began_ns_ = now;
    const Instruction* const instruction = instruction_of(index);
    if (!instruction) {
        times_.sampling_ns += elapsed;
        return;
    }
    switch (instruction->kind) {
        case InstructionKind::kRows: times_.rows_ns += elapsed; break;
        case InstructionKind::kLinear:
        case InstructionKind::kGated: times_.linear_ns += elapsed; break;
        case InstructionKind::kAttention: times_.attention_ns += elapsed; break;
    }
}

void Engine::run_rows(const std::vector<RowOp>& ops, const Stage& stage, int task) {
    const int begin = stage.first + task * stage.grain, end = std::min(begin + stage.grain, stage.end);
    for (int row = begin; row < end; row += kRowsTogether) {
        for (const RowOp& op : ops) run_row_op(op, row, std::min(row + kRowsTogether, end));
    }
}

void Engine::compute_angles(Rope& rope, int64_t row) {
    const size_t half = rope.inv_freq.size();
    const float position = static_cast<float>(input_.positions[row]);
    for (size_t i = 0; i < half; ++i) {
        const float angle = position * rope.inv_freq[i];  // in float32, as the checkpoints' own implementation has it
        rope.cos[row * half + i] = std::cos(angle) * rope.factor;
        rope.sin[row * half + i] = std::sin(angle) * rope.factor;
    }
}

// Rows [row, end). Some operations are faster on several at once; the others take one after another.
void Engine::run_row_op(const RowOp& op, int64_t row, int64_t end) {
    const auto vector = [&] { return op.weight < 0 ? nullptr : vectors_[op.weight].data(); };
    switch (op.kind) {
        case RowOpKind::kQuantize:
            return kernels_.quantize_rows(activations_[op.out].view, row, end, buffers_[op.x].data(), vector(), op.value);
        case RowOpKind::kKvWrite:
            return kernels_.kv_write_rows(layer(op.n), input_.slot_mapping + row, end - row, buffers_[op.x].row(row),
                                          buffers_[op.y].row(row), vector());
        default:
            for (; row < end; ++row) run_row_op(op, row);
    }
}

void Engine::run_row_op(const RowOp& op, int64_t row) {
    const KernelTable& k = kernels_;
    switch (op.kind) {
        case RowOpKind::kEmbed:
            return k.embed_row(buffers_[op.out].row(row), matrices_[op.weight].matrix, input_.token_ids[row], op.value);
        case RowOpKind::kLookup: {
            const Table& table = tables_[op.weight];
            const uint8_t* const source = table.source + input_.token_ids[row] * table.row_bytes;
            return decode_row(table.format, source, table.cols, op.value, buffers_[op.out].row(row));
        }
        case RowOpKind::kAngles: return compute_angles(ropes_[op.weight], row);
        case RowOpKind::kRmsNorm: {
            const Buffer& out = buffers_[op.out];
            return k.rms_norm(out.row(row), buffers_[op.x].row(row), vectors_[op.weight].data(), static_cast<int>(out.width), op.n,
                              op.value);
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
        case RowOpKind::kAdd:
            return k.add_row(buffers_[op.out].row(row), buffers_[op.x].row(row), buffers_[op.y].row(row),
                             static_cast<int>(buffers_[op.out].width));
        case RowOpKind::kGather: {
            const Buffer& out = buffers_[op.out];
            std::memcpy(out.row(row), buffers_[op.x].row(input_.logit_tokens[row]), static_cast<size_t>(out.width) * sizeof(float));
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
        case RowOpKind::kQuantize:
        case RowOpKind::kKvWrite: return run_row_op(op, row, row + 1);
    }
}

// The task that a member takes after this one, if those who share the stage are equally fast.
int Engine::task_after(const Stage& stage, int task) const { return task + stage.members; }

PanelRange Engine::panels_of(const Stage& stage, int task, int panels) const {
    const int begin = task / stage.row_blocks * stage.grain, next = task_after(stage, task) / stage.row_blocks * stage.grain;
    return {begin, std::min(begin + stage.grain, panels), next};
}

Engine::Rows Engine::rows_of(const Stage& stage, int task) const {
    const int begin = stage.first + task % stage.row_blocks * stage.block;
    return {begin, std::min(begin + stage.block, stage.end)};
}

Epilogue Engine::epilogue_of(const LinearOp& op) const {
    const Buffer& out = buffers_[op.out];
    return {out.data(), out.width, op.bias >= 0 ? vectors_[op.bias].data() : nullptr, op.residual >= 0 ? buffers_[op.residual].data() : nullptr};
}

void Engine::run_linear(const Instruction& instruction, int index, int task) {
    const Stage& stage = stages_[index];
    const UpcomingKv upcoming = upcoming_of(index, task);
    for (const LinearOp& op : instruction.linears) {
        const PackedMatrix& w = matrices_[op.weight].matrix;
        const int tasks = ceil_div(w.panels, stage.grain) * stage.row_blocks;
        if (task >= tasks) {
            task -= tasks;
            continue;
        }
        const Rows rows = rows_of(stage, task);
        return kernels_.gemm(w, activations_[op.activation].view, rows.begin, rows.end, panels_of(stage, task, w.panels), epilogue_of(op),
                             upcoming);
    }
}

void Engine::run_gated(const GatedOp& op, int index, int task) {
    const Stage& stage = stages_[index];
    const PackedMatrix &gate = matrices_[op.gate].matrix, &up = matrices_[op.up].matrix;
    const Epilogue epilogue{buffers_[op.out].data(), buffers_[op.out].width, nullptr, nullptr};
    const Rows rows = rows_of(stage, task);
    kernels_.gemm_gated(gate, up, activations_[op.activation].view, rows.begin, rows.end, panels_of(stage, task, gate.panels), op.kind,
                        epilogue, upcoming_of(index, task));
}

AttentionTask Engine::attention_task(const AttentionOp& op, const AttentionTile& tile) {
    const Buffer &q = buffers_[op.q], &out = buffers_[op.out];
    const int heads_per_kv = op.num_heads / shape_.num_kv_heads;
    const int64_t column = int64_t{tile.kv_head} * heads_per_kv * shape_.head_dim;
    return {q.row(tile.token) + column,
            out.row(tile.token) + column,
            q.width,
            input_.block_tables + input_.row_slots[tile.row] * input_.table_stride,
            tile.kv_head,
            tile.num_queries,
            heads_per_kv,
            tile.position,
            op.window,
            op.scale,
            op.softcap,
            nullptr,
            tile.split < 0 ? nullptr : partials_.data() + splits_[tile.split].partials,
            tile.first_segment,
            tile.end_segment};
}

void Engine::run_attention(const AttentionOp& op, const Stage& stage, int task, int member) {
    const KvLayer kv = layer(op.layer);
    const int begin = stage.first + task * stage.grain, end = std::min(begin + stage.grain, stage.end);
    AttentionTask work = attention_task(op, tiles_[begin]);
    for (int i = begin; i < end; ++i) {
        // After a task's last tile comes the first of the task that this member will probably take, for its keys to be fetched.
        const int after = i + 1 < end ? i + 1 : stage.first + task_after(stage, task) * stage.grain;
        const AttentionTask next = attention_task(op, tiles_[std::min(after, stage.end - 1)]);
        if (after < stage.end) work.next = &next;
        float* scratch = attention_scratch_[member].data();
        kernels_.attention(kv, work, scratch);
        if (tiles_[i].split >= 0) {
            AttentionSplit& split = splits_[tiles_[i].split];
            const std::atomic_ref<int32_t> num_done(split.num_done);
            if (num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == split.num_pieces) {
                num_done.store(0, std::memory_order_relaxed);  // for the next layer
                kernels_.attention_merge(kv, work, scratch);
            }
        }
        work = next;
    }
}

}  // namespace penstock
