"""The way of every API from a request to an answer, and the facts of a request outside its body: model, owner and terms.

`Reader` makes calls of neutral requests, and `CallEndpoint` answers them. All functions may run on any thread and wait for
nothing, except `look_up`, which reads the disk.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.admission.checks import TenantLimits
from penstock.calls.call import Call, ChatRequest, CompletionRequest, Owner, Terms
from penstock.calls.check import make_call
from penstock.calls.in_flight import InFlight
from penstock.calls.run import run
from penstock.config import ServerConfig
from penstock.config.keys import NAME, NAME_RULE, ApiKey
from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import OffLoop
from penstock.deploy.running import RunningModel
from penstock.deploy.served import ServedModel
from penstock.serve.bodies import INLINE_MAX_BYTES, INT32_MAX, INT32_MIN, Body, IgnoredParameters, check_body, load_json
from penstock.serve.errors import MODEL_NOT_FOUND, ApiError, invalid, model_not_found, unavailable
from penstock.serve.http.checks import JsonEndpoint, entry_of, headers_of, identity_of, key_name, key_of, values_of
from penstock.serve.http.exchange import unless_gone
from penstock.serve.streams import NewWriter, respond
from penstock.types.adapter import AdapterRef
from penstock.types.errors import ConfigError, NameUnknown

_log = logging.getLogger(__name__)

_CLAIM_BYTES = 16
_HASHED_BYTES = 1 << 16
"""The end of a body is hashed: two long conversations that begin alike differ there."""

MAX_DEADLINE_MS = 24 * 3600 * 1000
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_NO_LIMITS = TenantLimits()
_RETRY_COUNT = b"x-stainless-retry-count"
"""OpenAI's and Anthropic's clients number their attempts in it."""
ARRIVAL_KEY = "penstock.arrival_ns"
"""Key of a request's scope: when it came, if it was read before."""
LOADED_KEY = "penstock.loaded_ns"
"""Key of a request's scope: when its model was loaded, if it waited for that."""
LOOKED_UP_KEY = "penstock.looked_up"
"""Key of a request's scope: a `LookedUp`, if the disk was asked for its adapter."""
LookedUp = tuple[str, tuple[ServedModel, AdapterRef] | None]
"""A name, and what `look_up` said."""
_TIMES = ("X-Deadline-Ms", "X-Queue-Timeout-Ms", "X-First-Token-Timeout-Ms", "X-SLO-TTFT-Ms", "X-SLO-ITL-Ms")
_PRIORITY = "X-Priority"
_URGENCY = frozenset(name.lower().encode() for name in (*_TIMES, _PRIORITY))
"""All headers that say how urgent a request is; most clients send none."""


def find_model(name: str | None, deployment: Deployment, scope: Scope | None = None) -> RunningModel:
    """The model that a request names; without a name the default one. Raises 404, and `ModelAway` if it is not loaded.

    `scope`: of a request that asks the model something, whose key has to open it.
    """
    if scope is not None:
        return find_allowed(name, deployment, scope)[0].answerer()
    return find_served(name, deployment).answerer()


def find_served(name: str | None, deployment: Deployment) -> ServedModel:
    """The same, loaded or not. Raises 404. It asks no disk: an adapter that no request named yet is not found."""
    served = deployment.find(name) or deployment.adapters_of(name or "")
    if served is None:
        raise _not_found(name, deployment)
    return served


def may_ask(scope: Scope, served: ServedModel, name: str | None, deployment: Deployment) -> bool:
    """Whether the request's key opens this model, or this adapter of it, by `name`."""
    key = key_of(scope)
    if key is None or key.models is None:
        return True
    return name in key.models or any(deployment.find(one) is served for one in key.models)


def find_allowed(name: str | None, deployment: Deployment, scope: Scope) -> tuple[ServedModel, AdapterRef | None]:
    """As `find_asked`, among the models that the request's key opens: another one is a 404 like one that is not there."""
    key = key_of(scope)
    if key is None or key.models is None:
        return find_asked(name, deployment, scope)
    try:
        served, adapter = find_asked(name, deployment, scope)
    except ApiError as error:
        if error.code != MODEL_NOT_FOUND:
            raise
    else:
        if may_ask(scope, served, name, deployment):
            return served, adapter
    known = [(one, deployment.find(one)) for one in deployment.names]
    names = [one for one, served in known if served is None or may_ask(scope, served, one, deployment)]
    raise model_not_found(deployment.default.name if name is None else name, names)


def find_answering(
    name: str | None, deployment: Deployment, scope: Scope, config: ServerConfig, user: str = ""
) -> tuple[ServedModel, AdapterRef | None]:
    """As `find_allowed`, for a request that will be answered: a name may be split among models.

    A `user` is drawn within its tenant, and a request without a user by its id, so all who ask for one request get the same.
    """
    served, adapter = find_allowed(name, deployment, scope)
    if not deployment.splits or adapter is not None:
        return served, adapter
    tenant = read_owner(scope, config).tenant
    return deployment.part_of(name, tenant, f"{tenant}\0{user}" if user else identity_of(scope).request_id) or served, None


