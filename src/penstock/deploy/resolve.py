"""Turns a config, a model's files and the machine into a blueprint. Reads only the headers of the files.

The table says which device computes:

--device   --backend    without          native, reference   cuda
auto                    a GPU if usable  the CPU             a GPU
cpu                     native           the CPU             refused
cuda                    a GPU            refused             a GPU
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends import cuda, native
from penstock.backends.native import footprint
from penstock.config import AttentionKernels, Backend, BackendConfig, Config, Device, KvConfig
from penstock.config.saved import settings_hash
from penstock.config.setting import settings_of
from penstock.config.units import nanoseconds
from penstock.deploy import sizing
from penstock.deploy.blueprint import Blueprint, Compute, Loading, fingerprints
from penstock.deploy.checks import check_block_size, check_cache, check_model
from penstock.deploy.device import pinned_cpus, weight_room_bytes
from penstock.deploy.experts import check_disk, check_experts
from penstock.deploy.kv_events import plan_kv_events
from penstock.deploy.packed import PackedWeights
from penstock.deploy.policies import choose_policies
from penstock.deploy.recorder import shown_settings
from penstock.deploy.resources import Machine, MemoryShare
from penstock.deploy.tiers import tier_folder
from penstock.machine import address_space
from penstock.types.errors import ConfigError
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.models.catalog import ModelSource
    from penstock.models.program import Program
    from penstock.models.weights import LoadedModel
    from penstock.types.model_spec import ModelSpec

_log = logging.getLogger(__name__)

_FEED_FORWARD = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down", "input_gate", "input_projection")
"""Suffixes of feed-forward weights and of Gemma's inputs by layer. Fewer adapters change these than a layer's others."""


def resolve(config: Config, source: ModelSource, machine: Machine) -> tuple[Blueprint, LoadedModel]:
    """Return a model's blueprint, and the model as far as the headers of its files describe it. No weight is read.

    A KV cache without a set size takes a part of the free memory. With several models, it takes a part of the total instead, so
    that its size does not depend on which others are loaded. Raises ModelError or ConfigError if the model can't be loaded or
    does not fit the machine.
    """
    compute = decide(config)
    check_block_size(compute)
    check_cache(config.kv)
    loading = _loading(config, source, compute)
    machine = _within_address_space(config, compute, loading, machine)
    model = loading.load(max_weight_bytes=weight_room_bytes(compute, machine.available_bytes - sizing.RESERVE_BYTES))
    check_model(compute, model)
    if config.model.experts_on_disk:
        check_experts(compute, model)
        check_disk(expert_folder(config), model)
    adapters = adapter_room(config, model)
    weight_bytes = num_memory_bytes(config, model)
    room = sizing.Room(
        available_bytes=machine.available_bytes if machine.num_models == 1 else machine.total_bytes,
        num_weight_bytes=weight_bytes,
        num_models=machine.num_models,
        beside_bytes=machine.beside_bytes,
        adapters=adapters,
    )
    plan = None
    if model.encoder is not None:
        compute, plan = plan_texts(config, compute, model, room)
    elif compute.is_on_gpu:  # the KV cache is measured once the weights are loaded
        sizing.check_adapter_room(adapters, room.available_bytes - sizing.RESERVE_BYTES)
    else:
        plan = plan_on_cpu(config, compute, model.spec, room)
    has_prefix_caching = config.kv.prefix_caching and model.encoder is None
    open_kv_events = plan_kv_events(config.server, config.kv.prefix_sharing, has_prefix_caching=has_prefix_caching)
    policies = choose_policies(config, is_one_pass=model.encoder is not None)
    policies.check(compute.max_rows, compute.max_step_tokens)
    share = MemoryShare(num_adapter_bytes=adapters.num_bytes)
    if plan is not None and not compute.is_on_gpu:  # a GPU has memory of its own
        share = replace(share, num_weight_bytes=weight_bytes, num_kv_bytes=plan.num_bytes, num_step_bytes=plan.num_step_bytes)
    names = served_names(config, source)
    blueprint = Blueprint(
        names=names,
        aliases=aliases(config, source),
        loading=loading,
        compute=compute,
        cores=machine.cores,
        cpus=pinned_cpus(compute.options, machine.cores),
        machine_share=config.sharing.machine_share,
        policies=policies,
        slo_itl_ns=nanoseconds(config.scheduler.slo_itl_s),
        cache=config.kv,
        has_prefix_caching=has_prefix_caching,
        lora=config.lora,
        adapters=adapters,
        plan=plan,
        share=share,
        tier_folder=tier_folder(config.kv.kv_disk_path, _cache_dir(config), names[0] if machine.num_models > 1 else None),
        expert_folder=expert_folder(config) if config.model.experts_on_disk else None,
        packed=packed_weights(config, source.path),
        open_kv_events=open_kv_events,
        settings_hash=settings_hash(config),
        shown_settings=shown_settings((config.kv, config.scheduler, config.admission, compute.options), has_names=False),
    )
    return blueprint, model


def served_names(config: Config, source: ModelSource) -> tuple[str, ...]:
    """Return the names that clients may use. Answers show the first one."""
    return config.model.served_model_names or (source.name,)


def aliases(config: Config, source: ModelSource) -> tuple[str, ...]:
    """Return names that clients may use besides `served_names`, but that lists of models leave out.

    These are the settings' aliases and, unless `served_model_name` is set, the model as the user wrote it and its catalogue
    aliases.
    """
    known = () if config.model.served_model_names else (*(source.entry.aliases if source.entry else ()), config.model.model)
    return tuple(dict.fromkeys([*known, *config.sharing.aliases]))


def expert_folder(config: Config) -> Path:
    """Return the folder in the cache for the file of --experts-on-disk."""
    return _cache_dir(config) / "experts"


def packed_weights(config: Config, model: Path) -> PackedWeights:
    """Return the place of the model's packed weights in the cache. `model`: its file or directory."""
    return PackedWeights(
        folder=_cache_dir(config) / "packed",
        model=model,
        adapters=config.lora.merged,
        weight_dtype=config.backend.weight_dtype,
        task=config.model.task,
    )


