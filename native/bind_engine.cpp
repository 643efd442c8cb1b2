// The engine in Python: construction call by call, then whole steps without the GIL. Checks the arrays of every step, since a
// wrong index would read or write memory of others; instructions are as the lowering made them, their ids are not checked.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu.h"
#include "engine.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using namespace penstock;

nb::tuple tuple_of(const SampleResult& result);  // bind_sampler.cpp

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_shape(SourceFormat format, int rows, int cols) {
    const int block = float_bytes(format) > 0 ? 1 : block_format(format).groups * kGroup;
    if (rows <= 0 || cols <= 0) throw std::invalid_argument("a matrix has at least one row and one column");
    if (cols % block != 0) {
        throw std::invalid_argument(std::to_string(cols) + " columns are not a multiple of the format's block of " +
                                    std::to_string(block));
    }
}

void check_source(SourceFormat format, int rows, int cols, const Matrix<uint8_t>& data) {
    check_shape(format, rows, cols);
    const auto expected = source_bytes(format, rows, cols), found = static_cast<int64_t>(data.size());
    if (found != expected) {
        throw std::invalid_argument("expected " + std::to_string(expected) + " bytes of data, got " + std::to_string(found));
    }
}

void pack_rows(Engine& self, int matrix, int first_row, const Matrix<uint8_t>& data) {
    const PackedStorage& packed = self.weights().packed(matrix);
    const int64_t first = first_row, rows = static_cast<int64_t>(data.shape(0)), end = first + rows;
    if (first < 0 || first % kPanel != 0 || rows < 1 || end > packed.matrix.rows || (end % kPanel != 0 && end != packed.matrix.rows)) {
        throw std::invalid_argument("rows must begin at a multiple of 16, and end at one or at the matrix's last row");
    }
    if (packed.is_mapped) throw std::invalid_argument("the matrix is packed already");
    check_source(packed.format, static_cast<int>(rows), packed.matrix.cols, data);
    nb::gil_scoped_release release;
    self.pack_rows(matrix, first_row, static_cast<int>(rows), data.data());
}

void check_form(SourceFormat format, int rows, int cols, bool by_row, bool has_apart) {
    check_shape(format, rows, cols);
    if (has_apart && !by_row) throw std::invalid_argument("only matrices `by_row` have columns apart");
    if (by_row && (float_bytes(format) == 0 || cols % kGroup != 0 || cols > kMostRow8Cols)) {
        throw std::invalid_argument("`by_row` needs float weights, a multiple of 32 columns and at most 8,192");
    }
}

int add_matrix(Engine& self, SourceFormat format, int rows, int cols, const std::optional<Matrix<uint8_t>>& data, bool is_partly_read,
               bool by_row, const std::vector<int>& apart) {
    check_form(format, rows, cols, by_row, !apart.empty());
    if (data) check_source(format, rows, cols, *data);
    // Room for it may have to be written to disk, and other models' threads need the interpreter.
    const int matrix = [&] {
        nb::gil_scoped_release release;
        return self.weights().add_matrix(format, rows, cols, is_partly_read, by_row, apart);
    }();
    if (data) pack_rows(self, matrix, 0, *data);
    return matrix;
}

int map_matrix(Engine& self, SourceFormat format, int rows, int cols, int64_t offset, int64_t bytes, bool by_row, bool has_apart) {
    check_form(format, rows, cols, by_row, has_apart);
    return self.weights().map_matrix(format, rows, cols, by_row, has_apart, offset, bytes);
}

// The arrays of a packed matrix, in order; views that keep the engine.
nb::list packed_arrays(nb::handle self, int matrix) {
    const PackedStorage& packed = nb::cast<const Engine&>(self).weights().packed(matrix);
    nb::list arrays;
    for (const auto& [begin, bytes] : packed.parts) {
        arrays.append(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(begin, {static_cast<size_t>(bytes)}, self));
    }
    return arrays;
}

int add_table(Engine& self, SourceFormat format, int rows, int cols, const Matrix<uint8_t>& data) {
    check_source(format, rows, cols, data);
    return self.weights().add_table(format, rows, cols, data.data());
}

Domain domain_of(bool samples) { return samples ? Domain::kSamples : Domain::kTokens; }

void add_linear(Engine& self, const std::vector<std::tuple<int, int, int, int, int>>& ops, bool samples, bool has_gelu,
                const std::vector<int>& sites) {
    Instruction instruction{.kind = InstructionKind::kLinear, .domain = domain_of(samples)};
    if (!sites.empty() && sites.size() != ops.size()) throw std::invalid_argument("there is a site for each product, or none");
    for (const auto& [weight, activation, out, bias, residual] : ops) {
        if (has_gelu && self.weights().packed(weight).matrix.kind != WeightKind::kU8Row) throw std::invalid_argument("products of this kind lack activations");
        const int site = sites.empty() ? -1 : sites[instruction.linears.size()];
        instruction.linears.push_back({weight, activation, out, bias, residual, has_gelu, site});
    }
    self.add_instruction(std::move(instruction));
}

void add_heads(Engine& self, int weight, int activation, int out, int num_heads, int x_columns, int out_columns, bool samples) {
    if (num_heads < 1) throw std::invalid_argument("a product of heads has at least one");
    const LinearOp op{.weight = weight,
                      .activation = activation,
                      .out = out,
                      .num_heads = num_heads,
                      .x_columns = x_columns,
                      .out_columns = out_columns};
    self.add_instruction({.kind = InstructionKind::kLinear, .domain = domain_of(samples), .linears = {op}});
}

