// Matrix products over packed weights: tiles of a few rows by one panel of 16 output channels.
//
// Weights of a panel are streamed once per tile of rows and unpacked in registers; activations are broadcast.
// A row's sum runs over the groups in order, whatever the tile, so its bits never depend on the batch.

#include "activation.h"
#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

template <int kRows>
struct Tile {
    vf acc[kRows];
};

// One panel's weights of one group, as unsigned bytes: eight chunks of four columns.
template <bool kNibbles>
PENSTOCK_INLINE void unpack(const uint8_t* quants, vb chunk[8]) {
    if constexpr (kNibbles) {
        for (int c = 0; c < 4; ++c) {
            const vb packed = load64(quants + 64 * c);
            chunk[c] = low_nibbles(packed);
            chunk[c + 4] = high_nibbles(packed);
        }
    } else {
        for (int c = 0; c < 8; ++c) chunk[c] = load64(quants + 64 * c);
    }
}

// Integer dot products of a group's 16 channels with 32 int8 activations.
template <bool kNibbles>
PENSTOCK_INLINE vf dot_group(const vb chunk[8], const int8_t* q) {
    vi even = zero_i(), odd = zero_i();  // two chains hide the latency of the dot product
    for (int c = 0; c < 8; c += 2) {
        even = dot4<kNibbles>(even, chunk[c], q + 4 * c);
        odd = dot4<kNibbles>(odd, chunk[c + 1], q + 4 * c + 4);
    }
    return to_float(add(even, odd));
}

