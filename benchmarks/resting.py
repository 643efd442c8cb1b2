"""How much does `--kv-rest` gain for conversations, and cost others? The real scheduler and KV manager, modelled steps.

    python benchmarks/resting.py                               # three minutes
    python benchmarks/resting.py --write agents.jsonl          # for penstock simulate

Four agents work beside a stream of subagents. An agent's first prompt has 20,000 tokens, each of its 20 turns 600 more and an
answer of 150; between two turns a tool runs for a mean of 5 s. A subagent is asked once: a system prompt of 2,000 tokens that
all subagents share, 4,000 tokens of its own, and an answer of 150; three arrive per second. A second workload has chats of two
turns, 8 s apart on average, one a second, beside two requests a second with one of 30 system prompts of 2,000 tokens. A third
is Mooncake's trace, as in `prefix_cache.py`. Lengths are divided by 8.

Reports the share of prompt tokens found, by pool size and `--kv-rest`: for turn two onwards, for one-off
requests, and for all. Time is virtual, so the figures are exact and repeatable. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prefix_cache import num_cached_blocks, read_mooncake
from printed import origin, percent, table
from workloads import DEFAULT_TRACES

from penstock.lab.simulation import Simulation
from penstock.lab.workload import Job, Workload
from penstock.sched.policies.presets import make_policies
from penstock.types.plan import Capacity

SCALE = 8
BLOCK_SIZE = 16
NUM_AGENTS, NUM_TURNS = 4, 20
FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 20_000 // SCALE, 600 // SCALE, 150 // SCALE
TOOL_S = 5.0
SYSTEM_TOKENS, ASIDE_TOKENS = 2_000 // SCALE, 4_000 // SCALE
SUBAGENTS_PER_S = 3.0
CHATS_PER_S, CHAT_S, CHAT_TOKENS, CHAT_ANSWER_TOKENS = 1.0, 8.0, 100, 40
TEMPLATES_PER_S, NUM_TEMPLATES, TEMPLATE_S = 2.0, 30, 240.0
RESTS_S = (0, 10, 60)
AGENT_POOLS, CHAT_POOLS, TRACE_POOLS = (800, 1_000, 1_400), (400, 600, 1_000), (1_024, 4_096, 16_384)
"""Blocks; the four agents end up with 1,200 of their own."""


def agents(rng: random.Random) -> list[Job]:
    jobs: list[Job] = []
    for agent in range(NUM_AGENTS):
        num_tokens = FIRST_TOKENS
        for turn in range(NUM_TURNS):
            pause_s = rng.expovariate(1 / TOOL_S) if turn else agent * TOOL_S
            jobs.append(
                Job(
                    arrival_ns=round(pause_s * 1e9),
                    num_prompt_tokens=num_tokens,
                    num_output_tokens=ANSWER_TOKENS,
                    after=len(jobs) - 1 if turn else None,
                )
            )
            num_tokens += ANSWER_TOKENS + NEW_TOKENS
    return jobs


def subagents(rng: random.Random, until_s: float) -> list[Job]:
    jobs: list[Job] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(SUBAGENTS_PER_S)) < until_s:
        jobs.append(
            Job(
                arrival_ns=round(at_s * 1e9),
                num_prompt_tokens=SYSTEM_TOKENS + ASIDE_TOKENS,
                num_output_tokens=ANSWER_TOKENS,
                prefix=(0,),
            )
        )
    return jobs


def chats(rng: random.Random) -> list[Job]:
    """Two turns each, and requests that begin with one of many system prompts."""
    jobs: list[Job] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(CHATS_PER_S)) < TEMPLATE_S:
        first = Job(arrival_ns=round(at_s * 1e9), num_prompt_tokens=CHAT_TOKENS, num_output_tokens=CHAT_ANSWER_TOKENS)
        pause_ns, num_tokens = round(rng.expovariate(1 / CHAT_S) * 1e9), 2 * CHAT_TOKENS + CHAT_ANSWER_TOKENS
        jobs += [first, replace(first, arrival_ns=pause_ns, num_prompt_tokens=num_tokens, after=len(jobs))]
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(TEMPLATES_PER_S)) < TEMPLATE_S:
        template = rng.randrange(NUM_TEMPLATES)
        job = Job(arrival_ns=round(at_s * 1e9), num_prompt_tokens=SYSTEM_TOKENS + 60, num_output_tokens=20, prefix=(template,))
        jobs.append(job)
    return jobs


def found(jobs: Sequence[Job], num_blocks: int, rest_s: float) -> dict[str, float]:
    """Shares of prompt tokens found, by kind of request."""
    capacity = Capacity(1 + num_blocks, BLOCK_SIZE, max_rows=16, max_step_tokens=512, max_model_len=8192)
    settings = {"eviction": {"rest_ns": round(rest_s * 1e9)}}
    simulation = Simulation(capacity=capacity, make_policies=lambda: make_policies(settings=settings), max_tokens=None)
    ended = simulation.run(Workload(name="agents", jobs=jobs, prefix_block_tokens=SYSTEM_TOKENS)).ended
    kinds = {
        "turns": [job.after is not None for job in jobs],
        "subagents": [bool(job.prefix) for job in jobs],
        "all": [True] * len(jobs),
    }
    return {
        kind: sum(stats.num_cached_tokens for stats, is_of in zip(ended, of_kind, strict=True) if is_of)
        / max(1, sum(stats.num_prompt_tokens for stats, is_of in zip(ended, of_kind, strict=True) if is_of))
        for kind, of_kind in kinds.items()
    }


def write(path: Path, jobs: Sequence[Job]) -> None:
    """As a file of conversations that `penstock simulate` reads; a subagent is a conversation of one turn."""
    conversations: dict[int, list[dict[str, str]]] = {}
    firsts: list[int] = []
    for idx, job in enumerate(jobs):
        firsts.append(idx if job.after is None else firsts[job.after])
        before = 0 if job.after is None else jobs[job.after].num_prompt_tokens + ANSWER_TOKENS
        told = conversations.setdefault(firsts[idx], [])
        told += [
            {"from": "human", "value": "word" * (job.num_prompt_tokens - before)},
            {"from": "gpt", "value": "word" * job.num_output_tokens},
        ]
    path.write_text("".join(json.dumps({"conversations": told}) + "\n" for told in conversations.values()), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the requests of agents and subagents to this file, and stop")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    args = parser.parse_args()
    rng = random.Random(0)
    turns = agents(rng)
    jobs = [*turns, *subagents(rng, until_s=NUM_TURNS * TOOL_S)]
    if args.write is not None:
        write(args.write, jobs)
        return
    print(origin())
    report: dict[str, object] = {"benchmark": "resting"}
    rows: list[list[str]] = []
    for name, some, pools in (
        ("agents, subagents", jobs, AGENT_POOLS),
        ("chats, templates", chats(random.Random(1)), CHAT_POOLS),
    ):
        for num_blocks in pools:
            shares = {rest_s: found(some, num_blocks, rest_s) for rest_s in RESTS_S}
            report[f"{name}, {num_blocks}"] = shares
            cells = [" / ".join(percent(share) for share in shares[rest_s].values()) for rest_s in RESTS_S]
            rows.append([name, f"{num_blocks:,}", *cells])
    prompts = read_mooncake(args.traces)
    num_asked = sum(len(prompt.blocks) for prompt in prompts)
    for num_blocks in TRACE_POOLS:
        parts = {
            rest_s: sum(num_cached_blocks([prompt.job() for prompt in prompts], num_blocks, "lru", rest_s=rest_s)) / num_asked
            for rest_s in RESTS_S
        }
        report[f"Mooncake, {num_blocks}"] = parts
        rows.append(["Mooncake's trace", f"{num_blocks:,}", *(f"{100 * parts[rest_s]:.1f} %" for rest_s in RESTS_S)])
    print(table(["", "blocks", *(f"`--kv-rest {rest_s}s`" for rest_s in RESTS_S)], rows))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
