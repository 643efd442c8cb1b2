"""`POST /v1/chat/completions` and `/v1/completions`: read, run, write. The two differ in `read` and in `write` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.calls.call import Call
from penstock.calls.in_flight import InFlight
from penstock.calls.run import run
from penstock.deploy.off_loop import OffLoop
from penstock.serve.bodies import INLINE_MAX_BYTES
from penstock.serve.errors import ApiError, as_api_error, renamed
from penstock.serve.http.checks import entry_of
from penstock.serve.http.exchange import unless_gone
from penstock.serve.openai.read import Reader
from penstock.serve.openai.write import ChatWriter, CompletionWriter
from penstock.serve.streams import NewWriter, respond
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
