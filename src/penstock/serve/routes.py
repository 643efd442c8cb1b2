"""Chooses the model of a route: the first one, or the one that suits the question.

A question's vector is computed by an encoder of this server, with everybody else's texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from starlette.requests import Request as HttpRequest

from penstock.deploy.routes import Learned, Route
from penstock.deploy.running import RunningModel
from penstock.routes import MAX_QUESTION_CHARS
from penstock.serve.asking import ROUTED_KEY, Reader, Routed, claim_of, models_of, read_terms
from penstock.serve.bodies import INLINE_MAX_BYTES, load_json
from penstock.serve.errors import model_not_found, unavailable
from penstock.serve.http.checks import unless_gone
from penstock.serve.texts.call import TextsCall, Truncation
from penstock.serve.texts.desk import Desk, run
from penstock.types.errors import ConfigError

_FIELDS = ("messages", "prompt", "input", "inputs")


class RouteChooser:
    def __init__(self, reader: Reader, desk_of: Callable[[RunningModel], Desk]) -> None:
        self._reader, self._desk_of = reader, desk_of

    async def choose(self, route: Route, data: bytes, http: HttpRequest) -> None:
        """Note the model for the question in this body. Raises `ModelAway` if the encoder is not loaded, and `ApiError`."""
        models, learned = models_of(route, self._reader.deployment, http.scope), route.learned
        if not models:  # a folder lost their files
            raise model_not_found(route.name, self._reader.deployment.names)
        if learned is None or len(models) == 1:
            http.scope[ROUTED_KEY] = Routed(route.name, models[0], has_next=len(models) > 1)
            return
        weak, strong = models
        gain = await self._gain(learned, data, http)
        if gain is None:
            http.scope[ROUTED_KEY] = Routed(route.name, strong, "no question")
            return
        why = f"gain={gain:.3f}; threshold={learned.threshold:.3f}"
        http.scope[ROUTED_KEY] = Routed(route.name, strong if gain >= learned.threshold else weak, why)

    async def _gain(self, learned: Learned, data: bytes, http: HttpRequest) -> float | None:
        """Return what the strong model is expected to gain on the question in a body, or None if it has none."""
        deployment, config, scope = self._reader.deployment, self._reader.config, http.scope
        question = await deployment.off_loop.run(len(data), partial(question_of, data), limit=INLINE_MAX_BYTES)
        if not question:
            return None
        embedder = learned.route.embedder
        served = deployment.find(embedder)
        assert served is not None, "routes are checked at the start"
        running = served.answerer()
        encoder = running.model.encoder
        if encoder is None:
            raise unavailable(f"The route needs {embedder}, which is not an embedding model.")
        # A priority is the chosen model's to check.
        terms = read_terms(scope, running.clock.now_ns(), config, is_priority_scheduled=True)
        call = TextsCall(
            running=running,
            terms=terms,
            texts=[encoder.default_prompt + question],
            name_of=lambda _: "model",
            truncation=Truncation(encoder.max_tokens),
            claim=claim_of(terms.owner.tenant, b"route" + data),
        )
        results = await unless_gone(http, run(call, self._desk_of(running)))
        try:
            return learned.gain(results.results[0].states, question)
        except ConfigError as error:
            raise unavailable(f"The route can't choose a model: {error}") from None


def question_of(data: bytes) -> str:
    """Return the user's last message, or the prompt, of a body in any API's shape. Empty if it has no text."""
    body = load_json(data)
    if not isinstance(body, dict):
        return ""
    found = next((body[name] for name in _FIELDS if body.get(name)), None)
    return " ".join(_texts(found)).strip()[:MAX_QUESTION_CHARS]


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of a prompt, of a list of them, or of the last message of the user in a list of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(value.get("text") or value.get("content"))
    elif isinstance(value, list):
        users = [entry for entry in value if isinstance(entry, dict) and entry.get("role") == "user"]
        for entry in users[-1:] or value:
            yield from _texts(entry)
