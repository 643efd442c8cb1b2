"""How much do the masks of some answers slow the streams beside them? A server with streams that follow no grammar, in turn
beside others like them and beside answers that follow one.

    python benchmarks/grammar_neighbours.py
    python benchmarks/grammar_neighbours.py --penstock OTHER_CHECKOUT/.venv/bin/penstock

`slow`: answers to an ambiguous grammar, whose masks take up to some milliseconds each. `usual`: answers to a JSON schema as
people write them. `plain_ms` is the time between two tokens of the streams beside as many answers without a grammar, and
`more_percent` how much longer it is beside those with one. Median of the rounds, and all of them. Needs the default model in
the cache (`penstock pull`). The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from sessions import serving

NUM_STREAMS = 8
NUM_TOKENS = 96
SLOW = {"grammar": 'start: s\ns: s s | "a" | "b" | "c"'}
PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "email": {"type": "string", "format": "email"}}
USUAL = {
    "json": {"type": "array", "minItems": 500, "items": {"type": "object", "properties": PERSON, "required": list(PERSON)}}
}
KINDS: dict[str, dict[str, Any]] = {"slow": SLOW, "usual": USUAL}


class Streams:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=64))

    def _stream(self, seed: int, fields: dict[str, Any], stop: threading.Event) -> list[float]:
        """Instants of the chunks, in seconds; until its end or until told to stop."""
        body = {"prompt": "Numbers: a b c", "stream": True, "temperature": 1.0, "seed": seed} | fields
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            told_s = []
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    told_s.append(time.perf_counter())
                if stop.is_set():
                    break
        return told_s

    def gap_ms(self, others: list[dict[str, Any]]) -> float:
        """Between two tokens of the streams. Others go on beside them until they have ended; one that ends begins anew."""
        stop, never = threading.Event(), threading.Event()

        def go_on(fields: dict[str, Any], seed: int) -> None:
            while not stop.is_set():
                self._stream(seed, fields | {"max_tokens": 1000}, stop)
                seed += 100

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            beside = [pool.submit(go_on, fields, nth) for nth, fields in enumerate(others)]
            time.sleep(0.5 if others else 0.0)  # they have begun
            asked = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
            told = [pool.submit(self._stream, nth, asked, never) for nth in range(NUM_STREAMS)]
            gaps_s = [(told_s[-1] - told_s[8]) / (len(told_s) - 9) for told_s in (one.result() for one in told)]
            stop.set()
            for one in beside:
                one.result()
        return statistics.mean(gaps_s) * 1e3


def measure(streams: Streams, kind: str, number: int, rounds: int) -> dict[str, Any]:
    more, plain_ms = [], []
    for _ in range(rounds):
        without = streams.gap_ms([{"ignore_eos": True}] * number)
        beside = streams.gap_ms([{"structured_outputs": KINDS[kind]}] * number)
        plain_ms.append(without)
        more.append((beside / without - 1) * 100)
    found = {
        "others": number,
        "plain_ms": round(statistics.median(plain_ms), 2),
        "more_percent": round(statistics.median(more), 1),
        "rounds": [round(one, 1) for one in more],
    }
    print(kind, json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--penstock", default=str(Path(sys.executable).with_name("penstock")))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with serving("smollm2:135m", penstock=[args.penstock]) as session:
        streams = Streams(session.url)
        streams.gap_ms([{"structured_outputs": outputs} for outputs in KINDS.values()])  # compiles the grammars
        found = {
            f"{kind} {number}": measure(streams, kind, number, args.rounds)
            for kind, number in (("slow", 1), ("slow", 8), ("usual", 8))
        }
    print(json.dumps({"benchmark": "grammar_neighbours", **found}))


if __name__ == "__main__":
    main()
