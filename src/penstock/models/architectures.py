"""The table of architectures: how their files name tensors, what their settings mean, and what a step computes.

The loaders and `deploy` look up architectures by name. docs/how-to/add-a-model.md explains how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation, ModelSpec, Pooling

if TYPE_CHECKING:  # a start reads files of one kind
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.models.gguf_file import GgufFile
    from penstock.models.hf_config import JsonFile

_MODULES = {
    "bert": ("bert", "distilbert", "nomic_bert", "roberta"),
    "distances": ("jina_bert", "mpnet"),
    "gemma": ("exaone4", "gemma2", "gemma3", "glm4", "olmo2"),
    "gpt2": ("gpt2",),
    "gpt_oss": ("gpt_oss",),
    "lfm2": ("lfm2", "lfm2_moe"),
    "llama": ("arcee", "glm", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"),
    "modernbert": ("modernbert",),
    "moe": ("granite_moe", "mixtral", "olmoe", "qwen3_moe"),
    "parallel": ("cohere", "cohere2", "falcon"),
}
"""File in this folder -> our names of the architectures in it. The value of `glm4` is called `GLM4`."""
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {name: f"penstock.models.{module}:{name.upper()}" for module, names in _MODULES.items() for name in names}
)
"""Our name of an architecture -> "module:attribute" of its `Architecture`."""

_DECODERS = {
    "Arcee": "arcee",
    "Cohere": "cohere",
    "Cohere2": "cohere2",
    "Exaone4": "exaone4",
    "Falcon": "falcon",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Glm": "glm",
    "Glm4": "glm4",
    "GptOss": "gpt_oss",
    "Granite": "granite",
    "GraniteMoe": "granite_moe",
    "Lfm2": "lfm2",
    "Lfm2Moe": "lfm2_moe",
    "Llama": "llama",
    "Ministral": "mistral",
    "Ministral3": "mistral",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Olmo2": "olmo2",
    "Olmoe": "olmoe",
    "Phi3": "phi3",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "RW": "falcon",
    "SmolLM3": "smollm3",
    "Starcoder2": "starcoder2",
}
_ENCODERS = {
    "Bert": "bert",
    "DistilBert": "distilbert",
    "ModernBert": "modernbert",
    "MPNet": "mpnet",
    "NomicBert": "nomic_bert",
    "Roberta": "roberta",
    "XLMRoberta": "roberta",
}
_ENCODER_ENDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
HF_CLASSES: Mapping[str, str] = MappingProxyType(
    {f"{stem}ForCausalLM": name for stem, name in _DECODERS.items()}
    | {f"{stem}{end}": name for stem, name in _ENCODERS.items() for end in _ENCODER_ENDS}
    | {
        "GPT2LMHeadModel": "gpt2",
        "Gemma3ForConditionalGeneration": "gemma3",
        "JinaBertModel": "jina_bert",
        "JinaBertForMaskedLM": "jina_bert",
        "Lfm2VlForConditionalGeneration": "lfm2",
        "Mistral3ForConditionalGeneration": "mistral",
        "Qwen3Model": "qwen3",
        "Qwen3VLForConditionalGeneration": "qwen3",
    }
)
"""`architectures` in a config.json -> our name."""

_NAMED_ALIKE = (
    *("arcee", "bert", "cohere2", "exaone4", "falcon", "gemma2", "gemma3", "glm4", "gpt2", "granite", "lfm2", "llama"),
    *("olmo2", "olmoe", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"),
)
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {name: name for name in _NAMED_ALIKE}
    | {
        "command-r": "cohere",
        "gpt-oss": "gpt_oss",
        "granitemoe": "granite_moe",
        "lfm2moe": "lfm2_moe",
        "mistral3": "mistral",
        "modern-bert": "modernbert",
        "nomic-bert": "nomic_bert",
        "qwen3moe": "qwen3_moe",
    }
)
"""`general.architecture` in a GGUF file -> our name."""

_REASONS = {
    "its attention has latent keys and values, which the KV cache can't hold yet": (
        *("deepseek2", "deepseekv2", "deepseekv3", "deepseekv32", "kimik2", "kimik25", "longcatflash", "minicpm3"),
    ),
    "its layers have a recurrent state that is too large for the blocks of the KV cache": (
        *("bamba", "codestralmamba", "falconh1", "falconmamba", "granitehybrid", "granitemoehybrid", "jamba", "kimilinear"),
        *("mamba", "mamba2", "nemotronh", "plamo2", "qwen35", "qwen35moe", "qwen3next", "recurrentgemma"),
        *("rwkv", "rwkv5", "rwkv6", "rwkv7", "zamba", "zamba2"),
    ),
    "the keys and values of its layers differ in shape": ("deci", "decilm", "gemma3n", "gemma4", "openelm"),
    "it writes text by ALiBi positions, which backends compute for encoders alone": ("bloom", "jais", "mpt"),
    "it has an encoder and a decoder, and Penstock serves either alone": ("bart", "t5"),
    "its attention has scores of positions against tokens, which no backend computes": ("deberta", "debertav2"),
    "its layers share their weights": ("albert",),
    "its positions or its layers are not those of BERT": ("eurobert", "jinabertv2", "jinabertv3", "neobert", "nomicbertmoe"),
    "its attention is sparse, which no backend computes": ("bigbird", "longformer"),
}
REFUSED: Mapping[str, str] = MappingProxyType({name: why for why, names in _REASONS.items() for name in names})
"""Family of an architecture, as `_family` makes it -> why it is not served."""
_MAX_LIKENED_CHARS = 64
"""Finding similar names takes time quadratic in their length; real names are shorter."""
_CLASS_END = re.compile(r"(?:For[A-Z]\w*|LMHeadModel|Model)$")


def _family(name: str) -> str:
    """Return the family in a class's name, in lower case: `Kimi_K25ForCausalLM` is of `kimik25`."""
    return re.sub(r"[^a-z0-9]", "", _CLASS_END.sub("", name).lower())


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Return a table of tensors: for each `x` -> `y`, `x.weight` -> `y` and `x.bias` -> `y_bias`."""
    return {
        f"{theirs}.{end}": f"{ours}{suffix}"
        for theirs, ours in names.items()
        for end, suffix in (("weight", ""), ("bias", "_bias"))
    }


HF_TOP: Mapping[str, str] = MappingProxyType(
    {"model.embed_tokens.weight": "embed", **with_biases({"model.norm": "norm"}), "lm_head.weight": "output"}
)
GGUF_TOP: Mapping[str, str] = MappingProxyType(
    {"token_embd.weight": "embed", **with_biases({"output_norm": "norm"}), "output.weight": "output"}
)
"""Names of tensors outside of layers -> ours, in most models."""
HF_LAYER: Mapping[str, str] = MappingProxyType(
    with_biases(
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "q",
            "self_attn.k_proj": "k",
            "self_attn.v_proj": "v",
            "self_attn.o_proj": "o",
            "self_attn.q_norm": "q_norm",
            "self_attn.k_norm": "k_norm",
            "post_attention_layernorm": "mlp_norm",
            "mlp.gate_proj": "gate",
            "mlp.up_proj": "up",
            "mlp.down_proj": "down",
        }
    )
)
"""End of a tensor's name after "model.layers.{i}.", in most models -> end of our name after "layers.{i}."."""
GGUF_LAYER: Mapping[str, str] = MappingProxyType(
    with_biases(
        {
            "attn_norm": "attn_norm",
            "attn_q": "q",
            "attn_k": "k",
            "attn_v": "v",
            "attn_output": "o",
            "attn_q_norm": "q_norm",
            "attn_k_norm": "k_norm",
            "post_attention_norm": "post_attn_norm",
            "ffn_norm": "mlp_norm",
            "ffn_gate": "gate",
            "ffn_up": "up",
            "ffn_down": "down",
            "post_ffw_norm": "post_mlp_norm",
        }
    )
)
"""End of a tensor's name after "blk.{i}." -> end of our name after "layers.{i}."."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How a tensor of a file becomes one or more of our weights.

    The rows of the tensor are divided among the weights. The tensor may be a cube: one matrix for each expert. In a bias,
    columns take the place of rows.
    """

    names: tuple[str, ...]
    """Ends of our names, in the order of their rows. The program says how many rows each has."""
    is_transposed: bool = False
    """The file has inputs as rows and outputs as columns."""
    is_interleaved: bool = False
    """The weights take turns: row i belongs to weight i modulo their number."""
    is_by_kv_head: bool = False
    """The file has the rows of all weights for the first key-value head, then those for the second, and so on."""


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer of a head: norm(activation(x @ weight.T + bias))."""

    name: str
    """The beginning of its tensors' names."""
    activation: Activation | None = None
    is_last: bool = False
    """The layer has a column for each label; the others have the model's width."""
    has_bias: bool = True
    norm: str = ""
    """The beginning of the names of the norm's tensors; empty without a norm."""


