"""Random LoRA adapters of tiny models, written as PEFT writes them. Loads nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.parity.tiny import TinyCase, is_cube
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, interleave, write_safetensors

FloatArray = NDArray[np.float32]
Factors = dict[str, tuple[FloatArray, FloatArray]]
"""A [rank, inputs] and B [outputs, rank] by the name of a module in transformers, without a scale."""

EMBEDDINGS = ("embed_in", "embed_tokens", "embed_tokens_per_layer", "embeddings", "wte", "word_embeddings")
"""Ends of the names of modules that look rows up."""
_NO_PRODUCTS = (
    *(
        "wpe",
        "embed_positions",
        "conv.conv",
        "kv_b_proj",
        "mlp.gate",
        "mlp.gate.wg",
        "feed_forward.gate",
        "router.gate",
        "mixer.gate",
        "router",
    ),
    *("shared_expert_gate", *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down"))),
)


def config_of(rank: int, **changes: Any) -> dict[str, Any]:
    """adapter_config.json with the keys that matter, and some that do not; None leaves one out."""
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": "all-linear",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "task_type": "CAUSAL_LM",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def draw(name: str, outputs: int, inputs: int, rank: int, seed: int = 0) -> tuple[FloatArray, FloatArray]:
    """A and B of a module, which change its outputs by about a third of their size. The same on every machine and NumPy."""
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(rank * (inputs + outputs))
    values = (raw >> np.uint64(40)).astype(np.float64) / 2.0**24 - 0.5
    values[: rank * inputs] *= (12 / inputs) ** 0.5
    values[rank * inputs :] *= 0.15 * (12 / rank) ** 0.5
    in_bf16 = (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return in_bf16[: rank * inputs].reshape(rank, inputs), in_bf16[rank * inputs :].reshape(outputs, rank)


def factors_of_llama(model: TinyLlama, *, rank: int = 4, ends: tuple[str, ...] = ("_proj",), seed: int = 0) -> Factors:
    """Factors for the modules of a tiny Llama whose names end so."""
    names = {name.removesuffix(".weight"): shape for name, shape in model.shapes().items() if name.endswith(".weight")}
    return {name: draw(name, *shape, rank, seed) for name, shape in names.items() if len(shape) == 2 and name.endswith(ends)}


def factors_of_case(case: TinyCase, *, rank: int = 3, seed: int = 0) -> Factors:
    """Factors for every matrix of a tiny model that an adapter may change, embeddings included."""
    factors: Factors = {}
    for name, shape in case.shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or not name.endswith(".weight") or module.endswith(_NO_PRODUCTS) or is_cube(name):
            continue
        outputs, inputs = reversed(shape) if name.endswith(case.transposed) else shape
        if module.endswith(EMBEDDINGS):  # of which PEFT has the width as outputs
            outputs, inputs = inputs, outputs
        factors[module] = draw(module, outputs, inputs, rank, seed)
    return factors


def merged(case: TinyCase, factors: Factors, scale: float) -> dict[str, FloatArray]:
    """The case's weights, by transformers' names, with the products of the factors added."""
    weights = case.weights()
    for module, (a, b) in factors.items():
        change = np.float32(scale) * (b @ a)
        is_turned = f"{module}.weight".endswith(case.transposed) or module.endswith(EMBEDDINGS)
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + (change.T if is_turned else change)
    return weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ChangedCase(TinyCase):
    changed: Mapping[str, FloatArray]

    def weights(self) -> dict[str, FloatArray]:
        return dict(self.changed)


def case_with(case: TinyCase, weights: Mapping[str, FloatArray]) -> TinyCase:
    """The case with other weights in its file."""
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    return _ChangedCase(**fields, changed=weights)


def in_float32(case: TinyCase) -> TinyCase:
    gguf = case.gguf and dataclasses.replace(case.gguf, matrix_type="F32")
    return dataclasses.replace(case, dtype="f32", gguf=gguf, has_mxfp4_experts=False)


EACH_ARCHITECTURE = sorted(
    {
        (case.architecture, case.gguf is not None, case.wrapper is not None, bool(case.old_config)): name
        for name, case in reversed(CASES.items())
        if not case.has_mxfp4_experts and not name.startswith(("falcon_h1_gguf", "olmo_hybrid"))  # refused
    }.values()
)
"""A case of every architecture, in each form that its files have."""


def tensors_of(factors: Factors, *, prefix: str = "base_model.model.", middle: str = "") -> dict[str, FloatArray]:
    """The tensors of adapter_model.safetensors; old files have `.default` in the middle."""
    tensors = {}
    for module, halves in factors.items():
        for half, values in zip("AB", halves, strict=True):
            is_embedding = module.endswith(EMBEDDINGS)
            end = f"lora_embedding_{half}{middle}" if is_embedding else f"lora_{half}{middle}.weight"
            tensors[f"{prefix}{module}.{end}"] = values
    return tensors


def write_adapter(
    folder: Path, factors: Factors, *, dtype: str = "bf16", extra: Mapping[str, FloatArray] | None = None, **changes: Any
) -> Path:
    """Write the folder of an adapter, with the rank of its first factors. `extra` are further tensors. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(iter(factors.values()))[0]) if factors else 1
    (folder / "adapter_config.json").write_text(json.dumps(config_of(rank, **changes)))
    write_safetensors(folder / "adapter_model.safetensors", {**tensors_of(factors), **(extra or {})}, dtype)
    return folder


def write_gguf_adapter(
    path: Path,
    factors: Factors,
    names: Mapping[str, str],
    *,
    architecture: str = "llama",
    alpha: float = 8.0,
    heads: Mapping[str, int] | None = None,
    metadata: Mapping[str, str | list[int]] | None = None,
    dtype: str = "F16",
    extra: Mapping[str, FloatArray] | None = None,
) -> Path:
    """Write factors as convert_lora_to_gguf.py of llama.cpp does: `names` has the GGUF name of each module's tensor.

    `heads` are numbers of heads by the ends of names of modules whose rows the converter puts into the interleaved layout.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, architecture)
    for key, value in {"general.type": "adapter", "adapter.type": "lora", **(metadata or {})}.items():
        (writer.add_array if isinstance(value, list) else writer.add_string)(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    tensors = dict(extra or {})
    for module, (a, b) in factors.items():
        num_heads = next((num for end, num in (heads or {}).items() if module.endswith(end)), 0)
        name = names[module]
        tensors[f"{name}.lora_a"] = np.ascontiguousarray(a.T) if name == "token_embd.weight" else a
        tensors[f"{name}.lora_b"] = interleave(b, num_heads) if num_heads else b
    kind = GGMLQuantizationType[dtype]
    for name, values in tensors.items():
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
