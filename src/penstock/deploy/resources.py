"""The memory and the threads of one machine, which all models of a deployment share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.config.units import format_size
from penstock.deploy.sizing import RESERVE_BYTES
from penstock.machine import Cores, available_memory_bytes, claim_cpus, find_cores, private_bytes, usable_cpus
from penstock.sched.background import serve_people
from penstock.sched.policies.base import CONTESTED_STEP_NS, CONTESTED_WINDOW_NS
from penstock.types.errors import ConfigError, NotEnoughFreeMemory, NotEnoughMemory, counted
from penstock.types.stats import EngineLoad

if TYPE_CHECKING:
    import socket

    from penstock.backends.native._native import Account, Team

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """The most memory that one model may use, by part. Its KV cache takes memory as it fills."""

    num_weight_bytes: int = 0
    num_kv_bytes: int = 0
    num_tier_bytes: int = 0
    num_step_bytes: int = 0
    """Bytes for a step's experts, and for activations that the reserve does not cover."""
    num_adapter_bytes: int = 0
    """Bytes for adapters outside of the KV cache."""
    num_draft_bytes: int = 0
    """Bytes for the small model of --speculation-model."""
    num_reserve_bytes: int = RESERVE_BYTES

    @property
    def by_part(self) -> dict[str, int]:
        """Bytes of each part of the model, such as `weights`."""
        return {
            "weights": self.num_weight_bytes,
            "kv": self.num_kv_bytes,
            "tier": self.num_tier_bytes,
            "step": self.num_step_bytes,
            "adapters": self.num_adapter_bytes,
            "draft": self.num_draft_bytes,
            "reserve": self.num_reserve_bytes,
        }

    @property
    def num_bytes(self) -> int:
        return sum(self.by_part.values())

    def __str__(self) -> str:
        words = {"kv": "KV cache", "step": "largest step", "draft": "draft model"}
        parts = ", ".join(f"{words.get(name, name)} {format_size(size)}" for name, size in self.by_part.items() if size)
        return f"{format_size(self.num_bytes)} ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as one model may use it: the memory and the cores that its blueprint depends on."""

    available_bytes: int
    """Memory that is free for the model."""
    total_bytes: int
    """Memory for all models of the deployment."""
    num_models: int
    """Models that share `total_bytes`."""
    cores: Cores
    beside_bytes: int = 0
    """The part of `total_bytes` that the others of these models take, without KV caches that are still to be sized."""


@dataclass(frozen=True, slots=True)
class _Stuck:
    """Memory that a stuck step of an abandoned engine, or the load of an engine for an unloaded model, still uses."""

    name: str
    share: MemoryShare
    is_held: Callable[[], bool]