@dataclass(frozen=True, slots=True)
class Head:
    """The layers that a class of models has after the last one: a classifier, for example."""

    pooling: Pooling
    layers: tuple[HeadLayer, ...]

    @property
    def names(self) -> dict[str, str]:
        """Names of tensors -> ours."""
        ours = {layer.name: f"dense.{number}" for number, layer in enumerate(self.layers)}
        norms = {layer.norm: f"dense.{number}_norm" for number, layer in enumerate(self.layers) if layer.norm}
        return with_biases(ours | norms)


@dataclass(frozen=True, slots=True)
class Made:
    """A weight that no file has: it is computed from another weight, or from the spec alone."""

    source: str
    """Our name of the other weight, which no operation reads; empty without one."""
    source_shape: Callable[[ModelSpec], tuple[int, int]] | None
    make: Callable[[ModelSpec, NDArray[np.float32]], NDArray[np.float32]]
    """Computes the weight from the spec and the values of the other one (empty without one)."""


def _no_head(*_: object) -> Head | None:
    return None


def _as_read(_: object, spec: ModelSpec) -> ModelSpec:
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """All that Penstock knows of one architecture. docs/how-to/add-a-model.md explains how to write one."""

    describe: Callable[[ModelSpec], Program]
    """Returns the program of one step."""
    of_hf: Callable[[JsonFile, ModelSpec], ModelSpec] = _as_read
    """Applies the architecture's own keys of config.json to the spec that the common keys gave.

    Raises ModelError for a setting that would change the result and can't be computed.
    """
    of_gguf: Callable[[GgufFile, ModelSpec], ModelSpec] = _as_read
    """The same for the metadata of a GGUF file."""
    hf_values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    """Adds the keys that `read_spec` requires to config.json: renamed ones, and transformers' defaults."""
    hf_name: Callable[[str], str | None] = lambda name: name
    """A tensor's name in a directory -> its name in the tables, or None if it is not a weight."""
    hf_layer: Mapping[str, str | Parts] = field(default_factory=lambda: HF_LAYER)
    """End of a tensor's name -> end of ours, or the `Parts` in it. `*` stands for the number of an expert."""
    hf_top: Mapping[str, str] = field(default_factory=lambda: HF_TOP)
    """Names of tensors outside of layers -> ours."""
    hf_layers: str = "model.layers."
    """The beginning of the names of the layers' tensors, before the number."""
    hf_head: Callable[[str, JsonFile], Head | None] = _no_head
    """Given a class in `HF_CLASSES` and config.json, returns the head of that class, or None."""
    hf_unread: tuple[str, ...] = ()
    """Tensors whose names begin so are left out, unless the head reads them."""
    gguf_head: Callable[[GgufFile], Head | None] = _no_head
    made: Mapping[str, Made] = field(default_factory=dict)
    """Our names of weights that no file has."""
    is_encoder: bool = False
    """The model reads texts and writes none."""
    gguf_layer: Mapping[str, str | Parts] = field(default_factory=lambda: GGUF_LAYER)
    gguf_top: Mapping[str, str] = field(default_factory=lambda: GGUF_TOP)
    is_interleaved_in_hf: bool = False
    """In transformers and in its files, neighbouring columns of a head turn as a pair. Ours are half-split: the loader reorders
    the rows of q and k, but not those of `Parts`."""
    is_interleaved_in_gguf: bool = False
    """The same for GGUF files."""
    has_partial_rope: bool = False
    """Rotations may turn only the first columns of a head."""
    is_yarn_truncated_in_gguf: bool = True
    """YaRN's range of pairs is rounded to whole pairs. GGUF files do not say."""
    has_local_base_in_gguf: bool = False
    """`of_gguf` reads `rope.freq_base_swa`, the base of layers with windows. Otherwise it must equal the base of all layers."""
    hf_norm_offset: float = 0.0
    """Added to the weights of norms of a Hugging Face directory: Gemma stores them less 1."""


