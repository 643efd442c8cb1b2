"""The request log: one line in the server's log for each ended request, or for a share of them.

Text from clients is quoted in printable ASCII, so that it can't begin a line or move a terminal's cursor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from penstock.obs.explain.explanation import Explanation, summary
from penstock.serve.http.entries import MAX_TOLD_CHARS, Backlog, Entry

_log = logging.getLogger(__name__)

_PAUSE_S = 0.05
_SCRAPED = frozenset({"/health", "/ready", "/metrics"})
"""Paths that monitoring asks every few seconds. A request that succeeds there is not logged."""


class RequestLog:
    def __init__(self, share: float, slow_s: float | None) -> None:
        """Start the thread, which `close` ends. Log a `share` of the requests, and those that took longer than `slow_s`."""
        self._share, self._due = share, 0.0
        self._slow_ns = None if slow_s is None else int(slow_s * 1e9)
        self._num_reported = 0
        """Dropped requests that the log has reported."""
        self._backlog = Backlog("request-log", self._write, pause_s=_PAUSE_S)

    def add(self, entry: Entry) -> None:
        """Take a request that has ended. Only for the event loop."""
        if entry.path in _SCRAPED and entry.status == 200:
            return
        self._due += self._share  # every n-th request, so that a share is exact
        is_due = self._due >= 1 - 1e-9
        self._due -= is_due
        if is_due or self._is_slow(entry):
            self._backlog.add(entry)

    def close(self) -> None:
        self._report_dropped(self._backlog.close())

    def _report_dropped(self, num_dropped: int) -> None:
        if num_new := num_dropped - self._num_reported:
            _log.warning("requests not logged because the reader of the log was too slow: %d", num_new)
            self._num_reported = num_dropped

    def _is_slow(self, entry: Entry) -> bool:
        # Lines of batches may wait for hours, and `/debug/trace` lasts as long as its caller wants.
        is_work = bool(entry.operation) and not entry.is_background
        return self._slow_ns is not None and entry.duration_ns >= self._slow_ns and is_work

    def _write(self, entries: Sequence[Entry]) -> None:
        self._report_dropped(self._backlog.num_dropped)
        for entry in entries:
            is_slow = self._is_slow(entry)
            try:
                fields = fields_of(entry, entry.explanations(), is_slow=is_slow)
                _log.log(logging.WARNING if is_slow else logging.INFO, "%s", line_of(fields), extra={"fields": fields})
            except Exception:
                _log.exception("a request could not be logged")


def fields_of(entry: Entry, told: Sequence[Explanation], *, is_slow: bool = False) -> dict[str, object]:
    """Return the known fields of a line. The times are those of the choice that took longest.

    `is_slow`: add a summary of that choice.
    """
    fields: dict[str, object] = {
        "client": entry.client,
        "key": entry.key,
        "method": entry.method,
        "path": entry.path,
        "status": entry.status,
        "bytes": entry.num_bytes,
        "duration_ms": _ms(entry.duration_ns) if entry.ended_ns else None,
        "ttft_ms": None if entry.ttft_s is None else _ms(entry.ttft_s * 1e9),
        "model": (entry.model or "")[:MAX_TOLD_CHARS],
        "route": entry.route,
        "request_id": entry.request_id,
        "trace_id": entry.trace.trace_id if entry.trace is not None and entry.trace.is_sampled else None,
        "error": entry.error,
        "client_left": entry.client_left or None,
        "slow": is_slow or None,
    }
    if entry.count_tokens is not None:
        counts = entry.count_tokens()
        fields["prompt_tokens"], fields["completion_tokens"] = counts.num_prompt, counts.num_generated
        fields["cached_tokens"] = counts.num_cached
    if told:
        longest = max(told, key=lambda choice: choice.total_ns)
        parts_ns = {"queue": longest.queue_ns, "prefill": longest.prefill_ns, "decode": longest.decode_ns}
        fields |= {f"{name}_ms": _ms(part_ns) for name, part_ns in parts_ns.items()}
        fields["held_ms"] = _ms(entry.held_ns) or None
        fields["waited_for_ms"] = {name: _ms(part_ns) for name, part_ns in longest.waited_for_ns.items()}
        fields["preemptions"] = sum([len(choice.pauses) for choice in told])
        fields["summary"] = summary(longest, entry.held_ns) if is_slow else None
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def line_of(fields: dict[str, object]) -> str:
    """Return the fields as a line of `name=value`, with texts in quotes."""
    return "request " + " ".join([f"{name}={_shown(value)}" for name, value in fields.items()])


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ",".join([f"{name}:{part}" for name, part in value.items()])
    return json.dumps(value).replace("\x7f", "\\u007f")  # `json` leaves this control character, DEL


def _ms(num_ns: float) -> float:
    return round(num_ns / 1e6, 3)
