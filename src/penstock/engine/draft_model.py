"""A draft model, or a draft head, for speculative decoding. It has an executor and KV blocks of its own.

Its steps run in their own thread. If a step fails or hangs, the engine continues without the model's guesses. Called by the
engine's thread.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import exp
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from penstock.clock import Clock
from penstock.engine.ports import Executor
from penstock.sched.drafting import Drafted, Seen
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.request import Request
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams

MOST_UNREAD = 256
"""Most tokens of a request whose features wait for the head. Older ones are dropped: it reads only the end of a long prompt."""
_NUM_WAITS = 10
"""Waits for a step, each a part of its time limit. A pause of the process (SIGSTOP) uses up one of them at most."""
_SAMPLING = SamplingParams(temperature=0.0, logprobs=0)

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    block_ids: list[int] = field(default_factory=list)
    first: int = 0
    """The request's first token that is read. 0 unless a head has no features of the tokens before it."""
    num_read: int = 0
    """The request's tokens before this one have KV in the blocks, from `first` on."""
    tail: list[int] = field(default_factory=list)
    """Guesses with KV after those tokens. The large model may accept some of them."""
    guess: int = -1
    """The newest guess, which has no KV yet."""
    hidden: NDArray[np.float32] | None = None
    """The state from which a head made the guess. None for a model."""


