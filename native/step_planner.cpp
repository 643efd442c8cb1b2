#include "step_planner.h"

#include <cmath>

namespace penstock {

namespace {

constexpr int kRowsOfTile = 4;      // strands and tasks are cut at multiples of it, for speed only
constexpr int kTasksPerMember = 6;  // of a stage: smaller tasks leave members idle for less at its end
constexpr int kTasksOfOneRow = 2;   // of a product with one row, which reads memory faster in long runs
constexpr int kAttentionTasksPerMember = 8;  // tiles differ more in cost than rows or panels
constexpr int kEagerMembers = 8;       // have so many tasks each; of larger teams the others have fewer,
constexpr int kTasksOfFurther = 2;     // since all take them from one counter, one after the other

// Each strand reads all weights. So it needs enough tokens on average: `strand_tokens` if weights come from a cache that threads share,
// which must hold a layer, since strands begin spread over one; else so many that reading counts for little.
constexpr int kTokensOfWideStrand = 96;
constexpr int64_t kCachedLayerBytes = 8 << 20;
constexpr int kFewestTokens = 12;      // of a one-strand step whose products prefetch: with fewer they are bound by memory themselves
constexpr int64_t kMostPartials = 16 << 20;  // floats, a quarter of the memory that is reserved for steps
constexpr int64_t kAttentionCost = 4;  // a multiply-add of attention takes that many times as long as a product's

// What decides how many members take part in a step, in nanoseconds; docs/kernels.md, "Many threads", says why. Two always do.
constexpr double kNsPerByte = 1.0 / 15;          // of weights, for one thread that reads them from memory
constexpr double kNsPerMultiplyAdd = 1.0 / 200;  // for one thread
constexpr double kMeetingNs = 100;               // of a stage, for each member that shares it
constexpr int kFewestMembers = 2;

// Tasks of a stage for so many members.
int tasks_for(int members, int each) {
    return each * std::min(members, kEagerMembers) + kTasksOfFurther * std::max(0, members - kEagerMembers);
}

// Pieces of `count` things, about `wanted` of them.
int grain_of(int count, int wanted) { return std::max(1, ceil_div(count, wanted)); }

// Rows of a task of row operations: they are faster on four rows than on one, and on runs of eight or sixteen tokens.
int grain_of_rows(int rows, int members) {
    const int even = grain_of(rows, tasks_for(members, kTasksPerMember));
    if (even >= kRowsOfRowOp) return even / kRowsOfRowOp * kRowsOfRowOp;
    if (even >= kRowsOfRowOp / 2) return kRowsOfRowOp / 2;
    return rows >= 4 * members ? 4 : even;
}

}  // namespace

StepPlanner::StepPlanner(const EngineShape& shape, const KernelTable& kernels, const std::vector<Instruction>& program, const Weights& weights,
                         const KvCache& kv, int team_size)
    : shape_(shape),
      kernels_(kernels),
      program_(program),
      weights_(weights),
      team_size_(team_size),
      fetching_(shape, kv),
      num_members_(team_size) {}

void StepPlanner::count_last_instruction() {
    const Instruction& instruction = program_.back();
    tiling_of_.push_back(0);
    const bool is_of_tokens = instruction.domain == Domain::kTokens;
    int64_t fetching = 0;  // multiply-adds per token of products that prefetch keys and values: not float ones
    const auto count = [&](int weight) {
        const PackedStorage& w = weights_.packed(weight);
        const int64_t cost = int64_t{w.matrix.rows} * w.matrix.cols;
        (is_of_tokens ? costs_.of_token : costs_.of_sample) += cost;
        (is_of_tokens ? costs_.weight_bytes : costs_.sample_weight_bytes) += w.bytes;
        if (!is_of_tokens) return;
        if (!kernels_.reads_bf16(w.matrix) && w.matrix.kind != WeightKind::kU8Row) fetching += cost;
    };
    for (const RowOp& op : instruction.rows) num_states_ += op.kind == RowOpKind::kKeepState;
    num_states_ += instruction.kind == InstructionKind::kLinearAttention;
    has_state_ = has_state_ || num_states_ > 0 || instruction.kind == InstructionKind::kCausalConv;
    is_one_pass_ = is_one_pass_ || instruction.kind == InstructionKind::kTextAttention;
    num_attentions_ += instruction.kind == InstructionKind::kAttention || instruction.kind == InstructionKind::kTextAttention;
    for (const LinearOp& op : instruction.linears) count(op.weight);
    if (instruction.kind == InstructionKind::kGated) {
        count(instruction.gated.gate);
        count(instruction.gated.up);
    } else if (instruction.kind == InstructionKind::kAttention) {
        const AttentionOp& op = instruction.attention;
        const KvShape& kv = shape_.kv_shapes[op.layer];
        (is_of_tokens ? costs_.of_position : costs_.of_sample_position) += 2 * kAttentionCost * op.num_heads * kv.head_dim;
        num_gathered_attentions_ += !is_of_tokens;
        const Queries queries = !is_of_tokens ? Queries::kGathered : op.of_samples ? Queries::kSamples : Queries::kAll;
        const Tiling tiling{op.num_heads / kv.num_kv_heads, kv.num_kv_heads, kv.num_latent ? kv.num_latent : kv.head_dim, queries};
        const auto found = std::find(tilings_.begin(), tilings_.end(), tiling);
        tiling_of_.back() = static_cast<int32_t>(found - tilings_.begin());
        if (found == tilings_.end()) tilings_.push_back(tiling);
    } else if (instruction.kind == InstructionKind::kTextAttention) {
        costs_.of_position += 2 * kAttentionCost * instruction.text_attention.num_heads * instruction.text_attention.head_dim;
    } else if (instruction.kind == InstructionKind::kLinearAttention) {
        const LinearAttentionOp& op = instruction.linear_attention;
        costs_.of_token += 4 * kAttentionCost * op.num_heads * op.key_dim * op.value_dim;
    }
    if (instruction.kind == InstructionKind::kExperts) {
        has_experts_ = true;
        const ExpertsOp& op = instruction.experts;
        if (op.part == ExpertsPart::kInner) costs_.weight_bytes += weights_.packed(op.layer.inner).bytes + weights_.packed(op.layer.outer).bytes;
    }
    fetching_.add_instruction(instruction, fetching);
    num_own_ = static_cast<int>(program_.size());
}

const StepPlan& StepPlanner::plan(const StepInput& input) {
    input_ = input;
    add_up_costs();
    plan_strands();
    num_members_ = uses_all_members_ ? team_size_ : members_that_pay();
    plan_.attention_tiles.clear();
    plan_.tiles.clear();
    plan_.splits.clear();
    plan_.num_partials = 0;
    fetching_.begin_step();
    for (Strand& strand : plan_.strands) {
        plan_attention(strand);
        plan_fetching(strand);
    }
    plan_stages();
    return plan_;
}

size_t StepPlanner::instruction_of(int stage) const {
    return is_joint(stage) ? stage - num_strands() * num_own_ + num_own_ : stage % num_own_;
}

Fetching::Share StepPlanner::fetched_by(int stage, int task) const {
    if (is_joint(stage)) return {};
    return fetching_.share(plan_.strands[stage / num_own_].blocks, stage % num_own_, task, plan_.stages[stage].num_tasks);
}

bool StepPlanner::layer_fits_cache() const { return costs_.weight_bytes / num_token_layers() <= kCachedLayerBytes; }

// As many strands as pay and can have about equal costs; else one. Programs with experts have one strand: two with half the rows each
// would read nearly all experts twice.
void StepPlanner::plan_strands() {
    plan_.strands.clear();
    const int most = has_experts_ ? 1 : std::min({team_size_, Team::kMaxStrands, input_.num_tokens / kernels_.strand_tokens});
    for (int wanted = most; wanted > 1 && plan_.strands.empty(); --wanted) {
        if (layer_fits_cache() || input_.num_tokens / wanted >= kTokensOfWideStrand) divide_tokens(wanted);
    }
    if (plan_.strands.empty()) plan_.strands.push_back({0, input_.num_tokens, 0, input_.num_logits});
}

// More members divide the work, but each one makes every stage's synchronisation longer. The total is least where both are equal; beyond
// that every further thread makes the step longer.
int StepPlanner::members_that_pay() const {
    const auto bytes = static_cast<double>(costs_.weight_bytes * num_strands() + (input_.num_logits > 0 ? costs_.sample_weight_bytes : 0));
    const double work_ns = bytes * kNsPerByte + static_cast<double>(cost_until_.back()) * kNsPerMultiplyAdd;
    const double most = std::sqrt(work_ns * num_strands() / (std::max(1, num_own_) * kMeetingNs));
    return std::min(team_size_, std::max({kFewestMembers, num_strands(), static_cast<int>(std::min<double>(most, team_size_))}));
}

void StepPlanner::add_up_costs() {
    cost_until_.clear();
    int64_t total = 0;
    int sample = 0;
    for (int row = 0; row < input_.num_rows; ++row) {
        const int begin = input_.query_start_loc[row], end = input_.query_start_loc[row + 1];
        for (int token = begin; token < end; ++token) {
            const int seen = is_one_pass_ ? end - begin : input_.context_lens[row] + token - begin + 1;
            total += costs_.of_token + costs_.of_position * seen;
            for (; sample < input_.num_logits && input_.logit_tokens[sample] == token; ++sample) {
                total += costs_.of_sample + costs_.of_sample_position * seen;
            }
            cost_until_.push_back(total);
        }
    }
}

// Where a strand ends whose share of the cost ends at this token: after a whole tile of rows, which may be within a row of the step.
// Only at a row's end in programs with a state, since tokens need the state before them (short_conv.h, recurrence.h), and in texts, whose
// tokens see each other.
int StepPlanner::end_of_strand(int64_t token) const {
    const int end = (static_cast<int>(token) + kRowsOfTile / 2) / kRowsOfTile * kRowsOfTile;
    if ((!has_state_ && !is_one_pass_) || end >= input_.num_tokens) return std::min(end, input_.num_tokens);
    const int32_t* const after = std::upper_bound(input_.query_start_loc, input_.query_start_loc + input_.num_rows, end);
    return *after - end < end - after[-1] ? *after : after[-1];
}

// Makes strands of about equal cost, which may begin and end within a row; none if that is impossible.
void StepPlanner::divide_tokens(int wanted) {
    const int64_t total = cost_until_.back();
    int64_t dearest = 0, before = 0;
    Strand strand{0, 0, 0, 0};
    for (int i = 1; i <= wanted; ++i) {
        const auto share = std::lower_bound(cost_until_.begin(), cost_until_.end(), total * i / wanted) - cost_until_.begin() + 1;
        strand.first_token = strand.end_token;
        strand.end_token = i == wanted ? input_.num_tokens : std::max(strand.first_token, end_of_strand(share));
        strand.first_logit = strand.end_logit;
        while (strand.end_logit < input_.num_logits && input_.logit_tokens[strand.end_logit] < strand.end_token) ++strand.end_logit;
        if (strand.first_token == strand.end_token) return plan_.strands.clear();
        dearest = std::max(dearest, cost_until_[strand.end_token - 1] - before);
        before = cost_until_[strand.end_token - 1];
        plan_.strands.push_back(strand);
    }
    if (dearest > total / wanted + total / (4 * wanted)) plan_.strands.clear();
}

// Strands begin an even share of a layer apart, and join for the logits, whose matrix is then read from memory once. They are ordered
// if a row goes on in the next strand, which reads its keys and values.
Team::Strands StepPlanner::strands_of_run() const {
    const int32_t* const starts = input_.query_start_loc;
    const bool cuts_row = std::any_of(plan_.strands.begin(), plan_.strands.end(), [&](const Strand& strand) {
        return !std::binary_search(starts, starts + input_.num_rows + 1, strand.first_token);
    });
    const int stages_of_layer = static_cast<int>(program_.size()) / num_layers();
    const int num_joint = static_cast<int>(plan_.stages.size()) - num_strands() * num_own_;
    return {num_strands(), stages_of_layer / num_strands(), cuts_row, num_joint, num_members_};
}

// The tiles of a strand's attention, behind those of the ones before.
void StepPlanner::plan_attention(Strand& strand) {
    strand.first_tiles = static_cast<int32_t>(plan_.attention_tiles.size());
    if (is_one_pass_) {
        plan_.attention_tiles.push_back(add_text_tiles(strand));
        return;
    }
    const bool all_sample = strand.end_logit - strand.first_logit == strand.end_token - strand.first_token;
    for (size_t i = 0; i < tilings_.size(); ++i) {
        Tiling tiling = tilings_[i];
        if (all_sample && tiling.queries == Queries::kSamples) tiling.queries = Queries::kAll;
        const size_t same = std::find(tilings_.begin(), tilings_.begin() + i, tiling) - tilings_.begin();
        plan_.attention_tiles.push_back(same < i ? plan_.attention_tiles[strand.first_tiles + same] : add_tiles(strand, tiling));
    }
}

TileRange StepPlanner::add_tiles(const Strand& strand, const Tiling& tiling) {
    TileRange tiles{static_cast<int32_t>(plan_.tiles.size()), 0, false};
    tiling.queries == Queries::kGathered ? add_tiles_of_gathered(strand, tiling) : add_tiles_of_tokens(strand, tiling);
    if (members_per_strand() > 1) split_long_tiles(tiles, tiling);
    tiles.end = static_cast<int32_t>(plan_.tiles.size());
    return tiles;
}

void StepPlanner::add_tiles_of_tokens(const Strand& strand, const Tiling& tiling) {
    for (int row = 0; row < input_.num_rows; ++row) {
        const int first = input_.query_start_loc[row];
        const int begin = std::max(first, strand.first_token), end = std::min(input_.query_start_loc[row + 1], strand.end_token);
        if (begin < end) add_tiles_of_run({row, begin, input_.context_lens[row] + begin - first, end - begin, 0, 0}, tiling);
    }
}

// A run is of samples that are neighbours in their row.
void StepPlanner::add_tiles_of_gathered(const Strand& strand, const Tiling& tiling) {
    for (int begin = strand.first_logit, end = begin; begin < strand.end_logit; begin = end) {
        const int token = input_.logit_tokens[begin], row = input_.row_of(token), first = input_.query_start_loc[row];
        const int row_end = input_.query_start_loc[row + 1];
        do ++end;
        while (end < strand.end_logit && input_.logit_tokens[end] == token + end - begin && input_.logit_tokens[end] < row_end);
        add_tiles_of_run({row, begin, input_.context_lens[row] + token - first, end - begin, 0, 0}, tiling);
    }
}

// All heads of a run: queries that are neighbours in the step's row and in the buffer.
void StepPlanner::add_tiles_of_run(AttentionTile run, const Tiling& tiling) {
    // More heads than a task has pairs, as those of a latent may be, are shared out evenly.
    const int heads = ceil_div(tiling.heads_per_kv, ceil_div(tiling.heads_per_kv, kernels_.attention_pairs));
    const int queries = kernels_.attention_pairs / heads;
    // Neighbours share their keys and values in the cache; a row's last queries, which see the most, come first.
    for (int head = 0; head < tiling.num_kv_heads * tiling.heads_per_kv;) {
        const int num_heads = std::min(heads, tiling.heads_per_kv - head % tiling.heads_per_kv);
        for (int tile = ceil_div(run.num_queries, queries) - 1; tile >= 0; --tile) {
            const int at = tile * queries, count = std::min(queries, run.num_queries - at);
            add_tile({run.row, run.token + at, run.position + at, count, head, num_heads}, tiling.queries == Queries::kSamples);
        }
        head += num_heads;
    }
}

TileRange StepPlanner::add_text_tiles(const Strand& strand) {
    const auto first_tile = static_cast<int32_t>(plan_.tiles.size());
    const int32_t* const starts = input_.query_start_loc;
    for (int row = input_.row_of(strand.first_token); row < input_.num_rows && starts[row] < strand.end_token; ++row) {
        for (int token = starts[row]; token < starts[row + 1]; token += kTextQueries) {
            plan_.tiles.push_back({row, token, token - starts[row], std::min(kTextQueries, starts[row + 1] - token), 0, 0});
        }
    }
    return {first_tile, static_cast<int32_t>(plan_.tiles.size()), false};
}

// `of_samples`: from the first of its queries that samples to the last one, if there is any.
void StepPlanner::add_tile(AttentionTile tile, bool of_samples) {
    if (of_samples) {
        const int32_t* const all_end = input_.logit_tokens + input_.num_logits;
        const int32_t* const begin = std::lower_bound(input_.logit_tokens, all_end, tile.token);
        const int32_t* const end = std::lower_bound(begin, all_end, tile.token + tile.num_queries);
        if (begin == end) return;
        tile.position += *begin - tile.token;
        tile.token = *begin;
        tile.num_queries = end[-1] - *begin + 1;
    }
    plan_.tiles.push_back(tile);
}

// Splits tiles until none exceeds a quarter of the work of one of the strand's threads. If there is a tile for each of them, only until
// partial results exceed their share of the memory that is reserved for steps. Results do not depend on it.
void StepPlanner::split_long_tiles(TileRange& tiles, const Tiling& tiling) {
    const auto cost_of = [](const AttentionTile& tile) { return int64_t{tile.position + tile.num_queries} * tile.num_queries; };
    const auto first = plan_.tiles.begin() + tiles.first;
    int64_t total = 0, longest = 0;
    for (auto tile = first; tile != plan_.tiles.end(); ++tile) {
        total += cost_of(*tile);
        longest = std::max(longest, cost_of(*tile));
    }
    const int64_t bound = total / (4 * members_per_strand()) + 1;
    if (longest <= bound) return;
    tiles.has_splits = true;
    whole_tiles_.assign(first, plan_.tiles.end());
    plan_.tiles.resize(tiles.first);
    for (AttentionTile tile : whole_tiles_) {
        const int num_segments = ceil_div(tile.position + tile.num_queries, kSegment);
        const int num_pieces = std::min(num_segments, static_cast<int>((cost_of(tile) + bound - 1) / bound));
        const int64_t partials = num_segments * kernels_.attention_partial_floats(tile.num_queries * tile.num_heads, tiling.value_dim);
        const bool is_bounded = static_cast<int>(whole_tiles_.size()) >= members_per_strand();
        if (num_pieces < 2 || (is_bounded && plan_.num_partials + partials > kMostPartials)) {
            plan_.tiles.push_back(tile);
            continue;
        }
        tile.split = static_cast<int32_t>(plan_.splits.size());
        plan_.splits.push_back({plan_.num_partials, num_pieces});
        plan_.num_partials += partials;
        for (int piece = 0; piece < num_pieces; ++piece) {
            tile.first_segment = num_segments * piece / num_pieces;
            tile.end_segment = num_segments * (piece + 1) / num_pieces;
            plan_.tiles.push_back(tile);
        }
    }
}

// No prefetching if threads share a strand: any of them may read a block; or if a layer's weights exceed the cache and would evict
// what was fetched.
void StepPlanner::plan_fetching(Strand& strand) {
    strand.blocks = {};
    if (members_per_strand() > 1 || !layer_fits_cache()) return;
    if (num_strands() == 1 && strand.end_token - strand.first_token < kFewestTokens) return;
    strand.blocks = fetching_.plan(input_, strand.first_token, strand.end_token);
}

Stage StepPlanner::plan_stage(const Strand& strand, size_t index, int members) const {
    const Instruction& instruction = program_[index];
    if (instruction.kind == InstructionKind::kAttention) {
        // Pieces of a long tile lie side by side and are dear: each is a task of its own.
        const TileRange& tiles = plan_.attention_tiles[strand.first_tiles + tiling_of_[index]];
        const int count = tiles.end - tiles.first, grain = tiles.has_splits ? 1 : grain_of(count, tasks_for(members, kAttentionTasksPerMember));
        return {ceil_div(count, grain), grain, 1, tiles.first, tiles.end, members};
    }
    if (instruction.kind == InstructionKind::kTextAttention) {
        const TileRange& tiles = plan_.attention_tiles[strand.first_tiles];
        const int count = (tiles.end - tiles.first) * instruction.text_attention.num_kv_heads;
        const int grain = grain_of(count, tasks_for(members, kAttentionTasksPerMember));
        return {ceil_div(count, grain), grain, 1, tiles.first, tiles.end, members};
    }
    if (instruction.kind == InstructionKind::kCausalConv) {
        return plan_recurrence(strand, ceil_div(instruction.conv.width, shape_.state_line), members);
    }
    if (instruction.kind == InstructionKind::kLinearAttention) {
        const LinearAttentionOp& op = instruction.linear_attention;
        return plan_recurrence(strand, op.num_heads * ceil_div(op.value_dim, shape_.state_line), members);
    }
    const bool of_tokens = instruction.domain == Domain::kTokens;
    const int first = of_tokens ? strand.first_token : strand.first_logit, end = of_tokens ? strand.end_token : strand.end_logit;
    const int rows = end - first;
    if (rows == 0) return {0, 1, 1, first, end, members};
    if (instruction.kind == InstructionKind::kRows) {
        const int grain = grain_of_rows(rows, members);
        return {ceil_div(rows, grain), grain, 1, first, end, members};
    }
    if (instruction.kind == InstructionKind::kExperts) return plan_experts(instruction.experts, first, end, members);
    return plan_product(instruction, first, end, members);
}

// `first` and `end` are rows of the step, which no strand cuts.
Stage StepPlanner::plan_recurrence(const Strand& strand, int panels, int members) const {
    const int first = input_.row_of(strand.first_token), end = input_.row_of(strand.end_token - 1) + 1;
    const int count = (end - first) * panels, grain = grain_of(count, tasks_for(members, kAttentionTasksPerMember));
    return {ceil_div(count, grain), grain, 1, first, end, members};
}

// The experts are not chosen yet: a product has enough tasks to share the panels of any choice.
Stage StepPlanner::plan_experts(const ExpertsOp& op, int first, int end, int members) const {
    const ExpertsLayer& layer = op.layer;
    const int rows = end - first, pairs = rows * layer.num_chosen, wanted = tasks_for(members, kTasksPerMember);
    switch (op.part) {
        case ExpertsPart::kScore: {
            const int pieces = rows * ceil_div(layer.num_experts, kExpertsTogether), grain = grain_of(pieces, wanted);
            return {ceil_div(pieces, grain), grain, 1, first, end, members};
        }
        case ExpertsPart::kInner:
        case ExpertsPart::kOuter: {
            const int panels = weights_.matrix(op.part == ExpertsPart::kInner ? layer.inner : layer.outer).panels / layer.num_experts;
            return {static_cast<int>(std::min(int64_t{pairs} * panels, int64_t{wanted})), 1, 1, first, end, members};
        }
        default: {
            const int grain = grain_of_rows(pairs, members);
            return {ceil_div(pairs, grain), grain, 1, first, end, members};
        }
    }
}

bool StepPlanner::has_row8(const Instruction& instruction) const {
    return !instruction.linears.empty() && weights_.matrix(instruction.linears[0].weight).kind == WeightKind::kU8Row;
}

Stage StepPlanner::plan_product(const Instruction& instruction, int first, int end, int members) const {
    const int rows = end - first, wanted = tasks_for(members, rows == 1 ? kTasksOfOneRow : kTasksPerMember);
    // Whole tiles (a task's last panels would take longer), and rather more tasks than wanted: one task too many for a member is
    // waited for by all.
    const int tile = has_row8(instruction) ? kernels_.row8_panels : kernels_.tile_panels(rows);
    const bool is_gated = instruction.kind == InstructionKind::kGated;
    int panels = is_gated ? weights_.matrix(instruction.gated.gate).panels : 0;
    for (const LinearOp& op : instruction.linears) panels += weights_.matrix(op.weight).panels;
    const int weight = is_gated ? instruction.gated.gate : instruction.linears[0].weight;
    const int row_blocks = ceil_div(rows, kernels_.task_rows(weights_.matrix(weight).cols));
    const int grain = std::max(1, panels / std::max(1, wanted / row_blocks) / tile) * tile;
    int column_tasks = is_gated ? ceil_div(panels, grain) : 0;
    for (const LinearOp& op : instruction.linears) column_tasks += ceil_div(weights_.matrix(op.weight).panels, grain);
    const int block = kRowsOfTile * tiles_of_task(ceil_div(ceil_div(rows, row_blocks), kRowsOfTile), column_tasks * row_blocks, members);
    const int num_blocks = ceil_div(rows, block);
    return {column_tasks * num_blocks, grain, num_blocks, first, end, members, block};
}

// Returns the tiles of a task's rows: all of a block's if there are enough tasks. If many members share few panels, tasks have fewer rows,
// so that the last one ends earliest; each block of rows then reads the panels again, from a cache that members share. Not with kernels
// that widen weights for all rows of a task: each block would do so again.
int StepPlanner::tiles_of_task(int tiles, int tasks, int members) const {
    if (members <= kFewestMembers || kernels_.has_tiles) return tiles;
    const auto time_of = [&](int each) { return ceil_div(tasks * ceil_div(tiles, each), members) * each; };
    int best = tiles;
    for (int pieces = 2; pieces <= tiles && tasks * pieces <= tasks_for(members, kTasksPerMember); ++pieces) {
        const int each = ceil_div(tiles, pieces);
        if (time_of(each) < time_of(best)) best = each;
    }
    return best;
}

void StepPlanner::plan_stages() {
    plan_.stages.clear();
    plan_.num_tasks.clear();
    for (const Strand& strand : plan_.strands) {
        for (int i = 0; i < num_own_; ++i) plan_.stages.push_back(plan_stage(strand, i, members_per_strand()));
    }
    const Strand all{0, input_.num_tokens, 0, input_.num_logits};
    for (size_t i = num_own_; i < program_.size(); ++i) plan_.stages.push_back(plan_stage(all, i, num_members_));
    if (input_.tokens) plan_.stages.push_back({input_.num_logits, 1, 1, 0, input_.num_logits, num_members_});  // the draw
    for (const Stage& stage : plan_.stages) plan_.num_tasks.push_back(stage.num_tasks);
}

}  // namespace penstock
