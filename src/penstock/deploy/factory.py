"""The factory: turns configs into running models. The command line, the Python API and tests call it.

    start_deployment   configs -> Deployment: a model for each, on one machine's `Resources`
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.config import Config, KvConfig, ServerConfig
from penstock.config.saved import settings_hash
from penstock.config.units import format_size
from penstock.deploy import device
from penstock.deploy.arms import Arms, read_arms
from penstock.deploy.encoders import plan_encoder
from penstock.deploy.executor import build_executor, check_weight_dtype, open_encoder, plan_memory
from penstock.deploy.experts import check_disk, disk_bytes, disk_words
from penstock.deploy.fingerprint import system_fingerprint
from penstock.deploy.policies import admission_limits, build_policies
from penstock.deploy.recorder import check_recording, open_recorder
from penstock.deploy.resources import MemoryShare, Resources
from penstock.deploy.sizing import RESERVE_BYTES, TYPICAL_REQUEST_TOKENS, KvPlan
from penstock.deploy.tiers import build_tier, cleared, open_host_memory, open_store
from penstock.machine import give_back_free_memory
from penstock.types.errors import ConfigError, NotEnoughMemory, counted
from penstock.types.plan import Capacity
from penstock.types.request import ARM_A, ARM_B

if TYPE_CHECKING:
    from penstock.deploy.running import Deployment, ModelInfo, RunningModel, Sources
    from penstock.engine.core import EngineCore
    from penstock.engine.ports import BlockMover, BlockStore, Executor, Observer, RequestJournal
    from penstock.engine.thread import Engine
    from penstock.engine.transfers import Transfers
    from penstock.kv.manager import KVManager
    from penstock.kv.tiers import Tier
    from penstock.models.catalog import ModelSource
    from penstock.models.formats import WeightFormat
    from penstock.models.weights import LoadedModel
    from penstock.sched.policies.base import Policies
    from penstock.text.chat import ChatTemplate
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.model_spec import Pooling
    from penstock.types.vocab import GgufVocab

_log = logging.getLogger(__name__)


def locate(config: Config) -> ModelSource:
    """The source of the config's model, which is fetched first if it is one that can be. Raises PenstockError."""
    from penstock.models.catalog import cache_dir, resolve

    source = resolve(config.model.model, cache_dir(config.model.cache_dir))
    if not source.is_present:
        from penstock.models.pull import TerminalProgress, ensure_present

        ensure_present(source, progress=TerminalProgress())
    return source


def start_deployment(configs: Sequence[Config]) -> Deployment:
    """A model for each config, the first of them the default one; all share one machine. Close the result.

    Raises what `locate` and `start_model` raise, and ConfigError for two models with one name; then none is left running.
    """
    resources = Resources()
    with contextlib.ExitStack() as started:
        models = []
        for config in configs:
            models.append(start_model(config, locate(config), resources))
            started.callback(models[-1].close)
        from penstock.deploy.running import Deployment  # not before, as its imports would hold up the first model's weights

        deployment = Deployment(models)
        started.pop_all()
    return deployment


def start_model(config: Config, source: ModelSource, resources: Resources | None = None) -> RunningModel:
    """The model of a source that is present, ready for requests. Close the result.

    `resources` are those of the deployment that it will belong to; a model alone has its own. Raises ModelError or
    ConfigError, with a remedy, if the model can't be loaded or does not fit the machine.
    """
    resources = resources or Resources()
    name = _served_names(config, source)[0]
    try:
        running = _load(config, source, resources)
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
    config, model, kv, executor, _ = _plan(config, source, resources)
    return config, model, executor or build_executor(config, model, kv, partial(resources.team, model.name))


def _load(config: Config, source: ModelSource, resources: Resources) -> RunningModel:
    check_recording(config)
    arms = read_arms(config)
    config, model, kv, executor, available_bytes = _plan(config, source, resources)
    # A GPU has memory of its own, which is measured anew for each model.
    is_on_gpu = device.is_on_gpu(config)
    share = MemoryShare()
    num_weight_bytes = model.num_weight_bytes - disk_bytes(config, model)
    if not is_on_gpu:
        share = replace(share, num_weight_bytes=num_weight_bytes, num_kv_bytes=kv.num_bytes, num_step_bytes=kv.num_step_bytes)
    resources.memory.take(_served_names(config, source)[0], share)
    _log_model(model, config, kv)
    if config.model.experts_on_disk:
        _log.warning("%s", disk_words(model, available_bytes - share.num_bytes))
    if arms is not None:
        _log.info("A/B test: %s", arms.words)
    try:
        return _start(config, source, model, kv, resources, executor, arms)
    except MemoryError as error:
        kv_words = f", the KV cache {format_size(kv.num_bytes)}" if kv.num_bytes else ""
        raise NotEnoughMemory(
            f"There is not enough memory: the weights take {format_size(num_weight_bytes)}{kv_words}, and "
            f"{format_size(available_bytes)} were free before.",
            remedy=f"Lower {'--kv-cache-memory or ' if kv.num_bytes else ''}--max-num-batched-tokens, or free some memory.",
        ) from error


