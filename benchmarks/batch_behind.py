"""How much does a background batch slow interactive requests, and what does it get?

    python benchmarks/batch_behind.py                       # about 20 minutes
    python benchmarks/batch_behind.py --rounds 1 --load 0.3
    python benchmarks/batch_behind.py --another             # the batch is for a second model of the server, from the same file

Each round measures the capacity: a closed loop of `--users`. Then people send requests at `--load` times that rate (Poisson),
once alone and once with a batch behind; last, the batch runs alone. All prompts and answers have the same lengths, and the
prefix cache is off. `share of the rest` is the batch's token rate over `1 - load` times its rate alone. `busy` is the server's
share of the processors. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from printed import origin, spread, table
from processes import Contender
from sessions import SERVED_NAME, ServerSession, running
from usage import cpu_s, family, metric
from workloads import read_tokenizer

from penstock.lab.client import send
from penstock.lab.figures import Samples, make_figures
from penstock.lab.pacing import Pace
from penstock.lab.prompts import Tokenizer, write_prompts
from penstock.lab.records import Sent
from penstock.lab.target import Target
from penstock.lab.workload import Workload
from penstock.lab.workload_choice import WorkloadChoice, make_workload
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve

ALONE_S = 20.0
"""How long the batch runs alone."""
SETTLES_S = 3.0
MANY_LINES = 5000
_COMMAND = [sys.executable, "-m", "penstock", "serve"]
_OPTIONS = ["--port", "{port}", "--no-prefix-caching"]
_OTHER_NAME = "other"


@dataclass(frozen=True, slots=True)
class People:
    """Latencies of one run."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    busy: float
    batch_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Round:
    capacity: float
    """Requests/s of the closed loop."""
    alone: People
    beside: People
    """The same load while a batch runs."""
    batch_alone_tokens_per_s: float


