"""The server's operations as an OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1). `app` calls it once, when asked.

Bodies are described by the pydantic models that check them, answers and errors by `answer_schemas`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import penstock
from penstock.serve.answer_schemas import ANSWERS, JSON, REF, SCHEMAS, error_schema
from penstock.serve.bodies import Body

TITLE = "Penstock"
DESCRIPTION = "An OpenAI-compatible server for language models and encoders."
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")

Endpoint = Callable[[HttpRequest], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path, with what answers it."""

    method: str
    path: str
    """Parameters stand in braces, as Starlette's routes have them: `/v1/models/{model_id:path}`."""
    summary: str
    endpoint: Endpoint
    told_by: Callable[..., object]
    """The function whose name and docstring describe the operation."""
    bodies: Sequence[type[Body]] = ()
    """It takes one of them as JSON; none for an operation without a body."""
    query: Sequence[str] = ()
    """Names of its optional parameters."""


def write_document(operations: Sequence[Operation], open_paths: Set[str] | None = None) -> dict[str, Any]:
    """The document of all operations, in their order. `open_paths`: those that need no key; None: none is asked for."""
    bodies = dict.fromkeys(body for operation in operations for body in operation.bodies)
    _, described = models_json_schema([(body, "validation") for body in bodies], ref_template=REF + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _PATH_PARAMETER.sub(r"{\1}", operation.path)
        told = paths.setdefault(path, {})[operation.method.lower()] = _describe(operation, path)
        if open_paths is not None and path in open_paths:
            told["security"] = []
    has_keys = open_paths is not None
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "description": DESCRIPTION, "version": penstock.__version__},
        **({"security": [{name: []} for name in _KEY_HEADERS]} if has_keys else {}),
        "paths": paths,
        "components": {
            "schemas": {name: _with_nulls(schema) for name, schema in described["$defs"].items()} | dict(SCHEMAS),
            **({"securitySchemes": _KEY_HEADERS} if has_keys else {}),
        },
    }


def _with_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """A body's schema, which says that null is the same as absent also where a type of ours says what else a field may be."""
    for name, field in schema.get("properties", {}).items():
        about = {word: field[word] for word in ("title", "description", "default") if word in field}
        rest = {word: value for word, value in field.items() if word not in about}
        kinds = rest.get("anyOf", [rest])
        if about.get("default", ...) is None and all(kind and kind.get("type") != "null" for kind in kinds):
            schema["properties"][name] = about | {"anyOf": [*kinds, {"type": "null"}]}
    return schema


def _describe(operation: Operation, path: str) -> dict[str, Any]:
    words = f"{operation.told_by.__name__}{operation.path}_{operation.method.lower()}"
    told: dict[str, Any] = {"summary": operation.summary, "operationId": re.sub(r"\W", "_", words)}
    if description := inspect.getdoc(operation.told_by):
        told["description"] = description
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(operation.path)
    ]
    parameters += [{"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in operation.query]
    if parameters:
        told["parameters"] = parameters
    if operation.bodies:
        refs = [{"$ref": REF + body.__name__} for body in operation.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        told["requestBody"] = {"content": {JSON: {"schema": schema}}, "required": True}
    told["responses"] = _responses(operation, path)
    return told


def _responses(operation: Operation, path: str) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in ANSWERS.get(f"{operation.method} {path}", {JSON: {}}).items()}
    told = {"200": {"description": "The answer", "content": content}}
    if path in _ACCEPTING:
        told["202"] = {"description": "It will be done", "content": content}
    statuses = {**_OF_ALL, **(_OF_BODIES if operation.bodies else {})}
    if operation.method != "GET":
        statuses |= _OF_DEEDS
    if "{" in path or operation.query:
        statuses |= _OF_NAMES
    if path == _FOLLOWING:
        statuses |= _OF_FOLLOWERS
    error = {JSON: {"schema": error_schema(path)}}
    for status, description in sorted(statuses.items()):
        told[str(status)] = {"description": description, "content": error}
        if status in _WITH_RETRY_AFTER:
            told[str(status)]["headers"] = _RETRY_AFTER
    return told


_OF_ALL: Mapping[int, str] = MappingProxyType(
    {
        400: "Something is malformed, out of range, unknown or not supported: the message says what, and the remedy",
        401: "The key is missing or wrong",
        408: "A time limit has passed, or the request has not come whole",
        413: "The body is too large",
        431: "The address and the headers are too large",
        500: "A fault of the server, whose log says more",
        503: "Not now: the server starts, drains or loads the model",
    }
)
"""Statuses of errors that any operation may answer with, and what they mean."""
_OF_NAMES: Mapping[int, str] = MappingProxyType({404: "There is nothing of this name"})
_OF_DEEDS: Mapping[int, str] = MappingProxyType({403: "Not with this key, or not from a page of another site"})
_OF_BODIES: Mapping[int, str] = MappingProxyType(
    {
        **_OF_NAMES,
        415: "The body is compressed",
        429: "Too much is waiting already",
        499: "The request was cancelled",
    }
)
_OF_FOLLOWERS: Mapping[int, str] = MappingProxyType({409: "The response that this one follows has not ended"})
_FOLLOWING = "/v1/responses"
_ACCEPTING = frozenset({"/models/load"})
"""Paths that may answer before they are done."""
_WITH_RETRY_AFTER = frozenset({429, 503})
_RETRY_AFTER = {"Retry-After": {"description": "Seconds after which it may be tried again", "schema": {"type": "integer"}}}
_KEY_HEADERS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
