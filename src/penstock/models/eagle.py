"""Draft heads (EAGLE-3): one layer that guesses a model's next tokens from the model's own hidden states.

The model keeps features of every token: its residual stream before three of its layers, side by side, multiplied by `fc`. The
head reads the embedding of a token beside the features of the token before it, and guesses the token after it. To guess
further, it reads its own residual stream in place of features.

Source: arXiv 2503.01840. Checkpoints come in the layouts of EAGLE, SpecForge and speculators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from penstock.models import checks
from penstock.models import program as prog
from penstock.models.architectures import describe, with_biases
from penstock.models.changed_rows import in_8_bits
from penstock.models.decoder import Decoder
from penstock.models.formats import Floats, WeightFormat
from penstock.models.hf import open_weights
from penstock.models.hf_config import JsonFile, read_json, read_spec
from penstock.models.program import HEAD_FC, Op, Program
from penstock.models.safetensors_file import FLOAT8, StoredTensor
from penstock.models.weights import LoadedModel, WeightTensor, held_weight_bytes
from penstock.types.errors import ModelError, damaged
from penstock.types.model_spec import ModelSpec

FEATURES = "features"
SOURCES = "feature_sources"
"""Buffers of the model's program: what it keeps, and the three residual streams that this is made of."""
_NUM_SOURCES = 3

