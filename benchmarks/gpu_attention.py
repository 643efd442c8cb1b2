"""How near does the cuda backend's attention come to what the GPU can do: decodes, prefills, and steps with both?

Rows over a paged cache of random keys and values, in shuffled blocks, bf16 and int8, deterministic and not, for the heads of
SmolLM2-135M, Qwen2.5-1.5B and Llama-3.1-8B. Layers are used in turn, more than the caches hold, as in a model. The bound is the
larger of the operations (scores and weighted sums of the positions that each query sees) at the peak of a bf16 product and the
bytes (keys, values, queries and answers once) at the speed of a copy, both measured in between; `share` is the bound over the
time. Decodes are bound by memory, long prefills by the matrix units. A `captured decode` has the grid of a captured graph, made
for rows of 32,768 positions. `rotate and write` is the kernel before the attention. `flashinfer auto` is FlashInfer's
attention for the same step, planned beforehand, if installed and supported; `flashinfer fa2` uses its kernels for every GPU.
Shares printed during the run use the best peaks so far, those in the JSON object the best of the whole run.

    python benchmarks/gpu_attention.py
    python benchmarks/gpu_attention.py --models llama-8b --kinds bf16 --modes default --block-sizes 16 64
    python benchmarks/gpu_attention.py --self-test        # tiny, on a CPU, in Triton's interpreter: shows that it runs

At the end it prints tables, and in the last line one JSON object. Without a usable GPU it says why and ends with 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_peaks import DeviceClock, GpuPeaks, Measured, context, require_gpu, use_interpreter
from gpu_tables import Result, above_the_bound, bound_by, by_model, figure, show
from gpu_work import Work
from printed import percent, table

from penstock.types.kv_dtype import KvDtype

if TYPE_CHECKING:
    import torch

    from penstock.backends.cuda.kv_cache import KvLayer
    from penstock.backends.cuda.step import StepTensors

COPIES_BYTES = 512 << 20
"""Size of the KV that the layers read: several times the largest cache."""
MAX_LAYERS = 32
LAYERS_OF_PREFILLS = 4
"""Long launches, for which fewer repetitions suffice."""
CAPTURED_LEN = 32_768
MODES = ("default", "deterministic")


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Case:
    """The rows of a step: `decodes` with one query each, `prefills` with `query_len`, all after `context_len` positions."""

    name: str
    context_len: int
    decodes: int = 0
    prefills: int = 0
    query_len: int = 0
    is_captured: bool = False

    @property
    def query_lens(self) -> list[int]:
        return [1] * self.decodes + [self.query_len] * self.prefills

    @property
    def num_visible(self) -> int:
        """Total positions that the queries see."""
        return sum(n * self.context_len + n * (n + 1) // 2 for n in self.query_lens)


MODELS = {
    "smollm2-135m": Heads(9, 3, 64),
    "qwen2.5-1.5b": Heads(12, 2, 128),
    "llama-8b": Heads(32, 8, 128),
}
CASES = (
    Case("decode", 1023, decodes=1),
    Case("decode", 32_767, decodes=1),
    Case("decode", 1023, decodes=16),
    Case("decode", 1023, decodes=64),
    Case("captured decode", 1023, decodes=64, is_captured=True),
    Case("decode", 8191, decodes=64),
    Case("decode", 1023, decodes=256),
    Case("prefill", 0, prefills=1, query_len=2048),
    Case("prefill", 0, prefills=4, query_len=2048),
    Case("prefill", 0, prefills=1, query_len=8192),
    Case("chunk", 7680, prefills=1, query_len=512),
    Case("chunk", 30_720, prefills=1, query_len=2048),
    Case("mixed", 1023, decodes=63, prefills=1, query_len=512),
)
TINY = {"tiny": Heads(2, 1, 32)}
TINY_CASES = (
    Case("decode", 70, decodes=1),
    Case("prefill", 3, prefills=1, query_len=5),
    Case("mixed", 5, decodes=1, prefills=1, query_len=2),
)


def make_step(case: Case, block_size: int, device: str) -> StepTensors:
    """Rows whose blocks lie in no order, none of them shared."""
    import torch

    from penstock.backends.cuda.step import StepTensors

    lens = torch.tensor(case.query_lens)
    num_rows, num_tokens = len(lens), int(lens.sum())
    max_seq_len = case.context_len + max(case.query_lens)
    per_row = -(-max_seq_len // block_size)
    tables = 1 + torch.randperm(num_rows * per_row).view(num_rows, per_row)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    rows = torch.repeat_interleave(torch.arange(num_rows), lens)
    positions = case.context_len + torch.arange(num_tokens) - starts[rows]
    slots = tables[rows, positions // block_size] * block_size + positions % block_size

    def place(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).to(device)

    return StepTensors(
        token_ids=place(torch.zeros(num_tokens)),
        positions=place(positions),
        row_of_token=place(rows),
        slot_mapping=slots.to(device),
        query_start_loc=place(starts),
        context_lens=place(torch.full((num_rows,), case.context_len)),
        block_tables=place(tables),
        sample_tokens=place(starts[1:] - 1),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_samples=num_rows,
        max_query_len=max(case.query_lens),
        max_seq_len=CAPTURED_LEN if case.is_captured else max_seq_len,
    )


def position_bytes(heads: Heads, kind: KvDtype) -> int:
    """Bytes of one position's keys and values in one layer."""
    from penstock.backends.cuda.supported import block_bytes
    from penstock.models.program import KvShape, Program

    return block_bytes(Program((), (), (KvShape(heads.num_kv_heads, heads.head_dim),), 0), kind, 1)


