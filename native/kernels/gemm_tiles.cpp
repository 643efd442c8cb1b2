// Matrix products by tiles (tiles.h): rows of bf16 times weights that are widened to bf16, with float32 sums over all columns.
//
// One widening serves all rows of a task, and no input is rounded to integers: what limits few rows is memory, and many the tiles. Two
// panels of 16 output channels by up to 288 columns, a piece, stay in the first-level cache while the rows stream by:
//
//     for every two panels, for every piece of their columns:
//         for every two tiles of rows:  sums of 16 columns of rows x 16 channels, column block by column block
//         meanwhile, block by block:    the next piece is widened into the other half of the scratch
//
// Sums wait in memory between pieces, as they are. A sum's order follows from its columns alone, so a row's bits do not depend on the
// others.

#include "activation.h"
#include "parts.h"
#include "simd.h"
#include "tiles.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kBlockCols = kTileRowBytes / 2;   // columns of a tile operation: a group of quantised weights
static_assert(kBlockCols == kGroup);
constexpr int kBlockValues = kBlockCols * kPanel;  // weights of a panel in one
constexpr int kPieceBlocks = 9;                 // at most: two panels of them and the next two take 36 KiB
constexpr int kMostRows = 256;                  // whose sums of two panels wait in the scratch
constexpr int kInputBytes = 5 << 18;            // of these rows, which stay in the second-level cache: a core of Xeon has 2 MiB
constexpr int kAheadBlocks = 8;                 // of weights, which come from memory if rows are few
constexpr int kMostRowTiles = kMostRows / kMostTileRows;

// Truncated to bf16 a number loses 1/370 of itself on average. Weights are made larger by as much beforehand: rounding to nearest would take
// two more operations for every eight.
constexpr float kTruncation = 1.0f + 1.0f / 370.0f;

// Some columns of one or two panels.
struct Piece {
    const PackedMatrix* w;
    const ActivationKind* gates;  // see `finish`
    int panel, num_panels;
    int first_block, end_block;
    int later;  // panel that this thread will probably want after these
};

struct Block {
    int panel, at;  // of the panel's
};

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

// Of weights that are bf16.
PENSTOCK_INLINE const uint16_t* bf16_weights(const PackedMatrix& w, Block block) {
    return reinterpret_cast<const uint16_t*>(w.quants) + (int64_t{block.panel} * (w.cols / kBlockCols) + block.at) * kBlockValues;
}

// A block, a group of its panel's columns, to `to` as a tile wants it: [16 pairs of columns][16 channels][2]. The block `ahead` is fetched.
PENSTOCK_INLINE void widen_block(const PackedMatrix& w, Block block, Block ahead, uint16_t* to) {
    const int groups = w.cols / kGroup;
    const bool nibbles = w.kind == WeightKind::kU4Affine || w.kind == WeightKind::kU4Symmetric, table = w.kind == WeightKind::kU4Table;
    const int bytes = nibbles || table ? kBlockValues / 2 : kBlockValues;
    const auto group_of = [&](Block b) PENSTOCK_LAMBDA { return int64_t{b.panel} * groups + b.at; };
    const auto offsets_of = [&](Block b) PENSTOCK_LAMBDA { return w.offsets + (int64_t{b.panel} * ((groups + 1) / 2) + b.at / 2) * 2 * kPanel; };
    const uint8_t* const quants = w.quants + group_of(block) * bytes;
    const uint16_t* const scales = w.scales + group_of(block) * kPanel;
    for (int i = 0; i < bytes; i += 64) prefetch(w.quants + group_of(ahead) * bytes + i);
    prefetch(w.scales + group_of(ahead) * kPanel);
    // Without its last two bits, so that 24 d and 384 d below are exact and a weight of zero stays zero.
    const __m512i grown = _mm512_castps_si512(_mm512_mul_ps(load_f16(scales).v, _mm512_set1_ps(kTruncation)));
    const __m512 d = _mm512_castsi512_ps(_mm512_and_si512(grown, _mm512_set1_epi32(~3)));
    __m512 m = _mm512_setzero_ps();
    if (w.offsets) {
        prefetch(offsets_of(ahead));
        const __m512i both = _mm512_loadu_si512(offsets_of(block));
        const __m512i bits = block.at % 2 ? _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000))) : _mm512_slli_epi32(both, 16);
        m = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(kTruncation));
    }
    const auto line = [&](int i) PENSTOCK_LAMBDA { return _mm512_loadu_si512(quants + 64 * i); };
    const auto pairs = [&](int i) PENSTOCK_LAMBDA { return to + i * 2 * kPanel; };
    if (nibbles) {
        const __m512 factor = _mm512_mul_ps(d, _mm512_set1_ps(16.0f)), shift = _mm512_fmadd_ps(d, _mm512_set1_ps(-(16.0f + 8.0f)), m);
        for (int i = 0; i < 4; ++i) {
            const __m512i lanes = line(i);
            widen_pair<0, 8, 4>(pairs(2 * i), lanes, factor, shift);
            widen_pair<16, 24, 4>(pairs(2 * i + 1), lanes, factor, shift);
            widen_pair<4, 12, 4>(pairs(8 + 2 * i), lanes, factor, shift);
            widen_pair<20, 28, 4>(pairs(8 + 2 * i + 1), lanes, factor, shift);
        }
        return;
    }
    const __m512 factor = _mm512_mul_ps(d, _mm512_set1_ps(256.0f)), shift = _mm512_fmadd_ps(d, _mm512_set1_ps(-(256.0f + 128.0f)), m);
    for (int i = 0; i < 8; ++i) {
        __m512i lanes = line(table ? i % 4 : i);
        if (table) {
            const vb codes = i < 4 ? low_nibbles(vb{lanes}) : high_nibbles(vb{lanes});
            lanes = look_up(codes, w.table).v;
        }
        widen_pair<0, 8, 8>(pairs(2 * i), lanes, factor, shift);
        widen_pair<16, 24, 8>(pairs(2 * i + 1), lanes, factor, shift);
    }
}

