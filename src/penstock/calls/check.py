"""Checks a request against the model that answers it: rules about several fields, or about the model.

`make_call` may run on any thread and never waits. `run` handles templates, tokens and grammars, after admission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from penstock.calls.call import (
    NAME_RULE,
    TOOL_NAME,
    AnswerOptions,
    Call,
    ChatRequest,
    CompletionRequest,
    Conversation,
    FunctionTool,
    GenerationRequest,
    MixedPrompt,
    Names,
    Prompt,
    Shown,
    Terms,
    TokenPrompt,
)
from penstock.deploy.running import RunningModel
from penstock.text.dialects import Dialect
from penstock.text.grammar import MAX_SOURCE_CHARS, Grammar, GrammarKind
from penstock.text.tool_grammar import Tool, tool_source
from penstock.types.adapter import AdapterRef
from penstock.types.errors import Rejected, counted, shorten, wrong
from penstock.types.sampling import (
    MAX_LOGPROBS,
    MIN_TEMPERATURE,
    PARAMETERS,
    BeamParams,
    EarlyStopping,
    SamplingParams,
)

MAX_CHOICES = 128
MAX_BIAS = 100
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TEMPLATE_EFFORTS: Mapping[str, str] = MappingProxyType({"xhigh": "high", "max": "high"})
"""Efforts that chat templates do not know -> what they get instead."""
_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})
_RESERVED_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "tools", "xml_tools", "documents")


def make_call(
    request: ChatRequest | CompletionRequest,
    running: RunningModel,
    terms: Terms,
    adapter: AdapterRef | None = None,
    *,
    num_bytes: int = 0,
    claim: bytes = b"",
) -> Call:
    """Check a request and return its `Call`. Raises `Rejected` (INVALID), which names the field as the client does."""
    sampling = check_sampling(request, running)
    grammar, tools, budget, names, dialect = request.grammar, None, None, request.names, running.dialect
    prompts: Conversation | tuple[Prompt, ...]
    if grammar is not None:
        _check_combinations(request, grammar.param.split(".")[0])
    if isinstance(request, ChatRequest):
        max_tokens, conversation = request.max_tokens, request.conversation
        check_conversation(conversation, names)
        described = tools_for_template(request.tools, names)
        tools, grammar = _tool_use(request, dialect)
        budget = _reasoning_budget(request, dialect)
        if tools is not None:
            _check_combinations(request, names("tools"))
        elif budget is not None:
            limit = "reasoning_effort" if request.max_reasoning_tokens is None else "max_reasoning_tokens"
            _check_combinations(request, names(limit), may_be_endless=True)
        variables = {**_reasoning_variables(request, dialect), **conversation.variables}
        prompts = replace(conversation, variables=variables, tools=described if tools is not None else ())
    else:
        _check_prompts(request, running)
        prompts = request.prompts
        max_tokens = request.default_max_tokens if request.max_tokens is None else max(1, request.max_tokens)
        if request.echo_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=max(request.echo_logprobs, request.prompt_logprobs or 0))
    return Call(
        running=running,
        adapter=adapter,
        terms=terms,
        request=request,
        prompts=prompts,
        sampling=replace(sampling, follows_grammar=grammar is not None or budget is not None),
        grammar=grammar,
        tools=tools,
        max_reasoning_tokens=budget,
        max_tokens=max_tokens,
        num_bytes=num_bytes,
        claim=claim,
        answer=AnswerOptions(
            **{one.name: getattr(request, one.name) for one in fields(Shown)},
            answer_id=request.answer_prefix + terms.request_id,
            model_name=request.model or running.name,
            created_unix_s=running.sources.unix_time_s(),
            system_fingerprint=running.model.fingerprint,
            adapter=adapter,
            is_empty=request.max_tokens == 0,
            shown_special_ids=sampling.shown_special_ids,
            end_token_ids=frozenset(running.tokenizer.eos_token_ids).difference(request.stop_token_ids),
        ),
    )


# Sampling


def check_sampling(request: GenerationRequest, running: RunningModel) -> SamplingParams:
    """Return a request's sampling parameters, except `max_tokens`, `seed`, bad words and a grammar. Raises `Rejected`."""
    names, model = request.names, running.model
    if request.truncate_prompt_tokens == 0:
        raise _invalid(names, ("truncate_prompt_tokens",), "must be at least 1, or -1 for as many as fit")
    check_token_ids(request.stop_token_ids, model.vocab_size, names("stop_token_ids"))
    stop_token_ids = set(request.stop_token_ids)
    if not request.ignore_eos:
        stop_token_ids.update(token_id for token_id in running.tokenizer.eos_token_ids if token_id < model.vocab_size)
    shown = SamplingParams(
        prompt_logprobs=request.prompt_logprobs,
        stop_token_ids=tuple(sorted(stop_token_ids)),
        include_stop_str_in_output=request.include_stop_str_in_output,
        # A stop string that names a special token is found in the text, so the token writes its name there.
        shown_special_ids=running.tokenizer.special_ids(request.stop) if request.skip_special_tokens else None,
        lines=request.lines,
    )
    if request.beams is not None:
        return _beam_sampling(request, shown, running)
    for name, value in request.sampling.items():
        if name in model.capacity.unsupported_parameters and not PARAMETERS[name].is_neutral(value):
            raise _invalid(names, ("sampling", name), "can't be computed by this server's backend: leave it out")
    values = {name: _value(name, request, running) for name, parameter in PARAMETERS.items() if parameter.neutral is not None}
    if 0 < values["temperature"] < MIN_TEMPERATURE:
        values["temperature"] = 0.0
    if values["top_p"] == 0:
        values |= {"top_k": 1, "top_p": 1.0}
    values["top_k"] = max(0, values["top_k"])
    window = values.pop("repeat_last_n")
    if window == 0:
        values |= {name: parameter.neutral for name, parameter in PARAMETERS.items() if parameter.sampler == "penalties"}
    allowed = request.allowed_token_ids
    if allowed is not None:
        check_token_ids(allowed, model.vocab_size, names("allowed_token_ids"))
    if not all(word.strip(" ") for word in request.bad_words):
        raise _invalid(names, ("bad_words",), "must not be only spaces")
    return replace(
        shown,
        **values,
        penalty_window=window if window > 0 else None,
        logprobs=request.logprobs,
        logit_bias=_logit_bias(request.logit_bias, model.vocab_size, names("logit_bias")),
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        banned_token_sequences=request.banned_token_sequences,
        stop=tuple(request.stop),
    )


