"""The factory: turns configs into running models. The command line, the Python API and tests call it.

    start_deployment   configs -> Deployment: a model for each, on one machine's `Resources`
    serve_model        config, source -> ServedModel: loads it when the deployment wants it, by
    start_model        config, source -> RunningModel: checks, weights, memory plan, then
      EngineMaker      makes an engine and its executor, for the supervisor, as often as it asks; has what watches them

Heavy imports are inside functions, so that importing this costs nothing. The vocabulary is loaded beside the weights.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.config import Config, KvConfig, Load, LoraConfig, ServerConfig
from penstock.config.saved import settings_hash
from penstock.config.units import format_size
from penstock.deploy import device
from penstock.deploy.encoders import plan_encoder
from penstock.deploy.executor import (
    SeatOf,
    build_executor,
    check_adapters,
    check_weight_dtype,
    open_encoder,
    plan_memory,
    with_merged_adapter,
)
from penstock.deploy.experts import check_disk, disk_bytes, disk_words
from penstock.deploy.fingerprint import system_fingerprint
from penstock.deploy.policies import admission_limits, build_policies
from penstock.deploy.recorder import check_recording, open_recorder
from penstock.deploy.resources import MemoryBudget, MemoryShare, Resources
from penstock.deploy.sizing import LEAST_ROOM_BYTES, RESERVE_BYTES, TYPICAL_REQUEST_TOKENS, KvPlan, check_address_space
from penstock.deploy.splits import read_split
from penstock.deploy.tiers import build_tier, cleared, open_host_memory, open_store
from penstock.machine import Cores, address_space, give_back_free_memory
from penstock.types.errors import ConfigError, NotEnoughMemory, counted
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.admission.tenants import Tenants
    from penstock.backends.cuda.executor import CudaExecutor
    from penstock.backends.native.executor import NativeExecutor
    from penstock.backends.reference.executor import ReferenceExecutor
    from penstock.deploy.adapters import Adapters
    from penstock.deploy.deployment import Deployment
    from penstock.deploy.running import ModelInfo, RunningModel, Sources
    from penstock.deploy.served import ModelCard, ServedModel
    from penstock.engine.core import EngineCore
    from penstock.engine.ports import BlockMover, BlockStore, Executor, Observer, RequestJournal
    from penstock.engine.thread import Engine
    from penstock.engine.transfers import Transfers
    from penstock.kv.manager import KVManager
    from penstock.kv.tiers import Tier
    from penstock.models.adapter import AdapterFactors
    from penstock.models.adapter_files import AdapterFiles
    from penstock.models.catalog import ModelSource
    from penstock.models.formats import WeightFormat
    from penstock.models.weights import LoadedModel
    from penstock.obs.explain.journal import Journal
    from penstock.text.chat import ChatTemplate
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.model_spec import Pooling
    from penstock.types.vocab import GgufVocab

_log = logging.getLogger(__name__)

MAX_MORE_AT_ONCE = 2
"""Models that are loaded when they are asked for, and are likely to be in memory at once beside those of the start."""


def locate(config: Config) -> ModelSource:
    """The source of the config's model, which is fetched first if it is one that can be. Raises PenstockError."""
    from penstock.models.catalog import cache_dir, resolve

    source = resolve(config.model.model, cache_dir(config.model.cache_dir))
    if not source.is_present:
        from penstock.models.pull import TerminalProgress, ensure_present

        ensure_present(source, progress=TerminalProgress())
    return source


def start_deployment(configs: Sequence[Config], config_of_found: Callable[[str, str], Config] | None = None) -> Deployment:
    """A model for each config, the first of them the default one; all share one machine. Close the result.

    `config_of_found`: the config for the name and the path of a model that is put into `models_dir` later. Raises what
    `locate` and `start_model` raise, and ConfigError for two models with one name; then none is left running.
    """
    from penstock.deploy.deployment import Deployment

    memory = MemoryBudget(limit_bytes=configs[0].sharing.memory_bytes)
    resources = Resources(memory, num_models=_num_at_once(configs))
    served = [serve_model(config, locate(config), resources) for config in configs]
    find_new = None
    if config_of_found is not None and (folder := _folder(configs[0])) is not None:
        from penstock.deploy.folder import ModelFolder

        known = [one.path for one in served if one.path is not None]
        find_new = ModelFolder(folder, config_of_found, partial(serve_model, resources=resources), known).find_new
    splits = [read_split(config.sharing, one.name) for one, config in zip(served, configs, strict=True)]
    deployment = Deployment(
        served,
        memory,
        sources=partial(_sources, configs[0].server),
        find_new=find_new,
        splits=[split for split in splits if split is not None],
    )
    deployment.start([one for one, config in zip(served, configs, strict=True) if config.sharing.load_on == Load.START])
    return deployment


