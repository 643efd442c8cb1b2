"""Bodies of Ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md), read into requests common to all APIs.

May run on any thread and never waits.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from starlette.types import Scope

from penstock.calls.call import Call, ChatRequest, CompletionRequest, Conversation, Names, TextPrompt
from penstock.deploy.deployment import Deployment
from penstock.deploy.running import RunningModel, ServedModel
from penstock.serve.asking import Asked
from penstock.serve.bodies import (
    INT32_MAX,
    Body,
    NumLogprobs,
    StopStrings,
    Unread,
    has_not_yet,
    has_sampling,
    has_unread,
    json_grammar,
    sampling_of,
)
from penstock.serve.errors import invalid
from penstock.serve.http.checks import is_admin
from penstock.serve.messages import MAX_MESSAGES, CallId, ToolBodies, ToolBody, past_call, read_tools
from penstock.serve.ollama.write import OllamaWriter
from penstock.serve.streams import NewWriter
from penstock.text.dialects import Message, PastCall
from penstock.text.grammar import Grammar

LATEST = ":latest"
"""The tag that Ollama's clients append to a name without one."""
_NAMES = Names(
    "ollama",
    "options.",
    {
        "reasoning_effort": "think",
        "max_tokens": "options.num_predict",
        "stop": "options.stop",
        "tools.*": "tools[{}].function",
    },
)
_EFFORTS = ("low", "medium", "high", "max")
_DURATION = re.compile(r"-?(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ns|us|µs|ms|s|m|h))+")
_PART_OF_DURATION = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_UNITS_NS = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9}
_MAX_KEEP_NS = 10 * 365 * 24 * 3600 * 10**9
"""A longer `keep_alive` means forever."""


@has_sampling("ollama")
# The server's settings decide how a model is loaded and run, and no token of a prompt is dropped.
@has_unread(
    "mirostat_tau mirostat_eta num_ctx num_keep num_thread numa num_batch num_gpu main_gpu low_vram f16_kv use_mmap use_mlock"
)
@has_not_yet(
    "mirostat=0 penalize_newline=true tfs_z=1|1.0 typical_p=1|1.0 embedding_only=false logits_all=false vocab_only=false"
)
class OptionsBody(Body):
    """The field `options`. Null is the same as absent."""

    stop: StopStrings | None = None
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = None
    """Most tokens to generate. -1 and -2: the rest of the context."""


class OllamaBody(Body):
    """Fields of every request to a model."""

    model: Annotated[str, Field(min_length=1)]
    options: OptionsBody | None = None
    keep_alive: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})] = None
    """How long the model stays loaded after the request: seconds, or a duration such as `5m`. Negative: forever."""

    @classmethod
    def drop_unknown(cls, value: dict[str, Any]) -> list[str]:
        options = value.get("options")
        names = OptionsBody.drop_unknown(options) if isinstance(options, dict) else []
        return [f"options.{name}" for name in names] + super().drop_unknown(value)

    def check_rules(self) -> None:
        keep_ns(self)


# A prompt that is too long is refused, never cut.
@has_not_yet("shift=false truncate=false")
class _AnswerBody(OllamaBody):
    stream: bool | None = None
    """True by default."""
    format: Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]})] = None
    """`json`, or a JSON schema of the answer."""
    think: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": list(_EFFORTS)}]})] = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    def check_rules(self) -> None:
        super().check_rules()
        if self.format not in (None, "", "json") and not isinstance(self.format, dict):
            raise invalid("'format' must be 'json', or a JSON schema as an object.", "format")
        if self.think is not None and not isinstance(self.think, bool) and self.think not in _EFFORTS:
            raise invalid("'think' must be true, false, 'low', 'medium', 'high' or 'max'.", "think")


class OllamaFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Unread = None


class OllamaCall(Body):
    function: OllamaFunction
    id: CallId | None = None
    type: Literal["function"] | None = None
    index: Unread = None
    """Sent here, not in `function`, by Open WebUI."""


@has_not_yet("images=[]")
class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tool_name: CallId | None = None
    """The name of the tool with this result."""
    tool_call_id: CallId | None = None


