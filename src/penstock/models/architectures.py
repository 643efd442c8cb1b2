"""The table of architectures: how their files name tensors, what their settings mean, and what a step computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile
from penstock.models.program import Program
from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation, ModelSpec, Pooling

_ROWS = (
    ("bert", "bert", "Bert* HF_ColBERT", "bert"),
    ("albert", "albert", "Albert*", ""),
    ("deberta", "deberta_v2", "DebertaV2*", ""),
    ("bert", "distilbert", "DistilBert*", ""),
    ("bert", "electra", "Electra* ElectraForPreTraining", ""),
    ("bert", "eurobert", "EuroBert*", "eurobert"),
    ("bert", "neobert", "NeoBERT NeoBERTLMHead NeoBERTForSequenceClassification", ""),
    ("bert", "nomic_bert", "NomicBert*", "nomic-bert"),
    ("bert", "nomic_bert_moe", "", "nomic-bert-moe"),
    ("bert", "roberta", "Roberta* XLMRoberta* Camembert*", ""),
    ("bert", "xlm_roberta_xl", "XLMRobertaXL*", ""),
    ("bert", "gte", "Gte* New*", ""),
    ("bert", "jina_3", "JinaEmbeddingsV3*", ""),
    ("bert", "jina_bert", "JinaBertModel JinaBertForMaskedLM", ""),
    ("bert", "mpnet", "MPNet*", ""),
    ("deepseek", "deepseek_v2", "DeepseekV2ForCausalLM", "deepseek2"),
    (
        "deepseek",
        "deepseek_v3",
        "DeepseekV3ForCausalLM KimiK25ForConditionalGeneration Kimi_K25ForConditionalGeneration",
        "",
    ),
    ("deepseek", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", ""),
    ("deepseek", "minicpm3", "MiniCPM3ForCausalLM", ""),
    ("deepseek", "youtu", "YoutuForCausalLM", ""),
    ("delta_net", "qwen3_5", "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration", "qwen35"),
    ("delta_net", "qwen3_5_moe", "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration", "qwen35moe"),
    ("delta_net", "qwen3_next", "Qwen3NextForCausalLM", "qwen3next"),
    ("gemma", "embedding_gemma", "Gemma3TextModel", "gemma-embedding"),
    ("gemma", "exaone4", "Exaone4ForCausalLM", "exaone4"),
    ("gemma", "gemma", "GemmaForCausalLM", "gemma"),
    ("gemma", "gemma2", "Gemma2ForCausalLM", "gemma2"),
    ("gemma", "gemma3", "Gemma3ForCausalLM Gemma3ForConditionalGeneration", "gemma3"),
    ("gemma4", "gemma4", "Gemma4ForCausalLM Gemma4ForConditionalGeneration", "gemma4"),
    ("gemma4", "gemma4_unified", "Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration", ""),
    ("gemma", "glm4", "Glm4ForCausalLM", "glm4"),
    ("gemma", "vaultgemma", "VaultGemmaForCausalLM", ""),
    ("unweighted", "nanochat", "NanoChatForCausalLM", ""),
    ("unweighted", "olmo", "OlmoForCausalLM", ""),
    ("gemma", "olmo2", "Olmo2ForCausalLM", "olmo2"),
    ("gemma", "olmo3", "Olmo3ForCausalLM", ""),
    ("delta_net", "olmo_hybrid", "OlmoHybridForCausalLM", ""),
    ("llama", "gpt2", "GPT2LMHeadModel", "gpt2"),
    ("llama", "gpt_neo", "GPTNeoForCausalLM", ""),
    ("llama", "gpt_bigcode", "GPTBigCodeForCausalLM", "starcoder"),
    ("moe", "gpt_oss", "GptOssForCausalLM", "gpt-oss"),
    ("lfm2", "lfm2", "Lfm2ForCausalLM Lfm2VlForConditionalGeneration", "lfm2"),
    ("lfm2", "lfm2_moe", "Lfm2MoeForCausalLM", "lfm2moe"),
    ("llama", "apertus", "ApertusForCausalLM", ""),
    ("llama", "arcee", "ArceeForCausalLM", "arcee"),
    ("llama", "cwm", "CwmForCausalLM", ""),
    ("llama", "ernie4_5", "Ernie4_5ForCausalLM", "ernie4_5"),
    ("llama", "glm", "GlmForCausalLM", ""),
    ("llama", "granite", "GraniteForCausalLM", "granite"),
    ("llama", "granite_swa", "GraniteSWAForCausalLM", ""),
    ("llama", "helium", "HeliumForCausalLM", ""),
    ("llama", "hunyuan", "HunYuanDenseV1ForCausalLM", "hunyuan-dense"),
    ("llama", "hyperclovax", "HyperCLOVAXForCausalLM", ""),
    ("llama", "jais2", "Jais2ForCausalLM", ""),
    ("llama", "llama", "LlamaForCausalLM LlamaModel LlamaForSequenceClassification", "llama"),
    (
        "llama",
        "mistral",
        "MistralForCausalLM MistralModel MistralForSequenceClassification "
        "MinistralForCausalLM Ministral3ForCausalLM Mistral3ForConditionalGeneration",
        "mistral3",
    ),
    ("llama", "opt", "OPTForCausalLM", ""),
    ("llama", "nemotron", "NemotronForCausalLM", "nemotron"),
    ("llama", "phi3", "Phi3ForCausalLM", "phi3"),
    ("llama", "qwen2", "Qwen2ForCausalLM Qwen2Model Qwen2ForSequenceClassification", "qwen2"),
    ("llama", "qwen2_vl", "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration", "qwen2vl"),
    (
        "llama",
        "qwen3",
        "Qwen3ForCausalLM Qwen3Model Qwen3ForSequenceClassification Qwen3VLForConditionalGeneration",
        "qwen3 qwen3vl",
    ),
    ("llama", "seed_oss", "SeedOssForCausalLM", "seed_oss"),
    ("llama", "smollm3", "SmolLM3ForCausalLM", "smollm3"),
    ("llama", "starcoder2", "Starcoder2ForCausalLM", "starcoder2"),
    ("bert", "modernbert", "ModernBert*", "modern-bert"),
    ("mamba", "bamba", "BambaForCausalLM", ""),
    ("mamba", "falcon_h1", "FalconH1ForCausalLM", "falcon-h1"),
    ("mamba", "granite_hybrid", "GraniteMoeHybridForCausalLM", "granitehybrid"),
    ("moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ernie4_5-moe"),
    ("moe", "flex_olmo", "FlexOlmoForCausalLM", ""),
    ("moe", "glm4_moe", "Glm4MoeForCausalLM", "glm4moe"),
    ("moe", "granite_moe", "GraniteMoeForCausalLM", "granitemoe"),
    ("moe", "granite_moe_shared", "GraniteMoeSharedForCausalLM", ""),
    ("moe", "granite_moe_swa", "GraniteMoeSWAForCausalLM", ""),
    ("moe", "hunyuan_moe", "HunYuanMoEV1ForCausalLM", ""),
    ("moe", "mellum", "MellumForCausalLM", ""),
    ("moe", "minimax_m2", "MiniMaxM2ForCausalLM", "minimax-m2"),
    ("moe", "mixtral", "MixtralForCausalLM", ""),
    ("moe", "olmoe", "OlmoeForCausalLM", "olmoe"),
    ("moe", "privacy_filter", "OpenAIPrivacyFilterModel OpenAIPrivacyFilterForTokenClassification", ""),
    ("moe", "qwen2_moe", "Qwen2MoeForCausalLM", "qwen2moe"),
    ("moe", "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe"),
    ("moe", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3vlmoe"),
    ("sigmoid_moe", "afmoe", "AfmoeForCausalLM", ""),
    ("sigmoid_moe", "dots1", "Dots1ForCausalLM", ""),
    ("sigmoid_moe", "exaone_moe", "ExaoneMoeForCausalLM", ""),
    ("sigmoid_moe", "solar_open", "SolarOpenForCausalLM", ""),
    ("nemotron_h", "mamba2", "Mamba2ForCausalLM", ""),
    ("nemotron_h", "nemotron_h", "NemotronHForCausalLM", "nemotron_h"),
    ("nemotron_h", "nemotron_h_moe", "", "nemotron_h_moe"),
    ("parallel", "codegen", "CodeGenForCausalLM", ""),
    ("parallel", "cohere", "CohereForCausalLM", "command-r"),
    ("parallel", "cohere2", "Cohere2ForCausalLM", "cohere2"),
    ("parallel", "falcon", "FalconForCausalLM RWForCausalLM", "falcon"),
    ("parallel", "gpt_neox", "GPTNeoXForCausalLM", "gptneox"),
    ("parallel", "gptj", "GPTJForCausalLM", ""),
    ("parallel", "phi", "PhiForCausalLM", "phi2"),
    ("parallel", "stablelm", "StableLmForCausalLM", "stablelm"),
)
"""A row has the module in this folder, our name, the classes in config.json, and `general.architecture` of GGUF files.

