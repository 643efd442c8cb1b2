"""Checks fields common to the APIs of encoders, and makes a `TextsCall` of them.

These functions may run on any thread and never wait. Errors are `ApiError` with status 400.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, NoReturn

from pydantic import Field, WithJsonSchema

from penstock.calls.call import Terms
from penstock.calls.prompts import check_text_size
from penstock.deploy.running import RunningModel
from penstock.serve.asking import Asked, may_ask, visible_names
from penstock.serve.bodies import INT32_MAX, Body, NoEffect, Priority, RequestId, described
from penstock.serve.errors import ApiError, invalid, shorten
from penstock.serve.http.checks import identity_of
from penstock.serve.terms import claim_of, read_terms
from penstock.serve.texts.call import MAX_TEXTS, TextInput, TextsCall, TokenIds, Truncation
from penstock.types.encoder import EncoderInfo, Task, TruncationSide

_DOCUMENT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_TEXTS)
Texts = Annotated[Any, described(_Text | Annotated[list[_Text], _Several])]
"""Type of a field with one or several texts. `read_texts` checks it, so that errors can name the element."""
TextsOrIds = Annotated[Any, described(_Text | _Ids | Annotated[list[_Text | _Ids], _Several])]
Documents = Annotated[Any, WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": _DOCUMENT})]


class TextsBody(Body):
    """Fields common to bodies of several APIs, with vLLM's names. Null means absent."""

    model: str | None = None
    user: Annotated[str | None, NoEffect()] = None
    """The name of the user (docs/ab.md)."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Number of tokens to keep of a text or a pair. -1: as many as the model takes."""
    truncation_side: TruncationSide | None = None
    """The side to cut off, by default the right side."""
    priority: Priority | None = None
    request_id: RequestId | None = None


_ENDPOINTS = {Task.EMBED: "/v1/embeddings", Task.RERANK: "/v1/rerank or /v1/score", Task.CLASSIFY: "/classify"}
_KINDS = {Task.EMBED: "an embedding model", Task.RERANK: "a reranker", Task.CLASSIFY: "a classifier"}


@dataclass(frozen=True, slots=True)
class Opened:
    """A request whose model was found and whose headers were read. Its texts were not read yet."""

    running: RunningModel
    encoder: EncoderInfo
    terms: Terms
    claim: bytes
    model_name: str
    """The client's name of the model."""

    def call(
        self,
        texts: Sequence[TextInput],
        name_of: Callable[[int], str],
        truncation: Truncation | None = None,
        *,
        first_name_of: Callable[[int], str] | None = None,
        has_vectors: bool = True,
    ) -> TextsCall:
        return TextsCall(
            running=self.running,
            terms=self.terms,
            texts=texts,
            name_of=name_of,
            first_name_of=first_name_of,
            has_vectors=has_vectors,
            truncation=truncation,
            claim=self.claim,
        )

    def prompted(
        self, value: Any, param: str, truncation: Truncation | None = None, *, prompt_name: str | None = None
    ) -> TextsCall:
        """Return the call for the texts of a field, with the model's prompt before each. Raises 400."""
        prompt, name_of = prompt_text(self.encoder, prompt_name), name_in(param, value)
        if isinstance(value, list):
            if any(type(item) is int for item in value):
                value = _spelled(value, param, self.running)
            else:
                value = [_spelled(item, f"{param}[{index}]", self.running) for index, item in enumerate(value)]
        texts = _texts_or_ids(value, param, self.running.model.vocab_size, prompt)
        if prompt_name is not None and any(isinstance(text, TokenIds) for text in texts):
            raise invalid("'prompt_name' needs texts: token ids are taken as they are.", "prompt_name")
        return self.call(texts, name_of, truncation)


def open_body(asked: Asked, body: TextsBody) -> Opened:
    """Return the model and the terms of a body. Raises 400 unless the model is an encoder."""
    return open_model(asked, model=body.model, user=body.user, priority=body.priority, request_id=body.request_id)


def open_model(
    asked: Asked,
    *,
    model: str | None = None,
    user: str | None = None,
    priority: int | None = None,
    request_id: str | None = None,
) -> Opened:
    """Return the model and the terms. Raises 400 unless the model is an encoder."""
    if request_id is not None:
        identity_of(asked.scope).adopt(request_id)  # first, so that any later refusal has this id
    deployment, scope = asked.reader.deployment, asked.scope
    is_route = model in deployment.routes or model in deployment.pipelines
    if is_route and model in visible_names(deployment, scope):
        raise invalid(f"{model} writes text: name an encoder.", "model")
    running = asked.find(model, user or "")[0].answerer()
    encoder = running.model.encoder
    if encoder is None:
        allowed = [one for one in deployment.served if one.is_there and may_ask(scope, one, one.name, deployment)]
        encoders = [one.name for one in allowed if one.info is not None and one.info.encoder is not None]
        remedy = (
            f"Or set 'model' to {encoders[0]!r}, which is also served."
            if encoders
            else "Or serve an encoder, for example `penstock serve minilm`."
        )
        raise invalid(
            f"{running.name} generates text and has no embeddings or scores: use /v1/chat/completions or /v1/completions. "
            f"{remedy}",
            "model",
        )
    terms = read_terms(
        scope,
        running.clock.now_ns(),
        asked.reader.config,
        is_priority_scheduled=running.model.is_priority_scheduled,
        priority=priority,
    )
    return Opened(running, encoder, terms, claim_of(terms.owner.tenant, asked.data), model or running.name)


