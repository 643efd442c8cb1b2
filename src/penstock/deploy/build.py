"""Builds a running model from a blueprint, and rebuilds its engine and executor after a failure.

The vocabulary is loaded in parallel with the weights. Imports are inside functions, so that importing this file is fast.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

from penstock.config import ServerConfig
from penstock.config.units import format_size
from penstock.deploy import device
from penstock.deploy.blueprint import Blueprint
from penstock.deploy.draft import check_same_tokens, open_draft
from penstock.deploy.executor import SeatOf, build_executor, first_executor
from penstock.deploy.fingerprint import kv_fingerprint, system_fingerprint
from penstock.deploy.resources import Resources
from penstock.deploy.sizing import RESERVE_BYTES, KvPlan
from penstock.deploy.tiers import build_tier, cleared, open_host_memory, open_store
from penstock.machine import give_back_free_memory
from penstock.types.errors import counted

if TYPE_CHECKING:
    from penstock.admission.door import AdmissionLimits
    from penstock.admission.tenants import Tenants
    from penstock.deploy.adapters import AdapterReader, Adapters
    from penstock.deploy.running import ModelInfo, RunningModel, Sources
    from penstock.engine.blocks import Blocks
    from penstock.engine.draft_model import DraftModel
    from penstock.engine.ports import BlockMover, BlockStore, Executor, RequestJournal
    from penstock.engine.thread import Engine
    from penstock.engine.transfers import Transfers
    from penstock.kv.manager import KVManager
    from penstock.models.adapter import AdapterPacker
    from penstock.models.formats import WeightFormat
    from penstock.models.weights import LoadedModel
    from penstock.obs.explain.journal import Journal
    from penstock.sched.scheduler import Scheduler
    from penstock.text.chat import ChatTemplate
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.stats import RequestStats, StepStats

_log = logging.getLogger(__name__)


class EngineTap(Protocol):
    """An observer of every engine that a model gets, one after another."""

    def watch(self, scheduler: Scheduler, blocks: Blocks) -> None:
        """Observe an engine that has not begun yet."""
        ...

    def on_step(self, stats: StepStats) -> None: ...

    def on_finish(self, stats: RequestStats) -> None: ...


class Lasting:
    """The parts of a model that are kept when it is unloaded: metrics, adapter names, journal, tenants' use, and seeds.

    The last three are made at first use, because importing them earlier would delay the weights.
    """

    def __init__(self, name: str, adapters: Adapters | None, server: ServerConfig, limits: AdmissionLimits) -> None:
        from penstock.obs.metrics import Metrics

        self._server, self.limits = server, limits
        self.metrics = Metrics(name)
        self.metrics.slo_ttft_ns = limits.slo_ttft_ns
        self.adapters = adapters
        if adapters is not None:
            self.metrics.read_adapters = lambda: adapters.stats
            self.metrics.read_adapter_names = adapters.names_of

    @cached_property
    def journal(self) -> Journal | None:
        from penstock.obs.explain.journal import Journal

        num_explained = self._server.explained_requests
        return Journal(num_explained) if num_explained else None

    @cached_property
    def tenants(self) -> Tenants:
        from penstock.admission.tenants import Tenants

        return Tenants(self.limits.tenant_max_concurrent, self.limits.tenant_tokens_per_minute)

    @cached_property
    def sources(self) -> Sources:
        """Generators of seeds, ids and times for requests. With `seed` in the settings, the same seeds come in each run."""
        from penstock.deploy.running import Sources

        if self._server.seed is None:
            return Sources()
        generator = random.Random(self._server.seed)  # noqa: S311  # repeatable on purpose
        return Sources(draw_seed=lambda: generator.getrandbits(64))


def build(
    blueprint: Blueprint, model: LoadedModel, resources: Resources, lasting: Lasting, tap: EngineTap | None = None
) -> RunningModel:
    """Load a model, and return it running. The caller closes it. `model` and `blueprint` come from the same `resolve`.

    Raises ConfigError if something does not fit, after closing everything.
    """
    _log_model(blueprint, model)
    # The vocabulary takes about as long as the weights, and both release the GIL for most of the time.
    with ThreadPoolExecutor(max_workers=1) as side, contextlib.ExitStack() as undone:
        text = side.submit(load_text, blueprint.settings.chat_template, model)
        blueprint = replace(blueprint, shares_kv=tap is not None)
        blueprint, executor = first_executor(blueprint, model, seat_of(blueprint, resources))
        undone.callback(executor.close)
        if model.encoder is None:
            _log_kv(blueprint, model)
        tokenizer, chat_template = text.result()
        if blueprint.draft is not None:
            small = blueprint.draft.loading.load()
            check_same_tokens(tokenizer, tokenizer_of(small), model, small)
        store = _open_tier(blueprint, model, executor, resources)
        if store is not None:
            undone.callback(store.close)
        maker = EngineMaker(blueprint, resources, lasting, executor=executor, store=store, tokenizer=tokenizer, tap=tap)
        undone.callback(maker.release)
        undone.callback(lasting.metrics.disconnect)
        running = _assemble(maker, model, executor, chat_template)
        undone.pop_all()
        return running


def seat_of(blueprint: Blueprint, resources: Resources) -> SeatOf:
    """Return the function that a native executor calls to get its share of the machine's threads."""
    return partial(resources.team, blueprint.name, share=blueprint.machine_share)


