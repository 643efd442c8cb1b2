#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

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

constexpr int kSpinsBeforeYield = 2000;  // while a task runs elsewhere; after that its thread may need this core to end it
constexpr int kSpinsBeforeSleep = 4000;  // so that the short gap between two steps of a busy engine costs no wake-up

constexpr uint32_t kMaxTasks = 0xFFFF, kMaxStages = 0xFFFF;

using Clock = std::chrono::steady_clock;

uint64_t make_claim(uint32_t epoch, uint32_t total) { return static_cast<uint64_t>(epoch) << 32 | total << 16; }
uint32_t epoch_of(uint64_t claim) { return static_cast<uint32_t>(claim >> 32); }
uint32_t total_of(uint64_t claim) { return static_cast<uint32_t>(claim) >> 16; }
uint32_t next_of(uint64_t claim) { return static_cast<uint32_t>(claim) & 0xFFFF; }

struct Form {
    Team::Strands strands;
    int num_stages;  // of each
};

uint64_t make_form(Team::Strands strands, int num_stages) {
    return static_cast<uint64_t>(num_stages) << 48 | static_cast<uint64_t>(strands.members) << 32 |
           static_cast<uint64_t>(strands.num_joint) << 24 | static_cast<uint64_t>(strands.lag) << 9 |
           static_cast<uint64_t>(strands.ordered) << 8 | static_cast<uint64_t>(strands.count);
}

Form form_of(uint64_t word) {
    return {{static_cast<int>(word & 0xFF), static_cast<int>(word >> 9 & 0x7FFF), (word >> 8 & 1) != 0, static_cast<int>(word >> 24 & 0xFF),
             static_cast<int>(word >> 32 & 0xFFFF)},
            static_cast<int>(word >> 48)};
}

}  // namespace

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

Team::Team(int size, const std::vector<int>& cpus) : size_(size) {
    if (size < 1 || size > kMaxSize) throw std::invalid_argument("a team has at least one thread, and at most 65,535");
    if (!cpus.empty() && static_cast<int>(cpus.size()) < size) throw std::invalid_argument("there are fewer CPUs than threads");
    try {
        for (int member = 1; member < size; ++member) start(member, cpus);
    } catch (...) {
        stop();
        throw;
    }
}

void Team::start(int member, const std::vector<int>& cpus) {
    threads_.emplace_back([this, member] { serve(member); });
    if (cpus.empty()) return;
    const int cpu = cpus[member];
    cpu_set_t own;
    CPU_ZERO(&own);
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &own);  // else it is refused below
    const int error = pthread_setaffinity_np(threads_.back().native_handle(), sizeof(own), &own);
    if (error == 0) return;
    const std::string what = "thread " + std::to_string(member) + " can't be pinned to CPU " + std::to_string(cpu);
    throw std::system_error(error, std::generic_category(), what);
}

Team::~Team() { stop(); }

void Team::stop() {
    stopping_.store(true, std::memory_order_relaxed);
    ring(size_, ++epoch_);
    for (std::thread& thread : threads_) thread.join();
}

Team::Turn::Turn(Team& team, Account& account) : team_(team), waited_ns_(0) {
    const int64_t asked_ns = now_ns();
    std::unique_lock lock(team.turns_mutex_);
    const uint64_t own = team.turns_.ask(account, asked_ns);
    if (team.turns_.call(asked_ns) && team.turns_.holder() == own) return;
    team.turns_changed_.notify_all();
    while (team.turns_.holder() != own) {
        if (team.turns_.holder() != 0) {
            team.turns_changed_.wait(lock);
        } else {
            team.turns_changed_.wait_until(lock, Clock::time_point(std::chrono::nanoseconds(team.turns_.kept_until_ns())));
            if (team.turns_.call(now_ns())) team.turns_changed_.notify_all();
        }
    }
    waited_ns_ = now_ns() - asked_ns;
}

Team::Turn::~Turn() {
    const std::lock_guard lock(team_.turns_mutex_);
    const int64_t ended_ns = now_ns();
    team_.turns_.leave(ended_ns);
    if (!team_.turns_.has_claims()) return;
    team_.turns_.call(ended_ns);
    team_.turns_changed_.notify_all();  // also if the turn is kept: those who wait watch until when
}

bool Team::is_contested(const Account& account, int64_t window_ns) {
    const std::lock_guard lock(turns_mutex_);
    return turns_.is_contested(account, now_ns() - window_ns);
}

Team::Stages& Team::reserve(int num_stages) {
    if (storage_.empty() || storage_.back()->size < num_stages) {
        storage_.push_back(std::make_unique<Stages>(num_stages));
        stages_.store(storage_.back().get(), std::memory_order_release);
    }
    return *storage_.back();
}

int64_t Team::run(Account& account, Work& work, const std::vector<int32_t>& num_tasks, Strands strands) {
    const int64_t waited_ns = begin(account, work, num_tasks, strands);
    finish();
    return waited_ns;
}

int64_t Team::begin(Account& account, Work& work, const std::vector<int32_t>& num_tasks, Strands strands) {
    begin(std::make_unique<Turn>(*this, account), work, num_tasks, strands);
    return turn_->waited_ns();
}

bool Team::try_begin(Account& account, Work& work, const std::vector<int32_t>& num_tasks, Strands strands) {
    if (size_ == 1) return false;
    {
        const std::lock_guard lock(turns_mutex_);
        if (!turns_.take(account, now_ns())) return false;
    }
    begin(std::make_unique<Turn>(*this), work, num_tasks, strands);
    return true;
}

