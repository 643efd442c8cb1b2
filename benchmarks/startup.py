"""How soon does the server answer after its start, how much memory does it hold, and how much disk does it take?

Starts `penstock serve` with a model that is in the cache, on a free port, and waits for `/ready` to say 200; then asks one
question, so that what is allocated on first use is counted, and reads the resident memory. `beside_mb` is what remains of it
without the weights and the KV cache: the bar is 150 MB. The weights are those that the backend has packed (`weights_mb`, its
`penstock_weight_bytes`) and what is resident of the model's file, such as rows of a table (`mapped_mb`). It is read again after
a load of 32 streams, as `loaded_beside_mb`. `peak_mb` is the most that was resident at any time until it was ready: pages of
the model's file and the first ones of the KV cache are part of it. `idle_cpu_percent` is the CPU time of all threads in two
seconds without a request, of one core.

`installed_mb` is what `pip install penstock` leaves in `site-packages`: every distribution that it needs at run time, found by
their metadata in the environment that runs this, as the sum of their files' sizes (byte code included).

    penstock pull && python benchmarks/startup.py
    python benchmarks/startup.py --model qwen2.5-coder:1.5b --repeat 3

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

from installed import distribution_files
from sessions import replay

from penstock.lab.workload import Job
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve

DEADLINE_S = 180.0
KV_BYTES = 1 << 30
STREAMS = 32
IDLE_S = 2.0
IDLE_CHECK_S = 1.0


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


def resident_mb(smaps: str, model: Path) -> dict[str, float]:
    """Resident memory: all of it, the pages of the KV cache, which has a mapping of its own, and those of the model's files."""
    resident, in_kv, mapped, size, is_model = 0, 0, 0, 0, False
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if "-" in name:  # a mapping begins: address, permissions, offset, device, inode, path
            path = line.split(maxsplit=5)[5:]
            is_model = bool(path) and Path(path[0]).is_relative_to(model)
        elif name == "Size":
            size = int(value.split()[0]) * 1024
        elif name == "Rss":
            rss = int(value.split()[0]) * 1024
            resident += rss
            in_kv += rss if 0.9 * KV_BYTES < size < 1.1 * KV_BYTES and not is_model else 0
            mapped += rss if is_model else 0
    return {"resident_mb": resident / 1e6, "kv_touched_mb": in_kv / 1e6, "mapped_mb": mapped / 1e6}


def peak_mb(status: str) -> float:
    """The most that was resident at any time, of `/proc/<pid>/status`."""
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("VmHWM:"))


def installed_mb() -> dict[str, float]:
    """Size in `site-packages` of Penstock and of everything that it needs, byte code included, the largest first."""
    sizes = {name: sum(path.stat().st_size for path in files) for name, files in distribution_files().items()}
    return {name: round(size / 1e6, 3) for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def beside_mb(figures: dict[str, float], weights_mb: float) -> float:
    return figures["resident_mb"] - figures["kv_touched_mb"] - figures["mapped_mb"] - weights_mb


def weights_mb(url: str) -> float:
    """Size of the packed weights. Asked last: the client library of `/metrics` is only loaded, and takes memory, when it is
    asked."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("penstock_weight_bytes{")).split()[-1]) / 1e6


def cpu_s(pid: int) -> float:
    """CPU time of all threads that live, so far."""
    total_ns = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            total_ns += int(file.read_text().split()[0])
    return total_ns / 1e9


def idle_cpu_percent(pid: int) -> float:
    """Share of one core, after the engine has verified its books, which it does once when it becomes idle."""
    time.sleep(IDLE_CHECK_S + 0.5)
    before_s = cpu_s(pid)
    time.sleep(IDLE_S)
    return (cpu_s(pid) - before_s) / IDLE_S * 100


def measure(model: str, path: Path, arguments: list[str], streams: int) -> dict[str, float]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    # As much KV cache as can be told from other mappings by its size.
    options = ["--port", str(port), "--kv-cache-memory", str(KV_BYTES)]
    command = [sys.executable, "-m", "penstock", "serve", model, *options, *arguments]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(url, server)
        ready_s = time.perf_counter() - start
        peak = peak_mb(Path(f"/proc/{server.pid}/status").read_text())
        print(ask(url))
        figures = {"ready_s": ready_s, "peak_mb": peak, "first_answer_s": time.perf_counter() - start}
        smaps = Path(f"/proc/{server.pid}/smaps")
        read = {"": resident_mb(smaps.read_text(), path)}
        if streams:
            job = Job(arrival_ns=0, num_prompt_tokens=0, num_output_tokens=32, prompt="Once upon a time " * 100)
            replay(url, model, [job] * streams, streams)
            figures["idle_cpu_percent"] = idle_cpu_percent(server.pid)
            read["loaded_"] = resident_mb(smaps.read_text(), path)
        figures["weights_mb"] = weights_mb(url)
        for prefix, found in read.items():
            found["beside_mb"] = beside_mb(found, figures["weights_mb"])
            figures |= {prefix + name: size for name, size in found.items()}
        return figures
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as `penstock serve` takes it")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--streams", type=int, default=STREAMS, help="of the load; 0 leaves it out")
    parser.add_argument("arguments", nargs="*", help="for `penstock serve`, after --")
    args = parser.parse_args()
    source = resolve(args.model, default_cache_dir())
    runs = [measure(args.model, source.path.resolve(), args.arguments, args.streams) for _ in range(args.repeat)]
    summary = {
        key: {"median": round(statistics.median(r[key] for r in runs), 3), "max": round(max(r[key] for r in runs), 3)}
        for key in runs[0]
    }
    packages = installed_mb()
    print(packages)
    size = {"installed_mb": round(sum(packages.values()), 1)}
    told = {"benchmark": "startup", "model": source.name, "repeat": args.repeat}
    print(json.dumps({**told, **size, **summary}))


if __name__ == "__main__":
    main()
