"""A program that compiles every kernel of steps of real shapes, for a GPU that need not be there. `test_compile.py` runs it.

    python tests/backends/cuda/compile_kernels.py 90 [--all] [--resources]

The argument is a compute capability. Launches are made as in a step, on tensors of the CPU, and end when the kernel is
compiled: Triton and its assembler need no device. Prints one JSON object for each kernel and set of constants, with
`--resources` also what a thread of it takes. `--all`: every format of weights and every shape of heads, which takes ten times
as long. Not with TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from penstock.backends.cuda.adapters import AdapterFormat
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.kernels import activation, dequantise, norm, texts
from penstock.backends.cuda.kernels.page_indices import page_indices
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.lowering import CompiledProgram
from penstock.backends.cuda.step import AdaptedRows, StepTensors
from penstock.backends.cuda.supported import ACTIVATIONS
from penstock.backends.cuda.weights import DenseMatrix
from penstock.models import architectures
from penstock.models.formats import BLOCKS, WeightFormat
from penstock.models.program import TextAttention
from penstock.models.weights import BlockScales, LoadedModel, WeightTensor
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ExpertsMlp, LayerSpec, ModelSpec, spec_of_equal_layers
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.backends.cuda.absent_gpu import SHARED_BYTES, AbsentGpu

BLOCK_SIZE = 16
MAX_LEN = 2048
MAX_TOKENS = 512
MAX_ROWS = 64
STEPS = (((1, 1024),) * 64, ((1, 100), (1, 1200)), ((300, 0),), ((1, 500), (200, 700)), ((1, 0),))
"""(query, context) of rows: decode, prompt, both, one token."""


MODELS = {
    "smollm2-135m": (576, 9, 3, 64, False),
    "qwen2.5-1.5b": (1536, 12, 2, 128, True),
    "llama-8b": (4096, 32, 8, 128, False),
}
"""Hidden size, heads, KV heads, their size, whether q, k and v have a bias."""
HEADS = ((64, 1), (80, 4), (96, 3), (96, 8), (128, 7), (128, 32), (256, 1), (256, 8))
"""Sizes of heads, and how many share a KV head."""
Case = tuple[ModelSpec, WeightFormat, KvDtype]


def small(hidden: int, heads: int, kv_heads: int, head_dim: int, has_bias: bool) -> ModelSpec:
    """One layer with the widths of a real model that kernels are made for; the others, which are only counted, are less."""
    return spec_of_equal_layers(
        architecture="llama",
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


def mixture(num_experts: int, num_chosen: int) -> ModelSpec:
    """The same with sinks, and with experts, which are narrow: kernels are not made for their width."""
    mlp = ExpertsMlp(num_experts=num_experts, num_experts_per_token=num_chosen, intermediate_size=64)
    dense = small(1024, 8, 2, 128, False)
    attention = replace(dense.layers[0].attention, has_sinks=True)
    return replace(dense, architecture="mixtral", layers=(LayerSpec(mixer=attention, mlp=mlp),))


def weights(spec: ModelSpec, fmt: WeightFormat) -> dict[str, WeightTensor]:
    """Zeros, vectors of ones."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    h, m = spec.hidden_size, mlp.intermediate_size
    shapes = {"embed": (spec.vocab_size, h), "output": (spec.vocab_size, h)}
    shapes |= {f"layers.0.{name}": shape for name, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q)))}
    vectors = {"norm": h, "layers.0.attn_norm": h, "layers.0.mlp_norm": h}
    if isinstance(mlp, ExpertsMlp):
        count, begin = mlp.num_experts, "layers.0.expert_"
        vectors["layers.0.router"] = count * h
    else:
        count, begin = 1, "layers.0."
    inner, outer = (count * m, h), (count * h, m)
    shapes |= {f"{begin}{name}": shape for name, shape in (("gate", inner), ("up", inner), ("down", outer))}
    if attention.has_qkv_bias:
        vectors |= {"layers.0.q_bias": q, "layers.0.k_bias": kv, "layers.0.v_bias": kv}
    if attention.has_sinks:
        vectors["layers.0.sinks"] = attention.num_heads
    made = {name: matrix(name, rows, cols, fmt) for name, (rows, cols) in shapes.items()}
    ones = {name: WeightTensor(name, 1, n, WeightFormat.F32, np.ones((1, n), np.float32)) for name, n in vectors.items()}
    return made | ones


def matrix(name: str, num_rows: int, num_cols: int, fmt: WeightFormat) -> WeightTensor:
    if fmt is WeightFormat.BF16:
        return WeightTensor(name, num_rows, num_cols, fmt, np.zeros((num_rows, num_cols), np.uint16))
    if fmt is WeightFormat.F8_E4M3:
        scales = BlockScales(np.ones((num_rows, 1), np.float32), 1, num_cols)
        return WeightTensor(name, num_rows, num_cols, fmt, np.zeros((num_rows, num_cols), np.uint8), scales)
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


def compile_steps(spec: ModelSpec, fmt: WeightFormat, kv_dtype: KvDtype, *, deterministic: bool) -> None:
    program = architectures.describe(spec)
    num_blocks = 1 + MAX_LEN // BLOCK_SIZE
    cache = PagedKvCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=program.kv_shapes[0].num_kv_heads,
        head_dim=program.kv_shapes[0].head_dim,
        kv_dtype=kv_dtype,
        dtype=torch.bfloat16,
        device="cpu",
    )
    adapter_format = AdapterFormat(program, cache, torch.bfloat16, 64)
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
        adapter_format=adapter_format,
    )
    for rows in STEPS:
        step = step_of(rows)
        compiled.run(step)
        adapted = AdaptedRows(torch.zeros(5, dtype=torch.int32), torch.zeros((1, 3), dtype=torch.int64), 64)
        compiled.run(replace(step, adapted_tokens=adapted, adapted_samples=adapted))
        page_indices(torch.zeros_like(step.block_tables), step.block_tables, step.query_start_loc, step.num_rows)


