"""The profile run: its steps are as large as any may be, and it finds what was used. Needs neither PyTorch nor a GPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.cuda.memory import (
    GRANULE_BYTES,
    SAMPLED_GRAPHS,
    Usage,
    profile,
    row_lens,
    run_largest_steps,
    run_small_steps,
)
from penstock.engine.ports import Ready
from penstock.testing import HashExecutor
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.sampling import SamplingParams

TOTAL_BYTES = 1_000_000
ASKABLE = {
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "logit_bias"),
    *("banned_token_sequences", "min_tokens", "stop_token_ids"),
}
"""Settings of the sampler, in `SamplingParams`."""
CAPACITY = Capacity(num_blocks=2, block_size=16, max_rows=8, max_step_tokens=100, max_model_len=64)


class Noted(HashExecutor):
    """Remembers what it was asked to do."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self.plans: list[StepPlan] = []
        self.threads: list[threading.Thread] = []
        """Thread of each step."""
        self.restricted: list[tuple[int, set[str]]] = []
        """Steps, and whose masks they were given."""
        self.moved: list[tuple[str, list[int]]] = []
        self.num_closed = 0
        self.num_graphs_left = 0
        self.mask_bytes = -(-self.model.vocab_size // 32) * 4

    def capture_graphs(self, most: int | None = None) -> CaptureRun:
        assert most is not None
        self.num_graphs_left -= most
        return CaptureRun(most)

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        self.threads.append(threading.current_thread())
        assert self.threads[0].is_alive()
        return super().submit(plan)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        self.restricted.append((ticket.step_id, set(masks)))
        super().restrict(ticket, masks)

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready:
        assert {len(each) for each in out} == {self.block_bytes}
        self.moved.append(("read", list(block_ids)))
        return lambda: self.moved.append(("waited", []))

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        assert len(contents) == len(block_ids)
        self.moved.append(("written", list(block_ids)))

    def close(self) -> None:
        self.num_closed += 1
        super().close()


@dataclass(frozen=True, slots=True)
class CaptureRun:
    num_captured: int


class FakeMemory:
    """Memory of a device where loading and running took what is said, in all by each time that somebody asks."""

    def __init__(self, *used_bytes: int) -> None:
        self._free = iter([TOTAL_BYTES, *(TOTAL_BYTES - used for used in used_bytes)])

    def read(self) -> tuple[int, int]:
        return next(self._free), 1_200_000


def make(num_blocks: int) -> Noted:
    return Noted(replace(CAPACITY, num_blocks=num_blocks))


def test_steps_are_as_large_as_any_may_be() -> None:
    executor, _ = profile(make, CAPACITY, FakeMemory(0))
    first, second, last = executor.plans[:3]
    assert (first.num_tokens, len(first.rows), all(row.samples for row in first.rows)) == (100, 8, True)
    assert max(row.query_len for row in first.rows) == 62, "a request of 64 tokens, two of which it samples"
    assert [row.query_len for row in second.rows] == [1] * 8
    assert (len(last.rows), len(last.releases)) == (0, 8)
    assert not executor.num_closed


def test_kernels_of_small_steps_are_compiled_before_anybody_waits() -> None:
    executor, _ = profile(make, CAPACITY, FakeMemory(0))
    chunk, *decodes, last = executor.plans[3:]
    assert [(row.context_len, row.query_len) for row in chunk.rows] == [(46, 16)]
    assert [[row.query_len for row in plan.rows] for plan in decodes] == [[1], [1] * 8]
    assert (len(last.rows), len(last.releases)) == (0, 8)
    assert [plan.step_id for plan in executor.plans] == list(range(7))


def test_steps_of_texts_are_as_large_as_any_may_be() -> None:
    """Nobody decodes, and nobody waits for masks."""

    def make_for_texts(num_blocks: int) -> Noted:
        return Noted(replace(texts, num_blocks=num_blocks))

    texts = replace(CAPACITY, block_size=64, is_one_pass=True)
    executor, _ = profile(make_for_texts, texts, FakeMemory(0))
    lengths = [[row.query_len for row in plan.rows] for plan in executor.plans]
    assert lengths == [[64, 30, *[1] * 6], [], [], [1], [1] * 8, []]
    assert not executor.restricted


def test_rows_ask_for_all_that_the_sampler_can_be_asked_for() -> None:
    """In small steps some have masks instead of a list of tokens: a chunk, and of a decode every second row."""
    executor, _ = profile(make, CAPACITY, FakeMemory(0))
    plain = SamplingParams()
    followers = {"profile-chunk", *(f"profile-8-{idx}" for idx in (1, 3, 5, 7))}
    for row in (row for plan in executor.plans for row in plan.admits):
        asked = {name for name in SamplingParams.__slots__ if getattr(row.sampling, name) != getattr(plain, name)}
        assert asked == ASKABLE | {"follows_grammar" if row.request_id in followers else "allowed_token_ids"}
    assert executor.restricted == [(3, {"profile-chunk"}), (5, followers - {"profile-chunk"})]


def test_copies_to_the_tier_below_are_made_as_large_as_any() -> None:
    sizes: list[int] = []

    def num_moved(block_bytes: int) -> int:
        sizes.append(block_bytes)
        return 20

    executor, _ = profile(make, CAPACITY, FakeMemory(0), num_moved_blocks=num_moved)
    assert sizes == [executor.block_bytes]
    num_blocks = executor.capacity.num_blocks
    assert num_blocks < 20
    block_ids = [*range(1, num_blocks), *range(1, 22 - num_blocks)]
    assert executor.moved == [("read", block_ids), ("waited", []), ("written", block_ids)]


def test_nothing_is_copied_without_a_tier() -> None:
    executor, _ = profile(make, CAPACITY, FakeMemory(0))
    assert executor.moved == []


def test_what_each_of_two_threads_takes_is_counted() -> None:
    executor, _ = profile(make, CAPACITY, FakeMemory(0))
    engine, main = executor.threads[0], threading.current_thread()
    assert executor.threads == [engine] * 3 + [main] * 4, "the largest steps, and the small ones while that thread is there"
    assert engine is not main
    assert not engine.is_alive(), "the engine's thread gets what it had"


def test_what_the_cache_took_is_not_counted() -> None:
    num_blocks = 1 + sum(-(-(length + 1) // 16) for length in row_lens(CAPACITY))
    cache_bytes = num_blocks * make(num_blocks).block_bytes
    _, usage = profile(make, CAPACITY, FakeMemory(5000 + cache_bytes))
    assert usage == Usage(total_bytes=1_200_000, free_bytes=1_000_000, used_bytes=5000)


def test_graphs_that_are_yet_to_be_captured_count_as_much_as_a_few_that_were() -> None:
    num_blocks = 1 + sum(-(-(length + 1) // 16) for length in row_lens(CAPACITY))
    cache_bytes = num_blocks * make(num_blocks).block_bytes
    made: list[Noted] = []

    def make_with_graphs(num_blocks: int) -> Noted:
        made.append(make(num_blocks))
        made[0].num_graphs_left = SAMPLED_GRAPHS + 10
        return made[0]

    before, sampled = 5000 + cache_bytes, 4000
    _, usage = profile(make_with_graphs, CAPACITY, FakeMemory(before, before + sampled, before + sampled))
    assert made[0].num_graphs_left == 10
    assert usage.used_bytes == 5000 + sampled + (sampled + GRANULE_BYTES) * 10 // SAMPLED_GRAPHS


@given(rows=st.integers(1, 300), tokens=st.integers(1, 4096), length=st.integers(3, 5000), block_size=st.sampled_from([16, 32]))
def test_no_capacity_is_broken(rows: int, tokens: int, length: int, block_size: int) -> None:
    capacity = Capacity(2, block_size, rows, tokens, length)
    lens = row_lens(capacity)
    assert len(lens) == min(rows, tokens)
    assert sum(lens) == min(tokens, len(lens) * (length - 2))
    assert 1 <= min(lens) <= max(lens) <= length - 2


@pytest.mark.parametrize("capacity", [replace(CAPACITY, max_rows=1), replace(CAPACITY, max_step_tokens=3)])
def test_the_contract_holds_in_small_ones(capacity: Capacity) -> None:
    executor = Noted(replace(capacity, num_blocks=40))  # checks every plan
    run_largest_steps(executor, row_lens(capacity))
    run_small_steps(executor, row_lens(capacity)[0])


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RuntimeError("CUDA out of memory. Tried"), MemoryError), (RuntimeError("launch failed"), RuntimeError)],
)
def test_only_a_lack_of_memory_is_one(error: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Noted] = []

    def fail(self: Noted, plan: StepPlan) -> Ticket:
        made.append(self)
        raise error

    monkeypatch.setattr(Noted, "submit", fail)
    with pytest.raises(expected, match=str(error)):
        profile(make, CAPACITY, FakeMemory(0))
    assert made[0].num_closed == 1
