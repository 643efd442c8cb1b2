"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM, for admins.

A running request keeps its adapter until it ends. `models/adapter_files.py` refuses files outside the folders in the settings.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from penstock.deploy.adapters import Adapters
from penstock.deploy.running import ServedModel
from penstock.serve.api import Parts
from penstock.serve.asking import find_for_admin
from penstock.serve.bodies import Body
from penstock.serve.errors import ApiError, invalid, shorten, unavailable
from penstock.serve.http.checks import require_admin
from penstock.types.errors import ConfigError, ModelError

LOAD_TIMEOUT_S = 60.0


class LoadAdapterBody(Body):
    model: str | None = None
    """The adapter's model. The default is the model that has this adapter, else the first served with adapters."""
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None
    """True replaces an adapter of the same name."""


class UnloadAdapterBody(Body):
    model: str | None = None
    lora_name: str
    lora_int_id: int | None = None
    """Ignored, as in vLLM."""


class AdaptersEndpoint:
    def __init__(self, parts: Parts) -> None:
        self._deployment = parts.deployment
        self._reader = parts.reader

    async def load(self, data: bytes, http: HttpRequest) -> Response:
        """Load an adapter from its files. After the answer, requests can name the adapter."""
        require_admin(http.scope)
        body = await self._reader.body(data, LoadAdapterBody, http.scope)
        served, adapters = self._served(body.model, body.lora_name)
        if self._deployment.is_taken(body.lora_name):
            what = "the name of a model, route or pipeline. Choose another name."
            raise invalid(f"'lora_name' is {shorten(body.lora_name)!r}, {what}", "lora_name")
        owner = self._deployment.adapter_owner(body.lora_name)
        if owner not in (None, served):
            raise invalid(
                f"'lora_name' is {shorten(body.lora_name)!r}, an adapter of another model. Choose another name.", "lora_name"
            )
        served.answerer()
        try:
            done = adapters.load(body.lora_name, Path(body.lora_path), may_replace=bool(body.load_inplace))
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await asyncio.wrap_future(done)  # threads of the registry read the files
        except TimeoutError:
            message = f"The adapter was not read in {LOAD_TIMEOUT_S:g} s; the server's log may say why."
            raise unavailable(message) from None
        except ConfigError as error:
            raise invalid(str(error), "lora_name") from None
        except ModelError as error:
            raise invalid(str(error), "lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, data: bytes, http: HttpRequest) -> Response:
        """Forget an adapter. If its files are in the folder of adapters, a request with its name loads it again."""
        require_admin(http.scope)
        body = await self._reader.body(data, UnloadAdapterBody, http.scope)
        _, adapters = self._served(body.model, body.lora_name)
        if not adapters.unload(body.lora_name):
            message = f"No adapter is called {shorten(body.lora_name)!r}."
            raise ApiError(404, message, code="model_not_found", param="lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _served(self, name: str | None, lora_name: str) -> tuple[ServedModel, Adapters]:
        """Return the model of this name, or else the adapter's, or the first served with adapters. Raises 404 and 400."""
        deployment = self._deployment
        owner = deployment.adapter_owner(lora_name) if name is None else find_for_admin(name, deployment)
        for served in deployment.served if owner is None else (owner,):
            if served.adapters is not None:
                return served, served.adapters
        what = "Nothing is served" if owner is None else f"{owner.name} is not served"
        message = f"{what} with adapters: that needs --lora-dir or --lora-modules."
        raise invalid(message, None if name is None else "model")
