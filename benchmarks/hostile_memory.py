"""How much stays resident in a server after strangers sent the worst allowed requests? Measured when idle again.

    python benchmarks/hostile_memory.py [--seconds 30] [--clients 16] [--kinds plain,body,text,schema] [--penstock PATH]

Each kind gets a new server, with a KV cache of 64 MiB. It answers a prompt of 1,500 words, so that everything
was touched once; then `--clients` threads send requests of that kind for `--seconds`:

    plain     short completions, to compare with
    body      bodies of up to 4 MB: nested brackets, random bytes, 60,000 messages, 100,000 unknown fields, huge prompts
    text      /tokenize of up to 200,000 characters in several scripts
    schema    grammars whose automata grow as they are followed, schemas of up to 3,000 fields, sampled at a high temperature

MiB of the process: after the first prompt, at peak, and five seconds after the last request. `--penstock` names another
installation's command to compare with. Needs the default model (`penstock pull`). The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from sessions import serving
from usage import resident_bytes

from penstock import machine

Request = tuple[str, bytes]
"""Path and body."""
TIMEOUT_S = 60.0
SETTINGS = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "16", "--log-level", "error")


def completion(prompt: str, max_tokens: int) -> Request:
    return "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()


def plain(rng: random.Random) -> Request:
    return completion("hello " * rng.randint(1, 300), 20)


def body(rng: random.Random) -> Request:
    makers: list[Callable[[], bytes]] = [
        lambda: b"[" * rng.randint(1, 10**6),
        lambda: os.urandom(rng.randint(1, 4 * 10**6)),
        lambda: json.dumps({"prompt": "x" * rng.randint(1, 3 * 10**6)}).encode(),
        lambda: json.dumps({"messages": [{"role": "user", "content": "y"}] * rng.randint(1, 60_000)}).encode(),
        lambda: json.dumps({f"field{idx}": idx for idx in range(rng.randint(1, 100_000))}).encode(),
    ]
    return rng.choice(("/v1/completions", "/v1/chat/completions")), rng.choice(makers)()


def text(rng: random.Random) -> Request:
    characters = rng.choices("ab \n\u4e00\u0416\U0001f600", k=rng.randint(1, 200_000))
    return "/tokenize", json.dumps({"prompt": "".join(characters)}).encode()


def schema(rng: random.Random) -> Request:
    name = rng.randrange(10**9)
    patterns = [{"type": "string", "pattern": f"^{''.join(rng.choices('abc.', k=8))}{name}"} for _ in range(6)]
    grammars: list[dict[str, object]] = [
        {"regex": f".*a.{{{rng.randint(20, 40)}}}b{name}"},
        {"regex": rf"\p{{L}}{{1,{rng.randint(100, 1000)}}}{name}"},
        {"json": {"allOf": [{"anyOf": patterns}] * 3}},
        {
            "json": {
                "type": "object",
                "properties": {f"p{idx}{name}": {"type": "string"} for idx in range(rng.randint(1, 3000))},
            }
        },
    ]
    asked = {"prompt": "Hi", "max_tokens": rng.randint(1, 120), "temperature": 1.5, "structured_outputs": rng.choice(grammars)}
    return "/v1/completions", json.dumps(asked).encode()


KINDS: dict[str, Callable[[random.Random], Request]] = {"plain": plain, "body": body, "text": text, "schema": schema}


def send(address: str, request: Request) -> int:
    """The status; 0 if the server closed the connection."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", request[0], request[1], {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
    return answer.status


def measure(command: str, kind: str, num_clients: int, seconds: float) -> dict[str, int]:
    with serving(*SETTINGS, penstock=[command]) as session:
        address, pid = urlsplit(session.url).netloc, session.process.pid
        send(address, completion("hello " * 1500, 2))
        warm_mib = most_mib = resident_bytes(pid) >> 20
        end_s = time.monotonic() + seconds
        statuses: list[int] = []

        def client(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < end_s:
                statuses.append(send(address, KINDS[kind](rng)))

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(num_clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            most_mib = max(most_mib, resident_bytes(pid) >> 20)
        time.sleep(5)
        figures = {"warm": warm_mib, "most": most_mib, "idle": resident_bytes(pid) >> 20, "requests": len(statuses)}
        return figures | {"no_answer": statuses.count(0), "server_errors": sum(status >= 500 for status in statuses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--penstock", default=str(Path(sys.executable).with_name("penstock")))
    args = parser.parse_args()
    results: dict[str, dict[str, int]] = {}
    for kind in args.kinds.split(","):
        results[kind] = measure(args.penstock, kind, args.clients, args.seconds)
        print(f"{kind:8}", results[kind], flush=True)
    report = {"benchmark": "hostile_memory", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name()}
    print(json.dumps(report | {"seconds": args.seconds, "clients": args.clients, "mib_by_kind": results}))


if __name__ == "__main__":
    main()