class OllamaChatBody(_AnswerBody):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Without messages, the model is only loaded, or unloaded if `keep_alive` is 0."""
    tools: ToolBodies | None = None


@has_not_yet('template="" context=[] images=[] width height steps')
class OllamaGenerateBody(_AnswerBody):
    """`POST /api/generate`."""

    prompt: str | None = None
    """Without a prompt, the model is only loaded, or unloaded if `keep_alive` is 0."""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    """True uses the prompt without the chat template."""


def name_of(model: str, deployment: Deployment) -> str:
    """Return the served name of a model. Clients append `:latest` to any name."""
    is_known = not model.endswith(LATEST) or deployment.find(model) is not None
    return model if is_known else model.removesuffix(LATEST)


def keep_ns(body: OllamaBody) -> int | None:
    """Return `keep_alive` in nanoseconds. -1 means forever, None absent. Raises 400."""
    value = body.keep_alive
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        duration_ns = value * 1e9
    elif value == "0":
        duration_ns = 0
    elif isinstance(value, str) and _DURATION.fullmatch(value):
        duration_ns = sum(float(number) * _UNITS_NS[unit] for number, unit in _PART_OF_DURATION.findall(value))
        duration_ns *= -1 if value.startswith("-") else 1
    else:
        message = "'keep_alive' must be a number of seconds, or a duration with its unit, such as '5m' or '1h30m'."
        raise invalid(message, "keep_alive")
    return int(duration_ns) if 0 <= duration_ns <= _MAX_KEEP_NS else -1


def keep(body: OllamaBody, served: ServedModel, deployment: Deployment, scope: Scope) -> bool:
    """Apply `keep_alive` if the server unloads idle models and the client is an admin. Return whether it was applied."""
    duration_ns = keep_ns(body)
    may = served.idle_unload_ns is not None and is_admin(scope)
    if duration_ns is not None and may:
        deployment.keep(served, duration_ns)
    return may


def chat(body: OllamaChatBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Return the call of a chat, and its writer. Raises `ApiError` and `Rejected`."""
    call = _chat(body, _begin(body, asked), _conversation(_messages(body.messages or ())), asked, body.tools or ())
    return call, partial(OllamaWriter, model_name=body.model, is_chat=True)


