"""Makes tests/golden/encoders.npz: transformers' answers for the tiny encoders. Run by hand, in an environment with torch.

    PYTHONPATH=src:tests python -m tests.parity.make_encoder_golden [NAME ...]

With names, only those cases are made afresh. transformers makes the class of the case's config.json, in float32, and is given
the values that the file holds. Pooling and dense modules are written down here as sentence-transformers has them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from support.parity.encoder_cases import ENCODERS, EncoderCase, Text, texts
from support.parity.golden import GOLDEN_DIR
from support.parity.neobert import neobert_scores, neobert_states
from support.parity.nomic_experts import nomic_states
from support.parity.tiny import FloatArray, weights_sha256


def read_config(case: EncoderCase) -> PretrainedConfig:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(case.config)))
        return AutoConfig.from_pretrained(directory, attn_implementation="eager")


def make_model(case: EncoderCase) -> PreTrainedModel:
    """The model in float32, in eval mode. Every parameter must be given, and none be left over."""
    kind = getattr(transformers, str(case.config["architectures"][0]))
    model: PreTrainedModel = kind(read_config(case)).float().eval()
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied matrix has several names
    missing = {id(parameter): name for name, parameter in parameters.items()}
    for name, values in case.stored_weights().items():
        if "/" in name:
            continue
        with torch.no_grad():
            parameter = parameters[name]
            missing.pop(id(parameter))
            assert parameter.shape == values.shape, f"{name} is {tuple(parameter.shape)} there, {values.shape} here"
            parameter.copy_(torch.from_numpy(values))
    assert not missing, f"the case lacks {sorted(missing.values())}"
    return model


def jina_states(case: EncoderCase, text: Text) -> torch.Tensor:
    """The states of a Jina BERT, which is no class of transformers: ALiBi and gated MLPs as their papers write them down."""
    weights = {name.removeprefix("bert."): torch.from_numpy(values) for name, values in case.weights().items()}
    config = case.config
    num_heads, hidden = config["num_attention_heads"], config["hidden_size"]
    functional = torch.nn.functional

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"], config["layer_norm_eps"])

    ids = torch.tensor(text.token_ids)
    positions = torch.arange(len(ids))
    types = (positions >= (text.second_at or len(ids))).long()
    words, kinds = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
    x = norm(words[ids] + kinds[types], "embeddings.LayerNorm")
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1])  # of four heads, and the first one of eight
    bias = -slopes[:, None, None] * (positions[None, :] - positions[:, None]).abs()
    activation = functional.gelu if config["feed_forward_type"] == "geglu" else functional.relu
    for number in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{number}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{name}").reshape(len(ids), num_heads, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / (hidden // num_heads) ** 0.5 + bias
        seen = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), hidden)
        x = norm(x + linear(seen, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        gate, up = linear(x, f"{at}.mlp.gated_layers").chunk(2, dim=-1)
        x = norm(x + linear(activation(gate) * up, f"{at}.mlp.wo"), f"{at}.mlp.layernorm")
    return x


def in_numpy(case: EncoderCase) -> Callable[[Mapping[str, Any], Mapping[str, FloatArray], tuple[int, ...]], Any] | None:
    """Return the function that computes states of a model that transformers lacks, or None."""
    if "moe_top_k" in case.config:
        return nomic_states
    return neobert_states if case.architecture == "neobert" else None


def answer(case: EncoderCase, model: PreTrainedModel | None, text: Text) -> FloatArray:
    """The rows of numbers that the model answers a text."""
    if case.architecture == "neobert" and case.has_head:
        return neobert_scores(case.config, case.weights(), text.token_ids).astype(np.float32)
    if (states_of := in_numpy(case)) is not None:
        of_tokens = states_of(case.config, case.weights(), text.token_ids).astype(np.float32)
        pooled = of_tokens[:1] if case.pooling == "first" else of_tokens.mean(0, keepdims=True)
        return pooled / np.linalg.norm(pooled) if case.is_normalised else pooled
    if model is None:
        pooled = jina_states(case, text).mean(0)
        return (pooled / pooled.norm() if case.is_normalised else pooled)[None].numpy()
    ids = torch.tensor([text.token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if case.config.get("type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (torch.arange(ids.shape[1]) >= (text.second_at or ids.shape[1])).long()[None]
    with torch.no_grad():
        if case.has_head:
            logits = model(**inputs).logits
            return logits.reshape(-1, logits.shape[-1]).numpy()
        found = model(**inputs, output_hidden_states=True)
        if case.pooling == "sparse":
            return torch.log1p(torch.relu(found.logits[0])).amax(0, keepdim=True).numpy()
        states = found.get("last_hidden_state", found.hidden_states[-1])[0]
        means = states.mean(0, keepdim=True)
        pooled = {"first": states[:1], "last": states[-1:], "mean": means, "each": states}[case.pooling]
        if case.has_dense:
            weights = case.weights()
            matrix, bias = (torch.from_numpy(weights[f"2_Dense/linear.{end}"]) for end in ("weight", "bias"))
            pooled = torch.tanh(torch.nn.functional.linear(pooled, matrix, bias))
        return (pooled / pooled.norm(dim=1, keepdim=True) if case.is_normalised else pooled).numpy()


def main() -> None:
    path = GOLDEN_DIR / "encoders.npz"
    arrays: dict[str, np.ndarray] = {}
    with contextlib.suppress(FileNotFoundError), np.load(path) as data:
        arrays = {key: data[key] for key in data.files if key.split("/")[0] in ENCODERS}
    for name in sys.argv[1:] or [name for name, case in ENCODERS.items() if not case.golden]:
        case = ENCODERS[name]
        is_ours = case.architecture == "jina_bert" or in_numpy(case) is not None
        model = None if is_ours else make_model(case)
        rows = [answer(case, model, text) for text in texts(case)]
        arrays |= {f"{name}/{number}": values for number, values in enumerate(rows)}
        arrays[f"{name}/weights_sha256"] = np.array(weights_sha256(case))
        print(f"{name}: rows of {rows[0].shape[1]} numbers, of {np.concatenate(rows).std():.3f} deviation")
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