def find_asked(name: str | None, deployment: Deployment, scope: Scope) -> tuple[ServedModel, AdapterRef | None]:
    """The model that a request names, loaded or not, and its adapter if the name is one's.

    Models go first, then adapters that are known, then what the disk told for this request. Raises 404, and `NameUnknown` if
    the disk was not asked yet.
    """
    served = deployment.find(name)
    if served is not None:
        return served, None
    owners = [(one, one.adapters) for one in deployment.served if one.adapters is not None] if name else []
    for served, adapters in owners:
        if (adapter := adapters.known(name or "")) is not None:
            return served, adapter
    looked_up: LookedUp | None = scope.get(LOOKED_UP_KEY)
    if looked_up is not None and looked_up[0] == name:
        if looked_up[1] is not None:
            return looked_up[1]
    elif any(adapters.may_find(name or "") for _, adapters in owners):
        raise NameUnknown(name or "")
    raise _not_found(name, deployment, is_no_adapter=looked_up is not None and looked_up[0] == name)


def look_up(name: str, deployment: Deployment) -> tuple[ServedModel, AdapterRef] | None:
    """The adapter of a name in the folders of adapters, and its model; None: there is none. It opens no file, and waits for
    the disk. Raises 503 if that fails, or if no name can be added.
    """
    owner = deployment.adapters_of(name)
    for served in deployment.served if owner is None else (owner,):
        try:
            adapter = None if served.adapters is None else served.adapters.find(name)
        except ConfigError as error:  # too many names
            raise unavailable(str(error)) from None
        except OSError as error:
            _log.warning("the folder of adapters can't be asked for %r: %s", name, error)
            raise unavailable(f"The folder of adapters can't be read: {error.strerror}.") from None
        if adapter is not None:
            return served, adapter
    return None


def _not_found(name: str | None, deployment: Deployment, *, is_no_adapter: bool = False) -> ApiError:
    asked = deployment.default.name if name is None else name
    return model_not_found(asked, deployment.names, is_no_adapter=is_no_adapter)


def claim_of(tenant: str, data: bytes) -> bytes:
    """A hash of a call, by which the door knows it when it is sent again: clients repeat the body byte for byte."""
    length = len(data).to_bytes(8, "little")
    return hashlib.blake2b(tenant.encode() + b"\0" + length + data[-_HASHED_BYTES:], digest_size=_CLAIM_BYTES).digest()


# Who calls, and on which terms: what a request says beside its body, in its headers.


def read_terms(
    scope: Scope,
    arrival_ns: int,
    config: ServerConfig,
    *,
    is_priority_scheduled: bool,
    priority: int | None = None,
    cache_salt: str = "",
    conversation: str = "",
) -> Terms:
    """From the headers, and from fields of the body, which are the last three.

    `arrival_ns`: now, unless the request has waited for its model. Raises 400 for what is malformed, contradicts the other or
    asks for what is not there.
    """
    arrival_ns = scope.get(ARRIVAL_KEY, arrival_ns)
    owner = read_owner(scope, config)
    headers, key = headers_of(scope), key_of(scope)
    times_ns: list[int | None] = [None] * len(_TIMES)
    priority_of_header = None
    if not _URGENCY.isdisjoint(headers):
        times_ns = [_milliseconds(scope, name) for name in _TIMES]
        priority_of_header = _integer(scope, _PRIORITY, INT32_MIN, INT32_MAX)
    deadline_ns, queue_timeout_ns, first_token_timeout_ns, slo_ttft_ns, slo_itl_ns = times_ns
    return Terms(
        request_id=identity_of(scope).request_id,
        owner=owner,
        arrival_ns=arrival_ns,
        deadline_ns=_limit_ns(arrival_ns, deadline_ns, config.request_timeout_s),
        queue_deadline_ns=_limit_ns(arrival_ns, queue_timeout_ns, config.queue_timeout_s),
        first_token_deadline_ns=_limit_ns(arrival_ns, first_token_timeout_ns, config.first_token_timeout_s),
        slo_ttft_ns=slo_ttft_ns,
        slo_itl_ns=slo_itl_ns,
        is_retry=headers.get(_RETRY_COUNT, b"0") != b"0",
        priority=_priority(
            priority_of_header, priority, None if key is None else key.priority, can_prioritise=is_priority_scheduled
        ),
        limits=_limits_of(key),
        cache_salt=cache_salt.encode(),
        conversation=_conversation_of(owner, conversation),
        model_wait_ns=scope.get(LOADED_KEY, arrival_ns) - arrival_ns,
    )


def _conversation_of(owner: Owner, name: str) -> bytes:
    """Return what stands for the conversation's name: no tenant can name the conversation of another."""
    if not name:
        return b""
    salt = hashlib.blake2b(owner.tenant.encode()).digest()
    return hashlib.blake2b(name.encode(), digest_size=16, key=salt).digest()


