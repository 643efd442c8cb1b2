"""How does a long prompt affect streams already being answered? Latency between tokens of 32 streams, with and without it.

The real engine, in process. Streams decode; after some seconds a prompt of 4,000 tokens arrives. Gaps between the tokens of the
streams are collected before that (`alone`, from when all have a token) and from then to its first token (`beside`). Each round
does so once for each budget: `decode-first` (the controller off), `itl` as it is by default, and `itl` with `--slo-itl`.

    python benchmarks/long_prompt.py
    python benchmarks/long_prompt.py --rounds 1 --slo-itl 40
    python benchmarks/long_prompt.py --streams 1 --max-tokens 3000 --busy 4

With `--busy N` the prompt comes while N other processes compute without end: `decode-first` then shows the effect of fewer
cores, and `itl` should be compared with it. `ratio` is the p99 beside the prompt over that alone; the last line printed is one
JSON object of medians, times in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import accumulate, pairwise

import numpy as np

from penstock import machine
from penstock.lab.driving import drive
from penstock.lab.in_process import Progress, sender
from penstock.lab.records import Record
from penstock.lab.workload import Job, Workload
from penstock.llm import AsyncLLM, SamplingParams
from penstock.models.catalog import DEFAULT_MODEL

FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40_000
"""Prompts are made of tokens drawn from between these."""


def make_workload(args: argparse.Namespace, seed: int) -> Workload:
    """The streams, and last the long prompt."""
    rng = random.Random(seed)

    def job(num_prompt_tokens: int, num_output_tokens: int, at_s: float) -> Job:
        prompt = tuple(rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_prompt_tokens))
        return Job(
            arrival_ns=round(at_s * 1e9),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            prompt_token_ids=prompt,
        )

    streams = [job(64, args.max_tokens, 0.0) for _ in range(args.streams)]
    return Workload(name="long prompt", jobs=[*streams, job(args.prompt_tokens, 1, args.after)])


async def measure(llm: AsyncLLM, workload: Workload) -> dict[str, float]:
    """Figures of one round, which is over when the long prompt has its token."""

    async def ask(prompt: Sequence[str] | Sequence[int], num_output_tokens: int) -> AsyncGenerator[Progress, None]:
        params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        async with aclosing(llm.generate([int(token) for token in prompt], params)) as outputs:
            async for output in outputs:
                num_tokens = len(output.outputs[0].token_ids)
                # A piece of a character is a token, too, so each has a gap whatever its text is.
                yield Progress(num_prompt_tokens=0, num_cached_tokens=0, num_output_tokens=num_tokens, new_text="x")

    def stop() -> None:
        running.cancel()

    running = asyncio.create_task(drive(workload, sender(ask), on_end=stop))
    sent = await running
    if [record.index for record in sent.records] != [len(workload.jobs) - 1]:
        raise RuntimeError("a stream ended before the long prompt was computed: raise --max-tokens")
    return summary(sent.unfinished, sent.records[0])


def summary(streams: Sequence[Record], long: Record) -> dict[str, float]:
    """Milliseconds; of gaps by when they ended."""
    assert long.first_ns is not None, "its one token has come"
    firsts_ns = [stream.first_ns or long.intended_ns for stream in streams]
    alone, beside = [], []
    for stream, first_ns in zip(streams, firsts_ns, strict=True):
        for before_ns, after_ns in pairwise(accumulate(stream.gaps_ns, initial=first_ns)):
            if after_ns > long.intended_ns:
                beside.append((after_ns - before_ns) / 1e6)
            elif before_ns >= max(firsts_ns):
                alone.append((after_ns - before_ns) / 1e6)
    if not alone:
        raise RuntimeError("the streams had hardly begun when the long prompt came: raise --after")
    (p50_alone, p99_alone), (p50_beside, p99_beside) = (np.quantile(gaps, (0.5, 0.99)) for gaps in (alone, beside))
    figures = {"p50_alone": p50_alone, "p99_alone": p99_alone, "p50_beside": p50_beside, "p99_beside": p99_beside}
    figures |= {"ttft": (long.first_ns - long.intended_ns) / 1e6, "ratio": p99_beside / p99_alone}
    return {name: round(float(value), 2) for name, value in figures.items()}


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--max-tokens", type=int, default=2500, help="of a stream; it must outlast the long prompt")
    parser.add_argument("--after", type=float, default=8.0, help="seconds until the long prompt arrives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slo-itl", type=int, default=25, help="milliseconds")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the cores busy meanwhile")
    args = parser.parse_args()
    budgets: Mapping[str, Mapping[str, str]] = {
        "decode-first": {"budget": "decode-first"},
        "itl": {"budget": "itl"},
        f"itl, {args.slo_itl} ms": {"slo_itl": f"{args.slo_itl}ms"},
    }
    llms = {name: AsyncLLM(args.model, prefix_caching=False, **settings) for name, settings in budgets.items()}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
    with busy_cores(args.busy):
        for seed in range(args.rounds):
            for name, llm in llms.items():
                results[name].append(asyncio.run(measure(llm, make_workload(args, seed))))
                print(f"{name:14}", results[name][-1], flush=True)
    for llm in llms.values():
        llm.close()
    medians = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()}
    report = {"benchmark": "long_prompt", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), **vars(args)}
    print(json.dumps(report | {"median_by_budget": medians}))


if __name__ == "__main__":
    main()
