"""BERT, RoBERTa and DistilBERT: encoders, whose tokens see each other both ways, with learned positions and norms behind the
halves of a layer.

RoBERTa has positions that begin behind that of its padding, and XLM-RoBERTa is RoBERTa with another vocabulary. A padding token
within a text is computed as any other. DistilBERT has no token types. Sources: arXiv 1810.04805, 1907.11692, 1911.02116 and
1910.01108; modeling_bert.py, modeling_roberta.py, modeling_xlm_roberta.py and modeling_distilbert.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models.architectures import GGUF_LAYER, Architecture, Head, HeadLayer
from penstock.models.decoder import Decoder
from penstock.models.gguf_tensors import matrix_shape
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation, GatedMlp, LayerSpec, ModelSpec, PlainMlp

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile


def describe(spec: ModelSpec) -> Program:
    """The program of one step."""
    build = Decoder(spec)
    x = build.norm(build.add_positions(build.add_types(build.embed())), "embed_norm", "x")
    return finish_layers(build, spec, x)


def finish_layers(build: Decoder, spec: ModelSpec, x: str) -> Program:
    """The program whose embeddings of tokens are x."""
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, x)
        x, attended = build.gather_after_last(layer, x, attended)
        x = build.norm(build.add_output(layer, x, attended), f"{at}.post_attn_norm", "x")
        x = build.norm(build.add_mlp(layer, x, x), f"{at}.post_mlp_norm", "x")
    return build.finish(x)


_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
_MAX_TYPES = 16


def values_with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the values that transformers takes where it has none. `tie_word_embeddings` is of a head that nobody
    computes."""
    found = {**_DEFAULTS, **{key: value for key, value in values.items() if value is not None}}
    return {**found, "rms_norm_eps": found["layer_norm_eps"], "tie_word_embeddings": False}