`*` in a class stands for each of `_ENCODER_ENDS`. The module defines an `Architecture` with our name in capitals.
"""
_ENCODER_ENDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
ARCHITECTURES: Mapping[str, str] = {name: f"penstock.models.{file}:{name.upper()}" for file, name, _, _ in _ROWS}
"""Our name of an architecture -> "module:attribute" of its `Architecture`."""
HF_CLASSES: Mapping[str, str] = {
    hf_class.replace("*", end): name
    for _, name, classes, _ in _ROWS
    for hf_class in classes.split()
    for end in (_ENCODER_ENDS if "*" in hf_class else ("",))
}
"""`architectures` in a config.json -> our name."""
GGUF_NAMES: Mapping[str, str] = {gguf: name for _, name, _, names in _ROWS for gguf in names.split()}
"""`general.architecture` in a GGUF file -> our name."""

_REASONS = {
    "it combines latent attention with parts that Penstock does not implement yet": ("longcatflash",),
    "its recurrent state is of a kind that no backend computes yet": (
        *("falconmamba", "jamba", "kimilinear", "mamba", "plamo2", "recurrentgemma"),
        *("rwkv", "rwkv5", "rwkv6", "rwkv7", "zamba", "zamba2"),
    ),
    "its layers have different numbers of heads, or none, which is not supported yet": ("deci", "decilm", "openelm"),
    "it has several residual streams (AltUp), which Penstock does not implement yet": ("gemma3n",),
    "it generates text with ALiBi positions, which backends compute only for encoders": ("bloom", "jais", "mpt"),
    "it is an encoder-decoder, and Penstock serves only encoders or decoders": ("bart", "t5"),
    "its attention differs from that of DeBERTa 2 and 3, and no backend computes it": ("deberta",),
    "its router mixes experts by a rule (SparseMixer) that no backend computes": ("phimoe",),
    "its heads have layer norms, which no backend computes": ("persimmon",),
    "its attention consists of experts, which no backend computes": ("jetmoe",),
    "its position embeddings or layers differ from BERT's": ("jinabertv2", "jinabertv3"),
    "its attention is sparse, which no backend computes": (
        *("bigbird", "deepseekv32", "glmdsa", "glmmoedsa", "longformer", "minimaxm3", "minimaxm3sparse"),
    ),
    "its residual streams are mixed, and its attention is sparse, which no backend computes": ("qwen4exp",),
    "it attends within chunks, which no backend computes": ("llama4",),
    "its linear attention decays at fixed rates, which Penstock does not implement yet": (
        *("minimax", "minimax01", "minimaxm1", "minimaxtext01"),
    ),
}
REFUSED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}
"""Family, as `_family` returns it -> why Penstock can't serve it."""
_CLASS_END = re.compile(r"(?:For[A-Z]\w*|LMHead(?:Model)?|Model)$")


