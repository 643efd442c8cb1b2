// Decides which account runs next on a shared team. Pure bookkeeping: callers pass the time in. Team (team.h) calls it with its lock, tests
// with instants of their own.
//
// Runs can't be interrupted, so the choice falls between them. It is start-time fair queueing (Goyal, Vin and Cheng, 1996): an account's
// clock goes on by the time that it had, divided by its share, and the least clock is next. Clocks within `kSlack` count as equal:
// the first to ask is next. After a pause an account is at most `kCredit` behind: idleness earns no more.
//
// Whoever ends a run has work of its own to do before it asks again, and another one that waits would begin meanwhile: two of them would
// have every other run each, however long those are. So the turn is kept for one that is behind its share and comes back soon, as disks
// wait for the next read of a program (anticipatory scheduling: Iyer and Druschel, 2001). That time is its own, too. If it does not come,
// others lose that moment.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// A taker of turns on one team. Its fields are those of the team's `Turns`, but for the time, which any thread may read.
class Account {
  public:
    // Throws std::invalid_argument for a share below 0.001 or above 1000.
    explicit Account(double share);

    // The time that it had in all, with that for which the turn was kept for it while others waited.
    int64_t used_ns() const { return used_ns_.load(std::memory_order_relaxed); }

  private:
    friend class Turns;

    void charge(int64_t had_ns);

    double share_;  // of the machine, relative to those of others
    std::atomic<int64_t> used_ns_{0};
    int64_t clock_ns_ = 0;
    int64_t left_ns_ = -1;  // when its last run ended; -1: it had none
    int64_t away_ns_ = 1'000'000;  // from the end of a run until it asks again, smoothed; the host's work of a small model
};

// Instants are of one clock that never goes back. Not thread-safe.
class Turns {
  public:
    static constexpr int64_t kSlack = 5'000'000;
    static constexpr int64_t kCredit = 50'000'000;
    // The turn is kept for twice the usual absence, for `kLeastKept` at least. It is not kept where that absence is longer than half of the
    // last run, which is taken to be between these.
    static constexpr int64_t kLeastKept = 250'000, kShortAbsence = 4'000'000, kLongAbsence = 10'000'000;

    // An account wants a turn. Returns the number of its claim, which is above 0. The account must outlive the claim.
    uint64_t ask(Account& account, int64_t now_ns);
    // Gives the turn to an account if nobody has it, wants it or has it kept. Whether it was given; else nothing has changed.
    bool take(Account& account, int64_t now_ns);
    // Gives the turn, if nobody has it and it is not kept, to the claim that is next. Whether it was given.
    bool call(int64_t now_ns);
    // The claim that has the turn; 0: none.
    uint64_t holder() const { return holder_.number; }
    // The turn is over.
    void leave(int64_t now_ns);

    bool has_claims() const { return !claims_.empty(); }
    // While nobody has the turn: when to call again, as it is kept until then.
    int64_t kept_until_ns() const { return kept_until_ns_; }
    // Whether another account had a turn or asked for one since `since_ns`.
    bool is_contested(const Account& account, int64_t since_ns) const;

  private:
    struct Claim {
        uint64_t number = 0;
        Account* account = nullptr;
    };

    size_t next() const;

    std::vector<Claim> claims_;  // in the order in which they came
    Claim holder_;
    uint64_t num_claims_ = 0;   // that there ever were
    int64_t began_ns_ = 0;      // the turn that is held
    int64_t clock_ns_ = 0;      // the greatest at which a turn began
    int64_t kept_clock_ns_ = 0;  // the clock of the account for which the turn is kept
    int64_t kept_until_ns_ = 0;
    const Account* last_ = nullptr;  // whose turn was the latest; never dereferenced, as it may be gone
    int64_t last_ns_ = INT64_MIN;    // end of its turn
    int64_t other_ns_ = INT64_MIN;   // end of the latest turn of any other account
};

}  // namespace penstock
