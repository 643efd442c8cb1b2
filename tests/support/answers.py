"""Checks answers of a server against its OpenAPI document. The harness's client calls it for every answer."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import httpx
from starlette.applications import Starlette

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
DOCUMENTS: dict[tuple[str, ...], dict[str, Any]] = {}
"""The documents by the paths of their apps: making one takes a quarter of a second."""


def faults(value: Any, schema: dict[str, Any], named: dict[str, Any], at: str = "$") -> list[str]:
    """Return what is wrong with a value. A field that the schema lacks is wrong, too, unless the schema allows others."""
    if "$ref" in schema:
        return faults(value, named[schema["$ref"].rpartition("/")[2]], named, at)
    if "anyOf" in schema:
        tried = [faults(value, one, named, at) for one in schema["anyOf"]]
        return min(tried, key=len) if all(tried) else []
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{at} is {value!r}, no {kind}"]
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return [f"{at} is {value!r}"]
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        return [f"{at} is {value}"]
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return [f"{at} has {len(value)} items"]
        item = schema.get("items", {})
        return [fault for index, one in enumerate(value) for fault in faults(one, item, named, f"{at}[{index}]")]
    if isinstance(value, dict) and (fields := schema.get("properties")) is not None:
        others = schema.get("additionalProperties", False)
        found = [f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, one in value.items():
            if name in fields:
                found += faults(one, fields[name], named, f"{at}.{name}")
            elif not others:
                found.append(f"{at}.{name} is not in the document")
        return found
    if isinstance(value, dict) and isinstance(others := schema.get("additionalProperties"), dict):
        return [fault for name, one in value.items() for fault in faults(one, others, named, f"{at}.{name}")]
    return []


class AnswerCheck:
    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, response: httpx.Response) -> None:
        """Raise `AssertionError` if an answer is not as its operation's description says."""
        key = tuple(sorted(str(getattr(route, "path", "")) for route in self._app.routes))
        if key not in DOCUMENTS:
            [route] = [route for route in self._app.routes if getattr(route, "path", "") == "/openapi.json"]
            DOCUMENTS[key] = json.loads((await route.endpoint(None)).body)
        document = DOCUMENTS[key]
        operation = find_operation(document, response.request.method, response.request.url.path)
        described = {} if operation is None else operation["responses"].get(str(response.status_code), {})
        media_type = response.headers.get("content-type", "").partition(";")[0]
        if not described:
            return
        assert media_type in described["content"], f"{media_type} is not among {list(described['content'])}"
        data = await response.aread()
        found = wrong(data, media_type, described["content"][media_type]["schema"], document["components"]["schemas"])
        assert not found, (response.request.method, str(response.request.url), found, data[:2000])


def find_operation(document: dict[str, Any], method: str, path: str) -> dict[str, Any] | None:
    exact = document["paths"].get(path)
    if exact is None:
        exact = next((one for name, one in document["paths"].items() if "{" in name and pattern(name).fullmatch(path)), {})
    return exact.get(method.lower())


@cache
def pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", path))


def wrong(data: bytes, media_type: str, schema: dict[str, Any], named: dict[str, Any]) -> list[str]:
    """Return what is wrong with a body: JSON, lines of JSON, or events with JSON."""
    if media_type == "application/json":
        return faults(json.loads(data), schema, named)
    if media_type in ("application/x-ndjson", "application/x-jsonl"):
        return [fault for line in data.splitlines() for fault in faults(json.loads(line), schema, named)]
    if media_type != "text/event-stream":
        return []
    of_data = schema["properties"]["data"]
    kinds = of_data.get("anyOf", [of_data])
    ends = {end for kind in kinds for end in kind.get("enum", ())}
    [content] = [kind["contentSchema"] for kind in kinds if "contentSchema" in kind]
    events = [line.partition(b":")[2].strip().decode() for line in data.split(b"\n") if line.startswith(b"data:")]
    return [fault for event in events if event not in ends for fault in faults(json.loads(event), content, named)]
