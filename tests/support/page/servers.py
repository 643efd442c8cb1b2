"""A server whose model says what a test wants. For tests of the page."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.config import ServerConfig
from penstock.testing.hash_executor import HashExecutor, HashModel
from support.server.harness import (
    CAPACITY,
    END_ID,
    FIRST_PRINTABLE_ID,
    OTHER_BYTES,
    PRINTABLE,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    running,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakingModel(HashModel):
    """Says one text, byte for byte; where a grammar is to be followed, something that it allows."""

    says: list[str]
    """The text; a test may change it."""

    def sample(self, value, sampling, num_generated, mask=None):
        if mask is not None:
            return HashModel.sample(self, value, sampling, num_generated, mask)
        data = self.says[0].encode()
        return _token_of(data[num_generated]) if num_generated < len(data) else END_ID


def _token_of(byte: int) -> int:
    if byte in PRINTABLE:
        return FIRST_PRINTABLE_ID + byte - PRINTABLE.start
    return len(SPECIAL_TOKENS) + OTHER_BYTES.index(byte)


class Gate(HashExecutor):
    """Ends a step only when it was allowed to: `allow(n)`; `open()` for no limit. Meanwhile the core lock is free."""

    def __init__(self, model) -> None:
        super().__init__(CAPACITY, model=model)
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    def collect(self, ticket):
        self._permits.acquire()
        if self._is_open:
            self._permits.release()
        return super().collect(ticket)


@contextmanager
def speaking(text, *, is_open=True, config=None, **fields):
    """A live server and the gate before its steps. `server.says[0]` is what its model says."""
    model = SpeakingModel(vocab_size=VOCAB_SIZE, says=[text])
    gate = Gate(model)
    if is_open:
        gate.open()
    config = config or ServerConfig(port=0, shutdown_timeout_s=0.0)
    with running(gate, config=config, **fields) as server:
        server.gate, server.says = gate, model.says
        try:
            yield server
        finally:
            gate.open()
