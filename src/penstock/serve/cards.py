"""Descriptions of models: the facts of their files, and the list of names that clients can use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired
from weakref import WeakKeyDictionary

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import give_way, in_daemon
from penstock.deploy.running import ModelFacts, ServedModel
from penstock.serve.asking import allows, find_allowed, may_ask, visible_routes
from penstock.serve.shapes import Count
from penstock.serve.waiting import FolderWatch

RETRY_S = 60.0
"""Time until files that could not be read are read again. It may take 0.1 s of a CPU to find that a file is damaged."""


@dataclass(frozen=True, slots=True)
class _Reading:
    key: object
    """The model's number of loads and its files when the reading began."""
    began_s: float
    facts: asyncio.Future[ModelFacts]

    @property
    def has_failed(self) -> bool:
        return self.facts.done() and self.facts.result() == ModelFacts()


class FactsCache:
    """Reads the facts of each model's files at first use. Reads them again after a load, or if its files have changed.

    After a failure it tries again when `RETRY_S` have passed. A hanging disk blocks one thread for each model.
    """

    def __init__(self) -> None:
        self._readings: WeakKeyDictionary[ServedModel, _Reading] = WeakKeyDictionary()

    async def of(self, served: ServedModel) -> ModelFacts:
        """Return the facts of a model's files."""
        key, now_s = (served.num_loads, served.file_state), time.monotonic()
        reading = self._readings.get(served)
        if reading is None or reading.key != key or (reading.has_failed and now_s >= reading.began_s + RETRY_S):
            reading = self._readings[served] = _Reading(key, now_s, asyncio.ensure_future(in_daemon(served.facts)))
        return await asyncio.shield(reading.facts)


LISTED_AT_ONCE = 128
"""Names to write before other threads may run: half a millisecond."""


ModelStatus = TypedDict("ModelStatus", {"value": str, "cause": NotRequired[str]})


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count | None
    task: Literal["generate", "embed", "rerank", "classify"] | None
    status: ModelStatus


ModelList = TypedDict("ModelList", {"object": Literal["list"], "data": list[ModelCard]})


@dataclass(frozen=True, slots=True)
class Listed:
    """A name that clients can use: a model's, an adapter's, a route's or a pipeline's."""

    name: str
    served: ServedModel
    path: Path | None = None
    """The folder or file of an adapter."""
    is_adapter: bool = False

    def card(self) -> ModelCard:
        """Return the entry of the list. Fields that need a loaded model are null before the first load."""
        served, info = self.served, self.served.info
        root = self.path.name if self.path is not None else self.name if info is None else info.root
        status: ModelStatus = {"value": served.state.value}
        if served.failure:
            status["cause"] = served.failure
        return {
            "id": self.name,
            "object": "model",
            "created": 0 if info is None else info.created_unix_s,
            "owned_by": "penstock",
            "root": root,
            "parent": served.name if self.is_adapter else None,
            "max_model_len": None if info is None else info.capacity.max_model_len,
            "task": None if info is None else "generate" if info.encoder is None else info.encoder.task.value,
            "status": status,
        }


class ModelsEndpoint:
    def __init__(self, deployment: Deployment, folder: FolderWatch) -> None:
        self._deployment = deployment
        self._folder = folder

    async def list(self, http: HttpRequest) -> Response:
        """List the models and adapters that the key allows. Adapters in a folder are listed after their first request."""
        return await self.list_as(http, _written)

    async def list_as(self, http: HttpRequest, write: Callable[[Sequence[Listed]], bytes]) -> Response:
        """Answer with the list, formatted by `write` in a thread because there may be a hundred thousand adapters."""
        await self._folder.look()
        data = await asyncio.to_thread(lambda: write(self._listed(http.scope)))
        return Response(data, media_type="application/json")

    def _listed(self, scope: Scope) -> Sequence[Listed]:
        found: list[Listed] = []
        for served in [one for one in self._deployment.served if one.is_there]:
            found += [Listed(name, served) for name in served.names if may_ask(scope, served, name, self._deployment)]
            if served.adapters is None:
                continue
            for index, (name, path) in enumerate(served.adapters.registered().items()):
                if allows(scope, name):
                    found.append(Listed(name, served, path, is_adapter=True))
                if index % LISTED_AT_ONCE == 0:
                    give_way()
        return [*found, *(Listed(name, served) for name, served in visible_routes(self._deployment, scope))]

    async def get(self, http: HttpRequest) -> ModelCard:
        """Describe the model with this name."""
        model_id = http.path_params["model_id"]
        if (first := dict(visible_routes(self._deployment, http.scope)).get(model_id)) is not None:
            return Listed(model_id, first).card()
        served, adapter = find_allowed(model_id, self._deployment, http.scope)
        if adapter is None or served.adapters is None:
            return Listed(model_id, served).card()
        return Listed(model_id, served, served.adapters.path(adapter), is_adapter=True).card()


def _written(listed: Sequence[Listed]) -> bytes:
    pieces: list[bytes] = []
    for begin in range(0, len(listed), LISTED_AT_ONCE):
        pieces.append(fast_json.dumps([one.card() for one in listed[begin : begin + LISTED_AT_ONCE]])[1:-1])
        give_way()
    return b'{"object":"list","data":[%s]}' % b",".join(pieces)
