"""The API of text-generation-inference."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.http.checks import Wording
from penstock.serve.tgi.generate import TgiAnswer, TgiBody, TgiEvent, generate, generate_stream, root, tgi_words


def _routes(parts: Parts) -> Sequence[Route]:
    answers, title = parts.calls.answers, "What the default model is for"
    return [
        Route("POST /generate", "Complete", answers(TgiBody, generate), TgiBody, TgiAnswer, TgiEvent),
        Route("POST /generate_stream", "Complete as a stream", answers(TgiBody, generate_stream), TgiBody, None, TgiEvent),
        Route("POST /", title, answers(TgiBody, root), TgiBody, list[TgiAnswer], TgiEvent),
    ]


API = Api("text-generation-inference", _routes, Wording(tgi_words, paths="/ /generate /generate_stream"))
