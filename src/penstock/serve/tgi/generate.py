"""`POST /generate`, `/generate_stream` and, for models that generate text, `POST /`: the API of text-generation-inference
(https://huggingface.github.io/text-generation-inference). `text_generation` of `huggingface_hub` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.calls.call import Call, CompletionRequest, Names, TextPrompt
from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk
from penstock.serve.asking import Asked
from penstock.serve.bodies import INT32_MAX, Body, MaxTokens, StopStrings, has_not_yet, has_sampling, sampling_of, value_grammar
from penstock.serve.errors import ApiError, invalid
from penstock.serve.shapes import Count
from penstock.serve.streams import ChoiceRecord, NewWriter, Writer
from penstock.types.request import FinishReason

DEFAULT_TOKENS = 100
"""text-generation-inference's default of `max_new_tokens`."""
_NAMES = Names(
    "tgi",
    "parameters.",
    {
        "model": "parameters.adapter_id",
        "max_tokens": "parameters.max_new_tokens",
        "stop": "parameters.stop",
        "truncate_prompt_tokens": "parameters.truncate",
    },
)
_ERROR_TYPES = {400: "validation", 404: "validation", 422: "validation", 429: "overloaded", 503: "overloaded"}


class TgiGrammar(Body):
    type: Literal["json", "json_schema", "regex"]
    value: Any


@has_sampling("tgi")
@has_not_yet("best_of=1 decoder_input_details=false top_n_tokens=0 typical_p=1|1.0 watermark=false")
class TgiParameters(Body):
    """The field `parameters`. Null is the same as absent."""

    adapter_id: str | None = None
    """The name of an adapter, or of another served model."""
    max_new_tokens: MaxTokens | None = None
    do_sample: bool | None = None
    """Without this field, the answer is greedy unless another field sets a sampling parameter."""
    stop: StopStrings | None = None
    truncate: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Keep only this many last tokens of the prompt."""
    return_full_text: bool | None = None
    """True puts the prompt before the answer."""
    details: bool | None = None
    """True adds the tokens and the finish reason to an answer. Streams always have both."""
    grammar: TgiGrammar | None = None


class TgiBody(Body):
    inputs: Annotated[str, Field(min_length=1)]
    parameters: TgiParameters | None = None
    stream: bool | None = None


TgiToken = TypedDict("TgiToken", {"id": Count, "text": str, "logprob": float, "special": bool})


FinishWord = Literal["length", "eos_token", "stop_sequence"]


TgiEnd = TypedDict("TgiEnd", {"finish_reason": FinishWord, "generated_tokens": Count, "seed": int})


class TgiDetails(TgiEnd):
    prefill: list[Any]
    tokens: list[TgiToken]


TgiAnswer = TypedDict("TgiAnswer", {"generated_text": str, "details": NotRequired[TgiDetails]})


class TgiStreamDetails(TgiEnd):
    input_length: Count


class TgiEvent(TypedDict):
    index: Count
    token: TgiToken
    generated_text: str | None
    details: TgiStreamDetails | None


TgiError = TypedDict("TgiError", {"error": str, "error_type": str})


def generate(body: TgiBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Continue a prompt, in the shape of text-generation-inference."""
    return _read(body, asked, is_streamed=bool(body.stream))


