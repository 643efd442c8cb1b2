"""Metrics: what Prometheus reads must be what happened."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.ports import ObserverGroup
from penstock.obs.metrics import MAX_NOTED, Histogram, Metrics, Residence
from penstock.obs.prometheus import OPEN_METRICS, expose
from penstock.obs.signals import SustainedLoad
from penstock.obs.table import METRICS, PREFIX
from penstock.obs.vllm_names import NAMES
from penstock.types.errors import RejectReason
from penstock.types.plan import RowPlan
from penstock.types.request import FinishReason, Request, WaitTimes
from penstock.types.sampling import BeamParams, EarlyStopping, SamplingParams
from penstock.types.stats import (
    AdapterCounts,
    AdapterStats,
    BatchStats,
    EngineLoad,
    ReplicaLoad,
    RequestStats,
    RouteStats,
    ScalingDecision,
    StepCounts,
    StepStats,
    TierStats,
    UpstreamStats,
    WaitReason,
)

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


def test_the_prompt_of_a_beam_search_counts_once_and_its_tokens_have_no_gaps() -> None:
    metrics = Metrics("m")
    beams = BeamParams(width=2, length_penalty=1.0, early_stopping=EarlyStopping.NEVER, num_logprobs=None)
    searched = SamplingParams(temperature=0.0, beams=beams, logprobs=3)
    requests = [Request(f"{idx}", (1,) * 50, searched, 0, shares_prompt=idx % 2 > 0) for idx in range(4)]
    requests += [Request(f"n{idx}", (1,) * 50, SamplingParams(), 0, shares_prompt=idx > 0) for idx in range(2)]
    metrics.on_tokens(requests, ())
    metrics.on_finish(make_end(is_beam=True))
    metrics.on_finish(make_end())
    metrics.settle()
    assert metrics.num_computed_prompt_tokens == 4 * 50
    buckets, _sum = metrics.tpot_ns.snapshot()
    assert buckets[-1] == ("+Inf", 1.0)


def test_a_key_is_told_the_prompt_of_several_choices_once(metrics):
    metrics.tenants = frozenset({"key"})
    for nth in range(3):
        metrics.on_finish(make_end(key="key", shares_prompt=nth > 0))
    assert value(metrics, "tenant_tokens_total", tenant="key", kind="prompt") == 50
    assert value(metrics, "tenant_tokens_total", tenant="key", kind="generation") == 15


# Batches: how large, why no larger, and what that costs


def test_a_step_is_counted_by_what_kept_its_batch_from_being_larger(metrics):
    metrics.on_step(make_step())
    metrics.on_step(make_step(waits_for=WaitReason.MEMORY))
    metrics.on_step(make_step(waits_for=WaitReason.MEMORY))
    assert value(metrics, "steps_total", limit="step") == 1
    assert value(metrics, "steps_total", limit="memory") == 2
    assert value(metrics, "steps_total", limit="gate") == 0


@pytest.mark.parametrize(("num_rows", "rows"), [(1, "1"), (2, "2"), (3, "4"), (4, "4"), (5, "8"), (64, "64"), (65, "128")])
def test_a_step_is_timed_by_its_rows_without_the_turns_of_other_models(metrics, num_rows, rows):
    metrics.on_step(replace(make_step(num_rows=num_rows), waited_ns=10 * MS))
    assert value(metrics, "step_size_seconds_count", rows=rows, prompts="no") == 1
    assert value(metrics, "step_size_seconds_sum", rows=rows, prompts="no") == pytest.approx(0.02)


def test_a_step_with_prompts_is_timed_apart(metrics):
    metrics.on_step(make_step(prefills=[RowPlan("a", 0, 40, (), 1)]))
    assert value(metrics, "step_size_seconds_count", rows="4", prompts="yes") == 1


def test_the_limits_of_a_step_are_shown(metrics):
    metrics.connect(load=EngineLoad, signals=SustainedLoad, max_rows=32, max_step_tokens=512)
    assert (value(metrics, "batch_limit_rows"), value(metrics, "batch_limit_tokens")) == (32, 512)
    metrics.disconnect()
    assert (value(metrics, "batch_limit_rows"), value(metrics, "batch_limit_tokens")) == (0, 0)


# Latencies whose parts add up


def test_the_first_token_comes_after_the_queue_and_the_prompt(metrics):
    metrics.on_tokens([make_request()], ())
    assert value(metrics, "queue_time_seconds_sum") == pytest.approx(0.01)
    assert value(metrics, "prefill_time_seconds_sum") == pytest.approx(0.09)
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("times", "parts"),
    [
        ({}, (0.01, 0.09, 0.4)),
        ({"first_token_ns": None}, (0.01, 0.49, 0)),
        ({"first_token_ns": None, "first_scheduled_ns": None}, (0.5, 0, 0)),
    ],
)
def test_the_parts_of_a_request_add_up_wherever_it_ended(metrics, times, parts):
    metrics.on_finish(make_end(finish_reason=FinishReason.ABORT, **times))
    found = [value(metrics, "request_seconds_total", part=part) for part in ("queue", "prefill", "decode")]
    assert found == pytest.approx(parts)
    assert sum(found) == pytest.approx(value(metrics, "e2e_request_latency_seconds_sum"))
    assert value(metrics, "decode_time_seconds_count") == (times == {})


@pytest.mark.parametrize("reason", [reason for reason in RejectReason if reason.is_deadline])
def test_an_answer_that_a_time_limit_cut_counts_in_the_latencies(metrics, reason):
    metrics.on_finish(make_end(finish_reason=FinishReason.ABORT, reject_reason=reason.value))
    for finish_reason in (FinishReason.REJECTED, FinishReason.ABORT):  # cut in the queue: early, and so not fast
        metrics.on_finish(make_end(finish_reason=finish_reason, reject_reason=reason.value, first_token_ns=None))
    assert value(metrics, "e2e_request_latency_seconds_count") == 1
    assert value(metrics, "e2e_request_latency_seconds_sum") == pytest.approx(0.5)
    for name in ("decode_time_seconds", "time_per_output_token_seconds", "request_generation_tokens"):
        assert value(metrics, f"{name}_count") == 1
    assert value(metrics, "requests_rejected_total", reason=reason.value) == 3


def test_the_wait_in_the_queue_is_divided_by_what_it_lacked(metrics):
    metrics.on_step(replace(make_step(waits_for=WaitReason.ROWS), planned_ns=4 * MS, ended_ns=6 * MS))
    metrics.on_step(replace(make_step(waited_for=WaitReason.GATE), planned_ns=9 * MS, ended_ns=10 * MS))
    metrics.on_tokens([make_request(waits=WaitTimes(model=2 * MS, grammar=MS))], ())
    waits = {reason: value(metrics, "queue_wait_seconds_total", reason=reason) * 1e3 for reason in metrics.wait_ns}
    found = {reason: ms for reason, ms in waits.items() if ms}
    assert found == pytest.approx({"model": 2, "grammar": 1, "step": 1 + 1, "rows": 2, "gate": 3})
    assert sum(waits.values()) == pytest.approx(value(metrics, "queue_time_seconds_sum") * 1e3)


def test_requests_are_counted_by_their_lengths(metrics):
    metrics.on_finish(make_end())
    assert value(metrics, "request_prompt_tokens_sum") == 50
    assert value(metrics, "request_generation_tokens_sum") == 5


# OpenMetrics, with examples


def exemplars(metrics: Metrics, name: str) -> list[tuple[float, str, float]]:
    """(Upper edge, request, value) of the examples of a histogram."""
    text = expose(metrics, content_type=OPEN_METRICS).decode()
    assert text.endswith("# EOF\n")
    [family] = [family for family in open_metrics(text) if family.name == f"penstock_{name}"]
    found = [(float(sample.labels["le"]), sample.exemplar) for sample in family.samples if sample.exemplar]
    return [(edge, example.labels["request_id"], example.value) for edge, example in found]


def test_a_bucket_names_its_last_request(metrics):
    for name, token_ms in (("one/1.0", 100), ("two/2.0", 90), ('"odd"/3.0', 3)):
        metrics.on_tokens([replace_id(make_request(first_token_ns=token_ms * MS, first_scheduled_ns=0), name)], ())
    found = exemplars(metrics, "time_to_first_token_seconds")
    assert found == [(0.005, '"odd"', 0.003), (0.1, "two", 0.09)]
    assert "# {" not in expose(metrics).decode(), "the plain format has none"


def test_the_first_five_latencies_of_the_page_have_examples(metrics):
    metrics.on_tokens([replace_id(make_request(first_token_ns=2 * MS, first_scheduled_ns=MS), "one/1.0")], ())
    metrics.on_finish(make_end(request_id="one/1.0"))
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert "the first five [latencies]" in page
    listed = re.findall(r"^- `penstock_(\w+)`", page.partition("## Latencies")[2], re.MULTILINE)
    histograms = [name for name, spec in METRICS.items() if spec.kind == "histogram" and name != "model_wait_seconds"]
    assert {name for name in histograms if exemplars(metrics, name)} == set(listed[:5])


def replace_id(request: Request, request_id: str) -> Request:
    request.request_id = request_id
    return request


def test_an_id_that_no_example_may_have_is_left_out(metrics):
    metrics.on_finish(make_end(request_id="x" * 117 + "/1.0"))
    assert exemplars(metrics, "e2e_request_latency_seconds") == []
    metrics.on_finish(make_end(request_id="x" * 116 + "/1.0"))
    assert exemplars(metrics, "e2e_request_latency_seconds") == [(0.5, "x" * 116, 0.5)]


def test_open_metrics_have_the_same_values(metrics):
    metrics.on_step(make_step())
    metrics.on_finish(make_end())
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in open_metrics(expose(metrics, content_type=OPEN_METRICS).decode())
        for sample in family.samples
    }
    plain = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(expose(metrics).decode())
        for sample in family.samples
    }
    assert samples == plain


# The table


def everything() -> tuple[Metrics, dict[str, object]]:
    """Metrics with every kind of series, and what else `expose` takes."""
    metrics = Metrics("m")
    metrics.tier = TierStats(num_slots=1, failures={"io": 1})
    metrics.read_residence = lambda: RESIDENCE
    metrics.read_adapters = AdapterStats
    metrics.read_replicas = lambda: [ReplicaLoad("r", "", EngineLoad(), 0, 0, 0, 0)]
    metrics.read_moves = lambda: {"lost": 1}
    metrics.tenants, metrics.num_shared_texts = frozenset({"t"}), 0
    metrics.count_routed("route")
    metrics.count_checked("pipeline", is_kept=True)
    metrics.on_step(make_step(guesses={"a": (2, 1)}, guess_sources={"a": "suffix"}))
    metrics.on_finish(make_end(key="t"))
    upstream = UpstreamStats(name="u", results={"ok": 1}, tokens={"prompt": 1}, is_resting=False)
    return metrics, {
        "upstreams": [upstream],
        "routes": [RouteStats("auto", {"small": 0.25}, 1.0, drift=0.1)],
        "traces": {"exported": 1},
        "cpu_ns": {"running": 1, "waiting": 1, "others": 1},
        "batches": BatchStats(0, 0, {"completed": 1}, {"input": 1}),
    }


def test_a_target_of_a_client_makes_no_miss_of_the_servers_and_hides_none():
    metrics = Metrics("m")
    metrics.slo_ttft_ns = 2_000 * MS
    for slo_ms, ttft_ms in ((1, 100), (9_000, 5_000), (None, 5_000)):
        metrics.count_ttft(None if slo_ms is None else slo_ms * MS, ttft_ms * MS)
    assert metrics.slo == {("ttft", True): 1, ("ttft", False): 2, ("ttft_asked", False): 1, ("ttft_asked", True): 1}


def test_replicas_that_are_wanted_are_told():
    metrics, _ = everything()
    metrics.num_replicas = 3
    assert 'penstock_wanted_replicas{model="m"} 3.0' in expose(metrics).decode()
    metrics.read_decisions = lambda: [ScalingDecision(0, 5, "busy"), ScalingDecision(9, 4, "")]
    assert 'penstock_wanted_replicas{model="m"} 5.0' in expose(metrics).decode()


def test_guesses_are_told_by_who_made_them_and_by_place():
    metrics = Metrics("m")
    sources = {"a": "suffix", "b": "draft", "c": "draft"}
    metrics.on_step(make_step(guesses={"a": (2, 1), "b": (2, 2), "c": (1, 0)}, guess_sources=sources))
    found = {
        (sample.name, sample.labels["source"], sample.labels["position"]): sample.value
        for family in text_string_to_metric_families(expose(metrics).decode())
        for sample in family.samples
        if "source" in sample.labels and "position" in sample.labels
    }
    guessed = {("suffix", "1"): 1, ("suffix", "2"): 1, ("draft", "1"): 2, ("draft", "2"): 1}
    accepted = {("suffix", "1"): 1, ("draft", "1"): 1, ("draft", "2"): 1}
    names = (("penstock_guessed_tokens_total", guessed), ("penstock_accepted_tokens_total", accepted))
    assert found == {(name, *key): num for name, nums in names for key, num in nums.items()}


def test_the_server_writes_what_the_table_has_and_nothing_else():
    metrics, more = everything()
    found = {
        family.name.removeprefix(PREFIX): family for family in text_string_to_metric_families(expose(metrics, **more).decode())
    }
    assert found.keys() == {name for name in METRICS if not name.startswith("kv_host")}
    for name, family in found.items():
        spec = METRICS[name]
        assert (family.type, family.documentation) == (spec.kind, spec.help)
        assert family.samples, name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(spec.labels), name


def test_every_metric_of_the_table_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = {PREFIX + name + "_total" * (spec.kind == "counter") for name, spec in METRICS.items()}
    missing = {name for name in names if f"`{name}`" not in page and "kv_host" not in name}
    assert not missing


def test_the_process_is_shown_beside_the_models(metrics):
    text = expose(metrics, process=True).decode()
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"):
        assert re.search(rf"^{name} [\d.e+]+$", text, re.MULTILINE)


# vLLM's names

BOARD_OF_VLLM = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count prompt_tokens_total
generation_tokens_total inter_token_latency_seconds_bucket inter_token_latency_seconds_sum inter_token_latency_seconds_count
num_requests_running num_requests_waiting time_to_first_token_seconds_bucket time_to_first_token_seconds_sum
time_to_first_token_seconds_count kv_cache_usage_perc request_prompt_tokens_bucket request_generation_tokens_bucket
request_success_total request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_max_num_generation_tokens_sum
"""
"""The series that vLLM's board asks for: examples/observability/prometheus_grafana/grafana.json, read in November 2026."""
OF_GATEWAYS = "num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc lora_requests_info"
"""Those of the model server protocol of the Gateway API inference extension, read in November 2026."""


