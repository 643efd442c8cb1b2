"""Reads who calls and on which terms: what a request says beside its body, in its headers."""

from __future__ import annotations

import re

from starlette.types import Scope

from penstock.config import ServerConfig
from penstock.serve.errors import ApiError, invalid
from penstock.serve.http.checks import headers_of, identity_of, key_name, values_of
from penstock.serve.openai.call import Owner, Terms
from penstock.serve.openai.schemas import INT32_MAX, INT32_MIN, GenerationBody

MAX_DEADLINE_MS = 24 * 3600 * 1000
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
_RETRY_COUNT = b"x-stainless-retry-count"
"""OpenAI's and Anthropic's clients number their attempts in it."""
_TIMES = ("X-Deadline-Ms", "X-Queue-Timeout-Ms", "X-First-Token-Timeout-Ms", "X-SLO-TTFT-Ms", "X-SLO-ITL-Ms")
_PRIORITY = "X-Priority"
_URGENCY = frozenset(name.lower().encode() for name in (*_TIMES, _PRIORITY))
"""All headers that say how urgent a request is; most clients send none."""


def read_terms(
    scope: Scope, body: GenerationBody, arrival_ns: int, config: ServerConfig, *, is_priority_scheduled: bool
) -> Terms:
    """From the headers, and from those fields of the body that say the same.

    Raises 400 for what is malformed, contradicts the other or asks for what is not there.
    """
    identity = identity_of(scope)
    if body.request_id is not None:
        identity.adopt(body.request_id)
    owner = read_owner(scope, config)
    headers = headers_of(scope)
    times_ns: list[int | None] = [None] * len(_TIMES)
    priority = None
    if not _URGENCY.isdisjoint(headers):
        times_ns = [_milliseconds(scope, name) for name in _TIMES]
        priority = _integer(scope, _PRIORITY, INT32_MIN, INT32_MAX)
    deadline_ns, queue_timeout_ns, first_token_timeout_ns, slo_ttft_ns, slo_itl_ns = times_ns
    return Terms(
        request_id=identity.request_id,
        owner=owner,
        arrival_ns=arrival_ns,
        deadline_ns=_limit_ns(arrival_ns, deadline_ns, config.request_timeout_s),
        queue_deadline_ns=_limit_ns(arrival_ns, queue_timeout_ns, config.queue_timeout_s),
        first_token_deadline_ns=_limit_ns(arrival_ns, first_token_timeout_ns, config.first_token_timeout_s),
        slo_ttft_ns=slo_ttft_ns,
        slo_itl_ns=slo_itl_ns,
        is_retry=headers.get(_RETRY_COUNT, b"0") != b"0",
        priority=_priority(priority, body.priority, can_prioritise=is_priority_scheduled),
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


def _priority(from_header: int | None, from_body: int | None, *, can_prioritise: bool) -> int:
    if None not in (from_header, from_body) and from_header != from_body:
        raise invalid("'priority' and the header X-Priority differ; give one of them.", "priority")
    priority = from_header or from_body or 0
    if priority and not can_prioritise:
        subject, param = ("'priority'", "priority") if from_body else ("The header X-Priority", _PRIORITY)
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