def _plan(
    config: Config, source: ModelSource, resources: Resources
) -> tuple[Config, LoadedModel, KvPlan, Executor | None, int]:
    """The settled config, the weights, the plan of the memory (on a GPU with the executor that measured it), and the bytes that
    were free before.
    """
    from penstock.models.load import load_model

    config = device.settled(config)
    device.check_block_size(config)
    _check_cache(config.kv)
    _check_batch_size(config)
    available_bytes = resources.memory.available_bytes(_served_names(config, source)[0])
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
    device.check_head_dim(config, model)
    check_weight_dtype(config, model)
    if model.encoder is not None:
        config, kv = plan_encoder(config, model)
        build_policies(config, is_one_pass=True).gate.max_running(kv.capacity)
        executor = open_encoder(config, model, kv) if device.is_on_gpu(config) else None
        return config, model, kv, executor, available_bytes
    device.check_state(config, model)
    check_disk(config, model)
    kv, executor = plan_memory(config, model, available_bytes)
    return config, model, kv, executor, available_bytes


def _start(
    config: Config,
    source: ModelSource,
    model: LoadedModel,
    kv: KvPlan,
    resources: Resources,
    executor: Executor | None,
    arms: Arms | None,
) -> RunningModel:
    name = _served_names(config, source)[0]
    # The vocabulary takes about as long as the weights, and both leave Python for most of it.
    with ThreadPoolExecutor(max_workers=1) as side:
        text = side.submit(_load_text, config.model.chat_template, model)
        executor = executor or build_executor(config, model, kv, partial(resources.team, name))
        try:
            tokenizer, chat_template = text.result()
            store = _open_tier(config, model, executor, resources, name)
            maker = EngineMaker(config, source, kv, resources, executor=executor, store=store, tokenizer=tokenizer, arms=arms)
            try:
                return _assemble(maker, model, executor, chat_template)
            except BaseException:  # the next attempt opens the same file
                maker.close_recording()
                raise
        except BaseException:
            executor.close()
            raise


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


def _policies(config: Config, arms: Arms | None, capacity: Capacity) -> Policies:
    is_one_pass = capacity.is_one_pass
    return build_policies(config, is_one_pass=is_one_pass) if arms is None else arms.policies(config, is_one_pass=is_one_pass)


