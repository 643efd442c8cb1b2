"""A model that clients may ask for, loaded or not: its names, its state, and everything that outlives a load.

Made before anything is loaded: importing this costs nothing. The deployment's keeper alone writes the state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.models.facts import ModelFacts as ModelFacts  # `serve` knows files by their facts alone
from penstock.types.errors import ModelAway, PenstockError

if TYPE_CHECKING:
    from penstock.deploy.adapters import Adapters
    from penstock.deploy.resources import MemoryShare
    from penstock.deploy.running import ModelInfo, RunningModel
    from penstock.obs.metrics import Metrics, Residence

_log = logging.getLogger(__name__)


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"
    """It takes no new users, and is closed when the last one has gone."""
    FAILED = "failed"
    """The last load failed. A request after a while tries again."""


class UnloadReason(StrEnum):
    IDLE = "idle"
    ROOM = "room"
    """Another model needed its room."""
    ASKED = "asked"
    """An admin unloaded it."""
    FAILED = "failed"
    """Its engine failed and could not be built anew."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class ServedModel:
    names: tuple[str, ...]
    """Names that clients may use, at least one. Answers have the first."""
    aliases: tuple[str, ...] = ()
    """Further names, which are not listed."""
    adapters: Adapters | None = None
    """Its adapters. Their names outlive a load."""
    metrics: Metrics
    """Counts go on when it is loaded again."""
    load: Callable[[], RunningModel]
    """Loads it and takes its share of the memory. Raises PenstockError."""
    plan: Callable[[], MemoryShare]
    """Returns its share of the memory, and loads nothing. Raises PenstockError."""
    read_machine_ns: Callable[[], int] = int
    """Returns for how long it has had the machine."""
    idle_unload_ns: int | None = None
    """Time without users after which it leaves."""
    read_facts: Callable[[], ModelFacts] | None = None
    """Reads the headers of its files. Raises PenstockError."""
    is_kept: bool = False
    """It never leaves for another model."""
    is_fixed: bool = False
    """It is never unloaded: it is on a GPU, or its deployment did not load it."""
    path: Path | None = None
    """Its entry in the folder of models, if it is from there."""
    max_waiting: int = 1024
    """Requests that may wait for it to be loaded."""

    # Written by the keeper.
    state: ModelState = ModelState.UNLOADED
    running: RunningModel | None = None
    """Not None while LOADED or LEAVING."""
    info: ModelInfo | None = None
    """Facts of the last load."""
    share: MemoryShare | None = None
    """Memory that it has, had or would have, if that is known."""
    kept_idle_ns: int | None = None
    """The idle time that a client set in place of `idle_unload_ns`; -1: it stays."""
    failure: str = ""
    failed_ns: int = 0
    loaded_ns: int = 0
    load_ns: int = 0
    """Time that the last load took; 0: unknown."""
    num_loads: int = 0
    num_load_failures: int = 0
    total_load_ns: int = 0
    """Time of all successful loads."""
    num_unloads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UnloadReason, 0))

    # Written by `look`.
    is_gone: bool = False
    """It was removed from the folder of models."""

    # Written by the waiting requests, on the event loop.
    num_waiting: int = 0
    num_waiting_bytes: int = 0
    """Size of their bodies."""

    def __post_init__(self) -> None:
        self.metrics.read_residence = self._residence

    def _residence(self) -> Residence:
        from penstock.obs.metrics import Residence

        return Residence(
            state=self.state.value,
            states=tuple(state.value for state in ModelState),
            num_waiting=self.num_waiting,
            num_loads=self.num_loads,
            num_load_failures=self.num_load_failures,
            load_ns=self.total_load_ns,
            num_unloads=self.num_unloads,
            memory_bytes=self.held_bytes,
            machine_ns=self.read_machine_ns(),
        )

    @property
    def unload_after_ns(self) -> int | None:
        """Time without users after which it leaves, or None."""
        kept_ns = self.idle_unload_ns if self.kept_idle_ns is None or self.idle_unload_ns is None else self.kept_idle_ns
        return None if kept_ns is not None and kept_ns < 0 else kept_ns

    @property
    def num_bytes(self) -> int:
        """Bytes of `share`; 0 if unknown."""
        return 0 if self.share is None else self.share.num_bytes

    @property
    def held_bytes(self) -> dict[str, int]:
        """The memory that it has now, by part."""
        return {} if self.running is None or self.share is None else self.share.by_part

    @property
    def name(self) -> str:
        return self.names[0]

    def facts(self) -> ModelFacts:
        """Read the facts of the model's files. Empty if that fails: a load will say why. Waits for the disk."""

        try:
            return ModelFacts() if self.read_facts is None else self.read_facts()
        except (PenstockError, OSError) as error:
            _log.warning("the files of %s can't be described: %s", self.name, error)
            return ModelFacts()

    @property
    def is_there(self) -> bool:
        """It is loaded, or its file was there at the last look."""
        return not self.is_gone or self.state in (ModelState.LOADED, ModelState.LOADING)

    def look(self) -> None:
        """Ask the disk whether it is still in the folder of models."""
        if self.path is not None:
            self.is_gone = not (self.path.is_file() or (self.path / "config.json").is_file())

    def answerer(self) -> RunningModel:
        """Return the running model. Raises `ModelAway` if it takes no new users."""
        running = self.running
        if running is None or self.state is not ModelState.LOADED or self.is_broken:
            raise ModelAway(self.name)
        return running

    @property
    def is_broken(self) -> bool:
        """Its engine failed and can't be built anew: only another load helps."""
        return not self.is_fixed and self.running is not None and self.running.is_broken
