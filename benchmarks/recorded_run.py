"""Simulates a run of vLLM that others have recorded, with their kernel times, and compares request by request.

    python benchmarks/recorded_run.py ../shared/traces/gpu/rtxpro6000_llama-3.1-8b --plot run.svg

The folder has the kernel tables and the recording as LLMServingSim publishes them: requests.jsonl and meta.json. Arrivals,
lengths and engine settings are the recording's. No other number is taken from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from penstock.lab.cost_model import CostModel
from penstock.lab.kernel_files import Choice
from penstock.lab.kernel_import import import_folder
from penstock.lab.plots import Axis, Panel, Series, draw
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.workload import NS_PER_S, Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity

BLOCK_SIZE = 16
LINK_GBYTES_PER_S, LINK_LATENCY_US = 16 * 2**30 / 1e9, 20.0
"""The link in LLMServingSim's configurations of these machines, in which a gigabyte has 2^30 bytes."""
MAX_MODEL_LEN = 1 << 17
USUAL_BLOCKS = 1 << 15
"""KV blocks if the recording does not say how many there were."""


class Times(NamedTuple):
    """Instants of one request, in seconds since the first arrival."""

    arrival: float
    scheduled: float
    first: float
    last: float
    num_output_tokens: int

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.num_output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.last - self.arrival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="of the model, if it is not known")
    parser.add_argument("--link-gbytes-per-s", type=float, default=LINK_GBYTES_PER_S, help="between several GPUs")
    parser.add_argument("--link-latency-us", type=float, default=LINK_LATENCY_US)
    parser.add_argument("--requests", type=Path, help="requests.jsonl, if it is elsewhere; meta.json lies beside it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="running and waiting requests over time")
    asked = parser.parse_args()
    path = asked.requests or asked.folder / "requests.jsonl"
    recorded = [json.loads(line) for line in path.read_text().splitlines() if line]
    meta = json.loads((path.parent / "meta.json").read_text())
    engine = meta["engine_kwargs"]
    if engine.get("data_parallel_size", 1) > 1:
        parser.error("Engines that share their experts (data_parallel_size above 1) are not simulated.")
    choice = Choice(
        num_layers=asked.layers,
        num_gpus=engine.get("tensor_parallel_size", 1),
        link_bytes_per_s=asked.link_gbytes_per_s * 1e9,
        link_latency_ns=asked.link_latency_us * 1e3,
    )
    saved = import_folder(asked.folder, choice)
    began_s = process_time()
    real = recorded_times(recorded)
    outcome = simulation(meta, saved.cost).run(workload(real, recorded))
    print(f"{path}: {len(recorded)} requests; {saved.words}; {process_time() - began_s:.1f} s of CPU")
    simulated = simulated_times(outcome)
    result: dict[str, Any] = {"requests": len(recorded), "steps": outcome.num_steps, "steps_outside": outcome.num_outside}
    print(f"{'ms':12}{'recorded':>12}{'simulated':>12}{'error':>9}")
    for name, kind in (("TTFT", "ttft"), ("TPOT", "tpot"), ("end to end", "e2e")):
        for how, figure in (("mean", fmean), ("p99", partial(np.quantile, q=0.99))):
            was, found = (figure([getattr(one, kind) for one in times]) * 1e3 for times in (real, simulated))
            result[f"{kind}_{how}_error"] = round(found / was - 1, 4)
            print(f"{f'{name} {how}':12}{was:12.1f}{found:12.1f}{found / was - 1:+9.1%}")
    for name, begin, end in (("arrival to scheduled", 0, 1), ("scheduled to first token", 1, 2)):
        was, found = (fmean([one[end] - one[begin] for one in times]) * 1e3 for times in (real, simulated))
        print(f"{name:26}{was:10.1f}{found:12.1f}   mean")
    print(f"{outcome.num_outside} of {outcome.num_steps} steps lie outside of the tables: {dict(outcome.outside)}")
    ends = [max(one.last for one in times) for times in (real, simulated)]
    result["duration_error"] = round(ends[1] / ends[0] - 1, 4)
    print(f"last token after {ends[0]:.2f} s, simulated {ends[1]:.2f} s")
    print(f"{'s':>6}{'running':>10}{'simulated':>10}{'waiting':>10}{'simulated':>10}")
    for second in range(0, int(max(ends)) + 1, max(1, int(max(ends)) // 20)):
        cells = [f"{counted(second, times):10}" for counted in (num_running, num_waiting) for times in (real, simulated)]
        print(f"{second:6}{''.join(cells)}")
    if asked.plot is not None:
        draw_counts(asked.plot, real, simulated, max(ends))
    print(json.dumps(result))


def recorded_times(recorded: Sequence[Mapping[str, Any]]) -> list[Times]:
    """Return times since the first arrival. Arrivals use a different clock from later events: the shortest wait between
    the two counts as zero."""
    offset = min(row["queued_ts"] - row["arrival_time"] for row in recorded)
    start = min(row["arrival_time"] for row in recorded)
    return [
        Times(
            row["arrival_time"] - start,
            row["scheduled_ts"] - offset - start,
            row["first_token_ts"] - offset - start,
            row["last_token_ts"] - offset - start,
            row["output_toks"],
        )
        for row in recorded
    ]


def simulated_times(outcome: Outcome) -> list[Times]:
    found = []
    for stats in outcome.ended:
        instants = (stats.arrival_ns, stats.first_scheduled_ns, stats.first_token_ns, stats.ended_ns)
        arrival, scheduled, first, last = ((at or 0) / NS_PER_S for at in instants)
        found.append(Times(arrival, scheduled, first, last, stats.num_generated_tokens))
    return found


def workload(real: Sequence[Times], recorded: Sequence[Mapping[str, Any]]) -> Workload:
    jobs = [
        Job(
            arrival_ns=round(times.arrival * NS_PER_S),
            num_prompt_tokens=row["input_toks"],
            num_output_tokens=row["output_toks"],
        )
        for times, row in zip(real, recorded, strict=True)
    ]
    return Workload(name="the recorded run", jobs=jobs)


def simulation(meta: Mapping[str, Any], cost: CostModel) -> Simulation:
    """Return a simulated server with the preset `vllm` and the recording's engine settings."""
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache") or {}
    num_blocks = cache.get("num_gpu_blocks") or USUAL_BLOCKS
    return Simulation(
        capacity=Capacity(
            num_blocks=num_blocks,  # vLLM's number also counts the null block
            block_size=BLOCK_SIZE,
            max_rows=engine["max_num_seqs"],
            max_step_tokens=engine["max_num_batched_tokens"],
            max_model_len=min(engine["max_model_len"] or MAX_MODEL_LEN, (num_blocks - 1) * BLOCK_SIZE),
        ),
        make_policies=partial(make_policies, "vllm"),
        cost=cost,
        max_tokens=None,
        depth=2,
    )


def num_waiting(at: float, times: Sequence[Times]) -> int:
    return sum(one.arrival <= at < one.scheduled for one in times)


def num_running(at: float, times: Sequence[Times]) -> int:
    return sum(one.scheduled <= at < one.last for one in times)


def draw_counts(path: Path, real: Sequence[Times], simulated: Sequence[Times], until: float) -> None:
    instants = [until * idx / 400 for idx in range(401)]
    series = [
        Series(f"{name}, {origin}", [(at, count(at, times)) for at in instants], "line")
        for name, count in (("running", num_running), ("waiting", num_waiting))
        for origin, times in (("recorded", real), ("simulated", simulated))
    ]
    panel = Panel("Requests", Axis("seconds"), Axis("requests"), series)
    draw("A recorded run of vLLM, and simulated", [panel]).save(path)


if __name__ == "__main__":
    main()
