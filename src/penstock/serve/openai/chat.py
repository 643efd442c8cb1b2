"""`POST /v1/chat/completions`: messages in, a message out. Its shapes and events; what it shares is in `generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from penstock.deploy.running import RunningModel
from penstock.engine.ports import OutputChunk
from penstock.serve.call import read_terms
from penstock.serve.http.connection import unless_gone
from penstock.serve.openai.asks import make_ask
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
    json_answer,
    make_choices,
    stop_reason,
    stream_answer,
)
from penstock.serve.openai.grammars import AskedGrammar, asked_grammar, with_matchers
from penstock.serve.openai.logprobs import ChatLogprobs
from penstock.serve.openai.messages import render_prompt, template_messages
from penstock.serve.openai.schemas import ChatCompletionBody
from penstock.serve.openai.usage import Usage
from penstock.serve.openai.validation import base_sampling, check_model
from penstock.serve.service import Choice, Service
from penstock.text.tokenizer import Tokenizer
from penstock.types.request import FinishReason
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import SamplingParams

_KIND = "chat.completion"
_CHUNK_KIND = "chat.completion.chunk"


class ChatEndpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, body: ChatCompletionBody, http: HttpRequest) -> Response:
        """Answer a conversation. The model's own chat template turns the messages into its prompt."""
        service, runtime = self._service, self._service.runtime
        terms = read_terms(http.scope, body, runtime, service.config)
        model_name = check_model(body.model, runtime.model)
        options = answer_options(body, terms, runtime, prefix="chatcmpl", model_name=model_name)
        seed = first_seed(body, runtime)
        data = await http.body()
        num_bytes = len(data)
        base, grammar, messages = await runtime.off_loop.run(num_bytes, lambda: _read(body, runtime))
        num_chars = sum(len(message["content"]) for message in messages)
        with service.admit(make_ask(body, terms, num_requests=body.num_choices, num_chars=num_chars, data=data)) as place:
            tenant = terms.owner.tenant
            rendering = runtime.off_loop.render(tenant, num_bytes, lambda: render_prompt(runtime.chat_template, body, messages))
            text = await unless_gone(http, rendering)
            prompt = await runtime.off_loop.run(len(text), lambda: _tokenise(body, runtime, text))
            choices = make_choices(body, runtime.model, [prompt], base, seed)
            if grammar is not None:
                choices = await with_matchers(choices, grammar, runtime, tenant, http)
            call = service.open(terms, choices, place)
        with call:
            usage = Usage(choices)
            if body.stream:
                return await stream_answer(http, call, ChatEvents(options, choices, usage, runtime.tokenizer))
            records = await collect_answer(http, call, choices, usage)
        return await json_answer(
            runtime.off_loop, options, records, terms, lambda: _answer(options, records, usage, runtime.tokenizer)
        )


