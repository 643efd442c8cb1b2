"""Adapters in GGUF files: the same factors as PEFT's folder has, whatever llama.cpp's converter does to rows; faults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models import architectures, catalog
from penstock.models.adapter import AdapterFactors, expert_sites
from penstock.models.load import load_adapter, load_model
from penstock.models.weights import LoadedModel
from penstock.types.errors import ModelError
from support.parity.tiny import TinyCase, write_case
from support.parity.tiny_cases import CASES
from support.tiny_adapters import Factors, draw, factors_of_case, factors_of_llama, write_adapter, write_gguf_adapter
from support.tiny_models import TinyLlama, write_gguf, write_hf

TINY = TinyLlama(hidden_size=64, num_layers=1)
Q = "model.layers.0.self_attn.q_proj"
ONE: Factors = {Q: factors_of_llama(TINY)[Q]}


def load(path: Path) -> LoadedModel:
    return load_model(catalog.resolve(str(path), path))


def read(path: Path, model: LoadedModel, *, max_rank: int = 64) -> AdapterFactors:
    program = architectures.describe(model.spec)
    found = load_adapter(path, model.spec, program, tables=model.weights, max_rank=max_rank)
    assert found.fits(program, max_rank)
    return found


def gguf_names(case: TinyCase) -> dict[str, str]:
    """Names of tensors in the converter's tables, by module."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    assert case.gguf is not None
    architecture = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}[case.gguf.architecture]
    names = get_tensor_name_map(architecture, case.config["num_hidden_layers"])
    found = {module: names.get_name(module) for module in factors_of_case(case)}
    return {module: f"{name}.weight" for module, name in found.items() if name is not None}


@pytest.mark.parametrize(
    "name", ["gqa_untied_gguf", "qwen2_gguf_q8_0", "phi3_gguf", "gemma2_gguf", "granite_gguf", "lfm2_gguf"]
)
def test_factors_are_those_of_the_folder_that_was_converted(tmp_path: Path, name: str) -> None:
    """Llama's converter puts rows of q and k into another order; fused matrices stay fused; embeddings are turned."""
    case = CASES[name]
    assert case.gguf is not None
    model, factors = load(write_case(case, tmp_path / "base")), factors_of_case(case)
    config = case.config
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads", 1)}
    path = write_gguf_adapter(
        tmp_path / "adapter.gguf",
        factors,
        gguf_names(case),
        architecture=case.gguf.architecture,
        alpha=6.0,
        heads=num_heads if case.gguf.is_interleaved else None,
        dtype="F32",
    )
    found, wanted = read(path, model), read(write_adapter(tmp_path / "peft", factors, dtype="f32", lora_alpha=6), model)
    assert found.by_weight.keys() == wanted.by_weight.keys()
    for site, halves in wanted.by_weight.items():
        assert all(map(np.array_equal, found.by_weight[site], halves)), site


def test_fused_experts_have_a_gate_and_an_up_projection_each(tmp_path: Path) -> None:
    model = load(write_case(CASES["qwen3_5_moe_fused_gguf"], tmp_path / "base"))
    program, name = architectures.describe(model.spec), "blk.0.ffn_gate_up_exps.weight"
    num, rows, inputs = expert_sites(program)["layers.0.expert_gate"]
    a, b = map(np.stack, zip(*(draw(str(expert), 2 * rows, inputs, 2) for expert in range(num)), strict=True))
    path = write_gguf_adapter(
        tmp_path / "adapter.gguf", {name: (a, b)}, {name: name}, architecture="qwen35moe", alpha=2.0, dtype="F32"
    )
    found = load_adapter(path, model.spec, program, tables=model.weights, max_rank=2, is_merged=True).by_weight
    assert len(found) == 2 * num
    for expert in range(num):
        for part, wanted in (("gate", b[expert, :rows]), ("up", b[expert, rows:])):
            assert np.array_equal(found[f"layers.0.expert_{part}.{expert}"][1], wanted), (part, expert)


