// Writes the keys and values of a step's tokens into the KV cache (`KvLayer` in kernels.h).

#include "int4.h"
#include "integers.h"
#include "parts.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int kHeadsTogether = 8;  // heads of tokens that are made integers side by side
constexpr int kMostItems = kLargestHeadDim / kGroup + 1;  // of a head: its value, then the groups of its key

// Two columns of a key of 16 bits next to each other, those of the sixteen positions of its tile side by side.
PENSTOCK_INLINE void scatter_pairs(int16_t* keys, const int16_t* integers, int columns) {
    for (int i = 0; i < columns; i += 2) memcpy(keys + i * kKvTile, integers + i, 2 * sizeof(int16_t));
}

// Likewise four of 8 bits, kKeyZero above their number.
PENSTOCK_INLINE void scatter_fours(uint8_t* keys, const int8_t* integers, int columns) {
    for (int i = 0; i < columns; i += 4) {
        uint32_t four;
        memcpy(&four, integers + i, 4);
        four ^= 0x01010101u * kKeyZero;
        memcpy(keys + i * kKvTile, &four, 4);
    }
}

template <typename T>
PENSTOCK_INLINE void scatter(T* values, const T* numbers, int columns) {
    for (int i = 0; i < columns; ++i) values[2 * i] = numbers[i];
}

// One head of one token, and where it goes.
template <bool kCentred>
struct Head {
    const float *k, *v;
    const float* centre;  // null, or subtracted from keys before they are stored
    uint8_t *keys, *values, *scales;

    PENSTOCK_MEMBER vf key(int column) const {
        if constexpr (kCentred) return sub(load(k + column), load(centre + column));
        return load(k + column);
    }
    PENSTOCK_MEMBER vf value(int column) const { return load(v + column); }

    // Lane by lane the largest magnitudes of an item.
    PENSTOCK_MEMBER vi sizes(int item, int head_dim, int value_dim) const {
        vi largest = set1_i(0);
        if (item == 0) {
            for (int d = 0; d < value_dim; d += kLanes) largest = max(largest, bits_of(abs(value(d))));
        } else {
            const int begin = (item - 1) * kGroup, end = least(begin + kGroup, head_dim);
            for (int d = begin; d < end; d += kLanes) largest = max(largest, bits_of(abs(key(d))));
        }
        return largest;
    }
};

// The next bf16 above largest / 127, NaN if that is broken; never so small that its inverse is infinite.
PENSTOCK_INLINE vf int8_scale(vf largest, vf broken) {
    const vf wanted = max(set1(kSmallest), mul(largest, set1(1.0f / 127.0f)));
    const vf rounded = float_of(bit_and(add(bits_of(wanted), set1_i(0xFFFF)), set1_i(-0x10000)));
    return add(rounded, add(mul(largest, set1(0.0f)), broken));
}

// Heads as integers, side by side.
struct Integers {
    alignas(64) int32_t largest[kMostItems][kLanes];  // bits of floats
    alignas(64) float inverse[kMostItems][kLanes];
    alignas(64) uint16_t scale[kMostItems][kLanes];
    alignas(64) int8_t keys[kHeadsTogether][kLargestHeadDim], values[kHeadsTogether][kLargestHeadDim];

    // A value that is not finite makes its key NaN, and so whatever sees it: integers can't be NaN, and a NaN in bf16 would
    // reach queries that give it no weight.
    template <bool kCentred>
    PENSTOCK_MEMBER void round(const KvLayer& kv, const Head<kCentred>* heads, int count, int items) {
        const int head_dim = kv.head_dim, value_dim = kv.value_dim(), latent_groups = kv.num_latent / kGroup;
        for (int item = 0; item < items; ++item) {
            store(largest[item], set1_i(0));
            for (int h = 0; h < count; h += 4) {
                vi sizes[4];
                for (int i = 0; i < 4; ++i) sizes[i] = heads[h + i < count ? h + i : h].sizes(item, head_dim, value_dim);
                store_largest_of_four(largest[item] + h, sizes);
            }
        }
        const vf broken = mul(min(float_of(load(largest[0])), set1(INFINITY)), set1(0.0f));
        for (int item = 0; item < items; ++item) {
            const int32_t* const largest_of_scale = largest[item > latent_groups ? item : 0];  // a latent has one, which is its value's
            const vf scales = int8_scale(min(float_of(load(largest_of_scale)), set1(INFINITY)), broken);
            store_bf16(scale[item], scales);
            store(inverse[item], div(set1(1.0f), scales));
        }
        for (int h = 0; h < count; ++h) {
            const vf of_value = set1(inverse[0][h]);
            for (int d = 0; d < head_dim; d += kLanes) {
                if (latent_groups == 0) store_rounded_i8(values[h] + d, mul(heads[h].value(d), of_value));
                store_rounded_i8(keys[h] + d, mul(heads[h].key(d), set1(inverse[1 + d / kGroup][h])));
            }
        }
    }
};

