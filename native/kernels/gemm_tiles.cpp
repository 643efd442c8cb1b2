// Matrix products by tiles (tiles.h): rows of bf16 times weights that are widened to bf16, with float32 sums over all columns.
//
// Up to 32 rows: a block of 32 columns of two panels (16 output channels each) is widened and multiplied at once, block by block.
//
// More rows are read from the second-level cache, so each tile of them is loaded once for four panels: up to 288 columns of these, a piece,
// are widened, and multiply all rows of a task. Sums wait in memory between pieces.
//
// Widening and products want the same ports: together they take at least the sum of their times. A sum's order follows from its columns
// alone, so a row's bits do not depend on the others.

#include "gemm_tile.h"
#include "parts.h"
#include "row_tiles.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kBlockCols = kTileRowBytes / 2;      // columns of a tile operation: a group of quantised weights
static_assert(kBlockCols == kGroup);
constexpr int kBlockValues = kBlockCols * kPanel;  // weights of a panel in one
constexpr int kPieceBlocks = 9;                    // of each of four panels: 36 KiB
constexpr int kMostRows = 256;                     // whose sums of four panels wait in memory
constexpr int kInputBytes = 5 << 18;               // of these rows, which stay in the second-level cache: a core of Xeon has 2 MiB
constexpr int kAheadBlocks = 8;                    // of weights, which come from memory if rows are few
constexpr int kMostRowTiles = kMostRows / kMostTileRows;

// Truncation to bf16 shrinks a number by 1/370 on average, so weights are enlarged by that first: rounding to nearest would take two more
// operations for every eight.
constexpr float kTruncation = 1.0f + 1.0f / 370.0f;

// 1 + bits / 2^width as a float, of the `width` bits of each lane from `kAt` on.
template <int kAt, int kWidth>
PENSTOCK_INLINE __m512 one_and(__m512i lanes) {
    constexpr int kShift = 23 - kWidth - kAt;
    const __m512i there = kShift > 0 ? _mm512_slli_epi32(lanes, kShift > 0 ? kShift : 0) : _mm512_srli_epi32(lanes, kShift < 0 ? -kShift : 0);
    const __m512i mask = _mm512_set1_epi32(((1 << kWidth) - 1) << (23 - kWidth)), one = _mm512_set1_epi32(0x3F800000);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(there, mask, one, 0xEA));  // (there & mask) | one
}

// Two columns of sixteen channels: w = (1 + q / 2^width) * factor + shift, truncated to bf16.
template <int kAt, int kNext, int kWidth>
PENSTOCK_INLINE void widen_pair(uint16_t* to, __m512i lanes, __m512 factor, __m512 shift) {
    const __m512i even = _mm512_castps_si512(_mm512_fmadd_ps(one_and<kAt, kWidth>(lanes), factor, shift));
    const __m512i odd = _mm512_castps_si512(_mm512_fmadd_ps(one_and<kNext, kWidth>(lanes), factor, shift));
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000));
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(odd, upper, _mm512_srli_epi32(even, 16), 0xEA));
}

template <WeightKind kKind>
PENSTOCK_INLINE void fetch_block(const Panel& panel, int block) {
    if constexpr (kKind == WeightKind::kBf16) {
        PENSTOCK_UNROLL for (int i = 0; i < 2 * kBlockValues; i += 64) prefetch(panel.quants + int64_t{block} * 2 * kBlockValues + i);
    } else {
        PENSTOCK_UNROLL for (int i = 0; i < Layout<kKind>::kGroupBytes; i += 64) prefetch(quants_of<kKind>(panel, block) + i);
        prefetch(scales_of<kKind>(panel, block));
        if constexpr (Layout<kKind>::kAffine) prefetch(offsets_of<kKind>(panel, block / 2));
    }
}

