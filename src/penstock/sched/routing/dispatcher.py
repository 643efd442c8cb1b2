"""Asks a router for each request, and keeps the facts that routers read: the work in flight, and who holds which blocks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kv.block_table import extend_chain, root_hash
from penstock.kv.changes import Changes, names_of
from penstock.sched.routing.holdings import Holdings
from penstock.sched.routing.ledger import Ledger
from penstock.sched.routing.routers import Arrival, Router
from penstock.types.errors import PenstockError
from penstock.types.request import Request
from penstock.types.stats import EngineLoad


class Dispatcher:
    def __init__(self, router: Router, num_replicas: int, block_size: int, *, has_prefix_caching: bool = True) -> None:
        self._router, self._num_replicas, self._block_size = router, num_replicas, block_size
        self._has_prefix_caching = has_prefix_caching
        self._ledger, self._holdings = Ledger(num_replicas), Holdings()

    def names_of(self, request: Request) -> list[int]:
        """Return the names of the whole blocks that a request may find in a cache. Its last token is always computed."""
        if not self._has_prefix_caching:
            return []
        root = root_hash(request.cache_salt, request.adapter)
        hashes, _ = extend_chain(root, request.prompt_token_ids[:-1], self._block_size)
        return names_of(hashes)

    def choose(
        self,
        request: Request,
        names: Sequence[int],
        loads: Sequence[EngineLoad],
        *,
        index: int,
        now_ns: int,
        num_new_tokens: int,
    ) -> int:
        """Choose a replica for a request, and count the request as sent to it.

        `names`: what `names_of(request)` returned.
        `loads`: how busy each replica is.
        `num_new_tokens`: the expected length of its answer.

        Raises PenstockError if the router fails, or chooses no replica.
        """
        depths = self._holdings.depths(names, self._num_replicas)
        arrival = Arrival(
            index=index,
            now_ns=now_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            tenant=request.tenant,
            priority=request.priority,
            work=tuple(self._ledger.work),
            held=tuple([depth * self._block_size for depth in depths]),
            prefix=names[deepest - 1] if (deepest := max(depths)) else 0,
        )
        chosen = self._ask(arrival, loads)
        self._ledger.send(request.request_id, chosen, request.num_prompt_tokens - arrival.held[chosen], num_new_tokens)
        self._holdings.expect(request.request_id, chosen, names[depths[chosen] :])
        return chosen

    def _ask(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        router, name = self._router, type(self._router).__name__
        try:
            chosen = router.choose(arrival, loads)
        except Exception as error:
            raise PenstockError(f"The router {name} failed in choose: {type(error).__name__}: {error}") from error
        if type(chosen) is not int or not 0 <= chosen < len(loads):
            raise PenstockError(
                f"The router {name} chose replica {chosen!r}; there are {len(loads)}.",
                remedy="Its choose(arrival, loads) must return a number from 0 on that is less than len(loads).",
            )
        return chosen

    def hear(self, replica: int, changes: Changes) -> None:
        self._holdings.hear(replica, changes.added, changes.removed)

    def on_tokens(self, request_id: str, num_tokens: int) -> None:
        """Note that a request got tokens. Call `hear` before, for the blocks that its replica has by now."""
        if self._ledger.on_tokens(request_id, num_tokens):
            self._holdings.settle(request_id)

    def on_end(self, request_id: str) -> None:
        """Note that a request has ended. Idempotent."""
        self._ledger.on_end(request_id)
        self._holdings.settle(request_id)