def _num_at_once(configs: Sequence[Config]) -> int:
    """Models that the memory is meant to have room for, if nobody says what their KV caches may take."""
    num_at_start = sum(config.sharing.load_on == Load.START for config in configs)
    num_more = len(configs) - num_at_start if configs[0].sharing.models_dir is None else MAX_MORE_AT_ONCE
    return num_at_start + min(num_more, MAX_MORE_AT_ONCE)


def _folder(config: Config) -> Path | None:
    from penstock.models.catalog import expand_home

    return None if config.sharing.models_dir is None else expand_home(config.sharing.models_dir)


def serve_model(config: Config, source: ModelSource, resources: Resources) -> ServedModel:
    """The model of a source that is present, not loaded yet. Raises ConfigError for adapters that can't be named so."""
    from penstock.deploy.served import ServedModel

    is_on_gpu = device.is_on_gpu(device.settled(config))
    if is_on_gpu:
        _check_stays(config)
    lasting = Lasting(config, source)
    folder = _folder(config)
    is_in_folder = folder is not None and source.path.absolute().parent == folder.absolute()
    return ServedModel(
        names=_served_names(config, source),
        aliases=_aliases(config, source),
        metrics=lasting.metrics,
        adapters=lasting.adapters,
        load=partial(start_model, config, source, resources, lasting),
        plan=partial(plan_share, config, source, resources),
        read_machine_ns=partial(resources.machine_ns, _served_names(config, source)[0]),
        idle_unload_ns=None if config.sharing.idle_unload_s is None else int(config.sharing.idle_unload_s * 1e9),
        read_card=partial(_read_card, source),
        is_kept=config.sharing.keep_loaded or is_on_gpu,
        is_fixed=is_on_gpu,
        path=source.path if is_in_folder else None,
        max_waiting=config.admission.max_queue,
    )


def _read_card(source: ModelSource) -> ModelCard:
    from penstock.deploy.served import ModelCard
    from penstock.models.facts import read_facts

    facts = read_facts(source)
    return ModelCard(
        title=facts.title,
        license=facts.license,
        architecture=facts.architecture,
        container="gguf" if facts.path.suffix == ".gguf" else "safetensors",
        quantisation=facts.quantisation or (facts.formats[0].name if facts.formats else ""),
        num_parameters=None if facts.quantisation else facts.num_values,
        num_layers=facts.num_layers,
        max_model_len=facts.max_model_len,
        chat_template=facts.chat_templates.get("default", ""),
        num_bytes=facts.num_file_bytes,
        modified_unix_s=int(facts.path.stat().st_mtime),
    )


def _check_stays(config: Config) -> None:
    """Refuse that a model on a GPU comes late or leaves: its memory there is planned at the start. Raises ConfigError."""
    for flag, is_set in (
        ("--load-on request", config.sharing.load_on != Load.START),
        ("--idle-unload", config.sharing.idle_unload_s),
    ):
        if is_set:
            raise ConfigError(
                f"{flag} is for models on the CPU: on a GPU all are loaded at the start, and stay.",
                remedy=f"Leave out {flag}, or give --device cpu.",
            )


class Lasting:
    """The parts of a model that go on when it is loaded again: its counts, its adapters' names, its memory of requests, what
    tenants have used, and its seeds. The last three are made by the first load, as their imports would hold up its weights.
    """

    def __init__(self, config: Config, source: ModelSource) -> None:
        from penstock.obs.metrics import Metrics

        self._server, self._admission = config.server, config.admission
        self.metrics = Metrics(_served_names(config, source)[0])
        self.adapters = open_adapters(config.lora)
        """None: it is served without."""
        if (adapters := self.adapters) is not None:
            self.metrics.read_adapters = lambda: adapters.stats

    @cached_property
    def journal(self) -> Journal | None:
        from penstock.obs.explain.journal import Journal

        num_explained = self._server.explained_requests
        return Journal(num_explained) if num_explained else None

    @cached_property
    def tenants(self) -> Tenants:
        from penstock.admission.tenants import Tenants

        return Tenants(self._admission.tenant_max_concurrent, self._admission.tenant_tokens_per_minute)

    @cached_property
    def sources(self) -> Sources:
        return _sources(self._server)


