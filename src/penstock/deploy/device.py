"""The device: decides which backend computes a model, and the settings whose default depends on it. The factory asks before
anything is loaded; nothing is loaded or computed here.

    --device   --backend    without          native, reference   cuda
    auto                    a GPU if usable   the CPU            a GPU
    cpu                     native            the CPU            refused
    cuda                    a GPU             refused            a GPU

`a GPU` is an error where none can be used; `a GPU if usable` is the CPU there, and where something is set that is the CPU's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.backends import cuda
from penstock.config import AttentionKernels, Backend, BackendConfig, Config, Device
from penstock.config.units import format_size
from penstock.machine import Cores
from penstock.types.errors import ConfigError, counted
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ShortConvSpec

if TYPE_CHECKING:
    from penstock.models.formats import Floats
    from penstock.models.weights import LoadedModel
    from penstock.types.model_spec import ModelSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Values of settings that were left out, for one backend."""

    kv_dtype: KvDtype
    max_rows: int
    max_step_tokens: int
    step_timeout_s: float | None


_CPU_DEFAULTS = _Defaults(KvDtype.INT8, max_rows=64, max_step_tokens=512, step_timeout_s=120.0)
"""The time-out is a hundred times a full step of Qwen2.5-1.5B on two cores (docs/performance.md)."""
_DEFAULTS: Mapping[str | None, _Defaults] = {
    Backend.NATIVE: _CPU_DEFAULTS,
    Backend.REFERENCE: replace(_CPU_DEFAULTS, step_timeout_s=None),
    Backend.CUDA: _Defaults(KvDtype.BF16, max_rows=256, max_step_tokens=2048, step_timeout_s=120.0),
}
"""A GPU's bandwidth is shared by more rows, and a chunk of 2,048 tokens fills its multipliers."""


def settled(config: Config) -> Config:
    """The same config with its device and backend decided. Raises ConfigError for what does not go together."""
    device, backend = config.backend.device, config.backend.backend
    is_cpu_named = backend in (Backend.NATIVE, Backend.REFERENCE)
    if device == Device.CUDA and is_cpu_named:
        raise ConfigError(f"The {backend} backend computes on the CPU, and --device is cuda.", remedy="Leave one of them out.")
    if device == Device.CPU and backend == Backend.CUDA:
        raise ConfigError("The cuda backend computes on a GPU, and --device is cpu.", remedy="Leave one of them out.")
    cause: str | None = None
    if device == Device.CUDA or backend == Backend.CUDA:
        if (cause := cuda.why_not()) is not None:
            raise ConfigError(f"No GPU can be used: {cause}.", remedy="Leave out --device and --backend for the CPU.")
    elif device == Device.CPU or is_cpu_named:
        cause = "the CPU is asked for"
    else:
        cause = _cpu_setting(config) or cuda.why_not()
        if cause is not None:
            # Of a machine that has neither the extra nor a GPU, nobody would think that one is used.
            is_expected = cuda.package_versions()["torch"] is None and isinstance(cuda.find_gpu(), str)
            _log.log(logging.DEBUG if is_expected else logging.INFO, "no GPU is used: %s", cause)
    if cause is None:
        _check_gpu_settings(config)
        chosen = replace(config.backend, device=Device.CUDA.value, backend=Backend.CUDA.value)
    else:
        _check_cpu_settings(config, cause)
        chosen = replace(config.backend, device=Device.CPU.value, backend=backend or Backend.NATIVE.value)
        _check_kernels(chosen)
    return replace(config, backend=chosen)


def _cpu_setting(config: Config) -> str | None:
    """A setting that only the CPU has, in words; None if there is none."""
    if config.backend.threads is not None:
        return "--threads is a setting of the CPU"
    if config.backend.pin_threads:
        return "--pin-threads is a setting of the CPU"
    if config.backend.kernels is not None:
        return "--kernels is a setting of the CPU"
    return "--experts-on-disk is a setting of the CPU" if config.model.experts_on_disk else None


