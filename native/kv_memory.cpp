#include "kv_memory.h"

#include <algorithm>
#include <system_error>

namespace penstock {

namespace {

constexpr int64_t kSmallPage = 4096;
constexpr int64_t kFirst = int64_t{192} << 20;  // 16,000 tokens of a small model
constexpr int64_t kAhead = int64_t{32} << 20;

// Takes the page if it is not there, and changes nothing that a step may be writing. Not by `madvise`: until that is done nobody can
// map memory, and the start took twice as long. A step writes by plain stores: in C++ that is a race with this, and on the processors
// that there are a store goes before or after a swap of zero for zero, and either way the number stays.
[[gnu::no_sanitize("thread")]] void touch_page(uint8_t* page) {
    uint8_t zero = 0;
    __atomic_compare_exchange_n(page, &zero, uint8_t{0}, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

}  // namespace

KvMemory::KvMemory(int64_t bytes, MemoryNodes nodes, int fd)
    : bytes_(bytes),
      memory_(fd < 0 ? allocate_huge(std::max<int64_t>(1, bytes), nodes) : allocate_in(fd, std::max<int64_t>(1, bytes), nodes)),
      wanted_(std::min(bytes, kFirst)) {}

void KvMemory::begin() {
    if (toucher_.joinable()) return;
    try {
        toucher_ = std::jthread([this](const std::stop_token& stop) { touch(stop); });
    } catch (const std::system_error&) {  // no thread: then steps take the pages
    }
}

void KvMemory::reach(int64_t end) {
    if (std::min(bytes_, end + kAhead / 2) <= wanted_.load(std::memory_order_relaxed)) return;
    {
        const std::lock_guard lock(mutex_);
        wanted_.store(std::min(bytes_, end + kAhead), std::memory_order_relaxed);
    }
    changed_.notify_one();
}

void KvMemory::touch(const std::stop_token& stop) {
    lower_priority();
    for (int64_t done = 0; done < bytes_; done += kHugePage) {
        {
            std::unique_lock lock(mutex_);
            if (!changed_.wait(lock, stop, [&] { return done < wanted_.load(std::memory_order_relaxed); })) return;
        }
        for (int64_t at = done; at < std::min(done + kHugePage, bytes_); at += kSmallPage) {
            if (stop.stop_requested()) return;
            touch_page(memory_.get() + at);
        }
    }
}

}  // namespace penstock
