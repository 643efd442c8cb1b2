"""The native rows against `BatchBuilder`: the same arrays for the same plans, and every breach of the contract is told."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.batch import BatchBuilder
from penstock.backends.native._native import Engine, RowTable, Team
from penstock.testing import sizes_of
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams

CAPACITY = Capacity(num_blocks=60, block_size=4, max_rows=4, max_step_tokens=24, max_model_len=30)
VOCAB_SIZE = 500
SAMPLING = SamplingParams()


def make_table(capacity: Capacity = CAPACITY) -> RowTable:
    return RowTable(**sizes_of(capacity), vocab_size=VOCAB_SIZE, window=capacity.window)


def admit(request_id: str = "a", num_tokens: int = 10, block_ids: tuple[int, ...] = (7, 3, 9), **changes: Any) -> AdmitRow:
    tokens = tuple(range(100, 100 + num_tokens))
    return replace(AdmitRow(request_id, tokens, num_tokens, block_ids, 0, SAMPLING), **changes)


class Requests:
    """Draws plans that keep the contract: admits, chunks, decodes, releases, one block after another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._rows: dict[str, list[int]] = {}
        """request_id -> [tokens known, tokens computed, blocks held]"""
        self._num_admitted = 0
        self._next_block = 0

    def plan(self, step_id: int) -> StepPlan:
        releases = tuple(name for name, row in list(self._rows.items()) if row[0] >= 30 or self._random.random() < 0.1)
        for name in releases:
            del self._rows[name]
        admits: list[AdmitRow] = []
        while len(self._rows) < CAPACITY.max_rows and self._random.random() < 0.5:
            admits.append(self._admit())
        rows: list[RowPlan] = []
        left = CAPACITY.max_step_tokens
        for name in self._random.sample(list(self._rows), len(self._rows)):
            behind = self._rows[name][0] - self._rows[name][1]
            query_len = min(left, self._random.randint(1, behind))
            if query_len:
                rows.append(self._row(name, query_len))
                left -= query_len
        return StepPlan(step_id, 0, tuple(admits), tuple(rows), releases)

    def sampled(self, plan: StepPlan) -> list[int]:
        """A token for each row that samples."""
        names = [row.request_id for row in plan.rows if row.samples]
        for name in names:
            self._rows[name][0] += 1
        return [self._random.randrange(VOCAB_SIZE) for _ in names]

    def _admit(self) -> AdmitRow:
        self._num_admitted += 1
        name, num_tokens = f"r{self._num_admitted}", self._random.randint(1, 29)
        num_blocks = self._random.randint(0, 3)
        num_computed = self._random.randint(0, min(num_tokens - 1, num_blocks * 4))
        self._rows[name] = [num_tokens, num_computed, num_blocks]
        tokens = tuple(self._random.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        num_prompt = self._random.randint(1, num_tokens)
        return AdmitRow(name, tokens, num_prompt, self._blocks(num_blocks), num_computed, SAMPLING)

    def _row(self, name: str, query_len: int) -> RowPlan:
        row = self._rows[name]
        context_len = row[1]
        row[1] += query_len
        num_new = max(0, -(-row[1] // 4) - row[2])
        row[2] += num_new
        return RowPlan(name, context_len, query_len, self._blocks(num_new), row[1] == row[0])

    def _blocks(self, count: int) -> tuple[int, ...]:
        ids = [1 + (self._next_block + idx) % (CAPACITY.num_blocks - 1) for idx in range(count)]
        self._next_block += count
        return tuple(ids)


@given(st.integers(0, 2**32))
def test_the_arrays_are_those_of_the_reference(seed: int) -> None:
    requests, table, builder = Requests(seed), make_table(), BatchBuilder(CAPACITY, vocab_size=VOCAB_SIZE)
    for step_id in range(20):
        plan = requests.plan(step_id)
        batch = builder.apply(plan)
        for name in plan.releases:
            table.release(name)
        assert [table.admit(row) for row in plan.admits] == [slot for slot, _ in batch.admitted]
        table.plan(plan.rows)
        sample_rows = batch.sample_rows
        expected = [
            batch.row_slots,
            batch.query_start_loc,
            batch.context_lens,
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.query_start_loc[sample_rows + 1] - 1,
            batch.row_slots[sample_rows],
        ]
        assert list(table.arrays()) == [array.tolist() for array in expected]
        assert table.sampled() == [batch.request_ids[row] for row in sample_rows]
        tokens = requests.sampled(plan)
        table.append(tokens)
        builder.append_sampled(batch, np.array(tokens, np.int32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": (1, VOCAB_SIZE), "num_prompt_tokens": 2}, "vocabulary"),
        ({"token_ids": (1, -1), "num_prompt_tokens": 2}, "vocabulary"),
        ({"token_ids": (1, 2**40), "num_prompt_tokens": 2}, "vocabulary"),
        ({"token_ids": (), "num_prompt_tokens": 0}, "no prompt"),
        ({"num_prompt_tokens": 11}, "more prompt"),
        ({"num_computed_tokens": 10}, "left to compute"),
        ({"num_computed_tokens": -1}, "left to compute"),
        ({"num_computed_tokens": 9, "block_ids": (1, 2)}, "more KV"),
        ({"block_ids": (0,)}, "null block"),
        ({"block_ids": (CAPACITY.num_blocks,)}, "does not exist"),
        ({"block_ids": (1,) * 9}, "more blocks"),
        ({"token_ids": (1,) * 31, "num_prompt_tokens": 31}, "max_model_len"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"request 'a' .*{words}"):
        make_table().admit(admit(**changes))


@pytest.mark.parametrize(
    ("window", "num_computed", "num_unread"), [(0, 9, 0), (2, 9, 2), (3, 9, 1), (6, 9, 1), (7, 9, 0), (2, 4, 0)]
)
def test_null_blocks_stand_for_the_first_ones_that_are_not_read(window: int, num_computed: int, num_unread: int) -> None:
    capacity = replace(CAPACITY, window=window)
    for num_null in range(4):
        row = admit(block_ids=(*(0,) * num_null, 3, 5, 9)[:3], num_computed_tokens=num_computed)
        for take in (make_table(capacity).admit, lambda row: BatchBuilder(capacity).apply(StepPlan(0, 0, (row,), (), ()))):
            if num_null <= num_unread:
                take(row)
            else:
                with pytest.raises(ValueError, match=r"null block|block 0 is not one of"):
                    take(row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (RowPlan("b", 0, 1, (), False), "never admitted"),
        (RowPlan("a", 0, 0, (), False), "no token"),
        (RowPlan("a", 1, 1, (), False), "context_len"),
        (RowPlan("a", 0, 11, (), False), "not known"),
        (RowPlan("a", 0, 2**40, (), False), "not known"),
        (RowPlan("a", 0, 9, (), True), "before its last token"),
        (RowPlan("a", 0, 1, (0,), False), "null block"),
        (RowPlan("a", 0, 1, (1,) * 6, False), "more blocks"),
    ],
)
def test_a_step_that_cannot_be_is_refused_by_name(row: RowPlan, words: str) -> None:
    table = make_table()
    table.admit(admit())
    with pytest.raises(ValueError, match=f"request '{row.request_id}' .*{words}"):
        table.plan((row,))


def test_rows_do_not_outgrow_their_blocks_the_step_or_the_table() -> None:
    table = make_table()
    table.admit(admit("a", 9, (1, 2)))
    with pytest.raises(ValueError, match="past its last block"):
        table.plan((RowPlan("a", 0, 9, (), False),))
    table = make_table()
    for name in "abcd":
        table.admit(admit(name, 9, (1, 2, 3)))
    with pytest.raises(ValueError, match="max_rows"):
        table.admit(admit("e"))
    with pytest.raises(ValueError, match="'c' exceeds max_step_tokens"):
        table.plan(tuple(RowPlan(name, 0, 9, (), False) for name in "abc"))


def test_tokens_of_a_step_are_appended_once() -> None:
    table = make_table()
    table.admit(admit("a", 30, (1, 2, 3, 4, 5, 6, 7, 8)))
    table.plan((RowPlan("a", 0, 24, (), False),))
    table.append([])
    table.plan((RowPlan("a", 24, 6, (), True),))
    table.append([7])
    with pytest.raises(ValueError, match="run twice"):
        table.append([7])


def test_ids_may_be_any_sequence() -> None:
    table = make_table()
    table.admit(admit("a", 3, (1,), token_ids=[1, 2, 3]))  # type: ignore[arg-type]
    table.plan((RowPlan("a", 0, 3, (), True),))
    assert table.arrays()[3] == [1, 2, 3]


def test_a_request_has_one_row_and_one_slot() -> None:
    table = make_table()
    table.admit(admit())
    with pytest.raises(ValueError, match="twice"):
        table.admit(admit())
    with pytest.raises(ValueError, match="two rows"):
        table.plan((RowPlan("a", 0, 2, (), False), RowPlan("a", 2, 2, (), False)))
    table.release("a")
    with pytest.raises(ValueError, match="released"):
        table.release("a")


def test_a_row_that_failed_does_not_go_on() -> None:
    table = make_table()
    table.admit(admit("a", 3, (1,)))
    table.plan((RowPlan("a", 0, 3, (), True),))
    table.append([-1])
    with pytest.raises(ValueError, match="failed"):
        table.plan((RowPlan("a", 3, 1, (), True),))


@pytest.mark.parametrize(
    ("sampled", "num_appended"),
    [([8, 9, 10, 11], 4), ([8, 9, 11, 12], 3), ([9, 9, 10, 11], 1), ([8, -1, 10, 11], 1), ([8, 9, -1, 11], 2)],
)
def test_a_row_grows_up_to_the_first_token_that_was_not_guessed(sampled: list[int], num_appended: int) -> None:
    """A guess after which no logit is usable counts for nothing: the next step meets that place again."""
    table = RowTable(**sizes_of(CAPACITY), vocab_size=VOCAB_SIZE, window=0, max_scored=4)
    table.admit(admit("a", 3, (1, 2, 3)))
    table.plan((RowPlan("a", 0, 3, (), 1),))
    table.append([7])
    table.plan((RowPlan("a", 3, 4, (), 4),), (), {"a": (8, 9, 10)})
    assert table.arrays()[3] == [7, 8, 9, 10]
    assert table.arrays()[6] == [0, 1, 2, 3]
    table.append(sampled)
    assert table.sampled_logits() == [(0, num_appended)]
    table.plan((RowPlan("a", 3 + num_appended, 1, (), 1),))
    assert table.arrays()[3] == [sampled[num_appended - 1]]


def test_more_guesses_than_there_are_logits_for_are_refused() -> None:
    table = RowTable(**sizes_of(CAPACITY), vocab_size=VOCAB_SIZE, window=0, max_scored=4)
    table.admit(admit("a", 3, (1, 2, 3)))
    table.plan((RowPlan("a", 0, 3, (), 1),))
    table.append([7])
    with pytest.raises(ValueError, match="more guesses than max_scored"):
        table.plan((RowPlan("a", 3, 6, (), 6),), (), {"a": (8,) * 5})


def test_an_engine_of_another_shape_is_refused() -> None:
    sizes = {"kv_shapes": [(1, 16)], "vocab_size": VOCAB_SIZE, "team": Team(1)}
    engine = Engine(num_blocks=60, block_size=16, max_rows=4, max_step_tokens=24, **sizes)
    with pytest.raises(ValueError, match="do not fit the row table"):
        make_table().run(engine)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_rows", "max_step_tokens", "max_model_len"])
def test_a_table_without_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_table(replace(CAPACITY, **{name: 0}))


def test_a_closed_executor_leaves_nothing_behind() -> None:
    """The bindings complain at the end of the process about what still lives, even if a global variable holds the executor."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from support.contracts.factories import make_native\n"
        "from penstock.types.plan import Capacity\n"
        "executor = make_native(Capacity(4, 16, 2, 8, 32), variant='')\n"
        "executor.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
