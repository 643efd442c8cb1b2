"""Fields of the API that are known and not supported yet: which of their values ask for nothing, and the 400 for others.

Used by the endpoints before any other check. A field leaves this file when it is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, WithJsonSchema

from penstock.serve.openai.errors import invalid

_NOT_YET: Final = WithJsonSchema({"description": "Not supported yet: only values that ask for nothing are accepted."})
_HINT: Final = "hint"

NotSupportedYet = Annotated[Any, _NOT_YET]
"""Type of such a field."""

UnsupportedHint = Annotated[Any, _NOT_YET, _HINT]
"""Type of such a field that says how an answer is made and not what it is: `--ignore-unknown-parameters` covers it."""

_CACHE_HINTS = ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1h"})
"""Anthropic's. Prefixes are cached in any case, so a hint at one asks for nothing."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # OpenAI's parameters
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "include_obfuscation": (False,),
        "suffix": ("",),
        "verbosity": ("medium",),
        "prompt_cache_options": ({}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "prompt_cache_breakpoint": ({"mode": "explicit"},),
        # of messages that come back as the client's library keeps them
        "tool_calls": ([],),
        "annotations": ([],),
        "reasoning": ("",),
        "reasoning_content": ("",),
        # Anthropic's
        "cache_control": _CACHE_HINTS,
        # vLLM's
        "best_of": (1,),
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "disable_fallback": (False,),
        "documents": ([],),
        "echo": (False,),
        "ec_transfer_params": ({},),
        "guided_json_object": (False,),
        "include_reasoning": (True,),
        "kv_transfer_params": ({},),
        "logits_processors": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "return_mm_kwargs": (True,),
        "return_prompt_text": (False,),
        "return_token_offsets": (False,),
        "return_tokens_as_token_ids": (False,),
        "routed_experts_prompt_start": (0,),
        "stream_interval": (1,),
        "thinking_token_budget": (-1,),
        "truncation_side": ("left",),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
)
"""Beyond null: values that mean the same as leaving the field out."""

_REPLACED: Mapping[str, str] = MappingProxyType(
    {
        "guided_json": "json",
        "guided_json_object": "json_object",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
    }
)
"""Fields that vLLM had once, and what of `structured_outputs` is in their place there and here."""


def refuse_unsupported(body: BaseModel, *, prefix: str = "", ignores_hints: bool = False) -> list[str]:
    """Raise a 400 that names a field which asks for something that is not there yet. Descends into nested bodies.

    With `ignores_hints` those of the body itself are not refused. Returns their names.
    """
    hints: list[str] = []
    fields = type(body).model_fields
    for name in sorted(body.model_fields_set):  # few, and the others ask for nothing
        field, value = fields[name], getattr(body, name)
        if value is None:
            continue
        param = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            refuse_unsupported(value, prefix=f"{param}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                refuse_unsupported(item, prefix=f"{param}[{index}].")
        elif _NOT_YET in field.metadata:
            if ignores_hints and _HINT in field.metadata and not _is_neutral(name, value):
                hints.append(name)
            else:
                refuse_value(name, value, param)
    return hints


def refuse_value(name: str, value: object, param: str) -> None:
    """Raise a 400 unless this value of a field that is not supported asks for nothing."""
    if not _is_neutral(name, value):
        raise invalid(f"'{param}' is not supported yet{_remedy(name)}.", param)


def _is_neutral(name: str, value: object) -> bool:
    # `1 == True` in Python, but not in JSON: compare the types too.
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))


def _remedy(name: str) -> str:
    replaced = _REPLACED.get(name)
    if replaced is not None:
        return f": send it as 'structured_outputs': {{'{replaced}': ...}}"
    neutral = _NEUTRAL.get(name)
    if neutral is None:
        return ""
    return f" (accepted: null or {' or '.join(orjson.dumps(value).decode() for value in neutral)})"
