"""What both generating endpoints do alike: tokens become choices, choices run, and the answer is streamed or collected.

Called by `completions` and `chat`, which know their own shapes. Decides what an early end means before a byte was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.deploy.off_loop import INLINE_MAX_SIZE, OffLoop
from penstock.deploy.running import ModelInfo, RunningModel
from penstock.engine.ports import OutputChunk
from penstock.obs.timings import RequestTimings
from penstock.serve.call import CallTerms
from penstock.serve.http.connection import CLIENT_LEFT, ClientWatch
from penstock.serve.openai.errors import cancelled, invalid, too_long
from penstock.serve.openai.prompts import truncate
from penstock.serve.openai.schemas import GenerationBody
from penstock.serve.openai.sse import EventWriter, SseResponse
from penstock.serve.openai.usage import Usage
from penstock.serve.openai.validation import (
    DEFAULT_COMPLETION_TOKENS,
    check_encoded,
    check_text_size,
    fit_max_tokens,
    for_choice,
    num_logprobs,
    requested_max_tokens,
)
from penstock.serve.service import CallStream, Choice
from penstock.types.request import FinishReason
from penstock.types.sampling import MAX_LOGPROBS, SamplingParams

FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's words; every other end is an error."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """One prompt, ready to run."""

    token_ids: tuple[int, ...]
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the answer looks, apart from what is in it."""

    answer_id: str
    model_name: str
    created_unix_s: int
    system_fingerprint: str
    includes_usage: bool
    """A stream ends with an event of token counts."""
    has_continuous_usage: bool
    has_logprobs: bool
    has_token_ids: bool
    skips_special_tokens: bool
    shows_stop: bool
    """The stop string or stop token that ended a choice is part of its text."""
    end_token_ids: frozenset[int]
    """The model's own end tokens: `stop_reason` names only what the client asked for (as in vLLM)."""


class ChoiceRecord:
    """What one choice has said so far; the whole answer when it is not streamed."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.chunks: list[OutputChunk] = []

    @property
    def text(self) -> str:
        return "".join([chunk.text for chunk in self.chunks])

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def last(self) -> OutputChunk:
        return self.chunks[-1]


def answer_options(
    body: GenerationBody, terms: CallTerms, runtime: RunningModel, *, prefix: str, model_name: str
) -> AnswerOptions:
    """Raises 400 for stream options without a stream, or without each other."""
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' needs 'stream': true.", "stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        param = "stream_options.continuous_usage_stats"
        raise invalid(f"'{param}' needs 'include_usage': true.", param)
    return AnswerOptions(
        answer_id=f"{prefix}-{terms.request_id}",
        model_name=model_name,
        created_unix_s=runtime.sources.unix_time_s(),
        system_fingerprint=runtime.model.fingerprint,
        includes_usage=bool(options and options.include_usage),
        has_continuous_usage=bool(options and options.continuous_usage_stats),
        has_logprobs=num_logprobs(body) is not None,
        has_token_ids=bool(body.return_token_ids),
        skips_special_tokens=body.skip_special_tokens is not False,
        shows_stop=bool(body.include_stop_str_in_output),
        end_token_ids=frozenset(runtime.model.eos_token_ids) - frozenset(body.stop_token_ids or ()),
    )


def encode_prompt(
    body: GenerationBody, runtime: RunningModel, text: str, param: str, *, adds_special_tokens: bool
) -> PromptTokens:
    """Tokenise a text. One that is too long whatever its tokens are is refused unread. Raises 400."""
    if len(text) > INLINE_MAX_SIZE and body.truncate_prompt_tokens is None:
        least = len(text) // runtime.tokenizer.max_token_bytes
        if least > runtime.model.max_model_len:
            raise too_long(
                f"The model's context is {runtime.model.max_model_len} tokens; the prompt has at least {least}.", param
            )
    check_text_size(text, runtime.tokenizer, runtime.model, param)
    token_ids = runtime.tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    if not token_ids:
        raise invalid(f"'{param}' has no tokens.", param)
    check_encoded(token_ids, runtime.tokenizer, runtime.model.vocab_size, param)
    return fit_prompt(body, runtime, token_ids, param)


def fit_prompt(body: GenerationBody, runtime: RunningModel, token_ids: Sequence[int], param: str) -> PromptTokens:
    """Truncate as the client asked."""
    max_tokens = requested_max_tokens(body) or DEFAULT_COMPLETION_TOKENS
    kept = truncate(token_ids, body.truncate_prompt_tokens, runtime.model.max_model_len, max_tokens)
    return PromptTokens(tuple(kept), param)


def first_seed(body: GenerationBody, runtime: RunningModel) -> int:
    """The client's, or one that is drawn. Called before the call waits for anything: `--seed` counts calls as they come."""
    return runtime.sources.draw_seed() if body.seed is None else body.seed


