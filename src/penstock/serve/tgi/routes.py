"""The API of text-generation-inference."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.http.checks import Wording
from penstock.serve.tgi.generate import TgiAnswer, TgiBody, TgiEvent, TgiFace, tgi_words


def _routes(parts: Parts) -> Sequence[Route]:
    tgi, root = TgiFace(parts.reader, parts.in_flight, parts.off_loop), "What the default model is for"
    return [
        Route("POST /generate", "Complete", tgi.generate, TgiBody, TgiAnswer, TgiEvent),
        Route("POST /generate_stream", "Complete as a stream", tgi.generate_stream, TgiBody, None, TgiEvent),
        Route("POST /", root, tgi.root, TgiBody, list[TgiAnswer], TgiEvent),
    ]


API = Api("text-generation-inference", _routes, Wording(tgi_words, paths="/ /generate /generate_stream"))
