// The contract between the step and its kernels: the data they share and one table of functions per instruction set.
//
// Every function computes rows independently: the bits of a row's result depend on that row's inputs alone,
// never on which rows or columns are computed with it or on which thread. That is what makes an answer
// the same whatever else is in the batch. No function allocates.

#pragma once

#include <cstdint>

namespace penstock {

constexpr int kPanel = 16;     // output channels that are packed together
constexpr int kGroup = 32;     // columns that share one scale
constexpr int kSegment = 256;  // KV positions of one attention partial; aligned to absolute positions
constexpr int kLargestHeadDim = 576;
constexpr int kKvTile = 16;    // positions whose keys are stored transposed together
constexpr int kKeyZero = 128;  // added to an 8-bit key's integer when it is stored

// An activation that exceeds this many times the root mean square of its row is an outlier: it does not count for its group's scale, and
// the part of it that an int8 can't hold is kept in float32. Otherwise the few very large channels of language models would make their
// groups coarse. At most cols / ratio^2 values of a row can be outliers.
constexpr float kOutlierRatio = 6.0f;
constexpr float kSmallestLimit = 1e-15f;  // smaller limits of outliers and scales of rows count as 0: their squares underflow
constexpr int32_t kNoColumn = INT32_MAX;  // ends a row's list of outliers
constexpr int32_t outliers_of(int cols) { return cols / static_cast<int32_t>(kOutlierRatio * kOutlierRatio) + 2; }

// Scales of activations are powers of two, no smaller than this one. If all values of a group are below half of it, the group is zero.
constexpr float kSmallestScale = 0x1p-90f;

// A group's sum of integers, below 2^22 in size, is added to the bits of 1.5 * 2^(23 + e). Read as a float, that is 1.5 * 2^(23 + e)
// plus 2^e times the sum: one exact subtraction converts and scales the sum. (e is at most 100; quantize.cpp.)
constexpr int32_t kLiftBits = 0x4B400000;  // of 1.5 * 2^23
static_assert(kGroup * 128 * 128 < 1 << 22);  // weights less their zero, and activations

enum class WeightKind : int32_t { kU4Affine = 0, kU4Symmetric = 1, kU8Symmetric = 2, kBf16 = 3, kU8Affine = 4, kU4Table = 5, kU8Row = 6 };

constexpr int32_t kWeightZero = 128;  // of 8 bits

constexpr bool is_nibbles(WeightKind kind) {
    return kind == WeightKind::kU4Affine || kind == WeightKind::kU4Symmetric || kind == WeightKind::kU4Table;
}
constexpr bool is_affine(WeightKind kind) { return kind == WeightKind::kU4Affine || kind == WeightKind::kU8Affine; }
// Bytes of a panel's q in a group, and of two groups with their scales and offsets: see PackedMatrix.
constexpr int bytes_of_group(WeightKind kind) { return kPanel * (is_nibbles(kind) ? kGroup / 2 : kGroup); }
constexpr int pair_bytes(WeightKind kind) { return 2 * bytes_of_group(kind) + 2 * kPanel * 2 * (is_affine(kind) ? 2 : 1); }

// Most columns of a matrix of kU8Row, so that sums with outliers stay within 32 bits.
constexpr int kMostRow8Cols = 8192;
constexpr int kApart = 4;  // columns that such a matrix may multiply apart

// A weight matrix [rows, cols] packed by `pack_panels` (packing.h) in panels of 16 rows, the last one padded with zeros.
//
// Quantised: w = d * (q - zero) + m, with unsigned q. `zero` is 8 for the 4-bit kinds and 128 for the 8-bit ones and kU4Table, whose 4 bits
// index `table` to give q; only the affine kinds have m. `quants` is one stream, [panel][pair of groups], because Zen 4 reads one stream
// faster than three. A pair has
//   q of the first group, then of the second. 4 bits: 4 chunks of 64 bytes, chunk c holding for each of the 16 rows the bytes 4c..4c+3
//     of the group, whose low nibbles are columns 4c.. and high nibbles 16+4c..; 8 bits: 8 such chunks of columns 4c..
//   [2 groups][16] f16 d, finite and never zero (a group of d = 0 has q = zero)
//   [16][2 groups] bf16 m, in the affine kinds
// An odd last group is paired with zeros.
// kBf16: `quants` is [panel][cols / 2][16][2] bf16 (an odd last column padded with zero).
// kU8Row: one scale for each whole row, w = row_scales * (q - 128); `quants` is [panel][cols / 4] chunks, as in the other 8-bit kinds.
//   A matrix may have kApart columns whose weights are floats instead, and 0 among the integers.
struct PackedMatrix {
    WeightKind kind;
    int32_t rows;
    int32_t cols;
    int32_t panels;
    const uint8_t* quants;
    const uint8_t* table;  // [16], of kU4Table: null for the others
    const float* row_scales = nullptr;  // [panel][16], of kU8Row, and the sums of each row's q - 128: null for the others
    const int32_t* row_sums = nullptr;
    const int32_t* apart = nullptr;        // [kApart]: columns; null without such
    const float* apart_weights = nullptr;  // [panel][kApart][16]
};

// The input of a GEMM, [num_rows, cols], in the form that the weights want. Quantised: x = q * 2^e, plus the rest of an outlier. For
// kU8Row one scale holds for a whole row: x = row_scale * (q - row_zero), plus row_scale * the rest of an outlier, which is an integer too.
struct Activation {
    int8_t* q = nullptr;              // [rows, cols]
    int32_t* lift = nullptr;          // [rows, cols / 32]: the bits of 1.5 * 2^(23 + e)
    int32_t* start = nullptr;         // [rows, cols / 32]: lift - 8 * sum of q
    uint16_t* sum = nullptr;          // [rows, cols / 32, padded to an even number]: bf16 of 2^e * sum of q + rests
    int32_t* outlier = nullptr;       // [rows, outliers_per_row]: their columns, ascending, then kNoColumn
    float* outlier_rest = nullptr;    // [rows, outliers_per_row]: x - q * 2^e
    uint16_t* bf16 = nullptr;         // [rows, bf16_stride]: cols, and a zero if their number is odd
    int64_t bf16_stride = 0;
    float* row_scale = nullptr;       // [rows]
    int32_t* row_zero = nullptr;      // [rows]: within [-128, 127]
    int32_t* row_start = nullptr;     // [rows]: -128 * sum of q
    int32_t* row_rest = nullptr;      // [rows, outliers_per_row]: the rests of a row's outliers
    float* apart = nullptr;           // [rows, kApart]: values of the columns that the matrix multiplies apart, which are 0 in q
    int32_t cols = 0;
    int32_t outliers_per_row = 0;     // outliers_of(cols)
};


// The panels [begin, end) of a product, which may prefetch those from `next` on: its thread will probably compute these next.
struct PanelRange {
    int begin, end, next;
};

// A product with a gate computes the first two; the others are operations on rows. kSwigluClamped takes a gate and its partner alone.
enum class ActivationKind : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kGeluQuick = 3, kRelu = 4, kRelu2 = 5, kSwigluClamped = 6, kTanh = 7, kSigmoid = 8, kElu = 9 };

