"""Designed steps are ones that the executor can compute; measured ones know their shape, their parts and the host's time."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.clock import VirtualClock, WallClock
from penstock.engine.ports import Detokenizer
from penstock.lab.recording import open_recording
from penstock.lab.steps import REFERENCE, MeasuredStep, StepRunner, design, fits, measure, measure_with_host, steps_of
from penstock.models.architectures import describe
from penstock.models.catalog import resolve
from penstock.models.load import load_model
from penstock.obs.recording import Recorder
from penstock.testing.hash_executor import HashExecutor
from penstock.types.errors import PenstockError
from penstock.types.plan import Capacity, RowPlan, StepShape
from penstock.types.stats import StepStats
from tiny_models import TinyLlama, write_gguf

CAPACITY = Capacity(num_blocks=257, block_size=16, max_rows=8, max_step_tokens=128, max_model_len=512)


class Letters:
    def push(self, token_ids: object) -> str:
        return "x"

    def flush(self) -> str:
        return ""


def detokenizer(skip_special_tokens: bool) -> Detokenizer:
    return Letters()


def test_designed_steps_fit_and_come_once() -> None:
    shapes = design(CAPACITY)
    assert len(shapes) == len(set(shapes)) > 20
    for shape in shapes:
        assert fits(shape, CAPACITY)
        assert len(shape.rows) <= 8
        assert sum(query_len for query_len, _ in shape.rows) <= 128
    assert any(shape.num_samples == 0 for shape in shapes)
    assert any({query_len > 1 for query_len, _ in shape.rows} == {True, False} for shape in shapes), "mixes"
    assert design(CAPACITY) == shapes
    assert design(CAPACITY, seed=2) != shapes


def test_every_shape_is_computed_in_every_round(tmp_path: Path) -> None:
    model = load_model(resolve(str(write_gguf(tmp_path / "tiny.gguf", TinyLlama(max_model_len=512))), tmp_path))
    executor = NativeExecutor(model, describe(model.spec), **asdict(CAPACITY), num_threads=1)
    runner = StepRunner(executor, 264)
    runner.fill()
    shapes = design(CAPACITY)
    seen: list[tuple[int, int]] = []
    steps = measure(runner, shapes, num_rounds=2, progress=lambda done, of: seen.append((done, of)))
    warm, cold = ([step for step in steps if bool(step.coldness) is is_cold] for is_cold in (False, True))
    assert len(warm) == 2 * len(shapes)
    assert {step.group for step in warm} == set(range(len(shapes)))
    assert all(step.shape == shapes[step.group] for step in warm)
    num_prompts = sum(max(shape.rows)[0] > 1 for shape in shapes)
    assert [(step.shape, step.coldness) for step in cold] == [(REFERENCE, 1.0)] * 2 * num_prompts, "one after each prompt"
    assert not {step.group for step in cold} & {step.group for step in warm}
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [step.shape for step in steps[: len(shapes)]] != shapes, "in an order of its own"
    for step in steps:
        assert step.execute_ns >= sum(step.parts_ns.values()) > 0
    executor.close()


def test_the_hosts_time_is_what_is_between_steps() -> None:
    steps = measure_with_host(HashExecutor(CAPACITY), detokenizer, 1000, WallClock(), num_tokens=6, first_group=7)
    assert {len(step.shape.rows) for step in steps} == {1, 2, 3, 4, 5, 6, 8}
    assert min(step.group for step in steps) == 7
    assert all(step.host_ns is not None for step in steps)


def record(path: Path, depth: int = 1) -> list[MeasuredStep]:
    about = {
        "model": "",
        "machine": {},
        "config": "",
        "settings": {},
        "capacity": asdict(CAPACITY),
        "depth": depth,
        "has_prefix_caching": True,
        "has_tier": False,
    }
    recorder = Recorder(path, max_bytes=1 << 30, clock=VirtualClock(), block_size=16, about=about)
    for idx, (at_ns, num_running) in enumerate(((100, 2), (250, 0), (900, 1), (1000, 1))):
        rows = [RowPlan("a", 5 + idx, 1, (), 1), RowPlan("b", 0, 3, (), 0)][: 1 if idx in (1, 2) else 2]
        parts = {"execute": 60 + idx, "linear": 40}
        stats = StepStats(idx, at_ns, at_ns + 80, num_running, 0, 64, 60, 0, parts_ns=parts, planned_ns=at_ns, rows=rows)
        recorder.on_step(stats)
        recorder.on_turn({"schedule": 7, "commit": 2})
    recorder.close()
    return steps_of(open_recording(path), num_groups=2)


def test_steps_of_a_recording(tmp_path: Path) -> None:
    steps = record(tmp_path / "r")
    assert [step.shape.rows for step in steps] == [((1, 5), (3, 0)), ((1, 6),), ((1, 7),), ((1, 8), (3, 0))]
    assert [step.coldness for step in steps] == [0, 1, 0.8, 0], "the prompt of the first one took the weights' place in caches"
    assert [step.execute_ns for step in steps] == [60, 61, 62, 63]
    assert [step.parts_ns for step in steps] == [{"linear": 40}] * 4
    assert [step.host_ns for step in steps] == [90, None, 38, None], "after the second it was idle; the last has no next"
    assert [step.group for step in steps] == [0, 0, 1, 1]


def test_with_two_steps_in_flight_the_host_is_hidden(tmp_path: Path) -> None:
    assert [step.host_ns for step in record(tmp_path / "r", depth=2)] == [None] * 4


def test_a_recording_without_steps(tmp_path: Path) -> None:
    record(tmp_path / "r")
    path = tmp_path / "r"
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    with pytest.raises(PenstockError, match="has no steps"):
        steps_of(open_recording(path))


def test_a_shape_that_needs_more_blocks_than_there_are() -> None:
    assert fits(StepShape(((1, 200),) * 4, 4), CAPACITY)
    assert not fits(StepShape(((1, 200),) * 9, 9), CAPACITY)
    assert not fits(StepShape(((1, 500),) * 8, 8), replace(CAPACITY, num_blocks=200))
    assert not fits(StepShape(((1, 511),), 1), CAPACITY)
