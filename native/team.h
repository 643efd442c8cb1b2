// The threads that run a step together. Engines share a team, or have one each; it knows nothing of models.
//
// A run is a list of stages, each with a number of tasks, or several such lists, its strands, and then stages that all have in common.
// Members take tasks from a counter; a stage begins when all tasks of the one before are done. Each member has a strand, alone or with
// others, and helps with the rest when that one is done. Members wait for tasks that are running, never for a member: one
// that loses its core delays its strand by at most the task that it runs. The caller is member 0 and can do everything
// alone. Between runs the others spin for a moment and then sleep, since the HTTP loop needs the same cores. They sleep in
// groups, of which a run wakes those with members that take part in it.
//
// Runs take turns: engines that share a team may call it from several threads, and `Turns` (turns.h) says who is next. Two models on one
// machine then never have more threads at work than cores, whatever they do at the same time.

#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "turns.h"

namespace penstock {

// By the monotonic clock.
int64_t now_ns();

// The computation of a run. Members call it; it must not throw: no caller could catch it.
class Work {
  public:
    virtual void run_task(int stage, int task, int member) = 0;
    // For times without waits. A member calls `begun` before its first task of a stage. It calls `ended` after a task that may be its last,
    // while that stage still goes on: after each one, when fewer tasks are left than there are members. A member whose core is taken away
    // before that, while others take all that was left, has not called `ended`: its time in that stage is lost.
    virtual void begun(int member) { static_cast<void>(member); }
    virtual void ended(int stage, int member) { static_cast<void>(stage), static_cast<void>(member); }

  protected:
    ~Work() = default;
};

class Team {
  public:
    // Throws std::invalid_argument for a size below 1 or above kMaxSize, std::system_error if the system gives no more threads.
    // `cpus`: member i stays on the i-th of them, but for member 0, which is the caller's thread; empty: the system chooses.
    explicit Team(int size, const std::vector<int>& cpus = {});
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    static constexpr int kMaxSize = 65'535;
    static constexpr int kMaxStrands = 16;  // planning them and passing through their stages takes time: members of larger teams share one

    // The strands of a run have as many stages each.
    struct Strands {
        int count = 1;         // at most kMaxStrands
        int lag = 0;           // members of strand i first help with i * lag stages of the first strand, before their own
        bool ordered = false;  // whether a stage begins only after the same stage of the previous strand
        int num_joint = 0;     // stages that follow when all strands are done, of all together
        int members = kMaxSize;  // the first so many take part, at least one for each strand; kMaxSize: all
    };

    // Calls work.run_task(s, t, member) once for every stage s and every t in [0, num_tasks[s]), the stages of each strand in order, and
    // returns when all are done. `num_tasks` is [strands, stages] and then [num_joint]. Waits for its turn before, and returns for how long.
    // The account is one of this team alone. Not reentrant: a task must not call it. At most 65,535 tasks a stage, and stages a strand (std::length_error).
    int64_t run(Account& account, Work& work, const std::vector<int32_t>& num_tasks, Strands strands);
    int64_t run(Account& account, Work& work, const std::vector<int32_t>& num_tasks) { return run(account, work, num_tasks, Strands{}); }

    // The two halves of `run`: the other members begin, and go on until the caller takes part, too. Who begins has to finish; the turn is
    // the caller's meanwhile.
    int64_t begin(Account& account, Work& work, const std::vector<int32_t>& num_tasks, Strands strands);
    // Begins if the turn is free and there are other members. Returns whether it did; never waits.
    bool try_begin(Account& account, Work& work, const std::vector<int32_t>& num_tasks, Strands strands);
    void finish();

    // Whether another account had or wanted a turn within so many nanoseconds.
    bool is_contested(const Account& account, int64_t window_ns);

  private:
    // Members take the tasks of a stage from `claim`, which is one word:
    //
    //      63                            32 31             16 15              0
    //     +--------------------------------+-----------------+-----------------+
    //     |          epoch of run          | number of tasks |    next task    |
    //     +--------------------------------+-----------------+-----------------+
    //
    // Taking a task adds 1 by compare-and-swap. A member that comes late, when another run has begun, sees by the epoch that its own is
    // over, and its swap fails: it can take nothing by mistake.
    struct alignas(64) Stage {
        std::atomic<uint64_t> claim{0};
        std::atomic<uint32_t> num_done{0};
    };

    // `form` is one word, too, so that whoever reads it has that of a single run:
    //
    //      63           48 47           32 31    24 23               9   8   7      0
    //     +---------------+---------------+--------+------------------+-----+--------+
    //     |    stages     |    members    | joint  |       lag        | ord | strands|
    //     +---------------+---------------+--------+------------------+-----+--------+
    //
    // `stages` are those of each strand, `ord` is the bit of `ordered`; the other fields are those of `Strands`.
    struct Stages {
        explicit Stages(int count) : size(count), list(std::make_unique<Stage[]>(static_cast<size_t>(count))) {}
        int size;
        std::atomic<uint64_t> form{0};
        std::unique_ptr<Stage[]> list;
    };

    // What a group of members waits for: member 1, members 2 and 3, the next four, the next eight and so on. One for each member would be
    // as many cache lines for the caller to write.
    struct alignas(64) Bell {
        std::atomic<uint32_t> epoch{0};  // of the last run that wanted one of them
    };
    static constexpr int kMaxBells = 16;
    static int bell_of(int member) { return std::bit_width(static_cast<unsigned>(member)) - 1; }

    // The right to begin a run, held while it goes on.
    class Turn {
      public:
        Turn(Team& team, Account& account);
        explicit Turn(Team& team) : team_(team), waited_ns_(0) {}  // that it has already
        ~Turn();
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

        int64_t waited_ns() const { return waited_ns_; }

      private:
        Team& team_;
        int64_t waited_ns_;
    };

    void start(int member, const std::vector<int>& cpus);
    void stop();
    void serve(int member);
    void ring(int members, uint32_t epoch);
    static uint32_t wait_for_run(const Bell& bell, uint32_t seen);
    void run_strands(const Stages& stages, uint32_t epoch, int member);
    bool run_stages(const Stages& stages, int begin, int end, uint32_t epoch, int member);
    bool take_tasks(Stage& stage, int index, uint32_t epoch, int member);
    Stages& reserve(int num_stages);
    void begin(std::unique_ptr<Turn> turn, Work& work, const std::vector<int32_t>& num_tasks, Strands strands);

    int size_;
    std::atomic<Work*> work_{nullptr};
    std::atomic<Stages*> stages_{nullptr};  // the newest
    std::atomic<bool> stopping_{false};
    std::array<Bell, kMaxBells> bells_;
    uint32_t epoch_ = 0;  // of the last run; belongs to whoever has the turn
    std::mutex turns_mutex_;
    std::condition_variable turns_changed_;
    Turns turns_;
    std::unique_ptr<Turn> turn_;  // of the run that was begun and not finished, whose caller alone touches it
    std::vector<std::unique_ptr<Stages>> storage_;  // never freed: a late member may still read an old one
    std::vector<std::thread> threads_;
};

}  // namespace penstock
