"""Metrics: what Prometheus reads must be what happened."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.ports import ObserverGroup
from penstock.obs.metrics import MAX_NOTED, Histogram, Metrics, Residence
from penstock.obs.prometheus import expose
from penstock.obs.signals import SustainedLoad
from penstock.types.errors import RejectReason
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import BeamParams, EarlyStopping, SamplingParams
from penstock.types.stats import EngineLoad, RequestStats, StepCounts, StepStats, TierStats, WaitReason

MS = 1_000_000


def make_step(**changes) -> StepStats:
    """`changes`: of its counts."""
    counts = {
        "num_rows": 3,
        "num_tokens": 40,
        "num_sampled_tokens": 3,
        "num_preemptions": 1,
        "num_recomputed_tokens": 7,
        "num_prefix_query_tokens": 32,
        "num_prefix_hit_tokens": 16,
    }
    return StepStats(
        step_id=1,
        started_ns=0,
        ended_ns=30 * MS,
        num_running=3,
        num_waiting=2,
        num_blocks_total=10,
        num_blocks_free=4,
        num_blocks_cached=1,
        counts=StepCounts(**(counts | changes)),
        parts_ns={"execute": 25 * MS},
    )


def make_end(**changes) -> RequestStats:
    defaults = {
        "request_id": "a",
        "tenant": "",
        "arrival_ns": 0,
        "first_scheduled_ns": 10 * MS,
        "first_token_ns": 100 * MS,
        "ended_ns": 500 * MS,
        "num_prompt_tokens": 50,
        "num_cached_tokens": 16,
        "num_generated_tokens": 5,
        "num_preemptions": 0,
        "finish_reason": FinishReason.STOP,
    }
    return RequestStats(**(defaults | changes))


def make_request(**changes) -> Request:
    defaults = {"arrival_ns": 0, "first_scheduled_ns": 10 * MS, "first_token_ns": 100 * MS, "num_cached_tokens": 16}
    return Request("a", tuple(range(50)), SamplingParams(), **(defaults | changes))


def read(metrics: Metrics) -> dict[tuple[str, frozenset], float]:
    """(series, labels without `model`) -> value."""
    values = {}
    for family in text_string_to_metric_families(expose(metrics).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model") == metrics.model
            key = (sample.name, frozenset(labels.items()))
            assert key not in values
            values[key] = sample.value
    return values


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return read(metrics)[f"penstock_{name}", frozenset(labels.items())]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


def test_a_fresh_server_already_shows_its_series(metrics):
    names = {name for name, _ in read(metrics)}
    for name in (
        "requests_running",
        "requests_waiting",
        "request_success_total",
        "kv_blocks",
        "kv_usage_ratio",
        "prefill_chunk_tokens",
        "weight_bytes",
        "settings_info",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "preemptions_total",
        "recomputed_tokens_total",
        "padding_tokens_total",
        "grammar_rows_sat_out_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "batch_size_bucket",
        "batch_tokens_sum",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_bucket",
        "time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "queue_time_seconds_bucket",
        "drain_rate_requests_per_second",
    ):
        assert f"penstock_{name}" in names


def test_a_step_counts_its_tokens_rows_and_parts(metrics):
    metrics.on_step(make_step())
    metrics.on_step(make_step(num_rows=5))
    assert value(metrics, "generation_tokens_total") == 6
    assert value(metrics, "prefix_cache_queries_total") == 64
    assert value(metrics, "prefix_cache_hits_total") == 32
    assert value(metrics, "preemptions_total", method="recompute") == 2
    assert value(metrics, "recomputed_tokens_total") == 14
    assert value(metrics, "batch_size_sum") == 8
    assert value(metrics, "batch_size_bucket", le="4.0") == 1
    assert value(metrics, "batch_tokens_sum") == 80
    assert value(metrics, "step_seconds_sum", part="total") == pytest.approx(0.06)
    assert value(metrics, "step_seconds_count", part="execute") == 2


def test_gauges_are_read_when_asked(metrics):
    load = EngineLoad(num_running=3, num_waiting=2, num_blocks_total=10, num_blocks_free=4, num_blocks_cached=1)
    load = load._replace(waits_for=WaitReason.MEMORY, num_blocks_shared=2)
    metrics.connect(load=lambda: load, signals=lambda: SustainedLoad(drain_rate=2.5, desired_replicas=3))
    assert value(metrics, "requests_running") == 3
    assert value(metrics, "requests_waiting", reason="memory") == 2
    assert value(metrics, "requests_waiting", reason="rows") == 0
    states = ("free", "cached", "held", "shared", "null")
    assert [value(metrics, "kv_blocks", state=state) for state in states] == [4, 1, 3, 2, 1]
    assert value(metrics, "kv_usage_ratio") == 0.5
    metrics.max_prefill_tokens = 80
    assert value(metrics, "prefill_chunk_tokens") == 80
    metrics.num_weight_bytes = 1000
    assert value(metrics, "weight_bytes") == 1000
    assert value(metrics, "drain_rate_requests_per_second") == 2.5
    assert value(metrics, "desired_replicas") == 3


def test_latencies_are_counted_in_seconds_when_they_happen(metrics):
    metrics.on_tokens([make_request()], [20 * MS, 30 * MS])
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "queue_time_seconds_sum") == pytest.approx(0.01)
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.05)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.02") == 1
    assert value(metrics, "prompt_tokens_total", source="computed") == 34
    assert value(metrics, "prompt_tokens_total", source="cached") == 16


def test_buckets_begin_at_a_millisecond(metrics):
    metrics.on_tokens([make_request(first_scheduled_ns=MS)], [])
    assert value(metrics, "queue_time_seconds_bucket", le="0.001") == 1


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_an_ended_request_is_counted_by_its_reason(metrics, reason):
    metrics.on_finish(make_end(finish_reason=FinishReason[reason.upper()]))
    assert value(metrics, "request_success_total", finish_reason=reason) == 1
    assert value(metrics, "e2e_request_latency_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_a_refused_request_is_counted_once_by_its_reason(metrics):
    metrics.on_finish(make_end(finish_reason=FinishReason.REJECTED, reject_reason="never_fits"))
    metrics.on_finish(make_end(finish_reason=FinishReason.ABORT, reject_reason="deadline"))
    metrics.count_rejected("queue_full")
    values = read(metrics)
    for reason in ("never_fits", "deadline", "queue_full"):
        assert values["penstock_requests_rejected_total", frozenset({("reason", reason)})] == 1
    assert sum(count for (name, _), count in values.items() if name == "penstock_request_success_total") == 0


@pytest.mark.parametrize("reason", RejectReason)
def test_the_series_of_a_reason_is_there_before_its_first_refusal(metrics, reason):
    assert value(metrics, "requests_rejected_total", reason=str(reason)) == 0


def test_one_token_has_no_time_per_output_token(metrics):
    metrics.on_finish(make_end(num_generated_tokens=1))
    assert value(metrics, "time_per_output_token_seconds_count") == 0


def test_texts_that_were_shared_are_told_of_a_model_that_reads_texts(metrics):
    assert b"shared_texts" not in expose(metrics)
    metrics.num_shared_texts = 7
    assert b'penstock_shared_texts_total{model="m"} 7.0' in expose(metrics)


def test_labels_are_escaped():
    assert value(Metrics('a"b\\c\nd'), "requests_running") == 0


def test_reading_while_writing_sees_whole_steps(metrics):
    num_steps, finished = 3_000, threading.Event()

    def write() -> None:
        for _ in range(num_steps):
            metrics.on_step(make_step(num_sampled_tokens=1, num_rows=1))
        finished.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not finished.is_set():
        values = read(metrics)
        count = values["penstock_batch_size_count", frozenset()]
        assert values["penstock_generation_tokens_total", frozenset()] == count
        assert values["penstock_batch_size_bucket", frozenset({("le", "+Inf")})] == count
    writer.join()
    assert value(metrics, "generation_tokens_total") == num_steps


def test_what_is_told_does_not_pile_up(metrics):
    for _ in range(10 * MAX_NOTED):
        metrics.on_step(make_step())
        metrics.on_finish(make_end())
        assert len(metrics._noted) < MAX_NOTED
    assert value(metrics, "generation_tokens_total") == 30 * MAX_NOTED
    assert value(metrics, "request_success_total", finish_reason="stop") == 10 * MAX_NOTED


def test_a_group_tells_every_observer():
    group_of = [Metrics("a"), Metrics("b")]
    group = ObserverGroup(group_of)
    group.on_step(make_step())
    group.on_finish(make_end())
    for one in group_of:
        assert value(one, "generation_tokens_total") == 3
        assert value(one, "request_success_total", finish_reason="stop") == 1


@given(st.lists(st.floats(0, 200)))
def test_histogram_buckets_hold_what_lies_at_or_below_their_edge(values):
    histogram = Histogram((1, 10, 100))
    for value in values:
        histogram.observe(value)
    buckets, total = histogram.snapshot()
    assert [count for _, count in buckets] == [sum(v <= edge for v in values) for edge in (1, 10, 100, float("inf"))]
    assert total == pytest.approx(sum(values))


RESIDENCE = Residence(
    state="loaded",
    states=("loaded", "unloaded"),
    num_waiting=0,
    num_loads=1,
    num_load_failures=0,
    load_ns=1_500_000_000,
    num_unloads={"idle": 0},
    memory_bytes={"weights": 5},
    machine_ns=2_000_000_000,
)


def test_times_of_loads_and_turns_are_seconds(metrics):
    metrics.read_residence = lambda: RESIDENCE
    metrics.on_step(replace(make_step(), waited_ns=3_000_000))
    metrics.on_step(make_step())
    assert value(metrics, "model_load_seconds_total") == 1.5
    assert value(metrics, "machine_seconds_total") == 2.0
    assert value(metrics, "memory_bytes", part="weights") == 5
    assert value(metrics, "step_seconds_count", part="turn") == 1, "the other step did not wait"
    assert value(metrics, "step_seconds_sum", part="turn") == pytest.approx(0.003)


def test_every_series_is_listed_in_the_documentation(metrics):
    metrics.tier = TierStats(num_slots=1)
    metrics.read_residence = lambda: RESIDENCE
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    families = {line.split(" ")[2] for line in expose(metrics).decode().splitlines() if line.startswith("# TYPE")}
    assert not {name for name in families if f"`{name}`" not in page}


def test_the_prompt_of_a_beam_search_counts_once_and_its_tokens_have_no_gaps() -> None:
    metrics = Metrics("m")
    beams = BeamParams(width=2, length_penalty=1.0, early_stopping=EarlyStopping.NEVER, num_logprobs=None)
    searched = SamplingParams(temperature=0.0, beams=beams, logprobs=3)
    requests = [Request(f"{idx}", (1,) * 50, searched, 0, parent_id=f"search {idx // 2}") for idx in range(4)]
    requests += [Request(f"n{idx}", (1,) * 50, SamplingParams(), 0, parent_id="both") for idx in range(2)]
    metrics.on_tokens(requests, ())
    metrics.on_finish(make_end(is_beam=True))
    metrics.on_finish(make_end())
    metrics.settle()
    assert metrics.num_computed_prompt_tokens == 4 * 50
    buckets, _sum = metrics.tpot_ns.snapshot()
    assert buckets[-1] == ("+Inf", 1.0)
