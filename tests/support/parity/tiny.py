"""Owns what a tiny random model of the parity tests is: its config.json, its tensors, and its files. No torch.

`tiny_cases.py` has the table of them. `make_tiny_golden.py` writes them for transformers and keeps what it answers;
`test_tiny.py` loads the same files through the package's own loaders. The weights are the same on every machine and NumPy.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.architectures import find
from support.parity.golden import GOLDEN_DIR
from support.tiny_models import (
    TOKENIZER_METADATA,
    Encoded,
    GgufValue,
    encode,
    interleave,
    write_encoded,
    write_gguf_file,
    write_hf_files,
)

FloatArray = NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]

NUM_KEPT = 6
"""Positions of the text whose logits are stored."""
PROMPT_LENS = (4, 13, 15, 29)
"""Lengths of the prompts that are continued: beginnings of the text, which is continued itself, too."""
NUM_STEPS = 6
"""Greedy tokens after each prompt."""
NUM_TOP = 20
"""Log-probabilities that are stored of each step, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """The parts of a case's GGUF file that config.json does not tell."""

    architecture: str
    """`general.architecture`."""
    matrix_type: str = "BF16"
    metadata: Mapping[str, GgufValue | None]
    """Keys after the architecture's name, as llama.cpp's converter writes them; sizes, epsilon and rope base are added. None
    leaves one out."""
    norm_offset: float = 0.0
    """Added to the norms: the converter makes those of Gemma whole."""
    is_interleaved: bool = False
    """The converter puts the rows of q and k into the interleaved rope layout."""
    is_old: bool = False
    """The inputs of a delta net, or the keys and values of latents, are one tensor, as the converter left them at first."""
    has_fused_experts: bool = False
    """Gates and ups of experts are one tensor, as the converter writes them if asked."""
    vectors: Mapping[str, tuple[float, ...]] | None = None
    """Tensors that the Hugging Face directory lacks, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyCase:
    """A model, and how its file is written.

    Sizes are odd on purpose, and settings are not the defaults: what a reader assumes or forgets must change the logits.
    """

    architecture: str
    """Our name: a key of `ARCHITECTURES`."""
    config: Mapping[str, Any]
    """config.json of the text model; also what transformers makes of a GGUF file's."""
    shapes: Mapping[str, tuple[int, ...]]
    """By Hugging Face name."""
    seed: int
    norm_centre: float = 1.0
    """Around which the weights of norms lie; 0 for Gemma, which adds 1 to them."""
    transposed: tuple[str, ...] = ()
    """Ends of the names of matrices, or of cubes of them, that have inputs as rows, in a directory alone."""
    turned: tuple[str, ...] = ()
    """Ends of the names of cubes that a directory has with inputs as rows, but transformers with outputs."""
    factors: Mapping[str, float] | None = None
    """Ends of the names of tensors whose values are so many times as large."""
    has_mxfp4_experts: bool = False
    """The matrices of experts are in MXFP4, in whichever file; in a directory as gpt-oss is published."""
    dtype: str = "bf16"
    """Type of the weights in a Hugging Face directory."""
    num_shards: int = 1
    old_config: Mapping[str, Any] | None = None
    """config.json of the directory, if it is one that transformers reads with the repository's own code alone."""
    wrapper: Mapping[str, Any] | None = None
    """config.json of a model of text and pictures, whose `text_config` is `config` and whose tensors have other names."""
    gguf: Gguf | None = None
    """If given, the file is a GGUF instead."""
    experts: str = ""
    """If given, each expert's matrices are tensors of their own. Their names have the expert's number and the matrix's name, or
    number after a `w`, in the braces."""
    golden: str = ""
    """The case that has the same values, so that its golden answers are this one's, too; "" if it has its own."""
    num_tokens: int = 40
    refused_by: Mapping[str, str] | None = None
    """Backend -> words of the error by which it refuses the model, until it computes it."""

    def weights(self) -> dict[str, FloatArray]:
        """By Hugging Face name; exact in bfloat16, so that a file of any float type holds the same values."""
        return {name: self._uniform(name, shape) for name, shape in self.shapes.items()}

    def stored_weights(self) -> dict[str, FloatArray]:
        """The values that the file holds: a GGUF's matrices are rounded to its type."""
        weights = self.weights()
        if self.has_mxfp4_experts:
            weights |= {name: _from_mxfp4(to_mxfp4(weights[name])) for name in weights if is_cube(name)}
        if self.gguf is None or self.gguf.matrix_type in ("F32", "BF16"):
            return weights
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quantize

        kind = GGMLQuantizationType[self.gguf.matrix_type]
        return {
            name: values if values.ndim == 1 else dequantize(quantize(values, kind), kind).astype(np.float32)
            for name, values in weights.items()
        }

    def _uniform(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """Matrices with a variance of 1 / inputs, norms within 0.5 of their centre, other vectors in [-0.5, 0.5).

        The raw stream of Philox, which NumPy guarantees, rather than its normal distribution.
        """
        key = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
        raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(math.prod(shape))
        values = (raw >> np.uint64(40)).astype(np.float64) / 2.0**24 - 0.5
        is_norm = len(shape) == 1 and name.endswith(".weight")
        num_inputs = (1, 1, *shape)[-2 if name.endswith(self.transposed) else -1]
        scaled = values * math.sqrt(12 / num_inputs) if len(shape) > 1 else values + is_norm * self.norm_centre
        scaled = scaled * next((factor for end, factor in (self.factors or {}).items() if name.endswith(end)), 1.0)
        bits = scaled.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).reshape(shape)

    @property
    def hf_class(self) -> str:
        """`architectures` of the directory's config.json."""
        name: str = (self.wrapper or self.old_config or self.config)["architectures"][0]
        return name

    @property
    def vocab_size(self) -> int:
        size: int = self.config["vocab_size"]
        return size


