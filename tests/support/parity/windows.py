"""Owns the perplexity protocol: which text, cut into which windows. Read by `make_golden.py`.

The text is all of sonnet.txt, then ShareGPT conversations in file order, each rendered with the model's chat template and
all joined. Each of the two is cut into windows of one length, 1,024 tokens unless told otherwise, its incomplete last window
dropped; windows are taken until they predict 20,000 tokens. Each window starts from an empty context, and all its tokens but
the first are predicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WINDOW_TOKENS = 1024
MIN_PREDICTED_TOKENS = 20_000
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class Window:
    name: str
    token_ids: tuple[int, ...]
    """[window_tokens]"""


def make_windows(
    traces_dir: Path,
    encode: Callable[[str], list[int]],
    render: Callable[[list[dict[str, str]]], str],
    window_tokens: int = WINDOW_TOKENS,
) -> list[Window]:
    """Windows of MIN_PREDICTED_TOKENS predictions. Raises FileNotFoundError for a missing file, ValueError for little text."""
    num_windows = -(-MIN_PREDICTED_TOKENS // (window_tokens - 1))
    windows = _cut("sonnet", iter([encode((traces_dir / "sonnet.txt").read_text())]), num_windows, window_tokens)
    chats = (encode(render(messages)) for messages in _conversations(traces_dir / "sharegpt_1000.jsonl"))
    windows += _cut("sharegpt", chats, num_windows - len(windows), window_tokens)
    if len(windows) < num_windows:
        raise ValueError(f"{traces_dir}: text for {len(windows)} windows only, {num_windows} are needed")
    return windows


def _cut(name: str, pieces: Iterator[list[int]], max_windows: int, window_tokens: int) -> list[Window]:
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += piece
        if len(token_ids) >= max_windows * window_tokens:
            break
    count = min(len(token_ids) // window_tokens, max_windows)
    return [Window(f"{name}-{i}", tuple(token_ids[i * window_tokens : (i + 1) * window_tokens])) for i in range(count)]


def _conversations(path: Path) -> Iterator[list[dict[str, str]]]:
    with path.open() as lines:
        for line in lines:
            turns = json.loads(line)["conversations"]
            yield [{"role": _ROLES.get(turn["from"], "user"), "content": turn["value"]} for turn in turns]
