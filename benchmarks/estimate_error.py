"""How far off are step times estimated from a GPU's peaks, compared with its measured kernels?

    penstock profile --import LLMServingSim/profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16 --fit rtx4090.json
    python benchmarks/estimate_error.py RTX4090=rtx4090.json

Steps of Llama-3.1-8B in bf16: some decodes after some positions, alone or beside the chunk of a prompt. Measured over estimated
time, and the share of the steps in which the two differ by a factor of 1.25, 1.5 and 2 at most.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import median

from hardware_steps import llama_8b

from penstock.lab.cost_files import load_cost
from penstock.lab.cost_model import CostModel
from penstock.lab.hardware import find, known_hardware
from penstock.lab.sizing import roofline, speeds
from penstock.types.plan import StepShape

DECODES, CONTEXTS, CHUNKS = (1, 4, 16, 64, 128), (256, 1024, 4096), (0, 256, 1024, 2000)
FACTORS = (1.25, 1.5, 2.0)


def ratios(measured: CostModel, estimated: CostModel) -> dict[tuple[int, int, int], float]:
    """(decodes, positions before each, tokens of a chunk) -> measured over estimated time."""
    found = {}
    for num, context, chunk in product(DECODES, CONTEXTS, CHUNKS):
        rows = ((1, context),) * num + (((chunk, 0),) if chunk else ())
        shape = StepShape(rows, len(rows))
        found[num, context, chunk] = measured.duration_ns(shape) / estimated.duration_ns(shape)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("costs", nargs="+", metavar="HARDWARE=FILE")
    size, result = llama_8b(), {}
    for text in parser.parse_args().costs:
        name, _, path = text.partition("=")
        found = ratios(load_cost(Path(path)).cost, roofline(size, speeds(size, find(name, known_hardware()))))
        for chunk in CHUNKS:
            some = [ratio for (_, _, tokens), ratio in found.items() if tokens == chunk]
            print(f"{name}, chunk of {chunk:4} tokens: {min(some):.2f} to {max(some):.2f}, median {median(some):.2f}")
        values = list(found.values())
        within = {f"within_{factor:g}": sum(1 / factor <= one <= factor for one in values) / len(values) for factor in FACTORS}
        result[name] = {"num_steps": len(values), "least": min(values), "median": median(values), "most": max(values), **within}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
