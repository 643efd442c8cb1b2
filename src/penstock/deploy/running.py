"""A running model with everything that answers for it: made by `build`, handed to the server and to the terminal commands.

Holds references only; knows neither HTTP nor how its parts were made.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.admission import Admission
from penstock.clock import Clock, WallClock
from penstock.deploy.off_loop import OffLoop
from penstock.engine.bridge import Bridge
from penstock.engine.supervisor import Supervisor
from penstock.engine.thread import Engine
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.text.grammar import Grammars
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What clients may know about the model, and what their requests are checked against."""

    served_names: tuple[str, ...]
    """Names that clients may use; the first is the one in answers. Not empty."""
    aliases: tuple[str, ...] = ()
    """Further names that are understood, but not listed: they are the same model."""
    root: str
    """Where it came from: catalogue name or path."""
    fingerprint: str
    """Changes with what the numbers of an answer depend on beside the request, and with the chat template; not with
    `max_model_len`, where an answer without a limit of its own ends."""
    created_unix_s: int
    max_model_len: int
    """Longest prompt + output of one request, in tokens: what model, settings and KV cache allow together."""
    vocab_size: int
    """Rows of the logits: token ids lie in [0, vocab_size)."""
    eos_token_ids: tuple[int, ...]
    is_priority_scheduled: bool = False
    """True if the waiting order looks at `Request.priority`; otherwise a priority is refused rather than ignored."""
    max_beams: int | None = None
    """Most of one search, as they run at once; None: the scheduler says."""

    @property
    def name(self) -> str:
        return self.served_names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request gets that does not say otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def draw_seed() -> int:
    """A 64-bit unsigned seed from the system's entropy."""
    return secrets.randbits(64)


def new_request_id() -> str:
    return uuid.uuid4().hex


def unix_time_s() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the server gets what is not in the request; replaced in tests to make answers repeatable."""

    draw_seed: Callable[[], int] = draw_seed
    new_request_id: Callable[[], str] = new_request_id
    unix_time_s: Callable[[], int] = unix_time_s


@dataclass(slots=True, kw_only=True)
class RunningModel:
    engine: Engine | Supervisor
    """Started; its sink is `bridge.deliver`."""
    bridge: Bridge
    """Attached to `engine`."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None if the model has none: chat requests are refused."""
    grammars: Grammars
    """Those that answers may be asked to follow."""
    admission: Admission
    metrics: Metrics
    model: ModelInfo
    clock: Clock = field(default_factory=WallClock)
    """The engine's clock: `arrival_ns` and deadlines are read from it."""
    slo_itl_ns: int | None = None
    """The server's own target of the inter-token latency."""
    prefix_sharing: str | None = None
    """The setting: who shares cached prefixes. None: the server decides by its API keys."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sources: Sources = field(default_factory=Sources)
    journal: Journal | None = None
    """The engine's; None: no request is explained."""
    close_store: Callable[[], None] = lambda: None
    """Called when the engine is closed: gives the file of the disk tier free."""
    off_loop: OffLoop = field(init=False)
    """Long texts are worked on here."""

    def __post_init__(self) -> None:
        self.off_loop = OffLoop(self.metrics.count_rejected)

    def close(self, timeout_s: float = 0.0) -> bool:
        """Drain for up to `timeout_s`, abort the rest, free everything. True if nothing had to be aborted. Idempotent."""
        try:
            return self.engine.close(timeout_s)
        finally:
            self.close_store()
            self.off_loop.close()
