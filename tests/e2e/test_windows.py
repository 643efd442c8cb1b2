"""A model whose every layer has a window gives the same bits in a pool that holds its texts and in one far smaller, while all
that was given back is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.hf import load_hf_directory
from penstock.testing import sizes_of
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity
from penstock.types.sampling import SamplingParams
from support.answer_bench import Bench, answer_of, spoil_free_blocks
from support.native_variants import VARIANTS
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES as CASES_OF_PARITY

BLOCK, CHUNK, WINDOW = 16, 48, 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=5)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=20, logprobs=5)
KINDS = [("reference", KvDtype.INT8), *((variant, dtype) for variant in VARIANTS for dtype in (KvDtype.INT8, KvDtype.BF16))]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Prompts that are many windows long, some native ones several segments of attention, too; the last two begin alike."""
    kind, dtype = request.param
    case = CASES_OF_PARITY["mistral"]
    case = replace(case, config={**case.config, "max_position_embeddings": 1200})
    model = load_hf_directory(write_case(case, tmp_path_factory.mktemp("windows") / "mistral"))
    program, is_native = architectures.describe(model.spec), kind != "reference"
    sizes = sizes_of(Capacity(num_blocks=300, block_size=BLOCK, max_rows=4, max_step_tokens=CHUNK, max_model_len=1200))
    executor: NativeExecutor | ReferenceExecutor
    if is_native:
        executor = NativeExecutor(model, program, **sizes, kv_dtype=dtype, variant=kind, num_threads=2, poison=True)
    else:
        executor = ReferenceExecutor(model, program, **sizes, kv_dtype=dtype, poison=True)
    assert executor.capacity.window == WINDOW
    rng = np.random.default_rng(3)
    common = rng.integers(0, case.vocab_size, 900)
    lengths = (150, 530, 160, 300) if is_native else (130, 177, 150, 160)
    prompts = [rng.integers(0, case.vocab_size, length) for length in lengths[:2]] + [common[:length] for length in lengths[2:]]
    return Bench(executor, [tuple(prompt.tolist()) for prompt in prompts], (GREEDY, SAMPLED))


def test_a_pool_far_smaller_than_the_text(bench: Bench) -> None:
    """One request after the other; then all beside each other, in memory for fewer."""
    picked, capacity = range(4), bench.executor.capacity
    expected = bench.run(bench.requests(picked), window=0)
    num_needed = capacity.most_blocks(capacity.max_model_len)
    assert 1.5 * num_needed * BLOCK < min(map(len, bench.prompts))
    for num_blocks, caching in ((num_needed, False), (2 * num_needed, False), (2 * num_needed, True)):
        requests = bench.requests(picked)
        outcomes = bench.outcomes(
            requests, caching=caching, num_blocks=1 + num_blocks, after_turn=None if caching else spoil_free_blocks
        )
        assert [answer_of(outcome) for outcome in outcomes] == expected


def test_a_prefix_is_found_though_its_beginning_is_gone(bench: Bench) -> None:
    """The second goes on where the first one ended, and finds its whole prompt in a pool that has only the end of it."""
    capacity = bench.executor.capacity
    expected = bench.run(bench.requests([3]), window=0)
    requests = bench.requests([2, 3])
    outcomes = bench.outcomes(requests, caching=True, num_blocks=1 + capacity.most_blocks(capacity.max_model_len), max_rows=1)
    assert outcomes[1].last.num_cached_tokens == len(bench.prompts[2])
    assert answer_of(outcomes[1]) == expected[0]
