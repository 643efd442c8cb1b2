// One model on a team of threads: its packed weights, buffers, KV cache and instructions; runs a whole step in one call.
//
// Built once by the lowering (backends/native/lowering.py), then `run_step` is called by one thread at a time.
// Knows nothing of requests: rows are slots in tables that the caller owns. Never allocates during a step
// once the largest step was seen.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "kv_memory.h"
#include "packing.h"
#include "sampler.h"
#include "team.h"

namespace penstock {

// For numbers that kernels load sixteen at a time: one load that straddles two cache lines costs as much as two.
template <typename T>
struct CacheLineAllocator {
    using value_type = T;
    static constexpr std::align_val_t kLine{64};
    CacheLineAllocator() = default;
    template <typename U>
    CacheLineAllocator(const CacheLineAllocator<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
    void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
    bool operator==(const CacheLineAllocator&) const { return true; }
};
using Floats = std::vector<float, CacheLineAllocator<float>>;

constexpr int kRowBlock = 96;      // rows of a product's task: their activations stay in the second-level cache
constexpr int kRowsTogether = 16;  // that go through one row operation after another: they stay in the first-level cache

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

enum class RowOpKind : int32_t { kEmbed, kAngles, kRmsNorm, kQuantize, kToBf16, kRope, kKvWrite, kGated, kAdd, kGather, kLookup, kResizeHeads };

// One operation on one row; ids index the engine's buffers, activations, matrices, tables, vectors, ropes. -1 is none.
struct RowOp {
    RowOpKind kind;
    int32_t out = -1;      // buffer, or activation for kQuantize and kToBf16
    int32_t x = -1;        // buffer
    int32_t y = -1;        // second buffer
    // matrix (kEmbed), table (kLookup), vector (kRmsNorm; kQuantize: of the norm before, or -1; kKvWrite: what keys share, or -1), rope
    // (kAngles, kRope)
    int32_t weight = -1;
    int32_t n = 0;         // group (kRmsNorm), heads (kRope, kResizeHeads), layer (kKvWrite), activation kind (kGated)
    int32_t head_dim = 0;  // kRope
    float value = 0.0f;    // eps or scale
};

struct LinearOp {
    int32_t weight;
    int32_t activation;
    int32_t out;
    int32_t bias = -1;      // vector
    int32_t residual = -1;  // buffer
};

struct GatedOp {
    int32_t gate = -1, up = -1;  // matrices
    int32_t activation = -1;     // input
    int32_t out = -1;            // buffer
    ActivationKind kind = ActivationKind::kSilu;
};

struct AttentionOp {
    int32_t q = -1, out = -1;  // buffers
    int32_t layer = 0;
    int32_t num_heads = 0;
    float scale = 1.0f;
    int32_t window = 0;
    float softcap = 0.0f;
    bool of_samples = false;  // of other tokens nobody reads what comes out, and it is not computed
};

enum class InstructionKind : int32_t { kRows, kLinear, kGated, kAttention };
enum class Domain : int32_t { kTokens, kSamples };  // over which rows an instruction runs

struct Instruction {
    InstructionKind kind;
    Domain domain = Domain::kTokens;
    std::vector<RowOp> rows;
    std::vector<LinearOp> linears;
    GatedOp gated;
    AttentionOp attention;
};

// Arrays of one step, owned by the caller. R rows, T tokens, S rows of logits.
struct StepInput {
    int32_t num_rows, num_tokens, num_logits;
    const int32_t* row_slots;        // [R]
    const int32_t* query_start_loc;  // [R + 1]
    const int32_t* context_lens;     // [R]
    const int32_t* token_ids;        // [T]
    const int32_t* positions;        // [T]
    const int64_t* slot_mapping;     // [T]
    const int32_t* block_tables;     // [max_rows, table_stride]
    int64_t table_stride;
    const int32_t* logit_tokens;  // token index of each row of logits, ascending [S]
    // For sampling; null tokens: only logits are wanted.
    const int32_t* logit_slots;   // slot of each row of logits [S]
    const int32_t* tokens;        // [max_rows, tokens_stride]
    int64_t tokens_stride;
    const int32_t* num_tokens_of_slot;  // [max_rows]
    const int32_t* num_prompt_of_slot;  // [max_rows]
    const uint32_t* const* masks = nullptr;  // of what may be sampled: a bit for each token, or null [S]; null: none has one

    const uint32_t* mask_of(int row) const { return masks ? masks[row] : nullptr; }
};

// By what the thread that called was at: others may be at other stages.
struct StepTimes {
    int64_t rows_ns = 0, linear_ns = 0, attention_ns = 0, sampling_ns = 0;
};

struct EngineShape {
    int32_t num_layers, num_kv_heads, head_dim, vocab_size;
    int32_t num_blocks, block_size, max_rows, max_step_tokens;
    KvFormat kv_format;
};

class Engine final : private Work {
  public:
    // Throws std::invalid_argument for a shape that the kernels can't compute, std::bad_alloc without memory.
    Engine(const EngineShape& shape, std::shared_ptr<Team> team, const std::string& variant);