def read_texts(value: Any, param: str) -> list[str]:
    """Return the texts of a field: a text or a list of texts. Raises 400."""
    if isinstance(value, str):
        return [read_text(value, param)]
    if not isinstance(value, list):
        raise invalid(f"'{param}' must be a string, a list of strings.", param)
    check_length(value, param)
    return [read_text(item, f"{param}[{index}]") for index, item in enumerate(value)]


def _texts_or_ids(value: Any, param: str, vocab_size: int, prompt: str) -> list[TextInput]:
    """Return the texts of a field, each after the prompt, and its lists of token ids. Raises 400."""
    if isinstance(value, str):
        return [prompt + read_text(value, param)]
    if not isinstance(value, list):
        raise invalid(f"'{param}' must be a string, a list of strings, token ids or lists of those.", param)
    check_length(value, param)
    if type(value[0]) is int:
        return [_token_ids(value, param, vocab_size)]
    texts: list[TextInput] = []
    for index, item in enumerate(value):
        name = f"{param}[{index}]"
        if isinstance(item, str):
            texts.append(prompt + read_text(item, name))
        elif isinstance(item, list):
            texts.append(_token_ids(item, name, vocab_size))
        else:
            raise invalid(f"'{name}' must be a string, or a list of token ids.", name)
    return texts


def _spelled(value: Any, param: str, running: RunningModel) -> Any:
    """Tokenise the texts in a list of token ids and texts. Return other values unchanged. Raises 400."""
    if not isinstance(value, list) or not any(type(part) is int for part in value):
        return value
    num_texts = sum([isinstance(part, str) for part in value])
    if num_texts > MAX_TEXTS:
        raise invalid(f"'{param}' has {num_texts} strings between token ids; at most {MAX_TEXTS} are taken.", param)
    ids: list[Any] = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            check_text_size(part, running, f"{param}[{index}]")
            ids += running.tokenizer.encode(part, add_special_tokens=False)
        else:
            ids.append(part)
    return ids


def read_documents(value: Any, param: str) -> list[str]:
    """Return the texts of strings, or of objects with a `text`. Raises 400."""
    if not isinstance(value, list):
        raise invalid(f"'{param}' must be a list of strings, or of objects with a 'text'.", param)
    check_length(value, param)
    texts = []
    for index, item in enumerate(value):
        name = f"{param}[{index}]"
        if isinstance(item, dict):
            name = f"{name}.text"
            if set(item) != {"text"}:
                raise invalid(f"'{param}[{index}]' must have a 'text' and nothing else.", f"{param}[{index}]")
            item = item["text"]
        texts.append(read_text(item, name))
    return texts


def read_text(value: Any, param: str) -> str:
    """Return a text. Raises 400 if the value is empty or not a string."""
    if not isinstance(value, str):
        raise invalid(f"'{param}' must be a string.", param)
    if not value:
        raise invalid(f"'{param}' is an empty string. Leave it out.", param)
    return value


def name_in(param: str, value: object) -> Callable[[int], str]:
    """Return a function from the index of a text to its place in the body. `value` is the text, or a list of texts."""
    is_list = isinstance(value, list) and not any(type(item) is int for item in value)
    return (lambda index: f"{param}[{index}]") if is_list else (lambda _: param)


def check_length(value: Sequence[Any], param: str) -> None:
    """Raise 400 for a list that is empty or too long."""
    if not value:
        raise invalid(f"'{param}' is empty. Send one text at least.", param)
    if len(value) > MAX_TEXTS and type(value[0]) is not int:
        raise invalid(f"'{param}' has {len(value)} texts; at most {MAX_TEXTS} are taken at once. Send several requests.", param)


def read_truncation(kept_tokens: int | None, side: TruncationSide | None, running: RunningModel) -> Truncation | None:
    """Return how to cut texts, or None. Raises 400.

    `kept_tokens` is vLLM's `truncate_prompt_tokens`: -1 keeps as many as the model takes, None cuts nothing.
    """
    limit = running.model.capacity.max_model_len
    if kept_tokens is None:
        if side == "left":
            param = "truncation_side"
            raise invalid(f"'{param}' is 'left', but no text is cut. Set 'truncate_prompt_tokens', too.", param)
        return None
    if not isinstance(kept_tokens, Integral) or kept_tokens == 0 or kept_tokens < -1:
        param = "truncate_prompt_tokens"
        raise invalid(f"'{param}' must be a whole number from 1, or -1 for as many as the model takes.", param)
    return Truncation(limit if kept_tokens < 0 else min(kept_tokens, limit), side or "right")


