// The threads that run a step together. Owned by one Engine; knows nothing of models.
//
// All members run the same function; the caller is member 0. Between steps the others spin for a moment
// and then sleep, since the HTTP loop needs the same cores. Inside a step they meet at barriers that spin and,
// when a member is late (its core was taken away), give up their time slice.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace penstock {

class Team {
  public:
    // Throws std::system_error if the system gives no more threads.
    explicit Team(int size);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs body(context, member) on every member and returns when all have returned. Not reentrant. The body must not throw:
    // the others would wait for it at the barrier.
    void run(void (*body)(void*, int), void* context);

    // Called by every member inside run: returns when all have called it.
    void barrier();

  private:
    void stop();
    void work(int member);
    void wait_for_work(uint32_t seen);

    int size_;
    void (*body_)(void*, int) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

}  // namespace penstock
