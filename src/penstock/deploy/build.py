"""Builds a running model from a blueprint.

The vocabulary is loaded in parallel with the weights. Imports are inside functions, so that importing this file is fast.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.deploy.blueprint import Blueprint
from penstock.deploy.draft import check_same_tokens
from penstock.deploy.engine_maker import EngineMaker, EngineTap, seat_of
from penstock.deploy.executor import first_executor
from penstock.deploy.fingerprint import kv_fingerprint, system_fingerprint
from penstock.deploy.lasting import Lasting
from penstock.deploy.resources import Resources
from penstock.deploy.start_log import log_kv, log_model
from penstock.deploy.tiers import open_host_memory, open_store

if TYPE_CHECKING:
    from penstock.deploy.adapters import Adapters
    from penstock.deploy.running import ModelInfo, RunningModel
    from penstock.engine.ports import BlockStore, Executor
    from penstock.models.adapter import AdapterPacker
    from penstock.models.adapter_files import AdapterFiles
    from penstock.models.weights import LoadedModel
    from penstock.text.chat import ChatTemplate
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.adapter import PackedAdapter

_log = logging.getLogger(__name__)


def build(
    blueprint: Blueprint, model: LoadedModel, resources: Resources, lasting: Lasting, tap: EngineTap | None = None
) -> RunningModel:
    """Load a model, and return it running. The caller closes it. `model` and `blueprint` come from the same `resolve`.

    Raises ConfigError if something does not fit, after closing everything.
    """
    log_model(blueprint, model)
    # The vocabulary takes about as long as the weights, and both release the GIL for most of the time.
    with ThreadPoolExecutor(max_workers=1) as side, contextlib.ExitStack() as undone:
        text = side.submit(load_text, blueprint.settings.chat_template, model)
        blueprint = replace(blueprint, shares_kv=tap is not None)
        blueprint, executor = first_executor(blueprint, model, seat_of(blueprint, resources))
        undone.callback(executor.close)
        if model.encoder is None:
            log_kv(blueprint, model)
        tokenizer, chat_template = text.result()
        if blueprint.draft is not None and not blueprint.draft.loading.is_of_head:
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
        packer: AdapterPacker = executor.adapter_packer  # type: ignore[attr-defined]  # all backends have one
        connect_adapters(maker.adapters, blueprint, model, packer)
    metrics.num_weight_bytes = getattr(executor, "weight_bytes", 0)  # only of backends that convert weights
    template = None if chat_template is None else chat_template.source
    info = _model_info(blueprint, model, executor, template)
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


def connect_adapters(adapters: Adapters, blueprint: Blueprint, model: LoadedModel, pack: AdapterPacker) -> None:
    """Let the registry load adapters of this model. It keeps the model's embedding and output alive, but no other weights."""
    from penstock.models.adapter import OUTPUT_SITE
    from penstock.models.architectures import describe
    from penstock.models.load import load_adapter

    spec, program = model.spec, describe(model.spec)
    tables = {name: model.weights[name] for name in ("embed", OUTPUT_SITE) if name in model.weights}
    max_rank = blueprint.lora.max_lora_rank

    def read(path: Path, files: AdapterFiles) -> PackedAdapter:
        return pack(load_adapter(path, spec, program, max_rank=max_rank, files=files, tables=tables))

    adapters.connect(read, max_bytes=blueprint.adapters.num_bytes)


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
    tokenizer.encode("a", add_special_tokens=False)  # starts the library's threads, which it tries once in a process
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
    )


def _model_info(blueprint: Blueprint, model: LoadedModel, executor: Executor, template: str | None) -> ModelInfo:
    from penstock.deploy.running import ModelInfo

    capacity, source, settings = executor.capacity, blueprint.loading.source, blueprint.settings
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
