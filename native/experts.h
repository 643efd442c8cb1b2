// Mixtures of experts: which experts each row goes to, and the products of each expert with the rows that come to it.
//
// A pair is a row and an expert that was chosen for it. Pairs are sorted by expert, then row: the rows of an expert lie side by side, and
// its weights are read once for all of them.
//
//     part       a task is                     what it makes
//     score      some (row, 16 experts)        the router's scores, in float32
//     choose     rows (kChooseExperts)         the experts with the largest scores, by rank, and their shares
//     gather     pairs, by row and rank        the input of each pair, where the pair is sorted to
//     inner      panels of experts             gate, if there are gates, and up projection
//     activate   pairs, sorted                 activation(gate) * up or activation(up), in the form that the down projection wants
//     outer      panels of experts             down projection
//     sum        rows (kSumExperts)            its experts' results times their shares, by rank
//
// How many tasks a part has follows from the step's shape: the planner counts them before anything is chosen. What a task of a product is
// follows from the choice: an even share of the panels that rows came to. No sum depends on either.
//
// The engine (engine.h) calls the parts. Their memory is that of one layer at a time: a step of a program with experts is one strand.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "floats.h"
#include "instructions.h"
#include "owned_activation.h"
#include "step_planner.h"
#include "weights.h"

namespace penstock {

constexpr int kMostGroups = 64;     // of experts
constexpr int kMostGroupScores = 8;  // whose sum decides whether a group is chosen

class Experts {
  public:
    Experts(const KernelTable& kernels, const Weights& weights, int num_members);

    // Returns the id of a layer, whose matrices and vectors are there. `most_rows`: of a step.
    int add(const ExpertsLayer& layer, int64_t most_rows);

    // A task of a part. x is [rows, hidden], and so is `input`, in the form that the inner matrix wants.
    void run(const ExpertsOp& op, const float* x, const Activation& input, const Stage& stage, int task, int member);
    void choose(int id, int64_t row);
    void sum(int id, int64_t row, float* out, int cols) const;

    // What the parts leave what they make in, of all layers.
    int64_t bytes() const;

  private:
    // Where the parts leave what they make; layers of one shape share it.
    struct Workspace {
        int64_t most_rows, bytes = 0;
        Memory scores;                        // float [rows, num_experts]
        std::vector<int32_t> chosen;          // experts [rows, num_chosen], by rank
        std::vector<float> shares;            // of these pairs
        std::vector<int32_t> places;          // where these pairs are sorted to
        std::vector<int32_t> ends;            // of each expert's pairs, sorted
        OwnedActivation gathered, activated;  // [pairs, hidden], [pairs, width]
        Memory inner, outer;                  // float [pairs, rows of one expert's matrix]
    };
    struct Layer {
        ExpertsLayer shape;
        Workspace* work;
    };
    struct Scratch {
        std::vector<int32_t> places, counts;  // of each expert: where its next pair is sorted to, and how many it has
        Floats activated;                     // [kRowsOfRowOp, width]
    };

    void score(const Layer& layer, const Stage& stage, int task, const float* x) const;
    void gather(const Layer& layer, const Stage& stage, int task, const Activation& input, Scratch& scratch) const;
    void activate(const Layer& layer, const Stage& stage, int task, Scratch& scratch) const;

    bool fits(const Layer& other, const ExpertsLayer& layer, int64_t most_rows) const;
    std::unique_ptr<Workspace> make_workspace(const ExpertsLayer& layer, int64_t most_rows) const;
    void fetch(const Layer& layer, int matrix, const Stage& stage, int task) const;
    void multiply(const Layer& layer, int matrix, int bias, const Activation& input, float* out, const Stage& stage, int task) const;
    bool is_quantised(int matrix) const { return !kernels_.reads_bf16(weights_.matrix(matrix)); }

    const KernelTable& kernels_;
    const Weights& weights_;
    std::vector<std::unique_ptr<Workspace>> workspaces_;
    std::vector<Layer> layers_;
    std::vector<Scratch> scratch_;  // per member
};

}  // namespace penstock
