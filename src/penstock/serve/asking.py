"""Turns a request of any API into a call: finds its model, reads its headers, and waits for a missing model.

`Asked` makes a call of a checked request (`answering` runs it). `app` wraps every endpoint in `Waits.around`. If the endpoint
raises that a model or an adapter is missing, the request waits for a load or for a search on disk, and the endpoint is called
again. `FolderWatch`, `Waits` and what they wait for are for the event loop. Other functions may run on any thread; of these
only `look_up` blocks, because it reads the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.admission.ask import TenantLimits
from penstock.calls.call import Call, ChatRequest, CompletionRequest, Owner, Terms
from penstock.calls.check import make_call
from penstock.calls.in_flight import Arrival, InFlight
from penstock.config import ServerConfig
from penstock.config.keys import NAME, NAME_RULE, ApiKey
from penstock.deploy.deployment import Deployment
from penstock.deploy.pipelines import Pipeline
from penstock.deploy.routes import Route
from penstock.deploy.running import RunningModel, ServedModel
from penstock.obs.trace_context import Span
from penstock.serve.bodies import INT32_MAX, INT32_MIN, Body, IgnoredParameters, parse_body
from penstock.serve.errors import MODEL_NOT_FOUND, ApiError, invalid, model_not_found, shorten, status_of, unavailable
from penstock.serve.http.checks import (
    JsonEndpoint,
    add_header,
    headers_of,
    identity_of,
    key_name,
    key_of,
    unless_gone,
    values_of,
)
from penstock.serve.http.entries import entry_of, note_model
from penstock.serve.routed import ROUTED_KEY, Routed, charge
from penstock.serve.trials import CHECK_KEY, Unsure, can_be_replaced
from penstock.types.adapter import AdapterRef
from penstock.types.errors import ConfigError, ModelAway, NameUnknown, Rejected, RejectReason
from penstock.types.request import NO_WAITS, WaitTimes

if TYPE_CHECKING:  # with an HTTP client, which few servers need
    from penstock.serve.upstream import Upstream

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=Body)

_CLAIM_BYTES = 16
_HASHED_BYTES = 1 << 16
"""Only the end of a body is hashed: long conversations with the same beginning differ there."""

MAX_DEADLINE_MS = 24 * 3600 * 1000
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_NO_LIMITS = TenantLimits()
_RETRY_COUNT = b"x-stainless-retry-count"
"""Header in which OpenAI's and Anthropic's clients number their attempts."""
ARRIVAL_KEY = "penstock.arrival_ns"
"""Key of a scope: the time of arrival, if the request has waited."""
WAITED_KEY = "penstock.waited"
"""Key of a scope: the `WaitTimes` of a request that has waited."""
LOOKED_UP_KEY = "penstock.looked_up"
"""Key of a scope: a `LookedUp`, if the adapter's name was looked up on the disk."""
LookedUp = tuple[str, tuple[ServedModel, AdapterRef] | None]
"""An adapter's name, and the result of `look_up`."""
LOADS_KEY = "penstock.loads"
"""Key of a scope: how often the request has waited for the load of each model."""
MAX_LOADS = 3
"""Otherwise, models that a route or a pipeline needs together could unload each other forever."""
FILLED_KEY = "penstock.filled"
"""Key of a scope: the name of the pipeline that has put its sources into the body."""
KEPT_KEY = "penstock.kept_from"
"""Key of a scope: names of the upstreams that must not see the request."""
BACKGROUND_KEY = "penstock.background"
"""Key of a scope: true for a line of a batch, which the server itself asks."""
_TIMES = ("X-Deadline-Ms", "X-Queue-Timeout-Ms", "X-First-Token-Timeout-Ms", "X-SLO-TTFT-Ms", "X-SLO-ITL-Ms")
_PRIORITY = "X-Priority"
_URGENCY = frozenset(name.lower().encode() for name in (*_TIMES, _PRIORITY))
"""Headers about urgency, in small letters. Most clients send none."""

