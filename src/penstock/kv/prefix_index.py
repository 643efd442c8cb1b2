"""The prefix index: owns the map from the hash of a prefix to the block with its KV. Called by `KVManager` alone; never counts
references.

A block is named by the chain of everything before it: hash(i) = H(hash(i - 1), tokens of block i), and
hash(-1) = H(salt). Equal hashes thus mean equal prefixes from position 0, and requests of different
salts never meet. H is BLAKE2b with a digest of 128 bits (RFC 7693).

A prefix may also end inside a block. So each block can be found among the children of its parent, too: by the parent's hash and
its first token. Blocks that are filled in part (tails) are found in this way alone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from sys import byteorder

HASH_BYTES = 16
TOKEN_BYTES = 4
START = 2 * HASH_BYTES
"""Of the packed tokens in what is remembered of a block."""
KEY_END = START + TOKEN_BYTES
TAIL = bytes(HASH_BYTES)
"""In place of the hash of a block that is filled in part."""
MAX_CHILDREN = 8
"""Blocks with one parent and one first token that are compared with a prompt: the newest. Others are found by their hash."""


def root_hash(salt: bytes) -> bytes:
    """The parent of a request's first block."""
    return blake2b(salt, digest_size=HASH_BYTES, person=b"penstock-kv").digest()


def private_root_hash(request_id: str) -> bytes:
    """The parent of the first block of a request that shares nothing with others."""
    return blake2b(request_id.encode(), digest_size=HASH_BYTES, person=b"penstock-own").digest()


def pack(token_ids: Sequence[int]) -> bytes:
    """Tokens as the index keeps them, `TOKEN_BYTES` each."""
    return array("i", token_ids).tobytes()


def extend_chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> tuple[list[bytes], list[bytes]]:
    """(hashes, packed tokens) of the full blocks of `token_ids`, which continue the prefix named `parent`."""
    data, block_bytes = pack(token_ids), block_size * TOKEN_BYTES
    contents = [data[start : start + block_bytes] for start in range(0, len(data) - block_bytes + 1, block_bytes)]
    hashes: list[bytes] = []
    for content in contents:
        parent = blake2b(parent + content, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes, contents


def child_key(parent: bytes, token_id: int) -> bytes:
    """Where a block that begins with this token is found among the children of `parent`."""
    return parent + token_id.to_bytes(TOKEN_BYTES, byteorder)


class PrefixIndex:
    """One block per hash and one content per block; blocks may be held or free."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}
        """block_id -> hash, or `TAIL`; parent and packed tokens, or nothing if they are not known. In one string, since tuples
        and lists per block would have the garbage collector run more than twice as often."""
        self._children: dict[bytes, int | list[int]] = {}
        """Key -> the block, or blocks, the newest last."""
        self._num_children: dict[bytes, int] = {}
        """Parent -> blocks that continue it, whatever their first token."""

    def __len__(self) -> int:
        return len(self._block_ids)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_ids

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash under which a block is published; None if it is not, or as a tail."""
        content = self._contents.get(block_id)
        return None if content is None or content.startswith(TAIL) else content[:HASH_BYTES]

    def block_of(self, block_hash: bytes) -> int | None:
        """The block that is published under a hash; None if there is none."""
        return self._block_ids.get(block_hash)

    @property
    def block_ids(self) -> Collection[int]:
        """Every published block, tails included; a view, so that asking for one is cheap."""
        return self._contents.keys()

    def items(self) -> Iterable[tuple[bytes, int]]:
        """(hash, block id) of every block that was published full; for checks."""
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

    def has_child(self, key: bytes) -> bool:
        """Is there a block at this key (`child_key`)?"""
        return key in self._children

    def goes_on(self, parent: bytes) -> bool:
        """Is there a block that continues this prefix, with whatever tokens?"""
        return parent in self._num_children

    def has_more(self, block_id: int, num_tokens: int) -> bool:
        """Are there further tokens known in a block than so many?"""
        return len(self._contents[block_id]) > START + num_tokens * TOKEN_BYTES

    def lookup_child(self, parent: bytes, content: bytes) -> tuple[int, int]:
        """(block, number of tokens) of the child of `parent` that begins like the packed tokens for longest; (0, 0): none."""
        best_id = best_tokens = 0
        children = self._children.get(parent + content[:TOKEN_BYTES], ())
        for block_id in (children,) if isinstance(children, int) else children:
            num_tokens = _num_common(self._contents[block_id][START:], content)
            if num_tokens >= best_tokens:
                best_id, best_tokens = block_id, num_tokens
        return best_id, best_tokens

    def publish(self, block_ids: Iterable[int], parent: bytes, hashes: Iterable[bytes], contents: Iterable[bytes]) -> None:
        """Make full blocks findable; `parent` is that of the first. One whose hash is known already is passed over.

        Raises ValueError if a block is published under another hash.
        """
        for block_id, block_hash, content in zip(block_ids, hashes, contents, strict=True):
            known = self._contents.get(block_id)
            if known is not None:
                if not known.startswith((TAIL, block_hash)):
                    raise ValueError(f"block {block_id} is published already, with other content")
                self._drop(block_id)  # it was a tail
            if self._block_ids.setdefault(block_hash, block_id) == block_id:
                self._put(block_id, block_hash, parent, content)
            parent = block_hash

    def publish_named(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block findable of which no more is known than its hash; it is not among the children of its parent.

        Neither may be published already.
        """
        self._block_ids[block_hash] = block_id
        self._contents[block_id] = block_hash

    def publish_tail(self, block_id: int, parent: bytes, content: bytes) -> None:
        """Make a block that is filled in part findable, unless there is one that begins with the same tokens."""
        if self.lookup_child(parent, content)[1] * TOKEN_BYTES == len(content):
            return
        if block_id in self._contents:
            self._drop(block_id)  # it was shorter
        self._put(block_id, TAIL, parent, content)

    def forget(self, block_ids: Iterable[int]) -> list[bytes]:
        """The blocks' content is about to be lost; unpublished blocks are ignored. Returns the hashes lost."""
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
        """Returns the hash under which it was found."""
        content = self._contents.pop(block_id)
        if len(content) > START:
            self._forget_child(block_id, content[HASH_BYTES:START], content[HASH_BYTES:KEY_END])
        if content.startswith(TAIL):
            return None
        block_hash = content[:HASH_BYTES]
        del self._block_ids[block_hash]
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
        """Verify that the maps agree. Raises AssertionError. O(blocks)."""
        for block_hash, block_id in self._block_ids.items():
            assert self.hash_of(block_id) == block_hash, f"block {block_id} is known under two hashes"
        num_full = sum(not content.startswith(TAIL) for content in self._contents.values())
        assert num_full == len(self._block_ids), "a full block is not found by its hash"
        families = Counter(content[HASH_BYTES:START] for content in self._contents.values() if len(content) > START)
        assert families == self._num_children, "a prefix has other children than are counted"
        for key, found in self._children.items():
            children = [found] if isinstance(found, int) else found
            assert isinstance(found, int) or 1 < len(set(found)) == len(found) <= MAX_CHILDREN, "not what children may be"
            assert all(self._contents[block_id][HASH_BYTES:KEY_END] == key for block_id in children), (
                "a child is in the wrong place"
            )


def _num_common(one: bytes, other: bytes) -> int:
    """Tokens with which both begin."""
    num_bytes = min(len(one), len(other))
    difference = int.from_bytes(one[:num_bytes], "little") ^ int.from_bytes(other[:num_bytes], "little")
    if not difference:
        return num_bytes // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
