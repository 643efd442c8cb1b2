"""Helpers that `engine/test_thread.py` shares with other tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.clock import WallClock
from penstock.engine.output import OutputStage
from penstock.engine.ports import OutputChunk
from penstock.engine.thread import Engine
from penstock.testing import (
    HashExecutor,
    expected_tokens,
    make_core,
)
from penstock.types.plan import Capacity
from penstock.types.request import Request

TIMEOUT_S = 30

TINY = Capacity(num_blocks=13, block_size=4, max_rows=4, max_step_tokens=16, max_model_len=44)


class Numbers:
    """Token 7 is `7 `."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def flush(self) -> str:
        return ""


class Sink:
    """Keeps all chunks; lets a test wait for a condition on them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: list[list[OutputChunk]] = []
        self.threads: set[int] = set()

    def __call__(self, chunks: list[OutputChunk]) -> None:
        with self.changed:
            self.calls.append(list(chunks))
            self.threads.add(threading.get_ident())
            self.changed.notify_all()

    def of(self, request_id: str) -> list[OutputChunk]:
        return [chunk for call in self.calls for chunk in call if chunk.request_id == request_id]

    def ends_of(self, request_id: str) -> list[OutputChunk]:
        return [chunk for chunk in self.of(request_id) if chunk.finish_reason is not None]

    def end_of(self, request_id: str) -> OutputChunk:
        (end,) = self.ends_of(request_id)
        assert self.of(request_id)[-1] is end
        return end

    def tokens_of(self, request_id: str) -> tuple[int, ...]:
        return sum((chunk.token_ids for chunk in self.of(request_id)), ())

    def text_of(self, request_id: str) -> str:
        return "".join(chunk.text for chunk in self.of(request_id))

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S)

    def wait_for_ends(self, *request_ids: str) -> None:
        self.wait_for(lambda: all(self.ends_of(request_id) for request_id in request_ids))


class GatedExecutor(HashExecutor):
    """Steps are collected only when the test lets them."""

    def __init__(self, capacity: Capacity, **fields) -> None:
        super().__init__(capacity, **fields)
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.closes = 0
        self._is_open = False

    def collect(self, ticket):
        self.entered.release()
        assert self._is_open or self.gate.acquire(timeout=TIMEOUT_S)
        return super().collect(ticket)

    def close(self) -> None:
        self.closes += 1
        super().close()

    def wait_until_in_step(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)

    def open_for_good(self) -> None:
        self._is_open = True
        self.gate.release()  # for the step that may be waiting


class Rig:
    """An engine over a hash executor, with a sink that remembers."""

    def __init__(self, *, core=None, executor=None, capacity=TINY, clock=None, sink=None, **engine_fields) -> None:
        self.sink = sink or Sink()
        self.executor = executor or HashExecutor(capacity)
        self.core = core or make_core(capacity)
        self.clock = clock or WallClock()
        self.engine = Engine(
            self.core,
            self.executor,
            OutputStage(lambda _shown: Numbers()),
            clock=self.clock,
            sink=self.sink,
            **engine_fields,
        )

    def wait_until_ended(self) -> None:
        self.engine._thread.join(TIMEOUT_S)
        assert not self.engine.is_alive, "the engine's thread runs on"

    def expected(self, request: Request):
        model, max_model_len = HashExecutor(TINY).model, TINY.max_model_len
        return expected_tokens(request.prompt_token_ids, request.sampling, model=model, max_model_len=max_model_len)

    def check_against_oracle(self, request: Request) -> None:
        expected = self.expected(request)
        assert self.sink.tokens_of(request.request_id) == expected.token_ids
        assert self.sink.end_of(request.request_id).finish_reason is expected.finish_reason
