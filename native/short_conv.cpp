#include "short_conv.h"

#include <algorithm>

#include "bf16.h"

namespace penstock {

namespace {

constexpr int kColumns = 256;  // that are summed up together

// v of the columns [first, first + count) of a token of the step.
void multiply(const EngineShape& shape, const ShortConvLayer& layer, int64_t token, int first, int count, float* v) {
    const float* const b = layer.inputs + token * 3 * shape.state_width + first;
    const float* const u = b + 2 * shape.state_width;
    for (int i = 0; i < count; ++i) v[i] = from_bf16(to_bf16(b[i] * u[i]));
}

}  // namespace

void convolve(const EngineShape& shape, const KvCache& kv, const StepInput& step, const ShortConvLayer& layer, int64_t token, float* out) {
    const int row = step.row_of(token), before = shape.state_columns, width = shape.state_width;
    const int64_t first_token = step.query_start_loc[row];
    const int32_t* const blocks = step.block_tables + step.row_slots[row] * step.table_stride;
    const float* const gate = layer.inputs + token * 3 * width + width;
    for (int first = 0; first < width; first += kColumns) {
        const int count = std::min(kColumns, width - first);
        float v[kColumns], sum[kColumns] = {};
        for (int tap = 0; tap <= before; ++tap) {
            const int64_t source = token - before + tap;
            // By the context, for which the row's block table has blocks: nobody checks that positions agree with it.
            const int64_t position = step.context_lens[row] + source - first_token;
            if (position < 0) continue;
            if (source >= first_token) {
                multiply(shape, layer, source, first, count, v);
            } else {
                const uint16_t* const state = kv.state(blocks[position / shape.block_size], layer.index, position % shape.block_size) + first;
                for (int i = 0; i < count; ++i) v[i] = from_bf16(state[i]);
            }
            const float* const weight = layer.weight + int64_t{tap} * width + first;
            for (int i = 0; i < count; ++i) sum[i] += weight[i] * v[i];
        }
        if (layer.bias) {
            for (int i = 0; i < count; ++i) sum[i] += layer.bias[first + i];
        }
        for (int i = 0; i < count; ++i) out[first + i] = gate[first + i] * sum[i];
    }
}

void keep_state(const EngineShape& shape, KvCache& kv, const StepInput& step, const ShortConvLayer& layer, int64_t token) {
    const int64_t block = step.slot_mapping[token] / shape.block_size, later = token + shape.state_columns;
    const bool is_in_row = later < step.query_start_loc[step.row_of(token) + 1];
    if (is_in_row && step.slot_mapping[later] / shape.block_size == block) return;  // that one takes its place
    uint16_t* const state = kv.state(static_cast<int32_t>(block), layer.index, step.slot_mapping[token] % shape.block_size);
    for (int first = 0; first < shape.state_width; first += kColumns) {
        const int count = std::min(kColumns, shape.state_width - first);
        float v[kColumns];
        multiply(shape, layer, token, first, count, v);
        for (int i = 0; i < count; ++i) state[first + i] = to_bf16(v[i]);
    }
}

}  // namespace penstock
