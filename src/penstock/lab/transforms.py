"""Transforms of workloads: fewer or more jobs, other lengths, another speed, tenants, cancellations, conversations.

Each function returns a new workload and appends the change to its name. The same arguments give the same workload. "Roots"
are jobs without `after`: single requests and first turns of conversations. A later turn is kept if its root is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from operator import add
from random import Random

from penstock.lab.workload import NS_PER_S, Job, Workload, whole_ns
from penstock.types.errors import ConfigError, counted

# Fewer jobs, or more


def first(workload: Workload, count: int) -> Workload:
    _check_at_least_one("The number of requests", count)
    if count >= len(workload.jobs):
        return workload
    return _changed(workload, workload.jobs[:count], f"first {count}")


def every(workload: Workload, step: int) -> Workload:
    """Keep every `step`-th single request or conversation."""
    _check_at_least_one("The step", step)
    chosen = {root for nth, root in enumerate(_roots(workload)) if nth % step == 0}
    return _changed(workload, _kept(workload, chosen), f"every {step}th")


def cut(workload: Workload, count: int) -> list[Workload]:
    """Cut a workload into `count` slices with equally many single requests or conversations. Each slice begins at time 0.

    Raises ConfigError for fewer than two of them per slice.
    """
    roots = _roots(workload)
    _check_at_least_one("The number of slices", count)
    if len(roots) < 2 * count:
        raise ConfigError(
            f"{workload.name} has {counted(len(roots), 'request')}, too few for {counted(count, 'slice')}.",
            remedy="Take more requests, or fewer slices.",
        )
    bounds = [nth * len(roots) // count for nth in range(count + 1)]
    slices = []
    for nth, chosen in enumerate(roots[low:high] for low, high in pairwise(bounds)):
        begin_ns = min(workload.jobs[root].arrival_ns for root in chosen)
        jobs = [at_instants(job, partial(add, -begin_ns)) for job in _kept(workload, set(chosen))]
        slices.append(_changed(workload, jobs, f"slice {nth + 1} of {count}"))
    return slices


def repeat(workload: Workload, times: int) -> Workload:
    """Repeat a workload `times` times in a row, with one mean gap between repeats.

    Prefix blocks that several conversations share stay shared. Other blocks get new ids, or a cache would find them. A prompt
    with blocks of an answer continues that answer's conversation.
    """
    _check_at_least_one("The number of repeats", times)
    conversations: dict[int, int] = {}
    answered: dict[int, tuple[int, int]] = {}
    """Id of an answer's block -> the job's index, and how many of the block's tokens are the prompt's."""
    roots: list[int] = []
    for idx, job in enumerate(workload.jobs):
        equal = [(block, workload.prefix_block_tokens) for block in job.prefix] + [(other, num) for _, other, num in job.alike]
        continued = (answered[block][0] for block, num in equal if block in answered and num > answered[block][1])
        before = next(continued, job.after)
        roots.append(idx if before is None else roots[before])
        for nth, block in enumerate(job.answer):
            answered[block] = idx, 0 if nth else job.num_prompt_tokens % workload.prefix_block_tokens
        for block in (*job.prefix, *job.answer):
            if conversations.setdefault(block, roots[idx]) != roots[idx]:
                conversations[block] = -1
    num_blocks = 1 + max(conversations, default=0)

    def renamed(block: int, nth: int) -> int:
        return block if conversations.get(block, -1) < 0 else block + nth * num_blocks

    instants = [workload.jobs[root].arrival_ns for root in _roots(workload)]
    span_ns = max(instants) - min(instants)
    period_ns = span_ns + round(span_ns / (len(instants) - 1)) if span_ns else 0
    num_jobs = len(workload.jobs)
    jobs = [
        replace(
            at_instants(job, partial(add, nth * period_ns)),
            after=None if job.after is None else job.after + nth * num_jobs,
            prefix=tuple([renamed(block, nth) for block in job.prefix]),
            alike=tuple([(renamed(block, nth), renamed(other, nth), num) for block, other, num in job.alike]),
            answer=tuple([renamed(block, nth) for block in job.answer]),
        )
        for nth in range(times)
        for job in workload.jobs
    ]
    return _changed(workload, jobs, f"{times} times")


# Lengths


def divide_lengths(workload: Workload, divisor: int) -> Workload:
    """Make prompts and answers `divisor` times shorter, rounded down, at least 1 token.

    Prefix blocks become shorter, too, so that shared prefixes stay shared. `prompts` cuts texts later.
    """
    _check_at_least_one("The divisor of lengths", divisor)
    if divisor == 1:
        return workload
    if workload.prefix_block_tokens % divisor:
        raise ConfigError(
            f"Blocks of {workload.prefix_block_tokens} tokens can't be divided by {divisor}.",
            remedy=f"Divide lengths by a divisor of {workload.prefix_block_tokens}, so that shared blocks stay whole.",
        )
    divided = _with_lengths(workload, lambda num_tokens: num_tokens // divisor, lambda num_tokens: num_tokens // divisor)
    shorter = replace(workload, prefix_block_tokens=workload.prefix_block_tokens // divisor)
    jobs = [
        replace(
            _fitting_prefix(job, shorter.prefix_block_tokens),
            alike=tuple((block, other, num_tokens // divisor) for block, other, num_tokens in job.alike),
        )
        for job in divided
    ]
    return _changed(shorter, jobs, f"lengths / {divisor}")


def cap_lengths(workload: Workload, *, max_prompt_tokens: int | None = None, max_output_tokens: int | None = None) -> Workload:
    """Limit the tokens of prompts and answers. A conversation ends before its first later turn with too long a prompt.

    A prefix block that is cut is no longer shared.
    """
    if max_prompt_tokens is None and max_output_tokens is None:
        return workload
    words = []
    for noun, limit in (("prompts", max_prompt_tokens), ("answers", max_output_tokens)):
        if limit is not None:
            _check_at_least_one(f"The limit of {noun}", limit)
            words.append(f"{noun} <= {limit}")
    most_prompt, most_output = max_prompt_tokens or math.inf, max_output_tokens or math.inf
    cut = _with_lengths(
        workload, lambda num_tokens: int(min(num_tokens, most_prompt)), lambda num_tokens: int(min(num_tokens, most_output))
    )
    num_whole = [job.num_prompt_tokens // (workload.prefix_block_tokens or 1) for job in cut]
    jobs = [
        job if job.num_prompt_tokens == old.num_prompt_tokens else replace(job, prefix=job.prefix[:whole], answer=())
        for job, old, whole in zip(cut, workload.jobs, num_whole, strict=True)
    ]
    kept: set[int] = set()
    for idx, job in enumerate(jobs):
        if job.after is None or (job.after in kept and job.num_prompt_tokens <= most_prompt):
            kept.add(idx)
    return _changed(workload, _renumbered(jobs, kept), ", ".join(words))


# Time


def speed(workload: Workload, factor: float) -> Workload:
    """Divide all times by `factor`: arrivals, think times, deadlines, cancellations."""
    if not (factor > 0 and math.isfinite(factor)):
        raise ConfigError(f"The speed is {factor}.", remedy="Set it above 0; 2 is twice as fast, 0.5 half as fast.")
    if factor == 1:
        return workload
    jobs = [at_instants(job, lambda at_ns: whole_ns(at_ns / factor), thinks=True) for job in workload.jobs]
    return _changed(workload, jobs, f"speed {factor:g}")


def think(workload: Workload, mean_s: float, seed: int) -> Workload:
    if not (mean_s >= 0 and math.isfinite(mean_s)):
        raise ConfigError(f"The think time is {mean_s} s.", remedy="Set it to 0 or more.")
    rng = _rng("think", seed)
    jobs = [
        replace(job, arrival_ns=whole_ns(rng.expovariate(1.0) * mean_s * NS_PER_S)) if job.after is not None else job
        for job in workload.jobs
    ]
    return _changed(workload, jobs, f"think time {mean_s:g} s")


# Clients


def converse(workload: Workload, num_turns: int) -> Workload:
    """Chain successive jobs into conversations of `num_turns`.

    A job's prompt becomes the new message of a turn, sent when the turn before has ended. Raises ConfigError if the workload
    already has conversations.
    """
    _check_at_least_one("The number of turns", num_turns)
    if num_turns == 1:
        return workload
    if any(job.after is not None for job in workload.jobs):
        raise ConfigError(f"{workload.name} has conversations already.", remedy="Leave out the number of turns.")
    jobs: list[Job] = []
    for idx, job in enumerate(workload.jobs):
        if idx % num_turns:
            before = jobs[-1]
            full = before.num_prompt_tokens // (workload.prefix_block_tokens or 1)
            history = before.num_prompt_tokens + before.num_output_tokens
            jobs.append(
                replace(
                    job,
                    arrival_ns=0,
                    deadline_ns=None,
                    cancelled_ns=None,
                    after=idx - 1,
                    num_prompt_tokens=history + job.num_prompt_tokens,
                    prefix=before.prefix[:full],
                    answer=(),
                    prompt_token_ids=(),
                    tenant=before.tenant,
                )
            )
        else:
            jobs.append(job)
    return _changed(workload, jobs, f"conversations of {num_turns} turns")


def share_prefix(workload: Workload, num_tokens: int, num_groups: int, seed: int) -> Workload:
    """Put a shared prefix of `num_tokens` before each prompt: one for each group. A conversation is in a random group.

    Raises ConfigError if prompts already have shared blocks, texts or token ids.
    """
    _check_at_least_one("The length of a shared prefix", num_tokens)
    _check_at_least_one("The number of groups", num_groups)
    if workload.prefix_block_tokens or any(job.prompt is not None or job.prompt_token_ids for job in workload.jobs):
        raise ConfigError(f"{workload.name} already defines how its prompts begin.", remedy="Leave out the shared prefix.")
    rng = _rng("prefix", seed)
    jobs: list[Job] = []
    for job in workload.jobs:
        prefix = (rng.randrange(num_groups),) if job.after is None else jobs[job.after].prefix
        jobs.append(replace(job, num_prompt_tokens=job.num_prompt_tokens + num_tokens, prefix=prefix))
    words = f"prefix of {num_tokens} tokens in {counted(num_groups, 'group')}"
    return _changed(replace(workload, prefix_block_tokens=num_tokens), jobs, words)


def assign_tenants(workload: Workload, weights: Mapping[str, float], seed: int) -> Workload:
    if (
        not weights
        or not all(weight >= 0 and math.isfinite(weight) for weight in weights.values())
        or not sum(weights.values())
    ):
        raise ConfigError(
            f"The weights of tenants are {dict(weights)}.", remedy="Give each a weight of at least 0, and one above."
        )
    rng = _rng("tenants", seed)
    names, sums = list(weights), list(accumulate(weights.values()))
    tenants: list[str] = []
    for job in workload.jobs:
        tenants.append(rng.choices(names, cum_weights=sums)[0] if job.after is None else tenants[job.after])
    jobs = [replace(job, tenant=tenant) for job, tenant in zip(workload.jobs, tenants, strict=True)]
    shares = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    return _changed(workload, jobs, f"tenants by weight ({shares})")


def cancel(workload: Workload, share: float, seed: int) -> Workload:
    """Make the clients of a share of the jobs leave after a random part of the answer: at least 1 token, never all.

    The share is exact, rounded to whole jobs, if so many answers have several tokens. Answers of one token are never cancelled.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"The share of clients that go away is {share}.", remedy="Set it from 0 to 1, such as 0.03.")
    rng = _rng("cancel", seed)
    able = [idx for idx, job in enumerate(workload.jobs) if job.num_output_tokens > 1]
    chosen = set(rng.sample(able, min(len(able), round(share * len(workload.jobs)))))
    jobs = [
        replace(job, cancelled_after_tokens=rng.randint(1, job.num_output_tokens - 1)) if idx in chosen else job
        for idx, job in enumerate(workload.jobs)
    ]
    return _changed(workload, jobs, f"{share:.3g} of the clients go away")


