"""A running model: the parts that answer requests, and the count of its users.

The server, the Python API and the terminal commands use it. A model that is being unloaded takes no new users, and is closed
after the last one, so that running requests can end.
"""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.admission.door import Admission
from penstock.clock import Clock, WallClock
from penstock.deploy.off_loop import OffLoop
from penstock.engine.bridge import Bridge
from penstock.engine.supervisor import Supervisor
from penstock.engine.thread import Engine, EngineState
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.text.dialects import PLAIN, Dialect
from penstock.text.grammar import Grammars
from penstock.text.tokenizer import Tokenizer
from penstock.types.encoder import EncoderInfo
from penstock.types.errors import ModelAway
from penstock.types.sampling import SamplingDefaults

if TYPE_CHECKING:
    from penstock.deploy.adapters import Adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a model that clients may know. Requests are checked against them. The names are those of `ServedModel`."""

    served_names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    root: str
    """The source: a catalogue name or a path."""
    fingerprint: str
    created_unix_s: int
    max_model_len: int
    """Tokens of the longest prompt + output that model, settings and KV cache allow. For an encoder: the longest text."""
    vocab_size: int
    """Rows of the logits: token ids lie in [0, vocab_size)."""
    eos_token_ids: tuple[int, ...]
    is_priority_scheduled: bool = False
    """The waiting order looks at `Request.priority`. Otherwise a priority is refused."""
    encoder: EncoderInfo | None = None
    """Facts of a model that answers with numbers. None: it writes text."""
    max_step_tokens: int = 512
    """Tokens of one step at most. A list of texts enters the engine a few steps' worth at a time."""
    max_beams: int | None = None
    """Largest width of a beam search. None: the scheduler decides."""
    unsupported_parameters: frozenset[str] = frozenset()
    """Names of `types.sampling.PARAMETERS` that the backend does not compute. Requests that set them are refused."""

    @property
    def name(self) -> str:
        return self.served_names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Functions that supply seeds, ids and times. Tests replace them to make answers repeatable."""

    draw_seed: Callable[[], int] = lambda: secrets.randbits(64)
    new_request_id: Callable[[], str] = lambda: uuid.uuid4().hex
    unix_time_s: Callable[[], int] = lambda: int(time.time())


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class RunningModel:
    engine: Engine | Supervisor
    """Started; its sink is `bridge.deliver`."""
    bridge: Bridge
    """Attached to `engine`."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None: chat requests are refused."""
    grammars: Grammars
    admission: Admission
    metrics: Metrics
    model: ModelInfo
    clock: Clock = field(default_factory=WallClock)
    """The engine's clock, for `arrival_ns` and deadlines."""
    dialect: Dialect = PLAIN
    """How the model writes tool calls and reasoning."""
    slo_itl_ns: int | None = None
    """The server's target for the inter-token latency."""
    prefix_sharing: str | None = None
    """The setting for sharing cached prefixes. None: the API keys decide."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sources: Sources = field(default_factory=Sources)
    journal: Journal | None = None
    """None: requests are not explained."""
    adapters: Adapters | None = None
    release: Callable[[], None] = lambda: None
    """Called after the engine is closed, to free everything else, such as the file of the disk tier."""
    on_unused: Callable[[], None] = lambda: None
    """Called when the last user has ended, on any thread."""
    off_loop: OffLoop = field(init=False)
    used_ns: int = field(init=False)
    """Time of the last begin or end of a use, or of the load."""
    num_uses: int = field(default=0, init=False)
    num_users: int = field(default=0, init=False)
    _has_special_marks: bool | None = field(default=None, init=False)
    _is_leaving: bool = field(default=False, init=False)
    _users_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.off_loop = OffLoop(self.metrics.count_rejected)
        self.used_ns = self.clock.now_ns()

    @property
    def has_special_marks(self) -> bool:
        """Whether marks of the dialect are special tokens. An answer's text must keep these, so that they can be parsed."""
        if self._has_special_marks is None:
            self._has_special_marks = any(self._is_special(mark) for mark in self.dialect.marks)
        return self._has_special_marks

    def _is_special(self, mark: str) -> bool:
        token_ids = self.tokenizer.encode(mark, add_special_tokens=False)
        return len(token_ids) == 1 and self.tokenizer.is_special(token_ids[0])

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def is_broken(self) -> bool:
        """Whether the engine failed for good, so that the model must be loaded again."""
        return self.engine.state is EngineState.FAILED

    @contextmanager
    def using(self) -> Iterator[None]:
        """Count as a user until the block ends. Raises `ModelAway` if the model is being unloaded. Thread-safe."""
        self.begin_use()
        try:
            yield
        finally:
            self.end_use()

    def begin_use(self, *, is_user: bool = False) -> None:
        """Count as a user until `end_use`. Raises `ModelAway` while unloading, unless the caller `is_user` already."""
        with self._users_lock:
            if self._is_leaving and not is_user:
                raise ModelAway(self.name)
            self.num_users += 1
            self.num_uses += 1
            self.used_ns = self.clock.now_ns()

    def end_use(self) -> None:
        with self._users_lock:
            self.num_users -= 1
            self.used_ns = self.clock.now_ns()
            is_unused = not self.num_users
        if is_unused:
            self.on_unused()

    def leave(self) -> None:
        """Refuse new users from now on. Idempotent."""
        with self._users_lock:
            self._is_leaving = True

    def close(self, timeout_s: float = 0.0) -> bool:
        """Drain for up to `timeout_s`, abort the rest, free everything. Returns whether nothing was aborted. Idempotent."""
        try:
            return self.engine.close(timeout_s)
        finally:
            self.release()
            self.off_loop.close()
