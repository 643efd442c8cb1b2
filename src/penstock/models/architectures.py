"""The table of architectures: what each one's files call its tensors, what its settings mean, and what a step of it computes.

The loaders and `deploy` ask here by name; a new architecture is one value in one file and one line here
(docs/how-to/add-a-model.md). Reads no files itself.
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

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "arcee": "penstock.models.arcee:ARCEE",
        "bert": "penstock.models.bert:BERT",
        "distilbert": "penstock.models.bert:DISTILBERT",
        "jina_bert": "penstock.models.jina_bert:JINA_BERT",
        "modernbert": "penstock.models.modernbert:MODERNBERT",
        "mpnet": "penstock.models.mpnet:MPNET",
        "nomic_bert": "penstock.models.nomic_bert:NOMIC_BERT",
        "roberta": "penstock.models.bert:ROBERTA",
        "cohere": "penstock.models.cohere:COHERE",
        "cohere2": "penstock.models.cohere:COHERE2",
        "exaone4": "penstock.models.exaone4:EXAONE4",
        "falcon": "penstock.models.falcon:FALCON",
        "gemma2": "penstock.models.gemma:GEMMA2",
        "gemma3": "penstock.models.gemma:GEMMA3",
        "glm": "penstock.models.glm4:GLM",
        "glm4": "penstock.models.glm4:GLM4",
        "gpt2": "penstock.models.gpt2:GPT2",
        "gpt_oss": "penstock.models.gpt_oss:GPT_OSS",
        "granite": "penstock.models.granite:GRANITE",
        "lfm2": "penstock.models.lfm2:LFM2",
        "lfm2_moe": "penstock.models.lfm2:LFM2_MOE",
        "llama": "penstock.models.llama:LLAMA",
        "mistral": "penstock.models.mistral:MISTRAL",
        "olmo2": "penstock.models.olmo2:OLMO2",
        "phi3": "penstock.models.phi3:PHI3",
        "qwen2": "penstock.models.llama:QWEN2",
        "qwen3": "penstock.models.qwen3:QWEN3",
        "smollm3": "penstock.models.smollm3:SMOLLM3",
        "mixtral": "penstock.models.moe:MIXTRAL",
        "qwen3_moe": "penstock.models.moe:QWEN3_MOE",
        "olmoe": "penstock.models.moe:OLMOE",
        "granite_moe": "penstock.models.moe:GRANITE_MOE",
        "starcoder2": "penstock.models.starcoder2:STARCODER2",
    }
)
"""Our name of an architecture -> "module:attribute" of its `Architecture`."""
HF_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "ArceeForCausalLM": "arcee",
        "BertModel": "bert",
        "BertForMaskedLM": "bert",
        "BertForSequenceClassification": "bert",
        "BertForTokenClassification": "bert",
        "DistilBertModel": "distilbert",
        "DistilBertForMaskedLM": "distilbert",
        "DistilBertForSequenceClassification": "distilbert",
        "DistilBertForTokenClassification": "distilbert",
        "JinaBertModel": "jina_bert",
        "JinaBertForMaskedLM": "jina_bert",
        "ModernBertModel": "modernbert",
        "ModernBertForMaskedLM": "modernbert",
        "ModernBertForSequenceClassification": "modernbert",
        "ModernBertForTokenClassification": "modernbert",
        "MPNetModel": "mpnet",
        "MPNetForMaskedLM": "mpnet",
        "MPNetForSequenceClassification": "mpnet",
        "MPNetForTokenClassification": "mpnet",
        "NomicBertModel": "nomic_bert",
        "NomicBertForMaskedLM": "nomic_bert",
        "NomicBertForSequenceClassification": "nomic_bert",
        "NomicBertForTokenClassification": "nomic_bert",
        "CohereForCausalLM": "cohere",
        "Cohere2ForCausalLM": "cohere2",
        "Exaone4ForCausalLM": "exaone4",
        "FalconForCausalLM": "falcon",
        "GlmForCausalLM": "glm",
        "Glm4ForCausalLM": "glm4",
        "GPT2LMHeadModel": "gpt2",
        "GptOssForCausalLM": "gpt_oss",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3",
        "GraniteForCausalLM": "granite",
        "Lfm2ForCausalLM": "lfm2",
        "Lfm2MoeForCausalLM": "lfm2_moe",
        "Lfm2VlForConditionalGeneration": "lfm2",
        "LlamaForCausalLM": "llama",
        "MinistralForCausalLM": "mistral",
        "Ministral3ForCausalLM": "mistral",
        "Mistral3ForConditionalGeneration": "mistral",
        "MistralForCausalLM": "mistral",
        "Olmo2ForCausalLM": "olmo2",
        "Phi3ForCausalLM": "phi3",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3Model": "qwen3",
        "Qwen3VLForConditionalGeneration": "qwen3",
        "RobertaModel": "roberta",
        "RobertaForMaskedLM": "roberta",
        "RobertaForSequenceClassification": "roberta",
        "RobertaForTokenClassification": "roberta",
        "RWForCausalLM": "falcon",
        "SmolLM3ForCausalLM": "smollm3",
        "MixtralForCausalLM": "mixtral",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "OlmoeForCausalLM": "olmoe",
        "GraniteMoeForCausalLM": "granite_moe",
        "Starcoder2ForCausalLM": "starcoder2",
        "XLMRobertaModel": "roberta",
        "XLMRobertaForMaskedLM": "roberta",
        "XLMRobertaForSequenceClassification": "roberta",
        "XLMRobertaForTokenClassification": "roberta",
    }
)
"""`architectures` in a config.json -> our name."""
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "arcee": "arcee",
        "bert": "bert",
        "command-r": "cohere",
        "cohere2": "cohere2",
        "exaone4": "exaone4",
        "falcon": "falcon",
        "gemma2": "gemma2",
        "gemma3": "gemma3",
        "glm4": "glm4",
        "gpt2": "gpt2",
        "gpt-oss": "gpt_oss",
        "granite": "granite",
        "lfm2": "lfm2",
        "lfm2moe": "lfm2_moe",
        "llama": "llama",
        "mistral3": "mistral",
        "modern-bert": "modernbert",
        "nomic-bert": "nomic_bert",
        "olmo2": "olmo2",
        "phi3": "phi3",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "smollm3": "smollm3",
        "olmoe": "olmoe",
        "qwen3moe": "qwen3_moe",
        "granitemoe": "granite_moe",
        "starcoder2": "starcoder2",
    }
)
"""`general.architecture` in a GGUF file -> our name."""

_MLA = "its attention has latent keys and values, which the KV cache can't hold yet"
_STATE = "its layers have a recurrent state that is too large for the blocks of the KV cache"
_LAYERS = "the keys and values of its layers differ in shape"
_ALIBI = "it writes text by ALiBi positions, which backends compute for encoders alone"
_ENCODER = "it has an encoder and a decoder, and Penstock serves either alone"
_DISENTANGLED = "its attention has scores of positions against tokens, which no backend computes"
_SHARED = "its layers share their weights"
_NO_POSITIONS = "its attention has other positions than BERT's, or its layers are others"
_SPARSE = "its attention is sparse, which no backend computes"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("deepseekv2", "deepseekv3", "deepseekv32", "deepseek2", "longcatflash", "minicpm3"), _MLA),
        **dict.fromkeys(("kimik2", "kimik25"), _MLA),
        **dict.fromkeys(("mamba", "mamba2", "falconmamba", "codestralmamba", "jamba", "bamba", "zamba", "zamba2"), _STATE),
        **dict.fromkeys(("granitemoehybrid", "granitehybrid", "falconh1", "nemotronh", "kimilinear"), _STATE),
        **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _STATE),
        **dict.fromkeys(("rwkv", "rwkv5", "rwkv6", "rwkv7", "recurrentgemma", "plamo2"), _STATE),
        **dict.fromkeys(("gemma3n", "gemma4", "openelm", "decilm", "deci"), _LAYERS),
        **dict.fromkeys(("bloom", "mpt", "jais"), _ALIBI),
        **dict.fromkeys(("deberta", "debertav2"), _DISENTANGLED),
        "albert": _SHARED,
        **dict.fromkeys(("bigbird", "longformer"), _SPARSE),
        **dict.fromkeys(("nomicbertmoe", "jinabertv2", "jinabertv3", "neobert", "eurobert"), _NO_POSITIONS),
        **dict.fromkeys(("t5", "bart"), _ENCODER),
    }
)
"""Family of an architecture, as `_family` has it -> why it is not served."""
_MAX_LIKENED_CHARS = 64
"""Names of architectures are shorter; comparing takes time by the square of the length."""
_CLASS_END = re.compile(r"(?:For[A-Z]\w*|LMHeadModel|Model)$")


def _family(name: str) -> str:
    """Return the name without what its models are for, in small letters and digits: `Kimi_K25ForCausalLM` is `kimik25`."""
    return re.sub(r"[^a-z0-9]", "", _CLASS_END.sub("", name).lower())


HF_TOP: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens.weight": "embed",
        "model.norm.weight": "norm",
        "model.norm.bias": "norm_bias",
        "lm_head.weight": "output",
    }
)
GGUF_TOP: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "embed",
        "output_norm.weight": "norm",
        "output_norm.bias": "norm_bias",
        "output.weight": "output",
    }
)
"""Names of tensors outside of layers -> ours, in most models."""
HF_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm.weight": "attn_norm",
        "input_layernorm.bias": "attn_norm_bias",
        "self_attn.q_proj.weight": "q",
        "self_attn.k_proj.weight": "k",
        "self_attn.v_proj.weight": "v",
        "self_attn.o_proj.weight": "o",
        "self_attn.q_proj.bias": "q_bias",
        "self_attn.k_proj.bias": "k_bias",
        "self_attn.v_proj.bias": "v_bias",
        "self_attn.o_proj.bias": "o_bias",
        "self_attn.q_norm.weight": "q_norm",
        "self_attn.k_norm.weight": "k_norm",
        "post_attention_layernorm.weight": "mlp_norm",
        "post_attention_layernorm.bias": "mlp_norm_bias",
        "mlp.gate_proj.weight": "gate",
        "mlp.up_proj.weight": "up",
        "mlp.down_proj.weight": "down",
        "mlp.gate_proj.bias": "gate_bias",
        "mlp.up_proj.bias": "up_bias",
        "mlp.down_proj.bias": "down_bias",
    }
)
"""End of a tensor's name after "model.layers.{i}.", in most models -> end of our name after "layers.{i}."."""
GGUF_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm.weight": "attn_norm",
        "attn_norm.bias": "attn_norm_bias",
        "attn_q.weight": "q",
        "attn_k.weight": "k",
        "attn_v.weight": "v",
        "attn_output.weight": "o",
        "attn_q.bias": "q_bias",
        "attn_k.bias": "k_bias",
        "attn_v.bias": "v_bias",
        "attn_output.bias": "o_bias",
        "attn_q_norm.weight": "q_norm",
        "attn_k_norm.weight": "k_norm",
        "post_attention_norm.weight": "post_attn_norm",
        "ffn_norm.weight": "mlp_norm",
        "ffn_norm.bias": "mlp_norm_bias",
        "ffn_gate.weight": "gate",
        "ffn_up.weight": "up",
        "ffn_down.weight": "down",
        "ffn_gate.bias": "gate_bias",
        "ffn_up.bias": "up_bias",
        "ffn_down.bias": "down_bias",
        "post_ffw_norm.weight": "post_mlp_norm",
    }
)
"""End of a tensor's name after "blk.{i}." -> end of our name after "layers.{i}."."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor of a file that is not one of our weights as it is.

    It may hold several, by their rows, and be a cube: a matrix for each expert. The columns of biases are what rows are here.
    """

    names: tuple[str, ...]
    """Ends of our names, in the order of their rows; how many each has follows from the program."""
    is_transposed: bool = False
    """The file has outputs as columns."""
    is_interleaved: bool = False
    """Row i is of the weight i modulo their number."""
    is_by_kv_head: bool = False
    """The file has the rows of all parts for the first key-value head, then those for the second, and so on."""


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer of a head: norm(activation(x @ weight.T + bias))."""

    name: str
    """The beginning of its tensors' names."""
    activation: Activation | None = None
    is_last: bool = False
    """The layer has a column for each label; others have the model's width."""
    has_bias: bool = True
    norm: str = ""
    """The beginning of the names of the norm's tensors; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a class of models that is behind the last layer."""

    pooling: Pooling
    layers: tuple[HeadLayer, ...]

    @property
    def names(self) -> dict[str, str]:
        """Names of tensors -> ours."""
        return {
            f"{theirs}.{end}": f"dense.{number}{ours}{bias}"
            for number, layer in enumerate(self.layers)
            for theirs, ours in ((layer.name, ""), (layer.norm, "_norm"))
            for end, bias in (("weight", ""), ("bias", "_bias"))
            if theirs
        }