class EngineMaker:
    """Factory of a model's engines for the supervisor: the first one, and another after each failure.

    Each engine gets its own executor and an emptied disk or host tier. All share the observers, so that counters go on.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        resources: Resources,
        lasting: Lasting,
        *,
        executor: Executor,
        store: BlockStore | None,
        tokenizer: Tokenizer,
        tap: EngineTap | None = None,
    ) -> None:
        """`executor` and `store` (the tier below the KV pool) are for the first engine. `blueprint` has its memory plan."""
        from penstock.admission.door import Admission
        from penstock.clock import WallClock
        from penstock.engine.bridge import Bridge
        from penstock.engine.ports import ObserverGroup
        from penstock.obs.signals import Signals

        self.blueprint, self._resources = blueprint, resources
        self._first_executor: Executor | None = executor
        self._stores = [store]
        """The store of each engine so far. The last one is in use."""
        self._engine: Engine | None = None
        self._draft: DraftModel | None = None
        self.tokenizer = tokenizer
        self.clock, self.bridge = WallClock(), Bridge()
        self.metrics, self.journal, self.sources = lasting.metrics, lasting.journal, lasting.sources
        self.adapters = lasting.adapters
        self.metrics.settings_hash = blueprint.settings_hash
        self.metrics.max_adapters = blueprint.lora.max_loras
        self.metrics.tier.medium = "host" if blueprint.cache.kv_host_size_bytes else "disk"
        self.admission = Admission(
            lasting.limits,
            executor.capacity,
            reads_priority=blueprint.policies.reads_priority,
            tenants=lasting.tenants,
            adapters=self.adapters,
            max_adapters=blueprint.lora.max_loras,
        )
        self.signals = Signals(blueprint.policies.max_running(executor.capacity), self.admission.drain.rate)
        self.admission.on_call = self.signals.on_call
        if self.journal is not None:
            self.journal.speaks_for_calls = executor.capacity.is_one_pass
        self._recorder = None
        if blueprint.open_recorder is not None:
            backend = blueprint.compute.options.backend
            self._recorder = blueprint.open_recorder(blueprint.name, backend, executor, self.clock)
        self._tap, self._kv_events = tap, None
        if blueprint.open_kv_events is not None:
            try:
                self._kv_events = blueprint.open_kv_events()
            except BaseException:  # nobody else has the recorder yet
                if self._recorder is not None:
                    self._recorder.close()
                raise
        observers = [self.metrics, self.admission, self.signals, tap, self._kv_events]
        self._observer = ObserverGroup([one for one in observers if one is not None])
        self._token_observer = ObserverGroup([self.metrics, self.admission])

    def make(self, on_failed: Callable[[], None]) -> Engine:
        """Return a new engine, not started yet. Raises the errors of loading a model."""
        executor, self._first_executor = self._first_executor, None
        self._close_draft()
        if executor is None:
            self._stores.append(cleared(self._stores[-1]))
            if self._engine is not None and self._engine.step_age_ns():  # its step goes on, maybe forever
                self._give_up(self._engine)
                self._engine = None  # another attempt has nothing to give up
            executor = self._executor_from_files()
            if self._recorder is not None:
                self._recorder.on_engine()
        try:
            self._engine = self._make(executor, on_failed)
        except BaseException:  # the next attempt needs its memory
            executor.close()
            raise
        return self._engine

    def _close_draft(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.close()

    def _give_up(self, engine: Engine) -> None:
        """Keep other models away from the threads and the memory of an engine with a step that never returns."""
        self._resources.leave_team(self.blueprint.name)
        self._resources.memory.hold_stuck(self.blueprint.name, lambda: engine.is_alive)

    def release(self) -> None:
        """Close what the model has open, and give its memory back. Call this after the engine has ended.

        A stuck step keeps its memory until it returns. Cyclic references are cut, because the garbage collector ignores objects
        from before the server began.
        """
        if self._recorder is not None:
            self._recorder.close()
        if self._kv_events is not None:
            self._kv_events.close()
        self.bridge.detach()
        self._close_draft()
        engine, self._engine = self._engine, None
        if self.adapters is not None:
            self.adapters.close()
        for store in self._stores:
            if store is not None:
                store.close()
        if engine is not None and engine.is_alive:
            self._give_up(engine)
        self._resources.loads.pop(self.blueprint.name, None)
        self._resources.memory.give_back(self.blueprint.name)

    def _executor_from_files(self) -> Executor:
        blueprint, plan = self.blueprint, self.blueprint.measured_plan
        free_bytes = self._resources.memory.available_bytes(blueprint.name, is_restart=True) - RESERVE_BYTES
        room_bytes = device.weight_room_bytes(blueprint.compute, free_bytes - plan.num_bytes - plan.num_step_bytes)
        model = blueprint.loading.load(max_weight_bytes=room_bytes)
        executor = build_executor(blueprint, model, seat_of(blueprint, self._resources))
        give_back_free_memory()
        return executor

    def _make(self, executor: Executor, on_failed: Callable[[], None]) -> Engine:
        from penstock.engine.core import EngineCore
        from penstock.engine.output import OutputStage
        from penstock.engine.ports import ObserverGroup
        from penstock.engine.thread import Engine
        from penstock.sched.scheduler import Scheduler
        from penstock.text.tokenizer import detokenizer_factory

        journals: list[RequestJournal] = [one for one in (self.journal, self._recorder) if one is not None]
        blueprint, small = self.blueprint, self.blueprint.draft
        if small is not None:
            self._draft = open_draft(small, seat_of(blueprint, self._resources), self.tokenizer.vocab_size, self.clock)
        scheduler = Scheduler(
            executor.capacity,
            self.blueprint.policies.make(),
            enable_prefix_caching=self.blueprint.has_prefix_caching,
            tier=build_tier(self._stores[-1]),
            most_step_ns=partial(self._resources.most_step_ns, self.blueprint.name),
            others_serve=partial(self._resources.others_serve, self.blueprint.name),
            adapters=self.adapters,
            max_adapters=self.blueprint.lora.max_loras,
            drafter=self._draft,
        )
        journal = ObserverGroup(journals) if len(journals) > 1 else next(iter(journals), None)
        engine = Engine(
            EngineCore(scheduler, observer=self._observer, journal=journal),
            executor,
            OutputStage(detokenizer_factory(self.tokenizer), observer=self._token_observer),
            clock=self.clock,
            sink=self.bridge.deliver,
            observer=self._observer,
            # A group of one would be one more call for each report.
            turn_observer=self.metrics if self._recorder is None else ObserverGroup([self.metrics, self._recorder]),
            on_failed=on_failed,
            make_transfers=partial(self._make_transfers, scheduler.kv),
        )
        if self._tap is not None:
            self._tap.watch(scheduler, engine.blocks)
        if self._kv_events is not None:
            self._kv_events.watch(scheduler)
        self._resources.loads[self.blueprint.name] = engine.load
        return engine

    def _make_transfers(self, kv: KVManager, blocks: BlockMover, wake: Callable[[], None]) -> Transfers | None:
        from penstock.engine.transfers import Transfers

        tier, store = self.metrics.tier, self._stores[-1]
        if store is None:
            tier.is_open = False
            return None
        return Transfers(kv, blocks, store, clock=self.clock, stats=tier, wake=wake)


def _assemble(maker: EngineMaker, model: LoadedModel, executor: Executor, chat_template: ChatTemplate | None) -> RunningModel:
    """Start the supervisor, which makes the first engine, and return the running model around it."""
    from penstock.deploy.running import RunningModel
    from penstock.engine.supervisor import Supervisor
    from penstock.text.dialects import find_dialect
    from penstock.text.grammar import Grammars

    blueprint, tokenizer, metrics = maker.blueprint, maker.tokenizer, maker.metrics
    if tokenizer.vocab_size > model.spec.vocab_size:
        _log.warning(
            "the tokenizer knows %d tokens, the model %d: texts that need one of the others are refused",
            tokenizer.vocab_size,
            model.spec.vocab_size,
        )
    if maker.adapters is not None:
        _connect(maker.adapters, blueprint.lora.max_lora_rank, model, executor, blueprint.adapters.num_bytes)
    metrics.num_weight_bytes = getattr(executor, "weight_bytes", 0)  # only of backends that convert weights
    template = None if chat_template is None else chat_template.source
    info = _model_info(maker, model, executor, template)
    engine = Supervisor(
        maker.make, clock=maker.clock, step_timeout_s=blueprint.compute.step_timeout_s, on_restart=metrics.count_restart
    )
    maker.bridge.attach(engine)
    metrics.connect(
        load=engine.load,
        signals=lambda: maker.signals.read(engine.load(), maker.clock.now_ns()),
        waste=engine.kv_waste_ratio,
        max_rows=maker.signals.num_rows,
        max_step_tokens=executor.capacity.max_step_tokens,
    )
    with contextlib.ExitStack() as undone:
        undone.callback(engine.close, 0.0)
        engine.start()
        running = RunningModel(
            engine=engine,
            bridge=maker.bridge,
            tokenizer=tokenizer,
            chat_template=chat_template,
            grammars=Grammars(tokenizer, vocab_size=model.spec.vocab_size),
            dialect=find_dialect(
                template, tool_parser=blueprint.settings.tool_call_parser, reasoning_parser=blueprint.settings.reasoning_parser
            ),
            admission=maker.admission,
            metrics=metrics,
            model=info,
            clock=maker.clock,
            slo_itl_ns=blueprint.slo_itl_ns,
            prefix_sharing=blueprint.cache.prefix_sharing,
            defaults=model.sampling,
            sources=maker.sources,
            journal=maker.journal,
            adapters=maker.adapters,
            release=maker.release,
        )
        undone.pop_all()
        return running


def _connect(adapters: Adapters, max_rank: int, model: LoadedModel, executor: Executor, max_bytes: int) -> None:
    """Connect the registry of adapters to this model, without keeping a reference to the model's weights."""
    packer: AdapterPacker = executor.adapter_packer  # type: ignore[attr-defined]  # all backends have one
    adapters.connect(adapter_reader(max_rank, model), packer, max_bytes=max_bytes)