# Helpers


def _changed(workload: Workload, jobs: Sequence[Job], words: str) -> Workload:
    return replace(workload, jobs=list(jobs), name=f"{workload.name}, {words}")


def _rng(purpose: str, seed: int) -> Random:
    return Random(f"{purpose} {seed}")  # noqa: S311  # repeatable on purpose


def _roots(workload: Workload) -> list[int]:
    return [idx for idx, job in enumerate(workload.jobs) if job.after is None]


def _kept(workload: Workload, roots: set[int]) -> list[Job]:
    kept = set(roots)
    for idx, job in enumerate(workload.jobs):
        if job.after in kept:
            kept.add(idx)
    return _renumbered(workload.jobs, kept)


def _renumbered(jobs: Sequence[Job], kept: set[int]) -> list[Job]:
    places = {idx: place for place, idx in enumerate(sorted(kept))}
    return [replace(jobs[idx], after=None if (before := jobs[idx].after) is None else places[before]) for idx in places]


def at_instants(job: Job, moved: Callable[[int], int], *, thinks: bool = False) -> Job:
    return replace(
        job,
        arrival_ns=moved(job.arrival_ns) if job.after is None or thinks else job.arrival_ns,
        deadline_ns=None if job.deadline_ns is None else moved(job.deadline_ns),
        cancelled_ns=None if job.cancelled_ns is None else moved(job.cancelled_ns),
    )


