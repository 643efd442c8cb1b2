// One tile of a product: the sums of a few rows by one or more panels of 16 output channels, and how they are stored. Included by
// gemm.cpp, which cuts products into tiles; by gemm_widened.cpp, for all but the sums over groups; and by gemm_tiles.cpp, for the layout
// of weights.
//
// Weights of a panel are streamed once per tile and unpacked in registers; an activation is broadcast once for all panels
// of the tile. A row's sum runs over the groups in order, by the same operations in every shape of tile, so its bits
// never depend on the batch.

#pragma once

#include "activation.h"
#include "kv_fetcher.h"
#include "outliers.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

// The weights of one panel.
struct Panel {
    const uint8_t* quants;
    const uint8_t* table;
};

template <WeightKind kKind>
struct Layout {
    static constexpr bool kTable = kKind == WeightKind::kU4Table;
    static constexpr bool kNibbles = is_nibbles(kKind);
    static constexpr bool kAffine = is_affine(kKind);
    static constexpr bool kSmall = kNibbles && !kTable;  // every weight is below 16, and the zero point 8
    static constexpr float kZero = kSmall ? 8.0f : 128.0f;
    static constexpr int kGroupBytes = bytes_of_group(kKind);
    static constexpr int kScales = 2 * kGroupBytes, kOffsets = kScales + 2 * kPanel * 2;  // where they begin in a pair of groups
    static constexpr int kPairBytes = pair_bytes(kKind);
};

// Calls f.template operator()<kind>().
template <typename F>
PENSTOCK_INLINE void for_kind(WeightKind kind, F f) {
    switch (kind) {
        case WeightKind::kU4Affine: return f.template operator()<WeightKind::kU4Affine>();
        case WeightKind::kU4Symmetric: return f.template operator()<WeightKind::kU4Symmetric>();
        case WeightKind::kU8Symmetric: return f.template operator()<WeightKind::kU8Symmetric>();
        case WeightKind::kBf16: return f.template operator()<WeightKind::kBf16>();
        case WeightKind::kU8Affine: return f.template operator()<WeightKind::kU8Affine>();
        case WeightKind::kU4Table: return f.template operator()<WeightKind::kU4Table>();
        case WeightKind::kU8Row: return;  // `gemm_row8` handles it; the lowering uses it nowhere else
    }
}

PENSTOCK_INLINE float widen(uint16_t bf16) { return __builtin_bit_cast(float, static_cast<uint32_t>(bf16) << 16); }

PENSTOCK_INLINE int pairs_of(int groups) { return (groups + 1) / 2; }

template <WeightKind kKind>
PENSTOCK_INLINE Panel panel_of(const PackedMatrix& w, int panel) {
    if constexpr (kKind == WeightKind::kBf16) {
        return {w.quants + static_cast<int64_t>(panel) * pairs_of(w.cols) * 64, nullptr};
    } else {
        const int64_t panel_bytes = int64_t{pairs_of(w.cols / kGroup)} * Layout<kKind>::kPairBytes;
        return {w.quants + panel * panel_bytes, Layout<kKind>::kTable ? w.table : nullptr};
    }
}

// Addresses of a group's q, of its scales, and of its pair's offsets.
template <WeightKind kKind>
PENSTOCK_INLINE const uint8_t* quants_of(const Panel& panel, int64_t group) {
    return panel.quants + group / 2 * Layout<kKind>::kPairBytes + group % 2 * Layout<kKind>::kGroupBytes;
}
template <WeightKind kKind>
PENSTOCK_INLINE const uint16_t* scales_of(const Panel& panel, int64_t group) {
    return reinterpret_cast<const uint16_t*>(panel.quants + group / 2 * Layout<kKind>::kPairBytes + Layout<kKind>::kScales) + group % 2 * kPanel;
}
template <WeightKind kKind>
PENSTOCK_INLINE const uint8_t* offsets_of(const Panel& panel, int64_t pair) {
    return panel.quants + pair * Layout<kKind>::kPairBytes + Layout<kKind>::kOffsets;
}

