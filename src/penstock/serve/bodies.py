"""Request bodies: the base class, the fields that several APIs share, and the parser, for any thread.

A body is refused early if checking it would hold the interpreter's lock for long. Each object and each error costs a
microsecond, so lists are checked up to their first wrong item, and objects have a size limit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from penstock import fast_json
from penstock.calls.check import MAX_CHOICES as MAX_CHOICES
from penstock.serve.errors import RULE, UNKNOWN_FIELDS, did_you_mean, from_finding, invalid, param_path
from penstock.text.grammar import MAX_LARK_CHARS, MAX_REGEX_CHARS, MAX_SOURCE_CHARS, Grammar, GrammarKind
from penstock.types.sampling import MAX_LOGPROBS, PARAMETERS

_log = logging.getLogger(__name__)

MAX_BODY_DEPTH = 800
"""Most levels of lists and objects in a body."""
MAX_VALUE_DEPTH = 246
"""Most levels in a value for a template or a grammar, which recurse."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_SUFFIX_CHARS = 2**20
# Requests keep these lists as objects while they wait and run, up to 300 bytes an entry at a replica.
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 8192
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, MAX_BAD_WORDS_CHARS = 256, 1000, 8192
"""Bad words, characters of one, and characters of all together."""
MAX_STOP_TOKENS = 256
MAX_TOKEN_IDS = fast_json.MAX_ELEMENTS
MAX_TEMPLATE_KWARGS = 256
MAX_ANSWERS, MAX_ANSWER_CHARS = 4096, 1000
"""Limits of `choice`: answers, and characters of one."""
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

MAX_LOGGED_NAMES, MAX_LOGGED_CHARS = 100, 64
"""Limits of the log of ignored parameters, because clients choose the names."""


class NotYet:
    """Marks a known field that is not supported. Only null and neutral values are accepted."""

    def __init__(self, *neutral: Any, instead: str = "") -> None:
        """`neutral`: values that mean the same as leaving the field out. `instead`: its replacement in `structured_outputs`."""
        self.neutral = neutral
        self._instead = instead

    def is_neutral(self, value: object) -> bool:
        # `1 == True` in Python, but not in JSON: compare the types too.
        return value is None or any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)

    def refuse(self, value: object, param: str) -> None:
        """Raise a 400 unless the value is neutral."""
        if not self.is_neutral(value):
            raise invalid(f"'{param}' is not supported yet{self._remedy()}.", param)

    def _remedy(self) -> str:
        if self._instead:
            return f": send it as 'structured_outputs': {{'{self._instead}': ...}}"
        if not self.neutral:
            return ""
        return f" (accepted: null or {' or '.join(fast_json.dumps(value).decode() for value in self.neutral)})"

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "description": "Not supported yet. Only null, or a value that means the same as leaving the field out, is accepted."
        }


class NoEffect:
    """Marks a field that does not change the answer. docs/fields.md lists them."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": "No effect on the answer."}


Unread = Annotated[Any, NoEffect()]
"""A field that is never read. The body's limits bound its size."""

MAX_NAMED = 3
"""Most unknown fields that one error names."""


