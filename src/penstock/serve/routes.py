"""Chooses the model of a route: the first one, or the one that suits the question."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from penstock.deploy.deployment import Deployment
from penstock.deploy.routes import Learned, Route
from penstock.routes.questions import texts_in
from penstock.serve.agreement import Agreement
from penstock.serve.asking import KEPT_KEY, models_of
from penstock.serve.bodies import INLINE_MAX_BYTES, load_json
from penstock.serve.cascade import Trial
from penstock.serve.errors import model_not_found, stays_here, unavailable
from penstock.serve.questions import QuestionReader
from penstock.serve.routed import ROUTED_KEY, Routed

if TYPE_CHECKING:  # with an HTTP client, which few servers need
    from penstock.serve.upstream import Upstream


class RouteChooser:
    def __init__(self, deployment: Deployment, questions: QuestionReader, upstreams: Mapping[str, Upstream]) -> None:
        self._deployment, self._questions, self._upstreams = deployment, questions, upstreams

    async def choose(self, route: Route, data: bytes, http: HttpRequest) -> None:
        """Note the model for the question in this body. Raises `ModelAway` if the encoder is not loaded, and `ApiError`."""
        await self._keep_here(route, data, http)
        models, learned = models_of(route, self._deployment, http.scope), route.learned
        if not models and http.scope.get(KEPT_KEY):
            raise stays_here(route.name)
        if not models:  # a folder lost their files
            raise model_not_found(route.name, self._deployment.names)
        if len(models) == 1 or (learned is None and route.agreement is None):
            http.scope[ROUTED_KEY] = Routed(route.name, models[0], rest=(*models[1:],), bill=route.bill)
            return
        weak, strong = models
        # A model here refuses for good reasons; of another server anything may fail.
        after_strong = (weak,) if strong in self._upstreams else ()
        if learned is None:
            assert route.agreement is not None
            agreement = Agreement(route.agreement)
            http.scope[ROUTED_KEY] = Routed(route.name, weak, rest=(strong, *after_strong), trial=agreement, bill=route.bill)
            return
        read = await self._read(learned, data, http)
        if read is None:
            http.scope[ROUTED_KEY] = Routed(route.name, strong, "no question", rest=after_strong, bill=route.bill)
            return
        gain, cascade = learned.gain(*read), learned.route.cascade
        if cascade is not None and learned.route.tries(gain, learned.threshold):
            trial = Trial(cascade.window, partial(learned.gain, *read), learned.threshold, learned.note)
            http.scope[ROUTED_KEY] = Routed(route.name, weak, rest=(strong, *after_strong), trial=trial, bill=route.bill)
            return
        learned.note(gain)
        why = f"gain={gain:.3f}; threshold={learned.threshold:.3f}"
        model, rest = (strong, after_strong) if gain >= learned.threshold else (weak, (strong,))
        http.scope[ROUTED_KEY] = Routed(route.name, model, why, rest=rest, bill=route.bill)

    async def _keep_here(self, route: Route, data: bytes, http: HttpRequest) -> None:
        """Note which upstreams of the route must not see the request."""
        upstreams = [self._upstreams[name] for name in route.models if name in self._upstreams]
        if not upstreams:
            return

        def look() -> frozenset[str]:
            body = load_json(data)
            texts = [*texts_in(body)]
            return frozenset([one.config.name for one in upstreams if one.keeps_out(http, body, texts)])

        http.scope[KEPT_KEY] = await self._deployment.off_loop.run(len(data), look, limit=INLINE_MAX_BYTES)

    async def _read(self, learned: Learned, data: bytes, http: HttpRequest) -> tuple[bytes, str] | None:
        """Return the vector of the question in a body, and the question, or None if it has none."""
        question, embedder = await self._questions.read(data), learned.route.embedder
        if not question:
            return None
        states = await self._questions.embed(embedder, question, data, http)
        if len(states) != 4 * learned.route.by_question.width:
            raise unavailable(f"The route was fitted to vectors of another length than {embedder} has. Fit it anew.")
        return states, question
