#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#include "cpu.h"

namespace penstock {

namespace {

constexpr int kRowBlock = 96;         // rows of a GEMM task: their activations stay in the second-level cache
constexpr int kTasksPerMember = 6;    // finer than the team, so that a member whose core was taken away is not waited for

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How many panels a task takes.
int panels_per_task(int panels, int row_blocks, int members) {
    const int wanted = std::max(1, kTasksPerMember * members / row_blocks);
    return std::max(1, ceil_div(panels, wanted));
}

void check_shape(const EngineShape& s) {
    const int32_t smallest =
        std::min({s.num_layers, s.num_kv_heads, s.head_dim, s.vocab_size, s.block_size, s.max_rows, s.max_step_tokens});
    if (smallest < 1) throw std::invalid_argument("every size of an engine must be at least 1");
    if (s.head_dim % kPanel != 0 || s.head_dim > 512) throw std::invalid_argument("head_dim must be a multiple of 16 and at most 512");
    if (s.block_size % kKvTile != 0) throw std::invalid_argument("block_size must be a multiple of 16");
    if (s.num_blocks < 2) throw std::invalid_argument("num_blocks must be at least 2");
}

}  // namespace

Engine::Engine(const EngineShape& shape, int num_threads, const std::string& variant)
    : shape_(shape), kernels_(choose_variant(variant)), team_(std::max(1, num_threads)), max_logits_(shape.max_rows) {
    check_shape(shape);
    kv_bytes_ = int64_t{2} * sizeof(uint16_t) * shape.num_layers * shape.num_blocks * shape.block_size * shape.num_kv_heads *
                shape.head_dim;
    kv_ = allocate_aligned(kv_bytes_, false);
    attention_scratch_.resize(team_.size());
    for (auto& scratch : attention_scratch_) scratch.resize(kernels_.attention_scratch_floats(shape.head_dim));
    sampler_scratch_.resize(team_.size());
    sampling_.resize(shape.max_rows);
    samples_.reserve(shape.max_rows);
    counters_.emplace_back();
}

KvLayer Engine::layer(int index) const {
    KvLayer kv{nullptr, shape_.block_size, shape_.num_kv_heads, shape_.head_dim};
    kv.data = reinterpret_cast<uint16_t*>(kv_.get()) + index * kv.block_stride() * shape_.num_blocks;
    return kv;
}

int Engine::add_matrix(SourceFormat format, int rows, int cols, const uint8_t* source) {
    PackedStorage packed = allocate_packed(format, rows, cols);
    struct Job {
        PackedStorage* packed;
        const uint8_t* source;
        SourceFormat format;
        int members;
    } job{&packed, source, format, team_.size()};
    team_.run(
        [](void* context, int member) {
            const Job& j = *static_cast<Job*>(context);
            const int panels = j.packed->matrix.panels;
            pack_panels(*j.packed, j.source, j.format, panels * member / j.members, panels * (member + 1) / j.members);
        },
        &job);
    const int64_t values = int64_t{packed.matrix.panels} * kPanel * cols;
    weight_bytes_ += format == SourceFormat::kBf16 ? 2 * values
                     : format == SourceFormat::kQ8_0 ? values + values / kGroup * 2
                                                     : values / 2 + values / kGroup * (format == SourceFormat::kQ4_1 ? 4 : 2);
    matrices_.push_back(std::move(packed));
    return static_cast<int>(matrices_.size()) - 1;
}

int Engine::add_vector(const float* values, int64_t count) {
    vectors_.emplace_back(values, values + count);
    return static_cast<int>(vectors_.size()) - 1;
}

int Engine::add_rope(const float* inv_freq, int half, float attention_factor) {
    Rope rope{{inv_freq, inv_freq + half}, attention_factor, {}, {}};
    rope.cos.resize(int64_t{shape_.max_step_tokens} * half);
    rope.sin.resize(int64_t{shape_.max_step_tokens} * half);
    ropes_.push_back(std::move(rope));
    return static_cast<int>(ropes_.size()) - 1;
}

int Engine::add_buffer(int width, bool per_sample) {
    const int64_t bytes = rows_of(per_sample) * width * static_cast<int64_t>(sizeof(float));
    buffers_.push_back({width, allocate_aligned(bytes, false)});
    return static_cast<int>(buffers_.size()) - 1;
}

int Engine::add_activation(int cols, bool quantised, bool per_sample) {
    const int64_t rows = rows_of(per_sample), groups = cols / kGroup;
    OwnedActivation a;
    a.view.cols = cols;
    const auto allocate = [&a](auto*& field, int64_t count) {
        a.memory.push_back(allocate_aligned(count * static_cast<int64_t>(sizeof(*field)), false));
        field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(a.memory.back().get());
    };
    if (quantised) {
        allocate(a.view.q, rows * cols);
        allocate(a.view.fine, rows * cols);
        allocate(a.view.scale, rows * groups);
        allocate(a.view.sum, rows * groups);
        allocate(a.view.outliers, rows * groups);
        allocate(a.view.num_outliers, rows);
    } else {
        allocate(a.view.bf16, rows * ((cols + 1) / 2) * 2);
    }
    activations_.push_back(std::move(a));
    return static_cast<int>(activations_.size()) - 1;
}

void Engine::add_instruction(Instruction instruction) {
    program_.push_back(std::move(instruction));
    counters_.emplace_back();
}

void Engine::set_sampling(int slot, RowSampling sampling) { sampling_.at(slot) = std::move(sampling); }

void Engine::copy_block(int from, int to) {
    for (int i = 0; i < shape_.num_layers; ++i) {
        const KvLayer kv = layer(i);
        std::memcpy(kv.data + to * kv.block_stride(), kv.data + from * kv.block_stride(),
                    static_cast<size_t>(kv.block_stride()) * sizeof(uint16_t));
    }
}

void Engine::poison_block(int block, int first) {
    for (int i = 0; i < shape_.num_layers; ++i) {
        const KvLayer kv = layer(i);
        const std::vector<float> nan(static_cast<size_t>(kv.num_kv_heads) * kv.head_dim, std::nanf(""));
        for (int64_t slot = int64_t{block} * kv.block_size + first; slot < int64_t{block + 1} * kv.block_size; ++slot) {
            kernels_.kv_write_row(kv, slot, nan.data(), nan.data());
        }
    }
}

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
        for (int token = begin; token < end; token += queries) {
            for (int head = 0; head < shape_.num_kv_heads; ++head) {
                tiles_.push_back({row, token, input_.context_lens[row] + token - begin, std::min(queries, end - token), head});
            }
        }
    }
}

