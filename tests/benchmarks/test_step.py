"""The benchmark of a step: what it counts, and that it runs on a model."""

import argparse
import json
import sys
from types import SimpleNamespace

import pytest
import step

from penstock.models.weights import WeightFormat
from penstock.types.kv_dtype import KvDtype

PEAKS = {"int8": 2000.0, "bf16": 1000.0, "read": 50.0}


def tensor(rows, cols, kind=WeightFormat.Q4_1, num_bytes=0):
    return SimpleNamespace(num_rows=rows, num_cols=cols, format=kind, num_bytes=num_bytes)


def model(**weights):
    tensors = {
        "embed": tensor(100, 10, num_bytes=600),
        "norm": tensor(1, 10, WeightFormat.F32),
        "layers.0.q": tensor(20, 10),
        "layers.0.attn_norm": tensor(1, 10, WeightFormat.F32),
        "layers.0.down": tensor(30, 10, WeightFormat.BF16),
        "layers.1.k": tensor(4, 10),
        "layers.1.o": tensor(5, 10),
    }
    return SimpleNamespace(
        spec=SimpleNamespace(num_layers=2, kv_bytes_per_token=lambda dtype: {KvDtype.INT8: 8, KvDtype.BF16: 16}[dtype]),
        weights=tensors | weights,
    )


def test_steps_are_named_by_rows_queries_and_context():
    assert step.parse_step("4x128@256") == step.StepShape(rows=4, query_len=128, context_len=256)
    for text in ("4x128", "0x1@2", "4x-1@2"):
        with pytest.raises(argparse.ArgumentTypeError):
            step.parse_step(text)


def test_tokens_meet_the_layers_and_samples_what_follows_the_last_attention():
    cost, shape = step.StepCost(model(), 1000, KvDtype.INT8), step.StepShape(rows=2, query_len=3, context_len=5)
    assert cost.operations(shape, are_bf16=False) == 2 * (6 * (200 + 40) + 2 * (50 + 1000))
    assert cost.operations(shape, are_bf16=True) == 2 * 6 * 300
    assert cost.num_bytes(shape) == 1000 + 2 * (5 + 3) * 8


def test_the_share_is_of_the_bound_that_takes_longer():
    cost, shape = step.StepCost(model(), 1_000_000, KvDtype.INT8), step.StepShape(rows=1, query_len=1, context_len=0)
    shares = cost.shares(shape, 1e-4, PEAKS)
    assert shares["share"] == shares["read_share"] == pytest.approx(0.2, abs=1e-3)
    assert shares["compute_share"] < 0.001


@pytest.mark.model
@pytest.mark.parametrize("steps", [["2x1@33", "1x24@16"], ["1x1@0"], ["4x40@0"]], ids=" ".join)
def test_last_line_is_the_result(monkeypatch, capsys, steps):
    monkeypatch.setattr(sys, "argv", ["step.py", "--repeat", "1", "--steps", *steps])
    step.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [f"{s['batch']}x{s['query_len']}@{s['context_len']}" for s in result["steps"]] == steps
    assert all(s["share"] > 0.0 and s["ms"] >= s["linear"] > 0.0 for s in result["steps"])
