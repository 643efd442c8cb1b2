"""The request log: a line of the server's log for each request, or a share of them, at its end.

A slow reader of the log does not delay answers (`Backlog`). Text from clients is quoted in printable ASCII, so that it can't
begin a line or move a terminal's cursor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from penstock.obs.explain.explanation import Explanation, summary
from penstock.serve.http.entries import MAX_TOLD_CHARS, Backlog, Entry

_log = logging.getLogger(__name__)

_PAUSE_S = 0.05
_CLOSE_TIMEOUT_S = 2.0


class RequestLog:
    def __init__(self, share: float, slow_s: float | None) -> None:
        """Start the thread, which `close` ends. Log a `share` of the requests, and those that took longer than `slow_s`."""
        self._share, self._due = share, 0.0
        self._slow_ns = None if slow_s is None else int(slow_s * 1e9)
        self._backlog = Backlog("request-log", self._write, pause_s=_PAUSE_S)

    def add(self, entry: Entry) -> None:
        """Take a request that has ended. Returns at once. Only for the event loop."""
        self._due += self._share  # every n-th request, so that a share is exact
        is_due = self._due >= 1 - 1e-9
        self._due -= is_due
        if is_due or self._is_slow(entry):
            self._backlog.add(entry)

    def close(self) -> None:
        """Write the queued lines, for at most `_CLOSE_TIMEOUT_S`."""
        if num_lost := self._backlog.close(_CLOSE_TIMEOUT_S):
            _log.warning("requests that were not logged, as the log's reader was too slow: %d", num_lost)

    def _is_slow(self, entry: Entry) -> bool:
        # Lines of batches wait as long as it takes.
        return self._slow_ns is not None and entry.duration_ns >= self._slow_ns and not entry.is_background

    def _write(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            is_slow = self._is_slow(entry)
            try:
                fields = fields_of(entry, entry.explain(), is_slow=is_slow)
                _log.log(logging.WARNING if is_slow else logging.INFO, "%s", line_of(fields), extra={"fields": fields})
            except Exception:
                _log.exception("a request could not be logged")


def fields_of(entry: Entry, told: Sequence[Explanation], *, is_slow: bool = False) -> dict[str, object]:
    """Return what a line says, always under the same names. Unknown values are None.

    The times are those of the choice that took longest. `is_slow`: with a summary of it.
    """
    num_prompt_tokens, num_generated_tokens = (None, None) if entry.count_tokens is None else entry.count_tokens()
    longest = max(told, key=lambda choice: choice.total_ns, default=None)
    return {
        "client": entry.client or None,
        "key": entry.key or None,
        "method": entry.method or None,
        "path": entry.path or None,
        "status": entry.status,
        "bytes": entry.num_bytes,
        "duration_ms": _ms(entry.duration_ns) if entry.ended_ns else None,
        "ttft_ms": None if entry.ttft_s is None else _ms(entry.ttft_s * 1e9),
        "queue_ms": None if longest is None else _ms(longest.queue_ns),
        "prefill_ms": None if longest is None else _ms(longest.prefill_ns),
        "decode_ms": None if longest is None else _ms(longest.decode_ns),
        "waited_for_ms": None if longest is None else {name: _ms(ns) for name, ns in longest.waited_for_ns.items()},
        "preemptions": None if longest is None else sum([len(choice.pauses) for choice in told]),
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": None if longest is None else longest.num_hit_tokens,
        "completion_tokens": num_generated_tokens,
        "model": None if entry.model is None else entry.model[:MAX_TOLD_CHARS],
        "request_id": entry.request_id or None,
        "trace_id": entry.trace.trace_id if entry.trace is not None and entry.trace.is_sampled else None,
        "client_left": entry.client_left,
        "slow": is_slow,
        "summary": summary(longest) if is_slow and longest is not None else None,
    }


def line_of(fields: dict[str, object]) -> str:
    """Return the fields as a line, for tools that split at spaces outside of quotes, too. Unknown ones are left out."""
    head = [
        str(fields["client"] or "-"),
        str(fields["key"] or "-"),
        _quoted(f"{fields['method'] or ''} {fields['path'] or ''}"),
    ]
    named = [*fields.items()][5:]
    words = [f"{name}={_shown(value)}" for name, value in named if value is not None and value is not False]
    return " ".join([*head, str(fields["status"] or "-"), *words])


def _quoted(value: object) -> str:
    """Return the value as JSON in printable ASCII. Python's `json` would leave the control character DEL."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def _shown(value: object) -> str:
    match value:
        case str():
            return _quoted(value)
        case dict():
            return ",".join(f"{_quoted(name) if ' ' in name else name}:{part}" for name, part in value.items()) or "-"
        case True:
            return "yes"
    return str(value)


def _ms(num_ns: float) -> float:
    return round(num_ns / 1e6, 3)
