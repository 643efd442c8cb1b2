"""Computes a mixture of experts. Tokens are sorted by expert, so that each expert multiplies adjacent rows.

The number of launches is fixed, for CUDA graphs. A token's results are added in the order in which its experts were chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.backends.cuda.kernels import activation, experts
from penstock.backends.cuda.weights import Matrix, load_matrices, load_vector
from penstock.models.program import Experts
from penstock.models.weights import WeightTensor


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """GPU memory for one mixture of experts. Layers of one shape share it. A pair is a token and one of its experts."""

    experts: torch.Tensor
    """int32 [pairs]"""
    shares: torch.Tensor
    """float32 [pairs]"""
    order: torch.Tensor
    """Pairs by expert. int32 [pairs]"""
    starts: torch.Tensor
    """Index in `order` of each expert's first pair. int32 [num_experts + 1]"""
    inner: torch.Tensor
    """Results of gate and up projection. [pairs, 2 * intermediate_size]"""
    outer: torch.Tensor
    """Results of the down projection. [pairs, width of the result]"""

    @staticmethod
    def allocate(op: Experts, width: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> Scratch:
        num_pairs = max_tokens * op.num_experts_per_token
        return Scratch(
            experts=torch.zeros(num_pairs, dtype=torch.int32, device=device),
            shares=torch.zeros(num_pairs, dtype=torch.float32, device=device),
            order=torch.zeros(num_pairs, dtype=torch.int32, device=device),
            starts=torch.zeros(op.num_experts + 1, dtype=torch.int32, device=device),
            inner=torch.zeros((num_pairs, 2 * op.intermediate_size), dtype=dtype, device=device),
            outer=torch.zeros((num_pairs, width), dtype=dtype, device=device),
        )


class Mixture:
    """A layer's mixture of experts, with its weights. The router is always float32."""

    def __init__(
        self,
        op: Experts,
        find: Callable[[str], WeightTensor],
        scratch: Scratch,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
        round_to_fp8: bool,
    ) -> None:
        def vector(name: str | None, kind: torch.dtype) -> torch.Tensor | None:
            return None if name is None else load_vector(find(name), kind, device)

        def matrix(name: str) -> Matrix:
            (found,) = load_matrices([find(name)], dtype, device, round_to_fp8=round_to_fp8)
            return found

        assert op.gate is not None, "lowering refuses experts without gates"
        self._op, self._scratch, self._deterministic = op, scratch, deterministic
        self._router = load_vector(find(op.router), torch.float32, device).view(op.num_experts, -1)
        self._router_bias, self._selection_bias = (vector(name, torch.float32) for name in (op.router_bias, op.selection_bias))
        self._gate, self._up, self._down = (matrix(name) for name in (op.gate, op.up, op.down))
        names = (op.gate_bias, op.up_bias, op.down_bias)
        self._gate_bias, self._up_bias, self._down_bias = (vector(name, dtype) for name in names)

    @property
    def num_bytes(self) -> int:
        return int(self._router.nbytes) + sum(matrix.num_bytes for matrix in (self._gate, self._up, self._down))

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Apply the layer to `x` and write its result to `out`, both [tokens, width]. They may be the same."""
        if not len(x):
            return
        op, scratch, num_pairs = self._op, self._scratch, len(x) * self._op.num_experts_per_token
        chosen, shares, order = (part[:num_pairs] for part in (scratch.experts, scratch.shares, scratch.order))
        experts.route(chosen, shares, x, self._router, self._router_bias, self._selection_bias, op)
        experts.sort_by_expert(order, scratch.starts, chosen)
        gate, up = scratch.inner[:num_pairs].split(op.intermediate_size, dim=1)
        down = scratch.outer[:num_pairs]

        def multiply(result: torch.Tensor, value: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> None:
            experts.multiply(result, value, matrix, bias, order, scratch.starts, is_fixed=self._deterministic)

        multiply(gate, x, self._gate, self._gate_bias)
        multiply(up, x, self._up, self._up_bias)
        activation.gated(gate, gate, up, op.activation)
        multiply(down, gate, self._down, self._down_bias)
        experts.sum_shares(out, down, shares)
