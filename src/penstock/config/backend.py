"""The settings of the backend: who computes, where and how. Read by `build` and its parts; computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from penstock.config.setting import Component, Kind, setting


class Backend(StrEnum):
    """Who computes. `reference` is the slow specification, offered for learning and for tests."""

    NATIVE = "native"
    REFERENCE = "reference"
    CUDA = "cuda"


class Device(StrEnum):
    """Where it is computed. `auto`: on a GPU if one can be used."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionKernels(StrEnum):
    """Whose kernels compute attention on a GPU. `auto`: FlashInfer's where they are installed and measured to be faster."""

    AUTO = "auto"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig(Component):
    """Who computes."""

    title: ClassVar[str] = "Compute"

    device: str = setting(
        Device.AUTO.value,
        "Where to compute: cuda is an NVIDIA GPU; auto takes one if it can be used and nothing is set that is the CPU's.",
        kind=Kind.CHOICE,
        choices=tuple(Device),
    )
    backend: str | None = setting(
        None,
        "native: C++ kernels on the CPU; reference: NumPy, slow, for learning; cuda: Triton kernels on a GPU.",
        kind=Kind.CHOICE,
        choices=tuple(Backend),
        default_doc="the device's: native on the CPU, cuda on a GPU",
    )
    threads: int | None = setting(
        None,
        "Threads that compute on the CPU.",
        kind=Kind.COUNT,
        minimum=1,
        maximum=1024,
        default_doc="the CPUs this process may use",
    )
    weight_dtype: str | None = setting(
        None,
        "fp8: weights that are floats are rounded to 8 bits on a GPU; those of embeddings and logits are not.",
        kind=Kind.CHOICE,
        choices=("fp8",),
        default_doc="the file's; floats of 16 and 32 bits become bf16",
    )
    deterministic: bool | None = setting(
        None,
        "The same answer whatever else is in the batch; it costs speed on a GPU, and is always so on the CPU.",
        kind=Kind.FLAG,
        default_doc="true, on a GPU false",
    )
    cuda_graphs: bool | None = setting(
        None,
        "Steps that only decode are launched on the GPU as one recorded graph.",
        kind=Kind.FLAG,
        default_doc="true on a GPU",
    )
    attention: str | None = setting(
        None,
        "Whose kernels compute attention on a GPU: auto tries FlashInfer's at the start, if the extra is installed, and takes "
        "them where they give the same answers and are faster.",
        kind=Kind.CHOICE,
        choices=tuple(AttentionKernels),
        default_doc="auto on a GPU",
    )
    steps_in_flight: int | None = setting(
        None,
        "With 2, the GPU computes a step while the next one is planned.",
        kind=Kind.COUNT,
        minimum=1,
        maximum=2,
        default_doc="2 on a GPU",
    )
    step_timeout_s: float | None = setting(
        None,
        "A step that takes longer is taken for stuck: its requests end with an error, and the engine is made anew.",
        kind=Kind.DURATION,
        key="step_timeout",
        minimum=1.0,
        default_doc="120s, with the reference backend none",
    )
