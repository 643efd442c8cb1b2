"""What do adapters cost? One model with none, one, five, a hundred and a thousand of them among its requests.

    python benchmarks/adapters.py                                       # SmolLM2, rank 8, attention's projections, 32 rows
    python benchmarks/adapters.py --targets all --ranks 8,16 --parts throughput
    python benchmarks/adapters.py --parts cold,registered

`throughput`: requests of ShareGPT's lengths (`sharegpt_lengths.json`), of which no two prompts begin alike, are all there at
the start and at most `--rows` run. Each has an adapter drawn from N by Zipf's law (exponent 1); with ranks `8,16` every other
adapter has the other rank. Replies end at their length. Told are generated tokens a second while all rows are taken, of the
same requests in the same order; rounds of all arms follow each other, and the median of the rounds is told with their range.
Beside it stand tokens by a second of the process's CPU time, which other processes on the machine change less.
Adapters are loaded when their requests come; only in the rounds after the first are some of them in memory already.

`merged`: what a server does that has one adapter merged into its weights at a time. The requests of the same draw are grouped
by their adapters, and each group runs alone on the base's weights, which no merged weights could beat; the time for changing
weights is left out.

`cold`: time to the first token of a prompt of 64 tokens, one request at a time: of the base, of adapters that are in the KV
cache, and of adapters that nobody has asked for, whose files are not in the page cache.

`registered`: memory and time that 10,000 names cost: in a folder (`--lora-dir`), and each by itself (`--lora-modules`).

Adapters are random and written to a temporary folder: a few files under many names, each an adapter of its own to the server.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gpu_shapes import prompts, sharegpt_lengths
from printed import origin, table

from penstock.config import Config, KvConfig, LoraConfig, ModelConfig, SchedulerConfig
from penstock.deploy.adapters import Adapters
from penstock.deploy.factory import open_adapters, start_model
from penstock.deploy.running import RunningModel
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.models.load import load_model
from penstock.testing import make_request
from penstock.types.adapter import AdapterRef
from penstock.types.request import FinishReason, Request

TARGETS = {
    "qv": ("self_attn.q_proj", "self_attn.v_proj"),
    "qkvo": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "all": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
}
NUM_FILES = 8
"""Different files of weights for each rank; names beyond are links to them."""
NUM_REGISTERED = 10_000
COLD_PROMPT_TOKENS = 64
_SITE = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def write_adapters(folder: Path, shapes: dict[str, tuple[int, int]], ranks: Sequence[int], count: int) -> None:
    """Folders a0, a1, ... with random adapters of the modules in `shapes`, [out, in] each."""
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
    rng = np.random.default_rng(seed)
    header, parts, offset = {}, [], 0
    for module, (num_out, num_in) in shapes.items():
        for half, shape, spread in (("A", (rank, num_in), num_in**-0.5), ("B", (num_out, rank), 0.02)):
            values = rng.standard_normal(shape, np.float32) * np.float32(spread)
            data = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
            name = f"base_model.model.{module}.lora_{half}.weight"
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
            parts.append(data)
            offset += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))


def shapes_of(model: str, targets: str) -> dict[str, tuple[int, int]]:
    """Module -> [out, in], by transformers' names of a Llama."""
    from penstock.models.adapter import sites
    from penstock.models.architectures import describe

    loaded = load_model(resolve(model, default_cache_dir()))
    found = sites(describe(loaded.spec))
    names = [
        (f"model.layers.{layer}.{module}", f"layers.{layer}.{_SITE[module.rpartition('.')[2]]}")
        for layer in range(len(loaded.spec.layers))
        for module in TARGETS[targets]
    ]
    return {module: found[site] for module, site in names}


def start(args: argparse.Namespace, folder: Path, modules: Sequence[str] = ()) -> RunningModel:
    config = Config(
        model=ModelConfig(model=args.model),
        kv=KvConfig(kv_cache_memory_bytes=args.kv_mib << 20),
        scheduler=SchedulerConfig(max_num_seqs=args.rows),
        lora=LoraConfig(
            lora_dir=str(folder), lora_modules=tuple(modules), max_cpu_loras=args.max_cpu_loras, max_lora_rank=max(args.ranks)
        ),
    )
    return start_model(config, resolve(args.model, default_cache_dir()))


def found(adapters: Adapters | None, idx: int) -> AdapterRef:
    ref = None if adapters is None else adapters.find(f"a{idx}")
    assert ref is not None, f"a{idx} was written"
    return ref


