"""The model of a cluster as the front serves it: texts, admission and routing, around a `Fleet` in place of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock.admission.door import Admission
from penstock.cluster.adapters import connect_at_front
from penstock.cluster.fleet import Fleet
from penstock.cluster.recipes import RecipeBook
from penstock.config import Config, Device, SharingConfig
from penstock.config.setting import settings_of
from penstock.deploy.adapters import Adapters
from penstock.deploy.build import load_text
from penstock.deploy.factory import make_lasting
from penstock.deploy.lasting import Lasting
from penstock.deploy.resolve import aliases, resolve, served_names
from penstock.deploy.resources import Machine, MemoryShare
from penstock.deploy.running import RunningModel, ServedModel
from penstock.engine.bridge import Bridge
from penstock.engine.ports import ObserverGroup
from penstock.models.catalog import ModelSource
from penstock.models.facts import read_facts
from penstock.obs.metrics import Metrics
from penstock.obs.signals import Signals
from penstock.text.dialects import find_dialect
from penstock.types.errors import ConfigError

_SHARING = ("alias", "split_of", "split_share", "split_tenant")
_REFUSED = ("record", "kv_events", "pin_threads", *(one.key for one in settings_of(SharingConfig) if one.key not in _SHARING))
"""Settings that a cluster can't have yet."""


def serve_replicas(
    config: Config,
    source: ModelSource,
    fleet: Fleet,
    bridge: Bridge,
    machine: Machine,
    on_closed: Callable[[], None] = lambda: None,
) -> ServedModel:
    """Return the model of a fleet with at least one connected replica. The fleet's sink is `bridge.deliver`.

    `on_closed` is called when the model has been closed.
    """
    lasting = make_lasting(config, source)
    lasting.metrics.holds_adapters = False
    return ServedModel(
        names=served_names(config, source),
        aliases=aliases(config, source),
        adapters=lasting.adapters,
        metrics=lasting.metrics,
        load=partial(_front, config, source, fleet, bridge, machine, lasting, on_closed),
        plan=partial(MemoryShare, num_reserve_bytes=0),  # its replicas have the memory
        read_facts=partial(read_facts, source),
        is_fixed=True,
        max_waiting=config.admission.max_queue,
        tenant_limits=config.admission.tenant_limits,
    )


def without_splits(config: Config) -> Config:
    """Return the config without the settings that split requests between models."""
    return replace(config, sharing=replace(config.sharing, split_of=None, split_share=None, split_tenants=()))


def check(config: Config) -> None:
    """Raise ConfigError for settings that a cluster can't have yet."""
    backend = config.backend
    flags = [f"--{name} cuda" for name in ("device", "backend") if getattr(backend, name) == Device.CUDA]
    for part in (config.server, config.sharing, backend):
        settings = settings_of(type(part))
        flags += [one.flag for one in settings if one.key in _REFUSED and getattr(part, one.field) != one.default]
    for flag in flags:
        remedy = "Leave it out, or serve the model by one server."
        raise ConfigError(f"A cluster does not support {flag} yet.", remedy=remedy)


def _front(
    config: Config,
    source: ModelSource,
    fleet: Fleet,
    bridge: Bridge,
    machine: Machine,
    lasting: Lasting,
    on_closed: Callable[[], None],
) -> RunningModel:
    info = fleet.model
    assert info is not None, "its first replica has come"
    blueprint, model = resolve(config, source, machine)
    tokenizer, chat_template = load_text(blueprint.settings.chat_template, model)
    metrics = lasting.metrics
    metrics.settings_hash, metrics.num_replicas = blueprint.settings_hash, config.cluster.replicas
    admission = lasting.make_admission(blueprint, info.capacity)
    max_running = blueprint.policies.max_running(info.capacity)
    connect(fleet, bridge, admission, metrics, max_running=max_running, max_step_tokens=info.capacity.max_step_tokens)
    if lasting.journal is not None:
        fleet.max_ended = lasting.journal.max_ended
    if (adapters := lasting.adapters) is not None:
        connect_at_front(adapters, blueprint, model)
        fleet.use_adapters(adapters)
    return RunningModel(
        engine=fleet,
        bridge=bridge,
        tokenizer=tokenizer,
        chat_template=chat_template,
        grammars=RecipeBook(tokenizer, vocab_size=info.vocab_size),
        dialect=find_dialect(
            None if chat_template is None else chat_template.source,
            tool_parser=blueprint.settings.tool_call_parser,
            reasoning_parser=blueprint.settings.reasoning_parser,
        ),
        admission=admission,
        metrics=metrics,
        model=info,
        clock=fleet.clock,
        slo_itl_ns=blueprint.slo_itl_ns,
        prefix_sharing=blueprint.cache.prefix_sharing,
        defaults=model.sampling,
        sources=lasting.sources,
        adapters=lasting.adapters,
        journal=None if lasting.journal is None else fleet,
        release=partial(_release, bridge, lasting.adapters, on_closed),
    )


def _release(bridge: Bridge, adapters: Adapters | None, on_closed: Callable[[], None]) -> None:
    bridge.detach()
    if adapters is not None:
        adapters.close()
    on_closed()


def connect(
    fleet: Fleet, bridge: Bridge, admission: Admission, metrics: Metrics, *, max_running: int, max_step_tokens: int
) -> None:
    """Connect admission, metrics and load signals to the fleet. `max_running`: most running requests of one replica."""
    signals = Signals(max_running, admission.drain.rate)
    admission.on_call = signals.on_call

    def on_size(num_replicas: int) -> None:
        admission.num_engines = max(1, num_replicas)
        signals.num_rows = max(1, num_replicas) * max_running

    fleet.on_size = on_size
    on_size(fleet.num_replicas)
    lengths = admission.lengths
    fleet.observe(
        ObserverGroup([metrics, admission, signals]),
        ObserverGroup([metrics, admission]),
        lambda request: lengths.new_tokens(request.sampling.min_tokens, request.sampling.max_tokens),
    )
    bridge.attach(fleet)
    metrics.read_replicas, metrics.read_decisions, metrics.read_moves = fleet.replicas, fleet.decisions, lambda: fleet.num_moved
    metrics.connect(
        load=fleet.load,
        signals=lambda: signals.read(fleet.load(), fleet.clock.now_ns()),
        max_rows=max_running,
        max_step_tokens=max_step_tokens,
    )
