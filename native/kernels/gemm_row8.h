// Products of weights with one scale for each output channel and rows with one scale each (kU8Row): all sums are of integers.

#pragma once

#include "kernels.h"

namespace penstock::PENSTOCK_ISA {

void gemm_row8(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e);

}  // namespace penstock::PENSTOCK_ISA
