"""Facts of the machine for the log and for plans: device, memory nodes, CPUs for threads. Nothing is loaded here."""

from __future__ import annotations

import logging

from penstock.backends import cuda
from penstock.config import Backend, BackendConfig
from penstock.config.units import format_size
from penstock.deploy.blueprint import Compute
from penstock.machine import Cores
from penstock.types.errors import ConfigError, counted

_log = logging.getLogger(__name__)


def num_threads(backend: BackendConfig, cores: Cores) -> int:
    """Return the number of threads that compute: the setting, or `cores.num_threads`."""
    return backend.threads or cores.num_threads


def pinned_cpus(backend: BackendConfig, cores: Cores) -> tuple[int, ...]:
    """Return the CPUs to which threads are pinned, one each; empty: threads move.

    Raises ConfigError for fewer threads than cores: containers with a quota would all pin the same first cores.
    """
    if not backend.pin_threads:
        return ()
    cpus, count = cores.cpus, num_threads(backend, cores)
    if count != len(cpus):
        raise ConfigError(
            f"pin_threads is set, and the server may use {counted(len(cpus), 'core')}, but would take {count}: "
            "it can't know which ones other processes use.",
            remedy="Give the server as many cores as threads (taskset, or a container's cpuset), or leave out --pin-threads.",
        )
    return cpus


def memory_nodes(cores: Cores) -> tuple[int, ...]:
    """Return the NUMA nodes over which to spread weights and KV cache. Empty for a single node, or if the system refuses."""
    from penstock.backends import native

    if (refusal := native.spreading_refusal(cores.memory_nodes)) is None:
        return cores.memory_nodes
    _log.warning("memory is not spread over the nodes of this machine: %s", refusal)
    return ()


def memory_facts(cores: Cores) -> str:
    """Describe the machine's memory nodes and last-level caches, and whether weights are spread over the nodes."""
    from penstock.backends import native

    told = ", ".join(f"node {node} with {counted(num, 'core')}" for node, num in cores.nodes)
    told += "".join(f", {counted(num, 'last-level cache')} of {format_size(size)}" for size, num in cores.caches)
    if not cores.memory_nodes:
        return told
    refusal = native.spreading_refusal(cores.memory_nodes)
    return f"{told}; weights and KV cache are {'spread over all' if refusal is None else f'not spread: {refusal}'}"


def weight_room_bytes(compute: Compute, host_bytes: int) -> int:
    """Return the bytes that weights may take: all of a GPU's memory, or `host_bytes`, and at least 0."""
    gpu = cuda.find_gpu() if compute.is_on_gpu else None
    return gpu.total_bytes if isinstance(gpu, cuda.Gpu) else max(0, host_bytes)


def words(backend: BackendConfig, cores: Cores) -> str:
    """Describe for the log what computes: kernels and threads, or the GPU."""
    if backend.backend == Backend.REFERENCE:
        return "NumPy: slow, for learning and tests"
    if backend.backend == Backend.CUDA:
        modes = f"{', weights in fp8' if backend.weight_dtype else ''}{', deterministic' if backend.deterministic else ''}"
        return _gpu_name(cuda.find_gpu()) + modes
    threads = counted(num_threads(backend, cores), "thread")
    if backend.kernels is not None:
        return f"{backend.kernels} kernels, {threads}"
    from penstock.backends import native
    from penstock.backends.native.choice import chosen

    why = native.info()["why_no_tiles"]
    without = f", without the processor's tiles (AMX): {why}" if why else ""
    return f"{chosen().variant} kernels, {threads}{without}{chosen().words}"


def has_gpu() -> bool:
    """Return whether this machine has a GPU, usable or not. Asks only the driver."""
    return isinstance(cuda.find_gpu(), cuda.Gpu)


def gpu_facts() -> str:
    """Describe the GPU and its packages, or why no GPU is usable, for `penstock env`."""
    gpu, cause = cuda.find_gpu(), cuda.why_not()
    versions = {**cuda.package_versions(), "flashinfer": cuda.flashinfer_version()}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    device = "" if isinstance(gpu, str) else f"{_gpu_name(gpu)}, {gpu.num_visible} visible"
    return "; ".join(filter(None, [f"not usable: {cause}" if cause else "", device, packages]))


def missing_gpu_packages() -> str | None:
    """Name the packages that a machine with a GPU lacks, with the remedy. None if nothing is missing."""
    names = [name for name, version in cuda.package_versions().items() if version is None]
    if not names or not has_gpu():
        return None
    return f"{', '.join(names)}, for the GPU: `pip install '.[cuda]'` in the source folder"


def _gpu_name(gpu: cuda.Gpu | str) -> str:
    if isinstance(gpu, str):
        return gpu
    major, minor = gpu.capability
    return f"{gpu.name}, {format_size(gpu.total_bytes)}, compute capability {major}.{minor}"
