"""Computes a run's figures from its records: latencies, rates, goodput, cost, fairness, and their confidence intervals.

The records may come from an HTTP client, a run in process or a simulation. docs/bench.md defines every figure, and when a
request meets an SLO.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice

import numpy as np

from penstock.config.units import figure
from penstock.lab.intervals import (
    MAX_BATCHES,
    MIN_DRAWS,
    Bools,
    Estimate,
    Floats,
    Ints,
    grouped_quantile,
    mean_estimate,
    quantile_estimate,
    rate_estimate,
    share_estimate,
)
from penstock.lab.records import End, Record
from penstock.lab.workload import NS_PER_S
from penstock.types.errors import ConfigError

NS_PER_MS = 1_000_000
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue")
SLO_METRICS = ("ttft", "tpot", "itl", "e2e")
ENDS = tuple(End)
UNKNOWN = -1
"""Missing value in a column of instants or durations."""
MAX_TENANTS = 50
MAX_REASONS = 20
NUM_GAP_GROUPS = 32
BUCKET_RATIO = 1.005
_FIRST_BUCKET_NS = 1000.0
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|m)")
_NUMBER_OR_ID = re.compile(r"(?<![\w.,-])[a-zA-Z_.,-]*\d[\w.,-]*", re.ASCII)
_UNIT_NS = {"us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9}


@dataclass(frozen=True, slots=True)
class Slo:
    """A latency limit for requests. `metric` is one of `SLO_METRICS`."""

    metric: str
    limit_ns: int

    def __str__(self) -> str:
        unit = next(unit for unit in ("s", "ms", "us") if self.limit_ns >= _UNIT_NS[unit] or unit == "us")
        return f"{self.metric}={self.limit_ns / _UNIT_NS[unit]:.12g}{unit}"


def parse_slos(texts: Iterable[str]) -> tuple[Slo, ...]:
    """Parse SLOs such as `ttft=500ms`; one text may have several, separated by commas. Raises ConfigError."""
    slos: dict[str, Slo] = {}
    for text in (part.strip() for given in texts for part in given.split(",")):
        metric, equals, limit = (part.strip() for part in text.partition("="))
        example = "An SLO is written as ttft=500ms, tpot=50ms, itl=50ms or e2e=10s."
        if not equals:
            raise ConfigError(f"The SLO {text!r} has no limit.", remedy=example)
        if metric not in SLO_METRICS:
            raise ConfigError(f"The SLO {text!r} names {metric!r}, which is not a known latency.", remedy=example)
        found = _DURATION.fullmatch(limit)
        if found is None:
            raise ConfigError(
                f"The limit {limit!r} of the SLO {text!r} is not a time with a unit (us, ms, s, m).", remedy=example
            )
        limit_ns = round(float(found[1]) * _UNIT_NS[found[2]])
        if limit_ns <= 0:
            raise ConfigError(f"The limit of the SLO {text!r} must be greater than 0.", remedy=example)
        if metric in slos:
            raise ConfigError(f"There are two SLOs for {metric}: {slos[metric]} and {text}.", remedy="Give the stricter one.")
        slos[metric] = Slo(metric, limit_ns)
    return tuple(slos.values())


@dataclass(frozen=True, slots=True)
class GapHistogram:
    """Histograms of the gaps between tokens, one for each group of successive requests.

    Bucket 0 is below a microsecond; bucket k is 0.5 % wide and begins at 1.005 ** (k - 1) microseconds.
    """

    buckets: Ints
    """[n]: indices of buckets that are not empty, ascending."""
    counts: Ints
    """[groups, n]"""
    sum_ns: Ints

    @classmethod
    def of(cls, gaps_by_group: Sequence[Ints]) -> GapHistogram:
        everything = [_bucket_of(gaps) for gaps in gaps_by_group]
        buckets = np.unique(np.concatenate([*everything, np.zeros(0, np.int64)]))
        counts = np.zeros((len(everything), len(buckets)), np.int64)
        for row, found in zip(counts, everything, strict=True):
            np.add.at(row, np.searchsorted(buckets, found), 1)
        return cls(buckets, counts, np.array([int(gaps.sum()) for gaps in gaps_by_group], np.int64))

    @property
    def values_ns(self) -> Floats:
        """Middle of each bucket, [n], which stands for its gaps: above 1 us, it is at most 0.25 % off."""
        middle = _FIRST_BUCKET_NS * BUCKET_RATIO ** (self.buckets - 0.5)
        return np.where(self.buckets == 0, _FIRST_BUCKET_NS / 2, middle)

    @property
    def count(self) -> int:
        return int(self.counts.sum())


def _bucket_of(gaps_ns: Ints) -> Ints:
    above = np.maximum(gaps_ns, 1) / _FIRST_BUCKET_NS
    return np.where(above < 1, 0, 1 + np.floor(np.log(np.maximum(above, 1)) / np.log(BUCKET_RATIO) + 1e-9)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Records of requests as columns of equal length, sorted by due time. Times are in nanoseconds."""

    index: Ints
    intended_ns: Ints
    sent_ns: Ints
    first_ns: Ints
    """`UNKNOWN` if no token came. So are `num_cached_tokens`, `longest_gap_ns` and `queue_ns` where unknown."""
    ended_ns: Ints
    num_prompt_tokens: Ints
    num_cached_tokens: Ints
    num_output_tokens: Ints
    longest_gap_ns: Ints
    queue_ns: Ints
    end: Ints
    reason: Ints
    tenant: Ints
    reasons: tuple[str, ...]
    tenants: tuple[str, ...]
    gaps: GapHistogram
    tenant_gaps: Mapping[int, GapHistogram] = field(default_factory=dict)
    """Index in `tenants` -> gaps of that tenant. Empty if there is only one tenant."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Samples:
        if not records:
            raise ConfigError("No request was recorded.", remedy="Ask for at least one request.")
        records = sorted(records, key=lambda record: (record.intended_ns, record.index))
        kinds = [_kind(record) for record in records]
        ranked = [kind for kind, _ in Counter(kinds).most_common() if kind is not None]
        first_of = {kind[0]: kind for kind in reversed(ranked)}
        kept = [kind for rank, kind in enumerate(ranked) if rank < MAX_REASONS or kind is first_of[kind[0]]]
        examples = {kind: _reason(record) for kind, record in zip(reversed(kinds), reversed(records), strict=True)}
        shown = ("", *(examples[kind] for kind in kept), *(["other reasons"] if len(kept) < len(ranked) else []))
        reasons = tuple(dict.fromkeys(shown))  # the cut texts of two kinds may be equal
        known = {None: 0} | {kind: reasons.index(examples[kind]) for kind in kept}
        by_size = Counter(record.tenant for record in records)
        tenants = tuple(name for name, _ in by_size.most_common())
        positions = {name: position for position, name in enumerate(tenants)}
        of_tenant: dict[str, list[Record]] = {name: [] for name in tenants[:MAX_TENANTS] if len(tenants) > 1}
        for record in records:
            if record.tenant in of_tenant:
                of_tenant[record.tenant].append(record)
        columns = {
            name: [getattr(record, name) for record in records] for name in COLUMNS if name not in ("longest_gap_ns", "reason")
        }
        columns |= {
            "longest_gap_ns": [max(record.gaps_ns, default=None) for record in records],
            "end": [ENDS.index(record.end) for record in records],
            "reason": [known.get(kind, len(reasons) - 1) for kind in kinds],
            "tenant": [positions[record.tenant] for record in records],
        }
        return cls(
            **{name: _ints(UNKNOWN if value is None else value for value in columns[name]) for name in COLUMNS},
            reasons=reasons,
            tenants=tenants,
            gaps=_gaps_of(records),
            tenant_gaps={positions[name]: _gaps_of(some) for name, some in of_tenant.items()},
        )

    def __len__(self) -> int:
        return len(self.index)

    @property
    def is_ok(self) -> Bools:
        found: Bools = self.end == ENDS.index(End.OK)
        return found

    @property
    def is_counted(self) -> Bools:
        """Whether each request counts: its client did not go away."""
        found: Bools = self.end != ENDS.index(End.CANCELLED)
        return found

    def latency_ns(self, name: str) -> Ints:
        """Return one latency of each request: [n]. `UNKNOWN` if not measured, or if the request did not succeed.

        `name`: `ttft`, `tpot`, `e2e` or `queue`.
        """
        has_first = self.first_ns >= 0
        if name == "ttft":
            values, known = self.first_ns - self.intended_ns, has_first
        elif name == "tpot":
            known = has_first & (self.num_output_tokens > 1)
            values = (self.ended_ns - self.first_ns) // np.maximum(1, self.num_output_tokens - 1)
        elif name == "e2e":
            values, known = self.ended_ns - self.intended_ns, np.ones(len(self), np.bool_)
        else:
            values, known = self.queue_ns, self.queue_ns >= 0
        return np.where(known & self.is_ok, values, UNKNOWN)

    def holds(self, slo: Slo) -> Bools:
        if slo.metric == "itl":
            return self.is_ok & (self.first_ns >= 0) & (self.longest_gap_ns <= slo.limit_ns)
        values = self.latency_ns(slo.metric)
        has_none = (self.num_output_tokens == 1) if slo.metric == "tpot" else np.zeros(len(self), np.bool_)
        return self.is_ok & (has_none | ((values >= 0) & (values <= slo.limit_ns)))

    def holds_all(self, slos: Sequence[Slo]) -> Bools:
        found: Bools = np.logical_and.reduce([self.is_ok, *(self.holds(slo) for slo in slos)])
        return found

    def rows(self, chosen: Bools, gaps: GapHistogram) -> Samples:
        columns = {name: getattr(self, name)[chosen] for name in COLUMNS}
        return Samples(**columns, reasons=self.reasons, tenants=self.tenants, gaps=gaps)


COLUMNS = tuple(one.name for one in fields(Samples) if one.type == "Ints")


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _gaps_of(records: Sequence[Record]) -> GapHistogram:
    some = [record for record in records if record.end is End.OK and record.gaps_ns]
    num_groups = min(NUM_GAP_GROUPS, len(some))
    groups = [some[len(some) * i // num_groups : len(some) * (i + 1) // num_groups] for i in range(num_groups)]
    return GapHistogram.of([_ints(gap for record in group for gap in record.gaps_ns) for group in groups])


def _kind(record: Record) -> tuple[int, str] | None:
    """Return what requests that failed for one reason have in common: the status, and the text without numbers and ids."""
    if record.end not in (End.REFUSED, End.FAILED):
        return None
    return record.http_status, _NUMBER_OR_ID.sub("#", record.error)


def _reason(record: Record) -> str:
    status = f"{record.http_status}" if record.http_status else ""
    return f"{status} {' '.join(record.error.split())[:160]}".strip() or "no reason given"


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that the figures are computed from, in nanoseconds from the run's start.

    Gaps between tokens (ITL) always cover the whole run.
    """

    begin_ns: int
    end_ns: int
    words: str

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.begin_ns) / NS_PER_S


