"""How many tokens per second does a server stream to many clients? The ShareGPT workload against a URL.

A closed loop over real prompts in order: `--concurrency` clients, each sending its next request as soon as the last
one ended; one fresh connection per request, streaming, greedy, `ignore_eos`, replies of the real length. Prompts are the
first turns of the trace with at least 4 tokens in prompt and reply, cut at 512 prompt and 200 reply tokens.
Works against any server that speaks OpenAI's completions and vLLM's `ignore_eos`.

    penstock serve --no-prefix-caching &
    python benchmarks/serve.py --url http://127.0.0.1:8000 --trace ../shared/traces/sharegpt_1000.jsonl

Needs aiohttp, and the tokenizer of the default model in the cache (`penstock pull`). The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.models.load import load_model
from penstock.text.tokenizer import load_tokenizer

MAX_PROMPT_TOKENS = 512
MAX_REPLY_TOKENS = 200
MIN_TOKENS = 4


@dataclass(frozen=True)
class Job:
    prompt: str
    num_prompt_tokens: int
    max_tokens: int


@dataclass
class Reply:
    start_s: float
    num_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)
    """When each chunk with text or tokens arrived."""
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.start_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.token_times_s[0]) / max(1, self.num_tokens - 1)


def read_jobs(trace: Path, count: int) -> list[Job]:
    """The first `count` usable conversations of a ShareGPT file."""
    tokenizer = load_tokenizer(load_model(resolve(DEFAULT_MODEL, default_cache_dir())).tokenizer_source)
    jobs: list[Job] = []
    for line in trace.read_text().splitlines():
        turns = json.loads(line)["conversations"]
        if len(turns) < 2 or len(jobs) == count:
            continue
        prompt_ids = tokenizer.encode(turns[0]["value"], add_special_tokens=False)
        reply_ids = tokenizer.encode(turns[1]["value"], add_special_tokens=False)
        if min(len(prompt_ids), len(reply_ids)) < MIN_TOKENS:
            continue
        prompt = turns[0]["value"]
        if len(prompt_ids) > MAX_PROMPT_TOKENS:
            prompt_ids = prompt_ids[:MAX_PROMPT_TOKENS]
            prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
        jobs.append(Job(prompt, len(prompt_ids), min(len(reply_ids), MAX_REPLY_TOKENS)))
    return jobs


async def ask(url: str, model: str, job: Job) -> Reply:
    """One streamed completion on a connection of its own. Raises RuntimeError if the server answers anything else."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = Reply(time.perf_counter())
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            if chunk["choices"]:
                reply.token_times_s.append(time.perf_counter())
            if chunk.get("usage"):
                reply.num_tokens = chunk["usage"]["completion_tokens"]
    reply.end_s = time.perf_counter()
    if reply.num_tokens != job.max_tokens:
        raise RuntimeError(f"{reply.num_tokens} tokens instead of {job.max_tokens}")
    return reply


async def replay(url: str, model: str, jobs: list[Job], concurrency: int) -> tuple[list[Reply], float]:
    """All jobs, `concurrency` at a time; the replies and the seconds from the first request to the last byte."""
    queue = list(reversed(jobs))
    replies: list[Reply] = []

    async def client() -> None:
        while queue:
            replies.append(await ask(url, model, queue.pop()))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return replies, time.perf_counter() - start


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarise(replies: list[Reply], seconds: float) -> dict[str, float]:
    gaps = [b - a for r in replies for a, b in zip(r.token_times_s, r.token_times_s[1:], strict=False)]
    return {
        "output_tokens_per_s": sum(r.num_tokens for r in replies) / seconds,
        "seconds": seconds,
        "ttft_p50_ms": 1e3 * quantile([r.ttft_s for r in replies], 0.5),
        "ttft_p99_ms": 1e3 * quantile([r.ttft_s for r in replies], 0.99),
        "tpot_p50_ms": 1e3 * quantile([r.tpot_s for r in replies], 0.5),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99) if gaps else 0.0,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--requests", type=int, nargs="+", default=[96, 32, 8], help="for each concurrency")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    jobs = read_jobs(args.trace, max(args.requests))
    print(
        f"{len(jobs)} prompts, {sum(j.num_prompt_tokens for j in jobs)} prompt, {sum(j.max_tokens for j in jobs)} reply tokens"
    )
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeat):
        for concurrency, count in zip(args.concurrency, args.requests, strict=True):
            figures = summarise(*await replay(args.url, args.model, jobs[:count], concurrency))
            results.setdefault(str(concurrency), []).append(figures)
            print(f"concurrency {concurrency}: " + ", ".join(f"{k} {v:.1f}" for k, v in figures.items()), flush=True)
    medians = {c: {k: round(statistics.median(r[k] for r in runs), 2) for k in runs[0]} for c, runs in results.items()}
    print(json.dumps({"benchmark": "serve", "repeat": args.repeat, "median_by_concurrency": medians}))


if __name__ == "__main__":
    asyncio.run(main())
