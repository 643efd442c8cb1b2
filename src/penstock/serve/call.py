"""Who calls and on which terms: what one request says beside its prompt, checked. Made by the endpoints from the headers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.engine.ports import OutputChunk
from penstock.obs.timings import RequestTimings
from penstock.serve.auth import key_name
from penstock.serve.openai.errors import ApiError, deadline_exceeded, from_finish, invalid
from penstock.serve.openai.schemas import INT32_MAX, INT32_MIN, GenerationBody
from penstock.serve.request_id import identity_of
from penstock.serve.runtime import Runtime
from penstock.types.errors import RejectReason

MAX_DEADLINE_MS = 24 * 3600 * 1000
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
_NOT_YET = ("X-SLO-TTFT-Ms", "X-SLO-ITL-Ms")


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
    priority: int
    cache_salt: bytes

    def error_of(self, chunk: OutputChunk) -> ApiError | None:
        """The error that a finish chunk of this call tells about; None if the request ended by itself, or has not ended."""
        if self.deadline_ns is None or chunk.reject_reason != RejectReason.DEADLINE.value:
            return from_finish(chunk, self.request_id)
        timings = RequestTimings(
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=chunk.first_scheduled_ns,
            first_token_ns=chunk.first_token_ns,
            ended_ns=chunk.at_ns,
        )
        allowed_ms = (self.deadline_ns - self.arrival_ns) / 1e6
        return deadline_exceeded(
            allowed_ms, timings.queue_ms, timings.prefill_ms + timings.decode_ms, chunk.num_generated_tokens
        )


def read_terms(scope: Scope, body: GenerationBody, runtime: Runtime, request_timeout_s: float | None) -> CallTerms:
    """From the headers, and from those fields of the body that say the same.

    Raises 400 for what is malformed, contradicts the other or asks for what is not there.
    """
    headers = Headers(scope=scope)
    _refuse_unsupported(headers)
    arrival_ns = runtime.clock.now_ns()
    identity = identity_of(scope)
    if body.request_id is not None:
        identity.adopt(body.request_id)
    return CallTerms(
        request_id=identity.request_id,
        owner=read_owner(scope),
        arrival_ns=arrival_ns,
        deadline_ns=_deadline_ns(headers, arrival_ns, request_timeout_s),
        priority=_priority(headers, body.priority, can_prioritise=runtime.model.is_priority_scheduled),
        cache_salt=(body.cache_salt or "").encode(),
    )


def read_owner(scope: Scope) -> Owner:
    """The key names the tenant, unless the header does."""
    tenant = Headers(scope=scope).get("X-Tenant")
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise _bad_header("X-Tenant", "must be 1 to 64 letters, digits or any of . _ : @ / -")
    key = key_name(scope)
    return Owner(key=key, tenant=key if tenant is None else tenant)


def _priority(headers: Headers, from_body: int | None, *, can_prioritise: bool) -> int:
    from_header = _integer(headers, "X-Priority", INT32_MIN, INT32_MAX)
    if None not in (from_header, from_body) and from_header != from_body:
        raise invalid("'priority' and the header X-Priority differ; give one of them.", "priority")
    priority = from_header or from_body or 0
    if priority and not can_prioritise:
        raise invalid(f"'priority' is {priority}, but the server's waiting order does not look at priorities.", "priority")
    return priority


def _deadline_ns(headers: Headers, arrival_ns: int, request_timeout_s: float | None) -> int | None:
    asked_ms = _integer(headers, "X-Deadline-Ms", 1, MAX_DEADLINE_MS)
    limits_ns = [] if asked_ms is None else [asked_ms * 1_000_000]
    if request_timeout_s is not None:
        limits_ns.append(int(request_timeout_s * 1e9))
    return arrival_ns + min(limits_ns) if limits_ns else None


def _integer(headers: Headers, name: str, low: int, high: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise _bad_header(name, f"must be an integer from {low} to {high}")
    return int(text)


def _refuse_unsupported(headers: Headers) -> None:
    for name in _NOT_YET:
        if name in headers:
            raise invalid(f"The header {name} is not supported yet.", name)


def _bad_header(name: str, rule: str) -> ApiError:
    return invalid(f"The header {name} {rule}.", name)
