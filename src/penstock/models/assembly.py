"""How the tensors of a file become our weights: renamed, cut into parts, put together, transposed. It reads no files.

The loaders find the pieces of each weight by the tables of its architecture, compare their shapes with the program, and put
together those that no tensor has as it is. `models.weights` reads rows of such a weight where they lie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.models.architectures import Parts
from penstock.models.formats import WeightFormat
from penstock.models.weights import Cut, WeightTensor, stacked

_EXPERT = re.compile(r"(.*\bexperts\.)(\d{1,4})(\..*)")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the file, or a part of it, that is one of our weights or a part of one."""

    tensor: str
    """Its name in the file."""
    names: tuple[str, ...]
    """Our names of all its parts."""
    part: int = 0
    """Which of them this is."""
    expert: int = 0
    layout: Parts | None = None
    """How the file has it; None: as we do."""

    def cut(self, name: str, shapes: Shapes, wanted: Shapes) -> tuple[int, int, int, int, int]:
        """(matrices, columns; first row, number of rows, step between them in each matrix); no rows if the parts do not fit.

        `shapes` are those of the file's tensors, `wanted` those of our weights. The columns of a bias are what rows are here.
        """
        *lead, rows, cols = (1, 1, *shapes[self.tensor])
        if self.layout is not None and self.layout.is_transposed:
            rows, cols = cols, rows
        if name.endswith("_bias"):
            lead, rows, cols = [*lead, rows], cols, 1
        num_matrices = math.prod(lead)
        if self.layout is None or len(self.names) == 1:
            return num_matrices, cols, 0, rows, 1
        sizes = [math.prod(wanted.get(other, (0, 0))) // max(1, cols * num_matrices) for other in self.names]
        if sum(sizes) != rows or (self.layout.is_interleaved and len(set(sizes)) > 1):
            return num_matrices, cols, 0, 0, 1
        if self.layout.is_interleaved:
            return num_matrices, cols, self.part, sizes[self.part], len(sizes)
        return num_matrices, cols, sum(sizes[: self.part]), sizes[self.part], 1


def find_pieces(
    names: Iterable[str], *, top: Mapping[str, str], block: re.Pattern[str], layer: Mapping[str, str | Parts]
) -> dict[str, list[Piece]]:
    """The pieces of each of our weights, by its name; a tensor that is unknown keeps its own, for the error message.

    `block` matches the number of a layer and the end of a tensor's name, which `layer` has; `top` has the others.
    The number of an expert is `*` in `layer`.
    """
    found: dict[str, list[Piece]] = {}
    for name in names:
        for our_name, piece in _pieces_of(name, top, block, layer):
            found.setdefault(our_name, []).append(piece)
    return {name: sorted(pieces, key=lambda piece: piece.expert) for name, pieces in found.items()}


def _pieces_of(
    name: str, top: Mapping[str, str], block: re.Pattern[str], layer: Mapping[str, str | Parts]
) -> Iterable[tuple[str, Piece]]:
    match = block.fullmatch(name)
    if match is None:
        return [(top.get(name, name), Piece(name, (name,)))]
    end, expert = layer.get(match[2]), 0
    if end is None and (of_expert := _EXPERT.fullmatch(match[2])):
        end, expert = layer.get(f"{of_expert[1]}*{of_expert[3]}"), int(of_expert[2])
        end = Parts((end,)) if isinstance(end, str) else end
    if end is None:
        return [(name, Piece(name, (name,)))]
    at = f"layers.{int(match[1])}"
    if isinstance(end, str):
        return [(f"{at}.{end}", Piece(name, (end,)))]
    ours = tuple(f"{at}.{part}" for part in end.names)
    return [(our_name, Piece(name, ours, part, expert, end)) for part, our_name in enumerate(ours)]


def shape_of(name: str, pieces: Sequence[Piece], shapes: Shapes, wanted: Shapes) -> tuple[int, int]:
    """(num_rows, num_cols) of what the pieces make; vectors are [1, n]. (0, 0) if they make nothing that fits."""
    if pieces[0].layout is None:
        shape = shapes[pieces[0].tensor]
        return (1, *shape)[-2:] if len(pieces) == 1 and len(shape) in (1, 2) else (0, 0)  # type: ignore[return-value]
    cuts = [piece.cut(name, shapes, wanted) for piece in pieces]
    is_right = len({cols for _, cols, *_ in cuts}) == 1 and [piece.expert for piece in pieces] == list(range(len(pieces)))
    if not is_right:
        return 0, 0
    if name.endswith("_bias"):
        return sum(matrices for matrices, *_ in cuts), cuts[0][3]
    return sum(matrices * rows for matrices, _, _, rows, _ in cuts), cuts[0][1]


def put_together(
    name: str, pieces: Sequence[Piece], shapes: Shapes, wanted: Shapes, load: Callable[[Piece], Sequence[WeightTensor]]
) -> WeightTensor:
    """The weight that the pieces make, of which `shape_of` is right. `load` makes the matrices of a piece's whole tensor.

    Raises ModelError if they are of different formats. Rows of matrices stay in the file; biases become F32.
    """
    cuts: list[Cut] = []
    for piece in pieces:
        _, _, first, num_rows, step = piece.cut(name, shapes, wanted)
        cuts += [Cut(matrix, first, num_rows, step) for matrix in load(piece)]
    if name.endswith("_bias"):
        parts = [cut.tensor.dequantize()[:, cut.first : cut.first + cut.num_rows * cut.step : cut.step] for cut in cuts]
        values = np.ascontiguousarray(np.concatenate(parts))
        return WeightTensor(name, values.shape[0], values.shape[1], WeightFormat.F32, values)
    return stacked(name, cuts)
