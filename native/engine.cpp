#include "engine.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "cpu.h"

namespace penstock {

namespace {

constexpr int kSettlerNice = 10;          // a tenth of a core that others want
constexpr int kPackingTasksPerMember = 8;  // a member that loses its core delays the others by one of them

void check_shape(const EngineShape& s) {
    const int32_t smallest =
        std::min({s.num_layers, s.num_kv_heads, s.head_dim, s.vocab_size, s.block_size, s.max_rows, s.max_step_tokens});
    if (smallest < 1) throw std::invalid_argument("every size of an engine must be at least 1");
    if (s.head_dim % kPanel != 0 || s.head_dim > kLargestHeadDim) throw std::invalid_argument("head_dim must be a multiple of 16 and at most 512");
    if (s.block_size % kKvTile != 0) throw std::invalid_argument("block_size must be a multiple of 16");
    if (s.num_blocks < 2) throw std::invalid_argument("num_blocks must be at least 2");
}

}  // namespace

Engine::Engine(const EngineShape& shape, std::shared_ptr<Team> team, const std::string& variant)
    : shape_(shape), kernels_(choose_variant(variant)), team_(std::move(team)) {
    check_shape(shape);
    const KvLayer kv{nullptr, shape.kv_format, shape.block_size, shape.num_kv_heads, shape.head_dim};
    block_bytes_ = shape.num_layers * kv.bytes_of_block();
    kv_.emplace(kv_bytes());
    attention_scratch_.resize(team_->size());
    for (auto& scratch : attention_scratch_) scratch.resize(kernels_.attention_scratch_floats(shape.head_dim));
    sampler_scratch_.resize(team_->size());
    logits_scratch_.resize(team_->size());
    sampling_.resize(shape.max_rows);
    samples_.reserve(shape.max_rows);
    is_fetched_.resize(shape.num_blocks);
}

KvLayer Engine::layer(int index) const {
    KvLayer kv{nullptr, shape_.kv_format, shape_.block_size, shape_.num_kv_heads, shape_.head_dim, block_bytes_};
    kv.data = kv_->data() + index * kv.bytes_of_block();
    return kv;
}

int Engine::add_matrix(SourceFormat format, int rows, int cols) {
    matrices_.push_back(allocate_packed(arena_, format, rows, cols));
    weight_bytes_ += matrices_.back().bytes;
    return static_cast<int>(matrices_.size()) - 1;
}

void Engine::pack_rows(int matrix, int first_row, int num_rows, const uint8_t* source) {
    struct Packing final : Work {
        PackedStorage& packed;
        const uint8_t* source;
        int first, panels, num_parts;
        std::atomic<bool> finite{true};
        Packing(PackedStorage& p, const uint8_t* s, int f, int n, int parts)
            : packed(p), source(s), first(f), panels(n), num_parts(std::min(n, parts)) {}
        void run_task(int, int part, int) override {
            const auto begin = static_cast<int>(int64_t{panels} * part / num_parts), end = static_cast<int>(int64_t{panels} * (part + 1) / num_parts);
            const uint8_t* const rows = source + begin * source_bytes(packed.format, kPanel, packed.matrix.cols);
            if (!pack_panels(packed, rows, first + begin, first + end)) finite.store(false, std::memory_order_relaxed);
        }
    } packing(matrices_.at(matrix), source, first_row / kPanel, ceil_div(num_rows, kPanel), kPackingTasksPerMember * team_->size());
    team_->run(packing, {packing.num_parts});
    if (!packing.finite.load(std::memory_order_relaxed)) throw std::invalid_argument("a scale is no finite number: the file is damaged");
}

int Engine::add_table(SourceFormat format, int rows, int cols, const uint8_t* source) {
    tables_.push_back({format, cols, source_bytes(format, rows, cols) / rows, source});
    return static_cast<int>(tables_.size()) - 1;
}

int Engine::add_vector(const float* values, int64_t count) {
    vectors_.emplace_back(values, values + count);
    for (float& x : vectors_.back()) {
        if (std::isnan(x)) x = NAN;
    }
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
        allocate(a.view.exponent, rows * groups);
        allocate(a.view.zero_sum, rows * groups);
        allocate(a.view.sum, rows * ((groups + 1) & ~int64_t{1}));
        a.view.outliers_per_row = outliers_of(cols);
        allocate(a.view.outlier, rows * a.view.outliers_per_row);
        allocate(a.view.outlier_rest, rows * a.view.outliers_per_row);
    } else {
        allocate(a.view.bf16, rows * ((cols + 1) / 2) * 2);
    }
    activations_.push_back(std::move(a));
    return static_cast<int>(activations_.size()) - 1;
}

void Engine::add_instruction(Instruction instruction) {
    const int64_t before = costs_.of_fetching;
    count_cost(instruction);
    program_.push_back(std::move(instruction));
    fetch_shares_.push_back({before, costs_.of_fetching});
    share_fetching();
    num_own_ = static_cast<int>(program_.size());
}

void Engine::settle() {
    kv_->begin();
    if (settler_.joinable()) return;
    arena_.complete();
    if (arena_.small_bytes() == 0) return;
    try {
        settler_ = std::jthread([this](const std::stop_token& stop) {
            setpriority(PRIO_PROCESS, 0, kSettlerNice);  // on Linux of this thread alone; a wish
            try {
                arena_.settle(stop);
            } catch (const std::bad_alloc&) {  // then the rest stays in small pages
            }
        });
    } catch (const std::system_error&) {  // no thread: then all stays in small pages, which serve as well, but slower
    }
}

void Engine::set_sampling(int slot, RowSampling sampling) { sampling_.at(slot) = std::move(sampling); }

void Engine::copy_block(int from, int to) {
    std::memcpy(block(to), block(from), static_cast<size_t>(block_bytes_));
}

void Engine::read_block(int block_id, uint8_t* out) const {
    std::memcpy(out, block(block_id), static_cast<size_t>(block_bytes_));
}

void Engine::write_block(int block_id, const uint8_t* content) {
    std::memcpy(block(block_id), content, static_cast<size_t>(block_bytes_));
}

void Engine::poison_block(int block, int first) {
    for (int i = 0; i < shape_.num_layers; ++i) {
        const KvLayer kv = layer(i);
        const std::vector<float> nan(static_cast<size_t>(kv.num_kv_heads) * kv.head_dim, std::nanf(""));
        for (int64_t slot = int64_t{block} * kv.block_size + first; slot < int64_t{block + 1} * kv.block_size; ++slot) {
            kernels_.kv_write_rows(kv, &slot, 1, nan.data(), nan.data(), nullptr);
        }
    }
}

}  // namespace penstock
