"""The benchmark of the GPU's products runs: tiny ones where there is no device, and says so where there is none to measure."""

from __future__ import annotations

import sys

import gpu_gemm
import pytest

from support.interpreted import HAS_DEVICE


def test_the_self_test_measures_every_kind_in_both_modes(self_tested) -> None:
    result = self_tested("gpu_gemm")
    assert result["benchmark"] == "gpu_gemm"
    assert result["peaks"]["copy_gbs"]["best"] > 0
    assert {(line["kind"], line["mode"]) for line in result["products"]} == {
        (kind, mode) for kind in gpu_gemm.KINDS for mode in gpu_gemm.MODES
    }
    for line in result["products"]:
        assert list(line["by_tokens"]) == ["1", "3"]
        assert all(figures["us"] > 0 for figures in line["by_tokens"].values())


@pytest.mark.skipif(HAS_DEVICE, reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_gemm.py"])
    with pytest.raises(SystemExit) as exit_info:
        gpu_gemm.main()
    assert exit_info.value.code == 1
    assert "NVIDIA GPU" in capsys.readouterr().err
