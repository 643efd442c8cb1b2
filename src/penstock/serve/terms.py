"""Reads a request's owner, priority and limits from its headers and key, and hashes that recognise a repeated request."""

from __future__ import annotations

import hashlib
import re

from starlette.types import Scope

from penstock.calls.call import Terms
from penstock.config import ServerConfig
from penstock.config.keys import NAME, NAME_RULE
from penstock.deploy.off_loop import lane_of
from penstock.serve.bodies import INT32_MAX, INT32_MIN
from penstock.serve.course import course_of
from penstock.serve.errors import ApiError, invalid
from penstock.serve.http.checks import headers_of, identity_of, key_name, key_of, trusts_tenant, values_of
from penstock.types.request import Owner

_CLAIM_BYTES = 16
_HASHED_BYTES = 1 << 16
"""Only the end of a body is hashed: long conversations with the same beginning differ there."""

MAX_DEADLINE_MS = 24 * 3600 * 1000
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_RETRY_COUNT = b"x-stainless-retry-count"
"""Header in which OpenAI's and Anthropic's clients number their attempts."""
IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header with which a client sends a request again. OpenAI's sends it as one of `extra_headers`."""
_TIMES = ("X-Deadline-Ms", "X-Queue-Timeout-Ms", "X-First-Token-Timeout-Ms", "X-SLO-TTFT-Ms", "X-SLO-ITL-Ms")
_PRIORITY = "X-Priority"
_URGENCY = frozenset(name.lower().encode() for name in (*_TIMES, _PRIORITY))
"""Headers about urgency, in lowercase. Most clients send none."""


def read_terms(
    scope: Scope,
    now_ns: int,
    config: ServerConfig,
    *,
    is_priority_scheduled: bool,
    priority: int | None = None,
    cache_salt: str = "",
    conversation: str = "",
) -> Terms:
    """Return a request's terms, such as deadline and priority. The request arrives now, unless it has waited already.

    They come from its headers, its key, the server's limits of time, and three fields of its body: `priority`, `cache_salt`
    and `conversation`. Raises 400 for malformed, contradicting or unsupported values.
    """
    course = course_of(scope)
    arrival_ns = now_ns if course.arrival_ns is None else course.arrival_ns
    queued_ns = arrival_ns if course.chosen_ns is None else course.chosen_ns
    owner = read_owner(scope)
    headers, key = headers_of(scope), key_of(scope)
    times_ns: list[int | None] = [None] * len(_TIMES)
    priority_of_header = None
    if not _URGENCY.isdisjoint(headers):
        times_ns = [_milliseconds(scope, name) for name in _TIMES]
        priority_of_header = _integer(scope, _PRIORITY, INT32_MIN, INT32_MAX)
    deadline_ns, queue_timeout_ns, first_token_timeout_ns, slo_ttft_ns, slo_itl_ns = times_ns
    if deadline_ns is not None:
        deadline_ns -= course.age_ns  # the other limits are for waits, which begin anew
    limits_s = (config.request_timeout_s, config.queue_timeout_s, config.first_token_timeout_s)
    # A line of a batch has its window.
    request_s, queue_s, first_token_s = (None, None, None) if course.is_background else limits_s
    return Terms(
        request_id=identity_of(scope).request_id,
        owner=owner,
        arrival_ns=arrival_ns,
        queued_ns=queued_ns,
        deadline_ns=_limit_ns(arrival_ns, deadline_ns, request_s),
        # Each model that a route asks has the whole time, as each judge of an answer has.
        queue_deadline_ns=_limit_ns(queued_ns, queue_timeout_ns, queue_s),
        first_token_deadline_ns=_limit_ns(arrival_ns, first_token_timeout_ns, first_token_s),
        slo_ttft_ns=slo_ttft_ns,
        slo_itl_ns=slo_itl_ns,
        is_retry=headers.get(_RETRY_COUNT, b"0") != b"0",
        returns=course.routed is None or not course.routed.rest,
        priority=_priority(
            priority_of_header, priority, None if key is None else key.priority, can_prioritise=is_priority_scheduled
        ),
        background=course.is_background,
        limits=None if key is None or course.is_background else key.limits,
        cache_salt=cache_salt.encode(),
        conversation=_conversation_of(owner, conversation),
        waits=course.waits,
    )


