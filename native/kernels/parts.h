// The functions that the kernel files of one variant give to its table (table.cpp) and to each other.

#pragma once

#include "kernels.h"

namespace penstock::PENSTOCK_ISA {

void rms_norm(float* out, const float* x, const float* weight, int cols, int group, float eps);
void layer_norm(float* out, const float* x, const float* weight, const float* bias, int cols, float eps);
void quantize_rows(const Activation& a, int64_t row0, int64_t row1, const float* x, const float* norm, float eps);
void round_rows(const Activation& a, int64_t row0, int64_t row1, float* x, bool has_zero, const int32_t* apart);
void to_bf16_row(const Activation& a, int64_t row, const float* x);
void embed_row(float* out, const PackedMatrix& w, int index, float scale);
void rope_row(float* x, const float* cos, const float* sin, int num_heads, int head_dim, int half);
void kv_write_rows(const KvLayer& kv, const int64_t* slots, int64_t count, const float* k, const float* v, const float* centre);
void gated_row(float* out, const float* gate, const float* up, int cols, ActivationKind kind);
void activate_row(float* out, const float* x, int cols, ActivationKind kind);
void add_row(float* out, const float* a, const float* b, int cols, float factor);
void cap_row(float* x, int cols, float scale, float cap);
void dot_rows(float* out, const float* x, const float* w, int rows, int cols);
void weighted_sum(float* out, const float* x, int64_t ld, const int32_t* places, const float* shares, int count, int cols);
int tile_panels(int rows);
int task_rows(int cols);
void gemm(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e,
          const UpcomingKv& upcoming);
void gemm_gated(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, PanelRange range,
                ActivationKind kind, const Epilogue& e, const UpcomingKv& upcoming);
// Not in the table: `gemm` calls them for kU8Row and, on Arm, for many rows by quantised weights.
void gemm_row8(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e);
void gemm_widened(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e);
void lora_shrink(const LoraFactors& f, const Activation& x, int row0, int row1, const LoraHidden& h, const LoraFactors* next);
void lora_expand(const LoraFactors& f, const LoraHidden& h, int row0, int row1, int begin, int end, int channels, float* out, int64_t ld);
void attention(const KvLayer& kv, const AttentionTask& task, float* scratch);
void attention_merge(const KvLayer& kv, const AttentionTask& task, float* scratch);
int64_t attention_scratch_floats(KvFormat format, int head_dim, int num_latent);
int64_t attention_partial_floats(int num_pairs, int head_dim);
void text_attention(const TextAttentionTask& task, float* scratch);
int64_t text_attention_scratch_floats(int num_tokens, int head_dim);
void causal_conv(const CausalConvTask& task);
void linear_attention(const LinearAttentionTask& task);
int64_t probe_arithmetic(ProbeKind kind, int64_t rounds);
void probe_read(const uint8_t* data, int64_t bytes);

}  // namespace penstock::PENSTOCK_ISA
