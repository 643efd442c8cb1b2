"""Writes answers and errors of llama.cpp's server: an object for each choice, or events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NotRequired, cast

from pydantic import ConfigDict
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk
from penstock.serve.errors import ApiError
from penstock.serve.shapes import Count, Object
from penstock.serve.streams import ChoiceRecord, Writer
from penstock.serve.timings import timings
from penstock.types.request import FinishReason
from penstock.types.result import TokenLogprobs

_ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        500: "server_error",
        503: "unavailable_error",
    }
)
"""HTTP status -> type. Other statuses have OpenAI's type."""
NOT_SUPPORTED = "not_supported"
"""Error code for a request that needs another kind of model."""


LlamaToken = TypedDict("LlamaToken", {"id": Count, "token": str, "bytes": list[Count], "logprob": float})


class LlamaSampledToken(LlamaToken):
    top_logprobs: list[LlamaToken]


class LlamaCompletion(TypedDict, total=False):
    """An answer, or an event of a stream. `response_fields` choose other fields, such as `timings/prompt_n`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    index: Count
    content: str
    tokens: Sequence[Count]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: Count
    tokens_evaluated: Count
    generation_settings: Object
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: Count
    timings: dict[str, float]
    completion_probabilities: list[LlamaSampledToken]


class LlamaErrorDetail(TypedDict):
    code: Count
    message: str
    type: str
    n_prompt_tokens: NotRequired[Count]
    n_ctx: NotRequired[Count]


LlamaError = TypedDict("LlamaError", {"error": LlamaErrorDetail})


def llama_words(error: ApiError) -> LlamaError:
    """Return an error in llama.cpp's shape, with the HTTP status as `code`."""
    kind = _ERROR_TYPES.get(error.status_code, error.error_type)
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    elif error.code == NOT_SUPPORTED:
        kind = "not_supported_error"
    detail: LlamaErrorDetail = {"code": error.status_code, "message": error.message, "type": kind}
    if error.sizes is not None:
        detail["n_prompt_tokens"], detail["n_ctx"] = error.sizes
    return {"error": detail}


class LlamaWriter(Writer):
    """Writes completions. A stream has pieces of text with their tokens, and the end of each choice."""

    def __init__(self, call: RunningCall, *, settings: Mapping[str, Any], fields: Sequence[str]) -> None:
        """`settings`: `generation_settings`, without the seed. `fields`: `response_fields`, or empty for all."""
        super().__init__(call)
        self._settings, self._fields = settings, fields
        self._has_new_line = [False] * len(call.requests)

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        self._has_new_line[index] |= "\n" in chunk.text
        events = _event(self._piece(index, chunk)) if chunk.text or chunk.token_ids else b""
        if chunk.finish_reason is None:
            return events
        return events + _event(self._final(index, chunk, "", ()))

    def fail(self, error: ApiError) -> bytes:
        return _event(llama_words(error))

    def whole(self, records: Sequence[ChoiceRecord]) -> LlamaCompletion | list[LlamaCompletion]:
        answers = [self._answer(index, record) for index, record in enumerate(records)]
        return answers[0] if len(answers) == 1 else answers

    def _answer(self, index: int, record: ChoiceRecord) -> LlamaCompletion:
        text = record.text
        self._has_new_line[index] = "\n" in text
        tokens = record.token_ids if self._options.has_token_ids else ()
        entries = [entry for chunk in record.chunks for entry in self._shown_logprobs(chunk)]
        return self._final(index, record.last, text, tokens, entries)

    def _piece(self, index: int, chunk: OutputChunk) -> LlamaCompletion:
        piece: LlamaCompletion = {
            "index": index,
            "content": chunk.text,
            "tokens": chunk.token_ids,
            "stop": False,
            "id_slot": -1,  # any: there are no slots
            "tokens_predicted": chunk.num_generated_tokens,
            "tokens_evaluated": self._call.requests[index].num_prompt_tokens,
        }
        if self._options.has_timings:
            piece["timings"] = timings(self._call, index, chunk)
        if entries := self._shown_logprobs(chunk):
            piece["completion_probabilities"] = self._probabilities(entries)
        return piece

    def _final(
        self,
        index: int,
        chunk: OutputChunk,
        text: str,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprobs] = (),
    ) -> LlamaCompletion:
        """Return the whole answer of a choice or, with empty `text`, `tokens` and `entries`, its last event."""
        request, call = self._call.requests[index], self._call
        num_tokens = request.num_prompt_tokens + chunk.num_generated_tokens
        answer: LlamaCompletion = {
            "index": index,
            "content": text,
            "tokens": tokens,
            "id_slot": -1,  # any: there are no slots
            "stop": True,
            "model": self._options.model_name,
            "tokens_predicted": chunk.num_generated_tokens,
            "tokens_evaluated": request.num_prompt_tokens,
            "generation_settings": {"seed": request.sampling.seed, **self._settings},
            "prompt": call.echoes[index // call.num_choices],
            "has_new_line": self._has_new_line[index],
            "truncated": self._is_at_limit(chunk) and num_tokens >= call.running.admission.max_len(self._options.adapter),
            "stop_type": "eos",
            "stopping_word": "",
            "tokens_cached": call.first_of(index).num_cached_tokens,
            "timings": timings(call, index, chunk),
        }
        if chunk.finish_reason is FinishReason.LENGTH:
            answer["stop_type"] = "limit"
        elif isinstance(chunk.stop_reason, str):
            answer["stop_type"], answer["stopping_word"] = "word", chunk.stop_reason
        if entries:
            answer["completion_probabilities"] = self._probabilities(entries)
        return answer if not self._fields else _chosen(answer, self._fields)

    def _is_at_limit(self, chunk: OutputChunk) -> bool:
        """Return whether the choice ended early, at a limit below the number of tokens that the client asked for."""
        asked = self._call.max_tokens
        return chunk.finish_reason is FinishReason.LENGTH and (asked is None or chunk.num_generated_tokens < asked)

    def _probabilities(self, entries: Sequence[TokenLogprobs]) -> list[LlamaSampledToken]:
        return [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]

    def _token(self, token_id: int, logprob: float) -> LlamaToken:
        data = self._tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", "ignore")
        # JSON has no infinity: llama.cpp writes the least float for a probability of zero.
        return {"id": token_id, "token": text, "bytes": list(data), "logprob": max(logprob, -3.4028234663852886e38)}


def _event(value: LlamaCompletion | LlamaError) -> bytes:
    return b"data: " + fast_json.dumps(value) + b"\n\n"


def _chosen(answer: LlamaCompletion, fields: Sequence[str]) -> LlamaCompletion:
    """Return the fields of an answer with these names. `/` separates the names of nested fields."""
    chosen: dict[str, Any] = {}
    for field in fields:
        value: Any = answer
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            chosen[field] = value
    return cast(LlamaCompletion, chosen)
