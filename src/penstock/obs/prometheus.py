"""Writes metrics in Prometheus' text format 0.0.4, or as OpenMetrics 1.0, which adds request exemplars to histograms.

The `/metrics` endpoint imports this when it is first called, since the client library takes 50 ms to import.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as PLAIN
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_METRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from penstock.obs.metrics import NO_WAIT, Histogram, Metrics, Residence
from penstock.obs.signals import SustainedLoad
from penstock.obs.table import METRICS, PREFIX
from penstock.obs.vllm_names import vllm_families
from penstock.types.stats import (
    AdapterCounts,
    AdapterStats,
    BatchStats,
    EngineLoad,
    ReplicaLoad,
    RouteStats,
    TierStats,
    UpstreamStats,
    WaitReason,
)

__all__ = ["OPEN_METRICS", "PLAIN", "expose"]

_SECOND_NS = 1e9
_MAX_EXAMPLE = 116
"""Longest id in an exemplar: its labels may total 128 characters."""


def expose(
    *models: Metrics,
    upstreams: Sequence[UpstreamStats] = (),
    routes: Sequence[RouteStats] = (),
    batches: BatchStats | None = None,
    traces: Mapping[str, int] | None = None,
    cpu_ns: Mapping[str, int] | None = None,
    process: bool = False,
    vllm: bool = False,
    content_type: str = PLAIN,
) -> bytes:
    """Return all metrics of the models, in the format `PLAIN` or `OPEN_METRICS`. Each model's numbers are consistent.

    `cpu_ns` is the time of the process's threads by state. `process` adds metrics of this process, `vllm` vLLM's names for
    some metrics. Thread-safe.
    """
    families = _merged([_Snapshot(metrics).families for metrics in models])
    if vllm:
        families += vllm_families(families, models)
    if upstreams:
        families += _of_upstreams(upstreams)
    if routes:
        families += _of_routes(routes)
    if batches is not None:
        families += _of_batches(batches)
    if traces is not None:
        families.append(_family("traced_requests", [((result,), number) for result, number in traces.items()]))
    if cpu_ns is not None:
        families.append(_family("cpu_seconds", [((state,), ns / _SECOND_NS) for state, ns in cpu_ns.items()]))
    if process:
        families += ProcessCollector(registry=None).collect()
    write: Callable[..., bytes] = generate_open_metrics if content_type == OPEN_METRICS else generate_latest
    return write(_Families(families), escaping=ALLOWUTF8)  # otherwise OpenMetrics forbids the colons of vLLM's names


class _Families(list[Metric], Collector):
    def collect(self) -> list[Metric]:
        return self


Value = float | Histogram | Mapping[str, float] | Mapping[tuple[str, str], float]
"""A number, a histogram, or numbers by labels other than `model`."""
_TYPES: Mapping[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


def _family(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """Return a family of the table with a value for each combination of labels."""
    spec = METRICS[name]
    family = _TYPES[spec.kind](PREFIX + name, spec.help, labels=spec.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _of_upstreams(upstreams: Sequence[UpstreamStats]) -> list[Metric]:
    results = [((one.name, result), number) for one in upstreams for result, number in one.results.items()]
    tokens = [((one.name, kind), number) for one in upstreams for kind, number in one.tokens.items()]
    return [
        _family("upstream_requests", results),
        _family("upstream_tokens", tokens),
        _family("upstream_resting", [((one.name,), int(one.is_resting)) for one in upstreams]),
    ]


def _of_routes(routes: Sequence[RouteStats]) -> list[Metric]:
    return [
        _family("route_cost_dollars", [((one.name, model), usd) for one in routes for model, usd in one.paid.items()]),
        _family("route_full_cost_dollars", [((one.name,), one.full) for one in routes if one.paid]),
        _family("route_drift_ratio", [((one.name,), one.drift) for one in routes if one.drift is not None]),
    ]


def _of_batches(stats: BatchStats) -> list[Metric]:
    return [
        _family("job_lines", [((result,), number) for result, number in stats.lines.items()]),
        _family("job_tokens", [((kind,), number) for kind, number in stats.tokens.items()]),
        _family("job_lines_left", [((), stats.num_lines_left)]),
        _family("jobs", [((), stats.num_unfinished)]),
    ]


def _merged(models: Sequence[Sequence[Metric]]) -> list[Metric]:
    """Return the families of several models, each with the samples of all of them."""
    merged: dict[str, Metric] = {}
    for family in itertools.chain.from_iterable(models):
        if (known := merged.setdefault(family.name, family)) is not family:
            known.samples += family.samples
    return [*merged.values()]


class _Snapshot:
    """Copies one model's numbers under its lock. Text is made after the lock is released."""

    def __init__(self, metrics: Metrics) -> None:
        self._model = metrics.model
        # These have locks of their own.
        replicas = None if metrics.read_replicas is None else metrics.read_replicas()
        load, signals, waste = metrics.read_load(), metrics.read_signals(), metrics.read_waste()
        adapters = metrics.read_adapters() if metrics.read_adapters else None
        residence = None if metrics.read_residence is None else metrics.read_residence()
        with metrics.lock:
            metrics.settle()
            values: dict[str, Value] = {
                **_of_requests(metrics, load),
                **_of_steps(metrics),
                **_of_kv(metrics, load, waste),
                **_of_tier(metrics.tier),
                **_of_load(signals),
                "weight_bytes": metrics.num_weight_bytes,
                "settings_info": {metrics.settings_hash: 1},
                **({} if replicas is None else _of_replicas(metrics, replicas)),
                **({} if residence is None else _of_residence(residence, metrics.model_wait_ns)),
                **({} if adapters is None else _of_adapters(adapters, load.adapters if metrics.holds_adapters else None)),
                **_of_latencies(metrics),
            }
            self.families = [*(self._made(name, value) for name, value in values.items()), *self._by_key(metrics)]

    def _made(self, name: str, value: Value) -> Metric:
        if isinstance(value, Histogram):
            return self._histograms(name, {(): value})
        if isinstance(value, Mapping):
            keyed = [((key,) if isinstance(key, str) else key, number) for key, number in value.items()]
            return _family(name, [((self._model, *labels), number) for labels, number in keyed])
        return _family(name, [((self._model,), value)])

    def _by_key(self, metrics: Metrics) -> list[Metric]:
        """Return the summaries and histograms with labels other than `model`."""
        sizes = METRICS["step_size_seconds"]
        summary = SummaryMetricFamily(PREFIX + "step_size_seconds", sizes.help, labels=sizes.labels)
        for (num_bits, has_prompts), (num_steps, steps_ns) in sorted(metrics.steps_by_size.items()):
            labels = (self._model, str(1 << num_bits), "yes" if has_prompts else "no")
            summary.add_metric(labels, num_steps, steps_ns / _SECOND_NS)
        return [summary, self._histograms("step_seconds", {(part,): one for part, one in metrics.step_ns.items()})]

    def _histograms(self, name: str, histograms: Mapping[tuple[str, ...], Histogram]) -> Metric:
        spec = METRICS[name]
        unit = _SECOND_NS if name.endswith("_seconds") else 1.0
        family = HistogramMetricFamily(PREFIX + name, spec.help, labels=spec.labels)
        for labels, histogram in histograms.items():
            counts, total = histogram.snapshot(unit)
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [*counts]
            for idx, (engine_id, value) in histogram.examples(unit).items():
                request_id = engine_id.rpartition("/")[0] or engine_id
                if len(request_id) <= _MAX_EXAMPLE:
                    buckets[idx] = (*counts[idx], Exemplar({"request_id": request_id}, value))
            family.add_metric((self._model, *labels), buckets, total)
        return family


