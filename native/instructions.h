// The input of an engine: the instructions of its program, and the arrays of one step. Plain data, written by the bindings
// (bind_engine.cpp) and by the row table, read by the planner of a step and by the engine.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace penstock {

constexpr int kRowsOfRowOp = 16;  // rows that go through one row operation after another: they stay in the first-level cache
constexpr int kExpertsTogether = 16;  // scores of a row in one piece of work

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// An operation on a row, and the fields of `RowOp` that it reads. x, y and out are buffers unless stated otherwise.
enum class RowOpKind : int32_t {
    kEmbed,           // out; weight: matrix; value: scale
    kAngles,          // weight: rope
    kRmsNorm,         // out, x; weight: vector; n: columns of a group; head_dim: columns from one group's weights to the next; value: eps
    kQuantize,        // out: activation; x; weight: vector of the norm before, or -1; value: its eps
    kToBf16,          // out: activation; x
    kRope,            // x; weight: rope; n: heads; head_dim: columns of a head
    kKvWrite,         // x: keys; y: values; weight: vector that all keys share, or -1; n: layer
    kGated,           // out; x: gate; y: up; n: ActivationKind
    kAdd,             // out = x + value * y
    kGather,          // out, of samples; x, of tokens: the sample's token
    kLookup,          // out; weight: table; value: scale
    kResizeHeads,     // out, x; n: heads
    kGatherColumns,   // out, x; weight: order
    kChooseExperts,   // weight: layer of experts
    kSumExperts,      // out; weight: layer of experts
    kLayerNorm,       // out, x; weight: vector; y: vector of the bias, or -1; value: eps
    kActivate,        // out, x; n: ActivationKind
    kLookupPosition,  // out; weight: table; n: row of the first position; value: scale
    kShortConv,       // out, x; weight: vector of the taps; y: vector of the bias, or -1; n: layer of those with a state
    kKeepState,       // x; n: layer of those with a state
    kAddType,         // out, x; weight: vector [types, columns]; n: types
    kGatherFirst,     // out, of samples; x, of tokens: the text's first
    kMean,            // out, of samples; x, of tokens: all of the text
    kNormalise,       // out, x
    kRound,           // out: activation; x; n: 1 if rows have a zero of their own
    kShrink,          // x: activation; weight: site of adapters
    kAdaptEmbedding,  // out; weight: site of adapters; value: scale
    kScale,           // out = value * x
    kPrepareState,    // weight: linear attention
    kColumns,         // out, x; n: first column of x
    kPlaceHeads,      // out, x; n: heads; head_dim: the column of each head of out where x's head goes; zeros follow
    kSparse,          // out, of samples; x, of tokens: all of the text
};

// One operation on one row; ids index the engine's buffers, activations, matrices, tables, vectors, orders, ropes. -1 is none.
struct RowOp {
    RowOpKind kind;
    int32_t out = -1, x = -1, y = -1;
    int32_t weight = -1;
    int32_t n = 0;
    int32_t head_dim = 0;
    float value = 0.0f;
};

struct LinearOp {
    int32_t weight;
    int32_t activation;
    int32_t out;
    int32_t bias = -1;      // vector
    int32_t residual = -1;  // buffer
    bool has_gelu = false;  // of weights of kU8Row alone
    int32_t site = -1;      // of adapters
    // If num_heads > 0, the matrix has one part per head, in whole panels. Head h multiplies the columns from h * x_columns on of an
    // activation in bf16, and writes those from h * out_columns on.
    int32_t num_heads = 0, x_columns = 0, out_columns = 0;
};

struct GatedOp {
    int32_t gate = -1, up = -1;  // matrices
    int32_t activation = -1;     // input
    int32_t out = -1;            // buffer
    ActivationKind kind = ActivationKind::kSilu;
    int32_t gate_site = -1, up_site = -1;  // of adapters
};

struct AttentionOp {
    int32_t q = -1, out = -1;  // buffers
    int32_t layer = 0;
    int32_t num_heads = 0;
    float scale = 1.0f;
    int32_t window = 0;
    float softcap = 0.0f;
    int32_t sinks = -1;        // vector [num_heads]
    bool of_samples = false;  // only samples are computed: nobody reads the others' results
};