// Scales lie behind those of the keys' groups where they are of values.
template <bool kCentred>
PENSTOCK_INLINE uint8_t* scales_of(const Head<kCentred>& head, int item, int items) {
    return head.scales + (item == 0 ? items - 1 : item - 1) * kKvTile * static_cast<int>(sizeof(uint16_t));
}

// Any heads.
template <bool kCentred>
void write_int8(const KvLayer& kv, const Head<kCentred>* heads, int count) {
    const int items = kv.key_groups() + 1;
    Integers integers;
    integers.round(kv, heads, count, items);
    for (int h = 0; h < count; ++h) {
        for (int item = 0; item < items; ++item) memcpy(scales_of(heads[h], item, items), &integers.scale[item][h], sizeof(uint16_t));
        scatter_fours(heads[h].keys, integers.keys[h], kv.head_dim);
        if (kv.num_latent > 0) continue;
        for (int d = 0; d < kv.head_dim; d += kLanes) store_every_fourth(heads[h].values + 4 * d, integers.values[h] + d);
    }
}

// One head of kHeadsTogether tokens in a row from a position on that is a multiple of that; `width` is from one token to the next.
template <bool kCentred>
void write_run_int8(const KvLayer& kv, const Head<kCentred>& first, int64_t width) {
    const int items = kv.key_groups() + 1;
    Head<kCentred> heads[kHeadsTogether];
    for (int i = 0; i < kHeadsTogether; ++i) {
        heads[i] = first;
        heads[i].k += i * width;
        heads[i].v += i * width;
    }
    Integers integers;
    integers.round(kv, heads, kHeadsTogether, items);
    for (int item = 0; item < items; ++item) {
        memcpy(scales_of(first, item, items), integers.scale[item], kHeadsTogether * sizeof(uint16_t));
    }
    for (int d = 0; d < kv.head_dim; d += kLanes) {
        for (int i = 0; i < kHeadsTogether; i += 4) {
            if (kv.num_latent == 0) interleave_fours(first.values + i * kv.head_dim + 4 * d, integers.values[i] + d, kLargestHeadDim);
            transpose_fours(first.keys + d * kKvTile + 4 * i, 4 * kKvTile, integers.keys[i] + d, kLargestHeadDim, kKeyZero);
        }
    }
}

template <bool kCentred>
void write_int16(const KvLayer& kv, const Head<kCentred>& head) {
    alignas(64) float centred[kLargestHeadDim];
    const float* key = head.k;
    if constexpr (kCentred) {
        for (int d = 0; d < kv.head_dim; d += kLanes) store(centred + d, head.key(d));
        key = centred;
    }
    IntegerScale scale = integer_scale(key, kv.head_dim);
    vf broken = set1(0.0f);
    for (int d = 0; d < kv.head_dim; d += kLanes) broken = fma(head.value(d), set1(0.0f), broken);
    const bool is_sound = isfinite(reduce_add(broken));
    if (!is_sound) scale.scale = NAN;
    memcpy(head.scales, &scale.scale, sizeof(float));
    for (int d = 0; d < kv.head_dim; d += kLanes) {
        alignas(64) int16_t integers[kLanes];
        store_integers(integers, load(key + d), scale);
        scatter_pairs(reinterpret_cast<int16_t*>(head.keys) + d * kKvTile, integers, kLanes);
        if (kv.num_latent > 0) continue;
        alignas(64) uint16_t numbers[kLanes];
        store_bf16(numbers, is_sound ? head.value(d) : set1(0.0f));
        scatter(reinterpret_cast<uint16_t*>(head.values) + 2 * d, numbers, kLanes);
    }
}