// The weights of a piece in bf16, on their way into the scratch, block by block, while tiles multiply others: evenly, in `steps` steps. Those
// that are bf16 in memory are fetched into the cache.
class Widener {
  public:
    PENSTOCK_MEMBER void begin(const Piece& piece, uint16_t* scratch, int steps) {
        piece_ = &piece;
        to_ = scratch;
        done_ = due_ = 0;
        all_ = piece.num_panels * (piece.end_block - piece.first_block);
        steps_ = steps;
    }
    PENSTOCK_MEMBER void end() { all_ = 0; }
    PENSTOCK_MEMBER void step() {
        for (due_ += all_; due_ >= steps_; due_ -= steps_, ++done_) {
            if (piece_->w->kind == WeightKind::kBf16) {
                const uint16_t* const weights = bf16_weights(*piece_->w, block(done_));
                for (int i = 0; i < kBlockValues; i += 2 * kPanel) prefetch(weights + i);
            } else {
                widen_block(*piece_->w, block(done_), block(done_ + kAheadBlocks), to_ + done_ * kBlockValues);
            }
        }
    }

  private:
    // The piece's block `i` in the order in which they are widened. After the last one come the same panels' next columns, or what the thread
    // will want later.
    PENSTOCK_MEMBER Block block(int i) const {
        const int blocks = piece_->end_block - piece_->first_block;
        if (i < all_) return {piece_->panel + i / blocks, piece_->first_block + i % blocks};
        if (piece_->end_block < piece_->w->cols / kGroup) return {piece_->panel, piece_->end_block + i - all_};
        return {piece_->later, i - all_};
    }

    const Piece* piece_ = nullptr;
    uint16_t* to_ = nullptr;
    int done_ = 0, all_ = 0, due_ = 0, steps_ = 1;
};

// How rows are divided into tiles of as many rows each. The last one begins with rows of the one before if need be; those are not stored
// twice.
struct RowTiles {
    int first, end;  // rows
    int count, rows;

    PENSTOCK_MEMBER RowTiles(int row0, int row1) : first(row0), end(row1) {
        count = (row1 - row0 + kMostTileRows - 1) / kMostTileRows;
        rows = (row1 - row0 + count - 1) / count;
    }
    PENSTOCK_MEMBER int begin(int tile) const {
        const int row = first + tile * rows, last = end - rows;
        return row < last ? row : last;
    }
    PENSTOCK_MEMBER int skipped(int tile) const { return first + tile * rows - begin(tile); }
};

// Where the sums of a tile of rows and a panel wait: [16 rows][16 channels].
PENSTOCK_INLINE float* sums_of(float* sums, int tile, int panel) { return sums + (tile * 2 + panel) * kMostTileRows * kPanel; }

