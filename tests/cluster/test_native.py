"""Replicas with real kernels: KV that comes from another replica gives the bits that would have been computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from penstock.clock import WallClock
from penstock.cluster.fleet import ANSWER, Fleet
from penstock.cluster.front import serve_replicas
from penstock.cluster.process import ReplicaThread
from penstock.cluster.transfer import Fetcher
from penstock.config import Config
from penstock.config.components import config_from
from penstock.deploy.factory import locate
from penstock.deploy.resources import Resources
from penstock.deploy.running import RunningModel
from penstock.engine.bridge import Bridge
from penstock.sched.routing.routers import RoundRobin
from penstock.serve.http.listener import bind_socket
from support.cluster import Apart
from support.server.completions import URL
from support.server.harness import LiveServer, wait_until
from support.tiny_models import TinyLlama, write_gguf

SECRET = b"a secret of tests"
PROMPTS = [" ".join(f"{word * number}" for number in range(1, 60)) for word in (3, 5, 7)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama(max_model_len=512))
    return config_from({"model": str(path), "threads": 1, "kv_cache_memory": 8 << 20, "max_num_seqs": 4})


@contextmanager
def cluster(config: Config, num_replicas: int, slo_itl_ns: int | None) -> Iterator[RunningModel]:
    with ExitStack() as stack:
        bridge, listener = Bridge(), bind_socket("127.0.0.1", 0)
        address = listener.getsockname()[:2]
        clock = WallClock()
        fleet = Fleet(listener, secret=SECRET, router=RoundRobin(), clock=clock, sink=bridge.deliver, slo_itl_ns=slo_itl_ns)
        fleet.start()
        stack.callback(fleet.close, 0.0)
        for number in range(num_replicas):
            replica = ReplicaThread(config, name=f"r{number}", front=address, secret=SECRET, num_beside=num_replicas)
            stack.callback(replica.leave, 1.0)
        wait_until(lambda: fleet.num_replicas == num_replicas)
        served = serve_replicas(config, locate(config), fleet, bridge, Resources(num_models=num_replicas).machine(""))
        yield served.load()


@pytest.fixture(autouse=True)
def _slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV always takes longer to compute than to copy."""
    monkeypatch.setattr(Fetcher, "_is_cheap", lambda *_: True)


def answers(running: RunningModel) -> tuple[list[object], list[int]]:
    """Return the answers to each prompt, twice, with their log-probabilities, and how many tokens each had cached."""
    choices: list[object] = []
    cached: list[int] = []
    with LiveServer(running) as server:
        for prompt in PROMPTS * 2:
            body = {"model": running.model.name, "prompt": prompt, "seed": 3, "logprobs": 4, "max_tokens": 24}
            answer = httpx.post(server.url + URL, json=body, timeout=60).json()
            choices.append(answer["choices"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return choices, cached


def test_answers_have_the_same_bits_with_kv_of_another_replica(config: Config) -> None:
    """Each prompt goes to one replica first, and then to the other."""
    with cluster(config, 1, None) as running:
        expected, _ = answers(running)
    with cluster(config, 2, None) as running:
        others, cached = answers(running)
    assert others == expected
    num = len(PROMPTS)
    assert min(cached[num:]) > 100, "the second time, blocks came from the other replica"
    assert max(cached[:num]) < 32


def test_answers_have_the_same_bits_where_they_move(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sched.routing.dispatcher.Split", Apart)
    with cluster(config, 1, None) as running:
        expected, _ = answers(running)
    with cluster(config, 2, 1) as running:
        assert answers(running)[0] == expected
        assert running.engine.num_moved[ANSWER]
