"""The files of `packaging` for Prometheus and Grafana beside the server: what they may do, and whether their names exist."""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config import ServerConfig

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
MONITORING = PACKAGING / "monitoring"
COMPOSE = yaml.safe_load((PACKAGING / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
Penstock = Callable[..., subprocess.CompletedProcess[str]]


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


# What `penstock monitoring render` writes


TARGET = "penstock:8000"


def rendered(penstock: Penstock, folder: Path, *arguments: str) -> dict[str, str]:
    done = penstock("monitoring", "render", folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()}


def test_the_folder_of_packaging_is_what_the_command_writes(penstock: Penstock, tmp_path: Path) -> None:
    """If not: make docs"""
    kept = {str(path.relative_to(MONITORING)): path.read_text() for path in MONITORING.rglob("*") if path.is_file()}
    assert rendered(penstock, tmp_path / "new", "--target", TARGET) == kept


def test_the_compose_files_run_the_same_prometheus_and_grafana() -> None:
    services = yaml.safe_load((MONITORING / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert services.keys() == SERVICES.keys() - {"penstock"}
    for name, service in services.items():
        service["volumes"] = [mount.replace("./", "./monitoring/") for mount in service["volumes"]]
        service.pop("extra_hosts", None)  # its server is no container
        assert service == SERVICES[name]


def test_a_folder_with_other_files_is_left_alone(penstock: Penstock, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rules.yaml").write_text("mine")
    done = penstock("monitoring", "render", folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--force" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["rules.yaml"]
    files = rendered(penstock, folder, "--force")
    assert files["rules.yaml"] != "mine"


def test_the_line_of_the_page_gives_prometheus_the_server_s_key(penstock: Penstock, tmp_path: Path) -> None:
    rendered(penstock, tmp_path / "own")
    [line] = re.findall(r"^sed .*$", (ROOT / "docs/how-to/monitoring.md").read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(line, shell=True, cwd=tmp_path / "own", check=True)
    [job] = yaml.safe_load((tmp_path / "own/prometheus.yaml").read_text())["scrape_configs"]
    assert job["authorization"] == {"credentials": "KEY"}


def test_a_disk_that_was_full_is_tried_again_without_force(
    penstock_here: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fail)
        done = penstock_here("monitoring", "render", tmp_path / "own")
    assert (done.returncode, done.stderr.startswith("error: A file can't be written: the disk is full.")) == (1, True)
    (tmp_path / "own" / "prometheus.yaml").write_text("half")
    assert penstock_here("monitoring", "render", tmp_path / "own").returncode == 0


@pytest.mark.parametrize(
    "target",
    [
        "penstock",
        "http://penstock:8000",
        ":8000",
        "penstock:",
        "penstock:http",
        "penstock:0",
        "penstock: 8000",
        "::1:8000",
        "a:1,b:2",
    ],
)
def test_a_target_that_prometheus_would_refuse_is_wrong_usage(penstock_here: Penstock, tmp_path: Path, target: str) -> None:
    done = penstock_here("monitoring", "render", tmp_path / "own", "--target", target)
    assert done.returncode == 2
    assert f"{target!r} is not HOST:PORT" in done.stderr
    assert not (tmp_path / "own").exists()


def test_a_folder_in_a_file_is_named(penstock_here: Penstock, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = penstock_here("monitoring", "render", tmp_path / "file" / "own")
    assert (done.returncode, "can't be written" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_its_own_folder_is_written_again(penstock: Penstock, tmp_path: Path) -> None:
    first = rendered(penstock, tmp_path / "own")
    again = rendered(
        penstock,
        tmp_path / "own",
        *("--target", "[::1]:1", "--runbooks", "https://example.org/it's", "--server", "https://example.org"),
    )
    assert first.keys() == again.keys()
    assert {name for name in first if first[name] != again[name]} == {"prometheus.yaml", "datasource.yaml", "rules.yaml"}
    [group] = yaml.safe_load(again["rules.yaml"])["groups"]
    urls = [rule["annotations"]["runbook_url"] for rule in group["rules"] if "alert" in rule]
    assert "https://example.org/it's/PenstockQueueDelay.md" in urls
    assert "https://example.org/v1/requests/" in again["datasource.yaml"]
