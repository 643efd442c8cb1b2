"""`/kv`: a map of the KV pool's blocks by state and owner."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.calls.in_flight import InFlight
from penstock.deploy.deployment import Deployment
from penstock.deploy.running import RunningModel
from penstock.kv.pool_map import BlockOwner, BlockState, PoolMap, Run
from penstock.serve.answering import answer_in_thread
from penstock.serve.asking import find_model
from penstock.serve.errors import unavailable
from penstock.serve.shapes import Count
from penstock.serve.terms import read_owner


class Owner(TypedDict):
    request: str | None
    choice: NotRequired[Count]
    blocks: Count
    tokens: NotRequired[Count]
    computed_tokens: NotRequired[Count]


class Pool(TypedDict):
    block_size: Count
    blocks: Count
    states: dict[str, Count]
    waste_ratio: float
    map: list[
        Annotated[
            list[Literal["free", "cached", "held", "shared", "adapter", "null"] | Count | None],
            Field(
                min_length=2,
                max_length=3,
                description="The state of neighbouring blocks, their number and, if a request holds them, its index.",
            ),
        ]
    ]
    owners: list[Owner]


class PoolEndpoint:
    def __init__(self, deployment: Deployment, in_flight: InFlight) -> None:
        self._deployment = deployment
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._drawn: dict[str, tuple[int, PoolMap]] = {}
        """Model -> (time in ns, map) of the last map of its pool."""

    async def kv(self, http: HttpRequest) -> Response:
        """Answer with a model's blocks in order: one `[state, number of blocks]` for neighbours with the same state and owner.

        Blocks that a request holds are `["held", number of blocks, owner]`, in which `owner` is an index into `owners`.
        """
        running = find_model(http.query_params.get("model"), self._deployment, http.scope)
        names = self._in_flight.names_of(read_owner(http.scope))
        return await answer_in_thread(lambda: _as_json(self._draw(running), names))

    def _draw(self, running: RunningModel) -> PoolMap:
        """Return a map of the pool, at most 0.1 s old, because drawing a map holds the GIL. Raises 503."""
        with self._lock:
            now_ns = running.clock.now_ns()
            drawn_ns, drawn = self._drawn.get(running.name, (0, None))
            if drawn is None or now_ns - drawn_ns >= 100_000_000:
                try:
                    drawn = running.engine.pool_map()
                except TimeoutError as error:
                    raise unavailable(f"The map of the KV pool is not available now: {error}.") from error
                self._drawn[running.name] = now_ns, drawn
            return drawn


def _as_json(drawn: PoolMap, names: dict[str, tuple[str, int]]) -> Pool:
    """Return the map as JSON data. `names` has the caller's requests: engine id -> (client's id, index of the choice)."""
    return {
        "block_size": drawn.block_size,
        "blocks": drawn.num_blocks,
        "states": {state.value: count for state, count in drawn.states.items()},
        "waste_ratio": round(drawn.waste, 5),
        "map": [_run(run) for run in drawn.runs],
        "owners": [_owner(owner, names.get(owner.request_id)) for owner in drawn.owners],
    }


def _owner(owner: BlockOwner, name: tuple[str, int] | None) -> Owner:
    """Return an owner of blocks. `name` is None for other clients' requests, which appear without id and tokens."""
    if name is None:
        return {"request": None, "blocks": owner.num_blocks}
    request_id, choice = name
    return {
        "request": request_id,
        "choice": choice,
        "blocks": owner.num_blocks,
        "tokens": owner.num_tokens,
        "computed_tokens": owner.num_computed_tokens,
    }


def _run(run: Run) -> list[Any]:
    return [run.state.value, run.num_blocks, run.owner] if run.state is BlockState.HELD else [run.state.value, run.num_blocks]
