"""Turns a request of any API into a call: finds the model that it names and its key allows, and reads its terms.

APIs build the call with `Asked`, and `answering` runs it. If the model is not loaded, or a route has not chosen one yet, these
functions raise; `waiting` provides it and calls the endpoint again. Any thread may call them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.types import Scope

from penstock.calls.call import Call, ChatRequest, CompletionRequest
from penstock.calls.check import make_call
from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.pipelines import Pipeline
from penstock.deploy.routes import Route
from penstock.deploy.running import RunningModel, ServedModel
from penstock.serve.bodies import Body, IgnoredParameters, parse_body
from penstock.serve.course import course_of
from penstock.serve.errors import MODEL_NOT_FOUND, ApiError, invalid, model_not_found
from penstock.serve.http.checks import identity_of, key_of
from penstock.serve.terms import claim_of, read_lane, read_owner, read_terms
from penstock.serve.trials import can_be_replaced
from penstock.types.adapter import AdapterRef
from penstock.types.errors import NameUnknown

_Body = TypeVar("_Body", bound=Body)
_Result = TypeVar("_Result")


# Models and adapters by name


class PipelineOpen(ApiError):
    """Raised when the named pipeline has not searched for the question yet. `waiting` then has it search.

    Clients see the message only at endpoints without a body.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        message = f"{pipeline.name} is a pipeline, but this request needs a model. Name a model instead."
        super().__init__(400, message, code="invalid_value", param="model")
        self.pipeline = pipeline


class UpstreamChosen(ApiError):
    """Raised when a route has chosen an upstream. `waiting` forwards the request there."""

    def __init__(self, name: str) -> None:
        message = f"{name} is a model on another server, which answers only chats and completions."
        super().__init__(400, message, code="invalid_value", param="model")
        self.name = name


class RouteOpen(ApiError):
    """Raised when the named route has not chosen a model yet. `waiting` then has it choose.

    Clients see the message only at endpoints without a body.
    """

    def __init__(self, route: Route, name: str) -> None:
        """`name`: the name in the request, of the route or of a pipeline that uses it."""
        message = f"{route.name} is a route, but this request needs a model. Name a model instead."
        super().__init__(400, message, code="invalid_value", param="model")
        self.route, self.name = route, name


def find_model(name: str | None, deployment: Deployment, scope: Scope) -> RunningModel:
    """Return the model of a name, or the default one. Raises like `find_allowed`, or `ModelAway` if it is not loaded."""
    return find_allowed(name, deployment, scope)[0].answerer()


def check_filled(name: str | None, deployment: Deployment, scope: Scope) -> None:
    """Raise `PipelineOpen` if this is the name of a pipeline that has not put its sources into the body yet."""
    pipeline = deployment.pipelines.get(name or "")
    if pipeline is not None and course_of(scope).filled != pipeline.name:
        raise PipelineOpen(pipeline)


def find_for_admin(name: str | None, deployment: Deployment) -> ServedModel:
    """Return the model of a name without checking the key: for admins only. Raises 404.

    The model may be away. A folder's adapter is found only once a request has used it.
    """
    served = deployment.find(name) or deployment.adapter_owner(name or "")
    if served is None:
        raise _not_found(name, deployment)
    return served


def _allowed_names(scope: Scope) -> Collection[str] | None:
    """Return the names that the request's key lists, or None if it allows every model."""
    key = key_of(scope)
    return None if key is None else key.models


def allows(scope: Scope, *names: str) -> bool:
    """Return whether the request's key lists one of these names."""
    allowed = _allowed_names(scope)
    return allowed is None or not {*names}.isdisjoint(allowed)


def may_ask(scope: Scope, served: ServedModel, name: str | None, deployment: Deployment) -> bool:
    """Return whether the request's key allows this model under `name`. Pipelines and adapters must be listed: see `allows`."""
    allowed = _allowed_names(scope)
    return allowed is None or name in allowed or any(deployment.find(one) is served for one in allowed)


def models_of(route: Route, deployment: Deployment, scope: Scope, asked: str = "") -> list[str]:
    """Return the models of a route that the request may use. A key that lists the route may use all of them.

    If the request may use several models but not all judges of the route, return none. `asked`: the name of a pipeline that
    uses the route, if the request names one. A key that lists the pipeline may use the route's models.
    """
    kept_from, asked = course_of(scope).kept_from, asked or route.name

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