class Body(BaseModel):
    """Base of every request body: no unknown fields unless they are null, no silent conversions (`"16"` is not a number)."""

    # A body is built once the server mounts it, and not again for each decorator.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)
    field_names: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields, as clients write them."""
    unsupported: ClassVar[dict[str, NotYet]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()
    kinds: ClassVar[tuple[Any, ...]] = ()
    """Allowed values of a required field `type`."""
    remedies: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Hints for fields of other APIs, by their names."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: Any) -> None:
        fields = cls.model_fields
        cls.field_names = frozenset(field.alias or name for name, field in fields.items())
        cls.kinds = get_args(fields["type"].annotation) if "type" in fields and fields["type"].is_required() else ()
        marks = [(name, mark) for name, field in fields.items() for mark in field.metadata]
        cls.unsupported = {name: mark for name, mark in marks if isinstance(mark, NotYet)}
        cls.no_effect = frozenset(name for name, mark in marks if isinstance(mark, NoEffect))

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: Any) -> Any:
        # One error for all unknown fields, because there may be very many.
        if not isinstance(value, dict) or value.keys() <= cls.field_names:
            return value
        if cls.kinds and value.get("type", cls.kinds[0]) not in cls.kinds:
            return {"type": value["type"]}  # an object of another kind: its fields do not matter
        unknown = (name for name, content in value.items() if name not in cls.field_names and content is not None)
        names = list(islice(unknown, MAX_NAMED + 1))
        if not names:
            return {name: content for name, content in value.items() if name in cls.field_names}
        remedy = f" {cls.remedies[names[0]]}" if names[0] in cls.remedies else ""
        remedy = remedy or did_you_mean(names[0], cls.field_names - cls.unsupported.keys())
        told = {"names": names[:MAX_NAMED], "has_more": len(names) > MAX_NAMED, "remedy": remedy}
        raise PydanticCustomError(UNKNOWN_FIELDS, "Unknown fields", told)

    @classmethod
    def drop_unknown(cls, value: dict[str, Any]) -> list[str]:
        """Take unknown fields out of a JSON object, and return their names."""
        names = [name for name in value if name not in cls.field_names]
        for name in names:
            del value[name]
        return names

    def check_rules(self) -> None:
        """Raise 400 for errors beyond the types of single fields, such as contradicting fields. Called once per body."""


_BodyType = TypeVar("_BodyType", bound=Body)


def has_sampling(api: str) -> Callable[[type[_BodyType]], type[_BodyType]]:
    """Return a decorator that adds an API's sampling parameters, from `PARAMETERS`, to a body."""

    def add(body_type: type[_BodyType]) -> type[_BodyType]:
        fields: dict[str, Any] = {}
        for parameter in PARAMETERS.values():
            if api not in parameter.spellings:
                continue
            own = parameter.spellings[api]
            low: dict[str, Any] = {"gt" if own.excludes_low else "ge": own.low}
            limits: Any = Field(le=own.high, **({} if own.low == -math.inf else low))
            number: Any = Annotated[int, limits] if parameter.kind is int else Annotated[float, limits]
            fields[own.name] = (number | None, Field(None, description=parameter.text))
        return _extended(body_type, fields)

    return add


def has_unread(names: str) -> Callable[[type[_BodyType]], type[_BodyType]]:
    """Return a decorator that adds fields without effect to a body. `names`: separated by spaces."""
    return lambda body_type: _extended(body_type, dict.fromkeys(names.split(), (Unread, None)))


def has_not_yet(names: str) -> Callable[[type[_BodyType]], type[_BodyType]]:
    """Return a decorator that adds unsupported fields to a body.

    `names`: with their neutral values as JSON, such as `best_of=1 n=0|0.0 audio`.
    """
    fields: dict[str, Any] = {}
    for word in names.split():
        name, _, values = word.partition("=")
        neutral = [fast_json.loads(value) for value in values.split("|") if value]
        fields[name] = (Annotated[Any, NotYet(*neutral)], None)
    return lambda body_type: _extended(body_type, fields)


def _extended(body_type: type[_BodyType], fields: dict[str, Any]) -> type[_BodyType]:
    """Return a subclass of the body with further fields, under the same name."""
    name, module, text = body_type.__name__, body_type.__module__, body_type.__doc__
    return create_model(name, __base__=body_type, __module__=module, __doc__=text, **fields)


def sampling_of(body: Body, api: str) -> dict[str, float]:
    """Return the sampling parameters that a body sets, by their names in `PARAMETERS`."""
    names = {name: parameter.spellings[api].name for name, parameter in PARAMETERS.items() if api in parameter.spellings}
    return {name: value for name, own in names.items() if (value := getattr(body, own)) is not None}


