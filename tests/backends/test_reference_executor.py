"""The reference executor on tiny random models: against an independent forward pass, and itself under other schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures, checks
from penstock.models.decoder import Decoder
from penstock.models.gguf import load_gguf
from penstock.models.program import Program
from penstock.models.weights import LoadedModel, WeightFormat, WeightTensor
from penstock.testing.builders import make_core, make_request, make_text, sizes_of, text_capacity
from penstock.testing.driver import run_to_completion
from penstock.types.errors import ExecutorFailure
from penstock.types.events import Add
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import Pooling, TextEnding
from penstock.types.plan import AdmitRow, RowPlan, StepPlan, Ticket
from penstock.types.request import Request
from penstock.types.result import StepResult, TokenLogprobs
from penstock.types.sampling import SamplingParams
from support.tiny_models import TinyLlama, write_gguf

PROMPT = tuple(int(i) for i in np.random.default_rng(3).integers(0, 264, 23))
SIZES: dict[str, Any] = {"num_blocks": 40, "block_size": 16, "max_rows": 4, "max_step_tokens": 64, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0.0, logprobs=20)
RANDOM = SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=99, logprobs=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_gguf(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyLlama(is_tied=False), matrix_type="Q8_0"))


class Session:
    """Plans for one executor, one request id at a time, with block tables chosen by the test."""

    def __init__(self, model: LoadedModel, **changes: Any) -> None:
        sizes = SIZES | {"block_size": 4, "poison": True, "kv_dtype": KvDtype.BF16}
        self.executor = ReferenceExecutor(model, architectures.describe(model.spec), **sizes | changes)
        self._step_ids: Iterator[int] = count()
        self._computed: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def step(
        self,
        *chunks: tuple[str, int],
        admits: Sequence[AdmitRow] = (),
        releases: Sequence[str] = (),
        new_blocks: Sequence[int] = (),
    ) -> StepResult:
        """One step; a chunk is (request id, query_len); it samples if it reaches the last token."""
        for admit in admits:
            self._computed[admit.request_id] = admit.num_computed_tokens
            self._known[admit.request_id] = len(admit.token_ids)
        rows = []
        for name, query_len in chunks:
            end = self._computed[name] + query_len
            rows.append(RowPlan(name, self._computed[name], query_len, tuple(new_blocks), samples=end == self._known[name]))
            self._computed[name] = end
            self._known[name] += end == self._known[name]
        plan = StepPlan(next(self._step_ids), 0, tuple(admits), tuple(rows), tuple(releases))
        return self.executor.collect(self.executor.submit(plan))

    def decode(self, name: str, num_tokens: int) -> list[tuple[int, TokenLogprobs]]:
        results = [self.step((name, 1)) for _ in range(num_tokens)]
        return [(result.token_ids[name][0], result.logprobs[name][0]) for result in results]


def admit(
    name: str = "a",
    token_ids: tuple[int, ...] = PROMPT,
    blocks: Sequence[int] = range(1, 11),
    sampling: SamplingParams = GREEDY,
    **fields: Any,
) -> AdmitRow:
    defaults = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0}
    return AdmitRow(request_id=name, token_ids=token_ids, block_ids=tuple(blocks), sampling=sampling, **defaults | fields)


def whole(model: LoadedModel, sampling: SamplingParams, num_tokens: int = 12) -> list[tuple[int, TokenLogprobs]]:
    """The answer to PROMPT: alone, prefilled in one chunk."""
    session = Session(model)
    first = session.step(("a", len(PROMPT)), admits=[admit(sampling=sampling)])
    return [(first.token_ids["a"][0], first.logprobs["a"][0]), *session.decode("a", num_tokens - 1)]


def independent_logits(model: LoadedModel, token_ids: Sequence[int]) -> np.ndarray:
    """A Llama written as its paper has it, in float64, the whole sequence at once; KV rounded to bf16 as the cache does."""
    spec, attention = model.spec, model.spec.layers[0].attention
    w = {name: tensor.dequantize().astype(np.float64) for name, tensor in model.weights.items()}
    turns = np.exp(1j * np.outer(np.arange(len(token_ids)), attention.rotation.inv_freq))[:, None, :]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * w[name][0]

    def heads(x: np.ndarray, num_heads: int) -> np.ndarray:
        return x.reshape(len(token_ids), num_heads, attention.head_dim)

    def project(name: str, x: np.ndarray, num_heads: int) -> np.ndarray:
        """With a bias and a norm of whole rows or of heads, if the weights have them."""
        x = x @ w[name].T + (w[name + "_bias"] if attention.has_qkv_bias else 0.0)
        width = w[name + "_norm"].size if name + "_norm" in w else 0
        if width == x.shape[1]:
            x = norm(x, name + "_norm")
        split = heads(x, num_heads)
        return norm(split, name + "_norm") if width == attention.head_dim else split

    def rotate(x: np.ndarray) -> np.ndarray:
        real, imaginary = np.split(x, 2, axis=-1)
        turned = (real + 1j * imaginary) * turns
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def to_bf16(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.round(mantissa * 256) / 256, exponent)  # 8 significant bits, ties to even

    x = w["embed"][list(token_ids)]
    is_future = np.triu(np.ones((len(token_ids), len(token_ids)), bool), 1)
    for layer in range(spec.num_layers):
        at = f"layers.{layer}."
        normed = norm(x, at + "attn_norm")
        q = rotate(project(at + "q", normed, attention.num_heads))
        k = to_bf16(rotate(project(at + "k", normed, attention.num_kv_heads)))
        v = to_bf16(project(at + "v", normed, attention.num_kv_heads))
        group = attention.num_heads // attention.num_kv_heads
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, axis=1)) / np.sqrt(attention.head_dim)
        scores[:, is_future] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, v.repeat(group, axis=1))
        x = x + attended.reshape(len(token_ids), -1) @ w[at + "o"].T
        normed = norm(x, at + "mlp_norm")
        gate = normed @ w[at + "gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w[at + "up"].T)) @ w[at + "down"].T
    return norm(x, "norm") @ w["output" if "output" in w else "embed"].T


@pytest.mark.parametrize("changes", [{}, {"num_heads": 6, "num_kv_heads": 2, "is_tied": False}, {"rope_scaling": "llama3"}])
def test_logits_are_those_of_an_independent_forward_pass(tmp_path: Path, changes: dict[str, Any]):
    model = load_gguf(write_gguf(tmp_path / "m.gguf", TinyLlama(**changes), matrix_type="Q4_1"))
    logits = Session(model).executor.forward_logits(PROMPT)
    assert logits.dtype == np.float32
    # 2e-6 apart as a rule; a key or value that rounds to its other neighbour in float32 may cost a thousandth.
    np.testing.assert_allclose(logits, independent_logits(model, PROMPT), rtol=0, atol=5e-3)


def with_qk_norms(model: LoadedModel, qk_norms: Literal["rows", "heads"]) -> tuple[LoadedModel, Program]:
    """The model with random norms between the projections of q and k and their rotation, and its program."""
    build, attention, rng = Decoder(model.spec), model.spec.layers[0].attention, np.random.default_rng(7)
    x, norms = build.embed(), {}
    for layer in range(model.spec.num_layers):
        at = f"layers.{layer}"
        for name, num_heads in (("q", attention.num_heads), ("k", attention.num_kv_heads)):
            width = attention.head_dim * (num_heads if qk_norms == "rows" else 1)
            values = rng.uniform(0.5, 2.0, (1, width)).astype(np.float32)
            norms[f"{at}.{name}_norm"] = WeightTensor(f"{at}.{name}_norm", 1, width, WeightFormat.F32, values)
        attended = build.attention(layer, build.norm(x, f"{at}.attn_norm"), qk_norms=qk_norms)
        x, attended = build.gather_after_last(layer, x, attended)
        build.add_linear(x, attended, f"{at}.o")
        build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"))
    return replace(model, weights={**model.weights, **norms}), build.finish(build.norm(x, "norm"))


@pytest.mark.parametrize("has_qkv_bias", [False, True])
@pytest.mark.parametrize("qk_norms", ["rows", "heads"])
def test_norms_of_queries_and_keys_are_between_projection_and_rotation(
    tmp_path: Path, qk_norms: Literal["rows", "heads"], has_qkv_bias: bool
) -> None:
    tiny = TinyLlama(architecture="qwen2", has_qkv_bias=has_qkv_bias)
    model, program = with_qk_norms(load_gguf(write_gguf(tmp_path / "m.gguf", tiny, matrix_type="Q8_0")), qk_norms)
    wanted = independent_logits(model, PROMPT)
    reference = ReferenceExecutor(model, program, kv_dtype=KvDtype.BF16, **SIZES)
    np.testing.assert_allclose(reference.forward_logits(PROMPT), wanted, rtol=0, atol=5e-3)
    native = NativeExecutor(model, program, kv_dtype=KvDtype.INT8, num_threads=1, **SIZES)
    error = native.forward_logits(PROMPT) - wanted
    native.close()
    assert np.sqrt((error**2).mean()) < 0.05 * wanted.std()
    assert checks.weight_shapes(program) == {name: (w.num_rows, w.num_cols) for name, w in model.weights.items()}


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
@pytest.mark.parametrize("chunks", [(1,) * 23, (5, 18), (16, 7), (22, 1), (8, 8, 7)])
def test_chunked_is_whole(model: LoadedModel, sampling: SamplingParams, chunks: tuple[int, ...]):
    session = Session(model)
    for i, size in enumerate(chunks):
        result = session.step(("a", size), admits=[admit(sampling=sampling)] if i == 0 else [])
        assert ("a" in result.token_ids) == (i == len(chunks) - 1)
    answer = [(result.token_ids["a"][0], result.logprobs["a"][0]), *session.decode("a", 11)]
    assert answer == whole(model, sampling)


def test_steps_give_the_logits_of_forward_logits(model: LoadedModel):
    answer = whole(model, GREEDY)
    sequence = [*PROMPT, *(token_id for token_id, _ in answer)]
    logits = Session(model).executor.forward_logits(sequence).astype(np.float64)
    for i, (token_id, logprobs) in enumerate(answer):
        x = logits[len(PROMPT) - 1 + i]
        assert token_id == x.argmax()
        assert logprobs.logprob == float(x.max() - x.max() - np.log(np.exp(x - x.max()).sum()))


def test_forward_logits_leave_the_cache_alone(model: LoadedModel):
    session = Session(model)
    first = session.step(("a", len(PROMPT)), admits=[admit()])
    session.executor.forward_logits(PROMPT[::-1])
    assert [first.token_ids["a"][0], *(token for token, _ in session.decode("a", 11))] == [t for t, _ in whole(model, GREEDY)]


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_company_changes_nothing(model: LoadedModel, sampling: SamplingParams):
    session = Session(model)
    others = [admit("b", PROMPT[::-1], range(11, 21), RANDOM), admit("c", PROMPT[3:9], range(21, 31), GREEDY)]
    session.step(("b", 20), ("c", 6), admits=others)
    first = session.step(("c", 1), ("a", 23), ("b", 3), admits=[admit(sampling=sampling)])
    answer = [(first.token_ids["a"][0], first.logprobs["a"][0])]
    for _ in range(11):
        result = session.step(("b", 1), ("a", 1), ("c", 1))
        answer.append((result.token_ids["a"][0], result.logprobs["a"][0]))
    assert answer == whole(model, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_a_prefix_hit_changes_nothing(model: LoadedModel, sampling: SamplingParams):
    session = Session(model)
    session.step(("b", 23), admits=[admit("b", blocks=range(11, 21))])
    shared = admit(blocks=(11, 12, 13, 14, 15, 1, 2, 3, 4), sampling=sampling, num_computed_tokens=20)
    first = session.step(("a", 3), ("b", 1), admits=[shared])
    assert [(first.token_ids["a"][0], first.logprobs["a"][0]), *session.decode("a", 11)] == whole(model, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_preemption_changes_nothing(model: LoadedModel, sampling: SamplingParams):
    expected = whole(model, sampling)
    session = Session(model)
    first = session.step(("a", 23), admits=[admit(sampling=sampling)])
    answer = [(first.token_ids["a"][0], first.logprobs["a"][0]), *session.decode("a", 4)]
    session.step(("b", 9), admits=[admit("b", PROMPT[:9], range(1, 6))], releases=["a"])
    token_ids = (*PROMPT, *(token_id for token_id, _ in answer))
    back = admit(token_ids=token_ids, blocks=range(20, 30), sampling=sampling, num_prompt_tokens=len(PROMPT))
    again = session.step(("b", 1), ("a", len(token_ids)), admits=[back])
    answer.append((again.token_ids["a"][0], again.logprobs["a"][0]))
    assert [*answer, *session.decode("a", 6)] == expected


def test_a_copied_block_serves_as_the_original(model: LoadedModel):
    session = Session(model)
    session.step(("b", 23), admits=[admit("b", blocks=range(11, 21))])
    session.executor.copy_blocks([(15, 30)])
    copied = admit(blocks=(11, 12, 13, 14, 30, 1, 2, 3, 4), num_computed_tokens=19)
    first = session.step(("a", 4), ("b", 1), admits=[copied])
    assert [(first.token_ids["a"][0], first.logprobs["a"][0]), *session.decode("a", 11)] == whole(model, GREEDY)


def test_reading_what_was_never_written_fails(model: LoadedModel):
    result = Session(model).step(("a", 3), admits=[admit(num_computed_tokens=20)])
    assert result.failures.keys() == {"a"}
    assert result.token_ids == {}


def test_blocks_given_out_again_do_not_leak(model: LoadedModel):
    session = Session(model)
    session.step(("b", 23), admits=[admit("b")])
    session.step(("a", 4), admits=[admit()], releases=["b"])  # writes block 1 of the ten it got
    assert session.step(("c", 15), admits=[admit("c", blocks=(1, 2, 20, 21, 22, 23), num_computed_tokens=8)]).failures


@pytest.mark.parametrize("pair", [(1, 0), (0, 40), (40, 1), (-1, 1)])
def test_blocks_outside_the_pool_are_not_copied(model: LoadedModel, pair: tuple[int, int]):
    with pytest.raises(ValueError, match="can't copy"):
        Session(model).executor.copy_blocks([pair])


def test_one_slot_is_not_written_twice_in_a_step(model: LoadedModel):
    with pytest.raises(ValueError, match="twice"):
        Session(model).step(
            ("a", 4), ("b", 4), admits=[admit(blocks=(1, 2, 3, 4, 5, 6)), admit("b", blocks=(1, 7, 8, 9, 10, 11))]
        )


def test_steps_are_collected_in_order(model: LoadedModel):
    executor = Session(model).executor
    plans = [
        StepPlan(7, 0, (admit(),), (RowPlan("a", 0, 8, (), samples=False),), ()),
        StepPlan(8, 0, (), (RowPlan("a", 8, 8, (), samples=False),), ()),
    ]
    tickets = [executor.submit(plan) for plan in plans]
    with pytest.raises(ValueError, match="step 8"):
        executor.collect(tickets[1])
    assert [executor.collect(ticket).step_id for ticket in tickets] == [7, 8]
    with pytest.raises(ValueError, match="step 8"):
        executor.collect(Ticket(8))


def test_a_closed_executor_refuses_steps(model: LoadedModel):
    executor = Session(model).executor
    executor.close()
    executor.close()
    with pytest.raises(ExecutorFailure, match="closed"):
        executor.submit(StepPlan(0, 0, (), (), ()))


def test_logprobs_come_only_where_asked_for(model: LoadedModel):
    session = Session(model)
    admits = [admit(sampling=SamplingParams()), admit("b", blocks=range(11, 21), sampling=SamplingParams(logprobs=1))]
    result = session.step(("a", 23), ("b", 23), admits=admits)
    assert set(result.token_ids) == {"a", "b"}
    assert set(result.logprobs) == {"b"}
    assert result.timing.end_ns >= result.timing.start_ns


@pytest.mark.parametrize(
    ("num_blocks", "max_step_tokens", "max_rows", "caches"),
    [(200, 64, 8, False), (200, 64, 8, True), (16, 64, 8, True), (12, 7, 3, True), (12, 64, 8, False)],
)
def test_the_engine_gives_the_same_answers_with_any_memory(
    model: LoadedModel, num_blocks: int, max_step_tokens: int, max_rows: int, caches: bool
):
    """Small pools force preemption; shared prefixes make hits; `poison` shows any block that is read too late."""
    lengths = [23, 5, 17, 9, 23, 12]
    requests = [
        make_request(str(i), PROMPT[:n], sampling=RANDOM if i % 2 else GREEDY, max_tokens=14, seed=i)
        for i, n in enumerate(lengths)
    ]
    sizes = {"num_blocks": num_blocks, "max_step_tokens": max_step_tokens, "max_rows": max_rows}
    session = Session(model, **sizes)
    core = make_core(session.executor.capacity, enable_prefix_caching=caches)
    outcomes = run_to_completion(core, session.executor, *(Add(request) for request in requests))
    alone = [Session(model) for _ in requests]
    for i, (n, own) in enumerate(zip(lengths, alone, strict=True)):
        first = own.step((str(i), n), admits=[admit(str(i), PROMPT[:n], sampling=requests[i].sampling)])
        rest = own.decode(str(i), len(outcomes[str(i)].token_ids) - 1)
        assert outcomes[str(i)].token_ids == [first.token_ids[str(i)][0], *(token_id for token_id, _ in rest)]
        assert len(outcomes[str(i)].token_ids) == 14
    assert num_blocks >= 16 or sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("pooling", ["first", "last", "mean", "each"])
def test_a_decoder_may_read_texts(model: LoadedModel, pooling: Pooling) -> None:
    """Its answer to a text has the same bits alone and beside others, and is that of its pooled states."""
    spec = replace(model.spec, ending=TextEnding(pooling=pooling, is_normalised=True))
    program = architectures.describe(spec)
    rng = np.random.default_rng(5)
    requests = [make_text(f"r{idx}", rng.integers(0, spec.vocab_size, n).tolist()) for idx, n in enumerate((5, 1, 30, 12))]

    def answers(*of: Request) -> dict[str, bytes]:
        capacity = text_capacity()
        executor = ReferenceExecutor(model, program, **sizes_of(capacity))
        assert executor.capacity == replace(capacity, vocab_size=program.vocab_size)
        core = make_core(capacity, enable_prefix_caching=False)
        found = run_to_completion(core, executor, *(Add(request) for request in of))
        return {name: outcome.last.states for name, outcome in found.items()}

    together = answers(*requests)
    for request in requests:
        again = make_text(request.request_id, request.prompt_token_ids)
        assert answers(again) == {request.request_id: together[request.request_id]}
    states = np.frombuffer(together["r2"], np.float32).reshape(-1, spec.hidden_size)
    assert len(states) == (30 if pooling == "each" else 1)
    np.testing.assert_allclose(np.linalg.norm(states, axis=1), 1.0, rtol=1e-6)