def _of_requests(metrics: Metrics, load: EngineLoad) -> dict[str, Value]:
    waiting = dict.fromkeys((reason.value or NO_WAIT for reason in WaitReason), 0)
    waiting[load.waits_for.value or NO_WAIT] = load.num_waiting
    guessed, accepted = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (source, num_guessed, num_accepted), num_rows in metrics.guesses.items():
        guessed.update({(source, str(position)): num_rows for position in range(1, num_guessed + 1)})
        accepted.update({(source, str(position)): num_rows for position in range(1, num_accepted + 1)})
    targets = itertools.product(("ttft", "ttft_asked", "itl"), (True, False))
    values: dict[str, Value] = {
        "requests_running": load.num_running,
        "requests_background": load.num_background,
        "requests_waiting": waiting,
        "request_success": {reason.name.lower(): count for reason, count in metrics.success.items()},
        "requests_rejected": metrics.rejected,
        "slo_attainment": {(target, str(is_met).lower()): metrics.slo[target, is_met] for target, is_met in targets},
        "prompt_tokens": {"computed": metrics.num_computed_prompt_tokens, "cached": metrics.num_cached_prompt_tokens},
        "generation_tokens": metrics.num_generated_tokens,
        "forced_tokens": metrics.num_forced_tokens,
        "guessed_tokens": guessed,
        "accepted_tokens": accepted,
        "request_prompt_tokens": metrics.prompt_tokens,
        "request_generation_tokens": metrics.generated_tokens,
    }
    if metrics.routed:
        values["routed_requests"] = metrics.routed
    if metrics.checked:
        values["checked_answers"] = metrics.checked
    if metrics.tenants:
        values |= {"tenant_requests": metrics.tenant_requests, "tenant_tokens": metrics.tenant_tokens}
    if metrics.num_shared_texts is not None:
        values["shared_texts"] = metrics.num_shared_texts
    return values