def at_most(num_entries: int) -> BeforeValidator:
    """Return a validator that limits an object before its entries are validated; `Field(max_length=...)` does so afterwards."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_entries:
            raise PydanticCustomError(RULE, "must have at most {limit} entries", {"limit": num_entries})
        return value

    return BeforeValidator(check)


def _check_object(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    raise PydanticCustomError(RULE, "must be an object")


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def described(kind: Any) -> WithJsonSchema:
    """Return the JSON schema of a type for a field that is checked in another way."""
    return WithJsonSchema(TypeAdapter(kind).json_schema())


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopList = Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
StopStrings = Annotated[StopList, BeforeValidator(_one_or_many), described(_StopString | StopList)]

MaxTokens = Annotated[int, Field(ge=1, le=INT32_MAX)]
MaxTokensOrAll = Annotated[
    MaxTokens | None,
    BeforeValidator(lambda value: None if type(value) is int and value == -1 else value),
    described(Literal[-1] | MaxTokens | None),
]
"""A chat's limit of tokens. -1, which llama.cpp's clients send, is the same as absent."""
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Priority = Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)]
RequestId = Annotated[str, Field(min_length=1, max_length=128)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
ReasoningBudget = Annotated[int, Field(ge=-1, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
LogitBias = Annotated[
    dict[str, Any],
    at_most(MAX_BIASED_TOKENS),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASED_TOKENS,
        }
    ),
]
"""Biases by token id. `calls.check` checks the entries up to the first wrong one."""
AllowedTokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)]


def _check_bad_words(words: list[str]) -> list[str]:
    if sum([len(word) for word in words]) > MAX_BAD_WORDS_CHARS:
        raise PydanticCustomError(RULE, "must have at most {limit} characters in all", {"limit": MAX_BAD_WORDS_CHARS})
    return words


BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
    AfterValidator(_check_bad_words),
]

TemplateVariables = Annotated[dict[str, Any], at_most(MAX_TEMPLATE_KWARGS)]

MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""OpenAI's own limits."""
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_CHARS)],
    ],
    at_most(MAX_METADATA),
]
"""Type of `metadata`, which is kept and returned with what it describes."""


Schema = Annotated[Any, BeforeValidator(_check_object), WithJsonSchema({"type": "object"})]


# From bytes to a body.

_Body = TypeVar("_Body", bound=Body)


class IgnoredParameters:
    """Logs each name that `--ignore-unknown-parameters` ignores. Two threads at the same time may log a name twice."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._logged) >= MAX_LOGGED_NAMES:
                return
            shown = name[:MAX_LOGGED_CHARS]
            if shown not in self._logged:
                self._logged.add(shown)
                _log.warning("the parameter %r is ignored (--ignore-unknown-parameters)", shown)
                if len(self._logged) >= MAX_LOGGED_NAMES:
                    _log.warning("further ignored parameters are not logged")


def parse_body(data: bytes, body_type: type[_Body], ignored: IgnoredParameters | None = None) -> _Body:
    """Parse and check a body. Raises 400 for the first error. `ignored` logs unknown fields; None: they are errors."""
    value = load_json(data)
    if ignored is not None and isinstance(value, dict):
        ignored.note(body_type.drop_unknown(value))
    body = check_part(value, body_type)
    body.check_rules()
    return body


def check_part(value: Any, part_type: type[_Body], *place: str | int) -> _Body:
    """Return a body, or a part of one such as a message, with checked fields. `place`: the part's path. Raises 400."""
    try:
        part = part_type.model_validate(value)
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        raise from_finding({**finding, "loc": (*place, *finding["loc"])}) from None
    _refuse_unsupported(part, prefix=f"{param_path(place)}." if place else "")
    return part


