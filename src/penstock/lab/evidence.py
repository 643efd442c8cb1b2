"""The evidence of `penstock doctor`: where the time of recent requests went, and what the machine did meanwhile.

It comes from two scrapes of `/metrics`, the explanations in `/v1/requests`, and settings, which anyone with the server's key
can read. `replayed.py` makes the same pages from a recording.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TARGET_S = 0.05
"""Default target of the scheduler for the time between two tokens, or twice a step without prompts if longer."""

FOR_LOAD = ("queue_full", "queue_delay", "kv_headroom")
"""Refusal reasons (`RejectReason`) that more servers would avoid. Limits of single keys refuse on purpose."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def series_of(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield (name, labels, value) of each series in a page of `/metrics`.

    Raises ValueError if this is not Prometheus' text format.
    """
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            yield name, {key: _ESCAPED.sub(_unescaped, found) for key, found in _LABEL.findall(labels)}, float(value)


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


class Scrape:
    """One scrape of `/metrics`: the series of a model and of the whole server."""

    def __init__(self, text: str, model: str) -> None:
        """Raises ValueError if this is not Prometheus' text format."""
        self._series: list[tuple[str, dict[str, str], float]] = []
        for name, told, value in series_of(text):
            if told.pop("model", model) == model:
                self._series.append((name.removeprefix("penstock_"), told, value))

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series with these labels."""
        return sum(self.by(name, **labels).values())

    def by(self, name: str, label: str = "", **labels: str) -> dict[str, float]:
        """Return the sums of a metric's series by one label."""
        return _sums(
            (told.get(label, ""), value)
            for known, told, value in self._series
            if known == name and labels.items() <= told.items()
        )


