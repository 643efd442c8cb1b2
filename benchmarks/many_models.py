"""Three models in memory that holds two: is every request answered, and what does a swap cost? Traffic in waves over all three.

The server is a separate process; its budget is the two largest shares and a tenth of the third. Its commands to load and
unload come over a pipe that no client has. All requests are greedy, and each answer must equal that of a server with one model.

    python benchmarks/many_models.py --soak 600

1. Lone answers: what each model says when it is the only one.
2. Swaps: the time of the first request to a model not loaded, with free room (its load) and with an idle model to unload
   first (its swap), in turn. The ratio of the medians is the price of a swap.
3. Gaps: the times between two tokens of one stream, alone and while another model is loaded over and over.
4. The soak: open arrivals (Poisson) over all three. Two models get nearly all of each wave, and others are unloaded for them.

The last line is a JSON object with the figures. Linux only (/proc). Needs the models in the cache (`penstock pull`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from printed import origin, table

from penstock.config import Config, KvConfig, ModelConfig, ServerConfig, SharingConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.factory import plan_share, start_deployment
from penstock.deploy.resources import Resources
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from penstock.serve.http.listener import bind_socket
from penstock.serve.server import run_server

MODELS = ("smollm2:135m", "qwen2.5-coder:1.5b", "minilm")
EMBEDDER = MODELS[2]
KV_BYTES = 128 << 20
TEXTS = [
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time there was a",
    "Water boils at",
    "for i in range(10):",
    "The three laws of motion say",
    "import numpy as",
    "My favourite colour is",
]
SETTLE_S = 3.0
"""Time after a load in which the server still sees to the pages of the weights."""
WAVE_S = 20.0
MAX_TRIES = 20
"""Attempts of a request that is told to come back later."""


def config_of(name: str, coder: str) -> Config:
    """`coder`: a file, or the second model's own name."""
    kv = KvConfig() if name == EMBEDDER else KvConfig(kv_cache_memory_bytes=KV_BYTES)
    return Config(model=ModelConfig(model=coder if name == MODELS[1] else name, served_model_names=(name,)), kv=kv)


# The server's process.


def be_server(configs: tuple[Config, ...], pipe: Connection) -> None:
    """Serve on a free port, which is told over the pipe; then obey `load NAME`, `unload NAME`, `state` and `end`."""
    deployment = start_deployment(configs)
    listener = bind_socket("127.0.0.1", 0)
    pipe.send(listener.getsockname()[1])
    threading.Thread(target=_obey, args=(deployment, pipe), daemon=True).start()
    run_server(deployment, ServerConfig(shutdown_timeout_s=5.0), listener=listener, announce=lambda _text: None)
    os._exit(0)


def _obey(deployment: Deployment, pipe: Connection) -> None:
    while (command := pipe.recv().split())[0] != "end":
        served = deployment.find(command[1]) if len(command) > 1 else None
        if command[0] == "load" and served is not None:
            deployment.want(served).result(120)
        elif served is not None:
            deployment.unload(served).result(120)
        pipe.send({one.name: (one.state.value, one.num_loads, one.load_ns / 1e9) for one in deployment.served})
    os._exit(0)


class Server:
    """A server in a process of its own, and what a client does with it."""

    def __init__(self, configs: tuple[Config, ...]) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=be_server, args=(configs, other))
        self._process.start()
        if not self._pipe.poll(120):
            raise SystemExit("the server did not come up")
        self.port: int = self._pipe.recv()

    def tell(self, command: str) -> dict[str, tuple[str, int, float]]:
        """The state, the loads and the seconds of the last load of each model, when the command is done."""
        self._pipe.send(command)
        told: dict[str, tuple[str, int, float]] = self._pipe.recv()
        return told

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))

    def end(self) -> None:
        self._pipe.send("end")
        self._process.join(30)


# A client.


def body_of(name: str, text: str, num_tokens: int, **fields: object) -> tuple[str, bytes]:
    if name == EMBEDDER:
        return "/v1/embeddings", json.dumps({"model": name, "input": text}).encode()
    body = {"model": name, "prompt": text, "max_tokens": num_tokens, "temperature": 0, **fields}
    return "/v1/completions", json.dumps(body).encode()


