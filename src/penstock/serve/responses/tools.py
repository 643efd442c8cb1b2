"""Reads the tools of a response.

Models know only functions. So functions of a namespace get longer names, and some other types of tools are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.calls.call import FunctionTool
from penstock.serve.bodies import check_part
from penstock.serve.errors import invalid, shorten
from penstock.serve.messages import MAX_TOOLS, function_tool
from penstock.serve.responses.schemas import FunctionBody, NamespaceTool

LEFT_OUT = ("custom", "image_generation", "tool_search", "web_search", "web_search_preview")
"""Types of tools that coding agents send but can work without. Other unknown types are refused."""
_TOOLS: Mapping[str, type[FunctionBody | NamespaceTool]] = MappingProxyType(
    {"function": FunctionBody, "namespace": NamespaceTool}
)


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function: `namespace__name`, or only `name`."""
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(slots=True)
class Tools:
    """The tools of one response, as the model sees them and as the response repeats them."""

    functions: list[FunctionTool] = field(default_factory=list)
    """The functions that the model can call."""
    places: list[str] = field(default_factory=list)
    """The place of each of `functions` in the client's body."""
    namespaced: dict[str, dict[str, str]] = field(default_factory=dict)
    """The model's name of a function -> the client's `name` and `namespace`, for functions of namespaces."""
    as_json: list[dict[str, Any]] = field(default_factory=list)
    """The tools in the form that the response shows."""
    left_out: set[str] = field(default_factory=set)
    """Types of tools that are left out."""


def read_tools(given: Any) -> Tools:
    """Return the tools of a body. Raises 400."""
    tools = Tools()
    if given is None:
        return tools
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise invalid(f"'tools' must be a list of at most {MAX_TOOLS} tools.", "tools")
    for index, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind in LEFT_OUT:
            tools.left_out.add(kind)
            continue
        _add(tools, _checked(tool, kind, index), f"tools[{index}]")
    if len(tools.functions) > MAX_TOOLS:
        raise invalid(f"'tools' have {len(tools.functions)} functions; at most {MAX_TOOLS} are taken.", "tools")
    return tools


def _checked(tool: Any, kind: Any, index: int) -> FunctionBody | NamespaceTool:
    if not isinstance(kind, str):
        return check_part(tool, FunctionBody, "tools", index)  # raises
    if kind not in _TOOLS:
        message = f"'tools[{index}].type' is {shorten(kind)!r}, which this server does not run. Send 'function' or 'namespace'."
        raise invalid(message, f"tools[{index}].type")
    return check_part(tool, _TOOLS[kind], "tools", index)


def _add(tools: Tools, tool: FunctionBody | NamespaceTool, place: str) -> None:
    tools.as_json.append(_as_json(tool))
    for function, at in _functions(tool, place):
        name = function.name
        if isinstance(tool, NamespaceTool):
            name = chat_name(tool.name, function.name)
            tools.namespaced[name] = {"name": function.name, "namespace": tool.name}
        made = function_tool(name, function.description, function.parameters, is_strict=function.strict, at=f"{at}.parameters")
        tools.functions.append(made)
        tools.places.append(at)


def _functions(tool: FunctionBody | NamespaceTool, place: str) -> Iterator[tuple[FunctionBody, str]]:
    """Yield the functions of a tool and their places. The first one's description includes the namespace's."""
    if isinstance(tool, FunctionBody):
        yield tool, place
        return
    for index, function in enumerate(tool.tools):
        if index == 0 and tool.description:
            described = "\n\n".join([tool.description, function.description or ""]).strip()
            function = function.model_copy(update={"description": described})
        yield function, f"{place}.tools[{index}]"


def _as_json(tool: FunctionBody | NamespaceTool) -> dict[str, Any]:
    fields = tool.model_dump(by_alias=True, exclude_none=True)
    if isinstance(tool, NamespaceTool):
        return fields | {"tools": [_as_json(function) for function in tool.tools]}
    return {"parameters": None, "strict": False} | fields
