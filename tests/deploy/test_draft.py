"""A small model that guesses for a large one: the same answers, and what is refused at the start."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.config import (
    Backend,
    BackendConfig,
    Config,
    KvConfig,
    Load,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    SharingConfig,
)
from penstock.deploy import engine_maker, factory
from penstock.deploy.draft import open_draft
from penstock.deploy.factory import start_deployment, start_model
from penstock.deploy.resolve import packed_weights
from penstock.deploy.resolve import resolve as resolve_blueprint
from penstock.deploy.resources import MemoryBudget, Resources
from penstock.engine import supervisor
from penstock.engine.draft_model import DraftModel
from penstock.engine.state import EngineState
from penstock.models.catalog import resolve
from penstock.models.packed_file import write_packed
from penstock.sched.guessing import Guessing
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError, ExecutorFailure, ModelError, NotEnoughMemory
from penstock.types.plan import StepPlan
from penstock.types.request import FinishReason
from support.drafts import answers
from support.executors import executor_class
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf

LARGE = TinyLlama(num_layers=3)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "large.gguf", LARGE)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, rounded to 4 bits: it is often right."""
    return write_gguf(tmp_path_factory.mktemp("models") / "small.gguf", LARGE, matrix_type="Q4_1")


def config(small: Path | str | None, backend: str = Backend.NATIVE, **scheduler: Any) -> Config:
    return Config(
        backend=BackendConfig(backend=backend),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4, speculation_model=None if small is None else str(small), **scheduler),
    )


def start(large: Path, config: Config, resources: Resources | None = None) -> Any:
    return start_model(config, resolve(str(large), large.parent), resources)


def test_a_missing_small_model_fails_the_start_though_its_model_is_loaded_later(large: Path) -> None:
    wanted = replace(config("nosuch.gguf"), model=ModelConfig(model=str(large)), sharing=SharingConfig(load_on=Load.REQUEST))
    with pytest.raises(ModelError, match=r"nosuch\.gguf: there is no such file"):
        start_deployment([wanted])


@pytest.mark.parametrize("backend", [Backend.NATIVE, Backend.REFERENCE])
def test_answers_are_the_same_and_guesses_are_right(
    large: Path, small: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Guessing, "_step_ns", lambda *_: 1e12)  # whatever the machine does, guesses cost nothing
    caplog.set_level(logging.INFO)
    found: list[list[Any]] = []
    guesses: list[Counter[tuple[str, int, int]]] = []
    for options in ({"speculation": "off"}, {"speculation_model": str(small), "speculation": "off"}):
        running = start(large, replace(config(None, backend), scheduler=SchedulerConfig(max_num_seqs=4, **options)))
        found.append(answers(running))
        guesses.append(running.metrics.guesses)
        assert ("draft" in running.metrics.step_ns) == ("speculation_model" in options)
        assert running.close(30.0)
    assert found[0] == found[1]
    assert all(reason is FinishReason.LENGTH for reason, _ in found[0])
    assert not guesses[0]
    assert sum(num_accepted * rows for (_, _, num_accepted), rows in guesses[1].items()) > 20
    assert {source for source, *_ in guesses[1]} == {"draft"}
    assert [record.message for record in caplog.records if "guesses tokens in" in record.message]


def test_it_counts_as_the_model_s_memory(large: Path, small: Path) -> None:
    resources = Resources()
    running = start(large, config(small), resources)
    share = resources.memory.share("large")
    running.close()
    assert share is not None
    assert 0 < share.num_draft_bytes < share.num_kv_bytes
    assert "draft model" in str(share)


def test_settings_of_the_server_are_not_for_it(large: Path, small: Path) -> None:
    """It has no prefix cache, whose changes could be published."""
    wanted = replace(config(small), server=ServerConfig(kv_events="127.0.0.1:5557", kv_events_topic="kv"))
    assert factory.plan_share(wanted, resolve(str(large), large.parent), Resources()).num_draft_bytes


