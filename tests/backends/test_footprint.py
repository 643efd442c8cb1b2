"""The memory of a step's buffers that a server plans for, and what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.batch import most_scored
from penstock.backends.native import executor, footprint
from penstock.backends.native._native import Engine
from penstock.backends.native.lowering import Lowered, lower
from penstock.models import architectures
from penstock.models.catalog import resolve
from penstock.models.load import load_model
from penstock.models.program import Program
from penstock.models.weights import WeightTensor
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES

MAX_TOKENS, MAX_ROWS = 64, 4


class Meter:
    """An engine whose buffers are counted."""

    def __init__(self, engine: Engine, num_samples: int) -> None:
        self._engine, self._rows = engine, {False: MAX_TOKENS, True: num_samples}
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_buffer(self, width: int, per_sample: bool) -> int:
        self.num_bytes += 4 * width * self._rows[per_sample]
        return self._engine.add_buffer(width, per_sample)

    def add_activation(self, cols: int, quantised: bool, per_sample: bool, **kind: bool) -> int:
        self.num_bytes += (1 if quantised else 2) * cols * self._rows[per_sample]
        return self._engine.add_activation(cols, quantised, per_sample, **kind)


@pytest.mark.parametrize(
    "name", ["qwen2", "gguf_q4_1", "gemma2", "mixtral_gguf", "deepseek_v2", "qwen3_5", "gpt2", "bert", "modernbert", "gte"]
)
def test_a_server_counts_the_buffers_of_the_largest_step_before_it_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_case(CASES[name], tmp_path / name) if name in CASES else write_encoder(ENCODERS[name], tmp_path / name)
    model = load_model(resolve(str(path), path.parent))
    program = architectures.describe(model.spec)
    num_samples = MAX_ROWS + most_scored(program)
    meters: list[Meter] = []

    def metered(program: Program, weights: Mapping[str, WeightTensor], engine: Engine, **options: Any) -> Lowered:
        meters.append(Meter(engine, num_samples))
        return lower(program, weights, meters[-1], **options)  # type: ignore[arg-type]  # all that it calls is there

    monkeypatch.setattr(executor, "lower", metered)
    sizes = {"num_blocks": 8, "block_size": 64, "max_rows": MAX_ROWS, "max_step_tokens": MAX_TOKENS, "max_model_len": 16}
    executor.NativeExecutor(model, program, **sizes, num_threads=1).close()
    counted = footprint.buffer_bytes(program, MAX_TOKENS, num_samples)
    assert 0.8 * counted < meters[0].num_bytes < 1.1 * counted
