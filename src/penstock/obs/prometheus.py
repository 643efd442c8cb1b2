"""Writes metrics in Prometheus' text format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/).

The `/metrics` endpoint imports this when it is first called, since the client library takes 50 ms to import.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.obs.metrics import Histogram, Metrics, Residence
from penstock.obs.signals import SustainedLoad
from penstock.types.stats import (
    AdapterCounts,
    AdapterStats,
    BatchStats,
    EngineLoad,
    ReplicaLoad,
    TierStats,
    UpstreamStats,
    WaitReason,
)

__all__ = ["CONTENT_TYPE", "expose"]

_PREFIX = "penstock_"
_SECOND_NS = 1e9


def expose(*models: Metrics, upstreams: Sequence[UpstreamStats] = (), batches: BatchStats | None = None) -> bytes:
    """Return all metrics of the models in the format `CONTENT_TYPE`. Each model's numbers are consistent. Thread-safe."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Together([_Snapshot(metrics) for metrics in models]))
    if upstreams:
        registry.register(_Upstreams(upstreams))
    if batches is not None:
        registry.register(_Batches(batches))
    return generate_latest(registry)


class _Upstreams(Collector):
    def __init__(self, upstreams: Sequence[UpstreamStats]) -> None:
        self._upstreams = upstreams

    def collect(self) -> list[Metric]:
        requests = CounterMetricFamily(
            _PREFIX + "upstream_requests",
            "Requests to a model of another server, by how they ended.",
            labels=["upstream", "result"],
        )
        tokens = CounterMetricFamily(
            _PREFIX + "upstream_tokens",
            "Tokens of prompts and answers, as the upstream counts them.",
            labels=["upstream", "kind"],
        )
        resting = GaugeMetricFamily(
            _PREFIX + "upstream_resting", "1 while the upstream is left alone, since it failed.", labels=["upstream"]
        )
        for one in self._upstreams:
            for result, number in one.results.items():
                requests.add_metric([one.name, result], number)
            for kind, number in one.tokens.items():
                tokens.add_metric([one.name, kind], number)
            resting.add_metric([one.name], int(one.is_resting))
        return [requests, tokens, resting]


class _Batches(Collector):
    def __init__(self, stats: BatchStats) -> None:
        self._stats = stats

    def collect(self) -> list[Metric]:
        stats = self._stats
        lines = CounterMetricFamily(_PREFIX + "job_lines", "Lines of batches, by how they ended.", labels=["result"])
        for result, number in stats.lines.items():
            lines.add_metric([result], number)
        tokens = CounterMetricFamily(
            _PREFIX + "job_tokens", "Tokens of batches: input, those of them that were cached, and output.", labels=["kind"]
        )
        for kind, number in stats.tokens.items():
            tokens.add_metric([kind], number)
        left = GaugeMetricFamily(_PREFIX + "job_lines_left", "Lines that have no answer.", value=stats.num_lines_left)
        unfinished = GaugeMetricFamily(_PREFIX + "jobs", "Batches that have not ended.", value=stats.num_unfinished)
        return [lines, tokens, left, unfinished]


