"""Exposes metrics under vLLM's names, for its dashboards and for gateways that scrape them (`--metrics-compat vllm`).

Names as of vLLM's docs/usage/metrics.md and the Gateway API inference extension's model server protocol, November 2026.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from penstock.obs.metrics import Metrics
from penstock.obs.table import PREFIX

_SAME = """
prefix_cache_queries prefix_cache_hits prompt_tokens generation_tokens request_success request_prompt_tokens
request_generation_tokens time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
"""
NAMES = dict.fromkeys(_SAME.split(), "") | {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_usage_ratio",
    "gpu_cache_usage_perc": "kv_usage_ratio",  # its older name
    "num_preemptions": "preemptions",
    "iteration_tokens_total": "batch_tokens",
    "request_max_num_generation_tokens": "request_generation_tokens",  # each choice of a call counts for itself
    "time_per_output_token_seconds": "inter_token_latency_seconds",  # its older name
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "request_prefill_time_seconds": "prefill_time_seconds",
    "request_decode_time_seconds": "decode_time_seconds",
}
"""vLLM's name -> ours, or empty if that is the same; without the prefixes."""

_LABELS = {"model": "model_name", "finish_reason": "finished_reason", "le": "le"}
"""Our label -> vLLM's. Values are summed over all other labels."""


def vllm_families(families: Iterable[Metric], models: Sequence[Metrics]) -> list[Metric]:
    """Return copies, under vLLM's names, of the metric families that vLLM has too."""
    known = {family.name: family for family in families}
    renamed = [_renamed(known[PREFIX + (ours or theirs)], f"vllm:{theirs}") for theirs, ours in NAMES.items()]
    with_adapters = [metrics for metrics in models if metrics.read_adapters is not None and metrics.holds_adapters]
    return [*renamed, _adapters(with_adapters)] if with_adapters else renamed


def _adapters(models: Sequence[Metrics]) -> Metric:
    """Return the adapters in the KV cache, for gateways that route by adapter. The value is the Unix time.

    One series for all models, with vLLM's labels. Each new set of ready adapters starts another series.
    """
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that are ready.", labels=labels)
    names = {name for one in models for name in one.read_adapter_names(one.read_load().adapters.numbers)}
    family.add_metric((str(sum([one.max_adapters for one in models])), ",".join(sorted(names)), ""), time.time())
    return family


def _renamed(family: Metric, name: str) -> Metric:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, Exemplar | None]] = {}
    for sample in family.samples:
        labels = tuple([(_LABELS[label], value) for label, value in sample.labels.items() if label in _LABELS])
        key = name + sample.name.removeprefix(family.name), labels
        sums[key] = sums.get(key, (0.0, None))[0] + sample.value, sample.exemplar
    renamed = Metric(name, family.documentation, family.type)
    for (series, labels), (value, exemplar) in sums.items():
        renamed.add_sample(series, {**dict(labels), "engine": "0"}, value, exemplar=exemplar)
    return renamed
