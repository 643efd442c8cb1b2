"""The executor over a real program: logits are the reference's; graphs, depth and company change no answer on a device."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.backends.cuda import launcher
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.staging import Upload
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.weights import LoadedModel
from penstock.testing import sizes_of
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan, Ticket
from penstock.types.sampling import SamplingParams
from support.interpreted import DEVICE, HAS_DEVICE
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf

SMALL = TinyLlama(is_tied=False, num_layers=1, num_heads=2, num_kv_heads=1, hidden_size=32, intermediate_size=32)
CAPACITY = Capacity(num_blocks=40, block_size=16, max_rows=5, max_step_tokens=40, max_model_len=60)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3, temperature=0.9, top_p=0.9, logprobs=2),
    SamplingParams(seed=4, top_k=20, repetition_penalty=1.2, follows_grammar=True),
)
"""Parameters of three rows."""
NUM_STEPS = 12 if HAS_DEVICE else 2


@cache
def small_model() -> LoadedModel:
    with tempfile.TemporaryDirectory() as directory:
        return load_gguf(write_gguf(Path(directory) / "small.gguf", SMALL, matrix_type="Q8_0"))


def make(model: LoadedModel | None = None, **changes: Any) -> CudaExecutor:
    model = model or small_model()
    settings = {"device": DEVICE, "dtype": torch.float32, "deterministic": True, "poison": True} | changes
    return CudaExecutor(model, architectures.describe(model.spec), **settings, **sizes_of(CAPACITY))


def submit(executor: CudaExecutor, plan: StepPlan, followers: Sequence[str]) -> Ticket:
    """And say what those of them may sample that sample: two tokens of three, others in each step."""
    ticket = executor.submit(plan)
    words = np.full(executor.mask_bytes // 4, (0x49249249, 0x92492492, 0x24924924)[plan.step_id % 3], np.uint32)
    masks = {row.request_id: (~words).tobytes() for row in plan.rows if row.samples and row.request_id in followers}
    if masks:
        executor.restrict(ticket, masks)
    return ticket


def run(executor: CudaExecutor) -> list[Any]:
    """Tokens and log-probabilities of three rows, the last of which comes two steps after the first."""
    tickets, results = [], []
    lens = dict.fromkeys("abc", 0)
    for idx in range(NUM_STEPS):
        coming = ["a", "b"] if idx == 0 else ["c"] if idx == 1 else []
        admits, rows = [], []
        for name in (name for name in lens if lens[name]):
            rows.append(RowPlan(name, lens[name], 1, (), True))
            lens[name] += 1
        for name in coming:
            place = "abc".index(name)
            tokens = tuple(10 + (7 * idx + 3 * place) % 90 for idx in range(4 + 5 * place))
            admits.append(AdmitRow(name, tokens, len(tokens), tuple(range(1 + 4 * place, 5 + 4 * place)), 0, PARAMS[place]))
            rows.append(RowPlan(name, 0, len(tokens), (), True))
            lens[name] = len(tokens)
        tickets.append(submit(executor, StepPlan(idx, 0, tuple(admits), tuple(rows), ()), "c"))
        if len(tickets) == executor.depth:
            results.append(executor.collect(tickets.pop(0)))
    results += [executor.collect(ticket) for ticket in tickets]
    executor.close()
    return [(result.token_ids, result.logprobs) for result in results]


@pytest.mark.parametrize("num_tokens", [7, 23])
def test_the_logits_of_a_text_are_those_of_the_reference(num_tokens: int) -> None:
    model = small_model()
    reference = ReferenceExecutor(model, architectures.describe(model.spec), kv_dtype=KvDtype.INT8, **sizes_of(CAPACITY))
    executor = make(kv_dtype=KvDtype.INT8)
    text = [10 + 31 * idx % 200 for idx in range(num_tokens)]
    found = executor.forward_logits(text)
    executor.close()
    np.testing.assert_allclose(found, reference.forward_logits(text), rtol=1e-3, atol=1e-3)


def test_a_text_longer_than_the_pool_is_refused() -> None:
    executor = make()
    with pytest.raises(ValueError, match="do not fit"):
        executor.forward_logits([10] * 16 * 40)
    executor.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_and_depth_change_nothing(dtype: torch.dtype) -> None:
    found = [run(make(use_graphs=graphs, depth=depth, dtype=dtype)) for graphs in (False, True) for depth in (1, 2)]
    assert all(each == found[0] for each in found[1:])


@pytest.mark.gpu
def test_steps_are_replayed_from_graphs() -> None:
    executor = make(depth=2)
    assert executor._graphs is not None
    run_graphs = executor._graphs
    run(executor)
    assert run_graphs.num_captured == 1, "three rows of three steps or more share the graph for four"


def test_graphs_that_were_captured_before_change_nothing() -> None:
    executor = make(depth=2)
    assert executor.capture_graphs().num_captured == 4, "1, 2, 4 and 5 rows"
    assert run(executor) == run(make(depth=2, use_graphs=False))


EVERYTHING = SamplingParams(
    seed=5,
    temperature=0.8,
    top_k=30,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logprobs=3,
    min_tokens=20,
    stop_token_ids=(7,),
    logit_bias=((11, 1.0), (12, -1.0)),
    allowed_token_ids=tuple(range(5, 100)),
    banned_token_sequences=((13,), (14, 15)),
)
KINDS = {
    "greedy": PARAMS[0],
    "everything": EVERYTHING,
    "grammar": replace(EVERYTHING, allowed_token_ids=None, follows_grammar=True),
}


SMALL_MESSAGE_WORDS = 300


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what had no room in one."""
    sizes: list[int] = []
    send = Upload._sent_alone

    def noted(self: Upload, array: Any) -> torch.Tensor:
        sizes.append(array.size)
        return send(self, array)

    monkeypatch.setattr(Upload, "_sent_alone", noted)
    monkeypatch.setattr(launcher, "message_words", lambda _, *, has_adapters: SMALL_MESSAGE_WORDS)
    return sizes