void add_gated(Engine& self, int gate, int up, int activation, int out, int kind, bool samples, int gate_site, int up_site) {
    if (kind > static_cast<int>(ActivationKind::kGeluTanh)) throw std::invalid_argument("products with a gate lack this activation");
    const GatedOp op{gate, up, activation, out, static_cast<ActivationKind>(kind), gate_site, up_site};
    self.add_instruction({.kind = InstructionKind::kGated, .domain = domain_of(samples), .gated = op});
}

void add_attention(Engine& self, int q, int out, int layer, int num_heads, float scale, int window, float softcap, int sinks,
                   bool of_samples, bool samples) {
    const AttentionOp op{q, out, layer, num_heads, scale, window, softcap, sinks, of_samples};
    self.add_instruction({.kind = InstructionKind::kAttention, .domain = domain_of(samples), .attention = op});
}

void add_text_attention(Engine& self, int q, int k, int v, int out, int num_heads, int num_kv_heads, int head_dim, float scale, bool is_causal,
                        int window, int distances, int num_distances, std::tuple<int, int, int, int, int> relative, int sinks) {
    const auto [relative_keys, relative_queries, relative_scales, num_relative, same_position] = relative;
    const TextAttentionOp op{q,
                             k,
                             v,
                             out,
                             num_heads,
                             num_kv_heads,
                             head_dim,
                             scale,
                             is_causal,
                             window,
                             distances,
                             num_distances,
                             relative_keys,
                             relative_queries,
                             relative_scales,
                             num_relative,
                             same_position,
                             sinks};
    self.add_instruction({.kind = InstructionKind::kTextAttention, .text_attention = op});
}

void add_causal_conv(Engine& self, int x, int out, int weight, int bias, int taps, int width, int64_t first_line) {
    self.add_instruction({.kind = InstructionKind::kCausalConv, .conv = {x, out, weight, bias, taps, width, first_line}});
}

int define_linear_attention(Engine& self, int x, int steps, int gates, int out, int prepared, int step_bias, int decay, int skip,
                            int num_heads, int num_key_heads, int key_dim, int value_dim, int q_at, int k_at, int v_at, float scale,
                            int q_factor, int k_factor, float min_step, float max_step, int64_t first_line, bool is_tiled) {
    return self.define_linear_attention({x, steps, gates, out, prepared, step_bias, decay, skip, num_heads, num_key_heads, key_dim, value_dim,
                                         q_at, k_at, v_at, scale, q_factor, k_factor, min_step, max_step, first_line, is_tiled});
}

int add_experts(Engine& self, int num_experts, int num_chosen, int width, int x, int input, int router, int router_bias, int selection_bias,
                int inner, int outer, int inner_bias, int outer_bias, int activation, bool is_sigmoid, bool is_renormalised,
                float share_factor, int share_scale, bool samples, int num_groups, int num_chosen_groups, int num_group_scores) {
    const ExpertsLayer layer{.num_experts = num_experts,
                             .num_chosen = num_chosen,
                             .width = width,
                             .x = x,
                             .input = input,
                             .router = router,
                             .router_bias = router_bias,
                             .selection_bias = selection_bias,
                             .inner = inner,
                             .outer = outer,
                             .inner_bias = inner_bias,
                             .outer_bias = outer_bias,
                             .activation = static_cast<ActivationKind>(activation),
                             .is_sigmoid = is_sigmoid,
                             .is_renormalised = is_renormalised,
                             .share_factor = share_factor,
                             .share_scale = share_scale,
                             .num_groups = num_groups,
                             .num_chosen_groups = num_chosen_groups,
                             .num_group_scores = num_group_scores};
    return self.add_experts(layer, domain_of(samples));
}

Adapters& adapters_of(Engine& self) {
    if (self.adapters() == nullptr) throw std::invalid_argument("the engine computes no adapters");
    return *self.adapters();
}

int add_adapter_site(Engine& self, int matrix, int order, bool samples, int slot) {
    const PackedMatrix& w = self.weights().packed(matrix).matrix;
    if (w.kind == WeightKind::kU8Row) throw std::invalid_argument("adapters change no matrix with a scale for each row");
    AdapterSite site{w.rows, w.cols, !self.kernels().reads_bf16(w), false, {}};
    if (order >= 0) site.order.assign(self.weights().order(order), self.weights().order(order) + w.cols);
    return adapters_of(self).add_site(std::move(site), domain_of(samples), slot);
}

void check_block(const Engine& self, int block) {
    if (block <= 0 || block >= self.shape().num_blocks) throw std::invalid_argument("no such block");
}

void place_adapter(Engine& self, int64_t number, const AdapterImage& image, const std::vector<int32_t>& blocks) {
    for (const int32_t block : blocks) check_block(self, block);
    Adapters& adapters = adapters_of(self);
    nb::gil_scoped_release release;
    adapters.place(number, image, blocks);
}

struct Arrays {
    Vector<int32_t> row_slots, query_start_loc, context_lens, token_ids, positions;
    Vector<int64_t> slot_mapping;
    Matrix<int32_t> block_tables;
};

