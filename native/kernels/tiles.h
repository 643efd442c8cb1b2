// Tiles: eight small matrices that one instruction multiplies, Intel's AMX, and the same in portable C++.
//
// A tile has up to 16 rows of up to 64 bytes. A product adds A B to C [16][16] float32: A is [16][32] bf16, and B [16][16][2], two rows of
// the mathematical [32, 16] side by side. Or C is int32, A [16][64] int8, and B [16][16][4] uint8.
//
// The order of float32 sums is the hardware's (`add_bf16` below): equal for every row and column of C whatever the others are, so a
// row's bits do not depend on the shape of a tile. Both implementations give the same bits; `tests/backends/test_tiles.py` compares
// them where the hardware is. The file that includes this is compiled once for each, with PENSTOCK_EMULATES_TILES or without.

#pragma once

#include <stdint.h>
#include <string.h>

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

constexpr int kMostTileRows = 16, kTileRowBytes = 64;

struct TileShape {
    uint8_t rows = kMostTileRows;
    uint8_t row_bytes = kTileRowBytes;
};

#if !defined(PENSTOCK_EMULATES_TILES)

// The tiles of this thread, from here to the end of the scope: then they are released, so that an idle thread has none to be saved. The
// process must have asked for them (cpu.cpp).
class Tiles {
  public:
    explicit __attribute__((always_inline)) Tiles(const TileShape (&shapes)[8]) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; ++i) config.rows[i] = shapes[i].rows, config.row_bytes[i] = shapes[i].row_bytes;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    __attribute__((always_inline)) ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int kTile>
    __attribute__((always_inline)) void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
    }
    // Rows are `stride` bytes apart, here and below.
    template <int kTile>
    __attribute__((always_inline)) void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile>
    __attribute__((always_inline)) void store(void* to, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kC, int kA, int kB>
    __attribute__((always_inline)) void add_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
    }
    template <int kC, int kA, int kB>
    __attribute__((always_inline)) void add_bytes() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
    }
};

#else

inline float flushed(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x; }

inline float wide(uint16_t bf16) { return __builtin_bit_cast(float, static_cast<uint32_t>(bf16) << 16); }

// Traps on what a processor would refuse, so that tests find it without the hardware.
inline void demand(bool is_allowed) {
    if (!is_allowed) __builtin_trap();
}

// The same in memory. Sanitizers check what is loaded and stored; within products they would take most of the time.
class Tiles {
  public:
    explicit Tiles(const TileShape (&shapes)[8]) {
        memcpy(shapes_, shapes, sizeof(shapes_));
        for (const TileShape& shape : shapes_) {
            demand(shape.rows >= 1 && shape.rows <= kMostTileRows);
            demand(shape.row_bytes >= 4 && shape.row_bytes <= kTileRowBytes && shape.row_bytes % 4 == 0);
        }
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int kTile>
    void zero() {
        memset(data_[kTile], 0, sizeof(data_[kTile]));
    }
    template <int kTile>
    void load(const void* from, int64_t stride) {
        zero<kTile>();
        for (int m = 0; m < shapes_[kTile].rows; ++m) {
            memcpy(row(kTile, m), static_cast<const uint8_t*>(from) + m * stride, shapes_[kTile].row_bytes);
        }
    }
    template <int kTile>
    void store(void* to, int64_t stride) const {
        for (int m = 0; m < shapes_[kTile].rows; ++m) {
            memcpy(static_cast<uint8_t*>(to) + m * stride, data_[kTile] + m * kTileRowBytes, shapes_[kTile].row_bytes);
        }
    }
    // Two chains of fused multiply-adds from zero, of even and of odd columns in ascending order; what was there plus the sum of both.
    // Denormal numbers, in and out, are zeros. (Measured: no difference in 1.5 million sums of a Granite Rapids. Where rounding lifts a
    // denormal number to the smallest normal one, hardware might still say zero.)
    template <int kC, int kA, int kB>
    [[gnu::no_sanitize("address", "undefined")]] void add_bf16() {
        check(kC, kA, kB);
        constexpr int kCols = kTileRowBytes / 4;
        const int pairs = shapes_[kA].row_bytes / 4;
        alignas(64) float b[kMostTileRows][2][kCols];
        for (int k = 0; k < pairs; ++k) {
            uint16_t of_b[2 * kCols];
            memcpy(of_b, row(kB, k), sizeof(of_b));
            for (int n = 0; n < kCols; ++n) b[k][0][n] = flushed(wide(of_b[2 * n])), b[k][1][n] = flushed(wide(of_b[2 * n + 1]));
        }
        for (int m = 0; m < shapes_[kC].rows; ++m) {
            alignas(64) float even[kCols] = {}, odd[kCols] = {}, sum[kCols];
            for (int k = 0; k < pairs; ++k) {
                uint16_t of_a[2];
                memcpy(of_a, row(kA, m) + 4 * k, sizeof(of_a));
                const float first = flushed(wide(of_a[0])), second = flushed(wide(of_a[1]));
                for (int n = 0; n < kCols; ++n) even[n] = flushed(__builtin_fmaf(first, b[k][0][n], even[n]));
                for (int n = 0; n < kCols; ++n) odd[n] = flushed(__builtin_fmaf(second, b[k][1][n], odd[n]));
            }
            memcpy(sum, row(kC, m), sizeof(sum));
            for (int n = 0; n < kCols; ++n) sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
            memcpy(row(kC, m), sum, shapes_[kC].row_bytes);
        }
    }
    // Exact: sums of int32 that overflow wrap around.
    template <int kC, int kA, int kB>
    [[gnu::no_sanitize("address", "undefined")]] void add_bytes() {
        check(kC, kA, kB);
        constexpr int kCols = kTileRowBytes / 4;
        for (int m = 0; m < shapes_[kC].rows; ++m) {
            uint32_t sum[kCols];
            memcpy(sum, row(kC, m), sizeof(sum));
            for (int k = 0; k < shapes_[kA].row_bytes; ++k) {
                const int left = static_cast<int8_t>(row(kA, m)[k]);
                const uint8_t* const right = row(kB, k / 4) + k % 4;
                for (int n = 0; n < kCols; ++n) sum[n] += static_cast<uint32_t>(left * right[4 * n]);
            }
            memcpy(row(kC, m), sum, shapes_[kC].row_bytes);
        }
    }

  private:
    uint8_t* row(int tile, int m) { return data_[tile] + m * kTileRowBytes; }

    void check(int c, int a, int b) const {
        demand(shapes_[c].rows == shapes_[a].rows && shapes_[c].row_bytes == shapes_[b].row_bytes);
        demand(shapes_[a].row_bytes == 4 * shapes_[b].rows);
    }

    TileShape shapes_[8];
    alignas(64) uint8_t data_[8][kMostTileRows * kTileRowBytes];
};

#endif

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