def _cache_dir(config: Config) -> Path:
    from penstock.models.cache import cache_dir

    return cache_dir(config.model.cache_dir)


# --- device and backend ---


def decide(config: Config, *, is_gpu: bool | None = None) -> Compute:
    """Decide the device, the backend and the settings that depend on them. Raises ConfigError for contradictory settings.

    `is_gpu`: for a plan, whether another machine has a GPU. None: look at this machine.
    """
    chosen = config.backend
    if is_gpu is None:
        why_cpu = _why_cpu(config)
    else:
        why_cpu = None if is_gpu else "the machine is a CPU"
        chosen = replace(chosen, backend=None)
    if why_cpu is None:
        _check_gpu_settings(config)
        chosen = replace(chosen, device=Device.CUDA.value, backend=Backend.CUDA.value)
    else:
        _check_cpu_settings(config, why_cpu)
        chosen = replace(chosen, device=Device.CPU.value, backend=chosen.backend or Backend.NATIVE.value)
        if is_gpu is None:
            _check_kernels(chosen)
    timeout_s = chosen.step_timeout_s
    if timeout_s is None and chosen.backend != Backend.REFERENCE:
        timeout_s = 120.0  # a hundred times a full step of Qwen2.5-1.5B on two cores (docs/performance.md)
    # More rows share a GPU's bandwidth, and a chunk of 2,048 tokens keeps its multipliers busy.
    kv_dtype, max_rows, max_step_tokens = (KvDtype.INT8, 64, 512) if why_cpu else (KvDtype.BF16, 256, 2048)
    return Compute(
        options=chosen,
        kv_dtype=KvDtype(config.kv.kv_cache_dtype) if config.kv.kv_cache_dtype else kv_dtype,
        block_size=config.kv.block_size,
        max_rows=config.scheduler.max_num_seqs or max_rows,
        max_step_tokens=config.scheduler.max_num_batched_tokens or max_step_tokens,
        step_timeout_s=timeout_s,
    )


def _why_cpu(config: Config) -> str | None:
    """Return why the CPU computes, for messages, or None if a GPU does. Raises ConfigError for contradictory settings."""
    device, backend = config.backend.device, config.backend.backend
    is_cpu_named = backend in (Backend.NATIVE, Backend.REFERENCE)
    if device == Device.CUDA and is_cpu_named:
        raise ConfigError(f"The {backend} backend computes on the CPU, and --device is cuda.", remedy="Leave one of them out.")
    if device == Device.CPU and backend == Backend.CUDA:
        raise ConfigError("The cuda backend computes on a GPU, and --device is cpu.", remedy="Leave one of them out.")
    if device == Device.CUDA or backend == Backend.CUDA:
        if (cause := cuda.why_not()) is not None:
            raise ConfigError(f"No GPU can be used: {cause}.", remedy="Leave out --device and --backend for the CPU.")
        return None
    if device == Device.CPU or is_cpu_named:
        return "the CPU is asked for"
    flag = next(_cpu_flags(config), None)
    cause = cuda.why_not() if flag is None else f"{flag} is a setting of the CPU"
    if cause is not None:
        # Nobody expects a GPU to be used on a machine that has neither the extra nor a GPU.
        is_expected = cuda.package_versions()["torch"] is None and isinstance(cuda.find_gpu(), str)
        _log.log(logging.DEBUG if is_expected else logging.INFO, "no GPU is used: %s", cause)
    return cause


