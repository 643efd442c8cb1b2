"""The engine: one thread that drives a core and an executor. Requests come from any thread; chunks of output go to the sink.

Every request that `submit` took ends in exactly one chunk with a `finish_reason`, even if the executor or the core breaks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from penstock.clock import Clock
from penstock.engine.blocks import Blocks
from penstock.engine.core import EngineCore
from penstock.engine.core_lock import Abandoned, CoreLock, WatchedExecutor
from penstock.engine.inbox import Inbox
from penstock.engine.outbox import Outbox
from penstock.engine.output import OutputStage
from penstock.engine.ports import BlockMover, Executor, NullObserver, Observer, OutputChunk, OutputSink, TurnObserver
from penstock.engine.state import SHUTTING_DOWN, EngineState
from penstock.engine.stepper import Stepper
from penstock.engine.transfers import CLOSE_TIMEOUT_S, Transfers
from penstock.kv.pool_map import PoolMap, draw, waste_ratio
from penstock.types.errors import PolicyError, RejectReason
from penstock.types.events import Abort, Add, Command, Drain, TokenEvent
from penstock.types.request import Request
from penstock.types.stats import EngineLoad

_logger = logging.getLogger(__name__)

ENGINE_FAILED = "the engine failed while this request was running; the log says why"
ENGINE_STUCK = "a step of the engine did not end in time while this request was running"
ABORT_GRACE_S = 10.0


class Engine:
    """The engine's thread, and thread-safe methods to submit, abort, drain and inspect."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        output: OutputStage,
        *,
        clock: Clock,
        sink: OutputSink,
        observer: Observer | None = None,
        turn_observer: TurnObserver | None = None,
        name: str = "penstock-engine",
        idle_check_s: float | None = 1.0,
        on_failed: Callable[[], None] | None = None,
        make_transfers: Callable[[BlockMover, Callable[[], None]], Transfers | None] = lambda *_: None,
    ) -> None:
        """`observer` gets requests that end before they reach the core. Raises ValueError for an executor depth that is neither
        1 nor 2.

        After `idle_check_s` without work the core verifies its invariants once; None: never. `on_failed` is called by the
        engine thread once its requests have ended.
        """
        self._core = core
        self._executor = executor
        self._output = output
        self._clock = clock
        self._on_failed = on_failed
        self._idle_check_ns = None if idle_check_s is None else int(idle_check_s * 1e9)
        self._core_lock = CoreLock()
        self._inbox = Inbox(clock)
        core.scheduler.adapters.listen(self._inbox.nudge)
        self._outbox = Outbox(sink, observer or NullObserver())
        self.blocks = Blocks(core.scheduler, getattr(executor, "block_memory", None), self._core_lock, self._inbox.nudge)
        watched = WatchedExecutor(executor, self._core_lock)
        self._transfers = make_transfers(watched, self._inbox.nudge)
        self._stepper = Stepper(
            core,
            watched,
            clock,
            report=self._report,
            read=output.read,
            transfers=self._transfers,
            poll_aborts=self._inbox.poll_aborts,
            turn_observer=turn_observer,
        )
        self._state_lock = threading.Lock()
        self._state = EngineState.STARTING
        self._num_holds = 0
        self._has_waited = False
        """The timeout of `close` has passed, so a drain no longer waits for `held` calls."""
        self._was_cut_short = False
        """A request in flight since the drain began did not end by itself."""
        self._is_verified = True
        """The core has not worked since its last check."""
        self._last_waste = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # For any thread.

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self) -> None:
        if self._state is EngineState.STOPPED:
            raise RuntimeError("a closed engine can't be started")
        self._thread.start()
        self._move_to(EngineState.READY)

    def submit(self, *requests: Request) -> None:
        """Queue requests for the same step. Never blocks. If the engine is draining, failed or stopped, each request ends in
        one REJECTED chunk.

        Raises `Rejected` (INVALID), and queues none, if a request with the same id is in flight.
        """
        self._outbox.add(requests)
        if not self._inbox.put(*map(Add, requests)):
            self._refuse(requests)

    def abort(self, request_id: str, detail: str = "cancelled") -> None:
        """End a request with ABORT, within a step. Ids of unknown and ended requests are ignored."""
        self._inbox.put(Abort(request_id, detail))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make a drain wait until the `with` block ends, for an admitted call that will submit more requests."""
        with self._state_lock:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._state_lock:
                self._num_holds -= 1
            if self._state is EngineState.DRAINING:
                self._refuse_unless_held()

    def drain(self) -> None:
        """Refuse new requests and finish the others; the thread then ends. Returns at once."""
        self._move_to(EngineState.DRAINING)
        self._refuse_unless_held()

    def _refuse_unless_held(self) -> None:
        if not self._is_held:
            self._inbox.put(Drain())

    @property
    def _is_held(self) -> bool:
        return self._num_holds > 0 and not self._has_waited

    def close(self, timeout_s: float, detail: str = SHUTTING_DOWN) -> bool:
        """Drain, wait, abort what is left after `timeout_s` with the `detail`, join the thread, close the executor. Idempotent.

        Returns whether every request in flight since the drain began ended by itself. If a step does not come back within
        `ABORT_GRACE_S`, the executor is left open.
        """
        self.drain()
        if self._thread.ident is None:
            self._stop()
        else:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            is_draining, is_held = self._state is EngineState.DRAINING, self._is_held
            self._has_waited = True
            self._refuse_unless_held()
            left = self._outbox.cut_short()
            for request_id in left:
                self.abort(request_id, detail)
            if is_draining and (left or is_held):  # `_end_all` decides for an engine that fails
                self._was_cut_short = True
            self._thread.join(ABORT_GRACE_S)
        if self._thread.is_alive():
            _logger.error("step %s did not come back; the executor stays open", self._step_ids())
        else:
            self._close_parts()
            self._stepper.close()
        return not self._was_cut_short

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def executor_call(self) -> object | None:
        """Return an object that stands for the call of the executor that the engine waits for, or None."""
        return self._core_lock.executor_call()

    def abandon(self) -> bool:
        """End every request with ERROR, since the executor hangs. Return False if the executor has just returned."""
        with self._core_lock.abandon() as is_abandoned:
            if is_abandoned:
                _logger.critical("step %s does not come back; plans in flight: %s", self._step_ids(), self._plans())
                self._end_all(ENGINE_STUCK)
        return is_abandoned

    def load(self) -> EngineLoad:
        """Return how busy the engine is. Requests that the core has not seen yet count. Never waits."""
        load = self._core.snapshot
        num_in_flight, num_prompt_tokens = self._outbox.counts()
        num_waiting = max(0, num_in_flight - load.num_running)
        return load._replace(num_waiting=num_waiting, num_prompt_tokens=num_prompt_tokens)

    def pool_map(self) -> PoolMap:
        """Return every KV block with its state and owner. O(blocks). May wait, so not for an event loop. Raises
        TimeoutError."""
        scheduler = self._core.scheduler
        return self._core_lock.read(lambda: draw(scheduler.kv, scheduler.running.values()))

    def kv_waste_ratio(self) -> float:
        """Return the share of token positions in held KV blocks that are empty. After a timeout, return the last known share.
        O(requests)."""
        scheduler = self._core.scheduler
        with suppress(TimeoutError):
            self._last_waste = self._core_lock.read(lambda: waste_ratio(scheduler.kv, scheduler.running.values()))
        return self._last_waste

    # For the engine thread, or for a driver that has no thread.

    def turn(self) -> bool:
        """Apply commands, then begin or finish a step. Return False if there was none to begin or finish."""
        commands = self._inbox.poll()
        for request in _added(commands):
            self._output.add(request)
        with self._core_lock:
            begun, finished = self._stepper.turn(commands)
        if begun is not None:
            self._is_verified = False
        return begun is not None or finished is not None

    def _run(self) -> None:
        try:
            while not self._is_done():
                if not self.turn():
                    self._idle()
            self._stop()
        except Abandoned:
            _logger.warning("the step that did not come back has come back; its executor is freed")
            self._close_parts()
        except BaseException as error:  # A dead thread must not leave anyone waiting, whatever killed it.
            self._fail(error)

    def _is_done(self) -> bool:
        has_work = self._core.has_work or self._stepper.has_flights
        return self._state is EngineState.DRAINING and not self._is_held and self._inbox.is_empty and not has_work

    def _idle(self) -> None:
        if self._is_done():  # The last turn may have polled the drain command. Then no other command would end the wait below.
            return
        now_ns = self._clock.now_ns()
        if self._is_verified or self._idle_check_ns is None or self._core.has_work:
            self._inbox.wait(self._core.next_wakeup_ns(now_ns))
            return
        # The check waits for a quiet moment: with one client at a time, the engine is idle after every request.
        self._inbox.wait(now_ns + self._idle_check_ns)
        if self._inbox.is_empty:
            with self._core_lock:
                self._core.check()
            self._is_verified = True

    def _report(self, events: Sequence[TokenEvent], now_ns: int) -> None:
        output = self._output.push(events)
        ended: Sequence[TokenEvent] = ()
        try:
            if output.commands:
                # Before delivery: when a client has its whole answer, the request must be counted and its row free.
                ended = self._core.apply(output.commands, now_ns)
        finally:
            self._outbox.deliver(output.chunks)
        if ended:  # The output stage drops the finish events of requests whose text has ended.
            self._report(ended, now_ns)

    # The end.

    def _close_parts(self) -> None:
        self.blocks.close()
        if self._transfers is not None:
            self._transfers.close()
        self._executor.close()

    def _stop(self) -> None:
        if self._transfers is not None:
            with self._core_lock:
                self._transfers.keep(CLOSE_TIMEOUT_S)
        self._refuse(_added(self._inbox.close()))
        self._move_to(EngineState.STOPPED)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, PolicyError):  # the traceback of its cause ends at the user's line
            _logger.critical("the engine failed: %s Plans in flight: %s", error, self._plans(), exc_info=error.__cause__)
        else:
            _logger.critical("the engine failed; plans in flight: %s", self._plans(), exc_info=error)
        with self._core_lock:
            self._end_all(ENGINE_FAILED)
        if self._on_failed is not None:
            self._on_failed()

    def _end_all(self, detail: str) -> None:
        was_draining = self._state is EngineState.DRAINING
        self._move_to(EngineState.FAILED)
        late = _added(self._inbox.close())
        try:
            self._stepper.report_pending()
        except Exception:
            _logger.exception("the last step before the failure was not told")
        chunks = [*self._fail_core(detail), *self._output.fail_all(detail, self._clock.now_ns())]
        if was_draining and (chunks or late):
            self._was_cut_short = True
        for chunk in chunks:
            chunk.reject_reason = RejectReason.UNAVAILABLE.value  # Not this request's own fault.
        try:
            self._outbox.deliver(chunks)
            self._refuse(late)
        except Exception:
            _logger.exception("the sink failed too; %d requests were not told their end", len(chunks) + len(late))

    def _fail_core(self, detail: str) -> list[OutputChunk]:
        try:
            return self._output.push(self._core.fail_all(detail, self._clock.now_ns())).chunks
        except Exception:
            _logger.exception("the core could not end its requests in order")
            return []

    def _refuse(self, requests: Sequence[Request]) -> None:
        self._outbox.refuse(requests, self._state.refuses_with or RejectReason.UNAVAILABLE, self._clock.now_ns())

    def _move_to(self, state: EngineState) -> None:
        """Change the state. FAILED and STOPPED are final, and a late start does not undo a drain."""
        order = list(EngineState)
        with self._state_lock:
            is_over = self._state in (EngineState.FAILED, EngineState.STOPPED)
            if not is_over and order.index(state) > order.index(self._state):
                self._state = state

    def _step_ids(self) -> str:
        return ", ".join(str(plan.step_id) for plan in self._stepper.plans) or "none"

    def _plans(self) -> str:
        return "; ".join(repr(plan)[:4000] for plan in self._stepper.plans) or "none"


def _added(commands: Iterable[Command]) -> list[Request]:
    return [command.request for command in commands if isinstance(command, Add)]
