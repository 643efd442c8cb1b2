// Bytes of a weight file, repacked into the layout of kernels.h. Runs once, at load.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/kernels.h"

namespace penstock {

// Memory of a packed matrix: aligned to 64 bytes, freed with it.
struct PackedStorage {
    PackedMatrix matrix{};
    std::unique_ptr<uint8_t, void (*)(void*)> quants{nullptr, nullptr};
    std::unique_ptr<uint8_t, void (*)(void*)> scales{nullptr, nullptr};
};

enum class SourceFormat : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kBf16 = 3 };

// `source` is row-major as in the file: GGML groups, or bf16. Quantised rows have a multiple of 32 columns.
// Panels [panel0, panel1) are written; disjoint ranges may run on different threads.
PackedStorage allocate_packed(SourceFormat format, int rows, int cols);
void pack_panels(PackedStorage& packed, const uint8_t* source, SourceFormat format, int panel0, int panel1);

// 64-byte aligned memory, zeroed or (for buffers that are written before they are read) not; or std::bad_alloc.
std::unique_ptr<uint8_t, void (*)(void*)> allocate_aligned(int64_t bytes, bool zeroed);

}  // namespace penstock
