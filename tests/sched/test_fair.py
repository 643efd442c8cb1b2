"""Virtual token counters: the bound of the paper, lifting, shares, and accounts that do not pile up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sched.policies.fair import UNIT, FairShares
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.sched.queue import WaitingQueue
from penstock.testing import Driver, HashExecutor, HashModel, make_core, make_request, run_to_completion
from penstock.testing.driver import STEP_NS
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity, RowPlan
from penstock.types.request import Request, RequestStatus
from support.half_right import HalfRight
from support.hash_matcher import HashMatcher

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
MAX_PROMPT = 30


def counter(order: FairShares, tenant: str) -> float:
    account = order._accounts.get(tenant)
    return 0.0 if account is None else account.counter / UNIT


@dataclass
class Meter:
    """Service as the paper measures it: prompts when they are admitted, tokens when they come. Does not ask the order."""

    requests: dict[str, Request]
    given: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def after_turn(self, driver: Driver) -> None:
        plan = driver.plans[-1]
        for admit in plan.admits:
            if admit.request_id not in self.seen:
                self.seen.add(admit.request_id)
                num_tokens = admit.num_prompt_tokens - admit.num_computed_tokens
                self.given[self.requests[admit.request_id].tenant] += INPUT_WEIGHT * num_tokens
        for row in plan.rows:
            if row.samples:
                self.given[self.requests[row.request_id].tenant] += OUTPUT_WEIGHT

    def waiting_tenants(self, now_ns: int) -> set[str]:
        come = [request for request in self.requests.values() if request.arrival_ns <= now_ns]
        return {request.tenant for request in come if request.request_id not in self.seen}


@st.composite
def capacities(draw: st.DrawFn) -> Capacity:
    block_size = draw(st.sampled_from([1, 4, 16]))
    num_needed = -(-60 // block_size)
    return Capacity(
        num_blocks=1 + num_needed + draw(st.integers(0, 3 * num_needed)),
        block_size=block_size,
        max_rows=draw(st.integers(1, 12)),
        max_step_tokens=draw(st.integers(4, 80)),
        max_model_len=60,
    )


@dataclass(frozen=True)
class Job:
    prompt: int
    max_tokens: int
    pause: int
    """Steps after the job before it; tenants that make pauses come back from idle."""


jobs = st.lists(
    st.builds(Job, st.integers(1, MAX_PROMPT), st.integers(1, 30), st.sampled_from([0, 0, 0, 0, 0, 1, 30])),
    min_size=10,
    max_size=40,
)


def check_differences(driver: Driver, requests: dict[str, Request], bound: int) -> None:
    """Compute them all. While two tenants both wait, W_f - W_g stays within a range of `bound`."""
    meter = Meter(requests)
    pairs = list(combinations(sorted({request.tenant for request in requests.values()}), 2))
    ranges: dict[tuple[str, str], tuple[int, int]] = {}
    coming = sorted(requests.values(), key=lambda request: request.arrival_ns)
    while coming or driver.core.has_work:
        now_ns = driver.clock.now_ns()
        due = [request for request in coming if request.arrival_ns <= now_ns]
        coming = coming[len(due) :]
        if driver.turn(*(Add(request) for request in due)) is None:
            driver.clock.advance_to(now_ns + STEP_NS)
            continue
        meter.after_turn(driver)
        waiting = meter.waiting_tenants(now_ns)
        for f, g in pairs:
            if not {f, g} <= waiting:
                ranges.pop((f, g), None)
                continue
            gap = meter.given[f] - meter.given[g]
            low, high = ranges.get((f, g), (gap, gap))
            low, high = ranges[f, g] = min(low, gap), max(high, gap)
            assert high - low <= bound, f"{f} and {g} differ by {high - low}, more than {bound}"


@settings(max_examples=2 * settings.default.max_examples // 5)  # each has up to 120 requests
@given(
    capacity=capacities(),
    a=jobs,
    b=jobs,
    c=jobs,
    growth_tokens=st.sampled_from([0, 32]),
    max_credit_tokens=st.sampled_from([0, 0, 20]),
    budget=st.sampled_from(["decode-first", "itl"]),
)
def test_two_tenants_who_wait_are_given_the_same_up_to_twice_the_bound(
    capacity: Capacity,
    a: list[Job],
    b: list[Job],
    c: list[Job],
    growth_tokens: int,
    max_credit_tokens: int,
    budget: str,
) -> None:
    """arXiv 2401.00588, section 4: |W_f - W_g| <= 2 max(w_p L_input, w_q M) over any time in which f and g both wait, and
    twice the credit besides, which the paper does not have.

    That is: the range of W_f - W_g over such a time is at most so large.
    """
    requests: dict[str, Request] = {}
    for tenant, own in zip("abc", (a, b, c), strict=True):
        at_ns = 0
        for idx, job in enumerate(own):
            at_ns += job.pause * STEP_NS
            name = f"{tenant}{idx}"
            requests[name] = make_request(name, job.prompt, max_tokens=job.max_tokens, tenant=tenant, arrival_ns=at_ns)
    order = FairShares(max_credit_tokens=max_credit_tokens)
    policies = make_policies(order=order, budget=budget, reserve=Watermark(growth_tokens=growth_tokens))
    driver = Driver(make_core(capacity, policies, enable_prefix_caching=False), HashExecutor(capacity))
    u = max(INPUT_WEIGHT * MAX_PROMPT, OUTPUT_WEIGHT * (capacity.num_blocks - 1) * capacity.block_size)
    check_differences(driver, requests, 2 * (u + max_credit_tokens))


def test_who_comes_back_while_it_decodes_is_not_lifted_beyond_the_bound() -> None:
    """g's first request decodes while its second comes and waits beside f, and the last admitted prompt was a long one."""
    capacity = Capacity(num_blocks=61, block_size=1, max_rows=12, max_step_tokens=80, max_model_len=60)
    jobs = [
        ("x", 59, 1),
        ("g", 3, 57),
        ("f", 59, 1),
        ("f", 59, 1),
        ("f", 42, 1),
        ("f", 3, 57),
        ("f", 5, 5),
        ("f", 5, 5),
        ("g", 59, 1),
    ]
    requests = {
        f"{tenant}{idx}": make_request(f"{tenant}{idx}", prompt, max_tokens=max_tokens, tenant=tenant)
        for idx, (tenant, prompt, max_tokens) in enumerate(jobs)
    }
    requests["g8"].arrival_ns = 4 * STEP_NS
    policies = make_policies(order=FairShares(max_credit_tokens=0), budget="decode-first", reserve=Watermark(growth_tokens=0))
    driver = Driver(make_core(capacity, policies, enable_prefix_caching=False), HashExecutor(capacity))
    check_differences(driver, requests, 2 * OUTPUT_WEIGHT * 60)


