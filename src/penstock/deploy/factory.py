"""Turns configs into running models. Called by the command line, the Python API and tests.

    start_deployment   configs -> Deployment: a model for each, on one machine's `Resources`
    serve_model        config, source -> ServedModel: loads it when the deployment wants it, by
    start_served       config, source -> RunningModel: `resolve`, then `build`; without a deployment: `start_model`

Heavy imports are inside functions, so that importing this file is fast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config, KvConfig, Load, LoraConfig, ModelConfig, SchedulerConfig, ServerConfig
from penstock.config.routing import Routing
from penstock.config.units import format_size, nanoseconds
from penstock.deploy.build import build
from penstock.deploy.draft import DRAFT_REMEDY, with_draft, with_head
from penstock.deploy.engine_maker import EngineTap, seat_of
from penstock.deploy.executor import first_executor
from penstock.deploy.experts import disk_words
from penstock.deploy.lasting import Lasting
from penstock.deploy.pipelines import open_pipelines
from penstock.deploy.policies import admission_limits
from penstock.deploy.recorder import plan_recording
from penstock.deploy.resolve import aliases, decide, resolve, served_names
from penstock.deploy.resources import Machine, MemoryBudget, MemoryShare, Resources
from penstock.deploy.routes import open_routes, warn_of_other_files
from penstock.deploy.splits import read_splits
from penstock.machine import give_back_free_memory
from penstock.types.errors import ConfigError, NotEnoughFreeMemory, NotEnoughMemory

if TYPE_CHECKING:
    from penstock.deploy.adapters import Adapters
    from penstock.deploy.blueprint import Blueprint
    from penstock.deploy.deployment import Deployment
    from penstock.deploy.running import RunningModel, ServedModel
    from penstock.engine.ports import Executor
    from penstock.models.catalog import ModelSource
    from penstock.models.weights import LoadedModel

_log = logging.getLogger(__name__)


def find_source(config: Config) -> ModelSource:
    """Return where the config's model is on this machine, or would be. Raises ModelError if nothing has that name."""
    from penstock.models import catalog
    from penstock.models.cache import cache_dir

    return catalog.resolve(config.model.model, cache_dir(config.model.cache_dir))


def locate(config: Config) -> ModelSource:
    """Return where the config's model is on this machine, and download the model first if needed. Raises PenstockError."""
    source = find_source(config)
    if not source.is_present:
        from penstock.models.progress import TerminalProgress
        from penstock.models.pull import ensure_present

        ensure_present(source, progress=TerminalProgress())
    return source


def locate_draft(config: Config) -> ModelSource | None:
    """Return where the small model of --speculation-model is, after a download if needed; None without one."""
    name = config.scheduler.speculation_model
    return None if name is None else locate(Config(model=ModelConfig(model=name, cache_dir=config.model.cache_dir)))


def start_deployment(
    configs: Sequence[Config],
    config_of_found: Callable[[str, str], Config] | None = None,
    routing: Routing | None = None,
) -> Deployment:
    """Return a deployment of one model per config, with those loaded that load at the start. The first model is the default.

    The caller closes it. `config_of_found`: (name, path) -> config, for a model that is added to `models_dir` later. Raises the
    errors of `locate` and `start_model`, and ConfigError for two models with one name, after closing all models.
    """
    from penstock.deploy.deployment import Deployment

    memory, routing = MemoryBudget(limit_bytes=configs[0].sharing.memory_bytes), routing or Routing()
    resources = Resources(memory, num_models=_num_at_once(configs))
    sources = [locate(config) for config in configs]
    for config in configs:
        locate_draft(config)  # now, not in the thread that loads models: a download would hold up all of them
    served = [serve_model(config, source, resources) for config, source in zip(configs, sources, strict=True)]
    routes = open_routes(routing.routes)
    named = {name: source for one, source in zip(served, sources, strict=True) for name in (*one.names, *one.aliases)}
    warn_of_other_files(routes, named)
    find_new = None
    if config_of_found is not None and (folder := _folder(configs[0])) is not None:
        from penstock.deploy.folder import ModelFolder

        known = [one.path for one in served if one.path is not None]

        def serve(found: ModelSource) -> ServedModel:
            return serve_model(config_of_found(found.name, str(found.path)), found, resources)

        find_new = ModelFolder(folder, serve, known).find_new
    deployment = Deployment(
        served,
        memory,
        find_new=find_new,
        splits=read_splits([(one.name, config.sharing) for one, config in zip(served, configs, strict=True)]),
        routes=routes,
        upstreams=routing.upstreams,
        pipelines=open_pipelines(routing.pipelines),
    )
    if resources.num_models > 1 and not all(config.kv.kv_cache_memory_bytes for config in configs):
        resources.fixed_bytes = _fixed_bytes(served, configs)
    deployment.start([one for one, config in zip(served, configs, strict=True) if config.sharing.load_on == Load.START])
    return deployment


