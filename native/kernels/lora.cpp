// What adapters add to products (`LoraFactors` in kernels.h): some rows by a few ranks, then back to all channels.
//
// The first product reads the activation that the base's product reads. Its sums run over the groups of columns in order, whatever
// units the factors lie in. Beside quantised matrices its result is rounded to 8 bits with one scale for each row, as every activation
// is: in float32 the second product would take one rank at a time, and not four.

#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kChunk = 64;                         // bytes of A: of eight ranks some columns
constexpr int kGroupBytes = kRanks * kGroup;       // of eight ranks
constexpr int kChunksOfGroup = kGroupBytes / kChunk;

// The units of one panel of A, and where what is fetched meanwhile lies, or null.
struct PanelOfA {
    const uint8_t* const* units;
    const uint8_t* const* next;
    int unit_cols, cols;

    PENSTOCK_MEMBER int cols_of(int unit) const { return least(unit_cols, cols - unit * unit_cols); }
};

PENSTOCK_INLINE const uint16_t* scales_of(const uint8_t* unit, int cols) { return reinterpret_cast<const uint16_t*>(unit + cols * kRanks); }

// Each rank's sum is that of two lanes.
PENSTOCK_INLINE void store_ranks(float* h, vf sums) {
    alignas(64) float lanes[kLanes];
    store(lanes, sums);
    for (int i = 0; i < kRanks; ++i) h[i] = lanes[2 * i] + lanes[2 * i + 1];
}

PENSTOCK_INLINE vf add_rests(const PanelOfA& panel, const Activation& x, int64_t row, vf acc) {
    const int32_t* column = x.outlier + row * x.outliers_per_row;
    const float* rest = x.outlier_rest + row * x.outliers_per_row;
    for (; *column != kNoColumn; ++column, ++rest) {
        const int unit = *column / panel.unit_cols, at = *column % panel.unit_cols;
        const uint8_t* const quants = panel.units[unit];
        const vb lanes = shift_right(load64(quants + at / 8 * kChunk), at % 4 * 8);
        const vf d = load_bf16(scales_of(quants, panel.cols_of(unit)) + at / kScaledCols * kLanes);
        const float pair[2] = {at % 8 < 4 ? *rest : 0.0f, at % 8 < 4 ? 0.0f : *rest};
        acc = fma(set1_two(pair), mul(sub(bits_of_lanes(lanes, 0xFF), set1(128.0f)), d), acc);
    }
    return acc;
}

template <int kRows>
PENSTOCK_INLINE void shrink_quantised(const PanelOfA& panel, const Activation& x, int64_t row0, float* h, int ld) {
    const int groups = x.cols / kGroup;
    const int8_t* const q = x.q + row0 * x.cols;
    const int32_t *const lift = x.lift + row0 * groups, *const start = x.start + row0 * groups;
    vf acc[kRows];
    for (int r = 0; r < kRows; ++r) acc[r] = add_rests(panel, x, row0 + r, set1(0.0f));
    for (int unit = 0, first = 0; first < groups; ++unit) {
        const int cols = panel.cols_of(unit), count = cols / kGroup;
        const uint8_t* const quants = panel.units[unit];
        const uint16_t* const scales = scales_of(quants, cols);
        for (int i = 0; i < count; ++i) {
            const int g = first + i;
            if (panel.next) {
                for (int c = 0; c < kGroupBytes; c += kChunk) prefetch(panel.next[unit] + i * kGroupBytes + c);
            }
            vi dots[kRows];  // of both lanes of a rank: half of what the zero of its weights comes to
            for (int r = 0; r < kRows; ++r) {
                const int32_t own = lift[r * groups + g];
                dots[r] = set1_i(kUnsignedLess == kWeightZero ? own : own + 8 * (start[r * groups + g] - own));
            }
            for (int c = 0; c < kChunksOfGroup; ++c) {
                const vb weights = load64(quants + i * kGroupBytes + c * kChunk);
                for (int r = 0; r < kRows; ++r) dots[r] = dot4_u8(dots[r], weights, set1_eight(q + int64_t{r} * x.cols + g * kGroup + 8 * c));
            }
            const vf d = load_bf16(scales + i * kGroup / kScaledCols * kLanes);
            for (int r = 0; r < kRows; ++r) acc[r] = fma(sub(float_of(dots[r]), float_of(set1_i(lift[r * groups + g]))), d, acc[r]);
        }
        first += count;
    }
    for (int r = 0; r < kRows; ++r) store_ranks(h + r * ld, acc[r]);
}

template <int kRows>
PENSTOCK_INLINE void shrink_bf16(const PanelOfA& panel, const Activation& x, int64_t row0, float* h, int ld) {
    const uint16_t* const values = x.bf16 + row0 * x.bf16_stride;
    vf acc[kRows];
    for (int r = 0; r < kRows; ++r) acc[r] = set1(0.0f);
    for (int unit = 0, first = 0; first < x.cols; ++unit) {
        const int cols = panel.cols_of(unit);
        for (int i = 0; i < cols; i += 4) {
            const vb weights = load64(panel.units[unit] + i / 4 * kChunk);
            for (int r = 0; r < kRows; ++r) {
                const uint16_t* const four = values + r * x.bf16_stride + first + i;
                uint16_t some[4] = {};
                if (cols - i < 4) memcpy(some, four, sizeof(uint16_t) * static_cast<size_t>(cols - i));  // the next row's are behind them
                acc[r] = dot2_bf16(acc[r], weights, set1_eight(cols - i < 4 ? some : four));
            }
        }
        first += cols;
    }
    for (int r = 0; r < kRows; ++r) store_ranks(h + r * ld, acc[r]);
}

