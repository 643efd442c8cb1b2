"""A running model that is recorded: the header says what made it, and its plans are made again by the real policies."""

from __future__ import annotations

import asyncio
import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import BackendConfig, Config, KvConfig, SchedulerConfig, ServerConfig
from penstock.config.components import ModelConfig, config_from
from penstock.deploy import build
from penstock.deploy.factory import start_deployment, start_model
from penstock.deploy.policies import choose_policies
from penstock.deploy.recorder import shown_settings
from penstock.deploy.running import RunningModel
from penstock.lab.recording import Departure, open_recording
from penstock.lab.steps import steps_of
from penstock.models.catalog import ModelSource, SourceKind, resolve
from penstock.sched.policies.presets import PRESETS
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError
from support.recorded import recorded
from support.replay import replay
from support.tiny_models import TinyLlama, write_gguf

TINY = TinyLlama()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama())


def config_of(record: Path, preset: str = "penstock", **server: Any) -> Config:
    return Config(
        backend=BackendConfig(backend="native", threads=1),
        kv=KvConfig(kv_cache_memory_bytes=1 << 18),
        scheduler=SchedulerConfig(
            preset=preset,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            batch_window_s=0.003 if preset in ("static", "dynamic") else None,
            max_batch_size=3 if preset in ("static", "dynamic") else None,
            speculation="off",  # a recording does not have the words, so their guesses can't be made again
        ),
        server=ServerConfig(record=str(record), **server),
    )


def serve(path: Path, config: Config) -> None:
    """Five clients with four requests each; some share their beginning, and one in five goes away."""
    running = start_model(config, resolve(str(path), path.parent))

    async def client(number: int) -> None:
        for idx in range(4):
            prompt = [20 + pos % 5 for pos in range(18)] + [30 + number] * ((number * 17 + idx * 29) % 50)
            request = make_request(f"{number}-{idx}", prompt, max_tokens=4 + (number + idx) * 5 % 17, temperature=0.0)
            request.arrival_ns = running.clock.now_ns()
            with running.bridge.open([request]) as stream:
                while not stream.is_ended:
                    chunks = await stream.next_chunks()
                    if idx == number % 5 and chunks[-1].num_generated_tokens >= 3:
                        break

    async def clients() -> None:
        await asyncio.gather(*map(client, range(5)))

    asyncio.run(clients())
    running.close(10)