// Widens a block, one group of a panel's columns, into a tile's layout: [16 pairs of columns][16 channels][2].
template <WeightKind kKind>
PENSTOCK_INLINE void widen_block(const Panel& panel, int block, uint16_t* to) {
    constexpr bool kTable = Layout<kKind>::kTable;
    const uint8_t* const quants = quants_of<kKind>(panel, block);
    // Without its last two bits, so that 24 d and 384 d below are exact and a weight of zero stays zero.
    const __m512i grown = _mm512_castps_si512(_mm512_mul_ps(load_f16(scales_of<kKind>(panel, block)).v, _mm512_set1_ps(kTruncation)));
    const __m512 d = _mm512_castsi512_ps(_mm512_and_si512(grown, _mm512_set1_epi32(~3)));
    __m512 m = _mm512_setzero_ps();
    if constexpr (Layout<kKind>::kAffine) {
        const __m512i both = _mm512_loadu_si512(offsets_of<kKind>(panel, block / 2));  // of two blocks
        const __m512i bits = block % 2 ? _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000))) : _mm512_slli_epi32(both, 16);
        m = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(kTruncation));
    }
    const auto line = [&](int i) PENSTOCK_LAMBDA { return _mm512_loadu_si512(quants + 64 * i); };
    const auto pairs = [&](int i) PENSTOCK_LAMBDA { return to + i * 2 * kPanel; };
    if constexpr (Layout<kKind>::kSmall) {
        const __m512 factor = _mm512_mul_ps(d, _mm512_set1_ps(16.0f)), shift = _mm512_fmadd_ps(d, _mm512_set1_ps(-(16.0f + 8.0f)), m);
        PENSTOCK_UNROLL for (int i = 0; i < 4; ++i) {
            const __m512i lanes = line(i);
            widen_pair<0, 8, 4>(pairs(2 * i), lanes, factor, shift);
            widen_pair<16, 24, 4>(pairs(2 * i + 1), lanes, factor, shift);
            widen_pair<4, 12, 4>(pairs(8 + 2 * i), lanes, factor, shift);
            widen_pair<20, 28, 4>(pairs(8 + 2 * i + 1), lanes, factor, shift);
        }
    } else {
        const __m512 factor = _mm512_mul_ps(d, _mm512_set1_ps(256.0f)), shift = _mm512_fmadd_ps(d, _mm512_set1_ps(-(256.0f + 128.0f)), m);
        PENSTOCK_UNROLL for (int i = 0; i < 8; ++i) {
            __m512i lanes = line(kTable ? i % 4 : i);
            if constexpr (kTable) lanes = look_up(i < 4 ? low_nibbles(vb{lanes}) : high_nibbles(vb{lanes}), panel.table).v;
            widen_pair<0, 8, 8>(pairs(2 * i), lanes, factor, shift);
            widen_pair<16, 24, 8>(pairs(2 * i + 1), lanes, factor, shift);
        }
    }
}

constexpr int kMostPanels = 4;

// Panels that are computed together, and those after them, which are fetched in time. With a gate, the first half of them is the gate's.
struct Panels {
    Panel now[kMostPanels], later[kMostPanels];
    int blocks;  // of columns
};

// Fetches what is kAheadBlocks after a block of the i-th panel, and returns the block as a tile wants it: in `scratch`, or, of bf16, where
// it lies.
template <WeightKind kKind>
PENSTOCK_INLINE const uint16_t* tile_of(const Panels& panels, int i, int block, uint16_t* scratch) {
    const int ahead = block + kAheadBlocks;
    if (ahead < panels.blocks) fetch_block<kKind>(panels.now[i], ahead);
    else fetch_block<kKind>(panels.later[i], ahead - panels.blocks);
    if constexpr (kKind == WeightKind::kBf16) {
        return reinterpret_cast<const uint16_t*>(panels.now[i].quants) + int64_t{block} * kBlockValues;
    } else {
        widen_block<kKind>(panels.now[i], block, scratch);
        return scratch;
    }
}

// Where the sums of a tile of rows and the i-th panel are: [16 rows][16 channels].
PENSTOCK_INLINE float* sums_of(float* sums, int tile, int i) { return sums + (tile * kMostPanels + i) * kMostTileRows * kPanel; }

constexpr int64_t kSumStride = kPanel * sizeof(float);