def _cpu_flags(config: Config) -> Iterator[str]:
    """Yield the flags in use that only work on the CPU, such as `--threads`."""
    backend = config.backend
    for flag, is_set in (
        ("--kv-cache-dtype int4", config.kv.kv_cache_dtype == KvDtype.INT4),
        ("--threads", backend.threads is not None),
        ("--pin-threads", backend.pin_threads),
        ("--kernels", backend.kernels is not None),
        ("--experts-on-disk", config.model.experts_on_disk),
    ):
        if is_set:
            yield flag


def _check_gpu_settings(config: Config) -> None:
    flags = list(_cpu_flags(config))
    if config.backend.weight_dtype not in (None, "fp8"):
        flags.append(f"--weight-dtype {config.backend.weight_dtype}")
    for flag in flags:
        raise ConfigError(
            f"{flag} is a setting of the CPU, and a GPU is to be used.", remedy=f"Leave out {flag}, or set --device cpu."
        )
    if config.backend.attention == AttentionKernels.FLASHINFER:
        _check_flashinfer(config)
    if config.kv.gpu_memory_utilization is not None and config.kv.kv_cache_memory_bytes is not None:
        raise ConfigError(
            "gpu_memory_utilization and kv_cache_memory both say how large the KV cache is.", remedy="Leave one of them out."
        )
    if config.kv.kv_host_size_bytes and config.kv.kv_disk_size_bytes:
        raise ConfigError(
            "There is one tier below the KV cache: in the machine's memory or on disk.",
            remedy="Leave out --kv-host-size or --kv-disk-size.",
        )


def _check_flashinfer(config: Config) -> None:
    for is_so, cause, flag in (
        (config.backend.deterministic, "the order of its sums depends on the batch", "--deterministic"),
        (config.kv.kv_cache_dtype == KvDtype.INT8, "it can't read keys and values in int8", "--kv-cache-dtype"),
    ):
        if is_so:
            raise ConfigError(f"FlashInfer can't compute the attention: {cause}.", remedy=f"Leave out --attention or {flag}.")
    if cuda.flashinfer_version() is None:
        raise ConfigError(
            "FlashInfer can't compute the attention: it is not installed.",
            remedy="Install it in Penstock's source folder: pip install '.[flashinfer]'.",
        )


def _check_cpu_settings(config: Config, cause: str) -> None:
    of_a_gpu = "it is a GPU's setting"
    for flag, is_set, why in (
        ("--gpu-memory-utilization", config.kv.gpu_memory_utilization is not None, of_a_gpu),
        ("--weight-dtype fp8", config.backend.weight_dtype == "fp8", of_a_gpu),
        ("--cuda-graphs", config.backend.cuda_graphs is not None, of_a_gpu),
        ("--attention", config.backend.attention is not None, of_a_gpu),
        ("--steps-in-flight", config.backend.steps_in_flight is not None, of_a_gpu),
        ("--kv-host-size", bool(config.kv.kv_host_size_bytes), "the memory below the KV cache would be the same memory"),
    ):
        if is_set:
            raise ConfigError(f"{flag} has no meaning on the CPU: {why}. No GPU is used: {cause}.", remedy=f"Leave out {flag}.")


def _check_kernels(backend: BackendConfig) -> None:
    if backend.backend == Backend.REFERENCE:
        if backend.threads is not None:  # in saved settings, which also serve the native backend
            _log.warning("--threads has no effect: the reference backend computes with NumPy")
        for flag, is_set in {"--pin-threads": backend.pin_threads, "--kernels": backend.kernels}.items():
            if is_set:
                raise ConfigError(
                    f"{flag} has no meaning with the reference backend: it computes with NumPy.", remedy=f"Leave out {flag}."
                )
    if backend.kernels is None:
        return
    usable = native.info()
    if backend.kernels not in usable["variants"]:
        why = f" ({usable['why_no_tiles']})" if backend.kernels == "amx" and usable["why_no_tiles"] else ""
        raise ConfigError(
            f"This machine can't run the {backend.kernels} kernels{why}.",
            remedy=f"Set --kernels (PENSTOCK_KERNELS) to one of {', '.join(usable['variants'])}, or leave it unset.",
        )