def _value(name: str, request: GenerationRequest, running: RunningModel) -> Any:
    """Return a sampling parameter: the request's, else that of the model's files, else the neutral value, without effect."""
    value = request.sampling.get(name)
    if value is None:
        value = getattr(running.defaults, name, None)
    return PARAMETERS[name].neutral if value is None else value


def _beam_sampling(request: GenerationRequest, shown: SamplingParams, running: RunningModel) -> SamplingParams:
    assert request.beams is not None
    names, num_stops = request.names, len(shown.stop_token_ids)
    if running.defaults.banned_token_sequences:
        raise _invalid(
            names,
            ("use_beam_search",),
            "is not supported for a model whose files name tokens that no answer may have (suppress_tokens): that needs "
            "`penstock serve --generation-config none`",
        )
    accepted = [("repeat_last_n", request.sampling.get("repeat_last_n")), ("temperature", 0)]
    given: list[tuple[str, ...]] = [
        ("sampling", name)
        for name, value in request.sampling.items()
        if not PARAMETERS[name].is_neutral(value) and (name, value) not in accepted
    ]
    given += [(name,) for name in ("logit_bias", "bad_words", "stop") if getattr(request, name)]
    if request.allowed_token_ids is not None:
        given.append(("allowed_token_ids",))
    if given:
        raise _invalid(names, given[0], f"is not supported with '{names('use_beam_search')}'")
    max_width = MAX_LOGPROBS - num_stops
    if max_width < 1:
        name = names("stop_token_ids")
        raise wrong(
            f"A beam search takes at most {MAX_LOGPROBS - 1} stop tokens, and there are {num_stops}: name fewer in '{name}'.",
            name,
        )
    rule = f"is {request.n}; with '{names('use_beam_search')}'"
    if request.n > max_width:
        raise _invalid(names, ("n",), f"{rule} and {counted(num_stops, 'stop token')} it can be at most {max_width}")
    max_beams = running.model.capacity.max_rows
    if request.n > max_beams:
        raise _invalid(names, ("n",), f"{rule} it can be at most {max_beams}, the rows that run at once (--max-num-seqs)")
    beams = BeamParams(
        width=request.n,
        length_penalty=request.beams.length_penalty,
        early_stopping=EarlyStopping.of(request.beams.early_stopping),
        num_logprobs=request.logprobs,
    )
    return replace(shown, temperature=0.0, beams=beams, logprobs=max(request.n + num_stops, request.logprobs or 0))