def whole_window(samples: Samples) -> Window:
    """Return the whole run as a window: from the first due request to the last end, as in vLLM's `bench serve`."""
    begin_ns = int(min(samples.intended_ns.min(), samples.sent_ns.min()))
    return Window(begin_ns, max(begin_ns, int(samples.ended_ns.max())), "the whole run, warm-up and drain included")


def steady_window(samples: Samples) -> Window | None:
    """Return the run without warm-up and drain, or None if that is under half of the run or has fewer than 20 completions.

    It begins when one request has succeeded and the number in flight has reached its median over time. It ends when the last
    request is sent, because the load falls afterwards.
    """
    if not samples.is_ok.any():
        return None
    whole = whole_window(samples)
    last_sent_ns = int(samples.sent_ns.max())
    instants = np.concatenate([samples.sent_ns, samples.ended_ns])
    order = np.argsort(instants, kind="stable")
    instants = instants[order]
    in_flight = np.cumsum(np.concatenate([np.ones(len(samples), np.int64), np.full(len(samples), -1, np.int64)])[order])
    lasts_ns = np.diff(np.append(instants, instants[-1]))
    lasts_ns[instants >= last_sent_ns] = 0
    by_height = np.argsort(in_flight, kind="stable")
    upto_ns = np.cumsum(lasts_ns[by_height])
    if upto_ns[-1] == 0:
        return None
    median = in_flight[by_height][np.searchsorted(upto_ns, upto_ns[-1] / 2)]
    begin_ns = max(int(instants[np.argmax(in_flight >= median)]), int(samples.ended_ns[samples.is_ok].min()))
    num_ends = int(((samples.ended_ns >= begin_ns) & (samples.ended_ns <= last_sent_ns) & samples.is_ok).sum())
    if num_ends < 20 or last_sent_ns - begin_ns < (whole.end_ns - whole.begin_ns) / 2:
        return None
    warm_up_s, drain_s = (begin_ns - whole.begin_ns) / NS_PER_S, (whole.end_ns - last_sent_ns) / NS_PER_S
    left_out = f"without the first {figure(warm_up_s)} s and the last {figure(drain_s)} s of the run"
    return Window(begin_ns, last_sent_ns, left_out)


