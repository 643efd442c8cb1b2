"""Commands on their way to an engine's thread."""

from __future__ import annotations

import threading

from penstock.clock import Clock
from penstock.types.events import Abort, Add, Command


class Inbox:
    """A queue of commands from any thread to the engine thread.

    Every command is either handed out exactly once or was refused by `put`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._commands: list[Command] = []
        self._num_aborts = 0
        self._is_closed = False
        self._is_nudged = False

    def put(self, *commands: Command) -> bool:
        """Append commands and wake the engine; never blocks. Return False, and append none, if the inbox is closed."""
        num_aborts = sum([isinstance(command, Abort) for command in commands])
        with self._changed:
            if self._is_closed:
                return False
            self._commands += commands
            self._num_aborts += num_aborts
            self._changed.notify_all()
        return True

    def nudge(self) -> None:
        """Wake the engine thread. If it is awake, its next sleep is skipped."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify_all()

    def poll(self) -> list[Command]:
        if not self._commands:  # Read without the lock: a command that comes just now is found by the next poll.
            return []
        with self._changed:
            return self._take_all()

    def poll_aborts(self) -> list[Command]:
        """Take only the aborts out of the queue. An abort whose `Add` is still queued stays."""
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
        """Sleep until there is a command or a `nudge`, the inbox is closed, or the clock reaches `until_ns` (None: no
        limit)."""
        timeout_s = None if until_ns is None else max(0, until_ns - self._clock.now_ns()) / 1e9
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._is_closed or self._is_nudged, timeout_s)
            self._is_nudged = False

    def close(self) -> list[Command]:
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