def generate_stream(body: TgiBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Continue a prompt as a stream, in the shape of text-generation-inference."""
    return _read(body, asked, is_streamed=True)


def root(body: TgiBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Continue a prompt, like `/generate`, but with the answer in a list."""
    return _read(body, asked, is_list=True, is_streamed=bool(body.stream))


def _read(body: TgiBody, asked: Asked, *, is_list: bool = False, is_streamed: bool) -> tuple[Call, NewWriter]:
    parameters = body.parameters or TgiParameters()
    call = asked.call(_request(body, parameters, is_streamed=is_streamed))
    prefix = body.inputs if parameters.return_full_text else ""
    return call, partial(TgiWriter, prefix=prefix, has_details=bool(parameters.details), is_list=is_list)


def tgi_words(error: ApiError) -> TgiError:
    """Return an error in the shape of text-generation-inference."""
    return {"error": error.message, "error_type": _ERROR_TYPES.get(error.status_code, "generation")}


def _request(body: TgiBody, parameters: TgiParameters, *, is_streamed: bool) -> CompletionRequest:
    sampling = sampling_of(parameters, "tgi")
    samples = parameters.do_sample or not sampling.keys().isdisjoint(("temperature", "top_k", "top_p"))
    if parameters.do_sample is False and samples:
        message = "'parameters.do_sample' is false, but the parameters say how to sample: leave one of them out."
        raise invalid(message, "parameters.do_sample")
    grammar = parameters.grammar
    return CompletionRequest(
        names=_NAMES,
        prompts=(TextPrompt(body.inputs, "inputs"),),
        model=parameters.adapter_id,
        is_streamed=is_streamed,
        max_tokens=parameters.max_new_tokens or DEFAULT_TOKENS,
        ends_with_context=False,
        sampling={"temperature": 1.0 if samples else 0.0} | sampling,
        stop=parameters.stop or (),
        truncate_prompt_tokens=parameters.truncate,
        grammar=None if grammar is None else value_grammar(grammar.type, grammar.value, "parameters.grammar.value"),
        logprobs=0 if parameters.details or is_streamed else None,
    )


class TgiWriter(Writer):
    """Writes answers. A stream has an event for each token. A step's last token that is not special has the step's text."""

    def __init__(self, call: RunningCall, *, prefix: str, has_details: bool, is_list: bool) -> None:
        """`prefix` is put before the text of the whole answer."""
        super().__init__(call)
        self._text = [prefix]
        self._has_details = has_details
        self._is_list = is_list
        self._num_tokens = 0

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        del index  # there is one choice
        self._text.append(chunk.text)
        tokens = self._tokens(chunk)
        if not tokens and not chunk.text and chunk.finish_reason is None:
            return b""
        shown = [token for token in tokens if not token["special"]]  # clients skip the text of special ones
        if not shown and (chunk.text or not tokens):  # the end of the answer can have text without a new token
            shown = [{"id": 0, "text": "", "logprob": 0.0, "special": not chunk.text}]
            tokens = shown + tokens
        if shown:
            shown[-1]["text"] = chunk.text
        events: list[TgiEvent] = []
        for token in tokens:
            self._num_tokens += 1
            events.append({"index": self._num_tokens, "token": token, "generated_text": None, "details": None})
        if chunk.finish_reason is not None:
            events[-1]["generated_text"] = "".join(self._text)
            events[-1]["details"] = {**self._end(chunk), "input_length": self.usage.counts()[0]}
        return b"".join([b"data:%s\n\n" % fast_json.dumps(event) for event in events])

    def fail(self, error: ApiError) -> bytes:
        return b"data:%s\n\n" % fast_json.dumps(tgi_words(error))

    def whole(self, records: Sequence[ChoiceRecord]) -> TgiAnswer | list[TgiAnswer]:
        [record] = records
        answer: TgiAnswer = {"generated_text": "".join([*self._text, record.text])}
        if self._has_details:
            tokens = [token for chunk in record.chunks for token in self._tokens(chunk)]
            for token in tokens:
                token["text"] = self._tokenizer.token_text(token["id"])
            answer["details"] = {**self._end(record.last), "prefill": [], "tokens": tokens}
        return [answer] if self._is_list else answer

    def _tokens(self, chunk: OutputChunk) -> list[TgiToken]:
        return [
            {"id": entry.token_id, "text": "", "logprob": entry.logprob, "special": self._tokenizer.is_special(entry.token_id)}
            for entry in chunk.logprobs
        ]

    def _end(self, chunk: OutputChunk) -> TgiEnd:
        reason: FinishWord = "stop_sequence" if isinstance(chunk.stop_reason, str) else "eos_token"
        if chunk.finish_reason is FinishReason.LENGTH:
            reason = "length"
        return {
            "finish_reason": reason,
            "generated_tokens": chunk.num_generated_tokens,
            "seed": self._call.requests[0].sampling.seed,
        }
