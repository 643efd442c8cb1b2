"""Makes tests/golden/noise.json: how far arithmetic as good as ours moves the choices along the golden paths. Run by hand.

    python -m tests.parity.measure_noise MODEL.gguf

The threshold of a clear step, and the limits for perplexities of little text, rest on it. Needs torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.parity.compare import HasLogits, compare_greedy, compare_text, summarise_greedy, summarise_perplexity
from support.parity.golden import GOLDEN_DIR, GreedyCase, load_greedy, load_texts
from support.parity.reference_model import GgufReference, TorchExecutor
from support.parity.simulate import bf16_cache, int8_inputs

ROUNDINGS = ((32, 1.0), (32, 1.004), (32, 1.009), (32, 1.015), (64, 1.0))
"""Columns per scale, and how much wider than necessary the steps are."""


def measure(executor: HasLogits, cases: Sequence[GreedyCase]) -> dict[str, Any]:
    comparisons = [compare_greedy(executor, case) for case in cases]
    greedy = summarise_greedy(comparisons)
    paths = summarise_perplexity([comparison.text for comparison in comparisons])
    excerpt = summarise_perplexity([compare_text(executor, text) for text in load_texts()])
    return {
        "margin_error_rms": round(greedy.margin_error_rms, 4),
        "unequal_steps": greedy.num_steps - greedy.num_equal,
        "worst_unequal_margin": round(greedy.worst_unequal_margin, 4),
        "paths_perplexity_ratio_to_bf16": round(paths.ratio_to_bf16, 5),
        "excerpt_perplexity_ratio_to_bf16": round(excerpt.ratio_to_bf16, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a llama-type GGUF file")
    args = parser.parse_args()
    reference, cases = GgufReference(args.model), load_greedy()
    noise = {"bf16 throughout": measure(TorchExecutor(reference.model(torch.bfloat16)), cases)}
    model = reference.model()
    for group_size, stretch in ROUNDINGS:
        with int8_inputs(model, group_size, stretch), bf16_cache(model):
            name = f"int8 inputs in groups of {group_size}, steps {stretch} wide, bf16 cache"
            noise[name] = measure(TorchExecutor(model), cases)
            print(name, noise[name], flush=True)
    (GOLDEN_DIR / "noise.json").write_text(json.dumps(noise, indent=1) + "\n")


if __name__ == "__main__":
    main()
