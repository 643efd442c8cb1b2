"""What do adapters cost? One model with none, one, five, a hundred and a thousand of them among its requests.

    python benchmarks/adapters.py                                       # SmolLM2, rank 8, attention's projections, 32 rows
    python benchmarks/adapters.py --parts merged --adapters 100

Requests have ShareGPT's lengths; no two prompts begin alike, and replies end at their length. Each request has an adapter
drawn from N by Zipf's law (exponent 1); with ranks `8,16` adapters alternate between the two.

`throughput`: all requests arrive at the start, and at most `--rows` run. Reports generated tokens per second while all rows
are busy, and per second of the process's CPU time over the whole run, which other processes disturb less. The arms take turns;
figures are medians, with the range. Adapters are loaded on first use; after the first round some are in memory.
`merged`: the same requests on a server with one adapter merged into its weights at a time. Each adapter's requests run alone on
the base's weights, which no merged weights could beat. To save time, adapters are sorted by tokens and cut into `--sample`
parts, and the middle adapter's speed stands for its part. A switch is timed separately: a start with `--merge-lora`, which
reads, merges and packs the weights, beside one without; medians of three.
`cold`: time to the first token after a prompt of 64, one request at a time: with the base, with adapters never requested
before whose files are not in the page cache, and with the same once they are in the KV cache.
`registered`: memory and time that 10,000 names cost by `--lora-modules`. The folder of `--lora-dir` is not read at the start.

Adapters are random, a few files under many names, each an adapter of its own to the server. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
from adapter_requests import Workload, drawn, found, run, shapes_of, start, write_adapters
from printed import origin, spread, table

from penstock.config import LoraConfig
from penstock.deploy.factory import open_adapters
from penstock.models.catalog import DEFAULT_MODEL
from penstock.testing import make_request

NUM_REGISTERED = 10_000
OPTIONS = {"rows": 32, "requests": 96, "rounds": 3, "sample": 12, "cold": 100, "kv-mib": 2048, "max-cpu-loras": 64}


def throughput(args, running, workload, _folder):
    count, rates = args.requests, {num: [] for num in args.adapters}
    arms = {num: [found(running, one) for one in drawn(count, num)] if num else [None] * count for num in rates}
    run(running, workload.requests([None] * count)[: args.rows // 2])  # touches the memory once
    for nth in range(args.rounds):
        for num in list(arms) if nth % 2 else list(arms)[::-1]:
            cpu_s = time.process_time()
            num_tokens, seconds = run(running, workload.requests(arms[num]), args.rows)
            cpu_rate = sum(reply for _, reply in workload.lengths) / (time.process_time() - cpu_s)
            rates[num].append((round(num_tokens / seconds, 1), round(cpu_rate, 1)))
            print(f"{num} adapters: {rates[num][-1]} tokens a second, and a second of CPU time", file=sys.stderr)
    rows, medians = [], {num: np.median(told, axis=0) for num, told in rates.items()}
    for num, median in medians.items():
        row = [num, len({ref.number for ref in arms[num] if ref})]
        row += [spread([wall for wall, _ in rates[num]], 0), f"{median[1]:.0f}"]
        rows.append(row + [" / ".join(f"{x:.1%}" for x in median / medians[to]) if to in medians else "" for to in (0, 5)])
    print(table(["adapters", "different", "tokens/s", "tokens/CPU s", "of the base", "of five"], rows))
    return {"tokens_per_s_and_cpu_s": rates}


def merged(args, running, workload, folder):
    answers, times = {}, {"start_s": [], "switch_s": []}
    for idx in range(3):
        for name, lora in (("start_s", {}), ("switch_s", {"merge_lora": (str(folder / f"a{idx}"),)})):
            began_s = time.perf_counter()
            start(args, **lora).close()
            times[name].append(round(time.perf_counter() - began_s, 2))
    start_s, switch_s = map(np.median, times.values())
    for num in [num for num in args.adapters if num > 1]:
        requests, groups = workload.requests([None] * args.requests), {}
        for request, adapter in zip(requests, drawn(args.requests, num), strict=True):
            groups.setdefault(adapter, []).append(request)
        size = {name: sum(one.sampling.max_tokens for one in group) for name, group in groups.items()}
        alone_s, parts = 0.0, np.array_split(sorted(groups, key=size.__getitem__), min(args.sample, len(groups)))
        for part in parts:
            middle = int(part[len(part) // 2])
            num_tokens, seconds = run(running, groups[middle])
            alone_s += seconds * sum(size[int(name)] for name in part) / num_tokens
            print(f"{len(groups[middle])} requests of one adapter: {num_tokens / seconds:.0f} tokens/s", file=sys.stderr)
        num_tokens, together_s = run(running, workload.requests([found(running, one) for one in drawn(args.requests, num)]))
        with_switches_s = alone_s + len(groups) * switch_s
        print(
            f"{num} adapters, {len(groups)} different ones in {args.requests} requests: {num_tokens / together_s:.0f} tokens/s "
            f"in one batch. One after the other, by {len(parts)} of them: {num_tokens / alone_s:.0f} tokens/s, a ratio of "
            f"{alone_s / together_s:.1f}; with {switch_s:.2f} s for each switch (of which a start takes {start_s:.2f} s) "
            f"{num_tokens / with_switches_s:.0f} tokens/s, {with_switches_s / together_s:.1f}"
        )
        told = {"together_s": together_s, "alone_s": alone_s, "with_switches_s": with_switches_s}
        answers[num] = {name: round(float(value), 2) for name, value in told.items()} | {"different": len(groups)}
    return {"merged": answers} | times


def cold(args, running, _workload, folder):
    """Asks for adapters from the end of the folder, which no other part has asked for."""
    rng, times = np.random.default_rng(3), {"base": [], "cold": [], "warm": []}
    for nth in range(args.cold):
        for file in folder.glob("weights-*"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ref = found(running, args.count - 1 - nth)
        for name, adapter in (("base", None), ("cold", ref), ("warm", ref)):
            prompt = rng.integers(10, running.model.vocab_size, 64).tolist()
            times[name].append(1e3 * run(running, [make_request(f"{name} {nth}", prompt, max_tokens=1, adapter=adapter)])[1])
    rows = [[name, *(f"{x:.1f}" for x in np.percentile(told, (50, 99, 100)))] for name, told in times.items()]
    print(table(["first token", "p50 ms", "p99 ms", "max ms"], rows))
    stats = running.adapters.stats
    print(f"{stats.num_loads} loads, {stats.load_ns / stats.num_loads / 1e6:.1f} ms each in the mean")
    return {"cold_ms": {row[0]: row[1:] for row in rows}, "load_ms": round(stats.load_ns / stats.num_loads / 1e6, 2)}


def registered(_args, _running, _workload, folder):
    lora = LoraConfig(lora_modules=tuple(f"m{idx}={folder / 'a0'}" for idx in range(NUM_REGISTERED)))
    began_s = time.perf_counter()
    open_adapters(lora)
    ms = 1e3 * (time.perf_counter() - began_s)
    tracemalloc.start()
    _kept = open_adapters(lora)
    mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    print(f"{NUM_REGISTERED} names by --lora-modules: {ms:.0f} ms, {mib:.1f} MiB")
    return {"registered": {"ms": round(ms, 1), "mib": round(mib, 2)}}


if __name__ == "__main__":
    ints, words = (lambda text: [int(word) for word in text.split(",")]), (lambda text: text.split(","))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--parts", type=words, default=["throughput", "merged", "cold", "registered"])
    parser.add_argument("--adapters", type=ints, default=[0, 1, 5, 100, 1000], help="numbers of adapters; 0: the base")
    parser.add_argument("--targets", type=words, default=["q", "k", "v", "o"], help="of q, k, v, o, gate, up, down; or all")
    parser.add_argument("--ranks", type=ints, default=[8])
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    args = parser.parse_args()
    args.count = max(*args.adapters, 3) + args.cold
    print(origin(args.model, f"rank {args.ranks}, {args.targets}, {args.rows} rows, {args.requests} requests"))
    with tempfile.TemporaryDirectory(prefix="adapters-") as temporary:
        write_adapters(Path(temporary), shapes_of(args.model, args.targets), args.ranks, args.count)
        running = start(args, lora_dir=temporary, max_cpu_loras=args.max_cpu_loras, max_lora_rank=max(args.ranks))
        workload, result = Workload(args.requests, running.model.vocab_size), {"settings": vars(args)}
        for part in args.parts:
            result |= globals()[part](args, running, workload, Path(temporary))
        running.close()
    print(json.dumps(result))
