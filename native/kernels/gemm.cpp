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
    const uint16_t* offsets;
};

template <WeightKind kKind>
struct Layout {
    static constexpr bool kTable = kKind == WeightKind::kU4Table;
    static constexpr bool kNibbles = kKind == WeightKind::kU4Affine || kKind == WeightKind::kU4Symmetric || kTable;
    static constexpr bool kAffine = kKind == WeightKind::kU4Affine || kKind == WeightKind::kU8Affine;
    static constexpr bool kSmall = kNibbles && !kTable;  // every weight is below 16, and the zero point 8
    static constexpr float kZero = kSmall ? 8.0f : 128.0f;
    static constexpr int kGroupBytes = kPanel * (kNibbles ? kGroup / 2 : kGroup);
};

PENSTOCK_INLINE float widen(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

PENSTOCK_INLINE int pairs_of(int groups) { return (groups + 1) / 2; }

template <WeightKind kKind>
PENSTOCK_INLINE Panel panel_of(const PackedMatrix& w, int panel) {
    if constexpr (kKind == WeightKind::kBf16) {
        return {w.quants + static_cast<int64_t>(panel) * pairs_of(w.cols) * 64, nullptr, nullptr};
    } else {
        const int groups = w.cols / kGroup;
        const int64_t first = static_cast<int64_t>(panel) * groups;
        const int64_t first_offset = static_cast<int64_t>(panel) * pairs_of(groups) * 2 * kPanel;
        return {w.quants + first * Layout<kKind>::kGroupBytes, w.scales + first * kPanel,
                Layout<kKind>::kAffine ? w.offsets + first_offset : nullptr};
    }
}

// Chunk c of a group as unsigned bytes: of four columns 4c.. for each lane, c below 8.
template <WeightKind kKind>
PENSTOCK_INLINE vb unpack(vb chunk, bool high) {
    using L = Layout<kKind>;
    if constexpr (!L::kNibbles) return chunk;
    const vb nibbles = high ? high_nibbles(chunk) : low_nibbles(chunk);
    return L::kTable ? look_up(nibbles, kTableOfNibbles) : nibbles;
}

// dots[p][r] += sum over the 32 columns of one group of unsigned weight * int8 activation.
// `q` is the first row's group; rows are `stride` bytes apart.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void dot_group(const uint8_t* const (&quants)[kPanels], const int8_t* q, int64_t stride,
                               vi (&dots)[kPanels][kRows]) {
    using L = Layout<kKind>;
    const auto multiply = [&](const vb(&w)[kPanels], int column) {
        for (int r = 0; r < kRows; ++r) {
            for (int p = 0; p < kPanels; ++p) dots[p][r] = dot4<L::kSmall>(dots[p][r], w[p], q + r * stride + column);
        }
    };
    for (int c = 0; c < (L::kNibbles ? 4 : 8); ++c) {
        vb low[kPanels], high[kPanels];
        for (int p = 0; p < kPanels; ++p) {
            const vb chunk = load64(quants[p] + 64 * c);
            low[p] = unpack<kKind>(chunk, false);
            if constexpr (L::kNibbles) high[p] = unpack<kKind>(chunk, true);
        }
        multiply(low, 4 * c);
        if constexpr (L::kNibbles) multiply(high, kGroup / 2 + 4 * c);
    }
}

// Sixteen weights of one column, as numbers.
template <WeightKind kKind>
PENSTOCK_INLINE vf weights_of_column(const Panel& panel, int column) {
    using L = Layout<kKind>;
    const int group = column / kGroup, at = column % kGroup;
    const bool high = L::kNibbles && at >= kGroup / 2;
    const vb chunk = load64(panel.quants + group * L::kGroupBytes + (high ? at - kGroup / 2 : at) / 4 * 64);
    const vf centred = sub(byte_of_lanes(unpack<kKind>(chunk, high), at % 4), set1(L::kZero));
    const vf d = load_f16(panel.scales + group * kPanel);
    if constexpr (!L::kAffine) return mul(centred, d);
    const uint16_t* offsets = panel.offsets + group / 2 * 2 * kPanel;
    return fma(centred, d, bf16_of_lanes(load64(reinterpret_cast<const uint8_t*>(offsets)), group % 2));
}