// sums += rows of a piece's columns times its weights, for kTiles tiles of rows from `tile` on and kPanels panels.
template <int kTiles, int kPanels>
PENSTOCK_INLINE void multiply(Tiles& tiles, const Activation& a, const RowTiles& rows, int tile, const Piece& piece, const uint16_t* weights,
                              int64_t panel_stride, float* sums, Widener& widener) {
    constexpr int64_t kSumStride = kPanel * sizeof(float);
    const auto for_sums = [&](auto f) PENSTOCK_LAMBDA {
        f.template operator()<0>(sums_of(sums, tile, 0));
        if constexpr (kPanels > 1) f.template operator()<1>(sums_of(sums, tile, 1));
        if constexpr (kTiles > 1) f.template operator()<2>(sums_of(sums, tile + 1, 0));
        if constexpr (kTiles > 1 && kPanels > 1) f.template operator()<3>(sums_of(sums, tile + 1, 1));
    };
    if (piece.first_block == 0) {
        for_sums([&]<int kSum>(float*) PENSTOCK_LAMBDA { tiles.template zero<kSum>(); });
    } else {
        for_sums([&]<int kSum>(float* at) PENSTOCK_LAMBDA { tiles.template load<kSum>(at, kSumStride); });
    }
    const int64_t stride = 2 * a.bf16_stride;
    const uint16_t* first = a.bf16 + rows.begin(tile) * a.bf16_stride + piece.first_block * kBlockCols;
    const uint16_t* second = kTiles > 1 ? a.bf16 + rows.begin(tile + 1) * a.bf16_stride + piece.first_block * kBlockCols : nullptr;
    for (int block = piece.first_block; block < piece.end_block; ++block, weights += kBlockValues) {
        tiles.template load<4>(first, stride);
        tiles.template load<6>(weights, kTileRowBytes);
        tiles.template add_bf16<0, 4, 6>();
        if constexpr (kPanels > 1) {
            tiles.template load<7>(weights + panel_stride, kTileRowBytes);
            tiles.template add_bf16<1, 4, 7>();
        }
        if constexpr (kTiles > 1) {
            tiles.template load<5>(second, stride);
            tiles.template add_bf16<2, 5, 6>();
            if constexpr (kPanels > 1) tiles.template add_bf16<3, 5, 7>();
            second += kBlockCols;
        }
        first += kBlockCols;
        widener.step();
    }
    for_sums([&]<int kSum>(float* at) PENSTOCK_LAMBDA { tiles.template store<kSum>(at, kSumStride); });
}

// Sums that are whole go to e.out. `gates`: what is there is the gate of these sums, and is replaced by activation(gate) * sum.
PENSTOCK_INLINE void finish(const float* sums, int row, int num_rows, int panel, int channels, const Epilogue& e, const ActivationKind* gates) {
    const int column = panel * kPanel, count = channels - column < kPanel ? channels - column : kPanel;
    for (int r = 0; r < num_rows; ++r) {
        vf value = load(sums + r * kPanel);
        float* const out = e.out + (row + r) * e.ld + column;
        if (gates) value = gated(load_some(out, count), value, *gates);
        if (e.bias) value = add(value, load_some(e.bias + column, count));
        if (e.residual) value = add(value, load_some(e.residual + (row + r) * e.ld + column, count));
        store_some(out, value, count);
    }
}

// The pieces of a task, in order: of every two panels all columns, of the gate and then of up if there are both.
class Pieces {
  public:
    PENSTOCK_MEMBER Pieces(const PackedMatrix* first, const PackedMatrix* second, const ActivationKind* kind, PanelRange range)
        : matrices_{first, second}, kind_(kind), range_(range) {
        const int blocks = first->cols / kBlockCols;
        pieces_ = (blocks + kPieceBlocks - 1) / kPieceBlocks;
        size_ = (blocks + pieces_ - 1) / pieces_;
        blocks_ = blocks;
        panel_ = range.begin;
    }
    // False after the last one.
    PENSTOCK_MEMBER bool next(Piece& piece) {
        if (panel_ >= range_.end) return false;
        const int panels = range_.end - panel_ < 2 ? 1 : 2, first = at_ * size_, end = first + size_;
        const int later = panel_ + panels < range_.end ? panel_ + panels : range_.next;
        piece = {matrices_[matrix_], matrix_ == 1 ? kind_ : nullptr, panel_, panels, first, end < blocks_ ? end : blocks_, later};
        if (++at_ == pieces_) {
            at_ = 0;
            if (matrix_ == 0 && matrices_[1]) {
                matrix_ = 1;
            } else {
                matrix_ = 0;
                panel_ += panels;
            }
        }
        return true;
    }

