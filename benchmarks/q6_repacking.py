"""How much error does repacking Q6_K's two scales of 16 columns as one of 32 add? Compares ways to choose that scale.

In NumPy, on the first rows of the Q6_K matrices of a GGUF file; `quarter` is what native/blocks.cpp does. This is what chose it
(docs/kernels.md).

    python benchmarks/q6_repacking.py MODEL.gguf

The last line printed is one JSON object: rms errors as shares of the weights' rms, and Q6_K's own rounding beside them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import WeightFormat
from penstock.models.gguf import load_gguf
from penstock.models.weights import WeightTensor

F64 = NDArray[np.float64]


def repacking_error(weights: F64, scales: F64) -> F64:
    """Mean square error of each group, with its scale in f16 and 8-bit weights. [num_groups]"""
    rounded = np.where(scales == 0, 1, scales).astype(np.float16).astype(np.float64)
    q = np.clip(np.rint(weights / rounded), -128, 127)
    mean: F64 = ((q * rounded - weights) ** 2).mean(-1)
    return mean


def measure(tensor: WeightTensor, num_rows: int) -> dict[str, float]:
    part = WeightTensor(tensor.name, num_rows, tensor.num_cols, tensor.format, tensor.data[:num_rows])
    weights = part.dequantize().astype(np.float64).reshape(-1, 32)
    blocks = np.ascontiguousarray(part.data, np.uint8).reshape(-1, 210)
    d = blocks[:, 208:].copy().view(np.float16).astype(np.float64)
    steps = (d * blocks[:, 192:208].copy().view(np.int8)).reshape(-1, 2)
    order = np.abs(steps).argsort(-1)
    small, large = (np.take_along_axis(steps, order[:, i : i + 1], 1) for i in (0, 1))
    largest = np.abs(weights).max(-1, keepdims=True)
    candidates = [large / 4, *(large * k / 16 for k in (3.9, 4.2, 4.5, 5)), *(small / k for k in (1, 2, 3, 4))]
    errors = [np.where(np.abs(c[:, 0]) * 128 >= largest[:, 0] * 0.995, repacking_error(weights, c), np.inf) for c in candidates]
    power = (weights**2).mean()
    shares = {
        "own": (steps**2).mean() / 12,
        "largest": repacking_error(weights, largest / 127).mean(),
        "quarter": repacking_error(weights, large / 4).mean(),
        "best_of_nine": np.min(errors, axis=0).mean(),
    }
    return {name: round(float(np.sqrt(value / power)), 5) for name, value in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=256, help="of each matrix")
    parser.add_argument("--matrices", type=int, default=4, help="how many of the largest")
    args = parser.parse_args()
    weights = [tensor for tensor in load_gguf(args.model).weights.values() if tensor.format is WeightFormat.Q6_K]
    chosen = sorted(weights, key=lambda tensor: -tensor.num_bytes)[: args.matrices]
    results = {tensor.name: measure(tensor, min(args.rows, tensor.num_rows)) for tensor in chosen}
    for name, figures in results.items():
        print(f"{name:20} {figures}")
    print(json.dumps({"benchmark": "q6_repacking", "rows": args.rows, "results": results}))


if __name__ == "__main__":
    main()
