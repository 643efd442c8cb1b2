"""Tables of kernel times become cost models; damaged ones are refused by file and line; a recorded run is met."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.lab.cost_files import CostFileError, load_cost, save_cost
from penstock.lab.cost_model import CostModel
from penstock.lab.kernel_files import Choice
from penstock.lab.kernel_import import import_folder
from penstock.lab.kernel_tables import Experts, Grid, KernelTables
from penstock.lab.sizing import with_more_bandwidth, with_more_compute
from penstock.lab.step_counts import counts_of
from penstock.types.plan import StepShape
from support.lab.kernels import LAYER_US, NUM_LAYERS, chunk_us, decode_us, mixture_us, write_tables

ROOT = Path(__file__).parents[2]
RECORDED = ROOT.parent / "shared/traces/gpu/rtxpro6000_llama-3.1-8b"


MANY_BINS = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha\n" + "".join(
    f"{idx},n<={idx},sr<={idx}%,kvB<={idx},kp={idx},1\n" for idx in range(1, 21)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "tables")


def kernels_of(cost: CostModel) -> KernelTables:
    assert cost.kernels is not None
    return cost.kernels


def attention_us(cost: CostModel, *rows: tuple[int, int]) -> float:
    """Return a layer's time of attention: of the step, without what its tokens and rows cost besides."""
    num_tokens, num_rows = sum(query_len for query_len, _ in rows), len(rows)
    step_us = cost.duration_ns(StepShape(rows, num_rows)) / 1e3
    return (step_us - 2 * num_tokens - 2 * (100 + num_rows)) / NUM_LAYERS - LAYER_US * num_tokens + num_tokens


def test_grids_are_interpolated_and_end_at_their_edge() -> None:
    grid = Grid(((0, 10), (0, 1, 3)), (0, 1, 3, 10, 11, 13))
    assert grid.at(5, 2) == pytest.approx(7)
    assert grid.at(10, 3) == 13
    assert grid.at(99, -1) == 10
    assert grid.bin(1, 0.5) == 11
    assert grid.bin(0, 99) == 3
    for axes, values in (((0, 1), (2,)), ((1, 0), (1, 2))):
        with pytest.raises(ValueError, match="grid"):
            Grid((axes,), values)


def test_a_step_is_the_sum_of_its_kernels(folder: Path) -> None:
    cost = import_folder(folder).cost
    assert attention_us(cost, *[(1, 1023)] * 8) == pytest.approx(decode_us(8, 1024), abs=0.01)
    assert attention_us(cost, *[(1, 511)] * 4) == pytest.approx(decode_us(4, 512), abs=0.01), "between entries"
    assert attention_us(cost, (64, 256)) == pytest.approx(chunk_us(64, 256), abs=0.05)
    assert attention_us(cost, (64, 256), *[(1, 1023)] * 8) == pytest.approx(mixture_us(64, 256, 8, 1024), abs=0.05)
    beside = [mixture_us(tokens, 256, 8, 16) for tokens in (16, 112)]
    assert attention_us(cost, (64, 256), *[(1, 15)] * 8) == pytest.approx(sum(beside) / 2, abs=0.05), "in a hole"


def test_a_few_prompt_tokens_beside_decodes_run_the_kernel_of_mixtures(folder: Path) -> None:
    cost = import_folder(folder).cost
    assert attention_us(cost, (2, 0), *[(1, 1023)] * 8) == pytest.approx(mixture_us(16, 0, 8, 1024), abs=0.2)


def test_several_prompts_cost_their_pairs_and_not_those_of_one_long_prompt(folder: Path) -> None:
    cost = import_folder(folder).cost
    four = attention_us(cost, *[(64, 0)] * 4)
    assert four == pytest.approx(5 + 4 * (chunk_us(64, 0) - 5), abs=0.2)
    assert four < chunk_us(256, 0) - 20


def test_beyond_the_tables_times_grow_with_the_work_and_are_reported(folder: Path) -> None:
    cost = import_folder(folder).cost
    assert attention_us(cost, *[(1, 8191)] * 64) == pytest.approx(2 * decode_us(64, 4096), abs=0.1)
    longer = StepShape(((512, 0),), 1)
    assert cost.duration_ns(longer) > 1.9 * cost.duration_ns(StepShape(((256, 0),), 1))
    assert cost.outside(counts_of(longer)) == ("512 prefill tokens > 256",)
    assert cost.outside(counts_of(StepShape(((1, 8191),) * 65, 65))) == (
        "65 rows > 64",
        "65 decodes > 64",
        "8192 tokens of context > 4096",
    )
    assert not cost.outside(counts_of(StepShape(((1, 1023),) * 64, 64)))


