"""The block table: owns what is remembered of one request, its blocks and the hashes of its prefix. Called by `KVManager` and
`Coming`; never gives out a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from penstock.kv.prefix_index import extend_chain
from penstock.types.request import Request


@dataclass(slots=True)
class BlockTable:
    """Of one request."""

    block_ids: list[int] = field(default_factory=list)
    """In order of position; empty while the request waits."""
    root: bytes = b""
    """Parent of the first block; empty before the first look-up."""
    hashes: list[bytes] = field(default_factory=list)
    """Chain of the full blocks hashed so far, each of them once, also across preemptions."""
    contents: list[bytes] = field(default_factory=list)
    """Packed tokens of the same blocks."""
    num_full: int = 0
    """Leading blocks that are full and committed: never written again, and published if there is a cache."""
    group: Hashable = None
    """On whose account its blocks are cached once it lets go of them (`eviction.py`)."""
    leads: bytes = b""
    """Key of the block that it computes next, if others may wait for it."""

    def parent(self, idx: int) -> bytes:
        """Hash of the prefix before block `idx`."""
        return self.hashes[idx - 1] if idx else self.root

    def hash_blocks(self, request: Request, num_blocks: int, block_size: int) -> None:
        """Extend the chain of hashes to `num_blocks` full blocks."""
        num_hashed = len(self.hashes)
        if num_hashed >= num_blocks:
            return
        token_ids = token_slice(request, num_hashed * block_size, num_blocks * block_size)
        hashes, contents = extend_chain(self.parent(num_hashed), token_ids, block_size)
        self.hashes += hashes
        self.contents += contents


def token_at(request: Request, position: int) -> int:
    """Of prompt and output."""
    num_prompt = request.num_prompt_tokens
    return request.prompt_token_ids[position] if position < num_prompt else request.output_token_ids[position - num_prompt]


def token_slice(request: Request, start: int, stop: int) -> Sequence[int]:
    """Tokens at positions [start, stop) of prompt and output."""
    num_prompt = request.num_prompt_tokens
    if stop <= num_prompt:
        return request.prompt_token_ids[start:stop]
    head = request.prompt_token_ids[start:num_prompt]
    return [*head, *request.output_token_ids[max(0, start - num_prompt) : stop - num_prompt]]
