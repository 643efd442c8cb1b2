"""Reads what the JSON files of a Hugging Face directory say about a model. `models.hf` calls it; it opens no weights.

Source: https://huggingface.co/docs/transformers/model_doc/llama; release 5 writes `rope_parameters` where earlier ones
wrote `rope_theta` and `rope_scaling`: both are read.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.models import checks, rope
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec, spec_of_equal_layers
from penstock.types.vocab import SpecialTokens

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of special tokens that most tokenizers have."""
_LISTS = ("additional_special_tokens", "extra_special_tokens")
"""The second is the first one's name since release 5 of transformers; it may be an object of names and tokens, too."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object, the values of which are checked when they are asked for."""

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type[T]) -> T | None:
        """A value, None if absent or null. An int will do for a float. Raises ModelError for another type."""
        value = self.values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key} is {value!r}, not of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """A value that must be there. Raises ModelError."""
        value = self.get(key, kind)
        if value is None:
            raise self.error(f"{key} is missing")
        return value

    def positive(self, key: str) -> float:
        """A finite number above 0 that must be there. Raises ModelError."""
        value = self.require(key, float)
        if not math.isfinite(value) or value <= 0.0:
            raise self.error(f"{key} is {value}, not a positive number")
        return value

    def only(self, key: str, value: object) -> None:
        """Raises ModelError if the key has another value than the one that is supported. It may be absent, or null."""
        found = self.values.get(key)
        if found is not None and found != value:
            raise checks.unsupported(self.path, f"{key} is {found!r}", f"only {value!r} is")

    def error(self, cause: str) -> ModelError:
        """A ModelError that names this file."""
        return ModelError(f"{self.path}: {cause}.", remedy="Check the file, or fetch the model again.")


def read_json(path: Path, *, is_optional: bool = False) -> JsonFile:
    """Parse a JSON object; empty if the file is optional and absent. Raises ModelError."""
    if is_optional and not path.is_file():
        return JsonFile(path, {})
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file.", remedy="Fetch the whole model directory.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: can't be read as JSON: {error}.", remedy="Fetch the file again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: is no JSON object.", remedy="Fetch the file again.")
    return JsonFile(path, values)


def read_spec(config: JsonFile, architecture: str, *, has_qkv_bias: bool, has_output: bool) -> ModelSpec:
    """Reads the keys that most models share into layers that are all alike. The two facts are known from the weights.

    Raises ModelError. `Architecture.of_hf` applies the other keys.
    """
    config.only("partial_rotary_factor", 1.0)
    sizes = _read_sizes(config)
    checks.check_sizes(sizes, config.path)
    tied = config.get("tie_word_embeddings", bool)
    return spec_of_equal_layers(
        architecture=architecture,
        rope_inv_freq=_read_rope(config, sizes["head_dim"]),
        has_qkv_bias=has_qkv_bias,
        norm_eps=config.require("rms_norm_eps", float),
        tie_word_embeddings=not has_output if tied is None else tied,
        **sizes,
    )


def read_bos_id(config: JsonFile, vocab_size: int) -> int | None:
    """The token that begins a text, None if config.json names none; the first one of a list. Raises ModelError."""
    ids = _token_ids(config, "bos_token_id", vocab_size)
    if len(ids) > 1:
        _log.warning("%s: bos_token_id is %r; the first is taken, the others are passed over", config.path, ids)
    return ids[0] if ids else None


def read_eos_ids(config: JsonFile, generation: JsonFile, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a reply: those of generation_config.json, then those of config.json. Raises ModelError."""
    ids = [token_id for file in (generation, config) for token_id in _token_ids(file, "eos_token_id", vocab_size)]
    return tuple(dict.fromkeys(ids))


def _token_ids(file: JsonFile, key: str, vocab_size: int) -> list[int]:
    """The ids under a key that holds an id, a list of them, or null."""
    value = file.values.get(key)
    values = value if isinstance(value, list) else [value]
    if not all(item is None or type(item) is int for item in values):
        raise file.error(f"{key} is {value!r}, not a token id or a list of them")
    ids = {f"{key}[{idx}]" if isinstance(value, list) else key: item for idx, item in enumerate(values)}
    return list(checks.token_ids(ids, vocab_size, file.path).values())


def read_special_tokens(path: Path) -> SpecialTokens:
    """The special tokens in tokenizer_config.json and special_tokens_map.json of a directory, by key; empty without them.

    These are the names that transformers hands to chat templates: every token whose key ends in `_token`, the lists, and
    what `extra_special_tokens` names. As there, special_tokens_map.json comes first unless tokenizer_config.json has an
    `added_tokens_decoder`, as newer ones do. Raises ModelError.
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
    """A token is its text, or an object with its text as `content`; null is none."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and type(text) is not str:
        raise file.error(f"{key} is {value!r}, not the text of a token")
    return text


def _read_sizes(config: JsonFile) -> dict[str, int]:
    """By their names in the specs."""
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


def _read_rope(config: JsonFile, head_dim: int) -> tuple[float, ...]:
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"  # of both, transformers takes this one
    parameters = config.get(key, dict) or {}
    if layer_types := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise checks.unsupported(config.path, f"{key} names {', '.join(layer_types)}", "one rope for all layers is")
    scaling = JsonFile(config.path, {"rope_theta": config.values.get("rope_theta"), **parameters})
    scaling.only("partial_rotary_factor", 1.0)
    base = scaling.positive("rope_theta") if scaling.values["rope_theta"] is not None else 10000.0
    inv_freq = rope.inverse_frequencies(head_dim, base)
    kind = scaling.get("rope_type", str) or scaling.get("type", str) or "default"
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return rope.scale_linear(inv_freq, scaling.positive("factor"))
    if kind == "llama3":
        return _scale_llama3(inv_freq, scaling)
    name = "rope_type" if scaling.values.get("rope_type") else "type"
    raise checks.unsupported(config.path, f"{key}.{name} is {kind!r}", "default, linear and llama3 are")


def _scale_llama3(inv_freq: tuple[float, ...], scaling: JsonFile) -> tuple[float, ...]:
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if low >= high:
        raise scaling.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return rope.scale_llama3(
        inv_freq,
        factor=scaling.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=scaling.require("original_max_position_embeddings", int),
    )