    // Memory for a matrix, whose rows are packed by `pack_rows`: all of them, before the first step.
    int add_matrix(SourceFormat format, int rows, int cols);
    // Rows as in the file. `first_row` begins a panel, and the last one ends one or is the matrix's last.
    void pack_rows(int matrix, int first_row, int num_rows, const uint8_t* source);
    // What a matrix is made of: its format in the file, rows and columns.
    const PackedStorage& packed(int matrix) const { return matrices_.at(matrix); }
    // A matrix of which a step reads single rows: it stays where and as it is, and must outlive the engine. It is not read now,
    // so damage shows when a row is looked up: a group whose scale is no finite number is NaN, and so are that request's logits.
    int add_table(SourceFormat format, int rows, int cols, const uint8_t* source);
    // Every NaN gets the bits of `NAN`, as in a table: no rounding makes a number of them.
    int add_vector(const float* values, int64_t count);
    int add_rope(const float* inv_freq, int half, float attention_factor);
    int add_buffer(int width, bool per_sample);
    int add_activation(int cols, bool quantised, bool per_sample);
    void add_instruction(Instruction instruction);
    // The weights are complete: threads of low priority see to their pages (Arena), and to those of the KV cache (KvMemory). A matrix
    // that comes later: std::logic_error.
    void settle();
    void use_small_pages() { arena_.use_small_pages(); }  // for tests
    int64_t small_page_bytes() const { return arena_.small_bytes(); }
    // After the last instruction.
    void set_logits(int buffer);

    void set_sampling(int slot, RowSampling sampling);
    // Throws std::bad_alloc if the sampler finds no memory; the samples then have no meaning.
    void run_step(const StepInput& input);
    const std::vector<SampleResult>& samples() const { return samples_; }
    const float* logits() const { return buffers_[logits_].data(); }
    int64_t logits_width() const { return logits_ < 0 ? 0 : buffers_[logits_].width; }
    const StepTimes& times() const { return times_; }

    void copy_block(int from, int to);
    // A block of all layers, one after the other, in the layout of the cache. [block_bytes]
    void read_block(int block_id, uint8_t* out) const;
    void write_block(int block_id, const uint8_t* content);
    // Fills a block's positions from `first` on with NaN, so that a test sees any use of them.
    void poison_block(int block, int first);

    const EngineShape& shape() const { return shape_; }
    const char* variant() const { return kernels_.name; }
    int num_threads() const { return team_->size(); }
    // Of the last step.
    int num_strands() const { return static_cast<int>(strands_.size()); }
    // Likewise: blocks whose keys and values of one layer a strand's products were to fetch before its attention read them, in order.
    std::vector<int32_t> fetched_blocks(int strand, int layer_index) const;
    int64_t weight_bytes() const { return weight_bytes_; }
    int64_t kv_bytes() const { return block_bytes_ * shape_.num_blocks; }
    int64_t block_bytes() const { return block_bytes_; }

  private:
    struct Buffer {
        int64_t width;
        Memory memory;
        float* data() const { return reinterpret_cast<float*>(memory.get()); }
        float* row(int64_t i) const { return data() + i * width; }
    };
    struct Table {
        SourceFormat format;
        int32_t cols;
        int64_t row_bytes;
        const uint8_t* source;
    };
    struct OwnedActivation {
        Activation view;
        std::vector<Memory> memory;
    };
    struct Rope {
        std::vector<float> inv_freq;
        float factor;
        Floats cos, sin;  // [max_step_tokens, half], of this step's tokens
    };
    struct TileRange {
        int32_t first = 0, end = 0;
        bool has_splits = false;
    };
    // Tokens of a step, and the samples among them, that go through all instructions without waiting for the others: who computes one
    // strand multiplies while who computes another one waits for keys and values.
    struct Strand {
        int32_t first_token, end_token, first_logit, end_logit;
        TileRange tiles, sample_tiles;           // of attention: of all tokens, and of samples alone
        int32_t first_block = 0, end_block = 0;  // of what its products fetch for attention
    };
    // One instruction of a strand.
    struct Stage {
        int32_t num_tasks;
        int32_t grain;       // rows, panels or attention tiles of a task
        int32_t row_blocks;  // of a product
        int32_t first, end;  // rows of its domain, or tiles
        int32_t members;     // who share its tasks
        int32_t block = 0;   // rows of a row block
    };
    struct Rows {
        int begin, end;
    };
    // In multiply-adds of products, of all layers.
    struct Costs {
        int64_t of_token = 0, of_sample = 0;
        int64_t of_fetching = 0;  // that part of a token's whose products fetch keys and values meanwhile: not those of floats
        int64_t of_position = 0;  // that a token sees
        int64_t weight_bytes = 0;  // that tokens are multiplied with
    };
    // What an instruction is, in multiply-adds that fetch, of those between two attentions, which share in fetching for the second one.
    struct FetchShare {
        int64_t before, after;  // counted from the attention before, and until the next one is known from the program's begin
        int64_t total = 0;
        int32_t attention = -1;  // the instruction after them; none after the last one, and where nothing fetches
    };
    struct AttentionTile {
        int32_t row, token, position, num_queries, kv_head;
        int32_t split = -1;  // of which this is a piece
        int32_t first_segment = 0, end_segment = 0;
    };
    // A tile that sees so much that its segments are divided over threads. The piece that is done last merges them all.
    struct AttentionSplit {
        int64_t partials;  // where they begin
        int32_t num_pieces;
        int32_t num_done;  // through std::atomic_ref
    };