@dataclass(frozen=True, slots=True)
class Distribution:
    count: int
    mean: Estimate
    quantiles: Mapping[str, Estimate]
    max_ms: float


@dataclass(frozen=True, slots=True)
class Rates:
    requests_per_s: Estimate
    output_tokens_per_s: Estimate
    total_tokens_per_s: Estimate


@dataclass(frozen=True, slots=True)
class Goodput:
    attainment: Estimate
    attainment_by_slo: Mapping[str, Estimate]
    requests_per_s: Estimate


@dataclass(frozen=True, slots=True)
class Cost:
    price_per_hour: float
    per_million_output_tokens: Estimate
    per_million_total_tokens: Estimate


@dataclass(frozen=True, slots=True)
class Fairness:
    """Jain's fairness index among tenants (DEC-TR-301, 1984): 1 if all n get the same, 1/n if one gets everything."""

    of_speed: float
    """Index of the tenants' mean speeds. A speed is output tokens / e2e seconds, or 0 for a refused or failed request."""
    of_tokens: float
    """Index of the tenants' prompt and output tokens. Meaningful only if all tenants ask for the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    window: Window
    num_requests: int
    num_by_end: Mapping[str, int]
    reasons: Mapping[str, int]
    latency_ms: Mapping[str, Distribution]
    rates: Rates
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_cache_share: float | None
    """Share of the prompt tokens found in the server's prefix cache, or None if the server does not report these."""
    goodput: Goodput | None
    cost: Cost | None
    lag_ms: Distribution | None
    """Delay of the client: time of sending minus intended arrival."""
    steady: tuple[Window, Rates] | None
    """Rates without warm-up and drain, or None if too little is left."""
    fairness: Fairness | None
    tenants: Mapping[str, Figures]
    num_tenants: int
    warnings: tuple[str, ...]


