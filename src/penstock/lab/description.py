"""Summary of a workload, as data and as text: counts, lengths, arrival rate, shared prefixes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.lab.arrivals import mean_rate
from penstock.lab.workload import NS_PER_S, Workload
from penstock.types.errors import counted


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    name: str
    num_requests: int
    num_conversations: int
    num_follow_ups: int
    prompt_tokens: Spread
    output_tokens: Spread
    total_prompt_tokens: int
    total_output_tokens: int
    duration_s: float
    rate: float | None
    """Mean arrivals per second, or None if all come at once."""
    gap_cv: float | None
    """Standard deviation / mean of the gaps between arrivals. None for fewer than two gaps, or all at once."""
    prefix_share: float
    """Share of the prompt tokens that a perfect prefix cache would find: full blocks of earlier prompts, and earlier turns."""
    num_cancelled: int
    requests_by_tenant: Mapping[str, int]
    tokens_by_tenant: Mapping[str, int]

    def text(self) -> str:
        lines = [
            self.name,
            f"  {counted(self.num_requests, 'request', spec=',')}, {self.total_prompt_tokens:,} prompt tokens, "
            f"{self.total_output_tokens:,} output tokens",
            f"  {'tokens':8s}{'mean':>9s}{'p50':>9s}{'p90':>9s}{'p99':>9s}{'max':>9s}",
            f"  {'prompt':8s}{_row(self.prompt_tokens)}",
            f"  {'output':8s}{_row(self.output_tokens)}",
            f"  arrivals: {self._pace()}",
        ]
        if self.num_follow_ups:
            conversations = counted(self.num_conversations, "conversation", spec=",")
            turns = counted(self.num_follow_ups, "follow-up turn", spec=",")
            lines.append(f"  {conversations} of more than one turn, with {turns}")
        if self.prefix_share:
            lines.append(f"  a perfect prefix cache would find {self.prefix_share:.1%} of the prompts' tokens")
        if self.num_cancelled:
            lines.append(f"  {counted(self.num_cancelled, 'client')} will go away before the end of the answer")
        if len(self.requests_by_tenant) > 1:
            lines.append(f"  tenants: {self._tenants()}")
        return "\n".join(lines)

    def _pace(self) -> str:
        if self.rate is None:
            return "all at once"
        cv = "" if self.gap_cv is None else f", gaps with CV {self.gap_cv:.2f}"
        return f"{self.rate:.4g} per second for {self.duration_s:,.1f} s{cv}"

    def _tenants(self) -> str:
        total = sum(self.tokens_by_tenant.values())
        largest = sorted(self.tokens_by_tenant.items(), key=lambda item: (-item[1], item[0]))
        shown = [
            f"{name or '(none)'} has {self.requests_by_tenant[name]:,} requests and {tokens / total:.0%} of the tokens"
            for name, tokens in largest[:8]
        ]
        num_more = len(largest) - len(shown)
        return "; ".join(shown) + (f"; {num_more} more" if num_more else "")


def describe(workload: Workload) -> Description:
    jobs = workload.jobs
    if not jobs:
        raise ValueError(f"{workload.name} has no jobs")
    instants = [job.arrival_ns for job in jobs if job.after is None]
    continued = {job.after for job in jobs if job.after is not None}
    requests_by_tenant = Counter(job.tenant for job in jobs)
    tokens_by_tenant: Counter[str] = Counter()
    for job in jobs:
        tokens_by_tenant[job.tenant] += job.num_prompt_tokens + job.num_output_tokens
    return Description(
        name=workload.name,
        num_requests=len(jobs),
        num_conversations=sum(idx in continued for idx, job in enumerate(jobs) if job.after is None),
        num_follow_ups=sum(job.after is not None for job in jobs),
        prompt_tokens=_spread([job.num_prompt_tokens for job in jobs]),
        output_tokens=_spread([job.num_output_tokens for job in jobs]),
        total_prompt_tokens=sum(job.num_prompt_tokens for job in jobs),
        total_output_tokens=sum(job.num_output_tokens for job in jobs),
        duration_s=max(instants) / NS_PER_S,
        rate=mean_rate(workload),
        gap_cv=_gap_cv(instants),
        prefix_share=_num_found(workload) / sum(job.num_prompt_tokens for job in jobs),
        num_cancelled=sum(job.cancelled_ns is not None or job.cancelled_after_tokens is not None for job in jobs),
        requests_by_tenant=dict(sorted(requests_by_tenant.items())),
        tokens_by_tenant=dict(sorted(tokens_by_tenant.items())),
    )


def _spread(values: Sequence[int]) -> Spread:
    ordered = sorted(values)
    p50, p90, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99))
    return Spread(statistics.fmean(ordered), p50, p90, p99, ordered[-1])


def _gap_cv(instants: Sequence[int]) -> float | None:
    gaps = [later - earlier for earlier, later in pairwise(sorted(instants))]
    if len(gaps) < 2 or not any(gaps):
        return None
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def _num_found(workload: Workload) -> int:
    """Return how many prompt tokens of all jobs together a perfect prefix cache would find."""
    block_tokens = workload.prefix_block_tokens
    seen: set[int] = set()
    num_found = 0
    for job in workload.jobs:
        history = 0
        if job.after is not None:
            before = workload.jobs[job.after]
            history = before.num_prompt_tokens + before.num_output_tokens
        num_blocks = 0
        if block_tokens:
            for block in job.prefix[: job.num_prompt_tokens // block_tokens]:
                if block not in seen:
                    break
                num_blocks += 1
        seen.update(job.prefix)
        num_found += max(history, num_blocks * block_tokens)
    return num_found


def _row(spread: Spread) -> str:
    return f"{spread.mean:9,.0f}{spread.p50:9,d}{spread.p90:9,d}{spread.p99:9,d}{spread.max:9,d}"