BUSY_STATUSES = (429, 502, 503, 504)
"""After these statuses, the next model of a fallback is asked, unless the limit is the client's own."""
TENANT_REASONS = (RejectReason.TENANT_CONCURRENCY, RejectReason.TENANT_TOKENS, RejectReason.TENANT_REQUESTS)
MAX_LOOK_S = 5.0
"""Time limit of a search on disk. After it, a model's name is unknown, and for an adapter's name the answer is 503."""
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of bodies that wait for one model, or for the folder of adapters: sixteen of the largest bodies."""
MAX_LOOK_THREADS = 4
"""Adapter names searched for at once. A hanging disk blocks this many threads."""
MAX_LOOKS = 1024
"""Most names, and most requests, that wait for the folder of adapters."""


# Models and adapters by name


class PipelineOpen(ApiError):
    """A request names a pipeline, which has not looked up its question yet. The message is for routes without questions."""

    def __init__(self, pipeline: Pipeline) -> None:
        message = f"{pipeline.name} is a pipeline, which answers questions. Name a model."
        super().__init__(400, message, code="invalid_value", param="model")
        self.pipeline = pipeline


class UpstreamChosen(ApiError):
    """The route of a request has chosen a model of another server. The message is for routes that can't go there."""

    def __init__(self, name: str) -> None:
        super().__init__(
            400, f"{name} is a model of another server, and only writes text.", code="invalid_value", param="model"
        )
        self.name = name


class RouteOpen(ApiError):
    """A request names a route, which has not chosen a model yet. The message is for routes without questions."""

    def __init__(self, route: Route, name: str) -> None:
        """`name`: the request's, of the route or of a pipeline over it."""
        models = ", ".join(route.models)
        message = f"{route.name} is a route, and chooses one of {models} for a question. Name one of them."
        super().__init__(400, message, code="invalid_value", param="model")
        self.route, self.name = route, name


def find_model(name: str | None, deployment: Deployment, scope: Scope) -> RunningModel:
    """Return the model of a name, or the default one. Raises like `find_allowed`, or `ModelAway` if it is not loaded."""
    return find_allowed(name, deployment, scope)[0].answerer()


def find_served(name: str | None, deployment: Deployment) -> ServedModel:
    """Return the model of a name, loaded or not. Raises 404. Adapters are found only after a request has named them."""
    served = deployment.find(name) or deployment.adapters_of(name or "")
    if served is None:
        raise _not_found(name, deployment)
    return served


def allows(scope: Scope, *names: str) -> bool:
    """Return whether the request's key allows one of these names themselves."""
    key = key_of(scope)
    return key is None or key.models is None or not {*names}.isdisjoint(key.models)


def may_ask(scope: Scope, served: ServedModel, name: str | None, deployment: Deployment) -> bool:
    """Return whether the request's key allows this model, or its adapter, under `name`."""
    key = key_of(scope)
    if key is None or key.models is None:
        return True
    return name in key.models or any(deployment.find(one) is served for one in key.models)


def models_of(route: Route, deployment: Deployment, scope: Scope, asked: str = "") -> list[str]:
    """Return the models of a route that the request may ask: none if it may ask several, but not the route's judge. A key that
    allows the route allows them all.

    `asked`: the name of a pipeline over the route, if the request names one: a key that allows it allows these models.
    """
    kept_from, asked = scope.get(KEPT_KEY, frozenset()), asked or route.name

    def may_be_asked(name: str) -> bool:
        if name in deployment.upstreams:
            return name not in kept_from and allows(scope, name, asked)
        served = deployment.find(name)
        return served is not None and may_ask(scope, served, asked, deployment)

    models = [name for name in route.models if may_be_asked(name)]
    return models if len(models) <= 1 or all(map(may_be_asked, route.judges)) else []


def visible_models(deployment: Deployment, scope: Scope) -> Iterator[tuple[str, ServedModel]]:
    """Yield the names of models, routes and pipelines that the request's key allows, each with a model."""
    for served in deployment.served:
        if served.is_there:
            yield from ((name, served) for name in served.names if may_ask(scope, served, name, deployment))
    yield from visible_routes(deployment, scope)