def _conversation_of(owner: Owner, name: str) -> bytes:
    """Return a hash of the conversation's name that differs between tenants. Empty without a name."""
    if not name:
        return b""
    salt = hashlib.blake2b(owner.tenant.encode()).digest()
    return hashlib.blake2b(name.encode(), digest_size=16, key=salt).digest()


def read_owner(scope: Scope) -> Owner:
    """Return the request's key and tenant. Raises 400.

    The header X-Tenant counts if the server has no keys, or trusts the header and the key has no limits of its own. Otherwise
    the key is the tenant: a client could escape the key's limits by naming a new tenant with each call.
    """
    key, api_key = key_name(scope), key_of(scope)
    has_limits = api_key is not None and api_key.limits is not None
    if key and (has_limits or not trusts_tenant(scope)):
        return Owner(key=key, tenant=key)
    tenant = _value(scope, "X-Tenant")
    if tenant is not None and not NAME.fullmatch(tenant):
        raise _bad_header("X-Tenant", f"must be {NAME_RULE}")
    return Owner(key=key, tenant=key if tenant is None else tenant)


def urgency_of(scope: Scope) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers about urgency."""
    return tuple([(name, value) for name, value in scope["headers"] if name in _URGENCY])


def is_local_only(scope: Scope) -> bool:
    """Return whether the request, or the batch that it belongs to, was sent with `X-Local-Only` and must stay here."""
    wishes = values_of(scope, b"x-local-only")
    return course_of(scope).is_local_only or any(wish.lower() not in (b"", b"0", b"false") for wish in wishes)


def read_lane(scope: Scope) -> Owner:
    """Return the owner under whose tenant the request's work takes turns off the event loop. Raises 400."""
    return lane_of(read_owner(scope), is_background=course_of(scope).is_background)


def _priority(from_header: int | None, from_body: int | None, least: int | None, *, can_prioritise: bool) -> int:
    """Return the request's priority: at least `least`, the key's priority, which is also the default."""
    if None not in (from_header, from_body) and from_header != from_body:
        raise invalid("'priority' and the header X-Priority differ; give one of them.", "priority")
    priority = from_header or from_body or 0
    if priority and not can_prioritise:
        subject, param = ("'priority'", "priority") if from_body else ("The header X-Priority", _PRIORITY)
        raise invalid(
            f"{subject} is {priority}, but the server ignores priorities unless it is started with "
            "`penstock serve --policy priority`.",
            param,
        )
    if least is None or not can_prioritise:
        return priority
    return least if from_header is None and from_body is None else max(least, priority)


def _limit_ns(since_ns: int, asked_ns: int | None, server_s: float | None) -> int | None:
    """Return when the client's or the server's time limit ends, whichever is earlier, or None without a limit."""
    limits_ns = [] if asked_ns is None else [asked_ns]
    if server_s is not None:
        limits_ns.append(int(server_s * 1e9))
    return since_ns + min(limits_ns) if limits_ns else None


def _milliseconds(scope: Scope, name: str) -> int | None:
    """Return a header's milliseconds as nanoseconds, or None without the header."""
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
    """Return a header's value or None. Raises 400 if it was sent twice, because either may come from a proxy."""
    values = values_of(scope, name.lower().encode())
    if len(values) > 1:
        raise _bad_header(name, "was sent more than once")
    return values[0].decode("latin-1") if values else None


def _bad_header(name: str, rule: str) -> ApiError:
    return invalid(f"The header {name} {rule}.", name)


# Names of a request that is sent again


def claim_of(tenant: str, data: bytes) -> bytes:
    """Return a hash of tenant and body. Admission uses it to recognise a retry, because clients repeat the body exactly."""
    length = len(data).to_bytes(8, "little")
    return hashlib.blake2b(tenant.encode() + b"\0" + length + data[-_HASHED_BYTES:], digest_size=_CLAIM_BYTES).digest()


def repeated_name(scope: Scope, data: bytes) -> str | None:
    """Return a name that is the same when the owner sends this body again with the same `Idempotency-Key`, or None without."""
    given, owner = _value(scope, IDEMPOTENCY_KEY), read_owner(scope)
    if not given:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in (owner.key.encode(), owner.tenant.encode(), given.encode("latin-1"), data):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
