"""Simulates real runs published by AIConfigurator, from its kernel tables, and compares speeds and ranks.

    git clone https://github.com/ai-dynamo/aiconfigurator
    python benchmarks/published_gpu_runs.py aiconfigurator --processes 2

Its silicon_sample.csv lists runs: GPU, engine, model, GPUs, prompt and answer lengths, clients, and the time to the first token
(TTFT) and per later token (TPOT) that were measured. Each run becomes a closed loop of as many clients before Penstock's own
scheduler. `RUNS` has what else is known about the runs, with sources. No number is fitted to a measured time.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import process_time
from typing import Any, NamedTuple

from penstock.lab.aiconfigurator import Model, read_model
from penstock.lab.cost_model import CostModel
from penstock.lab.kernel_files import Choice
from penstock.lab.kernel_import import import_folder
from penstock.lab.pacing import Pace
from penstock.lab.simulation import Simulation
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity

BLOCK_SIZE = 16
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_static": 1.0, "fp8_block": 1.0}
SYSTEMS = "aic-core/src/aiconfigurator_core/systems"
HOST_HELP = "host time of a step, and of each row, for engines that plan synchronously"
CONFIGS = "aic-core/src/aiconfigurator_core/model_configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of one model with one engine on one kind of GPU."""

    name: str
    system: str
    backend: str
    model_path: str
    precision: str
    """The list's column of this name, which may be empty."""
    config: str
    tables: str
    """Engine and version of the kernel tables. Some rows name no version, and some versions have no tables."""
    weights: str
    kv: str
    preset: str = "vllm"
    reserve: str | None = None
    least_share: float = 1.0
    """Lengths are drawn evenly between this share of the nominal ones and the nominal ones."""
    max_step_tokens: int = 8192
    memory_share: float = 0.9
    is_share_of_rest: bool = False
    """Whether the share is that of the memory beside the weights."""
    is_synchronous: bool = False
    """Whether the engine plans a step when the one before has ended, so that the GPU waits for the host."""
    host_step_us: float = 0.0
    host_row_us: float = 0.0


LLAMA_70B, LLAMA_8B, QWEN_32B = "meta-llama--Meta-Llama-3.1-70B", "meta-llama--Meta-Llama-3.1-8B", "Qwen--Qwen3-32B"
# Lengths of 0.8 to 1 times the nominal, 10 requests a client, KV in fp8, 8,192 tokens a step and 0.9 of the memory are in
# InferenceMAX's scripts (SemiAnalysisAI/InferenceX, benchmarks/70b_fp8_h200_slurm.sh), whose dates and concurrencies these
# runs have; the checkpoint's activations have static scales.
VLLM_70B = Runs(
    name="vLLM, Llama-3.1-70B fp8, H200",
    system="h200_sxm",
    backend="vllm",
    model_path="meta-llama/Llama-3.1-70B",
    precision="fp8",
    config=LLAMA_70B,
    tables="vllm/0.14.0",
    weights="fp8_static",
    kv="fp8",
    least_share=0.8,
)
# How these were measured is not said: fixed lengths and defaults are assumed. vLLM 0.12 plans synchronously.
VLLM_8B = replace(
    VLLM_70B,
    name="vLLM 0.12, Llama-3.1-8B fp8, H200",
    model_path="nvidia/Llama-3.1-8B-Instruct-FP8",
    config=LLAMA_8B,
    least_share=1.0,
    is_synchronous=True,
)
RUNS = (
    VLLM_70B,
    replace(VLLM_70B, name="vLLM, Llama-3.1-70B fp8, H100", system="h100_sxm"),
    # By 70b_fp8_h200_trt_slurm.sh. TensorRT-LLM's default reserves whole answers, and takes 0.9 of the memory that is left
    # beside the weights.
    replace(
        VLLM_70B,
        name="TensorRT-LLM, Llama-3.1-70B fp8, H200",
        backend="trtllm",
        tables="trtllm/1.2.0rc5",
        reserve="no-evict",
        is_share_of_rest=True,
    ),
    VLLM_8B,
    replace(
        VLLM_8B,
        name="vLLM 0.12, Qwen3-32B bf16, H100",
        system="h100_sxm",
        model_path="Qwen/Qwen3-32B",
        precision="",
        config=QWEN_32B,
        weights="bfloat16",
        kv="bfloat16",
    ),
    replace(
        VLLM_8B,
        name="SGLang 0.5.6, Llama-3.1-8B fp8, H200",
        backend="sglang",
        model_path="meta-llama/Llama-3.1-8B-Instruct",
        tables="sglang/0.5.6.post2",
        weights="fp8_block",
        kv="bfloat16",
        preset="sglang",
        is_synchronous=False,
    ),
)


