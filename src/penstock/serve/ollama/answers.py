"""`POST /api/chat` and `/api/generate`."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import fast_json
from penstock.serve.answering import answer_call
from penstock.serve.api import Parts
from penstock.serve.asking import find_allowed
from penstock.serve.errors import invalid
from penstock.serve.http.entries import note_model
from penstock.serve.ollama.read import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    chat,
    generate,
    keep,
    keep_ns,
    name_of,
)
from penstock.serve.shapes import utc


class OllamaEndpoint:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._deployment = parts.deployment

    async def chat(self, data: bytes, http: HttpRequest) -> Response:
        """Answer a conversation. Without messages, the model is loaded, or unloaded if `keep_alive` is 0."""
        body = await self._parts.reader.body(data, OllamaChatBody, http.scope)
        if not body.messages:
            return self._loaded(body, http, {"message": {"role": "assistant", "content": ""}})
        return await answer_call(data, http, partial(chat, body), self._parts.reader, self._parts.in_flight)

    async def generate(self, data: bytes, http: HttpRequest) -> Response:
        """Answer a prompt, through the chat template unless `raw`. Without a prompt, the model is loaded or unloaded."""
        body = await self._parts.reader.body(data, OllamaGenerateBody, http.scope)
        if not body.prompt and not body.suffix:
            return self._loaded(body, http, {"response": ""})
        return await answer_call(data, http, partial(generate, body), self._parts.reader, self._parts.in_flight)

    def _loaded(self, body: OllamaBody, http: HttpRequest, said: dict[str, Any]) -> Response:
        """Answer a request that only loads or unloads a model. Raises `ModelAway`."""
        served, _ = find_allowed(name_of(body.model, self._deployment), self._deployment, http.scope)
        leaves = keep_ns(body) == 0
        if not leaves:
            note_model(http.scope, "load", served.answerer().name)
        if not keep(body, served, self._deployment, http.scope) and leaves:
            raise invalid(
                "'keep_alive' is 0, but clients can't unload this model: that needs --idle-unload, and an admin's key if the "
                "server asks for keys. An admin can also POST /models/unload.",
                "keep_alive",
            )
        created_at = utc(self._deployment.sources.unix_time_s())
        reason = "unload" if leaves else "load"
        told = {"model": body.model, "created_at": created_at, **said, "done": True, "done_reason": reason}
        return Response(fast_json.dumps(told) + b"\n", media_type="application/json")
