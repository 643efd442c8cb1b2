"""Every figure follows its definition, and says what it leaves out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.lab.figures import (
    MAX_REASONS,
    MAX_TENANTS,
    Figures,
    GapHistogram,
    Samples,
    Slo,
    jain,
    make_figures,
    parse_slos,
    steady_window,
    tokens_upto,
    whole_window,
)
from penstock.lab.records import End, Record
from penstock.types.errors import ConfigError
from support.bench_records import MS, S, close, random_records, record


def figures_of(records: list[Record], *slos: str, **options: float) -> Figures:
    return make_figures(Samples.of(records), slos=parse_slos(slos), **options)


def test_latencies_are_as_defined() -> None:
    figures = figures_of([record(due_ms=1000, lag_ms=10, ttft_ms=100, gaps_ms=(20, 40, 60), queue_ns=7 * MS)])
    means = {name: found.mean.value for name, found in figures.latency_ms.items()}
    assert close(means["ttft"], 100), "from the intended arrival, whatever the lag"
    assert close(means["tpot"], 40)
    assert close(means["e2e"], 220)
    assert close(means["queue"], 7)
    assert close(means["itl"], 40)
    assert figures.lag_ms is not None
    assert close(figures.lag_ms.mean.value, 10)


def test_gaps_are_pooled_and_a_long_answer_has_many() -> None:
    figures = figures_of([record(0, gaps_ms=[10] * 90), record(1, gaps_ms=[50] * 10)])
    itl = figures.latency_ms["itl"]
    assert itl.count == 100
    assert close(itl.mean.value, 14)
    assert itl.quantiles["p50"].value == pytest.approx(10, rel=0.003)
    assert itl.quantiles["p99"].value == pytest.approx(50, rel=0.003)


@pytest.mark.parametrize("gap_ns", [0, 1, 999, 1000, 1001, 123_456, 10**7, 10**12])
def test_a_bucket_is_wrong_by_a_quarter_per_cent(gap_ns: int) -> None:
    found = GapHistogram.of([np.array([gap_ns], np.int64)])
    assert found.values_ns[0] == (500 if gap_ns < 1000 else pytest.approx(gap_ns, rel=0.0026))


def test_rates_are_over_the_whole_run_of_what_ended_well() -> None:
    records = [record(i, due_ms=1000 * i, ttft_ms=100, gaps_ms=[100] * 4) for i in range(10)]
    records.append(record(10, due_ms=9499, end=End.FAILED))
    rates = figures_of(records).rates
    assert close(rates.requests_per_s.value, 10 / 9.5)
    assert close(rates.output_tokens_per_s.value, 50 / 9.5)
    assert close(rates.total_tokens_per_s.value, 550 / 9.5)
    assert not rates.requests_per_s.is_known, "ten ends are too few for batches"


def test_tokens_are_spread_between_the_first_and_the_end() -> None:
    samples = Samples.of([record(ttft_ms=100, gaps_ms=[100] * 4)])
    output, prompt, ended = tokens_upto(samples, np.array([99, 100, 300, 500, 501]) * float(MS))
    assert output.tolist() == [0, 1, 3, 5, 5]
    assert prompt.tolist() == [0, 50, 50, 50, 50]
    assert ended.tolist() == [0, 0, 0, 1, 1]


def test_an_answer_without_a_first_token_counts_at_its_end() -> None:
    """Embeddings: no output tokens, no TTFT."""
    records = [
        Record(index=i, intended_ns=i * S, sent_ns=i * S, ended_ns=i * S + S // 2, num_prompt_tokens=30) for i in range(4)
    ]
    figures = figures_of(records)
    assert set(figures.latency_ms) == {"e2e"}
    assert figures.rates.output_tokens_per_s.value == 0
    assert close(figures.rates.total_tokens_per_s.value, 120 / 3.5)


def test_latencies_leave_out_what_did_not_end_well_and_say_so() -> None:
    records = [record(i) for i in range(8)]
    records += [record(8, ttft_ms=1, end=End.CANCELLED), record(9, end=End.REFUSED, http_status=429, error="queue_full")]
    figures = figures_of(records)
    assert figures.latency_ms["ttft"].count == 8
    assert figures.num_by_end == {"ok": 8, "cancelled": 1, "refused": 1, "failed": 0}
    assert figures.reasons == {"429 queue_full": 1}
    assert any("1 of 10 requests were refused" in warning for warning in figures.warnings)


def test_only_so_many_reasons_are_kept_and_the_others_are_counted() -> None:
    records = [record(i, end=End.FAILED, error=f"reason {chr(ord('a') + i)}\n" + "x" * 10_000) for i in range(26)]
    figures = figures_of(records)
    assert len(figures.reasons) == MAX_REASONS + 1
    assert figures.reasons["other reasons"] == 26 - MAX_REASONS
    assert max(map(len, figures.reasons)) < 200
    assert figures_of([record(end=End.FAILED)]).reasons == {"no reason given": 1}


def test_one_reason_is_one_row_whatever_its_numbers() -> None:
    records = [record(i, end=End.REFUSED, http_status=429, error=f"Full. Try again in {10 + i} s.") for i in range(30)]
    records += [record(30, end=End.FAILED, http_status=500, error="Try again in 48 s.")]
    assert figures_of(records).reasons == {"429 Full. Try again in 10 s.": 30, "500 Try again in 48 s.": 1}


def test_long_texts_with_other_numbers_and_ids_are_one_reason() -> None:
    words, ids = " word" * 60, ("8f14e45f-ceea-467f", "c9f0f895-fb98-4b91-aa3e")
    records = [record(i, end=End.FAILED, error=f"Request {ids[i % 2]} waits {10**i} s.{words}") for i in range(5)]
    assert list(figures_of(records).reasons.values()) == [5]


@pytest.mark.parametrize("texts", [('{"code":1,"text":"a"}', '{"code":1,"text":"b"}'), ("48秒后重试", "内部错误5")])
def test_texts_without_spaces_are_told_apart(texts: Sequence[str]) -> None:
    assert len(figures_of([record(end=End.FAILED, error=text) for text in texts]).reasons) == 2


def test_reasons_that_look_equal_when_cut_are_counted_together() -> None:
    records = [record(end=End.FAILED, error=f"{'1' * 200} {text}") for text in "aab"]
    assert list(figures_of(records).reasons.values()) == [3]


def test_each_status_has_a_row() -> None:
    records = [record(i, end=End.REFUSED, http_status=429, error=chr(ord("a") + i // 2)) for i in range(52)]
    figures = figures_of([*records, record(52, end=End.FAILED, http_status=500, error="Internal error")])
    assert figures.reasons["500 Internal error"] == 1
    assert figures.reasons["other reasons"] == 2 * (26 - MAX_REASONS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=500ms", Slo("ttft", 500 * MS)),
        (" tpot = 50 ms ", Slo("tpot", 50 * MS)),
        ("e2e=1.5s", Slo("e2e", 1500 * MS)),
        ("itl=250us", Slo("itl", 250_000)),
        ("e2e=2m", Slo("e2e", 120 * S)),
    ],
)
def test_slos_are_read(text: str, expected: Slo) -> None:
    assert parse_slos([text]) == (expected,)
    assert parse_slos([str(expected)]) == (expected,)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["ttft"], "has no limit"),
        (["ttfb=1s"], "'ttfb', which is not a known latency"),
        (["ttft=500"], "not a time with a unit"),
        (["ttft=-1s"], "not a time with a unit"),
        (["ttft=0ms"], "greater than 0"),
        (["ttft=1s,ttft=2s"], "two SLOs for ttft"),
        ([""], "has no limit"),
    ],
)
def test_a_wrong_slo_names_itself_and_a_right_one(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_slos(texts)
    assert caught.value.remedy


def test_a_request_attains_when_it_holds_all_slos() -> None:
    records = [
        record(0, ttft_ms=100, gaps_ms=(20, 20)),
        record(1, ttft_ms=300, gaps_ms=(20, 20)),
        record(2, ttft_ms=100, gaps_ms=(10, 70)),
        record(3, ttft_ms=100, gaps_ms=()),
        record(4, end=End.REFUSED),
        record(5, end=End.FAILED),
        record(6, end=End.CANCELLED),
    ]
    goodput = figures_of(records, "ttft=200ms", "itl=50ms").goodput
    assert goodput is not None
    assert close(goodput.attainment.value, 2 / 6), "refused and failed ones count, the client's own cancels do not"
    assert {name: round(6 * one.value) for name, one in goodput.attainment_by_slo.items()} == {"ttft=200ms": 3, "itl=50ms": 3}
    assert close(goodput.requests_per_s.value, 2 / 0.34)
    by_mean = figures_of(records, "tpot=40ms").goodput
    assert by_mean is not None
    assert close(by_mean.attainment.value, 4 / 6), "the mean gap of request 2 is 40 ms"


@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl"])
def test_a_request_without_the_time_does_not_hold_its_slo(metric: str) -> None:
    goodput = figures_of([Record(index=0, intended_ns=0, sent_ns=0, ended_ns=S)], f"{metric}=10s").goodput
    assert goodput is not None
    assert goodput.attainment.value == 0


def test_cost_is_the_price_over_the_rate() -> None:
    records = [record(i, due_ms=100 * i, ttft_ms=50, gaps_ms=[50]) for i in range(200)]
    figures = figures_of(records, price_per_hour=3.6)
    cost = figures.cost
    assert cost is not None
    assert close(cost.per_million_output_tokens.value, 0.001 / (figures.rates.output_tokens_per_s.value / 1e6))
    assert cost.per_million_output_tokens.is_known
    assert cost.per_million_total_tokens.value < cost.per_million_output_tokens.value


def test_without_tokens_the_cost_is_infinite_and_not_an_error() -> None:
    cost = figures_of([record(end=End.FAILED)], price_per_hour=1.0).cost
    assert cost is not None
    assert cost.per_million_output_tokens.value == float("inf")


def test_a_client_that_falls_behind_is_warned_of() -> None:
    assert any("fell behind" in warning for warning in figures_of([record(lag_ms=6)]).warnings)
    assert not figures_of([record(lag_ms=4)]).warnings
    assert any("were sent 2345 ms late or more" in warning for warning in figures_of([record(lag_ms=2345)]).warnings)


def test_tenants_have_their_own_figures_and_gaps() -> None:
    records = [record(i, tenant="a", ttft_ms=100, gaps_ms=(10,)) for i in range(5)]
    records += [record(i, tenant="b", ttft_ms=300, gaps_ms=(30,)) for i in range(5, 10)]
    figures = figures_of(records, "ttft=200ms")
    assert figures.num_tenants == 2
    a, b = figures.tenants["a"], figures.tenants["b"]
    assert close(b.latency_ms["ttft"].mean.value, 300)
    assert close(a.latency_ms["itl"].mean.value, 10)
    assert a.goodput is not None
    assert a.goodput.attainment.value == 1
    assert figures.fairness is not None
    assert close(figures.fairness.of_tokens, 1)
    assert close(figures.fairness.of_speed, jain([2 / 0.11, 2 / 0.33]))
    assert not figures_of(records[:5]).tenants, "one tenant is the run itself"


def test_ten_thousand_tenants_are_counted_in_one_pass() -> None:
    records = [record(i, tenant=f"t{i % 10_000}", gaps_ms=(10,)) for i in range(20_000)]
    figures = figures_of(records)
    assert figures.num_tenants == 10_000
    assert figures.fairness is not None
    assert close(figures.fairness.of_speed, 1)


def test_no_interval_of_a_time_goes_below_0() -> None:
    ttft = figures_of([record(i, due_ms=i, ttft_ms=1000 if i == 3 else 0.001) for i in range(8)]).latency_ms["ttft"]
    assert ttft.mean.low == 0


def test_jain_is_one_for_equals_and_one_nth_for_a_monopoly() -> None:
    assert close(jain([3, 3, 3]), 1)
    assert close(jain([7, 0, 0, 0]), 0.25)
    assert jain([0, 0]) == 1


def test_only_the_largest_tenants_have_figures() -> None:
    records = [record(i, tenant=f"t{i % 80}") for i in range(200)]
    figures = figures_of(records)
    assert figures.num_tenants == 80
    assert len(figures.tenants) == MAX_TENANTS
    assert "t0" in figures.tenants
    assert "t79" not in figures.tenants


def test_the_prefix_cache_share_is_of_prompt_tokens() -> None:
    assert figures_of([record(0, prompt=100, cached=80), record(1, prompt=300)]).prefix_cache_share == pytest.approx(0.2)
    assert figures_of([record(end=End.FAILED)]).prefix_cache_share is None


def test_the_prefix_cache_share_is_unknown_if_the_server_never_reports_cached_tokens() -> None:
    assert figures_of([record(0, cached=None), record(1, cached=None)]).prefix_cache_share is None
    some = [record(0, prompt=100, cached=80), record(1, prompt=300, cached=None)]
    assert figures_of(some).prefix_cache_share == pytest.approx(0.2), "some servers leave out a count of 0"


def test_the_steady_window_leaves_out_warm_up_and_drain() -> None:
    records = [record(i, due_ms=50 * i, ttft_ms=500, gaps_ms=[100] * 15) for i in range(200)]
    samples = Samples.of(records)
    window, whole = steady_window(samples), whole_window(samples)
    assert window is not None
    assert window.begin_ns == 2 * S, "when the first request has ended, 40 are in flight, as in the middle of the run"
    assert window.end_ns == 9950 * MS
    assert whole.end_ns == 11_950 * MS
    assert window.words == "without the first 2 s and the last 2 s of the run"
    figures = make_figures(samples)
    assert figures.steady is not None
    assert figures.steady[1].output_tokens_per_s.value == pytest.approx(16 / 0.05, rel=0.01), "arrivals times their tokens"
    assert figures.rates.output_tokens_per_s.value == pytest.approx(3200 / 11.95)


def test_rates_of_a_steady_load_are_covered() -> None:
    """20 requests per second of 18 tokens on average, which take half a second: batches of time are independent."""
    hits = []
    for seed in range(60):
        figures = figures_of(random_records(1000 + seed, 300))
        assert figures.steady is not None
        rate = figures.steady[1].output_tokens_per_s
        hits.append(rate.low is not None and rate.high is not None and rate.low <= 20 * 18 <= rate.high)
    assert 0.88 <= np.mean(hits) <= 0.99


def test_a_run_of_few_requests_after_each_other_has_no_interval_of_its_rate() -> None:
    """16 users with 6 requests each: neighbouring batches of time would be parts of the same requests."""
    records = [record(i, due_ms=500 * (i // 16) + i % 16, ttft_ms=100, gaps_ms=[100] * 4) for i in range(96)]
    assert not figures_of(records).rates.output_tokens_per_s.is_known


def test_a_short_run_has_no_steady_part() -> None:
    assert steady_window(Samples.of([record(i) for i in range(50)])) is None, "all are sent at once"
    assert steady_window(Samples.of([record(i, due_ms=900 * i) for i in range(10)])) is None


def test_the_order_of_the_records_does_not_matter() -> None:
    records = random_records(1, 100, tenants="ab")
    assert figures_of(records[::-1]) == figures_of(records)


def test_the_fields_of_a_run_that_is_long_enough_all_have_intervals() -> None:
    figures = figures_of(random_records(0, 400), "ttft=150ms", "tpot=22ms", price_per_hour=1.0)
    estimates = [figures.rates.requests_per_s, figures.rates.output_tokens_per_s, figures.rates.total_tokens_per_s]
    estimates += [found.mean for found in figures.latency_ms.values()]
    estimates += [found.quantiles[name] for found in figures.latency_ms.values() for name in ("p50", "p90")]
    assert figures.goodput is not None
    assert figures.cost is not None
    estimates += [figures.goodput.attainment, figures.goodput.requests_per_s, figures.cost.per_million_output_tokens]
    for estimate in estimates:
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= estimate.value <= estimate.high
    assert not figures.latency_ms["ttft"].quantiles["p99.9"].is_known


def test_no_records_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="No request was recorded"):
        Samples.of([])


def test_samples_are_columns_of_one_length() -> None:
    samples = Samples.of(random_records(0, 20))
    lengths = {
        len(column) for field in dataclasses.fields(samples) if isinstance(column := getattr(samples, field.name), np.ndarray)
    }
    assert lengths == {20} == {len(samples)}
