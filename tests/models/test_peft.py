"""Adapters as PEFT saves them: the same change as merging them into the file's own weights; every fault refused by name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models import architectures, catalog
from penstock.models.adapter import AdapterFactors, sites
from penstock.models.load import load_adapter, load_model
from penstock.models.weights import LoadedModel
from penstock.types.errors import ModelError
from support.parity.tiny import FloatArray, write_case
from support.parity.tiny_cases import CASES
from support.tiny_adapters import (
    EACH_ARCHITECTURE,
    Factors,
    case_with,
    config_of,
    factors_of_case,
    factors_of_llama,
    in_float32,
    merged,
    tensors_of,
    write_adapter,
    write_gguf_adapter,
)
from support.tiny_models import TinyLlama, write_gguf, write_hf, write_safetensors

TINY = TinyLlama()
FACTORS = factors_of_llama(TINY)
Q = "model.layers.0.self_attn.q_proj"
ONE: Factors = {Q: FACTORS[Q]}


def load(path: Path) -> LoadedModel:
    return load_model(catalog.resolve(str(path), path))


def read(folder: Path, model: LoadedModel, *, max_rank: int = 64) -> AdapterFactors:
    found = load_adapter(folder, model.spec, architectures.describe(model.spec), tables=model.weights, max_rank=max_rank)
    assert found.fits(architectures.describe(model.spec), max_rank)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_hf(tmp_path_factory.mktemp("peft") / "tiny", TINY))


def changes(factors: AdapterFactors) -> dict[str, FloatArray]:
    """The change of each matrix, as the weight lies: that of `embed` has a row for each token."""
    products = {site: b @ a for site, (a, b) in factors.by_weight.items()}
    return {site: product.T if site in ("embed", "layer_embed") else product for site, product in products.items()}


def test_factors_that_the_converter_multiplied_into_the_matrices_part_adapters_of_files_and_directories(tmp_path: Path) -> None:
    folder, gguf = (
        load(write_case(CASES["falcon_h1"], tmp_path / "a")),
        load(write_case(CASES["falcon_h1_gguf"], tmp_path / "b")),
    )
    module = "model.layers.0.self_attn.q_proj"
    pair = factors_of_case(CASES["falcon_h1"])[module]
    adapter = write_adapter(tmp_path / "adapter", {module: pair})
    with pytest.raises(ModelError, match="multiplied by factors that the adapter's lack"):
        read(adapter, gguf)
    read(adapter, folder)
    file = write_gguf_adapter(
        tmp_path / "adapter.gguf", {module: pair}, {module: "blk.0.attn_q.weight"}, architecture="falcon-h1", dtype="F32"
    )
    load_adapter(file, gguf.spec, architectures.describe(gguf.spec), tables=gguf.weights, max_rank=64)
    with pytest.raises(ModelError, match="the model's directory has these apart"):
        load_adapter(file, folder.spec, architectures.describe(folder.spec), tables=folder.weights, max_rank=64)


def test_factors_of_tensors_that_make_one_matrix_together_are_refused(tmp_path: Path) -> None:
    """A delta net of Olmo Hybrid has its queries, keys and values in one matrix, and the file has three."""
    model = load(write_case(CASES["olmo_hybrid"], tmp_path / "model"))
    factors = factors_of_case(CASES["olmo_hybrid"])
    for name in ("1.self_attn.q_proj", "0.linear_attn.g_proj"):
        read(write_adapter(tmp_path / name, {f"model.layers.{name}": factors[f"model.layers.{name}"]}), model)
    for part in "qkv":
        name = f"model.layers.0.linear_attn.{part}_proj"
        with pytest.raises(ModelError, match=f"{name}.weight, which is only a part of a matrix here"):
            read(write_adapter(tmp_path / part, {name: factors[name]}), model)


@pytest.mark.parametrize("name", EACH_ARCHITECTURE)
def test_an_adapter_changes_what_merging_it_into_the_file_changes(tmp_path: Path, name: str) -> None:
    """Files have fused or transposed matrices, rows in another order, or other names, and may be GGUF.

    Names of modules are transformers' in any case. The model's loader says what the change of a weight is.
    """
    case = in_float32(CASES[name])
    factors = factors_of_case(case)
    base = load(write_case(case, tmp_path / "base"))
    after = load(write_case(case_with(case, merged(case, factors, 2.0)), tmp_path / "merged"))
    prefix = "language_model." if case.wrapper is not None else ""
    found = read(write_adapter(tmp_path / "adapter", {f"{prefix}{module}": pair for module, pair in factors.items()}), base)
    wanted = {weight: after.weights[weight].dequantize() - base.weights[weight].dequantize() for weight in base.weights}
    ours = changes(found)
    tied = {"output"} - base.weights.keys()
    assert ours.keys() - tied == sites(architectures.describe(base.spec)).keys() - tied
    for weight, change in wanted.items():
        if change.any() or weight in ours:
            assert np.allclose(ours[weight], change, rtol=0, atol=1e-5), weight


def test_the_number_of_a_module_follows_its_patterns(tmp_path: Path, tiny: LoadedModel) -> None:
    rng = np.random.default_rng(0)
    ranks = {Q: 8, "model.layers.1.self_attn.v_proj": 2, "model.layers.1.mlp.up_proj": 4}
    shapes = TINY.shapes()
    factors = {
        name: (
            rng.standard_normal((rank, shapes[f"{name}.weight"][1])).astype(np.float32),
            rng.standard_normal((shapes[f"{name}.weight"][0], rank)).astype(np.float32),
        )
        for name, rank in ranks.items()
    }
    patterns = {
        "rank_pattern": {"q_proj": 8, r"^model.layers\.[0-9]+.mlp.up_proj": 4},
        "alpha_pattern": {".*1.self_attn.v_proj": 6},
    }
    for has_root in (False, True):
        folder = write_adapter(tmp_path, factors, dtype="f32", r=2, lora_alpha=10, use_rslora=has_root, **patterns)
        found = read(folder, tiny).by_weight
        for site, name, alpha in (
            ("layers.0.q", Q, 10),
            ("layers.1.v", list(ranks)[1], 6),
            ("layers.1.up", list(ranks)[2], 10),
        ):
            scale = alpha / (math.sqrt(ranks[name]) if has_root else ranks[name])
            assert np.array_equal(found[site][0], factors[name][0])
            assert found[site][1] == pytest.approx(factors[name][1] * scale, rel=1e-6)


@pytest.mark.parametrize(("dtype", "prefix", "middle"), [("f32", "base_model.model.", ""), ("f16", "", ".default")])
def test_types_and_names_of_older_releases(tmp_path: Path, tiny: LoadedModel, dtype: str, prefix: str, middle: str) -> None:
    folder = write_adapter(tmp_path, FACTORS)
    write_safetensors(folder / "adapter_model.safetensors", tensors_of(FACTORS, prefix=prefix, middle=middle), dtype)
    found, wanted = read(folder, tiny), read(write_adapter(tmp_path / "usual", FACTORS), tiny)
    for site, pair in wanted.by_weight.items():
        assert np.allclose(found.by_weight[site][1], pair[1], rtol=1e-3)


COPY = "base_model.model.model.embed_tokens.base_layer.weight"
OF_EMBEDDING: Factors = {"model.embed_tokens": (np.ones((2, 264), np.float32), np.ones((64, 2), np.float32))}


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("matrix_type", ["F32", "Q8_0", "Q4_0"])
def test_the_copy_of_an_embedding_that_is_changed_is_left_out(tmp_path: Path, matrix_type: str, dtype: str) -> None:
    """Rounded to another format, too, where the rows of unused tokens may become 0."""

    class WithUnusedToken(TinyLlama):
        def weights(self) -> dict[str, FloatArray]:
            found = super().weights()
            found["model.embed_tokens.weight"][7] *= 1e-9
            return found

    tiny = WithUnusedToken()
    model = load(write_gguf(tmp_path / "tiny.gguf", tiny, matrix_type=matrix_type))
    extra = {COPY: tiny.weights()["model.embed_tokens.weight"]}
    folder = write_adapter(tmp_path / "adapter", OF_EMBEDDING, dtype=dtype, extra=extra)
    assert read(folder, model).by_weight.keys() == {"embed"}
    found = load_adapter(
        folder, model.spec, architectures.describe(model.spec), max_rank=64, tables=model.weights, is_merged=True
    )
    assert not found.whole


@pytest.mark.parametrize("matrix_type", ["F32", "Q4_0"])
def test_an_embedding_that_was_changed_before_the_training_is_not_the_model_s(tmp_path: Path, matrix_type: str) -> None:
    """Such as that of new tokens whose rows were set to others' mean."""
    model = load(write_gguf(tmp_path / "tiny.gguf", TINY, matrix_type=matrix_type))
    rows = model.weights["embed"].dequantize()
    rows[[3, 260]] = rows[:100].mean(axis=0)
    folder = write_adapter(tmp_path / "adapter", OF_EMBEDDING, extra={COPY: rows})
    with pytest.raises(ModelError, match=r"base_layer.weight differs from the model's matrix in 2 rows.*--merge-lora"):
        read(folder, model)
    write_adapter(folder, OF_EMBEDDING, extra={COPY: np.zeros((266, 64), np.float32)})
    with pytest.raises(ModelError, match=r"base_layer.weight is \[266, 64\] of BF16, and the model has \[264, 64\].*added"):
        read(folder, model)