def _refuse_unsupported(body: Body, *, prefix: str = "") -> None:
    """Raise 400 for the first unsupported field in use, also in nested bodies."""
    unsupported = body.unsupported
    for name in sorted(body.model_fields_set):  # absent fields ask for nothing
        value = getattr(body, name)
        if value is None:
            continue
        param = f"{prefix}{name}"
        if isinstance(value, Body):
            _refuse_unsupported(value, prefix=f"{param}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for index, item in enumerate(value):
                _refuse_unsupported(item, prefix=f"{param}[{index}].")
        elif name in unsupported:
            unsupported[name].refuse(value, param)


def load_json(data: bytes) -> Any:
    """Return the value of a body. Raises 400 if it is not JSON, or has too many elements."""
    if excess := fast_json.excess(data):
        raise invalid(f"The body has {excess}.")
    try:
        value = fast_json.loads(data)
    except fast_json.DecodeError as error:
        raise invalid(_why_no_json(error)) from error
    # Checked here, since the parser goes as deep as the thread's stack lets it, which depends on the Python.
    if data.count(b"{") + data.count(b"[") > MAX_BODY_DEPTH and fast_json.is_deeper(value, MAX_BODY_DEPTH):
        raise invalid(f"The body is not valid JSON: it is nested in more than {MAX_BODY_DEPTH} levels.")
    if _LONG_NUMBER in data.translate(_DIGITS):
        _narrow(value)
    return value


_DIGITS = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))
_LONG_NUMBER = b"0" * 19
_64_BITS = range(-(2**63), 2**64)
_OUT_OF_RANGE = "The body is not valid JSON: a number is out of range."


def _narrow(value: Any) -> None:
    """Convert integers beyond 64 bits to floats, which integer fields refuse. Raises 400 for one beyond the range of floats."""
    rest = [value]
    while rest:
        outer = rest.pop()
        places = list(outer.items() if isinstance(outer, dict) else enumerate(outer)) if isinstance(outer, (dict, list)) else ()
        for place, one in places:
            if isinstance(one, (dict, list)):
                rest.append(one)
            elif type(one) is int and one not in _64_BITS:
                try:
                    outer[place] = float(one)
                except OverflowError:
                    raise invalid(_OUT_OF_RANGE) from None


def _why_no_json(error: fast_json.DecodeError) -> str:
    if "out of range" in error.msg:  # the parser does not say where
        return _OUT_OF_RANGE
    if "surrogate" in error.msg:
        place = f"line {error.lineno} column {error.colno}"
        return f"The body is not valid JSON: unpaired surrogate in a \\u escape at {place}."
    return f"The body is not valid JSON: {error}."


def check_depth(value: Any, param: str) -> None:
    """Raise 400 if the value is nested too deeply for templates and grammars, which recurse."""
    if fast_json.is_deeper(value, MAX_VALUE_DEPTH):
        raise invalid(f"'{param}' is nested too deeply: at most {MAX_VALUE_DEPTH} levels are allowed.", param)


# Fields in the form of OpenAI and vLLM, which several APIs share

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
"""Kinds of grammars by the fields of `structured_outputs`."""
_SYNTAXES: Mapping[str, GrammarKind] = MappingProxyType({"lark": GrammarKind.LARK, "gbnf": GrammarKind.GBNF})
"""Kinds of grammars by the values of `grammar_syntax`."""


def _check_object_or_text(value: Any) -> Any:
    if isinstance(value, dict) or (isinstance(value, str) and 0 < len(value) <= MAX_SOURCE_CHARS):
        return value
    message = "must be an object, or a string of 1 to {limit} characters that holds one as JSON"
    raise PydanticCustomError(RULE, message, {"limit": MAX_SOURCE_CHARS})


SchemaOrText = Annotated[
    Any,
    BeforeValidator(_check_object_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1, "maxLength": MAX_SOURCE_CHARS}]}),
]
"""A schema, or its JSON text."""


