"""Rotary frequencies and their scalings, against formulas written out independently, and against transformers' numbers."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.models import rope
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec, Rotation
from support.tiny_models import TinyLlama, write_gguf, write_hf


def test_frequencies_fall_geometrically_from_one():
    freqs = rope.inverse_frequencies(8, 10000.0)
    assert freqs == pytest.approx((1.0, 0.1, 0.01, 0.001))


def test_linear_scaling_slows_every_pair():
    parameters = rope.RopeParameters(kind="linear", factor=4.0, theta=4.0, dim=4, trained_len=64)
    assert rope.frequencies(parameters, 4, 64).inv_freq == (0.25, 0.125)


def test_divisors_apply_pair_by_pair():
    parameters = rope.RopeParameters(theta=4.0, dim=4, trained_len=64, divisors=(1.0, 8.0))
    assert rope.frequencies(parameters, 4, 64).inv_freq == (1.0, 0.0625)


def test_divisors_must_match_the_pairs():
    parameters = rope.RopeParameters(theta=4.0, dim=4, trained_len=64, divisors=(1.0,))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        rope.frequencies(parameters, 4, 64)


def llama3(freq: float, factor: float, low: float, high: float, context: int) -> float:
    """As the reference code of Llama 3.1 puts it, in wavelengths."""
    wavelength = 2 * math.pi / freq
    if wavelength < context / high:
        return freq
    if wavelength > context / low:
        return freq / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * freq / factor + smooth * freq


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    freqs = rope.inverse_frequencies(128, 500000.0)
    parameters = rope.RopeParameters(kind="llama3", theta=500000.0, dim=128, trained_len=131072, original_len=8192, factor=8.0)
    scaled = rope.frequencies(parameters, 128, 131072).inv_freq
    assert scaled == pytest.approx([llama3(freq, 8.0, 1.0, 4.0, 8192) for freq in freqs])
    assert scaled[0] == freqs[0]
    assert scaled[-1] == freqs[-1] / 8.0
    blended = [idx for idx, (a, b) in enumerate(zip(freqs, scaled, strict=True)) if a / 8.0 < b < a]
    assert blended


SHORT, LONG = [1 + i / 4 for i in range(8)], [1.0 + i for i in range(8)]

# Of transformers 5.23: ROPE_INIT_FUNCTIONS[rope_type](LlamaConfig(head_dim=..., max_position_embeddings=1024,
# rope_parameters=...), "cpu", seq_len=...), some of the pairs and the attention factor.
OF_TRANSFORMERS: dict[str, tuple[dict[str, Any], int, int, dict[int, float], float]] = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 64, 4096, {1: 0.7042693, 16: 0.00366286, 30: 2.704975e-05}, 1.0),
    "dynamic, within": ({"rope_type": "dynamic", "factor": 2.0}, 64, 512, {1: 0.7498942, 16: 0.01, 30: 0.0001778279}, 1.0),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        *(64, 1024, {1: 0.7066311, 8: 0.05384615, 10: 0.02379136, 16: 0.0025, 30: 4.445699e-05}, 1.1386294),
    ),
    "yarn of gpt-oss": (
        {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "truncate": False, "rope_theta": 150000.0},
        *(64, 1024, {1: 0.5819293, 8: 0.001587915, 10: 0.0007539134, 16: 8.068715e-05, 30: 4.387979e-07}, 1.3465736),
    ),
    "yarn with scales": (
        {"type": "yarn", "factor": 16, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0.7},
        *(64, 1024, {1: 0.6859828, 8: 0.03181818, 10: 0.008307314, 16: 0.000625, 30: 1.111425e-05}, 1.0696583),
    ),
    "yarn, factor given": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
        *(64, 1024, {1: 0.7066311, 8: 0.05384615}, 1.5),
    ),
    "longrope, short": (
        {"type": "longrope", "original_max_position_embeddings": 256, "short_factor": SHORT, "long_factor": LONG},
        *(16, 256, {1: 0.2529822, 2: 0.06666667, 4: 0.005, 6: 0.0004}, 1.118034),
    ),
    "longrope, long": (
        {"type": "su", "original_max_position_embeddings": 256, "short_factor": SHORT, "long_factor": LONG},
        *(16, 257, {1: 0.1581139, 2: 0.03333334, 4: 0.002, 6: 0.0001428571}, 1.118034),
    ),
    "linear, factor given": ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5}, 64, 1024, {1: 0.3749471}, 1.0),
    "mrope": ({"type": "mrope", "mrope_section": [8, 12, 12]}, 64, 1024, {1: 0.7498942, 30: 0.0001778279}, 1.0),
}


def rotation_of(folder: Path, model: TinyLlama, parameters: dict[str, Any], served_len: int | None = None) -> Rotation:
    extra = {"rope_parameters": parameters, "max_position_embeddings": 1024}
    rotation = load_hf_directory(write_hf(folder, model, extra=extra), served_len=served_len).spec.layers[1].attention.rotation
    assert rotation is not None
    return rotation


@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_frequencies_are_those_of_transformers(case: str, tmp_path: Path):
    parameters, head_dim, served_len, wanted, attention_factor = OF_TRANSFORMERS[case]
    rotation = rotation_of(tmp_path, TinyLlama(head_dim=head_dim), parameters, served_len)
    assert len(rotation.inv_freq) == head_dim // 2
    assert {pair: rotation.inv_freq[pair] for pair in wanted} == pytest.approx(wanted, rel=2e-6)
    assert rotation.attention_factor == pytest.approx(attention_factor)


def test_part_of_a_head_turns():
    parameters = rope.RopeParameters(kind="linear", factor=4.0, dim=32, trained_len=1024)
    inv_freq = rope.frequencies(parameters, 64, 1024).inv_freq
    assert len(inv_freq) == 16
    assert [inv_freq[pair] for pair in (1, 8, 14)] == pytest.approx([0.1405853, 0.0025, 7.905695e-05], rel=2e-6)


def test_proportional_frequencies_stand_still_beyond_their_part():
    parameters = rope.RopeParameters(kind="proportional", factor=2.0, dim=16, trained_len=1024)
    inv_freq = rope.frequencies(parameters, 64, 1024).inv_freq
    assert len(inv_freq) == 32
    assert inv_freq[1] == pytest.approx(0.3749471)
    assert min(inv_freq[:8]) > 0.0
    assert set(inv_freq[8:]) == {0.0}


def test_the_log_says_which_of_a_texts_rotations_all_texts_get(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    parameters = OF_TRANSFORMERS["longrope, long"][0]
    with caplog.at_level(logging.INFO, "penstock"):
        whole = rotation_of(tmp_path / "a", TinyLlama(), parameters)
        assert "long factors are used for all texts; --max-model-len 256 or less selects the short ones" in caplog.text
        assert rotation_of(tmp_path / "b", TinyLlama(), parameters, 256) != whole
        assert "LongRoPE's short factors are used for all texts; --max-model-len above 256 selects the long ones" in caplog.text


def test_dynamic_scaling_serves_longer_texts_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def spec_of(name: str, factor: float, served_len: int | None) -> ModelSpec:
        extra = {"rope_parameters": {"rope_type": "dynamic", "factor": factor}, "max_position_embeddings": 1024}
        return load_hf_directory(write_hf(tmp_path / name, TinyLlama(), extra=extra), served_len=served_len).spec

    with caplog.at_level(logging.INFO, "penstock"):
        assert spec_of("a", 2.0, None).max_model_len == 1024
        assert "as trained, for up to 1024 tokens; --max-model-len up to 2048 stretches them" in caplog.text
        assert spec_of("b", 2.0, 1500).max_model_len == 1500
        assert "use the frequencies for 1500 tokens; --max-model-len 1024 or less keeps the trained ones" in caplog.text
        assert spec_of("c", 2.0, 5000).max_model_len == 2048  # and --max-model-len 5000 is refused
        assert spec_of("d", 1.0, 5000).max_model_len == 1024
        assert "as trained, for up to 1024 tokens; scaling by 1 never acts" in caplog.text


def test_yarn_serves_longer_texts_when_asked(tmp_path: Path):
    """Qwen's model cards add YaRN to a config.json, whose max_position_embeddings stay."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    extra = {"rope_scaling": scaling, "max_position_embeddings": 1024}
    directory = write_hf(tmp_path / "m", TinyLlama(), extra=extra)
    keys = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024}
    metadata = {"context_length": 1024, **{f"rope.{key}": value for key, value in keys.items()}}
    file = write_gguf(tmp_path / "m.gguf", TinyLlama(), extra={f"llama.{key}": value for key, value in metadata.items()})
    for served_len, wanted in ((None, 1024), (512, 1024), (3000, 3000), (9999, 4096)):
        assert load_hf_directory(directory, served_len=served_len).spec.max_model_len == wanted
        assert load_gguf(file, served_len=served_len).spec.max_model_len == wanted