def vllm_samples(metrics: Metrics) -> dict[str, list]:
    samples: dict[str, list] = {}
    for family in text_string_to_metric_families(expose(metrics, vllm=True).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def test_every_series_of_vllms_board_and_of_gateways_is_there():
    metrics, _ = everything()
    samples = vllm_samples(metrics)
    for name in (BOARD_OF_VLLM + OF_GATEWAYS).split():
        assert f"vllm:{name}" in samples, name
        if name != "lora_requests_info":
            assert {sample.labels["model_name"] for sample in samples[f"vllm:{name}"]} == {"m"}
    assert b"vllm:" not in expose(metrics)
    text = expose(metrics, vllm=True, content_type=OPEN_METRICS).decode()
    assert {family.name for family in open_metrics(text)} > {f"vllm:{name}" for name in NAMES}


def test_values_under_vllms_names_are_the_sums_of_ours(metrics):
    metrics.on_step(make_step(num_preemptions=3, num_swaps=1))
    metrics.on_tokens([make_request()], [20 * MS])
    metrics.on_finish(make_end())
    metrics.connect(load=lambda: EngineLoad(num_waiting=5, waits_for=WaitReason.ROWS), signals=SustainedLoad)
    samples = vllm_samples(metrics)
    for name, expected in (
        ("num_preemptions_total", 3),
        ("num_requests_waiting", 5),
        ("prompt_tokens_total", 50),
        ("request_queue_time_seconds_sum", 0.01),
        ("time_to_first_token_seconds_count", 1),
    ):
        [sample] = samples[f"vllm:{name}"]
        assert sample.value == pytest.approx(expected), name
    ends = {sample.labels["finished_reason"]: sample.value for sample in samples["vllm:request_success_total"]}
    assert ends == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    ours, theirs = samples["penstock_time_to_first_token_seconds_bucket"], samples["vllm:time_to_first_token_seconds_bucket"]
    assert [(one.labels["le"], one.value) for one in ours] == [(one.labels["le"], one.value) for one in theirs]


def test_a_gateway_learns_which_adapters_are_ready():
    metrics, _ = everything()
    metrics.max_adapters = 4
    metrics.read_adapter_names = lambda numbers: [
        name for name, number in {"b": 2, "a": 1, "c": 3}.items() if number in numbers
    ]
    metrics.connect(load=lambda: EngineLoad(adapters=AdapterCounts(numbers={1, 2})), signals=SustainedLoad)
    [sample] = vllm_samples(metrics)["vllm:lora_requests_info"]
    assert sample.labels == {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": ""}
    assert sample.value > 1.7e9
    other = Metrics("other")
    other.read_adapters, other.max_adapters = AdapterStats, 2
    other.read_adapter_names = lambda numbers: ["d"]
    text = expose(metrics, other, vllm=True).decode()
    [line] = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'running_lora_adapters="a,b,d"' in line
