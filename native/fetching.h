// Which keys and values a step's products fetch into the cache for the attention after them.
//
// Attention reads a layer's keys and values once and computes little with them: it waits for memory. Products leave memory idle: weights
// that they read serve many rows. So the thread that will attend fetches beforehand, while it multiplies.
//
// Used by the planner of a step (step_planner.h). Says which blocks; the kernels fetch them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "instructions.h"
#include "kv_cache.h"

namespace penstock {

class Fetching {
  public:
    // Blocks, as a range of those that the step fetches.
    struct Blocks {
        int32_t first = 0, end = 0;
    };
    // The share of one task: `count` blocks for the attention of an instruction; none where `attention` is -1.
    struct Share {
        int32_t attention = -1;
        const int32_t* blocks = nullptr;
        int32_t count = 0;
    };

    Fetching(const EngineShape& shape, const KvCache& kv);

    // The program's next instruction; `cost` is what of its products can fetch meanwhile, in multiply-adds for a token.
    void add_instruction(const Instruction& instruction, int64_t cost);

    void begin_step() { blocks_.clear(); }
    // The blocks of the contexts of some tokens, once each: rows share prefixes.
    Blocks plan(const StepInput& input, int first_token, int end_token);
    // One task's share of them, by the instruction that it belongs to and the number of that one's tasks.
    Share share(Blocks blocks, int instruction, int task, int num_tasks) const;

  private:
    // Progress of the multiply-adds that fetch, when an instruction begins and ends, of those since the attention before it, which fetch
    // together for the next one. Counted from the program's begin until that one is known.
    struct Progress {
        int64_t before, after;
        int64_t total = 0;
        int32_t attention = -1;  // the instruction after them; none after the last one, and where nothing fetches
        bool is_attention = false;
        int32_t most_blocks = 0;  // of the attention's layer that are worth fetching; of one with a window none
    };

    void share_since_last_attention();

    EngineShape shape_;
    const KvCache& kv_;
    std::size_t most_blocks_ = 0;      // of any layer
    int64_t cost_ = 0;                 // of all instructions so far
    std::vector<Progress> progress_;   // per instruction
    std::vector<int32_t> blocks_;      // of this step
    std::vector<uint8_t> is_fetched_;  // [num_blocks], while some tokens' blocks are planned; else 0
};

}  // namespace penstock
