"""How far do the logits move when weights are rounded to fp8 (e4m3), with which scales, and when activations are, too?

Runs the reference backend, float32 throughout, over one text with the rounded weights, and compares with the same run of the
weights as the file has them. This is what chose the scales of `--weight-dtype fp8` (docs/decisions/gpu-weights.md).

    python benchmarks/weight_rounding.py --text tests/golden/sonnet_excerpt.txt --tokens 900

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from activation_rounding import bfloat16, exactly, forward, negative_log_likelihood
from numpy.typing import NDArray

from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.formats import WeightFormat
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel, WeightTensor
from penstock.text.tokenizer import load_tokenizer

F32 = NDArray[np.float32]
LARGEST = np.float32(448)
TABLES = ("embed", "output")


@dataclass(frozen=True, slots=True)
class Case:
    weights: Callable[[F32], F32]
    with_tables: bool = False
    """Whether embeddings and logits are rounded, too."""
    activations: Callable[[F32], F32] | None = None


def e4m3(x: F32) -> F32:
    """The nearest number of the type, 448 at most."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & np.uint32(0xFFF00000)).view(np.float32)  # three bits of mantissa
    found = np.where(np.abs(x) < np.float32(2**-6), np.rint(x * np.float32(512)) / np.float32(512), normal)
    return np.clip(found, -LARGEST, LARGEST)


def per_row(x: F32) -> F32:
    """The largest of a row becomes 448."""
    scale = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-30)) / LARGEST
    return np.asarray(e4m3(x / scale) * scale)


def per_row_power_of_two(x: F32) -> F32:
    """The largest of a row becomes more than 224, at most 448."""
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-30))
    scale = np.exp2(np.ceil(np.log2(largest / LARGEST))).astype(np.float32)
    return np.asarray(e4m3(x / scale) * scale)


def per_matrix(x: F32) -> F32:
    scale = np.maximum(np.abs(x).max(), np.float32(1e-30)) / LARGEST
    return np.asarray(e4m3(x / scale) * scale)


def int8_per_row(x: F32) -> F32:
    scale = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return np.asarray(np.rint(x / scale) * scale)


CASES = {
    "bf16": Case(bfloat16),
    "fp8, scale per row, a power of two": Case(per_row_power_of_two),
    "the same, embeddings and logits, too": Case(per_row_power_of_two, with_tables=True),
    "fp8, scale per row": Case(per_row),
    "fp8, scale per matrix": Case(per_matrix),
    "int8, scale per row": Case(int8_per_row),
    "fp8 per row, activations in fp8 per token": Case(per_row, activations=per_row),
}


def rounded(model: LoadedModel, case: Case) -> LoadedModel:
    """Its matrices in float32."""
    weights = dict(model.weights)
    for name, tensor in model.weights.items():
        if tensor.num_rows > 1 and (case.with_tables or name not in TABLES):
            values = case.weights(tensor.dequantize())
            weights[name] = WeightTensor(name, tensor.num_rows, tensor.num_cols, WeightFormat.F32, values)
    return replace(model, weights=weights)


def logits_of(model: LoadedModel, token_ids: list[int], activations: Callable[[F32], F32] | None) -> F32:
    """[num_tokens, vocab_size]"""
    sizes = {"num_blocks": len(token_ids) // 16 + 2, "block_size": 16, "max_rows": 1}
    executor = ReferenceExecutor(
        model, architectures.describe(model.spec), **sizes, max_step_tokens=len(token_ids), max_model_len=len(token_ids) + 1
    )
    return forward(executor, token_ids, activations or exactly, exactly)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    model = load_model(resolve(args.model, default_cache_dir()))
    token_ids = load_tokenizer(model.tokenizer_source).encode(args.text.read_text(), add_special_tokens=False)[: args.tokens]
    exact = logits_of(model, token_ids, None)
    base = negative_log_likelihood(exact, token_ids)
    results = {}
    for name in args.cases:
        logits = logits_of(rounded(model, CASES[name]), token_ids, CASES[name].activations)
        error = logits - exact
        error -= error.mean(-1, keepdims=True)
        results[name] = {
            "rms": round(float(np.sqrt((error**2).mean())), 4),
            "perplexity_ratio": round(float(np.exp(negative_log_likelihood(logits, token_ids) - base)), 5),
            "argmax_changed": int((logits.argmax(-1) != exact.argmax(-1)).sum()),
        }
        print(f"{name:44} {results[name]}", flush=True)
    about = {"model": args.model, "tokens": len(token_ids), "perplexity": round(float(np.exp(base)), 4)}
    print(json.dumps({"benchmark": "weight_rounding", **about, "results": results}))


if __name__ == "__main__":
    main()
