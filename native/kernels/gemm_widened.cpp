// Products of many rows by quantised weights on Arm, whose vectors are short: unpacking weights and laying them out for the multiplying
// instruction costs as much as multiplying a few rows by them, so it is done once for all rows of a task.
//
//     for every eight panels, for every 16 groups of their columns, a piece:
//         lay out the rows
//         for every panel:  widen the piece; for every few rows:  sums of these rows x 16 channels
//
// Sums wait in memory between pieces. Each is computed by the operations of `quant_tile` in gemm_tile.h, in their order, so a row's
// bits don't depend on the others.

#include "gemm_rows.h"
#include "gemm_tile.h"
#include "parts.h"
#if defined(PENSTOCK_NEON_I8MM)
#include "widened_i8mm.h"
#else
#include "widened_dotprod.h"
#endif

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kMostRows = 96;
constexpr int kPieceGroups = 16;     // whose widened weights, 8 KiB, stay in the first-level cache
constexpr int kPanelsTogether = 8;   // for which rows are laid out once: that costs as much as half a panel

using Sums = float[kMostRows + 1][kPanel];  // of a panel; a last row may have a partner

// Calls f.template operator()<count>(row, count) for every few rows of the block.
template <typename F>
PENSTOCK_INLINE void for_tiles(const RowBlock<kTileRows>& block, F f) {
    block.for_tiles([&](int index, int row, int rows, int) PENSTOCK_LAMBDA {
        with_count<kTileRows>(rows, [&]<int kRows>() PENSTOCK_LAMBDA { f.template operator()<kRows>(index, row); });
    });
}

// Adds offsets and the outliers' rests to the sums, and stores them.
template <WeightKind kKind>
void end_sums(const PackedMatrix& w, int panel, const Activation& a, const RowBlock<kTileRows>& block, const Sums& sums, const Epilogue& e) {
    const Panel panels[] = {panel_of<kKind>(w, panel)};
    for_tiles(block, [&]<int kRows>(int index, int row) PENSTOCK_LAMBDA {
        vf acc[1][kRows];
        for (int r = 0; r < kRows; ++r) acc[0][r] = load(sums[row - block.row0 + r]);
        if constexpr (Layout<kKind>::kAffine) add_offsets<kKind, 1, kRows>(panels, a, row, acc);
        add_outliers<kKind, 1, kRows>(panels, a, row, block.merged ? &block.outliers[index] : nullptr, acc);
        store_tile(acc, row, panel, w.rows, e);
    });
}

// The groups [first, first + count) of a panel; meanwhile as many after them are fetched.
template <WeightKind kKind>
void widen(const Panel& panel, int first, int count, WidenedGroup* to) {
    using L = Layout<kKind>;
    for (int g = 0; g < count; ++g) {
        const uint8_t* const later = quants_of<kKind>(panel, first + kPieceGroups + g);
        PENSTOCK_UNROLL for (int i = 0; i < L::kPairBytes / 2; i += 64) prefetch(later + i);
        widen_group<kKind>(panel, first + g, to[g]);
    }
}

template <WeightKind kKind>
void multiply_block(const PackedMatrix& w, const Activation& a, const RowBlock<kTileRows>& block, PanelRange range, const Epilogue& e) {
    Sums sums[kPanelsTogether];
    WidenedInput<kMostRows, kPieceGroups> input;
    WidenedGroup widened[kPieceGroups];
    const int groups = a.cols / kGroup, rows = block.row1 - block.row0;
    for (int begin = range.begin; begin < range.end; begin += kPanelsTogether) {
        const int panels = least(range.end - begin, kPanelsTogether);
        for (int p = 0; p < panels; ++p) memset(sums[p], 0, (rows + 1) * sizeof sums[p][0]);
        for (int first = 0; first < groups; first += kPieceGroups) {
            const int count = least(groups - first, kPieceGroups);
            input.arrange(a, Layout<kKind>::kSmall ? a.start : a.lift, block.row0, rows, first, count);
            for (int p = 0; p < panels; ++p) {
                widen<kKind>(panel_of<kKind>(w, begin + p), first, count, widened);
                for (int row = 0; row < rows; row += kWidenedRows) {
                    input.multiply(widened, count, row, least(rows - row, kWidenedRows), sums[p] + row);
                }
            }
        }
        for (int p = 0; p < panels; ++p) end_sums<kKind>(w, begin + p, a, block, sums[p], e);
    }
}

template <WeightKind kKind>
void multiply(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e) {
    RowBlock<kTileRows> block;
    block.merged = a.cols <= kMergedCols;
    for (int row = row0; row < row1; row += kMostRows) {
        block.row0 = row;
        block.row1 = least(row + kMostRows, row1);
        block.begin_outliers<Layout<kKind>::kNibbles>(a);
        multiply_block<kKind>(w, a, block, range, e);
    }
}

}  // namespace

void gemm_widened(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e) {
    for_kind(w.kind, [&]<WeightKind kKind>() {
        if constexpr (kKind != WeightKind::kBf16) multiply<kKind>(w, a, row0, row1, range, e);
    });
}

}  // namespace penstock::PENSTOCK_ISA