def _with_lengths(workload: Workload, new_prompt: Callable[[int], int], new_output: Callable[[int], int]) -> list[Job]:
    """Return the jobs with new lengths, at least 1. In a conversation, `new_prompt` changes the length of each new message."""
    jobs: list[Job] = []
    for old in workload.jobs:
        history = was_history = 0
        if old.after is not None:
            history = jobs[old.after].num_prompt_tokens + jobs[old.after].num_output_tokens
            was_history = workload.jobs[old.after].num_prompt_tokens + workload.jobs[old.after].num_output_tokens
        num_prompt_tokens = history + max(1, new_prompt(old.num_prompt_tokens - was_history))
        num_output_tokens = max(1, new_output(old.num_output_tokens))
        left_after = old.cancelled_after_tokens
        if left_after is not None:
            left_after = min(left_after, num_output_tokens - 1) or None
        jobs.append(
            replace(
                old,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                cancelled_after_tokens=left_after,
                prompt_token_ids=old.prompt_token_ids[:num_prompt_tokens],
            )
        )
    return jobs


def _fitting_prefix(job: Job, block_tokens: int) -> Job:
    return replace(job, prefix=job.prefix[: -(-job.num_prompt_tokens // block_tokens)]) if job.prefix else job


def _check_at_least_one(noun: str, number: int) -> None:
    if number < 1:
        raise ConfigError(f"{noun} is {number}.", remedy="Set it to 1 or more.")