class MemoryBudget:
    """The machine's memory for the models of one deployment, and each model's share of it. Thread-safe.

    The free memory that the system reports is too much, because it includes the part of each KV cache that is not filled yet.
    """

    def __init__(
        self,
        read_available_bytes: Callable[[], int] | None = None,
        *,
        limit_bytes: int | None = None,
        read_private_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`read_available_bytes` returns the free memory, `read_private_bytes` the memory of this process.

        All models together may use what is free when the budget is first used, and at most `limit_bytes` unless that is None.
        """
        self._read_available_bytes = read_available_bytes or available_memory_bytes
        self._read_private_bytes = read_private_bytes or private_bytes
        self._limit_bytes = limit_bytes
        self._total_bytes: int | None = None
        """Bytes for all models. Read at first use."""
        self._first_private_bytes = 0
        """Bytes that the process took at first use."""
        self._shares: dict[str, MemoryShare] = {}
        self._stuck: list[_Stuck] = []
        self._lock = threading.RLock()  # `take` calls `left_bytes`

    def available_bytes(self, name: str, *, is_restart: bool = False) -> int:
        """Return the bytes that the model `name` may use: free now, and reserved neither for other models nor for stuck steps.

        `is_restart`: reserve nothing for the model's own stuck steps. The memory that they use is not free anyway, and
        they will not use more.

        An earlier load leaves memory of the process behind, such as the interpreter's. It counts as free, because the model's
        reserve is for it, too.
        """
        left_bytes = self.left_bytes(name)
        left_behind_bytes = self._read_private_bytes() - self._first_private_bytes - (self.total_bytes() - left_bytes)
        free_bytes = self._read_available_bytes() + min(max(0, left_behind_bytes), RESERVE_BYTES)
        return max(0, min(free_bytes, left_bytes + (self.stuck_bytes(name) if is_restart else 0)))

    def total_bytes(self) -> int:
        if self._total_bytes is None:
            free_bytes, self._first_private_bytes = self._read_available_bytes(), self._read_private_bytes()
            self._total_bytes = free_bytes if self._limit_bytes is None else min(free_bytes, self._limit_bytes)
        return self._total_bytes

    def left_bytes(self, name: str = "") -> int:
        """Return the budget minus the shares of all models but `name`, and minus the memory of stuck steps."""
        with self._lock:
            free_bytes = self.total_bytes() - self.stuck_bytes()
            return free_bytes - sum(share.num_bytes for other, share in self._shares.items() if other != name)

    def stuck_bytes(self, name: str | None = None) -> int:
        """Return the bytes of steps that never returned, of the model `name` or of all models."""
        with self._lock:
            back = [one for one in self._stuck if not one.is_held()]
            self._stuck = [one for one in self._stuck if one not in back]
            for one in back:
                _log.warning("a step or load of %s has come back: %s are free", one.name, format_size(one.share.num_bytes))
            return sum(one.share.num_bytes for one in self._stuck if name in (None, one.name))

    def share(self, name: str) -> MemoryShare | None:
        return self._shares.get(name)

    def shares(self) -> dict[str, MemoryShare]:
        """Return a copy of all shares, by model."""
        return self._shares.copy()

    def take(self, name: str, share: MemoryShare) -> None:
        """Reserve a model's share, in place of its earlier one. Raises NotEnoughMemory if it does not fit beside the others."""
        with self._lock:
            left_bytes = self.left_bytes(name)
            if share.num_bytes > left_bytes:
                raise NotEnoughFreeMemory(
                    f"{name} takes {share}, and {format_size(max(0, left_bytes))} are left.",
                    instead="Lower --kv-cache-memory, take a smaller model",
                )
            self._shares[name] = share

    def give_back(self, name: str) -> None:
        """Free a model's share, if it has one."""
        with self._lock:
            self._shares.pop(name, None)

    def hold_stuck(self, name: str, is_held: Callable[[], bool], share: MemoryShare | None = None) -> None:
        """Reserve a model's share once more while `is_held()` is true, for a stuck step of its old engine, or a load.

        `share`: the part that the step uses, if not all of it. Any thread may call `is_held`. It must not call this object.
        """
        with self._lock:
            share = share or self._shares.get(name)
            if share is not None:
                self._stuck.append(_Stuck(name, share, is_held))
                _log.error("a step or load of %s has not come back; until it does, it holds %s", name, share)

    def explained(self, name: str, error: NotEnoughMemory) -> NotEnoughMemory:
        """Return the error with the memory that other models and stuck steps hold, and the limit if that is what binds."""
        with self._lock:
            holders = [f"{other} holds {share}" for other, share in self._shares.items() if other != name]
            holders += [f"a step or load of {one.name} that has not come back holds {one.share}" for one in self._stuck]
        message, remedy = error.message, error.remedy
        if holders:
            message += f" Of the machine's memory {', '.join(holders)}."
        limit_bytes = self._limit_bytes if self._read_available_bytes() > self.left_bytes(name) else None
        if limit_bytes is not None and isinstance(error, NotEnoughFreeMemory):
            limit, beside = format_size(limit_bytes), format_size(RESERVE_BYTES)
            message += f" --memory is {limit}, and a model takes {beside} beside its weights and KV cache."
            remedy = f"{error.instead}, or raise --memory."
        return NotEnoughMemory(message, remedy=remedy)


class Resources:
    """The memory budget of a deployment, and the threads that its models on the CPU share. Thread-safe."""

    def __init__(self, memory: MemoryBudget | None = None, *, num_models: int = 1) -> None:
        """`num_models`: models of the deployment that are likely to be loaded at once."""
        self.memory = memory or MemoryBudget()
        self.num_models = num_models
        self.fixed_bytes: dict[str, int] = {}
        """By name, for models known at the start: memory, including the KV cache only if `kv_cache_memory` sets its size."""
        self._team: Team | None = None
        """The threads for new executors."""
        self._claims: list[socket.socket] = []
        """Bound sockets that stop other servers from pinning threads to the same CPUs."""
        self._seats: dict[str, tuple[Team, Account]] = {}
        """By model: the team of its last executor, and its account of compute time there."""
        self.loads: dict[str, Callable[[], EngineLoad]] = {}
        """By model: how busy its engine is."""
        self._lock = threading.Lock()

    @cached_property
    def cores(self) -> Cores:
        """The cores that the process may use. Read only once, because all models share one team of threads."""
        return find_cores()

    def machine(self, name: str) -> Machine:
        """Return the memory and the cores that the model can have now."""
        others = sorted([num_bytes for other, num_bytes in self.fixed_bytes.items() if other != name], reverse=True)
        return Machine(
            available_bytes=self.memory.available_bytes(name),
            total_bytes=self.memory.total_bytes(),
            num_models=self.num_models,
            cores=self.cores,
            beside_bytes=sum(others[: self.num_models - 1]),
        )

    def unfilled_bytes(self) -> int:
        """Return the memory that the models' empty KV blocks will still take. Never waits."""
        unfilled_bytes = 0
        for name, share in self.memory.shares().items():
            load = self.loads.get(name, EngineLoad)()  # of a model that loads: no block is filled
            num_filled = load.num_blocks_total - load.num_blocks_free
            unfilled_bytes += share.num_kv_bytes - share.num_kv_bytes * num_filled // max(1, load.num_blocks_total)
        return unfilled_bytes

    def team(self, name: str, num_threads: int, cpus: Sequence[int] = (), *, share: float = 1.0) -> tuple[Team, Account]:
        """Return the thread team that all models' native executors share, and the model's account of compute time there.

        `cpus`: pin each thread to one of these; empty: do not pin. Busy models get time in the ratio of their `share`s. Raises
        ConfigError if the team has another number of threads, the system refuses them, another server has pinned threads to one
        of the cores, or the share is out of range.
        """
        from penstock.backends.native._native import Account, Team

        with self._lock:
            if self._team is None:
                claims = self._claims or _claimed(cpus)  # a team that follows a stuck one has the same CPUs
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
        """Return the time limit of a step, so that other models get their turn on the threads, or 0 for no limit.

        Only native models share threads.
        """
        seat = self._seats.get(name)
        is_contested = seat is not None and seat[0].is_contested(seat[1], CONTESTED_WINDOW_NS)
        return CONTESTED_STEP_NS if is_contested else 0

    def others_serve(self, name: str, now_ns: int) -> bool:
        """Return whether other models serve people on the threads of this one."""
        seats, loads = self._seats.copy(), self.loads.copy()
        team, _ = seats.pop(name, (None, None))
        beside = [loads[other] for other, (shared, _) in seats.items() if shared is team and other in loads]
        return serve_people([load() for load in beside], now_ns)

    def machine_ns(self, name: str) -> int:
        """Return how long the model's steps have computed on the present thread team, in nanoseconds."""
        seat = self._seats.get(name)
        return 0 if seat is None else seat[1].used_ns

    def leave_team(self, name: str) -> None:
        """Give later executors a new thread team, because a stuck step of this model may never release the old team's threads.

        Other models wait for the old team until their own steps time out. Then their engines are rebuilt on the new team.
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
