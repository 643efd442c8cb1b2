"""Measures at startup how much GPU memory the largest steps need, because libraries and devices differ."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from penstock.engine.ports import Executor
from penstock.types.errors import ExecutorFailure
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan
from penstock.types.sampling import MAX_LOGPROBS, SamplingParams

COSTLY = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=MAX_LOGPROBS,
    logit_bias=((0, 0.5),),
    allowed_token_ids=(0, 1),
    banned_token_sequences=((0, 1),),
    min_tokens=1,
    stop_token_ids=(1,),
)
"""Sampling parameters that need the most memory."""
FOLLOWING = replace(COSTLY, allowed_token_ids=None, follows_grammar=True)
"""Like `COSTLY`, but restricted by a grammar's mask instead of a list of tokens."""

SMALL_BATCHES = (1, 32, 64)
"""Numbers of rows for small steps: one for each size of quantised product (up to 16, 32 and 128 rows)."""
SHORT_CHUNK = 16
SAMPLED_GRAPHS = 4
"""Graphs to capture for a measurement."""
GRANULE_BYTES = 2 << 20
"""The driver allocates in this unit, so a measurement may be too small by as much."""


@dataclass(frozen=True, slots=True)
class Usage:
    total_bytes: int
    free_bytes: int
    """Free memory before anything was loaded."""
    used_bytes: int
    """Weights, the largest steps and all graphs, without KV."""


class Memory(Protocol):
    def read(self) -> tuple[int, int]:
        """Return (free, total) bytes of GPU memory after all queued work."""
        ...


class GpuMemory:
    """Reads the memory of PyTorch's current GPU. PyTorch's cached memory counts as used."""

    def read(self) -> tuple[int, int]:
        import torch

        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return int(free_bytes), int(total_bytes)


class Captured(Protocol):
    @property
    def num_captured(self) -> int: ...


class GraphExecutor(Executor, Protocol):
    @property
    def mask_bytes(self) -> int: ...

    @property
    def num_graphs_left(self) -> int: ...

    def capture_graphs(self, most: int | None = None) -> Captured:
        """Capture CUDA graphs of the usual decodes, at most `most`, largest first."""
        ...


_Executor = TypeVar("_Executor", bound=GraphExecutor)


def no_blocks(block_bytes: int) -> int:
    del block_bytes
    return 0


def profile(
    make: Callable[[int], _Executor],
    capacity: Capacity,
    memory: Memory,
    *,
    num_moved_blocks: Callable[[int], int] = no_blocks,
) -> tuple[_Executor, Usage]:
    """Make an executor with a small KV cache, run the steps that need the most memory, and return executor and memory usage.

    `make` takes a number of blocks. `num_moved_blocks` takes the bytes of a block and returns how many blocks may move between
    GPU and host at once. Raises MemoryError.
    """
    lens = row_lens(capacity)
    num_blocks = 1 + sum(_num_blocks(length, capacity) for length in lens)
    free_bytes, total_bytes = memory.read()
    try:
        executor = make(num_blocks)
        try:
            # As in service, steps run in one thread and captures in another. PyTorch allocates a cuBLAS workspace for each
            # (32 MiB on an H200). When a thread ends, another one can reuse its workspace.
            with ThreadPoolExecutor(1, "penstock-profile") as engine:
                engine.submit(run_largest_steps, executor, lens).result()
                run_small_steps(executor, lens[0])
                move_blocks(executor, num_moved_blocks(executor.block_bytes))
                graph_bytes = graphs_left_bytes(executor, memory)
        except BaseException:
            executor.close()
            raise
    except (RuntimeError, ExecutorFailure) as error:  # torch.OutOfMemoryError is a RuntimeError; ExecutorFailure wraps it
        if "out of memory" not in str(error):
            raise
        raise MemoryError(str(error)) from error
    used_bytes = free_bytes - memory.read()[0] - num_blocks * executor.block_bytes + graph_bytes
    return executor, Usage(total_bytes, free_bytes, max(0, used_bytes))


