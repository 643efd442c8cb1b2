// The last operations of a text encoder: pooling a text's token rows, and normalising the result.
//
// The engine (engine.h) calls these for one text at a time; a text's tokens lie one behind the other, in one strand. The order of every
// sum is that of the tokens or columns.

#pragma once

#include <cstdint>

#include "instructions.h"

namespace penstock {

// out = the mean of x's rows [first, end). x is [., width], out [width]
void mean_of_rows(const float* x, int64_t width, int64_t first, int64_t end, float* out);

// out = ln(1 + max(0, the largest of the rows [first, end) of x)), column by column. [width]
void sparse_of_rows(const float* x, int64_t width, int64_t first, int64_t end, float* out);

// out = x / |x|, or as good as zero for a shorter x than 1e-12. [width]; out may be x
void normalise(const KernelTable& kernels, const float* x, int64_t width, float* out);

// Whether all of x are finite numbers.
bool is_finite(const float* x, int64_t count);

}  // namespace penstock
