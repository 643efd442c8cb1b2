"""Plans become arrays: by hand, against a token-by-token oracle, and every way to break the contract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.batch import BatchBuilder, StepBatch
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams

CAPACITY = Capacity(num_blocks=32, block_size=4, max_rows=3, max_step_tokens=16, max_model_len=20)
SAMPLING = SamplingParams()


def admit(
    request_id: str = "a",
    num_tokens: int = 10,
    block_ids: tuple[int, ...] = (7, 3, 9),
    num_computed: int = 0,
    num_prompt: int | None = None,
    first_token: int = 100,
) -> AdmitRow:
    token_ids = tuple(range(first_token, first_token + num_tokens))
    return AdmitRow(request_id, token_ids, num_prompt or num_tokens, block_ids, num_computed, SAMPLING)


def row(
    request_id: str = "a", context: int = 0, query: int = 6, new_blocks: tuple[int, ...] = (), *, samples: bool = False
) -> RowPlan:
    return RowPlan(request_id, context, query, new_blocks, samples)


def plan(*rows: RowPlan, admits: tuple[AdmitRow, ...] = (), releases: tuple[str, ...] = (), step_id: int = 0) -> StepPlan:
    return StepPlan(step_id, 0, admits, rows, releases)


def append(builder: BatchBuilder, batch: StepBatch, *token_ids: int) -> None:
    builder.append_sampled(batch, np.array(token_ids, np.int32))


def test_first_chunk_of_a_prompt():
    batch = BatchBuilder(CAPACITY).apply(plan(row(query=6), admits=(admit(),)))
    assert batch.request_ids == ("a",)
    assert batch.query_start_loc.tolist() == [0, 6]
    assert batch.context_lens.tolist() == [0]
    assert batch.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31, 12, 13]
    assert batch.sample_rows.tolist() == []
    assert [(slot, admitted.request_id) for slot, admitted in batch.admitted] == [(int(batch.row_slots[0]), "a")]


def test_arrays_have_the_promised_types_and_lie_in_order():
    batch = BatchBuilder(CAPACITY).apply(plan(row(query=10, samples=True), admits=(admit(),)))
    int32 = (
        batch.row_slots,
        batch.query_start_loc,
        batch.context_lens,
        batch.token_ids,
        batch.positions,
        batch.sample_rows,
    )
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in int32)
    assert batch.slot_mapping.dtype == np.int64
    assert batch.slot_mapping.flags.c_contiguous


def test_sampled_token_is_the_next_input():
    builder = BatchBuilder(CAPACITY)
    batch = builder.apply(plan(row(query=10, samples=True), admits=(admit(),)))
    append(builder, batch, 55)
    batch = builder.apply(plan(row(context=10, query=1, samples=True)))
    assert batch.token_ids.tolist() == [55]
    assert batch.slot_mapping.tolist() == [9 * 4 + 2]
    assert int(builder.num_tokens[builder.slot("a")]) == 11


def test_a_chunk_and_a_decode_share_a_step():
    builder = BatchBuilder(CAPACITY)
    append(builder, builder.apply(plan(row(query=10, samples=True), admits=(admit(),))), 55)
    other = admit("b", 5, (1, 2), first_token=200)
    batch = builder.apply(plan(row("b", query=3), row(context=10, query=1, samples=True), admits=(other,)))
    assert batch.query_start_loc.tolist() == [0, 3, 4]
    assert batch.token_ids.tolist() == [200, 201, 202, 55]
    assert batch.positions.tolist() == [0, 1, 2, 10]
    assert batch.sample_rows.tolist() == [1]


def test_new_blocks_count_in_the_same_step():
    builder = BatchBuilder(CAPACITY)
    batch = builder.apply(plan(row(query=10, new_blocks=(9,)), admits=(admit(block_ids=(7, 3)),)))
    assert batch.slot_mapping.tolist()[-2:] == [36, 37]


def test_prefix_hit_starts_after_what_is_computed():
    batch = BatchBuilder(CAPACITY).apply(plan(row(context=8, query=2, samples=True), admits=(admit(num_computed=8),)))
    assert batch.positions.tolist() == [8, 9]
    assert batch.token_ids.tolist() == [108, 109]


def test_release_and_admission_of_one_request_in_one_step():
    builder = BatchBuilder(CAPACITY)
    builder.apply(plan(row(query=10), admits=(admit(),)))
    batch = builder.apply(plan(row(query=2), admits=(admit(num_tokens=2, block_ids=(5,)),), releases=("a",)))
    assert len(batch.released) == 1
    assert batch.slot_mapping.tolist() == [20, 21]
    assert builder.block_tables[batch.row_slots[0]].tolist() == [5, 0, 0, 0, 0, 0]


def test_rows_are_given_back_by_releases():
    builder = BatchBuilder(CAPACITY)
    for i in range(10):
        releases = (str(i - 1),) if i else ()
        builder.apply(plan(row(str(i), query=1), admits=(admit(str(i), 4, (1,)),), releases=releases))
    with pytest.raises(ValueError, match="never admitted"):
        builder.slot("8")


def test_step_without_rows():
    builder = BatchBuilder(CAPACITY)
    builder.apply(plan(row(), admits=(admit(),)))
    batch = builder.apply(plan(releases=("a",)))
    assert (batch.num_rows, batch.num_tokens, batch.query_start_loc.tolist()) == (0, 0, [0])
    append(builder, batch)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (plan(row("z")), "never admitted"),
        (plan(releases=("z",)), "never admitted"),
        (plan(admits=(admit("z"), admit("z"))), "admitted twice"),
        (plan(admits=(admit("a"),)), "admitted twice"),
        (plan(admits=(admit("x"), admit("y"), admit("z"))), "max_rows"),
        (plan(row(context=6, query=2), row(context=8, query=2)), "two rows"),
        (plan(row(context=6, query=0)), "computes no token"),
        (plan(row(context=6, query=5)), "not known"),
        (plan(row(context=5, query=1)), "unlike what was computed"),
        (plan(row(context=7, query=1)), "unlike what was computed"),
        (plan(row(context=6, query=3, samples=True)), "before its last token"),
        (plan(row(context=6, query=1, new_blocks=(0,))), "block 0"),
        (plan(row(context=6, query=1, new_blocks=(32,))), "block 32"),
        (plan(row(context=6, query=1, new_blocks=(-1,))), "block -1"),
        (plan(row(context=6, query=1, new_blocks=(1, 2, 4, 5))), "more than max_model_len"),
        (plan(row("b", query=12), row("c", query=12), admits=(admit("b", 12), admit("c", 12))), "max_step_tokens"),
        (plan(row("b", query=9), admits=(admit("b", 9, (1, 2)),)), "last block"),
        (plan(admits=(admit("b", 21),)), "max_model_len"),
        (plan(admits=(admit("b", 0),)), "0 tokens"),
        (plan(admits=(admit("b", 5, num_prompt=6),)), "6 of them prompt"),
        (plan(admits=(admit("b", 5, num_computed=5),)), "5 of 5 tokens computed"),
        (plan(admits=(admit("b", 5, num_computed=-1),)), "-1 of 5 tokens computed"),
        (plan(admits=(admit("b", 12, (1,), num_computed=8),)), "more KV"),
        (plan(admits=(admit("b", 5, first_token=995),)), "outside the vocabulary"),
        (plan(admits=(admit("b", 5, first_token=-1),)), "outside the vocabulary"),
    ],
)
def test_a_broken_contract_is_told(broken: StepPlan, message: str):
    builder = BatchBuilder(CAPACITY, vocab_size=999)
    builder.apply(plan(row(query=6), admits=(admit(),)))
    with pytest.raises(ValueError, match=message):
        builder.apply(replace(broken, step_id=1))


def test_a_row_ends_with_the_token_after_max_model_len():
    builder = BatchBuilder(CAPACITY)
    blocks = (1, 2, 3, 4, 5, 6)
    for start in (0, 16):
        end = min(start + 16, 20)
        admits = (admit(num_tokens=20, block_ids=blocks),) if start == 0 else ()
        batch = builder.apply(plan(row(context=start, query=end - start, samples=end == 20), admits=admits))
    append(builder, batch, 1)
    with pytest.raises(ValueError, match="longer than max_model_len"):
        builder.apply(plan(row(context=20, query=1, samples=True)))


def test_as_many_tokens_are_appended_as_were_sampled():
    builder = BatchBuilder(CAPACITY)
    batch = builder.apply(plan(row(query=10, samples=True), admits=(admit(),)))
    with pytest.raises(ValueError, match="2 sampled tokens for 1"):
        append(builder, batch, 1, 2)


@given(data=st.data())
def test_arrays_equal_a_token_by_token_oracle(data: st.DataObject):
    builder = BatchBuilder(CAPACITY)
    tokens: dict[str, list[int]] = {}
    blocks: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    for step in range(data.draw(st.integers(1, 8))):
        releases = tuple(r for r in list(tokens) if data.draw(st.booleans()) and data.draw(st.booleans()))
        for request_id in releases:
            del tokens[request_id], blocks[request_id], computed[request_id]
        admits = []
        while len(tokens) < CAPACITY.max_rows and data.draw(st.booleans()):
            new = AdmitRow(
                request_id=f"{step}-{len(tokens)}",
                token_ids=tuple(data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=12))),
                num_prompt_tokens=1,
                block_ids=tuple(data.draw(st.lists(st.integers(1, 31), max_size=3))),
                num_computed_tokens=0,
                sampling=SAMPLING,
            )
            admits.append(new)
            tokens[new.request_id] = list(new.token_ids)
            blocks[new.request_id] = list(new.block_ids)
            computed[new.request_id] = 0
        rows, expected, samplers = [], [], []
        for request_id in tokens:
            left = len(tokens[request_id]) - computed[request_id]
            budget = CAPACITY.max_step_tokens - sum(r.query_len for r in rows)
            if left == 0 or budget == 0 or len(tokens[request_id]) == CAPACITY.max_model_len:
                continue
            query = data.draw(st.integers(1, min(left, budget)))
            seq_len = computed[request_id] + query
            missing = -(-seq_len // CAPACITY.block_size) - len(blocks[request_id])
            new_blocks = tuple(data.draw(st.integers(1, 31)) for _ in range(missing))
            blocks[request_id] += new_blocks
            rows.append(RowPlan(request_id, computed[request_id], query, new_blocks, query == left))
            for position in range(computed[request_id], seq_len):
                slot = blocks[request_id][position // 4] * 4 + position % 4
                expected.append((tokens[request_id][position], position, slot))
            computed[request_id] = seq_len
            if query == left:
                samplers.append(request_id)
        batch = builder.apply(StepPlan(step, 0, tuple(admits), tuple(rows), releases))
        assert list(zip(batch.token_ids, batch.positions, batch.slot_mapping, strict=True)) == expected
        assert [batch.request_ids[i] for i in batch.sample_rows] == samplers
        sampled = [data.draw(st.integers(0, 999)) for _ in samplers]
        append(builder, batch, *sampled)
        for request_id, token_id in zip(samplers, sampled, strict=True):
            tokens[request_id].append(token_id)


def test_a_backend_that_computes_no_adapters_refuses_a_row_with_one():
    with_adapter = plan(row(), admits=(replace(admit(), adapter=7),))
    with pytest.raises(ValueError, match="'a' has adapter 7"):
        BatchBuilder(CAPACITY).apply(with_adapter)
    builder = BatchBuilder(CAPACITY, placed={7})
    builder.apply(with_adapter)
    assert builder.adapters[builder.slot("a")] == 7