class ChatEvents:
    """The events of a streamed chat answer: the role, pieces of content, the finish reason."""

    def __init__(self, options: AnswerOptions, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer) -> None:
        self._options = options
        self._prompt_token_ids = choices[0].prompt_token_ids
        self._usage = usage
        self._logprobs = [_logprob_writer(options, tokenizer) for _ in choices] if options.has_logprobs else []
        self._head = event_head(options, _CHUNK_KIND)
        self._prefixes = [self._head + b',"choices":[{"index":%d,"delta":{' % choice.index for choice in choices]
        self._is_plain = not (options.has_logprobs or options.has_token_ids or options.has_continuous_usage)
        self._suffix = b"}]" + (b',"usage":null' if options.includes_usage else b"") + b"}\n\n"
        self._plain_suffix = b'},"logprobs":null,"finish_reason":null' + self._suffix

    def begin(self) -> bytes:
        role = b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null' + self._usage_suffix()
        events = b"".join([prefix + role for prefix in self._prefixes])
        if not self._options.has_token_ids:
            return events
        prompt = b',"prompt_token_ids":' + orjson.dumps(self._prompt_token_ids)
        return self._head + prompt + events.removeprefix(self._head)

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        self._usage.add(index, chunk)
        data = self._content(index, chunk)
        if chunk.finish_reason is None:
            return data
        fields = {"finish_reason": finish_word(chunk), "stop_reason": stop_reason(self._options, chunk)}
        return data + self._prefixes[index] + b'},"logprobs":null,' + orjson.dumps(fields)[1:-1] + self._usage_suffix()

    def end(self) -> bytes:
        if not self._options.includes_usage:
            return b""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(self._usage.body()) + b"}\n\n"

    def _content(self, index: int, chunk: OutputChunk) -> bytes:
        if self._is_plain:
            if not chunk.text:
                return b""
            return self._prefixes[index] + b'"content":' + orjson.dumps(chunk.text) + self._plain_suffix
        logprobs = None
        if self._logprobs:
            entries = _shown_logprobs(self._options, chunk)
            logprobs = self._logprobs[index].write(entries, chunk.text, is_last=chunk.finish_reason is not None)
        if not chunk.text and not chunk.token_ids and not (logprobs and logprobs["content"]):
            return b""
        fields: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        if self._options.has_token_ids:
            fields["token_ids"] = chunk.token_ids
        text = orjson.dumps(chunk.text)
        return self._prefixes[index] + b'"content":' + text + b"}," + orjson.dumps(fields)[1:-1] + self._usage_suffix()

    def _usage_suffix(self) -> bytes:
        if not self._options.has_continuous_usage:
            return self._suffix
        return b'}],"usage":' + orjson.dumps(self._usage.body()) + b"}\n\n"


def _read(body: ChatCompletionBody, runtime: RunningModel) -> tuple[SamplingParams, AskedGrammar | None, list[dict[str, Any]]]:
    base = base_sampling(body, runtime.model, runtime.defaults, runtime.tokenizer)
    return base, asked_grammar(body), template_messages(body.messages)


def _tokenise(body: ChatCompletionBody, runtime: RunningModel, text: str) -> PromptTokens:
    # The template has written the special tokens already.
    adds_special_tokens = body.add_special_tokens is True
    return encode_prompt(body, runtime, text, "messages", adds_special_tokens=adds_special_tokens)


def _answer(options: AnswerOptions, records: Sequence[ChoiceRecord], usage: Usage, tokenizer: Tokenizer) -> dict[str, Any]:
    answer: dict[str, Any] = {
        **answer_head(options, _KIND),
        "choices": [_choice(options, record, tokenizer) for record in records],
        "usage": usage.body(),
    }
    if options.has_token_ids:
        answer["prompt_token_ids"] = records[0].choice.prompt_token_ids
    return answer


def _choice(options: AnswerOptions, record: ChoiceRecord, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if options.has_logprobs:
        entries = [entry for chunk in record.chunks for entry in _shown_logprobs(options, chunk)]
        logprobs = _logprob_writer(options, tokenizer).write(entries, record.text, is_last=True)
    choice: dict[str, Any] = {
        "index": record.choice.index,
        "message": {"role": "assistant", "content": record.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_word(record.last),
        "stop_reason": stop_reason(options, record.last),
    }
    if options.has_token_ids:
        choice["token_ids"] = record.token_ids
    return choice


def _shown_logprobs(options: AnswerOptions, chunk: OutputChunk) -> Sequence[TokenLogprobs]:
    """Without those of a stop token that is not shown: its bytes might complete a character that the text leaves incomplete."""
    ends_with_stop_token = chunk.finish_reason is FinishReason.STOP and isinstance(chunk.stop_reason, int)
    return chunk.logprobs[:-1] if ends_with_stop_token and not options.shows_stop else chunk.logprobs


def _logprob_writer(options: AnswerOptions, tokenizer: Tokenizer) -> ChatLogprobs:
    return ChatLogprobs(tokenizer, skips_special_tokens=options.skips_special_tokens)
