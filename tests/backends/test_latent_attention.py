"""Latent attention: one vector of each token in the cache, which all heads read, on both CPU backends."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native import footprint
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.config import Config, KvConfig
from penstock.deploy.resolve import decide, plan_on_cpu
from penstock.deploy.sizing import Room
from penstock.lab.sizing import size_of
from penstock.models import architectures
from penstock.models.checks import check_spec, weight_shapes
from penstock.models.formats import WeightFormat
from penstock.models.hf import load_hf_directory
from penstock.models.program import KvShape
from penstock.models.weights import LoadedModel, WeightTensor
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import LatentSpec, ModelSpec, Rotation, TextEnding, spec_of_equal_layers
from penstock.types.sampling import SamplingParams
from support.answer_bench import Bench
from support.fp8_models import BLOCK, change_tensors, fp8_blocks
from support.native_variants import ONE_OF_EACH, VARIANTS
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES

TOKENS = [3 + 7 * i % 250 for i in range(530)]  # in three segments of 256
TOLERANCE = {KvDtype.INT8: 0.03, KvDtype.BF16: 0.015}
"""Share of the logits' rms, as of other heads."""
SIZES = {"small": (3, 40, 12, 22, 26), "of DeepSeek": (5, 512, 64, 128, 128), "many heads": (50, 64, 10, 16, 32)}
"""Heads, columns of a latent, of what rotates, of keys and of values."""
LENGTHS = {"small": 530, "of DeepSeek": 270, "many heads": 270}
"""How many tokens have their logits compared. Large sizes span two segments: three take portable kernels ten seconds."""
SLOW = {("of DeepSeek", KvDtype.INT8, "portable"), ("many heads", KvDtype.BF16, "portable")}
"""Seconds each. Portable kernels compute these sizes and these types in other pairs, too."""


def make_spec(name: str) -> ModelSpec:
    num_heads, rank, rotary_dim, key_dim, value_dim = SIZES[name]
    spec = spec_of_equal_layers(
        architecture="deepseek_v2",
        vocab_size=264,
        hidden_size=72,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=rank + rotary_dim,
        intermediate_size=100,
        norm_eps=1e-5,
        rope_inv_freq=(),
        max_model_len=1024,
        tie_word_embeddings=True,
    )
    turn = Rotation(inv_freq=tuple(10000.0 ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)))
    latent = LatentSpec(key_dim=key_dim, value_dim=value_dim, rotary_dim=rotary_dim)
    return spec.with_attention(lambda _, attention: replace(attention, rotation=turn, latent=latent))


@cache
def make_model(name: str, *, factor: float = 1.0) -> LoadedModel:
    """`factor` of the rotated keys."""
    spec, rng, weights = make_spec(name), np.random.default_rng(5), {}
    for weight, (rows, cols) in weight_shapes(architectures.describe(spec)).items():
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        values = 1 + values / 8 if weight.endswith("norm") else values / np.float32(cols**0.5)
        values = values * np.float32(factor if weight.endswith("k_rope") else 1 / factor if weight.endswith("q_rope") else 1)
        weights[weight] = WeightTensor(weight, rows, cols, WeightFormat.F32, values)
    return LoadedModel("latent", spec, weights, Path("tokenizer.json"), None, (), Path("latent"))


def open_executor(model: LoadedModel, kind: type, **options: object) -> NativeExecutor | ReferenceExecutor:
    sizes = {"num_blocks": 100, "block_size": 16, "max_rows": 8, "max_step_tokens": 640, "max_model_len": 1024}
    return kind(model, architectures.describe(model.spec), **sizes, poison=True, **options)  # type: ignore[no-any-return]


@cache
def wanted_of(name: str, factor: float, dtype: KvDtype) -> NDArray[np.float32]:
    executor = open_executor(make_model(name, factor=factor), ReferenceExecutor, kv_dtype=dtype)
    return executor.forward_logits(TOKENS[: LENGTHS[name]])


def relative_error(name: str, dtype: KvDtype, variant: str, *, factor: float = 1.0) -> float:
    executor = open_executor(make_model(name, factor=factor), NativeExecutor, kv_dtype=dtype, variant=variant)
    found, wanted = executor.forward_logits(TOKENS[: LENGTHS[name]]), wanted_of(name, factor, dtype)
    return float(np.sqrt(np.mean((found - wanted) ** 2)) / np.sqrt(np.mean(wanted**2)))


@pytest.mark.parametrize(
    ("name", "dtype", "variant"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in itertools.product(SIZES, TOLERANCE, VARIANTS)
    ],
)
def test_native_computes_what_the_reference_does(name: str, dtype: KvDtype, variant: str) -> None:
    assert relative_error(name, dtype, variant) < TOLERANCE[dtype]


