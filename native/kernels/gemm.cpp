// Matrix products over packed weights: tiles of a few rows by one or more panels of 16 output channels.
//
// Weights of a panel are streamed once per tile and unpacked in registers; an activation is broadcast once for all panels
// of the tile. A row's sum runs over the groups in order, by the same operations in every shape of tile, so its bits
// never depend on the batch.

#include "activation.h"
#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

// The weights of one panel.
struct Panel {
    const uint8_t* quants;
    const uint16_t* scales;
};

template <WeightKind kKind>
struct Layout {
    static constexpr bool kNibbles = kKind == WeightKind::kU4Affine || kKind == WeightKind::kU4Symmetric;
    static constexpr bool kAffine = kKind == WeightKind::kU4Affine;
    static constexpr int kGroupBytes = kPanel * (kNibbles ? kGroup / 2 : kGroup);
    static constexpr int kGroupScales = kAffine ? 2 * kPanel : kPanel;
};

template <WeightKind kKind>
PENSTOCK_INLINE Panel panel_of(const PackedMatrix& w, int panel) {
    if constexpr (kKind == WeightKind::kBf16) {
        return {w.quants + static_cast<int64_t>(panel) * ((w.cols + 1) / 2) * 64, nullptr};
    } else {
        const int64_t first = static_cast<int64_t>(panel) * (w.cols / kGroup);
        return {w.quants + first * Layout<kKind>::kGroupBytes, w.scales + first * Layout<kKind>::kGroupScales};
    }
}

// Integer dot products of one group: dots[p][r] = sum over its 32 columns of unsigned weight * int8 activation.
// `q` is the first row's group; rows are `stride` bytes apart.
template <bool kNibbles, int kPanels, int kRows>
PENSTOCK_INLINE void dot_group(const uint8_t* const (&quants)[kPanels], const int8_t* q, int64_t stride,
                               vi (&dots)[kPanels][kRows]) {
    for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) dots[p][r] = zero_i();
    }
    const auto multiply = [&](const vb(&w)[kPanels], int column) {
        for (int r = 0; r < kRows; ++r) {
            for (int p = 0; p < kPanels; ++p) dots[p][r] = dot4<kNibbles>(dots[p][r], w[p], q + r * stride + column);
        }
    };
    for (int c = 0; c < (kNibbles ? 4 : 8); ++c) {
        vb w[kPanels], high[kPanels];
        for (int p = 0; p < kPanels; ++p) {
            w[p] = load64(quants[p] + 64 * c);
            if constexpr (kNibbles) {
                high[p] = high_nibbles(w[p]);
                w[p] = low_nibbles(w[p]);
            }
        }
        multiply(w, 4 * c);
        if constexpr (kNibbles) multiply(high, kGroup / 2 + 4 * c);
    }
}