// acc += rest * weights of its column, for every outlier of the rows. Rows of one text mostly share their outliers'
// columns, so those of the tile are merged, in ascending order; a row without the column adds zero.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void add_outliers(const Panel (&panels)[kPanels], const Activation& a, int64_t row0, vf (&acc)[kPanels][kRows]) {
    const int32_t* column[kRows];
    const float* rest[kRows];
    for (int r = 0; r < kRows; ++r) {
        column[r] = a.outlier + (row0 + r) * a.outliers_per_row;
        rest[r] = a.outlier_rest + (row0 + r) * a.outliers_per_row;
    }
    while (true) {
        int32_t next = kNoColumn;
        for (int r = 0; r < kRows; ++r) next = *column[r] < next ? *column[r] : next;
        if (next == kNoColumn) return;
        vf w[kPanels];
        for (int p = 0; p < kPanels; ++p) w[p] = weights_of_column<kKind>(panels[p], next);
        for (int r = 0; r < kRows; ++r) {
            const bool has = *column[r] == next;
            const vf x = set1(has ? *rest[r] : 0.0f);
            for (int p = 0; p < kPanels; ++p) acc[p][r] = fma(x, w[p], acc[p][r]);
            column[r] += has;
            rest[r] += has;
        }
    }
}

// What a tile fetches into the cache while it computes: of the panels `distance` after its own, every `period`th group from
// `phase` on. The tiles of one block of rows share this, so that memory is read all the time and not by the first tile alone. (The
// hardware's own streams end with each panel. Past the last panel of all it is only advice that nobody takes.)
struct Ahead {
    int64_t distance;
    int period;
    int phase;
};

// y = sum over groups of d * 2^e * sum((q_w - zero) q), then the sum of m * sum(x), then the rests of the outliers.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void quant_tile(const Panel (&panels)[kPanels], const Activation& a, int64_t row0, const Ahead& ahead,
                                vf (&acc)[kPanels][kRows]) {
    using L = Layout<kKind>;
    const int groups = a.cols / kGroup, pairs = pairs_of(groups);
    const int8_t* q = a.q + row0 * a.cols;
    const int32_t *exponent = a.exponent + row0 * groups, *zero_sum = a.zero_sum + row0 * groups;
    const uint8_t* quants[kPanels];
    int fetched = ahead.phase;
    for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) acc[p][r] = set1(0.0f);
    }
    for (int g = 0; g < groups; ++g) {
        vi dots[kPanels][kRows];
        for (int r = 0; r < kRows; ++r) {
            const vi start = set1_i(zero_sum[r * groups + g]);
            for (int p = 0; p < kPanels; ++p) dots[p][r] = L::kSmall ? start : times16(start);
        }
        for (int p = 0; p < kPanels; ++p) quants[p] = panels[p].quants + g * L::kGroupBytes;
        if (g == fetched) {
            fetched += ahead.period;
            for (int p = 0; p < kPanels; ++p) {
                for (int i = 0; i < L::kGroupBytes; i += 64) prefetch(quants[p] + ahead.distance * groups * L::kGroupBytes + i);
                prefetch(panels[p].scales + (ahead.distance * groups + g) * kPanel);
                if constexpr (L::kAffine) prefetch(panels[p].offsets + (ahead.distance * pairs + g / 2) * 2 * kPanel);
            }
        }
        dot_group<kKind, kPanels, kRows>(quants, q + g * kGroup, a.cols, dots);
        for (int p = 0; p < kPanels; ++p) {
            const vf d = load_f16(panels[p].scales + g * kPanel);
            for (int r = 0; r < kRows; ++r) {
                acc[p][r] = fma(to_float(dots[p][r]), add_exponent(d, exponent[r * groups + g]), acc[p][r]);
            }
        }
    }
    if constexpr (L::kAffine) {
        const uint16_t* sums = a.sum + row0 * 2 * pairs;
        for (int k = 0; k < pairs; ++k) {
            for (int p = 0; p < kPanels; ++p) {
                const vb m = load64(reinterpret_cast<const uint8_t*>(panels[p].offsets + k * 2 * kPanel));
                for (int r = 0; r < kRows; ++r) acc[p][r] = dot2_bf16(acc[p][r], m, sums + (r * pairs + k) * 2);
            }
        }
    }
    add_outliers<kKind, kPanels, kRows>(panels, a, row0, acc);
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
PENSTOCK_INLINE void compute_tile(const Panel (&panels)[kPanels], const Activation& a, int row0, const Ahead& ahead,
                                  vf (&acc)[kPanels][kRows]) {
    if constexpr (kKind == WeightKind::kBf16) {
        for (int p = 0; p < kPanels; ++p) bf16_tile<kRows>(panels[p], a, row0, acc[p]);
    } else {
        quant_tile<kKind, kPanels, kRows>(panels, a, row0, ahead, acc);
    }
}

