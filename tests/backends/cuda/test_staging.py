"""Messages to the device and back: every array whole, in one piece of memory, where a captured step finds it again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.backends.batch import BatchBuilder
from penstock.backends.cuda.sample_plan import make_changes, make_plan
from penstock.backends.cuda.staging import Download, Upload, mask_message_words, message_words, step_arrays
from penstock.backends.cuda.stream import HostStream, Stream, open_stream
from penstock.backends.cuda.tables import RowTables, num_mask_words
from penstock.types.errors import ConfigError
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.interpreted import DEVICE

CAPACITY = Capacity(num_blocks=9, block_size=4, max_rows=4, max_step_tokens=16, max_model_len=12)


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture
def stream(device: torch.device) -> Stream:
    return open_stream(device, spins=True)


def arrays(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(-(2**40), 2**40, 3),
        rng.integers(-9, 9, (3, 1)).astype(np.int32),
        np.empty(0, np.int32),
        rng.normal(size=5).astype(np.float32),
        np.empty((2, 0), np.int32),
        rng.normal(size=(2, 2)),
    ]


@pytest.mark.parametrize("num_words", [400, 30, 12, 0])
def test_every_array_arrives_whatever_has_room(num_words: int, stream: Stream, device: torch.device) -> None:
    upload = Upload(num_words, depth=2, stream=stream, device=device)
    with stream.entered():
        for seed in range(3):
            sent = arrays(seed)
            found = upload.send(sent)
            stream.mark().wait()
            for tensor, array in zip(found, sent, strict=True):
                assert tensor.device.type == device.type
                assert tensor.cpu().numpy().dtype == array.dtype
                np.testing.assert_array_equal(tensor.cpu().numpy(), array)


class Pinning(HostStream):
    """Remembers what memory the device could read by itself."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def pinned(self, num_words: int) -> torch.Tensor:
        self.made.append(super().pinned(num_words))
        return self.made[-1]


def test_what_has_no_room_is_not_waited_for_either() -> None:
    """A copy from other memory holds the host up until the step in flight has ended."""
    pinning = Pinning()
    upload = Upload(8, depth=2, stream=pinning, device=torch.device("cpu"))
    sent = [np.arange(6, dtype=np.int32), np.arange(40, dtype=np.int64), np.arange(30, dtype=np.int32)]
    found = upload.send(sent)
    assert [tensor.tolist() for tensor in found] == [array.tolist() for array in sent]
    assert {tensor.data_ptr() for tensor in found[1:]} == {tensor.data_ptr() for tensor in pinning.made[2:]}


def test_the_first_arrays_lie_where_they_lay_whatever_follows(stream: Stream, device: torch.device) -> None:
    upload = Upload(200, depth=2, stream=stream, device=device)
    first, second = arrays(1)[:2], arrays(2)[:2]
    with stream.entered():
        before = [tensor.data_ptr() for tensor in upload.send(first)]
        after = [tensor.data_ptr() for tensor in upload.send([*second, *arrays(3)])]
    assert after[:2] == before


def test_results_of_two_steps_do_not_share_memory(stream: Stream, device: torch.device) -> None:
    download = Download(torch.zeros(8, dtype=torch.int32, device=device), depth=2, stream=stream)
    with stream.entered():
        found = []
        for value in (5, 6):
            download.words[:3] = value
            found.append(download.fetch(3))
        stream.mark().wait()
    assert [words.tolist() for words in found] == [[5] * 3, [6] * 3]


def test_tables_that_cannot_be_addressed_are_an_error_of_the_settings(device: torch.device) -> None:
    capacity = replace(CAPACITY, max_rows=4096, max_model_len=1_000_000)
    with pytest.raises(ConfigError, match=r"4096 rows of 1000000 tokens.* Lower --max-model-len or --max-num-seqs"):
        RowTables(capacity, vocab_size=50, device=device)


