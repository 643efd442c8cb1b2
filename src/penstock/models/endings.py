"""Chooses the ending of a model: whether it writes text, embeds it, or scores it.

That depends on the model's class, on the files of sentence-transformers, and on the user's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from penstock.models.architectures import Architecture, Head
from penstock.models.assembly import Shapes
from penstock.models.formats import WeightFormat
from penstock.models.weights import WeightTensor
from penstock.types.encoder import EncoderInfo, ScoreFunction, Task
from penstock.types.errors import ModelError, damaged
from penstock.types.model_spec import Dense, ModelSpec, Pooling, TextEnding

if TYPE_CHECKING:  # a start reads files of one kind
    from penstock.models.hf_config import JsonFile
    from penstock.models.sentence import SentenceFiles

MAX_LABELS = 1 << 16
CLASSES_WITHOUT_OUTPUT = frozenset({"Qwen3Model"})
"""Classes of decoders without an output matrix, as `AutoModel` saves them."""


def choose_ending(
    path: Path,
    *,
    own_pooling: Pooling | None,
    usual_pooling: Pooling,
    writes_none: bool,
    head: Head | None,
    labels: tuple[str, ...],
    hidden_size: int,
    dense: tuple[Dense, ...] = (),
    is_normalised: bool = False,
    task: str = "auto",
    pooling: Pooling | None = None,
) -> TextEnding | None:
    """Return the ending of a model, or None if it writes text.

    - `path`: the file of its settings, for error messages
    - `own_pooling`, `dense`, `is_normalised`: what its files say of embeddings
    - `usual_pooling`: its pooling if neither the files nor the user name one
    - `writes_none`: the model can't write text; otherwise it does, unless the files have a pooling or `task` asks for another
      ending
    - `head`, `labels`: its head, and the columns of the head
    - `task`: `auto`, `generate` or one of `Task`
    - `pooling`: the user's choice; None: the model's own

    Raises ModelError for what the model can't do.
    """
    is_asked = task not in ("auto", "generate")
    if task == "generate" or not (writes_none or is_asked or own_pooling is not None):
        if writes_none:
            raise ModelError(f"{path}: the model can't write text.", remedy="Leave out --task generate.")
        if pooling is not None:
            raise ModelError(f"{path}: the model has no pooling: it writes text.", remedy="Add --task embed.")
        return None
    if head is None:
        if is_asked and task != Task.EMBED:
            raise ModelError(f"{path}: the model has no head for --task {task}.", remedy="It can --task embed.")
        return TextEnding(pooling=pooling or own_pooling or usual_pooling, dense=dense, is_normalised=is_normalised)
    fitting = Task.RERANK if len(labels) == 1 else Task.CLASSIFY
    if is_asked and task != fitting:
        raise ModelError(
            f"{path}: the model has a head of {len(labels)} labels, which does not fit --task {task}.",
            remedy=f"Leave the setting out, or make it {fitting}.",
        )
    if pooling not in (None, head.pooling) or dense:
        cause = "has dense modules after its head" if dense else f"must pool as its head expects ({head.pooling})"
        raise ModelError(f"{path}: the model {cause}.", remedy="Leave out --pooling, or use another model.")
    layers = tuple(
        Dense(
            width=len(labels) if layer.is_last else hidden_size,
            activation=layer.activation,
            has_bias=layer.has_bias,
            has_norm=bool(layer.norm),
        )
        for layer in head.layers
    )
    return TextEnding(pooling=head.pooling, dense=layers, labels=labels)


def usual_pooling(architecture: Architecture) -> Pooling:
    """Return the pooling of a model whose files name none: the mean, or in decoders the last token, which has seen all
    others."""
    return "mean" if architecture.is_encoder else "last"


def choose_hf_ending(
    architecture: Architecture,
    hf_class: str,
    head: Head | None,
    config: JsonFile,
    files: SentenceFiles,
    *,
    task: str,
    pooling: Pooling | None,
) -> TextEnding | None:
    """Return the ending of a Hugging Face directory, as `choose_ending`."""
    return choose_ending(
        config.path,
        own_pooling=files.pooling,
        usual_pooling=usual_pooling(architecture),
        writes_none=architecture.is_encoder or hf_class in CLASSES_WITHOUT_OUTPUT,
        head=head,
        labels=read_labels(config) if head else (),
        hidden_size=config.require("hidden_size", int),
        dense=tuple(Dense(width=one.width, activation=one.activation, has_bias=one.has_bias) for one in files.dense),
        is_normalised=files.is_normalised,
        task=task,
        pooling=pooling,
    )


def with_ending(spec: ModelSpec, ending: TextEnding | None) -> ModelSpec:
    """Return the spec with this ending. Only a model that writes text has an output to tie to its embeddings."""
    return spec if ending is None else replace(spec, ending=ending, tie_word_embeddings=False)


def read_labels(config: JsonFile) -> tuple[str, ...]:
    """Return the names of a head's columns: `id2label` of config.json, or transformers' defaults. Raises ModelError."""
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
    """Return the default function of a head's numbers, as in transformers' `pipelines/text_classification.py`."""
    if spec.ending is None or not spec.ending.labels:
        return ScoreFunction.NONE
    is_alone = len(spec.ending.labels) == 1 and spec.ending.pooling != "each"
    return ScoreFunction.SIGMOID if is_alone else ScoreFunction.SOFTMAX


def encoder_info(
    spec: ModelSpec,
    scores: ScoreFunction,
    *,
    max_tokens: int | None = None,
    prompts: Mapping[str, str] = MappingProxyType({}),
    default_prompt: str = "",
    has_modules: bool = False,
) -> EncoderInfo | None:
    """Return what clients may know of an encoder, or None for a model that writes text.

    `max_tokens` None: all positions. `has_modules`: the files say whether vectors are normalised.
    """
    ending = spec.ending
    if ending is None:
        return None
    return EncoderInfo(
        width=spec.result_width,
        pooling=ending.pooling,
        max_tokens=min(max_tokens or spec.max_model_len, spec.max_model_len),
        is_normalised=ending.is_normalised,
        has_own_lengths=has_modules and not ending.is_normalised,
        labels=ending.labels,
        scores=scores,
        prompts=prompts,
        default_prompt=default_prompt,
    )


def dense_names(files: SentenceFiles) -> Mapping[str, str]:
    """Return the names of dense modules' tensors, with their folder before them -> ours."""
    return {
        f"{dense.folder}/linear.{end}": f"dense.{number}{bias}"
        for number, dense in enumerate(files.dense)
        for end, bias in (("weight", ""), ("bias", "_bias"))
    }


