"""Resources: the memory and the threads of one machine, which all models of a deployment share.

The factory asks here before it loads a model, and when it makes an engine anew. Nothing is loaded or computed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.units import format_size
from penstock.deploy.sizing import RESERVE_BYTES
from penstock.machine import available_memory_bytes
from penstock.types.errors import ConfigError, NotEnoughMemory

if TYPE_CHECKING:
    from penstock.backends.native._native import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """The bytes of the machine's memory that one model may come to use. The KV cache takes its part as it fills."""

    num_weight_bytes: int = 0
    num_kv_bytes: int = 0
    num_tier_bytes: int = 0
    num_step_bytes: int = 0
    num_reserve_bytes: int = RESERVE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.num_weight_bytes + self.num_kv_bytes + self.num_tier_bytes + self.num_step_bytes + self.num_reserve_bytes

    def __str__(self) -> str:
        parts = (
            ("weights", self.num_weight_bytes),
            ("KV cache", self.num_kv_bytes),
            ("tier", self.num_tier_bytes),
            ("experts of a step", self.num_step_bytes),
            ("reserve", self.num_reserve_bytes),
        )
        return f"{format_size(self.num_bytes)} ({', '.join(f'{name} {format_size(size)}' for name, size in parts if size)})"


class MemoryBudget:
    """The memory that the machine has for the models of one deployment, and each model's share of it. Thread-safe.

    The system's own account is not enough: it counts a KV cache that has not filled yet as free.
    """

    def __init__(self, read_available_bytes: Callable[[], int] | None = None) -> None:
        """`read_available_bytes` tells what is free now; by default the machine is asked."""
        self._read_available_bytes = read_available_bytes or available_memory_bytes
        self._total_bytes: int | None = None
        """Free bytes before the first model."""
        self._shares: dict[str, MemoryShare] = {}
        self._lock = threading.Lock()

    def available_bytes(self, name: str) -> int:
        """Bytes that the model of this name may have: free now, and in no other model's share."""
        free_bytes = self._read_available_bytes()
        with self._lock:
            return max(0, min(free_bytes, self._left_bytes(name, free_bytes)))

    def take(self, name: str, share: MemoryShare) -> None:
        """Set a model's share, in the place of the one it had. Raises NotEnoughMemory if it does not fit beside the others."""
        free_bytes = self._read_available_bytes() if self._total_bytes is None else self._total_bytes
        with self._lock:
            left_bytes = self._left_bytes(name, free_bytes)
            if share.num_bytes > left_bytes:
                raise NotEnoughMemory(
                    f"{name} takes {share}, and {format_size(max(0, left_bytes))} are left.",
                    remedy="Lower --kv-cache-memory, take a smaller model, or free some memory.",
                )
            self._shares[name] = share

    def give_back(self, name: str) -> None:
        """Forget a model's share. One that has none is ignored."""
        with self._lock:
            self._shares.pop(name, None)

    def told_beside(self, name: str, error: NotEnoughMemory) -> NotEnoughMemory:
        """The error with what other models hold, if there are any."""
        with self._lock:
            held = ", ".join(f"{other} holds {share}" for other, share in self._shares.items() if other != name)
        return NotEnoughMemory(f"{error.message} Of the machine's memory {held}.", remedy=error.remedy) if held else error

    def _left_bytes(self, name: str, free_bytes: int) -> int:
        """Bytes of the total that no other model holds. With the lock."""
        if self._total_bytes is None:
            self._total_bytes = free_bytes
        return self._total_bytes - sum(share.num_bytes for other, share in self._shares.items() if other != name)


class Resources:
    """The memory budget of a deployment, and the threads that its models on the CPU share. Thread-safe."""

    def __init__(self, memory: MemoryBudget | None = None) -> None:
        self.memory = memory or MemoryBudget()
        self._team: Team | None = None
        """The team for executors that are made from now on."""
        self._team_of: dict[str, Team] = {}
        """The team of each model's last executor."""
        self._lock = threading.Lock()

    def team(self, name: str, num_threads: int) -> Team:
        """The team that the native executors of all models share, made when the first one asks. Their steps take turns.

        Raises ConfigError if the team has another number of threads.
        """
        from penstock.backends.native._native import Team

        with self._lock:
            if self._team is None:
                self._team = Team(num_threads)
            if self._team.num_threads != num_threads:
                raise ConfigError(
                    f"threads is {num_threads}, and the models of this deployment share {self._team.num_threads} threads.",
                    remedy="Set the same --threads for all of them.",
                )
            self._team_of[name] = self._team
            return self._team

    def leave_team(self, name: str) -> None:
        """Have the next executors use another team than this model's last one, which a step that never ends may hold.

        Other models wait for that team until their own steps time out; then they are made anew, on the same new team.
        """
        with self._lock:
            if self._team is self._team_of.pop(name, None):
                self._team = None
