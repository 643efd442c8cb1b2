#include "packing.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace penstock {

namespace {

constexpr size_t kHugeFromBytes = size_t{1} << 22;
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

bool is_finite_f16(uint16_t h) { return (h & 0x7C00u) != 0x7C00u; }

float widen_f16(uint16_t h) {
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    float size;
    std::memcpy(&size, &magnitude, 4);
    size *= 0x1p112f;  // mends the exponent, of subnormals too
    return h & 0x8000u ? -size : size;
}

uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

constexpr uint16_t kOneF16 = 0x3C00;

// One row of one group: `lane` of the 64-byte chunks at `quants`, and of the sixteen `scales`; false if a scale is not finite.
bool pack_group(const uint8_t* source, SourceFormat format, int lane, uint8_t* quants, uint16_t* scales, uint16_t* offset) {
    uint16_t d;
    std::memcpy(&d, source, 2);
    source += 2;
    if (!is_finite_f16(d)) return false;
    const float scale = widen_f16(d);
    if (format == SourceFormat::kQ4_1) {
        uint16_t m;
        std::memcpy(&m, source, 2);
        source += 2;
        if (!is_finite_f16(m)) return false;
        *offset = to_bf16(widen_f16(m) + 8.0f * scale);
    }
    const bool wide = format == SourceFormat::kQ8_0;
    scales[lane] = scale == 0.0f ? kOneF16 : d;
    for (int i = 0; i < (wide ? kGroup : kGroup / 2); ++i) {
        uint8_t q = wide ? static_cast<uint8_t>(source[i] ^ 0x80) : source[i];
        if (scale == 0.0f) q = wide ? 0x80 : 0x88;
        quants[i / 4 * 64 + lane * 4 + i % 4] = q;
    }
    return true;
}

bool pack_quantised(PackedStorage& packed, const uint8_t* source, SourceFormat format, int panel) {
    const PackedMatrix& m = packed.matrix;
    const int groups = m.cols / kGroup, pairs = (groups + 1) / 2, from_bytes = group_bytes(format);
    const int to_bytes = kPanel * (format == SourceFormat::kQ8_0 ? kGroup : kGroup / 2);
    uint16_t* const scales = reinterpret_cast<uint16_t*>(packed.scales.get());
    uint16_t* const offsets = reinterpret_cast<uint16_t*>(packed.offsets.get());
    for (int lane = 0; lane < kPanel && panel * kPanel + lane < m.rows; ++lane) {
        const uint8_t* row = source + static_cast<int64_t>(panel * kPanel + lane) * groups * from_bytes;
        for (int g = 0; g < groups; ++g) {
            const int64_t at = static_cast<int64_t>(panel) * groups + g;
            const int64_t pair = static_cast<int64_t>(panel) * pairs + g / 2;
            uint16_t* const offset = format == SourceFormat::kQ4_1 ? offsets + (pair * kPanel + lane) * 2 + g % 2 : nullptr;
            if (!pack_group(row + static_cast<int64_t>(g) * from_bytes, format, lane, packed.quants.get() + at * to_bytes,
                            scales + at * kPanel, offset)) {
                return false;
            }
        }
    }
    return true;
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

// Weights are read once per step, from one end to the other: with small pages every 4 KiB is a miss of the TLB.
Memory allocate_weights(int64_t bytes) {
    Memory memory = allocate_aligned(bytes, true);
#if defined(MADV_HUGEPAGE)
    const size_t mapped = memory.get_deleter().mapped_bytes;
    if (mapped >= kHugeFromBytes) madvise(memory.get(), mapped, MADV_HUGEPAGE);  // advice only: whether it fails does not matter
#endif
    return memory;
}

PackedStorage allocate_packed(SourceFormat format, int rows, int cols) {
    PackedStorage packed;
    const int64_t panels = (rows + kPanel - 1) / kPanel;
    if (format == SourceFormat::kBf16) {
        packed.quants = allocate_weights(panels * ((cols + 1) / 2) * 64);
        packed.scales = allocate_weights(0);
        packed.offsets = allocate_weights(0);
    } else {
        const int64_t groups = panels * (cols / kGroup), pairs = panels * ((cols / kGroup + 1) / 2);
        packed.quants = allocate_weights(groups * kPanel * (format == SourceFormat::kQ8_0 ? kGroup : kGroup / 2));
        packed.scales = allocate_weights(groups * kPanel * 2);
        packed.offsets = allocate_weights(format == SourceFormat::kQ4_1 ? pairs * kPanel * 4 : 0);
    }
    packed.matrix = {kind_of(format), rows,
                     cols, static_cast<int32_t>(panels),
                     packed.quants.get(), reinterpret_cast<const uint16_t*>(packed.scales.get()),
                     reinterpret_cast<const uint16_t*>(packed.offsets.get())};
    return packed;
}

bool pack_panels(PackedStorage& packed, const uint8_t* source, SourceFormat format, int panel0, int panel1) {
    bool finite = true;
    for (int panel = panel0; panel < panel1; ++panel) {
        if (format == SourceFormat::kBf16) {
            pack_bf16(packed, source, panel);
        } else {
            finite = pack_quantised(packed, source, format, panel) && finite;
        }
    }
    return finite;
}

}  // namespace penstock