// Changes of a GEMM's result before it is stored; null pointers are skipped. The residual is added last.
struct Epilogue {
    float* out = nullptr;                   // [rows, ld]
    int64_t ld = 0;
    const float* bias = nullptr;            // [weight rows]
    const float* residual = nullptr;        // [rows, ld]; may be `out`
    bool has_gelu = false;                  // after the bias; of kU8Row alone
    const ActivationKind* gates = nullptr;  // `out` has the gates of the sums, which become activation(gate) * sum; of gemm_gated alone
};

enum class ProbeKind : int32_t { kInt8 = 0, kBf16 = 1, kFloat32 = 2, kBf16Tiles = 3 };

// kInt8: 8-bit integers, keys with a scale per 32 columns and values with one per head. kInt16: keys as 16-bit integers with a scale
// per head, values as bf16. kInt4: rotated (int4.h), keys of 5 bits and values of 4, each with a scale of 8 bits per head; heads
// have a multiple of 32 columns, and there are no latents.
enum class KvFormat : int32_t { kInt8 = 0, kInt16 = 1, kInt4 = 2 };

// Keys and values of one layer, per block and KV head; key = integer * scale, and so is a value of kInt8. First, for every 16
// positions, a tile of keys and scales:
//   kInt8    keys [head_dim / 4][16][4] uint8, 128 more than the integer, their scales [key_groups][16] bf16, the scales of the
//            values [16] bf16
//   kInt16   keys [head_dim / 2][16][2] int16, their scales [16] float32
//   kInt4    keys [head_dim / 8][16][4] bytes, whose low halves are columns 8c.. and high halves 8c+4.., the fifth bits of keys
//            [head_dim / 32][16][4], bit j of byte i being of column 32g+4j+i, codes of their scales [16] and of those of the values [16]
// Then the values as [block_size / 4][head_dim][4] int8, [block_size / 2][head_dim][2] bf16 or [block_size / 4][head_dim / 32][16][4]
// bytes, whose low halves are columns 32g.. and high halves 32g+16... All are laid out for instructions that multiply and add
// pairs, or four bytes. If `num_latent`, a multiple of kGroup, is not 0, no values are stored: they are the keys' first
// `num_latent` columns, whose scales in kInt8 are the value's.
// Strides are in bytes. Always inlined: otherwise the linker might keep a copy compiled for AVX-512.
struct KvLayer {
    uint8_t* data;
    KvFormat format;
    int32_t block_size;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t num_latent = 0;
    int64_t block_stride = 0;  // from a block to the next one: other layers lie between