// 4-bit or 8-bit unsigned weights q_w, w = d * q_w + m, by int8 activations:
//   y = sum over groups of scale * d * sum(q_w q) + m * sum, then the fine parts of the row's outlier groups.
template <WeightKind kKind, int kRows>
PENSTOCK_INLINE void quant_tile(const PackedMatrix& w, const Activation& a, int row0, int panel, Tile<kRows>& tile) {
    constexpr bool kNibbles = kKind != WeightKind::kU8Symmetric;
    constexpr bool kAffine = kKind == WeightKind::kU4Affine;
    constexpr int kBytes = kPanel * (kNibbles ? kGroup / 2 : kGroup);
    constexpr int kScales = kAffine ? 2 * kPanel : kPanel;
    const int groups = w.cols / kGroup;
    const uint8_t* quants = w.quants + static_cast<int64_t>(panel) * groups * kBytes;
    const uint16_t* scales = w.scales + static_cast<int64_t>(panel) * groups * kScales;
    const int8_t* q = a.q + static_cast<int64_t>(row0) * a.cols;
    const float* row_scale = a.scale + static_cast<int64_t>(row0) * groups;
    const float* row_sum = a.sum + static_cast<int64_t>(row0) * groups;

    vb chunk[8];
    for (int r = 0; r < kRows; ++r) tile.acc[r] = set1(0.0f);
    for (int g = 0; g < groups; ++g) {
        unpack<kNibbles>(quants + g * kBytes, chunk);
        const vf d = load_f16(scales + g * kScales);
        vf m;
        if constexpr (kAffine) {
            m = load_f16(scales + g * kScales + kPanel);
        } else {
            m = mul(d, set1(kNibbles ? -8.0f : -128.0f));
        }
        for (int r = 0; r < kRows; ++r) {
            const vf dots = dot_group<kNibbles>(chunk, q + static_cast<int64_t>(r) * a.cols + g * kGroup);
            tile.acc[r] = fma(mul(dots, set1(row_scale[r * groups + g])), d, tile.acc[r]);
            tile.acc[r] = fma(set1(row_sum[r * groups + g]), m, tile.acc[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        const int64_t row = row0 + r;
        for (int i = 0; i < a.num_outliers[row]; ++i) {
            const int g = a.outliers[row * groups + i];
            unpack<kNibbles>(quants + g * kBytes, chunk);
            const vf dots = dot_group<kNibbles>(chunk, a.fine + row * a.cols + g * kGroup);
            const vf fine_scale = set1(row_scale[r * groups + g] / kFineSteps);
            tile.acc[r] = fma(mul(dots, fine_scale), load_f16(scales + g * kScales), tile.acc[r]);
        }
    }
}

template <int kRows>
PENSTOCK_INLINE void bf16_tile(const PackedMatrix& w, const Activation& a, int row0, int panel, Tile<kRows>& tile) {
    const int pairs = (w.cols + 1) / 2;
    const uint8_t* data = w.quants + static_cast<int64_t>(panel) * pairs * 64;
    const uint16_t* x = a.bf16 + static_cast<int64_t>(row0) * 2 * pairs;
    // Four partial sums per row, by column pair modulo 4: short chains, in an order that no tile changes.
    constexpr int kParts = 4;
    vf part[kRows][kParts];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kParts; ++p) part[r][p] = set1(0.0f);
    }
    int k = 0;
    for (; k + kParts <= pairs; k += kParts) {
        for (int p = 0; p < kParts; ++p) {
            const vb weights = load64(data + static_cast<int64_t>(k + p) * 64);
            for (int r = 0; r < kRows; ++r) {
                part[r][p] = dot2_bf16(part[r][p], weights, x + static_cast<int64_t>(r) * 2 * pairs + 2 * (k + p));
            }
        }
    }
    for (int p = 0; k < pairs; ++k, ++p) {
        const vb weights = load64(data + static_cast<int64_t>(k) * 64);
        for (int r = 0; r < kRows; ++r) {
            part[r][p] = dot2_bf16(part[r][p], weights, x + static_cast<int64_t>(r) * 2 * pairs + 2 * k);
        }
    }
    for (int r = 0; r < kRows; ++r) tile.acc[r] = add(add(part[r][0], part[r][1]), add(part[r][2], part[r][3]));
}

template <WeightKind kKind, int kRows>
PENSTOCK_INLINE void compute_tile(const PackedMatrix& w, const Activation& a, int row0, int panel, Tile<kRows>& tile) {
    if constexpr (kKind == WeightKind::kBf16) {
        bf16_tile<kRows>(w, a, row0, panel, tile);
    } else {
        quant_tile<kKind, kRows>(w, a, row0, panel, tile);
    }
}

// How many rows of bf16 accumulate in registers: four partial sums each.
template <WeightKind kKind>
constexpr int tile_rows() {
    return kKind == WeightKind::kBf16 ? (kMaxTileRows >= 4 ? kMaxTileRows / 2 : kMaxTileRows) : kMaxTileRows;
}

PENSTOCK_INLINE void store_columns(float* out, vf value, int count) {
    if (count == kLanes) return store(out, value);
    alignas(64) float t[kLanes];
    store(t, value);
    for (int i = 0; i < count; ++i) out[i] = t[i];
}

PENSTOCK_INLINE vf load_columns(const float* p, int count) {
    if (count == kLanes) return load(p);
    alignas(64) float t[kLanes] = {};
    for (int i = 0; i < count; ++i) t[i] = p[i];
    return load(t);
}

template <WeightKind kKind, int kRows>
void linear_tile(const PackedMatrix& w, const Activation& a, int row0, int panel, const Epilogue& e) {
    Tile<kRows> tile;
    compute_tile<kKind, kRows>(w, a, row0, panel, tile);
    const int column = panel * kPanel;
    const int count = w.rows - column < kPanel ? w.rows - column : kPanel;
    for (int r = 0; r < kRows; ++r) {
        vf value = tile.acc[r];
        const int64_t at = (row0 + r) * e.ld + column;
        if (e.bias) value = add(value, load_columns(e.bias + column, count));
        if (e.residual) value = add(value, load_columns(e.residual + at, count));
        store_columns(e.out + at, value, count);
    }
}

// A gate and an up panel, activated and multiplied, into out[row][16].
template <WeightKind kKind, int kRows>
PENSTOCK_INLINE void gated_tile(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int panel,
                                ActivationKind kind, Tile<kRows>& out) {
    Tile<kRows> up_tile;
    compute_tile<kKind, kRows>(gate, a, row0, panel, out);
    compute_tile<kKind, kRows>(up, a, row0, panel, up_tile);
    for (int r = 0; r < kRows; ++r) out.acc[r] = gated(out.acc[r], up_tile.acc[r], kind);
}

template <WeightKind kKind, int kRows>
void gated_store(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int panel,
                 ActivationKind kind, const Epilogue& e) {
    Tile<kRows> tile;
    gated_tile<kKind, kRows>(gate, up, a, row0, panel, kind, tile);
    const int column = panel * kPanel;
    const int count = gate.rows - column < kPanel ? gate.rows - column : kPanel;
    for (int r = 0; r < kRows; ++r) store_columns(e.out + (row0 + r) * e.ld + column, tile.acc[r], count);
}

// Calls f.template operator()<rows>(row) over [row0, row1) in tiles of kMax rows and one smaller one.
template <int kMax, typename F>
PENSTOCK_INLINE void for_tiles(int row0, int row1, F f) {
    int row = row0;
    for (; row + kMax <= row1; row += kMax) f.template operator()<kMax>(row);
    switch (row1 - row) {
        case 1: f.template operator()<1>(row); break;
        case 2: if constexpr (kMax > 2) f.template operator()<2>(row); break;
        case 3: if constexpr (kMax > 3) f.template operator()<3>(row); break;
        case 4: if constexpr (kMax > 4) f.template operator()<4>(row); break;
        case 5: if constexpr (kMax > 5) f.template operator()<5>(row); break;
        case 6: if constexpr (kMax > 6) f.template operator()<6>(row); break;
        case 7: if constexpr (kMax > 7) f.template operator()<7>(row); break;
        case 8: if constexpr (kMax > 8) f.template operator()<8>(row); break;
        case 9: if constexpr (kMax > 9) f.template operator()<9>(row); break;
        case 10: if constexpr (kMax > 10) f.template operator()<10>(row); break;
        case 11: if constexpr (kMax > 11) f.template operator()<11>(row); break;
        default: break;
    }
    static_assert(kMax <= 12);
}

template <WeightKind kKind>
void gemm_kind(const PackedMatrix& w, const Activation& a, int row0, int row1, int panel0, int panel1, const Epilogue& e) {
    for (int panel = panel0; panel < panel1; ++panel) {
        for_tiles<tile_rows<kKind>()>(row0, row1, [&]<int kRows>(int row) { linear_tile<kKind, kRows>(w, a, row, panel, e); });
    }
}

template <WeightKind kKind>
void gated_kind(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, int panel0,
                int panel1, ActivationKind kind, const Epilogue& e) {
    for (int panel = panel0; panel < panel1; ++panel) {
        for_tiles<tile_rows<kKind>()>(row0, row1, [&]<int kRows>(int row) { gated_store<kKind, kRows>(gate, up, a, row, panel, kind, e); });
    }
}

}  // namespace

