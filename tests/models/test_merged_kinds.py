"""Adapters that only merging computes: DoRA, changes of experts, weighted sums. Expected weights come from PEFT's formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models import architectures, catalog
from penstock.models.load import load_adapter, load_model
from penstock.models.merging import with_adapters
from penstock.models.weights import LoadedModel, WeightFormat
from penstock.types.adapter import MergedAdapter
from penstock.types.errors import ModelError
from support.parity.tiny import FloatArray, TinyCase, is_cube, write_case
from support.parity.tiny_cases import CASES
from support.tiny_adapters import (
    EACH_ARCHITECTURE,
    EMBEDDINGS,
    Factors,
    case_with,
    draw,
    factors_of_case,
    factors_of_llama,
    in_float32,
    merged,
    write_adapter,
    write_gguf_adapter,
)
from support.tiny_models import TinyLlama, write_gguf, write_hf

TINY = TinyLlama()
MIXTURES = [name for name in EACH_ARCHITECTURE if any(name.endswith("gate_up_proj") for name in CASES[name].shapes)]
OLD_MIXTURES = [
    name for name in MIXTURES if name.startswith(("gpt_oss", "qwen3_moe", "qwen3_vl", "mixtral", "granite_moe", "kimi"))
]
"""Files of all kinds: directories, GGUF, inside a model of pictures, with inputs as rows. Sizes alone tell an old adapter."""
SCALE = 2.0
"""`write_adapter` has an alpha of twice the rank."""
Q = "model.layers.0.self_attn.q_proj"


def load(path: Path) -> LoadedModel:
    return load_model(catalog.resolve(str(path), path))


def with_adapter(model: LoadedModel, path: Path, weight: float = 1.0) -> LoadedModel:
    return with_adapters(model, [MergedAdapter(str(path), weight)])


def lengths_of(factors: Factors) -> dict[str, FloatArray]:
    """Lengths of rows as DoRA trains them, around 1, by module."""
    return {module: 1 + 0.5 * draw(module, len(b), 1, 1, seed=7)[1][:, 0] for module, (_, b) in factors.items()}


def in_tensors(lengths: dict[str, FloatArray], *, end: str = "") -> dict[str, FloatArray]:
    return {f"base_model.model.{module}.lora_magnitude_vector{end}": values for module, values in lengths.items()}


def lengthened(rows: FloatArray, lengths: FloatArray) -> FloatArray:
    """DoRA of a matrix with outputs as rows: each row gets its length."""
    return rows * (lengths / np.linalg.norm(rows, axis=1))[:, None]


def assert_equal_weights(found: LoadedModel, wanted: LoadedModel, base: LoadedModel) -> None:
    num_changed = 0
    for name, weight in wanted.weights.items():
        values = weight.dequantize()
        assert np.allclose(found.weights[name].dequantize(), values, rtol=1e-5, atol=1e-5), name
        num_changed += not np.array_equal(values, base.weights[name].dequantize())
    assert num_changed
    assert found.weights.keys() == wanted.weights.keys()


@pytest.mark.parametrize("name", EACH_ARCHITECTURE)
def test_dora_gives_each_row_its_length(tmp_path: Path, name: str) -> None:
    """In fused and transposed matrices, and rows in another order, too."""
    case = in_float32(CASES[name])
    factors = {module: pair for module, pair in factors_of_case(case).items() if not module.endswith(EMBEDDINGS)}
    lengths, weights = lengths_of(factors), merged(case, factors, SCALE)
    for module, of_rows in lengths.items():
        key = f"{module}.weight"
        is_turned = key.endswith(case.transposed)
        rows = lengthened(weights[key].T if is_turned else weights[key], of_rows)
        weights[key] = np.ascontiguousarray(rows.T if is_turned else rows)
    base, wanted = load(write_case(case, tmp_path / "base")), load(write_case(case_with(case, weights), tmp_path / "merged"))
    prefix = "language_model." if case.wrapper is not None else ""
    folder = write_adapter(
        tmp_path / "adapter",
        {f"{prefix}{module}": pair for module, pair in factors.items()},
        dtype="f32",
        use_dora=True,
        extra=in_tensors({f"{prefix}{module}": values for module, values in lengths.items()}),
    )
    assert_equal_weights(with_adapter(base, folder), wanted, base)


def factors_of_experts(case: TinyCase, *, rank: int, is_old: bool) -> tuple[dict[str, FloatArray], Factors]:
    """The case's weights with changed experts, and PEFT's factors of them: A by expert and rank, B by rank and expert.

    PEFT before 0.19 takes a tensor's second dimension for the inputs.
    """
    weights, factors = case.weights(), Factors()
    of_module: dict[str, int] = {}
    for name in filter(is_cube, case.shapes):
        num, first, second = case.shapes[name]
        a_is_first = is_old or name.endswith(case.transposed)
        width, height = (first, second) if a_is_first else (second, first)
        a, b = draw(name, height, width, rank * num)
        module = name.rpartition(".")[0]
        nested = ".base_layer" * of_module.get(module, 0)
        of_module[module] = of_module.get(module, 0) + 1
        factors[f"{module}{nested}"] = a, b
        change = np.einsum("ore,eri->eoi", b.reshape(height, rank, num), a.reshape(num, rank, width))
        weights[name] = weights[name] + np.float32(SCALE) * (change.swapaxes(1, 2) if a_is_first else change)
    return weights, factors


@pytest.mark.parametrize(("name", "is_old"), [*((name, False) for name in MIXTURES), *((name, True) for name in OLD_MIXTURES)])
def test_experts_and_routers_are_changed(tmp_path: Path, name: str, is_old: bool) -> None:
    """By `target_parameters`: files have one pair of factors for all experts, and not the parameter's name."""
    case = in_float32(CASES[name])
    weights, factors = factors_of_experts(case, rank=3, is_old=is_old)
    ends = ("mlp.gate.weight", "feed_forward.gate.weight", "router.weight", "router.proj.weight", "shared_expert_gate.weight")
    for key in [key for key in case.shapes if key.endswith((*ends, "shared_expert.up_proj.weight"))]:
        a, b = factors.setdefault(key.removesuffix(".weight"), draw(key, *case.shapes[key], 3))
        weights[key] = weights[key] + np.float32(SCALE) * (b @ a)
    base, wanted = load(write_case(case, tmp_path / "base")), load(write_case(case_with(case, weights), tmp_path / "merged"))
    prefix = "language_model." if case.wrapper is not None else ""
    pairs = {f"{prefix}{module}": pair for module, pair in factors.items()}
    folder = write_adapter(tmp_path / "adapter", pairs, dtype="f32", r=3, lora_alpha=6, target_parameters=["experts.down_proj"])
    assert_equal_weights(with_adapter(base, folder), wanted, base)


