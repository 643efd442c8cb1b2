"""The tools, calls and reasoning that a chat's body speaks of, in OpenAI's words: from fields to what a `Call` has of them.

`read` calls it with bodies whose types and ranges were checked already. `text.dialects` knows what a model's template makes of
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.calls.call import AskedGrammar, ToolUse
from penstock.serve.bodies import NAME_RULE, TOOL_NAME, ToolBody, check_depth, past_call
from penstock.serve.errors import invalid, refuse_unknown
from penstock.serve.openai.schemas import ChatCompletionBody, ChatMessage
from penstock.text.dialects import Dialect, PastCall
from penstock.text.grammar import MAX_SOURCE_CHARS, Grammar, GrammarKind
from penstock.text.tool_grammar import Tool, tool_source

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_BUDGETS = ("thinking_token_budget", "max_thinking_tokens", "thinking_budget")
"""vLLM's name, and those of others."""
OF_TOOLS = frozenset({"tools", "tool_choice", "functions", "function_call", "reasoning_effort", *_BUDGETS})
"""Fields of a chat that are read here."""


def told_tools(tools: Sequence[ToolBody]) -> tuple[Mapping[str, Any], ...]:
    """The tools as Hugging Face gives them to templates. Raises 400 for names that are wrong or come twice."""
    told: list[Mapping[str, Any]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function, param = tool.function, f"tools[{index}].function"
        if not TOOL_NAME.fullmatch(function.name):
            raise invalid(f"'{param}.name' {NAME_RULE}.", f"{param}.name")
        if function.name in names:
            raise invalid(f"'{param}.name' {function.name!r} is the name of another tool, too.", f"{param}.name")
        names.add(function.name)
        if (function.parameters or {}).get("type", "object") != "object":
            raise invalid(f"'{param}.parameters' must describe an object.", f"{param}.parameters")
        check_depth(function.parameters, f"{param}.parameters")
        fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
        told.append({"type": "function", "function": {name: value for name, value in fields.items() if value is not None}})
    return tuple(told)


def read_tool_use(
    body: ChatCompletionBody, dialect: Dialect, asked: AskedGrammar | None
) -> tuple[ToolUse | None, AskedGrammar | None]:
    """The tools that the answer may call, or has to, and the grammar of the calls; none if it shall call none. Raises 400.

    `asked`: what else the answer may be, as other fields say.
    """
    has_functions = body.functions not in (None, [])
    if has_functions or body.function_call not in (None, "none", "auto"):
        field, instead = ("functions", "tools") if has_functions else ("function_call", "tool_choice")
        raise invalid(f"'{field}' is not supported: send '{instead}', which took its place.", field)
    tools = [
        Tool(tool.function.name, tool.function.parameters or None, bool(tool.function.strict)) for tool in body.tools or ()
    ]
    choice, named = _choice(body.tool_choice, [tool.name for tool in tools])
    if choice == "none" or not tools:
        return None, None
    callable_tools = [tool for tool in tools if named is None or tool.name in named]
    is_free = choice == "auto" and asked is None
    other = asked.grammar if asked is not None and choice == "auto" else None
    is_one = isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "function"
    is_parallel = body.parallel_tool_calls is not False and not is_one
    source = tool_source(callable_tools, dialect.tools, is_parallel=is_parallel, has_trigger=is_free)
    if len(source) > MAX_SOURCE_CHARS:
        raise invalid(
            f"'tools' have {len(source)} characters of schemas and names; at most {MAX_SOURCE_CHARS} are taken.", "tools"
        )
    param = "tools" if asked is None or other is None else asked.param
    names = frozenset([tool.name for tool in callable_tools]) if is_free else frozenset()
    return ToolUse(is_free=is_free, names=names), AskedGrammar(Grammar(GrammarKind.TOOLS, source, other=other), param)


def _choice(choice: Any, names: Sequence[str]) -> tuple[str, frozenset[str] | None]:
    """`none`, `auto` or `required`, and the names of the tools that are meant; None: all."""
    param = "tool_choice"
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise invalid(f"'{param}' must be 'none', 'auto', 'required', or an object that names a tool.", param)
        if choice == "required" and not names:
            raise invalid("'tool_choice' is 'required', but there are no 'tools'.", param)
        return choice or "auto", None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", frozenset([_named(choice, names, param)])
    if kind == "allowed_tools":
        refuse_unknown(choice, ("type", "allowed_tools"), param)
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise invalid(f"'{param}.allowed_tools' must have a 'mode' of 'auto' or 'required', and 'tools'.", param)
        refuse_unknown(allowed, ("mode", "tools"), f"{param}.allowed_tools")
        return mode, frozenset(_named(one, names, f"{param}.allowed_tools.tools[{at}]") for at, one in enumerate(listed))
    raise invalid(f"'{param}.type' must be 'function' or 'allowed_tools'.", param)


def _named(one: Any, names: Sequence[str], param: str) -> str:
    function = one.get("function") if isinstance(one, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise invalid(f"'{param}.function.name' must be a string.", f"{param}.function.name")
    if one.get("type", "function") != "function":
        raise invalid(f"'{param}.type' must be 'function'.", f"{param}.type")
    refuse_unknown(one, ("type", "function"), param)
    refuse_unknown(function, ("name",), f"{param}.function")
    if name not in names:
        raise invalid(f"'{param}.function.name' is {name[:64]!r}, which none of the 'tools' has.", f"{param}.function.name")
    return name


def past_calls(message: ChatMessage, param: str) -> tuple[PastCall, ...]:
    """The calls of an assistant's message. Raises 400."""
    calls: list[PastCall] = []
    for index, call in enumerate(message.tool_calls or ()):
        name, arguments = call.function.name, call.function.arguments
        calls.append(past_call(call.id, name, arguments, f"{param}.tool_calls[{index}].function"))
    return tuple(calls)


def max_reasoning_tokens(body: ChatCompletionBody, dialect: Dialect) -> int | None:
    """The limit of the reasoning block; None: there is none. Raises 400."""
    given: dict[str, int] = {name: value for name in _BUDGETS if (value := getattr(body, name)) not in (None, -1)}
    if not given:
        has_no_switch = not dialect.takes_effort and not dialect.takes_enable_thinking
        ends_at_once = body.reasoning_effort == "none" and has_no_switch and dialect.reasoning is not None
        return 0 if ends_at_once else None
    names = list(given)
    if len(set(given.values())) > 1:
        raise invalid(f"'{names[0]}' and '{names[1]}' differ; give one of them.", names[1])
    if dialect.reasoning is None:
        raise invalid(f"'{names[0]}' is for models that reason in a block of their own, which this one does not.", names[0])
    return given[names[0]]


def reasoning_variables(body: ChatCompletionBody, dialect: Dialect) -> dict[str, Any]:
    """Return the template's variables for the reasoning effort, if it has any. Raises 400 for an unknown effort."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise invalid(f"'reasoning_effort' must be one of {', '.join(_EFFORTS)}.", "reasoning_effort")
    if dialect.takes_effort:
        return {"reasoning_effort": effort}
    if dialect.takes_enable_thinking:
        return {"enable_thinking": effort != "none"}
    return {}