StepInput make_input(const Arrays& a, const Vector<int32_t>& logit_tokens) {
    StepInput in{};
    in.num_rows = static_cast<int32_t>(a.row_slots.size());
    in.num_tokens = static_cast<int32_t>(a.token_ids.size());
    in.num_logits = static_cast<int32_t>(logit_tokens.size());
    in.row_slots = a.row_slots.data();
    in.query_start_loc = a.query_start_loc.data();
    in.context_lens = a.context_lens.data();
    in.token_ids = a.token_ids.data();
    in.positions = a.positions.data();
    in.slot_mapping = a.slot_mapping.data();
    in.block_tables = a.block_tables.data();
    in.table_stride = static_cast<int64_t>(a.block_tables.shape(1));
    in.logit_tokens = logit_tokens.data();
    return in;
}

template <typename T>
void check_all(const Vector<T>& values, int64_t end, const char* message) {
    for (size_t i = 0; i < values.size(); ++i) {
        if (values.data()[i] < 0 || values.data()[i] >= end) throw std::invalid_argument(message);
    }
}

// That the row's block table names blocks for all its positions.
void check_row(const EngineShape& shape, const Arrays& a, size_t row) {
    const int32_t slot = a.row_slots.data()[row];
    const int64_t queries = int64_t{a.query_start_loc.data()[row + 1]} - a.query_start_loc.data()[row];
    const int64_t context = a.context_lens.data()[row];
    if (slot < 0 || static_cast<size_t>(slot) >= a.block_tables.shape(0)) throw std::invalid_argument("no such block table");
    if (queries < 0 || context < 0) throw std::invalid_argument("a row has a negative number of tokens");
    const int64_t width = static_cast<int64_t>(a.block_tables.shape(1));
    const int64_t blocks = (context + queries + shape.block_size - 1) / shape.block_size;
    if (blocks > width) throw std::invalid_argument("a row has more tokens than its block table has room for");
    const int32_t* table = a.block_tables.data() + slot * width;
    for (int64_t i = 0; i < blocks; ++i) {
        if (table[i] < 0 || table[i] >= shape.num_blocks) throw std::invalid_argument("no such block");
    }
}

void check_step(const Engine& self, const Arrays& a, const Vector<int32_t>& logit_tokens) {
    const EngineShape& shape = self.shape();
    const size_t rows = a.row_slots.size(), tokens = a.token_ids.size();
    if (a.query_start_loc.size() != rows + 1 || a.context_lens.size() != rows || a.positions.size() != tokens ||
        a.slot_mapping.size() != tokens) {
        throw std::invalid_argument("step arrays disagree about the number of rows or tokens");
    }
    if (tokens == 0 || tokens > static_cast<size_t>(shape.max_step_tokens) ||
        logit_tokens.size() > static_cast<size_t>(shape.max_logits())) {
        throw std::invalid_argument("a step of this size is beyond the engine's capacity");
    }
    for (size_t i = 0; i < rows; ++i) check_row(shape, a, i);
    if (a.query_start_loc.data()[0] != 0 || a.query_start_loc.data()[rows] != static_cast<int32_t>(tokens)) {
        throw std::invalid_argument("the rows' queries are not all the tokens");
    }
    const int64_t num_slots = int64_t{shape.num_blocks} * shape.block_size;
    check_all(a.token_ids, shape.vocab_size, "token id outside the vocabulary");
    check_all(a.slot_mapping, num_slots, "slot outside the KV cache");
    check_all(a.positions, self.num_positions(), "position outside the table of positions");
    check_all(logit_tokens, static_cast<int64_t>(tokens), "logits are wanted of a token that is not in the step");
    if (!std::is_sorted(logit_tokens.data(), logit_tokens.data() + logit_tokens.size())) {
        throw std::invalid_argument("logits are not wanted in the order of their tokens");
    }
}

// Rows go on from their own blocks, or begin at position 0. `blocks`: [slots, num_state_blocks]
std::vector<RowState> states_of(const Engine& self, const Arrays& a, const Matrix<int32_t>& blocks) {
    const int64_t num_blocks = self.recurrence().num_blocks();
    if (blocks.shape(0) != a.block_tables.shape(0) || static_cast<int64_t>(blocks.shape(1)) != num_blocks) {
        throw std::invalid_argument("a state has too few or too many blocks");
    }
    for (size_t i = 0; i < blocks.size(); ++i) check_block(self, blocks.data()[i]);
    std::vector<RowState> states;
    for (size_t row = 0; row < a.row_slots.size(); ++row) {
        const int32_t* const own = blocks.data() + a.row_slots.data()[row] * num_blocks;
        states.push_back({own, a.context_lens.data()[row] > 0 ? own : nullptr});
    }
    return states;
}

void logits_step(Engine& self, const Vector<int32_t>& row_slots, const Vector<int32_t>& query_start_loc,
                 const Vector<int32_t>& context_lens, const Vector<int32_t>& token_ids, const Vector<int32_t>& positions,
                 const Vector<int64_t>& slot_mapping, const Matrix<int32_t>& block_tables, const Vector<int32_t>& logit_tokens,
                 nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out, int64_t adapter,
                 const std::optional<Matrix<int32_t>>& state_blocks) {
    const Arrays arrays{row_slots, query_start_loc, context_lens, token_ids, positions, slot_mapping, block_tables};
    check_step(self, arrays, logit_tokens);
    if (self.logits_width() == 0) throw std::invalid_argument("the engine has no logits");
    if (out.shape(0) != logit_tokens.size() || static_cast<int64_t>(out.shape(1)) != self.logits_width()) {
        throw std::invalid_argument("`out` must be [len(logit_tokens), vocab_size]");
    }
    if (adapter != 0 && self.adapters() == nullptr) throw std::invalid_argument("the engine computes no adapters");
    StepInput in = make_input(arrays, logit_tokens);
    const std::vector<int64_t> adapters(block_tables.shape(0), adapter);
    in.adapter_of_slot = adapters.data();
    std::vector<RowState> states;
    if (state_blocks) states = states_of(self, arrays, *state_blocks), in.row_states = states.data();
    nb::gil_scoped_release release;
    self.run_step(in);
    std::memcpy(out.data(), self.logits(), out.size() * sizeof(float));
}

