"""Vidur's tables become cost models: kernels are summed, holes filled by work, and damaged tables refused by file."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from penstock.lab.cost_files import CostFileError
from penstock.lab.cost_model import CostModel
from penstock.lab.kernel_files import Choice
from penstock.lab.kernel_import import import_folder
from penstock.types.plan import StepShape

NUM_LAYERS, HIDDEN_SIZE, MLP_SIZE, VOCAB_SIZE = 32, 64, 128, 1024
KERNELS = ("emb", "input_layernorm", "attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add")
MAX_LEN = 1024
SAVE_US, REDUCE_US = 2.0, 3.0


def kernel_us(tokens: int) -> float:
    return 1 + tokens / 16


def decode_us(num: int, reads: int) -> float:
    return 0.01 * num * (reads + 1)


def chunk_us(tokens: int, before: int) -> float:
    return 0.001 * tokens * (before + tokens / 2)


def write_tables(folder: Path) -> Path:
    folder.mkdir(parents=True)
    names = [f"time_stats.{kernel}.{statistic}" for kernel, statistic in product(KERNELS, ("min", "median"))]
    header = ",".join([*names, "n_embd,n_expanded_embd,vocab_size,use_gated_mlp,num_tokens,num_tensor_parallel_workers"])
    lines = [
        ",".join([*[f"0,{kernel_us(tokens) / gpus / 1e3}"] * len(KERNELS), f"64,128,1024,True,{tokens},{gpus}"])
        for tokens, gpus in product((512, 16, 1), (1, 2))
    ]
    (folder / "mlp.csv").write_text("\n".join([header, *lines]) + "\n")
    header = (
        "time_stats.attn_kv_cache_save.median,time_stats.attn_prefill.median,time_stats.attn_decode.median,"
        "num_tensor_parallel_workers,batch_size,prefill_chunk_size,kv_cache_size,is_prefill"
    )
    lines = []
    for gpus in (1, 2):
        for chunk, before in product((16, 256, 512), (0, 256, 512, 768)):
            if chunk + before <= MAX_LEN:  # as Vidur measures: prompts end at the model's length
                lines.append(f"{SAVE_US / 1e3},{chunk_us(chunk, before) / gpus / 1e3},0.0,{gpus},1,{chunk},{before},True")
        for num, reads in product((1, 8, 64), (0, 255, 1023)):
            if num * reads <= 16384:  # as many as fit in memory
                lines.append(f"{SAVE_US / 1e3},0.0,{decode_us(num, reads) / gpus / 1e3},{gpus},{num},0,{reads},False")
    (folder / "attention.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "a100/meta-llama/Meta-Llama-3-8B")


def layer_us(cost: CostModel, *rows: tuple[int, int], gpus: int = 1, reduce_us: float = 0.0) -> float:
    """Return what a layer's attention takes: the step's time without all else."""
    num_tokens, num_rows = sum(query_len for query_len, _ in rows), len(rows)
    logits_us = kernel_us(num_rows) / gpus * VOCAB_SIZE / (2 * MLP_SIZE)
    once_us = kernel_us(num_tokens) / gpus + reduce_us + logits_us
    step_us = cost.duration_ns(StepShape(rows, num_rows)) / 1e3
    return (step_us - once_us) / NUM_LAYERS - (len(KERNELS) - 1) * kernel_us(num_tokens) / gpus - SAVE_US - 2 * reduce_us


def test_a_step_is_the_sum_of_its_kernels(folder: Path) -> None:
    saved = import_folder(folder)
    assert (saved.model, saved.machine, saved.notes) == ("meta-llama/Meta-Llama-3-8B", {"cpu": "a100"}, {"format": "Vidur"})
    assert layer_us(saved.cost, *[(1, 255)] * 8) == pytest.approx(decode_us(8, 255), abs=0.1)
    assert layer_us(saved.cost, (256, 512)) == pytest.approx(chunk_us(256, 512), abs=0.1)
    both = layer_us(saved.cost, (256, 512), *[(1, 255)] * 8)
    assert both == pytest.approx(chunk_us(256, 512) + decode_us(8, 255), abs=0.1), "a prompt beside decodes costs both"


def test_what_did_not_fit_is_extrapolated_by_its_work(folder: Path) -> None:
    cost = import_folder(folder).cost
    assert layer_us(cost, *[(1, 1023)] * 64) == pytest.approx(decode_us(64, 1023), rel=0.01)
    assert layer_us(cost, (512, 768)) == pytest.approx(chunk_us(512, 768), rel=0.01)


def test_gpus_that_share_layers_add_up_their_results(folder: Path) -> None:
    with pytest.raises(CostFileError, match="how long 2 GPUs take") as raised:
        import_folder(folder, Choice(num_gpus=2))
    assert "all_reduce.csv" in raised.value.remedy
    lines = ["size,time_stats.all_reduce.median,collective,num_workers,devices_per_node"]
    for size, (ms, collective, devices) in product(
        (2 * HIDDEN_SIZE, 2 * HIDDEN_SIZE * 512),
        ((REDUCE_US / 1e3, "all_reduce", 2), (9, "all_reduce", 1), (9, "send_recv", 2)),
    ):
        lines.append(f"{size},{ms},{collective},2,{devices}")
    (folder / "all_reduce.csv").write_text("\n".join(lines) + "\n")
    saved = import_folder(folder, Choice(num_gpus=2))
    assert saved.machine == {"cpu": "a100", "gpus": 2}
    attention = layer_us(saved.cost, *[(1, 255)] * 8, gpus=2, reduce_us=REDUCE_US)
    assert attention == pytest.approx(decode_us(8, 255) / 2, abs=0.1)
    with pytest.raises(CostFileError, match=r"mlp\.csv has no times of 4 GPUs") as raised:
        import_folder(folder, Choice(num_gpus=4))
    assert raised.value.remedy == "Set --gpus, one of: 1, 2."


def test_other_models_need_their_number_of_layers(folder: Path) -> None:
    other = folder.rename(folder.parent / "mine")
    with pytest.raises(CostFileError, match="one layer of meta-llama/mine"):
        import_folder(other)
    assert import_folder(other, Choice(num_layers=4)).machine == {}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(engine="vllm/0.19.0"), "tables of one model and engine"),
        (Choice(hidden_size=64), "are in the tables"),
        (Choice(num_gpus=2, link_bytes_per_s=1e9), "are in the tables"),
    ],
)
def test_options_of_other_formats_are_refused(folder: Path, choice: Choice, message: str) -> None:
    with pytest.raises(CostFileError, match=message):
        import_folder(folder, choice)


@pytest.mark.parametrize(
    ("name", "pattern", "text", "message"),
    [
        ("mlp.csv", "mlp_up_proj", "other", "mlp.csv has no times of mlp_up_proj"),
        ("mlp.csv", ",512,1$", ",many,1", r"mlp.csv, line 2: num_tokens is 'many'"),
        ("mlp.csv", ",128,1024,", ",0,1024,", "mlp.csv has no times of mlp_up_proj"),
        ("attention.csv", ".*False\n", "", "attention.csv lacks times of decodes or of chunks"),
        ("attention.csv", "kv_cache_size", "other", "attention.csv, line 1: there is no column kv_cache_size"),
    ],
)
def test_damaged_tables_are_refused_by_file(folder: Path, name: str, pattern: str, text: str, message: str) -> None:
    path = folder / name
    path.write_text(re.sub(pattern, text, path.read_text(), flags=re.MULTILINE))
    with pytest.raises(CostFileError, match=message) as raised:
        import_folder(folder)
    assert raised.value.remedy
