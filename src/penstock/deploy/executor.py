"""The executor: turns a config and a model into the backend that computes it, and asks `sizing` what memory its KV cache gets.
The factory calls it. The only steps that run here are those of a GPU's profile.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from penstock.config import AttentionKernels, Backend, Config
from penstock.config.units import format_size
from penstock.deploy.device import (
    is_on_gpu,
    kv_dtype,
    kv_window,
    max_rows,
    max_step_tokens,
    memory_nodes,
    num_threads,
    pinned_cpus,
)
from penstock.deploy.encoders import block_size_of
from penstock.deploy.experts import disk_bytes, expert_file
from penstock.deploy.sizing import AdapterRoom, KvPlan, check_adapter_room, plan_gpu_kv, plan_kv
from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.backends.cuda.executor import CudaExecutor
    from penstock.backends.cuda.memory import Usage
    from penstock.backends.native._native import Account, Team
    from penstock.engine.ports import Executor
    from penstock.machine import Cores
    from penstock.models.weights import LoadedModel

EXECUTORS: Mapping[str, str] = {
    "native": "penstock.backends.native.executor:NativeExecutor",
    "reference": "penstock.backends.reference.executor:ReferenceExecutor",
    "cuda": "penstock.backends.cuda.executor:CudaExecutor",
}
"""Backend -> class; made with the model, its program, the five numbers of `Capacity` and the type of the KV cache."""

MEASURED_BLOCKS = 2
"""Blocks of a GPU's executor before its KV cache has been planned."""
_ADAPTED = ("q", "k", "v", "o")
"""Ends of the names of weights that nearly every adapter changes."""
_FACTOR_BYTES = 2
"""Bytes of a number of an adapter at most, but for those of the reference backend: beside quantised weights it takes half."""
BAR_DELAY_S = 1.0
CAPTURE_SECONDS = 10.0
"""Time for graphs at a start. The rest are captured when a step needs them."""

_logger = logging.getLogger(__name__)
SeatOf: TypeAlias = "Callable[[int, Sequence[int]], tuple[Team, Account]]"


def build_executor(config: Config, model: LoadedModel, kv: KvPlan, seat_of: SeatOf, cores: Cores) -> Executor:
    """The backend of a settled config, with the model's weights in it.

    `seat_of` gives the native backend its team of so many threads, pinned to such CPUs, and the account for its turns there.
    """
    if is_on_gpu(config):
        return _make_as_measured(config, model, kv)
    if config.backend.backend == Backend.REFERENCE:
        return _make(config, model, kv.max_model_len, kv.num_blocks)
    with loading_bar(model) as on_packed, expert_file(config, model) as file:
        dtype = config.backend.weight_dtype
        team, account = seat_of(num_threads(config.backend, cores), pinned_cpus(config.backend, cores))
        extras = {"team": team, "account": account, "on_packed": on_packed, "expert_file": file}
        extras |= {"rounds_floats": None if dtype is None else dtype == "int8", "variant": config.backend.kernels or ""}
        return _make(config, model, kv.max_model_len, kv.num_blocks, memory_nodes=memory_nodes(cores), **extras)