// `gates`: what is in e.out is the gate of these sums, and is replaced by activation(gate) * sum; null in a plain product.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void product_tile(const PackedMatrix& w, const Panel (&panels)[kPanels], const Activation& a, int row0, int panel,
                                  const Ahead& ahead, const Epilogue& e, const ActivationKind* gates) {
    vf acc[kPanels][kRows];
    compute_tile<kKind, kPanels, kRows>(panels, a, row0, ahead, acc);
    for (int p = 0; p < kPanels; ++p) {
        const int column = (panel + p) * kPanel;
        const int count = w.rows - column < kPanel ? w.rows - column : kPanel;
        for (int r = 0; r < kRows; ++r) {
            vf value = acc[p][r];
            const int64_t at = (row0 + r) * e.ld + column;
            if (gates) value = gated(load_some(e.out + at, count), value, *gates);
            if (e.bias) value = add(value, load_some(e.bias + column, count));
            if (e.residual) value = add(value, load_some(e.residual + at, count));
            store_some(e.out + at, value, count);
        }
    }
}

// Some panels for a block of rows, in as few tiles of at most kMostRows rows as there can be, all of about the same size: a last tile
// of one row would cost almost as much as a whole one. The panels' weights stay in the first-level cache for all rows.
template <WeightKind kKind, int kPanels, int kMostRows>
void panels_product(const PackedMatrix& w, const Activation& a, int row0, int row1, int panel, int next, const Epilogue& e,
                    const ActivationKind* gates) {
    static_assert(kMostRows <= 4);
    Panel panels[kPanels];
    for (int p = 0; p < kPanels; ++p) panels[p] = panel_of<kKind>(w, panel + p);
    int tiles = (row1 - row0 + kMostRows - 1) / kMostRows;
    Ahead ahead{next - panel, tiles, 0};
    for (int row = row0; row < row1; --tiles, ++ahead.phase) {
        const int rows = (row1 - row + tiles - 1) / tiles;
        switch (rows) {
            case 1: product_tile<kKind, kPanels, 1>(w, panels, a, row, panel, ahead, e, gates); break;
            case 2: if constexpr (kMostRows >= 2) product_tile<kKind, kPanels, 2>(w, panels, a, row, panel, ahead, e, gates); break;
            case 3: if constexpr (kMostRows >= 3) product_tile<kKind, kPanels, 3>(w, panels, a, row, panel, ahead, e, gates); break;
            default: if constexpr (kMostRows >= 4) product_tile<kKind, kPanels, 4>(w, panels, a, row, panel, ahead, e, gates); break;
        }
        row += rows;
    }
}