def plan_share(config: Config, source: ModelSource, resources: Resources) -> MemoryShare:
    """The memory that the model will take beside all others, for the price of its file's head. Raises as `start_model`."""
    if device.is_on_gpu(device.settled(config)):
        return MemoryShare()  # a GPU has memory of its own
    config, model, kv, _ = _plan(config, source, resources, resources.memory.total_bytes())
    return _share(config, model, kv)


def start_model(
    config: Config, source: ModelSource, resources: Resources | None = None, lasting: Lasting | None = None
) -> RunningModel:
    """The model of a source that is present, ready for requests. Close the result.

    `resources` are those of the deployment that it will belong to; a model alone has its own. `lasting`: of the same model
    before; None: there was none. Raises ModelError or ConfigError, with a remedy, if the model can't be loaded or does not fit
    the machine.
    """
    resources = resources or Resources()
    name = _served_names(config, source)[0]
    try:
        running = _load(config, source, resources, lasting or Lasting(config, source))
    except BaseException as error:
        resources.memory.give_back(name)
        if isinstance(error, NotEnoughMemory) and not device.is_on_gpu(device.settled(config)):
            raise resources.memory.told_beside(name, error) from error
        raise
    give_back_free_memory()  # the vocabulary as the file has it was needed until now
    return running


def open_executor(config: Config, source: ModelSource) -> tuple[Config, LoadedModel, Executor]:
    """The settled config, the model and the executor that a server would have, for whoever runs steps without one.

    Close the executor. Raises what `start_model` raises.
    """
    resources = Resources()
    config, model, kv, executor = _plan(config, source, resources, resources.memory.available_bytes(""))
    return config, model, executor or build_executor(config, model, kv, partial(resources.team, model.name), resources.cores)


def _load(config: Config, source: ModelSource, resources: Resources, lasting: Lasting) -> RunningModel:
    check_recording(config)
    name = _served_names(config, source)[0]
    _check_address_space(config, source)
    available_bytes = resources.memory.available_bytes(name)
    config, model, kv, executor = _plan(config, source, resources, available_bytes)
    share = _share(config, model, kv)
    resources.memory.take(name, share)
    _log_model(model, config, kv, resources.cores)
    if config.model.experts_on_disk:
        _log.warning("%s", disk_words(model, available_bytes - share.num_bytes))
    try:
        return _start(config, source, model, kv, resources, executor, lasting)
    except MemoryError as error:
        kv_words = f", the KV cache {format_size(kv.num_bytes)}" if kv.num_bytes else ""
        raise NotEnoughMemory(
            f"There is not enough memory: the weights take {format_size(_num_weight_bytes(config, model))}{kv_words}, and "
            f"{format_size(available_bytes)} were free before.",
            remedy=f"Lower {'--kv-cache-memory or ' if kv.num_bytes else ''}--max-num-batched-tokens, or free some memory.",
        ) from error


def _check_address_space(config: Config, source: ModelSource) -> None:
    """Refuse a limit of the address space under which threads of a loaded model would fail. Raises ConfigError."""
    from penstock.models.load import load_model

    space, config = address_space(), device.settled(config)
    if space is None or device.is_on_gpu(config):
        return
    model = load_model(source, floats=device.held_floats(config), experts_on_disk=config.model.experts_on_disk)
    kv_bytes = config.kv.kv_cache_memory_bytes or LEAST_ROOM_BYTES
    check_address_space(space, _num_weight_bytes(config, model) + kv_bytes + RESERVE_BYTES)


def _share(config: Config, model: LoadedModel, kv: KvPlan) -> MemoryShare:
    if device.is_on_gpu(config):  # which has memory of its own, measured anew for each model
        return MemoryShare(num_adapter_bytes=kv.num_adapter_bytes)
    return MemoryShare(
        num_weight_bytes=_num_weight_bytes(config, model),
        num_kv_bytes=kv.num_bytes,
        num_step_bytes=kv.num_step_bytes,
        num_adapter_bytes=kv.num_adapter_bytes,
    )


def _num_weight_bytes(config: Config, model: LoadedModel) -> int:
    return model.num_weight_bytes - disk_bytes(config, model)


