"""Merges adapters into a model's weights (--merge-lora): W + B A, a few rows at a time when a backend reads them.

DoRA then rescales each row to its magnitude.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models import architectures
from penstock.models.adapter import OUTPUT_SITE, AdapterFactors, expert_sites
from penstock.models.changed_rows import changed
from penstock.models.load import load_adapter
from penstock.models.program import Experts
from penstock.models.weights import Cut, LoadedModel, WeightTensor, stacked
from penstock.types.adapter import MergedAdapter
from penstock.types.errors import ModelError

F32 = NDArray[np.float32]


def with_adapters(model: LoadedModel, adapters: Iterable[MergedAdapter]) -> LoadedModel:
    """Return the model with these adapters added to its weights, one after the other. Raises ModelError.

    The model's path stays the same, so keys of caches must add the adapters' fingerprints.
    """
    program = architectures.describe(model.spec)
    found = []
    for adapter in adapters:
        path = Path(adapter.path)
        factors = load_adapter(path, model.spec, program, max_rank=1024, tables=model.weights, is_merged=True)
        if adapter.weight != 1 and (factors.magnitudes or factors.whole):
            raise ModelError(
                f"{adapter.path} sets rows' magnitudes (DoRA) or has whole matrices, which a weight of {adapter.weight:g} "
                "can't scale.",
                remedy="Merge it with its weight left out.",
            )
        scaled = {site: (a, b * np.float32(adapter.weight)) for site, (a, b) in factors.by_weight.items()}
        found.append(replace(factors, by_weight=scaled))
    return merged(model, *found)


def merged(model: LoadedModel, *adapters: AdapterFactors) -> LoadedModel:
    """Return the model with these adapters' factors added to its weights, in this order.

    If output and embedding are one matrix and an adapter changes either, the output becomes a matrix of its own.
    """
    whole: dict[str, WeightTensor] = {}
    changes: dict[str, list[_Change]] = {}
    for factors in adapters:
        if twice := sorted(factors.whole.keys() & whole.keys()):
            raise ModelError(f"Two adapters replace the whole {twice[0]}.", remedy="Leave one of them out.")
        whole |= factors.whole
        for site, (a, b) in factors.by_weight.items():
            left, right = (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)) if site in ("embed", "layer_embed") else (b, a)
            changes.setdefault(site, []).append(_Change(left, right, factors.magnitudes.get(site)))
    weights, spec = {**model.weights, **whole}, model.spec
    if spec.tie_word_embeddings and (changes.keys() | whole.keys()) & {"embed", OUTPUT_SITE}:
        weights.setdefault(OUTPUT_SITE, replace(model.weights["embed"], name=OUTPUT_SITE))
        spec = replace(spec, tie_word_embeddings=False)
    program = architectures.describe(model.spec)
    for name, (num, *_) in expert_sites(program).items():
        of_experts = [changes.pop(f"{name}.{expert}", []) for expert in range(num)]
        if any(of_experts):
            weights[name] = _merged_experts(weights[name], of_experts)
    weights |= {site: changed(weights[site], found) for site, found in changes.items()}
    for op in program.ops:
        if isinstance(op, Experts) and op.gate is not None and weights[op.gate].format is not weights[op.up].format:
            unchanged = [name for name in (op.gate, op.up) if weights[name] is model.weights[name]]
            if len(unchanged) == 1:  # the native backend multiplies by both at once
                weights[unchanged[0]] = changed(weights[unchanged[0]], ())
    return replace(model, spec=spec, weights=weights)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    left: F32  # [rows, r]
    right: F32  # [r, columns]
    magnitude: F32 | None  # [rows]

    def apply(self, values: F32, rows: slice) -> F32:
        """Return rows of a matrix with their change. `values` has the unchanged rows and is overwritten."""
        values += self.left[rows] @ self.right
        if self.magnitude is not None:
            values *= self.magnitude[rows, None] / np.linalg.norm(values, axis=1, keepdims=True)
        return values


def _merged_experts(base: WeightTensor, changes: Sequence[Sequence[_Change]]) -> WeightTensor:
    """Return a stack of matrices, each with its own changes. Unchanged ones are converted to the same format."""
    num_rows = base.num_rows // len(changes)
    one = [stacked(base.name, [Cut(base, num_rows * expert, num_rows)]) for expert in range(len(changes))]
    return stacked(base.name, [Cut(changed(*pair), 0, num_rows) for pair in zip(one, changes, strict=True)])
