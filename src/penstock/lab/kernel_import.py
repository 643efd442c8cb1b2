"""Makes cost models from published tables of kernel times. Each format has its own reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path

from penstock.lab import aiconfigurator, llmservingsim, vidur
from penstock.lab.cost_files import CostFileError, SavedCost
from penstock.lab.kernel_files import USUAL, Choice

READERS: Sequence[tuple[Callable[[Path], bool], Callable[[Path, Choice], SavedCost]]] = (
    (vidur.is_there, vidur.read),  # before the next, which has an attention.csv, too
    (llmservingsim.is_there, llmservingsim.read),
    (aiconfigurator.is_there, aiconfigurator.read),
)
"""(whether a folder has a format, how to read it) for each format."""


def import_folder(folder: Path, choice: Choice = USUAL) -> SavedCost:
    """Read a folder of kernel tables. Raises CostFileError, which names the file and the line."""
    for is_there, read in READERS:
        if not is_there(folder):
            continue
        try:
            saved = read(folder, choice)
        except (ValueError, ArithmeticError) as error:
            raise CostFileError(f"{folder} has unusable tables: {error}.", remedy="Copy the folder again.") from None
        if saved.cost.kernels is None or not all(map(isfinite, saved.cost.kernels.times())):
            raise CostFileError(f"{folder} has times or sizes that are too large.", remedy="Copy it again.")
        return saved
    remedy = (
        "LLMServingSim's folders have dense.csv, attention.csv and per_sequence.csv, and Vidur's mlp.csv and attention.csv; "
        "AIConfigurator's are systems, such as data/h200_sxm."
    )
    raise CostFileError(f"{folder} has no tables of kernels that Penstock reads.", remedy=remedy)
