"""A whole runtime over the hash executor and a tokenizer of single bytes, and a real server around it. For tests of `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from dataclasses import dataclass, field, replace

import httpx

from penstock.admission.door import Admission, AdmissionLimits
from penstock.clock import WallClock
from penstock.config import ServerConfig
from penstock.deploy.running import ModelInfo, RunningModel, Sources
from penstock.engine.bridge import Bridge
from penstock.engine.output import OutputStage
from penstock.engine.ports import ObserverGroup
from penstock.engine.thread import Engine
from penstock.obs.explain.journal import Journal
from penstock.obs.metrics import Metrics
from penstock.obs.signals import Signals
from penstock.sched.policies.presets import make_policies
from penstock.serve.app import create_app
from penstock.serve.http.listener import bind_socket
from penstock.serve.server import Server
from penstock.testing import HashExecutor, HashModel, make_core, text_capacity
from penstock.testing.hash_executor import STATE_WIDTH
from penstock.text.chat import ChatTemplate
from penstock.text.dialects import find_dialect
from penstock.text.grammar import Grammars
from penstock.text.tokenizer import Tokenizer, detokenizer_factory, load_tokenizer
from penstock.text.vocabulary import byte_level_alphabet
from penstock.types.encoder import EncoderInfo, ScoreFunction
from penstock.types.plan import Capacity
from penstock.types.vocab import GgufVocab
from support.answers import AnswerCheck
from support.deployments import deployment_of

CAPACITY = Capacity(num_blocks=513, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=2048, max_scored=20)
MODEL_NAME = "toy"
SPECIAL_TOKENS = ("<|end|>", "<|begin|>", "<|turn|>")
END_ID = 0
PRINTABLE = range(0x20, 0x7F)
OTHER_BYTES = [byte for byte in range(256) if byte not in PRINTABLE]
FIRST_PRINTABLE_ID = len(SPECIAL_TOKENS) + len(OTHER_BYTES)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|turn|>{{ message.role }}: {{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}{{ suffix }}"
)
PRINTABLE_MODEL = HashModel(vocab_size=VOCAB_SIZE, first_token_id=FIRST_PRINTABLE_ID)
"""Answers in printable ASCII, and never ends by itself."""


def make_tokenizer(*, has_ends=False) -> Tokenizer:
    """One token per byte; with ends also `<|begin|>` and `<|end|>`. Printable ASCII has the highest ids, so that a hash
    model can be told to sample only from it."""
    alphabet = list(byte_level_alphabet())
    pieces = [alphabet[byte] for byte in (*OTHER_BYTES, *PRINTABLE)]
    vocab = GgufVocab(
        model="gpt2",
        pre="gpt-2",
        tokens=[*SPECIAL_TOKENS, *pieces],
        token_types=[3] * len(SPECIAL_TOKENS) + [1] * 256,
        merges=[],
        scores=[],
        bos_token_id=1,
        eos_token_id=END_ID,
        unknown_token_id=None,
        add_bos_token=has_ends,
        add_eos_token=has_ends,
        add_space_prefix=False,
    )
    return load_tokenizer(vocab)


@functools.cache
def make_chat_template(source: str) -> ChatTemplate:
    """One process for all runtimes with this template: each takes a tenth of a second to start."""
    return ChatTemplate(source, special_tokens=make_tokenizer().special_tokens)


class GatedExecutor(HashExecutor):
    """Runs a step only when it was allowed to: `allow(n)`; `open()` for no limit."""

    def __init__(self, capacity=CAPACITY, *, model=PRINTABLE_MODEL) -> None:
        super().__init__(capacity, model=model)
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def allow(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    def submit(self, plan):
        self._permits.acquire()
        if self._is_open:
            self._permits.release()
        return super().submit(plan)

    def close(self) -> None:
        self.open()
        super().close()


def fixed_sources() -> Sources:
    """Everything that is not in the request, the same every time."""
    ids = iter(range(1, 10**6))
    return Sources(draw_seed=lambda: 7, new_request_id=lambda: f"id{next(ids)}", unix_time_s=lambda: 1_700_000_000)


class JumpingClock(WallClock):
    """Goes on by as much as it is told, beside the time that passes."""

    offset_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.offset_ns


def make_runtime(
    executor=None,
    *,
    max_queue=64,
    limits=None,
    chat_template=CHAT_TEMPLATE,
    clock=None,
    sources=None,
    max_explained=100,
    tap=None,
    **model_fields,
) -> RunningModel:
    """A started runtime; close it. `limits`: the door's, instead of `max_queue` alone. `tap`: hears of its engine."""
    clock = clock or WallClock()
    executor = executor or HashExecutor(CAPACITY, model=PRINTABLE_MODEL)
    tokenizer = make_tokenizer(has_ends=executor.capacity.is_one_pass)
    metrics, bridge = Metrics(model_fields.get("served_names", [MODEL_NAME])[0]), Bridge()
    admission = Admission(limits or AdmissionLimits(max_queue=max_queue), executor.capacity)
    signals = Signals(executor.capacity.max_rows, admission.drain.rate)
    admission.on_call = signals.on_call
    observer = ObserverGroup([metrics, admission, signals, *([] if tap is None else [tap])])
    journal = Journal(max_explained) if max_explained else None
    if journal is not None:
        journal.speaks_for_calls = executor.capacity.is_one_pass
    core = make_core(
        executor.capacity,
        # Calls take turns, as where encoders are served: a long list comes before nobody's text.
        make_policies(order="calls") if executor.capacity.is_one_pass else None,
        observer=observer,
        journal=journal,
        enable_prefix_caching=not executor.capacity.is_one_pass,
    )
    engine = Engine(
        core,
        executor,
        OutputStage(detokenizer_factory(tokenizer), observer=ObserverGroup([metrics, admission])),
        clock=clock,
        sink=bridge.deliver,
        observer=observer,
    )
    if tap is not None:
        tap.watch(core.scheduler, engine.blocks)
    bridge.attach(engine)
    metrics.connect(
        load=engine.load,
        signals=lambda: signals.read(engine.load(), clock.now_ns()),
        waste=engine.kv_waste_ratio,
    )
    engine.start()
    info = ModelInfo(
        served_names=(MODEL_NAME, "org/toy"),
        aliases=("toy-too",),
        root="/models/toy",
        fingerprint="fp_toy",
        created_unix_s=1_600_000_000,
        capacity=executor.capacity,
        vocab_size=VOCAB_SIZE,
    )
    return RunningModel(
        engine=engine,
        bridge=bridge,
        tokenizer=tokenizer,
        chat_template=chat_template and make_chat_template(chat_template),
        grammars=Grammars(tokenizer, vocab_size=VOCAB_SIZE),
        dialect=find_dialect(chat_template),
        admission=admission,
        metrics=metrics,
        model=replace(info, **model_fields),
        clock=clock,
        sources=sources or fixed_sources(),
        journal=journal,
    )


