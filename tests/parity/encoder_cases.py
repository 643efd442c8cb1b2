"""Owns the table of tiny encoders by which each class of them is held to transformers: their configs, shapes and poolings.

`make_encoder_golden.py` keeps what transformers answers to three texts; `test_encoders.py` asks our own loaders and backends. A
directory is one of sentence-transformers if the case has modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.types.model_spec import Pooling
from tiny_models import write_safetensors

from .golden import GOLDEN_DIR
from .tiny import FloatArray, Shapes, TinyCase, case_token_ids, write_case
from .tiny_cases import settings

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
    if case.gguf is not None or case.has_head or not case.has_modules:
        return write_case(case, directory)
    own = {name: shape for name, shape in case.shapes.items() if "/" not in name}
    path = write_case(replace(case, shapes=own), directory)
    modules: list[tuple[str, str, dict[str, Any]]] = [("Transformer", "", {}), ("Pooling", "1_Pooling", _pooling(case))]
    if case.has_dense:
        activation = "torch.nn.modules.activation.Tanh"
        config = {"in_features": case.config["hidden_size"], "out_features": DENSE_SIZE, "bias": True}
        modules.append(("Dense", "2_Dense", {**config, "activation_function": activation}))
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
    if hf_class.startswith("Bert"):
        at = "cls.predictions"
        norm = _norm(f"{at}.transform.LayerNorm", hidden)
        return {f"{at}.bias": (vocab,)} | _linear(f"{at}.transform.dense", hidden, hidden) | norm
    return {"lm_head.bias": (vocab,)} | _linear("lm_head.dense", hidden, hidden) | _norm("lm_head.layer_norm", hidden)


def _bert_cases(model_type: str, stem: str, seed: int, **changes: Any) -> dict[str, EncoderCase]:
    """A case of each class of BERT or of its kin."""
    cases: dict[str, EncoderCase] = {}
    prefix = "bert." if model_type == "bert" else "roberta."
    for number, (name, end) in enumerate(
        (
            ("", "Model"),
            ("_masked_lm", "ForMaskedLM"),
            ("_classes", "ForSequenceClassification"),
            ("_tokens", "ForTokenClassification"),
        )
    ):
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


_BERT = _bert_cases("bert", "Bert", 100)
_ROBERTA = _bert_cases("roberta", "Roberta", 110, pad_token_id=2, type_vocab_size=1, max_position_embeddings=50)
_XLM_ROBERTA = _bert_cases("xlm-roberta", "XLMRoberta", 120, pad_token_id=2, type_vocab_size=1, max_position_embeddings=50)

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
    }
)