class Workload:
    """Requests of one draw; each run of them is new to the prefix cache."""

    def __init__(self, count: int, vocab_size: int) -> None:
        self.lengths = sharegpt_lengths(count)
        self.prompts = prompts(self.lengths, vocab_size)
        self._num_runs = 0

    def requests(self, refs: Sequence[AdapterRef | None]) -> list[Request]:
        self._num_runs += 1
        salt = f"run {self._num_runs}".encode()
        return [
            make_request(f"{self._num_runs}.{idx}", self.prompts[idx], max_tokens=reply, adapter=refs[idx], cache_salt=salt)
            for idx, (_, reply) in enumerate(self.lengths)
        ]


async def run(running: RunningModel, requests: Sequence[Request], rows: int = 0) -> tuple[int, float]:
    """Generated tokens, and seconds: until fewer than `rows` are left, or until all have ended."""
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


def drawn(count: int, num_adapters: int) -> list[int]:
    """Adapters of requests: from `num_adapters` by Zipf's law."""
    weights = 1.0 / np.arange(1, num_adapters + 1)
    return [int(one) for one in np.random.default_rng(7).choice(num_adapters, count, p=weights / weights.sum())]


def throughput(args: argparse.Namespace, running: RunningModel, workload: Workload) -> dict[str, object]:
    arms = {
        num: [found(running.adapters, one) for one in drawn(args.requests, num)] if num else [None] * args.requests
        for num in args.adapters
    }
    rates: dict[int, list[tuple[float, float]]] = {num: [] for num in arms}
    asyncio.run(run(running, workload.requests([None] * args.requests)[: args.rows // 2]))  # memory that nobody has touched yet
    for nth in range(args.rounds):
        for num in list(arms) if nth % 2 else list(arms)[::-1]:
            cpu_s = time.process_time()
            num_tokens, seconds = asyncio.run(run(running, workload.requests(arms[num]), args.rows))
            rates[num].append((num_tokens / seconds, args.tokens / (time.process_time() - cpu_s)))
            wall, cpu = rates[num][-1]
            print(f"{num} adapters: {wall:.0f} tokens a second, {cpu:.0f} a second of CPU time", file=sys.stderr)
    rows = []
    medians = {num: [statistics.median(kind) for kind in zip(*told, strict=True)] for num, told in rates.items()}
    for num, told in rates.items():
        walls = [wall for wall, _ in told]
        row: list[object] = [num, len({ref.number for ref in arms[num] if ref})]
        row += [f"{medians[num][0]:.0f} ({min(walls):.0f} to {max(walls):.0f})", f"{medians[num][1]:.0f}"]
        for other in (0, 5):
            pairs = zip(medians[num], medians.get(other, ()), strict=False)
            row.append(" / ".join(f"{mine / theirs:.1%}" for mine, theirs in pairs))
        rows.append(row)
    print(table(["adapters", "different", "tokens/s", "tokens/CPU s", "of the base", "of five"], rows))
    return {
        "tokens_per_s_and_cpu_s": {num: [[round(rate, 1) for rate in pair] for pair in told] for num, told in rates.items()}
    }


def merged(args: argparse.Namespace, running: RunningModel, workload: Workload) -> dict[str, object]:
    answers: dict[str, object] = {}
    for num in [num for num in args.adapters if num > 1]:
        adapters = drawn(args.requests, num)
        requests = workload.requests([None] * args.requests)
        groups = [
            [request for request, one in zip(requests, adapters, strict=True) if one == name] for name in Counter(adapters)
        ]
        num_tokens, seconds = 0, 0.0
        for group in groups:
            told = asyncio.run(run(running, group))
            num_tokens, seconds = num_tokens + told[0], seconds + told[1]
        requests = workload.requests([found(running.adapters, one) for one in adapters])
        together_tokens, together_s = asyncio.run(run(running, requests))
        one_by_one, together = num_tokens / seconds, together_tokens / together_s
        print(
            f"{num} adapters, {len(groups)} different ones: one after the other {one_by_one:.0f} tokens/s, all in one batch "
            f"{together:.0f}: {together / one_by_one:.1f} times"
        )
        answers[str(num)] = {"groups": len(groups), "one_by_one": round(one_by_one, 1), "together": round(together, 1)}
    return {"merged": answers}


def cold(args: argparse.Namespace, running: RunningModel, folder: Path, vocab_size: int) -> dict[str, object]:
    """Adapters from the end of the folder, which no other part has asked for."""
    count = args.cold
    rng = np.random.default_rng(3)

    async def first_token_ms(name: str, ref: AdapterRef | None) -> float:
        prompt = tuple(int(token) for token in rng.integers(10, vocab_size, COLD_PROMPT_TOKENS))
        request = make_request(name, prompt, max_tokens=1, adapter=ref)
        began_s = time.perf_counter()
        await run(running, [request])
        return 1e3 * (time.perf_counter() - began_s)

    times: dict[str, list[float]] = {"base": [], "cold": [], "warm": []}
    for nth in range(count):
        idx = args.count - 1 - nth
        times["base"].append(asyncio.run(first_token_ms(f"base {nth}", None)))
        for file in folder.glob("weights-*"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ref = found(running.adapters, idx)
        times["cold"].append(asyncio.run(first_token_ms(f"cold {nth}", ref)))
        times["warm"].append(asyncio.run(first_token_ms(f"warm {nth}", ref)))
    rows = [
        [name, f"{statistics.median(told):.1f}", f"{sorted(told)[int(0.99 * len(told))]:.1f}", f"{max(told):.1f}"]
        for name, told in times.items()
    ]
    print(table(["first token", "p50 ms", "p99 ms", "max ms"], rows))
    stats = running.adapters.stats if running.adapters else None
    assert stats is not None
    print(f"{stats.num_loads} loads, {stats.load_ns / stats.num_loads / 1e6:.1f} ms each in the mean")
    return {"cold_ms": {row[0]: row[1:] for row in rows}, "load_ms": round(stats.load_ns / stats.num_loads / 1e6, 2)}


def registered(folder: Path) -> dict[str, object]:
    answers: dict[str, object] = {}
    modules = tuple(f"m{idx}={folder / 'a0'}" for idx in range(NUM_REGISTERED))
    for name, lora in (("lora_dir", LoraConfig(lora_dir=str(folder))), ("lora_modules", LoraConfig(lora_modules=modules))):
        began_s = time.perf_counter()
        open_adapters(lora)
        seconds = time.perf_counter() - began_s
        tracemalloc.start()
        adapters = open_adapters(lora)
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert adapters is not None
        print(f"{NUM_REGISTERED} names by {name}: {seconds * 1e3:.0f} ms, {num_bytes / 2**20:.1f} MiB")
        answers[name] = {"ms": round(seconds * 1e3, 1), "mib": round(num_bytes / 2**20, 2)}
    return {"registered": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--parts", default="throughput,merged,cold,registered")
    parser.add_argument("--adapters", type=_counts, default=[0, 1, 5, 100, 1000], help="numbers of adapters; 0: the base")
    parser.add_argument("--targets", choices=TARGETS, default="qkvo")
    parser.add_argument("--ranks", type=_counts, default=[8])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", type=int, default=100, help="cold first tokens")
    parser.add_argument("--kv-mib", type=int, default=2048)
    parser.add_argument("--max-cpu-loras", type=int, default=64)
    args = parser.parse_args()
    parts = args.parts.split(",")
    args.count = max(*args.adapters, NUM_REGISTERED if "registered" in parts else 0) + (args.cold if "cold" in parts else 0)
    print(origin(args.model, f"rank {args.ranks}, {args.targets}, {args.rows} rows, {args.requests} requests"))
    result: dict[str, object] = {"ranks": args.ranks, "targets": args.targets, "rows": args.rows, "requests": args.requests}
    with tempfile.TemporaryDirectory(prefix="adapters-") as name:
        folder = Path(name)
        write_adapters(folder, shapes_of(args.model, args.targets), args.ranks, args.count)
        if "registered" in parts:
            result |= registered(folder)
        if parts == ["registered"]:
            print(json.dumps(result))
            return
        running = start(args, folder)
        try:
            vocab_size = running.model.vocab_size
            workload = Workload(args.requests, vocab_size)
            args.tokens = sum(reply for _, reply in workload.lengths)
            if "throughput" in parts:
                result |= throughput(args, running, workload)
            if "merged" in parts:
                result |= merged(args, running, workload)
            if "cold" in parts:
                result |= cold(args, running, folder, vocab_size)
        finally:
            running.close()
    print(json.dumps(result))


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
