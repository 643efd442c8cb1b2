"""The benchmark of the GPU's attention runs: tiny steps without a device, and says so where there is none to measure."""

from __future__ import annotations

import json
import sys

import gpu_attention
import pytest

from support.interpreted import HAS_DEVICE, MISSING


def test_the_self_test_measures_every_kind_of_step_in_both_modes(self_tested) -> None:
    result = self_tested("gpu_attention")
    assert result["benchmark"] == "gpu_attention"
    assert result["peaks"]["copy_gbs"]["best"] > 0
    assert {(case["name"], case["kind"], case["mode"]) for case in result["cases"]} == {
        (case.name, kind, mode)
        for case in gpu_attention.TINY_CASES
        for kind in ("int8", "bf16")
        for mode in gpu_attention.MODES
    }
    for case in result["cases"]:
        assert case["attention"]["us"] > 0
        assert case["attention"]["share"] >= 0
        assert case["rotate and write"]["us"] > 0


@pytest.mark.skipif(HAS_DEVICE, reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_attention.py"])
    with pytest.raises(SystemExit) as exit_info:
        gpu_attention.main()
    assert exit_info.value.code == 1
    assert "NVIDIA GPU" in capsys.readouterr().err


def test_what_a_case_sees_is_counted_position_by_position() -> None:
    case = gpu_attention.Case("mixed", 5, decodes=2, prefills=1, query_len=3)
    assert case.num_visible == 6 + 6 + (6 + 7 + 8)


@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} is not installed")
@pytest.mark.skipif(HAS_DEVICE, reason="the stand-in for FlashInfer computes on the CPU")
def test_flashinfer_is_measured_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from penstock.backends.cuda import flashinfer_attention
    from support.backends.cuda import fake_flashinfer

    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(flashinfer_attention, "HEAD_DIMS", (32,))
    monkeypatch.setattr(flashinfer_attention, "DTYPES", (torch.float32,))
    monkeypatch.setattr(sys, "argv", ["gpu_attention.py", "--self-test"])
    gpu_attention.main()
    cases = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    has_it = {(case["kind"], case["mode"]) for case in cases if "flashinfer auto" in case}
    assert has_it == {("bf16", "default")}
    assert sum("flashinfer auto" in case for case in cases) == len(gpu_attention.TINY_CASES)
    assert sum("flashinfer fa2" in case for case in cases) == len(gpu_attention.TINY_CASES) - 1, "all but the decode"
