"""How long do the grammars of one API key wait for those of another? A server with two keys, one of which asks for the worst.

`refused`: 30 schemas of five anyOf of six patterns in an allOf. `large`: 30 objects of 1,350 strings with bounds of their own,
among the slowest to compile that are accepted; their answers are one token. Meanwhile the other key requests a new regex again
and again. `alone_ms` is its time without those requests, `beside_ms` beside them, `others_s` the time of all of them.

    python benchmarks/grammar_tenants.py
    python benchmarks/grammar_tenants.py --penstock OTHER_CHECKOUT/.venv/bin/penstock

Needs the default model in the cache (`penstock pull`). The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from sessions import serving

NUM_SCHEMAS = 30
NUM_REGEXES = 20


def refused(number: int) -> dict[str, Any]:
    either = [{"anyOf": [{"type": "string", "pattern": f"x{number}y{i}z{j}"} for j in range(6)]} for i in range(5)]
    return {"allOf": either}


def large(number: int) -> dict[str, Any]:
    fields = {f"p{i}": {"minLength": i, "maxLength": 1000 + number + i} for i in range(1350)}
    return {"type": "object", "properties": fields}


ATTACKS = {"refused": refused, "large": large}


class Caller:
    def __init__(self, url: str, key: str) -> None:
        limits = httpx.Limits(max_connections=NUM_SCHEMAS)
        self._client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600, limits=limits)

    def ask(self, outputs: dict[str, Any]) -> tuple[int, float]:
        """The status, and milliseconds until the answer was there."""
        begin_s = time.perf_counter()
        body = {"prompt": "a", "max_tokens": 1, "structured_outputs": outputs}
        status = self._client.post("/v1/completions", json=body).status_code
        return status, (time.perf_counter() - begin_s) * 1e3


def measure(url: str, attack: str, regexes: Any) -> dict[str, Any]:
    other, caller = Caller(url, "first"), Caller(url, "second")

    def ask_regex() -> float:
        status, ms = caller.ask({"regex": f"{attack}{next(regexes)}"})
        assert status == 200, status
        return ms

    alone = [ask_regex() for _ in range(NUM_REGEXES)]
    with concurrent.futures.ThreadPoolExecutor(NUM_SCHEMAS) as pool:
        begin_s = time.perf_counter()
        others = [pool.submit(other.ask, {"json": ATTACKS[attack](number)}) for number in range(NUM_SCHEMAS)]
        beside = []
        while len(beside) < NUM_REGEXES and not (beside and all(job.done() for job in others)):
            beside.append(ask_regex())
        statuses = Counter(str(job.result()[0]) for job in others)
        others_s = time.perf_counter() - begin_s
    found = {
        "alone_ms": round(statistics.median(alone), 1),
        "beside_ms": {"median": round(statistics.median(beside), 1), "worst": round(max(beside), 1), "count": len(beside)},
        "others_s": round(others_s, 2),
        "others_status": dict(statuses),
    }
    print(attack, json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--penstock", default=str(Path(sys.executable).with_name("penstock")))
    args = parser.parse_args()
    regexes = itertools.count()
    keys = ("--api-key", "first", "--api-key", "second")
    with serving("smollm2:135m", *keys, penstock=[args.penstock]) as session:
        results = {attack: measure(session.url, attack, regexes) for attack in ATTACKS}
    print(json.dumps({"benchmark": "grammar_tenants", **results}))


if __name__ == "__main__":
    main()
