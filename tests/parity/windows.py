"""Owns the perplexity protocol: which text, cut into which windows. Read by `make_golden.py`.

The text is all of sonnet.txt, then ShareGPT conversations in file order, each rendered with the model's chat template and
all joined. Each of the two is cut into windows of 1,024 tokens, its incomplete last window dropped; windows are taken until
there are enough. Each window starts from an empty context, and its tokens 2 to 1,024 are predicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WINDOW_TOKENS = 1024
NUM_WINDOWS = 20
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class Window:
    name: str
    token_ids: tuple[int, ...]
    """[WINDOW_TOKENS]"""


def make_windows(
    traces_dir: Path, encode: Callable[[str], list[int]], render: Callable[[list[dict[str, str]]], str]
) -> list[Window]:
    """NUM_WINDOWS of them. Raises FileNotFoundError where a file is missing, ValueError if there is too little text."""
    windows = _cut("sonnet", iter([encode((traces_dir / "sonnet.txt").read_text())]), NUM_WINDOWS)
    chats = (encode(render(messages)) for messages in _conversations(traces_dir / "sharegpt_1000.jsonl"))
    windows += _cut("sharegpt", chats, NUM_WINDOWS - len(windows))
    if len(windows) < NUM_WINDOWS:
        raise ValueError(f"{traces_dir}: text for {len(windows)} windows only, {NUM_WINDOWS} are needed")
    return windows


def _cut(name: str, pieces: Iterator[list[int]], max_windows: int) -> list[Window]:
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += piece
        if len(token_ids) >= max_windows * WINDOW_TOKENS:
            break
    count = min(len(token_ids) // WINDOW_TOKENS, max_windows)
    return [Window(f"{name}-{i}", tuple(token_ids[i * WINDOW_TOKENS : (i + 1) * WINDOW_TOKENS])) for i in range(count)]


def _conversations(path: Path) -> Iterator[list[dict[str, str]]]:
    with path.open() as lines:
        for line in lines:
            turns = json.loads(line)["conversations"]
            yield [{"role": _ROLES.get(turn["from"], "user"), "content": turn["value"]} for turn in turns]
