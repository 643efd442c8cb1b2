"""`penstock cluster up` on a Ray of this machine, with real weights. `make test-cluster` brings Ray."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.config import ServerConfig
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.routes import Route
from support.server.harness import running, wait_until

pytest.importorskip("ray", reason="Ray is not installed: `make test-cluster` brings it")

MODEL = "smollm2:135m"
PROMPT = "Once upon a time"


@contextmanager
def up(*words: str, log: Path) -> Iterator[str]:
    """The URL of a cluster that is ready."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "penstock", "cluster", "up", MODEL, "--port", str(port), "--threads", "1", *words]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            while True:
                assert process.poll() is None, log.read_text(errors="replace")
                try:
                    if httpx.get(f"{url}/ready", timeout=60).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def replicas(url: str) -> dict[str, dict]:
    return {one["name"]: one for one in httpx.get(f"{url}/load", timeout=60).json()["replicas"]}


def ask(url: str, max_tokens: int = 32) -> str:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def pids_of_replicas() -> set[int]:
    found = subprocess.run(["pgrep", "-f", "ray::ServeReplica:penstock"], capture_output=True, text=True).stdout
    return {int(pid) for pid in found.split()}


@pytest.fixture
def alone() -> str:
    """The long answer of a single engine."""
    program = (
        "import json, sys; from penstock import LLM, SamplingParams as Params\n"
        f"with LLM({MODEL!r}, threads=1) as llm: [one] = llm.generate({PROMPT!r}, Params(temperature=0, max_tokens=900))\n"
        "json.dump(one.outputs[0].text, sys.stdout)"
    )
    return json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)


def test_an_answer_survives_its_replica_which_ray_replaces(alone: str, tmp_path: Path) -> None:
    with up("--replicas", "2", log=tmp_path / "log") as url, concurrent.futures.ThreadPoolExecutor() as pool:
        wait_until(lambda: len(replicas(url)) == 2, 120)
        before = set(replicas(url))
        answer = pool.submit(ask, url, 900)
        while not any(one["requests_running"] for one in replicas(url).values()):
            time.sleep(0.01)
        busy = next(name for name, one in replicas(url).items() if one["requests_in_flight"])
        pid = next(pid for pid in pids_of_replicas() if listens(pid, replicas(url)[busy]["address"]))
        os.kill(pid, signal.SIGKILL)
        assert answer.result(120) == alone
        wait_until(lambda: len(replicas(url)) == 2 and set(replicas(url)) != before, 120)


def listens(pid: int, address: str) -> bool:
    """Return whether a process has the connection from this address."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    inodes = {line[9] for line in lines if line[1].endswith(port)}
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_a_changed_file_replaces_the_model_and_no_answer_is_lost(alone: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("max_num_seqs = 16\n")
    with (
        up("--config", str(file), log=tmp_path / "log") as url,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        before, old_pids = set(replicas(url)), pids_of_replicas()
        answers = [pool.submit(ask, url, 900) for _ in range(4)]
        wait_until(lambda: any(one["requests_running"] for one in replicas(url).values()), 60)
        file.write_text("max_num_seqs = 8\n")
        command = [sys.executable, "-m", "penstock", "cluster", "update", url]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        assert told.stdout == f"{MODEL}: replaced\n", told.stderr
        after = set(replicas(url))
        assert after
        assert not after & before
        assert alone.startswith(ask(url))
        assert [answer.result(120) for answer in answers] == [alone] * 4
        wait_until(lambda: not pids_of_replicas() & old_pids, 60)


def test_the_number_of_replicas_follows_the_load(tmp_path: Path) -> None:
    with up("--replicas", "1", "--max-replicas", "2", log=tmp_path / "log") as url:
        is_enough = threading.Event()

        def keep_asking() -> int:
            num_answers = 0
            while not is_enough.is_set():
                num_answers += bool(ask(url, 100))
            return num_answers

        with concurrent.futures.ThreadPoolExecutor(96) as pool:  # more than one replica runs at once
            asked = [pool.submit(keep_asking) for _ in range(96)]
            try:
                wait_until(lambda: len(replicas(url)) == 2, 200)
            finally:
                is_enough.set()
            assert all(one.result() for one in asked)
        told = httpx.get(f"{url}/load").json()["scaling"]
        assert [one["replicas"] for one in told] == [2, 2], "now, and at the last change"
        assert "that needs" in told[1]["reason"]


def test_a_second_cluster_on_one_ray_is_refused_and_down_stops_the_first(tmp_path: Path) -> None:
    ray = Path(sys.executable).with_name("ray")
    subprocess.run([ray, "start", "--head", "--num-cpus", "2", "--port", "0"], check=True, capture_output=True)
    try:
        with up("--replicas", "1", "--address", "auto", log=tmp_path / "log") as url:
            command = [sys.executable, "-m", "penstock", "cluster"]
            second = [*command, "up", MODEL, "--threads", "1", "--address", "auto", "--port", "0"]
            refused = subprocess.run(second, capture_output=True, text=True)
            assert (refused.returncode, "runs a cluster of Penstock already" in refused.stderr) == (1, True)
            assert ask(url)
            stopped = subprocess.run([*command, "down"], capture_output=True, text=True, check=True)
            assert "Stopped the replicas of 1 model" in stopped.stdout
            wait_until(lambda: not replicas(url), 60)
    finally:
        subprocess.run([ray, "stop", "--force"], capture_output=True)


def test_a_chat_through_a_route_and_a_cluster_is_one_trace(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.proto", reason="the extra otel is not installed")
    from support.server.collector import collecting

    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with collecting() as collector, up("--replicas", "2", "--otlp-endpoint", collector.url, log=tmp_path / "log") as url:
        upstream = UpstreamConfig(name="far", url=f"{url}/v1", model=MODEL)
        more = {"upstreams": [upstream], "routes": [Route(name="auto", models=("far", "toy"))]}
        config = ServerConfig(port=0, shutdown_timeout_s=0.0, otlp_endpoint=collector.url)
        with running(config=config, more=more) as near:
            body = {"model": "auto", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "stream": True}
            headers = {"traceparent": f"00-{trace}-{caller}-01"}
            answer = httpx.post(f"{near.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
            assert answer.text.endswith("data: [DONE]\n\n")
            spans = collector.wait_for(2)
        names = set(replicas(url))
    assert {span.trace_id for span in spans} == {trace}
    by_id = {span.span_id: span for span in spans}
    [decode] = [span for span in spans if span.name == "decode"]
    way = [decode]
    while way[-1].parent_id in by_id:
        way.append(by_id[way[-1].parent_id])
    assert [span.name for span in way] == ["decode", f"chat {MODEL}", "upstream far", "chat far"]
    assert way[-1].parent_id == caller
    [prefill] = [span for span in spans if span.name == "prefill"]
    assert prefill.attributes["penstock.route.replica"] in names
