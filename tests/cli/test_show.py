"""`penstock show`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_gguf, write_hf

Penstock = Callable[..., subprocess.CompletedProcess[str]]


def test_a_model_is_shown_with_its_speed_as_an_upper_bound(penstock_here: Penstock, tiny_model: Path) -> None:
    result = penstock_here("show", tiny_model)
    assert (result.returncode, result.stderr) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["architecture"] == "llama, 2 layers"
    assert rows["context"] == "512 tokens"
    assert rows["refused"] == "nothing"
    assert "upper bounds by the peaks measured just now" in rows["speed"]
    assert rows["Q8_0"].endswith("8.5 bits each")
    assert "longest request 512 tokens" in rows["memory"]


def test_a_program_reads_numbers(penstock_here: Penstock, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bad.gguf", TinyLlama(), extra={"tokenizer.ggml.pre": "klingon", "general.sampling.top_k": 5})
    result = penstock_here("show", path, "--json", "--no-speed")
    assert (result.returncode, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    assert [one["check"] for one in shown["refused"]] == ["tokenizer"]
    assert "klingon" in shown["refused"][0]["cause"]
    assert shown["upper_bounds"] is None
    assert shown["sampling"] == {"top_k": 5}
    assert shown["num_parameters"] == sum(values.size for values in TinyLlama().weights().values())
    assert shown["memory"]["longest_request_tokens"] == 256


def test_a_file_writes_nothing_but_words_on_the_terminal(penstock: Penstock, tmp_path: Path) -> None:
    """Neither escape sequences, nor lines of its own, such as one that says that nothing is refused."""
    extra = {"tokenizer.chat_template.red\x1b[31m": "{{ messages }}", "general.name": "t\x1b[2J"}
    result = penstock("show", write_gguf(tmp_path / "one.gguf", TinyLlama(), extra=extra), "--no-speed")
    assert "default, red [31m\n" in result.stdout
    names = {"architectures": ["Mamba\x1b[31m\nrefused  nothing"]}
    directory = write_hf(tmp_path / "two", TinyLlama(), extra=names)
    shown, served = penstock("show", directory, "--no-speed"), penstock("serve", directory, "--port", 0)
    assert not any("\x1b" in text for text in (result.stdout, shown.stdout, served.stderr))
    assert "Mamba [31m refused  nothing is not supported" in shown.stdout
    assert "\nrefused  nothing" not in shown.stdout


def test_experts_on_disk_are_told_with_what_a_token_reads(penstock_here: Penstock, tmp_path: Path) -> None:
    path = write_case(CASES["mixtral_gguf"], tmp_path)
    result = penstock_here("show", path, "--no-speed", "--experts-on-disk", "--cache", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(
        r"memory +weights .*; experts of 242 KiB on disk, of which a token reads 103\.\d+ KiB; memory has room for all",
        result.stdout,
    )
    shown = json.loads(penstock_here("show", path, "--no-speed", "--json", "--experts-on-disk", "--cache", tmp_path).stdout)
    assert 0 < shown["memory"]["disk_bytes"] < shown["memory"]["weight_bytes"]
    assert json.loads(penstock_here("show", path, "--no-speed", "--json").stdout)["memory"]["disk_bytes"] == 0


def test_a_model_that_drafts_is_part_of_the_memory(penstock_here: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    draft = ("--speculation-model", tiny_model, "--no-speed")
    result = penstock_here("show", tiny_model, *draft)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"memory .*; \d\S* \wiB more for the model that drafts", result.stdout)
    alone, beside = (
        json.loads(penstock_here("show", tiny_model, *options, "--json").stdout)["memory"]
        for options in (["--no-speed"], draft)
    )
    assert alone["draft_bytes"] == 0
    assert beside["draft_bytes"] > beside["weight_bytes"]
    absent = json.loads(
        penstock_here("show", tiny_model, "--speculation-model", tmp_path / "none.gguf", "--json", "--no-speed").stdout
    )
    assert [one["check"] for one in absent["refused"]] == ["draft model"]


def test_an_adapter_is_shown_with_its_rank_its_model_and_what_would_be_refused(penstock_here: Penstock, tmp_path: Path) -> None:
    factors = factors_of_llama(TinyLlama(), rank=4, ends=("q_proj",))
    good = write_adapter(tmp_path / "good", factors, target_modules=["q_proj"], base_model_name_or_path="org/base")
    result = penstock_here("show", good)
    assert (result.returncode, result.stderr) == (0, "")
    for row in (r"base model +org/base", r"rank +4, lora_alpha 8", r"targets +q_proj", r"refused +nothing in its settings"):
        assert re.search(row, result.stdout), (row, result.stdout)
    dora = json.loads(penstock_here("show", write_adapter(tmp_path / "dora", factors, use_dora=True), "--json").stdout)
    assert "DoRA" in dora["refused"][0]["cause"]
    norm = {"base_model.model.model.norm.weight": np.ones(64, np.float32)}
    whole = penstock_here("show", write_adapter(tmp_path / "whole", factors, extra=norm, modules_to_save=["norm"]))
    assert re.search(r"refused .*model.norm.weight is a whole tensor", whole.stdout)
    copy = {"base_model.model.model.embed_tokens.base_layer.weight": np.ones((264, 64), np.float32)}
    embedding = penstock_here("show", write_adapter(tmp_path / "embedding", factors, extra=copy))
    assert re.search("refused +nothing in its settings and names", embedding.stdout)
    wide = penstock_here("show", write_adapter(tmp_path / "wide", factors_of_llama(TinyLlama(), rank=65, ends=("q_proj",))))
    assert "rank 65, outside of 1 to 64. Raise --max-lora-rank" in wide.stdout


def test_one_that_is_not_here_is_told_with_its_size(penstock_here: Penstock) -> None:
    result = penstock_here("show", "qwen2.5-coder")
    assert result.returncode == 1
    assert "It takes 1.04 GiB. Fetch it with `penstock pull qwen2.5-coder`." in result.stderr


def test_recurrent_state_is_part_of_the_memory(penstock_here: Penstock, tmp_path: Path) -> None:
    """Three convolutions of 72 columns with a kernel of 3: 2 x 3 x 72 numbers of 16 bits, in whole cache lines."""
    path = write_case(CASES["lfm2"], tmp_path / "lfm2")
    memory = json.loads(penstock_here("show", path, "--json", "--no-speed").stdout)["memory"]
    assert memory["state_bytes_per_block"] == 896
    assert memory["kv_bytes_per_token"] == 32 * 2 + 4
    assert memory["kv_cache_bytes"] % (16 * memory["kv_bytes_per_token"] + 896) == 0
    result = penstock_here("show", path, "--no-speed")
    assert "a token, recurrent state 896 B a block of tokens; a server takes" in result.stdout


def test_it_says_for_which_texts_rotary_factors_are(penstock_here: Penstock, tmp_path: Path) -> None:
    """longrope has two sets: transformers chooses for each text, a server once."""
    case = CASES["phi3_short_factors"]
    path = write_case(replace(case, config={**case.config, "original_max_position_embeddings": 64}), tmp_path / "phi3")
    long = penstock_here("show", path, "--no-speed").stdout
    assert "positions     LongRoPE's long factors are used for all texts" in long
    short = penstock_here("show", path, "--no-speed", "--max-model-len", 64).stdout
    assert "positions     LongRoPE's short factors are used" in short


def test_dynamic_scaling_makes_a_longer_request_possible(penstock_here: Penstock, tmp_path: Path) -> None:
    case = CASES["mha_tied_f32"]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    path = write_case(replace(case, config={**case.config, "rope_parameters": rope}), tmp_path / "llama")
    trained_len = case.config["max_position_embeddings"]
    assert (
        f"up to {trained_len} tokens; --max-model-len up to {2 * trained_len} stretches"
        in penstock_here("show", path, "--no-speed").stdout
    )
    longer = penstock_here("show", path, "--no-speed", "--max-model-len", 2 * trained_len).stdout
    assert f"all texts use the frequencies for {2 * trained_len} tokens" in longer
    assert f"longest request {2 * trained_len} tokens" in longer
    beyond = penstock_here("show", path, "--no-speed", "--max-model-len", 2 * trained_len + 1).stdout
    assert f"Set --max-model-len to {2 * trained_len} or less." in beyond
