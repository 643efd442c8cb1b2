"""Does a bulk job delay interactive requests, and how much of the machine does it get? One server, two clients.

The interactive client asks for one short text at a time, in an open loop (Poisson), alone and beside a job: `--texts` texts in
bodies of 2,048, one body after the other. Reports the client's latencies, counted from when its requests were due, and the
job's share of the rest: its rate beside the client, over its rate alone times the share of time that the client's texts leave.

    python benchmarks/encoder_mixed.py
    python benchmarks/encoder_mixed.py --bulk short --texts 20000 --rate 10
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path

from encoder_batching import jobs_of
from encoder_contenders import Server, Setting, embed, penstock, running
from encoder_contenders import jobs_of as bodies_of
from encoder_texts import SETS, read_sets
from peer_setup import Environments, make_minilm
from peers import ENVIRONMENTS
from printed import origin, percent, table
from workloads import DEFAULT_TRACES

from penstock.lab.arrivals import poisson
from penstock.lab.figures import Samples, make_figures
from penstock.lab.pacing import Pace
from penstock.lab.records import Sent

BODY_TEXTS = 2048
ONE_TEXT_RUNS = 50


def bulk_texts(texts: Sequence[str], count: int) -> list[str]:
    """Return `count` different texts: each pass through the given ones is prefixed with its number."""
    return [f"{k // len(texts)}: {text}" for k, text in enumerate(islice(cycle(texts), count))]


def do_job(url: str, texts: Sequence[str]) -> float:
    """Seconds of the whole job."""
    return embed(url, bodies_of(texts, BODY_TEXTS), Pace(concurrency=1)).duration_ns / 1e9


def ask(url: str, texts: Sequence[str], rate: float, seconds: float) -> Sent:
    """The interactive client, for so many seconds."""
    return embed(url, jobs_of(texts, poisson(random.Random(0), round(rate * seconds), rate)), Pace())


def rate_beside(num_texts: int, job_s: float, client_s: float, alone: float) -> float:
    """Texts per second of a job while the client ran. Both began together; after the client the job has its rate alone."""
    return (num_texts - max(0.0, job_s - client_s) * alone) / min(job_s, client_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="MODEL of Penstock (default: %(default)s)")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: ../shared/traces)")
    parser.add_argument("--bulk", choices=SETS, default="short", help="the set whose texts the job has (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=20_000, help="of the job (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests/s of the client (default: %(default)s)")
    parser.add_argument("--options", default="", help="more options of penstock serve, in one word")
    args = parser.parse_args()
    environments = Environments(ENVIRONMENTS)
    sets = read_sets(make_minilm(environments) / "tokenizer.json", args.traces)
    short, bulk = sets["short"].texts, bulk_texts(sets[args.bulk].texts, args.texts)
    setting = Setting(environments, args.model, ())
    with running(penstock(setting, args.options.split()), environments.log("mixed")) as server:
        assert isinstance(server, Server)
        do_job(server.url, bulk[:BODY_TEXTS])
        one_s = statistics.median(server.one_text_s(short[:ONE_TEXT_RUNS]) for _ in range(3))
        if (rest := 1 - args.rate * one_s) <= 0:
            parser.error(f"--rate {args.rate:g} leaves no time for the job: a text takes {1e3 * one_s:.1f} ms.")
        seconds = do_job(server.url, bulk)
        job_alone = args.texts / seconds
        print(f"the job alone: {job_alone:.0f} texts/s", file=sys.stderr, flush=True)
        client_alone = ask(server.url, short, args.rate, seconds)
        # In a process of its own: to read a long answer would hold up the other client.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(int).result()  # the process has started
            job = pool.submit(do_job, server.url, bulk)
            client_beside = ask(server.url, short, args.rate, 0.95 * seconds)
            job_beside = rate_beside(args.texts, job.result(), client_beside.duration_ns / 1e9, job_alone)
    figures = [make_figures(Samples.of(sent.records)).latency_ms["e2e"].quantiles for sent in (client_alone, client_beside)]
    lines = [
        [name, *(f"{of[share].value:.2f}" for share in ("p50", "p99")), job_rate]
        for name, of, job_rate in zip(
            ("alone", "beside the other"), figures, (f"{job_alone:.0f}", f"{job_beside:.0f}"), strict=True
        )
    ]
    print(origin(f"{args.texts} {args.bulk} texts beside {args.rate:g} requests/s"))
    print(table(["", "client p50, ms", "client p99, ms", "job, texts/s"], lines))
    p99 = [of["p99"].value for of in figures]
    print(
        f"\np99 beside over alone: {p99[1] / p99[0]:.2f}; the job's share of the rest: {percent(job_beside / job_alone / rest)}"
    )


if __name__ == "__main__":
    main()