// One or two tiles of rows by two panels: each block is multiplied as soon as it is widened, and sums stay in tiles.
template <WeightKind kKind, int kTiles>
PENSTOCK_INLINE void sum_few(Tiles& tiles, const Panels& panels, const Activation& a, const RowTiles& rows, float* sums) {
    alignas(64) uint16_t scratch[2][kBlockValues];
    const int64_t stride = 2 * a.bf16_stride;
    const uint16_t *first = a.bf16 + rows.begin(0) * a.bf16_stride, *second = a.bf16 + rows.begin(kTiles - 1) * a.bf16_stride;
    tiles.zero<0>();
    tiles.zero<1>();
    if constexpr (kTiles > 1) tiles.zero<2>(), tiles.zero<3>();
    for (int block = 0; block < panels.blocks; ++block, first += kBlockCols, second += kBlockCols) {
        const uint16_t *left = tile_of<kKind>(panels, 0, block, scratch[0]), *right = tile_of<kKind>(panels, 1, block, scratch[1]);
        tiles.load<4>(first, stride);
        tiles.load<6>(left, kTileRowBytes);
        tiles.add_bf16<0, 4, 6>();
        tiles.load<7>(right, kTileRowBytes);
        tiles.add_bf16<1, 4, 7>();
        if constexpr (kTiles > 1) {
            tiles.load<5>(second, stride);
            tiles.add_bf16<2, 5, 6>();
            tiles.add_bf16<3, 5, 7>();
        }
    }
    tiles.store<0>(sums_of(sums, 0, 0), kSumStride);
    tiles.store<1>(sums_of(sums, 0, 1), kSumStride);
    if constexpr (kTiles > 1) tiles.store<2>(sums_of(sums, 1, 0), kSumStride), tiles.store<3>(sums_of(sums, 1, 1), kSumStride);
}

// More rows by four panels: a piece is widened once for all of them. Their sums wait in memory between pieces.
template <WeightKind kKind>
PENSTOCK_INLINE void sum_many(Tiles& tiles, const Panels& panels, const Activation& a, const RowTiles& rows, float* sums) {
    alignas(64) uint16_t scratch[kMostPanels][kPieceBlocks * kBlockValues];
    const int64_t stride = 2 * a.bf16_stride;
    for (int begin = 0; begin < panels.blocks; begin += kPieceBlocks) {
        const int end = least(begin + kPieceBlocks, panels.blocks);
        const uint16_t* weights[kMostPanels];
        for (int i = 0; i < kMostPanels; ++i) {
            weights[i] = tile_of<kKind>(panels, i, begin, scratch[i]);
            for (int block = begin + 1; block < end; ++block) tile_of<kKind>(panels, i, block, scratch[i] + (block - begin) * kBlockValues);
        }
        for (int tile = 0; tile < rows.count; ++tile) {
            float* const at_sums[] = {sums_of(sums, tile, 0), sums_of(sums, tile, 1), sums_of(sums, tile, 2), sums_of(sums, tile, 3)};
            if (begin == 0) {
                tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
            } else {
                tiles.load<0>(at_sums[0], kSumStride);
                tiles.load<1>(at_sums[1], kSumStride);
                tiles.load<2>(at_sums[2], kSumStride);
                tiles.load<3>(at_sums[3], kSumStride);
            }
            const uint16_t* input = a.bf16 + rows.begin(tile) * a.bf16_stride + begin * kBlockCols;
            for (int at = 0; at < (end - begin) * kBlockValues; at += kBlockValues, input += kBlockCols) {
                tiles.load<4>(input, stride);
                tiles.load<6>(weights[0] + at, kTileRowBytes);
                tiles.add_bf16<0, 4, 6>();
                tiles.load<7>(weights[1] + at, kTileRowBytes);
                tiles.add_bf16<1, 4, 7>();
                tiles.load<6>(weights[2] + at, kTileRowBytes);
                tiles.add_bf16<2, 4, 6>();
                tiles.load<7>(weights[3] + at, kTileRowBytes);
                tiles.add_bf16<3, 4, 7>();
            }
            tiles.store<0>(at_sums[0], kSumStride);
            tiles.store<1>(at_sums[1], kSumStride);
            tiles.store<2>(at_sums[2], kSumStride);
            tiles.store<3>(at_sums[3], kSumStride);
        }
    }
}

// Stores finished sums to e.out, or, given a gate's sums, activation(gate) * sum.
PENSTOCK_INLINE void finish(const float* sums, const float* gates, ActivationKind kind, int row, int num_rows, int panel, int channels,
                            const Epilogue& e) {
    const int column = panel * kPanel, count = least(channels - column, kPanel);
    for (int r = 0; r < num_rows; ++r) {
        const int64_t at = (row + r) * e.ld + column;
        vf value = load(sums + r * kPanel);
        if (gates) value = gated(load(gates + r * kPanel), value, kind);
        if (e.bias) value = add(value, load_some(e.bias + column, count));
        if (e.residual) value = add(value, load_some(e.residual + at, count));
        store_some(e.out + at, value, count);
    }
}

