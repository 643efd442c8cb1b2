"""The settings of mixtures of experts, as files tell them: numbers that make no mixture, dense layers, names of older files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.footprint import expert_bytes
from penstock.models.architectures import describe
from penstock.models.assembly import find_pieces
from penstock.models.hf import load_hf_directory, read_hf_spec
from penstock.models.moe import GRANITE_MOE
from penstock.models.program import Experts
from penstock.models.weights import is_of_experts
from penstock.types.errors import ModelError
from penstock.types.model_spec import ExpertsMlp, GatedMlp
from support.models.moe import changed, load
from support.parity.tiny_cases import CASES
from support.tiny_models import write_hf_files


@pytest.mark.parametrize(("name", "is_renormalised"), [("mixtral", True), ("qwen3_moe_gguf", True), ("olmoe_gguf", False)])
def test_every_layer_has_the_experts_that_the_file_tells_of(tmp_path: Path, name: str, is_renormalised: bool) -> None:
    spec = load(CASES[name], tmp_path).spec
    mlp = ExpertsMlp(num_experts=7, num_experts_per_token=3, intermediate_size=40, is_renormalised=is_renormalised)
    assert [layer.mlp for layer in spec.layers] == [mlp, mlp]


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("mixtral", {"num_experts_per_tok": 8}, "8 of 7 experts"),
        ("mixtral", {"num_experts_per_tok": 0}, "0 of 7 experts"),
        ("mixtral", {"num_local_experts": 8}, "require"),
        ("mixtral", {"num_local_experts": 10**9}, "not a possible mixture"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "not a possible mixture"),
        ("qwen3_moe", {"num_experts": None}, "num_experts is missing"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_experts is 7, and num_local_experts is 8"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("granite_moe", {"logits_scaling": 0.0}, "logits_scaling"),
        ("qwen2_moe", {"shared_expert_intermediate_size": -1}, "a shared expert of -1 columns"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 55}, "shared_gate is 56 x 72"),
        ("qwen3_vl_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_vl_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_vl_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("glm4_moe", {"n_shared_experts": -1}, "a shared expert of -40 columns"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "shares is -1.0"),
        ("glm4_moe_gguf", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("glm4_moe_gguf", {"expert_group_count": 2}, "expert_group_count is 2"),
        ("glm4_moe_gguf", {"nextn_predict_layers": 3}, "nextn_predict_layers is 3"),
        ("glm4_moe_gguf", {"rope.dimension_sections": [4, 4, 4, 0]}, "rope.dimension_sections"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0"),
        ("ernie4_5_moe_gguf", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
        ("ernie4_5_moe_gguf", {"interleave_moe_layer_step": None}, "no ernie4_5-moe.interleave_moe_layer_step"),
        ("ernie4_5_moe_gguf", {"leading_dense_block_count": None}, "layers.1.expert_gate"),
        ("mixtral_gguf", {"expert_used_count": 9}, "9 of 7 experts"),
        ("mixtral_gguf", {"expert_gating_func": 2}, "llama.expert_gating_func is 2, which is not supported \\(1 is"),
        ("mixtral_gguf", {"expert_used_count": None}, "expert_used_count"),
        ("qwen3_moe_gguf", {"expert_shared_count": 1}, "expert_shared_count is 1"),
        ("granite_moe_gguf", {"residual_scale": -1.0}, "factor or cap"),
    ],
)
def test_what_is_no_mixture_or_more_than_one_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        load(changed(name, **changes), tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "granite_moe", "gpt_oss"])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_that_transformers_writes_for_the_number_of_experts_are_read(tmp_path: Path, name: str, key: str) -> None:
    """transformers 5.23 saves a Qwen 3 MoE with `num_local_experts`; the published files have `num_experts`."""
    case = changed(name, **{"num_experts": None, "num_local_experts": None, key: 7})
    mlps = [layer.mlp for layer in load(case, tmp_path).spec.layers]
    assert [mlp.num_experts for mlp in mlps if isinstance(mlp, ExpertsMlp)] == [7] * len(mlps)


def test_a_shared_expert_is_no_expert_that_a_token_chooses(tmp_path: Path) -> None:
    """It is computed as a mixture of one, needs memory for each token, and never lies on disk."""
    model = load(CASES["qwen2_moe"], tmp_path)
    ops = [op for op in describe(model.spec).ops if isinstance(op, Experts)]
    assert [(op.num_experts, op.down) for op in ops[:2]] == [(7, "layers.0.expert_down"), (1, "layers.0.shared_down")]
    assert {name.split(".")[-1] for name in model.weights if is_of_experts(name)} == {"expert_gate", "expert_up", "expert_down"}
    without = model.spec.with_layers(
        lambda _, layer: (
            replace(layer, mlp=replace(layer.mlp, shared_size=0, has_shared_gate=False))
            if isinstance(layer.mlp, ExpertsMlp)
            else layer
        )
    )
    assert expert_bytes(model.spec, 5) > expert_bytes(without, 5)


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_gguf"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    of_last = {key: shape for key, shape in case.shapes.items() if key.startswith("model.layers.2.")}
    more = {key.replace("layers.2.", "layers.3."): shape for key, shape in of_last.items()}
    more |= {"model.layers.3.eh_proj.weight": (72, 144), "model.layers.3.shared_head.norm.weight": (72,)}
    told = {"num_nextn_predict_layers": 1}
    gguf = None if case.gguf is None else replace(case.gguf, metadata={**case.gguf.metadata, "nextn_predict_layers": 1})
    whole = replace(case, shapes={**case.shapes, **more}, config={**case.config, **told}, gguf=gguf)
    usual, model = load(case, tmp_path / "usual"), load(whole, tmp_path / "whole")
    assert model.spec == usual.spec
    assert model.weights.keys() == usual.weights.keys()
    untold = replace(whole, config=case.config)
    with pytest.raises(ModelError, match=r"(layers|blk)\.3\."):
        load(untold if gguf is None else replace(whole, gguf=case.gguf), tmp_path / "untold")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight"), ("exaone_moe", "mtp.fc.weight"), ("mellum", "mtp.fc.weight")],
)
def test_a_part_that_predicts_further_tokens_is_left_out(tmp_path: Path, name: str, tensor: str) -> None:
    case = CASES[name]
    more = replace(case, shapes={**case.shapes, tensor: (100, 72)})
    assert load(more, tmp_path).weights.keys() == load(case, tmp_path).weights.keys()


def test_published_files_of_an_ernie_have_the_biases_of_its_choice_beside_the_router(tmp_path: Path) -> None:
    case = CASES["ernie4_5_moe"]
    older = {name.replace(".gate.moe_statics.", ".moe_statics."): values for name, values in case.weights().items()}
    write_hf_files(tmp_path, case.config, older, case.vocab_size)
    assert load_hf_directory(tmp_path).weights.keys() == load(case, tmp_path / "new").weights.keys()


def test_a_glm_4_5_that_says_little_has_defaults(tmp_path: Path) -> None:
    names = ("partial_rotary_factor", "n_shared_experts", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor")
    config = {key: value for key, value in CASES["glm4_moe"].config.items() if key not in (*names, "use_qk_norm")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second, _ = read_hf_spec(tmp_path).layers
    assert first.attention.rotation is not None
    assert (len(first.attention.rotation.inv_freq), first.attention.has_qk_norms, type(first.mlp)) == (6, False, GatedMlp)
    assert second.mlp == ExpertsMlp(
        num_experts=7,
        num_experts_per_token=3,
        intermediate_size=40,
        scoring="sigmoid",
        has_selection_bias=True,
        shared_size=40,
    )


def test_an_ernie_that_says_little_has_defaults(tmp_path: Path) -> None:
    config = dict(CASES["ernie4_5_moe"].config)
    short = {key: value for key, value in config.items() if not key.startswith(("moe_layer", "moe_num_shared", "rope"))}
    (tmp_path / "config.json").write_text(json.dumps({**short, "head_dim": 24}))
    spec = read_hf_spec(tmp_path)
    assert [layer.mlp.shared_size if isinstance(layer.mlp, ExpertsMlp) else 0 for layer in spec.layers] == [0, 80, 80, 80, 80]
    rotation = spec.layers[0].attention.rotation
    assert rotation is not None
    assert rotation.inv_freq[1] == pytest.approx(5e5 ** (-2 / 24))


@pytest.mark.parametrize("name", ["mixtral_gguf", "gpt_oss_gguf", "minimax_m2_gguf"])
def test_a_gguf_file_may_scale_the_shares_of_the_experts(tmp_path: Path, name: str) -> None:
    mlp = load(changed(name, expert_weights_scale=2.5), tmp_path).spec.layers[0].mlp
    assert isinstance(mlp, ExpertsMlp)
    assert mlp.share_factor == 2.5


def test_a_qwen_2_moe_has_biases_unless_it_says_that_it_has_none(tmp_path: Path) -> None:
    config = dict(CASES["qwen2_moe"].config)
    for told, has_bias in (({}, True), ({"qkv_bias": True}, True), ({"qkv_bias": False}, False)):
        (tmp_path / "config.json").write_text(json.dumps({**{k: v for k, v in config.items() if k != "qkv_bias"}, **told}))
        attention = read_hf_spec(tmp_path).layers[0].attention
        assert (attention.has_qkv_bias, attention.has_o_bias) == (has_bias, False)


def test_windows_of_a_qwen_3_moe_are_in_all_layers(tmp_path: Path) -> None:
    """`max_window_layers` says nothing here: in transformers it is a setting of the dense ones."""
    case = changed("qwen3_moe", use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert [layer.attention.window for layer in load(case, tmp_path).spec.layers] == [6, 6]


def test_heads_of_a_qwen_3_moe_share_the_hidden_columns_if_nothing_is_said(tmp_path: Path) -> None:
    """The dense ones have 128 columns then."""
    case = CASES["qwen3_moe"]
    config = {key: value for key, value in case.config.items() if key != "head_dim"}
    assert load(replace(case, config=config), tmp_path).spec.layers[0].attention.head_dim == 24


def test_a_layer_without_experts_has_an_mlp(tmp_path: Path) -> None:
    case = changed("qwen3_moe", mlp_only_layers=[1])
    dense = {"gate_proj": (100, 72), "up_proj": (100, 72), "down_proj": (72, 100)}
    shapes = {name: shape for name, shape in case.shapes.items() if not name.startswith("model.layers.1.mlp")}
    shapes |= {f"model.layers.1.mlp.{name}.weight": shape for name, shape in dense.items()}
    spec = load(replace(case, shapes=shapes), tmp_path).spec
    assert [type(layer.mlp) for layer in spec.layers] == [ExpertsMlp, GatedMlp]


@pytest.mark.parametrize("width", [40, 36, 72])
def test_experts_of_a_qwen_3_vl_moe_have_inputs_or_outputs_as_rows(tmp_path: Path, width: int) -> None:
    """Published files have inputs as rows, those that transformers 5.24 saves outputs. One of the tensors may be square."""
    case, hidden = CASES["qwen3_vl_moe"], 72
    new = {"experts.gate_up_proj": (7, 2 * width, hidden), "experts.down_proj": (7, hidden, width)}
    shapes = {name: next((new[end] for end in new if name.endswith(end)), shape) for name, shape in case.shapes.items()}
    case = replace(case, shapes=shapes, config={**case.config, "moe_intermediate_size": width})
    published = load(case, tmp_path / "published")
    saved = load(replace(case, turned=()), tmp_path / "saved")
    for name, weight in published.weights.items():
        assert np.array_equal(weight.dequantize(), saved.weights[name].dequantize()), name


def test_granite_files_of_older_releases_have_other_names() -> None:
    """The directory of the case has the newer ones."""
    at, layer = "model.layers.0.block_sparse_moe.", GRANITE_MOE.hf_layer
    older = ("router.layer.weight", "input_linear.weight", "output_linear.weight")
    newer = ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    found = []
    for names in (older, newer):
        block = re.compile(r"model\.layers\.(\d+)\.(.+)")
        pieces = find_pieces([at + name for name in names], top={}, block=block, layer=layer)
        found.append(
            {name: [(names.index(one.tensor.removeprefix(at)), one.part) for one in of] for name, of in pieces.items()}
        )
    assert found[0] == found[1]
    assert set(found[0]) == {f"layers.0.{name}" for name in ("router", "expert_gate", "expert_up", "expert_down")}
