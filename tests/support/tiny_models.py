"""Tiny random Llamas and Qwens as GGUF files or Hugging Face directories, for tests. Writes the formats; loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = ("t h", "Ġ a", "th e", "i n", "Ġ the")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyLlama:
    """Sizes of a random model; equal values, the seed included, give equal weights.

    The vocabulary has 264 tokens: `SPECIAL_TOKENS`, the 256 bytes, and five merges. `vocab_size` may be larger.
    """

    architecture: str = "llama"
    """The name in a GGUF file, where `llama` alone has q and k permuted. In config.json, others than `llama` are Qwen 2."""
    vocab_size: int = 264
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    max_model_len: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str | None = None
    """None, `linear` (factor 4), `llama3` (factor 8, original context 64, low 1, high 4), or of GGUF files `longrope`."""
    is_tied: bool = True
    has_qkv_bias: bool = False
    seed: int = 0

    def weights(self) -> dict[str, FloatArray]:
        """By Hugging Face name: matrices [out, in] with entries of about 1 / sqrt(in), norms around 1."""
        rng = np.random.default_rng(self.seed)
        return {name: _draw(rng, name, shape) for name, shape in self.shapes().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden_size,),
            "self_attn.q_proj.weight": (heads, self.hidden_size),
            "self_attn.k_proj.weight": (kv_heads, self.hidden_size),
            "self_attn.v_proj.weight": (kv_heads, self.hidden_size),
            "self_attn.o_proj.weight": (self.hidden_size, heads),
            "post_attention_layernorm.weight": (self.hidden_size,),
            "mlp.gate_proj.weight": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj.weight": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj.weight": (self.hidden_size, self.intermediate_size),
        }
        if self.has_qkv_bias:
            shapes |= {f"self_attn.{kind}_proj.bias": (heads if kind == "q" else kv_heads,) for kind in "qkv"}
        return shapes


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> FloatArray:
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return np.asarray(1.0 + 0.1 * noise, dtype=np.float32)
    return np.asarray(noise / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1 * noise, dtype=np.float32)


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE. [256] Source: GPT-2's encoder."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: 256 + idx for idx, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    return [chr(stand_ins.get(byte, byte)) for byte in range(256)]


def vocabulary(num_merges: int = len(_MERGES)) -> list[str]:
    """Token texts by id. [259 + num_merges]"""
    return [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES[:num_merges])]


def _num_merges(vocab_size: int) -> int:
    """How many merges have a token in a model's vocabulary, which has room for all bytes."""
    return min(len(_MERGES), vocab_size - len(vocabulary(0)))


GgufValue = str | int | float | bool | list[int] | list[bool] | list[float] | list[str]
_ADD: Mapping[type, str] = {bool: "add_bool", str: "add_string", int: "add_uint32", float: "add_float32", list: "add_array"}


def write_gguf(
    path: Path,
    model: TinyLlama,
    *,
    matrix_type: str = "Q8_0",
    extra: Mapping[str, GgufValue] | None = None,
    names: Mapping[str, str] | None = None,
) -> Path:
    """Write the model as llama.cpp's converter would: q and k permuted, matrices in a GGML type such as `Q4_1` or `F16`.

    `extra` adds metadata or replaces it. `names` does so with the GGUF names of tensors, by what stands before `.weight` and
    after `model.layers.{i}.` in their Hugging Face names. Returns `path`.
    """
    metadata = _gguf_metadata(model) | dict(extra or {})
    tensors = _gguf_tensors(model, {**_GGUF_NAMES, **(names or {})})
    return write_gguf_file(path, model.architecture, metadata, tensors, model.vocab_size, matrix_type=matrix_type)


def write_gguf_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, GgufValue],
    tensors: Mapping[str, FloatArray],
    vocab_size: int,
    *,
    matrix_type: str,
    other_types: Mapping[str, str] | None = None,
) -> Path:
    """Write metadata, a tokenizer and tensors, those of one dimension as F32, and some others by the end of their names as
    `other_types` says. Returns `path`."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        getattr(writer, _ADD[type(value)])(key, value)
    num_merges = _num_merges(vocab_size)
    tokens = vocabulary(num_merges)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(list(_MERGES[:num_merges]))
    for name, values in tensors.items():
        of_end = [kind for end, kind in (other_types or {}).items() if name.endswith(end)]
        kind = GGMLQuantizationType[of_end[0] if of_end else matrix_type]
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENIZER_METADATA: Mapping[str, GgufValue] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}
"""Keys of a file's tokenizer, beside the tokens and merges."""


def _gguf_metadata(model: TinyLlama) -> dict[str, GgufValue]:
    key = model.architecture
    metadata: dict[str, GgufValue] = {
        "general.name": "Tiny random Llama",
        f"{key}.block_count": model.num_layers,
        f"{key}.context_length": model.max_model_len,
        f"{key}.embedding_length": model.hidden_size,
        f"{key}.feed_forward_length": model.intermediate_size,
        f"{key}.attention.head_count": model.num_heads,
        f"{key}.attention.head_count_kv": model.num_kv_heads,
        f"{key}.attention.key_length": model.head_dim,
        f"{key}.attention.value_length": model.head_dim,
        f"{key}.attention.layer_norm_rms_epsilon": model.norm_eps,
        f"{key}.rope.dimension_count": model.head_dim,
        f"{key}.rope.freq_base": model.rope_theta,
        f"{key}.vocab_size": model.vocab_size,
        **TOKENIZER_METADATA,
    }
    if model.rope_scaling == "linear":
        metadata |= {f"{key}.rope.scaling.type": "linear", f"{key}.rope.scaling.factor": 4.0}
    return metadata


