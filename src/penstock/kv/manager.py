"""The KV manager: every request's block table. Called under the core lock: by the scheduler, the stepper (copies of blocks),
`Transfers` (tier) and `Blocks` (exchange).

Full blocks are added to the prefix cache when their step is committed, so a failed step leaves no entry. A request writes only
to blocks that it does not share. After a fork, or a cache hit that ends inside a block, it gets a copy first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence

from penstock.kv.adapters import AdapterPages
from penstock.kv.block_pool import NULL_BLOCK_ID, BlockPool
from penstock.kv.block_table import BlockTable, pack, private_root_hash, root_hash, token_slice
from penstock.kv.eviction import BACKGROUND, EvictionPolicy, LeastRecentlyUsed, group_of
from penstock.kv.exchange import Exchange
from penstock.kv.prefix_cache import MARK_TOKENS, NO_HIT, PrefixCache, PrefixHit
from penstock.kv.states import SavedStates
from penstock.kv.tiers import Swapping, Tier
from penstock.types.adapter import BASE, PackedAdapter
from penstock.types.plan import StateSave
from penstock.types.request import Request


class KVManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        window: int = 0,
        enable_prefix_caching: bool = True,
        shares_parts: bool = True,
        has_state: bool = False,
        num_state_blocks: int = 0,
        eviction: EvictionPolicy | None = None,
        tier: Tier | None = None,
    ) -> None:
        """`num_blocks` includes the null block. With a tier, blocks are hashed even if `enable_prefix_caching` is False.
        `has_state` and `num_state_blocks` are `Capacity`'s."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        if num_state_blocks and tier is not None:
            raise ValueError("a tier keeps single blocks, and recurrent states take many")
        self.block_size = block_size
        self.eviction = eviction or LeastRecentlyUsed()
        self.pool = BlockPool(num_blocks, self.eviction)
        self.num_total_blocks = num_blocks - 1
        """Blocks that requests can hold: all but the null block."""
        self.tables: dict[str, BlockTable] = {}
        self.num_slots: dict[str, int] = {}
        """Request id -> positions writable without a call of `extend`. 0 if a block may be shared."""
        self.num_state_blocks = num_state_blocks
        self.states = SavedStates(self.pool, block_size)
        self.prefix = PrefixCache(
            self.pool,
            block_size,
            self.tables,
            is_shared=enable_prefix_caching,
            shares_parts=shares_parts,
            has_state=has_state,
            states=self.states if num_state_blocks else None,
        )
        self.tier = tier
        self.swapping: Swapping | None = None
        if tier is not None:
            self.swapping = Swapping(tier, self.pool, self.prefix, self.tables, self.eviction, self._take, block_size)
        self.adapters = AdapterPages(self.pool, self._take)
        self._window = window
        self._hashes_blocks = enable_prefix_caching or tier is not None
        self.pending_copies: list[tuple[int, int]] = []
        """(source, destination) blocks to copy, in order, before the next step."""
        self._is_copying = False
        """Copies that `take_block_copies` returned are not made yet. Their sources may be free blocks."""
        self.exchange = Exchange(self.pool, self.prefix.index, self._take_beside_a_step)
        self._fences: dict[int, list[tuple[str, BlockTable]]] = {}
        """Step id -> (request id, table) of requests that ended during that step."""

    @property
    def load_ns_per_token(self) -> float | None:
        """Time to load a token's KV from the tier. 0: not measured yet. None: no working tier."""
        tier = self.tier
        return tier.load_ns_per_block / self.block_size if tier is not None and tier.is_open else None

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        table = self.tables.get(request_id)
        return tuple(table.block_ids) if table else ()

    def num_held_blocks(self, request_id: str) -> int:
        """Return the number of blocks that the request holds, shared ones and those of states included."""
        table = self.tables.get(request_id)
        return len(table.block_ids) - table.num_released + len(table.state_block_ids) if table else 0

    def num_allocated_blocks(self, request_id: str) -> int:
        """Return how many of the request's blocks it allocated itself."""
        table = self.tables.get(request_id)
        return len(table.block_ids) - max(table.num_found, table.num_released) + len(table.state) if table else 0

    def num_own_blocks(self, request_id: str) -> int:
        table = self.tables.get(request_id)
        held = [*table.held, *table.state_block_ids] if table else ()
        return sum(self.pool.ref_count(block_id) == 1 for block_id in held)

    def num_freed_blocks(self, request_ids: Iterable[str], kept: Collection[int] = ()) -> int:
        """Return how many blocks outside `kept` become free if all these requests are preempted. O(blocks)."""
        holds: Counter[int] = Counter()
        for request_id in request_ids:
            if request_id in self.tables:
                holds.update(self.tables[request_id].held)
                holds.update(self.tables[request_id].state_block_ids)
        for block_id in kept:
            holds.pop(block_id, None)
        ref_count = self.pool.ref_count
        return sum(ref_count(block_id) == count for block_id, count in holds.items())

    def num_freed_adapter_blocks(self, request_ids: Iterable[str], kept: int) -> int:
        pins = Counter(self.tables[request_id].adapter for request_id in request_ids if request_id in self.tables)
        for number in (BASE, kept):
            pins.pop(number, None)
        return self.adapters.num_freed(pins)

    def lookup_prefix(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix of a request, without its last token."""
        if not self._hashes_blocks:
            return NO_HIT
        table = self._table(request)
        # Cached tokens have no logits, so a request that wants its prompt scored computes all of it.
        return NO_HIT if request.lacks_prompt_logprobs else self.prefix.lookup(request, table)

    def allocate(
        self, request: Request, hit: PrefixHit, num_tokens: int, packed: PackedAdapter | None = None
    ) -> tuple[int, ...]:
        """Give a request its block table for positions [0, num_tokens): the cached blocks of `hit`, then fresh ones. Also pins
        its adapter.

        Raises ValueError, and takes no block, if too few are available.
        """
        table = self._table(request)
        if table.block_ids:
            raise ValueError(f"request {request.request_id!r} holds blocks already")
        number = request.adapter_number
        num_missing = 0 if number == BASE else self.adapters.num_missing(number, packed)
        num_fresh = self.num_blocks_for(num_tokens) - len(hit.block_ids)
        num_needed = num_fresh + hit.num_free_blocks + num_missing + self.num_state_blocks
        if num_needed > self.pool.num_available:
            raise ValueError(f"{num_needed} blocks needed, {self.pool.num_available} available")
        if self.tier is not None:
            self.tier.end_wait(request.request_id, computes=True)
        if not self._hashes_blocks:  # nothing is shared or found again
            self._pin(table, number, packed)
            table.block_ids = self._take(num_fresh)
            table.state = tuple(self._take(self.num_state_blocks))
            self.num_slots[request.request_id] = len(table.block_ids) * self.block_size
            return tuple(table.block_ids)
        # A preempted request that finds its own blocks again does not show that others will use them.
        rests = self.eviction.rest_ns > 0 and not request.num_preemptions
        for block_id in (*hit.held, *hit.state):  # first, since the allocations below could take these blocks
            self.pool.hold(block_id, rests=rests)
        self._pin(table, number, packed)  # for the same reason: the blocks of an unused adapter are free
        is_turn = (self.eviction.rest_ns > 0 or self.num_state_blocks > 0) and self.prefix.is_turn(request, hit)
        if self.num_state_blocks:
            self._begin_state(table, request, hit, num_fresh, is_turn=is_turn)
        fresh = self._take_with_copy(num_fresh, hit.tail_block_id, rests) if hit.tail_block_id else self._take(num_fresh)
        table.block_ids = [*hit.block_ids, *fresh]
        table.num_released = len(hit.block_ids) - len(hit.held)
        table.num_found = table.num_full = len(hit.block_ids)
        table.group = group_of(self.eviction, request)
        table.rests = table.rests or (self.eviction.rest_ns > 0 and is_turn)
        self.num_slots[request.request_id] = len(table.block_ids) * self.block_size
        self.prefix.lead(table, request)
        return tuple(table.block_ids)

    def _begin_state(self, table: BlockTable, request: Request, hit: PrefixHit, num_others: int, *, is_turn: bool) -> None:
        """Give a request blocks for its recurrent state. If too few are free, it takes over those of the saved state it begins
        with. A conversation's turn also does so to avoid an eviction, since it saves another state at its end."""
        table.source = hit.state
        num_room = self.pool.num_available - (self.pool.num_cached if is_turn else 0)
        is_alone = bool(hit.state) and self.pool.ref_count(hit.state[0]) == 1
        if is_alone and self.num_state_blocks + num_others > num_room:
            self.states.forget(hit.state)
            table.state, table.saved_at = hit.state, 0
        else:
            table.state, table.saved_at = tuple(self._take(self.num_state_blocks)), hit.num_tokens
        table.marks |= {table.num_known, request.num_prompt_tokens - MARK_TOKENS}
        if table.num_known - hit.num_tokens >= self.states.min_gap:
            self.prefix.promise(table, request)

    def save_states(self, request: Request, query_len: int) -> list[StateSave]:
        """Allocate blocks for the states to save within the request's next `query_len` tokens, while the pool has some."""
        if not self.prefix.is_shared:
            return []
        table, begin = self.tables[request.request_id], request.num_computed_tokens
        interval = self.num_state_blocks * self.block_size  # one state for as many tokens as its blocks would hold
        end = begin + query_len
        saves: list[StateSave] = []
        for position in sorted({*range(begin - begin % interval + interval, end + 1, interval), *table.marks}):
            if begin < position <= end and position - table.saved_at >= self.states.min_gap:
                if self.pool.num_available < self.num_state_blocks:
                    break
                table.saves.append((position, tuple(self._take(self.num_state_blocks))))
                table.saved_at = position
                saves.append(StateSave(request.request_id, *table.saves[-1]))
        if end >= table.num_known and table.num_known not in [position for position, _ in table.saves]:
            self.prefix.withdraw_promise(table)
        return saves

    def publish_states(self, request: Request) -> None:
        """Let others find the states that the request's step saved. Call this after `publish`."""
        table = self.tables[request.request_id]
        saves, table.saves = table.saves, []
        for position, block_ids in saves:
            self.states.put(request, table, position, block_ids, table.group, rests=table.rests)
        if request.num_computed_tokens >= table.num_known:
            self.prefix.withdraw_promise(table)
        if table.source != table.state:
            self.states.release(table.source, table.group)
            table.source = table.state

    def extend(self, request_id: str, context_len: int, num_tokens: int) -> tuple[int, ...] | None:
        """Make positions [context_len, num_tokens) writable. Return the blocks appended, or None if too few are available.

        Replaces shared blocks there by copies. The row must then be sent to the executor in full.
        """
        num_slots = self.num_slots[request_id]
        if num_tokens <= num_slots:
            return ()
        table = self.tables[request_id]
        shared = [] if num_slots else self._shared_indices(table, context_len)
        num_fresh = max(0, self.num_blocks_for(num_tokens) - len(table.block_ids))
        if num_fresh + len(shared) > self.pool.num_available:
            return None
        if shared:
            self._replace(table, shared)
        fresh = self._take(num_fresh)
        table.block_ids += fresh
        self.num_slots[request_id] = len(table.block_ids) * self.block_size
        return tuple(fresh)

    def publish(self, request: Request) -> None:
        """Add the request's full computed blocks to the prefix cache."""
        table = self.tables[request.request_id]
        first, table.num_full = table.num_full, request.num_computed_tokens // self.block_size
        if not self._hashes_blocks:
            return
        if table.num_full > first:
            table.hash_blocks(request, table.num_full, self.block_size)
            fresh = slice(first, table.num_full)
            self.prefix.index.publish(table.block_ids[fresh], table.parent(first), table.hashes[fresh], table.contents[fresh])
            self.prefix.note_answer(request, table, first, table.num_full)
        if table.leads or request.num_behind > 1:
            self.prefix.lead(table, request)

    def release_unread(self, request: Request) -> None:
        """Release a request's blocks that no layer reads any more. Call this after `publish`."""
        table = self.tables[request.request_id]
        first, end = table.num_released, table.num_unread(request.num_computed_tokens, self.block_size)
        if end > first:
            # In order of position: continuing this prefix needs the last blocks, so they are evicted last.
            self._give_back(table.block_ids[first:end], table.group)
            table.block_ids[first:end] = [NULL_BLOCK_ID] * (end - first)
            table.num_released = end

    def publish_last(self, request: Request) -> None:
        """Add what an ended or preempted request computed last to the prefix cache: a part of a block, and its state."""
        self.publish_tail(request)
        table = self.tables[request.request_id]
        # The state of a request with a step in flight is already that of later tokens.
        is_worth_it = request.num_computed_tokens >= self.states.min_gap and not request.num_inflight_tokens
        if table.state and self.prefix.is_shared and is_worth_it:
            state, table.state, table.source = table.state, (), ()
            self.states.put(request, table, request.num_computed_tokens, state, table.group, rests=table.rests)

    def publish_tail(self, request: Request) -> None:
        """Add the computed part of the last block to the prefix cache, so that others can copy it."""
        if not self.prefix.shares_parts:
            return
        table = self.tables[request.request_id]
        start = table.num_full * self.block_size
        if table.num_full < len(table.block_ids) and start < request.num_computed_tokens:
            content = pack(token_slice(request, start, request.num_computed_tokens))
            self.prefix.index.publish_tail(table.block_ids[table.num_full], table.parent(table.num_full), content)
            self.prefix.note_answer(request, table, table.num_full, table.num_full + 1)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Share the parent's blocks of positions [0, num_tokens) with a new request. Either gets a copy before it writes.

        Raises ValueError if the child is known, or the parent does not hold all these blocks.
        """
        parent = self.tables[parent_id]
        num_blocks = self.num_blocks_for(num_tokens)
        if child_id in self.tables or num_blocks > len(parent.block_ids) or parent.num_released:
            raise ValueError(f"{child_id!r} can't share {num_tokens} tokens of {parent_id!r}")
        shared = parent.block_ids[:num_blocks]
        for block_id in shared:
            self.pool.hold(block_id)
        num_full = num_tokens // self.block_size
        self.tables[child_id] = BlockTable(
            shared,
            root=parent.root,
            hashes=parent.hashes[:num_full],
            contents=parent.contents[:num_full],
            num_found=num_blocks,
            num_full=min(parent.num_full, num_full),
            group=parent.group,
            rests=parent.rests,
        )
        self._pin(self.tables[child_id], parent.adapter)
        self.num_slots[parent_id] = self.num_slots[child_id] = 0  # the next write of either must call `extend`

    def require_extend(self, request_id: str) -> None:
        """Require a call of `extend` before the request writes again."""
        self.num_slots[request_id] = 0

    def suspend(self, request_id: str) -> None:
        """Release the blocks of a preempted request. The hashes stay, to find cached blocks when it resumes."""
        table = self.tables.get(request_id)
        if table is None:
            return
        if table.leads:
            self.prefix.stop_leading(table)
        self.prefix.withdraw_promise(table)
        self._unpin(table)
        self._give_back_all(table)
        table.block_ids, table.num_found, table.num_full, table.num_released, table.marks = [], 0, 0, 0, set()
        self.num_slots.pop(request_id, None)

    def free(self, request_id: str) -> None:
        if (table := self._forget(request_id)) is not None:
            self._end(table)

    def fence(self, request_id: str, step_id: int) -> None:
        """Free a request's blocks, but only at `lift_fence(step_id)`, since that step in flight may still use them."""
        if (table := self._forget(request_id)) is not None:
            if self.swapping is not None and not self.prefix.is_shared:  # a later request with this id must not find them
                self.swapping.forget(table.hashes)
                self.prefix.index.forget(table.block_ids)
                table.hashes = []
            self._fences.setdefault(step_id, []).append((request_id, table))

    def lift_fence(self, step_id: int) -> None:
        for _, table in self._fences.pop(step_id, ()):
            self._end(table)

    def _forget(self, request_id: str) -> BlockTable | None:
        """Remove the request. Return its block table, whose blocks are still held, or None."""
        table = self.tables.pop(request_id, None)
        if table is None:
            return None
        if table.leads:
            self.prefix.stop_leading(table)
        self.prefix.withdraw_promise(table)
        self.num_slots.pop(request_id, None)
        if self.tier is not None:
            self.tier.end_wait(request_id)
        return table

    def _give_back_all(self, table: BlockTable) -> None:
        # Last block first: an early block is part of more prefixes than a late one, so it is evicted later.
        self._give_back_states(table)
        self._give_back(table.held[::-1], table.group, rests=table.rests)

    def _give_back_states(self, table: BlockTable) -> None:
        self.states.release(table.state_block_ids, table.group)
        table.state, table.source, table.saves = (), (), []

    def _give_back(self, block_ids: Sequence[int], group: Hashable, *, rests: bool = False) -> None:
        published = self.prefix.index.block_ids
        for block_id in block_ids:
            self.pool.release(block_id, keep=block_id in published, group=group, rests=rests)

    def _end(self, table: BlockTable) -> None:
        self._unpin(table)
        self._give_back_all(table)
        if self.swapping is not None and not self.prefix.is_shared:
            self.swapping.forget(table.hashes)

    def _pin(self, table: BlockTable, number: int, packed: PackedAdapter | None = None) -> None:
        if number != BASE:
            self.adapters.pin(number, packed)
            table.adapter = number

    def _unpin(self, table: BlockTable) -> None:
        """Unpin the table's adapter before freeing its blocks: blocks freed first are evicted first, and adapters are cheap to
        copy."""
        if table.adapter != BASE:
            self.adapters.unpin(table.adapter, table.group)
            table.adapter = BASE

    def take_block_copies(self) -> list[tuple[int, int]]:
        """Return (source, destination) pairs of blocks that the executor must copy before the next step, even if no step
        follows now. Then call `copies_made`."""
        copies, self.pending_copies = self.pending_copies, []
        self._is_copying = bool(copies)
        return copies

    def copies_made(self) -> None:
        """Note that the executor got the copies. Their sources may change from now on."""
        self._is_copying = False

    def _take_beside_a_step(self, count: int) -> list[int]:
        """Take blocks without spilling their contents. Take none while a copy may still read one of them."""
        return [] if self.pending_copies or self._is_copying else self._take(count, spills=False)

    @property
    def fenced(self) -> list[tuple[str, BlockTable]]:
        """(request id, block table) of ended requests that a step in flight may use. An id may appear twice."""
        return [entry for entries in list(self._fences.values()) for entry in entries]

    def _table(self, request: Request) -> BlockTable:
        table = self.tables.get(request.request_id)
        if table is None:
            window = self._window if request.sampling.beams is None else 0
            table = self.tables[request.request_id] = BlockTable(window=window)
            if self._hashes_blocks:
                is_shared, adapter = self.prefix.is_shared, request.adapter
                table.root = root_hash(request.cache_salt, adapter) if is_shared else private_root_hash(request.request_id)
        return table

    def _take(self, count: int, *, spills: bool = True) -> list[int]:
        """Allocate blocks. `spills`: the tier gets the lost contents before the next step. False if the blocks are overwritten
        before then, so their contents could not be spilled."""
        pool, tier = self.pool, self.tier if spills else None
        # Blocks without content are taken first, then those of background requests. Neither is worth storing in the tier.
        num_lost = 0 if tier is None else pool.num_available - pool.num_cached + pool.group_size(BACKGROUND)
        taken = pool.allocate(count)
        if tier is not None:
            tier.spill(taken[num_lost:], self.prefix.index)
        self.prefix.evict(taken)
        if self.num_state_blocks:
            self.states.evict(taken)
        if self.adapters.residents:
            self.adapters.evict(taken)
        return taken

    def _take_with_copy(self, count: int, source: int, rests: bool) -> list[int]:
        """Take blocks, the first as a copy of block `source`, which stays cached if possible."""
        is_held = self.pool.ref_count(source) > 0 or self.pool.num_available > count
        if is_held:
            self.pool.hold(source, rests=rests)
        fresh = self._take(count)
        if fresh[0] != source:
            self.pending_copies.append((source, fresh[0]))
        if is_held:
            self.pool.release(source, keep=True, group=BACKGROUND)
        return fresh

    def _shared_indices(self, table: BlockTable, context_len: int) -> list[int]:
        first = context_len // self.block_size
        return [idx for idx in range(first, len(table.block_ids)) if self.pool.ref_count(table.block_ids[idx]) > 1]

    def _replace(self, table: BlockTable, indices: Sequence[int]) -> None:
        for idx, fresh in zip(indices, self._take(len(indices)), strict=True):
            self.pending_copies.append((table.block_ids[idx], fresh))
            self.pool.release(table.block_ids[idx], keep=False, group=BACKGROUND)
            table.block_ids[idx] = fresh
