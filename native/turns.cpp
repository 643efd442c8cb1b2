#include "turns.h"

#include <algorithm>
#include <stdexcept>

namespace penstock {

namespace {

constexpr int64_t kSmoothing = 8;  // an absence counts one part in so many

}  // namespace

Account::Account(double share) : share_(share) {
    if (!(share >= 0.001 && share <= 1000.0)) throw std::invalid_argument("a share of the machine lies between 0.001 and 1000");
}

void Account::charge(int64_t had_ns) {
    used_ns_.store(used_ns_.load(std::memory_order_relaxed) + had_ns, std::memory_order_relaxed);
    clock_ns_ += static_cast<int64_t>(static_cast<double>(had_ns) / share_);
}

uint64_t Turns::ask(Account& account, int64_t now_ns) {
    const bool was_kept = holder_.number == 0 && last_ == &account && !claims_.empty();
    if (was_kept) account.charge(now_ns - last_ns_);
    if (account.left_ns_ >= 0) {
        const int64_t away_ns = std::min(now_ns - account.left_ns_, 2 * kLongAbsence);  // a long pause is soon forgotten
        account.away_ns_ += (away_ns - account.away_ns_) / kSmoothing;
    }
    account.clock_ns_ = std::max(account.clock_ns_, clock_ns_ - kCredit);
    claims_.push_back({++num_claims_, &account});
    return num_claims_;
}

size_t Turns::next() const {
    int64_t least_ns = INT64_MAX;
    for (const Claim& claim : claims_) least_ns = std::min(least_ns, claim.account->clock_ns_);
    size_t first = 0;
    while (claims_[first].account->clock_ns_ > least_ns + kSlack) ++first;
    return first;
}

bool Turns::take(Account& account, int64_t now_ns) {
    const bool is_kept = now_ns < kept_until_ns_ && last_ != &account;
    if (holder_.number != 0 || !claims_.empty() || is_kept) return false;
    kept_until_ns_ = 0;
    ask(account, now_ns);
    return call(now_ns);
}

bool Turns::call(int64_t now_ns) {
    if (holder_.number != 0 || claims_.empty()) return false;
    const size_t first = next();
    const int64_t clock_ns = claims_[first].account->clock_ns_;
    if (now_ns < kept_until_ns_ && kept_clock_ns_ + kSlack < clock_ns) return false;
    holder_ = claims_[first];
    claims_.erase(claims_.begin() + static_cast<std::ptrdiff_t>(first));
    clock_ns_ = std::max(clock_ns_, clock_ns);
    began_ns_ = now_ns;
    kept_until_ns_ = 0;
    return true;
}

void Turns::leave(int64_t now_ns) {
    Account& account = *holder_.account;
    const int64_t longest_ns = std::clamp((now_ns - began_ns_) / 2, kShortAbsence, kLongAbsence);
    account.charge(now_ns - began_ns_);
    account.left_ns_ = now_ns;
    kept_clock_ns_ = account.clock_ns_;
    kept_until_ns_ = account.away_ns_ <= longest_ns ? now_ns + std::clamp(2 * account.away_ns_, kLeastKept, longest_ns) : 0;
    if (last_ != &account) other_ns_ = last_ns_;
    last_ = &account;
    last_ns_ = now_ns;
    holder_ = {};
}

bool Turns::is_contested(const Account& account, int64_t since_ns) const {
    if ((last_ == &account ? other_ns_ : last_ns_) >= since_ns) return true;
    if (holder_.number != 0 && holder_.account != &account) return true;
    return std::any_of(claims_.begin(), claims_.end(), [&](const Claim& claim) { return claim.account != &account; });
}

}  // namespace penstock
