"""The rules of `penstock doctor`: what may be wrong with a server, how that shows, and what to change.

`Evidence.parts_s` has the total time of all requests by part. The rules run in the order of the table. Each one computes how
much of that time its cause cost. If this is at least `NAMED_SHARE` of the total, the cause is reported, and later rules do not
count the time again. Findings are ranked by the time that they cost, as in Oracle's ADDM.

To add a rule, append it to `RULES`. It reads an `Evidence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.config.units import figure
from penstock.lab.evidence import Evidence, Visit

NAMED_SHARE = 0.1
"""Least share of the requests' time that a cause must cost, or a setting must save, to be reported."""
LEAST_VISITS = 5
"""Least number of requests for a diagnosis."""
GREEDY_SHARE = 2 / 3
"""Share of the tokens above which one key has twice as many as all others."""
FULL = 0.9
"""A machine that computes for this share of the time counts as full."""


class Symptom(StrEnum):
    LATENCY = "costs latency"
    THROUGHPUT = "costs throughput"
    IDLE = "the machine idles while requests wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    name: str
    symptom: Symptom
    cause: str
    lost_s: Callable[[Evidence], float]
    """Time that the cause cost the requests."""
    of: tuple[str, ...] = ()
    """Parts of the requests' time that contain `lost_s`. Empty: the lost time is not in any part."""
    shows: Callable[[Evidence], str]
    """The evidence, with figures."""
    remedy: str
    change: Callable[[Evidence], Mapping[str, Any]] = field(default=lambda _: {})
    """Settings to simulate and to advise. None resets a setting to its default. Empty: it can't be simulated.
    `kv_blocks`: the size of the KV cache."""
    must_gain: bool = False
    """Drop the finding if the simulator predicts no gain."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Request times: the mean, the mean of the slowest tenth, and the longest gap between two tokens."""

    mean_s: float
    slowest_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction for a change."""

    before: RequestTimes
    after: RequestTimes

    @property
    def share(self) -> float:
        """The larger saved share: of the mean time, or of the slowest tenth's."""
        before, after = self.before, self.after
        return max(1 - after.mean_s / before.mean_s, 1 - after.slowest_s / before.slowest_s)

    @property
    def is_worth_it(self) -> bool:
        """Whether requests take less time, or the longest gap between two tokens is shorter, and the mean is hardly longer."""
        before, after = self.before, self.after
        has_shorter_gaps = after.gap_s <= (1 - NAMED_SHARE) * before.gap_s > 0
        return (self.share >= NAMED_SHARE or has_shorter_gaps) and after.mean_s <= (1 + NAMED_SHARE) * before.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    rule: Rule
    symptom: Symptom
    lost_s: float
    share: float
    """`lost_s` as a share of the time of all requests."""
    evidence: str
    change: Mapping[str, Any]
    """Settings to try, or empty."""
    gain: Prediction | None
    """None if nothing is advised, or the advice was not simulated."""


class Verdict(StrEnum):
    HEALTHY = "healthy"
    ILL = "ill"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    verdict: Verdict
    findings: Sequence[Finding]
    """The costliest first."""
    summary: str


Predict = Callable[[Mapping[str, Any]], Prediction | None]
"""Returns what a change of settings would gain, or None if that can't be simulated."""


def diagnose(evidence: Evidence, predict: Predict = lambda _: None) -> Diagnosis:
    if len(evidence.visits) < LEAST_VISITS:
        return _without_visits(evidence)
    total_s, left = evidence.total_s, dict(evidence.parts_s)
    findings: list[Finding] = []
    for rule in RULES:
        have_s = sum(left.get(part, 0.0) for part in rule.of)
        lost_s = min(rule.lost_s(evidence), have_s) if rule.of else rule.lost_s(evidence)
        if lost_s <= 0 or lost_s < NAMED_SHARE * total_s:
            continue
        asked = rule.change(evidence)
        change = {key: value for key, value in asked.items() if value is not None or key in evidence.settings}
        gain = predict(change) if change else None
        if rule.must_gain and gain is not None and gain.share < NAMED_SHARE:
            continue
        if gain is not None and not gain.is_worth_it:
            change, gain = {}, None
        for part in rule.of:
            left[part] = left.get(part, 0.0) * (1 - lost_s / have_s)
        is_busy = rule.symptom is Symptom.IDLE and evidence.busy >= FULL
        findings.append(
            Finding(
                rule=rule,
                symptom=Symptom.THROUGHPUT if is_busy else rule.symptom,
                lost_s=lost_s,
                share=min(1.0, lost_s / total_s),
                evidence=rule.shows(evidence),
                change=change,
                gain=gain,
            )
        )
    findings.sort(key=lambda one: -one.lost_s)
    summary, waits = _summary(evidence), {part: left_s for part, left_s in left.items() if part not in _USUAL}
    if findings:
        return Diagnosis(verdict=Verdict.ILL, findings=findings, summary=summary)
    if sum(waits.values()) > total_s / 2:
        summary += f" No rule explains the waits, most of them for {max(waits, key=lambda part: waits[part])}."
        return Diagnosis(verdict=Verdict.UNKNOWN, findings=(), summary=summary)
    return Diagnosis(verdict=Verdict.HEALTHY, findings=(), summary=summary)


