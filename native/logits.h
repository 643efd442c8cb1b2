// The logits of a step, and the tokens that are drawn of them.
//
// Only the largest logit is kept of a row that is given its likeliest token: 32 rows of 49,152 logits are 6 MB, more than cores have of
// caches of their own, and would go to memory and back, or to another core, for one number each.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "adapters.h"
#include "floats.h"
#include "instructions.h"
#include "sampler.h"
#include "step_planner.h"

namespace penstock {

class Logits {
  public:
    Logits(const EngineShape& shape, const KernelTable& kernels, int num_members);

    void set_sampling(int slot, RowSampling sampling) { sampling_.at(slot) = std::move(sampling); }
    // `multiply` will be called: the product is the last instruction of a program, of all strands together.
    // Its results are multiplied by `scale` and then, if cap > 0, become cap * tanh(logit / cap).
    void expect_product(float scale, float cap);
    // Logit i is of token `tokens[i]`, not of token i: the logits are of a part of the vocabulary.
    void name_tokens(std::vector<int32_t> tokens) { tokens_ = std::move(tokens); }
    int num_named() const { return tokens_.empty() ? shape_.vocab_size : static_cast<int>(tokens_.size()); }

    // `logits` [num_logits, width] are where rows are kept that need them. `product` is the stage of the product, and `panels` those of its
    // matrix; null if another instruction makes the logits. `awaits_masks`: whoever needs a mask waits until `admit_masks`.
    void begin_step(const StepInput& input, float* logits, int64_t width, const Stage* product, int panels, bool awaits_masks);
    // The masks that the input points to are those of the step.
    void admit_masks();
    bool awaits_masks() const { return awaits_masks_.load(std::memory_order_relaxed); }
    // A task of the product. `epilogue` is that of an ordinary product into the logits. Null adapters: none changes it.
    void multiply(const PackedMatrix& w, const Activation& x, Epilogue epilogue, const Stage& stage, int task, int member,
                  const Adapters* adapters, int site);
    void draw(int row, int member);
    // Throws std::bad_alloc if the sampler found no memory; the samples then have no meaning.
    void end_step() const;

    // The tokens of the last step.
    const std::vector<SampleResult>& samples() const { return samples_; }

  private:
    // What a product's results, [rows, ld], become before anybody looks at them.
    void change(float* logits, int64_t ld, int num_rows, int count) const;
    int32_t best_of_row(int row) const;
    void draw_among(int row, int member);
    const uint32_t* mask_of(int row) const;

    EngineShape shape_;
    const KernelTable& kernels_;
    std::vector<RowSampling> sampling_;        // per slot
    std::vector<SamplerScratch> draw_scratch_;  // per member
    std::vector<Floats> scratch_;              // per member, of a product's rows
    float scale_ = 1.0f, cap_ = 0.0f;
    std::vector<int32_t> tokens_;  // empty: of all tokens

    // State of the step.
    StepInput input_{};
    float* logits_ = nullptr;
    int64_t width_ = 0;
    std::vector<uint8_t> wants_best_;  // rows of which only the largest logit is kept
    std::vector<BestLogit> best_;      // [num_logits, best_stride_], of their pieces
    int best_stride_ = 0;
    std::vector<SampleResult> samples_;
    std::atomic<bool> awaits_masks_{false};
    std::atomic<bool> lacks_memory_{false};
};

}  // namespace penstock