void gemm(const PackedMatrix& w, const Activation& a, int row0, int row1, int panel0, int panel1, const Epilogue& e) {
    switch (w.kind) {
        case WeightKind::kU4Affine: return gemm_kind<WeightKind::kU4Affine>(w, a, row0, row1, panel0, panel1, e);
        case WeightKind::kU4Symmetric: return gemm_kind<WeightKind::kU4Symmetric>(w, a, row0, row1, panel0, panel1, e);
        case WeightKind::kU8Symmetric: return gemm_kind<WeightKind::kU8Symmetric>(w, a, row0, row1, panel0, panel1, e);
        case WeightKind::kBf16: return gemm_kind<WeightKind::kBf16>(w, a, row0, row1, panel0, panel1, e);
    }
}

void gemm_gated(const PackedMatrix& gate, const PackedMatrix& up, const Activation& a, int row0, int row1, int panel0,
                int panel1, ActivationKind kind, const Epilogue& e) {
    switch (gate.kind) {
        case WeightKind::kU4Affine:
            return gated_kind<WeightKind::kU4Affine>(gate, up, a, row0, row1, panel0, panel1, kind, e);
        case WeightKind::kU4Symmetric:
            return gated_kind<WeightKind::kU4Symmetric>(gate, up, a, row0, row1, panel0, panel1, kind, e);
        case WeightKind::kU8Symmetric:
            return gated_kind<WeightKind::kU8Symmetric>(gate, up, a, row0, row1, panel0, panel1, kind, e);
        case WeightKind::kBf16:
            return gated_kind<WeightKind::kBf16>(gate, up, a, row0, row1, panel0, panel1, kind, e);
    }
}

}  // namespace penstock::PENSTOCK_ISA
