"""Hooks of schemathesis for Penstock. It loads this file by SCHEMATHESIS_HOOKS; PENSTOCK_MODEL is served (run.sh)."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema_rs
import schemathesis

from support.e2e.mutants import LIMITS, Bodies, routes_of

MODEL = os.environ["PENSTOCK_MODEL"]
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
    DOCUMENT.update(document)
    for schema in document["components"]["schemas"].values():
        if schema.get("additionalProperties") is not False:  # those of requests are closed already
            close(schema)


def close(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema:
            schema["additionalProperties"] = False
        for inner in schema.values():
            close(inner)
    elif isinstance(schema, list):
        for inner in schema:
            close(inner)


@schemathesis.check
def no_server_fault(_context: Any, response: Any, _case: Any) -> None:
    """There is no 5xx but the 503 that says when to come back: one request unloads the model that others ask."""
    status = response.status_code
    assert status < 500 or (status == 503 and "retry-after" in response.headers), f"a {status}"


@schemathesis.check
def line_conformance(_context: Any, response: Any, case: Any) -> None:
    """Each line of JSON lines matches its schema. schemathesis itself looks at answers of JSON and at events."""
    kind = "application/x-ndjson"
    if response.headers["content-type"][0] == kind:
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
