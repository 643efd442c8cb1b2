"""The question in a request, and its vector: computed by an encoder of this server, with everybody else's texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request as HttpRequest

from penstock.deploy.off_loop import OffLoop
from penstock.deploy.running import RunningModel
from penstock.routes.questions import question_in
from penstock.serve.asking import Reader, claim_of, read_terms
from penstock.serve.bodies import INLINE_MAX_BYTES, load_json
from penstock.serve.errors import unavailable
from penstock.serve.http.checks import unless_gone
from penstock.serve.texts.call import TextsCall, Truncation
from penstock.serve.texts.desk import Desk, run

FIELDS = ("messages", "prompt", "input", "inputs")
"""Fields of bodies in which a question may be, in any API."""


class QuestionReader:
    def __init__(self, reader: Reader, desk_of: Callable[[RunningModel], Desk]) -> None:
        self._reader, self._desk_of = reader, desk_of

    @property
    def off_loop(self) -> OffLoop:
        return self._reader.deployment.off_loop

    async def read(self, data: bytes) -> str:
        """Return the question in a body; empty if it has none."""
        return await self.off_loop.run(len(data), partial(question_of, data), limit=INLINE_MAX_BYTES)

    async def embed(self, embedder: str, question: str, data: bytes, http: HttpRequest) -> bytes:
        """Return the vector of a body's question: float32, [width]. Raises `ModelAway`, `ApiError` and `Rejected`."""
        served = self._reader.deployment.find(embedder)
        if served is None:
            raise unavailable(f"A vector of the question is needed, and {embedder} is not there any more.")
        running = served.answerer()
        encoder = running.model.encoder
        if encoder is None:
            raise unavailable(f"A vector of the question is needed, and {embedder} is not an embedding model.")
        # A priority is the chosen model's to check.
        terms = read_terms(http.scope, running.clock.now_ns(), self._reader.config, is_priority_scheduled=True)
        call = TextsCall(
            running=running,
            terms=terms,
            texts=[encoder.default_prompt + question],
            name_of=lambda _: "model",
            truncation=Truncation(encoder.max_tokens),
            claim=claim_of(terms.owner.tenant, b"question" + data),
        )
        results = await unless_gone(http, run(call, self._desk_of(running)))
        return results.results[0].states


def question_of(data: bytes) -> str:
    """Return the user's last message, or the prompt, of a body in any API's shape. Empty if it has no text."""
    body = load_json(data)
    if not isinstance(body, dict):
        return ""
    return question_in(next((body[name] for name in FIELDS if body.get(name)), None))
