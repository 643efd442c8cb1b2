// Annotations of attention for GCC's ThreadSanitizer (`make test-races`). Included by attention_segment.h alone; empty in other
// builds.
//
// Keys and values are read in whole tiles, also of positions that no query of the task sees: another thread may be writing these
// meanwhile. Results do not depend on them: tests fill them with NaN (`poison`). So functions that read tiles are not
// instrumented, and the sanitizer is told of the positions that the task sees, which nobody may be writing.

#pragma once

#include "kernels.h"
#include "simd.h"

#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_read_range(void* begin, long bytes);
#define PENSTOCK_TILE_READER(otherwise) __attribute__((noinline, no_sanitize("thread")))
#else
#define PENSTOCK_TILE_READER(otherwise) otherwise
#endif

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

#ifdef __SANITIZE_THREAD__

// A key or a value is four bytes beside those of other positions, again and again (KvLayer in kernels.h).
constexpr int kApart = 4;

inline void tell(const uint8_t* begin, int bytes) { __tsan_read_range(const_cast<uint8_t*>(begin), bytes); }

inline void tell_position(const KvLayer& kv, const uint8_t* keys, const uint8_t* values, int lane) {
    const int beside = kv.value_positions(), width = kv.width(), scale_bytes = kv.scale_width();
    for (int i = 0; i < kv.key_bytes(); i += kApart) tell(keys + i * kKvTile + lane * kApart, kApart);
    const uint8_t* const scales = keys + kv.scales_offset() + lane * scale_bytes;
    for (int i = 0; i < kv.scale_bytes(); i += scale_bytes) tell(scales + i * kKvTile, scale_bytes);
    if (kv.num_latent > 0) return;
    const uint8_t* const value = values + lane / beside * beside * kv.value_bytes() + lane % beside * width;
    for (int i = 0; i < kv.value_bytes(); i += width) tell(value + i / width * kApart, width);
}

// Positions [begin, end) of tiles that follow each other.
inline void tell_seen(const KvLayer& kv, const uint8_t* const* keys, const uint8_t* const* values, int begin, int end) {
    for (int i = begin; i < end; ++i) tell_position(kv, keys[i / kKvTile], values[i / kKvTile], i % kKvTile);
}

#else

PENSTOCK_INLINE void tell_seen(const KvLayer&, const uint8_t* const*, const uint8_t* const*, int, int) {}

#endif

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