def _sums(entries: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for name, value in entries:
        sums[name] += value
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of a client as the server explains it. Times are in seconds."""

    age_s: float
    """Time since its arrival."""
    total_s: float
    parts_s: Mapping[str, float]
    """Time by part. `rows`, `memory` and so on: waiting in the queue for that resource. `prefill`, `decode`: computing.
    `preempted`: pauses during either. `sat out`, `background`, `other models`: pauses during decoding."""
    num_prompt_tokens: int
    num_hit_tokens: int
    num_answer_tokens: int
    num_prefill_steps: int
    num_steps: int
    """Steps of the answer."""
    num_steps_with_prompts: int
    """How many of `num_steps` also computed other requests' prompts."""
    with_prompts_s: float
    """Time of those steps, and of steps that computed only other requests' prompts meanwhile."""
    num_resume_steps: int
    num_accepted: int
    """Tokens of the answer that were guessed right."""
    mean_batch: float
    prefix_end: str
    num_same_after: int
    finish_reason: str | None

    @classmethod
    def of(cls, choice: Mapping[str, Any], age_s: float) -> Visit:
        """Read one choice of an explanation. Raises LookupError, TypeError or ValueError if malformed."""
        time_ms, decode, prefix = choice["time_ms"], choice["decode"], choice["prefix"] or {}
        pauses, first_ms = choice["preemptions"], time_ms["queue"] + time_ms["prefill"]
        # A pause may begin with the first token, and by rounding seem to begin before it. So its middle decides.
        early_ms = sum(pause["waited_ms"] for pause in pauses if pause["after_ms"] + pause["waited_ms"] / 2 < first_ms)
        parts_ms = {
            **choice["waited"]["for_ms"],
            "preempted": sum(pause["waited_ms"] for pause in pauses),
            "sat out": choice["sat_out"]["ms"],
            "background": decode["rested_ms"],  # replaces the wait of this name of a batch's line, which is expected
            "other models": time_ms["other_models"],
        }
        late_ms = parts_ms["preempted"] - early_ms
        steps_ms = time_ms["decode"] - late_ms - parts_ms["sat out"] - parts_ms["background"]
        parts_ms["prefill"] = time_ms["prefill"] - early_ms
        parts_ms["decode"] = max(0.0, steps_ms)
        return cls(
            age_s=age_s,
            total_s=time_ms["total"] / 1e3,
            parts_s={name: part_ms / 1e3 for name, part_ms in parts_ms.items()},
            num_prompt_tokens=choice["prompt_tokens"],
            num_hit_tokens=prefix.get("hit_tokens", 0),
            num_answer_tokens=choice["completion_tokens"],
            num_prefill_steps=choice["prefill"]["steps"],
            num_steps=decode["steps"],
            num_steps_with_prompts=decode["with_prompts_steps"],
            with_prompts_s=decode["with_prompts_ms"] / 1e3,
            num_resume_steps=choice["resume"]["steps"],
            num_accepted=decode["accepted_tokens"],
            mean_batch=choice["batch"]["mean"],
            prefix_end=prefix.get("because", ""),
            num_same_after=prefix.get("same_after", 0),
            finish_reason=choice["finish_reason"],
        )


def visits_of(explained: Iterable[Mapping[str, Any]], model: str, within_s: float) -> list[Visit]:
    """Read the list of `/v1/requests`: a model's requests that run or ended in the last `within_s` seconds."""
    calls = [call for call in explained if call["model"] == model]
    visits = [Visit.of(choice, call["age_ms"] / 1e3) for call in calls for choice in call["choices"]]
    return [one for one in visits if one.age_s - one.total_s <= within_s and one.finish_reason != "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Input of the rules. Times of requests are sums in seconds. Times of the machine are shares of the window, which is the
    time between the two scrapes of `/metrics`."""

    visits: Sequence[Visit]
    busy: float
    """Share of the time in which a step was computed."""
    num_calls: float
    num_refused: float
    num_ended: float
    answers_per_s: float
    """Tokens of answers per second."""
    padding: float
    """Share of the computed positions that were padding."""
    cpu_wait: float
    """Share of runnable time that threads waited for a CPU, capped at other processes' share of CPU time."""
    client_wait: float
    """Time that streams waited for slow clients / (that time + the time of all requests)."""
    background: float
    """Share of computed positions that belonged to background requests."""
    num_background: float
    """Background requests now."""
    declined: float
    """Share of the computed prompt tokens that a tier had, but that were faster to compute than to load."""
    largest_tenant: str
    largest_share: float
    """The share of all tokens that belong to `largest_tenant`. 0 without another key that may want some."""
    own_tenant: str = ""
    """The tenant that sent these requests. Empty: all tenants."""
    num_present: float = 0.0
    """Mean number of requests in the server, without background ones."""
    num_now: float = 0.0
    """Requests that run or wait now, without background ones."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are not the defaults."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """`rows`, `step_tokens`, `model_len`, `blocks`, `block_size`."""

    @classmethod
    def of(
        cls,
        visits: Sequence[Visit],
        before: Scrape,
        after: Scrape,
        window_s: float,
        *,
        settings: Mapping[str, Any],
        capacity: Mapping[str, int],
        own_tenant: str = "",
    ) -> Evidence:
        def grown(name: str, **labels: str) -> float:
            return max(0.0, after.sum(name, **labels) - before.sum(name, **labels))

        def ratio(part: float, whole: float) -> float:
            return part / whole if whole > 0 else 0.0

        ran_s, waited_s, others_s = [grown("cpu_seconds_total", state=state) for state in ("running", "waiting", "others")]
        step_s, client_s = grown("step_seconds_sum", part="total"), grown("client_wait_seconds_total")
        refused = sum(grown("requests_rejected_total", reason=reason) for reason in FOR_LOAD)
        declined = sum(grown(f"kv_{tier}_declined_blocks_total") for tier in ("disk", "host")) * capacity.get("block_size", 0)
        ended = grown("e2e_request_latency_seconds_count")  # without the background's
        earlier = before.by("tenant_tokens_total", "tenant")
        tenants = {name: num - earlier[name] for name, num in after.by("tenant_tokens_total", "tenant").items()}
        largest, num_tokens = max(tenants.items(), key=lambda entry: entry[1], default=("", 0.0))
        has_others = sum(count > 0 for count in tenants.values()) > 1 or own_tenant not in ("", largest)  # which may starve
        return cls(
            visits=visits,
            busy=min(1.0, ratio(step_s, window_s * max(1.0, after.sum("replicas")))),  # a front sums its replicas' steps
            num_calls=ended + refused,
            num_refused=refused,
            num_ended=ended,
            answers_per_s=ratio(grown("generation_tokens_total"), window_s),
            padding=ratio(grown("padding_tokens_total"), grown("batch_tokens_sum")),
            cpu_wait=min(ratio(waited_s, waited_s + ran_s), ratio(others_s, others_s + ran_s)) if step_s else 0.0,
            client_wait=ratio(client_s, client_s + grown("e2e_request_latency_seconds_sum")),
            background=ratio(grown("background_tokens_total"), grown("batch_tokens_sum")),
            num_background=after.sum("requests_background"),
            num_present=ratio(grown("e2e_request_latency_seconds_sum"), window_s),
            num_now=after.sum("requests_running") + after.sum("requests_waiting"),
            declined=ratio(declined, grown("prompt_tokens_total", source="computed")),
            largest_tenant=largest,
            own_tenant=own_tenant,
            largest_share=ratio(num_tokens, sum(tenants.values())) if has_others else 0.0,
            settings=settings,
            capacity=capacity,
        )

    @property
    def total_s(self) -> float:
        return sum(one.total_s for one in self.visits)

    @property
    def parts_s(self) -> dict[str, float]:
        """The time of all requests by part, as in `Visit`."""
        return _sums(entry for one in self.visits for entry in one.parts_s.items())

    @property
    def mean_batch(self) -> float:
        """Mean batch size, averaged over requests. 0 if none ran."""
        ran = [one.mean_batch for one in self.visits if one.mean_batch]
        return sum(ran) / len(ran) if ran else 0.0

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that the tokens of a step's requests filled."""
        room = self.capacity.get("blocks", 0) * self.capacity.get("block_size", 0)
        num_tokens = sum(one.num_prompt_tokens + one.num_answer_tokens / 2 for one in self.visits) / len(self.visits)
        return min(1.0, self.mean_batch * num_tokens / room) if room else 1.0

    @property
    def plain_step_s(self) -> float:
        """Time of a step without prompts, as streams see it. 0 if there was none."""
        time_s = sum(one.parts_s["decode"] - one.with_prompts_s for one in self.visits)
        num_steps = sum(one.num_steps - one.num_steps_with_prompts for one in self.visits)
        return max(0.0, time_s) / num_steps if num_steps else 0.0

    @property
    def target_s(self) -> float:
        """Time between two tokens that suits this model on this machine."""
        return max(TARGET_S, 2 * self.plain_step_s)
