"""The numbers that an operator watches, counted in plain integers. Told by the engine thread, rendered by the HTTP thread.

Being told must be cheap, once per step, so what a step tells is only noted, and counted when some steps have come together or
someone asks: between two steps every line of code is read from memory, and costs ten times what it does the next time.
Nothing here touches the Prometheus client; `prometheus.expose` turns the numbers into its format. One lock makes a reading
consistent. Never decides anything.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.obs.signals import SustainedLoad
from penstock.types.request import FinishReason, Request
from penstock.types.stats import AdapterStats, EngineLoad, RequestStats, StepStats, TierStats


class Histogram:
    """Observations of one quantity, in the unit that its bounds are in."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the upper edges of the buckets, ascending; one for everything above is added."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_many(self, values: Iterable[float]) -> None:
        """All values of a step in one go."""
        bounds, counts, total = self._bounds, self._counts, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum += total

    def snapshot(self, unit: float = 1.0) -> tuple[list[tuple[str, float]], float]:
        """([(upper edge as Prometheus writes it, observations at or below it)], sum), both in multiples of `unit`."""
        edges = [*(repr(float(bound / unit)) for bound in self._bounds), "+Inf"]
        buckets: list[tuple[str, float]] = []
        num_below = 0
        for edge, count in zip(edges, self._counts, strict=True):
            num_below += count
            buckets.append((edge, float(num_below)))
        return buckets, self._sum / unit


_MS = 1_000_000

# Upper edges in nanoseconds; powers of two and five in between, from 1 ms as `interfaces` says.
_LATENCY_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
LATENCY_BOUNDS_NS = tuple(ms * _MS for ms in _LATENCY_MS)
TOKEN_BOUNDS_NS = tuple(
    int(ms * _MS) for ms in (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1_000, 2_000, 5_000)
)
STEP_BOUNDS_NS = tuple(us * 1_000 for us in (10, 20, 50, 100, 200, 500)) + LATENCY_BOUNDS_NS[:12]
SIZE_BOUNDS = tuple(2**exponent for exponent in range(10))
TOKEN_COUNT_BOUNDS = tuple(2**exponent for exponent in range(15))

MAX_NOTED = 128
"""Some forty steps: counting them takes half a millisecond."""