def _logit_bias(biases: Mapping[str, Any], vocab_size: int, param: str) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            at = f"{param}.{shorten(key)}"
            raise wrong(f"'{at}' must be a number from {-MAX_BIAS} to {MAX_BIAS}.", at)
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            detail = f"'{param}' has the key {key[:50]!r}; keys are token ids in [0, {vocab_size})."
            raise wrong(detail, param)
        if int(key) in pairs:
            raise wrong(f"'{param}' names token {int(key)} twice.", param)
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise `Rejected` for the first id outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        detail = f"'{param}[{index}]' is {token_ids[index]}, outside the vocabulary [0, {vocab_size})."
        raise wrong(detail, param)


def _check_combinations(request: GenerationRequest, asked_by: str, *, may_be_endless: bool = False) -> None:
    """Raise `Rejected` for fields that do not work with the field `asked_by`: a grammar, tools or a limit of reasoning."""
    for field, is_given, reason in (
        ("use_beam_search", request.beams is not None, "a search follows no grammar"),
        ("allowed_token_ids", request.allowed_token_ids is not None, "both say which tokens may come"),
        ("ignore_eos", request.ignore_eos and not may_be_endless, "a complete answer must be able to end"),
    ):
        if is_given:
            raise _invalid(request.names, (field,), f"and '{asked_by}' exclude each other, as {reason}: leave one of them out")


# Completions


