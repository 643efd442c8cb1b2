"""Reads the JSON files of a Hugging Face directory, as all releases of transformers write them."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from penstock.models import checks, rope
from penstock.types.errors import ModelError, damaged
from penstock.types.model_spec import Activation, ModelSpec, Rotation, spec_of_equal_layers
from penstock.types.vocab import SpecialTokens

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Lists of special tokens. transformers 5 renamed the first to the second, and may write it as an object."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object whose values are checked when they are read."""

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return a value, or None if missing or null. An int is accepted as a float. Raises ModelError for another type."""
        value = self.values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value) if value.bit_length() < sys.float_info.max_exp else math.inf
        if type(value) is not kind:
            raise self.error(f"{key} is {value!r}, not of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """Return a value. Raises ModelError if it is missing."""
        value = self.get(key, kind)
        if value is None:
            raise self.error(f"{key} is missing")
        return value

    def positive(self, key: str) -> float:
        """Return a finite number above 0. Raises ModelError."""
        value = self.require(key, float)
        if not math.isfinite(value) or value <= 0.0:
            raise self.error(f"{key} is {value}, not a positive number")
        return value

    def positives(self, key: str, number: int) -> tuple[float, ...]:
        """Return a list of `number` finite values above 0. Raises ModelError."""
        values, most = self.require(key, list), sys.float_info.max
        if len(values) != number or not all(type(value) in (int, float) and 0 < value <= most for value in values):
            raise self.error(f"{key} is not a list of {number} positive numbers")
        return tuple(map(float, values))

    def only(self, key: str, value: object) -> None:
        """Raise ModelError if the key is present with any value but this, the only supported one."""
        found = self.values.get(key)
        if found is not None and found != value:
            raise checks.unsupported(self.path, f"{key} is {found!r}", f"only {value!r} is")

    def only_all(self, **values: object) -> None:
        """Check several keys as `only` does."""
        for key, value in values.items():
            self.only(key, value)

    def error(self, cause: str) -> ModelError:
        return ModelError(f"{self.path}: {cause}.", remedy="Check the file, or fetch the model again.")


def read_json(path: Path, *, is_optional: bool = False) -> JsonFile:
    """Parse a file with a JSON object. A missing file is an error, or empty if it `is_optional`. Raises ModelError."""
    if is_optional and not path.is_file():
        return JsonFile(path, {})
    try:
        return json_file(path, path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file.", remedy="Fetch the whole model directory.") from error
    except OSError as error:
        raise damaged(path, f"can't be read: {error}") from error


def json_file(path: Path, data: bytes) -> JsonFile:
    try:
        return JsonFile(path, checks.json_object(data))
    except ValueError as error:
        raise damaged(path, f"can't be read as a JSON object: {error}") from error


_HEAD_CLASSES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}


def is_draft_head(path: Path) -> bool:
    """Return whether a directory holds a draft head (EAGLE-3, or any of speculators), not a model. Raises ModelError."""
    values = read_json(path / "config.json", is_optional=True).values
    classes = values.get("architectures")
    is_named = isinstance(classes, list) and any(one in _HEAD_CLASSES for one in classes if isinstance(one, str))
    return is_named or "draft_vocab_size" in values or "speculators_model_type" in values


def read_weight_map(path: Path) -> Mapping[str, str] | None:
    """Return the directory's file of each tensor, by model.safetensors.index.json, or None without it. Raises ModelError.

    An index beside model.safetensors does not count, as in transformers: save_pretrained leaves an older one there.
    """
    if (path / "model.safetensors").is_file():
        return None
    index = read_json(path / "model.safetensors.index.json", is_optional=True)
    if not index.values:
        return None
    files = index.require("weight_map", dict)
    for file in files.values():
        if type(file) is not str or Path(file).name != file:
            raise index.error(f"weight_map names the file {file!r}")
    return files


def text_part(config: JsonFile) -> JsonFile:
    """Return the text model's settings in a multimodal config.json: `text_config`, completed by keys outside of it."""
    text = config.get("text_config", dict)
    if text is None:
        return config
    outer = {key: value for key, value in config.values.items() if key != "text_config"}
    given = {key: value for key, value in text.items() if key != "architectures" and (value is not None or key not in outer)}
    tied = outer.get("tie_word_embeddings")
    return JsonFile(config.path, {**outer, **given, **({} if tied is None else {"tie_word_embeddings": tied})})


