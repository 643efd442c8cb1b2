"""Why there is no GPU: each cause has its words, and the cheap ones are found without PyTorch. Needs neither it nor a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from penstock.backends import cuda

GIB = 1 << 30


class FakeDriver:
    """As much of libcuda as is asked."""

    def __init__(self, *, num_devices: int = 1, capability: tuple[int, int] = (9, 0), status: int = 0) -> None:
        self._num_devices, self._capability, self._status = num_devices, capability, status

    def cuInit(self, flags: int) -> int:  # noqa: N802  # as the driver calls it
        return self._status

    def cuDeviceGetCount(self, out: ctypes.c_void_p) -> int:  # noqa: N802
        _target(out, ctypes.c_int).value = self._num_devices
        return 0

    def cuDeviceGet(self, out: ctypes.c_void_p, ordinal: int) -> int:  # noqa: N802
        _target(out, ctypes.c_int).value = 7
        return 0

    def cuDeviceGetName(self, out: ctypes.Array[ctypes.c_char], size: int, device: ctypes.c_int) -> int:  # noqa: N802
        assert device.value == 7
        out.value = b"NVIDIA Fake"
        return 0

    def cuDeviceTotalMem_v2(self, out: ctypes.c_void_p, device: ctypes.c_int) -> int:  # noqa: N802
        _target(out, ctypes.c_size_t).value = 80 * GIB
        return 0

    def cuDeviceGetAttribute(self, out: ctypes.c_void_p, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        _target(out, ctypes.c_int).value = self._capability[attribute - 75]
        return 0


def _target(reference: ctypes.c_void_p, kind: type) -> ctypes._SimpleCData[int]:
    return reference._obj  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One with everything, which a test takes something away from."""
    parts = SimpleNamespace(versions={"torch": "2.11.0", "triton": "3.6.0"}, driver=FakeDriver(), sees_device=True)

    def load(name: str) -> FakeDriver:
        if parts.driver is None:
            raise OSError(name)
        return parts.driver  # type: ignore[no-any-return]

    torch = ModuleType("torch")
    vars(torch).update(
        __version__="2.11.0",
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(is_available=lambda: parts.sees_device),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cuda, "_installed_version", lambda name: parts.versions.get(name))
    monkeypatch.setattr(ctypes, "CDLL", load)
    return parts


def test_a_machine_with_all_of_it_has_one(machine: SimpleNamespace) -> None:
    assert cuda.why_not() is None
    assert cuda.find_gpu() == cuda.Gpu("NVIDIA Fake", (9, 0), 80 * GIB, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": {}}, r"torch is not installed \(install it in Penstock's source folder: pip install '\.\[cuda\]'\)"),
        ({"versions": {"torch": "2.11.0"}}, "triton is not installed"),
        ({"versions": {"torch": "2.7.1", "triton": "3.6.0"}}, "torch 2.7.1 is older than 2.8"),
        ({"versions": {"torch": "2.13.0+cpu", "triton": "3.6.0"}}, "build for CPUs alone"),
        ({"driver": None}, "no NVIDIA driver"),
        ({"driver": FakeDriver(status=100)}, "no NVIDIA GPU is visible"),
        ({"driver": FakeDriver(status=803)}, "CUDA error 803"),
        ({"driver": FakeDriver(num_devices=0)}, "no NVIDIA GPU is visible"),
        ({"driver": FakeDriver(capability=(7, 5))}, "NVIDIA Fake has compute capability 7.5, less than 8.0"),
        ({"sees_device": False}, r"torch 2.11.0 \(CUDA 13.0\) can't use the driver"),
    ],
)
def test_each_cause_has_its_words(machine: SimpleNamespace, change: dict[str, object], words: str) -> None:
    vars(machine).update(change)
    cause = cuda.why_not()
    assert cause is not None
    assert re.search(words, cause), cause


@pytest.mark.parametrize("missing", ["versions", "driver"])
def test_what_is_missing_is_found_without_pytorch(
    machine: SimpleNamespace, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it is an error
    setattr(machine, missing, {} if missing == "versions" else None)
    assert cuda.why_not() is not None


def test_importing_it_imports_no_tensor_framework() -> None:
    command = "import sys, penstock.backends.cuda; print({'torch', 'triton'} & {name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
