#include "probe.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu.h"
#include "packing.h"

namespace penstock {

namespace {

constexpr int64_t kRounds = 8000;              // some 20 us between two looks at the clock
constexpr int64_t kReadAtOnce = int64_t{1} << 20;  // likewise
constexpr int kMaxThreads = 1024;

// Does a piece of work on thread `index` and returns how much it was.
using Piece = std::function<int64_t(int index)>;

double now_s(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double per_second(const Piece& piece, int index, const ProbeOptions& options) {
    const clockid_t clock = options.cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    const double begin = now_s(clock);
    int64_t done = 0;
    double elapsed = 0.0;
    while (elapsed < options.seconds) {
        done += piece(index);
        elapsed = now_s(clock) - begin;
    }
    return static_cast<double>(done) / elapsed;
}

// Does a piece of work once on each thread, on all at the same time.
void on_all_threads(int num_threads, const std::function<void(int index)>& work) {
    std::latch all_are_here(num_threads);
    std::atomic<bool> given_up{false};
    std::vector<std::thread> threads;
    const auto run = [&](int index) {
        all_are_here.arrive_and_wait();
        if (!given_up.load()) work(index);
    };
    threads.reserve(static_cast<size_t>(num_threads));
    try {
        for (int i = 1; i < num_threads; ++i) threads.emplace_back(run, i);
    } catch (...) {
        given_up.store(true);
        all_are_here.count_down(num_threads - static_cast<int>(threads.size()));
        for (std::thread& thread : threads) thread.join();
        throw;
    }
    run(0);
    for (std::thread& thread : threads) thread.join();
}

// The threads' rates while all of them work, added up.
double rate_of_all(const Piece& piece, const ProbeOptions& options) {
    std::vector<double> rates(static_cast<size_t>(options.num_threads));
    on_all_threads(options.num_threads, [&](int index) { rates[static_cast<size_t>(index)] = per_second(piece, index, options); });
    double sum = 0.0;
    for (double rate : rates) sum += rate;
    return sum;
}

double best_rate(const Piece& piece, const ProbeOptions& options) {
    double best = 0.0;
    for (int i = 0; i < options.repeat; ++i) best = std::max(best, rate_of_all(piece, options));
    return best;
}

void check(const ProbeOptions& options) {
    if (options.num_threads < 1 || options.num_threads > kMaxThreads) throw std::invalid_argument("num_threads must be 1 to 1024");
    if (!(options.seconds > 0.0) || options.seconds > 60.0) throw std::invalid_argument("seconds must be positive and at most 60");
    if (options.repeat < 1) throw std::invalid_argument("repeat must be at least 1");
}

}  // namespace

double peak_gops(ProbeKind kind, const ProbeOptions& options) {
    check(options);
    const KernelTable& kernels = choose_variant(options.variant);
    return best_rate([&](int) { return kernels.probe_arithmetic(kind, kRounds); }, options) / 1e9;
}

double peak_read_gbs(int64_t bytes, const ProbeOptions& options) {
    check(options);
    const KernelTable& kernels = choose_variant(options.variant);
    const int64_t part = bytes / options.num_threads / kReadAtOnce * kReadAtOnce;
    if (part < kReadAtOnce) throw std::invalid_argument("bytes must be at least 1 MiB for every thread");
    const Memory memory = allocate_aligned(part * options.num_threads, false);
    madvise(memory.get(), static_cast<size_t>(part * options.num_threads), MADV_HUGEPAGE);  // if the system has them
    // Each thread fills its own part, in the order in which it reads it: so what caches hold afterwards is what is read last.
    on_all_threads(options.num_threads,
                   [&](int index) { std::memset(memory.get() + index * part, 1, static_cast<size_t>(part)); });
    std::vector<int64_t> at(static_cast<size_t>(options.num_threads));
    const Piece read_on = [&](int index) {
        int64_t& offset = at[static_cast<size_t>(index)];
        kernels.probe_read(memory.get() + index * part + offset, kReadAtOnce);
        offset = (offset + kReadAtOnce) % part;
        return kReadAtOnce;
    };
    return best_rate(read_on, options) / 1e9;
}

}  // namespace penstock
