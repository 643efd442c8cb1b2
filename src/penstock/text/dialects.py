"""The formats in which models write tool calls and reasoning, and the messages that their chat templates expect.

A format is recognised by marks in the chat template, or chosen by a setting. If the template has no tools, the system message
describes them and the model answers in the generic format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from penstock.text.parameters import Tags, json_text

NAME_CHARS = "A-Za-z0-9_.-"
"""Characters of a tool's name."""
SPELLED_PARTS = re.compile(r"(<\|[^|<>\s]*\|?>|<｜[^｜<>\s]*｜>|<[a-z_]+\|>|\[/?[A-Z_]+\]|</?[A-Za-z_:]+>)")
"""Marks that may be special tokens."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A notation for tool calls, such as JSON in `<tool_call>` tags. White space in its texts matches any amount, even none."""

    trigger: str
    """The text that turns a free answer into a call: the first part of `begin` + `call`."""
    call: str
    """One call, with placeholders NAME and ARGUMENTS."""
    parameter: Tags | None = None
    """How one argument is written, if arguments are not a JSON object."""
    begin: str = ""
    """Text before the first call."""
    between: str | None = None
    """Text between two calls, or None if an answer has only one."""
    end: str = ""
    """Text after the last call."""
    has_no_mark: bool = False
    """Other text may look like this call. It counts only at the start of an answer, and with the name of a given tool."""

    @cached_property
    def parts(self) -> tuple[str, str, str]:
        """The text of a call before the tool's name, between name and arguments, and after the arguments."""
        before, _, rest = self.call.partition("NAME")
        middle, _, after = rest.partition("ARGUMENTS")
        return before, middle, after

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        before, middle, after = self.parts
        return before + name + middle + (self.parameter.written if self.parameter else json_text)(arguments) + after


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    name: str
    """The name that vLLM gives the format, if any."""
    ways: tuple[Way, ...]
    """The first way is used when a call is required."""
    only_at_start: bool = False
    """Triggers count only at the beginning of an answer."""
    prompt_end: str = ""
    """The end of the prompt for a new answer, which may be the beginning of a trigger."""
    marks: tuple[str, ...] = ()
    """A chat template with all `marks` and none of `but_not` has this format."""
    but_not: tuple[str, ...] = ()
    id_chars: int = 0
    """Length of alphanumeric call ids that the template demands; 0 for any id."""
    has_one_call: bool = False
    """Templates accept only one call per message."""

    @cached_property
    def marked(self) -> tuple[Way, ...]:
        return tuple(way for way in self.ways if not way.has_no_mark)

    @cached_property
    def unmarked(self) -> tuple[Way, ...]:
        return tuple(way for way in self.ways if way.has_no_mark)