def visible_routes(deployment: Deployment, scope: Scope) -> Iterator[tuple[str, ServedModel]]:
    """Yield the names of routes and pipelines that the request's key allows, each with its first model on this server."""
    for route in deployment.routes.values():
        names = models_of(route, deployment, scope)
        served = _first_here([*names, *route.models], deployment)
        if names and served is not None:
            yield route.name, served
    for name, pipeline in deployment.pipelines.items():
        model = pipeline.config.model
        served = _first_here(deployment.routes[model].models if model in deployment.routes else [model], deployment)
        if served is not None and allows(scope, name):
            yield name, served


def _first_here(names: Iterable[str], deployment: Deployment) -> ServedModel | None:
    return next(filter(None, map(deployment.find, names)), None)


def find_allowed(name: str | None, deployment: Deployment, scope: Scope) -> tuple[ServedModel, AdapterRef | None]:
    """As `find_asked`, but raise 404 for a model that the request's key does not allow, as for an unknown one."""
    key = key_of(scope)
    if key is None or key.models is None:
        return find_asked(name, deployment, scope)
    route = deployment.routes.get(name or "")
    try:
        if route is not None and not models_of(route, deployment, scope):
            raise _not_found(name, deployment)
        if name in deployment.pipelines and not allows(scope, name):  # its documents are more than its model
            raise _not_found(name, deployment)
        served, adapter = find_asked(name, deployment, scope)
    except ApiError as error:
        if error.code != MODEL_NOT_FOUND:
            raise
    else:
        if may_ask(scope, served, name, deployment):
            return served, adapter
    names = [one for one, _ in visible_models(deployment, scope)]
    raise model_not_found(deployment.default.name if name is None else name, names)


def find_asked(name: str | None, deployment: Deployment, scope: Scope) -> tuple[ServedModel, AdapterRef | None]:
    """Return the model that a request names, loaded or not, and the adapter if the name is an adapter's.

    Models come first, then known adapters, then the adapter that `look_up` found for this request. Raises 404, or
    `NameUnknown` if the name must be looked up on the disk.
    """
    asked = name
    if name in deployment.pipelines:
        name = deployment.pipelines[name].config.model
    if name in deployment.routes:
        routed: Routed | None = scope.get(ROUTED_KEY)
        if routed is None or routed.asked != asked:
            raise RouteOpen(deployment.routes[name], asked or name)
        name = routed.model
        if name in deployment.upstreams:
            raise UpstreamChosen(name)
    served = deployment.find(name)
    if served is not None:
        return served, None
    owners = [(one, one.adapters) for one in deployment.served if one.adapters is not None] if name else []
    for served, adapters in owners:
        if (adapter := adapters.known(name or "")) is not None:
            return served, adapter
    looked_up: LookedUp | None = scope.get(LOOKED_UP_KEY)
    if looked_up is not None and looked_up[1] is not None and looked_up[1][0] not in deployment.served:
        looked_up = None  # its model was replaced since
    if looked_up is not None and looked_up[0] == name:
        if looked_up[1] is not None:
            return looked_up[1]
    elif any(adapters.may_find(name or "") for _, adapters in owners):
        raise NameUnknown(name or "")
    raise _not_found(name, deployment, is_no_adapter=looked_up is not None and looked_up[0] == name)


def look_up(name: str, deployment: Deployment) -> tuple[ServedModel, AdapterRef] | None:
    """Search the folders of adapters for this name. Return the adapter with its model, or None. Reads the disk.

    Raises 503 if that fails, or if there are too many names.
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
    return model_not_found(asked, (*deployment.names, *deployment.routes, *deployment.pipelines), is_no_adapter=is_no_adapter)


def claim_of(tenant: str, data: bytes) -> bytes:
    """Return a hash of tenant and body. Admission uses it to recognise a retry, because clients repeat the body exactly."""
    length = len(data).to_bytes(8, "little")
    return hashlib.blake2b(tenant.encode() + b"\0" + length + data[-_HASHED_BYTES:], digest_size=_CLAIM_BYTES).digest()


IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header with which a client sends a request again. OpenAI's sends it as one of `extra_headers`."""


def repeated_name(scope: Scope, config: ServerConfig, data: bytes) -> str | None:
    """Return a name that is the same when the owner sends this body again with the same `Idempotency-Key`, or None without."""
    given, owner = _value(scope, IDEMPOTENCY_KEY), read_owner(scope, config)
    if not given:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in (owner.key.encode(), owner.tenant.encode(), given.encode("latin-1"), data):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