def _family(name: str) -> str:
    """Return the family of a class: `kimik25` for `Kimi_K25ForCausalLM`."""
    return re.sub(r"[^a-z0-9]", "", _CLASS_END.sub("", name).lower())


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Return a table of tensor names with endings: `x` -> `y` becomes `x.weight` -> `y` and `x.bias` -> `y_bias`."""
    ends = (("weight", ""), ("bias", "_bias"))
    return {f"{theirs}.{end}": f"{ours}{suffix}" for theirs, ours in names.items() for end, suffix in ends}


def with_defaults(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    renamed: Mapping[str, str] = {},
    nulls: Container[str] = (),
) -> dict[str, Any]:
    """Return the values of config.json with keys renamed (old -> new) and defaults for missing keys.

    If both keys are present, the new one wins. Nulls are dropped, except those of keys in `nulls`.
    """
    found = {key: value for key, value in values.items() if value is not None or key in nulls}
    old = {renamed[key]: value for key, value in found.items() if key in renamed}
    return {**defaults, **old, **{key: value for key, value in found.items() if key not in renamed}}


OLD_KEYS: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
"""Keys in config.json of GPT-2 and other old models -> the usual keys."""
HF_TOP: Mapping[str, str] = {
    "model.embed_tokens.weight": "embed",
    **with_biases({"model.norm": "norm"}),
    "lm_head.weight": "output",
}
GGUF_TOP: Mapping[str, str] = {
    "token_embd.weight": "embed",
    **with_biases({"output_norm": "norm"}),
    "output.weight": "output",
}
"""Names of tensors outside of layers -> our names, in most models."""
HF_LAYER: Mapping[str, str] = with_biases(
    {
        "input_layernorm": "attn_norm",
        **{f"self_attn.{name}_proj": name for name in "qkvo"},
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
        "post_attention_layernorm": "mlp_norm",
        **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
    }
)
"""Names of a layer's tensors after "model.layers.{i}." -> our names after "layers.{i}."."""
GGUF_LAYER: Mapping[str, str] = with_biases(
    {
        "attn_norm": "attn_norm",
        **{f"attn_{name}": name for name in "qkv"},
        "attn_output": "o",
        "attn_q_norm": "q_norm",
        "attn_k_norm": "k_norm",
        "post_attention_norm": "post_attn_norm",
        "ffn_norm": "mlp_norm",
        **{f"ffn_{name}": name for name in ("gate", "up", "down")},
        "post_ffw_norm": "post_mlp_norm",
    }
)
"""Names of a layer's tensors in GGUF files after "blk.{i}." -> our names after "layers.{i}."."""


