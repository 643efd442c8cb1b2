"""The API of text-embeddings-inference (https://huggingface.github.io/text-embeddings-inference).

Other APIs have `/rerank`, `/tokenize` and `/`, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

import penstock
from penstock.calls.prompts import check_text_size
from penstock.deploy.off_loop import give_way
from penstock.deploy.running import RunningModel
from penstock.serve.api import Api, Parts, Route
from penstock.serve.asking import Asked, find_model
from penstock.serve.bodies import Body
from penstock.serve.errors import ApiError, invalid
from penstock.serve.http.checks import JsonEndpoint, Wording
from penstock.serve.shapes import Count, Object, Vector
from penstock.serve.terms import read_owner
from penstock.serve.texts import read
from penstock.serve.texts.call import MAX_TEXTS, TextInput, TextResults, Truncation
from penstock.serve.texts.endpoint import Answer
from penstock.serve.texts.numbers import embedding, ranking, rows, scores, sparse
from penstock.serve.texts.pairs import Pairs
from penstock.serve.texts.tokens import MAX_TOLD_TOKENS, pieces_of
from penstock.serve.texts.write import write_json
from penstock.types.encoder import EncoderInfo, ScoreFunction, Task

MAX_PAIRS = 1 << 19
"""Most numbers of sparse vectors in an answer: 20 MB of JSON."""
Side = Literal["left", "right", "Left", "Right"]


class TeiBody(Body):
    """Base of all bodies. Null is the same as absent."""

    model: str | None = None
    """The model's name. text-embeddings-inference has one model and no such field."""


class TruncatedBody(TeiBody):
    """Base of bodies with input texts that may be cut."""

    truncate: bool | None = None
    """True cuts a text that is too long. Otherwise it is refused."""
    truncation_direction: Side | None = None
    """The side to cut off, by default the right side."""


class EmbedBody(TruncatedBody):
    inputs: read.TextsOrIds
    normalize: bool | None = None
    """False returns vectors of the lengths that the model's files give. The default is true: length 1."""
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class InputsBody(TruncatedBody):
    inputs: read.TextsOrIds
    prompt_name: str | None = None


class TeiRerankBody(TruncatedBody):
    query: Annotated[Any, Field(json_schema_extra={"type": "string", "minLength": 1})]
    texts: read.Texts
    raw_scores: bool | None = None
    return_text: bool | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    """Return only this many best texts."""


class PredictParameters(Body):
    """Fields of Hugging Face's `text_classification`."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """Return only this many best labels."""
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    """How the model's numbers become scores. The default is in the model's files."""


class PredictBody(TruncatedBody):
    inputs: Annotated[
        Any,
        Field(json_schema_extra={"description": "A text, a pair of texts in a list, or a list of lists with one text or two."}),
    ]
    raw_scores: bool | None = None
    parameters: PredictParameters | None = None
    """If present, the answer is a list of lists for a single text, too, as Hugging Face's client expects."""


class TeiTokenizeBody(TeiBody):
    inputs: read.Texts
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


TeiError = TypedDict("TeiError", {"error": str, "error_type": str})
TeiSparse = TypedDict("TeiSparse", {"index": Count, "value": float})
TeiLabel = TypedDict("TeiLabel", {"score": float, "label": str})
TeiRanked = TypedDict("TeiRanked", {"index": Count, "text": NotRequired[str], "score": float})
TeiToken = TypedDict("TeiToken", {"id": Count, "text": str, "special": bool, "start": None, "stop": None})


class TeiInfo(TypedDict):
    model_id: str
    model_sha: None
    model_dtype: str
    model_type: Object | None
    max_concurrent_requests: Count | None
    max_input_length: Count
    max_batch_tokens: Count
    max_batch_requests: None
    max_client_batch_size: Count
    auto_truncate: bool
    tokenization_workers: Count
    version: str
    sha: None
    docker_label: None


def embed(body: EmbedBody, asked: Asked) -> Answer:
    """Turn one or more texts into vectors."""
    opened = read.open_model(asked, model=body.model)
    read.require_embeddings(opened)
    encoder = opened.encoder
    read.check_dimensions(body.dimensions, encoder)
    call = opened.prompted(body.inputs, "inputs", _truncation(body, opened), prompt_name=body.prompt_name)
    is_unit = body.normalize is not False

    def write(results: TextResults) -> list[Vector]:
        return [embedding(result, encoder, body.dimensions, is_unit=is_unit) for result in results.results]

    return Answer(call, write)


def embed_all(body: InputsBody, asked: Asked) -> Answer:
    """Return a vector for each token of one or more texts, as the model's files have it."""
    opened = read.open_model(asked, model=body.model)
    read.require_token_embeddings(opened)
    call = opened.prompted(body.inputs, "inputs", _truncation(body, opened), prompt_name=body.prompt_name)

    def write(results: TextResults) -> list[Vector]:
        return [rows(result, opened.encoder) for result in results.results]

    return Answer(call, write)


