"""The comparison itself, on made-up cases: what it must report and what it must let pass. Needs no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.testing.hash_executor import HashExecutor, HashModel, expected_tokens
from penstock.types.plan import Capacity
from penstock.types.sampling import SamplingParams
from support.parity.compare import (
    CLEAR_MARGIN,
    TextComparison,
    compare_greedy,
    compare_text,
    summarise_greedy,
    summarise_perplexity,
    token_logprobs,
)
from support.parity.free_running import free_running_mismatch, generate_greedily
from support.parity.golden import FloatArray, GreedyCase, TextCase

VOCAB_SIZE = 12
PROMPT_LEN = 3
MARGINS = (3.0, 2.0, CLEAR_MARGIN / 2, 4.0)


class TableExecutor:
    """Gives prepared logits, one row for each token."""

    def __init__(self, logits: FloatArray) -> None:
        self.logits = logits

    def forward_logits(self, token_ids: Sequence[int]) -> FloatArray:
        return self.logits[: len(token_ids)].copy()


def make_case() -> tuple[GreedyCase, FloatArray]:
    """A case whose step i chooses token i + 1 with MARGINS[i] before token 11, and its logits."""
    token_ids = np.array([5, 6, 7, 1, 2, 3, 4], np.int32)
    logits = np.zeros((len(token_ids) - 1, VOCAB_SIZE), np.float32)
    steps = logits[PROMPT_LEN - 1 :]
    steps[np.arange(4), token_ids[PROMPT_LEN:]] = np.add(MARGINS, 1.0)
    steps[:, 11] = 1.0
    top_ids = np.argsort(-steps, axis=1, kind="stable")[:, :2].astype(np.int32)
    logprobs = token_logprobs(logits, token_ids[1:])
    text = TextCase("made-up", token_ids, logprobs, logprobs)
    return GreedyCase(text, PROMPT_LEN, top_ids, np.take_along_axis(steps, top_ids, axis=1)), logits


def test_equal_logits_agree_everywhere() -> None:
    case, logits = make_case()
    summary = summarise_greedy([compare_greedy(TableExecutor(logits), case)])
    assert (summary.num_steps, summary.num_clear, summary.num_equal, summary.mismatches) == (4, 3, 4, ())
    assert summary.margin_error_rms == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_another_choice_at_a_clear_step_is_named(step: int) -> None:
    case, logits = make_case()
    logits[PROMPT_LEN - 1 + step, 9] = 100.0
    summary = summarise_greedy([compare_greedy(TableExecutor(logits), case)])
    assert len(summary.mismatches) == 1
    assert f"step {step}: 9 instead of {step + 1}" in summary.mismatches[0]
    assert summary.worst_unequal_margin == pytest.approx(MARGINS[step])


def test_another_choice_at_an_unclear_step_passes_but_is_counted() -> None:
    case, logits = make_case()
    logits[PROMPT_LEN - 1 + 2, 9] = 100.0
    summary = summarise_greedy([compare_greedy(TableExecutor(logits), case)])
    assert summary.mismatches == ()
    assert summary.num_equal == 3


def test_perplexity_of_equal_logits_over_a_uniform_choice_is_the_vocabulary_size() -> None:
    text = TextCase("uniform", np.arange(5, dtype=np.int32), *[np.full(4, -np.log(VOCAB_SIZE), np.float32)] * 2)
    summary = summarise_perplexity([compare_text(TableExecutor(np.zeros((4, VOCAB_SIZE), np.float32)), text)])
    assert summary.executor == pytest.approx(VOCAB_SIZE)
    assert summary.ratio_to_bf16 == pytest.approx(1.0)


def test_perplexity_weighs_every_token_alike_whatever_its_text() -> None:
    texts = [TextCase(name, np.zeros(n + 1, np.int32), *[np.zeros(n, np.float32)] * 2) for name, n in (("a", 1), ("b", 3))]
    comparisons = [TextComparison(text, np.full(len(text.token_ids) - 1, -k, np.float32)) for k, text in enumerate(texts)]
    assert summarise_perplexity(comparisons).executor == pytest.approx(np.exp(3 / 4))


def test_logprobs_of_huge_logits_stay_finite() -> None:
    logits = np.array([[1e4, 0.0], [-1e4, 0.0]], np.float32)
    assert token_logprobs(logits, np.array([0, 0], np.int32)).tolist() == [0.0, -1e4]


@pytest.mark.parametrize(
    ("output", "leaves"),
    [([1, 2, 3, 4], False), ([1, 2, 9, 9], False), ([9, 2, 3, 4], True), ([1, 9, 3, 4], True)],
    ids=["same", "after-the-unclear-step", "at-the-first-step", "before-the-unclear-step"],
)
def test_free_running_text_is_bound_to_the_path_until_the_first_unclear_step(output: list[int], *, leaves: bool) -> None:
    case, _ = make_case()
    assert (free_running_mismatch(case, np.array(output, np.int32)) is not None) == leaves


def test_generation_through_the_port_is_what_the_executor_says_for_each_prompt() -> None:
    num_steps, prompts = 6, [list(range(1, n)) for n in (4, 30, 17)]
    cases = [
        GreedyCase(
            TextCase(f"prompt-{i}", np.array(prompt + [0] * num_steps, np.int32), *[np.zeros(0, np.float32)] * 2),
            len(prompt),
            *[np.zeros((num_steps, 2))] * 2,
        )
        for i, prompt in enumerate(prompts)
    ]
    executor = HashExecutor(Capacity(num_blocks=32, block_size=4, max_rows=4, max_step_tokens=8, max_model_len=64))
    greedy = SamplingParams(max_tokens=num_steps, temperature=0.0)
    wanted = [expected_tokens(prompt, greedy, model=HashModel(), max_model_len=64).token_ids for prompt in prompts]
    assert [tuple(output.tolist()) for output in generate_greedily(executor, cases)] == wanted
