"""A scaler on a model of a group: replicas of a known speed, tokens that come, and time in seconds."""

from __future__ import annotations

from penstock.replicas import DOWN_S, UP_S
from penstock.sched.scaling import GroupLoad, Scaler

S = 1_000_000_000


class Group:
    """Replicas that start at once. Tokens that no replica computes in their second wait."""

    def __init__(self, least: int, most: int, num: int) -> None:
        self.scaler = Scaler(least, most, num)
        self.num, self.now_s = num, 0
        self.speed = 1000
        self.sent = self.done = self.waiting = 0
        self.wanted: list[int] = []
        self.reasons: list[str] = []

    def run(self, seconds: int, tokens_per_s: int) -> int:
        """Return the number of replicas after so many seconds."""
        for _ in range(seconds):
            self.waiting += tokens_per_s if self.num else 0
            self.sent += tokens_per_s if self.num else 0
            computed = min(self.waiting, self.num * self.speed)
            self.waiting -= computed
            self.done += computed
            self.decide(num_unsent=0 if self.num else tokens_per_s)
        return self.num

    def decide(self, num_unsent: int = 0) -> None:
        load = GroupLoad(
            num_replicas=self.num,
            is_full=self.waiting > 0,
            num_sent_tokens=self.sent,
            num_done_tokens=self.done,
            num_waiting_tokens=self.waiting,
            num_unsent=num_unsent,
        )
        wanted = self.scaler.decide(self.now_s * S, load)
        self.num = wanted.num
        self.wanted.append(wanted.num)
        self.reasons.append(wanted.reason)
        self.now_s += 1


def test_a_group_that_was_never_full_stays_as_it_is() -> None:
    group = Group(1, 6, 3)
    assert group.run(2 * DOWN_S, 2500) == 3
    assert "unknown" in group.reasons[-1]


def test_once_the_speed_is_known_replicas_come_before_requests_wait() -> None:
    group = Group(1, 9, 1)
    assert group.run(60, 1100) == 2
    assert not group.waiting
    for tokens_per_s in range(1100, 6000, 10):
        group.run(1, tokens_per_s)
        assert not group.waiting
    assert group.run(2 * DOWN_S, 6000) == 8, "8 x 80 % of 1,000, less a tenth of a replica"


def test_waiting_work_needs_more_until_it_is_done() -> None:
    group = Group(1, 9, 1)
    group.run(UP_S - 5, 3000)
    assert group.num == 1
    group.run(30, 3000)
    assert group.num == 5
    assert "3,000 tokens/s come" in group.reasons[-1]
    assert not group.waiting
    assert group.run(DOWN_S + UP_S, 3000) == 4
    assert "that needs 4." in group.reasons[-1]


def test_down_only_after_the_long_window_and_to_the_least() -> None:
    group = Group(2, 6, 2)
    group.run(60, 3600)
    up = group.num
    assert group.run(DOWN_S - 30, 100) == up
    assert "the last 300 seconds needed" in group.reasons[-1]
    assert group.run(60, 100) == 2
    assert group.reasons[-1].endswith("; 2 is the least.")


def test_never_more_than_the_most() -> None:
    group = Group(1, 3, 1)
    assert group.run(120, 9000) == 3
    assert group.reasons[-1].endswith("; 3 is the most.")


def test_the_speed_follows_requests_that_get_harder() -> None:
    group = Group(1, 9, 1)
    group.run(60, 1100)
    group.speed = 500
    assert group.run(300, 1600) in (4, 5)
    assert not group.waiting


def test_to_zero_when_nothing_came_for_the_long_window() -> None:
    group = Group(0, 2, 1)
    group.run(10, 100)
    assert group.run(DOWN_S - 5, 0) == 1
    assert group.run(10, 0) == 0
    assert group.run(1000, 0) == 0


def test_from_zero_at_once_and_for_the_long_window() -> None:
    """A request that ends soon keeps the replica as long as a longer one, so that the next one need not wait again."""
    group = Group(0, 2, 0)
    assert group.run(10, 0) == 0
    group.decide(num_unsent=1)
    assert group.num == 1
    assert group.run(DOWN_S - 2, 0) == 1
    assert group.run(5, 0) == 0


def test_a_lost_second_changes_nothing() -> None:
    group, late = Group(1, 6, 1), Group(1, 6, 1)
    group.run(60, 2000)
    late.run(30, 2000)
    late.now_s += 20
    late.run(10, 2000)
    assert late.num == group.num


def test_two_decisions_in_one_instant_are_one() -> None:
    group = Group(1, 6, 1)
    group.run(5, 2000)
    group.now_s -= 1
    group.decide()
    assert group.run(60, 2000) == 3