class Server:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._model = resolve(args.model, default_cache_dir()).path
        self._tokenizer = read_tokenizer(self._model)

    def round(self, nth: int) -> Round:
        args = self._args
        with self._running() as session:
            sent = self._send(session, nth, users=args.users)
            capacity = make_figures(Samples.of(sent.records)).rates.requests_per_s.value or 0.0
            alone = self._people(session, nth, args.load * capacity)
            batch_id = self._begin_batch(session, nth)
            beside = self._people(session, nth, args.load * capacity)
            before, began_s = self._batch_tokens(session), time.perf_counter()
            time.sleep(ALONE_S)
            rate = (self._batch_tokens(session) - before) / (time.perf_counter() - began_s)
            status = httpx.get(f"{session.url}/v1/batches/{batch_id}", timeout=60).raise_for_status().json()["status"]
            assert status == "in_progress", f"the batch is {status} already: it needs more than {MANY_LINES} lines"
        found = Round(capacity, alone, beside, rate)
        print(f"round {nth + 1}: {found}", file=sys.stderr, flush=True)
        return found

    @contextmanager
    def _running(self) -> Iterator[ServerSession]:
        names = [SERVED_NAME, _OTHER_NAME] if self._args.another else [SERVED_NAME]
        models = "".join(f'[[models]]\nmodel = "{self._model}"\nserved_model_name = ["{name}"]\n' for name in names)
        config = self._folder / "models.toml"
        config.write_text(models)
        with tempfile.TemporaryDirectory() as jobs:
            command = [*_COMMAND, "--config", str(config), *_OPTIONS, "--jobs-dir", jobs, *self._args.options.split()]
            with running(Contender("penstock", command), self._folder / "server.log") as session:
                assert isinstance(session, ServerSession)
                yield session

    def _people(self, session: ServerSession, nth: int, rate: float) -> People:
        before, used_s, began_s = self._batch_tokens(session), _cpu_s(session), time.perf_counter()
        figures = make_figures(Samples.of(self._send(session, nth, rate=rate).records))
        took_s = time.perf_counter() - began_s
        ttft, itl = (figures.latency_ms[name].quantiles for name in ("ttft", "itl"))
        return People(
            *[round(quantiles[part].value or 0.0, 1) for quantiles in (ttft, itl) for part in ("p50", "p99")],
            busy=round((_cpu_s(session) - used_s) / took_s / len(os.sched_getaffinity(0)), 3),
            batch_tokens_per_s=round((self._batch_tokens(session) - before) / took_s, 1),
        )

    def _send(self, session: ServerSession, nth: int, *, rate: float | None = None, users: int | None = None) -> Sent:
        workload = self._workload(self._args.requests, rate=rate, seed=2 * nth)
        return send(workload, Target(url=session.url, model=session.model), pace=Pace(concurrency=users))

    def _workload(self, count: int, *, rate: float | None, seed: int) -> Workload:
        args = self._args
        lengths = {"input_tokens": args.input_tokens, "output_tokens": args.output_tokens}
        tokenizer: Tokenizer = self._tokenizer
        return write_prompts(
            make_workload(WorkloadChoice(requests=count, rate=rate, seed=seed, **lengths)), tokenizer, seed=seed
        )

    def _begin_batch(self, session: ServerSession, nth: int) -> str:
        jobs = self._workload(MANY_LINES, rate=None, seed=2 * nth + 1).jobs
        fixed = {"model": _OTHER_NAME if self._args.another else SERVED_NAME, "ignore_eos": True, "temperature": 0}
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": job.prompt, "max_tokens": job.num_output_tokens, **fixed},
            }
            for number, job in enumerate(jobs)
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        form = {"files": {"file": ("lines.jsonl", data)}, "data": {"purpose": "batch"}}
        file = httpx.post(f"{session.url}/v1/files", timeout=120, **form).raise_for_status().json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = httpx.post(f"{session.url}/v1/batches", json=asked, timeout=120).raise_for_status().json()
        while not self._batch_tokens(session):
            time.sleep(0.2)
        time.sleep(SETTLES_S)
        return str(batch["id"])

    @staticmethod
    def _batch_tokens(session: ServerSession) -> float:
        """Return the tokens of prompts and answers of the batch so far."""
        return sum(metric(session.url, f'penstock_job_tokens_total{{kind="{kind}"}}') for kind in ("input", "output"))


def _cpu_s(session: ServerSession) -> float:
    return sum(map(cpu_s, family(session.process.pid)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="MODEL of penstock serve (default: %(default)s)")
    parser.add_argument("--users", type=int, default=32, help="of the closed loop (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="of people, each run (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.5, help="of people, over the capacity (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--input-tokens", default="256")
    parser.add_argument("--output-tokens", default="128")
    parser.add_argument("--another", action="store_true", help="the batch is for a second model")
    parser.add_argument("--options", default="", help="more options of the servers, in one word")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args, Path(folder))
        rounds = [server.round(nth) for nth in range(args.rounds)]
    print(origin(f"people at {args.load:g} of the capacity", "medians of the rounds and their range"))
    print(table(["people", "TTFT p50, ms", "TTFT p99", "ITL p50", "ITL p99", "busy"], _rows(rounds)))
    shares = [one.beside.batch_tokens_per_s / ((1 - args.load) * one.batch_alone_tokens_per_s) for one in rounds]
    print(f"\nThe batch got {spread(shares, 2)} of the rest.\n")
    print(json.dumps({"load": args.load, "shares": shares, "rounds": [asdict(one) for one in rounds]}))


def _rows(rounds: Sequence[Round]) -> list[list[str]]:
    names = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    rows = []
    for title, runs in (("alone", [one.alone for one in rounds]), ("with a batch behind", [one.beside for one in rounds])):
        rows.append(
            [title, *[spread([getattr(run, name) for run in runs], 1) for name in names], spread([run.busy for run in runs], 2)]
        )
    ratios = [[getattr(one.beside, name) / getattr(one.alone, name) for one in rounds] for name in names]
    return [*rows, ["ratio", *[spread(ratio, 2) for ratio in ratios], ""]]


if __name__ == "__main__":
    main()
