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
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from crowd import Client, Crowd, arrivals, own_jobs
from load import Job, quantile
from sessions import SERVED_NAME, Contender, ServerSession, running
from workloads import DEFAULT_TRACES, Source, read_jobs, read_tokenizer

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
CAPACITY_TIMEOUT_S = 120.0
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


def measure_capacity(session: ServerSession, jobs: Sequence[Job], num_rows: int) -> float:
    """Requests per second in a closed loop of `num_rows`."""
    clients = [Client(job, 0.0) for job in own_jobs(jobs, ROUNDS * num_rows, first=10**6)]
    crowd = Crowd(session.url, _address(session), SERVED_NAME, returns=False, closed=num_rows)
    crowd.run(clients, CAPACITY_TIMEOUT_S)
    if any(client.status != 200 for client in clients):
        raise SystemExit("the server did not answer all requests of the closed loop")
    ends = sorted(client.ended_s for client in clients if client.ended_s is not None)
    # The rows are all taken from the first ends until the last clients have come.
    first, last = num_rows // 2, (ROUNDS - 1) * num_rows
    return (last - first) / (ends[last] - ends[first])


def overload(
    session: ServerSession,
    jobs: Sequence[Job],
    times_s: Sequence[float],
    args: argparse.Namespace,
    *,
    has_door: bool,
    first: int = 0,
) -> tuple[list[Client], float]:
    """Clients that came at these times, and the second at which the last were cut off.

    `first`: the number of the first prompt; another one for each run at a server, which would else know the prompts.
    """
    clients = [Client(job, at_s) for job, at_s in zip(own_jobs(jobs, len(times_s), first), times_s, strict=True)]
    crowd = Crowd(session.url, _address(session), SERVED_NAME, returns=has_door)
    # Behind the door nearly all is over when the last have come back; without it, waiting longer would show nothing new.
    until_s = args.seconds * (OVERLOAD + 1 if has_door else 1.0)
    return clients, crowd.run(clients, until_s)


def judge(kind: str, door: str, run: tuple[list[Client], float], capacity: float, args: argparse.Namespace) -> Verdict:
    clients, end_s = run
    in_time = [
        client
        for client in clients
        if client.ended_s is not None
        and client.status == 200
        and client.ttft_s is not None
        and client.ttft_s <= args.slo_ttft
        and SKIP_S <= client.ended_s <= args.seconds
    ]
    # Who was cut off without a token has waited at least so long.
    let_in = [client for client in clients if client.called_s and client.status in (0, 200)]
    ttfts = [end_s - client.called_s if client.ttft_s is None else client.ttft_s for client in let_in]
    refused = [client for client in clients if client.refusals_s]
    returned = [client for client in refused if client.due_s <= end_s]
    waits = [wait_s for client in clients for wait_s in client.waits_s] or [0.0]
    goodput = len(in_time) / (args.seconds - SKIP_S)
    num_admitted = sum(len(client.refusals_s) == 1 for client in returned)
    return Verdict(
        arrivals=kind,
        door=door,
        clients=len(clients),
        refused=len(refused),
        goodput=round(goodput, 2),
        goodput_share=round(goodput / capacity, 3),
        ttft_p50_s=round(quantile(ttfts, 0.5), 3),
        ttft_p99_s=round(quantile(ttfts, 0.99), 3),
        returned=len(returned),
        returned_admitted_share=round(num_admitted / len(returned), 3) if returned else 1.0,
        retry_after_p50_s=quantile(waits, 0.5),
        retry_after_max_s=max(waits),
        errors=sum(client.status not in (0, 200, 429) for client in clients),
    )


@contextmanager
def server(model: Path, args: argparse.Namespace, *options: str) -> Iterator[ServerSession]:
    words = ["-m", "penstock", "serve", str(model), "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning"]
    words += ["--served-model-name", SERVED_NAME, "--max-num-seqs", str(args.max_num_seqs), *options]
    with tempfile.TemporaryDirectory() as folder:
        contender = Contender("penstock", [sys.executable, *words], health="/ready")
        with running(contender, Path(folder) / "log") as session:
            assert isinstance(session, ServerSession)
            yield session


def _address(session: ServerSession) -> tuple[str, int]:
    host, _, port = session.url.removeprefix("http://").partition(":")
    return host, int(port)


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
    runs: list[tuple[str, str, tuple[list[Client], float]]] = []
    times = {
        kind: list(arrivals(args.seed + idx, OVERLOAD * capacity, args.seconds, KINDS[kind]))
        for idx, kind in enumerate(args.kinds)
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
