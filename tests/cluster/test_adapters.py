"""Adapters in a cluster: its answers are those of a single server, and replicas keep to the adapters that they have."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.config import Config
from penstock.config.components import config_from
from penstock.deploy.factory import start_deployment
from support.server.completions import URL
from support.server.harness import LiveServer, wait_until
from support.site import Site, site
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_gguf

TINY = TinyLlama()
NAMES = ("red", "green", "team/blue")
PROMPTS = ("in the beginning", "the end of it")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        write(tmp_path / "adapters" / name, seed)
    return tmp_path / "adapters"


def write(path: Path, seed: int) -> Path:
    return write_adapter(path, factors_of_llama(TINY, rank=2 + seed, ends=("q_proj", "o_proj"), seed=seed))


@pytest.fixture
def config(folder: Path) -> Config:
    path = write_gguf(folder.parent / "tiny.gguf", TINY)
    common = {"model": str(path), "served_model_name": ("toy",), "threads": 1, "kv_cache_memory": 4 << 20, "port": 0}
    return config_from({**common, "lora_dir": str(folder), "shutdown_timeout": 0.0, "replicas": 2})


def answer(url: str, model: str, prompt: str) -> tuple[int, str]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12}
    got = httpx.post(url + URL, json=body, timeout=60)
    return got.status_code, got.json()["choices"][0]["text"] if got.status_code == 200 else got.json()["error"]["message"]


def answers(url: str, *names: str) -> list[tuple[int, str]]:
    return [answer(url, name, prompt) for prompt in PROMPTS for name in names]


@contextmanager
def single(config: Config) -> Iterator[str]:
    deployment = start_deployment([config])
    [running] = deployment.running
    with closing(deployment), LiveServer(running) as server:
        yield server.url


def loads(cluster: Site) -> list[int]:
    """How many adapters each replica has read."""
    return [replica.running.adapters.stats.num_loads for replica in cluster.crews[0].replicas]


@pytest.mark.parametrize("router", ["round-robin", "prefix"])
def test_answers_are_those_of_a_single_server(config: Config, router: str) -> None:
    names = ("toy", *NAMES, "none")
    with single(config) as url:
        expected = answers(url, *names) * 2
    assert len({text for _, text in expected}) == 2 * 4 + 1, "each adapter and the model have answers of their own"
    with site(config_with(config, router=router)) as cluster:
        assert answers(cluster.url, *names) * 2 == expected


def config_with(config: Config, **values: object) -> Config:
    common = {"model": config.model.model, "served_model_name": ("toy",), "threads": 1, "kv_cache_memory": 4 << 20, "port": 0}
    return config_from({**common, "lora_dir": config.lora.lora_dir, "shutdown_timeout": 0.0, "replicas": 2, **values})


def test_requests_go_where_their_adapter_is(config: Config) -> None:
    with site(config) as cluster:
        for _ in range(3):
            assert [status for status, _ in answers(cluster.url, *NAMES)] == [200] * 6
        assert sum(loads(cluster)) == len(NAMES), "each adapter was read by one replica"
        assert min(loads(cluster)) > 0


def test_the_front_shows_its_readings_of_adapters_and_not_what_replicas_hold(config: Config, folder: Path) -> None:
    (folder / "green" / "adapter_model.safetensors").write_bytes(b"no tensors")
    with site(config_with(config, metrics_compat="vllm")) as cluster:
        assert [answer(cluster.url, name, "a")[0] for name in ("red", "green")] == [200, 400]
        page = httpx.get(f"{cluster.url}/metrics").text
        assert "adapters" not in httpx.get(f"{cluster.url}/load").json()
    shown = dict(re.findall(r"^penstock_(adapter\S+) (\S+)", page, re.MULTILINE))
    assert float(shown.pop('adapter_load_seconds_total{model="toy"}')) > 0
    assert shown == {
        'adapter_names{model="toy"}': "2.0",
        'adapter_loads_total{model="toy",result="ok"}': "1.0",
        'adapter_loads_total{model="toy",result="failed"}': "1.0",
    }
    assert "lora_requests_info" not in page


def test_a_bad_adapter_is_refused_with_its_cause_and_others_go_on(config: Config, folder: Path) -> None:
    (folder / "green" / "adapter_model.safetensors").write_bytes(b"no tensors")
    with single(config) as url:
        expected = answer(url, "green", "a")
    with site(config) as cluster:
        assert answer(cluster.url, "green", "a") == expected
        assert expected[0] == 400
        assert answer(cluster.url, "red", "a")[0] == 200


def test_an_adapter_that_is_changed_under_its_name_is_another_one(config: Config, folder: Path) -> None:
    with site(config) as cluster:
        before = answer(cluster.url, "red", "a")
        shutil.rmtree(folder / "red")
        write(folder / "red", seed=9)
        body = {"lora_name": "red", "lora_path": str(folder / "red"), "load_inplace": True}
        loaded = httpx.post(f"{cluster.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert loaded.status_code == 200, loaded.text
        after = answer(cluster.url, "red", "a")
        assert (after[0], after != before) == (200, True)


def test_files_that_differ_at_a_replica_are_refused_there(config: Config, folder: Path) -> None:
    """The front has read other content at the path, as on machines whose folders differ."""
    with site(config) as cluster:
        adapters = cluster.crews[0].replicas[0].running.adapters
        ref = adapters.with_content(b"x" * 16, folder / "red")
        adapters.want(ref)
        wait_until(lambda: adapters.state(ref.number).failure)
        assert "changed while it was used" in adapters.state(ref.number).failure


def test_files_that_were_replaced_are_read_again_once_a_replica_refuses_them(config: Config, folder: Path) -> None:
    with site(config_with(config, router="round-robin")) as cluster:
        before = answer(cluster.url, "red", "a")
        shutil.rmtree(folder / "red")
        write(folder / "red", seed=9)
        assert answer(cluster.url, "red", "a") == before, "one replica refuses, and the other still has the old files' content"
        after = [answer(cluster.url, "red", "a") for _ in range(2)]
        assert (after[0][0], after[0] != before, after[0] == after[1]) == (200, True, True)


def test_an_adapter_that_no_replica_can_load_may_be_asked_for_again(config: Config, folder: Path) -> None:
    with site(config) as cluster:
        for replica in cluster.crews[0].replicas:
            adapters = replica.running.adapters
            adapters.with_content = lambda _, path, find=adapters.with_content: find(b"x" * 16, path)
        status, told = answer(cluster.url, "red", "a")
        assert (status, "changed while it was used. Ask again" in told) == (503, True), told


def test_an_answer_without_a_limit_ends_where_the_kv_cache_does_beside_its_adapter(config: Config) -> None:
    with site(config_with(config, kv_cache_memory=40 << 10)) as cluster:
        [front] = cluster.deployment.running
        context = front.model.capacity.max_model_len
        assert answer(cluster.url, "red", "a")[0] == 200  # its size is known now
        body = {"model": "red", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        got = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
        assert got.status_code == 200, got.text
        assert got.json()["choices"][0]["finish_reason"] == "length"
        assert 100 < got.json()["usage"]["total_tokens"] < context