_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_HERMES = Way(trigger="<tool_call>", call=f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n")
_QWEN_CODER = Way(
    trigger="<tool_call>",
    call="<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
    parameter=Tags("<parameter=KEY>\nVALUE\n</parameter>\n"),
    between="\n",
)
_QWEN_CODER_BARE = replace(
    _QWEN_CODER,
    trigger="<function=",
    call="<function=NAME>\nARGUMENTS</function>\n</tool_call>",
    between="\n<tool_call>\n",
    has_no_mark=True,
)
"""A call without its first tag, which the models forget. Inside an answer it must begin a line: prose may mention the tag."""
_LLAMA = Way(trigger='{"name": "', call='{"name": "NAME", "parameters": ARGUMENTS}', between="; ", has_no_mark=True)
_LLAMA_TYPED = replace(
    _LLAMA,
    trigger='{"type": "function", "name": "',
    call='{"type": "function", "name": "NAME", "parameters": ARGUMENTS}',
)

# Qwen2.5-Coder writes these instead: https://github.com/QwenLM/Qwen3-Coder/issues/180
# The braces are doubled in the instructions of its template.
_INDENTED = '{ "name": "NAME", "arguments": ARGUMENTS }'
_UNMARKED = tuple(
    Way(trigger=f'{begin}{braces} "name": "', begin=begin, call=call, between="\n", end=end, has_no_mark=True)
    for braces, call in (("{", _INDENTED), ("{ {", f"{{ {_INDENTED} }}"))
    for begin, end in (("```json\n", "\n```"), ("", ""))
)

GENERIC = ToolFormat(name="generic", ways=(_HERMES, *_UNMARKED))
"""The most common format, for models without tools in their template. The prompt explains it."""

# Sources: the chat templates that come with the models, and for Harmony https://cookbook.openai.com/articles/openai-harmony.
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="openai",  # gpt-oss
        has_one_call=True,
        prompt_end="<|start|>assistant",
        marks=("<|channel|>", "<|message|>", "functions."),
        ways=(
            *(
                Way(
                    trigger=f"<|channel|>{channel} to=functions.",
                    call=f"<|channel|>{channel} to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
                )
                for channel in ("commentary", "analysis")
            ),
            Way(
                trigger="<|start|>assistant to=functions.",
                call="<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
            ),
        ),
    ),
    ToolFormat(  # Apriel 1.5 and 1.6; before Hermes, since 1.5's prose says "within <tool_call></tool_call>"
        name="apriel",
        marks=("<tool_calls>[", "]</tool_calls>"),
        ways=(Way(trigger="<tool_calls>", begin="<tool_calls>[\n", call=_OBJECT, between=",\n", end="\n]</tool_calls>"),),
    ),
    ToolFormat(  # Qwen 2.5 and 3, Hermes 2 Pro and 3, SmolLM3; not Qwen3-Coder, which writes XML inside
        name="hermes", marks=("<tool_call>", "</tool_call>"), but_not=("<function=", "<arg_key>"), ways=GENERIC.ways
    ),
    ToolFormat(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        name="qwen3_coder",
        marks=("<tool_call>", "<function=", "<parameter="),
        ways=(
            _QWEN_CODER,
            _QWEN_CODER_BARE,
            replace(_QWEN_CODER_BARE, trigger="\n<function=", begin="\n", has_no_mark=False),
        ),
    ),
    ToolFormat(  # GLM 4.5 to 4.7
        name="glm45",
        marks=("<tool_call>", "<arg_key>", "<arg_value>"),
        ways=(
            Way(
                trigger="<tool_call>",
                call="<tool_call>NAME\nARGUMENTS</tool_call>",
                parameter=Tags("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
                between="\n",
            ),
        ),
    ),
    ToolFormat(
        name="seed_oss",
        marks=("<seed:tool_call>", "<parameter="),
        ways=(
            Way(
                trigger="<seed:tool_call>",
                call="<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
                parameter=Tags("<parameter=KEY>VALUE</parameter>\n"),
                between="\n",
            ),
        ),
    ),
    ToolFormat(
        name="minimax_m2",
        marks=("<minimax:tool_call>", "<invoke name="),
        ways=(
            Way(
                trigger="<minimax:tool_call>",
                begin="<minimax:tool_call>\n",
                call='<invoke name="NAME">\nARGUMENTS</invoke>',
                parameter=Tags('<parameter name="KEY">VALUE</parameter>\n'),
                between="\n",
                end="\n</minimax:tool_call>",
            ),
        ),
    ),
    ToolFormat(
        name="deepseek_v3",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        ways=(
            Way(
                trigger="<｜tool▁calls▁begin｜>",
                begin="<｜tool▁calls▁begin｜>",
                call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
                between="\n",
                end="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    ToolFormat(
        name="deepseek_v31",
        marks=("<｜tool▁calls▁begin｜>",),
        ways=(
            Way(
                trigger="<｜tool▁calls▁begin｜>",
                begin="<｜tool▁calls▁begin｜>",
                call="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
                between="",
                end="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    ToolFormat(  # Nemotron Nano 2, Llama-Nemotron Super 1.5
        name="nemotron_json",
        marks=("<TOOLCALL>",),
        ways=(Way(trigger="<TOOLCALL>", begin="<TOOLCALL>[", call=_OBJECT, between=", ", end="]</TOOLCALL>"),),
    ),
    ToolFormat(  # Mistral Small 3.2, Magistral, Devstral
        name="mistral_args",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        id_chars=9,
        ways=(Way(trigger="[TOOL_CALLS]", call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between=""),),
    ),
    ToolFormat(  # Mistral 7B v0.3, Nemo, Mistral Small 3 and 3.1
        name="mistral",
        marks=("[TOOL_CALLS]",),
        id_chars=9,
        ways=(Way(trigger="[TOOL_CALLS]", begin="[TOOL_CALLS] [", call=_OBJECT, between=", ", end="]"),),
    ),
    ToolFormat(  # Phi-4-mini
        name="phi4_mini_json",
        marks=("<|tool|>", "<|/tool|>"),
        ways=(
            Way(trigger="<|tool_call|>", begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]<|/tool_call|>"),
            Way(trigger="functools[", begin="functools[", call=_OBJECT, between=", ", end="]"),
        ),
    ),
    ToolFormat(  # Granite 3; 3.1 writes the second
        name="granite",
        marks=("<|tool_call|>",),
        ways=(
            Way(trigger="<|tool_call|>", begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]"),
            Way(trigger="<tool_call>", begin="<tool_call>[", call=_OBJECT, between=", ", end="]"),
        ),
    ),
    ToolFormat(  # Llama 3.1, 3.2 and 3.3
        name="llama3_json",
        marks=('"parameters": ', "<|start_header_id|>"),
        only_at_start=True,
        has_one_call=True,
        ways=(
            _LLAMA,
            _LLAMA_TYPED,
            replace(_LLAMA, trigger='<|python_tag|>{"name":', begin="<|python_tag|>", has_no_mark=False),
            replace(_LLAMA_TYPED, trigger='<|python_tag|>{"type":', begin="<|python_tag|>", has_no_mark=False),
        ),
    ),
    GENERIC,
)
"""All formats, in the order in which `find_dialect` tries their marks."""
BY_NAME: Mapping[str, ToolFormat] = {one.name: one for one in TOOL_FORMATS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    name: str
    open: str
    close: str
    lead: str = ""
    """Text between the reasoning block and the content."""
    separator: str = ""
    """Text after the block that is not part of the content, if a grammar decides how the content begins."""
    marks: tuple[str, ...]
    forced: str
    """Text that the server writes to end the block when its budget is used up."""


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        name="openai",
        open="<|channel|>analysis<|message|>",
        close="<|end|><|start|>assistant",
        lead="<|channel|>final<|message|>",
        marks=("<|channel|>", "<|message|>"),
        forced="<|end|><|start|>assistant",
    ),
    ReasoningFormat(name="think", open="<think>", close="</think>", separator="\n\n", marks=("</think>",), forced="\n</think>"),
    ReasoningFormat(
        name="seed_oss",
        open="<seed:think>",
        close="</seed:think>",
        separator="\n",
        marks=("</seed:think>",),
        forced="\n</seed:think>",
    ),
    ReasoningFormat(  # Gemma 4
        name="gemma4", open="<|channel>thought", close="<channel|>", marks=("<|channel>", "<channel|>"), forced="\n<channel|>"
    ),
    ReasoningFormat(name="mistral", open="[THINK]", close="[/THINK]", marks=("[/THINK]",), forced="[/THINK]"),
)

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one model writes tool calls and reasoning, and what its chat template takes."""

    tools: ToolFormat = GENERIC
    reasoning: ReasoningFormat | None = None
    tools_variable: str | None = None
    """The template's variable for tools, or None if a message must describe them."""
    has_tools_in_system: bool = False
    """The template reads tools from a field of the system message, as text."""
    takes_system: bool = True
    takes_calls: bool = False
    """The template shows the calls of past messages. For other templates they are written into the content."""
    takes_text_arguments: bool = False
    """The template concatenates arguments, so they must be JSON text. Other templates take an object."""
    takes_effort: bool = False
    thinking_variable: str | None = None
    """The template's variable that turns reasoning on or off, or None."""

    @property
    def marks(self) -> frozenset[str]:
        return marks_of(self.tools, self.reasoning)


def marks_of(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> frozenset[str]:
    """Return the tags in both formats that may be special tokens of the model, such as `<think>`."""
    ways = () if tools is None else tools.ways
    texts = [text for way in ways for text in (way.trigger, way.begin, way.call, way.between or "", way.end)]
    texts += [way.parameter.text for way in ways if way.parameter is not None]
    if reasoning is not None:
        texts += [reasoning.open, reasoning.close, reasoning.lead]
    return frozenset(mark for text in texts for mark in SPELLED_PARTS.findall(text))


_TOOLS_IN_SYSTEM = re.compile(r"""message(?:\.tools|\[['"]tools['"]\])""")
_CALLS = re.compile(r"""[.'"]tool_calls\b""")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_STRING = re.compile(_QUOTED, re.DOTALL)
_TAG = re.compile(
    r"\{#.*?(?:#\}|\Z)"
    rf"""|(\{{%(?:{_QUOTED}|(?!%\}})[^'"])*+%\}}|\{{\{{(?:{_QUOTED}|(?!\}}\}})[^'"])*+\}}\}})"""
    r"|\{[%{].*",  # the rest, if a tag never ends: trying again at each later one would take quadratic time
    re.DOTALL,
)
"""A comment of Jinja2, or a statement or expression, which is the group."""
_THINKING = re.compile(r"\b(?:if|elif|and|or|not)\b[\s(]*thinking\b(?!\s*[.(\[])")
_OWN_THINKING = re.compile(r"\b(?:for|set)\s+thinking\b(?!\s*=\s*(?:[Tt]rue|[Ff]alse|thinking)\b)")
"""A variable that the template itself sets, to more than a default."""
_TEXT_ARGUMENTS = re.compile(r"""\+\s*tool(?:_call)?[\w.\[\]'"]*\barguments\b['"\]]*\s*(?:\+|-?[%}]\})""")


def find_dialect(template: str | None, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> Dialect:
    """Return the formats of the model with this chat template. The parsers name formats; `auto` detects them."""
    source = template or ""
    in_expressions = "".join(_TAG.findall(source))
    code = _STRING.sub("''", in_expressions)
    has_tools_in_system = _TOOLS_IN_SYSTEM.search(in_expressions) is not None
    tools_variable = next((name for name in ("tools", "xml_tools") if _reads(code, name)), None)
    if tools_variable is None and has_tools_in_system:
        tools_variable = "tools"
    if tool_parser != AUTO:
        tools = BY_NAME[tool_parser]
    else:
        found = [one for one in TOOL_FORMATS if one.marks and _has_marks(source, one)]
        tools = found[0] if found and tools_variable is not None else GENERIC
    if reasoning_parser != AUTO:
        reasoning = next((one for one in REASONING_FORMATS if one.name == reasoning_parser), None)
    else:
        reasoning = next((one for one in REASONING_FORMATS if all(mark in source for mark in one.marks)), None)
    # Gemma's templates refuse system messages. Those that name the user's role alone may drop them (Mistral 0.1, Phi-3).
    names_user_alone = "system" not in source and re.search(r"""['"]user['"]""", in_expressions) is not None
    lacks_system = names_user_alone or "System role not supported" in source
    if tools is GENERIC:
        tools_variable = None
    return Dialect(
        tools=tools,
        reasoning=reasoning,
        tools_variable=tools_variable,
        has_tools_in_system=tools_variable is not None and has_tools_in_system,
        takes_system=not lacks_system,
        takes_calls=tools_variable is not None and _CALLS.search(in_expressions) is not None,
        takes_text_arguments=_TEXT_ARGUMENTS.search(in_expressions) is not None,
        takes_effort=_reads(code, "reasoning_effort"),
        thinking_variable=_thinking_variable(code),
    )


def _thinking_variable(code: str) -> str | None:
    if _reads(code, "enable_thinking"):
        return "enable_thinking"
    return "thinking" if _THINKING.search(code) and not _OWN_THINKING.search(code) else None


def _reads(code: str, name: str) -> bool:
    """Return whether a template's code, without strings, reads this variable. Attributes and assignments do not count."""
    return re.search(rf"(?<![.\w]){name}\b(?!\s*=(?!=))", code) is not None


def _has_marks(source: str, tools: ToolFormat) -> bool:
    return all(mark in source for mark in tools.marks) and not any(mark in source for mark in tools.but_not)


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call in an earlier message of a conversation."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str = ""
    name: str | None = None
    calls: tuple[PastCall, ...] = ()
    """Calls of the assistant."""
    call_id: str = ""
    """The call that a `tool` message answers."""
    reasoning: str = ""

    @property
    def num_chars(self) -> int:
        return len(self.content) + len(self.reasoning) + sum(len(str(call.arguments)) for call in self.calls)


def for_template(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], dialect: Dialect
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages in the form that the model's chat template takes, and its further variables.

    `tools` have Hugging Face's form: `{"type": "function", "function": {...}}`.
    """
    if dialect.tools_variable is not None:
        names = {call.call_id: call.name for message in messages for call in message.calls}
        if dialect.tools.has_one_call:
            messages = _one_by_one(messages)
        converted = [_as_template_message(message, names, dialect) for message in messages]
        if not tools:
            return converted, {}
        if dialect.has_tools_in_system:
            return _with_system(converted, {"tools": json_text([tool["function"] for tool in tools])}), {
                dialect.tools_variable: list(tools)
            }
        return converted, {dialect.tools_variable: list(tools)}
    converted = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message.content}\n</tool_response>" for message in group]
            converted.append({"role": "user", "content": "\n".join(results)})
        else:
            converted += [_as_plain_message(message, dialect) for message in group]
    return _with_text(converted, _instructions(tools), dialect) if tools else converted, {}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Split messages with several tool calls: each call gets a message of its own, followed by its result."""
    changed: list[Message] = []
    groups = [(is_result, list(group)) for is_result, group in groupby(messages, lambda message: message.role == "tool")]
    for at, (is_result, group) in enumerate(groups):
        calls = groups[at - 1][1][-1].calls if is_result and at else ()
        if len(calls) > 1:
            results: dict[str, list[Message]] = {call.call_id: [] for call in calls}
            of_no_call: list[Message] = []
            for result in group:
                results.get(result.call_id, of_no_call).append(result)
            changed += results.pop(calls[0].call_id)
            for call in calls[1:]:  # whose ids may be equal
                changed += [Message(role="assistant", calls=(call,)), *results.pop(call.call_id, [])]
            changed += of_no_call
            continue
        is_answered = at + 1 < len(groups)
        for nth, message in enumerate(group, 1):
            first, *others = message.calls or (None,)
            changed.append(message if first is None else replace(message, calls=(first,)))
            if not (is_answered and nth == len(group)):
                changed += [Message(role="assistant", calls=(call,)) for call in others if call is not None]
    return changed


def _as_template_message(message: Message, names: Mapping[str, str], dialect: Dialect) -> dict[str, Any]:
    """Return a message in the form for a template that supports tools."""
    fields = _as_plain_message(message, dialect)
    if message.calls and dialect.takes_calls:
        fields["tool_calls"] = [
            {
                "id": _template_id(call.call_id, dialect),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json_text(call.arguments) if dialect.takes_text_arguments else dict(call.arguments),
                },
            }
            for call in message.calls
        ]
    if message.role == "tool":
        fields["tool_call_id"] = _template_id(message.call_id, dialect)
        if message.name is None and message.call_id in names:
            fields["name"] = names[message.call_id]
    return fields


def _reasoning_field(message: Message, dialect: Dialect) -> dict[str, str]:
    """Return the field that has a message's reasoning. For gpt-oss, content beside a call is appended to the reasoning."""
    if not message.reasoning or dialect.reasoning is None:
        return {}
    if dialect.reasoning.lead and message.calls and dialect.takes_calls:
        texts = [text for text in (message.reasoning, message.content) if text]
        return {"content": "", "thinking": "\n\n".join(texts)}
    return {"reasoning_content": message.reasoning}


def _as_plain_message(message: Message, dialect: Dialect) -> dict[str, Any]:
    """Return a message in the form for a template without tools."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.calls and not dialect.takes_calls:
        way = dialect.tools.ways[0]
        calls = [way.written(call.name, call.arguments) for call in message.calls]
        text = way.begin + ("\n" if way.between is None else way.between).join(calls) + way.end
        fields["content"] = f"{message.content}\n{text}" if message.content else text
    return fields | _reasoning_field(message, dialect)


def _instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json_text(tool["function"]) for tool in tools)
    return (
        "You can call tools. These are their names, what they do, and the JSON schemas of their arguments:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call a tool, write nothing but a JSON object with its name and arguments between these tags:\n"
        '<tool_call>\n{"name": <name of the tool>, "arguments": <object with the arguments>}\n</tool_call>\n'
        "For several calls write several such blocks. The results come back between <tool_response> and </tool_response>. "
        "If no tool is needed, answer in words."
    )


def _with_text(messages: list[dict[str, Any]], text: str, dialect: Dialect) -> list[dict[str, Any]]:
    if dialect.takes_system:
        return _with_system(messages, {}, text)
    at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *messages]
    changed = {**messages[at], "content": f"{text}\n\n{messages[at]['content']}"}
    return [*messages[:at], changed, *messages[at + 1 :]]


def _with_system(messages: list[dict[str, Any]], fields: Mapping[str, Any], text: str = "") -> list[dict[str, Any]]:
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text, **fields}, *messages]
    first = messages[0]
    content = f"{first['content']}\n\n{text}" if text and first["content"] else first["content"] or text
    return [{**first, "content": content, **fields}, *messages[1:]]


def _template_id(call_id: str, dialect: Dialect) -> str:
    """Return a tool call's id with the length that the template demands. Equal client ids give equal ids."""
    num_chars = dialect.tools.id_chars
    if not num_chars or re.fullmatch(f"[A-Za-z0-9]{{{num_chars}}}", call_id):
        return call_id
    return short_id(call_id, num_chars)


def short_id(text: str, num_chars: int) -> str:
    """Return the first `num_chars` hexadecimal digits of the text's hash."""
    import hashlib

    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()[:num_chars]