def _plan(
    config: Config, source: ModelSource, resources: Resources, available_bytes: int
) -> tuple[Config, LoadedModel, KvPlan, Executor | None]:
    """The settled config, the weights, and the plan of the memory (on a GPU with the executor that measured it).

    `available_bytes`: for the model. A KV cache whose size nobody has set takes a part of them, or with several models of the
    whole budget: so its size does not depend on which others are loaded.
    """
    from penstock.models.load import load_model

    config = device.settled(config)
    device.check_block_size(config)
    _check_cache(config.kv)
    _check_batch_size(config)
    room_bytes = device.weight_room_bytes(config, available_bytes - RESERVE_BYTES)
    floats = device.held_floats(config)
    model = load_model(
        source,
        max_weight_bytes=room_bytes,
        floats=floats,
        check_vocab=_check_vocab,
        served_len=config.model.max_model_len,
        generation=config.model.generation_config,
        experts_on_disk=config.model.experts_on_disk,
        task=config.model.task,
        pooling=cast("Pooling | None", config.model.pooling),
    )
    model = with_merged_adapter(config, model)
    device.check_head_dim(config, model)
    check_weight_dtype(config, model)
    check_adapters(config, model)
    if model.encoder is not None:
        config, kv = plan_encoder(config, model)
        build_policies(config, is_one_pass=True).gate.max_running(kv.capacity)
        executor = open_encoder(config, model, kv) if device.is_on_gpu(config) else None
        return config, model, kv, executor
    device.check_state(config, model)
    check_disk(config, model)
    if resources.num_models > 1:
        available_bytes = resources.memory.total_bytes()
    kv, executor = plan_memory(config, model, available_bytes, num_models=resources.num_models)
    return config, model, kv, executor


def _start(
    config: Config,
    source: ModelSource,
    model: LoadedModel,
    kv: KvPlan,
    resources: Resources,
    executor: Executor | None,
    lasting: Lasting,
) -> RunningModel:
    name = _served_names(config, source)[0]
    # The vocabulary takes about as long as the weights, and both leave Python for most of it.
    with ThreadPoolExecutor(max_workers=1) as side:
        text = side.submit(_load_text, config.model.chat_template, model)
        with contextlib.ExitStack() as undone:  # what a failed start must leave free for the next attempt
            executor = executor or build_executor(config, model, kv, _team(config, resources, name), resources.cores)
            undone.callback(executor.close)
            tokenizer, chat_template = text.result()
            store = _open_tier(config, model, executor, resources, name)
            if store is not None:
                undone.callback(store.close)
            maker = EngineMaker(config, source, kv, resources, lasting, executor=executor, store=store, tokenizer=tokenizer)
            undone.callback(maker.release)
            undone.callback(lasting.metrics.disconnect)
            running = _assemble(maker, model, executor, chat_template)
            undone.pop_all()
            return running


def _team(config: Config, resources: Resources, name: str) -> SeatOf:
    """The function that gives a native executor of the model its threads."""
    return partial(resources.team, name, share=config.sharing.machine_share)


def _check_vocab(vocab: GgufVocab) -> None:
    """Raise ModelError if no tokenizer can be made of a vocabulary, before weights are converted, which can take minutes."""
    from penstock.text.gguf_vocab import check_vocab

    check_vocab(vocab)


def _check_cache(kv: KvConfig) -> None:
    """Refuse settings of a cache that is off, before anything is loaded. Raises ConfigError."""
    if kv.prefix_sharing == "tenant" and not kv.prefix_caching:
        raise ConfigError(
            "prefix_sharing says who shares prefixes, and with --no-prefix-caching there are none.",
            remedy="Leave out --prefix-sharing or --no-prefix-caching.",
        )
    if kv.kv_disk_path is not None and not kv.kv_disk_size_bytes:
        raise ConfigError(
            f"kv_disk_path is {kv.kv_disk_path}, and kv_disk_size is 0: nothing would be written there.",
            remedy="Give --kv-disk-size, for example 10GiB, or leave out --kv-disk-path.",
        )


