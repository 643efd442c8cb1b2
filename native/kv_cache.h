// The keys and values of one model. A block has those of each layer, one after the other, as KvLayer says, and behind them its recurrent
// state, bf16 [num_states][state_columns][state_width]. A few tokens take few pages. Knows no requests and no block tables.

#pragma once

#include <cstdint>
#include <vector>

#include "instructions.h"
#include "kv_memory.h"

namespace penstock {

class KvCache {
  public:
    // Throws std::bad_alloc without memory.
    KvCache(const EngineShape& shape, const KernelTable& kernels);

    const KvLayer& layer(int index) const { return layers_[index]; }
    int64_t bytes() const { return block_bytes_ * shape_.num_blocks; }
    int64_t block_bytes() const { return block_bytes_; }
    // All blocks, one after the other. [bytes()]
    uint8_t* data() { return memory_.data(); }
    // Where a block keeps the state of one of its positions, in a layer of those with a state. [state_width]
    uint16_t* state(int32_t block, int32_t layer, int64_t position) const;

    // A block as a place for other numbers than keys and values. [block_bytes() / 4]
    float* numbers(int32_t block) const { return reinterpret_cast<float*>(at(block)); }

    // From now on a thread of low priority sees to pages (KvMemory).
    void begin() { memory_.begin(); }
    // A step writes slots up to this one.
    void reach(int64_t last_slot) { memory_.reach((last_slot / shape_.block_size + 1) * block_bytes_); }

    void copy_block(int from, int to);
    // A block of all layers, one after the other, in the layout of the cache. [block_bytes]
    void read_block(int block, uint8_t* out) const;
    void write_block(int block, const uint8_t* content);
    // Puts something else into a block, from the first line of the cache on that begins in it; where it lies then.
    const uint8_t* write_page(int block, const uint8_t* content, int64_t bytes);
    // Fills a block's positions from `first` on with NaN, so that a test sees any use of them; its state as well if all are.
    void poison_block(int block, int first);

  private:
    uint8_t* at(int block) const { return memory_.data() + block * block_bytes_; }

    EngineShape shape_;
    const KernelTable& kernels_;
    std::vector<KvLayer> layers_;
    int64_t states_offset_, block_bytes_;  // where a block's state begins, and its size
    KvMemory memory_;
};

}  // namespace penstock
