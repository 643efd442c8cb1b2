"""Saved recurrent states in the KV pool. Part of `KVManager`.

A state takes as much memory as many tokens, so few are saved. A prompt can continue only from a saved state. A state's key is
the hash of the whole blocks before it, plus the tokens after them. If one of its blocks is reused, the whole state is lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, KeysView, Sequence

from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import TOKEN_BYTES, BlockTable, pack, token_slice
from penstock.types.request import Request

MIN_SAVED_BLOCKS = 4
"""Least distance between two saved states, in blocks: a state is not worth its memory for fewer tokens."""


class SavedStates:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self.min_gap = MIN_SAVED_BLOCKS * block_size
        """Tokens."""
        self._saved: dict[bytes, dict[bytes, tuple[int, ...]]] = {}
        """Hash of the last whole block -> packed tokens after it -> the state's blocks."""
        self._keys: dict[int, tuple[bytes, bytes]] = {}
        """Block id -> where its state is found."""

    def __len__(self) -> int:
        return sum(map(len, self._saved.values()))

    @property
    def block_ids(self) -> KeysView[int]:
        """Blocks of saved states."""
        return self._keys.keys()

    def find(self, request: Request, table: BlockTable, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Return (position, blocks) of the last state among a request's first `num_tokens` tokens, or (0, ()). The table must
        have the hashes of the whole blocks up to there."""
        size, saved, hashes = self._block_size, self._saved, table.hashes
        for idx in range(num_tokens // size, -1, -1) if saved else ():
            parent = hashes[idx - 1] if idx else table.root
            if parent in saved:
                tails = saved[parent]
                content = pack(token_slice(request, idx * size, min((idx + 1) * size, num_tokens)))
                if found := [tail for tail in tails if content.startswith(tail)]:
                    longest = max(found, key=len)
                    return idx * size + len(longest) // TOKEN_BYTES, tails[longest]
        return 0, ()

    def put(
        self, request: Request, table: BlockTable, position: int, block_ids: tuple[int, ...], group: Hashable, *, rests: bool
    ) -> None:
        """Release blocks with the state after a request's first `position` tokens, so that others find it until the blocks are
        reused. A state already saved there counts as just used."""
        num_blocks = position // self._block_size
        table.hash_blocks(request, num_blocks, self._block_size)
        parent, tail = table.parent(num_blocks), pack(token_slice(request, num_blocks * self._block_size, position))
        tails = self._saved.setdefault(parent, {})
        known = tails.setdefault(tail, block_ids)
        if known is block_ids:
            self._keys.update(dict.fromkeys(block_ids, (parent, tail)))
        else:
            for block_id in known:
                self._pool.hold(block_id)
            self.release(block_ids, group)
        self.release(known, group, rests=rests)

    def forget(self, block_ids: tuple[int, ...]) -> None:
        """Remove a state from the index. Its blocks are not released."""
        parent, tail = self._keys[block_ids[0]]
        del self._saved[parent][tail]
        if not self._saved[parent]:
            del self._saved[parent]
        for block_id in block_ids:
            del self._keys[block_id]

    def release(self, block_ids: Sequence[int], group: Hashable, *, rests: bool = False) -> None:
        for block_id in block_ids:
            self._pool.release(block_id, keep=block_id in self._keys, group=group, rests=rests)

    def evict(self, block_ids: Iterable[int]) -> None:
        """Forget states whose blocks were allocated for something else."""
        taken = set(block_ids)
        for parent, tail in dict.fromkeys(self._keys[block_id] for block_id in sorted(taken & self._keys.keys())):
            lost = self._saved[parent][tail]
            self.forget(lost)
            for block_id in lost:
                if block_id not in taken:
                    self._pool.hold(block_id)
                    self._pool.release(block_id, keep=False)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        owned = [block_id for tails in self._saved.values() for block_ids in tails.values() for block_id in block_ids]
        assert len(set(owned)) == len(owned), "two saved states lie in one block"
        assert set(owned) == self._keys.keys(), "a block is said to hold a saved state and does not"
        for parent, tails in self._saved.items():
            assert tails, "a prefix has no saved state and is listed"
            for tail, block_ids in tails.items():
                assert all(self._keys[block_id] == (parent, tail) for block_id in block_ids), "a state is in the wrong place"
                counts = {self._pool.ref_count(block_id) for block_id in block_ids}
                assert len(counts) == 1, "a part of a saved state is held"
                assert counts != {0} or all(map(self._pool.is_kept, block_ids)), "a part of a saved state may be lost"