def test_latents_in_4_bits_are_refused_with_what_helps() -> None:
    model, config = make_model("small"), Config(kv=KvConfig(kv_cache_dtype="int4"))
    words = r"can't be int4: the model's keys are latents .* Set --kv-cache-dtype int8"
    with pytest.raises(ModelError, match=words):
        open_executor(model, NativeExecutor, kv_dtype=KvDtype.INT4)
    with pytest.raises(ModelError, match=words):  # before a weight is read
        plan_on_cpu(config, decide(config), model.spec, Room(available_bytes=1 << 34, num_weight_bytes=0))


def test_large_rotated_keys_cost_the_latents_nothing() -> None:
    """Their scales are apart."""
    assert relative_error("small", KvDtype.INT8, "", factor=30.0) < TOLERANCE[KvDtype.INT8]


@pytest.mark.parametrize("backend", ["reference", *ONE_OF_EACH])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", SIZES)
def test_answers_do_not_depend_on_chunks_batches_or_threads(name: str, dtype: KvDtype, backend: str) -> None:
    model = make_model(name)
    prompts = [TOKENS[:270], TOKENS[100:300], TOKENS[:37]]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5)
    answers = []
    for num_threads in (1, 2):
        options = {"variant": backend, "num_threads": num_threads} if backend != "reference" else {}
        kind = NativeExecutor if options else ReferenceExecutor
        bench = Bench(open_executor(model, kind, kv_dtype=dtype, **options), prompts, (sampling, sampling))
        picked = range(len(bench.prompts))
        answers += [bench.alone(picked), bench.run(bench.requests(picked), max_step_tokens=50, max_rows=3)]
        if not options:
            break
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", SIZES)
def test_a_block_has_one_vector_of_each_token(name: str, dtype: KvDtype) -> None:
    model = make_model(name)
    planned = footprint.block_bytes(model.spec, dtype, 16)
    assert open_executor(model, NativeExecutor, kv_dtype=dtype).block_bytes == planned
    size = size_of(
        architectures.describe(model.spec),
        name="",
        kv_dtype=dtype,
        num_weight_bytes=0,
        num_read_bytes=0,
        is_quantised=False,
    )
    assert planned == 16 * size.kv_bytes_per_token == 16 * size.kv_read_bytes


def test_bytes_of_deepseek() -> None:
    """576 columns, and in 8 bits 18 scales of groups and one of the value."""
    shape = KvShape(1, 576, 512)
    assert shape.padded() == shape
    assert (shape.num_bytes(KvDtype.INT8), shape.num_bytes(KvDtype.BF16)) == (576 + 2 * 19, 2 * 576 + 4)


def test_matrices_in_fp8_are_divided_among_weights_with_their_scales(tmp_path: Path) -> None:
    """As published files of DeepSeek V3 have them: blocks do not end where heads do."""
    case, at = CASES["deepseek_v2_lite"], "model.layers.1.self_attn"
    path = write_case(case, tmp_path / "model")
    config = {**case.config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
    (path / "config.json").write_text(json.dumps(config))
    names = [f"{at}.{name}.weight" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")]
    tensors, values = zip(*(fp8_blocks(name, case.weights()[name]) for name in names), strict=True)
    change_tensors(path, {name: tensor for ones in tensors for name, tensor in ones.items()})
    queries, stored, heads = (
        matrix.reshape(-1, width, matrix.shape[1]) for matrix, width in zip(values, (34, 52, 48), strict=True)
    )
    in_halves = [*range(0, 12, 2), *range(1, 12, 2)]
    wanted = {
        "q": queries[:, :22],
        "q_rope": queries[:, 22:][:, in_halves],
        "latent": stored[:, :40],
        "k_rope": stored[:, 40:][:, in_halves],
        "key_heads": heads[:, :22],
        "value_heads": heads[:, 22:],
    }
    found = load_hf_directory(path).weights
    for name, parts in wanted.items():
        np.testing.assert_array_equal(found[f"layers.1.{name}"].dequantize(), parts.reshape(-1, parts.shape[2]))


def test_texts_are_not_embedded() -> None:
    spec = replace(make_spec("small"), ending=TextEnding(pooling="last"))
    with pytest.raises(ModelError, match="models with latent attention are not supported for embeddings"):
        check_spec(spec, Path("model"))


def test_matrices_of_heads_are_finite() -> None:
    model = make_model("small")
    tensor = model.weights["layers.1.value_heads"]
    broken = replace(tensor, stored=np.full((tensor.num_rows, tensor.num_cols), np.nan, np.float32))
    with pytest.raises(ModelError, match=r"'layers\.1.value_heads' has a weight that is not finite"):
        open_executor(replace(model, weights={**model.weights, tensor.name: broken}), NativeExecutor)
