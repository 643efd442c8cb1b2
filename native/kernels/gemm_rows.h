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
        const int tiles = (row1 - row0 + kMostRows - 1) / kMostRows;
        for (int i = 0, row = row0; i < tiles; ++i) {
            const int rows = (row1 - row + tiles - i - 1) / (tiles - i);
            f(i, row, rows, tiles);
            row += rows;
        }
    }

    // Lists the outliers of the tiles, if they are merged.
    template <bool kNibbles>
    PENSTOCK_MEMBER void begin_outliers(const Activation& a) {
        if (!merged) return;
        for_tiles([&](int index, int first, int rows, int) { begin<kNibbles>(outliers[index], a, first, rows); });
    }
};

// Calls f.template operator()<count>(), for a count of at most kMost, which is at most 6.
template <int kMost, typename F>
PENSTOCK_INLINE void with_count(int count, F f) {
    const auto call = [&]<int kCount>() PENSTOCK_LAMBDA {
        if constexpr (kCount <= kMost) f.template operator()<kCount>();
    };
    switch (count) {
        case 1: return call.template operator()<1>();
        case 2: return call.template operator()<2>();
        case 3: return call.template operator()<3>();
        case 4: return call.template operator()<4>();
        case 5: return call.template operator()<5>();
        default: return call.template operator()<6>();
    }
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
