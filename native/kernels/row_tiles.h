// How the rows of a product are divided into tiles. Included by the files of such products.

#pragma once

#include "simd.h"
#include "tiles.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

// Tiles of equally many rows. The last one may overlap the one before; the shared rows are not stored
// twice.
struct RowTiles {
    int first, end;  // rows
    int count, rows;

    PENSTOCK_MEMBER RowTiles(int row0, int row1) : first(row0), end(row1) {
        count = (row1 - row0 + kMostTileRows - 1) / kMostTileRows;
        rows = (row1 - row0 + count - 1) / count;
    }
    PENSTOCK_MEMBER int begin(int tile) const { return least(first + tile * rows, end - rows); }
    PENSTOCK_MEMBER int skipped(int tile) const { return first + tile * rows - begin(tile); }
};

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