void Engine::run_step(const StepInput& input) {
    input_ = input;
    times_ = {};
    samples_.resize(input.tokens ? input.num_logits : 0);
    for (Counter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
    sampler_lacks_memory_.store(false, std::memory_order_relaxed);
    plan_attention();
    team_.run([](void* context, int member) { static_cast<Engine*>(context)->run_member(member); }, this);
    if (sampler_lacks_memory_.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

void Engine::run_member(int member) {
    int64_t before = member == 0 ? now_ns() : 0;
    const auto account = [&](int64_t& part) {
        if (member != 0) return;
        const int64_t now = now_ns();
        part += now - before;
        before = now;
    };
    for (size_t i = 0; i < program_.size(); ++i) {
        const Instruction& instruction = program_[i];
        switch (instruction.kind) {
            case InstructionKind::kRows: run_rows(instruction, counters_[i]); break;
            case InstructionKind::kLinear: run_linear(instruction, counters_[i]); break;
            case InstructionKind::kGated: run_gated(instruction, counters_[i]); break;
            case InstructionKind::kAttention: run_attention(instruction, counters_[i], member); break;
        }
        team_.barrier();
        switch (instruction.kind) {
            case InstructionKind::kRows: account(times_.rows_ns); break;
            case InstructionKind::kLinear:
            case InstructionKind::kGated: account(times_.linear_ns); break;
            case InstructionKind::kAttention: account(times_.attention_ns); break;
        }
    }
    if (input_.tokens) {
        run_sampling(counters_.back(), member);
        team_.barrier();
        account(times_.sampling_ns);
    }
}

void Engine::run_rows(const Instruction& instruction, Counter& counter) {
    const int count = domain_size(instruction.domain);
    const int grain = std::max(1, count / (kTasksPerMember * team_.size()));
    while (true) {
        const int begin = counter.next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= count) return;
        for (int row = begin; row < std::min(begin + grain, count); ++row) {
            for (const RowOp& op : instruction.rows) run_row_op(op, row);
        }
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

void Engine::run_row_op(const RowOp& op, int64_t row) {
    const KernelTable& k = kernels_;
    switch (op.kind) {
        case RowOpKind::kEmbed:
            return k.embed_row(buffers_[op.out].row(row), matrices_[op.weight].matrix, input_.token_ids[row], op.value);
        case RowOpKind::kAngles: return compute_angles(ropes_[op.weight], row);
        case RowOpKind::kRmsNorm: {
            const Buffer& out = buffers_[op.out];
            return k.rms_norm(out.row(row), buffers_[op.x].row(row), vectors_[op.weight].data(), static_cast<int>(out.width), op.n,
                              op.value);
        }
        case RowOpKind::kQuantize: return k.quantize_row(activations_[op.out].view, row, buffers_[op.x].row(row));
        case RowOpKind::kToBf16: return k.to_bf16_row(activations_[op.out].view, row, buffers_[op.x].row(row));
        case RowOpKind::kRope: {
            const Rope& rope = ropes_[op.weight];
            const int half = static_cast<int>(rope.inv_freq.size());
            return k.rope_row(buffers_[op.x].row(row), &rope.cos[row * half], &rope.sin[row * half], op.n, op.head_dim, half);
        }
        case RowOpKind::kKvWrite:
            return k.kv_write_row(layer(op.n), input_.slot_mapping[row], buffers_[op.x].row(row), buffers_[op.y].row(row));
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
    }
}

void Engine::run_linear(const Instruction& instruction, Counter& counter) {
    const int rows = domain_size(instruction.domain);
    if (rows == 0) return;
    const int row_blocks = ceil_div(rows, kRowBlock);
    int panels = 0;
    for (const LinearOp& op : instruction.linears) panels += matrices_[op.weight].matrix.panels;
    const int chunk = panels_per_task(panels, row_blocks, team_.size());
    int task = counter.next.fetch_add(1, std::memory_order_relaxed);
    int first = 0;  // of the tasks of the current linear
    for (const LinearOp& op : instruction.linears) {
        const PackedMatrix& w = matrices_[op.weight].matrix;
        const int chunks = ceil_div(w.panels, chunk);
        const Buffer& out = buffers_[op.out];
        const Epilogue epilogue{out.data(), out.width, op.bias >= 0 ? vectors_[op.bias].data() : nullptr,
                                op.residual >= 0 ? buffers_[op.residual].data() : nullptr};
        for (; task < first + chunks * row_blocks; task = counter.next.fetch_add(1, std::memory_order_relaxed)) {
            const int panel = (task - first) / row_blocks * chunk, row = (task - first) % row_blocks * kRowBlock;
            kernels_.gemm(w, activations_[op.activation].view, row, std::min(row + kRowBlock, rows), panel,
                          std::min(panel + chunk, w.panels), epilogue);
        }
        first += chunks * row_blocks;
    }
}

void Engine::run_gated(const Instruction& instruction, Counter& counter) {
    const GatedOp& op = instruction.gated;
    const int rows = domain_size(instruction.domain);
    if (rows == 0) return;
    const PackedMatrix &gate = matrices_[op.gate].matrix, &up = matrices_[op.up].matrix;
    const int row_blocks = ceil_div(rows, kRowBlock);
    const int chunk = panels_per_task(gate.panels, row_blocks, team_.size());
    const int tasks = ceil_div(gate.panels, chunk) * row_blocks;
    const Epilogue epilogue{buffers_[op.out].data(), buffers_[op.out].width, nullptr, nullptr};
    while (true) {
        const int task = counter.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks) return;
        const int panel = task / row_blocks * chunk, row = task % row_blocks * kRowBlock;
        kernels_.gemm_gated(gate, up, activations_[op.activation].view, row, std::min(row + kRowBlock, rows), panel,
                            std::min(panel + chunk, gate.panels), op.kind, epilogue);
    }
}

void Engine::run_attention(const Instruction& instruction, Counter& counter, int member) {
    const AttentionOp& op = instruction.attention;
    const KvLayer kv = layer(op.layer);
    const Buffer &q = buffers_[op.q], &out = buffers_[op.out];
    const int heads_per_kv = op.num_heads / shape_.num_kv_heads;
    const int count = static_cast<int>(tiles_.size());
    const int grain = std::max(1, count / (4 * kTasksPerMember * team_.size()));
    while (true) {
        const int begin = counter.next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= count) return;
        for (int i = begin; i < std::min(begin + grain, count); ++i) {
            const AttentionTile& tile = tiles_[i];
            const int64_t column = int64_t{tile.kv_head} * heads_per_kv * shape_.head_dim;
            const AttentionTask task{q.row(tile.token) + column,
                                     out.row(tile.token) + column,
                                     q.width,
                                     input_.block_tables + input_.row_slots[tile.row] * input_.table_stride,
                                     tile.kv_head,
                                     tile.num_queries,
                                     heads_per_kv,
                                     tile.position,
                                     op.window,
                                     op.scale,
                                     op.softcap};
            kernels_.attention(kv, task, attention_scratch_[member].data());
        }
    }
}

void Engine::run_sampling(Counter& counter, int member) {
    try {
        sample_rows(counter, sampler_scratch_[member]);
    } catch (const std::bad_alloc&) {  // must not leave the team: the others wait at the barrier
        sampler_scratch_[member] = SamplerScratch{};
        sampler_lacks_memory_.store(true, std::memory_order_relaxed);
    }
}

void Engine::sample_rows(Counter& counter, SamplerScratch& scratch) {
    while (true) {
        const int i = counter.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= input_.num_logits) return;
        const int slot = input_.logit_slots[i];
        sample_row(buffers_[logits_].row(i), shape_.vocab_size, sampling_[slot], input_.tokens + slot * input_.tokens_stride,
                   input_.num_tokens_of_slot[slot], input_.num_prompt_of_slot[slot], scratch, samples_[i]);
    }
}

}  // namespace penstock