def settled_elsewhere(config: Config, *, is_gpu: bool) -> Config:
    """As `settled`, for a machine that is known from its figures: nothing is asked of this one. Raises ConfigError."""
    if is_gpu:
        _check_gpu_settings(config)
        chosen = replace(config.backend, device=Device.CUDA.value, backend=Backend.CUDA.value)
    else:
        _check_cpu_settings(config, "the machine is a CPU")
        chosen = replace(config.backend, device=Device.CPU.value, backend=Backend.NATIVE.value)
    return replace(config, backend=chosen)


def _check_gpu_settings(config: Config) -> None:
    if config.backend.threads is not None:
        raise ConfigError(
            "threads is how many compute on the CPU, and a GPU is to be used.",
            remedy="Leave out --threads, or set --device cpu.",
        )
    if config.backend.pin_threads:
        raise ConfigError(
            "pin_threads is of those that compute on the CPU, and a GPU is to be used.",
            remedy="Leave out --pin-threads, or set --device cpu.",
        )
    if config.backend.kernels is not None:
        raise ConfigError(
            "kernels are those of the CPU, and a GPU is to be used.", remedy="Leave out --kernels, or set --device cpu."
        )
    if config.model.experts_on_disk:
        raise ConfigError(
            "experts_on_disk is a setting of the CPU, and a GPU is to be used.",
            remedy="Leave out --experts-on-disk, or set --device cpu.",
        )
    if config.backend.weight_dtype not in (None, "fp8"):
        raise ConfigError(
            f"weight_dtype {config.backend.weight_dtype} is a setting of the CPU, and a GPU is to be used.",
            remedy="Leave out --weight-dtype, or set --device cpu.",
        )
    _check_attention(config)
    if config.kv.gpu_memory_utilization is not None and config.kv.kv_cache_memory_bytes is not None:
        raise ConfigError(
            "gpu_memory_utilization and kv_cache_memory both say how large the KV cache is.", remedy="Leave one of them out."
        )
    if config.kv.kv_host_size_bytes and config.kv.kv_disk_size_bytes:
        raise ConfigError(
            "There is one tier below the KV cache: in the machine's memory or on disk.",
            remedy="Leave out --kv-host-size or --kv-disk-size.",
        )


def _check_attention(config: Config) -> None:
    """Refuse FlashInfer where it can't be used. Raises ConfigError."""
    if config.backend.attention != AttentionKernels.FLASHINFER:
        return
    for is_so, cause, flag in (
        (config.backend.deterministic, "the order of its sums depends on the batch", "--deterministic"),
        (config.kv.kv_cache_dtype == KvDtype.INT8, "it reads no keys and values in int8", "--kv-cache-dtype"),
    ):
        if is_so:
            raise ConfigError(f"FlashInfer can't compute the attention: {cause}.", remedy=f"Leave out --attention or {flag}.")
    if cuda.flashinfer_version() is None:
        raise ConfigError(
            "FlashInfer can't compute the attention: it is not installed.",
            remedy="Install it in Penstock's source folder: pip install '.[flashinfer]'.",
        )


def _check_cpu_settings(config: Config, cause: str) -> None:
    """Refuse settings that only a GPU has: nothing that is set is ignored. Raises ConfigError."""
    of_a_gpu = "it is a GPU's setting"
    for flag, is_given, why in (
        ("--gpu-memory-utilization", config.kv.gpu_memory_utilization is not None, of_a_gpu),
        ("--weight-dtype fp8", config.backend.weight_dtype == "fp8", of_a_gpu),
        ("--cuda-graphs", config.backend.cuda_graphs is not None, of_a_gpu),
        ("--attention", config.backend.attention is not None, of_a_gpu),
        ("--steps-in-flight", config.backend.steps_in_flight is not None, of_a_gpu),
        ("--kv-host-size", bool(config.kv.kv_host_size_bytes), "the memory below the KV cache would be the same memory"),
    ):
        if is_given:
            raise ConfigError(f"{flag} has no meaning on the CPU: {why}. No GPU is used: {cause}.", remedy=f"Leave out {flag}.")