class Stand:
    """A queue under `fair`, one request at a time."""

    def __init__(self, order: FairShares) -> None:
        self.order = order
        self.queue = WaitingQueue(order, lambda request: 0)
        self.count = 0

    def push(self, tenant: str, prompt: int = 10) -> Request:
        request = make_request(f"r{self.count}", prompt, tenant=tenant, arrival_ns=self.count)
        self.count += 1
        self.queue.push(request, 0)
        return request

    def admit(self) -> str:
        request = self.queue.peek(0)
        assert request is not None
        self.queue.remove(request)
        request.num_inflight_tokens = request.num_prompt_tokens
        self.order.admitted(request)
        return request.tenant

    def sample(self, *tenants: str) -> None:
        requests = {f"s{idx}": make_request(f"s{idx}", tenant=tenant) for idx, tenant in enumerate(tenants)}
        self.order.served([RowPlan(name, 9, 1, (), True) for name in requests], requests, None)


def test_the_least_counter_is_next_and_prompts_are_charged_at_once() -> None:
    stand = Stand(FairShares())
    for tenant in "aaabbb":
        stand.push(tenant)
    assert [stand.admit() for _ in range(6)] == ["a", "b", "a", "b", "a", "b"]


def test_output_costs_twice_as_much_as_input() -> None:
    stand = Stand(FairShares())
    for tenant in "aaabb":
        stand.push(tenant)
    assert stand.admit() == "a"
    stand.sample("a", "a")
    assert counter(stand.order, "a") == 10 + 2 * 2
    assert [stand.admit(), stand.admit()] == ["b", "b"]


def test_a_share_of_two_is_served_twice() -> None:
    stand = Stand(FairShares(shares={"b": 2}))
    for tenant in "aaaabbbbbbbb":
        stand.push(tenant)
    assert Counter(stand.admit() for _ in range(9)) == {"a": 3, "b": 6}