    // The layout of kInt4 widened to kInt8.
    __attribute__((always_inline)) KvLayer widened() const {
        KvLayer wide = *this;
        wide.format = KvFormat::kInt8;
        return wide;
    }
    __attribute__((always_inline)) int width() const { return format == KvFormat::kInt16 ? 2 : 1; }  // bytes of an interleaved element
    __attribute__((always_inline)) int key_bytes() const { return format == KvFormat::kInt4 ? head_dim * 5 / 8 : head_dim * width(); }
    __attribute__((always_inline)) int value_bytes() const { return format == KvFormat::kInt4 ? head_dim / 2 : head_dim * width(); }
    __attribute__((always_inline)) int value_dim() const { return num_latent > 0 ? num_latent : head_dim; }
    __attribute__((always_inline)) int value_positions() const { return 4 / width(); }  // whose values are beside each other
    __attribute__((always_inline)) int key_groups() const { return (head_dim + kGroup - 1) / kGroup; }
    __attribute__((always_inline)) int scale_width() const {
        return format == KvFormat::kInt8 ? 2 : format == KvFormat::kInt16 ? 4 : 1;
    }
    __attribute__((always_inline)) int num_scales() const {
        return format == KvFormat::kInt8 ? key_groups() + 1 : format == KvFormat::kInt16 ? 1 : 2;
    }
    __attribute__((always_inline)) int scale_bytes() const { return scale_width() * num_scales(); }
    __attribute__((always_inline)) int64_t scales_offset() const { return int64_t{kKvTile} * key_bytes(); }
    __attribute__((always_inline)) int64_t tile_stride() const { return scales_offset() + kKvTile * scale_bytes(); }
    __attribute__((always_inline)) int64_t values_offset() const { return block_size / kKvTile * tile_stride(); }
    __attribute__((always_inline)) int64_t value_stride() const { return num_latent > 0 ? 0 : value_bytes(); }  // of a position
    __attribute__((always_inline)) int64_t head_stride() const { return values_offset() + block_size * value_stride(); }
    __attribute__((always_inline)) int64_t bytes_of_block() const { return num_kv_heads * head_stride(); }  // in this layer
};

// Keys and values of one layer, in some blocks, that this thread will read after a product. While it multiplies it prefetches them, in
// order, as far as there is time: attention is bound by memory, which products leave idle.
struct UpcomingKv {
    KvLayer layer{};
    const int32_t* blocks = nullptr;
    int32_t num_blocks = 0;
};

// A query or key is rounded with the smallest scale for which neither exceeds 16 bits, nor the dot product of both 32.
constexpr float kLargestInteger = 32767.0f;
constexpr float kLargestNorm = 46000.0f;  // its square is below 2^31, with room for the rounding of 576 integers

