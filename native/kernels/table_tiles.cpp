// The table of a variant with tiles: that of AVX-512 except for what tiles compute, plus their probe and test.

#include "parts.h"
#include "simd.h"
#include "tiles.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int64_t kTileOps = 2 * 16 * 16 * (kTileRowBytes / 2);  // of a product

// Four independent sums hide the latency.
int64_t multiply_tiles(int64_t rounds) {
    Tiles tiles({});
    alignas(64) const uint8_t nothing[kMostTileRows * kTileRowBytes] = {};
    tiles.load<4>(nothing, kTileRowBytes);
    tiles.load<5>(nothing, kTileRowBytes);
    for (int64_t round = 0; round < rounds; ++round) {
        tiles.add_bf16<0, 4, 5>(), tiles.add_bf16<1, 4, 5>(), tiles.add_bf16<2, 4, 5>(), tiles.add_bf16<3, 4, 5>();
    }
    return rounds * 4 * kTileOps;
}

int64_t probe_tiles(ProbeKind kind, int64_t rounds) {
    return kind == ProbeKind::kBf16Tiles ? multiply_tiles(rounds) : avx512::kernel_table().probe_arithmetic(kind, rounds);
}

void tile_product(int rows, int k, const uint8_t* a, const uint8_t* b, uint8_t* c) {
    TileShape shapes[8];
    shapes[0].rows = shapes[1].rows = static_cast<uint8_t>(rows);
    shapes[1].row_bytes = static_cast<uint8_t>(4 * k);
    shapes[2].rows = static_cast<uint8_t>(k);
    Tiles tiles(shapes);
    tiles.load<0>(c, kTileRowBytes);
    tiles.load<1>(a, kTileRowBytes);
    tiles.load<2>(b, kTileRowBytes);
    tiles.add_bf16<0, 1, 2>();
    tiles.store<0>(c, kTileRowBytes);
}

KernelTable make_table() {
    KernelTable table = avx512::kernel_table();
    table.name = PENSTOCK_VARIANT;
    table.row8_panels = 2;
    table.tile_panels = tile_panels;
    table.task_rows = task_rows;
    table.gemm = gemm;
    table.gemm_gated = gemm_gated;
    table.probe_arithmetic = probe_tiles;
    table.has_tiles = true;
    table.strand_tokens = 128;  // a third of whose products is widening
    table.tile_product = tile_product;
    return table;
}

}  // namespace

const KernelTable& kernel_table() {
    static const KernelTable table = make_table();
    return table;
}

}  // namespace penstock::PENSTOCK_ISA
