"""Slow masks take turns in a tenth of the time. Rows whose turn has not come sit out, and every answer is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.clock import VirtualClock
from penstock.engine.mask_turns import MaskTurns
from penstock.engine.ports import NullObserver
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import HashExecutor, HashModel, expected_tokens, make_core, make_request
from penstock.testing.driver import STEP_NS, Driver
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason, Request
from support.hash_matcher import HashMatcher

MODEL = HashModel(vocab_size=30)
CAPACITY = Capacity(num_blocks=1000, block_size=16, max_rows=48, max_step_tokens=64, max_model_len=6000)
US = 1_000
SLOW_NS = 5 * STEP_NS
SCHEMA_NS = (12 * US,) * 10 + (100 * US,) * 10 + (12 * US,) * 6 + (250 * US,) * 6
"""Masks of an answer that writes names and numbers, an e-mail address, a field and short strings: 89 us on average."""


class Timed(HashMatcher):
    """Its masks take these times in turn, but for the first, which comes with the grammar."""

    def __init__(self, clock: VirtualClock, masks_ns: Sequence[int], **fields) -> None:
        super().__init__(MODEL.vocab_size, **fields)
        self.num_masks = 0
        self.spent_ns = 0
        self._made_at = 0
        self._clock = clock
        self._masks_ns = masks_ns

    def mask(self) -> bytes:
        if self._made_at != len(self.token_ids):
            self._made_at = len(self.token_ids)
            mask_ns = self._masks_ns[self._made_at % len(self._masks_ns)]
            self.num_masks += 1
            self.spent_ns += mask_ns
            self._clock.advance(mask_ns)
        return super().mask()


class Breaking(Timed):
    """Breaks in its first mask that takes time."""

    def mask(self) -> bytes:
        mask = super().mask()
        if self.num_masks:
            raise RuntimeError("of a library")
        return mask


class Device(HashExecutor):
    """With two steps in flight it computes a step while the host makes masks; with one the host waits first."""

    def __init__(self, clock: VirtualClock, row_ns: int, capacity: Capacity, depth: int) -> None:
        super().__init__(capacity, model=MODEL, depth=depth)
        self._clock = clock
        self._row_ns = row_ns
        self._ends_ns: dict[int, int] = {}
        self._free_ns = 0

    def submit(self, plan):
        self._free_ns = max(self._free_ns, self._clock.now_ns()) + STEP_NS + self._row_ns * len(plan.rows)
        if self.depth == 1:
            self._clock.advance_to(self._free_ns)
        self._ends_ns[plan.step_id] = self._free_ns
        return super().submit(plan)

    def restrict(self, ticket, masks) -> None:
        super().restrict(ticket, masks)
        self._free_ns = self._ends_ns[ticket.step_id] = max(self._free_ns, self._clock.now_ns())

    def wait(self, ticket) -> None:
        self._clock.advance_to(max(self._clock.now_ns(), self._ends_ns.pop(ticket.step_id)))


class DeviceDriver(Driver):
    """A step takes as long as its device says."""

    def _collect(self, ticket):
        self.executor.wait(ticket)
        return self.executor.collect(ticket)


class SatOut(NullObserver):
    """The requests that sat out in each step."""

    def __init__(self) -> None:
        self.steps: list[Sequence[str]] = []

    def on_step(self, stats) -> None:
        self.steps.append(stats.counts.sat_out)

    @property
    def names(self) -> set[str]:
        return {name for step in self.steps for name in step}


class Bench:
    """Steps take a millisecond each, and `row_ns` more for each row."""

    def __init__(self, depth: int = 1, *, row_ns: int = 0, capacity: Capacity = CAPACITY) -> None:
        self.clock, self.sat_out = VirtualClock(), SatOut()
        policies = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))
        core = make_core(capacity, policies, observer=self.sat_out)
        self.driver = DeviceDriver(core, Device(self.clock, row_ns, capacity, depth), self.clock)
        self.matchers: dict[str, Timed] = {}

    def plain(self, name: str = "plain", **fields) -> Request:
        return make_request(name, 9, **{"max_tokens": 5000} | fields)

    def slow(self, name: str, masks_ns: Sequence[int] = (SLOW_NS,), kind=Timed, seed: int = 1, **fields) -> Request:
        """A request that follows a grammar."""
        matcher_fields = {key: fields.pop(key) for key in ("num_forced", "fails_after") if key in fields}
        matcher = self.matchers[name] = kind(self.clock, masks_ns, seed=seed, **matcher_fields)
        return make_request(name, 5, matcher=matcher, **{"max_tokens": 5000} | fields)

    def turn(self, *requests: Request, abort: Sequence[str] = ()) -> None:
        self.driver.turn(*map(Add, requests), *map(Abort, abort))

    def run(self, num_steps: int) -> None:
        wanted = len(self.driver.plans) + num_steps
        while len(self.driver.plans) < wanted:
            self.turn()

    def until(self, name: str, num_tokens: int = 1) -> None:
        """The request was told so many tokens."""
        while self.num_tokens(name) < num_tokens:
            self.turn()

    def finish(self) -> None:
        while self.driver.core.has_work:
            self.turn()
            assert not self.driver.was_idle or self.driver.core.next_wakeup_ns(self.clock.now_ns()) is not None
        self.driver.core.check()

    def num_tokens(self, name: str) -> int:
        return len(self.driver.outcomes[name].token_ids) if name in self.driver.outcomes else 0

    def end_of(self, name: str) -> FinishReason | None:
        return self.driver.outcomes[name].finish_reason if name in self.driver.outcomes else None

    def spent_ns(self) -> int:
        return sum(matcher.spent_ns for matcher in self.matchers.values())

    def is_right(self, request: Request, **matcher_fields) -> bool:
        """The answer is the one that the request would have alone."""
        matcher = HashMatcher(MODEL.vocab_size, **matcher_fields) if matcher_fields else None
        prompt, sampling = request.prompt_token_ids, request.sampling
        expected = expected_tokens(prompt, sampling, model=MODEL, max_model_len=6000, matcher=matcher)
        return tuple(self.driver.outcomes[request.request_id].token_ids) == expected.token_ids


# What slow masks cost others.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_slow", [1, 2, 12])
@pytest.mark.parametrize("mask_ns", [2 * STEP_NS, 5 * STEP_NS])
def test_slow_masks_take_a_tenth_of_the_time_however_many_they_are(depth, num_slow, mask_ns):
    bench = Bench(depth)
    names = [f"slow{idx}" for idx in range(num_slow)]
    bench.turn(bench.plain(), *(bench.slow(name, (mask_ns,), seed=idx) for idx, name in enumerate(names)))
    while min(map(bench.num_tokens, names)) < 3:  # what the first masks cost was not known before
        bench.turn()
    before, began_ns, spent_ns = {name: bench.num_tokens(name) for name in names}, bench.clock.now_ns(), bench.spent_ns()
    bench.run(1200)
    took_ns, spent_ns = bench.clock.now_ns() - began_ns, bench.spent_ns() - spent_ns
    hidden_ns = (depth - 1) * STEP_NS * spent_ns // mask_ns // 3
    assert abs(spent_ns - hidden_ns - took_ns / 10) <= 2 * mask_ns
    assert took_ns < 1.12 * 1200 * STEP_NS
    counts = [bench.num_tokens(name) - before[name] for name in names]
    assert max(counts) - min(counts) <= 1, "every row has its turn"
    assert bench.sat_out.names == set(names)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_mask_beside_others_is_made_alone(depth):
    """Also if many rows wait for their turns, a step is longer by one mask."""
    bench = Bench(depth)
    bench.turn(bench.plain(), *(bench.slow(f"slow{idx}") for idx in range(8)))
    bench.run(20)
    lengths_ns = []
    for _ in range(400):
        began_ns = bench.clock.now_ns()
        bench.turn()
        lengths_ns.append(bench.clock.now_ns() - began_ns)
    assert max(lengths_ns) == STEP_NS + SLOW_NS


@pytest.mark.parametrize("depth", [1, 2])
def test_tenants_have_equal_parts(depth):
    bench = Bench(depth)
    many = [bench.slow(f"many{idx}", tenant="many") for idx in range(10)]
    large = bench.slow("large", (20 * STEP_NS,), tenant="large")
    bench.turn(bench.plain(tenant="plain"), *many, large, bench.slow("one", tenant="one"))
    bench.run(2000)
    spent_ns = [sum(bench.matchers[one.request_id].spent_ns for one in many)]
    spent_ns += [bench.matchers["large"].spent_ns, bench.matchers["one"].spent_ns]
    assert max(spent_ns) - min(spent_ns) < 0.5 * max(spent_ns)
    assert bench.num_tokens("one") >= 5 * bench.num_tokens("many0") > 0


@pytest.mark.parametrize("num_gone", [0, 100])
def test_tenants_that_have_left_take_nothing_from_the_others(num_gone):
    """They owe more than their part, and their requests have ended."""
    turns, now_ns, num_masks = MaskTurns(), STEP_NS, 0
    gone = [f"gone{idx}" for idx in range(num_gone)]
    for name in gone:
        turns.join(name, tenant=name)
        turns.note(name, 20 * STEP_NS, is_mask=True)
    turns.join("stays", tenant="stays")
    turns.settle(now_ns, STEP_NS, num_gone + 2, {*gone, "stays"}, is_beside=False)
    for name in gone:
        turns.leave(name)
    for _ in range(1000):
        mask_ns = 0 if "stays" in turns.sitting_out else 6 * STEP_NS
        if mask_ns:
            turns.note("stays", mask_ns, is_mask=True)
        num_masks += mask_ns > 0
        now_ns += STEP_NS + mask_ns
        turns.settle(now_ns, STEP_NS + mask_ns, 1 + (mask_ns > 0), {"stays"}, is_beside=False)
    assert 15 <= num_masks <= 25, "a tenth of the time, of 6 steps each"


def test_usual_masks_go_on_beside_slow_ones_of_the_same_tenant():
    bench = Bench(row_ns=STEP_NS // 4)
    usual = [bench.slow(f"usual{idx}", (10 * US,) * 9 + (120 * US,), seed=idx) for idx in range(8)]
    bench.turn(*usual, *(bench.slow(f"slow{idx}") for idx in range(4)))
    bench.run(50)
    bench.sat_out.steps.clear()
    bench.run(400)
    assert bench.sat_out.names == {f"slow{idx}" for idx in range(4)}


@pytest.mark.parametrize("apart", [0, 7], ids=["in step", "apart"])
@pytest.mark.parametrize("num_plain", [0, 1])
def test_rows_of_one_schema_do_not_sit_out(apart, num_plain):
    """Else steps have fewer rows, are shorter, and so leave less for masks: more rows sit out, and so on."""
    bench = Bench(row_ns=230 * US)
    rows = [bench.plain(f"plain{idx}") for idx in range(num_plain)]
    for idx in range(num_plain, 32):
        first = idx * apart % len(SCHEMA_NS)
        rows.append(bench.slow(f"row{idx}", SCHEMA_NS[first:] + SCHEMA_NS[:first], seed=idx))
    bench.turn(*rows)
    bench.run(40)
    bench.sat_out.steps.clear()
    bench.run(3 * len(SCHEMA_NS))
    assert not bench.sat_out.names


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_of_many_tenants_lengthen_a_step_by_one_mask(depth):
    bench = Bench(depth)
    bench.turn(bench.plain(), *(bench.slow(f"slow{idx}", tenant=str(idx)) for idx in range(8)))
    bench.run(20)
    bench.turn(bench.plain("long", max_tokens=100))
    lengths_ns = []
    for _ in range(800):
        began_ns = bench.clock.now_ns()
        bench.turn()
        lengths_ns.append(bench.clock.now_ns() - began_ns)
    assert max(lengths_ns) == STEP_NS + SLOW_NS
    assert sum(lengths_ns) < 1.15 * 800 * STEP_NS
    assert all(matcher.num_masks for matcher in bench.matchers.values())


# Slow masks alone.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_slow", [1, 2, 8])
@pytest.mark.parametrize("tenant", ["one", "{idx}"], ids=["one tenant", "tenants"])
def test_one_who_comes_beside_slow_masks_alone_waits_for_one_at_most(depth, num_slow, tenant):
    bench = Bench(depth)
    bench.turn(*(bench.slow(f"slow{idx}", seed=idx, tenant=tenant.format(idx=idx)) for idx in range(num_slow)))
    bench.run(50)
    for idx in range(20):
        came_ns = bench.clock.now_ns()
        bench.turn()  # it comes as this turn begins, and is seen in the next one
        bench.turn(bench.plain(f"new{idx}", max_tokens=1))
        bench.until(f"new{idx}")
        (event,) = bench.driver.outcomes[f"new{idx}"].events
        assert event.at_ns - came_ns <= SLOW_NS + (1 + depth) * STEP_NS
        bench.run(3)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_beside_slow_masks_of_many_tenants_waits_for_one_too(depth):
    bench = Bench(depth)
    bench.turn(*(bench.slow(f"slow{idx}", tenant=str(idx)) for idx in range(8)))
    bench.run(50)
    came_ns = bench.clock.now_ns()
    bench.turn()
    bench.turn(make_request("new", [3 + idx % 25 for idx in range(640)], max_tokens=1))
    bench.until("new")
    assert bench.driver.outcomes["new"].last.at_ns - came_ns <= SLOW_NS + (10 + depth) * STEP_NS


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_masks_alone_are_made_in_every_step_and_in_turn(depth):
    bench = Bench(depth)
    bench.turn(*(bench.slow(f"{tenant}{idx}", tenant=tenant) for tenant, count in (("a", 6), ("b", 2)) for idx in range(count)))
    bench.run(200)
    counts = {name: matcher.num_masks for name, matcher in bench.matchers.items()}
    assert sum(counts.values()) >= 195
    by_tenant = [[count for name, count in counts.items() if name.startswith(tenant)] for tenant in "ab"]
    assert abs(sum(by_tenant[0]) - sum(by_tenant[1])) <= 8, "tenants have equal parts"
    assert all(max(of_one) - min(of_one) <= 2 for of_one in by_tenant)


def test_rows_alone_whose_masks_are_shorter_than_a_step_have_several_turns_in_one():
    bench = Bench()
    bench.turn(*(bench.slow(f"slow{idx}", (STEP_NS * 3 // 10,)) for idx in range(8)))
    bench.run(100)
    assert bench.sat_out.names
    assert max(len(names) for names in bench.sat_out.steps[10:]) <= 4


# Rows that sit out.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fields", [{}, {"num_forced": 7}], ids=["free", "forced"])
def test_answers_are_the_same_to_the_token(depth, fields):
    bench = Bench(depth)
    plain, slow = bench.plain(max_tokens=400), bench.slow("slow", max_tokens=60, **fields)
    bench.turn(plain, slow)
    bench.finish()
    assert len([names for names in bench.sat_out.steps if names]) > 200
    assert bench.is_right(plain)
    assert bench.is_right(slow, seed=1, **fields)


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_sit_out_are_preempted_and_come_back(depth):
    bench = Bench(depth, capacity=replace(CAPACITY, num_blocks=12))
    requests = [bench.slow(f"slow{idx}", seed=idx, max_tokens=90) for idx in range(3)] + [bench.plain(max_tokens=90)]
    bench.turn(*requests)
    bench.finish()
    assert sum(request.num_preemptions for request in requests) > 0
    assert bench.sat_out.names
    assert bench.is_right(requests[-1])
    assert all(bench.is_right(request, seed=idx) for idx, request in enumerate(requests[:3]))


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_is_preempted_and_then_alone_computes_its_answer_again_in_chunks(depth):
    bench = Bench(depth, capacity=replace(CAPACITY, num_blocks=40))
    requests = [
        bench.slow(f"slow{idx}", (3 * STEP_NS,), seed=idx, max_tokens=max_tokens) for idx, max_tokens in enumerate((400, 600))
    ]
    bench.turn(*requests)
    bench.finish()
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert all(bench.is_right(request, seed=idx) for idx, request in enumerate(requests))


def test_one_that_sits_out_can_be_cancelled_and_misses_its_deadline():
    bench = Bench()
    bench.turn(bench.plain(max_tokens=300), bench.slow("cancelled"), bench.slow("late", deadline_ns=100 * STEP_NS))
    while not {"cancelled", "late"} <= bench.sat_out.names:
        bench.turn()
    assert bench.driver.core.scheduler.kv.tables["cancelled"].block_ids
    bench.turn(abort=["cancelled"])
    assert bench.end_of("cancelled") is FinishReason.ABORT
    bench.finish()
    assert bench.driver.outcomes["late"].last.reject_reason == "deadline"
    assert not bench.driver.core.scheduler.kv.tables


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_fails_after_it_sat_out_ends_its_answer_before_another_token(depth):
    """It was not told its first token meanwhile. Then nobody else is left, so that it has a row at once."""
    bench = Bench(depth)
    bench.turn(bench.plain(), bench.slow("owes", (500 * STEP_NS,), tenant="a"))
    while "owes" not in bench.sat_out.names:
        bench.turn()
    bench.turn(bench.slow("fails", tenant="a", fails_after=1), abort=["owes"])
    bench.run(9)
    assert bench.num_tokens("fails") == 1
    assert not bench.matchers["fails"].token_ids
    bench.turn(abort=["plain"])
    bench.finish()
    assert bench.end_of("fails") is FinishReason.ERROR
    assert bench.num_tokens("fails") == 1


# What ends is paid for.


def test_the_next_request_of_a_tenant_that_owes_computes_its_prompt_and_its_first_token():
    bench = Bench()
    bench.turn(bench.plain(), bench.slow("first", tenant="a"))
    while "first" not in bench.sat_out.names:
        bench.turn()
    bench.turn(bench.slow("next", tenant="a"), bench.slow("other", tenant="b"), abort=["first"])
    bench.run(8)
    assert bench.num_tokens("next") == 1
    assert bench.num_tokens("other") > 1
    bench.run(150)
    assert bench.num_tokens("next") > 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [2, 300])
def test_short_requests_one_after_another_have_no_more_than_a_tenth(depth, max_tokens):
    """Each has two tokens, or is cancelled after the first."""
    bench = Bench(depth)
    bench.turn(bench.plain())
    num_requests = 0
    while len(bench.driver.plans) < 1000:
        name = f"short{num_requests}"
        num_requests += 1
        bench.turn(bench.slow(name, max_tokens=max_tokens))
        if max_tokens == 2:
            while bench.end_of(name) is None:
                bench.turn()
        else:
            bench.until(name)
            bench.turn(abort=[name])
    assert num_requests > (15 if max_tokens == 2 else 100)
    assert 0 < bench.spent_ns() < 0.12 * bench.clock.now_ns() + 2 * SLOW_NS


def test_the_mask_by_which_a_grammar_failed_is_paid_for():
    bench = Bench()
    bench.turn(bench.plain(), bench.slow("fails", (50 * STEP_NS,), kind=Breaking))
    while bench.end_of("fails") is None:
        bench.turn()
    bench.turn(bench.slow("next"))
    bench.run(300)
    assert bench.num_tokens("next") == 1
    assert bench.matchers["next"].num_masks == 0
    bench.run(300)
    assert bench.num_tokens("next") > 1


def test_time_in_which_nobody_computes_pays_too():
    bench = Bench()
    bench.turn(bench.plain(max_tokens=5), bench.slow("first", max_tokens=2))
    bench.finish()
    bench.clock.advance(20 * SLOW_NS)
    bench.turn(bench.plain("later"), bench.slow("next"))
    bench.run(1)
    assert bench.matchers["next"].num_masks == 1


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_no_mask_is_made_after_the_last_token(max_tokens):
    """It may be one that was forced."""
    bench = Bench()
    bench.turn(bench.slow("a", max_tokens=max_tokens, num_forced=7))
    bench.finish()
    assert bench.num_tokens("a") == max_tokens
    assert bench.matchers["a"].num_masks < max_tokens
