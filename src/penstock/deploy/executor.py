"""Makes the executor for a blueprint's backend. On a GPU, the first executor measures the memory left for the KV cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, cast

from penstock.config import AttentionKernels, Backend
from penstock.config.units import format_size
from penstock.deploy.blueprint import Blueprint, Compute
from penstock.deploy.device import memory_nodes, num_threads
from penstock.deploy.experts import expert_file
from penstock.deploy.packed import make_with_packed
from penstock.deploy.sizing import plan_gpu_kv
from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.backends.cuda.executor import CudaExecutor
    from penstock.backends.cuda.memory import Usage
    from penstock.backends.native._native import Account, Team
    from penstock.engine.ports import Executor
    from penstock.models.weights import LoadedModel

EXECUTORS: Mapping[str, str] = {
    "native": "penstock.backends.native.executor:NativeExecutor",
    "reference": "penstock.backends.reference.executor:ReferenceExecutor",
    "cuda": "penstock.backends.cuda.executor:CudaExecutor",
}
"""Backend -> class."""

BAR_DELAY_S = 1.0
CAPTURE_SECONDS = 10.0
"""Time to capture CUDA graphs at a start. The others are captured when a step needs them."""

_log = logging.getLogger(__name__)
SeatOf: TypeAlias = "Callable[[int, Sequence[int]], tuple[Team, Account]]"
"""Takes a number of threads and the CPUs to pin them to. Returns the team of threads, and the model's account there."""


def first_executor(blueprint: Blueprint, model: LoadedModel, seat_of: SeatOf) -> tuple[Blueprint, Executor]:
    """Load the weights into an executor. Return it, and the blueprint with its memory plan, which is measured on a GPU.

    Raises ConfigError if the weights or the KV cache do not fit.
    """
    if not blueprint.compute.is_on_gpu:
        return blueprint, build_executor(blueprint, model, seat_of)
    executor, usage = _profile(blueprint, model)
    plan = blueprint.plan
    try:
        plan = plan or plan_gpu_kv(
            blueprint.compute.wanted(model.spec, blueprint.settings.max_model_len),
            blueprint.cache,
            is_exact=blueprint.settings.max_model_len is not None,
            block_bytes=executor.block_bytes,
            memory=usage,
            adapters=blueprint.adapters,
        )
        blueprint = replace(blueprint, plan=plan)
        _make_ready(executor, blueprint)
    except MemoryError as error:
        executor.close()
        if plan is None or not plan.num_bytes:
            raise
        raise ConfigError(
            f"The GPU does not give the {format_size(plan.num_bytes)} for the KV cache that were free: {error}",
            remedy="Lower --gpu-memory-utilization or --kv-cache-memory, or end what else uses the GPU.",
        ) from error
    except BaseException:
        executor.close()
        raise
    return blueprint, executor


def build_executor(blueprint: Blueprint, model: LoadedModel, seat_of: SeatOf) -> Executor:
    """Load the weights into an executor, for a blueprint that has a memory plan."""
    options, plan = blueprint.compute.options, blueprint.measured_plan
    if blueprint.compute.is_on_gpu:
        executor = _make_for_gpu(blueprint, model)
        try:
            _make_ready(executor, blueprint)
        except BaseException:
            executor.close()
            raise
        return executor
    if options.backend == Backend.REFERENCE:
        return _make(blueprint, model, plan.capacity)
    from penstock.backends.native.choice import chosen

    nodes = memory_nodes(blueprint.cores)
    with loading_bar(model) as on_packed, expert_file(blueprint.expert_folder, model) as file:
        team, account = seat_of(num_threads(options, blueprint.cores), blueprint.cpus)
        make = partial(
            _make,
            blueprint,
            model,
            plan.capacity,
            team=team,
            account=account,
            on_packed=on_packed,
            expert_file=file,
            rounds_floats=None if options.weight_dtype is None else options.weight_dtype == "int8",
            variant=options.kernels or chosen().variant,
            memory_nodes=nodes,
            shares_kv=blueprint.shares_kv,
        )
        if blueprint.packed is None:
            return make()
        return make_with_packed(
            blueprint.packed, lambda packed: make(packed=packed), is_of_disk=blueprint.expert_folder is not None, nodes=nodes
        )