def read_owner(scope: Scope, config: ServerConfig) -> Owner:
    """The header names the tenant if there are no keys or it is trusted, else the key does. Raises 400 if it is malformed."""
    tenant = _value(scope, "X-Tenant")
    if tenant is not None and not NAME.fullmatch(tenant):
        raise _bad_header("X-Tenant", f"must be {NAME_RULE}")
    key, found = key_name(scope), key_of(scope)
    if tenant is None or (key and (not config.trust_tenant_header or _limits_of(found) is not None)):
        tenant = key  # else a client would escape its key's limits by naming a new tenant with each call
    return Owner(key=key, tenant=tenant)


def _limits_of(key: ApiKey | None) -> TenantLimits | None:
    """The limits of a key that has any."""
    if key is None:
        return None
    limits = TenantLimits(
        max_concurrent=key.max_concurrent,
        tokens_per_minute=key.tokens_per_minute,
        requests_per_minute=key.requests_per_minute,
    )
    return None if limits == _NO_LIMITS else limits


def _priority(from_header: int | None, from_body: int | None, least: int | None, *, can_prioritise: bool) -> int:
    """The request's priority, and no lower number than its key may have, which is what it has if it says nothing."""
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
    if least is None or not can_prioritise:
        return priority
    return least if from_header is None and from_body is None else max(least, priority)


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


# From a request to an answer


class Reader:
    """Makes calls of neutral requests, for the model that each one names. Thread-safe."""

    def __init__(self, deployment: Deployment, config: ServerConfig, ignored: IgnoredParameters | None = None) -> None:
        """`ignored`: as for `parse_body`."""
        self.deployment = deployment
        self.config = config
        self.ignored = ignored

    def find(self, name: str | None, scope: Scope, user: str = "") -> tuple[ServedModel, AdapterRef | None]:
        """As `find_answering`."""
        return find_answering(name, self.deployment, scope, self.config, user)

    def call(self, request: ChatRequest | CompletionRequest, data: bytes, scope: Scope) -> Call:
        """Return the checked call. Its adapter begins to be loaded. Raises `ApiError` and `Rejected`.

        `data` is the body as the client sent it.
        """
        served, adapter = self.find(request.model, scope, request.user)
        running = served.answerer()
        if adapter is not None and running.adapters is not None and request.model is not None:
            if (rejected := running.adapters.failure(request.model)) is not None:
                raise rejected
            running.adapters.want(adapter)
        if running.model.encoder is not None:
            name = request.names("model")
            raise invalid(
                f"{running.name} turns texts into numbers and writes none. Ask /v1/embeddings, /v1/rerank or /classify, or "
                "another model.",
                name,
            )
        terms = read_terms(
            scope,
            running.clock.now_ns(),
            self.config,
            is_priority_scheduled=running.model.is_priority_scheduled,
            priority=request.priority,
            cache_salt=request.cache_salt,
            conversation=request.conversation_name,
        )
        claim = claim_of(terms.owner.tenant, data)
        return make_call(request, running, terms, adapter, num_bytes=len(data), claim=claim)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as an API's function reads it beside its body."""

    reader: Reader
    data: bytes
    scope: Scope

    def call(self, request: ChatRequest | CompletionRequest) -> Call:
        """As `Reader.call`."""
        return self.reader.call(request, self.data, self.scope)


_Body = TypeVar("_Body", bound=Body)
_Made = tuple[Call, NewWriter]
"""A call, and who writes its answer."""


class CallEndpoint:
    """Answers bodies of all APIs that ask a model to write. Only the function that reads one knows which API it is."""

    def __init__(self, reader: Reader, in_flight: InFlight, off_loop: OffLoop) -> None:
        """`off_loop` is for large bodies, which have to be read before their model is known."""
        self.reader = reader
        self._in_flight = in_flight
        self._off_loop = off_loop

    def answers(
        self,
        body_type: type[_Body],
        read: Callable[[_Body, Asked], _Made],
        check: Callable[[Any, type[_Body], IgnoredParameters | None], _Body] = check_body,
    ) -> JsonEndpoint:
        """Return the endpoint of a route whose body `read` makes a call of. Both functions raise `ApiError` and `Rejected`."""

        @wraps(read)
        async def answer(data: bytes, http: HttpRequest) -> Response:
            return await self.answer(
                data, http, lambda asked: read(check(load_json(data), body_type, self.reader.ignored), asked)
            )

        return answer

    async def answer(self, data: bytes, http: HttpRequest, read: Callable[[Asked], _Made]) -> Response:
        """Return the response. Raises `ApiError` and `Rejected`."""
        asked = Asked(self.reader, data, http.scope)
        call, new_writer = await self._off_loop.run(len(data), lambda: read(asked), limit=INLINE_MAX_BYTES)
        if (entry := entry_of(http.scope)) is not None:
            entry.model = call.answer.model_name
        opened = await unless_gone(http, run(call, self._in_flight))
        return await respond(http, opened, new_writer)