def _check_batch_size(config: Config) -> None:
    """Refuse batches that do not fit the rows and tokens of a step, before anything is loaded. Raises ConfigError.

    It is not known yet whether the model writes, so the settings may suit either kind.
    """
    capacity = Capacity(2, 1, device.max_rows(config), device.max_step_tokens(config), 1)
    try:
        policies = build_policies(config)
    except ConfigError as error:
        try:
            policies = build_policies(config, is_one_pass=True)
        except ConfigError:
            raise error from None
    policies.gate.max_running(capacity)


def build_core(
    config: Config,
    capacity: Capacity,
    observer: Observer,
    journal: RequestJournal | None = None,
    tier: Tier | None = None,
    most_step_ns: Callable[[], int] = lambda: 0,
    adapters: Adapters | None = None,
) -> EngineCore:
    """The scheduler with the policies that the config names, and the core around it.

    `most_step_ns`: as the scheduler wants it. `adapters`: where those of requests come from.
    """
    from penstock.engine.core import EngineCore
    from penstock.sched.scheduler import Scheduler

    scheduler = Scheduler(
        capacity,
        build_policies(config, is_one_pass=capacity.is_one_pass),
        enable_prefix_caching=config.kv.prefix_caching,
        tier=tier,
        most_step_ns=most_step_ns,
        adapters=adapters,
        max_adapters=config.lora.max_loras,
    )
    return EngineCore(scheduler, observer=observer, journal=journal)