# The caller and the terms, from the headers


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
    """Return a request's terms, such as deadline and priority.

    They come from its headers, its key, the server's limits of time, and three fields of its body: `priority`, `cache_salt`
    and `conversation`. `arrival_ns` is the time now, except that a request that waited for its model arrived before that wait.
    Raises 400 for malformed, contradicting or unsupported values.
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
    routed: Routed | None = scope.get(ROUTED_KEY)
    is_background: bool = scope.get(BACKGROUND_KEY, False)
    limits_s = (config.request_timeout_s, config.queue_timeout_s, config.first_token_timeout_s)
    request_s, queue_s, first_token_s = (None, None, None) if is_background else limits_s  # a line of a batch has its window
    return Terms(
        request_id=identity_of(scope).request_id,
        owner=owner,
        arrival_ns=arrival_ns,
        deadline_ns=_limit_ns(arrival_ns, deadline_ns, request_s),
        queue_deadline_ns=_limit_ns(arrival_ns, queue_timeout_ns, queue_s),
        first_token_deadline_ns=_limit_ns(arrival_ns, first_token_timeout_ns, first_token_s),
        slo_ttft_ns=slo_ttft_ns,
        slo_itl_ns=slo_itl_ns,
        is_retry=headers.get(_RETRY_COUNT, b"0") != b"0",
        returns=routed is None or not routed.rest,
        priority=_priority(
            priority_of_header, priority, None if key is None else key.priority, can_prioritise=is_priority_scheduled
        ),
        background=is_background,
        limits=_limits_of(key),
        cache_salt=cache_salt.encode(),
        conversation=_conversation_of(owner, conversation),
        waits=scope.get(WAITED_KEY, NO_WAITS),
    )


def _conversation_of(owner: Owner, name: str) -> bytes:
    """Return a hash of the conversation's name that differs between tenants. Empty without a name."""
    if not name:
        return b""
    salt = hashlib.blake2b(owner.tenant.encode()).digest()
    return hashlib.blake2b(name.encode(), digest_size=16, key=salt).digest()


def read_owner(scope: Scope, config: ServerConfig) -> Owner:
    """Return the request's key and tenant. Raises 400.

    The header X-Tenant counts if the server has no keys or trusts it. Otherwise the key is the tenant."""
    tenant = _value(scope, "X-Tenant")
    if tenant is not None and not NAME.fullmatch(tenant):
        raise _bad_header("X-Tenant", f"must be {NAME_RULE}")
    key, found = key_name(scope), key_of(scope)
    if tenant is None or (key and (not config.trust_tenant_header or _limits_of(found) is not None)):
        tenant = key  # else a client would escape its key's limits by naming a new tenant with each call
    return Owner(key=key, tenant=tenant)


def _limits_of(key: ApiKey | None) -> TenantLimits | None:
    if key is None:
        return None
    limits = TenantLimits(
        max_concurrent=key.max_concurrent,
        tokens_per_minute=key.tokens_per_minute,
        requests_per_minute=key.requests_per_minute,
    )
    return None if limits == _NO_LIMITS else limits


def _priority(from_header: int | None, from_body: int | None, least: int | None, *, can_prioritise: bool) -> int:
    """Return the request's priority: at least `least`, the key's priority, which is also the default."""
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
    """Return when the client's or the server's time limit ends, whichever is earlier, or None without a limit."""
    limits_ns = [] if asked_ns is None else [asked_ns]
    if server_s is not None:
        limits_ns.append(int(server_s * 1e9))
    return arrival_ns + min(limits_ns) if limits_ns else None


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


# Waiting for a model or an adapter