def visible_names(deployment: Deployment, scope: Scope) -> list[str]:
    return [name for name, _ in visible_models(deployment, scope)]


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
    """Return what `_find_unchecked` returns. A model that the request's key does not allow gets the 404 of an unknown one."""
    if _allowed_names(scope) is None:
        return _find_unchecked(name, deployment, scope)
    route = deployment.routes.get(name or "")
    has_no_model = route is not None and not models_of(route, deployment, scope)
    # Access to a model does not include the documents of its pipelines, nor its adapters. Unlisted adapters are not looked up.
    is_hidden = not allows(scope, name or "") and route is None and deployment.find(name) is None
    try:
        if not has_no_model and not is_hidden:
            served, adapter = _find_unchecked(name, deployment, scope)
            if may_ask(scope, served, name, deployment):
                return served, adapter
    except ApiError as error:
        if error.code != MODEL_NOT_FOUND:
            raise
    raise model_not_found(name, visible_names(deployment, scope))


def _find_unchecked(name: str | None, deployment: Deployment, scope: Scope) -> tuple[ServedModel, AdapterRef | None]:
    """Return the model that a request names, loaded or not, and the adapter if the name is an adapter's.

    Models come first, then known adapters, then the adapter that a search on disk found for this request. Raises 404, or
    `NameUnknown` if the name must be looked up on the disk.
    """
    asked, course = name, course_of(scope)
    if name in deployment.pipelines:
        name = deployment.pipelines[name].config.model
    if name in deployment.routes:
        routed = course.routed
        if routed is None or routed.asked != asked:
            raise RouteOpen(deployment.routes[name], asked or name)
        name = routed.model
        if name in deployment.upstreams:
            raise UpstreamChosen(name)
    served = deployment.find(name)
    if served is not None:
        return served, None
    there = [one for one in deployment.served if one.is_there] if name else []
    owners = [(one, one.adapters) for one in there if one.adapters is not None]
    for served, adapters in owners:
        if (adapter := adapters.known(name or "")) is not None:
            return served, adapter
    searched, found = course.looked_up or (None, None)
    if found is not None and found[0] not in there:  # its model was replaced or removed since
        searched = None
    is_searched = searched is not None and searched == name
    if is_searched and found is not None:
        return found
    if not is_searched and any(adapters.may_find(name or "") for _, adapters in owners):
        raise NameUnknown(name or "")
    raise _not_found(name, deployment, is_no_adapter=is_searched)


def _not_found(name: str | None, deployment: Deployment, *, is_no_adapter: bool = False) -> ApiError:
    asked = deployment.default.name if name is None else name
    return model_not_found(asked, (*deployment.names, *deployment.routes, *deployment.pipelines), is_no_adapter=is_no_adapter)


# From a request to a call


@dataclass(frozen=True, slots=True)
class Reader:
    """Objects of the server that every API needs to read requests."""

    deployment: Deployment
    config: ServerConfig
    ignored: IgnoredParameters | None = None
    """See `parse_body`."""

    async def body(self, data: bytes, body_type: type[_Body], scope: Scope) -> _Body:
        """Parse and check a body. Raises as `parse`."""
        return await self.parse(data, lambda: parse_body(data, body_type, self.ignored), scope)

    async def parse(self, data: bytes, work: Callable[[], _Result], scope: Scope) -> _Result:
        """Return the result of `work`, which parses a body, in a thread if it is large. Raises 400 and `Rejected`."""
        return await self.deployment.off_loop.parse(len(data), work, read_lane(scope))


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
        routed = course_of(scope).routed
        if routed is not None and routed.asked == name:
            name = routed.model
        elif name in deployment.pipelines:
            name = deployment.pipelines[name].config.model
        tenant = read_owner(scope).tenant
        return deployment.part_of(name, tenant, f"{tenant}\0{user}" if user else identity_of(scope).request_id) or served, None

    def call(self, request: ChatRequest | CompletionRequest) -> Call:
        """Check a request and return its call. Also begin to load its adapter. Raises `ApiError` and `Rejected`."""
        course = course_of(self.scope)
        served, adapter = self.find(request.model, request.user)
        check_filled(request.model, self.reader.deployment, self.scope)
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
                f"{running.name} is an encoder and cannot generate text. Use /v1/embeddings, /v1/rerank or /classify, or name "
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
        if course.check is not None and not can_be_replaced(call):
            raise invalid(
                "This pipeline checks its answers. Request one answer to one text, without tools, a response format, a suffix, "
                "beam search or prompt log-probabilities."
            )
        routed = course.routed
        return call if routed is None or routed.trial is None else routed.trial.prepared(call)
