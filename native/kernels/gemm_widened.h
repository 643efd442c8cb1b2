// Products of many rows by quantised weights on Arm (gemm_widened.cpp). Called by gemm.cpp alone.

#pragma once

#include "kernels.h"

namespace penstock::PENSTOCK_ISA {

// As `gemm`. `gates`: as of store_tile in gemm_tile.h.
void gemm_widened(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e,
                  const ActivationKind* gates);

}  // namespace penstock::PENSTOCK_ISA
