"""Asks a router for each request, and keeps the facts that routers read: the work in flight, and who holds which blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.kv.block_table import extend_chain, root_hash
from penstock.kv.changes import Changes, names_of
from penstock.kv.prefix_cache import Recent
from penstock.sched.routing.holdings import Holdings
from penstock.sched.routing.ledger import Ledger
from penstock.sched.routing.routers import Arrival, Router
from penstock.sched.routing.split import Split
from penstock.sched.scaling import GroupLoad
from penstock.types.errors import PenstockError
from penstock.types.request import Request
from penstock.types.stats import EngineLoad, StepStats

MIN_FETCHED_TOKENS = 64
"""Computing fewer tokens is faster than fetching them from another replica."""

MAX_ADAPTERS = 4096
"""Most adapters whose replicas are remembered."""
MAX_SOURCES = 4
"""Most replicas that are considered as the source of a copy."""


class Choice(NamedTuple):
    """The replica of a request, and what was known as it was chosen."""

    replica: int
    num_held_tokens: int  # prompt tokens that it holds
    num_tokens_ahead: int  # its remaining work for other requests
    fewest_tokens_ahead: int  # the same for the replica with the least work
    source: int | None  # another replica, from which it may copy more of the prompt's KV
    num_source_tokens: int  # leading prompt tokens that the source holds


class Dispatcher:
    def __init__(
        self,
        router: Router,
        num_replicas: int,
        block_size: int,
        *,
        has_prefix_caching: bool = True,
        slo_itl_ns: int | None = None,
    ) -> None:
        """`num_replicas`: replicas at the start, numbered from 0. `slo_itl_ns`: target for inter-token latency.
        With it and prefix caching, prefill and decode may be disaggregated (`split.py`)."""
        self._split = None if slo_itl_ns is None or not has_prefix_caching else Split(slo_itl_ns)
        self._router, self._block_size = router, block_size
        self._has_prefix_caching = has_prefix_caching
        self._holdings = Holdings(block_size)
        self._all, self._people = Ledger(), Ledger()
        """The second leaves out background requests. They give way to the others, so only they are routed by the first."""
        self._givers: set[int] = set()
        self._adapters: Recent[bytes, int] = Recent(MAX_ADAPTERS)
        """Fingerprint of an adapter -> bit set of the replicas that were sent a request with it. They may have evicted it: a
        wrong guess costs a load."""
        self.numbers: list[int] = []
        """Numbers of the current replicas, ascending."""
        for _ in range(num_replicas):
            self.join()

    def join(self, *, gives: bool = False) -> int:
        """Add a replica that holds nothing, and return its number: the lowest that no other has.

        `gives`: it exchanges cached KV with other such replicas.
        """
        number = next((number for number, taken in enumerate(self.numbers) if number != taken), len(self.numbers))
        self.numbers.insert(number, number)
        for ledger in (self._all, self._people):
            ledger.join(number)
        if gives:
            self._givers.add(number)
        return number

    def leave(self, replica: int) -> None:
        """Remove a replica, and forget which blocks it holds. Call `on_end` for its requests first. O(blocks)."""
        self.numbers.remove(replica)
        self._givers.discard(replica)
        self._holdings.forget(replica)
        for fingerprint, holders in self._adapters.items():
            self._adapters[fingerprint] = holders & ~(1 << replica)

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
        num_adapter_blocks: int = 0,
        but_not: Collection[int] = (),
    ) -> Choice:
        """Choose a replica for a request, and count the request as sent to it.

        `names`: what `names_of(request)` returned.
        `loads`: how busy each replica is, by its number.
        `num_new_tokens`: the expected length of its answer.
        `num_adapter_blocks`: KV blocks that its adapter takes.
        `but_not`: replicas that must not get it. At least one other must be there.

        Raises PenstockError if the router fails, or chooses no replica.
        """
        ledger = self._all if request.background else self._people
        numbers, work = self.numbers, ledger.work
        if but_not:
            numbers = [number for number in numbers if number not in but_not]
        if num_answering := self._num_answering(numbers, ledger):
            numbers = numbers[num_answering:]
        depths = all_depths = self._holdings.depths(names, self.numbers[-1] + 1)
        if len(numbers) < len(work):
            loads, work = [loads[number] for number in numbers], [work[number] for number in numbers]
            depths = [all_depths[number] for number in numbers]
        held: Sequence[int] = depths
        prefix = names[deepest // self._block_size - 1] if (deepest := max(depths)) else 0
        if request.adapter is not None:
            holders = self._adapters.get(request.adapter.fingerprint) or 0
            num_tokens = num_adapter_blocks * self._block_size
            held = [tokens + num_tokens * (holders >> number & 1) for tokens, number in zip(held, numbers, strict=True)]
            prefix = prefix or int.from_bytes(request.adapter.fingerprint)
        arrival = Arrival(
            index=index,
            now_ns=now_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            tenant=request.tenant,
            priority=request.priority,
            work=tuple(work),
            held=tuple(held),
            prefix=prefix,
            names=names,
        )
        chosen = self._ask(arrival, loads)
        number, ahead, num_held_tokens = numbers[chosen], arrival.work, depths[chosen]
        source, num_source_tokens = self._source_of(request, names, all_depths, number)
        choice = Choice(number, num_held_tokens, ahead[chosen], min(ahead), source, num_source_tokens)
        num_to_compute = request.num_prompt_tokens - max(num_held_tokens, num_source_tokens)
        self._send(request, number, num_to_compute, num_new_tokens)
        self._holdings.expect(request.request_id, number, names, num_held_tokens)
        if request.adapter is not None:
            self._adapters.put(request.adapter.fingerprint, holders | 1 << number)
        return choice

    def _source_of(self, request: Request, names: Sequence[int], depths: Sequence[int], chosen: int) -> tuple[int | None, int]:
        """Return (replica, number of tokens) from which to copy more of a prompt than the chosen one holds, or (None, 0).

        `depths`: how many tokens each replica holds, or will hold, by its number.
        """
        least = depths[chosen] + MIN_FETCHED_TOKENS
        if chosen not in self._givers or request.sampling.prompt_logprobs is not None or max(depths) < least:
            return None, 0
        deeper = sorted([number for number in self._givers if depths[number] >= least], key=depths.__getitem__, reverse=True)
        # Only reported blocks count: others may still be computed.
        told = {number: self._holdings.num_reported(number, names) for number in deeper[:MAX_SOURCES]}
        source = max(told, key=told.__getitem__, default=None)
        return (None, 0) if source is None or told[source] < least else (source, told[source])

    def _send(self, request: Request, replica: int, num_prefill_tokens: int, num_new_tokens: int) -> None:
        for ledger in (self._all,) if request.background else (self._all, self._people):
            ledger.send(request.request_id, replica, num_prefill_tokens, num_new_tokens)

    def _num_answering(self, numbers: Sequence[int], ledger: Ledger) -> int:
        """Return how many of these replicas should only decode. They are the first of `numbers`."""
        if self._split is None or not numbers or not self._givers.issuperset(numbers):
            return 0
        return self._split.num_answering(len(numbers), sum([ledger.answers[number] for number in numbers]))

    def hand_over(self, request_id: str, but_not: Collection[int] = ()) -> int | None:
        """Choose a replica to decode an answer that has its first token, and count the answer there. None: it stays."""
        ledgers = [ledger for ledger in (self._people, self._all) if ledger.answers_at(request_id) is not None]
        if self._split is None or not ledgers:
            return None
        numbers, answers = [number for number in self.numbers if number not in but_not], ledgers[0].answers
        answering = numbers[: self._num_answering(numbers, ledgers[0])]
        if ledgers[0].answers_at(request_id) in answering:
            return None
        most = self._split.most_answers
        chosen = max([number for number in answering if answers[number] < most], key=answers.__getitem__, default=None)
        if chosen is not None:
            for ledger in ledgers:
                ledger.move(request_id, chosen)
        return chosen

    def on_step(self, stats: StepStats) -> None:
        if self._split is not None:
            self._split.learn(stats)

    def also(self, request: Request, replica: int, num_new_tokens: int) -> None:
        """Count a request as sent to a replica that already has a request with the same prompt."""
        self._send(request, replica, 0, num_new_tokens)

    def group_load(self, loads: Sequence[EngineLoad], num_unsent: int) -> GroupLoad:
        """Return the load of all replicas together. `num_unsent`: requests that wait for a first replica."""
        people = self._people
        return GroupLoad(
            num_replicas=len(self.numbers),
            is_full=bool(self.numbers) and all(loads[number].num_waiting for number in self.numbers),
            num_sent_tokens=people.num_sent_tokens,
            num_done_tokens=self._all.num_done_tokens,
            num_waiting_tokens=people.num_waiting_tokens,
            num_unsent=num_unsent,
        )

    def _ask(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        router, name = self._router, type(self._router).__name__
        try:
            chosen = router.choose(arrival, loads)
        except Exception as error:
            raise PenstockError(
                f"The router {name} failed in choose: {type(error).__name__}: {error}.",
                remedy="If it is your own, correct it; docs/simulate.md describes the interface.",
            ) from error
        if type(chosen) is not int or not 0 <= chosen < len(loads):
            raise PenstockError(
                f"The router {name} chose replica {chosen!r}; there are {len(loads)}.",
                remedy="Its choose(arrival, loads) must return a number from 0 on that is less than len(loads).",
            )
        return chosen

    def work_of(self, replica: int, *, with_background: bool = True) -> int:
        """Return how many tokens a replica has yet to compute, of prompts and of expected answers."""
        return (self._all if with_background else self._people).work[replica]

    def hear(self, replica: int, changes: Changes) -> None:
        self._holdings.hear(replica, changes.added, changes.removed)

    def on_tokens(self, request_id: str, num_tokens: int) -> None:
        """Note that a request got tokens. Call `hear` before, for the blocks that its replica has by now."""
        self._people.on_tokens(request_id, num_tokens)
        if self._all.on_tokens(request_id, num_tokens):
            self._holdings.settle(request_id)

    def on_end(self, request_id: str) -> None:
        """Note that a request has ended. Idempotent."""
        for ledger in (self._all, self._people):
            ledger.on_end(request_id)
        self._holdings.settle(request_id)
