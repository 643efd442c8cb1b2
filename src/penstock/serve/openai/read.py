"""The first pass of a chat or a completion: from the body and the headers to a `Call`, or the 400 that names what is wrong.

Every rule that needs no tokenizer is here or, for a field by itself, in `schemas`. Called by the endpoints; may run on any
thread, and waits for nothing. Templates, tokens and grammars cost much, and are left to `run`, behind the door.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.types import Scope

from penstock.calls.call import (
    AnswerOptions,
    AskedGrammar,
    Call,
    Conversation,
    Prompt,
    Terms,
    TextPrompt,
    TokenPrompt,
    ToolUse,
)
from penstock.config import ServerConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.running import RunningModel
from penstock.deploy.served import ServedModel
from penstock.serve.asking import (
    MAX_BIAS,
    check_token_ids,
    claim_of,
    find_answering,
    read_terms,
)
from penstock.serve.bodies import MAX_CHOICES, IgnoredParameters, parse_body
from penstock.serve.errors import invalid, shorten
from penstock.serve.http.checks import identity_of
from penstock.serve.openai.grammars import asked_grammar, check_combinations
from penstock.serve.openai.schemas import ChatCompletionBody, ChatMessage, ChatTemplateFields, CompletionBody, GenerationBody
from penstock.serve.openai.tools import OF_TOOLS, past_calls, read_tool_use, reasoning_variables, told_tools
from penstock.serve.openai.tools import max_reasoning_tokens as read_budget
from penstock.text.dialects import Message
from penstock.types.adapter import AdapterRef
from penstock.types.errors import counted
from penstock.types.sampling import MAX_LOGPROBS, MIN_TEMPERATURE, BeamParams, EarlyStopping, SamplingDefaults, SamplingParams

_Number = TypeVar("_Number", int, float)
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat answers may use the rest of the context."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS_NOT_YET = ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal", "thinking")
PART_NO_EFFECT = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of a message's part without effect: prefixes are cached in any case."""
_RESERVED_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
_WITHOUT_BEAMS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "temperature": (0, 1),
        "top_p": (1,),
        "top_k": (0, -1),
        "min_p": (0,),
        "repetition_penalty": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "min_tokens": (0,),
        "stop": ([],),
        "seed": (),
    }
)
"""Fields that a beam search does not know, and their values that ask for nothing."""
_ONLY_WITH_BEAMS: Mapping[str, object] = MappingProxyType({"length_penalty": 1.0, "early_stopping": False})
"""Fields that only a beam search knows, and vLLM's defaults of them."""


