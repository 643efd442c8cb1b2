"""Several engines on one team of threads: their steps take turns, and each computes what it computes alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native._native import Team
from penstock.backends.native.executor import NativeExecutor
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.weights import LoadedModel
from penstock.types.plan import AdmitRow, RowPlan, StepPlan, Ticket
from penstock.types.sampling import SamplingParams
from support.tiny_models import TinyLlama, write_gguf

NUM_STEPS = 150


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Team:
    return Team(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedModel]:
    """Two models that differ in the number of stages of a step, so that a mix of their steps can't go unnoticed."""
    folder = tmp_path_factory.mktemp("tiny")
    shapes = [TinyLlama(num_layers=2), TinyLlama(num_layers=5)]
    return [load_gguf(write_gguf(folder / f"{shape.num_layers}.gguf", shape, matrix_type="Q8_0")) for shape in shapes]


def open_executor(model: LoadedModel, team: Team | None) -> NativeExecutor:
    return NativeExecutor(
        model,
        architectures.describe(model.spec),
        num_blocks=8,
        block_size=16,
        max_rows=32,
        max_step_tokens=32,
        max_model_len=96,
        team=team,
    )


def texts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 250, int(rng.integers(1, 40))).tolist() for _ in range(NUM_STEPS)]


def steps(executor: NativeExecutor, prompts: Sequence[list[int]], begin: Barrier | None = None) -> list[NDArray[np.float32]]:
    if begin is not None:
        begin.wait()
    return [executor.forward_logits(prompt) for prompt in prompts]


def test_engines_of_one_team_step_from_two_threads_and_compute_what_each_does_alone(
    models: list[LoadedModel], team: Team
) -> None:
    alone = [steps(open_executor(model, None), texts(i)) for i, model in enumerate(models)]
    together = [open_executor(model, team) for model in models]
    begin = Barrier(len(models))
    with ThreadPoolExecutor(len(models)) as threads:
        found = list(threads.map(steps, together, map(texts, range(len(models))), [begin] * len(models)))
    for wanted, logits in zip(alone, found, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(wanted, logits, strict=True))


def test_an_engine_is_loaded_while_another_one_of_its_team_steps(models: list[LoadedModel], team: Team) -> None:
    wanted = steps(open_executor(models[1], None), texts(1))
    first = open_executor(models[0], team)
    with ThreadPoolExecutor(1) as threads:
        stepping = threads.submit(steps, first, texts(0))
        second = open_executor(models[1], team)
        stepping.result()
    assert all(np.array_equal(a, b) for a, b in zip(wanted, steps(second, texts(1)), strict=True))


def test_engines_of_one_team_have_its_threads_and_no_others(models: list[LoadedModel]) -> None:
    team = Team(5)
    before = len(list(Path("/proc/self/task").iterdir()))
    executors = [open_executor(model, team) for model in models]
    for executor in executors:
        executor.forward_logits([3, 4, 5])
    settling = 2 * len(executors)  # threads that see to the pages of weights and of the KV cache
    assert len(list(Path("/proc/self/task").iterdir())) <= before + settling
    assert [executor.num_threads for executor in executors] == [5, 5]


def test_a_team_outlives_the_engines_that_are_closed_before_others(models: list[LoadedModel], team: Team) -> None:
    first, second = (open_executor(model, team) for model in models)
    wanted = second.forward_logits([3, 4, 5])
    first.close()
    assert np.array_equal(second.forward_logits([3, 4, 5]), wanted)


def awaiting_masks(executor: NativeExecutor) -> Ticket:
    """A step of one row that follows a grammar."""
    sampling = SamplingParams(temperature=0.0, follows_grammar=True)
    admits = (AdmitRow("a", (3, 4, 5), 3, (1,), 0, sampling),)
    return executor.submit(StepPlan(0, 0, admits, (RowPlan("a", 0, 3, (), True),), ()))


def only(token_id: int, vocab_size: int) -> bytes:
    return (1 << token_id).to_bytes((vocab_size + 31) // 32 * 4, "little")


def test_a_step_that_was_begun_has_the_team_until_it_is_collected(models: list[LoadedModel]) -> None:
    team = Team(3)
    first, second = (open_executor(model, team) for model in models)
    wanted = second.forward_logits([3, 4, 5])
    first.forward_logits([3, 4, 5])  # the team is kept for the last one for a moment
    ticket = awaiting_masks(first)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.forward_logits, [3, 4, 5])
        with pytest.raises(TimeoutError):
            other.result(timeout=0.1)
        first.restrict(ticket, {"a": only(7, models[0].spec.vocab_size)})
        assert first.collect(ticket).token_ids == {"a": (7,)}
        assert np.array_equal(other.result(timeout=10), wanted)


