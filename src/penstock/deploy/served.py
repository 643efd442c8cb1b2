"""A model that clients can name, loaded or not: its names, its state, and everything that outlives a load.

Importing this is cheap, because it is done before a model is loaded. Only the deployment's keeper writes the state.
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
    """The model takes no new users, and is closed after the last one."""
    FAILED = "failed"
    """The last load failed. A later request tries again."""


class UnloadReason(StrEnum):
    IDLE = "idle"
    ROOM = "room"
    """Another model needed the memory."""
    ASKED = "asked"
    """An admin unloaded the model."""
    FAILED = "failed"
    """The engine failed and could not be rebuilt."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class ServedModel:
    names: tuple[str, ...]
    """Names that clients may use, at least one. Answers show the first."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use. Lists leave these out."""
    adapters: Adapters | None = None
    """Names of adapters outlive a load."""
    metrics: Metrics
    """Counts go on when the model is loaded again."""
    load: Callable[[], RunningModel]
    """Loads the model and takes its share of memory. Raises PenstockError."""
    plan: Callable[[], MemoryShare]
    """Returns the model's share of memory without loading it. Raises PenstockError."""
    read_machine_ns: Callable[[], int] = int
    """Returns for how long the model's steps have used the machine."""
    idle_unload_ns: int | None = None
    """Time without users after which the model is unloaded."""
    read_facts: Callable[[], ModelFacts] | None = None
    """Reads the headers of the model's files. Raises PenstockError."""
    is_kept: bool = False
    """Never unload the model to make room for another."""
    is_fixed: bool = False
    """Never unload the model: it is on a GPU, or was loaded elsewhere."""
    path: Path | None = None
    """The model's entry in the folder of models, if it comes from there."""
    max_waiting: int = 1024
    """Most requests that wait for the model to be loaded."""

    # Written by the keeper.
    state: ModelState = ModelState.UNLOADED
    running: RunningModel | None = None
    """Not None while LOADED or LEAVING."""
    info: ModelInfo | None = None
    """Facts of the last load."""
    share: MemoryShare | None = None
    """Memory that the loaded model takes or will take, if known."""
    kept_idle_ns: int | None = None
    """Idle time that a client set in place of `idle_unload_ns`; -1: never unload."""
    failure: str = ""
    failed_ns: int = 0
    loaded_ns: int = 0
    load_ns: int = 0
    """Duration of the last load; 0: unknown."""
    num_loads: int = 0
    num_load_failures: int = 0
    total_load_ns: int = 0
    """Total duration of successful loads."""
    num_unloads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UnloadReason, 0))

    # Written by `look`.
    is_gone: bool = False
    """The model was removed from the folder of models."""

    # Written by the waiting requests, on the event loop.
    num_waiting: int = 0
    num_waiting_bytes: int = 0
    """Total size of the waiting requests' bodies."""

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
        """Time without users after which the model is unloaded, or None."""
        kept_ns = self.idle_unload_ns if self.kept_idle_ns is None or self.idle_unload_ns is None else self.kept_idle_ns
        return None if kept_ns is not None and kept_ns < 0 else kept_ns

    @property
    def num_bytes(self) -> int:
        """Bytes of `share`; 0 if unknown."""
        return 0 if self.share is None else self.share.num_bytes

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of memory that the model has now, by part."""
        return {} if self.running is None or self.share is None else self.share.by_part

    @property
    def name(self) -> str:
        return self.names[0]

    def facts(self) -> ModelFacts:
        """Read the facts of the model's files, from disk. Return empty facts if that fails: a load will report why."""

        try:
            return ModelFacts() if self.read_facts is None else self.read_facts()
        except (PenstockError, OSError) as error:
            _log.warning("the files of %s can't be described: %s", self.name, error)
            return ModelFacts()

    @property
    def is_there(self) -> bool:
        """Whether the model is loaded, or its file existed at the last `look`."""
        return not self.is_gone or self.state in (ModelState.LOADED, ModelState.LOADING)

    def look(self) -> None:
        """Check on disk whether the model is still in the folder of models."""
        if self.path is not None:
            self.is_gone = not (self.path.is_file() or (self.path / "config.json").is_file())

    def answerer(self) -> RunningModel:
        """Return the running model. Raises `ModelAway` unless it takes new users."""
        running = self.running
        if running is None or self.state is not ModelState.LOADED or self.is_broken:
            raise ModelAway(self.name)
        return running

    @property
    def is_broken(self) -> bool:
        """Whether the engine failed for good, so that the model must be loaded again."""
        return not self.is_fixed and self.running is not None and self.running.is_broken
