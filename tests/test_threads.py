"""Objects that threads of a server share, hammered: at once on a free-threaded Python, in turns of 10 us under a GIL."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from itertools import chain

import pytest

from penstock.admission.estimates import Backlog, Entry
from penstock.admission.tenants import Demand, Tenants
from penstock.engine.bridge import Bridge
from penstock.engine.ports import OutputChunk
from penstock.obs.metrics import Metrics
from penstock.testing import make_request
from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats
from penstock.types.tenant_limits import TenantLimits
from support.answering import PLAIN

ROUNDS = 5000
THREADS = 4


@pytest.fixture(autouse=True)
def _impatient():
    """Threads change places every 10 us where they cannot run at once."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(job: Callable[[int], object], number: int = THREADS) -> None:
    """Run `job(nth)` in several threads that begin together. Raise the first of their errors."""
    barrier, errors = threading.Barrier(number), []

    def run(nth: int) -> None:
        barrier.wait()
        try:
            job(nth)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(nth,)) for nth in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Echo:
    """An engine whose thread answers each request with one chunk as soon as it is submitted."""

    def __init__(self, bridge: Bridge) -> None:
        self._asked: list[str] = []
        self._has_asked = threading.Semaphore(0)
        self._bridge = bridge
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def submit(self, *requests) -> None:
        for request in requests:
            self._asked.append(request.request_id)
            self._has_asked.release()

    def abort(self, request_id, detail) -> None: ...

    def close(self) -> None:
        self._has_asked.release()
        self.thread.join()

    def _run(self) -> None:
        while self._has_asked.acquire() and self._asked:
            name = self._asked.pop(0)
            self._bridge.deliver([OutputChunk(name, "", (1,), (), 0)])
            self._bridge.deliver([OutputChunk(name, "", (2,), (), 0, finish_reason=FinishReason.STOP)])


async def test_no_chunk_is_left_without_a_wake_up():
    """A lost wake-up would leave the reader waiting."""
    bridge = Bridge()
    engine = Echo(bridge)
    bridge.attach(engine)
    try:
        for nth in range(ROUNDS // 5):
            with bridge.open([make_request(f"r{nth}")]) as stream:
                tokens: list[int] = []
                async with asyncio.timeout(30):
                    while not stream.is_ended:
                        tokens += [token_id for chunk in await stream.next_chunks() for token_id in chunk.token_ids]
            assert tokens == [1, 2]
    finally:
        engine.close()


def test_the_backlog_is_empty_when_all_have_ended_wherever_they_did():
    """Requests end on the engine thread, and on the event loop if a failed engine does not report them."""
    backlog = Backlog()

    def live(nth: int) -> None:
        for number in range(ROUNDS):
            name = f"{nth}/{number}"
            backlog.enter(name, Entry(7, 3, 0))
            if number % 2:
                backlog.on_first_token(name)
            backlog.on_finish(name)

    at_once(live)
    assert (len(backlog), backlog.num_prefill_tokens, backlog.num_blocks) == (0, 0, 0)


def test_no_end_of_a_tenants_request_is_lost():
    tenants = Tenants(TenantLimits(max_concurrent=1, tokens_per_minute=1000))
    held = tenants.hold(Demand("a", None, 0, 0))
    names = [[f"{nth}/{number}" for number in range(ROUNDS)] for nth in range(THREADS)]
    for name in chain.from_iterable(names):
        tenants.enter(held, name, 1, 0)
    tenants.release(held)

    def end(nth: int) -> None:
        for name in names[nth]:
            if nth % 2:
                tenants.forget(name)
            else:
                tenants.on_finish(name, 2, 1)

    at_once(end)
    assert held.account.num_open_calls == 0
    assert held.account.num_correction_tokens == THREADS // 2 * ROUNDS


def test_every_report_is_counted_once():
    metrics = Metrics("model")

    def report(nth: int) -> None:
        for number in range(ROUNDS):
            metrics.on_finish(RequestStats(f"{nth}/{number}", "", 0, 0, 0, 1, 1, 0, 1, 0, FinishReason.STOP))
            metrics.count_rejected("queue_full")
            if number % 50 == 0:
                with metrics.lock:
                    metrics.settle()

    at_once(report)
    with metrics.lock:
        metrics.settle()
    assert metrics.success[FinishReason.STOP] == metrics.rejected["queue_full"] == THREADS * ROUNDS


def test_a_grammar_begins_answers_in_several_threads():
    """llguidance's matcher raises if two threads use it at once."""
    grammars = Grammars(PLAIN, vocab_size=PLAIN.vocab_size)
    grammar = Grammar(GrammarKind.REGEX, "a{20}(b|c)+")
    grammars.prepare(grammar)
    compiled = grammars._kept[grammar]
    mask = compiled.first_mask

    def begin(nth: int) -> None:
        for _ in range(ROUNDS // 10):
            if not nth:
                compiled._first_mask = None  # as if the first answer began only now
            assert compiled.matcher().mask() == mask

    at_once(begin)
