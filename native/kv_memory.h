// The memory of a KV cache, whose pages are there before a step wants them.
//
// A cache is as large as memory allows, and its pages are taken as they are written first. Where a virtual machine gave its free
// memory back to the host, that takes milliseconds a page (`Arena` in packing.h), and all threads of a step wait for it. So a
// thread of low priority sees to the first blocks once the weights are loaded, and to some after those that steps have reached.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <thread>

#include "packing.h"

namespace penstock {

class KvMemory {
  public:
    // Zeroed; or std::bad_alloc. `fd`: an empty file in memory, to lie there; -1: none.
    KvMemory(int64_t bytes, MemoryNodes nodes, int fd);

    uint8_t* data() const { return memory_.get(); }
    // From now on pages are seen to; before, the machine has other things to do.
    void begin();
    // A step writes up to here. Called by one thread at a time.
    void reach(int64_t end);

  private:
    void touch(const std::stop_token& stop);

    int64_t bytes_;
    Memory memory_;
    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::atomic<int64_t> wanted_;  // up to where pages should be there; written under the mutex
    std::jthread toucher_;         // ends before anything else
};

}  // namespace penstock
