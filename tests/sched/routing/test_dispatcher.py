"""The facts that a router gets: work in flight and held tokens, through the life of requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.kv.changes import Changes
from penstock.sched.routing.dispatcher import Dispatcher
from penstock.sched.routing.routers import Arrival, LeastWork, PrefixAware, RoundRobin
from penstock.testing import make_request
from penstock.types.request import Request
from penstock.types.stats import EngineLoad

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
    send(dispatcher, make_request("two", 14))
    assert router.held[-1] == (8, 12)
    assert router.work[-1] == (0, 21 + 10)
    send(dispatcher, make_request("three", 1))
    assert router.work[-1] == (0, 21 + 10 + 2 + 10), "of the second prompt, twelve tokens are cached by then"


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
