"""How soon does the server answer after its start, and how much memory does it hold?

Starts `penstock serve` with a model that is in the cache, on a free port, and waits for `/ready` to say 200; then asks one
question, so that what is allocated on first use is counted, and reads the resident memory.

    penstock pull && python benchmarks/startup.py

The last line printed is one JSON object. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

DEADLINE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=1):
            return
        time.sleep(0.005)
    raise RuntimeError(f"not ready after {DEADLINE_S} s")


def ask(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def resident_mib(pid: int) -> dict[str, float]:
    """Resident memory by kind, from /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon", "RssFile")}


def measure(arguments: list[str]) -> dict[str, float]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "serve", "--port", str(port), *arguments]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(url, server)
        ready_s = time.perf_counter() - start
        print(ask(url))
        figures = {"ready_s": ready_s, "first_answer_s": time.perf_counter() - start}
        return figures | {f"{name}_mib": size for name, size in resident_mib(server.pid).items()}
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("arguments", nargs="*", help="for `penstock serve`, after --")
    args = parser.parse_args()
    runs = [measure(args.arguments) for _ in range(args.repeat)]
    summary = {
        key: {"median": round(statistics.median(r[key] for r in runs), 3), "max": round(max(r[key] for r in runs), 3)}
        for key in runs[0]
    }
    print(json.dumps({"benchmark": "startup", "repeat": args.repeat, **summary}))


if __name__ == "__main__":
    main()