// A product, or one with a gate, by kPanels panels at a time, whose sums `sum` computes. If fewer are left, the last one is computed again
// and not stored.
template <WeightKind kKind, int kPanels, typename Sum>
PENSTOCK_INLINE void for_panels(const PackedMatrix& w, const PackedMatrix* gate, ActivationKind kind, const RowTiles& rows,
                                PanelRange range, const Epilogue& e, Sum sum) {
    alignas(64) float sums[(kPanels == 2 ? 2 : kMostRowTiles) * kMostPanels * kMostTileRows * kPanel];
    const int step = gate ? kPanels / 2 : kPanels;
    Panels panels;
    panels.blocks = w.cols / kBlockCols;
    for (int begin = range.begin; begin < range.end; begin += step) {
        const int end = least(begin + step, range.end), next = end < range.end ? end : range.next;
        for (int i = 0; i < kPanels; ++i) {
            const int panel = begin + i % step;
            const PackedMatrix& of = gate && i < step ? *gate : w;
            panels.now[i] = panel_of<kKind>(of, panel < end ? panel : end - 1);
            panels.later[i] = panel_of<kKind>(of, next + i % step);
        }
        sum(panels, sums);
        for (int tile = 0; tile < rows.count; ++tile) {
            const int skipped = rows.skipped(tile), row = rows.begin(tile) + skipped, count = rows.rows - skipped;
            for (int panel = begin; panel < end; ++panel) {
                const float *first = sums_of(sums, tile, panel - begin) + skipped * kPanel, *second = first + step * kMostTileRows * kPanel;
                finish(gate ? second : first, gate ? first : nullptr, kind, row, count, panel, w.rows, e);
            }
        }
    }
}

// Rows [row0, row1), at most kMostRows, of a product, or of one with a gate: activation(a @ gate.T) * (a @ w.T).
template <WeightKind kKind>
void multiply_rows(const PackedMatrix& w, const PackedMatrix* gate, ActivationKind kind, const Activation& a, int row0, int row1,
                   PanelRange range, const Epilogue& e) {
    const RowTiles rows(row0, row1);
    TileShape shapes[8];
    for (int i = 0; i < 6; ++i) shapes[i].rows = static_cast<uint8_t>(rows.rows);
    Tiles tiles(shapes);
    const auto few = [&](const Panels& panels, float* sums) PENSTOCK_LAMBDA {
        rows.count == 1 ? sum_few<kKind, 1>(tiles, panels, a, rows, sums) : sum_few<kKind, 2>(tiles, panels, a, rows, sums);
    };
    const auto many = [&](const Panels& panels, float* sums) PENSTOCK_LAMBDA { sum_many<kKind>(tiles, panels, a, rows, sums); };
    if (rows.count <= 2) for_panels<kKind, 2>(w, gate, kind, rows, range, e, few);
    else for_panels<kKind, 4>(w, gate, kind, rows, range, e, many);
}

PENSTOCK_INLINE void for_rows(const PackedMatrix& w, const PackedMatrix* gate, ActivationKind kind, const Activation& a, int row0, int row1,
                              PanelRange range, const Epilogue& e) {
    for_kind(w.kind, [&]<WeightKind kKind>() PENSTOCK_LAMBDA {
        for (int row = row0; row < row1; row += kMostRows) {
            multiply_rows<kKind>(w, gate, kind, a, row, least(row + kMostRows, row1), range, e);
        }
    });
}

}  // namespace

int tile_panels(int rows) { return rows > 2 * kMostTileRows ? kMostPanels : 2; }

int task_rows(int cols) {
    const int rows = kInputBytes / (2 * cols) / (2 * kMostTileRows) * (2 * kMostTileRows);
    return rows < 2 * kMostTileRows ? 2 * kMostTileRows : least(rows, kMostRows);
}

void gemm(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e, const UpcomingKv& upcoming) {
    const bool is_row8 = w.kind == WeightKind::kU8Row;
    if (w.cols % (is_row8 ? kTileRowBytes : kBlockCols) != 0) return avx512::kernel_table().gemm(w, a, row0, row1, range, e, upcoming);
    if (is_row8) return gemm_row8(w, a, row0, row1, range, e);
    for_rows(w, nullptr, {}, a, row0, row1, range, e);
}

void gemm_gated(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, PanelRange range,
                ActivationKind kind, const Epilogue& e, const UpcomingKv& upcoming) {
    if (gate.cols % kBlockCols != 0) return avx512::kernel_table().gemm_gated(gate, up, a, row0, row1, range, kind, e, upcoming);
    for_rows(up, &gate, kind, a, row0, row1, range, e);
}

}  // namespace penstock::PENSTOCK_ISA
