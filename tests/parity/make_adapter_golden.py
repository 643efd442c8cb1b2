"""Makes the golden answers of adapters from PEFT. Run by hand, in an environment with torch, transformers and PEFT.

    PYTHONPATH=src:tests python -m tests.parity.make_adapter_golden [MODEL.gguf]

It writes tests/golden/adapters.npz: logits of tiny random models with random adapters, which PEFT reads from the same folders
as our loader. With the default model's file it writes files called greedy.npz in tests/golden/adapters, too: answers
of the adapter there, which `train_adapters.py` has trained, and of random ones of other ranks.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel

from support.parity.adapter_cases import (
    ADAPTERS_DIR,
    FORMS,
    RANKED,
    SETTINGS,
    TRAINED,
    tiny_factors,
    write_ranked,
    write_tiny_adapter,
)
from support.parity.golden import GOLDEN_DIR, save_greedy
from support.parity.prompts import PROMPTS
from support.parity.reference_model import TorchExecutor
from support.parity.simulate import bf16_cache
from support.parity.tiny import case_token_ids, kept_positions
from support.parity.tiny_cases import CASES

from .make_golden import GoldenMaker
from .make_tiny_golden import make_model

NUM_PROMPTS, NUM_RANKED_PROMPTS = 10, 3


def tiny_logits(name: str, form: str) -> np.ndarray:
    """PEFT's logits with the adapter. AssertionError if PEFT left a tensor of its folder out."""
    case, model = CASES[name], make_model(CASES[name])
    with bf16_cache(model):
        base = TorchExecutor(model).forward_logits(case_token_ids(case))[kept_positions(case)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it warns of tensors that are missing
        warnings.filterwarnings("ignore", message=".*(tie_word_embeddings|tied|fan_in_fan_out).*")
        adapted = PeftModel.from_pretrained(model, write_tiny_adapter(name, form, Path(folder))).eval()
    found = {key.split(".lora_")[0] for key, _ in adapted.named_parameters() if ".lora_" in key}
    wanted = {f"base_model.model.{module}" for module in tiny_factors(name, form)}
    assert found == wanted, f"PEFT has other modules: {sorted(found ^ wanted)[:4]}"
    with bf16_cache(adapted.get_base_model()):
        logits = TorchExecutor(adapted.get_base_model()).forward_logits(case_token_ids(case))[kept_positions(case)]
    change = float(np.sqrt(((logits - base) ** 2).mean()) / base.std())
    print(f"{name}: {len(wanted)} modules, logits moved by {change:.2f} of their deviation")
    assert change > 0.1, "an adapter that changes nothing proves nothing"
    return logits


def write_default(path: Path) -> None:
    """Greedy answers of the default model with each of its adapters, in the format of its own."""
    maker = GoldenMaker(path)
    models = [PeftModel.from_pretrained(executor.model, TRAINED).eval() for executor in (maker.f32, maker.bf16)]
    for executor, model in zip((maker.f32, maker.bf16), models, strict=True):
        executor.model = model.get_base_model()
    save_greedy(ADAPTERS_DIR, maker.greedy_cases(PROMPTS[:NUM_PROMPTS]))
    for name in RANKED:
        with tempfile.TemporaryDirectory() as folder:
            for model in models:
                model.load_adapter(write_ranked(name, Path(folder)), name)
                model.set_adapter(name)
        (ADAPTERS_DIR / name).mkdir(exist_ok=True)
        save_greedy(ADAPTERS_DIR / name, maker.greedy_cases(PROMPTS[:NUM_RANKED_PROMPTS]))


def main() -> None:
    torch.set_num_threads(2)
    np.savez_compressed(
        GOLDEN_DIR / "adapters.npz", **{f"{name}/{form}": tiny_logits(name, form) for name in SETTINGS for form in FORMS}
    )
    if len(sys.argv) > 1:
        write_default(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