def compile_sampling(spec: ModelSpec) -> None:
    """A whole step of the executor, whose rows ask for all that a sampler has kernels for."""
    executor = CudaExecutor(
        LoadedModel(spec.architecture, spec, weights(spec, WeightFormat.BF16), Path(), None, None, (), Path()),
        architectures.describe(spec),
        num_blocks=8,
        block_size=BLOCK_SIZE,
        max_rows=4,
        max_step_tokens=64,
        max_model_len=64,
        device="cpu",
        dtype=torch.bfloat16,
    )
    params = SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, logprobs=5, frequency_penalty=0.5, allowed_token_ids=(0, 1)
    )
    grammar = replace(params, allowed_token_ids=None, follows_grammar=True)
    admits = [AdmitRow(name, tuple(range(9)), 9, (1,), 0, each) for name, each in (("listed", params), ("grammar", grammar))]
    rows = [RowPlan(admit.request_id, 0, 9, (), True) for admit in admits]
    ticket = executor.submit(StepPlan(0, 0, tuple(admits), tuple(rows), ()))
    executor.restrict(ticket, {"grammar": bytes(executor.mask_bytes)})
    executor.collect(ticket)
    executor.close()


def compile_rest(dtype: torch.dtype = torch.bfloat16) -> None:
    """Kernels, and variants of these, that no model above has."""
    x, vector, ids = torch.zeros((4, 576), dtype=dtype), torch.ones(576), torch.zeros(4, dtype=torch.int32)
    for kind in ACTIVATIONS:
        activation.gated(x, x, x, kind)
    norm.layer_norm(x, x, vector, vector, 1e-5)
    norm.layer_norm(x, x, vector, None, 1e-5)
    dequantise.look_up(x, DenseMatrix(x.clone()), ids, added=x)


def compile_texts(dtype: torch.dtype = torch.bfloat16) -> None:
    """Kernels that only programs of texts have: heads of MiniLM, of BERT and wider ones."""
    step = step_of(((300, 0), (24, 0)))
    for num_kv_heads, group, head_dim in ((12, 1, 32), (12, 1, 64), (2, 7, 128), (2, 8, 256)):
        width, kv_width = num_kv_heads * group * head_dim, num_kv_heads * head_dim
        q, k = torch.zeros((step.num_tokens, width), dtype=dtype), torch.zeros((step.num_tokens, kv_width), dtype=dtype)
        for op in (
            TextAttention("y", "q", "k", "v", num_kv_heads * group, num_kv_heads, head_dim, 0.1),
            TextAttention("y", "q", "k", "v", num_kv_heads * group, num_kv_heads, head_dim, 0.1, "all", 64, "d", 128),
            TextAttention("y", "q", "k", "v", num_kv_heads * group, num_kv_heads, head_dim, 0.1, "causal", 64),
        ):
            distances = torch.zeros((op.num_heads, 257)) if op.distances else None
            texts.text_attention(q.clone(), q, k, k, step, op, distances)
    states = torch.zeros((2, width))
    texts.mean_rows(q[:2].clone(), q, step)
    norm.unit_rows(states, q[:2])


def cases() -> Iterator[Case]:
    yield small(*MODELS["llama-8b"]), WeightFormat.BF16, KvDtype.BF16
    yield small(*MODELS["llama-8b"]), WeightFormat.F8_E4M3, KvDtype.BF16
    yield small(*MODELS["llama-8b"]), WeightFormat.Q4_1, KvDtype.BF16
    yield small(*MODELS["qwen2.5-1.5b"]), WeightFormat.Q8_0, KvDtype.INT8
    yield small(*MODELS["smollm2-135m"]), WeightFormat.Q4_0, KvDtype.BF16
    yield mixture(128, 8), WeightFormat.BF16, KvDtype.BF16
    yield mixture(8, 2), WeightFormat.Q4_1, KvDtype.BF16


def more_cases() -> Iterator[Case]:
    for fmt in BLOCKS:
        yield small(1024, 8, 4, 128, False), fmt, KvDtype.BF16
        if BLOCKS[fmt][0] <= 64:
            yield mixture(8, 2), fmt, KvDtype.BF16
    for head_dim, group in HEADS:
        for kv_dtype in KvDtype:
            yield small(2 * group * head_dim, 2 * group, 2, head_dim, False), WeightFormat.BF16, kv_dtype


def compile_all(chosen: list[Case]) -> None:
    for spec, fmt, kv_dtype in chosen:
        for deterministic in (False, True):
            compile_steps(spec, fmt, kv_dtype, deterministic=deterministic)
    compile_sampling(small(*MODELS["smollm2-135m"]))
    compile_rest()
    compile_texts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, choices=SHARED_BYTES)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--resources", action="store_true")
    args = parser.parse_args()
    gpu = AbsentGpu(args.capability)
    launched = gpu.kernels(partial(compile_all, [*cases(), *(more_cases() if args.all else ())]))
    for kernel in {kernel.hash: kernel for kernel in launched}.values():
        line = {"name": kernel.metadata.name, "shared_bytes": kernel.metadata.shared, "cubin_bytes": len(kernel.asm["cubin"])}
        line["fits"] = kernel.metadata.shared <= gpu.shared_bytes
        print(json.dumps(line | (asdict(gpu.figures(kernel)) if args.resources else {})))


if __name__ == "__main__":
    main()