class EngineMaker:
    """Makes the engines of one model: the first, and another one each time that the supervisor asks after a failure.

    Each engine has an executor and a store of its own. The store, which is the tier below the KV pool, is emptied in between.
    All have the same observers, so that counts go on.
    """

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        kv: KvPlan,
        resources: Resources,
        lasting: Lasting,
        *,
        executor: Executor,
        store: BlockStore | None,
        tokenizer: Tokenizer,
    ) -> None:
        """`executor` and `store` are those of the first engine. `config` has the device and the backend decided."""
        from penstock.admission.door import Admission
        from penstock.clock import WallClock
        from penstock.engine.bridge import Bridge
        from penstock.engine.ports import ObserverGroup, TokenObserverGroup
        from penstock.obs.signals import Signals

        self.config, self.source, self.kv, self._resources = config, source, kv, resources
        self.name = _served_names(config, source)[0]
        self._first_executor: Executor | None = executor
        self._stores = [store]
        """The store of each engine so far; the last one's is in use."""
        self._engine: Engine | None = None
        """The last one that was made."""
        self.tokenizer = tokenizer
        self.clock, self.bridge = WallClock(), Bridge()
        policies = build_policies(config, is_one_pass=executor.capacity.is_one_pass)
        self.metrics, self.journal, self.sources = lasting.metrics, lasting.journal, lasting.sources
        self.adapters = lasting.adapters
        self.metrics.settings_hash = settings_hash(config)
        self.metrics.tier.medium = "host" if config.kv.kv_host_size_bytes else "disk"
        self.admission = Admission(
            admission_limits(config.admission),
            executor.capacity,
            reads_priority=policies.order.reads_priority,
            tenants=lasting.tenants,
            adapters=self.adapters,
            max_adapters=config.lora.max_loras,
        )
        self.signals = Signals(policies.gate.max_running(executor.capacity), self.admission.drain.rate)
        self.admission.on_call = self.signals.on_call
        if self.journal is not None:
            self.journal.speaks_for_calls = executor.capacity.is_one_pass
        self._recorder = open_recorder(config, self.name, executor, self.clock)
        self._journals: list[RequestJournal] = [one for one in (self.journal, self._recorder) if one is not None]
        self._observer = ObserverGroup([self.metrics, self.admission, self.signals])
        self._token_observer = TokenObserverGroup([self.metrics, self.admission])

    def make(self, on_failed: Callable[[], None]) -> Engine:
        """An engine that is not started. Raises whatever loading the model raises."""
        executor, self._first_executor = self._first_executor, None
        if executor is None:
            self._stores.append(cleared(self._stores[-1]))
            if self._engine is not None and self._engine.step_age_ns():  # its step goes on, and maybe for ever
                self._give_up(self._engine)
                self._engine = None  # another attempt gives up nothing
            executor = self._executor_from_files()
            if self._recorder is not None:
                self._recorder.on_engine()
        try:
            self._engine = self._make(executor, on_failed)
        except BaseException:  # the next attempt needs its memory
            executor.close()
            raise
        return self._engine

    def _give_up(self, engine: Engine) -> None:
        """Others neither wait for the threads that an engine's step holds nor take its memory for free."""
        self._resources.leave_team(self.name)
        self._resources.memory.hold_stuck(self.name, lambda: engine.is_alive)

    def release(self) -> None:
        """Close the recording, the adapters and the stores and give the model's memory back, once no engine runs any more.

        Memory that a step holds which has not come back stays taken until it does.
        Parts that know each other are parted: the garbage collector, which looks for such circles, passes over all that was
        made before the server began.
        """
        self.close_recording()
        self.bridge.detach()
        engine, self._engine = self._engine, None
        if self.adapters is not None:
            self.adapters.close()
        for store in self._stores:
            if store is not None:
                store.close()
        if engine is not None and engine.is_alive:
            self._give_up(engine)
        self._resources.memory.give_back(self.name)

    def close_recording(self) -> None:
        """Idempotent."""
        if self._recorder is not None:
            self._recorder.close()

    def _executor_from_files(self) -> Executor:
        """Another executor, when one has failed, which may still hold its memory."""
        from penstock.models.load import load_model

        free_bytes = self._resources.memory.available_bytes(self.name, is_restart=True) - RESERVE_BYTES
        free_bytes -= self.kv.num_bytes + self.kv.num_step_bytes
        room_bytes = device.weight_room_bytes(self.config, free_bytes)
        model = load_model(
            self.source,
            max_weight_bytes=room_bytes,
            floats=device.held_floats(self.config),
            served_len=self.config.model.max_model_len,
            experts_on_disk=self.config.model.experts_on_disk,
            task=self.config.model.task,
            pooling=cast("Pooling | None", self.config.model.pooling),
        )
        model = with_merged_adapter(self.config, model)
        seat_of = _team(self.config, self._resources, self.name)
        executor = build_executor(self.config, model, self.kv, seat_of, self._resources.cores)
        give_back_free_memory()
        return executor

    def _make(self, executor: Executor, on_failed: Callable[[], None]) -> Engine:
        from penstock.engine.output import OutputStage
        from penstock.engine.ports import JournalGroup, TurnObserverGroup
        from penstock.engine.thread import Engine
        from penstock.text.tokenizer import detokenizer_factory

        # Each report goes through these: a group of one would be a call more.
        recorder, journals = self._recorder, self._journals
        journal = JournalGroup(journals) if len(journals) > 1 else next(iter(journals), None)
        turn_observer = self.metrics if recorder is None else TurnObserverGroup([self.metrics, recorder])
        tier = build_tier(self._stores[-1])
        most_step_ns = partial(self._resources.most_step_ns, self.name)
        core = build_core(self.config, executor.capacity, self._observer, journal, tier, most_step_ns, self.adapters)
        return Engine(
            core,
            executor,
            OutputStage(detokenizer_factory(self.tokenizer), observer=self._token_observer),
            clock=self.clock,
            sink=self.bridge.deliver,
            observer=self._observer,
            turn_observer=turn_observer,
            on_failed=on_failed,
            make_transfers=partial(self._make_transfers, core.scheduler.kv),
        )

    def _make_transfers(self, kv: KVManager, blocks: BlockMover, wake: Callable[[], None]) -> Transfers | None:
        from penstock.engine.transfers import Transfers

        tier, store = self.metrics.tier, self._stores[-1]
        if store is None:
            tier.is_open = False
            return None
        return Transfers(kv, blocks, store, clock=self.clock, stats=tier, wake=wake)


