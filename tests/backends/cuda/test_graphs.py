"""Which steps share a graph, and that a graph answers from what lies at its addresses now; with a graph that just runs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from penstock.backends.cuda.graphs import Captured, CaptureRun, CudaCapture, DecodeGraphs
from penstock.backends.cuda.step import StepTensors


def programs(num_rows: int, max_seq_len: int) -> int:
    """As the attention of a model of 8 KV heads on an H200."""
    return max(1, min(-(-264 // num_rows), max_seq_len // 128))


def make_graphs(max_rows: int = 20, max_model_len: int = 6000) -> DecodeGraphs:
    return DecodeGraphs(max_rows=max_rows, max_model_len=max_model_len, programs=programs, capture=Captured.without_device)


def make_step(positions: torch.Tensor, *, max_seq_len: int = 5) -> StepTensors:
    num_rows = len(positions)
    return StepTensors(*[positions] * 8, num_rows, num_rows, num_rows, 1, max_seq_len)


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (24, [1, 2, 4, 8, 16, 24])]
)
def test_sizes_end_with_the_largest_number_of_rows(max_rows: int, sizes: list[int]) -> None:
    assert make_graphs(max_rows).sizes == sizes


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (16, 16), (17, 20), (20, 20)])
def test_a_step_gets_the_least_size_with_room(num_rows: int, expected: int) -> None:
    assert make_graphs().padded_rows(num_rows) == expected


@pytest.mark.parametrize(
    ("max_seq_len", "limit"), [(1, 1024), (1024, 1024), (1025, 2048), (2048, 2048), (2049, 6000), (6000, 6000)]
)
def test_lengths_have_limits_up_to_the_models_own(max_seq_len: int, limit: int) -> None:
    assert make_graphs().seq_limit(4, max_seq_len) == limit


@pytest.mark.parametrize(
    ("num_rows", "limits"),
    [
        (1, [1024, 2048, 4096, 8192, 16384, 131072]),
        (8, [1024, 2048, 131072]),
        (16, [1024, 131072]),
        (24, [131072]),
        (40, [131072]),
        (256, [131072]),
    ],
)
def test_a_limit_is_there_where_it_halves_the_programs(num_rows: int, limits: list[int]) -> None:
    graphs = make_graphs(256, 131072)
    assert sorted({graphs.seq_limit(num_rows, length) for length in range(1, 131072, 511)}) == limits
    for length in (1, 1024, 1025, 5000, 131072):
        launched = programs(num_rows, graphs.seq_limit(num_rows, length))
        assert programs(num_rows, length) <= launched < 2 * programs(num_rows, max(1024, 2 * length))


def test_lengths_that_another_kernel_computes_have_a_limit_of_their_own() -> None:
    graphs = DecodeGraphs(
        max_rows=8,
        max_model_len=9000,
        programs=lambda _, max_seq_len: 0 if max_seq_len > 3000 else 5,
        capture=Captured.without_device,
    )
    assert [graphs.seq_limit(8, length) for length in (5, 1025, 2049, 8000)] == [1024, 2048, 9000, 9000]


@pytest.mark.parametrize("max_rows", [1, 7, 64, 65, 256, 300, 1024])
def test_padding_is_less_than_eight_rows_or_a_fifth_of_a_step(max_rows: int) -> None:
    graphs = make_graphs(max_rows)
    assert graphs.sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        size = graphs.padded_rows(num_rows)
        assert size >= num_rows
        assert (size - num_rows) * 5 < size or size - num_rows < 8


def test_many_rows_have_few_sizes() -> None:
    assert len(make_graphs(256).sizes) == 23
    assert len(make_graphs(1024).sizes) == 47


def test_a_replay_reads_what_is_there_now() -> None:
    graphs, positions = make_graphs(), torch.arange(4)
    runs: list[int] = []

    def forward(step: StepTensors) -> torch.Tensor:
        runs.append(step.max_seq_len)
        return step.positions * 2

    assert graphs.run(make_step(positions), forward).tolist() == [0, 2, 4, 6]
    positions += 1
    assert graphs.run(make_step(positions, max_seq_len=900), forward).tolist() == [2, 4, 6, 8]
    assert graphs.num_captured == 1
    assert set(runs) == {1024}, "grids are made for the limit, not for one step"


def test_other_sizes_and_longer_rows_have_their_own() -> None:
    graphs = make_graphs()
    positions = torch.arange(4)
    for num_rows, max_seq_len in ((4, 5), (4, 1000), (4, 1025), (2, 5)):
        graphs.run(make_step(positions[:num_rows], max_seq_len=max_seq_len), lambda step: step.positions * 1)
    assert graphs.num_captured == 3


def test_a_step_at_another_address_is_noticed() -> None:
    graphs = make_graphs()
    first, second = torch.arange(4), torch.arange(4)
    graphs.run(make_step(first), lambda step: step.positions * 1)
    with pytest.raises(AssertionError, match="lie where"):
        graphs.run(make_step(second), lambda step: step.positions * 1)


def test_steps_run_as_they_are_after_a_capture_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    num_tries = 0

    def fail(run: object) -> Captured:
        nonlocal num_tries
        num_tries += 1
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(max_rows=8, max_model_len=100, programs=programs, capture=fail)
    for value in range(3):
        step = make_step(torch.full((4,), value))
        assert graphs.run(step, lambda step: step.positions * 2).tolist() == [2 * value] * 4
    assert (num_tries, graphs.num_captured) == (1, 0)
    assert "not permitted" in caplog.text


def capture_usual(
    graphs: DecodeGraphs, *, seconds_each: float = 0.0, **limits: Any
) -> tuple[CaptureRun, list[tuple[int, int]]]:
    """The captured graphs, and for which (rows, limit) in which order; each takes so many seconds of the clock."""
    positions, ran = torch.arange(300), []

    def run(num_rows: int, limit: int) -> None:
        ran.append((num_rows, limit))
        graphs.run(make_step(positions[:num_rows], max_seq_len=limit), lambda step: step.positions * 1)

    settings = {"most": None, "max_seconds": 1e9} | limits
    return graphs.capture_usual(run, **settings, clock=lambda: seconds_each * len(ran)), ran


def test_what_requests_usually_need_is_captured_before_they_come_the_largest_first() -> None:
    graphs = make_graphs(24, 131072)
    done, ran = capture_usual(graphs)
    expected = [(24, 131072), (16, 131072), (16, 1024), (8, 131072), (8, 2048), (8, 1024)]
    assert ran == expected + [(size, limit) for size in (4, 2, 1) for limit in (4096, 2048, 1024)]
    assert (done.num_captured, done.num_left) == (15, 1 + 2 + 3), "of four, two and one row, the longer ones"
    assert capture_usual(graphs) == (CaptureRun(0, 6, 0.0), [])
    graphs.run(make_step(torch.arange(300)[:4], max_seq_len=5000), lambda step: step.positions * 1)
    assert graphs.num_left == 5


def test_a_start_is_not_delayed_for_longer_than_it_may_be() -> None:
    graphs = make_graphs(24, 131072)
    done, ran = capture_usual(graphs, seconds_each=3.0, max_seconds=10.0)
    assert done == CaptureRun(4, 17, 12.0)
    assert len(ran) == 4
    assert capture_usual(graphs, most=2)[0] == CaptureRun(2, 15, 0.0)


def test_nothing_more_is_tried_before_requests_come_where_no_graph_can_be_captured() -> None:
    def fail(run: object) -> Captured:
        raise RuntimeError("no memory")

    graphs = DecodeGraphs(max_rows=8, max_model_len=100, programs=programs, capture=fail)
    done, ran = capture_usual(graphs)
    assert (done, ran) == (CaptureRun(0, 0, 0.0), [(8, 100)])


class DeviceGraph:
    """In place of PyTorch's, which frees what cuBLAS works in, for all graphs of the stream, when it goes."""

    made: list[weakref.ref[DeviceGraph]]

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ((0, 1), "thread_local")

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


def test_no_graph_goes_while_another_may_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")  # else the test's own log has the error, and with it all that lived then
    monkeypatch.setattr(DeviceGraph, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", DeviceGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs = DecodeGraphs(max_rows=8, max_model_len=100, programs=programs, capture=CudaCapture())
    num_runs = 0

    def forward(step: StepTensors) -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step.positions

    for num_rows in (8, 4):
        graphs.run(make_step(torch.arange(num_rows)), forward)
    assert graphs.num_captured == 1, "the second capture failed, and steps of eight rows still run as a graph"
    assert [ref() is not None for ref in DeviceGraph.made] == [True, True]
    del graphs
    assert [ref() is not None for ref in DeviceGraph.made] == [False, False]
