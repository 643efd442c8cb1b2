"""Tiny random models through our own loaders, backends and core, against transformers' answers for the same values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace

import numpy as np
import pytest

from penstock.backends.cuda import supported
from penstock.backends.native import lowering
from penstock.kv.prefix_cache import MARK_TOKENS
from penstock.kv.states import MIN_SAVED_BLOCKS
from penstock.models import architectures, catalog
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.sched.policies.presets import make_policies
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity
from penstock.types.sampling import SamplingParams
from support.answer_bench import Answer, Bench, answer_of
from support.parity.encoder_cases import ENCODERS
from support.parity.golden import GOLDEN_DIR
from support.parity.tiny import (
    NUM_STEPS,
    NUM_TOP,
    PROMPT_LENS,
    TinyCase,
    TinyGolden,
    case_token_ids,
    kept_positions,
    load_golden,
    prompts,
    weights_sha256,
    write_case,
)
from support.parity.tiny_cases import CASES
from support.parity.tiny_runs import BLOCK_SIZE, COPIES, MAX_RELATIVE_RMS, make, runs

MAX_TOP_ERROR = {KvDtype.BF16: 4, KvDtype.INT8: 8}
"""Largest error of a log-probability among the likeliest, in those root mean squares."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, logprobs=NUM_TOP)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, logprobs=NUM_TOP)


LEAST_SAVED = MIN_SAVED_BLOCKS * BLOCK_SIZE + MARK_TOKENS
"""Tokens of a prompt that saves a recurrent state."""

LoadCase = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> LoadCase:
    """Writes and loads a case, once."""
    loaded: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in loaded:
            path = write_case(CASES[name], tmp_path_factory.mktemp(name))
            loaded[name] = load_model(catalog.resolve(str(path), path))
        return loaded[name]

    return get


def golden_of(name: str) -> TinyGolden:
    return load_golden(CASES[name].golden or name)


def test_every_architecture_is_compared_in_every_form_that_its_files_have() -> None:
    """None can be added without a case: nobody would know whether its numbers are right."""
    cases = [*CASES.values(), *ENCODERS.values()]
    assert {case.architecture for case in cases} == set(architectures.ARCHITECTURES)
    # Stanford's ColBERT has the program of `bert_late`; what its directories say is read in tests/models/test_sentence.py.
    assert {case.hf_class for case in cases if case.gguf is None} | {"HF_ColBERT"} == set(architectures.HF_CLASSES)
    assert {case.gguf.architecture for case in cases if case.gguf is not None} == set(architectures.GGUF_NAMES)


def test_the_golden_file_has_the_cases_and_no_others() -> None:
    with np.load(GOLDEN_DIR / "tiny.npz") as data:
        stored = {key.split("/")[0] for key in data.files}
    assert stored == {name for name, case in CASES.items() if not case.golden}, "run make_tiny_golden"


@pytest.mark.parametrize("name", CASES)
def test_golden_logits_belong_to_the_weights(name: str) -> None:
    assert golden_of(name).weights_sha256 == weights_sha256(CASES[name]), "run make_tiny_golden again"


@pytest.mark.parametrize(("name", "backend", "kv_dtype"), runs(is_through_core=False))
def test_logits_are_those_of_transformers(load: LoadCase, name: str, backend: str, kv_dtype: KvDtype) -> None:
    case, golden = CASES[name], golden_of(name)
    with closing(make(load(name), backend, kv_dtype, case.num_tokens)) as executor:
        logits = executor.forward_logits(case_token_ids(case))[kept_positions(case)]
    rms = float(np.sqrt(((logits - golden.logits) ** 2).mean()))
    assert rms < MAX_RELATIVE_RMS[backend] * golden.std


@pytest.mark.parametrize("name", CASES)
def test_what_a_backend_does_not_compute_it_refuses_by_name(load: LoadCase, name: str) -> None:
    program = architectures.describe(load(name).spec)
    for backend, check in (("native", lowering.check_program), ("cuda", supported.check_program)):
        words = (CASES[name].refused_by or {}).get(backend)
        with nullcontext() if words is None else pytest.raises(ModelError, match=words):
            check(program)


