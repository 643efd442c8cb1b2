"""Helpers that `parity/test_tiny.py` shares with other tests."""

from __future__ import annotations

from collections.abc import Callable

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures
from penstock.models.weights import LoadedModel
from penstock.types.kv_dtype import KvDtype
from support.parity.executors import ParityExecutor
from support.parity.tiny_cases import CASES

MAX_RELATIVE_RMS = {"reference": 1e-3, "native": 0.05}
"""Largest root mean square of the differences, as a share of the logits' standard deviation. Native rounds activations.
`test_tiny_settings.py` shows what the first of them detects."""

RUNS = [("reference", KvDtype.BF16), ("native", KvDtype.BF16), ("native", KvDtype.INT8)]

BLOCK_SIZE = 16

COPIES = {name for name, case in CASES.items() if case.golden and CASES[case.golden].architecture == case.architecture}
"""Cases that have the settings and values of another one in another file. Once loaded they are the same model."""


def runs(is_through_core: bool) -> list[tuple[str, str, KvDtype]]:
    """Cases by backend and type of KV.

    Copies need no KV of 8 bits. Through the core the reference backend runs those alone that native does not compute.
    """
    return [
        (name, backend, kv_dtype)
        for name, case in CASES.items()
        for refused in [case.refused_by or {}]
        for backend, kv_dtype in RUNS
        if backend not in refused
        and not (is_through_core and backend == "reference" and "native" not in refused)
        and not (name in COPIES and kv_dtype is KvDtype.INT8)
    ]


def make(model: LoadedModel, backend: str, kv_dtype: KvDtype, num_tokens: int) -> ParityExecutor:
    kinds: dict[str, Callable[..., ParityExecutor]] = {"native": NativeExecutor, "reference": ReferenceExecutor}
    program = architectures.describe(model.spec)
    return kinds[backend](
        model,
        program,
        num_blocks=16 + 2 * -(-num_tokens // BLOCK_SIZE) + (0 if program.paged_state is None else 400),
        block_size=BLOCK_SIZE,
        max_rows=8,
        max_step_tokens=max(64, num_tokens),
        max_model_len=model.spec.max_model_len,
        kv_dtype=kv_dtype,
        poison=True,
        **({"num_threads": 2} if backend == "native" else {}),
    )
