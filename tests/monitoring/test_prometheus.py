"""Rendered rules and alerts in a real Prometheus, and a real server that it scrapes: `make test-monitoring`.

Needs `prometheus` and `promtool` (Debian, Ubuntu: apt install prometheus).
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.obs.boards.alerts import ALERTS
from penstock.obs.boards.panels import BOARD, Panel
from penstock.obs.boards.render import render
from support.cli.serve import Served, serving
from support.tiny_models import TinyLlama, write_gguf

MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
needs_prometheus = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not found: apt install prometheus")

Series = Mapping[str, str]
"""Series -> values a minute apart, as promtool writes them: 0+2x3 is 0 2 4 6."""
M = 'instance="a",model="m"'
TTFT = 'penstock_slo_attainment_total{instance="a",model="m",slo="ttft",met='


def small_batches(waiting: int, reason: str = "memory", generated: int = 100) -> Series:
    return {
        f"penstock_batch_size_sum{{{M}}}": "0+200x40",
        f"penstock_batch_size_count{{{M}}}": "0+100x40",
        f"penstock_batch_limit_rows{{{M}}}": "8x40",
        f"penstock_generation_tokens_total{{{M}}}": f"0+{generated}x40",
        f'penstock_requests_waiting{{{M},reason="{reason}"}}': f"{waiting}x40",
        f'penstock_requests_waiting{{{M},reason="rows"}}': "0x40",
    }


@dataclass(frozen=True, slots=True)
class Case:
    alert: str
    minute: int
    series: Series
    fires: bool
    interval: str = "1m"


CASES = [
    Case("PenstockQueueDelay", 10, {f"penstock_queue_delay_seconds{{{M}}}": "30x20"}, True),
    Case("PenstockQueueDelay", 10, {f"penstock_queue_delay_seconds{{{M}}}": "9x20"}, False),
    Case("PenstockQueueDelay", 10, {f"penstock_queue_delay_seconds{{{M}}}": "0x7 30x20"}, False),
    # A fifth misses the target for an hour; a twelfth for six hours; one in a hundred; nearly all, for three minutes.
    Case("PenstockFirstTokenBudgetBurns", 70, {TTFT + '"false"}': "0+20x80", TTFT + '"true"}': "0+80x80"}, True),
    Case("PenstockFirstTokenBudgetBurns", 380, {TTFT + '"false"}': "0+8x400", TTFT + '"true"}': "0+92x400"}, True),
    Case("PenstockFirstTokenBudgetBurns", 380, {TTFT + '"false"}': "0+1x400", TTFT + '"true"}': "0+99x400"}, False),
    Case("PenstockFirstTokenBudgetBurns", 363, {TTFT + '"false"}': "0x360 90 180 270", TTFT + '"true"}': "0+100x363"}, False),
    # The first requests after a start, and nobody else.
    Case("PenstockFirstTokenBudgetBurns", 10, {TTFT + '"false"}': "0x5 3x20", TTFT + '"true"}': "0x25"}, False),
    *(
        Case(
            "PenstockPreemptionStorm",
            25,
            {
                f"penstock_recomputed_tokens_total{{{M}}}": f"0+{again}x40",
                f"penstock_batch_tokens_sum{{{M}}}": "0+1000x40",
            },
            fires,
        )
        for again, fires in ((200, True), (50, False))
    ),
    *(
        Case(
            "PenstockHitRateCollapse",
            415,
            {
                f"penstock_prefix_cache_hits_total{{{M}}}": hits,
                f"penstock_prefix_cache_queries_total{{{M}}}": "0+1000x420",
            },
            fires,
        )
        for hits, fires in (("0+800x360 288000x60", True), ("0+800x420", False), ("0+100x360 36000x60", False))
    ),
    # Half of the tokens are found for hours. Then one short prompt is looked up, and not found.
    Case(
        "PenstockHitRateCollapse",
        398,
        {
            f"penstock_prefix_cache_hits_total{{{M}}}": "0+500x350 175000x75",
            f"penstock_prefix_cache_queries_total{{{M}}}": "0+1000x350 350000x25 350020x50",
        },
        False,
    ),
    Case("PenstockSmallBatches", 20, small_batches(waiting=5), True),
    Case("PenstockSmallBatches", 20, small_batches(waiting=0), False),
    Case("PenstockSmallBatches", 20, small_batches(waiting=5, reason="prefix"), False),
    Case("PenstockSmallBatches", 20, small_batches(waiting=5, generated=0), False),  # an encoder
    *(
        Case(
            "PenstockSlowTier",
            25,
            {
                f'penstock_queue_wait_seconds_total{{{M},reason="loading"}}': f"0+{loading}x40",
                f"penstock_e2e_request_latency_seconds_sum{{{M}}}": "0+100x40",
                f"penstock_prefix_cache_hits_total{{{M}}}": f"0+{found}x40",
                f"penstock_prefill_time_seconds_sum{{{M}}}": "0+10x40",
                f'penstock_prompt_tokens_total{{{M},source="computed"}}': "0+1000x40",
            },
            fires,
        )
        # A token takes 10 ms to compute. A tier that brings more than it costs is not slow.
        for loading, found, fires in ((20, 1000, True), (20, 4000, False), (5, 100, False))
    ),
    *(
        Case(
            "PenstockSlowTier",
            25,
            {
                f"penstock_kv_disk_declined_blocks_total{{{M}}}": f"0+{declined}x40",
                f'penstock_kv_disk_blocks_total{{{M},direction="loaded"}}': "0+20x40",
                f'penstock_kv_disk_blocks_total{{{M},direction="spilled"}}': "0+500x40",
                f"penstock_e2e_request_latency_seconds_sum{{{M}}}": "0+100x40",
                f"penstock_prefill_time_seconds_sum{{{M}}}": f"0+{prefill}x40",
            },
            fires,
        )
        for declined, prefill, fires in ((40, 20, True), (10, 20, False), (40, 5, False))
    ),
    Case("PenstockRestartLoop", 10, {f"penstock_engine_restarts_total{{{M}}}": "0 0 1 2 3 4x20"}, True),
    Case("PenstockRestartLoop", 10, {'process_start_time_seconds{instance="a",job="penstock"}': "1 2 3 4 5x20"}, True),
    Case("PenstockRestartLoop", 10, {'process_start_time_seconds{instance="a",job="other"}': "1 2 3 4 5x20"}, False),
    Case("PenstockRestartLoop", 10, {f"penstock_engine_restarts_total{{{M}}}": "0 0 1x20"}, False),
    # A scrape every 7 s does not meet both ends of the window, so Prometheus makes 2.01 of two.
    Case("PenstockRestartLoop", 40, {f"penstock_engine_restarts_total{{{M}}}": "0x300 1x20 2x300"}, False, "7s"),
    Case("PenstockRestartLoop", 41, {f"penstock_engine_restarts_total{{{M}}}": "0x300 1x20 2x20 3x300"}, True, "7s"),
    Case("PenstockReplicaLost", 15, {'up{job="penstock",instance="a"}': "1x5 0x20"}, True),
    Case("PenstockReplicaLost", 15, {'up{job="penstock",instance="a"}': "1x20", 'up{job="other",instance="b"}': "0x20"}, False),
    *(
        Case(
            "PenstockReplicaLost",
            minute,
            {f"penstock_replicas{{{M}}}": there, f"penstock_wanted_replicas{{{M}}}": wanted},
            fires,
        )
        for there, wanted, minute, fires in (
            ("3x10 2x120", "3x130", 20, True),
            ("3x10 2x120", "3x130", 120, True),
            ("3x10 2x20", "3x10 2x20", 20, False),  # fewer are wanted
            ("2x15 3x20", "2x10 3x20", 15, False),  # one more is started
        )
    ),
]


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert {(case.alert, case.fires) for case in CASES} == {(alert.name, fires) for alert in ALERTS for fires in (True, False)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered files."""
    folder = tmp_path_factory.mktemp("rendered")
    for name, text in render("127.0.0.1:1", "runbooks").items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_prometheus