def generate(body: OllamaGenerateBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Return the call of a prompt, as a user's message if there is a chat template, and its writer. Raises as `chat`."""
    new_writer = partial(OllamaWriter, model_name=body.model, is_chat=False)
    running, prompt = _begin(body, asked), body.prompt or ""
    if not body.raw and not body.suffix and running.chat_template is not None:
        messages = [Message(role="system", content=body.system)] if body.system else []
        conversation = Conversation([*messages, Message(role="user", content=prompt)], param="prompt")
        return _chat(body, running, conversation, asked), new_writer
    if body.system:
        reason = "with 'raw' or 'suffix'" if body.raw or body.suffix else "with a model that has no chat template"
        raise invalid(f"'system' means nothing {reason}: put it into 'prompt'.", "system")
    if body.think:
        raise invalid("'think' needs the chat template: leave out 'raw' and 'suffix'.", "think")
    prompts, suffix = (TextPrompt(prompt, "prompt"),), body.suffix or ""
    return asked.call(CompletionRequest(**_fields(body, asked), prompts=prompts, suffix=suffix)), new_writer


def _begin(body: _AnswerBody, asked: Asked) -> RunningModel:
    """Return the model of the request and apply `keep_alive`. Raises 404 and `ModelAway`."""
    deployment = asked.reader.deployment
    served, _ = asked.find(name_of(body.model, deployment))
    running = served.answerer()
    keep(body, served, deployment, asked.scope)
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    return running


def _chat(
    body: _AnswerBody, running: RunningModel, conversation: Conversation, asked: Asked, tools: Sequence[ToolBody] = ()
) -> Call:
    effort = _effort(body.think, running)
    return asked.call(
        ChatRequest(**_fields(body, asked), conversation=conversation, tools=read_tools(tools), reasoning_effort=effort)
    )


def _fields(body: _AnswerBody, asked: Asked) -> dict[str, Any]:
    """Return the fields that requests for chats and completions share."""
    options = body.options or OptionsBody()
    sampling = sampling_of(options, "ollama")
    if sampling.get("seed") == -1:  # Ollama's default: a random one
        del sampling["seed"]
    return {
        "names": _NAMES,
        "model": name_of(body.model, asked.reader.deployment),
        "is_streamed": body.stream is not False,
        "sampling": sampling,
        "stop": options.stop or (),
        "max_tokens": _limit(options.num_predict),
        "grammar": _grammar(body.format),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def _limit(num_predict: int | None) -> int | None:
    if num_predict == 0:
        raise invalid("'options.num_predict' must be at least 1, or -1 for no limit.", "options.num_predict")
    return None if num_predict is None or num_predict < 0 else num_predict


def _grammar(asked: Any) -> Grammar | None:
    if asked is None or asked == "":
        return None
    return json_grammar(None if asked == "json" else asked, "format")


def _effort(think: Any, running: RunningModel) -> str | None:
    """Return the reasoning effort, or None for the model's default. Raises 400."""
    if not think:
        return None if think is None else "none"
    if running.dialect.reasoning is None:
        told = "true" if think is True else repr(think)
        raise invalid(f"'think' is {told}, but {running.name} does not reason in a block of its own: leave it out.", "think")
    return "medium" if think is True else str(think)


def _conversation(messages: Sequence[Message]) -> Conversation:
    """Return the conversation. The assistant's last message is continued, or dropped if it is empty, unless it has calls."""
    last = messages[-1]
    if last.role != "assistant" or last.calls:
        return Conversation(messages)
    if last.content or last.reasoning:
        return Conversation(messages, add_generation_prompt=False, continue_final_message=True)
    return Conversation(messages[:-1] or messages)  # a new turn, which can begin with reasoning


def _messages(messages: Sequence[OllamaMessage]) -> list[Message]:
    """Return the messages, with an id for each call and each tool's result. Raises 400.

    A result without an id belongs to the first earlier call without a result, or to the first such call of `tool_name`.
    """
    found: list[Message] = []
    open_calls = _OpenCalls()
    for index, message in enumerate(messages):
        at, is_answer = f"messages[{index}]", message.role == "tool"
        fields = {"tool_calls": message.tool_calls, "thinking": message.thinking}
        if message.role != "assistant" and (field := next((name for name, value in fields.items() if value), None)):
            raise invalid(f"'{at}.{field}' is for messages with the role 'assistant', not '{message.role}'.", f"{at}.{field}")
        fields = {"tool_name": message.tool_name, "tool_call_id": message.tool_call_id}
        if not is_answer and (field := next((name for name, value in fields.items() if value is not None), None)):
            raise invalid(f"'{at}.{field}' is for messages with the role 'tool'.", f"{at}.{field}")
        calls: list[PastCall] = []
        for nth, call in enumerate(message.tool_calls or ()):
            call_id = call.id or f"call_{index}_{nth}"
            open_calls.add(call_id, call.function.name)
            calls.append(past_call(call_id, call.function.name, call.function.arguments, f"{at}.tool_calls[{nth}].function"))
        call_id = (open_calls.answered(message) or message.tool_call_id or f"call_{index}") if is_answer else ""
        content, reasoning = message.content or "", message.thinking or ""
        found.append(Message(role=message.role, content=content, calls=tuple(calls), call_id=call_id, reasoning=reasoning))
    return found


class _OpenCalls:
    """Tool calls that have no result yet, oldest first. There may be tens of thousands, so nothing here iterates over all."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()
        """Id of a call -> name of its tool."""
        self._ids_of: dict[str, OrderedDict[str, None]] = {}
        """Name of a tool -> ids of its calls."""

    def add(self, call_id: str, name: str) -> None:
        self._close(call_id)
        self._names[call_id] = name
        self._ids_of.setdefault(name, OrderedDict())[call_id] = None

    def answered(self, message: OllamaMessage) -> str | None:
        """Remove the tool call that `message` answers, and return its id. None if there is no such call."""
        ids = self._names if message.tool_name is None else self._ids_of.get(message.tool_name, ())
        call_id = message.tool_call_id or next(iter(ids), None)
        return call_id if call_id is not None and self._close(call_id) else None

    def _close(self, call_id: str) -> bool:
        name = self._names.pop(call_id, None)
        if name is not None:
            del self._ids_of[name][call_id]
        return name is not None