def _num_at_once(configs: Sequence[Config]) -> int:
    """Return how many models to leave memory for when sizing KV caches without a set size.

    Models that load on request count as two at most: rarely more are in use at once.
    """
    num_at_start = sum(config.sharing.load_on == Load.START for config in configs)
    num_more = 2 if configs[0].sharing.models_dir is not None else len(configs) - num_at_start
    return num_at_start + min(num_more, 2)


def _fixed_bytes(served: Sequence[ServedModel], configs: Sequence[Config]) -> dict[str, int]:
    """Return `Resources.fixed_bytes` of these models. Reads the headers of their files."""
    found: dict[str, int] = {}
    for one, config in zip(served, configs, strict=True):
        if config.sharing.load_on == Load.START or one.path is None:  # a folder may have a hundred models
            with suppress(Exception):  # the model's load reports it
                share = one.plan()
                found[one.name] = share.num_bytes - (0 if config.kv.kv_cache_memory_bytes else share.num_kv_bytes)
    return found


def _folder(config: Config) -> Path | None:
    from penstock.models.cache import expand_home

    return None if config.sharing.models_dir is None else expand_home(config.sharing.models_dir)


def serve_model(config: Config, source: ModelSource, resources: Resources) -> ServedModel:
    """Return a model that can be loaded later, when a request names it. Raises ConfigError for bad names of adapters."""
    from penstock.deploy.running import ServedModel
    from penstock.models.facts import read_facts

    is_on_gpu = decide(config).is_on_gpu
    if is_on_gpu:
        _check_stays(config)
    lasting, names, folder = make_lasting(config, source), served_names(config, source), _folder(config)
    is_in_folder = folder is not None and source.path.absolute().parent == folder.absolute()
    return ServedModel(
        names=names,
        aliases=aliases(config, source),
        metrics=lasting.metrics,
        adapters=lasting.adapters,
        load=partial(start_served, config, source, resources, lasting),
        plan=partial(plan_share, config, source, resources),
        read_machine_ns=partial(resources.machine_ns, names[0]),
        idle_unload_ns=nanoseconds(config.sharing.idle_unload_s),
        read_facts=partial(read_facts, source),
        is_kept=config.sharing.keep_loaded or is_on_gpu,
        is_fixed=is_on_gpu,
        path=source.path if is_in_folder else None,
        max_waiting=config.admission.max_queue,
        tenant_limits=config.admission.tenant_limits,
        end=lasting.close,
    )


def make_lasting(config: Config, source: ModelSource) -> Lasting:
    """Return the parts of a model that are kept when it is unloaded.

    Raises the ConfigErrors of `open_adapters`, `decide` and `plan_recording`.
    """
    name, parts = served_names(config, source)[0], (config.kv, config.scheduler, decide(config).options)
    recording = plan_recording(config.server, parts)
    return Lasting(name, open_adapters(config.lora), config.server, admission_limits(config.admission), recording)


def _check_stays(config: Config) -> None:
    """Raise ConfigError if a model on a GPU would be loaded or unloaded later: GPU memory is planned at the start."""
    for flag, is_set in (
        ("--load-on request", config.sharing.load_on != Load.START),
        ("--idle-unload", config.sharing.idle_unload_s),
    ):
        if is_set:
            raise ConfigError(
                f"{flag} is for models on the CPU: on a GPU all are loaded at the start, and stay.",
                remedy=f"Leave out {flag}, or give --device cpu.",
            )


def open_adapters(lora: LoraConfig) -> Adapters | None:
    """Return the registry of adapters for the settings. Opens no file yet. Raises ConfigError for a bad name or path."""
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


def plan_share(config: Config, source: ModelSource, resources: Resources, available_bytes: int | None = None) -> MemoryShare:
    """Return the memory that the model will take, from the headers of its files. Raises the errors of `start_model`.

    `available_bytes`: memory that it may take at most. None: all of the machine's.
    """
    if decide(config).is_on_gpu:
        return MemoryShare()  # a GPU has memory of its own
    config = replace(config, model=replace(config.model, generation_config="none"))  # takes no memory, and the load logs it
    machine = resources.machine(served_names(config, source)[0])
    machine = replace(machine, available_bytes=machine.total_bytes if available_bytes is None else available_bytes)
    return _resolve(config, source, machine)[0].share


