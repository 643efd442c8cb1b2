// Turns finished integer sums into results: adds the outliers' rests, applies scales, adds bias and columns apart, and applies the
// activation. Included by the files of products of kU8Row.

#pragma once

#include "activation.h"
#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

// x Phi(x) within 6e-5, without the division that `gelu` needs: Phi(x) - 1/2 as an odd polynomial of degree 17 on [-4.5, 4.5], which is
// 1/2 at the end. A row's numbers are rounded to 8 bits afterwards. NaN stays NaN.
PENSTOCK_INLINE vf near_gelu(vf x) {
    const vf y = min(set1(4.5f), max(set1(-4.5f), x)), t = mul(y, y);
    vf p = fma(set1(3.000008574893798e-11f), t, set1(-3.2839138075502206e-09f));
    p = fma(p, t, set1(1.5802577024714992e-07f));
    p = fma(p, t, set1(-4.43168573838193e-06f));
    p = fma(p, t, set1(8.12097277957946e-05f));
    p = fma(p, t, set1(-0.0010362534085288644f));
    p = fma(p, t, set1(0.009580654092133045f));
    p = fma(p, t, set1(-0.06597726792097092f));
    p = fma(p, t, set1(0.3987085819244385f));
    return mul(x, fma(y, p, set1(0.5f)));
}

// A column of a panel: its weights of 16 rows, less their zero, one a lane.
PENSTOCK_INLINE vi weights_of_column(const uint8_t* quants, int32_t column) {
    const vb lanes = shift_right(load64(quants + column / 4 * 64), column % 4 * 8);
    return sub(low_bytes_of_lanes(lanes), set1_i(kWeightZero));
}

// The sums of a row and kPanels panels, `panel_bytes` apart, with its outliers' rests.
template <int kPanels>
PENSTOCK_INLINE void add_rests(vi (&sums)[kPanels], const uint8_t* quants, int64_t panel_bytes, const Activation& a, int64_t row) {
    const int32_t* column = a.outlier + row * a.outliers_per_row;
    const int32_t* rest = a.row_rest + row * a.outliers_per_row;
    for (; *column != kNoColumn; ++column, ++rest) {
        for (int p = 0; p < kPanels; ++p) {
            sums[p] = add(sums[p], mul(weights_of_column(quants + p * panel_bytes, *column), set1_i(*rest)));
        }
    }
}

// Scales and stores a panel's sums.
struct RowScaled {
    vf scales, bias;
    vi weight_sums;
    const float* apart;
    int first, count;  // channels

    PENSTOCK_MEMBER RowScaled(const PackedMatrix& w, int panel, const Epilogue& e)
        : apart(w.apart ? w.apart_weights + int64_t{panel} * kApart * kPanel : nullptr), first(panel * kPanel), count(least(w.rows - first, kPanel)) {
        scales = load(w.row_scales + first);
        bias = e.bias ? load_some(e.bias + first, count) : set1(0.0f);
        weight_sums = load(w.row_sums + first);
    }

    // Writes the results of a row, of sums of (q - 128) * row_q.
    template <typename F>
    PENSTOCK_MEMBER void store(vi sums, const Activation& a, int64_t row, const Epilogue& e, F activate) const {
        const int64_t at = row * e.ld + first;
        if (a.row_zero[row] != 0) sums = sub(sums, mul(weight_sums, set1_i(a.row_zero[row])));
        vf value = fma(to_float(sums), mul(scales, set1(a.row_scale[row])), bias);
        for (int k = 0; apart && k < kApart; ++k) value = fma(load(apart + k * kPanel), set1(a.apart[row * kApart + k]), value);
        value = activate(value);
        if (e.residual) value = add(value, load_some(e.residual + at, count));
        store_some(e.out + at, value, count);
    }
};

// Calls f with the activation of such a product, which has GELU or none.
template <typename F>
PENSTOCK_INLINE void with_activation(const Epilogue& e, F f) {
    if (e.has_gelu) return f([](vf x) PENSTOCK_LAMBDA { return near_gelu(x); });
    f([](vf x) PENSTOCK_LAMBDA { return x; });
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
