"""Chooses a route's model: the first one, the one that suits the question, or a trial or ensemble that decides by answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from penstock.config.routes import AgreementConfig, EnsembleConfig, VerifierConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.routes import Learned, Route
from penstock.routes.questions import texts_in
from penstock.serve.asking import models_of, visible_names
from penstock.serve.bodies import load_json
from penstock.serve.course import Routed, course_of
from penstock.serve.ensembles import Ensemble
from penstock.serve.errors import model_not_found, stays_here, unavailable
from penstock.serve.questions import QuestionReader
from penstock.serve.terms import claim_of
from penstock.serve.trials import Agreement, FirstTokens, Odds, Verification
from penstock.serve.verdicts import Verdicts

if TYPE_CHECKING:  # with an HTTP client, which few servers need
    from penstock.serve.upstream import Upstream


class RouteChooser:
    def __init__(
        self, deployment: Deployment, questions: QuestionReader, verdicts: Verdicts, upstreams: Mapping[str, Upstream]
    ) -> None:
        self._deployment, self._questions, self._verdicts = deployment, questions, verdicts
        self._upstreams = upstreams

    async def choose(self, route: Route, name: str, data: bytes, http: HttpRequest) -> None:
        """Choose the route's model for this body. `name`: the name in the request, of the route or of a pipeline that uses it.

        Raises `ModelAway` if a model that helps to choose is not loaded, and `ApiError`.
        """
        await self._keep_here(route, data, http)
        course = course_of(http.scope)
        models = models_of(route, self._deployment, http.scope, name)
        if not models and course.kept_from:
            raise stays_here(route.name)
        if not models:  # a folder lost their files
            raise model_not_found(route.name, visible_names(self._deployment, http.scope))
        if course.decided is not None and course.decided.asked == name and course.decided.model in models:
            course.routed = course.decided
            return
        routed = Routed(route.name, models[0], rest=(*models[1:],), bill=route.bill, asked=name)
        if len(models) > 1:
            if route.learned is not None:
                routed = await self._by_question(route.learned, routed, data, http)
            elif isinstance(route.by, EnsembleConfig):
                routed = await self._by_ensemble(route.by, routed, data, http)
            elif route.by is not None:
                routed = self._by_confidence(route.by, routed, http)
        course.routed = routed

    def _after_strong(self, routed: Routed) -> tuple[str, ...]:
        """Return the models to ask if the strong model refuses: the weak one, if the strong one is an upstream."""
        [strong] = routed.rest
        return (routed.model,) if strong in self._upstreams else ()

    async def _by_question(self, learned: Learned, routed: Routed, data: bytes, http: HttpRequest) -> Routed:
        weak, [strong], after_strong = routed.model, routed.rest, self._after_strong(routed)
        read = await self._read(learned, data, http)
        if read is None:
            return replace(routed, model=strong, why="no question", rest=after_strong)
        gain, cascade = learned.gain(*read), learned.route.cascade
        if cascade is not None and learned.route.tries(gain, learned.threshold):
            trial = FirstTokens(cascade.window, partial(learned.gain, *read), learned.threshold, learned.note)
            return replace(routed, rest=(strong, *after_strong), trial=trial)
        learned.note(gain)
        why = f"gain={gain:.3f}; threshold={learned.threshold:.3f}"
        model, rest = (strong, after_strong) if gain >= learned.threshold else (weak, (strong,))
        return replace(routed, model=model, why=why, rest=rest)

    def _by_confidence(self, by: AgreementConfig | VerifierConfig, routed: Routed, http: HttpRequest) -> Routed:
        trial = Agreement(by) if isinstance(by, AgreementConfig) else Verification(self._odds(by.verifier, http), by.least)
        return replace(routed, rest=(*routed.rest, *self._after_strong(routed)), trial=trial)

    async def _by_ensemble(self, by: EnsembleConfig, routed: Routed, data: bytes, http: HttpRequest) -> Routed:
        question, claimed = "", b""
        if by.reranker is not None:
            self._questions.reranker(by.reranker)
            if not (question := await self._questions.read(data, http)):
                return replace(routed, why="no question")
            claimed = claim_of("", data)  # the body itself would be kept until the answer has been sent
        ensemble = Ensemble(
            by,
            (routed.model, *routed.rest),
            odds=self._odds(by.judge or "", http),
            score=lambda texts: self._questions.score(by.reranker or "", question, texts, claimed, http),
        )
        return replace(routed, ensemble=ensemble, rest=())

    def _odds(self, judge: str, http: HttpRequest) -> Odds:
        """Return a function that has `judge` rate answers.

        Raises `ModelAway` now, before any answer is generated, if the judge is not loaded.
        """
        if judge:
            self._verdicts.check_there(judge)
        return partial(self._verdicts.odds, judge, http)

    async def _keep_here(self, route: Route, data: bytes, http: HttpRequest) -> None:
        """Note which upstreams of the route must not see the request."""
        upstreams = [self._upstreams[name] for name in route.models if name in self._upstreams]
        if not upstreams:
            return

        def look() -> frozenset[str]:
            body = load_json(data)
            texts = [*texts_in(body)]
            return frozenset([one.config.name for one in upstreams if one.keeps_out(http, body, texts)])

        course_of(http.scope).kept_from = await self._questions.reader.parse(data, look, http.scope)

    async def _read(self, learned: Learned, data: bytes, http: HttpRequest) -> tuple[bytes, str] | None:
        """Return the vector of the question in a body, and the question, or None if it has none."""
        question, embedder = await self._questions.read(data, http), learned.route.embedder
        if not question:
            return None
        states = await self._questions.embed(embedder, question, data, http)
        if len(states) != 4 * learned.route.by_question.width:
            raise unavailable(
                f"The route was fitted to vectors of a different length than those of {embedder}. Fit it again "
                "(`penstock route fit`)."
            )
        return states, question