__attribute__((noinline)) void write_int4(const KvLayer& kv, const Head<true>& head) {
    alignas(64) float rotated[kLargestHeadDim];
    alignas(64) uint8_t levels[kLargestHeadDim];
    for (int d = 0; d < kv.head_dim; d += kLanes) store(rotated + d, head.centre ? head.key(d) : load(head.k + d));
    rotate(rotated, rotated, kv.head_dim);
    const uint8_t key_scale = round_to_levels(levels, rotated, kv.head_dim, 32);
    pack_key(head.keys, levels, kv.head_dim);
    rotate(rotated, head.v, kv.head_dim);
    const uint8_t value_scale = round_to_levels(levels, rotated, kv.head_dim, 16);
    pack_value(head.values, levels, kv.head_dim);
    head.scales[0] = value_scale == kBrokenScale ? kBrokenScale : key_scale;  // as in kInt8
    head.scales[kKvTile] = value_scale;
}

// The first head of the token at a slot.
template <bool kCentred>
PENSTOCK_INLINE Head<kCentred> first_head(const KvLayer& kv, int64_t slot, const float* k, const float* v, const float* centre) {
    const int64_t block = slot / kv.block_size, offset = slot % kv.block_size, lane = offset % kKvTile;
    uint8_t* const head = kv.data + block * kv.block_stride;
    uint8_t* const tile = head + offset / kKvTile * kv.tile_stride();
    const int64_t beside = kv.value_positions();
    return {k,
            v,
            centre,
            tile + 4 * lane,
            head + kv.values_offset() + offset / beside * beside * kv.value_bytes() + offset % beside * kv.width(),
            tile + kv.scales_offset() + lane * kv.scale_width()};
}

template <bool kCentred>
PENSTOCK_INLINE void go_to_next_head(const KvLayer& kv, Head<kCentred>& h) {
    h.k += kv.head_dim;
    h.v += kv.head_dim;
    if constexpr (kCentred) h.centre += kv.head_dim;
    h.keys += kv.head_stride();
    h.values += kv.head_stride();
    h.scales += kv.head_stride();
}

PENSTOCK_INLINE bool is_run(const int64_t* slots) {
    bool is = slots[0] % kHeadsTogether == 0;
    for (int i = 1; i < kHeadsTogether; ++i) is &= slots[i] == slots[0] + i;
    return is;
}

template <bool kCentred>
void write_rows(const KvLayer& kv, const int64_t* slots, int64_t count, const float* k, const float* v, const float* centre) {
    const int64_t width = int64_t{kv.num_kv_heads} * kv.head_dim;
    Head<kCentred> heads[kHeadsTogether];  // the first `waiting` of them are yet to be written
    int waiting = 0;
    for (int64_t i = 0; i < count;) {
        Head<kCentred> head = first_head<kCentred>(kv, slots[i], k + i * width, v + i * width, centre);
        const bool is_int8 = kv.format == KvFormat::kInt8, run = is_int8 && i + kHeadsTogether <= count && is_run(slots + i);
        for (int h = 0; h < kv.num_kv_heads; ++h, go_to_next_head(kv, head)) {
            if (run) {
                write_run_int8(kv, head, width);
            } else if (is_int8) {
                heads[waiting++] = head;
                if (waiting == kHeadsTogether) {
                    write_int8(kv, heads, waiting);
                    waiting = 0;
                }
            } else if (kv.format == KvFormat::kInt4) {
                write_int4(kv, {head.k, head.v, kCentred ? head.centre : nullptr, head.keys, head.values, head.scales});
            } else {
                write_int16(kv, head);
            }
        }
        i += run ? kHeadsTogether : 1;
    }
    if (waiting > 0) write_int8(kv, heads, waiting);
}

}  // namespace

void kv_write_rows(const KvLayer& kv, const int64_t* slots, int64_t count, const float* k, const float* v, const float* centre) {
    if (kv.num_latent > 0) v = k;
    if (centre) return write_rows<true>(kv, slots, count, k, v, centre);
    write_rows<false>(kv, slots, count, k, v, nullptr);
}

}  // namespace penstock::PENSTOCK_ISA