def test_prometheus_accepts_the_configuration_and_the_rules(folder: Path) -> None:
    assert "SUCCESS" in promtool("check", "config", folder / "prometheus.yaml")
    assert f"{len(ALERTS) + 1} rules found" in promtool("check", "rules", folder / "rules.yaml")


def try_cases(folder: Path, cases: list[Case]) -> None:
    """Have promtool say whether just the alerts fire that should."""
    tests = [
        {
            "interval": case.interval,
            "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})',
                    "eval_time": f"{case.minute}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if case.fires else [],
                }
            ],
        }
        for case in cases
    ]
    path = folder / "tests.yaml"
    path.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}), encoding="utf-8")
    promtool("test", "rules", path)


@needs_prometheus
def test_alerts_fire_when_they_should_and_only_then(folder: Path) -> None:
    try_cases(folder, CASES)


@needs_prometheus
@pytest.mark.parametrize("case", CASES[:2], ids=["fires", "quiet"])
def test_a_wrong_expectation_is_noticed(folder: Path, case: Case) -> None:
    with pytest.raises(AssertionError, match="FAILED"):
        try_cases(folder, [Case(case.alert, case.minute, case.series, not case.fires)])


@needs_prometheus
@pytest.mark.parametrize(
    ("servers", "desired", "used", "expected"),
    [
        ("ab", "31", ("1", "0.1"), 4),  # one server needs two more
        ("ab", "11", ("0.1", "0.1"), 1),  # the load of both fits one
        ("ab", "11", ("0.7", "0.6"), 2),
        ("a", "4", ("0.2",), 4),  # the front of a cluster speaks for all
        ("aa", "12", ("0.1", "1"), 2),  # a server with two models, one of which needs another server
        ("aa", "11", ("0.5", "0.5"), 1),
    ],
)
def test_several_servers_are_scaled_up_and_down(
    folder: Path, servers: str, desired: str, used: tuple[str, ...], expected: int
) -> None:
    series = {}
    for idx, (server, number, share) in enumerate(zip(servers, desired, used, strict=True)):
        series[f'penstock_desired_replicas{{instance="{server}",model="{idx}"}}'] = f"{number}x20"
        series[f'penstock_utilisation_ratio{{instance="{server}",model="{idx}"}}'] = f"{share}x20"
    try_scaling(folder, series, expected)


