"""The composition root: turns a config into a running model. Called by `cli`, the only room that it does not know.

Heavy imports are inside functions, so that importing this costs nothing; what can be loaded side by side is.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Config, KvConfig, ServerConfig
from penstock.config.units import format_size
from penstock.deploy import device
from penstock.deploy.executor import build_executor, plan_memory
from penstock.deploy.fingerprint import system_fingerprint
from penstock.deploy.policies import admission_limits, build_policies
from penstock.deploy.sizing import RESERVE_BYTES, TYPICAL_REQUEST_TOKENS, KvPlan
from penstock.deploy.tiers import build_tier, cleared, open_host_memory, open_store
from penstock.machine import available_memory_bytes, give_back_free_memory
from penstock.types.counted import counted
from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.deploy.running import ModelInfo, RunningModel, Sources
    from penstock.engine.core import EngineCore
    from penstock.engine.ports import BlockMover, BlockStore, Executor, Observer, RequestJournal
    from penstock.kv.tiers import Tier
    from penstock.models.catalog import ModelSource
    from penstock.models.weights import LoadedModel
    from penstock.text.chat import ChatTemplate
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.vocab import GgufVocab

_log = logging.getLogger(__name__)


def build_runtime(config: Config, source: ModelSource) -> RunningModel:
    """The model of a source that is present, ready for requests. Close the result.

    Raises ModelError or ConfigError, with a remedy, if the model can't be loaded or does not fit the machine.
    """
    runtime = _load(config, source)
    give_back_free_memory()  # of the vocabulary as the file has it, which goes only now
    return runtime


def _load(config: Config, source: ModelSource) -> RunningModel:
    from penstock.models.load import load_model

    config = device.settled(config)
    device.check_block_size(config)
    _check_cache(config.kv)
    _check_batch_size(config)
    available_bytes = available_memory_bytes()
    room_bytes = device.weight_room_bytes(config, available_bytes - RESERVE_BYTES)
    floats = device.held_floats(config)
    model = load_model(source, max_weight_bytes=room_bytes, floats=floats, check_vocab=_check_vocab)
    device.check_head_dim(config, model)
    kv, executor = plan_memory(config, model, available_bytes)
    _log_model(model, config, kv)
    try:
        return _start(config, source, model, kv, executor)
    except MemoryError as error:
        raise ConfigError(
            f"There is not enough memory: the weights take {format_size(model.num_weight_bytes)}, the KV cache "
            f"{format_size(kv.num_bytes)}, and {format_size(available_bytes)} were free before.",
            remedy="Lower --kv-cache-memory or --max-num-batched-tokens, or free some memory.",
        ) from error


def _start(config: Config, source: ModelSource, model: LoadedModel, kv: KvPlan, executor: Executor | None) -> RunningModel:
    # The vocabulary takes about as long as the weights, and both leave Python for most of it.
    with ThreadPoolExecutor(max_workers=1) as side:
        tokenizer = side.submit(_load_text, config.model.chat_template, model)
        executor = executor or build_executor(config, model, kv)
        try:
            return _assemble(config, source, model, kv, executor, *tokenizer.result())
        except BaseException:
            executor.close()
            raise


def _check_vocab(vocab: GgufVocab) -> None:
    """Before weights are converted, which can take minutes. Raises ModelError if no tokenizer can be made of it."""
    from penstock.text.gguf_vocab import check_vocab

    check_vocab(vocab)


def _check_cache(kv: KvConfig) -> None:
    """Before anything is loaded: settings of what is off are mistakes."""
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
    """Before anything is loaded: whether the gate's batches fit the rows and tokens of a step."""
    capacity = Capacity(2, 1, device.max_rows(config), device.max_step_tokens(config), 1)
    build_policies(config).gate.max_running(capacity)


def _rebuild_executor(config: Config, source: ModelSource, kv: KvPlan) -> Executor:
    """Another executor, from the files: the one before it has failed, and may still hold its memory."""
    from penstock.models.load import load_model

    room_bytes = device.weight_room_bytes(config, available_memory_bytes() - RESERVE_BYTES - kv.num_bytes)
    model = load_model(source, max_weight_bytes=room_bytes, floats=device.held_floats(config))
    executor = build_executor(config, model, kv)
    give_back_free_memory()
    return executor


def build_core(
    config: Config,
    capacity: Capacity,
    observer: Observer,
    journal: RequestJournal | None = None,
    tier: Tier | None = None,
) -> EngineCore:
    """The scheduler with the policies that the config names, and the core around it."""
    from penstock.engine.core import EngineCore
    from penstock.sched.scheduler import Scheduler

    scheduler = Scheduler(capacity, build_policies(config), enable_prefix_caching=config.kv.prefix_caching, tier=tier)
    return EngineCore(scheduler, observer=observer, journal=journal)