def admissions(params: SamplingParams) -> list[StepPlan]:
    """Steps with whatever a row can begin with, each with the decode of a row that was there: a prompt, a piece of one, the
    rest of it, and two rows of which almost all is cached, whose tokens have no room in the message."""
    tokens = tuple(10 + (7 * idx) % 90 for idx in range(59))

    def admit(name: str, length: int, first_block: int, num_computed: int = 0) -> AdmitRow:
        return AdmitRow(name, tokens[:length], length, tuple(range(first_block, first_block + 4)), num_computed, params)

    a, b, c, d, e = admit("a", 10, 1), admit("b", 7, 5), admit("c", 20, 9), admit("d", 59, 13, 57), admit("e", 59, 17, 57)

    def decode(step: int) -> RowPlan:
        return RowPlan("a", 9 + step, 1, (), True)

    return [
        StepPlan(0, 0, (a,), (RowPlan("a", 0, 10, (), True),), ()),
        StepPlan(1, 0, (b,), (decode(1), RowPlan("b", 0, 7, (), True)), ()),
        StepPlan(2, 0, (c,), (decode(2), RowPlan("c", 0, 12, (), False)), ("b",)),
        StepPlan(3, 0, (), (decode(3), RowPlan("c", 12, 8, (), True)), ()),
        StepPlan(4, 0, (d, e), (decode(4), RowPlan("d", 57, 2, (), True), RowPlan("e", 57, 2, (), True)), ()),
    ]


def followers(params: SamplingParams) -> str:
    """Followers of the rows of `admissions`."""
    return "abcde" if params.follows_grammar else ""


class Questions(TorchDispatchMode):
    """Notes what asks the device for numbers, which waits for it: one of them, or where a condition holds."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        flat = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else [arg])]
        is_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in flat[1:]
        )
        if name in self.ASKING or is_mask:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_step_asks_the_device(params: SamplingParams, small_messages: list[int], *, deterministic: bool) -> None:
    executor = make(depth=2, deterministic=deterministic, poison=False)
    for plan in admissions(params):
        with Questions() as questions:
            ticket = submit(executor, plan, followers(params))
        assert not questions.asked, f"step {plan.step_id}"
        executor.collect(ticket)
    assert max(small_messages) > 100, "two prompts of 59 tokens"
    executor.close()


def test_mixtures_of_experts_ask_the_device_nothing_and_are_the_same_from_graphs(tmp_path: Path) -> None:
    """Which experts are chosen is known to the device alone; rows of padding choose some, too."""
    model = load_hf_directory(write_case(CASES["mixtral"], tmp_path))
    admits = [AdmitRow(name, (10, 80, 40, 90 + i), 4, (1 + i,), 0, PARAMS[i % 2]) for i, name in enumerate("abc")]
    prompts = StepPlan(0, 0, tuple(admits), tuple(RowPlan(name, 0, 4, (), True) for name in "abc"), ())
    decodes = StepPlan(1, 0, (), tuple(RowPlan(name, 4, 1, (), True) for name in "abc"), ())
    results = []
    for use_graphs in (False, True):
        executor = make(model, use_graphs=use_graphs)
        for plan in (prompts, decodes):
            with Questions() as questions:
                ticket = executor.submit(plan)
            assert not questions.asked
            results.append(executor.collect(ticket))
        executor.close()
    assert [each.token_ids for each in results[:2]] == [each.token_ids for each in results[2:]]
    assert [each.logprobs for each in results[:2]] == [each.logprobs for each in results[2:]]


@pytest.mark.gpu
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_no_step_waits_for_the_device(params: SamplingParams) -> None:
    """The next step is submitted while the first is certainly still running: behind a kernel of a tenth of a second."""
    executor = make(depth=2)
    run_tokens = tuple(range(10, 20))
    first = StepPlan(0, 0, (AdmitRow("a", run_tokens, 10, (1, 2), 0, params),), (RowPlan("a", 0, 10, (), True),), ())
    decodes = [StepPlan(step, 0, (), (RowPlan("a", 9 + step, 1, (), True),), ()) for step in (1, 2, 3)]
    for plan in (first, decodes[0]):
        executor.collect(submit(executor, plan, followers(params)))
    with executor._stream.entered():
        torch.cuda._sleep(200_000_000)
        asleep = executor._stream.mark()
    tickets = [submit(executor, plan, followers(params)) for plan in decodes[1:]]
    assert not asleep._event.query()
    for ticket in tickets:
        executor.collect(ticket)
    executor.close()


@pytest.mark.gpu
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("step_id", [1, 2, 3, 4])
@pytest.mark.usefixtures("small_messages")
def test_no_admission_waits_for_the_device(step_id: int, params: SamplingParams) -> None:
    """As above, with the whole run before it once more: all its kernels are compiled by then."""
    executor = make(depth=2)
    for plan in admissions(params):
        executor.collect(submit(executor, plan, followers(params)))
    names = sorted({row.request_id for plan in admissions(params) for row in plan.rows} - {"b"})
    executor.collect(executor.submit(StepPlan(5, 0, (), (), tuple(names))))
    for plan in admissions(params)[:step_id]:
        executor.collect(submit(executor, plan, followers(params)))
    with executor._stream.entered():
        torch.cuda._sleep(200_000_000)
        asleep = executor._stream.mark()
    ticket = submit(executor, admissions(params)[step_id], followers(params))
    assert not asleep._event.query()
    executor.collect(ticket)
    executor.close()