@contextmanager
def loading_bar(model: LoadedModel) -> Iterator[Callable[[int], object] | None]:
    """A progress bar that wants to be told of bytes, on a terminal alone, once loading takes longer than `BAR_DELAY_S`."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    matrices = [tensor for tensor in model.weights.values() if tensor.num_rows > 1]
    if not model.spec.tie_word_embeddings:
        matrices.remove(model.weights["embed"])  # its rows are read in the file
    total = sum(tensor.num_bytes for tensor in matrices)
    with tqdm(
        desc=f"Loading {model.name}", total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=BAR_DELAY_S
    ) as bar:
        yield bar.update


def plan_memory(
    config: Config, model: LoadedModel, available_bytes: int, *, num_models: int = 1
) -> tuple[KvPlan, Executor | None]:
    """Blocks and longest request. On a GPU they are measured with an executor, which is there then.

    `available_bytes`: of the machine's memory, for so many models. Raises ConfigError where what was asked for does not fit.
    """
    if is_on_gpu(config):
        check_adapter_room(adapter_room(config, model), available_bytes)
        return _measure(config, model)
    plan = plan_kv(
        model.spec,
        config.kv,
        dtype=kv_dtype(config),
        max_model_len=config.model.max_model_len,
        max_num_seqs=max_rows(config),
        max_step_tokens=max_step_tokens(config),
        num_weight_bytes=model.num_weight_bytes - disk_bytes(config, model),
        window=kv_window(config, model.spec),
        available_bytes=available_bytes,
        num_models=num_models,
        adapters=adapter_room(config, model),
    )
    return plan, None


def adapter_room(config: Config, model: LoadedModel) -> AdapterRoom:
    """The memory for as many adapters as the settings name, of the greatest rank and of the projections of attention, and for
    the reading of another one.
    """
    if not config.lora.is_on:
        return AdapterRoom()
    from penstock.models.adapter import sites
    from penstock.models.adapter_files import READ_BYTES
    from penstock.models.architectures import describe

    shapes = sites(describe(model.spec))
    num_values = config.lora.max_lora_rank * sum(sum(shapes[name]) for name in shapes if name.rpartition(".")[2] in _ADAPTED)
    return AdapterRoom(
        image_bytes=_FACTOR_BYTES * num_values,
        read_bytes=READ_BYTES * num_values,
        num_in_pool=config.lora.max_loras,
        num_in_memory=config.lora.max_cpu_loras,
    )


def check_adapters(config: Config, model: LoadedModel) -> None:
    """Refuse adapters for a model that has none, before a weight is read. Raises ConfigError."""
    if config.lora.is_on and model.encoder is not None:
        raise ConfigError(
            f"lora_modules or lora_dir is set, and {model.name} reads texts and writes none.",
            remedy="Leave it out, or take a model that writes text.",
        )


def with_merged_adapter(config: Config, model: LoadedModel) -> LoadedModel:
    """The model with the adapter of --merge-lora in its weights, if one is set. Raises ConfigError and ModelError."""
    if config.lora.merge_lora is None:
        return model
    if config.lora.is_on:
        raise ConfigError(
            "merge_lora is set, and so is lora_modules or lora_dir: their adapters were trained beside another model.",
            remedy="Leave --merge-lora out, and ask for its adapter by name.",
        )
    from penstock.models.merging import with_adapter

    return with_adapter(model, Path(config.lora.merge_lora))


def check_weight_dtype(config: Config, model: LoadedModel) -> None:
    """Refuse --weight-dtype where it would change no weight. Raises ConfigError."""
    from penstock.models.formats import BLOCKS, WeightFormat

    dtype = config.backend.weight_dtype
    if dtype is not None and not is_on_gpu(config) and (model.encoder is None or config.backend.backend == Backend.REFERENCE):
        raise ConfigError(
            f"weight_dtype is {dtype}: on the CPU it is for models that read texts, which the native backend computes.",
            remedy="Leave out --weight-dtype.",
        )
    quantised = {*BLOCKS, WeightFormat.F8_E4M3}
    of_products = (tensor for name, tensor in model.weights.items() if tensor.num_rows > 1 and name not in ("embed", "output"))
    if dtype is not None and all(tensor.format in quantised for tensor in of_products):
        raise ConfigError(
            f"weight_dtype is {dtype}, and the weights of {model.name} are quantised already.",
            remedy="Leave out --weight-dtype, or take the model in 16 bits.",
        )


def open_encoder(config: Config, model: LoadedModel, kv: KvPlan) -> Executor:
    """An encoder on a GPU, which has computed the largest step of texts. Raises ConfigError where that does not fit."""
    executor, _ = _profile(config, model, kv.capacity)
    try:
        _make_ready(executor, kv)
    except BaseException:
        executor.close()
        raise
    return executor


def _profile(config: Config, model: LoadedModel, capacity: Capacity) -> tuple[CudaExecutor, Usage]:
    """An executor with a small KV cache, and what it takes of the GPU's memory without that. Raises ConfigError."""
    from penstock.backends.cuda.memory import GpuMemory, no_blocks, profile
    from penstock.engine.transfers import num_staged_blocks

    has_tier = config.kv.kv_host_size_bytes or config.kv.kv_disk_size_bytes
    moved = num_staged_blocks if has_tier else no_blocks
    make = partial(_make_for_gpu, config, model, capacity.max_model_len)
    try:
        return profile(make, capacity, GpuMemory(), num_moved_blocks=moved)
    except MemoryError as error:
        raise ConfigError(
            f"The weights and a step of {capacity.max_step_tokens} tokens do not fit the GPU: {error}",
            remedy="Lower --max-num-batched-tokens, take a smaller model, or end what else uses the GPU.",
        ) from error
    except ValueError as error:  # more rows times tokens than the device's tables can address
        raise ConfigError(f"{error}.", remedy="Lower --max-model-len or --max-num-seqs.") from error


