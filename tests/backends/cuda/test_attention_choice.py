"""The choice of attention: FlashInfer where it gives the same answers and is faster, or was asked for; our kernels
otherwise."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.cuda import attention_choice, attention_trial, flashinfer_attention
from penstock.backends.cuda.attention import RowLens, StepKind
from penstock.backends.cuda.attention_trial import Clock, largest_error, trial_steps
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.flashinfer_attention import FlashInferAttention
from penstock.backends.cuda.stream import open_stream
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.weights import LoadedModel
from penstock.testing import sizes_of
from penstock.types.errors import ConfigError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.backends.cuda import fake_flashinfer
from support.backends.cuda.twins import BLOCK_SIZE, BLOCKS_PER_ROW, Twins
from support.interpreted import DEVICE, HAS_DEVICE
from support.tiny_models import TinyLlama, write_gguf

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="the stand-in for FlashInfer computes on the CPU")

SMALL = TinyLlama(is_tied=False, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=64, intermediate_size=32)
CAPACITY = Capacity(num_blocks=20, block_size=16, max_rows=3, max_step_tokens=24, max_model_len=60)


@cache
def small_model() -> LoadedModel:
    with tempfile.TemporaryDirectory() as directory:
        return load_gguf(write_gguf(Path(directory) / "small.gguf", SMALL, matrix_type="F32"))


@pytest.fixture(autouse=True)
def tiny_heads_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the interpreter's float32. Each is timed once: the interpreter takes its time."""
    monkeypatch.setattr(attention_trial, "REPEATS", 1)
    monkeypatch.setattr(flashinfer_attention, "HEAD_DIMS", (16,))
    monkeypatch.setattr(flashinfer_attention, "DTYPES", (torch.float32,))


def make(attention: str = "auto", **changes: Any) -> CudaExecutor:
    model = small_model()
    settings = {"device": DEVICE, "dtype": torch.float32, "poison": True} | changes
    return CudaExecutor(model, architectures.describe(model.spec), attention=attention, **settings, **sizes_of(CAPACITY))


def clock(**speedups: float) -> Clock:
    """By which FlashInfer is so many times as fast; asked in the order of the trials, for our kernels before FlashInfer's."""
    seconds = chain.from_iterable((speedups[step.kind], 1.0) for step in trial_steps(CAPACITY))

    def read(run: Callable[[], object]) -> float:
        run()
        return next(seconds)

    return read


def chosen(executor: CudaExecutor, **speedups: float) -> set[StepKind]:
    executor.choose_attention(clock(**speedups))
    kinds = set(executor._attention._chosen)
    executor.close()
    return kinds


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("use_graphs", [True, False])
def test_what_is_faster_computes_a_kind_of_step(
    use_graphs: bool, monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture
) -> None:
    fake_flashinfer.install(monkeypatch)
    assert chosen(make(use_graphs=use_graphs), decode=1.5, prefill=0.8) == {StepKind.DECODE}
    assert "attention of decode steps: FlashInfer (FlashInfer 0.7.2 is 1.50 times as fast as Triton" in info.text
    assert "attention of prefill steps: Triton (FlashInfer 0.7.2 is 0.80 times as fast as Triton" in info.text


