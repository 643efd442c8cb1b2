"""Adapters merged into weights: W + B A to the rounding of the merged format, and the same answers as beside the model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures, catalog
from penstock.models.adapter import AdapterFactors
from penstock.models.changed_rows import F32, ChangedRows
from penstock.models.formats import dequantize
from penstock.models.load import load_adapter, load_model
from penstock.models.merging import merged, with_adapters
from penstock.models.weights import LoadedModel, WeightFormat, WeightTensor
from penstock.types.adapter import MergedAdapter
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from support.packed_models import Packing, write_packed_hf
from support.parity.tiny import case_token_ids, write_case
from support.parity.tiny_cases import CASES
from support.tiny_adapters import draw, factors_of_case, factors_of_llama, write_adapter, write_gguf_adapter
from support.tiny_models import TinyLlama, write_gguf, write_hf

TINY = TinyLlama()


def load(path: Path) -> LoadedModel:
    return load_model(catalog.resolve(str(path), path))


def factors_for(model: LoadedModel, folder: Path) -> AdapterFactors:
    return load_adapter(folder, model.spec, architectures.describe(model.spec), tables=model.weights, max_rank=64)


def with_adapter(model: LoadedModel, path: Path) -> LoadedModel:
    return with_adapters(model, [MergedAdapter(str(path))])


def product(factors: AdapterFactors, site: str) -> np.ndarray:
    a, b = factors.by_weight[site]
    return (b @ a).T if site == "embed" else b @ a


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "Q4_1", "Q8_0", "act-order"])
def test_merged_weights_are_the_sum_to_the_rounding_of_their_format(tmp_path: Path, dtype: str) -> None:
    """Four bits become eight; rows and columns that the file has in another order are in order."""
    if dtype == "act-order":
        path = tmp_path / "tiny"
        write_packed_hf(path, TINY, Packing("gptq", order="matrix"))
    elif dtype[0] == "Q":
        path = write_gguf(tmp_path / "tiny.gguf", TINY, matrix_type=dtype)
    else:
        path = write_hf(tmp_path / "tiny", TINY, dtype=dtype)
    model = load(path)
    factors = factors_for(model, write_adapter(tmp_path / "adapter", factors_of_llama(TINY)))
    after = merged(model, factors)
    assert after.weights.keys() == model.weights.keys()
    for name, weight in after.weights.items():
        before = model.weights[name]
        if name not in factors.by_weight:
            assert weight is before
            continue
        wanted = before.dequantize() + product(factors, name)
        found = weight.dequantize()
        if weight.format is WeightFormat.F32:
            assert np.array_equal(found, wanted)
        elif weight.format is WeightFormat.BF16:
            assert np.allclose(found, wanted, rtol=2**-8, atol=0)
        else:
            assert weight.format is WeightFormat.Q8_0
            largest = np.abs(wanted).reshape(len(wanted), -1, 32).max(axis=-1)
            assert (np.abs(found - wanted).reshape(len(wanted), -1, 32).max(axis=-1) <= largest * (0.51 / 127)).all()
        assert np.array_equal(weight.ordered_rows(3, 11, 4), weight.data[3:11:4])
        weight.forget(0, 8)
        assert np.array_equal(weight.dequantize(), found)
        assert not weight.is_mapped


def test_numbers_that_can_t_be_held_are_refused(tmp_path: Path) -> None:
    model = load(write_gguf(tmp_path / "tiny.gguf", TINY, matrix_type="Q4_1"))
    for size, words in ((1e10, "Q8_0 can't hold"), (3e38, "not finite")):
        big = np.full((1, 64), size, np.float32), np.full((64, 1), 10, np.float32)
        with pytest.raises(ModelError, match=words), np.errstate(over="ignore"):
            merged(model, AdapterFactors({"layers.0.q": big})).weights["layers.0.q"].rows(0, 4)


@pytest.mark.parametrize("fmt", [WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q8_0])
def test_a_table_that_is_read_whole_is_changed_in_parts(fmt: WeightFormat) -> None:
    sizes: list[int] = []

    class RowNumbers:
        def apply(self, values: F32, rows: slice) -> F32:
            sizes.append(values.nbytes)
            values[:] = np.arange(rows.start, rows.stop)[:, None]
            return values

    base = WeightTensor("embed", 10_000, 1024, WeightFormat.BF16, np.zeros((10_000, 1024), np.uint16))
    table = WeightTensor("embed", 10_000, 1024, fmt, ChangedRows(base, (RowNumbers(),), fmt))
    data = table.data
    assert max(sizes) <= 1 << 25
    assert sum(sizes) == 4 * 10_000 * 1024
    values = dequantize(data[::99], fmt, 1024)  # of both parts
    assert np.allclose(values, np.arange(0, 10_000, 99)[:, None], rtol=2**-8)


def reference_logits(model: LoadedModel, token_ids: list[int]) -> np.ndarray:
    executor = ReferenceExecutor(
        model,
        architectures.describe(model.spec),
        num_blocks=32,
        block_size=16,
        max_rows=4,
        max_step_tokens=256,
        max_model_len=model.spec.max_model_len,
        kv_dtype=KvDtype.BF16,
    )
    with closing(executor):
        return executor.forward_logits(token_ids)


def logits(model: LoadedModel, token_ids: list[int], factors: AdapterFactors | None = None) -> np.ndarray:
    executor = NativeExecutor(
        model,
        architectures.describe(model.spec),
        num_blocks=400,
        block_size=16,
        max_rows=8,
        max_step_tokens=64,
        max_model_len=model.spec.max_model_len,
        kv_dtype=KvDtype.BF16,
        num_threads=2,
        max_adapter_rank=16 if factors else 0,
    )
    with closing(executor):
        if factors is None:
            return executor.forward_logits(token_ids)
        packed = executor.adapter_packer(factors)
        executor.place_adapter(1, packed, range(100, 100 + packed.num_pages))
        return executor.forward_logits(token_ids, adapter=1)


@pytest.mark.parametrize("name", ["mha_tied_f32", "gguf_q4_1", "gemma2", "phi3", "gpt2"])
def test_merged_answers_are_those_of_the_adapter_beside_the_model(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = load(write_case(case, tmp_path / "base"))
    pairs = {module: pair for module, pair in factors_of_case(case).items() if not module.endswith(("embed_tokens", "wte"))}
    factors = factors_for(model, write_adapter(tmp_path / "adapter", pairs))
    ids = case_token_ids(case)
    one, beside, base = logits(merged(model, factors), ids), logits(model, ids, factors), logits(model, ids)
    rms = float(np.sqrt(((one - beside) ** 2).mean()))
    assert rms < 0.05 * beside.std()
    assert float(np.sqrt(((one - base) ** 2).mean())) > 0.3 * base.std()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss_mxfp4", "qwen3_moe_gguf"])
def test_experts_are_merged_in_any_format(tmp_path: Path, name: str) -> None:
    """Both backends agree, except where rounding flips the choice of an expert."""
    case = CASES[name]
    model, ids = load(write_case(case, tmp_path / "base")), case_token_ids(case)
    num, *shape = case.shapes["model.layers.0.mlp.experts.gate_up_proj"]
    inputs, outputs = sorted(shape)
    pair = draw("experts", outputs, inputs, num)
    after = with_adapter(model, write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.experts": pair}, r=1, lora_alpha=9))
    found, wanted = logits(after, ids), reference_logits(after, ids)
    assert float(np.median(np.sqrt(((found - wanted) ** 2).mean(axis=1)))) < 0.05 * wanted.std()
    assert float(np.sqrt(((found - logits(model, ids)) ** 2).mean())) > 0.2 * wanted.std()


@pytest.mark.parametrize("name", ["expert_gate", "expert_up"])
def test_gate_and_up_of_experts_keep_one_format_if_one_of_them_changes(tmp_path: Path, name: str) -> None:
    """The native backend multiplies by both at once."""
    case = CASES["gpt_oss_mxfp4"]
    model = load(write_case(case, tmp_path / "base"))
    inputs, outputs = sorted(case.shapes["model.layers.0.mlp.experts.gate_up_proj"][1:])
    after = merged(model, AdapterFactors({f"layers.0.{name}.1": draw(name, outputs // 2, inputs, 2)}))
    formats = [after.weights[f"layers.0.expert_{part}"].format for part in ("gate", "up", "down")]
    assert formats == [WeightFormat.Q8_0, WeightFormat.Q8_0, WeightFormat.MXFP4]
    assert np.isfinite(logits(after, case_token_ids(case))).all()


@pytest.mark.parametrize("site", ["embed", "output"])
def test_a_tied_embedding_is_changed_in_one_place_alone(tmp_path: Path, site: str) -> None:
    model = load(write_hf(tmp_path / "tiny", TINY))
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 264)).astype(np.float32), rng.standard_normal((64, 2)).astype(np.float32)
    factors = AdapterFactors({site: (a, b) if site == "embed" else (np.ascontiguousarray(b.T), np.ascontiguousarray(a.T))})
    after = merged(model, factors)
    assert not after.spec.tie_word_embeddings
    other = "output" if site == "embed" else "embed"
    table = model.weights["embed"].dequantize()
    assert np.array_equal(after.weights[other].dequantize(), table)
    assert np.allclose(after.weights[site].dequantize(), table + product(factors, site), rtol=2**-8)
    assert logits(after, [5, 6, 7]).shape == (3, 264)


def test_whole_matrices_of_an_adapter_replace_the_model_s(tmp_path: Path) -> None:
    """Older releases of PEFT have another name for them."""
    model = load(write_hf(tmp_path / "tiny", TINY))
    rng = np.random.default_rng(0)
    table, output = (rng.standard_normal((264, 64)).astype(np.float32) for _ in range(2))
    names = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.modules_to_save.weight")
    extra = dict(zip(names, (table, output), strict=True))
    factors = factors_of_llama(TINY)
    after = with_adapter(model, write_adapter(tmp_path / "a", factors, dtype="f32", extra=extra, modules_to_save=["lm_head"]))
    assert np.array_equal(after.weights["embed"].dequantize(), table)
    assert np.array_equal(after.weights["output"].dequantize(), output)
    assert not after.spec.tie_word_embeddings
    one = with_adapter(model, write_adapter(tmp_path / "b", factors, dtype="f32", extra={names[1]: output}))
    assert np.array_equal(one.weights["embed"].dequantize(), model.weights["embed"].dequantize())
    for change, words in (
        ({names[1]: output[:, :32]}, r"is \[264, 32\] of F32, and the model has \[264, 64\]"),
        ({names[1]: output * np.float32(np.nan)}, "output has numbers that are not finite"),
        ({names[1]: output, names[1].replace(".modules_to_save", ""): output}, "are the same matrix"),
        ({"base_model.model.model.norm.weight": output[0]}, "norm.weight is a whole tensor"),
    ):
        with pytest.raises(ModelError, match=words):
            with_adapter(model, write_adapter(tmp_path / "c", factors, dtype="f32", extra=change))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_matrix_that_was_changed_before_training_replaces_the_model_s(tmp_path: Path, name: str, *, is_tied: bool) -> None:
    """PEFT loads it into the model, where a tied output is the same matrix."""
    model = load(write_hf(tmp_path / "tiny", replace(TINY, is_tied=is_tied)))
    site, module = ("embed", "model.embed_tokens") if name == "embed_tokens" else ("output", "lm_head")
    table = np.random.default_rng(0).standard_normal((264, 64)).astype(np.float32)
    pair = draw(name, 64, 264, 2) if site == "embed" else draw(name, 264, 64, 2)
    extra = {f"base_model.model.{module}.base_layer.weight": table}
    after = with_adapter(model, write_adapter(tmp_path / "a", {module: pair}, dtype="f32", lora_alpha=2, extra=extra))
    change = pair[1] @ pair[0]
    assert np.allclose(after.weights[site].dequantize(), table + (change.T if site == "embed" else change), atol=1e-6)
    other = "output" if site == "embed" else "embed"
    unchanged = table if is_tied else model.weights[other].dequantize()
    assert np.array_equal(after.weights[other].dequantize(), unchanged)


def test_an_adapter_of_gguf_is_merged_too(tmp_path: Path) -> None:
    model = load(write_hf(tmp_path / "tiny", TINY))
    module = "model.layers.0.mlp.up_proj"
    pair = factors_of_llama(TINY)[module]
    path = write_gguf_adapter(tmp_path / "a.gguf", {module: pair}, {module: "blk.0.ffn_up.weight"}, alpha=0.0, dtype="F32")
    found = with_adapter(model, path).weights["layers.0.up"].dequantize()
    assert np.allclose(found, model.weights["layers.0.up"].dequantize() + pair[1] @ pair[0], rtol=2**-8)