def post(port: int, path: str, body: bytes) -> tuple[int, float, Any]:
    """The status, the seconds of `Retry-After` and the body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=180)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, float(response.headers.get("Retry-After", 0)), json.loads(response.read())
    finally:
        connection.close()


def answer_of(told: Any) -> object:
    """The text that the model wrote, or its numbers."""
    entry = told.get("choices", told.get("data"))[0]
    return entry.get("text", entry.get("embedding"))


def ask(port: int, name: str, text: str, num_tokens: int) -> tuple[object, float]:
    """The answer and its seconds. Fails unless it is there at once."""
    began_s = time.monotonic()
    status, _, told = post(port, *body_of(name, text, num_tokens))
    assert status == 200, told
    return answer_of(told), time.monotonic() - began_s


def gaps_s(port: int, name: str, num_tokens: int) -> list[float]:
    """The times between two tokens of one stream."""
    connection = HTTPConnection("127.0.0.1", port, timeout=180)
    path, body = body_of(name, TEXTS[2], num_tokens, stream=True, ignore_eos=True)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    times_s = [time.monotonic() for line in connection.getresponse() if line.startswith(b"data: {")]
    connection.close()
    return [later_s - earlier_s for earlier_s, later_s in pairwise(times_s)]


# The parts.


def limit_of_two(configs: tuple[Config, ...]) -> tuple[int, dict[str, int]]:
    """The budget, and each model's share of it."""
    resources = Resources(num_models=len(MODELS))
    shares = {
        name: plan_share(config, resolve(config.model.model, default_cache_dir()), resources).num_bytes
        for name, config in zip(MODELS, configs, strict=True)
    }
    smallest, *others = sorted(shares.values())
    return sum(others) + smallest // 10, shares


def lone_answers(configs: tuple[Config, ...], num_tokens: int) -> dict[tuple[str, str], object]:
    answers: dict[tuple[str, str], object] = {}
    for name, config in zip(MODELS, configs, strict=True):
        server = Server((config,))
        for text in TEXTS:
            answers[name, text], _ = ask(server.port, name, text, num_tokens)
        server.end()
    return answers


def swaps(server: Server, rounds: int) -> dict[str, dict[str, float]]:
    """The seconds of the first request to each model: loaded, after a load into free room, and after a swap."""
    found: dict[str, dict[str, list[float]]] = {name: {"loaded": [], "load": [], "swap": []} for name in MODELS}
    for _ in range(rounds):
        for name in MODELS:
            others = [other for other in MODELS if other != name]
            for kind in ("load", "swap"):
                server.tell(f"unload {name}")
                for other in others:
                    if kind == "swap":
                        server.tell(f"load {other}")
                        ask(server.port, other, TEXTS[0], 1)
                    else:
                        server.tell(f"unload {other}")
                time.sleep(SETTLE_S)
                states = server.tell("state")
                assert [states[other][0] for other in others] == ["loaded" if kind == "swap" else "unloaded"] * 2, states
                found[name][kind].append(ask(server.port, name, TEXTS[0], 1)[1])
            found[name]["loaded"].append(ask(server.port, name, TEXTS[0], 1)[1])
    return {name: {kind: statistics.median(times) for kind, times in kinds.items()} for name, kinds in found.items()}


def gaps_beside_loads(server: Server, num_tokens: int) -> dict[str, dict[str, float]]:
    """The gaps of a stream of the first model: alone, and while the second one is loaded and unloaded over and over."""
    chat, coder, embedder = MODELS
    server.tell(f"unload {coder}")
    server.tell(f"unload {embedder}")
    server.tell(f"load {chat}")
    ask(server.port, chat, TEXTS[0], 8)
    alone = gaps_s(server.port, chat, num_tokens)
    num_before = server.tell("state")[coder][1]
    has_ended = threading.Event()

    def load_over_and_over() -> None:
        while not has_ended.is_set():
            server.tell(f"load {coder}")
            server.tell(f"unload {coder}")

    loading = threading.Thread(target=load_over_and_over)
    loading.start()
    beside = gaps_s(server.port, chat, num_tokens)
    has_ended.set()
    loading.join()
    num_loads = server.tell("state")[coder][1] - num_before
    return {"alone": _gap_figures(alone) | {"loads": 0}, "beside loads": _gap_figures(beside) | {"loads": num_loads}}


