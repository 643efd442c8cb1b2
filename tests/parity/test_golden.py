"""The default model's answers against transformers' on the same weights: golden files, no torch.

The full comparison, with the reference computed afresh, is `make test-parity`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.models.load import load_model
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import load_tokenizer
from support.parity.compare import (
    CLEAR_MARGIN,
    MAX_SMALL_TEXT_RATIO,
    MIN_CLEAR_SHARE,
    GreedyComparison,
    compare_greedy,
    compare_text,
    summarise_greedy,
    summarise_perplexity,
    token_logprobs,
)
from support.parity.executors import ParityExecutor, find_model, open_executor
from support.parity.free_running import free_running_mismatch, generate_greedily, own_path_mismatch
from support.parity.golden import (
    FloatArray,
    GreedyCase,
    IntArray,
    first_steps,
    load_greedy,
    load_last_logits,
    load_manifest,
    load_texts,
    load_window_sums,
    tokens_sha256,
)
from support.parity.windows import Window, make_windows

pytestmark = pytest.mark.model

CASES = load_greedy()
TEXTS = load_texts()
TRACES_DIR = Path(os.environ.get("TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")
BY_NAME = {case.name: case for case in CASES}
NUM_TOKENS = max(sum(len(case.text.token_ids) for case in CASES), max(len(text.token_ids) for text in TEXTS))
WINDOWS = ("sonnet-4", "sharegpt-5")
REFERENCE_CASES = ("encyclopedia", "fibonacci")
REFERENCE_STEPS = 24
REFERENCE_LOGIT_TOLERANCE = 0.25
"""The reference backend differs from transformers' float32 only by its bfloat16 cache: 0.116 at the 99.9th percentile."""


@pytest.fixture(scope="module")
def native() -> Iterator[ParityExecutor]:
    source = find_model()
    if not source.is_present:
        pytest.skip(f"{source.path} is missing: `penstock pull {source.name}` fetches it")
    with open_executor("native", source, num_tokens=NUM_TOKENS) as executor:
        yield executor


@pytest.fixture(scope="module")
def reference() -> Iterator[ParityExecutor]:
    source = find_model()
    if not source.is_present:
        pytest.skip(f"{source.path} is missing: `penstock pull {source.name}` fetches it")
    with open_executor("reference", source, num_tokens=NUM_TOKENS) as executor:
        yield executor


@pytest.fixture(scope="module")
def native_greedy(native: ParityExecutor) -> list[GreedyComparison]:
    return [compare_greedy(native, case) for case in CASES]


@pytest.fixture(scope="module")
def native_outputs(native: ParityExecutor) -> list[IntArray]:
    """Free-running text, all rows in one batch."""
    return generate_greedily(native, CASES)


def test_golden_files_belong_to_the_default_model() -> None:
    assert load_manifest()["model_sha256"] == find_model().entry.files[0].sha256


def test_enough_steps_are_clear_to_mean_something() -> None:
    margins = np.concatenate([case.margins for case in CASES])
    assert len(CASES) >= 20
    assert len(margins) == 64 * len(CASES)
    assert (margins > CLEAR_MARGIN).mean() >= MIN_CLEAR_SHARE


def test_native_chooses_the_references_token_at_every_clear_step(native_greedy: list[GreedyComparison]) -> None:
    summary = summarise_greedy(native_greedy)
    assert summary.mismatches == ()


def test_native_perplexity_of_prompts_and_replies_is_close_to_bf16(native_greedy: list[GreedyComparison]) -> None:
    summary = summarise_perplexity([comparison.text for comparison in native_greedy])
    assert 1 / MAX_SMALL_TEXT_RATIO < summary.ratio_to_bf16 < MAX_SMALL_TEXT_RATIO


def test_native_perplexity_of_sonnets_is_close_to_bf16(native: ParityExecutor) -> None:
    summary = summarise_perplexity([compare_text(native, text) for text in TEXTS])
    assert 1 / MAX_SMALL_TEXT_RATIO < summary.ratio_to_bf16 < MAX_SMALL_TEXT_RATIO


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    if not (TRACES_DIR / "sharegpt_1000.jsonl").is_file():
        pytest.skip("the texts are not here: set TRACES=DIR (tests/golden/README.md says what is in it)")
    return our_windows()


def test_windows_hold_the_tokens_that_the_reference_scored(windows: list[Window]) -> None:
    ours = {window.name: tokens_sha256(window.token_ids) for window in windows}
    assert ours == {name: sums.tokens_sha256 for name, sums in load_window_sums().items()}


def test_native_perplexity_of_sonnets_and_chats_is_close_to_bf16(native: ParityExecutor, windows: list[Window]) -> None:
    """Two of the windows; `make test-parity` takes all, and a limit of one percent."""
    chosen = [window for window in windows if window.name in WINDOWS]
    golden = load_window_sums()
    ours = sum(-float(window_logprobs(native, window).sum(dtype=np.float64)) for window in chosen)
    num_predicted = sum(len(window.token_ids) - 1 for window in chosen)
    ratio = float(np.exp((ours - sum(golden[window.name].nll_bf16 for window in chosen)) / num_predicted))
    assert len(chosen) == len(WINDOWS)
    assert 1 / MAX_SMALL_TEXT_RATIO < ratio < MAX_SMALL_TEXT_RATIO


def our_windows() -> list[Window]:
    model = load_model(find_model())
    tokenizer = load_tokenizer(model.tokenizer_source)
    template = ChatTemplate(model.chat_templates.get("default", ""), special_tokens=tokenizer.special_tokens)
    return make_windows(
        TRACES_DIR,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda messages: template.render(messages, add_generation_prompt=False),
    )


def window_logprobs(executor: ParityExecutor, window: Window) -> FloatArray:
    token_ids = np.array(window.token_ids, np.int32)
    return token_logprobs(executor.forward_logits(window.token_ids[:-1]), token_ids[1:])


def test_native_free_running_text_follows_the_reference_to_the_first_unclear_step(native_outputs: list[IntArray]) -> None:
    pairs = zip(CASES, native_outputs, strict=True)
    assert [line for case, ids in pairs if (line := free_running_mismatch(case, ids))] == []


def test_native_decodes_in_a_batch_what_its_own_forward_pass_chooses(
    native: ParityExecutor, native_outputs: list[IntArray]
) -> None:
    """Every third of them."""
    pairs = list(zip(CASES, native_outputs, strict=True))[::3]
    assert [line for case, ids in pairs if (line := own_path_mismatch(native, case, ids))] == []


@pytest.mark.parametrize("name", load_last_logits())
def test_native_logits_have_the_references_shape(native: ParityExecutor, name: str) -> None:
    """All 49,152 of them, not only the best: relative error of the centred vectors, measured 0.017 to 0.032."""
    golden, logits = load_last_logits()[name], native.forward_logits(BY_NAME[name].prompt_ids)[-1]
    golden, logits = golden - golden.mean(), logits - logits.mean()
    assert np.linalg.norm(logits - golden) < 0.06 * np.linalg.norm(golden)


@pytest.mark.parametrize("case", [BY_NAME[name] for name in REFERENCE_CASES], ids=lambda case: case.name)
def test_reference_gives_the_references_logits(reference: ParityExecutor, case: GreedyCase) -> None:
    case = first_steps(case, REFERENCE_STEPS)
    comparison = compare_greedy(reference, case)
    assert comparison.mismatches == []
    assert np.abs(comparison.margin_errors).max() < REFERENCE_LOGIT_TOLERANCE
    assert np.abs(comparison.text.logprobs - case.text.logprobs_f32).max() < REFERENCE_LOGIT_TOLERANCE
