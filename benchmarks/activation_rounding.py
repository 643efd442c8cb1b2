"""How far do the logits move when the inputs or weights of the linear layers are rounded in various ways?

Runs the float32 reference backend over one text, rounding an operand of every product or the file's matrices, and compares
with the same run without rounding. It decided the native backend's activation format (docs/decisions/int8-activations.md), the
operands of its tiles (docs/decisions/bf16-tiles.md) and the scales of `--weight-dtype fp8` (docs/decisions/gpu-weights.md).

    python benchmarks/activation_rounding.py --text tests/golden/sonnet_excerpt.txt --tokens 900
    python benchmarks/activation_rounding.py --text tests/golden/sonnet_excerpt.txt --tokens 900 --of weights    # or fp8

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.backends.reference import interpreter
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.formats import WeightFormat
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel, WeightTensor
from penstock.text.tokenizer import load_tokenizer

F32 = NDArray[np.float32]
Rounding = Callable[[F32], F32]
LARGEST = np.float32(448)
TINY = np.float32(1e-30)
TABLES = ("embed", "output")


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
        step = np.maximum(largest, TINY) / np.float32(127)
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
            step = np.maximum(np.abs(pieces).max(-1, keepdims=True), TINY) / np.float32(127)
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


def e4m3(x: F32) -> F32:
    """The nearest number of the type, 448 at most."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & np.uint32(0xFFF00000)).view(np.float32)  # three bits of mantissa
    found = np.where(np.abs(x) < np.float32(2**-6), np.rint(x * np.float32(512)) / np.float32(512), normal)
    return np.clip(found, -LARGEST, LARGEST)


def fp8_per_row(x: F32) -> F32:
    """The largest of a row becomes 448."""
    scale = np.maximum(np.abs(x).max(axis=1, keepdims=True), TINY) / LARGEST
    return np.asarray(e4m3(x / scale) * scale)


def fp8_power_of_two(x: F32) -> F32:
    """The largest of a row becomes more than 224, at most 448."""
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), TINY)
    scale = np.exp2(np.ceil(np.log2(largest / LARGEST))).astype(np.float32)
    return np.asarray(e4m3(x / scale) * scale)


def fp8_per_matrix(x: F32) -> F32:
    scale = np.maximum(np.abs(x).max(), TINY) / LARGEST
    return np.asarray(e4m3(x / scale) * scale)


@dataclass(frozen=True, slots=True)
class Case:
    """How `inputs` and `weights` of all products are rounded, and beforehand the matrices of the `file`."""

    inputs: Rounding = exactly
    weights: Rounding = exactly
    file: Rounding | None = None
    with_tables: bool = False
    """Whether the file's embeddings and logits are rounded, too."""


def cases_of(what: str) -> dict[str, Case]:
    if what == "fp8":
        return {
            "bf16": Case(file=bfloat16),
            "fp8, scale per row, a power of two": Case(file=fp8_power_of_two),
            "the same, embeddings and logits, too": Case(file=fp8_power_of_two, with_tables=True),
            "fp8, scale per row": Case(file=fp8_per_row),
            "fp8, scale per matrix": Case(file=fp8_per_matrix),
            "int8, scale per row": Case(file=Int8(0)),
            "fp8 per row, activations in fp8 per token": Case(file=fp8_per_row, inputs=fp8_per_row),
        }
    if what == "weights":
        per_row = Int8Weights()
        return {
            "bf16, weights truncated to bf16": Case(bfloat16, truncated),
            "weights int8 per row": Case(weights=per_row),
            "weights int8 per row and 288 columns": Case(weights=Int8Weights(288)),
            "per row, outliers above 6 rms": Case(Int8(0, outlier_ratio=6)),
            "the same, weights int8 per row": Case(Int8(0, outlier_ratio=6), per_row),
        }
    roundings: dict[str, Rounding] = {"bf16": bfloat16}
    roundings |= {"per row": Int8(0)} | {f"group {g}": Int8(g) for g in (192, 64, 32)}
    roundings |= {f"group 32, outliers above {t} rms": Int8(32, outlier_ratio=t) for t in (6, 8)}
    roundings |= {
        f"group 32, power of two, outliers above {t} rms": Int8(32, power_of_two=True, outlier_ratio=t) for t in (4, 6, 8, 12)
    }
    return {name: Case(rounding) for name, rounding in roundings.items()}


def rounded(model: LoadedModel, rounding: Rounding, *, with_tables: bool) -> LoadedModel:
    """Its matrices in float32."""
    weights = dict(model.weights)
    for name, tensor in model.weights.items():
        if tensor.num_rows > 1 and (with_tables or name not in TABLES):
            values = rounding(tensor.dequantize())
            weights[name] = WeightTensor(name, tensor.num_rows, tensor.num_cols, WeightFormat.F32, values)
    return replace(model, weights=weights)


def executor_of(model: LoadedModel, num_tokens: int) -> ReferenceExecutor:
    sizes = {"num_blocks": num_tokens // 16 + 2, "block_size": 16, "max_rows": 1}
    return ReferenceExecutor(
        model, architectures.describe(model.spec), **sizes, max_step_tokens=num_tokens, max_model_len=num_tokens + 1
    )


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
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--of", choices=("inputs", "weights", "fp8"), default="inputs")
    args = parser.parse_args()
    model = load_model(resolve(args.model, default_cache_dir()))
    token_ids = load_tokenizer(model.tokenizer_source).encode(args.text.read_text(), add_special_tokens=False)[: args.tokens]
    plain = executor_of(model, len(token_ids))
    exact = forward(plain, token_ids, exactly, exactly)
    base = negative_log_likelihood(exact, token_ids)
    results = {}
    for name, case in cases_of(args.of).items():
        executor = plain
        if case.file is not None:
            executor = executor_of(rounded(model, case.file, with_tables=case.with_tables), len(token_ids))
        logits = forward(executor, token_ids, case.inputs, case.weights)
        error = logits - exact
        error -= error.mean(-1, keepdims=True)
        results[name] = {
            "rms": round(float(np.sqrt((error**2).mean())), 4),
            "perplexity_ratio": round(float(np.exp(negative_log_likelihood(logits, token_ids) - base)), 5),
            "argmax_changed": int((logits.argmax(-1) != exact.argmax(-1)).sum()),
            "outliers": round(case.inputs.num_outliers / case.inputs.num_values, 5) if isinstance(case.inputs, Int8) else 0,
        }
        print(f"{name:48} {results[name]}", flush=True)
    about = {"model": args.model, "tokens": len(token_ids), "perplexity": round(float(np.exp(base)), 4)}
    print(json.dumps({"benchmark": "activation_rounding", **about, "results": results}))


if __name__ == "__main__":
    main()
