// The outliers of a tile of rows, merged by column: products unpack a column of weights once for all rows of the tile. Made by
// the GEMM for a block of rows at a time, before its panels: a list is read once for every few panels.

#pragma once

#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

// Rows of more columns than these have many outliers, few in the same column: merging would cost more than it saves.
constexpr int kMergedCols = 1024;
constexpr int kListRows = kTileRows;  // of the largest tile
constexpr int kListColumns = 24;  // rarely exceeded; the tile then merges the rest

static constexpr float kNoRest = 0.0f;

// Where a column's weights are.
struct ColumnPlace {
    uint32_t group;
    uint32_t chunk;  // bytes from the group's quants to the 64 with this column
    int32_t shift;   // of its bits in each lane
};

template <bool kNibbles>
PENSTOCK_INLINE ColumnPlace place_of(uint32_t column) {
    constexpr uint32_t kHalf = kGroup / 2, kColsOfChunks = kNibbles ? kHalf : kGroup;
    const uint32_t chunk = (column & (kColsOfChunks - 4)) * 16, high = kNibbles ? (column & kHalf) / 4 : 0;
    return {column / kGroup, chunk, static_cast<int32_t>((column & 3) * 8 + high)};
}

// Outliers of a tile's rows in one column; zero where a row has no outlier.
struct OutlierColumn {
    ColumnPlace place;
    float rest[kListRows];
};

// Some columns in ascending order, and where the rows' own lists go on after them.
struct OutlierList {
    int32_t count;
    int32_t next;  // kNoColumn after the last
    const int32_t* column[kListRows];
    const float* rest[kListRows];
    OutlierColumn columns[kListColumns];
};

// Fills the list with the next columns, as many as fit. Branches don't depend on the rows: they would be unpredictable.
template <bool kNibbles>
PENSTOCK_INLINE void advance(OutlierList& list) {
    const int32_t* column[kListRows];
    const float* rest[kListRows];
    for (int r = 0; r < kListRows; ++r) {
        column[r] = list.column[r];
        rest[r] = list.rest[r];
    }
    int count = 0;
    int32_t next;
    while (true) {
        next = *column[0];
        for (int r = 1; r < kListRows; ++r) next = *column[r] < next ? *column[r] : next;
        if (next == kNoColumn || count == kListColumns) break;
        OutlierColumn& to = list.columns[count++];
        to.place = place_of<kNibbles>(static_cast<uint32_t>(next));
        for (int r = 0; r < kListRows; ++r) {
            const bool has = *column[r] == next;
            to.rest[r] = has ? *rest[r] : 0.0f;
            column[r] += has;
            rest[r] += has;
        }
    }
    list.count = count;
    list.next = next;
    for (int r = 0; r < kListRows; ++r) {
        list.column[r] = column[r];
        list.rest[r] = rest[r];
    }
}

// The first columns of rows [row, row + rows).
template <bool kNibbles>
PENSTOCK_INLINE void begin(OutlierList& list, const Activation& a, int64_t row, int rows) {
    for (int r = 0; r < kListRows; ++r) {
        list.column[r] = r < rows ? a.outlier + (row + r) * a.outliers_per_row : &kNoColumn;
        list.rest[r] = r < rows ? a.outlier_rest + (row + r) * a.outliers_per_row : &kNoRest;
    }
    advance<kNibbles>(list);
}

}  // namespace penstock::PENSTOCK_ISA
