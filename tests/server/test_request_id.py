"""The outermost layer, around an app that fails."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from penstock.serve.http.checks import RequestChecks


async def failing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise RuntimeError("a defect")


def test_an_address_begins_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/requests/a\nERROR forged", "headers": []}
    with caplog.at_level(logging.ERROR):
        checks = RequestChecks(failing, new_request_id=lambda: "req-1", keys=None, max_body_bytes=0)
        asyncio.run(checks(scope, receive, send))
    assert sent[0]["status"] == 500
    (record,) = caplog.records
    assert record.getMessage() == "request req-1 failed: GET /v1/requests/a%0AERROR%20forged"
