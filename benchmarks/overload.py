"""What does a server do with twice the load that it can take? The door with a target, and a queue without bound, over HTTP.

1. Capacity: requests per second in a closed loop with as many clients as rows, while all of them are busy, without a door;
   before all else and after it, since a machine that others use changes. The mean counts.
2. Arrivals at twice that, Poisson and gamma with a coefficient of variation of 4, first at a server that was given a target
   (`--slo-ttft`), then at one that lets everyone wait. A client that is sent away comes back when `Retry-After` says, once the
   arrivals are over, too.

Goodput counts the answers, after the first five seconds, whose first token came within the target, at both servers. Prompts
and replies are ShareGPT's, cut short so that a run has many; none begins like another, in any run. A run must be several times
as long as its longest answers.

    benchmarks/overload.py                         four minutes on a quiet machine
    benchmarks/overload.py --seconds 60 --slo-ttft 3

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

from sessions import SERVED_NAME, Contender, ServerSession, quantile, running
from workloads import DEFAULT_TRACES, Source, read_jobs, read_tokenizer

from penstock.lab.arrivals import gamma
from penstock.lab.client import SendOptions, send
from penstock.lab.records import End, Record, Sent
from penstock.lab.target import Target
from penstock.lab.workload import Job, Workload
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve

KINDS = {"poisson": 1.0, "gamma cv 4": 4.0}
OVERLOAD = 2.0
SKIP_S = 5.0
"""At the beginning of a run: the rows fill."""
NUM_JOBS = 400
CLIENTS_PER_RUN = 10**5
"""More than ever come."""
ROUNDS = 6
"""Requests per row of the closed loop."""
UNBOUNDED = ("--max-queue", "1000000", "--kv-headroom", "0")


@dataclass(frozen=True, slots=True)
class Verdict:
    arrivals: str
    door: str
    clients: int
    refused: int
    """Clients that were sent away at least once."""
    goodput: float
    """Requests per second."""
    goodput_share: float
    """Goodput as a share of the capacity."""
    ttft_p50_s: float
    ttft_p99_s: float
    """Time to first token of requests that were let in and got a token, or were still without one when they were cut off."""
    returned: int
    returned_admitted_share: float
    """Share of the first returns that were let in."""
    retry_after_p50_s: float
    retry_after_max_s: float
    errors: int


def own_jobs(jobs: Sequence[Job], count: int, first: int = 0) -> list[Job]:
    """`count` jobs, those given again and again, each with a beginning of its own: no prompt is cached."""
    picked = (jobs[idx % len(jobs)] for idx in range(first, first + count))
    return [replace(job, prompt=f"{first + idx}. {job.prompt}") for idx, job in enumerate(picked)]


def measure_capacity(session: ServerSession, jobs: Sequence[Job], num_rows: int) -> float:
    """Requests per second in a closed loop of `num_rows`."""
    sent = session.replay(own_jobs(jobs, ROUNDS * num_rows, first=10**6), num_rows)
    ends = sorted(record.ended_ns for record in sent.records)
    # The rows are all taken from the first ends until the last clients have come.
    first, last = num_rows // 2, (ROUNDS - 1) * num_rows
    return (last - first) * 1e9 / (ends[last] - ends[first])


def arrivals(seed: int, rate: float, seconds: float, cv: float) -> list[int]:
    """Instants in nanoseconds, with gamma-distributed gaps of this coefficient of variation; 1 is Poisson."""
    count = round(2 * rate * seconds) + 100  # more than ever come
    return list(takewhile(lambda at_ns: at_ns < seconds * 1e9, gamma(random.Random(seed), count, rate, cv)))


def overload(
    session: ServerSession,
    jobs: Sequence[Job],
    times_ns: Sequence[int],
    args: argparse.Namespace,
    *,
    has_door: bool,
    first: int = 0,
) -> Sent:
    """Clients that came at these times; the last are cut off.

    `first`: the number of the first prompt; another one for each run at a server, which would else know the prompts.
    """
    due = [replace(job, arrival_ns=at_ns) for job, at_ns in zip(own_jobs(jobs, len(times_ns), first), times_ns, strict=True)]
    # Behind the door nearly all is over when the last have come back; without it, waiting longer would show nothing new.
    options = SendOptions(max_s=args.seconds * (OVERLOAD + 1 if has_door else 1.0), returns=has_door)
    return send(Workload(name="overload", jobs=due), Target(url=session.url, model=session.model), options=options)


def judge(kind: str, door: str, sent: Sent, capacity: float, args: argparse.Namespace) -> Verdict:
    """Latencies count from the call that was let in."""
    clients = [*sent.records, *sent.unfinished]
    in_time = [
        record
        for record in sent.records
        if record.end is End.OK
        and (ttft_s := _ttft_s(record)) is not None
        and ttft_s <= args.slo_ttft
        and SKIP_S <= record.ended_ns / 1e9 <= args.seconds
    ]
    # A client that was cut off without a token has waited at least so long; one that was away has not called again.
    is_away = [record.end is End.CANCELLED and record.sent_ns == record.ended_ns for record in clients]
    let_in = [
        record for record, away in zip(clients, is_away, strict=True) if not away and record.end in (End.OK, End.CANCELLED)
    ]
    ttfts = [(record.ended_ns - record.sent_ns) / 1e9 if _ttft_s(record) is None else _ttft_s(record) for record in let_in]
    refused = [record for record in clients if record.waits_ns or record.end is End.REFUSED]
    returned = [record for record, away in zip(clients, is_away, strict=True) if record.waits_ns and not away]
    waits = [wait_ns / 1e9 for record in clients for wait_ns in record.waits_ns] or [0.0]
    goodput = len(in_time) / (args.seconds - SKIP_S)
    num_admitted = sum(len(record.waits_ns) == 1 for record in returned)
    return Verdict(
        arrivals=kind,
        door=door,
        clients=len(clients) + sent.num_unsent,
        refused=len(refused),
        goodput=round(goodput, 2),
        goodput_share=round(goodput / capacity, 3),
        ttft_p50_s=round(quantile(ttfts, 0.5), 3),
        ttft_p99_s=round(quantile(ttfts, 0.99), 3),
        returned=len(returned),
        returned_admitted_share=round(num_admitted / len(returned), 3) if returned else 1.0,
        retry_after_p50_s=quantile(waits, 0.5),
        retry_after_max_s=max(waits),
        errors=sum(record.end is End.FAILED for record in clients),
    )


def _ttft_s(record: Record) -> float | None:
    return None if record.first_ns is None else (record.first_ns - record.sent_ns) / 1e9


@contextmanager
def server(model: Path, args: argparse.Namespace, *options: str) -> Iterator[ServerSession]:
    words = ["-m", "penstock", "serve", str(model), "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning"]
    words += ["--served-model-name", SERVED_NAME, "--max-num-seqs", str(args.max_num_seqs), *options]
    with tempfile.TemporaryDirectory() as folder:
        contender = Contender("penstock", [sys.executable, *words], health="/ready")
        with running(contender, Path(folder) / "log") as session:
            assert isinstance(session, ServerSession)
            yield session


def show(verdict: Verdict) -> None:
    print(
        f"{verdict.arrivals:<11} {verdict.door:<10} goodput {verdict.goodput:6.2f}/s ({verdict.goodput_share:.0%}), "
        f"TTFT p50 {verdict.ttft_p50_s:.2f} s p99 {verdict.ttft_p99_s:.2f} s, refused {verdict.refused} of {verdict.clients}, "
        f"let in on return {verdict.returned_admitted_share:.1%} of {verdict.returned}, "
        f"Retry-After p50 {verdict.retry_after_p50_s:.0f} s max {verdict.retry_after_max_s:.0f} s, errors {verdict.errors}",
        flush=True,
    )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in each run (default: %(default)s)")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="seconds (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--max-reply-tokens", type=int, default=80)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--no-contrast", action="store_true", help="leave the queue without bound out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    model = resolve(args.model, default_cache_dir()).path
    source = Source(args.traces, read_tokenizer(model), args.max_prompt_tokens, args.max_reply_tokens)
    jobs = read_jobs("sharegpt", source, NUM_JOBS)
    with server(model, args, *UNBOUNDED) as session:
        capacity = measure_capacity(session, jobs, args.max_num_seqs)
    print(f"capacity {capacity:.2f} requests/s with {args.max_num_seqs} at a time", flush=True)
    runs: list[tuple[str, str, Sent]] = []
    times = {
        kind: arrivals(args.seed + idx, OVERLOAD * capacity, args.seconds, KINDS[kind]) for idx, kind in enumerate(args.kinds)
    }
    with server(model, args, "--slo-ttft", f"{args.slo_ttft}s") as session:
        for idx, kind in enumerate(args.kinds):
            run = overload(session, jobs, times[kind], args, has_door=True, first=idx * CLIENTS_PER_RUN)
            runs.append((kind, "--slo-ttft", run))
    for kind in [] if args.no_contrast else args.kinds:
        # A server of its own for each: the queue of the one before is still there.
        with server(model, args, *UNBOUNDED) as session:
            runs.append((kind, "unbounded", overload(session, jobs, times[kind], args, has_door=False)))
    with server(model, args, *UNBOUNDED) as session:
        after = measure_capacity(session, jobs, args.max_num_seqs)
    print(f"capacity {after:.2f} requests/s afterwards", flush=True)
    verdicts = [judge(kind, door, run, (capacity + after) / 2, args) for kind, door, run in runs]
    for verdict in verdicts:
        show(verdict)
    report = {"benchmark": "overload", "seconds": args.seconds, "slo_ttft_s": args.slo_ttft, "capacity": [capacity, after]}
    print(json.dumps(report | {"runs": [asdict(verdict) for verdict in verdicts]}))


if __name__ == "__main__":
    main()