def adapter_reader(max_rank: int, model: LoadedModel) -> AdapterReader:
    """Return a function that reads an adapter, and raises ModelError for one that the model can't have."""
    from penstock.models.architectures import describe
    from penstock.models.load import load_adapter

    spec, program = model.spec, describe(model.spec)
    return lambda path, files: load_adapter(path, spec, program, max_rank=max_rank, files=files)


def _open_tier(blueprint: Blueprint, model: LoadedModel, executor: Executor, resources: Resources) -> BlockStore | None:
    cache, name = blueprint.cache, blueprint.name
    if cache.kv_host_size_bytes:
        store = open_host_memory(cache, executor, available_bytes=resources.memory.available_bytes(name))
        resources.memory.take(name, replace(blueprint.share, num_tier_bytes=cache.kv_host_size_bytes))
        return store
    if not cache.kv_disk_size_bytes:
        return None
    fingerprint = kv_fingerprint(blueprint.compute, model, executor, blueprint.loading.merged)
    return open_store(blueprint.tier_folder, cache.kv_disk_size_bytes, executor, fingerprint)


def load_text(asked: str | None, model: LoadedModel) -> tuple[Tokenizer, ChatTemplate | None]:
    from penstock.text.chat import MAX_NAMES, ChatTemplate, choose_chat_template

    tokenizer = tokenizer_of(model)
    if model.encoder is not None:
        return tokenizer, None
    named = model.chat_templates
    if asked is None and set(named) - {"default"}:
        _log.info("chat templates of the model: %s; --chat-template takes another", ", ".join(sorted(named)[:MAX_NAMES]))
    text = choose_chat_template(asked, named)
    return tokenizer, None if text is None else ChatTemplate(text, special_tokens=tokenizer.special_tokens)


