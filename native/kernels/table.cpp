// The table of one variant.

#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

const KernelTable& kernel_table() {
    static constexpr KernelTable table = {
        PENSTOCK_VARIANT, kAttentionTaskPairs, kRow8Panels, rms_norm, layer_norm, quantize_rows, round_rows, to_bf16_row, embed_row, rope_row, kv_write_rows,
        gated_row, activate_row, add_row, cap_row, dot_rows, weighted_sum, tile_panels, task_rows, gemm, gemm_gated, lora_shrink, lora_expand, attention, attention_merge, attention_scratch_floats,
        attention_partial_floats, text_attention, text_attention_scratch_floats, causal_conv, linear_attention, probe_arithmetic, probe_read,
    };
    return table;
}

}  // namespace penstock::PENSTOCK_ISA