@has_not_yet("whitespace_pattern disable_fallback=false disable_any_whitespace=false disable_additional_properties=false")
class StructuredOutputs(Body):
    """vLLM's field that constrains an answer, such as to a JSON schema. Exactly one field besides `grammar_syntax` is set."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_ANSWER_CHARS)]],
            Field(min_length=1, max_length=MAX_ANSWERS, fail_fast=True),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_LARK_CHARS)] | None = None
    """A grammar in Lark's notation or in GBNF."""
    grammar_syntax: Literal["lark", "gbnf"] | None = None
    """The notation of `grammar`. xgrammar's EBNF is read as GBNF."""
    structural_tag: SchemaOrText | None = None
    """An object as `response_format` of the type `structural_tag`, or its JSON text."""


@has_sampling("openai")
class GenerationFields(Body):
    """Fields that `penstock.SamplingParams`, completions and chats share. Null is the same as absent."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: MaxTokens | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Keep only this many last tokens of a prompt. -1: as many as fit beside `max_tokens` (16 if absent)."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer."""


class PythonFields(GenerationFields):
    """The fields of `penstock.SamplingParams`, checked like a request's body."""

    logprobs: NumLogprobs | None = None


def fields_of(body: GenerationFields) -> dict[str, Any]:
    """Return the body's fields for a request of any API, except the grammar."""
    return {
        "n": body.n or 1,
        "max_tokens": body.max_tokens,
        "sampling": sampling_of(body, "openai"),
        "logit_bias": body.logit_bias or {},
        "allowed_token_ids": body.allowed_token_ids,
        "bad_words": body.bad_words or (),
        "stop": body.stop or (),
        "stop_token_ids": body.stop_token_ids or (),
        "include_stop_str_in_output": bool(body.include_stop_str_in_output),
        "ignore_eos": bool(body.ignore_eos),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }


def structured_grammar(asked: StructuredOutputs | None) -> Grammar | None:
    """Return the grammar of `structured_outputs`. Raises 400 unless exactly one kind of grammar is given."""
    if asked is None:
        return None
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
            at = "structured_outputs.grammar_syntax"
            raise invalid(f"'{at}' applies only to 'grammar', but the request has '{name}'. Remove it.", at)
        kind = _SYNTAXES[asked.grammar_syntax]
    if value is True:
        return Grammar(kind, param=param)
    return grammar_of(kind, value, param)


def grammar_of(kind: GrammarKind, value: Any, param: str) -> Grammar:
    """Return a grammar of this kind from a text or a JSON value. Raises 400 for a value that is nested too deeply."""
    if isinstance(value, str):
        return Grammar(kind, value, param=param)
    check_depth(value, param)
    return Grammar(kind, fast_json.dumps(value).decode(), param=param)


def json_grammar(schema: Any, param: str) -> Grammar:
    """Return the grammar of a JSON schema, or of any JSON object if the schema is None. Raises 400."""
    if schema is None:
        return Grammar(GrammarKind.JSON_OBJECT, param=param)
    return grammar_of(GrammarKind.JSON_SCHEMA, schema, param)


def value_grammar(kind: str, value: Any, param: str) -> Grammar:
    """Return the grammar of text-generation-inference's `value`: the pattern of a `regex`, else a schema. Raises 400."""
    if kind == "regex":
        if not isinstance(value, str) or not 0 < len(value) <= MAX_REGEX_CHARS:
            raise invalid(f"'{param}' must be a string of 1 to {MAX_REGEX_CHARS} characters.", param)
        return grammar_of(GrammarKind.REGEX, value, param)
    if kind == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if not isinstance(value, dict) and not (isinstance(value, str) and 0 < len(value) <= MAX_SOURCE_CHARS):
        message = f"'{param}' must be an object, or a string of 1 to {MAX_SOURCE_CHARS} characters with an object in JSON."
        raise invalid(message, param)
    return grammar_of(GrammarKind.JSON_SCHEMA, value, param)
