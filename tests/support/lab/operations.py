"""A small clone of AIConfigurator's tables, as CSV, with times by simple rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

ENGINE = "vllm/1.0"
CONFIG = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}
PRODUCTS = ((128, 64), (64, 64), (256, 64), (64, 128), (64, 32), (128, 64))
"""Those of the model on one GPU, and on two."""


def product_us(tokens: float, outputs: int, inputs: int) -> float:
    return 2 + tokens * outputs * inputs / 4096


def decode_us(num: float, reads: float) -> float:
    return 5 + num * reads / 100


def prompt_us(tokens: float) -> float:
    return tokens**2 / 64


def write_csv(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def write_system(systems: Path, name: str = "g999_sxm") -> Path:
    """Write a system's own file and its tables, and return the folder of the tables."""
    folder = systems / "data" / name
    products = [
        ("vllm", kind, tokens, outputs, inputs, product_us(tokens, outputs, inputs) / 1e3 * (0.5 if kind == "fp8" else 1))
        for kind, (outputs, inputs), tokens in product(("fp8", "bfloat16"), dict.fromkeys(PRODUCTS), (1, 64))
    ]
    products += [("vllm", "bfloat16", 1, 128, 64, 99)]  # the second of a point does not count
    write_csv(folder / "gemm" / ENGINE / "gemm_perf.txt", "framework,gemm_dtype,m,n,k,latency", products)
    attention = folder / "attention" / ENGINE
    header = "batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,window_size,step,latency"
    heads = ((4, 2, 16), (2, 1, 16))
    decodes = [
        (num, 1, *sizes, "bfloat16", "bfloat16", window, reads - 1, decode_us(num, reads) / 1e3 / (1 + window))
        for sizes, window, num, reads in product(heads, (0, 128), (1, 8), (16, 128, 1024))
        if (num, reads) != (8, 1024)  # the tables are stairs
    ]
    write_csv(attention / "generation_attention_perf.txt", header, decodes)
    prompts = [
        (num, tokens, *sizes, "bfloat16", "bfloat16", 0, 0, num * prompt_us(tokens) / 1e3)
        for sizes, num, tokens in product(heads, (1, 8), (16, 64))
    ]
    write_csv(attention / "context_attention_perf.txt", header, prompts)
    reduced = [
        (2, 64 * tokens, f"custom_{mode}", (1 + tokens) / 1e3 if mode == "graph" else 0)
        for mode, tokens in product(("eager", "graph"), (1, 64))
    ]
    write_csv(folder / "comm" / ENGINE / "custom_allreduce_perf.txt", "num_gpus,message_size,kernel_source,latency", reduced)
    (systems / f"{name}.yaml").write_text(
        "gpu:\n  mem_bw: 4000000000 # bytes\n  mem_bw_empirical_scaling_factor: 0.5\n"
        "  mem_empirical_constant_latency: 0.000001\n  mem_capacity: 4000000\n"
        "misc:\n  nccl_mem:\n    1: 0\n    2: 1000\n  other_mem: 1000000\n"
    )
    return folder


def write_config(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(CONFIG))
    return path
