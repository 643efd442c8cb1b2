#include "kv_cache.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace penstock {

namespace {

// A layer that lies nowhere yet.
KvLayer shaped(const EngineShape& shape) { return {nullptr, shape.kv_format, shape.block_size, shape.num_kv_heads, shape.head_dim}; }

}  // namespace

KvCache::KvCache(const EngineShape& shape, const KernelTable& kernels)
    : shape_(shape), kernels_(kernels), block_bytes_(shape.num_layers * shaped(shape).bytes_of_block()), memory_(bytes()) {}

KvLayer KvCache::layer(int index) const {
    KvLayer kv = shaped(shape_);
    kv.block_stride = block_bytes_;
    kv.data = memory_.data() + index * kv.bytes_of_block();
    return kv;
}

void KvCache::copy_block(int from, int to) { std::memcpy(at(to), at(from), static_cast<size_t>(block_bytes_)); }

void KvCache::read_block(int block, uint8_t* out) const { std::memcpy(out, at(block), static_cast<size_t>(block_bytes_)); }

void KvCache::write_block(int block, const uint8_t* content) { std::memcpy(at(block), content, static_cast<size_t>(block_bytes_)); }

void KvCache::poison_block(int block, int first) {
    for (int i = 0; i < shape_.num_layers; ++i) {
        const KvLayer kv = layer(i);
        const std::vector<float> nan(static_cast<size_t>(kv.num_kv_heads) * kv.head_dim, std::nanf(""));
        for (int64_t slot = int64_t{block} * kv.block_size + first; slot < int64_t{block + 1} * kv.block_size; ++slot) {
            kernels_.kv_write_rows(kv, &slot, 1, nan.data(), nan.data(), nullptr);
        }
    }
}

}  // namespace penstock
