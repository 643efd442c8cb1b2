"""Resources: the memory and the threads of one machine, which all models of a deployment share.

The factory asks here before it loads a model, and when it makes an engine anew. Nothing is loaded or computed here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.config.units import format_size
from penstock.deploy.sizing import RESERVE_BYTES
from penstock.machine import Cores, available_memory_bytes, claim_cpus, find_cores, usable_cpus
from penstock.types.errors import ConfigError, NotEnoughMemory, counted

if TYPE_CHECKING:
    import socket

    from penstock.backends.native._native import Account, Team

_log = logging.getLogger(__name__)

CONTESTED_NS = 1_000_000_000
"""A machine is contested so long after another model had or wanted it."""
SHARED_STEP_NS = 20_000_000
"""Longest step of a model on a contested machine, if it can be as short: others wait so long for their next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """The bytes of the machine's memory that one model may come to use. The KV cache takes its part as it fills."""

    num_weight_bytes: int = 0
    num_kv_bytes: int = 0
    num_tier_bytes: int = 0
    num_step_bytes: int = 0
    num_adapter_bytes: int = 0
    """Adapters beside the KV cache, ready for it."""
    num_reserve_bytes: int = RESERVE_BYTES

    @property
    def by_part(self) -> dict[str, int]:
        """Bytes by the part of a model that takes them."""
        return {
            "weights": self.num_weight_bytes,
            "kv": self.num_kv_bytes,
            "tier": self.num_tier_bytes,
            "step": self.num_step_bytes,
            "adapters": self.num_adapter_bytes,
            "reserve": self.num_reserve_bytes,
        }

    @property
    def num_bytes(self) -> int:
        model_bytes = self.num_weight_bytes + self.num_kv_bytes + self.num_tier_bytes + self.num_step_bytes
        return model_bytes + self.num_adapter_bytes + self.num_reserve_bytes

    def __str__(self) -> str:
        parts = (
            ("weights", self.num_weight_bytes),
            ("KV cache", self.num_kv_bytes),
            ("tier", self.num_tier_bytes),
            ("experts of a step", self.num_step_bytes),
            ("adapters", self.num_adapter_bytes),
            ("reserve", self.num_reserve_bytes),
        )
        return f"{format_size(self.num_bytes)} ({', '.join(f'{name} {format_size(size)}' for name, size in parts if size)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as far as one model's blueprint depends on it."""

    available_bytes: int
    """Memory that is free for the model."""
    total_bytes: int
    """Memory for all models of the deployment."""
    num_models: int
    """Models that share `total_bytes`."""
    cores: Cores


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A share of a model whose engine is gone, but for a step that has not come back."""

    name: str
    share: MemoryShare
    is_held: Callable[[], bool]


class MemoryBudget:
    """The memory that the machine has for the models of one deployment, and each model's share of it. Thread-safe.

    The system's own account is not enough: it counts a KV cache that has not filled yet as free.
    """

    def __init__(self, read_available_bytes: Callable[[], int] | None = None, *, limit_bytes: int | None = None) -> None:
        """`read_available_bytes` tells what is free now; by default the machine is asked. `limit_bytes`: of all models
        together; None: what is free before the first.
        """
        self._read_available_bytes = read_available_bytes or available_memory_bytes
        self._limit_bytes = limit_bytes
        self._total_bytes: int | None = None
        """Bytes for all models, known when the first one asks."""
        self._shares: dict[str, MemoryShare] = {}
        self._stuck: list[_Stuck] = []
        """Shares that nobody uses, and that are not free."""
        self._lock = threading.RLock()  # `take` asks what is left

    def available_bytes(self, name: str, *, is_restart: bool = False) -> int:
        """Bytes that the model of this name may have: free now, and in no other model's share.

        `is_restart`: beside what its own stuck steps hold, as the KV cache of theirs will fill no more.
        """
        left_bytes = self.left_bytes(name) + (self.stuck_bytes(name) if is_restart else 0)
        return max(0, min(self._read_available_bytes(), left_bytes))

    def total_bytes(self) -> int:
        """Bytes for all models together."""
        if self._total_bytes is None:
            free_bytes = self._read_available_bytes()
            self._total_bytes = free_bytes if self._limit_bytes is None else min(free_bytes, self._limit_bytes)
        return self._total_bytes

    def left_bytes(self, name: str = "") -> int:
        """Bytes of the total that no model holds, but for the one of this name, and no stuck step."""
        with self._lock:
            free_bytes = self.total_bytes() - self.stuck_bytes()
            return free_bytes - sum(share.num_bytes for other, share in self._shares.items() if other != name)

    def stuck_bytes(self, name: str | None = None) -> int:
        """Bytes that steps hold which have not come back: those of the model of this name, or None: all."""
        with self._lock:
            back = [one for one in self._stuck if not one.is_held()]
            self._stuck = [one for one in self._stuck if one not in back]
            for one in back:
                _log.warning("a step of %s has come back: %s are free again", one.name, format_size(one.share.num_bytes))
            return sum(one.share.num_bytes for one in self._stuck if name in (None, one.name))

    def share(self, name: str) -> MemoryShare | None:
        """A model's share; None if it has none."""
        return self._shares.get(name)

    def take(self, name: str, share: MemoryShare) -> None:
        """Set a model's share, in the place of the one it had. Raises NotEnoughMemory if it does not fit beside the others."""
        with self._lock:
            left_bytes = self.left_bytes(name)
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

    def hold_stuck(self, name: str, is_held: Callable[[], bool]) -> None:
        """Count a model's share once more while `is_held`: its engine is given up, and a step of it has not come back.

        `is_held` is asked whenever somebody asks for memory, by any thread, and must not ask for memory itself.
        """
        with self._lock:
            share = self._shares.get(name)
            if share is not None:
                self._stuck.append(_Stuck(name, share, is_held))
                _log.error("a step of %s has not come back: it holds %s until it does, or the process ends", name, share)

    def told_beside(self, name: str, error: NotEnoughMemory) -> NotEnoughMemory:
        """The error with what other models hold, if there are any."""
        with self._lock:
            holders = [f"{other} holds {share}" for other, share in self._shares.items() if other != name]
            holders += [f"a step of {one.name} that has not come back holds {one.share}" for one in self._stuck]
        held = ", ".join(holders)
        return NotEnoughMemory(f"{error.message} Of the machine's memory {held}.", remedy=error.remedy) if held else error


