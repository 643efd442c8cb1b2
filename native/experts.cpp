#include "experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <compare>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace penstock {

namespace {

constexpr int kRowsOfFetch = 8;  // multiplying a panel of weights with fewer rows takes no less time: it waits for memory

float* floats_of(const Memory& memory) { return reinterpret_cast<float*>(memory.get()); }

// Rows of one expert in a matrix of all, whole panels.
int rows_of_each(const PackedMatrix& all, int num_experts) { return all.rows / num_experts; }

// Larger scores first, and numbers before NaN.
bool is_before(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

// The experts of the largest scores plus bias, by rank; of equal ones the first comes first.
void choose_largest(const float* scores, const float* bias, int num_experts, int32_t* chosen, int num_chosen) {
    const auto wanted = [&](int expert) { return bias ? scores[expert] + bias[expert] : scores[expert]; };
    for (int expert = 0, count = 0; expert < num_experts; ++expert) {
        if (count == num_chosen && !is_before(wanted(expert), wanted(chosen[count - 1]))) continue;
        if (count < num_chosen) ++count;
        int rank = count - 1;
        for (; rank > 0 && is_before(wanted(expert), wanted(chosen[rank - 1])); --rank) chosen[rank] = chosen[rank - 1];
        chosen[rank] = expert;
    }
}

// Scores of groups that are not chosen become the smallest.
void choose_groups(float* scores, const float* bias, const ExpertsLayer& layer) {
    const int size = layer.num_experts / layer.num_groups;
    float sums[kMostGroups];
    int32_t best[kMostGroups];
    for (int group = 0; group < layer.num_groups; ++group) {
        float largest[kMostGroupScores];
        std::fill_n(largest, layer.num_group_scores, -INFINITY);
        for (int i = group * size; i < (group + 1) * size; ++i) {
            float wanted = bias ? scores[i] + bias[i] : scores[i];
            for (int rank = 0; rank < layer.num_group_scores; ++rank) {
                if (!is_before(largest[rank], wanted)) std::swap(largest[rank], wanted);
            }
        }
        sums[group] = std::accumulate(largest, largest + layer.num_group_scores, 0.0f);
    }
    choose_largest(sums, nullptr, layer.num_groups, best, layer.num_groups);
    for (int rank = layer.num_chosen_groups; rank < layer.num_groups; ++rank) std::fill_n(scores + best[rank] * size, size, -INFINITY);
}

// Row `from` of x becomes row `to` of `out`.
void copy_row(const Activation& out, int64_t to, const Activation& x, int64_t from) {
    const auto copy = [&](auto* target, const auto* source, int64_t count) {
        std::memcpy(target + to * count, source + from * count, static_cast<size_t>(count) * sizeof(*target));
    };
    if (x.bf16) return copy(out.bf16, x.bf16, x.bf16_stride);
    const int64_t groups = x.cols / kGroup;
    copy(out.q, x.q, x.cols);
    copy(out.lift, x.lift, groups);
    copy(out.start, x.start, groups);
    copy(out.sum, x.sum, (groups + 1) & ~int64_t{1});
    copy(out.outlier, x.outlier, x.outliers_per_row);
    copy(out.outlier_rest, x.outlier_rest, x.outliers_per_row);
}

// The work of a product: in the order of experts, those with rows, and of each its panels. Shares of it are whole tiles of panels.
class Panels {
  public:
    struct Place {
        int expert, panel;
        auto operator<=>(const Place&) const = default;
    };

    Panels(const std::vector<int32_t>& ends, int panels, const KernelTable& kernels) : ends_(ends), panels_(panels), kernels_(kernels) {
        for (int expert = 0; expert < num_experts(); ++expert) total_ += panels_ * cost(expert);
    }

    int num_experts() const { return static_cast<int>(ends_.size()); }
    int first_row(int expert) const { return expert == 0 ? 0 : ends_[expert - 1]; }
    int end_row(int expert) const { return ends_[expert]; }

    int next_with_rows(int expert) const {
        do ++expert;
        while (expert < num_experts() && first_row(expert) == end_row(expert));
        return expert;
    }

    // Where task `task` of `num_tasks` begins; that of the last one's successor is the end.
    Place begin_of(int task, int num_tasks) const {
        int64_t before = total_ * task / num_tasks;
        for (int expert = 0; expert < num_experts(); ++expert) {
            const int64_t of_panel = cost(expert), own = panels_ * of_panel;
            if (before < own) {
                const int tile = kernels_.tile_panels(end_row(expert) - first_row(expert));
                return {expert, static_cast<int>(before / of_panel) / tile * tile};
            }
            before -= own;
        }
        return {num_experts(), 0};
    }

  private:
    int64_t cost(int expert) const {
        const int rows = end_row(expert) - first_row(expert);
        return rows == 0 ? 0 : std::max(rows, kRowsOfFetch);
    }

    const std::vector<int32_t>& ends_;
    int panels_;
    const KernelTable& kernels_;
    int64_t total_ = 0;
};

}  // namespace

Experts::Experts(const KernelTable& kernels, const Weights& weights, int num_members)
    : kernels_(kernels), weights_(weights), scratch_(num_members) {}

int Experts::add(const ExpertsLayer& layer, int64_t most_rows) {
    const bool fits_groups = layer.num_groups <= kMostGroups && layer.num_group_scores >= 1 && layer.num_group_scores <= kMostGroupScores;
    if (layer.num_groups < 0 || !fits_groups || (layer.num_groups > 0 && layer.num_experts % layer.num_groups != 0)) {
        throw std::invalid_argument("experts must be in equal groups, at most 64, and a group is chosen by its 1 to 8 largest scores");
    }
    const auto other = std::find_if(layers_.begin(), layers_.end(), [&](const Layer& l) { return fits(l, layer, most_rows); });
    if (other == layers_.end()) workspaces_.push_back(make_workspace(layer, most_rows));
    layers_.push_back({layer, other == layers_.end() ? workspaces_.back().get() : other->work});
    for (Scratch& scratch : scratch_) {
        for (auto* counts : {&scratch.places, &scratch.counts}) counts->resize(std::max(counts->size(), static_cast<size_t>(layer.num_experts)));
        scratch.activated.resize(std::max(scratch.activated.size(), static_cast<size_t>(kRowsOfRowOp) * layer.width));
    }
    return static_cast<int>(layers_.size()) - 1;
}

bool Experts::fits(const Layer& other, const ExpertsLayer& layer, int64_t most_rows) const {
    const auto shape = [this](const ExpertsLayer& l) {
        const PackedMatrix &inner = weights_.matrix(l.inner), &outer = weights_.matrix(l.outer);
        return std::array{l.num_experts, l.num_chosen, inner.rows, inner.cols, outer.rows, outer.cols, int{is_quantised(l.inner)},
                          int{is_quantised(l.outer)}};
    };
    return other.work->most_rows >= most_rows && shape(other.shape) == shape(layer);
}

std::unique_ptr<Experts::Workspace> Experts::make_workspace(const ExpertsLayer& layer, int64_t most_rows) const {
    const PackedMatrix &inner = weights_.matrix(layer.inner), &outer = weights_.matrix(layer.outer);
    const int64_t pairs = most_rows * layer.num_chosen;
    auto work = std::make_unique<Workspace>();
    const auto allocate = [&](int64_t count) {
        const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
        work->bytes += bytes;
        return allocate_aligned(bytes, false);
    };
    const auto resize = [&](auto& numbers, int64_t count) {
        work->bytes += count * static_cast<int64_t>(sizeof(numbers[0]));
        numbers.resize(count);
    };
    work->most_rows = most_rows;
    work->scores = allocate(most_rows * layer.num_experts);
    resize(work->chosen, pairs);
    resize(work->shares, pairs);
    resize(work->places, pairs);
    resize(work->ends, layer.num_experts);
    work->gathered = OwnedActivation(pairs, inner.cols, is_quantised(layer.inner));
    work->activated = OwnedActivation(pairs, outer.cols, is_quantised(layer.outer));
    work->inner = allocate(pairs * rows_of_each(inner, layer.num_experts));
    work->outer = allocate(pairs * rows_of_each(outer, layer.num_experts));
    work->bytes += work->gathered.bytes + work->activated.bytes;
    return work;
}

int64_t Experts::bytes() const {
    const auto plus = [](int64_t sum, const auto& work) { return sum + work->bytes; };
    return std::accumulate(workspaces_.begin(), workspaces_.end(), int64_t{0}, plus);
}

void Experts::run(const ExpertsOp& op, const float* x, const Activation& input, const Stage& stage, int task, int member) {
    const Layer& layer = layers_[op.id];
    const auto& [shape, work] = layer;
    switch (op.part) {
        case ExpertsPart::kScore: return score(layer, stage, task, x);
        case ExpertsPart::kGather: return gather(layer, stage, task, input, scratch_[member]);
        case ExpertsPart::kInner:
            for (const int matrix : {shape.inner, shape.outer}) fetch(layer, matrix, stage, task);
            return multiply(layer, shape.inner, shape.inner_bias, work->gathered.view, floats_of(work->inner), stage, task);
        case ExpertsPart::kActivate: return activate(layer, stage, task, scratch_[member]);
        case ExpertsPart::kOuter:
            return multiply(layer, shape.outer, shape.outer_bias, work->activated.view, floats_of(work->outer), stage, task);
    }
}

void Experts::score(const Layer& layer, const Stage& stage, int task, const float* x) const {
    const auto& [shape, work] = layer;
    const float *router = weights_.vector(shape.router), *bias = weights_.vector(shape.router_bias);
    const int hidden = weights_.matrix(shape.inner).cols, slices = ceil_div(shape.num_experts, kExpertsTogether);
    const int begin = task * stage.grain, end = std::min(begin + stage.grain, (stage.end - stage.first) * slices);
    for (int i = begin; i < end; ++i) {
        const int64_t row = stage.first + i / slices, first = i % slices * kExpertsTogether;
        const int count = std::min(kExpertsTogether, shape.num_experts - static_cast<int>(first));
        float* const scores = floats_of(work->scores) + row * shape.num_experts + first;
        kernels_.dot_rows(scores, x + row * hidden, router + first * hidden, count, hidden);
        for (int j = 0; bias && j < count; ++j) scores[j] += bias[first + j];
    }
}

void Experts::choose(int id, int64_t row) {
    const auto& [shape, work] = layers_[id];
    const int num_experts = shape.num_experts, num_chosen = shape.num_chosen;
    float* const scores = floats_of(work->scores) + row * num_experts;
    const float* const bias = weights_.vector(shape.selection_bias);
    // A softmax may round what the router tells apart to one number: without a bias, what it is of decides.
    const bool decides_before = !shape.is_sigmoid && !bias;
    float largest = -INFINITY, total = 0.0f;
    for (int i = 0; i < num_experts; ++i) largest = std::max(largest, scores[i]);
    if (shape.is_sigmoid) {
        for (int i = 0; i < num_experts; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
    } else if (bias || !shape.is_renormalised) {
        for (int i = 0; i < num_experts; ++i) total += std::exp(scores[i] - largest);
        for (int i = 0; bias && i < num_experts; ++i) scores[i] = std::exp(scores[i] - largest) / total;
    }
    if (shape.num_groups > 0) choose_groups(scores, bias, shape);
    int32_t* const chosen = work->chosen.data() + row * num_chosen;
    choose_largest(scores, bias, num_experts, chosen, num_chosen);
    float* const shares = work->shares.data() + row * num_chosen;
    for (int i = 0; i < num_chosen; ++i) {
        const float score = scores[chosen[i]];
        shares[i] = decides_before ? std::exp(score - largest) : score;
    }
    if (shape.is_renormalised) {
        total = std::accumulate(shares, shares + num_chosen, 0.0f);
    } else if (!decides_before) {
        total = 1.0f;
    }
    for (int i = 0; i < num_chosen; ++i) shares[i] = shares[i] / total * shape.share_factor;
    const float* const scale = weights_.vector(shape.share_scale);
    for (int i = 0; scale && i < num_chosen; ++i) shares[i] *= scale[chosen[i]];
}

// Each task counts for itself how many pairs an expert has, and how many of them come before its own: a pass over a few thousand numbers
// takes less time than to wait for somebody who makes it for all.
void Experts::gather(const Layer& layer, const Stage& stage, int task, const Activation& input, Scratch& scratch) const {
    const auto& [shape, work] = layer;
    const int pairs = stage.end * shape.num_chosen, begin = task * stage.grain, end = std::min(begin + stage.grain, pairs);
    const std::vector<int32_t>& chosen = work->chosen;
    std::fill_n(scratch.places.begin(), shape.num_experts, 0);
    for (int pair = 0; pair < begin; ++pair) ++scratch.places[chosen[pair]];
    std::copy_n(scratch.places.begin(), shape.num_experts, scratch.counts.begin());
    for (int pair = begin; pair < pairs; ++pair) ++scratch.counts[chosen[pair]];
    for (int expert = 0, first = 0; expert < shape.num_experts; ++expert) {
        scratch.places[expert] += first;
        first += scratch.counts[expert];
        if (task == 0) work->ends[expert] = first;
    }
    for (int pair = begin; pair < end; ++pair) {
        const int32_t place = scratch.places[chosen[pair]]++;
        work->places[pair] = place;
        copy_row(work->gathered.view, place, input, pair / shape.num_chosen);
    }
}

// What lies on the disk alone is read while other panels are multiplied: all tasks together ask for all of the layer's.
void Experts::fetch(const Layer& layer, int matrix, const Stage& stage, int task) const {
    if (!weights_.is_in_file(matrix)) return;
    const int of_each = weights_.matrix(matrix).panels / layer.shape.num_experts;
    const Panels panels(layer.work->ends, of_each, kernels_);
    const int piece = stage.piece_of(task, stage.num_tasks);
    const Panels::Place end = panels.begin_of(piece + 1, stage.num_tasks);
    for (Panels::Place at = panels.begin_of(piece, stage.num_tasks); at < end; at = {panels.next_with_rows(at.expert), 0}) {
        const int first = at.expert * of_each;
        fetch_panels(weights_.packed(matrix), first + at.panel, first + (at.expert == end.expert ? end.panel : of_each));
    }
}

void Experts::multiply(const Layer& layer, int matrix, int bias, const Activation& input, float* out, const Stage& stage, int task) const {
    const PackedMatrix& all = weights_.matrix(matrix);
    const int of_each = all.panels / layer.shape.num_experts, num_tasks = stage.num_tasks;
    const Panels panels(layer.work->ends, of_each, kernels_);
    const int piece = stage.piece_of(task, num_tasks), next_piece = stage.piece_of(stage.task_after(task), num_tasks);
    const auto [expert, panel] = panels.begin_of(piece, num_tasks);
    const Panels::Place end = panels.begin_of(piece + 1, num_tasks), later = panels.begin_of(std::min(next_piece, num_tasks), num_tasks);
    for (Panels::Place at{expert, panel}; at < end;) {
        const int first = at.expert * of_each, stop = at.expert == end.expert ? end.panel : of_each;
        const Panels::Place after = std::min(Panels::Place{panels.next_with_rows(at.expert), 0}, end);
        const Panels::Place next = after < end ? after : later;
        const Epilogue epilogue{out - int64_t{first} * kPanel, int64_t{of_each} * kPanel, weights_.vector(bias)};
        kernels_.gemm(all, input, panels.first_row(at.expert), panels.end_row(at.expert),
                      {first + at.panel, first + stop, next.expert * of_each + next.panel}, epilogue, {});
        at = after;
    }
}

void Experts::activate(const Layer& layer, const Stage& stage, int task, Scratch& scratch) const {
    const auto& [shape, work] = layer;
    const int pairs = stage.end * shape.num_chosen, begin = task * stage.grain, stop = std::min(begin + stage.grain, pairs);
    const int64_t ld = rows_of_each(weights_.matrix(shape.inner), shape.num_experts), width = shape.width;
    const Activation& to = work->activated.view;
    for (int first = begin; first < stop; first += kRowsOfRowOp) {
        const int end = std::min(first + kRowsOfRowOp, stop);
        float* const rows = scratch.activated.data() - first * width;  // that of pair 0, were it there
        for (int pair = first; pair < end; ++pair) {
            const float* const gate = floats_of(work->inner) + pair * ld;
            if (ld == int64_t{ceil_div(shape.width, kPanel)} * kPanel) {  // there are no gates: these are the up projections
                kernels_.activate_row(rows + pair * width, gate, shape.width, shape.activation);
            } else {
                kernels_.gated_row(rows + pair * width, gate, gate + ld / 2, shape.width, shape.activation);
            }
        }
        if (!to.bf16) {
            kernels_.quantize_rows(to, first, end, rows, nullptr, 0.0f);
        } else {
            for (int pair = first; pair < end; ++pair) kernels_.to_bf16_row(to, pair, rows + pair * width);
        }
    }
}

void Experts::sum(int id, int64_t row, float* out, int cols) const {
    const auto& [shape, work] = layers_[id];
    const int64_t first = row * shape.num_chosen;
    const int ld = rows_of_each(weights_.matrix(shape.outer), shape.num_experts);
    kernels_.weighted_sum(out, floats_of(work->outer), ld, work->places.data() + first, work->shares.data() + first, shape.num_chosen,
                          cols);
}

}  // namespace penstock