@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3", "deepseek_v2_lite_old_gguf"])
def test_matrices_of_heads_are_changed(tmp_path: Path, name: str) -> None:
    """A tensor of latent attention has the keys' and the values' matrices of all heads."""
    case = in_float32(CASES[name])
    ends = tuple(f"{part}.self_attn.kv_b_proj.weight" for part in "01")
    factors = {key.removesuffix(".weight"): draw(key, *shape, 3) for key, shape in case.shapes.items() if key.endswith(ends)}
    base = load(write_case(case, tmp_path / "base"))
    wanted = load(write_case(case_with(case, merged(case, factors, SCALE)), tmp_path / "merged"))
    assert_equal_weights(with_adapter(base, write_adapter(tmp_path / "adapter", factors, dtype="f32")), wanted, base)


def test_matrices_of_heads_whose_keys_lie_otherwise_are_refused(tmp_path: Path) -> None:
    """Newer GGUF files have the keys' matrices transposed."""
    case = CASES["deepseek_v3_gguf"]
    name = next(key for key in case.shapes if key.endswith("kv_b_proj.weight"))
    factors = {name.removesuffix(".weight"): draw(name, *case.shapes[name], 3)}
    with pytest.raises(ModelError, match=r"kv_b_proj.weight, which is not a matrix that an adapter can change"):
        with_adapter(load(write_case(case, tmp_path / "base")), write_adapter(tmp_path / "adapter", factors))