def _of_latencies(metrics: Metrics) -> dict[str, Value]:
    return {
        "time_to_first_token_seconds": metrics.ttft_ns,
        "queue_time_seconds": metrics.queue_ns,
        "prefill_time_seconds": metrics.prefill_ns,
        "decode_time_seconds": metrics.decode_ns,
        "e2e_request_latency_seconds": metrics.e2e_ns,
        "time_per_output_token_seconds": metrics.tpot_ns,
        "inter_token_latency_seconds": metrics.itl_ns,
        "request_seconds": {part: part_ns / _SECOND_NS for part, part_ns in metrics.request_ns.items()},
        "queue_wait_seconds": {reason: wait_ns / _SECOND_NS for reason, wait_ns in metrics.wait_ns.items()},
        "grammar_wait_seconds": metrics.grammar_wait_ns,
    }


def _of_steps(metrics: Metrics) -> dict[str, Value]:
    return {
        "batch_size": metrics.batch_size,
        "batch_tokens": metrics.batch_tokens,
        "batch_limit_rows": metrics.max_rows,
        "batch_limit_tokens": metrics.max_step_tokens,
        "steps": metrics.steps,
        "prefill_chunk_tokens": metrics.max_prefill_tokens,
        "background_tokens": metrics.num_background_tokens,
        "padding_tokens": metrics.num_padding_tokens,
        "grammar_rows_sat_out": metrics.num_rows_sat_out,
        "client_wait_seconds": metrics.client_wait_ns / _SECOND_NS,
        "engine_restarts": metrics.num_restarts,
    }


def _of_kv(metrics: Metrics, load: EngineLoad, waste: float) -> dict[str, Value]:
    return {
        "kv_blocks": {
            "free": load.num_blocks_free,
            "cached": load.num_blocks_cached,
            "held": load.num_blocks_held - load.num_blocks_shared,
            "shared": load.num_blocks_shared,
            "null": int(load.num_blocks_total > 0),
        },
        "kv_waste_ratio": waste,
        "kv_usage_ratio": load.num_blocks_held / load.num_blocks_total if load.num_blocks_total else 0.0,
        "prefix_cache_queries": metrics.num_prefix_query_tokens,
        "prefix_cache_hits": metrics.num_prefix_hit_tokens,
        "preemptions": {"recompute": metrics.num_preemptions - metrics.num_swaps, "swap": metrics.num_swaps},
        "recomputed_tokens": metrics.num_recomputed_tokens,
    }


