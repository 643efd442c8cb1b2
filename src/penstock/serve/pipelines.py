"""Fills a pipeline's prompt template with the passages that its index has for the question, before the model runs.

Questions and the pairs for a reranker share batches with other clients' texts. Questions that arrive during a search wait, and
are searched for together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.requests import Request as HttpRequest

from penstock import fast_json
from penstock.config.pipelines import PipelineConfig
from penstock.deploy.pipelines import Pipeline
from penstock.routes.questions import TEXT_KEYS, question_in
from penstock.serve.bodies import load_json
from penstock.serve.course import course_of
from penstock.serve.errors import invalid, unavailable
from penstock.serve.http.checks import add_header, unless_gone
from penstock.serve.questions import FIELDS, QuestionReader
from penstock.serve.texts.read import QUERY_PROMPTS
from penstock.serve.trials import Check
from penstock.serve.verdicts import Verdicts
from penstock.types.errors import ConfigError

if TYPE_CHECKING:  # with NumPy
    from penstock.search.index import Hit, Reader


MAX_HEADER_BYTES = 4000
"""Clients and proxies refuse longer headers."""
MAX_TOGETHER = 16
"""Most questions of one search, which has a score for each question and passage in memory."""


class PipelineFiller:
    def __init__(self, questions: QuestionReader, verdicts: Verdicts) -> None:
        self._questions, self._verdicts = questions, verdicts
        self._searchers: dict[str, Searcher] = {}

    async def fill(self, pipeline: Pipeline, data: bytes, http: HttpRequest) -> bytes:
        """Return the body with the template in place of the question. Raises `ModelAway`, `ApiError` and `Rejected`.

        A body with nothing but results of tools is returned unchanged: the response that it continues has the sources.
        """
        config = pipeline.config
        question = await self._questions.read(data, http)
        if not question and not await self._questions.reader.parse(data, partial(_has_only_results, data), http.scope):
            raise invalid(f"{config.name} answers questions from documents, but the request contains no text.", "messages")
        course = course_of(http.scope)
        hits = course.hits
        if hits is None and question:
            hits = course.hits = await self._search(pipeline, question, data, http)
        if config.check is not None:  # before reranking: if the check's model must be loaded, all of this is repeated
            self._verdicts.check_there(config.check.model)
            # Truncation would drop the beginning, where the sources are, and a check must not judge without them.
            odds = partial(self._verdicts.odds, config.check.model, http, truncates=False)
            course.check = Check(config.name, config.check, odds)
        if hits is None:
            return data
        if (reranker := config.reranker) is not None and hits:
            passages = [hit.as_read for hit in hits]
            scores = await unless_gone(http, self._questions.score(reranker.model, question, passages, data, http))
            best = sorted(range(len(hits)), key=lambda number: -scores[number])
            hits = [hits[number] for number in best[: config.top]]
        add_header(http.scope, b"x-sources", _names(hits).encode("ascii"))
        fill = partial(_filled, data, config, hits)
        return await self._questions.reader.parse(data, fill, http.scope)

    async def _search(self, pipeline: Pipeline, question: str, data: bytes, http: HttpRequest) -> list[Hit]:
        config, embedder = pipeline.config, pipeline.reader.embedder
        num_found = config.top if config.reranker is None else config.reranker.candidates
        searcher = self._searchers.setdefault(config.name, Searcher(pipeline.reader, num_found))
        states = await self._questions.embed(embedder, question, data, http, prompt_names=QUERY_PROMPTS)
        pipeline.reader.probe = await self._questions.probe(embedder, data, http)
        try:
            return await unless_gone(http, searcher.find(states))
        except ConfigError as error:
            raise unavailable(f"{config.name} can't search: {error}") from None


class Searcher:
    """Searches for the questions that wait, up to `MAX_TOGETHER` at once, in a thread. For one event loop."""

    def __init__(self, reader: Reader, num_hits: int) -> None:
        self._reader = reader
        self._num_hits = num_hits
        self._waiting: list[tuple[bytes, asyncio.Future[list[Hit]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def find(self, states: bytes) -> list[Hit]:
        """Return the nearest passages. `states`: of the question, float32, [width]. Raises ConfigError."""
        found: asyncio.Future[list[Hit]] = asyncio.get_running_loop().create_future()
        self._waiting.append((states, found))
        if self._task is None:  # a task of its own goes on if its first asker leaves
            self._task = asyncio.create_task(self._search())
        return await found

    async def _search(self) -> None:
        try:
            while self._waiting:
                together, self._waiting = self._waiting[:MAX_TOGETHER], self._waiting[MAX_TOGETHER:]
                try:
                    results = await asyncio.to_thread(self._nearest, [states for states, _ in together])
                except Exception as error:
                    for _, found in together:
                        if not found.done():
                            found.set_exception(error)
                    continue
                for (_, found), hits in zip(together, results, strict=True):
                    if not found.done():
                        found.set_result(hits)
        finally:
            self._task = None

    def _nearest(self, questions: Sequence[bytes]) -> list[list[Hit]]:
        import numpy as np

        vectors = np.frombuffer(b"".join(questions), np.float32).reshape(len(questions), -1)
        with self._reader.lock:  # several pipelines may have one index
            return self._reader.nearest(vectors, self._num_hits)


def fill_template(template: str, question: str, hits: Sequence[Hit]) -> str:
    sources = "\n\n".join(_source(number, hit) for number, hit in enumerate(hits, 1)) or "(none)"
    # The question is inserted last, so that placeholders in it are not replaced.
    return question.join([part.replace("{sources}", sources) for part in template.split("{question}")])


def _source(number: int, hit: Hit) -> str:
    heading = f", {hit.heading}" if hit.heading else ""
    return f"[{number}] {hit.path}{heading}\n{hit.text}"


def _has_only_results(data: bytes) -> bool:
    """Return whether a body of the Responses API has results of tools as its only input."""
    body = load_json(data)
    items = body.get("input") if isinstance(body, dict) else None
    if not items or not isinstance(items, list):
        return False
    return all(isinstance(item, dict) and item.get("type") == "function_call_output" for item in items)


def _filled(data: bytes, config: PipelineConfig, hits: Sequence[Hit]) -> bytes:
    body = load_json(data)
    name = next(name for name in FIELDS if body.get(name))
    if name != "messages" and isinstance(body[name], list) and sum(map(_is_prompt, body[name])) > 1:
        raise invalid(f"{config.name} answers one question at a time.", name)
    filled = fill_template(config.template, question_in(body[name], None), hits)
    body[name] = _replaced(body[name], filled)
    return fast_json.dumps(body)


def _is_prompt(one: Any) -> bool:
    return isinstance(one, str) or (isinstance(one, dict) and "prompt_string" in one)


def _replaced(value: Any, text: str) -> Any:
    """Return a prompt, or messages, with this text in place of the question."""
    if isinstance(value, str):
        return text
    if isinstance(value, dict):
        key = next(key for key in TEXT_KEYS if value.get(key))
        return value | {key: _replaced(value[key], text)}
    asked = [idx for idx, one in enumerate(value) if question_in([one])]
    users = [idx for idx in asked if isinstance(value[idx], dict) and value[idx].get("role") == "user"]
    if users:
        at = users[-1]
        return [*value[:at], _replaced(value[at], text), *value[at + 1 :]]
    # Parts of one message: the question is that of all texts.
    return [_replaced(one, text) if idx == asked[0] else one for idx, one in enumerate(value) if idx not in asked[1:]]


def _names(hits: Sequence[Hit]) -> str:
    """Return the files of the passages for a header, percent-encoded: `1,3=guide/install.md; 2=faq.md`. The first of many."""
    numbers: dict[str, list[str]] = {}
    for number, hit in enumerate(hits, 1):
        numbers.setdefault(hit.path, []).append(str(number))
    told = ""
    for path, of_path in numbers.items():
        more = f"{'; ' if told else ''}{','.join(of_path)}={quote(path)}"
        if len(told) + len(more) > MAX_HEADER_BYTES:
            break
        told += more
    return told
