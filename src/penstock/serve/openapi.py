"""The server's operations as an OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1). `app` makes it at first use.

pydantic derives the schemas of bodies from the models that check them, and the schemas of answers from their `TypedDict`s.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter

import penstock
from penstock.serve.api import JSON, Api, Route
from penstock.serve.errors import openai_words
from penstock.serve.paging import Parameter

TITLE = "Penstock"
DESCRIPTION = "An OpenAI-compatible server for language models and encoders."
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_REF = "#/components/schemas/"
_FORM, _EVENTS = "multipart/form-data", "text/event-stream"
_Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """A method and a path, with the routes that share both. The last route answers if no other's condition is true."""

    method: str
    path: str
    routes: Sequence[tuple[Api, Route]]


def write_document(operations: Sequence[Operation], open_paths: Set[str] | None = None) -> dict[str, Any]:
    """Return the document of all operations, in their order.

    `open_paths`: paths that need no key. None: no path needs a key.
    """
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _PATH_PARAMETER.sub(r"{\1}", operation.path)
        described = paths.setdefault(path, {})[operation.method.lower()] = _describe(operation, schemas)
        if open_paths is not None and path in open_paths:
            described["security"] = []
    has_keys = open_paths is not None
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "description": DESCRIPTION, "version": penstock.__version__},
        **({"security": [{name: []} for name in _KEY_HEADERS]} if has_keys else {}),
        "paths": paths,
        "components": {"schemas": schemas.named, **({"securitySchemes": _KEY_HEADERS} if has_keys else {})},
    }