class Speed(NamedTuple):
    """Milliseconds, and answer tokens per second and GPU."""

    ttft: float
    tpot: float
    throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    runs: Runs
    num_prompt_tokens: int
    num_output_tokens: int
    num_clients: int
    num_gpus: int
    ttft: float
    tpot: float

    def speed(self, ttft: float, tpot: float) -> Speed:
        seconds = (ttft + (self.num_output_tokens - 1) * tpot) / 1e3
        return Speed(ttft, tpot, self.num_clients * self.num_output_tokens / seconds / self.num_gpus)

    @property
    def measured(self) -> Speed:
        return self.speed(self.ttft, self.tpot)


class Simulated(NamedTuple):
    speed: Speed
    num_steps: int
    num_outside: int
    num_blocks: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a clone of AIConfigurator")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--requests", type=int, default=10, help="of each client, as InferenceMAX's")
    parser.add_argument("--max-answer", type=int, default=1 << 20, help="leave out runs with longer answers")
    parser.add_argument(
        "--lengths", default="", help="runs of these lengths alone, such as 1024+1024; with ! in front, of others"
    )
    parser.add_argument("--host-us", type=float, nargs=2, default=(0.0, 0.0), metavar=("STEP", "ROW"), help=HOST_HELP)
    parser.add_argument("--tables", help="other tables than in RUNS, such as vllm/0.19.0")
    parser.add_argument("--kv", help="another type of the KV cache")
    parser.add_argument("--seed", type=int, default=0, help="of lengths")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="each run")
    asked = parser.parse_args()
    began_s = process_time()
    chosen = [run for run in published(asked.folder / SYSTEMS / "silicon_sample.csv") if asked.only in run.runs.name]
    chosen = [run for run in chosen if run.num_output_tokens <= asked.max_answer]
    if asked.lengths:
        lengths, are_others = asked.lengths.removeprefix("!"), asked.lengths.startswith("!")
        chosen = [run for run in chosen if (f"{run.num_prompt_tokens}+{run.num_output_tokens}" == lengths) != are_others]
    others: dict[str, Any] = {name: getattr(asked, name) for name in ("tables", "kv") if getattr(asked, name)}
    host = dict(zip(("host_step_us", "host_row_us"), asked.host_us, strict=True))
    chosen = [replace(run, runs=replace(run.runs, **others, **(host if run.runs.is_synchronous else {}))) for run in chosen]
    work = partial(simulate, asked.folder, asked.requests, asked.seed)
    if asked.processes > 1:
        with ProcessPoolExecutor(asked.processes) as pool:
            found = list(pool.map(work, chosen))
    else:
        found = [work(run) for run in chosen]
    result = {}
    print(f"{'runs':40}{'number':>7}{'rank':>7}{'tok/s/GPU':>11}{'signed':>8}{'TPOT':>7}{'signed':>8}{'TTFT':>7}{'signed':>8}")
    for runs in RUNS:
        pairs = [(run, one) for run, one in zip(chosen, found, strict=True) if run.runs.name == runs.name]
        if pairs:
            result[runs.name] = figures(runs.name, pairs)
    result["all"] = figures("all", list(zip(chosen, found, strict=True)))
    if asked.list:
        for run, one in zip(chosen, found, strict=True):
            print(line_of(run, one))
    if asked.processes == 1:
        print(f"{process_time() - began_s:.0f} s of CPU", file=sys.stderr)
    print(json.dumps(result))


