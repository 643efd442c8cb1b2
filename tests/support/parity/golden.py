"""Owns the golden files' format: what the reference answered, read back without torch. Read by the tests and by `compare`.

`make_golden.py` writes these files (see `tests/golden/README.md` for where the committed ones come from):

greedy.npz       names [N] str, prompt_lens [N] int32, prompt_ids [sum of prompt_lens] int32: the prompts, one after the other;
                 path_ids [N, S] int32: the S tokens of each prompt's greedy continuation, end tokens not stopping it;
                 top_ids int32, top_logits float32 [N, S, K]: the K largest logits of each step, largest first;
                 logprobs_f32, logprobs_bf16 [sum of (prompt_lens + S - 1)] float32: of every token of prompt and path but the
                 first, given those before it, under the float32 and the bfloat16 reference.
last_logits.npz  by prompt name: float32 [vocab_size], all logits after the prompt's last token.
texts.npz        names [N] str, lens [N] int32, token_ids [sum of lens] int32; logprobs_f32, logprobs_bf16
                 [sum of (lens - 1)] float32. `windows.npz` has the same format.
perplexity.json  of each window of `windows.py`: SHA-256 of its tokens, and the sums of its negative log-likelihoods.
manifest.json    where it came from: model file and SHA-256, versions of the tools.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]

GOLDEN_DIR = Path(__file__).resolve().parents[2] / "golden"


@dataclass(frozen=True, slots=True, eq=False)
class TextCase:
    """A text and how likely the reference found each token of it."""

    name: str
    token_ids: IntArray
    """[n]"""
    logprobs_f32: FloatArray
    """Log-probabilities of tokens 1 to n - 1. [n - 1]"""
    logprobs_bf16: FloatArray
    """[n - 1]"""


@dataclass(frozen=True, slots=True, eq=False)
class GreedyCase:
    """A prompt and the reference's greedy continuation."""

    text: TextCase
    """Prompt and path together."""
    prompt_len: int
    top_ids: IntArray
    """[num_steps, K]"""
    top_logits: FloatArray
    """Largest first. [num_steps, K]"""

    @property
    def name(self) -> str:
        return self.text.name

    @property
    def prompt_ids(self) -> list[int]:
        return [int(token_id) for token_id in self.text.token_ids[: self.prompt_len]]

    @property
    def path_ids(self) -> IntArray:
        """[num_steps]"""
        return self.text.token_ids[self.prompt_len :]

    @property
    def margins(self) -> FloatArray:
        """The best logit minus the second best, of each step. [num_steps]"""
        return self.top_logits[:, 0] - self.top_logits[:, 1]


def first_steps(case: GreedyCase, num: int) -> GreedyCase:
    """The case with so many steps alone: the reference backend is slow."""
    text, end = case.text, case.prompt_len + num
    text = TextCase(text.name, text.token_ids[:end], text.logprobs_f32[: end - 1], text.logprobs_bf16[: end - 1])
    return GreedyCase(text, case.prompt_len, case.top_ids[:num], case.top_logits[:num])


@dataclass(frozen=True, slots=True)
class WindowSums:
    """The figures that are stored of a window whose text is not."""

    name: str
    tokens_sha256: str
    nll_f32: float
    """Negative log-likelihood of all its tokens but the first, nats."""
    nll_bf16: float


def load_greedy(directory: Path = GOLDEN_DIR) -> list[GreedyCase]:
    """The cases of greedy.npz, in its order."""
    with np.load(directory / "greedy.npz") as data:
        num_steps = data["path_ids"].shape[1]
        prompts = _split(data["prompt_ids"], data["prompt_lens"])
        f32 = _split(data["logprobs_f32"], data["prompt_lens"] + num_steps - 1)
        bf16 = _split(data["logprobs_bf16"], data["prompt_lens"] + num_steps - 1)
        return [
            GreedyCase(
                TextCase(str(name), np.concatenate([prompts[i], data["path_ids"][i]]), f32[i], bf16[i]),
                len(prompts[i]),
                data["top_ids"][i],
                data["top_logits"][i],
            )
            for i, name in enumerate(data["names"])
        ]


def save_greedy(directory: Path, cases: Sequence[GreedyCase]) -> None:
    """Write greedy.npz. All cases have equally many steps."""
    np.savez_compressed(
        directory / "greedy.npz",
        names=np.array([case.name for case in cases]),
        prompt_lens=np.array([case.prompt_len for case in cases], np.int32),
        prompt_ids=np.concatenate([case.text.token_ids[: case.prompt_len] for case in cases]),
        path_ids=np.stack([case.path_ids for case in cases]),
        top_ids=np.stack([case.top_ids for case in cases]),
        top_logits=np.stack([case.top_logits for case in cases]),
        logprobs_f32=np.concatenate([case.text.logprobs_f32 for case in cases]),
        logprobs_bf16=np.concatenate([case.text.logprobs_bf16 for case in cases]),
    )


def load_texts(path: Path = GOLDEN_DIR / "texts.npz") -> list[TextCase]:
    """The texts of one file, in its order."""
    with np.load(path) as data:
        token_ids = _split(data["token_ids"], data["lens"])
        f32, bf16 = (_split(data[key], data["lens"] - 1) for key in ("logprobs_f32", "logprobs_bf16"))
        return [TextCase(str(name), *parts) for name, *parts in zip(data["names"], token_ids, f32, bf16, strict=True)]


def save_texts(path: Path, texts: Sequence[TextCase]) -> None:
    np.savez_compressed(
        path,
        names=np.array([text.name for text in texts]),
        lens=np.array([len(text.token_ids) for text in texts], np.int32),
        token_ids=np.concatenate([text.token_ids for text in texts]),
        logprobs_f32=np.concatenate([text.logprobs_f32 for text in texts]),
        logprobs_bf16=np.concatenate([text.logprobs_bf16 for text in texts]),
    )


def load_last_logits(directory: Path = GOLDEN_DIR) -> dict[str, FloatArray]:
    """By prompt name, float32 [vocab_size]."""
    with np.load(directory / "last_logits.npz") as data:
        return {name: data[name] for name in data.files}


def load_window_sums(directory: Path = GOLDEN_DIR) -> dict[str, WindowSums]:
    """The sums in perplexity.json, by the window's name, in its order."""
    rows = json.loads((directory / "perplexity.json").read_text())["windows"]
    return {row["name"]: WindowSums(**row) for row in rows}


def tokens_sha256(token_ids: Sequence[int] | IntArray) -> str:
    """The checksum of the ids as little-endian int32."""
    return hashlib.sha256(np.asarray(token_ids, "<i4").tobytes()).hexdigest()


def load_manifest(directory: Path = GOLDEN_DIR) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return manifest


def _split(values: NDArray[Any], lens: NDArray[np.integer[Any]]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(lens)[:-1])
