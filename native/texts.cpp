#include "texts.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace penstock {

void mean_of_rows(const float* x, int64_t width, int64_t first, int64_t end, float* out) {
    std::copy_n(x + first * width, width, out);
    for (int64_t row = first + 1; row < end; ++row) {
        for (int64_t i = 0; i < width; ++i) out[i] += x[row * width + i];
    }
    const float count = static_cast<float>(end - first);
    for (int64_t i = 0; i < width; ++i) out[i] /= count;
}

void sparse_of_rows(const float* x, int64_t width, int64_t first, int64_t end, float* out) {
    std::fill_n(out, width, 0.0f);
    for (int64_t row = first; row < end; ++row) {
        const float* const values = x + row * width;
        for (int64_t i = 0; i < width; ++i) {
            const bool is_next = (values[i] > out[i]) | (values[i] != values[i]);  // once out[i] is NaN it stays NaN
            out[i] = is_next ? values[i] : out[i];
        }
    }
    for (int64_t i = 0; i < width; ++i) {
        if (out[i] != 0.0f) out[i] = std::log1p(out[i]);
    }
}

void normalise(const KernelTable& kernels, const float* x, int64_t width, float* out) {
    float square;
    kernels.dot_rows(&square, x, x, 1, static_cast<int>(width));
    const float length = std::sqrt(square), divisor = length < 1e-12f ? 1e-12f : length;  // NaN stays NaN
    for (int64_t i = 0; i < width; ++i) out[i] = x[i] / divisor;
}

bool is_finite(const float* x, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu);
    return largest < 0x7F800000u;
}

}  // namespace penstock