_GGUF_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_tensors(model: TinyLlama, names: Mapping[str, str]) -> dict[str, FloatArray]:
    tensors: dict[str, FloatArray] = {}
    for name, values in model.weights().items():
        stem, _, suffix = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".") if ".layers." in stem else ("", "", stem)
        if model.architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleave(values, model.num_heads if part == "self_attn.q_proj" else model.num_kv_heads)
        tensors[f"{f'blk.{layer}.' if layer else ''}{names[part]}.{suffix}"] = values
    if model.rope_scaling == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(model)
    if model.rope_scaling == "longrope":
        pairs = np.arange(model.head_dim // 2, dtype=np.float32)
        tensors |= {"rope_factors_short.weight": 1 + pairs / 4, "rope_factors_long.weight": 1 + pairs}
    return tensors


def interleave(values: FloatArray, num_heads: int) -> FloatArray:
    """Rows of each head from the half-split rope layout to the interleaved one."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _llama3_divisors(model: TinyLlama) -> FloatArray:
    """The values that llama.cpp's converter stores for `llama3` scaling with the factors that `TinyLlama` states. [head_dim /
    2]"""
    freqs = model.rope_theta ** -(np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim)
    wavelengths = 2 * np.pi / freqs
    smooth = (64 / wavelengths - 1.0) / (4.0 - 1.0)
    blended = 1 / ((1 - smooth) / 8.0 + smooth)
    divisors = np.where(wavelengths > 64 / 1.0, 8.0, np.where(wavelengths < 64 / 4.0, 1.0, blended))
    return divisors.astype(np.float32)


def write_hf(
    directory: Path, model: TinyLlama, *, dtype: str = "bf16", num_shards: int = 1, extra: Mapping[str, Any] | None = None
) -> Path:
    """Write the model as transformers' `save_pretrained` would, with a tokenizer. `dtype` is bf16 (truncated), f16 or f32.

    `extra` adds keys to config.json or replaces them; None removes one. Returns `directory`.
    """
    config = {key: value for key, value in (_hf_config(model) | dict(extra or {})).items() if value is not None}
    return write_hf_files(directory, config, model.weights(), model.vocab_size, dtype=dtype, num_shards=num_shards)


def write_hf_files(
    directory: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, FloatArray],
    vocab_size: int,
    *,
    dtype: str = "bf16",
    num_shards: int = 1,
) -> Path:
    """Write a config.json, weights of any shapes, and a tokenizer. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "tokenizer.json").write_text(json.dumps(_hf_tokenizer(_num_merges(vocab_size))))
    _write_shards(directory, weights, dtype, num_shards)
    return directory


def _write_shards(directory: Path, weights: Mapping[str, FloatArray], dtype: str, num_shards: int) -> None:
    names = list(weights)
    files: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" if num_shards > 1 else "model.safetensors"
        files |= dict.fromkeys(names[shard::num_shards], file)
        write_safetensors(directory / file, {name: weights[name] for name in names[shard::num_shards]}, dtype)
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


Encoded = tuple[str, tuple[int, ...], bytes]
"""Type in capitals, shape and bytes of a tensor."""


def write_safetensors(path: Path, tensors: Mapping[str, FloatArray], dtype: str) -> None:
    """Write arrays as `dtype`."""
    write_encoded(path, {name: (dtype.upper(), values.shape, encode(values, dtype)) for name, values in tensors.items()})


def write_encoded(path: Path, tensors: Mapping[str, Encoded]) -> None:
    """By hand, since NumPy has no bf16. Source: https://github.com/huggingface/safetensors#format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def encode(values: FloatArray, dtype: str) -> bytes:
    """`dtype` is bf16 (truncated), f16 or f32."""
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"f16": np.float16, "f32": np.float32}[dtype]).tobytes()


def _hf_config(model: TinyLlama) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling or "default", "rope_theta": model.rope_theta}
    if model.rope_scaling == "linear":
        scaling["factor"] = 4.0
    if model.rope_scaling == "llama3":
        scaling |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return {
        "architectures": ["LlamaForCausalLM" if model.architecture == "llama" else "Qwen2ForCausalLM"],
        "model_type": model.architecture,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_model_len,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": model.is_tied,
        **({} if model.has_qkv_bias else {"attention_bias": False}),
        "rope_parameters": scaling,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _hf_tokenizer(num_merges: int) -> dict[str, Any]:
    """A tokenizer.json: byte-level BPE with the same vocabulary as the GGUF file's."""
    added = [
        {
            "id": idx,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for idx, text in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: idx for idx, text in enumerate(vocabulary(num_merges))},
            "merges": list(_MERGES[:num_merges]),
        },
    }