def test_who_comes_back_is_lifted_to_the_least_of_those_who_wait() -> None:
    stand = Stand(FairShares(max_credit_tokens=0))
    for tenant in "aaaaaabbb":
        stand.push(tenant, 100)
    for _ in range(4):
        stand.admit()
    stand.push("late")
    assert counter(stand.order, "late") == counter(stand.order, "a") == counter(stand.order, "b") == 200


def test_who_comes_back_was_given_less_by_no_more_than_the_credit() -> None:
    stand = Stand(FairShares(max_credit_tokens=30))
    for tenant in "aaaabc":
        stand.push(tenant, 100)
    assert [stand.admit() for _ in range(5)] == ["a", "b", "c", "a", "a"]
    for tenant in "bc":
        stand.push(tenant)
    assert [counter(stand.order, name) for name in "abc"] == [300, 270, 270]


def test_new_names_have_no_credit() -> None:
    stand = Stand(FairShares())
    for tenant in "aaa":
        stand.push(tenant, 100)
    stand.admit()
    stand.push("new")
    assert (counter(stand.order, "a"), counter(stand.order, "new")) == (100, 100)


def test_who_comes_when_nobody_waits_is_lifted_to_who_waited_last() -> None:
    stand = Stand(FairShares(max_credit_tokens=0))
    stand.push("a")
    stand.admit()
    stand.sample(*"aaaaa")
    stand.push("b")
    assert counter(stand.order, "b") == counter(stand.order, "a") == 20


def test_who_is_lifted_goes_before_its_equal_but_only_once() -> None:
    stand = Stand(FairShares())
    for tenant in "aaa":
        stand.push(tenant)
    assert stand.admit() == "a"
    stand.push("b")
    stand.push("c")
    assert [stand.admit() for _ in range(4)] == ["b", "c", "a", "a"], "none of them was admitted between"


def test_a_stream_of_new_tenants_does_not_starve_one_that_waits() -> None:
    """One comes for each that is admitted, and none of them was given anything yet."""
    stand = Stand(FairShares(max_wait_ns=6))
    for _ in range(3):
        stand.push("a")
    served = []
    for idx in range(40):
        stand.push(f"new{idx}")
        served.append(stand.admit())
    turns = [turn for turn, tenant in enumerate(served) if tenant == "a"]
    assert len(turns) == 3
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 2 * 6


def test_a_stream_of_new_tenants_rises_to_one_that_waits_and_was_given_more() -> None:
    """Long before it has aged. Three wait at any time and share what is given: it waits for three or four times what it was
    given more."""
    stand = Stand(FairShares())
    for tenant in ("a", "new0", "new1"):
        stand.push(tenant)
    assert stand.admit() == "a"
    stand.sample(*"a" * 50)
    stand.push("a")
    assert [counter(stand.order, name) for name in ("a", "new0", "new1")] == [110, 0, 0]
    served = 0
    while stand.admit() != "a":
        served += 1
        stand.push(f"later{served}")
        assert served <= 4 * 110 / 10 + 3


def test_a_long_prompt_sets_new_tenants_back_by_no_more_than_the_credit() -> None:
    """Also if it is aborted after its first chunk. Else whoever sends one shuts out all who come later."""
    stand = Stand(FairShares(max_credit_tokens=50))
    for tenant in ("hog", "long"):
        stand.push(tenant, 30)
    stand.push("hog", 30)
    assert stand.admit() == "hog"
    long = make_request("100k", 100_000, tenant="other")
    stand.order.queued(long)
    stand.order.unqueued(long)
    long.num_inflight_tokens = 512
    stand.order.admitted(long)
    stand.order.left(long)
    stand.push("light")
    assert (counter(stand.order, "long"), counter(stand.order, "light")) == (0, 50)


def test_who_has_been_given_more_is_not_lowered() -> None:
    stand = Stand(FairShares(max_credit_tokens=0))
    for tenant in "ab":
        stand.push(tenant)
        stand.admit()
    stand.sample(*"aaaaa")
    stand.push("b")
    stand.push("a")
    assert (counter(stand.order, "a"), counter(stand.order, "b")) == (20, 20)