def graphs_left_bytes(executor: GraphExecutor, memory: Memory) -> int:
    """Capture a few of the largest CUDA graphs, and estimate from their mean how many bytes the remaining graphs take.

    Call it after `run_largest_steps`, so that memory which the graphs share is already allocated.
    """
    if not executor.num_graphs_left:
        return 0
    free_bytes = memory.read()[0]
    count = executor.capture_graphs(SAMPLED_GRAPHS).num_captured
    if not count:
        return 0
    taken_bytes = max(0, free_bytes - memory.read()[0]) + GRANULE_BYTES
    return -(-taken_bytes * executor.num_graphs_left // count)


def row_lens(capacity: Capacity) -> list[int]:
    """Return prompt lengths that together fill the largest step, longest first."""
    num_rows = min(capacity.max_rows, capacity.max_step_tokens)
    num_sampled = 0 if capacity.is_one_pass else 2
    longest = max(1, capacity.max_model_len - num_sampled)
    left = min(capacity.max_step_tokens, num_rows * longest) - num_rows
    lens = []
    for _ in range(num_rows):
        more = min(left, longest - 1)
        lens.append(1 + more)
        left -= more
    return lens


def run_largest_steps(executor: Executor, lens: list[int]) -> None:
    """Run prompts of these lengths in one step, then a decode of all (not for encoders), and release them."""
    capacity = executor.capacity
    admits, rows, next_block = [], [], 1
    for idx, length in enumerate(lens):
        count = _num_blocks(length, capacity)
        blocks = tuple(range(next_block, next_block + count))
        next_block += count
        admits.append(AdmitRow(f"profile-{idx}", tuple(token % 2 for token in range(length)), length, blocks, 0, COSTLY))
        rows.append(RowPlan(f"profile-{idx}", 0, length, (), 1))
    names = tuple(row.request_id for row in rows)
    decodes = tuple(RowPlan(name, length, 1, (), 1) for name, length in zip(names, lens, strict=True))
    for plan in (
        StepPlan(0, 0, tuple(admits), tuple(rows), ()),
        StepPlan(1, 0, (), () if capacity.is_one_pass else decodes, ()),
        StepPlan(2, 0, (), (), names),
    ):
        executor.collect(executor.submit(plan))


def run_small_steps(executor: GraphExecutor, longest: int) -> None:
    """Run the end of a long prompt and steps of few requests, to compile their kernels.

    Call it after `run_largest_steps`, which left KV of `longest` tokens in the first blocks.
    """
    capacity = executor.capacity
    tokens = tuple(token % 2 for token in range(longest))
    num_computed = max(0, longest - SHORT_CHUNK)
    blocks = tuple(range(1, 1 + _num_blocks(longest, capacity)))
    chunk = AdmitRow("profile-chunk", tokens, longest, blocks, num_computed, FOLLOWING)
    steps = [] if capacity.is_one_pass else [[(chunk, longest - num_computed)]]
    for count in sorted({min(count, capacity.max_rows, capacity.max_step_tokens) for count in SMALL_BATCHES}):
        kinds = [FOLLOWING if i % 2 and not capacity.is_one_pass else COSTLY for i in range(count)]
        steps.append([(AdmitRow(f"profile-{count}-{i}", (0,), 1, (1 + i,), 0, kinds[i]), 1) for i in range(count)])
    released: tuple[str, ...] = ()
    for step_id, admits in enumerate([*steps, []], start=3):
        rows = tuple(RowPlan(row.request_id, row.num_computed_tokens, length, (), 1) for row, length in admits)
        plan = StepPlan(step_id, 0, tuple(row for row, _ in admits), rows, released)
        ticket = executor.submit(plan)
        mask = b"\xff" * executor.mask_bytes
        if masks := {row.request_id: mask for row, _ in admits if row.sampling.follows_grammar}:
            executor.restrict(ticket, masks)
        executor.collect(ticket)
        released = tuple(row.request_id for row in rows)


def move_blocks(executor: Executor, count: int) -> None:
    """Copy `count` KV blocks to the host and back at once, which takes temporary GPU memory."""
    if not count:
        return
    block_ids = [1 + idx % (executor.capacity.num_blocks - 1) for idx in range(count)]  # repeats ids if the pool is small
    contents = [memoryview(bytearray(executor.block_bytes)) for _ in block_ids]
    ready = executor.read_blocks(block_ids, contents)
    if ready is not None:
        ready()
    executor.write_blocks(block_ids, contents)


def _num_blocks(length: int, capacity: Capacity) -> int:
    return 1 if capacity.is_one_pass else -(-(length + 1) // capacity.block_size)
