"""Is the lab's HTTP client the bottleneck, and does it measure what another one does? Against a stub without a model.

- `closed`: 64 users of a stub that answers at once with 4 tokens: the most that the client can drive.
- `open`: 5,000 requests per second of the same: CPU time per request, and how late they are sent.
- `streams`: 32 users, 64 tokens each that come one by one: CPU time per event.
- `memory`: what a run holds, per request of 20 tokens.
- `agree`: medians beside those of an independent client (`tests/support/lab/independent_client.py`), in turn: 8 users, the
  first token after 100 ms, 40 tokens 20 ms apart.

    python benchmarks/client.py

The stub (`tests/lab/stub_server.py`) runs in a process of its own. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from sessions import answered
from usage import resident_bytes

from penstock import machine
from penstock.lab.pacing import Pace
from penstock.lab.records import Sent
from penstock.lab.target import Target
from penstock.lab.workload import Job, Workload

TESTS = Path(__file__).parents[1] / "tests"
PROMPT = "word " * 100
RATE = 5000
FIRST_MS, GAP_MS = 100, 20


@contextmanager
def stub(*delays_ms: float) -> Iterator[str]:
    """The URL of a stub with these delays before the first token, and between two."""
    command = [sys.executable, str(TESTS / "lab" / "stub_server.py"), *map(str, delays_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def run(url: str, count: int, num_tokens: int, *, users: int | None = None, rate: float | None = None) -> Sent:
    gap_ns = 0 if rate is None else 1e9 / rate
    jobs = [
        Job(arrival_ns=round(k * gap_ns), num_prompt_tokens=100, num_output_tokens=num_tokens, prompt=PROMPT)
        for k in range(count)
    ]
    return answered(Workload(name="stub", jobs=jobs), Target(url=url, model="stub"), pace=Pace(concurrency=users))


def speed(sent: Sent) -> dict[str, float]:
    records, seconds = sent.records, sent.duration_ns / 1e9
    late_us = sorted((record.sent_ns - record.intended_ns) / 1e3 for record in records)
    return {
        "requests_per_s": round(len(records) / seconds),
        "client_us_per_request": round(sent.client_cpu_s / len(records) * 1e6, 1),
        "client_us_per_token": round(sent.client_cpu_s / sum(one.num_output_tokens for one in records) * 1e6, 2),
        "share_of_a_core": round(sent.client_cpu_s / seconds, 2),
        "late_p50_us": round(late_us[len(late_us) // 2], 1),
        "late_p99_us": round(late_us[len(late_us) * 99 // 100], 1),
    }


def agreement(url: str, count: int, num_tokens: int) -> dict[str, float]:
    """Our medians over theirs."""
    from support.lab import independent_client

    theirs = independent_client.measure(url, "stub", [(PROMPT, num_tokens)] * count, 8)
    sent = run(url, count, num_tokens, users=8)
    ours = {
        "ttft": median(one.first_ns - one.sent_ns for one in sent.records if one.first_ns is not None) / 1e9,
        "e2e": median(one.ended_ns - one.sent_ns for one in sent.records) / 1e9,
        "tpot": median(sum(one.gaps_ns) / (one.num_output_tokens - 1) for one in sent.records) / 1e9,
        "tokens_per_s": count * num_tokens / (sent.duration_ns / 1e9),
    }
    return {name: round(ours[name] / theirs[name], 4) for name in ours}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=25_000, help="of the fast runs (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(words)
    sys.path.insert(0, str(TESTS))
    results: dict[str, list[dict[str, float]]] = {"closed": [], "open": [], "streams": [], "agree": []}
    for _ in range(args.repeat):
        with stub() as url:
            results["closed"].append(speed(run(url, args.requests, 4, users=64)))
            results["open"].append(speed(run(url, args.requests, 4, rate=RATE)))
        with stub(50, 5) as url:
            results["streams"].append(speed(run(url, max(32, args.requests // 40), 64, users=32)))
        with stub(FIRST_MS, GAP_MS) as url:
            results["agree"].append(agreement(url, 32, 40))
        print({name: found[-1] for name, found in results.items()}, flush=True)
    with stub() as url:
        before = resident_bytes(os.getpid())
        count = 8 * args.requests
        sent = run(url, count, 20, users=64)
        held_bytes = (resident_bytes(os.getpid()) - before) / len(sent.records)
    medians = {name: {key: median(one[key] for one in runs) for key in runs[0]} for name, runs in results.items()}
    report = {"benchmark": "client", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), "repeat": args.repeat}
    print(json.dumps(report | medians | {"memory": {"requests": count, "bytes_per_request": round(held_bytes)}}))


if __name__ == "__main__":
    main()
