// Numbers as bf16: the upper half of a float32.

#pragma once

#include <bit>
#include <cstdint>

namespace penstock {

// To the nearest, ties to even; NaN stays NaN. No branches, so that several are converted at once.
inline uint16_t to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    return static_cast<uint16_t>(((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x400000u : rounded) >> 16);
}

inline float from_bf16(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }

}  // namespace penstock