def test_a_team_of_one_is_not_kept_for_a_step_that_waits_for_masks(models: list[LoadedModel]) -> None:
    team = Team(1)
    first, second = (open_executor(model, team) for model in models)
    wanted = second.forward_logits([3, 4, 5])
    ticket = awaiting_masks(first)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.forward_logits, [3, 4, 5])
        try:
            assert np.array_equal(other.result(timeout=10), wanted)
        finally:
            first.restrict(ticket, {"a": only(7, models[0].spec.vocab_size)})
            assert first.collect(ticket).token_ids == {"a": (7,)}


def test_submit_waits_for_no_step_of_another_model(models: list[LoadedModel], team: Team) -> None:
    """Tokens of the step before are told after it, so they would wait, too."""
    first, second = (open_executor(model, team) for model in models)
    before = awaiting_masks(second)
    with ThreadPoolExecutor(1) as threads:
        submitted = threads.submit(awaiting_masks, first)
        try:
            ticket = submitted.result(timeout=10)
            first.restrict(ticket, {"a": only(7, models[0].spec.vocab_size)})
        finally:
            second.restrict(before, {"a": only(8, models[1].spec.vocab_size)})
            assert second.collect(before).token_ids == {"a": (8,)}
    assert first.collect(ticket).token_ids == {"a": (7,)}


def test_nothing_else_is_computed_while_a_step_waits_for_masks(models: list[LoadedModel], team: Team) -> None:
    executor = open_executor(models[0], team)
    ticket = awaiting_masks(executor)
    with pytest.raises(ValueError, match="in a step"):
        executor.forward_logits([3, 4, 5])
    executor.restrict(ticket, {"a": only(7, models[0].spec.vocab_size)})
    assert executor.collect(ticket).token_ids == {"a": (7,)}


def answers(executor: NativeExecutor, vocab_size: int, begin: Barrier) -> list[tuple[int, ...]]:
    """Answers of a row without a grammar, beside one whose masks have one token each."""
    begin.wait()
    follows, free = SamplingParams(temperature=0.0, follows_grammar=True), SamplingParams(temperature=0.0)
    admits = (AdmitRow("a", (3, 4, 5), 3, (1, 2, 3, 4), 0, follows), AdmitRow("b", (6, 7, 8), 3, (5, 6, 7), 0, free))
    found: list[tuple[int, ...]] = []
    for step in range(40):
        context_len, query_len = (2 + step, 1) if step else (0, 3)
        rows = tuple([RowPlan(name, context_len, query_len, (), True) for name in "ab"])
        ticket = executor.submit(StepPlan(step, 0, () if step else admits, rows, ()))
        executor.restrict(ticket, {"a": only(10 + step, vocab_size)})
        token_ids = executor.collect(ticket).token_ids
        assert token_ids["a"] == (10 + step,)
        found.append(token_ids["b"])
    return found


def test_steps_of_two_models_that_wait_for_masks_take_turns(models: list[LoadedModel], team: Team) -> None:
    sizes = [model.spec.vocab_size for model in models]
    alone = [answers(open_executor(model, None), size, Barrier(1)) for model, size in zip(models, sizes, strict=True)]
    together = [open_executor(model, team) for model in models]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(answers, together, sizes, [Barrier(2)] * 2)) == alone


def test_an_executor_is_closed_while_its_step_waits_for_masks(models: list[LoadedModel], team: Team) -> None:
    first, second = (open_executor(model, team) for model in models)
    wanted = second.forward_logits([3, 4, 5])
    awaiting_masks(first)
    first.close()
    assert np.array_equal(second.forward_logits([3, 4, 5]), wanted)


def cpus_of_threads() -> dict[str, set[int]]:
    """By thread of this process: the CPUs on which it may run."""
    found = dict[str, set[int]]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found[task.name] = os.sched_getaffinity(int(task.name))
    return found


def test_threads_stay_on_their_cpus_but_for_the_callers() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    before = cpus_of_threads()
    team = Team(len(cpus), cpus)
    after = cpus_of_threads()
    assert team.num_threads == len(cpus)
    assert sorted(map(sorted, (on for name, on in after.items() if name not in before))) == [[cpu] for cpu in cpus[1:]]
    alive = before.keys() & after.keys()  # one of the test before may have ended
    assert {name: after[name] for name in alive} == {name: before[name] for name in alive}
    assert str(os.getpid()) in alive


def test_threads_on_cpus_that_are_not_there_are_refused() -> None:
    with pytest.raises(RuntimeError, match="thread 1 can't be pinned to CPU 1023"):
        Team(2, [0, 1023])
    with pytest.raises(ValueError, match="fewer CPUs than threads"):
        Team(3, [0, 1])
    assert Team(2).num_threads == 2


def test_a_team_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        Team(0)
