"""How does Penstock compare with other CPU servers? The same workload, weights from the same file, the same machine and run.

Each round loads every contender in turn, alone on the machine, at each concurrency with prompts of its own (or Penstock would
guess from its answers to them): a closed loop of the lab's client, greedy, `ignore_eos`, streamed over HTTP (OpenVINO GenAI: in
its own process). Every second round goes backwards. Figures are medians of the rounds; in bold: Penstock's over the peer's.
`in all`: with prompt tokens. `like ours`: mean number of leading characters equal to Penstock's reply. The last line is JSON.

    python benchmarks/peers.py --setup   # makes what is missing in build/peers (gigabytes; many minutes), then measures
    python benchmarks/peers.py --model qwen --model-file Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf
    python benchmarks/peers.py --peers penstock openvino --workload short --repeat 5   # or azure, long
    python benchmarks/peers.py --peers penstock "penstock --kv-cache-dtype bf16" "llamacpp -ctk q8_0 -ctv q8_0" "vllm awq"

Needs the traces (`workloads.py`); for llama.cpp CMake and a C++ compiler. A peer that is missing or fails is left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TypeVar

from contenders import CONTENDERS, MODELS, OURS, Setting, prepared
from peaks import usable_threads
from peer_setup import Environments
from printed import origin, spread, table
from processes import Contender, ContenderError
from sessions import LoadError, running, warm_up
from workloads import DEFAULT_TRACES, WORKLOADS, Source, describe, read_jobs, read_tokenizer

from penstock.lab.workload import Job
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve

ENVIRONMENTS = Path(__file__).parents[1] / "build" / "peers"
START_CHARS = 200
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Round:
    """One contender in one round."""

    ready_s: float
    resident_mb: float
    rates: Mapping[int, float]
    """Output tokens per second by concurrency."""
    in_all: Mapping[int, float]
    """Likewise, of prompts and replies together."""
    starts: Sequence[str]
    """The first characters of each reply."""


def measure(contender: Contender, jobs: Sequence[Job], loads: Mapping[int, int], log: Path) -> Round:
    """Raises ContenderError or LoadError."""
    rates, in_all, starts, left = {}, {}, [], iter(jobs)
    with running(contender, log) as session:
        warm_up(session, jobs, max(loads))
        for concurrency, count in loads.items():
            sent = session.replay(own := list(islice(left, count)), concurrency)
            rates[concurrency] = 1e9 * sum(record.num_output_tokens for record in sent.records) / sent.duration_ns
            in_all[concurrency] = rates[concurrency] + 1e9 * describe(own)["prompt_tokens"] / sent.duration_ns
            starts += [record.text.strip()[:START_CHARS] for record in sent.records]
            print(f"{contender.name}, {concurrency} at a time: {rates[concurrency]:.0f} tokens/s", file=sys.stderr, flush=True)
        return Round(session.ready_s, session.resident_mb(), rates, in_all, starts)


def num_common(a: str, b: str) -> int:
    """Length of the common beginning of two texts: with a wrong prompt, close to none."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def compared(
    rounds: Mapping[str, Mapping[int, Round]], installed_mb: Mapping[str, float], loads: Sequence[int]
) -> tuple[str, dict[str, dict[int, float]]]:
    """(a table with a line for each contender, Penstock's throughput over theirs); ratios are of the rounds that both have."""
    ours, lines = rounds.get(OURS, {}), []
    ratios: dict[str, dict[int, float]] = {name: {} for name in rounds}
    for name, theirs in rounds.items():
        both = [(ours[turn], theirs[turn]) for turn in ours.keys() & theirs.keys()] if name != OURS else []
        cells = []
        for load in loads:
            cell = spread([one.rates[load] for one in theirs.values()], 0)
            if both:
                ratios[name][load] = statistics.median(mine.rates[load] / peer.rates[load] for mine, peer in both)
                cell += f" **{ratios[name][load]:.2f}**"
            cells += [cell, f"{statistics.median(one.in_all[load] for one in theirs.values()):.0f}"]
        ready_s = statistics.median(one.ready_s for one in theirs.values())
        resident_mb = statistics.median(one.resident_mb for one in theirs.values())
        starts = [pair for mine, peer in both for pair in zip(mine.starts, peer.starts, strict=True)]
        common = f"{statistics.mean(num_common(*pair) for pair in starts):.0f}" if starts else ""
        lines.append([name, *cells, f"{ready_s:.2f}", f"{resident_mb:.0f}", f"{installed_mb[name]:.0f}", common])
    columns = [column for load in loads for column in (f"{load} at a time", "in all")]
    return table(["output tokens/s", *columns, "ready s", "resident MB", "installed MB", "like ours"], lines), ratios


def compete(
    ready: Sequence[Contender], repeat: int, measure_one: Callable[[Contender, int], Found]
) -> dict[str, dict[int, Found]]:
    """Run all rounds, by contender and turn. A contender that fails is reported, and left out from then on."""
    rounds: dict[str, dict[int, Found]] = {contender.name: {} for contender in ready}
    left = list(ready)
    for turn in range(repeat):
        for contender in list(left if turn % 2 == 0 else reversed(left)):
            try:
                rounds[contender.name][turn] = measure_one(contender, turn)
            except (ContenderError, LoadError, OSError, ValueError) as error:
                left.remove(contender)
                print(f"{contender.name} failed in round {turn + 1}: {error}", flush=True)
    return {name: found for name, found in rounds.items() if found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(CONTENDERS), help=", ".join(CONTENDERS))
    parser.add_argument("--setup", action="store_true", help="make the environments that are missing")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--model-file", help="its GGUF file (default: the catalogue's)")
    parser.add_argument("--workload", choices=WORKLOADS, default="sharegpt")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: ../shared/traces)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; 0 only makes what is missing (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the contender is stopped, too
    model = MODELS[args.model]
    gguf = resolve(args.model_file or model.file, default_cache_dir()).path.resolve()
    if not gguf.is_file():
        parser.error(f"{gguf} is missing: fetch it with `penstock pull {model.file}`, or name another file with --model-file")
    source = Source(args.traces, read_tokenizer(gguf), model.max_prompt_tokens, model.max_reply_tokens)
    loads = model.loads(args.workload)
    jobs = read_jobs(args.workload, source, sum(loads.values()))
    setting = Setting(Environments(ENVIRONMENTS), gguf, model, loads, jobs)
    ready = list(prepared(args.peers, setting, setup=args.setup))

    def measure_one(contender: Contender, turn: int) -> Round:
        return measure(contender, jobs, loads, setting.environments.log(f"{contender.name}-{turn + 1}"))

    rounds = compete(ready, args.repeat, measure_one)
    print(origin(f"{gguf.name}, {args.workload}", f"{usable_threads()} threads", "medians of the rounds and their range"))
    lines, ratios = compared(rounds, {one.name: one.installed_mb() for one in ready}, list(loads))
    print(lines, json.dumps({"benchmark": "peers", "model": args.model, "workload": args.workload, "ratios": ratios}), sep="\n")


if __name__ == "__main__":
    main()
