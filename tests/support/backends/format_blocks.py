"""Random matrices in every quantised format, as the bytes of a file: plausible scales, some of them zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import BLOCKS, WeightFormat

F16_AT = {
    WeightFormat.Q4_0: (0,),
    WeightFormat.Q4_1: (0, 2),
    WeightFormat.Q5_0: (0,),
    WeightFormat.Q5_1: (0, 2),
    WeightFormat.Q8_0: (0,),
    WeightFormat.Q2_K: (80, 82),
    WeightFormat.Q3_K: (108,),
    WeightFormat.Q4_K: (0, 2),
    WeightFormat.Q5_K: (0, 2),
    WeightFormat.Q6_K: (208,),
    WeightFormat.IQ4_NL: (0,),
    WeightFormat.IQ4_XS: (0,),
    WeightFormat.Q1_0: (0,),
    WeightFormat.Q2_0: (0,),
    WeightFormat.TQ1_0: (52,),
    WeightFormat.TQ2_0: (64,),
    WeightFormat.IQ1_S: (0,),
    WeightFormat.IQ1_M: (),
    WeightFormat.IQ2_XXS: (0,),
    WeightFormat.IQ2_XS: (0,),
    WeightFormat.IQ2_S: (0,),
    WeightFormat.IQ3_XXS: (0,),
    WeightFormat.IQ3_S: (0,),
    WeightFormat.MXFP4: (),
    WeightFormat.NVFP4: (),
}
"""Bytes of a block at which a half-precision number begins."""
TYPICAL = {
    WeightFormat.Q8_0: 4e-4,
    WeightFormat.IQ4_NL: 4e-4,
    WeightFormat.Q6_K: 4e-5,
    WeightFormat.IQ4_XS: 4e-5,
    WeightFormat.Q1_0: 2e-2,
    WeightFormat.Q2_0: 2e-2,
    WeightFormat.TQ1_0: 2e-2,
    WeightFormat.TQ2_0: 2e-2,
    WeightFormat.IQ1_S: 5e-3,
    WeightFormat.IQ1_M: 5e-3,
}
"""Scales that give weights of about 0.02 to 0.1; of the others 0.005, with scales of several bits 0.0002."""


def put_iq1_m_scales(blocks: NDArray[np.uint8], scales: NDArray[np.float16]) -> None:
    """Four bits of a block's scale are the highest ones of each of its last four words."""
    nibbles = scales.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
    blocks[:, 49::2] = blocks[:, 49::2] & 15 | nibbles.astype(np.uint8) << 4


def random_blocks(
    rng: np.random.Generator, fmt: WeightFormat, rows: int, cols: int, *, zeros: bool = True
) -> NDArray[np.uint8]:
    """[rows, bytes of a row]; with `zeros`, some scales are zero."""
    width, num_bytes = BLOCKS[fmt]
    blocks = rng.integers(0, 256, (rows * (cols // width), num_bytes), dtype=np.uint8)
    typical = TYPICAL.get(fmt, 5e-3 if width == 32 else 2e-4)
    for at in F16_AT[fmt]:
        scales = (typical * rng.uniform(0.5, 2, len(blocks)) * rng.choice([-1, 1], len(blocks))).astype(np.float16)
        if zeros:
            scales[rng.random(len(blocks)) < 0.1] = 0
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if fmt is WeightFormat.IQ1_M:
        put_iq1_m_scales(blocks, (typical * rng.uniform(0.5, 2, len(blocks))).astype(np.float16))
    if fmt is WeightFormat.MXFP4:
        blocks[:, 0] = rng.choice([0, *range(119, 124)], len(blocks)) if zeros else rng.integers(119, 124, len(blocks))
    if fmt is WeightFormat.NVFP4:
        blocks[:, :4] = rng.integers(0 if zeros else 1, 40, (len(blocks), 4))
    return blocks.reshape(rows, -1)


SPOILABLE = [fmt for fmt in BLOCKS if fmt not in (WeightFormat.MXFP4, WeightFormat.NVFP4)]
"""Formats that can hold a scale that is no finite number."""


def spoiled(raw: NDArray[np.uint8], fmt: WeightFormat, broken: float) -> Iterator[NDArray[np.uint8]]:
    """Copies of a row, each with another scale that is no finite number."""
    scale = np.array([broken], np.float16)
    for at in F16_AT[fmt]:
        row = raw.copy()
        row[at : at + 2] = scale.view(np.uint8)
        yield row
    if fmt is WeightFormat.IQ1_M:
        blocks = raw.copy().reshape(-1, BLOCKS[fmt][1])
        put_iq1_m_scales(blocks[:1], scale)
        yield blocks.reshape(-1)
