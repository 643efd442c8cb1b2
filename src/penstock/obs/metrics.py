"""Counts the numbers that an operator watches. The engine thread reports, the HTTP thread reads through `prometheus.expose`.

Reports are queued and counted in batches: code that runs once per step finds cold caches, and costs ten times as much as code
that runs repeatedly.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.obs.signals import SustainedLoad
from penstock.obs.waits import REASONS, Waits
from penstock.types.errors import RejectReason
from penstock.types.request import NO_WAITS, FinishReason, Request, WaitTimes
from penstock.types.stats import AdapterStats, EngineLoad, ReplicaLoad, RequestStats, ScalingDecision, StepStats, TierStats


class Histogram:
    """Counts of observed values in buckets, in the unit of its bounds, and an exemplar for each bucket."""

    __slots__ = ("_bounds", "_counts", "_examples", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper edges of the buckets, ascending. A bucket for larger values is added."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._examples: dict[int, tuple[str, float]] = {}

    def observe(self, value: float, request_id: str = "") -> None:
        """Count a value. With a `request_id`, that request becomes its bucket's exemplar."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if request_id:
            self._examples[bucket] = request_id, value

    def snapshot(self, unit: float = 1.0) -> tuple[list[tuple[str, float]], float]:
        """Return [(upper edge as Prometheus writes it, values at or below it)] and the values' sum, both divided by `unit`."""
        edges = [*(repr(float(bound / unit)) for bound in self._bounds), "+Inf"]
        buckets: list[tuple[str, float]] = []
        num_below = 0
        for edge, count in zip(edges, self._counts, strict=True):
            num_below += count
            buckets.append((edge, float(num_below)))
        return buckets, self._sum / unit

    def examples(self, unit: float = 1.0) -> dict[int, tuple[str, float]]:
        """Return index of a bucket -> (engine's id of its last request, value divided by `unit`)."""
        return {bucket: (request_id, value / unit) for bucket, (request_id, value) in self._examples.items()}


_MS = 1_000_000

_LATENCY_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
LATENCY_BOUNDS_NS = tuple(ms * _MS for ms in _LATENCY_MS)
TOKEN_BOUNDS_NS = tuple(
    int(ms * _MS) for ms in (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1_000, 2_000, 5_000)
)
STEP_BOUNDS_NS = tuple(us * 1_000 for us in (10, 20, 50, 100, 200, 500)) + LATENCY_BOUNDS_NS[:12]
SIZE_BOUNDS = tuple(2**exponent for exponent in range(10))
TOKEN_COUNT_BOUNDS = tuple(2**exponent for exponent in range(15))

MAX_NOTED = 128
"""Reports counted in one batch: some forty steps, half a millisecond."""

SUCCESS_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
"""Reasons counted by `request_success_total`. `requests_rejected_total` counts refused requests."""