@pytest.mark.parametrize("preset", PRESETS)
def test_plans_of_the_native_backend_are_made_again(preset: str, gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    serve(gguf, config_of(path, preset))
    recording = open_recording(path)
    found = config_from(recording.header.settings)
    replayed = replay(recording, lambda: choose_policies(found).make())
    assert replayed.difference == ""
    assert replayed.num_equal == replayed.num_steps > 20
    steps = steps_of(recording)
    assert all({"linear", "attention", "sampling"} <= step.parts_ns.keys() for step in steps)
    assert any(step.host_ns for step in steps)
    departures = [event for event in recording.events() if isinstance(event, Departure)]
    assert len(departures) == 20
    assert sum(departure.num_cached_tokens for departure in departures) > 0


def test_the_header_says_what_made_it(gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    config = replace(config_of(path), model=ModelConfig(served_model_names=("chat",)))
    start_model(config, resolve(str(gguf), gguf.parent)).close(10)
    header = open_recording(path).header
    assert header.model == "tiny", "as in a fit of its steps, whatever it is called here"
    assert header.machine["cpus"] >= 1
    assert header.settings["max_num_seqs"] == 8
    assert header.settings["kv_cache_memory"] == 1 << 18
    assert "record" not in header.settings
    assert header.capacity.max_rows == 8
    assert header.depth == 1
    assert header.about["threads"] == 1
    assert str(tmp_path) not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def with_shares(record: Path, **server: Any) -> Config:
    """Two rows for two tenants, of which one has 50 times the share of the other."""
    config = config_of(record, **server)
    arguments = {"shares": {"umbrella": 1, "acme": 50}}
    scheduler = replace(config.scheduler, max_num_seqs=2, policy="fair", policy_args=arguments)
    return replace(config, scheduler=scheduler)


def serve_tenants(gguf: Path, config: Config) -> None:
    running = start_model(config, resolve(str(gguf), gguf.parent))

    async def ask(number: int) -> None:
        tenant = ("nobody", "acme", "umbrella")[number % 3]
        request = make_request(f"{number}", [20 + number] * (9 + number * 7 % 30), max_tokens=4 + number % 5, tenant=tenant)
        request.arrival_ns = running.clock.now_ns()
        with running.bridge.open([request]) as stream:
            while not stream.is_ended:
                await stream.next_chunks()

    async def everything() -> None:
        await asyncio.gather(*map(ask, range(30)))

    asyncio.run(everything())
    running.close(10)


def test_the_file_of_a_small_model_is_not_shown() -> None:
    chosen = SchedulerConfig(speculation_model="/home/ann/small.gguf", max_num_seqs=3)
    assert shown_settings([chosen], has_names=False) == {"speculation_model": "not recorded", "max_num_seqs": 3}


@pytest.mark.parametrize("has_names", [False, True])
def test_shares_of_tenants_are_recorded_with_their_names_or_not_at_all(has_names: bool, gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    config = with_shares(path, record_tenant_names=has_names)
    serve_tenants(gguf, config)
    recording = open_recording(path)
    header, text = recording.header, path.read_text()
    assert any(name in text for name in ("acme", "umbrella", "nobody")) is has_names
    assert header.settings["policy_args"] == (config.scheduler.policy_args if has_names else "not recorded")
    if has_names:
        replayed = replay(recording, lambda: choose_policies(config).make())
        assert replayed.difference == ""
        assert replayed.num_equal == replayed.num_steps > 20


OWN = """
from penstock.sched.policies.orders import FirstComeFirstServed

class Mine(FirstComeFirstServed):
    def __init__(self, friend: str) -> None:
        super().__init__()
"""


@pytest.mark.parametrize("has_names", [False, True])
def test_a_policy_of_ones_own_is_recorded_with_names_alone(has_names: bool, gguf: Path, tmp_path: Path) -> None:
    own, path = tmp_path / "secret_place.py", tmp_path / "r"
    own.write_text(OWN)
    config = config_of(path, record_tenant_names=has_names)
    scheduler = replace(config.scheduler, policy=f"{own}:Mine", policy_args={"friend": "acme"})
    serve(gguf, replace(config, scheduler=scheduler))
    recording = open_recording(path)
    header, text = recording.header, path.read_text()
    assert any(name in text for name in ("secret_place", "acme", str(tmp_path))) is has_names
    assert ("Mine" in header.settings["policy"]) is has_names
    assert (header.settings["policy_args"] == {"friend": "acme"}) is has_names


def test_configurations_have_names(gguf: Path, tmp_path: Path) -> None:
    names = []
    for idx, preset in enumerate(("penstock", "penstock", "vllm")):
        path = tmp_path / str(idx)
        start_model(config_of(path, preset), resolve(str(gguf), gguf.parent)).close(10)
        names.append(open_recording(path).header.config)
    assert names[0] == names[1] != names[2]


def test_a_file_that_is_in_the_way_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a recording, so it is not overwritten"):
        start_model(config_of(path), ModelSource(name="absent", kind=SourceKind.GGUF, path=tmp_path / "absent.gguf"))
    assert path.read_text() == "mine"


def test_a_start_that_fails_gives_the_file_back(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no room")

    config, source = config_of(tmp_path / "r"), resolve(str(gguf), gguf.parent)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_model_info", fail)
        with pytest.raises(RuntimeError, match="no room"):
            start_model(config, source)
    start_model(config, source).close(10)


async def read(running: RunningModel, name: str) -> None:
    with running.bridge.open([make_request(name, [20] * 9, max_tokens=4)]) as stream:
        while not stream.is_ended:
            await stream.next_chunks()


def test_a_model_that_is_loaded_again_goes_on_in_its_recording(gguf: Path, tmp_path: Path) -> None:
    """A server renames the older parts, and looks at the files in their places, only when it starts."""
    path, older = tmp_path / "r", tmp_path / "r.1"
    deployment = start_deployment([replace(config_of(path), model=ModelConfig(model=str(gguf)))])
    try:
        for name in "ab":
            running = deployment.want(deployment.default).result(30)
            asyncio.run(read(running, name))
            deployment.unload(deployment.default).result(30)
            older.write_text("mine")
    finally:
        deployment.close(10)
    assert older.read_text() == "mine"
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert [kind for kind in kinds if kind not in ("step", "parts")] == [
        *("header", "request", "end"),
        *("restart", "request", "end"),
        "close",
    ]


def test_a_sole_listener_is_told_without_a_group(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = recorded(monkeypatch, "penstock.engine.core.EngineCore")
    engines = recorded(monkeypatch, "penstock.engine.thread.Engine")
    config = replace(config_of(tmp_path), server=ServerConfig())
    running = start_model(config, resolve(str(gguf), gguf.parent))
    [(_, of_core)], [(_, of_engine)] = cores, engines
    assert of_core["journal"] is running.journal
    assert of_engine["turn_observer"] is running.metrics
    running.close(10)


def test_the_recording_has_room_for_what_waits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_size: 14\.31MiB is less than 16MiB"):
        config_of(tmp_path / "r", record_size_bytes=15_000_000)
