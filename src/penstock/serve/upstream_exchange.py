"""One request to a model of another server: how it ends, and the error that its client gets if it fails."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from penstock.calls.call import Terms
from penstock.calls.in_flight import Charge
from penstock.clock import Clock
from penstock.config.upstreams import UpstreamConfig
from penstock.obs.trace_context import Span
from penstock.serve.breaker import Turn
from penstock.serve.errors import ApiError, overloaded, past_deadline, shorten, unavailable
from penstock.serve.events import Garbage, as_object

_log = logging.getLogger(__name__)

MAX_TOLD_CHARS = 500
MAX_RETRY_AFTER_S = 3600.0
_OF_CLIENT = (400, 403, 413, 422)
"""Statuses that tell what is wrong with the request."""
_SILENT = "silent"
_LIKE_A_KEY = re.compile(r"\b(?:sk|pk|key|Bearer)[-_ ][\w*.-]{4,}")


@dataclass(frozen=True, slots=True)
class Forwarded:
    content: bytes
    """The body, with the model's name there."""
    is_streamed: bool
    num_prompt_tokens: int
    """Estimated tokens of the prompt."""
    num_new_tokens: int
    """Estimated tokens of the answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Trace headers to send to the upstream."""


@dataclass(slots=True, eq=False)
class Exchange:
    """A request to an upstream, and how it ends."""

    config: UpstreamConfig
    clock: Clock
    forwarded: Forwarded
    terms: Terms
    turn: Turn
    span: Span
    result: str = "left"
    """The outcome, a key of `Upstream.results`. It stays "left" if the client leaves before any other outcome."""
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    """Tokens of prompt and answer that are charged to the request's key. Estimates until the upstream reports its usage."""
    usage: dict[str, int] = field(default_factory=dict)
    """Tokens of prompt and completion, as the upstream counts them."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_new_tokens

    @property
    def silence_s(self) -> float:
        """How long the upstream may be silent."""
        return self.config.max_silence_s if self.forwarded.is_streamed else self.config.max_answer_s

    def left_s(self, *, has_begun: bool) -> float | None:
        """Return the time until the deadline of the whole answer or, before a stream has begun, of its first token."""
        limits_ns = [self.terms.deadline_ns]
        if self.forwarded.is_streamed and not has_begun:
            limits_ns.append(self.terms.first_token_deadline_ns)
        known = [at_ns for at_ns in limits_ns if at_ns is not None]
        return (min(known) - self.clock.now_ns()) / 1e9 if known else None

    def pay(self, charge: Charge) -> None:
        if self.num_tokens:
            charge(self.num_prompt_tokens, self.num_new_tokens, failed=self.result in ("failed", "late"))

    async def trace(self, event: str, _: object) -> None:
        """Charge estimates once the request is sent: the upstream works on it even if nobody waits for the answer."""
        if event == "http11.send_request_headers.started":
            self.num_prompt_tokens = self.forwarded.num_prompt_tokens
            self.num_new_tokens = 0 if self.forwarded.is_streamed else self.forwarded.num_new_tokens

    def look(self, event: dict[str, Any]) -> None:
        """Count an event of a stream. Raises Garbage if it is an error."""
        if "error" in event and "choices" not in event:
            raise Garbage(f"it ended the answer with an error{self._error_text(event)}".removesuffix("."))
        self.num_new_tokens += 1

    def succeeded(self, value: dict[str, Any]) -> None:
        """Count an answer that has ended well. `value`: the answer, or the event of a stream that has its usage."""
        self.turn.succeed()
        self.result = "ok"
        usage = value.get("usage")
        if isinstance(usage, dict):
            told = {kind: usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")}
            self.usage = {kind: number for kind, number in told.items() if isinstance(number, int) and 0 <= number < 2**53}
            names = {"prompt": "gen_ai.usage.input_tokens", "completion": "gen_ai.usage.output_tokens"}
            self.span.attributes |= {names[kind]: number for kind, number in self.usage.items()}
            if any(self.usage.values()):
                self.num_prompt_tokens, self.num_new_tokens = self.usage.get("prompt", 0), self.usage.get("completion", 0)

    def was_late(self, message: str) -> ApiError:
        """Count a deadline that has passed, and return what to tell the client."""
        self.result = "late"
        return past_deadline(message)

    def failed(self, error: Exception) -> ApiError:
        """Count a failure, and return what to tell the client."""
        self.turn.fail()
        self.result = "failed"
        if not (self.forwarded.is_streamed and self.num_new_tokens):
            self.num_prompt_tokens = self.num_new_tokens = 0
        name, why = self.config.name, _why(error)
        _log.warning("the upstream %s failed: %s", name, why)
        if why == _SILENT:
            what = "was silent" if self.forwarded.is_streamed else "gave no whole answer"
            message = f"{name} {what} for {self.silence_s:g} s."
            return ApiError(504, message, code="upstream_timeout", error_type="server_error")
        return _bad_gateway(f"{name} failed: {why}.")

    def refused(self, response: httpx2.Response, data: bytes) -> ApiError:
        """Count an answer with another status than 200, and return what to tell the client."""
        name, status, detail = self.config.name, response.status_code, "."
        self.num_prompt_tokens = self.num_new_tokens = 0
        with contextlib.suppress(Garbage):
            detail = self._error_text(as_object(data))
        if status in _OF_CLIENT:
            self.turn.succeed()
            self.result = "invalid"
            return ApiError(status, f"{name} refuses the request{detail}", code="invalid_request_error")
        if status == 429:
            self.turn.succeed()
            self.result = "busy"
            return overloaded(f"{name} is busy.", _retry_after_s(response))
        self.turn.fail()
        self.result = "failed"
        if status == 401:
            _log.error("the upstream %s refuses its key", name)
            return _bad_gateway(f"{name} refuses this server's key.")
        _log.warning("the upstream %s answered with status %d%s", name, status, detail)
        if status == 503:
            return unavailable(f"{name} is unavailable.", _retry_after_s(response))
        return _bad_gateway(f"{name} answered with status {status}{detail}")

    def _error_text(self, value: dict[str, Any]) -> str:
        """Return what an error says, without what might be a key."""
        error = value.get("error", value)
        message = error.get("message") if isinstance(error, dict) else error
        if not isinstance(message, str):
            return "."
        if self.config.key:
            message = message.replace(self.config.key, "***")
        return f": {shorten(_LIKE_A_KEY.sub('***', message)[:MAX_TOLD_CHARS])}"


def _why(error: Exception) -> str:
    """Return why an exchange failed, without addresses."""
    if isinstance(error, Garbage):
        return str(error)
    if isinstance(error, httpx2.ConnectTimeout):
        return "it can't be reached"
    if isinstance(error, (TimeoutError, httpx2.ReadTimeout, httpx2.WriteTimeout, httpx2.PoolTimeout)):
        return _SILENT
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return "its certificate is not trusted" if isinstance(cause, ssl.SSLCertVerificationError) else "TLS failed"
        cause = cause.__cause__ or cause.__context__
    return "it can't be reached" if isinstance(error, httpx2.ConnectError) else "the connection broke"


def _retry_after_s(response: httpx2.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if math.isfinite(seconds) and seconds >= 0 else None


def _bad_gateway(message: str) -> ApiError:
    return ApiError(502, message, code="upstream_failed", error_type="server_error")