def tokenizer_of(model: LoadedModel) -> Tokenizer:
    from penstock.text.tokenizer import load_tokenizer

    return load_tokenizer(
        model.tokenizer_source,
        bos_token_id=model.bos_token_id,
        eos_token_ids=model.eos_token_ids,
        special_tokens=model.special_tokens,
        ends=model.ends,
    )


def _model_info(maker: EngineMaker, model: LoadedModel, executor: Executor, template: str | None) -> ModelInfo:
    from penstock.deploy.running import ModelInfo

    blueprint, capacity = maker.blueprint, executor.capacity
    source, settings = blueprint.loading.source, blueprint.settings
    newest = max(model.path.iterdir(), key=lambda file: file.stat().st_mtime) if model.path.is_dir() else model.path
    return ModelInfo(
        served_names=blueprint.names,
        aliases=blueprint.aliases,
        root=model.path.name if source.entry is None else source.name,
        fingerprint=system_fingerprint(
            blueprint.compute,
            model,
            executor,
            template,
            merged=blueprint.loading.merged,
            parsers=(settings.tool_call_parser, settings.reasoning_parser),
        ),
        created_unix_s=int(newest.stat().st_mtime),
        capacity=capacity,
        vocab_size=model.spec.vocab_size,
        is_priority_scheduled=blueprint.policies.reads_priority,
        encoder=None if model.encoder is None else replace(model.encoder, max_tokens=capacity.max_model_len),
        settings=blueprint.shown_settings,
    )


