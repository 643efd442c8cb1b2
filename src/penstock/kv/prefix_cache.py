"""The prefix cache: which block has the KV of which prefix, which request computes a prefix now, and why a lookup ended.

A block is found by the hash of its prefix. Since a hit may end inside a block, each block is also listed under its parent's
hash and its own first token. A request may wait for a block that a running request is computing ("coming").
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.kv.block_pool import NULL_BLOCK_ID, BlockPool
from penstock.kv.block_table import HASH_BYTES, TOKEN_BYTES, BlockTable, child_key, pack, token_at, token_slice
from penstock.kv.changes import ChangeLog
from penstock.kv.states import SavedStates
from penstock.types.request import Request
from penstock.types.stats import PrefixEnd, PrefixStop

START = 2 * HASH_BYTES
KEY_END = START + TOKEN_BYTES
TAIL = bytes(HASH_BYTES)
"""Takes the place of the hash for a partly filled block."""
MAX_CHILDREN = 8
"""Blocks compared with a prompt: the newest with the same parent and first token."""
MAX_REMEMBERED = 1024
"""Most first blocks and most conversations remembered. The limit for evicted blocks is eight times as high."""
MARK_TOKENS = 2
"""Tokens at the end of a prompt that the next turn may lack: a template may open the reasoning (`<think>` and a newline)."""
MAX_MARKS = 4
"""Most positions, besides regular intervals, at which a prompt saves its state. The limit bounds the memory that requests which
wait for such states can demand."""
MIN_AWAITED_TOKENS = 8
"""Least tokens of a prompt's partial block that are worth waiting for."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class PrefixHit:
    block_ids: tuple[int, ...]
    """Whole blocks to share; null blocks before the window."""
    num_tokens: int
    """Positions [0, num_tokens) need not be computed."""
    num_free_blocks: int
    """Blocks of the hit in the free list: holding them makes that many unavailable."""
    tail_block_id: int = NULL_BLOCK_ID
    """The block to copy if the hit ends inside one."""
    state: tuple[int, ...] = ()
    """Blocks of the recurrent state at the hit's end, if the model keeps it apart from KV. Not in `num_free_blocks`."""

    @property
    def held(self) -> tuple[int, ...]:
        return self.block_ids[self.block_ids.count(NULL_BLOCK_ID) :]


NO_HIT = PrefixHit(block_ids=(), num_tokens=0, num_free_blocks=0)


@dataclass(frozen=True, slots=True)
class Awaited:
    key: bytes
    leader: Request