@contextmanager
def loading_bar(model: LoadedModel) -> Iterator[Callable[[int], object] | None]:
    """Show a bar of loaded bytes after `BAR_DELAY_S`. Yield the function that moves it, or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    matrices = [tensor for tensor in model.weights.values() if tensor.num_rows > 1]
    for name in model.spec.looked_up:
        matrices.remove(model.weights[name])  # its rows are read in the file
    total = sum(tensor.num_bytes for tensor in matrices)
    with tqdm(
        desc=f"Loading {model.name}", total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=BAR_DELAY_S
    ) as bar:
        yield bar.update


def _profile(blueprint: Blueprint, model: LoadedModel) -> tuple[CudaExecutor, Usage]:
    """Return a GPU's executor with a small KV cache, and the measured GPU memory that it takes without the cache."""
    from penstock.backends.cuda.memory import GpuMemory, no_blocks, profile
    from penstock.engine.transfers import num_staged_blocks

    compute, cache = blueprint.compute, blueprint.cache
    longest = _longest(blueprint, model)
    if blueprint.plan is None:
        capacity = Capacity(2, compute.block_size, compute.max_rows, compute.max_step_tokens, longest)
    else:
        capacity = blueprint.plan.capacity
    moved = num_staged_blocks if cache.kv_host_size_bytes or cache.kv_disk_size_bytes else no_blocks
    try:
        return profile(partial(_make_for_gpu, blueprint, model), capacity, GpuMemory(), num_moved_blocks=moved)
    except MemoryError as error:
        raise ConfigError(
            f"The weights and a step of {capacity.max_step_tokens} tokens do not fit the GPU: {error}",
            remedy="Lower --max-num-batched-tokens, take a smaller model, or end what else uses the GPU.",
        ) from error


def _make_ready(executor: CudaExecutor, blueprint: Blueprint) -> None:
    """Allocate a GPU's KV cache and capture its CUDA graphs. Raises MemoryError if there is no room for the cache."""
    from penstock.backends.cuda.memory import GpuMemory

    plan = blueprint.measured_plan
    executor.resize(plan.capacity.num_blocks, max_model_len=plan.capacity.max_model_len)
    executor.choose_attention()
    if not executor.num_graphs_left:
        return
    free_bytes = GpuMemory().read()[0]
    run = executor.capture_graphs(max_seconds=CAPTURE_SECONDS)
    _log.info(
        "CUDA graphs of decodes: %d captured in %.1f s, which take %s; %d more when they are needed",
        run.num_captured,
        run.seconds,
        format_size(max(0, free_bytes - GpuMemory().read()[0])),
        run.num_left,
    )


def _longest(blueprint: Blueprint, model: LoadedModel) -> int:
    """Return the most tokens of a request that the settings and the model allow, even if the KV cache will hold fewer.

    Every GPU executor is first made for this length. The length decides which keys are stored without bias, and a file of the
    disk tier must stay readable by later executors.
    """
    if model.encoder is not None:
        return blueprint.measured_plan.capacity.max_model_len
    return min(blueprint.settings.max_model_len or model.spec.max_model_len, model.spec.max_model_len)


def _make_for_gpu(blueprint: Blueprint, model: LoadedModel, num_blocks: int = 2) -> CudaExecutor:
    compute = blueprint.compute
    block_size = blueprint.plan.capacity.block_size if blueprint.plan is not None else compute.block_size
    rows, step_tokens = compute.max_rows, compute.max_step_tokens
    capacity = Capacity(num_blocks, block_size, rows, step_tokens, _longest(blueprint, model))
    return cast("CudaExecutor", _make(blueprint, model, capacity, **_gpu_extras(compute)))


def _gpu_extras(compute: Compute) -> dict[str, object]:
    options = compute.options
    return {
        "round_to_fp8": options.weight_dtype == "fp8",
        "deterministic": bool(options.deterministic),
        "attention": options.attention or AttentionKernels.AUTO.value,
        "use_graphs": options.cuda_graphs is not False,
        "depth": compute.depth,
    }


def _make(blueprint: Blueprint, model: LoadedModel, capacity: Capacity, **extras: object) -> Executor:
    from penstock.models.architectures import describe

    compute, lora = blueprint.compute, blueprint.lora
    assert compute.options.backend is not None
    module, _, attribute = EXECUTORS[compute.options.backend].partition(":")
    executor: Executor = getattr(import_module(module), attribute)(
        model,
        model.program or describe(model.spec),
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_rows=capacity.max_rows,
        max_step_tokens=capacity.max_step_tokens,
        max_model_len=capacity.max_model_len,
        kv_dtype=compute.kv_dtype,
        **({"max_adapter_rank": lora.max_lora_rank} if lora.is_on else {}),
        **extras,
    )
    return executor
