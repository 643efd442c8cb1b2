"""`/kv`: the KV pool as a map of blocks by state and owner. Reads the engine's books, changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request as HttpRequest

from penstock.kv.pool_map import BlockState, PoolMap, Run
from penstock.serve.call import read_owner
from penstock.serve.service import Service


class PoolEndpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def kv(self, http: HttpRequest) -> dict[str, Any]:
        """Every block, neighbours of one kind as one: `[state, blocks]`, or `["held", blocks, owner]`."""
        service = self._service
        owner = read_owner(http.scope, service.config)
        names = service.names_of(owner)
        # In a thread, as it takes 5 ms for a hundred thousand blocks.
        return await asyncio.to_thread(lambda: _as_json(service.runtime.engine.pool_map(), names))


def _as_json(drawn: PoolMap, names: dict[str, str]) -> dict[str, Any]:
    """`names`: by the engine's ids, those of the caller's own requests; others' are not told."""
    return {
        "block_size": drawn.block_size,
        "blocks": drawn.num_blocks,
        "states": {state.value: count for state, count in drawn.states.items()},
        "waste_ratio": round(drawn.waste, 5),
        "map": [_run(run) for run in drawn.runs],
        "owners": [
            {
                "request": names.get(owner.request_id),
                "blocks": owner.num_blocks,
                "tokens": owner.num_tokens,
                "computed_tokens": owner.num_computed_tokens,
            }
            for owner in drawn.owners
        ],
    }


def _run(run: Run) -> list[str | int | None]:
    return [run.state.value, run.num_blocks, run.owner] if run.state is BlockState.HELD else [run.state.value, run.num_blocks]