def _without_visits(evidence: Evidence) -> Diagnosis:
    verdict = Verdict.UNKNOWN
    if evidence.num_background and not (evidence.num_ended or evidence.num_now or evidence.num_refused):
        verdict, why = Verdict.HEALTHY, f"Only background requests run, {evidence.num_background:.0f} now; nobody waits."
    elif evidence.num_calls > LEAST_VISITS:
        why = (
            f"{evidence.num_calls:.0f} requests ended or were refused, but the server explains only {len(evidence.visits)} "
            "to this key. Give the key that sent them (--api-key), or let the server explain some (--explained-requests)."
        )
        is_behind = evidence.largest_share > GREEDY_SHARE and evidence.largest_tenant != evidence.own_tenant
        if is_behind and (evidence.visits or evidence.num_now):  # a key that only watches is not behind
            why += f" The key {evidence.largest_tenant} had {evidence.largest_share:.0%} of the tokens."
    else:
        why = f"Requests seen: {len(evidence.visits)}, but {LEAST_VISITS} are needed. Ask again under load, or watch longer."
    return Diagnosis(verdict=verdict, findings=(), summary=why)


def _summary(evidence: Evidence) -> str:
    parts = evidence.parts_s
    total_s = max(evidence.total_s, 1e-9)
    prefill, decode = (parts.get(part, 0.0) / total_s for part in ("prefill", "decode"))
    return (
        f"{len(evidence.visits)} requests took {figure(total_s / len(evidence.visits), digits=2)} s each: "
        f"{prefill:.0%} to compute prompts, {decode:.0%} answers, {max(0.0, 1 - prefill - decode):.0%} waiting, "
        f"in batches of {evidence.mean_batch:.1f}. While it was watched, the machine computed {evidence.busy:.0%} of the time, "
        f"{evidence.answers_per_s:.0f} tokens a second."
    )


# Times that are more than sums of parts.


def _spent(*parts: str) -> Callable[[Evidence], float]:
    """Return a function for the time that requests spent in these parts."""
    return lambda evidence: sum(evidence.parts_s.get(part, 0.0) for part in parts)


def _share(evidence: Evidence, *parts: str) -> str:
    """Return how much of the requests' time was in these parts, in words."""
    time_s = _spent(*parts)(evidence)
    share = time_s / max(evidence.total_s, 1e-9)
    return f"{share:.0%} of the requests' time ({figure(time_s)} s of {figure(evidence.total_s)} s)"


_OF_BATCHES = (
    "preset",
    "batching",
    "batching_args",
    "batch_window",
    "max_batch_size",
    "preferred_batch_size",
    "length_buckets",
)
"""Settings that can turn continuous batching off."""
_COMPUTING = ("prefill", "decode")
_USUAL = (*_COMPUTING, "intake", "prompt", "prefix")
"""Parts that may be large on a healthy server: with a short answer, most of the time passes before the first token."""
_CROWDED = ("rows", "tokens", "memory", "order")
"""Reasons to wait while other requests run."""


def _wasted_s(evidence: Evidence, share: float) -> float:
    """Return the time that requests lose if this share of the machine's work is wasted: that share of their computing time, and
    also of their waiting time if the machine is full."""
    parts = (*_COMPUTING, *_CROWDED) if evidence.busy >= FULL else _COMPUTING
    return share * _spent(*parts)(evidence)


