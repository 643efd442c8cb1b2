"""What does it cost that answers follow a grammar? The same prompts with a grammar and without, in turn, in one run.

Through the engine in process, without HTTP: N clients at a time, greedy answers of `--max-tokens` each. None of the grammars is
complete before that, so that all answers are equally long. `ratio` is tokens per second with the grammar over those without, of
neighbouring runs; `grammar_us` what the engine's thread takes for the grammars of a step, which the kernels wait for on a CPU.

    python benchmarks/structured.py

Needs the default model in the cache (`penstock pull`). The last line printed is one JSON object of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING

from penstock import machine
from penstock.config import BackendConfig, Config, KvConfig, ModelConfig
from penstock.deploy.factory import start_model
from penstock.models.catalog import DEFAULT_MODEL, default_cache_dir, resolve
from penstock.text.grammar import Grammar, GrammarKind
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel

PEOPLE = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "email": {"type": "string", "format": "email"},
            "role": {"enum": ["admin", "editor", "reader"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        },
        "required": ["name", "age", "email", "role", "tags"],
        "additionalProperties": False,
    },
}
GRAMMARS: Mapping[str, Grammar] = {
    "people": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PEOPLE)),
    "text": Grammar(GrammarKind.REGEX, r"(.|\n){4000,}"),
    "json": Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "minItems": 500})),
}
TOPICS = ["users of a shop", "members of a choir", "authors of a paper", "players of a team", "guests of a hotel", "pupils"]


def grammar_time(runtime: RunningModel) -> tuple[int, int]:
    """(steps with grammars so far, nanoseconds that the engine's thread took for them)."""
    with runtime.metrics.lock:
        runtime.metrics.settle()
        histogram = runtime.metrics.step_ns.get("grammar")
        if histogram is None:
            return 0, 0
        buckets, total_ns = histogram.snapshot()
        return int(buckets[-1][1]), int(total_ns)


class Clients:
    """A closed loop through the bridge that the server uses."""

    def __init__(self, runtime: RunningModel, max_tokens: int) -> None:
        self._runtime = runtime
        self._max_tokens = max_tokens
        self._ids = count()

    def run(self, grammar: Grammar | None, num_requests: int, concurrency: int) -> float:
        """Seconds for so many requests."""
        return asyncio.run(self._run(grammar, num_requests, concurrency))

    async def _run(self, grammar: Grammar | None, num_requests: int, concurrency: int) -> float:
        left = iter(range(num_requests))

        async def client() -> None:
            for number in left:
                await self._ask(grammar, f"A list of {TOPICS[number % len(TOPICS)]}, number {number}, as JSON:\n")

        start_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return time.perf_counter() - start_s

    async def _ask(self, grammar: Grammar | None, prompt: str) -> None:
        runtime = self._runtime
        tokens = tuple(runtime.tokenizer.encode(prompt, add_special_tokens=True))
        sampling = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, follows_grammar=grammar is not None)
        request = Request(f"request-{next(self._ids)}", tokens, sampling, runtime.clock.now_ns())
        if grammar is not None:
            request.matcher = runtime.grammars.matcher(grammar)
        with runtime.bridge.open([request]) as stream:
            while chunks := await stream.next_chunks():
                last = chunks[-1]
        if last.num_generated_tokens != self._max_tokens:
            raise RuntimeError(f"{last.num_generated_tokens} tokens instead of {self._max_tokens}: {last.detail}")


def measure(args: argparse.Namespace, clients: Clients, runtime: RunningModel) -> dict[str, dict[str, dict[str, float]]]:
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for grammar in (None, *(GRAMMARS[name] for name in args.grammars)):
        clients.run(grammar, max(args.concurrency), max(args.concurrency))
    for _ in range(args.repeat):
        for concurrency in args.concurrency:
            num_requests = max(args.rounds * concurrency, 4)
            for name in args.grammars:
                free_s = clients.run(None, num_requests, concurrency)
                before = grammar_time(runtime)
                bound_s = clients.run(GRAMMARS[name], num_requests, concurrency)
                num_steps, grammar_ns = (now - then for now, then in zip(grammar_time(runtime), before, strict=True))
                found = {
                    "ratio": free_s / bound_s,
                    "tokens_per_s": num_requests * args.max_tokens / bound_s,
                    "grammar_us": grammar_ns / num_steps / 1e3,
                }
                results.setdefault(name, {}).setdefault(str(concurrency), []).append(found)
                print(f"{name}, {concurrency} at a time: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
    return {
        name: {c: {k: round(statistics.median(r[k] for r in runs), 3) for k in runs[0]} for c, runs in of_name.items()}
        for name, of_name in results.items()
    }


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--grammars", nargs="+", choices=GRAMMARS, default=list(GRAMMARS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, help="that compute")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    config = Config(
        model=ModelConfig(model=args.model), kv=KvConfig(prefix_caching=False), backend=BackendConfig(threads=args.threads)
    )
    runtime = start_model(config, resolve(args.model, default_cache_dir()))
    try:
        medians = measure(args, Clients(runtime, args.max_tokens), runtime)
    finally:
        runtime.close()
    report = {"benchmark": "structured", "date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), "model": args.model}
    print(json.dumps(report | {"repeat": args.repeat, "medians": medians}))


if __name__ == "__main__":
    main()
