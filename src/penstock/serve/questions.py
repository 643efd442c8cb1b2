"""Finds the question in a request, and has this server's encoders embed it or score passages against it.

The texts share the encoders' batches with those of other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from starlette.requests import Request as HttpRequest

from penstock.deploy.running import RunningModel
from penstock.routes.questions import question_in
from penstock.serve.asking import Reader
from penstock.serve.bodies import load_json
from penstock.serve.errors import misconfigured, unavailable
from penstock.serve.http.checks import unless_gone
from penstock.serve.terms import claim_of, read_terms
from penstock.serve.texts.call import TextInput, TextResult, TextsCall, Truncation
from penstock.serve.texts.desk import Desk, run
from penstock.serve.texts.pairs import Pairs
from penstock.serve.texts.read import prompt_for
from penstock.types.encoder import EncoderInfo, Task

FIELDS = ("messages", "prompt", "input", "inputs")
"""Fields of bodies in which a question may be, in any API."""


class QuestionReader:
    def __init__(self, reader: Reader, desk_of: Callable[[RunningModel], Desk]) -> None:
        self.reader, self._desk_of = reader, desk_of
        self._probes: WeakKeyDictionary[RunningModel, bytes] = WeakKeyDictionary()

    async def read(self, data: bytes, http: HttpRequest) -> str:
        """Return the question in a body; empty if it has none."""
        return await self.reader.parse(data, partial(question_of, data), http.scope)

    async def embed(
        self, embedder: str, question: str, data: bytes, http: HttpRequest, *, prompt_names: Sequence[str] = ()
    ) -> bytes:
        """Return the vector of a body's question: float32, [width]. Raises `ModelAway`, `ApiError` and `Rejected`.

        `prompt_names`: of the model's prompts, the first of these is put before the question; without any, the default one.
        """
        running, encoder = self._encoder(embedder, Task.EMBED, "an embedding model")
        text = prompt_for(encoder, *prompt_names) + question
        [result] = await unless_gone(http, self._read(running, encoder, [text], b"question" + data, http))
        return result.states

    async def probe(self, embedder: str, data: bytes, http: HttpRequest) -> bytes:
        """Return the vector of `PROBE` by the model that runs now. The tenant's limits do not apply. Raises as `embed`."""
        from penstock.search.index import PROBE  # with NumPy

        running, encoder = self._encoder(embedder, Task.EMBED, "an embedding model")
        if running not in self._probes:
            call = self._read(running, encoder, [prompt_for(encoder) + PROBE], b"probe" + data, http, is_limited=False)
            [result] = await unless_gone(http, call)
            self._probes[running] = result.states
        return self._probes[running]

    async def score(self, reranker: str, question: str, passages: Sequence[str], data: bytes, http: HttpRequest) -> list[float]:
        """Return how well each passage answers a body's question. Cancel it if the client leaves. Raises as `embed`.

        The tenant's limits apply to the question's embedding and to the answer, not to these pairs.
        """
        running, encoder = self.reranker(reranker)
        pairs = Pairs([question], passages, _name, _name)
        results = await self._read(running, encoder, pairs.texts(encoder), b"passages" + data, http, is_limited=False)
        return pairs.scores(encoder, results)

    def reranker(self, name: str) -> tuple[RunningModel, EncoderInfo]:
        """Return the reranker of this name. Raises `ModelAway` if it is not loaded, and `ApiError`."""
        return self._encoder(name, Task.RERANK, "a reranker")

    def _encoder(self, name: str, task: Task, kind: str) -> tuple[RunningModel, EncoderInfo]:
        served = self.reader.deployment.find(name)
        if served is None:
            raise unavailable(f"{name}, {kind} that the request needs, is no longer served.")
        running = served.answerer()
        encoder = running.model.encoder
        if encoder is None or encoder.task is not task:
            raise misconfigured(f"{name} should be {kind}, but is not. Name another model in the route or pipeline.")
        return running, encoder

    async def _read(
        self,
        running: RunningModel,
        encoder: EncoderInfo,
        texts: Sequence[TextInput],
        claimed: bytes,
        http: HttpRequest,
        *,
        is_limited: bool = True,
    ) -> list[TextResult]:
        # A priority is the chosen model's to check.
        terms = read_terms(http.scope, running.clock.now_ns(), self.reader.config, is_priority_scheduled=True)
        call = TextsCall(
            running=running,
            terms=replace(terms, is_limited=is_limited),
            texts=texts,
            name_of=_name,
            truncation=Truncation(encoder.max_tokens),
            claim=claim_of(terms.owner.tenant, claimed),
        )
        return (await run(call, self._desk_of(running))).results


def _name(_index: int) -> str:
    """Return the field at fault if one of the texts can't be read."""
    return "model"


def question_of(data: bytes) -> str:
    """Return the user's last message, or the prompt, of a body in any API's shape. Empty if it has no text."""
    body = load_json(data)
    if not isinstance(body, dict):
        return ""
    return question_in(next((body[name] for name in FIELDS if body.get(name)), None))
