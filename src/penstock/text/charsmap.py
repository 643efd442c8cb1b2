"""Checks SentencePiece's compiled character replacements (`precompiled_charsmap`), since `tokenizers` panics on damaged ones.

The format: the size of a trie in bytes, the trie, and the replacements, each with a zero byte at its end. The trie is a double
array of 32-bit units: https://github.com/s-yata/darts-clone, `include/darts.h`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.types.errors import ModelError

MAX_BYTES = 16 << 20
_LABEL = np.uint32(0x800000FF)
_HAS_LEAF = 8
_CHUNK = 256
"""Nodes checked together, with 255 children each."""


def check_charsmap(data: bytes) -> int:
    """Return the length in bytes of the longest replacement. Raises `ModelError` for a damaged charsmap.

    Damaged: a lookup could read beyond the data, or a replacement is not UTF-8.
    """
    size = int.from_bytes(data[:4], "little")
    if not 4 + size < len(data) <= MAX_BYTES or size < 1024 or size % 1024:  # units come in blocks of 256
        raise _damaged(f"it has {len(data)} bytes, and a trie of {size}")
    targets = data[4 + size :]
    if targets[-1]:
        raise _damaged("its last replacement has no end")
    _check_trie(np.frombuffer(data, dtype="<u4", count=size // 4, offset=4), targets)
    return max(map(len, targets.split(b"\0")))


def _check_trie(units: NDArray[np.uint32], targets: bytes) -> None:
    """Walk every path from the trie's root, many nodes at a time, and check its end.

    Units come in blocks of 256, so if a node's base is in the trie, all its children are.
    """
    seen = np.zeros(len(units), dtype=bool)
    bases = _offsets(units[:1])
    labels = np.arange(1, 256, dtype=np.uint32)
    while len(bases):
        if (bases >= len(units)).any():
            raise _damaged("its trie points outside of the data")
        found = []
        for begin in range(0, len(bases), _CHUNK):
            children = bases[begin : begin + _CHUNK, None] ^ labels
            nodes = children[(units[children] & _LABEL) == labels]
            nodes = nodes[~seen[nodes]]
            seen[nodes] = True
            found.append(nodes)
        nodes = np.unique(np.concatenate(found))
        bases = nodes ^ _offsets(units[nodes])
        leaves = bases[(units[nodes] >> _HAS_LEAF) & 1 == 1]
        if (leaves >= len(units)).any():
            raise _damaged("its trie points outside of the data")
        for at in np.unique(units[leaves] & np.uint32(0x7FFFFFFF)).tolist():
            if at >= len(targets) or not _is_text(targets[at : targets.index(b"\0", at)]):
                raise _damaged(f"its replacement at byte {at} is not UTF-8")


def _offsets(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the distance of each unit of the trie to its children. A flag says that the distance is in blocks of 256."""
    return (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _damaged(cause: str) -> ModelError:
    return ModelError(f"The vocabulary's precompiled_charsmap is damaged: {cause}.", remedy="Fetch the file again.")
