// Matrix products by tiles (tiles.h): rows of bf16 times weights that are widened to bf16, with float32 sums over all columns.
//
// One or two panels of 16 output channels by up to 288 columns, a piece, are widened into the first-level cache, and multiply all rows
// of a task, two tiles of rows at a time:
//
//     for every one or two panels, for every piece of their columns:
//         widen the piece
//         for every two tiles of rows:  sums of 16 rows x 16 channels, column block by column block
//
// Widening is not interleaved with the products: both want the same ports, so together they take the sum of their times. Sums of more than
// two tiles of rows wait in memory between pieces. A sum's order follows from its columns alone, so a row's bits do not depend on the others.

#include "gemm_row8.h"
#include "gemm_tile.h"
#include "parts.h"
#include "row_tiles.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kBlockCols = kTileRowBytes / 2;      // columns of a tile operation: a group of quantised weights
static_assert(kBlockCols == kGroup);
constexpr int kBlockValues = kBlockCols * kPanel;  // weights of a panel in one
constexpr int kPieceBlocks = 9;                    // of each of two panels: 18 KiB, beside as much of the rows
constexpr int kMostRows = 256;                     // whose sums of two panels wait in the scratch
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

PENSTOCK_INLINE const uint16_t* bf16_block(const PackedMatrix& w, int panel, int block) {
    return reinterpret_cast<const uint16_t*>(panel_of<WeightKind::kBf16>(w, panel).quants) + int64_t{block} * kBlockValues;
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

// Widens the blocks [first, end) of a panel to `to`, and prefetches those kAheadBlocks ahead, of this panel and then of `later`.
template <WeightKind kKind>
void widen_blocks(const PackedMatrix& w, int panel, int later, int first, int end, uint16_t* to) {
    const int blocks = w.cols / kBlockCols;
    const Panel now = panel_of<kKind>(w, panel), next = panel_of<kKind>(w, later);
    for (int block = first; block < end; ++block, to += kBlockValues) {
        const int ahead = block + kAheadBlocks;
        if (ahead < blocks) fetch_block<kKind>(now, ahead);
        else fetch_block<kKind>(next, ahead - blocks);
        if constexpr (kKind != WeightKind::kBf16) widen_block<kKind>(now, block, to);
    }
}

using Widen = void (*)(const PackedMatrix&, int, int, int, int, uint16_t*);

Widen widen_of(WeightKind kind) {
    switch (kind) {
        case WeightKind::kU4Affine: return widen_blocks<WeightKind::kU4Affine>;
        case WeightKind::kU4Symmetric: return widen_blocks<WeightKind::kU4Symmetric>;
        case WeightKind::kU4Table: return widen_blocks<WeightKind::kU4Table>;
        case WeightKind::kU8Affine: return widen_blocks<WeightKind::kU8Affine>;
        case WeightKind::kU8Symmetric: return widen_blocks<WeightKind::kU8Symmetric>;
        default: return widen_blocks<WeightKind::kBf16>;  // which only fetches
    }
}

// Where the sums of a tile of rows and a panel wait: [16 rows][16 channels].
PENSTOCK_INLINE float* sums_of(float* sums, int tile, int panel) { return sums + (tile * 2 + panel) * kMostTileRows * kPanel; }

// Blocks [first, end) of the columns of one or two panels, as bf16.
struct Piece {
    int first, end;
    const uint16_t* weights[2];
    bool is_first, is_last;  // of its panels
};

// sums += rows of a piece's columns times its weights, for kTiles tiles of rows from `tile` on and kPanels panels. `stay`: between pieces
// the sums stay in the tiles, and not in memory.
template <int kTiles, int kPanels>
PENSTOCK_INLINE void multiply(Tiles& tiles, const Activation& a, const RowTiles& rows, int tile, const Piece& piece, bool stay, float* sums) {
    constexpr int64_t kSumStride = kPanel * sizeof(float);
    const auto for_sums = [&](auto f) PENSTOCK_LAMBDA {
        f.template operator()<0>(sums_of(sums, tile, 0));
        if constexpr (kPanels > 1) f.template operator()<1>(sums_of(sums, tile, 1));
        if constexpr (kTiles > 1) f.template operator()<2>(sums_of(sums, tile + 1, 0));
        if constexpr (kTiles > 1 && kPanels > 1) f.template operator()<3>(sums_of(sums, tile + 1, 1));
    };
    if (piece.is_first) {
        for_sums([&]<int kSum>(float*) PENSTOCK_LAMBDA { tiles.template zero<kSum>(); });
    } else if (!stay) {
        for_sums([&]<int kSum>(float* at) PENSTOCK_LAMBDA { tiles.template load<kSum>(at, kSumStride); });
    }
    const int64_t stride = 2 * a.bf16_stride;
    const uint16_t* first = a.bf16 + rows.begin(tile) * a.bf16_stride + piece.first * kBlockCols;
    const uint16_t* second = kTiles > 1 ? a.bf16 + rows.begin(tile + 1) * a.bf16_stride + piece.first * kBlockCols : nullptr;
    const uint16_t *weights = piece.weights[0], *others = piece.weights[1];
    for (int block = piece.first; block < piece.end; ++block, weights += kBlockValues) {
        tiles.template load<4>(first, stride);
        tiles.template load<6>(weights, kTileRowBytes);
        tiles.template add_bf16<0, 4, 6>();
        if constexpr (kPanels > 1) {
            tiles.template load<7>(others, kTileRowBytes);
            tiles.template add_bf16<1, 4, 7>();
            others += kBlockValues;
        }
        if constexpr (kTiles > 1) {
            tiles.template load<5>(second, stride);
            tiles.template add_bf16<2, 5, 6>();
            if constexpr (kPanels > 1) tiles.template add_bf16<3, 5, 7>();
            second += kBlockCols;
        }
        first += kBlockCols;
    }
    if (piece.is_last || !stay) for_sums([&]<int kSum>(float* at) PENSTOCK_LAMBDA { tiles.template store<kSum>(at, kSumStride); });
}

// Stores finished sums to e.out, or, given a gate's sums, activation(gate) * sum.
PENSTOCK_INLINE void finish(const float* sums, const float* gates, ActivationKind kind, int row, int num_rows, int panel, int channels,
                            const Epilogue& e) {
    const int column = panel * kPanel, count = channels - column < kPanel ? channels - column : kPanel;
    for (int r = 0; r < num_rows; ++r) {
        const int64_t at = (row + r) * e.ld + column;
        vf value = load(sums + r * kPanel);
        if (gates) value = gated(load(gates + r * kPanel), value, kind);
        if (e.bias) value = add(value, load_some(e.bias + column, count));
        if (e.residual) value = add(value, load_some(e.residual + at, count));
        store_some(e.out + at, value, count);
    }
}

// Rows [row0, row1), at most kMostRows, of a product, or of one with a gate: activation(a @ gate.T) * (a @ w.T).
void multiply_rows(const PackedMatrix& w, const PackedMatrix* gate, ActivationKind kind, const Activation& a, int row0, int row1, PanelRange range,
                   const Epilogue& e) {
    alignas(64) uint16_t scratch[2][kPieceBlocks * kBlockValues];
    alignas(64) float sums[kMostRowTiles * 2 * kMostTileRows * kPanel];
    const RowTiles rows(row0, row1);
    TileShape shapes[8];
    for (int i = 0; i < 6; ++i) shapes[i].rows = static_cast<uint8_t>(rows.rows);
    Tiles tiles(shapes);
    const int blocks = w.cols / kBlockCols, step = gate ? 1 : 2;
    const bool stay = rows.count <= 2;
    const Widen widen = widen_of(w.kind);
    for (int panel = range.begin; panel < range.end; panel += step) {
        const int panels = gate || panel + 1 < range.end ? 2 : 1, next = panel + step < range.end ? panel + step : range.next;
        const PackedMatrix& first = gate ? *gate : w;
        const int second = gate ? panel : panel + 1;  // panel of w
        for (int begin = 0; begin < blocks; begin += kPieceBlocks) {
            const int end = begin + kPieceBlocks < blocks ? begin + kPieceBlocks : blocks;
            Piece piece{begin, end, {scratch[0], scratch[1]}, begin == 0, end == blocks};
            widen(first, panel, next, begin, end, scratch[0]);
            if (panels == 2) widen(w, second, next + second - panel, begin, end, scratch[1]);
            if (w.kind == WeightKind::kBf16) {
                piece.weights[0] = bf16_block(first, panel, begin);
                piece.weights[1] = bf16_block(w, second, begin);
            }
            for (int tile = 0; tile < rows.count; tile += 2) {
                const bool has_two = tile + 1 < rows.count;
                const auto run = [&]<int kTiles, int kPanels>() PENSTOCK_LAMBDA { multiply<kTiles, kPanels>(tiles, a, rows, tile, piece, stay, sums); };
                if (has_two && panels == 2) run.template operator()<2, 2>();
                else if (has_two) run.template operator()<2, 1>();
                else if (panels == 2) run.template operator()<1, 2>();
                else run.template operator()<1, 1>();
            }
        }
        for (int tile = 0; tile < rows.count; ++tile) {
            const int skipped = rows.skipped(tile), row = rows.begin(tile) + skipped, count = rows.rows - skipped;
            const float *const left = sums_of(sums, tile, 0) + skipped * kPanel, *const right = sums_of(sums, tile, 1) + skipped * kPanel;
            if (gate) {
                finish(right, left, kind, row, count, panel, w.rows, e);
                continue;
            }
            finish(left, nullptr, kind, row, count, panel, w.rows, e);
            if (panels == 2) finish(right, nullptr, kind, row, count, second, w.rows, e);
        }
    }
}

PENSTOCK_INLINE void for_rows(const PackedMatrix& w, const PackedMatrix* gate, ActivationKind kind, const Activation& a, int row0, int row1,
                              PanelRange range, const Epilogue& e) {
    for (int row = row0; row < row1; row += kMostRows) {
        multiply_rows(w, gate, kind, a, row, row1 - row < kMostRows ? row1 : row + kMostRows, range, e);
    }
}

}  // namespace

int tile_panels(int) { return 2; }

int task_rows(int cols) {
    const int rows = kInputBytes / (2 * cols) / (2 * kMostTileRows) * (2 * kMostTileRows);
    return rows < 2 * kMostTileRows ? 2 * kMostTileRows : rows < kMostRows ? rows : kMostRows;
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
