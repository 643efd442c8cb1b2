#include "team.h"

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

namespace {

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int kSpinsBeforeYield = 2000;  // some 30 to 60 us: longer than any barrier of a healthy step
constexpr int kSpinsBeforeSleep = 4000;  // the gap between two steps of a busy engine

}  // namespace

Team::Team(int size) : size_(size) {
    try {
        for (int member = 1; member < size; ++member) threads_.emplace_back([this, member] { work(member); });
    } catch (...) {
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::stop() {
    stopping_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run(void (*body)(void*, int), void* context) {
    body_ = body;
    context_ = context;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    body(context, 0);
    barrier();
}

void Team::barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
        if (spins < kSpinsBeforeYield) {
            relax();
        } else {
            sched_yield();
        }
    }
}

void Team::wait_for_work(uint32_t seen) {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        if (epoch_.load(std::memory_order_acquire) != seen) return;
        relax();
    }
    epoch_.wait(seen, std::memory_order_acquire);
}

void Team::work(int member) {
    uint32_t seen = 0;
    while (true) {
        wait_for_work(seen);
        seen = epoch_.load(std::memory_order_acquire);
        if (stopping_.load(std::memory_order_relaxed)) return;
        body_(context_, member);
        barrier();
    }
}

}  // namespace penstock
