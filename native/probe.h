// The most that this machine can do, measured now: the bound that a kernel's speed is compared with in the same run.
//
// Called by benchmarks, through bind_probe.cpp; knows the kernel table and nothing of engines. Machines are shared and change their
// clock, so a figure from another minute is no bound.

#pragma once

#include <cstdint>
#include <string>

#include "kernels/kernels.h"

namespace penstock {

struct ProbeOptions {
    int num_threads = 1;
    std::string variant;    // empty: the best
    double seconds = 0.06;  // of one measurement
    int repeat = 5;         // the best of so many
    bool cpu_time = false;  // count only the time that a thread had a processor: for machines with other work to do
};

// 1e9 operations per second of all threads together; a multiply-add is two operations. bf16 of a variant without such
// instructions is its float32. Throws std::invalid_argument for options out of range or an unusable variant,
// std::system_error without threads.
double peak_gops(ProbeKind kind, const ProbeOptions& options);

// 1e9 bytes per second that all threads together read in order, each from its own part of `bytes` of memory. That is the memory's
// speed if `bytes` is several times what the caches hold. Throws std::bad_alloc besides.
double peak_read_gbs(int64_t bytes, const ProbeOptions& options);

}  // namespace penstock
