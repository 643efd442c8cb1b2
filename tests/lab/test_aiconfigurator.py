"""Tables by operation become cost models of any dense model; what they lack is refused by file, line and remedy."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.profile import profile
from penstock.lab import aiconfigurator
from penstock.lab.cost_files import CostFileError, load_cost, save_cost
from penstock.lab.cost_model import CostModel
from penstock.lab.kernel_files import Choice, filled
from penstock.lab.kernel_import import import_folder
from penstock.lab.kernel_tables import Grid
from penstock.lab.step_counts import counts_of
from penstock.types.plan import StepShape
from support.lab.kernels import write_tables
from support.lab.operations import CONFIG, ENGINE, decode_us, product_us, prompt_us, write_config, write_csv, write_system

GEMM = f"gemm/{ENGINE}/gemm_perf.txt"
DECODES = f"attention/{ENGINE}/generation_attention_perf.txt"
PROMPTS = f"attention/{ENGINE}/context_attention_perf.txt"
ATTENTION = "batch_size,isl,num_heads,num_key_value_heads,head_dim,kv_cache_dtype,step,latency"
REDUCE = f"comm/{ENGINE}/custom_allreduce_perf.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_system(tmp_path / "systems")


@pytest.fixture
def choice(tmp_path: Path) -> Choice:
    return Choice(model_config=write_config(tmp_path / "tiny" / "config.json"), engine=ENGINE)


def step_us(cost: CostModel, *rows: tuple[int, int]) -> float:
    return cost.duration_ns(StepShape(rows, len(rows))) / 1e3


def layers_us(tokens: int) -> float:
    """Return the time of 3 layers without attention: 4 products, then 2 norms and an activation at 2 bytes per ns and 1 us."""
    products = 4 * 2 + tokens * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) / 4096
    copies = 3 * 1 + tokens * (2 * 8 * 64 + 3 * 2 * 128) / 2000
    return 3 * (products + copies)


def once_us(tokens: int, rows: int) -> float:
    """Return the time of embeddings and the last norm, and of logits."""
    return 2 + tokens * (2 * 64 + 8 * 64) / 2000 + 2 + rows * 256 * 64 / 4096


def test_a_step_is_the_sum_of_what_the_model_needs(folder: Path, choice: Choice) -> None:
    cost = import_folder(folder, choice).cost
    decodes = step_us(cost, *[(1, 127)] * 8)
    assert decodes == pytest.approx(layers_us(8) + once_us(8, 8) + 3 * decode_us(8, 128), abs=0.01)
    prompt = step_us(cost, (64, 0))
    assert prompt == pytest.approx(layers_us(64) + once_us(64, 1) + 3 * prompt_us(64), abs=0.01)
    chunk = step_us(cost, (16, 48))
    assert chunk == pytest.approx(layers_us(16) + once_us(16, 1) + 3 * prompt_us(64) * (1 - (48 / 64) ** 2), abs=0.5)
    both = step_us(cost, (16, 0), *[(1, 15)] * 8)
    assert both == pytest.approx(layers_us(24) + once_us(24, 9) + 3 * (prompt_us(16) + decode_us(8, 16)), abs=0.01)


def test_tables_in_the_current_folder_have_its_name(folder: Path, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert import_folder(Path(), choice).machine == {"cpu": folder.name}


def test_beyond_the_tables_times_grow_with_the_work_and_are_reported(folder: Path, choice: Choice) -> None:
    cost = import_folder(folder, choice).cost
    longest = step_us(cost, *[(1, 1023)] * 8) - layers_us(8) - once_us(8, 8)
    assert longest == pytest.approx(3 * 8 * decode_us(8, 128), abs=0.01), "where the stairs end"
    counts = counts_of(StepShape(((128, 0), *[(1, 2047)] * 9), 10))
    assert cost.outside(counts) == ("9 decodes > 8", "128 prefill tokens > 64", "2048 tokens of context > 1024")
    assert step_us(cost, (128, 0)) > 1.9 * step_us(cost, (64, 0))


def test_gpus_share_heads_and_products_and_add_up(folder: Path, choice: Choice) -> None:
    cost = import_folder(folder, replace(choice, num_gpus=2)).cost
    products = 4 * 2 + 8 * (64 * 64 + 64 * 32 + 128 * 64 + 64 * 64) / 4096
    copies = 3 * 1 + 8 * (2 * 8 * 64 + 3 * 2 * 64) / 2000
    layer = products + copies + 2 * (1 + 8) + decode_us(8, 128)
    once = once_us(8, 8) + (1 + 8) - 8 * 128 * 64 / 4096
    assert step_us(cost, *[(1, 127)] * 8) == pytest.approx(3 * layer + once, abs=0.01)
    with pytest.raises(CostFileError, match="3 GPUs can't share the 4 heads and 2 KV heads of tiny"):
        import_folder(folder, replace(choice, num_gpus=3))
    assert choice.model_config is not None
    choice.model_config.write_text(json.dumps(CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 3}))
    with pytest.raises(CostFileError, match="2 GPUs can't share the 8 heads and 3 KV heads of tiny"):
        import_folder(folder, replace(choice, num_gpus=2))
    choice.model_config.write_text(json.dumps(CONFIG))
    with pytest.raises(CostFileError, match=r"no times of 4 GPUs.*--gpus, one of: 2"):
        import_folder(folder, replace(choice, num_gpus=4))


def test_weights_of_another_type_keep_their_logits(folder: Path, choice: Choice) -> None:
    cost, quantised = (import_folder(folder, replace(choice, weights=kind)).cost for kind in ("bfloat16", "fp8"))
    products = 4 * 2 + (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) / 4096
    assert step_us(cost, (1, 15)) - step_us(quantised, (1, 15)) == pytest.approx(3 * products / 2, abs=0.01)
    with pytest.raises(CostFileError, match=r"no rows of int8.*--weights, one of: bfloat16, fp8"):
        import_folder(folder, replace(choice, weights="int8"))
    with pytest.raises(CostFileError, match=r"no rows of fp8.*--kv, one of: bfloat16"):
        import_folder(folder, replace(choice, kv="fp8"))


def test_known_scales_save_passes_over_the_input_but_never_the_reading_of_weights(folder: Path, choice: Choice) -> None:
    found, known = (import_folder(folder, replace(choice, weights=kind)).cost for kind in ("fp8", "fp8_static"))
    saved = sum(saved_us(8, *one) for one in ((128, 64, 1), (64, 64, 2), (256, 64, 1), (64, 128, 2)))
    assert step_us(found, *[(1, 15)] * 8) - step_us(known, *[(1, 15)] * 8) == pytest.approx(3 * saved, abs=0.05)
    assert saved > 0


def test_passes_that_were_measured_are_subtracted(folder: Path, choice: Choice) -> None:
    found = import_folder(folder, replace(choice, weights="fp8")).cost
    for name, us in (("computescale", 0.25), ("scale_matrix", 0.125)):
        rows = [("fp8", tokens, width, us * width / 64e3) for tokens in (1, 64) for width in (64, 128)]
        write_csv(folder / "quantize" / ENGINE / f"{name}_perf.txt", "quant_dtype,m,k,latency", rows)
    imported = import_folder(folder, replace(choice, weights="fp8_static"))
    assert not [name for name in imported.notes if "perf" in name]
    known = imported.cost
    saved = 0.25 + (0.25 + 0.125) + 0.25 + 2 * (0.25 + 0.125)
    prompt = (64, 0)  # a step of few tokens is bound by reading weights
    assert step_us(found, prompt) - step_us(known, prompt) == pytest.approx(3 * saved, abs=0.01)
    write_csv(folder / "quantize" / ENGINE / "computescale_perf.txt", "quant_dtype,m,k,latency", [("fp8", 1, 64, 1e-4)])
    notes = import_folder(folder, replace(choice, weights="fp8_static")).notes
    assert notes["computescale_perf of 128"] == "128, from 64"


def saved_us(tokens: int, outputs: int, inputs: int, passes: int) -> float:
    """Return what a product saves, between the table's entries of 1 and 64 tokens."""

    def at(number: int) -> float:
        us = product_us(number, outputs, inputs) / 2
        least = min(us, outputs * inputs / 4000)
        return us - max(least, us - passes * (1 + 2 * inputs * number / 2000))

    return at(1) + (at(64) - at(1)) * (tokens - 1) / 63


