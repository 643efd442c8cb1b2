"""Chooses the ending of a model: whether it writes text, embeds it, or scores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.models.architectures import Architecture, Head
from penstock.models.assembly import Shapes
from penstock.models.formats import WeightFormat
from penstock.models.hf_config import JsonFile
from penstock.models.sentence import SentenceFiles
from penstock.models.weights import WeightTensor
from penstock.types.encoder import EncoderInfo, ScoreFunction, Task
from penstock.types.errors import ModelError, damaged
from penstock.types.model_spec import Dense, ModelSpec, Pooling, TextEnding

MAX_LABELS = 1 << 16


def choose_ending(
    path: Path,
    architecture: Architecture,
    *,
    files: SentenceFiles,
    cannot_generate: bool,
    head: Head | None,
    labels: tuple[str, ...],
    hidden_size: int,
    task: str,
    pooling: Pooling | None,
) -> TextEnding | None:
    """Return the ending of a model, or None if it generates text. Raises ModelError if it can't do `task` or `pooling`.

    - `files`: the settings of sentence-transformers in the files at `path`
    - `cannot_generate`: the model can't generate text. Others do, unless `files` name a pooling or `task` another ending
    - `labels`: names of the head's outputs
    - `task`: `auto`, `generate` or one of `Task`; `pooling`: the user's choice or None
    """
    is_asked = task not in ("auto", "generate")
    if task == "generate" or not (cannot_generate or is_asked or files.pooling is not None):
        if cannot_generate:
            raise ModelError(f"{path}: this model can't generate text.", remedy="Leave out --task generate.")
        if pooling is not None:
            cause = "--pooling has no effect on a model that generates text"
            raise ModelError(f"{path}: {cause}.", remedy="Leave it out, or add --task embed to compute embeddings.")
        return None
    dense = tuple(files.dense.values())
    if files.pooling == "sparse" and pooling not in (None, "sparse"):
        raise ModelError(f"{path}: the model's vectors are sparse.", remedy="Leave out --pooling.")
    if head is None or files.pooling == "sparse":
        dense = tuple(_layers(head, hidden_size, 0)) if head else dense
        if is_asked and task != Task.EMBED:
            raise ModelError(f"{path}: the model has no head for --task {task}.", remedy="Use --task embed.")
        usual: Pooling = "mean" if architecture.is_encoder else "last"  # a decoder's last token has seen all others
        return TextEnding(pooling=pooling or files.pooling or usual, dense=dense, is_normalised=files.is_normalised)
    fitting = Task.RERANK if len(labels) == 1 else Task.CLASSIFY
    if is_asked and task != fitting:
        cause = f"the model has a head of {len(labels)} labels, which does not fit --task {task}"
        raise ModelError(f"{path}: {cause}.", remedy=f"Leave the setting out, or make it {fitting}.")
    if pooling not in (None, head.pooling) or dense:
        cause = "has dense modules after its head" if dense else f"must pool as its head expects ({head.pooling})"
        raise ModelError(f"{path}: the model {cause}.", remedy="Leave out --pooling, or use another model.")
    layers = tuple(_layers(head, hidden_size, len(labels)))
    return TextEnding(pooling=head.pooling, dense=layers, is_pooled_last=head.is_pooled_last, labels=labels)


def _layers(head: Head, hidden_size: int, num_labels: int) -> Iterator[Dense]:
    for layer in head.layers:
        yield Dense(
            width=num_labels if layer.is_last else hidden_size,
            activation=layer.activation,
            has_bias=layer.has_bias,
            has_norm=bool(layer.norm),
        )


def with_ending(spec: ModelSpec, ending: TextEnding | None) -> ModelSpec:
    """Return the spec with this ending. An ending replaces the output matrix; a sparse one uses the embedding matrix."""
    return spec if ending is None else replace(spec, ending=ending, tie_word_embeddings=ending.pooling == "sparse")


def read_labels(config: JsonFile) -> tuple[str, ...]:
    """Return the labels of a head's outputs: those of config.json or transformers' defaults (`LABEL_0`, ...)."""
    named = config.get("id2label", dict)
    if named is None:
        num = config.get("num_labels", int)
        num = 2 if num is None else num
        if not 1 <= num <= MAX_LABELS:
            raise config.error(f"num_labels is {num}")
        return tuple(f"LABEL_{number}" for number in range(num))
    labels = [named.get(str(number)) for number in range(len(named))]
    if not 1 <= len(labels) <= MAX_LABELS or not all(type(label) is str for label in labels):
        raise config.error(f"id2label does not name the columns from 0 to {len(labels) - 1}")
    return tuple(map(str, labels))


def usual_scores(spec: ModelSpec) -> ScoreFunction:
    """Return the default function from a head's outputs to scores, as in transformers' text_classification.py."""
    if spec.ending is None or not spec.ending.labels:
        return ScoreFunction.NONE
    is_alone = len(spec.ending.labels) == 1 and spec.ending.pooling != "each"
    return ScoreFunction.SIGMOID if is_alone else ScoreFunction.SOFTMAX


def encoder_info(spec: ModelSpec, scores: ScoreFunction, files: SentenceFiles) -> EncoderInfo | None:
    """Return the facts of an encoder that clients may know, or None for a model that writes text."""
    ending = spec.ending
    if ending is None:
        return None
    width = spec.result_width
    if files.truncate_dim and ending.pooling not in ("each", "sparse") and not ending.labels:
        width = min(width, files.truncate_dim)
    is_normalised = ending.is_normalised and width == spec.result_width
    return EncoderInfo(
        width=width,
        pooling=ending.pooling,
        max_tokens=min(files.max_tokens or spec.max_model_len, spec.max_model_len),
        is_normalised=is_normalised,
        has_own_lengths=files.pooling is not None and not is_normalised,
        labels=ending.labels,
        scores=scores,
        prompts=files.prompts,
        default_prompt=files.default_prompt,
    )


def top_names(own: Mapping[str, str], head: Head | None, ending: TextEnding | None) -> dict[str, str]:
    """Return our names of tensors outside of layers, by the file's. Only models that write text have an output matrix."""
    top = {**own, **(head.names if head else {})}
    return top if ending is None else {theirs: ours for theirs, ours in top.items() if ours != "output"}