// Rounds a row to integers; a NaN or infinity makes its scale NaN.
PENSTOCK_INLINE void round_hidden(const LoraHidden& h, int64_t row, const float* values, int count) {
    vf largest = set1(0.0f), sums = set1(0.0f);
    for (int i = 0; i < count; i += kLanes) {
        const vf size = abs(load_some(values + i, least(kLanes, count - i)));
        largest = max(largest, size);
        sums = add(sums, size);
    }
    const float most = reduce_max(largest);
    const bool is_sound = reduce_add(sums) < INFINITY;
    const float inverse = is_sound && most > 1e-30f ? 127.0f / most : 0.0f;
    h.scale[row] = !is_sound ? NAN : inverse > 0.0f ? most / 127.0f : 0.0f;
    int8_t* const q = h.q + row * h.ld;
    int32_t total = 0;
    for (int i = 0; i < count; i += kLanes) {
        alignas(16) int8_t some[kLanes];
        const int wanted = least(kLanes, count - i);
        store_rounded_i8(some, is_sound ? mul(load_some(values + i, wanted), set1(inverse)) : set1(0.0f));
        memcpy(q + i, some, static_cast<size_t>(wanted));
        for (int k = 0; k < wanted; ++k) total += some[k];
    }
    h.start[row] = -128 * total;
}

template <int kRows>
PENSTOCK_INLINE void shrink_rows(const LoraFactors& f, const Activation& x, int64_t row0, const LoraHidden& h, const LoraFactors* next) {
    const int panels = f.panels_of_a(), units = (x.cols + f.unit_cols - 1) / f.unit_cols, count = panels * kRanks;
    float found[kRows * kMostRank];
    float* const to = f.is_quantised ? found : h.values + row0 * h.ld;
    const int ld = f.is_quantised ? count : h.ld;
    for (int p = 0; p < panels; ++p) {
        const PanelOfA panel{f.a + p * units, next && p < next->panels_of_a() ? next->a + p * units : nullptr, f.unit_cols, x.cols};
        if (f.is_quantised) {
            shrink_quantised<kRows>(panel, x, row0, to + p * kRanks, ld);
        } else {
            shrink_bf16<kRows>(panel, x, row0, to + p * kRanks, ld);
        }
    }
    if (!f.is_quantised) return;
    for (int r = 0; r < kRows; ++r) round_hidden(h, row0 + r, found + r * count, count);
}

// Sixteen channels of some rows.
template <int kRows>
PENSTOCK_INLINE void expand_panel(const LoraFactors& f, const uint8_t* panel, const uint8_t* scales, const LoraHidden& h, int64_t row0,
                                  int count, float* out, int64_t ld) {
    vf changes[kRows];
    if (f.is_quantised) {
        vi dots[kRows];
        for (int r = 0; r < kRows; ++r) dots[r] = set1_i(kUnsignedLess == kWeightZero ? 0 : h.start[row0 + r]);
        for (int j = 0; j < f.rank; j += 4) {
            const vb weights = load64(panel + j * kPanel);
            for (int r = 0; r < kRows; ++r) dots[r] = dot4_u8(dots[r], weights, set1_pair(h.q + (row0 + r) * h.ld + j));
        }
        const vf d = load_bf16(reinterpret_cast<const uint16_t*>(scales));
        for (int r = 0; r < kRows; ++r) changes[r] = mul(to_float(dots[r]), mul(d, set1(h.scale[row0 + r])));
    } else {
        for (int r = 0; r < kRows; ++r) changes[r] = set1(0.0f);
        for (int j = 0; j < f.rank; ++j) {
            const vf weights = load_bf16(reinterpret_cast<const uint16_t*>(panel) + j * kPanel);
            for (int r = 0; r < kRows; ++r) changes[r] = fma(weights, set1(h.values[(row0 + r) * h.ld + j]), changes[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) store_some(out + r * ld, add(load_some(out + r * ld, count), changes[r]), count);
}

template <int kRows>
PENSTOCK_INLINE void expand_rows(const LoraFactors& f, const LoraHidden& h, int64_t row0, int begin, int end, int channels, float* out, int64_t ld) {
    const int bytes = f.panel_bytes_of_b(), panels = (channels + kPanel - 1) / kPanel;
    for (int panel = begin; panel < end;) {
        const int unit = panel / f.unit_panels, first = unit * f.unit_panels, last = least(panels, first + f.unit_panels), stop = least(end, last);
        const uint8_t *at = f.b[unit] + (panel - first) * bytes, *scales = f.b[unit] + (last - first) * bytes + (panel - first) * 2 * kPanel;
        for (; panel < stop; ++panel, at += bytes, scales += 2 * kPanel) {
            expand_panel<kRows>(f, at, scales, h, row0, least(kPanel, channels - panel * kPanel), out + row0 * ld + panel * kPanel, ld);
        }
    }
}

}  // namespace

void lora_shrink(const LoraFactors& f, const Activation& x, int row0, int row1, const LoraHidden& h, const LoraFactors* next) {
    for_fours(row0, row1, [&]<int kRows>(int row) PENSTOCK_LAMBDA { shrink_rows<kRows>(f, x, row, h, row == row0 ? next : nullptr); });
}

void lora_expand(const LoraFactors& f, const LoraHidden& h, int row0, int row1, int begin, int end, int channels, float* out, int64_t ld) {
    for_fours(row0, row1, [&]<int kRows>(int row) PENSTOCK_LAMBDA { expand_rows<kRows>(f, h, row, begin, end, channels, out, ld); });
}

}  // namespace penstock::PENSTOCK_ISA
