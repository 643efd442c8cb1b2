"""The files of `packaging` for Prometheus and Grafana beside the server: what they may do, and whether their names exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import ServerConfig
from penstock.obs.metrics import Metrics
from penstock.obs.prometheus import expose

PACKAGING = Path(__file__).parents[2] / "packaging"
MONITORING = PACKAGING / "monitoring"
COMPOSE = yaml.safe_load((PACKAGING / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def mib(size: str) -> float:
    """MiB of a size such as 512m, or of the default of a variable."""
    number, unit = re.fullmatch(r"(?:\$\{\w+:-)?(\d+)([mg])\}?", size).groups()
    return int(number) * {"m": 1, "g": 1024}[unit]


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_can_do_and_take_little(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert 0 < mib(service["mem_limit"]) <= 2048
    assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "user"} & service.keys()


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_is_reached_from_this_machine_alone(service: dict[str, Any]) -> None:
    assert [port for port in service.get("ports", []) if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)] == []


def test_images_of_others_have_versions() -> None:
    images = [service["image"] for service in SERVICES.values() if "build" not in service]
    assert len(images) == 2
    assert [image for image in images if not re.fullmatch(r"docker\.io/[\w/]+:v?\d+\.\d+\.\d+", image)] == []


def test_no_file_has_a_password() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    secret = re.compile(r"(?i)(password|secret|token)\w*\s*[:=]\s*(?![$?])\S")
    assert [path for path in [PACKAGING / "compose.yaml", *MONITORING.glob("*.yaml")] if secret.search(path.read_text())] == []


def test_files_and_volumes_that_services_name_are_there() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service.get("volumes", [])]
    for source, _, *mode in mounts:
        if source.startswith("."):
            assert (PACKAGING / source).is_file(), source
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]
    assert (PACKAGING / SERVICES["penstock"]["build"]["context"] / SERVICES["penstock"]["build"]["dockerfile"]).is_file()


def test_a_stop_leaves_running_answers_their_time() -> None:
    assert int(SERVICES["penstock"]["stop_grace_period"].removesuffix("s")) >= ServerConfig().shutdown_timeout_s + 10


def test_prometheus_and_grafana_find_each_other_and_the_server() -> None:
    scraped = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    [job] = scraped["scrape_configs"]
    [server] = [name for name, service in SERVICES.items() if "build" in service]
    assert job["static_configs"] == [{"targets": [f"{server}:8000"]}]
    [source] = yaml.safe_load((MONITORING / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    dashboard = (MONITORING / "penstock.json").read_text()
    assert set(re.findall(r'"type": "prometheus",\s*"uid": "([^"]+)"', dashboard)) == {source["uid"]}
    [provider] = yaml.safe_load((MONITORING / "dashboards.yaml").read_text())["providers"]
    assert any(mount.split(":")[1].startswith(provider["options"]["path"]) for mount in SERVICES["grafana"]["volumes"])


# The dashboard


def queries() -> list[str]:
    dashboard = json.loads((MONITORING / "penstock.json").read_text(encoding="utf-8"))
    variables = [variable["query"]["query"] for variable in dashboard["templating"]["list"]]
    return [*variables, *(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])]


def test_the_dashboard_asks_for_metrics_that_the_server_has() -> None:
    families = list(text_string_to_metric_families(expose(Metrics("m")).decode()))
    labels: dict[str, set[str]] = {}
    for family in families:
        for suffix in SUFFIXES[family.type]:
            name = family.name + suffix
            labels[name] = {label for sample in family.samples if sample.name == name for label in sample.labels}
    for query in queries():
        names = re.findall(r"\bpenstock_\w+", query)
        assert names, query
        for name in names:
            assert name in labels, query
            for label in re.findall(r"\bby \((\w+)\)", query):
                assert label in labels[name], query


@pytest.mark.parametrize(
    "word",
    [
        "time_to_first_token_seconds_bucket",
        "time_per_output_token_seconds_bucket",
        "requests_waiting",
        "kv_blocks",
        "batch_size_sum",
        "generation_tokens_total",
        "requests_rejected_total",
    ],
)
def test_the_dashboard_shows(word: str) -> None:
    assert any(f"penstock_{word}" in query for query in queries())
