"""What does speculation gain, and where does it lose? Two servers, one with `--speculation off`, get the same requests in turn.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --model qwen2.5-coder:1.5b --clients 1 --requests 6
    python benchmarks/speculation.py --workloads story sharegpt --clients 8
    python benchmarks/speculation.py --model large.gguf --draft small.gguf

Workloads are those of `guessable.py`. In each round every client asks for its next greedy answer when it has one, first from
one server and then from the other; the first changes each round. A run has a cache salt of its own, so no run finds prompts or
answers of an earlier one. It is measured until the first client finds no more requests: after that fewer run at a time, and
with guesses answers of one length end at different times.

The table has output tokens per second without and with speculation (medians of the rounds, with the time for prompts in them),
their ratio and its range over the rounds, CPU time per token without over that with speculation, guesses made per
token, and the share accepted. `differ` counts answers unlike those of the first run without speculation. The last line is
one JSON object.

With `--draft` a third server also drafts with that small model or draft head. A second table compares it with the server
without a draft.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
from checkable import Chat
from guessable import MAX_TOKENS, WORKLOADS, chats
from peaks import context, usable_threads
from printed import origin, percent, table
from sessions import SERVED_NAME, serving
from usage import OtherLoad, cpu_ticks, family, metric

from penstock.models.catalog import DEFAULT_MODEL

SIDES: Mapping[str, Sequence[str]] = {"off": ("--speculation", "off"), "on": ()}
LEAST_REQUESTS = 12


@dataclass(slots=True)
class Run:
    texts: list[str]
    num_tokens: float
    seconds: float
    cpu_ticks: float
    guessed: float
    accepted: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(slots=True)
class Server:
    """One side of the comparison."""

    pid: int
    url: str
    http: httpx.Client
    num_runs: int = 0

    def run(self, asked: Sequence[Chat], clients: int) -> Run:
        self.num_runs += 1
        salt, left, texts = f"run {self.num_runs}", deque(enumerate(asked)), [""] * len(asked)
        before = self._counters()

        def ask_until_none_is_left() -> list[float]:
            while True:
                try:
                    idx, chat = left.popleft()
                except IndexError:
                    return self._counters()
                texts[idx] = self._ask(salt, chat)

        with ThreadPoolExecutor(clients) as pool:
            calls = [pool.submit(ask_until_none_is_left) for _ in range(clients)]
            after = next(as_completed(calls)).result()
            wait(calls)
        return Run(texts, *(one - other for one, other in zip(after, before, strict=True)))

    def _ask(self, salt: str, chat: Chat) -> str:
        body = {"model": SERVED_NAME, "messages": chat, "max_tokens": MAX_TOKENS, "temperature": 0, "cache_salt": salt}
        answer = self.http.post(f"{self.url}/v1/chat/completions", json=body).raise_for_status().json()
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def _counters(self) -> list[float]:
        used = [time.perf_counter(), sum(map(cpu_ticks, family(self.pid)))]
        names = ("generation", "guessed", "accepted")
        num_tokens, *guesses = (metric(self.url, f"penstock_{name}_tokens_total") for name in names)
        return [num_tokens, *used, *guesses]


def cpu_ticks_a_token(runs: Sequence[Run]) -> float:
    return sum(run.cpu_ticks for run in runs) / sum(run.num_tokens for run in runs)


def measure(servers: Mapping[str, Server], asked: Sequence[Chat], clients: int, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {side: [] for side in servers}
    for number in range(rounds):
        for side in sorted(servers, reverse=number % 2 == 1):
            runs[side].append(servers[side].run(asked, clients))
    texts = runs["off"][0].texts
    found = {
        **{side: round(median(run.tokens_per_s for run in one), 1) for side, one in runs.items()},
        **compare(runs["off"], runs["on"]),
        "differ": sum(text != texts[idx] for one in runs.values() for run in one for idx, text in enumerate(run.texts)),
    }
    return found if "draft" not in runs else {**found, "drafted": compare(runs["on"], runs["draft"])}


def compare(without: Sequence[Run], with_it: Sequence[Run]) -> dict[str, Any]:
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(with_it, without, strict=True)]
    guessed = sum(run.guessed for run in with_it)
    medians = [median(run.tokens_per_s for run in runs) for runs in (without, with_it)]
    return {
        "ratio": round(medians[1] / medians[0], 3),
        "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "cpu": round(cpu_ticks_a_token(without) / cpu_ticks_a_token(with_it), 3),
        "tokens": round(with_it[0].num_tokens),
        "guesses_a_token": round(guessed / sum(run.num_tokens for run in with_it), 3),
        "accepted": round(sum(run.accepted for run in with_it) / guessed, 3) if guessed else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, help=f"of a run (default: twice the clients, at least {LEAST_REQUESTS})")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", metavar="MODEL", help="measure a third server, for which this model guesses, too")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of both servers; the last argument here")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    others = OtherLoad()
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None)))
        servers = {}
        for side, options in {**SIDES, **({"draft": ("--speculation-model", args.draft)} if args.draft else {})}.items():
            session = stack.enter_context(serving(args.model, *options, *args.options))
            servers[side] = Server(session.process.pid, session.url, http)
            servers[side].run(chats("story", 2), 2)
        for clients in args.clients:
            for name in args.workloads:
                asked = chats(name, args.requests or max(LEAST_REQUESTS, 2 * clients))
                found = measure(servers, asked, clients, args.rounds)
                results.append({"workload": name, "clients": clients, "requests": len(asked), **found})
                print(results[-1], file=sys.stderr, flush=True)
    shown = ("workload", "clients", *SIDES, "ratio", "range", "cpu", "guesses_a_token", "accepted", "differ")
    print(origin(args.model, f"{usable_threads()} threads", f"others used {percent(others.share())} of the processors"))
    print(table(shown, [[found[name] for name in shown] for found in results]))
    if args.draft:
        beside = ("ratio", "range", "cpu", "guesses_a_token", "accepted")
        rows = [
            [found["workload"], found["clients"], found["draft"], *(found["drafted"][name] for name in beside)]
            for found in results
        ]
        print(table(("workload", "clients", "draft", *beside), rows))
    print(json.dumps({"benchmark": "speculation", "model": args.model, "results": results, **context(usable_threads(), "")}))


if __name__ == "__main__":
    main()
