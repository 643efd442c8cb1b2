"""The interfaces that the engine needs and other packages implement (executor, block store, detokenizer, observers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.types.adapter import PackedAdapter
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult, TokenLogprobs
from penstock.types.stats import PlanNews, RequestStats, StepStats

Ready = Callable[[], None]
"""Waits until a copy is complete, or raises its error. Any thread may call it, more than once."""


class BlockMover(Protocol):
    """Copies the content of an executor's blocks to the host's memory and back. Raises `ExecutorFailure`.

    These copies and those of `Executor.copy_blocks` take effect in the order of the calls, before steps submitted later. No
    step in flight may use the blocks.
    """

    @property
    def block_bytes(self) -> int: ...

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready | None:
        """Copy the content of full blocks, each to its own writable `out` of `block_bytes`.

        Returns None if the copy is complete, else a function that waits for it. Executors of the same model, weights, kernels
        and KV type have the same format.
        """
        ...

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Write contents that `read_blocks` returned into blocks that no request holds."""
        ...

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if it is placed. The next step releases rows that use it."""
        ...


class BlockMemory(Protocol):
    """An executor's blocks, which any thread may read and fill while steps run. No step may use a block while it is filled.

    Executors that support this have an attribute `block_memory`. Contents have the format of `BlockMover`.
    """

    @property
    def block_bytes(self) -> int: ...

    @property
    def fd(self) -> int | None:
        """An open file with all blocks, block 0 first, which other processes of this user can read, or None."""
        ...

    def content(self, block_id: int) -> memoryview: ...

    def target(self, block_id: int) -> memoryview:
        """Return where to write a block's content. `fill` follows."""
        ...

    def fill(self, block_id: int) -> None: ...


class Executor(BlockMover, Protocol):
    """Computes steps. Called by one thread at a time; steps are collected in the order they were submitted.

    With a depth of 2 the next step is submitted while one is in flight, that is, submitted and not collected:

        - A row may continue from a token that the step in flight samples. The plan lacks that token, the executor has it.
        - A row of the step in flight may fail, or its request may end: its row in the next step is computed and ignored.
        - A block is not reallocated, copied, read or filled while a row of a step in flight uses it.
    """

    @property
    def depth(self) -> int: ...

    @property
    def capacity(self) -> Capacity: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks, given as (source, destination), in order, before the next submitted step."""
        ...

    @property
    def max_adapter_rank(self) -> int:
        """Greatest rank of an adapter. 0: requests with an adapter are refused."""
        ...

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        """Copy an adapter into blocks, one for each page. Nothing else may use these blocks until the adapter is dropped.

        Rows admitted from now on may name it. Raises `ExecutorFailure`, and ValueError if it is placed already.
        """
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step: release ended requests, admit new ones, then compute the rows, in any order.

        Raises `ExecutorFailure` if the device failed, and AssertionError or ValueError for a plan that breaks the contract
        (unknown request, more rows than capacity, a token outside the vocabulary).
        """
        ...

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        """Set the tokens that rows with a grammar may sample in a step: request id -> mask (`types.sampling`).

        Called once for each step with such a row, after its `submit`, and before it is collected and the next one is
        submitted. Rows that are not named are not restricted.

        Raises `ExecutorFailure`. Raises ValueError if the step waits for no masks, a named row does not sample or has no
        grammar, or a mask has the wrong size.
        """
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step without the GIL, and return its result. Raises `ExecutorFailure`."""
        ...

    def close(self) -> None:
        """Free threads and memory. Idempotent. Steps still in flight after a failure are lost."""
        ...


class BlockStore(Protocol):
    """Storage for contents of KV blocks outside the executor, in numbered slots. For one thread at a time. Raises `OSError`."""

    @property
    def num_slots(self) -> int: ...

    @property
    def outlives_process(self) -> bool:
        """True if the contents stay for the server's next process."""
        ...

    def entries(self) -> Sequence[tuple[int, bytes]]:
        """Return (slot, hash) of contents from an earlier process, the oldest first."""
        ...

    def expect_newest_first(self) -> None:
        """Take the content of each later write as older than that of the write before."""
        ...

    def write(self, slot: int, block_hash: bytes, content: memoryview) -> None:
        """Write content into a slot under its hash. The old content is lost, even if this fails."""
        ...

    def read(self, slot: int, block_hash: bytes, out: memoryview) -> None:
        """Copy a slot's content. Raises `CorruptBlock` if it is not exactly what was written under this hash."""
        ...

    def emptied(self) -> BlockStore:
        """Return a new, empty store with the same memory, and close this one."""
        ...

    def close(self) -> None: ...


