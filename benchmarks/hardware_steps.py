"""How long would steps of an 8B model take on an H100, by its published peaks? Writes the table that comes with Penstock.

    python benchmarks/hardware_steps.py H100 > src/penstock/lab/h100-llama-8b.csv
    python benchmarks/hardware_steps.py H200 > src/penstock/lab/h200-llama-8b.csv

An estimate: the roofline of each operation, with the shares of the peaks that `src/penstock/lab/hardware.csv` assumes. Nobody
has measured these steps. The model is Llama-3.1-8B in bf16, keys and values too (https://huggingface.co/meta-llama/Llama-3.1-8B,
config.json).
"""

from __future__ import annotations

import argparse

from gpu_shapes import SHAPES

from penstock.deploy.forecast import assumed_outline
from penstock.lab.hardware import Hardware, find, known_hardware
from penstock.lab.sizing import ModelSize, roofline, speeds
from penstock.models.formats import Floats
from penstock.models.hf_quantised import Quantisation
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import StepShape

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
DECODE_CONTEXTS = (128, 1024, 8192)
CHUNK_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CHUNK_CONTEXTS = (0, 4096)


def llama_8b() -> ModelSize:
    shape = SHAPES["8b"]
    return assumed_outline(shape.like, shape.spec(), Quantisation("floats"), Floats.AS_STORED).size(KvDtype.BF16)


def lines(hardware: Hardware, size: ModelSize) -> list[str]:
    """The table as CSV."""
    cost = roofline(size, speeds(size, hardware))
    written = [
        f"# hardware: {hardware.description}",
        f"# model: {size.name}",
        "# estimated: yes",
        f"# basis: {hardware.basis}",
        f"# peaks: {hardware.read_bytes_per_s / 1e9:g} GB/s, {hardware.bf16_ops_per_s / 1e12:g} TFLOP/s dense bf16",
        f"# shares: {hardware.read_share:g} of the bandwidth, {hardware.compute_share:g} of the multiply-adds",
        f"# source: {hardware.spec_source}",
        "# made by: benchmarks/hardware_steps.py",
        "rows,tokens,context,ms",
    ]
    shapes = [(rows, 1, context) for rows in DECODE_ROWS for context in DECODE_CONTEXTS]
    shapes += [(1, tokens, context) for tokens in CHUNK_TOKENS for context in CHUNK_CONTEXTS]
    for rows, tokens, context in shapes:
        duration_ns = cost.duration_ns(StepShape(((tokens, context),) * rows, rows))
        written.append(f"{rows},{tokens},{context},{duration_ns / 1e6:.3f}")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", help="a GPU of src/penstock/lab/hardware.csv")
    arguments = parser.parse_args()
    print("\n".join(lines(find(arguments.hardware, known_hardware()), llama_8b())))


if __name__ == "__main__":
    main()
