"""Compiles the attention of an 8B shape for an H100 or H200 and prints what came of it, as JSON; for `test_attention_sm90`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from penstock.backends.cuda.kernels.attention import INTERPRETED, AttentionWorkspace, paged_attention
from penstock.backends.cuda.kernels.rope_kv import kv_write, rope, rope_q_k_and_write, rope_table
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.step import StepTensors
from penstock.types.kv_dtype import KvDtype
from support.backends.cuda.absent_gpu import AbsentGpu, Figures

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
MAX_LEN = 8192


def make_step(num_rows: int, query_len: int) -> StepTensors:
    num_tokens = num_rows * query_len
    ints = torch.zeros(num_tokens + 1, dtype=torch.int32)
    return StepTensors(
        token_ids=ints,
        positions=ints,
        row_of_token=ints,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        query_start_loc=ints,
        context_lens=ints,
        block_tables=torch.zeros((num_rows, 512), dtype=torch.int32),
        sample_tokens=ints,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_samples=num_rows,
        max_query_len=query_len,
        max_seq_len=MAX_LEN,
    )


def launch(kv_dtype: KvDtype, block_size: int, *, deterministic: bool) -> None:
    """Everything of a layer, for a decode, a mixed step and a short chunk after a long context."""
    cache = PagedKvCache(
        num_layers=1,
        num_blocks=2,
        block_size=block_size,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        kv_dtype=kv_dtype,
        dtype=torch.bfloat16,
        device="cpu",
    )
    layer = cache.layer(0)
    workspace = AttentionWorkspace.allocate(
        max_rows=64,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_model_len=MAX_LEN,
        device="cpu",
        deterministic=deterministic,
    )
    table = rope_table([1.0] * (HEAD_DIM // 2), 1.0, 1, "cpu")
    workspace = replace(workspace, multiprocessors=replace(INTERPRETED, count=132))
    for step in (make_step(64, 1), make_step(2, 512), make_step(1, 64)):
        widths = [n * HEAD_DIM for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
        q, k, v = torch.zeros((step.num_tokens, sum(widths)), dtype=torch.bfloat16).split(widths, 1)
        rope(q, step.positions, table, NUM_HEADS, HEAD_DIM)
        kv_write(k, v, layer, step.slot_mapping)
        rope_q_k_and_write(q, k, v, layer, step, table, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
        paged_attention(
            torch.empty_like(q),
            q,
            layer,
            step,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            window=0,
            softcap=0.0,
            workspace=workspace,
            deterministic=deterministic,
        )


def all_kernels(gpu: AbsentGpu) -> Iterator[tuple[str, Figures]]:
    for kv_dtype, block_size, deterministic in (
        (KvDtype.BF16, 16, False),
        (KvDtype.BF16, 16, True),
        (KvDtype.BF16, 64, False),
        (KvDtype.INT8, 16, False),
    ):
        name = f"{kv_dtype}, blocks of {block_size}{', deterministic' if deterministic else ''}"

        def run(kv_dtype: KvDtype = kv_dtype, block_size: int = block_size, deterministic: bool = deterministic) -> None:
            launch(kv_dtype, block_size, deterministic=deterministic)

        for kernel in gpu.kernels(run):
            yield name, gpu.figures(kernel)


if __name__ == "__main__":
    print(json.dumps([{"case": case, **asdict(kernel)} for case, kernel in all_kernels(AbsentGpu(90))]))
