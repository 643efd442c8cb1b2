"""The facts that a router gets: work in flight and held tokens, through the life of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.kv.changes import Changes
from penstock.sched.routing.dispatcher import Choice, Dispatcher
from penstock.sched.routing.routers import Arrival, LeastWork, PrefixAware, RoundRobin
from penstock.testing import make_request
from penstock.types.adapter import AdapterRef
from penstock.types.request import Request
from penstock.types.stats import EngineLoad, StepCounts, StepStats

IDLE = [EngineLoad(), EngineLoad()]


class Told:
    """Sends all to one replica, and keeps what it was told."""

    def __init__(self, chosen: int = 0) -> None:
        self.chosen = chosen
        self.work: list[Sequence[int]] = []
        self.held: list[Sequence[int]] = []

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del loads
        self.work.append(arrival.work)
        self.held.append(arrival.held)
        return self.chosen


def send(dispatcher: Dispatcher, request: Request, num_new_tokens: int = 10) -> int:
    names = dispatcher.names_of(request)
    return dispatcher.choose(request, names, IDLE, index=0, now_ns=0, num_new_tokens=num_new_tokens).replica


def test_work_is_that_of_prompts_until_their_first_token_and_of_answers_until_their_end() -> None:
    router = Told()
    dispatcher = Dispatcher(router, 2, block_size=4)
    send(dispatcher, make_request("one", 21))
    send(dispatcher, make_request("two", [7] * 30))
    assert router.work[-1] == (21 + 10, 0)
    dispatcher.on_tokens("one", 1)
    send(dispatcher, make_request("three", 1))
    assert router.work[-1] == (9 + 30 + 10, 0), "a token of its answer is done"
    for _ in range(5):
        dispatcher.on_tokens("one", 4)
    dispatcher.on_end("two")
    dispatcher.on_end("three")
    send(dispatcher, make_request("four", 1))
    assert router.work[-1] == (0, 0), "a longer answer than expected counts as no work"
    for request_id in ("one", "four", "four"):
        dispatcher.on_end(request_id)
        dispatcher.on_tokens(request_id, 1)
    send(dispatcher, make_request("five", 1))
    assert router.work[-1] == (0, 0)


def test_held_are_whole_blocks_that_were_told_or_are_being_computed() -> None:
    router = Told(1)
    dispatcher = Dispatcher(router, 2, block_size=4)
    request = make_request("one", 21)
    names = dispatcher.names_of(request)
    assert len(names) == 5
    assert len(dispatcher.names_of(make_request("even", 20))) == 4, "the last token is computed, whatever is cached"
    dispatcher.hear(0, Changes(names[:2], []))
    send(dispatcher, request)
    assert router.held[-1] == (8, 0)
    send(dispatcher, make_request("two", 18))
    assert router.held[-1] == (8, 16)
    assert router.work[-1] == (0, 21 + 10)
    send(dispatcher, make_request("three", 1))
    assert router.work[-1] == (0, 21 + 10 + 2 + 10), "of the second prompt, sixteen tokens are cached by then"


def test_what_was_expected_is_held_only_if_it_is_told_by_the_first_token() -> None:
    router = Told()
    dispatcher = Dispatcher(router, 2, block_size=4)
    prompts = [[number] * 9 for number in range(3)]
    for number, prompt in enumerate(prompts):
        send(dispatcher, make_request(str(number), prompt))
    dispatcher.hear(0, Changes(dispatcher.names_of(make_request("", prompts[0])), []))
    dispatcher.on_tokens("0", 1)
    dispatcher.on_tokens("1", 1)
    dispatcher.on_end("2")
    for number, prompt in enumerate(prompts):
        send(dispatcher, make_request(f"{number} again", prompt))
    assert router.held[3:] == [(8, 0), (0, 0), (0, 0)]


def test_without_prefix_caching_nothing_is_held() -> None:
    router = Told()
    dispatcher = Dispatcher(router, 2, block_size=4, has_prefix_caching=False)
    for request_id in "ab":
        send(dispatcher, make_request(request_id, 21))
    assert router.held[-1] == (0, 0)


def test_salts_do_not_share() -> None:
    router = Told()
    dispatcher = Dispatcher(router, 2, block_size=4)
    send(dispatcher, make_request("one", 21))
    send(dispatcher, make_request("two", 21, cache_salt=b"other"))
    assert router.held[-1] == (0, 0)


def arrival(work: Sequence[int], held: Sequence[int], prefix: int = 7) -> Arrival:
    return Arrival(index=0, now_ns=0, num_prompt_tokens=100, tenant="", priority=0, work=work, held=held, prefix=prefix)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin()
    assert [router.choose(arrival([9, 0, 0], [0, 0, 0]), [EngineLoad()] * 3) for _ in range(4)] == [0, 1, 2, 0]


def test_least_work_is_in_tokens() -> None:
    assert LeastWork().choose(arrival([300, 200, 250], [0, 0, 90]), [EngineLoad()] * 3) == 1


def test_prefixes_go_where_they_are_unless_that_is_too_far_behind() -> None:
    for work, chosen in (([0, 0, 0], 2), ([0, 0, 60], 2), ([0, 60, 97], 0)):
        assert PrefixAware().choose(arrival(work, [0, 16, 48]), [EngineLoad()] * 3) == chosen
    assert PrefixAware().choose(arrival([50, 40, 60], [0, 0, 0]), [EngineLoad()] * 3) == 1


def test_a_prefix_is_copied_once_its_requests_have_waited_for_what_a_copy_costs() -> None:
    """A copy costs 200 tokens, and each request waits for 60."""
    router = PrefixAware()
    popular, other = (arrival([0, 60], [0, 100], prefix) for prefix in (7, 8))
    chosen = [router.choose(popular, [EngineLoad()] * 2) for _ in range(8)]
    assert chosen == [1, 1, 1, 0, 1, 1, 1, 0]
    assert router.choose(other, [EngineLoad()] * 2) == 1, "each prefix pays for itself"


def test_an_idle_holder_costs_nobody_anything() -> None:
    router = PrefixAware()
    assert {router.choose(arrival([0, 0], [0, 100]), [EngineLoad()] * 2) for _ in range(50)} == {1}


@pytest.mark.parametrize("make_router", [LeastWork, PrefixAware])
def test_equals_take_turns(make_router: type[LeastWork | PrefixAware]) -> None:
    router = make_router()
    assert [router.choose(arrival([0, 0, 7, 0], [0] * 4), [EngineLoad()] * 4) for _ in range(5)] == [0, 1, 3, 0, 1]


def test_replicas_come_and_go() -> None:
    """A number is used again, and nothing of the one that had it before is left."""
    router = Told()
    dispatcher = Dispatcher(router, 3, block_size=4)
    loads = [EngineLoad(num_running=number) for number in range(3)]

    def choose(request: Request, **more: object) -> int:
        chosen = dispatcher.choose(
            request,
            dispatcher.names_of(request),
            loads,
            index=0,
            now_ns=0,
            num_new_tokens=10,
            **more,  # type: ignore[arg-type]
        )
        return chosen.replica

    first = make_request("one", 21)
    dispatcher.hear(0, Changes(dispatcher.names_of(first), []))
    assert choose(first) == 0
    dispatcher.on_end("one")
    dispatcher.leave(0)
    router.chosen = 1
    assert choose(make_request("two", 21)) == 2, "the second of those that are left"
    assert router.held[-1] == (0, 0)
    assert dispatcher.join() == 0
    assert dispatcher.join() == 3
    loads.append(EngineLoad())
    assert choose(make_request("three", 21), but_not={0, 1}) == 3
    assert router.work[-1] == (21 + 10, 0), "of those that may be chosen"
    assert router.held[-1] == (20, 0)
    assert choose(make_request("four", 21)) == 1
    assert router.work[-1] == (0, 0, 21 + 10, 21 + 10)


def test_an_adapter_counts_as_the_tokens_whose_room_it_takes_where_it_was_sent() -> None:
    router = Told(chosen=1)
    dispatcher = Dispatcher(router, 2, block_size=4)

    def choose(request_id: str, fingerprint: bytes) -> Choice:
        request = replace(make_request(request_id, 9), adapter=AdapterRef(1, fingerprint))
        names = dispatcher.names_of(request)
        return dispatcher.choose(request, names, IDLE, index=0, now_ns=0, num_new_tokens=10, num_adapter_blocks=50)

    assert choose("one", b"red").num_held_tokens == 0
    assert choose("two", b"red").num_held_tokens == 8, "of the prompt; the adapter is not in it"
    assert choose("three", b"green").num_held_tokens == 0
    assert router.held == [(0, 0), (0, 8 + 200), (0, 0)]
    for request_id in ("one", "two", "three"):
        dispatcher.on_end(request_id)
    dispatcher.leave(1)
    dispatcher.join()
    choose("four", b"red")
    assert router.held[-1] == (0, 0), "a new replica has none"


def test_the_load_of_a_group_counts_what_was_sent_computed_and_waits() -> None:
    dispatcher = Dispatcher(RoundRobin(), 2, block_size=4)
    for name in ("one", "two", "three"):
        send(dispatcher, make_request(name, 21))
    dispatcher.on_tokens("one", 1)
    dispatcher.on_tokens("one", 14)
    dispatcher.on_end("one")
    dispatcher.on_end("three")
    busy = [EngineLoad(num_waiting=1), EngineLoad()]
    load = dispatcher.group_load(busy, num_unsent=0)
    assert (load.num_replicas, load.is_full) == (2, False)
    assert (load.num_sent_tokens, load.num_done_tokens, load.num_waiting_tokens) == (3 * 31, 21 + 15, 31)
    dispatcher.on_tokens("two", 1)
    dispatcher.leave(1)
    load = dispatcher.group_load(busy, num_unsent=0)
    assert (load.num_replicas, load.is_full, load.num_waiting_tokens) == (1, True, 0)
    dispatcher.leave(0)
    assert not dispatcher.group_load(busy, num_unsent=0).is_full, "nobody is there"


def giving(num_replicas: int, *, slo_itl_ns: int | None = None, router: Told | None = None) -> Dispatcher:
    dispatcher = Dispatcher(router or Told(), 0, block_size=4, slo_itl_ns=slo_itl_ns)
    for _ in range(num_replicas):
        dispatcher.join(gives=True)
    return dispatcher


def choose(dispatcher: Dispatcher, request: Request) -> Choice:
    loads = [EngineLoad()] * len(dispatcher.numbers)
    return dispatcher.choose(request, dispatcher.names_of(request), loads, index=0, now_ns=0, num_new_tokens=10)


def hold(dispatcher: Dispatcher, replica: int, num_tokens: int) -> None:
    """Let a replica tell that it holds so many tokens of the usual prompt."""
    names = dispatcher.names_of(make_request("held", num_tokens + 1))
    dispatcher.hear(replica, Changes(names, []))


def test_requests_of_the_background_are_work_for_one_another_alone() -> None:
    router = Told()
    dispatcher = Dispatcher(router, 2, block_size=4)
    line, choice = [make_request(name, [7] * 30, background=True) for name in ("line", "another choice of it")]
    send(dispatcher, line)
    dispatcher.also(choice, 0, 10)
    send(dispatcher, make_request("chat", 1))
    send(dispatcher, make_request("another chat", 1))
    send(dispatcher, make_request("another line", 1, background=True))
    assert router.work[1:] == [(0, 0), (11, 0), (50 + 2 * 11, 0)]
    assert [dispatcher.work_of(0, with_background=told) for told in (True, False)] == [50 + 3 * 11, 2 * 11]
    load = dispatcher.group_load(IDLE, 0)
    assert (load.num_sent_tokens, load.num_waiting_tokens) == (22, 22)
    dispatcher.on_tokens("line", 1)
    assert dispatcher.group_load(IDLE, 0).num_done_tokens == 30 + 1, "replicas are at work"


def test_a_source_is_another_replica_that_holds_more_by_now() -> None:
    dispatcher = giving(3)
    hold(dispatcher, 1, 100)
    hold(dispatcher, 2, 160)
    choice = choose(dispatcher, make_request("one", 301))
    assert (choice.replica, choice.num_held_tokens, choice.source, choice.num_source_tokens) == (0, 0, 2, 160)
    assert dispatcher.work_of(0) == 301 - 160 + 10, "what it copies it does not compute"
    dispatcher.hear(0, Changes(dispatcher.names_of(make_request("held", 113)), []))
    assert choose(dispatcher, make_request("two", [*range(1, 302)])).source is None, "it expects to hold all of it itself"


def test_what_a_replica_is_still_to_compute_is_no_source() -> None:
    router = Told(1)
    dispatcher = giving(3, router=router)
    hold(dispatcher, 2, 80)
    choose(dispatcher, make_request("one", 301))  # replica 1 will hold 300
    router.chosen = 0
    choice = choose(dispatcher, make_request("two", 301))
    assert (choice.source, choice.num_source_tokens) == (2, 80)
    dispatcher.hear(1, Changes(dispatcher.names_of(make_request("held", 301)), []))
    choice = choose(dispatcher, make_request("three", [*range(1, 302), 5]))
    assert choice.source is None, "replica 0 is to hold as much"


@pytest.mark.parametrize("case", ["few tokens", "a scored prompt", "no giver", "a taker that can't", "it has left"])
def test_there_is_no_source(case: str) -> None:
    dispatcher = giving(0)
    for number in range(2):
        dispatcher.join(gives=not (case == "no giver" and number) and not (case == "a taker that can't" and not number))
    hold(dispatcher, 1, 60 if case == "few tokens" else 160)
    if case == "it has left":
        dispatcher.leave(1)
    choice = choose(dispatcher, make_request("one", 301, prompt_logprobs=1 if case == "a scored prompt" else None))
    assert (choice.source, choice.num_source_tokens) == (None, 0)
    assert dispatcher.work_of(0) == 301 + 10


def step(num_decodes: int, num_prefill_tokens: int) -> StepStats:
    """A step of 2 ms, 1 ms for each answer and 0.5 ms for each token of prompts."""
    duration_ns = 2_000_000 + 1_000_000 * num_decodes + 500_000 * num_prefill_tokens
    counts = StepCounts(num_tokens=num_decodes + num_prefill_tokens, num_decodes=num_decodes)
    return StepStats(0, 0, duration_ns, num_decodes, 0, 1, 1, 0, counts)


def taught(dispatcher: Dispatcher) -> Dispatcher:
    for number in range(300):
        dispatcher.on_step(step(number % 9, 32 * (number % 3)))
    return dispatcher


def begin(dispatcher: Dispatcher, name: str, replica: int, router: Told) -> None:
    router.chosen = replica
    choose(dispatcher, make_request(name, [len(name)] * 40))
    dispatcher.on_tokens(name, 1)


def test_answers_move_while_no_chunk_fits_beside_them() -> None:
    """A chunk of 16 tokens takes 8 ms, beside the 2 of each step. Six answers fit into 8.5 ms."""
    router = Told()
    dispatcher = taught(giving(4, slo_itl_ns=8_500_000, router=router))
    begin(dispatcher, "a", 0, router)
    assert len(router.work[-1]) == 3, "prompts go to the other three"
    assert dispatcher.hand_over("a") == 0
    before = dispatcher.work_of(0)
    begin(dispatcher, "bb", 1, router)
    assert dispatcher.hand_over("bb") == 0
    assert (dispatcher.work_of(0), dispatcher.work_of(2)) == (before + 9, 0)
    for number in range(3):
        begin(dispatcher, f"more {number}", 1, router)
        assert dispatcher.hand_over(f"more {number}") == 0
    begin(dispatcher, "the sixth", 1, router)
    assert dispatcher.hand_over("the sixth") == 0
    assert len(router.work[-1]) == 3
    begin(dispatcher, "the seventh", 1, router)
    assert dispatcher.hand_over("the seventh") == 1
    begin(dispatcher, "the eighth one", 1, router)
    assert len(router.work[-1]) == 2
    assert dispatcher.hand_over("the eighth one", but_not=(0,)) == 1
    assert dispatcher.hand_over("the eighth one", but_not=range(4)) is None, "all are draining"
    dispatcher.leave(0)
    assert dispatcher.numbers == [1, 2, 3]


@pytest.mark.parametrize(("slo_itl_ns", "num_replicas"), [(None, 4), (40_000_000, 4), (8_500_000, 1), (2_900_000, 4), (1, 4)])
def test_answers_stay_otherwise(slo_itl_ns: int | None, num_replicas: int) -> None:
    router = Told()
    dispatcher = taught(giving(num_replicas, slo_itl_ns=slo_itl_ns, router=router))
    begin(dispatcher, "a", 0, router)
    assert len(router.work[-1]) == num_replicas
    assert dispatcher.hand_over("a") is None


def test_answers_that_need_all_replicas_stay() -> None:
    router = Told()
    dispatcher = taught(giving(2, slo_itl_ns=8_500_000, router=router))
    for number in range(5):
        begin(dispatcher, f"answer {number}", 0, router)
        assert len(router.work[-1]) == 1
        assert dispatcher.hand_over(f"answer {number}") == 0
    begin(dispatcher, "the sixth", 0, router)
    assert dispatcher.hand_over("the sixth") is None, "one replica would be full with it"
    begin(dispatcher, "the seventh", 1, router)
    assert len(router.work[-1]) == 2


def test_time_of_other_models_is_no_time_of_a_step() -> None:
    router = Told()
    dispatcher = giving(4, slo_itl_ns=40_000_000, router=router)
    for number in range(300):
        stats = step(number % 9, 32 * (number % 3))
        dispatcher.on_step(replace(stats, ended_ns=stats.ended_ns + 30_000_000, waited_ns=30_000_000))
    begin(dispatcher, "a", 0, router)
    assert dispatcher.hand_over("a") is None


def test_prompts_that_need_more_replicas_than_are_left_go_to_all() -> None:
    """Three of four are left to them. A step of 512 tokens takes a replica 256 ms for them."""
    router = Told()
    dispatcher = taught(giving(4, slo_itl_ns=8_500_000, router=router))
    for num_busy, is_apart in ((2.5, True), (3.5, False), (0.5, True)):
        for _ in range(4_000):
            at_ns = dispatcher._split._last_ns + round(256_000_000 / num_busy)  # by 4,000 of them, ten minutes
            stats = step(1, 512)
            dispatcher.on_step(replace(stats, started_ns=at_ns - stats.ended_ns, ended_ns=at_ns))
        name = f"answer {num_busy}"
        begin(dispatcher, name, 0, router)
        assert (dispatcher.hand_over(name) == 0) == is_apart
        dispatcher.on_end(name)


def test_answers_of_the_background_take_no_place_of_others() -> None:
    """Six answers fit."""
    router = Told()
    dispatcher = taught(giving(2, slo_itl_ns=8_500_000, router=router))
    for number in range(7):
        choose(dispatcher, make_request(f"line {number}", [number] * 40, background=True))
        dispatcher.on_tokens(f"line {number}", 1)
    assert dispatcher.hand_over("line 6") is None
    begin(dispatcher, "a", 0, router)
    assert len(router.work[-1]) == 1, "one replica takes answers alone"
    assert dispatcher.hand_over("a") == 0
    assert dispatcher.hand_over("a") is None, "it is there"


def test_what_has_not_begun_or_has_ended_does_not_move() -> None:
    router = Told()
    dispatcher = taught(giving(4, slo_itl_ns=8_500_000, router=router))
    choose(dispatcher, make_request("a", 40))
    assert dispatcher.hand_over("a") is None
    dispatcher.on_tokens("a", 1)
    dispatcher.on_end("a")
    assert dispatcher.hand_over("a") is None
    assert dispatcher.hand_over("unknown") is None
    assert [dispatcher.work_of(number) for number in range(4)] == [0, 0, 0, 0]


def test_answers_stay_where_a_replica_gives_no_kv() -> None:
    router = Told()
    dispatcher = taught(giving(3, slo_itl_ns=8_500_000, router=router))
    dispatcher.join()
    begin(dispatcher, "a", 0, router)
    assert dispatcher.hand_over("a") is None
