"""Spans, and the place of a request in a trace as HTTP's headers carry it (https://www.w3.org/TR/trace-context-1/)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_STATE_CHARS = 512
"""Most characters of a `tracestate` that are passed on, in whole members from the left (W3C, 3.3.1.5)."""
_MAX_MEMBERS = 32
_SAMPLED = 1
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_sampled: bool
    state: str = ""
    """The caller's `tracestate`."""
    parent_id: str = ""
    """The caller's span."""

    def child(self, *, is_sampled: bool) -> TraceContext:
        """Return the context of a request that this one has sent."""
        return TraceContext(self.trace_id, new_span_id(), is_sampled, self.state, self.span_id)

    def headers(self, span_id: str) -> dict[str, str]:
        """Return the headers of a request to another server, sent in the span `span_id`."""
        found = {"traceparent": f"00-{self.trace_id}-{span_id}-{_SAMPLED if self.is_sampled else 0:02x}"}
        return found | ({"tracestate": self.state} if self.state else {})


def new_span_id() -> str:
    return secrets.token_hex(8)


def new_trace_id() -> str:
    return secrets.token_hex(16)


Value = str | bool | int | float | tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Span:
    """A part of the time of a request, by the server's clock."""

    name: str
    began_ns: int
    ended_ns: int
    parent_id: str = ""
    span_id: str = field(default_factory=new_span_id)
    kind: Literal["internal", "server", "client"] = "internal"
    attributes: dict[str, Value] = field(default_factory=dict)
    has_failed: bool = False


def read_context(parents: Sequence[bytes], states: Sequence[bytes]) -> TraceContext | None:
    """Return the caller's context, or None. `parents`, `states`: all values of `traceparent` and `tracestate`."""
    if len(parents) != 1 or (found := _PARENT.fullmatch(parents[0].decode("latin-1"))) is None:
        return None
    version, trace_id, span_id = found["version"], found["trace"], found["span"]
    if version == "ff" or (version == "00" and found["rest"]) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(found["flags"], 16) & _SAMPLED), _read_state(states))


def _read_state(states: Sequence[bytes]) -> str:
    """Return the `tracestate` to pass on: empty if it is malformed."""
    if sum(map(len, states)) > 4 * MAX_STATE_CHARS:
        return ""
    text = b",".join(states).decode("latin-1")
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    if len(members) > _MAX_MEMBERS or len(keys) < len(members) or not all(map(_MEMBER.fullmatch, members)):
        return ""
    kept = ""
    for member in members:
        longer = f"{kept},{member}" if kept else member
        if len(longer) > MAX_STATE_CHARS:
            break
        kept = longer
    return kept
