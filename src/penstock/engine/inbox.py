"""The commands on their way to the engine thread. Filled by any thread, emptied by the engine's; never runs a command."""

from __future__ import annotations

import threading

from penstock.clock import Clock
from penstock.types.events import Abort, Add, Command


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
