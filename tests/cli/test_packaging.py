"""The files that run Penstock as a service: systemd's unit, the image, the messages to the service manager. And the lock.

Without a container engine, these steps of the Containerfile are run here: its environment, its entry point and its health
check. The files that it copies are looked up. Its wheel is built as `make install` builds one, and is not built again here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock.config.sources import unknown_variables
from penstock.serve.server import READY, notify

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"


# The lock


def test_the_lock_has_what_the_project_requires() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, extras = settings["project"], settings["project"]["optional-dependencies"]
    required = project["dependencies"] + settings["build-system"]["requires"] + settings["dependency-groups"]["wheels"]
    required += [
        line for extra in ("hf", "lab", "otel", "test", "docs") for line in extras[extra] if not line.startswith("penstock")
    ]
    locked = re.findall(r"^(\S+)==(\S+)", (PACKAGING / "requirements-dev.lock").read_text(encoding="utf-8"), re.MULTILINE)
    for requirement in map(Requirement, required):
        versions = [version for name, version in locked if name == requirement.name]
        assert versions, f"{requirement} is missing. Run make lock."
        assert all(requirement.specifier.contains(version) for version in versions), f"{requirement}: run make lock."


# The service manager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager, which the environment names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def test_an_abstract_socket_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0penstock-{os.getpid()}")
        listener.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@penstock-{os.getpid()}")
        notify(READY)
        assert listener.recv(100) == b"READY=1"


def test_a_manager_that_is_gone_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)
    assert caplog.text == ""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify(READY)
    assert "could not be notified of READY=1" in caplog.text


# The unit


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there: the analysis looks whether it is."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (PACKAGING / "penstock.service").read_text(encoding="utf-8")
    program = "/opt/penstock/bin/penstock"
    assert text.count(program) == 1
    path = tmp_path / "penstock.service"
    path.write_text(text.replace(program, sys.executable), encoding="utf-8")
    return path


def analyse(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)


def test_the_unit_has_no_mistake(unit: Path) -> None:
    result = analyse("verify", "--man=no", "--recursive-errors=no", unit)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_unit_may_do_little(unit: Path) -> None:
    result = analyse("security", "--offline=yes", "--threshold=15", "--no-pager", unit)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_unit_waits_longer_than_the_server_drains() -> None:
    from penstock.config import ServerConfig

    text = (PACKAGING / "penstock.service").read_text(encoding="utf-8")
    found = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= ServerConfig().shutdown_timeout_s + 10
    assert "Type=notify" in text


def test_a_wrong_setting_is_the_exit_code_after_which_nothing_is_restarted(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("frobnicate = 1\n")
    command = [sys.executable, "-m", "penstock", "serve", "--config", str(tmp_path / "penstock.toml")]
    code = subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode
    assert f"\nRestartPreventExitStatus={code}\n" in (PACKAGING / "penstock.service").read_text(encoding="utf-8")


# The image


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words) of the Containerfile."""
    text = (PACKAGING / "Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def final_stage() -> list[tuple[str, str]]:
    found = instructions()
    return found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]


def image_environment() -> dict[str, str]:
    [words] = [words for name, words in final_stage() if name == "ENV"]
    return dict(word.split("=", 1) for word in words.split())


def test_what_the_image_copies_is_there_and_reaches_the_engine() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [words.split()[:-1] for name, words in instructions() if name == "COPY" and not words.startswith("--from")]
    for source in [source for sources in copied for source in sources]:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        project["readme"],
        *(str(path.relative_to(ROOT)) for pattern in project["license-files"] for path in ROOT.glob(pattern)),
        *re.findall(r"native/\S+\.cpp", (ROOT / "CMakeLists.txt").read_text()),
    }
    assert len(named) > 20
    assert [path for path in named if path.split("/")[0] not in allowed or not (ROOT / path).is_file()] == []


def test_the_image_runs_as_nobody_special_and_without_a_compiler() -> None:
    names = [name for name, _ in final_stage()]
    assert final_stage()[0][1].endswith("-slim")
    assert dict(final_stage())["USER"] == "10001"
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    assert json.loads(dict(final_stage())["ENTRYPOINT"]) == ["penstock", "serve"]
    assert unknown_variables(image_environment()) == []


def test_the_images_environment_has_pip_to_fetch_models() -> None:
    """Only the word is checked here; tests/image runs that pip."""
    [words] = [words for name, words in instructions() if name == "RUN" and " venv " in words]
    assert "--without-pip" not in words


def test_the_images_command_serves_is_healthy_and_tells_the_manager(
    environment: dict[str, str], tiny_model: Path, tmp_path: Path, manager: socket.socket
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    settings = {name: value for name, value in image_environment().items() if name.startswith("PENSTOCK_")}
    settings |= {"PENSTOCK_PORT": str(port), "PENSTOCK_CACHE": str(tmp_path / "cache"), "PENSTOCK_BACKEND": "reference"}
    inside = {**environment, **settings, "NOTIFY_SOCKET": os.environ["NOTIFY_SOCKET"]}
    _, _, words = dict(final_stage())["HEALTHCHECK"].partition(" CMD ")
    program, script = json.loads(words)
    assert (program, script) == ("python", "/opt/penstock/healthcheck.py")
    health = [sys.executable, str(PACKAGING / "healthcheck.py")]
    assert subprocess.run(health, env=inside, capture_output=True, timeout=60).returncode == 1
    command = [sys.executable, "-m", *json.loads(dict(final_stage())["ENTRYPOINT"]), str(tiny_model)]
    with subprocess.Popen(command, env=inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert manager.recv(100) == b"READY=1"
            proxied = {**inside, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
            for variables in (inside, proxied):
                assert subprocess.run(health, env=variables, capture_output=True, timeout=60).returncode == 0
            server.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            out, error = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 0, error
    assert "on every network (0.0.0.0:" in out
    assert "requires no key" in error


@pytest.mark.parametrize(("value", "port"), [("9000", 9000), ("tcp://10.96.0.12:9000", 8000), ("", 8000), (None, 8000)])
def test_the_health_check_asks_at_the_servers_port(value: str | None, port: int) -> None:
    """A stand-in for urllib's opener prints what would be opened."""
    script = f"""
import runpy, urllib.request
urllib.request.OpenerDirector.open = lambda self, url, timeout: exit(url)
runpy.run_path({str(PACKAGING / "healthcheck.py")!r}, run_name="__main__")
"""
    environ = {} if value is None else {"PENSTOCK_PORT": value}
    asked = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert asked.stderr == f"http://127.0.0.1:{port}/health\n"