class PrefixCache:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        tables: Mapping[str, BlockTable],
        *,
        is_shared: bool,
        shares_parts: bool = True,
        has_state: bool = False,
        states: SavedStates | None = None,
    ) -> None:
        """`is_shared`: requests find each other's prefixes. Otherwise each finds only its own, loaded back from a tier.

        Without `shares_parts`, or with `has_state` (see `Capacity`), hits end only between blocks. With `states`, they end only
        where a state is saved.
        """
        self.index = PrefixIndex()
        self.leaders: dict[bytes, Request] = {}
        self.promises: dict[bytes, Request] = {}
        """Key of a state -> the running request that will save it."""
        self.in_flight: Collection[str] = ()
        """While a step is planned ahead: ids of requests with several tokens in the step in flight."""
        self.is_shared = is_shared
        self.shares_parts = shares_parts and is_shared and not has_state
        self._pool, self._block_size, self._tables, self._states = pool, block_size, tables, states
        self._evicted_ns: Recent[bytes, int] = Recent(8 * MAX_REMEMBERED)
        self._roots: Recent[tuple[str, bytes], bytes] = Recent(MAX_REMEMBERED)
        """(tenant, tokens of the first block) -> root hash. Per tenant, so that no tenant learns of another's prompts."""
        self._answers: dict[int, int] = {}
        """Block id -> position where its request's answer began, for blocks from the prompt's end on."""
        self._longest: Recent[bytes, int] = Recent(MAX_REMEMBERED)
        """Named conversation -> tokens of its longest prompt."""

    # Hits.

    def lookup(self, request: Request, table: BlockTable) -> PrefixHit:
        """Return the longest cached prefix, at least one token shorter than the request. Adds missing hashes to the table."""
        block_size = self._block_size
        num_blocks = (request.num_tokens - 1) // block_size
        table.hash_blocks(request, num_blocks, block_size)
        found = self.find(table, num_blocks)
        num_found = len(found)
        tail_id, num_tail = self._find_tail(request, table, num_found) if self.shares_parts else (NULL_BLOCK_ID, 0)
        num_tokens = table.num_known = num_found * block_size + num_tail
        state: tuple[int, ...] = ()
        if self._states is not None:
            num_tokens, state = self._states.find(request, table, num_tokens)
            num_whole = num_tokens // block_size
            if num_tokens % block_size == 0:
                tail_id = NULL_BLOCK_ID
            elif num_whole < num_found:
                tail_id = found[num_whole]
            del found[num_whole:]
        if not num_tokens:
            return NO_HIT
        num_unread = table.num_unread(num_tokens, block_size)
        found[:num_unread] = [NULL_BLOCK_ID] * num_unread
        num_free = sum(self._pool.is_kept(block_id) for block_id in found)
        return PrefixHit(tuple(found), num_tokens, num_free, tail_id, state)

    def find(self, table: BlockTable, num_blocks: int) -> list[int]:
        """Return the blocks of the longest cached prefix of at most `num_blocks` blocks. Blocks before the sliding window are
        null blocks. O(num_blocks)."""
        hashes = table.hashes[:num_blocks]
        if not table.window:
            return self.index.lookup(hashes)
        end = idx = len(hashes)
        found: list[int] = []  # blocks [idx, end), last first
        while idx > (first := table.num_unread(end * self._block_size, self._block_size)):
            idx -= 1
            block_id = self.index.block_of(hashes[idx])
            if block_id is None:
                end, found = idx, []
            else:
                found.append(block_id)
        return [NULL_BLOCK_ID] * first + found[::-1]

    def _find_tail(self, request: Request, table: BlockTable, num_found: int) -> tuple[int, int]:
        """Return (block, number of tokens) to copy after `num_found` whole blocks, or (0, 0)."""
        start = num_found * self._block_size
        stop = min(start + self._block_size, request.num_tokens - 1)
        if start < stop:
            parent = table.parent(num_found)
            if self.index.has_child(child_key(parent, token_at(request, start))):
                return self.index.lookup_child(parent, pack(token_slice(request, start, stop)))
        return NULL_BLOCK_ID, 0

    # Turns of conversations.

    def note_answer(self, request: Request, table: BlockTable, first: int, end: int) -> None:
        """Record where the request's answer begins, for those of its blocks [first, end) that reach the answer."""
        begins = request.num_prompt_tokens
        first = max(first, (begins - MARK_TOKENS - 1) // self._block_size)
        for block_id in table.block_ids[first:end]:
            self._answers[block_id] = begins

    def is_turn(self, request: Request, hit: PrefixHit) -> bool:
        """Return whether a request is the latest turn of a conversation, so that its blocks should be kept longer.

        There are two such cases. The request names its conversation, and no earlier prompt of the conversation was longer. Or
        the cached part of its prompt reaches the answer to an earlier, shorter prompt.
        """
        num_prompt, name = request.num_prompt_tokens, request.conversation
        if name and num_prompt >= (self._longest.get(name) or 0):
            self._longest.put(name, num_prompt)
            return True
        answer = self._answer_before(*self._end_of(request, hit))
        return answer is not None and answer < num_prompt

    def _end_of(self, request: Request, hit: PrefixHit) -> tuple[int, int]:
        """Return (block, position) where the request's tokens first differ from cached ones, even inside a block."""
        table = self._tables[request.request_id]
        if self._states is None and (self.shares_parts or not self.is_shared):
            return hit.tail_block_id or (hit.block_ids[-1] if hit.block_ids else NULL_BLOCK_ID), hit.num_tokens
        num_blocks = table.num_known // self._block_size
        tail_id, num_tail = self._find_tail(request, table, num_blocks)
        last_id = self.index.block_of(table.hashes[num_blocks - 1]) if num_blocks else None
        return tail_id or last_id or NULL_BLOCK_ID, num_blocks * self._block_size + num_tail

    def _answer_before(self, block_id: int, position: int) -> int | None:
        """Return where the answer in this block begins, if that is before `position`, else None."""
        begins = self._answers.get(block_id)
        return begins if begins is not None and position >= begins - MARK_TOKENS else None

    def num_common_blocks(self, one: Request, other: Request) -> int:
        """Return how many whole blocks at the beginning of two requests are equal. O(log blocks)."""
        own, others = self._tables[one.request_id].hashes, self._tables[other.request_id].hashes
        # Hashes are chained: if two are equal, so are all before them.
        return bisect_left(range(min(len(own), len(others))), True, key=lambda idx: own[idx] != others[idx])

    def _num_common_tokens(self, one: Request, other: Request) -> int:
        """Return how many tokens at the beginning of two requests are equal. At least one of each is not counted."""
        for request in (one, other):
            self._tables[request.request_id].hash_blocks(request, request.num_tokens // self._block_size, self._block_size)
        end = min(one.num_tokens, other.num_tokens) - 1
        start = min(self.num_common_blocks(one, other) * self._block_size, end)
        return next((idx for idx in range(start, end) if token_at(one, idx) != token_at(other, idx)), end)

    # Why a hit ends.

    def why_stopped(self, request: Request, hit: PrefixHit) -> PrefixStop:
        """Return why a lookup did not find a longer prefix. Call once per request, before `allocate`."""
        position = hit.num_tokens
        if not self.is_shared:
            return PrefixStop(PrefixEnd.OFF, position)
        if request.lacks_prompt_logprobs:
            return PrefixStop(PrefixEnd.SCORED, position)
        table = self._tables[request.request_id]
        has_other_root = self._note_root(request)
        if self._states is not None and table.num_known - position >= self._states.min_gap:
            return PrefixStop(PrefixEnd.STATE, position)
        position = table.num_known
        longest = request.num_tokens - 1
        if position == (longest if self.shares_parts else longest - longest % self._block_size):
            return PrefixStop(PrefixEnd.WHOLE, position)
        idx = position // self._block_size
        evicted_ns = self._evicted_ns.get(table.hashes[idx]) if idx < len(table.hashes) else None
        if evicted_ns is not None:
            return PrefixStop(PrefixEnd.EVICTED, position, evicted_ns)
        block_id, position = self._end_of(request, hit)
        if position > idx * self._block_size:
            differs = self.index.has_more(block_id, position - idx * self._block_size)
        else:
            differs = position > 0 and self.index.has_children(table.parent(idx))
        if differs:
            if self._answer_before(block_id, position) is not None:
                return PrefixStop(PrefixEnd.ANSWER, position)
            num_same = self._num_same_after(request, block_id, position) if position > idx * self._block_size else 0
            return PrefixStop(PrefixEnd.DIFFERS, position, num_same_after=num_same)
        return PrefixStop(PrefixEnd.SALT if has_other_root and position == 0 else PrefixEnd.UNSEEN, position)

    def _num_same_after(self, request: Request, block_id: int, position: int) -> int:
        """Return how many tokens after `position` are equal in a cached prompt, position by position, in this block and those
        that follow it. There are many if only a date at the beginning of a prompt differs."""
        size = self._block_size
        start = position - position % size + size
        num_same = self.index.num_equal(block_id, pack(token_slice(request, start - size, start)), position % size)
        parent = self.index.hash_of(block_id)
        while parent is not None and start < request.num_tokens:
            content = pack(token_slice(request, start, min(start + size, request.num_tokens)))
            block_id, num_equal = self.index.lookup_child(parent, content)
            num_same += num_equal
            if num_equal < size:
                break
            parent, start = self.index.hash_of(block_id), start + size
        return num_same

    def _note_root(self, request: Request) -> bool:
        """Record the request's first block. Return whether its tenant last sent these tokens with another salt or adapter."""
        if request.num_prompt_tokens < self._block_size:
            return False
        # As bytes: a sixth of the memory of a tuple of numbers.
        beginning = (request.tenant, pack(request.prompt_token_ids[: self._block_size]))
        root = self._tables[request.request_id].root
        known = self._roots.get(beginning)
        self._roots.put(beginning, root)
        return known is not None and known != root

    def evict(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._answers.pop(block_id, None)
        for block_hash in self.index.forget(block_ids):
            self._evicted_ns.put(block_hash, self._pool.now_ns)

    # Blocks that are coming.

    def find_coming(self, request: Request, hit: PrefixHit) -> Awaited | None:
        """Return the next block that `request` needs, if a running request computes it now or in its next step.

        The block must be whole, or hold the rest of the prompt if hits may end inside a block.
        """
        if not (self.leaders or self.promises) or request.lacks_prompt_logprobs:
            return None
        table = self._tables[request.request_id]
        if self.promises and hit.num_tokens < table.num_known:
            key = self._key_of_known(table, request)
            if key in self.promises:
                return Awaited(key, self.promises[key])
        num_blocks = table.num_known // self._block_size
        start = num_blocks * self._block_size
        stop = min(start + self._block_size, request.num_tokens - 1)
        if start == stop:
            return None
        key = child_key(table.parent(num_blocks), token_at(request, start))
        leader = self.leaders.get(key)
        if leader is None or leader.num_tokens - leader.num_pending_samples < stop:
            return None
        if leader.num_behind < 2 and leader.request_id not in self.in_flight:
            return None
        is_whole = stop - start == self._block_size
        takes_parts = self.shares_parts and self._states is None
        if not is_whole and (not takes_parts or stop - hit.num_tokens < MIN_AWAITED_TOKENS):
            return None
        if not all(token_at(leader, idx) == token_at(request, idx) for idx in range(start, stop)):
            return None
        return Awaited(key, leader) if self._states is None or self._mark_for_save(leader, request) else None

    def is_coming(self, awaited: Awaited) -> bool:
        return awaited.leader in (self.leaders.get(awaited.key), self.promises.get(awaited.key))

    def _mark_for_save(self, leader: Request, request: Request) -> bool:
        """Have the state saved where the leader's common prefix with a request ends. Return False if that is not worth it."""
        assert self._states is not None, "asked for a model with states"
        table, position = self._tables[leader.request_id], self._num_common_tokens(request, leader)
        if position - table.saved_at < self._states.min_gap or (len(table.marks) >= MAX_MARKS and position not in table.marks):
            return False
        table.marks.add(position)
        return True

    def promise(self, table: BlockTable, request: Request) -> None:
        """Let others wait for the state that a request will save after its known tokens."""
        if self.is_shared:
            key = self._key_of_known(table, request)
            first = self.promises.get(key)
            if first is not None and _takes_over(request, first):
                self.withdraw_promise(self._tables[first.request_id])
            if self.promises.setdefault(key, request) is request:
                table.promise = key

    def withdraw_promise(self, table: BlockTable) -> None:
        if table.promise:
            del self.promises[table.promise]
            table.promise = b""

    def _key_of_known(self, table: BlockTable, request: Request) -> bytes:
        start = table.num_known // self._block_size
        return table.parent(start) + pack(token_slice(request, start * self._block_size, table.num_known))

    def lead(self, table: BlockTable, request: Request) -> None:
        """Record the block that a running prefill computes next, for others to wait for. The first request recorded stays,
        unless it is a background request and the new one is not."""
        if not self.is_shared:
            return
        key, start = b"", table.num_full * self._block_size
        if request.num_behind > 1 and start < request.num_tokens:
            key = child_key(table.parent(table.num_full), token_at(request, start))
        if key == table.leads:
            return
        if table.leads:
            self.stop_leading(table)
        first = self.leaders.get(key)
        if first is not None and _takes_over(request, first):
            self.stop_leading(self._tables[first.request_id])
        if key and self.leaders.setdefault(key, request) is request:
            table.leads = key

    def stop_leading(self, table: BlockTable) -> None:
        del self.leaders[table.leads]
        table.leads = b""


def _takes_over(request: Request, first: Request) -> bool:
    return first.background and not request.background


class PrefixIndex:
    """Finds blocks, held or free, by hash or by parent and content. One block per hash."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}
        """Block id -> hash or `TAIL`, then parent and packed tokens if known. One string is cheapest for the garbage
        collector."""
        self._children: dict[bytes, int | list[int]] = {}
        """Child key -> the block, or a list with the newest last."""
        self._num_children: dict[bytes, int] = {}
        self.log: ChangeLog | None = None
        """Records which hashes are added and removed. None: nobody reads it."""

    def __len__(self) -> int:
        return len(self._block_ids)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_ids

    def hash_of(self, block_id: int) -> bytes | None:
        content = self._contents.get(block_id)
        return None if content is None or content.startswith(TAIL) else content[:HASH_BYTES]

    def block_of(self, block_hash: bytes) -> int | None:
        return self._block_ids.get(block_hash)

    def content_of(self, block_hash: bytes) -> tuple[bytes, bytes] | None:
        """Return (parent, packed tokens) of the block with a hash, or None if it is unknown or known only by hash."""
        content = self._contents.get(self._block_ids.get(block_hash, NULL_BLOCK_ID), b"")
        return (content[HASH_BYTES:START], content[START:]) if len(content) > START else None

    @property
    def block_ids(self) -> KeysView[int]:
        return self._contents.keys()

    def items(self) -> Iterable[tuple[bytes, int]]:
        return self._block_ids.items()

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_ids.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def has_child(self, key: bytes) -> bool:
        return key in self._children

    def has_children(self, parent: bytes) -> bool:
        return parent in self._num_children

    def has_more(self, block_id: int, num_tokens: int) -> bool:
        return len(self._contents[block_id]) > START + num_tokens * TOKEN_BYTES

    def num_equal(self, block_id: int, content: bytes, first: int) -> int:
        """Return at how many positions from `first` on the block has the same token as `content`."""
        own, other = self._contents[block_id][START:], content
        places = range(first * TOKEN_BYTES, min(len(own), len(other)), TOKEN_BYTES)
        return sum(own[at : at + TOKEN_BYTES] == other[at : at + TOKEN_BYTES] for at in places)

    def lookup_child(self, parent: bytes, content: bytes) -> tuple[int, int]:
        """Return (block, number of equal tokens) of the block after `parent` that begins most like `content`, or (0, 0)."""
        best_id = best_tokens = 0
        children = self._children.get(parent + content[:TOKEN_BYTES], ())
        for block_id in (children,) if isinstance(children, int) else children:
            num_tokens = _num_common(self._contents[block_id][START:], content)
            if num_tokens >= best_tokens:
                best_id, best_tokens = block_id, num_tokens
        return best_id, best_tokens

    def publish(self, block_ids: Iterable[int], parent: bytes, hashes: Iterable[bytes], contents: Iterable[bytes]) -> None:
        """Add full blocks, which follow the block with hash `parent`. A block with a known hash is skipped.

        Raises ValueError if a block was added under another hash.
        """
        for block_id, block_hash, content in zip(block_ids, hashes, contents, strict=True):
            known = self._contents.get(block_id)
            if known is not None:
                if not known.startswith((TAIL, block_hash)):
                    raise ValueError(f"block {block_id} is published already, with other content")
                self._drop(block_id)  # it was a tail
            if self._block_ids.setdefault(block_hash, block_id) == block_id:
                self._put(block_id, block_hash, parent, content)
                if self.log is not None:
                    self.log.note(block_hash, True)
            parent = block_hash

    def publish_named(self, block_id: int, block_hash: bytes) -> None:
        """Add a full block, to be found by its hash only."""
        self._block_ids[block_hash] = block_id
        self._contents[block_id] = block_hash
        if self.log is not None:
            self.log.note(block_hash, True)

    def publish_tail(self, block_id: int, parent: bytes, content: bytes) -> None:
        """Add a partly filled block, unless another begins with the same tokens."""
        if self.lookup_child(parent, content)[1] * TOKEN_BYTES == len(content):
            return
        if block_id in self._contents:
            self._drop(block_id)  # it was shorter
        self._put(block_id, TAIL, parent, content)

    def forget(self, block_ids: Iterable[int]) -> list[bytes]:
        """Remove blocks whose content is about to be lost. Return their hashes."""
        forgotten: list[bytes] = []
        for block_id in block_ids:
            if block_id in self._contents:
                block_hash = self._drop(block_id)
                if block_hash is not None:
                    forgotten.append(block_hash)
        return forgotten

    def _put(self, block_id: int, block_hash: bytes, parent: bytes, content: bytes) -> None:
        self._contents[block_id] = block_hash + parent + content
        num_children = self._num_children
        num_children[parent] = num_children.get(parent, 0) + 1
        key = parent + content[:TOKEN_BYTES]
        children = self._children.setdefault(key, block_id)
        if children == block_id:
            return
        if isinstance(children, int):
            self._children[key] = [children, block_id]
            return
        children.append(block_id)
        if len(children) > MAX_CHILDREN:
            del children[0]

    def _drop(self, block_id: int) -> bytes | None:
        content = self._contents.pop(block_id)
        if len(content) > START:
            self._forget_child(block_id, content[HASH_BYTES:START], content[HASH_BYTES:KEY_END])
        if content.startswith(TAIL):
            return None
        block_hash = content[:HASH_BYTES]
        del self._block_ids[block_hash]
        if self.log is not None:
            self.log.note(block_hash, False)
        return block_hash

    def _forget_child(self, block_id: int, parent: bytes, key: bytes) -> None:
        num_left = self._num_children.pop(parent) - 1
        if num_left:
            self._num_children[parent] = num_left
        children = self._children.get(key)
        if children == block_id:
            del self._children[key]
        elif isinstance(children, list) and block_id in children:
            children.remove(block_id)
            if len(children) == 1:
                self._children[key] = children[0]

    def check(self) -> None:
        contents = self._contents
        for block_hash, block_id in self._block_ids.items():
            assert len(block_hash) == HASH_BYTES, f"block {block_id} is known by a part of a hash"
            assert contents.get(block_id, b"").startswith(block_hash), f"block {block_id} is known under two hashes"
        num_full = sum([not content.startswith(TAIL) for content in contents.values()])
        assert num_full == len(self._block_ids), "a full block is not found by its hash"
        families = Counter([content[HASH_BYTES:START] for content in contents.values() if len(content) > START])
        assert families == self._num_children, "a prefix has other children than are counted"
        for key, found in self._children.items():
            children = [found] if isinstance(found, int) else found
            assert isinstance(found, int) or 1 < len(set(found)) == len(found) <= MAX_CHILDREN, "not what children may be"
            assert len(key) == HASH_BYTES + TOKEN_BYTES, "a child's key is not a parent's hash and a token"
            for block_id in children:
                assert contents.get(block_id, b"").startswith(key, HASH_BYTES), "a child is in the wrong place"


def _num_common(one: bytes, other: bytes) -> int:
    num_bytes = min(len(one), len(other))
    difference = int.from_bytes(one[:num_bytes], "little") ^ int.from_bytes(other[:num_bytes], "little")
    if not difference:
        return num_bytes // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


class Recent(OrderedDict[_Key, _Value]):
    """A map with only the last `num_kept` keys written with `put`."""

    def __init__(self, num_kept: int) -> None:
        super().__init__()
        self._num_kept = num_kept

    def put(self, key: _Key, value: _Value) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._num_kept:
            self.popitem(last=False)