def our_name(name: str, known: Mapping[str, str], path: Path) -> str:
    """Return our name of an architecture. `known` is `HF_CLASSES` or `GGUF_NAMES`. Raises ModelError if it is not supported."""
    found = known.get(name)
    if found is None:
        reason = REFUSED.get(_family(name))
        why = "" if reason is None else f": {reason}"
        raise ModelError(f"{path}: the architecture {name} is not supported{why}.", remedy=_like(name, known))
    return found


def _like(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the most similar supported ones, and where to find all of them."""
    from difflib import get_close_matches  # only a wrong name needs it

    close = get_close_matches(name[:_MAX_LIKENED_CHARS], sorted(known), n=3)
    nearest = f"The nearest that are: {', '.join(close)}. " if close else ""
    return f"{nearest}docs/models.md lists all that are supported."


def find(name: str) -> Architecture:
    """Return the architecture that we call `name`. Raises ModelError for an unknown name."""
    target = ARCHITECTURES.get(name)
    if target is None:
        raise ModelError(
            f"The architecture {name!r} is not supported.", remedy=f"Supported are: {', '.join(sorted(ARCHITECTURES))}."
        )
    module, _, attribute = target.partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, Architecture)
    return found


def describe(spec: ModelSpec) -> Program:
    """Return the program of one step of a model. Raises ModelError for an architecture that is not supported."""
    return find(spec.architecture).describe(spec)