// Calls f.template operator()<panels, most rows>(panel, next panel) over the panels of a block.
template <int kPanels, int kMostRows, typename F>
PENSTOCK_INLINE void for_panels(PanelRange range, F f) {
    int panel = range.begin;
    for (; panel + kPanels <= range.end; panel += kPanels) {
        f.template operator()<kPanels, kMostRows>(panel, panel + kPanels < range.end ? panel + kPanels : range.next);
    }
    if constexpr (kPanels > 1) for_panels<1, kMostRows>({panel, range.end, range.next}, f);
}

template <typename F>
PENSTOCK_INLINE void for_block(int rows, PanelRange range, F f) {
    if (rows <= kFewRows) {
        for_panels<kFewRowPanels, kFewRows>(range, f);
    } else {
        for_panels<kTilePanels, kTileRows>(range, f);
    }
}

// Calls f.template operator()<kind>().
template <typename F>
PENSTOCK_INLINE void for_kind(WeightKind kind, F f) {
    switch (kind) {
        case WeightKind::kU4Affine: return f.template operator()<WeightKind::kU4Affine>();
        case WeightKind::kU4Symmetric: return f.template operator()<WeightKind::kU4Symmetric>();
        case WeightKind::kU8Symmetric: return f.template operator()<WeightKind::kU8Symmetric>();
        case WeightKind::kBf16: return f.template operator()<WeightKind::kBf16>();
        case WeightKind::kU8Affine: return f.template operator()<WeightKind::kU8Affine>();
        case WeightKind::kU4Table: return f.template operator()<WeightKind::kU4Table>();
    }
}

}  // namespace

int tile_panels(int rows) { return rows <= kFewRows ? kFewRowPanels : kTilePanels; }

void gemm(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e) {
    for_kind(w.kind, [&]<WeightKind kKind>() {
        for_block(row1 - row0, range, [&]<int kPanels, int kMostRows>(int panel, int next) {
            panels_product<kKind, kPanels, kMostRows>(w, a, row0, row1, panel, next, e, nullptr);
        });
    });
}

// The gate's sums wait in `out`, some panels at a time, for those of up.
void gemm_gated(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, PanelRange range,
                ActivationKind kind, const Epilogue& e) {
    for_kind(gate.kind, [&]<WeightKind kKind>() {
        for_block(row1 - row0, range, [&]<int kPanels, int kMostRows>(int panel, int next) {
            panels_product<kKind, kPanels, kMostRows>(gate, a, row0, row1, panel, next, e, nullptr);
            panels_product<kKind, kPanels, kMostRows>(up, a, row0, row1, panel, next, e, &kind);
        });
    });
}

// Row `index` of w, times scale.
void embed_row(float* out, const PackedMatrix& w, int index, float scale) {
    const int lane = index % kPanel;
    for_kind(w.kind, [&]<WeightKind kKind>() {
        const Panel panel = panel_of<kKind>(w, index / kPanel);
        if constexpr (kKind == WeightKind::kBf16) {
            const uint16_t* pairs = reinterpret_cast<const uint16_t*>(panel.quants) + 2 * lane;
            for (int k = 0; k < w.cols; ++k) out[k] = widen(pairs[k / 2 * 2 * kPanel + k % 2]) * scale;
        } else {
            using L = Layout<kKind>;
            for (int g = 0; g < w.cols / kGroup; ++g, out += kGroup) {
                alignas(64) float d[kLanes];
                store(d, load_f16(panel.scales + g * kPanel));
                const float m = L::kAffine ? widen(panel.offsets[(g / 2 * kPanel + lane) * 2 + g % 2]) : 0.0f;
                for (int k = 0; k < kGroup; k += 4) {
                    const bool high = L::kNibbles && k >= kGroup / 2;
                    alignas(64) uint8_t q[64];
                    const int chunk = high ? k - kGroup / 2 : k;
                    store64(q, unpack<kKind>(load64(panel.quants + g * L::kGroupBytes + chunk / 4 * 64), high));
                    for (int j = 0; j < 4; ++j) {
                        out[k + j] = (d[lane] * (static_cast<float>(q[4 * lane + j]) - L::kZero) + m) * scale;
                    }
                }
            }
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