def test_patterns_of_a_parameter_are_for_its_name(tmp_path: Path) -> None:
    """PEFT names a matrix `q_proj.weight` in `target_parameters`, and `q_proj` in `target_modules`."""
    base = load(write_hf(tmp_path / "tiny", TINY, dtype="f32"))
    factors = factors_of_llama(TINY, rank=2, ends=("q_proj", "v_proj")) | factors_of_llama(TINY, rank=4, ends=("o_proj",))
    settings = {
        "target_modules": ["v_proj"],
        "target_parameters": ["q_proj.weight", "o_proj.weight"],
        "rank_pattern": {"o_proj.weight": 4},
        "alpha_pattern": {"q_proj.weight": 6, "o_proj": 30, "v_proj": 8},
    }
    folder = write_adapter(tmp_path / "adapter", factors, dtype="f32", r=2, lora_alpha=4, **settings)
    after = with_adapter(base, folder)
    for name, scale in (("q", 3), ("o", 1), ("v", 4)):
        a, b = factors[f"model.layers.0.self_attn.{name}_proj"]
        wanted = base.weights[f"layers.0.{name}"].dequantize() + scale * (b @ a)
        assert np.allclose(after.weights[f"layers.0.{name}"].dequantize(), wanted, atol=1e-6), name


@pytest.mark.parametrize("name", ["qwen3_moe_per_expert", "mixtral_per_expert", "qwen3_moe_gguf"])
def test_single_experts_may_have_modules_of_their_own(tmp_path: Path, name: str) -> None:
    """As before release 5 of transformers."""
    base = load(write_case(in_float32(CASES[name]), tmp_path / "base"))
    end = "block_sparse_moe.experts.5.w3" if name.startswith("mixtral") else "mlp.experts.5.up_proj"
    a, b = draw(end, 40, 72, 2)
    after = with_adapter(base, write_adapter(tmp_path / "adapter", {f"model.layers.0.{end}": (a, b)}, dtype="f32"))
    wanted = base.weights["layers.0.expert_up"].dequantize()
    wanted[5 * 40 : 6 * 40] += SCALE * (b @ a)
    assert np.allclose(after.weights["layers.0.expert_up"].dequantize(), wanted, atol=1e-6)
    assert after.weights["layers.0.expert_gate"] is base.weights["layers.0.expert_gate"]


def test_a_header_may_be_as_long_as_that_of_all_experts(tmp_path: Path) -> None:
    """The factors of 48 layers of 128 experts are 37,000 tensors, with a header of 5 MB. Here it is padded."""
    base = load(write_hf(tmp_path / "base", TINY))
    path = write_adapter(tmp_path / "adapter", {Q: factors_of_llama(TINY)[Q]}) / "adapter_model.safetensors"
    data, num_spaces = path.read_bytes(), 5_000_000
    end = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes((end - 8 + num_spaces).to_bytes(8, "little") + data[8:end] + b" " * num_spaces + data[end:])
    assert with_adapter(base, path.parent).weights["layers.0.q"] is not base.weights["layers.0.q"]