Run = tuple[int, int, int]
"""Evenly spaced rows of a matrix: (first row, number of rows, step)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The layout of a tensor that combines several of our weights, such as q, k and v: which rows belong to which weight.

    In a bias, columns take the place of rows. If a tensor has a matrix for each expert, every matrix has this layout.
    """

    names: tuple[str, ...]
    """Suffixes of our names, in the order of their rows. The number of rows of each weight follows from the program."""
    is_transposed: bool = False  # the file has inputs as rows and outputs as columns
    may_be_transposed: bool = False  # the shapes say whether it is: releases of transformers differ
    is_interleaved: bool = False  # row i belongs to weight i % len(names)
    is_by_kv_head: bool = False
    """Rows are grouped by key-value head: the rows of all weights for the first head, then those for the next."""
    is_by_expert: bool = False
    """The tensor stacks the experts' matrices, so rows are grouped by expert. `is_transposed` applies to each matrix."""
    place: int | None = None
    """Position of this tensor, from 0, if several tensors are stacked to make one weight."""
    runs: Callable[[ModelSpec], Sequence[Sequence[Run]]] | None = None
    """Returns the runs of rows of each weight, in order. For layouts that the other fields can't express."""


QKV, QKV_BIAS, GATE_AND_UP = Parts(("q", "k", "v")), Parts(("q_bias", "k_bias", "v_bias")), Parts(("gate", "up"))


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer of a classification or reranking head: norm(activation(x @ weight.T + bias))."""

    name: str  # beginning of its tensors' names
    activation: Activation | None = None
    is_last: bool = False  # it has a column per label; others have the model's width
    has_bias: bool = True
    norm: str = ""  # beginning of the norm's names


@dataclass(frozen=True, slots=True)
class Head:
    """A classification or reranking head: it pools the last layer's states and computes scores from them with a few layers."""

    pooling: Pooling
    layers: tuple[HeadLayer, ...]
    is_pooled_last: bool = False  # averages tokens' scores instead of states
    bias: str = ""  # name of the logits' bias in a masked-LM head
    is_difference: bool = False  # the file has the rows of `yes` and `no`; the score is their difference

    @property
    def names(self) -> dict[str, str]:
        ours = {layer.name: f"dense.{number}" for number, layer in enumerate(self.layers)}
        norms = {layer.norm: f"dense.{number}_norm" for number, layer in enumerate(self.layers) if layer.norm}
        return with_biases(ours | norms) | ({self.bias: "output_bias"} if self.bias else {})