class Reader:
    """Reads what clients ask, and which model they ask. Thread-safe."""

    def __init__(self, deployment: Deployment, config: ServerConfig, ignored: IgnoredParameters | None = None) -> None:
        """`ignored`: as for `parse_body`."""
        self._deployment = deployment
        self._config = config
        self.ignored = ignored

    def find(self, name: str | None, scope: Scope, user: str = "") -> tuple[ServedModel, AdapterRef | None]:
        """As `find_answering`."""
        return find_answering(name, self._deployment, scope, self._config, user)

    def chat(self, data: bytes, scope: Scope) -> Call:
        """The body of `/v1/chat/completions`. Raises `ApiError`."""
        return self.read_chat(parse_body(data, ChatCompletionBody, self.ignored), data, scope)

    def read_chat(self, body: ChatCompletionBody, data: bytes, scope: Scope) -> Call:
        """A chat whose fields are checked. Other APIs make one of what they were sent, which is `data`. Raises `ApiError`."""
        running, adapter, terms = self._begin(body, scope)
        num_logprobs = _chat_logprobs(body)
        sampling, grammar = read_sampling(body, num_logprobs, running), asked_grammar(body)
        conversation, dialect = read_conversation(body), running.dialect
        tool_use, call_grammar, budget = None, None, None
        if not OF_TOOLS.isdisjoint(body.model_fields_set):
            tool_use, call_grammar = read_tool_use(body, dialect, grammar)
            budget = read_budget(body, dialect)
            if call_grammar is not None or budget is not None:
                check_combinations(body, "tools" if call_grammar is not None else "thinking_token_budget")
            variables = {**reasoning_variables(body, dialect), **conversation.variables}
            told = () if tool_use is None else conversation.tools
            conversation = dataclasses.replace(conversation, variables=variables, tools=told)
        if (tool_use is not None or dialect.reasoning is not None) and running.has_special_marks:
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)  # the writer leaves out those that are no marks
        return _call(
            running,
            adapter,
            body,
            data,
            terms,
            sampling,
            grammar=call_grammar or grammar,
            prompts=conversation,
            tool_use=tool_use,
            max_reasoning_tokens=budget,
            has_reasoning=body.include_reasoning is not False,
            adds_special_tokens=body.add_special_tokens is True,  # the template has written them already
            max_tokens=_chat_max_tokens(body),
            ends_with_context=True,
            answer_id=f"chatcmpl-{terms.request_id}",
            has_logprobs=num_logprobs is not None,
        )

    def completion(self, data: bytes, scope: Scope) -> Call:
        """The body of `/v1/completions`. Raises `ApiError`."""
        return self.read_completion(parse_body(data, CompletionBody, self.ignored), data, scope)

    def read_completion(
        self, body: CompletionBody, data: bytes, scope: Scope, prompts: tuple[Prompt, ...] | None = None
    ) -> Call:
        """The same for a completion. `prompts` of another API go before those of the body. Raises `ApiError`."""
        running, adapter, terms = self._begin(body, scope)
        if body.best_of is not None and body.best_of != body.num_choices:
            raise invalid(f"'best_of' other than n ({body.num_choices}) is not supported yet.", "best_of")
        if body.max_tokens == 0 and body.min_tokens:
            raise invalid(f"'min_tokens' ({body.min_tokens}) is larger than 'max_tokens' (0).", "min_tokens")
        sampling, grammar = read_sampling(body, body.logprobs, running), asked_grammar(body)
        num_echo_logprobs = body.logprobs if body.echo else None
        if num_echo_logprobs is not None:
            sampling = dataclasses.replace(sampling, prompt_logprobs=max(num_echo_logprobs, body.prompt_logprobs or 0))
        if body.suffix:
            for field, asks in (("echo", body.echo), ("truncate_prompt_tokens", body.truncate_prompt_tokens)):
                if asks:
                    raise invalid(f"'{field}' is not supported with 'suffix', which makes another prompt of the two.", field)
        if prompts is None:
            is_empty = body.suffix and body.prompt == ""
            prompts = (TextPrompt("", "prompt"),) if is_empty else _prompts(body.prompt, running.model.vocab_size)
        if len(prompts) * body.num_choices > MAX_CHOICES:
            raise invalid(f"{len(prompts)} prompts with n={body.num_choices} are more than {MAX_CHOICES} answers.", "n")
        return _call(
            running,
            adapter,
            body,
            data,
            terms,
            sampling,
            grammar=grammar,
            prompts=prompts,
            adds_special_tokens=body.add_special_tokens is not False,
            max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
            max_tokens_param=None if body.max_tokens is None else "max_tokens",
            answer_id=f"cmpl-{terms.request_id}",
            has_logprobs=body.logprobs is not None,
            has_prompt=bool(body.echo),
            suffix=body.suffix or "",
            num_echo_logprobs=num_echo_logprobs,
            is_empty=body.max_tokens == 0,
        )

    def _begin(self, body: GenerationBody, scope: Scope) -> tuple[RunningModel, AdapterRef | None, Terms]:
        """The model that is asked, the adapter, which begins to be loaded, and the terms."""
        if body.request_id is not None:
            identity_of(scope).adopt(body.request_id)  # before all else that may be refused: the refusal carries it
        served, adapter = self.find(body.model, scope, body.safety_identifier or body.user or "")
        running = served.answerer()
        if adapter is not None and running.adapters is not None and body.model is not None:
            if (rejected := running.adapters.failure(body.model)) is not None:
                raise rejected
            running.adapters.want(adapter)
        if running.model.encoder is not None:
            raise invalid(
                f"{running.name} turns texts into numbers and writes none. Ask /v1/embeddings, /v1/rerank or /classify, or "
                "another model.",
                "model",
            )
        is_priority_scheduled = running.model.is_priority_scheduled
        terms = read_terms(
            scope,
            running.clock.now_ns(),
            self._config,
            is_priority_scheduled=is_priority_scheduled,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            conversation=body.prompt_cache_key or body.session_id or body.user or "",
        )
        options = body.stream_options
        if options is not None and not body.stream:
            raise invalid("'stream_options' needs 'stream': true.", "stream_options")
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            param = "stream_options.continuous_usage_stats"
            raise invalid(f"'{param}' needs 'include_usage': true.", param)
        if body.prompt_logprobs is not None and body.stream:
            raise invalid("'prompt_logprobs' is not told in a stream: ask without 'stream'.", "prompt_logprobs")
        return running, adapter, terms