// Chunk c of a group as unsigned bytes: of four columns 4c.. for each lane, c below 8.
template <WeightKind kKind>
PENSTOCK_INLINE vb unpack(vb chunk, bool high, const uint8_t* table) {
    using L = Layout<kKind>;
    if constexpr (!L::kNibbles) return chunk;
    const vb nibbles = high ? high_nibbles(chunk) : low_nibbles(chunk);
    return L::kTable ? look_up(nibbles, table) : nibbles;
}

// sums[p][r] += sum over the 32 columns of one group of unsigned weight * int8 activation.
// `q` is the first row's group; rows are `stride` bytes apart.
template <WeightKind kKind, int kPanels, int kRows, typename Sum>
PENSTOCK_INLINE void dot_group(const uint8_t* const (&quants)[kPanels], const uint8_t* table, const int8_t* q, int64_t stride,
                               Sum (&sums)[kPanels][kRows]) {
    using L = Layout<kKind>;
    const auto multiply = [&](const vb(&w)[kPanels], int column) {
        for (int r = 0; r < kRows; ++r) {
            for (int p = 0; p < kPanels; ++p) sums[p][r] = dot4<L::kSmall>(sums[p][r], w[p], q + r * stride + column);
        }
    };
    for (int c = 0; c < (L::kNibbles ? 4 : 8); ++c) {
        vb low[kPanels], high[kPanels];
        for (int p = 0; p < kPanels; ++p) {
            const vb chunk = load64(quants[p] + 64 * c);
            low[p] = unpack<kKind>(chunk, false, table);
            if constexpr (L::kNibbles) high[p] = unpack<kKind>(chunk, true, table);
        }
        multiply(low, 4 * c);
        if constexpr (L::kNibbles) multiply(high, kGroup / 2 + 4 * c);
    }
}

// Sixteen weights of one column as floats, without their offsets: `Activation::sum`, which multiplies those, includes the rests.
template <WeightKind kKind>
PENSTOCK_INLINE vf weights_of_column(const Panel& panel, const ColumnPlace& column) {
    using L = Layout<kKind>;
    vb lanes = shift_right(load64(quants_of<kKind>(panel, column.group) + column.chunk), column.shift);
    if constexpr (L::kTable) lanes = look_up(low_nibbles(lanes), panel.table);
    const vf centred = sub(bits_of_lanes(lanes, L::kSmall ? 0x0F : 0xFF), set1(L::kZero));
    return mul(centred, load_f16(scales_of<kKind>(panel, column.group)));
}

// The outliers of all rows, column by column: a row without one adds zero.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void add_by_column(const Panel (&panels)[kPanels], const OutlierList& first, vf (&acc)[kPanels][kRows]) {
    OutlierList later;
    for (const OutlierList* list = &first;; list = &later) {
        for (int i = 0; i < list->count; ++i) {
            const OutlierColumn& outlier = list->columns[i];
            vf w[kPanels];
            for (int p = 0; p < kPanels; ++p) w[p] = weights_of_column<kKind>(panels[p], outlier.place);
            for (int r = 0; r < kRows; ++r) {
                const vf x = set1(outlier.rest[r]);
                for (int p = 0; p < kPanels; ++p) acc[p][r] = fma(x, w[p], acc[p][r]);
            }
        }
        if (__builtin_expect(list->next == kNoColumn, 1)) return;
        if (list == &first) later = first;
        advance<Layout<kKind>::kNibbles>(later);
    }
}

// The outliers row by row, to the same bits.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void add_by_row(const Panel (&panels)[kPanels], const Activation& a, int64_t row0, vf (&acc)[kPanels][kRows]) {
    for (int r = 0; r < kRows; ++r) {
        const int32_t* column = a.outlier + (row0 + r) * a.outliers_per_row;
        const float* rest = a.outlier_rest + (row0 + r) * a.outliers_per_row;
        for (; *column != kNoColumn; ++column, ++rest) {
            const ColumnPlace place = place_of<Layout<kKind>::kNibbles>(static_cast<uint32_t>(*column));
            const vf x = set1(*rest);
            for (int p = 0; p < kPanels; ++p) acc[p][r] = fma(x, weights_of_column<kKind>(panels[p], place), acc[p][r]);
        }
    }
}