@needs_prometheus
def test_servers_that_were_replaced_do_not_count(folder: Path) -> None:
    series = {}
    for server, lives in (("old", "{}x8 stale"), ("new", "_x8 {}x20")):
        for idx in range(4):
            series[f'penstock_desired_replicas{{instance="{server}{idx}",model="m"}}'] = lives.format("1")
            series[f'penstock_utilisation_ratio{{instance="{server}{idx}",model="m"}}'] = lives.format("0.7")
    try_scaling(folder, series, 4)


def try_scaling(folder: Path, series: Series, expected: int) -> None:
    """Have promtool say whether KEDA's query gives this number after ten minutes."""
    [trigger] = yaml.safe_load((folder / "keda.yaml").read_text())["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "10m", "exp_samples": [{"labels": query, "value": expected}]},
        ],
    }
    path = folder / "scaling.yaml"
    path.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", path)


# A real Prometheus that scrapes a real server

NO_DATA = {
    "kv_host_declined_blocks_total": "the server has a disk tier, and a model has one tier",
    "kv_host_blocks_total": "the server has a disk tier, and a model has one tier",
    "tenant_tokens_total": "the server has no keys with names; benchmarks/incidents.py has",
}
"""Queries that this server cannot answer, by the metric, and why."""
DEADLINE_S = 120


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of its API. Raises OSError before it listens."""
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """The finite values of an instant query."""
        found = [float(one["value"][1]) for one in self.ask("/api/v1/query", query=query)["result"]]
        return [value for value in found if value == value]

    def until(self, query: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                if self.values(query):
                    return
            except OSError:
                pass  # it does not listen yet
            assert time.monotonic() < deadline, f"no data for {query}"
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def scraping(folder: Path, target: str) -> Iterator[Prometheus]:
    for name, text in render(target, "runbooks").items():
        if name in ("prometheus.yaml", "rules.yaml"):
            (folder / name).write_text(text.replace("interval: 5s", "interval: 1s").replace("interval: 15s", "interval: 1s"))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    command.append("--enable-feature=exemplar-storage")
    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process:
        try:
            yield Prometheus(f"http://{address}")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with little memory and a disk tier, so that requests wait, are preempted, and blocks move."""
    folder = tmp_path_factory.mktemp("server")
    model = write_gguf(folder / "tiny.gguf", TinyLlama(max_model_len=512))
    environment = {
        "HOME": str(folder),
        "PENSTOCK_CACHE": str(folder / "cache"),
        "PYTHONUNBUFFERED": "1",
        "PATH": "/usr/bin:/bin",
    }
    arguments = ("--served-model-name", "tiny", "--max-num-seqs", "4", "--metrics-compat", "vllm", "--log-level", "error")
    tier = ("--kv-disk-size", "16MiB", "--kv-disk-path", folder / "tier")
    with serving(environment, model, *arguments, *tier) as server:
        yield server