class FolderWatch:
    """Scans the folder of models again when a request names an unknown model. For the event loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._turn = asyncio.Lock()
        self._began_s = self._ended_s = 0.0
        """When the last look into the folder began and ended."""

    async def find(self, name: str) -> ServedModel | None:
        """Return the model with this name, or None if it is unknown or was removed from the folder."""
        served = self._deployment.find(name)
        if served is None or served.path is None:
            return served
        await self.look()
        return self._deployment.find(name)

    async def look(self) -> None:
        """Wait for a scan of the folder that begins after this call, for `MAX_LOOK_S` at most. Callers share scans."""
        if not self._deployment.may_grow:
            return
        asked_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOOK_S), self._turn:
                if self._began_s > asked_s:
                    return
                # Wait ten times as long as a look takes, so that unknown names can't keep the disk busy.
                rest_s = 10 * (self._ended_s - self._began_s) - (asked_s - self._ended_s)
                await asyncio.sleep(max(0.0, rest_s))
                self._began_s = time.monotonic()
                try:
                    await asyncio.to_thread(self._deployment.look)
                finally:
                    self._ended_s = time.monotonic()


ChooseModel = Callable[[Route, str, bytes, HttpRequest], Awaitable[None]]
"""Chooses the model of a route for a request by its body, and notes it in the scope. Raises `ModelAway` and `Rejected`.

The text is the name that the request has, of the route or of a pipeline over it."""


FillPipeline = Callable[[Pipeline, bytes, HttpRequest], Awaitable[bytes]]
"""Returns a request's body with what a pipeline has looked up. Raises `ModelAway`, `ApiError` and `Rejected`."""