class _Schemas:
    """The JSON schemas of the types in all operations' bodies and answers."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        routes = [pair for operation in operations for pair in operation.routes]
        bodies = {kind for _, route in routes for kind in (*route.body_types, route.form)}
        answers = {kind for _, route in routes for kind in (route.returns, route.streams)} | {
            _error_type(words) for words in {openai_words, *(api.wording.words for api, _ in routes)}
        }
        kinds = sorted((bodies | answers) - {None}, key=str)
        adapters: list[tuple[Any, Literal["validation"], TypeAdapter[Any]]] = [
            (kind, "validation", TypeAdapter(kind)) for kind in kinds
        ]
        found, rest = TypeAdapter.json_schemas(adapters, ref_template=_REF + "{model}")
        self._found: dict[Any, _Schema] = {kind: schema for (kind, _), schema in found.items()}
        self.named = {name: _with_nulls(schema) for name, schema in rest["$defs"].items()}

    def of(self, *kinds: Any) -> _Schema:
        """Return the schema of a value of any of these types."""
        schemas = list({str(kind): self._found[kind] for kind in kinds}.values())
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _error_type(words: Callable[..., Any]) -> Any:
    return get_type_hints(words)["return"]


def _with_nulls(schema: _Schema) -> _Schema:
    """Return the schema, with null allowed for all fields that default to null."""
    for name, field in schema.get("properties", {}).items():
        about = {word: field[word] for word in ("title", "description", "default") if word in field}
        rest = {word: value for word, value in field.items() if word not in about}
        kinds = rest.get("anyOf", [rest])
        if about.get("default", ...) is None and all(kind and kind.get("type") != "null" for kind in kinds):
            schema["properties"][name] = about | {"anyOf": [*kinds, {"type": "null"}]}
    return schema


def _describe(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    routes = [route for _, route in operation.routes]
    base = routes[-1]
    words = f"{base.answer.__name__}{operation.path}_{operation.method.lower()}"
    apis = ", ".join([api.name for api, _ in reversed(operation.routes) if api.name])
    described: dict[str, Any] = {
        "summary": f"{base.summary} ({apis})" if apis else base.summary,
        "operationId": re.sub(r"\W", "_", words),
    }
    if description := inspect.getdoc(base.answer):
        described["description"] = description
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(operation.path)
    ]
    queries = [_describe_query(one) for route in reversed(routes) for one in route.query]
    parameters += {one["name"]: one for one in queries}.values()
    if parameters:
        described["parameters"] = parameters
    if base.body is not None:
        bodies = [kind for route in reversed(routes) for kind in route.body_types]
        described["requestBody"] = {"content": {JSON: {"schema": schemas.of(*bodies)}}, "required": True}
    elif base.form is not None:
        described["requestBody"] = {"content": {_FORM: {"schema": schemas.of(base.form)}}, "required": True}
    described["responses"] = _responses(operation, schemas)
    return described


def _describe_query(one: str | Parameter[Any]) -> dict[str, Any]:
    name, schema = (one, {"type": "string"}) if isinstance(one, str) else (one.name, one.schema())
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _responses(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    routes = [route for _, route in operation.routes]
    content = {media_type: {"schema": schema} for media_type, schema in _answers(operation, schemas).items()}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    statuses = dict(_ANY_STATUSES)
    if routes[-1].body is not None or routes[-1].form is not None:
        statuses |= _BODY_STATUSES
    if operation.method != "GET":
        statuses |= _WRITE_STATUSES
    if "{" in operation.path or any(route.query for route in routes):
        statuses |= _NAME_STATUSES
    for route in routes:
        statuses |= route.more_statuses
    errors = [
        _error_type(api.wording.words)
        for api, route in operation.routes
        if route.when is not None or api.wording.owns(operation.path)
    ]
    error = {JSON: {"schema": schemas.of(*errors, _error_type(openai_words))}}
    for status, description in sorted(statuses.items()):
        responses[str(status)] = {"description": description, "content": content if status < 300 else error}
        if status in _WITH_RETRY_AFTER:
            responses[str(status)]["headers"] = _RETRY_AFTER
    return responses


def _answers(operation: Operation, schemas: _Schemas) -> dict[str, _Schema]:
    """Return the schemas of the answer by media type. A stream has the schema of one event or line."""
    kinds: dict[str, list[Any]] = {}
    for _, route in reversed(operation.routes):
        if route.returns is not None:
            kinds.setdefault(route.media_type, []).append(route.returns)
    answers = {media_type: schemas.of(*some) for media_type, some in kinds.items()}
    for api, route in operation.routes:
        if route.streams is None:
            continue
        of_line = schemas.of(route.streams, _error_type(api.wording.words), _error_type(openai_words))
        if api.stream_type != _EVENTS:
            answers[api.stream_type] = of_line
            continue
        data: _Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": of_line}
        ends: list[_Schema] = [{"type": "string", "enum": [api.stream_end]}] if api.stream_end else []
        event = {"event": {"type": "string"}, "data": {"anyOf": [data, *ends]} if ends else data}
        answers[_EVENTS] = {"type": "object", "properties": event, "required": ["data"]}
    return answers


_ANY_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        400: "Something is malformed, out of range, unknown or not supported: the message says what, and what to do",
        401: "The key is missing or wrong",
        408: "A time limit has passed, or the request did not arrive whole in time",
        413: "The body is too large",
        431: "The address and the headers are too large",
        500: "A fault of the server; its log says more",
        503: "Temporarily unavailable: the server is starting, draining or loading the model",
    }
)
"""Statuses of errors that any operation may answer with, and what they mean."""
_NAME_STATUSES: Mapping[int, str] = MappingProxyType({404: "Nothing with this name exists"})
_WRITE_STATUSES: Mapping[int, str] = MappingProxyType({403: "The key does not allow this, or a page of another site sent it"})
_BODY_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        **_NAME_STATUSES,
        415: "The body is compressed",
        429: "Too many requests are waiting",
        499: "The request was cancelled",
        502: "An upstream failed",
        504: "An upstream was silent",
    }
)
_WITH_RETRY_AFTER = frozenset({429, 503})
_RETRY_AFTER = {"Retry-After": {"description": "Seconds after which to try again", "schema": {"type": "integer"}}}
_KEY_HEADERS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
