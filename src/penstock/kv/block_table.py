"""The block table: one request's blocks and the hashes of their content.

hash(i) = H(hash(i - 1), tokens of block i) and hash(-1) = H(salt, adapter). So equal hashes mean equal prefixes, and
requests of different salts or adapters never share a block. H is BLAKE2b with a digest of 128 bits (RFC 7693).
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import byteorder

from penstock.types.adapter import BASE, AdapterRef
from penstock.types.plan import num_unread_blocks
from penstock.types.request import Request

HASH_BYTES = 16
TOKEN_BYTES = 4


def root_hash(salt: bytes, adapter: AdapterRef | None = None) -> bytes:
    """Return the hash before a request's first block, from its salt and adapter."""
    assert adapter is None or adapter.fingerprint, "an adapter is read before anything is computed with it"
    key = b"" if adapter is None else adapter.fingerprint
    return blake2b(salt, digest_size=HASH_BYTES, key=key, person=b"penstock-kv").digest()


def private_root_hash(request_id: str) -> bytes:
    return blake2b(request_id.encode(), digest_size=HASH_BYTES, person=b"penstock-own").digest()


def pack(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def extend_chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> tuple[list[bytes], list[bytes]]:
    """Return (hashes, packed tokens) of the full blocks of `token_ids`, which follow the block with hash `parent`."""
    data, block_bytes = pack(token_ids), block_size * TOKEN_BYTES
    contents = [data[start : start + block_bytes] for start in range(0, len(data) - block_bytes + 1, block_bytes)]
    hashes: list[bytes] = []
    for content in contents:
        parent = blake2b(parent + content, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes, contents


def child_key(parent: bytes, token_id: int) -> bytes:
    return parent + token_id.to_bytes(TOKEN_BYTES, byteorder)


@dataclass(slots=True)
class BlockTable:
    block_ids: list[int] = field(default_factory=list)
    """In order of position; empty while the request waits. The first `num_released` are null blocks."""
    num_released: int = 0
    """Blocks that the request gave back, or never held, because no layer reads them."""
    window: int = 0
    """`Capacity.window`, or 0 for a beam, which keeps all blocks so that others can fork from earlier positions."""
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of full blocks. Each block is hashed once, even across preemptions."""
    contents: list[bytes] = field(default_factory=list)
    num_found: int = 0
    """Leading blocks that another request allocated."""
    num_full: int = 0
    """Leading blocks that are full and committed: never written again."""
    group: Hashable = None
    rests: bool = False
    """The request is part of a conversation: its cached blocks rest (`block_pool.py`)."""
    adapter: int = BASE
    state: tuple[int, ...] = ()
    """Blocks with the request's recurrent state after its computed tokens."""
    source: tuple[int, ...] = ()
    """Until the request's first step is committed: where its state is read. Then as `state`."""
    saves: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(position, blocks) of states that the step in flight saves."""
    marks: set[int] = field(default_factory=set)
    """Positions where others may continue, so that the state there is worth saving."""
    num_known: int = 0
    """Tokens whose keys and values the last lookup found, with or without a state to continue from."""
    saved_at: int = 0
    """The last position with a saved state."""
    promise: bytes = b""
    """Key of the state at `num_known` that the request will save, if others may wait for it; else empty."""
    leads: bytes = b""
    """Key of the block that the request computes next, if others may wait for it; else empty."""

    @property
    def held(self) -> list[int]:
        return self.block_ids[self.num_released :]

    @property
    def state_block_ids(self) -> list[int]:
        """All blocks that the request holds for recurrent states."""
        source = () if self.source == self.state else self.source
        return [*self.state, *source, *(block_id for _, block_ids in self.saves for block_id in block_ids)]

    def num_unread(self, num_computed_tokens: int, block_size: int) -> int:
        """Return how many first blocks no layer reads any more (sliding window) after `num_computed_tokens`."""
        return num_unread_blocks(num_computed_tokens, block_size, self.window)

    def parent(self, idx: int) -> bytes:
        return self.hashes[idx - 1] if idx else self.root

    def hash_blocks(self, request: Request, num_blocks: int, block_size: int) -> None:
        num_hashed = len(self.hashes)
        if num_hashed >= num_blocks:
            return
        token_ids = token_slice(request, num_hashed * block_size, num_blocks * block_size)
        hashes, contents = extend_chain(self.parent(num_hashed), token_ids, block_size)
        self.hashes += hashes
        self.contents += contents


def token_at(request: Request, position: int) -> int:
    num_prompt = request.num_prompt_tokens
    return request.prompt_token_ids[position] if position < num_prompt else request.output_token_ids[position - num_prompt]


def token_slice(request: Request, start: int, stop: int) -> Sequence[int]:
    """Return the request's tokens at positions [start, stop), counted through prompt and output."""
    num_prompt = request.num_prompt_tokens
    if stop <= num_prompt:
        return request.prompt_token_ids[start:stop]
    head = request.prompt_token_ids[start:num_prompt]
    return [*head, *request.output_token_ids[max(0, start - num_prompt) : stop - num_prompt]]