// 4-bit or 8-bit unsigned weights q_w, w = d * q_w + m, by int8 activations:
//   y = sum over groups of scale * d * sum(q_w q) + m * sum, then the fine parts of the row's outlier groups.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void quant_tile(const Panel (&panels)[kPanels], const Activation& a, int64_t row0, vf (&acc)[kPanels][kRows]) {
    using L = Layout<kKind>;
    const int groups = a.cols / kGroup;
    const int8_t* q = a.q + row0 * a.cols;
    const float *row_scale = a.scale + row0 * groups, *row_sum = a.sum + row0 * groups;
    const uint8_t* quants[kPanels];
    for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) acc[p][r] = set1(0.0f);
    }
    for (int g = 0; g < groups; ++g) {
        for (int p = 0; p < kPanels; ++p) quants[p] = panels[p].quants + g * L::kGroupBytes;
        vi dots[kPanels][kRows];
        dot_group<L::kNibbles, kPanels, kRows>(quants, q + g * kGroup, a.cols, dots);
        for (int p = 0; p < kPanels; ++p) {
            const uint16_t* scales = panels[p].scales + g * L::kGroupScales;
            const vf d = load_f16(scales);
            vf m;
            if constexpr (L::kAffine) {
                m = load_f16(scales + kPanel);
            } else {
                m = mul(d, set1(L::kNibbles ? -8.0f : -128.0f));
            }
            for (int r = 0; r < kRows; ++r) {
                const vf scaled = mul(to_float(dots[p][r]), set1(row_scale[r * groups + g]));
                acc[p][r] = fma(set1(row_sum[r * groups + g]), m, fma(scaled, d, acc[p][r]));
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        const int64_t row = row0 + r;
        for (int i = 0; i < a.num_outliers[row]; ++i) {
            const int g = a.outliers[row * groups + i];
            for (int p = 0; p < kPanels; ++p) quants[p] = panels[p].quants + g * L::kGroupBytes;
            vi dots[kPanels][1];
            dot_group<L::kNibbles, kPanels, 1>(quants, a.fine + row * a.cols + g * kGroup, a.cols, dots);
            const vf fine_scale = set1(row_scale[r * groups + g] / kFineSteps);
            for (int p = 0; p < kPanels; ++p) {
                acc[p][r] = fma(mul(to_float(dots[p][0]), fine_scale), load_f16(panels[p].scales + g * L::kGroupScales), acc[p][r]);
            }
        }
    }
}

// Four partial sums per row, by column pair modulo 4: short chains, in an order that no tile changes.
template <int kRows>
PENSTOCK_INLINE void bf16_tile(const Panel& panel, const Activation& a, int64_t row0, vf (&acc)[kRows]) {
    constexpr int kParts = 4;
    const int pairs = (a.cols + 1) / 2;
    const uint16_t* x = a.bf16 + row0 * 2 * pairs;
    vf part[kRows][kParts];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kParts; ++p) part[r][p] = set1(0.0f);
    }
    const auto multiply = [&](int k, int p) {
        const vb weights = load64(panel.quants + static_cast<int64_t>(k) * 64);
        for (int r = 0; r < kRows; ++r) {
            part[r][p] = dot2_bf16(part[r][p], weights, x + static_cast<int64_t>(r) * 2 * pairs + 2 * k);
        }
    };
    int k = 0;
    for (; k + kParts <= pairs; k += kParts) {
        for (int p = 0; p < kParts; ++p) multiply(k + p, p);
    }
    for (int p = 0; k < pairs; ++k, ++p) multiply(k, p);
    for (int r = 0; r < kRows; ++r) acc[r] = add(add(part[r][0], part[r][1]), add(part[r][2], part[r][3]));
}

template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void compute_tile(const Panel (&panels)[kPanels], const Activation& a, int row0, vf (&acc)[kPanels][kRows]) {
    if constexpr (kKind == WeightKind::kBf16) {
        for (int p = 0; p < kPanels; ++p) bf16_tile<kRows>(panels[p], a, row0, acc[p]);
    } else {
        quant_tile<kKind, kPanels, kRows>(panels, a, row0, acc);
    }
}

PENSTOCK_INLINE void store_columns(float* out, vf value, int count) {
    if (count == kLanes) return store(out, value);
    alignas(64) float t[kLanes];
    store(t, value);
    for (int i = 0; i < count; ++i) out[i] = t[i];
}

PENSTOCK_INLINE vf load_columns(const float* p, int count) {
    if (count == kLanes) return load(p);
    alignas(64) float t[kLanes] = {};
    for (int i = 0; i < count; ++i) t[i] = p[i];
    return load(t);
}

template <WeightKind kKind, int kPanels, int kRows>
void linear_tile(const PackedMatrix& w, const Activation& a, int row0, int panel, const Epilogue& e) {
    Panel panels[kPanels];
    for (int p = 0; p < kPanels; ++p) panels[p] = panel_of<kKind>(w, panel + p);
    vf acc[kPanels][kRows];
    compute_tile<kKind, kPanels, kRows>(panels, a, row0, acc);
    for (int p = 0; p < kPanels; ++p) {
        const int column = (panel + p) * kPanel;
        const int count = w.rows - column < kPanel ? w.rows - column : kPanel;
        for (int r = 0; r < kRows; ++r) {
            vf value = acc[p][r];
            const int64_t at = (row0 + r) * e.ld + column;
            if (e.bias) value = add(value, load_columns(e.bias + column, count));
            if (e.residual) value = add(value, load_columns(e.residual + at, count));
            store_columns(e.out + at, value, count);
        }
    }
}

// A panel of gate and the same one of up, in one tile.
template <WeightKind kKind, int kRows>
void gated_tile(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int panel,
                ActivationKind kind, const Epilogue& e) {
    const Panel panels[2] = {panel_of<kKind>(gate, panel), panel_of<kKind>(up, panel)};
    vf acc[2][kRows];
    compute_tile<kKind, 2, kRows>(panels, a, row0, acc);
    const int column = panel * kPanel;
    const int count = gate.rows - column < kPanel ? gate.rows - column : kPanel;
    for (int r = 0; r < kRows; ++r) {
        store_columns(e.out + (row0 + r) * e.ld + column, gated(acc[0][r], acc[1][r], kind), count);
    }
}

