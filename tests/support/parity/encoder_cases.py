"""Owns the table of tiny encoders by which each class of them is held to transformers: their configs, shapes and poolings.

`make_encoder_golden.py` keeps what transformers answers to three texts; `test_encoders.py` asks our own loaders and backends. A
directory is one of sentence-transformers if the case has modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.models.architectures import find
from penstock.types.model_spec import Pooling
from support.parity.golden import GOLDEN_DIR
from support.parity.tiny import FloatArray, Gguf, Shapes, TinyCase, case_token_ids, write_case
from support.parity.tiny_cases import GPT_OSS, GPT_OSS_FACTORS, GPT_OSS_TRANSPOSED, gpt_oss_shapes, settings, shapes
from support.tiny_models import TOKENIZER_METADATA, GgufValue, write_gguf_file, write_safetensors

DENSE_SIZE = 50
"""Width of the dense module of a case with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCase(TinyCase):
    pooling: Pooling = "mean"
    """The pooling of a model without a head."""
    has_modules: bool = True
    """The directory has a modules.json, which names the pooling; without one it is the mean."""
    has_dense: bool = False
    """A dense module with tanh follows the pooling, `2_Dense`, whose tensors are among the shapes."""
    is_normalised: bool = False
    old_weights: Callable[[Mapping[str, FloatArray]], dict[str, FloatArray]] | None = None
    """Makes the tensors of the directory of those that transformers has."""
    is_mutated: bool = False
    """`test_encoders.py` changes each of its settings: one case for each description is enough."""

    @property
    def has_head(self) -> bool:
        return self.hf_class.endswith("Classification")


@dataclass(frozen=True, slots=True)
class Text:
    token_ids: tuple[int, ...]
    second_at: int = 0


def texts(case: EncoderCase) -> list[Text]:
    """All of the case's tokens, a pair, and a single token."""
    ids = tuple(case_token_ids(case))
    return [Text(ids), Text(ids[:29], 13), Text(ids[5:6])]


def write_encoder(case: EncoderCase, directory: Path) -> Path:
    """The path to load."""
    if case.gguf is not None:
        directory.mkdir(parents=True, exist_ok=True)
        is_like_llama = "rms_norm_eps" in case.config
        return write_case(case, directory) if is_like_llama else _write_gguf(case, case.gguf, directory / "tiny.gguf")
    if case.has_head or not case.has_modules:
        return write_case(case, directory)
    own = {name: shape for name, shape in case.shapes.items() if "/" not in name}
    path = write_case(replace(case, shapes=own), directory)
    if case.old_weights is not None:
        write_safetensors(path / "model.safetensors", case.old_weights(case.weights()), "f32")
    modules: list[tuple[str, str, dict[str, Any]]] = [("Transformer", "", {})]
    if case.pooling == "sparse":
        modules = [("MLMTransformer", "", {}), ("SpladePooling", "1_SpladePooling", {"pooling_strategy": "max"})]
    elif case.pooling != "each":
        modules.append(("Pooling", "1_Pooling", _pooling(case)))
    if case.has_dense:
        activation = "torch.nn.modules.activation.Tanh"
        config = {"in_features": case.config["hidden_size"], "out_features": DENSE_SIZE, "bias": True}
        names = {f"module_{end}_name": "token_embeddings" for end in ("input", "output") if case.pooling == "each"}
        modules.append(("Dense", "2_Dense", {**config, **names, "activation_function": activation}))
    if case.is_normalised:
        modules.append(("Normalize", "3_Normalize", {}))
    kinds = [{"type": f"sentence_transformers.models.{kind}", "path": folder} for kind, folder, _ in modules]
    (path / "modules.json").write_text(json.dumps(kinds))
    for _, folder, config in modules[1:]:
        (path / folder).mkdir()
        (path / folder / "config.json").write_text(json.dumps(config))
    if case.has_dense:
        others = {name.split("/")[1]: values for name, values in case.weights().items() if "/" in name}
        write_safetensors(path / "2_Dense" / "model.safetensors", others, "f32")
    return path