template <int kPanels, int kRows>
PENSTOCK_INLINE void clear(vf (&acc)[kPanels][kRows]) {
    for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) acc[p][r] = set1(0.0f);
    }
}

template <int kPanels, int kRows>
PENSTOCK_INLINE void add_all(const vf (&addends)[kPanels][kRows], vf (&acc)[kPanels][kRows]) {
    for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) acc[p][r] = add(acc[p][r], addends[p][r]);
    }
}

// acc += the sum over the rows' outliers of rest * weights of its column: huge ones may cancel. `list` is null if they are not merged.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void add_outliers(const Panel (&panels)[kPanels], const Activation& a, int64_t row0, const OutlierList* list,
                                  vf (&acc)[kPanels][kRows]) {
    vf rests[kPanels][kRows];
    clear(rests);
    if (list) add_by_column<kKind, kPanels, kRows>(panels, *list, rests);
    else add_by_row<kKind, kPanels, kRows>(panels, a, row0, rests);
    add_all(rests, acc);
}

// offsets += m * sum(x) of a pair of groups, whose sums of x are at `sums` for the first row, and `stride` further for each next one.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void add_offsets_of(const uint8_t* const (&stream)[kPanels], const uint16_t* sums, int64_t stride, vf (&offsets)[kPanels][kRows]) {
    for (int p = 0; p < kPanels; ++p) {
        const vb m = load64(stream[p] + Layout<kKind>::kOffsets);
        for (int r = 0; r < kRows; ++r) offsets[p][r] = dot2_bf16(offsets[p][r], m, sums + r * stride);
    }
}

// acc += the sum over groups of m * sum(x).
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void add_offsets(const Panel (&panels)[kPanels], const Activation& a, int64_t row0, vf (&acc)[kPanels][kRows]) {
    const int pairs = pairs_of(a.cols / kGroup);
    const uint8_t* stream[kPanels];
    for (int p = 0; p < kPanels; ++p) stream[p] = panels[p].quants;
    vf offsets[kPanels][kRows];
    clear(offsets);
    for (int k = 0; k < pairs; ++k) {
        add_offsets_of<kKind, kPanels, kRows>(stream, a.sum + (row0 * pairs + k) * 2, 2 * pairs, offsets);
        for (int p = 0; p < kPanels; ++p) stream[p] += Layout<kKind>::kPairBytes;
    }
    add_all(offsets, acc);
}

// Blocks of up to so many tiles mostly wait for memory, so they prefetch weights far. With more tiles arithmetic takes longer, and the
// first tile should find its weights in the first-level cache.
constexpr int kFarTiles = 2;

// The weights that a tile prefetches while it computes: of the panels `distance` after its own, every `period`th half of a pair of
// groups from `phase` on. The tiles of one block of rows share this, so that memory is read all the time and not by the first tile alone.
// Prefetches past the last panel are harmless.
struct Ahead {
    int64_t distance;
    int period;
    int phase;
    KvPart kv;
};

