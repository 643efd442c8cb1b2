// Which keys and values a product's tiles fetch for the attention after it. Included by gemm_tile.h alone.

#pragma once

#include "kernels.h"
#include "simd.h"

namespace penstock::PENSTOCK_ISA {

namespace {  // of the one file that includes this: inline functions of one instruction set must not be linked into another

constexpr int kLineBytes = 64;
constexpr int kLinesOfGroup = 3;  // that a tile fetches beside each group of columns: more wait for each other

// The lines that a tile prefetches: during its first group of columns those from `data` on, and `step` bytes further for each next group.
// A step may be smaller than a fetch: a line already in the cache costs next to nothing.
struct KvPart {
    const uint8_t* data = nullptr;
    int64_t step = 0;
};

PENSTOCK_INLINE void fetch_lines(const uint8_t* data) {
    PENSTOCK_UNROLL for (int i = 0; i < kLinesOfGroup; ++i) prefetch(data + i * kLineBytes);
}

// Hands blocks out to a product's tiles: in order, evenly, and no more to a tile than it can fetch.
class KvFetcher {
  public:
    // `num_tiles` of about `num_groups` groups of columns. Blocks that these have no time for are left to attention.
    PENSTOCK_MEMBER KvFetcher(const UpcomingKv& kv, int num_tiles, int num_groups)
        : data_(kv.layer.data), block_stride_(kv.layer.block_stride), block_(kv.blocks), end_(kv.blocks + kv.num_blocks) {
        if (block_ == end_ || num_groups == 0) {
            end_ = block_;
            return;
        }
        const int64_t bytes = kv.layer.bytes_of_block() + kLineBytes - 1;  // of its lines, wherever it begins in the first one
        const int64_t most = int64_t{num_groups} * kLinesOfGroup * kLineBytes;
        const int64_t least_parts = (bytes + most - 1) / most, even_parts = num_tiles / kv.num_blocks;
        num_parts_ = least_parts > even_parts ? least_parts : even_parts;
        step_ = (bytes + num_parts_ * num_groups - 1) / (num_parts_ * num_groups);
        part_bytes_ = step_ * num_groups;
    }

    // The next tile's part. If nothing is left, it fetches `hot` again and again, which is faster than a branch for each group.
    PENSTOCK_MEMBER KvPart next(const void* hot) {
        if (block_ == end_) return {static_cast<const uint8_t*>(hot), 0};
        const KvPart part{data_ + *block_ * block_stride_ + part_ * part_bytes_, step_};
        if (++part_ == num_parts_) {
            part_ = 0;
            ++block_;
        }
        return part;
    }

  private:
    const uint8_t* data_;
    int64_t block_stride_, num_parts_ = 0, part_bytes_ = 0, step_ = 0;  // parts of a block, which tiles fetch one each
    const int32_t *block_, *end_;
    int64_t part_ = 0;
};

}  // namespace

}  // namespace penstock::PENSTOCK_ISA