def test_a_layer_without_dynamic_scaling_keeps_texts_short(tmp_path: Path):
    ropes = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_theta": 1e4}}
    extra = {"rope_parameters": ropes, "layer_types": list(ropes), "max_position_embeddings": 1024}
    assert load_hf_directory(write_hf(tmp_path, TinyLlama(), extra=extra), served_len=1500).spec.max_model_len == 1024


def test_each_type_of_layer_may_have_a_rope_of_its_own_or_none(tmp_path: Path):
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}, "none": None}
    extra = {"rope_parameters": ropes, "layer_types": ["sliding_attention", "none", "full_attention"]}
    spec = load_hf_directory(write_hf(tmp_path, TinyLlama(num_layers=3), extra=extra)).spec
    first, second, third = (layer.attention.rotation for layer in spec.layers)
    assert first == Rotation(inv_freq=rope.inverse_frequencies(16, 1e4))
    assert second is None
    assert third == Rotation(inv_freq=rope.inverse_frequencies(16, 1e6))


WITHOUT_MEASURE: dict[str, dict[str, Any]] = {
    "turns": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320, "original_max_position_embeddings": 64},
    "length": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400},
    "long integer": {"rope_type": "linear", "factor": 10**400},
    "theta": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
    "share": {"partial_rotary_factor": 1e308},
    "tiny share": {"partial_rotary_factor": 1e-9},
    "factors": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 9},
    "factor that is no number": {"rope_type": "longrope", "short_factor": [1.0] * 7 + ["1"], "long_factor": [1.0] * 8},
    "factor out of range": {"rope_type": "longrope", "short_factor": [1.0] * 7 + [10**400], "long_factor": [1.0] * 8},
    "type of layer": {"full_attention": {"rope_theta": 1e4}},
}


