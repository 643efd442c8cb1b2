#include "kv_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14, which some C libraries do not know yet; older systems refuse it
#endif

namespace penstock {

namespace {

constexpr int kNice = 10;                        // a tenth of a core that others want
constexpr int64_t kPage = int64_t{1} << 21;      // a huge one
constexpr int64_t kFirst = int64_t{192} << 20;   // 16,000 tokens of a small model
constexpr int64_t kAhead = int64_t{32} << 20;

}  // namespace

KvMemory::KvMemory(int64_t bytes) : bytes_(bytes), memory_(allocate_huge(bytes)), wanted_(std::min(bytes, kFirst)) {
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
    setpriority(PRIO_PROCESS, 0, kNice);  // on Linux of this thread alone; a wish
    for (int64_t done = 0; done < bytes_; done += kPage) {
        {
            std::unique_lock lock(mutex_);
            if (!changed_.wait(lock, stop, [&] { return done < wanted_.load(std::memory_order_relaxed); })) return;
        }
        if (stop.stop_requested()) return;
        if (madvise(memory_.get() + done, static_cast<size_t>(std::min(kPage, bytes_ - done)), MADV_POPULATE_WRITE) != 0) return;
    }
}

}  // namespace penstock