def make_choices(
    body: GenerationBody, model: ModelInfo, prompts: Sequence[PromptTokens], base: SamplingParams, seed: int
) -> list[Choice]:
    """`n` choices of every prompt, in the order of the prompts. Raises 400 if one doesn't fit the context."""
    choices: list[Choice] = []
    for prompt_idx, prompt in enumerate(prompts):
        max_tokens = fit_max_tokens(body, len(prompt.token_ids), model, prompt.param)
        # Equal prompts in one call get equal answers only if a seed was given.
        prompt_seed = seed + len(choices) if body.seed is None else seed
        for nth in range(body.num_choices):
            sampling = for_choice(base, max_tokens=max_tokens, seed=prompt_seed, choice=nth)
            choices.append(Choice(len(choices), prompt_idx, prompt.token_ids, sampling))
    return choices


async def stream_answer(http: HttpRequest, call: CallStream, writer: EventWriter) -> Response:
    """The response that streams `call`. It begins when there is something to say: a refusal is still an HTTP status."""
    watch = ClientWatch(http, partial(call.stream.cancel, CLIENT_LEFT))
    try:
        first_chunks = await call.stream.next_chunks()
        _raise_if_over(call, first_chunks)
    except BaseException:
        watch.stop()
        raise
    return SseResponse(call, watch, writer, first_chunks)


async def collect_answer(http: HttpRequest, call: CallStream, choices: Sequence[Choice], usage: Usage) -> list[ChoiceRecord]:
    """All that the choices say, once they have said it. Raises `ApiError` if one of them ended early."""
    records = [ChoiceRecord(choice) for choice in choices]
    try:
        with ClientWatch(http, partial(call.stream.cancel, CLIENT_LEFT)):
            while chunks := await call.stream.next_chunks():
                _raise_if_over(call, chunks)
                for chunk in chunks:
                    index = call.index_of[chunk.request_id]
                    usage.add(index, chunk)
                    records[index].chunks.append(chunk)
        _raise_if_over(call, [])
    finally:
        call.close()
    return records


async def json_answer(
    off_loop: OffLoop,
    options: AnswerOptions,
    records: Sequence[ChoiceRecord],
    terms: CallTerms,
    make: Callable[[], dict[str, object]],
) -> Response:
    """The whole answer, which `make` puts together, with `Server-Timing` of its first choice."""
    num_tokens = sum([record.last.num_generated_tokens for record in records])
    size = num_tokens * (1 + MAX_LOGPROBS if options.has_logprobs else 1)
    data = await off_loop.finish(size, lambda: orjson.dumps(make()))
    last = records[0].last
    timings = RequestTimings(
        arrival_ns=terms.arrival_ns,
        first_scheduled_ns=last.first_scheduled_ns,
        first_token_ns=last.first_token_ns,
        ended_ns=last.at_ns,
    )
    headers = {"Server-Timing": timings.server_timing()}
    return Response(data, media_type="application/json", headers=headers)


def finish_word(chunk: OutputChunk) -> str | None:
    return None if chunk.finish_reason is None else FINISH_WORDS[chunk.finish_reason]


def stop_reason(options: AnswerOptions, chunk: OutputChunk) -> int | str | None:
    """The client's stop string or stop token that ended the choice; None for any other end."""
    return None if chunk.stop_reason in options.end_token_ids else chunk.stop_reason


def answer_head(options: AnswerOptions, kind: str) -> dict[str, object]:
    """What every answer and every event of a stream begins with."""
    return {
        "id": options.answer_id,
        "object": kind,
        "created": options.created_unix_s,
        "model": options.model_name,
        "system_fingerprint": options.system_fingerprint,
    }


def event_head(options: AnswerOptions, kind: str) -> bytes:
    """`data: {"id": ..., "model": ...`, left open."""
    return b"data: " + orjson.dumps(answer_head(options, kind))[:-1]


def _raise_if_over(call: CallStream, chunks: Sequence[OutputChunk]) -> None:
    if call.stream.is_cancelled:
        raise cancelled(CLIENT_LEFT)
    for chunk in chunks:
        error = call.terms.error_of(chunk)
        if error is not None:
            raise error