class Waits:
    """Makes requests wait for models to be loaded and for adapters to be found. For the event loop."""

    def __init__(
        self,
        deployment: Deployment,
        folder: FolderWatch,
        in_flight: InFlight,
        choose: ChooseModel,
        fill: FillPipeline,
        upstreams: Mapping[str, Upstream],
    ) -> None:
        self._upstreams = upstreams
        self._deployment = deployment
        self._folder = folder
        self._in_flight = in_flight
        self._choose = choose
        self._fill = fill
        self._looks = _AdapterLooks(deployment)

    def around(self, answer: JsonEndpoint, *, loads: bool) -> JsonEndpoint:
        """Wrap `answer`: when it lacks something that can be loaded, found or chosen, do that, and call it again.

        The call answers 404 if a search on disk found nothing. `loads`: also load models, and wait for that.
        """

        async def answer_when_there(data: bytes, http: HttpRequest) -> Response:
            has_looked = not self._deployment.may_grow
            while True:
                asked_ns = self._deployment.clock.now_ns()
                try:
                    answered = await self._here_or_upstream(answer, data, http)
                    self._tell_route(http)
                    return answered
                except (ModelAway, NameUnknown, RouteOpen, PipelineOpen) as lack:
                    if not loads and not isinstance(lack, NameUnknown):
                        raise
                    data = await self._supply(lack, data, http, asked_ns)
                except Unsure as error:
                    if not self._ask_next(str(error), http):  # the large model has gone
                        http.scope[ROUTED_KEY] = replace(http.scope[ROUTED_KEY], trial=None)
                    self._count_wait("route", asked_ns, http)
                except (ApiError, Rejected) as error:
                    if self._falls_back(error, http):
                        self._count_wait("route", asked_ns, http)
                    elif isinstance(error, Rejected) or error.code != MODEL_NOT_FOUND or has_looked:
                        raise
                    else:
                        has_looked = True
                        await self._folder.look()

        return answer_when_there

    async def _here_or_upstream(self, answer: JsonEndpoint, data: bytes, http: HttpRequest) -> Response:
        try:
            return await answer(data, http)
        except UpstreamChosen as chosen:
            name = chosen.name
        return await self._ask_upstream(name, data, http)

    async def _supply(
        self, lack: ModelAway | NameUnknown | RouteOpen | PipelineOpen, data: bytes, http: HttpRequest, asked_ns: int
    ) -> bytes:
        """Load, find or choose what a request lacks, and return its body, which a pipeline changes.

        Raises `ApiError` and `Rejected`, unless the request's route has another model.
        """
        http.scope.setdefault(ARRIVAL_KEY, asked_ns)
        try:
            try:
                if isinstance(lack, RouteOpen):
                    await self._choose(lack.route, lack.name, data, http)
                    self._count_wait("route", asked_ns, http)
                elif isinstance(lack, PipelineOpen):
                    data = await self._fill(lack.pipeline, data, http)
                    http.scope[FILLED_KEY] = lack.pipeline.name
                    self._count_wait("pipeline", asked_ns, http)
                elif isinstance(lack, NameUnknown):
                    http.scope[LOOKED_UP_KEY] = lack.name, await unless_gone(http, self._looks.find(lack.name, len(data)))
                else:
                    await self._load(lack.name, data, http)
            except ModelAway as away:  # the one that embeds the question
                await self._load(away.name, data, http)
        except (ApiError, Rejected) as error:
            # A refusal by a pipeline's helper is not its route model's fault.
            if isinstance(lack, PipelineOpen) or not self._falls_back(error, http):
                raise
        return data

    def _falls_back(self, error: ApiError | Rejected, http: HttpRequest) -> bool:
        """Choose a route's next model for a request that one of its models refused. Return whether there is one."""
        routed: Routed | None = http.scope.get(ROUTED_KEY)
        if routed is None or not routed.rest:
            return False
        is_own_limit = isinstance(error, Rejected) and error.reason in TENANT_REASONS
        is_too_long = isinstance(error, Rejected) and error.reason is RejectReason.CONTEXT_LENGTH
        if not is_too_long and (status_of(error) not in BUSY_STATUSES or is_own_limit):
            return False
        return self._ask_next(f"after={routed.model}", http)

    def _ask_next(self, why: str, http: HttpRequest) -> bool:
        """Choose the next model of the request's route, and return whether there is one."""
        routed: Routed = http.scope[ROUTED_KEY]
        route = self._deployment.routes[routed.route]
        there = models_of(route, self._deployment, http.scope, routed.asked)
        rest = [name for name in routed.rest if name in there]
        if not rest:
            return False
        http.scope[ROUTED_KEY] = replace(routed, model=rest[0], why=why, rest=(*rest[1:],), trial=None, cost=None)
        return True

    def _count_wait(self, name: str, since_ns: int, http: HttpRequest) -> None:
        waits: WaitTimes = http.scope.get(WAITED_KEY, NO_WAITS)
        now_ns = self._deployment.clock.now_ns()
        http.scope[WAITED_KEY] = waits._replace(**{name: getattr(waits, name) + now_ns - since_ns})
        if (entry := entry_of(http.scope)) is not None:
            entry.spans.append(Span(name=name, began_ns=since_ns, ended_ns=now_ns))

    async def _ask_upstream(self, name: str, data: bytes, http: HttpRequest) -> Response:
        note_model(http.scope, "text_completion" if http.url.path.endswith("/v1/completions") else "chat", name)
        if (entry := entry_of(http.scope)) is not None:
            entry.explain = tuple  # of the small model of a cascade
        terms = read_terms(http.scope, self._deployment.clock.now_ns(), self._in_flight.config, is_priority_scheduled=True)
        routed: Routed = http.scope[ROUTED_KEY]
        pay = None if routed.bill is None else partial(charge, http.scope, routed)
        return await self._upstreams[name].answer(data, http, terms, pay)

    def _tell_route(self, http: HttpRequest) -> None:
        """Say which model a route chose, in a header and in metrics."""
        routed: Routed | None = http.scope.get(ROUTED_KEY)
        if routed is not None:
            add_header(http.scope, b"x-route", routed.header)
            if (served := self._deployment.find(routed.model)) is not None:
                served.metrics.count_routed(routed.route)

    async def _load(self, name: str, data: bytes, http: HttpRequest) -> None:
        """Wait until the model is loaded. Returns at once if it is not served any more. Raises `Rejected`."""
        clock, config = self._deployment.clock, self._in_flight.config
        served = await unless_gone(http, self._folder.find(name))
        if served is None:  # the name that the request has says what is served in its place
            return
        loads: Counter[str] = http.scope.setdefault(LOADS_KEY, Counter())
        loads[name] += 1
        if loads[name] > MAX_LOADS:
            raise unavailable(
                f"{name} was loaded {MAX_LOADS} times for this request, and unloaded each time before it was used. The memory "
                "may not hold all models that the request needs at once."
            )
        asked_ns = clock.now_ns()
        arrival_ns = http.scope.setdefault(ARRIVAL_KEY, asked_ns)
        limit_ns = _wait_limit_ns(http.scope, arrival_ns, config)
        owner, request_id = read_owner(http.scope, config), identity_of(http.scope).request_id
        unix_time_s = self._deployment.sources.unix_time_s
        waits = http.scope.get(WAITED_KEY, NO_WAITS)
        arrival = Arrival(request_id, owner, arrival_ns, clock, unix_time_s, asked_ns, waits=waits, model=served.name)
        with self._in_flight.arriving(arrival):
            await unless_gone(http, _loaded(self._deployment, served, limit_ns, len(data)))
        self._count_wait("model", asked_ns, http)
        served.metrics.count_model_wait(clock.now_ns() - asked_ns)


