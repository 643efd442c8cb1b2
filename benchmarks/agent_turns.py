"""What does an agent's next turn cost beyond its new tokens? The time to its first token, alone and beside three others.

    python benchmarks/agent_turns.py                                             # Qwen2.5-Coder-1.5B, 20,000 tokens, 4 agents
    python benchmarks/agent_turns.py --model smollm2:135m --prompt-tokens 4000 --turns 6
    python benchmarks/agent_turns.py --model gemma3:270m --options '--chat-template gemma'
    python benchmarks/agent_turns.py --small --model smollm2:135m --prompt-tokens 2000 --turns 8 --kv-cache-memory 80MiB

A real server over HTTP, chats with streamed answers. All agents share a system prompt of nine tenths of the first prompt, as
instances of one program do. Each turn sends the whole history with `--new-tokens` more, and then a tool runs for
`--tool-seconds` on average.

The cost of a turn is the time in which the engine computes exactly its new tokens, at their place in the context, with nothing
else on the machine. It is measured while one agent works alone: the server's own time from the turn's first step to its first
token (`time_ms.prefill` of `GET /v1/requests`), multiplied by new tokens / computed tokens, in case more was computed than is
new. New tokens are those after the previous turn's prompt and answer.

`alone` is the client's time to the first token over that cost. `beside` is the same with three other agents; the cost then
includes what the server computed for them between the request and its first token: the overlapping share of their turns, and
the answer tokens that came meanwhile, at the time a token takes alone. No schedule can do that work in less time on the same
cores. Both cover turn two onwards: the median, the largest, and the share of turns within 1.2.

`--small` instead gives the same agents a cache too small for all, beside `--asides` one-off requests a second (subagents),
with `--kv-rest 0s` and with the default. It reports the share of the prompt tokens of turn two onwards that was found in the
cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from printed import origin, percent, table
from sessions import ServerSession, answered, serving
from workloads import read_tokenizer

from penstock.lab.prompts import write_prompts
from penstock.lab.records import Record
from penstock.lab.target import Endpoint, Target
from penstock.lab.transforms import think
from penstock.lab.workload import Job, Workload
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve

NUM_AGENTS = 4
GOAL = 1.2
SHARED = 0.9
"""Share of the first prompt that all agents have in common."""


def agents(args: argparse.Namespace, count: int, first_block: int) -> list[Job]:
    """`count` conversations; each begins with the shared tokens and with some of its own, which `first_block` numbers."""
    jobs: list[Job] = []
    own = round(args.prompt_tokens * (1 - SHARED))
    for agent in range(count):
        num_tokens = args.prompt_tokens
        for turn in range(args.turns):
            jobs.append(
                Job(
                    arrival_ns=0 if turn else round(agent * args.tool_seconds * 1e9 / count),
                    num_prompt_tokens=num_tokens,
                    num_output_tokens=args.answer_tokens,
                    after=len(jobs) - 1 if turn else None,
                    prefix=(*range(args.prompt_tokens // own - 1), first_block + agent),
                )
            )
            num_tokens += args.answer_tokens + args.new_tokens
    return jobs


def asides(args: argparse.Namespace) -> list[Job]:
    """Return one-off requests that last as long as the agents would if only their tools took time."""
    rng, at_s, jobs = Random(1), 0.0, list[Job]()
    while args.asides and (at_s := at_s + rng.expovariate(args.asides)) < args.turns * args.tool_seconds:
        jobs.append(Job(arrival_ns=round(at_s * 1e9), num_prompt_tokens=args.aside_tokens, num_output_tokens=8))
    return jobs


def texts(args: argparse.Namespace, jobs: Sequence[Job], seed: int) -> Workload:
    workload = Workload(name="agents", jobs=jobs, prefix_block_tokens=round(args.prompt_tokens * (1 - SHARED)))
    source = resolve(args.model, default_cache_dir())
    return think(write_prompts(workload, read_tokenizer(Path(source.path)), seed=seed), args.tool_seconds, seed)


def server(args: argparse.Namespace, *options: str) -> AbstractContextManager[ServerSession]:
    longest = args.prompt_tokens + args.turns * (args.answer_tokens + args.new_tokens) + 512
    sizes = ("--max-model-len", str(longest), "--kv-cache-memory", args.kv_cache_memory)
    return serving(args.model, *sizes, *args.options.split(), *options)


def play(session: ServerSession, workload: Workload) -> list[Record]:
    """Send the workload. Raises LoadError if a request fails."""
    return answered(workload, Target(url=session.url, model=session.model, endpoint=Endpoint.CHAT)).records


def prefills_s(url: str, count: int) -> list[float]:
    """Return the seconds the server took to compute the last requests' prompts, oldest first."""
    with urllib.request.urlopen(f"{url}/v1/requests?ended={count}", timeout=60) as answer:  # a server of our own
        told: list[dict[str, Any]] = json.load(answer)["data"]
    return [call["choices"][0]["time_ms"]["prefill"] / 1e3 for call in reversed(told)]


