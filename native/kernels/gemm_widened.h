// Products of many rows by quantised weights on Arm (gemm_widened.cpp). Called by gemm.cpp alone.

#pragma once

#include "kernels.h"

namespace penstock::PENSTOCK_ISA {

// As `gemm`.
void gemm_widened(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e);

}  // namespace penstock::PENSTOCK_ISA
