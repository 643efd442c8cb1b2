"""Computes linear layers. Layers with the same input are one product.

Dense products use cuBLAS. Quantised and fp8 matrices are multiplied directly for few tokens, and unpacked part by part for
many. With `deterministic`, all kernels are our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.backends.cuda.kernels import activation, dequantise, gemm, norm, splits
from penstock.backends.cuda.weights import DenseMatrix, Matrix, QuantisedMatrix
from penstock.types.model_spec import Activation

MAX_FUSED_TOKENS = 128
"""With more tokens it is faster to unpack the matrix, though that moves several times its bytes."""
UNPACKED_BYTES = 256 << 20
"""Size of the part of a matrix that is unpacked at once."""


class Workspace:
    """GPU memory for intermediate values of products. All share it, one after the other."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._num_partials = self._num_unpacked = self._num_ordered = 0
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.unpacked = torch.empty(0, dtype=dtype, device=device)
        self.ordered = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, *, num_partials: int, num_unpacked: int, num_ordered: int) -> None:
        self._num_partials = max(self._num_partials, num_partials)
        self._num_unpacked = max(self._num_unpacked, num_unpacked)
        self._num_ordered = max(self._num_ordered, num_ordered)

    def allocate(self) -> None:
        """Allocate the buffers. Call this after all `reserve` calls and before any operation."""
        self.partials = torch.empty(self._num_partials, dtype=torch.float32, device=self._device)
        self.unpacked = torch.empty(self._num_unpacked, dtype=self._dtype, device=self._device)
        self.ordered = torch.empty(self._num_ordered, dtype=self._dtype, device=self._device)


class Linear:
    """A linear layer: x @ weight.T (+ bias) (+ residual). The rows of all `matrices`, stacked, are `weight`.

    `bias`: [sum of num_rows].
    """

    def __init__(
        self, matrices: Sequence[Matrix], bias: torch.Tensor | None, workspace: Workspace, *, deterministic: bool
    ) -> None:
        self.matrices = tuple(matrices)
        self._bias = bias
        self._workspace = workspace
        self._deterministic = deterministic

    @property
    def num_rows(self) -> int:
        return sum(matrix.num_rows for matrix in self.matrices)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self.matrices)

    def reserve(self, max_tokens: int) -> None:
        for matrix in self.matrices:
            fused = max_tokens if self._deterministic else min(max_tokens, MAX_FUSED_TOKENS)
            unpacks = isinstance(matrix, QuantisedMatrix) and not self._deterministic and max_tokens > MAX_FUSED_TOKENS
            multiplies = self._deterministic or isinstance(matrix, QuantisedMatrix)
            self._workspace.reserve(
                num_partials=gemm.num_partials(matrix, fused) if multiplies else 0,
                num_unpacked=self._rows_at_a_time(matrix) * matrix.num_cols if unpacks else 0,
                num_ordered=max_tokens * matrix.num_cols if matrix.column_order is not None else 0,
            )

    def __call__(self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Write the product to `out`. Does not allocate or wait.

        x [tokens, num_cols], out [tokens, num_rows]; `residual` may be `out`.
        """
        begin = 0
        for matrix in self.matrices:
            end = begin + matrix.num_rows
            whole = len(self.matrices) == 1
            self._multiply(
                out if whole else out[:, begin:end],
                x,
                matrix,
                None if self._bias is None else self._bias[begin:end],
                residual if whole or residual is None else residual[:, begin:end],
            )
            begin = end

    def and_norm(
        self,
        out: torch.Tensor,
        normed: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        """Write the layer's result to `out`, and the RMS norm of its rows to `normed`."""
        product = self._splits(x)
        if product is None:
            self(out, x, residual)
            norm.rms_norm(normed, out, weight, eps)
        else:
            splits.add_splits_and_norm(out, normed, product, self._bias, residual, weight, eps)

    def and_gate(self, out: torch.Tensor, both: torch.Tensor, x: torch.Tensor, kind: Activation) -> None:
        """Write activation(first half of the product) * second half to `out`. `both`: scratch memory for the product."""
        product = self._splits(x)
        if product is None:
            self(both, x)
            width = out.shape[1]
            activation.gated(out, both[:, :width], both[:, width:], kind)
        else:
            splits.add_splits_and_gate(out, product, self._bias, kind)

    def _splits(self, x: torch.Tensor) -> splits.Splits | None:
        """Return the product as partial sums, if the next operation can add them. That saves a rounding."""
        matrix = self.matrices[0]
        if len(self.matrices) > 1 or isinstance(matrix, DenseMatrix) or self._deterministic:
            return None
        if not gemm.is_split(matrix, len(x)):
            return None
        return gemm.multiply_splits(self._workspace.partials, self._in_order(x, matrix), matrix)

    def _in_order(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        if matrix.column_order is None:
            return x
        ordered = self._workspace.ordered[: x.numel()].view(x.shape)
        return torch.index_select(x, 1, matrix.column_order, out=ordered)

    def _multiply(
        self, out: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> None:
        x = self._in_order(x, matrix)
        is_few = isinstance(matrix, QuantisedMatrix) and len(x) <= MAX_FUSED_TOKENS
        if self._deterministic or is_few:
            is_fixed = self._deterministic
            if gemm.is_split(matrix, len(x)):
                product = gemm.multiply_splits(self._workspace.partials, x, matrix, is_fixed=is_fixed)
                splits.add_splits(out, product, bias, residual)
            else:
                gemm.multiply(out, x, matrix, bias=bias, residual=residual, is_fixed=is_fixed)
        elif isinstance(matrix, DenseMatrix):
            dense_product(out, x, matrix.values, bias, residual)
        else:
            self._multiply_unpacked(out, x, matrix, bias, residual)

    def _multiply_unpacked(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        matrix: QuantisedMatrix,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> None:
        step = self._rows_at_a_time(matrix)
        for begin in range(0, matrix.num_rows, step):
            end = min(begin + step, matrix.num_rows)
            values = self._workspace.unpacked[: (end - begin) * matrix.num_cols].view(end - begin, matrix.num_cols)
            dequantise.unpack(values, matrix, begin)
            dense_product(
                out[:, begin:end],
                x,
                values,
                None if bias is None else bias[begin:end],
                None if residual is None else residual[:, begin:end],
            )

    def _rows_at_a_time(self, matrix: Matrix) -> int:
        row_bytes = int(matrix.num_cols * self._workspace.unpacked.element_size())
        return min(matrix.num_rows, max(1, UNPACKED_BYTES // row_bytes // 1024) * 1024)  # whole tiles


def dense_product(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    """Compute x @ weight.T (+ bias) (+ residual) by cuBLAS, or by torch on a CPU. `residual` may be `out`.

    For logits, `out` may be float32 and x and weight narrower. Then bias and residual must be None.
    """
    if out.dtype != x.dtype:
        _wide_product(out, x, weight)
    elif residual is not None:
        if residual.data_ptr() != out.data_ptr():
            out.copy_(residual)
        out.addmm_(x, weight.t())
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)


def _wide_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    if out.device.type == "cuda":
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    else:
        out.copy_(x @ weight.t())  # torch has no product with a wider result on a CPU
