// The rows of a product that are computed together. Included by the files of products.

#pragma once

#include "outliers.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

// Rows of a product that are computed together: in as few tiles of at most kMostRows rows as there can be, all of about the same
// size. A last tile of one row would cost almost as much as a whole one. The weights of some panels stay in the first-level cache
// for all of them.
template <int kMostRows>
struct RowBlock {
    static constexpr int kTiles = 24;
    static constexpr int kMost = kTiles * kMostRows;
    static_assert(kMostRows <= kListRows);

    int row0, row1;
    bool merged;  // whether each tile has its outliers by column
    OutlierList outliers[kTiles];

    // Calls f(index, row, rows, number of tiles).
    template <typename F>
    PENSTOCK_MEMBER void for_tiles(F f) const {
        for_row_tiles<kMostRows>(row0, row1, f);
    }

    // Lists the outliers of the tiles, if they are merged.
    template <bool kNibbles>
    PENSTOCK_MEMBER void begin_outliers(const Activation& a) {
        if (!merged) return;
        for_tiles([&](int index, int first, int rows, int) { begin<kNibbles>(outliers[index], a, first, rows); });
    }
};

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
