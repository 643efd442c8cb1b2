"""The grammar that a body asks its answers to follow, in OpenAI's words or vLLM's.

`read` calls it with bodies whose types and ranges were checked already. Only `text.grammar` knows what a grammar is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from penstock.calls.call import AskedGrammar
from penstock.serve.errors import invalid
from penstock.serve.openai.schemas import GenerationBody, ResponseFormat, StructuredOutputs
from penstock.text.grammar import Grammar, GrammarKind

_KINDS: Mapping[str, GrammarKind] = MappingProxyType(
    {
        "json": GrammarKind.JSON_SCHEMA,
        "json_object": GrammarKind.JSON_OBJECT,
        "regex": GrammarKind.REGEX,
        "choice": GrammarKind.CHOICE,
        "grammar": GrammarKind.GRAMMAR,
        "structural_tag": GrammarKind.STRUCTURAL_TAG,
    }
)
"""By the fields of `structured_outputs`."""

_SYNTAXES: Mapping[str, GrammarKind] = MappingProxyType({"lark": GrammarKind.LARK, "gbnf": GrammarKind.GBNF})
"""By the values of `grammar_syntax`."""

_NOT_WITH: Mapping[str, str] = MappingProxyType(
    {
        "use_beam_search": "a search follows no grammar",
        "allowed_token_ids": "which tokens may come is said by one of them",
        "ignore_eos": "an answer that is complete has to be able to end",
    }
)
"""Fields that a grammar excludes, and why."""


def asked_grammar(body: GenerationBody) -> AskedGrammar | None:
    """None if any answer will do. Raises 400 for what is incomplete, said twice, too large, or excluded by another field."""
    asked = None
    if body.response_format is not None:
        asked = _of_format(body.response_format)
    if body.structured_outputs is not None:
        if asked is not None:
            message = "'response_format' and 'structured_outputs' both say what the answer must be: leave one of them out."
            raise invalid(message, "structured_outputs")
        asked = _of_outputs(body.structured_outputs)
    if asked is not None:
        check_combinations(body, asked.param.split(".")[0])
    return asked


def _of_format(asked: ResponseFormat) -> AskedGrammar | None:
    schema = asked.json_schema
    if schema is not None and asked.type != "json_schema":
        param = "response_format.json_schema"
        raise invalid(f"'{param}' needs 'type': 'json_schema', not '{asked.type}'.", param)
    if asked.schema_ is not None and asked.type != "json_object":
        param = "response_format.schema"
        raise invalid(f"'{param}' needs 'type': 'json_object', not '{asked.type}'.", param)
    tags = [name for name in ("structures", "triggers", "format") if getattr(asked, name) is not None]
    if tags and asked.type != "structural_tag":
        param = f"response_format.{tags[0]}"
        raise invalid(f"'{param}' needs 'type': 'structural_tag', not '{asked.type}'.", param)
    match asked.type:
        case "text":
            return None
        case "structural_tag":
            value = asked.model_dump(include={"type", *tags}, by_alias=True)
            return AskedGrammar(Grammar(GrammarKind.STRUCTURAL_TAG, _written(value, "response_format")), "response_format")
        case "json_object" if asked.schema_:
            param = "response_format.schema"
            return AskedGrammar(Grammar(GrammarKind.JSON_SCHEMA, _written(asked.schema_, param)), param)
        case "json_object":  # with an empty schema, too: llama.cpp's default
            return AskedGrammar(Grammar(GrammarKind.JSON_OBJECT, ""), "response_format")
    if schema is None:
        raise invalid("Missing required parameter: 'response_format.json_schema'.", "response_format.json_schema")
    param = "response_format.json_schema.schema"
    return AskedGrammar(Grammar(GrammarKind.JSON_SCHEMA, _written(schema.schema_, param)), param)


def _of_outputs(asked: StructuredOutputs) -> AskedGrammar:
    values = {"json": asked.json_, **{name: getattr(asked, name) for name in _KINDS if name != "json"}}
    # `"json_object": false` asks for nothing.
    given = [name for name, value in values.items() if value is not None and value is not False]
    if len(given) != 1:
        names = ", ".join(f"'{name}'" for name in given or _KINDS)
        rule = f"must have only one of {names}" if given else f"must have one of {names}"
        raise invalid(f"'structured_outputs' {rule}.", "structured_outputs")
    [name] = given
    param, value, kind = f"structured_outputs.{name}", values[name], _KINDS[name]
    if asked.grammar_syntax is not None:
        if name != "grammar":
            syntax_param = "structured_outputs.grammar_syntax"
            raise invalid(f"'{syntax_param}' is of a 'grammar', and '{name}' is asked for: leave it out.", syntax_param)
        kind = _SYNTAXES[asked.grammar_syntax]
    source = "" if value is True else value if isinstance(value, str) else _written(value, param)
    return AskedGrammar(Grammar(kind, source), param)


def _written(value: dict[str, Any] | list[str], param: str) -> str:
    """As JSON. Raises 400 for what is nested deeply: orjson reads 1,024 levels and writes 254."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise invalid(f"'{param}' is nested too deeply: make it flatter.", param) from None


def check_combinations(body: GenerationBody, asked_by: str) -> None:
    """Raise 400 for a field that the one which asks for a grammar, or a limit of reasoning, excludes."""
    for name, reason in _NOT_WITH.items():
        if getattr(body, name) not in (None, False):
            raise invalid(f"'{name}' and '{asked_by}' exclude each other, as {reason}: leave one of them out.", name)
