"""Named buffers for the values between a program's operations.

Buffers have a row per token, or a row per sample after the program gathers rows. Linear operations with the same input write
to adjacent columns of one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.backends.cuda.patterns import Gather, linear_run
from penstock.backends.cuda.supported import REMEDY
from penstock.models.program import Op, Program
from penstock.types.errors import ModelError


class Rows:
    """The first rows of a buffer. A step asks for the same ones in every layer, and slicing takes microseconds."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._last = len(buffer), buffer

    def __call__(self, num_rows: int) -> torch.Tensor:
        kept, rows = self._last
        if kept != num_rows:
            rows = self._buffer[:num_rows]
            self._last = num_rows, rows
        return rows


class Buffers:
    """GPU memory for the values between operations. Raises `ModelError` if the program gives no width for a name."""

    def __init__(
        self, program: Program, dtype: torch.dtype, device: torch.device, *, max_tokens: int, max_samples: int
    ) -> None:
        self._widths = dict(program.buffers)
        self._dtype = dtype
        self._device = device
        self._num_rows = {False: max_tokens, True: max_samples}
        self._made: dict[tuple[str, bool], torch.Tensor] = {}
        self._rows: dict[tuple[int, int], Rows] = {}
        """By address and width."""
        for names, of_samples in _stacks(program.ops):
            widths = [self.width(name) for name in names]
            parts = self._allocate(sum(widths), dtype, of_samples=of_samples).split(widths, dim=1)
            self._made.update({(name, of_samples): part for name, part in zip(names, parts, strict=True)})

    def width(self, name: str) -> int:
        if name not in self._widths:
            raise ModelError(f"the program does not say how wide the buffer {name!r} is.", remedy=REMEDY)
        return self._widths[name]

    def of(self, name: str, *, of_samples: bool) -> torch.Tensor:
        """Return a buffer by name, allocated on first use. It has a row per sample (`of_samples`) or per token."""
        key = (name, of_samples)
        if key not in self._made:
            self._made[key] = self._allocate(self.width(name), self._dtype, of_samples=of_samples)
        return self._made[key]

    def rows_of(self, buffer: torch.Tensor) -> Rows:
        """Return the rows of a buffer, or of several side by side (`together`)."""
        return self._rows.setdefault((buffer.data_ptr(), buffer.shape[1]), Rows(buffer))

    def make_result(self, name: str, width: int, *, of_samples: bool) -> torch.Tensor:
        self._made[name, of_samples] = self._allocate(width, torch.float32, of_samples=of_samples)
        return self._made[name, of_samples]

    def _allocate(self, width: int, dtype: torch.dtype, *, of_samples: bool) -> torch.Tensor:
        return torch.zeros((self._num_rows[of_samples], width), dtype=dtype, device=self._device)


def lie_side_by_side(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether the parts are adjacent columns of one matrix."""
    at = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.stride() != parts[0].stride():
            return False
        at += part.shape[1] * part.element_size()
    return bool(parts[0].stride(0) >= sum(part.shape[1] for part in parts))


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    width = sum(part.shape[1] for part in parts)
    return parts[0].as_strided((len(parts[0]), width), parts[0].stride())


def _stacks(ops: Sequence[Op]) -> list[tuple[tuple[str, ...], bool]]:
    """Return groups of buffers to put in adjacent columns, and whether each group's rows are samples.

    Groups that share a buffer are left out.
    """
    runs: dict[str, set[tuple[str, ...]]] = {}
    found: list[tuple[tuple[str, ...], bool]] = []
    at, of_samples = 0, False
    while at < len(ops):
        run = linear_run(ops, at)
        of_samples |= isinstance(ops[at], Gather)
        names = tuple(op.out for op in run)
        if len(run) > 1:
            for name in names:
                runs.setdefault(name, set()).add(names)
            if (names, of_samples) not in found:
                found.append((names, of_samples))
        at += max(1, len(run))
    return [(names, of_samples) for names, of_samples in found if all(runs[name] == {names} for name in names)]
