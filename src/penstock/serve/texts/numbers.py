"""From the bytes of a text's answer to vectors, scores and cosines. The faces call it; nothing here knows a client's shapes.

NumPy is imported when it is needed: a server that writes text starts without it.
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
    """The model's vector or its first `dimensions` numbers, by default made a vector of length 1."""
    import numpy as np

    vector = np.frombuffer(result.states, np.float32)
    if not is_unit or (encoder.is_normalised and dimensions in (None, len(vector))):
        return vector[:dimensions]
    return unit(vector[:dimensions])


def unit(vector: Vector) -> Vector:
    """The vector divided by its Euclidean length; zeros stay zeros."""
    import numpy as np

    length = math.sqrt(float(np.dot(vector, vector)))
    return vector / np.float32(length) if length else vector


def scaled(vector: Vector, norm: int) -> Vector:
    """The vector divided by its `norm`-norm, or with 0 so that its largest number becomes 32760; zeros stay zeros."""
    import numpy as np

    size = np.abs(vector).max() / 32760 if norm == 0 else np.linalg.norm(vector, ord=norm)
    return (vector / size).astype(np.float32) if size else vector


def as_base64(vector: Vector) -> str:
    """float32 in little-endian order, as OpenAI and Cohere have it."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


def rows(result: TextResult, encoder: EncoderInfo) -> Vector:
    """The answer as it is: [width], or [num_tokens, width] of a model with a row for each token."""
    import numpy as np

    values = np.frombuffer(result.states, np.float32)
    return values.reshape(-1, encoder.width) if encoder.is_per_token else values


def scores(result: TextResult, function: ScoreFunction) -> list[float]:
    """A score for each label. Computed in float64, and sigmoid without an overflow."""
    import numpy as np

    raw = np.frombuffer(result.states, np.float32).astype(np.float64)
    if function is ScoreFunction.SIGMOID:
        small = np.exp(-np.abs(raw))
        raw = np.where(raw >= 0, 1.0, small) / (1.0 + small)
    elif function is ScoreFunction.SOFTMAX:
        raw = np.exp(raw - raw.max())
        raw /= raw.sum()
    return [float(value) for value in raw]


def cosine(first: Vector, second: Vector) -> float:
    """The cosine of two vectors of length 1."""
    import numpy as np

    return float(np.dot(first.astype(np.float64), second.astype(np.float64)))


def ranking(values: Sequence[float]) -> list[int]:
    """Indices of the values, the largest first; of equals the one that came first."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))