def _check_kernels(backend: BackendConfig) -> None:
    """Refuse kernels that the machine or the backend does not have. Raises ConfigError."""
    if backend.backend == Backend.REFERENCE:
        if backend.threads is not None:  # of saved settings, which also serve the native backend
            _log.warning("--threads has no effect: the reference backend computes with NumPy")
        flags = {"--pin-threads": backend.pin_threads, "--kernels": backend.kernels}
        for flag in [flag for flag, is_given in flags.items() if is_given]:
            raise ConfigError(
                f"{flag} has no meaning with the reference backend: it computes with NumPy.", remedy=f"Leave out {flag}."
            )
    if backend.kernels is None:
        return
    from penstock.backends import native

    usable = native.info()
    if backend.kernels not in usable["variants"]:
        why = f" ({usable['why_no_tiles']})" if backend.kernels == "amx" and usable["why_no_tiles"] else ""
        raise ConfigError(
            f"This machine can't run the {backend.kernels} kernels{why}.",
            remedy=f"Set --kernels (PENSTOCK_KERNELS) to one of {', '.join(usable['variants'])}, or leave it unset.",
        )


def is_on_gpu(config: Config) -> bool:
    """True if the backend of a settled config is the GPU's."""
    return config.backend.backend == Backend.CUDA


def kv_dtype(config: Config) -> KvDtype:
    """The type of the stored keys and values: what was asked for, or the backend's own."""
    return KvDtype(config.kv.kv_cache_dtype) if config.kv.kv_cache_dtype else _defaults(config.backend).kv_dtype


def max_rows(config: Config) -> int:
    """Requests in one step at most."""
    return config.scheduler.max_num_seqs or _defaults(config.backend).max_rows


def max_step_tokens(config: Config) -> int:
    """Tokens in one step at most."""
    return config.scheduler.max_num_batched_tokens or _defaults(config.backend).max_step_tokens


def kv_window(config: Config, spec: ModelSpec) -> int:
    """`Capacity.window` of a settled config's backend for a model. A GPU's is 0: it keeps all blocks."""
    from penstock.models.architectures import describe

    return 0 if is_on_gpu(config) else describe(spec).window


def step_timeout_s(backend: BackendConfig) -> float | None:
    """After how long a step is taken for stuck; None: never, as by default with the slow backend."""
    return _defaults(backend).step_timeout_s if backend.step_timeout_s is None else backend.step_timeout_s


def num_threads(backend: BackendConfig, cores: Cores) -> int:
    """Threads that compute: as many as were asked for, or as suit the machine."""
    return backend.threads or cores.num_threads


def pinned_cpus(backend: BackendConfig, cores: Cores) -> tuple[int, ...]:
    """The CPUs to which threads are pinned, one for each; empty: to none. Raises ConfigError for fewer threads than cores.

    A process that has fewer threads than cores can't know which of them others take: in containers with a quota all would
    take the first ones.
    """
    if not backend.pin_threads:
        return ()
    cpus, count = cores.cpus, num_threads(backend, cores)
    if count != len(cpus):
        raise ConfigError(
            f"pin_threads is set, and of the {counted(len(cpus), 'core')} that this server may use {count} would be taken: "
            "which of them others take is not known.",
            remedy="Give the server as many cores as threads (taskset, or a container's cpuset), or leave out --pin-threads.",
        )
    return cpus


def memory_nodes(cores: Cores) -> tuple[int, ...]:
    """The memory nodes over which weights and KV cache are spread; empty if there is one, or if the system refuses."""
    from penstock.backends import native

    if (refusal := native.spreading_refusal(cores.memory_nodes)) is None:
        return cores.memory_nodes
    _log.warning("memory is not spread over the nodes of this machine: %s", refusal)
    return ()


def memory_facts(cores: Cores) -> str:
    """The machine's memory nodes and last-level caches in words, and whether weights are spread over the nodes."""
    from penstock.backends import native

    told = ", ".join(f"node {node} with {counted(num, 'core')}" for node, num in cores.nodes)
    told += "".join(f", {counted(num, 'last-level cache')} of {format_size(size)}" for size, num in cores.caches)
    if not cores.memory_nodes:
        return told
    refusal = native.spreading_refusal(cores.memory_nodes)
    return f"{told}; weights and KV cache are {'spread over all' if refusal is None else f'not spread: {refusal}'}"