  private:
    const PackedMatrix* matrices_[2];
    const ActivationKind* kind_;
    PanelRange range_;
    int blocks_, pieces_, size_, panel_, at_ = 0, matrix_ = 0;
};

// Rows [row0, row1), at most kMostRows.
void multiply_rows(const PackedMatrix* first, const PackedMatrix* second, const ActivationKind* kind, const Activation& a, int row0, int row1,
                   PanelRange range, const Epilogue& e) {
    alignas(64) uint16_t scratch[2][2 * kPieceBlocks * kBlockValues];
    alignas(64) float sums[kMostRowTiles * 2 * kMostTileRows * kPanel];
    const RowTiles rows(row0, row1);
    TileShape shapes[8];
    for (int i = 0; i < 6; ++i) shapes[i].rows = static_cast<uint8_t>(rows.rows);
    Tiles tiles(shapes);
    Pieces pieces(first, second, kind, range);
    Piece piece[2];
    Widener widener;
    bool has_piece = pieces.next(piece[0]);
    if (has_piece) {
        widener.begin(piece[0], scratch[0], 1);
        widener.step();
    }
    for (int turn = 0; has_piece; turn ^= 1) {
        const Piece& now = piece[turn];
        has_piece = pieces.next(piece[turn ^ 1]);
        if (has_piece) {
            widener.begin(piece[turn ^ 1], scratch[turn ^ 1], (rows.count + 1) / 2 * (now.end_block - now.first_block));
        } else {
            widener.end();
        }
        const PackedMatrix& w = *now.w;
        const int blocks = w.cols / kBlockCols;
        const bool is_wide = w.kind == WeightKind::kBf16;
        const uint16_t* const weights = is_wide ? bf16_weights(w, {now.panel, now.first_block}) : scratch[turn];
        const int64_t panel_stride = int64_t{is_wide ? blocks : now.end_block - now.first_block} * kBlockValues;
        for (int tile = 0; tile < rows.count; tile += 2) {
            const bool has_two = tile + 1 < rows.count;
            const auto run = [&]<int kTiles, int kPanels>() PENSTOCK_LAMBDA {
                multiply<kTiles, kPanels>(tiles, a, rows, tile, now, weights, panel_stride, sums, widener);
            };
            if (has_two && now.num_panels == 2) run.template operator()<2, 2>();
            else if (has_two) run.template operator()<2, 1>();
            else if (now.num_panels == 2) run.template operator()<1, 2>();
            else run.template operator()<1, 1>();
            if (now.end_block < blocks) continue;
            for (int t = tile; t < tile + (has_two ? 2 : 1); ++t) {
                const int skipped = rows.skipped(t);
                for (int p = 0; p < now.num_panels; ++p) {
                    finish(sums_of(sums, t, p) + skipped * kPanel, rows.begin(t) + skipped, rows.rows - skipped, now.panel + p, w.rows, e, now.gates);
                }
            }
        }
    }
}

PENSTOCK_INLINE void for_rows(const PackedMatrix* first, const PackedMatrix* second, const ActivationKind* kind, const Activation& a, int row0,
                              int row1, PanelRange range, const Epilogue& e) {
    for (int row = row0; row < row1; row += kMostRows) {
        multiply_rows(first, second, kind, a, row, row1 - row < kMostRows ? row1 : row + kMostRows, range, e);
    }
}

}  // namespace

int tile_panels(int) { return 2; }

int task_rows(int cols) {
    const int rows = kInputBytes / (2 * cols) / (2 * kMostTileRows) * (2 * kMostTileRows);
    return rows < 2 * kMostTileRows ? 2 * kMostTileRows : rows < kMostRows ? rows : kMostRows;
}

void gemm(const PackedMatrix& w, const Activation& a, int row0, int row1, PanelRange range, const Epilogue& e, const UpcomingKv& upcoming) {
    if (w.kind == WeightKind::kU8Row || w.cols % kBlockCols != 0) {
        return avx512::kernel_table().gemm(w, a, row0, row1, range, e, upcoming);
    }
    for_rows(&w, nullptr, nullptr, a, row0, row1, range, e);
}

void gemm_gated(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, PanelRange range,
                ActivationKind kind, const Epilogue& e, const UpcomingKv& upcoming) {
    if (gate.cols % kBlockCols != 0) return avx512::kernel_table().gemm_gated(gate, up, a, row0, row1, range, kind, e, upcoming);
    for_rows(&gate, &up, &kind, a, row0, row1, range, e);
}

}  // namespace penstock::PENSTOCK_ISA