def _assemble(maker: EngineMaker, model: LoadedModel, executor: Executor, chat_template: ChatTemplate | None) -> RunningModel:
    """The supervisor, which has the first engine made, and everything around it; started."""
    from penstock.deploy.running import RunningModel
    from penstock.engine.supervisor import Supervisor
    from penstock.text.dialects import find_dialect
    from penstock.text.grammar import Grammars

    config, tokenizer, metrics = maker.config, maker.tokenizer, maker.metrics
    if tokenizer.vocab_size > model.spec.vocab_size:
        _log.warning(
            "the tokenizer knows %d tokens, the model %d: texts that need one of the others are refused",
            tokenizer.vocab_size,
            model.spec.vocab_size,
        )
    if maker.adapters is not None:
        _connect(maker.adapters, config.lora.max_lora_rank, model, executor, maker.kv.num_adapter_bytes)
    metrics.num_weight_bytes = getattr(executor, "weight_bytes", 0)  # of backends that do not keep the file's
    template = None if chat_template is None else chat_template.source
    info = _model_info(maker, model, executor, system_fingerprint(config, model, executor, template))
    engine = Supervisor(
        maker.make,
        clock=maker.clock,
        step_timeout_s=device.step_timeout_s(config.backend),
        on_restart=metrics.count_restart,
    )
    maker.bridge.attach(engine)
    metrics.connect(
        load=engine.load,
        signals=lambda: maker.signals.read(engine.load(), maker.clock.now_ns()),
        waste=engine.kv_waste_ratio,
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
                template, tool_parser=config.model.tool_call_parser, reasoning_parser=config.model.reasoning_parser
            ),
            admission=maker.admission,
            metrics=metrics,
            model=info,
            clock=maker.clock,
            slo_itl_ns=None if config.scheduler.slo_itl_s is None else int(config.scheduler.slo_itl_s * 1e9),
            prefix_sharing=config.kv.prefix_sharing,
            defaults=model.sampling,
            sources=maker.sources,
            journal=maker.journal,
            adapters=maker.adapters,
            release=maker.release,
        )
        undone.pop_all()
        return running


def open_adapters(lora: LoraConfig) -> Adapters | None:
    """The registry of the names that the settings give, which reads nothing yet. Raises ConfigError for one that is no name."""
    if not lora.is_on:
        return None
    from penstock.deploy.adapters import Adapters

    modules: dict[str, Path] = {}
    for entry in lora.lora_modules:
        name, equals, path = entry.partition("=")
        if not (name.strip() and equals and path.strip()):
            raise ConfigError(f"lora_modules: {entry!r} is not NAME=PATH.", remedy="Write --lora-modules sql=adapters/sql.")
        if name in modules:
            raise ConfigError(f"lora_modules: two adapters are called {name!r}.", remedy="Rename one of them.")
        if not Path(path).exists():
            raise ConfigError(f"lora_modules: there is no {path}.", remedy="Name the folder of PEFT, or a .gguf file.")
        modules[name] = Path(path)
    folder = None if lora.lora_dir is None else Path(lora.lora_dir)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"lora_dir: there is no folder {folder}.", remedy="Name the folder with the folders of adapters.")
    return Adapters(modules=modules, folder=folder, max_in_memory=lora.max_cpu_loras)


def _connect(adapters: Adapters, max_rank: int, model: LoadedModel, executor: Executor, max_bytes: int) -> None:
    """Adapters of this model may be loaded from now on. Nothing of the model's weights is kept for it."""
    from penstock.models.architectures import describe
    from penstock.models.load import load_adapter

    packer = cast("NativeExecutor | ReferenceExecutor | CudaExecutor", executor).adapter_packer
    spec, program = model.spec, describe(model.spec)

    def read(path: Path, files: AdapterFiles) -> AdapterFactors:
        return load_adapter(path, spec, program, max_rank=max_rank, files=files)

    adapters.connect(read, packer, max_bytes=max_bytes)


def _open_tier(config: Config, model: LoadedModel, executor: Executor, resources: Resources, name: str) -> BlockStore | None:
    if not config.kv.kv_host_size_bytes:
        return open_store(config, model, executor, name if resources.num_models > 1 else None)
    store = open_host_memory(config.kv, executor, available_bytes=resources.memory.available_bytes(name))
    resources.memory.take(name, MemoryShare(num_tier_bytes=config.kv.kv_host_size_bytes))  # only GPUs have this tier
    return store


