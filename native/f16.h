// Numbers as f16, the half precision of IEEE 754.

#pragma once

#include <bit>
#include <cstdint>

namespace penstock {

// Infinity and NaN stay so. No branches, so that several are converted at once.
inline float from_f16(uint16_t h) {
    const uint32_t size = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(size) * 0x1p112f);  // mends the exponent, of subnormals too
    return std::bit_cast<float>((size >= 0x0F800000u ? size | 0x7F800000u : finite) | static_cast<uint32_t>(h & 0x8000u) << 16);
}

}  // namespace penstock