def values_with_positions_behind(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a model whose table of positions has rows for the padding and those before it, too."""
    found = values_with_defaults(values)
    padding = found.setdefault("pad_token_id", 1)
    if type(found["max_position_embeddings"]) is int and type(padding) is int:
        found["max_position_embeddings"] -= padding + 1
    return found


def _roberta_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values_with_positions_behind({"vocab_size": 50265, **values})


_DISTILBERT_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}


def _distilbert_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The epsilon of norms is built in."""
    found = {"num_hidden_layers": 6, **{_DISTILBERT_KEYS.get(key, key): value for key, value in values.items()}}
    return values_with_defaults({**found, "layer_norm_eps": 1e-12})


def of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """The spec of a BERT with no types yet, whose positions begin at the first row."""
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    return with_biases(replace(spec, norm="layer", has_norm_bias=True), read_activation(config, "hidden_act", "gelu"))


def with_biases(spec: ModelSpec, activation: Activation) -> ModelSpec:
    """The spec with layers of BERT's kind, in which everything has a bias."""

    def layer(_: int, one: LayerSpec) -> LayerSpec:
        mixer = replace(one.attention, rotation=None, mask="all", has_qkv_bias=True, has_o_bias=True)
        assert isinstance(one.mlp, GatedMlp)
        mlp = PlainMlp(intermediate_size=one.mlp.intermediate_size, activation=activation, has_bias=True)
        return replace(one, mixer=mixer, mlp=mlp)

    return spec.with_layers(layer)


def _of_bert(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return replace(of_hf(config, spec), num_types=read_num_types(config))


def read_num_types(config: JsonFile) -> int:
    """`type_vocab_size`. Raises ModelError for one beyond measure."""
    num_types = config.require("type_vocab_size", int)
    if not 0 < num_types <= _MAX_TYPES:
        raise config.error(f"type_vocab_size is {num_types}")
    return num_types


def _of_roberta(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    padding = config.require("pad_token_id", int)
    if not 0 <= padding < _MAX_TYPES:
        raise config.error(f"pad_token_id is {padding}")
    return replace(_of_bert(config, spec), first_position=padding + 1)


def bare_name(name: str) -> str:
    """The name of a tensor in a model without a head: others have `bert.` or the like in front of it.

    Files of the first releases call a norm's weight and bias gamma and beta.
    """
    bare = name.removeprefix("bert.").removeprefix("roberta.").removeprefix("distilbert.")
    return bare.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def bert_head(hf_class: str, _: JsonFile) -> Head | None:
    """The head of a class of BERT."""
    if hf_class.endswith("ForSequenceClassification"):
        return Head("first", (HeadLayer("pooler.dense", activation="tanh"), HeadLayer("classifier", is_last=True)))
    if hf_class.endswith("ForTokenClassification"):
        return Head("each", (HeadLayer("classifier", is_last=True),))
    return None


def roberta_head(hf_class: str, config: JsonFile) -> Head | None:
    """The head of a class of RoBERTa."""
    if hf_class.endswith("ForSequenceClassification"):
        layers = (HeadLayer("classifier.dense", activation="tanh"), HeadLayer("classifier.out_proj", is_last=True))
        return Head("first", layers)
    return bert_head(hf_class, config)


def _distilbert_head(hf_class: str, config: JsonFile) -> Head | None:
    if hf_class.endswith("ForSequenceClassification"):
        return Head("first", (HeadLayer("pre_classifier", activation="relu"), HeadLayer("classifier", is_last=True)))
    return bert_head(hf_class, config)


def of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """The spec of a BERT in a GGUF file. The converter leaves out the rows of positions that no text has."""
    return replace(with_biases(replace(spec, norm="layer", has_norm_bias=True), "gelu"), num_types=num_types_of_gguf(file))


def num_types_of_gguf(file: GgufFile) -> int:
    """The rows of the table of types, 0 without one. Raises ModelError for too many."""
    table = file.tensors.get("token_types.weight")
    num_types = 0 if table is None else matrix_shape(table)[0]
    if num_types > _MAX_TYPES:
        raise file.error(f"token_types.weight has {num_types} rows")
    return num_types


def _gguf_head(file: GgufFile) -> Head | None:
    """The head of a RoBERTa. The converter leaves out the first layer of a BERT's head, whose scores would be wrong."""
    if "cls.output.weight" not in file.tensors and "cls.weight" not in file.tensors:
        return None
    if "cls.output.weight" not in file.tensors or "cls.weight" not in file.tensors:
        raise ModelError(
            f"{file.path}: the head has one layer of two, cls and cls.output: its scores would be wrong.",
            remedy="Use the Hugging Face directory of the model.",
        )
    return Head("first", (HeadLayer("cls", activation="tanh"), HeadLayer("cls.output", is_last=True)))


GGUF_NORMS = {
    f"{theirs}.{end}": f"{ours}{bias}"
    for theirs, ours in (("attn_output_norm", "post_attn_norm"), ("layer_output_norm", "post_mlp_norm"))
    for end, bias in (("weight", ""), ("bias", "_bias"))
}
GGUF_TOP = {
    "token_embd.weight": "embed",
    "token_embd_norm.weight": "embed_norm",
    "token_embd_norm.bias": "embed_norm_bias",
    "token_types.weight": "types",
}
ENDS = (("weight", ""), ("bias", "_bias"))
"""End of a tensor's name -> end of ours."""


_LAYER = {
    "attention.self.query.weight": "q",
    "attention.self.query.bias": "q_bias",
    "attention.self.key.weight": "k",
    "attention.self.key.bias": "k_bias",
    "attention.self.value.weight": "v",
    "attention.self.value.bias": "v_bias",
    "attention.output.dense.weight": "o",
    "attention.output.dense.bias": "o_bias",
    "attention.output.LayerNorm.weight": "post_attn_norm",
    "attention.output.LayerNorm.bias": "post_attn_norm_bias",
    "intermediate.dense.weight": "up",
    "intermediate.dense.bias": "up_bias",
    "output.dense.weight": "down",
    "output.dense.bias": "down_bias",
    "output.LayerNorm.weight": "post_mlp_norm",
    "output.LayerNorm.bias": "post_mlp_norm_bias",
}
BERT = Architecture(
    describe=describe,
    is_encoder=True,
    of_hf=_of_bert,
    hf_values=values_with_defaults,
    hf_name=bare_name,
    hf_top={
        "embeddings.word_embeddings.weight": "embed",
        "embeddings.position_embeddings.weight": "positions",
        "embeddings.token_type_embeddings.weight": "types",
        "embeddings.LayerNorm.weight": "embed_norm",
        "embeddings.LayerNorm.bias": "embed_norm_bias",
    },
    hf_layers="encoder.layer.",
    hf_layer=_LAYER,
    hf_head=bert_head,
    hf_unread=("embeddings.position_ids", "cls.", "pooler."),
    of_gguf=of_gguf,
    gguf_top={**GGUF_TOP, "position_embd.weight": "positions"},
    gguf_layer={**GGUF_LAYER, **GGUF_NORMS},
    gguf_head=_gguf_head,
)
ROBERTA = replace(
    BERT, of_hf=_of_roberta, hf_values=_roberta_values, hf_head=roberta_head, hf_unread=(*BERT.hf_unread, "lm_head.")
)
DISTILBERT = replace(
    BERT,
    of_hf=of_hf,
    hf_values=_distilbert_values,
    hf_layers="transformer.layer.",
    hf_layer={
        f"{theirs}.{end}": f"{ours}{bias}"
        for theirs, ours in (
            ("attention.q_lin", "q"),
            ("attention.k_lin", "k"),
            ("attention.v_lin", "v"),
            ("attention.out_lin", "o"),
            ("sa_layer_norm", "post_attn_norm"),
            ("ffn.lin1", "up"),
            ("ffn.lin2", "down"),
            ("output_layer_norm", "post_mlp_norm"),
        )
        for end, bias in ENDS
    },
    hf_head=_distilbert_head,
    hf_unread=(*BERT.hf_unread, "vocab_"),
)
