"""A machine as a test wants it: with or without a GPU, and with the kernels that it can run."""

from __future__ import annotations

import sys

import pytest

from penstock.backends import cuda
from penstock.backends.native import _native

GPU = cuda.Gpu("NVIDIA Fake", (9, 0), 80 << 30, 2)


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: cuda.Gpu | str = GPU, *, flashinfer: str | None = None, has_packages: bool = True
) -> None:
    """Make this the GPU, or the reason why there is none. Without packages, neither torch nor triton is installed."""
    answers: dict[str, object] = {"find_gpu": gpu}
    if has_packages:
        answers |= {
            "why_not": gpu if isinstance(gpu, str) else None,
            "package_versions": {"torch": "2.11.0", "triton": "3.6.0"},
            "flashinfer_version": flashinfer,
        }
    else:
        for name in ("torch", "triton"):
            monkeypatch.setitem(sys.modules, name, None)
    for name, answer in answers.items():
        monkeypatch.setattr(cuda, name, lambda answer=answer: answer)


def fake_kernels(monkeypatch: pytest.MonkeyPatch, *variants: str, why_no_tiles: str = "") -> None:
    """Make these the kernels that the machine can run, best first."""
    for name, answer in {"usable_variants": list(variants), "why_no_tiles": why_no_tiles}.items():
        monkeypatch.setattr(_native, name, lambda answer=answer: answer)