def make_figures(samples: Samples, *, slos: Sequence[Slo] = (), price_per_hour: float | None = None) -> Figures:
    window = whole_window(samples)
    figures = _figures_of(samples, window, slos, price_per_hour)
    num_tenants = len(np.unique(samples.tenant))
    if num_tenants < 2:
        return figures
    tenants = {
        samples.tenants[position]: _figures_of(samples.rows(samples.tenant == position, gaps), window, slos, None)
        for position, gaps in islice(samples.tenant_gaps.items(), MAX_TENANTS)
    }
    return replace(figures, tenants=tenants, num_tenants=num_tenants, fairness=_fairness(samples))


def _figures_of(samples: Samples, window: Window, slos: Sequence[Slo], price_per_hour: float | None) -> Figures:
    is_ok, counts = samples.is_ok, np.bincount(samples.reason)
    rates = make_rates(samples, window, is_ok)
    num_prompt, num_output = int(samples.num_prompt_tokens[is_ok].sum()), int(samples.num_output_tokens[is_ok].sum())
    cached = samples.num_cached_tokens[is_ok]
    # Some servers leave out a count of 0, so one that is missing beside others is 0.
    num_cached = int(np.maximum(cached, 0).sum()) if (cached != UNKNOWN).any() else None
    lag = _distribution(samples.sent_ns - samples.intended_ns)
    latencies = {name: _distribution(samples.latency_ns(name)) for name in LATENCIES if name != "itl"}
    latencies["itl"] = _gap_distribution(samples.gaps)
    known = {name: found for name in LATENCIES if (found := latencies[name]) is not None}
    steady = steady_window(samples)
    return Figures(
        window=window,
        num_requests=len(samples),
        num_by_end={end.value: int((samples.end == position).sum()) for position, end in enumerate(ENDS)},
        reasons={samples.reasons[position]: int(counts[position]) for position in np.flatnonzero(counts) if position},
        latency_ms=known,
        rates=rates,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        prefix_cache_share=None if num_cached is None or not num_prompt else num_cached / num_prompt,
        goodput=_goodput(samples, window, slos) if slos else None,
        cost=None if price_per_hour is None else _cost(price_per_hour, rates),
        lag_ms=lag,
        steady=None if steady is None else (steady, make_rates(samples, steady, is_ok)),
        fairness=None,
        tenants={},
        num_tenants=len(np.unique(samples.tenant)),
        warnings=tuple(_warnings(samples, known, lag)),
    )