// y = the sum over groups of d * 2^e * sum((q_w - zero) q), plus that of m * sum(x), plus the rests of the outliers. These come last, when
// their weights are in a cache: at the start of a panel each one would wait for memory.
template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void quant_tile(const Panel (&panels)[kPanels], const Activation& a, int64_t row0, const OutlierList* outliers,
                                const Ahead& ahead, vf (&acc)[kPanels][kRows]) {
    using L = Layout<kKind>;
    constexpr bool kWaitsForMemory = kPanels == kFewRowPanels && kRows <= kFewRows;  // then it prefetches only weights
    constexpr bool kIsOneStream = kFollowsStreams && kPanels == 1 && kRows == 1;     // the processor's own prefetching is faster
    const int groups = a.cols / kGroup, pairs = pairs_of(groups);
    if (groups < 1) __builtin_unreachable();  // else the compiler keeps all sums in memory, for that case
    const int8_t* q = a.q + row0 * a.cols;
    const int32_t *lifts = a.lift + row0 * groups, *starts = a.start + row0 * groups;
    int fetched = ahead.phase;
    const uint8_t* kv = ahead.kv.data;
    clear(acc);
    const int64_t panel_bytes = int64_t{pairs} * L::kPairBytes;
    constexpr int kHalf = L::kPairBytes / 128 * 64;  // bytes of a pair that its first group fetches ahead
    const auto add_group = [&](const uint8_t* const(&stream)[kPanels], int g, int half) PENSTOCK_LAMBDA {
        const auto start_of = [&](int r) PENSTOCK_LAMBDA {
            const vi start = set1_i(starts[r * groups + g]);
            if constexpr (L::kSmall) return start;
            const vi lift = set1_i(lifts[r * groups + g]);
            return kDot4Subtracts != 0 ? lift : add(times16(sub(start, lift)), lift);
        };
        decltype(begin_sum<L::kSmall>(vi{})) sums[kPanels][kRows];
        for (int r = 0; r < kRows; ++r) {
            for (int p = 0; p < kPanels; ++p) sums[p][r] = begin_sum<L::kSmall>(start_of(r));
        }
        if (!kIsOneStream && g == fetched) {  // more lines at once would wait for each other
            fetched += ahead.period;
            for (int p = 0; p < kPanels; ++p) {
                const uint8_t* const later = stream[p] + ahead.distance * panel_bytes;
                for (int i = half * kHalf; i < (half ? L::kPairBytes : kHalf); i += 64) {
                    if (kFetchesFar && ahead.period <= kFarTiles) prefetch_far(later + i);
                    else prefetch(later + i);
                }
            }
        }
        if constexpr (!kWaitsForMemory) {
            fetch_lines(kv);
            kv += ahead.kv.step;
        }
        const uint8_t* quants[kPanels];
        for (int p = 0; p < kPanels; ++p) quants[p] = stream[p] + half * L::kGroupBytes;
        dot_group<kKind, kPanels, kRows>(quants, panels[0].table, q + g * kGroup, a.cols, sums);
        for (int p = 0; p < kPanels; ++p) {
            const vf d = load_f16(reinterpret_cast<const uint16_t*>(stream[p] + L::kScales) + half * kPanel);
            for (int r = 0; r < kRows; ++r) {
                const vi dots = end_sum(sums[p][r], start_of(r));
                acc[p][r] = fma(sub(float_of(dots), float_of(set1_i(lifts[r * groups + g]))), d, acc[p][r]);
            }
        }
    };
    const uint8_t* stream[kPanels];
    for (int p = 0; p < kPanels; ++p) stream[p] = panels[p].quants;
    // Offsets are added as their lines come, or, in tiles that have no registers left, when the groups are done: to the same bits.
    constexpr bool kAtOnce = L::kAffine && kWaitsForMemory;
    vf offsets[kPanels][kRows];
    clear(offsets);
    const auto end_pair = [&](int pair) PENSTOCK_LAMBDA {
        if constexpr (kAtOnce) add_offsets_of<kKind, kPanels, kRows>(stream, a.sum + (row0 * pairs + pair) * 2, 2 * pairs, offsets);
        for (int p = 0; p < kPanels; ++p) stream[p] += L::kPairBytes;
    };
    int g = 0;
    for (; g + 1 < groups; g += 2) {
        add_group(stream, g, 0);
        add_group(stream, g + 1, 1);
        end_pair(g / 2);
    }
    if (g < groups) {
        add_group(stream, g, 0);
        end_pair(g / 2);
    }
    if constexpr (kAtOnce) add_all(offsets, acc);
    else if constexpr (L::kAffine) add_offsets<kKind, kPanels, kRows>(panels, a, row0, acc);
    add_outliers<kKind, kPanels, kRows>(panels, a, row0, outliers, acc);
}