def _resolve(config: Config, source: ModelSource, machine: Machine) -> tuple[Blueprint, LoadedModel]:
    """Return what `resolve` does, with the small model of --speculation-model in the blueprint."""
    blueprint, model = resolve(config, source, machine)
    if config.scheduler.speculation_model is None:
        return blueprint, model
    from penstock.models.hf_config import is_draft_head

    small, share = _draft_config(config, blueprint), blueprint.share
    left_bytes, draft = machine.available_bytes - share.num_bytes, locate(small)
    if is_draft_head(draft.path):
        return with_head(blueprint, model, draft.path, left_bytes)
    left_bytes += share.num_reserve_bytes
    try:
        beside = resolve(small, draft, replace(machine, available_bytes=left_bytes, num_models=1, beside_bytes=0))
    except NotEnoughMemory as error:
        message = f"Beside {blueprint.name}, the model {small.model.model} that guesses for it has no room: {error.message}"
        instead = "Leave out --speculation-model, lower --kv-cache-memory"
        raise NotEnoughFreeMemory(message, instead=instead) from error
    return with_draft(blueprint, model, *beside), model


def _draft_config(config: Config, blueprint: Blueprint) -> Config:
    """Return the config of the small model beside a large one with this blueprint. Raises ConfigError on a GPU."""
    compute, name = blueprint.compute, config.scheduler.speculation_model
    assert name is not None
    if compute.is_on_gpu:
        raise ConfigError("A small model guesses only on the CPU, and a GPU is to be used.", remedy=DRAFT_REMEDY)
    return replace(
        config,
        model=ModelConfig(model=name, cache_dir=config.model.cache_dir, task="generate"),
        kv=KvConfig(block_size=config.kv.block_size, kv_cache_dtype=config.kv.kv_cache_dtype, prefix_caching=False),
        lora=LoraConfig(),
        scheduler=SchedulerConfig(max_num_seqs=compute.max_rows, max_num_batched_tokens=compute.max_step_tokens),
        server=ServerConfig(),
    )


def start_model(
    config: Config, source: ModelSource, resources: Resources | None = None, tap: EngineTap | None = None
) -> RunningModel:
    """Load a model from files on this machine, and return it ready for requests. The caller closes it.

    `resources`: memory and threads that several models share; by default, new ones. `tap`: observes its engines. Raises
    ModelError or ConfigError if the model can't be loaded or does not fit the machine.
    """
    with ExitStack() as undone:
        lasting = make_lasting(config, source)
        undone.callback(lasting.close)
        running = start_served(config, source, resources or Resources(), lasting, tap)
        undone.callback(running.release)
        running.release = undone.pop_all().close
    return running


def start_served(
    config: Config, source: ModelSource, resources: Resources, lasting: Lasting, tap: EngineTap | None = None
) -> RunningModel:
    """Load a model as `start_model` does. The caller closes `lasting`, after the last load that uses it."""
    name = served_names(config, source)[0]
    try:
        running = _start(config, source, resources, lasting, tap)
    except BaseException as error:
        resources.memory.give_back(name)
        if isinstance(error, NotEnoughMemory) and not decide(config).is_on_gpu:
            raise resources.memory.explained(name, error) from error
        raise
    give_back_free_memory()  # the file's vocabulary was needed until now
    return running


def _start(config: Config, source: ModelSource, resources: Resources, lasting: Lasting, tap: EngineTap | None) -> RunningModel:
    machine = resources.machine(served_names(config, source)[0])
    blueprint, model = _resolve(config, source, machine)
    share = blueprint.share
    resources.memory.take(blueprint.name, share)
    if blueprint.expert_folder is not None:
        _log.warning("%s", disk_words(model, machine.available_bytes - share.num_bytes))
    try:
        return build(blueprint, model, resources, lasting, tap)
    except MemoryError as error:
        kv_words = f", the KV cache {format_size(share.num_kv_bytes)}" if share.num_kv_bytes else ""
        raise NotEnoughMemory(
            f"There is not enough memory: the weights take {format_size(share.num_weight_bytes or model.num_weight_bytes)}"
            f"{kv_words}, and {format_size(machine.available_bytes)} were free before.",
            remedy=f"Lower {'--kv-cache-memory or ' if kv_words else ''}--max-num-batched-tokens, or free some memory.",
        ) from error


def open_executor(config: Config, source: ModelSource, *, uses_packed: bool = True) -> tuple[Blueprint, LoadedModel, Executor]:
    """Return an executor to run steps without a server. Close the executor. Raises the errors of `start_model`."""
    resources = Resources()
    blueprint, model = resolve(config, source, resources.machine(""))
    if not uses_packed:
        blueprint = replace(blueprint, packed=None)
    blueprint, executor = first_executor(blueprint, model, seat_of(blueprint, resources))
    return blueprint, model, executor
