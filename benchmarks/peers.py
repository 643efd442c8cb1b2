"""How does Penstock compare with other CPU servers? The same workload, weights from the same file, the same machine and run.

Each round starts every contender in turn, alone on the machine, and loads it with the same prompts at each
concurrency: a closed loop, greedy, `ignore_eos`, streamed over HTTP (OpenVINO GenAI: in its own process, without HTTP). Every
second round goes backwards. A ratio is the median of the rounds' ratios; everything else is the median of the rounds. The
machine's peaks are probed before each contender.

    python benchmarks/peers.py --setup   # makes what is missing in build/peers (gigabytes; many minutes), then measures
    python benchmarks/peers.py --model qwen --model-file Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf
    python benchmarks/peers.py --peers penstock openvino --workload short --repeat 5
    python benchmarks/peers.py --add build/results/peers-sharegpt.txt --repeat 1   # one round more for an earlier result

Rounds are only added to those of the same contenders, with the same settings, versions, build of Penstock, model file and
prompts.

Needs the traces (`workloads.py`); for llama.cpp CMake and a C++ compiler. A peer that is missing or fails is left out with
the reason. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, DEFAULT_CONTENDERS, OURS, Setting
from origin import build_told, contenders_told, file_sha256, read_same, sha256
from peer_setup import RECIPES, Environments, SetupError
from sessions import Contender, ContenderError, LoadError, Session, running, summarise, warm_up
from workloads import DEFAULT_TRACES, WORKLOADS, Source, describe, read_jobs, read_tokenizer

from penstock import machine
from penstock.lab.records import Sent
from penstock.lab.workload import Job

DEFAULT_ENVIRONMENTS = Path(__file__).parents[1] / "build" / "peers"
START_CHARS = 200
CONTEXT_STEP = 256


@dataclass(frozen=True, slots=True)
class Model:
    """The models that are compared, and their default load."""

    file: str
    """MODEL as Penstock takes it, unless `--model-file` says another."""
    llama_quantization: str | None
    """The file that llama.cpp gets instead of this one, where it has no fast kernel for that."""
    loads: Mapping[int, int]
    """Number of requests for each concurrency."""
    max_prompt_tokens: int
    max_reply_tokens: int


MODELS: Mapping[str, Model] = {
    "smollm2": Model("smollm2:135m", "Q4_0", {32: 96, 8: 32, 1: 8}, 512, 200),
    "qwen": Model("qwen2.5-coder:1.5b", None, {16: 24, 1: 8}, 256, 64),
}


def probe(num_cpus: int) -> dict[str, float]:
    """The machine's peaks right now."""
    from penstock.backends.native import _native

    return {
        "int8_gops": round(_native.peak_gops(_native.ProbeKind.INT8, num_threads=num_cpus), 1),
        "read_gbs": round(_native.peak_read_gbs(num_threads=num_cpus), 1),
    }


@dataclass
class Record:
    """One contender's rounds; the n-th element of every list is of round `rounds[n]`."""

    installed_mb: float
    rounds: list[int] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    probes: list[dict[str, float]] = field(default_factory=list)
    runs: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    starts: dict[int, list[str]] = field(default_factory=dict)
    """The first characters of each reply, of the last round."""

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Record:
        """The content that `saved` wrote, read from JSON."""
        by_load = {name: {int(c): list(found) for c, found in saved[name].items()} for name in ("runs", "starts")}
        return cls(**{**saved, **by_load})

    def saved(self) -> dict[str, Any]:
        """All rounds, for `--add`."""
        return asdict(self)

    def medians(self) -> dict[str, Any]:
        by_concurrency = {str(concurrency): median_figures(runs) for concurrency, runs in self.runs.items()}
        return {
            "num_rounds": len(self.rounds),
            "ready_s": round(statistics.median(self.ready_s), 2),
            "resident_mb": round(statistics.median(self.resident_mb), 1),
            "installed_mb": round(self.installed_mb, 1),
            "probe": median_figures(self.probes),
            "by_concurrency": by_concurrency,
        }


