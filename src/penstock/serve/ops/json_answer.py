"""A JSON answer that is made in a thread. Endpoints whose answers can be large call it, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response


async def json_answer(make: Callable[[], Any]) -> Response:
    """The answer with what `make` returns, which is called in a thread, too. Raises what it raises."""
    # A response of our own, since FastAPI would go through every item of a list on the event loop.
    data = await asyncio.to_thread(lambda: orjson.dumps(make()))
    return Response(data, media_type="application/json")