class Resources:
    """The memory budget of a deployment, and the threads that its models on the CPU share. Thread-safe."""

    def __init__(self, memory: MemoryBudget | None = None, *, num_models: int = 1) -> None:
        """`num_models`: models of the deployment, loaded or not."""
        self.memory = memory or MemoryBudget()
        self.num_models = num_models
        self._team: Team | None = None
        """The team for executors that are made from now on."""
        self._claims: list[socket.socket] = []
        """The claims that keep other servers from the CPUs to which threads are pinned."""
        self._seats: dict[str, tuple[Team, Account]] = {}
        """The team of each model's last executor, and the account on which the model has its turns there."""
        self._lock = threading.Lock()

    @cached_property
    def cores(self) -> Cores:
        """The cores as they were when first asked for: a quota that changes later changes no team that models share."""
        return find_cores()

    def machine(self, name: str) -> Machine:
        """Return what the model of this name can have now."""
        return Machine(
            available_bytes=self.memory.available_bytes(name),
            total_bytes=self.memory.total_bytes(),
            num_models=self.num_models,
            cores=self.cores,
        )

    def team(self, name: str, num_threads: int, cpus: Sequence[int] = (), *, share: float = 1.0) -> tuple[Team, Account]:
        """The team that the native executors of all models share, made when the first one asks, and the model's account there.

        Its threads stay on `cpus`, one on each; empty: on any. Models that all want the machine have time on it in the ratio of
        their `share`s. Executors of a model have one account. Raises ConfigError if the team has another number of threads, if
        the system gives none, if another server has pinned its own to one of the cores, or if the share is none.
        """
        from penstock.backends.native._native import Account, Team

        with self._lock:
            if self._team is None:
                claims = self._claims or _claimed(cpus)  # a team after one that is stuck has the same CPUs
                try:
                    self._team = Team(num_threads, cpus)
                except RuntimeError as error:
                    for claim in claims:
                        claim.close()
                    self._claims = []
                    raise ConfigError(
                        f"The system does not give {counted(num_threads, 'thread')}: {error}.",
                        remedy="Set --threads lower, leave out --pin-threads, or raise the limit of threads (`ulimit -u`, or a "
                        "container's limit of pids).",
                    ) from None
                self._claims = claims
                _warn_of_too_many(num_threads)
            if self._team.num_threads != num_threads:
                raise ConfigError(
                    f"threads is {num_threads}, and the models of this deployment share {self._team.num_threads} threads.",
                    remedy="Set the same --threads for all of them.",
                )
            seat = self._seats.get(name)
            if seat is None or seat[0] is not self._team:
                try:
                    seat = self._seats[name] = self._team, Account(share)
                except ValueError as error:
                    raise ConfigError(f"machine_share is {share:g}: {error}.", remedy="Set it between these.") from None
            return seat

    def most_step_ns(self, name: str) -> int:
        """How long a step of the model should take at most, since other models want the machine now; 0: as long as it likes.

        A GPU's steps, and those of the reference backend, take no turns.
        """
        seat = self._seats.get(name)
        return SHARED_STEP_NS if seat is not None and seat[0].is_contested(seat[1], CONTESTED_NS) else 0

    def machine_ns(self, name: str) -> int:
        """The time for which the model had the machine, in nanoseconds. It begins anew with a team."""
        seat = self._seats.get(name)
        return 0 if seat is None else seat[1].used_ns

    def leave_team(self, name: str) -> None:
        """Have the next executors use another team than this model's last one, which a step that never ends may hold.

        Other models wait for that team until their own steps time out; then they are made anew, on the same new team.
        """
        with self._lock:
            seat = self._seats.pop(name, None)
            if seat is not None and seat[0] is self._team:
                self._team = None


def _warn_of_too_many(num_threads: int) -> None:
    if num_threads > (num_cpus := usable_cpus()):
        _log.warning(
            "%s compute, and this process may use %s: every step waits for those that have no CPU. Leave --threads "
            "(PENSTOCK_THREADS) unset, or set it to %d at most",
            counted(num_threads, "thread"),
            counted(num_cpus, "CPU"),
            num_cpus,
        )


def _claimed(cpus: Sequence[int]) -> list[socket.socket]:
    try:
        return claim_cpus(cpus)
    except OSError as error:
        raise ConfigError(
            f"pin_threads is set, and another server has pinned its threads to a core of the CPUs {', '.join(map(str, cpus))}: "
            f"{error.strerror}.",
            remedy="Give each server CPUs of its own (taskset, or a container's cpuset), or leave out --pin-threads.",
        ) from None