def build_core(
    config: Config,
    capacity: Capacity,
    observer: Observer,
    journal: RequestJournal | None = None,
    tier: Tier | None = None,
    arms: Arms | None = None,
) -> EngineCore:
    """The scheduler with the policies that the config names, in an A/B test with those of both arms, and the core around it."""
    from penstock.engine.core import EngineCore
    from penstock.sched.scheduler import Scheduler

    scheduler = Scheduler(
        capacity, _policies(config, arms, capacity), enable_prefix_caching=config.kv.prefix_caching, tier=tier
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
        *,
        executor: Executor,
        store: BlockStore | None,
        tokenizer: Tokenizer,
        arms: Arms | None = None,
    ) -> None:
        """`executor` and `store` are those of the first engine. `config` has the device and the backend decided.

        `arms`: the A/B test, of which `config` has the settings of arm A.
        """
        from penstock.admission.door import Admission
        from penstock.clock import WallClock
        from penstock.engine.bridge import Bridge
        from penstock.engine.ports import ObserverGroup, TokenObserverGroup
        from penstock.obs.explain.journal import Journal
        from penstock.obs.metrics import Metrics
        from penstock.obs.signals import Signals

        self.config, self.source, self._kv, self._resources = config, source, kv, resources
        self.arms = arms
        self.name = _served_names(config, source)[0]
        self._first_executor: Executor | None = executor
        self._stores = [store]
        """The store of each engine so far; the last one's is in use."""
        self._engine: Engine | None = None
        """The last one that was made."""
        self.tokenizer = tokenizer
        self.clock, self.bridge = WallClock(), Bridge()
        policies = _policies(config, arms, executor.capacity)
        self.metrics = Metrics(self.name, arms=() if arms is None else (ARM_A, ARM_B))
        self.metrics.settings_hash = settings_hash(config)
        self.metrics.tier.medium = "host" if config.kv.kv_host_size_bytes else "disk"
        self.admission = Admission(
            admission_limits(config.admission),
            executor.capacity,
            reads_priority=policies.order.reads_priority,
            limits_b=None if arms is None else admission_limits(arms.b.admission),
        )
        self.signals = Signals(policies.gate.max_running(executor.capacity), self.admission.drain.rate)
        self.admission.on_call = self.signals.on_call
        num_explained = config.server.explained_requests
        is_one_pass = executor.capacity.is_one_pass
        self.journal = Journal(num_explained, speaks_for_calls=is_one_pass) if num_explained else None
        self._recorder = open_recorder(config, self.name, executor, self.clock, arms)
        self._journals: list[RequestJournal] = [one for one in (self.journal, self._recorder) if one is not None]
        self._observer = ObserverGroup([self.metrics, self.admission, self.signals])
        self._token_observer = TokenObserverGroup([self.metrics, self.admission])

    def make(self, on_failed: Callable[[], None]) -> Engine:
        """An engine that is not started. Raises whatever loading the model raises."""
        executor, self._first_executor = self._first_executor, None
        if executor is None:
            self._stores.append(cleared(self._stores[-1]))
            if self._engine is not None and self._engine.step_age_ns():  # its step goes on, and maybe for ever
                self._resources.leave_team(self.name)
            executor = self._executor_from_files()
            if self._recorder is not None:
                self._recorder.on_engine()
        try:
            self._engine = self._make(executor, on_failed)
        except BaseException:  # the next attempt needs its memory
            executor.close()
            raise
        return self._engine

    def release(self) -> None:
        """Close the recording and the stores and give the model's memory back, once no engine runs any more."""
        self.close_recording()
        for store in self._stores:
            if store is not None:
                store.close()
        self._resources.memory.give_back(self.name)

    def close_recording(self) -> None:
        """Idempotent."""
        if self._recorder is not None:
            self._recorder.close()

    def note_refused(self, tenant: str, arm: str, reason: str) -> None:
        """The door refused a call. A recording of an A/B test has these, too: an arm may refuse more."""
        if self._recorder is not None and self.arms is not None:
            self._recorder.on_refused(tenant, arm, reason, self.clock.now_ns())

    def _executor_from_files(self) -> Executor:
        """Another executor, when one has failed, which may still hold its memory."""
        from penstock.models.load import load_model

        free_bytes = self._resources.memory.available_bytes(self.name) - RESERVE_BYTES
        free_bytes -= self._kv.num_bytes + self._kv.num_step_bytes
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
        executor = build_executor(self.config, model, self._kv, partial(self._resources.team, self.name))
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
        core = build_core(self.config, executor.capacity, self._observer, journal, tier, self.arms)
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
    from penstock.text.grammar import Grammars

    config, tokenizer, metrics = maker.config, maker.tokenizer, maker.metrics
    if tokenizer.vocab_size > model.spec.vocab_size:
        _log.warning(
            "the tokenizer knows %d tokens, the model %d: texts that need one of the others are refused",
            tokenizer.vocab_size,
            model.spec.vocab_size,
        )
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
    engine.start()
    return RunningModel(
        engine=engine,
        bridge=maker.bridge,
        tokenizer=tokenizer,
        chat_template=chat_template,
        grammars=Grammars(tokenizer, vocab_size=model.spec.vocab_size),
        admission=maker.admission,
        metrics=metrics,
        model=info,
        clock=maker.clock,
        slo_itl_ns=None if config.scheduler.slo_itl_s is None else int(config.scheduler.slo_itl_s * 1e9),
        prefix_sharing=config.kv.prefix_sharing,
        defaults=model.sampling,
        sources=_sources(config.server),
        journal=maker.journal,
        arms=maker.arms,
        on_refused=maker.note_refused,
        release=maker.release,
    )


def _open_tier(config: Config, model: LoadedModel, executor: Executor, resources: Resources, name: str) -> BlockStore | None:
    if not config.kv.kv_host_size_bytes:
        return open_store(config, model, executor)
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
        aliases=() if config.model.served_model_names else _aliases(config.model.model, source),
        root=str(model.path) if source.entry is None else source.name,
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


def _aliases(given: str, source: ModelSource) -> tuple[str, ...]:
    """Other names of a model that users know: the catalogue's, and what they wrote."""
    return tuple(dict.fromkeys([*(source.entry.aliases if source.entry else ()), given]))


def _newest_file(path: Path) -> Path:
    return max(path.iterdir(), key=lambda file: file.stat().st_mtime) if path.is_dir() else path


def _sources(server: ServerConfig) -> Sources:
    from penstock.deploy.running import Sources

    if server.seed is None:
        return Sources()
    generator = random.Random(server.seed)  # noqa: S311  # repeatable on purpose
    return Sources(draw_seed=lambda: generator.getrandbits(64))


def _log_model(model: LoadedModel, config: Config, kv: KvPlan) -> None:
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
    _log.info("backend %s, %s", config.backend.backend, device.words(config.backend))
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