def top_names(own: Mapping[str, str], head: Head | None, ending: TextEnding | None) -> dict[str, str]:
    """Return names of a file's tensors outside of layers -> ours. Only models that write text have an output matrix."""
    top = {**own, **(head.names if head else {})}
    return top if ending is None else {theirs: ours for theirs, ours in top.items() if ours != "output"}


def hf_names(
    architecture: Architecture, names: Mapping[str, object], top: Mapping[str, str], ending: TextEnding | None
) -> list[tuple[str, str]]:
    """Return (name in the tables, name in the file) of a directory's tensors, without those that are not read.

    `top` are those outside of layers. A decoder that reads texts does without its output matrix, and its names may lack
    `model.`, as `AutoModel` saves them.
    """
    unread = architecture.hf_unread
    prefix = ""
    if ending is not None and not architecture.is_encoder:
        unread = ("lm_head.",)
        if not any(name.startswith(architecture.hf_layers) for name in names):
            prefix = architecture.hf_layers.partition(".")[0] + "."
    known = [(architecture.hf_name(name if name.startswith(unread) else prefix + name), name) for name in names]
    return [(ours, name) for ours, name in known if ours is not None and (ours in top or not ours.startswith(unread))]


def shapes_with_made(
    architecture: Architecture, spec: ModelSpec, wanted: Shapes, found: Mapping[str, tuple[int, int]], path: Path
) -> Mapping[str, tuple[int, int]]:
    """Replace the shapes of sources by those of the weights made from them. Raises ModelError."""
    shapes = dict(found)
    for name, made in architecture.made.items():
        if made.source_shape is not None and shapes.pop(made.source, None) != made.source_shape(spec):
            rows, cols = made.source_shape(spec)
            raise damaged(path, f"the tensor {made.source} is missing, or not {rows} x {cols}")
        shapes[name] = (wanted[name][0], wanted[name][1])
    return shapes


def weights_with_made(architecture: Architecture, spec: ModelSpec, weights: dict[str, WeightTensor]) -> dict[str, WeightTensor]:
    """Replace sources by the weights made from them."""
    for name, made in architecture.made.items():
        source = weights.pop(made.source).dequantize() if made.source else np.empty((0, 0), np.float32)
        values = np.ascontiguousarray(made.make(spec, source), np.float32)
        weights[name] = WeightTensor(name, values.shape[0], values.shape[1], WeightFormat.F32, values)
    return weights