// Attention within each text of a step, which was computed whole.
struct TextAttentionOp {
    int32_t q = -1, k = -1, v = -1, out = -1;  // buffers
    int32_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
    float scale = 1.0f;
    bool is_causal = false;
    int32_t window = 0;
    int32_t distances = -1;     // vector [num_heads, 2 * num_distances + 1]
    int32_t num_distances = 0;
    // Disentangled attention, without a mask or a window: keys and queries of distances, as integers [num_heads, pairs of columns,
    // num_relative, 2], and a vector with the scale of each, [2, num_heads]. A token is at distance `same_position` from itself.
    int32_t relative_keys = -1, relative_queries = -1, relative_scales = -1;
    int32_t num_relative = 0, same_position = 0;
    int32_t sinks = -1;  // vector [num_heads]
};

// A layer's mixture of experts. A matrix has the rows of all experts, one expert after the other, each in whole panels: `inner` an expert's
// gate and then its up projection, `outer` the down projections. Biases are laid out alike.
struct ExpertsLayer {
    int32_t num_experts = 0, num_chosen = 0;
    int32_t width = 0;                      // of an expert: what the down projection reads
    int32_t x = -1;                         // buffer
    int32_t input = -1;                     // activation: x in the form that `inner` wants
    int32_t router = -1;                    // vector [num_experts, columns of x]
    int32_t router_bias = -1;               // vector [num_experts]: of the router's products
    int32_t selection_bias = -1;            // likewise: added to scores for the choice only
    int32_t inner = -1, outer = -1;         // matrices
    int32_t inner_bias = -1, outer_bias = -1;
    ActivationKind activation = ActivationKind::kSilu;
    bool is_sigmoid = false;                // turns the router's products into scores; else softmax
    bool is_renormalised = true;            // a token's shares are divided by their sum
    float share_factor = 1.0f;              // of the shares, after that
    int32_t share_scale = -1;               // vector [num_experts]: of each expert's shares, after that
    // Only experts of `num_chosen_groups` groups may be chosen: those with the largest sums of `num_group_scores` scores. 0: all.
    int32_t num_groups = 0, num_chosen_groups = 0, num_group_scores = 1;
};

// Its stages (experts.h), but for those that are operations on rows.
enum class ExpertsPart : int32_t { kScore, kGather, kInner, kActivate, kOuter };

struct ExpertsOp {
    ExpertsPart part = ExpertsPart::kScore;
    int32_t id = -1;  // of the layer
    ExpertsLayer layer{};
};

// A convolution whose state lies in blocks of its own; models/program.py has the formula.
struct CausalConvOp {
    int32_t x = -1, out = -1;         // buffers
    int32_t weight = -1, bias = -1;   // vectors [taps, width], [width]
    int32_t taps = 0, width = 0;
    int64_t first_line = 0;           // of its state
};

// Linear attention; likewise.
struct LinearAttentionOp {
    int32_t x = -1, steps = -1, gates = -1, out = -1;  // buffers; without `gates` there is no delta rule
    int32_t prepared = -1;  // buffer: q and k as they are multiplied [key heads, key_dim] each, then the decays and rates of the heads
    int32_t step_bias = -1, decay = -1, skip = -1;     // vectors [num_heads]
    int32_t num_heads = 0, num_key_heads = 0, key_dim = 0, value_dim = 0;
    int32_t q_at = 0, k_at = 0, v_at = 0;              // columns of x
    float scale = 1.0f;
    // Vectors [key_dim] that normalised queries and keys are multiplied with (their sums of squares become key_dim); -1: they are not
    // normalised.
    int32_t q_factor = -1, k_factor = -1;
    float min_step = 0.0f, max_step = 0.0f;
    int64_t first_line = 0;  // of its state
    bool is_tiled = false;   // value head h reads key head h % num_key_heads, not h / (num_heads / num_key_heads)
};