def published(path: Path) -> Iterator[Run]:
    """Yield the runs of `RUNS`, in the order of the file. Those with prefill servers of their own are left out."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("system", "backend", "model_path", "precision", "mode"))
            for runs in RUNS:
                if key == (runs.system, runs.backend, runs.model_path, runs.precision, "agg"):
                    yield Run(
                        runs=runs,
                        num_prompt_tokens=int(row["isl"]),
                        num_output_tokens=int(row["osl"]),
                        num_clients=int(row["batch_size"]),
                        num_gpus=int(row["tp_size"]),
                        ttft=float(row["silicon_ttft_ms"]),
                        tpot=float(row["silicon_tpot_ms"]),
                    )


def simulate(folder: Path, num_requests: int, seed: int, run: Run) -> Simulated:
    """Return the mean TTFT and TPOT of a closed loop."""
    runs = run.runs
    num_blocks = blocks_of(folder, run)
    simulation = Simulation(
        capacity=Capacity(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_rows=run.num_clients,
            max_step_tokens=max(runs.max_step_tokens, run.num_clients),
            max_model_len=min(run.num_prompt_tokens + run.num_output_tokens + BLOCK_SIZE, (num_blocks - 1) * BLOCK_SIZE),
        ),
        make_policies=partial(make_policies, runs.preset, reserve=runs.reserve),
        cost=cost_of(folder, runs, run.num_gpus),
        max_tokens=None,
        enable_prefix_caching=False,
        depth=1 if runs.is_synchronous else 2,
    )
    rng = Random(seed)  # repeatable on purpose
    jobs = [
        Job(
            arrival_ns=0,
            num_prompt_tokens=rng.randint(round(runs.least_share * run.num_prompt_tokens), run.num_prompt_tokens),
            num_output_tokens=rng.randint(round(runs.least_share * run.num_output_tokens), run.num_output_tokens),
        )
        for _ in range(num_requests * run.num_clients)
    ]
    outcome = simulation.run(Workload(name="published", jobs=jobs), pace=Pace(concurrency=run.num_clients))
    ttfts, tpots = [], []
    for stats in outcome.ended:
        assert stats.first_token_ns is not None
        ttfts.append((stats.first_token_ns - stats.arrival_ns) / 1e6)
        tpots.append((stats.ended_ns - stats.first_token_ns) / 1e6 / max(1, stats.num_generated_tokens - 1))
    return Simulated(run.speed(fmean(ttfts), fmean(tpots)), outcome.num_steps, outcome.num_outside, num_blocks)


@cache
def cost_of(folder: Path, runs: Runs, num_gpus: int) -> CostModel:
    config = folder / CONFIGS / f"{runs.config}_config.json"
    choice = Choice(model_config=config, engine=runs.tables, weights=runs.weights, kv=runs.kv, num_gpus=num_gpus)
    cost = import_folder(folder / SYSTEMS / "data" / runs.system, choice).cost
    return replace(cost, host_step_ns=1e3 * runs.host_step_us, host_row_ns=1e3 * runs.host_row_us)


def blocks_of(folder: Path, run: Run) -> int:
    """Return the KV blocks that a GPU has beside the weights, and what AIConfigurator's file of the system sets aside."""
    runs, gpus = run.runs, run.num_gpus
    model = read_model(folder / CONFIGS / f"{runs.config}_config.json")
    text = (folder / SYSTEMS / f"{runs.system}.yaml").read_text()

    def value(name: str) -> int:
        match = re.search(rf"^ +{name}: +(\d+)", text, re.MULTILINE)
        assert match, name
        return int(match[1])

    taken = weight_bytes(model, runs.weights, gpus) + value("other_mem") + value(str(gpus))
    share, memory = runs.memory_share, value("mem_capacity")
    left = share * (memory - taken) if runs.is_share_of_rest else share * memory - taken
    token_bytes = 2 * model.num_layers * model.kv_heads_of(gpus) * model.head_size * BYTES[runs.kv]
    return int(left / token_bytes) // BLOCK_SIZE


def weight_bytes(model: Model, weights: str, num_gpus: int) -> float:
    layer = sum(outputs * inputs for outputs, inputs in model.products(num_gpus).values())
    return model.num_layers * layer * BYTES[weights] + 2 * model.vocab_size * model.hidden_size / num_gpus * BYTES["bfloat16"]


def figures(name: str, pairs: Sequence[tuple[Run, Simulated]]) -> Mapping[str, float]:
    measured, simulated = [run.measured for run, _ in pairs], [one.speed for _, one in pairs]
    found: dict[str, float] = {
        "runs": len(pairs),
        "rank_correlation": round(rank_correlation(*([s.throughput for s in of] for of in (measured, simulated))), 4),
        "outside": round(sum(one.num_outside for _, one in pairs) / sum(one.num_steps for _, one in pairs), 4),
    }
    line = f"{name:40}{len(pairs):7}{found['rank_correlation']:7.3f}"
    for kind, width in (("throughput", 11), ("tpot", 7), ("ttft", 7)):
        errors = [getattr(s, kind) / getattr(m, kind) - 1 for m, s in zip(measured, simulated, strict=True)]
        found[f"{kind}_error"] = round(median(map(abs, errors)), 4)
        found[f"{kind}_signed"] = round(median(errors), 4)
        line += f"{found[f'{kind}_error']:{width}.1%}{found[f'{kind}_signed']:+8.1%}"
    print(line)
    return found


def line_of(run: Run, one: Simulated) -> str:
    shape = f"{run.num_prompt_tokens}+{run.num_output_tokens}, {run.num_clients} clients, {run.num_gpus} GPUs"
    cells = ""
    for kind in ("ttft", "tpot", "throughput"):
        was, found = getattr(run.measured, kind), getattr(one.speed, kind)
        cells += f"{was:11.1f}{found:10.1f}{found / was - 1:+8.1%}"
    return f"{run.runs.name:40}{shape:36}{cells}{one.num_blocks:8}{one.num_outside / one.num_steps:7.1%}"


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's coefficient. Equal values share the mean of their ranks."""
    xs, ys = ranks(left), ranks(right)
    mean = (len(xs) - 1) / 2
    spread = (sum((x - mean) ** 2 for x in xs) * sum((y - mean) ** 2 for y in ys)) ** 0.5
    return sum((x - mean) * (y - mean) for x, y in zip(xs, ys, strict=True)) / spread if spread else 1.0


def ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [fmean(places[value]) for value in values]


if __name__ == "__main__":
    main()
