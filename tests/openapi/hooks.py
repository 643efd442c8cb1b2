"""Hooks of schemathesis for Penstock. It loads this file by SCHEMATHESIS_HOOKS; run.sh starts the server."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import jsonschema_rs
import requests
import schemathesis

from support.e2e.mutants import LIMITS, Bodies, routes_of

MODEL, URL, KEY = (os.environ[f"PENSTOCK_{name}"] for name in ("MODEL", "URL", "KEY"))
MOST = {**dict.fromkeys(LIMITS, 8), "n": 2, "best_of": 2}
"""Values of fields: answers that are longer, or more of them, say nothing more."""
NUM_EXAMPLES = 24
"""Good bodies of each route: those of a schema alone are mostly refused, as no schema says all rules."""


DOCUMENT: dict[str, Any] = {}
"""The one that schemathesis has loaded."""


@schemathesis.hook
def before_load_schema(_context: Any, document: dict[str, Any]) -> None:
    """Give each route examples, and close the schemas of answers: a field that the document does not have is a fault here."""
    bodies, rng = Bodies(document), random.Random(1)
    for route in routes_of(document):
        if route.bodies:
            operation = document["paths"][route.path][route.method.lower()]
            made = [bodies.make(route, MODEL, rng, most_others=index % 4) for index in range(NUM_EXAMPLES)]
            content = operation["requestBody"]["content"]["application/json"]
            content["examples"] = {str(index): {"value": body} for index, body in enumerate(made)}
    known = begin_jobs()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                # Not for deletions: the other operations need them.
                if parameter["in"] == "path" and method != "delete" and (example := known.get(path.partition("/{")[0])):
                    parameter["example"] = example
    page = {"200": {"description": "The page, which is no part of an API", "content": {"text/html": {"schema": {}}}}}
    document["paths"]["/"]["get"] = {"responses": page, "security": []}
    DOCUMENT.update(document)
    for schema in document["components"]["schemas"].values():
        if schema.get("additionalProperties") is not False:  # those of requests are closed already
            close(schema)


def begin_jobs() -> dict[str, str]:
    """Upload a file, and answer it and a batch of Anthropic's API. Return their ids by the beginnings of their paths."""

    def ask(method: str, path: str, **fields: Any) -> Any:
        answer = requests.request(method, URL + path, headers={"X-Api-Key": KEY}, timeout=30, **fields)
        answer.raise_for_status()
        return answer.json()

    def wait(path: str, field: str, end: str) -> None:
        for _ in range(600):
            if (found := ask("GET", path)[field]) == end:
                return
            time.sleep(0.1)
        raise TimeoutError(f"{path}: {field} is {found!r} after 60 s, not {end!r}")

    url, body = "/v1/embeddings", {"model": MODEL, "input": "Hi"}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    file = ask("POST", "/v1/files", files={"file": ("a.jsonl", line)}, data={"purpose": "batch"})["id"]
    batch = ask("POST", "/v1/batches", json={"input_file_id": file, "endpoint": url})["id"]
    params = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    messages = ask("POST", "/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]})["id"]
    wait(f"/v1/batches/{batch}", "status", "completed")
    wait(f"/v1/messages/batches/{messages}", "processing_status", "ended")
    return {"/v1/files": file, "/v1/batches": batch, "/v1/messages/batches": messages}


def close(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for inner in schema.values():
            close(inner)
    elif isinstance(schema, list):
        for inner in schema:
            close(inner)


@schemathesis.check
def no_server_fault(_context: Any, response: Any, case: Any) -> None:
    """There is no 5xx but these: 501 for a model to pull, which is not served, and the 503 that says when to come back.

    One request unloads the model that others ask.
    """
    status = response.status_code
    is_away = status == 503 and "retry-after" in response.headers
    assert status < 500 or is_away or (status == 501 and case.operation.path == "/api/pull"), f"a {status}"


@schemathesis.check
def line_conformance(_context: Any, response: Any, case: Any) -> None:
    """Each line of JSON lines matches its schema. schemathesis itself looks at answers of JSON and at events."""
    kind = response.headers["content-type"][0]
    if kind in ("application/x-ndjson", "application/x-jsonl"):
        operation = DOCUMENT["paths"][case.operation.path][case.method.lower()]
        schema = operation["responses"]["200"]["content"][kind]["schema"]
        validator = jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})
        lines = response.text.removesuffix("\n").split("\n")
        for line in lines:
            validator.validate(json.loads(line))


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Names of models are mostly those that are served, and answers are kept short."""
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and len(body["model"]) % 4:
            body["model"] = MODEL
        for name, most in MOST.items():
            if isinstance(body.get(name), int) and body[name] > most:
                body[name] = most
    return body
