"""How much faster is each server with speculation? Each runs with it and without it, alone on the machine, on the same chats.

    python benchmarks/speculation_peers.py --setup                  # makes what is missing in build/peers, then measures
    python benchmarks/speculation_peers.py --peers penstock llamacpp --model smollm2 --clients 1 8
    python benchmarks/speculation_peers.py --workloads story sharegpt --clients 32 --requests 96

Workloads are those of `guessable.py`, answered greedily. A server is new in each round and caches no prompts, so it has not
seen a chat before; every second round goes backwards. A cell has the output tokens per second with speculation, median of the
rounds and range, and in bold the median ratio to the same round without. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import httpx
from checkable import Chat
from contenders import MODELS, Setting, prepared
from guessable import MAX_TOKENS, WORKLOADS, chats
from peaks import usable_threads
from peer_setup import Environments
from peers import ENVIRONMENTS, compete
from printed import origin, spread, table
from processes import Contender, started
from sessions import SERVED_NAME

from penstock.lab.workload import Job
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve

OFF, ON = "off", "on"
CONTEXT_TOKENS = 2048
"""Most of a chat and its answer."""
NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'
SUFFIX = '{"method":"suffix","num_speculative_tokens":32}'
PEERS: Mapping[str, tuple[str, str]] = {
    "penstock": ("penstock --speculation off", "penstock"),
    "llama.cpp ngram-simple": ("llamacpp", "llamacpp --spec-type ngram-simple --spec-draft-n-max 64"),
    "vLLM ngram": ("vllm", f"vllm --speculative-config {NGRAM}"),
    "vLLM suffix": ("vllm", f"vllm --speculative-config {SUFFIX}"),
}
"""Name -> the contender without speculation and with it, with the settings that its documentation gives."""

Rates = dict[tuple[str, int], float]
"""(workload, clients) -> output tokens per second."""


def rate(url: str, asked: Sequence[Chat], clients: int) -> float:
    """Output tokens per second of all answers. Raises OSError or ValueError for a server that fails."""
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None)) as http, ThreadPoolExecutor(clients) as pool:

        def ask(chat: Chat) -> int:
            body = {"model": SERVED_NAME, "messages": chat, "max_tokens": MAX_TOKENS, "temperature": 0}
            try:
                answer = http.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
            except httpx.HTTPError as error:
                raise OSError(f"{type(error).__name__}: {error}") from error
            num_tokens: int = answer["usage"]["completion_tokens"]
            return num_tokens

        began_s = time.perf_counter()
        return sum(pool.map(ask, asked)) / (time.perf_counter() - began_s)


def measure(contender: Contender, work: Mapping[tuple[str, int], Sequence[Chat]], log: Path) -> Rates:
    """Start the server, and let it answer all workloads, one after the other."""
    with started(contender, log) as (_, port):
        url = f"http://127.0.0.1:{port}"
        rate(url, [[{"role": "user", "content": "Hello"}]], 1)
        found: Rates = {}
        for (name, clients), asked in work.items():
            found[name, clients] = rate(url, asked, clients)
            print(f"{contender.name}: {name}, {clients}: {found[name, clients]:.1f}", file=sys.stderr, flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--setup", action="store_true", help="make the environments that are missing")
    parser.add_argument("--model", choices=MODELS, default="qwen")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, help="of a workload (default: 3, or 4 for each client of several)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: %(default)s)")
    args = parser.parse_args()
    gguf = resolve(MODELS[args.model].file, default_cache_dir()).path.resolve()
    longest = Job(arrival_ns=0, num_prompt_tokens=CONTEXT_TOKENS - MAX_TOKENS - 1, num_output_tokens=MAX_TOKENS)
    loads = {max(args.clients): 1}
    setting = Setting(Environments(ENVIRONMENTS), gguf, MODELS[args.model], loads, [longest])
    counts = {clients: args.requests or (3 if clients == 1 else 4 * clients) for clients in args.clients}
    left = {name: iter(chats(name, sum(counts.values()))) for name in args.workloads}  # no chat is sent twice
    work = {(name, clients): list(islice(left[name], num)) for clients, num in counts.items() for name in args.workloads}
    ready = list(prepared(list(dict.fromkeys(side for peer in args.peers for side in PEERS[peer])), setting, setup=args.setup))

    def measure_one(contender: Contender, turn: int) -> Rates:
        return measure(contender, work, setting.environments.log(f"{contender.name}-{turn + 1}"))

    rounds = compete(ready, args.repeat, measure_one)
    peers = [peer for peer in args.peers if all(side in rounds for side in PEERS[peer])]
    ratios: dict[str, dict[str, float]] = {peer: {} for peer in peers}
    lines: list[list[str]] = []
    for workload, clients in work:
        lines.append([workload, str(clients)])
        for peer in peers:
            off, on = (rounds[side] for side in PEERS[peer])
            both = [(off[turn][workload, clients], on[turn][workload, clients]) for turn in off.keys() & on.keys()]
            ratio = statistics.median(with_it / without for without, with_it in both)
            ratios[peer][f"{workload}, {clients}"] = round(ratio, 3)
            lines[-1].append(f"{spread([with_it for _, with_it in both], 0)} **{ratio:.2f}**")
    print(origin(gguf.name, f"{usable_threads()} threads", "output tokens/s with speculation, and over without"))
    print(table(["workload", "clients", *peers], lines))
    print(json.dumps({"benchmark": "speculation_peers", "model": args.model, "rounds": args.repeat, "ratios": ratios}))


if __name__ == "__main__":
    main()
