"""Owns which tiny models are compared with adapters, and what their adapters are. No torch.

`make_adapter_golden.py` gives the same folders to PEFT and keeps its answers; `test_adapters.py` gives them to our backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.parity.golden import GOLDEN_DIR, FloatArray
from support.parity.tiny_cases import CASES
from support.tiny_adapters import EMBEDDINGS, Factors, draw, factors_of_case, write_adapter

ADAPTERS_DIR = GOLDEN_DIR / "adapters"
TRAINED = ADAPTERS_DIR / "qv_r4"
"""Folder of the adapter of the default model that `train_adapters.py` made."""

SETTINGS: dict[str, dict[str, Any]] = {
    "gqa_untied_bf16": {},
    "qwen2": {"use_rslora": True, "lora_alpha": 5},
    "phi3": {},
    "gpt2": {"fan_in_fan_out": True},
    "gemma2": {},
    "glm": {"alpha_pattern": {"q_proj": 9, r"model\.layers\.0\.mlp\.down_proj": 1}},
    "falcon": {},
    "lfm2": {},
    "qwen3_moe": {},
}
"""Cases of `tiny_cases.py`, and the settings of their adapters: fused and transposed matrices, scaled and tied embeddings, rows
in another order, short convolutions, and attention beside experts."""


FORMS = ("all", "products")
"""An adapter changes all matrices, or all but the embedding, which no product reads."""


def tiny_factors(name: str, form: str) -> Factors:
    """By transformers' names of modules."""
    factors = factors_of_case(CASES[name])
    return factors if form == "all" else {module: factors[module] for module in factors if not module.endswith(EMBEDDINGS)}


def write_tiny_adapter(name: str, form: str, folder: Path) -> Path:
    """The adapter of a case, as PEFT and we read it."""
    factors = tiny_factors(name, form)
    targets = sorted({module.rpartition(".")[2] for module in factors})  # PEFT reads no tensor of another
    return write_adapter(folder, factors, target_modules=targets, **SETTINGS[name])


SMOLLM2: Mapping[str, tuple[int, int]] = {
    **{f"self_attn.{name}_proj": (rows, 576) for name, rows in (("q", 576), ("k", 192), ("v", 192), ("o", 576))},
    **{f"mlp.{name}_proj": (1536, 576) for name in ("gate", "up")},
    "mlp.down_proj": (576, 1536),
}
"""(outputs, inputs) of the modules of the default model's 30 layers."""
RANKED: Mapping[str, tuple[int, str, dict[str, Any]]] = {
    "r8": (8, "qv", {"lora_alpha": 32}),
    "r16": (16, "qkvo", {"lora_alpha": 48}),
    "r32": (32, "all", {"lora_alpha": 48}),
    "r64": (64, "all", {"lora_alpha": 12, "use_rslora": True}),
}
"""Random adapters of the default model: rank, letters of the projections or all, and settings."""


def write_ranked(name: str, folder: Path) -> Path:
    """One of `RANKED`, as PEFT and we read it."""
    rank, letters, settings = RANKED[name]
    ends = [end for end in SMOLLM2 if letters == "all" or (end.removeprefix("self_attn.")[0] in letters and "attn" in end)]
    modules = [f"model.layers.{layer}.{end}" for layer in range(30) for end in ends]
    factors = {module: draw(module, *SMOLLM2[module.split(".", 3)[3]], rank) for module in modules}
    return write_adapter(folder, factors, target_modules=[end.rpartition(".")[2] for end in ends], **settings)


def load_logits(name: str, form: str) -> FloatArray:
    """PEFT's logits of a case with its adapter, at `kept_positions`."""
    with np.load(GOLDEN_DIR / "adapters.npz") as data:
        logits: FloatArray = data[f"{name}/{form}"]
        return logits
