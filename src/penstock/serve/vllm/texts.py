"""`POST /v1/score` for pairs of texts, `/classify` for labels, `/pooling` for a model's raw output, in vLLM's shapes."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from penstock.serve.asking import Asked
from penstock.serve.bodies import has_not_yet
from penstock.serve.errors import invalid
from penstock.serve.shapes import Base64, Count, TokenUsage, Vector
from penstock.serve.texts import read
from penstock.serve.texts.call import TextResults, Truncation
from penstock.serve.texts.endpoint import Answer
from penstock.serve.texts.numbers import as_base64, rows, scores
from penstock.serve.texts.pairs import Pairs
from penstock.types.encoder import ScoreFunction, Task


@has_not_yet("add_special_tokens=true")
class ScoreBody(read.TextsBody):
    text_1: read.Texts
    """One text for all of `text_2`, or as many texts."""
    text_2: read.Texts
    use_activation: bool | None = None
    """False returns the model's output before its activation function."""


@has_not_yet("add_special_tokens=true")
class ClassifyBody(read.TextsBody):
    input: read.TextsOrIds
    use_activation: bool | None = None
    """False returns the model's output before its activation function, instead of probabilities."""


@has_not_yet("add_special_tokens=true dimensions")
class PoolingBody(read.TextsBody):
    input: read.TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """Names the model's task, which its files decide."""


class TextsUsage(TokenUsage):
    completion_tokens: Count
    prompt_tokens_details: None


class ListHead(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: TextsUsage


Score = TypedDict("Score", {"index": Count, "object": Literal["score"], "score": float})


class Scores(ListHead):
    data: list[Score]


Class = TypedDict("Class", {"index": Count, "label": str, "probs": Vector, "num_classes": Count})


class Classes(ListHead):
    data: list[Class]


Pooled = TypedDict("Pooled", {"index": Count, "object": Literal["pooling"], "data": Vector | list[Vector] | Base64})


class Pooling(ListHead):
    data: list[Pooled]


def score(body: ScoreBody, asked: Asked) -> Answer:
    """Score pairs of texts, with a reranker or by the cosine of an embedding model's vectors."""
    opened = read.open_body(asked, body)
    firsts, seconds = read.read_texts(body.text_1, "text_1"), read.read_texts(body.text_2, "text_2")
    if len(firsts) not in (1, len(seconds)):
        raise invalid(
            f"'text_1' has {len(firsts)} texts and 'text_2' has {len(seconds)}: send one text in 'text_1', or as many.",
            "text_1",
        )
    pairs = Pairs(firsts, seconds, read.name_in("text_1", body.text_1), read.name_in("text_2", body.text_2))
    call = pairs.call(opened, _truncation(body, opened), is_search=False)

    def write(results: TextResults) -> Scores:
        found = pairs.scores(opened.encoder, results.results, is_raw=body.use_activation is False)
        items: list[Score] = [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)]
        return {**_head("score", opened, results), "data": items}

    return Answer(call, write)


def classify(body: ClassifyBody, asked: Asked) -> Answer:
    """Return the probabilities of a classifier's labels for each text, and the likeliest label."""
    opened = read.open_body(asked, body)
    read.require_labels(opened)
    encoder = opened.encoder
    call = opened.prompted(body.input, "input", _truncation(body, opened))
    function = ScoreFunction.NONE if body.use_activation is False else encoder.scores

    def write(results: TextResults) -> Classes:
        items: list[Class] = []
        for index, result in enumerate(results.results):
            found = scores(result, function)
            label = encoder.labels[found.index(max(found))]
            items.append({"index": index, "label": label, "probs": found, "num_classes": len(found)})
        return {**_head("classify", opened, results), "data": items}

    return Answer(call, write)


def pooling(body: PoolingBody, asked: Asked) -> Answer:
    """Return the model's raw output for each text: a vector, a row for each token, or numbers before the activation."""
    opened = read.open_body(asked, body)
    encoder = opened.encoder
    task = ("token_" if encoder.is_per_token else "") + ("embed" if encoder.task is Task.EMBED else "classify")
    if body.task not in (None, task):
        raise invalid(f"'task' is {body.task!r}, and {opened.running.name} does {task!r}. Leave it out.", "task")
    call = opened.prompted(body.input, "input", _truncation(body, opened), prompt_name=body.prompt_name)

    def write(results: TextResults) -> Pooling:
        items: list[Pooled] = []
        for index, result in enumerate(results.results):
            numbers = rows(result, opened.encoder)
            content = as_base64(numbers) if body.encoding_format == "base64" else numbers
            items.append({"index": index, "object": "pooling", "data": content})
        return {**_head("pool", opened, results), "data": items}

    return Answer(call, write)


def _truncation(body: read.TextsBody, opened: read.Opened) -> Truncation | None:
    return read.read_truncation(body.truncate_prompt_tokens, body.truncation_side, opened.running)


def _head(kind: str, opened: read.Opened, results: TextResults) -> ListHead:
    return {
        "id": f"{kind}-{opened.terms.request_id}",
        "object": "list",
        "created": opened.running.sources.unix_time_s(),
        "model": opened.model_name,
        "usage": {**results.usage, "completion_tokens": 0, "prompt_tokens_details": None},
    }