// Four partial sums per row, by column pair modulo 4: short chains, in an order that no tile changes.
template <int kRows>
PENSTOCK_INLINE void bf16_tile(const Panel& panel, const Activation& a, int64_t row0, vf (&acc)[kRows]) {
    constexpr int kParts = 4;
    const int pairs = (a.cols + 1) / 2;
    const uint16_t* x = a.bf16 + row0 * a.bf16_stride;
    vf part[kRows][kParts];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kParts; ++p) part[r][p] = set1(0.0f);
    }
    const auto multiply = [&](int k, int p) {
        const vb weights = load64(panel.quants + static_cast<int64_t>(k) * 64);
        for (int r = 0; r < kRows; ++r) {
            part[r][p] = dot2_bf16(part[r][p], weights, x + r * a.bf16_stride + 2 * k);
        }
    };
    int k = 0;
    for (; k + kParts <= pairs; k += kParts) {
        for (int p = 0; p < kParts; ++p) multiply(k + p, p);
    }
    for (int p = 0; k < pairs; ++k, ++p) multiply(k, p);
    for (int r = 0; r < kRows; ++r) acc[r] = add(add(part[r][0], part[r][1]), add(part[r][2], part[r][3]));
}

template <WeightKind kKind, int kPanels, int kRows>
PENSTOCK_INLINE void compute_tile(const Panel (&panels)[kPanels], const Activation& a, int row0, const OutlierList* outliers,
                                  const Ahead& ahead, vf (&acc)[kPanels][kRows]) {
    if constexpr (kKind == WeightKind::kBf16) {
        for (int p = 0; p < kPanels; ++p) bf16_tile<kRows>(panels[p], a, row0, acc[p]);
    } else {
        quant_tile<kKind, kPanels, kRows>(panels, a, row0, outliers, ahead, acc);
    }
}

// Stores a tile's sums to e.out.
template <int kPanels, int kRows>
PENSTOCK_INLINE void store_any(const vf (&acc)[kPanels][kRows], int row0, int panel, int channels, const Epilogue& e) {
    for (int p = 0; p < kPanels; ++p) {
        const int column = (panel + p) * kPanel;
        const int count = least(channels - column, kPanel);
        for (int r = 0; r < kRows; ++r) {
            vf value = acc[p][r];
            const int64_t at = (row0 + r) * e.ld + column;
            if (e.gates) value = gated(load_some(e.out + at, count), value, *e.gates);
            if (e.bias) value = add(value, load_some(e.bias + column, count));
            if (e.residual) value = add(value, load_some(e.residual + at, count));
            store_some(e.out + at, value, count);
        }
    }
}

// The common forms have no inner branches: the processor can look ahead to the next tile.
template <int kPanels, int kRows>
PENSTOCK_INLINE void store_tile(const vf (&acc)[kPanels][kRows], int row0, int panel, int channels, const Epilogue& e) {
    if (e.bias || (panel + kPanels) * kPanel > channels) return store_any(acc, row0, panel, channels, e);
    const int64_t first = row0 * e.ld + panel * kPanel;
    const auto for_all = [&](auto f) {
        for (int r = 0; r < kRows; ++r) {
            for (int p = 0; p < kPanels; ++p) f(first + r * e.ld + p * kPanel, acc[p][r]);
        }
    };
    if (e.gates) {
        for_all([&, kind = *e.gates](int64_t at, vf value) { store(e.out + at, gated(load(e.out + at), value, kind)); });
    } else if (e.residual) {
        for_all([&](int64_t at, vf value) { store(e.out + at, add(value, load(e.residual + at))); });
    } else {
        for_all([&](int64_t at, vf value) { store(e.out + at, value); });
    }
}

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
