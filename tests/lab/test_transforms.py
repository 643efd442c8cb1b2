"""Transforms of workloads: what each changes, what it leaves alone, and that the same seed gives the same workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lab.transforms import (
    assign_tenants,
    cancel,
    cap_lengths,
    converse,
    divide_lengths,
    every,
    first,
    repeat,
    share_prefix,
    speed,
    think,
)
from penstock.lab.workload import Job, Workload
from penstock.types.errors import ConfigError

S = 1_000_000_000


def job(at_s: float = 0.0, prompt: int = 100, output: int = 10, **more: object) -> Job:
    return Job(arrival_ns=round(at_s * S), num_prompt_tokens=prompt, num_output_tokens=output, **more)  # type: ignore[arg-type]


def singles(count: int) -> Workload:
    return Workload(name="w", jobs=[job(nth, 100 + nth, 10 + nth) for nth in range(count)])


@pytest.fixture
def talks() -> Workload:
    """Three conversations: of 2, 1 and 3 turns. New messages have 10 tokens, answers 5."""
    jobs = [
        job(1, 10, 5),
        job(0.5, 25, 5, after=0),
        job(2, 10, 5),
        job(3, 10, 5),
        job(0.5, 25, 5, after=3),
        job(0.5, 40, 5, after=4),
    ]
    return Workload(name="talks", jobs=jobs)


def prompts(workload: Workload) -> list[int]:
    return [job.num_prompt_tokens for job in workload.jobs]


def afters(workload: Workload) -> list[int | None]:
    return [job.after for job in workload.jobs]


def test_first_and_every_choose_jobs() -> None:
    workload = singles(10)
    assert prompts(first(workload, 3)) == [100, 101, 102]
    assert prompts(every(workload, 4)) == [100, 104, 108]
    assert first(workload, 10) is workload
    assert every(workload, 4).name == "w, every 4th"


def test_conversations_are_chosen_whole(talks: Workload) -> None:
    assert afters(every(talks, 2)) == [None, 0, None, 2, 3]


def test_repeat_shares_what_was_shared_and_makes_the_rest_anew() -> None:
    """A server that answers the same hour three times must not find the hour in its prefix cache."""
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=48, num_output_tokens=1, prefix=(7, 1, 2)),
        Job(arrival_ns=10, num_prompt_tokens=48, num_output_tokens=1, prefix=(7, 3)),
        Job(arrival_ns=5, num_prompt_tokens=80, num_output_tokens=1, prefix=(7, 3, 4), after=1),
    ]
    blocks = [job.prefix for job in repeat(Workload(name="w", jobs=jobs), 2).jobs]
    assert blocks[:3] == [job.prefix for job in jobs]
    assert {first for first, *_ in blocks} == {7}, "two conversations share it"
    assert not {*blocks[3][1:]} & {1, 2, 3, 4}
    assert blocks[5][1] == blocks[4][1] not in {1, 2, 3, 4, *blocks[3]}, "one conversation goes on with its own"


def test_repeat_makes_recorded_conversations_anew() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=40, num_output_tokens=30, prefix=(7, 1, 2), answer=(3, 4, 5)),
        Job(arrival_ns=10, num_prompt_tokens=90, num_output_tokens=1, prefix=(7, 1, 3, 4, 6), alike=((6, 5, 5),)),
        Job(arrival_ns=20, num_prompt_tokens=20, num_output_tokens=1, prefix=(7, 8)),
    ]
    twice = repeat(Workload(name="w", jobs=jobs, prefix_block_tokens=16), 2).jobs
    assert list(twice[:3]) == jobs
    first, second, _ = twice[3:]
    assert first.prefix[0] == second.prefix[0] == 7, "two conversations share it"
    assert second.prefix[:4] == (*first.prefix[:2], *first.answer[:2])
    assert second.alike == ((second.prefix[4], first.answer[2], 5),)
    assert not {*first.prefix[1:], *first.answer, *second.prefix[1:]} & {1, 2, 3, 4, 5, 6}


def test_repeat_tells_a_turn_after_a_short_answer_from_another_conversation() -> None:
    jobs = [
        Job(arrival_ns=0, num_prompt_tokens=40, num_output_tokens=5, prefix=(7, 1, 2), answer=(3,)),
        Job(arrival_ns=10, num_prompt_tokens=60, num_output_tokens=1, prefix=(7, 1, 4, 5), alike=((4, 3, 13),)),
        Job(arrival_ns=20, num_prompt_tokens=42, num_output_tokens=1, prefix=(7, 8, 9)),
    ]
    workload = Workload(name="w", jobs=jobs, prefix_block_tokens=16)
    first, second, _ = repeat(workload, 2).jobs[3:]
    assert first.prefix[:2] == second.prefix[:2] != (7, 1), "its first new block has the answer"
    jobs[1] = replace(jobs[1], alike=((4, 3, 8),))
    assert repeat(workload, 2).jobs[3].prefix[:2] == (7, 1), "another question after the same prompt"


def test_repeat_goes_on_after_a_mean_gap(talks: Workload) -> None:
    twice = repeat(talks, 2)
    assert afters(twice) == [None, 0, None, None, 3, 4, None, 6, None, None, 9, 10]
    starts = [job.arrival_ns / S for job in twice.jobs if job.after is None]
    assert starts == [1, 2, 3, 4, 5, 6]


def test_divide_lengths_keeps_blocks_whole() -> None:
    workload = Workload(
        name="w",
        jobs=[job(prompt=1030, output=6, prefix=(1, 2, 3)), job(prompt=513, output=64, prefix=(1, 4))],
        prefix_block_tokens=512,
    )
    divided = divide_lengths(workload, 32)
    assert divided.prefix_block_tokens == 16
    assert [(job.num_prompt_tokens, job.num_output_tokens, job.prefix) for job in divided.jobs] == [
        (32, 1, (1, 2)),
        (16, 2, (1,)),
    ]
    with pytest.raises(ConfigError, match="512 tokens can't be divided by 3"):
        divide_lengths(workload, 3)


def test_divided_conversations_still_hold_all_that_was_said(talks: Workload) -> None:
    assert prompts(divide_lengths(talks, 5)) == [2, 5, 2, 2, 5, 8]
    assert prompts(divide_lengths(talks, 1000)) == [1, 3, 1, 1, 3, 5]


def test_cap_cuts_prompts_and_ends_conversations(talks: Workload) -> None:
    capped = cap_lengths(talks, max_prompt_tokens=26, max_output_tokens=4)
    assert prompts(capped) == [10, 24, 10, 10, 24]
    assert afters(capped) == [None, 0, None, None, 3]
    assert {job.num_output_tokens for job in capped.jobs} == {4}
    assert prompts(cap_lengths(talks, max_prompt_tokens=7)) == [7, 7, 7]


def test_a_block_that_a_cap_cuts_is_no_longer_shared() -> None:
    workload = Workload(
        name="w", jobs=[job(prompt=1030, prefix=(1, 2, 3)), job(prompt=513, prefix=(1, 4))], prefix_block_tokens=512
    )
    assert [job.prefix for job in cap_lengths(workload, max_prompt_tokens=600).jobs] == [(1,), (1, 4)]


def test_answers_are_divided_with_their_blocks_and_dropped_after_a_prompt_that_is_cut() -> None:
    some = job(prompt=40, output=30, prefix=(1, 2, 3), alike=((3, 9, 6),), answer=(4, 5, 6))
    workload = Workload(name="w", jobs=[some], prefix_block_tokens=16)
    (divided,) = divide_lengths(workload, 2).jobs
    assert (divided.alike, divided.answer) == (((3, 9, 3),), (4, 5, 6))
    assert cap_lengths(workload, max_prompt_tokens=20).jobs[0].answer == ()
    assert cap_lengths(workload, max_output_tokens=20).jobs[0].answer == (4, 5, 6)


def test_speed_moves_every_instant() -> None:
    workload = Workload(name="w", jobs=[job(4, deadline_ns=6 * S, cancelled_ns=8 * S), job(2, after=0)])
    fast = speed(workload, 2)
    assert [(job.arrival_ns, job.deadline_ns, job.cancelled_ns) for job in fast.jobs] == [
        (2 * S, 3 * S, 4 * S),
        (S, None, None),
    ]
    assert fast.name == "w, speed 2"


def test_think_times_are_drawn_for_follow_ups_alone(talks: Workload) -> None:
    thinking = repeat(think(talks, 2.0, seed=1), 1)
    assert [job.arrival_ns for job in thinking.jobs if job.after is None] == [S, 2 * S, 3 * S]
    many = think(converse(singles(4000), 4), 2.0, seed=1)
    drawn = [job.arrival_ns / S for job in many.jobs if job.after is not None]
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.05)


def test_converse_chains_jobs_and_adds_up_what_was_said() -> None:
    talk = converse(Workload(name="w", jobs=[job(nth, 10, 5, tenant=f"t{nth}") for nth in range(5)]), 3)
    assert afters(talk) == [None, 0, 1, None, 3]
    assert prompts(talk) == [10, 25, 40, 10, 25]
    assert [job.tenant for job in talk.jobs] == ["t0", "t0", "t0", "t3", "t3"]
    assert [job.arrival_ns / S for job in talk.jobs] == [0, 0, 0, 3, 0]
    with pytest.raises(ConfigError, match="has conversations already"):
        converse(talk, 2)


def test_a_chained_turn_begins_with_the_full_blocks_before_it() -> None:
    workload = Workload(
        name="w", jobs=[job(prompt=40, prefix=(1, 2, 3)), job(prompt=40, prefix=(1, 4, 5))], prefix_block_tokens=16
    )
    assert [job.prefix for job in converse(workload, 2).jobs] == [(1, 2, 3), (1, 2)]


def test_shared_prefixes_come_before_prompts_and_conversations_keep_theirs(talks: Workload) -> None:
    shared = share_prefix(talks, 64, 2, seed=0)
    assert shared.prefix_block_tokens == 64
    assert prompts(shared) == [74, 89, 74, 74, 89, 104]
    assert all(job.prefix in {(0,), (1,)} for job in shared.jobs)
    assert shared.jobs[1].prefix == shared.jobs[0].prefix
    assert shared.jobs[5].prefix == shared.jobs[3].prefix
    with pytest.raises(ConfigError, match="already defines how its prompts begin"):
        share_prefix(shared, 64, 2, seed=0)


def test_tenants_are_drawn_by_weight_and_conversations_keep_theirs(talks: Workload) -> None:
    assigned = assign_tenants(singles(4000), {"a": 3, "b": 1}, seed=0)
    assert Counter(job.tenant for job in assigned.jobs)["a"] == pytest.approx(3000, rel=0.03)
    for seed in range(20):
        tenants = [job.tenant for job in assign_tenants(talks, {"a": 1, "b": 1}, seed).jobs]
        assert tenants[0] == tenants[1]
        assert tenants[3] == tenants[4] == tenants[5]


def test_an_exact_share_goes_away_within_the_answer() -> None:
    workload = Workload(name="w", jobs=[job(output=1 + nth % 3) for nth in range(300)])
    left = cancel(workload, 0.05, seed=0)
    gone = [job for job in left.jobs if job.cancelled_after_tokens is not None]
    assert len(gone) == 15
    assert all(1 <= (job.cancelled_after_tokens or 0) < job.num_output_tokens for job in gone)
    assert all(job.cancelled_after_tokens in (None, 1) for job in cap_lengths(left, max_output_tokens=2).jobs)
    assert left.name == "w, 0.05 of the clients go away"


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_0_to_1(share: float) -> None:
    with pytest.raises(ConfigError, match="Set it from 0 to 1"):
        cancel(singles(3), share, seed=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda w, seed: assign_tenants(w, {"a": 1, "b": 1}, seed),
        lambda w, seed: cancel(w, 0.5, seed),
        lambda w, seed: share_prefix(w, 10, 5, seed),
        lambda w, seed: think(converse(w, 4), 1.0, seed),
    ],
    ids=["tenants", "cancel", "prefix", "think"],
)
def test_the_seed_alone_decides(change: object) -> None:
    assert callable(change)
    workload = singles(40)
    assert change(workload, 1) == change(workload, 1)
    assert change(workload, 1) != change(workload, 2)


def test_nothing_that_is_no_change_is_said() -> None:
    workload = singles(3)
    for same in (
        divide_lengths(workload, 1),
        cap_lengths(workload),
        speed(workload, 1),
        converse(workload, 1),
        first(workload, 9),
    ):
        assert same is workload


@pytest.mark.parametrize("number", [0, -1])
def test_counts_are_at_least_one(number: int) -> None:
    for change in (first, every, repeat, divide_lengths, converse):
        with pytest.raises(ConfigError, match=f"is {number}"):
            change(singles(3), number)


def workloads() -> st.SearchStrategy[Workload]:
    """Requests with and without blocks that are shared, some chained to conversations, some clients gone away."""

    def build(rows: list[tuple[int, int, int, bool]], num_turns: int, has_blocks: bool) -> Workload:
        jobs = [
            Job(
                arrival_ns=nth * S,
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                prefix=tuple(range(shared, shared + -(-prompt // 16))) if has_blocks else (),
                cancelled_after_tokens=output - 1 if leaves and output > 1 else None,
            )
            for nth, (prompt, output, shared, leaves) in enumerate(rows)
        ]
        return converse(Workload(name="w", jobs=jobs, prefix_block_tokens=16 * has_blocks), num_turns)

    rows = st.tuples(st.integers(1, 200), st.integers(1, 50), st.integers(0, 3), st.booleans())
    return st.builds(build, st.lists(rows, min_size=1, max_size=12), st.integers(1, 4), st.booleans())


CHANGES = st.sampled_from(
    [
        lambda w: first(w, 5),
        lambda w: every(w, 2),
        lambda w: repeat(w, 2),
        lambda w: divide_lengths(w, 2) if w.prefix_block_tokens % 2 == 0 else w,
        lambda w: cap_lengths(w, max_prompt_tokens=60, max_output_tokens=3),
        lambda w: speed(w, 3),
        lambda w: think(w, 1.0, 0),
        lambda w: assign_tenants(w, {"a": 1, "b": 2}, 0),
        lambda w: cancel(w, 0.5, 0),
    ]
)


@given(workload=workloads(), changes=st.lists(CHANGES, max_size=5))
def test_whatever_is_changed_a_workload_stays_one(workload: Workload, changes: list[Callable[[Workload], Workload]]) -> None:
    for change in changes:
        workload = change(workload)
    roots = [job.arrival_ns for job in workload.jobs if job.after is None]
    assert roots == sorted(roots)
    for idx, job in enumerate(workload.jobs):
        assert job.num_output_tokens >= 1
        assert job.cancelled_after_tokens is None or 1 <= job.cancelled_after_tokens < job.num_output_tokens
        assert len(job.prefix) <= -(-job.num_prompt_tokens // (workload.prefix_block_tokens or 1))
        history = 0
        if job.after is not None:
            assert 0 <= job.after < idx
            before = workload.jobs[job.after]
            history = before.num_prompt_tokens + before.num_output_tokens
            assert job.tenant == before.tenant
        assert job.num_prompt_tokens > history