// Calls f.template operator()<rows>(row) over [row0, row1) in tiles of kTileRows and one smaller one.
template <typename F>
PENSTOCK_INLINE void for_row_tiles(int row0, int row1, F f) {
    int row = row0;
    for (; row + kTileRows <= row1; row += kTileRows) f.template operator()<kTileRows>(row);
    switch (row1 - row) {
        case 1: f.template operator()<1>(row); break;
        case 2: if constexpr (kTileRows > 2) f.template operator()<2>(row); break;
        case 3: if constexpr (kTileRows > 3) f.template operator()<3>(row); break;
        case 4: if constexpr (kTileRows > 4) f.template operator()<4>(row); break;
        case 5: if constexpr (kTileRows > 5) f.template operator()<5>(row); break;
        default: break;
    }
    static_assert(kTileRows <= 6);
}

// The panels from `panel` on that fill tiles of kPanels, and where the rest begins.
template <WeightKind kKind, int kPanels>
PENSTOCK_INLINE int whole_tiles(const PackedMatrix& w, const Activation& a, int row0, int row1, int panel, int panel1,
                                const Epilogue& e) {
    for (; panel + kPanels <= panel1; panel += kPanels) {
        for_row_tiles(row0, row1, [&]<int kRows>(int row) { linear_tile<kKind, kPanels, kRows>(w, a, row, panel, e); });
    }
    return panel;
}

template <WeightKind kKind>
void gemm_kind(const PackedMatrix& w, const Activation& a, int row0, int row1, int panel, int panel1, const Epilogue& e) {
    if (row1 - row0 == 1) {
        for (; panel + kSingleRowPanels <= panel1; panel += kSingleRowPanels) {
            linear_tile<kKind, kSingleRowPanels, 1>(w, a, row0, panel, e);
        }
    }
    panel = whole_tiles<kKind, kTilePanels>(w, a, row0, row1, panel, panel1, e);
    if constexpr (kTilePanels > 1) whole_tiles<kKind, 1>(w, a, row0, row1, panel, panel1, e);
}

template <WeightKind kKind>
void gated_kind(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, int panel0,
                int panel1, ActivationKind kind, const Epilogue& e) {
    for (int panel = panel0; panel < panel1; ++panel) {
        for_row_tiles(row0, row1, [&]<int kRows>(int row) { gated_tile<kKind, kRows>(gate, up, a, row, panel, kind, e); });
    }
}

}  // namespace

void gemm(const PackedMatrix& w, const Activation& a, int row0, int row1, int panel0, int panel1, const Epilogue& e) {
    switch (w.kind) {
        case WeightKind::kU4Affine: return gemm_kind<WeightKind::kU4Affine>(w, a, row0, row1, panel0, panel1, e);
        case WeightKind::kU4Symmetric: return gemm_kind<WeightKind::kU4Symmetric>(w, a, row0, row1, panel0, panel1, e);
        case WeightKind::kU8Symmetric: return gemm_kind<WeightKind::kU8Symmetric>(w, a, row0, row1, panel0, panel1, e);
        case WeightKind::kBf16: return gemm_kind<WeightKind::kBf16>(w, a, row0, row1, panel0, panel1, e);
    }
}

void gemm_gated(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, int panel0,
                int panel1, ActivationKind kind, const Epilogue& e) {
    switch (gate.kind) {
        case WeightKind::kU4Affine:
            return gated_kind<WeightKind::kU4Affine>(gate, up, a, row0, row1, panel0, panel1, kind, e);
        case WeightKind::kU4Symmetric:
            return gated_kind<WeightKind::kU4Symmetric>(gate, up, a, row0, row1, panel0, panel1, kind, e);
        case WeightKind::kU8Symmetric:
            return gated_kind<WeightKind::kU8Symmetric>(gate, up, a, row0, row1, panel0, panel1, kind, e);
        case WeightKind::kBf16:
            return gated_kind<WeightKind::kBf16>(gate, up, a, row0, row1, panel0, panel1, kind, e);
    }
}

}  // namespace penstock::PENSTOCK_ISA