def test_a_llama_s_file_fits_a_mistral_and_no_alpha_is_no_scale(tmp_path: Path) -> None:
    """Both are called llama in GGUF files."""
    case = replace(CASES["mistral"], dtype="f32")
    model, factors = load(write_case(case, tmp_path / "base")), factors_of_case(case)
    module = next(module for module in factors if module.endswith("0.self_attn.q_proj"))
    heads = {"q_proj": case.config["num_attention_heads"]}
    path = write_gguf_adapter(
        tmp_path / "a.gguf", {module: factors[module]}, {module: "blk.0.attn_q.weight"}, alpha=0.0, heads=heads, dtype="F32"
    )
    ((_, b),) = read(path, model).by_weight.values()
    assert np.array_equal(b, factors[module][1])


FAULTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "a model": ({"metadata": {"general.type": "model"}}, "not a LoRA adapter"),
    "a control vector": ({"metadata": {"adapter.type": "controlvector"}}, "not a LoRA adapter"),
    "activated": ({"metadata": {"adapter.alora.invocation_tokens": [1]}}, "middle of a prompt"),
    "another architecture": ({"architecture": "qwen2"}, "an adapter of a qwen2, and the model is a llama"),
    "an architecture that is not known": ({"architecture": "mamba"}, "mamba is not supported"),
    "no number": ({"alpha": float("nan")}, "alpha is nan"),
    "an infinite number": (
        {
            "extra": {
                f"blk.0.attn_v.weight.lora_{h}": np.full(s, np.inf, np.float32) for h, s in (("a", (4, 64)), ("b", (32, 4)))
            }
        },
        "attn_v.weight have numbers that are not finite",
    ),
    "a norm": ({"extra": {"blk.0.attn_norm.weight": np.ones(64, np.float32)}}, "attn_norm.weight is a whole tensor"),
    "one half": ({"extra": {"blk.0.attn_k.weight.lora_a": np.ones((4, 64), np.float32)}}, "no blk.0.attn_k.weight.lora_b"),
    "a layer that is not there": (
        {"extra": {f"blk.9.attn_k.weight.lora_{half}": np.ones((4, 4), np.float32) for half in "ab"}},
        r"changes blk.9.attn_k.weight, which the model does not have.* blk.0.attn",
    ),
    "another width": (
        {"extra": {f"blk.0.attn_k.weight.lora_{half}": np.ones((4, 4), np.float32) for half in "ab"}},
        r"are \[4, 4\] and \[4, 4\]; the model's matrix needs \[rank, 64\] and \[32, rank\]",
    ),
    "a vector": (
        {"extra": {f"blk.0.attn_k.weight.lora_{half}": np.ones(64, np.float32) for half in "ab"}},
        r"are \[64\] and \[64\], not \[rank",
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_hf(tmp_path_factory.mktemp("gguf") / "tiny", TINY))


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, tiny: LoadedModel, case: str) -> None:
    settings, words = FAULTS[case]
    path = write_gguf_adapter(tmp_path / "a.gguf", ONE, {Q: "blk.0.attn_q.weight"}, **settings)
    with pytest.raises(ModelError, match=words) as caught:
        read(path, tiny)
    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_files_that_are_damaged_or_too_large_are_refused(tmp_path: Path, tiny: LoadedModel) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", ONE, {Q: "blk.0.attn_q.weight"})
    with pytest.raises(ModelError, match="rank 4, outside of 1 to 3"):
        read(path, tiny, max_rank=3)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelError, match="ends at byte"):
        read(path, tiny)
    os.truncate(path, 1 << 40)  # a hole
    with pytest.raises(ModelError, match="it has 1099511627776 bytes"):
        read(path, tiny)
    path.unlink()
    with pytest.raises(ModelError, match="there is no such file"):
        read(path, tiny)
    os.mkfifo(path)
    with pytest.raises(ModelError, match="it is not a regular file"):
        read(path, tiny)
    with pytest.raises(ModelError, match="not a LoRA adapter"):
        read(write_gguf(tmp_path / "model.gguf", TINY), tiny)
