"""Reads a LoRA adapter from a GGUF file. Tensors have the names of the model's tensors, plus `.lora_a` or `.lora_b`.

Source: convert_lora_to_gguf.py and src/llama-adapter.cpp of llama.cpp.
"""

from __future__ import annotations

import math
from pathlib import Path

from penstock.models import architectures
from penstock.models.adapter import AdapterFactors, sites
from penstock.models.adapter_files import AdapterFiles
from penstock.models.assembly import find_pieces
from penstock.models.gguf import BLOCK, load_tensor
from penstock.models.gguf_file import GgufFile, TensorEntry, parse_gguf
from penstock.models.peft import F32, place, put, refused, scaled
from penstock.models.program import Program
from penstock.types.model_spec import ModelSpec

_LLAMAS = ("llama", "mistral", "mixtral")  # our architectures whose GGUF files call themselves llama


def read_gguf_adapter(
    path: Path, spec: ModelSpec, program: Program, *, max_rank: int, files: AdapterFiles | None = None
) -> AdapterFactors:
    """Return the factors of the adapter in a file. Raises ModelError and limits memory as `peft.read_peft`."""
    files = files or AdapterFiles()
    files.check(path)
    most_bytes = 4 * max_rank * sum(sum(shape) for shape in sites(program).values()) + (1 << 24)  # of metadata
    file = parse_gguf(path, files.read(path, most_bytes))
    if file.get("general.type", str) != "adapter" or file.get("adapter.type", str) != "lora":
        raise refused(path, "this is not a LoRA adapter", "Convert one with llama.cpp's convert_lora_to_gguf.py.")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise refused(path, "activated LoRA begins in the middle of a prompt, which is not computed")
    key = file.architecture
    name = architectures.our_name(key, architectures.GGUF_NAMES, path)
    if spec.architecture != name and not (name == "llama" and spec.architecture in _LLAMAS):
        remedy = "Use an adapter that was trained on the model that is served."
        raise refused(path, f"it is an adapter of a {key}, and the model is a {spec.architecture}", remedy)
    alpha = file.require("adapter.lora.alpha", float)
    if not math.isfinite(alpha):
        raise file.error(f"adapter.lora.alpha is {alpha}")
    pairs = _pairs(file)
    is_embedding = {stem: stem == "token_embd.weight" for stem in pairs}
    architecture = architectures.find(name)
    placed = place(
        {stem: (a.shape[::-1] if is_embedding[stem] else a.shape, b.shape) for stem, (a, b) in pairs.items()},
        find_pieces(pairs, top=architecture.gguf_top, block=BLOCK, layer=architecture.gguf_layer),
        spec,
        program,
        path,
        max_rank=max_rank,
        is_interleaved=architecture.is_interleaved_in_gguf,
        known=[f"blk.0.{end.removesuffix('.weight')}" for end in architecture.gguf_layer if end.endswith(".weight")],
    )
    files.take(sum(math.prod(half.shape) for halves in pairs.values() for half in halves))
    factors: dict[str, tuple[F32, F32]] = {}
    for stem, (a, b) in pairs.items():
        first, second = (load_tensor(file, half, half.name).dequantize() for half in (a, b))
        if is_embedding[stem]:  # here the file has a row for each token
            first = first.T
        factors[stem] = scaled(first, second, alpha / b.shape[1] if alpha else 1.0, path, stem)
    return put(factors, placed)


def _pairs(file: GgufFile) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """Return the tensors of A and B by the name of the model's tensor."""
    for name in file.tensors:
        stem, _, half = name.rpartition(".lora_")
        if half not in ("a", "b"):
            raise refused(file.path, f"{name} is a whole tensor, not a low-rank change of one")
        other = f"{stem}.lora_{'b' if half == 'a' else 'a'}"
        if other not in file.tensors:
            raise file.error(f"there is no {other}")
    stems = [name.removesuffix(".lora_a") for name in file.tensors if name.endswith(".lora_a")]
    return {stem: (file.tensors[f"{stem}.lora_a"], file.tensors[f"{stem}.lora_b"]) for stem in stems}
