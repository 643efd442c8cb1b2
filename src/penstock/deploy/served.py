"""A model that clients may ask for, loaded or not: its names, its state, and all that outlives a load.

The factory makes one for each model that is named, before anything is loaded: importing this costs nothing. Its state is
written by the deployment's keeper alone; everybody reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

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
    """It takes no more users, and is closed when the last has gone."""
    FAILED = "failed"
    """The last attempt to load it failed; it is tried again when it is asked for after a while."""


class UnloadReason(StrEnum):
    IDLE = "idle"
    """Nobody has used it for a while."""
    ROOM = "room"
    """Another needed its room."""
    ASKED = "asked"
    """An admin said so."""
    FAILED = "failed"
    """Its engine failed and could not be made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts of a model's files that clients may know. Empty texts stand for what they do not say."""

    title: str = ""
    license: str = ""
    architecture: str = ""
    container: str = ""
    """`gguf` or `safetensors`."""
    quantisation: str = ""
    """The method, or the format that most of the weights have."""
    num_parameters: int | None = None
    """None where weights are packed, so that their tensors do not tell."""
    num_layers: int | None = None
    max_model_len: int | None = None
    """Positions that it was made for."""
    chat_template: str = ""
    num_bytes: int = 0
    modified_unix_s: int = 0


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class ServedModel:
    names: tuple[str, ...]
    """Names that clients may use; answers have the first. Not empty."""
    aliases: tuple[str, ...] = ()
    """Further names, which are understood but not listed."""
    adapters: Adapters | None = None
    """Names of its adapters, which it keeps when it leaves; None: it is served without."""
    metrics: Metrics
    """Its counts go on when it is loaded again."""
    load: Callable[[], RunningModel]
    """Loads it, and takes its share of the memory. Raises PenstockError."""
    plan: Callable[[], MemoryShare]
    """Says which share that will be, and loads nothing. Raises PenstockError."""
    read_machine_ns: Callable[[], int] = int
    """For how long it has had the machine, in nanoseconds; of a model without turns 0."""
    idle_unload_ns: int | None = None
    """It leaves when nobody has used it for so long; None: not for that."""
    read_card: Callable[[], ModelCard] | None = None
    """Reads what its files say, from their headers alone. Raises PenstockError. None: its deployment knows no files."""
    is_kept: bool = False
    """It never leaves for another model."""
    is_fixed: bool = False
    """It is never unloaded nor loaded anew: on a GPU, or if somebody else than its deployment loaded it."""
    path: Path | None = None
    """Its entry in the folder of models, from where it may be taken; None: it is not from there."""
    max_waiting: int = 1024
    """Requests that may wait for it to be loaded."""

    # Written by the keeper.
    state: ModelState = ModelState.UNLOADED
    running: RunningModel | None = None
    """Not None while LOADED or LEAVING."""
    info: ModelInfo | None = None
    """Facts of the last load; None: it was never loaded."""
    share: MemoryShare | None = None
    """Memory that it has, or had or would have; None: that is not known."""
    kept_idle_ns: int | None = None
    """The idle time that a client asked for instead of `idle_unload_ns`; -1: it stays; None: nobody asked."""
    failure: str = ""
    """Why the last load failed; empty: it did not."""
    failed_ns: int = 0
    loaded_ns: int = 0
    load_ns: int = 0
    """Time that the last load took; 0: it is not known."""
    num_loads: int = 0
    num_load_failures: int = 0
    total_load_ns: int = 0
    """Time of all loads that ended well."""
    num_unloads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UnloadReason, 0))
    """How often it left, by `UnloadReason`."""

    # Written by the deployment's look at the folder of models.
    is_gone: bool = False
    """Somebody has taken it from there."""

    # Written by those who wait, on the event loop.
    num_waiting: int = 0
    """Requests that wait for it to be loaded."""
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
        """It leaves when nobody has used it for so long; None: not for that."""
        kept_ns = self.idle_unload_ns if self.kept_idle_ns is None or self.idle_unload_ns is None else self.kept_idle_ns
        return None if kept_ns is not None and kept_ns < 0 else kept_ns

    @property
    def held_bytes(self) -> dict[str, int]:
        """The memory that it has now, by part; empty: it has none."""
        return {} if self.running is None or self.share is None else self.share.by_part

    @property
    def name(self) -> str:
        return self.names[0]

    def card(self) -> ModelCard:
        """Read the facts of the model's files, which are empty if they can't be read: a load tells why. Waits for the disk."""
        if self.read_card is None:
            return ModelCard()
        try:
            return self.read_card()
        except (PenstockError, OSError) as error:
            _log.warning("the files of %s can't be described: %s", self.name, error)
            return ModelCard()

    @property
    def is_there(self) -> bool:
        """It is loaded, or can be: nobody had taken it from the folder of models at the last look."""
        return not self.is_gone or self.state in (ModelState.LOADED, ModelState.LOADING)

    def look(self) -> None:
        """Ask the disk whether it is in the folder of models still."""
        if self.path is not None:
            self.is_gone = not (self.path.is_file() or (self.path / "config.json").is_file())

    def answerer(self) -> RunningModel:
        """The running model. Raises `ModelAway` if there is none for new users."""
        running = self.running
        if running is None or self.state is not ModelState.LOADED or self.is_broken:
            raise ModelAway(self.name)
        return running

    @property
    def is_broken(self) -> bool:
        """Its engine failed and can't be made anew any more, so that only another load helps."""
        return not self.is_fixed and self.running is not None and self.running.is_broken