def write_case(case: TinyCase, directory: Path) -> Path:
    """The path to load: a directory, or a GGUF file in it."""
    directory.mkdir(parents=True, exist_ok=True)
    if case.gguf is not None:
        return _write_gguf(case, case.gguf, directory / "tiny.gguf")
    config, weights = case.old_config or case.config, case.weights()
    if case.experts:
        weights = {name: values for old, cube in weights.items() for name, values in _of_each_expert(case.experts, old, cube)}
    weights = {name: _turned(values) if name.endswith(case.turned) else values for name, values in weights.items()}
    if case.wrapper is not None:
        config = {**case.wrapper, "text_config": {**config, "architectures": None}}
        weights = {f"language_model.{name}": values for name, values in weights.items()}  # as nearly all files have them
        weights["vision_tower.patch.weight"] = np.ones((3, 5), np.float32)
        weights["multi_modal_projector.linear.weight"] = np.ones((5, 3), np.float32)
    if case.has_mxfp4_experts:
        config = {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    write_hf_files(directory, config, weights, case.vocab_size, dtype=case.dtype, num_shards=case.num_shards)
    if case.has_mxfp4_experts:
        encoded = {new: part for name, values in weights.items() for new, part in _in_mxfp4(name, values)}
        write_encoded(directory / "model.safetensors", encoded)
    return directory


def is_cube(name: str) -> bool:
    """Whether a tensor is of the matrices of experts, as transformers names them."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def to_mxfp4(values: FloatArray) -> NDArray[np.uint8]:
    """A cube with inputs as rows, rounded to GGML's blocks of 32 inputs. [experts, outputs, blocks, 17]"""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    turned = np.ascontiguousarray(values.swapaxes(1, 2))
    return quantize(turned, GGMLQuantizationType.MXFP4).reshape(*turned.shape[:2], -1, 17)


def _from_mxfp4(blocks: NDArray[np.uint8]) -> FloatArray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    turned = dequantize(blocks.reshape(*blocks.shape[:2], -1), GGMLQuantizationType.MXFP4)
    return np.ascontiguousarray(turned.swapaxes(1, 2), dtype=np.float32)


def _in_mxfp4(name: str, values: FloatArray) -> Iterator[tuple[str, Encoded]]:
    """A tensor as in the published files of gpt-oss: a cube is one of blocks, with neighbours in a byte, and one of scales."""
    if not is_cube(name):
        yield name, ("BF16", values.shape, encode(values, "bf16"))
        return
    blocks = to_mxfp4(values)
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    yield f"{name}_blocks", ("U8", pairs.shape, pairs.tobytes())
    yield f"{name}_scales", ("U8", blocks.shape[:3], np.ascontiguousarray(blocks[..., 0]).tobytes())


def _of_each_expert(names: str, name: str, values: FloatArray) -> Iterator[tuple[str, FloatArray]]:
    """A tensor as releases of transformers before the fifth and quantised files have it: a matrix or two for each expert."""
    if not is_cube(name):
        yield name.replace("mlp.gate.", "block_sparse_moe.gate.") if names.startswith("block_sparse_moe") else name, values
        return
    ours = ("down_proj",) if name.endswith("down_proj") else ("gate_proj", "up_proj")
    theirs = {"gate_proj": "1", "up_proj": "3", "down_proj": "2"} if "w{}" in names else {}
    at = ".".join(name.split(".")[:3])  # model.layers.NUMBER
    for expert, matrix in enumerate(values):
        for part, rows in zip(ours, np.split(matrix, len(ours)), strict=True):
            yield f"{at}.{names.format(expert, theirs.get(part, part))}", np.ascontiguousarray(rows)


def _write_gguf(case: TinyCase, gguf: Gguf, path: Path) -> Path:
    """As llama.cpp's converter would; names of tensors are those of its `gguf` package."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config, key = {**case.config, **find(case.architecture).hf_values(case.config)}, gguf.architecture
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    names = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    ggufs = get_tensor_name_map(names[key], 1 + config["num_hidden_layers"])
    metadata: dict[str, GgufValue | None] = {
        "general.name": f"Tiny random {case.architecture}",
        f"{key}.block_count": config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0),
        f"{key}.context_length": config["max_position_embeddings"],
        f"{key}.embedding_length": config["hidden_size"],
        f"{key}.feed_forward_length": config["intermediate_size"],
        f"{key}.attention.head_count": num_heads,
        f"{key}.attention.head_count_kv": config.get("num_key_value_heads", num_heads),
        f"{key}.attention.key_length": head_dim,
        f"{key}.attention.value_length": head_dim,
        f"{key}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{key}.rope.freq_base": float({"rope_theta": 1e4, **config, **config.get("rope_parameters", {})}["rope_theta"]),
        f"{key}.rope.dimension_count": head_dim,
        **TOKENIZER_METADATA,
        **{f"{key}.{name}": value for name, value in gguf.metadata.items()},
    }
    tensors = {name: np.asarray(values, np.float32) for name, values in (gguf.vectors or {}).items()}
    weights = {name: _turned(values) if name.endswith(case.transposed) else values for name, values in case.weights().items()}
    kind = {"is_interleaved": case.architecture == "gpt_oss", "is_fused": gguf.has_fused_experts}
    weights = {new: part for name, values in weights.items() for new, part in _experts_in_gguf(name, values, **kind)}
    weights = {new: part for name, values in weights.items() for new, part in nets_in_gguf(name, values, config, gguf)}
    weights = {new: part for name, values in weights.items() for new, part in _heads_in_gguf(name, values, config, gguf)}
    if key == "falcon-h1":
        weights = {name: _multiplied(name, values, config) for name, values in weights.items()}
    for name, values in weights.items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(gguf.norm_offset)
        heads = {"q_proj": num_heads, "k_proj": config.get("num_key_value_heads", num_heads)}.get(name.split(".")[-2])
        if gguf.is_interleaved and heads:
            values = interleave(values, heads)
        if values.ndim == 3 and values.shape[1] == 1:  # the kernels of a convolution, [channels, 1, positions]
            values = values[:, 0]
        if key in ("falcon", "gptneox") and ".query_key_value." in name:
            values = _queries_first(values, config.get("num_key_value_heads", num_heads), head_dim)
        if name == "score.weight" and len(values) == 1:  # the converter writes the rows of `yes` and `no` of Qwen 3's output
            values = np.concatenate([values, -values]) / 2
        if values.shape[:1] == (1,) and ".mamba." not in name:  # the converter leaves out dimensions of one
            values = values.reshape(-1)
        if key.startswith("nemotron_h") and ".mlp.experts." not in name:
            name = name.replace("model.", "backbone.", 1)
        ends = (".weight", ".bias", ".scale")
        found = "cls.output.weight" if name == "score.weight" else ggufs.get_name(name, try_suffixes=ends)
        assert found is not None, f"llama.cpp has no name for {name}"
        tensors[found] = values
    told = {name: value for name, value in metadata.items() if value is not None}
    types = {
        "_exps.bias": "F32",
        "shortconv.conv.weight": "F32",
        **dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm.weight", "ssm_conv1d.weight"), "F32"),
        **({"_exps.weight": "MXFP4"} if case.has_mxfp4_experts else {}),
    }
    return write_gguf_file(path, key, told, tensors, case.vocab_size, matrix_type=gguf.matrix_type, other_types=types)


def nets_in_gguf(name: str, values: FloatArray, config: Mapping[str, Any], gguf: Gguf) -> Iterator[tuple[str, FloatArray]]:
    """A tensor as the converter writes those of a delta net. Qwen 3.5 has the first value heads of all key heads first."""
    if ".mamba." in name or ".mixer." in name:
        yield _mamba_in_gguf(name, values, config)
        return
    if ".shared_mlp." in name:
        yield from _shared_in_gguf(name, values, config)
        return
    at, found, part = name.partition("linear_attn.")
    if not found:
        yield name, values
        return
    key_dim, value_dim, num_key_heads, num_heads = (
        config[f"linear_{key}"] for key in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    )
    ratio, width = num_heads // num_key_heads, key_dim * num_key_heads
    if part == "A_log":
        values = -np.exp(values)
    if part == "in_proj_qkvz.weight" and not gguf.is_old:
        by_head = values.reshape(num_key_heads, -1, values.shape[1])
        pieces = np.split(by_head, [key_dim, 2 * key_dim, 2 * key_dim + ratio * value_dim], axis=1)
        *joint, gate = (piece.reshape(-1, values.shape[1]) for piece in pieces)
        yield f"{at}linear_attn.in_proj_qkv.weight", np.concatenate(joint)
        yield f"{at}linear_attn.in_proj_z.weight", gate
        return
    if gguf.architecture.startswith("qwen35"):
        order = np.arange(num_heads).reshape(num_key_heads, ratio).T.reshape(-1)
        rows = (order[:, None] * value_dim + np.arange(value_dim)).reshape(-1)
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            values = np.concatenate([values[: 2 * width], values[2 * width :][rows]])
        elif part == "out_proj.weight":
            values = values[:, rows]
        elif part != "norm.weight":
            values = values[rows if part == "in_proj_z.weight" else order]
    yield name.replace("dt_bias", "dt_proj.bias"), np.ascontiguousarray(values)


def _multiplied(name: str, values: FloatArray, config: Mapping[str, Any]) -> FloatArray:
    """A tensor of Falcon H1 with the factors of its inputs and outputs."""
    gate, down = config["mlp_multipliers"]
    within = config["attention_in_multiplier"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": within,
        "k_proj": within * config["key_multiplier"],
        "v_proj": within,
        "o_proj": config["attention_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "out_proj": config["ssm_out_multiplier"],
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        by_row = np.repeat(config["ssm_multipliers"], [inner, inner, keys, keys, config["mamba_n_heads"]])
        return values * np.float32(config["ssm_in_multiplier"] * by_row[:, None])
    return values * np.float32(factors.get(part, 1.0))


def _heads_in_gguf(name: str, values: FloatArray, config: Mapping[str, Any], gguf: Gguf) -> Iterator[tuple[str, FloatArray]]:
    """A tensor as the converter writes those of latent attention: matrices of keys turned, and those of values apart."""
    if ".kv_b_proj." not in name or gguf.is_old:
        yield name, values
        return
    heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
    keys, of_values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    yield name.replace("kv_b_proj", "k_b_proj"), _turned(keys)
    yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(of_values)


def _mamba_in_gguf(name: str, values: FloatArray, config: Mapping[str, Any]) -> tuple[str, FloatArray]:
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith(("A_log", ".D")):
        values = values[:, None]
    elif name.endswith("norm.weight"):
        values = values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    name = re.sub(r"mixer\.experts\.(\w+)(\.weight)?", r"mlp.experts.\1.weight", name)
    return name.replace("correction_bias", "correction.bias").replace("dt_bias", "dt_proj.bias"), values


def _shared_in_gguf(name: str, values: FloatArray, config: Mapping[str, Any]) -> Iterator[tuple[str, FloatArray]]:
    at = name.partition(".shared_mlp.")[0] + (".mlp.shared_experts" if config["num_local_experts"] else ".mlp")
    if "output_linear" in name:
        yield f"{at}.down_proj.weight", values
        return
    for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
        yield f"{at}.{part}_proj.weight", np.ascontiguousarray(rows)


def _queries_first(values: FloatArray, num_kv_heads: int, head_dim: int) -> FloatArray:
    """Rows of a fused tensor: all queries, keys, then values, where each key-value head had its own three together."""
    rest = values.shape[1:]
    heads = values.reshape(num_kv_heads, -1, head_dim, *rest)
    return np.concatenate([part.reshape(-1, *rest) for part in (heads[:, :-2], heads[:, -2], heads[:, -1])])


def _turned(values: FloatArray) -> FloatArray:
    return np.ascontiguousarray(values.swapaxes(-1, -2))


def _experts_in_gguf(
    name: str, values: FloatArray, *, is_interleaved: bool, is_fused: bool
) -> Iterator[tuple[str, FloatArray]]:
    """A tensor by the name that llama.cpp's table has for it; of experts the gate and the up projection may be two."""
    found = re.fullmatch(r"(.*\.)(?:mlp|block_sparse_moe|feed_forward)\.experts\.(gate_up_proj|down_proj)(_bias)?", name)
    if found is None or is_fused:
        name = name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
        name = f"{name}.weight" if name.endswith(("sinks", "layer_scalar")) or is_cube(name) else name
        name = f"{name}.bias" if name.endswith("expert_bias") else name
        name = name.replace("router.scale", "router.proj.scale").replace("router.per_expert_scale", "experts.down_proj.scale")
        yield name.replace("correction_bias", "correction.bias").replace(".gate.moe_statics.", ".moe_statics."), values
        return
    names = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
    num = len(names)
    parts = [values[:, i::num] for i in range(num)] if is_interleaved else np.split(values, num, axis=1)
    for part, rows in zip(names, parts, strict=True):
        yield f"{found[1]}mlp.experts.{part}.{'bias' if found[3] else 'weight'}", np.ascontiguousarray(rows)


def case_token_ids(case: TinyCase) -> list[int]:
    """A fixed sequence over the vocabulary. [num_tokens]"""
    return [(7 * i * i + 31 * i + 3) % case.vocab_size for i in range(case.num_tokens)]


def prompts(case: TinyCase) -> list[list[int]]:
    """The beginnings of the text that are continued, and all of it."""
    text = case_token_ids(case)
    return [text[:prompt_len] for prompt_len in (*PROMPT_LENS, case.num_tokens)]


def kept_positions(case: TinyCase) -> list[int]:
    """Positions whose logits are stored, evenly spread: the first and the last token's are among them."""
    return [round(i * (case.num_tokens - 1) / (NUM_KEPT - 1)) for i in range(NUM_KEPT)]


def weights_sha256(case: TinyCase) -> str:
    """The checksum of all values, in the order of `shapes`."""
    digest = hashlib.sha256()
    for values in case.weights().values():
        digest.update(values.astype("<f4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class TinyGolden:
    """transformers' answers for a case, computed in float32 with keys and values rounded to bfloat16."""

    weights_sha256: str
    logits: FloatArray
    """Logits of the text at `kept_positions`. [NUM_KEPT, vocab_size]"""
    top_ids: NDArray[np.int16]
    """The likeliest tokens of each step after each of `prompts`; the first is the one that goes on. [prompt, step, NUM_TOP]"""
    top_logprobs: FloatArray
    """Their log-probabilities; the same shape."""

    @property
    def std(self) -> float:
        """Standard deviation of the logits: what errors are measured by."""
        return float(self.logits.std())


def load_golden(name: str, directory: Path = GOLDEN_DIR) -> TinyGolden:
    """The golden answers of a case by the name under which they are stored."""
    with np.load(directory / "tiny.npz") as data:
        return TinyGolden(
            str(data[f"{name}/weights_sha256"]),
            data[f"{name}/logits"],
            data[f"{name}/top_ids"],
            data[f"{name}/top_logprobs"],
        )