def median_figures(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure, and the throughput of every round."""
    figures: dict[str, Any] = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    if "output_tokens_per_s" in figures:
        figures["rounds"] = [round(run["output_tokens_per_s"], 1) for run in runs]
    return figures


def measure(
    contender: Contender,
    jobs: Sequence[Job],
    loads: Mapping[int, int],
    log: Path,
    num_cpus: int,
    round_idx: int,
    record: Record,
) -> None:
    """One round of one contender, added to its record as a whole. Raises ContenderError or LoadError."""
    probed = probe(num_cpus)
    runs, starts = {}, {}
    with running(contender, log) as session:
        warm_up(session, jobs, max(loads))
        for concurrency, count in loads.items():
            runs[concurrency], sent = measured(session, jobs[:count], concurrency)
            starts[concurrency] = [record.text.strip()[:START_CHARS] for record in sent.records]
            print(show(contender.name, concurrency, runs[concurrency]), flush=True)
        record.ready_s.append(session.ready_s)
        record.resident_mb.append(session.resident_mb())
    record.rounds.append(round_idx)
    record.dates.append(time.strftime("%Y-%m-%d"))
    record.probes.append(probed)
    for concurrency, figures in runs.items():
        record.runs.setdefault(concurrency, []).append(figures)
        record.starts[concurrency] = starts[concurrency]


def measured(session: Session, jobs: Sequence[Job], concurrency: int) -> tuple[dict[str, float], Sent]:
    start_cpu_s = session.cpu_s()
    sent = session.replay(jobs, concurrency)
    return summarise(sent) | {"server_cpu_s": session.cpu_s() - start_cpu_s}, sent


def show(name: str, concurrency: int, figures: Mapping[str, float]) -> str:
    shown = ("output_tokens_per_s", "prompt_tokens", "ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms", "server_cpu_s")
    return f"{name}, concurrency {concurrency}: " + ", ".join(f"{key} {figures[key]:.5g}" for key in shown)


def prepare(names: Sequence[str], setting: Setting, *, setup: bool, skipped: dict[str, str]) -> list[Contender]:
    """The contenders that can run here; the others' reasons go to `skipped`."""
    ready: list[Contender] = []
    for name in names:
        environment, describe_contender = CONTENDERS[name]
        try:
            if environment is not None and setup:
                setting.environments.make(environment)
            if environment is not None and not setting.environments.is_made(environment):
                raise SetupError(f"{RECIPES[environment][0]} is not in {setting.environments.root}; make it with --setup")
            ready.append(describe_contender(setting))
        except SetupError as error:
            skipped[name] = str(error)
            print(f"{name} is left out: {error}", flush=True)
    return ready


def compete(
    ready: Sequence[Contender],
    repeat: int,
    measure_one: Callable[[Contender, int, Record], None],
    skipped: dict[str, str],
    earlier: Mapping[str, Record] | None = None,
) -> dict[str, Record]:
    """All rounds, after those of an earlier run. A contender that fails is left out from then on; `skipped` says why."""
    records = dict(earlier or {})
    first = num_rounds(records)
    for contender in ready:
        records.setdefault(contender.name, Record(contender.installed_mb())).installed_mb = contender.installed_mb()
    for round_idx in range(first, first + repeat):
        for contender in ready if round_idx % 2 == 0 else reversed(ready):
            if contender.name in skipped:
                continue
            try:
                measure_one(contender, round_idx, records[contender.name])
            except (ContenderError, LoadError, OSError, ValueError) as error:
                skipped[contender.name] = f"failed in round {round_idx + 1}: {error}"
                print(f"{contender.name} {skipped[contender.name]}", flush=True)
    return {name: record for name, record in records.items() if record.runs}


def num_rounds(records: Mapping[str, Record]) -> int:
    return max((1 + round_idx for record in records.values() for round_idx in record.rounds), default=0)


def ratios(records: Mapping[str, Record]) -> dict[str, dict[str, float]]:
    """Our throughput over each peer's: the median over the rounds that both have."""
    found: dict[str, dict[str, float]] = {}
    if OURS not in records:
        return found
    for name, record in records.items():
        for concurrency, runs in record.runs.items() if name != OURS else ():
            ours = dict(zip(records[OURS].rounds, records[OURS].runs[concurrency], strict=True))
            pairs = [(ours[k], run) for k, run in zip(record.rounds, runs, strict=True) if k in ours]
            quotients = [our["output_tokens_per_s"] / their["output_tokens_per_s"] for our, their in pairs]
            if quotients:
                found.setdefault(name, {})[str(concurrency)] = round(statistics.median(quotients), 3)
    return found


def common_starts(records: Mapping[str, Record]) -> dict[str, float]:
    """Mean number of characters for which a peer's replies are ours: a check that it was asked the same of the same weights.

    A small model's replies part soon, since everybody rounds in another way; with a wrong prompt hardly a character is common.
    """
    if OURS not in records:
        return {}
    ours = list(chain.from_iterable(records[OURS].starts.values()))
    means = {}
    for name, record in records.items():
        if not ours or not record.starts:
            continue  # no round of this run
        pairs = zip(ours, chain.from_iterable(record.starts.values()), strict=True)
        means[name] = round(statistics.mean(num_common(*pair) for pair in pairs), 1)
    return means


def num_common(a: str, b: str) -> int:
    """Characters before the first in which two texts differ."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def with_rounds_told(records: Mapping[str, Record]) -> dict[str, Record]:
    """The records by name, with the number of rounds in the name where not all have as many."""
    numbers = {len(record.rounds) for record in records.values()}
    return {name if len(numbers) == 1 else f"{name} (n={len(record.rounds)})": record for name, record in records.items()}


def dates(records: Mapping[str, Record]) -> str:
    """The day of all rounds, or the first and the last."""
    found = sorted({day for record in records.values() for day in record.dates})
    return " to ".join(dict.fromkeys([found[0], found[-1]])) if found else time.strftime("%Y-%m-%d")


def table(records: Mapping[str, Record], loads: Mapping[int, int]) -> str:
    """Output tokens per second of every contender, as a table in Markdown."""
    columns = [*(f"c={concurrency}" for concurrency in loads), "ready s", "resident MB", "installed MB"]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, record in with_rounds_told(records).items():
        medians = record.medians()
        rates = [f"{medians['by_concurrency'][str(c)]['output_tokens_per_s']:.0f}" for c in loads]
        lines.append(
            "| " + " | ".join([name, *rates, *(str(medians[k]) for k in ("ready_s", "resident_mb", "installed_mb"))]) + " |"
        )
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", nargs="+", choices=CONTENDERS, default=DEFAULT_CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS)
    )
    parser.add_argument("--setup", action="store_true", help="make the environments that are missing")
    parser.add_argument(
        "--envs", type=Path, default=DEFAULT_ENVIRONMENTS, help="folder of the environments (default: build/peers)"
    )
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--model-file", help="its GGUF file (default: the catalogue's)")
    parser.add_argument("--workload", choices=WORKLOADS, default="sharegpt")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: ../shared/traces)")
    parser.add_argument("--concurrency", type=int, nargs="+", help="default: 32 8 1; for qwen 16 1")
    parser.add_argument("--requests", type=int, nargs="+", help="for each concurrency; default: 96 32 8; for qwen 24 8")
    parser.add_argument(
        "--add", type=Path, metavar="FILE", help="add the rounds to this earlier result, measured in the same way"
    )
    parser.add_argument(
        "--title", default="", help="what is compared, if it is not the servers with the settings they have by default"
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds; 0 only makes what is missing (default: %(default)s)")
    args = parser.parse_args()
    if (args.concurrency is None) != (args.requests is None) or len(args.concurrency or ()) != len(args.requests or ()):
        parser.error("--concurrency and --requests take as many numbers as each other")
    return args


def read_earlier(path: Path, expected: Mapping[str, Any]) -> dict[str, Record]:
    """The rounds of an earlier result. Raises SystemExit if it was measured in another way."""
    return {name: Record.read(saved) for name, saved in read_same(path, expected)["records"].items()}


def find_model(name: str) -> Path:
    """The GGUF file that a MODEL argument names. Raises PenstockError, or SystemExit if it is not there."""
    from penstock.models.catalog import default_cache_dir, resolve

    source = resolve(name, default_cache_dir())
    if not source.is_present:
        raise SystemExit(
            f"{source.path} is missing. Fetch it with `penstock pull {name}`, or name another file with --model-file."
        )
    return source.path.resolve()


def main() -> None:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the contender is stopped, too
    model = MODELS[args.model]
    loads = dict(zip(args.concurrency, args.requests, strict=True)) if args.concurrency else dict(model.loads)
    gguf = find_model(args.model_file or model.file)
    source = Source(args.traces, read_tokenizer(gguf), model.max_prompt_tokens, model.max_reply_tokens)
    jobs = read_jobs(args.workload, source, max(loads.values()))
    print(f"{gguf.name}, {args.workload}: {describe(jobs)}", flush=True)
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    num_cpus = len(os.sched_getaffinity(0))
    max_tokens = -(-(longest + 1) // CONTEXT_STEP) * CONTEXT_STEP
    setting = Setting(Environments(args.envs), gguf, model.llama_quantization, max(loads), max_tokens, num_cpus)
    skipped: dict[str, str] = {}
    ready = prepare(args.peers, setting, setup=args.setup, skipped=skipped)
    origin = {
        "title": args.title,
        "cpu": machine.cpu_name(),
        "model": gguf.name,
        "model_sha256": file_sha256(gguf),
        "jobs_sha256": sha256(repr(job).encode() for job in jobs),
        "build": build_told(),
        "settings": contenders_told(ready),
        "workload": {"name": args.workload, **describe(jobs)},
        "loads": loads,
        "cpus": num_cpus,
    }
    earlier = read_earlier(args.add, origin) if args.add else {}

    def measure_one(contender: Contender, round_idx: int, record: Record) -> None:
        log = setting.environments.log(f"{contender.name}-{round_idx + 1}")
        measure(contender, jobs, loads, log, num_cpus, round_idx, record)

    records = compete(ready, args.repeat, measure_one, skipped, earlier)
    print(table(records, loads))
    report = {
        "benchmark": "peers",
        "date": dates(records),
        **origin,
        "repeat": num_rounds(records),
        "contenders": {name: record.medians() for name, record in records.items()},
        "times_peer": ratios(records),
        "common_start_chars": common_starts(records),
        "left_out": skipped,
        "records": {name: record.saved() for name, record in records.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