enum class InstructionKind : int32_t { kRows, kLinear, kGated, kAttention, kExperts, kTextAttention, kCausalConv, kLinearAttention };
enum class Domain : int32_t { kTokens, kSamples };  // over which rows an instruction runs

struct Instruction {
    InstructionKind kind;
    Domain domain = Domain::kTokens;
    std::vector<RowOp> rows{};
    std::vector<LinearOp> linears{};
    GatedOp gated{};
    AttentionOp attention{};
    ExpertsOp experts{};
    TextAttentionOp text_attention{};
    CausalConvOp conv{};
    LinearAttentionOp linear_attention{};
};

// Where a row of the step has its recurrent state, if that lies in blocks of its own: [num_state_blocks] ids each.
struct RowState {
    const int32_t* blocks = nullptr;  // null: the state after the row's tokens is dropped
    const int32_t* source = nullptr;  // null: the row starts without a state
};

// A copy of a row's state after `num_tokens` of the step's tokens.
struct StateSave {
    int32_t row, num_tokens;
    std::vector<int32_t> blocks;
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
    const int32_t* num_prompt_of_slot;  // [max_rows]
    const int32_t* logit_targets = nullptr;  // [S]: a token of the prompt to score, or -1 for rows that sample; null: all sample
    const uint32_t* const* masks = nullptr;  // [S] allowed tokens, a bit each, or null for any; null: no masks

    const int32_t* second_at_of_slot = nullptr;  // [max_rows], position of a pair's second text, or 0; null: 0 of all
    const int64_t* adapter_of_slot = nullptr;    // [max_rows], number of a row's adapter, or 0; null: 0 of all

    const RowState* row_states = nullptr;  // [R]; null: nothing of any
    const StateSave* saves = nullptr;      // [num_saves], those of one row in order of tokens
    int32_t num_saves = 0;

    // Tokens of the row before the one drawn from a row of logits.
    int32_t num_tokens_before(int row) const { return positions[logit_tokens[row]] + 1; }
    // The row of a token, as its index among those of the step.
    int row_of(int64_t token) const {
        return static_cast<int>(std::upper_bound(query_start_loc, query_start_loc + num_rows, token) - query_start_loc) - 1;
    }
    const uint32_t* mask_of(int row) const { return masks ? masks[row] : nullptr; }
    int32_t target_of(int row) const { return logit_targets ? logit_targets[row] : -1; }
};

// The keys and values of a layer at one position. With latents, values are the first `num_latent` columns of the keys.
struct KvShape {
    int32_t num_kv_heads, head_dim, num_latent = 0;
};

struct EngineShape {
    std::vector<KvShape> kv_shapes;  // of each layer with keys and values; none for programs that compute texts whole
    int32_t vocab_size;
    int32_t num_blocks, block_size, max_rows, max_step_tokens;
    KvFormat kv_format;
    // Recurrent state (short_conv.h): of so many layers, each with so many columns of so many numbers in a block.
    int32_t num_states = 0, state_columns = 0, state_width = 0;
    int32_t max_scored = 0;  // scored prompt positions and guesses of a step, whose logits are beside one for each row
    uint64_t memory_nodes = 0;  // over which weights and KV cache are spread: MemoryNodes in packing.h
    // A row's recurrent state in blocks of its own (recurrence.h): so many lines, each of so many floats.
    int64_t num_state_lines = 0;
    int32_t state_line = 0;
    int kv_fd = -1;  // an empty file in memory where the KV cache lies, so that other processes can read it; -1: none

    int32_t num_layers() const { return static_cast<int32_t>(kv_shapes.size()); }
    int32_t max_logits() const { return max_rows + max_scored; }
    // The widest of each; 0 without layers.
    KvShape widest() const {
        KvShape widest{0, 0};
        for (const KvShape& kv : kv_shapes) {
            widest = {std::max(widest.num_kv_heads, kv.num_kv_heads), std::max(widest.head_dim, kv.head_dim),
                      std::max(widest.num_latent, kv.num_latent)};
        }
        return widest;
    }
};

}  // namespace penstock