class Detokenizer(Protocol):
    """Turns one request's output tokens into text, as they come. Never emits part of a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete. Incomplete UTF-8 is held back."""
        ...

    def flush(self) -> str:
        """Return the text that is still held, with incomplete bytes replaced by U+FFFD."""
        ...


DetokenizerFactory = Callable[[tuple[int, ...] | None], Detokenizer]
"""Makes a detokenizer for `SamplingParams.shown_special_ids`."""


@dataclass(slots=True)
class OutputChunk:
    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    at_ns: int
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    """Tokens generated so far, this chunk included."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    detail: str = ""
    reject_reason: str = ""
    """Why the request ended, as in `TokenEvent`. Also set if the engine failed or was closed."""
    first_scheduled_ns: int | None = None
    """Set on the first chunk and the finish chunk."""
    first_token_ns: int | None = None
    states: bytes = b""
    """The answer to a text, as in `StepResult.states`."""


OutputSink = Callable[[list[OutputChunk]], None]
"""Takes chunks. Called by the engine thread or, after its end, by a thread that submits a request. Must not block."""


class Observer(Protocol):
    def on_step(self, stats: StepStats) -> None: ...

    def on_finish(self, stats: RequestStats) -> None: ...


class RequestJournal(Observer, Protocol):
    """Records what happens to each request. A step is reported before the requests that ended in it."""

    def on_queued(self, request: Request, now_ns: int) -> None: ...

    def on_news(self, news: PlanNews) -> None:
        """Record admissions, preemptions, requests set aside, and a new reason why the queue waits."""
        ...


class TokenObserver(Protocol):
    def on_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None:
        """Record a step's tokens: the requests with their first token, and for every other request the time since its last
        token."""
        ...

    def on_itl(self, num_gaps: int, num_late: int) -> None:
        """Record the end of a request with a target for inter-token latency: how many gaps it had, and how many exceeded the
        target."""
        ...


class TurnObserver(Protocol):
    def on_turn(self, parts_ns: Mapping[str, int]) -> None:
        """Record the time of a step outside the executor, by part: those of `HOST_PARTS` that it had."""
        ...


class ObserverGroup:
    """Several observers in place of one: passes each report to all of them, in order."""

    def __init__(self, observers: Sequence[Any]) -> None:
        self._observers = tuple(observers)

    def on_step(self, stats: StepStats) -> None:
        for observer in self._observers:
            observer.on_step(stats)

    def on_finish(self, stats: RequestStats) -> None:
        for observer in self._observers:
            observer.on_finish(stats)

    def on_queued(self, request: Request, now_ns: int) -> None:
        for observer in self._observers:
            observer.on_queued(request, now_ns)

    def on_news(self, news: PlanNews) -> None:
        for observer in self._observers:
            observer.on_news(news)

    def on_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None:
        for observer in self._observers:
            observer.on_tokens(first, gaps_ns)

    def on_itl(self, num_gaps: int, num_late: int) -> None:
        for observer in self._observers:
            observer.on_itl(num_gaps, num_late)

    def on_turn(self, parts_ns: Mapping[str, int]) -> None:
        for observer in self._observers:
            observer.on_turn(parts_ns)


class NullObserver:
    def on_step(self, stats: StepStats) -> None: ...

    def on_finish(self, stats: RequestStats) -> None: ...

    def on_queued(self, request: Request, now_ns: int) -> None: ...

    def on_news(self, news: PlanNews) -> None: ...

    def on_tokens(self, first: Sequence[Request], gaps_ns: Sequence[int]) -> None: ...

    def on_itl(self, num_gaps: int, num_late: int) -> None: ...

    def on_turn(self, parts_ns: Mapping[str, int]) -> None: ...
