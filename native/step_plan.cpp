// How a step is divided: its rows into strands, each strand's instructions into stages of tasks.

#include <algorithm>

#include "engine.h"

namespace penstock {

namespace {

constexpr int kRowsOfTile = 4;      // of the widest kernels; only the speed depends on it
constexpr int kTasksPerMember = 6;  // of a stage: the last ones to end leave the others idle for that much less
constexpr int kAttentionTasksPerMember = 8;  // tiles differ more in cost than rows or panels

// Each strand reads all weights. It has as many tokens on average as make up for that if they come from a cache that threads share; else
// a whole block of rows. Strands that begin over the length of a layer need the cache to hold that layer, however many they are.
constexpr int kTokensOfStrand = 8;
constexpr int64_t kCachedLayerBytes = 8 << 20;
constexpr int64_t kAttentionCost = 4;  // a multiply-add of attention takes that many times as long as one of a product

// Pieces of `count` things, about `wanted` of them.
int grain_of(int count, int wanted) { return std::max(1, ceil_div(count, wanted)); }

// Rows of a task of row operations: they are faster on four rows than on one, and on runs of eight or sixteen tokens.
int grain_of_rows(int rows, int members) {
    const int even = grain_of(rows, kTasksPerMember * members);
    if (even >= kRowsTogether) return even / kRowsTogether * kRowsTogether;
    if (even >= kRowsTogether / 2) return kRowsTogether / 2;
    return rows >= 4 * members ? 4 : even;
}

}  // namespace

// What strands are planned by.
void Engine::count_cost(const Instruction& instruction) {
    const bool is_of_tokens = instruction.domain == Domain::kTokens;
    const auto count = [&](int weight) {
        const PackedStorage& w = matrices_[weight];
        const int64_t cost = int64_t{w.matrix.rows} * w.matrix.cols;
        (is_of_tokens ? costs_.of_token : costs_.of_sample) += cost;
        if (!is_of_tokens) return;
        costs_.weight_bytes += w.bytes;
        if (w.matrix.kind != WeightKind::kBf16) costs_.of_fetching += cost;
    };
    for (const LinearOp& op : instruction.linears) count(op.weight);
    if (instruction.kind == InstructionKind::kGated) {
        count(instruction.gated.gate);
        count(instruction.gated.up);
    } else if (instruction.kind == InstructionKind::kAttention) {
        costs_.of_position += 2 * kAttentionCost * instruction.attention.num_heads * shape_.head_dim;
    }
}

bool Engine::layer_fits_cache() const { return costs_.weight_bytes / shape_.num_layers <= kCachedLayerBytes; }

// As many as pay and can be of about equal cost; one strand if several would not.
void Engine::plan_strands() {
    strands_.clear();
    const int most = std::min({team_->size(), Team::kMaxStrands, input_.num_tokens / kTokensOfStrand});
    if (most > 1) add_up_costs();
    for (int wanted = most; wanted > 1 && strands_.empty(); --wanted) {
        if (layer_fits_cache() || input_.num_tokens / wanted >= kRowBlock) divide_tokens(wanted);
    }
    if (strands_.empty()) strands_.push_back({0, input_.num_tokens, 0, input_.num_logits});
}

void Engine::add_up_costs() {
    cost_until_.clear();
    int64_t total = 0;
    int sample = 0;
    for (int row = 0; row < input_.num_rows; ++row) {
        const int begin = input_.query_start_loc[row], end = input_.query_start_loc[row + 1];
        for (int token = begin; token < end; ++token) {
            total += costs_.of_token + costs_.of_position * (input_.context_lens[row] + token - begin + 1);
            for (; sample < input_.num_logits && input_.logit_tokens[sample] == token; ++sample) total += costs_.of_sample;
            cost_until_.push_back(total);
        }
    }
}

// Into strands of about equal cost, which may begin and end within a row; into none if they can't be equal.
void Engine::divide_tokens(int wanted) {
    const int64_t total = cost_until_.back();
    int64_t dearest = 0, before = 0;
    Strand strand{0, 0, 0, 0};
    for (int i = 1; i <= wanted; ++i) {
        const auto share = std::lower_bound(cost_until_.begin(), cost_until_.end(), total * i / wanted) - cost_until_.begin() + 1;
        const int end = (static_cast<int>(share) + kRowsOfTile / 2) / kRowsOfTile * kRowsOfTile;
        strand.first_token = strand.end_token;
        strand.end_token = i == wanted ? input_.num_tokens : std::min(end, input_.num_tokens);
        strand.first_logit = strand.end_logit;
        while (strand.end_logit < input_.num_logits && input_.logit_tokens[strand.end_logit] < strand.end_token) ++strand.end_logit;
        if (strand.first_token == strand.end_token) return strands_.clear();
        dearest = std::max(dearest, cost_until_[strand.end_token - 1] - before);
        before = cost_until_[strand.end_token - 1];
        strands_.push_back(strand);
    }
    if (dearest > total / wanted + total / (4 * wanted)) strands_.clear();
}

// They begin an even share of a layer apart, and join for the logits, whose matrix comes from memory and is then read once. A row that
// goes on in the next strand has its keys and values written first.
Team::Strands Engine::strands_of_run() const {
    const int32_t* const starts = input_.query_start_loc;
    const bool cuts_row = std::any_of(strands_.begin(), strands_.end(), [&](const Strand& strand) {
        return !std::binary_search(starts, starts + input_.num_rows + 1, strand.first_token);
    });
    const int stages_of_layer = static_cast<int>(program_.size()) / shape_.num_layers;
    return {num_strands(), stages_of_layer / num_strands(), cuts_row, static_cast<int>(stages_.size()) - num_strands() * num_own_};
}

// The tiles of a strand's attention, behind those of the ones before.
void Engine::plan_attention(Strand& strand) {
    int heads_per_kv = 1;
    for (const Instruction& instruction : program_) {
        if (instruction.kind == InstructionKind::kAttention) {
            heads_per_kv = instruction.attention.num_heads / shape_.num_kv_heads;
            break;
        }
    }
    strand.tiles = add_tiles(strand, heads_per_kv, false);
    const bool all_sample = strand.end_logit - strand.first_logit == strand.end_token - strand.first_token;
    strand.sample_tiles = all_sample ? strand.tiles : add_tiles(strand, heads_per_kv, true);
}

Engine::TileRange Engine::add_tiles(const Strand& strand, int heads_per_kv, bool of_samples) {
    const int queries = std::max(1, kernels_.attention_queries / heads_per_kv);
    TileRange tiles{static_cast<int32_t>(tiles_.size()), 0, false};
    for (int row = 0; row < input_.num_rows; ++row) {
        const int first = input_.query_start_loc[row];
        const int begin = std::max(first, strand.first_token), end = std::min(input_.query_start_loc[row + 1], strand.end_token);
        if (begin >= end) continue;
        // Neighbours share their keys and values in the cache; a row's last queries, which see the most, come first.
        for (int head = 0; head < shape_.num_kv_heads; ++head) {
            for (int tile = ceil_div(end - begin, queries) - 1; tile >= 0; --tile) {
                const int token = begin + tile * queries;
                add_tile({row, token, input_.context_lens[row] + token - first, std::min(queries, end - token), head}, of_samples);
            }
        }
    }
    if (takers() > 1 && heads_per_kv <= kernels_.attention_queries) split_long_tiles(tiles, heads_per_kv);
    tiles.end = static_cast<int32_t>(tiles_.size());
    return tiles;
}

// `of_samples`: from the first of its queries that samples to the last one, if there is any.
void Engine::add_tile(AttentionTile tile, bool of_samples) {
    if (of_samples) {
        const int32_t* const all_end = input_.logit_tokens + input_.num_logits;
        const int32_t* const begin = std::lower_bound(input_.logit_tokens, all_end, tile.token);
        const int32_t* const end = std::lower_bound(begin, all_end, tile.token + tile.num_queries);
        if (begin == end) return;
        tile.position += *begin - tile.token;
        tile.token = *begin;
        tile.num_queries = end[-1] - *begin + 1;
    }
    tiles_.push_back(tile);
}

// So that no task is more than a quarter of what each of the strand's threads has to do.
void Engine::split_long_tiles(TileRange& tiles, int heads_per_kv) {
    const auto cost_of = [](const AttentionTile& tile) { return int64_t{tile.position + tile.num_queries} * tile.num_queries; };
    const auto first = tiles_.begin() + tiles.first;
    int64_t total = 0, longest = 0;
    for (auto tile = first; tile != tiles_.end(); ++tile) {
        total += cost_of(*tile);
        longest = std::max(longest, cost_of(*tile));
    }
    const int64_t bound = total / (4 * takers()) + 1;
    if (longest <= bound) return;
    tiles.has_splits = true;
    whole_tiles_.assign(first, tiles_.end());
    tiles_.resize(tiles.first);
    for (AttentionTile tile : whole_tiles_) {
        const int num_segments = ceil_div(tile.position + tile.num_queries, kSegment);
        const int num_pieces = std::min(num_segments, static_cast<int>((cost_of(tile) + bound - 1) / bound));
        if (num_pieces < 2) {
            tiles_.push_back(tile);
            continue;
        }
        tile.split = static_cast<int32_t>(splits_.size());
        splits_.push_back({num_partials_, num_pieces, 0});
        num_partials_ += num_segments * kernels_.attention_partial_floats(tile.num_queries * heads_per_kv, shape_.head_dim);
        for (int piece = 0; piece < num_pieces; ++piece) {
            tile.first_segment = num_segments * piece / num_pieces;
            tile.end_segment = num_segments * (piece + 1) / num_pieces;
            tiles_.push_back(tile);
        }
    }
}

Engine::Stage Engine::plan_stage(const Strand& strand, const Instruction& instruction, int members) const {
    const int wanted = kTasksPerMember * members;
    if (instruction.kind == InstructionKind::kAttention) {
        // Pieces of a long tile lie side by side and are dear: each is a task of its own.
        const TileRange& tiles = instruction.attention.of_samples ? strand.sample_tiles : strand.tiles;
        const int count = tiles.end - tiles.first, grain = tiles.has_splits ? 1 : grain_of(count, kAttentionTasksPerMember * members);
        return {ceil_div(count, grain), grain, 1, tiles.first, tiles.end, members};
    }
    const bool of_tokens = instruction.domain == Domain::kTokens;
    const int first = of_tokens ? strand.first_token : strand.first_logit, end = of_tokens ? strand.end_token : strand.end_logit;
    const int rows = end - first;
    if (rows == 0) return {0, 1, 1, first, end, members};
    if (instruction.kind == InstructionKind::kRows) {
        const int grain = grain_of_rows(rows, members);
        return {ceil_div(rows, grain), grain, 1, first, end, members};
    }
    // Whole tiles (a task's last panels would be computed one by one), and rather more tasks than wanted: one task too
    // many for a member is waited for by all.
    const int row_blocks = ceil_div(rows, kRowBlock), tile = kernels_.tile_panels(rows);
    const int block = ceil_div(ceil_div(rows, row_blocks), kRowsOfTile) * kRowsOfTile;  // of equal size, in whole tiles of rows
    const auto panels_of_task = [&](int panels) {
        return std::max(1, panels / std::max(1, wanted / row_blocks) / tile) * tile;
    };
    const auto tasks_of = [&](int weight, int grain) { return ceil_div(matrices_[weight].matrix.panels, grain) * row_blocks; };
    if (instruction.kind == InstructionKind::kGated) {
        const int grain = panels_of_task(matrices_[instruction.gated.gate].matrix.panels);
        return {tasks_of(instruction.gated.gate, grain), grain, row_blocks, first, end, members, block};
    }
    int panels = 0, tasks = 0;
    for (const LinearOp& op : instruction.linears) panels += matrices_[op.weight].matrix.panels;
    const int grain = panels_of_task(panels);
    for (const LinearOp& op : instruction.linears) tasks += tasks_of(op.weight, grain);
    return {tasks, grain, row_blocks, first, end, members, block};
}

void Engine::plan_step() {
    plan_strands();
    tiles_.clear();
    splits_.clear();
    num_partials_ = 0;
    fetched_blocks_.clear();
    for (Strand& strand : strands_) {
        plan_attention(strand);
        plan_fetching(strand);
    }
    if (static_cast<int64_t>(partials_.size()) < num_partials_) partials_.resize(num_partials_);
    stages_.clear();
    num_tasks_.clear();
    for (const Strand& strand : strands_) {
        for (int i = 0; i < num_own_; ++i) stages_.push_back(plan_stage(strand, program_[i], takers()));
    }
    const Strand all{0, input_.num_tokens, 0, input_.num_logits};
    for (size_t i = num_own_; i < program_.size(); ++i) stages_.push_back(plan_stage(all, program_[i], team_->size()));
    if (input_.tokens) stages_.push_back({input_.num_logits, 1, 1, 0, input_.num_logits, team_->size()});
    for (const Stage& stage : stages_) num_tasks_.push_back(stage.num_tasks);
}

}  // namespace penstock