def _check_prompts(request: CompletionRequest, running: RunningModel) -> None:
    names, prompts = request.names, request.prompts
    if request.max_tokens == 0 and (min_tokens := request.sampling.get("min_tokens")):
        raise _invalid(names, ("sampling", "min_tokens"), f"({min_tokens}) is larger than '{names('max_tokens')}' (0)")
    if request.suffix:
        for field in ("echo", "truncate_prompt_tokens"):
            if getattr(request, field):
                rule = f"is not supported with '{names('suffix')}', because the prompt is then built from both texts"
                raise _invalid(names, (field,), rule)
    for prompt in prompts:
        check_prompt(prompt, running.model.vocab_size)
    if len(prompts) * request.n > MAX_CHOICES:
        name = names("n")
        detail = f"{len(prompts)} prompts with {name}={request.n} are more than {MAX_CHOICES} answers."
        raise wrong(detail, name)


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raise `Rejected` for a token id outside the vocabulary."""
    if isinstance(prompt, TokenPrompt):
        check_token_ids(prompt.token_ids, vocab_size, prompt.param)
    elif isinstance(prompt, MixedPrompt):
        for index, part in enumerate(prompt.parts):
            if isinstance(part, int) and not 0 <= part < vocab_size:
                at = f"{prompt.param}[{index}]"
                raise wrong(f"'{at}' is {part}, outside the vocabulary [0, {vocab_size}).", at)


# Chats


def check_conversation(conversation: Conversation, names: Names) -> None:
    if conversation.continue_final_message and conversation.add_generation_prompt:
        name = names("continue_final_message")
        detail = f"'{name}' and '{names('add_generation_prompt')}' exclude each other."
        raise wrong(detail, name)
    for name in _RESERVED_VARIABLES:
        if name in conversation.variables:
            rule = f"must not set '{name}'; use the field '{name.removeprefix('xml_')}'"
            raise _invalid(names, ("chat_template_kwargs",), rule)


def tools_for_template(tools: Sequence[FunctionTool], names: Names) -> tuple[Mapping[str, Any], ...]:
    """Return the tools in Hugging Face's form, with all fields, because chat templates concatenate them.

    Raises `Rejected` for wrong or repeated names.
    """
    described: list[Mapping[str, Any]] = []
    found: set[str] = set()
    for index, tool in enumerate(tools):
        if not TOOL_NAME.fullmatch(tool.name):
            raise _invalid(names, ("tools", index, "name"), NAME_RULE)
        if tool.name in found:
            raise _invalid(names, ("tools", index, "name"), f"{tool.name!r} is also the name of another tool")
        found.add(tool.name)
        parameters = tool.parameters or {}
        if parameters.get("type", "object") != "object":
            raise _invalid(names, ("tools", index, "parameters"), "must describe an object")
        fields = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": {**parameters, **_NO_PARAMETERS, **parameters},  # in the client's order
        }
        described.append({"type": "function", "function": fields})
    return tuple(described)


def _tool_use(request: ChatRequest, dialect: Dialect) -> tuple[frozenset[str] | None, Grammar | None]:
    """Return the tools that can be called (`Call.tools`), and the answer's grammar."""
    choice, asked = request.tool_choice, request.grammar
    if choice.mode == "none" or not request.tools:
        return None, asked
    callable_tools = [tool for tool in request.tools if choice.names is None or tool.name in choice.names]
    is_auto = choice.mode == "auto"
    is_free = request.calls_are_free
    source = tool_source(
        [Tool(tool.name, tool.parameters or None, tool.is_strict) for tool in callable_tools],
        dialect.tools,
        is_parallel=choice.is_parallel,
        has_trigger=is_free,
    )
    param = request.names("tools")
    if len(source) > MAX_SOURCE_CHARS:
        detail = f"'{param}' have {len(source)} characters of schemas and names; at most {MAX_SOURCE_CHARS} are taken."
        raise wrong(detail, param)
    other = asked if is_auto else None
    names = frozenset([tool.name for tool in callable_tools])
    return names, Grammar(GrammarKind.TOOLS, source, other=other, param=param if other is None else other.param)


def _reasoning_budget(request: ChatRequest, dialect: Dialect) -> int | None:
    """Return the limit of reasoning tokens, or None. It is 0 if the client turns reasoning off and the template can't."""
    budget = request.max_reasoning_tokens
    if budget is None:
        is_off = request.reasoning_effort == "none" and dialect.thinking_variable is None
        return 0 if is_off and dialect.reasoning is not None else None
    if dialect.reasoning is None:
        rule = "is for models that write reasoning in a block of its own; this model does not"
        raise _invalid(request.names, ("max_reasoning_tokens",), rule)
    return budget


def _reasoning_variables(request: ChatRequest, dialect: Dialect) -> dict[str, Any]:
    effort = request.reasoning_effort
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise _invalid(request.names, ("reasoning_effort",), f"must be one of {', '.join(_EFFORTS)}")
    variables: dict[str, Any] = {}
    if dialect.takes_effort:
        variables["reasoning_effort"] = TEMPLATE_EFFORTS.get(effort, effort)
    if dialect.thinking_variable is not None:
        variables[dialect.thinking_variable] = effort != "none"
    return variables


def _invalid(names: Names, path: tuple[str | int, ...], rule: str) -> Rejected:
    return wrong(f"'{names(*path)}' {rule}.", names(*path))
