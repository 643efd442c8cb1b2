"""How long does a file of requests take, beside llama.cpp's server?

    python benchmarks/batch_peers.py --setup          # builds llama.cpp in build/peers, then measures
    python benchmarks/batch_peers.py --lines 1000 --rounds 3

The lines are those of `batch_order.py`'s few-shot workload, shuffled: chats with system prompts and examples that many share,
greedy, all tokens of each answer. In each round, in turn:

- `batch run`: the whole command, from its start to the file of answers
- `in order`: a server of ours, loaded and ready, with its prefix cache; the lines as they come, `--users` at a time
- `llama.cpp`: its server, ready, with its prompt caches on; the same

The weights are from the same file, but llama.cpp gets Q4_0, for which it has fast kernels. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from batch_order import few_shot
from contenders import LISTEN
from peaks import usable_threads
from peer_setup import Environments, make_requantized
from printed import origin, spread, table
from processes import Contender, started

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve

ENVIRONMENTS = Path(__file__).parents[1] / "build" / "peers"
MAX_TOKENS = 2048
"""A line has at most so many, with its answer."""


def write_lines(count: int, seed: int) -> list[dict[str, Any]]:
    """Return the bodies of the lines, shuffled."""
    bodies = [
        {**line.body, "max_tokens": line.num_output_tokens, "temperature": 0, "ignore_eos": True}
        for line in few_shot(count, seed)
    ]
    random.Random(seed).shuffle(bodies)
    return bodies


def run_batch(model: Path, bodies: Sequence[Mapping[str, Any]], folder: Path) -> float:
    """Return the seconds that `penstock batch run` takes."""
    source, output = folder / "lines.jsonl", folder / "answers.jsonl"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "batch", "run", str(source), str(model), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    took_s = time.perf_counter() - began_s
    assert len(output.read_text().splitlines()) == len(bodies), "a line has no answer"
    output.unlink()
    return took_s


def ask_all(contender: Contender, bodies: Sequence[Mapping[str, Any]], users: int, log: Path) -> float:
    """Return the seconds that a server takes, from the first request to the last answer."""
    with started(contender, log) as (_, port), httpx.Client(timeout=None) as client:

        def ask(body: Mapping[str, Any]) -> None:
            answer = client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == body["max_tokens"], "an answer of other than the tokens asked for"

        ask({**bodies[0], "max_tokens": 4})
        began_s = time.perf_counter()
        with ThreadPoolExecutor(users) as pool:
            list(pool.map(ask, bodies))
        return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="MODEL of penstock serve (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--users", type=int, default=32, help="of the servers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--peers", type=Path, default=ENVIRONMENTS, help="folder of the peers (default: %(default)s)")
    parser.add_argument("--setup", action="store_true", help="make what is missing")
    args = parser.parse_args()
    environments = Environments(args.peers)
    if args.setup:
        environments.make("llamacpp")
    model = resolve(args.model, default_cache_dir()).path
    ours = Contender("penstock", [sys.executable, "-m", "penstock", "serve", model, *LISTEN], health="/ready")
    programs = environments.llama_programs
    command = [programs / "llama-server", "-m", make_requantized(environments, model, "Q4_0"), *LISTEN, "-np", str(args.users)]
    command += ["-c", str(args.users * MAX_TOKENS), "-t", str(usable_threads()), "-fa", "on", "--poll", "0", "--no-webui"]
    theirs = Contender("llamacpp", command)
    took: dict[str, list[float]] = {"batch run": [], "in order": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for nth in range(args.rounds):
            bodies = write_lines(args.lines, nth + 1)
            took["batch run"].append(run_batch(model, bodies, folder))
            took["in order"].append(ask_all(ours, bodies, args.users, folder / "ours.log"))
            took["llama.cpp"].append(ask_all(theirs, bodies, args.users, folder / "theirs.log"))
            print({name: round(times[-1], 1) for name, times in took.items()}, file=sys.stderr, flush=True)
    ratios = {
        name: [time / first for time, first in zip(times, took["batch run"], strict=True)] for name, times in took.items()
    }
    print(origin(f"{args.lines} lines", "medians of the rounds and their range"))
    rows = [[name, spread(times, 1), spread(ratios[name], 2)] for name, times in took.items()]
    print(table(["", "seconds", "over batch run"], rows))
    print()
    print(json.dumps({"lines": args.lines, "seconds": took, "ratios": ratios}))


if __name__ == "__main__":
    main()
