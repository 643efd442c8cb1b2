"""Makes tests/golden/tiny.npz: transformers' logits of the tiny random models. Run by hand, in an environment with torch.

    PYTHONPATH=src python -m tests.parity.make_tiny_golden

Hugging Face directories are read by transformers itself (`from_pretrained`), GGUF files through `GgufReference`. For each
case `NAME/logits` holds every eighth token's logits and the last one's, computed in float32 with keys and values rounded to
bfloat16, which is the cache's type; `NAME/weights_sha256` tells the weights that they belong to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from .golden import GOLDEN_DIR, FloatArray
from .reference_model import GgufReference, TorchExecutor
from .simulate import bf16_cache
from .tiny import CASES, TinyCase, case_token_ids, kept_positions, weights_sha256, write_case


def tiny_logits(case: TinyCase, directory: Path) -> FloatArray:
    """Logits of every token, float32 [num_tokens, vocab_size]."""
    path = write_case(case, directory)
    if case.gguf_type:
        model = GgufReference(path).model()
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with bf16_cache(model):
        return TorchExecutor(model).forward_logits(case_token_ids(case))


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            logits = tiny_logits(case, Path(directory))
        arrays[f"{name}/logits"] = logits[kept_positions(case)]
        arrays[f"{name}/weights_sha256"] = np.array(weights_sha256(case))
        print(f"{name}: {len(logits)} tokens, logits of {logits.std():.2f} deviation")
    np.savez_compressed(GOLDEN_DIR / "tiny.npz", **arrays)


if __name__ == "__main__":
    main()