def make_layers(case: Case, heads: Heads, kind: KvDtype, block_size: int, dtype: torch.dtype, device: str) -> list[KvLayer]:
    """Layers of random numbers, as many as exceed the caches."""
    from penstock.backends.cuda.kv_cache import PagedKvCache

    num_rows = len(case.query_lens)
    num_blocks = 1 + num_rows * -(-(case.context_len + max(case.query_lens)) // block_size)
    most = (LAYERS_OF_PREFILLS if case.prefills else MAX_LAYERS) if device == "cuda" else 1
    wanted = -(-COPIES_BYTES // (num_blocks * block_size * position_bytes(heads, kind)))
    cache = PagedKvCache(
        num_layers=min(most, wanted),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        kv_dtype=kind,
        dtype=dtype,
        device=device,
    )
    layers = [cache.layer(i) for i in range(min(most, wanted))]
    for layer in layers:
        for values, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
            if scales is None:
                values.normal_()
            else:
                values.random_(-127, 128)
                scales.fill_(2.0**-6)
    return layers


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that all cases have in common."""

    clock: DeviceClock
    dtype: torch.dtype

    def measure(self, case: Case, heads: Heads, kind: KvDtype, mode: str, block_size: int) -> dict[str, Measured]:
        """The attention of one layer, and the kernel before it."""
        import torch

        device, dtype = self.clock.device, self.dtype
        step = make_step(case, block_size, device)
        layers = make_layers(case, heads, kind, block_size, dtype, device)
        widths = [n * heads.head_dim for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        q, k, v = torch.randn((step.num_tokens, sum(widths)), dtype=dtype, device=device).split(widths, 1)
        kv_bytes = position_bytes(heads, kind)
        num_read = sum(case.context_len + n for n in case.query_lens)
        work = Work(
            4.0 * case.num_visible * heads.num_heads * heads.head_dim,
            num_read * kv_bytes + 2 * step.num_tokens * widths[0] * dtype.itemsize,
        )
        found = {"attention": Measured(work, self.clock.seconds(self._attentions(q, layers, step, heads, mode)))}
        for backend in ("auto", "fa2") if case.prefills else ("auto",):
            if launches := self._flashinfer(q, layers, step, case, heads, kind, mode, backend):
                found[f"flashinfer {backend}"] = Measured(work, self.clock.seconds(launches))
        moved = Work(0.0, step.num_tokens * (kv_bytes + (widths[0] + sum(widths)) * dtype.itemsize))
        writes = self._writes(q, k, v, layers, step, heads)
        return found | {"rotate and write": Measured(moved, self.clock.seconds(writes))}

    def _attentions(
        self, q: torch.Tensor, layers: Sequence[KvLayer], step: StepTensors, heads: Heads, mode: str
    ) -> list[Callable[[], None]]:
        import torch

        from penstock.backends.cuda.kernels.attention import AttentionWorkspace, paged_attention

        deterministic = mode == "deterministic"
        workspace = AttentionWorkspace.allocate(
            max_rows=step.num_rows,
            max_model_len=step.max_seq_len,
            device=q.device,
            deterministic=deterministic,
            **asdict(heads),
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rest = {"window": 0, "softcap": 0.0, "workspace": workspace, "deterministic": deterministic, **asdict(heads)}
        scale = heads.head_dim**-0.5
        return [partial(paged_attention, out, q, layer, step, scale=scale, **rest) for layer in layers]

    def _flashinfer(
        self,
        q: torch.Tensor,
        layers: Sequence[KvLayer],
        step: StepTensors,
        case: Case,
        heads: Heads,
        kind: KvDtype,
        mode: str,
        backend: str,
    ) -> list[Callable[[], None]]:
        """Return None if it is missing or does not support this; print failures."""
        import numpy as np
        import torch

        from penstock.backends.cuda.attention import AttentionShape, RowLens
        from penstock.backends.cuda.flashinfer_attention import FlashInferAttention, import_package, is_installed, why_unfit
        from penstock.backends.cuda.stream import open_stream

        shape = AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.head_dim**-0.5)
        is_int8 = kind is KvDtype.INT8
        if not is_installed() or why_unfit([shape], self.dtype, is_int8_kv=is_int8, deterministic=mode == "deterministic"):
            return []
        package = import_package()
        is_decode = not case.prefills
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts = np.cumsum([0, *case.query_lens], dtype=np.int32)
        try:
            attention = FlashInferAttention(
                package,
                shape,
                dtype=self.dtype,
                block_size=layers[0].block_size,
                max_rows=step.num_rows,
                max_blocks=step.block_tables.shape[1],
                graph_rows=[step.num_rows] if is_decode else [],
                stream=open_stream(q.device, spins=True),
                device=q.device,
                backend=backend,
            )
            rows = RowLens(starts, np.full(step.num_rows, case.context_len, np.int32))
            attention.plan(rows, is_captured=is_decode)
            attention.begin(step)
            launches = [partial(attention.attend, out, q, layer, step, shape) for layer in layers]
            launches[0]()
        except Exception as error:
            print(f"flashinfer fails: {package if isinstance(package, str) else error!r}", file=sys.stderr, flush=True)
            return []
        return launches

    def _writes(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layers: Sequence[KvLayer],
        step: StepTensors,
        heads: Heads,
    ) -> list[Callable[[], None]]:
        from penstock.backends.cuda.kernels.rope_kv import rope_q_k_and_write, rope_table

        half = heads.head_dim // 2
        num_positions = int(step.positions.max()) + 1
        rotation = rope_table([1e4 ** (-i / half) for i in range(half)], 1.0, num_positions, q.device)
        counts = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads}
        return [partial(rope_q_k_and_write, q, k, v, layer, step, rotation, **counts) for layer in layers]


def run(models: dict[str, Heads], cases: Sequence[Case], args: argparse.Namespace, device: str) -> dict[str, Any]:
    """All cases; prints one line for each."""
    import torch

    clock = DeviceClock(device)
    peaks = GpuPeaks(clock)
    bench = Bench(clock, torch.bfloat16 if device == "cuda" else torch.float32)
    results: list[tuple[dict[str, Any], dict[str, Measured]]] = []
    for (model, heads), case in itertools.product(models.items(), cases):
        peaks.sample()
        for kind, mode, block_size in itertools.product(map(KvDtype, args.kinds), args.modes, args.block_sizes):
            found = bench.measure(case, heads, kind, mode, block_size)
            shares = ", ".join(
                f"{name} {peaks.share(m) * 100:.0f}% of the bound, {m.median_s * 1e6:.2f} us" for name, m in found.items()
            )
            shape = f"{case.decodes} decodes + {case.prefills} x {case.query_len} after {case.context_len}"
            print(f"{model:13} {case.name:15} {shape:36} {kind:5} {mode:14} blocks of {block_size:3}: {shares}", flush=True)
            about = {"model": model, **asdict(case), "kind": kind.value, "mode": mode, "block_size": block_size}
            results.append((about, found))
    return {
        "benchmark": "gpu_attention",
        **context(device, is_self_test=args.self_test),
        "peaks": peaks.summary(),
        "cases": [about | {name: peaks.figures(m) for name, m in found.items()} for about, found in results],
    }


def tables(result: Result) -> dict[str, list[str]]:
    """Return the paragraphs of each model and mode, by title."""
    found = {}
    for title, cases in by_model(result["cases"]):
        rows = [_row(case) for case in cases]
        head = ["attention of a layer", "keys and values", "us (range)", "GB/s", "TFLOP/s", "bound by"]
        head += ["share of the bound", "FlashInfer's", "rotate and write"]
        named = zip(rows, cases, strict=True)
        shares = [share for row, case in named for share in _shares(" ".join(row[:2]), case)]
        found[title] = [*above_the_bound(shares), table(head, rows)]
    return found


def _shares(name: str, case: Result) -> list[tuple[str, float]]:
    """Return (name, share) of all that was measured of a case: also of what stands beside our attention."""
    measured = [(who, found["share"]) for who, found in case.items() if isinstance(found, Mapping)]
    return [(name if who == "attention" else f"{name}, {who}", share) for who, share in measured]


def _row(case: Result) -> list[str]:
    counts = ((case["decodes"], 1), (case["prefills"], case["query_len"]))
    kinds = [f"{rows} x {query_len}" for rows, query_len in counts if rows]
    ours, writes = case["attention"], case["rotate and write"]
    flashinfer = (f"{percent(case[who]['share'])} ({who.split()[1]})" for who in case if who.startswith("flashinfer "))
    return [
        f"{case['name']}, {' and '.join(kinds)} after {case['context_len']}",
        f"{case['kind']}, blocks of {case['block_size']}",
        f"{figure(ours['us'])} ({figure(ours['us_range'][0])} to {figure(ours['us_range'][1])})",
        figure(ours["gbs"]),
        figure(ours["tflops"]),
        bound_by(ours),
        f"**{percent(ours['share'])}**",
        ", ".join(flashinfer),
        f"{figure(writes['us'])} us, {percent(writes['share'])}",
    ]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=["int8", "bf16"], default=["int8", "bf16"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16])
    parser.add_argument("--self-test", action="store_true", help="tiny steps on a CPU; its figures mean nothing")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    if args.self_test:
        result = run(TINY, TINY_CASES, args, use_interpreter())
    else:
        require_gpu()
        result = run({name: MODELS[name] for name in args.models}, CASES, args, "cuda")
    show(result, tables)


if __name__ == "__main__":
    sys.exit(main())