def _thrashed_s(evidence: Evidence) -> float:
    """Return the pauses of preempted requests, plus the steps that recompute tokens."""
    num_again = sum(one.num_resume_steps for one in evidence.visits)
    step_s = evidence.parts_s["prefill"] / max(1, sum(one.num_prefill_steps for one in evidence.visits))
    return evidence.parts_s["preempted"] + num_again * step_s


def _late_s(evidence: Evidence) -> float:
    """Return by how much steps with others' prompts exceeded the target. Steps in which a stream had no row count in full."""
    return sum(one.with_prompts_s - one.num_steps_with_prompts * evidence.target_s for one in evidence.visits)


def _chopped_s(evidence: Evidence) -> float:
    """Return the time that prompts would save with fewer steps, each as long as the target."""
    plain_s, target_s = evidence.plain_step_s, evidence.target_s
    saved_s = 0.0
    for one in evidence.visits:
        if one.num_prefill_steps:
            work_s = max(0.0, one.parts_s["prefill"] / one.num_prefill_steps - plain_s)
            needed = max(1.0, one.num_prefill_steps * work_s / (target_s - plain_s))
            saved_s += max(0.0, one.num_prefill_steps - needed) * plain_s
    return saved_s


def _prefix_s(*ends: str) -> Callable[[Evidence], float]:
    """Return a function for the time of prompts whose lookup in the prefix cache ended for one of these reasons."""
    return lambda evidence: sum(one.parts_s["prefill"] for one in evidence.visits if one.prefix_end in ends)


def _spared_s(evidence: Evidence) -> float:
    """Estimate how long the prefix hits would have taken to compute, at the mean time per computed prompt token."""
    found = sum(one.num_hit_tokens for one in evidence.visits)
    computed = sum(one.num_prompt_tokens - one.num_hit_tokens for one in evidence.visits)
    return found * evidence.parts_s.get("prefill", 0.0) / max(1, computed)


def _alike(one: Visit) -> float:
    """Return the share of a prompt's computed tokens that equal the cached prompt's after the first difference."""
    return one.num_same_after / max(1, one.num_prompt_tokens - one.num_hit_tokens)


def _alike_s(evidence: Evidence) -> float:
    return sum(one.parts_s["prefill"] * _alike(one) for one in evidence.visits if one.prefix_end == "differs")


def _is_endless(one: Visit, evidence: Evidence) -> bool:
    """Return whether an answer ended only because the context was full."""
    longest = evidence.capacity.get("model_len", 0)
    return one.finish_reason == "length" and 0 < longest <= one.num_prompt_tokens + one.num_answer_tokens + 1


def _endless_s(evidence: Evidence) -> float:
    return sum(one.parts_s["decode"] for one in evidence.visits if _is_endless(one, evidence))


def _endless(evidence: Evidence) -> str:
    count = sum(_is_endless(one, evidence) for one in evidence.visits)
    return (
        f"{count} of {len(evidence.visits)} answers ended only where the context was full, at "
        f"{evidence.capacity['model_len']} tokens, after {figure(_endless_s(evidence))} s of decoding."
    )


def _refused_s(evidence: Evidence) -> float:
    """Return the refused share of the calls, times the requests' time, as if a refused client waited as long as others."""
    return evidence.total_s * evidence.num_refused / max(1.0, evidence.num_calls)


def _rows(evidence: Evidence) -> int:
    return evidence.capacity.get("rows", 0)


