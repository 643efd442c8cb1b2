"""The prefix index: owns the map from the hash of a prefix to the block with its KV. Called by `KVManager` alone; never counts
references.

A block is named by the chain of everything before it: hash(i) = H(hash(i - 1), tokens of block i), and
hash(-1) = H(salt). Equal hashes thus mean equal prefixes from position 0, and requests of different
salts never meet. H is BLAKE2b with a digest of 128 bits (RFC 7693).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(salt: bytes) -> bytes:
    """The parent of a request's first block."""
    return blake2b(salt, digest_size=HASH_BYTES, person=b"penstock-kv").digest()


def private_root_hash(request_id: str) -> bytes:
    """The parent of the first block of a request that shares nothing with others."""
    return blake2b(request_id.encode(), digest_size=HASH_BYTES, person=b"penstock-own").digest()


def extend_chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """The hash of each full block of `token_ids`, which continue the prefix named `parent`."""
    packed = array("i", token_ids)
    data, block_bytes = packed.tobytes(), block_size * packed.itemsize
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = blake2b(parent + data[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        yield parent


class PrefixIndex:
    """One block per hash and one hash per block; blocks may be held or free."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_ids)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_ids

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash under which a block is published; None if it is not."""
        return self._hashes.get(block_id)

    def block_of(self, block_hash: bytes) -> int | None:
        """The block that is published under a hash; None if there is none."""
        return self._block_ids.get(block_hash)

    @property
    def block_ids(self) -> Collection[int]:
        """Every published block; a view, so that asking for one is cheap."""
        return self._hashes.keys()

    def items(self) -> Iterable[tuple[bytes, int]]:
        """(hash, block id) of every published block; for checks."""
        return self._block_ids.items()

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of the chain that is known."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_ids.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Make blocks' contents findable. One of which an equal prefix is known already is passed over: the first stays.

        Raises ValueError if a block is published under another hash.
        """
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if self._hashes.get(block_id, block_hash) != block_hash:
                raise ValueError(f"block {block_id} is published already, with other content")
            if self._block_ids.setdefault(block_hash, block_id) == block_id:
                self._hashes[block_id] = block_hash

    def forget(self, block_ids: Iterable[int]) -> list[bytes]:
        """The blocks' content is about to be lost; unpublished blocks are ignored. Returns the hashes lost."""
        forgotten: list[bytes] = []
        for block_id in block_ids:
            block_hash = self._hashes.pop(block_id, None)
            if block_hash is not None:
                del self._block_ids[block_hash]
                forgotten.append(block_hash)
        return forgotten
