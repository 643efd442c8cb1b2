"""The headers of a trace are read as W3C's grammar says, and what a client sends is bounded before it is passed on."""

from __future__ import annotations

import pytest

from penstock.obs.trace_context import MAX_STATE_CHARS, TraceContext, new_span_id, new_trace_id, read_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def read(parent: str, *states: str):
    return read_context([parent.encode("latin-1")], [state.encode("latin-1") for state in states])


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("02", False), ("ff", True)])
def test_a_callers_place_and_its_flag_are_read(flags: str, is_sampled: bool) -> None:
    context = read(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert (context.trace_id, context.span_id, context.is_sampled) == (TRACE, SPAN, is_sampled)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"{GOOD}-extra",
        f"{GOOD}.",
        f" {GOOD}",
        f"{GOOD}\n",
        f"01-{TRACE}-{SPAN}-01extra",
        f"00-{TRACE[:-1]}٣-{SPAN}-01".encode().decode("latin-1"),
    ],
)
def test_anything_else_is_as_if_nothing_was_sent(parent: str) -> None:
    assert read(parent, "a=1") is None


def test_a_later_version_may_have_more() -> None:
    assert read(f"01-{TRACE}-{SPAN}-01-more-of-it") is not None


def test_two_parents_are_none() -> None:
    assert read_context([GOOD.encode()] * 2, []) is None


@pytest.mark.parametrize(
    ("states", "passed_on"),
    [
        (("a=1",), "a=1"),
        (("a=1, b=2 ,\t,c=3",), "a=1,b=2,c=3"),
        (("a=1", "b=2"), "a=1,b=2"),
        (("fw529a3039@dt=FfAAA",), "fw529a3039@dt=FfAAA"),
        (("a=1,a=2",), ""),
        (("A=1",), ""),
        (("a",), ""),
        (("a=",), ""),
        (("a=x=y",), ""),
        (("a=\x1b[2J",), ""),
        (("a=1\r\nX-Evil: 1",), ""),
        ((",".join(f"k{number}=1" for number in range(33)),), ""),
    ],
)
def test_the_state_is_passed_on_if_it_is_well_formed(states: tuple[str, ...], passed_on: str) -> None:
    context = read(GOOD, *states)
    assert context is not None
    assert context.state == passed_on
    assert context.child(is_sampled=True).headers("1" * 16).get("tracestate", "") == passed_on


@pytest.mark.parametrize("num_members", [6, 32])
def test_the_state_is_cut_after_whole_members(num_members: int) -> None:
    members = [f"k{number}={'v' * 100}" for number in range(num_members)]
    context = read(GOOD, ",".join(members))
    assert context is not None
    kept = context.state.split(",") if context.state else []
    assert kept == members[: len(kept)]
    assert len(context.state) <= MAX_STATE_CHARS
    assert kept if num_members == 6 else not kept, "much more than anybody passes on is not looked at"


def test_a_child_has_a_span_of_its_own_and_tells_it() -> None:
    caller = read(GOOD, "a=1")
    assert caller is not None
    child = caller.child(is_sampled=False)
    assert (child.trace_id, child.parent_id) == (TRACE, SPAN)
    assert child.span_id != SPAN
    assert child.headers(child.span_id) == {"traceparent": f"00-{TRACE}-{child.span_id}-00", "tracestate": "a=1"}


def test_a_new_trace_can_be_read_back() -> None:
    made = TraceContext(new_trace_id(), new_span_id(), is_sampled=True)
    again = read(made.headers(made.span_id)["traceparent"])
    assert again is not None
    assert (again.trace_id, again.span_id, again.is_sampled) == (made.trace_id, made.span_id, True)