@pytest.mark.parametrize("name", CASES)
def test_no_weight_has_the_name_of_a_buffer(load: LoadCase, name: str) -> None:
    """Otherwise `Op.reads` takes the weight for the buffer, and operations are not fused that could be."""
    model = load(name)
    assert not dict(architectures.describe(model.spec).buffers).keys() & model.weights.keys()


@pytest.mark.parametrize(("name", "backend", "kv_dtype"), runs(is_through_core=True))
def test_the_core_answers_as_transformers_however_it_schedules(
    load: LoadCase, name: str, backend: str, kv_dtype: KvDtype
) -> None:
    """Copies are scheduled as their originals, so they answer alone."""
    case = CASES[name]
    with closing(make(load(name), backend, kv_dtype, case.num_tokens)) as executor:
        bench = Bench(executor, prompts(case), (GREEDY, GREEDY))
        alone = bench.alone(range(len(bench.prompts)))
        if name not in COPIES:
            check_schedules(bench, executor.capacity, alone)
    check_answers(case, golden_of(name), alone, MAX_TOP_ERROR[kv_dtype] * MAX_RELATIVE_RMS[backend])


def check_schedules(bench: Bench, capacity: Capacity, alone: list[Answer]) -> None:
    """Alone, beside others in chunks of five, from the prefix cache, and preempted: the same to the bit."""
    picked = range(len(bench.prompts))
    assert bench.run(bench.requests(picked), max_step_tokens=5, max_rows=len(picked)) == alone

    short = replace(bench, sampling=(SHORT, SHORT))  # a prefix shows in the first tokens after it
    again = short.requests([*picked, *picked])
    for number, request in enumerate(again):
        request.request_id, request.arrival_ns = str(number), number
    outcomes = short.outcomes(again, caching=True, max_rows=1)
    cached = [outcome.last.num_cached_tokens for outcome in outcomes[len(picked) :]]
    if capacity.num_state_blocks:  # hits end where a state was saved, and short prompts save none
        assert [bool(num) for num in cached] == [len(prompt) > LEAST_SAVED for prompt in bench.prompts]
    else:
        part = BLOCK_SIZE if capacity.has_state else 1  # with states in KV blocks no hit ends inside a block
        assert cached == [(len(prompt) - 1) // part * part for prompt in bench.prompts]
    begun = [(token_ids[: SHORT.max_tokens], entries[: SHORT.max_tokens]) for token_ids, entries in alone]
    assert [answer_of(outcome) for outcome in outcomes] == begun * 2

    requests = bench.requests(picked[:-1])
    num_blocks = 1 + -(-(max(PROMPT_LENS) + NUM_STEPS) // BLOCK_SIZE)  # those of the longest and no more
    num_blocks += 2 * capacity.num_state_blocks
    reckless = make_policies("penstock", reserve="prompt")
    assert bench.run(requests, policies=reckless, num_blocks=num_blocks) == alone[:-1]
    assert sum(request.num_preemptions for request in requests) >= 1


def check_answers(case: TinyCase, golden: TinyGolden, answers: list[Answer], max_error: float) -> None:
    """Log-probabilities of the likeliest tokens within so many deviations of the logits, and tokens that they decide.

    After a step that they do not decide, and where another token was chosen, there is nothing more to compare.
    """
    allowed = max_error * golden.std
    for number, (token_ids, logprobs) in enumerate(answers):
        for step, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True)):
            wanted = list(zip(golden.top_ids[number, step].tolist(), golden.top_logprobs[number, step].tolist(), strict=True))
            found = dict(entry.top)
            assert len(found) == NUM_TOP
            least = min(found.values())
            errors = [found[idx] - value if idx in found else max(0.0, value - least) for idx, value in wanted]
            assert max(map(abs, errors)) < allowed, f"prompt {number}, step {step}"
            if token_id != wanted[0][0]:
                assert wanted[0][1] - wanted[1][1] < 2 * allowed, f"prompt {number}, step {step}: {token_id}"
                break