def check_block_size(config: Config) -> None:
    """Before anything is loaded: the native kernels keep keys in tiles."""
    from penstock.backends.native import KV_TILE

    size = config.kv.block_size
    if config.backend.backend == Backend.NATIVE and size % KV_TILE:
        raise ConfigError(
            f"block_size {size} is no multiple of {KV_TILE}: the native backend keeps keys in tiles of {KV_TILE} positions.",
            remedy=f"Set --block-size to {max(1, round(size / KV_TILE)) * KV_TILE}.",
        )


def check_head_dim(config: Config, model: LoadedModel) -> None:
    """Before a weight is read: what the native kernels keep on the stack is bounded."""
    from penstock.backends.native import LARGEST_HEAD_DIM

    head_dim = max(attention.head_dim for attention in model.spec.attentions)
    if config.backend.backend == Backend.NATIVE and head_dim > LARGEST_HEAD_DIM:
        raise ConfigError(
            f"head_dim of {model.name} is {head_dim}, and the native backend takes up to {LARGEST_HEAD_DIM}.",
            remedy="Set --backend reference, which is slow, or take another model.",
        )


def check_state(config: Config, model: LoadedModel) -> None:
    """Before a weight is read: a block holds the recurrent state of its own positions."""
    needed = max((layer.mixer.kernel - 1 for layer in model.spec.layers if isinstance(layer.mixer, ShortConvSpec)), default=0)
    if config.kv.block_size < needed:
        raise ConfigError(
            f"block_size {config.kv.block_size} is too small for {model.name}: its state is that of {needed} positions.",
            remedy=f"Set --block-size to {size}." if (size := -(-needed // 16) * 16) <= 256 else "Take another model.",
        )


def weight_room_bytes(config: Config, host_bytes: int) -> int:
    """The bytes that weights may take: all of a GPU's memory, or `host_bytes` of the machine's, and at least 0."""
    gpu = cuda.find_gpu() if is_on_gpu(config) else None
    return gpu.total_bytes if isinstance(gpu, cuda.Gpu) else max(0, host_bytes)


def held_floats(config: Config) -> Floats:
    """The type in which the backend of a settled config holds matrices of floats, on which the weights' size depends."""
    from penstock.models.formats import Floats  # with NumPy

    if not is_on_gpu(config):
        return Floats.BF16
    return Floats.FP8 if config.backend.weight_dtype == "fp8" else Floats.AS_STORED


def words(backend: BackendConfig, cores: Cores) -> str:
    """The backend in words, for the log."""
    if backend.backend == Backend.REFERENCE:
        return "NumPy: slow, for learning and tests"
    if backend.backend == Backend.CUDA:
        modes = f"{', weights in fp8' if backend.weight_dtype else ''}{', deterministic' if backend.deterministic else ''}"
        return _gpu_name(cuda.find_gpu()) + modes
    from penstock.backends import native

    why = native.info()["why_no_tiles"] if backend.kernels is None else ""
    without = f", without the processor's tiles (AMX): {why}" if why else ""
    threads = counted(num_threads(backend, cores), "thread")
    return f"{backend.kernels or native.info()['variant']} kernels, {threads}{without}"


def gpu_facts() -> str:
    """The GPU and what drives it, or why there is none, for `penstock env`."""
    gpu, cause = cuda.find_gpu(), cuda.why_not()
    versions = {**cuda.package_versions(), "flashinfer": cuda.flashinfer_version()}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    device = "" if isinstance(gpu, str) else f"{_gpu_name(gpu)}, {gpu.num_visible} visible"
    return "; ".join(filter(None, [f"not usable: {cause}" if cause else "", device, packages]))


def missing_gpu_packages() -> str | None:
    """Packages that are missing on a machine with a GPU, with the remedy; None if there is no GPU or none is missing."""
    names = [name for name, version in cuda.package_versions().items() if version is None]
    if not names or isinstance(cuda.find_gpu(), str):
        return None
    return f"{', '.join(names)}, for the GPU: `pip install '.[cuda]'` in the source folder"


def _gpu_name(gpu: cuda.Gpu | str) -> str:
    if isinstance(gpu, str):
        return gpu
    major, minor = gpu.capability
    return f"{gpu.name}, {format_size(gpu.total_bytes)}, compute capability {major}.{minor}"


def _defaults(backend: BackendConfig) -> _Defaults:
    return _DEFAULTS[backend.backend or Backend.NATIVE.value]
