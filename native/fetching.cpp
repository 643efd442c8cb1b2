#include "fetching.h"

#include <algorithm>
#include <utility>

namespace penstock {

namespace {

constexpr int64_t kMostFetchedBytes = 4 << 20;  // of a strand and layer: what a cache keeps until it is read

}  // namespace

Fetching::Fetching(const EngineShape& shape, const KvCache& kv) : shape_(shape), kv_(kv), is_fetched_(shape.num_blocks) {}

// Nothing is fetched for layers with a window: which blocks are seen differs from layer to layer.
void Fetching::add_instruction(const Instruction& instruction, int64_t cost) {
    const bool is_attention = instruction.kind == InstructionKind::kAttention;
    int32_t most = 0;
    if (is_attention && instruction.attention.window == 0) {
        most = static_cast<int32_t>(kMostFetchedBytes / kv_.layer(instruction.attention.layer).bytes_of_block());
    }
    most_blocks_ = std::max(most_blocks_, static_cast<std::size_t>(most));
    progress_.push_back({cost_, cost_ + cost, 0, -1, is_attention, most});
    cost_ += cost;
    if (is_attention) share_since_last_attention();
}

void Fetching::share_since_last_attention() {
    const std::size_t last = progress_.size() - 1;
    std::size_t first = last;
    while (first > 0 && !progress_[first - 1].is_attention) --first;
    const int64_t base = progress_[first].before, total = progress_[last].before - base;
    if (total == 0) return;
    for (std::size_t i = first; i < last; ++i) {
        Progress& own = progress_[i];
        own.before -= base;
        own.after -= base;
        own.total = total;
        own.attention = static_cast<int32_t>(last);
    }
}

Fetching::Blocks Fetching::plan(const StepInput& input, int first_token, int end_token) {
    Blocks planned{static_cast<int32_t>(blocks_.size()), static_cast<int32_t>(blocks_.size())};
    const std::size_t most = planned.first + most_blocks_;
    for (int row = 0; row < input.num_rows; ++row) {
        if (input.query_start_loc[row + 1] <= first_token || input.query_start_loc[row] >= end_token) continue;
        const int32_t* const table = input.block_tables + input.row_slots[row] * input.table_stride;
        const int count = ceil_div(input.context_lens[row], shape_.block_size);
        for (int i = 0; i < count && blocks_.size() < most; ++i) {
            if (!std::exchange(is_fetched_[table[i]], 1)) blocks_.push_back(table[i]);
        }
    }
    planned.end = static_cast<int32_t>(blocks_.size());
    for (int i = planned.first; i < planned.end; ++i) is_fetched_[blocks_[i]] = 0;
    return planned;
}

Fetching::Share Fetching::share(Blocks blocks, int instruction, int task, int num_tasks) const {
    const Progress& own = progress_[instruction];
    if (own.attention < 0) return {};
    const int64_t count = std::min(blocks.end - blocks.first, progress_[own.attention].most_blocks);
    if (count == 0) return {};
    const auto until = [&](int64_t t) {
        return static_cast<int32_t>(count * (own.before * num_tasks + (own.after - own.before) * t) / (own.total * num_tasks));
    };
    const int32_t begin = until(task), end = until(task + 1);
    return {own.attention, blocks_.data() + blocks.first + begin, end - begin};
}

}  // namespace penstock
