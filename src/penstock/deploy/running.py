"""A running model with everything that answers for it, and a deployment: the running models of one process by their names.

The factory makes both; the server, the Python API and the terminal commands use them. They hold references only, and know
neither HTTP nor how their parts were made.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.admission.door import Admission
from penstock.clock import Clock, WallClock
from penstock.deploy.arms import Arms
from penstock.deploy.off_loop import OffLoop
from penstock.engine.bridge import Bridge
from penstock.engine.supervisor import Supervisor
from penstock.engine.thread import Engine
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.text.grammar import Grammars
from penstock.text.tokenizer import Tokenizer
from penstock.types.encoder import EncoderInfo
from penstock.types.errors import ConfigError
from penstock.types.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a model that clients may know, and that their requests are checked against."""

    served_names: tuple[str, ...]
    """Names that clients may use; answers have the first. Not empty."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model, which are understood but not listed."""
    root: str
    """The source: a catalogue name or a path."""
    fingerprint: str
    """Changes with what the numbers of an answer depend on beside the request, and with the chat template; not with
    `max_model_len`, where an answer without a limit of its own ends."""
    created_unix_s: int
    max_model_len: int
    """Longest prompt + output of one request, in tokens: what model, settings and KV cache allow together; of an encoder the
    longest text."""
    vocab_size: int
    """Rows of the logits: token ids lie in [0, vocab_size)."""
    eos_token_ids: tuple[int, ...]
    is_priority_scheduled: bool = False
    """True if the waiting order looks at `Request.priority`; otherwise a priority is refused rather than ignored."""
    encoder: EncoderInfo | None = None
    """Facts of a model that answers with numbers; None: it writes text."""
    max_step_tokens: int = 512
    """Tokens of one step at most. A list of texts comes to the engine by some steps' worth at once."""
    max_beams: int | None = None
    """Largest width of a beam search, as its beams run at once; None: the scheduler decides."""

    @property
    def name(self) -> str:
        return self.served_names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Functions for what a request does not say; tests replace them to make answers repeatable."""

    draw_seed: Callable[[], int] = lambda: secrets.randbits(64)
    new_request_id: Callable[[], str] = lambda: uuid.uuid4().hex
    unix_time_s: Callable[[], int] = lambda: int(time.time())


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
    """Grammars that answers may be asked to follow."""
    admission: Admission
    metrics: Metrics
    model: ModelInfo
    clock: Clock = field(default_factory=WallClock)
    """The engine's clock, for `arrival_ns` and deadlines."""
    slo_itl_ns: int | None = None
    """The server's own target of the inter-token latency."""
    prefix_sharing: str | None = None
    """The setting: who shares cached prefixes. None: the server decides by its API keys."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sources: Sources = field(default_factory=Sources)
    journal: Journal | None = None
    """The engine's journal; None: no request is explained."""
    arms: Arms | None = None
    """The A/B test; None: there is none."""
    on_refused: Callable[[str, str, str], None] = lambda _tenant, _arm, _reason: None
    """Called for each call that the door refuses."""
    release: Callable[[], None] = lambda: None
    """Called once the engine is closed: gives back what is not the engine's, such as the file of the disk tier."""
    off_loop: OffLoop = field(init=False)
    """Works on long texts in threads of its own."""

    def __post_init__(self) -> None:
        self.off_loop = OffLoop(self.metrics.count_rejected)

    @property
    def name(self) -> str:
        return self.model.name

    def close(self, timeout_s: float = 0.0) -> bool:
        """Drain for up to `timeout_s`, abort the rest, free everything. True if nothing had to be aborted. Idempotent."""
        try:
            return self.engine.close(timeout_s)
        finally:
            self.release()
            self.off_loop.close()


class Deployment:
    """Running models, found by the names that clients use. Immutable: what it has at first, it has until it is closed."""

    def __init__(self, models: Sequence[RunningModel]) -> None:
        """The first model is the default one. Raises ConfigError if two have a name or an alias in common."""
        if not models:
            raise ValueError("a deployment has at least one model")
        self._models = tuple(models)
        self._by_name: dict[str, RunningModel] = {}
        for running in models:
            for name in dict.fromkeys(running.model.served_names + running.model.aliases):
                if name in self._by_name:
                    raise ConfigError(
                        f"Two models are served as {name!r}.", remedy="Give one of them another --served-model-name."
                    )
                self._by_name[name] = running

    @property
    def models(self) -> tuple[RunningModel, ...]:
        return self._models

    @property
    def default(self) -> RunningModel:
        """The model of a request that names none."""
        return self._models[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of all models as they are listed: without aliases."""
        return tuple(name for running in self._models for name in running.model.served_names)

    def find(self, name: str | None) -> RunningModel | None:
        """The model with this name or alias, the default one for None; None if there is no such model."""
        return self.default if name is None else self._by_name.get(name)

    def drain(self) -> None:
        """Refuse new requests and let the others end. Returns at once."""
        for running in self._models:
            running.engine.drain()

    def close(self, timeout_s: float = 0.0) -> bool:
        """Drain all models for up to `timeout_s` together and close each. True if nothing had to be aborted. Idempotent."""
        self.drain()
        end_s = time.monotonic() + timeout_s
        are_clean: list[bool] = []
        with contextlib.ExitStack() as closing:  # all are closed, also if one can't be
            for running in reversed(self._models):
                closing.callback(lambda one: are_clean.append(one.close(max(0.0, end_s - time.monotonic()))), running)
        return all(are_clean)
