// Products of weights with one scale for each output channel and rows with one scale each (kU8Row), and the rounding of such rows.
//
// A sum runs over all columns in integers, so its order does not matter; scale, bias and activation are applied once.
// The weights of some panels stay in the first-level cache for all rows of a task. Models that read a text once have few outliers, in
// a handful of columns: an outlier is a wider integer, whose upper part is multiplied separately.

#include "parts.h"
#include "row_scaled.h"

namespace penstock::PENSTOCK_ISA {

namespace {

template <int kPanels, int kRows, typename F>
PENSTOCK_INLINE void tile(const PackedMatrix& w, const Activation& a, int64_t row0, int panel, const Epilogue& e, F activate) {
    const int64_t panel_bytes = int64_t{a.cols} * kPanel;
    const uint8_t* const quants = w.quants + panel * panel_bytes;
    const int8_t* const q = a.q + row0 * a.cols;
    vi acc[kPanels][kRows];
    for (int r = 0; r < kRows; ++r) {
        const vi start = set1_i(kDot4Row8Subtracts == kWeightZero ? 0 : a.row_start[row0 + r]);
        for (int p = 0; p < kPanels; ++p) acc[p][r] = start;
    }
    const int steps = a.cols / 4;
    if (steps < 1) __builtin_unreachable();
    for (int k = 0; k < steps; ++k) {
        vb weights[kPanels];
        for (int p = 0; p < kPanels; ++p) weights[p] = load64(quants + p * panel_bytes + int64_t{k} * 64);
        for (int r = 0; r < kRows; ++r) {
            const int8_t* const four = q + int64_t{r} * a.cols + 4 * k;
            for (int p = 0; p < kPanels; ++p) acc[p][r] = dot4_row8(acc[p][r], weights[p], four);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        vi of_row[kPanels];
        for (int p = 0; p < kPanels; ++p) of_row[p] = acc[p][r];
        add_rests<kPanels>(of_row, quants, panel_bytes, a, row0 + r);
        for (int p = 0; p < kPanels; ++p) acc[p][r] = of_row[p];
    }
    for (int p = 0; p < kPanels; ++p) {
        const RowScaled scaled(w, panel + p, e);
        for (int r = 0; r < kRows; ++r) scaled.store(acc[p][r], a, row0 + r, e, activate);
    }
}

template <int kPanels, typename F>
PENSTOCK_INLINE void panels_of_rows(const PackedMatrix& w, const Activation& a, int row0, int row1, int panel, const Epilogue& e, F activate) {
    for_row_tiles<kRow8Rows>(row0, row1, [&](int, int row, int rows, int) PENSTOCK_LAMBDA {
        with_count<kRow8Rows>(rows, [&]<int kRows>() PENSTOCK_LAMBDA { tile<kPanels, kRows>(w, a, row, panel, e, activate); });
    });
}

template <typename F>
void for_panels(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e, F activate) {
    int panel = range.begin;
    for (; panel + kRow8Panels <= range.end; panel += kRow8Panels) panels_of_rows<kRow8Panels>(w, a, row0, row1, panel, e, activate);
    for (; panel < range.end; ++panel) panels_of_rows<1>(w, a, row0, row1, panel, e, activate);
}

// The integers of a row, x * inverse + zero, and the start of its sums.
PENSTOCK_INLINE void round_row(const Activation& a, int64_t row, const float* x, float inverse, float zero) {
    int8_t* const q = a.q + row * a.cols;
    const vf factor = set1(inverse), shift = set1(zero), none = set1(0.0f);
    const auto values = [&](int column) PENSTOCK_LAMBDA { return fma(load(x + column), factor, shift); };
    constexpr uint32_t kOnes = 0x01010101u * (1 + kUnsignedLess);
    const vb ones = set1_pair(&kOnes);
    vi sums = set1_i(0);
    int column = 0;
    for (; column + 2 * kGroup <= a.cols; column += 2 * kGroup) {
        const vb bytes =
            rounded_i8(values(column), values(column + kLanes), values(column + 2 * kLanes), values(column + 3 * kLanes));
        store64(reinterpret_cast<uint8_t*>(q + column), bytes);
        sums = dot4_u8(sums, ones, bytes);
    }
    if (column < a.cols) {
        const vb bytes = rounded_i8(values(column), values(column + kLanes), none, none);
        alignas(64) uint8_t some[2 * kGroup];
        store64(some, bytes);
        memcpy(q + column, some, kGroup);
        sums = dot4_u8(sums, ones, bytes);
    }
    alignas(64) int32_t lanes[kLanes];
    store(lanes, sums);
    int32_t total = 0;
    for (const int32_t lane : lanes) total += lane;
    a.row_start[row] = -kWeightZero * total;
}

// A row with NaN or infinity gets a NaN scale, so all its results are NaN.
PENSTOCK_INLINE void spoil(const Activation& a, int64_t row) {
    memset(a.q + row * a.cols, 0, static_cast<size_t>(a.cols));
    a.row_start[row] = a.row_zero[row] = 0;
    a.row_scale[row] = NAN;
    a.outlier[row * a.outliers_per_row] = kNoColumn;
}

// The scale fits the values within kOutlierRatio times the root mean square, but is large enough that outliers stay within 32767 units.
void round_with_outliers(const Activation& a, int64_t row, const float* x) {
    vf squares[2] = {set1(0.0f), set1(0.0f)}, largest = set1(0.0f);
    for (int i = 0; i < a.cols; i += kGroup) {
        const vf first = load(x + i), second = load(x + i + kLanes);
        squares[0] = fma(first, first, squares[0]);
        squares[1] = fma(second, second, squares[1]);
        largest = max(largest, max(abs(first), abs(second)));
    }
    const float square = reduce_add(add(squares[0], squares[1]));
    if (!(square < INFINITY)) return spoil(a, row);
    const float limit = kOutlierRatio * sqrtf(square / static_cast<float>(a.cols)), most = reduce_max(largest);
    const bool has_outliers = most > limit && limit > kSmallestLimit;
    float bound = most;
    if (has_outliers) {
        vf below = set1(0.0f);
        for (int i = 0; i < a.cols; i += kLanes) below = max(below, up_to(abs(load(x + i)), set1(limit)));
        bound = reduce_max(below);
    }
    const float by_bound = bound / 127.0f, by_most = most / 32767.0f, scale = by_bound > by_most ? by_bound : by_most;
    const float inverse = scale > kSmallestLimit ? 1.0f / scale : 0.0f;
    a.row_scale[row] = inverse > 0.0f ? scale : 0.0f;
    a.row_zero[row] = 0;
    round_row(a, row, x, inverse, 0.0f);
    int32_t *column = a.outlier + row * a.outliers_per_row, *rest = a.row_rest + row * a.outliers_per_row;
    for (int i = 0; has_outliers && i < a.cols; i += kLanes) {
        for (uint32_t above = lanes_above(abs(load(x + i)), set1(limit)); above != 0; above &= above - 1) {
            const int at = i + __builtin_ctz(above);
            *column++ = at;
            *rest++ = static_cast<int32_t>(x[at] * inverse + kRoundingMagic - kRoundingMagic) - a.q[row * a.cols + at];
        }
    }
    *column = kNoColumn;
}

void round_with_zero(const Activation& a, int64_t row, const float* x) {
    vf high[2], low[2], sums[2];
    for (int h = 0; h < 2; ++h) high[h] = low[h] = sums[h] = set1(0.0f);
    for (int i = 0; i < a.cols; i += kGroup) {
        for (int h = 0; h < 2; ++h) {
            const vf value = load(x + i + h * kLanes);
            high[h] = max(high[h], value);
            low[h] = min(low[h], value);
            sums[h] = add(sums[h], abs(value));
        }
    }
    const float largest = reduce_max(max(high[0], high[1])), smallest = reduce_max(sub(set1(0.0f), min(low[0], low[1])));
    if (!(reduce_add(add(sums[0], sums[1])) < INFINITY)) return spoil(a, row);
    const float scale = (largest + smallest) / 255.0f, inverse = scale > kSmallestLimit ? 1.0f / scale : 0.0f;
    const float zero = inverse > 0.0f ? smallest * inverse + kRoundingMagic - kRoundingMagic - 128.0f : 0.0f;
    a.row_scale[row] = inverse > 0.0f ? scale : 0.0f;
    a.row_zero[row] = static_cast<int32_t>(zero);
    a.outlier[row * a.outliers_per_row] = kNoColumn;
    round_row(a, row, x, inverse, zero);
}

}  // namespace

void round_rows(const Activation& a, int64_t row0, int64_t row1, float* x, bool has_zero, const int32_t* apart) {
    for (int64_t row = row0; row < row1; ++row) {
        float *const values = x + row * a.cols, *const kept = a.apart + row * kApart;
        bool is_finite = true;
        for (int k = 0; apart && k < kApart; ++k) {
            kept[k] = values[apart[k]];
            values[apart[k]] = 0.0f;
            is_finite = is_finite && fabsf(kept[k]) < INFINITY;
        }
        if (has_zero) {
            round_with_zero(a, row, values);
        } else {
            round_with_outliers(a, row, values);
        }
        for (int k = 0; apart && k < kApart; ++k) values[apart[k]] = kept[k];
        if (!is_finite) spoil(a, row);
    }
}

void gemm_row8(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e) {
    with_activation(e, [&](auto activate) PENSTOCK_LAMBDA { for_panels(w, a, row0, row1, range, e, activate); });
}

}  // namespace penstock::PENSTOCK_ISA