def test_a_shape_that_is_not_in_the_table_is_the_nearest_in_proportion_and_said(folder: Path, choice: Choice) -> None:
    path = folder / GEMM
    kept = [line for line in path.read_text().splitlines() if ",64,128," not in line]
    whole = import_folder(folder, choice)
    path.write_text("\n".join(kept) + "\n")
    near = import_folder(folder, choice)
    assert not [note for note in whole.notes if note.startswith("the product")]
    assert near.notes["the product down"] == "64x128, from 64x64"
    assert step_us(near.cost, (1, 15)) - step_us(whole.cost, (1, 15)) == pytest.approx(3 * 2, abs=0.01), "the fixed 2 us twice"


def test_a_file_is_what_was_imported(folder: Path, choice: Choice, tmp_path: Path) -> None:
    saved, path = import_folder(folder, choice), tmp_path / "cost.json"
    save_cost(path, saved)
    assert load_cost(path) == saved
    assert saved.words == "tiny, g999_sxm, from published times of kernels"


def test_folders_of_older_releases_have_the_engine_on_top(folder: Path, choice: Choice) -> None:
    cost = import_folder(folder, choice).cost
    (folder / "vllm").mkdir()
    old = folder / ENGINE
    (folder / "gemm" / ENGINE).rename(old)
    for path in (folder / "attention" / ENGINE).iterdir():
        path.rename(old / path.name)
    assert import_folder(folder, choice).cost == cost


