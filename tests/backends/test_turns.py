"""Models take turns on a team: who is next, with instants of the tests' own, and the waiting, with real threads."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from threading import Barrier

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.backends.native._native import Account, Engine, SourceFormat, Team, Turns

MS = 1_000_000
SLACK_NS = 5 * MS
CREDIT_NS = 50 * MS


@dataclass
class Model:
    """One that takes turns in a simulation: runs of `run_ns`, with work of its own of `host_ns` after each."""

    run_ns: int
    host_ns: int
    share: float = 1.0
    begins_ns: int = 0
    num_runs: int = 1 << 60
    waits_ns: list[int] = field(default_factory=list)
    """How long it waited for each turn."""
    begun_ns: list[int] = field(default_factory=list)
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        self.account = Account(self.share)


def simulate(models: Sequence[Model], until_ns: int) -> None:
    turns, asked = Turns(), dict[int, tuple[Model, int]]()
    events: list[tuple[int, int, Model | None]] = []
    """Instant, a number that breaks ties, and the model that asks; None: a run ends, or it is time to call again."""
    numbers = count()

    def begin(now_ns: int) -> None:
        if turns.call(now_ns):
            model, asked_ns = asked.pop(turns.holder)
            model.waits_ns.append(now_ns - asked_ns)
            model.begun_ns.append(now_ns)
            ends[0] = model, now_ns + model.run_ns
            heapq.heappush(events, (now_ns + model.run_ns, next(numbers), None))
        elif not turns.holder and asked:
            heapq.heappush(events, (turns.kept_until_ns, next(numbers), None))

    ends: list[tuple[Model, int] | None] = [None]
    for model in models:
        heapq.heappush(events, (model.begins_ns, next(numbers), model))
    while events and events[0][0] < until_ns:
        now_ns, _, asks = heapq.heappop(events)
        if asks is not None:
            asked[turns.ask(asks.account, now_ns)] = asks, now_ns
        elif (running := ends[0]) is not None and running[1] == now_ns:
            ended, ends[0] = running[0], None
            turns.leave(now_ns)
            if len(ended.begun_ns) < ended.num_runs:
                heapq.heappush(events, (now_ns + ended.host_ns, next(numbers), ended))
        begin(now_ns)


@example([(4, 2, 3.0), (5, 0, 2.0), (12, 0, 0.5), (12, 0, 3.0)])  # a run more than 5 %
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3), st.sampled_from([0.5, 1.0, 2.0, 3.0])), min_size=2, max_size=4)
)
def test_models_that_all_want_the_machine_have_it_by_their_shares(kinds: list[tuple[int, int, float]]) -> None:
    """Within 5 % and the longest run, which may have just ended."""
    models = [Model(run * MS, host * MS, share) for run, host, share in kinds]
    simulate(models, 5_000 * MS)
    per_share = [model.account.used_ns / model.share for model in models]
    longest_ns = max(model.run_ns / model.share for model in models)
    assert max(per_share) <= 1.05 * min(per_share) + longest_ns


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 3))
def test_none_falls_behind_by_more_than_a_run_of_another(run_ms: int, other_ms: int, host_ms: int) -> None:
    one, other = Model(run_ms * MS, host_ms * MS), Model(other_ms * MS, MS)
    for until_ms in (100, 500, 2_000):
        one, other = Model(run_ms * MS, host_ms * MS), Model(other_ms * MS, MS)
        simulate([one, other], until_ms * MS)
        lag_ns = abs(one.account.used_ns - other.account.used_ns)
        assert lag_ns <= 2 * max(run_ms, other_ms) * MS + SLACK_NS


def test_a_model_alone_never_waits() -> None:
    alone = Model(3 * MS, MS)
    simulate([alone], 1_000 * MS)
    assert len(alone.begun_ns) == 250
    assert not any(alone.waits_ns)


def test_two_alike_leave_the_machine_no_pause() -> None:
    one, other = Model(9 * MS, MS), Model(9 * MS, MS)
    simulate([one, other], 2_000 * MS)
    assert one.account.used_ns + other.account.used_ns >= 0.98 * 2_000 * MS


def test_short_runs_come_several_times_for_one_long_one() -> None:
    short, long = Model(3 * MS, MS), Model(9 * MS, MS)
    simulate([short, long], 2_000 * MS)
    assert 2.2 <= len(short.begun_ns) / len(long.begun_ns) <= 2.6  # 9 ms hold 2.25 times 3 ms and the pause of 1 ms


def test_idleness_saves_up_no_more_than_the_credit() -> None:
    busy, late = Model(3 * MS, MS), Model(3 * MS, MS, begins_ns=1_000 * MS)
    simulate([busy, late], 1_200 * MS)
    begun = [at_ns for at_ns in busy.begun_ns if at_ns >= 1_000 * MS]
    assert late.account.used_ns <= 100 * MS + CREDIT_NS + SLACK_NS
    assert begun[0] <= 1_000 * MS + 2 * (CREDIT_NS + SLACK_NS)  # the late one has its pauses, too


def test_a_model_that_does_not_come_back_holds_up_others_for_a_moment_once() -> None:
    ends, stays = Model(3 * MS, MS, num_runs=100), Model(9 * MS, MS)
    simulate([ends, stays], 4_000 * MS)
    last_ns = ends.begun_ns[-1] + 4 * MS
    after = [wait_ns for begun_ns, wait_ns in zip(stays.begun_ns, stays.waits_ns, strict=True) if begun_ns > last_ns]
    assert sum(after) <= 12 * MS
    assert not any(after[2:])


def test_long_runs_are_worth_a_longer_wait() -> None:
    """As on a slow machine, whose host takes longer, too."""
    one, other = Model(15 * MS, 6 * MS), Model(90 * MS, 6 * MS)
    simulate([one, other], 10_000 * MS)
    assert one.account.used_ns == pytest.approx(other.account.used_ns, rel=0.05)


def test_nobody_is_waited_for_who_comes_back_late() -> None:
    slow, busy = Model(3 * MS, 8 * MS), Model(9 * MS, 0)
    simulate([slow, busy], 2_000 * MS)
    assert slow.account.used_ns + busy.account.used_ns >= 0.99 * 2_000 * MS


def test_a_turn_is_contested_while_another_has_it_wants_it_or_had_it() -> None:
    turns, one, other = Turns(), Account(), Account()
    turns.ask(one, 0)
    assert not turns.is_contested(one, 0)
    assert turns.is_contested(other, 0)
    assert turns.call(0)
    assert turns.is_contested(other, 0)
    turns.leave(10)
    assert not turns.is_contested(one, 0)
    assert turns.is_contested(other, 10)
    assert not turns.is_contested(other, 11)
    turns.ask(other, 20)
    assert turns.is_contested(one, 15)
    assert turns.call(20)
    turns.leave(30)
    turns.ask(one, 40)
    assert turns.call(40)
    turns.leave(50)
    assert turns.is_contested(one, 30)
    assert not turns.is_contested(one, 31)


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf"), 1e-4, 1e4])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"between 0\.001 and 1000"):
        Account(share)


def test_no_thread_is_forgotten_and_the_times_add_up() -> None:
    """Each turn packs one panel: as short as they come."""
    num_threads, num_turns = 4, 500
    team, accounts = Team(2), [Account(share) for share in (1.0, 1.0, 2.0, 4.0)]
    sizes = {"kv_shapes": [(1, 16)], "vocab_size": 32, "num_blocks": 2, "block_size": 16}
    begin = Barrier(num_threads)
    panel = np.zeros((16, 32 * 4), np.uint8)

    def pack(account: Account) -> None:
        engine = Engine(**sizes, max_rows=1, max_step_tokens=1, team=team, account=account)
        matrix = engine.add_matrix(SourceFormat.F32, 16, 32)
        begin.wait()
        for _ in range(num_turns):
            engine.pack_rows(matrix, 0, panel)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(pack, accounts))
    assert all(account.used_ns > 0 for account in accounts)
    assert all(team.is_contested(account, 60_000 * MS) for account in accounts)


def test_a_turn_that_is_free_is_taken_at_once_and_no_other():
    first, second = Account(), Account()
    turns = Turns()
    assert turns.take(first, 0)
    assert not turns.take(second, MS), "somebody has it"
    turns.leave(MS)
    assert not turns.take(second, MS + 1), "it is kept for the first"
    assert turns.take(first, MS + 1)
    turns.ask(second, 2 * MS)
    turns.leave(3 * MS)
    assert not turns.take(first, 3 * MS), "somebody wants it"
    assert turns.call(100 * MS)
    turns.leave(101 * MS)
    assert turns.take(first, 200 * MS), "it is kept for nobody"
    assert turns.holder
