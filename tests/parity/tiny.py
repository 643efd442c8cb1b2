"""Owns the tiny random models of the parity tests, whose weights are the same on every machine and NumPy. No torch.

`make_tiny_golden.py` writes them for transformers, `test_tiny.py` for the package's own loaders.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiny_models import TinyLlama, write_gguf, write_hf


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableTinyLlama(TinyLlama):
    """Weights from the raw stream of Philox, which NumPy guarantees, rather than from its normal distribution.

    They are exact in bfloat16, so that a file of any type holds the same values.
    """

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: _uniform(f"{self.seed}/{name}", shape) for name, shape in self.shapes().items()}


def _uniform(key: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Matrices with a variance of 1 / inputs, norms in [0.5, 1.5), biases in [-0.5, 0.5)."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
    raw = np.random.Philox(key=seed).random_raw(math.prod(shape))
    values = (raw >> np.uint64(40)).astype(np.float64) / 2.0**24 - 0.5
    centre = 0.0 if len(shape) > 1 or key.endswith(".bias") else 1.0
    scaled = centre + values * (math.sqrt(12 / shape[-1]) if len(shape) > 1 else 1.0)
    bits = scaled.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyCase:
    """A model, and how its file is written."""

    model: PortableTinyLlama
    dtype: str = "bf16"
    """Type of the weights in a Hugging Face directory."""
    num_shards: int = 1
    gguf_type: str = ""
    """If given, the file is a GGUF with matrices of this type instead."""
    extra_config: Mapping[str, Any] | None = None
    num_tokens: int = 40


CASES: Mapping[str, TinyCase] = MappingProxyType(
    {
        "mha_tied_f32": TinyCase(model=PortableTinyLlama(num_heads=4, num_kv_heads=4, is_tied=True, seed=1), dtype="f32"),
        "gqa_untied_bf16": TinyCase(
            model=PortableTinyLlama(num_heads=6, num_kv_heads=2, head_dim=32, hidden_size=96, is_tied=False, seed=2),
            num_shards=3,
        ),
        "mqa_llama3_scaling": TinyCase(
            model=PortableTinyLlama(
                num_heads=4, num_kv_heads=1, rope_scaling="llama3", rope_theta=500000.0, is_tied=False, head_dim=32, seed=3
            ),
            num_tokens=150,
        ),
        "linear_scaling_legacy_config": TinyCase(
            model=PortableTinyLlama(num_kv_heads=4, seed=4, norm_eps=1e-6),
            extra_config={
                "rope_parameters": None,
                "rope_theta": 10000.0,
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "torch_dtype": "bfloat16",
            },
            num_tokens=100,
        ),
        "gguf_q4_1": TinyCase(model=PortableTinyLlama(hidden_size=96, num_heads=6, num_kv_heads=3, seed=5), gguf_type="Q4_1"),
        "gguf_q4_0_untied": TinyCase(model=PortableTinyLlama(is_tied=False, seed=6), gguf_type="Q4_0"),
        "gguf_q8_0": TinyCase(model=PortableTinyLlama(head_dim=32, seed=7), gguf_type="Q8_0"),
        "qwen2_untied_bf16": TinyCase(
            model=PortableTinyLlama(
                architecture="qwen2", has_qkv_bias=True, num_kv_heads=1, rope_theta=1e6, is_tied=False, norm_eps=1e-6, seed=8
            ),
        ),
        "qwen2_gguf_q8_0": TinyCase(
            model=PortableTinyLlama(
                architecture="qwen2", has_qkv_bias=True, hidden_size=96, num_heads=6, rope_theta=1e6, seed=9
            ),
            gguf_type="Q8_0",
        ),
    }
)


def write_case(case: TinyCase, directory: Path) -> Path:
    """The path to load: a directory, or a GGUF file in it."""
    directory.mkdir(parents=True, exist_ok=True)
    if case.gguf_type:
        return write_gguf(directory / "tiny.gguf", case.model, matrix_type=case.gguf_type)
    return write_hf(directory, case.model, dtype=case.dtype, num_shards=case.num_shards, extra=case.extra_config)


def case_token_ids(case: TinyCase) -> list[int]:
    """A fixed sequence over the vocabulary. [num_tokens]"""
    return [(7 * i * i + 31 * i + 3) % case.model.vocab_size for i in range(case.num_tokens)]


def weights_sha256(case: TinyCase) -> str:
    """The checksum of all values, in the order of `shapes()`."""
    digest = hashlib.sha256()
    for values in case.model.weights().values():
        digest.update(values.astype("<f4").tobytes())
    return digest.hexdigest()


def kept_positions(case: TinyCase) -> list[int]:
    """Positions whose logits are stored: every eighth token's and the last one's."""
    return sorted({*range(0, case.num_tokens, 8), case.num_tokens - 1})