def test_an_adapter_of_gguf_has_a_pair_for_all_experts(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: a matrix for each expert, one below the other."""
    base = load(write_case(in_float32(CASES["qwen3_moe_gguf"]), tmp_path / "base"))
    pairs = [draw(f"expert {number}", 40, 72, 2) for number in range(7)]
    a, b = (np.stack(halves) for halves in zip(*pairs, strict=True))
    router = draw("router", 7, 72, 2)
    names = {"up": "blk.1.ffn_up_exps.weight", "router": "blk.1.ffn_gate_inp.weight"}
    adapter = write_gguf_adapter(
        tmp_path / "a.gguf", {"up": (a, b), "router": router}, names, architecture="qwen3moe", alpha=4.0, dtype="F32"
    )
    after = with_adapter(base, adapter)
    for name, change in (("expert_up", (b @ a).reshape(280, 72)), ("router", router[1] @ router[0])):
        before, found = (model.weights[f"layers.1.{name}"].dequantize() for model in (base, after))
        assert np.allclose(found, before + SCALE * change, atol=1e-6)
    with pytest.raises(ModelError, match=r"not computed beside their model\. Serve the model with --merge-lora"):
        load_adapter(adapter, base.spec, architectures.describe(base.spec), tables=base.weights, max_rank=64)


def test_experts_in_four_bits_become_eight_bits(tmp_path: Path) -> None:
    """All of a layer's, also those without a change: its matrices lie in one."""
    base = load(write_case(CASES["gpt_oss_mxfp4"], tmp_path / "base"))
    num, inputs, outputs = CASES["gpt_oss_mxfp4"].shapes["model.layers.0.mlp.experts.gate_up_proj"]
    a, b = draw("experts", outputs, inputs, num)
    b[:, 5] = 0
    after = with_adapter(base, write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.experts": (a, b)}, r=1, lora_alpha=9))
    found, wanted = after.weights["layers.0.expert_up"], base.weights["layers.0.expert_up"].dequantize()
    wanted += 9 * np.einsum("oe,ei->eoi", b[1::2], a).reshape(wanted.shape)  # in gpt-oss, every other row
    assert found.format is WeightFormat.Q8_0
    assert np.allclose(found.dequantize(), wanted, atol=0.51 / 127 * np.abs(wanted).max())
    assert np.array_equal(found.dequantize(3, 100), found.dequantize()[3:100])
    found.forget(0, 8)


@pytest.mark.parametrize("matrix_type", ["F32", "Q4_1"])
def test_dora_of_quantised_matrices_is_computed_in_float32(tmp_path: Path, matrix_type: str) -> None:
    base = load(write_gguf(tmp_path / "tiny.gguf", TINY, matrix_type=matrix_type))
    factors = {"model.layers.1.mlp.up_proj": factors_of_llama(TINY)["model.layers.1.mlp.up_proj"]}
    [(a, b)], [lengths] = factors.values(), lengths_of(factors).values()
    extra = in_tensors(lengths_of(factors), end=".default.weight")  # as older releases wrote them
    after = with_adapter(base, write_adapter(tmp_path / "adapter", factors, dtype="f32", use_dora=True, extra=extra))
    found, wanted = after.weights["layers.1.up"], base.weights["layers.1.up"].dequantize() + SCALE * (b @ a)
    wanted = lengthened(wanted, lengths)
    largest = np.abs(wanted).reshape(len(wanted), -1, 32).max(axis=-1).repeat(32, axis=-1)
    assert (np.abs(found.dequantize() - wanted) <= (1e-6 if matrix_type == "F32" else largest * (0.51 / 127))).all()


def test_adapters_are_merged_in_order_each_times_its_weight(tmp_path: Path) -> None:
    """As PEFT merges them; plain ones are a sum (`combination_type="cat"`)."""
    base = load(write_hf(tmp_path / "tiny", TINY, dtype="f32"))
    first, second = ({Q: factors_of_llama(TINY, seed=seed)[Q]} for seed in (1, 2))
    (one, two), lengths = (SCALE * (b @ a) for a, b in (first[Q], second[Q])), lengths_of(first)
    paths = [str(write_adapter(tmp_path / f"{seed}", pair, dtype="f32")) for seed, pair in enumerate((first, second))]
    dora = str(write_adapter(tmp_path / "dora", first, dtype="f32", use_dora=True, extra=in_tensors(lengths)))
    q = base.weights["layers.0.q"].dequantize()

    def merge(*adapters: MergedAdapter) -> FloatArray:
        return with_adapters(base, adapters).weights["layers.0.q"].dequantize()

    weighted = merge(MergedAdapter(paths[0], 0.7), MergedAdapter(paths[1], -0.3))
    assert np.allclose(weighted, q + 0.7 * one - 0.3 * two, atol=1e-6)
    wanted = lengthened(q + one, lengths[Q])
    assert np.allclose(merge(MergedAdapter(dora), MergedAdapter(paths[1], 0.5)), wanted + 0.5 * two, atol=1e-6)
    wanted = lengthened(q + 0.5 * two + one, lengths[Q])
    assert np.allclose(merge(MergedAdapter(paths[1], 0.5), MergedAdapter(dora)), wanted, atol=1e-6)
    with pytest.raises(ModelError, match=r"which a weight of 0\.5 can't scale"):
        merge(MergedAdapter(dora, 0.5))


def test_two_adapters_can_t_replace_the_same_matrix(tmp_path: Path) -> None:
    base = load(write_hf(tmp_path / "tiny", TINY))
    extra = {"base_model.model.lm_head.weight": np.ones((264, 64), np.float32)}
    path = str(write_adapter(tmp_path / "one", {Q: factors_of_llama(TINY)[Q]}, extra=extra))
    with pytest.raises(ModelError, match="Two adapters replace the whole output"):
        with_adapters(base, [MergedAdapter(path), MergedAdapter(path)])


TALL, WIDE = (np.ones(shape, np.float32) for shape in ((64, 4), (4, 64)))
LENGTHS = {f"base_model.model.{Q}.lora_magnitude_vector": np.ones(64, np.float32)}
K = "base_model.model.model.layers.0.self_attn.k_proj"
BROKEN: dict[str, tuple[dict[str, FloatArray], dict[str, Any], str]] = {
    "no lengths": ({}, {"use_dora": True}, "q_proj has only factors, but DoRA needs both"),
    "lengths alone": (
        {**LENGTHS, f"{K}.lora_magnitude_vector": np.ones(32, np.float32)},
        {"use_dora": True},
        "k_proj has only a magnitude vector",
    ),
    "lengths of another matrix": (
        {f"base_model.model.{Q}.lora_magnitude_vector": np.ones(63, np.float32)},
        {"use_dora": True},
        r"is \[63\] of F32, and the matrix has 64 rows",
    ),
    "lengths that are no numbers": (
        {name: values * np.nan for name, values in LENGTHS.items()},
        {"use_dora": True},
        "lora_magnitude_vector has numbers that are not finite",
    ),
    "lengths twice": (
        {**LENGTHS, **{f"{name}.weight": values for name, values in LENGTHS.items()}},
        {"use_dora": True},
        "are the same vector",
    ),
    "lengths without DoRA": (LENGTHS, {}, "belongs to a kind of LoRA that is not computed"),
    "an embedding": (
        {
            **LENGTHS,
            "base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 264), np.float32),
            "base_model.model.model.embed_tokens.lora_embedding_B": TALL,
            "base_model.model.model.embed_tokens.lora_magnitude_vector": np.ones(64, np.float32),
        },
        {"use_dora": True},
        "an embedding, of which DoRA is not computed",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_dora_that_can_t_be_computed_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    extra, settings, words = BROKEN[kind]
    folder = write_adapter(tmp_path / "adapter", {Q: (WIDE, TALL)}, dtype="f32", extra=extra, **settings)
    with pytest.raises(ModelError, match=words):
        with_adapter(load(write_hf(tmp_path / "tiny", TINY)), folder)


@pytest.mark.parametrize("is_old", [False, True])
def test_dora_of_all_experts_at_once_is_refused(tmp_path: Path, is_old: bool) -> None:
    """PEFT has none."""
    case = CASES["qwen3_moe"]
    _, factors = factors_of_experts(case, rank=2, is_old=is_old)
    extra = in_tensors({module: np.ones(len(b), np.float32) for module, (_, b) in factors.items()})
    folder = write_adapter(tmp_path / "adapter", factors, r=2, use_dora=True, extra=extra)
    with pytest.raises(ModelError, match="for all experts, of which DoRA is not computed"):
        with_adapter(load(write_case(case, tmp_path / "base")), folder)


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_pair_for_each_expert_is_refused_for_other_matrices(tmp_path: Path, num: int, is_merged: bool) -> None:
    base = load(write_case(CASES["qwen3_moe_gguf"], tmp_path / "base"))
    a, b = draw("q", 72, 72, 2)
    outputs = base.weights["layers.0.q"].num_rows
    pair = np.stack([a] * num), np.stack([np.resize(b, (outputs, 2))] * num)
    single = np.stack([a] * num), np.stack([b[:40]] * num)
    names = {"q": "blk.0.attn_q.weight", "up": "blk.0.ffn_up_exps.weight"}
    odd = [
        write_adapter(tmp_path / "q", {Q: pair}, r=2),
        write_adapter(tmp_path / "single", {"model.layers.0.mlp.experts.5.up_proj": single}, r=2),
        write_gguf_adapter(tmp_path / "q.gguf", {"q": pair}, names, architecture="qwen3moe", dtype="F32"),
    ]
    if num < 7:
        odd.append(write_gguf_adapter(tmp_path / "up.gguf", {"up": single}, names, architecture="qwen3moe", dtype="F32"))
    for path in odd:
        with pytest.raises(ModelError, match=r"not \[rank, inputs\]|not computed beside|needs \[rank"):
            load_adapter(
                path, base.spec, architectures.describe(base.spec), tables=base.weights, max_rank=64, is_merged=is_merged
            )


def test_rows_without_a_length_can_t_get_one(tmp_path: Path) -> None:
    """The change takes them to 0."""
    base = load(write_hf(tmp_path / "tiny", TINY, dtype="f32"))
    weight = base.weights["layers.0.q"].dequantize()
    pair = -weight, np.eye(64, dtype=np.float32)
    folder = write_adapter(tmp_path / "adapter", {Q: pair}, dtype="f32", use_dora=True, extra=LENGTHS, lora_alpha=64)
    with pytest.raises(ModelError, match="not finite"):
        with_adapter(base, folder).weights["layers.0.q"].dequantize()


@pytest.mark.parametrize(
    ("shape", "num", "words"),
    [
        ((72, 40), 6, "which fit none of the model's experts"),
        ((72, 41), 7, "which fit none of the model's experts"),
        ((72, 40, 3), 7, "not .rank, inputs. and .outputs, rank."),
    ],
)
def test_experts_of_another_model_are_refused(tmp_path: Path, shape: tuple[int, ...], num: int, words: str) -> None:
    base = load(write_case(CASES["qwen3_moe"], tmp_path / "base"))
    width, height, *more = shape
    pair = np.ones((num, height, *more), np.float32), np.ones((width, num), np.float32)
    folder = write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.experts": pair}, r=1)
    with pytest.raises(ModelError, match=words):
        with_adapter(base, folder)
    single = np.ones((1, 72), np.float32), np.ones((40, 1), np.float32)
    folder = write_adapter(tmp_path / "single", {"model.layers.0.mlp.experts.7.up_proj": single})
    with pytest.raises(ModelError, match=r"experts.7.up_proj"):
        with_adapter(base, folder)


def test_experts_without_gates_do_not_say_which_matrix_is_changed(tmp_path: Path) -> None:
    """The sizes of `up_proj` in one release of PEFT are those of `down_proj` in another."""
    base = load(write_case(CASES["nemotron_h_moe"], tmp_path / "base"))
    module = next(name for name in CASES["nemotron_h_moe"].shapes if is_cube(name)).rpartition(".")[0]
    folder = write_adapter(tmp_path / "adapter", {module: draw("experts", 40, 72, 7)}, r=1)
    with pytest.raises(ModelError, match="do not say which matrix the factors are for"):
        with_adapter(base, folder)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_square_matrices_do_not_say_which_factor_is_for_the_inputs(tmp_path: Path, name: str) -> None:
    """But for gpt-oss, whose experts have inputs as rows in all releases of transformers."""
    case = in_float32(CASES[name])
    sizes = {"intermediate_size": 72, "moe_intermediate_size": 72}
    shapes = {key: tuple({40: 72, 80: 144}.get(size, size) for size in shape) for key, shape in case.shapes.items()}
    case = replace(
        case, config={**case.config, **{key: size for key, size in sizes.items() if key in case.config}}, shapes=shapes
    )
    base = load(write_case(case, tmp_path / "base"))
    a, b = draw("down", 72, 72, 7)
    folder = write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.experts": (a, b)}, dtype="f32", r=1, lora_alpha=1)
    if name == "qwen3_moe":
        with pytest.raises(ModelError, match="do not say which factor is for the inputs"):
            with_adapter(base, folder)
        return
    found = with_adapter(base, folder).weights["layers.0.expert_down"].dequantize()
    wanted = base.weights["layers.0.expert_down"].dequantize() + np.einsum("oe,ei->eoi", b, a).reshape(found.shape)
    assert np.allclose(found, wanted, atol=1e-6)
