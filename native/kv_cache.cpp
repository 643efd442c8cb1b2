#include "kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bf16.h"

namespace penstock {

namespace {

// A layer that lies nowhere yet.
KvLayer shaped(const EngineShape& shape) { return {nullptr, shape.kv_format, shape.block_size, shape.num_kv_heads, shape.head_dim}; }

// Whole cache lines, of a block.
int64_t state_bytes(const EngineShape& shape) {
    const int64_t numbers = int64_t{shape.num_states} * shape.state_columns * shape.state_width;
    return (numbers * static_cast<int64_t>(sizeof(uint16_t)) + 63) / 64 * 64;
}

}  // namespace

KvCache::KvCache(const EngineShape& shape, const KernelTable& kernels)
    : shape_(shape),
      kernels_(kernels),
      layer_block_bytes_(shaped(shape).bytes_of_block()),
      block_bytes_(shape.num_layers * layer_block_bytes_ + state_bytes(shape)),
      memory_(bytes(), shape.memory_nodes) {}

KvLayer KvCache::layer(int index) const {
    KvLayer kv = shaped(shape_);
    kv.block_stride = block_bytes_;
    kv.data = memory_.data() + index * layer_block_bytes_;
    return kv;
}

uint16_t* KvCache::state(int32_t block, int32_t layer, int64_t position) const {
    const int64_t place = int64_t{layer} * shape_.state_columns + position % shape_.state_columns;
    return reinterpret_cast<uint16_t*>(at(block) + shape_.num_layers * layer_block_bytes_) + place * shape_.state_width;
}

void KvCache::copy_block(int from, int to) { std::memcpy(at(to), at(from), static_cast<size_t>(block_bytes_)); }

void KvCache::read_block(int block, uint8_t* out) const { std::memcpy(out, at(block), static_cast<size_t>(block_bytes_)); }

void KvCache::write_block(int block, const uint8_t* content) { std::memcpy(at(block), content, static_cast<size_t>(block_bytes_)); }

const uint8_t* KvCache::write_page(int block, const uint8_t* content, int64_t bytes) {
    reach(int64_t{block} * shape_.block_size);
    uint8_t* const begin = at(block);
    uint8_t* const page = begin + (64 - reinterpret_cast<uintptr_t>(begin) % 64) % 64;
    std::memcpy(page, content, static_cast<size_t>(bytes));
    return page;
}

void KvCache::poison_block(int block, int first) {
    if (first == 0 && shape_.num_states > 0) {
        std::fill_n(state(block, 0, 0), int64_t{shape_.num_states} * shape_.state_columns * shape_.state_width, to_bf16(std::nanf("")));
    }
    for (int i = 0; i < shape_.num_layers; ++i) {
        const KvLayer kv = layer(i);
        const std::vector<float> nan(static_cast<size_t>(kv.num_kv_heads) * kv.head_dim, std::nanf(""));
        for (int64_t slot = int64_t{block} * kv.block_size + first; slot < int64_t{block + 1} * kv.block_size; ++slot) {
            kernels_.kv_write_rows(kv, &slot, 1, nan.data(), nan.data(), nullptr);
        }
    }
}

}  // namespace penstock