nb::tuple logprobs(const Engine& self, int index) { return tuple_of(self.samples().at(index)); }

MemoryNodes mask_of(const std::vector<int>& nodes) {
    MemoryNodes mask = 0;
    for (const int node : nodes) {
        if (node < 0 || node > 63) throw std::invalid_argument("a memory node is one of 0 to 63");
        mask |= MemoryNodes{1} << node;
    }
    return mask;
}

int spreading_error(const std::vector<int>& nodes) {
    const Memory memory = allocate_huge(1, 0);
    return spread(memory.get(), memory.get_deleter().mapped_bytes, mask_of(nodes));
}

const char* name_of(const Instruction* instruction) {
    if (!instruction) return "draw";
    switch (instruction->kind) {
        case InstructionKind::kRows: return "rows";
        case InstructionKind::kLinear: return "linear";
        case InstructionKind::kGated: return "gated";
        case InstructionKind::kAttention: return "attention";
        case InstructionKind::kExperts: return "experts";
        case InstructionKind::kTextAttention: return "text attention";
        case InstructionKind::kCausalConv: return "convolution";
        case InstructionKind::kLinearAttention: return "linear attention";
    }
    return "";
}

using StageTuple = std::tuple<int, const char*, int, int, int, int>;

std::vector<StageTuple> stages(const Engine& self) {
    const StepPlanner& planner = self.planner();
    std::vector<StageTuple> all;
    for (int i = 0; i < static_cast<int>(planner.last().stages.size()); ++i) {
        const Stage& stage = planner.last().stages[i];
        const int strand = planner.is_joint(i) ? -1 : i / planner.num_own();
        all.emplace_back(strand, name_of(self.instruction_of(i)), stage.num_tasks, stage.grain, stage.row_blocks, stage.members);
    }
    return all;
}

void check_content(const Engine& self, size_t bytes) {
    if (bytes != static_cast<size_t>(self.kv().block_bytes())) throw std::invalid_argument("this is not as large as a block");
}

void read_block(const Engine& self, int block, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
    check_block(self, block);
    check_content(self, out.size());
    nb::gil_scoped_release release;
    self.kv().read_block(block, out.data());
}