class _AdapterLooks:
    """Searches the folders of adapters for unknown names, in threads. Call it from the event loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._looks: dict[str, asyncio.Task[tuple[ServedModel, AdapterRef] | None]] = {}
        """Searches by name, including those that wait for a thread."""
        self._turns = asyncio.Semaphore(MAX_LOOK_THREADS)
        self._num_asking = 0
        self._num_asking_bytes = 0

    async def find(self, name: str, num_bytes: int) -> tuple[ServedModel, AdapterRef] | None:
        """Return the adapter on disk with this name, or None. Callers share a search. `num_bytes`: size of the body.

        Raises 503 if too many requests wait, or if the search takes too long.
        """
        is_under_way = name in self._looks
        num_names = len(self._looks) + (not is_under_way)
        if max(self._num_asking + 1, num_names) > MAX_LOOKS or self._num_asking_bytes + num_bytes > MAX_WAITING_BYTES:
            raise unavailable("Too many requests wait for the folder of adapters. Its disk may be slow.")
        self._num_asking += 1
        self._num_asking_bytes += num_bytes
        try:
            async with asyncio.timeout(MAX_LOOK_S):
                found = await asyncio.shield(self._look(name))
                if found is None and is_under_way:  # the file may be newer than that search
                    found = await asyncio.shield(self._look(name))
                return found
        except TimeoutError:
            message = f"The disk did not say within {MAX_LOOK_S:g} s whether there is an adapter {shorten(name)!r}."
            raise unavailable(message, MAX_LOOK_S) from None
        finally:
            self._num_asking -= 1
            self._num_asking_bytes -= num_bytes

    def _look(self, name: str) -> asyncio.Task[tuple[ServedModel, AdapterRef] | None]:
        """Return the running search for the name, or start one. A search goes on even if all callers have left."""
        task = self._looks.get(name)
        if task is None:
            task = self._looks[name] = asyncio.create_task(self._ask(name))
            task.add_done_callback(lambda _: self._looks.pop(name))
        return task

    async def _ask(self, name: str) -> tuple[ServedModel, AdapterRef] | None:
        async with self._turns:
            found: Future[tuple[ServedModel, AdapterRef] | None] = Future()
            # A daemon thread: if the disk hangs, the process can still end, and no pool loses a thread.
            threading.Thread(target=self._run, args=(name, found), name="adapter-look", daemon=True).start()
            return await asyncio.wrap_future(found)

    def _run(self, name: str, found: Future[tuple[ServedModel, AdapterRef] | None]) -> None:
        if not found.set_running_or_notify_cancel():
            return
        try:
            found.set_result(look_up(name, self._deployment))
        except Exception as error:  # the task raises it
            found.set_exception(error)


async def _loaded(deployment: Deployment, served: ServedModel, limit_ns: int, num_bytes: int) -> RunningModel:
    """Wait for the model to be loaded, and return it. `num_bytes`: size of the request's body.

    Raises `Rejected` if too many requests wait for the model, or if loading takes longer than the request may wait.
    """
    if served.num_waiting >= served.max_waiting or served.num_waiting_bytes + num_bytes > MAX_WAITING_BYTES:
        detail = f"{served.num_waiting} requests wait for {served.name} to be loaded already"
        raise _refused(served, RejectReason.QUEUE_FULL, detail, deployment.expected_wait_s(served))
    patience_s = (limit_ns - deployment.clock.now_ns()) / 1e9
    future = deployment.want(served)  # load it even if this request can't wait so long
    expected_s = 0.0 if future.done() else deployment.expected_wait_s(served)
    if expected_s > patience_s:
        raise _refused(served, RejectReason.UNAVAILABLE, f"The model {served.name} is being loaded.", expected_s)
    served.num_waiting += 1
    served.num_waiting_bytes += num_bytes
    try:
        async with asyncio.timeout(max(0.0, patience_s)):
            return await asyncio.shield(asyncio.wrap_future(future))
    except TimeoutError:
        expected_s = deployment.expected_wait_s(served)
        raise _refused(served, RejectReason.UNAVAILABLE, f"The model {served.name} is being loaded.", expected_s) from None
    finally:
        served.num_waiting -= 1
        served.num_waiting_bytes -= num_bytes


def _wait_limit_ns(scope: Scope, arrival_ns: int, config: ServerConfig) -> int:
    """Return the time until which a request may wait: its own limit or the server's, if earlier. Raises 400."""
    terms = read_terms(scope, arrival_ns, config, is_priority_scheduled=True)
    return min([arrival_ns + int(config.load_timeout_s * 1e9), *(at_ns for at_ns, _ in terms.time_limits)])


