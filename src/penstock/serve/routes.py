"""Chooses the model of a route: the first one, or the one that suits the question.

A question's vector is computed by an encoder of this server, with everybody else's texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from penstock.deploy.routes import Learned, Route
from penstock.deploy.running import RunningModel
from penstock.routes.questions import question_in, texts_in
from penstock.serve.asking import KEPT_KEY, ROUTED_KEY, Reader, Routed, claim_of, models_of, read_terms
from penstock.serve.bodies import INLINE_MAX_BYTES, load_json
from penstock.serve.cascade import Trial
from penstock.serve.errors import model_not_found, stays_here, unavailable
from penstock.serve.http.checks import unless_gone
from penstock.serve.texts.call import TextsCall, Truncation
from penstock.serve.texts.desk import Desk, run

if TYPE_CHECKING:  # with an HTTP client, which few servers need
    from penstock.serve.upstream import Upstream

_FIELDS = ("messages", "prompt", "input", "inputs")


class RouteChooser:
    def __init__(self, reader: Reader, desk_of: Callable[[RunningModel], Desk], upstreams: Mapping[str, Upstream]) -> None:
        self._reader, self._desk_of, self._upstreams = reader, desk_of, upstreams

    async def choose(self, route: Route, data: bytes, http: HttpRequest) -> None:
        """Note the model for the question in this body. Raises `ModelAway` if the encoder is not loaded, and `ApiError`."""
        await self._keep_here(route, data, http)
        models, learned = models_of(route, self._reader.deployment, http.scope), route.learned
        if not models and http.scope.get(KEPT_KEY):
            raise stays_here(route.name)
        if not models:  # a folder lost their files
            raise model_not_found(route.name, self._reader.deployment.names)
        if learned is None or len(models) == 1:
            http.scope[ROUTED_KEY] = Routed(route.name, models[0], has_next=len(models) > 1)
            return
        weak, strong = models
        read = await self._read(learned, data, http)
        if read is None:
            http.scope[ROUTED_KEY] = Routed(route.name, strong, "no question")
            return
        gain, cascade = learned.gain(*read), learned.route.cascade
        if cascade is not None and learned.route.tries(gain, learned.threshold):
            trial = Trial(cascade.window, partial(learned.gain, *read), learned.threshold)
            http.scope[ROUTED_KEY] = Routed(route.name, weak, has_next=True, trial=trial)
            return
        why = f"gain={gain:.3f}; threshold={learned.threshold:.3f}"
        is_strong = gain >= learned.threshold
        http.scope[ROUTED_KEY] = Routed(route.name, strong if is_strong else weak, why, has_next=not is_strong)

    async def _keep_here(self, route: Route, data: bytes, http: HttpRequest) -> None:
        """Note which upstreams of the route must not see the request."""
        upstreams = [self._upstreams[name] for name in route.models if name in self._upstreams]
        if not upstreams:
            return

        def look() -> frozenset[str]:
            texts = [*texts_in(load_json(data))]
            return frozenset([one.config.name for one in upstreams if one.keeps_out(http, texts)])

        http.scope[KEPT_KEY] = await self._reader.deployment.off_loop.run(len(data), look, limit=INLINE_MAX_BYTES)

    async def _read(self, learned: Learned, data: bytes, http: HttpRequest) -> tuple[bytes, str] | None:
        """Return the vector of the question in a body, and the question, or None if it has none."""
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
        states = results.results[0].states
        if len(states) != 4 * learned.route.by_question.width:
            raise unavailable(f"The route was fitted to vectors of another length than {embedder} has. Fit it anew.")
        return states, question


def question_of(data: bytes) -> str:
    """Return the user's last message, or the prompt, of a body in any API's shape. Empty if it has no text."""
    body = load_json(data)
    if not isinstance(body, dict):
        return ""
    return question_in(next((body[name] for name in _FIELDS if body.get(name)), None))
