"""How soon does the server answer after its start, and how much memory does it hold? `installed.py` has its disk.

Starts `penstock serve` with a model that is in the cache, waits for `/ready` to say 200, asks for one token, and reads the
resident memory; then again after a load of 32 streams. `beside` is what remains without the weights and the KV cache: the bar
is 150 MB. The weights are those that the backend has packed (its `penstock_weight_bytes`) and what is resident of the model's
file, such as rows of a table. The peak is the most that was resident until it was ready: pages of the model's file and of the
KV cache are part of it. The idle CPU time is that of all threads in two seconds without a request, of one core.

    penstock pull && python benchmarks/startup.py
    python benchmarks/startup.py --model qwen2.5-coder:1.5b --repeat 3

Linux only (/proc).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from printed import origin, table
from sessions import ServerSession, serving
from usage import metric, threads_cpu_s

from penstock.lab.workload import Job
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve

KV_BYTES = 1 << 30
"""KV cache large enough to recognise its mapping by size."""
STREAMS = 32
IDLE_S = 2.0
IDLE_CHECK_S = 1.5
"""The engine checks its bookkeeping once when it becomes idle."""


def resident_mb(smaps: str, model: Path) -> dict[str, float]:
    """Resident memory: all of it, the pages of the KV cache, which has a mapping of its own, and those of the model's files.

    Packed weights (`penstock pack`) are a file of the model, too.
    """
    resident, in_kv, mapped, size, is_model = 0, 0, 0, 0, False
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if "-" in name:  # a mapping begins: address, permissions, offset, device, inode, path
            path = line.split(maxsplit=5)[5:]
            is_model = bool(path) and (Path(path[0]).is_relative_to(model) or path[0].endswith(".packed"))
        elif name == "Size":
            size = int(value.split()[0]) * 1024
        elif name == "Rss":
            rss = int(value.split()[0]) * 1024
            resident += rss
            in_kv += rss if 0.9 * KV_BYTES < size < 1.1 * KV_BYTES and not is_model else 0
            mapped += rss if is_model else 0
    return {"resident": resident / 1e6, "KV touched": in_kv / 1e6, "file mapped": mapped / 1e6}


def peak_mb(status: str) -> float:
    """The most that was resident at any time, of `/proc/<pid>/status`."""
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("VmHWM:"))


def idle_cpu_percent(pid: int) -> float:
    """Share of one core."""
    time.sleep(IDLE_CHECK_S)
    before_s = threads_cpu_s(pid)
    time.sleep(IDLE_S)
    return (threads_cpu_s(pid) - before_s) / IDLE_S * 100


def measure(session: ServerSession, model: Path) -> dict[str, float]:
    folder = Path(f"/proc/{session.process.pid}")
    figures = {"ready, s": session.ready_s, "peak until ready, MB": peak_mb((folder / "status").read_text())}
    asked_s = time.perf_counter()
    job = Job(arrival_ns=0, num_prompt_tokens=0, num_output_tokens=1, prompt="The capital of France is")
    session.replay([job], 1)
    figures["first answer, s"] = session.ready_s + time.perf_counter() - asked_s
    smaps = (folder / "smaps").read_text()
    read = {"": resident_mb(smaps, model)}
    job = Job(arrival_ns=0, num_prompt_tokens=0, num_output_tokens=32, prompt="Once upon a time " * 100)
    session.replay([job] * STREAMS, STREAMS)
    figures["idle CPU, %"] = idle_cpu_percent(session.process.pid)
    read[f" after {STREAMS} streams"] = resident_mb((folder / "smaps").read_text(), model)
    figures["weights, MB"] = metric(session.url, "penstock_weight_bytes") / 1e6  # last: from then on, metrics take memory
    held = 0.0 if ".packed" in smaps else figures["weights, MB"]
    for when, found in read.items():
        found["beside"] = found["resident"] - found["KV touched"] - found["file mapped"] - held
        figures |= {f"{name}{when}, MB": size for name, size in found.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as `penstock serve` takes it")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("arguments", nargs="*", help="for `penstock serve`, after --")
    args = parser.parse_args()
    source = resolve(args.model, default_cache_dir())
    runs = []
    for _ in range(args.repeat):
        with serving(args.model, "--kv-cache-memory", str(KV_BYTES), *args.arguments) as session:
            runs.append(measure(session, source.path.resolve()))
    print(origin(source.name, f"{args.repeat} starts"))
    spread = [(name, sorted(run[name] for run in runs)) for name in runs[0]]
    rows = [[name, *(f"{value:.3g}" for value in (statistics.median(found), found[-1]))] for name, found in spread]
    print(table(["", "median", "largest"], rows))


if __name__ == "__main__":
    main()
