// Matrix products over packed weights: which rows and panels are computed together, tile by tile (gemm_tile.h).

#include "gemm_rows.h"
#include "gemm_tile.h"
#include "parts.h"

namespace penstock::PENSTOCK_ISA {

namespace {

template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void product_tile(const PackedMatrix& w, const Panel (&panels)[kPanels], const Activation& a, int row0, int panel,
                                  const OutlierList* outliers, const Ahead& ahead, const Epilogue& e) {
    vf acc[kPanels][kRows];
    compute_tile<kKind, kPanels, kRows>(panels, a, row0, outliers, ahead, acc);
    store_tile(acc, row0, panel, w.rows, e);
}

// Some panels for a block of rows.
template <WeightKind kKind, int kPanels, int kMostRows>
void panels_product(const PackedMatrix& w, const Activation& a, const RowBlock<kMostRows>& block, int panel, int next,
                    KvFetcher& kv, const Epilogue& e) {
    Panel panels[kPanels];
    for (int p = 0; p < kPanels; ++p) panels[p] = panel_of<kKind>(w, panel + p);
    block.for_tiles([&](int index, int row, int rows, int tiles) __attribute__((always_inline)) {
        const Ahead ahead{next - panel, tiles, index, kMostRows > kFewRows ? kv.next(&block) : KvPart{}};
        const OutlierList* outliers = block.merged ? &block.outliers[index] : nullptr;
        with_count<kMostRows>(rows, [&]<int kRows>() __attribute__((always_inline)) {
            product_tile<kKind, kPanels, kRows>(w, panels, a, row, panel, outliers, ahead, e);
        });
    });
}

// Calls f.template operator()<panels>(panel, next panel) over the panels of a range.
template <int kPanels, typename F>
PENSTOCK_INLINE void for_panels(PanelRange range, F f) {
    int panel = range.begin;
    for (; panel + kPanels <= range.end; panel += kPanels) {
        f.template operator()<kPanels>(panel, panel + kPanels < range.end ? panel + kPanels : range.next);
    }
    if constexpr (kPanels > 1) for_panels<1>({panel, range.end, range.next}, f);
}

// Calls f.template operator()<panels>(block, panel, next panel).
template <WeightKind kKind, int kPanels, int kMostRows, typename F>
PENSTOCK_INLINE void for_blocks(const Activation& a, int row0, int row1, PanelRange range, F f) {
    RowBlock<kMostRows> block;
    block.merged = kKind != WeightKind::kBf16 && a.cols <= kMergedCols;
    for (int row = row0; row < row1; row += block.kMost) {
        block.row0 = row;
        block.row1 = least(row + block.kMost, row1);
        if constexpr (kKind != WeightKind::kBf16) block.template begin_outliers<Layout<kKind>::kNibbles>(a);
        for_panels<kPanels>(range, [&]<int kPanelsOfTile>(int panel, int next) {
            f.template operator()<kPanelsOfTile>(block, panel, next);
        });
    }
}

template <WeightKind kKind, typename F>
PENSTOCK_INLINE void for_rows(const Activation& a, int row0, int row1, PanelRange range, F f) {
    constexpr bool kFewAlone = kWidensWeights && kKind != WeightKind::kBf16;  // others went to gemm_widened
    if (kFewAlone || row1 - row0 <= kFewRows) {
        for_blocks<kKind, kFewRowPanels, kFewRows>(a, row0, row1, range, f);
    } else if constexpr (!kFewAlone) {
        for_blocks<kKind, kTilePanels, kTileRows>(a, row0, row1, range, f);
    }
}

// The number of tiles of a product; approximate unless panels form whole tiles.
PENSTOCK_INLINE int tiles_of(int row0, int row1, PanelRange range) {
    return (row1 - row0 + kTileRows - 1) / kTileRows * ((range.end - range.begin + kTilePanels - 1) / kTilePanels);
}

PENSTOCK_INLINE bool is_widened(const PackedMatrix& w, int rows) { return rows > kFewRows && w.kind != WeightKind::kBf16; }

}  // namespace

int tile_panels(int rows) { return rows <= kFewRows ? kFewRowPanels : kTilePanels; }

int task_rows(int) { return 96; }

void gemm(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e,
          const UpcomingKv& upcoming) {
    if (w.kind == WeightKind::kU8Row) return gemm_row8(w, a, row0, row1, range, e);
    if constexpr (kWidensWeights) {
        if (is_widened(w, row1 - row0)) return gemm_widened(w, a, row0, row1, range, e);
    }
    KvFetcher kv(upcoming, tiles_of(row0, row1, range), a.cols / kGroup);
    for_kind(w.kind, [&]<WeightKind kKind>() {
        for_rows<kKind>(a, row0, row1, range, [&]<int kPanels>(const auto& block, int panel, int next) {
            panels_product<kKind, kPanels>(w, a, block, panel, next, kv, e);
        });
    });
}

// `out` keeps the gate's sums until up's follow. With few rows, up begins after all of the gate's panels, since one stream is read faster
// than two, and so where weights are widened; else the two take turns, some panels at a time.
void gemm_gated(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, PanelRange range,
                ActivationKind kind, const Epilogue& e, const UpcomingKv& upcoming) {
    Epilogue with_gates = e;
    with_gates.gates = &kind;
    if (row1 - row0 <= kFewRows || kWidensWeights) {
        gemm(gate, a, row0, row1, range, e, {});
        return gemm(up, a, row0, row1, range, with_gates, {});
    }
    KvFetcher kv(upcoming, 2 * tiles_of(row0, row1, range), a.cols / kGroup);
    for_kind(gate.kind, [&]<WeightKind kKind>() {
        for_rows<kKind>(a, row0, row1, range, [&]<int kPanels>(const auto& block, int panel, int next) {
            panels_product<kKind, kPanels>(gate, a, block, panel, next, kv, e);
            panels_product<kKind, kPanels>(up, a, block, panel, next, kv, with_gates);
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
                store(d, load_f16(scales_of<kKind>(panel, g)));
                const auto* offsets = reinterpret_cast<const uint16_t*>(offsets_of<kKind>(panel, g / 2));
                const float m = L::kAffine ? widen(offsets[2 * lane + g % 2]) : 0.0f;
                for (int k = 0; k < kGroup; k += 4) {
                    const bool high = L::kNibbles && k >= kGroup / 2;
                    alignas(64) uint8_t q[64];
                    const int chunk = high ? k - kGroup / 2 : k;
                    store64(q, unpack<kKind>(load64(quants_of<kKind>(panel, g) + chunk / 4 * 64), high, panel.table));
                    for (int j = 0; j < 4; ++j) {
                        out[k + j] = (d[lane] * (static_cast<float>(q[4 * lane + j]) - L::kZero) + m) * scale;
                    }
                }
            }
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