def test_its_packed_weights_are_used(large: Path, small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = replace(config(None), model=ModelConfig(model=str(small), cache_dir=str(tmp_path)))
    packed = packed_weights(alone, small)
    _, _, executor = factory.open_executor(alone, resolve(str(small), small.parent))
    with closing(executor):
        write_packed(packed.path, packed.identity(), executor.packed)  # type: ignore[attr-defined]
    caplog.set_level(logging.INFO)
    start(large, replace(config(small), model=ModelConfig(cache_dir=str(tmp_path)))).close()
    assert f"weights are mapped from {packed.path}" in caplog.text


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[DraftModel]:
    """The small models that a test has opened."""
    found: list[DraftModel] = []

    def noted(*arguments: Any) -> DraftModel:
        found.append(open_draft(*arguments))
        return found[-1]

    monkeypatch.setattr("penstock.deploy.engine_maker.open_draft", noted)
    return found


def test_its_steps_may_take_as_long_as_the_models(large: Path, small: Path, opened: list[DraftModel]) -> None:
    """Waiting for the step of another model in the process counts, for both."""
    start(large, replace(config(small), backend=BackendConfig(backend=Backend.NATIVE, step_timeout_s=7.0))).close()
    assert opened[0]._timeout_s == 7.0


def test_a_hung_step_keeps_its_memory(
    large: Path, small: Path, opened: list[DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    resources, comes_back = Resources(), threading.Event()
    running = start(large, config(small), resources)
    share = resources.memory.share("large")
    assert share is not None
    with monkeypatch.context() as hanging:
        hanging.setattr(executor_class(Backend.NATIVE), "submit", lambda *_: comes_back.wait(60.0))
        opened[0]._plans.put(StepPlan(0, 0, (), (), ()))
        assert running.close()
        assert resources.memory.stuck_bytes("large") == share.num_draft_bytes
        comes_back.set()
        opened[0]._thread.join(60.0)
    assert resources.memory.stuck_bytes() == 0


def test_a_model_that_failed_gets_a_new_one(
    large: Path, small: Path, opened: list[DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guessing, "_step_ns", lambda *_: 1e12)

    def fail(*_: Any) -> None:
        raise ExecutorFailure("broken")

    running = start(large, config(small))
    good = answers(running)
    with monkeypatch.context() as broken:
        broken.setattr(executor_class(Backend.NATIVE), "collect", fail)
        assert {reason for reason, _ in answers(running)} == {FinishReason.ERROR}
    end = time.monotonic() + 60.0
    while running.engine.state is not EngineState.READY:
        assert time.monotonic() < end
        time.sleep(0.01)
    num_guesses = running.metrics.guesses.total()
    assert answers(running) == good
    assert running.metrics.guesses.total() > num_guesses
    assert running.close(30.0)
    assert [draft.num_behind(make_request()) for draft in opened] == [0, 0], "both are closed"


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_a_model_that_is_closed_while_its_engine_restarts_leaves_nothing(
    large: Path, small: Path, opened: list[DraftModel], monkeypatch: pytest.MonkeyPatch, *, ends_in_time: bool
) -> None:
    resources, is_loading, may_load, tap = Resources(), threading.Event(), threading.Event(), Mock()
    running = start_model(config(small), resolve(str(large), large.parent), resources, tap=tap)
    share = resources.memory.share("large")
    assert share is not None
    open_next = engine_maker.open_draft

    def open_late(*arguments: Any) -> DraftModel:
        is_loading.set()
        assert may_load.wait(60.0)
        return open_next(*arguments)

    def fail(*_: Any) -> None:
        raise ExecutorFailure("broken")

    monkeypatch.setattr(engine_maker, "open_draft", open_late)
    with monkeypatch.context() as broken:
        broken.setattr(executor_class(Backend.NATIVE), "collect", fail)
        answers(running)
    assert is_loading.wait(60.0)
    monkeypatch.setattr(supervisor, "ABORT_GRACE_S", 60.0 if ends_in_time else 0.0)
    if ends_in_time:
        threading.Timer(0.1, may_load.set).start()
    running.close()
    assert resources.memory.stuck_bytes("large") == (0 if ends_in_time else share.num_bytes)
    may_load.set()
    running.engine._thread.join(60.0)  # type: ignore[attr-defined]
    assert len(opened) == 2
    assert tap.watch.call_count == (2 if ends_in_time else 1), "no engine is made for a model that is gone"
    assert not any(draft.is_alive for draft in opened)
    assert (resources.memory.stuck_bytes(), resources.memory.share("large"), resources.loads) == (0, None, {})


class TestRefused:
    def refused(self, large: Path, small: Path | str, **scheduler: Any) -> str:
        with pytest.raises(ConfigError) as error:
            start(large, config(small, **scheduler))
        return str(error.value)

    def test_a_vocabulary_of_another_size(self, large: Path, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "other.gguf", TinyLlama(vocab_size=261))
        assert "other can't guess for large, since its vocabulary is another: it has 261 tokens" in self.refused(large, path)

    def test_one_other_token(self, large: Path, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "other.gguf", TinyLlama())
        path.write_bytes(path.read_bytes().replace(b"<|im_end|>", b"<|IM_END|>"))
        assert "token 2 is b'<|IM_END|>', and for large it is b'<|im_end|>'" in self.refused(large, path)

    def test_a_gpu(self, large: Path, small: Path) -> None:
        blueprint, _ = resolve_blueprint(config(small), resolve(str(large), large.parent), Resources().machine("large"))
        on_gpu = replace(blueprint.compute, options=replace(blueprint.compute.options, backend=Backend.CUDA))
        with pytest.raises(ConfigError, match="A small model guesses only on the CPU"):
            factory._draft_config(config(small), replace(blueprint, compute=on_gpu))

    def test_a_model_with_a_recurrent_state(self, large: Path, tmp_path: Path) -> None:
        assert "recurrent state" in self.refused(large, write_case(CASES["lfm2"], tmp_path))

    @pytest.mark.parametrize("batching", ["static", "dynamic"])
    def test_a_batch_that_is_fixed(self, large: Path, small: Path, batching: str) -> None:
        assert "so --speculation-model would change nothing" in self.refused(large, small, batching=batching)

    def test_too_little_memory_for_both(self, large: Path, small: Path) -> None:
        blueprint, _ = resolve_blueprint(config(None), resolve(str(large), large.parent), Resources().machine("large"))
        resources = Resources(MemoryBudget(lambda: blueprint.share.num_bytes + 10_000))
        with pytest.raises(NotEnoughMemory, match=r"Beside large, the model .*small\.gguf that guesses for it has no room"):
            start(large, config(small), resources)
