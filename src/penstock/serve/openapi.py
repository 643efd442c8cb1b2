"""The server's operations as an OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1). `app` calls it once, when asked.

Bodies are described by the pydantic models that check them, and errors by one object for all operations.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import penstock
from penstock.serve.openai.schemas import Body

TITLE = "Penstock"
DESCRIPTION = "An OpenAI-compatible server for language models and encoders."
_SCHEMAS = "#/components/schemas/"
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


def write_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The document of all operations, in their order."""
    bodies = dict.fromkeys(body for operation in operations for body in operation.bodies)
    _, described = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(_PATH_PARAMETER.sub(r"{\1}", operation.path), {})[operation.method.lower()] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "description": DESCRIPTION, "version": penstock.__version__},
        "paths": paths,
        "components": {"schemas": described["$defs"] | {"Error": _ERROR_SCHEMA}},
    }


def _describe(operation: Operation) -> dict[str, Any]:
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
        refs = [{"$ref": _SCHEMAS + body.__name__} for body in operation.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        told["requestBody"] = {"content": {"application/json": {"schema": schema}}, "required": True}
    told["responses"] = {"200": _RESPONSE, "default": _ERROR_RESPONSE}
    return told


_RESPONSE = {"description": "The answer", "content": {"application/json": {"schema": {}}}}
_NULLABLE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": {"type": "string"},
            },
        }
    },
}
_ERROR_RESPONSE = {
    "description": "What went wrong, as an OpenAI error object",
    "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}},
}