RULES: tuple[Rule, ...] = (
    Rule(
        name="cold models",
        symptom=Symptom.IDLE,
        cause="Requests wait for their model to be loaded.",
        lost_s=_spent("model"),
        of=("model",),
        shows=lambda e: f"Loading took {_share(e, 'model')}.",
        remedy="Keep the model loaded (keep_loaded), or give the models more room (--memory).",
    ),
    Rule(
        name="slow grammars",
        symptom=Symptom.LATENCY,
        cause="Grammars take long to compile, or their masks are slow.",
        lost_s=_spent("grammar", "sat out"),
        of=("grammar", "sat out"),
        shows=lambda e: f"Grammars took {_share(e, 'grammar', 'sat out')}.",
        remedy="Send the same schema each time, so that it is cached, or simplify it.",
    ),
    Rule(
        name="cold adapters",
        symptom=Symptom.IDLE,
        cause="Requests wait for their adapter.",
        lost_s=_spent("adapter"),
        of=("adapter",),
        shows=lambda e: f"Adapters took {_share(e, 'adapter')}.",
        remedy="Keep more adapters in memory (--max-cpu-loras), and let more run at once (--max-loras).",
    ),
    Rule(
        name="slow tier",
        symptom=Symptom.IDLE,
        cause="Requests wait for keys and values from the tier below the KV cache.",
        lost_s=lambda e: _spent("loading")(e) if _spent("loading")(e) > _spared_s(e) else 0.0,
        of=("loading",),
        shows=lambda e: (
            f"Loading blocks took {_share(e, 'loading')}. Computing the cached tokens would have taken "
            f"{figure(_spared_s(e))} s."
        ),
        remedy="Put the file on a faster disk (--kv-disk-path), or do without (--kv-disk-size 0).",
    ),
    Rule(
        name="tier of no use",
        symptom=Symptom.LATENCY,
        cause="The tier below the KV cache has what prompts begin with, but computing is faster than its disk.",
        lost_s=lambda e: _wasted_s(e, e.declined * _spent("prefill")(e) / max(1e-9, _spent(*_COMPUTING)(e))),
        of=(*_COMPUTING, *_CROWDED),
        shows=lambda e: f"The tier has {e.declined:.0%} of what prompts computed, which took {_share(e, 'prefill')}.",
        remedy="Put the file on a faster disk (--kv-disk-path), or give the KV cache more memory (--kv-cache-memory).",
    ),
    Rule(
        name="batch window",
        symptom=Symptom.IDLE,
        cause="Requests wait for their batch to be complete, or for the one before it to end.",
        lost_s=_spent("gate"),
        of=("gate",),
        shows=lambda e: f"The gate took {_share(e, 'gate')}.",
        remedy="Batch continuously, or make the window shorter (--batch-window).",
        change=lambda _: dict.fromkeys(_OF_BATCHES),
    ),
    Rule(
        name="greedy key",
        symptom=Symptom.LATENCY,
        cause="One key takes twice as much of the machine as all others, and they wait behind it.",
        lost_s=lambda e: (
            _spent("rows", "tokens", "order")(e)
            if e.largest_share > GREEDY_SHARE and e.largest_tenant != e.own_tenant and e.settings.get("policy") != "fair"
            else 0.0
        ),
        of=("rows", "tokens", "order"),
        shows=lambda e: (
            f"{e.largest_tenant} had {e.largest_share:.0%} of the tokens; requests waited "
            f"{_share(e, 'rows', 'tokens', 'order')}."
        ),
        remedy="Let the keys share the machine evenly, or limit what one may have at once (--tenant-max-concurrent).",
        change=lambda _: {"policy": "fair"},
    ),
    Rule(
        name="order",
        symptom=Symptom.LATENCY,
        cause="The waiting order lets later requests go first, and earlier ones wait long.",
        lost_s=_spent("order"),
        of=("order",),
        shows=lambda e: (
            f"Waiting while later requests ran took {_share(e, 'order')}, with --policy {e.settings.get('policy', 'fcfs')}."
        ),
        remedy="Serve in order of arrival, or let waiting requests age (docs/orders.md).",
        change=lambda _: {"policy": "fcfs"},
    ),
    Rule(
        name="thrash",
        symptom=Symptom.THROUGHPUT,
        cause="Running requests are preempted for lack of memory, and compute their tokens again.",
        lost_s=_thrashed_s,
        of=("preempted", *_COMPUTING),
        shows=lambda e: (
            f"Pauses took {_share(e, 'preempted')}, and {sum(one.num_resume_steps for one in e.visits)} steps repeated tokens."
        ),
        remedy="Give the KV cache more memory (--kv-cache-memory), or run fewer requests at once (--max-num-seqs).",
        change=lambda e: {"kv_blocks": 2 * e.capacity.get("blocks", 0)},
    ),
    Rule(
        name="reserved memory",
        symptom=Symptom.THROUGHPUT,
        cause="Requests wait for memory that others reserved and do not use.",
        lost_s=lambda e: _spent("memory")(e) if e.kv_used < 0.5 else 0.0,
        of=("memory",),
        shows=lambda e: (
            f"Memory took {_share(e, 'memory')}, while the tokens of a batch filled {e.kv_used:.0%} of the KV cache."
        ),
        remedy="Reserve what answers need (--reserve watermark), and have clients send max_tokens.",
        change=lambda _: {"reserve": "watermark"},
    ),
    Rule(
        name="small KV cache",
        symptom=Symptom.THROUGHPUT,
        cause="Requests wait for memory: the KV cache is too small.",
        lost_s=_spent("memory"),
        of=("memory",),
        shows=lambda e: f"Memory took {_share(e, 'memory')}, and batches had {e.mean_batch:.1f} of {_rows(e)} rows.",
        remedy="Give the KV cache twice the memory (--kv-cache-memory), or store it in fewer bits (--kv-cache-dtype).",
        change=lambda e: {"kv_blocks": 2 * e.capacity.get("blocks", 0)},
        must_gain=True,
    ),
    Rule(
        name="few rows",
        symptom=Symptom.THROUGHPUT,
        cause="All rows are in use, so requests wait.",
        lost_s=_spent("rows"),
        of=("rows",),
        shows=lambda e: f"Waiting for a row took {_share(e, 'rows')}, with --max-num-seqs {_rows(e)}.",
        remedy="Let more requests run at once.",
        change=lambda e: {"max_num_seqs": max(2 * _rows(e), math.ceil(e.num_present))},
        must_gain=True,
    ),
    Rule(
        name="endless answers",
        symptom=Symptom.THROUGHPUT,
        cause="Answers go on until the context is full.",
        lost_s=_endless_s,
        of=("decode",),
        shows=_endless,
        remedy="Have clients send max_tokens, or shorten the context (--max-model-len).",
    ),
    Rule(
        name="other models",
        symptom=Symptom.LATENCY,
        cause="Another model of this server uses the machine.",
        lost_s=_spent("other models"),
        of=("other models", *_COMPUTING),
        shows=lambda e: f"Steps of other models took {_share(e, 'other models')}.",
        remedy="Give this model a larger share (machine_share), or serve the other one elsewhere.",
    ),
    Rule(
        name="background",
        symptom=Symptom.LATENCY,
        cause="Background (batch) requests slow down interactive ones.",
        lost_s=lambda e: _spent("background")(e) + (_wasted_s(e, e.background) if e.settings.get("background_share") else 0.0),
        of=("background", *_COMPUTING, *_CROWDED),
        shows=lambda e: (
            f"{e.background:.0%} of the computed positions were the background's, with --background-share "
            f"{e.settings.get('background_share', 0.0)}; steps of its own took {_share(e, 'background')}."
        ),
        remedy="Lower --background-share, or let batches run at night (--batch-hours).",
        change=lambda _: {"background_share": 0.0},
    ),
    Rule(
        name="noisy neighbour",
        symptom=Symptom.LATENCY,
        cause="Other processes use the CPUs.",
        lost_s=lambda e: _wasted_s(e, e.cpu_wait),
        of=(*_COMPUTING, *_CROWDED),
        shows=lambda e: f"For {e.cpu_wait:.0%} of the time in which the server's threads could run, others had the CPUs.",
        remedy="Move the other processes away, or give the server fewer --threads than there are CPUs.",
    ),
    Rule(
        name="long steps",
        symptom=Symptom.LATENCY,
        cause="Streams stall while a step computes much of others' prompts.",
        lost_s=_late_s,
        of=("decode",),
        shows=lambda e: (
            f"Steps with others' prompts took {figure(sum(one.with_prompts_s for one in e.visits))} s of the answers' "
            f"{figure(e.parts_s['decode'])} s, {figure(_late_s(e))} s more than with {e.target_s * 1e3:.0f} ms for each token, "
            f"which would suit this model. Steps without prompts took {e.plain_step_s * 1e3:.0f} ms."
        ),
        remedy="Let the prompts' part of a step follow from a target (--budget itl, --slo-itl).",
        change=lambda e: {"budget": "itl", "budget_args": None, "slo_itl": round(e.target_s, 3)},
    ),
    Rule(
        name="short steps",
        symptom=Symptom.LATENCY,
        cause="Prompts are computed in too many small pieces.",
        lost_s=_chopped_s,
        of=("prefill",),
        shows=lambda e: (
            f"A prompt took {sum(one.num_prefill_steps for one in e.visits) / len(e.visits):.0f} steps; fewer and longer ones, "
            f"of {e.target_s * 1e3:.0f} ms, would have saved {figure(_chopped_s(e))} s."
        ),
        remedy="Compute more of a prompt in a step.",
        change=lambda e: {
            "max_num_batched_tokens": max(512, e.capacity.get("step_tokens", 0)),
            "budget": "itl",
            "budget_args": None,
            "slo_itl": round(e.target_s, 3),
        },
    ),
    Rule(
        name="padding",
        symptom=Symptom.THROUGHPUT,
        cause="The machine computes padding.",
        lost_s=lambda e: _wasted_s(e, e.padding),
        of=(*_COMPUTING, *_CROWDED),
        shows=lambda e: f"{e.padding:.0%} of the computed positions were padding.",
        remedy="Batch continuously, or in buckets of closer lengths (--length-buckets).",
        change=lambda _: dict.fromkeys(_OF_BATCHES),
    ),
    Rule(
        name="prompts differ early",
        symptom=Symptom.LATENCY,
        cause="Prompts repeat earlier ones except for a few tokens near their beginning.",
        lost_s=_alike_s,
        of=("prefill",),
        shows=lambda e: (
            f"{sum(_alike(one) > 0.5 for one in e.visits)} of {len(e.visits)} prompts were mostly tokens that the cache has, "
            f"behind one that differs. Computing those took {figure(_alike_s(e))} s."
        ),
        remedy="Put what changes, such as a date or a name, at the end of the prompt.",
    ),
    Rule(
        name="answers differ",
        symptom=Symptom.LATENCY,
        cause="Clients send answers of a conversation back changed, so that the prefix cache ends there.",
        lost_s=_prefix_s("answer differs"),
        of=("prefill",),
        shows=lambda e: f"Computing these prompts took {figure(_prefix_s('answer differs')(e))} s of {figure(e.total_s)} s.",
        remedy="Send the answers back as they came, with their reasoning.",
    ),
    Rule(
        name="evicted prefixes",
        symptom=Symptom.LATENCY,
        cause="Prefixes are evicted before they come again.",
        lost_s=_prefix_s("evicted"),
        of=("prefill",),
        shows=lambda e: (
            f"Computing evicted prefixes again took at most {figure(_prefix_s('evicted')(e))} s of {figure(e.total_s)} s."
        ),
        remedy="Give the KV cache more memory (--kv-cache-memory), or a tier on a disk (--kv-disk-size).",
    ),
    Rule(
        name="slow readers",
        symptom=Symptom.LATENCY,
        cause="Clients read their streams slowly.",
        lost_s=lambda e: e.client_wait * e.total_s,
        shows=lambda e: f"Streams waited for their clients for {e.client_wait:.0%} of the time.",
        remedy="Look at the network and at the clients: the server is not the bottleneck.",
    ),
    Rule(
        name="refusals",
        symptom=Symptom.LATENCY,
        cause="Calls are refused: more come than the server admits, or refused clients do not wait for Retry-After.",
        lost_s=_refused_s,
        shows=lambda e: f"{e.num_refused:.0f} of {e.num_calls:.0f} calls were refused.",
        remedy="Have clients heed Retry-After, add servers (`penstock plan` says how many), or let more wait (--max-queue).",
    ),
    Rule(
        name="overload",
        symptom=Symptom.LATENCY,
        cause="More requests come than this machine can serve.",
        lost_s=lambda e: _spent(*_CROWDED)(e) if e.busy >= FULL else 0.0,
        of=_CROWDED,
        shows=lambda e: (
            f"The machine computed {e.busy:.0%} of the time, in batches of {e.mean_batch:.1f}, while waiting took "
            f"{_share(e, *_CROWDED)}."
        ),
        remedy="Add servers (`penstock plan` says how many), or refuse earlier (--slo-ttft).",
    ),
    Rule(
        name="intake",
        symptom=Symptom.LATENCY,
        cause="Requests wait long before they are queued: for their prompt's tokenization, or for the end of a step.",
        lost_s=lambda e: _spent("intake", "prompt")(e) - len(e.visits) * e.target_s,
        of=("intake", "prompt"),
        shows=lambda e: f"Before the queue requests spent {_share(e, 'intake', 'prompt')}.",
        remedy="Make steps (--slo-itl) and prompts shorter, or leave the HTTP process a CPU (--threads).",
    ),
)
"""Rules in the order in which they claim time: certain causes before their consequences."""
