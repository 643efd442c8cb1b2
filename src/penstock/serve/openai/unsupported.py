"""Fields of the API that are known and not supported yet: which of their values ask for nothing, and the 400 for others.

Used by the endpoints before any other check. A field leaves this file when it is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import BaseModel, WithJsonSchema

from penstock.serve.openai.errors import invalid

_NOT_YET: Final = WithJsonSchema({"description": "Not supported yet: only values that ask for nothing are accepted."})

NotSupportedYet = Annotated[Any, _NOT_YET]
"""Type of such a field."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "tool_calls": ([],),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "documents": ([],),
        "annotations": ([],),
        "logits_processors": ([],),
        "modalities": (["text"],),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "include_obfuscation": (False,),
        "return_tokens_as_token_ids": (False,),
        "suffix": ("",),
        "echo": (False,),
        "best_of": (1,),
    }
)
"""Beyond null: values that mean the same as leaving the field out."""


def refuse_unsupported(body: BaseModel, *, prefix: str = "") -> None:
    """Raise a 400 that names the first field which asks for something that is not there yet. Descends into nested bodies."""
    sent = body.model_fields_set
    for name, field in type(body).model_fields.items():
        if name not in sent:  # nearly all, and none of them asks for anything
            continue
        value = getattr(body, name)
        if value is None:
            continue
        param = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            refuse_unsupported(value, prefix=f"{param}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                refuse_unsupported(item, prefix=f"{param}[{index}].")
        elif _NOT_YET in field.metadata and not _is_neutral(name, value):
            raise invalid(f"'{param}' is not supported yet{_accepted(name)}.", param)


def _is_neutral(name: str, value: object) -> bool:
    # `1 == True` in Python, but not in JSON: compare the types too.
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))


def _accepted(name: str) -> str:
    neutral = _NEUTRAL.get(name)
    if neutral is None:
        return ""
    return f" (accepted: null or {' or '.join(repr(value) for value in neutral)})"