@dataclass(frozen=True, slots=True)
class Made:
    """A weight that files lack: the loader computes it from another weight, or from the model's spec alone."""

    source: str  # our name of that other weight (no operation reads it), or empty
    source_shape: Callable[[ModelSpec], tuple[int, int]] | None
    make: Callable[[ModelSpec, NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Everything that Penstock knows about an architecture. docs/how-to/add-a-model.md explains how to write one."""

    describe: Callable[[ModelSpec], Program]
    of_hf: Callable[[JsonFile, ModelSpec], ModelSpec] = lambda _, spec: spec
    """Applies the architecture's own keys of config.json. Raises ModelError for a setting that can't be computed."""
    of_gguf: Callable[[GgufFile, ModelSpec], ModelSpec] = lambda _, spec: spec
    hf_values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    """Adds to config.json the keys that `read_spec` requires."""
    hf_head_dims: Callable[[JsonFile], Mapping[str, int]] = lambda _: {}
    """Layer type -> columns of a head, for types in `layer_types` that do not use `head_dim`."""
    hf_name: Callable[[str], str | None] = lambda name: name
    """A tensor's name in a directory -> its name in the tables, or None if it is not a weight."""
    hf_layer: Mapping[str, str | Parts] = field(default_factory=lambda: HF_LAYER)
    """Like `HF_LAYER`; a tensor of several weights has `Parts`, and `*` stands for an expert's number."""
    hf_top: Mapping[str, str] = field(default_factory=lambda: HF_TOP)
    hf_layers: str = "model.layers."  # beginning of the layers' names, before the number
    hf_head: Callable[[str, JsonFile], Head | None] = lambda *_: None  # returns the head of a class, or None
    hf_mlm_head: Callable[[JsonFile], Head] | None = None  # returns the masked-LM head before the tied embeddings
    hf_unread: tuple[str, ...] = ()  # prefixes of tensors to skip unless the head reads them
    gguf_head: Callable[[GgufFile], Head | None] = lambda *_: None
    made: Mapping[str, Made] = field(default_factory=dict)
    is_encoder: bool = False
    gguf_layer: Mapping[str, str | Parts] = field(default_factory=lambda: GGUF_LAYER)
    gguf_top: Mapping[str, str] = field(default_factory=lambda: GGUF_TOP)
    is_interleaved_in_hf: bool = False
    """Neighbouring columns of a head rotate as a pair. The loader makes q and k half-split, except in `Parts`."""
    is_interleaved_in_gguf: bool = False
    has_further_layers: bool = False  # ends with multi-token-prediction layers, which are left out
    has_partial_rope: bool = False  # only the first columns of a head may rotate
    is_yarn_truncated_in_gguf: bool = True  # YaRN's range is rounded to whole pairs
    has_local_base_in_gguf: bool = False
    """`of_gguf` reads `rope.freq_base_swa`. Otherwise it must equal the base of all layers."""
    has_latents_in_gguf: bool = False
    """`of_gguf` reads the heads' columns; the common reader reads only the rotary ones."""
    hf_norm_offset: float = 0.0  # added to a directory's norms: Gemma stores them minus 1
    hf_changed: Mapping[str, Callable[[ModelSpec, NDArray[np.float32]], NDArray[np.float32]]] = field(default_factory=dict)
    """Suffix of our name -> function that converts a directory's values. GGUF files store converted ones."""


def our_name(name: str, known: Mapping[str, str], path: Path) -> str:
    """Return Penstock's name of the architecture that a file calls `name`. Raises ModelError if it is not supported."""
    if (found := known.get(name)) is not None:
        return found
    reason = REFUSED.get(family := _family(name))
    if known is GGUF_NAMES and family in {_family(ours) for ours in ARCHITECTURES if ours not in known.values()}:
        reason = "its GGUF files are not supported, only Hugging Face directories"
    why = "" if reason is None else f": {reason}"
    raise ModelError(f"{path}: the architecture {name} is not supported{why}.", remedy=_like(name, known))


def _like(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # only a wrong name needs it

    close = get_close_matches(name[:64], sorted(known), n=3)  # its time is quadratic in the length; real names are shorter
    nearest = f"The nearest that are supported: {', '.join(close)}. " if close else ""
    return f"{nearest}docs/models.md lists all supported architectures."


def find(name: str) -> Architecture:
    """Return the architecture with Penstock's name `name`, such as `llama`. Raises ModelError if it is unknown."""
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"The architecture {name!r} is not supported.", remedy=f"Supported architectures: {known}.")
    module, _, attribute = ARCHITECTURES[name].partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, Architecture)
    return found


def describe(spec: ModelSpec) -> Program:
    return find(spec.architecture).describe(spec)
