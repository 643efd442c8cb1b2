"""The spans of a request are its explanation: they meet, they end when it ends, and its preemptions lie in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.obs.explain.explanation import Explanation
from penstock.obs.explain.journal import Journal
from penstock.obs.trace_context import Span, TraceContext
from penstock.sched.policies.presets import make_policies
from penstock.serve import tracing
from penstock.serve.http.entries import Entry
from penstock.testing import HashExecutor, make_core, make_request
from penstock.testing.driver import Driver
from penstock.types.events import Abort, Add
from penstock.types.plan import Capacity
from penstock.types.request import WaitTimes

MS = 1_000_000


def told_of(num_blocks: int) -> dict[str, Explanation]:
    """Three requests, of which two run at once, in a pool of this size. Memory is reserved for nothing that is not there."""
    capacity = Capacity(num_blocks=num_blocks, block_size=4, max_rows=2, max_step_tokens=16, max_model_len=64)
    journal = Journal(10)
    core = make_core(capacity, make_policies(reserve="chunk"), journal=journal)
    driver = Driver(core, HashExecutor(capacity))
    for number, name in enumerate(("a", "b", "c")):
        prompt = [ord(name) + idx for idx in range(12 + number)]
        request = make_request(name, prompt, max_tokens=24, arrival_ns=0)
        driver.record(core.apply([Add(request)], 0))
    while core.has_work:
        driver.turn()
    return {told.request_id: told for told in journal.explain_all(("a", "b", "c"), driver.clock.now_ns)}


def spans_of(told: Explanation) -> list[Span]:
    return tracing._spans_of_choice(told, 0, "root")


def named(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


@pytest.mark.parametrize("num_blocks", [40, 16])
def test_the_phases_meet_and_have_the_whole_time(num_blocks: int) -> None:
    for told in told_of(num_blocks).values():
        spans = named(spans_of(told))
        queue, prefill, decode = spans["queue"], spans["prefill"], spans["decode"]
        assert queue.began_ns == told.arrival_ns
        assert (queue.ended_ns, prefill.ended_ns) == (prefill.began_ns, decode.began_ns)
        assert decode.ended_ns - queue.began_ns == told.total_ns
        assert {span.parent_id for span in (queue, prefill, decode)} == {"root"}
        assert len({span.span_id for span in spans.values()}) == len(spans)


def test_a_wait_says_for_what() -> None:
    told = told_of(40)["c"]
    queue = named(spans_of(told))["queue"]
    assert queue.attributes["penstock.waited.for_ms.rows"] == (queue.ended_ns - queue.began_ns) / MS > 0
    assert queue.attributes["penstock.waited.came_before"] == 2


def test_preemptions_lie_in_the_phase_that_they_interrupted() -> None:
    found = 0
    for told in told_of(16).values():
        spans = spans_of(told)
        by_id = {span.span_id: span for span in spans}
        for pause in [span for span in spans if span.name == "preempted"]:
            around = by_id[pause.parent_id]
            assert around.began_ns <= pause.began_ns < pause.ended_ns <= around.ended_ns
            assert pause.attributes["penstock.preemption.because"] == "memory"
            found += 1
        assert sum(span.name == "preempted" for span in spans) == len(told.pauses)
    assert found


def test_each_preemption_lies_in_a_phase() -> None:
    told = told_of(40)["a"]
    first_ns = told.queue_ns + told.prefill_ns
    [pause] = told_of(16)["b"].pauses[:1]
    pauses = [replace(pause, began_ns=first_ns + began_ns, waited_ns=1) for began_ns in (1, 3)]
    spans = spans_of(replace(told, pauses=pauses))
    decode = named(spans)["decode"]
    assert [span.parent_id for span in spans if span.name == "preempted"] == [decode.span_id] * 2


def test_spans_lie_in_those_above_them() -> None:
    """A judge reads the answer after its queue, and the engine ends the request of a client that left after the answer."""
    told = told_of(40)["c"]
    over_ns = told.arrival_ns + told.total_ns
    judge = Span(name="judge", began_ns=over_ns + 5, ended_ns=over_ns + 7)
    wait = Span(name="model", began_ns=told.arrival_ns, ended_ns=told.arrival_ns + 1)
    entry = Entry(client="c", method="POST", path="/a", ended_ns=over_ns - 1, explain=lambda: [told], spans=[judge, wait])
    entry.trace = TraceContext("0" * 32, "0" * 16, is_sampled=True)
    spans = tracing.spans_of(entry)
    by_id = {span.span_id: span for span in spans}
    assert by_id[wait.parent_id].name == "queue"
    for span in spans[1:]:
        above = by_id[span.parent_id]
        assert above.began_ns <= span.began_ns <= span.ended_ns <= above.ended_ns


def test_steps_have_the_engines_numbers() -> None:
    told = told_of(40)
    assert told["a"].first_step == 0
    assert told["a"].last_step is not None
    assert told["c"].first_step is not None
    assert told["a"].last_step <= told["c"].first_step < told["c"].last_step


def test_what_never_ran_has_a_queue_alone() -> None:
    capacity = Capacity(num_blocks=40, block_size=4, max_rows=2, max_step_tokens=16, max_model_len=64)
    journal = Journal(10)
    core = make_core(capacity, journal=journal)
    core.apply([Add(make_request("a", 8, max_tokens=5, arrival_ns=0, waits=WaitTimes(grammar=3 * MS)))], 5 * MS)
    core.apply([Abort("a", "cancelled")], 7 * MS)
    [told] = journal.explain_all(("a",), lambda: 9 * MS)
    [queue] = spans_of(told)
    assert (queue.name, queue.ended_ns) == ("queue", 7 * MS)
    assert queue.attributes["penstock.waited.for_ms.grammar"] == 3
