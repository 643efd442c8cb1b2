"""The factors of a low-rank adapter, and its sites: the matrices of a program that it can change.

With factors A [r, in] and B [out, r] of a matrix W [out, in], x @ W.T becomes x @ W.T + (x @ A.T) @ B.T. For `Embed`, a row
becomes W[token] + A[:, token] @ B.T, before scaling. Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import Embed, Experts, HeadLinear, Linear, Logits, Program
from penstock.models.weights import WeightTensor
from penstock.types.adapter import PackedAdapter

F32 = NDArray[np.float32]

OUTPUT_SITE = "output"  # the site of `Logits`, also if its weight is tied to the embedding


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFactors:
    """The finite factors A and B of a LoRA adapter, by site. The adapter's scale is already multiplied into B."""

    by_weight: Mapping[str, tuple[F32, F32]]
    """Site -> (A [r, in], B [out, r]), r >= 1. For `Embed`: A [r, vocabulary], B [width, r].

    Merging also changes routers, and single experts: the site `layers.0.expert_up.3` is the fourth of `layers.0.expert_up`.
    """
    magnitudes: Mapping[str, F32] = field(default_factory=dict)
    """Site -> DoRA magnitudes (arXiv 2402.09353), to which rows of W + B A are rescaled. Merging only. [out]"""
    whole: Mapping[str, WeightTensor] = field(default_factory=dict)
    """Embedding and output matrices that replace the model's. Merging only."""

    @property
    def max_rank(self) -> int:
        return max((len(a) for a, _ in self.by_weight.values()), default=0)

    def fits(self, program: Program, max_rank: int) -> bool:
        """Return whether the program has all sites, with matrices of these shapes, and no rank is above `max_rank`."""
        known = sites(program)
        return all(
            (len(b), a.shape[1]) == known.get(site) and 1 <= len(a) == b.shape[1] <= max_rank
            for site, (a, b) in self.by_weight.items()
        )


AdapterPacker = Callable[[AdapterFactors], PackedAdapter]
"""Packs an adapter for `place_adapter`, in any thread. Raises ModelError."""


def site_of(op: Linear | Embed | Logits) -> str:
    return OUTPUT_SITE if isinstance(op, Logits) else op.weight


def sites(program: Program) -> Mapping[str, tuple[int, int]]:
    """Return site -> shape (out, in) of every matrix that an adapter can change. The embedding has (width, vocabulary)."""
    found: dict[str, tuple[int, int]] = {}
    widths = dict(program.buffers)
    for op in program.ops:
        if isinstance(op, Embed):
            found[site_of(op)] = widths[op.out], program.vocab_size
        elif isinstance(op, Linear):
            found[site_of(op)] = widths[op.out], widths[op.x]
        elif isinstance(op, Logits):
            found[site_of(op)] = program.vocab_size, widths[op.x]
    return found


def merge_sites(program: Program) -> Mapping[str, tuple[int, int]]:
    """Return `sites` and the further matrices that merging can change: routers, shared experts and latents' `kv_b_proj`."""
    widths, found = dict(program.buffers), dict(sites(program))
    for op in program.ops:
        if isinstance(op, Experts):
            found[op.router] = op.num_experts, widths[op.x]
            found |= {site: (out, wide) for site, (num, out, wide) in _matrices(op, widths) if num == 1}
        elif isinstance(op, HeadLinear) and (op.is_transposed or op.weight.endswith("value_heads")):  # rows as in `kv_b_proj`
            rows, columns = (op.x, op.out) if op.is_transposed else (op.out, op.x)
            found[op.weight] = widths[rows], widths[columns] // op.num_heads
    return found


def expert_sites(program: Program) -> Mapping[str, tuple[int, int, int]]:
    """Return weight -> shape (experts, out, in) of every stack of experts' matrices. Merging can change each of them."""
    widths = dict(program.buffers)
    experts = [op for op in program.ops if isinstance(op, Experts) and op.num_experts > 1]
    return {site: shape for op in experts for site, shape in _matrices(op, widths)}


def _matrices(op: Experts, widths: Mapping[str, int]) -> list[tuple[str, tuple[int, int, int]]]:
    num, inner, width, out = op.num_experts, op.intermediate_size, widths[op.x], widths[op.out]
    before = [(name, (num, inner, width)) for name in (op.gate, op.up) if name is not None]
    return [*before, (op.down, (num, out, inner))]