def test_a_padded_step_writes_to_the_null_block_alone(device: torch.device) -> None:
    """Two rows in a graph for four: what stands for the others is a row of one token in the null block, from the null slot."""
    batches = BatchBuilder(CAPACITY, vocab_size=50)
    tables = RowTables(CAPACITY, vocab_size=50, device=device)
    admits = tuple(AdmitRow(name, (7, 8, 9), 3, (block,), 2, SamplingParams()) for name, block in (("a", 3), ("b", 5)))
    batch = batches.apply(StepPlan(0, 0, admits, tuple(RowPlan(name, 2, 1, (), True) for name in "ab"), ()))
    slot_mapping, sources, positions, row_of_token, starts, contexts, slots, samples = step_arrays(batch, tables, num_rows=4)
    assert slot_mapping.tolist() == [3 * 4 + 2, 5 * 4 + 2, 0, 0]
    assert slots.tolist() == [*batch.row_slots.tolist(), tables.null_slot, tables.null_slot]
    assert [source // tables.table_width for source in sources.tolist()] == slots.tolist()
    assert [source % tables.table_width for source in sources.tolist()] == positions.tolist() == [2, 2, 0, 0]
    assert (row_of_token.tolist(), samples.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert (starts.tolist(), contexts.tolist()) == ([0, 1, 2, 3, 4], [2, 2, 0, 0])
    assert tables.tokens[tables.null_slot].tolist() == [0] * tables.table_width


def test_a_message_has_room_for_the_largest_step_and_its_rows(stream: Stream, device: torch.device) -> None:
    """So the arrays of the step itself are never sent by a copy of their own, which would have another address."""
    batches = BatchBuilder(CAPACITY, vocab_size=50)
    tables = RowTables(CAPACITY, vocab_size=50, device=device)
    admits = tuple(AdmitRow(f"r{i}", (7,) * 4, 4, (1 + i,), 0, SamplingParams()) for i in range(4))
    batch = batches.apply(StepPlan(0, 0, admits, tuple(RowPlan(f"r{i}", 0, 4, (), True) for i in range(4)), ()))
    upload = Upload(message_words(CAPACITY), depth=1, stream=stream, device=device)
    with stream.entered():
        sent = upload.send(step_arrays(batch, tables, num_rows=4))
    end = sent[0].data_ptr() + 4 * message_words(CAPACITY)
    assert all(sent[0].data_ptr() <= tensor.data_ptr() < end for tensor in sent)


def test_a_message_has_room_for_the_masks_of_all_rows_and_what_else_sampling_needs(
    stream: Stream, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size, rows = 5001, range(CAPACITY.max_rows)
    params = SamplingParams(
        repetition_penalty=1.1,
        logprobs=5,
        min_tokens=3,
        stop_token_ids=(1, 2, 3),
        logit_bias=((1, 1.0), (2, 1.0)),
        banned_token_sequences=((1, 2, 3), (4,)),
        follows_grammar=True,
    )
    changes = make_changes(params, 1)
    assert changes is not None
    plan = make_plan(
        np.array(rows, np.int32),
        np.ones(len(rows), np.int32),
        changes=dict.fromkeys(rows, changes),
        num_tops=dict.fromkeys(rows, 5),
        listed=(),
        followers=rows,
    )
    masks = [np.random.default_rng(row).bytes(4 * num_mask_words(vocab_size)) for row in rows]
    plan = plan.masked_by(dict(zip(rows, masks, strict=True)))
    monkeypatch.setattr(Upload, "_sent_alone", None)
    upload = Upload(mask_message_words(CAPACITY, vocab_size), depth=2, stream=stream, device=device)
    with stream.entered():
        sent = dict(zip(plan.arrays(), upload.send(list(plan.arrays().values())), strict=True))
        stream.mark().wait()
    assert [line.tobytes() for line in sent["masks"].cpu().numpy()] == masks
    assert sent["bias_values"].tolist() == [1.0] * 2 * len(rows)