def _assemble(
    config: Config,
    source: ModelSource,
    model: LoadedModel,
    kv: KvPlan,
    executor: Executor,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
) -> RunningModel:
    """The engine around an executor, the server's half around the engine; both started."""
    from penstock.admission import Admission
    from penstock.clock import WallClock
    from penstock.deploy.running import RunningModel
    from penstock.engine.bridge import Bridge
    from penstock.engine.output import OutputStage
    from penstock.engine.supervisor import Supervisor
    from penstock.engine.thread import Engine
    from penstock.engine.transfers import Transfers
    from penstock.obs.explain.journal import Journal
    from penstock.obs.metrics import Metrics
    from penstock.obs.observers import ObserverGroup, TokenObserverGroup
    from penstock.obs.signals import Signals
    from penstock.text.detokenizer import detokenizer_factory
    from penstock.text.grammar import Grammars

    if tokenizer.vocab_size > model.spec.vocab_size:
        _log.warning(
            "the tokenizer knows %d tokens, the model %d: texts that need one of the others are refused",
            tokenizer.vocab_size,
            model.spec.vocab_size,
        )
    clock = WallClock()
    template = None if chat_template is None else chat_template.source
    fingerprint = system_fingerprint(config, model, executor, template)
    info = _model_info(config, source, model, executor.capacity, tokenizer, fingerprint)
    metrics = Metrics(info.name)
    policies = build_policies(config)
    admission = Admission(admission_limits(config.admission), executor.capacity, reads_priority=policies.order.reads_priority)
    signals = Signals(policies.gate.max_running(executor.capacity), admission.drain.rate)
    admission.on_call = signals.on_call
    metrics.num_weight_bytes = getattr(executor, "weight_bytes", 0)  # of backends that keep them otherwise than the file
    metrics.tier.medium = "host" if config.kv.kv_host_size_bytes else "disk"
    observer = ObserverGroup([metrics, admission, signals])
    journal = Journal(config.server.explained_requests) if config.server.explained_requests else None
    bridge = Bridge()
    first = [executor]
    stores: list[BlockStore | None] = [open_host_memory(config.kv, executor) or open_store(config, model, executor)]
    """Of each engine; the last one's is in use."""

    def engine_over(executor: Executor, own_store: BlockStore | None, on_failed: Callable[[], None]) -> Engine:
        core = build_core(config, executor.capacity, observer, journal, build_tier(own_store))

        def make_transfers(blocks: BlockMover, wake: Callable[[], None]) -> Transfers | None:
            if own_store is None:
                metrics.tier.is_open = False
                return None
            return Transfers(core.scheduler.kv, blocks, own_store, clock=clock, stats=metrics.tier, wake=wake)

        return Engine(
            core,
            executor,
            OutputStage(detokenizer_factory(tokenizer), observer=TokenObserverGroup([metrics, admission])),
            clock=clock,
            sink=bridge.deliver,
            observer=observer,
            turn_observer=metrics,
            on_failed=on_failed,
            make_transfers=make_transfers,
        )

    def make_engine(on_failed: Callable[[], None]) -> Engine:
        if not first:
            stores.append(cleared(stores[-1]))
        own_store = stores[-1]
        executor = first.pop() if first else _rebuild_executor(config, source, kv)
        try:
            return engine_over(executor, own_store, on_failed)
        except BaseException:  # the next attempt needs its memory
            executor.close()
            raise

    engine = Supervisor(
        make_engine, clock=clock, step_timeout_s=device.step_timeout_s(config.backend), on_restart=metrics.count_restart
    )
    bridge.attach(engine)
    metrics.connect(
        load=engine.load,
        signals=lambda: signals.read(engine.load(), clock.now_ns()),
        waste=engine.kv_waste_ratio,
    )
    engine.start()

    def close_stores() -> None:
        for store in stores:
            if store is not None:
                store.close()

    return RunningModel(
        engine=engine,
        bridge=bridge,
        tokenizer=tokenizer,
        chat_template=chat_template,
        grammars=Grammars(tokenizer, vocab_size=model.spec.vocab_size),
        admission=admission,
        metrics=metrics,
        model=info,
        clock=clock,
        slo_itl_ns=None if config.scheduler.slo_itl_s is None else int(config.scheduler.slo_itl_s * 1e9),
        prefix_sharing=config.kv.prefix_sharing,
        sources=_sources(config.server),
        journal=journal,
        close_store=close_stores,
    )


def _load_text(template: str | None, model: LoadedModel) -> tuple[Tokenizer, ChatTemplate | None]:
    """Everything between text and tokens."""
    from penstock.text.chat import ChatTemplate, read_chat_template
    from penstock.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(
        model.tokenizer_source,
        bos_token_id=model.bos_token_id,
        eos_token_ids=model.eos_token_ids,
        special_tokens=model.special_tokens,
    )
    text = model.chat_template if template is None else read_chat_template(template)
    return tokenizer, None if text is None else ChatTemplate(text, special_tokens=tokenizer.special_tokens)


def _model_info(
    config: Config, source: ModelSource, model: LoadedModel, capacity: Capacity, tokenizer: Tokenizer, fingerprint: str
) -> ModelInfo:
    from penstock.deploy.running import ModelInfo

    return ModelInfo(
        served_names=config.model.served_model_names or (source.name,),
        aliases=() if config.model.served_model_names else _aliases(config.model.model, source),
        root=str(model.path) if source.entry is None else source.name,
        fingerprint=fingerprint,
        created_unix_s=int(_newest_file(model.path).stat().st_mtime),
        max_model_len=capacity.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        is_priority_scheduled=build_policies(config).order.reads_priority,
        max_beams=capacity.max_rows,
    )


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
    formats: dict[Any, int] = {}
    for tensor in model.weights.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.num_bytes
    shares = ", ".join(f"{name} {format_size(size)}" for name, size in sorted(formats.items(), key=lambda item: -item[1]))
    _log.info("model %s (%s), weights %s", model.name, model.spec.architecture, shares)
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
    _log.info("backend %s, %s", config.backend.backend, device.words(config.backend))