// One query tile of one row of the step, for query heads that share a KV head.
struct AttentionTask {
    const float* q;              // first query of the tile, at the first of these heads
    float* out;                  // likewise
    int64_t ld;                  // floats from one token to the next, in q and out
    const int32_t* block_table;  // of the row
    int32_t kv_head;
    int32_t num_queries;         // consecutive tokens
    int32_t first_head;          // of all query heads
    int32_t num_heads;
    int32_t first_position;      // of the first query: it sees positions [0, first_position]
    int32_t window;              // 0, or how many last positions a query sees
    float scale;
    float softcap;               // 0 is none
    const float* sinks;          // null, or a score for each query head: e^score is added to its softmax's denominator
    const AttentionTask* next;   // null, or the task that this thread computes next: its keys are prefetched
    // Null, or where the results of single segments go: those of segment i at i * attention_partial_floats.
    // Then only the segments [first_segment, end_segment) are computed and nothing is merged.
    float* partials;
    int32_t first_segment;
    int32_t end_segment;
};

// The most queries of a task in a text: its keys and values are rounded for each task and head. Bits depend on it.
constexpr int kTextQueries = 256;

// Some queries of a text that share a KV head. The text was computed whole: its keys and values are rows of buffers.
struct TextAttentionTask {
    const float *q, *k, *v;   // of the text's first token, at the first of these heads
    float* out;               // likewise
    int64_t q_ld, kv_ld;      // floats from one token to the next: in q and out, and in k and v
    int32_t num_tokens;       // of the text
    int32_t first_query, end_query;
    int32_t heads_per_kv, head_dim;
    bool is_causal;           // a query sees its own position and those before it; else those after it, too
    int32_t window;           // 0, or a query sees positions that are less than that far away
    float scale;
    const float* distances;   // null, or biases of scores, by key position less query position: [heads_per_kv, 2 * num_distances + 1]
    int32_t num_distances;    // larger ones share the last bias
    // Null, or the keys and queries of distances, [pairs of columns, num_relative, 2]; there is one head then, and no mask or window.
    const int16_t *relative_keys, *relative_queries;
    float relative_key_scale, relative_query_scale;
    int32_t num_relative, same_position;
    const float* sinks;       // null, or a score for each of these heads: e^score is added to its softmax's denominator
};

// Most columns of a recurrent state in one task: those of a line (recurrence.h).
constexpr int kStateColumns = 64;
constexpr int kMostTaps = 8;  // positions that a convolution reads

// Some columns of one row of the step in a causal convolution: out[t] = silu(the sum over i of weight[i] * x[t - taps + 1 + i] (+ bias)).
// `from` has the inputs of the taps - 1 positions before the tokens, `to` receives those of the last taps - 1; they may be the same.
struct CausalConvTask {
    const float* x;  // of the first token; `out` may be the same
    float* out;
    int64_t x_ld, out_ld;  // floats from one token to the next
    const float* weight;   // [taps], weight_ld floats from one to the next
    int64_t weight_ld;
    const float* bias;  // or null
    int32_t taps, columns, num_tokens;
    const float* const* from;  // [taps - 1] pointers to `columns` floats
    float* const* to;
};

// Some columns of one head of one row of the step in linear attention (models/program.py), with a state of key_dim rows. Its rows are
// padded to whole vectors of sixteen floats; the padding has no meaning. `from` and `to` may be the same.
struct LinearAttentionTask {
    const float *q, *k;          // of the first token [key_dim]
    const float *decays, *rates; // likewise, one number each
    int64_t ld;                  // floats from one token to the next, in these four
    const float* v;              // likewise [columns]
    float* out;
    int64_t v_ld, out_ld;
    const float* skip;  // null, or a factor: out += *skip * v
    bool is_delta;      // delta rule: v less the state's output for k
    int32_t key_dim, columns, num_tokens;
    const float* const* from;  // [key_dim] pointers to rows
    float* const* to;
};

constexpr int kRanks = 8;            // of a panel of A
constexpr int kScaledCols = 64;      // of A that share one scale
constexpr int kMostRank = 256;       // of an adapter