def read_sampling(body: GenerationBody, num_logprobs: int | None, running: RunningModel) -> SamplingParams:
    """All that a body says about sampling, but for `max_tokens`, `seed`, `bad_words` and a grammar.

    `num_logprobs`: alternatives to tell beside each sampled token; None: no log-probabilities. Raises 400.
    """
    if body.truncate_prompt_tokens == 0:
        message = "'truncate_prompt_tokens' must be at least 1, or -1 for as many as fit."
        raise invalid(message, "truncate_prompt_tokens")
    model, defaults = running.model, running.defaults
    check_token_ids(body.stop_token_ids or (), model.vocab_size, "stop_token_ids")
    stop_token_ids = set(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_token_ids.update(token_id for token_id in model.eos_token_ids if token_id < model.vocab_size)
    if body.use_beam_search:
        if defaults.banned_token_sequences:
            raise invalid(
                "'use_beam_search' is not supported for a model whose files name tokens that no answer may have "
                "(suppress_tokens): that needs `penstock serve --generation-config none`.",
                "use_beam_search",
            )
        return _beam_sampling(body, num_logprobs, tuple(sorted(stop_token_ids)), model.max_beams)
    for field, neutral in _ONLY_WITH_BEAMS.items():
        if getattr(body, field) not in (None, neutral):
            raise invalid(f"'{field}' needs 'use_beam_search': true.", field)
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    if 0 < temperature < MIN_TEMPERATURE:
        raise invalid(f"'temperature' must be 0 (greedy) or at least {MIN_TEMPERATURE}, not {temperature}.", "temperature")
    sampling = SamplingParams(
        min_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_k=max(0, _first(body.top_k, defaults.top_k, 0)),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        **_penalties(body, defaults),
        logprobs=num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}, model.vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, model.vocab_size),
        stop_token_ids=tuple(sorted(stop_token_ids)),
        stop=tuple(body.stop or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    if not all(word.strip(" ") for word in body.bad_words or ()):
        raise invalid("'bad_words' must not be only spaces.", "bad_words")
    return sampling


def _penalties(body: GenerationBody, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the penalties as fields of `SamplingParams`. With `repeat_last_n` 0 there are none."""
    if body.repeat_last_n == 0:
        return {}
    return {
        "repetition_penalty": _first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "penalty_window": None if body.repeat_last_n == -1 else body.repeat_last_n,
    }


def _first(asked: _Number | None, of_model: _Number | None, otherwise: _Number) -> _Number:
    """The request's value, else that of the model's files, else the API's."""
    if asked is not None:
        return asked
    return otherwise if of_model is None else of_model


def _call(
    running: RunningModel,
    adapter: AdapterRef | None,
    body: GenerationBody,
    data: bytes,
    terms: Terms,
    sampling: SamplingParams,
    *,
    grammar: AskedGrammar | None,
    prompts: Conversation | tuple[Prompt, ...],
    adds_special_tokens: bool,
    max_tokens: int | None,
    max_tokens_param: str | None = None,
    ends_with_context: bool = False,
    answer_id: str,
    has_logprobs: bool,
    has_prompt: bool = False,
    suffix: str = "",
    num_echo_logprobs: int | None = None,
    is_empty: bool = False,
    tool_use: ToolUse | None = None,
    max_reasoning_tokens: int | None = None,
    has_reasoning: bool = True,
) -> Call:
    """Puts together what both bodies have alike."""
    options = body.stream_options
    answer = AnswerOptions(
        answer_id=answer_id,
        model_name=body.model or running.name,
        created_unix_s=running.sources.unix_time_s(),
        system_fingerprint=running.model.fingerprint,
        adapter=adapter,
        is_streamed=bool(body.stream),
        includes_usage=bool(options and options.include_usage),
        has_continuous_usage=bool(options and options.continuous_usage_stats),
        has_timings=bool(body.timings_per_token),
        has_progress=bool(body.return_progress and body.stream),
        has_logprobs=has_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        num_echo_logprobs=num_echo_logprobs,
        is_empty=is_empty,
        has_token_ids=bool(body.return_token_ids),
        has_prompt=has_prompt,
        skips_special_tokens=body.skip_special_tokens is not False,
        shows_stop=sampling.include_stop_str_in_output,
        end_token_ids=frozenset(running.model.eos_token_ids).difference(body.stop_token_ids or ()),
    )
    return Call(
        running=running,
        adapter=adapter,
        terms=terms,
        prompts=prompts,
        adds_special_tokens=adds_special_tokens,
        suffix=suffix,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        num_choices=body.num_choices,
        sampling=dataclasses.replace(sampling, follows_grammar=grammar is not None or max_reasoning_tokens is not None),
        bad_words=tuple(body.bad_words or ()),
        grammar=grammar,
        tools=tool_use,
        max_reasoning_tokens=max_reasoning_tokens,
        has_reasoning=has_reasoning,
        seed=body.seed,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        ends_with_context=ends_with_context,
        answer=answer,
        num_bytes=len(data),
        claim=claim_of(terms.owner.tenant, data),
    )


def _beam_sampling(
    body: GenerationBody, num_logprobs: int | None, stop_token_ids: tuple[int, ...], max_beams: int | None
) -> SamplingParams:
    """A search takes the model's own probabilities: what would change them, or draw from them, is refused."""
    for field, neutral in _WITHOUT_BEAMS.items():
        if getattr(body, field) not in (None, *neutral):
            raise invalid(f"'{field}' is not supported with 'use_beam_search'.", field)
    width = body.num_choices
    max_width = MAX_LOGPROBS - len(stop_token_ids)
    if max_width < 1:
        raise invalid(
            f"A beam search takes at most {MAX_LOGPROBS - 1} stop tokens, and there are {len(stop_token_ids)}: "
            "name fewer in 'stop_token_ids'.",
            "stop_token_ids",
        )
    if width > max_width:
        stops = counted(len(stop_token_ids), "stop token")
        raise invalid(f"'n' is {width}; with 'use_beam_search' and {stops} it can be at most {max_width}.", "n")
    if max_beams is not None and width > max_beams:
        raise invalid(
            f"'n' is {width}; with 'use_beam_search' it can be at most {max_beams}: so many rows run at once (--max-num-seqs).",
            "n",
        )
    beams = BeamParams(
        width=width,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=EarlyStopping(body.early_stopping or False),
        num_logprobs=num_logprobs,
    )
    return SamplingParams(
        temperature=0.0,
        beams=beams,
        logprobs=max(width + len(stop_token_ids), num_logprobs or 0),
        prompt_logprobs=body.prompt_logprobs,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _chat_logprobs(body: ChatCompletionBody) -> int | None:
    """Alternatives to tell beside each sampled token; None if no log-probabilities were asked for."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    return None


def _chat_max_tokens(body: ChatCompletionBody) -> int | None:
    """Return the limit, under either name. Raises 400 if both are given and differ."""
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise invalid("'max_tokens' and 'max_completion_tokens' differ; give one of them.", "max_tokens")
    return body.max_completion_tokens


def _allowed(token_ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    check_token_ids(token_ids, vocab_size, "allowed_token_ids")
    return tuple(sorted(set(token_ids)))


def _logit_bias(biases: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            param = f"logit_bias.{shorten(key)}"
            raise invalid(f"'{param}' must be a number from {-MAX_BIAS} to {MAX_BIAS}.", param)
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise invalid(f"'logit_bias' has the key {key[:50]!r}; keys are token ids in [0, {vocab_size}).", "logit_bias")
        if int(key) in pairs:
            raise invalid(f"'logit_bias' names token {int(key)} twice.", "logit_bias")
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


# Prompts of completions


def _prompts(value: Any, vocab_size: int) -> tuple[TextPrompt | TokenPrompt, ...]:
    """`str | list[str] | list[int] | list[list[int]]`, at most `MAX_CHOICES` prompts, none empty."""
    if isinstance(value, str):
        return (_text_prompt(value, "prompt"),)
    if not isinstance(value, list):
        raise invalid("'prompt' must be a string, a list of strings, a list of token ids or a list of those.", "prompt")
    if not value:
        raise invalid("'prompt' is empty.", "prompt")
    if type(value[0]) is int:
        return (_token_prompt(value, "prompt", vocab_size),)
    if len(value) > MAX_CHOICES:
        raise invalid(f"'prompt' has {len(value)} prompts; at most {MAX_CHOICES} are taken at once.", "prompt")
    return tuple(_prompt_item(item, f"prompt[{index}]", type(value[0]), vocab_size) for index, item in enumerate(value))


def _prompt_item(item: Any, param: str, kind: type, vocab_size: int) -> TextPrompt | TokenPrompt:
    if type(item) is kind and isinstance(item, str):
        return _text_prompt(item, param)
    if type(item) is kind and isinstance(item, list):
        return _token_prompt(item, param, vocab_size)
    raise invalid(f"'{param}' must be like the prompts before it: all strings, or all lists of token ids.", param)


def _token_prompt(token_ids: list[Any], param: str, vocab_size: int) -> TokenPrompt:
    if not token_ids:
        raise invalid(f"'{param}' is empty.", param)
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise invalid(f"'{param}[{index}]' must be a token id.", param)
    check_token_ids(token_ids, vocab_size, param)
    return TokenPrompt(tuple(token_ids), param)


def _text_prompt(text: str, param: str) -> TextPrompt:
    if not text:
        raise invalid(f"'{param}' is empty.", param)
    return TextPrompt(text, param)


# Messages of chats


def read_conversation(fields: ChatTemplateFields) -> Conversation:
    """Messages and tools. Only text so far: other parts are refused by name. Raises 400."""
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(fields.messages)]
    continue_final = bool(fields.continue_final_message)
    # Asking to continue the last message means that no new turn is opened, so saying nothing about it is enough.
    add_generation_prompt = not continue_final if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continue_final and add_generation_prompt:
        raise invalid("'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message")
    variables = fields.chat_template_kwargs or {}
    for name in _RESERVED_VARIABLES:
        if name in variables:
            raise invalid(f"'chat_template_kwargs' must not set '{name}'; use the field of that name.", "chat_template_kwargs")
    tools = told_tools(fields.tools) if fields.tools else ()
    return Conversation(messages, add_generation_prompt, continue_final, variables, tools)


def _message(message: ChatMessage, param: str) -> Message:
    role = _role(message.role, f"{param}.role")
    calls = past_calls(message, param) if message.tool_calls else ()
    reasoning = message.reasoning_content or message.reasoning or ""
    if message.reasoning and message.reasoning != reasoning:
        raise invalid(f"'{param}.reasoning' and '{param}.reasoning_content' differ; give one of them.", f"{param}.reasoning")
    for name, value in (("tool_calls", calls), ("reasoning_content", reasoning)):
        if value and role != "assistant":
            raise invalid(f"'{param}.{name}' is for messages with the role 'assistant', not '{role}'.", f"{param}.{name}")
    if role == "tool" and message.tool_call_id is None:
        raise invalid(f"Missing required parameter: '{param}.tool_call_id'.", f"{param}.tool_call_id")
    if role != "tool" and message.tool_call_id is not None:
        raise invalid(f"'{param}.tool_call_id' is for messages with the role 'tool'.", f"{param}.tool_call_id")
    content = "" if calls and message.content in (None, []) else _text(message.content, f"{param}.content")
    return Message(
        role=role,
        content=content,
        name=message.name,
        calls=calls,
        call_id=message.tool_call_id or "",
        reasoning=reasoning,
    )


def _role(role: Any, param: str) -> str:
    """`developer`, OpenAI's newer word, becomes `system`."""
    if role == "function":
        raise invalid(f"'{param}' 'function' is not supported: send the role 'tool', which took its place.", param)
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"'{param}' must be one of {', '.join(_ROLES)}.", param)
    return "system" if role == "developer" else role


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"'{param}' must be a string, or a list of text parts that is not empty.", param)
    return "".join([_part_text(part, f"{param}[{index}]") for index, part in enumerate(content)])


def _part_text(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"'{param}' must be an object.", param)
    kind = part.get("type")
    if kind in _PARTS_NOT_YET:
        raise invalid(f"'{param}.type' {kind!r} is not supported yet; only text is.", f"{param}.type")
    if kind != "text":
        raise invalid(f"'{param}.type' must be 'text'.", f"{param}.type")
    for name in part:
        if name not in ("type", "text") and name not in PART_NO_EFFECT:
            raise invalid(f"Unknown parameter: '{param}.{name}'."[:300], param)
    if not isinstance(part.get("text"), str):
        raise invalid(f"'{param}.text' must be a string.", f"{param}.text")
    return str(part["text"])