def embed_sparse(body: InputsBody, asked: Asked) -> Answer:
    """Return the tokens of the vocabulary that stand for a text, each with its weight."""
    opened = read.open_model(asked, model=body.model)
    read.require_sparse(opened)
    call = opened.prompted(body.inputs, "inputs", _truncation(body, opened), prompt_name=body.prompt_name)

    def write(results: TextResults) -> list[list[TeiSparse]]:
        lists: list[list[TeiSparse]] = []
        num_pairs = 0
        for result in results.results:
            columns, values = sparse(result)
            num_pairs += len(columns)
            if num_pairs > MAX_PAIRS:
                cause = f"The answer has more than {MAX_PAIRS} numbers, the most that one request is answered with"
                raise invalid(f"{cause}. Send the texts in several requests.", "inputs")
            lists.append([{"index": index, "value": value} for index, value in zip(columns, values, strict=True)])
            give_way()
        return lists

    return Answer(call, write)


def predict(body: PredictBody, asked: Asked) -> Answer:
    """Score the labels of a classifier for each text, best first."""
    opened = read.open_model(asked, model=body.model)
    read.require_labels(opened)
    encoder = opened.encoder
    texts, is_batch = _predict_inputs(body.inputs, read.prompt_for(encoder))
    parameters = body.parameters or PredictParameters()
    if body.raw_scores and parameters.function_to_apply not in (None, "none"):
        raise invalid("'raw_scores' is true: leave out 'parameters.function_to_apply'.", "parameters.function_to_apply")
    function = ScoreFunction.NONE if body.raw_scores else ScoreFunction(parameters.function_to_apply or encoder.scores)

    def write(results: TextResults) -> list[list[TeiLabel]] | list[TeiLabel]:
        lists: list[list[TeiLabel]] = []
        for result in results.results:
            found = scores(result, function)
            best = ranking(found)[: parameters.top_k]
            lists.append([{"score": found[index], "label": encoder.labels[index]} for index in best])
        return lists if is_batch or body.parameters is not None else lists[0]

    name_of = (lambda index: f"inputs[{index}]") if is_batch else (lambda _: "inputs")
    return Answer(opened.call(texts, name_of, _truncation(body, opened)), write)


def rerank(body: TeiRerankBody, asked: Asked) -> Answer:
    """Score texts by how well they answer a question, and sort them."""
    opened = read.open_model(asked, model=body.model)
    if not isinstance(body.texts, list):
        raise invalid("'texts' must be a list of strings.", "texts")
    texts = read.read_texts(body.texts, "texts")
    pairs = Pairs([read.read_text(body.query, "query")], texts, lambda _: "query", read.name_in("texts", body.texts))
    call = pairs.call(opened, _truncation(body, opened), is_search=True)

    def write(results: TextResults) -> list[TeiRanked]:
        found = pairs.scores(opened.encoder, results.results, is_raw=bool(body.raw_scores))
        ranked: list[TeiRanked] = []
        for index in ranking(found)[: body.top_n]:
            ranked.append({"index": index, "score": found[index]})
            if body.return_text:
                ranked[-1]["text"] = texts[index]
        return ranked

    return Answer(call, write)


class TeiEndpoint:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._answers: dict[Task, JsonEndpoint] = {
            Task.EMBED: parts.texts.answers(EmbedBody, embed),
            Task.RERANK: parts.texts.answers(TeiRerankBody, rerank),
            Task.CLASSIFY: parts.texts.answers(PredictBody, predict),
        }

    async def reads_texts(self, _data: bytes, http: HttpRequest) -> bool:
        """Return whether the default model is an encoder: the condition for answering `/`."""
        return self._model(http).model.encoder is not None

    async def root(self, data: bytes, http: HttpRequest) -> Response:
        """Embed, rank or classify, depending on the default model."""
        encoder = self._model(http).model.encoder
        assert encoder is not None
        return await self._answers[encoder.task](data, http)

    async def info(self, http: HttpRequest) -> TeiInfo:
        """Describe the default model in text-embeddings-inference's shape."""
        running = self._model(http)
        model, encoder = running.model, running.model.encoder
        return {
            "model_id": model.root,
            "model_sha": None,
            "model_dtype": "float32",
            "model_type": None if encoder is None else _model_type(encoder),
            "max_concurrent_requests": running.admission.limits.max_queue,
            "max_input_length": model.capacity.max_model_len,
            "max_batch_tokens": model.capacity.max_step_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": MAX_TEXTS,
            "auto_truncate": False,
            "tokenization_workers": 1,
            "version": penstock.__version__,
            "sha": None,
            "docker_label": None,
        }

    async def tokenize(self, data: bytes, http: HttpRequest) -> Response:
        """Return the tokens of one or more texts."""
        body = await self._parts.reader.body(data, TeiTokenizeBody, http.scope)
        running = self._model(http, body.model)
        with running.using():
            content = await running.off_loop.run(len(data), partial(_tokens, body, running), read_owner(http.scope))
        return Response(content, media_type="application/json")

    def _model(self, http: HttpRequest, name: str | None = None) -> RunningModel:
        return find_model(name, self._parts.deployment, http.scope)