def test_an_executor_tells_who_computes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    for wanted, names in (("auto", ["FlashInfer", "Triton"]), ("triton", ["Triton", "Triton"])):
        executor = make(wanted)
        assert executor.choose_attention(clock(decode=1.5, prefill=0.8)) == dict(zip(StepKind, names, strict=True))
        executor.close()


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [(0.9, 0.9, set()), (1.04, 1.06, {StepKind.PREFILL}), (2.0, 2.0, set(StepKind))],
)
def test_a_small_difference_is_none(
    decode: float, prefill: float, expected: set[StepKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.install(monkeypatch)
    assert chosen(make(), decode=decode, prefill=prefill) == expected


def test_what_is_asked_for_is_used_even_where_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    assert chosen(make("flashinfer"), decode=0.5, prefill=0.5) == set(StepKind)
    assert chosen(make("triton"), decode=9.0, prefill=9.0) == set()


def test_until_there_was_a_choice_our_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    executor = make("flashinfer")
    assert executor._attention.planned(RowLens(np.array([0, 1]), np.array([3])), is_captured=True) is None
    executor.close()


def test_wrong_answers_are_found_and_not_used(monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture) -> None:
    fake_flashinfer.install(monkeypatch, error=0.1)
    assert chosen(make(), decode=9.0, prefill=9.0) == set()
    [record] = [record for record in info.records if record.levelname == "WARNING"]
    assert "FlashInfer is not used: its answers to 1 rows of 1 tokens after 59 positions are" in record.getMessage()
    with pytest.raises(ConfigError, match=r"FlashInfer can't compute the attention: its answers .* set it to triton\."):
        make("flashinfer")


def test_a_graph_that_keeps_the_plan_of_its_capture_is_found(
    monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture
) -> None:
    class PlansOnce(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **kwargs: Any) -> None:
            if self._heads is None:
                super().plan(*args, **kwargs)

    fake_flashinfer.install(monkeypatch, BatchDecodeWithPagedKVCacheWrapper=PlansOnce)
    assert chosen(make(), decode=9.0, prefill=9.0) == set()
    assert "FlashInfer is not used: its answers" in info.text


def test_wrong_answers_to_the_last_blocks_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an index that is too narrow for a large cache: blocks from all over it are tried, when it is large."""

    class Narrow(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            wide, self._indices = self._indices, self._indices.clamp(max=CAPACITY.num_blocks)
            out = super().run(*args, **kwargs)
            self._indices = wide
            return out

    fake_flashinfer.install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=Narrow)
    assert chosen(make(), decode=9.0, prefill=9.0) == set(StepKind)
    executor = make()
    executor.resize(50, max_model_len=60)
    assert chosen(executor, decode=9.0, prefill=9.0) == set()


def test_what_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Could not find\n  nvcc" + " and more" * 1000)

    fake_flashinfer.install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=fail)
    assert chosen(make(), decode=9.0, prefill=9.0) == set()
    [record] = [record for record in info.records if record.levelname == "WARNING"]
    assert "FlashInfer is not used: it fails: RuntimeError: Could not find nvcc" in record.getMessage()
    assert len(record.getMessage()) < 500, "a compiler's output is not for the log"
    with pytest.raises(ConfigError, match=r"can't compute the attention: it fails: RuntimeError: Could not find nvcc and more"):
        make("flashinfer")


def test_what_fails_in_a_step_is_not_used_either(monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture) -> None:
    class Fails(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def run(self, *_: Any, **__: Any) -> torch.Tensor:
            raise TypeError("unexpected keyword argument")

    fake_flashinfer.install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=Fails)
    assert chosen(make(), decode=9.0, prefill=9.0) == set()
    assert "FlashInfer is not used: it fails: TypeError: unexpected keyword argument" in info.text


def test_a_kernel_that_breaks_the_gpu_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access no kernel runs any more, ours neither: to go on as if it were refused would fail later."""

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Breaks(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def run(self, *_: Any, **__: Any) -> torch.Tensor:
            monkeypatch.setattr("penstock.backends.cuda.stream.HostMark.wait", broken)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fake_flashinfer.install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=Breaks)
    with pytest.raises(ConfigError, match=r"broke the GPU's context: it fails: RuntimeError: CUDA error") as raised:
        make()
    assert "--attention triton" in str(raised.value.remedy)


def test_a_failure_of_our_own_kernels_is_not_blamed_on_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    executor = make()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("penstock.backends.cuda.triton_attention.TritonAttention.attend", fail)
    with pytest.raises(Exception, match="ours"):
        executor.choose_attention(clock(decode=9.0, prefill=9.0))
    executor.close()


def test_a_kernel_that_breaks_the_gpu_while_it_is_timed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what fails after it, when the blocks of the trial are emptied."""

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fake_flashinfer.install(monkeypatch)
    executor = make()
    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "run", broken)
    monkeypatch.setattr("penstock.backends.cuda.kv_cache.PagedKvCache.forget", broken)
    monkeypatch.setattr("penstock.backends.cuda.stream.HostMark.wait", broken)
    with pytest.raises(ConfigError, match="broke the GPU's context"):
        executor.choose_attention(clock(decode=9.0, prefill=9.0))


def test_a_package_that_is_not_there_is_no_news(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attention_choice, "is_installed", lambda: False)
    caplog.set_level(logging.DEBUG)
    assert chosen(make()) == set()
    [record] = [record for record in caplog.records if "attention" in record.getMessage()]
    assert record.levelname == "DEBUG"
    assert "computed by Triton's kernels; FlashInfer is not used: the package flashinfer-python is not" in record.getMessage()
    with pytest.raises(ConfigError, match="is not installed"):
        make("flashinfer")


def test_nor_is_one_that_can_not_be_imported_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert chosen(make()) == set()
    assert "FlashInfer is not used: importing it fails: OSError: libcudart.so.13" in info.text


@pytest.mark.parametrize(("version", "is_known"), [("0.7.1", False), ("0.7.2", True), ("0.7.2.post1", True), ("0.8.0", False)])
def test_only_versions_that_were_read_are_used(
    version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture
) -> None:
    fake_flashinfer.install(monkeypatch, version=version)
    assert bool(chosen(make(), decode=9.0, prefill=9.0)) == is_known
    assert (f"version {version} is not one that Penstock knows (from 0.7.2, before 0.8)" in info.text) != is_known


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"kv_dtype": KvDtype.INT8}, {"dtype": torch.bfloat16}])
def test_what_does_not_suit_never_asks_for_it(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, info: pytest.LogCaptureFixture
) -> None:
    def used(*_: object, **__: object) -> None:
        raise AssertionError("FlashInfer was used")

    fake_flashinfer.install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=used)
    assert chosen(make(**changes), decode=9.0, prefill=9.0) == set()
    assert "FlashInfer is not used: " in info.text
    assert "was used" not in info.text
    with pytest.raises(ConfigError, match="FlashInfer can't compute the attention: "):
        make("flashinfer", **changes)


PARAMS = (SamplingParams(temperature=0.0), SamplingParams(seed=3, temperature=0.9, top_p=0.9))


def run(executor: CudaExecutor) -> list[Any]:
    """Tokens of three rows: prompts in chunks beside decodes, then decodes alone, which are padded and captured."""
    lens = dict.fromkeys("abc", 0)
    prompts = {name: tuple(10 + (7 * i + 31 * place) % 90 for i in range(18 + place)) for place, name in enumerate("abc")}
    tickets, results, admitted = [], [], set()
    for idx, names in enumerate(["a", "ab", "abc", "abc", "bca", "ab", "abc"]):
        admits, rows, left = [], [], CAPACITY.max_step_tokens - 3
        for name in names:
            place = "abc".index(name)
            if name not in admitted:
                admitted.add(name)
                blocks = tuple(range(1 + 4 * place, 5 + 4 * place))
                admits.append(AdmitRow(name, prompts[name], len(prompts[name]), blocks, 0, PARAMS[place % 2]))
            wanted = max(1, len(prompts[name]) - lens[name])
            count = min(wanted, max(left // 2, 1))
            left -= count
            rows.append(RowPlan(name, lens[name], count, (), count == wanted))
            lens[name] += count
        tickets.append(executor.submit(StepPlan(idx, 0, tuple(admits), tuple(rows), ())))
        if len(tickets) == executor.depth:
            results.append(executor.collect(tickets.pop(0)))
    results += [executor.collect(ticket) for ticket in tickets]
    executor.close()
    return [result.token_ids for result in results]


@pytest.mark.parametrize("use_graphs", [True, False])
def test_an_executor_answers_the_same_with_either(use_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that the trials left in the cache are gone, too: stale ones would be seen."""
    planned: list[bool] = []

    class Noted(FlashInferAttention):
        def plan(self, rows: RowLens, *, is_captured: bool) -> None:
            planned.append(is_captured)
            super().plan(rows, is_captured=is_captured)

    monkeypatch.setattr(attention_choice, "FlashInferAttention", Noted)
    fake_flashinfer.install(monkeypatch)
    executor = make("flashinfer", use_graphs=use_graphs)
    executor.choose_attention(clock(decode=1.0, prefill=1.0))
    assert executor._cache._k[:, 1:].isnan().all()
    assert not executor._cache._k[:, 0].any()
    planned.clear()
    answers = run(executor)
    assert len(planned) == len(answers)
    assert set(planned) == ({True, False} if use_graphs else {False})
    assert answers == run(make("triton"))


STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 17), (1, 3)),  # prompts
    ((0, 1), (1, 1)),  # all decode
    ((1, 1), (2, 20), (0, 1)),  # a new prompt beside them
    ((2, 5), (3, 1), (0, 2)),  # chunks
    ((0, 1), (1, 1), (2, 1), (3, 1)),
)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_whole_steps_give_the_references_logits(num_kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyLlama(num_layers=2, num_heads=4, num_kv_heads=num_kv_heads, hidden_size=64, intermediate_size=32)
    model = load_gguf(write_gguf(tmp_path / "tiny.gguf", tiny, matrix_type="F32"))
    both = Twins(architectures.describe(model.spec), model.weights)
    [shape] = both.compiled.attention_shapes
    attention = FlashInferAttention(
        fake_flashinfer.install(monkeypatch),
        shape,
        dtype=torch.float32,
        block_size=BLOCK_SIZE,
        max_rows=4,
        max_blocks=BLOCKS_PER_ROW,
        graph_rows=[],
        stream=open_stream(torch.device(DEVICE), spins=False),
        device=torch.device(DEVICE),
    )
    make_step = both.step_tensors

    def planned(lengths: Any, samples: Any) -> Any:
        step = make_step(lengths, samples)
        attention.plan(RowLens(step.query_start_loc.numpy(), step.context_lens.numpy()), is_captured=False)
        step.attention = attention
        return step

    monkeypatch.setattr(both, "step_tensors", planned)
    for lengths in STEPS:
        wanted, found = both.step(*lengths)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


@given(rows=st.integers(1, 300), tokens=st.integers(1, 4096), length=st.integers(3, 5000))
def test_trials_keep_the_limits(rows: int, tokens: int, length: int) -> None:
    capacity = Capacity(2, 16, rows, tokens, length)
    steps = trial_steps(capacity)
    for step in steps:
        assert len(step.query_lens) == len(step.context_lens) <= rows
        assert step.kind is StepKind.DECODE or sum(step.query_lens) <= tokens
        assert min(step.query_lens) >= 1
        assert max(q + c for q, c in zip(step.query_lens, step.context_lens, strict=True)) <= length
    assert StepKind.DECODE in {step.kind for step in steps}
    assert tokens < 2 or StepKind.PREFILL in {step.kind for step in steps}
    assert max(len(step.query_lens) for step in steps) == rows


def test_an_error_is_of_one_head_and_nan_is_infinite() -> None:
    wanted = torch.ones(2000, 4)
    found = wanted.clone()
    found[1500, 2] = 1.1
    assert largest_error(found, wanted, 2, num_tokens=2000) == pytest.approx(0.1 / 2**0.5, rel=1e-4)
    assert largest_error(found, wanted, 2, num_tokens=1500) == 0.0
    found[3, 0] = torch.nan
    assert largest_error(found, wanted, 2, num_tokens=1500) == torch.inf
