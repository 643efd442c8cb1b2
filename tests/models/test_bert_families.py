"""Details of models that read texts, which no tiny model shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.models.bert import FARTHEST, NUM_BUCKETS, bucket, slopes
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.types.errors import ModelError
from support.parity.encoder_cases import ENCODERS, write_encoder

AHEAD = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 10, 10, 11]
"""Buckets of keys 0 to 23 tokens before the query, by transformers' `MPNetEncoder.relative_position_bucket`."""


def test_buckets_of_distances_are_those_of_transformers():
    assert [bucket(-distance) for distance in range(len(AHEAD))] == AHEAD
    assert [bucket(distance) for distance in range(1, len(AHEAD))] == [number + NUM_BUCKETS // 2 for number in AHEAD[1:]]
    ends = {31: 11, 32: 12, 45: 12, 46: 13, 63: 13, 64: 14, 90: 14, 91: 15, 128: 15}
    assert {distance: bucket(-distance) for distance in ends} == ends


def test_beyond_the_farthest_distance_the_bucket_stays():
    for sign in (-1, 1):
        assert {bucket(sign * distance) for distance in range(FARTHEST, 600)} == {bucket(sign * FARTHEST)}


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2**-number for number in range(1, 9)]),
        (12, [2**-number for number in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_slopes_of_alibi_are_those_of_the_paper(num_heads, expected):
    assert slopes(num_heads) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("jina_bert", {"max_position_embeddings": 1 << 20}, "the ALiBi table for it would be too large"),
        ("privacy_filter", {"sliding_window": None}, "sliding_window is missing"),
        ("privacy_filter", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("privacy_filter_tokens", {"token_classification_bias": False}, "dense.0_bias"),
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups is 2"),
        ("albert", {"inner_group_num": 2}, "inner_group_num is 2"),
        ("albert", {"embedding_size": 0}, "embedding_size is 0"),
        ("albert", {"embedding_size": 41}, "embed is 263 x 40"),
        ("deberta", {"relative_attention": False}, "relative_attention is False"),
        ("deberta", {"share_att_key": None}, "share_att_key is missing"),
        ("deberta", {"position_biased_input": True}, "position_biased_input is True"),
        ("deberta", {"norm_rel_ebd": "none"}, "norm_rel_ebd is 'none'"),
        ("deberta", {"pos_att_type": "c2p"}, "pos_att_type is 'c2p'"),
        ("deberta", {"pos_att_type": 7}, "pos_att_type is 7"),
        ("deberta", {"conv_kernel_size": 3}, "conv_kernel_size is 3"),
        ("deberta", {"type_vocab_size": 2}, "type_vocab_size is 2"),
        ("deberta", {"embedding_size": 71}, "embedding_size is 71"),
        ("deberta_classes", {"pooler_hidden_act": "mish"}, "pooler_hidden_act is 'mish'"),
        ("deberta", {"position_buckets": 32}, "position_buckets is 32, and max_relative_positions is 20"),
        ("deberta", {"position_buckets": 6}, "the tensor relative is|relative is 16 x 72"),
        ("deberta", {"max_relative_positions": 1 << 20}, "max_relative_positions is 1048576"),
        ("camembert", {"is_decoder": True}, "is_decoder is True"),
        ("camembert", {"pad_token_id": -1}, "pad_token_id is -1"),
        ("electra", {"embedding_size": 73}, "embedding_size is 73"),
        ("electra", {"embedding_size": 0}, "embedding_size is 0"),
        ("electra", {"embedding_size": 72}, "embed_project"),
        ("electra_of_one_width", {"is_decoder": True}, "is_decoder is True"),
        ("embedding_gemma", {"use_bidirectional_attention": False}, "use_bidirectional_attention is False"),
        ("embedding_gemma", {"use_bidirectional_attention": None}, "use_bidirectional_attention is missing"),
        ("embedding_gemma", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("embedding_gemma", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("eurobert_classes", {"classifier_pooling": "last"}, "classifier_pooling is 'last'"),
        ("eurobert_classes", {"clf_pooling": "max", "classifier_pooling": None}, "classifier_pooling is 'max'"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale is True"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 1.0}}, "rope_scaling is {'type': 'ntk', 'factor': 1.0}"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "rope_scaling is {.*mixed_b"),
        ("eurobert", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("eurobert_tokens", {"rope_parameters": {"rope_type": "ntk"}}, "rope_type is 'ntk'"),
        ("llama_classes", {"id2label": {"1": "bad"}}, "id2label does not name the columns"),
        ("mistral_model", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen2_model", {"is_causal": "no"}, "is_causal is 'no'"),
        ("qwen3_score", {"layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": 6}, "layer_types"),
        ("nomic_bert_old_names", {"activation_function": "geglu"}, "activation_function is 'geglu'"),
        ("nomic_bert_old_names", {"num_experts": 8}, "num_experts is 8"),
        ("nomic_bert_old_names", {"qkv_proj_bias": True}, "qkv_proj_bias is True"),
        ("nomic_bert_experts", {"mlp_fc2_bias": False}, "mlp_fc2_bias is False"),
        ("nomic_bert_experts", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is True"),
        ("nomic_bert_experts", {"expert_choice_router": True}, "expert_choice_router is True"),
        ("nomic_bert_experts", {"num_shared_experts": 1}, "num_shared_experts is 1"),
        ("nomic_bert_experts", {"ffn_div": 2}, "ffn_div is 2"),
        ("nomic_bert_experts", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("nomic_bert_experts", {"moe_top_k": None}, "moe_top_k is missing"),
        ("nomic_bert_experts", {"moe_top_k": 8}, "8 of 7 experts of 100 columns are not a possible mixture"),
        ("nomic_bert_experts", {"num_experts": 6}, "layers.1.router is 7 x 72, but .* require 6 x 72"),
        ("nomic_bert_experts", {"moe_every_n_layers": 1}, "moe_every_n_layers is 1"),
        ("nomic_bert_experts", {"moe_every_n_layers": 2}, "layers.1.expert_bias|layers.3.router"),
        ("nomic_bert_experts", {"moe_every_n_layers": 0}, "layers.1.up"),
        ("neobert", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("neobert", {"rope": False}, "rope is False"),
        ("neobert", {"rms_norm": False}, "rms_norm is False"),
        ("neobert", {"ngpt": True}, "ngpt is True"),
        ("neobert", {"dim_head": 36}, "dim_head is 36"),
        ("neobert", {"intermediate_size": 160}, "layers.0.(gate|up|down)"),
        ("neobert", {"num_attention_heads": 6}, "dim_head is 24"),
        ("xlm_roberta_xl", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("xlm_roberta_xl", {"type_vocab_size": 0}, "type_vocab_size is 0"),
        ("xlm_roberta_xl", {"add_cross_attention": True}, "add_cross_attention is True"),
    ],
)
def test_what_changes_the_numbers_and_is_not_computed_is_refused(tmp_path, name, changes, words):
    path = write_encoder(ENCODERS[name], tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words) as refusal:
        load_hf_directory(path)
    assert refusal.value.remedy


def test_a_stack_that_experts_do_not_divide_is_refused(tmp_path):
    case = ENCODERS["nomic_bert_experts"]
    shapes = {**case.shapes, "encoder.layers.1.mlp.experts.mlp.w2": (701, 72)}
    with pytest.raises(ModelError, match=r"layers\.1\.expert_down is 72 x 701, but .* require 504 x 100"):
        load_hf_directory(write_encoder(replace(case, shapes=shapes), tmp_path / "model"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_shared_count": 1}, r"expert_shared_count is 1"),
        ({"expert_weights_norm": True}, r"expert_weights_norm is True"),
        ({"expert_gating_func": 2}, r"expert_gating_func is 2"),
        ({"moe_every_n_layers": None}, r"moe_every_n_layers"),
        ({"moe_every_n_layers": 0}, r"moe_every_n_layers is 0"),
        ({"expert_count": None}, r"expert_count"),
        ({"expert_used_count": 0}, r"0 of 7 experts"),
    ],
)
def test_experts_of_nomic_bert_that_are_not_computed_are_refused_in_gguf_files(tmp_path, changes, words):
    case = ENCODERS["nomic_bert_experts_gguf"]
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, **changes})
    with pytest.raises(ModelError, match=words) as refusal:
        load_gguf(write_encoder(replace(case, gguf=gguf), tmp_path))
    assert refusal.value.remedy


def test_a_gguf_file_without_the_bias_of_experts_is_logged(tmp_path, caplog):
    load_gguf(write_encoder(ENCODERS["nomic_bert_experts_gguf"], tmp_path))
    assert "drops the bias of the experts' output" in caplog.text


def test_a_decoder_whose_tokens_see_later_ones_embeds_and_writes_nothing(tmp_path):
    """GTE-Qwen2 is such a model: its class is that of a decoder with an output."""
    path = write_encoder(ENCODERS["qwen3_embedding"], tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    assert {attention.mask for attention in load_hf_directory(path).spec.attentions} == {"all"}
    with pytest.raises(ModelError, match="is_causal is False"):
        load_hf_directory(path, task="generate")


def test_tensors_of_published_debertas_that_nothing_reads_are_passed_over(tmp_path):
    case = ENCODERS["deberta_classes"]
    more = {"position_ids": (1, 48), "position_embeddings.weight": (48, 72), "word_embeddings._weight": (263, 72)}
    shapes = {**case.shapes, **{f"deberta.embeddings.{name}": shape for name, shape in more.items()}}
    path = write_encoder(replace(case, shapes=shapes), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    spelled = {"norm_rel_ebd": "Layer_Norm", "pos_att_type": "C2P | p2c", "pooler_hidden_act": "tanh"}
    (path / "config.json").write_text(json.dumps(config | spelled))
    plain = load_hf_directory(write_encoder(case, tmp_path / "plain"))
    assert load_hf_directory(path).spec.attentions == plain.spec.attentions
