"""Same prompt, same answer: tokens and log-probabilities are equal to the bit however a request was scheduled.

Alone or beside 31 others, whole or in chunks, from the prefix cache or computed, preempted or not; greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.models import architectures
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import sizes_of
from penstock.text.tokenizer import load_tokenizer
from penstock.types.plan import Capacity
from penstock.types.sampling import SamplingParams
from support.answer_bench import Answer, Bench, answer_of
from support.native_variants import VARIANTS
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES as CASES_OF_PARITY
from support.tiny_models import TinyLlama, write_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=20)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, max_tokens=6, logprobs=20)
NUM_REQUESTS = 32
EAGER = Watermark(share=0.0, growth_tokens=0)
"""Keeps no memory back, so that requests are preempted."""
EXCERPT = Path(__file__).parents[1] / "golden" / "sonnet_excerpt.txt"


def make_bench(model: LoadedModel, variant: str, prompts: list[tuple[int, ...]], capacity: Capacity) -> Bench:
    program = architectures.describe(model.spec)
    executor = NativeExecutor(model, program, **sizes_of(capacity), variant=variant, num_threads=2, poison=True)
    return Bench(executor, prompts, (GREEDY, SAMPLED))


def default_model_bench(variant: str) -> Bench:
    source = resolve(DEFAULT_MODEL, default_cache_dir())
    if not source.is_present:
        pytest.skip(f"{source.path} is not there: run `penstock pull {DEFAULT_MODEL}`")
    model = load_model(source)
    ids = load_tokenizer(model.tokenizer_source).encode(EXCERPT.read_text(), add_special_tokens=False)
    # Every prompt begins elsewhere. The first lengths straddle blocks (16), attention segments (256) and chunks (512).
    lengths = [5, 15, 16, 17, 31, 40, 64, 65, 90, 130, 255, 256, 257, 300, 511, 530, *range(8, 88, 5)]
    prompts = [tuple(ids[3 * i : 3 * i + length]) for i, length in zip(range(NUM_REQUESTS), lengths, strict=True)]
    assert len(ids) > 3 * NUM_REQUESTS + max(lengths)
    return make_bench(model, variant, prompts, Capacity(400, 16, NUM_REQUESTS, 1024, 640))


def random_prompts(vocab_size: int) -> list[tuple[int, ...]]:
    """Every other one is long: up to 391 tokens, two segments of attention."""
    rng = np.random.default_rng(1)
    lengths = [3 * i + 1 if i % 2 else 13 * i + 1 for i in range(NUM_REQUESTS)]
    return [tuple(int(t) for t in rng.integers(0, vocab_size, length)) for length in lengths]


def tiny_model_bench(variant: str, directory: Path) -> Bench:
    path = write_gguf(directory / "tiny.gguf", TinyLlama(max_model_len=640), matrix_type="Q4_0")
    return make_bench(load_gguf(path), variant, random_prompts(264), Capacity(500, 16, NUM_REQUESTS, 1024, 640))


def parity_bench(name: str, variant: str, directory: Path) -> Bench:
    """One of the parity tests' models: with experts, 7 of 40 columns and 3 of them for each token, or with recurrent state."""
    case = CASES_OF_PARITY[name]
    path = write_case(replace(case, config={**case.config, "max_position_embeddings": 640}), directory / name)
    return make_bench(
        load_hf_directory(path), variant, random_prompts(case.vocab_size), Capacity(500, 16, NUM_REQUESTS, 1024, 640)
    )


CASES = [
    pytest.param(("default", VARIANTS[0]), marks=pytest.mark.model, id=f"default-{VARIANTS[0]}"),
    *(pytest.param(("tiny", v), id=f"tiny-{v}") for v in VARIANTS),
    *(pytest.param((name, VARIANTS[0]), id=f"{name}-{VARIANTS[0]}") for name in ("mixtral", "gpt_oss", "lfm2")),
]


@pytest.fixture(scope="module", params=CASES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    kind, variant = request.param
    if kind == "default":
        return default_model_bench(variant)
    directory = tmp_path_factory.mktemp("tiny")
    return tiny_model_bench(variant, directory) if kind == "tiny" else parity_bench(kind, variant, directory)


@pytest.fixture(scope="module")
def alone(bench: Bench) -> list[Answer]:
    """Every request by itself, its prompt in one piece."""
    return bench.alone(range(NUM_REQUESTS))


def assert_equal(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for number, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        assert answer == other, f"request {number}"


def test_alone_or_beside_31_others(bench: Bench, alone: list[Answer]) -> None:
    """In steps of 512 tokens, so that long prompts are computed in two."""
    assert_equal(bench.run(bench.requests(range(NUM_REQUESTS)), max_step_tokens=512), alone)
    assert len({answer[0] for answer in alone}) > NUM_REQUESTS // 2, "the requests must not all be alike"


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_whole_or_in_chunks(bench: Bench, alone: list[Answer], chunk: int) -> None:
    picked = {1: [3, 8, 20], 7: [3, 8, 12, 20]}.get(chunk, range(NUM_REQUESTS))  # small chunks take long
    answers = bench.run(bench.requests(picked), max_step_tokens=chunk, max_rows=min(chunk, NUM_REQUESTS))
    assert_equal(answers, [alone[i] for i in picked])


def test_hit_or_miss(bench: Bench, alone: list[Answer]) -> None:
    """Each prompt twice, one after the other: the second finds all of the first but its last token, inside a block, too.

    With recurrent state it finds whole blocks alone.
    """
    picked = range(0, NUM_REQUESTS, 3)
    first, second = bench.requests(picked), bench.requests(picked)
    for request in second:
        request.request_id += "-again"
        request.arrival_ns += NUM_REQUESTS
    outcomes = bench.outcomes([*first, *second], caching=True, max_rows=4)
    hits = [outcome.last.num_cached_tokens for outcome in outcomes[len(first) :]]
    part = bench.executor.capacity.block_size if bench.executor.capacity.has_state else 1
    assert hits == [(len(bench.prompts[i]) - 1) // part * part for i in picked]
    assert_equal([answer_of(outcome) for outcome in outcomes], [alone[i] for i in picked] * 2)


def test_preempted_or_not(bench: Bench) -> None:
    """A pool that holds the longest request and little more; replies are longer than a block, so that running requests
    outgrow the pool."""
    picked = [i for i in range(NUM_REQUESTS) if 60 < len(bench.prompts[i]) < 160]
    expected = [bench.run(bench.requests([i], max_tokens=20))[0] for i in picked]
    requests = bench.requests(picked, max_tokens=20)
    policies = make_policies(guesser="off", reserve=EAGER)  # with guesses, replies end before memory is short
    limits = {"num_blocks": 1 + 256 // 16, "max_model_len": 256, "max_step_tokens": 256}
    assert_equal(bench.run(requests, policies=policies, **limits), expected)
    assert sum(request.num_preemptions for request in requests) >= 2
