"""What do keys and values in 8 and 4 bits cost? Perplexity and greedy choices of the native backend by type of KV cache.

The text is cut into windows, each of which begins with an empty context.

    python benchmarks/kv_rounding.py --text tests/golden/sonnet_excerpt.txt --window 256
    python benchmarks/kv_rounding.py --text docs/architecture.md --model qwen2.5-coder:1.5b
    python benchmarks/kv_rounding.py --text sharegpt_1000.jsonl --windows 20       # replies, one after another
    python benchmarks/kv_rounding.py --text docs/*.md --windows 20 --max-model-len 32768

The last line printed is one JSON object: the perplexity with each type, how often the greedy choice is not that of bf16, and
the root mean square by which the logits differ from those of bf16, mean taken off. Each ratio of perplexities has the standard
error of its logarithm beside it, from the differences of single tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.backends.native.executor import NativeExecutor
from penstock.lab.traces import read_conversations
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.models.program import KvWrite, Program
from penstock.models.weights import LoadedModel
from penstock.text.tokenizer import load_tokenizer
from penstock.types.kv_dtype import KvDtype

F32 = NDArray[np.float32]
CHUNK_TOKENS = 64
"""Tokens whose logits are looked at together: with a large vocabulary a window's would fill the memory once more."""


CHARS_PER_TOKEN = 12
"""Length of texts at most, so that no more is read than is needed."""


def read_text(path: Path, max_chars: int) -> str:
    """The beginning of a text, or of the replies of conversations in the format of ShareGPT."""
    if path.suffix != ".jsonl":
        return path.read_text(encoding="utf-8")[:max_chars]
    texts: list[str] = []
    conversations = read_conversations(path)
    while sum(map(len, texts)) < max_chars and (turns := next(conversations, None)):
        texts.append(turns[0][1])
    return "\n\n".join(texts)


def describe(model: LoadedModel, *, is_centred: bool) -> Program:
    program = architectures.describe(model.spec)
    if is_centred:
        return program
    return replace(program, ops=tuple(replace(op, bias=None) if isinstance(op, KvWrite) else op for op in program.ops))


def open_executor(model: LoadedModel, program: Program, window: int, dtype: KvDtype, max_model_len: int) -> NativeExecutor:
    sizes = {"num_blocks": window // 16 + 2, "block_size": 16, "max_rows": 256, "max_step_tokens": 256}
    return NativeExecutor(model, program, **sizes, max_model_len=max_model_len or window + 16, kv_dtype=dtype)


def log_likelihoods(logits: F32, token_ids: NDArray[np.int64]) -> Iterator[float]:
    """The log-likelihood of each token after the first, given those before it."""
    for begin in range(0, len(token_ids) - 1, CHUNK_TOKENS):
        end = min(begin + CHUNK_TOKENS, len(token_ids) - 1)
        rows = logits[begin:end].astype(np.float64)
        rows -= rows.max(-1, keepdims=True)
        found = rows[np.arange(end - begin), token_ids[begin + 1 : end + 1]] - np.log(np.exp(rows).sum(-1))
        yield from found.tolist()


def mean_square_difference(a: F32, b: F32) -> float:
    """Over all logits; softmax does not see what all of a row have in common."""
    total = 0.0
    for begin in range(0, len(a), CHUNK_TOKENS):
        error = a[begin : begin + CHUNK_TOKENS] - b[begin : begin + CHUNK_TOKENS]
        total += float(np.square(error - error.mean(-1, keepdims=True)).mean(-1).sum())
    return total / len(a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--windows", type=int, default=4, help="most windows of the text")
    parser.add_argument("--max-model-len", type=int, default=0, help="decides what of the bias is centred; default: a window")
    parser.add_argument("--uncentred", action="store_true", help="keys with all that they share (models/rope.py)")
    args = parser.parse_args()
    model = load_model(resolve(args.model, default_cache_dir()))
    max_chars = args.windows * args.window * CHARS_PER_TOKEN
    ids = np.array(
        load_tokenizer(model.tokenizer_source).encode(
            "".join(read_text(path, max_chars) for path in args.text)[:max_chars], add_special_tokens=False
        )
    )
    windows = [ids[i : i + args.window] for i in range(0, len(ids) - args.window + 1, args.window)][: args.windows]
    if not windows:
        parser.error(f"{args.text} has {len(ids)} tokens, fewer than a window of {args.window}")
    likelihoods: dict[KvDtype, list[float]] = {dtype: [] for dtype in KvDtype}
    num_changed = dict.fromkeys((KvDtype.INT8, KvDtype.INT4), 0)
    square = dict.fromkeys(num_changed, 0.0)
    program = describe(model, is_centred=not args.uncentred)
    executors = {dtype: open_executor(model, program, args.window, dtype, args.max_model_len) for dtype in KvDtype}
    for window in windows:
        logits = {dtype: executor.forward_logits(window.tolist()) for dtype, executor in executors.items()}
        for dtype, found in logits.items():
            likelihoods[dtype] += log_likelihoods(found, window)
        for dtype in num_changed:
            num_changed[dtype] += int((logits[dtype].argmax(-1) != logits[KvDtype.BF16].argmax(-1)).sum())
            square[dtype] += mean_square_difference(logits[dtype], logits[KvDtype.BF16]) / len(windows)
    leads = {
        f"{one.value}/{other.value}": np.array(likelihoods[other]) - np.array(likelihoods[one])
        for one, other in ((KvDtype.INT8, KvDtype.BF16), (KvDtype.INT4, KvDtype.INT8))
    }
    perplexity = {dtype: float(np.exp(-np.mean(found))) for dtype, found in likelihoods.items()}
    result = {
        "benchmark": "kv_rounding",
        "model": model.name,
        "variant": executors[KvDtype.INT8].variant,
        "tokens": len(windows) * args.window,
        "perplexity": {dtype: round(value, 4) for dtype, value in perplexity.items()},
        "ratios": {
            pair: [round(float(np.exp(lead.mean())), 5), round(float(lead.std() / np.sqrt(len(lead))), 5)]
            for pair, lead in leads.items()
        },
        "choices_changed": num_changed,
        "logits_rms": {dtype: round(value**0.5, 4) for dtype, value in square.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