class DraftModel:
    """See `sched.drafting.Drafter`. If blocks run out, the KV of the least recently drafted request is dropped."""

    def __init__(self, executor: Executor, clock: Clock, *, vocab_size: int, timeout_s: float | None) -> None:
        """`vocab_size`: tokens that both models have. `timeout_s`: a step that takes longer, turns of other models included,
        counts as hung. None: no limit.
        """
        self._executor, self._capacity = executor, executor.capacity
        self._clock, self._timeout_s, self._vocab_size = clock, timeout_s, vocab_size
        self._free = list(range(self._capacity.num_blocks - 1, 0, -1))
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        """Least recently drafted first."""
        self._num_in_use = 0
        """Number of rows in the last `read`, which are the last ones of `_rows` and are not evicted."""
        self._known: set[str] = set()
        """Requests that the executor knows."""
        self._num_steps = 0
        self._is_on = True
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | Exception] = SimpleQueue()
        self._thread = threading.Thread(target=self._compute, name="penstock-draft", daemon=True)
        self._thread.start()

    def see(self, seen: Sequence[Seen], features: bytes | memoryview) -> None:
        del seen, features

    def num_behind(self, request: Request) -> int:
        if not self._is_on or request.num_tokens >= self._capacity.max_model_len:
            return 0
        row = self._rows.get(request.request_id)
        return request.num_tokens - (0 if row is None else self._settle(row, request))

    def read(self, chunks: Sequence[tuple[Request, int]]) -> Drafted:
        began_ns, self._num_in_use = self._clock.now_ns(), len(chunks)
        for request, _ in chunks:
            self._rows.setdefault(request.request_id, _Row())
            self._rows.move_to_end(request.request_id)
        admits: list[AdmitRow] = []
        plans: list[RowPlan] = []
        features: list[NDArray[np.float32]] = []
        room = self._capacity.max_step_tokens
        for request, num_tokens in chunks:
            row = self._rows[request.request_id]
            begin = self._settle(row, request)
            end = begin + min(num_tokens, room)
            token_ids = (*request.prompt_token_ids, *request.output_token_ids)
            is_known = begin < end and max(token_ids[begin:]) < self._vocab_size
            first = row.first
            if not is_known or not self._has_blocks(row, end - first):
                continue
            row.num_read, room = end, room - (end - begin)
            num_prompt, block_ids = max(1, request.num_prompt_tokens - first), tuple(row.block_ids)
            admits.append(AdmitRow(request.request_id, token_ids[first:], num_prompt, block_ids, begin - first, _SAMPLING))
            plans.append(RowPlan(request.request_id, begin - first, end - begin, (), samples=int(end == request.num_tokens)))
            features += self._features(request, begin, end)
        return self._step(began_ns, admits, plans, features)

    def go_on(self, requests: Sequence[Request]) -> Drafted:
        began_ns = self._clock.now_ns()
        plans: list[RowPlan] = []
        features: list[NDArray[np.float32]] = []
        for request in requests:
            row = self._rows[request.request_id]
            num_read, num_blocks = row.num_read - row.first + len(row.tail), len(row.block_ids)
            if num_read + 1 < self._capacity.max_model_len and self._has_blocks(row, num_read + 1):
                row.tail.append(row.guess)
                plans.append(RowPlan(request.request_id, num_read, 1, tuple(row.block_ids[num_blocks:]), 1))
                if row.hidden is not None:
                    features.append(row.hidden)
        return self._step(began_ns, [], plans, features)

    def ended(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free += row.block_ids

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> bool:
        """End the thread and close the executor. Return False, and leave both, if a step is still running."""
        self._is_on = False
        self._plans.put(None)
        self._thread.join(1.0)
        if self.is_alive:
            return False
        self._executor.close()
        return True

    def _settle(self, row: _Row, request: Request) -> int:
        """Count the guesses that became the request's tokens as read, and forget the others. Return how many tokens are read,
        at most all but the last."""
        if row.tail:
            new = request.output_token_ids[row.num_read - request.num_prompt_tokens :]
            is_right = [token_id == other for token_id, other in zip(row.tail, new, strict=False)]
            row.num_read += [*is_right, False].index(False)
            row.tail = []
        row.num_read = min(row.num_read, request.num_tokens - 1)
        return row.num_read

    def _features(self, request: Request, begin: int, end: int) -> Sequence[NDArray[np.float32]]:
        """Return what the executor is given beside the tokens from `begin` to `end`."""
        del request, begin, end
        return ()

    def _keep(self, features: bytes | memoryview, plans: Sequence[RowPlan]) -> None:
        """Note what the executor kept of the rows that sampled."""

    def _has_blocks(self, row: _Row, num_tokens: int) -> bool:
        """Allocate blocks for a row's first `num_tokens` tokens. If needed, evict rows that the last `read` did not use."""
        num_missing = -(-num_tokens // self._capacity.block_size) - len(row.block_ids)
        while len(self._rows) > self._num_in_use:
            if num_missing <= len(self._free) and len(self._rows) <= self._capacity.max_rows:
                break
            self._free += self._rows.popitem(last=False)[1].block_ids
        if num_missing > len(self._free):
            return False
        row.block_ids += [self._free.pop() for _ in range(num_missing)]
        return True

    def _step(
        self, began_ns: int, admits: Sequence[AdmitRow], rows: Sequence[RowPlan], features: Sequence[NDArray[np.float32]]
    ) -> Drafted:
        """Compute a step. The executor first releases rows that were dropped or are admitted again."""
        if not rows or not self._is_on:
            return Drafted({}, 0)
        admitted = {row.request_id for row in admits}
        releases = {name for name in self._known if name in admitted or name not in self._rows}
        self._known = self._known - releases | admitted
        self._num_steps += 1
        plan = StepPlan(self._num_steps, 0, tuple(admits), tuple(rows), tuple(sorted(releases)))
        if features:
            plan.features = np.concatenate(features).data
        self._plans.put(plan)
        result = self._result()
        if isinstance(result, Exception):
            self._is_on = False
            _logger.error("the draft model is off from now on, since it failed; answers go on without it", exc_info=result)
            return Drafted({}, self._clock.now_ns() - began_ns)
        self._keep(result.features, rows)
        for request_id in result.failures:
            self.ended(request_id)
        guesses: dict[str, tuple[int, float]] = {}
        for request_id, (token_id,) in result.token_ids.items():
            self._rows[request_id].guess = token_id
            if token_id < self._vocab_size:
                guesses[request_id] = token_id, exp(result.logprobs[request_id][0].logprob)
        return Drafted(guesses, self._clock.now_ns() - began_ns)

    def _result(self) -> StepResult | Exception:
        if self._timeout_s is None:
            return self._results.get()
        for _ in range(_NUM_WAITS):
            with suppress(Empty):
                return self._results.get(timeout=self._timeout_s / _NUM_WAITS)
        return TimeoutError(f"a step did not end within {self._timeout_s:g} s")

    def _compute(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(self._executor.collect(self._executor.submit(plan)))
            except Exception as error:
                self._results.put(error)


@dataclass(slots=True)
class _Unread:
    """The features of consecutive tokens of a request."""

    position: int
    """That of the first of these tokens."""
    features: deque[NDArray[np.float32]] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.position + len(self.features)

    def forget(self, position: int) -> None:
        """Forget the features of tokens before a position."""
        while self.features and self.position < position:
            self.features.popleft()
            self.position += 1


class HeadDrafter(DraftModel):
    """A head, which reads features of the large model beside the tokens.

    It reads token i with the features of token i - 1. Its own features stand in for those of guesses, so accepted guesses are
    read again. Without the features of some tokens (a cached prefix, a long prompt) it begins after them.
    """

    def __init__(
        self, executor: Executor, clock: Clock, *, vocab_size: int, num_features: int, timeout_s: float | None
    ) -> None:
        """`num_features`: of a token."""
        super().__init__(executor, clock, vocab_size=vocab_size, timeout_s=timeout_s)
        self._num_features = num_features
        self._unread: dict[str, _Unread] = {}

    def see(self, seen: Sequence[Seen], features: bytes | memoryview) -> None:
        if not self._is_on:
            self._unread.clear()
            return
        found = np.frombuffer(features, np.float32).reshape(-1, self._num_features)
        for request_id, position, at, num in seen:
            unread, newest = self._unread.pop(request_id, None), position + num - MOST_UNREAD
            if unread is None or max(position, newest) > unread.end:
                unread = _Unread(max(position, newest))
            new = found[at + unread.end - position : at + num]
            unread.features += [one.copy() for one in new]  # a view would keep the whole step
            unread.forget(unread.end - MOST_UNREAD)
            self._unread[request_id] = unread
        while len(self._unread) > self._capacity.max_rows:  # others were preempted
            del self._unread[next(iter(self._unread))]

    def num_behind(self, request: Request) -> int:
        unread = self._unread.get(request.request_id)
        if not self._is_on or unread is None or unread.end != request.num_tokens - 1:
            return 0
        row = self._rows.get(request.request_id) or _Row()
        begin = self._settle(row, request)
        return 0 if request.num_tokens - row.first >= self._capacity.max_model_len else request.num_tokens - begin

    def ended(self, request_id: str) -> None:
        super().ended(request_id)
        self._unread.pop(request_id, None)

    def _settle(self, row: _Row, request: Request) -> int:
        row.tail, row.num_read = [], min(row.num_read, request.num_tokens - 1)
        first = self._unread[request.request_id].position + 1
        if row.num_read < first:  # it has not read the tokens before, or no longer has their KV
            row.first = row.num_read = first
        return row.num_read

    def _features(self, request: Request, begin: int, end: int) -> Sequence[NDArray[np.float32]]:
        unread = self._unread[request.request_id]
        found = list(islice(unread.features, begin - 1 - unread.position, end - 1 - unread.position))
        unread.forget(end - 2)  # the last token may be read again
        return found

    def _keep(self, features: bytes | memoryview, plans: Sequence[RowPlan]) -> None:
        found = np.frombuffer(features, np.float32).reshape(-1, self._num_features)
        for plan, hidden in zip([plan for plan in plans if plan.samples], found, strict=True):
            self._rows[plan.request_id].hidden = hidden
