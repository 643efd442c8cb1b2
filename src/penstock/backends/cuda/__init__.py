"""Finds a usable GPU. Cheap checks come first: importing PyTorch takes seconds."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec

MIN_CAPABILITY = (8, 0)
"""Ampere (2020), the first with bf16 tensor cores."""
MIN_VERSIONS = (("torch", (2, 8)), ("triton", (3, 4)))
"""The least versions, as in the extra `cuda` of pyproject.toml."""
REMEDY = "install it in Penstock's source folder: pip install '.[cuda]'"
_DRIVER = "libcuda.so.1"
_NO_DEVICE = 100
"""`CUDA_ERROR_NO_DEVICE`: there is no GPU, or `CUDA_VISIBLE_DEVICES` hides it."""
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""`CUdevice_attribute`: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU in `CUDA_VISIBLE_DEVICES`."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_visible: int


def package_versions() -> dict[str, str | None]:
    """Return the installed versions of PyTorch and Triton by name, None if missing."""
    return {name: _installed_version(name) for name, _ in MIN_VERSIONS}


def flashinfer_version() -> str | None:
    return _installed_version("flashinfer", of="flashinfer-python")


def find_gpu() -> Gpu | str:
    """Return the first GPU, or a reason why it can't be used. Asks only the driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return f"no NVIDIA driver ({_DRIVER}) is installed"
    status = driver.cuInit(0)
    count = ctypes.c_int(0)
    if status == 0:
        status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status == _NO_DEVICE or (not status and not count.value):
        return "no NVIDIA GPU is visible"
    if status:
        return f"the NVIDIA driver can't be used (CUDA error {status})"
    device, name, total = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return Gpu(name.value.decode(errors="replace"), _capability(driver, device), total.value, count.value)


def why_not() -> str | None:
    """Return why the CUDA backend can't run, as the end of a sentence, or None if it can. Imports PyTorch last."""
    if (cause := _why_no_packages()) is not None:
        return cause
    gpu = find_gpu()
    if isinstance(gpu, str):
        return gpu
    if gpu.capability < MIN_CAPABILITY:
        return f"{gpu.name} has compute capability {_dotted(gpu.capability)}, less than {_dotted(MIN_CAPABILITY)}"
    return _why_not_torch()


def _why_no_packages() -> str | None:
    for name, least in MIN_VERSIONS:
        version = _installed_version(name)
        if version is None:
            return f"{name} is not installed ({REMEDY})"
        if _numbers(version) < least:
            return f"{name} {version} is older than {_dotted(least)} ({REMEDY})"
    version = _installed_version("torch") or ""
    if version.endswith("+cpu"):
        return f"torch {version} is a build for CPUs alone (reinstall it from an index that has builds for CUDA)"
    return None


def _why_not_torch() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    built_for = torch.version.cuda
    return f"torch {torch.__version__} ({f'CUDA {built_for}' if built_for else 'no CUDA'}) can't use the driver"


def _installed_version(name: str, *, of: str | None = None) -> str | None:
    if find_spec(name) is None:
        return None
    from importlib.metadata import PackageNotFoundError, version  # importing it takes 20 ms, so only machines with a GPU do

    try:
        return version(of or name)
    except PackageNotFoundError:
        return None


def _capability(driver: ctypes.CDLL, device: ctypes.c_int) -> tuple[int, int]:
    value = ctypes.c_int(0)
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    return numbers[0], numbers[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
