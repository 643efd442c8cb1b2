// An activation of a product, with the memory that it lies in.

#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "kernels/kernels.h"
#include "packing.h"

namespace penstock {

struct OwnedActivation {
    Activation view;
    std::vector<Memory> memory;
    int64_t bytes = 0;

    OwnedActivation() = default;
    OwnedActivation(int64_t rows, int cols, bool quantised, bool by_row = false) {
        const int64_t groups = cols / kGroup;
        view.cols = cols;
        if (by_row) {
            view.outliers_per_row = outliers_of(cols);
            allocate(view.q, rows * cols);
            allocate(view.row_scale, rows);
            allocate(view.row_zero, rows);
            allocate(view.row_start, rows);
            allocate(view.outlier, rows * view.outliers_per_row);
            allocate(view.row_rest, rows * view.outliers_per_row);
            allocate(view.apart, rows * kApart);
        } else if (quantised) {
            view.outliers_per_row = outliers_of(cols);
            allocate(view.q, rows * cols);
            allocate(view.lift, rows * groups);
            allocate(view.start, rows * groups);
            allocate(view.sum, rows * ((groups + 1) & ~int64_t{1}));
            allocate(view.outlier, rows * view.outliers_per_row);
            allocate(view.outlier_rest, rows * view.outliers_per_row);
        } else {
            // Rows that are a multiple of 1 KiB apart share few sets of the first-level cache, and a tile reads 16 of them at once.
            view.bf16_stride = (cols + 1) / 2 * 2 + (cols % 512 == 0 ? kGroup : 0);
            allocate(view.bf16, rows * view.bf16_stride);
        }
    }

  private:
    template <typename T>
    void allocate(T*& field, int64_t count) {
        const int64_t size = count * static_cast<int64_t>(sizeof(T));
        memory.push_back(allocate_aligned(size, false));
        bytes += size;
        field = reinterpret_cast<T*>(memory.back().get());
    }
};

}  // namespace penstock
