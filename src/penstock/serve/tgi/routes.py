"""The API of text-generation-inference."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.http.checks import Wording
from penstock.serve.tgi.generate import TgiAnswer, TgiBody, TgiEvent, generate, generate_stream, root, tgi_words


def _routes(parts: Parts) -> Sequence[Route]:
    call = parts.call_route
    return [
        call("POST /generate", "Complete", TgiBody, generate, TgiAnswer, TgiEvent),
        call("POST /generate_stream", "Complete as a stream", TgiBody, generate_stream, None, TgiEvent),
        call("POST /", "What the default model is for", TgiBody, root, list[TgiAnswer], TgiEvent),
    ]


API = Api("text-generation-inference", _routes, Wording(tgi_words, paths="/ /generate /generate_stream"))