def _within_address_space(config: Config, compute: Compute, loading: Loading, machine: Machine) -> Machine:
    """Return the machine without the address space of the files that the load maps, if the space is limited.

    Raises ConfigError if it is too small.
    """
    from penstock.models.architectures import describe
    from penstock.models.catalog import num_file_bytes

    space = address_space()
    if space is None or compute.is_on_gpu:
        return machine
    model = loading.load()
    weight_bytes = num_memory_bytes(config, model)
    mapped_bytes = num_file_bytes(loading.source.path) + model.num_weight_bytes - weight_bytes
    step_bytes = _step_bytes(compute, model.spec, describe(model.spec))
    kv_bytes = config.kv.kv_cache_memory_bytes or sizing.LEAST_ROOM_BYTES
    sizing.check_address_space(space, weight_bytes + mapped_bytes + step_bytes + kv_bytes + sizing.RESERVE_BYTES)
    return replace(machine, available_bytes=min(machine.available_bytes, space.left_bytes - mapped_bytes))


def _loading(config: Config, source: ModelSource, compute: Compute) -> Loading:
    if config.lora.merge_lora and config.lora.is_on:
        raise ConfigError(
            "merge_lora is set, and so is lora_modules or lora_dir: their adapters were trained beside another model.",
            remedy="Leave --merge-lora out, and ask for its adapter by name.",
        )
    merged = config.lora.merged
    files = fingerprints(source.path, *(Path(adapter.path) for adapter in merged))
    return Loading(source=source, settings=config.model, floats=compute.floats, merged=merged, files=files)


# --- memory ---


def num_memory_bytes(config: Config, model: LoadedModel) -> int:
    """Return the bytes of the weights that are always in memory. With --experts-on-disk these are all but the experts."""
    return model.num_weight_bytes - (model.num_expert_bytes if config.model.experts_on_disk else 0)


def adapter_room(config: Config, model: LoadedModel) -> sizing.AdapterRoom:
    """Return the memory for the most adapters that the settings allow, and for reading one more.

    Assumes adapters of the greatest rank on the projections of attention and recurrent layers. Raises ConfigError for a model
    that can't have adapters.
    """
    lora = config.lora
    if not lora.is_on:
        return sizing.NO_ADAPTERS
    if model.encoder is not None:
        raise ConfigError(
            f"lora_modules or lora_dir is set, and {model.name} only reads texts.",
            remedy="Leave it out, or take a model that writes text.",
        )
    from penstock.models.adapter import sites
    from penstock.models.adapter_files import READ_BYTES
    from penstock.models.architectures import describe

    shapes = sites(describe(model.spec)).items()
    adapted = [shape for name, shape in shapes if name.startswith("layers.") and name.rpartition(".")[2] not in _FEED_FORWARD]
    num_values = lora.max_lora_rank * sum(map(sum, adapted))
    return sizing.AdapterRoom(
        image_bytes=2 * num_values,  # in 16 bits; the native backend takes 8 beside quantised weights
        read_bytes=READ_BYTES * num_values,
        num_in_pool=lora.max_loras,
        num_in_memory=lora.max_cpu_loras,
    )


def plan_on_cpu(config: Config, compute: Compute, spec: ModelSpec, room: sizing.Room) -> sizing.KvPlan:
    """Return the size of the KV cache on a CPU. Raises the errors of `plan_kv`."""
    from penstock.models.architectures import describe

    program = describe(spec)
    if program.paged_state is not None and (config.kv.kv_host_size_bytes or config.kv.kv_disk_size_bytes):
        raise ConfigError(
            "There is no tier below the KV cache for this model: a tier keeps single blocks, and the model's recurrent state "
            "takes many, without which the others are of no use.",
            remedy="Leave out --kv-host-size and --kv-disk-size.",
        )
    footprint.check_format(program.kv_shapes, compute.kv_dtype)
    block_bytes = footprint.block_bytes(spec, compute.kv_dtype, compute.block_size)
    return sizing.plan_kv(
        replace(
            compute.wanted(spec, config.model.max_model_len, program.window),
            has_state=program.state is not None,
            num_state_blocks=footprint.num_state_blocks(program.paged_state, block_bytes),
        ),
        config.kv,
        block_bytes=block_bytes,
        step_bytes=_step_bytes(compute, spec, program),
        is_exact=config.model.max_model_len is not None,
        room=room,
    )