def _of_tier(tier: TierStats) -> dict[str, Value]:
    if not tier.num_slots:
        return {}
    name, present = f"kv_{tier.medium}", min(tier.num_present, tier.num_slots)
    return {
        f"{name}_up": tier.is_open,
        f"{name}_slots": {"present": present, "other": tier.num_slots - present},
        f"{name}_blocks": {"spilled": tier.num_spilled_blocks, "loaded": tier.num_loaded_blocks},
        f"{name}_bytes": {"written": tier.num_written_bytes, "read": tier.num_read_bytes},
        f"{name}_dropped_blocks": tier.num_dropped_blocks,
        f"{name}_declined_blocks": tier.num_declined_blocks,
        f"{name}_failures": dict(sorted(tier.failures.items())),
    }


def _of_load(load: SustainedLoad) -> dict[str, Value]:
    return {
        "drain_rate_requests_per_second": load.drain_rate,
        "arrival_rate_requests_per_second": load.arrivals_per_s,
        "queue_depth_sustained": load.queue_depth,
        "queue_delay_seconds": load.queue_delay_s,
        "utilisation_ratio": load.utilisation,
        "kv_headroom_ratio": load.kv_headroom,
        "desired_replicas": load.desired_replicas,
    }


def _of_replicas(metrics: Metrics, replicas: Sequence[ReplicaLoad]) -> dict[str, Value]:
    decisions = metrics.read_decisions()
    return {
        "replicas": sum(one.is_ready for one in replicas),
        "wanted_replicas": decisions[0].num_replicas if decisions else metrics.num_replicas,
        "replica_requests_running": {one.name: one.load.num_running for one in replicas},
        "replica_kv_usage_ratio": {one.name: one.load.num_blocks_held / max(1, one.load.num_blocks_total) for one in replicas},
        "replica_tokens_left": {one.name: one.num_tokens_left for one in replicas},
        "replica_copied_tokens": {one.name: one.num_copied_tokens for one in replicas},
        "requests_moved": metrics.read_moves(),
    }


def _of_residence(residence: Residence, wait_ns: Histogram) -> dict[str, Value]:
    return {
        "model_state": {state: int(state == residence.state) for state in residence.states},
        "model_requests_waiting_for_load": residence.num_waiting,
        "model_wait_seconds": wait_ns,
        "model_loads": {"ok": residence.num_loads, "failed": residence.num_load_failures},
        "model_load_seconds": residence.load_ns / _SECOND_NS,
        "model_unloads": residence.num_unloads,
        "memory_bytes": residence.memory_bytes,
        "machine_seconds": residence.machine_ns / _SECOND_NS,
    }


def _of_adapters(beside: AdapterStats, pool: AdapterCounts | None) -> dict[str, Value]:
    """Return the adapters' metrics. Adapter names are not labels: clients can make any number of them."""
    values: dict[str, Value] = {
        "adapter_names": beside.num_registered,
        "adapter_loads": {"ok": beside.num_loads, "failed": beside.num_failures},
        "adapter_load_seconds": beside.load_ns / _SECOND_NS,
    }
    if pool is None:
        return values
    num_idle = pool.num_resident - pool.num_running
    return values | {
        "adapters": {"running": pool.num_running, "idle": num_idle, "memory": beside.num_in_memory},
        "adapter_kv_blocks": pool.num_blocks,
        "adapter_memory_bytes": beside.num_bytes,
        "adapter_placements": pool.num_placements,
        "adapter_evictions": {"kv_cache": pool.num_evictions, "memory": beside.num_evictions},
    }
