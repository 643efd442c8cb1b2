"""Keeps an engine running: replaces an engine that failed or hangs.

An engine is never repaired: KV that was being written when a step failed can't be trusted. After more than MAX_RESTARTS within
WINDOW_S, or if the model's files have changed, the state is FAILED.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from penstock.clock import Clock
from penstock.engine.state import SHUTTING_DOWN, EngineState
from penstock.engine.thread import ABORT_GRACE_S, Engine
from penstock.kv.pool_map import PoolMap
from penstock.types.errors import ModelChanged
from penstock.types.request import Request
from penstock.types.stats import EngineLoad

_logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
WINDOW_S = 600.0
_NUM_LOOKS = 10
"""Looks of the watchdog during the time limit of a step."""


class Supervisor:
    def __init__(
        self,
        make_engine: Callable[[Callable[[], None]], Engine],
        *,
        clock: Clock,
        step_timeout_s: float | None,
        on_restart: Callable[[], None] | None = None,
        first_delay_s: float = 1.0,
    ) -> None:
        """`make_engine` takes a callback `on_failed`, and returns an engine that is not started.

        `step_timeout_s`: a step counts as hung after this time, or up to a tenth later. None: no limit. `first_delay_s`: the
        wait before the second restart within the window; the first is immediate.
        """
        self._make_engine = make_engine
        self._clock = clock
        self._look_each_s = None if step_timeout_s is None else step_timeout_s / _NUM_LOOKS
        self._call: object | None = None
        """The engine's call of the executor at the watchdog's last look."""
        self._num_looks = 0
        """Later looks that found the same call."""
        self._on_restart = on_restart or (lambda: None)
        self._first_delay_s = first_delay_s
        self._lock = threading.Lock()
        self._is_closing = False
        self._has_given_up = False
        self._restarts_ns: deque[int] = deque()
        self._news = threading.Event()
        self._engine = make_engine(self._news.set)
        self._thread = threading.Thread(target=self._watch, name="penstock-watchdog", daemon=True)

    @property
    def state(self) -> EngineState:
        state = self._engine.state
        has_successor = not (self._is_closing or self._has_given_up)
        return EngineState.RESTARTING if state is EngineState.FAILED and has_successor else state

    def start(self) -> None:
        self._engine.start()
        self._thread.start()

    def submit(self, *requests: Request) -> None:
        """Submit requests as `Engine.submit` does. Without an engine each request ends in one REJECTED chunk."""
        self._engine.submit(*requests)

    def abort(self, request_id: str, detail: str = "cancelled") -> None:
        self._engine.abort(request_id, detail)

    def load(self) -> EngineLoad:
        return self._engine.load()

    def pool_map(self) -> PoolMap:
        return self._engine.pool_map()

    def kv_waste_ratio(self) -> float:
        return self._engine.kv_waste_ratio()

    def held(self) -> AbstractContextManager[None]:
        return self._engine.held()

    def drain(self) -> None:
        """Drain as `Engine.drain` does. An engine that fails from now on is not replaced."""
        with self._lock:
            self._is_closing = True
            self._engine.drain()
        self._news.set()

    def close(self, timeout_s: float, detail: str = SHUTTING_DOWN) -> bool:
        """Close as `Engine.close` does. Requests in a step that never ends are ended too. Idempotent.

        If an engine is being made, wait up to `ABORT_GRACE_S` until it is made and closed again. Do not wait while a step of
        the old one hangs.
        """
        self.drain()
        ended_cleanly = self._engine.close(timeout_s, detail)
        if self._engine.is_alive:
            self._engine.abandon()
        if self._thread.ident is not None:
            # `Engine.close` has already waited that long for a step that hangs.
            self._thread.join(0.0 if self._engine.is_alive else ABORT_GRACE_S)
        return ended_cleanly

    # The watchdog's thread.

    def _watch(self) -> None:
        while not self._is_closing:
            self._news.wait(self._look_each_s)
            self._news.clear()
            if self._engine.state is EngineState.FAILED:
                self._free(self._engine)
                if not self._restart("it failed"):
                    return
            elif self._is_stuck() and self._engine.abandon() and not self._restart("its step did not end in time"):
                return

    def _is_stuck(self) -> bool:
        """Look at the engine, and return whether its step has hung.

        Looks are counted, not time: while the process is paused, the watchdog is too.
        """
        call, self._call = self._call, self._engine.executor_call()
        self._num_looks = self._num_looks + 1 if call is not None and call is self._call else 0
        return self._num_looks >= _NUM_LOOKS

    def _free(self, engine: Engine) -> None:
        """Close an engine to free its memory. A fault that broke a step may break this, too."""
        try:
            engine.close(0.0)
        except Exception:
            _logger.exception("the executor of the engine that failed could not be closed; its memory may be lost")

    def _restart(self, reason: str) -> bool:
        """Replace the failed engine. Return False after the last attempt, or if none can succeed."""
        while not self._is_closing and self._may_restart():
            if self._news.wait(self._delay_s()):  # closing, or a late report of the failed engine
                self._news.clear()
                continue
            _logger.warning("restarting the engine, because %s", reason)
            self._restarts_ns.append(self._clock.now_ns())
            try:
                self._put_in_place(self._make_engine(self._news.set))
            except ModelChanged as error:
                _logger.critical("the engine could not be restarted: %s", error)
                break
            except Exception:
                _logger.exception("the engine could not be restarted")
                continue
            return True
        self._has_given_up = True
        return False

    def _may_restart(self) -> bool:
        oldest_ns = self._clock.now_ns() - int(WINDOW_S * 1e9)
        while self._restarts_ns and self._restarts_ns[0] < oldest_ns:
            self._restarts_ns.popleft()
        if len(self._restarts_ns) < MAX_RESTARTS:
            return True
        _logger.critical("%d restarts within %g s did not help: the server needs one itself", MAX_RESTARTS, WINDOW_S)
        return False

    def _delay_s(self) -> float:
        num_before = len(self._restarts_ns)
        return self._first_delay_s * 2.0 ** (num_before - 1) if num_before else 0.0

    def _put_in_place(self, engine: Engine) -> None:
        with self._lock:
            if not self._is_closing:
                engine.start()
                self._engine = engine
                self._on_restart()
                _logger.warning("the engine is ready again")
                return
        self._free(engine)
