"""A small folder of kernel tables, as LLMServingSim's profiler writes them, with times by simple rules."""

from __future__ import annotations

from itertools import product
from pathlib import Path

NUM_LAYERS = 32
DENSE = ("embedding", "layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj", "final_layernorm")
LAYER_US = 8 + 1
"""Dense kernels of a layer take this for each token: the layer norm is there twice, and two kernels are not of layers."""


def decode_us(num: int, reads: int) -> float:
    return 5 + 0.01 * num * reads


def chunk_us(tokens: int, before: int) -> float:
    return 5 + 0.001 * tokens * (before + tokens / 2)


def mixture_us(tokens: int, before: int, num: int, reads: int) -> float:
    return chunk_us(tokens, before) + 0.03 * num * reads


def write_tables(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tokens = (1, 16, 256)
    lines = [f"{name},{number},{number}" for name, number in product(DENSE, tokens)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *lines]) + "\n")
    lines = [f"{name},{number},{100 + number}" for name, number in product(("lm_head", "sampler"), (1, 64))]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *lines]) + "\n")
    lines = [f"0,0,{num},{reads},{decode_us(num, reads)}" for num, reads in product((1, 8, 64), (16, 1024, 4096))]
    chunks, befores = (16, 64, 112, 256), (0, 256, 4096)
    lines += [f"{chunk},{before},0,0,{chunk_us(chunk, before)}" for chunk, before in product(chunks, befores)]
    for chunk, before, num, reads in product(chunks, befores, (1, 8, 64), (16, 1024, 4096)):
        if (chunk, reads) != (64, 16):  # a hole, as in a union of grids
            lines.append(f"{chunk},{before},{num},{reads},{mixture_us(chunk, before, num, reads)}")
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([header, *lines]) + "\n")
    lines = ["0,n<=8,sr<=40%,kvB<=4k,kp=0,0.5,1", "0,n<=8,sr>40%,kvB<=4k,kp=0,0.25,1", "16,n<=8,sr>40%,kvB<=4k,kp<=512,0.1,1"]
    header = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples"
    (folder / "skew_fit.csv").write_text("\n".join([header, *lines]) + "\n")
    (folder / "meta.yaml").write_text(
        "vllm_version: 0.19.0\ngpu: NVIDIA G999\nprofiled_at: '2026-04-24T12:44:27+00:00'\nmodel: meta-llama/Llama-3.1-8B\n"
        "tp_degrees: [1, 2]\nskew_fit:\n  per_tp:\n    1:\n      alpha_default: 0.125\n    2:\n      alpha_default: 0.5\n"
    )
    return folder
