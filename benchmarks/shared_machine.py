"""How well do two models share one machine: what does a full batch of one cost the other's clients, and who has how much?

    python benchmarks/shared_machine.py --beside         # users of one model, alone and beside a full batch of the other
    python benchmarks/shared_machine.py --saturated      # both have full batches, with shares 1:1 and 2:1
    python benchmarks/shared_machine.py --alone          # tokens a second of a model with nobody beside it

Both models run in this process, without HTTP, on all cores. Prompts are random tokens, and no two begin alike. The last line is
JSON. Times of requests are a client's: from the instant at which a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from printed import origin, table

from penstock import machine
from penstock.config import Config
from penstock.deploy.factory import locate, start_model
from penstock.deploy.resources import Resources
from penstock.deploy.running import RunningModel
from penstock.models.catalog import DEFAULT_MODEL
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40_000
"""Prompts are made of tokens drawn from between these."""
WARM_UP_S = 3.0
"""A phase runs for so long before anything is counted."""


@dataclass(slots=True)
class Call:
    """One request. Seconds."""

    due_s: float
    tokens_s: list[float] = field(default_factory=list)
    """When each token came."""

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.tokens_s[0] - self.due_s)

    @property
    def tpot_ms(self) -> float:
        return 1e3 * (self.tokens_s[-1] - self.tokens_s[0]) / (len(self.tokens_s) - 1)

    @property
    def e2e_ms(self) -> float:
        return 1e3 * (self.tokens_s[-1] - self.due_s)


class Client:
    """Asks one model."""

    def __init__(self, running: RunningModel, seed: int) -> None:
        self.running = running
        self._rng = random.Random(seed)
        self._ids = itertools.count()

    async def ask(self, num_prompt_tokens: int, num_output_tokens: int, due_s: float | None = None) -> Call:
        call = Call(time.perf_counter() if due_s is None else due_s)
        request = Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=tuple([self._rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_prompt_tokens)]),
            sampling=SamplingParams(max_tokens=num_output_tokens, temperature=0.0),
            arrival_ns=self.running.clock.now_ns(),
        )
        with self.running.bridge.open([request]) as stream:
            while chunks := await stream.next_chunks():
                now_s = time.perf_counter()
                call.tokens_s += [now_s] * sum(len(chunk.token_ids) for chunk in chunks)
        return call

    async def keep_full(self, num_rows: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Keep `num_rows` requests on the way until this is cancelled. Their lengths differ, so they do not end together."""

        async def one_after_the_other() -> None:
            while True:
                await self.ask(num_prompt_tokens, self._rng.randint(num_output_tokens // 2, num_output_tokens * 3 // 2))

        await asyncio.gather(*[one_after_the_other() for _ in range(num_rows)])

    async def chat(
        self, num_users: int, think_s: float, for_s: float, num_prompt_tokens: int, num_output_tokens: int
    ) -> list[Call]:
        """Users who read an answer for a random time, and then ask again."""
        calls: list[Call] = []
        end_s = time.perf_counter() + for_s

        async def use() -> None:
            while (due_s := time.perf_counter() + self._rng.expovariate(1 / think_s)) < end_s:
                await asyncio.sleep(due_s - time.perf_counter())
                calls.append(await self.ask(num_prompt_tokens, num_output_tokens, due_s))

        await asyncio.gather(*[use() for _ in range(num_users)])
        return calls


@dataclass(frozen=True, slots=True)
class Pair:
    """Models of one process: the first has users in `--beside`, the second full batches."""

    clients: Sequence[Client]
    resources: Resources

    def used_s(self) -> list[float]:
        """How long each has had the machine so far."""
        return [self.resources.machine_ns(client.running.name) / 1e9 for client in self.clients]


@contextmanager
def two_models(models: Sequence[str], shares: Sequence[float]) -> Iterator[Pair]:
    resources, clients = Resources(), []
    try:
        for number, (model, share) in enumerate(zip(models, shares, strict=True)):
            config = Config()
            config = replace(
                config,
                model=replace(config.model, model=model, served_model_names=(str(number),), max_model_len=2048),
                kv=replace(config.kv, prefix_caching=False, kv_cache_memory_bytes=512 << 20),
                sharing=replace(config.sharing, machine_share=share),
            )
            clients.append(Client(start_model(config, locate(config), resources), number))
        yield Pair(clients, resources)
    finally:
        for client in clients:
            client.running.close()


@contextmanager
def beside(*works: asyncio.Task[None]) -> Iterator[None]:
    """Cancels them at the end."""
    try:
        yield
    finally:
        for work in works:
            work.cancel()


def figures(calls: Sequence[Call]) -> dict[str, float]:
    """Milliseconds."""
    gaps_ms = [1e3 * (late - early) for call in calls for early, late in pairwise(call.tokens_s)]
    kinds: dict[str, Sequence[float]] = {
        "ttft": [call.ttft_ms for call in calls],
        "tpot": [call.tpot_ms for call in calls],
        "e2e": [call.e2e_ms for call in calls],
        "gap": gaps_ms,
    }
    return {
        f"{kind}_p{100 * share:.0f}": round(float(np.quantile(values, share)), 2)
        for kind, values in kinds.items()
        for share in (0.5, 0.99)
    }


async def measure_beside(pair: Pair, args: argparse.Namespace) -> dict[str, list[Call]]:
    """Users of the first model, in turn alone and beside a full batch of the second."""
    short, full = pair.clients
    found: dict[str, list[Call]] = {"alone": [], "beside": []}
    for _ in range(args.rounds):
        for name, calls in found.items():
            works = []
            if name == "beside":
                works = [asyncio.create_task(full.keep_full(args.rows, args.full_prompt, args.full_output))]
            with beside(*works):
                await asyncio.sleep(WARM_UP_S)
                calls += await short.chat(args.users, args.think, args.seconds, args.prompt, args.output)
            await asyncio.sleep(1.0)
    return found


async def measure_saturated(pair: Pair, args: argparse.Namespace) -> list[float]:
    """The seconds that each had the machine, while both have full batches."""
    works = [asyncio.create_task(client.keep_full(args.rows, args.full_prompt, args.full_output)) for client in pair.clients]
    with beside(*works):
        await asyncio.sleep(WARM_UP_S)
        before_s = pair.used_s()
        await asyncio.sleep(args.seconds)
        return [after - before for before, after in zip(before_s, pair.used_s(), strict=True)]


async def measure_alone(client: Client, args: argparse.Namespace) -> float:
    """Tokens a second of a full batch."""
    with beside(asyncio.create_task(client.keep_full(args.rows, args.full_prompt, args.full_output))):
        await asyncio.sleep(WARM_UP_S)
        before = client.running.metrics.num_generated_tokens
        await asyncio.sleep(args.seconds)
        num_tokens = client.running.metrics.num_generated_tokens - before
        return num_tokens / float(args.seconds)


def report_beside(args: argparse.Namespace) -> dict[str, object]:
    with two_models(args.models, (args.share, 1.0)) as pair:
        found = asyncio.run(measure_beside(pair, args))
    told = {name: figures(calls) for name, calls in found.items()}
    factors = {key: round(told["beside"][key] / told["alone"][key], 2) for key in told["alone"]}
    print(origin(f"{len(found['alone'])} and {len(found['beside'])} requests"))
    rows = [[key, told["alone"][key], told["beside"][key], factors[key]] for key in factors]
    print(table(["ms", "alone", "beside a full batch", "factor"], rows), flush=True)
    return {**told, "factor": factors}


def report_saturated(args: argparse.Namespace) -> dict[str, object]:
    shares, told = ((1.0, 1.0), (2.0, 1.0)), {}
    print(origin())
    rows = []
    for both in shares:
        with two_models(args.models, both) as pair:
            used_s = asyncio.run(measure_saturated(pair, args))
        name = f"{both[0]:g}:{both[1]:g}"
        off = used_s[0] / sum(used_s) / (both[0] / sum(both)) - 1
        told[name] = {
            "used_s": [round(one, 3) for one in used_s],
            "off": round(off, 4),
            "busy": round(sum(used_s) / args.seconds, 3),
        }
        rows.append([name, *(f"{one:.2f}" for one in used_s), f"{off:+.1%}", f"{sum(used_s) / args.seconds:.1%}"])
    print(table(["shares", "first, s", "second, s", "off its share", "machine in use"], rows), flush=True)
    return dict(told)


def report_alone(args: argparse.Namespace) -> dict[str, object]:
    with two_models(args.models[:1], (1.0,)) as pair:
        rate = asyncio.run(measure_alone(pair.clients[0], args))
    print(f"{args.models[0]}: {rate:.1f} tokens/s", flush=True)
    return {"tokens_per_s": round(rate, 1)}


def main() -> None:
    reports: dict[str, Callable[[argparse.Namespace], dict[str, object]]] = {
        "beside": report_beside,
        "saturated": report_saturated,
        "alone": report_alone,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in reports:
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name)
    parser.add_argument("--models", nargs=2, default=[DEFAULT_MODEL, DEFAULT_MODEL])
    parser.add_argument("--rows", type=int, default=32, help="requests of a full batch")
    parser.add_argument("--full-prompt", type=int, default=200, help="tokens of each")
    parser.add_argument("--full-output", type=int, default=200, help="tokens of each, in the mean")
    parser.add_argument("--users", type=int, default=2, help="of the first model in --beside, one request each at a time")
    parser.add_argument(
        "--think", type=float, default=1.0, help="seconds in the mean from an answer to the user's next request"
    )
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a user's request")
    parser.add_argument("--output", type=int, default=100, help="tokens of its answer")
    parser.add_argument("--share", type=float, default=1.0, help="of the first model, in --beside")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=2, help="of both phases of --beside")
    args = parser.parse_args()
    told = reports[args.what](args)
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "cpu": machine.cpu_name(), **vars(args), **told}))


if __name__ == "__main__":
    main()
