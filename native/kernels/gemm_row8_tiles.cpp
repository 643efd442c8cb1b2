// Products of kU8Row (gemm_row8.cpp) by tiles: bytes times bytes, 64 columns an operation. Sums are of integers, so every variant has
// the same bits.
//
// Weights lie in memory as a tile wants them. Those of two panels stay in the first-level cache for all rows of a task, two tiles of rows
// at a time.

#include "parts.h"
#include "row_scaled.h"
#include "row_tiles.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kTileBytes = kMostTileRows * kTileRowBytes;
constexpr int64_t kSumStride = kPanel * sizeof(int32_t);

// Sums of [tile of rows][panel][16 rows][16 channels].
template <int kTiles, int kPanels>
PENSTOCK_INLINE void multiply(Tiles& tiles, const PackedMatrix& w, const Activation& a, int64_t row, int64_t other, int panel, int32_t* sums) {
    const auto for_sums = [&](auto f) PENSTOCK_LAMBDA {
        f.template operator()<0>(sums);
        if constexpr (kPanels > 1) f.template operator()<1>(sums + kMostTileRows * kPanel);
        if constexpr (kTiles > 1) f.template operator()<2>(sums + kPanels * kMostTileRows * kPanel);
        if constexpr (kTiles > 1 && kPanels > 1) f.template operator()<3>(sums + 3 * kMostTileRows * kPanel);
    };
    for_sums([&]<int kSum>(int32_t*) PENSTOCK_LAMBDA { tiles.template zero<kSum>(); });
    const int64_t panel_bytes = int64_t{w.cols} * kPanel;
    const uint8_t* weights = w.quants + panel * panel_bytes;
    const int8_t *first = a.q + row * a.cols, *second = a.q + other * a.cols;
    for (int column = 0; column < w.cols; column += kTileRowBytes, weights += kTileBytes) {
        tiles.template load<4>(first + column, a.cols);
        tiles.template load<6>(weights, kTileRowBytes);
        tiles.template add_bytes<0, 4, 6>();
        if constexpr (kPanels > 1) {
            tiles.template load<7>(weights + panel_bytes, kTileRowBytes);
            tiles.template add_bytes<1, 4, 7>();
        }
        if constexpr (kTiles > 1) {
            tiles.template load<5>(second + column, a.cols);
            tiles.template add_bytes<2, 5, 6>();
            if constexpr (kPanels > 1) tiles.template add_bytes<3, 5, 7>();
        }
    }
    for_sums([&]<int kSum>(int32_t* at) PENSTOCK_LAMBDA { tiles.template store<kSum>(at, kSumStride); });
}

// The results of some rows of a tile, whose sums are [panel][16 rows][16 channels].
template <int kPanels, typename F>
PENSTOCK_INLINE void finish(const PackedMatrix& w, const Activation& a, int64_t row0, int num_rows, int panel, const int32_t* sums, const Epilogue& e,
                            F activate) {
    const int64_t panel_bytes = int64_t{w.cols} * kPanel;
    const RowScaled scaled[2] = {{w, panel, e}, {w, panel + kPanels - 1, e}};
    for (int r = 0; r < num_rows; ++r, sums += kPanel) {
        const vi start = set1_i(a.row_start[row0 + r]);
        vi whole[kPanels];
        for (int p = 0; p < kPanels; ++p) whole[p] = add(load(sums + p * kMostTileRows * kPanel), start);
        add_rests<kPanels>(whole, w.quants + panel * panel_bytes, panel_bytes, a, row0 + r);
        for (int p = 0; p < kPanels; ++p) scaled[p].store(whole[p], a, row0 + r, e, activate);
    }
}

template <int kPanels, typename F>
PENSTOCK_INLINE void for_tiles(Tiles& tiles, const PackedMatrix& w, const Activation& a, const RowTiles& rows, int panel, const Epilogue& e, F activate) {
    alignas(64) int32_t sums[2 * kPanels * kMostTileRows * kPanel];
    for (int tile = 0; tile < rows.count; tile += 2) {
        const bool has_two = tile + 1 < rows.count;
        const int row = rows.begin(tile), other = has_two ? rows.begin(tile + 1) : row;
        if (has_two) multiply<2, kPanels>(tiles, w, a, row, other, panel, sums);
        else multiply<1, kPanels>(tiles, w, a, row, other, panel, sums);
        const int skipped = rows.skipped(tile);
        finish<kPanels>(w, a, row + skipped, rows.rows - skipped, panel, sums + skipped * kPanel, e, activate);
        if (!has_two) return;
        const int next = rows.skipped(tile + 1);
        finish<kPanels>(w, a, other + next, rows.rows - next, panel, sums + (kPanels * kMostTileRows + next) * kPanel, e, activate);
    }
}

}  // namespace

void gemm_row8(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e) {
    const RowTiles rows(row0, row1);
    TileShape shapes[8];
    for (int i = 0; i < 6; ++i) shapes[i].rows = static_cast<uint8_t>(rows.rows);
    Tiles tiles(shapes);
    with_activation(e, [&](auto activate) PENSTOCK_LAMBDA {
        int panel = range.begin;
        for (; panel + 2 <= range.end; panel += 2) for_tiles<2>(tiles, w, a, rows, panel, e, activate);
        if (panel < range.end) for_tiles<1>(tiles, w, a, rows, panel, e, activate);
    });
}

}  // namespace penstock::PENSTOCK_ISA
