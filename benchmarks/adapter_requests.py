"""Random LoRA adapters in PEFT's format, a server that loads them, and requests that use them. `adapters.py` measures
with these.
"""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
from gpu_shapes import prompts, sharegpt_lengths
from write_awq import as_bf16, write_tensors

from penstock.config import Config, KvConfig, LoraConfig, ModelConfig, SchedulerConfig
from penstock.deploy.factory import start_model
from penstock.models.adapter import sites
from penstock.models.architectures import describe
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from penstock.models.load import load_model
from penstock.testing import make_request
from penstock.types.request import FinishReason

NUM_FILES = 8
"""Distinct weight files per rank; further adapters are hard links to them."""
_MODULES = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def shapes_of(model: str, targets: list[str]) -> dict[str, tuple[int, int]]:
    """Return [out, in] by module name in transformers' Llama. `targets`: keys of `_MODULES`, or `all` alone."""
    spec = load_model(resolve(model, default_cache_dir())).spec
    known = sites(describe(spec))
    layers, wanted = range(len(spec.layers)), _MODULES if targets == ["all"] else targets
    return {f"model.layers.{layer}.{_MODULES[one]}": known[f"layers.{layer}.{one}"] for layer in layers for one in wanted}


def write_adapters(folder: Path, shapes: dict[str, tuple[int, int]], ranks: list[int], count: int) -> None:
    """Folders a0, a1, ... with random adapters of the modules in `shapes`."""
    for idx in range(count):
        rank = ranks[idx % len(ranks)]
        file = folder / f"weights-{rank}-{idx // len(ranks) % NUM_FILES}"
        if not file.exists():
            _write_weights(file, shapes, rank, seed=idx)
        made = folder / f"a{idx}"
        made.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [], "bias": "none"}
        (made / "adapter_config.json").write_text(json.dumps(config))
        (made / "adapter_model.safetensors").hardlink_to(file)


def _write_weights(path: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    rng, tensors = np.random.default_rng(seed), {}
    for module, (num_out, num_in) in shapes.items():
        for half, shape, spread in (("A", (rank, num_in), num_in**-0.5), ("B", (num_out, rank), 0.02)):
            values = rng.standard_normal(shape, np.float32) * np.float32(spread)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = "BF16", as_bf16(values)
    write_tensors(path, tensors)


def start(args, **lora):
    config = Config(
        model=ModelConfig(model=args.model),
        kv=KvConfig(kv_cache_memory_bytes=args.kv_mib << 20),
        scheduler=SchedulerConfig(max_num_seqs=args.rows),
        lora=LoraConfig(**lora),
    )
    return start_model(config, resolve(args.model, default_cache_dir()))


def found(running, idx: int):
    ref = running.adapters.find(f"a{idx}")
    assert ref is not None, f"a{idx} was written"
    return ref


def drawn(count: int, num_adapters: int) -> list[int]:
    """Draw `count` adapters from `num_adapters` by Zipf's law."""
    weights = 1.0 / np.arange(1, num_adapters + 1)
    return np.random.default_rng(7).choice(num_adapters, count, p=weights / weights.sum()).tolist()


class Workload:
    """One set of requests, salted so that runs share no cached prefix."""

    def __init__(self, count: int, vocab_size: int) -> None:
        self.lengths = sharegpt_lengths(count)
        self.prompts = prompts(self.lengths, vocab_size)
        self._num_runs = 0

    def requests(self, refs):
        self._num_runs += 1
        salt = f"run {self._num_runs}".encode()
        return [
            make_request(f"{self._num_runs}.{idx}", self.prompts[idx], max_tokens=reply, adapter=refs[idx], cache_salt=salt)
            for idx, (_, reply) in enumerate(self.lengths)
        ]


def run(running, requests, rows: int = 0) -> tuple[int, float]:
    """Return generated tokens and seconds until fewer than `rows` are left, or all have ended."""
    return asyncio.run(_run(running, requests, rows))


async def _run(running, requests, rows):
    num_tokens, num_left, told = 0, len(requests), (0, 0.0)
    began_s = time.perf_counter()
    with running.bridge.open(requests) as stream:
        while num_left:
            for chunk in await stream.next_chunks():
                num_tokens += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    assert chunk.finish_reason is FinishReason.LENGTH, (chunk.finish_reason, chunk.detail)
                    num_left -= 1
            if num_left >= rows:
                told = num_tokens, time.perf_counter() - began_s
    return told
