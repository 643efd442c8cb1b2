"""The order in which the lines of a job run: requests that begin alike come one after another.

Lines sorted by their keys come in depth-first order of the tree of their prefixes. So the prefix cache computes each shared
prefix once, and can evict it when no further line needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import pack
from typing import Any
from zlib import crc32

from penstock.fast_json import dumps

_FIELDS = (
    "cache_salt",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "instructions",
    "system",
    "messages",
    "prompt",
    "input",
)
"""Fields of a body that a prompt is made of, in the order in which templates write them."""

_MIN_PIECE_BYTES = 64
"""About a block of 16 tokens."""


def prefix_key(url: str, body: Mapping[str, Any]) -> bytes:
    """Return a request's place in the tree of prefixes, for any `body` that JSON can express.

    The prompt is cut into pieces, each a sixteenth as long as the text before it and at least `_MIN_PIECE_BYTES`: 130 for a
    million bytes. The key has a checksum of 4 bytes for each piece, over the text up to the piece's end. So two prompts that
    share their first pieces share the beginning of their keys.
    """
    try:
        text = dumps([body.get("model"), url, *map(body.get, _FIELDS)])
    except (ValueError, RecursionError):  # half a surrogate pair, or too deep; such a request is refused later
        return b""
    start, checksum = 0, 0
    checksums: list[int] = []
    while start < len(text):
        end = start + max(_MIN_PIECE_BYTES, start // 16)
        checksum = crc32(text[start:end], checksum)
        checksums.append(checksum)
        start = end
    return pack(f">{len(checksums)}I", *checksums)
