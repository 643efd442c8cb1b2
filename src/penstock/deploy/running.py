"""The models of a server: a `ServedModel` exists while the server runs, and has a `RunningModel` while it is loaded.

Only the deployment's keeper thread writes the state of a served model. A running model that is being unloaded takes no new
users, and is closed after the last one, so that running requests can end. Importing this file is fast: it precedes a load.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clock import Clock, WallClock
from penstock.engine.state import SHUTTING_DOWN, EngineState
from penstock.models.facts import ModelFacts as ModelFacts  # `serve` knows files by their facts alone
from penstock.types.encoder import EncoderInfo
from penstock.types.errors import ModelAway, PenstockError
from penstock.types.plan import Capacity
from penstock.types.sampling import SamplingDefaults
from penstock.types.tenant_limits import UNLIMITED, TenantLimits

if TYPE_CHECKING:  # importing them would delay the loading of the first model's weights
    from penstock.admission.door import Admission
    from penstock.deploy.adapters import Adapters
    from penstock.deploy.off_loop import OffLoop
    from penstock.deploy.resources import MemoryShare
    from penstock.engine.bridge import Bridge, ServingEngine
    from penstock.obs.explain.journal import History
    from penstock.obs.metrics import Metrics, Residence
    from penstock.text.chat import ChatTemplate
    from penstock.text.control_tokens import ControlTokens
    from penstock.text.dialects import Dialect
    from penstock.text.grammar import Grammars
    from penstock.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a loaded model that clients may know, such as its longest request. Requests are checked against them."""

    served_names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    root: str
    """The source: a catalogue name or a path."""
    fingerprint: str
    created_unix_s: int
    capacity: Capacity
    """Limits of the executor. Requests that set a parameter that it does not support are refused."""
    vocab_size: int
    """Rows of the logits: token ids lie in [0, vocab_size)."""
    is_priority_scheduled: bool = False
    """The waiting order looks at `Request.priority`. Otherwise a priority is refused."""
    encoder: EncoderInfo | None = None
    """Facts of a model that answers with numbers. None: it writes text."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of KV cache, scheduling, admission and compute that are not the defaults, without paths and names."""

    @property
    def name(self) -> str:
        return self.served_names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Generators of seeds, request ids and times. Tests replace them to make answers repeatable."""

    draw_seed: Callable[[], int] = lambda: secrets.randbits(64)
    new_request_id: Callable[[], str] = lambda: uuid.uuid4().hex
    unix_time_s: Callable[[], int] = lambda: int(time.time())


@dataclass(slots=True)
class Uses:
    """How often and when a running model was used."""

    num_users: int = 0
    num_uses: int = 0
    used_ns: int = -1 << 62
    """Time of the last begin or end of a use, or of a load that these users waited for."""


@dataclass(kw_only=True, eq=False)
class RunningModel:
    engine: ServingEngine
    """Started; its sink is `bridge.deliver`."""
    bridge: Bridge
    """Attached to `engine`."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None: chat requests are refused."""
    grammars: Grammars
    dialect: Dialect
    """How the model writes tool calls and reasoning."""
    admission: Admission
    metrics: Metrics
    model: ModelInfo
    clock: Clock = field(default_factory=WallClock)
    """The engine's clock, for `arrival_ns` and deadlines."""
    slo_itl_ns: int | None = None
    """The server's target for the inter-token latency."""
    prefix_sharing: str | None = None
    """The setting for sharing cached prefixes. None: the API keys decide."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sources: Sources = field(default_factory=Sources)
    journal: History | None = None
    """None: requests are not explained."""
    adapters: Adapters | None = None
    release: Callable[[], None] = lambda: None
    """Called after the engine is closed, to free everything else, such as the file of the disk tier."""
    on_unused: Callable[[], None] = lambda: None
    """Called when the last user has ended, or the last one that is not of the background, on any thread."""
    off_loop: OffLoop = field(init=False)
    uses: Uses = field(default_factory=Uses, init=False)
    people: Uses = field(default_factory=Uses, init=False)
    """The part of `uses` that is people's: all but those for background requests."""
    _is_leaving: bool = field(default=False, init=False)
    _users_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        from penstock.deploy.off_loop import OffLoop

        self.off_loop = OffLoop(self.metrics.count_rejected)
        self.uses.used_ns = self.clock.now_ns()

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens that clients' texts in a chat must not become."""
        from penstock.text.control_tokens import ControlTokens

        source = "" if self.chat_template is None else self.chat_template.source
        return ControlTokens(self.tokenizer, source, self.dialect)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def is_broken(self) -> bool:
        """Whether the engine has failed and can't be rebuilt, so that the model must be loaded again."""
        return self.engine.state is EngineState.FAILED

    @contextmanager
    def using(self, *, is_background: bool = False) -> Iterator[None]:
        """Keep the model loaded until the block ends. Raises `ModelAway` if it is being unloaded. Thread-safe.

        `is_background`: for a background request, whose model people's requests for another one may close.
        """
        self.begin_use(is_background=is_background)
        try:
            yield
        finally:
            self.end_use(is_background=is_background)

    def begin_use(self, *, is_user: bool = False, is_background: bool = False) -> None:
        """Keep the model loaded until `end_use`. Raises `ModelAway` during an unload, unless the caller `is_user` already."""
        with self._users_lock:
            if self._is_leaving and not is_user:
                raise ModelAway(self.name)
            for uses in self._uses(is_background=is_background):
                uses.num_users += 1
                uses.num_uses += 1
                uses.used_ns = self.clock.now_ns()

    def end_use(self, *, is_background: bool = False) -> None:
        with self._users_lock:
            for uses in self._uses(is_background=is_background):
                uses.num_users -= 1
                uses.used_ns = self.clock.now_ns()
            is_unused = not uses.num_users  # people's, if this was one of theirs
        if is_unused:
            self.on_unused()

    def _uses(self, *, is_background: bool) -> Sequence[Uses]:
        return (self.uses,) if is_background else (self.uses, self.people)

    def leave(self) -> None:
        """Refuse new users of the model: from now on, `using` raises. Idempotent."""
        with self._users_lock:
            self._is_leaving = True

    def close(self, timeout_s: float = 0.0, detail: str = SHUTTING_DOWN) -> bool:
        """Let requests end for up to `timeout_s`, abort others with the `detail`, free everything. Return whether all ended.

        Idempotent.
        """
        try:
            return self.engine.close(timeout_s, detail)
        finally:
            self.release()
            self.off_loop.close()


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
    REPLACED = "replaced"
    """Another configuration has another model in its place, or none."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class ServedModel:
    names: tuple[str, ...]
    """Names that clients may use, at least one. Answers show the first."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use. Lists leave these out."""
    adapters: Adapters | None = None
    """The registry of adapters. Its names stay when the model is unloaded."""
    metrics: Metrics
    """Counters continue when the model is loaded again."""
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
    tenant_limits: TenantLimits = UNLIMITED
    """Limits of tenants that have none of their own. `max_concurrent` counts for requests that wait for the load, too."""
    end: Callable[[], None] = lambda: None
    """Called when the server has ended, and does not load the model again."""

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
    file_state: tuple[int, int] = (0, 0)
    """Time of the last change (ns) and size of `path`."""

    # Written by the waiting requests, on the event loop.
    waiting: list[tuple[tuple[str, bool] | None, int]] = field(default_factory=list)
    """The account of each request's tenant, or None for a line of a batch, and the size of the request's body in bytes."""

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
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def unload_after_ns(self) -> int | None:
        """Time without requests after which the model is unloaded, or None for never."""
        kept_ns = self.idle_unload_ns if self.kept_idle_ns is None or self.idle_unload_ns is None else self.kept_idle_ns
        return None if kept_ns is not None and kept_ns < 0 else kept_ns

    @property
    def num_bytes(self) -> int:
        """Total bytes of the model's share of memory; 0 if unknown."""
        return 0 if self.share is None else self.share.num_bytes

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of memory of each part of the model, such as `weights`. Empty unless the model is loaded."""
        return {} if self.running is None or self.share is None else self.share.by_part

    @property
    def name(self) -> str:
        return self.names[0]

    def facts(self) -> ModelFacts:
        """Read facts such as the architecture from the headers of the model's files, or return empty facts if that fails."""
        try:
            return ModelFacts() if self.read_facts is None else self.read_facts()
        except (PenstockError, OSError) as error:
            _log.warning("the files of %s can't be described: %s", self.name, error)
            return ModelFacts()

    @property
    def is_there(self) -> bool:
        """Whether requests can use the model: it is loaded, or its file existed at the last `look`."""
        return not self.is_gone or self.state in (ModelState.LOADED, ModelState.LOADING)

    def look(self) -> None:
        """Check on disk whether the model is still in the folder of models, and whether it has changed."""
        if self.path is None:
            return
        self.is_gone = not (self.path.is_file() or (self.path / "config.json").is_file())
        with suppress(OSError):
            status = self.path.stat()
            self.file_state = status.st_mtime_ns, status.st_size

    def answerer(self) -> RunningModel:
        """Return the loaded model, for a new request. Raises `ModelAway` if it is not loaded, or is being unloaded."""
        running = self.running
        if running is None or self.state is not ModelState.LOADED or self.is_broken:
            raise ModelAway(self.name)
        return running

    @property
    def is_broken(self) -> bool:
        return not self.is_fixed and self.running is not None and self.running.is_broken
