"""Makes our weights from a file's tensors: renames, divides, stacks and transposes them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.models.architectures import Parts, Run
from penstock.models.formats import WeightFormat
from penstock.models.weights import Cut, WeightTensor, stacked
from penstock.types.model_spec import ModelSpec

_EXPERT = re.compile(r"(.*\bexperts\.)(\d{1,4})(\..*)")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of the file's tensors (`stored`, by the file's names) and of our weights (`wanted`, by our names)."""

    stored: Shapes
    wanted: Shapes
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the file, or a part of one, that makes one of our weights, alone or stacked with other pieces."""

    tensor: str
    names: tuple[str, ...]  # our names of all parts of the tensor
    part: int = 0
    expert: int = 0
    layout: Parts | None = None  # how the tensor is divided; None: it is the weight

    def stored_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the tensor's shape, with a dimension for experts whose transposed matrices lie one below the other."""
        shape, layout, num_experts = without_middle(sizes.stored[self.tensor]), self.layout, sizes.spec.num_experts
        is_stack = layout is not None and layout.is_by_expert and layout.is_transposed
        if is_stack and len(shape) == 2 and shape[0] % num_experts == 0:
            return num_experts, shape[0] // num_experts, shape[1]
        return shape

    def cut(self, name: str, sizes: Sizes) -> tuple[int, int, list[Run]]:
        """Return (number of matrices in the tensor, their columns, the runs of rows of each matrix that belong to this piece).

        If the sizes of the parts do not add up to the tensor's, the run is empty.
        """
        *lead, rows, cols = (1, 1, *self.stored_shape(sizes))
        if self.layout is not None and self.layout.is_transposed:
            rows, cols = cols, rows
        if name.endswith("_bias"):
            lead, rows, cols = [*lead, rows], cols, 1
        num_matrices = math.prod(lead)
        if self.layout is None or len(self.names) == 1:
            return num_matrices, cols, [(0, rows, 1)]
        if self.layout.runs is not None:
            by_part = self.layout.runs(sizes.spec)
            is_whole = sum(num for runs in by_part for _, num, _ in runs) == rows
            return num_matrices, cols, [*by_part[self.part]] if is_whole else [(0, 0, 1)]
        parts = [math.prod(sizes.wanted.get(other, (0, 0))) // max(1, cols * num_matrices) for other in self.names]
        layout = self.layout
        num_runs = sizes.spec.attentions[0].num_kv_heads if layout.is_by_kv_head else 1
        if layout.is_by_expert and num_matrices == 1:  # all experts' matrices lie one below the other
            num_runs = sizes.spec.num_experts
        is_uneven = any(part % num_runs for part in parts)
        if sum(parts) != rows or is_uneven or (self.layout.is_interleaved and len(set(parts)) > 1):
            return num_matrices, cols, [(0, 0, 1)]
        if self.layout.is_interleaved:
            return num_matrices, cols, [(self.part, parts[self.part], len(parts))]
        first, num_rows = sum(parts[: self.part]) // num_runs, parts[self.part] // num_runs
        return num_matrices, cols, [(run * (rows // num_runs) + first, num_rows, 1) for run in range(num_runs)]


def find_pieces(
    names: Iterable[str], *, top: Mapping[str, str], block: re.Pattern[str], layer: Mapping[str, str | Parts]
) -> dict[str, list[Piece]]:
    """Return, for each of our weights, the pieces of the file's tensors that make it.

    - `names`: tensors in the file. An unknown tensor becomes a weight of the same name, which `check_weights` reports.
    - `block`: matches a layer's tensor; its groups are the layer's number and the rest of the name
    - `layer`: maps such a rest to our name; `top` maps the names of all other tensors
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
    return [(our_name, Piece(name, ours, part, expert + (end.place or 0), end)) for part, our_name in enumerate(ours)]


def without_layers(pieces: Mapping[str, list[Piece]], prefix: str, numbers: range) -> dict[str, list[Piece]]:
    """Leave out the layers with these numbers (multi-token prediction). `prefix` begins the layers' tensor names."""

    def is_out(tensor: str) -> bool:
        number = tensor.removeprefix(prefix).partition(".")[0]
        return tensor.startswith(prefix) and re.fullmatch(r"[0-9]{1,6}", number) is not None and int(number) in numbers

    return {name: found for name, found in pieces.items() if not is_out(found[0].tensor)}


def without_shared_keys(pieces: Mapping[str, list[Piece]], spec: ModelSpec) -> dict[str, list[Piece]]:
    """Leave out the key and value weights of layers that read another layer's KV. Files may include them, unused."""
    reading = [number for number, layer in enumerate(spec.layers) if getattr(layer.mixer, "kv_layer", None) is not None]
    unused = {f"layers.{number}.{name}" for number in reading for name in ("k", "v", "k_norm", "v_norm")}
    return {name: found for name, found in pieces.items() if name not in unused}


def with_layouts(pieces: Mapping[str, list[Piece]], sizes: Sizes) -> dict[str, list[Piece]]:
    """Return the pieces with `is_transposed` set where a layout `may_be_transposed`.

    The answer is the same for all such tensors of a file: a square one shows nothing, but then the others are not square.
    """
    is_transposed = any(
        sizes.stored[piece.tensor][-1:] != sizes.wanted.get(name, ())[1:]
        for name, found in pieces.items()
        for piece in found
        if piece.layout is not None and piece.layout.may_be_transposed
    )

    def decided(piece: Piece) -> Piece:
        if piece.layout is None or not piece.layout.may_be_transposed:
            return piece
        return replace(piece, layout=replace(piece.layout, is_transposed=is_transposed))

    return {name: list(map(decided, found)) for name, found in pieces.items()}


def shape_of(name: str, pieces: Sequence[Piece], sizes: Sizes) -> tuple[int, int]:
    """Return the shape (num_rows, num_cols) of the weight that the pieces make, or (0, 0) if they do not fit together."""
    if pieces[0].layout is None:
        shape = without_middle(sizes.stored[pieces[0].tensor])
        return (1, 1, *shape)[-2:] if len(pieces) == 1 and len(shape) <= 2 else (0, 0)  # type: ignore[return-value]
    cuts = [piece.cut(name, sizes) for piece in pieces]
    if len({cols for _, cols, _ in cuts}) > 1 or [piece.expert for piece in pieces] != list(range(len(pieces))):
        return 0, 0
    num_matrices, num_rows = [matrices for matrices, _, _ in cuts], [sum(num for _, num, _ in runs) for _, _, runs in cuts]
    if name.endswith("_bias"):
        return sum(num_matrices), num_rows[0]
    return sum(map(operator.mul, num_matrices, num_rows)), cuts[0][1]


def without_middle(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop the 1 from the shape [channels, 1, positions] of a convolution's kernels. Other shapes stay."""
    return (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else shape


def put_together(
    name: str, pieces: Sequence[Piece], sizes: Sizes, load: Callable[[Piece], Sequence[WeightTensor]]
) -> WeightTensor:
    """Return the weight `name` made of these pieces. `load` returns a piece's tensor as matrices, one for each expert.

    Rows of matrices stay in the file; biases become float32. Raises ModelError if the matrices' formats differ.
    """
    of_matrices = [[Cut(matrix, *run) for run in piece.cut(name, sizes)[2]] for piece in pieces for matrix in load(piece)]
    if name.endswith("_bias"):
        values = np.concatenate([np.concatenate([_columns(cut) for cut in cuts], axis=1) for cuts in of_matrices])
        return WeightTensor(name, values.shape[0], values.shape[1], WeightFormat.F32, values)
    return stacked(name, [cut for cuts in of_matrices for cut in cuts])


def _columns(bias: Cut) -> NDArray[np.float32]:
    return bias.tensor.dequantize()[:, bias.first : bias.first + bias.num_rows * bias.step : bias.step]