def _load_text(template: str | None, model: LoadedModel) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer, and the chat template if the model or the settings have one; an encoder has none."""
    from penstock.text.chat import MAX_NAMES, ChatTemplate, choose_chat_template
    from penstock.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(
        model.tokenizer_source,
        bos_token_id=model.bos_token_id,
        eos_token_ids=model.eos_token_ids,
        special_tokens=model.special_tokens,
        ends=model.ends,
    )
    if model.encoder is not None:
        return tokenizer, None
    named = model.chat_templates
    if template is None and set(named) - {"default"}:
        _log.info("chat templates of the model: %s; --chat-template takes another", ", ".join(sorted(named)[:MAX_NAMES]))
    text = choose_chat_template(template, named)
    return tokenizer, None if text is None else ChatTemplate(text, special_tokens=tokenizer.special_tokens)


def _model_info(maker: EngineMaker, model: LoadedModel, executor: Executor, fingerprint: str) -> ModelInfo:
    from penstock.deploy.running import ModelInfo

    config, source, capacity = maker.config, maker.source, executor.capacity
    return ModelInfo(
        served_names=_served_names(config, source),
        aliases=_aliases(config, source),
        root=model.path.name if source.entry is None else source.name,
        fingerprint=fingerprint,
        created_unix_s=int(_newest_file(model.path).stat().st_mtime),
        max_model_len=capacity.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=maker.tokenizer.eos_token_ids,
        is_priority_scheduled=build_policies(config, is_one_pass=capacity.is_one_pass).order.reads_priority,
        encoder=None if model.encoder is None else replace(model.encoder, max_tokens=capacity.max_model_len),
        max_step_tokens=capacity.max_step_tokens,
        max_beams=capacity.max_rows,
    )


def _served_names(config: Config, source: ModelSource) -> tuple[str, ...]:
    return config.model.served_model_names or (source.name,)


def _aliases(config: Config, source: ModelSource) -> tuple[str, ...]:
    """Other names of a model that users know: those they gave, and unless they named it themselves what they wrote and the
    catalogue's."""
    known = () if config.model.served_model_names else (*(source.entry.aliases if source.entry else ()), config.model.model)
    return tuple(dict.fromkeys([*known, *config.sharing.aliases]))


def _newest_file(path: Path) -> Path:
    return max(path.iterdir(), key=lambda file: file.stat().st_mtime) if path.is_dir() else path


def _sources(server: ServerConfig) -> Sources:
    from penstock.deploy.running import Sources

    if server.seed is None:
        return Sources()
    generator = random.Random(server.seed)  # noqa: S311  # repeatable on purpose
    return Sources(draw_seed=lambda: generator.getrandbits(64))


def _log_model(model: LoadedModel, config: Config, kv: KvPlan, cores: Cores) -> None:
    formats: dict[WeightFormat, int] = {}
    for tensor in model.weights.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.num_bytes
    shares = ", ".join(f"{name} {format_size(size)}" for name, size in sorted(formats.items(), key=lambda item: -item[1]))
    _log.info("model %s (%s), weights %s", model.name, model.spec.architecture, shares)
    if model.encoder is None:
        _log_kv(model, config, kv)
    else:
        _log.info(
            "the model reads texts of up to %s and writes none: %s; up to %d texts and %s in one step",
            counted(kv.max_model_len, "token"),
            f"{model.encoder.task}, pooling {model.encoder.pooling}, {counted(model.encoder.width, 'number')}",
            kv.capacity.max_rows,
            counted(kv.capacity.max_step_tokens, "token"),
        )
    if config.lora.is_on:
        _log.info(
            "adapters of up to rank %d: %d different ones at once, %s for %d in memory and the reading of another",
            config.lora.max_lora_rank,
            config.lora.max_loras,
            format_size(kv.num_adapter_bytes),
            config.lora.max_cpu_loras,
        )
    _log.info("backend %s, %s", config.backend.backend, device.words(config.backend, cores))
    policies = build_policies(config, is_one_pass=kv.capacity.is_one_pass)
    _log.info("policies: %s", ", ".join(f"{seam} {words}" for seam, words in policies.words.items()))


def _log_kv(model: LoadedModel, config: Config, kv: KvPlan) -> None:
    _log.info(
        "KV cache of %s, up to %s as it fills: %s of %s, %s in all; longest request %d",
        device.kv_dtype(config),
        format_size(kv.num_bytes),
        counted(kv.num_blocks - 1, "block"),
        counted(kv.block_size, "token"),
        counted(kv.num_tokens, "token"),
        kv.max_model_len,
    )
    typical = min(TYPICAL_REQUEST_TOKENS, kv.max_model_len)
    num_typical, num_longest = kv.num_requests_of(typical), kv.num_requests_of(kv.max_model_len)
    _log.info(
        "KV cache holds %s of %s (prompt and answer) at once%s; at most %d run at once",
        counted(num_typical, "request"),
        counted(typical, "token"),
        f", or {num_longest} of the longest" if typical < kv.max_model_len else "",
        device.max_rows(config),
    )
    if kv.is_shortened:
        _log.warning(
            "the model takes requests of up to %d tokens, but the KV cache holds %d; raise --kv-cache-memory for longer ones",
            model.spec.max_model_len,
            kv.num_tokens,
        )
