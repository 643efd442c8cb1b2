"""LFM2's settings in all their forms, and what is refused. `tests/parity` holds its numbers to those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.native import footprint
from penstock.models.architectures import describe
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory, read_hf_spec
from penstock.models.program import Attention, KvWrite, ShortConv, StateShape
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ExpertsMlp, GatedMlp, ModelSpec, ShortConvSpec
from support.parity.tiny import Gguf, write_case
from support.parity.tiny_cases import CASES

LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}
"""Keys of the published config.json that count."""
CASE = CASES["lfm2"]


def spec_of(directory: Path, **changes: Any) -> ModelSpec:
    """The published model with other settings; None leaves a key out."""
    config = {key: value for key, value in {**LFM2_1_2B, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return read_hf_spec(directory)


def test_the_published_model_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert [layer for layer in range(16) if not isinstance(spec.layers[layer].mixer, ShortConvSpec)] == [2, 5, 8, 10, 12, 14]
    assert {layer.mlp for layer in spec.layers} == {GatedMlp(intermediate_size=8192)}
    assert spec.tie_word_embeddings
    assert spec.attentions[0].head_dim == 64
    program = describe(spec)
    assert (len(program.kv_shapes), program.state) == (6, StateShape(num_layers=10, num_columns=2, width=2048))
    assert [op.layer for op in program.ops if isinstance(op, Attention)] == list(range(6))
    assert [op.layer for op in program.ops if isinstance(op, KvWrite)] == list(range(6))
    assert [op.layer for op in program.ops if isinstance(op, ShortConv)] == list(range(10))


def test_blocks_that_a_convolution_reads_are_kept_though_no_window_reaches_them(tmp_path: Path) -> None:
    """Its inputs of two positions before may lie in the block before that of the last one."""
    program = describe(spec_of(tmp_path))
    assert program.window == 0
    for window, kept in ((1, 3), (2, 3), (3, 3), (40, 40)):
        ops = tuple(replace(op, window=window) if isinstance(op, Attention) else op for op in program.ops)
        assert replace(program, ops=ops).window == kept


def test_a_block_is_counted_with_its_state(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert footprint.kv_bytes_per_token(spec, KvDtype.INT8) == 6 * 8 * (2 * 64 + 2 * 3)
    assert footprint.state_bytes(spec) == 10 * 2 * 2048 * 2
    assert (
        footprint.block_bytes(spec, KvDtype.INT8, 16)
        == 16 * footprint.kv_bytes_per_token(spec, KvDtype.INT8) + 10 * 2 * 2048 * 2
    )


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ffn_dim_multiplier": 1.3}, 10752),
        ({"block_ffn_dim_multiplier": 2}, 16384),
        ({"block_multiple_of": 1000}, 9000),
        ({"block_ff_dim": None, "intermediate_size": 6912}, 4608),
        ({"block_ff_dim": 6912, "intermediate_size": 99}, 4608),
        ({"block_ff_dim": None}, 8192),
    ],
)
def test_the_width_of_an_mlp_follows_from_several_settings(tmp_path: Path, changes: dict[str, Any], width: int) -> None:
    assert {layer.mlp for layer in spec_of(tmp_path, **changes).layers} == {GatedMlp(intermediate_size=width)}


def test_a_multiplier_of_null_rounds_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LFM2_1_2B, "block_ff_dim": 100, "block_ffn_dim_multiplier": None}))
    assert read_hf_spec(tmp_path).layers[0].mlp == GatedMlp(intermediate_size=66)


def test_layers_all_attend_if_nothing_says_otherwise(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, full_attn_idxs=None)
    assert len(spec.attentions) == 16
    assert describe(spec).state is None
    assert footprint.state_bytes(spec) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_L_cache": 1}, "kernel has 1 positions, which is not supported"),
        ({"conv_L_cache": 0}, "kernel has 0 positions"),
        ({"conv_L_cache": 18}, "kernel has 18 positions"),
        ({"conv_L_cache": "3"}, "conv_L_cache is '3', not of type int"),
        ({"full_attn_idxs": []}, "no layer attends"),
        ({"layer_types": ["conv"] * 15 + ["mamba"]}, "layer_types has the unknown mamba"),
        ({"layer_types": ["conv"] * 15}, "layer_types is not a list of 16 strings"),
        ({"block_multiple_of": -1}, "do not give a valid width of the MLP"),
        ({"block_multiple_of": 0}, "do not give a valid width of the MLP"),
        ({"block_ffn_dim_multiplier": 0.0}, "do not give a valid width of the MLP"),
        ({"block_ffn_dim_multiplier": float("inf")}, "do not give a valid width of the MLP"),
        ({"block_ff_dim": "12288"}, "intermediate_size is '12288'"),
    ],
)
def test_what_is_refused_in_a_directory(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, **changes)


def test_what_is_refused_in_a_file(tmp_path: Path) -> None:
    def load(name: str, **changes: Any) -> ModelSpec:
        metadata = {
            "attention.head_count_kv": [0, 1, 0, 0],
            "shortconv.l_cache": 3,
            "feed_forward_length": 90,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return load_gguf(write_case(replace(CASE, gguf=Gguf(architecture="lfm2", metadata=metadata)), tmp_path / name)).spec

    assert [isinstance(layer.mixer, ShortConvSpec) for layer in load("right").layers] == [True, False, True, True]
    for words, changes in {
        "layers.1.k is 24 x 72, but the model's settings require 72 x 72": {"attention__head_count_kv": [0, 3, 0, 0]},
        "head_count_kv has 3 values for 4 layers": {"attention__head_count_kv": [0, 1, 0]},
        "no layer attends": {"attention__head_count_kv": [0, 0, 0, 0]},
        "sliding_window is set": {"attention__sliding_window": 6},
        "causal is false": {"attention__causal": False},
        "72 x 3, but the model's settings require 72 x 4": {"shortconv__l_cache": 4},
        "layers.2.q, layers.2.k, layers.2.v and 2 more are missing": {"attention__head_count_kv": [0, 1, 1, 0]},
    }.items():
        with pytest.raises(ModelError, match=words):
            load(words[:9], **changes)


def test_a_mixture_keeps_its_first_layers_dense(tmp_path: Path) -> None:
    moe = {"architectures": ["Lfm2MoeForCausalLM"], "intermediate_size": 7168}
    spec = spec_of(tmp_path, **moe)
    assert [layer.mlp for layer in spec.layers[:2]] == [GatedMlp(intermediate_size=7168)] * 2
    assert {layer.mlp for layer in spec.layers[2:]} == {
        ExpertsMlp(num_experts=32, num_experts_per_token=4, intermediate_size=1792, scoring="sigmoid", has_selection_bias=True)
    }
    assert footprint.state_bytes(spec) == 10 * 2 * 2048 * 2
    other = spec_of(tmp_path, **moe, num_dense_layers=0, norm_topk_prob=False, routed_scaling_factor=2.5, use_expert_bias=False)
    assert other.layers[0].mlp == ExpertsMlp(
        num_experts=32,
        num_experts_per_token=4,
        intermediate_size=1792,
        scoring="sigmoid",
        is_renormalised=False,
        share_factor=2.5,
    )
    for changes, words in (
        ({"num_experts_per_tok": 33}, "not a possible mixture"),
        ({"routed_scaling_factor": -1.0}, "shares is -1.0"),
    ):
        with pytest.raises(ModelError, match=words):
            spec_of(tmp_path, **moe, **changes)


def test_a_file_with_another_router_is_refused(tmp_path: Path) -> None:
    case = CASES["lfm2_moe_gguf"]
    assert case.gguf is not None
    softmax = replace(case.gguf, metadata={**case.gguf.metadata, "expert_gating_func": 1})
    with pytest.raises(ModelError, match=r"lfm2moe\.expert_gating_func is 1, which is not supported"):
        load_gguf(write_case(replace(case, gguf=softmax), tmp_path))


def test_kernels_are_matrices_whatever_their_shape_in_the_file(tmp_path: Path) -> None:
    directory = load_hf_directory(write_case(CASE, tmp_path / "hf")).weights["layers.0.conv"]
    file = load_gguf(write_case(CASES["lfm2_gguf"], tmp_path / "gguf")).weights["layers.0.conv"]
    assert (directory.num_rows, directory.num_cols) == (72, 3)
    assert np.array_equal(directory.dequantize(), file.dequantize())
    assert np.array_equal(directory.dequantize(), CASE.weights()["model.layers.0.conv.conv.weight"][:, 0])
