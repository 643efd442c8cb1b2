// Which keys and values a step's products fetch into the cache for the attention after them.
//
// Attention reads a layer's keys and values once and computes little with them: it waits for memory. Products leave memory idle: weights
// that they read serve many rows. So the thread that will attend fetches beforehand, while it multiplies.

#include <utility>

#include "engine.h"

namespace penstock {

namespace {

constexpr int kFewestTokens = 12;               // of a step in one strand: products of fewer wait for memory themselves
constexpr int64_t kMostFetchedBytes = 4 << 20;  // of a strand and layer: what a cache keeps until it is read

}  // namespace

// Of the last instruction, if that is attention: those since the one before.
void Engine::share_fetching() {
    const size_t last = program_.size() - 1;
    if (program_[last].kind != InstructionKind::kAttention) return;
    size_t first = last;
    while (first > 0 && program_[first - 1].kind != InstructionKind::kAttention) --first;
    const int64_t base = fetch_shares_[first].before, total = fetch_shares_[last].before - base;
    if (total == 0) return;
    for (size_t i = first; i < last; ++i) {
        const FetchShare& share = fetch_shares_[i];
        fetch_shares_[i] = {share.before - base, share.after - base, total, static_cast<int>(last)};
    }
}

// The blocks of a strand's contexts, once each: rows share prefixes. Threads that share a strand don't know who of them will read what, and
// a layer of more weights than a cache holds would drive out what was fetched.
void Engine::plan_fetching(Strand& strand) {
    strand.first_block = strand.end_block = static_cast<int32_t>(fetched_blocks_.size());
    if (takers() > 1 || !layer_fits_cache()) return;
    if (num_strands() == 1 && strand.end_token - strand.first_token < kFewestTokens) return;
    const size_t most = strand.first_block + kMostFetchedBytes / layer(0).bytes_of_block();
    for (int row = 0; row < input_.num_rows; ++row) {
        if (input_.query_start_loc[row + 1] <= strand.first_token || input_.query_start_loc[row] >= strand.end_token) continue;
        const int32_t* const table = input_.block_tables + input_.row_slots[row] * input_.table_stride;
        const int count = ceil_div(input_.context_lens[row], shape_.block_size);
        for (int i = 0; i < count && fetched_blocks_.size() < most; ++i) {
            if (!std::exchange(is_fetched_[table[i]], 1)) fetched_blocks_.push_back(table[i]);
        }
    }
    strand.end_block = static_cast<int32_t>(fetched_blocks_.size());
    for (int i = strand.first_block; i < strand.end_block; ++i) is_fetched_[fetched_blocks_[i]] = 0;
}

// What one task of a stage fetches. Of layers with a window nothing: which blocks are seen differs from layer to layer.
UpcomingKv Engine::upcoming_of(int index, int task) const {
    if (index >= num_strands() * num_own_) return {};
    const Strand& strand = strands_[index / num_own_];
    const FetchShare& share = fetch_shares_[index % num_own_];
    const int64_t blocks = strand.end_block - strand.first_block;
    if (blocks == 0 || share.attention < 0) return {};
    const AttentionOp& op = program_[share.attention].attention;
    if (op.window > 0) return {};
    const int64_t tasks = stages_[index].num_tasks;
    const auto until = [&](int64_t t) {
        return static_cast<int32_t>(blocks * (share.before * tasks + (share.after - share.before) * t) / (share.total * tasks));
    };
    const int32_t begin = until(task), end = until(task + 1);
    return {layer(op.layer), fetched_blocks_.data() + strand.first_block + begin, end - begin};
}

std::vector<int32_t> Engine::fetched_blocks(int strand, int layer_index) const {
    std::vector<int32_t> blocks;
    for (int i = strand * num_own_; i < (strand + 1) * num_own_; ++i) {
        for (int task = 0; task < stages_[i].num_tasks; ++task) {
            const UpcomingKv kv = upcoming_of(i, task);
            if (kv.layer.data == layer(layer_index).data) blocks.insert(blocks.end(), kv.blocks, kv.blocks + kv.num_blocks);
        }
    }
    return blocks;
}

}  // namespace penstock
