#include "packing.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace penstock {

namespace {

constexpr size_t kMapFromBytes = size_t{1} << 18;  // malloc keeps freed pieces of this size, once it has seen a few

int group_bytes(SourceFormat format) {
    switch (format) {
        case SourceFormat::kQ4_0: return 18;
        case SourceFormat::kQ4_1: return 20;
        case SourceFormat::kQ8_0: return 34;
        case SourceFormat::kBf16: break;
    }
    return 0;
}

WeightKind kind_of(SourceFormat format) {
    switch (format) {
        case SourceFormat::kQ4_0: return WeightKind::kU4Symmetric;
        case SourceFormat::kQ4_1: return WeightKind::kU4Affine;
        case SourceFormat::kQ8_0: return WeightKind::kU8Symmetric;
        case SourceFormat::kBf16: break;
    }
    return WeightKind::kBf16;
}

// One row of one group: `lane` of the 64-byte chunks at `quants`.
void pack_group(const uint8_t* source, SourceFormat format, int lane, uint8_t* quants, uint16_t* scales) {
    std::memcpy(scales + lane, source, 2);
    source += 2;
    if (format == SourceFormat::kQ4_1) {
        std::memcpy(scales + kPanel + lane, source, 2);
        source += 2;
    }
    const bool wide = format == SourceFormat::kQ8_0;
    for (int i = 0; i < (wide ? kGroup : kGroup / 2); ++i) {
        quants[i / 4 * 64 + lane * 4 + i % 4] = wide ? static_cast<uint8_t>(source[i] ^ 0x80) : source[i];
    }
}

void pack_quantised(PackedStorage& packed, const uint8_t* source, SourceFormat format, int panel) {
    const PackedMatrix& m = packed.matrix;
    const int groups = m.cols / kGroup, from_bytes = group_bytes(format);
    const int to_bytes = kPanel * (format == SourceFormat::kQ8_0 ? kGroup : kGroup / 2);
    const int to_scales = format == SourceFormat::kQ4_1 ? 2 * kPanel : kPanel;
    for (int lane = 0; lane < kPanel && panel * kPanel + lane < m.rows; ++lane) {
        const uint8_t* row = source + static_cast<int64_t>(panel * kPanel + lane) * groups * from_bytes;
        for (int g = 0; g < groups; ++g) {
            const int64_t at = static_cast<int64_t>(panel) * groups + g;
            pack_group(row + static_cast<int64_t>(g) * from_bytes, format, lane, packed.quants.get() + at * to_bytes,
                       reinterpret_cast<uint16_t*>(packed.scales.get()) + at * to_scales);
        }
    }
}

void pack_bf16(PackedStorage& packed, const uint8_t* source, int panel) {
    const PackedMatrix& m = packed.matrix;
    const int64_t pairs = (m.cols + 1) / 2;
    uint16_t* to = reinterpret_cast<uint16_t*>(packed.quants.get()) + panel * pairs * 2 * kPanel;
    for (int lane = 0; lane < kPanel && panel * kPanel + lane < m.rows; ++lane) {
        const uint16_t* row = reinterpret_cast<const uint16_t*>(source) + static_cast<int64_t>(panel * kPanel + lane) * m.cols;
        for (int k = 0; k < m.cols; ++k) std::memcpy(to + (k / 2 * kPanel + lane) * 2 + k % 2, row + k, 2);
    }
}

}  // namespace

void FreeMemory::operator()(uint8_t* memory) const {
    if (mapped_bytes > 0) {
        munmap(memory, mapped_bytes);
    } else {
        std::free(memory);
    }
}

Memory allocate_aligned(int64_t bytes, bool zeroed) {
    const size_t size = static_cast<size_t>(std::max<int64_t>(1, (bytes + 63) / 64)) * 64;
    if (size >= kMapFromBytes) {
        void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // zeroed
        if (memory == MAP_FAILED) throw std::bad_alloc();
        return Memory(static_cast<uint8_t*>(memory), FreeMemory{size});
    }
    void* memory = std::aligned_alloc(64, size);
    if (!memory) throw std::bad_alloc();
    if (zeroed) std::memset(memory, 0, size);
    return Memory(static_cast<uint8_t*>(memory), FreeMemory{});
}

PackedStorage allocate_packed(SourceFormat format, int rows, int cols) {
    PackedStorage packed;
    const int64_t panels = (rows + kPanel - 1) / kPanel;
    if (format == SourceFormat::kBf16) {
        packed.quants = allocate_aligned(panels * ((cols + 1) / 2) * 64, true);
        packed.scales = allocate_aligned(0, true);
    } else {
        const int64_t groups = panels * (cols / kGroup);
        packed.quants = allocate_aligned(groups * kPanel * (format == SourceFormat::kQ8_0 ? kGroup : kGroup / 2), true);
        packed.scales = allocate_aligned(groups * kPanel * 2 * (format == SourceFormat::kQ4_1 ? 2 : 1), true);
    }
    packed.matrix = {kind_of(format), rows,
                     cols, static_cast<int32_t>(panels),
                     packed.quants.get(), reinterpret_cast<const uint16_t*>(packed.scales.get())};
    return packed;
}

void pack_panels(PackedStorage& packed, const uint8_t* source, SourceFormat format, int panel0, int panel1) {
    for (int panel = panel0; panel < panel1; ++panel) {
        if (format == SourceFormat::kBf16) {
            pack_bf16(packed, source, panel);
        } else {
            pack_quantised(packed, source, format, panel);
        }
    }
}

}  // namespace penstock