class _Together(Collector):
    """Merges the metrics of several models that have the same name."""

    def __init__(self, snapshots: Sequence[_Snapshot]) -> None:
        self._families: dict[str, Metric] = {}
        for snapshot in snapshots:
            for family in snapshot.families:
                if (known := self._families.setdefault(family.name, family)) is not family:
                    known.samples += family.samples

    def collect(self) -> list[Metric]:
        return list(self._families.values())


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
            self.families = [
                *self._gauges(load, waste),
                *self._signals(signals),
                self._gauge("prefill_chunk_tokens", "Most prompt tokens for the last step.", metrics.max_prefill_tokens),
                self._gauge("weight_bytes", "Size of the weights in memory; 0 if unknown.", metrics.num_weight_bytes),
                self._gauge("settings_info", "1, with a hash of the settings.", {metrics.settings_hash: 1}, "hash"),
                *self._counters(metrics),
                *self._tier(metrics.tier),
                *self._replicas(replicas, metrics.read_moves()),
                *self._residence(residence, metrics.model_wait_ns),
                *self._adapters(load.adapters, adapters),
                *self._sizes(metrics),
                *self._latencies(metrics),
            ]

    def _gauges(self, load: EngineLoad, waste: float) -> Iterator[Metric]:
        waiting = dict.fromkeys((reason.value or "step" for reason in WaitReason), 0)
        waiting[load.waits_for.value or "step"] = load.num_waiting
        blocks = {
            "free": load.num_blocks_free,
            "cached": load.num_blocks_cached,
            "held": load.num_blocks_held - load.num_blocks_shared,
            "shared": load.num_blocks_shared,
            "null": int(load.num_blocks_total > 0),
        }
        usage = load.num_blocks_held / load.num_blocks_total if load.num_blocks_total else 0.0
        yield self._gauge("requests_running", "Requests in the batch.", load.num_running)
        yield self._gauge("requests_background", "Background requests, running and waiting.", load.num_background)
        yield self._gauge("requests_waiting", "Waiting requests, by what the first of them waits for.", waiting, "reason")
        text = "KV cache blocks: free, free with cached content, held by one request, by several, null."
        yield self._gauge("kv_blocks", text, blocks, "state")
        yield self._gauge("kv_waste_ratio", "Share of the KV positions held by requests that have no token.", waste)
        yield self._gauge("kv_usage_ratio", "Share of the KV cache blocks held by requests.", usage)

    def _replicas(self, replicas: Sequence[ReplicaLoad] | None, moves: Mapping[str, int]) -> Iterator[Metric]:
        if replicas is None:
            return
        running = {one.name: one.load.num_running for one in replicas}
        used = {one.name: one.load.num_blocks_held / max(1, one.load.num_blocks_total) for one in replicas}
        left = {one.name: one.num_tokens_left for one in replicas}
        yield self._gauge("replicas", "Replicas that take requests.", sum(one.is_ready for one in replicas))
        yield self._gauge("replica_requests_running", "Requests in a replica's batch.", running, "replica")
        yield self._gauge("replica_kv_usage_ratio", "Share of a replica's KV blocks held by requests.", used, "replica")
        yield self._gauge("replica_tokens_left", "Tokens that a replica has yet to compute.", left, "replica")
        copied = {one.name: one.num_copied_tokens for one in replicas}
        yield self._counter("replica_copied_tokens", "Tokens whose KV a replica copied from another.", copied, "replica")
        yield self._counter("requests_moved", "Requests that went on at another replica.", moves, "reason")

    def _signals(self, load: SustainedLoad) -> Iterator[Metric]:
        for name, text, value in (
            ("drain_rate_requests_per_second", "Rate at which requests ended while others waited.", load.drain_rate),
            (
                "arrival_rate_requests_per_second",
                "Calls without timely retries, mean of 30 s.",
                load.arrivals_per_s,
            ),
            ("queue_depth_sustained", "Waiting requests, mean of 30 s.", load.queue_depth),
            ("queue_delay_seconds", "Time to drain the mean queue of 30 s.", load.queue_delay_s),
            ("utilisation_ratio", "Share of rows or KV blocks used, mean of 30 s; 1 while requests wait.", load.utilisation),
            ("kv_headroom_ratio", "Share of the KV blocks not held, mean of 30 s.", load.kv_headroom),
            ("desired_replicas", "Servers like this one that the load needs.", load.desired_replicas),
        ):
            yield self._gauge(name, text, value)

    def _counters(self, metrics: Metrics) -> Iterator[Metric]:
        prompt = {"computed": metrics.num_computed_prompt_tokens, "cached": metrics.num_cached_prompt_tokens}
        yield from self._ends(metrics)
        if metrics.routed:
            yield self._counter(
                "routed_requests", "Requests for which a route chose this model.", dict(metrics.routed), "route"
            )
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", metrics.num_prefix_query_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", metrics.num_prefix_hit_tokens)
        preemptions = {"recompute": metrics.num_preemptions - metrics.num_swaps, "swap": metrics.num_swaps}
        yield self._counter("preemptions", "Preemptions of running requests.", preemptions, "method")
        yield self._counter("recomputed_tokens", "Positions computed again after a preemption.", metrics.num_recomputed_tokens)
        yield self._counter("engine_restarts", "Restarts of the engine after a failure or a hang.", metrics.num_restarts)
        yield self._counter("padding_tokens", "Positions computed as padding.", metrics.num_padding_tokens)
        text = "Rows left out of a step because their grammar masks were not ready."
        yield self._counter("grammar_rows_sat_out", text, metrics.num_rows_sat_out)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.", prompt, "source")
        yield self._counter("generation_tokens", "Tokens generated.", metrics.num_generated_tokens)
        yield self._counter("forced_tokens", "Generated tokens that a grammar forced.", metrics.num_forced_tokens)
        guessed, accepted = Counter[str](), Counter[str]()
        for (num_guessed, num_accepted), num_rows in metrics.guesses.items():
            guessed.update({str(position): num_rows for position in range(1, num_guessed + 1)})
            accepted.update({str(position): num_rows for position in range(1, num_accepted + 1)})
        yield self._counter("guessed_tokens", "Guesses that steps checked, by place after a row's token.", guessed, "position")
        yield self._counter("accepted_tokens", "Those that the model agreed with.", accepted, "position")
        if metrics.tenants:
            yield self._of_tenants("requests", "Requests of a named key, by outcome.", "outcome", metrics.tenant_requests)
            yield self._of_tenants("tokens", "Tokens of a named key's requests.", "kind", metrics.tenant_tokens)
        if metrics.num_shared_texts is not None:
            yield self._counter("shared_texts", "Texts answered without being computed.", metrics.num_shared_texts)

    def _of_tenants(self, name: str, text: str, label: str, counts: Mapping[tuple[str, str], int]) -> Metric:
        family = CounterMetricFamily(f"{_PREFIX}tenant_{name}", text, labels=["model", "tenant", label])
        for (tenant, kind), number in counts.items():
            family.add_metric([self._model, tenant, kind], number)
        return family

    def _ends(self, metrics: Metrics) -> Iterator[Metric]:
        success = {reason.name.lower(): count for reason, count in metrics.success.items()}
        yield self._counter("request_success", "Requests that ended, by finish reason.", success, "finish_reason")
        yield self._counter("requests_rejected", "Requests that were refused.", metrics.rejected, "reason")
        text = "Requests with a target, by whether they met it."
        slo = CounterMetricFamily(_PREFIX + "slo_attainment", text, labels=["model", "slo", "met"])
        for target, is_met in itertools.product(("ttft", "itl"), (True, False)):
            slo.add_metric([self._model, target, str(is_met).lower()], metrics.slo[target, is_met])
        yield slo

    def _tier(self, tier: TierStats) -> Iterator[Metric]:
        if not tier.num_slots:
            return
        present = min(tier.num_present, tier.num_slots)
        slots = {"present": present, "other": tier.num_slots - present}
        blocks = {"spilled": tier.num_spilled_blocks, "loaded": tier.num_loaded_blocks}
        moved = {"written": tier.num_written_bytes, "read": tier.num_read_bytes}
        failures = dict(sorted(tier.failures.items()))
        name, words = f"kv_{tier.medium}", f"{tier.medium} tier"
        dropped = tier.num_dropped_blocks
        yield self._gauge(f"{name}_up", f"1 while the {words} is in use, 0 after too many failures.", tier.is_open)
        yield self._gauge(f"{name}_slots", f"Slots for blocks in the {words}.", slots, "state")
        yield self._counter(f"{name}_blocks", f"KV blocks moved to and from the {words}.", blocks, "direction")
        yield self._counter(f"{name}_bytes", f"Bytes written to and read from the {words}.", moved, "direction")
        yield self._counter(f"{name}_dropped_blocks", "KV blocks not written because too many were being written.", dropped)
        yield self._counter(f"{name}_failures", "Failed transfers of KV blocks, by reason.", failures, "reason")

    def _adapters(self, pool: AdapterCounts, beside: AdapterStats | None) -> Iterator[Metric]:
        """Yield the adapters' metrics, if the model has any. Adapter names are not labels: clients can make any number of
        them."""
        if beside is None:
            return
        places = {"running": pool.num_running, "idle": pool.num_resident - pool.num_running, "memory": beside.num_in_memory}
        loads = {"ok": beside.num_loads, "failed": beside.num_failures}
        evictions = {"kv_cache": pool.num_evictions, "memory": beside.num_evictions}
        text = "Adapters in the KV cache (running or idle), and in memory beside it."
        yield self._gauge("adapters", text, places, "place")
        yield self._gauge("adapter_names", "Registered adapters.", beside.num_registered)
        yield self._gauge("adapter_kv_blocks", "KV cache blocks that hold adapters.", pool.num_blocks)
        yield self._gauge("adapter_memory_bytes", "Size of adapters in memory beside the KV cache.", beside.num_bytes)
        yield self._counter("adapter_loads", "Adapters read from files.", loads, "result")
        yield self._counter("adapter_load_seconds", "Time to read, check and pack adapters.", beside.load_ns / _SECOND_NS)
        yield self._counter("adapter_placements", "Adapters copied into the KV cache.", pool.num_placements)
        yield self._counter("adapter_evictions", "Evicted adapters.", evictions, "place")

    def _residence(self, residence: Residence | None, wait_ns: Histogram) -> Iterator[Metric]:
        if residence is None:
            return
        states = {state: int(state == residence.state) for state in residence.states}
        yield self._gauge("model_state", "1 for the state that the model is in.", states, "state")
        yield self._gauge("model_requests_waiting_for_load", "Requests waiting for the model to load.", residence.num_waiting)
        yield self._histogram("model_wait_seconds", "Successful waits for the model to load.", wait_ns, _SECOND_NS)
        loads = {"ok": residence.num_loads, "failed": residence.num_load_failures}
        yield self._counter("model_loads", "Loads of the model, by result.", loads, "result")
        yield self._counter("model_load_seconds", "Time of successful loads.", residence.load_ns / _SECOND_NS)
        yield self._counter("model_unloads", "Unloads of the model.", residence.num_unloads, "reason")
        yield self._gauge("memory_bytes", "Memory that the loaded model may use, by part.", residence.memory_bytes, "part")
        text = "Time in which the model's steps used the CPU; 0 if steps take no turns."
        yield self._counter("machine_seconds", text, residence.machine_ns / _SECOND_NS)

    def _sizes(self, metrics: Metrics) -> Iterator[Metric]:
        yield self._histogram("batch_size", "Requests with a row, per step.", metrics.batch_size, 1.0)
        yield self._histogram("batch_tokens", "Positions computed per step.", metrics.batch_tokens, 1.0)

    def _latencies(self, metrics: Metrics) -> Iterator[Metric]:
        steps = HistogramMetricFamily(
            _PREFIX + "step_seconds", "Duration of a step and of its parts.", labels=["model", "part"]
        )
        for part, histogram in metrics.step_ns.items():
            steps.add_metric([self._model, part], *histogram.snapshot(_SECOND_NS))
        yield steps
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", metrics.ttft_ns),
            ("time_per_output_token_seconds", "Mean gap between tokens, per request.", metrics.tpot_ns),
            ("e2e_request_latency_seconds", "From arrival to the end.", metrics.e2e_ns),
            ("queue_time_seconds", "From arrival to the first step with the request.", metrics.queue_ns),
        ):
            yield self._histogram(name, text, histogram, _SECOND_NS)
        yield self._histogram("grammar_wait_seconds", "Waits for grammars to compile.", metrics.grammar_wait_ns, _SECOND_NS)
        text = "Gaps between two tokens of one request."
        yield self._histogram("inter_token_latency_seconds", text, metrics.itl_ns, _SECOND_NS)

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(GaugeMetricFamily(_PREFIX + name, text, labels=["model", *filter(None, [label])]), value)

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(CounterMetricFamily(_PREFIX + name, text, labels=["model", *filter(None, [label])]), value)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]) -> Metric:
        if isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric([self._model, key], number)
        else:
            family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram, unit: float) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["model"])
        family.add_metric([self._model], *histogram.snapshot(unit))
        return family