def _distribution(values_ns: Ints) -> Distribution | None:
    series = values_ns[values_ns >= 0] / NS_PER_MS
    if not len(series):
        return None
    quantiles = {name: quantile_estimate(series, share) for name, share in QUANTILES.items()}
    mean = mean_estimate(series)
    mean = Estimate(mean.value, None if mean.low is None else max(0.0, mean.low), mean.high)  # Times are at least 0.
    return Distribution(len(series), mean, quantiles, float(series.max()))


def _gap_distribution(gaps: GapHistogram) -> Distribution | None:
    if not gaps.count:
        return None
    values = gaps.values_ns / NS_PER_MS
    sizes = gaps.counts.sum(axis=1)
    mean = float(gaps.sum_ns.sum() / sizes.sum()) / NS_PER_MS
    of_groups = gaps.sum_ns / sizes / NS_PER_MS
    spread = mean_estimate(of_groups)
    if spread.low is not None and spread.high is not None:
        half = (spread.high - spread.low) / 2
        estimate = Estimate(mean, max(0.0, mean - half), mean + half)
    else:
        estimate = Estimate(mean)
    quantiles = {name: grouped_quantile(values, gaps.counts, share) for name, share in QUANTILES.items()}
    return Distribution(gaps.count, estimate, quantiles, float(values[-1]))


def make_rates(samples: Samples, window: Window, counted: Bools) -> Rates:
    """Return requests and tokens per second of the requests where `counted` is true, with intervals by batch means."""
    some = samples.rows(counted, samples.gaps)
    num_batches = min(MAX_BATCHES, num_independent_batches(some, window))
    num_batches = num_batches if num_batches >= MIN_DRAWS else 1
    edges = np.linspace(window.begin_ns, window.end_ns, num_batches + 1)
    edges[0] -= 1  # The window includes its first instant.
    output, prompt, ended = (np.diff(upto) for upto in tokens_upto(some, edges))

    def rate(batches: Floats) -> Estimate:
        return rate_estimate(float(batches.sum()), batches, window.duration_s)

    return Rates(rate(ended), rate(output), rate(output + prompt))


