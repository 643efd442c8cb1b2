"""How near do the cuda backend's products come to what the GPU can do, for every shape of a model and number of tokens?

Every product of SmolLM2-135M, Qwen2.5-1.5B and Llama-3.1-8B, with random weights in bf16, fp8 with a scale per row, int8 and
int4 (as Q8_0 and Q4_0 are held) and int4 with offsets (Q4_K), as the backend computes it, deterministic and not. Copies of a
matrix are used in turn, more than the caches hold, as in a model. The bound is the larger of two times: the operations at the
peak of a bf16 product, and the bytes (stored weights, activations and result once) at the speed of a copy. Both peaks are
measured in between; `share` is the bound over the time. Few tokens are bound by memory, many by the matrix units. Shares
printed during the run use the best peaks so far, those in the JSON object the best of the whole run.

    python benchmarks/gpu_gemm.py
    python benchmarks/gpu_gemm.py --models llama-8b --kinds int4 --tokens 1 16 64 --modes default
    python benchmarks/gpu_gemm.py --self-test        # tiny, on a CPU, in Triton's interpreter: shows that it runs

At the end it prints tables, and in the last line one JSON object. Without a usable GPU it says why and ends with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_peaks import DeviceClock, GpuPeaks, Measured, context, require_gpu, use_interpreter
from gpu_tables import Result, above_the_bound, bound_by, by_model, figure, show
from gpu_work import Work
from printed import percent, table

if TYPE_CHECKING:
    import torch

    from penstock.backends.cuda.linear import Linear
    from penstock.backends.cuda.weights import Matrix

TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
COPIES_BYTES = 512 << 20
"""Size of the copies of one matrix: several times the largest cache."""
MAX_LAUNCHES = 512
LAUNCHES_OF_MANY = 8
MANY_TOKENS = 256
"""Launches from this size on need fewer repetitions."""
MODES = ("default", "deterministic")
KINDS = {"bf16": (16, False), "fp8": (8, False), "int8": (8, False), "int4": (4, False), "int4_offset": (4, True)}
"""Bits, and whether there are offsets."""


@dataclass(frozen=True, slots=True)
class Product:
    name: str
    num_cols: int
    num_rows: int


MODELS = {
    "smollm2-135m": (
        Product("qkv", 576, 960),
        Product("o", 576, 576),
        Product("gate_up", 576, 3072),
        Product("down", 1536, 576),
        Product("logits", 576, 49_152),
    ),
    "qwen2.5-1.5b": (
        Product("qkv", 1536, 2048),
        Product("o", 1536, 1536),
        Product("gate_up", 1536, 17_920),
        Product("down", 8960, 1536),
        Product("logits", 1536, 151_936),
    ),
    "llama-8b": (
        Product("qkv", 4096, 6144),
        Product("o", 4096, 4096),
        Product("gate_up", 4096, 28_672),
        Product("down", 14_336, 4096),
        Product("logits", 4096, 128_256),
    ),
}
TINY = {"tiny": (Product("o", 96, 130), Product("logits", 64, 40))}
TINY_TOKENS = (1, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the result."""

    model: str
    product: Product
    kind: str
    mode: str


