"""Answers of a running model, and guesses one after another, for tests of small models and draft heads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.engine.draft_model import DraftModel
from penstock.sched.drafting import Drafted
from penstock.testing.builders import make_request
from penstock.types.request import Request
from support.reading import chunks_of


def answers(running: Any) -> list[Any]:
    """Return the finish reason and the tokens of six answers, greedy and sampled in turn, of requests at once."""
    requests = [
        make_request(f"r{idx}", [1 + idx, 60, 70], max_tokens=60, temperature=0.7 * (idx % 2), seed=idx) for idx in range(6)
    ]

    async def answer(request: Any) -> Any:
        chunks = [chunk async for chunk in chunks_of(running.bridge, request)]
        return chunks[-1].finish_reason, [token_id for chunk in chunks for token_id in chunk.token_ids]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(answer, requests))

    return asyncio.run(all_of_them())


def guesses_from(draft: DraftModel, step: Drafted, requests: Sequence[Request], num: int) -> list[list[int]]:
    """Return up to `num` guesses for each request. The first is that of `step`, and the small model makes the others."""
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for place in range(num):
        for name, (token_id, _) in step.guesses.items():
            found[name].append(token_id)
        if place < num - 1:
            step = draft.go_on([request for request in requests if request.request_id in step.guesses])
    return list(found.values())