def test_types_of_layers_are_few(tmp_path: Path):
    """Each has frequencies of its own: as many as there may be layers would take minutes."""
    names = [f"type {number}" for number in range(100)]
    extra = {"rope_parameters": {name: {"rope_theta": 1e4} for name in names}, "layer_types": names, "num_hidden_layers": 100}
    with pytest.raises(ModelError, match="100 types of layers"):
        load_hf_directory(write_hf(tmp_path, TinyLlama(), extra=extra))


@pytest.mark.parametrize("case", WITHOUT_MEASURE)
def test_parameters_that_make_no_rotation_are_refused(case: str, tmp_path: Path):
    extra = {"rope_parameters": WITHOUT_MEASURE[case], "layer_types": ["full_attention", "other"]}
    with pytest.raises(ModelError, match=r"config\.json"):
        load_hf_directory(write_hf(tmp_path, TinyLlama(), extra=extra), served_len=100_000)


def test_yarn_of_a_gguf_file_is_that_of_a_directory(tmp_path: Path):
    model = TinyLlama(head_dim=64, max_model_len=1024)
    scaling = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 256}
    path = write_gguf(tmp_path / "m.gguf", model, extra={f"llama.rope.{key}": value for key, value in scaling.items()})
    rotation = load_gguf(path).spec.layers[0].attention.rotation
    assert rotation is not None
    wanted = rotation_of(tmp_path, model, OF_TRANSFORMERS["yarn"][0])
    assert rotation.inv_freq == pytest.approx(wanted.inv_freq)
    assert rotation.attention_factor == pytest.approx(wanted.attention_factor)


@pytest.mark.parametrize(("multiplier", "wanted"), [(0.0, 1.1386294), (1.0, 1.0), (0.5, 1.0648223)])
def test_yarn_s_attention_factor_of_a_gguf_file(multiplier: float, wanted: float, tmp_path: Path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_log_multiplier": multiplier}
    extra = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    rotation = load_gguf(write_gguf(tmp_path / "m.gguf", TinyLlama(), extra=extra)).spec.layers[0].attention.rotation
    assert rotation is not None
    assert rotation.attention_factor == pytest.approx(wanted)


ATTN_FACTOR = 0.8782488562869419
"""In DeepSeek-R1-0528-Qwen3-8B, whose YaRN by 4 has no attention factor in effect."""


def test_attn_factor_multiplies_yarn_s_attention_factor(tmp_path: Path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attn_factor": ATTN_FACTOR}
    assert rotation_of(tmp_path / "a", TinyLlama(), scaling).attention_factor == pytest.approx(1.0)
    given = rotation_of(tmp_path / "b", TinyLlama(), {**scaling, "attention_factor": 1.5})
    assert given.attention_factor == 1.5
    with pytest.raises(ModelError, match="attn_factor"):
        rotation_of(tmp_path / "c", TinyLlama(), {**scaling, "attn_factor": -1.0})


@pytest.mark.parametrize(("found", "wanted"), [(ATTN_FACTOR, 1.0), (1.0, 1.1386294), (1.1386294, 1.1386294)])
def test_yarn_attn_factor_of_a_gguf_file(found: float, wanted: float, tmp_path: Path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_attn_factor": found}
    extra = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    rotation = load_gguf(write_gguf(tmp_path / "m.gguf", TinyLlama(), extra=extra)).spec.layers[0].attention.rotation
    assert rotation is not None
    assert rotation.attention_factor == pytest.approx(wanted)


def test_long_and_short_factors_of_a_gguf_file(tmp_path: Path):
    metadata = {"scaling.type": "longrope", "scaling.original_context_length": 64, "scaling.attn_factor": 1.25}
    extra = {f"llama.rope.{key}": value for key, value in metadata.items()}
    with pytest.raises(ModelError, match=r"rope_factors_long\.weight"):
        load_gguf(write_gguf(tmp_path / "without.gguf", TinyLlama(), extra=extra))
    path = write_gguf(tmp_path / "m.gguf", TinyLlama(rope_scaling="longrope"), extra=extra)
    plain = rope.inverse_frequencies(16, 10000.0)
    for served_len, factors in ((64, SHORT), (65, LONG), (None, LONG)):
        rotation = load_gguf(path, served_len=served_len).spec.layers[0].attention.rotation
        divided = tuple(freq / factor for freq, factor in zip(plain, factors, strict=True))
        assert rotation == Rotation(inv_freq=divided, attention_factor=1.25)