_TOP = {"fc.weight": HEAD_FC, "norm.weight": "norm", "lm_head.weight": "output", "embed_tokens.weight": "embed"}
_LAYER = with_biases(
    {
        "input_layernorm": "embed_norm",
        "hidden_norm": "attn_norm",
        **{f"self_attn.{name}_proj": name for name in "qkvo"},
        "post_attention_layernorm": "mlp_norm",
        **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead:
    model: LoadedModel
    """The head's weights and program, and the embeddings of the model that it guesses for."""
    layers: tuple[int, ...]
    """The model's layers before which its residual stream is read."""
    fc: WeightTensor

    @property
    def program(self) -> Program:
        assert self.model.program is not None, "`load_head` sets it"
        return self.model.program

    @property
    def num_bytes(self) -> int:
        """Bytes of the head's weights in memory, without the model's embeddings."""
        fc = held_weight_bytes(HEAD_FC, self.fc.format, (self.fc.num_rows, self.fc.num_cols), Floats.BF16)
        return self.model.num_weight_bytes + fc

    def num_step_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the buffers for steps of up to `num_tokens`, the model's additional ones included."""
        widths = [width for _, width in self.program.buffers]
        return 4 * num_tokens * (sum(widths) + self.fc.num_cols + self.fc.num_rows)

    def attached(self, model: LoadedModel) -> LoadedModel:
        """Return the model with a program that keeps the features."""
        program = self.extended(model.program or describe(model.spec))
        return replace(model, weights={**model.weights, HEAD_FC: self.fc}, program=program)

    def extended(self, program: Program) -> Program:
        """Return the model's program with operations that compute and keep the features."""
        program = with_sources(program, self.layers)
        if program.width(SOURCES) != self.fc.num_cols:
            streams = f"the three residual streams of this one have {program.width(SOURCES)}"
            raise _not_for(self.model.path, f"it makes features of {self.fc.num_cols} columns, and {streams}")
        ops = list(program.ops)
        last = max(at for at, op in enumerate(ops) if isinstance(op, prog.Place) and op.out == SOURCES)
        ops.insert(last + 1, prog.Linear(FEATURES, SOURCES, HEAD_FC))
        return replace(program, ops=tuple(ops), buffers=(*program.buffers, (FEATURES, self.fc.num_rows)), kept=FEATURES)


def with_sources(program: Program, layers: Sequence[int]) -> Program:
    """Return a model's program that also puts its residual streams before some layers side by side, and keeps them."""
    ops, width = list(program.ops), 0
    for layer in layers:
        at = _first_of_layer(ops, layer)
        x = getattr(ops[at], "x", None)
        if not isinstance(x, str) or any(isinstance(op, prog.GatherRows) for op in ops[:at]):
            raise _not_for("A draft head", f"the model's residual stream before layer {layer} can't be kept")
        ops.insert(at, prog.Place(SOURCES, x, width))
        width += program.width(x)
    return replace(program, ops=tuple(ops), buffers=(*program.buffers, (SOURCES, width)), kept=SOURCES)


def _not_for(head: object, cause: str) -> ModelError:
    return ModelError(f"{head} can't guess for this model: {cause}.", remedy="Use another head, or leave it out.")


def _first_of_layer(ops: Sequence[Op], layer: int) -> int:
    """Return the index of the first operation that reads a weight of the layer."""
    prefix = f"layers.{layer}."
    for at, op in enumerate(ops):
        if any(str(getattr(op, field.name)).startswith(prefix) for field in fields(op)):
            return at
    raise AssertionError(f"no operation of layer {layer}")


def load_head(path: Path, model: LoadedModel) -> DraftHead:
    """Load the head of a directory, for a model. Reads no weights but its token ids. Raises ModelError."""
    config = _flat(read_json(path / "config.json"))
    if config.require("vocab_size", int) != model.spec.vocab_size:
        raise ModelError(
            f"{path}: the head guesses for a model with {config.values['vocab_size']} tokens, and {model.name} has "
            f"{model.spec.vocab_size}.",
            remedy="Use the head that was trained for this model.",
        )
    stored = {ours: tensor for name, tensor in open_weights(path).items() if (ours := _our_name(name))}
    shapes = {name: _shape(name, tensor) for name, tensor in stored.items() if name != "tokens"}
    if "output" not in shapes:
        raise damaged(path, "the tensor lm_head.weight is missing")
    num_tokens = shapes["output"][0]
    spec = replace(read_spec(config, "llama", shapes, has_partial_rope=False), vocab_size=num_tokens)
    checks.check_spec(spec, config.path)
    tokens = _token_ids(stored.pop("tokens", None), num_tokens, model.spec.vocab_size, path)
    norms_first = config.get("norm_before_residual", bool)
    if norms_first is None:
        norms_first = "speculators_model_type" in config.values
    program = _describe(spec, model.spec.vocab_size, norms_first=norms_first, has_tokens=tokens is not None)
    target_size = config.get("target_hidden_size", int) or model.spec.hidden_size
    checks.check_weights(_with_fc(program, target_size, spec.hidden_size), shapes | _given_shapes(program, shapes), path)
    weights = {name: _weight(name, tensor, path) for name, tensor in stored.items()}
    # A guess reads nearly all weights, so it takes less time if they are small. Rounding can only make it wrong.
    weights |= {name: in_8_bits(one) for name, one in weights.items() if one.num_rows > 1 and name != "embed"}
    fc, embed = weights.pop(HEAD_FC), weights.get("embed", model.weights["embed"])
    if (embed.num_rows, embed.num_cols) != (model.spec.vocab_size, spec.hidden_size):
        raise ModelError(
            f"{path}: the head reads embeddings of {spec.hidden_size} columns, and those of {model.name} have "
            f"{embed.num_cols}.",
            remedy="Use the head that was trained for this model.",
        )
    weights |= {"embed": embed} | ({} if tokens is None else {"tokens": tokens})
    return DraftHead(
        LoadedModel(path.resolve().name, spec, weights, model.tokenizer_source, None, (), path, program=program),
        _layers(config, model.spec),
        fc,
    )


def _flat(config: JsonFile) -> JsonFile:
    """Return the settings of config.json with those of speculators' nested layer at the top."""
    kind = config.get("speculators_model_type", str)
    if kind not in (None, "eagle3"):
        raise checks.unsupported(config.path, f"the head is of the kind {kind!r}", "EAGLE-3 is")
    nested = config.get("transformer_layer_config", dict) or {}
    # The head's output never is the embedding: files may say so, and have both.
    flat = JsonFile(config.path, {**config.values, **nested, "tie_word_embeddings": False})
    for one in (flat, _own(config)):
        one.only_all(norm_output=False, norm_before_fc=False, fc_norm=False, parallel_drafting=False)
        one.only_all(use_aux_hidden_state=True, return_hidden_post_norm=False, logit_scale=1.0)
    flat.only_all(num_hidden_layers=1, hidden_act="silu", use_sliding_window=False, quantization_config=None)
    return flat


def _own(config: JsonFile) -> JsonFile:
    return JsonFile(config.path, config.get("eagle_config", dict) or {})


def _layers(config: JsonFile, spec: ModelSpec) -> tuple[int, ...]:
    """Return the layers before which features are read.

    At the top of config.json, i means the input of layer i. In `eagle_config` it may also mean the output; then the first is 1
    in the files of their authors. Source: pull request 25454 of SGLang.
    """
    num, key = spec.num_layers, "eagle_aux_hidden_state_layer_ids"
    found, nested = config.get(key, list), _own(config).get(key, list)
    if not found and nested:
        found = [one + 1 for one in nested if type(one) is int] if nested[0] == 1 else nested
    layers = tuple(found or (2, num // 2, num - 3))
    is_valid = all(type(one) is int and 0 <= one < num for one in layers) and sorted(set(layers)) == list(layers)
    if not is_valid or len(layers) != _NUM_SOURCES:
        raise config.error(f"features are of the layers {layers} ({key}), and a model of {num} layers has no such three")
    return layers


def _our_name(name: str) -> str | None:
    """Return our name of a tensor in the file, or None for one that is not needed."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
        return None
    if name == "d2t":
        return "tokens"
    rest = name.removeprefix("layers.0.")
    return f"layers.0.{_LAYER.get(rest, rest)}" if rest != name else _TOP.get(name, name)


def _token_ids(stored: StoredTensor | None, num: int, vocab_size: int, path: Path) -> WeightTensor | None:
    """Return the token of each of the head's `num` logits. The file has the differences to the logits' numbers."""
    if stored is None:
        if num != vocab_size:
            raise damaged(path, f"the tensor d2t is missing: {num} logits are not those of all {vocab_size} tokens")
        return None
    differences = stored.integers("I64", "I32").reshape(-1).astype(np.int64)
    ids = np.arange(len(differences)) + differences
    if len(ids) != num or ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
        raise damaged(path, f"the tensor d2t does not name {num} of {vocab_size} tokens")
    return WeightTensor("tokens", 1, num, WeightFormat.F32, ids.astype(np.float32).reshape(1, num))


def _shape(name: str, tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) not in (1, 2):
        raise damaged(tensor.path, f"the tensor {name} has the shape {tensor.shape}, not that of a vector or matrix")
    num_rows, num_cols = (1, *tensor.shape)[-2:]
    return num_rows, num_cols


def _weight(name: str, tensor: StoredTensor, path: Path) -> WeightTensor:
    if tensor.dtype == FLOAT8:
        raise checks.unsupported(path, f"{name} is in fp8", "heads in bf16, f16 and f32 are")
    (num_rows, num_cols), values = _shape(name, tensor), tensor.array()
    return WeightTensor(name, num_rows, num_cols, WeightFormat[tensor.dtype], values.reshape(num_rows, num_cols))


def _given_shapes(program: Program, shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the shapes of weights that are not in the file."""
    wanted = checks.weight_shapes(program)
    return {name: wanted[name] for name in ("embed", "tokens") if name in wanted and name not in shapes}


def _with_fc(program: Program, target_size: int, hidden_size: int) -> Program:
    """Return the program with the product of the model's program, to check the weights of both."""
    buffers = (*program.buffers, (SOURCES, _NUM_SOURCES * target_size), (FEATURES, hidden_size))
    return replace(program, ops=(*program.ops, prog.Linear(FEATURES, SOURCES, HEAD_FC)), buffers=buffers)


def _describe(spec: ModelSpec, vocab_size: int, *, norms_first: bool, has_tokens: bool) -> Program:
    """Return the head's program. `norms_first`: the residual stream begins with normed features."""
    build = Decoder(spec)
    given = x = build.given(FEATURES)
    token = build.look_up("embed", "token", spec.hidden_size, 1.0)
    normed = build.norm(x, "layers.0.attn_norm", "hidden")
    x = normed if norms_first else x
    both = build.beside(build.norm(token, "layers.0.embed_norm", token), normed, "both")
    mixed = build.attention(0, both)
    x, mixed = build.gather_after_last(0, x, mixed)
    build.add_output(0, x, mixed)
    build.add_mlp(0, x, build.norm(x, "layers.0.mlp_norm"))
    program = build.finish(build.norm(x, "norm"))
    ops = [replace(op, tokens="tokens") if isinstance(op, prog.Logits) and has_tokens else op for op in program.ops]
    return replace(program, ops=tuple(ops), vocab_size=vocab_size, given=given, kept=x)