def tei_words(error: ApiError) -> TeiError:
    return {"error": error.message, "error_type": _ERROR_TYPES.get(error.status_code, "Backend")}


_ERROR_TYPES = {400: "Validation", 404: "Validation", 408: "Overloaded", 429: "Overloaded", 503: "Unhealthy"}


def _model_type(encoder: EncoderInfo) -> dict[str, Any]:
    if encoder.task is Task.EMBED:
        return {"embedding": {"pooling": encoder.pooling}}
    labels = {
        "id2label": {str(index): label for index, label in enumerate(encoder.labels)},
        "label2id": {label: index for index, label in enumerate(encoder.labels)},
    }
    return {"reranker" if encoder.task is Task.RERANK else "classifier": labels}


def _truncation(body: TruncatedBody, opened: read.Opened) -> Truncation | None:
    is_left = (body.truncation_direction or "").lower() == "left"
    if not body.truncate:
        if is_left:
            param = "truncation_direction"
            raise invalid(f"'{param}' is 'left', but no text is cut. Set 'truncate', too.", param)
        return None
    return Truncation(opened.running.model.capacity.max_model_len, "left" if is_left else "right")


def _predict_inputs(value: Any, prompt: str) -> tuple[list[TextInput], bool]:
    """Return the texts and pairs of `inputs`, each after the prompt, and whether the field is a list of lists. Raises 400."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        read.check_length(value, "inputs")
        return [_one_or_two(item, f"inputs[{index}]", prompt) for index, item in enumerate(value)], True
    if isinstance(value, str):
        return [prompt + read.read_text(value, "inputs")], False
    return [_one_or_two(value, "inputs", prompt)], False


def _one_or_two(value: Any, param: str, prompt: str) -> TextInput:
    if not isinstance(value, list) or len(value) not in (1, 2):
        raise invalid(f"'{param}' must be a string, or a list of one text or of a pair.", param)
    texts = [read.read_text(text, f"{param}[{index}]") for index, text in enumerate(value)]
    return prompt + texts[0] if len(texts) == 1 else (prompt + texts[0], texts[1])


def _tokens(body: TeiTokenizeBody, running: RunningModel) -> bytes:
    encoder, tokenizer = running.model.encoder, running.tokenizer
    if encoder is not None:
        prompt = read.prompt_text(encoder, body.prompt_name)
    elif body.prompt_name is not None:
        raise invalid("The model has no prompts.", "prompt_name")
    else:
        prompt = ""
    texts = [prompt + text for text in read.read_texts(body.inputs, "inputs")]
    for index, text in enumerate(texts):
        check_text_size(text, running, f"inputs[{index}]")
    lists: list[list[int]] = []
    num_tokens = 0
    for piece in pieces_of(texts):
        lists += tokenizer.encode_batch(piece, add_special_tokens=body.add_special_tokens is not False)
        num_tokens += sum(map(len, lists[-len(piece) :]))
        if num_tokens > MAX_TOLD_TOKENS:
            raise invalid(
                f"The texts have more than {MAX_TOLD_TOKENS} tokens, the limit for one answer. Send the texts in several "
                "requests, or one of them as 'prompt'.",
                "inputs",
            )
        give_way()
    return write_json(
        [
            [
                {
                    "id": token_id,
                    "text": tokenizer.token_text(token_id),
                    "special": tokenizer.is_special(token_id),
                    "start": None,
                    "stop": None,
                }
                for token_id in token_ids
            ]
            for token_ids in lists
        ]
    )


_Labels = list[TeiLabel] | list[list[TeiLabel]]


def _routes(parts: Parts) -> Sequence[Route]:
    tei, texts = TeiEndpoint(parts), parts.texts_route
    with_texts, with_inputs = parts.has_field("texts"), parts.has_field("inputs")
    return [
        texts("POST /embed", "Embed", EmbedBody, embed, list[Vector]),
        texts("POST /embed_all", "Embed each token", InputsBody, embed_all, list[list[Vector]]),
        texts("POST /embed_sparse", "Embed by words", InputsBody, embed_sparse, list[list[TeiSparse]]),
        texts("POST /predict", "Classify", PredictBody, predict, _Labels),
        texts("POST /rerank", "Rerank", TeiRerankBody, rerank, list[TeiRanked], when=with_texts),
        Route("POST /tokenize", "Tokenize", tei.tokenize, TeiTokenizeBody, list[list[TeiToken]], when=with_inputs),
        Route(
            "POST /",
            "What the default model is for",
            tei.root,
            EmbedBody | TeiRerankBody | PredictBody,
            list[Vector] | list[TeiRanked] | _Labels,
            when=tei.reads_texts,
        ),
        Route("GET /info", "The default model", tei.info, returns=TeiInfo),
    ]


API = Api("text-embeddings-inference", _routes, Wording(tei_words, paths="/embed /embed_all /embed_sparse /predict /info"))
