"""`POST /v1/chat/completions` and `/v1/completions`: read, run, write. The two differ in `read` and in `write` alone.

`GET /v1/models` and `/v1/models/{id}`: what is served, in OpenAI's shape with vLLM's `max_model_len` and `root`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import OffLoop
from penstock.deploy.served import ServedModel
from penstock.serve.errors import ApiError, from_rejected, renamed
from penstock.serve.http.checks import entry_of
from penstock.serve.http.connection import unless_gone
from penstock.serve.openai.call import Call
from penstock.serve.openai.in_flight import InFlight
from penstock.serve.openai.loading import FolderWatch
from penstock.serve.openai.read import Reader, find_allowed, may_ask
from penstock.serve.openai.run import run
from penstock.serve.openai.schemas import INLINE_MAX_BYTES
from penstock.serve.openai.write import ChatWriter, CompletionWriter, NewWriter, respond
from penstock.types.errors import Rejected

Read = Callable[[bytes, Scope], tuple[Call, NewWriter]]
"""A function that makes a call of a body and the request's headers, and says who writes the answer. Raises `ApiError`."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class CallEndpoint:
    """Answers a body of any API that asks a model to write. Its `Read` and its `Writer` alone know which API it is."""

    def __init__(self, reader: Reader, in_flight: InFlight, off_loop: OffLoop) -> None:
        """`off_loop` is for large bodies, which have to be read before it is known which model they ask."""
        self.reader = reader
        self._in_flight = in_flight
        self._off_loop = off_loop

    async def answer(self, data: bytes, http: HttpRequest, read: Read, names: Mapping[str, str] = NO_NAMES) -> Response:
        """The response. Raises `ApiError`. `names`: what errors call OpenAI's fields, where the client's are other ones."""
        try:
            return await self._answer(data, http, read)
        except (ApiError, Rejected) as error:
            error.__traceback__ = None  # it has this frame, which has it
            raise renamed(from_rejected(error) if isinstance(error, Rejected) else error, names) from None

    async def _answer(self, data: bytes, http: HttpRequest, read: Read) -> Response:
        call, new_writer = await self._off_loop.run(len(data), lambda: read(data, http.scope), limit=INLINE_MAX_BYTES)
        if (entry := entry_of(http.scope)) is not None:
            entry.model = call.answer.model_name
        opened = await unless_gone(http, run(call, self._in_flight))
        return await respond(http, opened, new_writer)


class ChatEndpoint(CallEndpoint):
    async def create(self, data: bytes, http: HttpRequest) -> Response:
        """Answer a conversation. The model's own chat template turns the messages into its prompt."""
        return await self.answer(data, http, lambda data, scope: (self.reader.chat(data, scope), ChatWriter))


class CompletionsEndpoint(CallEndpoint):
    async def create(self, data: bytes, http: HttpRequest) -> Response:
        """Continue one or more prompts, given as text or token ids."""
        return await self.answer(data, http, lambda data, scope: (self.reader.completion(data, scope), CompletionWriter))


class ModelsEndpoint:
    def __init__(self, deployment: Deployment, folder: FolderWatch) -> None:
        self._deployment = deployment
        self._folder = folder

    async def list(self, http: HttpRequest) -> dict[str, Any]:
        """The names under which models are served, and those of adapters that were named or asked for.

        A key that opens some models alone sees those.
        """
        await self._folder.look()
        cards: list[dict[str, Any]] = []
        for served in [one for one in self._deployment.served if one.is_there]:
            adapters = () if served.adapters is None else served.adapters.registered()
            found = [(name, _card(name, served)) for name in served.names]
            found += [(one.name, _adapter_card(one.name, served, one.path)) for one in adapters]
            cards += [card for name, card in found if may_ask(http.scope, served, name, self._deployment)]
        return {"object": "list", "data": cards}

    async def get(self, http: HttpRequest) -> dict[str, Any]:
        """The model with this name."""
        model_id = http.path_params["model_id"]
        served, adapter = find_allowed(model_id, self._deployment, http.scope)
        if adapter is None or served.adapters is None:
            return _card(model_id, served)
        return _adapter_card(model_id, served, served.adapters.path(adapter))


def _adapter_card(name: str, served: ServedModel, path: Path | None) -> dict[str, Any]:
    """An adapter's, in vLLM's form: `parent` is its model."""
    return _card(name, served) | {"root": str(path), "parent": served.name}


def _card(name: str, served: ServedModel) -> dict[str, Any]:
    """Facts that only a load can tell are null before the first one."""
    info = served.info
    return {
        "id": name,
        "object": "model",
        "created": 0 if info is None else info.created_unix_s,
        "owned_by": "penstock",
        "root": name if info is None else info.root,
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
        "status": {"value": served.state.value} | ({"cause": served.failure} if served.failure else {}),
    }
