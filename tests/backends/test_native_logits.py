"""The last product, of which rows that want no more keep their largest logit alone: they get the token that they should."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native._native import (
    Engine,
    RowOp,
    RowOpKind,
    RowSampling,
    RowTable,
    SourceFormat,
    Team,
)
from penstock.types.plan import AdmitRow, RowPlan
from penstock.types.sampling import SamplingParams
from support.backends.native_probe import bf16, bf16_bytes
from support.native_variants import VARIANTS

VOCAB_SIZE = 2_005  # three pieces, the last of them with a panel that is not full
COLS = 64
NUM_IDS = 200
MAX_ROWS = 120  # two blocks of rows

F32 = NDArray[np.float32]


def open_engine(
    inputs: F32, output: F32, *, num_threads: int, variant: str = "", scale: float = 1.0, cap: float = 0.0
) -> Engine:
    """Its logits after token i are scale * inputs[i] @ output.T, both exact in bfloat16, and then capped."""
    engine = Engine(
        kv_shapes=[(1, 16)],
        vocab_size=len(output),
        num_blocks=2,
        block_size=16,
        max_rows=MAX_ROWS,
        max_step_tokens=MAX_ROWS,
        team=Team(num_threads),
        variant=variant,
    )
    embed = engine.add_matrix(SourceFormat.BF16, *inputs.shape, bf16_bytes(inputs))
    weight = engine.add_matrix(SourceFormat.BF16, *output.shape, bf16_bytes(output))
    x, picked = engine.add_buffer(COLS, per_sample=False), engine.add_buffer(COLS, per_sample=True)
    activation = engine.add_activation(COLS, False, per_sample=True)
    logits = engine.add_buffer(len(output), per_sample=True)
    engine.add_rows([RowOp(RowOpKind.EMBED, out=x, weight=embed, value=1.0)], samples=False)
    engine.add_rows(
        [RowOp(RowOpKind.GATHER, x=x, out=picked), RowOp(RowOpKind.TO_BF16, x=picked, out=activation)], samples=True
    )
    engine.add_linear([(weight, activation, logits, -1, -1)], samples=True)
    engine.set_logits(logits, scale, cap)
    return engine


def arrays_of(num_rows: int) -> list[NDArray[np.generic]]:
    """Rows of one token each, row i of token i."""
    each = np.arange(num_rows, dtype=np.int32)
    starts = np.arange(num_rows + 1, dtype=np.int32)
    zeros = np.zeros(num_rows, np.int32)
    return [each, starts, zeros, each, zeros, np.full(num_rows, 16, np.int64), np.ones((num_rows, 1), np.int32), each]


def logits_of(engine: Engine, num_rows: int) -> F32:
    out = np.empty((num_rows, VOCAB_SIZE), np.float32)
    engine.logits_step(*arrays_of(num_rows), out)
    return out


def planned(num_rows: int) -> RowTable:
    """A step of the same rows: row i is in slot i, and its name is "i"."""
    rows = RowTable(
        num_blocks=2,
        block_size=16,
        max_rows=MAX_ROWS,
        max_step_tokens=MAX_ROWS,
        max_model_len=16,
        vocab_size=VOCAB_SIZE,
        window=0,
    )
    for token_id in range(num_rows):
        assert rows.admit(AdmitRow(str(token_id), (token_id,), 1, (1,), 0, SamplingParams())) == token_id
    rows.plan(tuple(RowPlan(str(token_id), 0, 1, (), True) for token_id in range(num_rows)))
    return rows


def tokens_of(engine: Engine, num_rows: int) -> list[int]:
    tokens, failed = planned(num_rows).run(engine)
    assert tokens.keys().isdisjoint(failed)
    return [tokens.get(str(row), (-1,))[0] for row in range(num_rows)]


def greedy(logits: F32) -> list[int]:
    """As backends/reference/sampling.py: NaN counts as -inf, of equal ones the first; -1 if the largest is infinite."""
    usable = np.where(np.isnan(logits), -np.inf, logits)
    return [int(row.argmax()) if np.isfinite(row.max()) else -1 for row in usable]


def make_weights() -> tuple[F32, F32]:
    """Random ones, with equal columns of the output in different pieces and in one, and some that are no finite numbers."""
    rng = np.random.default_rng(4)
    inputs, output = (bf16(rng.standard_normal((n, COLS)).astype(np.float32)) for n in (NUM_IDS, VOCAB_SIZE))
    output[[3, 4, 700, 767, 768, 1_999]] = bf16(np.abs(output[3]))
    inputs[:6] = np.abs(inputs[:6])  # for them those are the largest
    inputs[6] = 0.0  # all are equal
    output[[0, 50, 1_500, 2_004], 0] = np.nan
    return inputs, output


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_rows_get_the_token_of_their_largest_logit(variant: str, num_threads: int) -> None:
    engine = open_engine(*make_weights(), num_threads=num_threads, variant=variant)
    for slot in range(MAX_ROWS):
        engine.set_sampling(slot, RowSampling(temperature=0.0))
    for num_rows in (1, 2, 3, 4, 17, MAX_ROWS):
        expected = greedy(logits_of(engine, num_rows))
        assert tokens_of(engine, num_rows) == expected
        assert expected[0] == 3
    assert expected[6] == 1  # 0 is NaN
    assert len(set(expected)) > 50


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("scale", "cap"), [(0.25, 0.0), (1.0, 30.0), (0.5, 2.0), (1.0, 1e-3)])
def test_logits_are_scaled_and_capped_whether_or_not_they_are_kept(variant: str, scale: float, cap: float) -> None:
    """The cap makes some equal: of these the first is the largest, as in the reference backend."""
    inputs, output = make_weights()
    with np.errstate(invalid="ignore"):
        logits = np.float32(scale) * (inputs[:MAX_ROWS] @ output.T)
        wanted = np.float32(cap) * np.tanh(logits / np.float32(cap)) if cap else logits
    engine = open_engine(inputs, output, num_threads=2, variant=variant, scale=scale, cap=cap)
    for slot in range(MAX_ROWS):
        engine.set_sampling(slot, RowSampling(temperature=0.0, num_logprobs=1 if slot % 3 == 0 else -1))
    found = logits_of(engine, MAX_ROWS)
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert np.nanmax(np.abs(found - wanted)) < 2e-5 * max(1.0, cap)
    assert tokens_of(engine, MAX_ROWS) == greedy(found)
    if cap == 1e-3:
        assert (found == np.float32(cap)).sum() > MAX_ROWS * 100


def test_logits_that_no_product_makes_are_not_changed_in_silence() -> None:
    engine = open_engine(*make_weights(), num_threads=1)
    other = engine.add_buffer(VOCAB_SIZE, per_sample=True)
    with pytest.raises(ValueError, match="no product"):
        engine.set_logits(other, 0.5, 0.0)


def test_rows_that_want_more_of_their_logits_get_them_beside_others() -> None:
    plain, changed = (open_engine(*make_weights(), num_threads=2) for _ in range(2))
    seeds = range(MAX_ROWS)
    drawn = [RowSampling(temperature=1.0, seed=seed) for seed in seeds]
    told = [RowSampling(temperature=0.0, num_logprobs=2) for _ in seeds]
    biased = [RowSampling(temperature=0.0, bias=[(100 + seed, 1e4)]) for seed in seeds]
    for slot in range(MAX_ROWS):
        plain.set_sampling(slot, drawn[slot])
    for_drawn = tokens_of(plain, MAX_ROWS)
    expected = greedy(logits_of(plain, MAX_ROWS))
    kinds = [drawn, told, biased, [RowSampling(temperature=0.0)] * MAX_ROWS]
    for slot in range(MAX_ROWS):
        changed.set_sampling(slot, kinds[slot % 4][slot])
    for row, token in enumerate(tokens_of(changed, MAX_ROWS)):
        assert token == (for_drawn[row], expected[row], 100 + row, expected[row])[row % 4]
        if row % 4 == 1:
            assert changed.logprobs(row)[0] == token


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masked_rows_get_the_largest_of_what_they_are_allowed(num_threads: int) -> None:
    """Beside rows without a mask, and whether or not they keep all their logits."""
    engine, rows = open_engine(*make_weights(), num_threads=num_threads), planned(MAX_ROWS)
    rng = np.random.default_rng(5)
    for slot in range(MAX_ROWS):
        engine.set_sampling(slot, RowSampling(temperature=0.0, num_logprobs=2 if slot % 3 == 0 else -1))
    allowed = rng.random((MAX_ROWS, VOCAB_SIZE)) < rng.choice([0.002, 0.1, 0.99], (MAX_ROWS, 1))
    allowed[7] = False
    allowed[9], allowed[9, 2_004] = False, True
    allowed[10, :1_000], allowed[10, 1_000:] = False, True
    masks = {str(row): packed(allowed[row]) for row in range(MAX_ROWS) if row % 4}
    allowed[::4] = True
    logits = logits_of(engine, MAX_ROWS)
    expected = greedy(np.where(allowed, logits, -np.inf))
    rows.begin(engine)
    time.sleep(0.05)  # the other threads come to the end of the layers, and wait
    assert engine.is_computing == (num_threads > 1)
    rows.restrict(engine, masks)
    tokens, failed = rows.run(engine)
    assert not engine.is_computing
    assert [tokens.get(str(row), (-1,)) for row in range(MAX_ROWS)] == [(token,) for token in expected]
    assert failed == [str(row) for row, token in enumerate(expected) if token < 0]
    assert {"7", "9"} <= set(failed)  # nothing is allowed; the only token has no number
    assert len(set(expected)) > 30


def test_a_mask_is_brought_to_a_step_that_was_begun() -> None:
    engine = open_engine(*make_weights(), num_threads=1)
    with pytest.raises(ValueError, match="'0' has a mask that nobody expects"):
        planned(1).restrict(engine, {"0": packed(np.ones(VOCAB_SIZE, np.bool_))})


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_step_that_was_begun_ends_with_its_masks_and_its_rows(num_threads: int) -> None:
    engine, rows, others = open_engine(*make_weights(), num_threads=num_threads), planned(9), planned(5)
    expected = tokens_of(engine, 9)
    with pytest.raises(ValueError, match="at least one token"):
        planned(0).begin(engine)
    rows.begin(engine)
    with pytest.raises(ValueError, match="waits for its masks"):
        rows.run(engine)
    with pytest.raises(ValueError, match="other rows began"):
        others.run(engine)
    with pytest.raises(ValueError, match="is in a step"):
        others.begin(engine)
    with pytest.raises(ValueError, match="has not ended"):
        rows.plan(())
    rows.restrict(engine, {})
    assert rows.run(engine)[0] == {str(row): (token,) for row, token in enumerate(expected)}
    assert others.run(engine)[0] == {str(row): (token,) for row, token in enumerate(expected[:5])}


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_of_a_step_that_was_begun_may_go_before_it_ends(num_threads: int) -> None:
    engine = open_engine(*make_weights(), num_threads=num_threads)
    expected = tokens_of(engine, MAX_ROWS)
    for _ in range(20):
        rows = planned(MAX_ROWS)
        rows.begin(engine)
        del rows
        engine.abandon_step()
        assert tokens_of(engine, MAX_ROWS) == expected
    planned(MAX_ROWS).begin(engine)
    del engine


def packed(allowed: NDArray[np.bool_]) -> bytes:
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").tobytes()


def test_a_row_without_a_usable_logit_is_told() -> None:
    inputs, output = make_weights()
    output[:] = np.nan
    engine = open_engine(inputs, output, num_threads=2)
    for slot in range(MAX_ROWS):
        engine.set_sampling(slot, RowSampling(temperature=0.0))
    assert tokens_of(engine, 3) == [-1, -1, -1]
    output[:] = 1.0
    output[1_200, 0] = np.inf
    inputs[:2] = 1.0
    inputs[1, 0] = -1.0
    engine = open_engine(inputs, output, num_threads=2)
    for slot in range(MAX_ROWS):
        engine.set_sampling(slot, RowSampling(temperature=0.0))
    assert tokens_of(engine, 2) == [-1, 0]  # +inf; -inf
