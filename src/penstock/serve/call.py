"""Who calls and on which terms: what one request says beside its prompt, checked. Made by the endpoints from the headers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.types import Scope

from penstock.config import ServerConfig
from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.obs.timings import RequestTimings
from penstock.serve.http.checks import headers_of, identity_of, key_name, values_of
from penstock.serve.openai.errors import ApiError, deadline_exceeded, from_finish, invalid
from penstock.serve.openai.schemas import INT32_MAX, INT32_MIN, GenerationBody
from penstock.types.errors import RejectReason

MAX_DEADLINE_MS = 24 * 3600 * 1000
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
_RETRY_COUNT = b"x-stainless-retry-count"
"""OpenAI's and Anthropic's clients number their attempts in it."""
_HEADERS = frozenset(
    {
        b"x-deadline-ms",
        b"x-queue-timeout-ms",
        b"x-first-token-timeout-ms",
        b"x-slo-ttft-ms",
        b"x-slo-itl-ms",
        b"x-priority",
    }
)
"""All that say how urgent a request is; most clients send none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who may cancel a request: the same key, and the same tenant."""

    key: str
    """Short name of the API key; empty if none was asked for."""
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """Id, owner and urgency of one HTTP request."""

    request_id: str
    owner: Owner
    arrival_ns: int
    deadline_ns: int | None
    queue_deadline_ns: int | None
    first_token_deadline_ns: int | None
    slo_ttft_ns: int | None
    """As the client says; None: the server's."""
    slo_itl_ns: int | None
    is_retry: bool
    """The client says that it sends this again."""
    priority: int
    cache_salt: bytes

    def error_of(self, chunk: OutputChunk) -> ApiError | None:
        """The error that a finish chunk of this call tells about; None if the request ended by itself, or has not ended."""
        reason = RejectReason(chunk.reject_reason) if chunk.reject_reason else None
        limit_ns = None if reason is None else self._limit_ns(reason)
        if reason is None or limit_ns is None:
            return from_finish(chunk, self.request_id)
        timings = RequestTimings(
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=chunk.first_scheduled_ns,
            first_token_ns=chunk.first_token_ns,
            ended_ns=chunk.at_ns,
        )
        allowed_ms = (limit_ns - self.arrival_ns) / 1e6
        run_ms = timings.prefill_ms + timings.decode_ms
        return deadline_exceeded(reason, allowed_ms, timings.queue_ms, run_ms, chunk.num_generated_tokens)

    def _limit_ns(self, reason: RejectReason) -> int | None:
        match reason:
            case RejectReason.DEADLINE:
                return self.deadline_ns
            case RejectReason.QUEUE_TIMEOUT:
                return self.queue_deadline_ns
            case RejectReason.FIRST_TOKEN_TIMEOUT:
                return self.first_token_deadline_ns
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the headers say: times from arrival, or None where they say nothing."""

    deadline_ns: int | None = None
    queue_timeout_ns: int | None = None
    first_token_timeout_ns: int | None = None
    slo_ttft_ns: int | None = None
    slo_itl_ns: int | None = None
    priority: int | None = None


_ASKED_NOTHING = _Asked()


def read_terms(scope: Scope, body: GenerationBody, runtime: RunningModel, config: ServerConfig) -> CallTerms:
    """From the headers, and from those fields of the body that say the same.

    Raises 400 for what is malformed, contradicts the other or asks for what is not there.
    """
    arrival_ns = runtime.clock.now_ns()
    identity = identity_of(scope)
    if body.request_id is not None:
        identity.adopt(body.request_id)
    owner = read_owner(scope, config)
    headers = headers_of(scope)
    asked = _ASKED_NOTHING if _HEADERS.isdisjoint(headers) else _read_headers(scope)
    return CallTerms(
        request_id=identity.request_id,
        owner=owner,
        arrival_ns=arrival_ns,
        deadline_ns=_limit_ns(arrival_ns, asked.deadline_ns, config.request_timeout_s),
        queue_deadline_ns=_limit_ns(arrival_ns, asked.queue_timeout_ns, config.queue_timeout_s),
        first_token_deadline_ns=_limit_ns(arrival_ns, asked.first_token_timeout_ns, config.first_token_timeout_s),
        slo_ttft_ns=asked.slo_ttft_ns,
        slo_itl_ns=asked.slo_itl_ns,
        is_retry=headers.get(_RETRY_COUNT, b"0") != b"0",
        priority=_priority(asked.priority, body.priority, can_prioritise=runtime.model.is_priority_scheduled),
        cache_salt=(body.cache_salt or "").encode(),
    )


def read_owner(scope: Scope, config: ServerConfig) -> Owner:
    """The header names the tenant if there are no keys or it is trusted, else the key does. Raises 400 if it is malformed."""
    tenant = _value(scope, "X-Tenant")
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise _bad_header("X-Tenant", "must be 1 to 64 letters, digits or any of . _ : @ / -")
    key = key_name(scope)
    if tenant is None or (key and not config.trust_tenant_header):
        tenant = key  # else a client would escape its key's limits by naming a new tenant with each call
    return Owner(key=key, tenant=tenant)


def _read_headers(scope: Scope) -> _Asked:
    return _Asked(
        deadline_ns=_milliseconds(scope, "X-Deadline-Ms"),
        queue_timeout_ns=_milliseconds(scope, "X-Queue-Timeout-Ms"),
        first_token_timeout_ns=_milliseconds(scope, "X-First-Token-Timeout-Ms"),
        slo_ttft_ns=_milliseconds(scope, "X-SLO-TTFT-Ms"),
        slo_itl_ns=_milliseconds(scope, "X-SLO-ITL-Ms"),
        priority=_integer(scope, "X-Priority", INT32_MIN, INT32_MAX),
    )


def _priority(from_header: int | None, from_body: int | None, *, can_prioritise: bool) -> int:
    if None not in (from_header, from_body) and from_header != from_body:
        raise invalid("'priority' and the header X-Priority differ; give one of them.", "priority")
    priority = from_header or from_body or 0
    if priority and not can_prioritise:
        subject, param = ("'priority'", "priority") if from_body else ("The header X-Priority", "X-Priority")
        raise invalid(
            f"{subject} is {priority}, but the server's waiting order does not look at priorities: that needs "
            "`penstock serve --policy priority`.",
            param,
        )
    return priority


def _limit_ns(arrival_ns: int, asked_ns: int | None, server_s: float | None) -> int | None:
    """The instant that the client's limit and the server's name, whichever comes first."""
    limits_ns = [] if asked_ns is None else [asked_ns]
    if server_s is not None:
        limits_ns.append(int(server_s * 1e9))
    return arrival_ns + min(limits_ns) if limits_ns else None


def _milliseconds(scope: Scope, name: str) -> int | None:
    """In nanoseconds."""
    value_ms = _integer(scope, name, 1, MAX_DEADLINE_MS)
    return None if value_ms is None else value_ms * 1_000_000


def _integer(scope: Scope, name: str, low: int, high: int) -> int | None:
    text = _value(scope, name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise _bad_header(name, f"must be an integer from {low} to {high}")
    return int(text)


def _value(scope: Scope, name: str) -> str | None:
    """None if it was not sent. Twice is a 400: which of them a proxy has set, nobody can tell."""
    values = values_of(scope, name.lower().encode())
    if len(values) > 1:
        raise _bad_header(name, "was sent more than once")
    return values[0].decode("latin-1") if values else None


def _bad_header(name: str, rule: str) -> ApiError:
    return invalid(f"The header {name} {rule}.", name)
