"""The tools of a response: which of them the model sees, under which names, and which are left out.

`read` makes `Tools` of a body. The model knows functions only, so those of a namespace join the others under a longer name.
`write` gives a call the client's names back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.serve.bodies import MAX_TOOLS, FunctionBody, ToolBody, check_part
from penstock.serve.errors import invalid, shorten
from penstock.serve.responses.schemas import FunctionTool, NamespaceTool

LEFT_OUT = ("custom", "image_generation", "tool_search", "web_search", "web_search_preview")
"""Types that coding agents offer beside their functions, and work without. Those of other tools are refused."""
_TOOLS: Mapping[str, type[FunctionTool | NamespaceTool]] = MappingProxyType(
    {"function": FunctionTool, "namespace": NamespaceTool}
)


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a function."""
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(slots=True)
class Tools:
    """The tools of one response."""

    bodies: list[ToolBody] = field(default_factory=list)
    """As a chat has them."""
    places: list[str] = field(default_factory=list)
    """Where each of `bodies` stands in the client's body."""
    namespaced: dict[str, dict[str, str]] = field(default_factory=dict)
    """The model's name of a function -> the client's `name` and `namespace`, for functions of namespaces."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """As the response repeats them."""
    left_out: set[str] = field(default_factory=set)
    """Types of tools that the model does not see."""

    @property
    def names(self) -> Sequence[str]:
        return [body.function.name for body in self.bodies]

    @property
    def renames(self) -> Mapping[str, str]:
        """How errors of chats call a tool -> its place in the client's body."""
        return {f"tools[{index}].function": place for index, place in enumerate(self.places)}


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
    if len(tools.bodies) > MAX_TOOLS:
        raise invalid(f"'tools' have {len(tools.bodies)} functions; at most {MAX_TOOLS} are taken.", "tools")
    return tools


def _checked(tool: Any, kind: Any, index: int) -> FunctionTool | NamespaceTool:
    if not isinstance(kind, str):
        return check_part(tool, FunctionTool, "tools", index)  # raises
    if kind not in _TOOLS:
        message = f"'tools[{index}].type' is {shorten(kind)!r}, which this server does not run. Send 'function' or 'namespace'."
        raise invalid(message, f"tools[{index}].type")
    return check_part(tool, _TOOLS[kind], "tools", index)


def _add(tools: Tools, tool: FunctionTool | NamespaceTool, place: str) -> None:
    tools.told.append(_told(tool))
    for function, at in _functions(tool, place):
        name = function.name
        if isinstance(tool, NamespaceTool):
            name = chat_name(tool.name, function.name)
            tools.namespaced[name] = {"name": function.name, "namespace": tool.name}
        body = FunctionBody.model_construct(
            name=name, description=function.description, parameters=function.parameters, strict=function.strict
        )
        tools.bodies.append(ToolBody.model_construct(type="function", function=body))
        tools.places.append(at)


def _functions(tool: FunctionTool | NamespaceTool, place: str) -> Iterator[tuple[FunctionTool, str]]:
    """Yield the functions of a tool, and where they stand. A namespace's description goes before that of its first one."""
    if isinstance(tool, FunctionTool):
        yield tool, place
        return
    for index, function in enumerate(tool.tools):
        if index == 0 and tool.description:
            described = "\n\n".join([tool.description, function.description or ""]).strip()
            function = function.model_copy(update={"description": described})
        yield function, f"{place}.tools[{index}]"


def _told(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    told = tool.model_dump(by_alias=True, exclude_none=True)
    if isinstance(tool, NamespaceTool):
        return told | {"tools": [_told(function) for function in tool.tools]}
    return {"parameters": None, "strict": False} | told
