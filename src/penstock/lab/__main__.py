"""What would a policy change? Simulates a load under the default policies, then with one that is named.

    python -m penstock.lab --policy ./my_policy.py:ShortPromptsFirst --policy-args '{delay_per_token_ns = 2_000_000}'

The first policy of the call makes the difference: all others that it names, and all other options, hold on both sides.

The real scheduler runs over modelled steps and a virtual clock: the figures repeat to the last digit, and take seconds. Nine of
ten prompts are short (20 to 200 tokens), the others long (600 to 1,500); answers have 10 to 200 tokens; tenant a sends seven of
ten requests, tenants b, c and d one each; half of the requests have priority 1, the others 0. `--load` is relative to the rate
at which the default side serves the same requests when all are there at once; `--blocks` are KV blocks of 16 tokens.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import ne
from random import Random
from typing import Any

from penstock.lab.arrivals import NS_PER_S, poisson
from penstock.lab.simulation import Outcome, Simulation
from penstock.lab.workload import Job
from penstock.sched.policies.base import Policies
from penstock.sched.policies.own import SEAM_FLAGS
from penstock.sched.policies.presets import make_policies
from penstock.types.errors import PenstockError
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats

FLAGS = {"preset": "--preset"} | {seam: flag for seam, flag in SEAM_FLAGS.items() if seam != "eviction"}
"""Seam (or preset) -> the flag that names its policy. Evictions are left out: nothing is cached here."""
SHORT_TOKENS, LONG_TOKENS, ANSWER_TOKENS = (20, 200), (600, 1500), (10, 200)
TENANTS, TENANT_WEIGHTS = ("a", "b", "c", "d"), (7, 1, 1, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    given = {key: value for key, value in vars(options).items() if key.removesuffix("_args") in FLAGS}
    first = next(iter(given), "preset").removesuffix("_args")
    others = {key: value for key, value in given.items() if key.removesuffix("_args") != first}
    capacity = Capacity(options.blocks + 1, 16, max_rows=options.rows, max_step_tokens=512, max_model_len=4096)
    try:
        policies_of(given)
        jobs = make_jobs(options.requests, Random(options.seed))  # noqa: S311  # repeatable on purpose
        default, named = (
            Simulation(capacity=capacity, make_policies=partial(policies_of, some), max_tokens=200) for some in (others, given)
        )
        at_once = default.run(jobs)
        rate = options.load * len(jobs) / (at_once.duration_ns / NS_PER_S)
        arrivals = poisson(Random(options.seed), len(jobs), rate)  # noqa: S311  # as above
        jobs = [replace(job, arrival_ns=at_ns) for job, at_ns in zip(jobs, arrivals, strict=True)]
        sides = {"default": default.run(jobs), "named": named.run(jobs)}
        print(f"{len(jobs)} requests, {rate:.2f} per second, {options.rows} rows, {options.blocks} KV blocks")
        before, after = ([(one.first_token_ns, one.ended_ns) for one in side.ended] for side in sides.values())
        num_moved = sum(map(ne, before, after))
        print(f"By {FLAGS[first]} alone, {num_moved} requests get their first or last token at another time.")
        if first == "victim" and not sum(one.num_preemptions for side in sides.values() for one in side.ended):
            print("No victim was asked for. Less memory makes preemptions: --victim ... --reserve chunk --blocks 300")
        for title, outcome in sides.items():
            print(report(title, outcome))
    except PenstockError as error:
        raise SystemExit(f"error: {error}") from error


def policies_of(given: Mapping[str, Any]) -> Policies:
    """`given`: seam -> name, and seam_args -> its arguments."""
    names = {key: value for key, value in given.items() if key in FLAGS}
    written = {key.removesuffix("_args"): value for key, value in given.items() if key not in FLAGS}
    return make_policies(**names, arguments=written)


def make_jobs(count: int, rng: Random) -> list[Job]:
    """Requests that all come at once."""
    return [
        Job(
            arrival_ns=0,
            num_prompt_tokens=rng.randint(*(SHORT_TOKENS if rng.random() < 0.9 else LONG_TOKENS)),
            num_output_tokens=rng.randint(*ANSWER_TOKENS),
            tenant=rng.choices(TENANTS, TENANT_WEIGHTS)[0],
            priority=rng.randint(0, 1),
        )
        for _ in range(count)
    ]


def report(title: str, outcome: Outcome) -> str:
    """Seconds from arrival to the first token, for all requests and for some, and milliseconds between two tokens."""
    ended = outcome.ended
    kinds = {
        "all": ended,
        "short prompts": [one for one in ended if one.num_prompt_tokens <= SHORT_TOKENS[1]],
        "long prompts": [one for one in ended if one.num_prompt_tokens > SHORT_TOKENS[1]],
        f"tenant {TENANTS[0]}": [one for one in ended if one.tenant == TENANTS[0]],
        "other tenants": [one for one in ended if one.tenant != TENANTS[0]],
    }
    num_tokens = sum(one.num_generated_tokens for one in ended)
    gaps_ms = [
        (one.ended_ns - one.first_token_ns) / (one.num_generated_tokens - 1) / 1e6
        for one in ended
        if one.first_token_ns is not None and one.num_generated_tokens > 1
    ]
    lines = [f"\n{title:16s} TTFT  p50       p90       p99 s"]
    lines += [f"  {kind:16s} {_quantiles([_ttft_s(one) for one in some])}" for kind, some in kinds.items()]
    lines.append(f"  {'ms per token':16s} {_quantiles(gaps_ms)}")
    lines.append(
        f"  {num_tokens * NS_PER_S / outcome.duration_ns:.1f} tokens per second in {outcome.num_steps} steps, "
        f"{sum(one.num_preemptions for one in ended)} preemptions"
    )
    if num_refused := sum(one.finish_reason is FinishReason.REJECTED for one in ended):
        lines.append(f"  {num_refused} requests were refused: they could never fit; raise --blocks")
    return "\n".join(lines)


def _ttft_s(stats: RequestStats) -> float:
    first_ns = stats.ended_ns if stats.first_token_ns is None else stats.first_token_ns
    return (first_ns - stats.arrival_ns) / NS_PER_S


def _quantiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return "  ".join(f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:8.2f}" for share in (0.5, 0.9, 0.99))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    absent: Any = argparse.SUPPRESS  # so that the options are in the order of the call
    for seam, flag in FLAGS.items():
        words = "as of penstock serve: a name" + (", module:Class or ./file.py:Class" if seam in SEAM_FLAGS else "")
        parser.add_argument(flag, dest=seam, default=absent, metavar="NAME", help=words)
        if seam in SEAM_FLAGS:
            parser.add_argument(
                f"{flag}-args", dest=f"{seam}_args", default=absent, type=_table, metavar="TABLE", help="as {weight = 2}"
            )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.95)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def _table(text: str) -> dict[str, object]:
    try:
        table: dict[str, object] = tomllib.loads(f"table = {text}")["table"]
    except tomllib.TOMLDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an inline table of TOML: {error}") from None
    return table


if __name__ == "__main__":
    main()
