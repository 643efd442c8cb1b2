"""A program that compiles every kernel of steps of real shapes, for a GPU that need not be there. `test_compile.py` runs it.

    python tests/backends/cuda/compile_kernels.py 90 [--resources]

The argument is a compute capability. Launches are made as in a step, on tensors of the CPU, and end when the kernel is
compiled: Triton and its assembler need no device. Prints one JSON object for each kernel and set of constants, with
`--resources` also what a thread of it takes. Not with TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.lowering import CompiledProgram
from penstock.backends.cuda.step import StepTensors
from penstock.models import registry
from penstock.models.formats import BLOCKS, WeightFormat
from penstock.models.weights import LoadedModel, WeightTensor
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ModelSpec
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams

BLOCK_SIZE = 16
MAX_LEN = 2048
MAX_TOKENS = 512
MAX_ROWS = 64
STEPS = (((1, 1024),) * 64, ((1, 100), (1, 1200)), ((300, 0),), ((1, 500), (200, 700)), ((1, 0),))
"""(query, context) of rows: decode, prompt, both, one token."""


def small(name: str) -> ModelSpec:
    """One layer with the widths of a real model that kernels are made for; the others, which are only counted, are less."""
    sizes = {
        "smollm2-135m": (576, 9, 3, 64, False, "llama"),
        "qwen2.5-1.5b": (1536, 12, 2, 128, True, "qwen2"),
        "llama-8b": (4096, 32, 8, 128, False, "llama"),
    }
    hidden, heads, kv_heads, head_dim, has_bias, architecture = sizes[name]
    return ModelSpec(
        architecture=architecture,
        vocab_size=1024,
        hidden_size=hidden,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=1536,
        norm_eps=1e-5,
        rope_inv_freq=tuple(10000.0 ** (-i / (head_dim // 2)) for i in range(head_dim // 2)),
        max_model_len=MAX_LEN,
        tie_word_embeddings=False,
        has_qkv_bias=has_bias,
    )


def weights(spec: ModelSpec, fmt: WeightFormat) -> dict[str, WeightTensor]:
    """Zeros, vectors of ones."""
    q, kv, h, m = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
    shapes = {"embed": (spec.vocab_size, h), "output": (spec.vocab_size, h)}
    shapes |= {f"layers.0.{name}": shape for name, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q)))}
    shapes |= {f"layers.0.{name}": shape for name, shape in (("gate", (m, h)), ("up", (m, h)), ("down", (h, m)))}
    vectors = {"norm": h, "layers.0.attn_norm": h, "layers.0.mlp_norm": h}
    if spec.has_qkv_bias:
        vectors |= {"layers.0.q_bias": q, "layers.0.k_bias": kv, "layers.0.v_bias": kv}
    made = {name: matrix(name, rows, cols, fmt) for name, (rows, cols) in shapes.items()}
    ones = {name: WeightTensor(name, 1, n, WeightFormat.F32, np.ones((1, n), np.float32)) for name, n in vectors.items()}
    return made | ones


def matrix(name: str, num_rows: int, num_cols: int, fmt: WeightFormat) -> WeightTensor:
    if fmt is WeightFormat.BF16:
        return WeightTensor(name, num_rows, num_cols, fmt, np.zeros((num_rows, num_cols), np.uint16))
    cols, num_bytes = BLOCKS[fmt]
    return WeightTensor(name, num_rows, num_cols, fmt, np.zeros((num_rows, num_cols // cols * num_bytes), np.uint8))


def step_of(rows: tuple[tuple[int, int], ...]) -> StepTensors:
    queries = np.array([query for query, _ in rows], np.int32)
    contexts = np.array([context for _, context in rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    num_tokens = int(starts[-1])
    return StepTensors(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.zeros(num_tokens, dtype=torch.int32),
        row_of_token=torch.zeros(num_tokens, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        query_start_loc=torch.from_numpy(starts),
        context_lens=torch.from_numpy(contexts),
        block_tables=torch.zeros((len(rows), MAX_LEN // BLOCK_SIZE), dtype=torch.int32),
        sample_tokens=torch.zeros(len(rows), dtype=torch.int32),
        num_tokens=num_tokens,
        num_rows=len(rows),
        num_samples=len(rows),
        max_query_len=int(queries.max()),
        max_seq_len=int((queries + contexts).max()),
    )


class AbsentDevice:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Compiled:
    """Stands for `JITFunction.run`: compiles, and launches nothing."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        """Hash -> kernel."""
        self._run = JITFunction.run

    def install(self) -> None:
        compiled = self

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            del warmup
            kernel = compiled._run(function, *args, grid=grid, warmup=True, **kwargs)
            compiled.found[kernel.hash] = kernel
            return kernel

        JITFunction.run = run  # type: ignore[method-assign]


def compile_steps(spec: ModelSpec, fmt: WeightFormat, kv_dtype: KvDtype, *, deterministic: bool) -> None:
    program = registry.describe(spec)
    num_blocks = 1 + MAX_LEN // BLOCK_SIZE
    cache = PagedKvCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=kv_dtype,
        dtype=torch.bfloat16,
        device="cpu",
    )
    compiled = CompiledProgram(
        program,
        weights(spec, fmt),
        cache,
        dtype=torch.bfloat16,
        device="cpu",
        max_tokens=MAX_TOKENS,
        max_samples=MAX_ROWS,
        num_positions=MAX_LEN,
        deterministic=deterministic,
    )
    for rows in STEPS:
        compiled.run(step_of(rows))


def compile_sampling(spec: ModelSpec) -> None:
    """A whole step of the executor, whose rows ask for all that a sampler has kernels for."""
    executor = CudaExecutor(
        LoadedModel(spec.architecture, spec, weights(spec, WeightFormat.BF16), Path(), None, None, (), Path()),
        registry.describe(spec),
        num_blocks=8,
        block_size=BLOCK_SIZE,
        max_rows=4,
        max_step_tokens=64,
        max_model_len=64,
        device="cpu",
        dtype=torch.bfloat16,
    )
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, logprobs=5, frequency_penalty=0.5)
    admit = AdmitRow("r", tuple(range(9)), 9, (1,), 0, params)
    plan = StepPlan(0, 0, (admit,), (RowPlan("r", 0, 9, (), True),), ())
    executor.collect(executor.submit(plan))
    executor.close()


def cases() -> Iterator[tuple[str, WeightFormat, KvDtype, bool]]:
    for deterministic in (False, True):
        yield "llama-8b", WeightFormat.BF16, KvDtype.BF16, deterministic
        yield "llama-8b", WeightFormat.Q4_1, KvDtype.BF16, deterministic
        yield "qwen2.5-1.5b", WeightFormat.Q8_0, KvDtype.INT8, deterministic
        yield "smollm2-135m", WeightFormat.Q4_0, KvDtype.BF16, deterministic


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int)
    parser.add_argument("--resources", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("with TRITON_INTERPRET nothing is compiled")
    driver.set_active(AbsentDevice(args.capability))
    compiled = Compiled()
    compiled.install()
    for model, fmt, kv_dtype, deterministic in cases():
        compile_steps(small(model), fmt, kv_dtype, deterministic=deterministic)
    compile_sampling(small("smollm2-135m"))
    for kernel in compiled.found.values():
        meta = kernel.metadata
        line = {
            "kernel": meta.name,
            "warps": meta.num_warps,
            "shared_bytes": meta.shared,
            "cubin_bytes": len(kernel.asm["cubin"]),
        }
        print(json.dumps(line | (resources(kernel) if args.resources else {})))


if __name__ == "__main__":
    main()
