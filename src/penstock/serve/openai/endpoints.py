"""`POST /v1/chat/completions` and `/v1/completions`: read, run, write. The two differ in `read` and in `write` alone.

`GET /v1/models` and `/v1/models/{id}`: what is served, in OpenAI's shape with vLLM's `max_model_len` and `root`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.deploy.deployment import Deployment
from penstock.deploy.off_loop import OffLoop, give_way
from penstock.deploy.served import ServedModel
from penstock.serve.calls.call import Call
from penstock.serve.calls.in_flight import InFlight
from penstock.serve.calls.run import run
from penstock.serve.errors import ApiError, as_api_error, renamed
from penstock.serve.http.checks import entry_of
from penstock.serve.http.connection import unless_gone
from penstock.serve.openai.loading import FolderWatch
from penstock.serve.openai.read import Reader, find_allowed, may_ask
from penstock.serve.openai.schemas import INLINE_MAX_BYTES
from penstock.serve.openai.write import ChatWriter, CompletionWriter, NewWriter, respond
from penstock.types.errors import Rejected

Read = Callable[[bytes, Scope], tuple[Call, NewWriter]]
"""A function that makes a call of a body and the request's headers, and says who writes the answer. Raises `ApiError`."""
LISTED_AT_ONCE = 128
"""Names of models that are told without giving way to other threads: half a millisecond."""
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
            raise renamed(as_api_error(error), names) from None

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


@dataclass(frozen=True, slots=True)
class Listed:
    """A name that clients may ask for."""

    name: str
    served: ServedModel
    path: Path | None = None
    """The folder or file of an adapter."""
    is_adapter: bool = False

    def card(self) -> dict[str, Any]:
        """The name's facts. Those that only a load can tell are null before the first one. An adapter's are in vLLM's form."""
        served, info = self.served, self.served.info
        root = self.path.name if self.path is not None else self.name if info is None else info.root
        return {
            "id": self.name,
            "object": "model",
            "created": 0 if info is None else info.created_unix_s,
            "owned_by": "penstock",
            "root": root,
            "parent": served.name if self.is_adapter else None,
            "max_model_len": None if info is None else info.max_model_len,
            "task": None if info is None else "generate" if info.encoder is None else info.encoder.task,
            "status": {"value": served.state.value} | ({"cause": served.failure} if served.failure else {}),
        }


class ModelsEndpoint:
    def __init__(self, deployment: Deployment, folder: FolderWatch) -> None:
        self._deployment = deployment
        self._folder = folder

    async def list(self, http: HttpRequest) -> Response:
        """The names under which models are served, and those of adapters that were named or asked for.

        A key that opens some models alone sees those.
        """
        return await self.tell(http, _written)

    async def tell(self, http: HttpRequest, write: Callable[[Sequence[Listed]], bytes]) -> Response:
        """The answer that `write` makes of the list, in a thread: adapters may have a hundred thousand names."""
        await self._folder.look()
        data = await asyncio.to_thread(lambda: write(self._listed(http.scope)))
        return Response(data, media_type="application/json")

    def _listed(self, scope: Scope) -> Sequence[Listed]:
        found: list[Listed] = []
        for served in [one for one in self._deployment.served if one.is_there]:
            found += [Listed(name, served) for name in served.names if may_ask(scope, served, name, self._deployment)]
            if served.adapters is None:
                continue
            for index, one in enumerate(served.adapters.registered()):
                if may_ask(scope, served, one.name, self._deployment):
                    found.append(Listed(one.name, served, one.path, is_adapter=True))
                if index % LISTED_AT_ONCE == 0:
                    give_way()
        return found

    async def get(self, http: HttpRequest) -> dict[str, Any]:
        """The model with this name."""
        model_id = http.path_params["model_id"]
        served, adapter = find_allowed(model_id, self._deployment, http.scope)
        if adapter is None or served.adapters is None:
            return Listed(model_id, served).card()
        return Listed(model_id, served, served.adapters.path(adapter), is_adapter=True).card()


def _written(listed: Sequence[Listed]) -> bytes:
    pieces: list[bytes] = []
    for begin in range(0, len(listed), LISTED_AT_ONCE):
        pieces.append(orjson.dumps([one.card() for one in listed[begin : begin + LISTED_AT_ONCE]])[1:-1])
        give_way()
    return b'{"object":"list","data":[%s]}' % b",".join(pieces)