@dataclass(frozen=True, slots=True)
class Made:
    """A weight that is made of another, which no operation reads, or of the spec alone."""

    source: str
    """Our name of the other; empty: there is none."""
    source_shape: Callable[[ModelSpec], tuple[int, int]] | None
    make: Callable[[ModelSpec, NDArray[np.float32]], NDArray[np.float32]]
    """Given the spec and the other's values, empty without one, returns the weight's."""


def _no_head(*_: object) -> Head | None:
    return None


def _as_read(_: object, spec: ModelSpec) -> ModelSpec:
    return spec


def _as_it_is(name: str) -> str | None:
    return name


def _as_they_are(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """All that Penstock knows of one architecture."""

    describe: Callable[[ModelSpec], Program]
    """Returns the program of one step."""
    of_hf: Callable[[JsonFile, ModelSpec], ModelSpec] = _as_read
    """Given config.json and the spec that its common keys mean, returns the spec with the architecture's own keys applied.

    Raises ModelError for a setting that would change the result and can't be computed.
    """
    of_gguf: Callable[[GgufFile, ModelSpec], ModelSpec] = _as_read
    """The same of a GGUF file's metadata."""
    hf_values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_they_are
    """Given config.json, returns it with the keys that `read_spec` asks for: renamed, or with transformers' defaults."""
    hf_name: Callable[[str], str | None] = _as_it_is
    """A tensor's name in a directory -> its name in the tables, or None for one that is no weight."""
    hf_layer: Mapping[str, str | Parts] = field(default_factory=lambda: HF_LAYER)
    """End of a tensor's name -> end of ours, or the several weights that it holds. `*` stands for the number of an expert."""
    hf_top: Mapping[str, str] = field(default_factory=lambda: HF_TOP)
    """Names of tensors outside of layers."""
    hf_layers: str = "model.layers."
    """The beginning of the names of layers' tensors, before their number."""
    hf_head: Callable[[str, JsonFile], Head | None] = _no_head
    """Given a class in `HF_CLASSES` and config.json, returns the class's head; None if it has none that is computed."""
    hf_unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are left out, unless the head reads them."""
    gguf_head: Callable[[GgufFile], Head | None] = _no_head
    """The same of a GGUF file."""
    made: Mapping[str, Made] = field(default_factory=dict)
    """Our names of weights that files do not have as they are."""
    is_encoder: bool = False
    """The model reads texts and writes none."""
    gguf_layer: Mapping[str, str | Parts] = field(default_factory=lambda: GGUF_LAYER)
    gguf_top: Mapping[str, str] = field(default_factory=lambda: GGUF_TOP)
    is_interleaved_in_hf: bool = False
    """Heads turn by neighbouring pairs of columns, in transformers and in the rows of q and k; else half-split, as ours do.

    Tensors that hold q or k as `Parts` are not put in order."""
    is_interleaved_in_gguf: bool = False
    """The same of GGUF files: the converter has put the rows of q and k into that layout, or left them there."""
    has_partial_rope: bool = False
    """Rotations may turn the first columns of a head only."""
    is_yarn_truncated_in_gguf: bool = True
    """YaRN's range of pairs begins and ends at whole ones: GGUF files have no word on it."""
    has_local_base_in_gguf: bool = False
    """`of_gguf` reads `rope.freq_base_swa`, the base of layers with windows; else that has to be the base of all."""
    hf_norm_offset: float = 0.0
    """Added to the weights of norms of a Hugging Face directory: Gemma stores them less 1."""


def our_name(name: str, known: Mapping[str, str], path: Path) -> str:
    """Our name of what a file calls its architecture. Raises ModelError for one that is not supported, and says why."""
    found = known.get(name)
    if found is None:
        reason = REFUSED.get(_family(name))
        why = "" if reason is None else f": {reason}"
        raise ModelError(f"{path}: the architecture {name} is not supported{why}.", remedy=_like(name, known))
    return found


def _like(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the supported ones that are most like it, and where all of them are."""
    from difflib import get_close_matches  # only a wrong name needs it

    close = get_close_matches(name[:_MAX_LIKENED_CHARS], sorted(known), n=3)
    nearest = f"The nearest that are: {', '.join(close)}. " if close else ""
    return f"{nearest}docs/models.md lists all that are supported."


def find(name: str) -> Architecture:
    """The architecture of our name. Raises ModelError, which lists the supported ones, for any other."""
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
    """The program of one step of a model. Raises ModelError for an architecture that is not supported."""
    return find(spec.architecture).describe(spec)