def _measure(config: Config, model: LoadedModel) -> tuple[KvPlan, CudaExecutor]:
    longest = _longest(config, model)
    capacity = Capacity(MEASURED_BLOCKS, config.kv.block_size, max_rows(config), max_step_tokens(config), longest)
    executor, usage = _profile(config, model, capacity)
    try:
        plan = plan_gpu_kv(
            model.spec,
            config.kv,
            max_model_len=config.model.max_model_len,
            max_num_seqs=max_rows(config),
            max_step_tokens=max_step_tokens(config),
            block_bytes=executor.block_bytes,
            memory=usage,
            adapters=adapter_room(config, model),
        )
        _make_ready(executor, plan)
    except MemoryError as error:
        executor.close()
        raise ConfigError(
            f"The GPU does not give the {format_size(plan.num_bytes)} for the KV cache that were free: {error}",
            remedy="Lower --gpu-memory-utilization or --kv-cache-memory, or end what else uses the GPU.",
        ) from error
    except BaseException:
        executor.close()
        raise
    return plan, executor


def _make_as_measured(config: Config, model: LoadedModel, kv: KvPlan) -> CudaExecutor:
    """For the longest request, as the first one: which part of their bias stored keys lack depends on that, and a file of the
    disk tier outlives both."""
    executor = _make_for_gpu(config, model, _longest(config, model), MEASURED_BLOCKS)
    try:
        _make_ready(executor, kv)
    except BaseException:
        executor.close()
        raise
    return executor


def _make_ready(executor: CudaExecutor, plan: KvPlan) -> None:
    """A GPU's, for requests. Raises MemoryError if there is no room for the KV cache."""
    from penstock.backends.cuda.memory import GpuMemory

    executor.resize(plan.num_blocks, max_model_len=plan.max_model_len)
    executor.choose_attention()
    if not executor.num_graphs_left:
        return
    free_bytes = GpuMemory().read()[0]
    run = executor.capture_graphs(max_seconds=CAPTURE_SECONDS)
    _logger.info(
        "CUDA graphs of decodes: %d captured in %.1f s, which take %s; %d more when they are needed",
        run.num_captured,
        run.seconds,
        format_size(max(0, free_bytes - GpuMemory().read()[0])),
        run.num_left,
    )


def _longest(config: Config, model: LoadedModel) -> int:
    """Tokens of the longest request, whatever the memory holds."""
    return min(config.model.max_model_len or model.spec.max_model_len, model.spec.max_model_len)


def _make(config: Config, model: LoadedModel, max_model_len: int, num_blocks: int, **extras: object) -> Executor:
    """`extras` are what one backend alone is told."""
    from penstock.models.architectures import describe

    module, _, attribute = EXECUTORS[config.backend.backend or Backend.NATIVE.value].partition(":")
    executor: Executor = getattr(import_module(module), attribute)(
        model,
        describe(model.spec),
        num_blocks=num_blocks,
        block_size=block_size_of(max_model_len) if model.encoder else config.kv.block_size,
        max_rows=max_rows(config),
        max_step_tokens=max_step_tokens(config),
        max_model_len=max_model_len,
        kv_dtype=kv_dtype(config),
        **({"max_adapter_rank": config.lora.max_lora_rank} if config.lora.is_on else {}),
        **extras,
    )
    return executor


def _make_for_gpu(config: Config, model: LoadedModel, max_model_len: int, num_blocks: int) -> CudaExecutor:
    return cast("CudaExecutor", _make(config, model, max_model_len, num_blocks, **_gpu_extras(config)))


def _gpu_extras(config: Config) -> dict[str, object]:
    chosen = config.backend
    return {
        "round_to_fp8": chosen.weight_dtype == "fp8",
        "deterministic": bool(chosen.deterministic),
        "attention": chosen.attention or AttentionKernels.AUTO.value,
        "use_graphs": chosen.cuda_graphs is not False,
        "depth": chosen.steps_in_flight or 2,
    }