TEXT_CAPACITY = text_capacity(128, max_rows=8, max_step_tokens=256)
EMBEDDER = EncoderInfo(width=STATE_WIDTH, pooling="mean", max_tokens=128, prompts={"query": "Q: ", "document": "D: "})
LATE = EncoderInfo(width=2, pooling="each", max_tokens=128, prompts={"query": "Q: ", "document": "D: "})
"""A vector for each token. As an executor it has `NarrowExecutor(4)`, whose answers are two of them."""
RERANKER = EncoderInfo(width=1, pooling="first", max_tokens=128, labels=("score",), scores=ScoreFunction.SIGMOID)
CLASSIFIER = EncoderInfo(width=STATE_WIDTH, pooling="first", max_tokens=128, labels=tuple("abcd"), scores=ScoreFunction.SOFTMAX)


class NarrowExecutor(HashExecutor):
    """Answers a text with the first numbers of its hash."""

    def __init__(self, width) -> None:
        super().__init__(TEXT_CAPACITY, model=PRINTABLE_MODEL)
        self._num_bytes = 4 * width

    def collect(self, ticket):
        result = super().collect(ticket)
        result.states = {name: states[: self._num_bytes] for name, states in result.states.items()}
        return result


def make_text_runtime(executor=None, *, encoder=EMBEDDER, **fields) -> RunningModel:
    """A started encoder, whose numbers are hashes of the tokens; close it."""
    executor = executor or NarrowExecutor(encoder.width)
    return make_runtime(executor, chat_template=None, encoder=encoder, **fields)


def make_client(*models: RunningModel, splits=(), routes=(), upstreams=(), pipelines=(), **config_fields) -> httpx.AsyncClient:
    """A client that calls the app in process; answers come whole, and are checked against the OpenAPI document."""
    app = create_app(
        deployment_of(*models, splits=splits, routes=routes, upstreams=upstreams, pipelines=pipelines),
        ServerConfig(**config_fields),
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    hooks = {"response": [AnswerCheck(app)]}
    client = httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=30, event_hooks=hooks)
    client.app = app
    return client


@dataclass
class LiveServer:
    """A server on a free port, in a thread."""

    runtime: RunningModel
    config: ServerConfig = field(default_factory=lambda: ServerConfig(port=0))
    others: tuple[RunningModel, ...] = ()
    """Models beside the first."""
    more: dict[str, object] = field(default_factory=dict)
    """Routes and upstreams of its deployment."""

    def __enter__(self):
        announced: queue.Queue[str] = queue.Queue()
        self.listener = bind_socket("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        deployment = deployment_of(self.runtime, *self.others, **self.more)
        self.server = Server(deployment, self.config, self.listener, announce=announced.put)
        self.thread = threading.Thread(target=self.server.run, name="test-server")
        self.thread.start()
        self.ready_text = announced.get(timeout=30)
        return self

    def __exit__(self, *exc_info) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain and wait for the end. The runtime is closed afterwards."""
        if self.thread.is_alive():
            self.server.request_shutdown()
            self.thread.join(30)
            assert not self.thread.is_alive()


async def until(condition, timeout_s=20.0) -> None:
    """Let other tasks run until the condition holds. For states that no event tells about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.001)


def wait_until(condition, timeout_s=20.0) -> None:
    """As `until`, where there is no event loop."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.001)


@contextlib.contextmanager
def running(executor=None, *, config=None, others=(), more=None, **fields):
    """A live server over a fresh runtime."""
    runtime = make_runtime(executor, **fields)
    try:
        with LiveServer(runtime, config or ServerConfig(port=0, shutdown_timeout_s=0.0), others, more or {}) as server:
            yield server
    finally:
        runtime.close()
