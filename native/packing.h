// Bytes of a weight file, repacked into the layout of kernels.h. Runs once, at load.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "blocks.h"
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

// Zeroed memory of the system's own pages, huge ones where it has them; or std::bad_alloc. For what is larger than a cache.
Memory allocate_huge(int64_t bytes);

// Memory for weights, side by side in huge pages where the system has them: a step reads all of it, once, and small
// pages would end the processor's prefetching every 4 KiB.
class Arena {
  public:
    // 64-byte aligned, zeroed, valid as long as the arena; or std::bad_alloc.
    uint8_t* take(int64_t bytes);

  private:
    std::vector<Memory> chunks_;
    uint8_t* next_ = nullptr;
    int64_t left_ = 0;
};

// A packed matrix whose memory is that of an arena.
struct PackedStorage {
    PackedMatrix matrix{};
    uint8_t* quants = nullptr;
    uint16_t* scales = nullptr;
    uint16_t* offsets = nullptr;
    int64_t bytes = 0;
};

// `source` is row-major as in the file: blocks of the format, or bf16. Quantised rows have whole blocks.
// Panels [panel0, panel1) are written; disjoint ranges may run on different threads. False: a scale is no finite number.
PackedStorage allocate_packed(Arena& arena, SourceFormat format, int rows, int cols);
bool pack_panels(PackedStorage& packed, const uint8_t* source, SourceFormat format, int panel0, int panel1);

}  // namespace penstock