def _refused(served: ServedModel, reason: RejectReason, detail: str, retry_after_s: float) -> Rejected:
    served.metrics.count_rejected(reason)
    return Rejected(reason, detail, retry_after_s=retry_after_s)


# From a request to a call


@dataclass(frozen=True, slots=True)
class Reader:
    """Objects of the server that every API needs to read requests."""

    deployment: Deployment
    config: ServerConfig
    ignored: IgnoredParameters | None = None
    """See `parse_body`."""

    async def body(self, data: bytes, body_type: type[_Body]) -> _Body:
        """Parse and check a body, in a thread if it is large. Raises 400 and `Rejected`."""
        return await self.deployment.off_loop.parse(len(data), lambda: parse_body(data, body_type, self.ignored))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's raw body and scope, for functions that turn the parsed body into a call. Thread-safe."""

    reader: Reader
    data: bytes
    scope: Scope

    def find(self, name: str | None, user: str = "") -> tuple[ServedModel, AdapterRef | None]:
        """Return the model that the request names, and the adapter if the name is an adapter's. Raises like `find_allowed`.

        If the name is split between several models, choose one by the tenant and `user`, or by the tenant and the request's
        id if `user` is empty. The choice is the same each time.
        """
        scope, deployment = self.scope, self.reader.deployment
        served, adapter = find_allowed(name, deployment, scope)
        if not deployment.splits or adapter is not None:
            return served, adapter
        routed: Routed | None = scope.get(ROUTED_KEY)
        if routed is not None and routed.asked == name:
            name = routed.model
        tenant = read_owner(scope, self.reader.config).tenant
        return deployment.part_of(name, tenant, f"{tenant}\0{user}" if user else identity_of(scope).request_id) or served, None

    def call(self, request: ChatRequest | CompletionRequest) -> Call:
        """Check a request and return its call. Also begin to load its adapter. Raises `ApiError` and `Rejected`."""
        served, adapter = self.find(request.model, request.user)
        pipeline = self.reader.deployment.pipelines.get(request.model or "")
        if pipeline is not None and self.scope.get(FILLED_KEY) != pipeline.name:
            raise PipelineOpen(pipeline)
        running = served.answerer()
        if request.model in self.reader.deployment.routes:
            request = replace(request, model=running.name)  # the answer says which model it is of
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
            self.scope,
            running.clock.now_ns(),
            self.reader.config,
            is_priority_scheduled=running.model.is_priority_scheduled,
            priority=request.priority,
            cache_salt=request.cache_salt,
            conversation=request.conversation_name,
        )
        claim = claim_of(terms.owner.tenant, self.data)
        call = make_call(request, running, terms, adapter, num_bytes=len(self.data), claim=claim)
        if CHECK_KEY in self.scope and not can_be_replaced(call):
            raise invalid("This pipeline checks its answers: ask for one, to a text, in a free form and without tools.")
        routed: Routed | None = self.scope.get(ROUTED_KEY)
        return call if routed is None or routed.trial is None else routed.trial.prepared(call)