def load(server: Served, number: int) -> None:
    prompt = ("the same beginning for all of them " * 3) + str(number)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "X-SLO-TTFT-Ms": "60000",
            "X-SLO-ITL-Ms": "60000",
            "X-Request-Id": f"load-{number}",
        },
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 24


@pytest.fixture(scope="module")
def scraped(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the server before, during and after load."""
    folder = tmp_path_factory.mktemp("prometheus")
    with scraping(folder, served.url.removeprefix("http://")) as prometheus, ThreadPoolExecutor(8) as clients:
        prometheus.until("penstock_requests_running")
        for round_number in range(3):
            list(clients.map(lambda number: load(served, number), range(100 * round_number, 100 * round_number + 24)))
            prometheus.until(f"penstock_request_success_total{{finish_reason='length'}} >= {24 * (round_number + 1)}")
        yield prometheus


PANELS = [entry for entry in BOARD if isinstance(entry, Panel)]


@needs_prometheus
@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_query_of_the_board_has_data(scraped: Prometheus, panel: Panel) -> None:
    for query, _ in panel.queries:
        values = scraped.values(query.replace("$model", ".*").replace("$__rate_interval", "5m"))
        if any(name in query for name in NO_DATA):
            assert not values, f"it has data after all: {query}"
        else:
            assert values, query


@needs_prometheus
def test_every_alert_is_evaluated_and_none_is_about_to_fire_on_a_healthy_server(scraped: Prometheus) -> None:
    [group] = scraped.ask("/api/v1/rules")["groups"]
    rules = {rule["name"]: rule for rule in group["rules"]}
    assert {alert.name for alert in ALERTS} < rules.keys()
    assert [rule["lastError"] for rule in rules.values() if rule.get("lastError")] == []
    # An alert is pending for minutes before it fires.
    assert {name for name, rule in rules.items() if rule.get("state", "inactive") != "inactive"} == set()


@needs_prometheus
def test_examples_name_requests_that_the_server_explains(scraped: Prometheus, served: Served) -> None:
    query = "penstock_time_to_first_token_seconds_bucket"
    now = time.time()
    found = scraped.ask("/api/v1/query_exemplars", query=query, start=str(now - 600), end=str(now + 60))
    ids = {exemplar["labels"]["request_id"] for one in found for exemplar in one["exemplars"]}
    assert ids
    for request_id in ids:
        assert request_id.startswith("load-")
        assert json.loads(served.get(f"/v1/requests/{request_id}"))


@needs_prometheus
def test_the_parts_of_latencies_add_up_in_prometheus(scraped: Prometheus) -> None:
    [whole] = scraped.values("penstock_e2e_request_latency_seconds_sum")
    assert sum(scraped.values("penstock_request_seconds_total")) == pytest.approx(whole)
    [first] = scraped.values("penstock_time_to_first_token_seconds_sum")
    [queue] = scraped.values("penstock_queue_time_seconds_sum")
    [prefill] = scraped.values("penstock_prefill_time_seconds_sum")
    assert queue + prefill == pytest.approx(first)
    assert sum(scraped.values("penstock_queue_wait_seconds_total")) == pytest.approx(queue)
    [limit] = scraped.values("penstock_batch_limit_rows")
    [size] = scraped.values("penstock_batch_size_sum / penstock_batch_size_count")
    assert 1 <= size <= limit == 4


@needs_prometheus
def test_the_series_of_vllm_are_scraped_too(scraped: Prometheus) -> None:
    [total] = scraped.values('{__name__="vllm:generation_tokens_total",model_name="tiny"}')
    assert total == 3 * 24 * 24