def test_uneven_decodes_are_between_their_mean_and_their_longest(folder: Path) -> None:
    cost = import_folder(folder).cost
    few_long = attention_us(cost, (1, 1023), (1, 15), (1, 15), (1, 15))  # share 1/4: half of the way
    mean = decode_us(4, 268)
    assert few_long == pytest.approx(mean + 0.5 * (decode_us(4, 1024) - mean), abs=0.1)
    many_long = attention_us(cost, (1, 1023), (1, 1023), (1, 1023), (1, 15))  # share 3/4: a quarter
    mean = decode_us(4, 772)
    assert many_long == pytest.approx(mean + 0.25 * (decode_us(4, 1024) - mean), abs=0.1)
    beside_a_prompt = attention_us(cost, (16, 512), (1, 1023), (1, 15), (1, 15), (1, 15))  # no bin: the usual
    mean = mixture_us(16, 512, 4, 268)
    assert beside_a_prompt == pytest.approx(mean + 0.125 * (mixture_us(16, 512, 4, 1024) - mean), abs=0.1)


def test_a_correction_that_is_disabled_is_left_out(folder: Path) -> None:
    meta = folder / "meta.yaml"
    meta.write_text(meta.read_text().replace("skew_fit:\n", "skew_fit:\n  enabled: false\n"))
    assert kernels_of(import_folder(folder).cost).skews is None


def test_experts_are_those_that_tokens_choose(folder: Path) -> None:
    lines = [f"{tokens},{num},{num}" for tokens in (1, 256) for num in (2, 8, 16)]
    (folder / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *lines]) + "\n")
    kernels = kernels_of(import_folder(folder).cost)
    assert kernels.experts == Experts(
        ns=kernels.experts.ns if kernels.experts else Grid(((0,),), (0,)), num_experts=16, num_experts_per_token=2
    )
    assert kernels.experts.layer_ns(1) == pytest.approx(2000)
    assert kernels.experts.layer_ns(2) == pytest.approx(3750), "2 of 16, then 2 that are likely others"
    assert kernels.experts.layer_ns(200) == pytest.approx(16_000, rel=1e-3)


def test_faster_machines_are_faster_where_it_counts(folder: Path) -> None:
    cost = import_folder(folder).cost
    one, prompt = StepShape(((1, 1023),), 1), StepShape(((256, 0),), 1)
    assert with_more_bandwidth(cost, 2).duration_ns(one) == pytest.approx(cost.duration_ns(one) / 2, rel=0.01)
    assert with_more_compute(cost, 2).duration_ns(one) == pytest.approx(cost.duration_ns(one), rel=0.01)
    assert with_more_compute(cost, 2).duration_ns(prompt) < 0.6 * cost.duration_ns(prompt)


