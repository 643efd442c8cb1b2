"""How far do the logits move when the inputs or weights of the linear layers are rounded in various ways?

Runs the float32 reference backend over one text, rounding one operand of every product, and compares with
the same run without rounding. It decided the native backend's activation format
(docs/decisions/int8-activations.md) and the operands of its tiles (docs/decisions/bf16-tiles.md).

    python benchmarks/activation_rounding.py --text tests/golden/sonnet_excerpt.txt --tokens 900
    python benchmarks/activation_rounding.py --text tests/golden/sonnet_excerpt.txt --tokens 900 --of weights

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.backends.reference import interpreter
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.load import load_model
from penstock.text.tokenizer import load_tokenizer

F32 = NDArray[np.float32]
Rounding = Callable[[F32], F32]


class Int8:
    """Round to int8 with a scale per `group` columns (0: per row), optionally a power of two.

    A value above `outlier_ratio` times the row's root mean square stays float32 and does not affect its group's scale.
    """

    def __init__(self, group: int, *, power_of_two: bool = False, outlier_ratio: float = np.inf) -> None:
        self._group = group
        self._power_of_two = power_of_two
        self._ratio = outlier_ratio
        self.num_values = 0
        self.num_outliers = 0

    def __call__(self, x: F32) -> F32:
        groups = x.reshape(len(x), -1, self._group or x.shape[1])
        rms = np.sqrt((x**2).mean(-1))[:, None, None]
        is_outlier = np.abs(groups) > self._ratio * rms
        largest = np.abs(np.where(is_outlier, 0, groups)).max(-1, keepdims=True)
        step = np.maximum(largest, np.float32(1e-30)) / np.float32(127)
        if self._power_of_two:
            step = np.exp2(np.ceil(np.log2(step)))
        self.num_values += is_outlier.size
        self.num_outliers += int(is_outlier.sum())
        return np.where(is_outlier, groups, np.rint(groups / step) * step).reshape(x.shape).astype(np.float32)


class Int8Weights:
    """int8 with a scale per row of the matrix, or per `piece` columns of a row. A matrix is rounded once."""

    def __init__(self, piece: int = 0) -> None:
        self._piece = piece
        self._rounded: dict[int, F32] = {}

    def __call__(self, weight: F32) -> F32:
        place = weight.__array_interface__["data"][0]
        if place not in self._rounded:
            width = self._piece if self._piece and weight.shape[1] % self._piece == 0 else weight.shape[1]
            pieces = weight.reshape(len(weight), -1, width)
            step = np.maximum(np.abs(pieces).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
            self._rounded[place] = (np.rint(pieces / step) * step).reshape(weight.shape)
        return self._rounded[place]


def truncated(weight: F32) -> F32:
    """Truncate to bf16, as native/kernels/gemm_tiles.cpp does."""
    larger = weight * np.float32(1 + 1 / 370)
    return (larger.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def exactly(x: F32) -> F32:
    return x


def bfloat16(x: F32) -> F32:
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def forward(executor: ReferenceExecutor, token_ids: list[int], of_inputs: Rounding, of_weights: Rounding) -> F32:
    product = interpreter.product
    interpreter.product = lambda x, weight, position: product(of_inputs(x), of_weights(weight), position)
    try:
        return executor.forward_logits(token_ids)
    finally:
        interpreter.product = product


def negative_log_likelihood(logits: F32, token_ids: list[int]) -> float:
    """Mean over the tokens after the first."""
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-logprobs[np.arange(len(token_ids) - 1), token_ids[1:]].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--of", choices=("inputs", "weights"), default="inputs")
    args = parser.parse_args()
    model = load_model(resolve(DEFAULT_MODEL, default_cache_dir()))
    token_ids = load_tokenizer(model.tokenizer_source).encode(args.text.read_text(), add_special_tokens=False)[: args.tokens]
    sizes = {"num_blocks": args.tokens // 16 + 2, "block_size": 16, "max_rows": 1}
    executor = ReferenceExecutor(
        model, architectures.describe(model.spec), **sizes, max_step_tokens=args.tokens, max_model_len=args.tokens + 1
    )
    roundings: dict[str, Rounding] = {"bf16": bfloat16}
    roundings |= {"per row": Int8(0)} | {f"group {g}": Int8(g) for g in (192, 64, 32)}
    roundings |= {f"group 32, outliers above {t} rms": Int8(32, outlier_ratio=t) for t in (6, 8)}
    roundings |= {
        f"group 32, power of two, outliers above {t} rms": Int8(32, power_of_two=True, outlier_ratio=t) for t in (4, 6, 8, 12)
    }
    both: dict[str, tuple[Rounding, Rounding]] = {name: (rounding, exactly) for name, rounding in roundings.items()}
    if args.of == "weights":
        per_row = Int8Weights()
        both = {
            "bf16, weights truncated to bf16": (bfloat16, truncated),
            "weights int8 per row": (exactly, per_row),
            "weights int8 per row and 288 columns": (exactly, Int8Weights(288)),
            "per row, outliers above 6 rms": (Int8(0, outlier_ratio=6), exactly),
            "the same, weights int8 per row": (Int8(0, outlier_ratio=6), per_row),
        }
    exact = forward(executor, token_ids, exactly, exactly)
    base = negative_log_likelihood(exact, token_ids)
    results = {}
    for name, (rounding, of_weights) in both.items():
        logits = forward(executor, token_ids, rounding, of_weights)
        error = logits - exact
        error -= error.mean(-1, keepdims=True)
        results[name] = {
            "rms": round(float(np.sqrt((error**2).mean())), 4),
            "perplexity_ratio": round(float(np.exp(negative_log_likelihood(logits, token_ids) - base)), 5),
            "argmax_changed": int((logits.argmax(-1) != exact.argmax(-1)).sum()),
            "outliers": round(rounding.num_outliers / rounding.num_values, 5) if isinstance(rounding, Int8) else 0,
        }
        print(f"{name:48} {results[name]}", flush=True)
    print(json.dumps({"benchmark": "activation_rounding", "tokens": len(token_ids), "results": results}))


if __name__ == "__main__":
    main()