def _step_bytes(compute: Compute, spec: ModelSpec, program: Program) -> int:
    """Return the memory for the largest step's experts and activations on a CPU that the reserve does not cover."""
    from penstock.backends.batch import most_scored

    num_samples = compute.max_rows + most_scored(program)
    longest = min(compute.max_step_tokens, spec.max_model_len)
    num_bytes = footprint.buffer_bytes(program, compute.max_step_tokens, num_samples)
    num_bytes += footprint.relative_bytes(program, longest)
    return footprint.expert_bytes(spec, compute.max_step_tokens) + max(0, num_bytes - sizing.STEP_RESERVE_BYTES)


# --- models that only read texts: a text is read whole, in one step, and nothing of it is kept ---

_KV_SETTINGS_OF_TEXTS = frozenset({"prefix_sharing"})
"""Settings of the KV cache that affect texts. Tenants who share prefixes share the result of equal texts."""


def plan_texts(config: Config, compute: Compute, model: LoadedModel, room: sizing.Room) -> tuple[Compute, sizing.KvPlan]:
    """Return the settings and memory plan of a model that only embeds or scores texts. A text takes one row and one block.

    If the memory of a CPU is too small for a step of the longest text, and no setting asks for it, texts are shorter. Raises
    ConfigError for settings without effect, or for steps that are too small for the longest text or too large for the memory.
    """
    from penstock.models.architectures import describe

    assert model.encoder is not None
    _check_text_settings(config, model)
    asked, num_batched = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    longest = model.encoder.max_tokens if asked is None else sizing.wanted_len(model.spec, asked)
    if num_batched is not None and num_batched < longest:
        raise ConfigError(
            f"max_num_batched_tokens is {num_batched}, and one step must hold a whole text of {model.name}, which may have "
            f"{longest} tokens.",
            remedy=f"Set --max-num-batched-tokens to {longest} or more, or --max-model-len to {num_batched} or less.",
        )
    rows = config.scheduler.max_num_seqs or 256  # texts need memory for their tokens only
    compute, program, whole = replace(compute, max_rows=rows), describe(model.spec), longest

    def bytes_of_step(num_tokens: int) -> int:
        return 0 if compute.is_on_gpu else _step_bytes(replace(compute, max_step_tokens=num_tokens), model.spec, program)

    if asked is None and num_batched is None:
        longest = sizing.longest_text(room, longest, compute.max_step_tokens, bytes_of_step)
    step_tokens = num_batched or max(compute.max_step_tokens, longest)
    step_bytes = bytes_of_step(step_tokens)
    sizing.left_by_step(room, step_bytes, step_tokens, instead="Lower both --max-num-batched-tokens and --max-model-len")
    # Two steps may be in flight, and block 0 is the null block.
    block_size = -(-longest // native.KV_TILE) * native.KV_TILE
    capacity = Capacity(2 * rows + 1, block_size, rows, step_tokens, longest, is_one_pass=True)
    plan = sizing.KvPlan(capacity, num_bytes=0, is_shortened=longest < whole, num_step_bytes=step_bytes)
    return replace(compute, max_step_tokens=step_tokens), plan


def _check_text_settings(config: Config, model: LoadedModel) -> None:
    why = f"{model.name} only reads texts"
    for item in settings_of(KvConfig):
        if item.field not in _KV_SETTINGS_OF_TEXTS and getattr(config.kv, item.field) != item.default:
            raise ConfigError(
                f"{item.key} is a setting of the KV cache, and {why}, without a KV cache.",
                remedy=f"Leave {item.key} out; of several models set it in the tables [[models]] of those that have one.",
            )
    for key, is_set in (
        ("chat_template", config.model.chat_template is not None),
        ("tool_call_parser", config.model.tool_call_parser != "auto"),
        ("reasoning_parser", config.model.reasoning_parser != "auto"),
        ("record", config.server.record is not None),
        ("cuda_graphs", config.backend.cuda_graphs is not None),
    ):
        if is_set:
            raise ConfigError(f"{key} is set, and {why}: it would change nothing.", remedy=f"Leave {key} out.")