def random_matrix(product: Product, kind: str, dtype: torch.dtype, device: str) -> Matrix:
    """Made on the device, of weights as large as models have them."""
    import torch

    from penstock.backends.cuda.weights import STEP_COLS, TILE_ROWS, DenseMatrix, QuantisedMatrix

    bits, has_offset = KINDS[kind]
    if bits == 16:
        return DenseMatrix(torch.empty((product.num_rows, product.num_cols), dtype=dtype, device=device).normal_(std=0.02))
    num_tiles, num_steps = -(-product.num_rows // TILE_ROWS), -(-product.num_cols // STEP_COLS)
    brick = (TILE_ROWS, 16) if bits == 4 else (2, TILE_ROWS, 16)
    values = torch.randint(-(1 << 15), 1 << 15, (num_tiles, num_steps, *brick), dtype=torch.int16, device=device)
    if kind == "fp8":
        values &= ~0x0101  # no code is NaN
        row_scales = torch.full((num_tiles * TILE_ROWS,), 0.02 / 104, device=device)  # over the spread of the numbers
        return QuantisedMatrix(
            product.num_rows, product.num_cols, bits, 0, values, scales=None, row_scales=row_scales, is_float=True
        )
    shape = (num_steps, num_tiles * TILE_ROWS, 2)
    scale_dtype = torch.float32 if dtype is torch.float32 else torch.float16
    scales = torch.full(shape, 0.02 / (4.6 if bits == 4 else 73), dtype=scale_dtype, device=device)
    offsets = 0.5 * scales if has_offset else None
    return QuantisedMatrix(product.num_rows, product.num_cols, bits, 32, values, scales, offsets)


def make_linears(case: Case, max_tokens: int, dtype: torch.dtype, device: str, copies_bytes: int) -> list[Linear]:
    """As many as exceed the caches, each with weights of its own."""
    import torch

    from penstock.backends.cuda.linear import Linear, Workspace

    workspace = Workspace(torch.device(device), dtype)
    linears: list[Linear] = []
    while not linears or (len(linears) < MAX_LAUNCHES and sum(linear.num_bytes for linear in linears) < copies_bytes):
        matrix = random_matrix(case.product, case.kind, dtype, device)
        linears.append(Linear([matrix], None, workspace, deterministic=case.mode == "deterministic"))
    linears[0].reserve(max_tokens)
    workspace.allocate()
    return linears


def measure(
    case: Case, tokens: Sequence[int], clock: DeviceClock, dtype: torch.dtype, copies_bytes: int
) -> dict[int, Measured]:
    """By number of tokens."""
    import torch

    linears = make_linears(case, max(tokens), dtype, clock.device, copies_bytes)
    product, found = case.product, {}
    x = torch.randn((max(tokens), product.num_cols), dtype=dtype, device=clock.device)
    out = torch.empty((max(tokens), product.num_rows), dtype=dtype, device=clock.device)
    for count in tokens:
        used = linears[:LAUNCHES_OF_MANY] if count >= MANY_TOKENS else linears
        work = Work(
            2.0 * count * product.num_rows * product.num_cols,
            linears[0].num_bytes + count * (product.num_rows + product.num_cols) * dtype.itemsize,
        )
        found[count] = Measured(work, clock.seconds([_launch(linear, out[:count], x[:count]) for linear in used]))
    return found


def _launch(linear: Linear, out: torch.Tensor, x: torch.Tensor) -> Callable[[], None]:
    return lambda: linear(out, x)


def run(models: dict[str, tuple[Product, ...]], args: argparse.Namespace, device: str) -> dict[str, Any]:
    """All cases; prints one line for each."""
    import torch

    clock = DeviceClock(device)
    peaks = GpuPeaks(clock)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    copies_bytes = COPIES_BYTES if device == "cuda" else 1
    results: list[tuple[Case, dict[int, Measured]]] = []
    for model, products in models.items():
        for product in products:
            peaks.sample()
            for case in (Case(model, product, kind, mode) for kind in args.kinds for mode in args.modes):
                by_tokens = measure(case, args.tokens, clock, dtype, copies_bytes)
                shares = " ".join(f"{count}:{peaks.share(found) * 100:.0f}%" for count, found in by_tokens.items())
                print(f"{model:13} {product.name:8} {case.kind:12} {case.mode:14} {shares}", flush=True)
                results.append((case, by_tokens))
    return {
        "benchmark": "gpu_gemm",
        **context(device, is_self_test=args.self_test),
        "peaks": peaks.summary(),
        "products": [
            {"model": case.model, "product": case.product.name, "kind": case.kind, "mode": case.mode}
            | {"by_tokens": {count: peaks.figures(found) for count, found in by_tokens.items()}}
            for case, by_tokens in results
        ],
    }


def tables(result: Result) -> dict[str, list[str]]:
    """Return the paragraphs of each model and mode, by title."""
    found = {}
    for title, products in by_model(result["products"]):
        shares = (
            (f"{product['product']} {product['kind']} x {count}", figures["share"])
            for product in products
            for count, figures in product["by_tokens"].items()
        )
        found[title] = [*above_the_bound(shares), _table(products)]
    return found


def _table(products: Sequence[Result]) -> str:
    counts = list(products[0]["by_tokens"])
    rows = []
    for product in products:
        by_tokens = product["by_tokens"]
        shares = [100 * by_tokens[count]["share"] for count in counts]
        is_bold = [bound_by(by_tokens[count]) != "memory" for count in counts]
        cells = [f"**{share:.0f}**" if bold else f"{share:.0f}" for share, bold in zip(shares, is_bold, strict=True)]
        spread = max((figures["us_range"][1] - figures["us_range"][0]) / figures["us"] for figures in by_tokens.values())
        speeds = [figure(by_tokens[counts[0]]["us"]), figure(by_tokens[counts[-1]]["tflops"])]
        rows.append([f"{product['product']} {product['kind']}", *cells, *speeds, percent(spread)])
    ends = [f"us ({counts[0]})", f"TFLOP/s ({counts[-1]})"]
    return table(["% of the bound", *counts, *ends, "widest spread"], rows)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--self-test", action="store_true", help="tiny products on a CPU; its figures mean nothing")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    if args.self_test:
        args.tokens = list(TINY_TOKENS)
        result = run(TINY, args, use_interpreter())
    else:
        require_gpu()
        result = run({name: MODELS[name] for name in args.models}, args, "cuda")
    show(result, tables)


if __name__ == "__main__":
    sys.exit(main())