def read_spec(
    config: JsonFile,
    architecture: str,
    names: Container[str],
    *,
    has_partial_rope: bool,
    head_dims: Mapping[str, int] = {},
    served_len: int | None = None,
) -> ModelSpec:
    """Read the keys that most models share. `Architecture.of_hf` applies the others.

    `names` are our names of the weights. Raises ModelError if their biases contradict config.json. `head_dims`: columns of
    a head for layer types that do not use `head_dim`. `served_len`: tokens of the longest text to serve; None: all positions.
    """
    config.only("per_layer_config", {})
    sizes = _read_sizes(config)
    checks.check_sizes(sizes, config.path)
    biased = configured_biases(config, architecture)
    for name, key in biased.items():
        if name not in names:
            raise config.error(f"{key} is True, but the weights lack {name}")
    for name, key in configured_biases(config, architecture, value=False).items():
        if name in names and name not in biased and architecture not in ALWAYS_BIASED:
            raise config.error(f"{key} is False, but the weights include {name}")
    tied = config.get("tie_word_embeddings", bool)
    for head_dim in head_dims.values():
        checks.check_sizes({**sizes, "head_dim": head_dim}, config.path)
    longest = served_len or sizes["max_model_len"]
    rotations = _read_rotations(config, sizes, head_dims, longest, may_be_partial=has_partial_rope)
    stretched_len = min((turn.stretched_len for turn in rotations if turn), default=0)
    sizes["max_model_len"] = checks.longest_text(sizes["max_model_len"], longest, stretched_len)
    return spec_of_equal_layers(
        architecture=architecture,
        rope_inv_freq=(),
        has_qkv_bias="layers.0.q_bias" in names,
        norm_eps=config.require("rms_norm_eps", float),
        tie_word_embeddings="output" not in names if tied is None else tied,
        **sizes,
    ).with_layers(lambda number, layer: checks.with_facts(layer, names, rotations[number]))


def configured_biases(config: JsonFile, architecture: str, *, value: bool = True) -> dict[str, str]:
    """Return first-layer bias (`layers.0.q_bias`) -> config.json key, for the keys that are set to `value`."""
    of_attention = ["layers.0.q_bias"] if architecture in _NO_OUTPUT_BIAS else ["layers.0.q_bias", "layers.0.o_bias"]
    of_all = ["layers.0.q_bias", "layers.0.o_bias", "layers.0.down_bias"]
    told = {
        "attention_bias": of_attention,
        "attention_out_bias": ["layers.0.o_bias"],
        "mlp_bias": ["layers.0.down_bias"],
        "qkv_bias": ["layers.0.q_bias"],
        "enable_bias": of_all,
        "use_bias": of_all,
        "use_qkv_bias": ["layers.0.q_bias"],
    }
    return {name: key for key, names in told.items() if config.get(key, bool) is value for name in names}


_NO_OUTPUT_BIAS = ("glm", "glm4", "glm4_moe", "helium", "qwen2", "qwen2_vl", "seed_oss", "solar_open")
"""Architectures in which `attention_bias` does not include the output projection."""
ALWAYS_BIASED = ("qwen2", "qwen2_vl")
"""Architectures whose q, k and v have biases whatever `attention_bias` says."""


def read_bos_id(config: JsonFile, vocab_size: int) -> int | None:
    """Return the id of the token that begins a text, or None. If config.json has a list, return its first id."""
    ids = _token_ids(config, "bos_token_id", vocab_size)
    if len(ids) > 1:
        _log.warning("%s: bos_token_id is %r: the first is used, the others are ignored", config.path, ids)
    return ids[0] if ids else None