def test_tables_are_slowed_as_a_whole(folder: Path) -> None:
    link = Choice(num_gpus=2, link_bytes_per_s=16e9, link_latency_ns=20e3)
    cost = replace(import_folder(folder, link).cost, step_ns=1e4)
    for rows in (((1, 900),) * 8, ((64, 256), (1, 16)), ((16, 0),)):
        shape = StepShape(rows, len(rows))
        assert cost.scaled(1.25).duration_ns(shape) == pytest.approx(1.25 * cost.duration_ns(shape), abs=2)
    assert cost.scaled(0.0).duration_ns(shape) == 0


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"read_factor": 0.0}, {"compute_factor": float("nan")}])
def test_tables_that_would_take_no_time_or_less_are_refused(folder: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not above 0"):
        replace(kernels_of(import_folder(folder).cost), **change)
    with pytest.raises(ValueError, match="does not ascend"):
        Grid(((1.0, float("nan")),), (1.0, 1.0))


def test_a_file_is_what_was_imported(folder: Path, tmp_path: Path) -> None:
    saved, path = import_folder(folder), tmp_path / "cost.json"
    save_cost(path, saved)
    assert load_cost(path) == saved
    assert saved.words == "meta-llama/Llama-3.1-8B, NVIDIA G999, from published times of kernels, 2026-04-24"
    written = json.loads(path.read_text())
    written["cost"]["kernels"]["decodes"]["values"][0] = -1
    path.write_text(json.dumps(written))
    with pytest.raises(CostFileError, match="negative"):
        load_cost(path)
    written["cost"]["kernels"]["decodes"]["values"].pop()
    path.write_text(json.dumps(written))
    with pytest.raises(CostFileError, match="damaged"):
        load_cost(path)
    written["cost"]["kernels"]["decodes"] = written["cost"]["kernels"]["step_rows"]
    path.write_text(json.dumps(written))
    with pytest.raises(CostFileError, match="another number of axes"):
        load_cost(path)


def test_the_number_of_layers_is_known_or_given(folder: Path) -> None:
    assert kernels_of(import_folder(folder).cost).num_layers == NUM_LAYERS
    shallow = import_folder(folder, Choice(num_layers=16)).cost
    assert kernels_of(shallow) == replace(kernels_of(import_folder(folder).cost), num_layers=16)
    (folder / "meta.yaml").unlink()
    with pytest.raises(CostFileError, match=r"how many layers.*--layers N"):
        import_folder(folder)


def test_several_gpus_add_up_their_results(folder: Path) -> None:
    one = kernels_of(import_folder(folder).cost)
    (folder / "tp2").mkdir()
    for path in folder.glob("*.csv"):
        path.rename(folder / "tp2" / path.name)
    link = Choice(num_gpus=2, link_bytes_per_s=16e9, link_latency_ns=20e3)
    two = kernels_of(import_folder(folder, link).cost)
    assert two.layer_tokens == one.layer_tokens
    assert (two.reduce_ns, two.reduce_token_ns) == (80e3, pytest.approx(2 * 4096 * 2 / 16))
    assert two.skews is not None
    assert {0.5, 0.25, 0.1} == set(two.skews.values), "with the usual of two GPUs"
    with pytest.raises(CostFileError, match="no tables of 1 GPUs, only tp2"):
        import_folder(folder)
    with pytest.raises(CostFileError, match=r"how long 2 GPUs take.*--link-gbytes-per-s"):
        import_folder(folder, Choice(num_gpus=2))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dense.csv", "layer,tokens\n", "dense.csv, line 1: there is no column time_us"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1\n", "dense.csv, line 2: 2 values for 3 columns"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,fast\n", "dense.csv, line 2: time_us is 'fast'"),
        ("dense.csv", "layer,tokens,time_us\n\nqkv_proj,1,nan\n", "dense.csv, line 3: time_us is 'nan'"),
        ("dense.csv", "layer,tokens,time_us\n", "dense.csv has no rows"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,1\n", "dense.csv has no times of o_proj, layernorm"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,1\no_proj,1,1\nlayernorm,1,1\n", "nor times of down_proj"),
        ("per_sequence.csv", "\xff", "per_sequence.csv"),
        (
            "attention.csv",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,0,0,1\n",
            "line 2: it has no chunk",
        ),
        ("attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,1\n", "lacks times"),
        (
            "attention.csv",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,1\n16,0,0,0,1\n16,0,1,16,1\n",
            "chunks after one number",
        ),
        (
            "skew_fit.csv",
            "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha\n0,few,sr>1%,kvB>1k,kp=0,1\n",
            "line 2: n_label is 'few'",
        ),
        ("moe.csv", "tokens,activated_experts,time_us\n2,8,1\n", "moe.csv has no times of one token"),
        ("skew_fit.csv", MANY_BINS, "skew_fit.csv is not a grid: its bins have 3200000 combinations"),
        ("per_sequence.csv", "layer,sequences,time_us\nlm_head,0,1\n", "a table of kernels ends at 0"),
        ("meta.yaml", "model: meta-llama/Llama-3.1-8B\nskew:\n 1:\n  alpha_default: 1e-e\n", "has unusable tables: could not"),
    ],
)
def test_damaged_tables_are_refused_by_file_and_line(folder: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(CostFileError, match=message) as raised:
        import_folder(folder)
    assert raised.value.remedy


def test_folders_without_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostFileError, match=r"no tables of kernels.*LLMServingSim's folders have"):
        import_folder(tmp_path)


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded run is not here: ../shared/traces/gpu")
def test_a_recorded_run_of_vllm_is_met_within_3_per_cent() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/recorded_run.py"), str(RECORDED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["requests"] == 300
    assert result["steps_outside"] == 0
    errors = {name: value for name, value in result.items() if name.endswith("_error")}
    assert len(errors) == 7
    assert all(abs(value) < 0.03 for value in errors.values()), errors
