#include "kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bf16.h"

namespace penstock {

namespace {

// Layers that lie nowhere yet.
std::vector<KvLayer> shaped(const EngineShape& shape) {
    std::vector<KvLayer> layers;
    for (const KvShape& kv : shape.kv_shapes) layers.push_back({nullptr, shape.kv_format, shape.block_size, kv.num_kv_heads, kv.head_dim, kv.num_latent});
    return layers;
}

int64_t bytes_of_block(const std::vector<KvLayer>& layers) {
    int64_t bytes = 0;
    for (const KvLayer& kv : layers) bytes += kv.bytes_of_block();
    return bytes;
}

// Whole cache lines, of a block.
int64_t state_bytes(const EngineShape& shape) {
    const int64_t numbers = int64_t{shape.num_states} * shape.state_columns * shape.state_width;
    return (numbers * static_cast<int64_t>(sizeof(uint16_t)) + 63) / 64 * 64;
}

}  // namespace

KvCache::KvCache(const EngineShape& shape, const KernelTable& kernels)
    : shape_(shape),
      kernels_(kernels),
      layers_(shaped(shape)),
      states_offset_(bytes_of_block(layers_)),
      block_bytes_(states_offset_ + state_bytes(shape)),
      memory_(bytes(), shape.memory_nodes, shape.kv_fd) {
    int64_t offset = 0;
    for (KvLayer& kv : layers_) {
        kv.block_stride = block_bytes_;
        kv.data = memory_.data() + offset;
        offset += kv.bytes_of_block();
    }
}

uint16_t* KvCache::state(int32_t block, int32_t layer, int64_t position) const {
    const int64_t place = int64_t{layer} * shape_.state_columns + position % shape_.state_columns;
    return reinterpret_cast<uint16_t*>(at(block) + states_offset_) + place * shape_.state_width;
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
    for (const KvLayer& kv : layers_) {
        const std::vector<float> nan(static_cast<size_t>(kv.num_kv_heads) * kv.head_dim, std::nanf(""));
        for (int64_t slot = int64_t{block} * kv.block_size + first; slot < int64_t{block + 1} * kv.block_size; ++slot) {
            kernels_.kv_write_rows(kv, &slot, 1, nan.data(), nan.data(), nullptr);
        }
    }
}

}  // namespace penstock
