// One step: how its instructions become stages of tasks, and what a task computes.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>

#include "engine.h"

namespace penstock {

namespace {

constexpr int kRowBlock = 96;         // rows of a GEMM task: their activations stay in the second-level cache
constexpr int kRowsOfTile = 4;        // of the widest kernels; only the speed depends on it
constexpr int kRowsTogether = 16;     // that go through one row operation after another: they stay in the first-level cache
constexpr int kTasksPerMember = 6;    // of a stage: the last ones to end leave the others idle for that much less
constexpr int kAttentionTasksPerMember = 8;  // tiles differ more in cost than rows or panels

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Pieces of `count` things, about `wanted` of them.
int grain_of(int count, int wanted) { return std::max(1, ceil_div(count, wanted)); }

// Rows of a task of row operations: they are faster on four rows than on one, and on runs of eight or sixteen tokens.
int grain_of_rows(int rows, int members) {
    const int even = grain_of(rows, kTasksPerMember * members);
    if (even >= kRowsTogether) return even / kRowsTogether * kRowsTogether;
    if (even >= kRowsTogether / 2) return kRowsTogether / 2;
    return rows >= 4 * members ? 4 : even;
}

// Blocks of equal size, in whole tiles of rows.
int rows_of_block(int rows, int row_blocks) { return ceil_div(ceil_div(rows, row_blocks), kRowsOfTile) * kRowsOfTile; }

}  // namespace

void Engine::plan_attention() {
    tiles_.clear();
    int heads_per_kv = 1;
    for (const Instruction& instruction : program_) {
        if (instruction.kind == InstructionKind::kAttention) {
            heads_per_kv = instruction.attention.num_heads / shape_.num_kv_heads;
            break;
        }
    }
    const int queries = std::max(1, kernels_.attention_queries / heads_per_kv);
    for (int row = 0; row < input_.num_rows; ++row) {
        const int begin = input_.query_start_loc[row], end = input_.query_start_loc[row + 1];
        // Neighbours share their keys and values in the cache; a row's last queries, which see the most, come first.
        for (int head = 0; head < shape_.num_kv_heads; ++head) {
            for (int tile = ceil_div(end - begin, queries) - 1; tile >= 0; --tile) {
                const int token = begin + tile * queries;
                tiles_.push_back({row, token, input_.context_lens[row] + token - begin, std::min(queries, end - token), head});
            }
        }
    }
    if (team_.size() > 1 && heads_per_kv <= kernels_.attention_queries) split_long_tiles(heads_per_kv);
}

// So that no task is more than a quarter of what every thread has to do.
void Engine::split_long_tiles(int heads_per_kv) {
    splits_.clear();
    const auto cost_of = [](const AttentionTile& tile) { return int64_t{tile.position + tile.num_queries} * tile.num_queries; };
    int64_t total = 0, longest = 0, num_partials = 0;
    for (const AttentionTile& tile : tiles_) {
        total += cost_of(tile);
        longest = std::max(longest, cost_of(tile));
    }
    const int64_t bound = total / (4 * team_.size()) + 1;
    if (longest <= bound) return;
    whole_tiles_.swap(tiles_);
    tiles_.clear();
    for (AttentionTile tile : whole_tiles_) {
        const int num_segments = ceil_div(tile.position + tile.num_queries, kSegment);
        const int num_pieces = std::min(num_segments, static_cast<int>((cost_of(tile) + bound - 1) / bound));
        if (num_pieces < 2) {
            tiles_.push_back(tile);
            continue;
        }
        tile.split = static_cast<int32_t>(splits_.size());
        splits_.push_back({num_partials, num_pieces, 0});
        num_partials += num_segments * kernels_.attention_partial_floats(tile.num_queries * heads_per_kv, shape_.head_dim);
        for (int piece = 0; piece < num_pieces; ++piece) {
            tile.first_segment = num_segments * piece / num_pieces;
            tile.end_segment = num_segments * (piece + 1) / num_pieces;
            tiles_.push_back(tile);
        }
    }
    if (static_cast<int64_t>(partials_.size()) < num_partials) partials_.resize(num_partials);
}

Engine::StagePlan Engine::plan_stage(const Instruction& instruction) const {
    const int wanted = kTasksPerMember * team_.size();
    if (instruction.kind == InstructionKind::kAttention) {
        // Pieces of a long tile lie side by side and are dear: each is a task of its own.
        const int tiles = static_cast<int>(tiles_.size());
        const int grain = splits_.empty() ? grain_of(tiles, kAttentionTasksPerMember * team_.size()) : 1;
        return {ceil_div(tiles, grain), grain, 1};
    }
    const int rows = domain_size(instruction.domain);
    if (rows == 0) return {0, 1, 1};
    if (instruction.kind == InstructionKind::kRows) {
        const int grain = grain_of_rows(rows, team_.size());
        return {ceil_div(rows, grain), grain, 1};
    }
    // Whole tiles (a task's last panels would be computed one by one), and rather more tasks than wanted: one task too
    // many for a member is waited for by all.
    const int row_blocks = ceil_div(rows, kRowBlock), tile = kernels_.tile_panels(rows);
    const auto panels_of_task = [&](int panels) {
        return std::max(1, panels / std::max(1, wanted / row_blocks) / tile) * tile;
    };
    const auto tasks_of = [&](int weight, int grain) { return ceil_div(matrices_[weight].matrix.panels, grain) * row_blocks; };
    if (instruction.kind == InstructionKind::kGated) {
        const int grain = panels_of_task(matrices_[instruction.gated.gate].matrix.panels);
        return {tasks_of(instruction.gated.gate, grain), grain, row_blocks};
    }
    int panels = 0, tasks = 0;
    for (const LinearOp& op : instruction.linears) panels += matrices_[op.weight].matrix.panels;
    const int grain = panels_of_task(panels);
    for (const LinearOp& op : instruction.linears) tasks += tasks_of(op.weight, grain);
    return {tasks, grain, row_blocks};
}

void Engine::run_step(const StepInput& input) {
    input_ = input;
    int64_t last_slot = 0;
    for (int i = 0; i < input.num_tokens; ++i) last_slot = std::max(last_slot, input.slot_mapping[i]);
    kv_->reach((last_slot / shape_.block_size + 1) * block_bytes_);
    times_ = {};
    samples_.resize(input.tokens ? input.num_logits : 0);
    sampler_lacks_memory_.store(false, std::memory_order_relaxed);
    plan_attention();
    stages_.clear();
    for (const Instruction& instruction : program_) stages_.push_back(plan_stage(instruction));
    if (input.tokens) stages_.push_back({input.num_logits, 1, 1});
    num_tasks_.clear();
    for (const StagePlan& stage : stages_) num_tasks_.push_back(stage.num_tasks);
    stage_began_ns_ = now_ns();
    team_.run(*this, num_tasks_);
    if (sampler_lacks_memory_.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

void Engine::run_task(int stage, int task, int member) {
    const StagePlan& plan = stages_[stage];
    if (stage == static_cast<int>(program_.size())) return run_sampling(task, member);
    const Instruction& instruction = program_[stage];
    switch (instruction.kind) {
        case InstructionKind::kRows: return run_rows(instruction, plan, task);
        case InstructionKind::kLinear: return run_linear(instruction, plan, task);
        case InstructionKind::kGated: return run_gated(instruction.gated, plan, task, domain_size(instruction.domain));
        case InstructionKind::kAttention: return run_attention(instruction.attention, plan, task, member);
    }
}

void Engine::stage_done(int stage) {
    const int64_t now = now_ns(), elapsed = now - stage_began_ns_;
    stage_began_ns_ = now;
    if (stage == static_cast<int>(program_.size())) {
        times_.sampling_ns += elapsed;
        return;
    }
    switch (program_[stage].kind) {
        case InstructionKind::kRows: times_.rows_ns += elapsed; break;
        case InstructionKind::kLinear:
        case InstructionKind::kGated: times_.linear_ns += elapsed; break;
        case InstructionKind::kAttention: times_.attention_ns += elapsed; break;
    }
}

void Engine::run_rows(const Instruction& instruction, const StagePlan& plan, int task) {
    const int end = std::min((task + 1) * plan.grain, domain_size(instruction.domain));
    for (int row = task * plan.grain; row < end; row += kRowsTogether) {
        for (const RowOp& op : instruction.rows) run_row_op(op, row, std::min(row + kRowsTogether, end));
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
        case RowOpKind::kQuantize:
        case RowOpKind::kKvWrite: return run_row_op(op, row, row + 1);
    }
}

// Members that are equally fast take turns: what this one will want after this task is as many tasks on as there are members.
PanelRange Engine::panels_of(const StagePlan& plan, int task, int panels) const {
    const int begin = task / plan.row_blocks * plan.grain, next = (task + team_.size()) / plan.row_blocks * plan.grain;
    return {begin, std::min(begin + plan.grain, panels), next};
}

void Engine::run_linear(const Instruction& instruction, const StagePlan& plan, int task) {
    const int rows = domain_size(instruction.domain);
    for (const LinearOp& op : instruction.linears) {
        const PackedMatrix& w = matrices_[op.weight].matrix;
        const int tasks = ceil_div(w.panels, plan.grain) * plan.row_blocks;
        if (task >= tasks) {
            task -= tasks;
            continue;
        }
        const Buffer& out = buffers_[op.out];
        const Epilogue epilogue{out.data(), out.width, op.bias >= 0 ? vectors_[op.bias].data() : nullptr,
                                op.residual >= 0 ? buffers_[op.residual].data() : nullptr};
        const int block = rows_of_block(rows, plan.row_blocks), row = task % plan.row_blocks * block;
        return kernels_.gemm(w, activations_[op.activation].view, row, std::min(row + block, rows),
                             panels_of(plan, task, w.panels), epilogue);
    }
}

void Engine::run_gated(const GatedOp& op, const StagePlan& plan, int task, int rows) {
    const PackedMatrix &gate = matrices_[op.gate].matrix, &up = matrices_[op.up].matrix;
    const Epilogue epilogue{buffers_[op.out].data(), buffers_[op.out].width, nullptr, nullptr};
    const int block = rows_of_block(rows, plan.row_blocks), row = task % plan.row_blocks * block;
    kernels_.gemm_gated(gate, up, activations_[op.activation].view, row, std::min(row + block, rows),
                        panels_of(plan, task, gate.panels), op.kind, epilogue);
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

void Engine::run_attention(const AttentionOp& op, const StagePlan& plan, int task, int member) {
    const KvLayer kv = layer(op.layer);
    const int begin = task * plan.grain, end = std::min(begin + plan.grain, static_cast<int>(tiles_.size()));
    AttentionTask work = attention_task(op, tiles_[begin]);
    for (int i = begin; i < end; ++i) {
        // After a task's last tile comes the first of the task that this member will probably take, for its keys to be fetched.
        const int after = i + 1 < end ? i + 1 : (task + team_.size()) * plan.grain;
        const AttentionTask next = attention_task(op, tiles_[std::min(after, static_cast<int>(tiles_.size()) - 1)]);
        if (after < static_cast<int>(tiles_.size())) work.next = &next;
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

void Engine::run_sampling(int row, int member) {
    const int slot = input_.logit_slots[row];
    SamplerScratch& scratch = sampler_scratch_[member];
    try {
        sample_row(buffers_[logits_].row(row), shape_.vocab_size, sampling_[slot], input_.tokens + slot * input_.tokens_stride,
                   input_.num_tokens_of_slot[slot], input_.num_prompt_of_slot[slot], scratch, samples_[row]);
    } catch (const std::bad_alloc&) {  // must not leave the task; run_step tells it
        scratch = SamplerScratch{};
        sampler_lacks_memory_.store(true, std::memory_order_relaxed);
    }
}

}  // namespace penstock