def read_eos_ids(config: JsonFile, generation: JsonFile, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of tokens that end a reply, by generation_config.json, then by config.json."""
    ids = [token_id for file in (generation, config) for token_id in _token_ids(file, "eos_token_id", vocab_size)]
    return tuple(dict.fromkeys(ids))


def _token_ids(file: JsonFile, key: str, vocab_size: int) -> list[int]:
    value = file.values.get(key)
    values = value if isinstance(value, list) else [value]
    if not all(item is None or type(item) is int for item in values):
        raise file.error(f"{key} is {value!r}, not a token id or a list of them")
    ids = {f"{key}[{idx}]" if isinstance(value, list) else key: item for idx, item in enumerate(values)}
    return list(checks.token_ids(ids, vocab_size, file.path).values())


def read_special_tokens(path: Path) -> SpecialTokens:
    """Return the special tokens of tokenizer_config.json and special_tokens_map.json by key.

    If both have a key, the first file wins if it has an `added_tokens_decoder`, else the second.
    """
    config = read_json(path / "tokenizer_config.json", is_optional=True)
    special = read_json(path / "special_tokens_map.json", is_optional=True)
    files = (special, config) if "added_tokens_decoder" in config.values else (config, special)
    tokens: dict[str, str | tuple[str, ...] | None] = {}
    for file in files:
        for key, value in file.values.items():
            if key in _NAMES or (key.endswith("_token") and isinstance(value, str | dict)):  # `add_bos_token` is a switch
                tokens[key] = _token_text(file, key, value)
            elif key in _LISTS and isinstance(value, list):
                tokens[key] = tuple(text for item in value if (text := _token_text(file, key, item)))
            elif key == "extra_special_tokens" and isinstance(value, dict):
                tokens |= {name: _token_text(file, name, item) for name, item in value.items()}
    return tokens


def _token_text(file: JsonFile, key: str, value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and type(text) is not str:
        raise file.error(f"{key} is {value!r}, not the text of a token")
    return text


def _read_sizes(config: JsonFile) -> dict[str, int]:
    hidden_size = config.require("hidden_size", int)
    num_heads = config.require("num_attention_heads", int)
    return {
        "vocab_size": config.require("vocab_size", int),
        "hidden_size": hidden_size,
        "num_layers": config.require("num_hidden_layers", int),
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads", int) or num_heads,
        "head_dim": config.get("head_dim", int) or (hidden_size // num_heads if num_heads else 0),
        "intermediate_size": config.require("intermediate_size", int),
        "max_model_len": config.require("max_position_embeddings", int),
    }


def _read_rotations(
    config: JsonFile, sizes: Mapping[str, int], head_dims: Mapping[str, int], served_len: int, *, may_be_partial: bool
) -> list[Rotation | None]:
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"  # transformers prefers rope_scaling
    parameters = config.get(key, dict) or {}
    nested = {name: value for name, value in parameters.items() if isinstance(value, dict)}

    def rotation(of_kind: Mapping[str, Any], head_dim: int) -> Rotation:
        inherited = {name: config.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        settings = JsonFile(config.path, {**inherited, **of_kind})
        found = _rope_parameters(config, settings, key, {**sizes, "head_dim": head_dim})
        if found.dim != head_dim and not may_be_partial:
            settings.only("partial_rotary_factor", 1.0)
        return checks.rotation(found, head_dim, served_len, config.path)

    if not nested:
        return [rotation(parameters, sizes["head_dim"])] * sizes["num_layers"]
    if len(nested) > 16:  # each rotation takes time to compute
        raise config.error(f"{key} has {len(nested)} types of layers; at most 16 are allowed")
    kinds = read_layer_types(config, sizes["num_layers"])
    missing = set(kinds) - parameters.keys()
    if missing:
        raise config.error(f"{key} has nothing for layers of the type {', '.join(sorted(missing))}")
    rotations = {
        name: rotation(nested[name], head_dims.get(name, sizes["head_dim"])) if name in nested else None for name in set(kinds)
    }
    return [rotations[name] for name in kinds]


def read_activation(config: JsonFile, key: str, default: str) -> Activation:
    """Return the activation that a key names. Raises ModelError."""
    name = config.get(key, str) or default
    if name not in _ACTIVATIONS:
        raise checks.unsupported(config.path, f"{key} is {name!r}", f"{', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


def read_layer_types(config: JsonFile, num_layers: int, *known: str) -> list[str]:
    """Return the type of each layer, such as `sliding_attention`, which is one of `known` if given. Raises ModelError."""
    kinds = config.require("layer_types", list)
    if len(kinds) != num_layers or not all(type(kind) is str for kind in kinds):
        raise config.error(f"layer_types is not a list of {num_layers} strings, one for each layer")
    if known and (unknown := set(kinds).difference(known)):
        raise config.error(f"layer_types has the unknown {', '.join(sorted(unknown))}")
    return kinds


_ROPE_KINDS: Mapping[str, rope.Kind] = {kind: kind for kind in get_args(rope.Kind)} | {"mrope": "default", "su": "longrope"}
"""Kinds in config.json -> ours. `mrope` gives a token three positions, which are equal in texts."""
_ROPE_KEYS: Mapping[rope.Kind, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "ntk_alpha": ("alpha",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Keys that a kind requires."""


def _rope_parameters(config: JsonFile, settings: JsonFile, key: str, sizes: Mapping[str, int]) -> rope.RopeParameters:
    """Return the rotary parameters, checked. `settings` are the values under `key`, completed by keys beside it."""
    name = "rope_type" if settings.values.get("rope_type") else "type"
    kind = _ROPE_KINDS.get(settings.get(name, str) or "default")
    if kind is None:
        supported = f"{', '.join(_ROPE_KINDS)} are"
        raise checks.unsupported(config.path, f"{key}.{name} is {settings.values[name]!r}", supported)
    missing = [needed for needed in _ROPE_KEYS.get(kind, ()) if settings.values.get(needed) is None]
    if missing:
        raise config.error(f"{key}.{missing[0]} is missing")

    def number(key: str, default: float) -> float:
        return default if settings.values.get(key) is None else settings.positive(key)

    head_dim, trained_len = sizes["head_dim"], sizes["max_model_len"]
    original_len = config.get("original_max_position_embeddings", int)
    original_len = original_len or settings.get("original_max_position_embeddings", int) or trained_len
    theta, share = number("rope_theta", 10000.0), number("partial_rotary_factor", 1.0)
    dim = int(min(share, 2.0) * head_dim)
    if kind == "proportional":
        dim -= dim % 2
    if not 0 < dim <= head_dim or dim % 2 or not 1 <= original_len <= checks.MAX_MODEL_LEN or theta == 1.0:
        cause = f"partial_rotary_factor {share}, rope_theta {theta} and original_max_position_embeddings {original_len}"
        raise config.error(f"{cause} do not fit heads of {head_dim} columns")
    has_factor = kind in ("yarn", "longrope") and settings.values.get("attention_factor") is not None
    low, high = number("low_freq_factor", 1.0), number("high_freq_factor", 4.0)
    if kind == "llama3" and low >= high:
        raise config.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return rope.RopeParameters(
        kind=kind,
        theta=theta,
        dim=dim,
        trained_len=trained_len,
        original_len=original_len,
        factor=number(
            "alpha" if kind == "ntk_alpha" else "factor", trained_len / original_len if kind in ("yarn", "longrope") else 1.0
        ),
        attention_factor=settings.positive("attention_factor") if has_factor else None,
        attn_factor=number("attn_factor", 1.0),  # vLLM's; transformers ignores it
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=settings.get("mscale", float),
        mscale_all_dim=settings.get("mscale_all_dim", float),
        truncate=settings.get("truncate", bool) is not False,
        short_factor=settings.positives("short_factor", dim // 2) if kind == "longrope" else (),
        long_factor=settings.positives("long_factor", dim // 2) if kind == "longrope" else (),
        query_growth=settings.get("llama_4_scaling_beta", float) or 0.0,
    )


# Tokenizers and chat templates

TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model")  # files of tokenizers, the most exact first
_DEFAULT = "default"


def find_tokenizer(path: Path) -> Path:
    """Return the path of the directory's tokenizer: the first of `TOKENIZERS` that exists. Raises ModelError if none does."""
    for name in TOKENIZERS:
        if (path / name).is_file():
            return path / name
    raise ModelError(
        f"{path}: there is no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}.",
        remedy="Save the fast tokenizer (tokenizer.json) beside the weights.",
    )


def read_chat_templates(path: Path) -> Mapping[str, str]:
    """Return a directory's chat templates by name. One without a name is `default`. Raises ModelError.

    Source: https://huggingface.co/docs/transformers/chat_templating_multiple_templates.
    """
    file = path / "chat_template.jinja"
    others = sorted((path / "additional_chat_templates").glob("*.jinja"))
    if file.is_file() or others:
        named = {other.stem: _read(other) for other in others}
        return {_DEFAULT: _read(file), **named} if file.is_file() else named
    for name in ("tokenizer_config.json", "chat_template.json"):
        config = read_json(path / name, is_optional=True)
        if config.values.get("chat_template") is not None:
            return _named_templates(config)
    return {}


def _named_templates(config: JsonFile) -> Mapping[str, str]:
    found = config.values["chat_template"]
    items = found if isinstance(found, list) else [{"name": _DEFAULT, "template": found}]
    templates: dict[str, str] = {}
    for item in items:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if type(name) is not str or type(template) is not str:
            raise config.error("chat_template is neither a string nor a list of named templates")
        templates[name] = template
    return templates


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise damaged(file, f"can't be read: {error}") from error
