// Bytes of a weight file, repacked into the layout of kernels.h. Runs once, at load.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/kernels.h"

namespace penstock {

// Gives back what `allocate_aligned` gave.
struct FreeMemory {
    size_t mapped_bytes = 0;  // 0: from malloc
    void operator()(uint8_t* memory) const;
};
using Memory = std::unique_ptr<uint8_t, FreeMemory>;

// 64-byte aligned memory, zeroed or (for buffers that are written before they are read) not; or std::bad_alloc. Large memory
// is the system's own pages: they go back to it when freed, and are first touched by the thread that fills them.
Memory allocate_aligned(int64_t bytes, bool zeroed);

// A packed matrix and its memory.
struct PackedStorage {
    PackedMatrix matrix{};
    Memory quants;
    Memory scales;
    Memory offsets;
};

enum class SourceFormat : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kBf16 = 3 };

// `source` is row-major as in the file: GGML groups, or bf16. Quantised rows have a multiple of 32 columns.
// Panels [panel0, panel1) are written; disjoint ranges may run on different threads. False: a scale is no finite number.
PackedStorage allocate_packed(SourceFormat format, int rows, int cols);
bool pack_panels(PackedStorage& packed, const uint8_t* source, SourceFormat format, int panel0, int panel1);

}  // namespace penstock
