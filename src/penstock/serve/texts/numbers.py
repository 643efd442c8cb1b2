"""Turns the bytes of a text's result into vectors, scores and cosines, for all APIs and `LLM`.

NumPy is imported on first use: a server that only generates text starts without it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.serve.texts.call import TextResult
from penstock.types.encoder import EncoderInfo, ScoreFunction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]
    """[dimensions]"""


def embedding(result: TextResult, encoder: EncoderInfo, dimensions: int | None = None, *, is_unit: bool = True) -> Vector:
    """Return the model's vector, or its first `dimensions` numbers, by default scaled to length 1."""
    import numpy as np

    vector = np.frombuffer(result.states, np.float32)
    if not is_unit or (encoder.is_normalised and dimensions in (None, len(vector))):
        return vector[:dimensions]
    return unit(vector[:dimensions])


def unit(vector: Vector) -> Vector:
    """Return the vector divided by its Euclidean length. Zeros stay zeros."""
    import numpy as np

    length = math.sqrt(float(np.dot(vector, vector)))
    return vector / np.float32(length) if length else vector


def scaled(vector: Vector, norm: int) -> Vector:
    """Return the vector divided by its `norm`-norm. 0 scales the largest number to 32760. Zeros stay zeros."""
    import numpy as np

    size = np.abs(vector).max() / 32760 if norm == 0 else np.linalg.norm(vector, ord=norm)
    return (vector / size).astype(np.float32) if size else vector


def as_base64(vector: Vector) -> str:
    """Return base64 of little-endian float32 numbers, as OpenAI and Cohere do."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


def rows(result: TextResult, encoder: EncoderInfo) -> Vector:
    """Return the result unchanged, as an array: [width], or [num_tokens, width] if the model has a row for each token."""
    import numpy as np

    values = np.frombuffer(result.states, np.float32)
    return values.reshape(-1, encoder.width) if encoder.is_per_token else values


def unit_rows(result: TextResult, encoder: EncoderInfo) -> Vector:
    """Return the vectors of a text's tokens, scaled to length 1. Zeros stay zeros."""
    import numpy as np

    found = rows(result, encoder)
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    lengths[lengths == 0.0] = 1.0
    return found if encoder.is_normalised else (found / lengths).astype(np.float32)


def scores(result: TextResult, function: ScoreFunction) -> list[float]:
    """Return a score for each label, computed in float64 without overflow."""
    import numpy as np

    raw = np.frombuffer(result.states, np.float32).astype(np.float64)
    if function is ScoreFunction.SIGMOID:
        small = np.exp(-np.abs(raw))
        raw = np.where(raw >= 0, 1.0, small) / (1.0 + small)
    elif function is ScoreFunction.SOFTMAX:
        raw = np.exp(raw - raw.max())
        raw /= raw.sum()
    return [float(value) for value in raw]


def sparse(result: TextResult) -> tuple[list[int], list[float]]:
    """Return the columns whose number is not 0, and these numbers."""
    import numpy as np

    values = np.frombuffer(result.states, np.float32)
    found = np.flatnonzero(values)
    return found.tolist(), values[found].tolist()


def cosine(first: Vector, second: Vector) -> float:
    """Return the product of two vectors: their cosine if their lengths are 1."""
    import numpy as np

    return float(np.dot(first.astype(np.float64), second.astype(np.float64)))


def max_similarity(query: Vector, document: Vector) -> float:
    """Return the sum, over the query's rows, of the largest cosine with a row of the document. Source: arXiv 2004.12832."""
    import numpy as np

    best = np.full(len(query), -np.inf, np.float32)
    for start in range(0, len(document), 256):  # bounds the memory
        best = np.maximum(best, (query @ document[start : start + 256].T).max(axis=1))
    return float(best.sum(dtype=np.float64))


def ranking(values: Sequence[float]) -> list[int]:
    """Return the indices of the values, largest first. Equal values keep their order."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))