void write_block(Engine& self, int block, const Vector<uint8_t>& content) {
    check_block(self, block);
    check_content(self, content.size());
    nb::gil_scoped_release release;
    self.kv().write_block(block, content.data());
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> buffer(nb::handle_t<Engine> self, int id) {
    const Engine::View view = nb::cast<Engine&>(self).buffer(id);
    return {view.data, {static_cast<size_t>(view.rows), static_cast<size_t>(view.width)}, self};
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> kv_memory(nb::handle_t<Engine> self) {
    Engine& engine = nb::cast<Engine&>(self);
    const auto bytes = static_cast<size_t>(engine.kv().bytes());
    return {engine.kv().data(), {bytes}, self};
}

}  // namespace

void bind_engine(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const DiskError& error) {
            PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
        }
    });
    m.def("usable_variants", &usable_variants, "Kernel variants of this build that this machine can run, best first.");
    m.def("emulated_variants", &emulated_variants, "Those that stand for what this machine lacks: for tests, as they are slow.");
    m.def("why_no_tiles", &why_no_tiles, "Why tiles (AMX) that the processor has can't be used; empty if they can, or if it has none.");

    nb::enum_<SourceFormat>(m, "SourceFormat")
        .value("Q4_0", SourceFormat::kQ4_0)
        .value("Q4_1", SourceFormat::kQ4_1)
        .value("Q8_0", SourceFormat::kQ8_0)
        .value("BF16", SourceFormat::kBf16)
        .value("Q5_0", SourceFormat::kQ5_0)
        .value("Q5_1", SourceFormat::kQ5_1)
        .value("Q4_K", SourceFormat::kQ4_K)
        .value("Q5_K", SourceFormat::kQ5_K)
        .value("Q6_K", SourceFormat::kQ6_K)
        .value("IQ4_NL", SourceFormat::kIq4Nl)
        .value("IQ4_XS", SourceFormat::kIq4Xs)
        .value("F16", SourceFormat::kF16)
        .value("F32", SourceFormat::kF32)
        .value("Q2_K", SourceFormat::kQ2_K)
        .value("Q3_K", SourceFormat::kQ3_K)
        .value("Q1_0", SourceFormat::kQ1_0)
        .value("Q2_0", SourceFormat::kQ2_0)
        .value("TQ1_0", SourceFormat::kTq1_0)
        .value("TQ2_0", SourceFormat::kTq2_0)
        .value("IQ1_S", SourceFormat::kIq1S)
        .value("IQ1_M", SourceFormat::kIq1M)
        .value("IQ2_XXS", SourceFormat::kIq2Xxs)
        .value("IQ2_XS", SourceFormat::kIq2Xs)
        .value("IQ2_S", SourceFormat::kIq2S)
        .value("IQ3_XXS", SourceFormat::kIq3Xxs)
        .value("IQ3_S", SourceFormat::kIq3S)
        .value("MXFP4", SourceFormat::kMxfp4)
        .value("NVFP4", SourceFormat::kNvfp4);

    nb::enum_<KvFormat>(m, "KvFormat", "How keys and values are stored; see kernels.h.")
        .value("INT8", KvFormat::kInt8)
        .value("INT16", KvFormat::kInt16)
        .value("INT4", KvFormat::kInt4);

    nb::enum_<RowOpKind>(m, "RowOpKind")
        .value("EMBED", RowOpKind::kEmbed)
        .value("ANGLES", RowOpKind::kAngles)
        .value("RMS_NORM", RowOpKind::kRmsNorm)
        .value("QUANTIZE", RowOpKind::kQuantize)
        .value("TO_BF16", RowOpKind::kToBf16)
        .value("ROPE", RowOpKind::kRope)
        .value("KV_WRITE", RowOpKind::kKvWrite)
        .value("GATED", RowOpKind::kGated)
        .value("ADD", RowOpKind::kAdd)
        .value("GATHER", RowOpKind::kGather)
        .value("LOOKUP", RowOpKind::kLookup)
        .value("RESIZE_HEADS", RowOpKind::kResizeHeads)
        .value("GATHER_COLUMNS", RowOpKind::kGatherColumns)
        .value("SUM_EXPERTS", RowOpKind::kSumExperts)
        .value("LAYER_NORM", RowOpKind::kLayerNorm)
        .value("ACTIVATE", RowOpKind::kActivate)
        .value("LOOKUP_POSITION", RowOpKind::kLookupPosition)
        .value("SHORT_CONV", RowOpKind::kShortConv)
        .value("KEEP_STATE", RowOpKind::kKeepState)
        .value("ADD_TYPE", RowOpKind::kAddType)
        .value("GATHER_FIRST", RowOpKind::kGatherFirst)
        .value("MEAN", RowOpKind::kMean)
        .value("NORMALISE", RowOpKind::kNormalise)
        .value("ROUND", RowOpKind::kRound)
        .value("SHRINK", RowOpKind::kShrink)
        .value("ADAPT_EMBEDDING", RowOpKind::kAdaptEmbedding)
        .value("SCALE", RowOpKind::kScale)
        .value("PREPARE_STATE", RowOpKind::kPrepareState)
        .value("COLUMNS", RowOpKind::kColumns)
        .value("PLACE_HEADS", RowOpKind::kPlaceHeads)
        .value("SPARSE", RowOpKind::kSparse);

    nb::class_<RowOp>(m, "RowOp", "One operation on one row; the fields that a kind uses are in instructions.h.")
        .def("__init__",
             [](RowOp* self, RowOpKind kind, int out, int x, int y, int weight, int n, int head_dim, float value) {
                 new (self) RowOp{kind, out, x, y, weight, n, head_dim, value};
             },
             "kind"_a, nb::kw_only(), "out"_a = -1, "x"_a = -1, "y"_a = -1, "weight"_a = -1, "n"_a = 0, "head_dim"_a = 0,
             "value"_a = 0.0f);

    m.def("spreading_error", &spreading_error, "memory_nodes"_a,
          "0 if the system spreads memory over these nodes, else its reason not to, as errno has it.");

    nb::class_<Team>(m, "Team", "Threads that compute together, of one engine or of several, whose steps then take turns.")
        .def("__init__", [](Team* self, int num_threads, const std::vector<int>& cpus) { new (self) Team(num_threads, cpus); }, "num_threads"_a,
             "cpus"_a = std::vector<int>{},
             "Thread i stays on the i-th of `cpus`, but for the first, which is the caller's. RuntimeError for one that the process may not use.")
        .def_prop_ro("num_threads", &Team::size)
        .def("is_contested", &Team::is_contested, "account"_a, "window_ns"_a,
             "Whether another account had or wanted a turn within so many nanoseconds.");

    nb::class_<Account>(m, "Account", "One who takes turns on one team, with a share of its time relative to those of others.")
        .def(nb::init<double>(), "share"_a = 1.0, "ValueError for a share below 0.001 or above 1000.")
        .def_prop_ro("used_ns", &Account::used_ns, "The time that it had in all.");

    nb::class_<Turns>(m, "Turns", "The choice of who is next, with instants of the caller's: for tests. A team has its own.")
        .def(nb::init<>())
        .def("ask", &Turns::ask, "account"_a, "now_ns"_a, nb::keep_alive<1, 2>(), "The number of the claim.")
        .def("take", &Turns::take, "account"_a, "now_ns"_a, nb::keep_alive<1, 2>(),
             "Gives it the turn if nobody has it, wants it or has it kept. Whether it was given; else nothing has changed.")
        .def("call", &Turns::call, "now_ns"_a, "Gives the turn to the claim that is next, unless somebody has it or it is kept.")
        .def("leave", [](Turns& self, int64_t now_ns) {
            if (self.holder() == 0) throw std::invalid_argument("nobody has the turn");
            self.leave(now_ns);
        }, "now_ns"_a)
        .def("is_contested", &Turns::is_contested, "account"_a, "since_ns"_a)
        .def_prop_ro("holder", &Turns::holder, "The claim that has the turn; 0: none.")
        .def_prop_ro("kept_until_ns", &Turns::kept_until_ns, "When to call again, if nobody has the turn.");

    nb::class_<Engine>(m, "Engine", "Packed weights, KV cache and instructions of one model; runs a step in one call.")
        .def("__init__",
             [](Engine* self, const std::vector<std::vector<int>>& kv_shapes, int vocab_size, int num_blocks, int block_size,
                int max_rows, int max_step_tokens, std::shared_ptr<Team> team, const std::string& variant, KvFormat kv_format,
                int num_states, int state_columns, int state_width, std::shared_ptr<Account> account, int max_scored,
                const std::vector<int>& memory_nodes, int64_t num_state_lines, int state_line, int kv_fd) {
                 EngineShape shape{{},        vocab_size, num_blocks,    block_size,  max_rows,   max_step_tokens,
                                   kv_format, num_states, state_columns, state_width, max_scored, mask_of(memory_nodes),
                                   num_state_lines, state_line, kv_fd};
                 for (const std::vector<int>& kv : kv_shapes) {
                     if (kv.size() != 2 && kv.size() != 3) throw std::invalid_argument("a layer's keys and values have two or three sizes");
                     shape.kv_shapes.push_back({kv[0], kv[1], kv.size() == 3 ? kv[2] : 0});
                 }
                 new (self) Engine(shape, std::move(team), std::move(account), variant);
             },
             nb::kw_only(), "kv_shapes"_a, "vocab_size"_a, "num_blocks"_a, "block_size"_a, "max_rows"_a, "max_step_tokens"_a, "team"_a, "variant"_a = "", "kv_format"_a = KvFormat::kInt8,
             "num_states"_a = 0, "state_columns"_a = 0, "state_width"_a = 0, "account"_a = nb::none(), "max_scored"_a = 0,
             "memory_nodes"_a = std::vector<int>{}, "num_state_lines"_a = 0, "state_line"_a = 0, "kv_fd"_a = -1,
             "`kv_shapes`: (num_kv_heads, head_dim) of each layer with keys and values, or (1, head_dim, num_latent) of one with latents.\n"
             "It takes turns on the team as `account`, by default as one of its own. Weights and KV cache are spread over the memory nodes.\n"
             "`kv_fd`: an empty file in memory where the KV cache lies, so that other processes can read it. -1: none.")
        .def("keep_partly_read_in", [](Engine& self, int fd) { self.weights().keep_partly_read_in(fd); }, "fd"_a,
             "From now on matrices that `is_partly_read` lie in this empty file, which may be closed then. OSError if the disk fails.")
        .def("add_matrix", &add_matrix, "format"_a, "rows"_a, "cols"_a, "data"_a = nb::none(), "is_partly_read"_a = false,
             "by_row"_a = false, "apart"_a = std::vector<int>{},
             "Packs a matrix from its file's bytes (uint8 [rows, bytes per row]); without them, makes room for it, and `pack_rows` brings "
             "them. Returns its id. `is_partly_read`: a step needs only a part of it. `by_row`: floats become integers "
             "with a scale for each row; then `apart` may name four columns that stay floats. OSError if the disk has no room.")
        .def("pack_rows", &pack_rows, "matrix"_a, "first_row"_a, "data"_a,
             "Packs some rows of a matrix (uint8 [rows, bytes per row]): whole panels of 16, or up to its last row.")
        .def("map_file", [](Engine& self, int fd) { self.weights().map_file(fd); }, "fd"_a,
             "Matrices of `map_matrix` lie in this file, which may be closed then. OSError if it can't be mapped.")
        .def("map_matrix", &map_matrix, "format"_a, "rows"_a, "cols"_a, "offset"_a, "bytes"_a, "by_row"_a = false, "has_apart"_a = false,
             "A matrix whose packed arrays lie in the mapped file from `offset` on, each padded to a multiple of 64 bytes; returns its id.")
        .def("packed_arrays", &packed_arrays, "matrix"_a, "The packed arrays of a matrix, in order: read-only views, uint8.")
        .def("add_table", &add_table, "format"_a, "rows"_a, "cols"_a, nb::arg("data").noconvert(), nb::keep_alive<1, 5>(),
             "A matrix of which single rows are read: not packed, not copied, kept alive; returns its id for LOOKUP.")
        .def("add_vector",
             [](Engine& self, const Vector<float>& v) { return self.weights().add_vector(v.data(), static_cast<int64_t>(v.size())); })
        .def("add_order",
             [](Engine& self, const Vector<int32_t>& v) { return self.weights().add_order(v.data(), static_cast<int64_t>(v.size())); })
        .def("add_integers",
             [](Engine& self, const Vector<int16_t>& v) { return self.weights().add_integers(v.data(), static_cast<int64_t>(v.size())); })
        .def("add_rope",
             [](Engine& self, const Vector<float>& inv_freq, float factor, float growth, int growth_len, bool samples) {
                 return self.add_rope(inv_freq.data(), static_cast<int>(inv_freq.size()), factor, growth, growth_len, samples);
             },
             "inv_freq"_a, "factor"_a, "growth"_a = 0.0f, "growth_len"_a = 1, "samples"_a = false)
        .def("add_buffer", &Engine::add_buffer, "width"_a, "per_sample"_a)
        .def("buffer", &buffer, "id"_a, "A buffer's rows, [largest step's rows, width]: no copy. The engine lives as long.")
        .def_prop_ro("has_tiles", [](const Engine& self) { return self.kernels().has_tiles; },
                     "Whether quantised weights multiply activations in bf16, by tiles; else in groups of integers.")
        .def("add_activation", &Engine::add_activation, "cols"_a, "quantised"_a, "per_sample"_a, "by_row"_a = false)
        .def("add_rows",
             [](Engine& self, const std::vector<RowOp>& ops, bool samples) {
                 self.add_instruction({.kind = InstructionKind::kRows, .domain = domain_of(samples), .rows = ops});
             },
             "ops"_a, "samples"_a)
        .def("add_linear", &add_linear, "ops"_a, "samples"_a, "has_gelu"_a = false, "sites"_a = std::vector<int>{},
             "(weight, activation, out, bias, residual) each; -1 is none. `has_gelu`: of the sums, of matrices `by_row` alone.\n"
             "`sites`: one for each, where adapters change them, after SHRINK of it.")
        .def("add_heads", &add_heads, nb::kw_only(), "weight"_a, "activation"_a, "out"_a, "num_heads"_a, "x_columns"_a, "out_columns"_a, "samples"_a,
             "A product for each head, whose matrices are parts of one: see LinearOp in instructions.h.")
        .def("add_gated", &add_gated, "gate"_a, "up"_a, "activation"_a, "out"_a, "kind"_a, "samples"_a, "gate_site"_a = -1, "up_site"_a = -1)
        .def("add_attention", &add_attention, "q"_a, "out"_a, "layer"_a, "num_heads"_a, "scale"_a, "window"_a, "softcap"_a,
             "sinks"_a = -1, "of_samples"_a = false, "samples"_a = false,
             "`of_samples`: what comes out for other tokens has no meaning. `samples`: q and out have a row for each sample.")
        .def("add_text_attention", &add_text_attention, nb::kw_only(), "q"_a, "k"_a, "v"_a, "out"_a, "num_heads"_a, "num_kv_heads"_a,
             "head_dim"_a, "scale"_a, "is_causal"_a, "window"_a, "distances"_a, "num_distances"_a,
             "relative"_a = std::make_tuple(-1, -1, -1, 0, 0), "sinks"_a = -1,
             "Attention within each text, which a step computes whole. The fields are those of instructions.h.")
        .def("add_experts", &add_experts, nb::kw_only(), "num_experts"_a, "num_chosen"_a, "width"_a, "x"_a, "input"_a, "router"_a,
             "router_bias"_a, "selection_bias"_a, "inner"_a, "outer"_a, "inner_bias"_a, "outer_bias"_a, "activation"_a, "is_sigmoid"_a,
             "is_renormalised"_a, "share_factor"_a, "share_scale"_a, "samples"_a, "num_groups"_a = 0, "num_chosen_groups"_a = 0,
             "num_group_scores"_a = 1,
             "A mixture of experts but for the sum, SUM_EXPERTS of the id that it returns. The fields are those of instructions.h.")
        .def("add_causal_conv", &add_causal_conv, nb::kw_only(), "x"_a, "out"_a, "weight"_a, "bias"_a, "taps"_a, "width"_a, "first_line"_a,
             "A convolution with a state in blocks of its own. The fields are those of instructions.h.")
        .def("define_linear_attention", &define_linear_attention, nb::kw_only(), "x"_a, "steps"_a, "gates"_a, "out"_a, "prepared"_a,
             "step_bias"_a, "decay"_a, "skip"_a, "num_heads"_a, "num_key_heads"_a, "key_dim"_a, "value_dim"_a, "q_at"_a, "k_at"_a, "v_at"_a,
             "scale"_a, "q_factor"_a, "k_factor"_a, "min_step"_a, "max_step"_a, "first_line"_a, "is_tiled"_a,
             "Returns the id of linear attention, for PREPARE_STATE and `add_linear_attention` after it. The fields are those of instructions.h.")
        .def("add_linear_attention", &Engine::add_linear_attention, "id"_a)
        .def("settle", &Engine::settle, nb::call_guard<nb::gil_scoped_release>(),
             "After the last weight: small pages that hold weights become huge ones, in the background. OSError if the disk fails.")
        .def("use_small_pages", [](Engine& self) { self.weights().use_small_pages(); }, "From now on, as if huge pages were dear: for tests.")
        .def_prop_ro("small_page_bytes", [](const Engine& self) { return self.weights().small_page_bytes(); }, "Bytes of weights still in small pages, which `settle` replaces in the background.")
        .def("enable_adapters", &Engine::enable_adapters, "max_rank"_a, "Rows may have adapters; before anything else.")
        .def("add_adapter_site", &add_adapter_site, "matrix"_a, "order"_a, "samples"_a, "slot"_a,
             "What adapters may change: a product with this matrix, of columns in this order (-1: as they are). Returns the id of the site.\n"
             "`slot` tells apart products of one instruction.")
        .def("add_embedding_site",
             [](Engine& self, int width, int vocab_size) { return adapters_of(self).add_site({width, vocab_size, false, true, {}}, Domain::kTokens, 0); },
             "width"_a, "vocab_size"_a, "The same for an embedding, which ADAPT_EMBEDDING of it follows.")
        .def_prop_ro("adapter_format", [](Engine& self) { return adapters_of(self).format(); }, "Packs adapters for this engine.")
        .def("place_adapter", &place_adapter, "number"_a, "image"_a, "blocks"_a, "Puts an adapter into blocks; rows may have it from now on.")
        .def("drop_adapter", [](Engine& self, int64_t number) { adapters_of(self).drop(number); }, "number"_a)
        .def("set_logits", &Engine::set_logits, "buffer"_a, "scale"_a = 1.0f, "cap"_a = 0.0f,
             "Logits are multiplied by `scale`, then capped; `cap` 0 is none.")
        .def("name_logits",
             [](Engine& self, const Vector<int32_t>& tokens) { self.name_logits({tokens.data(), tokens.data() + tokens.size()}); }, "tokens"_a,
             "The token of each logit, for logits of a part of the vocabulary.")
        .def("set_states", &Engine::set_states, "buffer"_a, "per_sample"_a, "The buffer with the answers to texts.")
        .def("use_all_members", &Engine::use_all_members, "From now on all threads take part in every step, whether that pays or not: for tests.")
        .def("poison_buffers", &Engine::poison_buffers, "Fills all buffers with NaN, so that a test sees any use of what no step has written.")
        .def("set_sampling", &Engine::set_sampling, "slot"_a, "sampling"_a)
        .def("logits_step", &logits_step, "row_slots"_a, "query_start_loc"_a, "context_lens"_a, "token_ids"_a, "positions"_a,
             "slot_mapping"_a, "block_tables"_a, "logit_tokens"_a, nb::arg("out").noconvert(), "adapter"_a = 0, "state_blocks"_a = nb::none(),
             "Runs one step without sampling, of rows with one adapter, and copies the logits of `logit_tokens` into `out`. `state_blocks`: of\n"
             "each slot's recurrent state, [slots, num_state_blocks]; None: rows begin without one, and none is kept.")
        .def("logprobs", &logprobs, "index"_a, "(token, logprob, rank, [(id, logprob), ...]) of the last step's sample.")
        .def("copy_block",
             [](Engine& self, int from, int to) {
                 check_block(self, from);
                 check_block(self, to);
                 self.kv().copy_block(from, to);
             })
        .def_prop_ro("kv_memory", &kv_memory, "All blocks, one after the other, as bytes: [num_blocks * block_bytes]. The engine lives as long.")
        .def("read_block", &read_block, "block"_a, nb::arg("out").noconvert(), "Copies a block of all layers.")
        .def("write_block", &write_block, "block"_a, nb::arg("content").noconvert(), "Puts back what `read_block` gave.")
        .def("poison_block",
             [](Engine& self, int block, int first) {
                 check_block(self, block);
                 if (first < 0) throw std::invalid_argument("no such position");
                 self.kv().poison_block(block, first);
             },
             "block"_a, "first"_a = 0, "Fills a block's positions from `first` on with NaN, so that a test sees any use of them.")
        .def("poison_state",
             [](Engine& self, int block) {
                 check_block(self, block);
                 std::fill_n(self.kv().numbers(block), self.kv().block_bytes() / static_cast<int64_t>(sizeof(float)), std::nanf(""));
             },
             "block"_a, "Fills a block of a row's state with NaN, for the same purpose.")
        .def("times",
             [](const Engine& self) {
                 const StepTimes t = self.times();
                 return std::make_tuple(t.rows_ns, t.linear_ns, t.attention_ns, t.sampling_ns);
             },
             "(rows, linear, attention, sampling) nanoseconds of the last step: the mean over the threads that took part. For the rest of it they waited.")
        .def_prop_ro("is_computing", &Engine::is_computing, "Whether the team computes a step that was begun.")
        .def("abandon_step", &Engine::abandon_step, nb::call_guard<nb::gil_scoped_release>(), "End such a step; its tokens have no meaning.")
        .def_prop_ro("waited_ns", &Engine::waited_ns, "For how long the last step waited for its turn on the team.")
        .def_prop_ro("variant", [](const Engine& self) { return std::string(self.variant()); })
        .def_prop_ro("num_threads", &Engine::num_threads)
        .def_prop_ro("num_members", [](const Engine& self) { return self.planner().num_members(); }, "Threads that took part in the last step.")
        .def_prop_ro("num_strands", &Engine::num_strands, "Of the last step: how many groups of its tokens went through the layers by themselves.")
        .def_prop_ro("stages", &stages,
                     "Of the last step: (strand or -1 of all together, instruction, tasks, grain, row blocks, members that share it) each.")
        .def("fetched_blocks",
             [](const Engine& self, int strand, int layer) {
                 if (strand < 0 || strand >= self.num_strands()) throw std::invalid_argument("no such strand");
                 if (layer < 0 || layer >= self.shape().num_layers()) throw std::invalid_argument("no such layer");
                 return self.fetched_blocks(strand, layer);
             },
             "strand"_a, "layer"_a, "Of the last step: blocks that a strand's products were to fetch for the attention of one layer.")
        .def_prop_ro("weight_bytes", [](const Engine& self) { return self.weights().bytes(); })
        .def_prop_ro("file_bytes", [](const Engine& self) { return self.weights().file_bytes(); }, "Those of the weights that lie in a file.")
        .def_prop_ro("experts_bytes", [](const Engine& self) { return self.experts().bytes(); },
                     "Memory for the pairs of a step's tokens and their experts.")
        .def_prop_ro("num_state_blocks", [](const Engine& self) { return self.recurrence().num_blocks(); },
                     "Blocks that a row's recurrent state takes, if it lies in blocks of its own.")
        .def_prop_ro("kv_bytes", [](const Engine& self) { return self.kv().bytes(); })
        .def_prop_ro("block_bytes", [](const Engine& self) { return self.kv().block_bytes(); });
}
