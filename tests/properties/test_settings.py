"""Requests at once have the answers that each has alone, with any settings.

A seed draws a tiny model of any architecture, requests, and settings: policies, sizes of blocks, steps and batches, memory for
hardly more than one request, a disk, speculation, threads, and kernels. Tokens and log-probabilities are the same to the bit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncLLM, SamplingParams, StructuredOutputsParams
from penstock.types.errors import ConfigError, NotEnoughMemory
from support.native_variants import WITHOUT_TILES
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES

Asked = tuple[list[int], SamplingParams]
PATIENCE_S = 120.0
FORMS = (
    StructuredOutputsParams(regex="[ab]{2,9}(c|dd)"),
    StructuredOutputsParams(choice=["yes", "no", "maybe so"]),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"enum": ["x", 3]}}, "required": ["a"]}),
)
"""Forms of answers."""
KERNELS = [variant for variant in WITHOUT_TILES if variant != "portable"] or ["portable"]
"""Variants with the same bits. Tiles multiply in bf16, and portable code rounds products that others add unrounded."""
SETTINGS: dict[str, Sequence[object]] = {
    "preset": ("orca", "vllm", "sarathi", "sglang", "offline", "static", "dynamic"),
    "policy": ("sjf", "srpf", "edf", "priority", "fair", "calls"),
    "budget": ("decode-first", "hold-step", "prefill-first", "whole-prompts"),
    "reserve": ("chunk", "prompt", "predicted", "no-evict"),
    "victim": ("latest", "least-computed", "least-output"),
    "block_size": (32, 48, 96),
    "max_num_seqs": (2, 3, 8),
    "max_num_batched_tokens": (8, 17, 33, 64, 200),
    "prefix_caching": (False,),
    "speculation": ("off",),
    "threads": (1, 2),
    "kernels": KERNELS,
    "kv_disk_size": ("1MiB",),
}


def draw_requests(rng: random.Random, vocab_size: int) -> list[Asked]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    shared = tokens(rng.choice((0, 10, 20)))
    asked: list[Asked] = []
    for _ in range(10):
        params: dict[str, Any] = {
            "max_tokens": rng.choice((1, 5, 12, 20)),
            "temperature": rng.choice((0.0, 0.7, 1.5)),
            "seed": rng.randrange(1000),
            "logprobs": rng.choice((None, 0, 3)),
            "n": rng.choice((1, 1, 2)),
            "top_k": rng.choice((0, 5)),
            "repetition_penalty": rng.choice((1.0, 1.3)),
        }
        changes = (
            {"stop": ["e"]},
            {"ignore_eos": True},
            {"structured_outputs": rng.choice(FORMS)},
            {"logit_bias": {9: 5.0}},
            {},
        )
        prompt = (shared if rng.random() < 0.6 else []) + tokens(rng.choice((1, 7, 16, 20)))
        asked.append((prompt, SamplingParams(**params, **rng.choice(changes))))
    return asked


async def answer(model: AsyncLLM, asked: Asked) -> list[object]:
    prompt, params = asked
    async with asyncio.timeout(PATIENCE_S):
        async for output in model.generate(prompt, params):
            last = output
    return [(one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason) for one in last.outputs]


async def one_by_one(model: AsyncLLM, asked: Sequence[Asked]) -> list[object]:
    async with model:
        return [await answer(model, one) for one in asked]


async def twice_at_once(model: AsyncLLM, asked: Sequence[Asked]) -> list[list[list[object]]]:
    async with model:
        return [await asyncio.gather(*[answer(model, one) for one in asked]) for _ in range(2)]


def load_in_little_memory(path: Path, **settings: object) -> AsyncLLM:
    """Return the model with hardly more KV cache than one request needs."""
    for size in range(12, 25):
        try:
            return AsyncLLM(path, **{**settings, "kv_cache_memory": f"{1 << size}B"})
        except NotEnoughMemory:
            continue
    raise AssertionError("16 MiB hold no request")


def draw_model(
    rng: random.Random, load: Callable[[dict[str, object]], AsyncLLM], disk: Path
) -> tuple[dict[str, object], AsyncLLM]:
    """Return the first settings that do not exclude each other, and the model with these."""
    for _ in range(50):
        settings = {name: rng.choice(values) for name, values in SETTINGS.items() if rng.random() < 0.3}
        if "kv_disk_size" in settings:
            settings["kv_disk_path"] = disk
        try:
            return settings, load(settings)
        except ConfigError:
            continue
    raise AssertionError("all settings were refused")


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200))])
def test_answers_are_those_of_one_request_at_a_time(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    name = rng.choice(sorted(CASES))
    path = write_case(CASES[name], tmp_path / "model")
    asked = draw_requests(rng, CASES[name].vocab_size)
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in asked)
    given: dict[str, object] = {
        "max_model_len": longest + 1,
        "kv_cache_memory": "8MiB",
        "kv_cache_dtype": rng.choice(("int8", "bf16")),
        "kernels": KERNELS[0],
    }
    alone = asyncio.run(one_by_one(AsyncLLM(path, **given, prefix_caching=False, speculation="off"), asked))
    load = rng.choice((AsyncLLM, load_in_little_memory))
    settings, model = draw_model(rng, lambda drawn: load(path, **given | drawn), tmp_path / "kv")
    for found in asyncio.run(twice_at_once(model, asked)):
        assert found == alone, f"{name} with {settings}"