def _log_model(blueprint: Blueprint, model: LoadedModel) -> None:
    formats: dict[WeightFormat, int] = {}
    for tensor in model.weights.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.num_bytes
    shares = ", ".join(f"{name} {format_size(size)}" for name, size in sorted(formats.items(), key=lambda item: -item[1]))
    _log.info("model %s (%s), weights %s", model.name, model.spec.architecture, shares)
    if model.encoder is not None:
        capacity = blueprint.measured_plan.capacity
        _log.info(
            "the model only reads texts, of up to %s: %s, pooling %s, %s; up to %d texts and %s in one step",
            counted(capacity.max_model_len, "token"),
            model.encoder.task,
            model.encoder.pooling,
            counted(model.encoder.width, "number"),
            capacity.max_rows,
            counted(capacity.max_step_tokens, "token"),
        )
    lora = blueprint.lora
    if lora.is_on:
        _log.info(
            "adapters of up to rank %d: %d different ones at once, %s for %d in memory and the reading of another",
            lora.max_lora_rank,
            lora.max_loras,
            format_size(blueprint.adapters.num_bytes),
            lora.max_cpu_loras,
        )
    options = blueprint.compute.options
    _log.info("backend %s, %s", options.backend, device.words(options, blueprint.cores))
    _log.info("policies: %s", ", ".join(f"{seam} {words}" for seam, words in blueprint.policies.words.items()))


def _log_kv(blueprint: Blueprint, model: LoadedModel) -> None:
    kv: KvPlan = blueprint.measured_plan
    longest = kv.capacity.max_model_len
    _log.info(
        "KV cache of %s, up to %s as it fills: %s of %s, %s in all; longest request %d",
        blueprint.compute.kv_dtype,
        format_size(kv.num_bytes),
        counted(kv.capacity.num_blocks - 1, "block"),
        counted(kv.capacity.block_size, "token"),
        counted(kv.num_tokens, "token"),
        longest,
    )
    # First turns of ShareGPT have 467 tokens on average, with their answers (`benchmarks/kv_waste.py`).
    typical = min(512, longest)
    num_typical, num_longest = kv.num_requests_of(typical), kv.num_requests_of(longest)
    _log.info(
        "KV cache holds %s of %s (prompt and answer) at once%s; at most %d run at once",
        counted(num_typical, "request"),
        counted(typical, "token"),
        f", or {num_longest} of the longest" if typical < longest else "",
        blueprint.compute.max_rows,
    )
    if kv.is_shortened:
        _log.warning(
            "the model takes requests of up to %d tokens, but the KV cache holds %d; raise --kv-cache-memory for longer ones",
            model.spec.max_model_len,
            kv.capacity.max_model_len,
        )