def test_parquet_is_read_as_csv(folder: Path, choice: Choice) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    cost = import_folder(folder, choice).cost
    for path in list(folder.rglob("*.txt")):
        rows = list(csv.DictReader(path.read_text().splitlines()))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        typed = {
            name: values if name.endswith("type") or name in ("framework", "kernel_source") else [*map(float, values)]
            for name, values in columns.items()
        }
        for name in ("window_size", "batch_size"):
            if name in typed:
                typed[name] = [*map(int, columns[name])]
        parquet.write_table(pyarrow.table(typed), path.with_suffix(".parquet"))
        path.unlink()
    assert import_folder(folder, choice).cost == cost
    table = (folder / GEMM).with_suffix(".parquet")
    parquet.write_table(pyarrow.table({"m": [1], "gemm_dtype": ["fp8"]}), table)
    with pytest.raises(CostFileError, match=r"gemm_perf.parquet, line 1: there is no column n, k, latency"):
        import_folder(folder, choice)
    table.write_bytes(b"PAR1")
    with pytest.raises(CostFileError, match=r"gemm_perf.parquet can't be read as a table"):
        import_folder(folder, choice)


def test_only_the_attention_that_is_taken_is_made_a_grid(folder: Path, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table may have thousands of sizes, whose grids have up to a million points each."""
    made: list[Grid] = []
    monkeypatch.setattr(aiconfigurator, "filled", lambda *args, **options: made.append(filled(*args, **options)) or made[-1])
    cost = import_folder(folder, choice).cost
    assert cost.kernels is not None
    assert made == [cost.kernels.decodes]


def test_parquet_without_pyarrow_names_the_remedy(folder: Path, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / GEMM
    path.rename(path.with_suffix(".parquet"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CostFileError, match=r"gemm_perf.parquet needs pyarrow.*pip install pyarrow"):
        import_folder(folder, choice)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (GEMM, "gemm_dtype,m,n\n", "gemm_perf.txt, line 1: there is no column k, latency"),
        (GEMM, "gemm_dtype,m,n,k,latency\nfp8,1,64\n", "gemm_perf.txt, line 2: 3 values for 5 columns"),
        (GEMM, "gemm_dtype,m,n,k,latency\nbfloat16,1,64,64,fast\n", "gemm_perf.txt, line 2: latency is 'fast'"),
        (GEMM, "gemm_dtype,m,n,k,latency\n", "gemm_perf.txt has no rows"),
        (DECODES, "batch_size,isl\n1,1\n", "generation_attention_perf.txt, line 1: there is no column kv_cache_dtype"),
        (
            REDUCE,
            "num_gpus,latency\n1,1\n",
            "custom_allreduce_perf.txt, line 1: there is no column kernel_source, message_size",
        ),
        ("../../g999_sxm.yaml", "gpu:\n", "g999_sxm.yaml has no mem_bw"),
        ("../../g999_sxm.yaml", "gpu:\n  mem_bw: 0\n", "g999_sxm.yaml has no mem_bw above 0"),
        ("../../g999_sxm.yaml", "gpu:\n  mem_bw: 1e9.9\n", "g999_sxm.yaml has no mem_bw above 0"),
        (GEMM, "gemm_dtype,m,n,k,latency\nbfloat16,1,0,64,1\n", "gemm_perf.txt, line 2: n is below 1"),
        (GEMM, "gemm_dtype,m,n,k,latency\n" + "x" * 200_000, "gemm_perf.txt, line 2: field larger than"),
        (GEMM, "gemm_dtype,m,n,k,latency\nbfloat16,1,64,64,1e305\n", "times or sizes that are too large"),
        (DECODES, f"{ATTENTION}\n0,1,2,1,16,bfloat16,1,1\n", "generation_attention_perf.txt, line 2: batch_size is below 1"),
        (PROMPTS, f"{ATTENTION}\n8,16,2,1,16,bfloat16,0,1\n", "context_attention_perf.txt has no times of one prompt alone"),
    ],
)
def test_damaged_tables_are_refused_by_file_and_line(folder: Path, choice: Choice, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(CostFileError, match=message) as raised:
        import_folder(folder, replace(choice, num_gpus=2))
    assert raised.value.remedy


def test_engines_without_tables_are_refused_with_those_that_have(folder: Path, choice: Choice) -> None:
    for engine in ("", "vllm/2.0"):
        with pytest.raises(CostFileError, match=rf"no gemm_perf.*--engine, one of: {ENGINE}"):
            import_folder(folder, replace(choice, engine=engine))


def test_options_for_tables_of_another_format_are_refused(folder: Path, choice: Choice, tmp_path: Path) -> None:
    with pytest.raises(CostFileError, match="Leave out --layers"):
        import_folder(folder, replace(choice, num_layers=2))
    with pytest.raises(CostFileError, match=r"Leave out .* --link-latency-us"):
        import_folder(folder, replace(choice, num_gpus=2, link_latency_ns=1.0))
    for other in (choice, Choice(weights="fp8"), Choice(kv="fp8")):
        with pytest.raises(CostFileError, match="Leave out --model-config, --engine, --weights and --kv"):
            import_folder(write_tables(tmp_path / "tables"), other)


def test_configurations_without_a_dense_model_are_refused(folder: Path, choice: Choice) -> None:
    with pytest.raises(CostFileError, match="--model-config"):
        import_folder(folder, replace(choice, model_config=None))
    assert choice.model_config is not None
    for change, message in (
        ({"num_experts": 8}, "describes a mixture of experts"),
        ({"vocab_size": None}, "is not a model's configuration"),
        ({"num_hidden_layers": 0}, "its sizes are not all from 1 to"),
        ({"num_hidden_layers": 1 << 40}, "its sizes are not all from 1 to"),
        ({"num_hidden_layers": float("inf")}, "is not a model's configuration"),
        ({"num_attention_heads": 0}, "is not a model's configuration"),
        ({"kv_lora_rank": 512}, "describes attention over latents"),
    ):
        choice.model_config.write_text(json.dumps(CONFIG | change))
        with pytest.raises(CostFileError, match=message):
            import_folder(folder, choice)
    choice.model_config.write_text(json.dumps({name: size for name, size in CONFIG.items() if name != "hidden_size"}))
    with pytest.raises(CostFileError, match="has no hidden_size"):
        import_folder(folder, choice)


def test_the_command_writes_a_cost_model_and_says_what_it_took(folder: Path, choice: Choice, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    options = ["--model-config", str(choice.model_config), "--engine", ENGINE, "--weights", "fp8", "--fit", str(path)]
    result = CliRunner().invoke(profile, ["--import", str(folder), *options])
    assert result.exit_code == 0, result.output
    assert "weights: fp8" in result.output
    assert load_cost(path) == replace(import_folder(folder, replace(choice, weights="fp8")), penstock=load_cost(path).penstock)
    result = CliRunner().invoke(profile, ["--engine", ENGINE])
    assert "name them with --import" in result.output