def ttft_s(record: Record) -> float:
    assert record.first_ns is not None, "it has ended well"
    return (record.first_ns - record.intended_ns) / 1e9


class Costs:
    """Costs of each turn, and of a token of an answer, as measured with one agent."""

    def __init__(self, records: Sequence[Record], prefill_s: Sequence[float]) -> None:
        self.turns_s = list(prefill_s)
        self.num_computed = [record.num_prompt_tokens - record.num_cached_tokens for record in records]
        self.num_new = list(self.num_computed)
        for turn in range(1, len(records)):
            before, record = records[turn - 1], records[turn]
            self.num_new[turn] = record.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens
            self.turns_s[turn] *= min(1.0, self.num_new[turn] / max(1, self.num_computed[turn]))
        gaps = [gap_ns / 1e9 for record in records for gap_ns in record.gaps_ns]
        self.token_s = statistics.median(gaps) if gaps else 0.0

    def beside_s(self, record: Record, others: Sequence[Record], num_turns: int) -> float:
        """Cost of what was computed between a request and its first token."""
        total_s = self.turns_s[record.index % num_turns]
        begin_ns, end_ns = record.intended_ns, record.first_ns or record.ended_ns
        for other in others:
            if other.index // num_turns == record.index // num_turns:
                continue
            first_ns = other.first_ns or other.ended_ns
            shared_ns = min(end_ns, first_ns) - max(begin_ns, other.intended_ns)
            if shared_ns > 0:
                total_s += self.turns_s[other.index % num_turns] * shared_ns / max(1, first_ns - other.intended_ns)
            times_ns = accumulate(other.gaps_ns, initial=first_ns)
            total_s += self.token_s * sum(begin_ns < at_ns <= end_ns for at_ns in times_ns)
        return total_s


def summary(ratios: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(ratios), 3),
        "largest": round(max(ratios), 3),
        "within_goal": round(sum(ratio <= GOAL for ratio in ratios) / len(ratios), 3),
    }


def measure(args: argparse.Namespace) -> dict[str, object]:
    with server(args) as session:
        first = play(session, texts(args, agents(args, 1, 1000), 1))
        costs = Costs(first, prefills_s(session.url, args.turns))
        records = play(session, texts(args, agents(args, args.agents, 2000), 2))
    later = [record for record in records if record.index % args.turns]
    alone = [ttft_s(record) / costs.turns_s[record.index] for record in first[1:]]
    beside = [ttft_s(record) / costs.beside_s(record, records, args.turns) for record in later]
    again = [computed / new for computed, new in zip(costs.num_computed[1:], costs.num_new[1:], strict=True)]
    report: dict[str, object] = {"alone": summary(alone), "beside": summary(beside), "computed_per_new": summary(again)}
    report |= {"new_tokens": costs.num_new[1:], "cost_s": [round(cost_s, 3) for cost_s in costs.turns_s]}
    report |= {"ttft_alone_s": [round(ttft_s(record), 3) for record in first]}
    report |= {"ttft_beside_s": [round(ttft_s(record), 3) for record in later]}
    print(origin())
    rows = [
        [name, *shares.values()] for name, shares in (("alone", summary(alone)), (f"{args.agents} agents", summary(beside)))
    ]
    print(table(["time to first token / cost of the work", "median", "largest", f"share within {GOAL}"], rows))
    return report


def measure_small(args: argparse.Namespace) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, options in (("--kv-rest 0s", ("--kv-rest", "0s")), ("default", ())):
        with server(args, *options) as session:
            turns = agents(args, args.agents, 2000)
            records = play(session, texts(args, [*turns, *asides(args)], 2))
        later = [record for record in records if record.index < len(turns) and record.index % args.turns]
        found[name] = round(
            sum(record.num_cached_tokens for record in later) / sum(record.num_prompt_tokens for record in later), 4
        )
        print(name, percent(float(str(found[name]))), flush=True)
    return {"found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder:1.5b")
    parser.add_argument("--agents", type=int, default=NUM_AGENTS)
    parser.add_argument("--prompt-tokens", type=int, default=20_000, help="of the first turn")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=100, help="of each later turn")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--tool-seconds", type=float, default=10.0, help="mean between two turns")
    parser.add_argument("--kv-cache-memory", default="1536MiB")
    parser.add_argument("--options", default="", help="more options of the server, in one word")
    parser.add_argument("--small", action="store_true", help="compare --kv-rest with a cache that is too small")
    parser.add_argument("--asides", type=float, default=0.5, help="one-off requests a second, with --small")
    parser.add_argument("--aside-tokens", type=int, default=1000)
    args = parser.parse_args()
    report = measure_small(args) if args.small else measure(args)
    print(json.dumps({"benchmark": "agent_turns", **vars(args), **report}))


if __name__ == "__main__":
    main()