void Team::begin(std::unique_ptr<Turn> turn, Work& work, const std::vector<int32_t>& num_tasks, Strands strands) {
    for (int32_t count : num_tasks) {
        if (count < 0 || count > static_cast<int32_t>(kMaxTasks)) throw std::length_error("a stage has too many tasks");
    }
    const int num_stages = static_cast<int>(num_tasks.size()), stages_of_strand = (num_stages - strands.num_joint) / strands.count;
    if (stages_of_strand > static_cast<int>(kMaxStages)) throw std::length_error("a run has too many stages");
    Stages& stages = reserve(num_stages);
    const uint32_t epoch = ++epoch_;
    work_.store(&work, std::memory_order_relaxed);
    stages.form.store(make_form(strands, stages_of_strand), std::memory_order_relaxed);
    for (int i = 0; i < num_stages; ++i) {
        stages.list[i].num_done.store(0, std::memory_order_relaxed);
        stages.list[i].claim.store(make_claim(epoch, static_cast<uint32_t>(num_tasks[i])), std::memory_order_release);
    }
    ring(std::min(strands.members, size_), epoch);
    turn_ = std::move(turn);
}

void Team::finish() {
    const std::unique_ptr<Turn> turn = std::move(turn_);  // given up at the end
    run_strands(*stages_.load(std::memory_order_relaxed), epoch_, 0);
}

// Whether the run goes on: false if another has begun.
bool Team::take_tasks(Stage& stage, int index, uint32_t epoch, int member) {
    bool has_begun = false;
    uint64_t claim = stage.claim.load(std::memory_order_acquire);
    while (epoch_of(claim) == epoch && next_of(claim) < total_of(claim)) {
        if (!stage.claim.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        Work& work = *work_.load(std::memory_order_relaxed);
        if (!has_begun) work.begun(member);
        has_begun = true;
        work.run_task(index, static_cast<int>(next_of(claim)), member);
        claim = stage.claim.load(std::memory_order_acquire);
        if (total_of(claim) - next_of(claim) < static_cast<uint32_t>(size_)) work.ended(index, member);
        stage.num_done.fetch_add(1, std::memory_order_release);
    }
    return epoch_of(claim) == epoch;
}

// A member that comes late may find the form of another run. It then takes nothing: all tasks of its own were taken before that one began.
void Team::run_strands(const Stages& stages, uint32_t epoch, int member) {
    const Form form = form_of(stages.form.load(std::memory_order_relaxed));
    const int members = std::min(form.strands.members, size_);
    if (member >= members) return;
    const int count = form.strands.count, own = member * count / members;
    const auto run = [&](int strand, int begin, int end) {
        return run_stages(stages, strand * form.num_stages + begin, strand * form.num_stages + end, epoch, member);
    };
    if (!run(0, 0, std::min(own * form.strands.lag, form.num_stages))) return;
    if (form.strands.ordered) {
        // Where one strand is done, so are all before it.
        for (int first = 0, strand = own; strand < count; first = ++strand) {
            for (int stage = 0; stage < form.num_stages; ++stage) {
                for (int before = first; before <= strand; ++before) {
                    if (!run(before, stage, stage + 1)) return;
                }
            }
        }
    } else {
        for (int i = 0; i < count; ++i) {
            if (!run((own + i) % count, 0, form.num_stages)) return;
        }
    }
    run(count, 0, form.strands.num_joint);
}

// Whether the run goes on: false if another has begun.
bool Team::run_stages(const Stages& stages, int begin, int end, uint32_t epoch, int member) {
    for (int i = begin; i < end; ++i) {
        Stage& stage = stages.list[i];
        if (!take_tasks(stage, i, epoch, member)) return false;
        for (int spins = 0;; ++spins) {
            const uint64_t claim = stage.claim.load(std::memory_order_acquire);
            if (epoch_of(claim) != epoch) return false;
            if (stage.num_done.load(std::memory_order_acquire) == total_of(claim)) break;
            if (spins < kSpinsBeforeYield) {
                relax();
            } else {
                sched_yield();
            }
        }
    }
    return true;
}

// For the first so many members, the caller among them. Sequentially consistent: else `notify_all` may look for sleepers before
// a member that goes to sleep can see the epoch, and that one sleeps through the run.
void Team::ring(int members, uint32_t epoch) {
    if (members < 2) return;
    const int last = bell_of(members - 1);
    for (int i = 0; i <= last; ++i) bells_[i].epoch.store(epoch, std::memory_order_seq_cst);
    for (int i = 0; i <= last; ++i) bells_[i].epoch.notify_all();
}

uint32_t Team::wait_for_run(const Bell& bell, uint32_t seen) {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        const uint32_t epoch = bell.epoch.load(std::memory_order_acquire);
        if (epoch != seen) return epoch;
        relax();
    }
    bell.epoch.wait(seen, std::memory_order_acquire);
    return bell.epoch.load(std::memory_order_acquire);
}

void Team::serve(int member) {
    const Bell& bell = bells_[bell_of(member)];
    uint32_t seen = 0;
    while (true) {
        seen = wait_for_run(bell, seen);
        if (stopping_.load(std::memory_order_relaxed)) return;
        // If another run begins in between, this is its list or that of `seen`: the epoch of every claim tells.
        const Stages& stages = *stages_.load(std::memory_order_acquire);
        run_strands(stages, seen, member);
    }
}

}  // namespace penstock