@pytest.mark.parametrize(
    ("depth", "guesses", "sit_out"), [(1, False, False), (2, False, False), (1, True, False), (1, False, True)]
)
def test_a_tenant_is_charged_for_what_it_is_given_and_no_other(depth: int, guesses: bool, sit_out: bool) -> None:
    """Also with a step planned ahead, in which requests that are about to end have no row; with rows of several tokens from
    guesses; and with requests that sit out steps."""
    capacity = Capacity(
        num_blocks=200, block_size=4, max_rows=5, max_step_tokens=16, max_model_len=60, max_scored=9, checks_guesses=guesses
    )
    order = FairShares()
    policies = make_policies(order=order, guesser=HalfRight(HashModel(), capacity))
    core = make_core(capacity, policies, enable_prefix_caching=False)
    requests = [
        make_request(f"r{idx}", 3 + idx % 15, max_tokens=1 + idx * 7 % 9, tenant="abc"[idx % 3], arrival_ns=idx)
        for idx in range(40)
    ]
    if sit_out:
        schedule, turn = core.scheduler.schedule, count()
        names = [one.request_id for one in requests if one.tenant == "a"]
        core.scheduler.schedule = lambda now_ns, *_: schedule(now_ns, (names if next(turn) % 3 else (), (), ()))
    run_to_completion(core, HashExecutor(capacity, depth=depth), *map(Add, requests))
    for tenant in "abc":
        own = [request for request in requests if request.tenant == tenant]
        num_given = sum(INPUT_WEIGHT * len(one.prompt_token_ids) + OUTPUT_WEIGHT * len(one.output_token_ids) for one in own)
        assert counter(order, tenant) == num_given
    assert not order._decoding
    assert not order._serving


def test_a_tenant_is_charged_for_tokens_that_a_grammar_forces() -> None:
    capacity, model, order = Capacity(100, 4, 4, 64, 60), HashModel(vocab_size=90), FairShares()
    request = make_request("a", 3, max_tokens=16, tenant="a", matcher=HashMatcher(model.vocab_size, num_forced=7))
    executor = HashExecutor(capacity, model=model)
    run_to_completion(make_core(capacity, make_policies(order=order)), executor, Add(request))
    assert executor.num_steps < 16
    assert counter(order, "a") == INPUT_WEIGHT * 3 + OUTPUT_WEIGHT * 16


def test_what_is_computed_again_is_not_charged() -> None:
    stand = Stand(FairShares())
    request = stand.push("a")
    stand.admit()
    request.max_computed_tokens = 10
    stand.order.admitted(request)
    assert counter(stand.order, "a") == 10


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_is_not_overtaken_by_a_newer_one_of_its_tenant(depth: int) -> None:
    """Also where one of another tenant is the first of the preempted requests, and the newer one outranks that."""
    capacity = Capacity(num_blocks=31, block_size=1, max_rows=3, max_step_tokens=30, max_model_len=30)
    core = make_core(capacity, make_policies(order="fair", victim="latest", reserve="chunk"), enable_prefix_caching=False)
    driver = Driver(core, HashExecutor(capacity, depth=depth))
    preempted = [make_request(name, 4, max_tokens=20, tenant=name, arrival_ns=idx) for idx, name in enumerate("ba")]
    driver.turn(*map(Add, [make_request("c", 4, max_tokens=24, tenant="c"), *preempted]))
    while any(request.status is not RequestStatus.PREEMPTED for request in preempted):
        driver.turn()
    num_before = len(driver.plans)
    driver.turn(Add(make_request("newer", 4, max_tokens=4, tenant="a", arrival_ns=2)))
    while core.has_work:
        driver.turn()
    admitted = [admit.request_id for plan in driver.plans[num_before:] for admit in plan.admits]
    assert admitted.index("a") < admitted.index("newer")


@pytest.mark.parametrize("max_tenants", [4, 5])
def test_accounts_do_not_pile_up(max_tenants: int) -> None:
    stand = Stand(FairShares(max_tenants=max_tenants))
    waiting = stand.push("waits")
    for idx in range(100):
        stand.queue.remove(stand.push(f"t{idx}"))
    assert len(stand.order._accounts) <= max_tenants + 1
    stand.queue.remove(waiting)
    assert not stand.order._waiting


def test_those_who_leave_without_being_served_are_forgotten_too() -> None:
    core = make_core(policies=make_policies(order="fair"), max_rows=1)
    core.apply([Add(make_request(name, tenant=name)) for name in "abc"], 0)
    assert core.begin(0) is not None
    core.apply([Abort("b")], 1)
    core.apply([Abort("c")], 1)
    assert core.num_waiting == 0
