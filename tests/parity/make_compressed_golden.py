"""Writes tests/golden/compressed.npz: matrices that the package compressed-tensors has packed, and what it makes of them again.

Run it in an environment that has the packages compressed-tensors and torch: `python -m tests.parity.make_compressed_golden`.
Read by tests/models/test_hf_quantised.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import compressed_tensors
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

GOLDEN = Path(__file__).parents[1] / "golden" / "compressed.npz"
ROWS, COLS = 20, 64
CASES = {
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    "int4-zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int4-rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": True}),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
}


def main() -> None:
    """Scales are numbers of bf16 that half precision holds, too, so that nothing is rounded on the way back."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, np.ndarray] = {}
    for name, (layout, settings) in CASES.items():
        args = QuantizationArgs(type="int", dynamic=False, **settings)
        weight = torch.randn(ROWS, COLS, generator=generator)
        groups = COLS // (args.group_size or COLS)
        scale = (weight.reshape(ROWS, groups, -1).abs().amax(2) / (2 ** (args.num_bits - 1) - 1)).to(torch.bfloat16)
        zeros = torch.randint(-3, 4, scale.shape, generator=generator, dtype=torch.int8)
        state = {"weight": weight.to(torch.bfloat16), "weight_scale": scale, "weight_zero_point": zeros}
        if args.symmetric:
            state["weight_zero_point"].zero_()
        compressor = BaseCompressor.get_value_from_registry(layout)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        packed = compressor.compress(state, scheme)
        # In float32, as bf16 would round the products.
        wide = compressor.decompress({**packed, "weight_scale": packed["weight_scale"].float()}, scheme)["weight"]
        for key, value in packed.items():
            found[f"{name}/{key}"] = (value.view(torch.uint16) if value.dtype is torch.bfloat16 else value).numpy()
        found[f"{name}/values"] = wide.float().numpy()
        scheme_json = json.loads(args.model_dump_json())
        found[f"{name}/config"] = np.array(json.dumps({"format": layout, "weights": scheme_json}))
    np.savez_compressed(GOLDEN, version=np.array(compressed_tensors.__version__), **found)


if __name__ == "__main__":
    main()
