"""`POST /models/load`, `/models/unload` and `/cluster/update`, for admins."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Annotated, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.deploy.running import ServedModel
from penstock.serve.api import Parts
from penstock.serve.bodies import Body
from penstock.serve.errors import from_rejected, invalid, model_not_found
from penstock.serve.http.checks import require_admin, unless_gone
from penstock.serve.shapes import Success
from penstock.types.errors import PenstockError, Rejected

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class LoadModelBody(Body):
    model: str
    wait: bool = True
    """False answers 202 at once and loads the model afterwards, unless its load is refused at once."""


class UnloadModelBody(Body):
    model: str
    timeout_s: Annotated[float, Field(ge=0, le=24 * 3600)] = 30.0
    """Requests that still use the model after this time are aborted."""


class Updated(TypedDict):
    changes: list[str]
    """A line for each model that was replaced, added or removed."""


class LifeEndpoint:
    def __init__(self, parts: Parts) -> None:
        self._deployment = parts.deployment
        self._reader = parts.reader

    async def load(self, data: bytes, http: HttpRequest) -> Success | Response:
        """Load a model once memory is free. An idle model may later be unloaded to make room for another."""
        require_admin(http.scope)
        body = await self._reader.body(data, LoadModelBody, http.scope)
        future = self._deployment.want(self._find(body.model))
        if not body.wait and not (future.done() and future.exception()):
            return Response(fast_json.dumps(Success(success=True)), 202, media_type="application/json")
        await unless_gone(http, _result(future))
        return {"success": True}

    async def unload(self, data: bytes, http: HttpRequest) -> Success:
        """Unload a model when its running requests have ended. Later requests for it load it again."""
        require_admin(http.scope)
        body = await self._reader.body(data, UnloadModelBody, http.scope)
        served = self._find(body.model)
        if served.is_fixed:
            raise invalid(f"The model {served.name} can't be unloaded: models on a GPU or of a cluster stay loaded.", "model")
        await unless_gone(http, _result(self._deployment.unload(served, body.timeout_s)))
        return {"success": True}

    async def update(self, http: HttpRequest) -> Updated:
        """Reload a cluster's configuration, and replace the models whose settings have changed before answering."""
        require_admin(http.scope)
        if (update := self._deployment.update) is None:
            raise invalid(
                "This server is not a cluster, so it can't be reconfigured while it runs. Restart it with the new settings."
            )
        try:
            changes = await asyncio.to_thread(update)
        except Rejected as error:  # the server ends
            raise from_rejected(error) from None
        except PenstockError as error:
            _log.error("the cluster could not be updated: %s", error)
            raise invalid(f"The cluster could not be updated: {error.without_folders()}") from None
        return {"changes": list(changes)}

    def _find(self, name: str) -> ServedModel:
        served = self._deployment.find(name)
        if served is None:
            raise model_not_found(name, self._deployment.names)
        return served


async def _result(future: Future[_Result]) -> _Result:
    """Wait for a task of the deployment. The task goes on if the client disconnects."""
    return await asyncio.shield(asyncio.wrap_future(future))