def check_dimensions(dimensions: int | None, encoder: EncoderInfo, param: str = "dimensions") -> None:
    """Raise 400 if the model has fewer dimensions."""
    if dimensions is not None and not (isinstance(dimensions, Integral) and 1 <= dimensions <= encoder.width):
        raise invalid(f"'{param}' is {dimensions!r}; this model's vectors can be cut to 1 to {encoder.width}.", param)


def require_embeddings(opened: Opened) -> None:
    """Raise 400 unless the model returns one vector for a text."""
    encoder = opened.encoder
    if encoder.task is not Task.EMBED:
        _refuse_task(opened, "has no embeddings")
    if encoder.is_per_token:
        cause = f"{opened.running.name} returns a vector for each token, not one for the text"
        raise invalid(f"{cause}. Use /pooling or /embed_all.", "model")
    if encoder.is_sparse:
        raise invalid(f"{opened.running.name} has sparse vectors. Use /embed_sparse.", "model")


def require_sparse(opened: Opened) -> None:
    """Raise 400 unless the model's vectors are sparse."""
    if opened.encoder.task is not Task.EMBED:
        _refuse_task(opened, "has no embeddings")
    if not opened.encoder.is_sparse:
        raise invalid(f"{opened.running.name} has no sparse vectors: its files list no SpladePooling. Use /embed.", "model")


def require_token_embeddings(opened: Opened) -> None:
    """Raise 400 unless the model returns a vector for each token."""
    if opened.encoder.task is not Task.EMBED:
        _refuse_task(opened, "has no embeddings")
    if not opened.encoder.is_per_token:
        cause = f"{opened.running.name} returns one vector for a text, not one for each token"
        raise invalid(f"{cause}. Use /embed, or serve it with --pooling each.", "model")


def require_scores(opened: Opened) -> None:
    """Raise 400 unless the model scores pairs of texts, or has embeddings to compare."""
    if opened.encoder.task is Task.CLASSIFY:
        _refuse_task(opened, "has no scores for pairs of texts")


def require_labels(opened: Opened) -> None:
    """Raise 400 unless the model has labels for whole texts."""
    if opened.encoder.task is Task.EMBED:
        _refuse_task(opened, "has no labels")
    if opened.encoder.is_per_token:
        raise invalid(f"{opened.running.name} has labels for each token, not for the text. Use /pooling.", "model")


def _refuse_task(opened: Opened, lack: str) -> NoReturn:
    task = opened.encoder.task
    raise invalid(f"{opened.running.name} is {_KINDS[task]} and {lack}. Ask {_ENDPOINTS[task]}.", "model")


def prompt_text(encoder: EncoderInfo, name: str | None) -> str:
    """Return the prompt of this name, or the default one. Raises 400 for an unknown name."""
    if name is None:
        return encoder.prompts.get(encoder.default_prompt, "")
    if name not in encoder.prompts:
        known = ", ".join(repr(known) for known in encoder.prompts) or "none"
        raise invalid(f"The model has no prompt {shorten(str(name))!r}. It has: {known}.", "prompt_name")
    return encoder.prompts[name]


def prompt_for(encoder: EncoderInfo, *names: str) -> str:
    """Return the model's first prompt with one of `names`, or the default prompt."""
    name = first_prompt(encoder.prompts, names)
    return encoder.prompts.get(encoder.default_prompt if name is None else name, "")


def first_prompt(prompts: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first of `names` as the model spells it, or None. Some models capitalise names of prompts."""
    spelled = {prompt.casefold(): prompt for prompt in sorted(prompts)}  # small letters come last, and win
    return next((spelled[name] for name in names if name in spelled), None)


QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of prompts for questions and for documents, in the order in which sentence-transformers looks them up."""


def _token_ids(value: list[Any], param: str, vocab_size: int) -> TokenIds:
    if not value:
        raise invalid(f"'{param}' is empty. Send one token at least.", param)
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise invalid(f"'{param}[{index}]' must be a token id.", f"{param}[{index}]")
        if not 0 <= token_id < vocab_size:
            raise _foreign_id(token_id, f"{param}[{index}]", vocab_size)
    return TokenIds(tuple(value))


def _foreign_id(token_id: int, param: str, vocab_size: int) -> ApiError:
    return invalid(
        f"'{param}' is {token_id}, outside the vocabulary [0, {vocab_size}). Token ids must be those of this model's tokenizer "
        "(POST /tokenize). langchain's OpenAIEmbeddings sends those of OpenAI's models: create it with "
        "check_embedding_ctx_length=False, and it sends text.",
        param,
    )
