"""Chooses the model of a route: the first one, or the one that suits the question.

A question's vector is computed by an encoder of this server, with everybody else's texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from starlette.requests import Request as HttpRequest

from penstock.deploy.routes import Learned, Route
from penstock.deploy.running import RunningModel
from penstock.serve.asking import ROUTED_KEY, Reader, claim_of, read_terms
from penstock.serve.bodies import INLINE_MAX_BYTES, load_json
from penstock.serve.errors import invalid
from penstock.serve.http.checks import add_header, unless_gone
from penstock.serve.texts.call import TextsCall, Truncation
from penstock.serve.texts.desk import Desk, run

MAX_QUESTION_CHARS = 16_384
"""Characters of a question that count, the last ones: more than an encoder reads."""
_FIELDS = ("messages", "prompt", "input", "inputs")


class RouteChooser:
    def __init__(self, reader: Reader, desk_of: Callable[[RunningModel], Desk]) -> None:
        self._reader, self._desk_of = reader, desk_of

    async def choose(self, route: Route, data: bytes, http: HttpRequest) -> None:
        """Note the model for the question in this body. Raises `ModelAway` if the encoder is not loaded, and `ApiError`."""
        if route.learned is None:
            http.scope[ROUTED_KEY] = route.name, route.models[0]
            return
        gain = await self._gain(route.name, route.learned, data, http)
        weak, strong = route.models
        model = strong if gain >= route.learned.threshold else weak
        http.scope[ROUTED_KEY] = route.name, model
        told = f"{route.name}; model={model}; gain={gain:.3f}; threshold={route.learned.threshold:.3f}"
        add_header(http.scope, b"x-route", told.encode("ascii", "backslashreplace"))

    async def _gain(self, name: str, learned: Learned, data: bytes, http: HttpRequest) -> float:
        """Return what the strong model is expected to gain on the question in a body."""
        deployment, config, scope = self._reader.deployment, self._reader.config, http.scope
        question = await deployment.off_loop.run(len(data), partial(question_of, data), limit=INLINE_MAX_BYTES)
        if not question:
            raise invalid(f"The route {name} chooses a model by the text of a question, and this has none.", "model")
        embedder = learned.route.embedder
        served = deployment.find(embedder)
        assert served is not None, "routes are checked at the start"
        running = served.answerer()
        encoder = running.model.encoder
        if encoder is None:
            raise invalid(f"The route {name} needs {embedder}, which is no embedding model.", "model")
        now_ns, by_priority = running.clock.now_ns(), running.model.is_priority_scheduled
        terms = read_terms(scope, now_ns, config, is_priority_scheduled=by_priority)
        call = TextsCall(
            running=running,
            terms=terms,
            texts=[encoder.default_prompt + question],
            name_of=lambda _: "model",
            truncation=Truncation(encoder.max_tokens),
            claim=claim_of(terms.owner.tenant, b"route" + data),
        )
        results = await unless_gone(http, run(call, self._desk_of(running)))
        return learned.gain(results.results[0].states, question)


def question_of(data: bytes) -> str:
    """Return the text of the last message of the user, or of the prompt, in any API's body. Empty if there is none."""
    body = load_json(data)
    if not isinstance(body, dict):
        return ""
    found = next((body[name] for name in _FIELDS if body.get(name)), None)
    return " ".join(_texts(found))[-MAX_QUESTION_CHARS:].strip()


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
