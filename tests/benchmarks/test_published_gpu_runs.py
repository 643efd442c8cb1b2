"""Published runs become closed loops, whose speeds and ranks are compared."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import published_gpu_runs
import pytest
from published_gpu_runs import BLOCK_SIZE, blocks_of, published, rank_correlation, simulate, weight_bytes

from penstock.lab.aiconfigurator import read_model
from support.lab.operations import ENGINE, write_config, write_system

HEADER = "system,backend,model_path,precision,mode,isl,osl,batch_size,tp_size,silicon_ttft_ms,silicon_tpot_ms"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with tables of a tiny model, and one run on each of 1 and 2 GPUs beside two that are passed over."""
    systems = tmp_path / published_gpu_runs.SYSTEMS
    write_system(systems)
    write_config(tmp_path / published_gpu_runs.CONFIGS / "tiny_config.json")
    tiny = replace(
        published_gpu_runs.RUNS[0],
        name="tiny",
        system="g999_sxm",
        model_path="tiny",
        config="tiny",
        tables=ENGINE,
        weights="bfloat16",
        kv="bfloat16",
        least_share=1.0,
        is_synchronous=True,
    )
    monkeypatch.setattr(published_gpu_runs, "RUNS", (tiny,))
    rows = [
        "g999_sxm,vllm,tiny,fp8,agg,64,4,2,1,1,1",
        "g999_sxm,vllm,tiny,fp8,agg,64,4,1,2,1,1",
        "g999_sxm,vllm,tiny,fp8,disagg,64,4,2,1,1,1",
        "g999_sxm,vllm,other,fp8,agg,64,4,2,1,1,1",
    ]
    (systems / "silicon_sample.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return tmp_path


def test_a_run_is_a_closed_loop_of_its_clients(clone: Path) -> None:
    two, one = published(clone / published_gpu_runs.SYSTEMS / "silicon_sample.csv")
    assert two.measured.throughput == pytest.approx(2 * 4 / 4e-3)
    assert one.measured.throughput == pytest.approx(1 * 4 / 4e-3 / 2), "of each GPU"
    plain = simulate(clone, 3, 0, one)
    assert plain.num_steps == 3 * 4
    slow = simulate(clone, 3, 0, replace(one, runs=replace(one.runs, host_step_us=1000.0, host_row_us=500.0)))
    assert slow.speed.tpot == pytest.approx(plain.speed.tpot + 1.5, abs=1e-3), "the GPU waits for the host"
    both = simulate(clone, 3, 0, two)
    assert both.num_steps == 3 * 4, "both clients in each step"


def test_blocks_are_what_the_weights_leave(clone: Path) -> None:
    (run, _) = published(clone / published_gpu_runs.SYSTEMS / "silicon_sample.csv")
    model = read_model(clone / published_gpu_runs.CONFIGS / "tiny_config.json")
    weights = weight_bytes(model, "bfloat16", 1)
    assert weights == 2 * (3 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) + 2 * 256 * 64)
    token_bytes = 2 * 3 * 2 * 16 * 2
    assert blocks_of(clone, run) == int((0.9 * 4e6 - weights - 1e6) / token_bytes) // BLOCK_SIZE
    rest = replace(run, runs=replace(run.runs, is_share_of_rest=True))
    assert blocks_of(clone, rest) == int(0.9 * (4e6 - weights - 1e6) / token_bytes) // BLOCK_SIZE


def test_ranks_are_compared_with_ties_in_the_middle() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 99]) == 1
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert rank_correlation([1, 1, 2, 3], [5, 6, 7, 8]) == pytest.approx(0.9486833)


def test_the_last_line_has_the_figures(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["published_gpu_runs.py", str(clone), "--requests", "2", "--list"])
    published_gpu_runs.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["tiny"]["runs"] == result["all"]["runs"] == 2
    assert result["tiny"]["ttft_error"] > 0