def _write_gguf(case: EncoderCase, gguf: Gguf, path: Path) -> Path:
    """As llama.cpp's converter would: without poolers and heads of masked models, and without positions that no text has."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config, key = find(case.architecture).hf_values(case.config), gguf.architecture
    names = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    ggufs = get_tensor_name_map(names[key], config["num_hidden_layers"])
    tensors: dict[str, FloatArray] = {}
    for name, values in (case.old_weights or dict)(case.weights()).items():
        bare = name.removeprefix("bert.").removeprefix("roberta.").removeprefix("model.").removeprefix("distilbert.")
        if bare.startswith(("pooler.", "cls.", "lm_head.", "2_Dense", "vocab_")):
            continue
        if case.architecture == "modernbert":  # the converter's names for a head of two layers
            bare = bare.replace("classifier.", "classifier.out_proj.")
        if "position_embeddings" in bare:
            values = values[-config["max_position_embeddings"] :]
        found = ggufs.get_name(bare, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"llama.cpp has no name for {name}"
        tensors[found] = values
    metadata: dict[str, GgufValue] = {
        f"{key}.block_count": config["num_hidden_layers"],
        f"{key}.context_length": config["max_position_embeddings"],
        f"{key}.embedding_length": config["hidden_size"],
        f"{key}.feed_forward_length": config["intermediate_size"],
        f"{key}.attention.head_count": config["num_attention_heads"],
        f"{key}.attention.layer_norm_epsilon": config["rms_norm_eps"],
        f"{key}.attention.causal": False,
        **TOKENIZER_METADATA,
        **{f"{key}.{name}": value for name, value in gguf.metadata.items() if value is not None},
    }
    return write_gguf_file(path, key, metadata, tensors, case.vocab_size, matrix_type=gguf.matrix_type)


def _pooling(case: EncoderCase) -> dict[str, Any]:
    switches = {"first": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    return {f"pooling_mode_{end}": pooling == case.pooling for pooling, end in switches.items()}


def load_states(name: str) -> list[FloatArray]:
    """The golden answers to `texts`: rows of numbers, one for each text or one for each token."""
    with np.load(GOLDEN_DIR / "encoders.npz") as data:
        return [data[f"{name}/{number}"] for number in range(3)]


def _config(model_type: str, hf_class: str, **changes: Any) -> dict[str, Any]:
    """A config.json of the kind of BERT's: three heads of 24 columns. None of the texts has a padding token."""
    own = {
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": None,
        "rope_parameters": None,
        "tie_word_embeddings": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "layer_norm_eps": 0.05,
        "hidden_act": "gelu",
        "max_position_embeddings": 48,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    return settings(model_type, hf_class, **{**own, **changes})


_LABELS = {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}


def _linear(name: str, num_rows: int, num_cols: int) -> Shapes:
    return {f"{name}.weight": (num_rows, num_cols), f"{name}.bias": (num_rows,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _bert_shapes(config: Mapping[str, Any], prefix: str = "", **others: Shapes) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    found: Shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        **_norm("embeddings.LayerNorm", hidden),
    }
    for number in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{number}"
        for name in ("query", "key", "value"):
            found |= _linear(f"{at}.attention.self.{name}", hidden, hidden)
        found |= _linear(f"{at}.attention.output.dense", hidden, hidden) | _norm(f"{at}.attention.output.LayerNorm", hidden)
        found |= _linear(f"{at}.intermediate.dense", inner, hidden) | _linear(f"{at}.output.dense", hidden, inner)
        found |= _norm(f"{at}.output.LayerNorm", hidden)
    return {f"{prefix}{name}": shape for name, shape in found.items()} | {
        name: shape for shapes in others.values() for name, shape in shapes.items()
    }


def _masked_lm(config: Mapping[str, Any], hf_class: str) -> Shapes:
    """The head that nobody computes; its matrix is that of the embeddings."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    if hf_class.startswith(("Bert", "Deberta")):
        at = "cls.predictions"
        norm = _norm(f"{at}.transform.LayerNorm", hidden)
        return {f"{at}.bias": (vocab,)} | _linear(f"{at}.transform.dense", hidden, hidden) | norm
    return {"lm_head.bias": (vocab,)} | _linear("lm_head.dense", hidden, hidden) | _norm("lm_head.layer_norm", hidden)


def _bert_cases(model_type: str, stem: str, seed: int, **changes: Any) -> dict[str, EncoderCase]:
    """A case of each class of BERT or of its kin."""
    cases: dict[str, EncoderCase] = {}
    prefix = "bert." if model_type == "bert" else "roberta."
    for number, (name, end) in enumerate(CLASSES.items()):
        hf_class = stem + end
        config = _config(model_type, hf_class, **changes)
        hidden = config["hidden_size"]
        pooler, others = _linear("pooler.dense", hidden, hidden), {}
        if end == "Model":
            found = _bert_shapes(config, "", pooler=pooler)
        else:
            if end == "ForMaskedLM":
                others = _masked_lm(config, stem)
            else:
                config |= _LABELS
                others = _linear("classifier", 3, hidden)
            if end == "ForSequenceClassification" and model_type == "bert":
                others |= {f"bert.{key}": shape for key, shape in pooler.items()}
            elif end == "ForSequenceClassification":
                others = _linear("classifier.dense", hidden, hidden) | _linear("classifier.out_proj", 3, hidden)
            found = _bert_shapes(config, prefix, others=others)
        cases[f"{model_type}{name}"] = EncoderCase(
            architecture="bert" if model_type == "bert" else "roberta", config=config, shapes=found, seed=seed + number
        )
    return cases


def _xlm_roberta_xl_cases() -> dict[str, EncoderCase]:
    """RoBERTa's cases with other norms: before the halves of a layer, and one at the end."""
    cases: dict[str, EncoderCase] = {}
    found = _bert_cases("xlm-roberta-xl", "XLMRobertaXL", 200, pad_token_id=2, max_position_embeddings=50)
    for name, case in found.items():
        shapes: Shapes = {}
        for key, shape in case.shapes.items():
            key = key.replace("attention.output.LayerNorm", "attention.self_attn_layer_norm")
            key = key.replace("output.LayerNorm", "LayerNorm").replace("embeddings.LayerNorm", "encoder.LayerNorm")
            shapes[key] = shape
        cases[name.replace("-", "_")] = replace(case, architecture="xlm_roberta_xl", shapes=shapes)
    return cases


def _electra_cases() -> dict[str, EncoderCase]:
    """Embeddings of 40 columns, or of as many as the layers have."""
    cases: dict[str, EncoderCase] = {}
    kinds = {**CLASSES, "_discriminator": "ForPreTraining", "_of_one_width": "Model"}
    for number, (name, end) in enumerate(kinds.items()):
        width = 72 if name == "_of_one_width" else 40
        config = _config("electra", f"Electra{end}", embedding_size=width)
        found = {
            key: (*shape[:-1], width) if key.startswith("embeddings.") else shape for key, shape in _bert_shapes(config).items()
        }
        found |= _linear("embeddings_project", 72, 40) if width == 40 else {}
        others: Shapes = {}
        if end == "ForMaskedLM":
            others = _norm("generator_predictions.LayerNorm", 40) | _linear("generator_predictions.dense", 40, 72)
            others |= {"generator_lm_head.bias": (263,)}
        elif end == "ForPreTraining":
            at = "discriminator_predictions"
            others = _linear(f"{at}.dense", 72, 72) | _linear(f"{at}.dense_prediction", 1, 72)
        elif end == "ForSequenceClassification":
            others = _linear("classifier.dense", 72, 72) | _linear("classifier.out_proj", 3, 72)
        elif end == "ForTokenClassification":
            others = _linear("classifier", 3, 72)
        config |= _LABELS if end.endswith("Classification") else {}
        cases[f"electra{name}"] = _case("electra", config, found, others, "electra.", 260 + number)
    return cases


CLASSES = {
    "": "Model",
    "_masked_lm": "ForMaskedLM",
    "_classes": "ForSequenceClassification",
    "_tokens": "ForTokenClassification",
}
"""End of a case's name -> end of its class."""


def _distilbert_cases() -> dict[str, EncoderCase]:
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate(CLASSES.items()):
        own = {"dim": 72, "n_layers": 2, "n_heads": 3, "hidden_dim": 100, "activation": "gelu", "layer_norm_eps": None}
        renamed = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"))
        config = _config("distilbert", f"DistilBert{end}", **own, **renamed, type_vocab_size=None)
        found: Shapes = {"embeddings.word_embeddings.weight": (263, 72), "embeddings.position_embeddings.weight": (48, 72)}
        found |= _norm("embeddings.LayerNorm", 72)
        for layer in range(2):
            at = f"transformer.layer.{layer}"
            for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
                found |= _linear(f"{at}.attention.{part}", 72, 72)
            found |= _norm(f"{at}.sa_layer_norm", 72) | _norm(f"{at}.output_layer_norm", 72)
            found |= _linear(f"{at}.ffn.lin1", 100, 72) | _linear(f"{at}.ffn.lin2", 72, 100)
        others: Shapes = {}
        if end == "ForMaskedLM":
            others = _linear("vocab_transform", 72, 72) | _norm("vocab_layer_norm", 72) | {"vocab_projector.bias": (263,)}
        elif end != "Model":
            config |= _LABELS
            others = _linear("classifier", 3, 72)
            if end == "ForSequenceClassification":
                others |= _linear("pre_classifier", 72, 72)
        cases[f"distilbert{name}"] = _case("distilbert", config, found, others, "distilbert.", 130 + number)
    return cases


def _case(architecture: str, config: dict[str, Any], shapes: Shapes, others: Shapes, prefix: str, seed: int) -> EncoderCase:
    """A case whose tensors but for `others` have the prefix in front, if its class has a head."""
    is_bare = config["architectures"][0].endswith("Model")
    named = shapes if is_bare else {f"{prefix}{name}": shape for name, shape in shapes.items()}
    return EncoderCase(architecture=architecture, config=config, shapes={**named, **others}, seed=seed)


def _mpnet_cases() -> dict[str, EncoderCase]:
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate(CLASSES.items()):
        config = _config("mpnet", f"MPNet{end}", type_vocab_size=None, pad_token_id=1, max_position_embeddings=50)
        found: Shapes = {"embeddings.word_embeddings.weight": (263, 72), "embeddings.position_embeddings.weight": (50, 72)}
        found |= _norm("embeddings.LayerNorm", 72) | {"encoder.relative_attention_bias.weight": (32, 3)}
        for layer in range(2):
            at = f"encoder.layer.{layer}"
            for part in "qkvo":
                found |= _linear(f"{at}.attention.attn.{part}", 72, 72)
            found |= _norm(f"{at}.attention.LayerNorm", 72) | _norm(f"{at}.output.LayerNorm", 72)
            found |= _linear(f"{at}.intermediate.dense", 100, 72) | _linear(f"{at}.output.dense", 72, 100)
        others: Shapes = {}
        if end == "Model":
            others = _linear("pooler.dense", 72, 72)
        elif end == "ForMaskedLM":
            others = _masked_lm(config, "MPNet")
        else:
            config |= _LABELS
            others = _linear("classifier", 3, 72)
            if end == "ForSequenceClassification":
                others = _linear("classifier.dense", 72, 72) | _linear("classifier.out_proj", 3, 72)
        cases[f"mpnet{name}"] = _case("mpnet", config, found, others, "mpnet.", 140 + number)
    return cases


def _albert_cases() -> dict[str, EncoderCase]:
    """Three layers with the weights of one."""
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate(CLASSES.items()):
        config = _config("albert", f"Albert{end}", embedding_size=40, num_hidden_layers=3, hidden_act="gelu_new")
        at = "encoder.albert_layer_groups.0.albert_layers.0"
        found: Shapes = {
            "embeddings.word_embeddings.weight": (263, 40),
            "embeddings.position_embeddings.weight": (48, 40),
            "embeddings.token_type_embeddings.weight": (2, 40),
            **_norm("embeddings.LayerNorm", 40),
            **_linear("encoder.embedding_hidden_mapping_in", 72, 40),
        }
        for part in ("query", "key", "value", "dense"):
            found |= _linear(f"{at}.attention.{part}", 72, 72)
        found |= _norm(f"{at}.attention.LayerNorm", 72) | _norm(f"{at}.full_layer_layer_norm", 72)
        found |= _linear(f"{at}.ffn", 100, 72) | _linear(f"{at}.ffn_output", 72, 100)
        others: Shapes = {}
        if end == "Model":
            found |= _linear("pooler", 72, 72)
        elif end == "ForMaskedLM":
            others = _norm("predictions.LayerNorm", 40) | _linear("predictions.dense", 40, 72) | {"predictions.bias": (263,)}
        else:
            config |= _LABELS
            others = _linear("classifier", 3, 72)
            if end == "ForSequenceClassification":
                found |= _linear("pooler", 72, 72)
        cases[f"albert{name}"] = _case("albert", config, found, others, "albert.", 210 + number)
    return cases


def _privacy_filter_cases() -> dict[str, EncoderCase]:
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate({"": "Model", "_tokens": "ForTokenClassification"}.items()):
        config = {**GPT_OSS, "model_type": "openai_privacy_filter", "architectures": [f"OpenAIPrivacyFilter{end}"]}
        config = {key: value for key, value in config.items() if key not in ("hidden_act", "layer_types")}
        found = {key.removeprefix("model."): shape for key, shape in gpt_oss_shapes(config).items() if key != "lm_head.weight"}
        others: Shapes = {}
        if end == "ForTokenClassification":
            # Of all experts: rounded activations choose another one for some tokens, whose scores then differ much.
            config |= {**_LABELS, "num_experts_per_tok": 7}
            others = _linear("score", 3, 72)
        case = _case("privacy_filter", config, found, others, "model.", 220 + number)
        cases[f"privacy_filter{name}"] = replace(case, transposed=GPT_OSS_TRANSPOSED, factors=GPT_OSS_FACTORS)
    return cases


def _deberta_cases() -> dict[str, EncoderCase]:
    """Far distances share rows in two cases, and each has its own in the others, as in the first files of DeBERTa 2."""
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate(CLASSES.items()):
        config = _config("deberta-v2", f"DebertaV2{end}", type_vocab_size=0, pooler_hidden_size=72, pooler_dropout=0.0)
        config |= {"relative_attention": True, "position_biased_input": False, "share_att_key": True}
        config |= {"norm_rel_ebd": "layer_norm", "pos_att_type": ["c2p", "p2c"] if number % 2 else "p2c|c2p"}
        config |= {"max_relative_positions": 10} if number % 2 else {"max_relative_positions": 20, "position_buckets": 8}
        found: Shapes = {"embeddings.word_embeddings.weight": (263, 72)} | _norm("embeddings.LayerNorm", 72)
        found |= {"encoder.rel_embeddings.weight": (20 if number % 2 else 16, 72)} | _norm("encoder.LayerNorm", 72)
        for layer in range(2):
            at = f"encoder.layer.{layer}"
            for part in ("query", "key", "value"):
                found |= _linear(f"{at}.attention.self.{part}_proj", 72, 72)
            found |= _linear(f"{at}.attention.output.dense", 72, 72) | _norm(f"{at}.attention.output.LayerNorm", 72)
            found |= _linear(f"{at}.intermediate.dense", 100, 72) | _linear(f"{at}.output.dense", 72, 100)
            found |= _norm(f"{at}.output.LayerNorm", 72)
        others: Shapes = {}
        if end == "ForMaskedLM":
            others = _masked_lm(config, "DebertaV2")
        elif end != "Model":
            config |= _LABELS
            others = _linear("classifier", 3, 72)
            if end == "ForSequenceClassification":
                others |= _linear("pooler.dense", 72, 72)
        case = _case("deberta_v2", config, found, others, "deberta.", 200 + number)
        cases[f"deberta{name}"] = replace(case, norm_centre=2.0)  # so that distances matter
    return cases


def _modernbert_cases() -> dict[str, EncoderCase]:
    """Four layers, the first and the last of which see everything. The old form of the settings is that of the second case."""
    cases: dict[str, EncoderCase] = {}
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    }
    for number, (name, end) in enumerate(CLASSES.items()):
        has_biases = end == "ForTokenClassification"
        config = _config(
            "modernbert",
            f"ModernBert{end}",
            hidden_act=None,
            hidden_activation="silu" if end == "ForMaskedLM" else "gelu",
            layer_norm_eps=None,
            norm_eps=0.05,
            norm_bias=has_biases,
            attention_bias=has_biases,
            mlp_bias=has_biases,
            classifier_bias=has_biases,
            classifier_activation="relu",
            classifier_pooling="mean",
            num_hidden_layers=4,
            local_attention=9,
            type_vocab_size=None,
            rope_parameters=ropes,
        )
        if end == "ForMaskedLM":
            del config["rope_parameters"]
            config |= {"global_rope_theta": 500.0, "local_rope_theta": 20.0, "global_attn_every_n_layers": 2}
        norm = _norm if has_biases else _matrix
        linear = _linear if has_biases else _matrix
        found: Shapes = {"embeddings.tok_embeddings.weight": (263, 72)} | norm("embeddings.norm", 72) | norm("final_norm", 72)
        for layer in range(4):
            at = f"layers.{layer}"
            found |= norm(f"{at}.attn_norm", 72) if layer else {}
            found |= linear(f"{at}.attn.Wqkv", 216, 72) | linear(f"{at}.attn.Wo", 72, 72) | norm(f"{at}.mlp_norm", 72)
            found |= linear(f"{at}.mlp.Wi", 200, 72) | linear(f"{at}.mlp.Wo", 72, 100)
        others: Shapes = {}
        if end != "Model":
            others = linear("head.dense", 72, 72) | norm("head.norm", 72)
            others |= {"decoder.bias": (263,)} if end == "ForMaskedLM" else _linear("classifier", 3, 72)
            config |= {} if end == "ForMaskedLM" else _LABELS
        cases[f"modernbert{name}"] = _case("modernbert", config, found, others, "model.", 150 + number)
    return cases


def _matrix(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape}


def _nomic_cases() -> dict[str, EncoderCase]:
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate(CLASSES.items()):
        rope = {"rope_type": "default", "rope_theta": 300.0}
        config = _config("nomic_bert", f"NomicBert{end}", hidden_act="silu", rope_parameters=rope)
        found: Shapes = {"embeddings.word_embeddings.weight": (263, 72), "embeddings.token_type_embeddings.weight": (2, 72)}
        found |= _norm("embeddings.LayerNorm", 72)
        for layer in range(2):
            at = f"layers.{layer}"
            for part in "qkvo":
                found |= _matrix(f"{at}.self_attn.{part}_proj", 72, 72)
            for part in ("gate", "up"):
                found |= _matrix(f"{at}.mlp.{part}_proj", 100, 72)
            found |= _matrix(f"{at}.mlp.down_proj", 72, 100)
            found |= _norm(f"{at}.post_attention_layernorm", 72) | _norm(f"{at}.post_mlp_layernorm", 72)
        others: Shapes = {}
        if end == "ForMaskedLM":
            transform = "cls.predictions.transform"
            others = _linear(f"{transform}.dense", 72, 72) | _norm(f"{transform}.layer_norm", 72)
            others |= {"cls.predictions.bias": (263,)}
        elif end != "Model":
            config |= _LABELS
            others = _linear("classifier", 3, 72)
            if end == "ForSequenceClassification":
                others |= _linear("nomic_bert.pooler.dense", 72, 72)
        cases[f"nomic_bert{name}"] = _case("nomic_bert", config, found, others, "nomic_bert.", 160 + number)
    return cases


def _gte_cases() -> dict[str, EncoderCase]:
    """The rotation is that of the makers' `ntk` of 8, in heads of 24 columns."""
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate({**CLASSES, "_without_types": "Model"}.items()):
        turn = {"rope_type": "linear", "factor": 8 ** (2 / 24), "rope_theta": 8 * 30.0}
        num_types = 0 if name == "_without_types" else 2
        config = _config("gte", f"Gte{end}", rope_parameters=turn, type_vocab_size=num_types)
        found: Shapes = {"embeddings.word_embeddings.weight": (263, 72)} | _norm("embeddings.LayerNorm", 72)
        found |= {"embeddings.token_type_embeddings.weight": (2, 72)} if num_types else {}
        for layer in range(2):
            at = f"layers.{layer}"
            for part in "qkvo":
                found |= _linear(f"{at}.self_attn.{part}_proj", 72, 72)
            for part in ("gate", "up"):
                found |= _matrix(f"{at}.mlp.{part}_proj", 100, 72)
            found |= _linear(f"{at}.mlp.down_proj", 72, 100)
            found |= _norm(f"{at}.post_attention_layernorm", 72) | _norm(f"{at}.post_mlp_layernorm", 72)
        others: Shapes = {}
        if end == "ForMaskedLM":
            others = _linear("lm_head.dense", 72, 72) | _norm("lm_head.layer_norm", 72) | {"lm_head.decoder.bias": (263,)}
        elif end != "Model":
            config |= _LABELS
            others = _linear("classifier", 3, 72)
            if end == "ForSequenceClassification":
                others |= _linear("gte.pooler.dense", 72, 72)
        cases[f"gte{name}"] = _case("gte", config, found, others, "gte.", 270 + number)
    return cases


OLD_GTE = {
    "architectures": ["NewModel"],
    "model_type": "new",
    "hidden_act": "gelu",
    "hidden_size": 72,
    "intermediate_size": 100,
    "layer_norm_eps": 0.05,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "max_position_embeddings": 48,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 30,
    "type_vocab_size": 2,
    "vocab_size": 263,
}


def old_gte_weights(weights: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Tensors by the names that the makers of the model gave them."""
    renamed = {
        "post_attention_layernorm": "attn_ln",
        "post_mlp_layernorm": "mlp_ln",
        "self_attn.": "attention.",
        "layers.": "encoder.layer.",
    }
    found: dict[str, FloatArray] = {}
    for name, values in weights.items():
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, values = name.replace("q_proj", "qkv_proj"), np.concatenate(parts)
        if "up_proj" in name:
            parts = [values, weights[name.replace("up_proj", "gate_proj")]]
            name, values = name.replace("up_proj", "up_gate_proj"), np.concatenate(parts)
        if ".k_proj" in name or ".v_proj" in name or ".gate_proj" in name:
            continue
        for new, old in renamed.items():
            name = name.replace(new, old)
        found[name if name.startswith(("classifier.", "lm_head.")) else f"new.{name.removeprefix('gte.')}"] = values
    return found


def _old_gte_cases() -> dict[str, EncoderCase]:
    cases: dict[str, EncoderCase] = {}
    for name, end in CLASSES.items():
        config = {**OLD_GTE, "architectures": [f"New{end}"], **(_LABELS if end.endswith("Classification") else {})}
        case = _GTE[f"gte{name}"]
        cases[f"gte_old_names{name}"] = replace(case, old_config=config, old_weights=old_gte_weights, golden=f"gte{name}")
    return cases


def _jina_3_cases() -> dict[str, EncoderCase]:
    cases: dict[str, EncoderCase] = {}
    for number, (name, end) in enumerate(CLASSES.items()):
        turn = {"rope_type": "default", "rope_theta": 50.0}
        config = _config("jina_embeddings_v3", f"JinaEmbeddingsV3{end}", rope_parameters=turn)
        found: Shapes = {"embeddings.word_embeddings.weight": (263, 72), "embeddings.token_type_embeddings.weight": (2, 72)}
        found |= _norm("embeddings.LayerNorm", 72)
        for layer in range(2):
            at = f"layers.{layer}"
            for part in "qkvo":
                found |= _linear(f"{at}.self_attn.{part}_proj", 72, 72)
            found |= _linear(f"{at}.mlp.fc1", 100, 72) | _linear(f"{at}.mlp.fc2", 72, 100)
            found |= _norm(f"{at}.post_attention_layernorm", 72) | _norm(f"{at}.post_mlp_layernorm", 72)
        others: Shapes = {}
        if end == "Model":
            found |= _linear("pooler.dense", 72, 72)
        elif end == "ForMaskedLM":
            others = _masked_lm(config, "Roberta")
        else:
            config |= _LABELS
            others = _linear("classifier", 3, 72)
            if end == "ForSequenceClassification":
                others = _linear("classifier.dense", 72, 72) | _linear("classifier.out_proj", 3, 72)
        cases[f"jina_3{name}"] = _case("jina_3", config, found, others, "roberta.", 294 + number)
    return cases


def _jina_cases() -> dict[str, EncoderCase]:
    """Five heads, which are no power of two."""
    cases: dict[str, EncoderCase] = {}
    own = {"hidden_size": 80, "num_attention_heads": 5, "position_embedding_type": "alibi"}
    for number, (name, end) in enumerate((("", "Model"), ("_masked_lm", "ForMaskedLM"))):
        config = _config("bert", f"JinaBert{end}", **own, feed_forward_type="reglu" if number else "geglu")
        found: Shapes = {"embeddings.word_embeddings.weight": (263, 80), "embeddings.token_type_embeddings.weight": (2, 80)}
        found |= _norm("embeddings.LayerNorm", 80)
        for layer in range(2):
            at = f"encoder.layer.{layer}"
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                found |= _linear(f"{at}.attention.{part}", 80, 80)
            found |= _norm(f"{at}.attention.output.LayerNorm", 80) | _norm(f"{at}.mlp.layernorm", 80)
            found |= _matrix(f"{at}.mlp.gated_layers", 200, 80) | _linear(f"{at}.mlp.wo", 80, 100)
        others = _masked_lm(config, "Bert") if number else _linear("pooler.dense", 80, 80)
        case = _case("jina_bert", config, found, others, "bert.", 180 + number)
        cases[f"jina_bert{name}"] = replace(case, factors={"self.query.weight": 3.0})
    return cases


OLD_NOMIC = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 0.05,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 72,
    "n_head": 3,
    "n_inner": 100,
    "n_layer": 2,
    "n_positions": 48,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 300,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 263,
}
"""config.json as the makers of the model wrote it."""


def old_nomic_weights(weights: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Tensors by the names that the makers of the model gave them; queries, keys and values are one."""
    renamed = {
        "embeddings.LayerNorm": "emb_ln",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12",
        "mlp.down_proj": "mlp.fc2",
        "layers.": "encoder.layers.",
    }
    found: dict[str, FloatArray] = {}
    for name, values in weights.items():
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, values = name.replace("self_attn.q_proj", "attn.Wqkv"), np.concatenate(parts)
        if "k_proj" in name or "v_proj" in name:
            continue
        for new, old in renamed.items():
            name = name.replace(new, old)
        found[name] = values
    return found


_NOMIC_EXPERTS = {
    **OLD_NOMIC,
    "activation_function": "gelu",
    "expert_choice_router": False,
    "ffn_div": 1,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 3,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_layer": 5,
    "num_experts": 7,
    "num_shared_experts": 0,
    "qkv_proj_bias": True,
    "type_vocab_size": 1,
}


def _nomic_experts_cases() -> dict[str, EncoderCase]:
    """Layers 1 and 4 of five have experts. GGUF files lack the bias of their sum, which is 0 in that case."""
    found: Shapes = {"embeddings.word_embeddings.weight": (263, 72), "embeddings.token_type_embeddings.weight": (1, 72)}
    found |= _norm("emb_ln", 72)
    for layer in range(5):
        at = f"encoder.layers.{layer}"
        found |= _linear(f"{at}.attn.Wqkv", 216, 72) | _linear(f"{at}.attn.out_proj", 72, 72)
        found |= _norm(f"{at}.norm1", 72) | _norm(f"{at}.norm2", 72)
        if layer in (1, 4):
            found |= _matrix(f"{at}.mlp.router.layer", 7, 72) | {f"{at}.mlp.experts.bias": (72,)}
            found |= {f"{at}.mlp.experts.mlp.{name}": (700, 72) for name in ("w1", "w2")}
        else:
            found |= _linear(f"{at}.mlp.fc1", 100, 72) | _linear(f"{at}.mlp.fc2", 72, 100)
    factors = {"Wqkv.weight": 3.0}  # scores depend on the rotation
    case = EncoderCase(architecture="nomic_bert", config=_NOMIC_EXPERTS, shapes=found, seed=310, factors=factors)
    metadata = {
        "pooling_type": 1,
        "rope.freq_base": 300.0,
        "expert_count": 7,
        "expert_used_count": 2,
        "moe_every_n_layers": 3,
    }
    return {
        "nomic_bert_experts": replace(case, is_mutated=True),
        "nomic_bert_experts_first_token": replace(case, pooling="first", seed=311),
        "nomic_bert_experts_gguf": replace(
            case,
            architecture="nomic_bert_moe",
            factors={**factors, "experts.bias": 0.0},
            old_weights=_nomic_experts_in_gguf,
            gguf=Gguf(architecture="nomic-bert-moe", metadata=metadata),
        ),
    }


def _nomic_experts_in_gguf(weights: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Return the tensors as llama.cpp's converter reshapes them before it names them."""
    found: dict[str, FloatArray] = {}
    for name, values in weights.items():
        if name.endswith((".w1", ".w2")):
            cube = values.reshape(7, 100, 72)
            found[f"{name}.weight"] = np.ascontiguousarray(cube.swapaxes(1, 2)) if name.endswith(".w2") else cube
        elif not name.endswith("experts.bias"):
            found[name] = values
    return found


def _qwen3(hf_class: str, **changes: Any) -> dict[str, Any]:
    return settings("qwen3", hf_class, num_hidden_layers=3, **changes)


_QWEN3 = _qwen3("Qwen3ForCausalLM")
_QWEN3_SHAPES = shapes(_QWEN3, self_attn__q_norm__weight=(24,), self_attn__k_norm__weight=(24,))
_QWEN3_MODEL = _qwen3("Qwen3Model")
_QWEN3_BARE = {name.removeprefix("model."): shape for name, shape in _QWEN3_SHAPES.items() if name != "lm_head.weight"}


def _decoder(name: str, hf_class: str, seed: int, shapes: Shapes, config: dict[str, Any], **own: Any) -> EncoderCase:
    """A decoder that reads texts with its last token: a class without a head has bare names, as `AutoModel` saves them."""
    found = {key: shape for key, shape in shapes.items() if key != "lm_head.weight"}
    if hf_class.endswith("Model"):
        found = {key.removeprefix("model."): shape for key, shape in found.items()}
    else:
        labels: dict[str, str] = {**_LABELS, **config}["id2label"]
        config = {**_LABELS, **config}
        found["score.weight"] = (len(labels), config["hidden_size"])
    config = {**config, "architectures": [hf_class]}
    usual: dict[str, Any] = {"pooling": "last", "has_modules": False}
    return EncoderCase(architecture=name, config=config, shapes=found, seed=seed, **{**usual, **own})


_DECODER_CONFIG = {
    "llama": settings("llama", "LlamaForCausalLM", num_key_value_heads=3),
    "mistral": settings("mistral", "MistralForCausalLM", sliding_window=6),
    "qwen2": settings("qwen2", "Qwen2ForCausalLM", num_hidden_layers=3),
}
_DECODER_SHAPES = {
    "llama": shapes(_DECODER_CONFIG["llama"]),
    "mistral": shapes(_DECODER_CONFIG["mistral"]),
    "qwen2": shapes(
        _DECODER_CONFIG["qwen2"],
        self_attn__q_proj__bias=(72,),
        self_attn__k_proj__bias=(24,),
        self_attn__v_proj__bias=(24,),
    ),
    "qwen3": _QWEN3_SHAPES,
}


def _decoder_cases() -> dict[str, EncoderCase]:
    cases: dict[str, EncoderCase] = {}
    for number, (name, stem) in enumerate((("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"))):
        config, shapes_of = _DECODER_CONFIG[name], _DECODER_SHAPES[name]
        cases[f"{name}_model"] = _decoder(name, f"{stem}Model", 210 + number, shapes_of, config)
        cases[f"{name}_classes"] = _decoder(name, f"{stem}ForSequenceClassification", 220 + number, shapes_of, config)
    # The last token of the last layer sees all others with either mask, so these take the mean. Larger queries make
    # scores that depend on the rotation.
    own = {"pooling": "mean", "has_modules": True, "is_mutated": True, "factors": {"q_proj.weight": 3.0}}
    for number, (name, stem) in enumerate((("mistral", "Mistral"), ("qwen2", "Qwen2"))):
        config = {**_DECODER_CONFIG[name], "is_causal": False}
        cases[f"{name}_both_ways"] = _decoder(name, f"{stem}Model", 230 + number, _DECODER_SHAPES[name], config, **own)
    one = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    two = {"id2label": {"0": "yes", "1": "no"}, "label2id": {"yes": 0, "no": 1}}
    cases["qwen3_score"] = _decoder("qwen3", "Qwen3ForSequenceClassification", 223, _QWEN3_SHAPES, {**_QWEN3, **one})
    cases["qwen3_classes"] = _decoder("qwen3", "Qwen3ForSequenceClassification", 224, _QWEN3_SHAPES, {**_QWEN3, **two})
    for name, labels, answers in (("score", {"0": "yes"}, ["yes", "no"]), ("classes", {"0": "no", "1": "yes"}, ["no", "yes"])):
        case = cases[f"qwen3_{name}"]
        cases[f"qwen3_{name}_gguf"] = replace(
            case,
            config={**case.config, "id2label": labels},
            golden=f"qwen3_{name}",
            gguf=Gguf(architecture="qwen3", metadata={"pooling_type": 4, "classifier.output_labels": answers}),
        )
    for name, is_interleaved in (("llama", True), ("qwen2", False)):
        gguf = Gguf(architecture=name, metadata={"pooling_type": 3}, is_interleaved=is_interleaved)
        cases[f"{name}_model_gguf"] = replace(cases[f"{name}_model"], golden=f"{name}_model", gguf=gguf)
    return cases


def _eurobert_cases() -> dict[str, EncoderCase]:
    """A classifier for each pooling. `late`, the default, is the mean of the tokens' scores."""
    cases: dict[str, EncoderCase] = {}
    kinds = {**CLASSES, "_first_token": "ForSequenceClassification", "_mean": "ForSequenceClassification"}
    for number, (name, end) in enumerate(kinds.items()):
        has_biases = end == "ForTokenClassification"
        own = {"attention_bias": has_biases, "mlp_bias": has_biases, "hidden_act": "gelu" if has_biases else "silu"}
        config = settings("eurobert", f"EuroBert{end}", mask_token_id=4, **own)
        biases = {f"self_attn__{part}_proj__bias": (72 if part in "qo" else 24,) for part in "qkvo"}
        biases |= {f"mlp__{part}_proj__bias": (72 if part == "down" else 100,) for part in ("gate", "up", "down")}
        found = shapes(config, **(biases if has_biases else {}))
        if end != "ForMaskedLM":
            del found["lm_head.weight"]
        if end == "Model":
            found = {key.removeprefix("model."): shape for key, shape in found.items()}
        elif end != "ForMaskedLM":
            config |= _LABELS
            found |= _linear("classifier", 3, 72)
        if end == "ForSequenceClassification":
            config |= {"_first_token": {"classifier_pooling": "bos"}, "_mean": {"classifier_pooling": "mean"}}.get(name, {})
            found |= _linear("dense", 72, 72)
        cases[f"eurobert{name}"] = EncoderCase(architecture="eurobert", config=config, shapes=found, seed=240 + number)
    gguf = Gguf(architecture="eurobert", metadata={"pooling_type": 1, "attention.causal": False, "rope.scaling.type": "none"})
    cases["eurobert_gguf"] = replace(cases["eurobert"], golden="eurobert", gguf=gguf)
    return cases


_NEOBERT = {
    "architectures": ["NeoBERT"],
    "dim_head": 24,
    "hidden_size": 72,
    "intermediate_size": 150,
    "max_length": 64,
    "model_type": "neobert",
    "norm_eps": 0.05,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "vocab_size": 263,
}
"""150 columns mean 104 in the MLP: two thirds, rounded up to a multiple of 8."""


def _neobert_cases() -> dict[str, EncoderCase]:
    bare = _matrix("encoder", 263, 72) | {"layer_norm.weight": (72,)}
    for layer in range(3):
        at = f"transformer_encoder.{layer}"
        bare |= {f"{at}.{name}.weight": (72,) for name in ("attention_norm", "ffn_norm")}
        bare |= _matrix(f"{at}.qkv", 216, 72) | _matrix(f"{at}.wo", 72, 72)
        bare |= _matrix(f"{at}.ffn.w12", 208, 72) | _matrix(f"{at}.ffn.w3", 72, 104)
    headed = {f"model.{name}": shape for name, shape in bare.items()}
    case = EncoderCase(architecture="neobert", config=_NEOBERT, shapes=bare, seed=320, factors={"qkv.weight": 3.0})
    words = {**_NEOBERT, "architectures": ["NeoBERTLMHead"]}
    classes = {**_NEOBERT, **_LABELS, "architectures": ["NeoBERTForSequenceClassification"]}
    scores = _linear("dense", 72, 72) | _linear("classifier", 3, 72)
    return {
        "neobert": replace(case, is_mutated=True),
        "neobert_words": replace(
            case, config=words, shapes=headed | _linear("decoder", 263, 72), pooling="first", is_normalised=True, seed=321
        ),
        "neobert_classes": replace(case, config=classes, shapes=headed | scores, factors={}, seed=322),
    }


def _embedding_gemma_cases() -> dict[str, EncoderCase]:
    """The sixth of seven layers sees all tokens, the others 4 to each side."""
    norms = {f"{half}_feedforward_layernorm__weight": (72,) for half in ("pre", "post")}
    config = settings(
        "gemma3_text",
        "Gemma3TextModel",
        num_hidden_layers=7,
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        rms_norm_eps=0.05,
        query_pre_attn_scalar=24,
        sliding_window=9,
        use_bidirectional_attention=True,
        layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
    )
    found = shapes(config, **norms, self_attn__q_norm__weight=(24,), self_attn__k_norm__weight=(24,))
    bare = {name.removeprefix("model."): shape for name, shape in found.items()}
    case = EncoderCase(architecture="embedding_gemma", config=config, shapes=bare, seed=250, norm_centre=0.0)
    metadata = {"attention.sliding_window": 9, "rope.freq_base": 3000.0, "rope.freq_base_swa": 200.0, "pooling_type": 1}
    dense = {**bare, **_linear("2_Dense/linear", DENSE_SIZE, 72)}
    scaled = {**config, "query_pre_attn_scalar": 17}
    return {
        "embedding_gemma": replace(case, is_mutated=True, has_modules=False),
        "embedding_gemma_dense": replace(case, config=scaled, shapes=dense, seed=251, has_dense=True, is_normalised=True),
        "embedding_gemma_gguf": replace(
            case, golden="embedding_gemma", gguf=Gguf(architecture="gemma-embedding", norm_offset=1.0, metadata=metadata)
        ),
    }


_DISTILBERT, _MPNET, _MODERNBERT, _NOMIC = _distilbert_cases(), _mpnet_cases(), _modernbert_cases(), _nomic_cases()
_PRIVACY_FILTER = _privacy_filter_cases()
_GTE, _JINA_3, _DEBERTA, _ALBERT = _gte_cases(), _jina_3_cases(), _deberta_cases(), _albert_cases()
_JINA, _ELECTRA, _EUROBERT = _jina_cases(), _electra_cases(), _eurobert_cases()
_BERT = _bert_cases("bert", "Bert", 100)
_ROBERTA = _bert_cases("roberta", "Roberta", 110, pad_token_id=2, type_vocab_size=1, max_position_embeddings=50)
_CAMEMBERT = _bert_cases("camembert", "Camembert", 190, pad_token_id=5, type_vocab_size=1, max_position_embeddings=53)
_XLM_ROBERTA_XL = _xlm_roberta_xl_cases()
_XLM_ROBERTA = _bert_cases("xlm-roberta", "XLMRoberta", 120, pad_token_id=2, type_vocab_size=1, max_position_embeddings=50)

_CLS = {"pooling_type": 2}
_GGUF_LABELS = {"classifier.output_labels": ["bad", "fair", "good"]}
_MODERNBERT_HEAD = replace(
    _MODERNBERT["modernbert_classes"],
    config={**_MODERNBERT["modernbert_classes"].config, "classifier_activation": "gelu", "classifier_pooling": "cls"},
    seed=155,
)
_MODERNBERT_GGUF = Gguf(
    architecture="modern-bert",
    metadata={
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 3000.0,
        "rope.freq_base_swa": 70.0,
        "rope.scaling.type": "none",
        "hidden_activation": "gelu",
    },
)
_MODERNBERT_HEAD_GGUF = replace(
    _MODERNBERT_GGUF, metadata={**_MODERNBERT_GGUF.metadata, "classifier.pooling_type": 2, **_GGUF_LABELS}
)

ENCODERS: Mapping[str, EncoderCase] = MappingProxyType(
    {
        "bert": replace(_BERT["bert"], is_normalised=True),
        "bert_first_token": replace(_BERT["bert"], pooling="first", seed=104, is_mutated=True),
        "bert_dense": replace(
            _BERT["bert"],
            seed=105,
            is_mutated=True,
            has_dense=True,
            is_normalised=True,
            shapes={**_BERT["bert"].shapes, **_linear("2_Dense/linear", DENSE_SIZE, 72)},
        ),
        "bert_late": replace(
            _BERT["bert"],
            seed=106,
            pooling="each",
            is_mutated=True,
            has_dense=True,
            is_normalised=True,
            shapes={**_BERT["bert"].shapes, **_linear("2_Dense/linear", DENSE_SIZE, 72)},
        ),
        "bert_sparse": replace(_BERT["bert_masked_lm"], seed=107, pooling="sparse", is_mutated=True),
        "distilbert_sparse": replace(_DISTILBERT["distilbert_masked_lm"], seed=108, pooling="sparse"),
        "mpnet_sparse": replace(_MPNET["mpnet_masked_lm"], seed=109, pooling="sparse"),
        "roberta_sparse": replace(_ROBERTA["roberta_masked_lm"], seed=119, pooling="sparse"),
        "bert_masked_lm": replace(_BERT["bert_masked_lm"], has_modules=False),
        "bert_classes": _BERT["bert_classes"],
        "bert_tokens": _BERT["bert_tokens"],
        "roberta": _ROBERTA["roberta"],
        "roberta_masked_lm": replace(_ROBERTA["roberta_masked_lm"], pooling="last"),
        "roberta_classes": _ROBERTA["roberta_classes"],
        "roberta_tokens": _ROBERTA["roberta_tokens"],
        "xlm_roberta": replace(_XLM_ROBERTA["xlm-roberta"], pooling="first", is_normalised=True),
        "xlm_roberta_masked_lm": _XLM_ROBERTA["xlm-roberta_masked_lm"],
        "xlm_roberta_classes": _XLM_ROBERTA["xlm-roberta_classes"],
        "xlm_roberta_tokens": _XLM_ROBERTA["xlm-roberta_tokens"],
        **_CAMEMBERT,
        "camembert": replace(_CAMEMBERT["camembert"], pooling="last"),
        **_XLM_ROBERTA_XL,
        "xlm_roberta_xl": replace(_XLM_ROBERTA_XL["xlm_roberta_xl"], is_mutated=True),
        **_DISTILBERT,
        **_JINA,
        "jina_bert": replace(_JINA["jina_bert"], is_mutated=True),
        **_MPNET,
        **_DEBERTA,
        **_ALBERT,
        **_PRIVACY_FILTER,
        "privacy_filter": replace(_PRIVACY_FILTER["privacy_filter"], is_mutated=True),
        "albert": replace(_ALBERT["albert"], is_mutated=True),
        "deberta": replace(_DEBERTA["deberta"], is_mutated=True),
        **_MODERNBERT,
        **_NOMIC,
        "mpnet": replace(_MPNET["mpnet"], is_mutated=True),
        "modernbert": replace(_MODERNBERT["modernbert"], is_mutated=True),
        "nomic_bert": replace(_NOMIC["nomic_bert"], is_mutated=True),
        "nomic_bert_old_names": replace(
            _NOMIC["nomic_bert"], old_config=OLD_NOMIC, old_weights=old_nomic_weights, golden="nomic_bert"
        ),
        **_nomic_experts_cases(),
        "bert_gguf": replace(
            _BERT["bert"], pooling="first", golden="bert_first_token", seed=104, gguf=Gguf(architecture="bert", metadata=_CLS)
        ),
        "distilbert_gguf": replace(
            _DISTILBERT["distilbert"],
            golden="distilbert",
            gguf=Gguf(architecture="bert", metadata={}),
            architecture="distilbert",
        ),
        "roberta_last_gguf": replace(
            _ROBERTA["roberta_masked_lm"],
            pooling="last",
            golden="roberta_masked_lm",
            gguf=Gguf(architecture="bert", metadata={"pooling_type": 3}),
        ),
        "roberta_classes_gguf": replace(
            _ROBERTA["roberta_classes"],
            golden="roberta_classes",
            gguf=Gguf(architecture="bert", metadata=_GGUF_LABELS),
        ),
        "nomic_bert_gguf": replace(
            _NOMIC["nomic_bert"],
            golden="nomic_bert",
            old_weights=old_nomic_weights,
            gguf=Gguf(architecture="nomic-bert", metadata={"pooling_type": 1, "rope.freq_base": 300.0}),
        ),
        "modernbert_head": _MODERNBERT_HEAD,
        "modernbert_head_gguf": replace(
            _MODERNBERT_HEAD,
            golden="modernbert_head",
            gguf=replace(
                _MODERNBERT_GGUF, metadata={**_MODERNBERT_GGUF.metadata, "classifier.pooling_type": 2, **_GGUF_LABELS}
            ),
        ),
        "modernbert_gguf": replace(_MODERNBERT["modernbert"], golden="modernbert", gguf=_MODERNBERT_GGUF),
        "qwen3_embedding": EncoderCase(
            architecture="qwen3", config=_QWEN3, shapes=_QWEN3_SHAPES, seed=170, pooling="last", is_normalised=True
        ),
        **_GTE,
        **_JINA_3,
        "gte": replace(_GTE["gte"], is_mutated=True),
        **_old_gte_cases(),
        **_ELECTRA,
        "electra": replace(_ELECTRA["electra"], is_mutated=True),
        **_EUROBERT,
        "eurobert": replace(_EUROBERT["eurobert"], is_mutated=True),
        **_neobert_cases(),
        **_embedding_gemma_cases(),
        **_decoder_cases(),
        "qwen3_model": EncoderCase(
            architecture="qwen3", config=_QWEN3_MODEL, shapes=_QWEN3_BARE, seed=171, pooling="last", has_modules=False
        ),
    }
)