// What one adapter changes of one matrix [rows, cols]: y = x W^T becomes y + (x A^T) B^T, with A [rank, cols] and B [rows, rank]. The
// factors lie in units anywhere in memory; null: the adapter leaves this matrix alone.
//
// A unit of A is a panel of eight ranks by `unit_cols` columns (of a panel's last unit: the rest), a multiple of 64. A unit of B is
// `unit_panels` panels of 16 rows (the last one: the rest). Ranks, columns and rows that are missing are zero. Beside a quantised matrix
// numbers are w = d * (q - 128), q of 8 bits:
//   A  [cols / 8][8 ranks][8 cols] q, then [cols / 64][8 ranks][2] bf16 d, each twice
//   B  [panels][rank / 4][16 rows][4 ranks] q, then [panels][16] bf16 d
// Beside one of bf16 they are bf16:
//   A  [cols / 4][8 ranks][4 cols]
//   B  [panels][rank][16 rows]
// For an embedding, where a token's column of A is looked up, A and B are bf16, too; a unit of A has `unit_cols` tokens:
//   A  [tokens][rank]
struct LoraFactors {
    bool is_quantised = true;
    int32_t rank = 0;
    int32_t unit_cols = 0, unit_panels = 0;
    const uint8_t* const* a = nullptr;  // [ceil(rank / 8)][ceil(cols / unit_cols)]
    const uint8_t* const* b = nullptr;  // [ceil(panels / unit_panels)]

    // Always inlined, see KvLayer.
    __attribute__((always_inline)) int panels_of_a() const { return (rank + kRanks - 1) / kRanks; }
    __attribute__((always_inline)) int panel_bytes_of_b() const { return is_quantised ? (rank + 3) / 4 * 4 * kPanel : 2 * rank * kPanel; }
};

// x A^T of some rows, between the two products.
struct LoraHidden {
    int32_t ld = 0;           // from a row to the next one, a multiple of 8
    int8_t* q = nullptr;      // beside quantised matrices [rows, ld]: x A^T = scale * q
    float* scale = nullptr;   // [rows]
    int32_t* start = nullptr; // [rows]: -128 * sum of q
    float* values = nullptr;  // beside those of bf16 [rows, ld]
};

struct KernelTable {
    const char* name;
    int32_t attention_pairs;  // most (query, head) pairs of one attention task
    int32_t row8_panels;        // panels side by side in a kU8Row product; `tile_panels` is for other kinds

    // out = x / sqrt(mean(x^2) + eps) * weight over each group of `group` columns; weight is [group]
    void (*rms_norm)(float* out, const float* x, const float* weight, int cols, int group, float eps);
    // out = (x - mean) / sqrt(variance + eps) * weight + bias; a null bias is none
    void (*layer_norm)(float* out, const float* x, const float* weight, const float* bias, int cols, float eps);
    // a's rows [row0, row1) as integers, from x's [rows, cols]; with `norm`, [cols], from x / sqrt(mean(x^2) + eps) * norm
    void (*quantize_rows)(const Activation& a, int64_t row0, int64_t row1, const float* x, const float* norm, float eps);
    // a's rows [row0, row1) with one scale for each row, from x's [rows, cols]. `has_zero`: asymmetric, for values rarely negative: 256
    // integers from the smallest to the largest; else symmetric, outliers apart.
    void (*round_rows)(const Activation& a, int64_t row0, int64_t row1, float* x, bool has_zero, const int32_t* apart);
    // a's row `row` in bf16
    void (*to_bf16_row)(const Activation& a, int64_t row, const float* x);
    // out = row `index` of w, times scale
    void (*embed_row)(float* out, const PackedMatrix& w, int index, float scale);
    // cos and sin are [half]; pairs (i, i + half) of each head
    void (*rope_row)(float* x, const float* cos, const float* sin, int num_heads, int head_dim, int half);
    // Token i of k and v, [count, num_kv_heads * head_dim], to slots[i]; keys less `centre`, unless that is null: [num_kv_heads *
    // head_dim]. A layer of latents has no v: it is not read.
    void (*kv_write_rows)(const KvLayer& kv, const int64_t* slots, int64_t count, const float* k, const float* v,
                          const float* centre);
    void (*gated_row)(float* out, const float* gate, const float* up, int cols, ActivationKind kind);
    void (*activate_row)(float* out, const float* x, int cols, ActivationKind kind);
    // out = a + factor * b
    void (*add_row)(float* out, const float* a, const float* b, int cols, float factor);
    // x = scale * x, and then, if cap > 0, cap * tanh(x / cap)
    void (*cap_row)(float* x, int cols, float scale, float cap);
    // out[i] = x . w[i], of `rows` rows of w [rows, cols]
    void (*dot_rows)(float* out, const float* x, const float* w, int rows, int cols);
    // out = the sum of shares[i] * x[places[i]], in order; x is [., ld], of which `cols` columns count
    void (*weighted_sum)(float* out, const float* x, int64_t ld, const int32_t* places, const float* shares, int count, int cols);