def _gap_figures(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    return {
        "median ms": 1e3 * statistics.median(ordered),
        "p99 ms": 1e3 * ordered[int(0.99 * len(ordered))],
        "max ms": 1e3 * ordered[-1],
    }


@dataclass
class Soak:
    counts: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    max_resident_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def soak(server: Server, answers: dict[tuple[str, str], object], duration_s: float, rate: float, num_tokens: int) -> Soak:
    """Open arrivals for so long: each answer must be the lone one, and a client that is told to come back does so."""
    found, rng = Soak(), random.Random(28)  # repeatable on purpose

    def call(name: str, text: str) -> None:
        began_s = time.monotonic()
        for _ in range(MAX_TRIES):
            status, retry_after_s, told = post(server.port, *body_of(name, text, num_tokens))
            if status not in (429, 503):
                break
            with found.lock:
                found.counts[f"told to come back ({status})"] += 1
            time.sleep(retry_after_s)
        with found.lock:
            found.latencies_s.append(time.monotonic() - began_s)
            if status != 200:
                found.counts[f"lost ({status})"] += 1
            elif answer_of(told) != answers[name, text]:
                found.counts["another answer"] += 1
            else:
                found.counts["answered"] += 1

    began_s = next_s = time.monotonic()
    with ThreadPoolExecutor(64) as clients:
        while next_s < began_s + duration_s:
            time.sleep(max(0.0, next_s - time.monotonic()))
            found.max_resident_bytes = max(found.max_resident_bytes, server.resident_bytes())
            rare = int((next_s - began_s) / WAVE_S) % len(MODELS)
            [name] = rng.choices(MODELS, [0.04 if index == rare else 0.48 for index in range(len(MODELS))])
            found.counts["sent"] += 1
            clients.submit(call, name, rng.choice(TEXTS))
            next_s += rng.expovariate(rate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--coder", default=MODELS[1], help="the second model: a file, or a name of the catalogue")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second of all models together")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="swaps of each model")
    parser.add_argument("--gap-tokens", type=int, default=400)
    args = parser.parse_args()
    configs = tuple(config_of(name, args.coder) for name in MODELS)
    limit_bytes, shares = limit_of_two(configs)
    answers = lone_answers(configs, args.tokens)
    server = Server(tuple(replace(config, sharing=SharingConfig(memory_bytes=limit_bytes)) for config in configs))
    swapped = swaps(server, args.rounds)
    ratio = {name: times["swap"] / times["load"] for name, times in swapped.items()}
    gaps = gaps_beside_loads(server, args.gap_tokens)
    before = {name: num_loads for name, (_, num_loads, _) in server.tell("state").items()}
    found = soak(server, answers, args.soak, args.rate, args.tokens)
    loads = {name: told[1] - before[name] for name, told in server.tell("state").items()}
    server.end()
    latencies_s = sorted(found.latencies_s)
    print(origin(f"a budget of {limit_bytes >> 20} MiB, shares of {[size >> 20 for size in shares.values()]} MiB"))
    print(
        table(
            ["model", "first answer, loaded", "after a load", "after a swap", "swap / load", "loads in the soak"],
            [
                [name, *(f"{times[kind]:.3f} s" for kind in ("loaded", "load", "swap")), f"{ratio[name]:.2f}", loads[name]]
                for name, times in swapped.items()
            ],
        )
    )
    print()
    print(
        table(
            ["gaps of a stream", *gaps["beside loads"]],
            [[kind, *(f"{part:.1f}" for part in told.values())] for kind, told in gaps.items()],
        )
    )
    print()
    figures = {
        "counts": dict(found.counts),
        "loads": loads,
        "swap_ratio": ratio,
        "seconds": swapped,
        "gaps": gaps,
        "limit_bytes": limit_bytes,
        "max_resident_bytes": found.max_resident_bytes,
        "latency_s": {"median": statistics.median(latencies_s), "p99": latencies_s[int(0.99 * len(latencies_s))]},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