def test_an_output_that_is_tied_is_changed_by_itself(tmp_path: Path, tiny: LoadedModel) -> None:
    factors = {"lm_head": (np.ones((2, 64), np.float32), np.ones((264, 2), np.float32))}
    assert read(write_adapter(tmp_path, factors), tiny).by_weight.keys() == {"output"}


def test_an_output_that_follows_the_embedding_s_adapter_is_refused(tmp_path: Path, tiny: LoadedModel) -> None:
    """PEFT gives it the same factors, and saves them once."""
    factors = {"model.embed_tokens": (np.ones((2, 264), np.float32), np.ones((64, 2), np.float32))}
    with pytest.raises(ModelError, match="ensure_weight_tying"):
        read(write_adapter(tmp_path, factors, ensure_weight_tying=True), tiny)
    assert read(write_adapter(tmp_path / "other", ONE, ensure_weight_tying=True), tiny).by_weight.keys() == {"layers.0.q"}


CONFIGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora: DoRA"),
    "another type": ({"peft_type": "IA3"}, "'IA3', and only LORA"),
    "no type": ({"peft_type": None}, "peft_type is missing"),
    "no rank": ({"r": None}, "r is missing"),
    "biases": ({"lora_bias": True}, "lora_bias"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts are not computed beside"),
    "activated": ({"alora_invocation_tokens": [1, 2]}, "middle of a prompt"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, "layers twice"),
    "single rows": ({"trainable_token_indices": [3]}, "rows of the embedding"),
    "another base": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', so it was trained on matrices.*conversion"),
    "alpha is no number": ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    "alpha is infinite": ({"lora_alpha": float("inf")}, "lora_alpha of .* is inf"),
    "alpha is huge": ({"lora_alpha": 1e300}, "not finite"),
    "another rank": ({"r": 5}, f"{Q} have rank 4, and the settings say 5"),
    "another rank by a pattern": ({"rank_pattern": {"q_proj": 3}}, "have rank 4, and the settings say 3"),
    "a pattern that may take for ever": ({"alpha_pattern": {"(a|a)*b": 3}}, r"the pattern '\(a\|a\)\*b'.*not supported"),
    "a pattern that repeats": ({"alpha_pattern": {".*.*.*q_proj": 3}}, "pattern.*not supported"),
    "a pattern that is none": ({"alpha_pattern": {"[z-a]": 3}}, "has the pattern"),
    "a value that is none": ({"alpha_pattern": {"q_proj": [1]}}, r"q_proj is \[1\]"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_are_not_computed_are_refused_by_name(tmp_path: Path, tiny: LoadedModel, case: str) -> None:
    settings, words = CONFIGS[case]
    with pytest.raises(ModelError, match=words) as caught:
        read(write_adapter(tmp_path, ONE, **settings), tiny)
    assert str(tmp_path) in caught.value.message
    assert caught.value.remedy


def values(*shape: int, fill: float = 0.5) -> FloatArray:
    return np.full(shape, fill, np.float32)


AT = f"base_model.model.{Q}"
TENSORS: Mapping[str, tuple[dict[str, FloatArray], str]] = {
    "another width": (
        {f"{AT}.lora_A.weight": values(4, 48)},
        r"\[4, 48\] and \[64, 4\]; the model's matrix needs \[rank, 64\]",
    ),
    "another rank": ({f"{AT}.lora_A.weight": values(3, 64)}, r"are \[3, 64\] and \[64, 4\], not \[rank"),
    "a vector": ({f"{AT}.lora_A.weight": values(256)}, r"are \[256\] and \[64, 4\], not \[rank.*gather"),
    "no rank": ({f"{AT}.lora_A.weight": values(0, 64), f"{AT}.lora_B.weight": values(64, 0)}, "rank 0, outside of 1 to 64"),
    "too large a rank": (
        {f"{AT}.lora_A.weight": values(65, 64), f"{AT}.lora_B.weight": values(64, 65)},
        "rank 65, outside of 1 to 64.*--max-lora-rank",
    ),
    "one half": ({"base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight": values(32, 4)}, "k_proj has no lora_A"),
    "a module of another model": (
        {f"base_model.model.transformer.h.0.attn.c_attn.lora_{half}.weight": values(4, 4) for half in "AB"},
        r"changes transformer.h.0.attn.c_attn.weight, which the model does not have.* model.layers.0.self_attn.q_proj, ",
    ),
    "a layer that is not there": (
        {f"base_model.model.model.layers.7.self_attn.q_proj.lora_{half}.weight": values(64, 64) for half in "AB"},
        "layers.7.* does not have: a llama of 2 layers",
    ),
    "a norm": (
        {f"base_model.model.model.layers.0.input_layernorm.lora_{half}.weight": values(4, 4) for half in "AB"},
        "input_layernorm.weight, which is not a matrix that an adapter can change",
    ),
    "not a number": ({f"{AT}.lora_A.weight": values(4, 64, fill=math.nan)}, "q_proj have numbers that are not finite"),
    "infinite": ({f"{AT}.lora_B.weight": values(64, 4, fill=math.inf)}, "not finite"),
    "a bias of a factor": ({f"{AT}.lora_B.bias": values(64)}, "lora_B.bias belongs to a kind of LoRA"),
    "DoRA's vector": ({f"{AT}.lora_magnitude_vector": values(64)}, "lora_magnitude_vector belongs to a kind of LoRA"),
    "a bias": ({f"{AT}.bias": values(64)}, "q_proj.bias is a whole tensor"),
    "a whole output": ({"base_model.model.lm_head.weight": values(264, 64)}, "lm_head.weight is a whole tensor.*--merge-lora"),
    "one factor twice": ({f"{AT}.lora_A.default.weight": values(4, 64)}, "are the same factor"),
    "one matrix twice": (
        {f"model.language_model.layers.0.self_attn.q_proj.lora_{half}.weight": values(64, 64) for half in "AB"},
        "two of its modules name one matrix",
    ),
    "a long name": ({"x" * 5000: values(1)}, "xxx[.]{3}"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_computed_are_refused_by_name(tmp_path: Path, tiny: LoadedModel, case: str) -> None:
    tensors, words = TENSORS[case]
    with pytest.raises(ModelError, match=words) as caught:
        read(write_adapter(tmp_path, ONE, dtype="f32", extra=tensors), tiny)
    assert str(tmp_path) in caught.value.message
    assert len(str(caught.value)) < 1000


def test_factors_of_keys_that_the_model_does_not_read_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["gemma4_shared"]
    model, own = load(write_case(case, tmp_path / "base")), factors_of_case(case)
    last = case.config["num_hidden_layers"] - 1
    module = f"model.layers.{last}.self_attn.k_proj"
    width = case.config["hidden_size"]
    with caplog.at_level("INFO"):
        found = read(write_adapter(tmp_path, {**own, module: (values(3, width), values(40, 3))}), model)
    assert found.by_weight.keys() == read(write_adapter(tmp_path / "own", own), model).by_weight.keys()
    assert f"{module}.weight is ignored: its layer reads the keys and values of another" in caplog.text


def test_experts_and_routers_are_refused_by_name(tmp_path: Path) -> None:
    model = load(write_case(CASES["qwen3_moe"], tmp_path / "base"))
    for module in ("model.layers.0.mlp.experts.0.gate_proj", "model.layers.0.mlp.gate"):
        folder = write_adapter(tmp_path, {module: (values(1, 4), values(4, 1))})
        with pytest.raises(ModelError, match="adapters of experts are not computed beside"):
            read(folder, model)


def test_matrices_of_heads_are_refused_by_name(tmp_path: Path) -> None:
    model = load(write_case(CASES["deepseek_v2"], tmp_path / "base"))
    folder = write_adapter(tmp_path, {"model.layers.0.self_attn.kv_b_proj": (values(1, 40), values(144, 1))})
    with pytest.raises(ModelError, match=r"kv_b_proj.weight, which is not computed beside the model.*--merge-lora"):
        read(folder, model)


FILES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda path: (path / "adapter_config.json").unlink(), "there is no adapter_config.json"),
    "settings that are none": (lambda path: (path / "adapter_config.json").write_text("[]"), "can't be read as a JSON object"),
    "settings without end": (
        lambda path: (path / "adapter_config.json").write_text(json.dumps({**config_of(4), "x": "y" * 2_000_000})),
        "more than the 1048576",
    ),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "there is no adapter_model.safetensors"),
    "a pickle": (
        lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"),
        "adapter_model.bin, which can run any code",
    ),
    "a pipe": (
        lambda path: ((path / "adapter_model.safetensors").unlink(), os.mkfifo(path / "adapter_model.safetensors")),
        "there is no adapter_model.safetensors",
    ),
    "cut short": (
        lambda path: os.truncate(path / "adapter_model.safetensors", (path / "adapter_model.safetensors").stat().st_size - 1),
        "ends at byte",
    ),
    "no header": (lambda path: (path / "adapter_model.safetensors").write_bytes(b"abc"), "header is longer than the file"),
    "a header without end": (
        lambda path: (path / "adapter_model.safetensors").write_bytes((5_000_000).to_bytes(8, "little") + b" " * 5_000_000),
        "header has 5000000 bytes, .*--merge-lora",
    ),
    "no factors": (lambda path: write_safetensors(path / "adapter_model.safetensors", {}, "f32"), "no LoRA factors"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_damaged_are_refused_by_name(tmp_path: Path, tiny: LoadedModel, case: str) -> None:
    change, words = FILES[case]
    folder = write_adapter(tmp_path, ONE)
    change(folder)
    with pytest.raises(ModelError, match=words) as caught:
        read(folder, tiny)
    assert str(tmp_path) in caught.value.message


def test_nothing_is_read_of_a_file_whose_shapes_are_refused(tmp_path: Path, tiny: LoadedModel) -> None:
    """A hole of a terabyte: its header alone is read, so a promise of many bytes costs none."""
    folder = write_adapter(tmp_path, ONE)
    size = (1 << 38) * 4
    header = json.dumps({f"{AT}.lora_A.weight": {"dtype": "F32", "shape": [1 << 19, 1 << 19], "data_offsets": [0, size]}})
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + size)
    with pytest.raises(ModelError, match="has no lora_B"):
        read(folder, tiny)


def test_an_encoder_has_no_adapters(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "base", TINY)
    model = load_model(catalog.resolve(str(path), path), task="embed")
    with pytest.raises(ModelError, match="adapters are for models that write text"):
        read(write_adapter(tmp_path / "adapter", ONE), model)


def test_what_was_read_needs_its_file_no_more(tmp_path: Path, tiny: LoadedModel) -> None:
    """A mapped file that is cut short would end the process."""
    folder = write_adapter(tmp_path, FACTORS, dtype="f32")
    found = read(folder, tiny)
    os.truncate(folder / "adapter_model.safetensors", 0)
    assert all(np.isfinite(half).all() for pair in found.by_weight.values() for half in pair)