    // how many panels side by side are fastest for so many rows
    int (*tile_panels)(int rows);
    // the most rows of `cols` columns in one task: their activations stay in the second-level cache
    int (*task_rows)(int cols);
    // out[r, panels] = a[r] @ w.T for rows [row0, row1) and a range of panels
    void (*gemm)(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e,
                 const UpcomingKv& upcoming);
    // out = activation(a @ gate.T) * (a @ up.T); weights of equal kind and shape, no bias, no residual
    void (*gemm_gated)(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, PanelRange range,
                       ActivationKind kind, const Epilogue& e, const UpcomingKv& upcoming);
    // h's rows [row0, row1) = x A^T; meanwhile the units of `next`, unless that is null, are fetched into the cache.
    void (*lora_shrink)(const LoraFactors& f, const Activation& x, int row0, int row1, const LoraHidden& h, const LoraFactors* next);
    // out[r, panels] += h[r] B^T for rows [row0, row1) and panels [begin, end); out is [., ld] and has `channels` columns.
    void (*lora_expand)(const LoraFactors& f, const LoraHidden& h, int row0, int row1, int begin, int end, int channels, float* out, int64_t ld);
    // `scratch` is at least attention_scratch_floats(format, head_dim, num_latent) floats, from a cache line on
    void (*attention)(const KvLayer& kv, const AttentionTask& task, float* scratch);
    // Merges the segments of a task that was computed in pieces. All pieces have the same first query and num_queries, and
    // at most attention_pairs pairs.
    void (*attention_merge)(const KvLayer& kv, const AttentionTask& task, float* scratch);
    int64_t (*attention_scratch_floats)(KvFormat format, int head_dim, int num_latent);
    int64_t (*attention_partial_floats)(int num_pairs, int head_dim);
    // `scratch` is at least text_attention_scratch_floats(num_tokens, head_dim) floats, from a cache line on
    void (*text_attention)(const TextAttentionTask& task, float* scratch);
    int64_t (*text_attention_scratch_floats)(int num_tokens, int head_dim);
    void (*causal_conv)(const CausalConvTask& task);
    void (*linear_attention)(const LinearAttentionTask& task);

    // runs `rounds` of multiply-adds in registers; returns the operations (two per multiply-add), or 0 for kBf16Tiles without tiles
    int64_t (*probe_arithmetic)(ProbeKind kind, int64_t rounds);
    // reads `bytes`, a multiple of 512, from `data`, 64-byte aligned
    void (*probe_read)(const uint8_t* data, int64_t bytes);

    // Whether quantised weights multiply rows in bf16, by tiles, instead of groups of integers.
    bool has_tiles = false;
    // The fewest tokens for which a strand (step_planner.h) pays, if its weights come from a cache that threads share: each strand
    // reads them again, and with tiles widens them again, however few its tokens.
    int32_t strand_tokens = 8;
    // c [16][16] += a b, of `k` rows of b, 64 bytes each: one operation on tiles of which a and c have `rows` rows; null without tiles
    void (*tile_product)(int rows, int k, const uint8_t* a, const uint8_t* b, uint8_t* c) = nullptr;

    // Whether a matrix multiplies rows in bf16 (`Activation::bf16`). Always inlined, see KvLayer.
    __attribute__((always_inline)) bool reads_bf16(const PackedMatrix& w) const {
        return w.kind == WeightKind::kBf16 || (has_tiles && w.kind != WeightKind::kU8Row);
    }
};

namespace portable { const KernelTable& kernel_table(); }
#if defined(PENSTOCK_HAVE_X86)
namespace avx2 { const KernelTable& kernel_table(); }
namespace avx2_vnni { const KernelTable& kernel_table(); }
namespace avx512_vnni { const KernelTable& kernel_table(); }
namespace avx512 { const KernelTable& kernel_table(); }
namespace amx { const KernelTable& kernel_table(); }
namespace amx_emulated { const KernelTable& kernel_table(); }
#endif
#if defined(PENSTOCK_HAVE_ARM)
namespace neon { const KernelTable& kernel_table(); }
namespace neon_i8mm { const KernelTable& kernel_table(); }
#endif

}  // namespace penstock
