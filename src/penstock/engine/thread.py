"""The one thread that drives the core: inbox -> core -> executor -> core -> output stage -> sink. Made by the composition root.

Never schedules, never makes text, never knows HTTP. Other threads call `submit`, `abort`, `drain`, `close`, `state` and
`load`; everything else happens on the engine thread. One turn of the loop:

    arrivals    take over what came from the tier below the pool, if there is one
    commands    apply what came in; what ended by it (refused, cancelled) is told at once
    begin       ask the core for a plan; without one, and with nothing in flight, sleep until there is a command or a deadline
    departures  copy what is spilled, begin loads; they go on while the step runs
    copies      of blocks, also without a plan: what arrives next may be written to either of the two
    submit      the step takes off; where answers follow a grammar, their masks follow as soon as the step before was collected
    collect     the oldest step in flight, without the GIL, if there are as many as the executor's depth, or there was no plan
    aborts      apply those that came during the step, before its tokens are shown
    finish      commit, let grammars follow, make text, apply the stops that the text brought, one call of the sink

With a depth of 1 each step is collected in the turn in which it was submitted, and no step is wasted on who ends. With a depth
of 2 the turn that begins step k + 1 finishes step k, so all of the above but `collect` happens while a step is computed:

    depth 1   host     | plan 0 |........| finish 0, plan 1 |........| finish 1, plan 2 |........
              device   |........| step 0 |..................| step 1 |..................| step 2
    depth 2   host     | plan 0 | plan 1 |....| finish 0, plan 2 |.| finish 1, plan 3 |.| ...
              device   |........| step 0      | step 1             | step 2             |

Every request that `submit` took ends in exactly one chunk with a `finish_reason`, also if the executor or the core breaks.
An engine that has failed stays so; `supervisor` puts another one in its place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from penstock.clock import Clock
from penstock.engine.core import EngineCore
from penstock.engine.output import OutputStage
from penstock.engine.ports import BlockMover, Executor, NullObserver, Observer, OutputChunk, OutputSink, TurnObserver
from penstock.engine.submitted import Abandoned, Submitted
from penstock.engine.transfers import Transfers
from penstock.kv.pool_map import PoolMap, draw, waste_ratio
from penstock.types.errors import ExecutorFailure, Rejected, RejectReason
from penstock.types.events import Abort, Add, Command, Drain, TokenEvent
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineLoad, RequestStats

_logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"
ENGINE_FAILED = "the engine failed while this request was running; the server's log says why"
ENGINE_STUCK = "a step of the engine did not end in time while this request was running"
KEEP_TIMEOUT_S = 5.0
"""For how long the end of an engine is put off to spill what the pool contains, so that sessions can go on after a restart."""
ABORT_GRACE_S = 10.0
"""How long `close` waits, after its time-out, for the step in flight to come back."""


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """Told by the supervisor, between two engines."""
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def refuses_with(self) -> RejectReason | None:
        """Why a new request would be refused; None if it would be taken."""
        if self is EngineState.READY:
            return None
        return RejectReason.DRAINING if self is EngineState.DRAINING else RejectReason.UNAVAILABLE


class Engine:
    """Requests in from any thread, chunks out through the sink.

    The sink is called on the engine thread; for a request that comes after the engine has ended, on the thread that
    submits it.
    """

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
        """`observer` hears of the requests that the core never saw; pass the core's. `name` is the thread's. Raises ValueError
        for an executor whose depth is neither 1 nor 2.

        After `idle_check_s` without work the core verifies its invariants once (0.5 us per block); None: never.
        `on_failed` is called by the engine thread when all is over, its requests have been told, and nothing more will come.
        `make_transfers` is given the executor's blocks and what wakes the engine when something has arrived; None: no tier.
        """
        self._core = core
        self._executor = executor
        self._submitted = Submitted(executor, clock)
        self._output = output
        self._clock = clock
        self._sink = sink
        self._observer: Observer = observer or NullObserver()
        self._turn_observer: TurnObserver = turn_observer or NullObserver()
        self._on_failed = on_failed
        self._idle_check_ns = None if idle_check_s is None else int(idle_check_s * 1e9)
        self._inbox = Inbox(clock)
        self._transfers = make_transfers(self._submitted, self._inbox.nudge)
        self._lock = threading.Lock()
        self._state = EngineState.STARTING
        self._in_flight = InFlight()
        self._was_cut_short = False
        self._cut_short_ids: frozenset[str] = frozenset()
        """What `close` aborts; written before it does."""
        self._is_verified = True
        """The core has not worked since its last check."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # For any thread.

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if it was started or closed before."""
        if self._state is EngineState.STOPPED:
            raise RuntimeError("a closed engine can't be started")
        self._thread.start()
        self._move_to(EngineState.READY)

    def submit(self, request: Request) -> None:
        """Queue a request; never blocks. When draining, failed or stopped it ends in one REJECTED chunk.

        Raises `Rejected` (INVALID) if a request with this id is in flight; nothing else is told about it.
        """
        self._in_flight.add(request)
        if not self._inbox.put(Add(request)):
            self._refuse([request])

    def abort(self, request_id: str, detail: str = "cancelled") -> None:
        """End a request with ABORT, within a step. Unknown and ended ids are ignored."""
        self._inbox.put(Abort(request_id, detail))

    def drain(self) -> None:
        """Refuse new requests from now on and finish the others; the thread ends when they have. Returns at once."""
        self._move_to(EngineState.DRAINING)
        self._inbox.put(Drain())

    def close(self, timeout_s: float) -> bool:
        """Drain, wait, abort what is left after `timeout_s`, join the thread, close the executor. Idempotent.

        Returns whether every request ended by itself. If a step does not come back within `ABORT_GRACE_S` after
        the time-out, the executor is left open, since the thread is still inside it.
        """
        self.drain()
        if self._thread.ident is None:
            self._stop()
        else:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._was_cut_short |= self._abort_all()
            self._thread.join(ABORT_GRACE_S)
        if self._thread.is_alive():
            _logger.error("step %s did not come back; the executor stays open", self._submitted.step_ids)
            return False
        self._close_executor()
        return self._state is EngineState.STOPPED and not self._was_cut_short

    def step_age_ns(self) -> int:
        """For how long the engine has waited for the executor's present step; 0 if it does not."""
        return self._submitted.waiting_ns()

    def abandon(self) -> bool:
        """End every request with ERROR although the executor does not come back from its step. False if it just did.

        Called by the supervisor's thread. The engine thread ends when the step comes back, and frees the executor then.
        """
        if not self._submitted.abandon():
            return False
        # From here on the engine thread touches nothing, so this one may.
        _logger.critical("step %s does not come back; plans in flight: %s", self._submitted.step_ids, self._submitted.plans)
        self._end_all(ENGINE_STUCK)
        return True

    def load(self) -> EngineLoad:
        """A cheap reading; its parts may be one turn apart."""
        num_running, kv = self._core.num_running, self._core.scheduler.kv
        num_available, num_cached, num_shared = _settled(
            lambda: (kv.pool.num_available, kv.pool.num_cached, kv.pool.num_shared)
        )
        return EngineLoad(
            num_running=num_running,
            num_waiting=max(0, len(self._in_flight) - num_running),
            waits_for=self._core.scheduler.news.waits_for,
            num_prompt_tokens=self._in_flight.num_prompt_tokens,
            num_blocks_total=kv.num_total_blocks,
            num_blocks_free=num_available - num_cached,
            num_blocks_cached=num_cached,
            num_blocks_shared=num_shared,
            num_rows_free=max(0, self._core.scheduler.max_rows - num_running),
        )

    def pool_map(self) -> PoolMap:
        """Every block with its state and owner. O(blocks): a millisecond for tens of thousands."""
        return draw(self._core.scheduler.kv, list(self._core.scheduler.running.values()))

    def kv_waste_ratio(self) -> float:
        """Of the KV positions that requests hold, the share without a token. O(requests)."""
        return waste_ratio(self._core.scheduler.kv, list(self._core.scheduler.running.values()))

    # For the engine thread, or for a driver that has no thread.

    def turn(self) -> bool:
        """One pass of the loop. False if there was no step to begin and none to finish."""
        if self._transfers is not None:
            self._transfers.arrive()
        commands = self._inbox.poll()
        now_ns = self._clock.now_ns()  # after the poll: nobody is queued before it arrived
        self._apply(commands, now_ns)
        plan = self._core.begin(now_ns)
        if self._transfers is not None:
            self._transfers.depart()
        copies = self._core.take_block_copies()
        if plan is not None:
            self._is_verified = False
            self._submitted.submit(plan, copies, now_ns, awaits_masks=self._core.awaits_masks(plan))
            self._restrict()
        elif copies:
            self._submitted.copy_blocks(copies)
        if not self._submitted:
            return False
        if plan is None or self._submitted.is_full:
            self._finish()
        return True

    def _run(self) -> None:
        try:
            while not self._is_done():
                if not self.turn():
                    self._idle()
            self._stop()
        except Abandoned:
            _logger.warning("the step that did not come back has come back; its executor is freed")
            self._close_executor()
        except BaseException:  # A dead thread must not leave anyone waiting, whatever killed it.
            self._fail()

    def _is_done(self) -> bool:
        has_work = self._core.has_work or self._submitted
        return self._state is EngineState.DRAINING and self._inbox.is_empty and not has_work

    def _idle(self) -> None:
        """Sleep until there is a command or a deadline."""
        if self._is_done():  # The drain may have been polled by the turn just made; nothing else would wake us.
            return
        now_ns = self._clock.now_ns()
        if self._is_verified or self._idle_check_ns is None or self._core.has_work:
            self._inbox.wait(self._core.next_wakeup_ns(now_ns))
            return
        # The check waits for a quiet moment: with one client at a time, the engine is idle after every request.
        self._inbox.wait(now_ns + self._idle_check_ns)
        if self._inbox.is_empty:
            self._core.check()
            self._is_verified = True

    def _apply(self, commands: Sequence[Command], now_ns: int) -> None:
        for request in _added(commands):
            self._output.add(request)
        self._publish(self._core.apply(commands, now_ns), now_ns)

    def _finish(self) -> None:
        flight, result = self._submitted.collect()
        now_ns = self._clock.now_ns()
        events = self._core.apply(self._inbox.poll_aborts(), now_ns)
        events += self._core.finish(flight.plan, result, now_ns)
        committed_ns = self._clock.now_ns()
        parts_ns = {"schedule": flight.schedule_ns, "commit": committed_ns - now_ns}
        if self._core.has_grammars or self._submitted.to_restrict is not None:
            self._follow(events, now_ns)
            followed_ns = self._clock.now_ns()
            parts_ns["grammar"] = followed_ns - committed_ns
            committed_ns = followed_ns
        self._publish(events, now_ns)
        parts_ns["output"] = self._clock.now_ns() - committed_ns
        self._turn_observer.on_turn(parts_ns)
        self._submitted.forget()

    def _follow(self, events: list[TokenEvent], now_ns: int) -> None:
        """Let grammars follow, and send masks before there is text: a device at the end of its layers waits for them."""
        events += self._core.follow_grammars(events, now_ns)
        try:
            self._restrict()
        except ExecutorFailure:
            self._publish(events, now_ns)  # they are of the step before, which went well
            raise

    def _restrict(self) -> None:
        """Send its masks to a step that waits for them, once the tokens before are known."""
        if (flight := self._submitted.to_restrict) is not None:
            self._submitted.restrict(flight, self._core.masks(flight.plan))

    def _publish(self, events: Sequence[TokenEvent], now_ns: int) -> None:
        if not events:
            return
        output = self._output.push(events)
        if not output.commands:
            self._deliver(output.chunks)
            return
        try:
            # The books first: who has a whole answer finds it counted, and its place free.
            ended = self._core.apply(output.commands, now_ns)
        finally:
            self._deliver(output.chunks)
        # The output stage drops the finish events of those whose text has ended.
        self._publish(ended, now_ns)

    def _deliver(self, chunks: list[OutputChunk]) -> None:
        ended = [chunk.request_id for chunk in chunks if chunk.finish_reason is not None]
        if ended:
            self._in_flight.remove(ended)
            if self._cut_short_ids:
                self._tell_shutdown(chunks)
        if chunks:
            self._sink(chunks)

    def _tell_shutdown(self, chunks: Iterable[OutputChunk]) -> None:
        for chunk in chunks:
            if chunk.finish_reason is FinishReason.ABORT and chunk.request_id in self._cut_short_ids:
                chunk.reject_reason = chunk.reject_reason or RejectReason.DRAINING.value

    # The end.

    def _close_executor(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
        self._executor.close()

    def _stop(self) -> None:
        """Nothing is left to do; what came in at the last moment is refused."""
        if self._transfers is not None:
            self._transfers.keep(KEEP_TIMEOUT_S)
        self._refuse(_added(self._inbox.close()))
        self._move_to(EngineState.STOPPED)

    def _fail(self) -> None:
        """End every request with ERROR; the exception being handled goes to the log with the plan."""
        _logger.critical("the engine failed; plans in flight: %s", self._submitted.plans, exc_info=True)
        self._end_all(ENGINE_FAILED)
        if self._on_failed is not None:
            self._on_failed()

    def _end_all(self, detail: str) -> None:
        self._move_to(EngineState.FAILED)
        late = _added(self._inbox.close())
        chunks = [*self._fail_core(detail), *self._output.fail_all(detail, self._clock.now_ns())]
        for chunk in chunks:
            chunk.reject_reason = RejectReason.UNAVAILABLE.value  # Not this request's own fault.
        try:
            self._deliver(chunks)
            self._refuse(late)
        except Exception:
            _logger.exception("the sink failed too; %d requests were not told their end", len(chunks) + len(late))

    def _fail_core(self, detail: str) -> list[OutputChunk]:
        try:
            return self._output.push(self._core.fail_all(detail, self._clock.now_ns())).chunks
        except Exception:
            _logger.exception("the core could not end its requests in order")
            return []

    def _abort_all(self) -> bool:
        """Whether there was anything to abort."""
        request_ids = self._in_flight.ids()
        self._cut_short_ids |= frozenset(request_ids)
        for request_id in request_ids:
            self.abort(request_id, SHUTTING_DOWN)
        return bool(request_ids)

    def _move_to(self, state: EngineState) -> None:
        """Change the state; from FAILED and STOPPED there is no way back, and a drain is not undone by a late start."""
        order = list(EngineState)
        with self._lock:
            is_over = self._state in (EngineState.FAILED, EngineState.STOPPED)
            if not is_over and order.index(state) > order.index(self._state):
                self._state = state

    def _refuse(self, requests: Sequence[Request]) -> None:
        """End requests that the core never saw."""
        now_ns = self._clock.now_ns()
        reason = self._state.refuses_with or RejectReason.UNAVAILABLE
        for request in requests:
            self._observer.on_finish(refused_stats(request, reason, now_ns))
        self._deliver([refused_chunk(request, reason, now_ns) for request in requests])


class InFlight:
    """Of one engine."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        """Of all of them together."""
        self._lock = threading.Lock()
        self._prompt_lens: dict[str, int] = {}
        """By request id."""

    def __len__(self) -> int:
        return len(self._prompt_lens)

    def ids(self) -> list[str]:
        """At one moment."""
        with self._lock:
            return list(self._prompt_lens)

    def add(self, request: Request) -> None:
        """Raises `Rejected` (INVALID) if there is one with this id."""
        request_id, num_tokens = request.request_id, request.num_prompt_tokens
        with self._lock:
            if request_id in self._prompt_lens:
                detail = f"a request with the id {request_id!r} is still running"
                raise Rejected(RejectReason.INVALID, detail, param="request_id")
            self._prompt_lens[request_id] = num_tokens
            self.num_prompt_tokens += num_tokens

    def remove(self, request_ids: Iterable[str]) -> None:
        """They have ended."""
        with self._lock:
            for request_id in request_ids:
                self.num_prompt_tokens -= self._prompt_lens.pop(request_id)


class Inbox:
    """A queue of commands, first in, first out, that can be closed for good.

    Every command is either handed out exactly once or was refused by `put`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._commands: list[Command] = []
        self._num_aborts = 0
        self._is_closed = False
        self._is_nudged = False

    def put(self, command: Command) -> bool:
        """Append a command and wake the engine; never blocks. False, and nothing kept, if the inbox is closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._commands.append(command)
            self._num_aborts += isinstance(command, Abort)
            self._changed.notify_all()
        return True

    def nudge(self) -> None:
        """Let the present sleep, or the next one, end at once: there is something to do that is no command."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify_all()

    def poll(self) -> list[Command]:
        """All commands, in order; at once."""
        if not self._commands:  # Read without the lock: a command that comes just now is found by the next poll.
            return []
        with self._changed:
            return self._take_all()

    def poll_aborts(self) -> list[Command]:
        """Only the aborts of requests that were handed out before; an abort never overtakes its own Add."""
        if not self._num_aborts:
            return []
        with self._changed:
            added = {command.request.request_id for command in self._commands if isinstance(command, Add)}
            aborts: list[Command] = []
            rest: list[Command] = []
            for command in self._commands:
                is_ready = isinstance(command, Abort) and command.request_id not in added
                (aborts if is_ready else rest).append(command)
            self._commands = rest
            self._num_aborts -= len(aborts)
        return aborts

    def wait(self, until_ns: int | None) -> None:
        """Sleep until there is a command or a nudge, the inbox is closed, or the clock has reached `until_ns` (None: no limit).

        The clock is read once: one that is moved by hand does not wake a sleeper. A spurious return is harmless.
        """
        timeout_s = None if until_ns is None else max(0, until_ns - self._clock.now_ns()) / 1e9
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._is_closed or self._is_nudged, timeout_s)
            self._is_nudged = False

    def close(self) -> list[Command]:
        """Refuse commands from now on; return those that nobody has polled. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._take_all()

    @property
    def is_empty(self) -> bool:
        return not self._commands

    def _take_all(self) -> list[Command]:
        commands, self._commands, self._num_aborts = self._commands, [], 0
        return commands


def refused_chunk(request: Request, reason: RejectReason, now_ns: int) -> OutputChunk:
    """The one chunk that the client gets."""
    chunk = OutputChunk(request.request_id, "", (), (), now_ns)
    chunk.finish_reason, chunk.reject_reason = FinishReason.REJECTED, reason.value
    chunk.detail = SHUTTING_DOWN if reason is RejectReason.DRAINING else "the engine is not running"
    return chunk


def refused_stats(request: Request, reason: RejectReason, now_ns: int) -> RequestStats:
    """What observers hear of it."""
    return RequestStats(
        request_id=request.request_id,
        tenant=request.tenant,
        arrival_ns=request.arrival_ns,
        first_scheduled_ns=None,
        first_token_ns=None,
        ended_ns=now_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=0,
        num_generated_tokens=0,
        num_preemptions=0,
        finish_reason=FinishReason.REJECTED,
        reject_reason=reason.value,
    )


def _settled(read: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """Numbers that another thread writes, read until they are the same twice, or three times at most."""
    numbers = read()
    for _ in range(2):
        if (again := read()) == numbers:
            break
        numbers = again
    return numbers


def _added(commands: Iterable[Command]) -> list[Request]:
    return [command.request for command in commands if isinstance(command, Add)]