def num_independent_batches(samples: Samples, window: Window) -> int:
    """Return the number of batches. Each lasts at least twice the mean latency and averages at least 5 ended requests."""
    ends = samples.ended_ns[(samples.ended_ns >= window.begin_ns) & (samples.ended_ns <= window.end_ns)]
    if not len(ends):
        return 0
    mean_e2e_s = float((samples.ended_ns - samples.intended_ns).mean()) / NS_PER_S
    by_length = window.duration_s / max(1e-9, 2 * mean_e2e_s)
    return int(min(by_length, len(ends) // 5))


def tokens_upto(samples: Samples, instants_ns: Floats) -> tuple[Floats, Floats, Floats]:
    """Return how many output tokens, prompt tokens and ended requests came up to each instant: three arrays [instants].

    The first token of an answer counts at `first_ns`; the others are spread evenly from then to its end.
    """
    starts = np.where(samples.first_ns >= 0, samples.first_ns, samples.ended_ns)
    lasts = np.maximum(1, samples.ended_ns - starts)
    others = np.maximum(0, samples.num_output_tokens - 1)
    firsts = samples.num_output_tokens - others
    output = np.zeros(len(instants_ns))
    prompt, ended = np.zeros_like(output), np.zeros_like(output)
    for i, instant_ns in enumerate(instants_ns):
        begun = starts <= instant_ns
        share = np.clip((instant_ns - starts) / lasts, 0.0, 1.0)
        share[samples.ended_ns <= instant_ns] = 1.0
        output[i] = (firsts[begun] + share[begun] * others[begun]).sum()
        prompt[i] = samples.num_prompt_tokens[begun].sum()
        ended[i] = (samples.ended_ns <= instant_ns).sum()
    return output, prompt, ended


def _goodput(samples: Samples, window: Window, slos: Sequence[Slo]) -> Goodput | None:
    if not samples.is_counted.any():
        return None
    by_slo = {str(slo): make_share(samples, samples.holds(slo)) for slo in slos}
    holds_all = samples.holds_all(slos)
    good = make_rates(samples, window, holds_all)
    return Goodput(make_share(samples, holds_all), by_slo, good.requests_per_s)


def make_share(samples: Samples, holds: Bools) -> Estimate:
    """Return the share of the counted requests where `holds` is true. At least one request must count."""
    counted = samples.is_counted
    return share_estimate(holds[counted], (samples.ended_ns - samples.intended_ns)[counted] / NS_PER_S)


def _cost(price_per_hour: float, rates: Rates) -> Cost:
    price_per_million_s = price_per_hour / 3600 * 1e6
    return Cost(
        price_per_hour,
        rates.output_tokens_per_s.inverted(price_per_million_s),
        rates.total_tokens_per_s.inverted(price_per_million_s),
    )


def _fairness(samples: Samples) -> Fairness:
    some = samples.rows(samples.is_counted, samples.gaps)
    seconds = np.maximum(1, some.ended_ns - some.intended_ns) / NS_PER_S
    speeds = np.where(some.is_ok, some.num_output_tokens / seconds, 0.0)
    tokens = np.where(some.is_ok, some.num_prompt_tokens + some.num_output_tokens, 0)
    requests_of = np.bincount(some.tenant)
    asks = requests_of > 0
    speed_of = np.bincount(some.tenant, speeds)[asks] / requests_of[asks]
    tokens_of = np.bincount(some.tenant, tokens)[asks]
    return Fairness(jain(speed_of.tolist()), jain(tokens_of.tolist()))


def jain(shares: Sequence[float]) -> float:
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _warnings(samples: Samples, latencies: Mapping[str, Distribution], lag: Distribution | None) -> Iterable[str]:
    reference = next((name for name in ("ttft", "e2e") if name in latencies), None)
    if lag is not None and reference is not None:
        late_ms, median_ms = lag.quantiles["p99"].value, latencies[reference].quantiles["p50"].value
        if late_ms > 0.05 * median_ms:
            yield (
                f"The client fell behind: 1 % of the requests were sent {figure(late_ms)} ms late or more, and the median of "
                f"{reference} is {figure(median_ms)} ms. Latencies contain that lag. Use a faster client, or a lower rate."
            )
    num_bad = int(((samples.end == ENDS.index(End.REFUSED)) | (samples.end == ENDS.index(End.FAILED))).sum())
    if num_bad:
        yield f"{num_bad} of {len(samples)} requests were refused or failed. Latencies cover only the others."
