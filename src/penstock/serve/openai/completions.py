"""`POST /v1/completions`: prompts in, texts out. Its shapes and events; what it shares with chat is in `generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from penstock.admission import Ask
from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.serve.call import CallTerms, read_terms
from penstock.serve.openai.asks import make_ask
from penstock.serve.openai.errors import invalid
from penstock.serve.openai.generation import (
    AnswerOptions,
    ChoiceRecord,
    PromptTokens,
    answer_head,
    answer_options,
    collect_answer,
    encode_prompt,
    event_head,
    finish_word,
    first_seed,
    fit_prompt,
    json_answer,
    make_choices,
    stop_reason,
    stream_answer,
)
from penstock.serve.openai.grammars import AskedGrammar, asked_grammar, with_matchers
from penstock.serve.openai.logprobs import CompletionLogprobs
from penstock.serve.openai.prompts import PromptInput, TextPrompt, parse_prompts
from penstock.serve.openai.schemas import MAX_CHOICES, CompletionBody
from penstock.serve.openai.usage import Usage
from penstock.serve.openai.validation import base_sampling, check_model
from penstock.serve.service import Choice, Service
from penstock.text.tokenizer import Tokenizer
from penstock.types.sampling import SamplingParams

_KIND = "text_completion"


class CompletionsEndpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, body: CompletionBody, http: HttpRequest) -> Response:
        """Continue one or more prompts, given as text or token ids."""
        service, runtime = self._service, self._service.runtime
        terms = read_terms(http.scope, body, runtime, service.config)
        model_name = check_model(body.model, runtime.model)
        options = answer_options(body, terms, runtime, prefix="cmpl", model_name=model_name)
        _check_combinations(body)
        seed = first_seed(body, runtime)
        data = await http.body()
        num_bytes = len(data)
        base, grammar, inputs = await runtime.off_loop.run(num_bytes, lambda: _read(body, runtime))
        with service.admit(_ask(body, terms, inputs, data)) as place:
            prompts = await runtime.off_loop.run(num_bytes, lambda: [_tokenise(body, runtime, prompt) for prompt in inputs])
            choices = make_choices(body, runtime.model, prompts, base, seed)
            echoes = _echoes(body, inputs, prompts, runtime.tokenizer)
            if grammar is not None:
                choices = await with_matchers(choices, grammar, runtime, terms.owner.tenant, http)
            call = service.open(terms, choices, place)
        tokenizer = runtime.tokenizer
        with call:
            usage = Usage(choices)
            if body.stream:
                return await stream_answer(http, call, CompletionEvents(options, choices, echoes, usage, tokenizer))
            records = await collect_answer(http, call, choices, usage)
        return await json_answer(
            runtime.off_loop, options, records, terms, lambda: _answer(options, records, echoes, usage, tokenizer)
        )


class CompletionEvents:
    """The events of a streamed completion. An event without logprobs or token ids is four joined pieces of bytes."""

    def __init__(
        self, options: AnswerOptions, choices: Sequence[Choice], echoes: Sequence[str], usage: Usage, tokenizer: Tokenizer
    ) -> None:
        self._options = options
        self._choices = choices
        self._echoes = echoes
        self._usage = usage
        self._head = event_head(options, _KIND)
        self._prefixes = [self._head + b',"choices":[{"index":%d,"text":' % choice.index for choice in choices]
        self._is_plain = not (options.has_logprobs or options.has_token_ids or options.has_continuous_usage)
        self._suffix = b"}]" + (b',"usage":null' if options.includes_usage else b"") + b"}\n\n"
        self._plain_suffix = b',"logprobs":null,"finish_reason":null' + self._suffix
        self._has_begun = [False] * len(choices)
        self._logprobs = [_logprob_writer(options, tokenizer) for _ in choices] if options.has_logprobs else []

    def begin(self) -> bytes:
        end = b',"logprobs":null,"finish_reason":null' + self._usage_suffix()
        return b"".join(
            [
                self._prefixes[choice.index] + orjson.dumps(self._echoes[choice.prompt_idx]) + end
                for choice in self._choices
                if self._echoes[choice.prompt_idx]
            ]
        )

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        self._usage.add(index, chunk)
        if chunk.finish_reason is None and self._is_plain:
            return self._prefixes[index] + orjson.dumps(chunk.text) + self._plain_suffix if chunk.text else b""
        fields = self._fields(index, chunk)
        return self._prefixes[index] + orjson.dumps(chunk.text) + b"," + orjson.dumps(fields)[1:-1] + self._usage_suffix()

    def end(self) -> bytes:
        if not self._options.includes_usage:
            return b""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(self._usage.body()) + b"}\n\n"

    def _fields(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "logprobs": self._logprobs[index].write(chunk.logprobs) if self._logprobs else None,
            "finish_reason": finish_word(chunk),
        }
        if chunk.finish_reason is not None:
            fields["stop_reason"] = stop_reason(self._options, chunk)
        if self._options.has_token_ids:
            fields["token_ids"] = chunk.token_ids
            if not self._has_begun[index]:
                fields["prompt_token_ids"] = self._choices[index].prompt_token_ids
        self._has_begun[index] = True
        return fields

    def _usage_suffix(self) -> bytes:
        if not self._options.has_continuous_usage:
            return self._suffix
        return b'}],"usage":' + orjson.dumps(self._usage.body()) + b"}\n\n"


def _check_combinations(body: CompletionBody) -> None:
    if body.echo and body.logprobs is not None:
        raise invalid("'echo' with 'logprobs' needs the prompt's log-probabilities, which are not supported yet.", "echo")
    if body.best_of is not None and body.best_of != body.num_choices:
        raise invalid(f"'best_of' other than n ({body.num_choices}) is not supported yet.", "best_of")


def _ask(body: CompletionBody, terms: CallTerms, inputs: Sequence[PromptInput], data: bytes) -> Ask:
    return make_ask(
        body,
        terms,
        num_requests=_num_choices(body, inputs),
        num_chars=sum(len(prompt.text) for prompt in inputs if isinstance(prompt, TextPrompt)),
        num_token_ids=sum(len(prompt.token_ids) for prompt in inputs if not isinstance(prompt, TextPrompt)),
        data=data,
    )


def _num_choices(body: CompletionBody, inputs: Sequence[PromptInput]) -> int:
    num_choices = len(inputs) * body.num_choices
    if num_choices > MAX_CHOICES:
        raise invalid(f"{len(inputs)} prompts with n={body.num_choices} are more than {MAX_CHOICES} answers.", "n")
    return num_choices


def _read(body: CompletionBody, runtime: RunningModel) -> tuple[SamplingParams, AskedGrammar | None, list[PromptInput]]:
    base = base_sampling(body, runtime.model, runtime.defaults, runtime.tokenizer)
    return base, asked_grammar(body), parse_prompts(body.prompt, runtime.model.vocab_size)


def _tokenise(body: CompletionBody, runtime: RunningModel, prompt: PromptInput) -> PromptTokens:
    if isinstance(prompt, TextPrompt):
        adds_special_tokens = body.add_special_tokens is not False
        return encode_prompt(body, runtime, prompt.text, prompt.param, adds_special_tokens=adds_special_tokens)
    return fit_prompt(body, runtime, prompt.token_ids, prompt.param)


def _echoes(
    body: CompletionBody, inputs: Sequence[PromptInput], prompts: Sequence[PromptTokens], tokenizer: Tokenizer
) -> list[str]:
    """What stands before each prompt's answers: nothing, or the prompt, as far as the model saw it."""
    if not body.echo:
        return [""] * len(inputs)
    is_whole = body.truncate_prompt_tokens is None
    return [
        given.text if is_whole and isinstance(given, TextPrompt) else tokenizer.decode(prompt.token_ids)
        for given, prompt in zip(inputs, prompts, strict=True)
    ]


def _answer(
    options: AnswerOptions, records: Sequence[ChoiceRecord], echoes: Sequence[str], usage: Usage, tokenizer: Tokenizer
) -> dict[str, Any]:
    return {
        **answer_head(options, _KIND),
        "choices": [_choice(options, record, echoes[record.choice.prompt_idx], tokenizer) for record in records],
        "usage": usage.body(),
    }


def _choice(options: AnswerOptions, record: ChoiceRecord, echo: str, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if options.has_logprobs:
        entries = [entry for chunk in record.chunks for entry in chunk.logprobs]
        logprobs = _logprob_writer(options, tokenizer).write(entries)
    choice: dict[str, Any] = {
        "index": record.choice.index,
        "text": echo + record.text,
        "logprobs": logprobs,
        "finish_reason": finish_word(record.last),
        "stop_reason": stop_reason(options, record.last),
    }
    if options.has_token_ids:
        choice["token_ids"] = record.token_ids
        choice["prompt_token_ids"] = record.choice.prompt_token_ids
    return choice


def _logprob_writer(options: AnswerOptions, tokenizer: Tokenizer) -> CompletionLogprobs:
    return CompletionLogprobs(tokenizer, skips_special_tokens=options.skips_special_tokens, text_offset=0)