SUCCESS_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
"""The reasons that `request_success_total` counts; a refused request is in `requests_rejected_total`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """Whether a model is in memory now, and what its loads have come to. Its deployment tells."""

    state: str
    states: tuple[str, ...]
    """All states that there are."""
    num_waiting: int
    """Requests that wait for it to be loaded."""
    num_loads: int
    num_load_failures: int
    load_ns: int
    """Time of all loads that ended well."""
    num_unloads: Mapping[str, int]
    """By reason."""
    memory_bytes: Mapping[str, int]
    """Memory that it may come to use, by part; empty: it is not loaded."""
    machine_ns: int
    """For how long its steps had the machine; 0 of a model that takes no turns."""


class Metrics:
    """Counters and histograms of one served model. Implements the engine's `Observer`, `TokenObserver` and `TurnObserver`.

    Times are kept in nanoseconds and become seconds when they are rendered.
    """

    def __init__(self, model: str) -> None:
        """`model`: the value of every series' label of that name."""
        self.model = model
        self.lock = threading.Lock()
        self.success: Counter[FinishReason] = Counter(dict.fromkeys(SUCCESS_REASONS, 0))
        self.rejected: Counter[str] = Counter()
        self.slo: Counter[tuple[str, bool]] = Counter()
        """Requests by target (ttft, itl) and whether it was met; only those that had the target."""
        self.ttft_ns = Histogram(LATENCY_BOUNDS_NS)
        self.tpot_ns = Histogram(TOKEN_BOUNDS_NS)
        self.e2e_ns = Histogram(LATENCY_BOUNDS_NS)
        self.queue_ns = Histogram(LATENCY_BOUNDS_NS)
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        """The preemptions among them that swap."""
        self.num_recomputed_tokens = 0
        self.num_forced_tokens = 0
        self.num_restarts = 0
        self.num_padding_tokens = 0
        self.num_rows_sat_out = 0
        self.max_prefill_tokens = 0
        """Prompt tokens that the last step could take."""
        self.num_computed_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.batch_size = Histogram(SIZE_BOUNDS)
        self.batch_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.step_ns: dict[str, Histogram] = {}
        """By part of the step; `total` runs from the begin of the plan, or from the end of the step before if it was planned
        while that ran, to the end of its execution."""
        self.itl_ns = Histogram(TOKEN_BOUNDS_NS)
        self.model_wait_ns = Histogram(LATENCY_BOUNDS_NS)
        self.grammar_wait_ns = Histogram(LATENCY_BOUNDS_NS)
        self._noted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """Reports that are not counted yet: the function that counts each, and its arguments. Taken by whoever holds the
        lock."""
        self.tier = TierStats()
        """Counts of the tier below the KV pool, written by the engine's `Transfers`."""
        self.num_weight_bytes = 0
        """Size of the weights as the backend keeps them; 0: it does not tell."""
        self.settings_hash = ""
        """The name of the settings of scheduling (`config.saved`)."""
        self.tenants: frozenset[str] = frozenset()
        """Names of API keys whose requests are counted apart."""
        self.tenant_requests: Counter[tuple[str, str]] = Counter()
        """Requests by tenant and outcome: ended, rejected."""
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()
        """Tokens by tenant and kind: prompt, generation."""
        self.read_load: Callable[[], EngineLoad] = EngineLoad
        self.read_signals: Callable[[], SustainedLoad] = SustainedLoad
        self.read_waste: Callable[[], float] = float
        self.read_adapters: Callable[[], AdapterStats] | None = None
        """Counts of the registry of adapters; None: the model is served without."""
        self.read_residence: Callable[[], Residence] | None = None
        """None: nobody loads and unloads it."""
        self.num_shared_texts: int | None = None
        """Texts that were answered without being computed, counted by the desk; None: the model reads no texts."""

    def connect(
        self,
        *,
        load: Callable[[], EngineLoad],
        signals: Callable[[], SustainedLoad],
        waste: Callable[[], float] = float,
    ) -> None:
        """Where the gauges are read when someone asks: the load of the moment, that of late, and the share of KV wasted."""
        self.read_load = load
        self.read_signals = signals
        self.read_waste = waste

    def disconnect(self) -> None:
        """Nobody runs the model any more: the gauges are 0, and the counts stay. Reports of requests are counted first,
        so that they and the model are let go of."""
        with self.lock:
            self.settle()
        self.connect(load=EngineLoad, signals=SustainedLoad)
        self.num_weight_bytes, self.tier.is_open = 0, False

    def count_model_wait(self, wait_ns: int) -> None:
        """A request waited for so long until the model was loaded. For any thread."""
        with self.lock:
            self.model_wait_ns.observe(wait_ns)

    def count_grammar_wait(self, wait_ns: int) -> None:
        """A call waited for so long for its grammar, whether it got that or not. For any thread."""
        with self.lock:
            self.grammar_wait_ns.observe(wait_ns)

    def count_rejected(self, reason: str, tenant: str = "") -> None:
        """A request that was refused before the engine saw it; `reason` is a `RejectReason` value. For any thread."""
        with self.lock:
            self.rejected[reason] += 1
            if tenant in self.tenants:
                self.tenant_requests[tenant, "rejected"] += 1

    def count_restart(self) -> None:
        """The engine was made anew. For any thread."""
        with self.lock:
            self.num_restarts += 1

    def on_step(self, stats: StepStats) -> None:
        self._note(self._count_step, stats)

    def on_turn(self, parts_ns: Mapping[str, int]) -> None:
        self._note(self._observe_parts, parts_ns)

    def on_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None:
        self._note(self._count_tokens, first, gaps_ns)

    def on_itl(self, num_gaps: int, num_late: int) -> None:
        self._note(self._count_itl, num_late <= num_gaps // 100)

    def on_finish(self, stats: RequestStats) -> None:
        """Counted once: as refused if a reason for that is given (a missed deadline, too), else by its finish reason."""
        self._note(self._count_finish, stats)

    def settle(self) -> None:
        """Count what was told. Call with the lock held, before the numbers are read."""
        noted = self._noted
        while noted:
            count, told = noted.popleft()
            count(*told)

    def _note(self, count: Callable[..., None], *told: Any) -> None:
        self._noted.append((count, told))
        if len(self._noted) >= MAX_NOTED:
            with self.lock:
                self.settle()

    def _count_step(self, stats: StepStats) -> None:
        self.num_prefix_query_tokens += stats.counts.num_prefix_query_tokens
        self.num_prefix_hit_tokens += stats.counts.num_prefix_hit_tokens
        self.num_preemptions += stats.counts.num_preemptions
        self.num_swaps += stats.counts.num_swaps
        self.num_recomputed_tokens += stats.counts.num_recomputed_tokens
        self.num_padding_tokens += stats.counts.num_padding_tokens
        self.num_rows_sat_out += len(stats.counts.sat_out)
        self.max_prefill_tokens = stats.counts.max_prefill_tokens
        self.num_generated_tokens += stats.counts.num_sampled_tokens
        self.num_forced_tokens += sum(stats.counts.forced.values())
        self.batch_size.observe(stats.counts.num_rows)
        self.batch_tokens.observe(stats.counts.num_tokens)
        self._observe_part("total", stats.ended_ns - stats.started_ns)
        if stats.waited_ns:
            self._observe_part("turn", stats.waited_ns)
        self._observe_parts(stats.parts_ns)

    def _count_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None:
        self.itl_ns.observe_many(gaps_ns)
        searches: set[str] = set()
        for request in first:
            self._count_first_token(request)
            # All hypotheses of a search come at once, and its prompt was computed once.
            if request.sampling.beams is None or request.parent_id not in searches:
                self._count_prompt(request)
                searches.add(request.parent_id)

    def _count_first_token(self, request: Request) -> None:
        if request.first_token_ns is not None:
            ttft_ns = request.first_token_ns - request.arrival_ns
            self.ttft_ns.observe(ttft_ns)
            if request.slo_ttft_ns is not None:
                self.slo["ttft", ttft_ns <= request.slo_ttft_ns] += 1
        if request.first_scheduled_ns is not None:
            self.queue_ns.observe(request.first_scheduled_ns - request.arrival_ns)

    def _count_itl(self, is_met: bool) -> None:
        self.slo["itl", is_met] += 1

    def _count_finish(self, stats: RequestStats) -> None:
        if stats.tenant in self.tenants:
            self._count_tenant(stats)
        if stats.slo_ttft_ns is not None and stats.first_token_ns is None and _is_our_doing(stats):
            self.slo["ttft", False] += 1
        if stats.reject_reason or stats.finish_reason is FinishReason.REJECTED:
            self.rejected[stats.reject_reason] += 1
            return
        self.success[stats.finish_reason] += 1
        self.e2e_ns.observe(stats.ended_ns - stats.arrival_ns)
        if stats.first_token_ns is not None and stats.num_generated_tokens > 1 and not stats.is_beam:
            self.tpot_ns.observe((stats.ended_ns - stats.first_token_ns) / (stats.num_generated_tokens - 1))

    def _count_tenant(self, stats: RequestStats) -> None:
        is_rejected = bool(stats.reject_reason) or stats.finish_reason is FinishReason.REJECTED
        self.tenant_requests[stats.tenant, "rejected" if is_rejected else "ended"] += 1
        if stats.first_token_ns is not None:
            self.tenant_tokens[stats.tenant, "prompt"] += stats.num_prompt_tokens
            self.tenant_tokens[stats.tenant, "generation"] += stats.num_generated_tokens

    def _observe_parts(self, parts_ns: Mapping[str, int]) -> None:
        for part, part_ns in parts_ns.items():
            self._observe_part(part, part_ns)

    def _observe_part(self, part: str, part_ns: int) -> None:
        histogram = self.step_ns.get(part)
        if histogram is None:
            histogram = self.step_ns[part] = Histogram(STEP_BOUNDS_NS)
        histogram.observe(part_ns)

    def _count_prompt(self, request: Request) -> None:
        self.num_cached_prompt_tokens += request.num_cached_tokens
        self.num_computed_prompt_tokens += request.num_prompt_tokens - request.num_cached_tokens


def _is_our_doing(stats: RequestStats) -> bool:
    """It came in and got no token, and that is not its client's doing: it failed, or its time ran out."""
    has_timed_out = bool(stats.reject_reason) and stats.finish_reason is FinishReason.ABORT
    return has_timed_out or stats.finish_reason is FinishReason.ERROR
