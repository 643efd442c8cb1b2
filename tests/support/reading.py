"""Reads what a bridge brings of one request, chunk by chunk."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.engine.bridge import Bridge
from penstock.engine.ports import OutputChunk
from penstock.types.request import Request


async def chunks_of(bridge: Bridge, request: Request) -> AsyncIterator[OutputChunk]:
    """Submit a request. The last of its chunks has a finish reason; leaving early aborts it."""
    with bridge.open((request,)) as stream:
        while chunks := await stream.next_chunks():
            for chunk in chunks:
                yield chunk
