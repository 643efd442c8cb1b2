"""Bodies of the routes that take one: which count as JSON, and what becomes of those that never come whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.config import ServerConfig
from penstock.serve.app import create_app
from support.deployments import deployment_of
from support.server.errors import COMPLETIONS, check
from support.server.harness import make_client

BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        " application/json ;x",
        "application/a+json",
    ],
)
async def test_what_says_that_it_is_json_is_read(client, content_type):
    response = await client.post(COMPLETIONS, content=BODY, headers={"Content-Type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "content_type",
    [
        "application/x-www-form-urlencoded",
        "text/json",
        "application/jsonp",
        "application/json/a",
        "application/a/b+json",
        "json",
        "application/x",
        ";",
    ],
)
async def test_what_says_that_it_is_something_else_is_not(client, content_type):
    response = await client.post(COMPLETIONS, content=BODY, headers={"Content-Type": content_type})
    error = check(response, 400, "invalid_request_error")
    told = f"The body has the content type {content_type!r}. Send JSON with the header 'Content-Type: application/json'."
    assert error["message"] == told


async def test_no_body_is_no_object(client):
    error = check(await client.post(COMPLETIONS), 400, "invalid_request_error")
    assert error["message"] == "The body must be a JSON object, sent as application/json."


async def test_a_body_is_read_in_as_many_pieces_as_it_comes_in(client):
    async def pieces():
        for byte in BODY:
            yield bytes([byte])

    assert (await client.post(COMPLETIONS, content=pieces())).status_code == 200


@pytest.mark.parametrize("num_pieces", [0, 1, 2])
async def test_who_leaves_in_the_middle_of_a_body_is_no_failure(runtime, caplog, num_pieces):
    pieces: list[dict[str, Any]] = [{"type": "http.request", "body": b"{", "more_body": True}] * num_pieces
    messages = iter([*pieces, {"type": "http.disconnect"}])
    sent: list[dict[str, Any]] = []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    app = create_app(deployment_of(runtime), ServerConfig())
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b"", "root_path": ""}
    with caplog.at_level(logging.WARNING):
        await app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert not caplog.records
    assert runtime.bridge.num_open_requests == 0


async def test_a_path_that_looks_alike_is_not_there(runtime):
    async with make_client(runtime) as client:
        for path in (COMPLETIONS + "/", COMPLETIONS.upper()):
            check(await client.post(path, content=BODY), 404, "not_found")
