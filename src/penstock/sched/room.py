"""How much memory an admission finds, and must find: owns the count of what the running can grow to. Called by the scheduler;
takes no block itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from penstock.kv.manager import KVManager
from penstock.kv.prefix_hit import PrefixHit
from penstock.sched.policies.base import AdmissionView, Reserve
from penstock.sched.preemption import blocks_to_resume, peak_growth_tokens
from penstock.types.request import Request


class Room:
    """Numbers of blocks."""

    def __init__(self, kv: KVManager, reserve: Reserve) -> None:
        self._kv = kv
        self._reserve = reserve
        self.num_final_blocks = 0
        """What the running would hold if all reached their limits and shared nothing."""

    def final_blocks(self, request: Request) -> int:
        """Of a request at its limit; its last token is never computed and takes no place."""
        return self._kv.num_blocks_for(request.max_total_tokens - 1)

    def missing_blocks(self, request: Request) -> int:
        """Those that a running request does not hold yet for the tokens that it has."""
        num_planned = request.num_computed_tokens + request.num_inflight_tokens
        return self._kv.num_blocks_for(request.num_tokens) - self._kv.num_blocks_for(num_planned)

    def lacking_blocks(self, request: Request, query_len: int) -> int:
        """Those that a row of a running request needs beyond what it holds and what is free; at least 1."""
        num_held = len(self._kv.block_table(request.request_id))
        num_fresh = self._kv.num_blocks_for(request.num_computed_tokens + query_len) - num_held
        return max(1, num_fresh - self._kv.num_available_blocks)

    def join(self, request: Request) -> None:
        self.num_final_blocks += self.final_blocks(request)

    def leave(self, request: Request) -> None:
        self.num_final_blocks -= self.final_blocks(request)

    def is_enough(
        self,
        request: Request,
        hit: PrefixHit,
        query_len: int,
        running: Mapping[str, Request],
        num_promised_blocks: int,
        without: Collection[Request] = (),
        *,
        forks: Sequence[tuple[Request, int]] = (),
        swaps: bool = False,
    ) -> bool:
        """May the request join those who run, with a first chunk of `query_len`, once those of `without` had left?

        `num_promised_blocks`: free ones that running prefills will need for the tokens they have. Of beams, all that run of a
        search are among `without`, or none. `forks`: who follows it, and how many blocks each will share with it. `swaps`: who
        is preempted comes back from the tier.
        """
        num_available, staying = self._kv.num_available_blocks, running.values()
        num_promised, num_final = num_promised_blocks, self.num_final_blocks
        if without:
            leaving = {other.request_id for other in without}
            num_available += self._kv.num_freed_blocks(leaving, kept=hit.block_ids)
            num_promised -= sum(map(self.missing_blocks, without))
            num_final -= sum(map(self.final_blocks, without))
            staying = {key: other for key, other in running.items() if key not in leaving}.values()
        num_shared = len(hit.block_ids) - hit.num_free_blocks
        num_chunk = self._kv.num_blocks_for(hit.num_tokens + query_len) - num_shared
        if not staying:
            return num_chunk <= num_available
        num_total, num_blocks_for = self._kv.num_total_blocks, self._kv.num_blocks_for
        num_fork_blocks = sum(num_blocks_for(fork.num_tokens) - num_same for fork, num_same in forks)
        num_final_fork_blocks = sum(self.final_blocks(fork) - num_same for fork, num_same in forks)
        view = AdmissionView(
            request=request,
            running=staying,
            num_chunk_blocks=num_chunk,
            num_prompt_blocks=num_blocks_for(request.num_tokens) - num_shared + num_fork_blocks,
            num_final_blocks=self.final_blocks(request) - num_shared + num_final_fork_blocks,
            num_running=len(staying) + len(forks),
            num_growth_blocks=max(0, num_final - (num_total - num_available) - num_promised),
            num_total_blocks=num_total,
            block_size=self._kv.block_size,
            swaps=swaps,
        )
        num_free = num_available - num_promised
        if self._required_blocks(view) <= num_free:
            return True
        if num_free < view.num_prompt_blocks:
            return False
        joining = [request, *(fork for fork, _ in forks)]
        view.num_peak_blocks = num_blocks_for(peak_growth_tokens([*joining, *staying]))
        return self._required_blocks(view) <= num_free

    def _required_blocks(self, view: AdmissionView) -> int:
        required = max(view.num_chunk_blocks, self._reserve.required_blocks(view))
        return max(required, blocks_to_resume(view)) if view.request.num_preemptions else required