def hf_names(
    architecture: Architecture, names: Mapping[str, object], top: Mapping[str, str], ending: TextEnding | None
) -> list[tuple[str, str]]:
    """Return (name in the architecture's tables, name in the file) of the tensors to load.

    A decoder for embeddings has no output matrix, and its names may lack `model.`, as `AutoModel` saves them.
    """
    unread = architecture.hf_unread
    prefix = ""
    if ending is not None and not architecture.is_encoder:
        unread = ("lm_head.",)
        if not any((architecture.hf_name(name) or "").startswith(architecture.hf_layers) for name in names):
            prefix = architecture.hf_layers.partition(".")[0] + "."
    known = [(architecture.hf_name(name if name.startswith(unread) else prefix + name), name) for name in names]
    return [(ours, name) for ours, name in known if ours is not None and (ours in top or not ours.startswith(unread))]


def shapes_with_made(
    architecture: Architecture, spec: ModelSpec, wanted: Shapes, found: Mapping[str, tuple[int, int]], path: Path
) -> Mapping[str, tuple[int, int]]:
    """Return the shapes `found` in a file, with source tensors replaced by the weights in `Architecture.made`.

    Raises ModelError if a source tensor is missing or has another shape.
    """
    shapes = dict(found)
    for name, made in architecture.made.items():
        if made.source_shape is not None and shapes.pop(made.source, None) != made.source_shape(spec):
            rows, cols = made.source_shape(spec)
            raise damaged(path, f"the tensor {made.source} is missing, or not {rows} x {cols}")
        shapes[name] = (wanted[name][0], wanted[name][1])
    return shapes


def weights_with_made(architecture: Architecture, spec: ModelSpec, weights: dict[str, WeightTensor]) -> dict[str, WeightTensor]:
    for name, made in architecture.made.items():
        source = weights.pop(made.source).dequantize() if made.source else np.empty((0, 0), np.float32)
        values = np.ascontiguousarray(made.make(spec, source), np.float32)
        weights[name] = WeightTensor(name, values.shape[0], values.shape[1], WeightFormat.F32, values)
    return weights
