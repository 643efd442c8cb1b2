"""The textbook's four comparisons come out as the textbook says, and are drawn."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import textbook

from penstock.lab.workload_choice import WorkloadChoice


def report_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, dict[str, list]]:  # type: ignore[type-arg]
    monkeypatch.setattr(textbook, "LOADS", (0.9,))
    monkeypatch.setattr(textbook, "WorkloadChoice", partial(WorkloadChoice, output_tokens="80~0.8"))
    textbook.main(["--requests", "40", *words])
    report: dict[str, dict[str, list]] = json.loads(capsys.readouterr().out.splitlines()[-1])  # type: ignore[type-arg]
    return report


def test_each_comparison_says_what_it_is_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(capsys, monkeypatch)
    static, dynamic, continuous = (report["batching"][name][0] for name in ("static", "dynamic", "continuous"))
    assert continuous["padding_share"] == 0 < dynamic["padding_share"]
    assert continuous["e2e_p50_ms"] < dynamic["e2e_p50_ms"] < static["e2e_p50_ms"]
    buckets, without = (report["buckets"][name][0] for name in ("buckets", "no buckets"))
    assert buckets["padding_share"] < without["padding_share"]
    paged, preallocated = (report["memory"][name][0] for name in ("paged", "preallocated"))
    assert preallocated["running"] < paged["running"]
    chunks, whole = (report["interference"][name][0] for name in ("chunks", "whole prompts"))
    assert chunks["itl_max_ms"] < whole["itl_max_ms"]


def test_plots_are_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra: pip install 'penstock[lab]'")
    report_of(capsys, monkeypatch, "--parts", "interference", "--plots", str(tmp_path))
    assert (tmp_path / "interference.png").stat().st_size > 1000