    KvLayer layer(int index) const;
    uint8_t* block(int block_id) const { return kv_->data() + block_id * block_bytes_; }
    int64_t rows_of(bool per_sample) const { return per_sample ? shape_.max_rows : shape_.max_step_tokens; }
    // How a step is divided: step_plan.cpp.
    void count_cost(const Instruction& instruction);
    bool layer_fits_cache() const;
    void plan_step();
    void plan_strands();
    void add_up_costs();
    void divide_tokens(int wanted);
    void plan_attention(Strand& strand);
    TileRange add_tiles(const Strand& strand, int heads_per_kv, bool of_samples);
    void add_tile(AttentionTile tile, bool of_samples);
    void split_long_tiles(TileRange& tiles, int heads_per_kv);
    Stage plan_stage(const Strand& strand, const Instruction& instruction, int members) const;
    Team::Strands strands_of_run() const;
    // How many members share a strand.
    int takers() const { return ceil_div(team_->size(), num_strands()); }

    // What products fetch for attention: fetching.cpp.
    void share_fetching();
    void plan_fetching(Strand& strand);
    UpcomingKv upcoming_of(int index, int task) const;

    // What a task computes: step.cpp.
    void run_task(int index, int task, int member) override;
    void begun() override;
    void stage_done(int index) override;
    const Instruction* instruction_of(int index) const;  // null: sampling
    int task_after(const Stage& stage, int task) const;
    void run_rows(const std::vector<RowOp>& ops, const Stage& stage, int task);
    void run_row_op(const RowOp& op, int64_t row, int64_t end);
    void run_row_op(const RowOp& op, int64_t row);
    void compute_angles(Rope& rope, int64_t row);
    Rows rows_of(const Stage& stage, int task) const;
    Epilogue epilogue_of(const LinearOp& op) const;
    PanelRange panels_of(const Stage& stage, int task, int panels) const;
    void run_linear(const Instruction& instruction, int index, int task);
    void run_gated(const GatedOp& op, int index, int task);
    AttentionTask attention_task(const AttentionOp& op, const AttentionTile& tile);
    void run_attention(const AttentionOp& op, const Stage& stage, int task, int member);

    // The last product, and the draw: logits.cpp.
    bool is_logits(const Instruction& instruction) const;
    void plan_logits();
    void run_logits(const LinearOp& op, const Stage& stage, int task, int member);
    int32_t best_of_row(int row) const;
    void run_sampling(int row, int member);

    EngineShape shape_;
    const KernelTable& kernels_;
    std::shared_ptr<Team> team_;  // other engines may have it, too
    int64_t weight_bytes_ = 0, block_bytes_ = 0;
    std::optional<KvMemory> kv_;  // [num_blocks][num_layers], each as KvLayer says: what a few tokens take are few pages
    Arena arena_;
    std::vector<PackedStorage> matrices_;
    std::vector<Table> tables_;
    std::vector<Floats> vectors_;
    std::deque<Rope> ropes_;
    std::vector<Buffer> buffers_;
    std::vector<OwnedActivation> activations_;
    std::vector<Instruction> program_;
    int logits_ = -1;

    StepInput input_{};
    StepTimes times_;
    std::vector<AttentionTile> tiles_, whole_tiles_;
    std::vector<AttentionSplit> splits_;
    std::vector<float> partials_;
    int64_t num_partials_ = 0;
    int num_own_ = 0;  // instructions that each strand goes through by itself; the others follow when all have
    Costs costs_;
    std::vector<FetchShare> fetch_shares_;  // per instruction
    std::vector<int64_t> cost_until_;       // of the step's tokens up to each one
    std::vector<int32_t> fetched_blocks_;   // of each strand
    std::vector<uint8_t> is_fetched_;       // [num_blocks], by the strand that is planned; else 0
    std::vector<Strand> strands_;      // of this step
    std::vector<Stage> stages_;        // of the strands, one after the other: one per instruction, and one for sampling
    std::vector<int32_t> num_tasks_;   // of the same stages
    int64_t stage_began_ns_ = 0;
    std::vector<std::vector<float>> attention_scratch_;  // per member
    std::vector<SamplerScratch> sampler_scratch_;        // per member
    std::vector<RowSampling> sampling_;                  // per slot
    std::vector<Floats> logits_scratch_;                 // per member
    std::vector<uint8_t> wants_best_;                    // of this step's logits: rows of which only the largest is kept
    std::vector<BestLogit> best_;                        // [logits, best_stride_], of their pieces
    int best_stride_ = 0;
    std::vector<SampleResult> samples_;
    std::atomic<bool> sampler_lacks_memory_{false};
    std::jthread settler_;  // ends before anything else
};

}  // namespace penstock
