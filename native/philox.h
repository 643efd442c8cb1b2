// Random numbers that need no state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

#pragma once

#include <array>
#include <cstdint>

namespace penstock {

// Four random words for a counter and a key.
inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53} * c[0];
        const uint64_t product1 = uint64_t{0xCD9E8D57} * c[2];
        c = {static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(product1),
             static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(product0)};
        k = {k[0] + 0x9E3779B9u, k[1] + 0xBB67AE85u};
    }
    return c;
}

// The number in (0, 1) of a seed and a position: 53 random bits, centred in their interval.
inline double uniform(uint64_t seed, uint64_t position) {
    const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
    const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
    const auto out = philox4x32({low(position), high(position), 0, 0}, {low(seed), high(seed)});
    return (static_cast<double>(((uint64_t{out[0]} << 32) | out[1]) >> 11) + 0.5) * 0x1p-53;
}

}  // namespace penstock
