"""Designed steps are ones that the executor can compute; measured ones know their shape, their parts and the host's time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.clock import VirtualClock, WallClock
from penstock.engine.ports import Detokenizer
from penstock.lab.cost_model import CostModel, coldness_after
from penstock.lab.fitting import units_of
from penstock.lab.recording import Arrival, StepDone, open_recording
from penstock.lab.step_counts import counts_of
from penstock.lab.step_design import _draw, design
from penstock.lab.steps import (
    NUM_TO_WARM,
    REFERENCE,
    MeasuredStep,
    StepRunner,
    fits,
    measure,
    measure_with_host,
    steps_of,
    texts_of,
)
from penstock.models.architectures import describe
from penstock.models.catalog import resolve
from penstock.models.load import load_model
from penstock.obs.recording import Recorder
from penstock.testing import sizes_of
from penstock.testing.hash_executor import HashExecutor
from penstock.types.errors import PenstockError
from penstock.types.plan import Capacity, RowPlan, StepPlan, StepShape
from penstock.types.request import NO_WAITS, WaitTimes
from penstock.types.result import StepResult, StepTiming
from penstock.types.stats import StepStats
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf

CAPACITY = Capacity(num_blocks=257, block_size=16, max_rows=8, max_step_tokens=128, max_model_len=512)


class Letters:
    def push(self, token_ids: object) -> str:
        return "x"

    def flush(self) -> str:
        return ""


def detokenizer(shown_special_ids: tuple[int, ...] | None) -> Detokenizer:
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


def test_designed_steps_reach_what_the_server_can_do() -> None:
    limits = replace(CAPACITY, num_blocks=4097, max_rows=32, max_step_tokens=512, max_model_len=8192)
    counts = [counts_of(shape) for shape in design(limits)]
    assert max(one.num_rows for one in counts) == 32
    assert max(one.num_prefill_tokens for one in counts) == 512
    assert max(one.max_context_len for one in counts) >= 8190
    assert max(one.num_decode_reads for one in counts) > 30_000
    assert 1 in [one.num_rows for one in counts]


def test_designed_steps_tell_more_than_as_many_drawn_ones() -> None:
    """The determinant of their information says how much they tell."""
    limits = replace(CAPACITY, num_blocks=4097, max_rows=32, max_step_tokens=512, max_model_len=8192)
    chosen, rng = design(limits), Random(3)
    drawn = [shape for shape in (_draw(limits, rng) for _ in range(400)) if shape.rows and fits(shape, limits)][: len(chosen)]
    rough = CostModel()
    counts = [counts_of(shape) for shape in (*chosen, *drawn)]
    matrix = np.stack(list(units_of(counts)[1].values()), axis=1) / np.array([[rough.counted_ns(one)] for one in counts])
    matrix /= np.linalg.norm(matrix, axis=0) + 1e-300
    half = len(chosen)
    told = [np.linalg.slogdet(rows.T @ rows + 1e-9 * np.eye(matrix.shape[1]))[1] for rows in (matrix[:half], matrix[half:])]
    assert told[0] > told[1] + 5


def test_rows_of_one_token_begin_with_the_blocks_that_they_read_again() -> None:
    plans: list[StepPlan] = []
    done = StepResult(0, {}, StepTiming(0, 1))
    executor: Any = SimpleNamespace(capacity=CAPACITY, submit=plans.append, collect=lambda _: done)
    StepRunner(executor, 264).run(StepShape(((1, 40), (64, 0), (1, 70), (1, 40)), 3, num_repeated=2 * 32))
    tables = [admit.block_ids for admit in plans[0].admits]
    assert tables[0][:2] == tables[2][:2] == tables[3][:2]
    others = [*tables[1], *(block_id for idx in (0, 2, 3) for block_id in tables[idx][2:])]
    assert len({*tables[0][:2], *others}) == 2 + len(others), "and share no other"


def test_some_designed_steps_have_a_common_prefix() -> None:
    common = [shape for shape in design(CAPACITY) if shape.num_repeated]
    assert len(common) > 5
    for shape in common:
        decodes = [context_len for query_len, context_len in shape.rows if query_len == 1]
        num_common, rest = divmod(shape.num_repeated, len(decodes) - 1)
        assert rest == num_common % CAPACITY.block_size == 0
        assert num_common <= min(decodes), "no row writes into a common block"


class TimedRunner(StepRunner):
    """Computes nothing: its reference steps take 3.5 ms, or 7 ms from the `slow_from`-th step on, and others 70 ms."""

    def __init__(self, slow_from: int) -> None:
        self._steps_left = slow_from

    def run(self, shape: StepShape) -> tuple[int, dict[str, int]]:
        self._steps_left -= 1
        if shape != REFERENCE:
            return 70_000_000, {}
        return 3_500_000 if self._steps_left >= 0 else 7_000_000, {}


def test_reference_steps_bring_the_weights_back_and_tell_how_slow_the_machine_is() -> None:
    shapes = [StepShape(((64, 0),), 1)]
    slow_from = 4 * (1 + 1 + NUM_TO_WARM)  # the last of four measured rounds
    steps, after_them = measure(TimedRunner(slow_from), shapes, num_rounds=4)
    assert [step.coldness for step in steps] == pytest.approx([0.1, 0.1, 0.1, 0.1]), "each reference leaves 3.5 of 35 ms"
    assert [step.coldness for step in after_them] == [1.0, 1.0, 1.0, 1.0]
    assert [step.slowness for step in steps] == [1.0, 1.0, 1.0, 1.5], "the mean of the references before it and after it"
    assert [step.slowness for step in after_them] == [step.slowness for step in steps]


def test_every_shape_is_computed_in_every_round(tmp_path: Path) -> None:
    model = load_model(resolve(str(write_gguf(tmp_path / "tiny.gguf", TinyLlama(max_model_len=512))), tmp_path))
    executor = NativeExecutor(model, describe(model.spec), **sizes_of(CAPACITY), num_threads=1)
    runner = StepRunner(executor, 264)
    runner.fill()
    shapes = design(CAPACITY)
    seen: list[tuple[int, int]] = []
    steps, after_them = measure(runner, shapes, num_rounds=2, progress=lambda done, of: seen.append((done, of)))
    assert len(steps) == len(after_them) == 2 * len(shapes)
    assert {step.group for step in steps} == set(range(len(shapes)))
    assert all(step.shape == shapes[step.group] for step in steps)
    assert all(step.shape == REFERENCE for step in after_them)
    assert not {step.group for step in steps} & {step.group for step in after_them}
    assert all(
        after.coldness == coldness_after(step.coldness, step.execute_ns) for step, after in zip(steps, after_them, strict=True)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [step.shape for step in steps[: len(shapes)]] != shapes, "in an order of its own"
    for step in (*steps, *after_them):
        assert step.execute_ns >= sum(step.parts_ns.values()) > 0
    executor.close()


def test_rows_with_a_recurrent_state_are_measured_too(tmp_path: Path) -> None:
    path = write_case(CASES["qwen3_5"], tmp_path)
    model = load_model(resolve(str(path), path))
    with closing(NativeExecutor(model, describe(model.spec), **sizes_of(CAPACITY), num_threads=1)) as executor:
        runner = StepRunner(executor, model.spec.vocab_size)
        runner.fill()
        shapes = [shape for shape in design(executor.capacity) if fits(shape, executor.capacity)]
        assert any(context_len for shape in shapes for _, context_len in shape.rows), "some go on from a state"
        for shape in shapes:
            runner.run(shape)


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
    }
    recorder = Recorder(path, max_bytes=1 << 30, clock=VirtualClock(), block_size=16, about=about)
    for idx, (at_ms, num_running) in enumerate(((100, 2), (250, 0), (900, 1), (910, 1))):
        rows = [RowPlan("a", 5 + idx, 1, (), 1), RowPlan("b", 0, 3, (), 0)][: 1 if idx in (1, 2) else 2]
        execute_ns, planned_ns = (70, 1, 1, 7)[idx] * 1_000_000, at_ms * 1_000_000
        parts = {"execute": execute_ns, "linear": 40}
        ended_ns = planned_ns + execute_ns + 20
        stats = StepStats(
            idx, planned_ns, ended_ns, num_running, 0, 64, 60, 0, parts_ns=parts, planned_ns=planned_ns, rows=rows
        )
        recorder.on_step(stats)
        recorder.on_turn({"schedule": 7, "commit": 2})
    recorder.close()
    return steps_of(open_recording(path), num_groups=2)


def test_steps_of_a_recording(tmp_path: Path) -> None:
    steps = record(tmp_path / "r")
    assert [step.shape.rows for step in steps] == [((1, 5), (3, 0)), ((1, 6),), ((1, 7),), ((1, 8), (3, 0))]
    ms = 1_000_000
    assert [step.execute_ns for step in steps] == [70 * ms, 1 * ms, 1 * ms, 7 * ms]
    assert [step.coldness for step in steps] == [0, 1, 0.75, 0.75**2], "the first took so long that the weights left the caches"
    assert [step.parts_ns for step in steps] == [{"linear": 40}] * 4
    assert [step.host_ns for step in steps] == [80 * ms, None, 9 * ms, None], (
        "after the second it was idle; the last has no next"
    )
    assert [step.group for step in steps] == [0, 0, 1, 1]


def test_texts_are_timed_while_the_engine_is_idle() -> None:
    step: Any = {"rows": (), "parts_ns": {}, "num_running": 0, "num_waiting": 0, "num_blocks_free": 0, "num_blocks_cached": 0}
    steps = [StepDone(step_id=idx, planned_ns=at, ended_ns=at + 50, **step) for idx, at in enumerate((100, 200))]
    came = {1: (0, 40), 2: (60, 150), 3: (155, 160), 4: (210, 252), 5: (260, None), 6: (300, 320)}
    waits = {6: WaitTimes(model=10)}
    requests = [
        Arrival(
            id=key, arrival_ns=at, queued_ns=queued, num_prompt_tokens=key, max_tokens=1, tenant="", priority=0,
            deadline_ns=None, beam_width=1, blocks=(), is_repeated=False, waits=waits.get(key, NO_WAITS),
        )
        for key, (at, queued) in came.items()
    ]  # fmt: skip
    events = [*requests[:1], steps[0], *requests[1:3], steps[1], *requests[3:]]
    recording: Any = SimpleNamespace(events=lambda: iter(events))
    assert texts_of(recording) == [(1, 40), (3, 5)], "2 and 4 came to a busy engine, 5 was refused, 6 waited for its model"


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