NO_WAIT = "step"
"""Label of waits for only the running step, and of work before the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """Whether a model is loaded, and totals of its loads and unloads."""

    state: str
    states: tuple[str, ...]
    """All possible states."""
    num_waiting: int
    """Requests waiting for the model to be loaded."""
    num_loads: int
    num_load_failures: int
    load_ns: int
    """Total time of successful loads."""
    num_unloads: Mapping[str, int]
    """Unloads by reason."""
    memory_bytes: Mapping[str, int]
    """Memory that the model may use, by part. Empty if it is not loaded."""
    machine_ns: int
    """Total time in which its steps used the machine; 0 for a model that takes no turns."""


class Metrics:
    """Counters and histograms of one served model. Implements the engine's `Observer`, `TokenObserver` and `TurnObserver`.

    Times are in nanoseconds.
    """

    def __init__(self, model: str) -> None:
        """`model` is the value of every metric's label `model`."""
        self.model = model
        self.lock = threading.Lock()
        self.success: Counter[FinishReason] = Counter(dict.fromkeys(SUCCESS_REASONS, 0))
        self.rejected: Counter[str] = Counter(dict.fromkeys(map(str, RejectReason), 0))
        """Starts at 0 for each reason: Prometheus misses the increase of a series that appears later."""
        self.slo: Counter[tuple[str, bool]] = Counter()
        """Clients' calls by target (ttft, ttft_asked), and answers (itl), by whether it was met."""
        self.ttft_ns = Histogram(LATENCY_BOUNDS_NS)
        self.tpot_ns = Histogram(TOKEN_BOUNDS_NS)
        self.e2e_ns = Histogram(LATENCY_BOUNDS_NS)
        self.queue_ns = Histogram(LATENCY_BOUNDS_NS)
        self.prefill_ns = Histogram(LATENCY_BOUNDS_NS)
        self.decode_ns = Histogram(LATENCY_BOUNDS_NS)
        self.prompt_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.generated_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.request_ns: Counter[str] = Counter(queue=0, prefill=0, decode=0)
        """Time of requests that ended, by part. The sum is that of `e2e_ns`."""
        self.wait_ns: Counter[str] = Counter(dict.fromkeys((*WaitTimes._fields, NO_WAIT, *filter(None, REASONS)), 0))
        """Queue time of requests that got a first token, by what the queue lacked. The sum is that of `queue_ns`."""
        self._waits = Waits()
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        """Preemptions that moved KV to a lower tier."""
        self.num_recomputed_tokens = 0
        self.num_forced_tokens = 0
        self.guesses: Counter[tuple[str, int, int]] = Counter()
        """(guesser, guesses of a row, accepted ones) -> rows."""
        self.num_restarts = 0
        self.num_padding_tokens = 0
        self.num_background_tokens = 0
        self.num_rows_sat_out = 0
        self.max_prefill_tokens = 0
        """Most prompt tokens that the last step could take."""
        self.num_computed_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.batch_size = Histogram(SIZE_BOUNDS)
        self.batch_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.steps: Counter[str] = Counter(dict.fromkeys((NO_WAIT, *filter(None, REASONS)), 0))
        """By what the first waiting request lacked."""
        self.steps_by_size: dict[tuple[int, bool], list[int]] = {}
        """(bit length of rows - 1, whether it computed prompts) -> [steps, total nanoseconds]."""
        self.max_rows = 0
        """Most rows and tokens of a step; 0: not known."""
        self.max_step_tokens = 0
        self.step_ns: dict[str, Histogram] = {}
        """By part of the step. `total` starts with the plan, or with the end of the previous step if that was later."""
        self.itl_ns = Histogram(TOKEN_BOUNDS_NS)
        self.model_wait_ns = Histogram(LATENCY_BOUNDS_NS)
        self.grammar_wait_ns = Histogram(LATENCY_BOUNDS_NS)
        self.client_wait_ns = 0
        """Time in which streams had to wait for their clients."""
        self._noted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """Reports to count: a function and its arguments. Taken with the lock held."""
        self.tier = TierStats()
        """Written by the engine's `Transfers`."""
        self.num_weight_bytes = 0
        """Size of the weights in the backend's form; 0 if the backend does not report it."""
        self.slo_ttft_ns: int | None = None
        """The server's target for the first token, if it has one."""
        self.settings_hash = ""
        """Names the scheduling settings (`config.saved`)."""
        self.tenants: frozenset[str] = frozenset()
        """Names of API keys with series of their own."""
        self.routed: Counter[str] = Counter()
        """Requests for which a route chose this model, by the route."""
        self.checked: Counter[tuple[str, str]] = Counter()
        """Checked answers of this model, by the pipeline and whether they were kept or withheld."""
        self.tenant_requests: Counter[tuple[str, str]] = Counter()
        """By name of the key and outcome: ended, rejected."""
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()
        """By name of the key and kind: prompt, generation. As in a call's usage, a prompt with several choices counts once."""
        self.read_load: Callable[[], EngineLoad] = EngineLoad
        self.read_signals: Callable[[], SustainedLoad] = SustainedLoad
        self.read_waste: Callable[[], float] = float
        self.read_adapters: Callable[[], AdapterStats] | None = None
        """None for a model served without adapters."""
        self.holds_adapters = True
        """False at a cluster's front, which only checks the adapters' files: replicas hold them, and do not report them."""
        self.read_adapter_names: Callable[[Collection[int]], Sequence[str]] = lambda _: ()
        """Returns the names of adapters, given their numbers."""
        self.max_adapters = 0
        """Most adapters of one step."""
        self.read_replicas: Callable[[], Sequence[ReplicaLoad]] | None = None
        """None for a model that this process computes."""
        self.num_replicas = 0
        """Wanted replicas if `read_decisions` returns nothing."""
        self.read_moves: Callable[[], Mapping[str, int]] = dict
        """Requests moved to another replica, by reason."""
        self.read_decisions: Callable[[], Sequence[ScalingDecision]] = tuple
        """Wanted numbers of replicas with their reasons, the current one first. Empty if the number is fixed."""
        self.read_residence: Callable[[], Residence] | None = None
        """None for a model that is always loaded."""
        self.num_shared_texts: int | None = None
        """Texts answered without being computed again. None for a model that writes text."""

    def connect(
        self,
        *,
        load: Callable[[], EngineLoad],
        signals: Callable[[], SustainedLoad],
        waste: Callable[[], float] = float,
        max_rows: int = 0,
        max_step_tokens: int = 0,
    ) -> None:
        """Set the functions that gauges are read from (current load, recent load, wasted share of KV memory), and limits."""
        self.max_rows, self.max_step_tokens = max_rows, max_step_tokens
        self.read_load = load
        self.read_signals = signals
        self.read_waste = waste

    def disconnect(self) -> None:
        """Set the gauges to 0, and drop all references to the model, since it was unloaded. Counts are kept."""
        with self.lock:
            self.settle()
        self.connect(load=EngineLoad, signals=SustainedLoad)
        self.num_weight_bytes, self.tier.is_open = 0, False

    def count_model_wait(self, wait_ns: int) -> None:
        """Count the time a request waited for its model to be loaded. Thread-safe."""
        with self.lock:
            self.model_wait_ns.observe(wait_ns)

    def count_routed(self, route: str) -> None:
        """Count a request for which a route chose this model. Thread-safe."""
        with self.lock:
            self.routed[route] += 1

    def count_checked(self, pipeline: str, *, is_kept: bool) -> None:
        """Count an answer of a pipeline that was checked. Thread-safe."""
        with self.lock:
            self.checked[pipeline, "kept" if is_kept else "withheld"] += 1

    def count_grammar_wait(self, wait_ns: int) -> None:
        """Count the time a call waited for its grammar to be compiled, successfully or not. Thread-safe."""
        with self.lock:
            self.grammar_wait_ns.observe(wait_ns)

    def count_client_wait(self, wait_ns: int) -> None:
        """Count the time a stream waited for its client to read. Thread-safe."""
        with self.lock:
            self.client_wait_ns += wait_ns

    def count_rejected(self, reason: str, key: str = "") -> None:
        """Count a request of this key, refused before it reached the engine. `reason`: a `RejectReason` value. Thread-safe."""
        with self.lock:
            self.rejected[reason] += 1
            if key in self.tenants:
                self.tenant_requests[key, "rejected"] += 1

    def count_ttft(self, asked_ns: int | None, ttft_ns: float) -> None:
        """Count whether a client's call met the server's target and, separately, the client's own. Thread-safe.

        `asked_ns`: the client's own target, if any. `ttft_ns`: infinite if the call got no token.
        """
        with self.lock:
            if self.slo_ttft_ns is not None:
                self.slo["ttft", ttft_ns <= self.slo_ttft_ns] += 1
            if asked_ns is not None and asked_ns != self.slo_ttft_ns:
                self.slo["ttft_asked", ttft_ns <= asked_ns] += 1

    def count_restart(self) -> None:
        """Count a restart of the engine. Thread-safe."""
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
        """Count a request once: as rejected if it has a reject reason (a missed deadline too), else by its finish reason."""
        self._note(self._count_finish, stats)

    def settle(self) -> None:
        """Count all queued reports. Call this with the lock held, before reading numbers."""
        noted = self._noted
        while noted:
            count, arguments = noted.popleft()
            count(*arguments)

    def _note(self, count: Callable[..., None], *arguments: Any) -> None:
        self._noted.append((count, arguments))
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
        self.num_background_tokens += stats.counts.num_background_tokens
        self.num_rows_sat_out += len(stats.counts.sat_out)
        self.max_prefill_tokens = stats.counts.max_prefill_tokens
        self.num_generated_tokens += stats.counts.num_sampled_tokens
        self.num_forced_tokens += sum(stats.counts.forced.values())
        if stats.counts.guesses:
            sources = stats.counts.guess_sources
            self.guesses.update([(sources[name], *nums) for name, nums in stats.counts.guesses.items()])
        self.batch_size.observe(stats.counts.num_rows)
        self.batch_tokens.observe(stats.counts.num_tokens)
        self._waits.on_step(stats)
        self.steps[stats.counts.waits_for or NO_WAIT] += 1
        key = (max(0, stats.counts.num_rows - 1).bit_length(), bool(stats.counts.prefills))
        same = self.steps_by_size.setdefault(key, [0, 0])
        same[0] += 1
        same[1] += stats.ended_ns - stats.started_ns - stats.waited_ns
        self._observe_part("total", stats.ended_ns - stats.started_ns)
        if stats.waited_ns:
            self._observe_part("turn", stats.waited_ns)
        self._observe_parts(stats.parts_ns)

    def _count_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None:
        for gap_ns in gaps_ns:
            self.itl_ns.observe(gap_ns)
        for request in first:
            self._count_first_token(request)
            if request.sampling.beams is None or not request.shares_prompt:  # all beams start with one computed prompt
                self._count_prompt(request)

    def _count_first_token(self, request: Request) -> None:
        if request.background:  # it waits for as long as others run
            return
        if request.first_token_ns is not None:
            ttft_ns = request.first_token_ns - request.arrival_ns
            self.ttft_ns.observe(ttft_ns, request.request_id)
        if request.first_scheduled_ns is not None:
            self.queue_ns.observe(request.first_scheduled_ns - request.arrival_ns, request.request_id)
            if request.first_token_ns is not None:
                self.prefill_ns.observe(request.first_token_ns - request.first_scheduled_ns, request.request_id)
            self._count_wait(request, request.first_scheduled_ns)

    def _count_wait(self, request: Request, scheduled_ns: int) -> None:
        queued_ns = request.arrival_ns
        if request.waits is not NO_WAITS:
            for name, part_ns in zip(WaitTimes._fields, request.waits, strict=True):
                self.wait_ns[name] += part_ns
                queued_ns += part_ns
        for reason, part_ns in self._waits.split(queued_ns, scheduled_ns).items():
            self.wait_ns[reason or NO_WAIT] += part_ns

    def _count_itl(self, is_met: bool) -> None:
        self.slo["itl", is_met] += 1

    def _count_finish(self, stats: RequestStats) -> None:
        if stats.key in self.tenants:
            self._count_key(stats)
        is_rejected = _is_rejected(stats)
        if is_rejected:
            self.rejected[stats.reject_reason] += 1
        else:
            self.success[stats.finish_reason] += 1
        if stats.background or (is_rejected and stats.first_token_ns is None):
            return  # a request cut in the queue would look like a fast one
        self._count_times(stats)
        self.prompt_tokens.observe(stats.num_prompt_tokens)
        self.generated_tokens.observe(stats.num_generated_tokens)
        if stats.first_token_ns is not None and stats.num_generated_tokens > 1 and not stats.is_beam:
            self.tpot_ns.observe((stats.ended_ns - stats.first_token_ns) / (stats.num_generated_tokens - 1))

    def _count_times(self, stats: RequestStats) -> None:
        ended_ns = stats.ended_ns
        scheduled_ns = ended_ns if stats.first_scheduled_ns is None else stats.first_scheduled_ns
        token_ns = ended_ns if stats.first_token_ns is None else stats.first_token_ns
        self.e2e_ns.observe(ended_ns - stats.arrival_ns, stats.request_id)
        if stats.first_token_ns is not None:
            self.decode_ns.observe(ended_ns - token_ns, stats.request_id)
        self.request_ns["queue"] += scheduled_ns - stats.arrival_ns
        self.request_ns["prefill"] += token_ns - scheduled_ns
        self.request_ns["decode"] += ended_ns - token_ns

    def _count_key(self, stats: RequestStats) -> None:
        self.tenant_requests[stats.key, "rejected" if _is_rejected(stats) else "ended"] += 1
        if stats.first_token_ns is not None:
            self.tenant_tokens[stats.key, "prompt"] += 0 if stats.shares_prompt else stats.num_prompt_tokens
            self.tenant_tokens[stats.key, "generation"] += stats.num_generated_tokens

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


def _is_rejected(stats: RequestStats) -> bool:
    """Return whether a request was refused, or cut by a time limit or by the server's end."""
    return bool(stats.reject_reason) or stats.finish_reason is FinishReason.REJECTED
